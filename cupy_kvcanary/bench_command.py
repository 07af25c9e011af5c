"""`kvcanary bench`: runs the benchmark suite, which stands in a folder of its own, `benchmarks/`."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .catalogue import error
from .plots import require_matplotlib

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

EXIT_WRONG = 1

_PACKAGE = Path(__file__).resolve().parent
_SUITE = f"{__package__}.benchmarks"


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the commands."""
    parser = subparsers.add_parser(
        "bench",
        help="measure every kernel and the whole step",
        description="Measure every kernel and the whole step: on the GPU by graph replay, without one on NumPy (small "
        "cases). Every output is compared with NumPy's; the exit status is 1 where one differs.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks, such as plan_offsets (all)")
    parser.add_argument("--quick", action="store_true", help="a minute's worth of cases")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write DIR/NAME.json for each benchmark")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line for each case")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw DIR/NAME.png: time against work")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where (auto: GPU if usable, else NumPy)"
    )


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    if args.plot is not None:
        require_matplotlib()
    for name, folder in (("--json", args.json), ("--plot", args.plot), ("--csv", args.csv and args.csv.parent)):
        if folder is not None:
            _make_folder(name, folder)
    suite = load_suite()
    runner, report = suite("runner"), suite("report")
    modules = runner.benchmarks()
    names = args.names or list(modules)
    for name in names:
        if name not in modules:
            raise error("kv-canary-must-be-one-of", name="NAME", expected=", ".join(modules), got=repr(name))
    device = suite("timing").device(args.device)
    peer = suite("peer").find_peer() if device.is_gpu else None
    print(report.about(device.environment), flush=True)

    cases = {name: runner.selected(modules[name].cases(), device, args.quick) for name in names}
    results, status = {}, 0
    with _progress_bar(sum(map(len, cases.values()))) as on_case:
        for name, chosen in cases.items():
            rows = []
            try:
                for row in runner.run(chosen, device, peer, on_case):
                    rows.append(row)
            except runner.WrongResultError as failure:
                print(f"{name}: {failure}", file=sys.stderr)
                status = EXIT_WRONG
                continue
            results[name] = rows
            _show(suite, name, modules[name], rows, device.environment)
            if args.json is not None:
                text = report.as_json(name, device.environment, rows)
                (args.json / f"{name}.json").write_text(text, encoding="utf-8")
            if args.plot is not None and any(row.device_us for row in rows):
                with (args.plot / f"{name}.png").open("wb") as file:
                    suite("plots").draw_benchmark(file, name, modules[name].WORK, rows, device.environment)
    if args.csv is not None:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            report.write_csv(file, results, device.environment)
    return status


def load_suite() -> Callable[[str], Any]:
    """A function that imports a module of the suite by its name.

    The suite is inside of the package where that was installed, beside it in a checkout or an editable installation.
    """
    if _SUITE not in sys.modules:
        folders = (_PACKAGE / "benchmarks", _PACKAGE.parent / "benchmarks")
        init = next(path for folder in folders if (path := folder / "__init__.py").is_file())
        spec = importlib.util.spec_from_file_location(_SUITE, init, submodule_search_locations=[str(init.parent)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_SUITE] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return lambda name: importlib.import_module(f"{_SUITE}.{name}")


def _make_folder(name: str, folder: Path) -> None:
    """Before the run, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        got = f"{folder}: {reason.strerror}"
        raise error("kv-canary-output-file-must-be-writable", name=name, got=got) from reason


def _show(suite: Callable[[str], Any], name: str, module: Any, rows: list[Any], environment: dict[str, Any]) -> None:
    report = suite("report")
    if not rows:
        print(f"\n{name}: no case is small enough for NumPy", flush=True)
        return
    print(f"\n{name}\n{report.aligned(*report.table(rows))}", flush=True)
    note = report.peer_note(rows)
    if note:
        print(note, flush=True)
    # The model is of a GPU.
    if hasattr(module, "model_table") and "hash_words_per_us" in environment:
        times = {row.name: row.device_us.median for row in rows}
        print(f"\n{report.aligned(*module.model_table(times, environment))}", flush=True)


@contextlib.contextmanager
def _progress_bar(num_cases: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, where that is a terminal and rich is installed; called with the name of each case."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda name: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    # Tables are printed as they come: rich moves its bar out of their way where both are on the terminal.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=num_cases, completed=-1)
        yield lambda name: bar.update(task, advance=1, description=name)
