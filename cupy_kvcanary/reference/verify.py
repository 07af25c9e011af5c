"""NumPy twins of the kernels of `kernels/verify.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..constants import FailReason
from .page_table import batch_size, map_to_swa, read_ranges, slots
from .records import anchor_hash, append_violations, hash_real_kv, link, no_details, records

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ..buffers import CanaryBufferView, Chain
    from ..page_tables import PageTableView

    Int64s = NDArray[np.int64]


class Entries(NamedTuple):
    """Things to check, one array of int64 for each field."""

    slots: Int64s
    prev_slots: Int64s
    positions: Int64s
    expected_tokens: Int64s
    requests: Int64s
    request_rows: Int64s
    next_slots: Int64s


def verify(
    *,
    buffers: tuple[CanaryBufferView, ...],
    verify_slot_indices: Int64s,
    verify_expected_tokens: Int64s,
    verify_expected_positions: Int64s,
    verify_prev_slot_indices: Int64s,
    verify_num_valid: NDArray[np.int32],
    enable: NDArray[np.int32],
    check_verify_expected_token: bool,
    padding_slot: int,
    check_holes: bool,
    chain: Chain,
) -> None:
    """Same arguments, results and bytes as the kernel, but for the order of violations."""
    num_entries = int(np.clip(verify_num_valid[0], 0, len(verify_slot_indices))) if enable[0] else 0
    unknown = np.full(num_entries, -1, np.int64)
    arrays = (verify_slot_indices, verify_prev_slot_indices, verify_expected_positions, verify_expected_tokens)
    entries = Entries(*(array[:num_entries] for array in (*arrays, unknown, unknown, unknown)))
    for buffer in buffers:
        for part in _parts(entries):
            _check(buffer, part, check_verify_expected_token, padding_slot, check_holes, chain)
        _count(buffer, num_entries, is_enabled=bool(enable[0]))


def verify_batch(
    *,
    buffers: tuple[CanaryBufferView, ...],
    req_pool_indices: NDArray[Any],
    prefix_lens: NDArray[Any],
    page_table: PageTableView,
    full_to_swa_index_mapping: NDArray[Any] | None,
    verify_offsets_scratch: Int64s,
    verify_num_valid: NDArray[np.int32],
    verify_enable: NDArray[np.int32],
    req_to_verify_expected_tokens: NDArray[np.int32] | None,
    req_to_verify_expected_tokens_valid_lens: NDArray[Any] | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    verify_capacity: int,
    bs: int,
    bs_on_device: NDArray[np.int32] | None,
    check_verify_expected_token: bool,
    padding_slot: int,
    check_holes: bool,
    chain: Chain,
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel, but for the order of violations."""
    bs = batch_size(bs, bs_on_device)
    num_entries = int(np.clip(verify_num_valid[0], 0, verify_capacity)) if verify_enable[0] and bs else 0
    t = np.arange(num_entries)
    offsets = verify_offsets_scratch
    r = np.maximum(np.searchsorted(offsets[:bs], t, side="right") - 1, 0)
    # Rows without entries are not looked at, as in the kernel.
    used, r_of_used = np.unique(r, return_inverse=True)
    ranges = read_ranges(page_table, req_pool_indices[used], prefix_lens[used], swa_window_size)
    positions = ranges.window_starts[r_of_used] + (t - offsets[r])
    # Offsets that are not those of this batch must not lead outside of the row.
    present = (offsets[r] >= 0) & (t >= offsets[r]) & (positions < ranges.prefix_lens[r_of_used])
    positions, rows = positions[present], ranges.rows[r_of_used][present]

    at_positions, status = map_to_swa(slots(page_table, rows, positions), full_to_swa_index_mapping)
    has_prev = np.flatnonzero(positions > 0)
    prev_slots = np.full(len(positions), -1, np.int64)
    before = slots(page_table, rows[has_prev], positions[has_prev] - 1)
    prev_slots[has_prev], prev_status = map_to_swa(before, full_to_swa_index_mapping)
    next_slots = np.full(len(positions), -1, np.int64)
    if any(buffer.violation_details is not None for buffer in buffers):
        has_next = np.flatnonzero(positions + 1 < ranges.prefix_lens[r_of_used][present])
        behind = slots(page_table, rows[has_next], positions[has_next] + 1)
        next_slots[has_next], _ = map_to_swa(behind, full_to_swa_index_mapping)
    tokens = np.full(len(positions), -1, np.int64)
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is not None:
        pool_rows, width = req_to_verify_expected_tokens.shape
        index = positions + kv_token_id_vs_position_offset
        known = (rows < pool_rows) & (index >= 0) & (index < width)
        known &= index < req_to_verify_expected_tokens_valid_lens[r[present]]
        tokens[known] = req_to_verify_expected_tokens[rows[known], index[known]]

    entries = Entries(at_positions, prev_slots, positions, tokens, r[present], rows, next_slots)
    for buffer in buffers:
        for part in _parts(entries):
            _check(buffer, part, check_verify_expected_token, padding_slot, check_holes, chain)
        _count(buffer, num_entries, is_enabled=bool(verify_enable[0]))
    if out_status is not None:
        out_status[0] |= ranges.status | status | prev_status


