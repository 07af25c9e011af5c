"""The charts of a replay's page: inline SVG that takes its colours from the page around it."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np

from . import plots
from .plots import INK, TITLE, require_matplotlib, style_panel
from .pool_plot import draw_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from .injections import FaultOutcome
    from .replay_result import ReplaySeries, ReplaySummary

_MARK: Final = "#d97706"
COLORS: Final = {
    plots.BLUE: ("blue", "#2166ac", "#6cb0f0"),
    plots.VIOLET: ("violet", "#6a51a3", "#b39df0"),
    plots.RED: ("red", "#c0392b", "#ff7b6b"),
    plots.LIVE: ("live", "#238b6b", "#3fb58f"),
    plots.CACHED: ("cached", "#a6dbc3", "#2b5c4a"),
    plots.FREE: ("free", "#eceff1", "#23282e"),
    plots.GRID: ("grid", "#d9dde1", "#3a4149"),
    _MARK: ("mark", "#d97706", "#f2a33a"),
}
"""Of each colour of the charts: name of the page's variable, and its value on light and on dark ground."""

_WIDTH: Final = 5.9
"""Inches. Narrow: a chart is read on a phone, too."""
_LABELS_APART: Final = 0.022
"""Least distance of two numbers above a chart, in widths of it."""


class _Clock(NamedTuple):
    """Of the time axis."""

    unit: str
    seconds: int


