"""Moves of records on any backend, and what they must leave, entry by entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import (
    StatusBit,
    launch_canary_copy_records_kernel,
    launch_canary_export_records_kernel,
    launch_canary_forget_records_kernel,
    launch_canary_import_records_kernel,
)
from tests.helpers.golden import FILL
from tests.helpers.guards import GuardedBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.backends import ArrayBackend
    from tests.helpers.buffers import HostBuffer

    Array = np.ndarray[Any, Any]

LAUNCHERS = {
    "copy": launch_canary_copy_records_kernel,
    "forget": launch_canary_forget_records_kernel,
    "export": launch_canary_export_records_kernel,
    "import": launch_canary_import_records_kernel,
}
USES = tuple(LAUNCHERS)
SLOTS = ("src_slots", "dst_slots")
TOMBSTONE = [2**64 - 2, 2**64 - 2, 0, 0]


def move(
    backend: ArrayBackend, use: str, buffers: Sequence[HostBuffer], arguments: dict[str, Any], **options: Any
) -> int:
    """Launch between guards; the buffers and `out_records` then hold the results. The status."""
    guarded = GuardedBackend(backend.name)
    contexts = [buffer.on_device(guarded) for buffer in buffers]
    status = guarded.array(np.zeros(1, np.int32))
    on_device = guarded.on_device(arguments)
    LAUNCHERS[use](context=contexts, **on_device, **options, out_status=status)
    guarded.check()
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(guarded, context)
        assert (buffer.ring == FILL).all()
        assert (buffer.slot_run_counter, buffer.kernel_run_counter) == (0, 0)
    if use == "export":
        arguments["out_records"][...] = guarded.to_numpy(on_device["out_records"])
    return int(guarded.to_numpy(status)[0])


def exported(backend: ArrayBackend, buffers: Sequence[HostBuffer], slots: list[int]) -> Array:
    """The records of slots that all buffers have."""
    records = np.full((len(buffers), len(slots), buffers[0].canary_buf.shape[1]), 0x5A, np.uint8)
    assert move(backend, "export", buffers, {"src_slots": np.array(slots), "out_records": records}) == 0
    return records


def assert_moved(
    backend: ArrayBackend,
    use: str,
    buffers: Sequence[HostBuffer],
    arguments: dict[str, Any],
    padding_slot: int | None = 0,
) -> None:
    """The launch leaves buffers, packed records and status as the contract says, one entry after another."""
    src_slots, dst_slots = (arguments[name].tolist() if name in arguments else None for name in SLOTS)
    expected = [buffer.canary_buf.copy() for buffer in buffers]
    packed = arguments.get("out_records", np.zeros(0)).copy()
    status = 0
    for b, slots in enumerate(expected):
        for i in range(len(src_slots or dst_slots or ())):
            src = None if src_slots is None else src_slots[i]
            dst = None if dst_slots is None else dst_slots[i]
            has_src, has_dst = (slot is None or 0 <= slot < len(slots) for slot in (src, dst))
            if not has_src or not has_dst or (dst is not None and dst == padding_slot):
                status = StatusBit.MOVE_SLOT_OUT_OF_RANGE
                if dst is None:
                    packed[b, i] = 0
            elif dst is None:
                packed[b, i] = slots[src]
            elif src is not None:
                slots[dst] = slots[src]
            elif use == "import":
                slots[dst] = arguments["records"][b, i]
            else:
                slots[dst, :32] = np.array(TOMBSTONE, np.uint64).view(np.uint8)
    options = {} if use == "export" else {"padding_slot": padding_slot}
    assert move(backend, use, buffers, arguments, **options) == status
    for buffer, slots in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.canary_buf, slots)
    if use == "export":
        np.testing.assert_array_equal(arguments["out_records"], packed)
