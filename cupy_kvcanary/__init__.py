"""KV-cache canary on CuPy raw kernels. Importing it imports no CuPy and creates no CUDA context."""

from __future__ import annotations

from .batch import Batch
from .buffers import RealKvSource, VerifyOrWriteContext, forget_chain
from .canary import Canary
from .canary_config import CanaryConfig, CanaryMemory, KvPool, memory_of
from .constants import (
    PLAN_BS_BLOCK_SIZE,
    REQ_POOL_IDX_PADDING,
    TOKEN_TO_KV_SLOT_PADDING,
    CanaryLaunchTag,
    FailReason,
    RealKvHashMode,
    StatusBit,
)
from .errors import KvCanaryError, KvCanaryRuntimeError, KvCanaryWarning, KvCorruptionError
from .health import Health, Watchdog
from .installation import __version__
from .launcher import bind_all
from .ops.canary_plan import launch_canary_plan_kernels
from .ops.move import (
    launch_canary_copy_records_kernel,
    launch_canary_export_records_kernel,
    launch_canary_forget_records_kernel,
    launch_canary_import_records_kernel,
)
from .ops.plan_entries import launch_plan_entries_kernel
from .ops.plan_offsets import OffsetsPlan, OffsetsTotals, launch_plan_offsets_kernel, plan_offsets
from .ops.scatter import launch_scatter_req_token_ids_kernel
from .ops.verify import launch_canary_verify_batch_kernel, launch_canary_verify_kernel
from .ops.write import launch_canary_write_kernel
from .page_tables import BlockTable, PageList
from .reports import Report
from .sweep import Sweep, SweepChunk
from .types import VerifyPlan, ViolationLog, WritePlan
from .violations import Record, Violation
from .warmup import warmup

__all__ = [
    "PLAN_BS_BLOCK_SIZE",
    "REQ_POOL_IDX_PADDING",
    "TOKEN_TO_KV_SLOT_PADDING",
    "Batch",
    "BlockTable",
    "Canary",
    "CanaryConfig",
    "CanaryLaunchTag",
    "CanaryMemory",
    "FailReason",
    "Health",
    "KvCanaryError",
    "KvCanaryRuntimeError",
    "KvCanaryWarning",
    "KvCorruptionError",
    "KvPool",
    "OffsetsPlan",
    "OffsetsTotals",
    "PageList",
    "RealKvHashMode",
    "RealKvSource",
    "Record",
    "Report",
    "StatusBit",
    "Sweep",
    "SweepChunk",
    "VerifyOrWriteContext",
    "VerifyPlan",
    "Violation",
    "ViolationLog",
    "Watchdog",
    "WritePlan",
    "__version__",
    "bind_all",
    "forget_chain",
    "launch_canary_copy_records_kernel",
    "launch_canary_export_records_kernel",
    "launch_canary_forget_records_kernel",
    "launch_canary_import_records_kernel",
    "launch_canary_plan_kernels",
    "launch_canary_verify_batch_kernel",
    "launch_canary_verify_kernel",
    "launch_canary_write_kernel",
    "launch_plan_entries_kernel",
    "launch_plan_offsets_kernel",
    "launch_scatter_req_token_ids_kernel",
    "memory_of",
    "plan_offsets",
    "warmup",
]
