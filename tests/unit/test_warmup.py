"""Warming up loads every kernel of every source."""

from __future__ import annotations

import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING

from cupy_kvcanary import compile as kernels
from cupy_kvcanary import warmup
from cupy_kvcanary.sources import STEMS, joined_source

if TYPE_CHECKING:
    import pytest

# The package has a function of this name.
module = importlib.import_module("cupy_kvcanary.warmup")


def test_every_global_function_is_an_entry() -> None:
    for stem in STEMS:
        assert len(module.entries(stem)) == joined_source(stem).count("__global__") > 0
        assert all(entry.startswith(f"kvc_{stem}") for entry in module.entries(stem))


def test_each_kernel_is_loaded_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, str, int]] = []
    monkeypatch.setattr(module, "cuda_device", nullcontext)
    monkeypatch.setattr(module, "kernel_handle", lambda *key: loaded.append(key))
    warmup("cuda:1")
    assert loaded == [(stem, entry, 1) for stem in STEMS for entry in module.entries(stem)]


def test_threads_that_need_a_kernel_at_once_have_one_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of whoever came second would be gone again, with its handle in use."""
    threads, loads = 8, []
    barrier = threading.Barrier(threads)

    def load(stem: str, entry: str) -> tuple[object, int]:
        time.sleep(0.05)  # long enough for all others to arrive
        loads.append(entry)
        return object(), len(loads)

    monkeypatch.setattr(kernels, "_load", load)
    monkeypatch.setattr(kernels, "_kernels", {})

    def handle(_: int) -> int:
        barrier.wait()
        return kernels.kernel_handle("verify", "kvc_verify", 0)

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(handle, range(threads))) == [1] * threads
    assert loads == ["kvc_verify"]


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    warmup("cpu")
