"""Reports of several ranks become one: over MPI with four processes, over NCCL, and by hand for how they merge."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import sysconfig
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cupy_kvcanary import CanaryLaunchTag, FailReason, KvCanaryError, ranks
from cupy_kvcanary.ranks import MergedReport, gather_reports
from cupy_kvcanary.reports import Record, Report, Violation
from tests.helpers.backends import require_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]


def violation(slot: int = 7, **changed: Any) -> Violation:
    """A record whose position is wrong."""
    fields = {
        "tag": CanaryLaunchTag.HEAD_K_FULL,
        "reasons": FailReason.VERIFY_POSITION,
        "step": 4,
        "slot": slot,
        "page_size": 1,
        "stored": Record(11, 9, 1, 0),
        "expected": Record(None, 3, 1, 0),
        "request": 0,
        "request_row": 1,
    }
    return Violation(**fields | changed)


def report(*violations: Violation, step: int = 4, lost: int = 0, canary: str = "main") -> Report:
    return Report(violations, step=step, lost=lost, canary=canary)


def merged(*reports_of_ranks: Sequence[Report]) -> MergedReport:
    return MergedReport(tuple(map(tuple, reports_of_ranks)))


def seen(result: MergedReport) -> list[tuple[tuple[int, ...], set[int]]]:
    """(ranks, slots) of each finding."""
    return [(finding.ranks, {v.slot for v in finding.finding.violations}) for finding in result.findings]


# ---- what is one finding ----------------------------------------------------------------------------------------


def test_the_ranks_that_saw_it_say_where_to_look() -> None:
    everywhere, alone, two = report(violation(7)), report(violation(20)), report(violation(30))
    result = merged([everywhere], [everywhere, two], [everywhere, alone], [everywhere, two])
    assert {finding.ranks: finding.seen for finding in result.findings} == {
        (0, 1, 2, 3): "on all 4 ranks: the page table or the scheduler",
        (1, 3): "on ranks 1, 3 of 4: what only these share, such as a node or a stage",
        (2,): "on rank 2 alone: its memory or its transfer",
    }
    assert seen(result) == [((0, 1, 2, 3), {7}), ((1, 3), {30}), ((2,), {20})]
    assert merged([everywhere]).findings[0].seen == "on the only rank"


@pytest.mark.parametrize(
    "changed",
    [
        {"slot": 8},
        {"reasons": FailReason.VERIFY_POSITION | FailReason.VERIFY_REAL_KV_HASH},
        {"request_row": 2},
        {"expected": Record(None, 4, 1, 0)},
        {"tag": CanaryLaunchTag.HEAD_K_SWA},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_differs_in_its_place_or_reasons_is_another_finding(changed: dict[str, Any]) -> None:
    result = merged([report(violation())], [report(violation(**changed))])
    assert [finding.ranks for finding in result.findings] == [(0,), (1,)]


def test_canaries_of_one_rank_are_kept_apart() -> None:
    result = merged([report(violation(), canary="main"), report(violation(), canary="draft")], [])
    assert [(finding.canary, finding.ranks) for finding in result.findings] == [("draft", (0,)), ("main", (0,))]


def test_the_buffers_that_saw_it_are_one_finding() -> None:
    """A pipeline's first stage may see it in K, its last one in V."""
    both = [violation(tag=tag) for tag in (CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_V_FULL)]
    (finding,) = merged([report(*both)], [report(both[1])]).findings
    assert finding.ranks == (0, 1)
    assert {v.tag for v in finding.finding.violations} == {v.tag for v in both}


def test_a_rank_whose_copy_came_a_step_later_saw_the_same() -> None:
    result = merged([report(violation(step=5), step=5)], [report(violation(step=4), step=4)])
    (finding,) = result.findings
    assert (finding.ranks, finding.step) == ((0, 1), 4)


def test_a_fault_that_lasts_is_one_finding_from_its_first_step() -> None:
    lasting = [report(violation(step=step), step=step) for step in (4, 5, 6)]
    (finding,) = merged(lasting, lasting).findings
    assert (finding.step, len(finding.finding.violations)) == (4, 1)


def test_findings_come_by_step_and_then_by_the_number_of_ranks() -> None:
    late, early, rare = (report(violation(slot, step=step), step=step) for slot, step in ((1, 9), (2, 4), (3, 4)))
    assert seen(merged([late, early, rare], [late, early])) == [((0, 1), {2}), ((0,), {3}), ((0, 1), {1})]


