"""Runs the package's kernels on the CPU: compiled behind `host/cuda.h`, in a process of their own.

    with HostKernels("address") as kernels:
        kernels.run(launches, [HostArray(a.ctypes.data, a.nbytes, writable=True, name="out") for a in arrays])

Three flavours, one worker executable per kernel source and flavour, built once and kept in a cache folder:

    plain    optimised; guard bytes around every array, checked after every block
    address  AddressSanitizer and UndefinedBehaviorSanitizer, every array exactly its size between red zones
    thread   data races: the accesses ThreadSanitizer instruments, judged by CUDA's memory order (`host/races.cpp`)

All of them report a barrier or warp operation that not every thread it needs reaches. A report ends the worker, not the
tests: `run` raises it as a `HostKernelError` and starts a new worker next time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np

from cupy_kvcanary.sources import joined_source

if TYPE_CHECKING:
    from types import TracebackType

    from cupy_kvcanary.launch import Launch

Flavour = Literal["plain", "address", "thread"]
FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)

SourceOf = Callable[[str], str]
"""From a stem to its joined source."""

SECONDS = 120
"""After which a run is reported as one that does not end."""

_HOST = Path(__file__).resolve().parent / "host"
# addr2line of binutils 2.40 mixes up the file names of DWARF 5.
_COMMON_FLAGS = ("-std=c++20", "-gdwarf-4", "-w", "-fno-strict-aliasing", "-fPIE", f"-I{_HOST}")
_FLAVOUR_FLAGS: dict[Flavour, tuple[str, ...]] = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "thread": ("-fsanitize=thread", "-DKVC_RACES"),
}
_ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")


class HostKernelError(RuntimeError):
    """A kernel failed to compile, or its run was reported; the text is the whole report."""


@dataclass(frozen=True)
class HostArray:
    """Memory that a launch may use. Pointers in the arguments are found by their value: the array's first byte."""

    address: int
    nbytes: int
    writable: bool
    name: str = "an array"
    """For reports."""

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)


class HostKernels:
    """Runs launches of any kernel in one flavour. Its processes stay until `close` or the end of a `with` block."""

    def __init__(
        self, flavour: Flavour = "plain", source_of: SourceOf = joined_source, *, optimise: bool = True
    ) -> None:
        self._flavour = flavour
        self._source_of = source_of
        self._optimise = optimise
        self._workers: dict[str, _Worker] = {}

    def run(self, launches: Sequence[Launch], arrays: Sequence[HostArray], seed: int = 0) -> None:
        """Run the launches in order; `seed` shuffles their blocks and threads. Writable arrays change in place.

        Nothing is written back when a launch is reported.
        """
        arrays = _without_overlap(arrays)
        contents = [array.read() for array in arrays]
        for stem, group in groupby(launches, key=lambda launch: launch.stem):
            request = _request(list(group), arrays, contents, seed)
            contents = self._answer(stem, request, arrays)
        for array, before, after in zip(arrays, map(HostArray.read, arrays), contents, strict=True):
            if before == after:
                continue
            if not array.writable:
                raise HostKernelError(f"{array.name} at {array.address:#x} is read only, but a kernel wrote to it")
            ctypes.memmove(array.address, after, array.nbytes)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> HostKernels:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, stem: str, request: bytes, arrays: Sequence[HostArray]) -> list[bytes]:
        if stem not in self._workers:
            self._workers[stem] = _Worker(build(self._source_of(stem), self._flavour, self._optimise))
        worker = self._workers[stem]
        try:
            return worker.answer(request, [1, *(array.nbytes for array in arrays)])[1:]
        except HostKernelError:
            del self._workers[stem]
            raise


def mutated(stem: str, pattern: str, replacement: str, source_of: SourceOf = joined_source) -> SourceOf:
    """Sources of which that of `stem` has `replacement` for the text `pattern`, which must occur exactly once."""
    source = source_of(stem)
    if source.count(pattern) != 1:
        raise ValueError(f"pattern must occur once in the source of {stem}, got {source.count(pattern)}: {pattern!r}")
    mutant = source.replace(pattern, replacement)
    return lambda name: mutant if name == stem else source_of(name)


def report(
    flavour: Flavour, source_of: SourceOf, launches: Sequence[Launch], arrays: Sequence[HostArray], seed: int = 0
) -> str | None:
    """The report on such a run, None if there is none."""
    with HostKernels(flavour, source_of) as kernels:
        try:
            kernels.run(launches, arrays, seed)
        except HostKernelError as error:
            return str(error)
    return None


def build(source: str, flavour: Flavour, optimise: bool = True) -> Path:
    """Path of the worker executable for `source`, compiled unless the cache has it.

    Without optimisation it takes half the time to compile: worth it for a source that runs once.
    """
    entries = ", ".join(f"HOST_ENTRY({name})" for name in _ENTRY.findall(source))
    unit = "\n".join(
        [
            # Internal linkage for all of it, so that no variable of an inline function gets a section of its own.
            '#include "cuda.h"\nnamespace {',
            source,
            f'}}\n#line 1 "entries"\nconst host::Entry host::entries[] = {{{entries}, {{}}}};\n',
        ]
    )
    flags = (*_COMMON_FLAGS, "-O1" if optimise else "-O0", *_FLAVOUR_FLAGS[flavour])
    link = [flag for flag in flags if flavour == "address" and flag.startswith("-fsanitize=")]

    def make(folder: Path) -> None:
        (folder / "kernel.cpp").write_text(unit, encoding="utf-8")
        _compile(folder, f"-I{_precompiled_header(flags)}", *flags, "-c", "kernel.cpp", "-o", "kernel.o")
        # The variables without an initialiser are those in shared memory; the linker gives this name start and end.
        _run(folder, "objcopy", "--rename-section", ".bss=kvc_shared", "kernel.o")
        _compile(folder, *link, "-pie", "kernel.o", str(_runtime()), "-o", "worker")

    return _cached("worker", make, unit, flags) / "worker"


