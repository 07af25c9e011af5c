"""Every kernel compiles for every architecture without a warning, a spill or a stack frame. No GPU is needed.

Also what the host and the kernels must agree on: the argument structs.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary.sources import STEMS, joined_source, read_kernel_file
from tools.resources import COMPUTE_CAPABILITIES, PAGE, compile_source, nvrtc_version, page, resources_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(scope="module")
def logs() -> dict[tuple[str, str], str]:
    """By compute capability and stem."""
    return {(c, stem): compile_source(joined_source(stem), c) for stem in STEMS for c in COMPUTE_CAPABILITIES}


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES)
class TestEveryArchitecture:
    def test_no_warning(self, logs: dict[tuple[str, str], str], capability: str, stem: str) -> None:
        assert "warning" not in logs[capability, stem].lower()

    def test_no_spill_and_no_stack_frame(self, logs: dict[tuple[str, str], str], capability: str, stem: str) -> None:
        kernels = resources_in(logs[capability, stem])
        assert {kernel.kernel for kernel in kernels} == set(re.findall(r"\b(kvc_\w+)\(const", joined_source(stem)))
        for kernel in kernels:
            assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0), kernel


def test_a_warning_and_a_stack_frame_are_found() -> None:
    log = compile_source(
        'extern "C" __global__ void kvc_test(const int* in, int* out) {\n'
        "  int unused;\n"
        "  int values[99];\n"
        "  for (int i = 0; i < 99; ++i) values[i] = in[i];\n"
        "  *out = values[in[*out]];\n"
        "}",
        "9.0",
    )
    assert "warning" in log
    (kernel,) = resources_in(log)
    assert kernel.kernel == "kvc_test"
    assert kernel.stack >= 99 * 4
    assert kernel.registers > 0


def test_the_page_of_resources_is_current(logs: dict[tuple[str, str], str]) -> None:
    version = nvrtc_version()
    written = PAGE.read_text(encoding="utf-8")
    current = page(version, ((capability, log) for (capability, _), log in logs.items()))
    if f"NVRTC {version}," not in written:
        written, current = without_versions_own(written), without_versions_own(current)
    assert written == current, "run python -m tools.resources"


def without_versions_own(text: str) -> str:
    """Without NVRTC's version, and the registers and shared memory that another version counts otherwise."""
    return re.sub(r"(\| \d+\.\d) \| \d+ \| \d+", r"\1", re.sub(r"NVRTC [\d.]+", "NVRTC", text))


def args_of(stem: str) -> dict[str, np.dtype[Any]]:
    """Twins of a stem's argument structs by their names: `VERIFY_BATCH_ARGS` is the twin of `VerifyBatchArgs`."""
    names = re.findall(r"struct (\w+Args) {", read_kernel_file(f"{stem}.cu"))
    operation = import_module(f"cupy_kvcanary.ops.{stem}")
    return {name: getattr(operation, re.sub(r"\B([A-Z])", r"_\1", name).upper()) for name in names}


def members(twin: np.dtype[Any], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """C++ name, offset and size of each field and of the fields within.

    `x` and `x_is_int64` are an IndexArray x; `x_0`, `x_1` and so on are the elements of an array x.
    """
    names: Mapping[str, Any] = twin.fields or {}
    for name, (field, offset, *_) in names.items():
        index_array = name.removesuffix("_is_int64")
        if index_array != name and index_array in names:
            member = f"{prefix}{index_array}.is_int64"
        else:
            member = prefix + re.sub(r"_(\d+)$", r"[\1]", name) + (".data" if f"{name}_is_int64" in names else "")
        yield member, offset, field.itemsize
        yield from ((path, offset + start, size) for path, start, size in members(field, f"{member}."))


def compile_with_twin(stem: str, struct: str, twin: np.dtype[Any]) -> None:
    """Fails unless the struct has the twin's size, and each field its offset and size."""
    lines = [f'static_assert(sizeof({struct}) == {twin.itemsize}, "size of {struct}");']
    for name, offset, size in members(twin):
        member = f"(({struct}*)0)->{name}"
        # NVRTC has no offsetof; this is how its front end spells the address of a member as a constant.
        lines.append(f'static_assert(__INTADDR__(&({member})) == {offset}, "offset of {name}");')
        lines.append(f'static_assert(sizeof({member}) == {size}, "size of {name}");')
    compile_source("\n".join([joined_source(stem), *lines]), "9.0")


@pytest.mark.parametrize("stem", STEMS)
def test_argument_struct_equals_its_twin(stem: str) -> None:
    for struct, twin in args_of(stem).items():
        compile_with_twin(stem, struct, twin)


@pytest.mark.parametrize("stem", STEMS)
def test_a_twin_that_differs_is_found(stem: str) -> None:
    for struct, twin in args_of(stem).items():
        fields = [(name, field) for name, (field, *_) in (twin.fields or {}).items()]
        with pytest.raises(RuntimeError, match='static assertion failed with "offset of'):
            compile_with_twin(stem, struct, np.dtype([*fields[1:], fields[0]], align=True))
        with pytest.raises(RuntimeError, match=f'static assertion failed with "size of {struct}"'):
            compile_with_twin(stem, struct, np.dtype(fields[:-1], align=True))
