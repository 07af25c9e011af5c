"""A launch goes on the caller's stream: what was given to that stream before is done, what follows waits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import launch_canary_verify_kernel, launch_plan_offsets_kernel, plan_offsets
from tests.helpers.buffers import HostSource
from tests.helpers.interop import (
    LibraryBackend,
    buffer_with_kv,
    converted,
    converter,
    entries,
    plan_offsets_arguments,
    to_numpy,
)
from tests.helpers.plan_entries import TABLE
from tests.helpers.plan_offsets import expected_outputs
from tests.helpers.slow import spin
from tests.helpers.verify import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

LIBRARIES = ["torch", "cupy"]


class Side:
    """A stream of torch or CuPy beside the default one."""

    def __init__(self, library: str) -> None:
        converter(library)  # skips without a GPU
        module = importlib.import_module(library)
        self.stream = module.cuda.Stream() if library == "torch" else module.cuda.Stream(non_blocking=True)
        self.handle = int(self.stream.cuda_stream if library == "torch" else self.stream.ptr)
        self.current: Callable[[], Any] = (
            (lambda: module.cuda.stream(self.stream)) if library == "torch" else (lambda: self.stream)
        )

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Verified:
    """A KV cache under the canary, all in arrays of one library."""

    def __init__(self, library: str) -> None:
        convert = converter(library)
        buffer, kv = buffer_with_kv()
        self.right = convert(kv)
        self.kv = convert(kv)
        # The source keeps the very array that the writer writes.
        buffer.sources = [HostSource(self.kv, 1, 64, 64)]
        backend = LibraryBackend(library, convert)
        self.arguments = {
            "context": buffer.on_device(backend),
            "plan": make_plan(backend, entries()),
            "check_verify_expected_token": True,
        }

    def write_slowly(self, stream: int) -> None:
        """On the current stream: wrong bytes for a while, then the right ones."""
        self.kv[...] = 0
        spin(stream)
        self.kv[...] = self.right

    def verify(self, **options: Any) -> None:
        launch_canary_verify_kernel(**self.arguments, **options)

    @property
    def num_violations(self) -> int:
        return int(to_numpy(self.arguments["context"].violation_write_index)[0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_slow_writer_on_a_side_stream_is_waited_for_1000_times(library: str) -> None:
    side = Side(library)
    with side.current():
        verified = Verified(library)
        for _ in range(1000):
            verified.write_slowly(side.handle)
            verified.verify()
        side.stream.synchronize()
        assert verified.num_violations == 0
        verified.kv[...] = 0
        verified.verify()
        side.stream.synchronize()
        assert verified.num_violations == len(entries())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["stream", "handle", "protocol"])
def test_a_stream_that_is_given_wins_over_the_current_one(library: str, kind: str) -> None:
    side = Side(library)
    given = {"stream": side.stream, "handle": side.handle, "protocol": side}[kind]
    verified = Verified(library)
    side.stream.synchronize()
    to_numpy(verified.kv)
    for _ in range(50):
        with side.current():
            verified.write_slowly(side.handle)
        verified.verify(stream=given)
        side.stream.synchronize()
    assert verified.num_violations == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_bound_launch_follows_the_current_stream(library: str) -> None:
    verified = Verified(library)
    to_numpy(verified.kv)
    bound = launch_canary_verify_kernel.bind(**verified.arguments)
    for _ in range(20):
        side = Side(library)
        with side.current():
            verified.write_slowly(side.handle)
            bound()
        side.stream.synchronize()
    assert verified.num_violations == 0


def test_mixed_inputs_wait_for_both_streams_and_both_wait_for_the_launch() -> None:
    """torch's lengths and CuPy's page table are rewritten, each on its own side stream, around every launch."""
    torch_side, cupy_side = Side("torch"), Side("cupy")
    arguments = plan_offsets_arguments()
    expected = expected_outputs(arguments)
    on_torch, on_cupy = (converted(arguments, converter(library))[0] for library in ("torch", "cupy"))
    mixed = on_torch | {name: on_cupy[name] for name in ("req_to_token", "out_write_seed_slot_indices")}
    right = {"prefix_lens": on_torch["prefix_lens"].clone(), "req_to_token": on_cupy["req_to_token"].copy()}
    to_numpy(right["prefix_lens"]), to_numpy(right["req_to_token"])
    with torch_side.current(), cupy_side.current():
        for _ in range(200):
            for name, side in (("prefix_lens", torch_side), ("req_to_token", cupy_side)):
                mixed[name][...] = 0
                spin(side.handle)
                mixed[name][...] = right[name]
            launch_plan_offsets_kernel(**mixed)
            for name in ("prefix_lens", "req_to_token"):
                mixed[name][...] = 0
            seeds = mixed["out_write_seed_slot_indices"].get()
            scratch = mixed["out_verify_offsets_scratch"].cpu().numpy()
            np.testing.assert_array_equal(seeds, expected["out_write_seed_slot_indices"])
            np.testing.assert_array_equal(scratch, expected["out_verify_offsets_scratch"])


@pytest.mark.parametrize("like", ["torch", "cupy", "jax"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_ready_on_their_librarys_current_stream(library: str, like: str) -> None:
    """Also where the launch was sent to another stream, which is busy."""
    convert = converter(library)
    converter(like)
    side = Side(library)
    inputs = [convert(np.array(values)) for values in ([2, 0, 4], [5, 9, 0], [1, 3, 4])]
    table = convert(TABLE)
    to_numpy(table)
    for _ in range(50):
        spin(side.handle)
        plan = plan_offsets(*inputs, table, like=like, stream=side.stream)
        assert to_numpy(plan.verify_offsets).tolist() == [0, 5, 5, 5]
        assert to_numpy(plan.write_offsets).tolist() == [0, 1, 1, 5]


def test_mixed_inputs_of_a_high_level_call() -> None:
    torch_side, cupy_side = Side("torch"), Side("cupy")
    on_torch, on_cupy = converter("torch"), converter("cupy")
    rows, prefix_lens, extend = (on_torch(np.array(values)) for values in ([2, 0, 4], [5, 9, 0], [1, 3, 4]))
    table, right = on_cupy(TABLE), on_cupy(TABLE)
    to_numpy(right)
    with torch_side.current(), cupy_side.current():
        for _ in range(100):
            table[...] = 0
            spin(cupy_side.handle)
            table[...] = right
            plan = plan_offsets(rows, prefix_lens, extend, table)
            table[...] = 0
            assert plan.write_seed_slot_indices.tolist() == [11, -1, -1]


def test_jax_arrays_are_used_only_while_they_live() -> None:
    """JAX may reuse the memory of an array as soon as it is gone: the call returns when it was read."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    convert = converter("jax")
    step = jax.jit(lambda array, i: array + i)
    zeros = [convert(np.zeros(3, np.int32)) for _ in range(3)]
    for _ in range(200):
        inputs = [step(zero, value) for zero, value in zip(zeros, (2, 5, 1), strict=True)]
        plan = plan_offsets(*inputs, convert(TABLE))
        del inputs
        garbage = [step(zero, 4) for zero in zeros]
        assert to_numpy(plan.write_seed_slot_indices).tolist() == [11] * 3
        del garbage
