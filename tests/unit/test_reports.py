"""Reports: decoded values, text, single lines, dictionaries and JSON, tables, HTML."""

from __future__ import annotations

import json
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary import CanaryLaunchTag, FailReason, KvCanaryError
from cupy_kvcanary.diagnosis import Pattern
from cupy_kvcanary.reports import Record, Report, Violation, decode
from tests.helpers.reports import batch_of, cache, report_of, verified, written
from tests.helpers.write import one_request

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reports.md"
SLOTS = [5, 9, 3, 7, 11, 13]
ANCHOR = 0xDE7FAE23A9A1B716


def overwritten(kinds: int = 1, **options: object) -> Report:
    """Slot 3 of fixture F1, restamped by another request, in one buffer or several."""
    buffers = [cache({2: (SLOTS, [11, 12, 13, 14, 15, 16])}, kernel_kind=kind) for kind in range(kinds)]
    for buffer in buffers:
        buffer.stamp([3], [77])
    return report_of(verified(buffers, batch_of({2: SLOTS})).violations, **options)


# -- decoding -----------------------------------------------------------------------------------------------------


def test_a_violation_of_a_verify() -> None:
    first = overwritten(kinds=4).violations[-2]
    assert first == Violation(
        tag=CanaryLaunchTag.TAIL_V_FULL,
        reasons=FailReason.VERIFY_CHAIN_HASH | FailReason.VERIFY_POSITION,
        step=812,
        slot=3,
        page_size=1,
        stored=Record(77, 0, ANCHOR, 0),
        expected=Record(None, 2, 0x13F5BAAFE6EF85D6, 0),
        request=0,
        request_row=2,
        prev_slot=9,
        prev_record=Record(12, 1, 0x89CD2ABFBEBC0649),
        next_slot=7,
        next_record=Record(14, 3, 0x86BD2A2B9B320591),
    )
    assert (first.launch, first.part, first.end, first.group) == ("verify", "V", "tail", "full")
    assert (first.position, first.page) == (2, 3)


def test_a_violation_of_a_write() -> None:
    (refused,) = written(cache({}, kernel_kind=6), one_request([63, 64])).violations
    assert (refused.launch, refused.part, refused.end, refused.group) == ("write", "K", "head", "swa")
    assert (refused.slot, refused.request, refused.prev_slot, refused.expected) == (64, 0, None, Record())
    assert refused.stored is not None
    assert (refused.stored.token, refused.stored.position) == (12, 1)
    (seed,) = written(cache({}), one_request([5], seed=99)).violations
    assert (seed.launch, seed.slot, seed.stored) == ("write", 99, None)


def test_without_details_the_rest_is_not_known() -> None:
    row = np.array([[10, 83, 7, 77, -1, 5, 6, 3]])
    (violation,) = decode(row, None, step=812, page_size=16)
    assert violation == Violation(
        tag=CanaryLaunchTag.SWEEP_K_SWA,
        reasons=FailReason(3),
        step=812,
        slot=83,
        page_size=16,
        stored=Record(77, 7, 5),
        expected=Record(None, None, 6),
    )
    assert (violation.launch, violation.page) == ("sweep", 5)


extreme = st.sampled_from([-(2**63), -(2**31), -3, -2, -1, 0, 1, 2, 63, 2**31 - 1, 2**32, 2**63 - 1])
int64 = extreme | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 15)


def table(columns: int, rows: int) -> st.SearchStrategy[np.ndarray]:
    flat = st.lists(int64, min_size=rows * columns, max_size=rows * columns)
    return flat.map(lambda values: np.array(values, np.int64).reshape(rows, columns))


@st.composite
def any_report(draw: st.DrawFn) -> Report:
    """From any values at all in the ring and the details."""
    count = draw(st.integers(0, 6))
    rows, details = draw(table(8, count)), draw(st.none() | table(13, count))
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Report(
        decode(rows, details, step=draw(st.integers(0, 2**40)), page_size=page_size),
        step=draw(st.integers(0, 2**40)),
        lost=draw(st.integers(0, 2**31 - 1)),
        canary=draw(st.text(max_size=8)),
        rank=draw(st.none() | st.integers(0, 2**20)),
    )


