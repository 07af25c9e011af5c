"""Canary buffers: records of slots, where their violations go, the real KV they are checked against, their chain."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from .arrays import ArrayView, as_device, view_array, view_arrays
from .catalogue import error
from .checks import (
    INT32,
    INT64,
    UINT8,
    check_aligned,
    check_at_most,
    check_contiguous,
    check_dtype,
    check_fits_int32,
    check_int,
    check_length,
    check_multiple,
    check_no_overlap,
    check_non_negative,
    check_one_device,
    check_positive,
    check_rank,
    check_writable,
)
from .constants import (
    CANARY_SLOT_BYTES,
    MAX_BUFFERS,
    MAX_REAL_KV_SOURCES,
    REAL_KV_ALIGNMENT,
    VIOLATION_DETAIL_FIELDS,
    VIOLATION_FIELDS,
    WIDE_KV_BYTES,
    RealKvHashMode,
)
from .launch import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

Chain = Literal["splitmix64", "affine"]
CHAINS: tuple[Chain, ...] = get_args(Chain)
"""Kinds of chain: `splitmix64` is byte-compatible with the peer, `affine` is written by a parallel scan."""

_WRITTEN = (
    "canary_buf",
    "violation_ring",
    "violation_details",
    "violation_write_index",
    "slot_run_counter",
    "kernel_run_counter",
    "skip_counters",
)
WRITTEN_BY_LAUNCHES = frozenset(_WRITTEN)
"""Fields of a context that launches write in place."""


@dataclass(frozen=True, kw_only=True)
class RealKvSource:
    """KV bytes of slots: those of slot s start in row s // page_size at byte (s % page_size) * num_bytes_per_token.

    All checks run when it is built. The tensor is kept alive and seen in place, as bytes.
    """

    tensor: Any
    """Any dtype [rows, ...]: each row contiguous, rows any distance apart, such as one layer of a larger buffer."""
    page_size: int
    """Tokens of a row."""
    num_bytes_per_token: int
    read_bytes: int
    """Bytes of a token that are hashed in mode ALL, from its first."""
    rows: ArrayView = field(init=False, repr=False, compare=False)
    """The tensor as uint8 [rows, row_bytes]."""

    def __post_init__(self) -> None:
        sizes = {
            name: check_int(name, getattr(self, name)) for name in ("page_size", "num_bytes_per_token", "read_bytes")
        }
        for name, size in sizes.items():
            check_positive(name, size)
            if name != "page_size":
                check_multiple(name, size, REAL_KV_ALIGNMENT)
        check_at_most("read_bytes", self.read_bytes, self.num_bytes_per_token)
        rows = _as_byte_rows(view_array("tensor", self.tensor))
        check_multiple("row stride of tensor in bytes", rows.strides[0], REAL_KV_ALIGNMENT)
        check_aligned("tensor", rows, REAL_KV_ALIGNMENT)
        needed = self.page_size * self.num_bytes_per_token
        if rows.shape[1] < needed:
            raise error("kv-canary-row-must-hold-a-page", name="tensor", needed=needed, got=rows.shape[1])
        object.__setattr__(self, "rows", rows)


def _size(name: str, value: Any) -> int:
    size = check_int(name, value)
    check_non_negative(name, size)
    return size


def _as_byte_rows(view: ArrayView) -> ArrayView:
    """An array of any dtype and rank as uint8 [rows, row_bytes]."""
    if len(view.shape) < 2:
        raise error("kv-canary-must-have-rows", name="tensor", got=view.shape)
    row_bytes = view.itemsize
    for extent, stride in zip(reversed(view.shape[1:]), reversed(view.strides[1:]), strict=True):
        if extent != 1 and stride != row_bytes:
            raise error("kv-canary-must-have-contiguous-rows", name="tensor", got=view.strides)
        row_bytes *= extent
    num_rows = view.shape[0]
    row_stride = view.strides[0] if num_rows > 1 else row_bytes
    if num_rows > 1:
        check_positive("row stride of tensor in bytes", row_stride)
    return ArrayView(
        view.pointer,
        (num_rows, row_bytes),
        (row_stride, 1),
        "uint8",
        1,
        view.device,
        view.read_only,
        view.owner,
        view.capsule,
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOrWriteContext:
    """One canary buffer for the write and verify launchers. All checks run when it is built."""

    canary_buf: Any
    """uint8[num_slots, stride], written by writes: a record of four int64 at the start of each slot. The stride is a
    multiple of 8, at least 32."""
    kernel_kind: int
    """What the violation rows name, a `CanaryLaunchTag`."""
    violation_ring: Any
    """int64[ring_capacity, 8], written in place."""
    violation_write_index: Any
    """int32[1], written in place: violations so far, up to 2^31 - 1."""
    slot_run_counter: Any
    """int64[1], written in place: entries seen (verify) or stored (write) so far."""
    kernel_run_counter: Any
    """int64[1], written in place: launches so far."""
    real_kv_sources: tuple[RealKvSource, ...] = ()
    """At most 4."""
    real_kv_hash_mode: int = RealKvHashMode.NONE
    """`RealKvHashMode`."""
    enable_chain_position_assert: Any | None = None
    """int32[1]: nonzero for the chain position check of writes; None: off."""
    violation_details: Any | None = None
    """int64[ring_capacity, 13], written in place with the row of the ring that has the same index; None: not kept.

    0 request of the batch, 1 its row of the page table, 2 expected position, 3 slot of the predecessor, 4 to 6 token,
    position and prev_hash of its record, 7 slot of the request's next position, 8 to 10 token, position, prev_hash of
    its record, 11 stored real-KV hash, 12 real-KV hash of the bytes now. Requests, rows and slots that are unknown are
    -1, all else that was not read is 0. Verify knows 0, 1 and 7 to 10 in batches only, write knows only 0, 2 and 3."""
    skip_counters: Any | None = None
    """int64[2], written in place: entries so far that verify did not check in full, because they or their predecessors
    are in the padding slot; verify launches so far that were disabled. None: not counted."""
    view: CanaryBufferView = field(init=False, repr=False, compare=False)
    """What the launchers use: the checked arrays, seen in place."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "view", _view_context(self))

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        *,
        kernel_kind: int,
        slot_bytes: int = CANARY_SLOT_BYTES,
        ring_capacity: int = 1024,
        device: Any = "cpu",
        real_kv_sources: tuple[RealKvSource, ...] = (),
        real_kv_hash_mode: int = RealKvHashMode.NONE,
    ) -> VerifyOrWriteContext:
        """A context with no records yet, of NumPy arrays (`"cpu"`) or CuPy arrays (`"cuda"`, a device object)."""
        place = as_device(device)

        def zeros(shape: Any, dtype: str) -> Any:
            return BACKENDS[place.type].allocate_zeros(shape, dtype, place, None)

        return cls(
            canary_buf=zeros((_size("num_slots", num_slots), _size("slot_bytes", slot_bytes)), "uint8"),
            kernel_kind=kernel_kind,
            violation_ring=zeros((_size("ring_capacity", ring_capacity), VIOLATION_FIELDS), "int64"),
            violation_write_index=zeros(1, "int32"),
            slot_run_counter=zeros(1, "int64"),
            kernel_run_counter=zeros(1, "int64"),
            real_kv_sources=real_kv_sources,
            real_kv_hash_mode=real_kv_hash_mode,
        )

    @staticmethod
    def allocation_bytes(num_slots: int, *, slot_bytes: int = CANARY_SLOT_BYTES, ring_capacity: int = 1024) -> int:
        """Bytes of the arrays that `allocate` makes."""
        records = _size("num_slots", num_slots) * _size("slot_bytes", slot_bytes)
        return records + 8 * VIOLATION_FIELDS * _size("ring_capacity", ring_capacity) + 4 + 2 * 8


