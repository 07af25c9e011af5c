"""What a replay says: events as they come, and its tables. Readable without rich."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, TextIO

from .constants import StatusBit
from .faults import Injection
from .violations import reason_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .injections import FaultOutcome
    from .replay_canary import CanarySummary
    from .replay_result import ReplaySummary
    from .reports import Report

LINES_PER_FAULT = 3


@contextlib.contextmanager
def canary_log_is_ours() -> Iterator[None]:
    """Keeps the canary's log off stderr where nobody set logging up: `Events` shows what is in it."""
    logger, handler = logging.getLogger("cupy_kvcanary"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Events:
    """Writes each fault that is injected and each violation on a line; of a fault's violations the first few."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._room = LINES_PER_FAULT

    def __call__(self, event: Injection | Report) -> None:
        """Show one event."""
        if isinstance(event, Injection):
            self._room = LINES_PER_FAULT
            self._print(f"step {event.step:,}: {event.fault}: {event.what}")
            return
        for line in event.lines()[: self._room]:
            self._print(f"    {line}")
        count = len(event.violations) + event.lost
        if self._room and count > self._room:
            self._print(f"    and {count - self._room:,} more")
        self._room = max(self._room - count, 0)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


def summary_table(summary: ReplaySummary) -> str:
    """Two aligned columns."""
    rows = summary_rows(summary)
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def summary_rows(summary: ReplaySummary) -> dict[str, str]:
    """Names and values, in words."""

    def spread(values: tuple[int, ...]) -> str:
        return "  ".join(f"{name} {value:,}" for name, value in zip(("p50", "p90", "p99", "max"), values, strict=True))

    return {
        "device": summary.device,
        "steps": f"{summary.steps:,}",
        "requests finished": f"{summary.finished:,} of {summary.requests:,}",
        "preemptions": f"{summary.preempted:,}",
        "largest batch": f"{summary.largest_batch:,}",
        "batch": spread(summary.batch),
        "planned entries a step": spread(summary.entries),
        "planned entries": f"{summary.total_entries:,}",
        "overflows": f"{summary.overflows:,} steps over the capacity of {summary.verify_capacity:,}",
        "pool": f"{summary.pool_slots:,} slots, {summary.evicted_blocks:,} blocks evicted",
        "prompt tokens shared": f"{summary.shared_prefix_share:.1%}",
        "plan time a step": f"median {summary.plan_us_p50:.0f} us, p99 {summary.plan_us_p99:.0f} us",
        "wall time": f"{summary.wall_s:.1f} s",
        "status bits": ", ".join(str(bit.name) for bit in StatusBit if bit in summary.status) or "none",
        "differences": "not checked (--check)" if summary.differences is None else f"{summary.differences:,}",
        **_canary_rows(summary.canary),
    }


def _canary_rows(canary: CanarySummary | None) -> dict[str, str]:
    if canary is None:
        return {"canary": "off (--no-canary)"}
    every = "every step" if canary.verify_interval == 1 else f"every {canary.verify_interval:,} steps"
    rows = {
        "canary": f"{canary.buffers} buffers, verified {every}, stamped every step",
        "slots verified": f"{canary.verified_entries:,} in all buffers",
        "records stamped": f"{canary.stamped_records:,}",
        "violations": f"{canary.violations:,}",
        "false alarms": f"{canary.false_alarms:,}",
        "steps not verified": f"{canary.overflows:,} over the capacity",
        "canary memory": f"announced {_mebibytes(canary.memory_announced)}, taken {_mebibytes(canary.memory_taken)}",
        "canary time a step": f"median {canary.step_us_p50:.0f} us, p99 {canary.step_us_p99:.0f} us",
    }
    return rows | ({"canary errors": f"{canary.errors:,} calls failed"} if canary.errors else {})


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def outcome_table(outcomes: Sequence[FaultOutcome]) -> str:
    """A line for each fault: injected, found, after how many steps, violations and their reasons."""
    lines = outcome_rows(outcomes)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def outcome_rows(outcomes: Sequence[FaultOutcome]) -> list[tuple[str, ...]]:
    """The cells of `outcome_table`, names of the columns first."""
    lines: list[tuple[str, ...]] = [("fault", "injected at", "found at", "after", "violations", "reasons")]
    for outcome in outcomes:
        injected = "no target" if outcome.injection is None else f"step {outcome.injection.step:,}"
        if outcome.delay is None:
            found, after = "not found" if outcome.injection is not None else "", ""
        else:
            found, after = f"step {outcome.found_step:,}", f"{outcome.delay:,} step{'s' * (outcome.delay != 1)}"
        reasons = ", ".join(name.removeprefix("VERIFY_").lower() for name in reason_names(outcome.reasons))
        count = f"{outcome.violations:,}" if outcome.injection is not None else ""
        lines.append((outcome.fault, injected, found, after, count, reasons))
    return lines
