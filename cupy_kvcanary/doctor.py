"""`kvcanary doctor`: what this machine can run, and whether the kernels are right on it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .buffers import CHAINS, Chain, VerifyOrWriteContext
from .compile import import_cupy
from .errors import KvCanaryRuntimeError
from .installation import __version__, cuda_driver_version, installed_cupy_wheels
from .ops.plan_offsets import OffsetsPlan, plan_offsets
from .ops.verify import launch_canary_verify_kernel
from .ops.write import launch_canary_write_kernel
from .types import VerifyPlan, WritePlan
from .warmup import warmup

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
    """Compile all, then compare with NumPy: plans of one block, several, several launches; a canary of each chain."""
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    batch_sizes = (1, 33, 1000, 10000)
    try:
        warmup()
        loaded = time.perf_counter() - start
        for bs in batch_sizes:
            batch = (rng.integers(0, 65, bs), rng.integers(0, 129, bs), rng.integers(0, 9, bs))
            table = rng.integers(0, 2**20, (65, 128), dtype=np.int32)
            expected = plan_offsets(*batch, table)
            actual = plan_offsets(*(cupy.asarray(array) for array in (*batch, table)))
            if not all(np.array_equal(want, got) for want, got in zip(_host(expected), _host(actual), strict=True)):
                return Finding("kernels", f"plan_offsets differs from NumPy at batch size {bs}", is_problem=True)
        for chain in CHAINS:
            expected_canary, actual_canary = (_write_damage_and_verify(xp, chain) for xp in (np, cupy))
            if not all(
                np.array_equal(want, got.get()) for want, got in zip(expected_canary, actual_canary, strict=True)
            ):
                return Finding("kernels", f"write or verify differs from NumPy, chain {chain}", is_problem=True)
    except KvCanaryRuntimeError as failure:
        return Finding("kernels", str(failure), is_problem=True)
    seconds = time.perf_counter() - start - loaded
    return Finding("kernels", f"all loaded in {loaded:.1f} s; plans and canaries equal NumPy's ({seconds:.1f} s)")


def _write_damage_and_verify(xp: Any, chain: Chain) -> tuple[Any, Any]:
    """Records of 1000 tokens, one of them damaged before they are verified; the records and the one violation."""
    rng = np.random.default_rng(1)
    slots, tokens = rng.permutation(2000)[:1000] + 1, rng.integers(0, 2**17, 1000)
    canary = VerifyOrWriteContext.allocate(2001, kernel_kind=0, ring_capacity=1, device="cpu" if xp is np else "cuda")
    launch_canary_write_kernel(
        context=canary,
        plan=WritePlan(
            write_offsets=xp.asarray(np.array([0, 1000])),
            write_seed_slot_indices=xp.asarray(np.array([-1])),
            write_num_valid_reqs=xp.ones(1, np.int32),
        ),
        input_ids=xp.asarray(tokens),
        positions=xp.arange(1000),
        out_cache_loc=xp.asarray(slots),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        chain=chain,
    )
    canary.canary_buf[int(slots[500])] ^= 1
    entries = VerifyPlan(
        verify_slot_indices=xp.asarray(slots[501:]),
        verify_prev_slot_indices=xp.asarray(slots[500:-1]),
        verify_expected_positions=xp.arange(501, 1000),
        verify_expected_tokens=xp.asarray(tokens[501:]),
        verify_num_valid=xp.full(1, 499, np.int32),
        enable=xp.ones(1, np.int32),
    )
    launch_canary_verify_kernel(context=canary, plan=entries, check_verify_expected_token=True, chain=chain)
    return canary.canary_buf, canary.violation_ring


def _host(plan: OffsetsPlan) -> list[Any]:
    return [array if isinstance(array, np.ndarray) else array.get() for array in vars(plan).values()]
