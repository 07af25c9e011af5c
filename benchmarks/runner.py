"""Runs cases: prepares, checks against NumPy, measures. The one body of every benchmark."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cupy_kvcanary

from . import published
from .case import Case, Prepared, ProcessCase
from .timing import Time, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import ModuleType

    from .peer import Peer
    from .timing import Device

CPU_MOST_BYTES = 64 * 2**20
CPU_MOST_BYTES_QUICK = 8 * 2**20
"""Cases that move more are left to GPUs."""

_PROCESSES = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of a case; microseconds."""

    name: str
    series: str = ""
    work: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    moved_bytes: int | None = None
    device_us: Time | None = None
    host_us: Time | None = None
    bound_us: Time | None = None
    copy_share: float | None = None
    """Bytes moved over time, as a share of the copy bandwidth of the same run."""
    aims: Mapping[str, float] = field(default_factory=dict)
    peer: Mapping[str, float] = field(default_factory=dict)
    """The peer's microseconds by measure."""
    peer_source: str = ""
    """`same run`, `published figures, another run`, or why there are none."""
    ratio: float | None = None
    """Of the peer's device time to ours."""


class WrongResultError(AssertionError):
    """A kernel's output is not what NumPy computes: its time means nothing."""


def benchmarks() -> dict[str, ModuleType]:
    """The modules that declare cases, by name: `verify` is `bench_verify`."""
    package = __package__ or ""
    folder = Path(__file__).parent
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if module.name.startswith("bench_"))
    return {name.removeprefix("bench_"): importlib.import_module(f"{package}.{name}") for name in names}


def selected(cases: Iterable[Case | ProcessCase], device: Device, is_quick: bool) -> list[Case | ProcessCase]:
    """Those that the machine can run, or the quick ones of them."""
    chosen = [case for case in cases if (case.is_quick or not is_quick) and (device.is_gpu or not case.needs_gpu)]
    room = device.free_bytes()
    most = 2**63 if device.is_gpu else CPU_MOST_BYTES_QUICK if is_quick else CPU_MOST_BYTES
    return [
        case
        for case in chosen
        if isinstance(case, ProcessCase) or (case.memory_bytes <= room and case.moved_bytes <= most)
    ]


def run(
    cases: Iterable[Case | ProcessCase], device: Device, peer: Peer | None, on_case: Callable[[str], object] = str
) -> Iterator[Row]:
    """Measure one case after another; `on_case` gets the name of each that begins."""
    for case in cases:
        on_case(case.name)
        yield _run_in_processes(case) if isinstance(case, ProcessCase) else _run(case, device, peer)


def _run(case: Case, device: Device, peer: Peer | None) -> Row:
    setup = case.setup()
    expected = setup.expected()
    prepared = setup.on(device.arrays)
    before = {name: prepared.written[name].copy() for name in expected}

    def check(call: Callable[[], object], whose: str) -> None:
        for name, array in before.items():
            prepared.written[name][...] = array
        device.synchronize()
        call()
        device.synchronize()
        for name, value in expected.items():
            if not np.array_equal(as_numpy(name, prepared.written[name]), as_numpy(name, value)):
                raise WrongResultError(f"{case.name}: {name} of {whose} is not NumPy's")

    check(prepared.call, "the checked call")
    if prepared.bound is not None:
        check(prepared.bound, "the bound call")
    times = _measure(case, prepared, device)
    peers, source = _measure_peer(case, prepared, device, peer, check)
    ours = times.get("device_us")
    return Row(
        name=case.name,
        series=case.series,
        work=case.work,
        parameters=case.parameters,
        moved_bytes=case.moved_bytes,
        copy_share=None if ours is None else _rate(case.moved_bytes, ours) / device.environment["copy_tb_per_s"],
        aims=case.aims if device.is_gpu else {},
        peer=peers,
        peer_source=source,
        ratio=None if ours is None or "device_us" not in peers else peers["device_us"] / ours.median,
        **times,
    )


def _rate(moved_bytes: int, time: Time) -> float:
    """TB/s."""
    return moved_bytes / time.median / 1e6


def _measure(case: Case, prepared: Prepared, device: Device) -> dict[str, Time]:
    bound = prepared.bound
    times = {}
    if "device_us" in case.measures:
        times["device_us"] = device.time(bound or prepared.call)
        if not device.is_gpu:  # the call computes: the host's part of it says nothing
            return times
    if "host_us" in case.measures:
        times["host_us"] = device.host_time(prepared.call)
    if "bound_us" in case.measures and bound is not None:
        times["bound_us"] = device.host_time(bound)
    return times


def _measure_peer(
    case: Case,
    prepared: Prepared,
    device: Device,
    peer: Peer | None,
    check: Callable[[Callable[[], object], str], None],
) -> tuple[Mapping[str, float], str]:
    """The peer's times and where they are from."""
    if peer is None or prepared.peer is None:
        if not case.published or not device.is_gpu:  # a GPU's figures say nothing beside NumPy's
            return {}, ""
        return ({}, "refused") if case.published == "refused" else (case.published, published.SOURCE)
    try:
        call = peer.call_of(prepared.peer())
        check(call, "the peer")
        times = {"device_us": device.time(call).median}
        if device.is_gpu:
            times["host_us"] = device.host_time(call).median
    except WrongResultError:
        raise
    except Exception as reason:
        return {}, f"refused: {type(reason).__name__}: {reason}".splitlines()[0]
    return times, "same run"


def as_numpy(name: str, array: Any) -> np.ndarray[Any, Any]:
    """Violations may be in any order."""
    host = np.asarray(array.get() if hasattr(array, "get") else array)
    return host[np.lexsort(host.T)] if name.startswith("violation_ring") else host


def _run_in_processes(case: ProcessCase) -> Row:
    path = [str(Path(cupy_kvcanary.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", case.code]
    samples = [
        float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1])
        for _ in range(_PROCESSES + 1)
    ]
    return Row(name=case.name, host_us=summary(samples[1:]), aims=case.aims)  # the first one filled caches
