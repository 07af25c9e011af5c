"""Writes the measured tables into README.md and docs/performance.md: `python -m tools.tables`.

The figures come from benchmarks/results/ (the benchmarks' own JSON), so a document never says what was not measured.
A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"bench_{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def us(time: dict[str, float] | float | None) -> str:
    if time is None:
        return "-"
    return f"{time if isinstance(time, (int, float)) else time['median']:.1f}"


def ratio(peer: float | None, ours: dict[str, float]) -> str:
    return "-" if peer is None else f"{peer / ours['median']:.1f} x"


def environment() -> str:
    about = load("plan_offsets")["environment"]
    return (
        f"{about['gpu']}, CUDA driver {about['driver_cuda'] // 1000}.{about['driver_cuda'] % 1000 // 10}, "
        f"CuPy {about['cupy']}, NVRTC {about['nvrtc']}, {about['date']}. An empty kernel takes "
        f"{about['empty_kernel_us']['median']:.2f} us, a copy moves {about['copy_tb_per_s']:.1f} TB/s."
    )


def offsets() -> str:
    rows = load("plan_offsets")["rows"]
    return markdown(
        ["requests", "us", "quartiles", "peer us", "ratio"],
        [
            (
                f"{row['bs']:,}",
                f"{row['gpu_us']['median']:.2f}",
                f"{row['gpu_us']['low']:.2f} - {row['gpu_us']['high']:.2f}",
                us(row["peer_us"]) if row["bs"] <= 4096 else "refused",
                ratio(row["peer_us"], row["gpu_us"]),
            )
            for row in rows
        ],
    )


def _sources(row: dict[str, Any]) -> str:
    return f"{row['num_sources']} x {row['read_bytes']} bytes" if row["num_sources"] else "none"


def verify() -> str:
    return markdown(
        ["requests x prefix", "chain", "buffers", "real KV", "plan + verify us", "verify alone us", "peer us", "ratio"],
        [
            (
                f"{row['bs']} x {row['prefix']}",
                row["chain"],
                str(row["num_buffers"]),
                _sources(row),
                us(row["gpu_us"]),
                us(row["verify_batch_us"]),
                us(row["peer_us"]),
                ratio(row["peer_us"], row["gpu_us"]),
            )
            for row in load("verify")["rows"]
        ],
    )


def write() -> str:
    return markdown(
        ["requests x extend", "chain", "buffers", "real KV sources", "us", "peer us", "ratio"],
        [
            (
                f"{row['num_requests']} x {row['extend']}" + (" + 1 x 4096" if row["num_long"] else ""),
                row["chain"],
                str(row["num_buffers"]),
                str(row["num_sources"] or "none"),
                us(row["gpu_us"]),
                us(row["peer_us"]),
                ratio(row["peer_us"], row["gpu_us"]),
            )
            for row in load("write")["rows"]
        ],
    )


def plan() -> str:
    return markdown(
        ["requests x prefix", "offsets + entries us", "entries alone us", "peer us", "ratio"],
        [
            (
                f"{row['bs']} x {row['prefix_len']}",
                us(row["gpu_us"]),
                us(row["entries_gpu_us"]),
                us(row["peer_gpu_us"]),
                ratio(row["peer_gpu_us"], row["gpu_us"]),
            )
            for row in load("plan_entries")["rows"]
        ],
    )


def host() -> str:
    return markdown(
        ["host time of a call", "us", "aim"],
        [(row["what"], us(row["host_us"]), us(row["aim_us"])) for row in load("host")["rows"]],
    )


def peer() -> str:
    """The README's short comparison."""

    def row_of(name: str, **wanted: Any) -> dict[str, Any]:
        rows = load(name)["rows"]
        return next(row for row in rows if all(row.get(key) == value for key, value in wanted.items()))

    plain = {"chain": "splitmix64", "num_buffers": 1, "num_sources": 0}
    checked = row_of("host", what="offsets, torch, checked")["host_us"]
    lines = [
        ("offsets, 256 requests", "9.7 us", row_of("plan_offsets", bs=256)["gpu_us"]),
        ("offsets, 4096 requests", "41.8 us", row_of("plan_offsets", bs=4096)["gpu_us"]),
        ("offsets, 1,048,576 requests", "refused", row_of("plan_offsets", bs=1048576)["gpu_us"]),
        ("plan + verify, 256 x 4096 tokens", "79.7 us", row_of("verify", bs=256, prefix=4096, **plain)["gpu_us"]),
        ("write, 1 x 4096 tokens", "1055 us", row_of("write", num_requests=1, extend=4096, **plain)["gpu_us"]),
        (
            "the same, parallel chain",
            "-",
            row_of("write", num_requests=1, extend=4096, **plain | {"chain": "affine"})["gpu_us"],
        ),
        ("host time of a checked offsets call on torch tensors", "39 - 65 us", checked),
    ]
    return markdown(
        ["", "sglang's kv-canary", "cupy_kvcanary"], [(what, his, f"{us(ours)} us") for what, his, ours in lines]
    )


TABLES: dict[str, Callable[[], str]] = {
    "environment": environment,
    "offsets": offsets,
    "verify": verify,
    "write": write,
    "plan": plan,
    "host": host,
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
