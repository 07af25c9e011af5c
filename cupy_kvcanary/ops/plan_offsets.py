"""Plan offsets: where each request's verify and write entries start, and its chain seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays import CPU, ArrayView, view_array, view_arrays
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
    check_positive,
    check_rank,
    check_window,
)
from ..constants import (
    INT32_MAX,
    PLAN_BS_BLOCK_SIZE,
    PLAN_OFFSETS_SCAN_THREADS,
    PLAN_OFFSETS_SINGLE_THREADS,
    PLAN_OFFSETS_TILE,
    PLAN_OFFSETS_TILE_THREADS,
    StatusBit,
)
from ..launch import BACKENDS, Call, Launch, Operation, ceil_div, checked_call, run
from ..launcher import Launcher
from ..libraries import library_of_results
from ..page_tables import (
    PAGE_TABLE_ARGS,
    PageTableView,
    index_array_args,
    page_table_args,
    take_paged_table,
    view_batch_size,
    view_slot_table,
)
from ..reference.plan_offsets import plan_offsets as reference

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN_OFFSETS_ARGS = np.dtype(
    [
        ("req_pool_indices", np.uint64),
        ("req_pool_indices_is_int64", np.int64),
        ("prefix_lens", np.uint64),
        ("prefix_lens_is_int64", np.int64),
        ("extend_seq_lens", np.uint64),
        ("extend_seq_lens_is_int64", np.int64),
        ("page_table", PAGE_TABLE_ARGS),
        ("full_to_swa_index_mapping", np.uint64),
        ("full_to_swa_index_mapping_is_int64", np.int64),
        ("out_verify_offsets_scratch", np.uint64),
        ("out_write_offsets", np.uint64),
        ("out_write_seed_slot_indices", np.uint64),
        ("out_verify_num_valid", np.uint64),
        ("out_verify_enable", np.uint64),
        ("out_write_num_valid_reqs", np.uint64),
        ("out_status", np.uint64),
        ("bs_on_device", np.uint64),
        ("bs", np.int64),
        ("lut_len", np.int64),
        ("swa_window_size", np.int64),
        ("verify_capacity", np.int64),
    ],
    align=True,
)
"""Twin of `PlanOffsetsArgs` in kernels/plan_offsets.cu."""

# Measured (docs/performance.md): up to this many requests one launch, in which every block sums the requests before its
# tile by itself, is faster than three launches.
_SINGLE_LAUNCH_MAX_BS = 8192


class OffsetsTotals(NamedTuple):
    """An offsets plan's sums, on the host."""

    num_requests: int
    verify_entries: int
    """Entries to verify, before any cut by the capacity."""
    write_entries: int
    verify_enabled: bool
    """False when the verify entries exceed the capacity: the step's verification is skipped."""
    status: StatusBit
    """What was wrong in the input values (0: nothing)."""


