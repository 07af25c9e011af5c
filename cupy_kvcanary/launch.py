"""From an operation's checked arguments to a result: on NumPy for CPU arrays, kernel launches for CUDA arrays."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .arrays import ArrayView
from .catalogue import error
from .checks import check_no_overlap, check_one_device, check_writable
from .compile import cuda_device, import_cupy, is_loaded, kernel_handle
from .libraries import share
from .streams import CallersStreams, as_cupy_stream, beside_captures, is_capturing, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from .arrays import Device
    from .libraries import Library


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

    def bind(self, calls: Sequence[Call]) -> Callable[[], None]:
        """A function that runs the calls one after another, as often as it is called; all on the first one's stream."""

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """A new array at a multiple of 64 bytes, for work on `stream`; None for the current one."""

    def callers_stream(self, views: list[ArrayView], stream: Any) -> AbstractContextManager[Any]:
        """Gives `stream`, or the current stream of the arrays' library where it is None, for work on the arrays.

        The work waits for what other libraries were given before if arrays of several are mixed; what the library of
        `allocate_zeros` and the others are given afterwards waits for the work.
        """

    def share(self, arrays: list[Any], library: Library, device: Device, stream: Any) -> list[Any]:
        """Arrays of `allocate_zeros`, as those of a library, which uses them after the work on `stream`."""


class NumpyBackend:
    """Arrays in host memory, computed by the reference."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        self.bind([Call(operation, arguments, stream)])()

    def bind(self, calls: Sequence[Call]) -> Callable[[], None]:
        """See `Backend.bind`."""
        if (stream := calls[0].stream) is not None:
            raise error("kv-canary-stream-must-be-none-for-cpu-arrays", name="stream", got=type(stream).__name__)
        references = [
            functools.partial(call.operation.reference, **{k: with_numpy(v) for k, v in call.arguments.items()})
            for call in calls
        ]

        def run() -> None:
            for reference in references:
                reference()

        return run

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """See `Backend.allocate_zeros`; at a multiple of 64 bytes, as CUDA memory is."""
        nbytes = np.dtype(dtype).itemsize * math.prod(np.atleast_1d(shape).tolist())
        memory = np.zeros(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes].view(dtype).reshape(shape)

    def callers_stream(self, views: list[ArrayView], stream: Any) -> AbstractContextManager[Any]:
        """See `Backend.callers_stream`; host memory has none."""
        return contextlib.nullcontext(stream)

    def share(self, arrays: list[Any], library: Library, device: Device, stream: Any) -> list[Any]:
        """See `Backend.share`."""
        return share(arrays, library)


class PreparedLaunch:
    """A kernel with its arguments, as the driver takes them."""

    def __init__(self, driver: Any, launch: Launch, kernel: int) -> None:
        self.args = launch.args
        """The parameter struct; the driver copies it at each launch."""
        self.words = (ctypes.c_uint64 * (launch.args.nbytes // 8)).from_buffer(launch.args.data)
        """The same memory, as numbers of 8 bytes."""
        self.entry = launch.entry
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
            raise launch_error(self.entry, reason) from reason


def _pointer_offsets(dtype: np.dtype[Any], start: int = 0) -> list[int]:
    if dtype.fields is None:
        return [start] if dtype == np.uint64 else []
    return [found for field, offset, *_ in dtype.fields.values() for found in _pointer_offsets(field, start + offset)]


class PreparedLaunches:
    """The launches of an operation on one device, to be made any number of times."""

    def __init__(self, cupy: Any, launches: list[PreparedLaunch], views: list[ArrayView]) -> None:
        self._cupy = cupy
        self.launches = launches
        self.streams = CallersStreams(cupy, views)
        self.device = views[0].device.index
        self._current_device = cupy.cuda.runtime.getDevice
        # Behind a capsule is memory that its library may use for something else as soon as the capsule is gone.
        self._is_borrowed = any(view.capsule is not None for view in views)
        self._needs_no_order = not self._is_borrowed and not self.streams.are_several

    def need_no_order(self, stream: Any) -> bool:
        """Whether nothing but `stream` itself orders them with other work."""
        return self._needs_no_order or (type(stream) is int and not self._is_borrowed)

    def launch(self, stream: Any) -> None:
        """Launch all on `stream`, None for the current stream of the arrays' library."""
        if self._current_device() != self.device:
            with self._cupy.cuda.Device(self.device):
                self._launch_in_order(stream)
        elif self.need_no_order(stream):
            handle = self.streams.handle(stream)
            for launch in self.launches:
                launch.launch(handle)
        else:
            self._launch_in_order(stream)

    def _launch_in_order(self, stream: Any) -> None:
        """With what other libraries were given before and are given after."""
        handle = self.streams.handle(stream)
        others = self.streams.others(stream, handle) if self.streams.are_several else ()
        if others:
            wait_for(self._cupy, waiting=[handle], waited_for=others)
        for launch in self.launches:
            launch.launch(handle)
        if others:
            wait_for(self._cupy, waiting=others, waited_for=[handle])
        if self._is_borrowed and not is_capturing(self._cupy, handle):
            as_cupy_stream(self._cupy, handle).synchronize()


