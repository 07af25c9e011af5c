"""Mutants of the verify kernels, and of the records and violations of kernels/common.cuh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.constants import INT32_MAX, VERIFY_GROUP
from cupy_kvcanary.ops.verify import launch_canary_verify_batch_kernel, launch_canary_verify_kernel
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.mutants.page_table import SLOT_READ, page_table_mutants
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants
from tests.helpers.verify import ANCHOR, Batch, Entry, make_plan

if TYPE_CHECKING:
    from cupy_kvcanary import VerifyOrWriteContext

PLAN = "kvc_verify"
BATCH = "kvc_verify_batch"
WIDE = "kvc_verify_batch_wide"
PLAIN = "kvc_verify_batch_plain"
FOURS = "kvc_verify_batch_plain_fours"
BATCHES = (BATCH, PLAIN)
WALKS = (PLAN, *BATCHES)
ALL = (*WALKS, WIDE, FOURS)
BOTH_CHAINS = (*ALL, *(f"{kernel}_affine" for kernel in ALL))

NUMPY = ArrayBackend("numpy")


@dataclass(frozen=True)
class Cache:
    """Canary buffers. Records are zeros where none are given, so that most entries are violations.

    Those that are given have the right KV hash.
    """

    num_slots: int = 64
    records: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_buffers: int = 1
    """They share log and counters."""
    kv_bytes: int = 0
    """Of a slot in each of two sources, whose last row ends with the last slot's bytes; 0: no sources."""
    stride: int = 32
    ring_capacity: int = 256
    violation_count: int = 0
    is_detailed: bool = False

    def buffer(self) -> HostBuffer:
        kv = np.ones((self.num_slots, self.kv_bytes), np.uint8)
        buffer = HostBuffer.empty(
            self.num_slots,
            self.stride,
            ring_capacity=self.ring_capacity,
            violation_count=self.violation_count,
            is_detailed=self.is_detailed,
            sources=[HostSource(kv, 1, self.kv_bytes, self.kv_bytes)] * 2 if self.kv_bytes else [],
            mode=2,
        )
        for slot, values in self.records.items():
            token, position, prev_hash = values
            buffer.set_record(slot, token, position, prev_hash, buffer.real_kv_hash(slot))
        return buffer

    def contexts(self) -> list[VerifyOrWriteContext]:
        buffer = self.buffer()
        first = buffer.on_device(NUMPY)
        return [
            first,
            *(replace(first, canary_buf=buffer.canary_buf.copy(), kernel_kind=i) for i in range(1, self.num_buffers)),
        ]

    def taken_by(self, kernel: str) -> Cache:
        """With what makes the launcher choose the kernel: wide KV, or buffers by the four."""
        if kernel.startswith(WIDE):
            return replace(self, kv_bytes=272)
        if kernel.startswith(FOURS):
            return replace(self, num_buffers=VERIFY_GROUP * self.num_buffers)
        return self


EMPTY = Cache()
DETAILED = Cache(is_detailed=True)


def chain_of(kernel: str) -> Any:
    return "affine" if kernel.endswith("_affine") else "splitmix64"


def verify_entries(
    kernel: str, cache: Cache, entries: list[Entry], num_valid: int | None, enable: int = 1, **options: Any
) -> None:
    launch_canary_verify_kernel(
        context=cache.contexts(),
        plan=make_plan(NUMPY, entries, num_valid=num_valid, enable=enable),
        check_verify_expected_token=True,
        chain=chain_of(kernel),
        **options,
    )


def verify_batch(kernel: str, cache: Cache, batch: Batch, **changed: Any) -> None:
    lens = np.minimum(batch.prefix_lens, batch.window or INT32_MAX)
    offsets = np.array(changed.pop("offsets", [0, *np.cumsum(lens)]), np.int64)
    arguments = {
        "req_pool_indices": np.array(batch.rows, np.int64),
        "prefix_lens": np.array(batch.prefix_lens, np.int64),
        "req_to_token": batch.table,
        "full_to_swa_index_mapping": None,
        "verify_offsets_scratch": offsets,
        "verify_num_valid": np.array([changed.pop("num_valid", offsets[-1])], np.int32),
        "verify_enable": np.ones(1, np.int32),
        "req_to_verify_expected_tokens": batch.expected,
        "req_to_verify_expected_tokens_valid_lens": None if batch.expected is None else np.array(batch.valid_lens),
        "kv_token_id_vs_position_offset": batch.offset,
        "swa_window_size": batch.window,
        "verify_capacity": 1000,
        "check_verify_expected_token": "plain" not in kernel,
        "out_status": np.zeros(1, np.int32),
    }
    launch_canary_verify_batch_kernel(
        context=cache.taken_by(kernel).contexts(), chain=chain_of(kernel), **arguments | changed
    )


