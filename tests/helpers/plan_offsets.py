"""Arguments for the offsets launcher, and its contract in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_kvcanary import PLAN_BS_BLOCK_SIZE
from tests.helpers.golden import FILL

OUTPUTS = (
    "out_verify_offsets_scratch",
    "out_write_offsets",
    "out_write_seed_slot_indices",
    "out_verify_num_valid",
    "out_verify_enable",
    "out_write_num_valid_reqs",
)


def make_arguments(
    rows: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    table: Any,
    *,
    mapping: Any = None,
    window: int = 0,
    capacity: int = 2**31 - 1,
    write_req_capacity: int | None = None,
    bs_block_size: int = PLAN_BS_BLOCK_SIZE,
) -> dict[str, Any]:
    """Keyword arguments of the strict launcher, outputs filled with FILL and status 0."""
    n = len(rows) if write_req_capacity is None else write_req_capacity
    return {
        "req_pool_indices": np.array(rows, np.int64),
        "prefix_lens": np.array(prefix_lens, np.int64),
        "extend_seq_lens": np.array(extend_seq_lens, np.int64),
        "req_to_token": np.array(table, np.int32),
        "full_to_swa_index_mapping": None if mapping is None else np.array(mapping, np.int64),
        "out_verify_offsets_scratch": np.full(bs_block_size + 1, FILL, np.int64),
        "out_write_offsets": np.full(n + 1, FILL, np.int64),
        "out_write_seed_slot_indices": np.full(n, FILL, np.int64),
        "out_verify_num_valid": np.full(1, FILL, np.int32),
        "out_verify_enable": np.full(1, FILL, np.int32),
        "out_write_num_valid_reqs": np.full(1, FILL, np.int32),
        "out_status": np.zeros(1, np.int32),
        "swa_window_size": window,
        "verify_capacity": capacity,
        "bs_block_size": bs_block_size,
    }


def expected_outputs(arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What the outputs must hold afterwards: the contract, request by request, with Python's unbounded integers."""
    table, mapping = arguments["req_to_token"], arguments["full_to_swa_index_mapping"]
    window, capacity = arguments["swa_window_size"], arguments["verify_capacity"]
    max_reqs, max_seq_len = table.shape
    outputs = {name: arguments[name].copy() for name in (*OUTPUTS, "out_status")}
    bs = arguments.get("bs", len(arguments["req_pool_indices"]))
    verify = write = status = 0
    for r in range(bs):
        row, p, e = (int(arguments[name][r]) for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens"))
        outputs["out_verify_offsets_scratch"][r] = verify
        outputs["out_write_offsets"][r] = _wrapped(write)
        outputs["out_write_seed_slot_indices"][r] = -1
        if not 0 <= row < max_reqs:
            status |= 1
        elif row != 0:
            if p > max_seq_len:
                status |= 2
                p = max_seq_len
            window_start = max(p - window, 0) if window > 0 else 0
            verify += max(p - window_start, 0)
            write += max(e, 0)
            if p > 0 and e > 0:
                slot = int(table[row, p - 1])
                if mapping is not None and slot >= 0:
                    status |= 4 if slot >= len(mapping) else 0
                    slot = int(mapping[min(slot, len(mapping) - 1)])
                outputs["out_write_seed_slot_indices"][r] = slot
    outputs["out_verify_offsets_scratch"][bs] = verify
    outputs["out_write_offsets"][bs] = _wrapped(write)
    outputs["out_verify_num_valid"][0] = min(verify, capacity)
    outputs["out_verify_enable"][0] = verify <= capacity
    outputs["out_write_num_valid_reqs"][0] = bs
    outputs["out_status"][0] |= status
    return outputs


def _wrapped(value: int) -> int:
    """As 64-bit arithmetic leaves it."""
    return (value + 2**63) % 2**64 - 2**63
