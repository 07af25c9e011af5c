"""One call for every catalogue entry of writes, which raises it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary.ops.write import launch_canary_write_kernel
from cupy_kvcanary.types import WritePlan
from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer
from tests.helpers.write import ENTRIES, PLAN, one_request

if TYPE_CHECKING:
    from collections.abc import Callable


def valid_arguments(**changed: Any) -> dict[str, Any]:
    """Keyword arguments of the launcher, on the CPU, with some of them replaced; those of the plan by their names."""
    arguments = {**one_request([5, 9, 3]), **{name: changed.pop(name) for name in PLAN if name in changed}}
    return {
        "context": HostBuffer.empty(16).on_device(ArrayBackend("numpy")),
        "plan": WritePlan(**{name: arguments[name] for name in PLAN}),
        "enable_write_input_assert": False,
        **{name: arguments[name] for name in ENTRIES},
    } | changed


WRITE_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-expected-input-tensors-are-required": lambda: launch_canary_write_kernel(
        **valid_arguments(enable_write_input_assert=True)
    ),
    "kv-canary-expected-input-tensors-must-be-none": lambda: launch_canary_write_kernel(
        **valid_arguments(expected_input_tokens=np.zeros(3, np.int64))
    ),
}
