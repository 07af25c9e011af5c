"""Host time of a call, without waiting for the GPU: checked calls and bound ones, on torch and CuPy arrays.

Run from a checkout: `python -m benchmarks.bench_host [--json FILE]`. The yardstick, in the same run, is a bare CuPy
RawKernel call with 16 arrays, which checks nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import cupy

from benchmarks import bench_plan_offsets, bench_verify, bench_write
from benchmarks.timing import environment, host_time, write_json
from cupy_kvcanary import launch_canary_verify_batch_kernel, launch_canary_write_kernel, launch_plan_offsets_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

_SIXTEEN = ", ".join(f"long long* a{i}" for i in range(16))
_BARE = cupy.RawKernel(f'extern "C" __global__ void kvc_bare({_SIXTEEN}) {{}}', "kvc_bare")


def on_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_dlpack(value) if isinstance(value, cupy.ndarray) else value
        for name, value in arguments.items()
    }


def rows() -> Iterator[tuple[str, float | None, Any]]:
    """(what, aim in microseconds, call) of each line."""
    arrays = tuple(cupy.zeros(8, cupy.int64) for _ in range(16))
    yield "bare CuPy RawKernel, 16 arrays", None, lambda: _BARE((1,), (32,), arrays)
    offsets = bench_plan_offsets.on_gpu(bench_plan_offsets.make_arguments(256))
    if torch is not None:
        tensors = on_torch(offsets)
        yield "offsets, torch, checked", 15, lambda: launch_plan_offsets_kernel(**tensors)
        changing = [on_torch(bench_plan_offsets.on_gpu(bench_plan_offsets.make_arguments(256))) for _ in range(4)]
        turn = iter(range(10**9))
        yield (
            "offsets, torch, other tensors each call",
            None,
            lambda: launch_plan_offsets_kernel(**changing[next(turn) % 4]),
        )
        yield "offsets, torch, bound", 4, launch_plan_offsets_kernel.bind(**tensors)
    yield "offsets, CuPy, checked", None, lambda: launch_plan_offsets_kernel(**offsets)
    yield "offsets, CuPy, bound", 4, launch_plan_offsets_kernel.bind(**offsets)
    _, batch = bench_verify.Case(bench_verify.Work(32, 1024, num_buffers=4)).arguments(cupy)
    yield "batch verify, 4 buffers, CuPy, checked", None, lambda: launch_canary_verify_batch_kernel(**batch)
    yield "batch verify, 4 buffers, CuPy, bound", 4, launch_canary_verify_batch_kernel.bind(**batch)
    write = bench_write.Case(bench_write.Work(32, 1, num_buffers=4), "splitmix64").arguments(cupy)
    yield "write, 4 buffers, CuPy, checked", None, lambda: launch_canary_write_kernel(**write)
    yield "write, 4 buffers, CuPy, bound", 4, launch_canary_write_kernel.bind(**write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    measured = [{"what": what, "aim_us": aim, "host_us": asdict(host_time(call))} for what, aim, call in rows()]
    result = {"environment": environment(), "rows": measured}
    write_json(arguments.json, result)
    print(f"{'host time of a call':<42} {'us':>7} {'quartiles':>15} {'aim':>5}")
    for row in measured:
        time, aim = row["host_us"], row["aim_us"]
        spread = f"{time['low']:.1f} - {time['high']:.1f}"
        print(f"{row['what']:<42} {time['median']:>7.1f} {spread:>15} {aim if aim else '-':>5}")


if __name__ == "__main__":
    main()
