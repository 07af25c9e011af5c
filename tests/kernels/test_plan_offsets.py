"""Plan offsets on every backend: golden files, hand-worked cases, properties, hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import StatusBit, launch_plan_offsets_kernel, plan_offsets
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.golden import FILL, GoldenFile
from tests.helpers.plan_offsets import OUTPUTS, expected_outputs, make_arguments

GOLDEN = GoldenFile("offsets.npz")

# Row 2 and row 4 of a table of 6 rows and 16 positions (fixture F1 of the reported faults).
TABLE = np.zeros((6, 16), np.int32)
TABLE[2, :6] = [5, 9, 3, 7, 11, 13]
TABLE[4, :4] = [20, 21, 22, 23]


def launch(backend: ArrayBackend, arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Launch on the backend's device; the outputs on the host."""
    on_device = backend.on_device(arguments)
    launch_plan_offsets_kernel(**on_device)
    return {name: backend.to_numpy(on_device[name]) for name in (*OUTPUTS, "out_status")}


def assert_as_contract(backend: ArrayBackend, arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    expected = expected_outputs(arguments)
    outputs = launch(backend, arguments)
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)
    return outputs


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    arguments = make_arguments(
        inputs["req_pool_indices"],
        inputs["prefix_lens"],
        inputs["extend_seq_lens"],
        inputs["req_to_token"],
        mapping=inputs.get("full_to_swa_index_mapping"),
        window=inputs["swa_window_size"],
        capacity=inputs["verify_capacity"],
        write_req_capacity=inputs["write_req_capacity"],
    )
    actual = launch(backend, arguments)
    recorded = len(outputs["out_verify_offsets_scratch"])
    assert (actual["out_verify_offsets_scratch"][recorded:] == FILL).all()
    actual["out_verify_offsets_scratch"] = actual["out_verify_offsets_scratch"][:recorded]
    for argument, value in outputs.items():
        np.testing.assert_array_equal(actual[argument], value, err_msg=argument)


