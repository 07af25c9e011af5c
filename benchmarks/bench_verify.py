"""Plan + verify of a batch: offsets, then batch verify straight from the page table; GPU time by graph replay.

Run from a checkout: `python -m benchmarks.bench_verify [--json FILE]`. Records are stamped as a clean engine would
leave them, but for a few; the violations are checked against NumPy in the same run.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import cupy
import numpy as np

from benchmarks.timing import environment, gpu_time, host_time, write_json
from cupy_kvcanary.buffers import Chain, RealKvSource, VerifyOrWriteContext
from cupy_kvcanary.constants import RealKvHashMode
from cupy_kvcanary.launch import with_numpy
from cupy_kvcanary.ops.plan_offsets import launch_plan_offsets_kernel
from cupy_kvcanary.ops.verify import launch_canary_verify_batch_kernel, launch_canary_verify_kernel
from cupy_kvcanary.reference.records import anchor_hash, hash_real_kv, link
from cupy_kvcanary.types import VerifyPlan

PAGE_SIZE = 16
NUM_DAMAGED = 5


@dataclass(frozen=True)
class Work:
    """What is verified, and the peer's time where it was measured (plan and verify of one tag)."""

    bs: int
    prefix: int
    chain: Chain = "splitmix64"
    num_buffers: int = 1
    num_sources: int = 0
    bytes_per_token: int = 0
    read_bytes: int = 0
    peer_us: float | None = None


WORKS = (
    Work(1, 1024, peer_us=9.5),
    Work(32, 1024, peer_us=16.8),
    Work(256, 1024, peer_us=28.5),
    Work(256, 4096, peer_us=79.7),
    Work(256, 4096, chain="affine", peer_us=79.7),
    Work(64, 65536),
    Work(64, 65536, chain="affine"),
    Work(4096, 256, peer_us=124.2),
    Work(256, 4096, num_buffers=4, peer_us=219.3),
    Work(256, 4096, chain="affine", num_buffers=4, peer_us=219.3),
    Work(256, 4096, num_sources=4, bytes_per_token=64, read_bytes=32, peer_us=203.0),
    Work(256, 1024, num_sources=1, bytes_per_token=2048, read_bytes=2048, peer_us=339.5),
)


