"""Replays a trace through the engine model and plans the offsets of every step, optionally checking each plan."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .catalogue import error
from .checks import check_fits_int32, check_int, check_non_negative, check_positive
from .constants import INT32_MAX, PLAN_BS_BLOCK_SIZE, StatusBit
from .engine_model import EngineConfig, EngineModel
from .plan_check import PlanCheck
from .replay_device import make_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .engine_model import Step
    from .traces import TraceRequest

SERIES_POINTS = 600
"""Most points of a series; longer replays are averaged into so many."""

_STEP_RECORD = np.dtype(
    [
        ("time_s", np.float64),
        ("entries", np.int64),
        ("batch", np.int32),
        ("live_pages", np.int32),
        ("cached_pages", np.int32),
        ("plan_us", np.float32),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed. Sizes that are None are derived from the trace (see `derived_sizes`)."""

    speedup: float = 1.0
    """Arrivals come this many times faster than in the trace."""
    step_ms: float = 30.0
    """Milliseconds that a step takes on the trace's clock."""
    chunk: int = 4096
    """Prompt tokens prefilled a step."""
    page_size: int = 16
    """Slots of a page; divides 512."""
    max_running: int = 512
    """Requests in a batch."""
    window: int = 0
    """Sliding window in tokens; 0 for full attention."""
    pool_slots: int | None = None
    """Slots for KV."""
    window_pool_slots: int | None = None
    """Slots of the sliding-window pool."""
    verify_capacity: int | None = None
    """Entries that a verify plan can hold; a step that needs more is counted as an overflow."""
    device: str = "auto"
    """Where the plans run: "cpu", "cuda", or "auto" for CUDA where there is a usable GPU."""
    check: bool = False
    """Compare every plan with a straight computation."""

    def __post_init__(self) -> None:
        for name in ("speedup", "step_ms"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise error("kv-canary-must-be-a-finite-positive-number", name=name, got=value)
        for name in ("chunk", "page_size", "max_running"):
            check_positive(name, check_int(name, getattr(self, name)))
        check_fits_int32("max_running", self.max_running)
        check_non_negative("window", check_int("window", self.window))
        for name in ("pool_slots", "window_pool_slots", "verify_capacity"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, check_int(name, value))
                check_fits_int32(name, value)


class Percentiles(NamedTuple):
    """Of a value over all steps."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class ReplaySummary:
    """What a replay did. `batch` counts real requests, without padding."""

    device: str
    steps: int
    requests: int
    """Requests given."""
    finished: int
    """Requests that ran to their end; fewer than given only when interrupted."""
    preempted: int
    largest_batch: int
    batch: Percentiles
    entries: Percentiles
    """Verify entries that a step's plan asks for, before any cut by the capacity."""
    total_entries: int
    verify_capacity: int
    overflows: int
    """Steps that asked for more entries than the capacity."""
    pool_slots: int
    evicted_blocks: int
    shared_prefix_share: float
    """Of the prompt tokens, those found in the cache."""
    plan_us_p50: float
    """Microseconds from the launch until the plan is there, as the host sees it."""
    plan_us_p99: float
    wall_s: float
    differences: int | None
    """Output values that differ from the straight computation; None without `check`."""
    status: StatusBit
    """What the plans found wrong in their inputs (0: nothing)."""
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class ReplaySeries:
    """The replay over time, in at most `SERIES_POINTS` points of equally many steps each."""

    time_s: NDArray[np.float64]
    """Start of the point's first step on the engine's clock, seconds."""
    batch_mean: NDArray[np.float64]
    batch_max: NDArray[np.int32]
    entries_mean: NDArray[np.float64]
    entries_max: NDArray[np.int64]
    live_slots: NDArray[np.float64]
    """Mean slots of pages that a request uses."""
    cached_slots: NDArray[np.float64]
    """Mean slots of cached prefix blocks that no request uses."""


class ReplayProgress(NamedTuple):
    """Where a replay stands."""

    steps: int
    finished: int
    requests: int
    batch: int
    entries: int


class Sizes(NamedTuple):
    """Buffer sizes of a replay."""

    pool_slots: int
    window_pool_slots: int
    verify_capacity: int


def derived_sizes(requests: Sequence[TraceRequest], options: ReplayOptions) -> Sizes:
    """Sizes from the options or, where those say None, from the trace.

    By Little's law the tokens in flight are, on average, the sum of (prompt + half the answer) * steps of the answer *
    step time, divided by the trace's length. The pool is the longest request plus 3 times that, or 8 times where the
    trace shares prefixes, so that some of them stay cached. The window pool is the same with every request cut to
    window, chunk and a block, and at most the full pool. The verify capacity is the longest request plus 4 times the
    tokens in flight, cut to the window: both traces peak at about half of it.
    """
    longest = max(r.input_length + r.output_length for r in requests)
    in_flight_s = [r.output_length * options.step_ms / 1000 for r in requests]
    arrivals_s = [r.arrival_s / options.speedup for r in requests]
    span_s = max(a + d for a, d in zip(arrivals_s, in_flight_s, strict=True)) or 1.0
    factor = 8 if any(r.block_ids for r in requests) else 3

    def slots(most: int, factor: int) -> int:
        tokens = [min(r.input_length + r.output_length / 2, most) for r in requests]
        mean = sum(t * d for t, d in zip(tokens, in_flight_s, strict=True)) / span_s
        return min(int(factor * mean) + min(longest, most) + 8 * options.page_size, INT32_MAX // 2)

    pool_slots = options.pool_slots or slots(longest, factor)
    # A request's rounding up to pages, and the block that its window is about to leave.
    window_rest = 512 + 4 * options.page_size
    window_pool_slots = options.window_pool_slots or min(
        pool_slots, slots(options.window + options.chunk + window_rest, 3)
    )
    return Sizes(
        pool_slots,
        window_pool_slots if options.window else 0,
        options.verify_capacity or slots(options.window or longest, 4),
    )


def replay(
    requests: Sequence[TraceRequest],
    options: ReplayOptions | None = None,
    *,
    launch: Callable[..., None] | None = None,
    on_step: Callable[[ReplayProgress], None] | None = None,
) -> tuple[ReplaySummary, ReplaySeries]:
    """Run `requests` through the engine model and plan the offsets of every step.

    Parameters
    ----------
    requests : at least one, in order of arrival; from `read_trace` or `generate_trace`.
    options : sizes, speed, device and whether to check.
    launch : what plans a step, with the keywords of `launch_plan_offsets_kernel`, which it is by default.
    on_step : called after every step, and once more at the end.

    Returns
    -------
    The summary and the series over time. On KeyboardInterrupt both cover what was done, with `interrupted` set.

    """
    options = options or ReplayOptions()
    check_positive("len(requests)", len(requests))
    if launch is None:
        from .ops.plan_offsets import launch_plan_offsets_kernel

        launch = launch_plan_offsets_kernel
    sizes = derived_sizes(requests, options)
    config = EngineConfig(
        pool_slots=sizes.pool_slots,
        max_running=options.max_running,
        page_size=options.page_size,
        chunk=options.chunk,
        step_s=options.step_ms / 1000,
        speedup=options.speedup,
        window=options.window,
        window_pool_slots=sizes.window_pool_slots,
    )
    try:
        engine = EngineModel(requests, config)
    except MemoryError as reason:
        raise error("kv-canary-replay-must-fit-in-memory", name="page table and pool", got=str(reason)) from reason
    run = _Run(engine, options, sizes, launch)
    started = time.perf_counter()
    batch = entries = 0
    try:
        for step in engine.steps():
            batch, entries = step.num_requests, run.plan(step)
            if on_step is not None:
                on_step(ReplayProgress(run.num_steps, engine.finished, len(requests), batch, entries))
        if on_step is not None:  # the last step's requests are finished by now
            on_step(ReplayProgress(run.num_steps, engine.finished, len(requests), batch, entries))
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    return run.summary(len(requests), time.perf_counter() - started, interrupted), run.series()


class _Run:
    """One replay under way: plans steps and keeps a record of each."""

    def __init__(self, engine: EngineModel, options: ReplayOptions, sizes: Sizes, launch: Callable[..., None]) -> None:
        capacity = engine.req_pool_indices.size
        self._engine = engine
        self._options = options
        self._sizes = sizes
        self._launch = launch
        self._bs_block_size = max(capacity, PLAN_BS_BLOCK_SIZE)
        self._device = make_device(options.device, engine, self._bs_block_size)
        self._check: PlanCheck | None = None
        if options.check:
            self._check = PlanCheck(self._device.read_outputs(), options.window, sizes.verify_capacity)
        self._differences = 0
        self._overflows = 0
        self._records = np.zeros(4096, _STEP_RECORD)
        self.num_steps = 0

    def plan(self, step: Step) -> int:
        """Plan one step; the verify entries that it asks for."""
        device, sizes = self._device, self._sizes
        device.load(step)
        started = time.perf_counter()
        self._launch(
            **device.arguments,
            swa_window_size=self._options.window,
            verify_capacity=sizes.verify_capacity,
            bs=step.bs,
            bs_block_size=self._bs_block_size,
        )
        device.wait()
        plan_us = (time.perf_counter() - started) * 1e6

        outputs = device.read_outputs()
        if self._check is not None:
            self._differences += self._check.count_differences(step, outputs)
        entries = int(outputs.verify_offsets_scratch[step.bs])
        self._overflows += int(outputs.verify_enable[0]) == 0
        if self.num_steps == self._records.size:
            self._records = np.concatenate([self._records, np.zeros_like(self._records)])
        pool = self._engine.pool
        self._records[self.num_steps] = (
            step.time_s,
            entries,
            step.num_requests,
            pool.live_pages,
            pool.cached_pages,
            plan_us,
        )
        self.num_steps += 1
        return entries

    def summary(self, num_requests: int, wall_s: float, interrupted: bool) -> ReplaySummary:
        engine, records = self._engine, self._records[: self.num_steps]
        batch, entries = _percentiles(records["batch"]), _percentiles(records["entries"])
        plan_us = records["plan_us"] if records.size else np.zeros(1)
        return ReplaySummary(
            device=self._device.name,
            steps=self.num_steps,
            requests=num_requests,
            finished=engine.finished,
            preempted=engine.preempted,
            largest_batch=batch.max,
            batch=batch,
            entries=entries,
            total_entries=int(records["entries"].sum()),
            verify_capacity=self._sizes.verify_capacity,
            overflows=self._overflows,
            pool_slots=engine.pool.num_pages * self._options.page_size,
            evicted_blocks=engine.pool.evicted_blocks,
            shared_prefix_share=engine.shared_tokens / max(engine.prompt_tokens, 1),
            plan_us_p50=float(np.percentile(plan_us, 50)),
            plan_us_p99=float(np.percentile(plan_us, 99)),
            wall_s=wall_s,
            differences=self._differences if self._check is not None else None,
            status=StatusBit(self._device.read_status()),
            interrupted=interrupted,
        )

    def series(self) -> ReplaySeries:
        records, page_size = self._records[: self.num_steps], self._options.page_size
        starts = np.arange(0, records.size, max(1, math.ceil(records.size / SERIES_POINTS)))
        steps = np.diff(starts, append=records.size)

        def mean(values: NDArray[Any]) -> NDArray[np.float64]:
            sums: NDArray[np.float64] = np.add.reduceat(values.astype(np.float64), starts)
            return sums / steps

        return ReplaySeries(
            time_s=records["time_s"][starts],
            batch_mean=mean(records["batch"]),
            batch_max=np.maximum.reduceat(records["batch"], starts),
            entries_mean=mean(records["entries"]),
            entries_max=np.maximum.reduceat(records["entries"], starts),
            live_slots=mean(records["live_pages"]) * page_size,
            cached_slots=mean(records["cached_pages"]) * page_size,
        )


def _percentiles(values: NDArray[Any]) -> Percentiles:
    if not values.size:
        return Percentiles(0, 0, 0, 0)
    return Percentiles(*(int(value) for value in np.percentile(values, (50, 90, 99, 100), method="inverted_cdf")))