def plan(entries: list[Entry], cache: Cache = EMPTY, num_valid: int | None = None, **options: Any) -> Reach:
    return ((PLAN, partial(verify_entries, PLAN, cache, entries, num_valid, **options)),)


def batches(batch: Batch, cache: Cache = EMPTY, kernels: tuple[str, ...] = BATCHES, **changed: Any) -> Reach:
    return tuple((kernel, partial(verify_batch, kernel, cache, batch, **changed)) for kernel in kernels)


def both(batch: Batch, cache: Cache = EMPTY, kernels: tuple[str, ...] = WALKS, **options: Any) -> Reach:
    """The kernels, each with the entries of the batch in its own form."""
    return tuple(
        (kernel, partial(verify_batch, kernel, cache, batch, **options))
        if kernel.startswith(BATCH)
        else (kernel, partial(verify_entries, kernel, cache, batch.entries(), None, **options))
        for kernel in kernels
    )


def requests(*prefix_lens: int, window: int = 0) -> Batch:
    """Requests that own the slots 1, 2, 3 and so on, one after the other."""
    table = np.zeros((len(prefix_lens) + 1, max(prefix_lens, default=1)), np.int32)
    end = 1
    for slots, prefix_len in zip(table[1:], prefix_lens, strict=True):
        slots[:prefix_len] = np.arange(end, end + prefix_len)
        end += prefix_len
    return Batch(table, list(range(1, len(table))), list(prefix_lens), window)


def row(*slots: int) -> Batch:
    """One request, the last row of its table."""
    return Batch(np.array([[0] * len(slots), slots], np.int32), [1], [len(slots)])


def expecting(offset: int = 0, valid_len: int = 3) -> Batch:
    """One request of three tokens with a pool of the same shape."""
    return replace(requests(3), expected=np.full((2, 3), 7, np.int32), valid_lens=[valid_len], offset=offset)


def request(prefix_row: int, prefix_len: int, table: Any, *, mapping: Any = None, has_status: bool = True) -> Reach:
    """See `page_table_mutants`."""
    changed = {
        "req_pool_indices": np.array([prefix_row]),
        "prefix_lens": np.array([prefix_len]),
        "req_to_token": table,
        "full_to_swa_index_mapping": None if mapping is None else np.array(mapping),
        "offsets": [0, max(prefix_len, 1)],
    }
    return batches(requests(1), kernels=(BATCH,), **changed if has_status else changed | {"out_status": None})


# Of an entry's own slot, and of a neighbour's.
SLOT_READS = ((BATCH, SLOT_READ), (PLAIN, "__ldg(row_slots + position)"))
OTHER_SLOT_READS = ((BATCH, SLOT_READ), (PLAIN, "return __ldg(slots_of(of_row) + position)"))
PLAN_READ = "const i64 prev_slot = __ldcs(args."
KV_READ = "const ulonglong2 words ="
WIDE_KV_READ = "loaded[k] = __ldcs("
STAGED = "slots[lane / kStagedParts + k * kLanesApart][part] = loaded[k]"
RECORD_READ = "const ulonglong2 head = halves[0]"
ROW_STORED = "row[0] = buffer.kernel_kind"
OFFSETS_SEARCHED = "const bool is_at_most ="
COUNTED = "atomicAdd(reinterpret_cast<u64*>(counter)"
TOKEN_READ = "return __ldg(args.expected_tokens +"

# A negative prefix is one that no position is below, so these lead nowhere here.
NOT_REACHED = ("negative prefix", "pages that end before they begin", "no pages", "last page of a negative length")

nine = requests(9)
disabled = (
    *plan(nine.entries(), enable=0),
    *batches(nine, verify_enable=np.zeros(1, np.int32)),
)
same_three_times = Batch(np.ones((2, 1), np.int32), [1] * 3, [1] * 3)
right_first_record = (0, 0, ANCHOR)
eight = requests(8)  # one for each warp of a block
full_runs = requests(256)

