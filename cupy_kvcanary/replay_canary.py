"""The canary at work in a replay: it guards the simulated KV, and finds the faults that are injected into it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .arrays import as_device
from .batch import Batch
from .canary import Canary
from .canary_config import CanaryConfig, KvPool, memory_of
from .faults import FaultSite, LiveRequest
from .injections import Injections, parse_faults
from .kv_model import KvModel
from .traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .engine_model import EngineModel, Step
    from .faults import Injection
    from .injections import FaultOutcome
    from .replay import ReplayOptions
    from .replay_device import ReplayDevice
    from .reports import Report
    from .traces import TraceRequest

CPU_ENTRIES: Final = 10**7
"""Entries that a replay on the CPU verifies in each buffer, about, where the interval is not given."""

KEPT_REPORTS: Final = 200


@dataclass(frozen=True, kw_only=True)
class CanarySummary:
    """What the canary did in a replay."""

    verify_interval: int
    """Steps from one verification to the next; records are stamped in every step."""
    buffers: int
    verified_entries: int
    """Slots verified, over all buffers."""
    stamped_records: int
    """Over all buffers."""
    violations: int
    false_alarms: int
    """Violations that no injected fault explains."""
    overflows: int
    """Steps that were not verified, since they had more entries than the capacity."""
    errors: int
    """Calls of the canary that failed."""
    memory_announced: int
    """Bytes on the device, as said before they were taken."""
    memory_taken: int
    """Bytes on the device, as measured."""
    step_us_p50: float
    """Microseconds of a step in the canary, as the host sees it."""
    step_us_p99: float


def verify_interval(requests: Sequence[TraceRequest], options: ReplayOptions, device: str) -> int:
    """Steps from one verification to the next: 1 on a GPU; on the CPU as many as leave about `CPU_ENTRIES` entries.

    A replay with faults has half of the steps at most that the longest tenth of the answers take: a fault's target has
    to live until it is verified.
    """
    if options.verify_interval is not None:
        return options.verify_interval
    if device != "cpu":
        return 1
    inputs = np.array([request.input_length for request in requests], np.float64)
    outputs = np.array([request.output_length for request in requests], np.float64)
    entries = inputs * inputs / (2 * options.chunk) + outputs * (inputs + outputs / 2)
    if options.window:
        entries += (inputs / options.chunk + outputs) * np.minimum(inputs + outputs, options.window)
    interval = round(float(entries.sum()) / CPU_ENTRIES)
    if options.inject:
        interval = min(interval, int(np.percentile(outputs, 90)) // 2)
    return max(1, interval)


class ReplayCanary:
    """Guards a replay: before each step it verifies what the step reads, behind it, it stamps what was written."""

    def __init__(
        self,
        engine: EngineModel,
        options: ReplayOptions,
        device: ReplayDevice,
        on_event: Callable[[Injection | Report], None] | None,
    ) -> None:
        self._engine = engine
        self._device = device
        self._on_event = on_event
        self._kv = kv = KvModel(engine, device.xp, as_device(device.name))
        self._batch = Batch(
            page_table=kv.page_table,
            prefix_lens=kv.prefix_lens,
            extend_seq_lens=kv.extend_seq_lens,
            req_pool_indices=kv.req_pool_indices,
            input_ids=kv.input_ids,
            positions=kv.positions,
            out_cache_loc=kv.out_cache_loc,
            expected_tokens=kv.expected_tokens,
            expected_token_lens=kv.expected_token_lens,
            bs=kv.bs,
        )
        has_window = kv.swa_kv is not None
        self._pool = KvPool(
            num_slots=kv.num_slots,
            max_reqs=engine.req_pool_indices.size,
            max_seq_len=engine.req_to_token.shape[1],
            page_size=options.page_size,
            swa_window_size=options.window,
            full_to_swa_index_mapping=kv.mapping,
            swa_num_slots=kv.swa_num_slots,
            k_layers=kv.layers(kv.kv, 0),
            v_layers=kv.layers(kv.kv, 1),
            swa_k_layers=kv.layers(kv.swa_kv, 0) if has_window else (),
            swa_v_layers=kv.layers(kv.swa_kv, 1) if has_window else (),
            device=device.name,
        )
        config = CanaryConfig(
            real_kv_hash="all",
            expected_tokens=True,
            verify_interval=verify_interval(engine.requests, options, device.name),
            verify_capacity=options.verify_capacity,
        )
        self._announced = memory_of(self._pool, config).device
        self._received: list[Report] = []
        self._canary, self._taken = device.allocated_by(
            lambda: Canary(self._pool, config, on_report=self._received.append)
        )
        self._rng = np.random.default_rng(options.seed)
        self._steps_to_find = config.verify_interval + 1
        self._injections = Injections(
            parse_faults(options.inject, has_window=has_window),
            num_requests=len(engine.requests),
            steps_to_find=self._steps_to_find,
            rng=self._rng,
        )
        self._requests_of_damage: dict[int, int] = {}
        self._violations = 0
        self._times_us: list[float] = []
        self.reports: list[Report] = []
        """The first reports, up to `KEPT_REPORTS`."""
        self.page_owners: dict[int, NDArray[np.int32]] = {}
        """Of each step with an injection."""

    @property
    def outcomes(self) -> tuple[FaultOutcome, ...]:
        """What became of the faults."""
        return self._injections.outcomes

    def run(self, step: Step) -> tuple[int, float]:
        """One step: violations that were read in it, and microseconds in the canary."""
        self._kv.load(step)
        found = self._read_reports(step.number)
        times = [self._timed(self._forget_freed)]
        self._undo_damage(step)
        self._inject(step, is_after_step=False)
        times.append(self._timed(lambda: self._canary.before_forward(self._batch)))
        self._kv.forward()
        times.append(self._timed(lambda: self._canary.after_forward(self._batch)))
        self._inject(step, is_after_step=True)
        self._times_us.append(sum(times))
        return found, self._times_us[-1]

    def finish(self, step: int) -> int:
        """Wait for the last reports; their violations."""
        self._canary.synchronize()
        return self._read_reports(step)

    def summary(self) -> CanarySummary:
        """What it did."""
        health = self._canary.health()
        times_us = self._times_us or [0.0]
        return CanarySummary(
            verify_interval=self._canary.config.verify_interval,
            buffers=len(self._canary.records),
            verified_entries=health.verified_entries,
            stamped_records=health.written_entries,
            violations=self._violations,
            false_alarms=self._injections.false_alarms,
            overflows=health.overflowed_steps,
            errors=health.errors,
            memory_announced=self._announced,
            memory_taken=self._taken,
            step_us_p50=float(np.percentile(times_us, 50)),
            step_us_p99=float(np.percentile(times_us, 99)),
        )

    def _forget_freed(self) -> None:
        asarray = self._device.xp.asarray
        if (slots := self._engine.freed_slots()).size:
            self._canary.forget(asarray(slots))
        if (slots := self._engine.freed_window_slots()).size:
            self._canary.forget(asarray(slots), group="swa")

    def _timed(self, call: Callable[[], object]) -> float:
        self._device.wait()
        started = time.perf_counter()
        call()
        self._device.wait()
        return (time.perf_counter() - started) * 1e6

    def _read_reports(self, step: int) -> int:
        self._canary.poll()
        reports = self._received[:]
        self._received.clear()
        for report in reports:
            self._injections.attribute(step, report.violations, report.lost)
            if self._on_event is not None:
                self._on_event(report)
        self.reports += reports[: KEPT_REPORTS - len(self.reports)]
        count = sum(len(report.violations) + report.lost for report in reports)
        self._violations += count
        return count

    def _undo_damage(self, step: Step) -> None:
        """Once a fault is found, so that later steps are clean and the next fault stands alone."""
        injections, rows = self._injections, step.req_pool_indices[: step.num_requests].tolist()
        damaged = injections.damaged_rows
        running = [row for row in damaged if row in rows and self._requests_of_damage[row] == self._request_of(row)]
        is_gone = len(running) < len(damaged) and not injections.is_found
        if not is_gone and not injections.must_restore(step.number):
            return
        for row in running:
            self._restore(row, int(step.prefix_lens[rows.index(row)]))
        if is_gone:
            injections.withdraw()
        else:
            injections.restored(step.number)

    def _request_of(self, row: int) -> int:
        return int(self._engine.request_of_row[row])

    def _restore(self, row: int, length: int) -> None:
        slots, positions, tokens = self._kv.restore(row, length)
        if length:
            self._canary.restamp(slots, positions, tokens=tokens)

    def _inject(self, step: Step, *, is_after_step: bool) -> None:
        injection = self._injections.inject(
            step.number, step.time_s, self._engine.finished, lambda: self._site(step), is_after_step=is_after_step
        )
        if injection is None:
            return
        self._requests_of_damage = {row: self._request_of(row) for row in injection.rows}
        self.page_owners[injection.step] = self._engine.page_owners()
        if self._on_event is not None:
            self._on_event(injection)

    def _site(self, step: Step) -> FaultSite:
        engine, kv = self._engine, self._kv
        rows = step.req_pool_indices[: step.num_requests]
        prefix_lens, extend_lens = step.prefix_lens[: rows.size], step.extend_seq_lens[: rows.size]
        first_entries = np.cumsum(extend_lens) - extend_lens
        requests = []
        for columns in zip(rows, prefix_lens, extend_lens, first_entries, engine.steps_left(rows), strict=True):
            row, prefix_len, extend_len, first_entry, steps_left = (int(value) for value in columns)
            asked = engine.requests[self._request_of(row)]
            whole_blocks = asked.input_length // BLOCK_TOKENS * BLOCK_TOKENS if asked.block_ids else 0
            requests.append(
                LiveRequest(
                    row=row,
                    prefix_len=prefix_len,
                    extend_len=extend_len,
                    own_from=whole_blocks,
                    first_entry=first_entry,
                    steps_left=steps_left,
                )
            )
        pool = self._pool
        return FaultSite(
            step=step.number,
            rng=self._rng,
            requests=requests,
            page_table=kv.page_table,
            records=self._canary.records,
            kv_layers=(*pool.k_layers, *pool.v_layers),
            page_size=pool.page_size,
            input_ids=kv.input_ids,
            mapping=kv.mapping,
            swa_kv_layers=(*pool.swa_k_layers, *pool.swa_v_layers),
            swa_window_size=pool.swa_window_size,
            steps_to_find=self._steps_to_find,
        )
