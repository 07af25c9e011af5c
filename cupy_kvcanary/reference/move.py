"""NumPy twin of `kernels/move.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..constants import FREED_POSITION, FREED_TOKEN, StatusBit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..buffers import CanaryBufferView

    Slots = NDArray[Any]
    UInt64s = NDArray[np.uint64]

_TOMBSTONE = np.array([FREED_TOKEN, FREED_POSITION, 0, 0], np.int64).view(np.uint64)


def move(
    *,
    buffers: tuple[CanaryBufferView, ...],
    src_slots: Slots | None,
    dst_slots: Slots | None,
    records: UInt64s | None,
    out_records: UInt64s | None,
    padding_slot: int,
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel. Arguments were checked by the launcher."""
    given = [slots for slots in (src_slots, dst_slots) if slots is not None]
    is_skipped = False
    for b, buffer in enumerate(buffers):
        words = buffer.canary_buf.view(np.uint64)
        is_moved = np.all([(slots >= 0) & (slots < buffer.num_slots) for slots in given], axis=0)
        if dst_slots is not None:
            is_moved &= dst_slots != padding_slot
        is_skipped |= not is_moved.all()

        if src_slots is not None:
            moved = words[src_slots[is_moved]]
        elif records is not None:
            moved = records[b, is_moved]
        else:
            moved = _TOMBSTONE
        if dst_slots is not None:
            words[dst_slots[is_moved], : moved.shape[-1]] = moved
        elif out_records is not None:
            out_records[b] = 0
            out_records[b, is_moved] = moved
    if out_status is not None and is_skipped:
        out_status[0] |= StatusBit.MOVE_SLOT_OUT_OF_RANGE
