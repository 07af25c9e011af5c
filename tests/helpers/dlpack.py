"""DLPack producers made by hand: the C structures of dlpack.h as packed bytes, in a capsule, without any library."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CPU, CUDA, CUDA_HOST, VULKAN, CUDA_MANAGED = 1, 2, 3, 7, 13
INT, UINT, FLOAT, BFLOAT, BOOL, FP8_E4M3FN, FP8_E5M2, FP4_E2M1FN = 0, 1, 2, 4, 6, 10, 12, 17

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _Destructor)


def exported(array: Any, device: tuple[int, int]) -> Producer:
    """A producer for a NumPy or CuPy array of integers."""
    pointer = array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr
    dtype = (INT if array.dtype.kind == "i" else UINT, 8 * array.itemsize, 1)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Producer(pointer, array.shape, strides, dtype, device=device, owner=array)


@dataclass
class Producer:
    """Exports memory at an address through DLPack, with whatever it is told to say about it."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None: a null pointer."""
    dtype: tuple[int, int, int] = (INT, 64, 1)
    """Code, bits, lanes."""
    byte_offset: int = 0
    device: tuple[int, int] = (CPU, 0)
    version: tuple[int, int] | None = (1, 0)
    """None: a capsule of before 1.0."""
    flags: int = 0
    owner: Any = None
    """What keeps the memory."""
    on_release: Callable[[], None] = lambda: None
    exports: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of each `__dlpack__` call."""
    _alive: list[Any] = field(default_factory=list)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if self.version is None and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.exports.append(options)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * len(self.strides))(*self.strides)
        tensor = struct.pack(
            "PiiiBBHPPQ",
            self.pointer,
            *self.device,
            len(self.shape),
            *self.dtype,
            ctypes.addressof(shape),
            0 if strides is None else ctypes.addressof(strides),
            self.byte_offset,
        )
        if self.version is None:
            name, managed = b"dltensor", tensor + struct.pack("PP", 0, 0)
        else:
            name, managed = b"dltensor_versioned", struct.pack("IIPPQ", *self.version, 0, 0, self.flags) + tensor
        memory = ctypes.create_string_buffer(managed)
        release = _Destructor(lambda capsule: self.on_release())
        self._alive += [shape, strides, memory, release]
        return _new_capsule(ctypes.addressof(memory), name, release)