@dataclass(frozen=True, kw_only=True)
class OffsetsPlan:
    """Result of `plan_offsets`: arrays of one library (see its `like`). All export `__dlpack__`."""

    verify_offsets: Any
    """int64[bs + 1]: exclusive prefix sum of the verify lengths, then their total."""
    write_offsets: Any
    """int64[write_req_capacity + 1]: exclusive prefix sum of the write lengths, their total, then zeros."""
    write_seed_slot_indices: Any
    """int64[write_req_capacity]: slot of the token before the first one written, -1 without one; then zeros."""
    verify_num_valid: Any
    """int32[1]: min(total of verify lengths, verify_capacity)."""
    verify_enable: Any
    """int32[1]: 0 when the total exceeds verify_capacity, else 1."""
    write_num_valid_reqs: Any
    """int32[1]: bs."""
    status: Any
    """int32[1]: `StatusBit`s."""

    @property
    def num_requests(self) -> int:
        """Requests of the batch (bs); known without reading the device."""
        return len(self.verify_offsets) - 1

    def totals(self) -> OffsetsTotals:
        """The sums on the host. Waits for the device where the arrays are CUDA arrays."""
        bs = self.num_requests
        return OffsetsTotals(
            num_requests=bs,
            verify_entries=int(self.verify_offsets[bs]),
            write_entries=int(self.write_offsets[bs]),
            verify_enabled=bool(self.verify_enable[0]),
            status=StatusBit(int(self.status[0])),
        )

    def __repr__(self) -> str:
        # Values are shown only where reading them waits for nothing.
        on_host = view_array("verify_offsets", self.verify_offsets).device == CPU
        shown = repr(self.totals()) if on_host else f"num_requests={self.num_requests}, on CUDA: see totals()"
        return f"OffsetsPlan({shown.removeprefix('OffsetsTotals(').removesuffix(')')})"

    def _repr_html_(self) -> str:
        """Totals and the first requests as a table, for notebooks. Waits for the device."""
        totals, shown = self.totals(), min(self.num_requests, 10)
        verify, write, seeds = (
            [int(value) for value in array[: shown + 1]]
            for array in (self.verify_offsets, self.write_offsets, self.write_seed_slot_indices)
        )
        rows = "".join(
            f"<tr><td>{r}</td><td>[{verify[r]}, {verify[r + 1]})</td><td>[{write[r]}, {write[r + 1]})</td>"
            f"<td>{'-' if seeds[r] < 0 else seeds[r]}</td></tr>"
            for r in range(shown)
        )
        more = f"<p>and {self.num_requests - shown} more requests</p>" if self.num_requests > shown else ""
        state = "enabled" if totals.verify_enabled else "skipped: over capacity"
        return (
            f"<p><b>OffsetsPlan</b>: {totals.num_requests} requests, {totals.verify_entries} entries to verify "
            f"({state}), {totals.write_entries} to write</p><table><tr><th>request</th><th>verify entries</th>"
            f"<th>write entries</th><th>seed slot</th></tr>{rows}</table>{more}"
        )


