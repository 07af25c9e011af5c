"""Arguments for the plan launchers, and their contract in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_kvcanary.types import VerifyPlan, WritePlan
from tests.helpers.golden import FILL
from tests.helpers.plan_offsets import expected_outputs as expected_offsets
from tests.helpers.plan_offsets import make_arguments as make_offsets_arguments

ENTRY_ARRAYS = (
    "verify_slot_indices",
    "verify_expected_tokens",
    "verify_expected_positions",
    "verify_prev_slot_indices",
)

# Row 2 and row 4 of a table of 6 rows and 16 positions (fixture F1 of the reported faults).
TABLE = np.zeros((6, 16), np.int32)
TABLE[2, :6] = [5, 9, 3, 7, 11, 13]
TABLE[4, :4] = [20, 21, 22, 23]


def verify_plan(capacity: int) -> VerifyPlan:
    """Filled with FILL."""
    arrays = {name: np.full(capacity, FILL, np.int64) for name in ENTRY_ARRAYS}
    return VerifyPlan(**arrays, verify_num_valid=np.full(1, FILL, np.int32), enable=np.full(1, FILL, np.int32))


def write_plan(capacity: int) -> WritePlan:
    """Filled with FILL."""
    return WritePlan(
        write_offsets=np.full(capacity + 1, FILL, np.int64),
        write_seed_slot_indices=np.full(capacity, FILL, np.int64),
        write_num_valid_reqs=np.full(1, FILL, np.int32),
    )


def make_plan_arguments(
    rows: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    table: Any,
    *,
    mapping: Any = None,
    window: int = 0,
    capacity: int = 100,
    tokens: Any = None,
    valid_lens: Any = None,
    offset: int = 0,
    write_req_capacity: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Keyword arguments of `launch_canary_plan_kernels`, outputs filled with FILL and status 0."""
    return {
        "verify_plan_out": verify_plan(capacity),
        "write_plan_out": write_plan(len(rows) if write_req_capacity is None else write_req_capacity),
        "req_pool_indices": np.array(rows, np.int64),
        "prefix_lens": np.array(prefix_lens, np.int64),
        "extend_seq_lens": np.array(extend_seq_lens, np.int64),
        "req_to_token": np.array(table, np.int32) if isinstance(table, (np.ndarray, list)) else table,
        "swa_window_size": window,
        "full_to_swa_index_mapping": None if mapping is None else np.array(mapping, np.int64),
        "verify_capacity": capacity,
        "req_to_verify_expected_tokens": None if tokens is None else np.array(tokens, np.int32),
        "req_to_verify_expected_tokens_valid_lens": None if valid_lens is None else np.array(valid_lens, np.int64),
        "kv_token_id_vs_position_offset": offset,
        "out_status": np.zeros(1, np.int32),
        **others,
    }


def make_entries_arguments(
    rows: Any, prefix_lens: Any, table: Any, offsets: Any, *, enable: int = 1, capacity: int = 100, **options: Any
) -> dict[str, Any]:
    """Keyword arguments of `launch_plan_entries_kernel` with these offsets."""
    given = make_plan_arguments(rows, prefix_lens, rows, table, capacity=capacity, **options)
    plans = ("verify_plan_out", "write_plan_out")
    others = ("extend_seq_lens", "verify_capacity")
    arrays = given["verify_plan_out"]
    return {
        **{name: value for name, value in given.items() if name not in (*plans, *others)},
        "verify_offsets_scratch": np.array(offsets, np.int64),
        "verify_enable": np.full(1, enable, np.int32),
        **{f"out_{name}": getattr(arrays, name) for name in ENTRY_ARRAYS},
    }


