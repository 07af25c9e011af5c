"""Compiles the joined sources through CuPy and keeps the kernel handles. CuPy is imported here, inside functions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .catalogue import error
from .installation import warn_of_two_cupy_wheels
from .sources import joined_source

if TYPE_CHECKING:
    from types import ModuleType

_OPTIONS = ("-std=c++17",)

# (stem, entry, device index) -> CuPy kernel, which owns the loaded module, and its driver handle. A dict, not a
# functools cache: looked up on every launch.
_kernels: dict[tuple[str, str, int], tuple[Any, int]] = {}
# Of two threads that load a kernel at once, one would be left with the handle of a module that is unloaded again.
_loading = threading.Lock()


def import_cupy() -> ModuleType:
    """CuPy, or the error that says which extra installs it."""
    warn_of_two_cupy_wheels()
    try:
        import cupy
    except ImportError as reason:
        raise error("kv-canary-cupy-must-be-installed", name="cupy", got=repr(reason)) from reason
    return cupy  # type: ignore[no-any-return]


def usable_cupy() -> ModuleType:
    """CuPy with a GPU that it can use, or the error that says what is missing."""
    cupy = import_cupy()
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return cupy
        reason = "no device"
    except cupy.cuda.runtime.CUDARuntimeError as failure:
        reason = str(failure)
    raise error("kv-canary-gpu-must-be-usable", name="device", got=reason)


def cuda_device(index: int) -> Any:
    """CuPy's device, to be made current by `with`; the error that says so where the machine does not have it."""
    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as reason:
        raise error("kv-canary-device-must-exist", name=f"cuda:{index}", got=str(reason)) from reason
    if not 0 <= index < count:
        raise error("kv-canary-device-must-exist", name=f"cuda:{index}", got=f"a machine with {count}")
    return cupy.cuda.Device(index)


def is_loaded(stem: str, entry: str, device_index: int) -> bool:
    """Whether `kernel_handle` has the kernel at hand."""
    return (stem, entry, device_index) in _kernels


def kernel_handle(stem: str, entry: str, device_index: int) -> int:
    """The driver's handle of a kernel, compiled and loaded on first use. The device must be current."""
    key = (stem, entry, device_index)
    if key not in _kernels:
        with _loading:
            if key not in _kernels:
                _kernels[key] = _load(stem, entry)
    return _kernels[key][1]


def _load(stem: str, entry: str) -> tuple[Any, int]:
    cupy = import_cupy()
    try:
        kernel = cupy.RawModule(code=joined_source(stem), options=_OPTIONS).get_function(entry)
        return kernel, kernel.kernel.ptr
    except (
        cupy.cuda.compiler.CompileException,
        cupy.cuda.driver.CUDADriverError,
        cupy.cuda.runtime.CUDARuntimeError,
        OSError,
    ) as reason:
        raise error("kv-canary-kernel-must-compile", name=entry, got=f"{type(reason).__name__}: {reason}") from reason
