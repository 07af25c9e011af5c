"""A replay under the canary: no false alarms, every fault found and undone, and the simulated KV that it guards."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary.arrays import as_device
from cupy_kvcanary.canary import Canary
from cupy_kvcanary.cli import main
from cupy_kvcanary.engine_model import EngineConfig, EngineModel
from cupy_kvcanary.faults import FAULTS, FaultSite, Injection
from cupy_kvcanary.kv_model import KvModel, block_tokens
from cupy_kvcanary.replay import ReplayOptions, replay
from cupy_kvcanary.replay_canary import CPU_ENTRIES, verify_interval
from cupy_kvcanary.traces import BLOCK_TOKENS, TraceRequest, generate_trace
from tests.helpers.backends import require_gpu
from tests.helpers.device_array import DeviceArray
from tests.helpers.replay_errors import run_command

if TYPE_CHECKING:
    from pathlib import Path

    from cupy_kvcanary.replay_result import ReplayResult


def short_trace(num_requests: int = 24, *, seed: int = 0, output: int = 60) -> list[TraceRequest]:
    """Prompts of one to three blocks that branch off common ones, a few at a time."""
    random = np.random.default_rng(seed)
    requests: list[TraceRequest] = []
    ids: dict[tuple[int, ...], int] = {}
    for index in range(num_requests):
        path = (0, *random.integers(0, 2, random.integers(0, 2)).tolist(), 100 + index)
        tokens = (len(path) - 1) * BLOCK_TOKENS + int(random.integers(20, 400))
        block_ids = tuple(ids.setdefault(path[: n + 1], len(ids)) for n in range(len(path)))
        requests.append(TraceRequest(0.4 * index, tokens, output + int(random.integers(20)), block_ids))
    return requests


def guarded(requests: list[TraceRequest], **options: Any) -> ReplayResult:
    return replay(requests, ReplayOptions(device="cpu", **options))


@pytest.mark.parametrize(
    ("options", "happens"),
    [
        ({}, "sharing"),
        ({"window": 100}, "windows"),
        ({"page_size": 64, "chunk": 300, "max_running": 5, "speedup": 10.0}, "chunks"),
        ({"pool_slots": 3200, "page_size": 16, "speedup": 5.0}, "eviction and preemption"),
        ({"window": 40, "window_pool_slots": 4000, "pool_slots": 4000, "page_size": 4, "speedup": 5.0}, "all of it"),
        ({"verify_interval": 7}, "an interval"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_there_are_no_false_alarms(options: dict[str, Any], happens: str) -> None:
    requests = short_trace(seed=1)
    summary = guarded(requests, **({"verify_interval": 1} | options)).summary
    canary = summary.canary
    assert canary is not None
    assert (canary.violations, canary.false_alarms, canary.errors, canary.overflows) == (0, 0, 0, 0)
    assert summary.finished == len(requests)
    assert canary.buffers == (8 if "window" in options else 4)
    assert canary.verified_entries > 0
    if happens != "windows":
        assert summary.shared_prefix_share > 0
    if "preemption" in happens or happens == "all of it":
        assert summary.evicted_blocks > 0
        assert summary.preempted > 0


def test_every_slot_that_a_step_reads_is_verified_and_every_token_that_it_writes_is_stamped() -> None:
    requests = short_trace(8)
    summary = guarded(requests, verify_interval=1).summary
    assert summary.canary is not None
    assert summary.preempted == 0
    written = sum(request.input_length + request.output_length - 1 for request in requests)
    shared = round(summary.shared_prefix_share * sum(request.input_length for request in requests))
    assert summary.canary.verified_entries == 4 * summary.total_entries
    assert summary.canary.stamped_records == 4 * (written - shared)


def test_the_memory_that_is_taken_is_what_was_announced() -> None:
    """But for the alignment of NumPy's arrays, 64 bytes each, and the host's copy of the log."""
    canary = guarded(short_trace(3), window=64).summary.canary
    assert canary is not None
    assert canary.memory_announced <= canary.memory_taken <= 1.02 * canary.memory_announced


@pytest.mark.parametrize(
    "options",
    [
        {"verify_interval": 1},
        {"verify_interval": 4},
        {"verify_interval": 1, "window": 100},
        {"verify_interval": 5, "window": 100, "page_size": 4, "seed": 7},
        {"verify_interval": 1, "window": 200, "page_size": 8, "pool_slots": 6000, "speedup": 3.0, "check": True},
    ],
    ids=str,
)
def test_every_fault_is_found_for_its_reasons_within_an_interval_and_undone(options: dict[str, Any]) -> None:
    result = guarded(short_trace(40, output=80), inject=["all"], **options)
    expected = [name for name, fault in FAULTS.items() if "window" in options or not fault.needs_window]
    assert sorted(outcome.fault for outcome in result.outcomes) == sorted(expected)
    for outcome in result.outcomes:
        assert outcome.delay is not None, outcome
        assert 1 <= outcome.delay <= options["verify_interval"] + 1
        assert outcome.reasons & FAULTS[outcome.fault].shows_as == FAULTS[outcome.fault].shows_as
        assert outcome.violations > 0
    canary = result.summary.canary
    assert canary is not None
    assert (canary.false_alarms, canary.errors) == (0, 0)
    assert canary.violations == sum(outcome.violations for outcome in result.outcomes)
    assert canary.violations == result.series.violations.sum()
    assert result.reports
    assert result.is_good
    assert result.summary.differences in (None, 0)


def test_equal_seeds_inject_the_same() -> None:
    outcomes = [guarded(short_trace(), inject=["late-write", "record-lost"], seed=seed).outcomes for seed in (5, 5, 6)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_a_fault_comes_at_the_step_that_was_asked_for() -> None:
    events: list[Any] = []
    options = ReplayOptions(device="cpu", verify_interval=1, inject=["late-write@40"])
    result = replay(short_trace(4), options, on_event=events.append)
    assert [event.step for event in events if isinstance(event, Injection)] == [40]
    (outcome,) = result.outcomes
    assert outcome.injection == events[0]
    assert (outcome.found_step, outcome.delay) == (41, 1)
    assert result.reports == tuple(events[1:])


def test_a_fault_without_a_target_is_not_injected() -> None:
    result = guarded([TraceRequest(0.0, 100, 30)], inject=["rows-exchanged", "late-write"])
    injected = {outcome.fault: outcome.injection is not None for outcome in result.outcomes}
    assert injected == {"late-write": True, "rows-exchanged": False}
    assert not result.is_good


@pytest.mark.parametrize("name", ["late-write", "rows-exchanged"])
def test_a_fault_whose_target_is_preempted_is_injected_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests in a pool for one and a half, the second is preempted, with the damage not yet read."""
    fault = FAULTS[name]

    def damage_the_last(site: FaultSite) -> Any:
        return fault.damage(site if name == "rows-exchanged" else replace(site, requests=site.requests[-1:]))

    monkeypatch.setitem(FAULTS, name, replace(fault, damage=damage_the_last))
    requests = [TraceRequest(0.0, 200, 150), TraceRequest(0.0, 200, 150), TraceRequest(5.0, 50, 120)]
    events: list[Any] = []
    options = ReplayOptions(device="cpu", pool_slots=512, verify_interval=40, inject=[f"{name}@50"])
    result = replay(requests, options, on_event=events.append)
    assert result.summary.preempted == 1
    injected = [event.step for event in events if isinstance(event, Injection)]
    assert len(injected) == 2
    assert injected[0] == 50
    assert result.outcomes[0].injection is not None
    assert result.outcomes[0].injection.step == injected[1]
    assert result.summary.canary is not None
    assert result.summary.canary.false_alarms == 0


