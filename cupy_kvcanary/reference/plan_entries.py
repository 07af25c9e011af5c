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
    num_entries = np.clip(verify_offsets_scratch[bs], 0, len(out_verify_slot_indices))
    entries = np.arange(num_entries, dtype=np.int64)
    requests = _requests_of(entries, verify_offsets_scratch[:bs])
    visited, inverse = np.unique(requests, return_inverse=True)
    ranges = read_ranges(page_table, req_pool_indices[visited], prefix_lens[visited], swa_window_size)
    # Wraps to a large number where hostile offsets are above the entry, as in the kernel.
    indices = (entries - verify_offsets_scratch[requests]).view(np.uint64)
    is_read = indices < (ranges.prefix_lens - ranges.window_starts)[inverse].view(np.uint64)

    entries, requests, inverse = entries[is_read], requests[is_read], inverse[is_read]
    rows = ranges.rows[inverse]
    positions = ranges.window_starts[inverse] + indices[is_read].view(np.int64)
    has_prev = positions > 0
    prev_slots = np.full(len(entries), -1, np.int64)
    prev_slots[has_prev], prev_status = map_to_swa(
        slots(page_table, rows[has_prev], positions[has_prev] - 1), full_to_swa_index_mapping
    )
    out_verify_slot_indices[entries], status = map_to_swa(slots(page_table, rows, positions), full_to_swa_index_mapping)
    out_verify_prev_slot_indices[entries] = prev_slots
    out_verify_expected_positions[entries] = positions
    out_verify_expected_tokens[entries] = -1
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is not None:
        num_rows, max_context_len = req_to_verify_expected_tokens.shape
        num_tokens = np.where(rows < num_rows, req_to_verify_expected_tokens_valid_lens[requests], 0)
        indices_of_tokens = positions + kv_token_id_vs_position_offset
        known = (indices_of_tokens >= 0) & (indices_of_tokens < np.minimum(num_tokens, max_context_len))
        out_verify_expected_tokens[entries[known]] = req_to_verify_expected_tokens[
            rows[known], indices_of_tokens[known]
        ]
    if out_status is not None:
        out_status[0] |= ranges.status | status | prev_status


def _requests_of(entries: Int64s, offsets: Int64s) -> Int64s:
    """Last request whose offset is not above the entry; for offsets that are not sorted, the kernel's search."""
    requests = np.zeros_like(entries)
    for bit in reversed(range(len(offsets).bit_length())):
        candidates = np.minimum(requests + (1 << bit), len(offsets))
        is_behind = (candidates < len(offsets)) & (offsets[np.minimum(candidates, len(offsets) - 1)] <= entries)
        requests = np.where(is_behind, candidates, requests)
    return requests
