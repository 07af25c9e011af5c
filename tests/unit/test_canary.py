"""The Canary object around a small engine, on every backend: what it finds, when it says so, and what it never does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    Batch,
    BlockTable,
    Canary,
    CanaryConfig,
    CanaryLaunchTag,
    FailReason,
    KvCanaryError,
    KvCorruptionError,
    KvPool,
    PageList,
    SweepChunk,
    memory_of,
)
from tests.helpers.engine import NUM_SLOTS, ROWS, WIDTH, Engine

if TYPE_CHECKING:
    from tests.helpers.backends import ArrayBackend

FOUR_TAGS = {
    CanaryLaunchTag.HEAD_K_FULL,
    CanaryLaunchTag.HEAD_V_FULL,
    CanaryLaunchTag.TAIL_K_FULL,
    CanaryLaunchTag.TAIL_V_FULL,
}
DECODE = {1: [90], 2: [91], 3: [92]}


def found(engine: Engine) -> set[tuple[Any, int, FailReason]]:
    """(request row, slot, reasons) of everything reported so far."""
    return {(v.request_row, v.slot, v.reasons) for report in engine.reports for v in report.violations}


# ---- serving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", ["affine", "splitmix64"])
@pytest.mark.parametrize("real_kv_hash", ["none", "partial", "all"])
def test_a_healthy_engine_is_left_alone(backend: ArrayBackend, chain: str, real_kv_hash: str) -> None:
    engine = Engine(backend, chain=chain, real_kv_hash=real_kv_hash)
    engine.serve(steps=5)
    assert engine.canary.synchronize() == []
    health = engine.canary.health()
    assert health.steps == 5
    assert health.errors == health.violations == health.status == 0
    # 13 prompt tokens and 3 a step; every step verifies what is there before it, in each of four buffers.
    assert health.written_entries == 4 * (13 + 4 * 3)
    assert health.verified_entries == 4 * (0 + 13 + 16 + 19 + 22)
    assert health.protected_tokens == 22
    assert dict(health.launches) == dict.fromkeys(FOUR_TAGS, 10) | {
        CanaryLaunchTag.SWEEP_K_FULL: 0,
        CanaryLaunchTag.SWEEP_V_FULL: 0,
    }


def test_damage_is_reported_in_the_step_after_the_one_that_read_it(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    engine.step(DECODE)  # reads it
    assert engine.reports == []
    engine.canary.buffers.place.synchronize()
    engine.step(DECODE)  # looks at what came back
    (report,) = engine.reports
    assert report.step == 3
    assert {violation.tag for violation in report.violations} == FOUR_TAGS
    assert found(engine) == {(1, engine.slot(1, 4), FailReason.VERIFY_CHAIN_HASH)}
    violation = report.violations[0]
    assert violation.position == 4
    assert violation.prev_slot == engine.slot(1, 3)
    assert violation.next_slot == engine.slot(1, 5)


def test_only_the_damaged_buffer_is_named(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.serve()
    engine.damage_token(engine.slot(2, 1), CanaryLaunchTag.TAIL_V_FULL)
    engine.step(DECODE)
    (report,) = engine.canary.synchronize()
    assert [(v.tag, v.slot) for v in report.violations] == [(CanaryLaunchTag.TAIL_V_FULL, engine.slot(2, 2))]


@pytest.mark.parametrize(("layer", "tag"), [("k0", "HEAD_K_FULL"), ("k1", "TAIL_K_FULL"), ("v1", "TAIL_V_FULL")])
def test_a_flipped_kv_bit_is_found_by_the_buffer_of_its_layer(backend: ArrayBackend, layer: str, tag: str) -> None:
    engine = Engine(backend, real_kv_hash="all")
    engine.serve()
    engine.kv[layer][engine.slot(3, 2), 31] ^= 4
    engine.step(DECODE)
    (report,) = engine.canary.synchronize()
    assert [(v.tag, v.slot, v.reasons) for v in report.violations] == [
        (CanaryLaunchTag[tag], engine.slot(3, 2), FailReason.VERIFY_REAL_KV_HASH)
    ]


def test_partial_hashes_see_the_first_16_bytes(backend: ArrayBackend) -> None:
    engine = Engine(backend, real_kv_hash="partial")
    engine.serve()
    engine.kv["k0"][engine.slot(3, 2), 16] ^= 4
    engine.step(DECODE)
    assert engine.canary.synchronize() == []
    engine.kv["k0"][engine.slot(3, 2), 15] ^= 4
    engine.step(DECODE)
    assert len(engine.canary.synchronize()) == 1


def test_a_hole_in_a_live_prefix_is_reported_unless_told_otherwise(backend: ArrayBackend) -> None:
    for check_holes in (True, False):
        engine = Engine(backend, check_holes=check_holes)
        engine.serve()
        engine.table[1, 3] = 0
        engine.step(DECODE)
        engine.canary.synchronize()
        assert found(engine) == ({(1, 0, FailReason.PAGE_TABLE_HOLE)} if check_holes else set())
        # The entry, and the chain check of the one behind it, in each buffer.
        assert engine.canary.health().skipped_checks == 8


def test_exchanged_requests_are_found_with_expected_tokens_only(backend: ArrayBackend) -> None:
    for expected_tokens in (True, False):
        engine = Engine(backend, expected_tokens=expected_tokens)
        engine.serve()
        engine.table[[2, 3], :3] = engine.table[[3, 2], :3]
        engine.lens[[2, 3]] = 3
        engine.step(
            {2: [91], 3: [92]},
            expected_tokens=engine.array(engine.tokens, np.int32),
            expected_token_lens=engine.array([3, 3]),
        )
        engine.canary.synchronize()
        reasons = {reasons for _, _, reasons in found(engine)}
        assert reasons == ({FailReason.VERIFY_TOKEN} if expected_tokens else set())


def test_verification_may_be_spread_over_steps(backend: ArrayBackend) -> None:
    engine = Engine(backend, verify_interval=3)
    engine.serve(steps=7)
    engine.canary.synchronize()
    launches = engine.canary.health().launches[CanaryLaunchTag.HEAD_K_FULL]
    assert launches == 7 + 3  # writes in each step, verifies in steps 0, 3 and 6


def test_a_step_over_the_capacity_is_skipped_and_counted(backend: ArrayBackend) -> None:
    engine = Engine(backend, verify_capacity=15)
    engine.serve(steps=3)
    engine.damage_token(engine.slot(1, 3))
    engine.step(DECODE)
    assert engine.canary.synchronize() == []
    health = engine.canary.health()
    assert health.overflowed_steps == 2
    assert health.verified_entries == 4 * 13


# ---- modes ------------------------------------------------------------------------------------------------------


def test_mode_raise_raises_in_the_next_step_before_it_launches(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    engine.step(DECODE)
    engine.canary.buffers.place.synchronize()
    log = backend.to_numpy(engine.canary.buffers.log.words).copy()
    with pytest.raises(KvCorruptionError) as raised:
        engine.step(DECODE)
    assert {v.slot for v in raised.value.report.violations} == {engine.slot(1, 4)}
    assert str(raised.value) == str(raised.value.report)
    assert len(engine.reports) == 1
    engine.canary.buffers.place.synchronize()
    np.testing.assert_array_equal(backend.to_numpy(engine.canary.buffers.log.words), log)


def test_mode_log_writes_a_line_for_each_violation(backend: ArrayBackend, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(backend)
    engine.serve()
    engine.damage_token(engine.slot(1, 3), CanaryLaunchTag.HEAD_K_FULL)
    engine.step(DECODE)
    with caplog.at_level(logging.WARNING, "cupy_kvcanary"):
        (report,) = engine.canary.synchronize()
    assert [record.getMessage() for record in caplog.records] == list(report.lines())
    with caplog.at_level(logging.WARNING, "cupy_kvcanary"):
        engine.step(DECODE)  # reads it again
        assert len(engine.canary.synchronize()) == 1
    assert len(caplog.records) == 1


def test_mode_log_never_raises(backend: ArrayBackend, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(backend)
    engine.serve()
    bad = Batch(page_table=engine.array(engine.table, np.float32), prefix_lens=None, extend_seq_lens=[1])
    with caplog.at_level(logging.ERROR, "cupy_kvcanary"):
        for _ in range(3):
            with engine.canary.step(bad):
                pass
        assert engine.canary.export_records("no slots") is None
        engine.canary.copy([1], [[2]])
        engine.canary.forget([1], group="swa")
    # A kind of failure is told once, and counted each time.
    assert engine.canary.health().errors == 9
    assert len(caplog.records) < 9
    assert "kv-canary: test failed and goes on" in caplog.text
    engine.step(DECODE)
    assert engine.canary.synchronize() == []


def test_a_callback_that_fails_stops_nothing(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.canary._on_report = lambda report: 1 / 0  # type: ignore[assignment, return-value]
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    engine.step(DECODE)
    assert len(engine.canary.synchronize()) == 1
    assert engine.canary.health().errors == 1


def test_mode_raise_raises_for_wrong_arguments(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    with pytest.raises(KvCanaryError, match="kv-canary: group must be one of full, got 'swa'"):
        engine.canary.forget([1], group="swa")


def test_mode_off_does_nothing_and_takes_nothing(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="off")
    engine.serve()
    assert engine.canary.records == {}
    assert engine.canary.memory.device == 0
    assert engine.canary.poll() == engine.canary.synchronize() == []
    assert engine.canary.health().launches == {}


def test_a_forward_that_fails_is_not_stamped(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    engine.serve()
    before = {tag: backend.to_numpy(records).copy() for tag, records in engine.canary.records.items()}
    fields = engine.admit(DECODE)
    with pytest.raises(ZeroDivisionError), engine.canary.step(Batch(**fields)):
        raise ZeroDivisionError
    engine.canary.synchronize()
    for tag, records in engine.canary.records.items():
        np.testing.assert_array_equal(backend.to_numpy(records), before[tag])


# ---- the log ----------------------------------------------------------------------------------------------------


def test_reports_are_polled_once(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    engine.step(DECODE)
    assert len(engine.canary.synchronize()) == 1
    assert engine.canary.poll() == []


def test_what_the_ring_has_no_room_for_is_counted_and_the_ring_is_emptied(backend: ArrayBackend) -> None:
    engine = Engine(backend, ring_size=3)
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    for _ in range(3):
        engine.step(DECODE)
        engine.canary.buffers.place.synchronize()
    engine.canary.synchronize()
    # Four violations a step, in three steps: each time three are kept, as soon as the ring was emptied.
    assert sum(len(report.violations) + report.lost for report in engine.reports) == 12
    assert engine.canary.health().violations == 12
    assert engine.canary.health().lost_violations == 12 - sum(len(r.violations) for r in engine.reports)
    assert sum(len(report.violations) for report in engine.reports) >= 6


def test_announced_memory_is_what_is_taken(backend: ArrayBackend) -> None:
    for changed in ({}, {"swa_window_size": 4}, {"num_slots": 300, "page_size": 4}):
        pool = KvPool(
            **{"num_slots": 128, "max_reqs": 8, "max_seq_len": 32, **changed},
            device="cuda" if backend.is_gpu else "cpu",
        )
        config = CanaryConfig(ring_size=17, sweep_slice=100)
        announced = memory_of(pool, config)
        canary = Canary(pool, config)
        assert canary.memory == announced
        assert canary.buffers.nbytes == announced.device
        assert announced.records == 4 * 32 * pool.num_slots
        assert "records" in str(announced)


def test_statistics_are_logged(backend: ArrayBackend, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(backend, stats_interval=2)
    with caplog.at_level(logging.INFO, "cupy_kvcanary"):
        engine.serve(steps=5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("kv-canary: test: steps=2 ")


# ---- forms of a batch -------------------------------------------------------------------------------------------


def test_one_batch_object_over_static_buffers(backend: ArrayBackend) -> None:
    """From its second step on nothing is checked again, but what stands in the buffers is read anew."""
    engine = Engine(backend)
    engine.serve()
    fields = engine.admit(DECODE)
    batch = Batch(**fields)
    for number in range(4):
        with engine.canary.step(batch):
            engine.forward(fields)
        later = engine.admit({1: [100 + number], 2: [110 + number], 3: [120 + number]})
        for name, array in fields.items():
            array[...] = later[name]
    assert engine.canary.synchronize() == []
    assert engine.canary.health().written_entries == 4 * (13 + 2 * 3 + 4 * 3)
    engine.damage_token(engine.slot(2, 0))
    with engine.canary.step(batch):
        pass
    engine.canary.synchronize()
    assert found(engine) == {(2, engine.slot(2, 1), FailReason.VERIFY_CHAIN_HASH)}


def test_tokens_may_be_given_after_the_forward(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    fields = engine.admit({1: [11, 12, 13]})
    tokens = [fields.pop(name) for name in ("input_ids", "positions", "out_cache_loc")]
    batch = Batch(**fields)
    engine.canary.before_forward(batch)
    engine.canary.after_forward(batch, *tokens)
    engine.step({1: [14]})
    assert engine.canary.synchronize() == []
    assert engine.canary.health().written_entries == 4 * 4


def test_int32_arrays(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    for new in ({1: [11, 12, 13], 2: [21]}, DECODE):
        fields = {name: array.astype(np.int32) for name, array in engine.admit(new).items()}
        with engine.canary.step(Batch(**fields)):
            pass
    assert engine.canary.synchronize() == []
    assert engine.canary.health().verified_entries == 4 * 4


@pytest.mark.parametrize("bs_on_device", [False, True])
def test_padded_batches(backend: ArrayBackend, bs_on_device: bool) -> None:
    engine = Engine(backend, mode="raise")
    engine.serve()
    fields = engine.admit(DECODE)
    # Request rows beyond the batch, and padding requests within it, hold whatever was left there.
    for name, left in (("req_pool_indices", [0, 5, 77]), ("prefix_lens", [99] * 3), ("extend_seq_lens", [9] * 3)):
        values = backend.to_numpy(fields[name])
        fields[name] = engine.array(np.concatenate([values, left]))
    fields["bs"] = engine.array([4], np.int32) if bs_on_device else 4
    with engine.canary.step(Batch(**fields)):
        pass
    assert engine.canary.synchronize() == []
    assert engine.canary.health().written_entries == 4 * (13 + 2 * 3 + 3)


def paged(backend: ArrayBackend, form: str, page_size: int, pages: list[list[int]], lens: list[int]) -> Any:
    if form == "block table":
        table = np.zeros((len(pages), 8), np.int32)
        for row, of_row in enumerate(pages):
            table[row, : len(of_row)] = of_row
        return BlockTable(block_table=backend.array(table), page_size=page_size)
    indptr = np.cumsum([0, *map(len, pages)])
    last = [(n - 1) % page_size + 1 for n in lens]
    return PageList(
        indptr=backend.array(indptr.astype(np.int32)),
        indices=backend.array(np.concatenate([np.array(of_row, np.int32) for of_row in pages])),
        last_page_len=backend.array(np.array(last, np.int32)),
        page_size=page_size,
    )


@pytest.mark.parametrize("form", ["block table", "page list"])
def test_paged_batches(backend: ArrayBackend, form: str) -> None:
    """Two requests on pages of 4; request i is row i. Then a page is handed out twice."""
    reports: list[Any] = []
    device = "cuda" if backend.is_gpu else "cpu"
    pool = KvPool(num_slots=64, max_reqs=4, max_seq_len=32, page_size=4, device=device)
    canary = Canary(pool, CanaryConfig(), on_report=reports.append)

    def step(pages: list[list[int]], prefix: list[int], extend: list[int]) -> None:
        slots, positions = [], []
        for of_row, p, e in zip(pages, prefix, extend, strict=True):
            positions += range(p, p + e)
            slots += [of_row[i // 4] * 4 + i % 4 for i in range(p, p + e)]
        as_array = lambda values: backend.array(np.array(values, np.int32))  # noqa: E731
        batch = Batch(
            page_table=paged(backend, form, 4, pages, [p + e for p, e in zip(prefix, extend, strict=True)]),
            prefix_lens=as_array(prefix),
            extend_seq_lens=as_array(extend),
            input_ids=as_array(range(len(slots))),
            positions=as_array(positions),
            out_cache_loc=backend.array(np.array(slots)),
        )
        with canary.step(batch):
            pass

    step([[5, 2], [9]], [0, 0], [6, 3])
    step([[5, 2], [9]], [6, 3], [1, 1])
    assert canary.synchronize() == []
    step([[5, 2], [9, 2]], [7, 4], [1, 1])  # request 1 writes into request 0's page
    step([[5, 2, 7], [9, 2]], [8, 5], [1, 1])
    canary.synchronize()
    assert {(v.request, v.page, v.position) for report in reports for v in report.violations} == {
        (0, 2, 4),  # overwritten
        (0, 2, 5),  # follows on the one that was
    }
    assert canary.health().errors == 0


def test_rejected_drafts_are_overwritten(backend: ArrayBackend) -> None:
    """Four drafts are written, one is accepted: the next step's prefix ends behind it, and its slots are reused."""
    engine = Engine(backend, mode="raise")
    engine.step({1: [11, 12, 13, 14, 15, 16]})
    engine.step({1: [60, 61, 62, 63]})
    engine.lens[1] = 7
    drafts = [engine.slot(1, position) for position in range(7, 10)]
    engine.free += drafts[::-1]
    engine.step({1: [70, 71]})
    assert engine.slot(1, 7) == drafts[0]
    engine.step({1: [72]})
    assert engine.canary.synchronize() == []


