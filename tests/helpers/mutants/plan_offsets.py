"""Mutants of the offsets kernels."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from cupy_kvcanary import launch_plan_offsets_kernel
from cupy_kvcanary.ops import plan_offsets
from tests.helpers.mutants.page_table import SLOT_READ, page_table_mutants
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants
from tests.helpers.plan_offsets import make_arguments

SINGLE = "kvc_plan_offsets"
TILE_SUMS = "kvc_plan_offsets_tile_sums"
SCAN_SUMS = "kvc_plan_offsets_scan_sums"
TILES = "kvc_plan_offsets_tiles"


def launch(arguments: dict[str, Any], tiled: bool) -> None:
    """With `tiled`, a batch takes three launches however small it is."""
    with mock.patch.object(plan_offsets, "_SINGLE_LAUNCH_MAX_BS", -1 if tiled else 2**63):
        launch_plan_offsets_kernel(**arguments)


def batch(bs: int, *, tiled: bool = False) -> None:
    """Every seventh row is behind the table. Every array ends where the batch does."""
    r = np.arange(bs)
    launch(make_arguments(r % 7, r % 17, r % 3, np.arange(6 * 16).reshape(6, 16), bs_block_size=bs), tiled)


def request(row: int, prefix_len: int, table: Any, *, mapping: Any = None, has_status: bool = True) -> Reach:
    """One request; both kernels that plan it."""

    def run(tiled: bool) -> None:
        arguments = make_arguments([row], [prefix_len], [1], [[0]], mapping=mapping) | {"req_to_token": table}
        launch(arguments if has_status else arguments | {"out_status": None}, tiled)

    return ((SINGLE, partial(run, False)), (TILES, partial(run, True)))


def scan_of_two_rounds() -> None:
    """With a block of one warp, the scan takes 32 tiles a round."""
    with mock.patch.object(plan_offsets, "PLAN_OFFSETS_SCAN_THREADS", 32):
        batch(33 * 1024, tiled=True)


two_warps = partial(batch, 63)
three_blocks = partial(batch, 600)
sixteen_warps = partial(batch, 1100)
# Two tiles, the last one request short, so that the request after the batch has a thread.
two_tiles = partial(batch, 2047, tiled=True)

ALL = ((SINGLE, sixteen_warps), (TILE_SUMS, two_tiles), (SCAN_SUMS, two_tiles), (TILES, two_tiles))
SCANS = ((SINGLE, two_warps), (SCAN_SUMS, two_tiles), (TILES, two_tiles))
PLANS = ((SINGLE, two_warps), (TILES, two_tiles))
LASTS = ((SCAN_SUMS, two_tiles), (TILES, two_tiles))

REQUEST_READ = "const i64 row = args.req_pool_indices[r]"
LAST_STORED = "if (threadIdx.x == blockDim.x - 1) shared_value"
TOTAL_WRITTEN = "args.out_verify_offsets_scratch[args.bs] ="
OFFSET_WRITTEN = "args.out_verify_offsets_scratch[r] = static_cast<i64>(offset.verify);\n"

MUTANTS: list[Mutant] = [
    *mutants(
        "barrier",
        "thread",
        "of shared memory, which",
        [
            (
                ALL,
                "sums of the warps",
                "warp_before;\n  }\n  __syncthreads();",
                "warp_before;\n  }\n",
                "sum = before[o",
            ),
            (LASTS, "the last value", "= value;\n  __syncthreads();", "= value;\n", LAST_STORED),
            (
                ((SCAN_SUMS, scan_of_two_rounds),),
                "between two rounds",
                "carry = from_last_thread(end)",
                "carry = end",
                "before[warp] = warp_before",
            ),
            (
                ((TILES, two_tiles),),
                "between two rows",
                "carry = from_last_thread(plan_row",
                "carry = (plan_row",
                "own[warp] = warp_own",
            ),
        ],
    ),
    *(
        mutant
        for operation, reach in (("__shfl_up_sync", SCANS), ("__shfl_xor_sync", ALL))
        for lens, mask in (("verify", "kFullWarp >> 1"), ("write", "kFullWarp - 1"))
        for before in (f"{operation}(kFullWarp, sum.{lens}",)
        for mutant in mutants(
            "mask",
            "plain",
            "the mask does not name this lane",
            [(reach, f"{operation} of {lens}", before, f"{operation}({mask}, sum.{lens}", before)],
        )
    ),
    *page_table_mutants(request),
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (
                PLANS,
                "seed of a thread without a request",
                "if (request.range.prefix_len == 0 || request.lens.write == 0) return -1;",
                "",
                SLOT_READ,
            ),
            (PLANS, "requests to read", "if (r < args.bs) request", "if (r <= args.bs) request", REQUEST_READ),
            (
                PLANS,
                "requests to write",
                "if (r < args.bs) {\n    const",
                "if (r <= args.bs) {\n    const",
                "args.out_write_seed_slot_indices[r] = seed",
            ),
            (((TILE_SUMS, two_tiles),), "requests to sum", "r < end;", "r <= end;", REQUEST_READ),
            (
                ((TILE_SUMS, two_tiles),),
                "end of the last tile",
                "clamp(begin + kPlanOffsetsTile, 0, args.bs)",
                "begin + kPlanOffsetsTile",
                REQUEST_READ,
            ),
            (
                ((SCAN_SUMS, two_tiles),),
                "tiles to read",
                "if (r < args.bs) {\n      own",
                "if (r < args.bs + kPlanOffsetsTile) {\n      own",
                "own = {static_cast<u64>",
            ),
            (
                ((SCAN_SUMS, two_tiles),),
                "tiles to write",
                "if (r < args.bs) {\n      const",
                "if (r < args.bs + kPlanOffsetsTile) {\n      const",
                f"{OFFSET_WRITTEN}      args",
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "insufficient space",
        [
            (ALL, "size of own", "__shared__ Lens own[kWarps]", "__shared__ Lens own[kWarps - 1]", "own[warp] ="),
            (
                ALL,
                "size of before",
                "__shared__ Lens before[kWarps]",
                "__shared__ Lens before[kWarps - 1]",
                "before[warp] =",
            ),
        ],
    ),
    *mutants(
        "bound",
        "thread",
        "data race",
        [
            (ALL, "one lane of a warp", "lane == kWarpSize - 1", "lane >= kWarpSize - 2", "own[warp] ="),
            (
                LASTS,
                "the last thread",
                "if (threadIdx.x == blockDim.x - 1)",
                "if (threadIdx.x >= blockDim.x - 2)",
                LAST_STORED,
            ),
            (PLANS, "one thread for the totals", "if (r == args.bs - 1)", "if (r >= args.bs - 2)", TOTAL_WRITTEN),
            (
                ((SINGLE, partial(batch, 0)),),
                "one thread for the totals of no requests",
                "if (begin == 0 && threadIdx.x == 0) write_totals",
                "if (begin == 0 && threadIdx.x < 2) write_totals",
                TOTAL_WRITTEN,
            ),
            (
                ((TILE_SUMS, two_tiles),),
                "one thread for a tile's sums",
                "if (threadIdx.x == 0) {",
                "if (threadIdx.x < 2) {",
                "args.out_verify_offsets_scratch[begin] =",
            ),
            (
                ((TILES, two_tiles),),
                "rows of a tile",
                "row < begin + kPlanOffsetsTile",
                "row <= begin + kPlanOffsetsTile",
                f"{OFFSET_WRITTEN}    args",
            ),
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [
            (
                ((SINGLE, two_warps), (SCAN_SUMS, scan_of_two_rounds)),
                "warps of the block",
                "other < num_warps",
                "other < kWarps",
                "",
            ),
            (((SINGLE, three_blocks),), "requests to sum", "r < end;", "r <= end;", ""),
            (PLANS, "an empty prefix", "request.range.prefix_len == 0 || ", "", ""),
        ],
    ),
    *mutants(
        "atomic",
        "thread",
        "of out_status, which",
        [
            (
                PLANS,
                "status bits",
                "atomicOr(out_status, status)",
                "*out_status |= status",
                "atomicOr(out_status, status)",
            ),
        ],
    ),
]
