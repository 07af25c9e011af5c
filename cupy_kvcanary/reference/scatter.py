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
    starts, ends, rows = offsets[:-1], offsets[1:], req_pool_indices
    is_valid = (rows >= 0) & (rows < num_rows) & (ends >= starts)
    starts, ends, rows = starts[is_valid], ends[is_valid], rows[is_valid]
    # The difference of hostile offsets may need all 64 bits.
    wanted = np.minimum(ends.view(np.uint64) - starts.view(np.uint64), np.uint64(max_context_len)).view(np.int64)
    firsts, lasts = (np.clip(bounds, 0, len(flat_in)) for bounds in (starts, starts + wanted))
    lens = lasts - firsts
    if out_status is not None and not (is_valid.all() and (lens == wanted).all()):
        out_status[0] |= StatusBit.SCATTER_OUT_OF_RANGE

    # The tokens of one request after another.
    before = np.cumsum(lens) - lens
    tokens = np.repeat(firsts - before, lens) + np.arange(lens.sum())
    pool_out[np.repeat(rows, lens), tokens - np.repeat(starts, lens)] = flat_in[tokens].astype(np.int32)
