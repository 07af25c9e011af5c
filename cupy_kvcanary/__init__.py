"""KV-cache canary on CuPy raw kernels. Importing it imports no CuPy and creates no CUDA context."""

from __future__ import annotations

from .constants import PLAN_BS_BLOCK_SIZE, REQ_POOL_IDX_PADDING, TOKEN_TO_KV_SLOT_PADDING, StatusBit
from .errors import KvCanaryError, KvCanaryRuntimeError, KvCanaryWarning
from .installation import __version__, warn_of_two_cupy_wheels
from .ops.plan_offsets import OffsetsPlan, OffsetsTotals, launch_plan_offsets_kernel, plan_offsets

__all__ = [
    "PLAN_BS_BLOCK_SIZE",
    "REQ_POOL_IDX_PADDING",
    "TOKEN_TO_KV_SLOT_PADDING",
    "KvCanaryError",
    "KvCanaryRuntimeError",
    "KvCanaryWarning",
    "OffsetsPlan",
    "OffsetsTotals",
    "StatusBit",
    "__version__",
    "launch_plan_offsets_kernel",
    "plan_offsets",
]

warn_of_two_cupy_wheels()
