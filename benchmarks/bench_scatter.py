"""Scatter of request token ids: GPU time by graph replay and host time. Output is checked against NumPy.

Run from a checkout: `python -m benchmarks.bench_scatter [--json FILE]`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import cupy
import numpy as np

from benchmarks.timing import environment, gpu_time, host_time, write_json
from cupy_kvcanary import launch_scatter_req_token_ids_kernel

SIZES = ((1, 4096), (32, 1024), (256, 4096), (4096, 256))
BYTES_PER_TOKEN = 12  # one int64 read, one int32 written


def make_arguments(bs: int, longest: int) -> dict[str, Any]:
    """Requests of half to all of the longest length, into a pool with as many rows."""
    rng = np.random.default_rng(bs)
    offsets = np.cumsum([0, *rng.integers(longest // 2, longest + 1, bs)])
    return {
        "flat_in": rng.integers(0, 2**17, offsets[-1]),
        "offsets": offsets,
        "req_pool_indices": rng.permutation(bs),
        "pool_out": np.full((bs, longest), -7777, np.int32),
    }


def bench(bs: int, longest: int) -> dict[str, Any]:
    expected = make_arguments(bs, longest)
    arguments = {name: cupy.asarray(value) for name, value in expected.items()}
    launch_scatter_req_token_ids_kernel(**expected)
    gpu = gpu_time(lambda: launch_scatter_req_token_ids_kernel(**arguments))
    np.testing.assert_array_equal(cupy.asnumpy(arguments["pool_out"]), expected["pool_out"])
    return {
        "bs": bs,
        "longest": longest,
        "tokens": len(expected["flat_in"]),
        "gpu_us": asdict(gpu),
        "host_us": asdict(host_time(lambda: launch_scatter_req_token_ids_kernel(**arguments), calls=1000)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = {"environment": environment(), "rows": [bench(*size) for size in SIZES]}
    write_json(arguments.json, result)
    about = result["environment"]
    print(f"{about['gpu']}, CuPy {about['cupy']}, NVRTC {about['nvrtc']}, {about['date']}")
    print(f"empty kernel {about['empty_kernel_us']['median']:.2f} us, copy {about['copy_tb_per_s']:.2f} TB/s")
    print(f"{'bs':>6} {'longest':>8} {'tokens':>9} {'GPU us':>8} {'quartiles':>16} {'TB/s':>6} {'host us':>8}")
    for row in result["rows"]:
        gpu, host = row["gpu_us"], row["host_us"]
        rate = BYTES_PER_TOKEN * row["tokens"] / gpu["median"] / 1e6
        spread = f"{gpu['low']:.2f} - {gpu['high']:.2f}"
        print(
            f"{row['bs']:>6} {row['longest']:>8} {row['tokens']:>9} {gpu['median']:>8.2f} {spread:>16}"
            f" {rate:>6.2f} {host['median']:>8.1f}"
        )


if __name__ == "__main__":
    main()
