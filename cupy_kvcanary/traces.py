"""Serving traces: who asks when, how long prompt and answer are, and which prompt blocks are shared."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .catalogue import error
from .checks import check_int, check_non_negative, check_positive

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

BLOCK_TOKENS: Final = 512
"""Prompt tokens of one block id."""

MAX_TOKENS: Final = 2**22
"""Longest prompt or answer that a trace may give; well beyond any model's context."""

_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIMESTAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(?:\+00:00|Z)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the trace's first request."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Tokens generated. 0 and 1 both end with the prefill, which yields the first token."""
    block_ids: tuple[int, ...] = ()
    """One id per 512 prompt tokens, the last block may be partial; () where the trace tells nothing about sharing.
    An id stands for its block and all before it, so equal ids are a shared prefix."""


def read_trace(path: str | os.PathLike[str]) -> list[TraceRequest]:
    """The requests of a Mooncake (JSON lines) or Azure (CSV) trace, told apart by content.

    A byte-order mark, CRLF, blank lines and a missing final newline are fine. Anything else that is not as the format
    says raises an error with file and line: nothing is guessed or skipped.

    Mooncake lines hold `timestamp` (ms), `input_length`, `output_length` and optionally `hash_ids`. Azure rows hold
    `TIMESTAMP` (wall clock), `ContextTokens` and `GeneratedTokens`.
    """
    lines = _numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise error("kv-canary-trace-must-not-be-empty", name=path, got="an empty file")
    if first[1] == _AZURE_HEADER:
        parse: Callable[[str, str], TraceRequest] = _parse_azure
    elif first[1].startswith("{"):
        parse, lines = _parse_mooncake, _numbered_lines(path)
    else:
        raise error("kv-canary-trace-must-be-of-a-known-format", name=path, got=_shown(first[1]))

    requests: list[TraceRequest] = []
    start_s, last_s = 0.0, -math.inf
    parents: dict[int, int] = {}
    for number, line in lines:
        where = f"{path}:{number}"
        request = parse(where, line)
        if request.arrival_s < last_s:
            got = f"{request.arrival_s - last_s:.3f} s after it"
            raise error("kv-canary-trace-line-must-be-in-time-order", name=where, got=got)
        _check_block_ids(where, request, parents)
        last_s = request.arrival_s
        if not requests:
            start_s = last_s
        requests.append(TraceRequest(last_s - start_s, request.input_length, request.output_length, request.block_ids))
    if not requests:
        raise error("kv-canary-trace-must-not-be-empty", name=path, got="a header only")
    return requests


def _numbered_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Line numbers and lines that are not blank."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as reason:
        raise error("kv-canary-trace-must-be-readable", name=path, got=reason.strerror or repr(reason)) from reason
    except UnicodeDecodeError as reason:
        raise error("kv-canary-trace-must-be-text", name=path, got=f"byte {reason.start} is not UTF-8") from reason
    if "\0" in text:
        raise error("kv-canary-trace-must-be-text", name=path, got="a zero byte")
    # Not splitlines(): that also splits at characters that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if stripped := line.strip():
            yield number, stripped