def test_the_interval_leaves_about_ten_million_slots_on_the_cpu_and_is_one_on_a_gpu() -> None:
    requests = generate_trace(50)
    interval = verify_interval(requests, ReplayOptions(), "cpu")
    plain = replay(requests, ReplayOptions(device="cpu", canary=False)).summary
    assert plain.total_entries / interval == pytest.approx(CPU_ENTRIES, rel=0.15)
    assert plain.canary is None
    assert verify_interval(requests, ReplayOptions(window=1024), "cpu") > interval
    assert verify_interval(requests, ReplayOptions(), "cuda") == 1
    assert verify_interval(requests, ReplayOptions(verify_interval=3), "cpu") == 3
    assert verify_interval(requests[:1], ReplayOptions(), "cpu") == 1
    many = [TraceRequest(0.0, 10_000, 100)] * 9000
    assert verify_interval(many, ReplayOptions(), "cpu") > 100
    assert verify_interval(many, ReplayOptions(inject=["all"]), "cpu") == 50


# ---- the command ----------------------------------------------------------------------------------------------------


def test_faults_violations_and_the_closing_table_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, page = tmp_path / "numbers.json", tmp_path / "replay.html"
    arguments = ("--requests", "3", "--device", "cpu", "--inject", "page-freed-too-early", "--inject", "late-write@100")
    assert run_command(*arguments, "--json", str(numbers), "--report", str(page)) == 0
    captured = capsys.readouterr()
    shown = captured.err.splitlines()
    assert [line.split(": ")[1] for line in shown if line.startswith("step ")] == ["page-freed-too-early", "late-write"]
    assert sum(line.startswith("    kvcanary v=1 ") for line in shown) == 6
    assert sum(line.strip().startswith("and ") for line in shown) == 2
    table = captured.out.splitlines()
    assert [line.split()[0] for line in table[-3:]] == ["fault", "page-freed-too-early", "late-write"]
    assert "false alarms" in captured.out
    written = json.loads(numbers.read_text())
    assert [outcome["fault"] for outcome in written["faults"]] == ["page-freed-too-early", "late-write"]
    assert written["summary"]["canary"]["false_alarms"] == 0
    assert "page-freed-too-early" in page.read_text(encoding="utf-8")


