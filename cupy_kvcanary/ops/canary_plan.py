"""The whole plan of a step: offsets, then entries."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from ..arrays import view_arrays
from ..catalogue import error
from ..checks import check_int
from ..constants import PLAN_BS_BLOCK_SIZE
from ..launch import BACKENDS, Call, Launch, Operation, checked_call
from ..launcher import Launcher
from ..page_tables import take_paged_table
from ..types import VerifyPlan, WritePlan
from . import plan_entries, plan_offsets

if TYPE_CHECKING:
    from ..arrays import ArrayView


@Launcher
def launch_canary_plan_kernels(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: Any,
    prefix_lens: Any,
    extend_seq_lens: Any,
    req_to_token: Any,
    swa_window_size: int,
    full_to_swa_index_mapping: Any | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: Any | None,
    req_to_verify_expected_tokens_valid_lens: Any | None,
    kv_token_id_vs_position_offset: int,
    bs: Any | None = None,
    bs_block_size: int = PLAN_BS_BLOCK_SIZE,
    verify_offsets_scratch: Any | None = None,
    out_status: Any | None = None,
    stream: Any | None = None,
) -> Call:
    """Plan what a step verifies and writes, in place: `launch_plan_offsets_kernel`, then `launch_plan_entries_kernel`.

    The rules and the arguments are those of the two. Outputs have the names that they have there: the write plan's
    write_offsets are out_write_offsets.

    Parameters
    ----------
    verify_plan_out : VerifyPlan, written in place: verify_num_valid, enable, and entries below verify_num_valid where
        enable is 1; the rest untouched.
    write_plan_out : WritePlan, written in place: write_num_valid_reqs, seeds [0..bs-1], offsets [0..bs] and zeros
        behind them; the rest untouched.
    verify_capacity : length of the verify plan.
    verify_offsets_scratch : int64[>= min(bs_block_size, write_req_capacity) + 1], device, [0..bs] written. None for one
        that is allocated at the first call with this write plan, and lives as long as the plan.

    Raises
    ------
    KvCanaryError
        Before anything is launched, with outputs untouched; slugs in docs/errors.md.

    Notes
    -----
    All arrays are on one device; CPU arrays run on NumPy. May be captured in a CUDA graph after a first call with the
    same plans, which compiles the kernels and allocates the scratch; later calls allocate nothing. Two launches; four
    above 8192 requests. A window needs the mapping where req_to_token is a table of slots; pages of a `BlockTable` or a
    `PageList` may be those of the sliding-window pool.

    """
    for name, plan, cls in (
        ("verify_plan_out", verify_plan_out, VerifyPlan),
        ("write_plan_out", write_plan_out, WritePlan),
    ):
        if not isinstance(plan, cls):
            raise error("kv-canary-must-be-a-plan", name=name, expected=cls.__name__, got=type(plan).__name__)
    named = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "extend_seq_lens": extend_seq_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
        "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
        "out_write_offsets": write_plan_out.write_offsets,
        "out_write_seed_slot_indices": write_plan_out.write_seed_slot_indices,
        "out_write_num_valid_reqs": write_plan_out.write_num_valid_reqs,
        "out_verify_num_valid": verify_plan_out.verify_num_valid,
        "out_verify_enable": verify_plan_out.enable,
        "out_verify_slot_indices": verify_plan_out.verify_slot_indices,
        "out_verify_expected_tokens": verify_plan_out.verify_expected_tokens,
        "out_verify_expected_positions": verify_plan_out.verify_expected_positions,
        "out_verify_prev_slot_indices": verify_plan_out.verify_prev_slot_indices,
        "out_status": out_status,
    }
    paged = take_paged_table(named)
    if paged is None and full_to_swa_index_mapping is None and check_int("swa_window_size", swa_window_size) > 0:
        raise error("kv-canary-window-needs-the-mapping", name="full_to_swa_index_mapping", got=None)
    views = view_arrays(named, plan_entries.OPTIONAL_ARRAYS)
    if verify_offsets_scratch is None:
        verify_offsets_scratch = _scratch_of(write_plan_out, views, stream)
    views |= view_arrays({"out_verify_offsets_scratch": verify_offsets_scratch}, optional=())

    bs_block_size = check_int("bs_block_size", bs_block_size)
    offsets_views = {name: view for name, view in views.items() if name in (*_OFFSETS_NAMES, "req_to_token")}
    plan_offsets.check_layout(offsets_views)
    arguments = plan_offsets.check_arguments(
        offsets_views,
        paged,
        bs=bs,
        bs_block_size=bs_block_size,
        swa_window_size=swa_window_size,
        verify_capacity=verify_capacity,
        scratch_length=min(bs_block_size, views["out_write_seed_slot_indices"].size) + 1,
    )
    plan_length = views["out_verify_slot_indices"].size
    if arguments["verify_capacity"] != plan_length:
        raise error(
            "kv-canary-verify-capacity-must-equal-the-plans-length",
            name="verify_capacity",
            plan_length=plan_length,
            got=arguments["verify_capacity"],
        )
    entries_views = {_ENTRIES_NAME_OF.get(name, name): view for name, view in views.items()}
    arguments |= plan_entries.check_arguments(
        {name: view for name, view in entries_views.items() if name in (*_ENTRIES_NAMES, "req_to_token")},
        paged,
        bs=bs,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        swa_window_size=swa_window_size,
    )
    for name in _ENTRIES_NAME_OF.values():
        del arguments[name]
    return checked_call(OPERATION, arguments, stream)


_SCRATCH = "_verify_offsets_scratch"


def _scratch_of(plan: WritePlan, views: dict[str, ArrayView], stream: Any) -> Any:
    """The verify offsets between the two kernels, kept beside the write plan: graphs that write the plan may use it."""
    cached = vars(plan)
    if _SCRATCH not in cached:
        write_offsets = views["out_write_offsets"]
        backend = BACKENDS[write_offsets.device.type]
        with backend.callers_stream(list(views.values()), stream) as on_stream:
            cached[_SCRATCH] = backend.allocate_zeros(write_offsets.size, "int64", write_offsets.device, on_stream)
    return cached[_SCRATCH]


# What the entries plan reads of the offsets plan, by its name there.
_ENTRIES_NAME_OF = {"out_verify_offsets_scratch": "verify_offsets_scratch", "out_verify_enable": "verify_enable"}
_OFFSETS_NAMES = tuple(signature(plan_offsets.OPERATION.launches).parameters)
_ENTRIES_NAMES = tuple(signature(plan_entries.OPERATION.launches).parameters)


def _both(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the offsets plan and of the entries plan."""
    entries = {_ENTRIES_NAME_OF.get(name, name): value for name, value in arguments.items()}
    return {name: arguments[name] for name in _OFFSETS_NAMES}, {name: entries[name] for name in _ENTRIES_NAMES}


def _reference(**arguments: Any) -> None:
    offsets, entries = _both(arguments)
    plan_offsets.OPERATION.reference(**offsets)
    plan_entries.OPERATION.reference(**entries)


def _launches(**arguments: Any) -> list[Launch]:
    offsets, entries = _both(arguments)
    return [*plan_offsets.OPERATION.launches(**offsets), *plan_entries.OPERATION.launches(**entries)]


OPERATION = Operation(_reference, _launches, plan_offsets.OPERATION.outputs | plan_entries.OPERATION.outputs)
