"""What a canary allocates: records, log, plans; and the launches of a step over them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import as_device, is_array, view_array
from .buffers import VerifyOrWriteContext
from .canary_config import LogLayout, log_layout
from .compile import import_cupy
from .constants import (
    CANARY_SLOT_BYTES,
    INT32_MAX,
    VIOLATION_DETAIL_FIELDS,
    VIOLATION_FIELDS,
    CanaryLaunchTag,
    RealKvHashMode,
)
from .launch import BACKENDS
from .launcher import bind_all
from .ops.plan_offsets import launch_plan_offsets_kernel
from .ops.verify import launch_canary_verify_batch_kernel
from .ops.write import launch_canary_write_kernel
from .snapshots import CudaSnapshots, HostSnapshots, Snapshots
from .streams import CallersStreams, as_cupy_stream, is_capturing
from .types import VerifyPlan, WritePlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from .batch import Batch
    from .canary_config import CanaryConfig, Group, KvPool
    from .launcher import BoundLaunch, Launcher


class Place:
    """Where a canary's arrays are, and which stream an engine's call is on."""

    def __init__(self, device: Any) -> None:
        self.device = as_device(device)
        self._backend = BACKENDS[self.device.type]
        self._cupy = None if self.device.type == "cpu" else import_cupy()

    def zeros(self, shape: Any, dtype: str, stream: int | None = None) -> Any:
        """A new array, for work on the stream."""
        return self._backend.allocate_zeros(shape, dtype, self.device, stream)

    def array(self, values: Any, stream: Any) -> Any:
        """The values on the device, int64 where they are not an array: the array itself if it is there."""
        if not is_array(values):
            values = np.asarray(values, np.int64)
        if self._cupy is None or not isinstance(values, np.ndarray):
            return values
        with self._cupy.cuda.Device(self.device.index), as_cupy_stream(self._cupy, stream):
            return self._cupy.asarray(values)

    def copy(self, destination: Any, source: Any, stream: Any) -> None:
        """Copy an array of the device, of NumPy, or a list into one of the canary's; of any integer type."""
        if not is_array(source):
            source = np.asarray(source, np.int64)
        if self._cupy is None:
            destination[...] = view_array("source", source).as_numpy()
            return
        with self._cupy.cuda.Device(self.device.index), as_cupy_stream(self._cupy, stream):
            if isinstance(source, np.ndarray):
                destination.set(np.ascontiguousarray(source, destination.dtype))  # allocates nothing on the device
            else:
                destination[...] = self._cupy.asarray(source)

    def stream_of(self, *arrays: Any) -> int | None:
        """The stream that the library of the arrays on the device works on now; None on the CPU."""
        return self.streams_of(*arrays)()

    def streams_of(self, *arrays: Any) -> Callable[[], int | None]:
        """The same as a function, to be asked again and again."""
        if self._cupy is None:
            return lambda: None
        views = [view_array("array", array) for array in arrays if is_array(array)]
        on_device = [view for view in views if view.device == self.device]
        if on_device:
            return functools.partial(CallersStreams(self._cupy, on_device).handle, None)
        get_current_stream, index = self._cupy.cuda.get_current_stream, self.device.index
        return lambda: int(get_current_stream(index).ptr)

    def is_capturing(self, stream: int | None) -> bool:
        """Whether a graph is being captured on the stream."""
        return stream is not None and is_capturing(self._cupy, stream)

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self._cupy is not None:
            with self._cupy.cuda.Device(self.device.index):
                self._cupy.cuda.runtime.deviceSynchronize()

    def snapshots(self, log: Any) -> Snapshots:
        """Snapshots of the log."""
        return HostSnapshots(log) if self._cupy is None else CudaSnapshots(log, self.device)


