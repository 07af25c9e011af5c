"""What is installed: the package's version, the CuPy wheels, the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import warnings

from .errors import PREFIX, KvCanaryWarning

__version__ = "0.1.0"

_CUPY_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


def installed_cupy_wheels() -> dict[str, str]:
    """Versions of the installed distributions that provide `import cupy`, by name."""
    import importlib.metadata  # takes a good part of the package's own import

    versions = {}
    for name in _CUPY_WHEELS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cuda_driver_version() -> tuple[int, int] | None:
    """CUDA version that the driver supports, or None without a driver. Creates no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def warn_of_two_cupy_wheels() -> None:
    """Warn, once, where several CuPy wheels are installed: they write into one folder and break each other."""
    wheels = list(installed_cupy_wheels())
    if len(wheels) < 2:
        return
    driver = cuda_driver_version()
    fitting = f"cupy-cuda{driver[0]}x" if driver is not None else ""
    kept = fitting if fitting in wheels else wheels[-1]
    removed = " ".join(name for name in wheels if name != kept)
    warnings.warn(
        f"{PREFIX}{' and '.join(wheels)} are installed and break each other; remove {removed}: "
        f"pip uninstall {removed} && pip install --force-reinstall --no-deps {kept}",
        KvCanaryWarning,
        stacklevel=4,
    )
