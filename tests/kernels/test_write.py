"""Write on every backend: golden files, reported faults, properties, hostile values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import StatusBit, launch_plan_offsets_kernel
from cupy_kvcanary.arrays import view_array
from cupy_kvcanary.buffers import VerifyOrWriteContext, forget_chain
from cupy_kvcanary.constants import FailReason
from cupy_kvcanary.errors import KvCanaryError
from cupy_kvcanary.ops.write import OPERATION, launch_canary_write_kernel
from cupy_kvcanary.types import WritePlan
from tests.helpers import plan_offsets
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.golden import FILL, GoldenFile
from tests.helpers.guards import GuardedBackend
from tests.helpers.write import (
    ANCHOR,
    ENTRIES,
    KERNELS,
    MAPPING,
    PLAN,
    assert_written,
    chain_of,
    make_arguments,
    one_request,
    slots_of_the_last_place,
    with_dtypes,
    write,
)
from tests.helpers.write_errors import valid_arguments

GOLDEN = GoldenFile("write.npz")
F1_SLOTS = [5, 9, 3, 7, 11, 13]


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    buffer = HostBuffer(
        inputs["canary_buf"].copy(),
        inputs["kernel_kind"],
        inputs["ring_capacity"],
        sources=[
            HostSource(inputs[f"real_kv_source_{i}"], *inputs[f"real_kv_source_{i}_params"].tolist())
            for i in range(inputs["num_real_kv_sources"])
        ],
        mode=inputs["real_kv_hash_mode"],
        enable_chain_position_assert=inputs["enable_chain_position_assert"],
    )
    status = write(backend, [buffer], {name: inputs.get(name) for name in (*PLAN, *ENTRIES)})
    np.testing.assert_array_equal(buffer.canary_buf, outputs["canary_buf"])
    assert buffer.violations == sorted(map(tuple, outputs["violations"].tolist()))
    assert buffer.violation_count == outputs["violation_write_index"][0]
    assert buffer.slot_run_counter == outputs["slot_run_counter"][0]
    assert buffer.kernel_run_counter == outputs["kernel_run_counter"][0]
    assert status == 0


def test_hashes_of_fixture_f1(backend: ArrayBackend) -> None:
    buffer = HostBuffer.empty(64)
    write(backend, [buffer], one_request(F1_SLOTS))
    assert [buffer.record(slot)[:2] for slot in F1_SLOTS] == [[11 + i, i] for i in range(6)]
    hashes = [buffer.record(slot)[2] for slot in F1_SLOTS]
    assert hashes[:3] == [0xDE7FAE23A9A1B716, 0x89CD2ABFBEBC0649, 0x13F5BAAFE6EF85D6]
    untouched = [slot for slot in range(64) if slot not in F1_SLOTS]
    assert not buffer.canary_buf[untouched].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_steps_continue_a_chain(backend: ArrayBackend, kernel: str) -> None:
    """One by one, in two parts, or at once: the same records."""
    buffers = [HostBuffer.empty(64, enable_chain_position_assert=1) for _ in range(3)]
    for buffer, lengths in zip(buffers, ([1] * 6, [4, 2], [6]), strict=True):
        first, seed = 0, -1
        for length in lengths:
            slots = F1_SLOTS[first : first + length]
            write(backend, [buffer], one_request(slots, first, seed, range(11 + first, 11 + first + length)), kernel)
            first, seed = first + length, slots[-1]
        assert buffer.violation_count == 0
        forget_chain(buffer.canary_buf)
    stamped = HostBuffer.empty(64)
    stamped.stamp(F1_SLOTS, list(range(11, 17)), chain_of(kernel))
    for buffer in buffers:
        np.testing.assert_array_equal(buffer.canary_buf, stamped.canary_buf)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("padding_slot", "num_violations"), [(0, 0), (None, 1), (5, 1)])
def test_12_a_padding_seed_starts_at_the_anchor_and_checks_no_position(
    backend: ArrayBackend, kernel: str, padding_slot: int | None, num_violations: int
) -> None:
    buffer = HostBuffer.empty(64, enable_chain_position_assert=1)
    buffer.set_record(0, 77, 8447, 123)
    arguments = one_request([30], 512, 0)
    assert_written(backend, [buffer], arguments, kernel, padding_slot)
    assert (buffer.record(30)[2] == ANCHOR) == (padding_slot == 0)
    assert buffer.violation_count == num_violations
    if num_violations:
        assert buffer.violations[0][6:] == (8448, FailReason.WRITE_POSITION)


@pytest.mark.parametrize("kernel", KERNELS)
def test_13_slots_that_the_buffer_does_not_have(backend: ArrayBackend, kernel: str) -> None:
    memory = np.full((66, 32), 0x5A, np.uint8)
    buffer = HostBuffer(memory[:64], kernel_kind=3)
    guarded = GuardedBackend(backend.name)
    write(guarded, [buffer], one_request([63, 64, -1, 62]), kernel)
    stamped = HostBuffer(np.full((64, 32), 0x5A, np.uint8))
    stamped.stamp([63], [11], chain_of(kernel))
    assert buffer.record(63) == stamped.record(63)
    h = buffer.record(62)[2]
    # The chain goes on from slot 63.
    stamped.stamp([63, 62], [11, 14], chain_of(kernel))
    assert h == stamped.record(62)[2]
    assert buffer.violations == [(3, 64, 1, 12, 12, h - 2**64 if h >= 2**63 else h, 0, 256)]
    assert buffer.slot_run_counter == 2
    assert (memory[64:] == 0x5A).all()
    guarded.check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", [64, 2**40, 2**63 - 1])
def test_a_seed_that_the_buffer_does_not_have(backend: ArrayBackend, kernel: str, seed: int) -> None:
    buffer = HostBuffer.empty(64, kernel_kind=2, enable_chain_position_assert=1)
    write(backend, [buffer], one_request([5], 7, seed), kernel)
    assert buffer.violations == [(2, seed, 0, 0, 0, 0, 0, FailReason.PREDECESSOR_OUT_OF_RANGE)]
    assert buffer.record(5)[2] == ANCHOR


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("count", "left", "stored"), [(2**31 - 2, 2**31 - 1, 0), (-5, 2**31 - 1, 0), (2, 5, 2), (0, 3, 3)]
)
def test_16_the_violation_counter_saturates(
    backend: ArrayBackend, kernel: str, count: int, left: int, stored: int
) -> None:
    buffer = HostBuffer.empty(64, ring_capacity=4, violation_count=count)
    guarded = GuardedBackend(backend.name)
    write(guarded, [buffer], one_request([64, 65, 66]), kernel)
    assert buffer.violation_count == left
    assert (buffer.ring != FILL).any(axis=1).sum() == stored
    guarded.check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("mode", "expected"), [(0, 0), (1, 0xD6D75024DFD6C30C), (2, 0xB44181DFE9420039)])
def test_17_real_kv_hash(backend: ArrayBackend, kernel: str, mode: int, expected: int) -> None:
    tensor = np.zeros((3, 32), np.uint8)
    tensor[1] = np.arange(32)
    buffer = HostBuffer.empty(3, sources=[HostSource(tensor, 1, 32, 32)], mode=mode)
    write(backend, [buffer], one_request([1, 2]), kernel)
    assert [buffer.record(slot)[3] for slot in (1, 2)] == [expected, 0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_18_and_19_real_kv_of_a_layer_and_of_pages(backend: ArrayBackend, kernel: str) -> None:
    """Rows at the array's own stride, of any dtype and rank; slots at their place in a page."""
    rng = np.random.default_rng(0)
    layers = backend.array(rng.integers(0, 2**16, (8, 4, 2, 8), dtype=np.uint16))
    pages = rng.integers(0, 256, (2, 4 * 48 + 16), dtype=np.uint8)
    flat = backend.to_numpy(layers)[:, 1].reshape(8, 16)
    expected = HostBuffer.empty(8, mode=2, sources=[HostSource(flat, 1, 32, 32), HostSource(pages, 4, 48, 32)])
    buffer = HostBuffer.empty(8, mode=2, sources=[HostSource(layers[:, 1], 1, 32, 32), expected.sources[1]])
    write(backend, [buffer], one_request([5, 6]), kernel)
    assert [buffer.record(slot)[3] for slot in (5, 6)] == [expected.real_kv_hash(slot) for slot in (5, 6)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 65, 95, 96, 97, 192, 193, 1025, 2047, 2048, 2049, 4097])