@dataclass(frozen=True, kw_only=True)
class RealKvSourceView:
    """`RealKvSource` of kernels/common.cuh. The tensor is a view, or a NumPy array."""

    tensor: Any
    """uint8 [rows, row_bytes]."""
    row_stride: int
    page_size: int
    num_bytes_per_token: int
    num_hashed_bytes: int


@dataclass(frozen=True, kw_only=True)
class CanaryBufferView:
    """`CanaryBuffer` of kernels/common.cuh. Arrays are views, or NumPy arrays."""

    canary_buf: Any
    num_slots: int
    slot_stride: int
    kernel_kind: int
    violation_ring: Any
    violation_details: Any | None
    ring_capacity: int
    violation_write_index: Any
    slot_run_counter: Any
    kernel_run_counter: Any
    skip_counters: Any | None
    enable_chain_position_assert: Any | None
    real_kv_sources: tuple[RealKvSourceView, ...]

    @property
    def hashes_wide_kv(self) -> bool:
        """Whether a slot has so many KV bytes in a source that a warp does better to load its slots' together."""
        return any(source.num_hashed_bytes >= WIDE_KV_BYTES for source in self.real_kv_sources)


_REAL_KV_SOURCE_ARGS = np.dtype(
    [
        ("tensor", np.uint64),
        ("row_stride", np.int64),
        ("page_size", np.int64),
        ("num_bytes_per_token", np.int64),
        ("num_hashed_bytes", np.int64),
    ],
    align=True,
)

