"""Arguments for the write launcher, and its contract in plain Python."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from cupy_kvcanary.constants import WRITE_SCAN_ITEMS, WRITE_SCAN_THREADS
from cupy_kvcanary.ops import write as write_op
from cupy_kvcanary.ops.write import launch_canary_write_kernel
from cupy_kvcanary.types import WritePlan
from tests.helpers.buffers import MASK, HostBuffer, link, signed, splitmix64

if TYPE_CHECKING:
    from tests.helpers.backends import ArrayBackend

ANCHOR = splitmix64(0xC0FFEE1234567890)
PLAN = ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs")
ENTRIES = ("input_ids", "positions", "out_cache_loc", "expected_input_tokens", "expected_input_positions")
MAPPING = "full_to_swa_index_mapping"

KERNELS = ("kvc_write", "kvc_write_walk", "kvc_write_affine", "kvc_write_affine_scan")


def chain_of(kernel: str) -> Any:
    return "affine" if "affine" in kernel else "splitmix64"


def make_arguments(
    offsets: Any,
    seeds: Any,
    tokens: Any,
    positions: Any,
    slots: Any,
    *,
    num_valid: int | None = None,
    expected_tokens: Any = None,
    expected_positions: Any = None,
    mapping: Any = None,
) -> dict[str, Any]:
    """The plan's arrays and the entries', by their names, and the mapping of slots."""
    values = dict(zip(ENTRIES, (tokens, positions, slots, expected_tokens, expected_positions), strict=True))
    return {
        "write_offsets": np.array(offsets, np.int64),
        "write_seed_slot_indices": np.array(seeds, np.int64),
        "write_num_valid_reqs": np.array([len(seeds) if num_valid is None else num_valid], np.int32),
        **{name: None if value is None else np.array(value, np.int64) for name, value in values.items()},
        MAPPING: None if mapping is None else np.array(mapping, np.int64),
    }


def with_dtypes(arguments: dict[str, Any], **dtypes: Any) -> dict[str, Any]:
    """Some of the arrays as another dtype, in which their values may be other ones."""
    return arguments | {
        name: arguments[name].astype(dtype) for name, dtype in dtypes.items() if arguments[name] is not None
    }


def one_request(slots: Any, first_position: int = 0, seed: int = -1, tokens: Any = None) -> dict[str, Any]:
    """One request that writes consecutive positions."""
    n = len(slots)
    tokens = range(11, 11 + n) if tokens is None else tokens
    return make_arguments([0, n], [seed], tokens, range(first_position, first_position + n), slots)


def slots_of_the_last_place(num_slots: int) -> list[int]:
    """Slots that all belong into the last place of the affine scan's table of slots."""
    size = 2 * WRITE_SCAN_THREADS * WRITE_SCAN_ITEMS
    return [slot for slot in range(num_slots) if (slot * 0x9E3779B1 % 2**32 * size) >> 32 == size - 1]


def write(
    backend: ArrayBackend,
    buffers: list[HostBuffer],
    arguments: dict[str, Any],
    kernel: str = "kvc_write",
    padding_slot: int | None = 0,
) -> int:
    """Write with one of the kernels; the buffers as they are then, and the status."""
    on_device = backend.on_device(arguments)
    contexts = [buffer.on_device(backend) for buffer in buffers]
    status = backend.array(np.zeros(1, np.int32))
    chain = chain_of(kernel)
    kernels = write_op._KERNELS[chain]
    # From how many entries on blocks take over.
    most = 2**62 if kernel == kernels.of_warps else -(2**62)
    with mock.patch.dict(write_op._KERNELS, {chain: replace(kernels, warp_max_entries=most)}):
        launch_canary_write_kernel(
            context=contexts,
            plan=WritePlan(**{name: on_device[name] for name in PLAN}),
            enable_write_input_assert=on_device["expected_input_tokens"] is not None,
            **{name: on_device[name] for name in ENTRIES},
            full_to_swa_index_mapping=on_device.get(MAPPING),
            padding_slot=padding_slot,
            chain=chain,
            out_status=status,
        )
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(backend, context)
    return int(backend.to_numpy(status)[0])


@dataclass
class Expected:
    """What a buffer holds after a write."""

    buffer: HostBuffer
    rows: list[tuple[int, ...]]
    num_stored: int
    status: int
    is_determined: bool
    """No request writes a slot that another writes or starts from: only then is there one right result."""


