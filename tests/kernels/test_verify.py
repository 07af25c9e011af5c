"""Verify and batch verify on every backend: golden files, reported faults, properties, hostile values."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import BlockTable, KvCanaryError, StatusBit
from cupy_kvcanary.buffers import CHAINS, forget_chain, remember_chain
from cupy_kvcanary.constants import WIDE_KV_BYTES
from cupy_kvcanary.launch import BACKENDS, NumpyBackend
from cupy_kvcanary.ops.verify import launch_canary_verify_kernel
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer, HostSource, link, signed
from tests.helpers.golden import GoldenFile
from tests.helpers.verify import (
    ANCHOR,
    Batch,
    Entry,
    batch_launch,
    expected_skips,
    expected_violations,
    make_plan,
    verify_batch,
    verify_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDEN = GoldenFile("verify.npz")


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    sources = [
        HostSource(inputs[f"real_kv_source_{i}"], *(int(size) for size in inputs[f"real_kv_source_{i}_params"]))
        for i in range(inputs["num_real_kv_sources"])
    ]
    buffer = HostBuffer(
        inputs["canary_buf"].copy(),
        inputs["kernel_kind"],
        inputs["ring_capacity"],
        sources=sources,
        mode=inputs["real_kv_hash_mode"],
    )
    columns = ("slot_indices", "prev_slot_indices", "expected_positions", "expected_tokens")
    entries = list(zip(*(inputs[f"verify_{column}"].tolist() for column in columns), strict=True))
    plan = make_plan(
        backend,
        [Entry(*entry) for entry in entries],
        num_valid=int(inputs["verify_num_valid"][0]),
        enable=int(inputs["enable"][0]),
    )
    verify_plan(backend, [buffer], plan, check_tokens=bool(inputs["check_verify_expected_token"]))
    assert buffer.violations == sorted(tuple(row) for row in outputs["violations"].tolist())
    assert buffer.violation_count == outputs["violation_write_index"][0]
    assert buffer.slot_run_counter == outputs["slot_run_counter"][0]
    assert buffer.kernel_run_counter == outputs["kernel_run_counter"][0]
    np.testing.assert_array_equal(buffer.canary_buf, inputs["canary_buf"])


# -- faults that users reported -----------------------------------------------------------------------------------

SLOTS = [5, 9, 3, 7, 11, 13]
TOKENS = [11, 12, 13, 14, 15, 16]


def stamped(chain: str = "splitmix64", num_slots: int = 64, **options: Any) -> HostBuffer:
    """Fixture F1: row 2 of the table, six tokens, stamped."""
    buffer = HostBuffer.empty(num_slots, **options)
    buffer.stamp(SLOTS, TOKENS, chain)
    return buffer


def row_2(slots: list[int] = SLOTS, **options: Any) -> Batch:
    table = np.zeros((6, 16), np.int32)
    table[2, : len(slots)] = slots
    return Batch(table, [2], [options.pop("prefix", len(slots))], **options)


def found(backend: ArrayBackend, buffer: HostBuffer, batch: Batch, **options: Any) -> dict[int, int]:
    """Reason bits by slot, from the batch launcher; the plan launcher must find exactly the same rows."""
    from_plan = copy.deepcopy(buffer)
    plan = make_plan(backend, batch.entries())
    verify_plan(backend, [from_plan], plan, check_tokens=batch.check_tokens, **options)
    verify_batch(backend, [buffer], batch, **options)
    assert buffer.violations == from_plan.violations
    assert buffer.slot_run_counter == from_plan.slot_run_counter == len(batch.entries())
    assert buffer.kernel_run_counter == from_plan.kernel_run_counter == 1
    return {row[1]: row[7] for row in buffer.violations}


def test_f1_is_clean_and_has_the_known_hashes(backend: ArrayBackend) -> None:
    buffer = stamped()
    hashes = [buffer.record(slot)[2] for slot in SLOTS[:3]]
    assert hashes == [0xDE7FAE23A9A1B716, 0x89CD2ABFBEBC0649, 0x13F5BAAFE6EF85D6]
    assert found(backend, buffer, row_2()) == {}


@pytest.mark.parametrize("chain", CHAINS)
class TestReportedFaults:
    """Cases of the fault catalogue, by number; both chains find the same."""

    def test_04_window_and_mapping(self, backend: ArrayBackend, chain: str) -> None:
        mapping = np.zeros(64, np.int64)
        mapping[[3, 7, 9, 11]] = [33, 37, 39, 41]
        batch = row_2(prefix=5, window=3, mapping=mapping)
        assert batch.entries() == [Entry(33, 39, 2), Entry(37, 33, 3), Entry(41, 37, 4)]
        buffer = HostBuffer.empty(64)
        buffer.stamp([39, 33, 37, 41], TOKENS[1:5], chain, first_position=1)
        assert found(backend, buffer, batch, chain=chain) == {}
        buffer.set_record(33, 99)
        assert found(backend, buffer, batch, chain=chain) == {37: 1}

    def test_05_a_changed_token_is_seen_at_its_successor(self, backend: ArrayBackend, chain: str) -> None:
        buffer = stamped(chain)
        buffer.set_record(7, 99)
        assert found(backend, buffer, row_2(), chain=chain) == {11: 1}
        assert buffer.violations[0][2] == 4

    def test_06_a_slot_restamped_by_another_request(self, backend: ArrayBackend, chain: str) -> None:
        buffer = stamped(chain)
        buffer.stamp([3], [77], chain)
        assert found(backend, buffer, row_2(), chain=chain) == {3: 2, 7: 1} | {3: 3}

    @pytest.mark.parametrize(
        ("zeroed", "bits"),
        [
            ([5], {5: 1, 9: 1}),
            ([3, 7], {3: 3, 7: 2, 11: 1}),
            (range(64), {5: 1, 9: 2, 3: 2, 7: 2, 11: 2, 13: 2}),
        ],
    )
    def test_07_zeroed_records(
        self, backend: ArrayBackend, chain: str, zeroed: list[int], bits: dict[int, int]
    ) -> None:
        buffer = stamped(chain)
        for slot in zeroed:
            buffer.set_record(slot, 0, 0, 0, 0)
        assert found(backend, buffer, row_2(), chain=chain) == bits

    def test_08_a_shifted_page_table_row(self, backend: ArrayBackend, chain: str) -> None:
        batch = row_2([0, *SLOTS[:5]])
        assert found(backend, stamped(chain), batch, chain=chain) == dict.fromkeys(SLOTS[:5], 2)

    def test_09_exchanged_rows_need_expected_tokens(self, backend: ArrayBackend, chain: str) -> None:
        table = np.zeros((6, 16), np.int32)
        table[2, :4], table[4, :4] = [20, 21, 22, 23], SLOTS[:4]
        buffer = HostBuffer.empty(64)
        buffer.stamp(SLOTS[:4], TOKENS[:4], chain)
        buffer.stamp([20, 21, 22, 23], [31, 32, 33, 34], chain)
        assert found(backend, copy.deepcopy(buffer), Batch(table, [2, 4], [4, 4]), chain=chain) == {}
        expected = np.zeros((6, 16), np.int32)
        expected[2, :4], expected[4, :4] = TOKENS[:4], [31, 32, 33, 34]
        batch = Batch(table, [2, 4], [4, 4], expected=expected, valid_lens=[4, 4])
        assert found(backend, buffer, batch, chain=chain) == dict.fromkeys([*SLOTS[:4], 20, 21, 22, 23], 32)

    def test_10_a_finished_request_writes_late(self, backend: ArrayBackend, chain: str) -> None:
        buffer = stamped(chain)
        buffer.stamp([20, 21, 22, 23, 24], [31, 32, 33, 34, 35], chain)
        # The late writer's own chain runs through 20, 21 and 22.
        late = HostBuffer.empty(64)
        late.stamp([5, 9, 3, 7, 11, 13, 20, 21, 22], [*TOKENS, 17, 18, 19], chain)
        for slot in (20, 21, 22):
            buffer.set_record(slot, *late.record(slot))
        bits = found(backend, buffer, row_2([20, 21, 22, 23, 24]), chain=chain)
        assert bits == {20: 3, 21: 2, 22: 2, 23: 1}

    def test_11_a_hole_in_a_live_prefix(self, backend: ArrayBackend, chain: str) -> None:
        batch = row_2([5, 9, 3, 0, 11, 13])
        assert found(backend, stamped(chain), batch, chain=chain) == {}
        assert found(backend, stamped(chain), batch, chain=chain, check_holes=True) == {0: 512}

    def test_14_a_slot_outside_the_buffer(self, backend: ArrayBackend, chain: str) -> None:
        batch = row_2([5, 9, 1_000_000, 7])
        bits = found(backend, stamped(chain), batch, chain=chain)
        assert bits == {1_000_000: 64, 7: 128}
        assert found(backend, stamped(chain), row_2([5, -3, 7]), chain=chain) == {-3: 64, 7: 3}

    def test_28_speculative_decode(self, backend: ArrayBackend, chain: str) -> None:
        slots = [*SLOTS, 30, 31, 32, 33]
        buffer = HostBuffer.empty(64)
        buffer.stamp(slots, [*TOKENS, 17, 18, 19, 20], chain)  # drafts at positions 6 to 9
        accepted = HostBuffer.empty(64)
        accepted.stamp(slots[:8], [*TOKENS, 17, 60], chain)  # one accepted, then another token at position 7
        buffer.set_record(31, *accepted.record(31))
        assert found(backend, copy.deepcopy(buffer), row_2(slots[:8]), chain=chain) == {}
        assert found(backend, buffer, row_2(slots[:9]), chain=chain) == {32: 1}

    def test_29_pages_that_went_to_the_host_and_back(self, backend: ArrayBackend, chain: str) -> None:
        kv = np.random.default_rng(0).integers(0, 256, (64, 32), dtype=np.uint8)
        source = HostSource(kv, 1, 32, 32)
        buffer = HostBuffer.empty(64, sources=[source], mode=2)
        buffer.stamp(SLOTS, TOKENS, chain)
        moved = {5: 40, 9: 41, 3: 42}
        for old, new in moved.items():
            kv[new] = kv[old]
        batch = row_2([40, 41, 42, 7, 11, 13])
        without_records = found(backend, copy.deepcopy(buffer), batch, chain=chain)
        assert set(without_records) >= {40, 41, 42}
        for old, new in moved.items():
            buffer.set_record(new, *buffer.record(old))
        assert found(backend, buffer, batch, chain=chain) == {}

    def test_30_a_ring_of_slots_under_a_window(self, backend: ArrayBackend, chain: str) -> None:
        ring = [1 + position % 8 for position in range(20)]
        buffer = HostBuffer.empty(16)
        buffer.stamp(ring, list(range(100, 120)), chain)
        table = np.zeros((3, 24), np.int32)
        table[2, 12:20] = ring[12:]
        cleared = Batch(table.copy(), [2], [20], window=8)
        assert found(backend, copy.deepcopy(buffer), cleared, chain=chain) == {}
        table[2, :20] = ring
        assert found(backend, buffer, Batch(table, [2], [20], window=8), chain=chain) == {ring[12]: 1}


# -- details of violations, and skipped checks ---------------------------------------------------------------------


def test_05_in_detail(backend: ArrayBackend) -> None:
    """Slot 11 does not follow on the damaged record of slot 7; the details show that record and the one behind."""
    buffer = stamped(is_detailed=True)
    hashes = [signed(buffer.record(slot)[2]) for slot in SLOTS]
    buffer.set_record(7, 99)
    expected = signed(link("splitmix64", *buffer.record(7)[:3]))
    row = (0, 11, 4, 15, -1, hashes[4], expected, 1)
    from_plan = copy.deepcopy(buffer)
    verify_plan(backend, [from_plan], make_plan(backend, row_2().entries()), check_tokens=False)
    assert from_plan.violations == [(*row, -1, -1, 4, 7, 99, 3, hashes[3], -1, 0, 0, 0, 0, 0)]
    verify_batch(backend, [buffer], row_2())
    assert buffer.violations == [(*row, 0, 2, 4, 7, 99, 3, hashes[3], 13, 16, 5, hashes[5], 0, 0)]
    assert buffer.skip_counters.tolist() == from_plan.skip_counters.tolist() == [0, 0]


def test_06_in_detail(backend: ArrayBackend) -> None:
    """Slot 3 holds another request's first token, in the middle of request 1 of the batch."""
    kv = np.random.default_rng(0).integers(0, 256, (64, 32), dtype=np.uint8)
    buffer = stamped(is_detailed=True, sources=[HostSource(kv, 1, 32, 32)], mode=2)
    hashes = [signed(buffer.record(slot)[2]) for slot in SLOTS]
    buffer.stamp([3], [77])
    kv[3, 0] ^= 1
    stored, now = signed(buffer.record(3)[3]), signed(buffer.real_kv_hash(3))
    anchor, of_9, of_3 = (signed(h) for h in (ANCHOR, *(link("splitmix64", *buffer.record(s)[:3]) for s in (9, 3))))
    table = np.zeros((6, 16), np.int32)
    table[2, :6] = SLOTS
    verify_batch(backend, [buffer], Batch(table, [0, 2], [9, 6]))
    of_7 = signed(buffer.record(7)[3])
    assert buffer.violations == [
        (0, 3, 0, 77, -1, anchor, of_9, 7, 1, 2, 2, 9, 12, 1, hashes[1], 7, 14, 3, hashes[3], stored, now),
        (0, 7, 3, 14, -1, hashes[3], of_3, 1, 1, 2, 3, 3, 77, 0, anchor, 11, 15, 4, hashes[4], of_7, of_7),
    ]


