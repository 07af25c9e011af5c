"""Reports of all ranks of a parallel engine, merged: what every rank saw, and what one saw alone."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .catalogue import error
from .checks import check_at_most, check_int, check_non_negative
from .compile import cuda_device, import_cupy
from .findings import find, ranges
from .report_text import line
from .reports import Report
from .streams import as_cupy_stream, stream_handle

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from numpy.typing import NDArray

    from .diagnosis import Diagnosis
    from .findings import Finding
    from .violations import Violation

_NCCL_UINT8: Final = 1
"""ncclUint8 of nccl.h."""
_WIDTH: Final = 112


@dataclass(frozen=True, kw_only=True)
class RankFinding:
    """One thing that went wrong, and the ranks that saw it."""

    ranks: tuple[int, ...]
    num_ranks: int
    """Of the communicator."""
    canary: str
    """Name of the canary on these ranks."""
    step: int
    """The first in which one of the ranks reported it."""
    finding: Finding
    """As the first of the ranks reported it."""
    lines: tuple[str, ...]
    """As in `MergedReport.lines`."""

    @property
    def seen(self) -> str:
        """Which ranks saw it, and what that says about where to look."""
        if self.num_ranks == 1:
            return "on the only rank"
        if len(self.ranks) == self.num_ranks:
            return f"on all {self.num_ranks} ranks: the page table or the scheduler"
        if len(self.ranks) == 1:
            return f"on rank {self.ranks[0]} alone: its memory or its transfer"
        return f"on ranks {ranges(self.ranks)} of {self.num_ranks}: what only these share, such as a node or a stage"

    def __str__(self) -> str:
        finding = self.finding
        rows = [
            ("step", f"{self.step} of {self.canary!r}"),
            ("where", finding.where),
            ("reasons", ", ".join(finding.reasons)),
            *finding.evidence,
        ]
        lines = [f"{finding.pattern.value} ({finding.first.launch}; {finding.buffers})", f"   {self.seen}"]
        lines += [f"   {label:<9} {words}" for label, words in rows]
        lines += textwrap.wrap(finding.meaning, _WIDTH, initial_indent="   => ", subsequent_indent="      ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        finding = self.finding
        return {
            "ranks": list(self.ranks),
            "seen": self.seen,
            "canary": self.canary,
            "step": self.step,
            "pattern": finding.pattern.value,
            "meaning": finding.meaning,
            "reasons": finding.reasons,
            "where": finding.where,
            "slots": list(dict.fromkeys(violation.slot for violation in finding.places)),
            "lines": list(self.lines),
        }


@dataclass(frozen=True)
class MergedReport:
    """What the ranks of a communicator reported. `print(merged)` explains it."""

    reports: tuple[tuple[Report, ...], ...]
    """Of each rank, in the order of the ranks."""

    @cached_property
    def findings(self) -> tuple[RankFinding, ...]:
        """Violations that tell of the same thing, together, and by the ranks that saw them."""
        return _merge(self.reports)

    @property
    def num_ranks(self) -> int:
        """Of the communicator."""
        return len(self.reports)

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Violations that each rank reported."""
        return tuple(sum(len(report.violations) for report in own) for own in self.reports)

    @property
    def lost_by_rank(self) -> tuple[int, ...]:
        """Violations that the ring of each rank had no room for: where there are any, it may have seen more."""
        return tuple(sum(report.lost for report in own) for own in self.reports)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """Ranks that had no report."""
        return tuple(rank for rank, own in enumerate(self.reports) if not own)

    def __str__(self) -> str:
        """The counts, then finding after finding."""
        counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(self.by_rank))
        heading = f"kv-canary, {self.num_ranks} ranks, findings: {len(self.findings)}; violations: {counts}"
        for rank, lost in enumerate(self.lost_by_rank):
            heading += f"; {lost} more had no room in the ring of rank {rank}" if lost else ""
        return "\n\n".join([heading, *(f"{i}. {finding}" for i, finding in enumerate(self.findings, 1))])

    def lines(self) -> list[str]:
        """One line for each violation of a finding, in a form that does not change.

        It is that of `Report.lines` on the first rank that saw it, then `ranks=` (all that saw it) and `num_ranks=`.
        """
        return [text for finding in self.findings for text in finding.lines]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `Report.from_dict` reads each of the reports."""
        return {
            "num_ranks": self.num_ranks,
            "silent_ranks": list(self.silent_ranks),
            "by_rank": list(self.by_rank),
            "lost_by_rank": list(self.lost_by_rank),
            "findings": [finding.to_dict() for finding in self.findings],
            "reports": [[report.to_dict() for report in own] for own in self.reports],
        }


def gather_reports(comm: Any, reports: Iterable[Report], *, root: int = 0, stream: Any = None) -> MergedReport | None:
    """Merge the reports of tensor- or pipeline-parallel ranks. Every rank must call it, also one without reports.

    The ranks must be such that share a page table. Violations of the same group, slot, position, request row and
    reasons are one, also where they came in several steps: call it often enough that a slot does not get another use
    in between.

    Parameters
    ----------
    comm : an mpi4py communicator, or any object with its `gather`, `Get_rank` and `Get_size`; or a
        `cupy.cuda.nccl.NcclCommunicator`, over which the reports go as JSON in two `allGather` of device memory.
    reports : of this rank, such as what `canary.poll()` returned.
    root : the rank that gets the result.
    stream : CUDA stream of NCCL's exchange, which the call waits for; None for CuPy's current one.

    Returns
    -------
    MergedReport on the root, None on the other ranks.

    Raises
    ------
    KvCanaryError
        `comm` is no communicator, or `root` is not one of its ranks. Nothing was sent.

    """
    is_mpi = all(hasattr(comm, name) for name in ("gather", "Get_rank", "Get_size"))
    if not is_mpi and not all(hasattr(comm, name) for name in ("allGather", "device_id", "rank_id", "size")):
        raise error("kv-canary-comm-must-be-a-communicator", name="comm", got=type(comm).__name__)
    num_ranks, rank = (comm.Get_size(), comm.Get_rank()) if is_mpi else (comm.size(), comm.rank_id())
    root = check_int("root", root)
    check_non_negative("root", root)
    check_at_most("root", root, num_ranks - 1)

    payload = json.dumps([report.to_dict() for report in reports]).encode()
    payloads = comm.gather(payload, root=root) if is_mpi else _gather_with_nccl(comm, payload, stream)
    if rank != root:
        return None
    return MergedReport(
        tuple(
            tuple(Report.from_dict({**values, "rank": sender}) for values in json.loads(sent))
            for sender, sent in enumerate(payloads)
        )
    )


def _gather_with_nccl(comm: Any, payload: bytes, stream: Any) -> list[bytes]:
    """What every rank gave, on every rank: NCCL gathers equal sizes only, so the lengths go first."""
    cupy = import_cupy()
    with cuda_device(comm.device_id()):
        handle = int(cupy.cuda.get_current_stream().ptr) if stream is None else stream_handle(stream)
        with as_cupy_stream(cupy, handle):

            def all_gather(mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
                """[ranks, bytes]."""
                sent = cupy.asarray(mine)
                received = cupy.empty((comm.size(), mine.size), "uint8")
                comm.allGather(sent.data.ptr, received.data.ptr, mine.size, _NCCL_UINT8, handle)
                return received.get()  # type: ignore[no-any-return]

            lengths = all_gather(np.array([len(payload)], np.int64).view(np.uint8)).view(np.int64).ravel().tolist()
            padded = np.zeros(max(lengths), np.uint8)
            padded[: len(payload)] = np.frombuffer(payload, np.uint8)
            rows = all_gather(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


class _Seen(NamedTuple):
    """One violation on one rank."""

    report: Report
    violation: Violation
    diagnosis: Diagnosis


def _merge(reports: tuple[tuple[Report, ...], ...]) -> tuple[RankFinding, ...]:
    # What each rank says of each place, its first report first. Steps are left out: a copy of the log that came late
    # has the violations under a later step on one rank than on the others.
    places: dict[Hashable, dict[int, list[_Seen]]] = {}
    for rank, report in ((rank, report) for rank, own in enumerate(reports) for report in own):
        for v, diagnosis in zip(report.violations, report.diagnoses, strict=True):
            place = (report.canary, v.group, v.slot, v.position, v.request_row, v.reasons)
            places.setdefault(place, {}).setdefault(rank, []).append(_Seen(report, v, diagnosis))

    # What the same ranks saw first in one step is looked at together, in the words of the first of them.
    together: dict[tuple[int, str, tuple[int, ...]], list[_Seen]] = defaultdict(list)
    for by_rank in places.values():
        first, *_ = of_first_rank = next(iter(by_rank.values()))
        step = min(of_rank[0].report.step for of_rank in by_rank.values())
        in_first_report = [seen for seen in of_first_rank if seen.report is first.report]
        together[step, first.report.canary, tuple(by_rank)] += in_first_report

    findings = []
    # What most ranks saw comes first in a step: it explains more.
    for (step, canary, ranks), seen in sorted(together.items(), key=lambda item: (*item[0][:2], -len(item[0][2]))):
        line_of = {of_one.violation: line(*of_one) for of_one in seen}
        ending = f"ranks={','.join(map(str, ranks))} num_ranks={len(reports)}"
        findings += [
            RankFinding(
                ranks=ranks,
                num_ranks=len(reports),
                canary=canary,
                step=step,
                finding=finding,
                lines=tuple(f"{line_of[violation]} {ending}" for violation in finding.violations),
            )
            for finding in find([of_one.violation for of_one in seen], [of_one.diagnosis for of_one in seen])
        ]
    return tuple(findings)
