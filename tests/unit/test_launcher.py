"""Repeated calls on CUDA arrays: launched by a template, with other addresses, and still checked. On a made-up CuPy."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, KvCanaryRuntimeError, PageList, bind_all, launch, launch_plan_offsets_kernel
from cupy_kvcanary.launcher import Launcher
from cupy_kvcanary.ops.plan_offsets import PLAN_OFFSETS_ARGS
from tests.helpers.plan_offsets import make_arguments

TABLE = np.ones((6, 16), np.int32)
STREAM = 77


class Ndarray:
    """A CuPy array whose device memory is host memory."""

    __cuda_array_interface__: Any = None  # that there is one is enough

    def __init__(self, array: np.ndarray[Any, Any], misaligned_by: int = 0, is_freed: bool = False) -> None:
        self.array = array
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides
        self.data = SimpleNamespace(ptr=0 if is_freed else array.ctypes.data + misaligned_by, device_id=0)


class Driver:
    """Remembers the argument struct of every launch."""

    class CUDADriverError(Exception):
        pass

    def __init__(self) -> None:
        self.launched: list[np.ndarray[Any, Any]] = []
        self.streams: list[int] = []
        self.graphs_launched: list[tuple[int, int]] = []
        self.capturing: set[int] = set()
        self.runtime = SimpleNamespace()

    def launchKernel(self, *arguments: Any) -> None:  # noqa: N802
        *_, stream, parameters, _ = arguments
        struct = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        assert struct is not None
        self.launched.append(np.frombuffer(ctypes.string_at(struct, PLAN_OFFSETS_ARGS.itemsize), PLAN_OFFSETS_ARGS)[0])
        self.streams.append(stream)


class CaptureStream:
    """A stream that a graph is captured on."""

    ptr = 99

    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        self.graph = Graph()
        return self.graph

    def synchronize(self) -> None:
        self.graph.is_on_device = self.graph.is_uploading


class Graph:
    graphExec = 4  # noqa: N815
    is_uploading = is_on_device = False

    def upload(self, stream: CaptureStream) -> None:
        self.is_uploading = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        streamIsCapturing=driver.capturing.__contains__,
        graphLaunch=lambda graph, stream: driver.graphs_launched.append((graph, stream)),
    )
    cuda = SimpleNamespace(
        driver=driver,
        runtime=runtime,
        Device=lambda index: nullcontext(),
        Stream=CaptureStream,
        get_current_stream=lambda *_: SimpleNamespace(ptr=STREAM),
    )
    runtime.CUDARuntimeError = Driver.CUDADriverError
    driver.runtime = runtime
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Ndarray, cuda=cuda))
    monkeypatch.setattr(launch, "kernel_handle", lambda *key: 1)
    monkeypatch.setattr(launch, "is_loaded", lambda *key: True)
    monkeypatch.setattr(launch, "beside_captures", nullcontext)
    monkeypatch.setattr(launch, "_destroy", list.clear)  # outlives the test
    return driver


class Counted:
    """The offsets launcher without what it learned before, counting its full checks."""

    def __init__(self) -> None:
        self.checks = 0
        self.launcher = Launcher(self._check)

    def _check(self, *args: Any, **arguments: Any) -> Any:
        self.checks += 1
        return launch_plan_offsets_kernel._check(*args, **arguments)

    def __call__(self, **arguments: Any) -> None:
        self.launcher(**arguments)


def on_device(**changed: Any) -> dict[str, Any]:
    """Valid arguments of two requests, in memory of their own."""
    given = make_arguments([2, 4], [5, 3], [1, 1], TABLE, mapping=np.arange(96)) | changed
    return {name: Ndarray(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}


def pointers(arguments: dict[str, Any]) -> dict[str, int]:
    return {name: value.data.ptr for name, value in arguments.items() if isinstance(value, Ndarray)}


def assert_launched(driver: Driver, arguments: dict[str, Any], stream: int = STREAM) -> None:
    args = driver.launched[-1]
    for name, pointer in pointers(arguments).items():
        field = args["page_table"]["entries"] if name == "req_to_token" else args[name]
        assert field == pointer, name
    assert args["verify_capacity"] == arguments["verify_capacity"]
    assert driver.streams[-1] == stream


def test_a_form_is_checked_in_full_once(driver: Driver) -> None:
    plan, calls = Counted(), [on_device() for _ in range(3)]
    for arguments in [*calls, *calls]:
        plan(**arguments)
        assert_launched(driver, arguments)
    assert plan.checks == 1
    assert len(driver.launched) == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"verify_capacity": 7},
        {"full_to_swa_index_mapping": None},
        {"full_to_swa_index_mapping": np.arange(95)},
        {"swa_window_size": 3},
        {"bs": 1},
        {"bs": np.ones(1, np.int32)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_form_is_checked_and_launched_as_it_is(driver: Driver, changed: dict[str, Any]) -> None:
    plan = Counted()
    plan(**on_device())
    arguments = on_device(**changed)
    plan(**arguments)
    assert plan.checks == 2
    assert driver.launched[-1]["swa_window_size"] == arguments["swa_window_size"]
    assert driver.launched[-1]["bs"] == (1 if arguments.get("bs") == 1 else 2)


def test_a_stream_is_no_part_of_the_form(driver: Driver) -> None:
    plan, arguments = Counted(), on_device()
    plan(**arguments)
    plan(**arguments, stream=5)
    plan(**arguments, stream=SimpleNamespace(ptr=6))
    assert driver.streams == [STREAM, 5, 6]


MEMORY = np.zeros(4, np.int32)


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        (
            "out_verify_num_valid must not overlap out_verify_enable",
            {"out_verify_num_valid": Ndarray(MEMORY[:1]), "out_verify_enable": Ndarray(MEMORY[:1])},
        ),
        (
            "prefix_lens must start at a multiple of 8 bytes",
            {"prefix_lens": Ndarray(np.zeros(2, np.int64), misaligned_by=4)},
        ),
        (
            "prefix_lens must have memory, got a Ndarray with elements at address 0",
            {"prefix_lens": Ndarray(np.zeros(2, np.int64), is_freed=True)},
        ),
        ("swa_window_size must be an int, got False", {"swa_window_size": False}),
        ("out_write_offsets must be contiguous", {"out_write_offsets": Ndarray(np.zeros(6, np.int64)[::2])}),
    ],
)
def test_a_known_form_does_not_hide_a_fault(driver: Driver, message: str, changed: dict[str, Any]) -> None:
    plan = Counted()
    plan(**on_device())
    with pytest.raises(KvCanaryError, match=message):
        plan(**on_device() | changed)
    assert len(driver.launched) == 1


def test_one_array_for_two_inputs_is_checked_each_time(driver: Driver) -> None:
    """Whose address is whose could not be said."""
    plan = Counted()
    for _ in range(2):
        arguments = on_device()
        arguments["prefix_lens"] = arguments["extend_seq_lens"]
        plan(**arguments)
        assert_launched(driver, arguments)
    assert plan.checks == 2


def test_an_array_that_also_lies_in_a_page_table_is_checked_each_time(driver: Driver) -> None:
    """Another array's address would go into the page table too."""
    plan, indptr = Counted(), np.array([0, 5, 8])
    pages = PageList(
        indptr=Ndarray(indptr),
        indices=Ndarray(np.arange(8)),
        last_page_len=Ndarray(np.ones(2, np.int64)),
        page_size=1,
    )
    for lengths in (indptr[:2], indptr[:2].copy()):
        plan(**on_device(req_to_token=pages, prefix_lens=lengths))
        assert driver.launched[-1]["prefix_lens"] == lengths.ctypes.data
        assert driver.launched[-1]["page_table"]["page_indptr"] == indptr.ctypes.data
    assert plan.checks == 2


