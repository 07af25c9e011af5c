"""Arrays of any producer are seen in place: pointer, shape, strides, dtype, device, read-only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError
from cupy_kvcanary.arrays import CPU, Device, stream_handle, view_array


def test_numpy() -> None:
    array = np.zeros((3, 4), np.int32)[:, 1:3]
    view = view_array("a", array)
    assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, (3, 2), (16, 4))
    assert (view.dtype, view.itemsize, view.device, view.read_only) == ("int32", 4, CPU, False)
    assert view.row_stride == 4
    assert not view.is_contiguous
    assert view.as_numpy() is array


class Exporter:
    """A producer that has nothing but DLPack, of before (no max_version) or after 1.0."""

    def __init__(self, array: np.ndarray[Any, Any], is_versioned: bool) -> None:
        self._array = array
        self._is_versioned = is_versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self._is_versioned and "max_version" in options:
            raise TypeError("max_version")
        return self._array.__dlpack__(**options)


@pytest.mark.parametrize("is_versioned", [False, True])
def test_dlpack_shares_memory(is_versioned: bool) -> None:
    array = np.arange(24, dtype=np.int64).reshape(4, 6)[1:, ::2]
    view = view_array("a", Exporter(array, is_versioned))
    assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, array.shape, array.strides)
    assert (view.dtype, view.device, view.read_only) == ("int64", CPU, False)
    np.testing.assert_array_equal(view.as_numpy(), array)
    view.as_numpy()[0, 0] = -1
    assert array[0, 0] == -1


def test_dlpack_without_elements() -> None:
    view = view_array("a", Exporter(np.zeros((0, 5), np.int32), True))
    assert (view.shape, view.size, view.is_contiguous) == ((0, 5), 0, True)
    assert view.as_numpy().shape == (0, 5)


class CudaExporter:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "typestr": "<i8", **interface}


def test_cuda_array_interface() -> None:
    view = view_array("a", CudaExporter(shape=(2, 3), data=(4096, True)))
    assert (view.pointer, view.shape, view.strides) == (4096, (2, 3), (24, 8))
    assert (view.dtype, view.device, view.read_only) == ("int64", Device("cuda", 0), True)


def test_odd_strides_of_single_elements_are_contiguous() -> None:
    view = view_array("a", CudaExporter(shape=(1, 3), strides=(999, 8), data=(4096, False)))
    assert view.is_contiguous
    assert view.row_stride == 3


def test_overlap() -> None:
    memory = np.zeros(10, np.int64)
    whole, head, tail = (view_array("a", array) for array in (memory, memory[:5], memory[5:]))
    assert whole.overlaps(head)
    assert not head.overlaps(tail)
    assert not head.overlaps(view_array("a", memory[2:2]))
    assert view_array("a", memory[8:2:-1]).overlaps(tail)


class CupyLikeStream:
    ptr = 7


class TorchLikeStream:
    cuda_stream = 8


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 9


@pytest.mark.parametrize(
    ("stream", "handle"), [(5, 5), (0, 0), (CupyLikeStream(), 7), (TorchLikeStream(), 8), (ProtocolStream(), 9)]
)
def test_streams_of_any_library(stream: Any, handle: int) -> None:
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [True, "0", 1.0])
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(KvCanaryError, match="stream must be None, an int handle or a stream object"):
        stream_handle(stream)
