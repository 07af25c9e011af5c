"""Runs of the verify launchers over host data, and their contract in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

from cupy_kvcanary.launch import BACKENDS, Launch, NumpyBackend, Operation
from cupy_kvcanary.ops.plan_offsets import launch_plan_offsets_kernel
from cupy_kvcanary.ops.verify import launch_canary_verify_batch_kernel, launch_canary_verify_kernel
from cupy_kvcanary.types import VerifyPlan
from tests.helpers.buffers import HostBuffer, link, signed, splitmix64

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupy_kvcanary import VerifyOrWriteContext
    from tests.helpers.backends import ArrayBackend

ANCHOR = splitmix64(0xC0FFEE1234567890)


class Entry(NamedTuple):
    slot: int
    prev_slot: int
    position: int
    expected_token: int = -1


class Origin(NamedTuple):
    """What a batch knows about an entry, and a plan does not."""

    request: int = -1
    row: int = -1
    next_slot: int = -1


@dataclass
class Batch:
    """Requests and their page table, in host memory."""

    table: Any
    rows: list[int]
    prefix_lens: list[int]
    window: int = 0
    mapping: Any = None
    expected: Any = None
    valid_lens: list[int] | None = None
    offset: int = 0
    check_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        self.check_tokens = self.expected is not None

    def entries(self) -> list[Entry]:
        """What the batch reads, as the contract of plan entries says."""
        return [entry for entry, _ in self.entries_and_origins()]

    def origins(self) -> list[Origin]:
        return [origin for _, origin in self.entries_and_origins()]

    def entries_and_origins(self) -> list[tuple[Entry, Origin]]:
        found = []
        for r, (row, prefix) in enumerate(zip(self.rows, self.prefix_lens, strict=True)):
            if not 0 < row < len(self.table):
                continue
            prefix = min(max(prefix, 0), self.table.shape[1])
            for position in range(max(prefix - self.window, 0) if self.window else 0, prefix):
                before = self._slot(row, position - 1) if position else -1
                entry = Entry(self._slot(row, position), before, position, self._token(r, row, position))
                found.append((entry, Origin(r, row, self._slot(row, position + 1) if position + 1 < prefix else -1)))
        return found

    def _slot(self, row: int, position: int) -> int:
        slot = int(self.table[row, position])
        if self.mapping is None or slot < 0:
            return slot
        return int(self.mapping[min(slot, len(self.mapping) - 1)])

    def _token(self, r: int, row: int, position: int) -> int:
        index = position + self.offset
        if self.expected is None or self.valid_lens is None or not 0 <= index < self.valid_lens[r]:
            return -1
        rows, width = self.expected.shape
        return int(self.expected[row, index]) if row < rows and index < width else -1


def expected_violations(
    buffer: HostBuffer,
    entries: Sequence[Entry],
    *,
    check_tokens: bool,
    origins: Sequence[Origin] = (),
    chain: str = "splitmix64",
    padding_slot: int | None = 0,
    check_holes: bool = False,
) -> list[tuple[int, ...]]:
    """All rows that verifying the entries must report, with their details if the buffer has them, sorted."""
    num_slots = len(buffer.canary_buf)
    rows = []

    def link_of(slot: int) -> list[int]:
        return buffer.record(slot)[:3] if 0 <= slot < num_slots and slot != padding_slot else [0, 0, 0]

    for (slot, prev_slot, position, token), origin in zip_longest(entries, origins, fillvalue=Origin()):
        stored = buffer.record(slot) if 0 <= slot < num_slots and slot != padding_slot else [0, 0, 0, 0]
        bits, expected_hash = 0, 0
        if prev_slot < 0:
            expected_hash = ANCHOR
        elif prev_slot == padding_slot:
            expected_hash = stored[2]
        elif prev_slot >= num_slots:
            bits = 128
        else:
            expected_hash = link(chain, *buffer.record(prev_slot)[:3])
        wanted = token if check_tokens else -1
        if slot == padding_slot:
            bits = 512 if check_holes else 0
        elif not 0 <= slot < num_slots:
            bits |= 64
        else:
            bits |= 1 if bits == 0 and stored[2] != expected_hash else 0
            bits |= 2 if signed(stored[1]) != position else 0
            bits |= 4 if stored[3] != buffer.real_kv_hash(slot) else 0
            bits |= 32 if wanted != -1 and signed(stored[0]) != wanted else 0
        if bits:
            fields = (stored[1], stored[0], wanted % 2**64, stored[2], expected_hash)
            row = (buffer.kernel_kind, slot, *map(signed, fields), bits)
            is_read = 0 <= slot < num_slots and slot != padding_slot
            hashes = (stored[3], buffer.real_kv_hash(slot) if is_read else 0)
            details = (
                *(origin.request, origin.row, position),
                *(prev_slot, *link_of(prev_slot)),
                *(origin.next_slot, *link_of(origin.next_slot)),
                *hashes,
            )
            rows.append((*row, *map(signed, details)) if buffer.is_detailed else row)
    return sorted(rows)


def expected_skips(entries: Sequence[Entry], padding_slot: int | None = 0) -> int:
    """Entries of which a check is left out."""
    return sum(padding_slot in (entry.slot, entry.prev_slot) for entry in entries)


def make_plan(
    backend: ArrayBackend, entries: Sequence[Entry], *, num_valid: int | None = None, enable: int = 1
) -> VerifyPlan:
    """The entries as a plan on the backend's device."""
    columns = np.array(entries, np.int64).reshape(-1, 4).T
    slots, prev_slots, positions, tokens = (backend.array(np.ascontiguousarray(column)) for column in columns)
    return VerifyPlan(
        verify_slot_indices=slots,
        verify_prev_slot_indices=prev_slots,
        verify_expected_positions=positions,
        verify_expected_tokens=tokens,
        verify_num_valid=backend.array(np.array([len(entries) if num_valid is None else num_valid], np.int32)),
        enable=backend.array(np.array([enable], np.int32)),
    )


