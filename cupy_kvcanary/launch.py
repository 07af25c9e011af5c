"""From an operation's checked arguments to a result: on NumPy for CPU arrays, kernel launches for CUDA arrays."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .arrays import ArrayView, callers_stream, stream_handle
from .catalogue import error
from .checks import check_no_overlap, check_one_device, check_writable
from .compile import import_cupy, kernel_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .arrays import Device


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
    outputs: frozenset[str]
    """Names of the arrays that are written in place, those inside of structures included."""


def named_views(name: str, value: Any) -> Iterator[tuple[str, ArrayView]]:
    """Every array view in an argument, by argument or field name."""
    if isinstance(value, ArrayView):
        yield name, value
    elif isinstance(value, tuple):
        for item in value:
            yield from named_views(name, item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from named_views(field.name, getattr(value, field.name))


def all_views(arguments: Mapping[str, Any]) -> list[tuple[str, ArrayView]]:
    """Every array view in an operation's arguments, by argument or field name."""
    return [found for name, value in arguments.items() for found in named_views(name, value)]


def with_numpy(value: Any) -> Any:
    """The argument with NumPy arrays in place of its views."""
    if isinstance(value, ArrayView):
        return value.as_numpy()
    if isinstance(value, tuple):
        return tuple(with_numpy(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: with_numpy(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up: blocks needed for so many elements."""
    return -(-dividend // divisor)


class Backend(Protocol):
    """Runs operations on the memory of array views."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """Run in place; `arguments` has array views, None and ints by the launcher's keyword names."""

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """A new array for results that are computed on `stream`."""

    def callers_stream(self, views: list[ArrayView], stream: Any) -> Any:
        """`stream`, or the current stream of the arrays' library where it is None."""

    def hand_over(self, device: Device, stream: Any) -> None:
        """Order the results computed on `stream` before what their own library does next."""


class NumpyBackend:
    """Arrays in host memory, computed by the reference."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        if stream is not None:
            raise error("kv-canary-stream-must-be-none-for-cpu-arrays", name="stream", got=type(stream).__name__)
        operation.reference(**{name: with_numpy(value) for name, value in arguments.items()})

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        return np.zeros(shape, dtype)

    def callers_stream(self, views: list[ArrayView], stream: Any) -> Any:
        """See `Backend.callers_stream`; host memory has none."""
        return stream

    def hand_over(self, device: Device, stream: Any) -> None:
        """Nothing to do: the results are there when `run` returns."""


class CudaBackend:
    """Arrays in CUDA memory, computed by the kernels on the caller's stream."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        cupy = import_cupy()
        views = [view for _, view in all_views(arguments)]
        device = views[0].device
        with cupy.cuda.Device(device.index):
            handle = self._handle(cupy, views, stream)
            # Every kernel is at hand before the first is launched: outputs stay untouched if one does not compile.
            launches = operation.launches(**arguments)
            kernels = [kernel_handle(launch.stem, launch.entry, device.index) for launch in launches]
            for launch, kernel in zip(launches, kernels, strict=True):
                launch_on_stream(cupy.cuda.driver, launch, kernel, handle)

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        cupy = import_cupy()
        # CuPy's pool reuses memory in the order of the stream that was current at the allocation.
        with cupy.cuda.Device(device.index), _as_cupy_stream(cupy, self._handle(cupy, [], stream)):
            return cupy.zeros(shape, dtype)

    def callers_stream(self, views: list[ArrayView], stream: Any) -> int:
        """See `Backend.callers_stream`; as a handle."""
        cupy = import_cupy()
        with cupy.cuda.Device(views[0].device.index):
            return self._handle(cupy, views, stream)

    def hand_over(self, device: Device, stream: Any) -> None:
        """CuPy's current stream waits for the launch, where that was on another stream."""
        cupy = import_cupy()
        with cupy.cuda.Device(device.index):
            current, handle = cupy.cuda.get_current_stream(), self._handle(cupy, [], stream)
            if handle != current.ptr:
                current.wait_event(_as_cupy_stream(cupy, handle).record())

    def _handle(self, cupy: Any, views: list[ArrayView], stream: Any) -> int:
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


def check_memory_and_run(operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
    """Run where the arrays are: all on one device, outputs writable and apart from every other array."""
    views = dict(all_views(arguments))
    outputs = [name for name in views if name in operation.outputs]
    check_one_device(views)
    for name in outputs:
        check_writable(name, views[name])
    check_no_overlap(views, outputs)
    BACKENDS[next(iter(views.values())).device.type].run(operation, arguments, stream)
