"""Mutants of the kernels: one barrier less, one bound wider, one mask bit fewer. Each must be reported.

A stem's mutants are the list `MUTANTS` of `mutants/<stem>.py`; `python -m tools.mutants` prints what caught each.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal
from unittest import mock

import numpy as np

from cupy_kvcanary.launch import BACKENDS, NumpyBackend, Operation, all_views
from cupy_kvcanary.sources import STEMS, joined_source, read_kernel_file
from tests.helpers.backends import host_arrays
from tests.helpers.host_backend import Flavour, HostKernelError, HostKernels, SourceOf, build, mutated

Kind = Literal["barrier", "bound", "mask", "atomic"]

DIFFERS = "differs from NumPy"
"""Said where no sanitizer objects: a value came from undefined shared memory, or from another element."""

# What must not be forgotten: every such place in kernels/ lies in the pattern of a mutant of its kind.
SITES: dict[Kind, re.Pattern[str]] = {
    "barrier": re.compile(r"__sync(?:threads|warp)\w*\("),
    "bound": re.compile(r"__shared__ [^;]*\["),
    "mask": re.compile(r"__(?!sync)\w+_sync\("),
    "atomic": re.compile(r"\batomic\w+\("),
}


@dataclass(frozen=True)
class Mutant:
    """One change to a kernel's source, and what a run of it must report."""

    kind: Kind
    entry: str
    """The kernel that runs mutated; the operation's other kernels run as they are."""
    name: str
    pattern: str
    """Occurs once in the joined source."""
    replacement: str
    run: Callable[[], None]
    """Calls the operation with arguments that reach the mutated place."""
    flavour: Flavour
    says: str
    """Part of the report."""
    line: str = ""
    """Text that occurs once in the joined source; the report names its line."""

    @property
    def stem(self) -> str:
        return next(stem for stem in STEMS if f"{self.entry}_".startswith(f"kvc_{stem}_"))

    @property
    def expected(self) -> list[str]:
        """All parts of the report."""
        if self.says == DIFFERS:
            return [DIFFERS]
        what = ["data race"] if self.flavour == "thread" else []
        return [*what, self.says, f"kernel {self.entry}, block ", place(self.stem, self.line)]

    def source_of(self, stem: str) -> str:
        return mutated(self.stem, self.pattern, self.replacement)(stem)

    def report(self) -> str | None:
        """The report on a run of the mutant, None if there is none."""
        return _report(self.source_of, self.entry, self.flavour, self.run)

    def report_unmutated(self) -> str | None:
        """The report on the same run of the source as it is."""
        return _report(joined_source, self.entry, self.flavour, self.run)


Reach = tuple[tuple[str, Callable[[], None]], ...]
"""Kernels, each with the call that reaches the mutated place in it."""


def mutants(
    kind: Kind, flavour: Flavour, says: str, rows: Iterable[tuple[Reach, str, str, str, str]]
) -> Iterator[Mutant]:
    """Of rows (kernels, name, pattern, replacement, line): a mutant for each kernel."""
    for reach, name, pattern, replacement, line in rows:
        for entry, run in reach:
            yield Mutant(kind, entry, name, pattern, replacement, run, flavour, says, line)


def all_mutants() -> list[Mutant]:
    return [mutant for stem in STEMS for mutant in import_module(f"tests.helpers.mutants.{stem}").MUTANTS]


def build_all(mutants: list[Mutant]) -> None:
    """Compile what the mutants' runs need, on all cores: this takes most of their time."""
    needed: set[tuple[str, Flavour, bool]] = set()
    for mutant in mutants:
        source = joined_source(mutant.stem)
        needed |= {(source, "plain", True), (source, mutant.flavour, False)}
        # A pattern that the source does not have fails the mutant's own test.
        with contextlib.suppress(ValueError):
            needed.add((mutant.source_of(mutant.stem), mutant.flavour, False))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build, *zip(*needed, strict=True)))


@functools.cache  # mutants share their inputs
def _report(source_of: SourceOf, entry: str, flavour: Flavour, run: Callable[[], None]) -> str | None:
    with HostKernels(flavour, source_of, optimise=False) as kernels, HostKernels() as others:
        backend = _OneKernelApart(entry, kernels, others)
        with mock.patch.dict(BACKENDS, cpu=backend):
            try:
                run()
            except (HostKernelError, _WrongResultError) as error:
                return str(error)
    return None


class _WrongResultError(AssertionError):
    pass


class _OneKernelApart(NumpyBackend):
    """Runs one of an operation's kernels in another build than the rest, and compares with the reference."""

    def __init__(self, entry: str, kernels: HostKernels, others: HostKernels) -> None:
        self.entry = entry
        self.kernels = kernels
        self.others = others

    def run(self, operation: Operation, arguments: Mapping[str, Any], stream: Any) -> None:
        arrays = [(name, view.as_numpy()) for name, view in all_views(arguments) if name in operation.outputs]
        before = [array.copy() for _, array in arrays]
        super().run(operation, arguments, stream)
        expected = [array.copy() for _, array in arrays]
        for (_, array), value in zip(arrays, before, strict=True):
            array[...] = value
        for launch in operation.launches(**arguments):
            kernels = self.kernels if launch.entry == self.entry else self.others
            kernels.run([launch], host_arrays(operation, arguments))
        for (name, array), value in zip(arrays, expected, strict=True):
            if not np.array_equal(_ordered(name, array), _ordered(name, value)):
                raise _WrongResultError(f"{name} {DIFFERS}")


def _ordered(name: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Violations are recorded in any order."""
    return array[np.lexsort(array.T)] if name in ("violation_ring", "violation_details") else array


def place(stem: str, text: str) -> str:
    """`file:line` of a text in the joined source, as reports name it."""
    before, *rest = joined_source(stem).split(text)
    if len(rest) != 1:
        raise ValueError(f"text must occur once in the source of {stem}, got {len(rest)}: {text!r}")
    *_, file = re.finditer(r'#line 1 "(.*)"\n', before)
    return f"{file[1]}:{before.count(chr(10), file.end()) + 1}"


def uncovered_sites(kind: Kind, mutants: list[Mutant]) -> Iterator[str]:
    """Places of `kind` in kernels/, as `file:line: text`, that no mutant of that kind changes."""
    for file in ("common.cuh", *(f"{stem}.cu" for stem in STEMS)):
        text = read_kernel_file(file)
        changed = set()
        for mutant in mutants:
            sites = list(SITES[kind].finditer(mutant.pattern))
            # One place at a time: with two of them gone, either may be what the report is about.
            is_here = file in ("common.cuh", f"{mutant.stem}.cu") and mutant.pattern in text
            if mutant.kind == kind and len(sites) == 1 and is_here:
                changed.add(text.find(mutant.pattern) + sites[0].start())
        code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
        for site in SITES[kind].finditer(code):
            if site.start() not in changed:
                yield f"kernels/{file}:{code.count(chr(10), 0, site.start()) + 1}: {site[0]}"
