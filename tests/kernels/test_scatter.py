"""Scatter of request token ids on every backend: golden files, properties, hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import StatusBit, launch_scatter_req_token_ids_kernel
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.golden import FILL, GoldenFile
from tests.helpers.host_backend import HostKernelError
from tests.helpers.launching import assert_as_numpy, launch_in_place

GOLDEN = GoldenFile("scatter.npz")


def make_arguments(flat_in: Any, offsets: Any, rows: Any, pool: tuple[int, int]) -> dict[str, Any]:
    """Keyword arguments of the launcher for a pool of this shape, filled with FILL, and status 0."""
    return {
        "flat_in": np.array(flat_in, np.int64),
        "offsets": np.array(offsets, np.int64),
        "req_pool_indices": np.array(rows, np.int64),
        "pool_out": np.full(pool, FILL, np.int32),
        "out_status": np.zeros(1, np.int32),
    }


def expected_outputs(arguments: dict[str, Any]) -> tuple[np.ndarray[Any, Any], int]:
    """The pool and the status: the contract, token by token, with Python's unbounded integers."""
    flat_in, offsets, rows = (arguments[name].tolist() for name in ("flat_in", "offsets", "req_pool_indices"))
    pool = arguments["pool_out"].copy()
    is_skipped = False
    for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        if not 0 <= row < pool.shape[0] or end < start:
            is_skipped = True
            continue
        for i in range(min(end - start, pool.shape[1])):
            if 0 <= start + i < len(flat_in):
                pool[row, i] = (flat_in[start + i] + 2**31) % 2**32 - 2**31
            else:
                is_skipped = True
    return pool, int(arguments["out_status"][0]) | (StatusBit.SCATTER_OUT_OF_RANGE if is_skipped else 0)


