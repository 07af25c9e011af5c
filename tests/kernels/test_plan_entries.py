"""Plan entries, and the whole plan, on every backend: golden files, reported cases, properties, hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import KvCanaryError, StatusBit, launch_canary_plan_kernels, launch_plan_entries_kernel
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.golden import FILL, GoldenFile
from tests.helpers.launching import arrays_of, assert_as_numpy, launch_in_place, map_arrays
from tests.helpers.plan_entries import (
    ENTRY_ARRAYS,
    TABLE,
    expected_entries,
    expected_plan,
    make_entries_arguments,
    make_plan_arguments,
)

GOLDEN = GoldenFile("plan.npz")


def plan(backend: ArrayBackend, *batch: Any, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The whole plan of a batch: the arrays of both plans and the status."""
    return run(backend, make_plan_arguments(*batch, **options))


def run(backend: ArrayBackend, arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    launch_in_place(backend, launch_canary_plan_kernels, arguments)
    return dict(arrays_of(arguments))


def rows_of(outputs: dict[str, np.ndarray[Any, Any]], count: int) -> list[tuple[int, int, int]]:
    """(slot, position, predecessor) of the first entries."""
    names = ("verify_slot_indices", "verify_expected_positions", "verify_prev_slot_indices")
    return list(zip(*(outputs[name][:count].tolist() for name in names), strict=True))


def assert_as_contract(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    expected = expected_plan(arguments)
    outputs = run(backend, arguments)
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    actual = plan(
        backend,
        inputs["req_pool_indices"],
        inputs["prefix_lens"],
        inputs["extend_seq_lens"],
        inputs["req_to_token"],
        mapping=inputs.get("full_to_swa_index_mapping"),
        window=inputs["swa_window_size"],
        capacity=inputs["verify_capacity"],
        tokens=inputs.get("req_to_verify_expected_tokens"),
        valid_lens=inputs.get("req_to_verify_expected_tokens_valid_lens"),
        offset=inputs["kv_token_id_vs_position_offset"],
        write_req_capacity=inputs["write_req_capacity"],
    )
    for argument, value in outputs.items():
        np.testing.assert_array_equal(actual[argument], value, err_msg=argument)


def test_case_1_a_mixed_batch_with_a_padding_row(backend: ArrayBackend) -> None:
    outputs = plan(backend, [2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE)
    assert outputs["write_offsets"].tolist() == [0, 1, 1, 5]
    assert outputs["write_seed_slot_indices"].tolist() == [11, -1, -1]
    assert (outputs["verify_num_valid"], outputs["enable"], outputs["write_num_valid_reqs"]) == (5, 1, 3)
    assert rows_of(outputs, 5) == [(5, 0, -1), (9, 1, 5), (3, 2, 9), (7, 3, 3), (11, 4, 7)]
    assert outputs["verify_expected_tokens"][:6].tolist() == [-1] * 5 + [FILL]
    assert outputs["out_status"] == 0


# Around a warp, a block, the samples of the search, and where three offsets launches take over from one.
@pytest.mark.parametrize("bs", [1, 31, 33, 255, 256, 257, 511, 513, 1025, 4095, 4096, 4097, 8193, 10000])
def test_case_2_batch_sizes(backend: ArrayBackend, bs: int) -> None:
    ones = np.ones(bs, np.int64)
    outputs = plan(backend, 2 * ones, ones, ones, TABLE, capacity=bs, bs_block_size=bs)
    assert (outputs["verify_num_valid"], outputs["enable"]) == (bs, 1)
    assert outputs["write_offsets"][bs] == bs
    assert (outputs["verify_slot_indices"] == 5).all()
    assert (outputs["verify_expected_positions"] == 0).all()
    assert (outputs["verify_prev_slot_indices"] == -1).all()


def test_case_2_the_default_limit_is_4096_requests() -> None:
    ones = np.ones(4097, np.int64)
    with pytest.raises(KvCanaryError, match=r"kv-canary: offsets kernel bs must be in \[0, 4096\], got 4097\n"):
        launch_canary_plan_kernels(**make_plan_arguments(ones, ones, ones, TABLE))


@pytest.mark.parametrize(("capacity", "num_valid", "enable"), [(4, 4, 0), (5, 5, 1), (0, 0, 0)])
def test_case_3_a_total_over_capacity_writes_nothing(
    backend: ArrayBackend, capacity: int, num_valid: int, enable: int
) -> None:
    outputs = plan(backend, [2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE, capacity=capacity)
    assert (outputs["verify_num_valid"], outputs["enable"]) == (num_valid, enable)
    for name in ENTRY_ARRAYS:
        assert (outputs[name] == FILL).all() == (not enable), name


def test_case_4_a_window_keeps_the_real_predecessor(backend: ArrayBackend) -> None:
    mapping = np.zeros(64, np.int64)
    mapping[[3, 7, 9, 11]] = [33, 37, 39, 41]
    outputs = plan(backend, [2], [5], [1], TABLE, window=3, mapping=mapping)
    assert outputs["verify_num_valid"] == 3
    assert rows_of(outputs, 3) == [(33, 2, 39), (37, 3, 33), (41, 4, 37)]
    assert outputs["write_seed_slot_indices"] == 41


def test_case_14_a_slot_far_outside_is_planned_as_it_stands(backend: ArrayBackend) -> None:
    table = TABLE.copy()
    table[2, 1] = 1_000_000
    outputs = plan(backend, [2], [3], [1], table)
    assert rows_of(outputs, 3) == [(5, 0, -1), (1_000_000, 1, 5), (3, 2, 1_000_000)]
    assert outputs["out_status"] == 0
    outputs = plan(backend, [2], [3], [1], table, mapping=np.arange(64) + 100)
    assert rows_of(outputs, 3) == [(105, 0, -1), (163, 1, 105), (103, 2, 163)]
    assert outputs["out_status"] == StatusBit.SLOT_OUT_OF_MAPPING


def test_case_15_a_prefix_longer_than_its_row_ends_with_the_row(backend: ArrayBackend) -> None:
    table = np.arange(6 * 16).reshape(6, 16)
    outputs = plan(backend, [2], [17], [1], table)
    assert outputs["verify_num_valid"] == 16
    assert outputs["verify_slot_indices"][:17].tolist() == [*range(32, 48), FILL]
    assert outputs["out_status"] == StatusBit.PREFIX_LEN_OUT_OF_RANGE


def test_case_23_strided_views(backend: ArrayBackend) -> None:
    """The page table and index arrays must be contiguous; rows of the expected tokens may be strided."""
    given = make_plan_arguments([2, 4], [3, 2], [1, 1], TABLE)
    for name, value in {
        "prefix_lens": np.array([3, 0, 2, 0])[::2],
        "req_to_token": np.tile(TABLE, 2)[:, :16],
        "req_to_verify_expected_tokens": np.zeros((16, 6), np.int32).T,
    }.items():
        with pytest.raises(KvCanaryError, match=f"{name} must "):
            launch_canary_plan_kernels(**given | {name: value})
    wide = np.arange(12 * 40, dtype=np.int32).reshape(12, 40)
    on_device = map_arrays(given, backend.array)
    launch_canary_plan_kernels(
        **on_device
        | {
            "req_to_verify_expected_tokens": backend.array(wide)[::2, 8:24],
            "req_to_verify_expected_tokens_valid_lens": backend.array(np.array([16, 16])),
        }
    )
    tokens = backend.to_numpy(on_device["verify_plan_out"].verify_expected_tokens)
    assert tokens[:5].tolist() == [*wide[4, 8:11], *wide[8, 8:10]]


@pytest.mark.parametrize("offset", [-(2**31) + 1, -1, 0, 1, 3, 2**31 - 1])
def test_expected_tokens(backend: ArrayBackend, offset: int) -> None:
    tokens = np.arange(4 * 7).reshape(4, 7) - 3
    assert_as_contract(
        backend,
        # Rows 4 and 5 are behind the expected tokens; valid lengths are short, negative, or pass the row.
        make_plan_arguments(
            [1, 2, 3, 4, 5, 1, 2],
            [5, 9, 16, 3, 2, 6, 1],
            [1] * 7,
            TABLE,
            tokens=tokens,
            valid_lens=[3, 2**62, 6, 5, 5, -(2**63), 0],
            offset=offset,
        ),
    )


def test_a_smaller_bs_leaves_the_rest_of_static_buffers_alone(backend: ArrayBackend) -> None:
    arguments = make_plan_arguments(
        [2, 4, 2, 4],
        [5, 2, 1, 1],
        [1, 1, 1, 1],
        TABLE,
        tokens=np.arange(96).reshape(6, 16),
        valid_lens=[4, 4, 4, 4],
        write_req_capacity=6,
        bs=2,
    )
    assert_as_contract(backend, arguments)
    assert arguments["write_plan_out"].write_offsets.tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert arguments["write_plan_out"].write_seed_slot_indices.tolist() == [11, 21, FILL, FILL, FILL, FILL]


@pytest.mark.parametrize(("said", "planned"), [(2, 2), (0, 0), (9, 4), (-1, 0)])
def test_a_batch_size_in_device_memory(backend: ArrayBackend, said: int, planned: int) -> None:
    batch = ([2, 4, 2, 4], [5, 2, 1, 1], [1, 1, 1, 1], TABLE)
    expected = expected_plan(make_plan_arguments(*batch, write_req_capacity=6, bs=planned))
    outputs = run(backend, make_plan_arguments(*batch, write_req_capacity=6, bs=np.array([said], np.int32)))
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)


def test_an_empty_batch(backend: ArrayBackend) -> None:
    assert_as_contract(backend, make_plan_arguments([], [], [], TABLE, write_req_capacity=300, capacity=0))
    assert_as_contract(backend, make_plan_arguments([], [], [], TABLE, write_req_capacity=0))


def test_long_requests_over_several_warps_and_blocks(backend: ArrayBackend) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(-1, 5000, (5, 700))
    lens = [33, 1, 700, 31, 0, 640]
    assert_as_contract(
        backend,
        make_plan_arguments(
            [1, 2, 3, 4, 1, 2],
            lens,
            [1] * 6,
            table,
            mapping=rng.integers(0, 9999, 4000),
            window=650,
            tokens=rng.integers(0, 99, (4, 600)),
            valid_lens=[650] * 6,
            offset=1,
            capacity=2000,
        ),
    )


def test_a_grid_too_small_for_the_entries_loops(backend: ArrayBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_kvcanary.ops.plan_entries._MAX_BLOCKS", 2)
    table = np.arange(3 * 900).reshape(3, 900)
    assert_as_contract(backend, make_plan_arguments([1, 2], [900, 801], [1, 1], table, capacity=2000))


def test_the_scratch_lives_with_the_write_plan(backend: ArrayBackend) -> None:
    arguments = map_arrays(make_plan_arguments([2, 4], [5, 3], [1, 1], TABLE, write_req_capacity=3), backend.array)
    launch_canary_plan_kernels(**arguments)
    (scratch,) = (value for name, value in vars(arguments["write_plan_out"]).items() if "scratch" in name)
    assert backend.to_numpy(scratch).tolist() == [0, 5, 8, 0]
    launch_canary_plan_kernels(**arguments)
    assert any(value is scratch for value in vars(arguments["write_plan_out"]).values())


def test_the_scratch_may_be_the_callers(backend: ArrayBackend) -> None:
    arguments = make_plan_arguments([2, 4], [5, 3], [1, 1], TABLE) | {"verify_offsets_scratch": np.full(5, FILL)}
    outputs = run(backend, arguments)
    assert outputs["verify_offsets_scratch"].tolist() == [0, 5, 8, FILL, FILL]
    assert len(vars(arguments["write_plan_out"])) == 3
    with pytest.raises(KvCanaryError, match="out_verify_offsets_scratch length must be >= 3, got 2"):
        launch_canary_plan_kernels(**arguments | {"verify_offsets_scratch": np.zeros(2, np.int64)})


def test_status_is_ored_into_what_it_holds(backend: ArrayBackend) -> None:
    arguments = make_plan_arguments([2, 99], [17, 1], [1, 1], TABLE)
    arguments["out_status"][0] = 64
    outputs = run(backend, arguments)
    assert outputs["out_status"] == 64 | StatusBit.REQUEST_ROW_OUT_OF_RANGE | StatusBit.PREFIX_LEN_OUT_OF_RANGE


# -- entries alone, from any offsets ------------------------------------------------------------------------------


def assert_entries_as_contract(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    expected = expected_entries(arguments)
    launch_in_place(backend, launch_plan_entries_kernel, arguments)
    for name, value in expected.items():
        np.testing.assert_array_equal(arguments[name], value, err_msg=name)


def test_entries_alone(backend: ArrayBackend) -> None:
    arguments = make_entries_arguments([2, 0, 4], [5, 9, 2], TABLE, [0, 5, 5, 7])
    assert_entries_as_contract(backend, arguments)
    assert arguments["out_verify_slot_indices"][:8].tolist() == [5, 9, 3, 7, 11, 20, 21, FILL]


def test_nothing_is_written_where_verification_is_off(backend: ArrayBackend) -> None:
    arguments = make_entries_arguments([2, 99], [5, 99], TABLE, [0, 5, 9], enable=0)
    assert_entries_as_contract(backend, arguments)
    assert (arguments["out_verify_slot_indices"] == FILL).all()
    assert arguments["out_status"] == 0


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 5, 100],  # more entries than the requests read
        [0, 2, 8],  # the second begins within the first
        [0, 7, 10],  # a gap between them
        [3, 8, 11],  # a gap before them
        [-4, 1, 4],  # the first begins before the plan
        [8, 3, 8],  # the second before the first
        [0, 5, -1],  # a negative total
        [0, 2**63 - 1, 8],
        [-(2**63), -(2**63), 8],
        [5, 5, 2**63 - 1],
    ],
)
def test_hostile_offsets(backend: ArrayBackend, offsets: list[int]) -> None:
    assert_entries_as_contract(backend, make_entries_arguments([2, 4], [5, 3], TABLE, offsets, capacity=9))


def test_no_request_has_no_entries_whatever_the_total(backend: ArrayBackend) -> None:
    assert_entries_as_contract(backend, make_entries_arguments([], [], TABLE, [9]))


small = st.integers(-3, 40)
extreme = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1])
hostile = small | extreme | st.integers(-(2**63), 2**63 - 1)


