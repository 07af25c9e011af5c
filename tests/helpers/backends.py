"""The backends that every kernel test runs on: NumPy, the CUDA sources on the CPU, and the GPU."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary.launch import Call, NumpyBackend, Operation, all_views
from tests.helpers.host_backend import HostArray, HostKernels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BACKEND_PARAMS = [
    "numpy",
    "host-plain",
    "host-address",
    "host-thread",
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@functools.cache
def gpu_is_available() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.is_available())
    except ImportError:
        return False


def require_gpu() -> None:
    """Skip on a machine without a GPU; fail instead where the run is there for the GPU."""
    if not gpu_is_available():
        if os.environ.get("KVCANARY_REQUIRE_GPU"):
            pytest.fail("KVCANARY_REQUIRE_GPU is set, but there is no usable CUDA device")
        pytest.skip("no CUDA device")


class HostBackend(NumpyBackend):
    """CPU arrays, computed by the CUDA sources compiled as C++."""

    def __init__(self, kernels: HostKernels) -> None:
        self.kernels = kernels

    def bind(self, calls: Sequence[Call]) -> Callable[[], None]:
        super().bind(calls)  # for its checks

        def run() -> None:
            for operation, arguments, _ in calls:
                self.kernels.run(operation.launches(**arguments), host_arrays(operation, arguments))

        return run


def host_arrays(operation: Operation, arguments: Mapping[str, Any]) -> list[HostArray]:
    """The memory of an operation's arguments, by their names."""
    arrays = []
    for name, view in all_views(arguments):
        first, end = view.span
        arrays.append(HostArray(first, end - first, name in operation.outputs, name))
    return arrays


@dataclass(frozen=True)
class ArrayBackend:
    """Moves arrays between a test and the device that its kernels run on."""

    name: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "gpu"

    @property
    def reports_races(self) -> bool:
        return self.name == "host-thread"

    def array(self, values: np.ndarray[Any, Any]) -> Any:
        """A copy of `values` on the device, with the same strides where it is the CPU."""
        if not self.is_gpu:
            return values
        import cupy

        return cupy.asarray(values)

    def on_device(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.array(value) if isinstance(value, np.ndarray) else value for name, value in arguments.items()
        }

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return array.get() if self.is_gpu else np.asarray(array)
