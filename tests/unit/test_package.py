"""How the package is built: what importing it does, its layers, and that twins keep the same names."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cupy_kvcanary
from cupy_kvcanary import KvCanaryWarning, installation
from cupy_kvcanary.ops import canary_plan as canary_plan_op
from cupy_kvcanary.ops import move as move_op
from cupy_kvcanary.ops import plan_entries as plan_entries_op
from cupy_kvcanary.ops import plan_offsets as plan_offsets_op
from cupy_kvcanary.ops import scatter as scatter_op
from cupy_kvcanary.ops import verify as verify_op
from cupy_kvcanary.ops import write as write_op
from cupy_kvcanary.sources import STEMS, joined_source

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cupy_kvcanary"

# Layer of each module: imports go down only.
LAYERS = [
    {"constants", "errors", "catalogue", "installation"},
    {
        "arrays",
        "checks",
        "libraries",
        "page_tables",
        "reference.page_table",
        "reference.records",
        "sources",
        "streams",
        *(f"reference.{stem}" for stem in STEMS),
    },
    {"buffers", "compile", "launch", "launcher", "types", "warmup"},
    {"ops.canary_plan", *(f"ops.{stem}" for stem in STEMS)},
    {
        "batch",
        "canary",
        "canary_buffers",
        "canary_config",
        "canary_records",
        "diagnosis",
        "doctor",
        "engine_model",
        "faults",
        "findings",
        "health",
        "injections",
        "kv_model",
        "metrics",
        "page_pool",
        "plan_check",
        "plots",
        "pool_plot",
        "ranks",
        "replay",
        "replay_canary",
        "replay_device",
        "replay_result",
        "report_charts",
        "report_html",
        "report_text",
        "reports",
        "snapshots",
        "sweep",
        "traces",
        "violations",
    },
    {"__main__", "bench_command", "cli", "demo_command", "replay_command", "replay_text", "report_page"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
PACKAGES = {"__init__", "ops.__init__", "reference.__init__"}


def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All but what stands under `if TYPE_CHECKING:`, which is never imported."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from run_time_nodes(child)


def imports_of(tree: ast.AST) -> list[tuple[int, str]]:
    """(level of the relative import, module) of every import statement."""
    found = []
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found += [(node.level, name) for name in names]
    return found


def test_every_module_has_a_layer() -> None:
    assert set(LEVEL) == set(modules()) - PACKAGES


@pytest.mark.parametrize("name", sorted(set(modules()) - PACKAGES))
def test_imports_go_down_only(name: str) -> None:
    package = name.split(".")[:-1]
    for level, imported in imports_of(modules()[name]):
        if level == 0:
            continue
        target = ".".join([*package[: len(package) - level + 1], imported])
        assert LEVEL[target] <= LEVEL[name], f"{name} imports {target}"


def test_only_the_compile_module_imports_cupy_and_none_imports_torch_or_jax() -> None:
    importers = {
        (name, imported.split(".")[0])
        for name, tree in modules().items()
        for level, imported in imports_of(tree)
        if level == 0
    }
    assert {name for name, imported in importers if imported == "cupy"} == {"compile"}
    assert not {imported for _, imported in importers} & {"torch", "jax", "cupy_backends", "cupyx"}


def test_importing_the_package_imports_no_array_library_but_numpy() -> None:
    code = (
        "import sys, cupy_kvcanary\n"
        "optional = {'torch', 'jax', 'rich', 'matplotlib', 'pandas', 'prometheus_client', 'mpi4py'}\n"
        "print(sorted({'cupy', 'cupy_backends', *optional} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
def test_a_process_may_fork_after_the_import() -> None:
    """No CUDA context exists before the first call, so a forked child can use the GPU."""
    from tests.helpers.backends import require_gpu

    require_gpu()
    code = (
        "import os, cupy_kvcanary\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import cupy as cp\n"
        "    one = cp.ones(1, 'int64')\n"
        "    total = cupy_kvcanary.plan_offsets(one, one, one, cp.ones((2, 4), 'int32')).totals().verify_entries\n"
        "    os._exit(0 if total == 1 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("driver", "removed", "kept"),
    [
        ((12, 4), "cupy-cuda13x", "cupy-cuda12x"),
        ((13, 0), "cupy-cuda12x", "cupy-cuda13x"),
        (None, "cupy-cuda12x", "cupy-cuda13x"),
    ],
)
def test_two_cupy_wheels_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, removed: str, kept: str
) -> None:
    monkeypatch.setattr(installation, "installed_cupy_wheels", lambda: {"cupy-cuda12x": "14", "cupy-cuda13x": "14"})
    monkeypatch.setattr(installation, "cuda_driver_version", lambda: driver)
    with pytest.warns(KvCanaryWarning, match=f"pip uninstall {removed} && pip install .* {kept}$"):
        installation.warn_of_two_cupy_wheels.__wrapped__()


def test_one_cupy_wheel_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "cupy-cuda12x":
            raise importlib.metadata.PackageNotFoundError(name)
        return "14.2.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert installation.installed_cupy_wheels() == {"cupy-cuda12x": "14.2.0"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installation.warn_of_two_cupy_wheels.__wrapped__()


def test_version_is_that_of_the_project_file() -> None:
    assert f'\nversion = "{cupy_kvcanary.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


OPERATIONS = {
    "move": (move_op.MOVE, move_op.EXPORT),
    "plan_entries": (plan_entries_op.OPERATION, canary_plan_op.OPERATION),
    "plan_offsets": (plan_offsets_op.OPERATION,),
    "scatter": (scatter_op.OPERATION,),
    "verify": (verify_op.VERIFY, verify_op.VERIFY_BATCH),
    "write": (write_op.OPERATION,),
}


@pytest.mark.parametrize("stem", STEMS)
def test_backends_take_the_same_arguments_under_the_same_names(stem: str) -> None:
    for operation in OPERATIONS[stem]:
        reference, launches = (inspect.signature(f).parameters for f in (operation.reference, operation.launches))
        assert list(reference) == list(launches)


@pytest.mark.parametrize("stem", STEMS)
def test_a_stem_has_a_file_of_each_kind(stem: str) -> None:
    for path in (
        f"kernels/{stem}.cu",
        f"cupy_kvcanary/ops/{stem}.py",
        f"cupy_kvcanary/reference/{stem}.py",
        f"tests/kernels/test_{stem}.py",
        f"benchmarks/bench_{stem}.py",
    ):
        assert (ROOT / path).is_file(), path


def test_every_kernel_is_a_stem_and_includes_nothing() -> None:
    assert {path.stem for path in (ROOT / "kernels").glob("*.cu")} == set(STEMS)
    for path in (ROOT / "kernels").iterdir():
        assert path.suffix in {".cu", ".cuh"}
        assert "#include" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("stem", STEMS)
def test_a_joined_source_names_its_files(stem: str) -> None:
    source = joined_source(stem)
    for name in ("common.cuh", f"{stem}.cu"):
        text = (ROOT / "kernels" / name).read_text(encoding="utf-8")
        assert f'#line 1 "kernels/{name}"\n{text}' in source


def test_a_launcher_looks_like_a_function_that_returns_nothing() -> None:
    launcher = cupy_kvcanary.launch_plan_offsets_kernel
    signature = inspect.signature(launcher)
    assert signature.return_annotation is None
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in signature.parameters.values())
    assert repr(launcher) == "<launcher launch_plan_offsets_kernel>"
    assert "Parameters" in (launcher.__doc__ or "")
