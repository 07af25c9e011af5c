"""The examples run as scripts and print what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.backends import require_gpu

ROOT = Path(__file__).resolve().parents[2]

OVERWRITTEN = [
    "272 records stamped or verified, 0 violations",
    "page 2 is given to another request, which writes its own K and V",
    "4 violations",
]


def run(name: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def check_decoding(lines: list[str]) -> None:
    """Two requests of 16 tokens; the four slots of the page that was overwritten are found, and only these."""
    texts, summary, found = lines[:2], lines[2:5], lines[5:]
    assert [len(text.split()) for text in texts] == [18, 18]
    assert summary == OVERWRITTEN
    assert [line.split(", token ")[0] for line in found] == [
        f"slot {8 + i} (page 2), position {4 + i}" for i in range(4)
    ]
    assert all(line.endswith(": <FailReason.VERIFY_REAL_KV_HASH: 4>") for line in found)


FOUND = [
    "slot 7, position 0: <FailReason.VERIFY_CHAIN_HASH|VERIFY_POSITION: 3>",
    "slot 11, position 4: <FailReason.VERIFY_CHAIN_HASH: 1>",
]


def test_torch_interop() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    first, *found = run("torch_interop.py", CUDA_VISIBLE_DEVICES="")
    assert (first, sorted(found)) == ("write offsets: tensor([0, 6])", sorted(FOUND))


@pytest.mark.gpu
def test_torch_interop_on_the_gpu() -> None:
    require_gpu()
    pytest.importorskip("torch", reason="torch is not installed")
    first, *found = run("torch_interop.py")
    assert (first, sorted(found)) == ("write offsets: tensor([0, 6], device='cuda:0')", sorted(FOUND))


def test_jax_paged_decode() -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    check_decoding(run("jax_paged_decode.py"))


@pytest.mark.gpu
def test_cupy_paged_decode() -> None:
    require_gpu()
    check_decoding(run("cupy_paged_decode.py"))


def test_cupy_paged_decode_says_that_it_needs_a_gpu() -> None:
    lines = run("cupy_paged_decode.py", CUDA_VISIBLE_DEVICES="")
    assert lines == ["no GPU: this example needs CuPy and a CUDA device"]
