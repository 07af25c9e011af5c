"""Addresses past 2 and 4 GiB, on a GPU with room for them."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import (
    CanaryLaunchTag,
    VerifyOrWriteContext,
    WritePlan,
    launch_canary_verify_batch_kernel,
    launch_canary_write_kernel,
    plan_offsets,
)
from tests.helpers.backends import require_gpu
from tests.helpers.buffers import HostBuffer, splitmix64

FIRST_SLOT = 67_108_864  # its record of 32 bytes begins at byte 2^31
ROW, WIDTH = 20_000, 131_072  # the row begins at entry 2.6 * 10^9
ROOM = 16 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("chain", ["splitmix64", "affine"])
def test_21_a_record_and_a_row_far_behind_the_start(chain: str) -> None:
    require_gpu()
    import cupy

    if cupy.cuda.runtime.memGetInfo()[0] < ROOM:
        pytest.skip("the GPU has less than 16 GiB free")
    canary = VerifyOrWriteContext.allocate(
        FIRST_SLOT + 2, kernel_kind=CanaryLaunchTag.HEAD_K_FULL, ring_capacity=8, device="cuda"
    )
    table = cupy.zeros((ROW + 1, WIDTH), cupy.int32)
    slots = [FIRST_SLOT, 5, FIRST_SLOT + 1]
    table[ROW, :3] = cupy.asarray(slots, cupy.int32)
    stamp = WritePlan(
        write_offsets=cupy.asarray([0, 3]),
        write_seed_slot_indices=cupy.asarray([-1]),
        write_num_valid_reqs=cupy.ones(1, cupy.int32),
    )
    launch_canary_write_kernel(
        context=canary,
        plan=stamp,
        input_ids=cupy.asarray([11, 12, 13]),
        positions=cupy.arange(3),
        out_cache_loc=cupy.asarray(slots),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        chain=chain,
    )
    expected = HostBuffer.empty(3)
    expected.stamp([0, 1, 2], [11, 12, 13], chain)
    for slot, record in zip(slots, expected.canary_buf, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(canary.canary_buf[slot]), record)

    plan = plan_offsets(cupy.asarray([ROW]), cupy.asarray([3]), cupy.asarray([1]), table)
    assert int(plan.write_seed_slot_indices[0]) == FIRST_SLOT + 1

    def violations() -> list[list[int]]:
        canary.violation_write_index[...] = 0
        launch_canary_verify_batch_kernel(
            context=canary,
            req_pool_indices=cupy.asarray([ROW]),
            prefix_lens=cupy.asarray([3]),
            req_to_token=table,
            full_to_swa_index_mapping=None,
            verify_offsets_scratch=plan.verify_offsets,
            verify_num_valid=plan.verify_num_valid,
            verify_enable=plan.verify_enable,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
            swa_window_size=0,
            verify_capacity=3,
            check_verify_expected_token=False,
            chain=chain,
        )
        return canary.violation_ring[: int(canary.violation_write_index[0])].tolist()

    assert violations() == []
    canary.canary_buf[FIRST_SLOT, 8] ^= 1  # its position
    anchor = splitmix64(0xC0FFEE1234567890) - 2**64
    found = sorted(violations(), key=lambda row: row[2])
    assert [(row[1], row[7]) for row in found] == [(FIRST_SLOT, 2), (5, 1)]
    assert found[0][5] == anchor
