"""How every benchmark here measures: GPU time by graph replay, host time by many calls without waiting."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LAUNCHES_PER_GRAPH = 20
REPLAYS = 30
_EMPTY_KERNEL = cupy.RawKernel('extern "C" __global__ void kvc_empty() {}', "kvc_empty")
_COPY_KERNEL = cupy.RawKernel(
    """extern "C" __global__ void kvc_copy(const uint4* source, uint4* target, long long n) {
      const long long step = (long long)gridDim.x * blockDim.x;
      for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
        uint4 values[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k) if (i + k * step < n) values[k] = source[i + k * step];
        #pragma unroll
        for (int k = 0; k < 4; ++k) if (i + k * step < n) target[i + k * step] = values[k];
      }
    }""",
    "kvc_copy",
)


@dataclass(frozen=True)
class Time:
    """Microseconds per call: median and the quartiles around it."""

    median: float
    low: float
    high: float


def _summary(samples: Sequence[float]) -> Time:
    low, median, high = statistics.quantiles(samples, n=4)
    return Time(median, low, high)


def gpu_time(launch: Callable[[], object]) -> Time:
    """GPU time of one call of `launch`, from replays of a graph that holds many of them."""
    launch()  # compiles and warms up
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(LAUNCHES_PER_GRAPH):
            launch()
        graph = stream.end_capture()
        graph.upload(stream)
        samples = []
        for _ in range(REPLAYS + 3):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            samples.append(1000 * cupy.cuda.get_elapsed_time(start, end) / LAUNCHES_PER_GRAPH)
    return _summary(samples[3:])


def host_time(call: Callable[[], object], calls: int = 2000) -> Time:
    """Host time of one call, without waiting for the GPU between calls."""
    for _ in range(100):
        call()
    samples = []
    for _ in range(10):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(calls // 10):
            call()
        samples.append(1e6 * (time.perf_counter() - start) / (calls // 10))
    return _summary(samples)


def empty_kernel_time() -> Time:
    """GPU time of a kernel that does nothing: the zero line."""
    return gpu_time(lambda: _EMPTY_KERNEL((1,), (32,), ()))


def copy_bandwidth() -> float:
    """Device-to-device copy, in TB/s counting bytes read and written."""
    source = cupy.random.default_rng(0).integers(0, 2**31, 2**28, dtype=cupy.int64)
    target = cupy.empty_like(source)
    count = source.nbytes // 16
    microseconds = gpu_time(lambda: _COPY_KERNEL((count // 1024,), (256,), (source, target, count))).median
    return 2 * source.nbytes / microseconds / 1e6


def environment() -> dict[str, Any]:
    """What a result depends on."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": properties["name"].decode(),
        "driver_cuda": runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "empty_kernel_us": asdict(empty_kernel_time()),
        "copy_tb_per_s": copy_bandwidth(),
    }


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write a benchmark's result where the caller asked for it."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
