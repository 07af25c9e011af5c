"""Arrays between guard words on the GPU; the host backends guard every array themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.helpers.backends import ArrayBackend

_GUARD_BYTES = 256
_GUARD = 0xA5


@dataclass(frozen=True)
class GuardedBackend(ArrayBackend):
    """Keeps the memory around every array that it makes; `check` finds it unchanged."""

    allocations: list[Any] = field(default_factory=list)

    def array(self, values: np.ndarray[Any, Any]) -> Any:
        if not self.is_gpu or values.nbytes == 0:
            return super().array(values)
        import cupy

        allocation = cupy.full(values.nbytes + 2 * _GUARD_BYTES, _GUARD, np.uint8)
        self.allocations.append(allocation)
        inside = allocation[_GUARD_BYTES:-_GUARD_BYTES].view(values.dtype).reshape(values.shape)
        inside[...] = cupy.asarray(values)
        return inside

    def check(self) -> None:
        for allocation in self.allocations:
            content = allocation.get()
            assert (content[:_GUARD_BYTES] == _GUARD).all()
            assert (content[-_GUARD_BYTES:] == _GUARD).all()
