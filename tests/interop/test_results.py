"""What high-level calls return: arrays of the inputs' library or of the one that is asked for, in the same memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import OffsetsPlan, plan_offsets
from cupy_kvcanary.arrays import view_array
from cupy_kvcanary.launch import BACKENDS
from cupy_kvcanary.libraries import library_of
from tests.helpers.backends import require_gpu
from tests.helpers.interop import ON_GPU, PLACES, converter, to_numpy
from tests.helpers.plan_entries import TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = ("verify_offsets", "write_offsets", "write_seed_slot_indices", "verify_num_valid", "status")
EXPECTED = ([0, 5, 5, 5], [0, 1, 1, 5], [11, -1, -1], [5], [0])


def plan(convert: Callable[[Any], Any], **options: Any) -> OffsetsPlan:
    columns = (np.array(values) for values in ([2, 0, 4], [5, 9, 0], [1, 3, 4]))
    return plan_offsets(*map(convert, columns), convert(TABLE), **options)


def check(result: OffsetsPlan, library: str) -> None:
    for field, values in zip(FIELDS, EXPECTED, strict=True):
        array = getattr(result, field)
        assert library_of(array) == library
        assert to_numpy(array).tolist() == values
        assert view_array("a", array).dtype == ("int64" if len(values) > 1 else "int32")


@pytest.mark.parametrize(("library", "device"), PLACES)
def test_results_are_of_the_inputs_library(library: str, device: str) -> None:
    result = plan(converter(library, device))
    check(result, library)
    assert result.totals() == (3, 5, 5, True, 0)
    values = "verify_entries=5, write_entries=5, verify_enabled=True" if device == "cpu" else "on CUDA: see totals()"
    assert f"OffsetsPlan(num_requests=3, {values}" in repr(result)
    assert "<tr><td>0</td><td>[0, 5)</td><td>[0, 1)</td><td>11</td></tr>" in result._repr_html_()


@pytest.mark.parametrize("like", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("by_name", [True, False])
def test_like_asks_for_a_library_on_the_cpu(library: str, like: str, by_name: bool) -> None:
    wanted = converter(like, "cpu")
    check(plan(converter(library, "cpu"), like=like if by_name else wanted(np.zeros(1))), like)


@pytest.mark.gpu
@pytest.mark.parametrize("like", ["cupy", "torch", "jax"])
@pytest.mark.parametrize(("library", "device"), ON_GPU)
def test_like_asks_for_a_library_on_the_gpu(library: str, device: str, like: str) -> None:
    converter(like, device)
    check(plan(converter(library, device), like=like), like)


def test_lists_give_numpy_arrays() -> None:
    check(plan_offsets([2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE), "numpy")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    check(plan_offsets([2, 0, 4], [5, 9, 0], torch.tensor([1, 3, 4]), torch.from_numpy(TABLE)), "numpy")


@pytest.mark.parametrize(("library", "device"), PLACES)
def test_results_share_the_memory_that_was_computed_into(
    library: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, spans = BACKENDS[device], []
    allocate_zeros = backend.allocate_zeros

    def recorded(*args: Any, **named: Any) -> Any:
        array = allocate_zeros(*args, **named)
        spans.append(view_array("a", array).span)
        return array

    monkeypatch.setattr(backend, "allocate_zeros", recorded)
    result = plan(converter(library, device))
    for field in FIELDS:
        first, end = view_array(field, getattr(result, field)).span
        assert first % 64 == 0
        assert any(start <= first < end <= stop for start, stop in spans)


@pytest.mark.parametrize(("library", "device"), PLACES)
def test_an_empty_batch(library: str, device: str) -> None:
    convert = converter(library, device)
    empty = convert(np.zeros(0, np.int64))
    result = plan_offsets(empty, empty, empty, convert(TABLE))
    assert result.totals() == (0, 0, 0, True, 0)
    assert library_of(result.write_seed_slot_indices) == library
    assert len(result.write_seed_slot_indices) == 0


def test_large_offsets_stay_64_bits_wide_in_jax() -> None:
    """Outside of its 64-bit mode too, where JAX narrows what it computes by itself."""
    convert = converter("jax", "cpu")
    lens = [2**31 - 1, 2**31 - 1]
    result = plan_offsets(*(convert(np.array(values)) for values in ([2, 4], [1, 1], lens)), convert(TABLE))
    assert to_numpy(result.write_offsets).tolist() == [0, 2**31 - 1, 2**32 - 2]
    assert result.totals().write_entries == 2**32 - 2


@pytest.mark.gpu
def test_results_are_taken_by_any_importer_on_the_gpu() -> None:
    require_gpu()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    offsets = plan(converter("cupy")).write_offsets
    assert offsets.__cuda_array_interface__["data"][0] == view_array("a", offsets).pointer
    assert torch.from_dlpack(offsets).data_ptr() == view_array("a", offsets).pointer
