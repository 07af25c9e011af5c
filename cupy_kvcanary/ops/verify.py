"""Verify: check the records of the slots that a batch is about to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import ArrayView, view_array, view_arrays
from ..buffers import (
    BUFFERS_ARGS,
    WRITTEN_BY_LAUNCHES,
    CanaryBufferView,
    Chain,
    VerifyOrWriteContext,
    buffers_args,
    check_chain,
    check_chain_of,
    check_memory,
    view_buffers,
)
from ..catalogue import error
from ..checks import (
    INT32,
    INT32_OR_INT64,
    INT64,
    check_bool,
    check_contiguous,
    check_contiguous_rows,
    check_dtype,
    check_fits_int32,
    check_int,
    check_length,
    check_length_at_least,
    check_non_negative,
    check_padding_slot,
    check_rank,
    check_window,
)
from ..constants import VERIFY_BLOCKS, VERIFY_GROUP, VERIFY_LARGE_BLOCKS, VERIFY_THREADS
from ..launch import Call, Launch, Operation, ceil_div, named_views
from ..launcher import Launcher
from ..page_tables import (
    PAGE_TABLE_ARGS,
    PageTableView,
    index_array_args,
    page_table_args,
    view_batch_size,
    view_page_table,
)
from ..reference.verify import verify as verify_reference
from ..reference.verify import verify_batch as verify_batch_reference
from ..types import VerifyPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPTIONS = [
    ("num_buffers", np.int64),
    ("padding_slot", np.int64),
    ("check_verify_expected_token", np.int64),
    ("check_holes", np.int64),
]

VERIFY_ARGS = np.dtype(
    [
        *BUFFERS_ARGS,
        ("options", np.dtype(_OPTIONS)),
        ("verify_slot_indices", np.uint64),
        ("verify_expected_tokens", np.uint64),
        ("verify_expected_positions", np.uint64),
        ("verify_prev_slot_indices", np.uint64),
        ("verify_num_valid", np.uint64),
        ("enable", np.uint64),
        ("verify_capacity", np.int64),
    ],
    align=True,
)
"""Twin of `VerifyArgs` in kernels/verify.cu."""

VERIFY_BATCH_ARGS = np.dtype(
    [
        *BUFFERS_ARGS,
        ("options", np.dtype(_OPTIONS)),
        ("req_pool_indices", np.uint64),
        ("req_pool_indices_is_int64", np.int64),
        ("prefix_lens", np.uint64),
        ("prefix_lens_is_int64", np.int64),
        ("page_table", PAGE_TABLE_ARGS),
        ("full_to_swa_index_mapping", np.uint64),
        ("full_to_swa_index_mapping_is_int64", np.int64),
        ("verify_offsets_scratch", np.uint64),
        ("verify_num_valid", np.uint64),
        ("verify_enable", np.uint64),
        ("expected_tokens", np.uint64),
        ("expected_valid_lens", np.uint64),
        ("expected_valid_lens_is_int64", np.int64),
        ("out_status", np.uint64),
        ("bs_on_device", np.uint64),
        ("bs", np.int64),
        ("lut_len", np.int64),
        ("swa_window_size", np.int64),
        ("verify_capacity", np.int64),
        ("expected_rows", np.int64),
        ("expected_width", np.int64),
        ("expected_stride0", np.int64),
        ("kv_token_id_vs_position_offset", np.int64),
    ],
    align=True,
)
"""Twin of `VerifyBatchArgs` in kernels/verify.cu."""

# Launches have one wave of blocks on a GPU of so many, the largest there is (measured).
_MULTIPROCESSORS = 132


@Launcher
def launch_canary_verify_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    plan: VerifyPlan,
    check_verify_expected_token: bool,
    padding_slot: int | None = 0,
    check_holes: bool = False,
    chain: Chain = "splitmix64",
    stream: Any | None = None,
) -> Call:
    """Check the records of a plan's entries in each context's buffer; all buffers in one launch (`kvc_verify`).

    For each entry t < min(verify_num_valid, verify_capacity), where enable is not 0, with the record of its slot::

        bit 1    record.prev_hash != link(record of the predecessor), or anchor without one (slot < 0)
        bit 2    record.position != expected position
        bit 4    record.real_kv_hash != hash of the slot's KV bytes now
        bit 32   expected token is not -1 and record.token != expected token (with check_verify_expected_token)
        bit 64   the slot is not one of the buffer       bit 128   the predecessor is not (no bit 1 then)
        bit 512  the slot is the padding slot (with check_holes; it is never checked otherwise)

    Any bit makes one violation row: kernel_kind, slot, stored position, stored token, expected token, stored prev_hash,
    expected chain hash, bits; a field that could not be read is 0. A predecessor that is the padding slot is
    unreachable: nothing is expected of the chain there.

    Parameters
    ----------
    context : up to 12 contexts on one device; their rings and counters are written in place, records are read.
    plan : the entries, on the same device, read.
    check_verify_expected_token : compare tokens where the plan expects one.
    padding_slot : slot of dummy writes, which is not checked; None where every slot is real.
    check_holes : report entries in the padding slot.
    chain : kind of chain that the buffers were written with.
    stream : as in `launch_plan_offsets_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    In each buffer, slot_run_counter grows by the entries seen and kernel_run_counter by 1, also when disabled. The
    order of violation rows is free. Allocates nothing; may be captured once compiled. Moves 64 bytes an entry and
    buffer (32 of the plan, 32 of the record) and the hashed KV bytes. The rules are those of sglang's kv-canary.

    """
    buffers = view_buffers(context)
    if not isinstance(plan, VerifyPlan):
        raise error("kv-canary-must-be-a-plan", name="plan", expected="VerifyPlan", got=type(plan).__name__)
    dtypes = {
        "verify_slot_indices": INT64,
        "verify_expected_tokens": INT64,
        "verify_expected_positions": INT64,
        "verify_prev_slot_indices": INT64,
        "verify_num_valid": INT32,
        "enable": INT32,
    }
    views = {name: view_array(name, getattr(plan, name)) for name in dtypes}
    for name, view in views.items():
        check_contiguous(name, view)
        check_dtype(name, view, dtypes[name])
        check_rank(name, view, 1)
        check_length(name, view.size, 1 if dtypes[name] is INT32 else views["verify_slot_indices"].size)
    check_fits_int32("verify_capacity", views["verify_slot_indices"].size)
    options = _check_options(buffers, check_verify_expected_token, padding_slot, check_holes, chain)
    check_memory(buffers, views, outputs=())
    arguments = {"buffers": buffers, **views, **options}
    return Call(VERIFY, arguments, stream)


@Launcher
def launch_canary_verify_batch_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    req_pool_indices: Any,
    prefix_lens: Any,
    req_to_token: Any,
    full_to_swa_index_mapping: Any | None,
    verify_offsets_scratch: Any,
    verify_num_valid: Any,
    verify_enable: Any,
    req_to_verify_expected_tokens: Any | None,
    req_to_verify_expected_tokens_valid_lens: Any | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    verify_capacity: int,
    check_verify_expected_token: bool,
    bs: Any | None = None,
    padding_slot: int | None = 0,
    check_holes: bool = False,
    chain: Chain = "splitmix64",
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Check a batch straight from its page table, without materialised entries (`kvc_verify_batch`).

    Violations and counters are those of plan entries followed by `launch_canary_verify_kernel`.

    Parameters
    ----------
    context : up to 12 contexts on one device; their rings and counters are written in place, records are read.
    req_pool_indices, prefix_lens : int32 or int64 [bs], device, read; longer is allowed where `bs` is given.
    req_to_token : int32 or int64 [max_reqs, max_seq_len], rows contiguous and any positive distance apart, device,
        read; a `BlockTable` or a `PageList` goes in its place.
    full_to_swa_index_mapping : int32 or int64 [lut_len] or None, device, read.
    verify_offsets_scratch : int64 [>= bs + 1], device, read: of `launch_plan_offsets_kernel` for this batch.
    verify_num_valid, verify_enable : int32[1], device, read: likewise.
    req_to_verify_expected_tokens : int32 [max_reqs, max_context_len] or None, rows contiguous, device, read.
    req_to_verify_expected_tokens_valid_lens : int32 or int64 [bs], device, read; given with the pool of tokens.
    kv_token_id_vs_position_offset : expected token of a position p is the pool's at p plus this.
    swa_window_size : tokens that a sliding-window group still reads; 0 for full attention.
    verify_capacity : as in the offsets plan; no more entries are looked at.
    bs : requests of the batch; None for the length of req_pool_indices; an int32[1] array as in
        `launch_plan_offsets_kernel`.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s.
    check_verify_expected_token, padding_slot, check_holes, chain, stream : as in `launch_canary_verify_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    Allocates nothing; may be captured once compiled. Moves 4 bytes of the page table an entry, and 32 bytes of the
    record and the hashed KV bytes an entry and buffer.

    """
    buffers = view_buffers(context)
    page_table = view_page_table(req_to_token)
    named = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
        "verify_offsets_scratch": verify_offsets_scratch,
        "verify_num_valid": verify_num_valid,
        "verify_enable": verify_enable,
        "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
        "out_status": out_status,
    }
    views = view_arrays(named, _BATCH_OPTIONAL)
    for name, view in views.items():
        is_pool = name == "req_to_verify_expected_tokens"
        check_rank(name, view, 2 if is_pool else 1)
        (check_contiguous_rows if is_pool else check_contiguous)(name, view)
        check_dtype(name, view, _BATCH_DTYPES.get(name, INT32_OR_INT64))
    if (req_to_verify_expected_tokens is None) != (req_to_verify_expected_tokens_valid_lens is None):
        raise error(
            "kv-canary-expected-tokens-and-valid-lens-go-together",
            name="req_to_verify_expected_tokens_valid_lens",
        )
    offset = check_int("kv_token_id_vs_position_offset", kv_token_id_vs_position_offset)
    check_fits_int32("size of kv_token_id_vs_position_offset", abs(offset))
    window = check_window("swa_window_size", swa_window_size)
    capacity = check_int("verify_capacity", verify_capacity)
    check_non_negative("verify_capacity", capacity)
    check_fits_int32("verify_capacity", capacity)
    num_requests, bs_on_device = view_batch_size(bs, views["req_pool_indices"])
    if bs_on_device is not None:
        views["bs_on_device"] = bs_on_device
    check_non_negative("bs", num_requests)
    check_fits_int32("bs", num_requests)
    for name in ("req_pool_indices", "prefix_lens", "req_to_verify_expected_tokens_valid_lens"):
        if name in views:
            check_length_at_least(name, views[name].size, num_requests)
    check_length_at_least("verify_offsets_scratch", views["verify_offsets_scratch"].size, num_requests + 1)
    for name in ("verify_num_valid", "verify_enable", "out_status"):
        if name in views:
            check_length(name, views[name].size, 1)
    if "full_to_swa_index_mapping" in views and views["full_to_swa_index_mapping"].size == 0:
        raise error("kv-canary-lut-len-must-be-positive", name="full_to_swa_index_mapping", got=0)
    options = _check_options(buffers, check_verify_expected_token, padding_slot, check_holes, chain)
    memory = views | dict(named_views("page_table", page_table))
    check_memory(buffers, memory, outputs=[name for name in ("out_status",) if name in views])
    arguments: dict[str, Any] = {name: views.get(name) for name in named}
    arguments |= {
        "buffers": buffers,
        "page_table": page_table,
        "kv_token_id_vs_position_offset": offset,
        "swa_window_size": window,
        "verify_capacity": capacity,
        "bs": num_requests,
        "bs_on_device": bs_on_device,
        **options,
    }
    return Call(VERIFY_BATCH, arguments, stream)


_BATCH_OPTIONAL = (
    "full_to_swa_index_mapping",
    "req_to_verify_expected_tokens",
    "req_to_verify_expected_tokens_valid_lens",
    "out_status",
)
_BATCH_DTYPES = {
    "verify_offsets_scratch": INT64,
    "verify_num_valid": INT32,
    "verify_enable": INT32,
    "req_to_verify_expected_tokens": INT32,
    "out_status": INT32,
}


def _check_options(
    buffers: Sequence[CanaryBufferView],
    check_verify_expected_token: Any,
    padding_slot: Any,
    check_holes: Any,
    chain: Any,
) -> dict[str, Any]:
    options = {
        "check_verify_expected_token": check_bool("check_verify_expected_token", check_verify_expected_token),
        "padding_slot": check_padding_slot(padding_slot),
        "check_holes": check_bool("check_holes", check_holes),
        "chain": chain,
    }
    check_chain("chain", chain)
    check_chain_of(buffers, chain)
    return options


def _options_args(
    buffers: Sequence[CanaryBufferView], padding_slot: int, check_verify_expected_token: bool, check_holes: bool
) -> tuple[int, int, bool, bool]:
    return len(buffers), padding_slot, check_verify_expected_token, check_holes


def _launch(
    entry: str,
    chain: Chain,
    num_groups: int,
    verify_capacity: int,
    args: np.ndarray[Any, Any],
    blocks_at_once: int = VERIFY_BLOCKS,
) -> list[Launch]:
    """For `num_groups` of buffers: each has blocks of its own, as many as the GPU has at once, or fewer."""
    blocks = min(_MULTIPROCESSORS * blocks_at_once, max(1, ceil_div(verify_capacity, VERIFY_THREADS)))
    suffix = "" if chain == "splitmix64" else "_affine"
    return [Launch("verify", f"{entry}{suffix}", blocks * num_groups, VERIFY_THREADS, args)]


def _verify_launches(
    *,
    buffers: tuple[CanaryBufferView, ...],
    verify_slot_indices: ArrayView,
    verify_expected_tokens: ArrayView,
    verify_expected_positions: ArrayView,
    verify_prev_slot_indices: ArrayView,
    verify_num_valid: ArrayView,
    enable: ArrayView,
    check_verify_expected_token: bool,
    padding_slot: int,
    check_holes: bool,
    chain: Chain,
) -> list[Launch]:
    args = np.array(
        (
            *buffers_args(buffers),
            _options_args(buffers, padding_slot, check_verify_expected_token, check_holes),
            verify_slot_indices.pointer,
            verify_expected_tokens.pointer,
            verify_expected_positions.pointer,
            verify_prev_slot_indices.pointer,
            verify_num_valid.pointer,
            enable.pointer,
            verify_slot_indices.size,
        ),
        VERIFY_ARGS,
    )
    return _launch("kvc_verify", chain, len(buffers), verify_slot_indices.size, args)


def _verify_batch_launches(
    *,
    buffers: tuple[CanaryBufferView, ...],
    req_pool_indices: ArrayView,
    prefix_lens: ArrayView,
    page_table: PageTableView,
    full_to_swa_index_mapping: ArrayView | None,
    verify_offsets_scratch: ArrayView,
    verify_num_valid: ArrayView,
    verify_enable: ArrayView,
    req_to_verify_expected_tokens: ArrayView | None,
    req_to_verify_expected_tokens_valid_lens: ArrayView | None,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    verify_capacity: int,
    bs: int,
    bs_on_device: ArrayView | None,
    check_verify_expected_token: bool,
    padding_slot: int,
    check_holes: bool,
    chain: Chain,
    out_status: ArrayView | None,
) -> list[Launch]:
    pool = req_to_verify_expected_tokens
    args = np.array(
        (
            *buffers_args(buffers),
            _options_args(buffers, padding_slot, check_verify_expected_token, check_holes),
            *index_array_args(req_pool_indices),
            *index_array_args(prefix_lens),
            page_table_args(page_table),
            *index_array_args(full_to_swa_index_mapping),
            verify_offsets_scratch.pointer,
            verify_num_valid.pointer,
            verify_enable.pointer,
            0 if pool is None else pool.pointer,
            *index_array_args(req_to_verify_expected_tokens_valid_lens),
            0 if out_status is None else out_status.pointer,
            0 if bs_on_device is None else bs_on_device.pointer,
            bs,
            0 if full_to_swa_index_mapping is None else full_to_swa_index_mapping.size,
            swa_window_size,
            verify_capacity,
            *((0, 0, 0) if pool is None else (*pool.shape, pool.row_stride)),
            kv_token_id_vs_position_offset,
        ),
        VERIFY_BATCH_ARGS,
    )
    is_plain = (
        page_table.holds_slots
        and page_table.req_to_token.dtype == "int32"
        and full_to_swa_index_mapping is None
        and not check_verify_expected_token
        and not any(buffer.real_kv_sources for buffer in buffers)
        and not any((buffer.canary_buf.pointer | buffer.slot_stride) % 16 for buffer in buffers)
    )
    num_groups, blocks_at_once, entry = len(buffers), VERIFY_BLOCKS, "kvc_verify_batch"
    if is_plain and num_groups % VERIFY_GROUP == 0 and len({buffer.num_slots for buffer in buffers}) == 1:
        num_groups, blocks_at_once = num_groups // VERIFY_GROUP, VERIFY_LARGE_BLOCKS
        entry = "kvc_verify_batch_plain_fours"
    elif is_plain:
        entry = "kvc_verify_batch_plain"
    elif any(buffer.hashes_wide_kv for buffer in buffers):
        blocks_at_once, entry = VERIFY_LARGE_BLOCKS, "kvc_verify_batch_wide"
    return _launch(entry, chain, num_groups, min(verify_capacity, _most_entries(page_table, bs)), args, blocks_at_once)


def _most_entries(page_table: PageTableView, bs: int) -> int:
    """Entries that a batch can have at most."""
    longest = page_table.max_seq_len or page_table.num_entries * page_table.page_size
    return bs * longest


VERIFY = Operation(verify_reference, _verify_launches, WRITTEN_BY_LAUNCHES - {"canary_buf"})
VERIFY_BATCH = Operation(
    verify_batch_reference, _verify_batch_launches, WRITTEN_BY_LAUNCHES - {"canary_buf"} | {"out_status"}
)
