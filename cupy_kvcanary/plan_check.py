"""A second, straight computation of offsets plans, to compare every plan of a replay with.

It shares no code with the backends: plain loops over Python integers, which neither wrap nor clamp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .engine_model import Step


class PlanOutputs(NamedTuple):
    """The in-place outputs of `launch_plan_offsets_kernel`, by their names there without `out_`."""

    verify_offsets_scratch: Any
    """int64[bs_block_size + 1]."""
    write_offsets: Any
    """int64[capacity + 1]."""
    write_seed_slot_indices: Any
    """int64[capacity]."""
    verify_num_valid: Any
    """int32[1]."""
    verify_enable: Any
    """int32[1]."""
    write_num_valid_reqs: Any
    """int32[1]."""


def straight_offsets(step: Step, window: int) -> tuple[list[int], list[int], list[int]]:
    """Verify offsets [bs + 1], write offsets [bs + 1] and seeds [bs] of a step whose values are all in range."""
    table, mapping = step.req_to_token, step.full_to_swa_index_mapping
    verify_offsets, write_offsets, seeds = [0], [0], []
    for row, prefix_len, extend_seq_len in zip(
        step.req_pool_indices[: step.bs].tolist(),
        step.prefix_lens[: step.bs].tolist(),
        step.extend_seq_lens[: step.bs].tolist(),
        strict=True,
    ):
        verify_len, write_len, seed = 0, 0, -1
        if row != 0:
            window_start = max(prefix_len - window, 0) if window > 0 else 0
            verify_len = max(prefix_len - window_start, 0)
            write_len = max(extend_seq_len, 0)
            if prefix_len > 0 and write_len > 0:
                seed = int(table[row, prefix_len - 1])
                if mapping is not None and seed >= 0:
                    seed = int(mapping[min(seed, len(mapping) - 1)])
        verify_offsets.append(verify_offsets[-1] + verify_len)
        write_offsets.append(write_offsets[-1] + write_len)
        seeds.append(seed)
    return verify_offsets, write_offsets, seeds


class PlanCheck:
    """Compares plans with the straight computation, and what a plan must leave alone with what was there before."""

    def __init__(self, outputs: PlanOutputs, window: int, verify_capacity: int) -> None:
        self._expected = PlanOutputs(*(array.copy() for array in outputs))
        self._window = window
        self._verify_capacity = verify_capacity

    def count_differences(self, step: Step, outputs: PlanOutputs) -> int:
        """How many values of the outputs (in host memory), tails included, are not what they must be."""
        verify_offsets, write_offsets, seeds = straight_offsets(step, self._window)
        expected = self._expected
        expected.verify_offsets_scratch[: step.bs + 1] = verify_offsets
        expected.write_offsets[: step.bs + 1] = write_offsets
        expected.write_seed_slot_indices[: step.bs] = seeds
        expected.verify_num_valid[0] = min(verify_offsets[-1], self._verify_capacity)
        expected.verify_enable[0] = 0 if verify_offsets[-1] > self._verify_capacity else 1
        expected.write_num_valid_reqs[0] = step.bs
        differences = 0
        for want, got in zip(expected, outputs, strict=True):
            if not np.array_equal(want, got):
                differences += _count(want, got)
                want[...] = got  # a stray write is counted once, not again at every later step
        return differences


def _count(want: NDArray[Any], got: NDArray[Any]) -> int:
    return int(np.count_nonzero(want != got))
