"""Moves of records: copied, forgotten, exported and imported, at random slots of a pool.

Bytes moved an entry and buffer: the slot's, read and written (32 written for a tombstone), and the indices as int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cupy_kvcanary import (
    VerifyOrWriteContext,
    launch_canary_copy_records_kernel,
    launch_canary_export_records_kernel,
    launch_canary_forget_records_kernel,
    launch_canary_import_records_kernel,
)
from cupy_kvcanary.constants import CANARY_SLOT_BYTES

from .case import Case, Launch, Prepared, Setup, on_device, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "records of a buffer"

Use = Literal["copy", "forget", "export", "import"]

_LAUNCHERS: dict[Use, Any] = {
    "copy": launch_canary_copy_records_kernel,
    "forget": launch_canary_forget_records_kernel,
    "export": launch_canary_export_records_kernel,
    "import": launch_canary_import_records_kernel,
}
_SLOTS_PER_ENTRY = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much is moved."""

    entries: int
    num_buffers: int = 4
    slot_bytes: int = CANARY_SLOT_BYTES

    @property
    def pool_slots(self) -> int:
        return _SLOTS_PER_ENTRY * self.entries

    @property
    def records_bytes(self) -> int:
        return self.num_buffers * self.entries * self.slot_bytes

    def moved_bytes(self, use: Use) -> int:
        if use == "forget":
            return self.num_buffers * self.entries * CANARY_SLOT_BYTES + 8 * self.entries
        return 2 * self.records_bytes + (16 if use == "copy" else 8) * self.entries


_QUICK = (Work(entries=16), Work(entries=4096), Work(entries=65536))
_FULL = (
    Work(entries=16, num_buffers=1),
    Work(entries=1024),
    Work(entries=65536, slot_bytes=40),
    Work(entries=65536, slot_bytes=48),
    Work(entries=1048576),
)


class MoveSetup(Setup):
    def __init__(self, work: Work, use: Use) -> None:
        rng = np.random.default_rng(work.entries)
        self.work, self.use = work, use
        self.records = rng.integers(0, 256, (work.pool_slots, work.slot_bytes), dtype=np.uint8)
        src_slots, dst_slots = (rng.permutation(work.pool_slots - 1) + 1)[: 2 * work.entries].reshape(2, -1)
        packed = rng.integers(0, 256, (work.num_buffers, work.entries, work.slot_bytes), dtype=np.uint8)
        self.arguments: dict[str, Any] = {
            "copy": {"src_slots": src_slots, "dst_slots": dst_slots},
            "forget": {"dst_slots": dst_slots},
            "export": {"src_slots": src_slots, "out_records": packed},
            "import": {"dst_slots": dst_slots, "records": packed},
        }[use]

    def on(self, arrays: Any) -> Prepared:
        device = "cpu" if arrays is np else "cuda"
        contexts = [
            VerifyOrWriteContext.allocate(
                self.work.pool_slots, kernel_kind=kind, slot_bytes=self.work.slot_bytes, device=device
            )
            for kind in range(self.work.num_buffers)
        ]
        records = on_device(self.records, arrays)
        for context in contexts:
            context.canary_buf[...] = records
        arguments = {name: on_device(value, arrays) for name, value in self.arguments.items()}
        written = {f"canary_buf {context.kernel_kind}": context.canary_buf for context in contexts}
        written |= {"out_records": arguments["out_records"]} if self.use == "export" else {}
        return prepared([Launch(_LAUNCHERS[self.use], arguments | {"context": contexts})], written)


def cases() -> Iterator[Case]:
    for work in (*_QUICK, *_FULL):
        for use in _LAUNCHERS:
            yield _case(work, use)


def _case(work: Work, use: Use) -> Case:
    buffers = f"{work.num_buffers} buffer" + ("s" if work.num_buffers > 1 else "")
    return Case(
        name=f"{use}: {work.entries:,} records of {work.slot_bytes} bytes, {buffers}",
        series=use,
        work=work.entries,
        moved_bytes=work.moved_bytes(use),
        # What the run is compared with lies beside it.
        memory_bytes=2 * (_SLOTS_PER_ENTRY + 1) * work.records_bytes + 16 * work.entries,
        setup=lambda: MoveSetup(work, use),
        parameters={
            "use": use,
            "entries": work.entries,
            "num_buffers": work.num_buffers,
            "slot_bytes": work.slot_bytes,
        },
        is_quick=work in _QUICK,
    )
