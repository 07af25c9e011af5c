"""Finds, reads and joins the CUDA sources: the only module that knows where they are.

A kernel's source is one string: constants written from their Python definitions, `common.cuh`, then the stem's own
file. CuPy keys its disk cache by this text, so the cache can never serve a kernel built from an older header.
"""

from __future__ import annotations

import functools
from pathlib import Path

from . import constants
from .catalogue import error

_PACKAGE = Path(__file__).resolve().parent
# Inside the package where it was installed, beside it in a checkout or an editable installation.
_FOLDERS = (_PACKAGE / "kernels", _PACKAGE.parent / "kernels")

# C++ type and name of each constant that the kernels use.
_INJECTED = (
    ("int", "REQ_POOL_IDX_PADDING"),
    ("int", "TOKEN_TO_KV_SLOT_PADDING"),
    ("unsigned long long", "CANARY_CHAIN_ANCHOR"),
    ("unsigned long long", "AFFINE_MULTIPLIER"),
    ("int", "CANARY_FIELDS_PER_SLOT"),
    ("int", "FREED_TOKEN"),
    ("int", "FREED_POSITION"),
    ("int", "VIOLATION_FIELDS"),
    ("int", "VIOLATION_DETAIL_FIELDS"),
    ("int", "MAX_REAL_KV_SOURCES"),
    ("int", "MAX_BUFFERS"),
    ("int", "INT32_MAX"),
    ("int", "VERIFY_THREADS"),
    ("int", "VERIFY_BLOCKS"),
    ("int", "VERIFY_LARGE_BLOCKS"),
    ("int", "VERIFY_GROUP"),
    ("int", "WRITE_THREADS"),
    ("int", "WRITE_BLOCKS"),
    ("int", "WRITE_WALK_THREADS"),
    ("int", "WRITE_SCAN_THREADS"),
    ("int", "WRITE_SCAN_ITEMS"),
    ("int", "PLAN_OFFSETS_SINGLE_THREADS"),
    ("int", "PLAN_OFFSETS_TILE_THREADS"),
    ("int", "PLAN_OFFSETS_SCAN_THREADS"),
    ("int", "PLAN_OFFSETS_TILE"),
    ("int", "PLAN_ENTRIES_THREADS"),
    ("int", "SCATTER_THREADS"),
    ("int", "MOVE_THREADS"),
)

_SUFFIX = {"int": "", "unsigned long long": "ull"}

STEMS = ("move", "plan_entries", "plan_offsets", "scatter", "verify", "write")
"""The kernels, one `kernels/<stem>.cu` each."""


def _camel_case(name: str) -> str:
    return "".join(word.capitalize() for word in name.lower().split("_"))


def prelude() -> str:
    """The constants of the contract as C++ definitions."""
    lines = [
        f"constexpr {kind} k{_camel_case(name)} = {getattr(constants, name)}{_SUFFIX[kind]};"
        for kind, name in _INJECTED
    ]
    for prefix, bits in (("Status", constants.StatusBit), ("Fail", constants.FailReason)):
        lines += [f"constexpr int k{prefix}{_camel_case(bit.name or '')} = {bit.value};" for bit in bits]
    return "\n".join(lines)


def read_kernel_file(name: str) -> str:
    """Text of one file of the folder `kernels/`."""
    for folder in _FOLDERS:
        path = folder / name
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise error("kv-canary-sources-must-be-installed", name=name, got="no such file beside the package")


@functools.cache
def joined_source(stem: str) -> str:
    """The one string that is compiled for `stem`; compile errors name the original file and line."""
    parts = ['#line 1 "constants"', prelude()]
    for name in ("common.cuh", f"{stem}.cu"):
        parts += [f'#line 1 "kernels/{name}"', read_kernel_file(name)]
    return "\n".join(parts)
