"""Every error: its exact message, raised by a real call, with outputs untouched; and the catalogue that explains it."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    KvCanaryError,
    KvCanaryRuntimeError,
    VerifyPlan,
    bind_all,
    launch_plan_offsets_kernel,
    plan_offsets,
)
from cupy_kvcanary import sources as sources_module
from cupy_kvcanary.arrays import Device, view_array
from cupy_kvcanary.catalogue import CATALOGUE, as_markdown, find_entry
from cupy_kvcanary.checks import check_bool, check_one_device
from cupy_kvcanary.compile import import_cupy, kernel_handle
from cupy_kvcanary.launch import BACKENDS, Launch, PreparedLaunch, check_warmed_up
from tests.helpers import dlpack
from tests.helpers.canary_errors import CANARY_ERROR_CALLS
from tests.helpers.health_errors import HEALTH_ERROR_CALLS
from tests.helpers.plan_errors import PLAN_ERROR_CALLS
from tests.helpers.plan_offsets import make_arguments
from tests.helpers.replay_errors import REPLAY_ERROR_CALLS
from tests.helpers.report_errors import REPORT_ERROR_CALLS
from tests.helpers.write_errors import WRITE_ERROR_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

TABLE = np.arange(6 * 16, dtype=np.int32).reshape(6, 16)


def arguments(**changed: Any) -> dict[str, Any]:
    """Valid arguments of the strict launcher for two requests, with some of them replaced."""
    return make_arguments([2, 4], [5, 3], [1, 1], TABLE, mapping=np.arange(96)) | changed


class OnAnotherDevice:
    """A tensor of a device that this machine need not have."""

    def __init__(self, device_type: int) -> None:
        self._device = (device_type, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("must not be exported")


class ClaimsCuda:
    """Host memory that says it is CUDA memory: enough for checks that never touch it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.__cuda_array_interface__ = array.__array_interface__


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


OVERLAPPING = np.zeros(4, np.int32)

