"""Moves of records on every backend: reported faults, properties, hostile values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import KvCanaryError, StatusBit, VerifyOrWriteContext, forget_chain
from cupy_kvcanary.arrays import view_array
from cupy_kvcanary.buffers import CHAINS
from cupy_kvcanary.launch import BACKENDS, NumpyBackend
from cupy_kvcanary.ops.move import EXPORT, MOVE
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.golden import FILL
from tests.helpers.host_backend import HostKernelError
from tests.helpers.move import LAUNCHERS, SLOTS, TOMBSTONE, USES, assert_moved, exported, move
from tests.helpers.verify import Batch, verify_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

F1_SLOTS = [5, 9, 3, 7, 11, 13]
F1_TOKENS = [11, 12, 13, 14, 15, 16]


def stamped(chain: str, **options: Any) -> HostBuffer:
    """Fixture F1: six tokens, stamped."""
    buffer = HostBuffer.empty(64, **options)
    buffer.stamp(F1_SLOTS, F1_TOKENS, chain)
    return buffer


def found(backend: ArrayBackend, buffer: HostBuffer, slots: list[int], chain: str) -> dict[int, int]:
    """Reason bits by slot, for a request that reads these slots."""
    table = np.zeros((6, 16), np.int32)
    table[2, : len(slots)] = slots
    read = copy.deepcopy(buffer)
    verify_batch(backend, [read], Batch(table, [2], [len(slots)]), chain=chain)
    return {row[1]: row[7] for row in read.violations}


# ---- where KV moves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS)
def test_29_records_and_kv_leave_and_come_back_elsewhere(backend: ArrayBackend, chain: str) -> None:
    kv = np.random.default_rng(0).integers(0, 256, (64, 32), dtype=np.uint8)
    buffer = stamped(chain, sources=[HostSource(kv, 1, 32, 32)], mode=2)
    on_host = exported(backend, [buffer], F1_SLOTS[:3]), kv[F1_SLOTS[:3]]
    table = [40, 41, 42, *F1_SLOTS[3:]]

    kv[[40, 41, 42]] = on_host[1]
    without_records = {40: 1 | 4, 41: 2 | 4, 42: 2 | 4, 7: 1}
    assert found(backend, buffer, table, chain) == without_records
    move(backend, "import", [buffer], {"dst_slots": np.array([40, 41, 42]), "records": on_host[0]}, chain=chain)
    assert found(backend, buffer, table, chain) == {}


@pytest.mark.parametrize("chain", CHAINS)
def test_copied_records_are_those_of_the_new_slots(backend: ArrayBackend, chain: str) -> None:
    buffers = [stamped(chain, kernel_kind=kind, stride=stride) for kind, stride in ((0, 32), (1, 40))]
    assert move(backend, "copy", buffers, {"src_slots": np.array([5, 9]), "dst_slots": np.array([20, 21])}) == 0
    for buffer in buffers:
        assert found(backend, buffer, [20, 21, *F1_SLOTS[2:]], chain) == {}
        assert found(backend, buffer, F1_SLOTS, chain) == {}


@pytest.mark.parametrize("chain", CHAINS)
def test_records_change_places_through_an_export(backend: ArrayBackend, chain: str) -> None:
    buffer = stamped(chain)
    records = exported(backend, [buffer], [9, 11])
    move(backend, "import", [buffer], {"dst_slots": np.array([11, 9]), "records": records}, chain=chain)
    assert found(backend, buffer, [5, 11, 3, 7, 9, 13], chain) == {}
    assert found(backend, buffer, F1_SLOTS, chain) != {}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_read_of_a_forgotten_slot_is_reported(backend: ArrayBackend, chain: str) -> None:
    buffer = stamped(chain)
    assert move(backend, "forget", [buffer], {"dst_slots": np.array([7])}) == 0
    assert buffer.record(7) == TOMBSTONE
    assert found(backend, buffer, F1_SLOTS, chain) == {7: 1 | 2, 11: 1}
    assert found(backend, buffer, F1_SLOTS[:3], chain) == {}


@pytest.mark.parametrize("chain", CHAINS)
def test_an_exported_slot_that_does_not_exist_was_never_stamped(backend: ArrayBackend, chain: str) -> None:
    buffer = stamped(chain)
    records = np.full((1, 2, 32), 0x5A, np.uint8)
    status = move(backend, "export", [buffer], {"src_slots": np.array([9, 64]), "out_records": records})
    assert status == StatusBit.MOVE_SLOT_OUT_OF_RANGE
    assert not records[0, 1].any()
    move(backend, "import", [buffer], {"dst_slots": np.array([9, 3]), "records": records}, chain=chain)
    assert found(backend, buffer, F1_SLOTS, chain) == {3: 1 | 2, 7: 1}


# ---- the contract --------------------------------------------------------------------------------------------


def random_buffers(rng: np.random.Generator, sizes: Sequence[tuple[int, int]]) -> list[HostBuffer]:
    """Of (slots, stride) each, with any bytes."""
    return [HostBuffer(rng.integers(0, 256, size, dtype=np.uint8), kernel_kind=i) for i, size in enumerate(sizes)]


def make_arguments(use: str, buffers: Sequence[HostBuffer], src_slots: Any, dst_slots: Any) -> dict[str, Any]:
    """The arrays that this launcher takes; a packed record is any bytes."""
    shape = len(buffers), len(dst_slots), buffers[0].canary_buf.shape[1]
    packed = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return {
        "copy": {"src_slots": src_slots, "dst_slots": dst_slots},
        "forget": {"dst_slots": dst_slots},
        "export": {"src_slots": src_slots, "out_records": packed},
        "import": {"dst_slots": dst_slots, "records": packed},
    }[use]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("stride", [32, 40, 48, 4096, 4104])
@pytest.mark.parametrize("n", [0, 1, 3, 300])
def test_numbers_of_entries_and_bytes(backend: ArrayBackend, use: str, dtype: Any, stride: int, n: int) -> None:
    """Fewer than a block takes, and more; slots as long as a block, and longer."""
    if n > 3 and stride > 48:
        n //= 50
    rng = np.random.default_rng(n)
    buffers = random_buffers(rng, [(2 * n + 1, stride)] * 3)
    slots = (rng.permutation(2 * n) + 1).astype(dtype)
    assert_moved(backend, use, buffers, make_arguments(use, buffers, slots[:n], slots[n:]))


@pytest.mark.parametrize("use", ["copy", "forget"])
def test_buffers_may_differ_in_size(backend: ArrayBackend, use: str) -> None:
    buffers = random_buffers(np.random.default_rng(0), [(8, 32), (40, 48), (4, 4104), (40, 40)])
    src_slots, dst_slots = np.array([1, 9, 3, 39]), np.array([2, 4, 38, 5], np.int32)
    assert_moved(backend, use, buffers, make_arguments(use, buffers, src_slots, dst_slots))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("records_at", "packed_at"), [(0, 0), (8, 0), (0, 8), (8, 8)])
def test_memory_at_multiples_of_8_bytes(backend: ArrayBackend, use: str, records_at: int, packed_at: int) -> None:
    """The buffer, packed records, or both are not where 16 bytes can be moved at once."""

    def moved(on: ArrayBackend) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(0)
        memory, packed = (on.array(rng.integers(0, 256, size, dtype=np.uint8)) for size in (1040, 112))
        buffer = HostBuffer(memory[records_at : records_at + 1024].reshape(32, 32))
        arguments = make_arguments(use, [buffer], np.array([5, 9, 3]), np.array([1, 2, 4]))
        for name in {"records", "out_records"} & set(arguments):
            arguments[name] = packed[packed_at : packed_at + 96].reshape(1, 3, 32)
        LAUNCHERS[use](context=buffer.on_device(on), **on.on_device(arguments))
        return [on.to_numpy(memory), on.to_numpy(packed)]

    with mock.patch.dict(BACKENDS, cpu=NumpyBackend()):
        expected = moved(ArrayBackend("numpy"))
    for array, value in zip(moved(backend), expected, strict=True):
        np.testing.assert_array_equal(array, value)


@pytest.mark.parametrize("use", ["copy", "forget", "import"])
@pytest.mark.parametrize(("padding_slot", "is_moved"), [(0, False), (None, True), (5, True)])
def test_the_padding_slot_is_no_destination(
    backend: ArrayBackend, use: str, padding_slot: int | None, is_moved: bool
) -> None:
    buffers = [HostBuffer(np.full((8, 32), 0x11, np.uint8))]
    arguments = make_arguments(use, buffers, np.array([3]), np.array([0]))
    arguments |= {"records": np.full((1, 1, 32), 0x22, np.uint8)} if use == "import" else {}
    buffers[0].canary_buf[3] = 0x22
    status = move(backend, use, buffers, arguments, padding_slot=padding_slot)
    assert status == (0 if is_moved else StatusBit.MOVE_SLOT_OUT_OF_RANGE)
    assert (buffers[0].record(0) != [0x1111111111111111] * 4) == is_moved


def test_the_padding_slot_is_a_source(backend: ArrayBackend) -> None:
    buffers = random_buffers(np.random.default_rng(0), [(8, 32)])
    assert_moved(backend, "copy", buffers, {"src_slots": np.array([0]), "dst_slots": np.array([3])})
    np.testing.assert_array_equal(exported(backend, buffers, [0])[0, 0], buffers[0].canary_buf[3])


@pytest.mark.parametrize("use", ["copy", "forget", "import"])
def test_a_destination_that_occurs_twice_holds_halves_of_either(backend: ArrayBackend, use: str) -> None:
    buffers = random_buffers(np.random.default_rng(0), [(8, 32)])
    arguments = make_arguments(use, buffers, np.array([3, 4]), np.array([1, 1]))
    if backend.reports_races:
        with pytest.raises(HostKernelError, match="data race"):  # by contract
            move(backend, use, buffers, arguments)
        return
    before = buffers[0].canary_buf.copy()
    move(backend, use, buffers, arguments)
    tombstones = np.array([TOMBSTONE] * 2, np.uint64).view(np.uint8)
    given = {"copy": before[3:5], "forget": tombstones, "import": arguments.get("records", before[None])[0]}[use]
    for half in (slice(0, 16), slice(16, 32)):
        assert buffers[0].canary_buf[1, half].tolist() in given[:, half].tolist()


def test_a_slot_may_be_exported_several_times(backend: ArrayBackend) -> None:
    buffers = random_buffers(np.random.default_rng(0), [(8, 48), (8, 48)])
    records = exported(backend, buffers, [3, 4, 3])
    np.testing.assert_array_equal(records, [buffer.canary_buf[[3, 4, 3]] for buffer in buffers])


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("slot", [-1, 8, -(2**31), 2**31 - 1, 2**31, 2**32 + 3, 2**59, -(2**63), 2**63 - 1])
def test_slots_that_the_buffer_does_not_have(backend: ArrayBackend, use: str, slot: int) -> None:
    """2^59 slots of 32 bytes are a multiple of 2^64 bytes: in 64 bits that is slot 0."""
    dtype = np.int32 if -(2**31) <= slot < 2**31 else np.int64
    for wrong in SLOTS:
        buffers = random_buffers(np.random.default_rng(0), [(8, 32), (6, 32)])
        slots = {"src_slots": np.array([3, 4, 5], dtype), "dst_slots": np.array([1, 7, 2], dtype)}
        slots[wrong][0] = slot
        assert_moved(backend, use, buffers, make_arguments(use, buffers, **slots))


small = st.integers(-2, 40)
extreme = st.sampled_from([-(2**31), 2**31 - 1, 2**31, 2**32, 2**59, -(2**63), 2**63 - 1])


@st.composite
def moves(draw: st.DrawFn, use: str) -> tuple[list[HostBuffer], dict[str, Any]]:
    """No destination twice, or also a source: those race."""
    stride = st.sampled_from([32, 40, 48, 64])
    stride = stride if use in ("copy", "forget") else st.just(draw(stride))
    sizes = draw(st.lists(st.tuples(st.integers(0, 40), stride), min_size=1, max_size=3))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    slot = small if dtype == np.int32 else small | extreme
    slots = draw(st.lists(slot, max_size=40, unique=True))
    n = len(slots) // 2
    buffers = random_buffers(np.random.default_rng(draw(st.integers(0, 2**32))), sizes)
    return buffers, make_arguments(use, buffers, np.array(slots[:n], dtype), np.array(slots[n : 2 * n], dtype))


@pytest.mark.parametrize("use", USES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), padding_slot=st.sampled_from([0, None, 3]))
def test_contract_holds_for_any_slots(
    backend: ArrayBackend, use: str, data: st.DataObject, padding_slot: int | None
) -> None:
    buffers, arguments = data.draw(moves(use))
    assert_moved(backend, use, buffers, arguments, padding_slot)


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("n", "stride"), [(300_000, 32), (100_000, 40), (3000, 1024)])
def test_many_entries_on_the_gpu(use: str, n: int, stride: int) -> None:
    require_gpu()
    rng = np.random.default_rng(n)
    buffers = random_buffers(rng, [(2 * n + 1, stride)] * 4)
    slots = rng.permutation(2 * n + 1)
    arguments = make_arguments(use, buffers, slots[:n], slots[n : 2 * n])
    expected, expected_arguments = copy.deepcopy((buffers, arguments))
    options = {} if use == "export" else {"padding_slot": None}
    move(ArrayBackend("numpy"), use, expected, expected_arguments, **options)
    move(ArrayBackend("gpu"), use, buffers, arguments, **options)
    for buffer, value in zip(buffers, expected, strict=True):
        np.testing.assert_array_equal(buffer.canary_buf, value.canary_buf)
    for name, array in arguments.items():
        np.testing.assert_array_equal(array, expected_arguments[name])


# ---- the launchers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "strides", "grid"),
    [(1, [32], 1), (128, [32] * 4, 4), (129, [32], 2), (86, [48, 32], 4), (3, [4096, 32], 6), (3, [8192], 3)],
)
def test_a_block_takes_as_many_entries_as_it_has_threads_for(n: int, strides: list[int], grid: int) -> None:
    buffers = tuple(HostBuffer.empty(8, stride).on_device(ArrayBackend("numpy")).view for stride in strides)
    slots = view_array("dst_slots", np.zeros(n, np.int64))
    absent = dict.fromkeys(("src_slots", "records", "out_records", "out_status"))
    (launch,) = MOVE.launches(buffers=buffers, dst_slots=slots, padding_slot=0, **absent)
    assert (launch.entry, launch.grid) == ("kvc_move", grid)
    assert launch.args.nbytes < 4096


def test_an_export_only_reads_the_buffers() -> None:
    assert "canary_buf" in MOVE.outputs
    assert "canary_buf" not in EXPORT.outputs


N3 = np.array([1, 2, 4])
READ_ONLY = np.full((1, 3, 32), 0x5A, np.uint8)
READ_ONLY.flags.writeable = False

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (
        "copy",
        "src_slots must be an array (NumPy, DLPack or __cuda_array_interface__), got NoneType",
        {"src_slots": None},
    ),
    ("copy", "context must be a VerifyOrWriteContext or a sequence of them, got ndarray", {"context": [N3]}),
    ("copy", "context must be 1 to 12 contexts, got 0", {"context": []}),
    ("copy", "src_slots must be 1-D, got shape (3, 1)", {"src_slots": N3[:, None]}),
    ("copy", "dst_slots must be contiguous", {"dst_slots": np.zeros(6, np.int64)[::2]}),
    ("copy", "dst_slots must have dtype int32 or int64, got uint32", {"dst_slots": N3.astype(np.uint32)}),
    ("copy", "dst_slots length must be 3, got 2", {"dst_slots": N3[:2]}),
    ("copy", "out_status length must be 1, got 2", {"out_status": np.zeros(2, np.int32)}),
    ("copy", "out_status must have dtype int32, got int64", {"out_status": np.zeros(1, np.int64)}),
    ("copy", "padding_slot must be an int, got 0.0", {"padding_slot": 0.0}),
    ("copy", "padding_slot must be non-negative, got -1", {"padding_slot": -1}),
    ("copy", "stream must be None for CPU arrays, got int", {"stream": 7}),
    ("forget", "dst_slots must have dtype int32 or int64, got float64", {"dst_slots": N3 / 2}),
    (
        "forget",
        "length of dst_slots times 12 must be at most 2147483647, got 2147483652",
        {"dst_slots": np.zeros(178956971, np.int32)},
    ),
    ("export", "out_records must be 3-D, got shape (3, 32)", {"out_records": READ_ONLY[0]}),
    ("export", "out_records must have dtype uint8, got int64", {"out_records": np.zeros((1, 3, 4), np.int64)}),
    ("export", "out_records must be contiguous", {"out_records": np.zeros((1, 3, 64), np.uint8)[:, :, ::2]}),
    ("export", "out_records length must be 1, got 2", {"out_records": np.zeros((2, 3, 32), np.uint8)}),
    ("export", "out_records[0] length must be 3, got 4", {"out_records": np.zeros((1, 4, 32), np.uint8)}),
    ("export", "out_records[0, 0] length must be 32, got 40", {"out_records": np.zeros((1, 3, 40), np.uint8)}),
    ("export", "out_records must be writable, got a read-only array", {"out_records": READ_ONLY}),
    ("import", "chain must be 'splitmix64' or 'affine', got 'sha256'", {"chain": "sha256"}),
]


def context_of(stride: int = 32) -> VerifyOrWriteContext:
    return HostBuffer.empty(16, stride).on_device(ArrayBackend("numpy"))


def valid_arguments(use: str, context: Any) -> dict[str, Any]:
    """Keyword arguments of a launcher, on the CPU, for three slots of 32 bytes."""
    return {"context": context, **make_arguments(use, [HostBuffer.empty(16)], np.array([5, 9, 3]), N3)}


@pytest.mark.parametrize(
    ("use", "message", "changed"), REFUSED, ids=[f"{use}: {message}"[:80] for use, message, _ in REFUSED]
)
def test_bad_argument_is_refused_with_outputs_untouched(use: str, message: str, changed: dict[str, Any]) -> None:
    context = context_of()
    LAUNCHERS[use](**valid_arguments(use, context_of()))
    arguments = valid_arguments(use, context) | changed
    out_records = arguments.get("out_records", N3)
    before = out_records.copy()
    with pytest.raises(KvCanaryError) as caught:
        LAUNCHERS[use](**arguments)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    assert not context.canary_buf.any()
    assert (context.violation_ring == FILL).all()
    np.testing.assert_array_equal(out_records, before)


@pytest.mark.parametrize(("use", "name"), [("export", "out_records"), ("import", "records")])
def test_packed_records_are_words_of_8_bytes(use: str, name: str) -> None:
    packed = np.zeros(108, np.uint8)
    packed = packed[-packed.ctypes.data % 8 + 4 :][:96].reshape(1, 3, 32)
    with pytest.raises(KvCanaryError, match=f"kv-canary: {name} must start at a multiple of 8 bytes, got address"):
        LAUNCHERS[use](**valid_arguments(use, context_of()) | {name: packed})


@pytest.mark.parametrize("use", ["export", "import"])
def test_packed_records_are_of_buffers_with_one_stride(use: str) -> None:
    arguments = valid_arguments(use, [context_of(), context_of(40)])
    with pytest.raises(KvCanaryError, match=r"slot of canary_buf of context 1 length must be 32, got 40"):
        LAUNCHERS[use](**arguments)


@pytest.mark.parametrize("use", USES)
def test_memory_that_is_written_and_used_twice_is_refused(use: str) -> None:
    context = context_of()
    name = {"copy": "src_slots", "forget": "dst_slots", "export": "out_records", "import": "records"}[use]
    memory = context.canary_buf[:3]
    shared = memory[None] if "records" in name else memory.reshape(-1).view(np.int64)[:3]
    first, second = (name, "canary_buf") if use == "export" else ("canary_buf", name)
    with pytest.raises(KvCanaryError, match=f"{first} must not overlap {second}, got shared memory"):
        LAUNCHERS[use](**valid_arguments(use, context) | {name: shared})
    with pytest.raises(KvCanaryError, match="canary_buf must not overlap canary_buf of context 1, got shared memory"):
        LAUNCHERS["copy"](**valid_arguments("copy", [context, context]))
    assert not context.canary_buf.any()


def test_imported_records_have_the_buffers_kind_of_chain() -> None:
    context = context_of()
    arguments = valid_arguments("import", context)
    LAUNCHERS["import"](**arguments, chain="affine")
    before = context.canary_buf.copy()
    with pytest.raises(KvCanaryError) as caught:
        LAUNCHERS["import"](**arguments)
    message = "kv-canary: chain must be 'affine', with which the buffer was written, got 'splitmix64'"
    assert str(caught.value).splitlines()[0] == message
    np.testing.assert_array_equal(context.canary_buf, before)
    forget_chain(context.canary_buf)
    LAUNCHERS["import"](**arguments)
