"""Verify of a decode batch: offsets and batch verify from the page table, batch verify alone, a plan's entries.

Bytes moved: see `batches.Work.verify_bytes`; a materialised plan adds 32 an entry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cupy_kvcanary import (
    RealKvHashMode,
    WritePlan,
    launch_canary_verify_batch_kernel,
    launch_canary_verify_kernel,
    launch_plan_offsets_kernel,
)

from . import published
from .batches import FOUR_SOURCES, WIDE_SOURCE, Work, batch_of, logs
from .case import Case, Launch, PeerLaunch, Prepared, Setup, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORK = "entries to verify"

Part = Literal["plan + verify", "verify", "verify entries"]

_DECODE = Work(bs=256, prefix=4096)

_AIMS = {
    ("plan + verify", _DECODE): 12,
    ("plan + verify", Work(bs=1, prefix=1024)): 3.5,
    ("verify", replace(_DECODE, **FOUR_SOURCES)): 50,
    ("verify", Work(bs=256, prefix=1024, **WIDE_SOURCE)): 150,
}

_QUICK = (
    Work(bs=1, prefix=1024),
    Work(bs=32, prefix=1024),
    Work(bs=256, prefix=1024),
    _DECODE,
    replace(_DECODE, chain="affine"),
    replace(_DECODE, page_size=1),
    replace(_DECODE, num_buffers=4),
    replace(_DECODE, **FOUR_SOURCES),
    Work(bs=256, prefix=1024, **WIDE_SOURCE),
)
_FULL = (
    Work(bs=1, prefix=0),
    Work(bs=256, prefix=0),
    Work(bs=1, prefix=1),
    Work(bs=1, prefix=131072),
    Work(bs=32, prefix=131072),
    Work(bs=64, prefix=65536),
    Work(bs=64, prefix=65536, chain="affine"),
    Work(bs=1024, prefix=1024),
    Work(bs=4096, prefix=256),
    Work(bs=65536, prefix=16),
    Work(bs=1048576, prefix=1, page_size=1),
    replace(_DECODE, chain="affine", page_size=1),
    replace(_DECODE, chain="affine", num_buffers=4),
    replace(_DECODE, num_buffers=4, page_size=1),
    replace(_DECODE, table="block table"),
    replace(_DECODE, table="page list"),
    Work(bs=256, prefix=8192, window=1024),
    Work(bs=32, prefix=131072, window=4096),
    replace(_DECODE, mode=RealKvHashMode.PARTIAL, **FOUR_SOURCES),
    replace(_DECODE, chain="affine", **FOUR_SOURCES),
    replace(_DECODE, num_buffers=4, **FOUR_SOURCES),
    Work(bs=256, prefix=1024, num_sources=1, bytes_per_token=128, read_bytes=128),
    Work(bs=256, prefix=1024, num_sources=1, bytes_per_token=512, read_bytes=512),
    Work(bs=256, prefix=1024, mode=RealKvHashMode.PARTIAL, **WIDE_SOURCE),
    Work(bs=256, prefix=4096, **WIDE_SOURCE),
)
_PARTS: tuple[Part, ...] = ("plan + verify", "verify", "verify entries")


class VerifySetup(Setup):
    def __init__(self, work: Work, part: Part) -> None:
        self.work, self.part = work, part
        self.batch = batch_of(work)

    def on(self, arrays: Any) -> Prepared:
        contexts = self.batch.contexts(arrays, self.work.num_buffers)
        if self.part == "verify entries":
            arguments = {"context": contexts, "plan": self.batch.entries(arrays), "check_verify_expected_token": False}
            launch = Launch(launch_canary_verify_kernel, arguments | {"chain": self.work.chain})
            return prepared([launch], logs(contexts), self._peer(arguments))
        offsets, batch = self.batch.arguments(arrays)
        batch["context"] = contexts
        launches = [Launch(launch_plan_offsets_kernel, offsets), Launch(launch_canary_verify_batch_kernel, batch)]
        if self.part == "verify":
            launch_plan_offsets_kernel(**offsets)
            return prepared(launches[1:], logs(contexts))
        if self.work.chain != "splitmix64" or self.work.table != "slots":
            return prepared(launches, logs(contexts))

        def for_peer() -> Sequence[PeerLaunch]:
            write_plan = WritePlan(
                write_offsets=offsets["out_write_offsets"],
                write_seed_slot_indices=offsets["out_write_seed_slot_indices"],
                write_num_valid_reqs=offsets["out_write_num_valid_reqs"],
            )
            plan, launch = self.batch.plan_for_peer(arrays, offsets, write_plan)
            return [launch, *verify_of_each({"context": contexts, "plan": plan, "check_verify_expected_token": False})]

        return prepared(launches, logs(contexts), for_peer)

    def _peer(self, arguments: dict[str, Any]) -> Any:
        return None if self.work.chain != "splitmix64" else lambda: verify_of_each(arguments)

    def expected(self) -> dict[str, Any]:
        return self.batch.expected_violations


def verify_of_each(arguments: dict[str, Any]) -> list[PeerLaunch]:
    """The peer's launches take one buffer."""
    return [
        PeerLaunch("launch_canary_verify_kernel", arguments | {"context": context}) for context in arguments["context"]
    ]


def cases() -> Iterator[Case]:
    for work in (*_QUICK, *_FULL):
        for part in _PARTS:
            if part != "verify entries" or work in _QUICK:
                yield _case(work, part)


def _case(work: Work, part: Part) -> Case:
    moved = work.verify_bytes
    if part == "plan + verify":
        moved += work.offsets_bytes
    elif part == "verify entries":
        moved += work.entries * (32 - 4)
    aim = _AIMS.get((part, work))
    return Case(
        name=f"{part}: {work.name}",
        series=f"{part}, {work.kind}",
        work=work.entries,
        moved_bytes=moved,
        memory_bytes=work.memory_bytes,
        setup=lambda: VerifySetup(work, part),
        parameters={"part": part, **work.parameters},
        is_quick=work in _QUICK,
        aims={} if aim is None else {"device_us": aim},
        published=_published(work, part),
    )


def _published(work: Work, part: Part) -> dict[str, float]:
    size = (work.bs, work.prefix)
    if work.num_buffers > 1 or work.page_size == 1 or work.window or work.mode == RealKvHashMode.PARTIAL:
        return {}
    plan = published.PLAN.get(size) if part == "plan + verify" else 0.0
    if work.num_sources:
        verify = published.VERIFY_REAL_KV.get((*size, work.num_sources, work.read_bytes))
    else:
        verify = published.VERIFY.get(size)
    return {} if plan is None or verify is None else {"device_us": plan + verify}
