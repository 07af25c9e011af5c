"""Plans and logs: the arrays that the launchers share, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arrays import Device, as_device
from .checks import check_int, check_non_negative
from .constants import VIOLATION_FIELDS
from .launch import BACKENDS


def _zeros(shape: Any, dtype: str, device: Device) -> Any:
    return BACKENDS[device.type].allocate_zeros(shape, dtype, device, None)


def _capacity(name: str, value: Any) -> int:
    capacity = check_int(name, value)
    check_non_negative(name, capacity)
    return capacity


@dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    """Entries to verify: written by `launch_canary_plan_kernels`, read by `launch_canary_verify_kernel`."""

    verify_slot_indices: Any
    """int64[verify_capacity]: slot of each entry."""
    verify_expected_tokens: Any
    """int64[verify_capacity]: token that its record must hold, -1 for any."""
    verify_expected_positions: Any
    """int64[verify_capacity]: position that its record must hold."""
    verify_prev_slot_indices: Any
    """int64[verify_capacity]: slot of the token before, -1 for none."""
    verify_num_valid: Any
    """int32[1]: entries that are valid."""
    enable: Any
    """int32[1]: 0 when the entries did not fit and verification is skipped, else 1."""

    @classmethod
    def allocate(cls, verify_capacity: int, device: Any = "cpu") -> VerifyPlan:
        """An empty, enabled plan of NumPy arrays (`"cpu"`) or CuPy arrays (`"cuda"`, `"cuda:1"`, a device object)."""
        capacity, place = _capacity("verify_capacity", verify_capacity), as_device(device)
        enable = _zeros(1, "int32", place)
        enable[...] = 1
        return cls(
            **{name: _zeros(capacity, "int64", place) for name in _ENTRY_ARRAYS},
            verify_num_valid=_zeros(1, "int32", place),
            enable=enable,
        )

    @staticmethod
    def allocation_bytes(verify_capacity: int) -> int:
        """Bytes of the arrays that `allocate` makes."""
        return 4 * 8 * _capacity("verify_capacity", verify_capacity) + 2 * 4


_ENTRY_ARRAYS = (
    "verify_slot_indices",
    "verify_expected_tokens",
    "verify_expected_positions",
    "verify_prev_slot_indices",
)


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """What each request writes: written by `launch_canary_plan_kernels`, read by `launch_canary_write_kernel`."""

    write_offsets: Any
    """int64[write_req_capacity + 1]: request r owns entries [write_offsets[r], write_offsets[r + 1])."""
    write_seed_slot_indices: Any
    """int64[write_req_capacity]: slot of the token before the first one written, -1 for none."""
    write_num_valid_reqs: Any
    """int32[1]: requests that are valid."""

    @classmethod
    def allocate(cls, write_req_capacity: int, device: Any = "cpu") -> WritePlan:
        """An empty plan of NumPy or CuPy arrays, as in `VerifyPlan.allocate`."""
        capacity, place = _capacity("write_req_capacity", write_req_capacity), as_device(device)
        return cls(
            write_offsets=_zeros(capacity + 1, "int64", place),
            write_seed_slot_indices=_zeros(capacity, "int64", place),
            write_num_valid_reqs=_zeros(1, "int32", place),
        )

    @staticmethod
    def allocation_bytes(write_req_capacity: int) -> int:
        """Bytes of the arrays that `allocate` makes."""
        return 8 * (2 * _capacity("write_req_capacity", write_req_capacity) + 1) + 4


@dataclass(frozen=True, kw_only=True)
class ViolationLog:
    """Where violations go; several contexts may share one."""

    violation_ring: Any
    """int64[ring_capacity, 8]: the first violations, in any order."""
    violation_write_index: Any
    """int32[1]: violations so far, also those that the ring had no room for; up to 2^31 - 1."""

    @classmethod
    def allocate(cls, ring_capacity: int, device: Any = "cpu") -> ViolationLog:
        """An empty log of NumPy or CuPy arrays, as in `VerifyPlan.allocate`."""
        capacity, place = _capacity("ring_capacity", ring_capacity), as_device(device)
        return cls(
            violation_ring=_zeros((capacity, VIOLATION_FIELDS), "int64", place),
            violation_write_index=_zeros(1, "int32", place),
        )

    @staticmethod
    def allocation_bytes(ring_capacity: int) -> int:
        """Bytes of the arrays that `allocate` makes."""
        return 8 * VIOLATION_FIELDS * _capacity("ring_capacity", ring_capacity) + 4