def test_an_argument_by_position_is_not_passed_over(driver: Driver) -> None:
    plan = Counted()
    plan(**on_device())
    with pytest.raises(TypeError, match="positional argument"):
        plan.launcher(TABLE, **on_device())
    assert len(driver.launched) == 1


def test_a_bound_launch_is_a_graph_of_what_was_bound(driver: Driver) -> None:
    arguments = on_device()
    bound = launch_plan_offsets_kernel.bind(**arguments)
    assert_launched(driver, arguments, CaptureStream.ptr)
    bound()
    bound()
    assert driver.graphs_launched == [(Graph.graphExec, STREAM)] * 2
    assert len(driver.launched) == 1


def test_a_bound_launchs_graph_is_on_the_device_before_it_is_launched(driver: Driver) -> None:
    """Its first launch allocates nothing then."""
    prepared = launch.CudaBackend().prepare(*launch_plan_offsets_kernel._check(**on_device()))
    assert launch._captured(sys.modules["cupy"], prepared).is_on_device


def test_a_bound_launch_goes_into_the_graph_that_its_caller_captures(driver: Driver) -> None:
    bound = launch_plan_offsets_kernel.bind(**on_device())
    driver.capturing.add(STREAM)
    bound()
    assert driver.streams == [CaptureStream.ptr, STREAM]
    assert driver.graphs_launched == []


def test_a_bound_launch_that_cuda_refuses_says_why(driver: Driver) -> None:
    bound = launch_plan_offsets_kernel.bind(**on_device())

    def refuse(graph: int, stream: int) -> None:
        raise Driver.CUDADriverError("cudaErrorNoDevice")

    driver.runtime.graphLaunch = refuse
    with pytest.raises(KvCanaryRuntimeError, match="kernel kvc_plan_offsets must launch, got cudaErrorNoDevice"):
        bound()


def test_several_launches_are_bound_as_one_graph(driver: Driver) -> None:
    both = [on_device(), on_device()]
    bound = bind_all((launch_plan_offsets_kernel, arguments) for arguments in both)
    assert len(driver.launched) == 2
    assert_launched(driver, both[1], CaptureStream.ptr)
    bound()
    assert driver.graphs_launched == [(Graph.graphExec, STREAM)]


def test_launches_on_host_arrays_are_bound_together() -> None:
    one, other = make_arguments([2], [5], [1], TABLE), make_arguments([3], [4], [1], TABLE)
    bind_all([(launch_plan_offsets_kernel, one), (launch_plan_offsets_kernel, other)])()
    assert one["out_verify_num_valid"][0] == 5
    assert other["out_verify_num_valid"][0] == 4


def test_nothing_cannot_be_bound() -> None:
    with pytest.raises(KvCanaryError, match="calls length must be >= 1, got 0"):
        bind_all([])


def test_launches_of_two_devices_cannot_be_bound_together(driver: Driver) -> None:
    with pytest.raises(KvCanaryError, match=r"of call 1 must be on .* of call 0's device"):
        bind_all(
            [
                (launch_plan_offsets_kernel, on_device()),
                (launch_plan_offsets_kernel, make_arguments([2], [5], [1], TABLE)),
            ]
        )