MUTANTS: list[Mutant] = [
    *mutants(
        "mask",
        "plain",
        "the mask does not name this lane",
        [
            (
                both(nine, kernels=BOTH_CHAINS),
                "which lanes have a record",
                "__ballot_sync(kFullWarp, is_read)",
                "__ballot_sync(kFullWarp >> 1, is_read)",
                "__ballot_sync(kFullWarp, is_read)",
            ),
            (
                both(nine, kernels=BOTH_CHAINS),
                "the link of the lane before",
                "__shfl_sync(kFullWarp, link,",
                "__shfl_sync(kFullWarp - 1, link,",
                "__shfl_sync(kFullWarp, link,",
            ),
            (
                both(nine, DETAILED, ALL),
                "skipped checks of the warp",
                "__shfl_xor_sync(kFullWarp, num_skipped",
                "__shfl_xor_sync(kFullWarp >> 1, num_skipped",
                "__shfl_xor_sync(kFullWarp, num_skipped",
            ),
            (
                batches(requests(2, 3), kernels=ALL[1:]),
                "offsets of the requests",
                "__ballot_sync(kFullWarp, is_at_most)",
                "__ballot_sync(kFullWarp >> 1, is_at_most)",
                "__ballot_sync(kFullWarp, is_at_most)",
            ),
            (
                batches(nine, kernels=(WIDE,)),
                "where the KV bytes of the other lanes lie",
                "__shfl_sync(kFullWarp, reinterpret_cast<u64>(bytes)",
                "__shfl_sync(kFullWarp - 1, reinterpret_cast<u64>(bytes)",
                "__shfl_sync(kFullWarp, reinterpret_cast<u64>(bytes)",
            ),
        ],
    ),
    *mutants(
        "barrier",
        "thread",
        "of shared memory, which",
        [
            (
                batches(nine, kernels=(WIDE,)),
                "KV bytes of the parts before",
                "parts before were read.\n    __syncwarp();",
                "parts before were read.\n",
                STAGED,
            ),
            (
                batches(nine, kernels=(WIDE,)),
                "KV bytes of the other lanes",
                f"{STAGED};\n    __syncwarp();",
                f"{STAGED};\n",
                "hash ^ slots[lane][k].x",
            ),
        ],
    ),
    *(
        mutant
        for says, reach, name, pattern, replacement in (
            (
                "of slot_run_counter, which",
                both(nine, Cache(num_buffers=2), ALL),
                "counters",
                "atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount))",
                "*counter += amount",
            ),
            (
                "of violation_write_index, which",
                both(nine, kernels=ALL),
                "violations",
                "atomicAdd(buffer.violation_write_index, 1)",
                "(*buffer.violation_write_index)++",
            ),
            (
                "of violation_write_index, which",
                both(nine, Cache(violation_count=INT32_MAX)),
                "violations that saturate",
                "atomicExch(buffer.violation_write_index, kInt32Max)",
                "*buffer.violation_write_index = kInt32Max",
            ),
            (
                "of out_status, which",
                batches(Batch(np.ones((2, 1), np.int32), [1, 1], [2, 2])),
                "status bits",
                "atomicOr(out_status, status)",
                "*out_status |= status",
            ),
        )
        for mutant in mutants("atomic", "thread", says, [(reach, name, pattern, replacement, pattern)])
    ),
    *(mutant for mutant in page_table_mutants(request) if mutant.name not in NOT_REACHED),
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (
                both(row(64), kernels=ALL),
                "slot behind the buffer",
                "< static_cast<u64>(num_slots)",
                "<= static_cast<u64>(num_slots)",
                RECORD_READ,
            ),
            (batches(row(64), kernels=(FOURS,)), "slot behind the buffers", "g > 0 && is_read", "g > 0", RECORD_READ),
            (
                both(row(64, 1)),
                "predecessor behind the buffer",
                "prev_slot >= buffer.num_slots",
                "prev_slot > buffer.num_slots",
                RECORD_READ,
            ),
            (
                plan(nine.entries(), num_valid=10),
                "entries of the plan",
                "clamp(__ldg(num_valid), 0, capacity)",
                "clamp(__ldg(num_valid), 0, capacity + 1)",
                PLAN_READ,
            ),
            (plan(nine.entries()), "end of a run", "(t >= end) return", "(t > end) return", PLAN_READ),
            (
                plan(requests(63).entries()),  # it would end one later
                "end of the last run",
                "min(begin + run_len, static_cast<unsigned>(num_entries))",
                "begin + run_len",
                PLAN_READ,
            ),
            (
                plan(full_runs.entries()),
                "an entry that is absent",
                "entry.is_present && ",
                "",
                "__ldg(args.verify_prev_slot_indices + t), -1}",
            ),
            (
                batches(nine),
                "request of an entry that is absent",
                "entry.is_present && ",
                "",
                "static_cast<const i64*>(data) + index",
            ),
            (
                plan(nine.entries()),
                "entry before the first",
                "t > 0 && __ldg(",
                "__ldg(",
                "t > 0 && __ldg(args.verify_slot_indices",
            ),
            (
                both(row(63), Cache(kv_bytes=32), kernels=(PLAN, BATCH)),
                "KV bytes of a slot",
                "offset < source.num_hashed_bytes",
                "offset <= source.num_hashed_bytes",
                KV_READ,
            ),
            (
                plan([Entry(64, -1, 0)], Cache(kv_bytes=32)),
                "KV bytes behind the slots",
                "is_read) const {\n    return is_read ? buffer.hash_real_kv(slot) : 0",
                "is_read) const {\n    return buffer.hash_real_kv(slot)",
                KV_READ,
            ),
            (
                batches(row(64), Cache(kv_bytes=32), (BATCH,)),
                "KV bytes behind the slots",
                "(buffer, slot, is_read);\n    return is_read ? buffer.hash_real_kv(slot) : 0",
                "(buffer, slot, is_read);\n    return buffer.hash_real_kv(slot)",
                KV_READ,
            ),
            (
                batches(row(64), kernels=(WIDE,)),
                "KV bytes behind the slots",
                "is_read ? source.bytes(slot) : nullptr",
                "source.bytes(slot)",
                WIDE_KV_READ,
            ),
            (
                batches(row(63), kernels=(WIDE,)),
                "KV bytes of a slot",
                "offset + part * 16 < num_bytes",
                "offset + part * 16 <= num_bytes",
                WIDE_KV_READ,
            ),
            (
                both(same_three_times, Cache(ring_capacity=2)),
                "rows of the ring",
                "seq >= buffer.ring_capacity",
                "seq > buffer.ring_capacity",
                ROW_STORED,
            ),
            (
                both(row(1), Cache(violation_count=-5)),
                "negative number of violations",
                "seq < 0 || seq",
                "seq",
                ROW_STORED,
            ),
            (
                both(row(64, 5), DETAILED),
                "record of a predecessor behind the buffer",
                "!buffer.has_slot(slot) || options",
                "options",
                RECORD_READ,
            ),
            (
                both(row(5), DETAILED),
                "fields of the details",
                "field < kViolationDetailFields",
                "field < 300 * kViolationDetailFields",
                "details[field] = 0",
            ),
            *(
                (
                    batches(requests(3), DETAILED, kernels=(kernel,)),
                    "position behind the last",
                    "next < range.prefix_len",
                    "next <= range.prefix_len",
                    slot_read,
                )
                for kernel, slot_read in OTHER_SLOT_READS
            ),
            (batches(requests(1, 1, 1)), "offsets to search", "lane * stride < count && ", "", OFFSETS_SEARCHED),
            (
                batches(requests(*[1] * 96, 40), Cache(256)),
                "offsets of the last group",
                "count - skipped < stride ? count - skipped : stride",
                "stride",
                OFFSETS_SEARCHED,
            ),
            (
                batches(requests(1, 1, 1), offsets=[5, 5, 5, 5], num_valid=1),
                "offsets that start too late, searched",
                "at_most == 0 ? 0 : ",
                "",
                "const i64 first = __ldg(offsets",
            ),
            (
                batches(requests(1, 1)),
                "requests to double over",
                "while (step < bs - r && ",
                "while (",
                "while (step <",
            ),
            (batches(requests(*[1] * 33)), "requests to halve over", "if (step < bs - r && ", "if (", "if (step < bs"),
            (
                batches(Batch(np.ones((2, 1), np.int32), [], []), offsets=[0], num_valid=3),
                "entries of no requests",
                "bs == 0 ? 0 : ",
                "",
                "const i64 behind = __ldg(offsets + r + 1)",
            ),
            *(
                row_of_mutant
                for kernel, slot_read in SLOT_READS
                for row_of_mutant in (
                    (
                        batches(requests(3), kernels=(kernel,), offsets=[0, 4]),
                        "offsets of longer requests",
                        "first + range.prefix_len - range.window_start",
                        "first + range.prefix_len - range.window_start + 1",
                        slot_read,
                    ),
                    (
                        batches(requests(3), kernels=(kernel,), offsets=[5, 9], num_valid=1),
                        "offsets that start too late, read",
                        "first < 0 || first > t",
                        "first < 0",
                        slot_read,
                    ),
                )
            ),
            (
                batches(replace(expecting(), table=np.ones((3, 3), np.int32), rows=[2]), kernels=(BATCH,)),
                "rows of expected tokens",
                "row >= args.expected_rows",
                "row > args.expected_rows",
                TOKEN_READ,
            ),
            (
                batches(expecting(offset=-5), kernels=(BATCH,)),
                "expected tokens before a row",
                "index < 0 || ",
                "",
                TOKEN_READ,
            ),
            (
                batches(expecting(offset=1, valid_len=9), kernels=(BATCH,)),
                "expected tokens behind a row",
                "index >= args.expected_width || ",
                "",
                TOKEN_READ,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "signed integer overflow",
        [
            (
                batches(requests(3), offsets=[-(2**63), 3], num_valid=1),
                "negative offsets",
                "first < 0 || first > t",
                "first > t",
                "first_position = range.window_start - first",
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "division by zero",
        [
            (
                batches(nine, kernels=(FOURS,)),
                "groups of buffers",
                "options.num_buffers) / kGroup",
                "options.num_buffers)",
                "num_warps - 1) / num_warps",
            ),
        ],
    ),
    # Slots below zero are far behind the buffer; nullptr with an index is just an address.
    *mutants(
        "bound",
        "address",
        "AddressSanitizer",
        [
            (
                both(row(-3)),
                "slot before the buffer",
                "static_cast<u64>(slot) < static_cast<u64>(num_slots)",
                "slot < num_slots",
                RECORD_READ,
            ),
            (both(row(1)), "no predecessor", "if (prev_slot < 0)", "if (prev_slot < -1)", RECORD_READ),
            (batches(eight, kernels=(WIDE,)), "no KV bytes", "of_slot == 0 ? nullptr : ", "", WIDE_KV_READ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "global-buffer-overflow",
        [
            (
                batches(eight, kernels=(WIDE,)),
                "slots of staged",
                "__shared__ ulonglong2 staged[kVerifyThreads / kWarpSize][kWarpSize]",
                "__shared__ ulonglong2 staged[kVerifyThreads / kWarpSize][kWarpSize - 1]",
                STAGED,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "misaligned address",
        [
            (
                both(row(1), Cache(stride=40), kernels=(PLAN, BATCH)),
                "records of 16-byte parts",
                "if (has_aligned_records()) return load",
                "return load",
                RECORD_READ,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "null pointer",
        [
            (
                both(row(0), kernels=ALL),
                "no counter of skipped checks",
                " && buffers[g].skip_counters != nullptr",
                "",
                COUNTED,
            ),
            (
                both(nine, kernels=ALL),
                "one thread of a buffer counts",
                "threadIdx.x < kGroup",
                "threadIdx.x <= kGroup",
                COUNTED,
            ),
            (
                batches(nine, Cache(num_buffers=2), (FOURS,)),
                "buffers of a group, examined",
                "unroll 1\n        for (int g = 0; g < kGroup",
                "unroll 1\n        for (int g = 0; g <= kGroup",
                RECORD_READ,
            ),
            (batches(eight, kernels=(WIDE,)), "no KV bytes to load", "parts[k] != nullptr && ", "", WIDE_KV_READ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "AddressSanitizer: SEGV on unknown address 0x00000000",
        [
            (
                both(nine),
                "no details",
                "if (buffer.violation_details == nullptr) return nullptr;",
                "",
                "details[field] = 0",
            ),
            (
                disabled,
                "no counter of disabled launches",
                "buffer.skip_counters != nullptr && __ldg(enable)",
                "__ldg(enable)",
                COUNTED,
            ),
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [
            (
                both(row(0, 0, 5), DETAILED),
                "one lane counts skipped checks",
                "lane == 0 && num_skipped != 0",
                "num_skipped != 0",
                "",
            ),
            (
                both(row(0, 5), replace(DETAILED, records={0: (1, 2, 3)})),
                "record of a padding slot",
                "!buffer.has_slot(slot) || options.is_padding(slot)",
                "!buffer.has_slot(slot)",
                "",
            ),
            # Either of the two bounds would do. Runs of 33 entries: some lanes look at two.
            (
                batches(full_runs, Cache(400, ring_capacity=400)),
                "end of a run",
                "0, run_end));\n    end_of_row = static_cast<unsigned>(clamp(first + range.prefix_len - "
                "range.window_start, 0, run_end))",
                "0, run_end + 1));\n    end_of_row = static_cast<unsigned>(clamp(first + range.prefix_len - "
                "range.window_start, 0, run_end + 1))",
                "",
            ),
            (both(nine, kernels=ALL), "begin of a run", " && first + lane >= begin", "", ""),
            (both(nine), "entry before the first run", "begin > 0 ? begin - 1 : 0", "begin - 1", ""),
            (
                batches(nine, num_valid=5),
                "end of the last run",
                "min(begin + run_len, static_cast<unsigned>(num_entries))",
                "begin + run_len",
                "",
            ),
            (
                both(requests(300), Cache(400, ring_capacity=1600), ALL),
                "one block counts",
                "if (block == 0 && thread",
                "if (thread",
                "",
            ),
            (
                both(nine, Cache(num_buffers=2), ALL),
                "blocks of a buffer",
                "gridDim.x / num_groups * warps",
                "gridDim.x * warps",
                "",
            ),
            *(
                (batches(row(0, 5), replace(DETAILED, num_buffers=2), (FOURS,)), name, pattern, replacement, "")
                for name, pattern, replacement in (
                    ("buffers of a group", "% num_groups * kGroup", "% num_groups"),
                    (
                        "buffers of a group, counted",
                        "g < kGroup; ++g) {\n      if (lane == 0",
                        "g <= kGroup; ++g) {\n      if (lane == 0",
                    ),
                )
            ),
            (
                (*plan(nine.entries(), num_valid=-5), *batches(nine, num_valid=-5)),
                "negative number of entries",
                "clamp(__ldg(num_valid), 0, capacity)",
                "clamp(__ldg(num_valid), -9, capacity)",
                "",
            ),
            (batches(nine), "first entry of a request", "if (t >= end) adv", "if (t > end) adv", ""),
            (
                both(row(1), Cache(violation_count=INT32_MAX)),
                "violations that saturate",
                " || seq == kInt32Max",
                "",
                "",
            ),
            (
                both(row(63), Cache(kv_bytes=32, records={63: right_first_record}), kernels=(PLAN, BATCH)),
                "sources",
                "s < num_real_kv_sources",
                "s <= num_real_kv_sources",
                "",
            ),
            *(
                (batches(row(63), Cache(records={63: right_first_record}), (WIDE,)), name, pattern, replacement, "")
                for name, pattern, replacement in (
                    ("sources", "s < buffer.num_real_kv_sources", "s <= buffer.num_real_kv_sources"),
                    ("hashed parts", "offset + k * 16 < num_bytes", "offset + k * 16 <= num_bytes"),
                )
            ),
            (
                both(row(0), Cache(records={0: right_first_record}), check_holes=True),
                "a hole whose record is right",
                " && entry.slot != options.padding_slot",
                "",
                "",
            ),
            (
                both(row(-1), padding_slot=None),
                "no padding slot",
                "slot >= 0 && slot == padding_slot",
                "slot == padding_slot",
                "",
            ),
            # The link of a record of zeros is 0, which is also what stands in place of a record that cannot be read.
            (
                plan([Entry(1, -1, 0), Entry(64, 1, 0)]),
                "an entry without a record",
                "may_be_right = is_read && ",
                "may_be_right = ",
                "",
            ),
            (
                both(row(64, 1), Cache(records={1: (0, 1, 0)})),
                "a predecessor without a record",
                "entry.follows && is_before_read",
                "entry.follows",
                "",
            ),
            (
                batches(requests(1, 2, window=1), Cache(records={2: (9, 0, 0), 3: (0, 1, 0)})),
                "first entry of a window",
                "t > begin}",
                "t >= begin}",
                "",
            ),
            (batches(row(1), DETAILED), "position before the first", "entry.is_first ? -1 : slot", "slot", ""),
            (
                batches(expecting(valid_len=1), kernels=(BATCH,)),
                "valid expected tokens",
                " || index >= args.expected_valid_lens[r]",
                "",
                "",
            ),
        ],
    ),
]
