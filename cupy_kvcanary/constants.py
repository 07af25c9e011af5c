"""Numbers of the contract. The CUDA sources get theirs from here (see `sources.prelude`)."""

from __future__ import annotations

import enum
from typing import Final

PLAN_BS_BLOCK_SIZE: Final = 4096
"""Default limit on requests for one launch of the strict offsets launcher."""

REQ_POOL_IDX_PADDING: Final = 0
"""Request row 0 is the padding row: it contributes nothing."""

TOKEN_TO_KV_SLOT_PADDING: Final = 0
"""Slot 0 takes the dummy writes of padded tokens."""

CANARY_CHAIN_ANCHOR: Final = 0xC0FFEE1234567890
"""Head of every chain; its splitmix64 is the hash that a first record carries."""

AFFINE_MULTIPLIER: Final = 0x9E3779B97F4A7C15
"""Odd factor of the affine chain (2**64 over the golden ratio)."""

CANARY_FIELDS_PER_SLOT: Final = 4
"""int64 fields of a record: token, position, prev_hash, real_kv_hash."""

CANARY_SLOT_BYTES: Final = 32
"""Smallest record stride; the stride is `canary_buf.shape[1]`, a multiple of 8."""

VIOLATION_FIELDS: Final = 8
"""int64 fields of a violation row: kernel_kind, slot_idx, position, stored_token, expected_token, stored_chain_hash,
expected_aux, fail_reason_bits."""

VIOLATION_DETAIL_FIELDS: Final = 13
"""int64 fields of a violation's details: request, request_row, expected_position, prev_slot; token, position, prev_hash
of the record there; next_slot; token, position, prev_hash of the record there; stored_real_kv_hash, real_kv_hash."""

FREED_TOKEN: Final = -2
"""Token of a tombstone: the record of a slot whose KV was given up. Its hashes are 0."""

FREED_POSITION: Final = -2
"""Position of a tombstone."""

MAX_REAL_KV_SOURCES: Final = 4
"""Real-KV sources of one buffer."""

MAX_BUFFERS: Final = 12
"""Canary buffers of one launch: one for each `CanaryLaunchTag`."""

REAL_KV_ALIGNMENT: Final = 16
"""Bytes that a source's base address, row stride and sizes are multiples of."""

INT32_MAX: Final = 2**31 - 1

# Launch geometry of the verify kernels; measured (docs/performance.md).
VERIFY_THREADS: Final = 256
VERIFY_BLOCKS: Final = 4
"""Blocks on a multiprocessor that the compiler makes room for, and that a launch has."""
VERIFY_LARGE_BLOCKS: Final = 2
"""The same of the kernels that take more registers: for groups of buffers and for wide KV sources."""
VERIFY_GROUP: Final = 4
"""Buffers that a warp of the kernels for groups looks at together."""
WIDE_KV_BYTES: Final = 256
"""Hashed bytes of a slot from which on a warp does better to load those of its slots together."""

# Launch geometry of the write kernels; measured (docs/performance.md).
WRITE_THREADS: Final = 128
WRITE_BLOCKS: Final = 8
"""Blocks on a multiprocessor that the compiler makes room for."""
WRITE_WALK_THREADS: Final = 128
WRITE_SCAN_THREADS: Final = 512
WRITE_SCAN_ITEMS: Final = 4
"""Entries of a thread at a time."""

# Launch geometry of the offsets kernels, in threads a block; measured (docs/performance.md).
PLAN_OFFSETS_SINGLE_THREADS: Final = 512
PLAN_OFFSETS_TILE_THREADS: Final = 256
PLAN_OFFSETS_SCAN_THREADS: Final = 1024
PLAN_OFFSETS_TILE: Final = 1024
"""Requests a block plans where the batch takes several launches."""

PLAN_ENTRIES_THREADS: Final = 256
"""Threads a block, and offsets that it keeps at hand."""

SCATTER_THREADS: Final = 256

MOVE_THREADS: Final = 256


class StatusBit(enum.IntFlag):
    """What a kernel found wrong in its input values and worked around (or-ed into `out_status`)."""

    REQUEST_ROW_OUT_OF_RANGE = 1
    PREFIX_LEN_OUT_OF_RANGE = 2
    SLOT_OUT_OF_MAPPING = 4
    WRITE_OFFSETS_INVALID = 8
    SCATTER_OUT_OF_RANGE = 16
    MOVE_SLOT_OUT_OF_RANGE = 32


class FailReason(enum.IntFlag):
    """Why a violation was recorded (its `fail_reason_bits`)."""

    VERIFY_CHAIN_HASH = 1
    VERIFY_POSITION = 2
    VERIFY_REAL_KV_HASH = 4
    WRITE_TOKEN = 8
    WRITE_POSITION = 16
    VERIFY_TOKEN = 32
    VERIFY_SLOT_OUT_OF_RANGE = 64
    PREDECESSOR_OUT_OF_RANGE = 128
    WRITE_SLOT_OUT_OF_RANGE = 256
    PAGE_TABLE_HOLE = 512


class RealKvHashMode(enum.IntEnum):
    """How many bytes of a slot's real KV are hashed into its record."""

    NONE = 0
    PARTIAL = 1
    """16 bytes of each source."""
    ALL = 2
    """`read_bytes` of each source."""


class CanaryLaunchTag(enum.IntEnum):
    """Which buffer a launch is about: head or tail of the step or the sweep, K or V, full or sliding-window pool."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11
