"""One view of any producer's array, zero-copy. No array library is imported but NumPy."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .catalogue import error
from .libraries import library_of
from .streams import dlpack_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


@dataclass(frozen=True, slots=True)
class Device:
    """Where an array's memory is: `cpu`, or `cuda` with its index."""

    type: str
    index: int

    def __str__(self) -> str:
        return "cpu" if self.type == "cpu" else f"{self.type}:{self.index}"


CPU = Device("cpu", 0)


def as_device(device: Any) -> Device:
    """A device named by a string (`cpu`, `cuda`, `cuda:1`) or by torch's, CuPy's or this package's device object."""
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        kind, colon, index = device.partition(":")
        if kind == "cpu" and not colon:
            return CPU
        if kind == "cuda" and (not colon or index.isdecimal()):
            return Device("cuda", int(index or 0))
    elif getattr(device, "type", None) in ("cpu", "cuda"):  # torch.device
        return CPU if device.type == "cpu" else Device("cuda", device.index or 0)
    elif isinstance(getattr(device, "id", None), int):  # cupy.cuda.Device
        return Device("cuda", device.id)
    raise error("kv-canary-must-name-a-device", name="device", got=repr(device))


class ArrayView(NamedTuple):
    """Memory of someone else's array, kept alive by the view. (A tuple, because it is made for every argument.)"""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from one element to the next, per dimension."""
    dtype: str
    """Plain name, such as `int64`."""
    itemsize: int
    device: Device
    read_only: bool
    owner: Any
    """The array itself."""
    capsule: Any = None
    """Its DLPack capsule, where the memory was found through one."""
    stream: int | None = None
    """The stream that its producer works on, where the array says so."""

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another in C order (strides of extents below 2 do not matter)."""
        if 0 in self.shape:
            return True
        expected = self.itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def row_stride(self) -> int:
        """Elements from one row of a 2-D array to the next; the row's length where it has no second row."""
        rows, columns = self.shape
        return columns if rows <= 1 or columns == 0 else self.strides[0] // self.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """First address and the one after the last that the elements occupy."""
        first = end = self.pointer
        for extent, stride in zip(self.shape, self.strides, strict=True):
            if extent == 0:
                return self.pointer, self.pointer
            if stride < 0:
                first += (extent - 1) * stride
            else:
                end += (extent - 1) * stride
        return first, end + self.itemsize

    def overlaps(self, other: ArrayView) -> bool:
        """Whether both occupy a common address (interleaved views count as overlapping)."""
        if self.device != other.device:
            return False
        (first, end), (other_first, other_end) = self.span, other.span
        return first < other_end and other_first < end and first < end and other_first < other_end

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The same memory as a NumPy array; only for arrays on the CPU."""
        owner = self.owner
        # A view of an array's bytes has another shape than its owner.
        if isinstance(owner, np.ndarray) and (owner.shape, owner.dtype.name) == (self.shape, self.dtype):
            return owner
        return np.asarray(_NumpyInterface(self))


class _NumpyInterface:
    """Lets NumPy see the memory of a view, and keeps the view's owner alive."""

    def __init__(self, view: ArrayView) -> None:
        self._view = view
        self.__array_interface__ = {
            "version": 3,
            "data": (view.pointer, view.read_only),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": np.dtype(view.dtype).str,
        }


def view_array(name: str, array: Any) -> ArrayView:
    """See the memory of `array` (NumPy, anything with `__dlpack__`, or `__cuda_array_interface__`) without copying it.

    torch and CuPy arrays are read attribute by attribute, several times faster than through DLPack, and their streams
    are left alone: kernels are launched on the stream of the array's own library.
    """
    viewer = _viewers.get(type(array))
    if viewer is None:
        viewer = _viewers[type(array)] = _find_viewer(array)
    view = viewer(name, array)
    if not view.pointer and view.size:
        raise error("kv-canary-must-have-memory", name=name, got=type(array).__name__)
    return view


# By the array's exact type, so that a library is looked for once for each.
_viewers: dict[type, Callable[[str, Any], ArrayView]] = {}


def _find_viewer(array: Any) -> Callable[[str, Any], ArrayView]:
    has_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    library = library_of(array)
    if library == "numpy":
        return _view_numpy
    if library == "torch":
        return _view_torch
    if library == "cupy":
        return _view_cupy
    if library == "jax" and has_dlpack:  # a tracer has no memory
        return _view_jax
    if has_dlpack:
        return _view_dlpack
    if hasattr(array, "__cuda_array_interface__"):
        return _view_cuda_array_interface
    if hasattr(array, "__array_interface__"):
        return lambda name, exporter: _view_numpy(name, np.asarray(exporter))
    return _refuse


def _refuse(name: str, array: Any) -> ArrayView:
    raise error("kv-canary-must-be-an-array", name=name, got=type(array).__name__)


def is_array(value: Any) -> bool:
    """Whether `value` is an array rather than a number; NumPy's scalars are numbers."""
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")


def view_arrays(named: Mapping[str, Any], optional: Collection[str]) -> dict[str, ArrayView]:
    """Views of arrays by name; an optional one may be None and is left out."""
    return {name: view_array(name, array) for name, array in named.items() if not (array is None and name in optional)}


def _view_numpy(name: str, array: np.ndarray[Any, Any]) -> ArrayView:
    dtype = array.dtype
    return ArrayView(
        array.__array_interface__["data"][0],
        array.shape,
        array.strides,
        _numpy_dtype_name(dtype),
        dtype.itemsize,
        CPU,
        not array.flags.writeable,
        array,
    )


