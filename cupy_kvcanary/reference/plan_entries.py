"""NumPy twin of `kernels/plan_entries.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .page_table import batch_size, map_to_swa, read_ranges, slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..page_tables import PageTableView

    Int64s = NDArray[np.int64]


def plan_entries(
    *,
    req_pool_indices: Int64s,
    prefix_lens: Int64s,
    page_table: PageTableView,
    full_to_swa_index_mapping: NDArray[Any] | None,
    verify_offsets_scratch: Int64s,
    verify_enable: NDArray[np.int32],
    req_to_verify_expected_tokens: NDArray[np.int32] | None,
    req_to_verify_expected_tokens_valid_lens: Int64s | None,
    out_verify_slot_indices: Int64s,
    out_verify_expected_tokens: Int64s,
    out_verify_expected_positions: Int64s,
    out_verify_prev_slot_indices: Int64s,
    out_write_offsets: Int64s | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    bs: int,
    bs_on_device: NDArray[np.int32] | None,
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel. Arguments were checked by the launcher."""
    bs = batch_size(bs, bs_on_device)
    if out_write_offsets is not None:
        out_write_offsets[bs + 1 :] = 0
    if bs == 0 or verify_enable[0] == 0:
        return
    num_entries = int(np.clip(verify_offsets_scratch[bs], 0, len(out_verify_slot_indices)))
    visited, inverse = _requests_of(num_entries, verify_offsets_scratch[:bs])
    ranges = read_ranges(page_table, req_pool_indices[visited], prefix_lens[visited], swa_window_size)
    # Wraps to a large number where hostile offsets are above the entry, as in the kernel.
    indices = (np.arange(num_entries) - verify_offsets_scratch[visited][inverse]).view(np.uint64)
    is_read = indices < (ranges.prefix_lens - ranges.window_starts)[inverse].view(np.uint64)
    entries: Any = slice(num_entries)
    if not is_read.all():
        entries = np.flatnonzero(is_read)
        inverse, indices = inverse[entries], indices[entries]

    rows = ranges.rows[inverse]
    positions = ranges.window_starts[inverse] + indices.view(np.int64)
    out_verify_slot_indices[entries], status = map_to_swa(slots(page_table, rows, positions), full_to_swa_index_mapping)
    before, prev_status = map_to_swa(slots(page_table, rows, np.maximum(positions - 1, 0)), full_to_swa_index_mapping)
    out_verify_prev_slot_indices[entries] = np.where(positions > 0, before, -1)
    out_verify_expected_positions[entries] = positions
    tokens = np.full(len(positions), -1, np.int64)
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is not None:
        num_rows, max_context_len = req_to_verify_expected_tokens.shape
        valid_lens = np.minimum(req_to_verify_expected_tokens_valid_lens[visited], max_context_len)
        num_tokens = np.where(ranges.rows < num_rows, valid_lens, 0)[inverse]
        indices_of_tokens = positions + kv_token_id_vs_position_offset
        known = (indices_of_tokens >= 0) & (indices_of_tokens < num_tokens)
        tokens[known] = req_to_verify_expected_tokens[rows[known], indices_of_tokens[known]]
    out_verify_expected_tokens[entries] = tokens
    if out_status is not None:
        out_status[0] |= ranges.status | status | prev_status


def _requests_of(num_entries: int, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Requests that have entries, and of each entry, which of these: the last whose offset is not above the entry.

    For offsets that are not sorted, what the kernel's search finds.
    """
    if (offsets[1:] >= offsets[:-1]).all():
        ends = np.append(np.clip(offsets[1:], 0, num_entries), num_entries)
        lens = np.diff(ends, prepend=0)
        visited = np.flatnonzero(lens)
        return visited, np.repeat(np.arange(len(visited)), lens[visited])
    entries = np.arange(num_entries)
    requests = np.zeros_like(entries)
    for bit in reversed(range(len(offsets).bit_length())):
        candidates = np.minimum(requests + (1 << bit), len(offsets))
        is_behind = (candidates < len(offsets)) & (offsets[np.minimum(candidates, len(offsets) - 1)] <= entries)
        requests = np.where(is_behind, candidates, requests)
    return np.unique(requests, return_inverse=True)
