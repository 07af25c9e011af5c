"""Time against work, one picture for each benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from cupy_kvcanary.plots import INK, TITLE, require_matplotlib, style_panel

from .report import about

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .runner import Row

_COLORS = ("#2166ac", "#c0392b", "#238b6b", "#6a51a3", "#d98410", "#5d6d7e", "#a6dbc3", "#8c2d04", "#41b6c4", "#dd3497")
_MARKERS = "os^Dv"


def draw_benchmark(file: BinaryIO, name: str, work: str, rows: Sequence[Row], environment: Mapping[str, Any]) -> None:
    """Write a PNG: a line for each series, logarithmic both ways, and the empty kernel as the zero line."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    style_panel(panel)
    for number, (series, points) in enumerate(_lines(rows).items()):
        sizes, medians, lows, highs = zip(*points, strict=True)
        color = _COLORS[number % len(_COLORS)]
        marker = _MARKERS[number // len(_COLORS) % len(_MARKERS)]
        panel.fill_between(sizes, lows, highs, color=color, alpha=0.25, linewidth=0)
        panel.plot(sizes, medians, color=color, linewidth=1.2, marker=marker, markersize=4, label=series)
    if "cupy" in environment:
        zero = environment["empty_us"]["median"]
        panel.axhline(zero, color=INK, linewidth=1, linestyle=(0, (5, 3)), label="empty kernel")
    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(EngFormatter(sep=""))
    panel.set_xlabel(work)
    panel.set_title("Microseconds of a call: median and quartiles", **TITLE)
    panel.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9, labelcolor=INK)
    figure.suptitle(f"{name}\n", x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.01, 0.945, about(environment), ha="left", va="top", fontsize=9, color=INK)
    figure.savefig(file, format="png")


def _lines(rows: Sequence[Row]) -> dict[str, list[tuple[float, float, float, float]]]:
    """Work, median and quartiles by series, in the order of work; what has no work has no place on the axis."""
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in sorted((row for row in rows if row.work and row.device_us), key=lambda row: row.work or 0):
        time = row.device_us
        if time is not None and row.work is not None:
            lines.setdefault(row.series, []).append((row.work, time.median, time.low, time.high))
    return lines
