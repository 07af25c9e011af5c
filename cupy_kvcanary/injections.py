"""Which faults a replay injects and when, and what became of them: found, how soon, or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .catalogue import error
from .constants import FailReason
from .faults import FAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .faults import Fault, FaultSite, Injection
    from .violations import Violation

ALL: Final = "all"


class AskedFault(NamedTuple):
    """A fault that a replay is to inject."""

    fault: Fault
    step: int | None
    """In this step, or the next one that has a target; None: somewhere in the middle."""


def parse_faults(texts: Sequence[str], *, has_window: bool) -> list[AskedFault]:
    """The faults of `--inject FAULT[@STEP]` options; `all` stands for every one that this replay can have."""
    asked = []
    for text in texts:
        name, at, step = text.partition("@")
        if (name != ALL and name not in FAULTS) or (at and not (step.isascii() and step.isdecimal())):
            known = ", ".join([ALL, *FAULTS])
            raise error("kv-canary-fault-must-be-known", name="inject", known=known, got=repr(text))
        faults = [fault for fault in FAULTS.values() if has_window or not fault.needs_window]
        if name != ALL:
            faults = [FAULTS[name]]
            if faults[0].needs_window and not has_window:
                raise error("kv-canary-fault-must-be-possible", name="inject", needed="a window", got=repr(text))
        asked += [AskedFault(fault, int(step) if at else None) for fault in faults]
    return asked


_NO_REASON: Final = FailReason(0)


@dataclass(frozen=True, kw_only=True)
class FaultOutcome:
    """What became of a fault."""

    fault: str
    injection: Injection | None = None
    """None: the replay had no target for it."""
    time_s: float = 0.0
    """When it was injected, on the engine's clock."""
    found_step: int | None = None
    """Step in which the first report of it was read; None: not found."""
    reasons: FailReason = _NO_REASON
    """Of all its violations."""
    violations: int = 0

    @property
    def delay(self) -> int | None:
        """Steps from the injection until the report was there."""
        return None if self.injection is None or self.found_step is None else self.found_step - self.injection.step


class _Waiting(NamedTuple):
    fault: Fault
    step: int
    finished: int
    """Due from this step and so many finished requests on."""


class Injections:
    """Injects faults one after another: the next one when the last was found and its damage undone, or given up.

    Faults without a step are due when a seeded share of the requests is finished, between 10% and 70%, spread evenly.
    """

    def __init__(
        self, asked: Sequence[AskedFault], *, num_requests: int, steps_to_find: int, rng: np.random.Generator
    ) -> None:
        self._steps_to_find = steps_to_find
        shares = 0.1 + 0.6 * (np.arange(len(asked)) + rng.random(len(asked))) / max(len(asked), 1)
        self._waiting = [
            _Waiting(fault, 0, int(share * num_requests)) if step is None else _Waiting(fault, step, 0)
            for (fault, step), share in zip(asked, shares.tolist(), strict=True)
        ]
        self._current: _Waiting | None = None
        self._outcome: FaultOutcome | None = None
        self._restored_step: int | None = None
        self._done: list[FaultOutcome] = []
        self.false_alarms = 0

    @property
    def outcomes(self) -> tuple[FaultOutcome, ...]:
        """Of every fault: those injected, in that order, then those that had no target."""
        current = [] if self._outcome is None else [self._outcome]
        return (*self._done, *current, *(FaultOutcome(fault=waiting.fault.name) for waiting in self._waiting))

    @property
    def damaged_rows(self) -> tuple[int, ...]:
        """Rows with a fault's damage that was not undone."""
        if self._outcome is None or self._outcome.injection is None or self._restored_step is not None:
            return ()
        return self._outcome.injection.rows

    @property
    def is_found(self) -> bool:
        """Whether the last fault injected was found."""
        return self._outcome is not None and self._outcome.found_step is not None

    def inject(
        self, step: int, time_s: float, finished: int, make_site: Callable[[], FaultSite], *, is_after_step: bool
    ) -> Injection | None:
        """Inject the first fault that is due and has a target, if none is on its way."""
        if not self._waiting or not self._is_settled(step):
            return None
        due = [w for w in self._waiting if step >= w.step and finished >= w.finished]
        due = [w for w in due if w.fault.is_after_step == is_after_step]
        site = make_site() if due else None
        for waiting in due:
            injection = None if site is None else waiting.fault(site)
            if injection is not None:
                self._settle()
                self._waiting.remove(waiting)
                self._current = waiting
                self._outcome = FaultOutcome(fault=injection.fault, injection=injection, time_s=time_s)
                return injection
        return None

    def attribute(self, step: int, violations: Sequence[Violation], lost: int) -> None:
        """Count the violations of a report that was read in `step` as the current fault's, or as false alarms."""
        mine = [violation for violation in violations if self._is_mine(violation)]
        self.false_alarms += len(violations) - len(mine)
        outcome = self._outcome
        if outcome is None or not mine:
            self.false_alarms += lost
            return
        reasons = outcome.reasons
        for violation in mine:
            reasons |= violation.reasons
        self._outcome = replace(
            outcome,
            found_step=step if outcome.found_step is None else outcome.found_step,
            reasons=reasons,
            violations=outcome.violations + len(mine) + lost,
        )

    def must_restore(self, step: int) -> bool:
        """Whether the damage is to be undone: it was found, or it should have been."""
        if not self.damaged_rows or self._outcome is None or self._outcome.injection is None:
            return False
        return self.is_found or step > self._outcome.injection.step + self._steps_to_find + 1

    def restored(self, step: int) -> None:
        """The damage is undone: violations that are found from this step on are none of the fault's."""
        self._restored_step = step

    def withdraw(self) -> None:
        """The target is gone before anything read it (it was preempted): the fault is to be injected again."""
        if self._current is not None:
            self._waiting.insert(0, self._current)
        self._current = self._outcome = self._restored_step = None

    def _is_settled(self, step: int) -> bool:
        """Whether no report can be on its way any more that belongs to the last fault."""
        return self._outcome is None or (self._restored_step is not None and step > self._restored_step + 1)

    def _settle(self) -> None:
        if self._outcome is not None:
            self._done.append(self._outcome)
        self._outcome = self._restored_step = None

    def _is_mine(self, violation: Violation) -> bool:
        if self._outcome is None or self._outcome.injection is None:
            return False
        if self._restored_step is not None and violation.step >= self._restored_step:
            return False
        injection = self._outcome.injection
        return violation.request_row in injection.rows or (
            violation.group == "full" and violation.slot in injection.slots
        )
