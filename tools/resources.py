"""Registers, shared memory, stack and spills of every kernel, from NVRTC: no GPU is needed.

`python -m tools.resources` from a checkout writes docs/resources.md; tests/packaging/test_nvrtc.py keeps it current.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cupy_backends.cuda.libs import nvrtc

from cupy_kvcanary.sources import STEMS, joined_source

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "resources.md"

COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")

# What ptxas says of one kernel, in order; the lines between differ between versions.
_KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
    r"Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Resources:
    """What a thread takes, in bytes where it is not registers; shared memory is a block's."""

    kernel: str
    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int


def compile_source(source: str, compute_capability: str) -> str:
    """Compile for one architecture to machine code; the whole log. RuntimeError where it does not compile."""
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    options = [f"--gpu-architecture=sm_{compute_capability.replace('.', '')}", "--std=c++17", "--ptxas-options=-v"]
    try:
        nvrtc.compileProgram(program, options)
        return str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as reason:
        raise RuntimeError(f"sm_{compute_capability}: {reason}\n{nvrtc.getProgramLog(program)}") from reason
    finally:
        nvrtc.destroyProgram(program)


def resources_in(log: str) -> list[Resources]:
    """Of each kernel, by name."""
    found = []
    for kernel, *numbers, rest in _KERNEL.findall(log):
        stack, spill_stores, spill_loads, registers = map(int, numbers)
        shared = re.search(r"(\d+) bytes smem", rest)
        found.append(Resources(kernel, registers, int(shared[1]) if shared else 0, stack, spill_stores, spill_loads))
    return sorted(found, key=lambda resources: resources.kernel)


def nvrtc_version() -> str:
    """Down to the build, which the library's own version number does not name."""
    program = nvrtc.createProgram("", "empty.cu", (), ())
    nvrtc.compileProgram(program, ["--gpu-architecture=compute_80"])
    release = re.search(r"release [\d.]+, V([\d.]+)", str(nvrtc.getPTX(program)))
    nvrtc.destroyProgram(program)
    if release is None:
        raise RuntimeError("NVRTC's PTX names no release")
    return release[1]


def page(version: str, logs: Iterable[tuple[str, str]]) -> str:
    """The text of docs/resources.md, from (compute capability, log) of every kernel source."""
    rows = [(resources, capability) for capability, log in logs for resources in resources_in(log)]
    rows.sort(key=lambda row: (row[0].kernel, COMPUTE_CAPABILITIES.index(row[1])))
    lines = [
        "# What the kernels take",
        "",
        f"From the log of NVRTC {version}, by `python -m tools.resources`. Registers, stack and spills are a thread's,",
        "shared memory is a block's, all but registers in bytes. A spill or a stack frame fails the tests.",
        "",
        "| kernel | compute capability | registers | shared memory | stack | spill stores | spill loads |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| `{r.kernel}` | {capability} | {r.registers} | {r.shared} | {r.stack} | {r.spill_stores} | {r.spill_loads} |"
        for r, capability in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    logs = [(c, compile_source(joined_source(stem), c)) for stem in STEMS for c in COMPUTE_CAPABILITIES]
    PAGE.write_text(page(nvrtc_version(), logs), encoding="utf-8")


if __name__ == "__main__":
    main()
