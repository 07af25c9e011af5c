"""A step against batch, context, pool and number of buffers, up to a full H200's pool. `scale` has the model beside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import scale
from .batches import Work
from .bench_step import step_case

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .case import Case

WORK = "entries to verify"

_STEP = Work(bs=256, prefix=4096, chain="affine", num_buffers=4)

WORKS = (
    *(replace(_STEP, bs=bs) for bs in (1, 32, 256, 1024, 4096)),
    *(replace(_STEP, prefix=prefix) for prefix in (256, 32768)),
    *(replace(_STEP, num_buffers=count) for count in (1, 2, 8, 12)),
    *(replace(_STEP, num_slots=slots) for slots in (10_000_000, 40_000_000)),
    replace(_STEP, prefix=131072),
    replace(_STEP, prefix=131072, num_slots=40_000_000),
)
QUICK = (replace(_STEP, bs=1), replace(_STEP, bs=32))


def cases() -> Iterator[Case]:
    for work in dict.fromkeys(WORKS):
        case = step_case(work, is_quick=work in QUICK)
        yield replace(case, series=f"{work.num_buffers} buffers", aims={}, published={})


def model_table(times: Mapping[str, float], environment: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The model beside what was measured: microseconds by a case's name."""
    head = ["requests x prefix", "buffers", "pool slots", "canary memory", "model us", "us", "of a 30 ms step"]
    lines = []
    for work in dict.fromkeys(WORKS):
        model = scale.cost_of(work, environment).total
        measured = times.get(work.name)
        lines.append(
            [
                f"{work.bs:,} x {work.prefix:,}",
                str(work.num_buffers),
                f"{work.pool_slots:,}",
                f"{scale.canary_bytes(work) / 1e6:,.0f} MB",
                f"{model:,.0f}",
                "-" if measured is None else f"{measured:,.0f}",
                f"{(model if measured is None else measured) / scale.STEP_US:.2%}",
            ]
        )
    return head, lines
