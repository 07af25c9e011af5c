"""Which stream a launch goes on and which it is ordered with, on a CuPy and a torch that are made up."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError
from cupy_kvcanary.arrays import ArrayView, Device
from cupy_kvcanary.launch import Launch, PreparedLaunch, PreparedLaunches
from cupy_kvcanary.streams import CallersStreams, dlpack_stream, stream_handle, wait_for


class CupyLikeStream:
    ptr = 7


class TorchLikeStream:
    cuda_stream = 8


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 9


@pytest.mark.parametrize(
    ("stream", "handle"), [(5, 5), (0, 0), (CupyLikeStream(), 7), (TorchLikeStream(), 8), (ProtocolStream(), 9)]
)
def test_streams_of_any_library(stream: Any, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [True, "0", 1.0])
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(KvCanaryError, match="stream must be None, an int handle or a stream object"):
        stream_handle(stream)


@dataclass
class FakeCupy:
    """As much of CuPy as streams need: a current one, captured ones, and a list of who waits for whom."""

    current: int = 0
    captured: set[int] = field(default_factory=set)
    waits: list[tuple[int, int]] = field(default_factory=list)

    class CUDARuntimeError(Exception):
        pass

    def __post_init__(self) -> None:
        self.cuda = self.runtime = self.Stream = self

    def get_current_stream(self, device: int | None = None) -> Any:
        if device == 99:
            raise self.CUDARuntimeError("cudaErrorInvalidDevice")
        return type("Stream", (), {"ptr": self.current})()

    def streamIsCapturing(self, handle: int) -> bool:  # noqa: N802
        assert handle > 1, "the legacy stream may not be asked"
        return handle in self.captured

    def from_external(self, stream: Any) -> FakeStream:
        return FakeStream(self, stream.__cuda_stream__()[1])


@dataclass
class FakeStream:
    cupy: FakeCupy
    handle: int

    def record(self) -> int:
        return self.handle

    def wait_event(self, event: int) -> None:
        self.cupy.waits.append((self.handle, event))


class Tensor:
    """What the made-up torch calls a tensor."""


class FakeTorch:
    Tensor = Tensor
    current = 40

    class _C:
        @staticmethod
        def _cuda_getCurrentRawStream(device: int) -> int:  # noqa: N802
            return FakeTorch.current


def view(owner: Any, stream: int | None = None) -> ArrayView:
    return ArrayView(4096, (3,), (8,), "int64", 8, Device("cuda", 0), False, owner, None, stream)


OF_TORCH, OF_CUPY, OF_NUMBA = view(Tensor()), view(object()), view(object(), stream=60)


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeTorch)


@pytest.mark.parametrize(
    ("views", "given", "captured", "launched_on", "ordered_with"),
    [
        ([OF_CUPY, OF_CUPY], None, set(), 50, set()),
        ([OF_TORCH, OF_TORCH], None, set(), 40, set()),
        ([OF_TORCH, OF_CUPY], None, set(), 40, {50}),
        ([OF_CUPY, OF_TORCH], None, set(), 40, {50}),
        ([OF_NUMBA, OF_CUPY], None, set(), 50, {60}),
        ([OF_NUMBA, OF_TORCH], None, set(), 40, {50, 60}),
        # Where a stream is given, ordering is the caller's.
        ([OF_TORCH, OF_CUPY], 70, set(), 70, set()),
        ([OF_NUMBA], TorchLikeStream(), set(), 8, set()),
        # A capture is not broken by waiting for streams outside of it; the captured one is launched on.
        ([OF_TORCH, OF_CUPY], None, {40}, 40, set()),
        ([OF_TORCH, OF_CUPY], None, {50}, 50, set()),
        ([OF_NUMBA, OF_CUPY], None, {50}, 50, set()),
        ([OF_TORCH], None, {40}, 40, set()),
        ([OF_TORCH], None, {50}, 40, set()),
    ],
)
def test_the_stream_of_a_launch(
    views: list[ArrayView], given: Any, captured: set[int], launched_on: int, ordered_with: set[int]
) -> None:
    streams = CallersStreams(FakeCupy(current=50, captured=captured), views)
    assert streams.handle(given) == launched_on
    assert streams.others(given, launched_on) == ordered_with


def test_one_current_stream_needs_no_ordering() -> None:
    streams = CallersStreams(FakeCupy(current=40), [OF_TORCH, OF_CUPY])
    assert streams.others(None, streams.handle(None)) == set()


def test_waiting() -> None:
    cupy = FakeCupy()
    wait_for(cupy, waiting=[3, 4], waited_for=[5])
    wait_for(cupy, waiting=[], waited_for=[5])
    wait_for(cupy, waiting=[3], waited_for=[])
    assert cupy.waits == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("cupy", "device", "stream"),
    [
        (None, 0, 1),
        (FakeCupy(current=0), 0, 1),
        (FakeCupy(current=50), 0, 50),
        (FakeCupy(current=50, captured={50}), 0, -1),
        (FakeCupy(current=50), 99, 1),
    ],
)
def test_the_stream_that_dlpack_producers_are_told(
    cupy: Any, device: int, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert dlpack_stream(device) == stream


class FakeDriver:
    """Records the streams of launches."""

    class CUDADriverError(Exception):
        pass

    def __init__(self, cupy: FakeCupy) -> None:
        self.waits = cupy.waits

    def launchKernel(self, *arguments: Any) -> None:  # noqa: N802
        self.waits.append((arguments[8], -1))


def test_a_mixed_launch_waits_and_is_waited_for() -> None:
    cupy = FakeCupy(current=50)
    cupy.getDevice = lambda: 0  # type: ignore[attr-defined]
    launch = Launch("plan_offsets", "kvc_plan_offsets", 1, 32, np.zeros((), [("field", "u8")]))
    prepared = PreparedLaunch(FakeDriver(cupy), launch, kernel=0)
    PreparedLaunches(cupy, [prepared], [OF_TORCH, OF_CUPY]).launch(None)
    assert cupy.waits == [(40, 50), (40, -1), (50, 40)]
