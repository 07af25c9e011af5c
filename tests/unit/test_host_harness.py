"""The host harness finds what it promises to find, and says where."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary.launch import Launch
from tests.helpers import host_backend
from tests.helpers.host_backend import (
    FLAVOURS,
    Flavour,
    HostArray,
    HostKernelError,
    HostKernels,
    build,
    mutated,
    report,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BARRIER = "  __syncthreads();  // sum: before"
SWAP_SYNC = "__syncwarp(threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u);  // swap: orders"

# One source for all tests, so that each flavour is compiled once, and again for each mutation of it.
SOURCE = r"""
struct Slice {
  int* data;
  long long n;
};
struct Args {
  Slice in;
  int* out;
};

__device__ __forceinline__ int warp_sum(int value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// Sum of in, by blocks of any number of whole warps.
extern "C" __global__ void __launch_bounds__(1024) kvc_sum(const Args args) {
  __shared__ int sums[32];
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int sum = warp_sum(i < args.in.n ? __ldg(args.in.data + i) : 0);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();  // sum: before the sums are read
  if (threadIdx.x < 32) {
    const int total = warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0);
    if (threadIdx.x == 0) atomicAdd(args.out, total);
  }
}

// out[i] = in[i ^ 1] through shared memory, within a warp.
template <int kThreads>
__device__ void swap_neighbours(const Args& args) {
  __shared__ int tile[kThreads];
  tile[threadIdx.x] = args.in.data[threadIdx.x];
  __syncwarp(threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u);  // swap: orders
  args.out[threadIdx.x] = tile[threadIdx.x ^ 1];  // swap: reads
}

extern "C" __global__ void kvc_swap(const Args args) { swap_neighbours<64>(args); }

// Each block reverses its part of in, in place, with vectors of four.
extern "C" __global__ void kvc_reverse(const Args args) {
  int4* mine = (int4*)args.in.data + (long long)blockIdx.x * blockDim.x;
  const int4 v = __ldcs(mine + threadIdx.x);
  __syncthreads();
  __stcs(mine + (blockDim.x - 1 - threadIdx.x), make_int4(v.w, v.z, v.y, v.x));
}

// Every byte of out has another thread.
extern "C" __global__ void kvc_bytes(const Args args) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  ((unsigned char*)args.out)[i] = i;
}

extern "C" __global__ void kvc_all_blocks_write(const Args args) {
  if (threadIdx.x == 5) args.out[0] = blockIdx.x;  // all_blocks_write: writes
}

extern "C" __global__ void kvc_read_what_others_count(const Args args) {
  if (threadIdx.x == 0) args.out[1 + blockIdx.x] = args.out[0];
  if (threadIdx.x == 1) atomicAdd(args.out, 1);  // read_what_others_count: counts
}

extern "C" __global__ void kvc_index(const Args args) {
  if (threadIdx.x == 0) args.out[0] = args.in.data[args.in.n];  // index: reads
}

extern "C" __global__ void kvc_store(const Args args) {
  if (threadIdx.x == 0) args.out[args.in.n] = 7;  // store: writes
}

__device__ __noinline__ void store(int* p, long long i) {
  p[i] = 7;  // store_shared: writes
}

__device__ __noinline__ int load(const int* p, long long i) {
  return p[i];  // load_shared: reads
}

extern "C" __global__ void kvc_store_shared(const Args args) {
  __shared__ int before[32];
  __shared__ int tile[32];
  __shared__ int after[32];
  before[threadIdx.x] = after[threadIdx.x] = 0;
  if (threadIdx.x == 1) store(tile, args.in.n);
  __syncthreads();
  args.out[threadIdx.x] = before[threadIdx.x] + tile[threadIdx.x] + after[threadIdx.x];
}

extern "C" __global__ void kvc_load_shared(const Args args) {
  __shared__ int tile[32];
  tile[threadIdx.x] = 0;
  __syncthreads();
  args.out[threadIdx.x] = load(tile, args.in.n);
}

extern "C" __global__ void kvc_overflow(const Args args) {
  args.out[threadIdx.x] = args.in.data[threadIdx.x] + 1;  // overflow: adds
}

