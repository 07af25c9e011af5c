"""Checks of arguments, by argument name: pure, no backend. Each raises the catalogue's error, or returns."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from .catalogue import error
from .constants import INT32_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .arrays import ArrayView

INT64 = ("int64",)
INT32 = ("int32",)
UINT8 = ("uint8",)
INT32_OR_INT64 = ("int32", "int64")


def check_int(name: str, value: Any) -> int:
    """`value` as a Python int; bools, floats and arrays are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise error("kv-canary-must-be-an-int", name=name, got=repr(value))
    try:
        return operator.index(value)
    except TypeError:
        raise error("kv-canary-must-be-an-int", name=name, got=repr(value)) from None


def check_bool(name: str, value: Any) -> bool:
    """`value` as a Python bool; numbers and arrays are refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise error("kv-canary-must-be-a-bool", name=name, got=repr(value))
    return bool(value)


def check_padding_slot(padding_slot: Any) -> int:
    """The padding slot as the kernels take it: -1 for None."""
    if padding_slot is None:
        return -1
    slot = check_int("padding_slot", padding_slot)
    check_non_negative("padding_slot", slot)
    check_fits_int32("padding_slot", slot)
    return slot


def check_non_negative(name: str, value: int) -> None:
    """0 or more."""
    if value < 0:
        raise error("kv-canary-must-be-non-negative", name=name, got=value)


def check_positive(name: str, value: int) -> None:
    """1 or more."""
    if value <= 0:
        raise error("kv-canary-must-be-positive", name=name, got=value)


def check_at_most(name: str, value: int, most: int) -> None:
    """No more than `most`."""
    if value > most:
        raise error("kv-canary-must-be-at-most", name=name, most=most, got=value)


def check_fits_int32(name: str, value: int) -> None:
    """At most 2^31 - 1: what the kernels, or the output that reports it, have room for."""
    check_at_most(name, value, INT32_MAX)


def check_window(name: str, value: Any) -> int:
    """Tokens of a sliding window, 0 for none, as the kernels take it."""
    window = check_int(name, value)
    check_non_negative(name, window)
    check_at_most(name, window, 2**63 - 1)
    return window


def check_contiguous(name: str, view: ArrayView) -> None:
    """Elements one after another in C order."""
    if not view.is_contiguous:
        raise error("kv-canary-must-be-contiguous", name=name)


def check_contiguous_rows(name: str, view: ArrayView) -> None:
    """Elements of each row of a 2-D array one after another; rows any distance apart."""
    if view.size and view.shape[1] > 1 and view.strides[1] != view.itemsize:
        raise error("kv-canary-must-have-contiguous-rows", name=name, got=view.strides)


def check_dtype(name: str, view: ArrayView, dtypes: tuple[str, ...]) -> None:
    """One of the plain dtype names, with every element at a multiple of its size, as the kernels' loads need it."""
    if view.dtype not in dtypes:
        raise error("kv-canary-must-have-dtype", name=name, expected=" or ".join(dtypes), got=view.dtype)
    check_aligned(name, view, view.itemsize)
    for extent, stride in zip(view.shape, view.strides, strict=True):
        if extent > 1:
            check_multiple(f"stride of {name} in bytes", stride, view.itemsize)


def check_rank(name: str, view: ArrayView, rank: int) -> None:
    """Number of dimensions."""
    if len(view.shape) != rank:
        raise error("kv-canary-must-be-n-d", name=name, rank=rank, got=view.shape)


def check_length(name: str, length: int, expected: int) -> None:
    """Exactly this many elements."""
    if length != expected:
        raise error("kv-canary-length-must-be", name=name, expected=expected, got=length)


def check_length_at_least(name: str, length: int, least: int) -> None:
    """At least this many elements."""
    if length < least:
        raise error("kv-canary-length-must-be-at-least", name=name, least=least, got=length)


def check_multiple(name: str, value: int, factor: int) -> None:
    """A multiple of `factor`."""
    if value % factor:
        raise error("kv-canary-must-be-a-multiple", name=name, factor=factor, got=value)


def check_aligned(name: str, view: ArrayView, alignment: int) -> None:
    """First element, if there is one, at a multiple of `alignment` bytes."""
    if view.pointer % alignment and view.size:
        raise error("kv-canary-must-be-aligned", name=name, alignment=alignment, got=hex(view.pointer))


def check_one_int32(name: str, view: ArrayView) -> None:
    """One number in device memory."""
    check_contiguous(name, view)
    check_dtype(name, view, INT32)
    check_rank(name, view, 1)
    check_length(name, view.size, 1)


def check_one_device(views: Mapping[str, ArrayView]) -> None:
    """All on the first array's device."""
    reference, first = next(iter(views.items()))
    for name, view in views.items():
        if view.device != first.device:
            raise error(
                "kv-canary-must-be-on-one-device",
                name=name,
                reference=reference,
                expected=first.device,
                got=view.device,
            )


def check_writable(name: str, view: ArrayView) -> None:
    """An output may be written."""
    if view.read_only:
        raise error("kv-canary-must-be-writable", name=name)


def check_no_overlap(views: Mapping[str, ArrayView], outputs: Iterable[str]) -> None:
    """No output shares memory with any other argument."""
    outputs = list(outputs)
    if not _is_any_output_shared(views, frozenset(outputs)):
        return
    seen: list[str] = []
    for name in outputs:
        for other in views:
            if other != name and other not in seen and views[name].overlaps(views[other]):
                raise error("kv-canary-must-not-overlap", name=name, other=other)
        seen.append(name)


def _is_any_output_shared(views: Mapping[str, ArrayView], outputs: frozenset[str]) -> bool:
    """In one pass over the arrays by address: every launch pays for it. All are on one device."""
    end_of_any = end_of_outputs = 0
    for (first, end), is_output in sorted((view.span, name in outputs) for name, view in views.items()):
        if first == end:
            continue
        if first < (end_of_any if is_output else end_of_outputs):
            return True
        end_of_any = max(end_of_any, end)
        if is_output:
            end_of_outputs = max(end_of_outputs, end)
    return False
