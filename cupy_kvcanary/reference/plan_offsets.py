"""NumPy twin of `kernels/plan_offsets.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..constants import REQ_POOL_IDX_PADDING, StatusBit

if TYPE_CHECKING:
    from numpy.typing import NDArray


def plan_offsets(
    *,
    req_pool_indices: NDArray[Any],
    prefix_lens: NDArray[Any],
    extend_seq_lens: NDArray[Any],
    req_to_token: NDArray[Any],
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
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel. Arguments were checked by the launcher."""
    max_reqs, max_seq_len = req_to_token.shape
    rows = req_pool_indices[:bs].astype(np.int64)
    in_range = (rows >= 0) & (rows < max_reqs)
    active = in_range & (rows != REQ_POOL_IDX_PADDING)
    prefix = np.where(active, prefix_lens[:bs], 0).astype(np.int64)
    too_long = prefix > max_seq_len
    prefix = np.clip(prefix, 0, max_seq_len)
    verify_lens = np.minimum(prefix, swa_window_size) if swa_window_size > 0 else prefix
    write_lens = np.where(active, np.maximum(extend_seq_lens[:bs], 0), 0).astype(np.int64)

    seeds = np.full(bs, -1, np.int64)
    seeded = np.flatnonzero((prefix > 0) & (write_lens > 0))
    slots = req_to_token[rows[seeded], prefix[seeded] - 1].astype(np.int64)
    outside_mapping = False
    if full_to_swa_index_mapping is not None:
        last = len(full_to_swa_index_mapping) - 1
        outside_mapping = bool((slots > last).any())
        slots = np.where(slots < 0, slots, full_to_swa_index_mapping[np.clip(slots, 0, last)])
    seeds[seeded] = slots

    # Sums wrap silently at 64 bits, as the kernel's do.
    for offsets, lens in ((out_verify_offsets_scratch, verify_lens), (out_write_offsets, write_lens)):
        offsets[0] = 0
        np.cumsum(lens, out=offsets[1 : bs + 1])
    out_write_seed_slot_indices[:bs] = seeds
    total_verify = int(out_verify_offsets_scratch[bs])
    out_verify_num_valid[0] = min(total_verify, verify_capacity)
    out_verify_enable[0] = total_verify <= verify_capacity
    out_write_num_valid_reqs[0] = bs

    if out_status is not None:
        out_status[0] |= (
            (StatusBit.REQUEST_ROW_OUT_OF_RANGE if not in_range.all() else 0)
            | (StatusBit.PREFIX_LEN_OUT_OF_RANGE if too_long.any() else 0)
            | (StatusBit.SLOT_OUT_OF_MAPPING if outside_mapping else 0)
        )
