"""The wheel holds what the tree holds, and works where the tree is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "benchmarks", "cupy_kvcanary", "kernels")
BUILD = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the sources: a leftover build folder would put deleted files into the wheel."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "results"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Built through the source distribution, as an index would."""
    subprocess.run(BUILD, cwd=tree, check=True, capture_output=True)
    return next((tree / "dist").glob("*.whl"))


def test_wheel_equals_tree(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("cupy_kvcanary/")}
    expected = {}
    for path in tree.rglob("*"):
        relative = path.relative_to(tree)
        if path.is_file() and relative.parts[0] in ("benchmarks", "kernels"):
            expected[f"cupy_kvcanary/{relative.as_posix()}"] = path.read_bytes()
        elif path.is_file() and relative.parts[0] == "cupy_kvcanary":
            expected[relative.as_posix()] = path.read_bytes()
    assert packed == expected


def test_installed_elsewhere_it_finds_its_sources_and_plans(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel]
    subprocess.run(install, check=True)
    code = (
        "import cupy_kvcanary, cupy_kvcanary.sources as s\n"
        f"assert cupy_kvcanary.__file__.startswith({str(site)!r}), cupy_kvcanary.__file__\n"
        "assert 'kvc_plan_offsets' in s.joined_source('plan_offsets')\n"
        "print(cupy_kvcanary.plan_offsets([2, 0, 4], [5, 9, 0], [1, 3, 4], [[7] * 16] * 6).totals())"
    )
    # -S and -P are not enough: the editable installation of the tree must not be what is imported.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "verify_entries=5, write_entries=5" in done.stdout


def test_installed_elsewhere_it_finds_its_benchmarks(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel]
    subprocess.run(install, check=True)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from cupy_kvcanary import bench_command, cli\n"
        f"assert bench_command.load_suite()('runner').__file__.startswith({str(site)!r})\n"
        "sys.exit(cli.main(['bench', 'scatter', '--quick', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "32 x 1024" in done.stdout