@st.composite
def batches(draw: st.DrawFn, value: st.SearchStrategy[int]) -> dict[str, Any]:
    bs = draw(st.integers(0, 40))
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 33))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def table(rows: int, width: int) -> np.ndarray[Any, Any]:
        # Drawn from a seed: thousands of single draws would take most of the time.
        values = rng.integers(-1, 60, (rows, width)), rng.integers(-(2**31), 2**31, (rows, width))
        return np.where(rng.random((rows, width)) < 0.8, *values)

    column = st.lists(value, min_size=bs, max_size=bs)
    mapping = draw(st.none() | st.lists(value, min_size=1, max_size=60))
    has_tokens = draw(st.booleans())
    return {
        "batch": (draw(column), draw(column), draw(column), table(rows, width)),
        "mapping": mapping,
        "window": 0 if mapping is None else draw(st.integers(0, 40) | st.sampled_from([2**31, 2**63 - 1])),
        "capacity": draw(st.integers(0, 60) | st.integers(0, 2000)),
        "tokens": table(draw(st.integers(0, 9)), draw(st.integers(1, 9))) if has_tokens else None,
        "valid_lens": draw(column) if has_tokens else None,
        "offset": draw(st.integers(-2, 2) | st.sampled_from([-(2**31) + 1, 2**31 - 1])),
    }