def test_22_numbers_of_entries(backend: ArrayBackend, kernel: str, n: int) -> None:
    """Around a warp and around a block's chunk, with every third slot twice and some skipped."""
    rng = np.random.default_rng(n)
    slots = rng.integers(-1, max(1, n // 2), n)
    buffer = HostBuffer.empty(n, 48, enable_chain_position_assert=1, ring_capacity=4)
    buffer.stamp([n - 1], [9], chain_of(kernel), first_position=99)
    arguments = one_request(slots, 100, n - 1)
    assert_written(backend, [buffer], arguments, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_long_request(backend: ArrayBackend, kernel: str) -> None:
    n = 32769
    buffer = HostBuffer.empty(n + 1)
    slots = np.random.default_rng(0).permutation(n) + 1
    assert_written(backend, [buffer], one_request(slots), kernel)
    assert buffer.slot_run_counter == n


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [2, 32, 40, 3000])
def test_the_last_entry_of_a_slot_stays(backend: ArrayBackend, kernel: str, n: int) -> None:
    buffer = HostBuffer.empty(4)
    assert_written(backend, [buffer], one_request([2] * (n - 1) + [1]), kernel)
    assert buffer.record(2)[:2] == [11 + n - 2, n - 2]


@pytest.mark.parametrize("kernel", KERNELS)
def test_entries_that_share_a_slot_or_a_place_of_the_table_of_slots(backend: ArrayBackend, kernel: str) -> None:
    """Eight slots for a chunk's entries, in every warp; all belong into the last place of the scan's table."""
    slots = slots_of_the_last_place(2**16)[:8]
    buffer = HostBuffer.empty(2**16)
    entries = np.random.default_rng(0).choice(slots, 700)
    assert_written(backend, [buffer], one_request(entries), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_chunks_without_an_entry_that_is_stored(backend: ArrayBackend, kernel: str) -> None:
    """The chain and its positions go on behind them."""
    for skipped in (100, 5000):
        slots = [-1] * skipped + [*range(1, 41)] + [-1] * skipped + [*range(41, 50)] + [64]
        buffer = HostBuffer.empty(64, enable_chain_position_assert=1, ring_capacity=64)
        buffer.stamp([0], [9], chain_of(kernel), first_position=99)
        assert_written(backend, [buffer], one_request(slots, 100, 0), kernel, None)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_request_may_write_its_own_seed(backend: ArrayBackend, kernel: str) -> None:
    buffer = HostBuffer.empty(64)
    buffer.stamp([7], [5], chain_of(kernel))
    assert_written(backend, [buffer], one_request([7] * 40, 1, 7), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("capacity", [0, 3])
@pytest.mark.parametrize("n", [0, 4])
def test_a_launch_with_nothing_to_do_is_counted(backend: ArrayBackend, kernel: str, capacity: int, n: int) -> None:
    buffers = [HostBuffer.empty(8) for _ in range(2)]
    arguments = make_arguments([0] * (capacity + 1), [-1] * capacity, [1] * n, range(n), range(n))
    assert write(backend, buffers, arguments, kernel) == 0
    for buffer in buffers:
        assert (buffer.slot_run_counter, buffer.kernel_run_counter, buffer.violation_count) == (0, 1, 0)
        assert not buffer.canary_buf.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_buffers_may_share_logs_and_counters(backend: ArrayBackend, kernel: str) -> None:
    first, second = (HostBuffer.empty(8, kernel_kind=kind).on_device(backend) for kind in (1, 2))
    shared = VerifyOrWriteContext(
        canary_buf=second.canary_buf,
        kernel_kind=2,
        violation_ring=first.violation_ring,
        violation_write_index=first.violation_write_index,
        slot_run_counter=first.slot_run_counter,
        kernel_run_counter=first.kernel_run_counter,
    )
    arguments = backend.on_device(one_request([3, 9, 4]))
    launch_canary_write_kernel(
        context=[first, shared],
        plan=WritePlan(**{name: arguments[name] for name in PLAN}),
        enable_write_input_assert=False,
        **{name: arguments[name] for name in ENTRIES},
        chain=chain_of(kernel),
    )
    assert backend.to_numpy(first.slot_run_counter) == 4
    assert backend.to_numpy(first.kernel_run_counter) == 2
    assert backend.to_numpy(first.violation_write_index) == 2
    assert sorted(backend.to_numpy(first.violation_ring)[:2, :2].tolist()) == [[1, 9], [2, 9]]
    np.testing.assert_array_equal(backend.to_numpy(first.canary_buf), backend.to_numpy(second.canary_buf))


@pytest.mark.parametrize("kernel", KERNELS)
def test_details_of_violations(backend: ArrayBackend, kernel: str) -> None:
    """Which request, the position it should have, its seed; for each kind of violation."""
    buffer = HostBuffer.empty(64, enable_chain_position_assert=1, is_detailed=True)
    buffer.stamp([7], [5], chain_of(kernel))
    arguments = make_arguments(
        [0, 0, 1, 2, 3],
        [-1, 70, 7, -1],
        [1, 2, 3],
        [0, 4, 0],
        [9, 10, 64],
        expected_tokens=[8, 2, 3],
        expected_positions=[6, 4, 0],
    )
    write(backend, [buffer], arguments, kernel)
    nothing = (0, 0, 0, -1, 0, 0, 0, 0, 0)
    assert [(row[1], row[7], row[8:]) for row in buffer.violations] == [
        (9, 8 | 16, (1, -1, 6, 70, *nothing)),
        (10, 16, (2, -1, 1, 7, *nothing)),
        (64, 256, (3, -1, 0, -1, *nothing)),
        (70, 128, (1, -1, 0, 70, *nothing)),
    ]
    assert buffer.skip_counters.tolist() == [0, 0]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtypes", ["int32", "int64"])
@pytest.mark.parametrize("n", [1, 40, 3000])
def test_inputs_of_either_width_and_slots_of_another_pool(
    backend: ArrayBackend, kernel: str, dtypes: str, n: int
) -> None:
    """Slots beyond the mapping take its last slot; of entries whose slots are mapped to one, the last stays."""
    rng = np.random.default_rng(n)
    mapping = rng.permutation(n + 3)[:n] + 1
    mapping[rng.random(n) < 0.1] = -1
    slots = rng.integers(-1, n + 2, n)
    buffer = HostBuffer.empty(n + 5, enable_chain_position_assert=1)
    buffer.stamp([n + 4], [9], chain_of(kernel), first_position=99)
    arguments = make_arguments([0, n], [n + 4], range(-1, n - 1), range(100, 100 + n), slots, mapping=mapping)
    arguments = with_dtypes(arguments, **dict.fromkeys((*ENTRIES[:3], MAPPING), dtypes))
    assert_written(backend, [buffer], arguments, kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_input_has_a_width_of_its_own(backend: ArrayBackend, kernel: str) -> None:
    arguments = make_arguments([0, 3], [-1], [-5, 2**31 - 1, 7], [-1, 0, 1], [1, -1, 2], mapping=[9, 3, 4])
    for name in (*ENTRIES[:3], MAPPING):
        buffer = HostBuffer.empty(16)
        assert_written(backend, [buffer], with_dtypes(arguments, **{name: np.int32}), kernel)
        assert buffer.record(3)[:2] == [2**64 - 5, 2**64 - 1]
        assert buffer.record(4)[:2] == [7, 1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_that_leave_the_arrays_are_cut(backend: ArrayBackend, kernel: str) -> None:
    for offsets, num_valid, stored in (
        ([0, 3], 1, 3),
        ([-4, 3], 1, 3),
        ([2, 99], 1, 2),
        ([3, 1], 1, 0),
        ([9, 2**62], 1, 0),
        ([0, 4], 2, 4),
        ([0, 4], -1, 0),
    ):
        buffer = HostBuffer.empty(8)
        arguments = make_arguments(offsets, [-1], [1] * 4, range(4), range(1, 5), num_valid=num_valid)
        status = write(backend, [buffer], arguments, kernel)
        assert buffer.slot_run_counter == stored
        assert status == (0 if (offsets, num_valid) == ([0, 3], 1) else StatusBit.WRITE_OFFSETS_INVALID)


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_the_offsets_planner_planned(backend: ArrayBackend, kernel: str) -> None:
    """Prefill of two requests and a padding row, then a decode step, each from its own plan."""
    table = np.zeros((6, 16), np.int32)
    table[2, :7], table[4, :5] = [5, 9, 3, 7, 11, 13, 14], [20, 21, 22, 23, 24]
    buffer, stamped = HostBuffer.empty(64, enable_chain_position_assert=1), HostBuffer.empty(64)
    for prefix_lens, extend_lens in (([0, 3, 0], [6, 2, 4]), ([6, 3, 4], [1, 1, 1])):
        planned = backend.on_device(
            plan_offsets.make_arguments([2, 0, 4], prefix_lens, extend_lens, table, write_req_capacity=5)
        )
        launch_plan_offsets_kernel(**planned)
        spans = [(row, p, p + e) for row, p, e in zip((2, 0, 4), prefix_lens, extend_lens, strict=True) if row]
        slots = np.concatenate([table[row, begin:end] for row, begin, end in spans])
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        arguments = make_arguments([], [], 100 + slots, positions, slots) | {
            "write_offsets": backend.to_numpy(planned["out_write_offsets"]),
            "write_seed_slot_indices": backend.to_numpy(planned["out_write_seed_slot_indices"]),
            "write_num_valid_reqs": backend.to_numpy(planned["out_write_num_valid_reqs"]),
        }
        assert write(backend, [buffer], arguments, kernel) == 0
        forget_chain(buffer.canary_buf)
    for row, length in ((2, 7), (4, 5)):
        slots = table[row, :length].tolist()
        stamped.stamp(slots, [100 + slot for slot in slots], chain_of(kernel))
    np.testing.assert_array_equal(buffer.canary_buf, stamped.canary_buf)
    assert buffer.violation_count == 0


# ---- properties ----------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[HostBuffer], dict[str, Any]]:
    """A plan and its entries, and up to three buffers whose records and KV are random."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_reqs, capacity = draw(st.integers(0, 6)), draw(st.integers(0, 2))
    lens = rng.integers(0, draw(st.sampled_from([2, 5, 40, 100])) + 1, num_reqs + capacity)
    lens[num_reqs:] = 0
    n = int(lens.sum()) + draw(st.integers(0, 3))
    offsets = np.concatenate([[0], np.cumsum(lens)])
    num_slots = n + len(lens) + 1 + draw(st.integers(0, 5))
    # Seeds are slots that nobody writes.
    seeds = np.where(rng.random(num_reqs + capacity) < 0.3, -1, rng.permutation(num_slots)[: num_reqs + capacity])
    free = np.setdiff1d(np.arange(num_slots), seeds)
    slots = rng.permutation(free)[:n]
    r_of = np.searchsorted(offsets, np.arange(n), side="right") - 1
    for i in np.flatnonzero(rng.random(n) < 0.2):  # the slot of another entry of the request
        slots[i] = rng.choice(slots[r_of == r_of[i]])
    slots[rng.random(n) < 0.1] = -1
    slots[rng.random(n) < 0.05] = num_slots + 3
    mapping = None
    if draw(st.booleans()):  # to the slots above, from others
        mapping = np.append(rng.permutation(num_slots), num_slots + 3)
        slots[slots >= 0] = np.argsort(mapping)[np.minimum(slots[slots >= 0], num_slots)]
        slots[slots == num_slots] += draw(st.integers(0, 2))
    tokens = rng.integers(0, 2**17, n)
    positions = np.arange(n) - offsets[np.minimum(r_of, len(offsets) - 1)] + rng.integers(0, 2, n) * draw(st.booleans())
    expected = (None, None)
    if draw(st.booleans()):
        expected = (tokens + (rng.random(n) < 0.2), positions + (rng.random(n) < 0.2))
    arguments = make_arguments(
        offsets,
        seeds,
        tokens,
        positions,
        slots,
        num_valid=num_reqs,
        expected_tokens=expected[0],
        expected_positions=expected[1],
        mapping=mapping,
    )
    arguments = with_dtypes(
        arguments, **{name: draw(st.sampled_from(["int32", "int64"])) for name in (*ENTRIES[:3], MAPPING)}
    )
    return [random_buffer(draw, rng, num_slots) for _ in range(draw(st.integers(1, 3)))], arguments


def random_buffer(draw: st.DrawFn, rng: np.random.Generator, num_slots: int) -> HostBuffer:
    sources = []
    for _ in range(draw(st.integers(0, 4))):
        page_size, num_bytes = draw(st.integers(1, 5)), 16 * draw(st.integers(1, 4))
        rows = -(-num_slots // page_size)
        wide = rng.integers(0, 256, (rows, page_size * num_bytes + 32), dtype=np.uint8)
        sources.append(
            HostSource(
                wide[:, 16 : 16 + page_size * num_bytes],
                page_size,
                num_bytes,
                16 * draw(st.integers(1, num_bytes // 16)),
            )
        )
    stride = draw(st.sampled_from([32, 40, 48, 64]))
    return HostBuffer(
        rng.integers(0, 256, (num_slots, stride), dtype=np.uint8),
        draw(st.integers(0, 11)),
        draw(st.sampled_from([0, 1, 1000])),
        draw(st.sampled_from([0, 0, 2**31 - 3])),
        sources,
        draw(st.integers(0, 2)),
        draw(st.sampled_from([None, 0, 1, -7])),
        draw(st.booleans()),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=25, deadline=None)
@given(batch=batches(), padding_slot=st.sampled_from([0, None, 3]))
def test_contract_holds_for_any_batch(
    backend: ArrayBackend, kernel: str, batch: tuple[list[HostBuffer], dict[str, Any]], padding_slot: int | None
) -> None:
    assert_written(backend, *batch, kernel, padding_slot)


extreme = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1])
hostile = st.integers(-2, 12) | extreme | st.integers(-(2**63), 2**63 - 1)


@st.composite
def hostile_batches(draw: st.DrawFn) -> tuple[list[HostBuffer], dict[str, Any]]:
    capacity, n = draw(st.integers(0, 4)), draw(st.integers(0, 40))

    def column(length: int) -> list[int]:
        return draw(st.lists(hostile, min_size=length, max_size=length))

    expected = (column(n), column(n)) if draw(st.booleans()) else (None, None)
    arguments = make_arguments(
        column(capacity + 1),
        column(capacity),
        column(n),
        column(n),
        column(n),
        num_valid=draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 5)),
        expected_tokens=expected[0],
        expected_positions=expected[1],
        mapping=draw(st.none() | st.lists(hostile, min_size=1, max_size=12)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [random_buffer(draw, rng, draw(st.integers(1, 10))) for _ in range(draw(st.integers(1, 2)))], arguments


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=40, deadline=None)
@given(batch=hostile_batches())
def test_hostile_values_change_nothing_outside_the_outputs(
    backend: ArrayBackend, kernel: str, batch: tuple[list[HostBuffer], dict[str, Any]]
) -> None:
    """No value makes a kernel read or write outside an array; violations and status are as the contract says."""
    guarded = GuardedBackend(backend.name)
    assert_written(guarded, *batch, kernel)
    guarded.check()


# ---- the launcher --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "num_buffers", "entry", "grid"),
    [
        (0, 0, 3, "kvc_write", 1),
        (256, 256, 4, "kvc_write", 256),
        (65, 1, 1, "kvc_write", 1),
        (66, 1, 1, "kvc_write_walk", 1),
        (4351, 256, 4, "kvc_write_walk", 1024),
        (4352, 4096, 1, "kvc_write", 1024),
        (0, 0, 3, "kvc_write_affine", 1),
        (256, 256, 4, "kvc_write_affine", 256),
        (512, 256, 1, "kvc_write_affine", 64),
        (513, 256, 1, "kvc_write_affine_scan", 256),
        (4096, 1, 2, "kvc_write_affine_scan", 2),
        (8192, 4096, 4, "kvc_write_affine", 4096),
    ],
)
def test_blocks_take_requests_that_may_be_long(
    num_tokens: int, num_reqs: int, num_buffers: int, entry: str, grid: int
) -> None:
    """The choice depends on what the host knows: it may be captured."""
    zeros = np.zeros(num_tokens, np.int64)
    arguments = make_arguments(np.zeros(num_reqs + 1), np.zeros(num_reqs), zeros, zeros, zeros)
    context = HostBuffer.empty(8).on_device(ArrayBackend("numpy"))
    views = {name: view_array(name, value) for name, value in arguments.items() if value is not None}
    options: dict[str, Any] = dict.fromkeys((*ENTRIES[3:], MAPPING, "out_status"))
    (launch,) = OPERATION.launches(
        buffers=(context.view,) * num_buffers, **views, **options, padding_slot=0, chain=chain_of(entry)
    )
    assert (launch.entry, launch.grid) == (entry, grid)
    assert launch.args.nbytes < 4096


N3 = np.zeros(3, np.int64)
READ_ONLY = np.zeros(1, np.int32)
READ_ONLY.flags.writeable = False

REFUSED: list[tuple[str, dict[str, Any]]] = [
    (
        "expected input tensors are required when enable_write_input_assert=True",
        {"enable_write_input_assert": True, "expected_input_tokens": N3},
    ),
    (
        "expected input tensors must be None when enable_write_input_assert=False",
        {"expected_input_positions": N3},
    ),
    ("enable_write_input_assert must be a bool, got 1", {"enable_write_input_assert": 1}),
    ("context must be a VerifyOrWriteContext or a sequence of them, got ndarray", {"context": [N3]}),
    ("context must be 1 to 12 contexts, got 0", {"context": []}),
    ("plan must be a WritePlan of this package, got NoneType", {"plan": None}),
    ("input_ids must have dtype int32 or int64, got int16", {"input_ids": np.zeros(3, np.int16)}),
    ("out_cache_loc must have dtype int32 or int64, got uint64", {"out_cache_loc": np.zeros(3, np.uint64)}),
    ("positions length must be 3, got 4", {"positions": np.zeros(4, np.int64)}),
    ("out_cache_loc must be contiguous", {"out_cache_loc": np.zeros(6, np.int64)[::2]}),
    ("input_ids must be 1-D, got shape (3, 1)", {"input_ids": np.zeros((3, 1), np.int64)}),
    (
        "expected_input_tokens length must be 3, got 2",
        {"enable_write_input_assert": True, "expected_input_tokens": N3[:2], "expected_input_positions": N3},
    ),
    (
        "expected_input_tokens must have dtype int64, got int32",
        {
            "enable_write_input_assert": True,
            "expected_input_tokens": np.zeros(3, np.int32),
            "expected_input_positions": N3,
        },
    ),
    ("full_to_swa_index_mapping must have dtype int32 or int64, got uint8", {MAPPING: np.zeros(3, np.uint8)}),
    ("full_to_swa_index_mapping must be 1-D, got shape (3, 1)", {MAPPING: N3.reshape(3, 1)}),
    ("full_to_swa_index_mapping must be contiguous", {MAPPING: np.zeros(6, np.int64)[::2]}),
    ("lut_len must be positive when has_swa_lut is True", {MAPPING: N3[:0]}),
    ("write_offsets length must be 2, got 3", {"write_offsets": N3}),
    ("write_num_valid_reqs length must be 1, got 2", {"write_num_valid_reqs": np.zeros(2, np.int32)}),
    ("write_num_valid_reqs must have dtype int32, got int64", {"write_num_valid_reqs": np.zeros(1, np.int64)}),
    ("out_status must have dtype int32, got int64", {"out_status": np.zeros(1, np.int64)}),
    ("out_status must be writable, got a read-only array", {"out_status": READ_ONLY}),
    ("padding_slot must be an int, got 0.0", {"padding_slot": 0.0}),
    ("padding_slot must be non-negative, got -1", {"padding_slot": -1}),
    ("chain must be 'splitmix64' or 'affine', got 'sha256'", {"chain": "sha256"}),
    ("stream must be None for CPU arrays, got int", {"stream": 7}),
]


@pytest.mark.parametrize(("message", "changed"), REFUSED, ids=[message for message, _ in REFUSED])
def test_bad_argument_is_refused_with_outputs_untouched(message: str, changed: dict[str, Any]) -> None:
    arguments = valid_arguments(**changed)
    with pytest.raises(KvCanaryError) as caught:
        launch_canary_write_kernel(**arguments)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    if isinstance(arguments["context"], VerifyOrWriteContext):
        assert_untouched(arguments["context"])


def assert_untouched(context: VerifyOrWriteContext) -> None:
    assert not context.canary_buf.any()
    assert (context.violation_ring == FILL).all()
    assert (context.violation_write_index, context.slot_run_counter, context.kernel_run_counter) == (0, 0, 0)


def test_memory_that_is_read_or_written_twice_is_refused() -> None:
    context = valid_arguments()["context"]
    memory = np.zeros(16, np.int64)
    details = np.zeros((len(context.violation_ring), 13), np.int64)
    other = VerifyOrWriteContext(
        canary_buf=memory.view(np.uint8).reshape(4, 32),
        kernel_kind=1,
        violation_ring=context.violation_ring,
        violation_write_index=context.violation_write_index,
        slot_run_counter=context.slot_run_counter,
        kernel_run_counter=context.kernel_run_counter,
    )
    for message, changed in (
        ("canary_buf must not overlap input_ids, got shared memory", {"context": other, "input_ids": memory[:3]}),
        (
            "canary_buf of context 1 must not overlap positions, got shared memory",
            {"context": [context, other], "positions": memory[13:]},
        ),
        (
            "canary_buf must not overlap canary_buf of context 1, got shared memory",
            {"context": [context, context]},
        ),
        (
            "out_status must not overlap violation_write_index, got shared memory",
            {"context": context, "out_status": context.violation_write_index},
        ),
        (
            "canary_buf must not overlap full_to_swa_index_mapping, got shared memory",
            {"context": other, MAPPING: memory[9:]},
        ),
        (
            "violation_details must not overlap input_ids, got shared memory",
            {"context": replace(context, violation_details=details), "input_ids": details[0, :3]},
        ),
        (
            "skip_counters must not overlap positions, got shared memory",
            {"context": replace(context, skip_counters=N3[1:]), "positions": N3},
        ),
    ):
        with pytest.raises(KvCanaryError) as caught:
            launch_canary_write_kernel(**valid_arguments(**changed))
        assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
        assert_untouched(context)
        assert not memory.any()


def test_a_buffer_takes_one_kind_of_chain_until_it_is_cleared() -> None:
    arguments = valid_arguments()
    context = arguments["context"]
    launch_canary_write_kernel(**arguments)
    before = context.canary_buf.copy()
    with pytest.raises(KvCanaryError) as caught:
        launch_canary_write_kernel(**arguments, chain="affine")
    message = "kv-canary: chain must be 'splitmix64', with which the buffer was written, got 'affine'"
    assert str(caught.value).splitlines()[0] == message
    np.testing.assert_array_equal(context.canary_buf, before)
    context.canary_buf[...] = 0
    forget_chain(context.canary_buf)
    launch_canary_write_kernel(**arguments, chain="affine")


def test_a_buffer_whose_array_takes_no_weak_reference_is_written_all_the_same() -> None:
    """That it is gone could not be told: its chain is not remembered."""

    class Slotted:
        __slots__ = ("__dlpack__", "__dlpack_device__")

    arguments = valid_arguments()
    context = arguments["context"]
    memory = context.canary_buf
    bare = Slotted()
    bare.__dlpack__, bare.__dlpack_device__ = memory.__dlpack__, memory.__dlpack_device__
    arguments["context"] = replace(context, canary_buf=bare)
    launch_canary_write_kernel(**arguments)
    assert memory.any()
    launch_canary_write_kernel(**arguments, chain="affine")
