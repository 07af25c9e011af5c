"""How time is measured: GPU time by graph replay, host time by many calls without waiting, NumPy by the wall clock."""

from __future__ import annotations

import contextlib
import platform
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cupy_kvcanary import __version__
from cupy_kvcanary.compile import import_cupy, usable_cupy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LAUNCHES_PER_GRAPH = 20
REPLAYS = 30
_LONGEST_GRAPH_US = 20_000
_LONGEST_REPLAYS_US = 300_000
"""Slow launches are repeated less often: their spread is small."""

_CPU_SECONDS = 0.4
"""Of samples of one call on the CPU."""

_KERNELS = """
extern "C" __global__ void kvc_empty() {}

extern "C" __global__ void kvc_copy(const uint4* source, uint4* target, long long n) {
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
    uint4 values[4];
    #pragma unroll
    for (int k = 0; k < 4; ++k) if (i + k * step < n) values[k] = source[i + k * step];
    #pragma unroll
    for (int k = 0; k < 4; ++k) if (i + k * step < n) target[i + k * step] = values[k];
  }
}

extern "C" __global__ void kvc_hash(unsigned long long* out, int words) {
  unsigned long long x = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x + 1;
  for (int i = 0; i < words; ++i) {
    x ^= i;
    x ^= x >> 30; x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27; x *= 0x94D049BB133111EBull;
    x ^= x >> 31;
  }
  if (x == 0) *out = x;
}
"""
_HASH_BLOCKS, _HASH_THREADS, _HASH_WORDS = 8 * 132, 256, 256


@dataclass(frozen=True)
class Time:
    """Microseconds of one call: median and the quartiles around it."""

    median: float
    low: float
    high: float


def summary(samples: Sequence[float]) -> Time:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Time(median, low, high)


