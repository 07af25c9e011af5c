"""Move: records of slots, where KV moves: to other slots, out of a pool and into one, or given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import ArrayView, view_arrays
from ..buffers import (
    BUFFERS_ARGS,
    CanaryBufferView,
    Chain,
    VerifyOrWriteContext,
    buffers_args,
    check_chain,
    check_chain_of,
    check_memory,
    remember_chain,
    view_buffers,
)
from ..checks import (
    INT32,
    INT32_OR_INT64,
    UINT8,
    check_aligned,
    check_contiguous,
    check_dtype,
    check_fits_int32,
    check_length,
    check_padding_slot,
    check_rank,
)
from ..constants import MAX_BUFFERS, MOVE_THREADS
from ..launch import Call, Launch, Operation, ceil_div
from ..launcher import Launcher
from ..page_tables import index_array_args
from ..reference.move import move as reference

if TYPE_CHECKING:
    from collections.abc import Sequence

MOVE_ARGS = np.dtype(
    [
        ("src_slots", np.uint64),
        ("src_slots_is_int64", np.int64),
        ("dst_slots", np.uint64),
        ("dst_slots_is_int64", np.int64),
        ("records", np.uint64),
        ("out_records", np.uint64),
        ("out_status", np.uint64),
        ("num_entries", np.int64),
        ("entries_per_block", np.int64),
        ("padding_slot", np.int64),
        ("num_buffers", np.int64),
        *BUFFERS_ARGS,
    ],
    align=True,
)
"""Twin of `MoveArgs` in kernels/move.cu."""


@Launcher
def launch_canary_copy_records_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    src_slots: Any,
    dst_slots: Any,
    padding_slot: int | None = 0,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Copy records to the slots that their KV was copied to, in each context's buffer; one launch (`kvc_move`).

    For each entry i::

        bytes of slot dst_slots[i] = bytes of slot src_slots[i]

    Parameters
    ----------
    context : up to 12 contexts on one device; records are written in place, rings and counters are left alone.
    src_slots, dst_slots : int32 or int64 [n], device, read. The order of entries is free: no slot is to be a source and
        a destination (records that change places are exported and imported), and where one is the destination of
        several entries, each 16 bytes of it are those of any of them.
    padding_slot : slot of dummy writes, which is never a destination; None where every slot is real.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s: MOVE_SLOT_OUT_OF_RANGE where an entry was left out
        of a buffer, since one of its slots is not one of the buffer, or its destination is the padding slot.
    stream : as in `launch_plan_offsets_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    All bytes of a slot are moved, so that the hash of its real KV stays with the record. CPU arrays run on NumPy.
    Allocates nothing; may be captured once compiled. Moves a slot's bytes twice an entry and buffer, and its indices.

    """
    arrays = {"src_slots": src_slots, "dst_slots": dst_slots, "out_status": out_status}
    return _checked_call(MOVE, view_buffers(context), arrays, padding_slot, stream)


@Launcher
def launch_canary_forget_records_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    dst_slots: Any,
    padding_slot: int | None = 0,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Leave tombstones in slots that were freed, in each context's buffer; one launch (`kvc_move`).

    Whoever reads a freed slot, or goes on from it, is then reported. For each entry i::

        record at dst_slots[i] = -2, -2, 0, 0  (FREED_TOKEN, FREED_POSITION, hashes)

    Parameters
    ----------
    context : as in `launch_canary_copy_records_kernel`.
    dst_slots : int32 or int64 [n], device, read. The rest of a slot's bytes stays untouched.
    padding_slot, out_status, stream : as in `launch_canary_copy_records_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    As in `launch_canary_copy_records_kernel`; writes 32 bytes an entry and buffer.

    """
    arrays = {"dst_slots": dst_slots, "out_status": out_status}
    return _checked_call(MOVE, view_buffers(context), arrays, padding_slot, stream)


@Launcher
def launch_canary_export_records_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    src_slots: Any,
    out_records: Any,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Pack records of each context's buffer, to go where their KV goes: a host, another pool; one launch (`kvc_move`).

    For each buffer b, in the order of the contexts, and entry i::

        out_records[b, i] = bytes of slot src_slots[i], or zeros where that is not a slot of the buffer

    Parameters
    ----------
    context : up to 12 contexts on one device, with slots of the same number of bytes; all of them is only read.
    src_slots : int32 or int64 [n], device, read. A slot may occur several times.
    out_records : uint8[num_buffers, n, slot_bytes], device, written in place, at a multiple of 8 bytes.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s: MOVE_SLOT_OUT_OF_RANGE where zeros were packed.
    stream : as in `launch_plan_offsets_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    As in `launch_canary_copy_records_kernel`. A record of zeros was never stamped: imported, it is reported.

    """
    arrays = {"src_slots": src_slots, "out_records": out_records, "out_status": out_status}
    return _checked_call(EXPORT, view_buffers(context), arrays, None, stream)


@Launcher
def launch_canary_import_records_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    dst_slots: Any,
    records: Any,
    padding_slot: int | None = 0,
    chain: Chain = "splitmix64",
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Unpack records that were exported into slots of each context's buffer; one launch (`kvc_move`).

    For each buffer b, in the order of the contexts, and entry i::

        bytes of slot dst_slots[i] = records[b, i]

    Parameters
    ----------
    context : as in `launch_canary_copy_records_kernel`, with slots of the same number of bytes.
    dst_slots : int32 or int64 [n], device, read. Each 16 bytes of a slot that occurs several times are those of any of
        its entries.
    records : uint8[num_buffers, n, slot_bytes], device, read, at a multiple of 8 bytes: as they were exported.
    padding_slot, out_status, stream : as in `launch_canary_copy_records_kernel`.
    chain : kind of chain of the records; every write, import and verify of a buffer takes the same.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    As in `launch_canary_copy_records_kernel`.

    """
    check_chain("chain", chain)
    buffers = view_buffers(context)
    check_chain_of(buffers, chain)
    arrays = {"dst_slots": dst_slots, "records": records, "out_status": out_status}
    call = _checked_call(MOVE, buffers, arrays, padding_slot, stream)
    remember_chain(buffers, chain)
    return call


