"""What the documents say was measured, and the README's commands are those that CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.tables import DOCUMENTS, with_tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m tools.tables"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_the_readmes_examples_print_what_they_say(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == re.findall(r"print\(.*\)  # (.*)", code)


def test_ci_runs_the_readmes_test_command() -> None:
    (command,) = re.findall(r"<!-- test command -->\n```sh\n(.*)\n```", README)
    assert command.endswith("-m pytest")
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
