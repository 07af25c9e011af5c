"""What it costs to see another library's array: this package's views beside apache-tvm-ffi's importer, on CPU arrays.

Run from a checkout with torch, JAX and apache-tvm-ffi installed: `python tools/compare_importers.py`. Prints the table
of docs/interop.md. Times are the best of many short runs, in turns: other work on the machine disturbs them little.
"""

from __future__ import annotations

import functools
import sys
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax.numpy as jnp
import numpy as np
import torch
import tvm_ffi

from cupy_kvcanary.arrays import CPU, ArrayView, _view_dlpack, view_array

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, ROUNDS = 200, 200


@functools.cache
def dtype_of(dtype: Any) -> tuple[str, int]:
    return str(dtype), dtype.itemsize


def view_with_tvm_ffi(array: Any, is_read_only: bool) -> ArrayView:
    """The same view, from tvm-ffi's tensor: strides in bytes, a plain dtype name, the device."""
    tensor = tvm_ffi.from_dlpack(array)
    dtype, itemsize = dtype_of(tensor.dtype)
    strides = tuple([stride * itemsize for stride in tensor.strides])
    device = CPU if tensor.device.type == "cpu" else None
    return ArrayView(tensor.data_ptr(), tensor.shape, strides, dtype, itemsize, device, is_read_only, array, tensor)


def main() -> None:
    arrays = {"torch": torch.zeros(64, dtype=torch.int64), "NumPy": np.zeros(64, np.int64), "JAX": jnp.zeros(64)}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for library, array in arrays.items():
        calls[library, "our view"] = functools.partial(view_array, "a", array)
        calls[library, "our view through DLPack"] = functools.partial(_view_dlpack, "a", array)
        calls[library, "tvm-ffi import alone"] = functools.partial(tvm_ffi.from_dlpack, array)
        calls[library, "tvm-ffi import as a view"] = functools.partial(view_with_tvm_ffi, array, library == "JAX")
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for key, call in calls.items():
            best[key] = min(best[key], timeit.timeit(call, number=CALLS) / CALLS * 1e6)
    print(f"| us | {' | '.join(arrays)} |\n| --- |{' --- |' * len(arrays)}")
    for what in dict.fromkeys(what for _, what in calls):
        print(f"| {what} | {' | '.join(f'{best[library, what]:.2f}' for library in arrays)} |")
    print(f"\ntorch {torch.__version__}, NumPy {np.__version__}, apache-tvm-ffi {tvm_ffi.__version__}")


if __name__ == "__main__":
    main()