CANARY_BUFFER_ARGS = np.dtype(
    [
        ("canary_buf", np.uint64),
        ("num_slots", np.int64),
        ("slot_stride", np.int64),
        ("kernel_kind", np.int64),
        ("violation_ring", np.uint64),
        ("violation_details", np.uint64),
        ("ring_capacity", np.int64),
        ("violation_write_index", np.uint64),
        ("slot_run_counter", np.uint64),
        ("kernel_run_counter", np.uint64),
        ("skip_counters", np.uint64),
        ("enable_chain_position_assert", np.uint64),
        ("num_real_kv_sources", np.int64),
        *((f"real_kv_sources_{i}", _REAL_KV_SOURCE_ARGS) for i in range(MAX_REAL_KV_SOURCES)),
    ],
    align=True,
)
"""Twin of `CanaryBuffer` in kernels/common.cuh; an array there is numbered fields here."""

BUFFERS_ARGS = [(f"buffers_{i}", CANARY_BUFFER_ARGS) for i in range(MAX_BUFFERS)]
"""Fields of `CanaryBuffer buffers[kMaxBuffers]` for an argument struct."""

_NO_SOURCE = (0, 0, 1, 0, 0)
_NO_BUFFER = (*(0,) * 13, *(_NO_SOURCE,) * MAX_REAL_KV_SOURCES)


def buffers_args(buffers: Sequence[CanaryBufferView]) -> tuple[Any, ...]:
    """Values of `BUFFERS_ARGS`."""
    return (*map(_buffer_args, buffers), *(_NO_BUFFER,) * (MAX_BUFFERS - len(buffers)))


def _buffer_args(buffer: CanaryBufferView) -> tuple[Any, ...]:
    details, skips = buffer.violation_details, buffer.skip_counters
    assertion = buffer.enable_chain_position_assert
    sources = [
        (
            source.tensor.pointer,
            source.row_stride,
            source.page_size,
            source.num_bytes_per_token,
            source.num_hashed_bytes,
        )
        for source in buffer.real_kv_sources
    ]
    return (
        buffer.canary_buf.pointer,
        buffer.num_slots,
        buffer.slot_stride,
        buffer.kernel_kind,
        buffer.violation_ring.pointer,
        0 if details is None else details.pointer,
        buffer.ring_capacity,
        buffer.violation_write_index.pointer,
        buffer.slot_run_counter.pointer,
        buffer.kernel_run_counter.pointer,
        0 if skips is None else skips.pointer,
        0 if assertion is None else assertion.pointer,
        len(sources),
        *sources,
        *(_NO_SOURCE,) * (MAX_REAL_KV_SOURCES - len(sources)),
    )


