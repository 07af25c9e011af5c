"""Every launcher with arguments in NumPy, and the same arguments as arrays of other libraries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import (
    launch_canary_copy_records_kernel,
    launch_canary_export_records_kernel,
    launch_canary_forget_records_kernel,
    launch_canary_import_records_kernel,
    launch_canary_plan_kernels,
    launch_canary_verify_batch_kernel,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
    launch_plan_entries_kernel,
    launch_plan_offsets_kernel,
    launch_scatter_req_token_ids_kernel,
)
from cupy_kvcanary.types import WritePlan
from tests.helpers import dlpack
from tests.helpers.backends import ArrayBackend, require_gpu
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.launching import map_arrays
from tests.helpers.plan_entries import TABLE, make_entries_arguments, make_plan_arguments
from tests.helpers.plan_offsets import make_arguments
from tests.helpers.verify import Entry, make_plan
from tests.helpers.write import ENTRIES, PLAN, one_request

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]

NUMPY = ArrayBackend("numpy")


@dataclass(frozen=True)
class LibraryBackend(ArrayBackend):
    """Makes the arrays of buffers and plans in a library; arrays that are in one stay what they are."""

    convert: Callable[[Array], Any] = np.copy

    def array(self, values: Any) -> Any:
        return self.convert(values) if isinstance(values, np.ndarray) else values


SLOTS, TOKENS = [5, 9, 3, 7, 11], [11, 12, 13, 14, 15]


def stamped_buffer(**options: Any) -> HostBuffer:
    """32 slots in which row 2 of TABLE is stamped."""
    buffer = HostBuffer.empty(32, **options)
    buffer.stamp(SLOTS, TOKENS)
    return buffer


def changed_buffer() -> HostBuffer:
    """A stamped one, in which the last token is another one: one violation where tokens are compared."""
    buffer = stamped_buffer()
    buffer.set_record(SLOTS[-1], 99)
    return buffer


def buffer_with_kv() -> tuple[HostBuffer, Array]:
    """A stamped buffer over KV bytes, and these."""
    kv = np.random.default_rng(0).integers(0, 256, (32, 64), dtype=np.uint8)
    buffer = HostBuffer.empty(32, sources=[HostSource(kv, 1, 64, 64)], mode=2)
    buffer.stamp(SLOTS, TOKENS)
    return buffer, kv


def entries() -> list[Entry]:
    return [
        Entry(slot, SLOTS[i - 1] if i else -1, i, token)
        for i, (slot, token) in enumerate(zip(SLOTS, TOKENS, strict=True))
    ]


def plan_offsets_arguments() -> dict[str, Any]:
    return make_arguments([2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE, mapping=np.arange(40), window=3)


def plan_entries_arguments() -> dict[str, Any]:
    return make_entries_arguments([2, 4], [5, 3], TABLE, [0, 5, 8])


def canary_plan_arguments() -> dict[str, Any]:
    scratch = np.zeros(4, np.int64)
    return make_plan_arguments(
        [2, 0, 4], [5, 9, 0], [1, 3, 4], TABLE, capacity=9, verify_offsets_scratch=scratch, bs_block_size=3
    )


def scatter_arguments() -> dict[str, Any]:
    return {
        "flat_in": np.arange(20, 28),
        "offsets": np.array([0, 3, 8]),
        "req_pool_indices": np.array([2, 4]),
        "pool_out": np.zeros((6, 16), np.int32),
        "out_status": np.zeros(1, np.int32),
    }


def write_arguments() -> dict[str, Any]:
    arguments = one_request([13, 15, 17], first_position=5, seed=SLOTS[-1])
    return {
        "context": stamped_buffer().on_device(NUMPY),
        "plan": WritePlan(**{name: arguments[name] for name in PLAN}),
        "enable_write_input_assert": False,
        **{name: arguments[name] for name in ENTRIES},
    }


def verify_arguments() -> dict[str, Any]:
    return {
        "context": changed_buffer().on_device(NUMPY),
        "plan": make_plan(NUMPY, entries()),
        "check_verify_expected_token": True,
    }


def verify_batch_arguments() -> dict[str, Any]:
    expected = np.zeros((6, 16), np.int32)
    expected[2, :5] = TOKENS
    return {
        "context": changed_buffer().on_device(NUMPY),
        "req_pool_indices": np.array([2, 4]),
        "prefix_lens": np.array([5, 0]),
        "req_to_token": TABLE.copy(),
        "full_to_swa_index_mapping": None,
        "verify_offsets_scratch": np.array([0, 5, 5]),
        "verify_num_valid": np.array([5], np.int32),
        "verify_enable": np.array([1], np.int32),
        "req_to_verify_expected_tokens": expected,
        "req_to_verify_expected_tokens_valid_lens": np.array([5, 0]),
        "kv_token_id_vs_position_offset": 0,
        "swa_window_size": 0,
        "verify_capacity": 9,
        "check_verify_expected_token": True,
    }


def copy_records_arguments() -> dict[str, Any]:
    context = stamped_buffer().on_device(NUMPY)
    return {"context": context, "src_slots": np.array([5, 9]), "dst_slots": np.array([20, 21])}


def forget_records_arguments() -> dict[str, Any]:
    return {"context": stamped_buffer().on_device(NUMPY), "dst_slots": np.array([5, 9], np.int32)}


def export_records_arguments() -> dict[str, Any]:
    return {
        "context": stamped_buffer().on_device(NUMPY),
        "src_slots": np.array([5, 99]),
        "out_records": np.ones((1, 2, 32), np.uint8),
        "out_status": np.zeros(1, np.int32),
    }


def import_records_arguments() -> dict[str, Any]:
    records = np.random.default_rng(0).integers(0, 256, (1, 2, 32), dtype=np.uint8)
    return {"context": stamped_buffer().on_device(NUMPY), "dst_slots": np.array([20, 21]), "records": records}


LAUNCHES: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "plan_offsets": (launch_plan_offsets_kernel, plan_offsets_arguments),
    "plan_entries": (launch_plan_entries_kernel, plan_entries_arguments),
    "canary_plan": (launch_canary_plan_kernels, canary_plan_arguments),
    "scatter": (launch_scatter_req_token_ids_kernel, scatter_arguments),
    "write": (launch_canary_write_kernel, write_arguments),
    "copy_records": (launch_canary_copy_records_kernel, copy_records_arguments),
    "forget_records": (launch_canary_forget_records_kernel, forget_records_arguments),
    "export_records": (launch_canary_export_records_kernel, export_records_arguments),
    "import_records": (launch_canary_import_records_kernel, import_records_arguments),
    "verify": (launch_canary_verify_kernel, verify_arguments),
    "verify_batch": (launch_canary_verify_batch_kernel, verify_batch_arguments),
}
"""Every launcher, with arguments for which each launch finds one violation at most (the order of rows is free)."""


ON_GPU = [pytest.param(library, "cuda", marks=pytest.mark.gpu) for library in ("cupy", "torch", "jax")]
PLACES = [("numpy", "cpu"), ("torch", "cpu"), ("jax", "cpu"), *ON_GPU]
"""Libraries and the devices that their arrays are on."""


def converter(library: str, device: str = "cuda") -> Callable[[Array], Any]:
    """Copies a NumPy array to a library's array on a device; skips where there is no such library or device."""
    if device != "cpu":
        require_gpu()
    if library == "dlpack":
        inner = converter("numpy" if device == "cpu" else "cupy", device)
        return lambda array: dlpack.exported(inner(array), (dlpack.CPU if device == "cpu" else dlpack.CUDA, 0))
    module = pytest.importorskip(library, reason=f"{library} is not installed")
    if library == "numpy":
        return np.copy
    if library == "cupy":
        return module.array  # type: ignore[no-any-return]
    if library == "torch":
        if device != "cpu" and not module.cuda.is_available():
            pytest.skip("torch has no CUDA device")
        return lambda array: module.from_numpy(array.copy()).to(device)
    if library == "numba":
        return importlib.import_module("numba.cuda").to_device  # type: ignore[no-any-return]
    try:
        place = module.devices("cpu" if device == "cpu" else "cuda")[0]
    except RuntimeError:
        pytest.skip("jax has no CUDA device")

    def on_jax(array: Array) -> Any:
        # Outside of its 64-bit mode JAX would narrow int64.
        with module.enable_x64(True):
            return module.device_put(array.copy(), place)

    return on_jax


def converted(arguments: dict[str, Any], convert: Callable[[Array], Any]) -> tuple[dict[str, Any], list[Any]]:
    """Arguments with converted arrays, and these arrays in their order."""
    made: list[Any] = []

    def change(array: Array) -> Any:
        made.append(convert(array))
        return made[-1]

    return map_arrays(arguments, change), made


def to_numpy(array: Any) -> Array:
    """A copy on the host, of any library's array."""
    if isinstance(array, dlpack.Producer):
        array = array.owner
    for method in ("get", "cpu", "copy_to_host"):
        if hasattr(array, method):
            return np.asarray(getattr(array, method)())
    return np.array(array)
