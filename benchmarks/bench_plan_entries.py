"""The whole plan, offsets and entries: GPU time by graph replay and host time. Output is checked against NumPy.

Run from a checkout: `python -m benchmarks.bench_plan_entries [--json FILE]`.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import asdict
from typing import Any

import cupy
import numpy as np

from benchmarks.timing import environment, gpu_time, host_time, write_json
from cupy_kvcanary import VerifyPlan, WritePlan, launch_canary_plan_kernels, launch_plan_entries_kernel

# Requests, prefix, and the peer's plan (microseconds of its Triton and CUDA kernels on an H200, graph replay).
SIZES = ((1, 1024, 6.1), (32, 1024, 13.2), (256, 1024, 16.7), (256, 4096, 26.6), (1024, 1024, 30.6), (4096, 256, 71.4))
BYTES_PER_ENTRY = 36  # four int64 written, one int32 of the page table read

ENTRY_ARRAYS = (
    "verify_slot_indices",
    "verify_expected_tokens",
    "verify_expected_positions",
    "verify_prev_slot_indices",
)


def make_arguments(bs: int, prefix_len: int) -> dict[str, Any]:
    """A decode batch: every request has this prefix and extends by one. The verify plan is full."""
    rng = np.random.default_rng(bs)
    capacity = bs * prefix_len
    verify_plan, write_plan = VerifyPlan.allocate(capacity), WritePlan.allocate(bs)
    for array in (*vars(verify_plan).values(), *vars(write_plan).values()):
        array[...] = -7777
    return {
        "verify_plan_out": verify_plan,
        "write_plan_out": write_plan,
        "req_pool_indices": rng.permutation(bs) + 1,
        "prefix_lens": np.full(bs, prefix_len),
        "extend_seq_lens": np.ones(bs, np.int64),
        "req_to_token": rng.integers(1, 2**24, (bs + 1, prefix_len + 1), dtype=np.int32),
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": capacity,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    }


def on_gpu(value: Any) -> Any:
    if isinstance(value, (VerifyPlan, WritePlan)):
        fields = {field.name: on_gpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def entries_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same batch for the entries kernel alone."""
    plan, bs = arguments["verify_plan_out"], len(arguments["req_pool_indices"])
    others = ("verify_plan_out", "write_plan_out", "extend_seq_lens", "verify_capacity")
    return {
        **{name: value for name, value in arguments.items() if name not in others},
        "verify_offsets_scratch": cupy.arange(bs + 1) * arguments["prefix_lens"][0],
        "verify_enable": plan.enable,
        **{f"out_{name}": getattr(plan, name) for name in ENTRY_ARRAYS},
    }


def bench(bs: int, prefix_len: int, peer_us: float) -> dict[str, Any]:
    expected = make_arguments(bs, prefix_len)
    arguments = {name: on_gpu(value) for name, value in expected.items()}
    launch_canary_plan_kernels(**expected)
    gpu = gpu_time(lambda: launch_canary_plan_kernels(**arguments))
    for plan in ("verify_plan_out", "write_plan_out"):
        for field in dataclasses.fields(arguments[plan]):
            result, value = (getattr(side[plan], field.name) for side in (arguments, expected))
            np.testing.assert_array_equal(cupy.asnumpy(result), value, err_msg=field.name)
    alone = entries_arguments(arguments)
    return {
        "bs": bs,
        "prefix_len": prefix_len,
        "peer_gpu_us": peer_us,
        "gpu_us": asdict(gpu),
        "entries_gpu_us": asdict(gpu_time(lambda: launch_plan_entries_kernel(**alone))),
        "host_us": asdict(host_time(lambda: launch_canary_plan_kernels(**arguments), calls=1000)),
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
    print(
        f"{'bs':>6} {'prefix':>7} {'peer us':>8} {'plan us':>8} {'quartiles':>16}"
        f" {'entries us':>10} {'TB/s':>6} {'host us':>8}"
    )
    for row in result["rows"]:
        gpu, entries = row["gpu_us"], row["entries_gpu_us"]["median"]
        rate = BYTES_PER_ENTRY * row["bs"] * row["prefix_len"] / entries / 1e6
        spread = f"{gpu['low']:.2f} - {gpu['high']:.2f}"
        print(
            f"{row['bs']:>6} {row['prefix_len']:>7} {row['peer_gpu_us']:>8.1f} {gpu['median']:>8.2f} {spread:>16}"
            f" {entries:>10.2f} {rate:>6.2f} {row['host_us']['median']:>8.1f}"
        )


if __name__ == "__main__":
    main()