extern "C" __global__ void kvc_early_return(const Args args) {
  if (threadIdx.x == 3) return;
  __syncthreads();  // early_return: barrier
}

extern "C" __global__ void kvc_two_barriers(const Args args) {
  if (threadIdx.x < 32) {
    __syncthreads();  // two_barriers: first
  } else {
    __syncthreads();
  }
}

extern "C" __global__ void kvc_lane_at_barrier(const Args args) {
  if (threadIdx.x == 9) {
    __syncthreads();  // lane_at_barrier: barrier
  } else {
    __syncwarp();  // lane_at_barrier: operation
    __syncthreads();
  }
}

extern "C" __global__ void kvc_lane_absent(const Args args) {
  if (threadIdx.x == 40) return;
  __ballot_sync(0xffffffffu, 1);  // lane_absent: votes
}

extern "C" __global__ void kvc_lane_unnamed(const Args args) {
  __any_sync(0xfffffffeu, 1);  // lane_unnamed: votes
}

extern "C" __global__ void kvc_lane_read_unnamed(const Args args) {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, 1, 20);  // lane_read_unnamed: reads
}

extern "C" __global__ void kvc_two_masks(const Args args) {
  __ballot_sync(threadIdx.x % 2 ? 0xffffffffu : 0x55555555u, 1);  // two_masks: votes
}

extern "C" __global__ void kvc_two_operations(const Args args) {
  if (threadIdx.x < 16)
    __syncwarp();  // two_operations: first
  else
    __all_sync(0xffffffffu, 1);  // two_operations: second
}

extern "C" __global__ void kvc_endless(const Args args) {
  while (*(volatile int*)args.in.data == 0) {
  }
}

extern "C" __global__ void kvc_null(const Args args) {
  if (threadIdx.x == 2) *args.out = 1;
}

