"""The picture of a pool: which request has which slot, and which slots are bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .checks import check_int, check_positive
from .plots import require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_COLORS: Final = (
    "#4e79a7", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#9c755f", "#5254a3", "#8cd17d", "#a0cbe8", "#e7a6d0",
)  # fmt: skip
"""Of the requests; none is near the red of bad slots."""
_FREE, _OTHERS, _BAD, _INK = "#e9ebee", "#c3cad3", "#d62728", "#33373b"
_MOST_CELLS: Final = 8192
"""Larger pools are drawn with several slots in a cell."""
_ASPECT: Final = 2.4
"""Width of the grid over its height."""


def pool_figure(owners: Any, bad_slots: Iterable[int], *, page_size: int = 1, title: str = "") -> Figure:
    """A figure of its own with the pool in it; see `draw_pool`. `figure.savefig(file)` writes it."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps global state and may choose a backend that wants a display.
    figure = Figure(figsize=(11, 4.8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    draw_pool(figure.subplots(), owners, bad_slots, page_size=page_size, title=title)
    return figure


def draw_pool(axes: Axes, owners: Any, bad_slots: Iterable[int], *, page_size: int = 1, title: str = "") -> None:
    """Draw the slots of a pool as a grid of pages, in rows from the top left.

    Parameters
    ----------
    axes : a matplotlib Axes.
    owners : int [num_slots]: the row of the page table that has the slot, -1 where it is free.
    bad_slots : slots to mark; those outside of the pool are left out.
    page_size : slots of a page. Pages of small pools are framed; in large ones a cell is a page or several, in the
        colour of the request that has most of its slots.
    title : stands above, at the left.

    """
    check_positive("page_size", check_int("page_size", page_size))
    require_matplotlib()
    from matplotlib.colors import ListedColormap

    owners = np.ascontiguousarray(owners, np.int64)
    bad = np.unique(np.fromiter(bad_slots, np.int64))
    bad = bad[(bad >= 0) & (bad < len(owners))]
    slots_per_cell = 1 if len(owners) <= _MOST_CELLS else page_size * -(-len(owners) // (page_size * _MOST_CELLS))
    cells = _owners_of_cells(owners, slots_per_cell)
    # As many whole pages in a row as make the grid wide.
    cells_per_page = max(page_size // slots_per_cell, 1)
    columns = cells_per_page * max(round((len(cells) * _ASPECT) ** 0.5 / cells_per_page), 1)
    rows = max(-(-len(cells) // columns), 1)

    named = _named_rows(owners, bad)
    colors = [*_COLORS[: len(named)], _OTHERS, _FREE]
    color_of = np.full(rows * columns, np.nan)  # nothing behind the last slot
    color_of[: len(cells)] = np.where(cells < 0, len(named) + 1, len(named))
    for i, row in enumerate(named):
        color_of[: len(cells)][cells == row] = i
    axes.imshow(
        color_of.reshape(rows, columns),
        cmap=ListedColormap(colors),
        vmin=-0.5,
        vmax=len(colors) - 0.5,
        interpolation="nearest",
        aspect="auto",
    )
    if cells_per_page > 1:
        for between in range(1, columns):
            is_page = between % cells_per_page == 0
            axes.axvline(between - 0.5, color="white", linewidth=2 if is_page else 0.25)
        for between in range(1, rows):
            axes.axhline(between - 0.5, color="white", linewidth=0.8)

    y, x = np.divmod(np.unique(bad // slots_per_cell), columns)
    size = max(0.4 * axes.get_window_extent().width / axes.figure.dpi * 72 / columns, 6)
    if len(bad):
        axes.scatter(x, y, s=size**2, marker="X", color=_BAD, edgecolors="white", linewidths=size / 9, zorder=3)
    ticks = np.unique(np.linspace(0, rows - 1, min(rows, 9)).round().astype(int))
    axes.set_yticks(ticks, [f"{tick * columns * slots_per_cell:,}" for tick in ticks])
    axes.set_xticks([])
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    axes.set_ylabel("first slot of the row", color=_INK)
    cell = "1 slot" if slots_per_cell == 1 else f"{slots_per_cell:,} slots"
    axes.set_xlabel(f"{len(owners):,} slots in pages of {page_size:,}; one cell is {cell}", color=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=_INK)
    others = bool(set(np.unique(owners).tolist()) - {-1, *named})
    _add_legend(axes, [*(f"row {row}" for row in named), "other requests" if others else "", "free"], colors, len(bad))


def _owners_of_cells(owners: Int64s, slots_per_cell: int) -> Int64s:
    """Who has most of the slots of each cell."""
    if slots_per_cell == 1:
        return owners
    names, index = np.unique(owners, return_inverse=True)
    # (cell, owner) pairs with their counts; the last of a cell in the order of counts has most.
    pairs, counts = np.unique(np.arange(len(owners)) // slots_per_cell * len(names) + index, return_counts=True)
    cell, owner = np.divmod(pairs, len(names))
    order = np.lexsort((counts, cell))
    is_last = np.append(np.diff(cell[order]) > 0, True)
    owners_of_cells: Int64s = names[owner[order][is_last]]
    return owners_of_cells


def _named_rows(owners: Int64s, bad: Int64s) -> list[int]:
    """The rows that get a colour of their own: those with most bad slots, then those with most slots."""
    named: list[int] = []
    for slots in (owners[bad], owners):
        rows, counts = np.unique(slots[slots >= 0], return_counts=True)
        named += [row for row in rows[np.argsort(-counts, kind="stable")].tolist() if row not in named]
    return sorted(named[: len(_COLORS)])


def _add_legend(axes: Axes, labels: list[str], colors: list[str], num_bad: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=label) for label, color in zip(labels, colors, strict=True) if label]
    if num_bad:
        label = f"bad slots ({num_bad:,})"
        handles.insert(0, Line2D([], [], marker="X", color=_BAD, linestyle="none", markersize=8, label=label))
    # Beside the grid: inside, a legend hides slots.
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=9, labelcolor=_INK
    )
