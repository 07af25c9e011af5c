"""JAX arrays are taken as inputs and refused, by name, as outputs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, launch_canary_verify_kernel, launch_plan_offsets_kernel
from cupy_kvcanary.arrays import view_array
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.interop import (
    NUMPY,
    buffer_with_kv,
    converted,
    converter,
    entries,
    plan_offsets_arguments,
    to_numpy,
)
from tests.helpers.plan_offsets import OUTPUTS, expected_outputs
from tests.helpers.verify import make_plan

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def output_library(device: str) -> str:
    return "numpy" if device == "cpu" else "cupy"


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_of_a_launcher(device: str) -> None:
    arguments = plan_offsets_arguments()
    on_jax, on_other = (converter(library, device) for library in ("jax", output_library(device)))
    mixed = {
        name: (on_other if name.startswith("out_") else on_jax)(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    launch_plan_offsets_kernel(**mixed)
    for name, value in expected_outputs(arguments).items():
        np.testing.assert_array_equal(to_numpy(mixed[name]), value, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*OUTPUTS, "out_status"])
def test_an_output_is_refused(name: str, device: str) -> None:
    arguments, _ = converted(plan_offsets_arguments(), converter(output_library(device), device))
    arguments[name] = converter("jax", device)(to_numpy(arguments[name]))
    before = np.array(arguments[name])
    with pytest.raises(KvCanaryError, match=f"{name} must be writable, got a read-only array"):
        launch_plan_offsets_kernel(**arguments)
    np.testing.assert_array_equal(arguments[name], before)


def test_memory_is_shared() -> None:
    array = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    view = view_array("a", array)
    assert (view.pointer, view.shape, view.dtype) == (array.unsafe_buffer_pointer(), (3, 4), "int32")
    assert view.read_only


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_kv_cache_of_any_dtype_is_verified_as_bytes(dtype: str) -> None:
    buffer, kv = buffer_with_kv()
    assert count_violations(buffer, jnp.asarray(kv.view(dtype))) == 0
    kv[3, 5] ^= 1
    assert count_violations(buffer, jnp.asarray(kv.view(dtype))) == 1


def count_violations(buffer: HostBuffer, cache: Any) -> int:
    buffer.sources = [HostSource(cache, 1, 64, 64)]
    context = buffer.on_device(NUMPY)
    launch_canary_verify_kernel(context=context, plan=make_plan(NUMPY, entries()), check_verify_expected_token=True)
    return int(context.violation_write_index[0])


def test_four_bit_elements_are_refused() -> None:
    with pytest.raises(KvCanaryError, match="tensor must have dtype of whole bytes"):
        view_array("tensor", jnp.zeros((4, 16), jnp.float4_e2m1fn))


def test_a_tracer_is_no_array() -> None:
    def traced(array: Any) -> Any:
        with pytest.raises(KvCanaryError, match=r"a must be an array .*, got DynamicJaxprTracer"):
            view_array("a", array)
        return array

    jax.jit(traced)(jnp.ones(3))


def test_a_sharded_array_is_refused() -> None:
    """In a process of its own, which has two CPU devices."""
    code = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, cupy_kvcanary as k
mesh = jax.make_mesh((2,), ("x",))
place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
rows = jax.device_put(jnp.ones(4, jnp.int32), place)
try:
    k.plan_offsets(rows, rows, rows, jnp.ones((2, 3), jnp.int32))
except k.KvCanaryError as error:
    assert "req_pool_indices must be exported by its library through DLPack, got" in str(error), error
else:
    raise AssertionError("taken")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
