"""NumPy twin of `PageTable` and `read_range` in `kernels/common.cuh`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..constants import TOKEN_TO_KV_SLOT_PADDING, StatusBit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..page_tables import PageTableView

    Int64s = NDArray[np.int64]


def batch_size(bs: int, bs_on_device: NDArray[np.int32] | None) -> int:
    """Requests of the batch: a number of the launch, or one that is read at each run."""
    return bs if bs_on_device is None else int(np.clip(bs_on_device[0], 0, bs))


class ReadRanges(NamedTuple):
    """What each request reads: positions [window_start, prefix_len) of its row; nothing where it is not active."""

    rows: Int64s
    is_active: NDArray[np.bool_]
    window_starts: Int64s
    prefix_lens: Int64s
    status: int


def seq_lens(table: PageTableView, rows: Int64s) -> Int64s:
    """Positions that may be read in rows inside the table."""
    if table.page_indptr is None:
        return np.full(len(rows), table.max_seq_len, np.int64)
    begins = np.clip(table.page_indptr[rows], 0, table.num_entries).astype(np.int64)
    ends = np.maximum(np.clip(table.page_indptr[rows + 1], 0, table.num_entries), begins)
    last = np.clip(table.last_page_lens[rows], 0, table.page_size).astype(np.int64)  # type: ignore[index]
    return np.where(ends > begins, (ends - begins - 1) * table.page_size + last, 0)


def slots(table: PageTableView, rows: Int64s, positions: Int64s) -> Int64s:
    """Slots of positions below the rows' seq_lens."""
    if table.holds_slots:
        return table.req_to_token[rows, positions].astype(np.int64)  # type: ignore[no-any-return]
    page_in_row, offset = np.divmod(positions, table.page_size)
    if table.page_indptr is None:
        pages = table.req_to_token[rows, page_in_row].astype(np.int64)
    else:
        firsts = np.clip(table.page_indptr[rows], 0, table.num_entries).astype(np.int64)
        pages = table.req_to_token[firsts + page_in_row].astype(np.int64)
    holds_no_token = (pages < 0) | (pages == table.null_page)
    no_token = -1 if table.null_page < 0 else TOKEN_TO_KV_SLOT_PADDING
    # Wraps at 64 bits for absurd pages, as the kernel does.
    return np.where(holds_no_token, no_token, pages * table.page_size + offset)


def read_ranges(table: PageTableView, rows: NDArray[Any], prefix_lens: NDArray[Any], window: int) -> ReadRanges:
    """Of each request; rows outside the table count as padding."""
    rows = rows.astype(np.int64)
    is_inside = (rows >= 0) & (rows < table.num_rows)
    is_active = is_inside & (rows != table.padding_row)
    safe_rows = np.where(is_active, rows, 0)
    # Without a row there is no active request, and nothing to look up.
    longest = seq_lens(table, safe_rows) if table.num_rows else np.zeros(len(rows), np.int64)
    prefix = np.where(is_active, prefix_lens, 0).astype(np.int64)
    status = 0 if is_inside.all() else int(StatusBit.REQUEST_ROW_OUT_OF_RANGE)
    if (prefix > longest).any():
        status |= StatusBit.PREFIX_LEN_OUT_OF_RANGE
    prefix = np.clip(prefix, 0, longest)
    window_starts = np.where(prefix > window, prefix - window, 0) if window > 0 else np.zeros_like(prefix)
    return ReadRanges(safe_rows, is_active, window_starts, prefix, status)


def map_to_swa(slots: Int64s, mapping: NDArray[Any] | None) -> tuple[Int64s, int]:
    """Slots of the sliding-window pool, and the status."""
    if mapping is None or not len(slots):
        return slots, 0
    last = len(mapping) - 1
    mapped = np.where(slots < 0, slots, mapping[np.clip(slots, 0, last)])
    return mapped, int(StatusBit.SLOT_OUT_OF_MAPPING) if (slots > last).any() else 0
