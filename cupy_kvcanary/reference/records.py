"""NumPy twin of the records, chains and violations in `kernels/common.cuh`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..constants import (
    AFFINE_MULTIPLIER,
    CANARY_CHAIN_ANCHOR,
    CANARY_FIELDS_PER_SLOT,
    INT32_MAX,
    VIOLATION_DETAIL_FIELDS,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..buffers import CanaryBufferView, Chain

    Int64s = NDArray[np.int64]
    UInt64s = NDArray[np.uint64]


def splitmix64(x: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64, elementwise."""
    # np.multiply wraps silently also for scalars, where * warns.
    x = np.multiply(x ^ (x >> np.uint64(30)), np.uint64(0xBF58476D1CE4E5B9))
    x = np.multiply(x ^ (x >> np.uint64(27)), np.uint64(0x94D049BB133111EB))
    return x ^ (x >> np.uint64(31))


def link(chain: Chain, prev_hash: UInt64s, token: UInt64s, position: UInt64s) -> UInt64s:
    """Hash that a record of (token, position) after `prev_hash` passes on, elementwise."""
    if chain == "affine":
        addend = splitmix64(token ^ (position << np.uint64(32)))
        return np.add(np.multiply(prev_hash, np.uint64(AFFINE_MULTIPLIER)), addend)
    return splitmix64(splitmix64(splitmix64(prev_hash) ^ token) ^ position)


def anchor_hash() -> np.uint64:
    """What the first record of a chain carries."""
    return splitmix64(np.array([CANARY_CHAIN_ANCHOR], np.uint64))[0]  # type: ignore[no-any-return]


def records(buffer: CanaryBufferView) -> UInt64s:
    """The records in place, [num_slots, 4]: token, position, prev_hash, real_kv_hash."""
    return buffer.canary_buf.view(np.uint64)[:, :CANARY_FIELDS_PER_SLOT]  # type: ignore[no-any-return]


def hash_real_kv(buffer: CanaryBufferView, slots: Int64s) -> UInt64s:
    """Hash of each slot's KV bytes, source by source; 0 without sources. The buffer has the slots."""
    hashes = np.zeros(len(slots), np.uint64)
    for source in buffer.real_kv_sources:
        words = source.tensor[:, : source.page_size * source.num_bytes_per_token].view("<u8")
        row, token_in_row = np.divmod(slots, source.page_size)
        first = token_in_row * (source.num_bytes_per_token // 8)
        source_hashes = np.zeros(len(slots), np.uint64)
        for word in range(source.num_hashed_bytes // 8):
            source_hashes = splitmix64(source_hashes ^ words[row, first + word])
        hashes = splitmix64(hashes ^ source_hashes)
    return hashes


def no_details(count: int) -> Int64s:
    """Details of so many violations of which nothing is known."""
    details = np.zeros((count, VIOLATION_DETAIL_FIELDS), np.int64)
    details[:, [0, 1, 3, 7]] = -1
    return details


def append_violations(buffer: CanaryBufferView, rows: Int64s, details: Int64s) -> None:
    """Store the rows that the ring has room for with their details, and count all of them; the counter saturates."""
    if not len(rows):
        return
    count = int(buffer.violation_write_index[0])
    if count < 0:
        count = INT32_MAX
    room = max(0, min(buffer.ring_capacity, INT32_MAX) - count)
    stored = rows[:room]
    buffer.violation_ring[count : count + len(stored)] = stored
    if buffer.violation_details is not None:
        buffer.violation_details[count : count + len(stored)] = details[:room]
    buffer.violation_write_index[0] = min(count + len(rows), INT32_MAX)