def test_a_fault_that_is_not_found_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Canary, "before_forward", lambda self, batch: None)
    assert run_command("--requests", "1", "--device", "cpu", "--inject", "record-lost") == 1
    assert "not found" in capsys.readouterr().out


def test_a_false_alarm_makes_the_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KvModel, "forward", lambda self: self.kv.__setitem__(..., self.num_tokens))
    assert run_command("--requests", "1", "--device", "cpu") == 1
    table = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert int(table["false alarms"].replace(",", "")) > 0


def test_without_the_canary_the_replay_only_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--requests", "2", "--device", "cpu", "--no-canary") == 0
    assert "off (--no-canary)" in capsys.readouterr().out


def test_the_demo_explains_each_fault_and_finds_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    for name in ("kv-bit-flipped-before", "rows-exchanged", "stale-mapping"):
        assert f"{name}: {FAULTS[name].summary}" in shown
    assert "0 false alarms" in shown
    assert "not found" not in shown


# ---- the simulated KV -----------------------------------------------------------------------------------------------


ON_DEVICE = SimpleNamespace(
    asarray=lambda values: np.array(values).view(DeviceArray),
    zeros=lambda *of: np.zeros(*of).view(DeviceArray),
    arange=np.arange,
)
"""NumPy in CuPy's place: every `asarray` is a copy."""


