"""From an operation's checked arguments to a result: on NumPy for CPU arrays, kernel launches for CUDA arrays."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .arrays import ArrayView, callers_stream, stream_handle
from .catalogue import error
from .compile import import_cupy, kernel_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: a 1-D grid of 1-D blocks and the kernel's only parameter, a struct by value."""

    stem: str
    entry: str
    grid: int
    block: int
    args: np.ndarray[Any, Any]
    """0-d structured array, the twin of the CUDA argument struct. Pointers are its uint64 fields."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What the backends need of an operation. Both functions take the launcher's keyword names."""

    reference: Callable[..., None]
    """The NumPy twin; takes NumPy arrays."""
    launches: Callable[..., list[Launch]]
    """The kernel launches, in order; takes array views."""


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up: blocks needed for so many elements."""
    return -(-dividend // divisor)


class Backend(Protocol):
    """Runs operations on the memory of array views."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """Run in place; `arguments` has array views, None and ints by the launcher's keyword names."""

    def allocate_zeros(self, length: int, dtype: str, like: ArrayView, stream: Any) -> Any:
        """A new array on the device of `like`, for results that are computed on `stream`."""

    def hand_over(self, like: ArrayView, stream: Any) -> None:
        """Order the results computed on `stream` before what their own library does next."""


class NumpyBackend:
    """Arrays in host memory, computed by the reference."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        if stream is not None:
            raise error("kv-canary-stream-must-be-none-for-cpu-arrays", name="stream", got=type(stream).__name__)
        operation.reference(
            **{name: value.as_numpy() if isinstance(value, ArrayView) else value for name, value in arguments.items()}
        )

    def allocate_zeros(self, length: int, dtype: str, like: ArrayView, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        return np.zeros(length, dtype)

    def hand_over(self, like: ArrayView, stream: Any) -> None:
        """Nothing to do: the results are there when `run` returns."""


class CudaBackend:
    """Arrays in CUDA memory, computed by the kernels on the caller's stream."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        cupy = import_cupy()
        views = [value for value in arguments.values() if isinstance(value, ArrayView)]
        device = views[0].device
        with cupy.cuda.Device(device.index):
            handle = _stream_of(cupy, views, stream)
            # Every kernel is at hand before the first is launched: outputs stay untouched if one does not compile.
            launches = operation.launches(**arguments)
            kernels = [kernel_handle(launch.stem, launch.entry, device.index) for launch in launches]
            for launch, kernel in zip(launches, kernels, strict=True):
                launch_on_stream(cupy.cuda.driver, launch, kernel, handle)

    def allocate_zeros(self, length: int, dtype: str, like: ArrayView, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        cupy = import_cupy()
        # CuPy's pool reuses memory in the order of the stream that was current at the allocation.
        with cupy.cuda.Device(like.device.index), _as_cupy_stream(cupy, _stream_of(cupy, [like], stream)):
            return cupy.zeros(length, dtype)

    def hand_over(self, like: ArrayView, stream: Any) -> None:
        """CuPy's current stream waits for the launch, where that was on another stream."""
        cupy = import_cupy()
        with cupy.cuda.Device(like.device.index):
            current, handle = cupy.cuda.get_current_stream(), _stream_of(cupy, [like], stream)
            if handle != current.ptr:
                current.wait_event(_as_cupy_stream(cupy, handle).record())


def _stream_of(cupy: Any, views: list[ArrayView], stream: Any) -> int:
    """Handle of the stream to launch on. The arrays' device is current."""
    if stream is not None:
        return stream_handle(stream)
    handle = callers_stream(views)
    return int(cupy.cuda.get_current_stream().ptr) if handle is None else handle


def _as_cupy_stream(cupy: Any, handle: int) -> Any:
    return cupy.cuda.Stream.from_external(_RawStream(handle))


@dataclass(frozen=True, slots=True)
class _RawStream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def launch_on_stream(driver: Any, launch: Launch, kernel: int, stream: int) -> None:
    """Launch a compiled kernel on a stream, by their driver handles."""
    # The driver copies the parameters before it returns, so the array of pointers may be temporary.
    parameters = (ctypes.c_void_p * 1)(launch.args.ctypes.data)
    try:
        driver.launchKernel(kernel, launch.grid, 1, 1, launch.block, 1, 1, 0, stream, ctypes.addressof(parameters), 0)
    except driver.CUDADriverError as reason:
        raise error("kv-canary-kernel-must-launch", name=launch.entry, got=str(reason)) from reason


BACKENDS: dict[str, Backend] = {"cpu": NumpyBackend(), "cuda": CudaBackend()}
"""By device type of the arrays."""