def assert_as_contract(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    pool, status = expected_outputs(arguments)
    launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
    np.testing.assert_array_equal(arguments["pool_out"], pool)
    assert arguments["out_status"] == status


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_golden_case(backend: ArrayBackend, name: str) -> None:
    inputs, outputs = GOLDEN.case(name)
    arguments = inputs | {"pool_out": inputs["pool_out"].copy()}
    launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
    np.testing.assert_array_equal(arguments["pool_out"], outputs["pool_out"])


def test_row_0_is_a_row_like_any_other(backend: ArrayBackend) -> None:
    arguments = make_arguments([7, 8, 9], [0, 2, 3], [0, 1], (2, 3))
    launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
    assert arguments["pool_out"].tolist() == [[7, 8, FILL], [9, FILL, FILL]]
    assert arguments["out_status"] == 0


def test_tokens_that_do_not_fit_int32_keep_their_low_bits(backend: ArrayBackend) -> None:
    arguments = make_arguments([2**31, -1, 2**32 + 5], [0, 3], [0], (1, 3))
    launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
    assert arguments["pool_out"].tolist() == [[-(2**31), -1, 5]]


def test_a_row_that_occurs_twice_holds_tokens_of_either(backend: ArrayBackend) -> None:
    arguments = make_arguments([1, 1, 2, 2], [0, 2, 4], [1, 1], (2, 2))
    if backend.name == "host-thread":
        with pytest.raises(HostKernelError, match="data race"):  # by contract
            launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
    else:
        launch_in_place(backend, launch_scatter_req_token_ids_kernel, arguments)
        assert set(arguments["pool_out"][1].tolist()) <= {1, 2}


@pytest.mark.parametrize(
    ("rows", "offsets"),
    [
        ([-1, 2], [0, 2, 4]),
        ([1, 2**63 - 1], [0, 2, 4]),
        ([1, 2], [0, 4, 2]),
        ([1, 2], [-2, 2, 4]),
        ([1, 2], [3, 5, 9]),
        ([1, 2], [-9, -4, 4]),
        ([1, 2], [-(2**63), 2**63 - 1, -(2**63)]),
        ([1, 2], [2**63 - 2, 2**63 - 1, 2**63 - 1]),
        ([1, 2], [-(2**63), -(2**63) + 2, 2**63 - 1]),
    ],
)
def test_what_is_out_of_range_is_skipped_and_reported(
    backend: ArrayBackend, rows: list[int], offsets: list[int]
) -> None:
    arguments = make_arguments([10, 11, 12, 13], offsets, rows, (3, 5))
    arguments["out_status"][0] = 64
    assert_as_contract(backend, arguments)
    assert arguments["out_status"] == 64 | StatusBit.SCATTER_OUT_OF_RANGE


# Around a block, and where blocks share a request or loop over its tokens.
@pytest.mark.parametrize(("bs", "longest"), [(1, 255), (1, 257), (1, 5000), (3, 1500), (40, 700), (1100, 600)])
def test_lengths_and_batch_sizes(backend: ArrayBackend, bs: int, longest: int) -> None:
    rng = np.random.default_rng(bs)
    lens = rng.integers(0, longest + 1, bs) if bs < 1000 else np.where(np.arange(bs) % 99, 1, longest)
    offsets = np.cumsum([0, *lens])
    flat_in = rng.integers(0, 2**31, offsets[-1])
    assert_as_contract(backend, make_arguments(flat_in, offsets, rng.permutation(bs), (bs, longest - 20)))


def test_strided_rows_of_the_pool(backend: ArrayBackend) -> None:
    pool = backend.array(np.full((6, 10), FILL, np.int32))
    arguments = backend.on_device(make_arguments([1, 2, 3], [0, 1, 3], [2, 0], (1, 1)))
    launch_scatter_req_token_ids_kernel(**arguments | {"pool_out": pool[::2, 3:6]})
    expected = np.full((6, 10), FILL)
    expected[4, 3] = 1
    expected[0, 3:5] = [2, 3]
    np.testing.assert_array_equal(backend.to_numpy(pool), expected)


small = st.integers(-2, 30)
extreme = st.sampled_from([-(2**63), -(2**31), 2**31, 2**62, 2**63 - 1])


@st.composite
def batches(draw: st.DrawFn, is_hostile: bool) -> dict[str, Any]:
    shape = draw(st.integers(0, 20)), draw(st.integers(1, 30))
    row = st.integers(-2, 22) | extreme if is_hostile else st.integers(0, 19)
    # Distinct, since requests of one row race; and so that all rows exist, at most as many as the pool has.
    rows = draw(st.lists(row, max_size=20 if is_hostile else shape[0], unique=True))
    if is_hostile:
        offset = small | extreme
        offsets = draw(st.lists(offset, min_size=len(rows) + 1, max_size=len(rows) + 1))
        flat_in = draw(st.lists(small | extreme, max_size=25))
    else:
        rows = draw(st.permutations(range(shape[0])))[: len(rows)]
        lens = draw(st.lists(st.integers(0, 40), min_size=len(rows), max_size=len(rows)))
        offsets = np.cumsum([0, *lens]).tolist()
        flat_in = draw(st.lists(small, min_size=offsets[-1], max_size=offsets[-1]))
    return make_arguments(flat_in, offsets, rows, shape)


@settings(max_examples=60, deadline=None)
@given(arguments=batches(is_hostile=False))
def test_contract_holds_for_any_batch(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    assert_as_contract(backend, arguments)
    assert arguments["out_status"] == 0


@settings(max_examples=80, deadline=None)
@given(arguments=batches(is_hostile=True))
def test_hostile_values_change_nothing_outside_the_pool(backend: ArrayBackend, arguments: dict[str, Any]) -> None:
    assert_as_contract(backend, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(("bs", "longest"), [(1, 200_000), (256, 4096), (5000, 900)])
def test_large_batches_on_the_gpu_equal_numpy(bs: int, longest: int) -> None:
    require_gpu()
    rng = np.random.default_rng(bs)
    offsets = np.cumsum([0, *rng.integers(0, longest + 1, bs)])
    flat_in = rng.integers(0, 2**31, offsets[-1])
    arguments = make_arguments(flat_in, offsets, rng.permutation(bs), (bs + 1, longest))
    assert_as_numpy(ArrayBackend("gpu"), launch_scatter_req_token_ids_kernel, arguments)