class GroupBuffers:
    """A group's buffers as the launchers take them, and the offsets of its batch."""

    def __init__(
        self, pool: KvPool, config: CanaryConfig, group: Group, place: Place, log: Log, number: int, first: int
    ) -> None:
        """`number` counts groups, `first` the buffers of those before it."""
        self.group = group
        self.tags = group.tags()
        self.records = {tag: place.zeros((group.num_slots, CANARY_SLOT_BYTES), "uint8") for tag in self.tags}
        self.verify: list[VerifyOrWriteContext] = []
        self.write: list[VerifyOrWriteContext] = []
        self.sweep: list[VerifyOrWriteContext] = []
        hashes = config.hash_mode != RealKvHashMode.NONE
        for index, tag in enumerate(self.tags, first):
            word = log.layout.buffer(index)
            for contexts, kind, counters in (
                (self.verify, tag, word),
                (self.write, tag, word + 2),
                (self.sweep, sweep_tag(tag), word + 4),
            ):
                contexts.append(
                    VerifyOrWriteContext(
                        canary_buf=self.records[tag],
                        kernel_kind=kind,
                        violation_ring=log.ring,
                        violation_write_index=log.int32(LogLayout.WRITE_INDEX, 0),
                        violation_details=log.details,
                        slot_run_counter=log.int64(counters),
                        kernel_run_counter=log.int64(counters + 1),
                        skip_counters=log.int64(word + 6, 2),
                        real_kv_sources=group.sources(tag, pool) if hashes else (),
                        real_kv_hash_mode=config.hash_mode,
                        enable_chain_position_assert=log.int32(LogLayout.ASSERTION, 0),
                    )
                )
        self.verify_offsets = place.zeros(pool.max_reqs + 1, "int64")
        self.sweep_plan = VerifyPlan.allocate(config.sweep_slice, place.device)
        self.sweep_plan.verify_num_valid[...] = config.sweep_slice
        word = log.layout.group(number)
        self.verify_num_valid, self.verify_enable = log.int32(word, 0), log.int32(word, 1)
        self.write_plan = WritePlan(
            write_offsets=place.zeros(pool.max_reqs + 1, "int64"),
            write_seed_slot_indices=place.zeros(pool.max_reqs, "int64"),
            write_num_valid_reqs=log.int32(word + 1, 0),
        )


def sweep_tag(tag: CanaryLaunchTag) -> CanaryLaunchTag:
    """What the sweep calls a buffer: it does not tell head and tail apart."""
    _, part, group = tag.name.split("_")
    return CanaryLaunchTag[f"SWEEP_{part}_{group}"]


class Log:
    """Violations, details and counters: one array of int64, and views of its parts."""

    def __init__(self, layout: LogLayout, place: Place) -> None:
        self.layout = layout
        self.words = place.zeros(layout.size, "int64")
        self.ring = self.words[layout.ring : layout.details].reshape(-1, VIOLATION_FIELDS)
        self.details = self.words[layout.details :].reshape(-1, VIOLATION_DETAIL_FIELDS)
        self.int32(LogLayout.ASSERTION, 0)[...] = 1

    def int64(self, word: int, count: int = 1) -> Any:
        """Counters."""
        return self.words[word : word + count]

    def int32(self, word: int, half: int) -> Any:
        """One half of a word."""
        return self.words[word : word + 1].view("int32")[half : half + 1]


