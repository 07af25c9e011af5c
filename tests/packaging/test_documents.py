"""What the documents say was measured, and the README's commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.tables import DOCUMENTS, with_tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m tools.tables"


def examples() -> list[Any]:
    """Every Python example, and what it prints: behind the calls, or in the block that follows."""
    found = []
    for path in (ROOT / "README.md", ROOT / "docs" / "canary.md"):
        text = path.read_text(encoding="utf-8")
        for block in re.finditer(r"```python\n(.*?)```(?:\n\n```\n(.*?)```)?", text, flags=re.DOTALL):
            code, output = block.groups()
            expected = output.splitlines() if output else re.findall(r"print\(.*\)  # (.*)", code)
            found.append(pytest.param(code, expected, id=f"{path.name}:{text[: block.start()].count(chr(10)) + 1}"))
    return found


@pytest.mark.parametrize(("code", "expected"), examples())
def test_examples_print_what_they_say(code: str, expected: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = re.findall(r"<!-- test command -->\n```sh\n(.*)\n```", README)
    assert " -m pytest -n auto " in command
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_lead_to_files() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
