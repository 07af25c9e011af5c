"""Verify and batch verify on every backend: golden files, reported faults, properties, hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_kvcanary.buffers import CHAINS
from cupy_kvcanary.constants import FailReason
from cupy_kvcanary.ops.verify import launch_canary_verify_kernel
from cupy_kvcanary.types import VerifyPlan
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.golden import GoldenFile

GOLDEN = GoldenFile("verify.npz")


def golden_buffer(inputs: dict[str, Any]) -> HostBuffer:
    sources = [
        HostSource(inputs[f"real_kv_source_{i}"], *(int(size) for size in inputs[f"real_kv_source_{i}_params"]))
        for i in range(inputs["num_real_kv_sources"])
    ]
    return HostBuffer(
        inputs["canary_buf"].copy(),
        inputs["kernel_kind"],
        inputs["ring_capacity"],
        sources=sources,
        mode=inputs["real_kv_hash_mode"],
        enable_chain_position_assert=inputs.get("enable_chain_position_assert"),
    )


def verify(
    backend: ArrayBackend, buffers: list[HostBuffer], plan: VerifyPlan, check_tokens: bool, **options: Any
) -> None:
    contexts = [buffer.on_device(backend) for buffer in buffers]
    launch_canary_verify_kernel(context=contexts, plan=plan, check_verify_expected_token=check_tokens, **options)
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(backend, context)


def make_plan(
    backend: ArrayBackend,
    slots: Any,
    prev_slots: Any,
    positions: Any,
    tokens: Any = None,
    *,
    num_valid: int | None = None,
    enable: int = 1,
) -> VerifyPlan:
    arrays = (slots, prev_slots, positions, [-1] * len(slots) if tokens is None else tokens)
    slots, prev_slots, positions, tokens = (backend.array(np.array(array, np.int64)) for array in arrays)
    return VerifyPlan(
        verify_slot_indices=slots,
        verify_prev_slot_indices=prev_slots,
        verify_expected_positions=positions,
        verify_expected_tokens=tokens,
        verify_num_valid=backend.array(np.array([len(slots) if num_valid is None else num_valid], np.int32)),
        enable=backend.array(np.array([enable], np.int32)),
    )


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    buffer = golden_buffer(inputs)
    plan = make_plan(
        backend,
        inputs["verify_slot_indices"],
        inputs["verify_prev_slot_indices"],
        inputs["verify_expected_positions"],
        inputs["verify_expected_tokens"],
        num_valid=int(inputs["verify_num_valid"][0]),
        enable=int(inputs["enable"][0]),
    )
    verify(backend, [buffer], plan, bool(inputs["check_verify_expected_token"]))
    assert buffer.violations == sorted(tuple(row) for row in outputs["violations"].tolist())
    assert buffer.violation_count == outputs["violation_write_index"][0]
    assert buffer.slot_run_counter == outputs["slot_run_counter"][0]
    assert buffer.kernel_run_counter == outputs["kernel_run_counter"][0]
    np.testing.assert_array_equal(buffer.canary_buf, inputs["canary_buf"])