def test_details_of_what_cannot_be_read(backend: ArrayBackend) -> None:
    """A hole and slots that the buffer does not have, as themselves and as neighbours."""
    buffer = stamped(is_detailed=True)
    batch = row_2([5, 0, 64, -3, 13])
    verify_batch(backend, [buffer], batch, check_holes=True)
    details = {(row[1], row[7]): row[8:] for row in buffer.violations}
    h = [signed(value) for value in buffer.record(5)[:3]]
    assert details == {
        (0, 512): (0, 2, 1, 5, *h, 64, 0, 0, 0, 0, 0),
        (64, 64): (0, 2, 2, 0, 0, 0, 0, -3, 0, 0, 0, 0, 0),
        (-3, 64 | 128): (0, 2, 3, 64, 0, 0, 0, 13, *map(signed, buffer.record(13)[:3]), 0, 0),
        (13, 3): (0, 2, 4, -3, 0, 0, 0, -1, 0, 0, 0, 0, 0),
    }
    assert buffer.skip_counters.tolist() == [2, 0]


@pytest.mark.parametrize("check_holes", [False, True])
def test_11_skipped_checks_are_counted(backend: ArrayBackend, check_holes: bool) -> None:
    """The hole itself and what follows on it; a hole behind a hole counts once."""
    buffer = stamped(is_detailed=True)
    for slots, total in (([5, 9, 3, 0, 11, 13], 2), ([5, 9, 0, 0, 11, 0], 6), (SLOTS, 6)):
        verify_batch(backend, [buffer], row_2(slots), check_holes=check_holes)
        assert buffer.skip_counters.tolist() == [total, 0]
    verify_plan(
        backend, [buffer], make_plan(backend, row_2([0, 0, 3]).entries()), check_tokens=False, check_holes=check_holes
    )
    assert buffer.skip_counters.tolist() == [9, 0]


