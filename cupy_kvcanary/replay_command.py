"""`kvcanary replay`: arguments, progress bar, table and files of a replay."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .catalogue import error
from .checks import check_non_negative, check_positive
from .faults import FAULTS
from .plots import draw_replay, require_matplotlib
from .replay import ReplayOptions, replay
from .replay_text import Events, canary_log_is_ours, outcome_table, summary_table
from .report_page import write_report_page
from .traces import generate_trace, read_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from .replay_result import ReplayProgress, ReplayResult
    from .traces import TraceRequest

GENERATED_REQUESTS = 1000
"""Requests of the generated trace, where --requests does not say."""

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130


def add_replay_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `replay` to the commands."""
    defaults = ReplayOptions()
    parser = subparsers.add_parser(
        "replay",
        help="run a serving trace through a simulated engine under a canary",
        description="Run a serving trace through a simulated engine (continuous batching, paged pool, prefix sharing) "
        "whose KV a canary guards. The exit status is 1 when --check finds a difference, when the canary raises a "
        "false alarm, and when it does not find a fault of --inject.",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Mooncake JSON lines or Azure CSV; left out: a generated trace like Mooncake's",
    )
    parser.add_argument(
        "--requests", type=int, metavar="N", help=f"stop after N requests (a generated trace has {GENERATED_REQUESTS})"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated trace and the faults (%(default)s)")
    parser.add_argument("--check", action="store_true", help="compare every plan with a straight computation")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the plans run (auto: GPU if usable)"
    )
    parser.add_argument("--no-canary", dest="canary", action="store_false", help="plan every step, and do nothing else")
    parser.add_argument(
        "--verify-interval",
        type=int,
        metavar="N",
        help="steps from one verification to the next (1 on a GPU; on the CPU so that the replay takes seconds)",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT[@STEP]",
        help=f"damage something, for the canary to find; may be repeated: all, {', '.join(FAULTS)}",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw batch size, planned entries and pool use over time")
    parser.add_argument("--report", metavar="FILE.html", help="write a page with the numbers, the plot and the reports")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    engine = parser.add_argument_group("engine")
    for name, kind, text in (
        ("speedup", float, "play arrivals this many times faster (%(default)s)"),
        ("step_ms", float, "milliseconds of a step on the trace's clock (%(default)s)"),
        ("chunk", int, "prompt tokens prefilled a step (%(default)s)"),
        ("page_size", int, "slots of a page; divides 512 (%(default)s)"),
        ("max_running", int, "requests in a batch (%(default)s)"),
        ("window", int, "sliding window in tokens (%(default)s: full attention)"),
        ("pool_slots", int, "slots for KV (derived from the trace)"),
        ("window_pool_slots", int, "slots of the sliding-window pool (derived from the trace)"),
        ("verify_capacity", int, "entries that a plan can hold (derived from the trace, seldom too small)"),
    ):
        engine.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=getattr(defaults, name),
            metavar="X" if kind is float else "N",
            help=text,
        )


def run_replay(args: argparse.Namespace) -> int:
    """Run the command; its exit status. Nothing is written unless the whole replay ran."""
    options = ReplayOptions(**{field.name: getattr(args, field.name) for field in fields(ReplayOptions)})
    if args.requests is not None:
        check_positive("requests", args.requests)
    check_non_negative("seed", args.seed)
    for name, target in (("--json", args.json), ("--plot", args.plot), ("--report", args.report)):
        if target is not None:
            _check_writable(name, Path(target))
    if args.plot is not None or args.report is not None:
        require_matplotlib()
    requests = _load(args)

    with _progress_bar(len(requests)) as on_step, canary_log_is_ours():
        result = replay(requests, options, on_step=on_step, on_event=Events(sys.stderr))
    summary, series, outcomes, *_ = result
    print(summary_table(summary))
    if outcomes:
        print(f"\n{outcome_table(outcomes)}")
    if summary.interrupted:
        print("interrupted: the numbers are those of the steps until then; no file was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json is not None:
        text = _as_json(args.trace, options, result)
        _write_whole(Path(args.json), lambda file: file.write(text.encode()))
    title = f"Replay of {Path(args.trace).name if args.trace else 'a generated trace'}"
    if args.plot is not None:
        _write_whole(Path(args.plot), lambda file: draw_replay(file, title, summary, series))
    if args.report is not None:
        _write_whole(Path(args.report), lambda file: write_report_page(file, title, result))
    return 0 if result.is_good else EXIT_PROBLEM


def _load(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace is None:
        return generate_trace(args.requests or GENERATED_REQUESTS, args.seed)
    return read_trace(args.trace)[: args.requests]


def _check_writable(name: str, target: Path) -> None:
    """Try it before the replay, not after."""
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "a folder")
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as reason:
        got = f"{target}: {reason.strerror}"
        raise error("kv-canary-output-file-must-be-writable", name=name, got=got) from reason


def _write_whole(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the target, then rename: the target is never half written."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        # mkstemp makes private files; the result is an ordinary one.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _progress_bar(num_requests: int) -> Iterator[Callable[[ReplayProgress], None] | None]:
    """A bar on stderr, where that is a terminal and rich is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        print("for a progress bar: pip install 'cupy-kvcanary[cli]'", file=sys.stderr)
        yield None
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "requests, {task.fields[steps]:,} steps, batch {task.fields[batch]}, {task.fields[entries]:,} entries"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("replay", total=num_requests, steps=0, batch=0, entries=0)
        next_update = 0.0

        def on_step(progress: ReplayProgress) -> None:
            nonlocal next_update
            now = time.perf_counter()
            if now >= next_update or progress.finished == num_requests:
                next_update = now + 0.1
                bar.update(
                    task,
                    completed=progress.finished,
                    steps=progress.steps,
                    batch=progress.batch,
                    entries=progress.entries,
                    refresh=True,
                )

        yield on_step


def _as_json(trace: str | None, options: ReplayOptions, result: ReplayResult) -> str:
    def plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        return value._asdict() if hasattr(value, "_asdict") else value

    summary, series, outcomes, *_ = result
    numbers = {
        "trace": trace,
        "options": asdict(options),
        "summary": {field.name: plain(getattr(summary, field.name)) for field in fields(summary)},
        "series": {field.name: getattr(series, field.name).tolist() for field in fields(series)},
        "faults": [asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(numbers, indent=1) + "\n"
