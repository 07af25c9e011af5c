"""Write kernels: GPU time by graph replay and host time, prefill and decode. Buffers are checked against NumPy.

Run from a checkout: `python -m benchmarks.bench_write [--json FILE]`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import cupy
import numpy as np

from benchmarks.timing import environment, gpu_time, host_time, write_json
from cupy_kvcanary.buffers import CHAINS, Chain, RealKvSource, VerifyOrWriteContext
from cupy_kvcanary.constants import RealKvHashMode
from cupy_kvcanary.ops.write import launch_canary_write_kernel
from cupy_kvcanary.types import WritePlan

NUM_SLOTS = 2**18
BYTES_PER_TOKEN = 64
READ_BYTES = 32


@dataclass(frozen=True)
class Work:
    """What is written, and the peer's time where it was measured."""

    num_requests: int
    extend: int
    num_long: int = 0
    """Of the requests, how many extend by 4096 instead."""
    num_buffers: int = 1
    num_sources: int = 0
    peer_us: float | None = None


WORKS = (
    Work(1, 4096, peer_us=1055),
    Work(1, 4096, num_buffers=4),
    Work(1, 4096, num_sources=4),
    Work(8, 4096),
    Work(1, 32768),
    Work(1, 1, peer_us=2.9),
    Work(256, 1, peer_us=3.1),
    Work(256, 1, num_buffers=4),
    Work(256, 1, num_sources=4),
    Work(256, 1, num_buffers=4, num_sources=4),
    Work(4096, 1, peer_us=6.1),
    Work(256, 4, num_buffers=4),
    Work(256, 1, num_long=1, num_buffers=4),
)


class Case:
    """The arguments of one work, on the host and on the GPU."""

    def __init__(self, work: Work, chain: Chain) -> None:
        rng = np.random.default_rng(0)
        self.work, self.chain = work, chain
        lens = np.full(work.num_requests, work.extend)
        lens[: work.num_long] = 4096
        self.offsets = np.concatenate([[0], np.cumsum(lens)])
        n = int(self.offsets[-1])
        slots = rng.permutation(NUM_SLOTS - 1)[: n + work.num_requests] + 1
        self.slots, self.seeds = slots[:n], slots[n:]
        self.tokens = rng.integers(0, 2**17, n)
        self.positions = np.arange(n) - np.repeat(self.offsets[:-1], lens) + 1000
        self.records = rng.integers(0, 2**62, (NUM_SLOTS, 4))
        self.records[self.seeds, 1] = 999
        self.kv = [rng.integers(0, 256, (NUM_SLOTS, BYTES_PER_TOKEN), dtype=np.uint8) for _ in range(work.num_sources)]

    def arguments(self, xp: Any) -> dict[str, Any]:
        """Keyword arguments of the launcher, as arrays of `xp`."""
        return {
            "context": [self._context(xp) for _ in range(self.work.num_buffers)],
            "plan": WritePlan(
                write_offsets=xp.asarray(self.offsets),
                write_seed_slot_indices=xp.asarray(self.seeds),
                write_num_valid_reqs=xp.asarray(np.array([len(self.seeds)], np.int32)),
            ),
            "input_ids": xp.asarray(self.tokens),
            "positions": xp.asarray(self.positions),
            "out_cache_loc": xp.asarray(self.slots),
            "enable_write_input_assert": False,
            "expected_input_tokens": None,
            "expected_input_positions": None,
            "chain": self.chain,
        }

    def _context(self, xp: Any) -> VerifyOrWriteContext:
        return VerifyOrWriteContext(
            canary_buf=xp.array(self.records.view(np.uint8)),
            kernel_kind=0,
            violation_ring=xp.zeros((64, 8), np.int64),
            violation_write_index=xp.zeros(1, np.int32),
            slot_run_counter=xp.zeros(1, np.int64),
            kernel_run_counter=xp.zeros(1, np.int64),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=xp.asarray(kv), page_size=1, num_bytes_per_token=BYTES_PER_TOKEN, read_bytes=READ_BYTES
                )
                for kv in self.kv
            ),
            real_kv_hash_mode=RealKvHashMode.ALL,
            enable_chain_position_assert=xp.ones(1, np.int32),
        )


def bench(work: Work, chain: Chain) -> dict[str, Any]:
    case = Case(work, chain)
    expected, arguments = case.arguments(np), case.arguments(cupy)
    launch_canary_write_kernel(**expected)
    gpu = gpu_time(lambda: launch_canary_write_kernel(**arguments))
    host = host_time(lambda: launch_canary_write_kernel(**arguments), calls=200)
    for ours, reference in zip(arguments["context"], expected["context"], strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(ours.canary_buf), reference.canary_buf)
        assert int(ours.violation_write_index[0]) == int(reference.violation_write_index[0]) == 0
    return {**asdict(work), "chain": chain, "gpu_us": asdict(gpu), "host_us": asdict(host)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    rows = [bench(work, chain) for work in WORKS for chain in CHAINS]
    result = {"environment": environment(), "rows": rows}
    write_json(arguments.json, result)
    about = result["environment"]
    print(f"{about['gpu']}, CuPy {about['cupy']}, NVRTC {about['nvrtc']}, {about['date']}")
    print(f"empty kernel {about['empty_kernel_us']['median']:.2f} us, copy {about['copy_tb_per_s']:.2f} TB/s")
    head = f"{'requests x extend':>18} {'buffers':>7} {'sources':>7} {'chain':>11}"
    print(f"{head} {'GPU us':>8} {'quartiles':>18} {'peer us':>8} {'host us':>8}")
    for row in rows:
        gpu, host = row["gpu_us"], row["host_us"]
        extend = f"{row['num_requests']} x {row['extend']}" + (f" + {row['num_long']} long" if row["num_long"] else "")
        peer = f"{row['peer_us']:.1f}" if row["peer_us"] else "-"
        spread = f"{gpu['low']:.2f} - {gpu['high']:.2f}"
        print(
            f"{extend:>18} {row['num_buffers']:>7} {row['num_sources']:>7} {row['chain']:>11} "
            f"{gpu['median']:>8.2f} {spread:>18} {peer:>8} {host['median']:>8.1f}"
        )


if __name__ == "__main__":
    main()