extern "C" __global__ void kvc_uninitialised(const Args args) {
  __shared__ int tile[32];
  if (args.in.n > 0) tile[threadIdx.x] = 0;
  args.out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void kvc_order(const Args args) {
  args.out[1 + atomicAdd(args.out, 1)] = blockIdx.x * blockDim.x + threadIdx.x;
}

extern "C" __global__ void kvc_alignment(const Args args) {
  if (threadIdx.x == 0) args.out[0] = (unsigned long long)args.in.data % 16;
}

extern "C" __global__ void kvc_atomics(const Args args) {
  const int value = args.in.data[threadIdx.x];
  unsigned* bits = (unsigned*)args.out;
  unsigned long long* wide = (unsigned long long*)(args.out + 8);
  atomicAdd(args.out, value);
  atomicMin(args.out + 1, value);
  atomicMax(args.out + 2, value);
  atomicOr(bits + 3, (unsigned)value);
  atomicAnd(bits + 4, (unsigned)value);
  if (atomicCAS(args.out + 5, 0, value) == 0) args.out[6] = value;
  if (atomicExch(args.out + 7, 1) == 0) atomicAdd(wide, 1ull << 40);
}

extern "C" __global__ void kvc_warp(const Args args) {
  const int lane = threadIdx.x, value = args.in.data[lane];
  const unsigned all = 0xffffffffu;
  int* out = args.out + lane * 16;
  out[0] = __shfl_sync(all, value, lane + 5, 8);
  out[1] = __shfl_up_sync(all, value, 3);
  out[2] = __shfl_down_sync(all, value, 3, 16);
  out[3] = __shfl_xor_sync(all, value, 17);
  out[4] = __ballot_sync(all, value & 1);
  out[5] = __any_sync(all, value == 3) * 2 + __all_sync(all, value >= 0);
  out[6] = __match_any_sync(all, value);
  out[7] = __reduce_add_sync(all, value);
  out[8] = __reduce_max_sync(all, value) - __reduce_min_sync(all, value);
  out[9] = __popc(value) + __clz(value) * 100 + __ffs(value) * 10000;
  out[10] = __brev(value);
  out[11] = __umulhi(value, 0x80000000u) + __popcll(__umul64hi(value, 1ull << 63)) + __clzll(value);
  out[12] = __syncthreads_count(value & 1);
  out[13] = min(value, 4) * max(value, 5ll);
}
"""


def source_of(stem: str) -> str:
    return f'#line 1 "kernels/{stem}.cu"\n{SOURCE}'


def place(marker: str) -> str:
    """File and line of the source line that ends in this comment."""
    return f"kernels/k.cu:{next(i for i, line in enumerate(SOURCE.splitlines(), 1) if line.endswith(f'// {marker}'))}"


Mutation = tuple[str, str]

ARGS = np.dtype([("in", [("data", "u8"), ("n", "i8")]), ("out", "u8")])


def host_array(array: np.ndarray[Any, Any] | None, name: str, writable: bool = True) -> list[HostArray]:
    return [] if array is None else [HostArray(array.ctypes.data, array.nbytes, writable, name)]


class Case:
    """A launch of an entry on two arrays."""

    def __init__(
        self, entry: str, data: Any = (), out: Any = 1, *, n: int | None = None, grid: int = 1, block: int = 32
    ) -> None:
        self.data = np.array(data, np.int32)
        self.out: Any = np.zeros(out, np.int32) if isinstance(out, int) else out
        address = 0 if self.out is None else self.out.ctypes.data
        args = np.array(((self.data.ctypes.data, self.data.size if n is None else n), address), ARGS)
        self.launches = [Launch("k", f"kvc_{entry}", grid, block, args)]
        self.arrays = host_array(self.data, "in") + host_array(self.out, "out")

    def report(self, flavour: Flavour, mutation: Mutation | None = None, seed: int = 0) -> str | None:
        sources = mutated("k", *mutation, source_of) if mutation else source_of
        return report(flavour, sources, self.launches, self.arrays, seed)


def sum_case() -> Case:
    return Case("sum", range(230), grid=2, block=128)


def swap_case() -> Case:
    return Case("swap", range(64), 64, block=64)


def assert_says(text: str | None, expected: list[str]) -> None:
    """Every part occurs in the report; one that is a marker in the source stands for its place."""
    assert text is not None, "nothing reported"
    for part in expected:
        wanted = place(part) if f"// {part}\n" in SOURCE else part
        assert wanted in text, f"{wanted!r} not in:\n{text}"


def bits(value: int) -> int:
    return bin(value).count("1")


@pytest.mark.parametrize("flavour", FLAVOURS)
class TestRightKernelsPass:
    def test_sum_with_shuffles_shared_memory_and_atomics(self, flavour: Flavour) -> None:
        for seed in range(3):
            case = sum_case()
            assert case.report(flavour, seed=seed) is None
            assert case.out[0] == sum(range(230))

    def test_exchange_within_a_warp(self, flavour: Flavour) -> None:
        case = swap_case()
        assert case.report(flavour) is None
        assert case.out.tolist() == [i ^ 1 for i in range(64)]

    def test_vectors(self, flavour: Flavour) -> None:
        case = Case("reverse", range(256), grid=2)
        assert case.report(flavour) is None
        assert case.data.tolist() == [*reversed(range(128)), *reversed(range(128, 256))]

    def test_neighbouring_bytes_of_two_threads(self, flavour: Flavour) -> None:
        case = Case("bytes", out=32, grid=2, block=64)
        assert case.report(flavour) is None
        assert case.out.tobytes() == bytes(range(128))

    def test_atomics(self, flavour: Flavour) -> None:
        case = Case("atomics", [5, -3, 12, 40], np.array([0, 9, 9, 0, -1, 0, 0, 0, 0, 0], np.int32), block=4)
        assert case.report(flavour) is None
        first = case.out[6]
        assert first in case.data
        assert case.out.tolist() == [54, -3, 40, -3 | 5 | 12 | 40, -3 & 5 & 12 & 40, first, first, 1, 0, 256]

    def test_warp_operations(self, flavour: Flavour) -> None:
        data = (np.arange(32) * 7 + 1) % 11
        case = Case("warp", data, 32 * 16)
        assert case.report(flavour) is None
        lane = np.arange(32)
        odd = int(sum(1 << i for i in range(32) if data[i] & 1))
        expected = [
            data[lane // 8 * 8 + (lane + 5) % 8],
            np.where(lane >= 3, data[lane - 3], data),
            np.where(lane % 16 < 13, data[(lane + 3) % 32], data),
            data[lane ^ 17],
            odd,
            3,
            [sum(1 << i for i in range(32) if data[i] == value) for value in data],
            data.sum(),
            10,
            [bits(v) + (32 - int(v).bit_length()) * 100 + ((v & -v).bit_length()) * 10000 for v in map(int, data)],
            [int(f"{v:032b}"[::-1], 2) for v in data],
            [v // 2 + bits(v // 2) + 64 - v.bit_length() for v in map(int, data)],
            bits(odd),
            np.minimum(data, 4) * np.maximum(data, 5),
        ]
        got = case.out.reshape(32, 16).view(np.uint32)
        for column, values in enumerate(expected):
            np.testing.assert_array_equal(got[:, column], values, f"column {column}")

    def test_launches_in_order_on_the_same_arrays(self, flavour: Flavour) -> None:
        case = Case("reverse", range(128))
        case.launches *= 3
        assert case.report(flavour) is None
        assert case.data.tolist() == list(reversed(range(128)))

    def test_one_array_under_two_pointers(self, flavour: Flavour) -> None:
        data = np.arange(64, dtype=np.int32)
        case = Case("swap", out=data, block=64)
        case.launches[0].args["in"]["data"] = data.ctypes.data
        case.arrays += host_array(data[:0], "an empty view of it", writable=False)
        assert case.report(flavour) is None
        assert data.tolist() == [i ^ 1 for i in range(64)]

    def test_an_array_keeps_its_alignment(self, flavour: Flavour) -> None:
        data = np.zeros(9, np.int32)
        for start in range(5):
            case = Case("alignment")
            case.launches[0].args["in"]["data"] = data[start:].ctypes.data
            case.arrays += host_array(data[start:], "part")
            assert case.report(flavour) is None
            assert case.out[0] == data[start:].ctypes.data % 16


RACES: dict[str, tuple[Callable[[], Case], Mutation | None, list[str]]] = {
    "no barrier": (sum_case, (BARRIER, "  // sum: before"), ["kernel kvc_sum, block ", "shared memory"]),
    "no warp barrier": (
        swap_case,
        (SWAP_SYNC, ""),
        ["kernel kvc_swap, block 0, thread ", "swap: reads", "shared memory"],
    ),
    "a warp barrier without the other lane": (
        swap_case,
        (SWAP_SYNC, "__syncwarp(1u << threadIdx.x % 32);"),
        ["swap: reads", "shared memory"],
    ),
    "a shuffle is no barrier": (
        swap_case,
        (SWAP_SYNC, "__shfl_sync(0xffffffffu, 1, 0);"),
        ["swap: reads", "shared memory"],
    ),
    "a fence is no barrier": (sum_case, (BARRIER, "  __threadfence();  // sum: before"), ["shared memory"]),
    "vectors in place": (
        lambda: Case("reverse", range(256), grid=2),
        ("  __syncthreads();\n  __stcs(mine", "  __stcs(mine"),
        ["kernel kvc_reverse", "of in, which"],
    ),
    "two blocks": (
        lambda: Case("all_blocks_write", grid=2),
        None,
        ["kernel kvc_all_blocks_write", "thread 5, ", "all_blocks_write: writes", "byte 0 of out, which"],
    ),
    "a later block and one long finished": (
        lambda: Case("all_blocks_write", out=40, grid=40, block=1024),
        ("if (threadIdx.x == 5) args.out[0]", "if (threadIdx.x == 5) args.out[blockIdx.x == 39 ? 0 : blockIdx.x]"),
        ["all_blocks_write: writes", "byte 0 of out, which"],
    ),
    "an atomic and a read": (
        lambda: Case("read_what_others_count", out=9, grid=8),
        None,
        ["atomically updates", "reads", "byte 0 of out, which"],
    ),
    "half a word": (
        lambda: Case("bytes", out=32, block=64),
        ("((unsigned char*)args.out)[i] = i", "*(unsigned short*)((char*)args.out + i) = i"),
        ["kernel kvc_bytes", "of out, which"],
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_reported_in_every_order(name: str) -> None:
    make_case, mutation, expected = RACES[name]
    for seed in range(4):
        text = make_case().report("thread", mutation, seed)
        assert_says(text, ["data race", *expected])


OUT_OF_BOUNDS: dict[str, tuple[Callable[[], Case], list[str]]] = {
    "read behind": (lambda: Case("index", range(4)), ["heap-buffer-overflow", "READ of size 4", "index: reads"]),
    "read before": (lambda: Case("index", range(4), n=-1), ["heap-buffer-overflow", "READ of size 4", "index: reads"]),
    "write behind": (lambda: Case("store", out=4, n=4), ["heap-buffer-overflow", "WRITE of size 4", "store: writes"]),
    "write before": (lambda: Case("store", out=4, n=-1), ["heap-buffer-overflow", "WRITE of size 4", "store: writes"]),
    "atomic behind": (lambda: Case("order", out=0, block=1), ["heap-buffer-overflow", "READ of size 4"]),
    "shared write behind": (
        lambda: Case("store_shared", out=32, n=32),
        ["global-buffer-overflow", "WRITE of size 4", "store_shared: writes"],
    ),
    "shared write before": (
        lambda: Case("store_shared", out=32, n=-1),
        ["global-buffer-overflow", "WRITE of size 4", "store_shared: writes"],
    ),
    "shared read behind": (
        lambda: Case("load_shared", out=32, n=32),
        ["global-buffer-overflow", "READ of size 4", "load_shared: reads"],
    ),
    "overflow": (lambda: Case("overflow", [2**31 - 1] * 32, 32), ["signed integer overflow", "overflow: adds"]),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_address_flavour_reports(name: str) -> None:
    make_case, expected = OUT_OF_BOUNDS[name]
    case = make_case()
    assert_says(case.report("address"), [*expected, f"kernel {case.launches[0].entry}, block 0, thread "])


def test_address_flavour_reports_a_misaligned_load() -> None:
    text = Case("index", range(4)).report("address", ("args.in.data[args.in.n]", "*(long long*)(args.in.data + 1)"))
    assert_says(text, ["misaligned address", "index: reads", "kernel kvc_index, block 0, thread 0"])


@pytest.mark.parametrize(("n", "byte"), [(4, 16), (-1, -4), (19, 76), (-16, -64)])
def test_plain_flavour_reports_a_write_out_of_bounds(n: int, byte: int) -> None:
    text = Case("store", out=4, n=n).report("plain")
    assert_says(text, ["kernel kvc_store, block 0", f"out of 16 bytes is written at byte {byte}"])


DIVERGENCES: dict[str, tuple[Callable[[], Case], list[str]]] = {
    "a thread returned before the barrier": (
        lambda: Case("early_return", grid=3, block=64),
        [
            "kernel kvc_early_return, block ",
            ", thread 0, ",
            "early_return: barrier",
            ": __syncthreads is not reached by all threads\n  thread 3 has returned",
        ],
    ),
    "two barriers": (
        lambda: Case("two_barriers", block=64),
        ["two_barriers: first", "__syncthreads meets another barrier: thread ", " waits in __syncthreads at "],
    ),
    "a lane waits at a barrier": (
        lambda: Case("lane_at_barrier"),
        [
            "kernel kvc_lane_at_barrier, block 0, thread 0, ",
            "lane_at_barrier: operation",
            ": __syncwarp(0xffffffff) is not reached by all threads\n  thread 9 waits in __syncthreads at ",
            "lane_at_barrier: barrier",
        ],
    ),
    "a lane returned": (
        lambda: Case("lane_absent", block=64),
        [
            "kernel kvc_lane_absent, block 0, thread 32, ",
            "lane_absent: votes",
            ": __ballot_sync(0xffffffff) is not reached by all threads\n  thread 40 has returned",
        ],
    ),
    "a lane does not exist": (
        lambda: Case("lane_absent", block=31),
        ["lane_absent: votes", "is not reached by all threads\n  thread 31 does not exist"],
    ),
    "a lane that the mask does not name": (
        lambda: Case("lane_unnamed"),
        [
            "kernel kvc_lane_unnamed, block 0, thread 0, ",
            "lane_unnamed: votes",
            ": __any_sync(0xfffffffe): the mask does not name this lane",
        ],
    ),
    "a shuffle from a lane that the mask does not name": (
        lambda: Case("lane_read_unnamed"),
        ["lane_read_unnamed: reads", ": __shfl_sync reads lane 20, not in its mask"],
    ),
    "two masks": (
        lambda: Case("two_masks"),
        ["two_masks: votes", ": __ballot_sync(0x", "meets another operation: thread "],
    ),
    "two operations": (
        lambda: Case("two_operations"),
        ["two_operations: first", "two_operations: second", " meets another operation: thread "],
    ),
}


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_is_reported(name: str, flavour: Flavour) -> None:
    make_case, expected = DIVERGENCES[name]
    assert_says(make_case().report(flavour), expected)


class TestRuns:
    def test_blocks_and_threads_run_in_an_order_drawn_from_the_seed(self) -> None:
        orders = []
        for seed in (0, 1, 1):
            case = Case("order", out=1 + 4 * 8, grid=4, block=8)
            assert case.report("plain", seed=seed) is None
            orders.append(case.out[1:].tolist())
        assert sorted(orders[0]) == list(range(32))
        assert orders[0] != orders[1] == orders[2]

    def test_shared_memory_starts_undefined(self) -> None:
        contents = []
        for seed in range(2):
            case = Case("uninitialised", out=32)
            assert case.report("plain", seed=seed) is None
            contents.append(case.out.tolist())
        assert contents[0] != contents[1]

    def test_a_write_to_a_read_only_array(self) -> None:
        case = Case("store", n=0)
        case.arrays = host_array(case.out, "out", writable=False)
        assert_says(case.report("plain"), ["out at 0x", "is read only, but a kernel wrote to it"])
        assert case.out[0] == 0

    def test_a_crash_is_reported_and_the_next_run_works(self) -> None:
        crash, good = Case("null", out=None), sum_case()
        with HostKernels("plain", source_of) as kernels:
            for _ in range(2):
                with pytest.raises(HostKernelError, match=r"^kernel kvc_null, block 0, thread 2: Segmentation fault"):
                    kernels.run(crash.launches, crash.arrays)
                kernels.run(good.launches, good.arrays)
        assert good.out[0] == 2 * sum(range(230))

    def test_arrays_stay_untouched_where_a_launch_is_reported(self) -> None:
        case = sum_case()
        case.launches += Case("lane_unnamed").launches
        assert case.report("plain") is not None
        assert case.out[0] == 0

    def test_a_kernel_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_backend, "SECONDS", 1)
        assert_says(Case("endless", [0]).report("plain"), ["kernel kvc_endless", "it does not end"])

    def test_arguments_of_another_size(self) -> None:
        case = sum_case()
        case.launches[0] = Launch("k", "kvc_sum", 1, 32, np.array(0, np.uint64))
        assert_says(case.report("plain"), ["kvc_sum: 8 bytes of arguments for 24"])

    def test_an_unknown_entry(self) -> None:
        assert_says(Case("missing").report("plain"), ["no entry kvc_missing in this source"])

    def test_arrays_that_overlap(self) -> None:
        case = sum_case()
        case.arrays += host_array(case.data[3:], "part")
        with pytest.raises(ValueError, match="arrays must be the same memory or apart"):
            case.report("plain")


class TestBuilds:
    def test_a_compile_error_names_the_line(self) -> None:
        text = sum_case().report("plain", (BARRIER, "  nonsense;"))
        assert_says(text, [f"{place('sum: before the sums are read')}:", "nonsense"])

    def test_two_builders_at_once(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVCANARY_HOST_CACHE", str(tmp_path))
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: build(source_of("k"), "plain"), range(2))
        assert first == second
        assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["header", "runtime", "worker"]

    @pytest.mark.parametrize("pattern", ["no such text", "__syncthreads();"])
    def test_a_mutation_must_find_its_text_once(self, pattern: str) -> None:
        with pytest.raises(ValueError, match="pattern must occur once in the source of k, got "):
            mutated("k", pattern, "", source_of)
