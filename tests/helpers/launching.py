"""Launches whose arguments are host arrays, also those within page tables and plans; on the GPU between guard words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from cupy_kvcanary.launch import BACKENDS, NumpyBackend
from tests.helpers.guards import GuardedBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.helpers.backends import ArrayBackend


def map_arrays(value: Any, change: Callable[[np.ndarray[Any, Any]], Any]) -> Any:
    """An argument with its arrays changed."""
    if isinstance(value, np.ndarray):
        return change(value)
    if isinstance(value, dict):
        return {name: map_arrays(item, change) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_arrays(getattr(value, name), change) for name in fields})
    return value


def arrays_of(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The arrays of arguments, by argument and field name."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from arrays_of(item, key)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from arrays_of(getattr(value, field.name), field.name)


def launch_in_place(backend: ArrayBackend, launcher: Callable[..., None], arguments: dict[str, Any]) -> None:
    """Launch on the backend's device; the arrays of `arguments` hold the result.

    The host backends have guards or red zones around every array, the GPU has guard words.
    """
    if not backend.is_gpu:
        launcher(**arguments)
        return
    guarded = GuardedBackend(backend.name)
    copies = []

    def on_device(array: np.ndarray[Any, Any]) -> Any:
        copies.append((array, guarded.array(array)))
        return copies[-1][1]

    launcher(**map_arrays(arguments, on_device))
    guarded.check()
    for array, copy in copies:
        array[...] = guarded.to_numpy(copy)


def assert_as_numpy(backend: ArrayBackend, launcher: Callable[..., None], arguments: dict[str, Any]) -> None:
    """The launch leaves every array as the NumPy twin does."""
    expected = map_arrays(arguments, np.copy)
    with mock.patch.dict(BACKENDS, cpu=NumpyBackend()):
        launcher(**expected)
    launch_in_place(backend, launcher, arguments)
    for (name, array), (_, value) in zip(arrays_of(arguments), arrays_of(expected), strict=True):
        np.testing.assert_array_equal(array, value, err_msg=name)
