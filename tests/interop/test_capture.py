"""Every launcher is captured into a CUDA graph by torch and by CuPy; a replay does what a call does."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryRuntimeError, plan_offsets, warmup
from tests.helpers.backends import require_gpu
from tests.helpers.interop import LAUNCHES, canary_plan_arguments, converted, converter, to_numpy
from tests.helpers.plan_entries import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

REPLAYS = 100


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    require_gpu()
    warmup()


def refuse_to_allocate(size: int) -> Any:
    raise AssertionError(f"{size} bytes were allocated inside a capture")


@contextlib.contextmanager
def without_allocations() -> Iterator[None]:
    """CuPy's allocations fail, torch's are counted."""
    import cupy

    torch = sys.modules.get("torch")
    before = torch.cuda.memory_allocated() if torch is not None else 0
    with cupy.cuda.using_allocator(refuse_to_allocate):
        yield
    assert torch is None or torch.cuda.memory_allocated() == before


def capture_with_torch(step: Callable[[], None]) -> Callable[[], None]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), without_allocations():
        step()
    return graph.replay  # type: ignore[no-any-return]


def capture_with_cupy(step: Callable[[], None]) -> Callable[[], None]:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with without_allocations():
            step()
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


CAPTURES = {"torch": capture_with_torch, "cupy": capture_with_cupy}


def alternating(*libraries: str) -> Callable[[Any], Any]:
    """One array is of the first library, the next of the second."""
    turns = itertools.cycle([converter(library) for library in libraries])
    return lambda array: next(turns)(array)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize(
    ("captured_by", "libraries"),
    [
        ("torch", ["torch"]),
        ("cupy", ["cupy"]),
        ("torch", ["torch", "cupy"]),
        ("cupy", ["torch", "cupy"]),
        ("cupy", ["numba"]),
        ("cupy", ["dlpack"]),
    ],
)
def test_100_replays_equal_100_calls(captured_by: str, libraries: list[str], name: str) -> None:
    import cupy

    launcher, make = LAUNCHES[name]
    eager, expected = converted(make(), alternating(*libraries))
    arguments, arrays = converted(make(), alternating(*libraries))
    for _ in range(REPLAYS):
        launcher(**eager)
    replay = CAPTURES[captured_by](lambda: launcher(**arguments))
    for _ in range(REPLAYS):
        replay()
    cupy.cuda.Device().synchronize()
    for array, value in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(array), to_numpy(value))


@pytest.mark.parametrize("library", CAPTURES)
def test_bound_launches_of_a_whole_step_are_captured_in_one_graph(library: str) -> None:
    import cupy

    steps = [(launcher, *converted(make(), converter(library))) for launcher, make in LAUNCHES.values()]
    expected = [(launcher, *converted(make(), np.copy)) for launcher, make in LAUNCHES.values()]
    bound = [launcher.bind(**arguments) for launcher, arguments, _ in steps]

    def step() -> None:
        for launch in bound:
            launch()

    replay = CAPTURES[library](step)
    for _ in range(REPLAYS):
        replay()
        for launcher, arguments, _ in expected:
            launcher(**arguments)
    cupy.cuda.Device().synchronize()
    for (_, _, arrays), (_, _, values) in zip(steps, expected, strict=True):
        for array, value in zip(arrays, values, strict=True):
            np.testing.assert_array_equal(to_numpy(array), value)


@pytest.mark.parametrize("library", CAPTURES)
def test_replays_read_what_the_arrays_hold_then(library: str) -> None:
    import cupy

    launcher, make = LAUNCHES["plan_offsets"]
    arguments, _ = converted(make(), converter(library))
    replay = CAPTURES[library](lambda: launcher(**arguments))
    for prefix_len in range(3):
        arguments["prefix_lens"][...] = prefix_len
        cupy.cuda.Device().synchronize()
        replay()
        cupy.cuda.Device().synchronize()
        assert to_numpy(arguments["out_verify_num_valid"]).tolist() == [2 * prefix_len]


@pytest.mark.parametrize("where", ["the same thread", "another thread"])
def test_a_bound_launch_may_come_and_go_while_a_graph_is_captured(where: str) -> None:
    """In the mode that forbids every thread whatever may allocate."""
    import cupy

    launcher, make = LAUNCHES["plan_offsets"]
    arguments, _ = converted(make(), converter("cupy"))
    launcher(**arguments)
    counter = cupy.zeros(1)
    add_one = cupy.ElementwiseKernel("", "float64 x", "x += 1", "kvc_add_one")
    add_one(counter)
    expected = [array.copy() for array in outputs_of(arguments)]
    if where == "another thread":
        for array in outputs_of(arguments):
            array[...] = 7
    cupy.cuda.Device().synchronize()

    capturing, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))

    def bind_and_launch() -> None:
        with other:
            launcher.bind(**arguments)()

    with capturing:
        capturing.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        add_one(counter)
    if where == "the same thread":
        launcher.bind(**arguments)
    else:
        thread = threading.Thread(target=bind_and_launch)
        thread.start()
        thread.join()
    with capturing:
        add_one(counter)
        graph = capturing.end_capture()
    graph.launch(capturing)
    cupy.cuda.Device().synchronize()
    assert counter.item() == 3
    for array, value in zip(outputs_of(arguments), expected, strict=True):
        cupy.testing.assert_array_equal(array, value)


def outputs_of(arguments: dict[str, Any]) -> list[Any]:
    return [arguments[name] for name in sorted(arguments) if name.startswith("out_") and arguments[name] is not None]


def test_what_allocates_says_so_inside_a_capture() -> None:
    import cupy

    convert = converter("cupy")
    inputs = [convert(np.array(values)) for values in ([2], [5], [1])]
    table = convert(TABLE)
    arguments, _ = converted(canary_plan_arguments() | {"verify_offsets_scratch": None}, convert)
    scatter, _ = converted(LAUNCHES["scatter"][1](), convert)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(KvCanaryRuntimeError, match="must be allocated before a graph is captured"):
            plan_offsets(*inputs, table)
        with pytest.raises(KvCanaryRuntimeError, match=r"must be allocated before[\s\S]*verify_offsets_scratch"):
            LAUNCHES["canary_plan"][0](**arguments)
        LAUNCHES["scatter"][0](**scatter)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert scatter["pool_out"][2, :3].tolist() == [20, 21, 22]


def test_a_first_call_inside_cupys_capture_says_to_warm_up() -> None:
    """In a process of its own, where nothing was compiled yet."""
    code = """
import cupy, cupy_kvcanary as k
flat, rows, offsets = cupy.arange(3), cupy.ones(1, "int64"), cupy.array([0, 3])
pool = cupy.zeros((2, 4), "int32")
arguments = dict(flat_in=flat, offsets=offsets, req_pool_indices=rows, pool_out=pool)
cupy.cuda.Device().synchronize()
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    stream.begin_capture()
    try:
        k.launch_scatter_req_token_ids_kernel(**arguments)
    except k.KvCanaryRuntimeError as error:
        assert "warmup()" in str(error), error
    else:
        raise AssertionError("captured")
    pool.data.memset_async(0, pool.nbytes, stream)
    stream.end_capture()
k.warmup()
with stream:
    stream.begin_capture()
    k.launch_scatter_req_token_ids_kernel(**arguments)
    graph = stream.end_capture()
    graph.launch(stream)
    stream.synchronize()
assert pool.tolist() == [[0, 0, 0, 0], [0, 1, 2, 0]], pool
"""
    subprocess.run([sys.executable, "-c", code], check=True)
