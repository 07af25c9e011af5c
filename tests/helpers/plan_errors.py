"""One call for every catalogue entry of plans, canary buffers and real KV, which raises it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import RealKvSource, VerifyOrWriteContext, VerifyPlan, launch_canary_plan_kernels
from cupy_kvcanary.buffers import check_chain, check_chain_of, remember_chain, view_buffers
from tests.helpers.plan_entries import TABLE, make_plan_arguments

if TYPE_CHECKING:
    from collections.abc import Callable


def plan_arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments of the combined launcher for two requests, with some of them replaced."""
    tokens = np.zeros((6, 16), np.int32)
    given = make_plan_arguments(
        [2, 4], [5, 3], [1, 1], TABLE, mapping=np.arange(96), window=4, tokens=tokens, valid_lens=[5, 3], capacity=9
    )
    return given | changed


def aligned_bytes(*shape: int, shift: int = 0) -> np.ndarray[Any, Any]:
    """Zeroed uint8 whose first element is `shift` bytes behind a multiple of 64."""
    size = int(np.prod(shape))
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    return memory[start : start + size].reshape(shape)


def source(**changed: Any) -> RealKvSource:
    """A valid source of 8 pages of 4 tokens of 32 bytes, with some fields replaced."""
    fields = {"tensor": aligned_bytes(8, 128), "page_size": 4, "num_bytes_per_token": 32, "read_bytes": 32}
    return RealKvSource(**fields | changed)


def context(**changed: Any) -> VerifyOrWriteContext:
    """A valid context of 32 slots, with some fields replaced."""
    fields = {
        "canary_buf": aligned_bytes(32, 32),
        "kernel_kind": 0,
        "violation_ring": np.zeros((4, 8), np.int64),
        "violation_write_index": np.zeros(1, np.int32),
        "slot_run_counter": np.zeros(1, np.int64),
        "kernel_run_counter": np.zeros(1, np.int64),
    }
    return VerifyOrWriteContext(**fields | changed)


def _write_then_use_another_chain() -> None:
    buffers = view_buffers(context())
    remember_chain(buffers, "splitmix64")
    check_chain_of(buffers, "affine")


PLAN_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-must-be-a-plan": lambda: launch_canary_plan_kernels(**plan_arguments(verify_plan_out=None)),
    "kv-canary-window-needs-the-mapping": lambda: launch_canary_plan_kernels(
        **plan_arguments(full_to_swa_index_mapping=None)
    ),
    "kv-canary-verify-capacity-must-equal-the-plans-length": lambda: launch_canary_plan_kernels(
        **plan_arguments(verify_capacity=8)
    ),
    "kv-canary-expected-tokens-and-valid-lens-go-together": lambda: launch_canary_plan_kernels(
        **plan_arguments(req_to_verify_expected_tokens_valid_lens=None)
    ),
    "kv-canary-must-be-a-multiple": lambda: source(read_bytes=24),
    "kv-canary-must-be-aligned": lambda: source(tensor=aligned_bytes(8, 128, shift=8)),
    "kv-canary-must-have-rows": lambda: source(tensor=aligned_bytes(1024)),
    "kv-canary-row-must-hold-a-page": lambda: source(tensor=aligned_bytes(8, 112)),
    "kv-canary-source-must-cover-the-slots": lambda: context(real_kv_sources=(source(page_size=2),)),
    "kv-canary-must-be-real-kv-sources": lambda: context(real_kv_sources=source()),
    "kv-canary-at-most-4-real-kv-sources": lambda: context(real_kv_sources=(source(),) * 5),
    "kv-canary-real-kv-hash-mode-must-be-known": lambda: context(real_kv_hash_mode=3),
    "kv-canary-must-be-a-context": lambda: view_buffers([aligned_bytes(32, 32)]),  # type: ignore[list-item]
    "kv-canary-must-be-1-to-12-contexts": lambda: view_buffers([]),
    "kv-canary-chain-must-be-known": lambda: check_chain("chain", "md5"),
    "kv-canary-chain-must-be-that-of-the-buffer": _write_then_use_another_chain,
    "kv-canary-must-name-a-device": lambda: VerifyPlan.allocate(4, "gpu"),
}
