"""Plans, logs, real-KV sources and contexts: allocation, every check by its exact message, the views that they keep."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    CanaryLaunchTag,
    KvCanaryError,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    ViolationLog,
    WritePlan,
)
from cupy_kvcanary.arrays import CPU, Device, as_device
from cupy_kvcanary.buffers import (
    check_chain,
    check_chain_of,
    forget_chain,
    remember_chain,
    view_buffers,
)
from tests.helpers.plan_errors import aligned_bytes, context, source

if TYPE_CHECKING:
    from collections.abc import Callable

CUDA_0 = {"data": (4096, False), "typestr": "|u1", "version": 3}


class ClaimsCuda:
    """CUDA memory that is never touched."""

    def __init__(self, *shape: int, typestr: str = "|u1") -> None:
        self.__cuda_array_interface__ = CUDA_0 | {"shape": shape, "typestr": typestr}


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def assert_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(KvCanaryError) as caught:
        call()
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"


# -- plans and logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [VerifyPlan, WritePlan, ViolationLog])
@pytest.mark.parametrize("capacity", [0, 1, 1000])
def test_allocation(cls: Any, capacity: int) -> None:
    plan = cls.allocate(capacity)
    arrays = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    assert cls.allocation_bytes(capacity) == sum(array.nbytes for array in arrays.values())
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        assert (array == (1 if name == "enable" else 0)).all(), name


def test_allocation_of_a_context() -> None:
    canary = VerifyOrWriteContext.allocate(10, kernel_kind=CanaryLaunchTag.TAIL_V_SWA, slot_bytes=48, ring_capacity=7)
    names = ("canary_buf", "violation_ring", "violation_write_index", "slot_run_counter", "kernel_run_counter")
    arrays = [getattr(canary, name) for name in names]
    assert [array.shape for array in arrays] == [(10, 48), (7, 8), (1,), (1,), (1,)]
    assert sum(array.nbytes for array in arrays) == VerifyOrWriteContext.allocation_bytes(
        10, slot_bytes=48, ring_capacity=7
    )
    assert canary.kernel_kind == 9
    assert_refused(lambda: VerifyOrWriteContext.allocate(-1, kernel_kind=0), "num_slots must be non-negative, got -1")


def test_shapes_and_dtypes_of_what_is_allocated() -> None:
    shapes = {
        field.name: (getattr(plan, field.name).shape, getattr(plan, field.name).dtype.name)
        for plan in (VerifyPlan.allocate(5), WritePlan.allocate(3, "cpu"), ViolationLog.allocate(4, CPU))
        for field in dataclasses.fields(plan)
    }
    assert shapes == {
        "verify_slot_indices": ((5,), "int64"),
        "verify_expected_tokens": ((5,), "int64"),
        "verify_expected_positions": ((5,), "int64"),
        "verify_prev_slot_indices": ((5,), "int64"),
        "verify_num_valid": ((1,), "int32"),
        "enable": ((1,), "int32"),
        "write_offsets": ((4,), "int64"),
        "write_seed_slot_indices": ((3,), "int64"),
        "write_num_valid_reqs": ((1,), "int32"),
        "violation_ring": ((4, 8), "int64"),
        "violation_write_index": ((1,), "int32"),
    }


@pytest.mark.parametrize(
    ("cls", "name"),
    [(VerifyPlan, "verify_capacity"), (WritePlan, "write_req_capacity"), (ViolationLog, "ring_capacity")],
)
def test_a_bad_capacity_is_refused(cls: Any, name: str) -> None:
    for call in (cls.allocate, cls.allocation_bytes):
        assert_refused(lambda call=call: call(-1), f"{name} must be non-negative, got -1")
        assert_refused(lambda call=call: call(2.0), f"{name} must be an int, got 2.0")
    assert_refused(lambda: cls.allocate(1, "gpu"), "device must be cpu, cuda, cuda:N or a device object, got 'gpu'")


@pytest.mark.parametrize("value", [VerifyPlan.allocate(1), WritePlan.allocate(1), ViolationLog.allocate(1), source()])
def test_types_are_frozen_and_keyword_only(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
    with pytest.raises(TypeError, match="positional argument"):
        type(value)(getattr(value, name))


class LikeTorchDevice:
    def __init__(self, kind: str, index: int | None) -> None:
        self.type, self.index = kind, index


class LikeCupyDevice:
    id = 3


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", CPU),
        ("cuda", Device("cuda", 0)),
        ("cuda:12", Device("cuda", 12)),
        (Device("cuda", 2), Device("cuda", 2)),
        (LikeTorchDevice("cpu", None), CPU),
        (LikeTorchDevice("cuda", None), Device("cuda", 0)),
        (LikeTorchDevice("cuda", 1), Device("cuda", 1)),
        (LikeCupyDevice(), Device("cuda", 3)),
    ],
)
def test_devices_of_any_library(device: Any, expected: Device) -> None:
    assert as_device(device) == expected


@pytest.mark.parametrize("device", ["cpu:0", "cuda:", "cuda:x", "cuda:-1", "CUDA", "", 0, None])
def test_what_names_no_device(device: Any) -> None:
    assert_refused(lambda: as_device(device), f"device must be cpu, cuda, cuda:N or a device object, got {device!r}")


# -- real KV ------------------------------------------------------------------------------------------------------

SOURCE_ERRORS: list[tuple[str, dict[str, Any]]] = [
    *(
        (message.format(name=name), {name: value})
        for name in ("page_size", "num_bytes_per_token", "read_bytes")
        for message, value in [
            ("{name} must be an int, got 16.0", 16.0),
            ("{name} must be positive, got 0", 0),
            ("{name} must be positive, got -16", -16),
        ]
    ),
    ("num_bytes_per_token must be a multiple of 16, got 24", {"num_bytes_per_token": 24}),
    ("read_bytes must be a multiple of 16, got 8", {"read_bytes": 8}),
    ("read_bytes must be at most 32, got 48", {"read_bytes": 48}),
    ("tensor must be an array (NumPy, DLPack or __cuda_array_interface__), got NoneType", {"tensor": None}),
    ("tensor must have at least 2 dimensions, got shape (1024,)", {"tensor": aligned_bytes(1024)}),
    ("tensor must have contiguous rows, got strides (256, 2)", {"tensor": aligned_bytes(8, 256)[:, ::2]}),
    ("tensor must have contiguous rows, got strides (32, 512, 1)", {"tensor": aligned_bytes(4, 16, 32).swapaxes(0, 1)}),
    ("row stride of tensor in bytes must be a multiple of 16, got 136", {"tensor": aligned_bytes(8, 136)}),
    ("row stride of tensor in bytes must be positive, got -128", {"tensor": aligned_bytes(8, 128)[::-1]}),
    (
        "row stride of tensor in bytes must be positive, got 0",
        {"tensor": np.broadcast_to(aligned_bytes(128), (8, 128))},
    ),
    (
        "row of tensor must hold page_size * num_bytes_per_token = 128 bytes, got 112",
        {"tensor": aligned_bytes(8, 112)},
    ),
]


@pytest.mark.parametrize(("message", "changed"), SOURCE_ERRORS, ids=[message for message, _ in SOURCE_ERRORS])
def test_case_20_a_bad_source_is_refused_when_it_is_built(message: str, changed: dict[str, Any]) -> None:
    assert_refused(lambda: source(**changed), message)


def test_case_20_a_base_address_that_is_not_aligned_is_refused() -> None:
    tensor = aligned_bytes(8, 128, shift=8)
    message = f"tensor must start at a multiple of 16 bytes, got address {tensor.ctypes.data:#x}"
    assert_refused(lambda: source(tensor=tensor), message)


def test_case_19_a_layer_of_a_larger_buffer_is_accepted() -> None:
    buffer = aligned_bytes(8, 4, 32)
    layer = RealKvSource(tensor=buffer[:, 1], page_size=1, num_bytes_per_token=32, read_bytes=32)
    assert (layer.rows.shape, layer.rows.strides) == ((8, 32), (128, 1))
    buffer[5, 1, 3] = 77
    assert layer.rows.as_numpy()[5, 3] == 77


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32, np.int64])
def test_a_source_is_seen_as_bytes_whatever_its_dtype(dtype: type) -> None:
    memory = aligned_bytes(8, 128)
    memory[...] = np.arange(128)
    for tensor in (memory.view(dtype), memory.view(dtype).reshape(8, 4, 2, -1), memory.view(dtype)[::2]):
        rows = source(tensor=tensor).rows
        assert (rows.dtype, rows.shape) == ("uint8", (len(tensor), 128))
        np.testing.assert_array_equal(rows.as_numpy(), memory[: len(tensor)])


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float16", "uint8"])
def test_case_27_torch_tensors_of_any_dtype_are_accepted_as_bytes(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(8 * 128, dtype=torch.int64).to(torch.uint8).view(getattr(torch, name)).reshape(8, 4, -1)
    source_of_tensor = source(tensor=tensor)
    assert source_of_tensor.rows.pointer == tensor.data_ptr()
    np.testing.assert_array_equal(source_of_tensor.rows.as_numpy(), tensor.view(torch.uint8).reshape(8, 128).numpy())


def test_a_source_of_one_row_or_without_rows() -> None:
    assert source(tensor=aligned_bytes(1, 128)).rows.strides == (128, 1)
    assert source(tensor=aligned_bytes(0, 128)).rows.shape == (0, 128)


# -- contexts -----------------------------------------------------------------------------------------------------

LONGS = np.zeros(2, np.int64)

CONTEXT_ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("canary_buf must be an array (NumPy, DLPack or __cuda_array_interface__), got list", {"canary_buf": [[0] * 32]}),
    ("canary_buf must be contiguous", {"canary_buf": aligned_bytes(32, 64)[:, :32]}),
    ("canary_buf must have dtype uint8, got int64", {"canary_buf": np.zeros((32, 4), np.int64)}),
    ("canary_buf must be 2-D, got shape (1024,)", {"canary_buf": aligned_bytes(1024)}),
    ("slot of canary_buf length must be >= 32, got 24", {"canary_buf": aligned_bytes(32, 24)}),
    ("slot stride of canary_buf in bytes must be a multiple of 8, got 36", {"canary_buf": aligned_bytes(32, 36)}),
    (
        "slot stride of canary_buf in bytes must be at most 2147483647, got 2147483648",
        {"canary_buf": ClaimsCuda(1, 2**31)},
    ),
    ("canary_buf must be writable, got a read-only array", {"canary_buf": read_only(aligned_bytes(32, 32))}),
    ("slots of canary_buf must be at most 4294967295, got 4294967296", {"canary_buf": ClaimsCuda(2**32, 32)}),
    ("violation_ring must be contiguous", {"violation_ring": np.zeros((4, 16), np.int64)[:, ::2]}),
    ("violation_ring must have dtype int64, got int32", {"violation_ring": np.zeros((4, 8), np.int32)}),
    ("violation_ring must be 2-D, got shape (2,)", {"violation_ring": LONGS}),
    ("row of violation_ring length must be 8, got 7", {"violation_ring": np.zeros((4, 7), np.int64)}),
    ("violation_ring must be writable, got a read-only array", {"violation_ring": read_only(np.zeros((4, 8), int))}),
    ("violation_details must be contiguous", {"violation_details": np.zeros((4, 26), np.int64)[:, ::2]}),
    ("violation_details must have dtype int64, got int32", {"violation_details": np.zeros((4, 13), np.int32)}),
    ("violation_details must be 2-D, got shape (2,)", {"violation_details": LONGS}),
    ("violation_details length must be 4, got 5", {"violation_details": np.zeros((5, 13), np.int64)}),
    ("row of violation_details length must be 13, got 8", {"violation_details": np.zeros((4, 8), np.int64)}),
    (
        "violation_details must be writable, got a read-only array",
        {"violation_details": read_only(np.zeros((4, 13), int))},
    ),
    ("skip_counters must have dtype int64, got int32", {"skip_counters": np.zeros(2, np.int32)}),
    ("skip_counters must be 1-D, got shape (1, 2)", {"skip_counters": LONGS.reshape(1, 2)}),
    ("skip_counters length must be 2, got 1", {"skip_counters": LONGS[:1]}),
    ("skip_counters must be writable, got a read-only array", {"skip_counters": read_only(np.zeros(2, int))}),
    ("violation_write_index must have dtype int32, got int64", {"violation_write_index": LONGS[:1]}),
    ("violation_write_index length must be 1, got 2", {"violation_write_index": np.zeros(2, np.int32)}),
    ("slot_run_counter must be 1-D, got shape ()", {"slot_run_counter": np.zeros((), np.int64)}),
    ("slot_run_counter length must be 1, got 2", {"slot_run_counter": LONGS}),
    ("kernel_run_counter must have dtype int64, got int32", {"kernel_run_counter": np.zeros(1, np.int32)}),
    ("kernel_run_counter must be writable, got a read-only array", {"kernel_run_counter": read_only(LONGS[:1])}),
    (
        "enable_chain_position_assert must have dtype int32, got bool",
        {"enable_chain_position_assert": np.ones(1, bool)},
    ),
    (
        "enable_chain_position_assert length must be 1, got 2",
        {"enable_chain_position_assert": np.zeros(2, np.int32)},
    ),
    ("at most 4 RealKvSource entries supported, got 5", {"real_kv_sources": (source(),) * 5}),
    ("real_kv_hash_mode must be 0 (NONE), 1 (PARTIAL) or 2 (ALL), got 3", {"real_kv_hash_mode": 3}),
    ("real_kv_hash_mode must be an int, got True", {"real_kv_hash_mode": True}),
    ("kernel_kind must be an int, got None", {"kernel_kind": None}),
    ("kernel_kind must be non-negative, got -1", {"kernel_kind": -1}),
    ("kernel_kind must be at most 9223372036854775807, got 9223372036854775808", {"kernel_kind": 2**63}),
    ("real_kv_sources must be a tuple of RealKvSource, got RealKvSource", {"real_kv_sources": source()}),
    ("real_kv_sources must be a tuple of RealKvSource, got list", {"real_kv_sources": [aligned_bytes(8, 128)]}),
    (
        "real_kv_sources[1] must cover the 32 slots of canary_buf, got 16",
        {"real_kv_sources": (source(), source(page_size=2))},
    ),
    (
        "real_kv_sources[0] must be on canary_buf's device cpu, got cuda:0",
        {"real_kv_sources": (source(tensor=ClaimsCuda(8, 128)),)},
    ),
    (
        "slot_run_counter must be on canary_buf's device cpu, got cuda:0",
        {"slot_run_counter": ClaimsCuda(1, typestr="<i8")},
    ),
]


@pytest.mark.parametrize(("message", "changed"), CONTEXT_ERRORS, ids=[message for message, _ in CONTEXT_ERRORS])
def test_a_bad_context_is_refused_when_it_is_built(message: str, changed: dict[str, Any]) -> None:
    assert_refused(lambda: context(**changed), message)


def test_records_that_are_not_aligned_are_refused() -> None:
    records = aligned_bytes(32, 32, shift=4)
    message = f"canary_buf must start at a multiple of 8 bytes, got address {records.ctypes.data:#x}"
    assert_refused(lambda: context(canary_buf=records), message)


@pytest.mark.parametrize("stride", [32, 40, 64])
def test_a_context_keeps_what_the_launchers_use(stride: int) -> None:
    records = aligned_bytes(16, stride, shift=8)
    flag = read_only(np.ones(1, np.int32))
    built = context(
        canary_buf=records,
        kernel_kind=CanaryLaunchTag.TAIL_V_SWA,
        violation_ring=np.zeros((0, 8), np.int64),
        enable_chain_position_assert=flag,
    )
    view = built.view
    assert (view.canary_buf.pointer, view.num_slots, view.slot_stride) == (records.ctypes.data, 16, stride)
    assert (view.kernel_kind, view.ring_capacity, view.real_kv_sources) == (9, 0, ())
    assert view.enable_chain_position_assert is not None
    assert built == dataclasses.replace(built)
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.kernel_kind = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("mode", "hashed"), [(RealKvHashMode.NONE, []), (RealKvHashMode.PARTIAL, [16, 16]), (RealKvHashMode.ALL, [32, 16])]
)
def test_bytes_that_are_hashed(mode: RealKvHashMode, hashed: list[int]) -> None:
    sources = (source(), source(read_bytes=16))
    view = context(real_kv_sources=sources, real_kv_hash_mode=mode).view
    assert [item.num_hashed_bytes for item in view.real_kv_sources] == hashed


def test_buffers_of_one_launch() -> None:
    one = context()
    assert view_buffers(one) == (one.view,)
    assert view_buffers([one] * 12) == (one.view,) * 12
    assert_refused(lambda: view_buffers([one] * 13), "context must be 1 to 12 contexts, got 13")
    assert_refused(lambda: view_buffers([]), "context must be 1 to 12 contexts, got 0")
    assert_refused(
        lambda: view_buffers([one, one.canary_buf]),
        "context must be a VerifyOrWriteContext or a sequence of them, got ndarray",
    )


def test_the_chain_of_a_buffer_is_kept_until_it_is_forgotten_or_gone() -> None:
    records = aligned_bytes(32, 32)
    buffers = view_buffers(context(canary_buf=records))
    check_chain_of(buffers, "affine")
    remember_chain(buffers, "splitmix64")
    check_chain_of(buffers, "splitmix64")
    assert_refused(
        lambda: check_chain_of(buffers, "affine"),
        "chain must be 'splitmix64', with which the buffer was written, got 'affine'",
    )
    forget_chain(records)
    check_chain_of(buffers, "affine")
    assert_refused(lambda: check_chain("chain", None), "chain must be 'splitmix64' or 'affine', got None")


def test_all_fields_of_the_contract_are_there() -> None:
    fields = {field.name for field in dataclasses.fields(VerifyOrWriteContext)}
    assert fields == {
        "canary_buf",
        "kernel_kind",
        "violation_ring",
        "violation_write_index",
        "slot_run_counter",
        "kernel_run_counter",
        "real_kv_sources",
        "real_kv_hash_mode",
        "enable_chain_position_assert",
        "violation_details",
        "skip_counters",
        "view",
    }
