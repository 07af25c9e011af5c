"""The replay: every plan equals the straight computation, and what it writes is whole or not there."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, launch_plan_offsets_kernel
from cupy_kvcanary.replay import SERIES_POINTS, ReplayOptions, derived_sizes, replay
from cupy_kvcanary.traces import TraceRequest, generate_trace, read_trace
from tests.helpers.backends import require_gpu
from tests.helpers.device_array import DeviceArray
from tests.helpers.replay_errors import run_command

if TYPE_CHECKING:
    from collections.abc import Callable

TRACES = Path(os.environ.get("KVCANARY_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def checked(requests: list[TraceRequest], **options: Any) -> Any:
    summary = replay(requests, ReplayOptions(device="cpu", check=True, canary=False, **options)).summary
    assert summary.finished == summary.requests == len(requests)
    assert summary.differences == 0
    assert summary.status == 0
    return summary


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1024},
        {"speedup": 20.0, "page_size": 64, "chunk": 1000, "max_running": 30},
        {"speedup": 20.0, "pool_slots": 150_000},
        {"window": 100, "window_pool_slots": 8000, "verify_capacity": 900},
    ],
    ids=["full attention", "window", "crowded", "small pool", "small window pool and capacity"],
)
def test_every_plan_of_a_generated_trace_equals_the_straight_computation(options: dict[str, Any]) -> None:
    summary = checked(generate_trace(60, seed=1), **options)
    assert summary.overflows == 0 or "verify_capacity" in options
    assert summary.evicted_blocks > 0 or "pool_slots" not in options
    assert summary.largest_batch <= options.get("max_running", 512)


@pytest.mark.parametrize(
    ("name", "requests"), [("conversation_trace.first5980.jsonl", 5980), ("AzureLLMInferenceTrace_conv.csv", 19366)]
)
def test_every_plan_of_a_whole_real_trace_equals_the_straight_computation(name: str, requests: int) -> None:
    """Played faster: the same requests in larger batches and fewer steps."""
    trace = TRACES / name
    if not trace.exists():
        pytest.skip(f"the trace {name} is not there; KVCANARY_TRACES names the folder of the traces")
    summary = checked(read_trace(trace), speedup=4.0)
    assert summary.requests == requests
    assert summary.overflows == 0


def test_derived_sizes_follow_the_tokens_in_flight() -> None:
    """One request a second, each 10 s in flight with 1000 + 333 / 2 tokens: about 11,700 tokens at once."""
    requests = [TraceRequest(float(second), 1000, 333) for second in range(200)]
    sizes = derived_sizes(requests, ReplayOptions(window=100, chunk=50))
    assert sizes.pool_slots == pytest.approx(3 * 11_700 + 1333, rel=0.06)
    assert sizes.window_pool_slots < sizes.pool_slots
    assert sizes.verify_capacity == pytest.approx(4 * 10 * 100 + 100, rel=0.08)
    series = replay(requests, ReplayOptions(device="cpu", canary=False)).series
    assert max(series.entries_max) < derived_sizes(requests, ReplayOptions()).verify_capacity


def broken(break_plan: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    def launch(**arguments: Any) -> None:
        launch_plan_offsets_kernel(**arguments)
        break_plan(arguments)

    return launch


def add_one(name: str, index: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    def break_plan(arguments: dict[str, Any]) -> None:
        arguments[name][index(arguments["bs"])] += 1

    return break_plan


@pytest.mark.parametrize(
    "break_plan",
    [
        add_one("out_verify_offsets_scratch", lambda bs: bs),
        add_one("out_verify_offsets_scratch", lambda bs: bs + 1),
        add_one("out_write_offsets", lambda bs: 1),
        add_one("out_write_offsets", lambda bs: -1),
        add_one("out_write_seed_slot_indices", lambda bs: 0),
        add_one("out_write_seed_slot_indices", lambda bs: bs),
        add_one("out_verify_num_valid", lambda bs: 0),
        add_one("out_verify_enable", lambda bs: 0),
        add_one("out_write_num_valid_reqs", lambda bs: 0),
    ],
    ids=[
        "verify total",
        "verify tail",
        "write offset",
        "write tail",
        "seed",
        "seed tail",
        "num valid",
        "enable",
        "num reqs",
    ],
)
def test_the_check_finds_a_broken_planner(break_plan: Callable[[dict[str, Any]], None]) -> None:
    options = ReplayOptions(device="cpu", check=True)
    summary = replay([TraceRequest(0.0, 100, 5)], options, launch=broken(break_plan)).summary
    assert summary.differences == summary.steps == 5


def test_differences_make_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_launch = broken(add_one("out_write_offsets", lambda bs: 1))
    monkeypatch.setattr("cupy_kvcanary.ops.plan_offsets.launch_plan_offsets_kernel", broken_launch)
    assert run_command("--requests", "1", "--device", "cpu", "--check") == 1
    assert "differences" in capsys.readouterr().out


def test_table_numbers_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    arguments = ("--requests", "10", "--device", "cpu", "--check", "--json", str(numbers), "--plot", str(plot))
    assert run_command(*arguments) == 0
    written = json.loads(numbers.read_text())
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert table["steps"].strip() == f"{written['summary']['steps']:,}"
    assert table["requests finished"].strip() == "10 of 10"
    assert table["differences"].strip() == "0"
    assert written["summary"]["entries"]["max"] == max(written["series"]["entries_max"])
    assert {len(values) for values in written["series"].values()} == {len(written["series"]["time_s"])}
    assert len(written["series"]["time_s"]) <= SERIES_POINTS
    assert plot.read_bytes().startswith(PNG_MAGIC)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.json", "plot.png"]


def test_a_malformed_trace_leaves_what_was_there(tmp_path: Path) -> None:
    trace, numbers, plot = tmp_path / "trace.jsonl", tmp_path / "numbers.json", tmp_path / "plot.png"
    numbers.write_text("of an earlier replay")
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0, "inp')
    with pytest.raises(KvCanaryError, match=r"trace\.jsonl:2 must be a JSON object"):
        run_command(str(trace), "--json", str(numbers), "--plot", str(plot))
    assert numbers.read_text() == "of an earlier replay"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.json", "trace.jsonl"]


def test_interrupted_it_shows_what_was_done_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 0

    def launch(**arguments: Any) -> None:
        nonlocal steps
        launch_plan_offsets_kernel(**arguments)
        if steps == 50:
            raise KeyboardInterrupt
        steps += 1

    monkeypatch.setattr("cupy_kvcanary.ops.plan_offsets.launch_plan_offsets_kernel", launch)
    assert run_command("--device", "cpu", "--no-canary", "--json", str(tmp_path / "numbers.json")) == 130
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].split() == ["steps", "50"]
    assert "interrupted" in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests", "0"),
        ("--seed", "-1"),
        ("--speedup", "nan"),
        ("--step-ms", "-3"),
        ("--chunk", "0"),
        ("--page-size", "48"),
        ("--max-running", "0"),
        ("--window", "-1"),
        ("--pool-slots", "100"),
        ("--window", "64", "--window-pool-slots", "100"),
        ("--verify-capacity", str(2**31)),
        ("--verify-interval", "0"),
    ],
    ids=" ".join,
)
def test_options_out_of_range_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(KvCanaryError, match=f"^kv-canary: {arguments[-2][2:].replace('-', '_')} must "):
        run_command("--device", "cpu", *arguments)


class Terminal:
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    assert run_command("--requests", "5", "--device", "cpu") == 0
    assert "5/5" in terminal.text


def test_without_rich_one_line_says_how_to_get_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def import_without_rich(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return imported(name, *arguments, **keywords)

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(builtins, "__import__", import_without_rich)
    assert run_command("--requests", "5", "--device", "cpu") == 0
    assert terminal.text == "for a progress bar: pip install 'cupy-kvcanary[cli]'\n"


def test_the_mirror_on_a_device_stays_equal_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path with NumPy in CuPy's place: every plan reads the mirrored tables only."""
    stream = SimpleNamespace(synchronize=lambda: None)
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    cupy = SimpleNamespace(
        zeros=lambda *of: np.zeros(*of).view(DeviceArray),
        full=lambda *of: np.full(*of).view(DeviceArray),
        asarray=lambda values: np.array(values),
        cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream),
    )
    monkeypatch.setattr("cupy_kvcanary.compile.import_cupy", lambda: cupy)

    def launch(**arguments: Any) -> None:
        arrays = {name: np.asarray(value) for name, value in arguments.items() if isinstance(value, DeviceArray)}
        launch_plan_offsets_kernel(**{**arguments, **arrays})

    options = ReplayOptions(device="cuda", check=True, window=1024, speedup=10.0, canary=False)
    summary = replay(generate_trace(40, seed=2), options, launch=launch).summary
    assert summary.device == "cuda"
    assert summary.differences == 0


@pytest.mark.gpu
def test_a_replay_on_the_gpu_plans_what_the_cpu_plans() -> None:
    require_gpu()
    requests = generate_trace(60, seed=1)
    summaries = []
    for device in ("cpu", "cuda"):
        options = ReplayOptions(device=device, check=True, window=1024)
        summary, series, *_ = replay(requests, options)
        assert summary.differences == 0
        summaries.append((summary.total_entries, summary.steps, series.entries_max.tolist()))
    assert summaries[0] == summaries[1]
    assert np.sum(summaries[0][2]) > 0