class CanaryBuffers:
    """All that a canary has on its device."""

    def __init__(self, pool: KvPool, config: CanaryConfig) -> None:
        self.pool = pool
        self.config = config
        self.place = place = Place(pool.device)
        self.log = Log(log_layout(pool, config), place)
        self.rows = place.zeros(pool.max_reqs, "int64")
        """Row of each request of a batch that does not say."""
        place.copy(self.rows, np.arange(pool.max_reqs), 0)
        self.groups: list[GroupBuffers] = []
        first = 0
        for number, group in enumerate(pool.groups()):
            self.groups.append(GroupBuffers(pool, config, group, place, self.log, number, first))
            first += len(self.groups[-1].tags)
        # The arrays were filled on CuPy's stream, and the engine may use another.
        place.synchronize()

    @property
    def records(self) -> dict[CanaryLaunchTag, Any]:
        """The records of each buffer."""
        return {tag: records for group in self.groups for tag, records in group.records.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on the device."""
        arrays = [self.log.words, self.rows, *self.records.values()]
        for group in self.groups:
            plan = group.write_plan
            arrays += [group.verify_offsets, plan.write_offsets, plan.write_seed_slot_indices]
            arrays += vars(group.sweep_plan).values()
        return sum(array.nbytes for array in arrays)


class BatchLaunches:
    """A step's launches over one batch: checked at the first step, bound at the second, only launched from then on."""

    def __init__(self, buffers: CanaryBuffers, batch: Batch) -> None:
        config, pool, status = buffers.config, buffers.pool, buffers.log.int32(LogLayout.WRITE_INDEX, 1)
        self._bound: dict[tuple[int | None, tuple[str, ...]], BoundLaunch | None] = {}
        self._calls: dict[str, list[tuple[Launcher[Any], dict[str, Any]]]] = {"plan": [], "verify": [], "write": []}
        self.stream = buffers.place.streams_of(batch.prefix_lens)
        """Gives the stream that the engine works on now."""
        rows = batch.req_pool_indices
        if rows is None:
            prefix_lens = view_array("prefix_lens", batch.prefix_lens)
            rows = buffers.rows if batch.bs is not None else buffers.rows[: prefix_lens.size]
        capacity = INT32_MAX if config.verify_capacity is None else config.verify_capacity
        for group in buffers.groups:
            read = {
                "req_pool_indices": rows,
                "prefix_lens": batch.prefix_lens,
                "req_to_token": batch.page_table,
                "full_to_swa_index_mapping": group.group.mapping,
                "swa_window_size": group.group.window,
                "verify_capacity": capacity,
                "bs": batch.bs,
                "out_status": status,
            }
            plan = group.write_plan
            self._calls["plan"].append(
                (
                    launch_plan_offsets_kernel,
                    {
                        **read,
                        "extend_seq_lens": batch.extend_seq_lens,
                        "out_verify_offsets_scratch": group.verify_offsets,
                        "out_write_offsets": plan.write_offsets,
                        "out_write_seed_slot_indices": plan.write_seed_slot_indices,
                        "out_verify_num_valid": group.verify_num_valid,
                        "out_verify_enable": group.verify_enable,
                        "out_write_num_valid_reqs": plan.write_num_valid_reqs,
                        "bs_block_size": pool.max_reqs,
                        "strict": False,
                    },
                )
            )
            expects = config.expected_tokens and batch.expected_tokens is not None
            self._calls["verify"].append(
                (
                    launch_canary_verify_batch_kernel,
                    {
                        **read,
                        "context": group.verify,
                        "verify_offsets_scratch": group.verify_offsets,
                        "verify_num_valid": group.verify_num_valid,
                        "verify_enable": group.verify_enable,
                        "req_to_verify_expected_tokens": batch.expected_tokens if expects else None,
                        "req_to_verify_expected_tokens_valid_lens": batch.expected_token_lens if expects else None,
                        "kv_token_id_vs_position_offset": pool.kv_token_id_vs_position_offset,
                        "check_verify_expected_token": expects,
                        "padding_slot": pool.padding_slot,
                        "check_holes": config.check_holes and group.group.name == "full",
                        "chain": config.chain,
                    },
                )
            )
            self._calls["write"].append(
                (
                    launch_canary_write_kernel,
                    {
                        "context": group.write,
                        "plan": plan,
                        "input_ids": batch.input_ids,
                        "positions": batch.positions,
                        "out_cache_loc": batch.out_cache_loc,
                        "enable_write_input_assert": False,
                        "expected_input_tokens": None,
                        "expected_input_positions": None,
                        "full_to_swa_index_mapping": group.group.mapping,
                        "padding_slot": pool.padding_slot,
                        "chain": config.chain,
                        "out_status": status,
                    },
                )
            )

    def launch(self, stream: int | None, *what: str) -> None:
        """Launch the `plan`, the `verify` or the `write` of every group, several one after another."""
        key = (stream, what)
        if key not in self._bound:
            self._bound[key] = None  # a batch that is never given again is not worth binding
            for launcher, arguments in self._calls_of(what):
                launcher(**arguments, stream=stream)
            return
        bound = self._bound[key]
        if bound is None:
            calls = [(launcher, {**arguments, "stream": stream}) for launcher, arguments in self._calls_of(what)]
            bound = self._bound[key] = bind_all(calls)
        bound()

    def _calls_of(self, what: tuple[str, ...]) -> list[tuple[Launcher[Any], dict[str, Any]]]:
        return [call for name in what for call in self._calls[name]]

    def write(self, stream: int | None, **arrays: Any) -> None:
        """Launch the write of every group for tokens that are not the batch's own."""
        for launcher, arguments in self._calls["write"]:
            launcher(**{**arguments, **arrays}, stream=stream)
