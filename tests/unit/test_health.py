"""What a canary's health says, and when its watchdog complains."""

from __future__ import annotations

import json
import logging
import threading
from types import SimpleNamespace

import pytest

from cupy_kvcanary import KvCanaryError
from cupy_kvcanary import health as health_module
from cupy_kvcanary.constants import CanaryLaunchTag, FailReason, StatusBit
from cupy_kvcanary.health import Health, Watchdog
from tests.helpers.health import UNUSED, StubCanary

HEALTH = Health(
    steps=1200,
    last_step_s=100.0,
    protected_tokens=88310,
    verified_entries=4120332,
    written_entries=131072,
    launches={CanaryLaunchTag.HEAD_K_FULL: 2400, CanaryLaunchTag.TAIL_K_FULL: 2400, CanaryLaunchTag.SWEEP_K_FULL: 0},
    skipped_checks=12,
    overflowed_steps=1,
    violations=5,
    violations_by_reason={FailReason.VERIFY_CHAIN_HASH: 2, FailReason.VERIFY_POSITION: 1, FailReason.WRITE_TOKEN: 0},
    lost_violations=3,
    status=StatusBit.SLOT_OUT_OF_MAPPING | StatusBit.PREFIX_LEN_OUT_OF_RANGE,
    errors=0,
)


@pytest.fixture
def at_101_25_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "time", SimpleNamespace(monotonic=lambda: 101.25))


@pytest.mark.usefixtures("at_101_25_s")
class TestHealth:
    def test_as_a_block(self) -> None:
        assert str(HEALTH).splitlines() == [
            "steps             1,200, the last one 1.2 s ago",
            "protected tokens  88,310",
            "entries           4,120,332 verified, 131,072 written",
            "launches          HEAD_K_FULL 2,400, TAIL_K_FULL 2,400",
            "skipped checks    12",
            "overflowed steps  1",
            "violations        5: VERIFY_CHAIN_HASH 2, VERIFY_POSITION 1",
            "lost violations   3",
            "status bits       PREFIX_LEN_OUT_OF_RANGE, SLOT_OUT_OF_MAPPING",
            "errors            0",
        ]

    def test_as_a_line(self) -> None:
        assert HEALTH.line() == (
            "steps=1200 protected_tokens=88310 verified_entries=4120332 written_entries=131072 launches=4800 "
            "skipped_checks=12 overflowed_steps=1 violations=5 lost_violations=3 "
            "status=PREFIX_LEN_OUT_OF_RANGE,SLOT_OUT_OF_MAPPING errors=0"
        )

    def test_as_json(self) -> None:
        read_back = json.loads(json.dumps(HEALTH.to_dict()))
        assert read_back["launches"] == {"HEAD_K_FULL": 2400, "TAIL_K_FULL": 2400, "SWEEP_K_FULL": 0}
        assert read_back["violations_by_reason"] == {"VERIFY_CHAIN_HASH": 2, "VERIFY_POSITION": 1, "WRITE_TOKEN": 0}
        assert (read_back["steps"], read_back["idle_s"]) == (1200, 1.25)
        assert read_back["status"] == ["PREFIX_LEN_OUT_OF_RANGE", "SLOT_OUT_OF_MAPPING"]

    def test_json_lines_and_metrics_leave_no_field_out(self) -> None:
        assert set(HEALTH.to_dict()) == (set(vars(HEALTH)) - {"last_step_s"}) | {"idle_s"}

    def test_of_a_canary_that_never_ran(self) -> None:
        assert UNUSED.idle_s is None
        assert str(UNUSED).splitlines()[0] == "steps             0"
        assert "launches          none" in str(UNUSED)
        assert UNUSED.line().endswith("status=none errors=0")


class ByHand:
    """A stub canary under a watchdog of 60 s that a test looks through by hand, at times that it chooses."""

    def __init__(self) -> None:
        self.canary = StubCanary()
        self.now = 1000.0
        self.complaints: list[str] = []
        self.watchdog = Watchdog(self.canary, on_silence=self.complaints.append, clock=lambda: self.now)

    def look_at(self, now: float) -> None:
        self.now = now
        self.watchdog.look()


@pytest.fixture
def watched() -> ByHand:
    return ByHand()


def test_a_canary_that_steps_and_launches_is_left_alone(watched: ByHand, caplog: pytest.LogCaptureFixture) -> None:
    for now in range(1000, 2000, 20):
        watched.canary.step(now)
        watched.look_at(now + 1)
    assert caplog.record_tuples == []
    assert watched.complaints == []


