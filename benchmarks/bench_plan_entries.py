"""The materialised plan of a decode batch: offsets and entries, and the entries alone. The verify plan is full.

Bytes moved an entry: four int64 written, one int32 of the page table read; expected tokens and a mapping on top.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cupy_kvcanary import (
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_plan_entries_kernel,
    launch_plan_offsets_kernel,
)

from . import published
from .bench_plan_offsets import arguments_on
from .case import SECTOR, Case, Launch, PeerLaunch, Prepared, Setup, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "entries to verify"

Part = Literal["offsets + entries", "entries"]

_ENTRY_ARRAYS = (
    "verify_slot_indices",
    "verify_expected_tokens",
    "verify_expected_positions",
    "verify_prev_slot_indices",
)
_UNTOUCHED = -7777
_LUT_LEN = 2**22


@dataclass(frozen=True, kw_only=True)
class Work:
    bs: int
    prefix: int
    window: int = 0
    has_tokens: bool = False
    """Whether there are expected tokens."""

    @property
    def entries(self) -> int:
        return self.bs * (min(self.window, self.prefix) if self.window else self.prefix)

    @property
    def name(self) -> str:
        return (
            f"{self.bs} x {self.prefix}"
            + (f", window {self.window}" if self.window else "")
            + (", expected tokens" if self.has_tokens else "")
        )


_QUICK = (Work(bs=1, prefix=1024), Work(bs=256, prefix=4096), Work(bs=4096, prefix=256))
_WORKS = (
    *_QUICK,
    Work(bs=1, prefix=0),
    Work(bs=32, prefix=1024),
    Work(bs=256, prefix=1024),
    Work(bs=1024, prefix=1024),
    Work(bs=1, prefix=131072),
    Work(bs=64, prefix=65536),
    Work(bs=1048576, prefix=1),
    Work(bs=256, prefix=8192, window=1024),
    Work(bs=256, prefix=4096, has_tokens=True),
)


class PlanSetup(Setup):
    def __init__(self, work: Work, part: Part) -> None:
        self.work, self.part = work, part
        rng = np.random.default_rng(work.bs)
        bs, prefix = work.bs, work.prefix
        most = _LUT_LEN if work.window else 2**24
        tokens = rng.integers(0, 2**17, (bs + 1, prefix + 1), dtype=np.int32) if work.has_tokens else None
        self.batch = {
            "req_pool_indices": rng.permutation(bs) + 1,
            "prefix_lens": np.full(bs, prefix),
            "req_to_token": rng.integers(1, most, (bs + 1, prefix + 1), dtype=np.int32),
            "swa_window_size": work.window,
            "full_to_swa_index_mapping": rng.permutation(_LUT_LEN) if work.window else None,
            "req_to_verify_expected_tokens": tokens,
            "req_to_verify_expected_tokens_valid_lens": np.full(bs, prefix) if work.has_tokens else None,
            "kv_token_id_vs_position_offset": 0,
        }

    def on(self, arrays: Any) -> Prepared:
        batch, bs = arguments_on(self.batch, arrays), self.work.bs
        verify = VerifyPlan(
            **{name: arrays.full(self.work.entries, _UNTOUCHED, np.int64) for name in _ENTRY_ARRAYS},
            verify_num_valid=arrays.full(1, _UNTOUCHED, np.int32),
            enable=arrays.full(1, _UNTOUCHED, np.int32),
        )
        write = WritePlan(
            write_offsets=arrays.full(bs + 1, _UNTOUCHED, np.int64),
            write_seed_slot_indices=arrays.full(bs, _UNTOUCHED, np.int64),
            write_num_valid_reqs=arrays.full(1, _UNTOUCHED, np.int32),
        )
        entries = {name: getattr(verify, name) for name in _ENTRY_ARRAYS}
        if self.part == "entries":
            scratch = arrays.zeros(bs + 1, np.int64)
            self._plan_offsets(batch, verify, write, scratch)
            arguments = {
                **batch,
                "verify_offsets_scratch": scratch,
                "verify_enable": verify.enable,
                **{f"out_{name}": array for name, array in entries.items()},
            }
            launch = Launch(launch_plan_entries_kernel, arguments)
            return prepared([launch], entries, lambda: [PeerLaunch("launch_plan_entries_kernel", arguments)])
        arguments = {
            **batch,
            "verify_plan_out": verify,
            "write_plan_out": write,
            "extend_seq_lens": arrays.ones(bs, np.int64),
            "verify_capacity": self.work.entries,
            "bs_block_size": bs,
        }
        written = {
            field.name: getattr(plan, field.name) for plan in (verify, write) for field in dataclasses.fields(plan)
        }
        launch = Launch(launch_canary_plan_kernels, arguments)
        return prepared([launch], written, lambda: [PeerLaunch("launch_canary_plan_kernels", arguments)])

    def _plan_offsets(self, batch: dict[str, Any], verify: VerifyPlan, write: WritePlan, scratch: Any) -> None:
        names = ("req_pool_indices", "prefix_lens", "req_to_token", "swa_window_size", "full_to_swa_index_mapping")
        launch_plan_offsets_kernel(
            **{name: batch[name] for name in names},
            extend_seq_lens=batch["prefix_lens"],
            out_verify_offsets_scratch=scratch,
            out_write_offsets=write.write_offsets,
            out_write_seed_slot_indices=write.write_seed_slot_indices,
            out_verify_num_valid=verify.verify_num_valid,
            out_verify_enable=verify.enable,
            out_write_num_valid_reqs=write.write_num_valid_reqs,
            verify_capacity=self.work.entries,
            bs_block_size=self.work.bs,
        )


def cases() -> Iterator[Case]:
    parts: tuple[Part, ...] = ("offsets + entries", "entries")
    for work in _WORKS:
        for part in parts:
            yield _case(work, part)


def _case(work: Work, part: Part) -> Case:
    per_entry = 4 * 8 + 4 + (4 if work.has_tokens else 0) + (SECTOR if work.window else 0)
    offsets = work.bs * (6 * 8 + SECTOR) if part == "offsets + entries" else 0
    peer_us = (
        published.PLAN.get((work.bs, work.prefix)) if part == "offsets + entries" and not work.has_tokens else None
    )
    table = 4 * (work.bs + 1) * (work.prefix + 1) * (2 if work.has_tokens else 1)
    return Case(
        name=f"{part}: {work.name}",
        series=part,
        work=work.entries,
        moved_bytes=per_entry * work.entries + offsets,
        memory_bytes=2 * VerifyPlan.allocation_bytes(work.entries) + table + 8 * _LUT_LEN + 64 * work.bs,
        setup=lambda: PlanSetup(work, part),
        parameters={"part": part, **dataclasses.asdict(work), "entries": work.entries},
        is_quick=work in _QUICK,
        published={} if peer_us is None else {"device_us": peer_us},
    )
