"""Write on every backend: golden files, reported faults, properties, hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_kvcanary.ops.write import launch_canary_write_kernel
from cupy_kvcanary.types import WritePlan
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.golden import GoldenFile

GOLDEN = GoldenFile("write.npz")


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
        enable_chain_position_assert=inputs["enable_chain_position_assert"],
    )
def write(backend: ArrayBackend, buffers: list[HostBuffer], **arguments):
    contexts = [buffer.on_device(backend) for buffer in buffers]
    a = {k: backend.array(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    plan = WritePlan(**{k: a.pop(k) for k in ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs")})
    launch_canary_write_kernel(context=contexts, plan=plan, enable_write_input_assert=a["expected_input_tokens"] is not None, **a)
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(backend, context)


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    buffer = golden_buffer(inputs)
    names = ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs", "input_ids", "positions",
        "out_cache_loc", "expected_input_tokens", "expected_input_positions")
    write(backend, [buffer], **{n: inputs.get(n) for n in names})
    assert buffer.violations == sorted(tuple(row) for row in outputs["violations"].tolist())
    assert buffer.violation_count == outputs["violation_write_index"][0]
    assert buffer.slot_run_counter == outputs["slot_run_counter"][0]
    assert buffer.kernel_run_counter == outputs["kernel_run_counter"][0]
    np.testing.assert_array_equal(buffer.canary_buf, outputs["canary_buf"])