def charts_over_time(summary: ReplaySummary, series: ReplaySeries, outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Batch, entries and pool use over time, and what the canary found and took, each with the injections marked."""
    clock = _Clock(*plots.clock(series))
    time = series.time_s / clock.seconds
    injections = {
        number: outcome.time_s / clock.seconds for number, outcome in enumerate(outcomes, 1) if outcome.injection
    }
    violating = time[series.violations > 0]
    panels: list[tuple[str, Callable[[Any], object]]] = [
        ("Batch size over time", lambda panel: plots.draw_batch(panel, time, series)),
        ("Planned entries over time", lambda p: plots.draw_entries(p, time, series, summary.verify_capacity)),
        ("Pool use over time", lambda panel: plots.draw_pool_use(panel, time, series, summary.pool_slots)),
    ]
    if summary.canary is not None:
        panels.append(("Canary time over time", lambda panel: _draw_canary_time(panel, time, series)))
    if violating.size:
        panels.append(("Violations over time", lambda panel: _draw_violations(panel, time, series.violations)))
    return [_over_time(label, draw, time, clock, injections, violating) for label, draw in panels]


def delay_chart(outcomes: Sequence[FaultOutcome]) -> str:
    """Steps from each injected fault until its report was there."""
    injected = [(number, outcome) for number, outcome in enumerate(outcomes, 1) if outcome.injection is not None]
    figure = _figure(1.0 + 0.24 * len(injected))
    panel = figure.subplots()
    from matplotlib.ticker import MaxNLocator

    style_panel(panel)
    panel.grid(visible=False, axis="y")
    for row, (_, outcome) in enumerate(injected):
        if outcome.delay is None:
            panel.annotate(" not found", (0, row), color=plots.RED, fontsize=9, fontweight="bold", va="center")
        else:
            panel.barh(row, outcome.delay, height=0.62, color=plots.BLUE)
            panel.annotate(f" {outcome.delay:,}", (outcome.delay, row), color=INK, fontsize=9, va="center")
    panel.set_yticks(range(len(injected)), [f"{outcome.fault}  {number}" for number, outcome in injected])
    panel.invert_yaxis()
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.set_xlim(0, 1.12 * max([1, *(outcome.delay or 0 for _, outcome in injected)]))
    panel.set_title("Detection delay (steps)", **TITLE)
    return _svg(figure, "Detection delay of each fault")


def pool_chart(page_owners: NDArray[np.int32], bad_slots: Iterable[int], page_size: int) -> str:
    """The pool with the bad slots marked."""
    figure = _figure(3.1)
    draw_pool(figure.subplots(), np.repeat(page_owners, page_size), bad_slots, page_size=page_size)
    return _svg(figure, "The pool: which row has which slot, and the bad slots")


def _over_time(
    label: str,
    draw: Callable[[Any], object],
    time: NDArray[np.float64],
    clock: _Clock,
    injections: dict[int, float],
    violating: NDArray[np.float64],
) -> str:
    figure = _figure(2.35)
    panel = figure.subplots()
    style_panel(panel)
    from matplotlib.ticker import EngFormatter, MaxNLocator

    draw(panel)
    if panel.get_yscale() == "linear":
        panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))
    if time.size > 1:
        panel.set_xlim(time[0], time[-1])
    panel.set_xlabel(clock.unit, fontsize=9)
    if injections:  # whose numbers stand between panel and title
        panel.set_title(panel.get_title(loc="left"), **TITLE, pad=13)
    _mark(panel, injections, violating)
    handles, labels = panel.get_legend_handles_labels()
    if handles:
        # Above the panel: inside, a legend hides data.
        panel.legend(
            handles, labels, loc="lower right", bbox_to_anchor=(1.01, 1.06), ncols=4, frameon=False, fontsize=8,
            labelcolor=INK, handlelength=1.1, handletextpad=0.4, columnspacing=0.9, borderpad=0,
        )  # fmt: skip
    return _svg(figure, label)


def _mark(panel: Any, injections: dict[int, float], violating: NDArray[np.float64]) -> None:
    """Numbered lines where faults were injected, ticks at the bottom where violations were read."""
    first, last = panel.get_xlim()
    labelled = -np.inf
    for number, time in sorted(injections.items(), key=lambda item: item[1]):
        panel.axvline(time, color=_MARK, linewidth=0.9, linestyle=(0, (3, 2)))
        if time - labelled >= _LABELS_APART * (last - first):
            labelled = time
            panel.annotate(
                str(number), (time, 1), (0, 1.5), xycoords=("data", "axes fraction"), textcoords="offset points",
                color=_MARK, fontsize=6.5, ha="center", annotation_clip=False,
            )  # fmt: skip
    bottom = np.zeros_like(violating)
    if violating.size:
        panel.plot(
            violating, bottom, "^", color=plots.RED, markersize=4.5, clip_on=False, zorder=4,
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip


def _draw_violations(panel: Any, time: NDArray[np.float64], violations: NDArray[np.int64]) -> None:
    panel.vlines(time[violations > 0], 0, violations[violations > 0], color=plots.RED, linewidth=2)
    panel.set_yscale("symlog", linthresh=1)
    panel.set_ylim(0, 2 * max(10, violations.max()))
    panel.set_yticks([0, *(10**power for power in range(len(str(violations.max()))))])
    panel.set_yticks([], minor=True)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.set_title("Violations read", **TITLE)


def _draw_canary_time(panel: Any, time: NDArray[np.float64], series: ReplaySeries) -> None:
    panel.fill_between(time, 0, series.canary_us_mean / 1000, color=plots.VIOLET, alpha=0.3, linewidth=0)
    panel.plot(time, series.canary_us_mean / 1000, color=plots.VIOLET, linewidth=1.0)
    panel.set_title("The canary's time (ms a step, mean)", **TITLE)
    panel.set_ylim(bottom=0)


def _figure(height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    # No pyplot: it keeps global state and may choose a backend that wants a display.
    return Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element: no links, ids of its own, and the page's colours."""
    for panel in figure.axes:
        panel.set_facecolor("none")
    file = io.StringIO()
    figure.savefig(file, format="svg", dpi=200)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" aria-label="{escape(label)}" \1>', text)
    # Other charts of the page have the same names within.
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1chart-{crc32(text.encode()):08x}-", text)
    text = text.replace(INK, "currentColor")
    for color, (name, _, _) in COLORS.items():
        text = text.replace(color, f"var(--{name})")
    return text
