"""Block tables and page lists in the planners: as the same pages written out as a table of slots; hostile values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import BlockTable, KvCanaryError, PageList, StatusBit, launch_canary_plan_kernels, plan_offsets
from tests.helpers.golden import FILL
from tests.helpers.launching import arrays_of, assert_as_numpy, launch_in_place, map_arrays
from tests.helpers.plan_entries import make_plan_arguments

if TYPE_CHECKING:
    from tests.helpers.backends import ArrayBackend

# Pages of each request row: three pages, one, none, four with page 0 and page 9 among them, two with a hole.
PAGES = [[3, 7, 1], [5], [], [2, 0, 9, 4], [6, -1]]
LAST_PAGE_LENS = [1, 3, 0, 2, 3]
PAGE_SIZES = [1, 3, 16]


def block_table(page_size: int, null_page: int | None, dtype: Any, pages: list[list[int]] = PAGES) -> BlockTable:
    table = np.full((len(pages), max(map(len, pages))), 8, dtype)
    for row, row_pages in enumerate(pages):
        table[row, : len(row_pages)] = row_pages
    return BlockTable(block_table=table, page_size=page_size, null_page=null_page)


def page_list(page_size: int, null_page: int | None, dtype: Any, pages: list[list[int]] = PAGES) -> PageList:
    return PageList(
        indptr=np.cumsum([0, *map(len, pages)]).astype(dtype),
        indices=np.array([page for row in pages for page in row], dtype),
        last_page_len=np.minimum(LAST_PAGE_LENS, page_size).astype(dtype),
        page_size=page_size,
        null_page=null_page,
    )


def seq_lens(pages: list[list[int]], page_size: int) -> list[int]:
    return [
        (len(row) - 1) * page_size + min(last, page_size) if row else 0
        for row, last in zip(pages, LAST_PAGE_LENS, strict=True)
    ]


def as_slots(pages: list[list[int]], page_size: int, null_page: int | None) -> np.ndarray[Any, Any]:
    """A table of slots with the same requests, each one row further down: row 0 is a padding row there."""
    table = np.zeros((len(pages) + 1, max(map(len, pages)) * page_size), np.int32)
    for row, row_pages in enumerate(pages):
        for i, page in enumerate(row_pages):
            hole = -1 if null_page is None else 0
            for position in range(i * page_size, (i + 1) * page_size):
                is_hole = page < 0 or page == null_page
                table[row + 1, position] = hole if is_hole else page * page_size + position % page_size
    return table


def outputs_of(arguments: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    plans = (arguments["verify_plan_out"], arguments["write_plan_out"], {"out_status": arguments["out_status"]})
    return {name: array for plan in plans for name, array in arrays_of(plan)}


def assert_as_slots(
    backend: ArrayBackend, paged: BlockTable | PageList, page_size: int, null_page: int | None, window: int
) -> None:
    rows = np.array([3, 0, 1, 4, 2, 0, 3])
    lens = np.array(seq_lens(PAGES, page_size))[rows] - [0, 0, 1, 0, 0, 1, 2]
    slot_table = as_slots(PAGES, page_size, null_page)
    options: dict[str, Any] = {
        "window": window,
        "mapping": np.arange(500)[::-1] if window else None,
        "tokens": np.arange(6 * 9).reshape(6, 9),
        "valid_lens": [9] * 7,
        "capacity": 300,
    }
    expected = make_plan_arguments(rows + 1, lens, [1] * 7, slot_table, **options)
    launch_in_place(backend, launch_canary_plan_kernels, expected)
    # Expected tokens go by request row, too.
    options["tokens"] = options["tokens"][1:]
    arguments = make_plan_arguments(rows, lens, [1] * 7, paged, **options)
    launch_in_place(backend, launch_canary_plan_kernels, arguments)
    for name, value in outputs_of(expected).items():
        np.testing.assert_array_equal(outputs_of(arguments)[name], value, err_msg=name)
    assert arguments["out_status"] == 0
    assert arguments["verify_plan_out"].verify_num_valid > 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("null_page", [0, None, 9])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("form", [block_table, page_list])
def test_pages_are_planned_as_the_slots_that_they_stand_for(
    backend: ArrayBackend, form: Any, page_size: int, null_page: int | None, dtype: Any
) -> None:
    for window in (0, 4):
        assert_as_slots(backend, form(page_size, null_page, dtype), page_size, null_page, window)


def test_rows_of_a_block_table_may_be_strided(backend: ArrayBackend) -> None:
    wide = np.full((10, 12), 7_000_000, np.int32)
    wide[::2, 3:7] = block_table(3, 0, np.int32).block_table
    arguments = map_arrays(make_plan_arguments([3, 0], [10, 7], [1, 1], [[0]]), backend.array)
    arguments["req_to_token"] = BlockTable(block_table=backend.array(wide)[::2, 3:7], page_size=3)
    launch_canary_plan_kernels(**arguments)
    slot_table = as_slots(PAGES, 3, 0)
    slots = backend.to_numpy(arguments["verify_plan_out"].verify_slot_indices)
    assert slots[:18].tolist() == [*slot_table[4, :10], *slot_table[1, :7], FILL]


@pytest.mark.parametrize("form", [block_table, page_list])
def test_row_0_is_a_row_like_any_other(backend: ArrayBackend, form: Any) -> None:
    arguments = make_plan_arguments([0], [2], [1], form(3, 0, np.int64))
    launch_in_place(backend, launch_canary_plan_kernels, arguments)
    assert arguments["verify_plan_out"].verify_slot_indices[:3].tolist() == [9, 10, FILL]
    assert arguments["write_plan_out"].write_seed_slot_indices == 10


@pytest.mark.parametrize("form", [block_table, page_list])
@pytest.mark.parametrize("row", [-1, 5, 2**63 - 1])
def test_rows_outside_are_padding(backend: ArrayBackend, form: Any, row: int) -> None:
    arguments = make_plan_arguments([row, 1], [2, 1], [1, 1], form(3, 0, np.int64))
    launch_in_place(backend, launch_canary_plan_kernels, arguments)
    assert arguments["verify_plan_out"].verify_num_valid == 1
    assert arguments["out_status"] == StatusBit.REQUEST_ROW_OUT_OF_RANGE


@pytest.mark.parametrize(("form", "longest"), [(block_table, 12), (page_list, 11)])
def test_a_prefix_ends_with_its_pages(backend: ArrayBackend, form: Any, longest: int) -> None:
    arguments = make_plan_arguments([3], [50], [1], form(3, 0, np.int64))
    launch_in_place(backend, launch_canary_plan_kernels, arguments)
    plan = arguments["verify_plan_out"]
    assert plan.verify_num_valid == longest
    assert plan.verify_slot_indices[: longest + 1].tolist() == [*as_slots(PAGES, 3, 0)[4, :longest], FILL]
    assert arguments["out_status"] == StatusBit.PREFIX_LEN_OUT_OF_RANGE


def test_the_allocating_planner_takes_pages(backend: ArrayBackend) -> None:
    rows, lens, ones = (backend.array(np.array(values)) for values in ([0, 3], [7, 10], [1, 1]))
    for form in (block_table, page_list):
        plan = plan_offsets(rows, lens, ones, map_arrays(form(3, 0, np.int32), backend.array))
        assert backend.to_numpy(plan.verify_offsets).tolist() == [0, 7, 17]
        assert backend.to_numpy(plan.write_seed_slot_indices).tolist() == [3, 12]


def test_page_tables_without_rows_or_pages(backend: ArrayBackend) -> None:
    empty = np.zeros(0, np.int64)
    for paged in (
        BlockTable(block_table=np.zeros((0, 4), np.int32), page_size=2),
        PageList(indptr=np.zeros(1, np.int64), indices=empty, last_page_len=empty, page_size=2),
        PageList(indptr=np.array([0, 0]), indices=empty, last_page_len=np.array([2]), page_size=2),
    ):
        assert_as_numpy(backend, launch_canary_plan_kernels, make_plan_arguments([0, 1], [3, 3], [1, 1], paged))


# -- hostile values -----------------------------------------------------------------------------------------------

small = st.integers(-3, 12)
extreme = st.sampled_from([-(2**63), -(2**31), 2**31, 2**32, 2**62, 2**63 - 1])


def arrays(draw: st.DrawFn, size: int, dtype: type) -> np.ndarray[Any, Any]:
    values = draw(st.lists(small | extreme, min_size=size, max_size=size))
    return np.array(values, np.int64).astype(dtype)  # extreme values wrap to others where they do not fit


@st.composite
def paged_tables(draw: st.DrawFn) -> BlockTable | PageList:
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    rows = draw(st.integers(0, 5))
    page_size = draw(st.sampled_from([*PAGE_SIZES, 2**20]))
    null_page = draw(st.sampled_from([None, 0, 3, 2**62]))
    if draw(st.booleans()):
        width = draw(st.integers(1, 5))
        table = arrays(draw, rows * width, dtype).reshape(rows, width)
        return BlockTable(block_table=table, page_size=page_size, null_page=null_page)
    return PageList(
        indptr=arrays(draw, rows + 1, dtype),
        indices=arrays(draw, draw(st.integers(0, 10)), dtype),
        last_page_len=arrays(draw, rows, dtype),
        page_size=page_size,
        null_page=null_page,
    )


@settings(max_examples=120, deadline=None)
@given(paged=paged_tables(), data=st.data())
def test_hostile_values_touch_nothing_outside_the_arrays(
    backend: ArrayBackend, paged: BlockTable | PageList, data: st.DataObject
) -> None:
    """And the kernels agree with NumPy, whose indices would raise."""
    bs = data.draw(st.integers(0, 8))
    column = st.lists(st.integers(-2, 20) | extreme, min_size=bs, max_size=bs)
    mapping = data.draw(st.none() | st.lists(small | extreme, min_size=1, max_size=20))
    arguments = make_plan_arguments(
        data.draw(column),
        data.draw(column),
        data.draw(column),
        paged,
        mapping=mapping,
        window=data.draw(st.integers(0, 20)),
        capacity=data.draw(st.integers(0, 200)),
    )
    assert_as_numpy(backend, launch_canary_plan_kernels, arguments)


# -- errors -------------------------------------------------------------------------------------------------------

BLOCKS = block_table(3, 0, np.int32)
LIST = page_list(3, 0, np.int32)
WORDS = np.zeros((5, 8), np.int32)

ERRORS: list[tuple[str, BlockTable | PageList]] = [
    *(
        (message, type(table)(**{**vars(table), **changed}))
        for table in (BLOCKS, LIST)
        for message, changed in [
            ("page_size must be an int, got 3.0", {"page_size": 3.0}),
            ("page_size must be positive, got 0", {"page_size": 0}),
            ("null_page must be an int, got True", {"null_page": True}),
            ("null_page must be non-negative, got -1", {"null_page": -1}),
        ]
    ),
    *(
        (message, BlockTable(block_table=table, page_size=page_size))
        for message, table, page_size in [
            ("block_table must be an array (NumPy, DLPack or __cuda_array_interface__), got list", [[1]], 1),
            ("block_table must be 2-D, got shape (40,)", WORDS.ravel(), 1),
            ("block_table must have contiguous rows, got strides (32, 8)", WORDS[:, ::2], 1),
            ("block_table must have dtype int32 or int64, got uint32", WORDS.astype(np.uint32), 1),
            ("block_table_stride0 must be positive, got -8", WORDS[::-1], 1),
            ("block_table_stride0 must be positive, got 0", np.zeros((5, 0), np.int32), 1),
            ("positions of block_table must be at most 2147483647, got 2147483648", WORDS, 2**28),
        ]
    ),
    *(
        (message, PageList(**{**vars(LIST), **changed}))
        for message, changed in [
            ("indices must be an array (NumPy, DLPack or __cuda_array_interface__), got NoneType", {"indices": None}),
            ("indptr must be 1-D, got shape (5, 8)", {"indptr": WORDS}),
            ("indices must be contiguous", {"indices": WORDS[:, 0]}),
            ("last_page_len must have dtype int32 or int64, got float64", {"last_page_len": np.zeros(5)}),
            ("indptr length must be >= 1, got 0", {"indptr": np.zeros(0, np.int32)}),
            ("last_page_len length must be 5, got 4", {"last_page_len": np.zeros(4, np.int32)}),
            ("positions of indices must be at most 2147483647, got 10737418240", {"page_size": 2**30}),
        ]
    ),
]


@pytest.mark.parametrize(("message", "paged"), ERRORS, ids=[message for message, _ in ERRORS])
def test_a_bad_page_table_is_refused_with_outputs_untouched(message: str, paged: BlockTable | PageList) -> None:
    arguments = make_plan_arguments([1], [1], [1], paged)
    before = {name: array.copy() for name, array in outputs_of(arguments).items()}
    with pytest.raises(KvCanaryError) as caught:
        launch_canary_plan_kernels(**arguments)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    for name, array in outputs_of(arguments).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    with pytest.raises(KvCanaryError) as caught:
        plan_offsets([1], [1], [1], paged)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"


def test_pages_must_be_on_the_other_arrays_device() -> None:
    class ClaimsCuda:
        __cuda_array_interface__ = WORDS.__array_interface__

    arguments = make_plan_arguments([1], [1], [1], BlockTable(block_table=ClaimsCuda(), page_size=1))
    with pytest.raises(KvCanaryError, match="req_to_token must be on req_pool_indices's device cpu, got cuda:0"):
        launch_canary_plan_kernels(**arguments)


def test_pages_must_not_be_an_output() -> None:
    arguments = make_plan_arguments([1], [1], [1], LIST)
    pages = PageList(**{**vars(LIST), "indices": arguments["verify_plan_out"].verify_slot_indices})
    with pytest.raises(KvCanaryError, match="out_verify_slot_indices must not overlap req_to_token"):
        launch_canary_plan_kernels(**arguments | {"req_to_token": pages})
