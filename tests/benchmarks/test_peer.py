"""The peer beside ours, by a stand-in for its package: launchers of the same names on torch tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import published, runner
from benchmarks.peer import LAUNCHERS, find_peer
from tests.benchmarks.test_suite import FastCpu, launch_cases

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.case import Case

# Its structures are its own, and it takes nothing but torch tensors; what it computes, ours computes.
STAND_IN = """
import dataclasses, enum
import torch
import cupy_kvcanary as ours

class RealKvHashMode(enum.IntEnum):
    NONE = 0
    PARTIAL = 1
    ALL = 2

@dataclasses.dataclass(frozen=True, kw_only=True)
class RealKvSource:
    tensor: torch.Tensor
    page_size: int
    num_bytes_per_token: int
    read_bytes: int

@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOrWriteContext:
    canary_buf: torch.Tensor
    kernel_kind: int
    violation_ring: torch.Tensor
    violation_write_index: torch.Tensor
    slot_run_counter: torch.Tensor
    kernel_run_counter: torch.Tensor
    enable_chain_position_assert: torch.Tensor
    real_kv_sources: tuple = ()
    real_kv_hash_mode: RealKvHashMode = RealKvHashMode.NONE

@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    verify_slot_indices: torch.Tensor
    verify_expected_tokens: torch.Tensor
    verify_expected_positions: torch.Tensor
    verify_prev_slot_indices: torch.Tensor
    verify_num_valid: torch.Tensor
    enable: torch.Tensor

@dataclasses.dataclass(frozen=True, kw_only=True)
class WritePlan:
    write_offsets: torch.Tensor
    write_seed_slot_indices: torch.Tensor
    write_num_valid_reqs: torch.Tensor

def _ours(value):
    if isinstance(value, (RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan)):
        fields = {name: _ours(field) for name, field in vars(value).items()}
        return getattr(ours, type(value).__name__)(**fields)
    if isinstance(value, tuple):
        return tuple(map(_ours, value))
    assert value is None or isinstance(value, (int, torch.Tensor)), type(value)
    return value

def _call(name, arguments):
    getattr(ours, name)(**{key: _ours(value) for key, value in arguments.items()})
"""
SIGNATURES = {
    "launch_plan_offsets_kernel": "req_pool_indices prefix_lens extend_seq_lens req_to_token full_to_swa_index_mapping "
    "out_verify_offsets_scratch out_write_offsets out_write_seed_slot_indices out_verify_num_valid out_verify_enable "
    "out_write_num_valid_reqs swa_window_size verify_capacity",
    "launch_plan_entries_kernel": "req_pool_indices prefix_lens req_to_token full_to_swa_index_mapping "
    "verify_offsets_scratch verify_enable req_to_verify_expected_tokens req_to_verify_expected_tokens_valid_lens "
    "out_verify_slot_indices out_verify_expected_tokens out_verify_expected_positions out_verify_prev_slot_indices "
    "kv_token_id_vs_position_offset swa_window_size",
    "launch_canary_plan_kernels": "verify_plan_out write_plan_out req_pool_indices prefix_lens extend_seq_lens "
    "req_to_token swa_window_size full_to_swa_index_mapping verify_capacity req_to_verify_expected_tokens "
    "req_to_verify_expected_tokens_valid_lens kv_token_id_vs_position_offset",
    "launch_canary_write_kernel": "context plan input_ids positions out_cache_loc enable_write_input_assert "
    "expected_input_tokens expected_input_positions",
    "launch_canary_verify_kernel": "context plan check_verify_expected_token",
    "launch_scatter_req_token_ids_kernel": "flat_in offsets req_pool_indices pool_out",
}
COMPUTES = "    _call({name!r}, dict(locals()))"
DOES_NOTHING = "    pass"
REFUSES = "    raise ValueError('bs too large')"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A function that makes `import sglang` find the stand-in, whose launchers do what it is given."""
    pytest.importorskip("torch")

    def install_peer(body: str) -> None:
        package = tmp_path / "sglang"
        folder = package / "kernels" / "ops" / "kv_canary"
        folder.mkdir(parents=True)
        for path in (package, package / "kernels", package / "kernels" / "ops", folder):
            (path / "__init__.py").touch()
        launchers = [
            f"def {name}(*, {', '.join(names.split())}):\n{body.format(name=name)}\n"
            for name, names in SIGNATURES.items()
        ]
        (folder / "canary.py").write_text("\n".join([STAND_IN, *launchers]), encoding="utf-8")
        # The engine's own folder of the same name has no launchers, and must not be imported.
        engine = package / "srt" / "kv_canary"
        engine.mkdir(parents=True)
        (engine / "runner.py").write_text("raise ImportError('an engine')\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install_peer
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def first(benchmark: str, **wanted: object) -> Case:
    return next(
        case
        for case in launch_cases(benchmark)
        if all(case.parameters.get(name) == value for name, value in wanted.items())
    )


CASES = [
    first("plan_offsets", bs=256),
    first("plan_entries", part="offsets + entries", bs=1),
    first("plan_entries", part="entries", bs=1),
    first("scatter", bs=32),
    first("write", num_requests=256, num_buffers=4, num_sources=4, chain="splitmix64"),
    first("verify", part="plan + verify", bs=1, prefix=1024),
    first("verify", part="verify entries", bs=1, prefix=1024),
    first("step", bs=1, prefix=1),
    first("step", bs=32, real_kv="4 x 32 of 64 bytes"),
]


def test_there_is_none() -> None:
    assert find_peer() is None


def test_signatures_are_of_all_launchers() -> None:
    assert set(SIGNATURES) == set(LAUNCHERS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_runs_on_the_same_arrays_and_its_results_are_compared(install, case: Case) -> None:
    install(COMPUTES)
    (row,) = runner.run([case], FastCpu(), find_peer())
    assert (row.peer_source, row.ratio) == ("same run", 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_peer_that_writes_something_else_is_found(install, case: Case) -> None:
    install(DOES_NOTHING)
    with pytest.raises(runner.WrongResultError, match="of the peer is not NumPy's"):
        list(runner.run([case], FastCpu(), find_peer()))


def test_a_peer_that_refuses_is_named(install) -> None:
    install(REFUSES)
    (row,) = runner.run([CASES[0]], FastCpu(), find_peer())
    assert (row.peer, row.peer_source, row.ratio) == ({}, "refused: ValueError: bs too large", None)


def test_the_affine_chain_has_no_peer(install) -> None:
    install(COMPUTES)
    (row,) = runner.run([first("write", num_requests=256, chain="affine")], FastCpu(), find_peer())
    assert row.peer_source == ""


def test_without_it_a_gpu_has_the_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastCpu, "is_gpu", True)
    (row,) = runner.run([CASES[0]], FastCpu(), None)
    assert (row.peer, row.peer_source, row.ratio) == ({"device_us": 9.7}, published.SOURCE, 9.7 / 3.0)
    assert row.aims == {"device_us": 2.0}
