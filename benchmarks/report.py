"""Results as text, CSV and JSON."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .runner import Row
from .timing import Time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TextIO

MEASURES = ("device_us", "host_us", "bound_us")
_CSV_TIMES = tuple(f"{measure}{part}" for measure in MEASURES for part in ("", "_low", "_high"))
CSV_FIELDS = (
    *("benchmark", "name", "series", "work", "moved_bytes", *_CSV_TIMES, "copy_share"),
    *("peer_device_us", "peer_host_us", "peer_source", "ratio", "parameters", "device", "date"),
)


def as_json(name: str, environment: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The layout of the files of `--json` and of `benchmarks/results/`."""
    result = {"benchmark": name, "environment": environment, "rows": [asdict(row) for row in rows]}
    return json.dumps(result, indent=1) + "\n"


def read_json(text: str) -> tuple[dict[str, Any], list[Row]]:
    """Environment and rows of `as_json`."""
    result = json.loads(text)
    rows = []
    for fields in result["rows"]:
        times = {name: Time(**fields[name]) for name in MEASURES if fields[name] is not None}
        rows.append(Row(**fields | times))
    return result["environment"], rows


def write_csv(file: TextIO, results: Mapping[str, Sequence[Row]], environment: Mapping[str, Any]) -> None:
    """One line for each row of every benchmark."""
    writer = csv.DictWriter(file, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    for benchmark, rows in results.items():
        for row in rows:
            times: dict[str, float] = {}
            for measure in MEASURES:
                time: Time | None = getattr(row, measure)
                if time is not None:
                    times |= {measure: time.median, f"{measure}_low": time.low, f"{measure}_high": time.high}
            writer.writerow(
                {
                    "benchmark": benchmark,
                    **{name: getattr(row, name) for name in ("name", "series", "work", "moved_bytes", "copy_share")},
                    **times,
                    **{f"peer_{measure}": value for measure, value in row.peer.items()},
                    "peer_source": row.peer_source,
                    "ratio": row.ratio,
                    "parameters": json.dumps(row.parameters),
                    "device": environment["device"],
                    "date": environment["date"],
                }
            )


def about(environment: Mapping[str, Any]) -> str:
    """Where and with what it was measured, and the yardsticks of the run."""
    parts = [environment["device"]]
    if "cupy" in environment:
        driver = f"driver {environment['driver']}, " if "driver" in environment else ""
        parts.append(f"{driver}CUDA driver {environment['driver_cuda']}")
        parts += [f"CuPy {environment['cupy']}", f"NVRTC {environment['nvrtc']}"]
    else:
        parts.append(f"NumPy {environment['numpy']}")
    what = "An empty kernel" if "cupy" in environment else "An empty call"
    return (
        f"{', '.join(parts)}, {environment['date']}. {what} takes {environment['empty_us']['median']:.2f} us, "
        f"a copy moves {environment['copy_tb_per_s']:.{1 if environment['copy_tb_per_s'] > 1 else 3}f} TB/s."
    )


def us(value: float | None) -> str:
    """Microseconds to three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def peer_us(row: Row) -> str:
    """Its device time, `refused`, or nothing known."""
    return us(row.peer.get("device_us")) if row.peer else row.peer_source.split(":")[0] or "-"


def share(row: Row) -> str:
    """Of the copy bandwidth; nothing below half a percent, where time is not about bytes."""
    return f"{row.copy_share:.0%}" if row.copy_share is not None and row.copy_share >= 0.005 else "-"


def _median(time: Time | None) -> float | None:
    return None if time is None else time.median


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and lines; a column that would be empty is left out."""
    columns: dict[str, list[str]] = {
        "": [row.name for row in rows],
        "us": [us(_median(row.device_us)) for row in rows],
        "quartiles": [f"{us(t.low)} - {us(t.high)}" if (t := row.device_us) else "-" for row in rows],
        "of copy": [share(row) for row in rows],
        "call us": [us(_median(row.host_us)) for row in rows],
        "bound us": [us(_median(row.bound_us)) for row in rows],
        "aim us": [" / ".join(f"{row.aims[m]:,g}" for m in MEASURES if m in row.aims) or "-" for row in rows],
        "peer us": [peer_us(row) for row in rows],
        "peer call us": [us(row.peer.get("host_us")) for row in rows],
        "ratio": [f"{row.ratio:.1f} x" if row.ratio else "-" for row in rows],
    }
    kept = {head: cells for head, cells in columns.items() if set(cells) - {"-"}}
    return list(kept), [list(line) for line in zip(*kept.values(), strict=True)]


def aligned(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Text: the first column to the left, the others to the right."""
    lines = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def peer_note(rows: Iterable[Row]) -> str:
    """Where the peer's figures are from; empty without any."""
    sources = sorted({row.peer_source for row in rows if row.peer})
    return f"peer: {', '.join(sources)}" if sources else ""