@Launcher
def launch_plan_offsets_kernel(
    *,
    req_pool_indices: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    req_to_token: Any,
    full_to_swa_index_mapping: Any | None,
    out_verify_offsets_scratch: Any,
    out_write_offsets: Any,
    out_write_seed_slot_indices: Any,
    out_verify_num_valid: Any,
    out_verify_enable: Any,
    out_write_num_valid_reqs: Any,
    swa_window_size: int,
    verify_capacity: int,
    bs: Any | None = None,
    bs_block_size: int = PLAN_BS_BLOCK_SIZE,
    strict: bool = True,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Plan where each request's verify and write entries start, in place (kernel `kvc_plan_offsets`).

    For each request r of a batch, with row = req_pool_indices[r], p = min(prefix_lens[r], max_seq_len)::

        verify_len = min(p, swa_window_size or p)    write_len = max(extend_seq_lens[r], 0)
        seed = swa(req_to_token[row, p - 1]) if p > 0 and write_len > 0 else -1

    with zero lengths and seed -1 where row is 0 (padding) or outside the table. swa(s) is s without a mapping or for
    s < 0, else full_to_swa_index_mapping[min(s, lut_len - 1)]. Offsets are the exclusive prefix sums of the lengths.

    Parameters
    ----------
    req_pool_indices, prefix_lens, extend_seq_lens : int64[bs], device, read; longer is allowed where `bs` is given.
    req_to_token : int32[max_reqs, max_seq_len], device, read: slot of each request row and position. A `BlockTable` or
        a `PageList` goes in its place; their rows have no padding row.
    full_to_swa_index_mapping : int64[lut_len] or None, device, read: sliding-window slot of each full slot.
    out_verify_offsets_scratch : int64[>= bs_block_size + 1], device; [0..bs] written, the rest untouched.
    out_write_offsets : int64[write_req_capacity + 1], device; [0..bs] written, the rest untouched.
    out_write_seed_slot_indices : int64[write_req_capacity], device; [0..bs-1] written, the rest untouched.
    out_verify_num_valid : int32[1], device, written: min(total of verify lengths, verify_capacity).
    out_verify_enable : int32[1], device, written: 0 when that total exceeds verify_capacity, else 1.
    out_write_num_valid_reqs : int32[1], device, written: bs.
    swa_window_size : tokens that a sliding-window group still reads; 0 for full attention.
    verify_capacity : entries that the verify plan can hold, at most 2^31 - 1.
    bs : requests of the batch; None for the length of req_pool_indices. An int32[1] array on the device is read by each
        run, graph replays included, and cut to [0, length of req_pool_indices].
    bs_block_size : largest batch that is accepted. A batch of any size is planned exactly.
    strict : False to take the inputs as `plan_offsets` does: int32 or int64, rows of the table any distance apart.
    out_status : int32[1] or None, device; or-ed with `StatusBit`s.
    stream : None (the arrays' library's current stream), an int handle, or a CuPy, torch or `__cuda_stream__` stream.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    All arrays are on one device; CPU arrays run on NumPy. Allocates nothing on the device and may be captured in a CUDA
    graph once the kernel was compiled by an earlier call. Moves 48 bytes a request, plus 4 (12 with a mapping)
    scattered ones where there is a seed. The formulas are those of sglang's kv-canary.

    """
    named = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "extend_seq_lens": extend_seq_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
        "out_verify_offsets_scratch": out_verify_offsets_scratch,
        "out_write_offsets": out_write_offsets,
        "out_write_seed_slot_indices": out_write_seed_slot_indices,
        "out_verify_num_valid": out_verify_num_valid,
        "out_verify_enable": out_verify_enable,
        "out_write_num_valid_reqs": out_write_num_valid_reqs,
        "out_status": out_status,
    }
    paged = take_paged_table(named)
    views = view_arrays(named, OPTIONAL_ARRAYS)
    if check_bool("strict", strict):
        check_layout(views)
    else:
        _check_inputs({name: view for name, view in views.items() if name not in OPERATION.outputs})
        check_layout({name: view for name, view in views.items() if name in OPERATION.outputs})
    arguments = check_arguments(
        views,
        paged,
        bs=bs,
        bs_block_size=bs_block_size,
        swa_window_size=swa_window_size,
        verify_capacity=verify_capacity,
    )
    return checked_call(OPERATION, arguments, stream)


def plan_offsets(
    req_pool_indices: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    req_to_token: Any,
    *,
    swa_window_size: int = 0,
    full_to_swa_index_mapping: Any | None = None,
    verify_capacity: int | None = None,
    write_req_capacity: int | None = None,
    like: Any | None = None,
    stream: Any | None = None,
) -> OffsetsPlan:
    """Plan offsets of a batch of any size into new arrays.

    The rule and the words are those of `launch_plan_offsets_kernel`.

    Parameters
    ----------
    req_pool_indices, prefix_lens, extend_seq_lens : int32 or int64 [bs], contiguous, or lists of ints.
    req_to_token : int32 or int64 [max_reqs, max_seq_len]; rows are contiguous and any positive distance apart. A
        `BlockTable` or a `PageList` goes in its place; their rows have no padding row.
    swa_window_size : tokens that a sliding-window group still reads; 0 for full attention.
    full_to_swa_index_mapping : int32 or int64 [lut_len], contiguous, or None.
    verify_capacity : entries that the verify plan can hold; None for the most that an int32 can count.
    write_req_capacity : requests that the write outputs have room for; None for bs.
    like : library of the results: `"numpy"`, `"cupy"`, `"torch"`, `"jax"`, or an array of it. None for that of
        req_pool_indices; NumPy (CPU) or CuPy (CUDA) if that is a list or of another library.
    stream : as in the launcher.

    Returns
    -------
    OffsetsPlan
        Arrays on the inputs' device. torch's and JAX's share the memory that was computed into, JAX's are int64 outside
        of its 64-bit mode too. They may be used on their library's current stream.

    Raises
    ------
    KvCanaryError
        Before anything is launched; slugs in docs/errors.md.

    """
    inputs = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "extend_seq_lens": extend_seq_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
    }
    paged = take_paged_table(inputs)
    views = view_arrays({name: _array_of_list(value) for name, value in inputs.items()}, OPTIONAL_ARRAYS)
    _check_inputs(views)
    bs = views["req_pool_indices"].size
    capacity = bs if write_req_capacity is None else check_int("write_req_capacity", write_req_capacity)
    check_non_negative("write_req_capacity", capacity)

    device = views["req_pool_indices"].device
    library = library_of_results(like, req_pool_indices, device.type)
    backend = BACKENDS[device.type]
    with backend.callers_stream(list(views.values()), stream) as on_stream:
        # Two buffers, cut into the outputs: two allocations and two fills instead of seven.
        lengths = {
            "out_verify_offsets_scratch": bs + 1,
            "out_write_offsets": capacity + 1,
            "out_write_seed_slot_indices": capacity,
        }
        allocate = functools.partial(backend.allocate_zeros, device=device, stream=on_stream)
        outputs = _cut(functools.partial(allocate, dtype="int64"), 8, lengths)
        outputs |= _cut(functools.partial(allocate, dtype="int32"), 4, dict.fromkeys(_ONE_ELEMENT_OUTPUTS, 1))
        views |= view_arrays(outputs, optional=())
        arguments = check_arguments(
            views,
            paged,
            bs=None,
            bs_block_size=bs,
            swa_window_size=swa_window_size,
            verify_capacity=INT32_MAX if verify_capacity is None else verify_capacity,
        )
        run(checked_call(OPERATION, arguments, on_stream))
        results = backend.share(list(outputs.values()), library, device, on_stream)
    names = (name.removeprefix("out_").removesuffix("_scratch") for name in outputs)
    return OffsetsPlan(**dict(zip(names, results, strict=True)))


_INT32_ARRAYS = frozenset(
    ("req_to_token", "out_verify_num_valid", "out_verify_enable", "out_write_num_valid_reqs", "out_status")
)
_ONE_ELEMENT_OUTPUTS = ("out_verify_num_valid", "out_verify_enable", "out_write_num_valid_reqs", "out_status")
OPTIONAL_ARRAYS = ("full_to_swa_index_mapping", "out_status")


def _cut(allocate: Callable[[int], Any], itemsize: int, lengths: dict[str, int]) -> dict[str, Any]:
    """One array, cut into parts of these lengths that start at multiples of 64 bytes: JAX shares no other memory."""
    unit = 64 // itemsize
    starts = [0, *accumulate(ceil_div(length, unit) * unit for length in lengths.values())]
    whole = allocate(starts[-1])
    return {name: whole[start : start + length] for start, (name, length) in zip(starts, lengths.items(), strict=False)}


def _array_of_list(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    # NumPy makes an empty list float64; a batch of no requests is a batch of ints all the same.
    return np.asarray(value) if len(value) else np.empty(0, np.int64)


def _check_inputs(views: dict[str, ArrayView]) -> None:
    """Inputs of either width, a table's rows any distance apart."""
    for name, view in views.items():
        if name == "req_to_token":
            check_rank(name, view, 2)
            check_contiguous_rows(name, view)
        else:
            check_contiguous(name, view)
        check_dtype(name, view, INT32_OR_INT64)


def check_layout(views: dict[str, ArrayView]) -> None:
    """Strict launchers take contiguous arrays of one dtype each."""
    for name, view in views.items():
        check_contiguous(name, view)
    for name, view in views.items():
        check_dtype(name, view, INT32 if name in _INT32_ARRAYS else INT64)


def check_arguments(
    views: dict[str, ArrayView],
    paged: PageTableView | None,
    *,
    bs: Any | None,
    bs_block_size: int,
    swa_window_size: int,
    verify_capacity: int,
    scratch_length: int | None = None,
) -> dict[str, Any]:
    """The operation's arguments, after the checks that do not depend on the dtypes accepted, in the contract's order.

    The scratch is at least `scratch_length` long, None for bs_block_size + 1.
    """
    bs_is_given = bs is not None
    bs, bs_on_device = view_batch_size(bs, views["req_pool_indices"])
    bs_block_size = check_int("bs_block_size", bs_block_size)
    swa_window_size = check_int("swa_window_size", swa_window_size)
    verify_capacity = check_int("verify_capacity", verify_capacity)
    write_offsets_len = views["out_write_offsets"].size
    write_req_capacity = views["out_write_seed_slot_indices"].size
    mapping = views.get("full_to_swa_index_mapping")

    if not 0 <= bs <= bs_block_size:
        raise error("kv-canary-offsets-kernel-bs-must-be-in-0-plan", name="bs", bs_block_size=bs_block_size, got=bs)
    check_fits_int32("bs", bs)
    check_positive("write_offsets_len", write_offsets_len)
    check_non_negative("verify_capacity", verify_capacity)
    check_fits_int32("verify_capacity", verify_capacity)
    if paged is None and len(views["req_to_token"].shape) == 2:
        check_positive("req_to_token_stride0", views["req_to_token"].row_stride)
    if mapping is not None and mapping.size == 0:
        raise error("kv-canary-lut-len-must-be-positive", name="full_to_swa_index_mapping", got=0)
    check_window("swa_window_size", swa_window_size)
    for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens"):
        if bs_is_given:
            check_length_at_least(name, views[name].size, bs)
        else:
            check_length(name, views[name].size, bs)
    scratch_length = bs_block_size + 1 if scratch_length is None else scratch_length
    check_length_at_least("out_verify_offsets_scratch", views["out_verify_offsets_scratch"].size, scratch_length)
    for name in _ONE_ELEMENT_OUTPUTS:
        if name in views:
            check_length(name, views[name].size, 1)
    for name, view in views.items():
        check_rank(name, view, 2 if name == "req_to_token" else 1)
    if write_offsets_len != write_req_capacity + 1:
        raise error(
            "kv-canary-write-offsets-len-must-equal-write-req-capacity-plus-1",
            name="out_write_offsets",
            got=write_offsets_len,
            write_req_capacity=write_req_capacity,
        )
    if bs > write_req_capacity:
        raise error("kv-canary-bs-exceeds-write-req-capacity", name="bs", got=bs, write_req_capacity=write_req_capacity)
    return {
        **{name: view for name, view in views.items() if name != "req_to_token"},
        **{name: None for name in OPTIONAL_ARRAYS if name not in views},
        "page_table": view_slot_table(views["req_to_token"]) if paged is None else paged,
        "swa_window_size": swa_window_size,
        "verify_capacity": verify_capacity,
        "bs": bs,
        "bs_on_device": bs_on_device,
    }


def _launches(
    *,
    req_pool_indices: ArrayView,
    prefix_lens: ArrayView,
    extend_seq_lens: ArrayView,
    page_table: PageTableView,
    full_to_swa_index_mapping: ArrayView | None,
    out_verify_offsets_scratch: ArrayView,
    out_write_offsets: ArrayView,
    out_write_seed_slot_indices: ArrayView,
    out_verify_num_valid: ArrayView,
    out_verify_enable: ArrayView,
    out_write_num_valid_reqs: ArrayView,
    swa_window_size: int,
    verify_capacity: int,
    bs: int,
    bs_on_device: ArrayView | None,
    out_status: ArrayView | None,
) -> list[Launch]:
    mapping = full_to_swa_index_mapping
    args = np.array(
        (
            *index_array_args(req_pool_indices),
            *index_array_args(prefix_lens),
            *index_array_args(extend_seq_lens),
            page_table_args(page_table),
            *index_array_args(mapping),
            out_verify_offsets_scratch.pointer,
            out_write_offsets.pointer,
            out_write_seed_slot_indices.pointer,
            out_verify_num_valid.pointer,
            out_verify_enable.pointer,
            out_write_num_valid_reqs.pointer,
            out_status.pointer if out_status is not None else 0,
            bs_on_device.pointer if bs_on_device is not None else 0,
            bs,
            mapping.size if mapping is not None else 0,
            swa_window_size,
            verify_capacity,
        ),
        PLAN_OFFSETS_ARGS,
    )
    if bs <= _SINGLE_LAUNCH_MAX_BS:
        block = min(PLAN_OFFSETS_SINGLE_THREADS if bs > 1024 else 256, 32 * ceil_div(max(bs, 1), 32))
        return [Launch("plan_offsets", "kvc_plan_offsets", max(1, ceil_div(bs, block)), block, args)]
    num_tiles = ceil_div(bs, PLAN_OFFSETS_TILE)
    return [
        Launch("plan_offsets", "kvc_plan_offsets_tile_sums", num_tiles, PLAN_OFFSETS_TILE_THREADS, args),
        Launch("plan_offsets", "kvc_plan_offsets_scan_sums", 1, PLAN_OFFSETS_SCAN_THREADS, args),
        Launch("plan_offsets", "kvc_plan_offsets_tiles", num_tiles, PLAN_OFFSETS_TILE_THREADS, args),
    ]


OPERATION = Operation(
    reference,
    _launches,
    frozenset(
        (
            "out_verify_offsets_scratch",
            "out_write_offsets",
            "out_write_seed_slot_indices",
            *_ONE_ELEMENT_OUTPUTS,
        )
    ),
)
