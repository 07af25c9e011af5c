"""What a replay leaves: a summary, series over time, faults and reports."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from .constants import StatusBit
    from .injections import FaultOutcome
    from .replay_canary import CanarySummary
    from .reports import Report


class Percentiles(NamedTuple):
    """Of a value over all steps."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class ReplaySummary:
    """What a replay did. `batch` counts real requests, without padding."""

    device: str
    steps: int
    requests: int
    """Requests given."""
    finished: int
    """Requests that ran to their end; fewer than given only when interrupted."""
    preempted: int
    largest_batch: int
    batch: Percentiles
    entries: Percentiles
    """Verify entries that a step's plan asks for, before any cut by the capacity."""
    total_entries: int
    verify_capacity: int
    overflows: int
    """Steps that asked for more entries than the capacity."""
    pool_slots: int
    evicted_blocks: int
    shared_prefix_share: float
    """Of the prompt tokens, those found in the cache."""
    plan_us_p50: float
    """Microseconds from the launch until the plan is there, as the host sees it."""
    plan_us_p99: float
    wall_s: float
    differences: int | None
    """Output values that differ from the straight computation; None without `check`."""
    status: StatusBit
    """What the plans found wrong in their inputs (0: nothing)."""
    interrupted: bool
    canary: CanarySummary | None
    """None where the canary was off."""


@dataclass(frozen=True, kw_only=True)
class ReplaySeries:
    """The replay over time, in at most `SERIES_POINTS` points of equally many steps each."""

    time_s: NDArray[np.float64]
    """Start of the point's first step on the engine's clock, seconds."""
    batch_mean: NDArray[np.float64]
    batch_max: NDArray[np.int32]
    entries_mean: NDArray[np.float64]
    entries_max: NDArray[np.int64]
    live_slots: NDArray[np.float64]
    """Mean slots of pages that a request uses."""
    cached_slots: NDArray[np.float64]
    """Mean slots of cached prefix blocks that no request uses."""
    canary_us_mean: NDArray[np.float64]
    """Mean microseconds of a step in the canary."""
    violations: NDArray[np.int64]
    """Violations that were read in the point's steps."""


class ReplayResult(NamedTuple):
    """All that a replay leaves."""

    summary: ReplaySummary
    series: ReplaySeries
    outcomes: tuple[FaultOutcome, ...] = ()
    """What became of each fault that was to be injected."""
    reports: tuple[Report, ...] = ()
    """The canary's first reports, up to `KEPT_REPORTS`."""
    page_owners: Mapping[int, NDArray[np.int32]] = MappingProxyType({})
    """Of each step with an injection: the row that has each page, -1 where none has it."""

    @property
    def is_good(self) -> bool:
        """No plan differs, no false alarm or failed call of the canary, and every fault was found."""
        canary = self.summary.canary
        is_quiet = canary is None or not (canary.false_alarms or canary.errors)
        return is_quiet and not self.summary.differences and all(o.found_step is not None for o in self.outcomes)


class ReplayProgress(NamedTuple):
    """Where a replay stands."""

    steps: int
    finished: int
    requests: int
    batch: int
    entries: int