def expected_write(before: HostBuffer, arguments: dict[str, Any], chain: str, padding_slot: int | None = 0) -> Expected:
    """The contract, entry by entry, with Python's unbounded integers."""
    lists = {name: None if array is None else array.tolist() for name, array in arguments.items()}
    offsets, seeds, num_valid = (lists[name] for name in PLAN)
    tokens, positions, slots, expected_tokens, expected_positions = (lists[name] for name in ENTRIES)
    num_tokens, num_slots, kind = len(tokens), len(before.canary_buf), before.kernel_kind
    after = copy.copy(before)
    after.canary_buf = before.canary_buf.copy()
    num_reqs = min(max(num_valid[0], 0), len(seeds))
    status = 0 if num_reqs == num_valid[0] else 8
    mapping = lists.get(MAPPING)
    rows: list[tuple[int, ...]] = []

    def report(r: int, *row: int) -> None:
        details = (r, -1, row[5], seeds[r], 0, 0, 0, -1, 0, 0, 0, 0, 0)
        rows.append((kind, *row, *(details if before.is_detailed else ())))

    writers: dict[int, set[int]] = {}
    readers: list[tuple[int, int]] = []
    num_stored = 0
    for r in range(num_reqs):
        begin = min(max(offsets[r], 0), num_tokens)
        end = min(max(offsets[r + 1], begin), num_tokens)
        status |= 0 if (begin, end) == (offsets[r], offsets[r + 1]) else 8
        if begin == end:
            continue
        seed, h, last = seeds[r], ANCHOR, None
        if seed >= 0 and seed != padding_slot:
            if seed >= num_slots:
                report(r, seed, 0, 0, 0, 0, 0, 128)
            else:
                readers.append((r, seed))
                token, position, prev_hash, _ = before.record(seed)
                h = link(chain, token, position, prev_hash)
                last = position if before.enable_chain_position_assert else None
        for i in range(begin, end):
            token, position, slot = tokens[i], positions[i], slots[i]
            if mapping is not None and slot >= 0:
                status |= 4 if slot >= len(mapping) else 0
                slot = mapping[min(slot, len(mapping) - 1)]
            if slot < 0:
                continue
            if slot >= num_slots:
                report(r, slot, position, token, token, signed(h), 0, 256)
                continue
            if expected_tokens is not None:
                bits = (8 if token != expected_tokens[i] else 0) | (16 if position != expected_positions[i] else 0)
                if bits:
                    report(r, slot, position, token, expected_tokens[i], signed(h), expected_positions[i], bits)
            if last is not None and position & MASK != (last + 1) & MASK:
                report(r, slot, position, token, token, signed(h), signed((last + 1) & MASK), 16)
            after.set_record(slot, token, position, h, before.real_kv_hash(slot))
            writers.setdefault(slot, set()).add(r)
            num_stored += 1
            h = link(chain, token & MASK, position & MASK, h)
            last = None if last is None else position
    is_determined = all(len(requests) == 1 for requests in writers.values()) and all(
        writers.get(seed, {r}) == {r} for r, seed in readers
    )
    return Expected(after, sorted(rows), num_stored, status, is_determined)


def assert_written(
    backend: ArrayBackend,
    buffers: list[HostBuffer],
    arguments: dict[str, Any],
    kernel: str,
    padding_slot: int | None = 0,
) -> None:
    """The launch leaves each buffer as the contract says. Buffers must not share anything."""
    expected = [expected_write(buffer, arguments, chain_of(kernel), padding_slot) for buffer in buffers]
    if backend.reports_races and not all(result.is_determined for result in expected):
        return
    counts = [buffer.violation_count for buffer in buffers]
    status = write(backend, buffers, arguments, kernel, padding_slot)
    for buffer, count, result in zip(buffers, counts, expected, strict=True):
        assert status == result.status
        assert (buffer.slot_run_counter, buffer.kernel_run_counter) == (result.num_stored, 1)
        if not result.is_determined:
            continue
        np.testing.assert_array_equal(buffer.canary_buf, result.buffer.canary_buf)
        assert buffer.violation_count == min(count + len(result.rows), 2**31 - 1)
        stored = min(len(result.rows), max(0, buffer.ring_capacity - count))
        assert not Counter(buffer.rows(count, count + stored)) - Counter(result.rows)