def test_silence_is_complained_about_once_and_its_end_is_told(
    watched: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    watched.canary.step(1000)
    for now in (1030, 1059, 1090, 1120):
        watched.look_at(now)
    watched.canary.step(1130)
    watched.look_at(1131)
    assert caplog.record_tuples == [
        ("cupy_kvcanary", logging.WARNING, "kv-canary: main: no step and no launch for 60 s; steps so far: 1"),
        ("cupy_kvcanary", logging.WARNING, "kv-canary: main: runs again; steps so far: 2"),
    ]
    assert watched.complaints == ["main: no step and no launch for 60 s; steps so far: 1"]


def test_a_second_silence_is_a_new_one(watched: ByHand) -> None:
    for now in (1000, 1200, 1400):
        watched.canary.step(now)
        watched.look_at(now + 1)
        watched.look_at(now + 61)
    assert len(watched.complaints) == 3


def test_a_canary_that_never_steps_is_silent(watched: ByHand) -> None:
    watched.look_at(1060)
    assert watched.complaints == ["main: no step and no launch for 60 s; steps so far: 0"]


def test_steps_without_launches_are_complained_about(watched: ByHand, caplog: pytest.LogCaptureFixture) -> None:
    watched.canary.step(1000)
    watched.look_at(1001)
    for now in range(1010, 1100, 10):
        watched.canary.step(now, launched=False)
        watched.look_at(now + 1)
    watched.canary.step(1100)
    watched.look_at(1101)
    assert [text for _, _, text in caplog.record_tuples] == [
        "kv-canary: main: steps are called, but no launch came back for 60 s: does the device hang, or was a graph "
        "captured without the canary?",
        "kv-canary: main: runs again; steps so far: 11",
    ]


def test_the_launches_of_a_step_may_become_known_in_the_next_one(watched: ByHand) -> None:
    watched.canary.step(1000, launched=False)
    for now in range(1050, 2000, 50):
        watched.look_at(now - 1)
        watched.canary.step(now)
    assert watched.complaints == []


def test_after_a_pause_launches_have_the_whole_timeout_to_become_known(watched: ByHand) -> None:
    watched.canary.step(1000)
    watched.look_at(1001)
    watched.look_at(1500)
    for now in (1501, 1502, 1503):
        watched.canary.step(now, launched=False)
        watched.look_at(now)
    assert len(watched.complaints) == 1
    watched.canary.step(1504)
    watched.look_at(1570 - 10)
    assert len(watched.complaints) == 1


def test_launches_of_a_replayed_graph_are_a_sign_of_life(watched: ByHand) -> None:
    for count in range(20):
        watched.canary.set(launches={CanaryLaunchTag.HEAD_K_FULL: count + 1})
        watched.look_at(1000 + 50 * count)
    assert watched.complaints == []


def test_the_thread_complains_and_ends_with_the_block() -> None:
    complained = threading.Event()
    with Watchdog(StubCanary(), timeout_s=0.01, on_silence=lambda _: complained.set()):
        assert complained.wait(timeout=60)
        assert any("cupy_kvcanary watchdog" in thread.name for thread in threading.enumerate())
    assert not any("cupy_kvcanary watchdog" in thread.name for thread in threading.enumerate())


def test_starting_and_stopping_twice_is_harmless_and_it_can_start_again() -> None:
    complained = threading.Semaphore(0)
    watchdog = Watchdog(StubCanary(), timeout_s=0.01, on_silence=lambda _: complained.release())
    watchdog.stop()
    for _ in range(2):
        watchdog.start()
        watchdog.start()
        assert complained.acquire(timeout=60)
        watchdog.stop()
        watchdog.stop()


def test_a_callback_may_stop_the_watchdog() -> None:
    stopped = threading.Event()

    def stop(_: str) -> None:
        watchdog.stop()
        stopped.set()

    watchdog = Watchdog(StubCanary(), timeout_s=0.01, on_silence=stop)
    watchdog.start()
    assert stopped.wait(timeout=60)


def test_the_thread_survives_a_callback_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    canary, raised, complained_again = StubCanary(), threading.Event(), threading.Event()

    def fail_first(_: str) -> None:
        if raised.is_set():
            complained_again.set()
        else:
            raised.set()
            raise ZeroDivisionError

    with Watchdog(canary, timeout_s=0.01, on_silence=fail_first):
        assert raised.wait(timeout=60)
        # A sign of life, and silence again: the launches' clock starts anew.
        canary.set(launches={CanaryLaunchTag.HEAD_K_FULL: 1})
        assert complained_again.wait(timeout=60)
    assert ("cupy_kvcanary", logging.ERROR, "kv-canary: watchdog of main failed and goes on") in caplog.record_tuples


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_a_finite_positive_number(timeout_s: float) -> None:
    with pytest.raises(KvCanaryError, match=r"timeout_s must be a finite number above 0"):
        Watchdog(StubCanary(), timeout_s=timeout_s)
