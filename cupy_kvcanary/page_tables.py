"""Where requests' tokens lie: a table of slots, a block table or a page list, seen as one form by the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import ArrayView, is_array, view_array
from .checks import (
    INT32_OR_INT64,
    check_contiguous,
    check_contiguous_rows,
    check_dtype,
    check_fits_int32,
    check_int,
    check_length,
    check_length_at_least,
    check_non_negative,
    check_one_int32,
    check_positive,
    check_rank,
)
from .constants import REQ_POOL_IDX_PADDING


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """Pages of each request, as in vLLM: the slot of a position is `page * page_size + position % page_size`.

    Goes in place of `req_to_token`; `req_pool_indices` are its rows, none of which is a padding row.
    """

    block_table: Any
    """int32 or int64 [request rows, pages]; rows are contiguous, any positive distance apart."""
    page_size: int
    """Slots of a page."""
    null_page: int | None = 0
    """This page, like negative ones, holds no token and reads as slot 0. None: negative pages alone, as slot -1."""


@dataclass(frozen=True, kw_only=True)
class PageList:
    """Pages of all requests in one list (CSR), as in FlashInfer: row i has `indices[indptr[i] : indptr[i + 1]]`.

    Goes in place of `req_to_token`; `req_pool_indices` are the rows i, none of which is a padding row.
    """

    indptr: Any
    """int32 or int64 [request rows + 1]."""
    indices: Any
    """int32 or int64 [pages]."""
    last_page_len: Any
    """int32 or int64 [request rows]: tokens in the last page of each request, 1 to page_size."""
    page_size: int
    """Slots of a page."""
    null_page: int | None = 0
    """As in `BlockTable`."""


@dataclass(frozen=True, kw_only=True)
class PageTableView:
    """Any of the three forms, as `PageTable` of kernels/common.cuh sees it. Arrays are views, or NumPy arrays."""

    req_to_token: Any
    """Slots [rows, positions], pages [rows, pages of a row], or pages of all rows [pages]."""
    page_indptr: Any | None
    last_page_lens: Any | None
    num_rows: int
    padding_row: int
    """-1: none."""
    max_seq_len: int
    stride0: int
    num_entries: int
    page_size: int
    """0: the entries are slots."""
    null_page: int
    """-1: none."""

    @property
    def holds_slots(self) -> bool:
        """Whether it is a table of slots."""
        return self.page_size == 0


def view_batch_size(bs: Any, req_pool_indices: ArrayView) -> tuple[int, ArrayView | None]:
    """Requests of a batch, None for all; where the number is in device memory, the most it may be and where it is."""
    if bs is None:
        return req_pool_indices.size, None
    if not is_array(bs):
        return check_int("bs", bs), None
    on_device = view_array("bs", bs)
    check_one_int32("bs", on_device)
    return req_pool_indices.size, on_device


PAGE_TABLE_ARGS = np.dtype(
    [
        ("entries", np.uint64),
        ("entries_is_int64", np.int64),
        ("page_indptr", np.uint64),
        ("page_indptr_is_int64", np.int64),
        ("last_page_lens", np.uint64),
        ("last_page_lens_is_int64", np.int64),
        ("num_rows", np.int64),
        ("padding_row", np.int64),
        ("max_seq_len", np.int64),
        ("stride0", np.int64),
        ("num_entries", np.int64),
        ("page_size", np.int64),
        ("null_page", np.int64),
    ],
    align=True,
)
"""Twin of `PageTable` in kernels/common.cuh."""


def index_array_args(view: ArrayView | None) -> tuple[int, bool]:
    """Fields of an `IndexArray` of kernels/common.cuh."""
    return (0, False) if view is None else (view.pointer, view.dtype == "int64")


def page_table_args(table: PageTableView) -> tuple[Any, ...]:
    """Fields of `PAGE_TABLE_ARGS`."""
    return (
        *index_array_args(table.req_to_token),
        *index_array_args(table.page_indptr),
        *index_array_args(table.last_page_lens),
        table.num_rows,
        table.padding_row,
        table.max_seq_len,
        table.stride0,
        table.num_entries,
        table.page_size,
        table.null_page,
    )


def view_page_table(req_to_token: Any) -> PageTableView:
    """Any of the three forms, checked and seen in place; a table of slots may have strided rows and either width."""
    if isinstance(req_to_token, (BlockTable, PageList)):
        return view_paged_table(req_to_token)
    view = view_array("req_to_token", req_to_token)
    check_rank("req_to_token", view, 2)
    check_contiguous_rows("req_to_token", view)
    check_dtype("req_to_token", view, INT32_OR_INT64)
    return view_slot_table(view)


def view_slot_table(view: ArrayView) -> PageTableView:
    """A table of slots whose rank, strides and dtype were checked."""
    num_rows, max_seq_len = view.shape
    check_positive("req_to_token_stride0", view.row_stride)
    return PageTableView(
        req_to_token=view,
        page_indptr=None,
        last_page_lens=None,
        num_rows=num_rows,
        padding_row=REQ_POOL_IDX_PADDING,
        max_seq_len=max_seq_len,
        stride0=view.row_stride,
        num_entries=0,
        page_size=0,
        null_page=-1,
    )


def take_paged_table(named: dict[str, Any]) -> PageTableView | None:
    """Remove a block table or page list from the arrays by name; its view. None for a table of slots."""
    if not isinstance(named["req_to_token"], (BlockTable, PageList)):
        return None
    return view_paged_table(named.pop("req_to_token"))


def view_paged_table(table: BlockTable | PageList) -> PageTableView:
    """Check a block table or page list and see it in place."""
    page_size = check_int("page_size", table.page_size)
    check_positive("page_size", page_size)
    null_page = -1 if table.null_page is None else check_int("null_page", table.null_page)
    if table.null_page is not None:
        check_non_negative("null_page", null_page)
    view = _view_block_table if isinstance(table, BlockTable) else _view_page_list
    return view(table, page_size, null_page)


def _view_block_table(table: Any, page_size: int, null_page: int) -> PageTableView:
    view = view_array("block_table", table.block_table)
    check_rank("block_table", view, 2)
    check_contiguous_rows("block_table", view)
    check_dtype("block_table", view, INT32_OR_INT64)
    check_positive("block_table_stride0", view.row_stride)
    num_rows, pages_of_a_row = view.shape
    # The kernels divide positions in 32 bits.
    check_fits_int32("positions of block_table", pages_of_a_row * page_size)
    return PageTableView(
        req_to_token=view,
        page_indptr=None,
        last_page_lens=None,
        num_rows=num_rows,
        padding_row=-1,
        max_seq_len=pages_of_a_row * page_size,
        stride0=view.row_stride,
        num_entries=0,
        page_size=page_size,
        null_page=null_page,
    )


def _view_page_list(table: Any, page_size: int, null_page: int) -> PageTableView:
    views = {name: view_array(name, getattr(table, name)) for name in ("indptr", "indices", "last_page_len")}
    for name, view in views.items():
        check_rank(name, view, 1)
        check_contiguous(name, view)
        check_dtype(name, view, INT32_OR_INT64)
    indptr, indices, last_page_lens = views.values()
    check_length_at_least("indptr", indptr.size, 1)
    num_rows = indptr.size - 1
    check_length("last_page_len", last_page_lens.size, num_rows)
    check_fits_int32("positions of indices", indices.size * page_size)
    return PageTableView(
        req_to_token=indices,
        page_indptr=indptr,
        last_page_lens=last_page_lens,
        num_rows=num_rows,
        padding_row=-1,
        max_seq_len=0,
        stride0=0,
        num_entries=indices.size,
        page_size=page_size,
        null_page=null_page,
    )
