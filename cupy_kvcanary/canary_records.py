"""A canary's records outside of steps: stamped anew, moved along with KV, forgotten, and swept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .canary_config import LogLayout
from .catalogue import error
from .constants import CANARY_SLOT_BYTES
from .ops.move import (
    launch_canary_copy_records_kernel,
    launch_canary_export_records_kernel,
    launch_canary_forget_records_kernel,
    launch_canary_import_records_kernel,
)
from .ops.verify import launch_canary_verify_kernel
from .ops.write import launch_canary_write_kernel
from .types import VerifyPlan, WritePlan

if TYPE_CHECKING:
    from .canary_buffers import CanaryBuffers, GroupBuffers
    from .canary_config import GroupName
    from .sweep import Sweep


class CanaryRecords:
    """The records of a canary's buffers; its methods are documented at `Canary`. Slots are arrays or lists."""

    def __init__(self, buffers: CanaryBuffers) -> None:
        self._buffers = buffers
        self._pool = buffers.pool
        self._place = buffers.place
        self._status = buffers.log.int32(LogLayout.WRITE_INDEX, 1)

    def restamp(self, slots: Any, positions: Any, tokens: Any, seed_slot: int) -> None:
        """See `Canary.restamp`."""
        place = self._place
        stream = place.stream_of(slots, positions, tokens)
        slots, positions = (place.array(values, stream) for values in (slots, positions))
        if tokens is None:
            tokens = place.zeros(len(slots), "int64", stream)
            place.copy(tokens, self.export(slots, None)[0].view("int64")[:, 0], stream)
        else:
            tokens = place.array(tokens, stream)
        for group in self._buffers.groups:
            launch_canary_write_kernel(
                context=group.write,
                plan=WritePlan(
                    write_offsets=place.array([0, len(slots)], stream),
                    write_seed_slot_indices=place.array([seed_slot], stream),
                    write_num_valid_reqs=place.array(np.ones(1, np.int32), stream),
                ),
                input_ids=tokens,
                positions=positions,
                out_cache_loc=slots,
                enable_write_input_assert=False,
                expected_input_tokens=None,
                expected_input_positions=None,
                full_to_swa_index_mapping=group.group.mapping,
                padding_slot=self._pool.padding_slot,
                chain=self._buffers.config.chain,
                out_status=self._status,
                stream=stream,
            )

    def forget(self, slots: Any, group: GroupName | None) -> None:
        """See `Canary.forget`."""
        stream = self._place.stream_of(slots)
        launch_canary_forget_records_kernel(
            context=self.group(group).write,
            dst_slots=self._place.array(slots, stream),
            padding_slot=self._pool.padding_slot,
            out_status=self._status,
            stream=stream,
        )

    def copy(self, src_slots: Any, dst_slots: Any, group: GroupName | None) -> None:
        """See `Canary.copy`."""
        stream = self._place.stream_of(src_slots, dst_slots)
        launch_canary_copy_records_kernel(
            context=self.group(group).write,
            src_slots=self._place.array(src_slots, stream),
            dst_slots=self._place.array(dst_slots, stream),
            padding_slot=self._pool.padding_slot,
            out_status=self._status,
            stream=stream,
        )

    def export(self, slots: Any, group: GroupName | None) -> Any:
        """See `Canary.export_records`."""
        place, contexts = self._place, self.group(group).write
        stream = place.stream_of(slots)
        slots = place.array(slots, stream)
        records = place.zeros((len(contexts), len(slots), CANARY_SLOT_BYTES), "uint8", stream)
        launch_canary_export_records_kernel(
            context=contexts, src_slots=slots, out_records=records, out_status=self._status, stream=stream
        )
        return records

    def bring(self, slots: Any, records: Any, group: GroupName | None) -> None:
        """See `Canary.import_records`."""
        stream = self._place.stream_of(slots)
        launch_canary_import_records_kernel(
            context=self.group(group).write,
            dst_slots=self._place.array(slots, stream),
            records=self._place.array(records, stream),
            padding_slot=self._pool.padding_slot,
            chain=self._buffers.config.chain,
            out_status=self._status,
            stream=stream,
        )

    def verify_slice(self, sweep: Sweep, stream: int | None) -> None:
        """Verify the sweep's next slice, if it has one."""
        taken = sweep.take(self._buffers.config.sweep_slice)
        if taken is None:
            return
        chunk, part = taken
        group, count = self.group(chunk.group), part.stop - part.start
        plan = group.sweep_plan
        entries = {
            "verify_slot_indices": chunk.slots[part],
            "verify_expected_positions": chunk.positions[part],
            "verify_prev_slot_indices": chunk.prev_slots[part],
            "verify_expected_tokens": np.full(count, -1) if chunk.tokens is None else chunk.tokens[part],
        }
        for name, values in entries.items():
            self._place.copy(getattr(plan, name)[:count], values, stream)
        launch_canary_verify_kernel(
            context=group.sweep,
            plan=VerifyPlan(
                **{name: getattr(plan, name)[:count] for name in entries},
                verify_num_valid=plan.verify_num_valid,
                enable=plan.enable,
            ),
            check_verify_expected_token=chunk.tokens is not None,
            padding_slot=self._pool.padding_slot,
            chain=self._buffers.config.chain,
            stream=stream,
        )

    def group(self, name: GroupName | None) -> GroupBuffers:
        """A group by its name; None for the first."""
        for group in self._buffers.groups:
            if name in (None, group.group.name):
                return group
        known = ", ".join(group.group.name for group in self._buffers.groups)
        raise error("kv-canary-must-be-one-of", name="group", expected=known, got=repr(name))