class Contract:
    """Single entries in Python's unbounded integers, over a table of slots."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.status = 0

    def read_range(self, r: int) -> tuple[int, int, int]:
        """Row, window start and prefix of a request; nothing is read of a row that is no request's."""
        table, window = self.arguments["req_to_token"], self.arguments["swa_window_size"]
        row, prefix_len = (int(self.arguments[name][r]) for name in ("req_pool_indices", "prefix_lens"))
        if not 0 <= row < table.shape[0]:
            self.status |= 1
        if not 0 < row < table.shape[0]:
            return 0, 0, 0
        if prefix_len > table.shape[1]:
            self.status |= 2
        prefix_len = max(min(prefix_len, table.shape[1]), 0)
        return row, max(prefix_len - window, 0) if window > 0 else 0, prefix_len

    def slot(self, row: int, position: int) -> int:
        slot, mapping = int(self.arguments["req_to_token"][row, position]), self.arguments["full_to_swa_index_mapping"]
        if mapping is None or slot < 0:
            return slot
        if slot >= len(mapping):
            self.status |= 4
        return int(mapping[min(slot, len(mapping) - 1)])

    def token(self, r: int, row: int, position: int) -> int:
        tokens = self.arguments["req_to_verify_expected_tokens"]
        index = position + self.arguments["kv_token_id_vs_position_offset"]
        if tokens is None or row >= tokens.shape[0]:
            return -1
        valid_len = int(self.arguments["req_to_verify_expected_tokens_valid_lens"][r])
        return int(tokens[row, index]) if 0 <= index < min(valid_len, tokens.shape[1]) else -1

    def entry(self, r: int, row: int, position: int) -> tuple[int, int, int, int]:
        """In the order of ENTRY_ARRAYS."""
        prev_slot = self.slot(row, position - 1) if position > 0 else -1
        return self.slot(row, position), self.token(r, row, position), position, prev_slot


def expected_plan(arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What the plans and the status must hold after `launch_canary_plan_kernels`, request by request."""
    write_plan_out, verify_plan_out = arguments["write_plan_out"], arguments["verify_plan_out"]
    bs, capacity = arguments.get("bs", len(arguments["req_pool_indices"])), arguments["verify_capacity"]
    contract = Contract(arguments)
    entries = []
    for r in range(bs):
        row, start, prefix_len = contract.read_range(r)
        entries += [(r, row, position) for position in range(start, prefix_len)]
    offsets = expected_offsets(
        make_offsets_arguments(
            arguments["req_pool_indices"][:bs],
            arguments["prefix_lens"][:bs],
            arguments["extend_seq_lens"][:bs],
            arguments["req_to_token"],
            mapping=arguments["full_to_swa_index_mapping"],
            window=arguments["swa_window_size"],
            capacity=capacity,
        )
    )
    columns = {name: getattr(verify_plan_out, name).copy() for name in ENTRY_ARRAYS}
    if len(entries) <= capacity:
        for t, entry in enumerate(entries):
            for column, value in zip(columns.values(), contract.entry(*entry), strict=True):
                column[t] = value
    write_offsets = np.zeros_like(write_plan_out.write_offsets)
    write_offsets[: bs + 1] = offsets["out_write_offsets"]
    seeds = write_plan_out.write_seed_slot_indices.copy()
    seeds[:bs] = offsets["out_write_seed_slot_indices"]
    return {
        **columns,
        "verify_num_valid": offsets["out_verify_num_valid"],
        "enable": offsets["out_verify_enable"],
        "write_offsets": write_offsets,
        "write_seed_slot_indices": seeds,
        "write_num_valid_reqs": offsets["out_write_num_valid_reqs"],
        "out_status": arguments["out_status"] | offsets["out_status"] | contract.status,
    }


def expected_entries(arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """What the outputs must hold after `launch_plan_entries_kernel` with any offsets, entry by entry."""
    offsets = arguments["verify_offsets_scratch"].tolist()
    outputs = {f"out_{name}": arguments[f"out_{name}"].copy() for name in ENTRY_ARRAYS}
    bs = arguments.get("bs", len(arguments["req_pool_indices"]))
    contract = Contract(arguments)
    has_entries = bs > 0 and arguments["verify_enable"][0] != 0
    for t in range(min(offsets[bs], len(outputs["out_verify_slot_indices"])) if has_entries else 0):
        r = 0
        for bit in reversed(range(bs.bit_length())):
            candidate = r + (1 << bit)
            if candidate < bs and offsets[candidate] <= t:
                r = candidate
        row, start, prefix_len = contract.read_range(r)
        position = start + t - offsets[r]
        if start <= position < prefix_len:
            for output, value in zip(outputs.values(), contract.entry(r, row, position), strict=True):
                output[t] = value
    return outputs | {"out_status": arguments["out_status"] | contract.status}