def test_an_accepted_draft_that_was_never_rewritten_is_found(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.step({1: [11, 12, 13, 14, 15, 16]})
    engine.step({1: [60, 61, 62]})
    engine.lens[1] = 7
    second, third = engine.slot(1, 7), engine.slot(1, 8)
    engine.free.append(second)
    engine.step({1: [70]})
    engine.table[1, 8], engine.lens[1] = third, 9  # the engine believes that the last draft was accepted, too
    engine.step({1: [71]})
    engine.canary.synchronize()
    assert found(engine) == {(1, third, FailReason.VERIFY_CHAIN_HASH)}


def test_a_chunked_prefill_is_one_chain(backend: ArrayBackend) -> None:
    engine = Engine(backend, mode="raise")
    for chunk in ([11, 12, 13], [14, 15, 16, 17], [18]):
        engine.step({1: chunk})
    assert engine.canary.synchronize() == []
    assert engine.canary.health().verified_entries == 4 * (3 + 7)


def test_a_draft_model_with_rotated_inputs(backend: ArrayBackend) -> None:
    """Its KV at position p is of the token at p + 1; the expected tokens are those of the target model."""
    for offset, is_clean in ((1, True), (0, False)):
        engine = Engine(backend, pool={"kv_token_id_vs_position_offset": offset}, expected_tokens=True)
        text = np.zeros((ROWS, WIDTH), np.int32)
        text[1, :6] = [10, 11, 12, 13, 14, 15]
        expected = {"expected_tokens": engine.array(text, np.int32), "expected_token_lens": engine.array([6])}
        engine.step({1: [11, 12, 13, 14, 15]}, **expected)
        engine.step({1: [16]}, **expected)
        engine.canary.synchronize()
        assert (found(engine) == set()) is is_clean


def test_arrays_of_torch() -> None:
    torch = pytest.importorskip("torch")
    canary = Canary(KvPool(num_slots=64, max_reqs=2, max_seq_len=16), CanaryConfig(mode="raise"))
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[1, :4] = torch.tensor([5, 9, 3, 7])
    one = torch.ones(1, dtype=torch.int64)
    for prefix, extend in ((0, 3), (3, 1)):
        tokens = torch.arange(prefix, prefix + extend)
        batch = Batch(
            page_table=table,
            req_pool_indices=one,
            prefix_lens=one * prefix,
            extend_seq_lens=one * extend,
            input_ids=tokens + 10,
            positions=tokens,
            out_cache_loc=table[1, prefix : prefix + extend].long(),
        )
        with canary.step(batch):
            pass
    assert canary.synchronize() == []
    assert canary.health().verified_entries == 4 * 3


# ---- sliding windows --------------------------------------------------------------------------------------------


def test_a_window_with_a_mapping_has_two_groups(backend: ArrayBackend) -> None:
    mapping = np.zeros(NUM_SLOTS, np.int64)
    mapping[1:] = np.arange(NUM_SLOTS - 1)[::-1] + 1
    pool = {
        "swa_window_size": 4,
        "full_to_swa_index_mapping": backend.array(mapping),
        "swa_num_slots": NUM_SLOTS,
    }
    engine = Engine(backend, pool=pool)
    engine.serve()
    assert engine.canary.synchronize() == []
    assert set(engine.canary.records) == FOUR_TAGS | {
        CanaryLaunchTag.HEAD_K_SWA,
        CanaryLaunchTag.HEAD_V_SWA,
        CanaryLaunchTag.TAIL_K_SWA,
        CanaryLaunchTag.TAIL_V_SWA,
    }
    # Of row 1, with 8 tokens, positions 4 to 7 are in the window.
    for position in (2, 5):
        engine.damage_token(int(mapping[engine.slot(1, position)]), CanaryLaunchTag.HEAD_K_SWA)
    engine.step(DECODE)
    (report,) = engine.canary.synchronize()
    assert [(v.tag, v.slot, v.position) for v in report.violations] == [
        (CanaryLaunchTag.HEAD_K_SWA, int(mapping[engine.slot(1, 6)]), 6)
    ]


def test_a_ring_buffer_pool_has_one_group(backend: ArrayBackend) -> None:
    """Case 30: 8 slots used in turn by one request of 20 tokens, window 8; entries of evicted tokens are set to 0."""
    for is_cleared in (True, False):
        pool = KvPool(
            num_slots=9, max_reqs=1, max_seq_len=32, swa_window_size=8, device="cuda" if backend.is_gpu else "cpu"
        )
        canary = Canary(pool, CanaryConfig())
        assert {tag.name for tag in canary.records} == {"HEAD_K_SWA", "HEAD_V_SWA", "TAIL_K_SWA", "TAIL_V_SWA"}
        table = np.zeros((2, 32), np.int32)
        for position in range(20):
            table[1, position] = position % 8 + 1
            if is_cleared and position >= 8:
                table[1, position - 8] = 0
            batch = Batch(
                page_table=backend.array(table.copy()),
                req_pool_indices=backend.array(np.array([1])),
                prefix_lens=backend.array(np.array([position])),
                extend_seq_lens=backend.array(np.array([1])),
                input_ids=backend.array(np.array([100 + position])),
                positions=backend.array(np.array([position])),
                out_cache_loc=backend.array(np.array([position % 8 + 1])),
            )
            with canary.step(batch):
                pass
        reports = canary.synchronize()
        reasons = {v.reasons for report in reports for v in report.violations}
        assert reasons == (set() if is_cleared else {FailReason.VERIFY_CHAIN_HASH})


# ---- legitimate changes -----------------------------------------------------------------------------------------


def test_freed_slots_are_forgotten(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.serve()
    engine.canary.forget([engine.slot(1, 3)])
    engine.step(DECODE)
    (report,) = engine.canary.synchronize()
    stored = next(v.stored for v in report.violations if v.slot == engine.slot(1, 3))
    assert stored is not None
    assert stored.is_tombstone


def test_a_page_move_takes_the_records_along(backend: ArrayBackend) -> None:
    engine = Engine(backend, real_kv_hash="all")
    engine.serve()
    old = engine.table[1, :8].tolist()
    new = [engine.free.pop() for _ in old]
    for layer in engine.kv.values():
        layer[np.array(new)] = layer[np.array(old)]
    engine.table[1, :8] = new
    engine.canary.copy(old, engine.array(new))
    engine.step(DECODE)
    assert engine.canary.synchronize() == []


def test_records_go_out_and_come_back_with_their_kv(backend: ArrayBackend) -> None:
    """Case 29: without its records, the KV is reported as never stamped."""
    for brings_records in (True, False):
        engine = Engine(backend, real_kv_hash="all")
        engine.serve()
        old = engine.table[1, :8].tolist()
        records = backend.to_numpy(engine.canary.export_records(old))
        kv = {name: backend.to_numpy(layer)[old].copy() for name, layer in engine.kv.items()}
        assert records.shape == (4, 8, 32)
        new = [engine.free.pop() for _ in old]
        engine.table[1, :8] = new
        for name, layer in engine.kv.items():
            layer[np.array(new)] = backend.array(kv[name])
        if brings_records:
            engine.canary.import_records(new, records)
        engine.step(DECODE)
        engine.canary.synchronize()
        # The write, too: position 8 does not follow on a record that was never stamped.
        reported = {slot for _, slot, _ in found(engine)}
        assert reported == (set() if brings_records else {*new, engine.slot(1, 8)})


@pytest.mark.parametrize("keeps_tokens", [True, False])
def test_a_shifted_request_is_restamped(backend: ArrayBackend, keeps_tokens: bool) -> None:
    """Tokens 2 and 3 of row 1 are dropped, and those behind them move up by two, as in an attention sink."""
    engine = Engine(backend)
    engine.serve()
    engine.table[1, 2:6] = engine.table[1, 4:8]
    engine.tokens[1, 2:6] = engine.tokens[1, 4:8]
    engine.lens[1] = 6
    slots = engine.table[1, 2:6]
    tokens = None if keeps_tokens else engine.tokens[1, 2:6].tolist()
    engine.canary.restamp(slots.tolist(), [2, 3, 4, 5], tokens, seed_slot=engine.slot(1, 1))
    engine.step(DECODE)
    assert engine.canary.synchronize() == []
    assert engine.canary.health().errors == 0


# ---- sweeps -----------------------------------------------------------------------------------------------------


def cached(engine: Engine, row: int) -> SweepChunk:
    """A row as a prefix tree would hand it over."""
    length = int(engine.lens[row])
    slots = engine.table[row, :length].tolist()
    return SweepChunk(slots=slots, positions=list(range(length)), prev_slots=[-1, *slots[:-1]])


def test_a_sweep_verifies_what_no_request_reads(backend: ArrayBackend) -> None:
    engine = Engine(backend, sweep_slice=5)
    engine.serve()
    engine.damage_token(engine.slot(1, 3))
    sweep = engine.canary.sweep((cached(engine, row) for row in (1, 2)), total=8 + 5)
    assert sweep.progress == 0
    progress = []
    while not sweep.is_done:
        engine.step({3: [99]})
        progress.append(sweep.verified)
    # Slices end with their chunk: 5 and 3 of row 1, then 5 of row 2; the last step finds nothing more.
    assert progress == [5, 8, 13, 13]
    assert sweep.progress == 1
    engine.canary.synchronize()
    assert {(v.tag, v.slot) for report in engine.reports for v in report.violations} == {
        (CanaryLaunchTag.SWEEP_K_FULL, engine.slot(1, 4)),
        (CanaryLaunchTag.SWEEP_V_FULL, engine.slot(1, 4)),
    }
    assert engine.canary.health().launches[CanaryLaunchTag.SWEEP_K_FULL] == 6  # 3 slices, head and tail


def test_a_sweep_expects_tokens_where_it_is_given_some(backend: ArrayBackend) -> None:
    engine = Engine(backend)
    engine.serve()
    chunk = cached(engine, 2)
    tokens = engine.tokens[2, :5].tolist()
    tokens[3] += 1
    engine.canary.sweep([SweepChunk(**{**vars(chunk), "tokens": tokens})])
    engine.step({3: [99]})
    engine.canary.synchronize()
    assert {(slot, reasons) for _, slot, reasons in found(engine)} == {(engine.slot(2, 3), FailReason.VERIFY_TOKEN)}


def test_a_sweep_waits_for_its_interval_and_can_be_cancelled(backend: ArrayBackend) -> None:
    engine = Engine(backend, sweep_slice=2, sweep_interval=3)
    engine.serve(steps=3)
    sweep = engine.canary.sweep([cached(engine, 1)])
    seen = []
    for _ in range(5):
        engine.step({3: [99]})
        seen.append(sweep.verified)
    assert seen == [2, 2, 2, 4, 4]
    assert sweep.progress is None
    sweep.cancel()
    for _ in range(4):
        engine.step({3: [99]})
    assert sweep.verified == 4
    assert repr(sweep) == "Sweep(4 entries verified, done)"