def verify_plan(
    backend: ArrayBackend, buffers: Sequence[HostBuffer], plan: VerifyPlan, *, check_tokens: bool, **options: Any
) -> None:
    """Run the launcher; the buffers then hold the results."""
    contexts = [buffer.on_device(backend) for buffer in buffers]
    launch_canary_verify_kernel(context=contexts, plan=plan, check_verify_expected_token=check_tokens, **options)
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(backend, context)


def verify_batch(backend: ArrayBackend, buffers: Sequence[HostBuffer], batch: Batch, **options: Any) -> int:
    """Plan offsets, unless they are given, then the batch launcher; the buffers then hold the results. The status."""
    bs = len(batch.rows)
    array = backend.array
    capacity = options.pop("verify_capacity", 10**6)
    offsets, given_num_valid = options.pop("offsets", None), options.pop("num_valid", 0)
    said_bs = options.pop("bs_on_device", None)
    shared = {
        "req_pool_indices": array(np.array(batch.rows, np.int64)),
        "prefix_lens": array(np.array(batch.prefix_lens, np.int64)),
        "req_to_token": array(np.ascontiguousarray(batch.table, np.int32)),
        "full_to_swa_index_mapping": None if batch.mapping is None else array(np.array(batch.mapping, np.int64)),
        "swa_window_size": batch.window,
        "verify_capacity": capacity,
        "out_status": array(np.zeros(1, np.int32)),
        "bs": None if said_bs is None else array(np.array([said_bs], np.int32)),
    }
    scratch = array(np.zeros(bs + 1, np.int64) if offsets is None else np.array(offsets, np.int64))
    num_valid, enable = array(np.array([given_num_valid], np.int32)), array(np.ones(1, np.int32))
    if offsets is None:
        launch_plan_offsets_kernel(
            **shared,
            extend_seq_lens=array(np.zeros(bs, np.int64)),
            out_verify_offsets_scratch=scratch,
            out_write_offsets=array(np.zeros(bs + 1, np.int64)),
            out_write_seed_slot_indices=array(np.zeros(bs, np.int64)),
            out_verify_num_valid=num_valid,
            out_verify_enable=enable,
            out_write_num_valid_reqs=array(np.zeros(1, np.int32)),
            bs_block_size=bs,
        )
    contexts = [buffer.on_device(backend) for buffer in buffers]
    pool, lens = batch.expected, batch.valid_lens
    launch_canary_verify_batch_kernel(
        context=contexts,
        **shared,
        verify_offsets_scratch=scratch,
        verify_num_valid=num_valid,
        verify_enable=enable,
        req_to_verify_expected_tokens=None if pool is None else array(np.array(pool, np.int32)),
        req_to_verify_expected_tokens_valid_lens=None if lens is None else array(np.array(lens, np.int64)),
        kv_token_id_vs_position_offset=batch.offset,
        check_verify_expected_token=batch.check_tokens,
        **options,
    )
    for buffer, context in zip(buffers, contexts, strict=True):
        buffer.read_back(backend, context)
    return int(backend.to_numpy(shared["out_status"])[0])


class _Recorder(NumpyBackend):
    """Keeps the launches that would have been made."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        self.launches += operation.launches(**arguments)


def batch_launch(contexts: Sequence[VerifyOrWriteContext], **changed: Any) -> Launch:
    """The launch for a batch of two requests in a table of three columns, with some arguments replaced."""
    arguments = {
        "req_pool_indices": np.array([1, 2]),
        "prefix_lens": np.array([2, 3]),
        "req_to_token": np.zeros((3, 3), np.int32),
        "full_to_swa_index_mapping": None,
        "verify_offsets_scratch": np.array([0, 2, 5]),
        "verify_num_valid": np.array([5], np.int32),
        "verify_enable": np.ones(1, np.int32),
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
        "swa_window_size": 0,
        "verify_capacity": 10**6,
        "check_verify_expected_token": False,
    }
    recorder = _Recorder()
    with mock.patch.dict(BACKENDS, cpu=recorder):
        launch_canary_verify_batch_kernel(context=contexts, **arguments | changed)
    (launch,) = recorder.launches
    return launch
