"""Canary buffers for tests: made in NumPy, moved to a backend's device as contexts, read back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.buffers import RealKvSource, VerifyOrWriteContext
from tests.helpers.golden import FILL

if TYPE_CHECKING:
    from tests.helpers.backends import ArrayBackend

    Array = np.ndarray[Any, Any]

MASK = 2**64 - 1


@dataclass
class HostSource:
    """A real-KV source in host memory."""

    tensor: Array
    page_size: int
    num_bytes_per_token: int
    read_bytes: int


@dataclass
class HostBuffer:
    """One canary buffer in host memory; `on_device` makes the context, `read_back` brings the results."""

    canary_buf: Array
    kernel_kind: int = 0
    ring_capacity: int = 256
    violation_count: int = 0
    sources: list[HostSource] = field(default_factory=list)
    mode: int = 0
    enable_chain_position_assert: int | None = None
    is_detailed: bool = False
    """With details of violations, and counters of skipped checks."""
    ring: Array = field(init=False)
    details: Array = field(init=False)
    skip_counters: Array = field(init=False)
    slot_run_counter: int = 0
    kernel_run_counter: int = 0

    def __post_init__(self) -> None:
        self.ring = np.full((self.ring_capacity, 8), FILL, np.int64)
        self.details = np.full((self.ring_capacity, 13), FILL, np.int64)
        self.skip_counters = np.zeros(2, np.int64)

    @classmethod
    def empty(cls, num_slots: int, stride: int = 32, **options: Any) -> HostBuffer:
        return cls(np.zeros((num_slots, stride), np.uint8), **options)

    def on_device(self, backend: ArrayBackend) -> VerifyOrWriteContext:
        flag = self.enable_chain_position_assert
        return VerifyOrWriteContext(
            canary_buf=backend.array(self.canary_buf),
            kernel_kind=self.kernel_kind,
            violation_ring=backend.array(self.ring),
            violation_write_index=backend.array(np.array([self.violation_count], np.int32)),
            slot_run_counter=backend.array(np.zeros(1, np.int64)),
            kernel_run_counter=backend.array(np.zeros(1, np.int64)),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=backend.array(source.tensor),
                    page_size=source.page_size,
                    num_bytes_per_token=source.num_bytes_per_token,
                    read_bytes=source.read_bytes,
                )
                for source in self.sources
            ),
            real_kv_hash_mode=self.mode,
            enable_chain_position_assert=None if flag is None else backend.array(np.array([flag], np.int32)),
            violation_details=backend.array(self.details) if self.is_detailed else None,
            skip_counters=backend.array(self.skip_counters) if self.is_detailed else None,
        )

    def read_back(self, backend: ArrayBackend, context: VerifyOrWriteContext) -> None:
        self.canary_buf = backend.to_numpy(context.canary_buf)
        self.ring = backend.to_numpy(context.violation_ring)
        if context.violation_details is not None:
            self.details = backend.to_numpy(context.violation_details)
        if context.skip_counters is not None:
            self.skip_counters = backend.to_numpy(context.skip_counters)
        self.violation_count = int(backend.to_numpy(context.violation_write_index)[0])
        self.slot_run_counter = int(backend.to_numpy(context.slot_run_counter)[0])
        self.kernel_run_counter = int(backend.to_numpy(context.kernel_run_counter)[0])

    @property
    def violations(self) -> list[tuple[int, ...]]:
        """The stored rows, each with its details if there are any, sorted; the rest of both arrays is untouched."""
        return self.rows(0, min(max(self.violation_count, 0), self.ring_capacity))

    def rows(self, begin: int, end: int) -> list[tuple[int, ...]]:
        """Rows of the ring as in `violations`, where only those are stored."""
        for array in (self.ring, self.details):
            assert (array[:begin] == FILL).all()
            assert (array[end:] == FILL).all()
        if not self.is_detailed:
            assert (self.details == FILL).all()
            return sorted(tuple(row) for row in self.ring[begin:end].tolist())
        return sorted(tuple(row) for row in np.hstack([self.ring, self.details])[begin:end].tolist())

    def record(self, slot: int) -> list[int]:
        """token, position, prev_hash, real_kv_hash as unsigned numbers."""
        return [int(value) for value in self.canary_buf[slot, :32].view(np.uint64)]

    def set_record(self, slot: int, *values: int) -> None:
        """Overwrite the first fields of a record."""
        self.canary_buf[slot, : 8 * len(values)] = np.array([v & MASK for v in values], np.uint64).view(np.uint8)

    def stamp(self, slots: list[int], tokens: list[int], chain: str = "splitmix64", first_position: int = 0) -> None:
        """Write the records of a request's tokens, as the contract says."""
        h = splitmix64(0xC0FFEE1234567890)
        for i, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
            self.set_record(slot, token, first_position + i, h, self.real_kv_hash(slot))
            h = link(chain, *self.record(slot)[:3])

    def real_kv_hash(self, slot: int) -> int:
        """Hash of the slot's KV bytes, in Python's integers."""
        if self.mode == 0:
            return 0
        total = 0
        for source in self.sources:
            start = slot % source.page_size * source.num_bytes_per_token
            count = 16 if self.mode == 1 else source.read_bytes
            row = source.tensor[slot // source.page_size].reshape(-1).view(np.uint8)
            h = 0
            for word in row[start : start + count].copy().view("<u8"):
                h = splitmix64(h ^ int(word))
            total = splitmix64(total ^ h)
        return total


def splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def link(chain: str, token: int, position: int, prev_hash: int) -> int:
    """Hash that a record passes on, in Python's integers."""
    if chain == "affine":
        return (0x9E3779B97F4A7C15 * prev_hash + splitmix64(token ^ (position << 32 & MASK))) & MASK
    return splitmix64(splitmix64(splitmix64(prev_hash) ^ token) ^ position)


def signed(value: int) -> int:
    """An unsigned 64-bit number as int64 holds it."""
    return value - 2**64 if value >= 2**63 else value