class BoundLaunches:
    """Launches that stay as they are, as one CUDA graph: the driver takes it faster than a single kernel (measured)."""

    def __init__(self, cupy: Any, prepared: PreparedLaunches, stream: Any) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._prepared = prepared
        self._stream = stream
        self._graph: int | None = None
        self._lock = threading.Lock()  # a graph must not be launched by two threads at once
        if prepared.need_no_order(stream):
            graph = _captured(cupy, prepared)
            self._graph = graph.graphExec
            # Which has the only reference.
            weakref.finalize(self, _destroy, [graph]).atexit = False

    def __call__(self) -> None:
        """Launch all on the stream, None for the current stream of the arrays' library."""
        if self._graph is None or self._runtime.getDevice() != self._prepared.device:
            self._prepared.launch(self._stream)
            return
        handle = self._prepared.streams.handle(self._stream)
        if is_capturing(self._cupy, handle):  # into the caller's graph, as kernels of its own
            self._prepared.launch(self._stream)
            return
        try:
            with self._lock:
                self._runtime.graphLaunch(self._graph, handle)
        except self._runtime.CUDARuntimeError as reason:
            raise launch_error(self._prepared.launches[0].entry, reason) from reason


def _captured(cupy: Any, prepared: PreparedLaunches) -> Any:
    """A graph of the launches; the device must be current."""
    with beside_captures():
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        try:
            for launch in prepared.launches:
                launch.launch(stream.ptr)
        finally:
            graph = stream.end_capture()
        # Else the first launch would, which allocates: not on the hot path, nor while another thread captures.
        graph.upload(stream)
        stream.synchronize()
        del stream
    return graph


def _destroy(graphs: list[Any]) -> None:
    """Drop the last references to graphs; it may be in the middle of a capture."""
    with beside_captures():
        graphs.clear()


def launch_error(entry: str, reason: Exception) -> Exception:
    """What CUDA said to the launch of a kernel."""
    return error("kv-canary-kernel-must-launch", name=entry, got=str(reason))


def check_warmed_up(missing: list[str], is_capturing: bool) -> None:
    """Kernels that are not loaded yet cannot be while a graph is captured."""
    if missing and is_capturing:
        raise error("kv-canary-must-be-warmed-up", name=missing[0], got="a first call inside a capture")


class CudaBackend:
    """Arrays in CUDA memory, computed by the kernels on the caller's stream."""

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        """See `Backend.run`."""
        self.prepare(operation, arguments, stream).launch(stream)

    def bind(self, calls: Sequence[Call]) -> Callable[[], None]:
        """See `Backend.bind`."""
        all_prepared = [self.prepare(*call) for call in calls]
        launches = [launch for prepared in all_prepared for launch in prepared.launches]
        cupy = import_cupy()
        together = PreparedLaunches(cupy, launches, [view for call in calls for view in call.views])
        with cuda_device(together.device):
            return BoundLaunches(cupy, together, calls[0].stream)

    def prepare(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> PreparedLaunches:
        """Every kernel is at hand before the first is launched: outputs stay untouched if one does not compile."""
        cupy = import_cupy()
        views = [view for _, view in all_views(arguments)]
        device = views[0].device.index
        with cuda_device(device):
            launches = operation.launches(**arguments)
            prepared = PreparedLaunches(cupy, [], views)
            missing = [launch.entry for launch in launches if not is_loaded(launch.stem, launch.entry, device)]
            check_warmed_up(missing, is_capturing(cupy, prepared.streams.handle(stream)))
            prepared.launches = [
                PreparedLaunch(cupy.cuda.driver, launch, kernel_handle(launch.stem, launch.entry, device))
                for launch in launches
            ]
        return prepared

    def allocate_zeros(self, shape: Any, dtype: str, device: Device, stream: Any) -> Any:
        """See `Backend.allocate_zeros`."""
        cupy = import_cupy()
        if stream is not None and is_capturing(cupy, stream):
            raise error("kv-canary-must-be-allocated-before-a-capture", name=f"a new {dtype} array")
        # CuPy's pool reuses memory in the order of the stream that was current at the allocation.
        with cuda_device(device.index), contextlib.nullcontext() if stream is None else as_cupy_stream(cupy, stream):
            return cupy.zeros(shape, dtype)

    @contextlib.contextmanager
    def callers_stream(self, views: list[ArrayView], stream: Any) -> Iterator[int]:
        """See `Backend.callers_stream`; as a handle."""
        cupy = import_cupy()
        with cuda_device(views[0].device.index):
            streams = CallersStreams(cupy, views)
            handle = streams.handle(stream)
            others = streams.others(stream, handle)
            wait_for(cupy, waiting=[handle], waited_for=others)
            yield handle
            cupys = {int(cupy.cuda.get_current_stream().ptr)}
            wait_for(cupy, waiting=(others | cupys) - {handle}, waited_for=[handle])

    def share(self, arrays: list[Any], library: Library, device: Device, stream: Any) -> list[Any]:
        """See `Backend.share`."""
        # CuPy's arrays let the importer wait for the stream that is CuPy's current one.
        with cuda_device(device.index), as_cupy_stream(import_cupy(), stream):
            return share(arrays, library)


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
