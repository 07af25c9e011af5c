"""Host time: calls on torch tensors and CuPy arrays, checked and bound, and what happens once in a process.

The yardstick, in the same run, is a bare CuPy RawKernel call with 16 arrays, which checks nothing. Without a GPU the
calls include NumPy's computation.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.libraries import library_of

from . import bench_plan_offsets, bench_write
from .batches import Work
from .bench_plan_offsets import OffsetsSetup
from .bench_verify import VerifySetup
from .bench_write import WriteSetup
from .case import Case, Launch, Prepared, ProcessCase, Setup, prepared
from .timing import has_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "calls"

_BARE = f'extern "C" __global__ void kvc_bare({", ".join(f"long long* a{i}" for i in range(16))}) {{}}'
_IMPORT = """
import time
start = time.perf_counter()
import {module}
print(1e6 * (time.perf_counter() - start))
"""
_ON_GPU = """
import time, cupy, cupy_kvcanary
one, table = cupy.ones(1, "int64"), cupy.ones((2, 4), "int32")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
{call}
cupy.cuda.Device().synchronize()
print(1e6 * (time.perf_counter() - start))
"""


class BareSetup(Setup):
    def on(self, arrays: Any) -> Prepared:
        kernel = arrays.RawKernel(_BARE, "kvc_bare")
        taken = tuple(arrays.zeros(8, np.int64) for _ in range(16))
        return Prepared(call=lambda: kernel((1,), (32,), taken), bound=None, written={})

    def expected(self) -> dict[str, Any]:
        return {}


class TorchSetup(Setup):
    """Another setup's launches on torch tensors of the same memory."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def on(self, arrays: Any) -> Prepared:
        given = self.setup.on(arrays)
        return prepared(
            [Launch(launcher, _on_torch_each(arguments)) for launcher, arguments in given.launches], given.written
        )

    def expected(self) -> dict[str, Any]:
        return self.setup.expected()


class OtherTensorsSetup(Setup):
    """Calls in turn on tensors of the same form at four places."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def on(self, arrays: Any) -> Prepared:
        several = [TorchSetup(self.setup).on(arrays) for _ in range(4)]
        turns = itertools.cycle(several)
        return Prepared(call=lambda: next(turns).call(), bound=None, written=several[0].written)

    def expected(self) -> dict[str, Any]:
        return self.setup.expected()


def _on_torch_each(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: _on_torch(value) for name, value in arguments.items()}


def _on_torch(value: Any) -> Any:
    """Arrays as torch tensors of the same memory, those in structures too."""
    if library_of(value) in ("numpy", "cupy"):
        torch = importlib.import_module("torch")
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.from_dlpack(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_torch, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **_on_torch_each({f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init})
        )
    return value


def _torch_is_usable() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available() or not has_gpu()


def cases() -> Iterator[Case | ProcessCase]:
    offsets = bench_plan_offsets.Work(bs=256)
    verify = Work(bs=32, prefix=1024, num_buffers=4)
    write = bench_write.Work(num_requests=32, extend=1, num_buffers=4)
    yield replace(_case("bare CuPy RawKernel, 16 arrays", BareSetup), needs_gpu=True)
    if _torch_is_usable():
        aims = {"host_us": 12.0, "bound_us": 3.0}
        yield _case("offsets, torch", lambda: TorchSetup(OffsetsSetup(offsets)), aims)
        yield _case("offsets, torch, other tensors each call", lambda: OtherTensorsSetup(OffsetsSetup(offsets)))
        yield _case("batch verify, 4 buffers, torch", lambda: TorchSetup(VerifySetup(verify, "verify")), aims)
        yield _case("write, 4 buffers, torch", lambda: TorchSetup(WriteSetup(write, "splitmix64")), aims)
    bound = {"bound_us": 3.0}
    yield _case("offsets, CuPy", lambda: OffsetsSetup(offsets), bound)
    yield _case("batch verify, 4 buffers, CuPy", lambda: VerifySetup(verify, "verify"), bound)
    yield _case("write, 4 buffers, CuPy", lambda: WriteSetup(write, "splitmix64"), bound)
    yield ProcessCase(name="import of NumPy", code=_IMPORT.format(module="numpy"))
    yield ProcessCase(
        name="import of the package, NumPy with it",
        code=_IMPORT.format(module="cupy_kvcanary"),
        aims={"host_us": 100_000.0},
    )
    yield ProcessCase(
        name="first call, kernel in CuPy's disk cache",
        code=_ON_GPU.format(call="cupy_kvcanary.plan_offsets(one, one, one, table)"),
        needs_gpu=True,
        aims={"host_us": 50_000.0},
    )
    yield ProcessCase(
        name="warmup, kernels in CuPy's disk cache",
        code=_ON_GPU.format(call="cupy_kvcanary.warmup()"),
        needs_gpu=True,
    )


def _case(name: str, setup: Any, aims: dict[str, float] | None = None) -> Case:
    return Case(
        name=name,
        series=name,
        work=1,
        moved_bytes=0,
        memory_bytes=2**26,
        setup=setup,
        is_quick=True,
        measures=("host_us", "bound_us"),
        aims=aims or {},
    )