_SLOTS = ("src_slots", "dst_slots")
_RECORDS = ("records", "out_records")


def _checked_call(
    operation: Operation,
    buffers: tuple[CanaryBufferView, ...],
    arrays: dict[str, Any],
    padding_slot: int | None,
    stream: Any,
) -> Call:
    """The call with arrays by the operation's names; those that it does not get are None."""
    views = view_arrays(arrays, optional=("out_status",))
    for name, view in views.items():
        check_rank(name, view, 3 if name in _RECORDS else 1)
        check_contiguous(name, view)
        check_dtype(name, view, INT32_OR_INT64 if name in _SLOTS else UINT8 if name in _RECORDS else INT32)
    num_entries = {name: views[name].size for name in _SLOTS if name in views}
    first, n = next(iter(num_entries.items()))
    # The kernel has up to a block for each entry in each buffer.
    check_fits_int32(f"length of {first} times {MAX_BUFFERS}", n * MAX_BUFFERS)
    for name, length in num_entries.items():
        check_length(name, length, n)
    for i, buffer in enumerate(buffers):
        check_fits_int32(f"slot stride of canary_buf of context {i} in bytes", buffer.slot_stride)
    for name in _RECORDS:
        if name in views:
            views[name] = _view_words(name, views[name], buffers, n)
    if "out_status" in views:
        check_length("out_status", views["out_status"].size, 1)
    slot = check_padding_slot(padding_slot)
    check_memory(buffers, views, [name for name in views if name in operation.outputs])
    absent = dict.fromkeys((*_SLOTS, *_RECORDS, "out_status"))
    return Call(operation, {"buffers": buffers, **absent, **views, "padding_slot": slot}, stream)


def _view_words(name: str, view: ArrayView, buffers: tuple[CanaryBufferView, ...], n: int) -> ArrayView:
    """Packed records in words of 8 bytes; all buffers have slots as long as theirs."""
    slot_bytes = buffers[0].slot_stride
    for i, buffer in enumerate(buffers):
        check_length(f"slot of canary_buf of context {i}", buffer.slot_stride, slot_bytes)
    num_buffers, num_records, record_bytes = view.shape
    check_length(name, num_buffers, len(buffers))
    check_length(f"{name}[0]", num_records, n)
    check_length(f"{name}[0, 0]", record_bytes, slot_bytes)
    check_aligned(name, view, 8)
    shape = num_buffers, n, slot_bytes // 8
    return view._replace(shape=shape, strides=(n * slot_bytes, slot_bytes, 8), dtype="uint64", itemsize=8)


def _launches(
    *,
    buffers: tuple[CanaryBufferView, ...],
    src_slots: ArrayView | None,
    dst_slots: ArrayView | None,
    records: ArrayView | None,
    out_records: ArrayView | None,
    padding_slot: int,
    out_status: ArrayView | None,
) -> list[Launch]:
    n = next(slots.size for slots in (src_slots, dst_slots) if slots is not None)
    if n == 0:
        return []
    # A thread for 16 bytes; a slot that has more of them than a block has threads takes a block alone.
    entries_per_block = max(1, MOVE_THREADS // ceil_div(max(buffer.slot_stride for buffer in buffers), 16))
    args = np.array(
        (
            *index_array_args(src_slots),
            *index_array_args(dst_slots),
            0 if records is None else records.pointer,
            0 if out_records is None else out_records.pointer,
            0 if out_status is None else out_status.pointer,
            n,
            entries_per_block,
            padding_slot,
            len(buffers),
            *buffers_args(buffers),
        ),
        MOVE_ARGS,
    )
    return [Launch("move", "kvc_move", ceil_div(n, entries_per_block) * len(buffers), MOVE_THREADS, args)]


MOVE = Operation(reference, _launches, frozenset(("canary_buf", "out_status")))
"""Into slots: copy, forget and import."""

EXPORT = Operation(reference, _launches, frozenset(("out_records", "out_status")))
"""Out of slots."""
