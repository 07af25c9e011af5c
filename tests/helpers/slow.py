"""Work that keeps a stream busy, so that a launch which does not wait for it reads what was there before."""

from __future__ import annotations

import functools
from typing import Any

_SOURCE = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(_SOURCE, "spin")


def spin(stream: int, cycles: int = 200_000) -> None:
    """About 100 us on a stream, by its handle."""
    import cupy
    import numpy as np

    from cupy_kvcanary.streams import as_cupy_stream

    with as_cupy_stream(cupy, stream):
        _kernel()((1,), (1,), (np.int64(cycles),))