def _view_context(context: VerifyOrWriteContext) -> CanaryBufferView:
    dtypes = {
        "canary_buf": UINT8,
        "violation_ring": INT64,
        "violation_details": INT64,
        "violation_write_index": INT32,
        "slot_run_counter": INT64,
        "kernel_run_counter": INT64,
        "skip_counters": INT64,
        "enable_chain_position_assert": INT32,
    }
    optional = ("violation_details", "skip_counters", "enable_chain_position_assert")
    views = view_arrays({name: getattr(context, name) for name in dtypes}, optional)
    for name, view in views.items():
        check_contiguous(name, view)
        check_dtype(name, view, dtypes[name])
        if name in ("canary_buf", "violation_ring", "violation_details"):
            check_rank(name, view, 2)
        else:
            check_rank(name, view, 1)
            check_length(name, view.size, 2 if name == "skip_counters" else 1)
        if name in WRITTEN_BY_LAUNCHES:
            check_writable(name, view)
    records, ring = views["canary_buf"], views["violation_ring"]
    num_slots, slot_stride = records.shape
    if slot_stride < CANARY_SLOT_BYTES:
        raise error(
            "kv-canary-length-must-be-at-least", name="slot of canary_buf", least=CANARY_SLOT_BYTES, got=slot_stride
        )
    check_multiple("slot stride of canary_buf in bytes", slot_stride, 8)
    check_fits_int32("slot stride of canary_buf in bytes", slot_stride)
    check_aligned("canary_buf", records, 8)
    # The kernels divide slots in 32 bits.
    check_at_most("slots of canary_buf", num_slots, 2**32 - 1)
    check_length("row of violation_ring", ring.shape[1], VIOLATION_FIELDS)
    details = views.get("violation_details")
    if details is not None:
        check_length("violation_details", details.shape[0], ring.shape[0])
        check_length("row of violation_details", details.shape[1], VIOLATION_DETAIL_FIELDS)
    given = context.real_kv_sources
    if not isinstance(given, Sequence) or not all(isinstance(source, RealKvSource) for source in given):
        raise error("kv-canary-must-be-real-kv-sources", name="real_kv_sources", got=type(given).__name__)
    sources = tuple(given)
    if len(sources) > MAX_REAL_KV_SOURCES:
        raise error("kv-canary-at-most-4-real-kv-sources", name="real_kv_sources", got=len(sources))
    mode = check_int("real_kv_hash_mode", context.real_kv_hash_mode)
    if mode not in list(RealKvHashMode):
        raise error("kv-canary-real-kv-hash-mode-must-be-known", name="real_kv_hash_mode", got=mode)
    for i, source in enumerate(sources):
        covered = source.rows.shape[0] * source.page_size
        check_one_device({"canary_buf": records, f"real_kv_sources[{i}]": source.rows})
        if covered < num_slots:
            raise error(
                "kv-canary-source-must-cover-the-slots", name=f"real_kv_sources[{i}]", num_slots=num_slots, got=covered
            )
    kernel_kind = check_int("kernel_kind", context.kernel_kind)
    check_non_negative("kernel_kind", kernel_kind)
    check_at_most("kernel_kind", kernel_kind, 2**63 - 1)
    check_one_device(views)
    read = {f"real_kv_sources[{i}]": source.rows for i, source in enumerate(sources)}
    check_no_overlap(views | read, [name for name in _WRITTEN if name in views])
    return CanaryBufferView(
        canary_buf=records,
        num_slots=num_slots,
        slot_stride=slot_stride,
        kernel_kind=kernel_kind,
        violation_ring=ring,
        violation_details=details,
        ring_capacity=ring.shape[0],
        violation_write_index=views["violation_write_index"],
        slot_run_counter=views["slot_run_counter"],
        kernel_run_counter=views["kernel_run_counter"],
        skip_counters=views.get("skip_counters"),
        enable_chain_position_assert=views.get("enable_chain_position_assert"),
        real_kv_sources=tuple(
            RealKvSourceView(
                tensor=source.rows,
                row_stride=source.rows.strides[0],
                page_size=source.page_size,
                num_bytes_per_token=source.num_bytes_per_token,
                num_hashed_bytes=REAL_KV_ALIGNMENT if mode == RealKvHashMode.PARTIAL else source.read_bytes,
            )
            for source in sources
            if mode != RealKvHashMode.NONE
        ),
    )


