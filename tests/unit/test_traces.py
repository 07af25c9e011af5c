"""Reading traces: both formats as published, and a clear error for everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from cupy_kvcanary.errors import KvCanaryError
from cupy_kvcanary.traces import BLOCK_TOKENS, TraceRequest, generate_trace, read_trace
from tests.helpers.replay_errors import AZURE_HEADER, reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOONCAKE = (
    b'{"timestamp": 500, "input_length": 513, "output_length": 7, "hash_ids": [3, 4]}\n'
    b'{"timestamp": 3500, "input_length": 20, "output_length": 0}'
)
AZURE = AZURE_HEADER.rstrip() + b"\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9305900,396,109"


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.csv"], ids=["right name", "wrong name"])
@pytest.mark.parametrize(
    "mangled",
    [
        lambda content: content,
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"),
        lambda content: content + b"\n\n",
    ],
    ids=["as published", "byte-order mark", "CRLF", "blank lines"],
)
def test_formats_are_told_apart_by_content(tmp_path: Path, name: str, mangled: Callable[[bytes], bytes]) -> None:
    trace = tmp_path / name
    trace.write_bytes(mangled(MOONCAKE))
    assert read_trace(trace) == [TraceRequest(0.0, 513, 7, (3, 4)), TraceRequest(3.0, 20, 0)]
    trace.write_bytes(mangled(AZURE))
    first, second = read_trace(trace)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.25)
    assert (second.input_length, second.output_length) == (396, 109)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (MOONCAKE + b'\n{"timestamp": 4000, "inp', ':3 must be a JSON object, got \'{"timestamp": 4000, "inp\''),
        (MOONCAKE + b"\n[1, 2]", ":3 must be a JSON object, got '[1, 2]'"),
        (MOONCAKE.replace(b'"output_length": 0', b'"output": 0'), ":2 must have the field output_length, got ["),
        (MOONCAKE.replace(b"20", b"-20"), ":2 must give input_length as a whole number in [1, 4194304], got -20"),
        (MOONCAKE.replace(b"20", b"true"), ":2 must give input_length as a whole number in [1, 4194304], got True"),
        (MOONCAKE.replace(b"3500", b"NaN"), ":2 must give timestamp as milliseconds >= 0 (Mooncake) or"),
        (MOONCAKE.replace(b"3500", b"400"), ":2 must not arrive before the line above it, got -0.100 s after it"),
        (MOONCAKE.replace(b"[3, 4]", b"[3, -4]"), ":1 must give hash_ids as one whole number per 512 prompt tokens"),
        (MOONCAKE.replace(b"[3, 4]", b"[3, 4, 5]"), ":1 must give hash_ids as one whole number per 512 prompt tokens"),
        (AZURE + b"\r\n2023-11-16 18:15:51.0,1", ":4 must have three columns, got '2023-11-16 18:15:51.0,1'"),
        (AZURE + b"\r\n2023-11-31 18:15:51.0,1,1", ":4 must give TIMESTAMP as"),
        (AZURE + b"\r\n2023-11-16 18:15:51.0,1,1.5", ":4 must give GeneratedTokens as a whole number in [0, "),
        (AZURE_HEADER, " must hold at least one request, got a header only"),
        (b"", " must hold at least one request, got an empty file"),
        (b"Timestamp,Context,Generated\n", " must be Mooncake JSON lines or an Azure CSV trace, got a first line 'Tim"),
        (MOONCAKE.decode().encode("utf-16"), " must be UTF-8 text, got byte 0 is not UTF-8"),
        (b"\x00" * 100, " must be UTF-8 text, got a zero byte"),
    ],
)
def test_a_malformed_trace_is_refused_with_file_and_line(content: bytes, complaint: str) -> None:
    with pytest.raises(KvCanaryError) as caught:
        reading(content)()
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("kv-canary: ")
    assert f"/trace{complaint}" in first_line


def test_a_generated_trace_has_the_statistics_of_mooncake() -> None:
    requests = generate_trace(6000, seed=0)
    assert requests == generate_trace(6000, seed=0)
    assert requests != generate_trace(6000, seed=1)

    def percentiles(values: list[int]) -> list[float]:
        return [float(value) for value in np.percentile(values, (50, 90, 99))]

    assert percentiles([r.input_length for r in requests]) == pytest.approx([7600, 28566, 91364], rel=0.05)
    assert percentiles([r.output_length for r in requests]) == pytest.approx([356, 609, 1124], rel=0.15)
    assert len(requests) / requests[-1].arrival_s == pytest.approx(3.2, rel=0.05)
    assert all(r.arrival_s % 3 == 0 for r in requests)

    seen: set[int] = set()
    shared = total = 0
    for request in requests:
        assert len(request.block_ids) == -(-request.input_length // BLOCK_TOKENS)
        shared += len(seen.intersection(request.block_ids))
        total += len(request.block_ids)
        seen.update(request.block_ids)
    assert shared / total == pytest.approx(0.346, abs=0.03)