_PART = 16384
"""Entries that are checked at a time: arrays of so many stay in a processor's cache, which doubles the speed."""


def _parts(entries: Entries) -> Iterator[Entries]:
    for start in range(0, len(entries.slots), _PART):
        yield Entries(*(array[start : start + _PART] for array in entries))


def _check(
    buffer: CanaryBufferView,
    entries: Entries,
    check_verify_expected_token: bool,
    padding_slot: int,
    check_holes: bool,
    chain: Chain,
) -> None:
    """Append a violation for each entry that is not as its record says; count the checks that are left out."""
    slots, prev_slots = entries.slots, entries.prev_slots
    expected_tokens = entries.expected_tokens if check_verify_expected_token else np.full(len(slots), -1, np.int64)
    is_padding = (slots == padding_slot) & (slots >= 0)
    is_read = ~is_padding & (slots >= 0) & (slots < buffer.num_slots)
    fields = records(buffer)
    stored = np.zeros((len(slots), 4), np.uint64)
    stored[is_read] = fields[slots[is_read]]
    token, position, prev_hash, real_kv_hash = stored.T

    expected_hash = np.zeros(len(slots), np.uint64)
    expected_hash[prev_slots < 0] = anchor_hash()
    unreachable = (prev_slots == padding_slot) & (prev_slots >= 0)
    expected_hash[unreachable] = prev_hash[unreachable]
    outside = ~unreachable & (prev_slots >= buffer.num_slots)
    linked = (prev_slots >= 0) & ~unreachable & ~outside
    before = fields[prev_slots[linked]]
    expected_hash[linked] = link(chain, before[:, 2], before[:, 0], before[:, 1])

    bits = np.where(outside, FailReason.PREDECESSOR_OUT_OF_RANGE, 0)
    bits[~is_read] |= FailReason.VERIFY_SLOT_OUT_OF_RANGE
    bits[is_padding] = FailReason.PAGE_TABLE_HOLE if check_holes else 0
    real_kv = np.zeros(len(slots), np.uint64)
    real_kv[is_read] = hash_real_kv(buffer, slots[is_read])
    wrong_token = (expected_tokens != -1) & (token != expected_tokens.view(np.uint64))
    for reason, is_wrong in (
        (FailReason.VERIFY_CHAIN_HASH, ~outside & (prev_hash != expected_hash)),
        (FailReason.VERIFY_POSITION, position != entries.positions.view(np.uint64)),
        (FailReason.VERIFY_REAL_KV_HASH, real_kv_hash != real_kv),
        (FailReason.VERIFY_TOKEN, wrong_token),
    ):
        bits[is_read & is_wrong] |= reason

    failed = np.flatnonzero(bits)
    rows = np.empty((len(failed), 8), np.int64)
    rows[:, 0] = buffer.kernel_kind
    rows[:, 4] = expected_tokens[failed]
    for column, values in ((2, position), (3, token), (5, prev_hash), (6, expected_hash)):
        rows[:, column] = values[failed].view(np.int64)
    rows[:, 1], rows[:, 7] = slots[failed], bits[failed]
    details = no_details(len(failed))
    for column, known in (
        (0, entries.requests),
        (1, entries.request_rows),
        (2, entries.positions),
        (3, prev_slots),
        (7, entries.next_slots),
        (11, real_kv_hash.view(np.int64)),
        (12, real_kv.view(np.int64)),
    ):
        details[:, column] = known[failed]
    for column in (3, 7):
        neighbours = details[:, column]
        is_known = (neighbours >= 0) & (neighbours < buffer.num_slots) & (neighbours != padding_slot)
        details[is_known, column + 1 : column + 4] = fields[neighbours[is_known], :3].view(np.int64)
    append_violations(buffer, rows, details)
    if buffer.skip_counters is not None:
        buffer.skip_counters[0] += np.count_nonzero(is_padding | unreachable)


def _count(buffer: CanaryBufferView, num_entries: int, *, is_enabled: bool) -> None:
    buffer.slot_run_counter[0] += num_entries
    buffer.kernel_run_counter[0] += 1
    if buffer.skip_counters is not None and not is_enabled:
        buffer.skip_counters[1] += 1