def view_buffers(context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext]) -> tuple[CanaryBufferView, ...]:
    """The buffers of one launch: those of one context or of several on one device."""
    contexts = tuple(context) if isinstance(context, Sequence) else (context,)
    for item in contexts:
        if not isinstance(item, VerifyOrWriteContext):
            raise error("kv-canary-must-be-a-context", name="context", got=type(item).__name__)
    if not 1 <= len(contexts) <= MAX_BUFFERS:
        raise error("kv-canary-must-be-1-to-12-contexts", name="context", most=MAX_BUFFERS, got=len(contexts))
    buffers = tuple(item.view for item in contexts)
    check_one_device({f"canary_buf of context {i}": buffer.canary_buf for i, buffer in enumerate(buffers)})
    return buffers


def check_memory(buffers: Sequence[CanaryBufferView], views: Mapping[str, ArrayView], outputs: Sequence[str]) -> None:
    """All on the buffers' device; nothing that is written overlaps anything, but buffers may share logs and counters.

    `outputs` are those of the views that are written.
    """
    check_one_device({"canary_buf": buffers[0].canary_buf, **views})
    for name in outputs:
        check_writable(name, views[name])
    read: dict[str, ArrayView] = {}
    written: dict[str, ArrayView] = {}
    shared: set[tuple[str, int]] = set()
    for i, buffer in enumerate(buffers):
        read |= {f"real_kv_sources[{j}] of context {i}": kv.tensor for j, kv in enumerate(buffer.real_kv_sources)}
        if buffer.enable_chain_position_assert is not None:
            read[f"enable_chain_position_assert of context {i}"] = buffer.enable_chain_position_assert
        for name in _WRITTEN:
            view = getattr(buffer, name)
            if view is None:
                continue
            if name == "canary_buf" or (name, view.pointer) not in shared:
                written[f"{name} of context {i}" if i else name] = view
                shared.add((name, view.pointer))
    check_no_overlap({**views, **read, **written}, [*outputs, *written])


# Chain kind of each buffer that was written, by its address; gone with the array that it was written through.
_chains: dict[tuple[str, int, int], Chain] = {}
_chains_changes = itertools.count(1)
_chains_generation = 0


def chains_generation() -> int:
    """A number that is another one after any buffer's chain was remembered or forgotten."""
    return _chains_generation


def _forget(key: tuple[str, int, int]) -> None:
    global _chains_generation
    if _chains.pop(key, None) is not None:
        _chains_generation = next(_chains_changes)


def check_chain(name: str, chain: Any) -> None:
    """One of CHAINS."""
    if chain not in CHAINS:
        raise error("kv-canary-chain-must-be-known", name=name, got=repr(chain))


def check_chain_of(buffers: Sequence[CanaryBufferView], chain: Chain) -> None:
    """No buffer was written with the other kind of chain."""
    for buffer in buffers:
        written = _chains.get(_chain_key(buffer.canary_buf), chain)
        if written != chain:
            raise error(
                "kv-canary-chain-must-be-that-of-the-buffer", name="chain", expected=repr(written), got=repr(chain)
            )


def remember_chain(buffers: Sequence[CanaryBufferView], chain: Chain) -> None:
    """The buffers now hold records of this chain."""
    global _chains_generation
    for buffer in buffers:
        key = _chain_key(buffer.canary_buf)
        if key not in _chains:
            # An owner without weak references cannot tell when it is gone: then nothing is remembered.
            with contextlib.suppress(TypeError):
                weakref.finalize(buffer.canary_buf.owner, _forget, key)
                _chains[key] = chain
                _chains_generation = next(_chains_changes)


def forget_chain(canary_buf: Any) -> None:
    """Let a buffer be written with another kind of chain, after its records were cleared."""
    _forget(_chain_key(view_array("canary_buf", canary_buf)))


def _chain_key(view: ArrayView) -> tuple[str, int, int]:
    return view.device.type, view.device.index, view.pointer
