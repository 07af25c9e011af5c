"""The command line: explain and doctor (replay has tests of its own)."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import FailReason, doctor, plan_offsets
from cupy_kvcanary.buffers import CHAINS, Chain
from cupy_kvcanary.catalogue import CATALOGUE, as_markdown
from cupy_kvcanary.cli import main
from tests.helpers.backends import require_gpu

SLUG = "kv-canary-offsets-kernel-bs-must-be-in-0-plan"


@pytest.mark.parametrize("text", [SLUG, "kv-canary: offsets kernel bs must be in [0, 4096], got 4097"])
def test_explain_a_slug_or_a_message(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", text]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(SLUG)
    for advice in ("launch in chunks", "raise bs_block_size", "plan_offsets, which has no bound"):
        assert advice in printed


def test_explain_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a message of another program"]) == 2
    assert "kv-canary: slug must be a slug or a message of the catalogue" in capsys.readouterr().err


def test_explain_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--list"]) == 0
    assert capsys.readouterr().out.split() == list(CATALOGUE)
    assert main(["explain", "--markdown"]) == 0
    assert capsys.readouterr().out == as_markdown()


def test_doctor_reports_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    topics = [line[2:].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert topics[:3] == ["package", "driver", "CuPy"]
    assert "GPU" in topics


def test_doctor_finds_a_cache_that_may_not_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert main(["doctor"]) == 1
    assert "! cache" in capsys.readouterr().out


def test_doctor_without_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert main(["doctor"]) == 0
    assert "CPU arrays run on NumPy; fix: pip install" in capsys.readouterr().out


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_plan_shows_itself() -> None:
    plan = plan_offsets([2, 0, 4], [5, 9, 0], [1, 3, 4], [[7] * 16] * 6)
    assert repr(plan) == (
        "OffsetsPlan(num_requests=3, verify_entries=5, write_entries=5, verify_enabled=True, status=<StatusBit: 0>)"
    )
    html = plan._repr_html_()
    assert "3 requests, 5 entries to verify (enabled), 5 to write" in html
    assert "<td>0</td><td>[0, 5)</td><td>[0, 1)</td><td>7</td>" in html


@pytest.mark.parametrize("chain", CHAINS)
def test_doctors_canary_finds_the_damage_and_only_that(chain: Chain) -> None:
    _, violations = doctor._write_damage_and_verify(np, chain)
    assert violations[0][7] == FailReason.VERIFY_CHAIN_HASH


@pytest.mark.gpu
def test_doctor_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    require_gpu()
    assert main(["doctor"]) == 0
    assert "plans and canaries equal NumPy's" in capsys.readouterr().out
