"""Replays a trace through the engine model: plans every step, and guards its KV with a canary.

Optionally checks each plan against a straight computation, and injects faults for the canary to find.
"""

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
from .injections import parse_faults
from .plan_check import PlanCheck
from .replay_canary import ReplayCanary
from .replay_device import make_device
from .replay_result import Percentiles, ReplayProgress, ReplayResult, ReplaySeries, ReplaySummary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .engine_model import Step
    from .faults import Injection
    from .reports import Report
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
        ("canary_us", np.float32),
        ("violations", np.int64),
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
    """Entries that a verify plan can hold; a step that needs more is counted as an overflow. The canary verifies every
    step unless a capacity is given."""
    device: str = "auto"
    """Where the plans run: "cpu", "cuda", or "auto" for CUDA where there is a usable GPU."""
    check: bool = False
    """Compare every plan with a straight computation."""
    canary: bool = True
    """Guard the simulated KV with a canary."""
    verify_interval: int | None = None
    """Steps from one verification to the next; None: 1 on a GPU, and on the CPU what leaves about ten million slots."""
    inject: Sequence[str] = ()
    """Faults to inject, one after another: names of `FAULTS`, each with or without `@STEP`, or `all`."""
    seed: int = 0
    """Of the faults."""

    def __post_init__(self) -> None:
        for name in ("speedup", "step_ms"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise error("kv-canary-must-be-a-finite-positive-number", name=name, got=value)
        for name in ("chunk", "page_size", "max_running"):
            check_positive(name, check_int(name, getattr(self, name)))
        check_fits_int32("max_running", self.max_running)
        check_non_negative("window", check_int("window", self.window))
        check_non_negative("seed", check_int("seed", self.seed))
        if parse_faults(self.inject, has_window=self.window > 0) and not self.canary:
            got = repr(self.inject[0])
            raise error("kv-canary-fault-must-be-possible", name="inject", needed="the canary", got=got)
        for name in ("pool_slots", "window_pool_slots", "verify_capacity", "verify_interval"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, check_int(name, value))
                check_fits_int32(name, value)


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
    on_event: Callable[[Injection | Report], None] | None = None,
) -> ReplayResult:
    """Run `requests` through the engine model: plan every step, and guard it with a canary.

    Parameters
    ----------
    requests : at least one, in order of arrival; from `read_trace` or `generate_trace`.
    options : sizes, speed, device and whether to check.
    launch : what plans a step, with the keywords of `launch_plan_offsets_kernel`, which it is by default.
    on_step : called after every step, and once more at the end.
    on_event : called with each fault that is injected and each report of the canary, as they come.

    Returns
    -------
    Summary, series over time, faults and reports; on KeyboardInterrupt of what was done, with `interrupted` set.

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
        run = _Run(engine, options, sizes, launch, on_event)
    except MemoryError as reason:
        raise error("kv-canary-replay-must-fit-in-memory", name="page table and pool", got=str(reason)) from reason
    started = time.perf_counter()
    batch = entries = 0
    try:
        for step in engine.steps():
            batch, entries = step.num_requests, run.step(step)
            if on_step is not None:
                on_step(ReplayProgress(run.num_steps, engine.finished, len(requests), batch, entries))
        run.finish()
        if on_step is not None:  # the last step's requests are finished by now
            on_step(ReplayProgress(run.num_steps, engine.finished, len(requests), batch, entries))
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    return run.result(time.perf_counter() - started, interrupted)


class _Run:
    """One replay under way: plans steps and keeps a record of each."""

    def __init__(
        self,
        engine: EngineModel,
        options: ReplayOptions,
        sizes: Sizes,
        launch: Callable[..., None],
        on_event: Callable[[Injection | Report], None] | None,
    ) -> None:
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
        self._canary = ReplayCanary(engine, options, self._device, on_event) if options.canary else None
        self._differences = 0
        self._overflows = 0
        self._records = np.zeros(4096, _STEP_RECORD)
        self.num_steps = 0

    def step(self, step: Step) -> int:
        """Plan one step and run it under the canary; the verify entries that it asks for."""
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
        violations, canary_us = (0, 0.0) if self._canary is None else self._canary.run(step)
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
            canary_us,
            violations,
        )
        self.num_steps += 1
        return entries

    def finish(self) -> None:
        """Read the last reports."""
        if self._canary is not None:
            self._records["violations"][self.num_steps - 1] += self._canary.finish(self.num_steps)

    def result(self, wall_s: float, interrupted: bool) -> ReplayResult:
        """All that it leaves."""
        summary, series = self._summary(wall_s, interrupted), self._series()
        if self._canary is None:
            return ReplayResult(summary, series)
        canary = self._canary
        return ReplayResult(summary, series, canary.outcomes, tuple(canary.reports), canary.page_owners)

    def _summary(self, wall_s: float, interrupted: bool) -> ReplaySummary:
        engine, records = self._engine, self._records[: self.num_steps]
        batch, entries = _percentiles(records["batch"]), _percentiles(records["entries"])
        plan_us = records["plan_us"] if records.size else np.zeros(1)
        return ReplaySummary(
            device=self._device.name,
            steps=self.num_steps,
            requests=len(engine.requests),
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
            canary=None if self._canary is None else self._canary.summary(),
        )

    def _series(self) -> ReplaySeries:
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
            canary_us_mean=mean(records["canary_us"]),
            violations=np.add.reduceat(records["violations"], starts),
        )


def _percentiles(values: NDArray[Any]) -> Percentiles:
    if not values.size:
        return Percentiles(0, 0, 0, 0)
    return Percentiles(*(int(value) for value in np.percentile(values, (50, 90, 99, 100), method="inverted_cdf")))