def test_disabled_launches_are_counted(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64, is_detailed=True)
    verify_plan(backend, [buffer], make_plan(backend, row_2().entries(), enable=0), check_tokens=False)
    verify_batch(backend, [buffer], row_2(), verify_capacity=5)
    verify_batch(backend, [buffer], row_2(), verify_capacity=6)
    assert buffer.skip_counters.tolist() == [0, 2]


@pytest.mark.parametrize("count", [33, 32769])
def test_many_skipped_checks(backend: ArrayBackend, count: int) -> None:
    buffer = HostBuffer.empty(4, is_detailed=True)
    verify_batch(backend, [buffer], Batch(np.zeros((2, count), np.int32), [1], [count]))
    assert buffer.skip_counters.tolist() == [count, 0]


def test_details_beyond_the_ring_are_not_stored(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64, ring_capacity=2, is_detailed=True)
    verify_batch(backend, [buffer], row_2())
    assert buffer.violation_count == 6
    assert len(buffer.violations) == 2


def test_buffers_share_details_and_counters(backend: ArrayBackend) -> None:
    first = HostBuffer.empty(64, is_detailed=True, kernel_kind=1).on_device(backend)
    second = replace(first, canary_buf=backend.array(np.zeros((64, 32), np.uint8)), kernel_kind=2)
    plan = make_plan(backend, row_2([5, 0, 3]).entries())
    launch_canary_verify_kernel(context=[first, second], plan=plan, check_verify_expected_token=False)
    result = HostBuffer.empty(64, is_detailed=True)
    result.read_back(backend, first)
    assert [row[:2] + row[9:12] for row in result.violations] == [
        (kind, slot, -1, position, prev) for kind in (1, 2) for slot, position, prev in ((3, 2, 0), (5, 0, -1))
    ]
    assert result.skip_counters.tolist() == [4, 0]


# -- limits -------------------------------------------------------------------------------------------------------


