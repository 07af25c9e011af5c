"""Plan entries: slot, predecessor's slot, position and expected token of each entry to verify."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import ArrayView, view_arrays
from ..catalogue import error
from ..checks import (
    INT32,
    INT64,
    check_contiguous,
    check_contiguous_rows,
    check_dtype,
    check_fits_int32,
    check_int,
    check_length,
    check_length_at_least,
    check_non_negative,
    check_positive,
    check_rank,
    check_window,
)
from ..constants import PLAN_ENTRIES_THREADS
from ..launch import Call, Launch, Operation, ceil_div, checked_call
from ..launcher import Launcher
from ..page_tables import (
    PAGE_TABLE_ARGS,
    PageTableView,
    index_array_args,
    page_table_args,
    take_paged_table,
    view_batch_size,
    view_slot_table,
)
from ..reference.plan_entries import plan_entries as reference

PLAN_ENTRIES_ARGS = np.dtype(
    [
        ("req_pool_indices", np.uint64),
        ("prefix_lens", np.uint64),
        ("page_table", PAGE_TABLE_ARGS),
        ("full_to_swa_index_mapping", np.uint64),
        ("full_to_swa_index_mapping_is_int64", np.int64),
        ("verify_offsets_scratch", np.uint64),
        ("verify_enable", np.uint64),
        ("req_to_verify_expected_tokens", np.uint64),
        ("req_to_verify_expected_tokens_valid_lens", np.uint64),
        ("out_verify_slot_indices", np.uint64),
        ("out_verify_expected_tokens", np.uint64),
        ("out_verify_expected_positions", np.uint64),
        ("out_verify_prev_slot_indices", np.uint64),
        ("out_write_offsets", np.uint64),
        ("out_status", np.uint64),
        ("bs_on_device", np.uint64),
        ("bs", np.int64),
        ("lut_len", np.int64),
        ("swa_window_size", np.int64),
        ("verify_capacity", np.int64),
        ("kv_token_id_vs_position_offset", np.int64),
        ("num_expected_rows", np.int64),
        ("max_context_len", np.int64),
        ("expected_stride0", np.int64),
        ("write_offsets_len", np.int64),
        ("sample_stride", np.int64),
    ],
    align=True,
)
"""Twin of `PlanEntriesArgs` in kernels/plan_entries.cu."""

# Blocks that a large GPU holds at once. How many entries there are is known on the device only, so more blocks would
# start for nothing where the plan is far from full.
_MAX_BLOCKS = 8 * 132


@Launcher
def launch_plan_entries_kernel(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    full_to_swa_index_mapping: Any | None,
    verify_offsets_scratch: Any,
    verify_enable: Any,
    req_to_verify_expected_tokens: Any | None,
    req_to_verify_expected_tokens_valid_lens: Any | None,
    out_verify_slot_indices: Any,
    out_verify_expected_tokens: Any,
    out_verify_expected_positions: Any,
    out_verify_prev_slot_indices: Any,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    bs: Any | None = None,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Plan the entries to verify, in place, from `launch_plan_offsets_kernel`'s offsets (kernel `kvc_plan_entries`).

    For each entry t below the total of the offsets, with r the request that it belongs to and row =
    req_pool_indices[r], prefix and window start as in the offsets plan::

        position = window_start[r] + t - verify_offsets[r]
        slot = swa(req_to_token[row, position])
        prev_slot = swa(req_to_token[row, position - 1]) if position > 0 else -1
        i = position + kv_token_id_vs_position_offset
        expected_token = expected_tokens[row, i] if 0 <= i < valid_lens[r] else -1

    A window does not restart the chain: its first entry has the real predecessor. Without expected tokens all are -1,
    any. Nothing is written where verify_enable is 0, and never an entry behind the outputs' end.

    Parameters
    ----------
    req_pool_indices, prefix_lens : int64[bs], device, read; longer is allowed where `bs` is given.
    req_to_token : int32[max_reqs, max_seq_len], device, read: slot of each request row and position. A `BlockTable` or
        a `PageList` goes in its place; their rows have no padding row.
    full_to_swa_index_mapping : int64[lut_len] or None, device, read: sliding-window slot of each full slot.
    verify_offsets_scratch : int64[>= bs + 1], device, read: where each request's entries start, then their total.
    verify_enable : int32[1], device, read.
    req_to_verify_expected_tokens : int32[max_reqs, max_context_len] or None, device, read; rows are contiguous and any
        positive distance apart. Rows that it does not have expect any token.
    req_to_verify_expected_tokens_valid_lens : int64[bs] or None, device, read: tokens that are valid in the row of each
        request; longer is allowed where `bs` is given.
    out_verify_slot_indices, out_verify_expected_tokens, out_verify_expected_positions, out_verify_prev_slot_indices :
        int64[verify_capacity], device; [0..entries-1] written, the rest untouched.
    kv_token_id_vs_position_offset : 0; 1 for a draft model whose inputs are rotated by one.
    swa_window_size : tokens that a sliding-window group still reads; 0 for full attention.
    bs : requests of the batch; None for the length of req_pool_indices.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s of the requests that have entries.
    stream : None (the arrays' library's current stream), an int handle, or a CuPy, torch or `__cuda_stream__` stream.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    All arrays are on one device; CPU arrays run on NumPy. Allocates nothing on the device and may be captured in a CUDA
    graph once the kernel was compiled by an earlier call. Writes 32 bytes an entry and reads 4 of the page table.
    Entries that wrong offsets place outside what their request reads are left untouched.

    """
    named = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
        "verify_offsets_scratch": verify_offsets_scratch,
        "verify_enable": verify_enable,
        "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
        "out_verify_slot_indices": out_verify_slot_indices,
        "out_verify_expected_tokens": out_verify_expected_tokens,
        "out_verify_expected_positions": out_verify_expected_positions,
        "out_verify_prev_slot_indices": out_verify_prev_slot_indices,
        "out_status": out_status,
    }
    paged = take_paged_table(named)
    arguments = check_arguments(
        view_arrays(named, OPTIONAL_ARRAYS),
        paged,
        bs=bs,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        swa_window_size=swa_window_size,
    )
    return checked_call(OPERATION, arguments | {"out_write_offsets": None}, stream)


