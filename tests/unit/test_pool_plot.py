"""The picture of a pool: what is drawn where, at any size."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import KvCanaryError
from cupy_kvcanary.pool_plot import pool_figure


def legend(owners: np.ndarray, bad_slots: list[int], **options: int) -> list[str]:
    (axes,) = pool_figure(owners, bad_slots, **options).axes
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_slots_are_drawn_from_the_top_left_in_rows_of_whole_pages() -> None:
    owners = np.array([-1, -1, -1, -1, 7, 7, 7, -1, 3, 3, 3, 3])
    (axes,) = pool_figure(owners, [5], page_size=4).axes
    (image,) = axes.images
    assert image.get_array().tolist() == [[3, 3, 3, 3], [1, 1, 1, 3], [0, 0, 0, 0]]
    (marks,) = axes.collections
    assert marks.get_offsets().tolist() == [[1, 1]]
    assert legend(owners, [5], page_size=4) == ["bad slots (1)", "row 3", "row 7", "free"]
    assert axes.get_xlabel() == "12 slots in pages of 4; one cell is 1 slot"


def test_a_large_pool_has_the_owner_of_most_slots_in_a_cell() -> None:
    owners = np.repeat(np.arange(10_000) % 5, 16)
    owners[16:25] = -1  # 9 of the 16 slots of page 1
    (axes,) = pool_figure(owners, [31, 30], page_size=16).axes
    cells = axes.images[0].get_array().ravel()
    assert len(cells) < 8192
    assert axes.get_xlabel() == "160,000 slots in pages of 16; one cell is 32 slots"
    (axes,) = pool_figure(owners[:16_000], [31, 30], page_size=16).axes
    cells = axes.images[0].get_array().ravel()
    assert cells[:4].tolist() == [0, 6, 2, 3]
    assert axes.collections[0].get_offsets().tolist() == [[1, 0]]


def test_rows_with_bad_slots_are_named_first() -> None:
    owners = np.repeat(np.arange(30), 10)
    owners[:100] = 0
    names = legend(owners, [291, 292, 285])
    assert len(names) == 13
    assert {"row 0", "row 28", "row 29", "other requests", "bad slots (3)"} <= set(names)


def test_without_bad_slots_nothing_is_marked() -> None:
    assert legend(np.array([-1, 1]), []) == ["row 1", "free"]
    assert legend(np.array([-1, 1]), [-4, 2, 10**12]) == ["row 1", "free"]


@settings(max_examples=25, deadline=None)
@given(
    num_slots=st.integers(0, 3000) | st.just(10**6),
    page_size=st.sampled_from([1, 3, 16, 512]),
    bad=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3000), max_size=5),
)
def test_any_pool_is_drawn(num_slots: int, page_size: int, bad: list[int]) -> None:
    owners = np.random.default_rng(num_slots).integers(-1, 40, num_slots)
    file = io.BytesIO()
    pool_figure(owners, bad, page_size=page_size).savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_a_page_has_slots() -> None:
    with pytest.raises(KvCanaryError, match="page_size must be positive, got 0"):
        pool_figure(np.zeros(4), [], page_size=0)
