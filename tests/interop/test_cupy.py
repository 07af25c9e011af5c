"""CuPy arrays: seen by their attributes, in device and in managed memory, as inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, VerifyPlan, WritePlan, launch_plan_offsets_kernel, plan_offsets
from cupy_kvcanary.arrays import Device, view_array
from tests.helpers.interop import LAUNCHES, converted, converter, plan_offsets_arguments, to_numpy
from tests.helpers.plan_entries import TABLE

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def test_a_view_is_the_arrays_memory() -> None:
    array = converter("cupy")(np.arange(24, dtype=np.int64).reshape(4, 6))[1:, ::2]
    view = view_array("a", array)
    assert (view.pointer, view.shape, view.strides) == (array.data.ptr, (3, 3), (48, 16))
    assert (view.dtype, view.device, view.read_only) == ("int64", Device("cuda", 0), False)


@pytest.mark.parametrize("name", LAUNCHES)
def test_inputs_and_outputs_of_every_launcher(name: str) -> None:
    launcher, make = LAUNCHES[name]
    arguments, arrays = converted(make(), converter("cupy"))
    expected_arguments, expected = converted(make(), np.copy)
    for _ in range(2):  # by a full check, then by a template
        launcher(**arguments)
        launcher(**expected_arguments)
    for array, value in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(array), value)


def test_managed_memory() -> None:
    convert = converter("cupy")
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
        arguments, _ = converted(plan_offsets_arguments(), convert)
    launch_plan_offsets_kernel(**arguments)
    assert to_numpy(arguments["out_write_offsets"]).tolist() == [0, 1, 1, 5]


def test_strided_arrays_are_right_or_refused() -> None:
    convert = converter("cupy")
    ones, table = convert(np.ones(4, np.int64)), convert(np.arange(40, dtype=np.int32).reshape(4, 10))
    with pytest.raises(KvCanaryError, match="prefix_lens must be contiguous"):
        plan_offsets(ones[:2], ones[::2], ones[:2], table)
    with pytest.raises(KvCanaryError, match="req_to_token must have contiguous rows"):
        plan_offsets(ones, ones, ones, table.T)
    assert plan_offsets(ones, ones * 2, ones, table[:, 3:8]).write_seed_slot_indices.tolist() == [14] * 4


def test_misaligned_arrays_are_refused() -> None:
    memory = converter("cupy")(np.zeros(24, np.uint8))
    with pytest.raises(KvCanaryError, match="prefix_lens must start at a multiple of 8 bytes"):
        plan_offsets(memory[:8].view(np.int64), memory[4:12].view(np.int64), memory[:8].view(np.int64), TABLE)


def test_plans_are_allocated_on_the_gpu() -> None:
    converter("cupy")
    for plan in (VerifyPlan.allocate(8, "cuda"), WritePlan.allocate(4, cupy.cuda.Device(0))):
        for array in vars(plan).values():
            assert isinstance(array, cupy.ndarray)
