"""NumPy twin of `kernels/plan_offsets.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .page_table import batch_size, map_to_swa, read_ranges, slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..page_tables import PageTableView


def plan_offsets(
    *,
    req_pool_indices: NDArray[Any],
    prefix_lens: NDArray[Any],
    extend_seq_lens: NDArray[Any],
    page_table: PageTableView,
    full_to_swa_index_mapping: NDArray[Any] | None,
    out_verify_offsets_scratch: NDArray[np.int64],
    out_write_offsets: NDArray[np.int64],
    out_write_seed_slot_indices: NDArray[np.int64],
    out_verify_num_valid: NDArray[np.int32],
    out_verify_enable: NDArray[np.int32],
    out_write_num_valid_reqs: NDArray[np.int32],
    swa_window_size: int,
    verify_capacity: int,
    bs: int,
    bs_on_device: NDArray[np.int32] | None,
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel. Arguments were checked by the launcher."""
    bs = batch_size(bs, bs_on_device)
    ranges = read_ranges(page_table, req_pool_indices[:bs], prefix_lens[:bs], swa_window_size)
    write_lens = np.where(ranges.is_active, np.maximum(extend_seq_lens[:bs], 0), 0).astype(np.int64)
    seeds = np.full(bs, -1, np.int64)
    seeded = np.flatnonzero((ranges.prefix_lens > 0) & (write_lens > 0))
    seed_slots = slots(page_table, ranges.rows[seeded], ranges.prefix_lens[seeded] - 1)
    seeds[seeded], mapping_status = map_to_swa(seed_slots, full_to_swa_index_mapping)

    # Sums wrap silently at 64 bits, as the kernel's do.
    verify_lens = ranges.prefix_lens - ranges.window_starts
    for offsets, lens in ((out_verify_offsets_scratch, verify_lens), (out_write_offsets, write_lens)):
        offsets[0] = 0
        np.cumsum(lens, out=offsets[1 : bs + 1])
    out_write_seed_slot_indices[:bs] = seeds
    total_verify = int(out_verify_offsets_scratch[bs])
    out_verify_num_valid[0] = min(total_verify, verify_capacity)
    out_verify_enable[0] = total_verify <= verify_capacity
    out_write_num_valid_reqs[0] = bs
    if out_status is not None:
        out_status[0] |= ranges.status | mapping_status