def test_a_finding_keeps_the_pattern_that_its_rank_found_with_all_it_saw() -> None:
    """A bit flips in the KV of one of two exchanged slots, on one rank: it is still an exchange."""
    there = violation(7, stored=Record(11, 5, 1, 0), expected=Record(None, 3, 1, 0))
    back = violation(9, stored=Record(12, 3, 1, 0), expected=Record(None, 5, 1, 0))
    flipped = violation(
        9,
        stored=back.stored,
        expected=back.expected,
        reasons=FailReason.VERIFY_POSITION | FailReason.VERIFY_REAL_KV_HASH,
    )
    result = merged([report(there, back)], [report(there, flipped)])
    assert seen(result) == [((0, 1), {7}), ((0,), {9}), ((1,), {9})]
    assert [finding.finding.pattern.value for finding in result.findings] == ["swapped"] * 3


# ---- its forms --------------------------------------------------------------------------------------------------


def test_counts() -> None:
    result = merged([report(violation(1), violation(2), lost=5)], [], [report(lost=3)], [])
    assert (result.num_ranks, result.by_rank, result.lost_by_rank) == (4, (2, 0, 0, 0), (5, 0, 3, 0))
    assert result.silent_ranks == (1, 3)
    assert str(result).splitlines()[0] == (
        "kv-canary, 4 ranks, findings: 2; violations: 2 on rank 0, 0 on rank 1, 0 on rank 2, 0 on rank 3; "
        "5 more had no room in the ring of rank 0; 3 more had no room in the ring of rank 2"
    )


def test_lines_are_those_of_the_first_rank_with_all_ranks_behind() -> None:
    first, second = (Report((violation(),), step=4, lost=0, canary="main", rank=rank) for rank in (0, 1))
    assert merged([first], [second]).lines() == [f"{first.lines()[0]} ranks=0,1 num_ranks=2"]


def test_as_json() -> None:
    result = merged([report(violation(), violation(8))], [], [report(violation())])
    read_back = json.loads(json.dumps(result.to_dict()))
    assert (read_back["num_ranks"], read_back["silent_ranks"], read_back["by_rank"]) == (3, [1], [2, 0, 1])
    assert [(finding["ranks"], finding["slots"]) for finding in read_back["findings"]] == [([0, 2], [7]), ([0], [8])]
    rebuilt = merged(*([Report.from_dict(values) for values in own] for own in read_back["reports"]))
    assert rebuilt == result


# ---- MPI --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the root of four real MPI processes got."""
    target = tmp_path_factory.mktemp("ranks") / "result.json"
    # That of the environment's own MPI, not one of the system.
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    command = [mpiexec, "-n", "4", sys.executable, "-m", "tests.ranks.four_ranks", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return result


def test_four_mpi_ranks_agree_on_a_table_fault_and_one_has_a_flipped_bit(four_ranks: dict[str, Any]) -> None:
    table_fault, flipped_bit = four_ranks["merged"]["findings"]
    slots = four_ranks["slots"]
    assert table_fault["ranks"] == [0, 1, 2, 3]
    assert table_fault["seen"] == "on all 4 ranks: the page table or the scheduler"
    assert table_fault["slots"] == [slots["wrong"], slots["behind"]]
    assert (flipped_bit["ranks"], flipped_bit["slots"]) == ([2], [slots["flipped"]])
    assert flipped_bit["seen"] == "on rank 2 alone: its memory or its transfer"
    assert (table_fault["step"], flipped_bit["step"]) == (3, 3)


def test_four_mpi_ranks_each_count_their_own(four_ranks: dict[str, Any]) -> None:
    """Two violations in each of four buffers, and one more where the bit flipped."""
    assert four_ranks["merged"]["by_rank"] == [8, 8, 9, 8]
    ranks_of_reports = [[values["rank"] for values in own] for own in four_ranks["merged"]["reports"]]
    assert ranks_of_reports == [[0], [1], [2], [3]]


def test_four_healthy_mpi_ranks_have_nothing_to_say(four_ranks: dict[str, Any]) -> None:
    assert four_ranks["healthy"]["silent_ranks"] == [0, 1, 2, 3]
    assert four_ranks["healthy"]["findings"] == []


def test_only_the_root_gets_the_result(four_ranks: dict[str, Any]) -> None:
    assert four_ranks["got_a_report"] == [False, True, False, False]


# ---- NCCL -------------------------------------------------------------------------------------------------------


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all at the same time, as ranks do."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


class HostArray(np.ndarray[Any, Any]):
    """Host memory that looks like a CuPy array, as far as the exchange sees it."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self)


class FakeNccl:
    """A communicator over host memory whose ranks are threads. It gathers like NCCL: equal counts from all ranks."""

    def __init__(self, rank: int, num_ranks: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._num_ranks, self._board, self._barrier = rank, num_ranks, board, barrier
        self.streams: list[int] = []

    @classmethod
    def of(cls, num_ranks: int) -> list[FakeNccl]:
        board, barrier = [b""] * num_ranks, threading.Barrier(num_ranks, timeout=60)
        return [cls(rank, num_ranks, board, barrier) for rank in range(num_ranks)]

    def size(self) -> int:
        return self._num_ranks

    def rank_id(self) -> int:
        return self._rank

    def device_id(self) -> int:
        return 0

    def allGather(self, sent: int, received: int, count: int, datatype: int, stream: int) -> None:  # noqa: N802
        assert datatype == 1  # one byte each
        self.streams.append(stream)
        self._board[self._rank] = ctypes.string_at(sent, count)
        self._barrier.wait()
        assert {len(sent) for sent in self._board} == {count}
        ctypes.memmove(received, b"".join(self._board), count * self._num_ranks)
        self._barrier.wait()


@pytest.fixture
def _host_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy on host memory."""
    cupy = SimpleNamespace(
        asarray=lambda array: array.view(HostArray),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(HostArray),
        cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=5)),
    )
    monkeypatch.setattr(ranks, "import_cupy", lambda: cupy)
    monkeypatch.setattr(ranks, "cuda_device", nullcontext)
    monkeypatch.setattr(ranks, "as_cupy_stream", lambda cupy, handle: nullcontext())


