"""From an operation's checked arguments to a result: on NumPy for CPU arrays, kernel launches for CUDA arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .arrays import ArrayView, is_torch, stream_handle, torchs_stream
from .catalogue import error
from .checks import check_no_overlap, check_one_device, check_writable
from .compile import import_cupy, is_loaded, kernel_handle

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


class Call(NamedTuple):
    """An operation with arguments that were checked."""

    operation: Operation
    arguments: Mapping[str, Any]
    """Array views, structures of them, None and numbers by the launcher's keyword names."""
    stream: Any
    """As the caller gave it."""

    @property
    def named_views(self) -> list[tuple[str, ArrayView]]:
        """Every array, by argument or field name."""
        return all_views(self.arguments)

    @property
    def views(self) -> list[ArrayView]:
        """Every array."""
        return [view for _, view in self.named_views]


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up: blocks needed for so many elements."""
    return -(-dividend // divisor)


class Backend(Protocol):
    """Runs operations on the memory of array views."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """Run in place; `arguments` has array views, None and ints by the launcher's keyword names."""

    def bind(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> Callable[[], None]:
        """A function that does what `run` does, as often as it is called."""

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

    def bind(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> Callable[[], None]:
        """See `Backend.bind`."""
        return functools.partial(self.run, operation, arguments, stream)

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        return np.zeros(shape, dtype)

    def callers_stream(self, views: list[ArrayView], stream: Any) -> Any:
        """See `Backend.callers_stream`; host memory has none."""
        return stream

    def hand_over(self, device: Device, stream: Any) -> None:
        """Nothing to do: the results are there when `run` returns."""


class PreparedLaunch:
    """A kernel with its arguments, as the driver takes them."""

    def __init__(self, driver: Any, launch: Launch, kernel: int) -> None:
        self.args = launch.args
        """The parameter struct; the driver copies it at each launch."""
        self.words = (ctypes.c_uint64 * (launch.args.nbytes // 8)).from_buffer(launch.args.data)
        """The same memory, as numbers of 8 bytes."""
        self._entry = launch.entry
        self._driver = driver
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.words))
        self._before_stream = (kernel, launch.grid, 1, 1, launch.block, 1, 1, 0)
        self._behind_stream = (ctypes.addressof(self._parameters), 0)

    def pointer_words(self) -> list[int]:
        """Which words of the struct are pointers."""
        return [offset // 8 for offset in _pointer_offsets(self.args.dtype)]

    def launch(self, stream: int) -> None:
        """Launch on a stream, by its driver handle."""
        try:
            self._driver.launchKernel(*self._before_stream, stream, *self._behind_stream)
        except self._driver.CUDADriverError as reason:
            raise error("kv-canary-kernel-must-launch", name=self._entry, got=str(reason)) from reason


def _pointer_offsets(dtype: np.dtype[Any], start: int = 0) -> list[int]:
    if dtype.fields is None:
        return [start] if dtype == np.uint64 else []
    return [found for field, offset, *_ in dtype.fields.values() for found in _pointer_offsets(field, start + offset)]


class PreparedLaunches:
    """The launches of an operation on one device, to be made any number of times."""

    def __init__(self, cupy: Any, launches: list[PreparedLaunch], views: list[ArrayView]) -> None:
        self._cupy = cupy
        self.launches = launches
        self._device = views[0].device.index
        self._current_device = cupy.cuda.runtime.getDevice
        self._is_torch = any(is_torch(view.owner) for view in views)
        self.is_mixed = self._is_torch and not all(is_torch(view.owner) for view in views)
        """torch's arrays among others: with two libraries there may be two current streams."""

    def launch(self, stream: Any) -> None:
        """Launch all on `stream`, None for the current stream of the arrays' library."""
        if self._current_device() != self._device:
            with self._cupy.cuda.Device(self._device):
                self._launch_here(stream)
        else:
            self._launch_here(stream)

    def _launch_here(self, stream: Any) -> None:
        handle = self.handle(stream)
        other = int(self._cupy.cuda.get_current_stream().ptr) if self.is_mixed and stream is None else handle
        if other != handle:
            _wait_for(self._cupy, waiting=handle, waited_for=other)
        for launch in self.launches:
            launch.launch(handle)
        if other != handle:
            _wait_for(self._cupy, waiting=other, waited_for=handle)

    def handle(self, stream: Any) -> int:
        """Handle of the stream to launch on. The arrays' device is current."""
        if stream is not None:
            return stream_handle(stream)
        if self._is_torch:
            return torchs_stream(self._device)
        return int(self._cupy.cuda.get_current_stream().ptr)


def check_warmed_up(missing: list[str], is_capturing: bool) -> None:
    """Kernels that are not loaded yet cannot be while a graph is captured."""
    if missing and is_capturing:
        raise error("kv-canary-must-be-warmed-up", name=missing[0], got="a first call inside a capture")


def _wait_for(cupy: Any, *, waiting: int, waited_for: int) -> None:
    _as_cupy_stream(cupy, waiting).wait_event(_as_cupy_stream(cupy, waited_for).record())


class CudaBackend:
    """Arrays in CUDA memory, computed by the kernels on the caller's stream."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        self.prepare(operation, arguments, stream).launch(stream)

    def bind(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> Callable[[], None]:
        """See `Backend.bind`."""
        return functools.partial(self.prepare(operation, arguments, stream).launch, stream)

    def prepare(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> PreparedLaunches:
        """Every kernel is at hand before the first is launched: outputs stay untouched if one does not compile."""
        cupy = import_cupy()
        views = [view for _, view in all_views(arguments)]
        device = views[0].device.index
        with cupy.cuda.Device(device):
            launches = operation.launches(**arguments)
            prepared = PreparedLaunches(cupy, [], views)
            missing = [launch.entry for launch in launches if not is_loaded(launch.stem, launch.entry, device)]
            check_warmed_up(missing, bool(cupy.cuda.runtime.streamIsCapturing(prepared.handle(stream))))
            prepared.launches = [
                PreparedLaunch(cupy.cuda.driver, launch, kernel_handle(launch.stem, launch.entry, device))
                for launch in launches
            ]
        return prepared

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
            current, handle = cupy.cuda.get_current_stream().ptr, self._handle(cupy, [], stream)
            if handle != current:
                _wait_for(cupy, waiting=current, waited_for=handle)

    def _handle(self, cupy: Any, views: list[ArrayView], stream: Any) -> int:
        """Handle of the stream to launch on. The arrays' device is current."""
        if stream is not None:
            return stream_handle(stream)
        if any(is_torch(view.owner) for view in views):
            return torchs_stream(views[0].device.index)
        return int(cupy.cuda.get_current_stream().ptr)


def _as_cupy_stream(cupy: Any, handle: int) -> Any:
    return cupy.cuda.Stream.from_external(_RawStream(handle))


@dataclass(frozen=True, slots=True)
class _RawStream:
    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


BACKENDS: dict[str, Backend] = {"cpu": NumpyBackend(), "cuda": CudaBackend()}
"""By device type of the arrays."""


def checked_call(operation: Operation, arguments: Mapping[str, Any], stream: Any) -> Call:
    """The call, after the checks of memory: all on one device, outputs writable and apart from every other array."""
    views = dict(all_views(arguments))
    outputs = [name for name in views if name in operation.outputs]
    check_one_device(views)
    for name in outputs:
        check_writable(name, views[name])
    check_no_overlap(views, outputs)
    return Call(operation, arguments, stream)


def run(call: Call) -> None:
    """Run a call where its arrays are."""
    BACKENDS[call.views[0].device.type].run(*call)
