"""Mutants of the write kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants
from tests.helpers.write import KERNELS, make_arguments, one_request, write

EXACT, AFFINE, SCAN = KERNELS
WARPS, AFFINES = (EXACT, AFFINE), (AFFINE, SCAN)


def reach(arguments: dict[str, Any], kernels: tuple[str, ...] = KERNELS, num_slots: int = 64, **options: Any) -> Reach:
    """A write into an empty buffer by each of the kernels."""

    def run(kernel: str) -> None:
        write(ArrayBackend("numpy"), [HostBuffer.empty(num_slots, **options)], arguments, kernel)

    return tuple((kernel, partial(run, kernel)) for kernel in kernels)


def requests(num_requests: int, extend: int, seed: int = -1) -> dict[str, Any]:
    """Requests that write slots of their own, from slot 1 on."""
    n = num_requests * extend
    offsets = np.arange(num_requests + 1) * extend
    return make_arguments(offsets, [seed] * num_requests, range(n), np.arange(n) % extend, range(1, n + 1))


def only_offsets(begin: int, end: int, capacity: int = 1) -> dict[str, Any]:
    """Three entries, one request that claims others."""
    return make_arguments([begin, end][: capacity + 1], [-1] * capacity, [1, 2, 3], range(3), [5, 6, 7])


def at_the_end_of_the_table() -> Reach:
    """Two slots that both belong into the last place of the table of slots."""
    last_place = 2 * 1024 - 1
    slots = [slot for slot in range(2**14) if (slot * 0x9E3779B1 % 2**32 * (last_place + 1)) >> 32 == last_place]
    return reach(one_request(slots[:2]), (SCAN,), num_slots=2**14)


full_warps = reach(requests(4, 32), WARPS, num_slots=129)
two_warps = reach(requests(2, 5), WARPS)
chunks = reach(one_request(range(1, 1500)), (SCAN,), num_slots=1500)
own_seed = one_request([7] * 40, 1, 7)
twice = one_request([5, 6, 5])
several = one_request([5, 6, 7])

TOKEN_READ = "const u64 token = static_cast<u64>(args.input_ids[i])"
RECORD_READ = "const ulonglong2 head = halves[0]"
RECORD_WRITTEN = "reinterpret_cast<ulonglong2*>(fields)[0] = make_ulonglong2"
OFFSET_READ = "const i64 end = args.write_offsets[r + 1]"
ENTRY_STORED = "if (stored_lanes >> lane & 1) stored[warp"
HASH_READ = "return hashes[warp][rank]"
HASH_STORED = "if (lane == 0) hashes[warp][k] = hash"
RUN_READ = "if (lane < kScanWarps) run = warp_runs[lane]"
RUN_STORED = "if (lane == kWarpSize - 1) warp_runs[warp]"
WORD_UPDATED = "const u64 found = atomicMax(&words[p], word)"
WORD_READ = "while (static_cast<unsigned>(words[p]) !="
WORD_CLEARED = "words[p] = 0;"

MASKS = (
    (several, KERNELS, "last position", "__shfl_sync(kFullWarp, position"),
    (several, AFFINES, "multipliers", "__shfl_up_sync(kFullWarp, map.multiplier"),
    (several, AFFINES, "addends", "__shfl_up_sync(kFullWarp, map.addend"),
    (several, AFFINES, "hash behind the warp", "__shfl_sync(kFullWarp, inclusive(hash)"),
    (several, WARPS, "lanes that store", "stored_lanes = __ballot_sync(kFullWarp"),
    (several, WARPS, "lanes of a slot", "__match_any_sync(kFullWarp"),
    (several, (SCAN,), "number of entries", "__popc(__ballot_sync(kFullWarp"),
    (several, (SCAN,), "lanes with a position", "__ballot_sync(kFullWarp, has_position"),
    (several, (SCAN,), "warps with a position", "__ballot_sync(kFullWarp, run.has_position"),
    (several, (SCAN,), "hash before the warp", "__shfl_sync(kFullWarp, scan_of_warps.before"),
)

MUTANTS: list[Mutant] = [
    *mutants(
        "barrier",
        "thread",
        "of shared memory, which",
        [
            (
                reach(several, (EXACT,)),
                "entries to walk",
                "entry.position);\n  __syncwarp();",
                "entry.position);\n",
                ENTRY_STORED,
            ),
            (
                reach(several, (EXACT,)),
                "hashes of the walk",
                "[num_stored] = hash;\n  __syncwarp();",
                "[num_stored] = hash;\n",
                HASH_READ,
            ),
            (chunks, "cleared table", "words[p] = 0;\n  __syncthreads();", "words[p] = 0;\n", WORD_CLEARED),
            (chunks, "runs of the warps", "lanes != 0};\n    __syncthreads();", "lanes != 0};\n", RUN_READ),
            (chunks, "between chunks", "and stores.\n    __syncthreads();", "and stores.\n", WORD_UPDATED),
        ],
    ),
    *mutants(
        "barrier",
        "thread",
        "of canary_buf, which",
        [
            (
                reach(own_seed, (AFFINE,)),
                "between chunks",
                "hash = scan.behind(hash);\n  __syncwarp();",
                "hash = scan.behind(hash);\n",
                RECORD_WRITTEN,
            )
        ],
    ),
    *(
        mutant
        for arguments, kernels, name, pattern in MASKS
        for mutant in mutants(
            "mask",
            "plain",
            "the mask does not name this lane",
            [
                (
                    reach(arguments, kernels),
                    f"of {name}",
                    pattern,
                    pattern.replace("kFullWarp", "kFullWarp >> 1"),
                    pattern,
                )
            ],
        )
    ),
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (
                reach(only_offsets(0, 0, capacity=0)),
                "no requests",
                "if (r >= args.write_req_capacity) return {0, 0};",
                "",
                OFFSET_READ,
            ),
            (
                reach(only_offsets(-2, 3)),
                "entries before the arrays",
                "valid_begin = clamp(begin, 0,",
                "valid_begin = clamp(begin, -2,",
                TOKEN_READ,
            ),
            (
                reach(only_offsets(0, 4)),
                "entries behind the arrays",
                "clamp(end, valid_begin, args.num_tokens)",
                "clamp(end, valid_begin, args.num_tokens + 1)",
                TOKEN_READ,
            ),
            (reach(several), "lanes behind the request", "if (i >= end)", "if (i > end)", TOKEN_READ),
            (
                reach(one_request([-1], seed=0)),
                "slot before the buffer",
                "slot >= 0 && slot <",
                "slot <",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([64])),
                "slot behind the buffer",
                "slot < num_slots",
                "slot <= num_slots",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([5], seed=64)),
                "seed behind the buffer",
                "if (!buffer.has_slot(seed) || seed == args.padding_slot) return",
                "if (seed < 0 || seed == args.padding_slot) return",
                RECORD_READ,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "null pointer",
        [
            (reach(several), "no position check", "assertion != nullptr && ", "", "checks_position = assertion"),
            (
                reach(one_request([5])),
                "no input check",
                "if (args.expected_input_tokens != nullptr)",
                "if (true)",
                "entry.expected_token = static_cast<u64>(args",
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "misaligned address",
        [(reach(several, stride=40), "16 bytes at once", "& 15) == 0", "& 7) == 0", RECORD_WRITTEN)],
    ),
    *mutants(
        "bound",
        "address",
        "insufficient space",
        [
            (
                full_warps[:1],
                "size of stored",
                "__shared__ ulonglong2 stored[kWriteThreads]",
                "__shared__ ulonglong2 stored[kWriteThreads - 1]",
                ENTRY_STORED,
            ),
            (
                chunks,
                "size of warp_runs",
                "__shared__ WarpRun warp_runs[kScanWarps]",
                "__shared__ WarpRun warp_runs[kScanWarps - 1]",
                RUN_STORED,
            ),
            (chunks, "warps to read", "if (lane < kScanWarps)", "if (lane <= kScanWarps)", RUN_READ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "out of bounds for type",
        [
            (
                full_warps[:1],
                "size of hashes",
                "__shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize + 1]",
                "__shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize]",
                "if (lane == 0) hashes[warp][num_stored]",
            ),
            (
                chunks,
                "size of words",
                "__shared__ u64 words[LastEntries::kSize]",
                "__shared__ u64 words[LastEntries::kSize - 1]",
                WORD_CLEARED,
            ),
            (chunks, "words to clear", "p < LastEntries::kSize;", "p <= LastEntries::kSize;", WORD_CLEARED),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "global-buffer-overflow",
        [
            (
                at_the_end_of_the_table(),
                "end of the table",
                "p + 1 == kSize ? 0 : p + 1",
                "p + 1",
                WORD_UPDATED,
            ),
        ],
    ),
    *mutants(
        "bound",
        "thread",
        "data race",
        [
            (
                reach(twice, WARPS),
                "one lane for a slot",
                "if (has_slot && lane == highest_lane(slot_lanes))",
                "if (has_slot)",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([5, 6, 7, 8, 5]), (SCAN,)),
                "one thread for a slot",
                "if (last_entries.has_last(own_first + k, entry.slot))",
                "if (true)",
                RECORD_WRITTEN,
            ),
            (
                reach(several, (EXACT,)),
                "one lane for the hashes",
                "if (lane == 0) hashes[warp][k]",
                "hashes[warp][k]",
                HASH_STORED,
            ),
            (chunks, "one lane for a warp's run", RUN_STORED, RUN_STORED.replace("==", "<="), RUN_STORED),
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [
            (
                two_warps,
                "one warp for each buffer's launch",
                "if (r == 0 && lane == 0) count(",
                "if (lane == 0) count(",
                "",
            ),
            (
                reach(only_offsets(3, 1, capacity=1) | {"write_seed_slot_indices": np.array([99])}),
                "entries that end before they begin",
                "clamp(end, valid_begin, args.num_tokens)",
                "clamp(end, 0, args.num_tokens)",
                "",
            ),
        ],
    ),
    *mutants(
        "atomic",
        "thread",
        "of slot_run_counter, which",
        [
            (
                reach(requests(2, 5)),
                "counters",
                "atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount))",
                "*counter += amount",
                "atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount))",
            )
        ],
    ),
    *mutants(
        "atomic",
        "thread",
        "of shared memory, which",
        [
            (
                reach(one_request([5] * 9), (SCAN,)),
                "words of the table",
                "const u64 found = atomicMax(&words[p], word);",
                "const u64 found = words[p]; if (found < word) words[p] = word;",
                WORD_UPDATED,
            )
        ],
    ),
]
