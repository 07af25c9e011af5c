"""Write: stamp the records of the slots whose KV was just written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import ArrayView, view_arrays
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
    remember_chain,
    view_buffers,
)
from ..catalogue import error
from ..checks import (
    INT32,
    INT32_OR_INT64,
    INT64,
    check_bool,
    check_contiguous,
    check_dtype,
    check_fits_int32,
    check_length,
    check_padding_slot,
    check_rank,
)
from ..constants import MAX_BUFFERS, WRITE_SCAN_THREADS, WRITE_THREADS, WRITE_WALK_THREADS
from ..launch import Call, Launch, Operation, ceil_div
from ..launcher import Launcher
from ..page_tables import index_array_args
from ..reference.write import write as reference
from ..types import WritePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

WRITE_ARGS = np.dtype(
    [
        ("write_offsets", np.uint64),
        ("write_seed_slot_indices", np.uint64),
        ("write_num_valid_reqs", np.uint64),
        ("input_ids", np.uint64),
        ("input_ids_is_int64", np.int64),
        ("positions", np.uint64),
        ("positions_is_int64", np.int64),
        ("out_cache_loc", np.uint64),
        ("out_cache_loc_is_int64", np.int64),
        ("full_to_swa_index_mapping", np.uint64),
        ("full_to_swa_index_mapping_is_int64", np.int64),
        ("expected_input_tokens", np.uint64),
        ("expected_input_positions", np.uint64),
        ("out_status", np.uint64),
        ("write_req_capacity", np.int64),
        ("num_tokens", np.int64),
        ("lut_len", np.int64),
        ("padding_slot", np.int64),
        ("num_buffers", np.int64),
        *BUFFERS_ARGS,
    ],
    align=True,
)
"""Twin of `WriteArgs` in kernels/write.cu."""


@Launcher
def launch_canary_write_kernel(
    *,
    context: VerifyOrWriteContext | Sequence[VerifyOrWriteContext],
    plan: WritePlan,
    input_ids: Any,
    positions: Any,
    out_cache_loc: Any,
    enable_write_input_assert: bool,
    expected_input_tokens: Any | None,
    expected_input_positions: Any | None,
    full_to_swa_index_mapping: Any | None = None,
    padding_slot: int | None = 0,
    chain: Chain = "splitmix64",
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Stamp the records of a step's tokens in each context's buffer; all buffers in one launch (`kvc_write`).

    For each request r < write_num_valid_reqs::

        h = link(record at seed), or anchor where seed < 0 or seed == padding_slot
        for i in range(write_offsets[r], write_offsets[r + 1]):
            slot = swa(out_cache_loc[i])
            if slot >= 0:
                record at slot = input_ids[i], positions[i], h, hash of the slot's KV bytes
                h = link(that record)

    `swa(s)` is s without a mapping, and where s < 0; else full_to_swa_index_mapping[min(s, lut_len - 1)].

    Violation rows are kernel_kind, slot, position, token, expected token, h before, expected position, bits::

        bits 8, 16  token, position differ from the expected inputs (with enable_write_input_assert)
        bit 16      in a row of its own: the position does not follow on the last one written, first on the seed's,
                    while enable_chain_position_assert is not 0 and the chain starts at a record
        bit 128     the seed is not a slot of the buffer: the chain starts at the anchor; only the slot is given
        bit 256     the entry's slot is not one of the buffer: skipped; expected token is the token, expected position 0

    Parameters
    ----------
    context : up to 12 contexts on one device; records, rings and counters are written in place.
    plan : offsets and seeds of the requests, on the same device, read.
    input_ids, positions, out_cache_loc : int32 or int64 [n], device, read; entries that no request owns are ignored.
    enable_write_input_assert : compare with the expected inputs.
    expected_input_tokens, expected_input_positions : int64[n], device, read; None without the comparison.
    full_to_swa_index_mapping : int32 or int64 [lut_len] or None, device, read: from the slots of out_cache_loc to those
        of the buffers, which the plan's seeds are already.
    padding_slot : slot of dummy writes, whose record is never a predecessor; None where every slot is real.
    chain : kind of chain; every write and verify of a buffer takes the same.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s.
    stream : as in `launch_plan_offsets_kernel`.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    In each buffer, slot_run_counter grows by the entries stored and kernel_run_counter by 1, also with nothing to do.
    Of several entries of a request with one slot, the last is stored; the rest of a slot's bytes stay untouched. The
    order of violation rows is free. Allocates nothing; may be captured once compiled. Moves 24 bytes an entry (12 as
    int32; 16 more with expected inputs), 32 bytes of its record in each buffer, and the hashed KV bytes. The rules are
    those of sglang's kv-canary.

    """
    buffers = view_buffers(context)
    if not isinstance(plan, WritePlan):
        raise error("kv-canary-must-be-a-plan", name="plan", expected="WritePlan", got=type(plan).__name__)
    is_asserted = check_bool("enable_write_input_assert", enable_write_input_assert)
    expected = {"expected_input_tokens": expected_input_tokens, "expected_input_positions": expected_input_positions}
    if is_asserted and any(array is None for array in expected.values()):
        raise error("kv-canary-expected-input-tensors-are-required", name="expected_input_tokens")
    if not is_asserted and any(array is not None for array in expected.values()):
        raise error("kv-canary-expected-input-tensors-must-be-none", name="expected_input_tokens")
    entries: dict[str, Any] = {"input_ids": input_ids, "positions": positions, "out_cache_loc": out_cache_loc}
    widths = dict.fromkeys((*entries, "full_to_swa_index_mapping"), INT32_OR_INT64)
    if is_asserted:
        entries |= expected
    named = {name: getattr(plan, name) for name in _PLAN} | entries
    named |= {"full_to_swa_index_mapping": full_to_swa_index_mapping, "out_status": out_status}
    views = view_arrays(named, ("full_to_swa_index_mapping", "out_status"))
    for name, view in views.items():
        check_contiguous(name, view)
        check_dtype(name, view, INT32 if name in _ONE_ELEMENT else widths.get(name, INT64))
        check_rank(name, view, 1)
        if name in _ONE_ELEMENT:
            check_length(name, view.size, 1)
    capacity, num_tokens = views["write_seed_slot_indices"].size, views["input_ids"].size
    check_length("write_offsets", views["write_offsets"].size, capacity + 1)
    for name in entries:
        check_length(name, views[name].size, num_tokens)
    check_fits_int32("length of input_ids", num_tokens)
    if "full_to_swa_index_mapping" in views and views["full_to_swa_index_mapping"].size == 0:
        raise error("kv-canary-lut-len-must-be-positive", name="full_to_swa_index_mapping", got=0)
    # The kernels count requests times buffers in 32 bits.
    check_fits_int32(f"length of write_seed_slot_indices times {MAX_BUFFERS}", capacity * MAX_BUFFERS)
    slot = check_padding_slot(padding_slot)
    check_chain("chain", chain)
    check_chain_of(buffers, chain)
    check_memory(buffers, views, ["out_status"] if out_status is not None else [])
    arguments: dict[str, Any] = dict.fromkeys((*expected, "full_to_swa_index_mapping", "out_status"))
    arguments |= {"buffers": buffers, **views, "padding_slot": slot, "chain": chain}
    remember_chain(buffers, chain)
    return Call(OPERATION, arguments, stream)


