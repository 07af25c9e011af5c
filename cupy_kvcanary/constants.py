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

INT32_MAX: Final = 2**31 - 1

# Launch geometry of the offsets kernels, in threads a block; measured (docs/performance.md).
PLAN_OFFSETS_SINGLE_THREADS: Final = 512
PLAN_OFFSETS_TILE_THREADS: Final = 256
PLAN_OFFSETS_SCAN_THREADS: Final = 1024
PLAN_OFFSETS_TILE: Final = 1024
"""Requests a block plans where the batch takes several launches."""


class StatusBit(enum.IntFlag):
    """What a kernel found wrong in its input values and worked around (or-ed into `out_status`)."""

    REQUEST_ROW_OUT_OF_RANGE = 1
    PREFIX_LEN_OUT_OF_RANGE = 2
    SLOT_OUT_OF_MAPPING = 4