# (first line after "kv-canary: ", changed arguments of the strict launcher)
STRICT: list[tuple[str, dict[str, Any]]] = [
    ("prefix_lens must be contiguous", {"prefix_lens": np.zeros(4, np.int64)[::2]}),
    ("req_to_token must be contiguous", {"req_to_token": TABLE.T}),
    ("req_to_token must be contiguous", {"req_to_token": TABLE[:, :8]}),
    ("prefix_lens must have dtype int64, got int32", {"prefix_lens": np.zeros(2, np.int32)}),
    ("req_to_token must have dtype int32, got int64", {"req_to_token": TABLE.astype(np.int64)}),
    ("out_verify_enable must have dtype int32, got bool", {"out_verify_enable": np.zeros(1, bool)}),
    ("out_status must have dtype int32, got float32", {"out_status": np.zeros(1, np.float32)}),
    ("offsets kernel bs must be in [0, 1], got 2", {"bs_block_size": 1}),
    ("offsets kernel bs must be in [0, 4096], got -1", {"bs": -1}),
    ("write_offsets_len must be positive, got 0", {"out_write_offsets": np.zeros(0, np.int64)}),
    ("verify_capacity must be non-negative, got -1", {"verify_capacity": -1}),
    ("verify_capacity must be at most 2147483647, got 2147483648", {"verify_capacity": 2**31}),
    ("req_to_token_stride0 must be positive, got 0", {"req_to_token": np.zeros((6, 0), np.int32)}),
    ("lut_len must be positive when has_swa_lut is True", {"full_to_swa_index_mapping": np.zeros(0, np.int64)}),
    ("swa_window_size must be non-negative, got -1", {"swa_window_size": -1}),
    ("swa_window_size must be at most 9223372036854775807, got 9223372036854775808", {"swa_window_size": 2**63}),
    ("prefix_lens length must be 2, got 3", {"prefix_lens": np.zeros(3, np.int64)}),
    ("extend_seq_lens length must be >= 2, got 1", {"extend_seq_lens": np.zeros(1, np.int64), "bs": 2}),
    ("out_verify_num_valid length must be 1, got 2", {"out_verify_num_valid": np.zeros(2, np.int32)}),
    ("out_status length must be 1, got 0", {"out_status": np.zeros(0, np.int32)}),
    (
        "out_verify_offsets_scratch length must be >= 4097, got 4096",
        {"out_verify_offsets_scratch": np.zeros(4096, np.int64)},
    ),
    ("req_pool_indices must be 1-D, got shape (2, 1)", {"req_pool_indices": np.ones((2, 1), np.int64)}),
    ("out_verify_enable must be 1-D, got shape ()", {"out_verify_enable": np.zeros((), np.int32)}),
    ("req_to_token must be 2-D, got shape (96,)", {"req_to_token": TABLE.ravel()}),
    (
        "write_offsets_len must equal write_req_capacity + 1, got 5 and 2",
        {"out_write_offsets": np.zeros(5, np.int64)},
    ),
    (
        "bs=2 exceeds write_req_capacity=1",
        {"out_write_offsets": np.zeros(2, np.int64), "out_write_seed_slot_indices": np.zeros(1, np.int64)},
    ),
    (
        "prefix_lens must be on req_pool_indices's device cpu, got cuda:0",
        {"prefix_lens": ClaimsCuda(np.zeros(2, np.int64))},
    ),
    (
        "prefix_lens must be an array (NumPy, DLPack or __cuda_array_interface__), got list",
        {"prefix_lens": [1, 2]},
    ),
    (
        "out_write_offsets must be an array (NumPy, DLPack or __cuda_array_interface__), got NoneType",
        {"out_write_offsets": None},
    ),
    (
        "req_to_token must be on a CPU or CUDA device, got DLPack device type 8",
        {"req_to_token": OnAnotherDevice(8)},
    ),
    (
        "out_write_offsets must be writable, got a read-only array",
        {"out_write_offsets": read_only(np.zeros(3, np.int64))},
    ),
    (
        "out_verify_num_valid must not overlap out_verify_enable, got shared memory",
        {"out_verify_num_valid": OVERLAPPING[:1], "out_verify_enable": OVERLAPPING[:1]},
    ),
    ("bs must be an int, got True", {"bs": True}),
    ("bs must have dtype int32, got int64", {"bs": np.array([2])}),
    ("bs length must be 1, got 2", {"bs": np.zeros(2, np.int32)}),
    ("verify_capacity must be an int, got 5.0", {"verify_capacity": 5.0}),
    ("swa_window_size must be an int, got None", {"swa_window_size": None}),
    ("bs_block_size must be an int, got '8'", {"bs_block_size": "8"}),
    ("stream must be None for CPU arrays, got int", {"stream": 0}),
]


