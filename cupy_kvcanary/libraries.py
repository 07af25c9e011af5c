"""Array libraries that the caller has imported: found in `sys.modules`, never imported here."""

from __future__ import annotations

import sys
from typing import Any, Literal

from .catalogue import error

Library = Literal["numpy", "cupy", "torch", "jax"]

_ARRAY_CLASSES: dict[Library, str] = {"numpy": "ndarray", "cupy": "ndarray", "torch": "Tensor", "jax": "Array"}
_ON_ONE_DEVICE_TYPE = {"numpy": "cpu", "cupy": "cuda"}
_LIBRARIES_OF_DEVICE_TYPE: dict[str, Library] = {"cpu": "numpy", "cuda": "cupy"}


def _is_of(array: Any, library: str, cls: str) -> bool:
    # A module that another thread is importing right now may not have its class yet.
    return isinstance(array, getattr(sys.modules.get(library), cls, ()))


def library_of(array: Any) -> Library | None:
    """The library that an array is of; None for any other object."""
    return next((library for library, cls in _ARRAY_CLASSES.items() if _is_of(array, library, cls)), None)


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor."""
    return _is_of(array, "torch", "Tensor")


def library_of_results(like: Any, inputs: Any, device_type: str) -> Library:
    """The library that `like` asks for, by name or by an array of it; where it is None, the library of `inputs`.

    Inputs of no library, such as lists, get the arrays that the device's backend computes on.
    """
    library: Library | None
    if like is None:
        library = library_of(inputs) or _LIBRARIES_OF_DEVICE_TYPE[device_type]
    elif isinstance(like, str):
        library = next((known for known in _ARRAY_CLASSES if known == like), None)
    else:
        library = library_of(like)
    if library is None:
        got = repr(like) if isinstance(like, str) else type(like).__name__
        raise error("kv-canary-like-must-be-known", name="like", got=got)
    if _ON_ONE_DEVICE_TYPE.get(library, device_type) != device_type:
        raise error("kv-canary-like-must-fit-the-device", name="like", device=device_type, got=repr(library))
    if library not in _ON_ONE_DEVICE_TYPE and sys.modules.get(library) is None:
        raise error("kv-canary-like-must-be-imported", name="like", got=repr(library))
    return library


def share(arrays: list[Any], library: Library) -> list[Any]:
    """The NumPy or CuPy arrays as those of a library, in the same memory."""
    if library in _ON_ONE_DEVICE_TYPE:
        return arrays
    module = sys.modules[library]
    if library == "torch":
        return [module.from_dlpack(array) for array in arrays]
    # Outside of its 64-bit mode JAX would copy int64 arrays into int32 ones.
    place = module if hasattr(module, "enable_x64") else module.experimental
    with place.enable_x64(True):
        return [module.numpy.from_dlpack(array) for array in arrays]
