"""Every check of the verify launchers: its exact message, with outputs untouched."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    BlockTable,
    KvCanaryError,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    forget_chain,
    launch_canary_verify_batch_kernel,
    launch_canary_verify_kernel,
)
from cupy_kvcanary.buffers import remember_chain
from tests.helpers.launching import arrays_of
from tests.helpers.plan_errors import aligned_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

NO_ARRAY = "must be an array (NumPy, DLPack or __cuda_array_interface__), got"
INT64 = np.zeros(3, np.int64)
INT32 = np.zeros(1, np.int32)
TABLE = np.arange(3 * 4, dtype=np.int32).reshape(3, 4)
PLAN_ARRAYS = [field.name for field in dataclasses.fields(VerifyPlan)]


class ClaimsCuda:
    """Host memory that says it is CUDA memory, of any length: enough for checks that never touch it."""

    def __init__(self, array: np.ndarray[Any, Any], length: int | None = None) -> None:
        self.__cuda_array_interface__ = array.__array_interface__
        if length is not None:
            self.__cuda_array_interface__ |= {"shape": (length,)}


def context(change: Callable[[Any], Any] = lambda array: array, **changed: Any) -> VerifyOrWriteContext:
    """A valid context of 8 slots, with some arrays replaced and each array changed."""
    arrays = {
        "canary_buf": np.zeros((8, 32), np.uint8),
        "violation_ring": np.zeros((4, 8), np.int64),
        "violation_write_index": np.zeros(1, np.int32),
        "slot_run_counter": np.zeros(1, np.int64),
        "kernel_run_counter": np.zeros(1, np.int64),
    } | changed
    return VerifyOrWriteContext(kernel_kind=0, **{name: change(array) for name, array in arrays.items()})


def plan_arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments for a plan of three entries, with some of them replaced; those of the plan by their names."""
    plan = dataclasses.replace(
        VerifyPlan.allocate(3), **{name: changed.pop(name) for name in PLAN_ARRAYS if name in changed}
    )
    return {"context": context(), "plan": plan, "check_verify_expected_token": True} | changed


