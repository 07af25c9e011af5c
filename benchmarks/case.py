"""What a benchmark declares: cases, each with arrays, launches and what they must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from cupy_kvcanary import bind_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cupy_kvcanary.launcher import Launcher

Measure = Literal["device_us", "host_us", "bound_us"]
"""GPU time (NumPy: wall time) of the launches; host time of checked calls; host time of bound ones."""


class Launch(NamedTuple):
    """A launcher and its keyword arguments."""

    launcher: Launcher[Any]
    arguments: dict[str, Any]


class PeerLaunch(NamedTuple):
    """A launcher of the peer by its name, and our arguments for it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case on a device, ready to be measured."""

    call: Callable[[], object]
    """Checks and launches everything once."""
    bound: Callable[[], object] | None
    """Only launches it; None where there is nothing to bind."""
    written: Mapping[str, Any]
    """Arrays that it writes in place, as far as they are compared."""
    peer: Callable[[], Sequence[PeerLaunch]] | None = None
    """The same work for the peer, on the same arrays; None where the peer has nothing like it."""
    launches: Sequence[Launch] = ()


def prepared(
    launches: Sequence[Launch],
    written: Mapping[str, Any],
    peer: Callable[[], Sequence[PeerLaunch]] | None = None,
) -> Prepared:
    """Launches, one after another."""

    def call() -> None:
        for launcher, arguments in launches:
            launcher(**arguments)

    return Prepared(
        call=call,
        bound=bind_all(launches),
        written=written,
        peer=peer,
        launches=launches,
    )


class Setup:
    """The arrays of a case in host memory, from a fixed seed."""

    def on(self, arrays: Any) -> Prepared:
        """The case on NumPy's or CuPy's arrays, as the module is."""
        raise NotImplementedError

    def expected(self) -> dict[str, Any]:
        """What is in `written` after one call, or in a part of it, by NumPy."""
        reference = self.on(np)
        reference.call()
        return dict(reference.written)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of a benchmark's table."""

    name: str
    series: str
    """Line of the plot."""
    work: int
    """Size on the plot's axis; see the benchmark's `WORK`."""
    moved_bytes: int
    """That the kernels must read and write at least; a scattered read of less counts as a sector of 32."""
    memory_bytes: int
    """On the device, at most."""
    setup: Callable[[], Setup]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    is_quick: bool = False
    """Whether `--quick` runs it."""
    needs_gpu: bool = False
    measures: tuple[Measure, ...] = ("device_us", "host_us", "bound_us")
    aims: Mapping[str, float] = field(default_factory=dict)
    """Microseconds by measure."""
    published: Mapping[str, float] | Literal["refused"] = field(default_factory=dict)
    """The peer's microseconds by measure, see `published`."""


@dataclass(frozen=True, kw_only=True)
class ProcessCase:
    """Something that happens once in a process: measured in new ones."""

    name: str
    code: str
    """A Python program that prints microseconds."""
    needs_gpu: bool = False
    is_quick: bool = True
    aims: Mapping[str, float] = field(default_factory=dict)


SECTOR = 32
"""Bytes that a GPU reads at least."""


def on_device(value: Any, arrays: Any) -> Any:
    """NumPy arrays of a case as arrays of the module; anything else as it is. On NumPy a copy."""
    return arrays.array(value) if isinstance(value, np.ndarray) else value
