"""Arrays on a device that is not the current one: the launch goes there, and the current device stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, VerifyPlan, launch_plan_offsets_kernel, plan_offsets, warmup
from cupy_kvcanary.arrays import Device, view_array
from tests.helpers.backends import require_gpu
from tests.helpers.interop import LAUNCHES, converted, to_numpy
from tests.helpers.plan_entries import TABLE

pytestmark = pytest.mark.gpu

LIBRARIES = ["torch", "cupy"]


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    require_gpu()
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("fewer than two CUDA devices")


def on_device(library: str, index: int) -> Any:
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    if library == "torch":
        return lambda array: module.from_numpy(array.copy()).to(f"cuda:{index}")

    def convert(array: np.ndarray[Any, Any]) -> Any:
        with module.cuda.Device(index):
            return module.array(array)

    return convert


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_launcher_on_each_device(name: str, library: str, current: int) -> None:
    import cupy

    launcher, make = LAUNCHES[name]
    expected_arguments, expected = converted(make(), np.copy)
    launched = [converted(make(), on_device(library, index)) for index in (0, 1)]
    bound = [launcher.bind(**arguments) for arguments, _ in launched]
    for _ in range(2):
        launcher(**expected_arguments)
    with cupy.cuda.Device(current):
        for (arguments, _), again in zip(launched, bound, strict=True):
            launcher(**arguments)
            again()
            assert cupy.cuda.runtime.getDevice() == current
    for _, arrays in launched:
        for array, value in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(to_numpy(array), value)


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_on_the_inputs_device(library: str) -> None:
    import cupy

    convert = on_device(library, 1)
    plan = plan_offsets(*(convert(np.array(values)) for values in ([2], [5], [1])), convert(TABLE))
    assert view_array("a", plan.write_offsets).device == Device("cuda", 1)
    assert plan.totals().verify_entries == 5
    assert cupy.cuda.runtime.getDevice() == 0


def test_numbas_arrays_are_where_the_driver_says() -> None:
    """Its interface does not name the device."""
    cuda = pytest.importorskip("numba.cuda", reason="numba is not installed")
    with cuda.gpus[1]:
        array = cuda.to_device(np.arange(3))
        assert view_array("a", array).device == Device("cuda", 1)


def test_arrays_of_two_devices_are_refused() -> None:
    arguments, _ = converted(LAUNCHES["plan_offsets"][1](), on_device("cupy", 0))
    other = on_device("cupy", 1)(np.zeros(3, np.int64))
    with pytest.raises(KvCanaryError, match="prefix_lens must be on req_pool_indices's device cuda:0, got cuda:1"):
        launch_plan_offsets_kernel(**arguments | {"prefix_lens": other})


def test_warmup_and_plans_take_the_device() -> None:
    warmup("cuda:1")
    assert view_array("a", VerifyPlan.allocate(4, "cuda:1").enable).device == Device("cuda", 1)
