"""A canary on the GPU: captured with the engine's forward pass, beside its streams, without waiting or allocating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import Batch, FailReason
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.engine import Engine
from tests.helpers.interop import converter
from tests.interop.test_capture import without_allocations

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

DECODE = {1: [90], 2: [91], 3: [92]}


@pytest.fixture
def engine() -> Engine:
    require_gpu()
    served = Engine(ArrayBackend("gpu"))
    served.serve()
    return served


def static_batch(engine: Engine, library: str) -> tuple[dict[str, Any], Batch, Callable[[], None]]:
    """A decode step in static buffers of a library, and what brings the next step into them."""
    convert = converter(library)
    fields = {name: convert(engine.backend.to_numpy(array)) for name, array in engine.admit(DECODE).items()}

    def advance() -> None:
        for name, values in engine.admit(DECODE).items():
            if library == "torch":
                fields[name].copy_(fields[name].new_tensor(engine.backend.to_numpy(values)))
            else:
                fields[name][...] = values

    return fields, Batch(**fields), advance


def capture(library: str, step: Callable[[], None]) -> Callable[[], None]:
    if library == "torch":
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), without_allocations():
            step()
        return graph.replay  # type: ignore[no-any-return]
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with without_allocations():
            step()
        captured = stream.end_capture()

    def replay() -> None:
        cupy.cuda.Device().synchronize()
        captured.launch(stream)
        stream.synchronize()

    return replay


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_step_is_captured_and_polled_after_each_replay(engine: Engine, library: str) -> None:
    pytest.importorskip(library)
    _, batch, advance = static_batch(engine, library)

    def step() -> None:
        with engine.canary.step(batch):
            pass

    replay = capture(library, step)
    for _ in range(10):
        replay()
        engine.canary.poll()
        engine.canary.buffers.place.synchronize()
        advance()
    assert engine.canary.poll() == []
    health = engine.canary.health()
    assert health.errors == 0
    # A prefill of 13 tokens and two steps of 3, then ten replays of 3.
    assert health.written_entries == 4 * (13 + 2 * 3 + 10 * 3)

    engine.damage_token(engine.slot(2, 1))
    replay()
    engine.canary.poll()
    engine.canary.buffers.place.synchronize()
    (report,) = engine.canary.poll()
    assert {(v.request_row, v.slot, v.reasons) for v in report.violations} == {
        (2, engine.slot(2, 2), FailReason.VERIFY_CHAIN_HASH)
    }
    assert report.step == 3 + 11 - 1  # the last of the steps that were called and the replays


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_steps_allocate_nothing(engine: Engine, library: str) -> None:
    pytest.importorskip(library)
    _, batch, advance = static_batch(engine, library)
    for _ in range(3):
        with engine.canary.step(batch):
            pass
        advance()
    with without_allocations():
        for _ in range(3):
            with engine.canary.step(batch):
                pass
            engine.canary.poll()
    assert engine.canary.synchronize() == []
    assert engine.canary.health().errors == 0


def test_a_canary_of_cupy_arrays_follows_the_streams_of_torch(engine: Engine) -> None:
    """The forward pass is slow, on a stream of torch; what is stamped behind it must see its bytes."""
    torch = pytest.importorskip("torch")
    served = Engine(ArrayBackend("gpu"), real_kv_hash="all")
    served.serve()
    fields, batch, advance = static_batch(served, "torch")
    layers = {name: torch.as_tensor(layer, device="cuda") for name, layer in served.kv.items()}
    big = torch.ones(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(20):
            with served.canary.step(batch):
                for _ in range(20):
                    big = big @ big / 2048
                for layer in layers.values():
                    layer[fields["out_cache_loc"]] = number
            torch.cuda.current_stream().synchronize()
            advance()
    assert served.canary.synchronize() == []
    assert served.canary.health().errors == 0


def test_polling_does_not_wait_for_the_device(engine: Engine) -> None:
    """While the device is busy, a step and a poll return with the copy still in flight."""
    import cupy

    cupy.cuda.Device().synchronize()
    fields = engine.admit(DECODE)
    batch = Batch(**fields)
    started = cupy.cuda.Event()
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n) {} }', "spin"
    )
    spin((1,), (1,), (np.int64(1),))
    engine.canary.synchronize()
    spin((1,), (1,), (np.int64(2_000_000_000),))  # about a second
    started.record()
    engine.canary.before_forward(batch)
    engine.canary.poll()
    assert not started.done
    engine.canary.after_forward(batch)
    assert engine.canary.synchronize() == []
