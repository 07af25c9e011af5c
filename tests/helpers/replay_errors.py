"""One call for every catalogue entry of traces and replay, which raises it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from cupy_kvcanary import compile as kernels
from cupy_kvcanary.engine_model import EngineConfig, EngineModel
from cupy_kvcanary.replay import ReplayOptions, replay
from cupy_kvcanary.replay_command import add_replay_parser, run_replay
from cupy_kvcanary.traces import TraceRequest, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
_REQUESTS = [TraceRequest(0.0, 100, 5)]


def reading(content: bytes) -> Callable[[], object]:
    """Read a trace of this content."""

    def call() -> object:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace"
            trace.write_bytes(content)
            return read_trace(trace)

    return call


def run_command(*arguments: str) -> int:
    """`kvcanary replay` without the outer command, so that errors come through as exceptions."""
    parser = argparse.ArgumentParser()
    add_replay_parser(parser.add_subparsers())
    return run_replay(parser.parse_args(["replay", *arguments]))


def _replaying(**options: Any) -> Callable[[], object]:
    return lambda: replay(_REQUESTS, ReplayOptions(device="cpu", **options))


def _with_pool(**sizes: int) -> Callable[[], object]:
    return lambda: EngineModel(_REQUESTS, EngineConfig(**sizes))


@contextmanager
def _no_gpu() -> Iterator[None]:
    """CuPy is there, its driver finds no device."""

    class CUDARuntimeError(RuntimeError):
        pass

    def get_device_count() -> int:
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    runtime = SimpleNamespace(getDeviceCount=get_device_count, CUDARuntimeError=CUDARuntimeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    with mock.patch.object(kernels, "import_cupy", return_value=cupy):
        yield


def _replay_on_cuda_without_gpu() -> object:
    with _no_gpu():
        return replay(_REQUESTS, ReplayOptions(device="cuda"))


def _plot_without_matplotlib() -> object:
    with mock.patch.dict(sys.modules, {"matplotlib": None}), tempfile.TemporaryDirectory() as folder:
        return run_command("--requests", "1", "--device", "cpu", "--plot", f"{folder}/plot.png")


REPLAY_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-trace-must-be-readable": lambda: read_trace("no/such/trace.jsonl"),
    "kv-canary-trace-must-be-text": reading(b'{"timestamp": 0, \xff\x00'),
    "kv-canary-trace-must-not-be-empty": reading(b"\n"),
    "kv-canary-trace-must-be-of-a-known-format": reading(b"time,prompt,answer\n0,1,1\n"),
    "kv-canary-trace-line-must-be-json": reading(b'{"timestamp": 0, "input_len'),
    "kv-canary-trace-line-must-have-field": reading(b'{"timestamp": 0, "input_length": 1}'),
    "kv-canary-trace-line-must-have-three-columns": reading(AZURE_HEADER + b"2023-11-16 18:15:46.6805900,374\n"),
    "kv-canary-trace-line-must-be-timed": reading(AZURE_HEADER + b"16.11.2023,374,44\n"),
    "kv-canary-trace-line-must-count-tokens": reading(AZURE_HEADER + b"2023-11-16 18:15:46.6805900,-1,44\n"),
    "kv-canary-trace-line-must-be-in-time-order": reading(
        AZURE_HEADER + b"2023-11-16 18:15:47.0,1,1\n2023-11-16 18:15:46.0,1,1\n"
    ),
    "kv-canary-trace-line-must-be-one-id-per-block": reading(
        b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}'
    ),
    "kv-canary-trace-line-must-keep-the-prefix-of-an-id": reading(
        b'{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0, 0]}'
    ),
    "kv-canary-must-divide": _with_pool(pool_slots=4096, page_size=24),
    "kv-canary-pool-must-hold-the-longest-request": _with_pool(pool_slots=64),
    "kv-canary-must-be-a-finite-positive-number": _replaying(speedup=0.0),
    "kv-canary-replay-must-fit-in-memory": lambda: replay(
        [TraceRequest(0.0, 2**22, 1)], ReplayOptions(device="cpu", max_running=2**31 - 1)
    ),
    "kv-canary-fault-must-be-known": _replaying(inject=("late-write@soon",)),
    "kv-canary-fault-must-be-possible": _replaying(inject=("stale-mapping",)),
    "kv-canary-device-must-be-known": lambda: replay(_REQUESTS, ReplayOptions(device="cuda:1")),
    "kv-canary-gpu-must-be-usable": _replay_on_cuda_without_gpu,
    "kv-canary-output-file-must-be-writable": lambda: run_command("--json", "no/such/folder/numbers.json"),
    "kv-canary-matplotlib-must-be-installed": _plot_without_matplotlib,
}
