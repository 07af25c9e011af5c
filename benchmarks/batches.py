"""A decode batch: page table, stamped records, real KV, and the arguments of the launchers that look at it.

Every request has the same prefix and extends by one token. Records are those that a clean engine would have left, but
for a few that are damaged, so that there is something to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cupy_kvcanary import (
    BlockTable,
    PageList,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    launch_canary_verify_kernel,
)
from cupy_kvcanary.constants import AFFINE_MULTIPLIER, CANARY_SLOT_BYTES, VIOLATION_FIELDS
from cupy_kvcanary.launch import ceil_div, with_numpy
from cupy_kvcanary.reference.records import anchor_hash, hash_real_kv

from .case import SECTOR, PeerLaunch

if TYPE_CHECKING:
    from cupy_kvcanary.buffers import Chain

Table = Literal["slots", "block table", "page list"]

_NUM_DAMAGED = 5
_MOST_CHECKED = 65536
"""Entries of a larger batch that NumPy looks at: the damaged ones, what follows them, and every so many-th."""

_KV_BLOCK = 4096
"""Slots with KV bytes of their own; behind them the bytes repeat."""

RING_CAPACITY = 64

FOUR_SOURCES: dict[str, Any] = {"num_sources": 4, "bytes_per_token": 64, "read_bytes": 32}
WIDE_SOURCE: dict[str, Any] = {"num_sources": 1, "bytes_per_token": 2048, "read_bytes": 2048}
"""Real KV that many works have."""

_UINT64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step looks at."""

    bs: int
    prefix: int
    chain: Chain = "splitmix64"
    num_buffers: int = 1
    num_sources: int = 0
    bytes_per_token: int = 0
    read_bytes: int = 0
    mode: RealKvHashMode = RealKvHashMode.ALL
    page_size: int = 16
    """1: random slots."""
    window: int = 0
    table: Table = "slots"
    num_slots: int = 0
    """Of the pool; 0: as many as the batch needs."""

    @property
    def entries(self) -> int:
        """That are verified, in each buffer."""
        return self.bs * (min(self.window, self.prefix) if self.window else self.prefix)

    @property
    def hashed_bytes(self) -> int:
        """Real KV of a slot."""
        return self.num_sources * (16 if self.mode == RealKvHashMode.PARTIAL else self.read_bytes)

    @property
    def pool_slots(self) -> int:
        """The padding page, the prefixes, the new tokens; no fewer than asked for."""
        return max(self.num_slots, self._pages * self.page_size + self.bs)

    @property
    def _pages(self) -> int:
        return self.bs * ceil_div(self.prefix, self.page_size) + 1

    @property
    def offsets_bytes(self) -> int:
        """Three int64 read and three written a request, and a sector of the page table for the seed."""
        return self.bs * (6 * 8 + SECTOR)

    @property
    def verify_bytes(self) -> int:
        """The page table once, in each buffer the records and the hashed bytes; the mapping, where there is one."""
        hashed = self.num_sources * max(SECTOR, self.hashed_bytes // max(self.num_sources, 1))
        table = 4 if self.table == "slots" else 4 / self.page_size
        mapping = SECTOR if self.window else 0
        return int(self.entries * (table + mapping + self.num_buffers * (CANARY_SLOT_BYTES + hashed)))

    @property
    def write_bytes(self) -> int:
        """Of one token a request: three int64, the seed's record and the new one in each buffer, the hashed bytes."""
        return self.bs * (5 * 8 + self.num_buffers * (2 * CANARY_SLOT_BYTES + self.hashed_bytes))

    @property
    def memory_bytes(self) -> int:
        """Of every array on the device, and of a materialised plan for the peer."""
        kv = self.num_sources * self.bytes_per_token
        table = 4 * self.bs * (self.prefix + self.page_size)
        mapping = 8 * self.pool_slots if self.window else 0
        plan = VerifyPlan.allocation_bytes(self.entries)
        return self.num_buffers * self.pool_slots * (CANARY_SLOT_BYTES + kv) + table + mapping + plan + 256 * self.bs

    @property
    def real_kv(self) -> str:
        """In words."""
        if not self.num_sources:
            return "none"
        width = f"{self.hashed_bytes // self.num_sources} of {self.bytes_per_token}"
        return f"{self.num_sources} x {width} bytes"

    @property
    def kind(self) -> str:
        """All but the size of the batch."""
        parts: list[str] = [self.chain]
        parts += [f"{self.num_buffers} buffers"] if self.num_buffers > 1 else []
        parts += [self.real_kv] if self.num_sources else []
        parts += ["random slots"] if self.page_size == 1 else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [self.table] if self.table != "slots" else []
        parts += [f"pool of {self.num_slots:,}"] if self.num_slots else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        return f"{self.bs} x {self.prefix}, {self.kind}"

    @property
    def parameters(self) -> dict[str, Any]:
        return {
            "bs": self.bs,
            "prefix": self.prefix,
            "chain": self.chain,
            "num_buffers": self.num_buffers,
            "real_kv": self.real_kv,
            "hashed_bytes": self.hashed_bytes,
            "page_size": self.page_size,
            "window": self.window,
            "table": self.table,
            "pool_slots": self.pool_slots,
            "entries": self.entries,
        }


class DecodeBatch:
    """The arrays of one work in host memory."""

    def __init__(self, work: Work, *, is_damaged: bool) -> None:
        self.work = work
        self._is_damaged = is_damaged
        rng = np.random.default_rng(0)
        bs, prefix, page_size = work.bs, work.prefix, work.page_size
        pages = ceil_div(prefix, page_size)
        # Spread over the whole pool, behind the padding page and before the slots of the new tokens.
        self.num_slots = work.pool_slots
        all_pages = (self.num_slots - bs) // page_size
        self._page_of = np.zeros((bs + 1, pages), np.int32)
        self._page_of[1:] = (rng.permutation(all_pages - 1)[: bs * pages] + 1).reshape(bs, pages)
        self.table = np.zeros((bs + 1, pages * page_size + 1), np.int32)
        slots_of_pages = self._page_of[:, :, None] * page_size + np.arange(page_size, dtype=np.int32)
        self.table[:, :-1] = slots_of_pages.reshape(bs + 1, -1)
        self.rows = np.arange(1, bs + 1)
        self.prefix_lens = np.full(bs, prefix)
        self.new_slots = self.num_slots - bs + rng.permutation(bs)
        self.new_tokens = rng.integers(0, 2**17, bs)
        self.mapping = self._new_mapping(rng) if work.window else None
        self._kv_blocks = [
            rng.integers(0, 256, (_KV_BLOCK, work.bytes_per_token), dtype=np.uint8) for _ in range(work.num_sources)
        ]
        self.records = self._stamped()

    def _new_mapping(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Each slot has one of its own in the sliding-window pool; the padding slot and the new ones keep theirs."""
        last = self.num_slots - self.work.bs
        return np.concatenate([[0], 1 + rng.permutation(last - 1), np.arange(last, self.num_slots)])

    def _at(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return slots if self.mapping is None else self.mapping[slots]

    def _stamped(self) -> np.ndarray[Any, Any]:
        records = np.zeros((self.num_slots, 4), np.uint64)
        if self._kv_blocks:
            # A buffer of one block: its hashes repeat with the bytes.
            block = self._context(np, records[:_KV_BLOCK].copy(), 0, num_slots=_KV_BLOCK).view
            hashes = hash_real_kv(with_numpy(block), np.arange(_KV_BLOCK))
            records[:, 3] = np.resize(hashes, self.num_slots)
        for parity in (0, 1):
            tokens, hashes = _sequence(self.work.chain, self.work.prefix, parity)
            slots = self._at(self.table[1 + parity :: 2, : self.work.prefix])
            for field, values in enumerate((tokens, np.arange(len(tokens), dtype=np.uint64), hashes)):
                records[slots, field] = values
        # A wrong hash of the KV shows at once, a wrong token at the successor.
        for number, (row, position) in enumerate(self._damaged):
            field = 3 if number == 0 and self._kv_blocks else 0
            records[self._at(self.table[row, position]), field] ^= np.uint64(1 << number)
        return records

    @cached_property
    def _first_position(self) -> int:
        return max(self.work.prefix - self.work.window, 0) if self.work.window else 0

    @cached_property
    def _damaged(self) -> list[tuple[int, int]]:
        """Row and position. All have a successor, and none is what a new token follows on."""
        length = self.work.prefix - self._first_position
        if length < 2 or not self._is_damaged:
            return []
        rng = np.random.default_rng(1)
        rows = rng.integers(1, self.work.bs + 1, _NUM_DAMAGED)
        positions = self._first_position + rng.integers(0, length - 1, _NUM_DAMAGED)
        return list(zip(rows.tolist(), positions.tolist(), strict=True))

    def _context(
        self, arrays: Any, records: np.ndarray[Any, Any], kernel_kind: int, *, num_slots: int
    ) -> VerifyOrWriteContext:
        work = self.work
        return VerifyOrWriteContext(
            canary_buf=arrays.array(records.view(np.uint8)),
            kernel_kind=kernel_kind,
            violation_ring=arrays.zeros((RING_CAPACITY, VIOLATION_FIELDS), np.int64),
            violation_write_index=arrays.zeros(1, np.int32),
            slot_run_counter=arrays.zeros(1, np.int64),
            kernel_run_counter=arrays.zeros(1, np.int64),
            real_kv_sources=self.real_kv(arrays, num_slots),
            real_kv_hash_mode=work.mode if self._kv_blocks else RealKvHashMode.NONE,
            enable_chain_position_assert=arrays.ones(1, np.int32),
        )

    def real_kv(self, arrays: Any, num_slots: int) -> tuple[RealKvSource, ...]:
        """The KV bytes of so many slots, in memory of its own at each call."""
        repeats = ceil_div(num_slots, _KV_BLOCK)
        return tuple(
            RealKvSource(
                tensor=arrays.tile(arrays.asarray(block), (repeats, 1)),
                page_size=1,
                num_bytes_per_token=self.work.bytes_per_token,
                read_bytes=self.work.read_bytes,
            )
            for block in self._kv_blocks
        )

    def contexts(self, arrays: Any, num_buffers: int) -> list[VerifyOrWriteContext]:
        """Buffers of the same records, each with KV bytes of its own."""
        return [self._context(arrays, self.records, kind, num_slots=self.num_slots) for kind in range(num_buffers)]

    def page_table(self, arrays: Any) -> Any:
        if self.work.table == "slots":
            return arrays.array(self.table)
        pages = arrays.array(self._page_of)
        if self.work.table == "block table":
            return BlockTable(block_table=pages, page_size=self.work.page_size)
        rows, of_a_row = self._page_of.shape
        return PageList(
            indptr=arrays.arange(rows + 1) * of_a_row,
            indices=pages.ravel(),
            last_page_len=arrays.full(rows, self.work.page_size),
            page_size=self.work.page_size,
        )

    def arguments(self, arrays: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the offsets launcher, and of the batch verify launcher without its buffers."""
        bs, capacity = self.work.bs, self.work.entries
        scratch = arrays.zeros(bs + 1, np.int64)
        num_valid, enable = arrays.zeros(1, np.int32), arrays.zeros(1, np.int32)
        shared = {
            "req_pool_indices": arrays.array(self.rows),
            "prefix_lens": arrays.array(self.prefix_lens),
            "req_to_token": self.page_table(arrays),
            "full_to_swa_index_mapping": None if self.mapping is None else arrays.array(self.mapping),
            "swa_window_size": self.work.window,
            "verify_capacity": capacity,
        }
        offsets = shared | {
            "extend_seq_lens": arrays.ones(bs, np.int64),
            "out_verify_offsets_scratch": scratch,
            "out_write_offsets": arrays.zeros(bs + 1, np.int64),
            "out_write_seed_slot_indices": arrays.zeros(bs, np.int64),
            "out_verify_num_valid": num_valid,
            "out_verify_enable": enable,
            "out_write_num_valid_reqs": arrays.zeros(1, np.int32),
            "bs_block_size": bs,
        }
        batch = shared | {
            "verify_offsets_scratch": scratch,
            "verify_num_valid": num_valid,
            "verify_enable": enable,
            "req_to_verify_expected_tokens": None,
            "req_to_verify_expected_tokens_valid_lens": None,
            "kv_token_id_vs_position_offset": 0,
            "check_verify_expected_token": False,
            "chain": self.work.chain,
        }
        return offsets, batch

    def entries(self, arrays: Any) -> VerifyPlan:
        """All entries, materialised."""
        width = self.work.entries // self.work.bs
        return self._plan(arrays, np.arange(self.work.entries), width)

    def _plan(self, arrays: Any, entries: np.ndarray[Any, Any], width: int) -> VerifyPlan:
        rows, positions = entries // max(width, 1) + 1, entries % max(width, 1) + self._first_position
        slots = self._at(self.table[rows, positions]).astype(np.int64)
        before = np.where(positions > 0, self._at(self.table[rows, positions - 1]), -1).astype(np.int64)
        return VerifyPlan(
            verify_slot_indices=arrays.array(slots),
            verify_prev_slot_indices=arrays.array(before),
            verify_expected_positions=arrays.array(positions),
            verify_expected_tokens=arrays.full(len(entries), -1, np.int64),
            verify_num_valid=arrays.full(1, len(entries), np.int32),
            enable=arrays.ones(1, np.int32),
        )

    @cached_property
    def expected_violations(self) -> dict[str, np.ndarray[Any, Any]]:
        """Ring and count of each buffer after one verify, by NumPy; see `_MOST_CHECKED`."""
        work = self.work
        width = work.entries // work.bs
        checked = np.arange(0, work.entries, max(work.entries // _MOST_CHECKED, 1))
        damaged = np.array(self._damaged, np.int64).reshape(-1, 2)
        at = (damaged[:, 0] - 1) * width + damaged[:, 1] - self._first_position
        checked = np.unique(np.concatenate([checked, at, at + 1]))
        (context,) = self.contexts(np, 1)
        launch_canary_verify_kernel(
            context=context,
            plan=self._plan(np, checked, width),
            check_verify_expected_token=False,
            chain=work.chain,
        )
        count = int(context.violation_write_index[0])
        if self._damaged and not count:
            raise AssertionError("the damaged records must be found")
        found: dict[str, np.ndarray[Any, Any]] = {}
        for kind in range(work.num_buffers):
            ring = context.violation_ring.copy()
            ring[:count, 0] = kind
            found |= {f"violation_ring {kind}": ring, f"violation_write_index {kind}": context.violation_write_index}
        return found

    def plan_for_peer(self, arrays: Any, offsets: dict[str, Any], write_plan: Any) -> tuple[VerifyPlan, PeerLaunch]:
        """The peer verifies a materialised plan: the plan, and the launch that writes it."""
        plan = VerifyPlan(
            **{
                name: arrays.zeros(self.work.entries, np.int64)
                for name in (
                    "verify_slot_indices",
                    "verify_expected_tokens",
                    "verify_expected_positions",
                    "verify_prev_slot_indices",
                )
            },
            verify_num_valid=arrays.zeros(1, np.int32),
            enable=arrays.ones(1, np.int32),
        )
        taken = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token", "full_to_swa_index_mapping")
        arguments = {name: offsets[name] for name in (*taken, "swa_window_size", "verify_capacity")}
        none = dict.fromkeys(("req_to_verify_expected_tokens", "req_to_verify_expected_tokens_valid_lens"))
        return plan, PeerLaunch(
            "launch_canary_plan_kernels",
            {
                "verify_plan_out": plan,
                "write_plan_out": write_plan,
                **arguments,
                **none,
                "kv_token_id_vs_position_offset": 0,
            },
        )


@lru_cache(maxsize=1)
def batch_of(work: Work, *, is_damaged: bool = True) -> DecodeBatch:
    """The batch of a work; the last one is kept, for the next case of the same work."""
    return DecodeBatch(work, is_damaged=is_damaged)


def logs(contexts: list[VerifyOrWriteContext]) -> dict[str, Any]:
    """Rings and counts, by the names of `DecodeBatch.expected_violations`."""
    found = {}
    for kind, context in enumerate(contexts):
        found[f"violation_ring {kind}"] = context.violation_ring
        found[f"violation_write_index {kind}"] = context.violation_write_index
    return found


@cache
def _sequence(chain: Chain, length: int, parity: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Tokens of a request and the hash before each. Neighbours in a batch have different ones, every other the same."""
    tokens = np.random.default_rng(parity).integers(0, 2**17, length, dtype=np.uint64)
    hashes = np.empty(length, np.uint64)
    h = int(anchor_hash())
    for position, token in enumerate(tokens.tolist()):
        hashes[position] = h
        if chain == "affine":
            h = (h * AFFINE_MULTIPLIER + _splitmix64(token ^ (position << 32))) & _UINT64
        else:
            h = _splitmix64(_splitmix64(_splitmix64(h) ^ token) ^ position)
    return tokens, hashes


def _splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
    return x ^ (x >> 31)
