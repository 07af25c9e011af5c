"""JAX arrays are taken as inputs and refused, by name, as outputs."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, launch_plan_offsets_kernel, plan_offsets
from tests.helpers.plan_offsets import make_arguments

jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")


def test_inputs() -> None:
    ones = jnp.ones(3, jnp.int32)
    plan = plan_offsets(ones, ones * 2, ones, jnp.arange(20, dtype=jnp.int32).reshape(2, 10))
    assert np.asarray(plan.write_seed_slot_indices).tolist() == [11] * 3


def test_an_output_is_refused() -> None:
    arguments = make_arguments([1], [1], [1], np.ones((2, 4)))
    arguments["out_verify_enable"] = jnp.zeros(1, jnp.int32)
    with pytest.raises(KvCanaryError, match="out_verify_enable must be writable, got a read-only array"):
        launch_plan_offsets_kernel(**arguments)