class Device(Protocol):
    """Where cases run."""

    arrays: Any
    """The array module: NumPy or CuPy."""
    is_gpu: bool

    def time(self, call: Callable[[], object]) -> Time:
        """Time that the device works for one call."""

    def host_time(self, call: Callable[[], object]) -> Time:
        """Time until one call returns, without waiting for the device between calls."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def free_bytes(self) -> int:
        """Memory that is free for a case."""

    @property
    def environment(self) -> dict[str, Any]:
        """What a result depends on: versions, date, the zero line and the copy bandwidth."""


def device(name: str) -> Device:
    """`cpu`, `cuda`, or `auto`: the GPU where there is a usable one."""
    if name == "cuda":
        usable_cupy()
    elif name == "cpu" or not has_gpu():
        return Cpu()
    return Gpu()


def has_gpu() -> bool:
    """Whether CuPy can use one."""
    try:
        import cupy
    except ImportError:
        return False
    return bool(cupy.cuda.is_available())


def _host_time(call: Callable[[], object], calls: int, synchronize: Callable[[], None]) -> Time:
    for _ in range(calls // 4):
        call()
    samples = []
    for _ in range(10):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return summary(samples)


def _software() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cupy_kvcanary": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


class Cpu:
    """The NumPy backend."""

    arrays: Any = np
    is_gpu = False

    def time(self, call: Callable[[], object]) -> Time:
        call()
        samples: list[float] = []
        while len(samples) < 3 or (sum(samples) < 1e6 * _CPU_SECONDS and len(samples) < REPLAYS):
            start = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - start))
        return summary(samples)

    def host_time(self, call: Callable[[], object]) -> Time:
        return _host_time(call, 50, self.synchronize)

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 2**30

    @cached_property
    def environment(self) -> dict[str, Any]:
        source = np.random.default_rng(0).integers(0, 2**31, 2**23)
        target = np.empty_like(source)
        microseconds = self.time(lambda: np.copyto(target, source)).median
        nothing = self.time(lambda: None)
        return _software() | {
            "device": _processor(),
            "empty_us": asdict(nothing),
            "copy_tb_per_s": 2 * source.nbytes / microseconds / 1e6,
        }


def _processor() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


class Gpu:
    """The current CUDA device."""

    is_gpu = True

    def __init__(self) -> None:
        self.arrays = import_cupy()
        self._kernels = self.arrays.RawModule(code=_KERNELS)

    def time(self, call: Callable[[], object]) -> Time:
        """From replays of a graph that holds many calls."""
        cuda = self.arrays.cuda
        stream = cuda.Stream(non_blocking=True)
        self.synchronize()
        with self._current(stream):
            call()  # compiles and warms up
            once = self._elapsed_us(stream, call)
            calls = int(np.clip(_LONGEST_GRAPH_US / once, 2, LAUNCHES_PER_GRAPH))
            stream.begin_capture()
            try:
                for _ in range(calls):
                    call()
            except BaseException:
                with contextlib.suppress(cuda.runtime.CUDARuntimeError):
                    stream.end_capture()  # else nothing could run on the stream
                raise
            graph = stream.end_capture()
            graph.upload(stream)
            replays = int(np.clip(_LONGEST_REPLAYS_US / (calls * once), 10, REPLAYS))
            samples = [self._elapsed_us(stream, lambda: graph.launch(stream)) / calls for _ in range(replays + 3)]
        return summary(samples[3:])

    @contextlib.contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        """The stream as the current one of CuPy, and of torch where that is loaded, for the peer."""
        torch = sys.modules.get("torch")
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            if torch is not None and torch.cuda.is_available():
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
            yield

    def _elapsed_us(self, stream: Any, work: Callable[[], object]) -> float:
        cuda = self.arrays.cuda
        start, end = cuda.Event(), cuda.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return 1000 * float(cuda.get_elapsed_time(start, end))

    def host_time(self, call: Callable[[], object]) -> Time:
        stream = self.arrays.cuda.get_current_stream()
        self.synchronize()
        call()
        once = self._elapsed_us(stream, call)
        # The queue of launches must not fill up: then a call would wait for the GPU.
        return _host_time(call, int(np.clip(40_000 / once, 20, 200)), self.synchronize)

    def synchronize(self) -> None:
        self.arrays.cuda.Device().synchronize()

    def free_bytes(self) -> int:
        """What the driver and CuPy's pool have, less a tenth for what a case's setup needs on the way."""
        pool = self.arrays.get_default_memory_pool()
        pool.free_all_blocks()
        return int(0.9 * self.arrays.cuda.runtime.memGetInfo()[0])

    def function(self, name: str) -> Any:
        """A kernel of the yardsticks, by name."""
        return self._kernels.get_function(name)

    @cached_property
    def environment(self) -> dict[str, Any]:
        cupy = self.arrays
        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
        empty, hash_words = self.function("kvc_empty"), self.function("kvc_hash")
        out = cupy.zeros(1, cupy.uint64)
        hashing = self.time(lambda: hash_words((_HASH_BLOCKS,), (_HASH_THREADS,), (out, np.int32(_HASH_WORDS))))
        driver_cuda = runtime.driverGetVersion()
        return _software() | {
            "device": properties["name"].decode(),
            "driver": _driver_version(),
            "driver_cuda": f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}",
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "cupy": cupy.__version__,
            "empty_us": asdict(self.time(lambda: empty((1,), (32,), ()))),
            "copy_tb_per_s": self._copy_bandwidth(),
            "hash_words_per_us": _HASH_BLOCKS * _HASH_THREADS * _HASH_WORDS / hashing.median,
        }

    def _copy_bandwidth(self) -> float:
        """Device-to-device copy, in TB/s counting bytes read and written."""
        cupy, copy = self.arrays, self.function("kvc_copy")
        source = cupy.random.default_rng(0).integers(0, 2**31, 2**28, dtype=cupy.int64)
        target = cupy.empty_like(source)
        count = source.nbytes // 16
        arguments = (source, target, np.int64(count))
        microseconds = self.time(lambda: copy((count // 1024,), (256,), arguments)).median
        return float(2 * source.nbytes / microseconds / 1e6)


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
        if found:
            return found[1]
    return "unknown"
