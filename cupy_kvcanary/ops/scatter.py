"""Scatter request token ids: each request's tokens of a flat array to the start of its row of a pool."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import ArrayView, view_arrays
from ..checks import (
    INT32,
    INT64,
    check_contiguous,
    check_contiguous_rows,
    check_dtype,
    check_fits_int32,
    check_length,
    check_positive,
    check_rank,
)
from ..constants import SCATTER_THREADS
from ..launch import Call, Launch, Operation, ceil_div, checked_call
from ..launcher import Launcher
from ..reference.scatter import scatter as reference

SCATTER_ARGS = np.dtype(
    [
        ("flat_in", np.uint64),
        ("offsets", np.uint64),
        ("req_pool_indices", np.uint64),
        ("pool_out", np.uint64),
        ("out_status", np.uint64),
        ("num_tokens", np.int64),
        ("num_rows", np.int64),
        ("max_context_len", np.int64),
        ("stride0", np.int64),
        ("blocks_per_request", np.int64),
    ],
    align=True,
)
"""Twin of `ScatterArgs` in kernels/scatter.cu."""

# Blocks that a large GPU holds at once: with fewer requests, several blocks share the tokens of each.
_ENOUGH_BLOCKS = 8 * 132


@Launcher
def launch_scatter_req_token_ids_kernel(
    *,
    flat_in: Any,
    offsets: Any,
    req_pool_indices: Any,
    pool_out: Any,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Copy each request's tokens to the start of its row of the pool, in place (kernel `kvc_scatter`).

    For each request r of a batch, as far as the row and the tokens exist::

        n = min(offsets[r + 1] - offsets[r], max_context_len)
        pool_out[req_pool_indices[r], :n] = int32(flat_in[offsets[r] : offsets[r] + n])

    Parameters
    ----------
    flat_in : int64[tokens], device, read.
    offsets : int64[bs + 1], device, read: where each request's tokens start, then their end.
    req_pool_indices : int64[bs], device, read. A row that occurs twice holds tokens of either request.
    pool_out : int32[max_reqs, max_context_len], device, written in place, the rest of it untouched; rows are contiguous
        and any positive distance apart.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s.
    stream : None (the arrays' library's current stream), an int handle, or a CuPy, torch or `__cuda_stream__` stream.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    All arrays are on one device; CPU arrays run on NumPy. Allocates nothing on the device and may be captured in a CUDA
    graph once the kernel was compiled by an earlier call. Reads 8 bytes and writes 4 a token.

    """
    views = view_arrays(
        {
            "flat_in": flat_in,
            "offsets": offsets,
            "req_pool_indices": req_pool_indices,
            "pool_out": pool_out,
            "out_status": out_status,
        },
        optional=("out_status",),
    )
    for name, view in views.items():
        check_rank(name, view, 2 if name == "pool_out" else 1)
        if name == "pool_out":
            check_contiguous_rows(name, view)
        else:
            check_contiguous(name, view)
        check_dtype(name, view, INT32 if name in ("pool_out", "out_status") else INT64)
    check_fits_int32("req_pool_indices length", views["req_pool_indices"].size)
    check_length("offsets", views["offsets"].size, views["req_pool_indices"].size + 1)
    check_positive("pool_out_stride0", views["pool_out"].row_stride)
    if "out_status" in views:
        check_length("out_status", views["out_status"].size, 1)
    return checked_call(OPERATION, {**views, "out_status": views.get("out_status")}, stream)


def _launches(
    *,
    flat_in: ArrayView,
    offsets: ArrayView,
    req_pool_indices: ArrayView,
    pool_out: ArrayView,
    out_status: ArrayView | None,
) -> list[Launch]:
    bs = req_pool_indices.size
    if bs == 0:
        return []
    num_rows, max_context_len = pool_out.shape
    blocks_of_longest = ceil_div(min(max_context_len, flat_in.size), SCATTER_THREADS)
    blocks_per_request = max(1, min(blocks_of_longest, ceil_div(_ENOUGH_BLOCKS, bs)))
    args = np.array(
        (
            flat_in.pointer,
            offsets.pointer,
            req_pool_indices.pointer,
            pool_out.pointer,
            0 if out_status is None else out_status.pointer,
            flat_in.size,
            num_rows,
            max_context_len,
            pool_out.row_stride,
            blocks_per_request,
        ),
        SCATTER_ARGS,
    )
    return [Launch("scatter", "kvc_scatter", bs * blocks_per_request, SCATTER_THREADS, args)]


OPERATION = Operation(reference, _launches, frozenset(("pool_out", "out_status")))
