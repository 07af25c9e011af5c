"""Everything that needs a GPU, from a checkout and without installing: `python tools/gpu_check.py --out DIR`.

The tests marked `gpu`, compute-sanitizer's four tools over the kernels, the benchmarks. A part that fails or takes too
long does not stop the next. Ends with a table; the exit status is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("tests", "sanitizers", "benchmarks")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")

# The recorded cases, and the batch sizes that take the kernels they are too small for.
SANITIZED_TESTS = ("-m", "gpu", "-k", "golden or batch_sizes", "-q", "-p", "no:cacheprovider", "tests/kernels")

# pytest with an allocation for each array: out of CuPy's pool an overrun ends in the same block, and a new array holds
# what an old one held, so memcheck and initcheck would see neither. What these tests do besides our kernels is copies
# and memsets, which initcheck knows, so it needs no filter.
WITHOUT_POOL = "import sys, cupy, pytest; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))"


@dataclass(frozen=True)
class Step:
    name: str
    command: Sequence[str]
    is_good: Callable[[str], bool] = lambda log: True
    """Whether the log of a run that ended with status 0 says what it must."""


@dataclass(frozen=True)
class Result:
    step: str
    result: str
    seconds: float
    summary: str
    """The last line that says how it ended."""


def steps(skipped: Sequence[str], out: Path, *, is_quick: bool) -> Iterator[Step]:
    python = sys.executable
    if "tests" not in skipped:
        yield Step("tests", [python, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"])
    if "sanitizers" not in skipped:
        for tool in SANITIZERS:
            sanitizer = [find_sanitizer(), "--tool", tool, "--target-processes", "all", "--error-exitcode", "1"]
            yield Step(tool, [*sanitizer, python, "-c", WITHOUT_POOL, *SANITIZED_TESTS], says_no_errors)
    if "benchmarks" not in skipped:
        for path in sorted(ROOT.glob("benchmarks/bench_*.py")):
            bench = [python, "-m", "cupy_kvcanary", "bench", path.stem.removeprefix("bench_"), "--device", "cuda"]
            yield Step(path.stem, [*bench, "--json", str(out), "--plot", str(out), *(["--quick"] if is_quick else [])])


def find_sanitizer() -> str:
    """Its path, or the bare name, which then fails as any missing command does."""
    name = "compute-sanitizer"
    folders = [
        folder
        for home in sorted(Path("/usr/local").glob("cuda*"), reverse=True)
        for folder in (home / "bin", home / name)
    ]
    return shutil.which(name) or next((found for folder in folders if (found := shutil.which(name, path=folder))), name)


def says_no_errors(log: str) -> bool:
    """Each summary of a sanitizer counts nothing, hazards that are warnings included, and there is one."""
    counts = re.findall(r"SUMMARY: (\d+)", log)
    return bool(counts) and set(counts) == {"0"}


def run(step: Step, out: Path, seconds: int) -> Result:
    path = out / f"{step.name}.log"
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search), "KVCANARY_REQUIRE_GPU": "1"}
    start = time.monotonic()
    with path.open("w", encoding="utf-8") as log:
        try:
            # A session of its own: what a sanitizer started is stopped with it.
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            status = process.wait(seconds)
            result = "ok" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result = "out of time"
        except FileNotFoundError:
            result = "not found"
    text = path.read_text(encoding="utf-8", errors="replace")
    if result == "ok" and not step.is_good(text):
        result = "errors"
    return Result(step.name, result, round(time.monotonic() - start, 1), summary_of(text))


def summary_of(log: str) -> str:
    lines = [line.strip("= ") for line in log.splitlines() if line.strip("= ")]
    summaries = [line for line in lines if "SUMMARY" in line]
    return (summaries or lines or [""])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", choices=PARTS, default=[], help="parts to leave out")
    parser.add_argument("--quick", action="store_true", help="only the quick cases of the benchmarks")
    parser.add_argument("--seconds", type=int, default=300, help="after which a step is stopped (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the logs, the benchmarks' JSON and results.json")
    options = parser.parse_args()
    out = (options.out or Path(tempfile.mkdtemp(prefix="gpu_check-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for step in steps(options.skip, out, is_quick=options.quick):
        print(f"{step.name} ...", flush=True)
        results.append(run(step, out, options.seconds))
        # After each step, so that the run may be stopped at any time.
        (out / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(f"\n{'step':<20} {'result':<12} {'seconds':>7}  summary")
    for result in results:
        print(f"{result.step:<20} {result.result:<12} {result.seconds:>7.1f}  {result.summary}")
    print(f"logs: {out}")
    return 0 if all(result.result == "ok" for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