@pytest.mark.parametrize("xp", [np, ON_DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("window", [0, 64])
def test_each_slot_holds_the_kv_of_its_token(xp: Any, window: int) -> None:
    requests = short_trace(8)
    config = EngineConfig(pool_slots=8192, window=window, window_pool_slots=8192, chunk=300)
    engine = EngineModel(requests, config)
    kv = KvModel(engine, xp, as_device("cpu"))
    for step in engine.steps():
        kv.load(step)
        kv.forward()
        assert int(kv.bs[0]) == step.bs
        entry = 0
        for i in range(step.num_requests):
            row, prefix, extend = (
                int(column[i]) for column in (step.req_pool_indices, step.prefix_lens, step.extend_seq_lens)
            )
            tokens = kv.tokens_of(int(engine.request_of_row[row]), 0, prefix + extend)
            mine = slice(entry, entry + extend)
            np.testing.assert_array_equal(kv.input_ids[mine], tokens[prefix:])
            np.testing.assert_array_equal(kv.positions[mine], np.arange(prefix, prefix + extend))
            np.testing.assert_array_equal(kv.out_cache_loc[mine], step.req_to_token[row, prefix : prefix + extend])
            np.testing.assert_array_equal(kv.expected_tokens[row, : prefix + extend], tokens)
            assert kv.expected_token_lens[i] == prefix + extend
            entry += extend
        assert kv.num_tokens == entry
        np.testing.assert_array_equal(kv.page_table, step.req_to_token)
        if window:
            np.testing.assert_array_equal(kv.mapping, step.full_to_swa_index_mapping)


def test_equal_blocks_have_equal_tokens_and_kv_and_others_do_not() -> None:
    requests = [TraceRequest(0.0, 600, 2, (1, 2)), TraceRequest(0.0, 600, 2, (1, 3)), TraceRequest(0.0, 600, 2)]
    kv = KvModel(EngineModel(requests, EngineConfig(pool_slots=4096)), np, as_device("cpu"))
    first, second, third = (kv.tokens_of(index, 0, 601) for index in range(3))
    np.testing.assert_array_equal(first[:BLOCK_TOKENS], block_tokens(1))
    np.testing.assert_array_equal(first[:BLOCK_TOKENS], second[:BLOCK_TOKENS])
    for one, other in ((first[512:], second[512:]), (first, third)):
        assert np.mean(one == other) < 0.02
    np.testing.assert_array_equal(kv.tokens_of(0, 300, 590), first[300:590])

    slots, positions = np.array([20, 21, 22]), np.array([5, 5, 6])
    kv._write_kv(slots, np.array([9, 9, 9]), positions)
    layers = kv.kv[:, :, slots].reshape(4, 3, -1)
    np.testing.assert_array_equal(layers[:, 0], layers[:, 1])
    assert len(np.unique(layers[:, [0, 2]])) == layers[:, [0, 2]].size


def test_restoring_a_row_brings_back_table_mapping_and_kv() -> None:
    engine = EngineModel([TraceRequest(0.0, 100, 9)], EngineConfig(pool_slots=256, window=64, window_pool_slots=1024))
    kv = KvModel(engine, np, as_device("cpu"))
    steps = engine.steps()
    step = next(steps)
    kv.load(step)
    kv.forward()
    step = next(steps)
    kv.load(step)
    row, length = int(step.req_pool_indices[0]), int(step.prefix_lens[0])
    kept = [array.copy() for array in (kv.page_table, kv.mapping, kv.kv)]
    kv.page_table[row, :50] = 3
    kv.mapping[:] = 1
    kv.kv[:, :, step.req_to_token[row, :length]] = 0
    slots, positions, tokens = kv.restore(row, length)
    for array, before in zip((kv.page_table, kv.mapping, kv.kv), kept, strict=True):
        np.testing.assert_array_equal(array, before)
    np.testing.assert_array_equal(slots, step.req_to_token[row, :length])
    np.testing.assert_array_equal(positions, np.arange(length))
    np.testing.assert_array_equal(tokens, kv.tokens_of(0, 0, length))


@pytest.mark.gpu
def test_on_the_gpu_every_fault_is_found_in_the_next_step() -> None:
    require_gpu()
    options = ReplayOptions(device="cuda", window=200, check=True, inject=["all"])
    result = replay(short_trace(40, output=80), options)
    assert result.is_good
    assert {outcome.delay for outcome in result.outcomes} <= {1, 2}
    assert len(result.outcomes) == len(FAULTS)
