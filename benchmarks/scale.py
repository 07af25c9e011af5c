"""What a step costs at any size, on paper: launches, bytes and hashes; and the canary's memory.

    time = launches x floor + bytes / copy bandwidth + hashed words / hash rate

The bandwidth, the empty kernel and the hash rate are measured in the same run (`environment` of a result), and nothing
is fitted. The floor of a launch is the empty kernel's time and the dependent reads that even one entry waits for.
Hashes: one word of 8 bytes of real KV each, and of each record's chain 3 (affine: 1), in each buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cupy_kvcanary.constants import CANARY_SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .batches import Work

STEP_US = 30_000
"""A decode step of a large model."""

_LATENCY_US = 0.6
"""Of one read of device memory that others wait for, on an H200."""

_DEPENDENT_READS = {"offsets": 3, "verify": 4, "write": 3}
"""Row, table, slot, record, one after another."""

_MOST_IN_ONE_LAUNCH = 8192
"""Requests; more take three launches of offsets."""


class Cost(NamedTuple):
    """Microseconds of a step."""

    launches: float
    bytes: float
    hashes: float

    @property
    def total(self) -> float:
        return sum(self)


def cost_of(work: Work, environment: Mapping[str, Any]) -> Cost:
    """A step of offsets, batch verify and write of one token a request."""
    offsets_launches = 1 if work.bs <= _MOST_IN_ONE_LAUNCH else 3
    launches = offsets_launches + 2
    reads = sum(_DEPENDENT_READS.values())
    moved = work.offsets_bytes + work.verify_bytes + work.write_bytes
    links = 1 if work.chain == "affine" else 3
    words = (work.entries + work.bs) * work.num_buffers * (links + work.hashed_bytes // 8)
    return Cost(
        launches=launches * environment["empty_us"]["median"] + reads * _LATENCY_US,
        bytes=moved / environment["copy_tb_per_s"] / 1e6,
        hashes=words / environment["hash_words_per_us"],
    )


def canary_bytes(work: Work) -> int:
    """Records of every buffer; the rest (offsets, logs) does not grow with the pool."""
    return work.num_buffers * work.pool_slots * CANARY_SLOT_BYTES
