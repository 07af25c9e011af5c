"""What each of four ranks runs: `mpiexec -n 4 python -m tests.ranks.four_ranks FILE.json`.

An engine with a canary serves a few steps. Then all of them get the same wrong entry in the page table, and one of them
a flipped bit in its KV. The root writes what the test looks at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpi4py import MPI

from cupy_kvcanary.ranks import gather_reports
from tests.helpers.backends import ArrayBackend
from tests.helpers.engine import Engine

FLIPPED_RANK, ROOT = 2, 1


def main(target: Path) -> None:
    comm = MPI.COMM_WORLD
    engine = Engine(ArrayBackend("numpy"), real_kv_hash="all")
    engine.serve()
    healthy = gather_reports(comm, engine.canary.synchronize(), root=ROOT)

    # The same scheduler on every rank: request 1 reads a slot of request 3.
    engine.table[1, 3] = engine.slot(3, 2)
    if comm.Get_rank() == FLIPPED_RANK:
        engine.kv["v1"][engine.slot(2, 1), 5] ^= 64
    engine.step({1: [90], 2: [91], 3: [92]})
    merged = gather_reports(comm, engine.canary.synchronize(), root=ROOT)

    got_a_report = comm.gather(merged is not None, root=ROOT)
    if merged is not None and healthy is not None:
        result = {
            "healthy": healthy.to_dict(),
            "merged": merged.to_dict(),
            "text": str(merged),
            "got_a_report": got_a_report,
            "slots": {"wrong": engine.slot(1, 3), "behind": engine.slot(1, 4), "flipped": engine.slot(2, 1)},
        }
        target.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