_PLAN = ("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs")
_ONE_ELEMENT = ("write_num_valid_reqs", "out_status")


def _launches(
    *,
    buffers: tuple[CanaryBufferView, ...],
    write_offsets: ArrayView,
    write_seed_slot_indices: ArrayView,
    write_num_valid_reqs: ArrayView,
    input_ids: ArrayView,
    positions: ArrayView,
    out_cache_loc: ArrayView,
    expected_input_tokens: ArrayView | None,
    expected_input_positions: ArrayView | None,
    full_to_swa_index_mapping: ArrayView | None,
    padding_slot: int,
    chain: Chain,
    out_status: ArrayView | None,
) -> list[Launch]:
    capacity, num_tokens = write_seed_slot_indices.size, input_ids.size
    args = np.array(
        (
            write_offsets.pointer,
            write_seed_slot_indices.pointer,
            write_num_valid_reqs.pointer,
            *index_array_args(input_ids),
            *index_array_args(positions),
            *index_array_args(out_cache_loc),
            *index_array_args(full_to_swa_index_mapping),
            0 if expected_input_tokens is None else expected_input_tokens.pointer,
            0 if expected_input_positions is None else expected_input_positions.pointer,
            0 if out_status is None else out_status.pointer,
            capacity,
            num_tokens,
            0 if full_to_swa_index_mapping is None else full_to_swa_index_mapping.size,
            padding_slot,
            len(buffers),
            *buffers_args(buffers),
        ),
        WRITE_ARGS,
    )
    num_chains = max(capacity, 1) * len(buffers)
    kernels = _KERNELS[chain]
    # Only the number of all entries is known here: the longest request may have all but one for each other request.
    if num_tokens - capacity > kernels.warp_max_entries * ceil_div(num_chains, kernels.blocks_at_once):
        return [Launch("write", kernels.of_blocks, num_chains, kernels.block, args)]
    return [Launch("write", kernels.of_warps, ceil_div(num_chains, WRITE_THREADS // 32), WRITE_THREADS, args)]


@dataclass(frozen=True, slots=True)
class _Kernels:
    """A chain's two kernels: a warp for each request, which takes many at once, and a block, which takes long ones."""

    of_warps: str
    of_blocks: str
    block: int
    blocks_at_once: int
    warp_max_entries: int
    """A warp loses as much time over this many entries of one request as blocks lose over each wave of theirs."""


_KERNELS: dict[Chain, _Kernels] = {
    "splitmix64": _Kernels("kvc_write", "kvc_write_walk", WRITE_WALK_THREADS, 924, 64),
    "affine": _Kernels("kvc_write_affine", "kvc_write_affine_scan", WRITE_SCAN_THREADS, 132, 128),
}

OPERATION = Operation(reference, _launches, WRITTEN_BY_LAUNCHES | {"out_status"})
