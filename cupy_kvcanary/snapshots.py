"""Brings a canary's log to the host without stalling: copies on a side stream, looked at when they are done."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .compile import import_cupy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from .arrays import Device


class Snapshots(Protocol):
    """Copies of an array of int64 whose first 4 bytes count the rows that a ring in it has taken."""

    def start(self, stream: Any, *, resets_counter: bool) -> None:
        """Begin a copy of what the stream's work so far leaves; afterwards, the counter may be set to 0."""

    def join(self, stream: Any) -> None:
        """What the stream is given next waits for the copy that was started."""

    @property
    def is_in_flight(self) -> bool:
        """Whether a copy was started and not taken."""

    def take(self, *, waits: bool = False) -> NDArray[np.int64] | None:
        """The copy, once, if it is done; `waits` until it is."""


class HostSnapshots:
    """Of an array in host memory."""

    def __init__(self, log: NDArray[np.int64]) -> None:
        self._log = log
        self._copy: NDArray[np.int64] | None = None

    def start(self, stream: Any, *, resets_counter: bool) -> None:
        """See `Snapshots.start`."""
        self._copy = self._log.copy()
        if resets_counter:
            self._log.view(np.int32)[0] = 0

    def join(self, stream: Any) -> None:
        """See `Snapshots.join`; the copy is done."""

    @property
    def is_in_flight(self) -> bool:
        """See `Snapshots.is_in_flight`."""
        return self._copy is not None

    def take(self, *, waits: bool = False) -> NDArray[np.int64] | None:
        """See `Snapshots.take`."""
        taken, self._copy = self._copy, None
        return taken


_DEVICE_TO_HOST = 2


class CudaSnapshots:
    """Of an array in CUDA memory: copied to page-locked memory on a stream of its own, beside the engine's work."""

    def __init__(self, log: Any, device: Device) -> None:
        cupy = import_cupy()
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._device = device.index
        self._log = log
        with cupy.cuda.Device(device.index):
            self._memory = cupy.cuda.alloc_pinned_memory(log.nbytes)
            self._side = cupy.cuda.Stream(non_blocking=True)
            self._begun = cupy.cuda.Event(disable_timing=True)
            self._done = cupy.cuda.Event(disable_timing=True)
        self._host = np.frombuffer(self._memory, np.int64, log.size)
        self._is_in_flight = False

    def start(self, stream: Any, *, resets_counter: bool) -> None:
        """See `Snapshots.start`."""
        runtime, side, pointer = self._runtime, self._side.ptr, self._log.data.ptr
        with self._on_device():
            runtime.eventRecord(self._begun.ptr, stream)
            runtime.streamWaitEvent(side, self._begun.ptr)
            runtime.memcpyAsync(self._host.ctypes.data, pointer, self._log.nbytes, _DEVICE_TO_HOST, side)
            if resets_counter:
                runtime.memsetAsync(pointer, 0, 4, side)
            runtime.eventRecord(self._done.ptr, side)
        self._is_in_flight = True

    def join(self, stream: Any) -> None:
        """See `Snapshots.join`."""
        with self._on_device():
            self._runtime.streamWaitEvent(stream, self._done.ptr)

    @property
    def is_in_flight(self) -> bool:
        """See `Snapshots.is_in_flight`."""
        return self._is_in_flight

    def take(self, *, waits: bool = False) -> NDArray[np.int64] | None:
        """See `Snapshots.take`."""
        if not self._is_in_flight:
            return None
        if waits:
            self._done.synchronize()
        elif not self._done.done:
            return None
        self._is_in_flight = False
        return self._host.copy()

    def _on_device(self) -> AbstractContextManager[Any]:
        if self._runtime.getDevice() == self._device:
            return contextlib.nullcontext()
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(self._device)
        return device