@pytest.mark.parametrize(("message", "changed"), STRICT, ids=[message for message, _ in STRICT])
def test_bad_argument_is_refused_with_outputs_untouched(message: str, changed: dict[str, Any]) -> None:
    given = arguments(**changed)
    outputs = {name: value for name, value in given.items() if name.startswith("out_") and value is not None}
    before = {name: value.copy() for name, value in outputs.items()}
    with pytest.raises(KvCanaryError) as caught:
        launch_plan_offsets_kernel(**given)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
    for name, value in before.items():
        np.testing.assert_array_equal(outputs[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("message", "positional", "named"),
    [
        ("write_req_capacity must be non-negative, got -1", {}, {"write_req_capacity": -1}),
        ("bs=2 exceeds write_req_capacity=1", {}, {"write_req_capacity": 1}),
        ("req_to_token must have contiguous rows, got strides (4, 64)", {3: TABLE.T}, {}),
        ("req_to_token must have contiguous rows, got strides (64, 8)", {3: TABLE[:, ::2]}, {}),
        ("req_to_token_stride0 must be positive, got 0", {3: np.broadcast_to(TABLE[0], (6, 16))}, {}),
        ("req_to_token_stride0 must be positive, got -16", {3: TABLE[::-1]}, {}),
        ("req_to_token must be 2-D, got shape (96,)", {3: TABLE.ravel()}, {}),
        ("prefix_lens must be contiguous", {1: np.zeros(4, np.int64)[::2]}, {}),
        ("prefix_lens must have dtype int32 or int64, got float64", {1: [0.5, 1.0]}, {}),
        ("prefix_lens must have dtype int32 or int64, got bool", {1: [True, False]}, {}),
        ("prefix_lens length must be 2, got 3", {1: [1, 2, 3]}, {}),
    ],
)
def test_plan_offsets_refuses(message: str, positional: dict[int, Any], named: dict[str, Any]) -> None:
    inputs: list[Any] = [[2, 4], [5, 3], [1, 1], TABLE]
    for index, value in positional.items():
        inputs[index] = value
    with pytest.raises(KvCanaryError) as caught:
        plan_offsets(*inputs, **named)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"


def test_checks_come_in_the_order_of_the_contract() -> None:
    """Whichever of two faults comes first in the contract is the one that is reported."""
    seen = []
    faults = [
        ("contiguous", {"prefix_lens": np.zeros(4, np.int64)[::2]}),
        ("dtype", {"extend_seq_lens": np.zeros(2, np.int32)}),
        ("bs must be in", {"bs": 5000}),
        ("write_offsets_len must be positive", {"out_write_offsets": np.zeros(0, np.int64)}),
        ("verify_capacity must be non-negative", {"verify_capacity": -1}),
        ("req_to_token_stride0", {"req_to_token": np.zeros((6, 0), np.int32)}),
        ("lut_len", {"full_to_swa_index_mapping": np.zeros(0, np.int64)}),
        ("swa_window_size", {"swa_window_size": -1}),
        ("out_verify_enable length", {"out_verify_enable": np.zeros(2, np.int32)}),
        ("out_verify_num_valid must be 1-D", {"out_verify_num_valid": np.zeros((1, 1), np.int32)}),
    ]
    changed: dict[str, Any] = {}
    for words, change in reversed(faults):
        changed |= change
        with pytest.raises(KvCanaryError) as caught:
            launch_plan_offsets_kernel(**arguments(**changed))
        assert words in str(caught.value)
        seen.append(caught.value.slug)
    assert len(seen) == len(faults)


def raises_without_cupy() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        import_cupy()


def raises_without_sources() -> None:
    sources_module.read_kernel_file("no_such_kernel.cu")


class FakeDriver:
    """Stands in for CuPy where there is no GPU: it can only fail."""

    class CUDADriverError(Exception):
        pass

    def launchKernel(self, *_: Any) -> None:  # noqa: N802
        raise self.CUDADriverError("CUDA_ERROR_INVALID_HANDLE")


def raises_on_launch() -> None:
    launch = Launch("plan_offsets", "kvc_plan_offsets", 1, 32, np.zeros((), [("field", "u8")]))
    PreparedLaunch(FakeDriver(), launch, kernel=0).launch(stream=0)


def raises_on_compile() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupy_kvcanary.compile.joined_source", lambda stem: "this is no CUDA")
        kernel_handle("plan_offsets", "kvc_broken", 0)


class RequiresGrad:
    """Another library's tensor that is tracked."""

    requires_grad = True

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("must not be exported")


class Unexportable:
    """Another library's array that is spread over devices."""

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("only supported for unsharded arrays")

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("must not be exported")


def raises_without_torch() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch", raising=False)
        plan_offsets([2], [1], [1], TABLE, like="torch")


class FakeCuda:
    """Stands in for CuPy: no device to be seen, and any stream is captured."""

    def __init__(self) -> None:
        self.cuda = self.runtime = self

    class CUDARuntimeError(RuntimeError):
        pass

    def getDeviceCount(self) -> int:  # noqa: N802
        raise self.CUDARuntimeError("cudaErrorNoDevice")

    def streamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        return True


def raises_without_a_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", FakeCuda())
        VerifyPlan.allocate(4, "cuda:7")


def raises_on_allocation_in_a_capture() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", FakeCuda())
        BACKENDS["cuda"].allocate_zeros(4, "int64", Device("cuda", 0), 1234)


def raises_on_two_streams() -> None:
    arguments = make_arguments([2], [1], [1], TABLE)
    bind_all([(launch_plan_offsets_kernel, arguments | {"stream": stream}) for stream in (1, 2)])


OTHER_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-must-not-require-grad": lambda: view_array("prefix_lens", RequiresGrad()),
    "kv-canary-stream-must-be-the-same": raises_on_two_streams,
    "kv-canary-stream-must-be-a-stream": lambda: _stream_of_no_kind(),
    "kv-canary-cupy-must-be-installed": raises_without_cupy,
    "kv-canary-sources-must-be-installed": raises_without_sources,
    "kv-canary-kernel-must-compile": raises_on_compile,
    "kv-canary-kernel-must-launch": raises_on_launch,
    "kv-canary-must-be-a-bool": lambda: check_bool("check_holes", 1),
    "kv-canary-must-have-memory": lambda: view_array("prefix_lens", dlpack.Producer(0, (3,))),
    "kv-canary-must-be-exported": lambda: view_array("prefix_lens", Unexportable()),
    "kv-canary-like-must-be-known": lambda: plan_offsets([2], [1], [1], TABLE, like="tensorflow"),
    "kv-canary-like-must-fit-the-device": lambda: plan_offsets([2], [1], [1], TABLE, like="cupy"),
    "kv-canary-like-must-be-imported": raises_without_torch,
    "kv-canary-device-must-exist": raises_without_a_device,
    "kv-canary-must-be-allocated-before-a-capture": raises_on_allocation_in_a_capture,
    "kv-canary-must-be-warmed-up": lambda: check_warmed_up(["kvc_verify"], is_capturing=True),
    "kv-canary-slug-must-be-known": lambda: find_entry("no such thing"),
    **CANARY_ERROR_CALLS,
    **HEALTH_ERROR_CALLS,
    **PLAN_ERROR_CALLS,
    **REPLAY_ERROR_CALLS,
    **REPORT_ERROR_CALLS,
    **WRITE_ERROR_CALLS,
}