def _precompiled_header(flags: Sequence[str]) -> Path:
    """Folder to include `cuda.h` from, which g++ then need not read again; clang++ looks past it."""

    def make(folder: Path) -> None:
        _compile(folder, *flags, "-x", "c++-header", str(_HOST / "cuda.h"), "-o", "cuda.h.gch")

    return _cached("header", make, "", flags)


def _runtime() -> Path:
    """The object file with everything but the kernel, never instrumented."""
    sources = sorted(_HOST.glob("*.cpp"))
    flags = (*_COMMON_FLAGS, "-O2")

    def make(folder: Path) -> None:
        objects = [f"{source.stem}.o" for source in sources]
        for source, name in zip(sources, objects, strict=True):
            _compile(folder, *flags, "-c", str(source), "-o", name)
        _compile(folder, "-r", "-nostdlib", *objects, "-o", "runtime.o")

    return _cached("runtime", make, "", flags) / "runtime.o"


def _cached(name: str, make: Callable[[Path], None], source: str, flags: Sequence[str]) -> Path:
    """Folder that `make` filled, under a key of all that it depends on. Several processes may ask at once."""
    host_sources = [path.read_text(encoding="utf-8") for path in sorted(_HOST.iterdir())]
    key = hashlib.sha256(repr((source, flags, host_sources, _compiler_version())).encode()).hexdigest()[:20]
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("KVCANARY_HOST_CACHE") or Path(user_cache) / "kvcanary-host")
    target = cache / f"{name}-{key}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=cache))
        try:
            make(folder)
            folder.rename(target)
        except OSError:
            # Another process was faster; a folder that is not empty is never replaced.
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return target


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise HostKernelError("no C++ compiler: install g++ or clang++, or name one in CXX")
    return found


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([_compiler(), "--version"], check=True, capture_output=True, text=True).stdout


def _compile(folder: Path, *arguments: str) -> None:
    # Debug information without the folder's name, so that places read as in the kernel sources.
    _run(folder, _compiler(), f"-fdebug-prefix-map={folder}=.", *arguments)


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostKernelError(f"{' '.join(command)}\n{done.stderr}")


class _Worker:
    def __init__(self, executable: Path) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  a pipe could fill up while nobody reads it
        self._process = subprocess.Popen(
            [executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)

    def answer(self, request: bytes, sizes: Sequence[int]) -> list[bytes]:
        try:
            self._stdin.write(request)
            self._stdin.flush()
        except BrokenPipeError:
            raise self._error() from None
        answer = []
        for size in sizes:
            answer.append(self._stdout.read(size))
            if len(answer[-1]) != size:
                raise self._error()
        return answer

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _error(self) -> HostKernelError:
        status = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        self.close()
        return HostKernelError(text or f"the worker ended with status {status} and no report")


def _without_overlap(arrays: Sequence[HostArray]) -> list[HostArray]:
    """One array for each address: the largest, writable if one of them is."""
    by_address: dict[int, HostArray] = {}
    for array in sorted(arrays, key=lambda array: array.nbytes):
        same = by_address.get(array.address)
        writable = array.writable or (same is not None and same.writable)
        by_address[array.address] = HostArray(array.address, array.nbytes, writable, array.name)
    unique = sorted(by_address.values(), key=lambda array: array.address)
    for left, right in pairwise(array for array in unique if array.nbytes):
        if left.address + left.nbytes > right.address:
            raise ValueError(f"arrays must be the same memory or apart, got {left} and {right}")
    return unique


def _request(launches: Sequence[Launch], arrays: Sequence[HostArray], contents: Sequence[bytes], seed: int) -> bytes:
    """See `host/worker.cpp`."""
    parts = [_numbers(seed, SECONDS, len(arrays), len(launches))]
    for array, content in zip(arrays, contents, strict=True):
        parts += [_numbers(array.address, array.nbytes), _text(array.name.encode()), content]
    number_of = {array.address: number for number, array in enumerate(arrays)}
    for launch in launches:
        args = launch.args.tobytes()
        found = [
            (offset, number_of[address])
            for offset in _uint64_offsets(launch.args.dtype)
            if (address := struct.unpack_from("<Q", args, offset)[0]) in number_of
        ]
        parts += [_text(launch.entry.encode()), _numbers(launch.grid, launch.block), _text(args)]
        parts += [_numbers(len(found)), *(_numbers(*pointer) for pointer in found)]
    return b"".join(parts)


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def _text(text: bytes) -> bytes:
    return _numbers(len(text)) + text


def _uint64_offsets(dtype: np.dtype[Any], start: int = 0) -> list[int]:
    """Where the uint64 fields of a structure lie, also those of structures within it."""
    if dtype.fields is None:
        return [start] if dtype == np.uint64 else []
    return [
        offset for field, position, *_ in dtype.fields.values() for offset in _uint64_offsets(field, start + position)
    ]
