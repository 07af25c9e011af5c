"""`kvcanary demo`: faults in a small replay, and what the canary says of each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

import numpy as np

from .faults import FAULTS, Injection
from .replay import ReplayOptions, replay
from .replay_text import canary_log_is_ours, outcome_table
from .traces import BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    import argparse

    from .reports import Report

DEMO_FAULTS = (
    "kv-bit-flipped-before",
    "table-entry-swapped",
    "page-freed-too-early",
    "rows-exchanged",
    "stale-mapping",
)


def add_demo_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `demo` to the commands."""
    subparsers.add_parser(
        "demo",
        help="damage a simulated KV cache and read what the canary reports",
        description="Run a small trace through a simulated engine, damage its KV cache in a few ways, and show what "
        "the canary reports. Takes seconds and needs no GPU. The exit status is 1 unless everything was found.",
    )


def demo_trace(seed: int = 0) -> list[TraceRequest]:
    """Two dozen requests of one conversation's beginning, a few at a time."""
    random = np.random.default_rng(seed)
    requests = []
    for index in range(24):
        tokens = BLOCK_TOKENS + int(random.integers(20, 400))
        requests.append(TraceRequest(0.3 * index, tokens, int(random.integers(40, 80)), (0, index + 1)))
    return requests


def run_demo(args: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    requests = demo_trace()
    options = ReplayOptions(device="cpu", page_size=4, window=256, verify_interval=1, inject=DEMO_FAULTS)
    print(
        f"{len(requests)} requests run through a simulated engine. Its KV cache gets damaged {len(DEMO_FAULTS)} times."
    )
    with canary_log_is_ours():
        result = replay(requests, options, on_event=_Teller(sys.stdout))
    canary = result.summary.canary
    print(f"\n{outcome_table(result.outcomes)}\n")
    if canary is not None:
        print(
            f"{canary.verified_entries:,} slots verified in {result.summary.steps:,} steps, "
            f"{canary.false_alarms:,} false alarms. More: kvcanary replay --inject all"
        )
    return 0 if result.is_good else 1


class _Teller:
    """Tells of each fault, and of the first violation that it causes in full."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_told = False

    def __call__(self, event: Injection | Report) -> None:
        if isinstance(event, Injection):
            self._is_told = False
            print(f"\n== step {event.step}: {event.fault}: {FAULTS[event.fault].summary}", file=self._file)
            print(f"   done: {event.what}\n", file=self._file)
        elif not self._is_told:
            self._is_told = True
            print(str(event), file=self._file)
