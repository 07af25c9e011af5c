"""Writes the measured tables into README.md and docs/performance.md: `python -m tools.tables`.

The figures come from benchmarks/results/ (the JSON of `kvcanary bench`): a document never says what was not measured.
A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import bench_scale, published, report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from benchmarks.runner import Row
    from benchmarks.timing import Time

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")

NOT_MEASURED = "Not measured yet."


def load(name: str) -> tuple[dict[str, Any], list[Row]]:
    """Environment and rows; no rows where the benchmark was not run."""
    path = RESULTS / f"{name}.json"
    return report.read_json(path.read_text(encoding="utf-8")) if path.is_file() else ({}, [])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def environment() -> str:
    about, _ = load("plan_offsets")
    return report.about(about)


def measured(name: str, what: str) -> str:
    """All rows of a benchmark, as `kvcanary bench` prints them; `what` heads their names."""
    _, rows = load(name)
    if not rows:
        return NOT_MEASURED
    head, lines = report.table(rows)
    return markdown([what, *head[1:]], lines)


def by_part(name: str, parts: Sequence[str]) -> str:
    """One line for each work, with the time of each part of it; shares, aims and the peer are of the first part."""
    _, rows = load(name)
    works: dict[str, dict[str, Row]] = {}
    for row in rows:
        part, work = row.name.split(": ", maxsplit=1)
        works.setdefault(work, {})[part] = row
    if not works:
        return NOT_MEASURED
    lines = []
    for work, of_part in works.items():
        whole = of_part[parts[0]]
        aims = [f"{of_part[part].aims['device_us']:g}" for part in parts if part in of_part and of_part[part].aims]
        lines.append(
            [
                work,
                *(report.us(_median(of_part[part].device_us)) if part in of_part else "-" for part in parts),
                report.share(whole),
                " / ".join(aims) or "-",
                report.peer_us(whole),
                f"{whole.ratio:.1f} x" if whole.ratio else "-",
            ]
        )
    return markdown(
        ["requests x prefix", *(f"{part} us" for part in parts), "of copy", "aim us", "peer us", "ratio"], lines
    )


def _median(time: Time | None) -> float | None:
    return None if time is None else time.median


def scale() -> str:
    about, rows = load("scale")
    if not rows:
        return NOT_MEASURED
    times = {row.name: row.device_us.median for row in rows if row.device_us is not None}
    return markdown(*bench_scale.model_table(times, about))


def peer() -> str:
    """The README's short comparison: device times by benchmark and case, and one host time."""
    lines = []
    for what, name, case in (
        ("offsets, 256 requests", "plan_offsets", "256"),
        ("offsets, 4096 requests", "plan_offsets", "4,096"),
        ("offsets, 1,048,576 requests", "plan_offsets", "1,048,576"),
        ("plan + verify, 256 x 4096 tokens", "verify", "plan + verify: 256 x 4096, splitmix64"),
        ("write, 1 x 4096 tokens", "write", "1 x 4096, prefill, splitmix64"),
        ("the same, parallel chain", "write", "1 x 4096, prefill, affine"),
        ("a decode step, 256 x 4096 tokens, four buffers", "step", "256 x 4096, splitmix64, 4 buffers"),
        ("the same, parallel chain", "step", "256 x 4096, affine, 4 buffers"),
    ):
        for row in load(name)[1]:
            if row.name == case:
                his = report.peer_us(row)
                unit = " us" if his[-1:].isdigit() else ""
                lines.append((what, f"{his}{unit}", f"{report.us(_median(row.device_us))} us"))
    for row in load("host")[1]:
        if row.name == "offsets, torch":
            least, most = published.OFFSETS_HOST_US
            what = "host time of a checked offsets call on torch tensors"
            lines.append((what, f"{least} - {most} us", f"{report.us(_median(row.host_us))} us"))
    return markdown(["", "sglang's kv-canary", "cupy_kvcanary"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "environment": environment,
    "offsets": lambda: measured("plan_offsets", "requests"),
    "plan": lambda: by_part("plan_entries", ("offsets + entries", "entries")),
    "verify": lambda: by_part("verify", ("plan + verify", "verify", "verify entries")),
    "write": lambda: measured("write", "requests x tokens"),
    "scatter": lambda: measured("scatter", "requests x longest"),
    "move": lambda: measured("move", "records"),
    "step": lambda: measured("step", "requests x prefix"),
    "host": lambda: measured("host", "call"),
    "scale": scale,
    "peer": peer,
}


def with_tables(text: str) -> str:
    """The document with every table made anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
