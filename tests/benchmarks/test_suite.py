"""The benchmark suite on NumPy: its cases, what it checks, what it writes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks import bench_plan_offsets, bench_scale, report, runner, scale
from benchmarks.batches import DecodeBatch, Work
from benchmarks.bench_plan_offsets import OffsetsSetup
from benchmarks.bench_step import CanarySetup, StepSetup
from benchmarks.bench_verify import VerifySetup
from benchmarks.case import Case, ProcessCase
from benchmarks.timing import Cpu, Time
from cupy_kvcanary import RealKvHashMode
from cupy_kvcanary.cli import main
from cupy_kvcanary.sources import STEMS

if TYPE_CHECKING:
    from benchmarks.case import Prepared, Setup

ROOT = Path(__file__).resolve().parents[2]
MODULES = runner.benchmarks()
CASES = {name: list(module.cases()) for name, module in MODULES.items()}
FOUR = {"num_sources": 4, "bytes_per_token": 64, "read_bytes": 32}


class FastCpu(Cpu):
    """Calls once instead of measuring."""

    environment = {"device": "test", "date": "today", "numpy": "0", "empty_us": {"median": 1.0}, "copy_tb_per_s": 0.01}  # noqa: RUF012

    def time(self, call: Any) -> Time:
        call()
        return Time(3.0, 2.0, 4.0)

    host_time = time


def launch_cases(name: str) -> list[Case]:
    return [case for case in CASES[name] if isinstance(case, Case)]


def outputs(setup: Setup) -> dict[str, np.ndarray[Any, Any]]:
    prepared: Prepared = setup.on(np)
    prepared.call()
    return {name: runner.as_numpy(name, array) for name, array in prepared.written.items()}


class TestCases:
    def test_every_kernel_and_the_step_the_host_and_the_scale_are_measured(self) -> None:
        assert set(MODULES) == {*STEMS, "host", "scale", "step"}

    @pytest.mark.parametrize("name", MODULES)
    def test_names_tell_cases_apart(self, name: str) -> None:
        names = [case.name for case in CASES[name]]
        assert len(set(names)) == len(names)

    @pytest.mark.parametrize("name", MODULES)
    def test_there_are_quick_cases_and_others(self, name: str) -> None:
        assert any(case.is_quick for case in CASES[name])

    def test_the_grid_of_the_issue_is_covered(self) -> None:
        offsets = launch_cases("plan_offsets")
        assert {1, 1048576} <= {case.work for case in offsets}
        assert {"slots", "block table", "page list"} <= {case.parameters["table"] for case in offsets}
        verify = [case.parameters for case in launch_cases("verify")]
        assert {0, 1024, 4096, 65536, 131072} <= {row["prefix"] for row in verify}
        assert {1, 1048576} <= {row["bs"] for row in verify}
        assert {"splitmix64", "affine"} == {row["chain"] for row in verify}
        assert {1, 16} == {row["page_size"] for row in verify}
        assert {0, 16, 64, 128, 512, 2048} <= {row["hashed_bytes"] for row in verify}
        assert any(row["window"] for row in verify)
        assert {1, 4} <= {row["num_buffers"] for row in verify}
        step = [case.parameters for case in launch_cases("step")]
        for size in ((256, 4096), (32, 1024), (64, 65536)):
            assert {"none", "4 x 32 of 64 bytes"} <= {
                row["real_kv"] for row in step if (row["bs"], row["prefix"]) == size
            }

    def test_without_a_gpu_only_small_cases_are_chosen(self) -> None:
        all_cases = [case for cases in CASES.values() for case in cases]
        quick, full = (runner.selected(all_cases, Cpu(), is_quick) for is_quick in (True, False))
        assert 0 < len(quick) < len(full) < len(all_cases)
        assert not [case for case in full if case.needs_gpu]
        assert all(case.moved_bytes <= runner.CPU_MOST_BYTES_QUICK for case in quick if isinstance(case, Case))

    def test_a_case_that_does_not_fit_into_memory_is_left_out(self) -> None:
        case = launch_cases("plan_offsets")[0]
        assert runner.selected([case], Cpu(), is_quick=False)
        assert not runner.selected([replace(case, memory_bytes=2**50)], Cpu(), is_quick=False)


class TestBatches:
    @pytest.mark.parametrize(
        "work",
        [
            Work(bs=3, prefix=40),
            Work(bs=3, prefix=40, chain="affine", page_size=1),
            Work(bs=3, prefix=40, window=10),
            Work(bs=3, prefix=40, table="block table"),
            Work(bs=3, prefix=40, table="page list", num_buffers=4),
            Work(bs=3, prefix=40, num_slots=5000),
            Work(bs=3, prefix=40, num_buffers=2, **FOUR),
            Work(bs=3, prefix=40, mode=RealKvHashMode.PARTIAL, **FOUR),
            Work(bs=2, prefix=0),
            Work(bs=1, prefix=1),
        ],
        ids=lambda work: work.name,
    )
    def test_verify_and_step_find_the_damage_and_nothing_else(self, work: Work) -> None:
        for setup in (VerifySetup(work, "plan + verify"), StepSetup(work)):
            found, expected = outputs(setup), setup.expected()
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], runner.as_numpy(name, value), err_msg=name)
        assert (found["violation_write_index 0"][0] > 0) == (work.entries > work.bs)

    def test_a_sample_of_a_large_batch_has_every_damaged_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = Work(bs=4, prefix=500)
        all_of_them = DecodeBatch(work, is_damaged=True).expected_violations
        monkeypatch.setattr("benchmarks.batches._MOST_CHECKED", 10)
        sample = DecodeBatch(work, is_damaged=True).expected_violations
        for name, value in all_of_them.items():
            np.testing.assert_array_equal(runner.as_numpy(name, value), runner.as_numpy(name, sample[name]))

    @pytest.mark.parametrize(
        "work",
        [Work(bs=3, prefix=40, num_buffers=4, chain="affine"), Work(bs=3, prefix=40, num_buffers=4, **FOUR)],
        ids=lambda work: work.name,
    )
    def test_a_canary_steps_over_the_same_batch_and_finds_nothing(self, work: Work) -> None:
        setup = CanarySetup(work)
        found, expected = outputs(setup), setup.expected()
        assert len(expected) == 4
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


class TestRunner:
    def test_a_row_has_time_share_and_parameters(self) -> None:
        case = next(case for case in launch_cases("plan_offsets") if case.work == 256)
        (row,) = runner.run([case], FastCpu(), None)
        assert row.name == "256"
        assert row.device_us == Time(3.0, 2.0, 4.0)
        assert row.copy_share == case.moved_bytes / 3.0 / 1e6 / 0.01
        assert (row.peer, row.peer_source, row.aims) == ({}, "", {})

    def test_a_wrong_result_is_no_result(self, monkeypatch: pytest.MonkeyPatch) -> None:
        setup = OffsetsSetup(bench_plan_offsets.Work(bs=8))
        expected = setup.expected()
        expected["out_write_offsets"][3] += 1
        monkeypatch.setattr(setup, "expected", lambda: expected)
        case = replace(launch_cases("plan_offsets")[0], setup=lambda: setup)
        with pytest.raises(runner.WrongResultError, match="out_write_offsets of the checked call is not NumPy's"):
            list(runner.run([case], FastCpu(), None))

    def test_violations_may_be_in_any_order(self) -> None:
        ring = np.array([[2, 1], [1, 2], [1, 1]])
        np.testing.assert_array_equal(
            runner.as_numpy("violation_ring 0", ring), runner.as_numpy("violation_ring 0", ring[::-1])
        )
        np.testing.assert_array_equal(runner.as_numpy("table", ring), ring)

    def test_a_process_is_measured_by_what_it_prints(self) -> None:
        (row,) = runner.run([ProcessCase(name="seven", code="print(7.0)")], Cpu(), None)
        assert row.host_us == Time(7.0, 7.0, 7.0)

    def test_the_import_of_the_package_is_measured(self) -> None:
        case = next(case for case in CASES["host"] if case.name == "import of the package, NumPy with it")
        (row,) = runner.run([case], Cpu(), None)
        assert row.host_us is not None
        assert row.host_us.median > 1_000


class TestScale:
    ENVIRONMENT = {"empty_us": {"median": 0.7}, "copy_tb_per_s": 4.0, "hash_words_per_us": 1e6}  # noqa: RUF012

    def test_bytes_dominate_a_large_step_and_launches_a_small_one(self) -> None:
        small = scale.cost_of(Work(bs=1, prefix=16, num_buffers=4), self.ENVIRONMENT)
        large = scale.cost_of(Work(bs=256, prefix=131072, num_buffers=4), self.ENVIRONMENT)
        assert small.launches > 10 * (small.bytes + small.hashes)
        assert large.bytes > 10 * large.launches
        assert large.total == sum(large)

    def test_twice_the_buffers_are_twice_the_records(self) -> None:
        one, two = (Work(bs=256, prefix=4096, num_buffers=count) for count in (1, 2))
        assert scale.canary_bytes(two) == 2 * scale.canary_bytes(one)

    def test_a_full_pool_of_an_h200(self) -> None:
        pools = [scale.canary_bytes(work) for work in bench_scale.WORKS]
        assert max(pools) == 40_000_000 * 32 * 4
        assert max(work.entries for work in bench_scale.WORKS) == 256 * 131072

    def test_the_model_stands_beside_what_was_measured(self) -> None:
        work = bench_scale.WORKS[0]
        head, lines = bench_scale.model_table({work.name: 15_000.0}, self.ENVIRONMENT)
        assert len({len(head), *map(len, lines)}) == 1
        assert lines[0][-2:] == ["15,000", "50.00%"]
        assert lines[1][-2] == "-"


class TestCommand:
    def test_it_prints_a_table_and_writes_json_csv_and_a_plot(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "new"
        files = ["--json", str(target), "--csv", str(target / "all.csv"), "--plot", str(target)]
        assert main(["bench", "scatter", "--quick", "--device", "cpu", *files]) == 0
        printed = capsys.readouterr().out
        assert "\nscatter\n" in printed
        assert "1 x 4096" in printed
        result = json.loads((target / "scatter.json").read_text(encoding="utf-8"))
        assert result["benchmark"] == "scatter"
        assert {"device", "date", "numpy", "copy_tb_per_s"} <= set(result["environment"])
        assert [row["name"] for row in result["rows"]] == ["1 x 4096", "32 x 1024"]
        with (target / "all.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        assert [line["name"] for line in lines] == ["1 x 4096", "32 x 1024"]
        assert float(lines[0]["device_us"]) == result["rows"][0]["device_us"]["median"]
        assert (target / "scatter.png").read_bytes().startswith(b"\x89PNG")

    def test_an_unknown_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "nothing", "--device", "cpu"]) == 2
        assert "NAME must be one of host, move" in capsys.readouterr().err

    def test_cuda_without_a_gpu(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert main(["bench", "scatter", "--device", "cuda"]) == 2
        assert "cupy must be installed to run on CUDA arrays" in capsys.readouterr().err

    def test_a_target_that_is_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert main(["bench", "scatter", "--device", "cpu", "--json", str(tmp_path / "file")]) == 2
        assert "--json must be a file that can be written" in capsys.readouterr().err

    def test_it_runs_in_a_plain_checkout_from_elsewhere(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "cupy_kvcanary", "bench", "scatter", "--quick", "--device", "cpu"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        )
        assert "32 x 1024" in done.stdout


def test_columns_without_values_are_left_out() -> None:
    head, lines = report.table([runner.Row(name="a", device_us=Time(1.0, 1.0, 2.0)), runner.Row(name="b")])
    assert head == ["", "us", "quartiles"]
    assert lines == [["a", "1.00", "1.00 - 2.00"], ["b", "-", "-"]]
