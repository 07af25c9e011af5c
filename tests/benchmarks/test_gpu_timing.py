"""How GPU time is taken, on a made-up CuPy: what is captured, how often it is replayed, and what a failure leaves."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.timing import LAUNCHES_PER_GRAPH, REPLAYS, Gpu, Time


class MadeUpCupy:
    """One stream with a clock, which each call and replay of a graph moves."""

    def __init__(self) -> None:
        self.us = 0.0
        self.captured_us: float | None = None
        self.replays = 0
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking: self.stream(),
            Event=lambda: Event(self),
            Device=lambda: SimpleNamespace(synchronize=lambda: None),
            get_elapsed_time=lambda start, end: (end.at - start.at) / 1000,
            get_current_stream=self.stream,
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
        )
        self.RawModule = lambda code: None

    def stream(self) -> Any:
        stream = contextlib.nullcontext(SimpleNamespace())
        for name in ("begin_capture", "end_capture"):
            setattr(stream, name, getattr(self, name))
        return stream

    def work(self, us: float) -> None:
        if self.captured_us is None:
            self.us += us
        else:
            self.captured_us += us

    def begin_capture(self) -> None:
        assert self.captured_us is None
        self.captured_us = 0.0

    def end_capture(self) -> Any:
        assert self.captured_us is not None
        us, self.captured_us = self.captured_us, None

        def launch(stream: Any) -> None:
            self.replays += 1
            self.work(us)

        return SimpleNamespace(upload=lambda stream: None, launch=launch)


class Event:
    def __init__(self, cupy: MadeUpCupy) -> None:
        self._cupy = cupy
        self.at = 0.0

    def record(self, stream: Any) -> None:
        self.at = self._cupy.us

    def synchronize(self) -> None:
        pass


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> MadeUpCupy:
    made_up = MadeUpCupy()
    monkeypatch.setitem(sys.modules, "cupy", made_up)  # type: ignore[arg-type]
    return made_up


def test_a_short_launch_is_captured_many_times_and_replayed_often(cupy: MadeUpCupy) -> None:
    calls = []
    assert Gpu().time(lambda: (calls.append(1), cupy.work(2.0))) == Time(2.0, 2.0, 2.0)
    assert len(calls) == 2 + LAUNCHES_PER_GRAPH
    assert cupy.replays == REPLAYS + 3


def test_a_long_one_less_often(cupy: MadeUpCupy) -> None:
    assert Gpu().time(lambda: cupy.work(1e6)) == Time(1e6, 1e6, 1e6)
    assert cupy.replays == 10 + 3


def test_a_call_that_fails_under_the_capture_ends_it(cupy: MadeUpCupy) -> None:
    def call() -> None:
        if cupy.captured_us is not None:
            raise ValueError("must not be captured")
        cupy.work(1.0)

    with pytest.raises(ValueError, match="must not be captured"):
        Gpu().time(call)
    assert cupy.captured_us is None


def test_host_time_does_not_fill_the_queue_of_launches(cupy: MadeUpCupy) -> None:
    calls = []
    time = Gpu().host_time(lambda: (calls.append(1), cupy.work(1e6)))
    assert 0 < time.low <= time.median <= time.high
    assert len(calls) < 10 * 30
