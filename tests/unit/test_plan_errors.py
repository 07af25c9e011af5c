"""Every check of the plan and scatter launchers: its exact message, with outputs untouched."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    BlockTable,
    KvCanaryError,
    launch_canary_plan_kernels,
    launch_plan_entries_kernel,
    launch_scatter_req_token_ids_kernel,
)
from tests.helpers.launching import arrays_of, map_arrays
from tests.helpers.plan_entries import TABLE, make_entries_arguments, make_plan_arguments, verify_plan, write_plan
from tests.helpers.plan_errors import plan_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = np.zeros((6, 16), np.int32)
SHARED = np.zeros(9, np.int64)


def entries_arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments of the entries launcher for two requests, with some of them replaced."""
    given = make_entries_arguments(
        [2, 4], [5, 3], TABLE, [0, 5, 8], mapping=np.arange(96), tokens=WORDS, valid_lens=[5, 3], capacity=9
    )
    return given | changed


def scatter_arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments of the scatter launcher for two requests, with some of them replaced."""
    return {
        "flat_in": np.arange(5),
        "offsets": np.array([0, 2, 5]),
        "req_pool_indices": np.array([1, 2]),
        "pool_out": np.zeros((3, 4), np.int32),
        "out_status": np.zeros(1, np.int32),
    } | changed


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


class ClaimsCuda:
    """Host memory that says it is CUDA memory: enough for checks that never touch it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.__cuda_array_interface__ = array.__array_interface__


def assert_refused(launcher: Callable[..., None], arguments: dict[str, Any], message: str) -> None:
    before = map_arrays(arguments, np.copy)
    with pytest.raises(KvCanaryError) as caught:
        launcher(**arguments)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    for (name, array), (_, value) in zip(arrays_of(arguments), arrays_of(before), strict=True):
        np.testing.assert_array_equal(array, value, err_msg=name)


