"""Offsets kernel: GPU time by graph replay and host time, over batch sizes. Output is checked against NumPy.

Run from a checkout: `python -m benchmarks.bench_plan_offsets [--json FILE]`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import cupy
import numpy as np

from benchmarks.timing import environment, gpu_time, host_time, write_json
from cupy_kvcanary import launch_plan_offsets_kernel

BATCH_SIZES = (1, 32, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1048576)
PEER_US = {1: 3.5, 32: 9.5, 256: 9.7, 1024: 10.7, 4096: 41.8}  # it refuses more than 4096
BYTES_PER_REQUEST = 48  # three int64 read, three written; the table's scattered reads come on top


def make_arguments(bs: int, seed: int = 0) -> dict[str, Any]:
    """A decode batch: every request has a prefix of up to 4096 tokens and extends by one."""
    rng = np.random.default_rng(seed)
    rows = min(bs, 65536) + 1
    width = 4096 if bs <= 65536 else 64
    return {
        "req_pool_indices": rng.permutation(bs) % (rows - 1) + 1,
        "prefix_lens": rng.integers(1, width, bs),
        "extend_seq_lens": np.ones(bs, np.int64),
        "req_to_token": rng.integers(1, 2**24, (rows, width), dtype=np.int32),
        "full_to_swa_index_mapping": None,
        "out_verify_offsets_scratch": np.full(bs + 1, -7777, np.int64),
        "out_write_offsets": np.full(bs + 1, -7777, np.int64),
        "out_write_seed_slot_indices": np.full(bs, -7777, np.int64),
        "out_verify_num_valid": np.full(1, -7777, np.int32),
        "out_verify_enable": np.full(1, -7777, np.int32),
        "out_write_num_valid_reqs": np.full(1, -7777, np.int32),
        "swa_window_size": 0,
        "verify_capacity": 2**31 - 1,
        "bs_block_size": bs,
    }


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}


def bench(bs: int) -> dict[str, Any]:
    expected = make_arguments(bs)
    arguments = on_gpu(expected)
    launch_plan_offsets_kernel(**expected)
    gpu = gpu_time(lambda: launch_plan_offsets_kernel(**arguments))
    for name, value in expected.items():
        if name.startswith("out_"):
            np.testing.assert_array_equal(cupy.asnumpy(arguments[name]), value, err_msg=name)
    host = host_time(lambda: launch_plan_offsets_kernel(**arguments), calls=1000)
    return {"bs": bs, "peer_us": PEER_US.get(bs), "gpu_us": asdict(gpu), "host_us": asdict(host)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = {"environment": environment(), "rows": [bench(bs) for bs in BATCH_SIZES]}
    write_json(arguments.json, result)
    about = result["environment"]
    print(f"{about['gpu']}, CuPy {about['cupy']}, NVRTC {about['nvrtc']}, {about['date']}")
    print(f"empty kernel {about['empty_kernel_us']['median']:.2f} us, copy {about['copy_tb_per_s']:.2f} TB/s")
    print(f"{'bs':>9} {'GPU us':>8} {'quartiles':>16} {'TB/s':>6} {'host us':>8}")
    for row in result["rows"]:
        gpu, host = row["gpu_us"], row["host_us"]
        rate = BYTES_PER_REQUEST * row["bs"] / gpu["median"] / 1e6
        spread = f"{gpu['low']:.2f} - {gpu['high']:.2f}"
        print(f"{row['bs']:>9} {gpu['median']:>8.2f} {spread:>16} {rate:>6.2f} {host['median']:>8.1f}")


if __name__ == "__main__":
    main()