def test_15_a_prefix_longer_than_its_row_is_clamped(backend: ArrayBackend) -> None:
    table = np.zeros((6, 6), np.int32)
    table[2], table[3] = SLOTS, 60  # the next row must not be read
    buffer = stamped()
    assert verify_batch(backend, [buffer], Batch(table, [2, 9], [7, 1])) == (
        StatusBit.PREFIX_LEN_OUT_OF_RANGE | StatusBit.REQUEST_ROW_OUT_OF_RANGE
    )
    assert buffer.violations == []
    assert buffer.slot_run_counter == 6


def test_16_the_violation_counter_saturates(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64, ring_capacity=4, violation_count=2**31 - 2)
    verify_batch(backend, [buffer], row_2(SLOTS[:3]))
    assert buffer.violation_count == 2**31 - 1
    assert (buffer.ring == -7777).all()


def test_violations_beyond_the_ring_are_counted(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64, ring_capacity=2)
    verify_batch(backend, [buffer], row_2())
    assert buffer.violation_count == 6
    assert len(buffer.violations) == 2


@pytest.mark.parametrize(("mode", "known"), [(2, 0xB44181DFE9420039), (1, 0xD6D75024DFD6C30C)])
def test_17_real_kv_hashes(backend: ArrayBackend, mode: int, known: int) -> None:
    kv = np.arange(64 * 32, dtype=np.uint8).reshape(64, 32)
    kv[5] = np.arange(32)
    buffer = HostBuffer.empty(64, sources=[HostSource(kv, 1, 32, 32)], mode=mode)
    buffer.stamp(SLOTS, TOKENS)
    assert buffer.record(5)[3] == known
    assert found(backend, buffer, row_2()) == {}


def test_18_exchanged_kv_bytes_within_a_page(backend: ArrayBackend) -> None:
    kv = np.random.default_rng(0).integers(0, 256, (16, 4 * 48), dtype=np.uint8)
    buffer = HostBuffer.empty(64, sources=[HostSource(kv, 4, 48, 48)], mode=2)
    buffer.stamp([5, 6, 9], TOKENS[:3])
    pages = kv.reshape(16, 4, 48)
    pages[1, [1, 2]] = pages[1, [2, 1]]
    assert found(backend, buffer, row_2([5, 6, 9])) == {5: 4, 6: 4}


def test_19_one_layer_of_a_larger_buffer(backend: ArrayBackend) -> None:
    """The layer is read by the larger buffer's stride; another layer's bytes are not looked at."""
    layers = np.random.default_rng(0).integers(0, 256, (8, 4, 32), dtype=np.uint8)
    whole = backend.array(layers)
    buffer = HostBuffer.empty(8, sources=[HostSource(layers[:, 1], 1, 32, 32)], mode=2)
    buffer.stamp([5, 2, 3], TOKENS[:3])

    def bits_with(change: tuple[int, int]) -> dict[int, int]:
        whole[5, change[0], change[1]] ^= 1
        context = HostBuffer(buffer.canary_buf.copy(), sources=buffer.sources, mode=2).on_device(backend)
        source = type(context.real_kv_sources[0])(
            tensor=whole[:, 1], page_size=1, num_bytes_per_token=32, read_bytes=32
        )
        context = type(context)(
            **{
                name: getattr(context, name)
                for name in context.__dataclass_fields__
                if name not in ("view", "real_kv_sources")
            },
            real_kv_sources=(source,),
        )
        plan = make_plan(backend, row_2([5, 2, 3]).entries())
        launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=False)
        result = HostBuffer(buffer.canary_buf.copy())
        result.read_back(backend, context)
        return {row[1]: row[7] for row in result.violations}

    assert bits_with((0, 7)) == {}
    assert bits_with((1, 7)) == {5: 4}


@pytest.mark.parametrize("count", [1, 31, 32, 33, 511, 513, 32769])
def test_22_the_slot_counter_equals_the_entries(backend: ArrayBackend, count: int) -> None:
    table = np.zeros((2, count), np.int32)  # all in the padding slot: counted, not checked
    buffer = HostBuffer.empty(4)
    verify_batch(backend, [buffer], Batch(table, [1], [count]))
    assert (buffer.slot_run_counter, buffer.violation_count) == (count, 0)


def test_a_disabled_plan_is_not_verified_but_counted(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64)
    verify_plan(backend, [buffer], make_plan(backend, row_2().entries(), enable=0), check_tokens=False)
    assert (buffer.kernel_run_counter, buffer.slot_run_counter, buffer.violation_count) == (1, 0, 0)
    verify_batch(backend, [buffer], row_2(), verify_capacity=5)
    assert (buffer.kernel_run_counter, buffer.slot_run_counter, buffer.violation_count) == (1, 0, 0)


def test_without_a_padding_slot_slot_0_is_checked(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64)
    buffer.stamp([0, 9, 3], TOKENS[:3])
    assert found(backend, copy.deepcopy(buffer), row_2([0, 9, 3]), padding_slot=None) == {}
    buffer.set_record(0, 99)
    assert found(backend, buffer, row_2([0, 9, 3]), padding_slot=None) == {9: 1}


@pytest.mark.parametrize(("said", "verified"), [(1, 1), (0, 0), (2, 2), (9, 2)])
def test_a_batch_size_in_device_memory(backend: ArrayBackend, said: int, verified: int) -> None:
    table = np.zeros((6, 16), np.int32)
    table[2, :6], table[4, :3] = SLOTS, [20, 21, 22]
    buffer = HostBuffer.empty(64)
    batch = Batch(table, [2, 4], [6, 3])
    verify_batch(backend, [buffer], batch, bs_on_device=said)
    seen = Batch(table, [2, 4][:verified], [6, 3][:verified]).entries()
    assert buffer.slot_run_counter == len(seen)
    assert buffer.violations == expected_violations(HostBuffer.empty(64), seen, check_tokens=False)


