"""The canary as one object around an engine's forward pass."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .canary_buffers import BatchLaunches, CanaryBuffers, sweep_tag
from .canary_config import CanaryConfig, GroupName, KvPool, LogLayout, memory_of
from .canary_records import CanaryRecords
from .constants import (
    VIOLATION_DETAIL_FIELDS,
    VIOLATION_FIELDS,
    CanaryLaunchTag,
    FailReason,
    StatusBit,
)
from .errors import PREFIX, KvCorruptionError
from .health import Health
from .reports import Report, decode
from .sweep import Sweep, SweepChunk
from .warmup import warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from .batch import Batch

logger = logging.getLogger("cupy_kvcanary")

_KEPT_REPORTS = 64
_MAX_LOGGED = 4096


class Canary:
    """Guards a KV pool: verifies what each step will read, stamps what it wrote, and reports what is wrong.

    ::

        canary = Canary(KvPool(num_slots=65536, max_reqs=256, max_seq_len=8192), CanaryConfig(mode="log"))
        with canary.step(batch):
            model.forward(batch)

    All device memory is taken here (`canary.memory`), none later by steps. Launches go on the current stream of the
    batch's library, and all may be captured in a CUDA graph together with the forward pass: `before_forward` and
    `after_forward` are then called once, under the capture, and `poll` after each replay, outside of it.

    Violations come back by a copy beside the engine's work and are looked at in the next step: nothing ever waits.

    Parameters
    ----------
    pool : geometry of the engine's KV pool.
    config : how to work; `CanaryConfig()` where it is None.
    on_report : called with each `Report`, in the thread that steps.
    name : stands in log lines, reports and metrics.
    rank : number of this process in a parallel engine, for reports; None outside of one.

    Raises
    ------
    KvCanaryError, KvCanaryRuntimeError
        The pool does not fit its tensors, or the device cannot be used; slugs in docs/errors.md. Afterwards, with mode
        `log`, methods log what goes wrong and raise nothing.

    """

    def __init__(
        self,
        pool: KvPool,
        config: CanaryConfig | None = None,
        *,
        on_report: Callable[[Report], None] | None = None,
        name: str = "canary",
        rank: int | None = None,
    ) -> None:
        self.pool = pool
        self.config = config = config or CanaryConfig()
        self.name = name
        self.rank = rank
        self.memory = memory_of(pool, config)
        """Bytes taken, as `memory_of(pool, config)` says beforehand."""
        self._on_report = on_report
        self._reports: deque[Report] = deque(maxlen=_KEPT_REPORTS)
        self._steps = 0
        self._last_step_s: float | None = None
        self._sweep: Sweep | None = None
        self._launches: weakref.WeakKeyDictionary[Batch, BatchLaunches] = weakref.WeakKeyDictionary()
        self._failures: Counter[tuple[type[Exception], str]] = Counter()
        self._violations: Counter[FailReason] = Counter()
        self._num_violations = self._num_lost = 0
        self._logged: set[tuple[Any, ...]] = set()
        # Of the ring since its counter was last set to 0: violations that were counted.
        self._num_seen = 0
        self._resets_counter = False
        self._step_of_snapshot = 0
        self._must_join = False
        if config.mode == "off":
            return
        self.buffers = CanaryBuffers(pool, config)
        self._records = CanaryRecords(self.buffers)
        self._snapshots = self.buffers.place.snapshots(self.buffers.log.words)
        self._latest: NDArray[np.int64] = np.zeros(self.buffers.log.layout.size, np.int64)
        warmup(self.buffers.place.device)

    @property
    def records(self) -> dict[CanaryLaunchTag, Any]:
        """uint8 [slots, 32] of each buffer, in place: extra layers of the pool, which page moves and transfers of an
        engine may take along with the KV.
        """
        return {} if self.config.mode == "off" else self.buffers.records

    # ---- a step -------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> _StepContext:
        """`with canary.step(batch): forward()` is `before_forward(batch)` and, if nothing raised, `after_forward`."""
        return _StepContext(self, batch)

    def before_forward(self, batch: Batch) -> None:
        """Plan the step and verify every slot that it will read.

        Parameters
        ----------
        batch : arrays on the pool's device; on NumPy with a CPU pool.

        Raises
        ------
        KvCorruptionError
            With mode `raise`: an earlier step found violations. Nothing was launched.
        KvCanaryError
            With mode `raise`: an argument is wrong.

        """
        self._guarded(self._before_forward, batch)

    def after_forward(
        self, batch: Batch, input_ids: Any = None, positions: Any = None, out_cache_loc: Any = None
    ) -> None:
        """Stamp the records of the tokens whose KV the step wrote.

        Parameters
        ----------
        batch : that of `before_forward`.
        input_ids, positions, out_cache_loc : int32 or int64 [tokens]: token, position and slot of each, request by
            request; None for the batch's own.

        """
        self._guarded(self._after_forward, batch, input_ids, positions, out_cache_loc)

    def poll(self) -> list[Report]:
        """The reports since the last poll, the last 64 of them. Never waits.

        Steps that are called poll by themselves. Where steps are replays of a graph, this asks for a new copy of the
        log after each replay, behind what the current stream of the batches' library was given.
        """
        self._guarded(self._poll)
        return self._taken_reports()

    def synchronize(self) -> list[Report]:
        """Wait for the device, then return the reports since the last poll: for the end of a run, and for tests."""
        self._guarded(self._synchronize)
        return self._taken_reports()

    def _before_forward(self, batch: Batch) -> None:
        launches = self._launches_of(batch)
        stream = launches.stream()
        is_capturing = self.buffers.place.is_capturing(stream)
        if not is_capturing:
            self._collect()
            self._join(stream)
        if self._steps % self.config.verify_interval == 0 or is_capturing:
            launches.launch(stream, "plan", "verify")
        else:
            launches.launch(stream, "plan")
        if is_capturing:
            return
        if self._sweep is not None and not self._sweep.is_done and self._steps % self.config.sweep_interval == 0:
            self._records.verify_slice(self._sweep, stream)
        self._steps += 1
        self._last_step_s = time.monotonic()
        if not self._snapshots.is_in_flight:
            self._start_snapshot(stream)
        if self.config.stats_interval and self._steps % self.config.stats_interval == 0:
            logger.info("%s%s: %s", PREFIX, self.name, self.health().line())

    def _after_forward(self, batch: Batch, input_ids: Any, positions: Any, out_cache_loc: Any) -> None:
        launches = self._launches_of(batch)
        stream = launches.stream()
        if self._must_join and not self.buffers.place.is_capturing(stream):
            self._join(stream)
        given = {"input_ids": input_ids, "positions": positions, "out_cache_loc": out_cache_loc}
        given = {name: array for name, array in given.items() if array is not None}
        if given:
            launches.write(stream, **given)
        else:
            launches.launch(stream, "write")

    def _launches_of(self, batch: Batch) -> BatchLaunches:
        launches = self._launches.get(batch)
        if launches is None:
            launches = self._launches[batch] = BatchLaunches(self.buffers, batch)
        return launches

    # ---- the log ------------------------------------------------------------------------------------------------

    def _start_snapshot(self, stream: int | None) -> None:
        """Copy the log as the stream's work so far leaves it. Where the ring is half full, it is emptied."""
        self._resets_counter = self._num_seen > self.config.ring_size // 2
        self._snapshots.start(stream, resets_counter=self._resets_counter)
        self._step_of_snapshot = self._steps - 1
        self._must_join = True

    def _join(self, stream: int | None) -> None:
        """No kernel of the canary may write into the log while it is copied."""
        if self._must_join:
            self._snapshots.join(stream)
            self._must_join = False

    def _poll(self) -> None:
        self._collect()
        if not self._snapshots.is_in_flight:
            batch = next(iter(self._launches.values()), None)
            stream = self.buffers.place.stream_of() if batch is None else batch.stream()
            if not self.buffers.place.is_capturing(stream):
                self._start_snapshot(stream)
                self._join(stream)

    def _synchronize(self) -> None:
        self._collect(waits=True)
        self.buffers.place.synchronize()
        self._start_snapshot(self.buffers.place.stream_of())
        self._collect(waits=True)
        self._must_join = False

    def _collect(self, *, waits: bool = False) -> None:
        """Look at the last copy of the log, if it is there."""
        words = self._snapshots.take(waits=waits)
        if words is None:
            return
        self._latest = words
        layout, ring_size = self.buffers.log.layout, self.config.ring_size
        count = int(words.view(np.int32)[2 * LogLayout.WRITE_INDEX])
        new, seen = count - self._num_seen, self._num_seen
        self._num_seen = 0 if self._resets_counter else count
        if new <= 0:
            return
        stored = slice(min(seen, ring_size), min(count, ring_size))
        rows = words[layout.ring : layout.details].reshape(-1, VIOLATION_FIELDS)[stored]
        details = words[layout.details :].reshape(-1, VIOLATION_DETAIL_FIELDS)[stored]
        # Steps that are replays of a graph are known by their verifications.
        step = max(self._step_of_snapshot, int(words[layout.buffer(0) + 1]) - 1)
        violations = decode(rows, details, step=step, page_size=self.pool.page_size)
        self._num_violations += new
        self._num_lost += new - len(rows)
        for violation in violations:
            self._violations.update(reason for reason in FailReason if reason in violation.reasons)
        self._deliver(Report(violations, step=step, lost=new - len(rows), canary=self.name, rank=self.rank))

    def _deliver(self, report: Report) -> None:
        self._reports.append(report)
        if self.config.mode == "log":
            self._log(report)
        if self._on_report is not None:
            self._guarded(self._on_report, report)
        if self.config.mode == "raise":
            raise KvCorruptionError(report)

    def _log(self, report: Report) -> None:
        """A line for each violation; not again for what was logged before, as a slot is read in step after step."""
        if report.lost:
            logger.warning("%s%s", PREFIX, report.heading)
        if len(self._logged) > _MAX_LOGGED:
            self._logged.clear()
        for violation, line in zip(report.violations, report.lines(), strict=True):
            known = (violation.tag, violation.slot, violation.request_row, violation.position, violation.reasons)
            if known not in self._logged:
                self._logged.add(known)
                logger.warning("%s", line)

    def _taken_reports(self) -> list[Report]:
        taken = list(self._reports)
        self._reports.clear()
        return taken

    def health(self) -> Health:
        """The counters, as of the last copy of the log. May be called from any thread; reads host memory only."""
        launches: Counter[CanaryLaunchTag] = Counter()
        verified = written = skipped = overflowed = protected = 0
        status = 0
        if self.config.mode != "off":
            words, layout = self._latest, self.buffers.log.layout
            status = int(words.view(np.int32)[2 * LogLayout.WRITE_INDEX + 1])
            index = 0
            for g, group in enumerate(self.buffers.groups):
                protected += int(words[layout.group(g) : layout.group(g) + 1].view(np.int32)[0])
                for tag in group.tags:
                    counters = words[layout.buffer(index) : layout.buffer(index) + LogLayout.WORDS_OF_BUFFER].tolist()
                    verified += counters[0] + counters[4]
                    written += counters[2]
                    launches[tag] += counters[1] + counters[3]
                    launches[sweep_tag(tag)] += counters[5]
                    skipped += counters[6]
                    overflowed = max(overflowed, counters[7])
                    index += 1
        return Health(
            steps=self._steps,
            last_step_s=self._last_step_s,
            protected_tokens=protected,
            verified_entries=verified,
            written_entries=written,
            launches=dict(launches),
            skipped_checks=skipped,
            overflowed_steps=overflowed,
            violations=self._num_violations,
            violations_by_reason=dict(self._violations),
            lost_violations=self._num_lost,
            status=StatusBit(status),
            errors=sum(self._failures.values()),
        )

    # ---- legitimate changes of the pool -------------------------------------------------------------------------

    def restamp(self, slots: Any, positions: Any, tokens: Any = None, seed_slot: int = -1) -> None:
        """Write the records of a run of tokens anew, after their KV was legitimately changed, moved or shifted.

        Parameters
        ----------
        slots, positions : [n] arrays or lists, in the order of the positions.
        tokens : [n]; None for those of the records that the slots have now.
        seed_slot : slot of the token before the first; -1 where the run starts its request.

        """
        self._guarded(self._restamp, slots, positions, tokens, seed_slot)

    def forget(self, slots: Any, group: GroupName | None = None) -> None:
        """Mark the records of freed slots, so that a later read is reported as what it is.

        Parameters
        ----------
        slots : [n] array or list.
        group : whose slots they are; None for the canary's first group.

        """
        self._guarded(lambda: self._records.forget(slots, group))

    def copy(self, src_slots: Any, dst_slots: Any, group: GroupName | None = None) -> None:
        """Copy records along with a page move. No slot may be both a source and a destination.

        Parameters
        ----------
        src_slots, dst_slots : [n] arrays or lists.
        group : as in `forget`.

        """
        self._guarded(lambda: self._records.copy(src_slots, dst_slots, group))

    def export_records(self, slots: Any, group: GroupName | None = None) -> Any:
        """Records for KV that leaves the pool, for the host, a disk or another machine.

        Parameters
        ----------
        slots : [n] array or list.
        group : as in `forget`.

        Returns
        -------
        uint8 [buffers, n, 32] on the pool's device, newly allocated; None where mode `log` logged an error.

        """
        return self._guarded(lambda: self._records.export(slots, group))

    def import_records(self, slots: Any, records: Any, group: GroupName | None = None) -> None:
        """Records for KV that came into the pool.

        Parameters
        ----------
        slots : [n] array or list: where each token's KV is now. The token before it must be at the place that the
            page table says, not where it was.
        records : uint8 [buffers, n, 32], of `export_records`; on the pool's device or in host memory.
        group : as in `forget`.

        """
        self._guarded(lambda: self._records.bring(slots, records, group))

    def sweep(self, chunks: Iterable[SweepChunk], total: int | None = None) -> Sweep:
        """Verify cached slots in slices of `sweep_slice` entries, one every `sweep_interval` steps.

        Parameters
        ----------
        chunks : asked for one at a time, when its turn comes: a generator over a prefix tree sees what is cached then.
        total : entries in all, for `Sweep.progress`.

        Returns
        -------
        The sweep, which replaces one that is under way.

        """
        self._sweep = Sweep(chunks, total)
        return self._sweep

    def _restamp(self, slots: Any, positions: Any, tokens: Any, seed_slot: int) -> None:
        self._join(self.buffers.place.stream_of(slots, positions, tokens))  # it may report violations
        self._records.restamp(slots, positions, tokens, seed_slot)

    # ---- failures -----------------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Run it, unless the canary is off. With mode `log` a failure is logged, the first of a kind in full."""
        if self.config.mode == "off":
            return None
        if self.config.mode == "raise":
            return action(*arguments)
        try:
            return action(*arguments)
        except Exception as failure:
            kind = type(failure), getattr(failure, "slug", "")
            self._failures[kind] += 1
            if self._failures[kind] == 1:
                logger.exception("%s%s failed and goes on", PREFIX, self.name)
            return None


class _StepContext:
    """See `Canary.step`."""

    def __init__(self, canary: Canary, batch: Batch) -> None:
        self._canary = canary
        self._batch = batch

    def __enter__(self) -> Canary:
        self._canary.before_forward(self._batch)
        return self._canary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._canary.after_forward(self._batch)
