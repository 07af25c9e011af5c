"""How a canary is doing: its counters, and a watchdog that complains when it stops running."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .catalogue import error
from .constants import StatusBit
from .errors import PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from .canary import Canary
    from .constants import CanaryLaunchTag, FailReason

_logger = logging.getLogger("cupy_kvcanary")


@dataclass(frozen=True, kw_only=True)
class Health:
    """Counters of a canary, from its first step on. Those of the device are known one step late."""

    steps: int
    """Steps that were called."""
    last_step_s: float | None
    """`time.monotonic()` of the last one; None before the first."""
    protected_tokens: int
    """Cached tokens of the last step's batch: those whose records it verified, or would have."""
    verified_entries: int
    written_entries: int
    launches: Mapping[CanaryLaunchTag, int]
    """Launches that ran on the device, of each of its buffers."""
    skipped_checks: int
    """Checks left out: entries of the padding slot and chain checks behind it."""
    overflowed_steps: int
    """Steps whose entries did not fit into the plan and were not verified."""
    violations: int
    """All of them, also those that were lost."""
    violations_by_reason: Mapping[FailReason, int]
    """Violations that were reported, each counted once for each of its reasons."""
    lost_violations: int
    """Violations that the ring had no room for: counted, but not reported."""
    status: StatusBit
    """What the kernels found wrong in their input values, or-ed together."""
    errors: int
    """Calls that failed and were logged instead of raised (mode "log")."""

    @property
    def idle_s(self) -> float | None:
        """Seconds since the last step; None before the first."""
        return None if self.last_step_s is None else time.monotonic() - self.last_step_s

    def line(self) -> str:
        """One line for the log; its form is frozen."""
        return (
            f"steps={self.steps} protected_tokens={self.protected_tokens} verified_entries={self.verified_entries} "
            f"written_entries={self.written_entries} launches={sum(self.launches.values())} "
            f"skipped_checks={self.skipped_checks} overflowed_steps={self.overflowed_steps} "
            f"violations={self.violations} lost_violations={self.lost_violations} "
            f"status={','.join(_status_names(self.status)) or 'none'} errors={self.errors}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `idle_s` stands for the time of the last step."""
        return {
            "steps": self.steps,
            "idle_s": self.idle_s,
            "protected_tokens": self.protected_tokens,
            "verified_entries": self.verified_entries,
            "written_entries": self.written_entries,
            "launches": {tag.name: count for tag, count in self.launches.items()},
            "skipped_checks": self.skipped_checks,
            "overflowed_steps": self.overflowed_steps,
            "violations": self.violations,
            "violations_by_reason": {str(reason.name): count for reason, count in self.violations_by_reason.items()},
            "lost_violations": self.lost_violations,
            "status": _status_names(self.status),
            "errors": self.errors,
        }

    def __str__(self) -> str:
        """Two aligned columns."""
        idle_s = self.idle_s
        reasons = _counts((reason.name, count) for reason, count in self.violations_by_reason.items())
        rows = {
            "steps": f"{self.steps:,}" + ("" if idle_s is None else f", the last one {idle_s:.1f} s ago"),
            "protected tokens": f"{self.protected_tokens:,}",
            "entries": f"{self.verified_entries:,} verified, {self.written_entries:,} written",
            "launches": _counts((tag.name, count) for tag, count in self.launches.items()) or "none",
            "skipped checks": f"{self.skipped_checks:,}",
            "overflowed steps": f"{self.overflowed_steps:,}",
            "violations": f"{self.violations:,}" + (f": {reasons}" if reasons else ""),
            "lost violations": f"{self.lost_violations:,}",
            "status bits": ", ".join(_status_names(self.status)) or "none",
            "errors": f"{self.errors:,}",
        }
        width = max(len(name) for name in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _status_names(status: StatusBit) -> list[str]:
    return [str(bit.name) for bit in StatusBit if bit in status]


def _counts(pairs: Any) -> str:
    """What was counted at all."""
    return ", ".join(f"{name} {count:,}" for name, count in pairs if count)


class Watchdog:
    """Complains when a canary stops running: a daemon thread that looks at its health four times a timeout.

    Two things are complained about, once each, with a WARNING of the logger "cupy_kvcanary": no step and no launch for
    `timeout_s` seconds, counted from `start()` where there was none at all; and steps for that long with no launch that
    ran on the device. When the canary runs again, that is logged too. An engine that replays graphs must `poll()` the
    canary: its steps are not called then, and only the copies of the counters show that it runs.

    Parameters
    ----------
    canary : what to watch; only its `name` and `health()` are used.
    timeout_s : seconds, more than the longest pause that is usual.
    on_silence : called with each complaint, in the watchdog's thread. What it raises is logged.
    clock : the one of `Health.last_step_s`.

    Raises
    ------
    KvCanaryError
        The timeout is no finite number above 0.

    """

    def __init__(
        self,
        canary: Canary,
        *,
        timeout_s: float = 60.0,
        on_silence: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise error("kv-canary-must-be-a-finite-positive-number", name="timeout_s", got=timeout_s)
        self._canary = canary
        self._timeout_s = timeout_s
        self._on_silence = on_silence
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin()

    def start(self) -> None:
        """Start to watch; nothing where it watches already."""
        if self._thread is None:
            self._begin()
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._watch, args=(self._stopping,), name="cupy_kvcanary watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop to watch. The thread has ended when this returns, unless it is the caller (in `on_silence`)."""
        if self._thread is not None:
            self._stopping.set()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self, stopping: threading.Event) -> None:
        while not stopping.wait(self._timeout_s / 4):
            try:
                self.look()
            except Exception:
                # A watchdog that died would be a silence of its own.
                _logger.exception("%swatchdog of %s failed and goes on", PREFIX, self._canary.name)

    def _begin(self) -> None:
        self._trouble: str | None = None
        self._launches = self._steps_at_launch = 0
        self._launched_s = self._stepped_in_vain_s = self._clock()

    def look(self) -> None:
        """Compare the canary's health with that of the last look: what the thread does, over and over."""
        health = self._canary.health()
        now = self._clock()
        launches = sum(health.launches.values())
        if launches != self._launches:
            self._launches, self._steps_at_launch, self._launched_s = launches, health.steps, now
        # The launches of a step are known in the next one.
        if health.steps < self._steps_at_launch + 2:
            self._stepped_in_vain_s = now
        # Launches of a replayed graph are a sign of life too: its steps need not be called.
        idle_s = now - max(self._launched_s, health.last_step_s or -math.inf)
        in_vain_s = now - self._stepped_in_vain_s
        if idle_s >= self._timeout_s:
            self._report("no step", f"no step and no launch for {idle_s:.0f} s; steps so far: {health.steps:,}")
        elif in_vain_s >= self._timeout_s:
            self._report(
                "no launch",
                f"steps are called, but no launch came back for {in_vain_s:.0f} s: does the device hang, or was a "
                "graph captured without the canary?",
            )
        elif self._trouble is not None:
            self._trouble = None
            _logger.warning("%s%s: runs again; steps so far: %s", PREFIX, self._canary.name, f"{health.steps:,}")

    def _report(self, trouble: str, text: str) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        message = f"{self._canary.name}: {text}"
        _logger.warning("%s%s", PREFIX, message)
        if self._on_silence is not None:
            self._on_silence(message)
