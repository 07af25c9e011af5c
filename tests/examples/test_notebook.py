"""The notebook runs, finds what it says it finds, and is stored with the outputs that it has now."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")
# Builds its cache where there is none, which says so in the notebook if it takes long.
pytest.importorskip("matplotlib.font_manager", reason="matplotlib is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "canary.ipynb"
MOST_BYTES = 300_000


def outputs(notebook: Any) -> Iterator[tuple[int, str, str]]:
    """(number of the cell, kind of output, text) of all that is text of this project, without times."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            texts = {output.name: output.text} if output.output_type == "stream" else output.data
            for kind, text in sorted(texts.items()):
                if not kind.startswith("image/") and 'class="dataframe"' not in text:
                    yield number, kind, re.sub(r"\d+\.\d s ago", "just now", text)


def text_of(notebook: Any, kind: str) -> str:
    return "\n".join(text for _, of_kind, text in outputs(notebook) if of_kind == kind)


@pytest.fixture(scope="module")
def stored() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Executed in a folder of its own, with a Jupyter that is set up nowhere else."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    client = nbclient.NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    with pytest.MonkeyPatch.context() as environment:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            environment.setenv(name, str(folder))
        environment.setenv("PYTHONPATH", str(ROOT))
        client.execute()
    return notebook


def test_each_damage_is_found_for_what_it_is(fresh: Any) -> None:
    printed, tables = text_of(fresh, "stdout"), text_of(fresh, "text/html")
    assert "1. overwritten (verify; full attention, K and V, head and tail)" in printed
    assert "request 0 (row 1); positions 4-6; page 13; slots 52-54" in printed
    assert re.findall(r'<span class="pattern">(\w+)</span>', tables) == ["overwritten", "kv_changed"]
    assert "slot 10<br>verify; full attention, V, head and tail" in tables


def test_exchanged_requests_are_found_with_expected_tokens_only(fresh: Any) -> None:
    printed = text_of(fresh, "stdout").splitlines()
    assert [line for line in printed if line.startswith("expected tokens")] == [
        "expected tokens off: nothing found",
        "expected tokens on : {'foreign_tokens'}",
    ]


def test_a_healthy_and_a_repaired_engine_are_left_alone(fresh: Any) -> None:
    assert [line for line in text_of(fresh, "stdout").splitlines() if line.startswith("reports:")] == [
        "reports: []"
    ] * 3


def test_the_pool_is_drawn_once(fresh: Any) -> None:
    images = [o for cell in fresh.cells for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(images) == 1


def test_nothing_warns(fresh: Any) -> None:
    assert text_of(fresh, "stderr") == ""


def test_the_stored_outputs_are_those_of_a_fresh_run(stored: Any, fresh: Any) -> None:
    assert list(outputs(stored)) == list(outputs(fresh)), "run: jupyter execute --inplace examples/canary.ipynb"
    assert [cell.get("execution_count") for cell in stored.cells] == [
        cell.get("execution_count") for cell in fresh.cells
    ]


def test_it_is_small_and_names_no_path() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert not re.search(r"(?<![\w.<])/(?:home|root|tmp|usr|work)/", text)