@settings(max_examples=300, deadline=None)
@given(report=any_report())
def test_no_value_breaks_any_form(report: Report) -> None:
    assert len(report.violations) == len(report.lines()) == len(report.to_pandas())
    for line in report.lines():
        assert line.count("=") == len(re.findall(r"(\w+)=(\S+)", line)) == 22
    assert str(report).startswith(report.heading)
    assert report._repr_html_().startswith("<div")
    # Each violation is in exactly one finding.
    told = sorted(map(repr, (v for finding in report.findings for v in finding.violations)))
    assert told == sorted(map(repr, report.violations))


@settings(max_examples=100, deadline=None)
@given(report=any_report())
def test_json_and_pickles_come_back_as_they_went(report: Report) -> None:
    assert Report.from_dict(json.loads(report.to_json())) == report
    assert pickle.loads(pickle.dumps(report)) == report


# -- text ---------------------------------------------------------------------------------------------------------

TEXT = """\
kv-canary 'canary', rank 3, step 812: 8 violations in 1 finding; 5 more had no room in the ring

1. overwritten (verify; full attention, K and V, head and tail)
   where     request 0 (row 2); position 2; slot 3
   reasons   VERIFY_CHAIN_HASH, VERIFY_POSITION
   stored    token 77, position 0, chain 0xde7fae23a9a1b716
   expected  position 2, chain 0x13f5baafe6ef85d6
   before    slot 9: token 12, position 1, chain 0x89cd2abfbebc0649
   behind    slot 7: token 14, position 3, chain 0x86bd2a2b9b320591
   follows   position 3; slot 7: no longer fits the record before it
   => The slot holds another request's record: overwritten by it, or the page table leads there by mistake."""


def test_the_text() -> None:
    assert str(overwritten(kinds=4, rank=3, lost=5)) == TEXT


def test_the_text_of_a_report_without_violations() -> None:
    assert str(report_of([], lost=5)) == "kv-canary 'canary', step 812: 0 violations; 5 more had no room in the ring"


def test_a_long_text_is_cut() -> None:
    rows = np.array([[0, slot, slot, 7, -1, 1, 2, 4] for slot in range(1, 51)])
    details = np.full((50, 13), -1)
    details[:, 0], details[:, 1], details[:, 2] = range(50), range(50), 9
    text = str(report_of(decode(rows, details, step=812, page_size=1)))
    assert "50 violations in 50 findings" in text
    assert "\n\n20. " in text
    assert text.endswith("\n\nand 30 more: 30 violations")


def test_unknown_tags_and_bits_are_numbers() -> None:
    report = report_of(decode(np.array([[77, 5, 0, 0, -1, 0, 0, 2**40 + 2]]), None, step=812, page_size=1))
    assert " tag=77 reason=VERIFY_POSITION|0x10000000000 " in report.lines()[0]
    assert "(verify; buffer 77)" in str(report)
    report = report_of(decode(np.array([[0, 5, 1, 1, -1, 1, 1, 2**40]]), None, step=812, page_size=1))
    assert "1. unknown" in str(report)


# -- lines --------------------------------------------------------------------------------------------------------

LINE = (
    "kvcanary v=1 canary=prefill%200 rank=3 step=812 tag=HEAD_K_FULL reason=VERIFY_CHAIN_HASH|VERIFY_POSITION "
    "pattern=overwritten suspect=3 request=0 row=2 position=2 page=3 slot=3 stored_token=77 stored_position=0 "
    "stored_hash=0xde7fae23a9a1b716 stored_kv=0x0000000000000000 expected_token=- "
    "expected_hash=0x13f5baafe6ef85d6 expected_kv=0x0000000000000000 prev_slot=9 next_slot=7"
)


def test_the_lines_are_frozen() -> None:
    """What scrapers parse: a change of any of this needs a new version."""
    first, second = overwritten(canary="prefill 0", rank=3).lines()
    assert first == LINE
    fields = dict(re.findall(r"(\w+)=(\S+)", second))
    assert list(fields) == list(dict(re.findall(r"(\w+)=(\S+)", LINE)))
    assert (fields["slot"], fields["suspect"], fields["reason"]) == ("7", "3", "VERIFY_CHAIN_HASH")


