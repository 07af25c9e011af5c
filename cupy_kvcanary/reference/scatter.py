"""NumPy twin of `kernels/scatter.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..constants import StatusBit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


def scatter(
    *,
    flat_in: Int64s,
    offsets: Int64s,
    req_pool_indices: Int64s,
    pool_out: NDArray[np.int32],
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel. Arguments were checked by the launcher."""
    num_rows, max_context_len = pool_out.shape
    is_skipped = False
    for r, row in enumerate(req_pool_indices.tolist()):
        start, end = offsets[r : r + 2].tolist()
        if not 0 <= row < num_rows or end < start:
            is_skipped = True
            continue
        end = min(end, start + max_context_len)
        first, last = (min(max(bound, 0), len(flat_in)) for bound in (start, end))
        is_skipped |= last - first < end - start
        pool_out[row, first - start : last - start] = flat_in[first:last].astype(np.int32)
    if out_status is not None and is_skipped:
        out_status[0] |= StatusBit.SCATTER_OUT_OF_RANGE
