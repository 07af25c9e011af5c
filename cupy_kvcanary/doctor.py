"""`kvcanary doctor`: what this machine can run, and whether the kernels are right on it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .compile import import_cupy
from .errors import KvCanaryRuntimeError
from .installation import __version__, cuda_driver_version, installed_cupy_wheels
from .ops.plan_offsets import OffsetsPlan, plan_offsets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    text: str
    is_problem: bool = False


def examine() -> Iterator[Finding]:
    """Look at the machine, topic by topic."""
    yield Finding("package", f"cupy-kvcanary {__version__}, Python {platform.python_version()}, NumPy {np.__version__}")
    driver = cuda_driver_version()
    yield Finding("driver", "none" if driver is None else f"CUDA {driver[0]}.{driver[1]}")
    wheels = installed_cupy_wheels()
    listed = ", ".join(f"{name} {version}" for name, version in wheels.items()) or "none"
    if len(wheels) > 1:
        yield Finding("CuPy", f"{listed}: these break each other, keep one", is_problem=True)
    else:
        yield Finding("CuPy", listed)
    try:
        cupy = import_cupy()
    except KvCanaryRuntimeError as failure:
        yield Finding("GPU", f"not used, CPU arrays run on NumPy; {str(failure).splitlines()[1]}")
        return
    yield _examine_nvrtc(cupy)
    yield _examine_cache()
    if not cupy.cuda.is_available():
        yield Finding("GPU", "none usable; CPU arrays run on NumPy")
        return
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    yield Finding(
        "GPU",
        f"{properties['name'].decode()}, compute capability {properties['major']}.{properties['minor']}, "
        f"{properties['totalGlobalMem'] / 2**30:.1f} GiB",
    )
    yield _examine_kernels(cupy)


def _examine_nvrtc(cupy: ModuleType) -> Finding:
    """The version and the file: where several are installed, the one that was loaded is not always the expected one."""
    try:
        version = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except (ImportError, OSError, RuntimeError) as failure:
        return Finding("NVRTC", f"not usable: {failure}", is_problem=True)
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    loaded = {line.split()[-1] for line in lines if "libnvrtc.so" in line}
    return Finding("NVRTC", f"{version}, {', '.join(sorted(loaded)) or 'file unknown'}")


def _examine_cache() -> Finding:
    folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()  # CuPy's documented rule
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return Finding("cache", str(folder))
    return Finding("cache", f"{folder} may not be written: set CUPY_CACHE_DIR to a folder that may", is_problem=True)


def _examine_kernels(cupy: ModuleType) -> Finding:
    """Compile, then compare with NumPy on random batches: one block, several, several launches."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    batch_sizes = (1, 33, 1000, 10000)
    try:
        for bs in batch_sizes:
            batch = (rng.integers(0, 65, bs), rng.integers(0, 129, bs), rng.integers(0, 9, bs))
            table = rng.integers(0, 2**20, (65, 128), dtype=np.int32)
            expected = plan_offsets(*batch, table)
            actual = plan_offsets(*(cupy.asarray(array) for array in (*batch, table)))
            if not all(np.array_equal(want, got) for want, got in zip(_host(expected), _host(actual), strict=True)):
                return Finding("kernels", f"plan_offsets differs from NumPy at batch size {bs}", is_problem=True)
    except KvCanaryRuntimeError as failure:
        return Finding("kernels", str(failure), is_problem=True)
    seconds = time.perf_counter() - start
    return Finding("kernels", f"plan_offsets equals NumPy at batch sizes {batch_sizes} ({seconds:.1f} s)")


def _host(plan: OffsetsPlan) -> list[Any]:
    return [array if isinstance(array, np.ndarray) else array.get() for array in vars(plan).values()]
