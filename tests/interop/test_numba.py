"""numba: compiled functions make and use NumPy arrays; device arrays go in by `__cuda_array_interface__`."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import launch_plan_offsets_kernel, plan_offsets
from cupy_kvcanary.arrays import view_array
from tests.helpers.interop import LAUNCHES, converted, converter, plan_offsets_arguments, to_numpy
from tests.helpers.plan_entries import TABLE
from tests.helpers.plan_offsets import expected_outputs
from tests.helpers.slow import spin

numba = pytest.importorskip("numba", reason="numba is not installed")


@numba.njit
def lens(n, step):  # type: ignore[no-untyped-def]
    made = np.empty(n, np.int64)
    for i in range(n):
        made[i] = i * step
    return made


@numba.njit
def total(offsets):  # type: ignore[no-untyped-def]
    return offsets[-1]


def test_compiled_functions_on_the_cpu() -> None:
    plan = plan_offsets(lens(3, 2), lens(3, 4), lens(3, 1), TABLE)
    assert total(plan.verify_offsets) == plan.totals().verify_entries == 4 + 8
    assert total(plan.write_offsets) == 1 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHES)
def test_device_arrays_are_inputs_and_outputs_of_every_launcher(name: str) -> None:
    launcher, make = LAUNCHES[name]
    arguments, arrays = converted(make(), converter("numba"))
    expected_arguments, expected = converted(make(), np.copy)
    launcher(**arguments)
    launcher(**expected_arguments)
    for array, value in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(array), value)


@pytest.mark.gpu
def test_results_are_cupys() -> None:
    convert = converter("numba")
    import cupy

    columns = (convert(np.array(values)) for values in ([2, 0, 4], [5, 9, 0], [1, 3, 4]))
    plan = plan_offsets(*columns, convert(TABLE))
    assert isinstance(plan.write_offsets, cupy.ndarray)
    assert numba.cuda.as_cuda_array(plan.write_offsets).copy_to_host().tolist() == [0, 1, 1, 5]


@pytest.mark.gpu
def test_the_launch_waits_for_the_stream_that_an_array_names() -> None:
    """A slow writer on numba's stream, which is no library's current one; that stream waits for the launch, too."""
    convert = converter("numba")
    import cupy

    stream = numba.cuda.stream()
    arguments = plan_offsets_arguments()
    on_device, _ = converted(arguments, convert)
    expected = expected_outputs(arguments)
    right, wrong = arguments["prefix_lens"], np.zeros_like(arguments["prefix_lens"])
    prefix_lens = numba.cuda.to_device(wrong, stream=stream)
    assert view_array("a", prefix_lens).stream == int(stream)
    for _ in range(100):
        prefix_lens.copy_to_device(wrong, stream=stream)
        spin(int(stream))
        prefix_lens.copy_to_device(right, stream=stream)
        with cupy.cuda.Stream(non_blocking=True):
            launch_plan_offsets_kernel(**on_device | {"prefix_lens": prefix_lens})
        stream.synchronize()
        scratch = to_numpy(on_device["out_verify_offsets_scratch"])
        np.testing.assert_array_equal(scratch, expected["out_verify_offsets_scratch"])