def _parse_mooncake(where: str, line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise error("kv-canary-trace-line-must-be-json", name=where, got=_shown(line))
    for field in ("timestamp", "input_length", "output_length"):
        if field not in fields:
            raise error("kv-canary-trace-line-must-have-field", name=where, field=field, got=_shown(list(fields)))
    milliseconds = fields["timestamp"]
    if type(milliseconds) not in (int, float) or not 0 <= milliseconds < math.inf:
        raise error("kv-canary-trace-line-must-be-timed", name=where, field="timestamp", got=_shown(milliseconds))
    block_ids = fields.get("hash_ids", [])
    if not isinstance(block_ids, list) or any(type(i) is not int or not 0 <= i < 2**63 for i in block_ids):
        raise error("kv-canary-trace-line-must-be-one-id-per-block", name=where, got=_shown(block_ids))
    return TraceRequest(
        milliseconds / 1000,
        _token_count(where, "input_length", fields["input_length"], 1),
        _token_count(where, "output_length", fields["output_length"], 0),
        tuple(block_ids),
    )


def _parse_azure(where: str, line: str) -> TraceRequest:
    columns = line.split(",")
    if len(columns) != 3:
        raise error("kv-canary-trace-line-must-have-three-columns", name=where, got=_shown(line))
    timestamp, *counts = (column.strip() for column in columns)
    matched = _AZURE_TIMESTAMP.fullmatch(timestamp)
    try:
        # Seven fractional digits: more than datetime reads.
        seconds = datetime.fromisoformat(f"{matched[1]}+00:00").timestamp() if matched else math.nan
    except ValueError:
        seconds = math.nan
    if matched is None or math.isnan(seconds):
        raise error("kv-canary-trace-line-must-be-timed", name=where, field="TIMESTAMP", got=_shown(timestamp))
    context, generated = (int(text) if text.isascii() and text.isdecimal() else text for text in counts)
    return TraceRequest(
        seconds + float(matched[2] or 0),
        _token_count(where, "ContextTokens", context, 1),
        _token_count(where, "GeneratedTokens", generated, 0),
    )


def _token_count(where: str, field: str, value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise error(
            "kv-canary-trace-line-must-count-tokens",
            name=where,
            field=field,
            least=least,
            most=MAX_TOKENS,
            got=_shown(value),
        )
    return value


def _check_block_ids(where: str, request: TraceRequest, parents: dict[int, int]) -> None:
    """One id per block, and every id always after the same one: else shared slots would hold different prefixes."""
    if not request.block_ids:
        return
    if len(request.block_ids) != math.ceil(request.input_length / BLOCK_TOKENS):
        got = f"{len(request.block_ids)} ids for {request.input_length} tokens"
        raise error("kv-canary-trace-line-must-be-one-id-per-block", name=where, got=got)
    parent = -1
    for block_id in request.block_ids:
        known = parents.setdefault(block_id, parent)
        if known != parent:
            raise error(
                "kv-canary-trace-line-must-keep-the-prefix-of-an-id",
                name=where,
                block_id=block_id,
                known="at the start" if known < 0 else f"after {known}",
                got="at the start" if parent < 0 else f"after {parent}",
            )
        parent = block_id


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# What `generate_trace` imitates: (percentile, tokens), read off the Mooncake conversation trace.
_INPUT_TOKENS: Final = ((0, 891), (1, 894), (10, 973), (25, 2470), (50, 7600), (75, 16186), (90, 28566), (99, 91364))
_OUTPUT_TOKENS: Final = ((0, 1), (1, 3), (10, 24), (25, 153), (50, 356), (75, 478), (90, 609), (99, 1124))
_LONGEST_INPUT, _LONGEST_OUTPUT = 123_192, 2000
_TICK_S: Final = 3.0
_ARRIVALS_PER_TICK: Final = 9.6
_CONTINUING_SHARE: Final = 0.40
_RECENT_REQUESTS: Final = 1000
_CANDIDATES: Final = 48


def generate_trace(num_requests: int, seed: int = 0) -> list[TraceRequest]:
    """A made-up trace with the statistics of the Mooncake conversation trace; equal arguments give equal traces.

    Arrivals stand on a 3-second tick, Poisson-distributed around 9.6 a tick. Prompt and answer lengths are drawn,
    independently, from that trace's percentiles (p50/p90/p99 7,600 / 28,566 / 91,364 and 356 / 609 / 1,124). Block 0 is
    in every request, and 40% of the requests continue an earlier one: they share its whole blocks.

    How close: over 6,000 requests the percentiles are within 5% of the trace's (p99 within 15%) and 32 to 37% of the
    blocks were seen before, against 34.6%. Not imitated: the trend of the rate over the hour, and how long ago a
    continued request was.
    """
    num_requests, seed = check_int("num_requests", num_requests), check_int("seed", seed)
    check_positive("num_requests", num_requests)
    check_non_negative("seed", seed)
    random = np.random.default_rng(seed)
    inputs = _draw(random, num_requests, _INPUT_TOKENS, _LONGEST_INPUT)
    outputs = _draw(random, num_requests, _OUTPUT_TOKENS, _LONGEST_OUTPUT)
    ticks = np.repeat(np.arange(num_requests), 1 + random.poisson(_ARRIVALS_PER_TICK - 1, num_requests))
    continuing = random.random(num_requests) < _CONTINUING_SHARE

    requests: list[TraceRequest] = []
    next_id = 1
    for index in range(num_requests):
        tokens = int(inputs[index])
        shared: tuple[int, ...] = (0,)
        if continuing[index] and requests:
            recent = requests[-_RECENT_REQUESTS:]
            chosen = [recent[i] for i in random.integers(len(recent), size=_CANDIDATES)]
            # The longest whose prompt this one can continue.
            fitting = [earlier for earlier in chosen if earlier.input_length <= tokens]
            if fitting:
                longest = max(fitting, key=lambda earlier: earlier.input_length)
                shared = longest.block_ids[: longest.input_length // BLOCK_TOKENS] or shared
        fresh = math.ceil(tokens / BLOCK_TOKENS) - len(shared)
        block_ids = shared + tuple(range(next_id, next_id + fresh))
        next_id += fresh
        requests.append(TraceRequest(float(ticks[index]) * _TICK_S, tokens, int(outputs[index]), block_ids))
    return requests


def _draw(
    random: np.random.Generator, count: int, percentiles: tuple[tuple[int, int], ...], longest: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths whose percentiles are the given ones, log-linear between them."""
    at, tokens = zip(*percentiles, (100, longest), strict=True)
    drawn: np.ndarray[Any, np.dtype[np.int64]] = np.exp(
        np.interp(random.uniform(0, 100, count), at, np.log(tokens))
    ).astype(np.int64)
    return drawn