# `dtype.name` is put together anew at each call, and does not tell a foreign byte order.
_numpy_dtype_name = functools.cache(lambda dtype: dtype.name if dtype.isnative else dtype.str)


def _view_torch(name: str, tensor: Any) -> ArrayView:
    if tensor.requires_grad:
        raise error("kv-canary-must-not-require-grad", name=name, got=tensor)
    device = tensor.device
    place = _torch_device(device)
    if place is None:
        raise error("kv-canary-must-be-on-a-known-device", name=name, got=device)
    dtype, itemsize = _torch_dtype(tensor.dtype)
    try:
        strides = tuple([stride * itemsize for stride in tensor.stride()])
        pointer = tensor.data_ptr()
    except RuntimeError:  # a sparse or otherwise unusual tensor has no memory of its own
        return _refuse(name, tensor)
    return ArrayView(pointer, tuple(tensor.shape), strides, dtype, itemsize, place, False, tensor)


@functools.cache
def _torch_dtype(dtype: Any) -> tuple[str, int]:
    return str(dtype).removeprefix("torch."), dtype.itemsize


@functools.cache
def _torch_device(device: Any) -> Device | None:
    if device.type == "cpu":
        return CPU
    return Device("cuda", device.index) if device.type == "cuda" else None


def _view_cupy(name: str, array: Any) -> ArrayView:
    dtype, memory = array.dtype, array.data
    return ArrayView(
        memory.ptr,
        array.shape,
        array.strides,
        _numpy_dtype_name(dtype),
        dtype.itemsize,
        _cuda_device(memory.device_id),
        False,
        array,
    )


@functools.cache
def _cuda_device(index: int) -> Device:
    return Device("cuda", index)


def _view_cuda_array_interface(name: str, array: Any) -> ArrayView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        return _refuse(name, array)
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    pointer, read_only = interface["data"]
    return ArrayView(
        pointer or 0,
        shape,
        tuple(interface.get("strides") or _dense_strides(shape, dtype.itemsize)),
        _numpy_dtype_name(dtype),
        dtype.itemsize,
        Device("cuda", _device_index_of(pointer or 0)),
        read_only,
        array,
        stream=interface.get("stream"),
    )


_CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


def _device_index_of(pointer: int) -> int:
    """The device that memory belongs to, which `__cuda_array_interface__` does not say; 0 if the driver cannot."""
    index, driver = ctypes.c_int(), _cuda_driver()
    if driver is None:
        return 0
    status = driver.cuPointerGetAttribute(
        ctypes.byref(index), _CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ctypes.c_uint64(pointer)
    )
    return index.value if status == 0 else 0


@functools.cache
def _cuda_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    for extent in reversed(shape):
        strides.append(itemsize)
        itemsize *= extent
    return tuple(reversed(strides))


# -- DLPack: the C structures of dlpack.h 1.x, read in place ------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_DL_READ_ONLY = 1
_DL_VERSION = (1, 0)
# Pinned host memory is host memory; managed memory is used from the device.
_DL_DEVICE_TYPES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}
_DL_TYPE_NAMES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype = ctypes.c_int
_capsule_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _view_dlpack(
    name: str, array: Any, stream_of: Callable[[int], int | None] = dlpack_stream, is_immutable: bool = False
) -> ArrayView:
    if getattr(array, "requires_grad", False) is True:
        raise error("kv-canary-must-not-require-grad", name=name, got=array)
    try:
        dl_type, dl_index = array.__dlpack_device__()
        device_type = _DL_DEVICE_TYPES.get(int(dl_type))
        if device_type is None:
            raise error("kv-canary-must-be-on-a-known-device", name=name, got=f"DLPack device type {int(dl_type)}")
        stream = stream_of(dl_index) if device_type == "cuda" else None
        try:
            capsule = array.__dlpack__(stream=stream, max_version=_DL_VERSION)
        except TypeError:  # a producer of before DLPack 1.0
            capsule = array.__dlpack__(stream=stream)
    except BufferError as reason:
        raise error("kv-canary-must-be-exported", name=name, got=str(reason)) from reason
    # The capsule is read but not consumed: it frees the producer's handle itself when the view dies.
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _DL_VERSION[0]:
            raise error("kv-canary-must-be-exported", name=name, got=f"DLPack {managed.major}.{managed.minor}")
        tensor, read_only = managed.tensor, bool(managed.flags & _DL_READ_ONLY)
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor, read_only = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor")), False
    else:
        raise error("kv-canary-must-be-exported", name=name, got="no unused DLPack capsule")
    dtype, itemsize = _dlpack_dtype(name, tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = (
        tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
        if tensor.strides
        else _dense_strides(shape, itemsize)
    )
    return ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        itemsize,
        CPU if device_type == "cpu" else _cuda_device(dl_index),
        read_only or is_immutable,
        array,
        capsule,
    )


def _dlpack_dtype(name: str, code: int, bits: int, lanes: int) -> tuple[str, int]:
    dtype = _DL_TYPE_NAMES.get((code, bits), f"DLPack type {code} of {bits} bits")
    if lanes != 1:
        dtype = f"{dtype}x{lanes}"
    if bits * lanes % 8:
        raise error("kv-canary-must-have-dtype", name=name, expected="of whole bytes", got=dtype)
    return dtype, bits * lanes // 8


def _view_jax(name: str, array: Any) -> ArrayView:
    # Without a stream, JAX waits for the values on the host. Its arrays are immutable, but its capsules do not say so.
    return _view_dlpack(name, array, stream_of=lambda index: None, is_immutable=True)