OPTIONAL_ARRAYS = (
    "full_to_swa_index_mapping",
    "req_to_verify_expected_tokens",
    "req_to_verify_expected_tokens_valid_lens",
    "out_status",
)
_INT32_ARRAYS = frozenset(("req_to_token", "verify_enable", "req_to_verify_expected_tokens", "out_status"))
_TABLES = ("req_to_token", "req_to_verify_expected_tokens")
ENTRY_OUTPUTS = (
    "out_verify_slot_indices",
    "out_verify_expected_tokens",
    "out_verify_expected_positions",
    "out_verify_prev_slot_indices",
)


def check_arguments(
    views: dict[str, ArrayView],
    paged: PageTableView | None,
    *,
    bs: Any | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
) -> dict[str, Any]:
    """The operation's arguments but `out_write_offsets`, checked."""
    for name, view in views.items():
        check_rank(name, view, 2 if name in _TABLES else 1)
        if name == "req_to_verify_expected_tokens":
            check_contiguous_rows(name, view)
        else:
            check_contiguous(name, view)
        check_dtype(name, view, INT32 if name in _INT32_ARRAYS else INT64)
    bs_is_given = bs is not None
    bs, bs_on_device = view_batch_size(bs, views["req_pool_indices"])
    check_non_negative("bs", bs)
    check_fits_int32("bs", bs)
    swa_window_size = check_window("swa_window_size", swa_window_size)
    offset = check_int("kv_token_id_vs_position_offset", kv_token_id_vs_position_offset)
    check_fits_int32("size of kv_token_id_vs_position_offset", abs(offset))
    for name in ("req_pool_indices", "prefix_lens", "req_to_verify_expected_tokens_valid_lens"):
        if name in views and bs_is_given:
            check_length_at_least(name, views[name].size, bs)
        elif name in views:
            check_length(name, views[name].size, bs)
    check_length_at_least("verify_offsets_scratch", views["verify_offsets_scratch"].size, bs + 1)
    for name in ("verify_enable", "out_status"):
        if name in views:
            check_length(name, views[name].size, 1)
    verify_capacity = views["out_verify_slot_indices"].size
    check_fits_int32("out_verify_slot_indices length", verify_capacity)
    for name in ENTRY_OUTPUTS:
        check_length(name, views[name].size, verify_capacity)
    if "full_to_swa_index_mapping" in views and views["full_to_swa_index_mapping"].size == 0:
        raise error("kv-canary-lut-len-must-be-positive", name="full_to_swa_index_mapping", got=0)
    pool = ("req_to_verify_expected_tokens", "req_to_verify_expected_tokens_valid_lens")
    if (pool[0] in views) != (pool[1] in views):
        raise error("kv-canary-expected-tokens-and-valid-lens-go-together", name=pool[1], got=None)
    if pool[0] in views:
        check_positive(f"{pool[0]}_stride0", views[pool[0]].row_stride)
    return {
        **{name: view for name, view in views.items() if name != "req_to_token"},
        **{name: None for name in OPTIONAL_ARRAYS if name not in views},
        "page_table": view_slot_table(views["req_to_token"]) if paged is None else paged,
        "kv_token_id_vs_position_offset": offset,
        "swa_window_size": swa_window_size,
        "bs": bs,
        "bs_on_device": bs_on_device,
    }


