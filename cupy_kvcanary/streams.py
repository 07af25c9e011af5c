"""Streams: which one a launch goes on, and how it is ordered with the others that its arrays are used on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .catalogue import error
from .libraries import is_torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .arrays import ArrayView

LEGACY_STREAM = 1
"""The default stream, as DLPack and `__cuda_array_interface__` write it. To the driver it is also 0."""


def stream_handle(stream: Any) -> int:
    """The CUDA handle of an int, or of a CuPy, torch or `__cuda_stream__` stream."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    raise error("kv-canary-stream-must-be-a-stream", name="stream", got=type(stream).__name__)


def as_cupy_stream(cupy: Any, handle: int) -> Any:
    """A CuPy stream that does not own its handle."""
    return cupy.cuda.Stream.from_external(_RawStream(handle))


@dataclass(frozen=True, slots=True)
class _RawStream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def is_capturing(cupy: Any, handle: int) -> bool:
    """Whether a graph is being captured on a stream."""
    # The legacy stream is never captured, and may not even be asked while another one is.
    return handle > LEGACY_STREAM and bool(cupy.cuda.runtime.streamIsCapturing(handle))


_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """For what allocates or frees: it neither fails for a graph that some thread captures, nor breaks that capture."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@functools.cache
def _driver() -> ctypes.CDLL:
    """CuPy does not have the call."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def wait_for(cupy: Any, *, waiting: Collection[int], waited_for: Collection[int]) -> None:
    """Order what streams are given next after what other streams were given so far."""
    for other in waited_for if waiting else ():
        event = as_cupy_stream(cupy, other).record()
        for handle in waiting:
            as_cupy_stream(cupy, handle).wait_event(event)


def dlpack_stream(device_index: int) -> int:
    """What a DLPack producer on CUDA is asked to order its work before: CuPy's current stream."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return LEGACY_STREAM
    try:
        handle = int(cupy.cuda.get_current_stream(device_index).ptr)
    except cupy.cuda.runtime.CUDARuntimeError:  # no such device, which the launch will say
        return LEGACY_STREAM
    # Waiting for a stream that is not captured would break a capture; -1 asks for no ordering.
    return -1 if is_capturing(cupy, handle) else handle or LEGACY_STREAM


class CallersStreams:
    """The streams that the arrays of a call are used on. The arrays' device must be current when it is asked."""

    def __init__(self, cupy: Any, views: list[ArrayView]) -> None:
        self._cupy = cupy
        self._device = views[0].device.index
        self._producers = {view.stream for view in views if view.stream is not None}
        self._is_torch = any(is_torch(view.owner) for view in views)
        self.are_several = bool(self._producers) or (self._is_torch and not all(is_torch(view.owner) for view in views))
        """torch's arrays among others, or arrays that name a stream of their own."""

    def handle(self, stream: Any) -> int:
        """The stream to launch on: `stream`, else the current one of the arrays' library, CuPy's if it is unknown."""
        if stream is not None:
            return stream_handle(stream)
        if not self._is_torch:
            return self._cupys()
        if self.are_several and is_capturing(self._cupy, self._cupys()):
            return self._cupys()
        return self._torchs()

    def others(self, stream: Any, handle: int) -> set[int]:
        """The streams to be ordered with a launch on `handle`: none where the caller chose it, or captures a graph."""
        if stream is not None or not self.are_several or is_capturing(self._cupy, handle):
            return set()
        torchs = {self._torchs()} if self._is_torch else set()
        return (self._producers | torchs | {self._cupys()}) - {handle}

    def _cupys(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def _torchs(self) -> int:
        torch = sys.modules["torch"]
        try:
            # What Triton's launcher uses; several microseconds cheaper than building a Stream object.
            return int(torch._C._cuda_getCurrentRawStream(self._device))
        except AttributeError:
            return int(torch.cuda.current_stream(self._device).cuda_stream)
