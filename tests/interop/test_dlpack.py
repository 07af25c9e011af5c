"""Any other producer: arrays that have nothing but DLPack."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, launch_plan_offsets_kernel, plan_offsets
from cupy_kvcanary.libraries import library_of
from tests.helpers import dlpack
from tests.helpers.interop import LAUNCHES, converted, converter, plan_offsets_arguments, to_numpy
from tests.helpers.plan_entries import TABLE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAUNCHES)
def test_inputs_and_outputs_of_every_launcher(name: str, device: str) -> None:
    launcher, make = LAUNCHES[name]
    arguments, arrays = converted(make(), converter("dlpack", device))
    expected_arguments, expected = converted(make(), np.copy)
    for _ in range(2):
        launcher(**arguments)
        launcher(**expected_arguments)
    for array, value in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(array), value)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_those_of_the_devices_backend(device: str) -> None:
    convert = converter("dlpack", device)
    plan = plan_offsets(*(convert(np.array(values)) for values in ([2, 0, 4], [5, 9, 0], [1, 3, 4])), convert(TABLE))
    assert library_of(plan.write_offsets) == ("numpy" if device == "cpu" else "cupy")
    assert to_numpy(plan.write_offsets).tolist() == [0, 1, 1, 5]


@pytest.mark.parametrize("device", DEVICES)
def test_a_read_only_output_is_refused_by_name(device: str) -> None:
    arguments, _ = converted(plan_offsets_arguments(), converter("dlpack", device))
    read_only = dataclasses.replace(arguments["out_write_offsets"], flags=1)
    before = to_numpy(read_only).copy()
    with pytest.raises(KvCanaryError, match="out_write_offsets must be writable, got a read-only array"):
        launch_plan_offsets_kernel(**arguments | {"out_write_offsets": read_only})
    np.testing.assert_array_equal(to_numpy(read_only), before)


@pytest.mark.gpu
def test_managed_memory() -> None:
    convert = converter("cupy")
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc):
        arguments, _ = converted(
            plan_offsets_arguments(), lambda array: dlpack.exported(convert(array), (dlpack.CUDA_MANAGED, 0))
        )
    launch_plan_offsets_kernel(**arguments)
    assert to_numpy(arguments["out_write_offsets"]).tolist() == [0, 1, 1, 5]