def test_a_line_of_little_knowledge() -> None:
    report = report_of(decode(np.array([[2, 64, 0, 0, -1, 0, 9, 64]]), None, step=1, page_size=16))
    assert report.lines() == [
        "kvcanary v=1 canary=canary rank=- step=1 tag=TAIL_K_FULL reason=VERIFY_SLOT_OUT_OF_RANGE "
        "pattern=out_of_range suspect=64 request=- row=- position=- page=4 slot=64 stored_token=- stored_position=- "
        "stored_hash=- stored_kv=- expected_token=- expected_hash=0x0000000000000009 expected_kv=- prev_slot=- "
        "next_slot=-"
    ]


def test_the_document_shows_what_is() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert TEXT in text
    assert LINE in text
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, flags=re.MULTILINE))
    assert {pattern.value: pattern.meaning for pattern in Pattern} == {
        name: meaning for name, meaning in rows.items() if name in {pattern.value for pattern in Pattern}
    }


# -- dictionaries, tables, HTML -----------------------------------------------------------------------------------


def test_a_dictionary_has_plain_values() -> None:
    values = overwritten(rank=3).to_dict()
    violation = values.pop("violations")[0]
    assert values == {"version": 1, "canary": "canary", "rank": 3, "step": 812, "lost": 0}
    assert violation == {
        "tag": "HEAD_K_FULL",
        "launch": "verify",
        "group": "full",
        "part": "K",
        "end": "head",
        "reasons": ["VERIFY_CHAIN_HASH", "VERIFY_POSITION"],
        "pattern": "overwritten",
        "suspect": 3,
        "step": 812,
        "request": 0,
        "request_row": 2,
        "position": 2,
        "page": 3,
        "page_size": 1,
        "slot": 3,
        "stored": {
            "token": 77,
            "position": 0,
            "prev_hash": "0xde7fae23a9a1b716",
            "real_kv_hash": "0x0000000000000000",
        },
        "expected": {
            "token": None,
            "position": 2,
            "prev_hash": "0x13f5baafe6ef85d6",
            "real_kv_hash": "0x0000000000000000",
        },
        "prev_slot": 9,
        "prev_record": {"token": 12, "position": 1, "prev_hash": "0x89cd2abfbebc0649", "real_kv_hash": None},
        "next_slot": 7,
        "next_record": {"token": 14, "position": 3, "prev_hash": "0x86bd2a2b9b320591", "real_kv_hash": None},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"violations": [{}]},
        {"violations": [{"tag": "NO_SUCH_TAG"}]},
        {"violations": 3},
        {"violations": [overwritten().to_dict()["violations"][0] | {"reasons": ["0xzz"]}]},
    ],
)
def test_other_dictionaries_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(KvCanaryError, match=r"report must be what Report.to_dict made, version 1, got"):
        Report.from_dict(overwritten().to_dict() | change)


def test_a_table_has_one_row_for_each_violation() -> None:
    frame = overwritten(kinds=2).to_pandas()
    assert len(frame) == 4
    assert list(frame.loc[frame["tag"] == "HEAD_V_FULL", "slot"]) == [3, 7]
    assert frame["stored_hash"][0] == ANCHOR
    assert frame["expected_token"].isna().all()
    assert frame.dtypes[["slot", "stored_hash", "pattern"]].astype(str).tolist() == ["Int64", "UInt64", "string"]
    empty = report_of([]).to_pandas()
    assert isinstance(empty, pd.DataFrame)
    assert list(empty) == list(frame)


class _Balance(HTMLParser):
    """Collects text; fails where tags do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_is_balanced_and_escaped() -> None:
    html = overwritten(canary="<script>alert('&')</script>")._repr_html_()
    assert "<script" not in html
    parser = _Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    assert "kv-canary \"<script>alert('&')</script>\", step 812: 2 violations in 1 finding" in parser.texts
    assert {"overwritten", "token 77, position 0, chain 0xde7fae23a9a1b716"} <= set(parser.texts)


def test_a_report_draws_its_pool() -> None:
    owners = np.full(64, -1)
    owners[SLOTS] = 2
    (axes,) = overwritten().plot(owners).axes
    (marks,) = axes.collections
    assert marks.get_offsets().tolist() == [[3, 0]]
    assert axes.get_title(loc="left") == "kv-canary 'canary', step 812: 2 violations in 1 finding"
    assert len(overwritten().plot(owners, group="swa").axes[0].collections) == 0
