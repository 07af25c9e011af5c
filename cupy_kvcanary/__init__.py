"""KV-cache canary on CuPy raw kernels. Importing it imports no CuPy and creates no CUDA context."""

from __future__ import annotations

from .buffers import RealKvSource, VerifyOrWriteContext, forget_chain
from .constants import (
    PLAN_BS_BLOCK_SIZE,
    REQ_POOL_IDX_PADDING,
    TOKEN_TO_KV_SLOT_PADDING,
    CanaryLaunchTag,
    FailReason,
    RealKvHashMode,
    StatusBit,
)
from .errors import KvCanaryError, KvCanaryRuntimeError, KvCanaryWarning
from .installation import __version__, warn_of_two_cupy_wheels
from .ops.canary_plan import launch_canary_plan_kernels
from .ops.plan_entries import launch_plan_entries_kernel
from .ops.plan_offsets import OffsetsPlan, OffsetsTotals, launch_plan_offsets_kernel, plan_offsets
from .ops.scatter import launch_scatter_req_token_ids_kernel
from .ops.verify import launch_canary_verify_batch_kernel, launch_canary_verify_kernel
from .ops.write import launch_canary_write_kernel
from .page_tables import BlockTable, PageList
from .types import VerifyPlan, ViolationLog, WritePlan
from .warmup import warmup

__all__ = [
    "PLAN_BS_BLOCK_SIZE",
    "REQ_POOL_IDX_PADDING",
    "TOKEN_TO_KV_SLOT_PADDING",
    "BlockTable",
    "CanaryLaunchTag",
    "FailReason",
    "KvCanaryError",
    "KvCanaryRuntimeError",
    "KvCanaryWarning",
    "OffsetsPlan",
    "OffsetsTotals",
    "PageList",
    "RealKvHashMode",
    "RealKvSource",
    "StatusBit",
    "VerifyOrWriteContext",
    "VerifyPlan",
    "ViolationLog",
    "WritePlan",
    "__version__",
    "forget_chain",
    "launch_canary_plan_kernels",
    "launch_canary_verify_batch_kernel",
    "launch_canary_verify_kernel",
    "launch_canary_write_kernel",
    "launch_plan_entries_kernel",
    "launch_plan_offsets_kernel",
    "launch_scatter_req_token_ids_kernel",
    "plan_offsets",
    "warmup",
]

warn_of_two_cupy_wheels()
