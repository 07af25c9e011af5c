"""Arrays of any producer are seen in place: pointer, shape, strides, dtype, device, read-only."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, KvCanaryRuntimeError, plan_offsets
from cupy_kvcanary.arrays import CPU, Device, view_array
from cupy_kvcanary.checks import INT32, INT64, check_dtype, check_writable
from tests.helpers import dlpack
from tests.helpers.dlpack import Producer


def test_numpy() -> None:
    array = np.zeros((3, 4), np.int32)[:, 1:3]
    view = view_array("a", array)
    assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, (3, 2), (16, 4))
    assert (view.dtype, view.itemsize, view.device, view.read_only) == ("int32", 4, CPU, False)
    assert view.row_stride == 4
    assert not view.is_contiguous
    assert view.as_numpy() is array


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


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.arange(24, dtype=np.int64)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)])
class TestCapsules:
    """DLPack capsules of before and after 1.0, read as the C structures say."""

    def test_strides_count_elements_and_the_offset_counts_bytes(
        self, memory: np.ndarray[Any, Any], version: Any
    ) -> None:
        producer = Producer(memory.ctypes.data, (2, 3), (6, 2), byte_offset=8, version=version)
        view = view_array("a", producer)
        assert (view.pointer, view.shape, view.strides) == (memory.ctypes.data + 8, (2, 3), (48, 16))
        assert (view.dtype, view.itemsize, view.device, view.read_only) == ("int64", 8, CPU, False)
        assert view.as_numpy().tolist() == [[1, 3, 5], [7, 9, 11]]

    def test_null_strides_are_dense(self, memory: np.ndarray[Any, Any], version: Any) -> None:
        view = view_array("a", Producer(memory.ctypes.data, (2, 3, 4), None, version=version))
        assert (view.strides, view.is_contiguous) == ((96, 32, 8), True)

    def test_no_elements_at_a_null_pointer(self, version: Any) -> None:
        view = view_array("a", Producer(0, (0, 5), (5, 1), version=version))
        assert (view.pointer, view.size, view.is_contiguous, view.span) == (0, 0, True, (0, 0))

    def test_a_scalar(self, memory: np.ndarray[Any, Any], version: Any) -> None:
        view = view_array("a", Producer(memory.ctypes.data, (), None, version=version))
        assert (view.shape, view.size, view.as_numpy().item()) == ((), 1, 0)

    def test_the_producers_handle_lives_as_long_as_the_view(self, memory: np.ndarray[Any, Any], version: Any) -> None:
        released: list[bool] = []
        producer = Producer(memory.ctypes.data, (3,), version=version, on_release=lambda: released.append(True))
        view = view_array("a", producer)
        array = view.as_numpy()
        del view
        assert (array.tolist(), released) == ([0, 1, 2], [])
        del array
        assert released == [True]

    @pytest.mark.parametrize(
        ("device", "seen", "stream"),
        [
            ((dlpack.CPU, 0), CPU, None),
            ((dlpack.CUDA_HOST, 1), CPU, None),  # pinned: host memory
            ((dlpack.CUDA, 0), Device("cuda", 0), 1),
            ((dlpack.CUDA_MANAGED, 0), Device("cuda", 0), 1),
        ],
    )
    def test_devices(self, version: Any, device: Any, seen: Device, stream: int | None) -> None:
        """On CUDA the producer is asked to order its work before the current stream, here the default one."""
        producer = Producer(4096, (3,), device=device, version=version)
        assert view_array("a", producer).device == seen
        assert producer.exports[0]["stream"] == stream

    @pytest.mark.parametrize(
        ("dtype", "seen", "itemsize"),
        [
            ((dlpack.INT, 32, 1), "int32", 4),
            ((dlpack.UINT, 8, 1), "uint8", 1),
            ((dlpack.FLOAT, 16, 1), "float16", 2),
            ((dlpack.BFLOAT, 16, 1), "bfloat16", 2),
            ((dlpack.BOOL, 8, 1), "bool", 1),
            ((dlpack.FP8_E4M3FN, 8, 1), "float8_e4m3fn", 1),
            ((dlpack.FP8_E5M2, 8, 1), "float8_e5m2", 1),
            ((dlpack.INT, 32, 2), "int32x2", 8),  # no int64
            ((dlpack.FP4_E2M1FN, 4, 2), "DLPack type 17 of 4 bitsx2", 1),
            ((99, 24, 1), "DLPack type 99 of 24 bits", 3),
        ],
    )
    def test_dtypes(self, version: Any, dtype: Any, seen: str, itemsize: int) -> None:
        view = view_array("a", Producer(4096, (3,), dtype=dtype, version=version))
        assert (view.dtype, view.itemsize, view.strides) == (seen, itemsize, (itemsize,))

    def test_parts_of_bytes_are_refused(self, version: Any) -> None:
        with pytest.raises(KvCanaryError, match="a must have dtype of whole bytes, got DLPack type 17 of 4 bits"):
            view_array("a", Producer(4096, (3,), dtype=(dlpack.FP4_E2M1FN, 4, 1), version=version))

    def test_an_unknown_device_is_refused_before_the_export(self, version: Any) -> None:
        producer = Producer(4096, (3,), device=(dlpack.VULKAN, 0), version=version)
        with pytest.raises(KvCanaryError, match="a must be on a CPU or CUDA device, got DLPack device type 7"):
            view_array("a", producer)
        assert producer.exports == []


@pytest.mark.parametrize(("flags", "is_read_only"), [(0, False), (1, True), (2, False), (3, True)])
def test_the_read_only_flag_is_honoured(flags: int, is_read_only: bool) -> None:
    """Bit 1 says that the memory was copied, which does not matter."""
    view = view_array("a", Producer(4096, (3,), flags=flags))
    assert view.read_only is is_read_only
    if is_read_only:
        with pytest.raises(KvCanaryError, match="a must be writable, got a read-only array"):
            check_writable("a", view)


def test_a_later_major_version_is_refused() -> None:
    with pytest.raises(KvCanaryError, match=r"a must be exported by its library through DLPack, got DLPack 2\.1"):
        view_array("a", Producer(4096, (3,), version=(2, 1)))


def test_a_capsule_that_was_consumed_is_refused() -> None:
    class HandsOutAgain(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            capsule = super().__dlpack__(**options)
            rename = ctypes.pythonapi.PyCapsule_SetName
            rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
            rename(capsule, b"used_dltensor_versioned")
            return capsule

    with pytest.raises(KvCanaryError, match="a must be exported by its library through DLPack, got no unused DLPack"):
        view_array("a", HandsOutAgain(4096, (3,)))


@pytest.mark.parametrize(
    "array", [Producer(0, (3,)), CudaExporter(shape=(3,), data=(0, False))], ids=["DLPack", "CUDA array interface"]
)
def test_elements_without_memory_are_refused(array: Any) -> None:
    """A tensor whose storage was freed."""
    with pytest.raises(KvCanaryError, match=r"a must have memory, got a .* with elements at address 0"):
        view_array("a", array)


def test_misaligned_elements_are_refused(memory: np.ndarray[Any, Any]) -> None:
    misaligned = Producer(memory.ctypes.data, (3,), byte_offset=4)
    with pytest.raises(KvCanaryError, match="a must start at a multiple of 8 bytes, got address 0x"):
        check_dtype("a", view_array("a", misaligned), INT64)
    with pytest.raises(KvCanaryError, match="a must have dtype int32, got int64"):
        check_dtype("a", view_array("a", misaligned), INT32)
    check_dtype("a", view_array("a", Producer(memory.ctypes.data, (0,), byte_offset=4)), INT64)


def test_misaligned_rows_are_refused() -> None:
    rows = np.zeros(100, np.uint8)[:72].reshape(2, 36)[:, :32].view(np.int64)
    with pytest.raises(KvCanaryError, match="stride of a in bytes must be a multiple of 8, got 36"):
        check_dtype("a", view_array("a", rows), INT64)
    check_dtype("a", view_array("a", rows[:1]), INT64)
    with pytest.raises(KvCanaryError, match="stride of req_to_token in bytes must be a multiple of 8, got 36"):
        plan_offsets([1], [1], [1], rows)


def test_a_misaligned_argument_is_refused_by_name(memory: np.ndarray[Any, Any]) -> None:
    misaligned = memory.view(np.uint8)[4:12].view(np.int64)
    with pytest.raises(KvCanaryError, match="extend_seq_lens must start at a multiple of 8 bytes"):
        plan_offsets([1], [1], misaligned, [[0, 1]])


def test_a_foreign_byte_order_is_no_dtype_of_the_kernels() -> None:
    with pytest.raises(KvCanaryError, match="prefix_lens must have dtype int32 or int64, got >i8"):
        plan_offsets([1], np.ones(1, ">i8"), [1], [[0, 1]])
    assert view_array("a", CudaExporter(typestr=">i8", shape=(3,), data=(4096, False))).dtype == ">i8"


def test_numpy_interface() -> None:
    """An object that has nothing but `__array_interface__`."""
    array = np.arange(6).reshape(2, 3)
    exporter = type("Exporter", (), {"__array_interface__": array.__array_interface__})()
    view = view_array("a", exporter)
    assert (view.pointer, view.shape, view.device) == (array.ctypes.data, (2, 3), CPU)


def test_broadcast_arrays_are_refused_where_elements_are_written_or_rows_told_apart() -> None:
    view = view_array("a", np.broadcast_to(np.int64(1), (3,)))
    assert (view.strides, view.read_only, view.is_contiguous) == ((0,), True, False)
    assert view_array("a", np.broadcast_to(np.int64(1), (1,))).is_contiguous


def test_a_cuda_array_interface_names_its_stream() -> None:
    assert view_array("a", CudaExporter(shape=(3,), data=(4096, False), stream=77)).stream == 77
    assert view_array("a", CudaExporter(shape=(3,), data=(4096, False), stream=None)).stream is None


def test_a_cuda_array_interface_without_elements_or_with_a_mask() -> None:
    assert view_array("a", CudaExporter(shape=(0,), data=(0, False))).span == (0, 0)
    with pytest.raises(KvCanaryError, match="a must be an array"):
        view_array("a", CudaExporter(shape=(3,), data=(4096, False), mask=np.ones(3, bool)))


def test_arrays_on_a_device_that_the_machine_does_not_have() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    absent = {name: Producer(4096, (3,), device=(dlpack.CUDA, 99)) for name in ("rows", "prefix_lens", "extend")}
    table = Producer(8192, (4, 8), dtype=(dlpack.INT, 32, 1), device=(dlpack.CUDA, 99))
    with pytest.raises(KvCanaryRuntimeError, match="cuda:99 must be a CUDA device of this machine"):
        plan_offsets(*absent.values(), table)
