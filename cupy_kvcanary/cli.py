"""The command `kvcanary`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from . import doctor
from .bench_command import add_bench_parser, run_bench
from .catalogue import CATALOGUE, as_markdown, as_text, find_entry
from .demo_command import add_demo_parser, run_demo
from .errors import KvCanaryError, KvCanaryRuntimeError
from .installation import __version__
from .replay_command import add_replay_parser, run_replay

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Errors of the catalogue are printed, not raised."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (KvCanaryError, KvCanaryRuntimeError) as failure:
        print(failure, file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123  keeps the interpreter's last flush from failing
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcanary", description="KV-cache canary: finds silent KV-cache corruption while a model serves."
    )
    parser.add_argument("--version", action="version", version=f"cupy-kvcanary {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_replay_parser(commands)
    commands.choices["replay"].set_defaults(run=run_replay)

    add_demo_parser(commands)
    commands.choices["demo"].set_defaults(run=run_demo)

    add_bench_parser(commands)
    commands.choices["bench"].set_defaults(run=run_bench)

    examine = commands.add_parser("doctor", help="report GPU, driver, CuPy and NVRTC, and check the kernels")
    examine.set_defaults(run=_run_doctor)

    explain = commands.add_parser("explain", help="explain an error by its slug or message")
    which = explain.add_mutually_exclusive_group(required=True)
    which.add_argument("text", nargs="?", metavar="SLUG-OR-MESSAGE")
    which.add_argument("--list", action="store_true", help="list every slug")
    which.add_argument("--markdown", action="store_true", help="print the catalogue as docs/errors.md")
    explain.set_defaults(run=_run_explain)
    return parser


def _run_doctor(args: argparse.Namespace) -> int:
    has_problem = False
    for finding in doctor.examine():
        has_problem |= finding.is_problem
        print(f"{'!' if finding.is_problem else ' '} {finding.topic:<8} {finding.text}", flush=True)
    return 1 if has_problem else 0


def _run_explain(args: argparse.Namespace) -> int:
    if args.list:
        print("\n".join(CATALOGUE))
    elif args.markdown:
        print(as_markdown(), end="")
    else:
        print(as_text(find_entry(args.text)))
    return 0
