"""Mutants of the entries kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cupy_kvcanary import launch_canary_plan_kernels, launch_plan_entries_kernel
from tests.helpers.mutants.page_table import SLOT_READ, page_table_mutants
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants
from tests.helpers.plan_entries import make_entries_arguments, make_plan_arguments

KERNEL = "kvc_plan_entries"

TABLE = np.arange(5 * 40).reshape(5, 40) + 1000


def entries(
    rows: list[int], prefix_lens: list[int], offsets: list[int], table: Any = TABLE, *, status: Any = 0, **options: Any
) -> Reach:
    """The entries of some requests, from these offsets."""
    arguments = make_entries_arguments(rows, prefix_lens, table, offsets, **options)
    if status is None:
        arguments["out_status"] = None
    return ((KERNEL, partial(launch_plan_entries_kernel, **arguments)),)


def request(row: int, prefix_len: int, table: Any, *, mapping: Any = None, has_status: bool = True) -> Reach:
    """One request, of which every position that may be read is read."""
    return entries([row], [prefix_len], [0, 64], table, mapping=mapping, status=0 if has_status else None)


def whole_plan(bs: int, spare: int) -> Reach:
    """One entry a request; write offsets for `spare` requests more."""
    ones = np.ones(bs, np.int64)
    arguments = make_plan_arguments(ones, ones, ones, TABLE, capacity=bs, write_req_capacity=bs + spare)
    return ((KERNEL, partial(launch_canary_plan_kernels, **arguments)),)


two_warps = entries([1, 2], [20, 25], [0, 20, 45])
# Offsets that are sampled at every fourth request; the last sample is the last request.
sampled = whole_plan(513, 0)
with_tokens = partial(entries, tokens=np.arange(6).reshape(2, 3))

SLOT_WRITTEN = "args.out_verify_slot_indices[t] = slot"
TOKEN_READ = "return __ldg(args.req_to_verify_expected_tokens + row"
ZERO_WRITTEN = "args.out_write_offsets[i] = 0"

MUTANTS: list[Mutant] = [
    *mutants(
        "barrier",
        "thread",
        "of shared memory, which",
        [(two_warps, "samples", "  __syncthreads();\n\n", "\n", "if (sampled_offsets[sample + step] <= t)")],
    ),
    *mutants(
        "mask",
        "plain",
        "the mask does not name this lane",
        [
            (
                two_warps,
                f"{what} of the lane before",
                f"__shfl_up_sync(kFullWarp, {what}, 1)",
                f"__shfl_up_sync({mask}, {what}, 1)",
                f"__shfl_up_sync(kFullWarp, {what}, 1)",
            )
            for what, mask in (("r", "kFullWarp >> 1"), ("slot", "kFullWarp - 1"))
        ],
    ),
    *page_table_mutants(request),
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (
                sampled,
                "offsets to search",
                "r + step < args.bs && ",
                "",
                "args.verify_offsets_scratch[r + step] <= t",
            ),
            (whole_plan(3, 2), "zeros", "i < args.write_offsets_len", "i <= args.write_offsets_len", ZERO_WRITTEN),
            (
                entries([], [], [9]),
                "a batch of no requests",
                "args.bs > 0 && ",
                "",
                "range = read_range(args.page_table, args.req",
            ),
            (
                entries([1], [5], [0, 5], capacity=4),
                "room for entries",
                "0, args.verify_capacity)",
                "0, args.verify_capacity + 1)",
                SLOT_WRITTEN,
            ),
            (
                entries([1], [5], [0, 5], capacity=4),
                "entries of a warp",
                "if (t < num_entries) {",
                "if (t <= num_entries) {",
                SLOT_WRITTEN,
            ),
            (
                entries([4], [40], [0, 41]),
                "positions that are read",
                "is_read = index <",
                "is_read = index <=",
                SLOT_READ,
            ),
            (
                with_tokens([2], [1], [0, 1], valid_lens=[1]),
                "rows of tokens",
                "row >= args.num_expected_rows",
                "row > args.num_expected_rows",
                TOKEN_READ,
            ),
            (
                with_tokens([1], [5], [0, 5], valid_lens=[9]),
                "tokens of a row",
                " || index >= args.max_context_len",
                "",
                TOKEN_READ,
            ),
        ],
    ),
    # Far behind the offsets, where anything may lie.
    *mutants(
        "bound",
        "address",
        "AddressSanitizer",
        [
            (
                two_warps,
                "offsets to sample",
                "sampled_r < args.bs ? args.verify_offsets_scratch[sampled_r] : kInt32Max",
                "args.verify_offsets_scratch[sampled_r]",
                "sampled_offsets[threadIdx.x] =",
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "index 255 out of bounds",
        [
            (
                two_warps,
                "size of sampled_offsets",
                "__shared__ i64 sampled_offsets[kPlanEntriesThreads];",
                "__shared__ i64 sampled_offsets[kPlanEntriesThreads - 1];",
                "sampled_offsets[threadIdx.x] =",
            )
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [
            (whole_plan(3, 2), "zeros behind the total", "i = args.bs + 1 +", "i = args.bs +", ""),
            (entries([1], [5], [0, 5], enable=0), "verification is off", " && *args.verify_enable != 0", "", ""),
            (two_warps, "the first position", "if (position > 0 && !", "if (!", ""),
            (two_warps, "the first lane", " && lane > 0 &&", " &&", ""),
            (
                entries([1], [9], [3, 5], window=2),
                "the first entry behind a gap",
                " && index > 0;",
                ";",
                "",
            ),
            (
                entries([1, 2, 3, 4], [1, 8, 1, 9], [0, 1, 10, 3, 20]),
                "a lane before of another request",
                "__shfl_up_sync(kFullWarp, r, 1) == r && ",
                "",
                "",
            ),
            (
                with_tokens([1], [3], [0, 3], valid_lens=[3], offset=-1),
                "tokens before the row",
                "index < 0 || ",
                "",
                "",
            ),
            (
                with_tokens([1], [3], [0, 3], valid_lens=[2]),
                "valid tokens",
                "index >= valid_len || ",
                "",
                "",
            ),
        ],
    ),
]