# (first line after "kv-canary: ", changed arguments)
ENTRIES: list[tuple[str, dict[str, Any]]] = [
    (
        "verify_offsets_scratch must be an array (NumPy, DLPack or __cuda_array_interface__), got NoneType",
        {"verify_offsets_scratch": None},
    ),
    ("prefix_lens must be 1-D, got shape (6, 16)", {"prefix_lens": WORDS}),
    ("req_to_token must be 2-D, got shape (96,)", {"req_to_token": WORDS.ravel()}),
    ("req_to_token must be contiguous", {"req_to_token": WORDS[:, :8]}),
    ("prefix_lens must be contiguous", {"prefix_lens": np.zeros(4, np.int64)[::2]}),
    (
        "req_to_verify_expected_tokens must have contiguous rows, got strides (64, 8)",
        {"req_to_verify_expected_tokens": WORDS[:, ::2]},
    ),
    ("req_pool_indices must have dtype int64, got int32", {"req_pool_indices": np.zeros(2, np.int32)}),
    ("req_to_token must have dtype int32, got int64", {"req_to_token": WORDS.astype(np.int64)}),
    (
        "req_to_verify_expected_tokens must have dtype int32, got int64",
        {"req_to_verify_expected_tokens": WORDS.astype(np.int64)},
    ),
    ("verify_enable must have dtype int32, got bool", {"verify_enable": np.zeros(1, bool)}),
    ("bs must be an int, got 2.0", {"bs": 2.0}),
    ("bs must be non-negative, got -1", {"bs": -1}),
    ("bs must be at most 2147483647, got 2147483648", {"bs": 2**31}),
    ("prefix_lens length must be 2, got 3", {"prefix_lens": np.zeros(3, np.int64)}),
    (
        "req_to_verify_expected_tokens_valid_lens length must be 2, got 1",
        {"req_to_verify_expected_tokens_valid_lens": np.zeros(1, np.int64)},
    ),
    ("req_pool_indices length must be >= 3, got 2", {"bs": 3}),
    ("swa_window_size must be an int, got None", {"swa_window_size": None}),
    ("swa_window_size must be non-negative, got -1", {"swa_window_size": -1}),
    ("swa_window_size must be at most 9223372036854775807, got 9223372036854775808", {"swa_window_size": 2**63}),
    ("kv_token_id_vs_position_offset must be an int, got True", {"kv_token_id_vs_position_offset": True}),
    (
        "size of kv_token_id_vs_position_offset must be at most 2147483647, got 2147483648",
        {"kv_token_id_vs_position_offset": -(2**31)},
    ),
    ("verify_offsets_scratch length must be >= 3, got 2", {"verify_offsets_scratch": np.zeros(2, np.int64)}),
    ("verify_enable length must be 1, got 2", {"verify_enable": np.zeros(2, np.int32)}),
    ("out_status length must be 1, got 0", {"out_status": np.zeros(0, np.int32)}),
    (
        "out_verify_prev_slot_indices length must be 9, got 8",
        {"out_verify_prev_slot_indices": np.zeros(8, np.int64)},
    ),
    ("lut_len must be positive when has_swa_lut is True", {"full_to_swa_index_mapping": np.zeros(0, np.int64)}),
    (
        "req_to_verify_expected_tokens_valid_lens must be given with req_to_verify_expected_tokens, and only then",
        {"req_to_verify_expected_tokens_valid_lens": None},
    ),
    (
        "req_to_verify_expected_tokens_valid_lens must be given with req_to_verify_expected_tokens, and only then",
        {"req_to_verify_expected_tokens": None},
    ),
    (
        "req_to_verify_expected_tokens_stride0 must be positive, got -16",
        {"req_to_verify_expected_tokens": WORDS[::-1]},
    ),
    ("req_to_token_stride0 must be positive, got 0", {"req_to_token": np.zeros((6, 0), np.int32)}),
    (
        "verify_enable must be on req_pool_indices's device cpu, got cuda:0",
        {"verify_enable": ClaimsCuda(np.zeros(1, np.int32))},
    ),
    (
        "out_verify_expected_tokens must be writable, got a read-only array",
        {"out_verify_expected_tokens": read_only(np.zeros(9, np.int64))},
    ),
    (
        "out_verify_slot_indices must not overlap out_verify_expected_tokens, got shared memory",
        {"out_verify_slot_indices": SHARED, "out_verify_expected_tokens": SHARED},
    ),
    ("stream must be None for CPU arrays, got int", {"stream": 0}),
]

PLAN: list[tuple[str, dict[str, Any]]] = [
    (
        "launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0",
        {"full_to_swa_index_mapping": None},
    ),
    ("verify_plan_out must be a VerifyPlan of this package, got NoneType", {"verify_plan_out": None}),
    ("write_plan_out must be a WritePlan of this package, got VerifyPlan", {"write_plan_out": verify_plan(9)}),
    ("verify_capacity must equal the verify plan's length 9, got 8", {"verify_capacity": 8}),
    ("verify_capacity must be non-negative, got -1", {"verify_capacity": -1}),
    ("swa_window_size must be an int, got 4.0", {"swa_window_size": 4.0}),
    ("offsets kernel bs must be in [0, 1], got 2", {"bs_block_size": 1}),
    ("bs_block_size must be an int, got None", {"bs_block_size": None}),
    ("bs=2 exceeds write_req_capacity=1", {"write_plan_out": write_plan(1)}),
    ("extend_seq_lens length must be >= 2, got 1", {"extend_seq_lens": np.zeros(1, np.int64), "bs": 2}),
    ("prefix_lens must have dtype int64, got int32", {"prefix_lens": np.zeros(2, np.int32)}),
    ("out_verify_offsets_scratch length must be >= 3, got 2", {"verify_offsets_scratch": np.zeros(2, np.int64)}),
    (
        "req_to_verify_expected_tokens_valid_lens must be given with req_to_verify_expected_tokens, and only then",
        {"req_to_verify_expected_tokens_valid_lens": None},
    ),
    (
        "size of kv_token_id_vs_position_offset must be at most 2147483647, got 2147483648",
        {"kv_token_id_vs_position_offset": 2**31},
    ),
    (
        "out_verify_prev_slot_indices length must be 9, got 8",
        {"verify_plan_out": dataclasses.replace(verify_plan(9), verify_prev_slot_indices=np.zeros(8, np.int64))},
    ),
    (
        "out_verify_enable must have dtype int32, got int64",
        {"verify_plan_out": dataclasses.replace(verify_plan(9), enable=np.zeros(1, np.int64))},
    ),
    (
        "out_verify_offsets_scratch must not overlap out_verify_slot_indices, got shared memory",
        {
            "verify_plan_out": dataclasses.replace(verify_plan(9), verify_slot_indices=SHARED),
            "verify_offsets_scratch": SHARED,
        },
    ),
]