def batch_arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments for two requests of three entries in all, with some of them replaced."""
    return {
        "context": context(),
        "req_pool_indices": np.array([1, 2]),
        "prefix_lens": np.array([2, 1]),
        "req_to_token": TABLE.copy(),
        "full_to_swa_index_mapping": np.arange(12),
        "verify_offsets_scratch": np.array([0, 2, 3]),
        "verify_num_valid": np.array([3], np.int32),
        "verify_enable": np.ones(1, np.int32),
        "req_to_verify_expected_tokens": TABLE.copy(),
        "req_to_verify_expected_tokens_valid_lens": np.array([2, 1]),
        "kv_token_id_vs_position_offset": 0,
        "swa_window_size": 2,
        "verify_capacity": 3,
        "check_verify_expected_token": True,
        "out_status": np.zeros(1, np.int32),
    } | changed


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def assert_refused(launcher: Callable[..., None], arguments: dict[str, Any], message: str) -> None:
    given = arguments["context"]
    contexts = dict(enumerate(given)) if isinstance(given, list) else {}
    before = [(name, array, array.copy()) for name, array in arrays_of(arguments | contexts)]
    with pytest.raises(KvCanaryError) as caught:
        launcher(**arguments)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    for name, array, value in before:
        np.testing.assert_array_equal(array, value, err_msg=name)


MEMORY = np.zeros(64, np.int64)
KV = aligned_bytes(8, 32)
ON_CUDA = context(ClaimsCuda)


def reading(tensor: np.ndarray[Any, Any]) -> VerifyOrWriteContext:
    """A valid context whose real KV is this tensor."""
    source = RealKvSource(tensor=tensor, page_size=1, num_bytes_per_token=32, read_bytes=32)
    return dataclasses.replace(context(), real_kv_sources=(source,), real_kv_hash_mode=RealKvHashMode.ALL)


# (first line after "kv-canary: ", changed arguments), of either launcher
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("context must be a VerifyOrWriteContext or a sequence of them, got NoneType", {"context": None}),
    ("context must be a VerifyOrWriteContext or a sequence of them, got ndarray", {"context": INT64}),
    ("context must be a VerifyOrWriteContext or a sequence of them, got int", {"context": [context(), 7]}),
    ("context must be 1 to 12 contexts, got 0", {"context": []}),
    ("context must be 1 to 12 contexts, got 13", {"context": [context() for _ in range(13)]}),
    (
        "canary_buf of context 1 must be on canary_buf of context 0's device cpu, got cuda:0",
        {"context": [context(), ON_CUDA]},
    ),
    ("check_verify_expected_token must be a bool, got 1", {"check_verify_expected_token": 1}),
    ("check_verify_expected_token must be a bool, got None", {"check_verify_expected_token": None}),
    ("check_holes must be a bool, got 0", {"check_holes": 0}),
    ("padding_slot must be an int, got False", {"padding_slot": False}),
    ("padding_slot must be an int, got 0.0", {"padding_slot": 0.0}),
    ("padding_slot must be non-negative, got -1", {"padding_slot": -1}),
    ("chain must be 'splitmix64' or 'affine', got 'sha256'", {"chain": "sha256"}),
    ("chain must be 'splitmix64' or 'affine', got None", {"chain": None}),
    (
        "violation_ring must not overlap violation_ring of context 1, got shared memory",
        {
            "context": [
                context(violation_ring=MEMORY[:32].reshape(4, 8)),
                context(violation_ring=MEMORY[8:40].reshape(4, 8)),
            ]
        },
    ),
    (
        "canary_buf must not overlap real_kv_sources[0] of context 1, got shared memory",
        {"context": [context(canary_buf=KV), reading(KV)]},
    ),
    (
        "violation_write_index must not overlap enable_chain_position_assert of context 1, got shared memory",
        {
            "context": [
                context(violation_write_index=INT32),
                dataclasses.replace(context(), enable_chain_position_assert=INT32),
            ]
        },
    ),
    (
        "canary_buf must not overlap slot_run_counter of context 1, got shared memory",
        {
            "context": [
                context(canary_buf=MEMORY[:32].view(np.uint8).reshape(8, 32)),
                context(slot_run_counter=MEMORY[5:6]),
            ]
        },
    ),
    (
        "violation_details must not overlap violation_details of context 1, got shared memory",
        {
            "context": [
                context(violation_details=MEMORY[:52].reshape(4, 13)),
                context(violation_details=MEMORY[12:].reshape(4, 13)),
            ]
        },
    ),
    (
        "canary_buf must not overlap skip_counters of context 1, got shared memory",
        {
            "context": [
                context(canary_buf=MEMORY[:32].view(np.uint8).reshape(8, 32)),
                context(skip_counters=MEMORY[31:33]),
            ]
        },
    ),
    ("stream must be None for CPU arrays, got int", {"stream": 7}),
]

PLAN: list[tuple[str, dict[str, Any]]] = [
    *OPTIONS,
    ("plan must be a VerifyPlan of this package, got NoneType", {"plan": None}),
    ("plan must be a VerifyPlan of this package, got WritePlan", {"plan": WritePlan.allocate(3)}),
    (f"verify_expected_tokens {NO_ARRAY} NoneType", {"verify_expected_tokens": None}),
    (f"enable {NO_ARRAY} int", {"enable": 1}),
    ("verify_slot_indices must be contiguous", {"verify_slot_indices": np.zeros(6, np.int64)[::2]}),
    (
        "verify_expected_positions must have dtype int64, got int32",
        {"verify_expected_positions": np.zeros(3, np.int32)},
    ),
    ("verify_num_valid must have dtype int32, got int64", {"verify_num_valid": INT64[:1]}),
    ("enable must have dtype int32, got bool", {"enable": np.ones(1, bool)}),
    ("verify_prev_slot_indices must be 1-D, got shape (3, 1)", {"verify_prev_slot_indices": INT64.reshape(3, 1)}),
    ("enable must be 1-D, got shape ()", {"enable": np.ones((), np.int32)}),
    ("verify_prev_slot_indices length must be 3, got 2", {"verify_prev_slot_indices": INT64[:2]}),
    ("verify_expected_tokens length must be 3, got 4", {"verify_expected_tokens": np.zeros(4, np.int64)}),
    ("verify_num_valid length must be 1, got 0", {"verify_num_valid": INT32[:0]}),
    ("enable length must be 1, got 2", {"enable": np.ones(2, np.int32)}),
    (
        "verify_capacity must be at most 2147483647, got 2147483648",
        {name: ClaimsCuda(INT64, 2**31) for name in PLAN_ARRAYS[:4]},
    ),
    (
        "verify_prev_slot_indices must be on canary_buf's device cpu, got cuda:0",
        {"verify_prev_slot_indices": ClaimsCuda(INT64)},
    ),
    ("verify_slot_indices must be on canary_buf's device cuda:0, got cpu", {"context": ON_CUDA}),
    (
        "violation_ring must not overlap verify_expected_tokens, got shared memory",
        {"context": context(violation_ring=MEMORY[:32].reshape(4, 8)), "verify_expected_tokens": MEMORY[31:34]},
    ),
    (
        "slot_run_counter must not overlap verify_slot_indices, got shared memory",
        {"context": context(slot_run_counter=MEMORY[1:2]), "verify_slot_indices": MEMORY[:3]},
    ),
    (
        "violation_write_index of context 1 must not overlap enable, got shared memory",
        {"context": [context(), context(violation_write_index=INT32)], "enable": INT32},
    ),
]

BATCH: list[tuple[str, dict[str, Any]]] = [
    *OPTIONS,
    *((f"{name} {NO_ARRAY} NoneType", {name: None}) for name in ("req_pool_indices", "prefix_lens", "req_to_token")),
    *(
        (f"{name} {NO_ARRAY} NoneType", {name: None})
        for name in ("verify_offsets_scratch", "verify_num_valid", "verify_enable")
    ),
    (f"full_to_swa_index_mapping {NO_ARRAY} list", {"full_to_swa_index_mapping": [1, 2]}),
    ("req_pool_indices must be 1-D, got shape (3, 4)", {"req_pool_indices": TABLE}),
    ("full_to_swa_index_mapping must be 1-D, got shape (3, 4)", {"full_to_swa_index_mapping": TABLE}),
    ("verify_enable must be 1-D, got shape ()", {"verify_enable": np.ones((), np.int32)}),
    ("req_to_token must be 2-D, got shape (12,)", {"req_to_token": TABLE.ravel()}),
    (
        "req_to_verify_expected_tokens must be 2-D, got shape (12,)",
        {"req_to_verify_expected_tokens": TABLE.ravel()},
    ),
    ("prefix_lens must be contiguous", {"prefix_lens": np.zeros(4, np.int64)[::2]}),
    ("verify_offsets_scratch must be contiguous", {"verify_offsets_scratch": np.zeros(6, np.int64)[::2]}),
    ("req_to_token must have contiguous rows, got strides (4, 16)", {"req_to_token": TABLE.T}),
    ("req_to_token_stride0 must be positive, got 0", {"req_to_token": np.broadcast_to(TABLE[0], (3, 4))}),
    (
        "req_to_verify_expected_tokens must have contiguous rows, got strides (16, 8)",
        {"req_to_verify_expected_tokens": TABLE[:, ::2]},
    ),
    ("page_size must be positive, got 0", {"req_to_token": BlockTable(block_table=TABLE, page_size=0)}),
    (
        "block_table must have dtype int32 or int64, got int16",
        {"req_to_token": BlockTable(block_table=TABLE.astype(np.int16), page_size=2)},
    ),
    ("req_pool_indices must have dtype int32 or int64, got float64", {"req_pool_indices": np.ones(2)}),
    ("prefix_lens must have dtype int32 or int64, got bool", {"prefix_lens": np.ones(2, bool)}),
    ("req_to_token must have dtype int32 or int64, got uint32", {"req_to_token": TABLE.astype(np.uint32)}),
    ("verify_offsets_scratch must have dtype int64, got int32", {"verify_offsets_scratch": np.zeros(3, np.int32)}),
    ("verify_num_valid must have dtype int32, got int64", {"verify_num_valid": INT64[:1]}),
    ("verify_enable must have dtype int32, got bool", {"verify_enable": np.ones(1, bool)}),
    (
        "req_to_verify_expected_tokens must have dtype int32, got int64",
        {"req_to_verify_expected_tokens": TABLE.astype(np.int64)},
    ),
    ("out_status must have dtype int32, got int64", {"out_status": INT64[:1]}),
    (
        "req_to_verify_expected_tokens_valid_lens must be given with req_to_verify_expected_tokens, and only then",
        {"req_to_verify_expected_tokens_valid_lens": None},
    ),
    (
        "req_to_verify_expected_tokens_valid_lens must be given with req_to_verify_expected_tokens, and only then",
        {"req_to_verify_expected_tokens": None},
    ),
    ("kv_token_id_vs_position_offset must be an int, got 1.0", {"kv_token_id_vs_position_offset": 1.0}),
    (
        "size of kv_token_id_vs_position_offset must be at most 2147483647, got 2147483648",
        {"kv_token_id_vs_position_offset": -(2**31)},
    ),
    ("swa_window_size must be an int, got None", {"swa_window_size": None}),
    ("swa_window_size must be non-negative, got -1", {"swa_window_size": -1}),
    ("verify_capacity must be an int, got True", {"verify_capacity": True}),
    ("verify_capacity must be non-negative, got -1", {"verify_capacity": -1}),
    ("verify_capacity must be at most 2147483647, got 2147483648", {"verify_capacity": 2**31}),
    ("bs must be an int, got '2'", {"bs": "2"}),
    ("bs must be non-negative, got -1", {"bs": -1}),
    ("bs must be at most 2147483647, got 2147483648", {"bs": 2**31}),
    ("req_pool_indices length must be >= 3, got 2", {"bs": 3}),
    ("prefix_lens length must be >= 2, got 1", {"prefix_lens": np.ones(1, np.int64)}),
    (
        "req_to_verify_expected_tokens_valid_lens length must be >= 2, got 1",
        {"req_to_verify_expected_tokens_valid_lens": np.ones(1, np.int64)},
    ),
    ("verify_offsets_scratch length must be >= 3, got 2", {"verify_offsets_scratch": INT64[:2]}),
    ("verify_num_valid length must be 1, got 3", {"verify_num_valid": np.ones(3, np.int32)}),
    ("verify_enable length must be 1, got 0", {"verify_enable": INT32[:0]}),
    ("out_status length must be 1, got 2", {"out_status": np.zeros(2, np.int32)}),
    ("lut_len must be positive when has_swa_lut is True", {"full_to_swa_index_mapping": INT64[:0]}),
    ("prefix_lens must be on canary_buf's device cpu, got cuda:0", {"prefix_lens": ClaimsCuda(INT64)}),
    ("req_to_token must be on canary_buf's device cpu, got cuda:0", {"req_to_token": ClaimsCuda(TABLE)}),
    ("out_status must be writable, got a read-only array", {"out_status": read_only(np.zeros(1, np.int32))}),
    ("out_status must not overlap verify_enable, got shared memory", {"out_status": INT32, "verify_enable": INT32}),
    (
        "out_status must not overlap violation_write_index, got shared memory",
        {"out_status": INT32, "context": context(violation_write_index=INT32)},
    ),
    (
        "out_status must not overlap req_to_token, got shared memory",
        {"out_status": TABLE[1, :1], "req_to_token": TABLE},
    ),
    (
        "kernel_run_counter must not overlap verify_offsets_scratch, got shared memory",
        {"context": context(kernel_run_counter=MEMORY[2:3]), "verify_offsets_scratch": MEMORY[:3]},
    ),
    (
        "violation_ring must not overlap req_to_verify_expected_tokens, got shared memory",
        {
            "context": context(violation_ring=MEMORY[:32].reshape(4, 8)),
            "req_to_verify_expected_tokens": MEMORY.view(np.int32)[60:72].reshape(3, 4),
        },
    ),
]


@pytest.mark.parametrize(("message", "changed"), PLAN, ids=[message for message, _ in PLAN])
def test_verify_refuses(message: str, changed: dict[str, Any]) -> None:
    assert_refused(launch_canary_verify_kernel, plan_arguments(**changed), message)


@pytest.mark.parametrize(("message", "changed"), BATCH, ids=[message for message, _ in BATCH])
def test_verify_batch_refuses(message: str, changed: dict[str, Any]) -> None:
    assert_refused(launch_canary_verify_batch_kernel, batch_arguments(**changed), message)


@pytest.mark.parametrize(
    ("launcher", "valid_arguments"),
    [(launch_canary_verify_kernel, plan_arguments), (launch_canary_verify_batch_kernel, batch_arguments)],
)
def test_a_buffer_is_verified_with_the_chain_that_it_was_written_with(
    launcher: Callable[..., None], valid_arguments: Callable[..., dict[str, Any]]
) -> None:
    arguments = valid_arguments(chain="affine")
    remember_chain([arguments["context"].view], "splitmix64")
    assert_refused(launcher, arguments, "chain must be 'splitmix64', with which the buffer was written, got 'affine'")
    forget_chain(arguments["context"].canary_buf)
    launcher(**arguments)
    assert arguments["context"].kernel_run_counter == 1


def test_buffers_may_share_their_log_and_counters() -> None:
    first = context()
    second = dataclasses.replace(first, canary_buf=np.zeros((8, 32), np.uint8))
    launch_canary_verify_kernel(**plan_arguments(context=[first, second]))
    assert first.kernel_run_counter == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"req_to_verify_expected_tokens": None, "req_to_verify_expected_tokens_valid_lens": None},
        {"full_to_swa_index_mapping": None, "out_status": None},
        {"req_pool_indices": np.array([1, 2, 9], np.int32), "bs": 2},
        {"padding_slot": None, "check_holes": np.True_, "verify_capacity": np.int32(3)},
        {"context": (context(), context())},
    ],
)
def test_what_may_be_left_out_or_be_longer_is_taken(changed: dict[str, Any]) -> None:
    launch_canary_verify_batch_kernel(**batch_arguments(**changed))
