"""Compile and load every kernel ahead of time."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from .arrays import as_device
from .compile import cuda_device, kernel_handle
from .sources import STEMS, joined_source

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENTRY = re.compile(r'extern "C" __global__ void[^{;]*?\b(kvc_\w+)\(')


def entries(stem: str) -> list[str]:
    """The kernels of a stem, in the order of its source."""
    return _ENTRY.findall(joined_source(stem))


def warmup(device: Any = "cuda") -> None:
    """Compile and load every kernel for a device: afterwards no launcher compiles, and all may be captured.

    Takes a few seconds on a machine that never ran this version, and milliseconds where CuPy's disk cache has the
    kernels. A progress bar is drawn where stderr is a terminal and rich is installed. On a CPU there is nothing to do.

    Parameters
    ----------
    device : `cuda`, `cuda:1`, or a torch or CuPy device.

    Raises
    ------
    KvCanaryRuntimeError
        CuPy or the device is missing, or a kernel does not compile; slugs in docs/errors.md.

    """
    place = as_device(device)
    if place.type == "cpu":
        return
    kernels = [(stem, entry) for stem in STEMS for entry in entries(stem)]
    with cuda_device(place.index):
        for stem, entry in _with_progress(kernels, f"kernels for {place}"):
            kernel_handle(stem, entry, place.index)


def _with_progress(items: list[tuple[str, str]], what: str) -> Iterable[tuple[str, str]]:
    if not sys.stderr.isatty():
        return items
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    return track(items, what, console=Console(stderr=True), transient=True)