SCATTER: list[tuple[str, dict[str, Any]]] = [
    ("offsets must be an array (NumPy, DLPack or __cuda_array_interface__), got list", {"offsets": [0, 2, 5]}),
    ("pool_out must be 2-D, got shape (96,)", {"pool_out": WORDS.ravel()}),
    ("flat_in must be 1-D, got shape (6, 16)", {"flat_in": WORDS}),
    ("pool_out must have contiguous rows, got strides (4, 64)", {"pool_out": WORDS.T}),
    ("offsets must be contiguous", {"offsets": np.zeros(6, np.int64)[::2]}),
    ("flat_in must have dtype int64, got int32", {"flat_in": np.zeros(5, np.int32)}),
    ("pool_out must have dtype int32, got int64", {"pool_out": np.zeros((3, 4), np.int64)}),
    ("offsets length must be 3, got 2", {"offsets": np.zeros(2, np.int64)}),
    ("pool_out_stride0 must be positive, got 0", {"pool_out": np.broadcast_to(np.zeros(4, np.int32), (3, 4))}),
    ("out_status length must be 1, got 2", {"out_status": np.zeros(2, np.int32)}),
    ("pool_out must be writable, got a read-only array", {"pool_out": read_only(np.zeros((3, 4), np.int32))}),
    (
        "pool_out must not overlap out_status, got shared memory",
        {"pool_out": WORDS, "out_status": WORDS[0, :1]},
    ),
    ("offsets must be on flat_in's device cpu, got cuda:0", {"offsets": ClaimsCuda(np.zeros(3, np.int64))}),
    ("stream must be None for CPU arrays, got str", {"stream": "0"}),
]

CASES = [
    *((launch_plan_entries_kernel, entries_arguments, *case) for case in ENTRIES),
    *((launch_canary_plan_kernels, plan_arguments, *case) for case in PLAN),
    *((launch_scatter_req_token_ids_kernel, scatter_arguments, *case) for case in SCATTER),
]


@pytest.mark.parametrize(
    ("launcher", "arguments", "message", "changed"),
    CASES,
    ids=[f"{launcher.__name__}: {message}" for launcher, _, message, _ in CASES],
)
def test_bad_argument_is_refused_with_outputs_untouched(
    launcher: Callable[..., None], arguments: Callable[..., dict[str, Any]], message: str, changed: dict[str, Any]
) -> None:
    launcher(**arguments())
    assert_refused(launcher, arguments(**changed), message)


def test_pages_need_no_mapping_for_a_window() -> None:
    """They may be those of the sliding-window pool itself."""
    pages = BlockTable(block_table=WORDS + 3, page_size=2)
    arguments = make_plan_arguments([1], [5], [1], pages, window=2)
    launch_canary_plan_kernels(**arguments)
    assert arguments["verify_plan_out"].verify_slot_indices[:2].tolist() == [7, 6]
