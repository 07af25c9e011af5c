"""Several threads launch at once, through the same launchers and kernels."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import launch_plan_offsets_kernel, plan_offsets
from tests.helpers.interop import LAUNCHES, converted, converter, to_numpy
from tests.helpers.plan_offsets import OUTPUTS, expected_outputs, make_arguments

THREADS, ROUNDS = 4, 100
PLACES = [("numpy", "cpu"), ("torch", "cpu")] + [
    pytest.param(library, "cuda", marks=pytest.mark.gpu) for library in ("cupy", "torch")
]


def own_stream(library: str, device: str) -> Any:
    """Makes a stream of the thread's own the current one, on a GPU."""
    if device == "cpu":
        return contextlib.nullcontext()
    module = pytest.importorskip(library)
    return module.cuda.Stream(non_blocking=True) if library == "cupy" else module.cuda.stream(module.cuda.Stream())


def batch(seed: int) -> dict[str, Any]:
    """The same form of call for each seed, with other values."""
    rng = np.random.default_rng(seed)
    columns = (rng.integers(0, high, 50) for high in (9, 31, 3))
    return make_arguments(*columns, rng.integers(1, 90, (9, 30)))


def run_in_threads(work: Any) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(work, seed) for seed in range(THREADS)]:
            done.result()


@pytest.mark.parametrize(("library", "device"), PLACES)
def test_launches_of_one_form_do_not_mix_up_their_arrays(library: str, device: str) -> None:
    convert = converter(library, device)

    def work(seed: int) -> None:
        arguments = batch(seed)
        expected = expected_outputs(arguments)
        with own_stream(library, device):
            on_device, _ = converted(arguments, convert)
            for _ in range(ROUNDS):
                launch_plan_offsets_kernel(**on_device)
                for name in OUTPUTS:
                    np.testing.assert_array_equal(to_numpy(on_device[name]), expected[name], err_msg=name)

    run_in_threads(work)


@pytest.mark.parametrize(("library", "device"), PLACES)
def test_high_level_calls(library: str, device: str) -> None:
    convert = converter(library, device)

    def work(seed: int) -> None:
        arguments = batch(seed)
        names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token")
        expected = expected_outputs(arguments)["out_write_offsets"]
        with own_stream(library, device):
            inputs = [convert(arguments[name]) for name in names]
            for _ in range(ROUNDS):
                np.testing.assert_array_equal(to_numpy(plan_offsets(*inputs).write_offsets), expected)

    run_in_threads(work)


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize(("library", "device"), PLACES)
def test_every_launcher_called_and_bound(library: str, device: str, name: str) -> None:
    """Each thread ends with what one thread alone computes on NumPy arrays."""
    launcher, make = LAUNCHES[name]
    convert = converter(library, device)
    alone, expected = converted(make(), np.copy)
    for _ in range(2 * 20):
        launcher(**alone)

    def work(seed: int) -> None:
        with own_stream(library, device):
            arguments, arrays = converted(make(), convert)
            bound = launcher.bind(**arguments)
            for _ in range(20):
                launcher(**arguments)
                bound()
            for array, value in zip(arrays, expected, strict=True):
                np.testing.assert_array_equal(to_numpy(array), value)

    run_in_threads(work)