class Case:
    """The arrays of one work, in host memory and on the GPU."""

    def __init__(self, work: Work) -> None:
        self.work = work
        rng = np.random.default_rng(0)
        bs, prefix = work.bs, work.prefix
        pages = -(-prefix // PAGE_SIZE)
        page_of = rng.permutation(bs * pages).reshape(bs, pages) + 1  # page 0 has the padding slot
        self.table = np.zeros((bs + 1, pages * PAGE_SIZE), np.int32)
        self.table[1:] = (page_of[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(bs, -1)
        self.num_slots = (bs * pages + 1) * PAGE_SIZE
        self.sources = [
            rng.integers(0, 256, (self.num_slots, work.bytes_per_token), dtype=np.uint8)
            for _ in range(work.num_sources)
        ]
        self.records = self._stamp(rng.integers(0, 2**17, (bs, prefix)))
        self.rows = np.arange(1, bs + 1)
        self.prefix_lens = np.full(bs, prefix)

    def _stamp(self, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        bs, prefix = tokens.shape
        records = np.zeros((self.num_slots, 4), np.uint64)
        h = np.full(bs, anchor_hash())
        for position in range(prefix):
            slots = self.table[1:, position]
            token, at = tokens[:, position].astype(np.uint64), np.full(bs, position, np.uint64)
            records[slots, 0], records[slots, 1], records[slots, 2] = token, at, h
            h = link(self.work.chain, h, token, at)
        if self.work.num_sources:
            buffer = with_numpy(self.context(np, records).view)
            records[PAGE_SIZE:, 3] = hash_real_kv(buffer, np.arange(PAGE_SIZE, self.num_slots))
        damaged = self.table[1:, :prefix].ravel()[:: max(1, bs * prefix // NUM_DAMAGED)][:NUM_DAMAGED]
        records[damaged, 0] ^= np.uint64(1)
        return records

    def context(self, xp: Any, records: np.ndarray[Any, Any]) -> VerifyOrWriteContext:
        work = self.work
        return VerifyOrWriteContext(
            canary_buf=xp.asarray(records.view(np.uint8)),
            kernel_kind=0,
            violation_ring=xp.zeros((64, 8), np.int64),
            violation_write_index=xp.zeros(1, np.int32),
            slot_run_counter=xp.zeros(1, np.int64),
            kernel_run_counter=xp.zeros(1, np.int64),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=xp.asarray(source),
                    page_size=1,
                    num_bytes_per_token=work.bytes_per_token,
                    read_bytes=work.read_bytes,
                )
                for source in self.sources
            ),
            real_kv_hash_mode=RealKvHashMode.ALL if self.sources else RealKvHashMode.NONE,
        )

    def arguments(self, xp: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keyword arguments of the offsets and of the batch verify launcher."""
        bs = self.work.bs
        capacity = bs * self.work.prefix
        rows, prefix_lens, table = (xp.asarray(array) for array in (self.rows, self.prefix_lens, self.table))
        scratch, num_valid, enable = (xp.zeros(n, t) for n, t in ((bs + 1, "i8"), (1, "i4"), (1, "i4")))
        shared = {
            "req_pool_indices": rows,
            "prefix_lens": prefix_lens,
            "req_to_token": table,
            "full_to_swa_index_mapping": None,
            "swa_window_size": 0,
            "verify_capacity": capacity,
        }
        offsets = shared | {
            "extend_seq_lens": xp.ones(bs, np.int64),
            "out_verify_offsets_scratch": scratch,
            "out_write_offsets": xp.zeros(bs + 1, np.int64),
            "out_write_seed_slot_indices": xp.zeros(bs, np.int64),
            "out_verify_num_valid": num_valid,
            "out_verify_enable": enable,
            "out_write_num_valid_reqs": xp.zeros(1, np.int32),
            "bs_block_size": bs,
        }
        batch = shared | {
            "verify_offsets_scratch": scratch,
            "verify_num_valid": num_valid,
            "verify_enable": enable,
            "req_to_verify_expected_tokens": None,
            "req_to_verify_expected_tokens_valid_lens": None,
            "kv_token_id_vs_position_offset": 0,
            "check_verify_expected_token": False,
            "chain": self.work.chain,
            "context": [self.context(xp, self.records) for _ in range(self.work.num_buffers)],
        }
        return offsets, batch

    def plan(self, xp: Any) -> VerifyPlan:
        """The same entries, materialised."""
        slots = self.table[1:, : self.work.prefix].astype(np.int64)
        before = np.concatenate([np.full((len(slots), 1), -1), slots[:, :-1]], axis=1)
        positions = np.broadcast_to(np.arange(self.work.prefix), slots.shape)
        entries = [xp.asarray(np.ascontiguousarray(array).ravel()) for array in (slots, before, positions)]
        return VerifyPlan(
            verify_slot_indices=entries[0],
            verify_prev_slot_indices=entries[1],
            verify_expected_positions=entries[2],
            verify_expected_tokens=xp.full(slots.size, -1, np.int64),
            verify_num_valid=xp.full(1, slots.size, np.int32),
            enable=xp.ones(1, np.int32),
        )


def violations(context: VerifyOrWriteContext) -> list[list[int]]:
    count = int(context.violation_write_index[0])
    return sorted(context.violation_ring[:count].tolist())


def bench(work: Work) -> dict[str, Any]:
    case = Case(work)
    offsets, batch = case.arguments(np)
    launch_plan_offsets_kernel(**offsets)
    launch_canary_verify_batch_kernel(**batch | {"context": batch["context"][:1]})
    expected = violations(batch["context"][0])
    assert expected, "the damaged records must be found"

    offsets, batch = case.arguments(cupy)
    launch_plan_offsets_kernel(**offsets)
    launch_canary_verify_batch_kernel(**batch)
    assert all(violations(context) == expected for context in batch["context"])

    def both() -> None:
        launch_plan_offsets_kernel(**offsets)
        launch_canary_verify_batch_kernel(**batch)

    gpu = gpu_time(both)
    verify_alone = gpu_time(lambda: launch_canary_verify_batch_kernel(**batch))
    plan = case.plan(cupy)
    entries = {"context": batch["context"], "plan": plan, "check_verify_expected_token": False, "chain": work.chain}
    from_entries = gpu_time(lambda: launch_canary_verify_kernel(**entries))
    host = host_time(lambda: launch_canary_verify_batch_kernel(**batch), calls=500)
    return {
        **asdict(work),
        "gpu_us": asdict(gpu),
        "verify_batch_us": asdict(verify_alone),
        "verify_entries_us": asdict(from_entries),
        "host_us": asdict(host),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = {"environment": environment(), "rows": [bench(work) for work in WORKS]}
    write_json(arguments.json, result)
    about = result["environment"]
    print(f"{about['gpu']}, CuPy {about['cupy']}, NVRTC {about['nvrtc']}, {about['date']}")
    print(f"empty kernel {about['empty_kernel_us']['median']:.2f} us, copy {about['copy_tb_per_s']:.2f} TB/s")
    head = f"{'bs x prefix':>12} {'chain':>11} {'buffers':>7} {'real KV':>9}"
    print(f"{head} {'plan+verify':>11} {'batch':>7} {'entries':>8} {'peer us':>8} {'host us':>8}")
    for row in result["rows"]:
        real_kv = f"{row['num_sources']} x {row['read_bytes']}" if row["num_sources"] else "-"
        times = (row[name]["median"] for name in ("gpu_us", "verify_batch_us", "verify_entries_us"))
        peer = f"{row['peer_us']:.1f}" if row["peer_us"] else "-"
        print(
            f"{row['bs']:>5} x {row['prefix']:<5}{row['chain']:>11} {row['num_buffers']:>7} {real_kv:>9} "
            "{:>11.2f} {:>7.2f} {:>8.2f} ".format(*times)
            + f"{peer:>8} {row['host_us']['median']:>8.1f}"
        )


if __name__ == "__main__":
    main()