def test_many_buffers_in_one_launch(backend: ArrayBackend) -> None:
    buffers = [stamped(num_slots=64 + kind, kernel_kind=kind) for kind in range(12)]
    buffers[3].set_record(7, 99)
    buffers[11].set_record(3, 13, 5)
    verify_batch(backend, buffers, row_2())
    assert [[row[:2] + row[7:] for row in buffer.violations] for buffer in buffers] == [
        *[[]] * 3,
        [(3, 11, 1)],
        *[[]] * 7,
        [(11, 3, 2), (11, 7, 1)],
    ]
    assert all(buffer.slot_run_counter == 6 for buffer in buffers)


# -- the kernels of a batch ---------------------------------------------------------------------------------------

Kind = Literal["general", "wide", "plain", "fours"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def buffers_for(kind: Kind, num_slots: int, **options: Any) -> list[HostBuffer]:
    """Empty buffers, with which a batch of int32 slots, without mapping and expected tokens, takes the kernel."""
    if kind == "wide":
        kv = np.random.default_rng(0).integers(0, 256, (num_slots, 272), dtype=np.uint8)
        options |= {"sources": [HostSource(kv, 1, 272, 272)], "mode": 2}
    return [
        HostBuffer.empty(num_slots, 40 if kind == "general" else 32, kernel_kind=i, **options)
        for i in range(4 if kind == "fours" else 1)
    ]


def source_of(hashed: int, num_slots: int = 64, *, page_size: int = 1, behind: int = 0) -> HostSource:
    """Random KV bytes: `hashed` of them in each slot, and `behind` that are not."""
    width = hashed + behind
    kv = np.random.default_rng(hashed).integers(0, 256, (num_slots // page_size, page_size * width), dtype=np.uint8)
    return HostSource(kv, page_size, width, hashed)


def entry_of(buffers: Sequence[HostBuffer], **changed: Any) -> str:
    """The kernel that a batch takes, without what all names begin with."""
    contexts = [buffer.on_device(ArrayBackend("numpy")) for buffer in buffers]
    return batch_launch(contexts, **changed).entry.removeprefix("kvc_verify_batch")


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_for_a_kernel_take_it(kind: Kind) -> None:
    assert entry_of(buffers_for(kind, 8)) == {"general": "", "fours": "_plain_fours"}.get(kind, f"_{kind}")


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("num_buffers", range(1, 13))
def test_buffers_are_looked_at_by_the_four(num_buffers: int, chain: str) -> None:
    suffix = "_affine" if chain == "affine" else ""
    buffers = [HostBuffer.empty(8) for _ in range(num_buffers)]
    assert entry_of(buffers, chain=chain) == ("_plain" if num_buffers % 4 else "_plain_fours") + suffix


STRIDE_40 = HostBuffer.empty(8, 40)
AT_8_BYTES = HostBuffer(np.zeros((9, 32), np.uint8).reshape(-1)[8:264].reshape(8, 32))


@pytest.mark.parametrize(
    ("last", "changed", "entry"),
    [
        # Buffers of one group have as many slots; what else differs does not matter.
        (HostBuffer.empty(9), {}, "_plain"),
        (HostBuffer.empty(8, 48), {}, "_plain_fours"),
        (HostBuffer.empty(8, is_detailed=True), {}, "_plain_fours"),
        # Records of 16-byte parts.
        (STRIDE_40, {}, ""),
        (AT_8_BYTES, {}, ""),
        # Entries that are slots, and nothing but their records to check.
        (None, {"req_to_token": np.zeros((3, 3), np.int64)}, ""),
        (None, {"req_to_token": BlockTable(block_table=np.zeros((3, 3), np.int32), page_size=1)}, ""),
        (None, {"full_to_swa_index_mapping": np.zeros(8, np.int64)}, ""),
        (None, {"check_verify_expected_token": True}, ""),
        (None, {"swa_window_size": 2, "check_holes": True, "padding_slot": None}, "_plain_fours"),
        (HostBuffer.empty(8, sources=[source_of(16, 8)], mode=0), {}, "_plain_fours"),
        # KV bytes, by the widest source.
        (HostBuffer.empty(8, sources=[source_of(16, 8)], mode=2), {}, ""),
        (HostBuffer.empty(8, sources=[source_of(WIDE_KV_BYTES - 16, 8, behind=16)], mode=2), {}, ""),
        (HostBuffer.empty(8, sources=[source_of(WIDE_KV_BYTES, 8)], mode=2), {}, "_wide"),
        (HostBuffer.empty(8, sources=[source_of(16, 8), source_of(WIDE_KV_BYTES, 8)], mode=2), {}, "_wide"),
        (HostBuffer.empty(9, 40, sources=[source_of(WIDE_KV_BYTES, 9)], mode=2), {}, "_wide"),
        (
            HostBuffer.empty(8, sources=[source_of(WIDE_KV_BYTES, 8)], mode=2),
            {"full_to_swa_index_mapping": np.zeros(8, np.int64), "check_verify_expected_token": True},
            "_wide",
        ),
        (HostBuffer.empty(8, sources=[source_of(WIDE_KV_BYTES, 8)], mode=1), {}, ""),
    ],
)
def test_a_batch_takes_a_kernel_with_what_it_needs(
    last: HostBuffer | None, changed: dict[str, Any], entry: str
) -> None:
    """The fourth of four buffers decides as well as the first."""
    others = [HostBuffer.empty(8) for _ in range(3)]
    last = last or HostBuffer.empty(8)
    assert entry_of([*others, last], **changed) == entry
    assert entry_of([last, *others], **changed) == entry


@pytest.mark.parametrize(
    ("kind", "num_entries", "blocks"),
    [
        *((kind, n, blocks) for kind in KINDS for n, blocks in ((1, 1), (256, 1), (257, 2))),
        ("general", 2**20, 528),
        ("plain", 2**20, 528),
        ("wide", 2**20, 264),
        ("fours", 2**20, 264),
    ],
)
def test_blocks_of_a_batch(kind: Kind, num_entries: int, blocks: int) -> None:
    """A block for 256 entries, up to as many as a GPU has at once, for each buffer or four of them."""
    buffers = [*buffers_for(kind, 8), *buffers_for(kind, 8)]
    contexts = [buffer.on_device(ArrayBackend("numpy")) for buffer in buffers]
    for changed in (
        {"req_to_token": np.zeros((1, num_entries), np.int32), "bs": 1, "verify_capacity": 2**21},
        {"req_to_token": np.zeros((1, 2**21), np.int32), "bs": 1, "verify_capacity": num_entries},
    ):
        launch = batch_launch(contexts, **changed)
        assert (launch.grid, launch.block) == (2 * blocks, 256)
    assert launch.args.nbytes < 4096


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_several_rows(backend: ArrayBackend, kind: Kind) -> None:
    """70 entries to a warp, with the ends of requests between them; each buffer has damage of its own."""
    lens = [200, 1, 0, 170, 189]
    rng = np.random.default_rng(0)
    num_slots = sum(lens) + 1
    table = np.zeros((6, 200), np.int32)
    buffers = buffers_for(kind, num_slots, ring_capacity=600, is_detailed=True)
    slots = np.split(rng.permutation(num_slots - 1) + 1, np.cumsum(lens)[:-1])
    for row, length in enumerate(lens, 1):
        table[row, :length] = slots[row - 1]
        for buffer in buffers:
            buffer.stamp(slots[row - 1].tolist(), rng.integers(0, 1000, length).tolist())
    batch = Batch(table, [1, 2, 3, 4, 5], lens)
    one_block = {"_MULTIPROCESSORS": 1, "VERIFY_BLOCKS": 1, "VERIFY_LARGE_BLOCKS": 1}
    with mock.patch.multiple("cupy_kvcanary.ops.verify", **one_block):
        verify_batch(backend, buffers, batch)
        assert [buffer.violations for buffer in buffers] == [[]] * len(buffers)
        for buffer in buffers:
            for slot in rng.integers(1, num_slots, 5):
                buffer.set_record(int(slot), 1001)
        table[1, [7, 99]], table[4, [0, 31, 32]], table[5, 188] = 0, num_slots, -1
        expected = [
            expected_violations(buffer, batch.entries(), check_tokens=False, origins=batch.origins())
            for buffer in buffers
        ]
        verify_batch(backend, buffers, batch)
    assert [buffer.violations for buffer in buffers] == expected
    assert all(buffer.skip_counters.tolist() == [expected_skips(batch.entries()), 0] for buffer in buffers)


class TestWideKv:
    @pytest.mark.parametrize("hashed", [WIDE_KV_BYTES, 272, 400, 2064])
    def test_every_hashed_byte_counts_and_no_other(self, backend: ArrayBackend, hashed: int) -> None:
        """128 bytes are loaded at a time; the last ones may be fewer."""
        source = source_of(hashed, page_size=4, behind=16)
        clean = stamped(sources=[source], mode=2)
        bytes_of = source.tensor.reshape(64, -1)
        assert found(backend, copy.deepcopy(clean), row_2()) == {}
        for offset in (0, 127, 128, hashed - 16, hashed - 1):
            bytes_of[3, offset] ^= 1
            assert found(backend, copy.deepcopy(clean), row_2()) == {3: 4}, offset
            bytes_of[3, offset] ^= 1
        bytes_of[3, hashed] ^= 1
        assert found(backend, clean, row_2()) == {}

    @pytest.mark.parametrize("widths", [(32, 272), (272, 32), (16, 256, 400, 144)])
    def test_sources_of_different_width(self, backend: ArrayBackend, widths: tuple[int, ...]) -> None:
        sources = [source_of(width, page_size=1 + i % 2, behind=16 * i) for i, width in enumerate(widths)]
        clean = stamped(sources=sources, mode=2)
        assert found(backend, copy.deepcopy(clean), row_2()) == {}
        for source in sources:
            bytes_of = source.tensor.reshape(64, -1)
            for slot, offset in ((5, 0), (13, source.read_bytes - 1)):
                bytes_of[slot, offset] ^= 1
                assert found(backend, copy.deepcopy(clean), row_2()) == {slot: 4}
                bytes_of[slot, offset] ^= 1

    @pytest.mark.parametrize("check_holes", [False, True])
    def test_lanes_without_kv_bytes(self, backend: ArrayBackend, check_holes: bool) -> None:
        """Padding slots and slots that the buffer does not have, the first and the last lane among them."""
        slots = [0 if i % 5 == 0 else (64, -3, 2**31 - 1)[i % 3] if i % 7 == 3 else i + 1 for i in range(46)]
        buffer = HostBuffer.empty(64, sources=[source_of(272), source_of(16)], mode=2, is_detailed=True)
        buffer.stamp(list(range(1, 47)), list(range(46)))
        batch = Batch(np.array([[0] * 46, slots], np.int32), [1], [46])
        options = {"check_holes": check_holes}
        expected = expected_violations(buffer, batch.entries(), check_tokens=False, origins=batch.origins(), **options)
        verify_batch(backend, [buffer], batch, **options)
        assert buffer.violations == expected
        assert buffer.skip_counters.tolist() == [expected_skips(batch.entries()), 0]

    def test_any_buffer_may_have_it(self, backend: ArrayBackend) -> None:
        buffers = [stamped(kernel_kind=i, sources=[source_of(16 * i)] if i else [], mode=2) for i in (0, 17, 1)]
        verify_batch(backend, buffers, row_2())
        assert [buffer.violations for buffer in buffers] == [[]] * 3
        for buffer in buffers[1:]:
            buffer.sources[0].tensor[7, 15] ^= 1
        verify_batch(backend, buffers, row_2())
        assert [[row[:2] + row[7:] for row in buffer.violations] for buffer in buffers] == [
            [],
            [(17, 7, 4)],
            [(1, 7, 4)],
        ]


class TestFours:
    @pytest.mark.parametrize("num_buffers", [4, 8])
    def test_one_buffer_is_wrong(self, backend: ArrayBackend, num_buffers: int) -> None:
        for wrong in range(num_buffers):
            buffers = [stamped(kernel_kind=i) for i in range(num_buffers)]
            buffers[wrong].set_record(7, 99)
            verify_batch(backend, buffers, row_2())
            assert [[row[:2] + row[7:] for row in buffer.violations] for buffer in buffers] == [
                [(i, 11, 1)] if i == wrong else [] for i in range(num_buffers)
            ]
            assert all((buffer.slot_run_counter, buffer.kernel_run_counter) == (6, 1) for buffer in buffers)

    @pytest.mark.parametrize("num_buffers", [4, 8])
    def test_each_buffer_has_its_own_results(self, backend: ArrayBackend, num_buffers: int) -> None:
        """Other tokens, another stride, another damaged slot; every second one with details and counters."""
        buffers = [
            HostBuffer.empty(64, 32 + 16 * (i % 3), kernel_kind=i, is_detailed=i % 2 == 0) for i in range(num_buffers)
        ]
        batch = row_2([*SLOTS, 0, 21, 64, 22])
        for i, buffer in enumerate(buffers):
            buffer.stamp([*SLOTS, 20, 21, 63, 22], list(range(100 * i, 100 * i + 10)))
            buffer.set_record(SLOTS[i % 6], 99)
        expected = [
            expected_violations(buffer, batch.entries(), check_tokens=False, origins=batch.origins())
            for buffer in buffers
        ]
        assert all(len(rows) >= 2 for rows in expected)
        verify_batch(backend, buffers, batch)
        assert [buffer.violations for buffer in buffers] == expected
        assert [buffer.skip_counters.tolist() for buffer in buffers] == [[2, 0], [0, 0]] * (num_buffers // 2)

    def test_disabled_launches_are_counted_in_each(self, backend: ArrayBackend) -> None:
        buffers = [HostBuffer.empty(64, is_detailed=i != 2) for i in range(8)]
        verify_batch(backend, buffers, row_2(), verify_capacity=5)
        assert [buffer.skip_counters.tolist() for buffer in buffers] == [[0, int(i != 2)] for i in range(8)]
        assert all((buffer.slot_run_counter, buffer.kernel_run_counter) == (0, 1) for buffer in buffers)


def test_chains_must_not_be_mixed(backend: ArrayBackend) -> None:
    context = stamped("affine").on_device(backend)
    remember_chain([context.view], "affine")
    plan = make_plan(backend, row_2().entries())
    with pytest.raises(KvCanaryError, match="chain must be 'affine', with which the buffer was written"):
        launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=False)
    forget_chain(context.canary_buf)
    launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=False)


# -- properties ---------------------------------------------------------------------------------------------------


Cache = tuple[list[HostBuffer], Batch, dict[str, Any]]


@st.composite
def damaged_caches(draw: st.DrawFn, kind: Kind = "general") -> Cache:
    """A stamped cache of some requests, then damaged: records, KV bytes, page table.

    Smaller ones, of what takes the kernel, for other kinds than the general one.
    """
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    chain = draw(st.sampled_from(CHAINS))
    is_small = kind != "general"
    width, num_requests = draw(st.integers(1, 40 if is_small else 90)), draw(st.integers(1, 2 if is_small else 6))
    num_slots = num_requests * width + 2
    page_size = draw(st.integers(1, 5))
    table = np.zeros((num_requests + 2, width), np.int32)
    table[1:-1] = (rng.permutation(num_slots - 1)[: num_requests * width] + 1).reshape(num_requests, width)
    mode, num_sources = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    num_buffers, widest = draw(st.integers(1, 3)), [3] * num_sources  # in parts of 16 bytes
    if kind == "wide":
        mode, num_buffers, widest = 2, draw(st.integers(1, 2)), draw(st.sampled_from([[25], [3, 25], [25, 20, 3]]))
    elif kind == "fours":
        num_buffers, widest = draw(st.sampled_from([4, 8])), []
    buffers = []
    for i in range(num_buffers):
        sources = []
        for most in widest:
            least = 1 if most == 3 else WIDE_KV_BYTES // 16
            per_token = 16 * draw(st.integers(least, most))
            rows = -(-num_slots // page_size)
            kv = rng.integers(0, 256, (rows, page_size * per_token + 16 * draw(st.integers(0, 2))), dtype=np.uint8)
            sources.append(HostSource(kv, page_size, per_token, 16 * draw(st.integers(least, per_token // 16))))
        stride = draw(st.sampled_from([32, 48, 64] if kind == "fours" else [32, 40, 48, 64]))
        buffer = HostBuffer.empty(
            num_slots,
            stride,
            kernel_kind=i,
            ring_capacity=1000,
            sources=sources,
            mode=mode,
            is_detailed=draw(st.booleans()),
        )
        for row in range(1, num_requests + 1):
            buffer.stamp(table[row].tolist(), rng.integers(0, 1000, width).tolist(), chain)
        for _ in range(draw(st.integers(0, 3))):
            buffer.canary_buf[rng.integers(num_slots), rng.integers(32)] ^= 1 << rng.integers(8)
        for source in sources:
            source.tensor[rng.integers(len(source.tensor)), rng.integers(source.tensor.shape[1])] ^= 4
        buffers.append(buffer)
    for _ in range(draw(st.integers(0, 3))):
        wrong = rng.choice([0, -1, num_slots, 2**31 - 1, int(rng.integers(num_slots))])
        table[rng.integers(1, num_requests + 1), rng.integers(width)] = wrong
    window = draw(st.sampled_from([0, 0, 1, width // 2 + 1]))
    has_expected = kind != "fours" and draw(st.booleans())
    expected = rng.integers(0, 1000, (num_requests + 2, width + 3)).astype(np.int32) if has_expected else None
    rows = rng.integers(0, num_requests + 1, draw(st.integers(1, 8))).tolist()
    batch = Batch(
        table,
        rows,
        rng.integers(0, width + 1, len(rows)).tolist(),
        window=window,
        expected=expected,
        valid_lens=None if expected is None else rng.integers(0, width + 3, len(rows)).tolist(),
        offset=draw(st.integers(-1, 2)),
    )
    options = {
        "chain": chain,
        "padding_slot": draw(st.sampled_from([0, 0, None, 1])),
        "check_holes": draw(st.booleans()),
    }
    return buffers, batch, options


@settings(max_examples=40, deadline=None)
@given(cache=damaged_caches())
def test_contract_holds_for_any_damage(backend: ArrayBackend, cache: Cache) -> None:
    assert_contract_holds(backend, cache)


@settings(max_examples=20, deadline=None)
@given(cache=damaged_caches("wide") | damaged_caches("fours"))
def test_contract_holds_for_other_kernels(backend: ArrayBackend, cache: Cache) -> None:
    assert_contract_holds(backend, cache)


def assert_contract_holds(backend: ArrayBackend, cache: Cache) -> None:
    buffers, batch, options = copy.deepcopy(cache)
    entries = batch.entries()
    expected = [
        [
            expected_violations(buffer, entries, check_tokens=batch.check_tokens, origins=origins, **options)
            for origins in ((), batch.origins())
        ]
        for buffer in buffers
    ]
    skipped = expected_skips(entries, options["padding_slot"])
    from_plan = copy.deepcopy(buffers)
    verify_plan(backend, from_plan, make_plan(backend, entries), check_tokens=batch.check_tokens, **options)
    verify_batch(backend, buffers, batch, **options)
    for of_buffer, *results in zip(expected, from_plan, buffers, strict=True):
        for rows, result in zip(of_buffer, results, strict=True):
            assert result.violations == rows
            assert (result.violation_count, result.slot_run_counter) == (len(rows), len(entries))
            assert result.skip_counters.tolist() == [skipped if result.is_detailed else 0, 0]


extreme = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 63, 64, 2**31 - 1, 2**32, 2**32 + 5, 2**63 - 1])
any_int64 = extreme | st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 70)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(any_int64, any_int64, any_int64, any_int64), min_size=1, max_size=70),
    records=st.lists(any_int64, min_size=4, max_size=4),
    num_valid=st.integers(-(2**31), 2**31 - 1),
    num_slots=st.integers(1, 66),
    chain=st.sampled_from(CHAINS),
)
def test_hostile_plans_read_nothing_outside(
    backend: ArrayBackend,
    rows: list[tuple[int, ...]],
    records: list[int],
    num_valid: int,
    num_slots: int,
    chain: str,
) -> None:
    """Any value in a plan: violations as the contract says, and the sanitized backends see no stray access."""
    source = HostSource(np.ones((num_slots, 16), np.uint8), 1, 16, 16)
    buffer = HostBuffer.empty(num_slots, sources=[source], mode=2, is_detailed=True)
    for slot in range(num_slots):
        buffer.set_record(slot, *records)
    entries = [Entry(*row) for row in rows]
    seen = entries[: max(num_valid, 0)]
    expected = expected_violations(buffer, seen, check_tokens=True, chain=chain)
    verify_plan(backend, [buffer], make_plan(backend, entries, num_valid=num_valid), check_tokens=True, chain=chain)
    assert buffer.violations == expected
    assert buffer.slot_run_counter == len(seen)


def hostile_batch(data: st.DataObject, kind: Kind) -> Batch:
    """Any value in a batch; a mapping and expected tokens where the kernel takes them."""
    int32s = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 70)
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    table = np.array(data.draw(st.lists(int32s, min_size=rows * width, max_size=rows * width)), np.int32)
    bs = data.draw(st.integers(0, 6))
    column = st.lists(any_int64, min_size=bs, max_size=bs)
    options: dict[str, Any] = {"window": data.draw(st.sampled_from([0, 3, 2**40]))}
    if kind in ("general", "wide"):
        options |= {
            "mapping": data.draw(st.none() | st.lists(any_int64, min_size=1, max_size=60)),
            "expected": np.ones((2, 5), np.int32),
            "valid_lens": data.draw(column),
            "offset": data.draw(any_int64.filter(lambda v: abs(v) < 2**31)),
        }
    return Batch(table.reshape(rows, width), data.draw(column), data.draw(column), **options)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_hostile_batches_read_nothing_outside(backend: ArrayBackend, kind: Kind, data: st.DataObject) -> None:
    """Any value in a batch: what the contract says for its own offsets."""
    batch = hostile_batch(data, kind)
    buffers = buffers_for(kind, 64, ring_capacity=1000, is_detailed=True)
    expected = [
        expected_violations(buffer, batch.entries(), check_tokens=batch.check_tokens, origins=batch.origins())
        for buffer in buffers
    ]
    verify_batch(backend, buffers, batch)
    assert [buffer.violations for buffer in buffers] == expected
    assert all(buffer.skip_counters.tolist() == [expected_skips(batch.entries()), 0] for buffer in buffers)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), num_valid=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 70))
def test_hostile_offsets_read_nothing_outside(
    backend: ArrayBackend, kind: Kind, data: st.DataObject, num_valid: int
) -> None:
    """Ascending offsets of another batch: what NumPy finds."""
    batch = hostile_batch(data, kind)
    bs = len(batch.rows)
    offsets = sorted(data.draw(st.lists(any_int64, min_size=bs + 1, max_size=bs + 1)))
    options = {"offsets": offsets, "num_valid": num_valid, "verify_capacity": 70}
    buffers = buffers_for(kind, 64, ring_capacity=1000, is_detailed=True)
    of_numpy = copy.deepcopy(buffers)
    with mock.patch.dict(BACKENDS, cpu=NumpyBackend()):
        status = verify_batch(ArrayBackend("numpy"), of_numpy, batch, **options)
    assert verify_batch(backend, buffers, batch, **options) == status
    for buffer, result in zip(of_numpy, buffers, strict=True):
        assert result.violations == buffer.violations
        assert result.slot_run_counter == buffer.slot_run_counter
        np.testing.assert_array_equal(result.skip_counters, buffer.skip_counters)
