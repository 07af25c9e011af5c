"""Mutants of the scatter kernel."""

from __future__ import annotations

from functools import partial

import numpy as np

from cupy_kvcanary import launch_scatter_req_token_ids_kernel
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants

TOKEN_COPIED = "args.pool_out[row * args.stride0 + static_cast<i64>(i)] ="


def scatter(rows: list[int], offsets: list[int]) -> Reach:
    """Six tokens into a pool of two rows of three."""
    arguments = {
        "flat_in": np.arange(6),
        "offsets": np.array(offsets),
        "req_pool_indices": np.array(rows),
        "pool_out": np.zeros((2, 3), np.int32),
        "out_status": np.zeros(1, np.int32),
    }
    return (("kvc_scatter", partial(launch_scatter_req_token_ids_kernel, **arguments)),)


MUTANTS: list[Mutant] = [
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (scatter([-1], [0, 2]), "row before the pool", "row < 0 || ", "", TOKEN_COPIED),
            (scatter([2], [0, 2]), "row behind the pool", "row >= args.num_rows", "row > args.num_rows", TOKEN_COPIED),
            (
                scatter([1], [0, 6]),
                "tokens that fit the row",
                "len < static_cast<u64>(args.max_context_len) ? len : ",
                "len < static_cast<u64>(args.max_context_len) + 9 ? len : ",
                TOKEN_COPIED,
            ),
            (scatter([1], [0, 3]), "tokens of a request", "i < num_copied", "i <= num_copied", TOKEN_COPIED),
            (
                scatter([1], [5, 7]),
                "tokens that there are",
                "source < static_cast<u64>(args.num_tokens)",
                "source <= static_cast<u64>(args.num_tokens)",
                TOKEN_COPIED,
            ),
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [(scatter([1], [4, 2]), "offsets that decrease", " || end < start", "", "")],
    ),
]