def reports_of(rank: int) -> list[Report]:
    """As many reports as the rank's number, so that every rank sends another length; and one fault of all of them."""
    return [report(violation(100 * rank + i)) for i in range(rank)] + [report(violation(7))]


@pytest.mark.usefixtures("_host_cupy")
def test_nccl_ranks_of_different_lengths() -> None:
    comms = FakeNccl.of(4)
    calls = [lambda comm=comm: gather_reports(comm, reports_of(comm.rank_id()), root=3) for comm in comms]
    *others, result = in_threads(calls)
    assert others == [None, None, None]
    assert result.by_rank == (1, 2, 3, 4)
    assert [[own.rank for own in of_rank] for of_rank in result.reports] == [[0], [1] * 2, [2] * 3, [3] * 4]
    assert seen(result)[0] == ((0, 1, 2, 3), {7})
    assert {slots.pop() for ranks_of_one, slots in seen(result)[1:] if ranks_of_one == (3,)} == {300, 301, 302}


@pytest.mark.usefixtures("_host_cupy")
@pytest.mark.parametrize(("stream", "used"), [(None, 5), (9, 9)])
def test_nccl_gathers_on_the_stream_that_is_given_or_cupys_current_one(stream: Any, used: int) -> None:
    (comm,) = FakeNccl.of(1)
    result = gather_reports(comm, [], stream=stream)
    assert result is not None
    assert result.silent_ranks == (0,)
    assert comm.streams == [used, used]


@pytest.mark.gpu
def test_nccl_on_every_gpu_of_the_machine() -> None:
    require_gpu()
    import cupy

    with warnings.catch_warnings():
        # CuPy's, where it finds no library.
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL library")

    comms = nccl.NcclCommunicator.initAll(cupy.cuda.runtime.getDeviceCount())

    def gather(comm: Any) -> Any:
        with cupy.cuda.Device(comm.device_id()):
            return gather_reports(comm, reports_of(comm.rank_id()), stream=cupy.cuda.Stream(non_blocking=True))

    result, *others = in_threads([lambda comm=comm: gather(comm) for comm in comms])
    for comm in comms:
        comm.destroy()
    assert others == [None] * (len(comms) - 1)
    assert result.by_rank == tuple(rank + 1 for rank in range(len(comms)))
    assert seen(result)[0] == (tuple(range(len(comms))), {7})


# ---- refusals ---------------------------------------------------------------------------------------------------


class AloneComm:
    """A communicator of mpi4py with one rank that must not be asked to gather."""

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1

    def gather(self, obj: Any, root: int) -> Any:
        raise AssertionError("must not be sent")


@pytest.mark.parametrize(
    ("comm", "root", "message"),
    [
        (object(), 0, "comm must be an mpi4py communicator or a cupy.cuda.nccl.NcclCommunicator, got object"),
        (AloneComm(), -1, "root must be non-negative, got -1"),
        (AloneComm(), 1, "root must be at most 0, got 1"),
        (AloneComm(), 0.5, "root must be an int, got 0.5"),
    ],
)
def test_nothing_is_sent_with_a_wrong_argument(comm: Any, root: Any, message: str) -> None:
    with pytest.raises(KvCanaryError) as caught:
        gather_reports(comm, [report(violation())], root=root)
    assert str(caught.value).splitlines()[0] == f"kv-canary: {message}"