def _stream_of_no_kind() -> None:
    from cupy_kvcanary.streams import stream_handle

    stream_handle("a stream")


@pytest.mark.parametrize("slug", OTHER_CALLS)
def test_other_errors_are_raised_by_a_real_call(slug: str) -> None:
    with pytest.raises((KvCanaryError, KvCanaryRuntimeError)) as caught:
        OTHER_CALLS[slug]()
    assert caught.value.slug == slug


def test_every_entry_of_the_catalogue_is_raised_by_a_test() -> None:
    raised = {find_entry(message).slug for message, _ in STRICT} | set(OTHER_CALLS)
    raised.add(find_entry("req_to_token must have contiguous rows, got strides (4, 64)").slug)
    assert raised == set(CATALOGUE)


def test_an_error_says_what_to_do_and_carries_its_slug() -> None:
    with pytest.raises(KvCanaryError) as caught:
        launch_plan_offsets_kernel(**arguments(bs_block_size=1))
    failure = caught.value
    assert isinstance(failure, ValueError)
    assert str(failure).splitlines() == [
        "kv-canary: offsets kernel bs must be in [0, 1], got 2",
        "fix: launch in chunks, raise bs_block_size (with a scratch to match), or use plan_offsets, which has no bound",
        "kvcanary explain kv-canary-offsets-kernel-bs-must-be-in-0-plan",
    ]
    assert (failure.slug, failure.name, failure.got) == ("kv-canary-offsets-kernel-bs-must-be-in-0-plan", "bs", 2)
    copy = pickle.loads(pickle.dumps(failure))
    assert (str(copy), copy.slug, copy.got) == (str(failure), failure.slug, failure.got)


@pytest.mark.parametrize("slug", CATALOGUE)
def test_an_entry_is_found_by_slug_and_by_message_and_is_complete(slug: str) -> None:
    entry = CATALOGUE[slug]
    assert find_entry(slug) is entry
    filled = entry.message.replace("{", "").replace("}", "")
    assert find_entry(f"kv-canary: {filled}\nfix: something").slug == slug
    assert all((entry.trigger, entry.cause, entry.fix, entry.prevention))


def test_the_page_of_errors_is_current() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
    assert page.read_text(encoding="utf-8") == as_markdown(), "run: kvcanary explain --markdown > docs/errors.md"


def test_devices_are_named_in_words() -> None:
    views = {"a": view_array("a", np.zeros(1)), "b": view_array("b", ClaimsCuda(np.zeros(1)))}
    assert views["b"].device == Device("cuda", 0)
    with pytest.raises(KvCanaryError, match=r"b must be on a's device cpu, got cuda:0"):
        check_one_device(views)
