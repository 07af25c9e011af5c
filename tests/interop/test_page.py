"""The page on interoperability names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", re.findall(r"`(tests/[^`]+)`", PAGE))
def test_a_named_test_exists(name: str) -> None:
    path, *parts = name.split("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    for part in parts:
        assert re.search(rf"\b(def|class) {part}\b", text)


def test_every_cell_points_to_a_test() -> None:
    table = PAGE[: PAGE.index("\n1. ")]
    numbers = {int(number) for cell in re.findall(r"\[([\d, ]+)\]", table) for number in cell.split(", ")}
    notes = {int(number) for number in re.findall(r"^(\d+)\. `tests/", PAGE, flags=re.MULTILINE)}
    assert numbers == notes