def _launches(
    *,
    req_pool_indices: ArrayView,
    prefix_lens: ArrayView,
    page_table: PageTableView,
    full_to_swa_index_mapping: ArrayView | None,
    verify_offsets_scratch: ArrayView,
    verify_enable: ArrayView,
    req_to_verify_expected_tokens: ArrayView | None,
    req_to_verify_expected_tokens_valid_lens: ArrayView | None,
    out_verify_slot_indices: ArrayView,
    out_verify_expected_tokens: ArrayView,
    out_verify_expected_positions: ArrayView,
    out_verify_prev_slot_indices: ArrayView,
    out_write_offsets: ArrayView | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    bs: int,
    bs_on_device: ArrayView | None,
    out_status: ArrayView | None,
) -> list[Launch]:
    mapping = full_to_swa_index_mapping
    tokens, valid_lens = req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens
    verify_capacity = out_verify_slot_indices.size
    args = np.array(
        (
            req_pool_indices.pointer,
            prefix_lens.pointer,
            page_table_args(page_table),
            *index_array_args(mapping),
            verify_offsets_scratch.pointer,
            verify_enable.pointer,
            0 if tokens is None else tokens.pointer,
            0 if valid_lens is None else valid_lens.pointer,
            out_verify_slot_indices.pointer,
            out_verify_expected_tokens.pointer,
            out_verify_expected_positions.pointer,
            out_verify_prev_slot_indices.pointer,
            0 if out_write_offsets is None else out_write_offsets.pointer,
            0 if out_status is None else out_status.pointer,
            0 if bs_on_device is None else bs_on_device.pointer,
            bs,
            0 if mapping is None else mapping.size,
            swa_window_size,
            verify_capacity,
            kv_token_id_vs_position_offset,
            *((0, 0, 0) if tokens is None else (*tokens.shape, tokens.row_stride)),
            0 if out_write_offsets is None else out_write_offsets.size,
            1 << (max(ceil_div(bs, PLAN_ENTRIES_THREADS), 1) - 1).bit_length(),
        ),
        PLAN_ENTRIES_ARGS,
    )
    grid = max(1, min(ceil_div(verify_capacity, PLAN_ENTRIES_THREADS), _MAX_BLOCKS))
    return [Launch("plan_entries", "kvc_plan_entries", grid, PLAN_ENTRIES_THREADS, args)]


OPERATION = Operation(reference, _launches, frozenset((*ENTRY_OUTPUTS, "out_write_offsets", "out_status")))
