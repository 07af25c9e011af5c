"""The picture of a replay: batch size, planned entries and pool use over time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from .catalogue import error

if TYPE_CHECKING:
    from .replay_result import ReplaySeries, ReplaySummary

BLUE, VIOLET, RED = "#2166ac", "#6a51a3", "#c0392b"
LIVE, CACHED, FREE = "#238b6b", "#a6dbc3", "#f1f3f4"
INK, GRID = "#33373b", "#d9dde1"
TITLE: Final[dict[str, Any]] = {"loc": "left", "fontsize": 10.5, "fontweight": "bold", "color": INK}


def require_matplotlib() -> None:
    """Raise the error that names the extra, where matplotlib is missing."""
    try:
        import_module("matplotlib")
    except ImportError as reason:
        raise error("kv-canary-matplotlib-must-be-installed", name="matplotlib", got=repr(reason)) from reason


def draw_replay(file: BinaryIO, title: str, summary: ReplaySummary, series: ReplaySeries) -> None:
    """Write a PNG of three panels over one time axis to `file`."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # No pyplot: it keeps global state and may choose a backend that wants a display.
    figure = Figure(figsize=(11, 8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.15))
    for panel in panels:
        style_panel(panel)
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))
        panel.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    unit, seconds = clock(series)
    time = series.time_s / seconds
    draw_batch(panels[0], time, series)
    draw_entries(panels[1], time, series, summary.verify_capacity)
    draw_pool_use(panels[2], time, series, summary.pool_slots)
    panels[2].set_xlabel(f"time on the engine's clock ({unit})")
    if time.size > 1:
        panels[2].set_xlim(time[0], time[-1])
    for panel in panels:
        # Beside the panel: inside, a legend hides data.
        panel.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9, labelcolor=INK)

    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.01, 0.957, _subtitle(summary), ha="left", va="top", fontsize=10, color=INK)
    figure.savefig(file, format="png")


def clock(series: ReplaySeries) -> tuple[str, int]:
    """Unit of a time axis, and seconds of it: short replays are drawn in seconds."""
    return ("minutes", 60) if series.time_s[-1] > 180 else ("seconds", 1)


def draw_batch(panel: Any, time: Any, series: ReplaySeries) -> None:
    """Requests of the batch over time."""
    _draw_band(panel, time, series.batch_mean, series.batch_max, BLUE)
    panel.set_title("Batch size (requests)", **TITLE)
    panel.set_ylim(bottom=0)


def draw_entries(panel: Any, time: Any, series: ReplaySeries, capacity: int) -> None:
    """Entries of the verify plan over time, below what it can hold."""
    _draw_band(panel, time, series.entries_mean, series.entries_max, VIOLET)
    panel.axhline(capacity, color=RED, linewidth=1.2, linestyle=(0, (5, 3)), label="capacity")
    panel.set_title("Planned entries (slots to verify a step)", **TITLE)
    panel.set_ylim(bottom=0)


def draw_pool_use(panel: Any, time: Any, series: ReplaySeries, slots: int) -> None:
    """What the pool's slots are used for over time."""
    panel.stackplot(
        time,
        series.live_slots,
        series.cached_slots,
        slots - series.live_slots - series.cached_slots,
        labels=("live", "cached prefixes", "free"),
        colors=(LIVE, CACHED, FREE),
        linewidth=0,
    )
    panel.set_title("Pool use (slots)", **TITLE)
    panel.set_ylim(0, slots)


def style_panel(panel: Any) -> None:
    """Light grid, no frame."""
    panel.set_axisbelow(True)
    panel.grid(color=GRID, linewidth=0.6)
    panel.tick_params(colors=INK, length=0, labelsize=9)
    panel.xaxis.label.set_color(INK)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(GRID)


def _draw_band(panel: Any, time: Any, mean: Any, most: Any, color: str) -> None:
    """The mean as a line; the room up to the largest value as a light band."""
    panel.fill_between(time, mean, np.maximum(mean, most), color=color, alpha=0.3, linewidth=0, label="largest")
    panel.plot(time, mean, color=color, linewidth=1.0, label="mean")


def _subtitle(summary: ReplaySummary) -> str:
    parts = [
        f"{summary.steps:,} steps",
        f"{summary.finished:,} requests",
        f"{summary.total_entries:,} entries planned on {summary.device}",
        f"{summary.overflows:,} overflows",
    ]
    if summary.differences is not None:
        parts.append(f"{summary.differences:,} differences from the reference")
    return "  ·  ".join(parts)
