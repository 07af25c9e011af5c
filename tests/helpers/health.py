"""Canaries that do nothing, for tests of what reads a canary's health."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupy_kvcanary.canary_config import CanaryMemory
from cupy_kvcanary.constants import CanaryLaunchTag, StatusBit
from cupy_kvcanary.health import Health

UNUSED = Health(
    steps=0,
    last_step_s=None,
    protected_tokens=0,
    verified_entries=0,
    written_entries=0,
    launches={},
    skipped_checks=0,
    overflowed_steps=0,
    violations=0,
    violations_by_reason={},
    lost_violations=0,
    status=StatusBit(0),
    errors=0,
)


class StubCanary:
    """Its health is what a test says."""

    memory = CanaryMemory(records=4096, log=512, plans=64, pinned_host=0)

    def __init__(self, name: str = "main", rank: int | None = None) -> None:
        self.name = name
        self.rank = rank
        self.state = UNUSED

    def health(self) -> Health:
        return self.state

    def set(self, **counters: Any) -> None:
        self.state = replace(self.state, **counters)

    def step(self, now: float, *, launched: bool = True) -> None:
        """One step, whose launches ran or did not."""
        launches = self.state.launches.get(CanaryLaunchTag.HEAD_K_FULL, 0) + launched
        self.set(steps=self.state.steps + 1, last_step_s=now, launches={CanaryLaunchTag.HEAD_K_FULL: launches})
