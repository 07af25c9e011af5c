"""What patterns of violations mean: the reported faults by number, then more, all found by real launches."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from cupy_kvcanary import CanaryLaunchTag
from cupy_kvcanary.constants import FREED_POSITION, FREED_TOKEN
from cupy_kvcanary.diagnosis import Pattern
from cupy_kvcanary.violations import decode
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.reports import batch_of, cache, patterns, report_of, summary, swept, verified, written
from tests.helpers.write import make_arguments, one_request

SLOTS = [5, 9, 3, 7, 11, 13]
TOKENS = [11, 12, 13, 14, 15, 16]


def f1(**options: object) -> HostBuffer:
    """Fixture F1: row 2 of the table, six tokens, stamped."""
    return cache({2: (SLOTS, TOKENS)}, **options)


class TestReportedFaults:
    """Cases of the fault catalogue, by number."""

    def test_05_a_changed_token_shows_at_the_record_behind_it(self) -> None:
        buffer = f1()
        buffer.set_record(7, 99)
        assert patterns(verified(buffer, batch_of({2: SLOTS}))) == {(4, 11): ("predecessor_changed", 7)}

    def test_06_a_slot_restamped_by_another_request(self) -> None:
        buffer = f1()
        buffer.stamp([3], [77])
        assert summary(verified(buffer, batch_of({2: SLOTS}))) == [("overwritten", [3], [7])]

    @pytest.mark.parametrize(
        ("zeroed", "slots", "followers"),
        [([5], [5], [9]), ([3, 7], [3, 7], [11]), (range(64), SLOTS, [])],
    )
    def test_07_zeroed_records(self, zeroed: list[int], slots: list[int], followers: list[int]) -> None:
        buffer = f1()
        for slot in zeroed:
            buffer.set_record(slot, 0, 0, 0, 0)
        assert summary(verified(buffer, batch_of({2: SLOTS}))) == [("never_stamped", slots, followers)]

    def test_08_a_shifted_page_table_row(self) -> None:
        report = verified(f1(), batch_of({2: [0, *SLOTS[:5]]}), check_holes=True)
        assert summary(report) == [("page_table_hole", [0], []), ("shifted", SLOTS[:5], [])]
        assert report.findings[1].meaning.endswith("Stored minus expected position: -1.")

    def test_09_exchanged_rows(self) -> None:
        others, other_tokens = [20, 21, 22, 23], [31, 32, 33, 34]
        buffer = cache({2: (SLOTS[:4], TOKENS[:4]), 4: (others, other_tokens)})
        expected = np.zeros((6, 16), np.int32)
        expected[2, :4], expected[4, :4] = TOKENS[:4], other_tokens
        batch = batch_of({2: others, 4: SLOTS[:4]}, expected=expected, valid_lens=[4, 4])
        assert summary(verified(buffer, batch)) == [("foreign_tokens", others, []), ("foreign_tokens", SLOTS[:4], [])]

    def test_10_a_finished_request_writes_late(self) -> None:
        slots = [20, 21, 22, 23, 24]
        buffer = cache({3: (slots, [31, 32, 33, 34, 35])})
        late = cache({2: ([*SLOTS, 20, 21, 22], [*TOKENS, 17, 18, 19])})
        buffer.canary_buf[20:23] = late.canary_buf[20:23]
        assert summary(verified(buffer, batch_of({3: slots}))) == [("overwritten", [20, 21, 22], [23])]

    def test_11_a_hole_in_a_live_prefix(self) -> None:
        report = verified(f1(), batch_of({2: [5, 9, 3, 0, 11, 13]}), check_holes=True)
        assert patterns(report) == {(3, 0): ("page_table_hole", 0)}

    def test_13_a_write_outside_of_the_buffer(self) -> None:
        assert summary(written(cache({}), one_request([63, 64, -1]))) == [("out_of_range", [64], [])]

    @pytest.mark.parametrize("outside", [1_000_000, 64, -1, -3])
    def test_14_a_read_outside_of_the_buffer(self, outside: int) -> None:
        report = verified(f1(), batch_of({2: [5, 9, outside, 7]}))
        assert summary(report) == [("out_of_range", [outside], [7])]

    def test_18_exchanged_kv_bytes_within_a_page(self) -> None:
        kv = np.random.default_rng(0).integers(0, 256, (16, 4, 48), dtype=np.uint8)
        buffer = cache({}, sources=[HostSource(kv.reshape(16, -1), 4, 48, 48)], mode=2)
        buffer.stamp([5, 6, 9], TOKENS[:3])
        kv[1, [1, 2]] = kv[1, [2, 1]]
        assert summary(verified(buffer, batch_of({2: [5, 6, 9]}), page_size=4)) == [("kv_swapped", [5, 6], [])]

    def test_28_a_rejected_draft_is_left_over(self) -> None:
        slots = [*SLOTS, 30, 31, 32, 33]
        buffer = cache({2: (slots, [*TOKENS, 17, 18, 19, 20])})
        accepted = cache({2: (slots[:8], [*TOKENS, 17, 60])})
        buffer.canary_buf[31] = accepted.canary_buf[31]
        report = verified(buffer, batch_of({2: slots[:9]}))
        assert patterns(report) == {(8, 32): ("predecessor_changed", 31)}
        assert "a rejected draft" in report.findings[0].meaning

    def test_29_pages_that_moved_without_their_records(self) -> None:
        kv = np.random.default_rng(0).integers(1, 256, (64, 32), dtype=np.uint8)
        buffer = cache({}, sources=[HostSource(kv, 1, 32, 32)], mode=2)
        buffer.stamp(SLOTS, TOKENS)
        kv[[40, 41, 42]] = kv[SLOTS[:3]]
        report = verified(buffer, batch_of({2: [40, 41, 42, 7, 11, 13]}))
        assert summary(report) == [("never_stamped", [40, 41, 42], [7])]
        assert report.findings[0].meaning.endswith("There are KV bytes: they came without their record.")

    def test_30_a_ring_of_slots_whose_evicted_entries_are_not_cleared(self) -> None:
        ring = [1 + position % 8 for position in range(20)]
        buffer = cache({2: (ring, list(range(100, 120)))})
        report = verified(copy.deepcopy(buffer), batch_of({2: ring}, window=8))
        assert patterns(report) == {(12, ring[12]): ("evicted", ring[11])}
        assert "look at slot 4" in report.findings[0].meaning.lower()
        # All of it is read: what was written over is evicted too, once or twice.
        report = verified(buffer, batch_of({2: ring}))
        assert {pattern for pattern, _ in patterns(report).values()} == {"evicted"}
        assert report.findings[0].meaning.endswith("Stored minus expected position: +16, +8.")


A, A_TOKENS = list(range(4, 24)), list(range(100, 120))
B, B_TOKENS = list(range(32, 52)), list(range(200, 220))


def two_requests() -> HostBuffer:
    """Rows 2 and 4 with 20 tokens each, in whole pages of 4."""
    return cache({2: (A, A_TOKENS), 4: (B, B_TOKENS)})


def exchanged(i: int, j: int, size: int = 1) -> list[int]:
    """Row 2 with the entries from i and from j exchanged."""
    row = A.copy()
    row[i : i + size], row[j : j + size] = row[j : j + size], row[i : i + size]
    return row


class TestSwapped:
    @pytest.mark.parametrize(("i", "j"), [(1, 2), (1, 9), (0, 19)])
    def test_two_entries_of_a_row(self, i: int, j: int) -> None:
        (finding,) = summary(verified(two_requests(), batch_of({2: exchanged(i, j)})))
        assert (finding[0], sorted(finding[1])) == ("swapped", sorted([A[i], A[j]]))

    @pytest.mark.parametrize(("i", "j"), [(4, 8), (4, 12), (0, 16)])
    def test_two_pages_of_a_row(self, i: int, j: int) -> None:
        report = verified(two_requests(), batch_of({2: exchanged(i, j, 4)}), page_size=4)
        (finding,) = summary(report)
        assert (finding[0], sorted(finding[1])) == ("swapped", A[i : i + 4] + A[j : j + 4])

    @pytest.mark.parametrize("size", [1, 4])
    @pytest.mark.parametrize(("i", "j"), [(8, 8), (4, 12)])
    def test_entries_and_pages_of_two_rows(self, size: int, i: int, j: int) -> None:
        a, b = A.copy(), B.copy()
        a[i : i + size], b[j : j + size] = b[j : j + size], a[i : i + size]
        found = summary(verified(two_requests(), batch_of({2: a, 4: b}), page_size=size))
        assert [pattern for pattern, _, _ in found] == ["swapped", "swapped"]
        assert {B[j]} <= set(found[0][1])
        assert {A[i]} <= set(found[1][1])


class TestWrongPage:
    @pytest.mark.parametrize("of", [B[4:8], B[8:12], A[12:16]])
    def test_an_entry_that_leads_to_another_page(self, of: list[int]) -> None:
        row = A.copy()
        row[4:8] = of
        report = verified(two_requests(), batch_of({2: row, 4: B}), page_size=4)
        assert [finding.pattern for finding in report.findings] == [Pattern.WRONG_PAGE]
        assert report.findings[0].suspects[0] == of[0]
        assert [v.slot for v in report.findings[0].followers] == [A[8]]

    def test_with_tokens_known_its_records_are_told_together(self) -> None:
        row, expected = A.copy(), np.zeros((6, 32), np.int32)
        row[4:8], expected[2, :20] = B[4:8], A_TOKENS
        batch = batch_of({2: row}, expected=expected, valid_lens=[20])
        assert summary(verified(two_requests(), batch, page_size=4)) == [("wrong_page", B[4:8], [A[8]])]

    def test_a_page_that_was_freed_too_early_and_written_by_another(self) -> None:
        buffer = two_requests()
        buffer.stamp([8, 9, 10, 11], [1, 2, 3, 4])
        assert summary(verified(buffer, batch_of({2: A}), page_size=4)) == [("wrong_page", [8, 9, 10, 11], [12])]

    def test_half_a_page_was_overwritten(self) -> None:
        buffer = two_requests()
        buffer.stamp([8, 9], [1, 2])
        assert summary(verified(buffer, batch_of({2: A}), page_size=4)) == [("overwritten", [8, 9], [10])]


@pytest.mark.parametrize("verify", [verified, swept])
def test_freed_slots_that_are_still_read(verify: object) -> None:
    buffer = two_requests()
    for slot in range(8, 12):
        buffer.set_record(slot, FREED_TOKEN, FREED_POSITION, 0, 0)
    report = verify(buffer, batch_of({2: A}))  # type: ignore[operator]
    assert summary(report) == [("stale_after_free", [8, 9, 10, 11], [12])]


@pytest.mark.parametrize("row", [[*A[:3], *A[2:]], [*A[:3], *A[4:]], [*A[1:]]])
def test_an_entry_too_many_or_too_few(row: list[int]) -> None:
    """From there on the row is off by one."""
    (finding,) = summary(verified(two_requests(), batch_of({2: row})))
    assert finding[0] == "shifted"
    assert finding[1][-1] == A[-1]


@pytest.mark.parametrize(
    "damage", [{"position": 99}, {"prev_hash": 12345}, {"position": 7, "prev_hash": 12345}, {"position": -5}]
)
@pytest.mark.parametrize("chain", ["splitmix64", "affine"])
def test_a_damaged_record_is_told_from_another_requests(damage: dict[str, int], chain: str) -> None:
    """The record behind it fits once the expected values stand in it."""
    buffer = cache({})
    buffer.stamp(A, A_TOKENS, chain)
    token, position, prev_hash, _ = buffer.record(10)
    buffer.set_record(10, token, damage.get("position", position), damage.get("prev_hash", prev_hash))
    report = verified(copy.deepcopy(buffer), batch_of({2: A}), chain=chain)
    assert summary(report) == [("damaged_record", [10], [11])]
    buffer.set_record(10, *two_requests().record(B[6]))  # at the same position
    assert summary(verified(buffer, batch_of({2: A}), chain=chain)) == [("overwritten", [10], [11])]


def test_a_damaged_token_and_a_wrong_one() -> None:
    """Where tokens are known: damaged after the stamp, or given to the forward pass like that."""
    expected = np.zeros((6, 32), np.int32)
    expected[2, :20] = A_TOKENS
    batch = batch_of({2: A}, expected=expected, valid_lens=[20])
    buffer = two_requests()
    buffer.set_record(10, 7777)
    assert summary(verified(buffer, batch)) == [("damaged_record", [10], [11])]
    buffer = cache({2: (A, [*A_TOKENS[:6], 7777, *A_TOKENS[7:]])})
    assert summary(verified(buffer, batch)) == [("foreign_tokens", [10], [])]


@pytest.mark.parametrize(("first", "remark"), [(1, "itself fits."), (0, "The bytes are all zero now.")])
def test_changed_kv_bytes(first: int, remark: str) -> None:
    kv = np.random.default_rng(0).integers(1, 256, (64, 32), dtype=np.uint8)
    buffer = cache({}, sources=[HostSource(kv, 1, 32, 32)], mode=2)
    buffer.stamp(SLOTS, TOKENS)
    kv[7] = 0
    kv[7, :first] = 1
    report = verified(buffer, batch_of({2: SLOTS}))
    assert summary(report) == [("kv_changed", [7], [])]
    assert report.findings[0].meaning.endswith(remark)


def test_kv_that_was_written_behind_the_stamp() -> None:
    kv = np.zeros((64, 32), np.uint8)
    buffer = cache({}, sources=[HostSource(kv, 1, 32, 32)], mode=2)
    buffer.stamp(SLOTS, TOKENS)
    kv[7] = 1
    finding = verified(buffer, batch_of({2: SLOTS})).findings[0]
    assert finding.meaning.endswith("The bytes were all zero when the record was stamped.")


def test_a_changed_byte_does_not_explain_the_broken_chain_behind_it() -> None:
    kv = np.ones((64, 32), np.uint8)
    buffer = cache({}, sources=[HostSource(kv, 1, 32, 32)], mode=2)
    buffer.stamp(SLOTS, TOKENS)
    kv[7, 3] ^= 1
    buffer.set_record(7, 99)
    report = verified(buffer, batch_of({2: SLOTS}))
    assert patterns(report) == {(3, 7): ("kv_changed", 7), (4, 11): ("predecessor_changed", 7)}


def test_inputs_of_a_write() -> None:
    arguments = make_arguments(
        [0, 3], [-1], [1, 2, 3], [0, 1, 2], [4, 5, 6], expected_tokens=[1, 9, 3], expected_positions=[0, 1, 5]
    )
    assert summary(written(cache({}), arguments)) == [("wrong_input", [5, 6], [])]
    buffer = cache({2: ([4, 5], [1, 2])}, enable_chain_position_assert=1)
    assert summary(written(buffer, one_request([6, 7], first_position=9, seed=5))) == [("wrong_input", [6], [])]
    assert summary(written(cache({}), one_request([5, 6], seed=99))) == [("out_of_range", [99], [])]


def test_without_details_each_violation_speaks_for_itself() -> None:
    buffer = f1(ring_capacity=16)
    buffer.stamp([3], [77])
    buffer.set_record(13, 0, 0, 0, 0)
    verified(buffer, batch_of({2: SLOTS}))
    report = report_of(decode(buffer.ring[: buffer.violation_count], None, step=1, page_size=1))
    assert [(v.slot, d.pattern.value) for v, d in zip(report.violations, report.diagnoses, strict=True)] == [
        (3, "overwritten"),
        (7, "predecessor_changed"),
        (13, "never_stamped"),
    ]


class TestFindings:
    def test_buffers_that_tell_the_same_are_told_together(self) -> None:
        buffers = [f1(kernel_kind=kind) for kind in range(4)]
        for buffer in buffers:
            buffer.stamp([3], [77])
        (finding,) = verified(buffers, batch_of({2: SLOTS})).findings
        assert finding.buffers == "full attention, K and V, head and tail"
        assert len(finding.violations) == 8

    def test_only_some_buffers(self) -> None:
        buffers = [f1(kernel_kind=kind) for kind in (0, 1, 2, 3, CanaryLaunchTag.SWEEP_K_SWA, 77)]
        for i in (1, 2, 4, 5):
            buffers[i].stamp([3], [77])
        found = verified(buffers, batch_of({2: SLOTS})).findings
        assert [(finding.first.launch, finding.buffers) for finding in found] == [
            ("sweep", "sliding window, K, sweep"),
            ("verify", "full attention, V head, K tail"),
            ("verify", "buffer 77"),
        ]

    def test_requests_that_share_a_prefix_are_told_together(self) -> None:
        buffer = f1()
        buffer.set_record(9, 0, 0, 0, 0)
        (finding,) = verified(buffer, batch_of({2: SLOTS, 3: SLOTS[:4]})).findings
        assert finding.where == "request 0 (row 2), request 1 (row 3); position 1; slot 9"

    def test_a_sweep_links_positions_by_slots(self) -> None:
        buffer = f1()
        for slot in (9, 3):
            buffer.set_record(slot, 0, 0, 0, 0)
        (finding,) = swept(buffer, batch_of({2: SLOTS})).findings
        assert finding.where == "positions 1-2; slots 9, 3"
        assert [v.slot for v in finding.followers] == [7]


def test_every_pattern_has_a_meaning() -> None:
    assert all(pattern.meaning.endswith(".") for pattern in Pattern)