@settings(max_examples=40, deadline=None)
@given(batch=batches(small), spare=st.integers(0, 3))
def test_contract_holds_for_any_batch(backend: ArrayBackend, batch: dict[str, Any], spare: int) -> None:
    columns = batch.pop("batch")
    assert_as_contract(backend, make_plan_arguments(*columns, **batch, write_req_capacity=len(columns[0]) + spare))


@settings(max_examples=40, deadline=None)
@given(batch=batches(hostile))
def test_hostile_values_change_nothing_outside_the_outputs(backend: ArrayBackend, batch: dict[str, Any]) -> None:
    assert_as_contract(backend, make_plan_arguments(*batch.pop("batch"), **batch))


@settings(max_examples=60, deadline=None)
@given(batch=batches(small | extreme), data=st.data())
def test_hostile_offsets_change_nothing_outside_the_outputs(
    backend: ArrayBackend, batch: dict[str, Any], data: st.DataObject
) -> None:
    rows, prefix_lens, _, table = batch.pop("batch")
    offset = st.integers(-3, 50) | hostile
    sums = np.cumsum([0, *(max(min(p, table.shape[1]), 0) for p in prefix_lens)]).tolist()
    offsets = [data.draw(st.just(right) | offset) for right in sums]
    assert_entries_as_contract(backend, make_entries_arguments(rows, prefix_lens, table, offsets, **batch))


@pytest.mark.gpu
@pytest.mark.parametrize(("bs", "prefix_len"), [(1, 100_000), (256, 4096), (4096, 256), (20_000, 50)])
def test_large_plans_on_the_gpu_equal_numpy(bs: int, prefix_len: int) -> None:
    require_gpu()
    rng = np.random.default_rng(bs)
    rows = min(bs, 500) + 1
    arguments = make_plan_arguments(
        rng.integers(0, rows, bs),
        rng.integers(prefix_len // 2, prefix_len + 1, bs),
        rng.integers(0, 5, bs),
        rng.integers(0, 2**20, (rows, prefix_len)),
        mapping=rng.integers(0, 2**20, 2**20),
        window=prefix_len - prefix_len // 4,
        tokens=rng.integers(0, 99, (rows, prefix_len)),
        valid_lens=rng.integers(0, prefix_len + 1, bs),
        capacity=bs * prefix_len,
        bs_block_size=bs,
    )
    assert_as_numpy(ArrayBackend("gpu"), launch_canary_plan_kernels, arguments)
