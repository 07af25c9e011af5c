"""Mutants of the write kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants
from tests.helpers.write import KERNELS, make_arguments, one_request, slots_of_the_last_place, write

EXACT, WALK, AFFINE, SCAN = KERNELS
WARPS, BLOCKS, AFFINES = (EXACT, AFFINE), (WALK, SCAN), (AFFINE, SCAN)


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


last_warp_full = make_arguments([0, 1, 2, 3, 35], [-1] * 4, range(35), range(35), range(1, 36))
full_warps = reach(requests(4, 32), WARPS, num_slots=129)
two_warps = reach(requests(2, 5), WARPS)
walk = reach(one_request(range(1, 300)), (WALK,), num_slots=300)
scan = reach(one_request(range(1, 3000)), (SCAN,), num_slots=3000)
own_seed = one_request([7] * 40, 1, 7)
twice = one_request([5, 6, 5])
several = one_request([5, 6, 7])

TOKEN_READ = "const u64 token = static_cast<u64>(args.input_ids[i])"
SLOT_READ = "const i64 slot = map_to_swa(args.out_cache_loc[i]"
SLOTS_READ = "const bool is_stored = of_row < request.end"
RECORD_READ = "const ulonglong2 head = halves[0]"
RECORD_WRITTEN = "reinterpret_cast<ulonglong2*>(fields)[0] = make_ulonglong2"
OFFSET_READ = "end = args.write_offsets[r + 1]"
PACKED = "packed = make_ulonglong2(first_step(entry.token)"
PLACE_PACKED = "if (stored_lanes >> lane & 1) pack(entry, packed[warp][place])"
PLACE_READ = "return without_first_step(packed[half][place].y)"
NUM_PACKED = "if (threadIdx.x == 0) num_packed[half] = num_stored"
HASH_STORED = "    hashes[k] = x"
LAST_HASH_STORED = "hashes[num_packed] = x"
HASH_READ = "return last_step(hashes[warp][place])"
WALKED = "x = mix(fold(mix(fold(mix(fold(x, 0))"
RUN_READ = "if (lane < kScanWarps) run = warp_runs[lane]"
RUN_STORED = "if (lane == kWarpSize - 1) warp_runs[warp]"
SLOT_STORED = "slots[own + k] = static_cast<unsigned>"
PLACE_CLEARED = "last_entries[place] = 0;"
PLACE_TAKEN = "return atomicCAS(&last_entries[place], 0u, i + 1)"
PLACE_UPDATED = "if (found != 0) atomicMax(&last_entries[place], i + 1)"

MASKS = (
    (several, (EXACT, AFFINE, SCAN), "last position", "__shfl_sync(kFullWarp, position"),
    (several, AFFINES, "multipliers", "__shfl_up_sync(kFullWarp, map.multiplier"),
    (several, AFFINES, "addends", "__shfl_up_sync(kFullWarp, map.addend"),
    (several, AFFINES, "hash behind the warp", "__shfl_sync(kFullWarp, inclusive(hash)"),
    (several, WARPS, "lanes that store", "stored_lanes = __ballot_sync(kFullWarp"),
    (several, (EXACT, WALK, AFFINE), "lanes of a slot", "__match_any_sync(kFullWarp"),
    (several, (WALK,), "lanes of a row that store", "lanes = __ballot_sync(kFullWarp, is_stored"),
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
                "packed[warp][place]);\n  __syncwarp();",
                "packed[warp][place]);\n",
                PACKED,
            ),
            (
                reach(several, (EXACT,)),
                "hashes of the walk",
                "hashes[warp]);\n  __syncwarp();",
                "hashes[warp]);\n",
                HASH_READ,
            ),
            (scan, "slots and table", "one stores.\n    __syncthreads();", "one stores.\n", PLACE_TAKEN),
            (scan, "runs of the warps", "lanes != 0};\n    __syncthreads();", "lanes != 0};\n", RUN_READ),
            (scan, "between chunks", "clears the table.\n    __syncthreads();", "clears the table.\n", PLACE_CLEARED),
        ],
    ),
    # The walker takes for a number of entries what it finds.
    *mutants(
        "barrier",
        "address",
        "AddressSanitizer: ",
        [
            (
                walk,
                "first chunk",
                "request.begin, half);\n  }\n  __syncthreads();",
                "request.begin, half);\n  }\n",
                LAST_HASH_STORED,
            ),
            (walk, "between chunks", "may be the same.\n    __syncthreads();", "may be the same.\n", WALKED),
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
                "if (r < args.write_req_capacity) {",
                "if (r <= args.write_req_capacity) {",
                OFFSET_READ,
            ),
            *(
                (
                    reach(only_offsets(-2, 3), kernels),
                    "entries before the arrays",
                    "valid_begin = clamp(begin, 0,",
                    "valid_begin = clamp(begin, -2,",
                    line,
                )
                for kernels, line in (((EXACT, AFFINE, SCAN), TOKEN_READ), ((WALK,), SLOT_READ))
            ),
            (
                reach(only_offsets(0, 4)),
                "entries behind the arrays",
                "clamp(end, valid_begin, args.num_tokens)",
                "clamp(end, valid_begin, args.num_tokens + 1)",
                TOKEN_READ,
            ),
            (
                reach(several),
                "lanes behind the request",
                "if (i >= end) return no_entry",
                "if (i > end) return no_entry",
                TOKEN_READ,
            ),
            (
                reach(several | dict.fromkeys(("expected_input_tokens", "expected_input_positions"), np.arange(3))),
                "expected inputs behind the request",
                "args.expected_input_tokens == nullptr || i >= end",
                "args.expected_input_tokens == nullptr || i > end",
                "const u64 token = static_cast<u64>(args.expected_input_tokens[i])",
            ),
            (
                reach(several, (WALK,)),
                "row behind the request",
                "of_row < request.end &&",
                "of_row <= request.end &&",
                SLOTS_READ,
            ),
            (
                reach(one_request([-2], seed=0)),
                "slot before the buffer",
                "static_cast<u64>(slot) < static_cast<u64>(num_slots)",
                "slot < num_slots",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([64])),
                "slot behind the buffer",
                "static_cast<u64>(slot) < static_cast<u64>(num_slots)",
                "static_cast<u64>(slot) <= static_cast<u64>(num_slots)",
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
                "if (args.expected_input_tokens == nullptr || i >= end)",
                "if (i >= end)",
                "const u64 token = static_cast<u64>(args.expected_input_tokens[i])",
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
                scan,
                "size of warp_runs",
                "__shared__ WarpRun warp_runs[kScanWarps]",
                "__shared__ WarpRun warp_runs[kScanWarps - 1]",
                RUN_STORED,
            ),
            (scan, "warps to read", "if (lane < kScanWarps)", "if (lane <= kScanWarps)", RUN_READ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "out of bounds for type",
        [
            (
                walk,
                "size of packed",
                "__shared__ ulonglong2 packed[2][kWalkChunk]",
                "__shared__ ulonglong2 packed[2][kWalkChunk - 1]",
                PLACE_READ,
            ),
            (
                walk,
                "size of the chunk's slots",
                "__shared__ unsigned slots[2][kWalkChunk]",
                "__shared__ unsigned slots[2][kWalkChunk - 1]",
                "slots[half][threadIdx.x] =",
            ),
            (walk, "chunks of num_packed", "__shared__ int num_packed[2]", "__shared__ int num_packed[1]", NUM_PACKED),
            (
                scan,
                "size of slots",
                "__shared__ unsigned slots[kScanChunk]",
                "__shared__ unsigned slots[kScanChunk - 1]",
                SLOT_STORED,
            ),
            (
                scan,
                "size of the table",
                "__shared__ unsigned last_entries[SlotTable::kSize]",
                "__shared__ unsigned last_entries[SlotTable::kSize - 1]",
                PLACE_CLEARED,
            ),
            (scan, "places to clear", "place < SlotTable::kSize;", "place <= SlotTable::kSize;", PLACE_CLEARED),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "global-buffer-overflow",
        [
            (
                full_warps[:1],
                "size of packed",
                "__shared__ ulonglong2 packed[kWriteThreads / kWarpSize][kWarpSize]",
                "__shared__ ulonglong2 packed[kWriteThreads / kWarpSize][kWarpSize - 1]",
                PLACE_PACKED,
            ),
            (
                reach(last_warp_full, (EXACT,)),
                "size of hashes",
                "__shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize + 1]",
                "__shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize]",
                LAST_HASH_STORED,
            ),
            (
                walk,
                "size of hashes",
                "__shared__ u64 hashes[2][kWalkChunk + 1]",
                "__shared__ u64 hashes[2][kWalkChunk]",
                LAST_HASH_STORED,
            ),
            (
                reach(one_request(slots_of_the_last_place(2**14)[:2]), (SCAN,), num_slots=2**14),
                "end of the table",
                "place + 1 == kSize ? 0 : place + 1",
                "place + 1",
                PLACE_TAKEN,
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
                "(stored_lanes >> lane & 1) && lane == highest_lane(slot_lanes)",
                "stored_lanes >> lane & 1",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([*range(1, 33), 1]), (WALK,)),
                "one warp for a slot",
                "!is_used(slots[half], static_cast<unsigned>(slot), (warp + 1) * kWarpSize)",
                "true",
                RECORD_WRITTEN,
            ),
            (
                reach(one_request([5, 6, 7, 8, 5]), (SCAN,)),
                "one thread for a slot",
                "return last_entries[place] == i + 1",
                "return true",
                RECORD_WRITTEN,
            ),
            (reach(several, (EXACT,)), "one lane for a walk", "if (lane == 0) walk(", "walk(", HASH_STORED),
            (walk, "one thread for a walk", "else if (lane == 0) {", "else {", HASH_STORED),
            (walk, "one thread for a count", NUM_PACKED, NUM_PACKED.replace("==", ">="), NUM_PACKED),
            (scan, "one lane for a warp's run", RUN_STORED, RUN_STORED.replace("==", "<="), RUN_STORED),
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
                "if (r == 0 && is_first_thread) count(",
                "if (is_first_thread) count(",
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
                "places that are taken",
                PLACE_TAKEN,
                "const unsigned found = last_entries[place]; if (found == 0) last_entries[place] = i + 1; return found",
                PLACE_TAKEN,
            ),
            (
                reach(one_request([5] * 9), (SCAN,)),
                "last entries of slots",
                "atomicMax(&last_entries[place], i + 1)",
                "last_entries[place] = max(last_entries[place], i + 1)",
                PLACE_UPDATED,
            ),
        ],
    ),
]
