"""Static planner buffers of a replay, on the CPU or mirrored on a GPU."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from .catalogue import error
from .compile import usable_cupy
from .errors import KvCanaryRuntimeError
from .plan_check import PlanOutputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .engine_model import EngineModel, Step

T = TypeVar("T")


class ReplayDevice(Protocol):
    """Where the plans of a replay run."""

    name: str
    xp: Any
    """NumPy or CuPy."""
    arguments: dict[str, Any]
    """The planner's arrays by keyword: the same objects at every step."""

    def load(self, step: Step) -> None:
        """Bring the step's values to where the plan reads them."""

    def wait(self) -> None:
        """Until the plan is there."""

    def read_outputs(self) -> PlanOutputs:
        """The outputs in host memory."""

    def read_status(self) -> int:
        """`StatusBit`s of all plans so far."""

    def allocated_by(self, make: Callable[[], T]) -> tuple[T, int]:
        """What a call makes, and the bytes of arrays that it allocated and kept."""


def make_device(name: str, engine: EngineModel, bs_block_size: int) -> ReplayDevice:
    """The device "cpu" or "cuda"; "auto" takes CUDA where there is a usable GPU."""
    if name == "cpu":
        return CpuDevice(engine, bs_block_size)
    if name not in ("auto", "cuda"):
        raise error("kv-canary-device-must-be-known", name="device", got=repr(name))
    try:
        return CudaDevice(engine, bs_block_size, usable_cupy())
    except KvCanaryRuntimeError:
        if name == "cuda":
            raise
        return CpuDevice(engine, bs_block_size)


def _outputs_in(block: Any, capacity: int, bs_block_size: int) -> PlanOutputs:
    """The outputs as parts of one int64 array (NumPy or CuPy), so that one copy reads them all."""
    lengths = [bs_block_size + 1, capacity + 1, capacity, 1, 1, 1]
    ends = np.cumsum(lengths).tolist()
    parts = [block[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return PlanOutputs(*parts[:3], *(part.view("int32")[:1] for part in parts[3:]))


def _output_block(xp: Any, capacity: int, bs_block_size: int) -> Any:
    return xp.full(bs_block_size + 1 + capacity + 1 + capacity + 3, -1, "int64")


class CpuDevice:
    """Plans read the engine's own buffers."""

    name = "cpu"
    xp: Any = np

    def __init__(self, engine: EngineModel, bs_block_size: int) -> None:
        capacity = engine.req_pool_indices.size
        self._outputs = _outputs_in(_output_block(np, capacity, bs_block_size), capacity, bs_block_size)
        self._status = np.zeros(1, np.int32)
        window = engine.pool.window
        self.arguments = {
            "req_pool_indices": engine.req_pool_indices,
            "prefix_lens": engine.prefix_lens,
            "extend_seq_lens": engine.extend_seq_lens,
            "req_to_token": engine.req_to_token,
            "full_to_swa_index_mapping": None if window is None else window.mapping,
            **{f"out_{name}": array for name, array in self._outputs._asdict().items()},
            "out_status": self._status,
        }

    def load(self, step: Step) -> None:
        """Nothing to bring."""

    def wait(self) -> None:
        """The launcher returns when the plan is there."""

    def read_outputs(self) -> PlanOutputs:
        """See `ReplayDevice.read_outputs`."""
        return self._outputs

    def read_status(self) -> int:
        """See `ReplayDevice.read_status`."""
        return int(self._status[0])

    def allocated_by(self, make: Callable[[], T]) -> tuple[T, int]:
        """See `ReplayDevice.allocated_by`."""
        tracemalloc.start()
        try:
            made = make()
            arrays = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)]
            )
        finally:
            tracemalloc.stop()
        return made, sum(trace.size for trace in arrays.traces)


class CudaDevice:
    """Plans read CuPy arrays. Of the page table and the mapping, only pages that changed are copied."""

    name = "cuda"

    def __init__(self, engine: EngineModel, bs_block_size: int, cupy: ModuleType) -> None:
        self.xp = cupy
        self._engine = engine
        self._sizes = engine.req_pool_indices.size, bs_block_size
        self._block = _output_block(cupy, *self._sizes)
        outputs = _outputs_in(self._block, *self._sizes)
        self._batch = cupy.zeros(engine.batch.shape, "int64")
        self._status = cupy.zeros(1, "int32")
        window = engine.pool.window
        self.arguments = {
            "req_pool_indices": self._batch[0],
            "prefix_lens": self._batch[1],
            "extend_seq_lens": self._batch[2],
            "req_to_token": cupy.zeros(engine.req_to_token.shape, "int32"),
            "full_to_swa_index_mapping": None if window is None else cupy.zeros(window.mapping.shape, "int64"),
            **{f"out_{name}": array for name, array in outputs._asdict().items()},
            "out_status": self._status,
        }

    def load(self, step: Step) -> None:
        """Copy the batch and the changed pages."""
        self._batch.set(self._engine.batch)
        self._copy_pages("req_to_token", step.req_to_token, self._engine.changed_table_pages())
        if step.full_to_swa_index_mapping is not None:
            changed = self._engine.changed_mapping_pages()
            self._copy_pages("full_to_swa_index_mapping", step.full_to_swa_index_mapping, changed)
        self.wait()  # the copies do not count as plan time

    def wait(self) -> None:
        """See `ReplayDevice.wait`."""
        self.xp.cuda.get_current_stream().synchronize()

    def read_outputs(self) -> PlanOutputs:
        """See `ReplayDevice.read_outputs`."""
        return _outputs_in(self._block.get(), *self._sizes)

    def read_status(self) -> int:
        """See `ReplayDevice.read_status`."""
        return int(self._status.get()[0])

    def _copy_pages(self, name: str, source: np.ndarray[Any, Any], pages: np.ndarray[Any, Any]) -> None:
        # A page that changed twice stands in `pages` twice, with its final content both times: any order is right.
        if pages.size:
            page_size = self._engine.config.page_size
            values = source.reshape(-1, page_size)[pages]
            self.arguments[name].reshape(-1, page_size)[self.xp.asarray(pages)] = self.xp.asarray(values)

    def allocated_by(self, make: Callable[[], T]) -> tuple[T, int]:
        """See `ReplayDevice.allocated_by`."""
        pool = self.xp.get_default_memory_pool()
        before = pool.used_bytes()
        return make(), pool.used_bytes() - before