def test_mixed_batch_with_a_padding_row(backend: ArrayBackend) -> None:
    outputs = launch(backend, make_arguments([2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE))
    assert outputs["out_verify_offsets_scratch"][:5].tolist() == [0, 5, 5, 5, FILL]
    assert outputs["out_write_offsets"].tolist() == [0, 1, 1, 5]
    assert outputs["out_write_seed_slot_indices"].tolist() == [11, -1, -1]
    assert outputs["out_verify_num_valid"] == 5
    assert outputs["out_verify_enable"] == 1
    assert outputs["out_write_num_valid_reqs"] == 3
    assert outputs["out_status"] == 0


@pytest.mark.parametrize(("capacity", "num_valid", "enable"), [(4, 4, 0), (5, 5, 1), (0, 0, 0)])
def test_a_total_over_capacity_disables_verification(
    backend: ArrayBackend, capacity: int, num_valid: int, enable: int
) -> None:
    outputs = launch(backend, make_arguments([2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE, capacity=capacity))
    assert outputs["out_verify_num_valid"] == num_valid
    assert outputs["out_verify_enable"] == enable
    assert outputs["out_verify_offsets_scratch"][3] == 5


def test_window_and_mapping(backend: ArrayBackend) -> None:
    mapping = np.zeros(64, np.int64)
    mapping[[3, 7, 9, 11]] = [33, 37, 39, 41]
    outputs = launch(backend, make_arguments([2], [5], [1], TABLE, window=3, mapping=mapping))
    assert outputs["out_verify_offsets_scratch"][:2].tolist() == [0, 3]
    assert outputs["out_write_seed_slot_indices"].tolist() == [41]


def test_an_empty_batch(backend: ArrayBackend) -> None:
    outputs = launch(backend, make_arguments([], [], [], TABLE, write_req_capacity=2, capacity=0))
    assert outputs["out_write_offsets"].tolist() == [0, FILL, FILL]
    assert outputs["out_verify_offsets_scratch"][:2].tolist() == [0, FILL]
    assert outputs["out_write_seed_slot_indices"].tolist() == [FILL, FILL]
    assert (outputs["out_verify_num_valid"], outputs["out_verify_enable"]) == (0, 1)


def test_a_smaller_bs_leaves_the_rest_of_static_buffers_alone(backend: ArrayBackend) -> None:
    arguments = make_arguments([2, 4, 2, 4], [5, 2, 1, 1], [1, 1, 1, 1], TABLE) | {"bs": 2}
    outputs = assert_as_contract(backend, arguments)
    assert outputs["out_write_offsets"].tolist() == [0, 1, 2, FILL, FILL]


def test_a_prefix_longer_than_its_row_is_clamped(backend: ArrayBackend) -> None:
    table = np.arange(6 * 16).reshape(6, 16)
    outputs = launch(backend, make_arguments([2], [17], [1], table))
    assert outputs["out_verify_num_valid"] == 16
    assert outputs["out_write_seed_slot_indices"] == table[2, 15]
    assert outputs["out_status"] == StatusBit.PREFIX_LEN_OUT_OF_RANGE


def test_status_is_ored_into_what_it_holds(backend: ArrayBackend) -> None:
    arguments = make_arguments([99, -1, 2], [1, 1, 1], [1, 1, 1], TABLE)
    arguments["out_status"][0] = 64
    outputs = launch(backend, arguments)
    assert outputs["out_status"] == 64 | StatusBit.REQUEST_ROW_OUT_OF_RANGE
    assert outputs["out_verify_num_valid"] == 1


def random_batch(bs: int, seed: int, **options: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    rows, width = min(bs, 300) + 2, 50
    return make_arguments(
        rng.integers(0, rows, bs),
        rng.integers(-2, width + 1, bs),
        rng.integers(-1, 40, bs),
        rng.integers(-1, 500, (rows, width)),
        bs_block_size=bs,
        **options,
    )


# Around a warp, a block, several blocks, and where three launches take over from one.
@pytest.mark.parametrize("bs", [1, 31, 32, 33, 255, 257, 512, 1023, 1025, 4097, 8192, 8193, 10000])
def test_batch_sizes(backend: ArrayBackend, bs: int) -> None:
    assert_as_contract(backend, random_batch(bs, seed=bs, window=7, mapping=np.arange(500) * 3))


@pytest.mark.parametrize("bs", [4095, 4096, 4097, 10000])
def test_totals_of_unit_requests_are_the_batch_size(backend: ArrayBackend, bs: int) -> None:
    ones = np.ones(bs, np.int32)
    plan = plan_offsets(*(backend.array(array) for array in (ones, ones, ones, TABLE)))
    assert plan.totals()[:4] == (bs, bs, bs, True)


@pytest.mark.gpu
@pytest.mark.parametrize("bs", [4097, 65536, 1_000_003])
def test_large_batches_on_the_gpu_equal_numpy(bs: int) -> None:
    require_gpu()
    arguments = random_batch(bs, seed=bs, window=7, mapping=np.arange(400) * 3)
    on_gpu = launch(ArrayBackend("gpu"), arguments)
    launch_plan_offsets_kernel(**arguments)
    for name, value in on_gpu.items():
        np.testing.assert_array_equal(value, arguments[name], err_msg=name)


small = st.integers(-3, 40)
extreme = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1])


@st.composite
def batches(draw: st.DrawFn, value: st.SearchStrategy[int]) -> dict[str, Any]:
    bs = draw(st.integers(0, 70))
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 33))
    int32s = st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 60)
    table = draw(st.lists(int32s, min_size=rows * width, max_size=rows * width))
    mapping = draw(st.none() | st.lists(value, min_size=1, max_size=60))
    column = st.lists(value, min_size=bs, max_size=bs)
    return make_arguments(
        draw(column),
        draw(column),
        draw(column),
        np.array(table, np.int32).reshape(rows, width),
        mapping=mapping,
        window=draw(st.integers(0, 40) | st.sampled_from([2**31, 2**63 - 1])),
        capacity=draw(st.integers(0, 2000) | st.just(2**31 - 1)),
        write_req_capacity=bs + draw(st.integers(0, 3)),
        bs_block_size=bs + draw(st.integers(0, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(arguments=batches(small))
def test_contract_holds_for_any_batch(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    assert_as_contract(backend, arguments)


@settings(max_examples=60, deadline=None)
@given(arguments=batches(small | extreme | st.integers(-(2**63), 2**63 - 1)))
def test_hostile_values_change_nothing_outside_the_outputs(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    """No value makes a kernel read or write outside an array; the outputs and the status are as the contract says.

    The host backends have guards or red zones around every array; on the GPU the arrays lie between guard words.
    """
    if backend.is_gpu:
        assert_as_contract_between_guards(backend, arguments)
    else:
        assert_as_contract(backend, arguments)


def assert_as_contract_between_guards(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    import cupy

    guard = 32
    expected = expected_outputs(arguments)
    guarded, on_device = {}, dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            buffer = cupy.full(value.size + 2 * guard, FILL, value.dtype)
            buffer[guard : guard + value.size] = cupy.asarray(value.ravel())
            guarded[name] = buffer
            on_device[name] = buffer[guard : guard + value.size].reshape(value.shape)
    launch_plan_offsets_kernel(**on_device)
    for name, buffer in guarded.items():
        content = buffer.get()
        inside = content[guard:-guard].reshape(arguments[name].shape)
        np.testing.assert_array_equal(inside, expected.get(name, arguments[name]), err_msg=name)
        assert (content[:guard] == FILL).all(), name
        assert (content[-guard:] == FILL).all(), name


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("bs", [3, 9000])
def test_plan_offsets_takes_both_index_widths(backend: ArrayBackend, dtype: type, bs: int) -> None:
    arguments = random_batch(bs, seed=1, mapping=np.arange(500))
    expected = expected_outputs(arguments)
    names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token")
    inputs = [backend.array(arguments[name].astype(dtype)) for name in names]
    plan = plan_offsets(*inputs, full_to_swa_index_mapping=backend.array(np.arange(500, dtype=dtype)))
    np.testing.assert_array_equal(
        backend.to_numpy(plan.verify_offsets), expected["out_verify_offsets_scratch"][: bs + 1]
    )
    np.testing.assert_array_equal(backend.to_numpy(plan.write_offsets), expected["out_write_offsets"])
    np.testing.assert_array_equal(
        backend.to_numpy(plan.write_seed_slot_indices), expected["out_write_seed_slot_indices"]
    )


def test_plan_offsets_takes_a_table_with_strided_rows(backend: ArrayBackend) -> None:
    wide = np.arange(6 * 40, dtype=np.int32).reshape(6, 40)
    columns = backend.array(wide)[:, 8:24]
    plan = plan_offsets(*(backend.array(np.array([v])) for v in (3, 16, 1)), columns)
    assert backend.to_numpy(plan.write_seed_slot_indices).tolist() == [wide[3, 23]]
    rows = backend.array(wide)[::2]
    plan = plan_offsets(*(backend.array(np.array([v])) for v in (2, 16, 1)), rows)
    assert backend.to_numpy(plan.write_seed_slot_indices).tolist() == [wide[4, 15]]


@pytest.mark.parametrize(("said", "planned"), [(3, 3), (0, 0), (600, 600), (601, 600), (-4, 0), (2**31 - 1, 600)])
@pytest.mark.parametrize("three_launches", [False, True])
def test_a_batch_size_in_device_memory(
    backend: ArrayBackend, monkeypatch: pytest.MonkeyPatch, said: int, planned: int, three_launches: bool
) -> None:
    """It is read by the kernels, and cut to what the arrays hold; the outputs behind the batch stay untouched."""
    if three_launches:
        monkeypatch.setattr("cupy_kvcanary.ops.plan_offsets._SINGLE_LAUNCH_MAX_BS", -1)
    arguments = random_batch(600, seed=1, window=7, mapping=np.arange(500))
    expected = expected_outputs(arguments | {"bs": planned})
    outputs = launch(backend, arguments | {"bs": np.array([said], np.int32)})
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)
