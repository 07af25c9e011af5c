"""Violations as the launchers find them on the CPU: small caches, real verifies and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.reports import Report, decode
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer
from tests.helpers.verify import Batch, make_plan, verify_batch, verify_plan
from tests.helpers.write import write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cupy_kvcanary.reports import Violation

NUMPY = ArrayBackend("numpy")
STEP = 812


def cache(rows: dict[int, tuple[list[int], list[int]]], **options: Any) -> HostBuffer:
    """A buffer of 64 slots in which each row's (slots, tokens) are stamped."""
    buffer = HostBuffer.empty(64, is_detailed=True, **options)
    for slots, tokens in rows.values():
        buffer.stamp(slots, tokens)
    return buffer


def batch_of(rows: dict[int, list[int]], **options: Any) -> Batch:
    """Each row of the page table with its slots, read in full."""
    table = np.zeros((6, 32), np.int32)
    for row, slots in rows.items():
        table[row, : len(slots)] = slots
    return Batch(table, list(rows), [len(slots) for slots in rows.values()], **options)


def decoded(buffers: Sequence[HostBuffer], page_size: int = 1) -> tuple[Violation, ...]:
    """The violations of the buffers' rings."""
    found: tuple[Violation, ...] = ()
    for buffer in buffers:
        count = min(buffer.violation_count, buffer.ring_capacity)
        details = buffer.details[:count] if buffer.is_detailed else None
        found += decode(buffer.ring[:count], details, step=STEP, page_size=page_size)
    return found


def report_of(violations: Sequence[Violation], **options: Any) -> Report:
    return Report(tuple(violations), **{"step": STEP, "lost": 0, "canary": "canary", **options})


def verified(buffers: HostBuffer | list[HostBuffer], batch: Batch, page_size: int = 1, **options: Any) -> Report:
    """What verifying a batch reports."""
    buffers = buffers if isinstance(buffers, list) else [buffers]
    verify_batch(NUMPY, buffers, batch, **options)
    return report_of(decoded(buffers, page_size))


def swept(buffer: HostBuffer, batch: Batch, page_size: int = 1) -> Report:
    """What verifying the same entries by a plan reports: nothing is known of requests then."""
    verify_plan(NUMPY, [buffer], make_plan(NUMPY, batch.entries()), check_tokens=batch.check_tokens)
    return report_of(decoded([buffer], page_size))


def written(buffer: HostBuffer, arguments: dict[str, Any]) -> Report:
    """What a write reports."""
    write(NUMPY, [buffer], arguments)
    return report_of(decoded([buffer]))


def patterns(report: Report) -> dict[tuple[int | None, int], tuple[str, int | None]]:
    """(pattern, suspect) by (position, slot)."""
    pairs = zip(report.violations, report.diagnoses, strict=True)
    return {(v.position, v.slot): (d.pattern.value, d.suspect) for v, d in pairs}


def summary(report: Report) -> list[tuple[str, list[int], list[int]]]:
    """(pattern, slots that are wrong themselves, slots that follow) of each finding."""
    return [
        (finding.pattern.value, [v.slot for v in finding.suspicious], [v.slot for v in finding.followers])
        for finding in report.findings
    ]
