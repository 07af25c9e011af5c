"""A report as text: for people, and as frozen single lines for log scrapers."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from .violations import Record, hash_text, reason_names, tag_name

if TYPE_CHECKING:
    from .diagnosis import Diagnosis
    from .findings import Finding
    from .reports import Report
    from .violations import Violation

LINE_VERSION: Final = 1
"""Of the single lines. Keys, their order and their forms do not change within a version."""
FINDINGS_SHOWN: Final = 20
_WIDTH: Final = 112
_UNQUOTED: Final = "/:@+,[]"
COLUMNS: Final = (
    "step",
    "tag",
    "reason",
    "pattern",
    "suspect",
    "request",
    "row",
    "position",
    "page",
    "slot",
    "stored_token",
    "stored_position",
    "stored_hash",
    "stored_kv",
    "expected_token",
    "expected_hash",
    "expected_kv",
    "prev_slot",
    "next_slot",
)
"""What a line says of a violation, in this order, behind v, canary and rank."""
HASHES: Final = frozenset({"stored_hash", "stored_kv", "expected_hash", "expected_kv"})


def heading(report: Report) -> str:
    """One line with the counts."""
    rank = "" if report.rank is None else f", rank {report.rank}"
    text = f"kv-canary {report.canary!r}{rank}, step {report.step}: {_count(len(report.violations), 'violation')}"
    if report.violations:
        text += f" in {_count(len(report.findings), 'finding')}"
    return text + (f"; {report.lost} more had no room in the ring" if report.lost else "")


def text(report: Report) -> str:
    """The heading, then finding after finding."""
    shown = report.findings[:FINDINGS_SHOWN]
    blocks = [heading(report), *(_block(i, finding) for i, finding in enumerate(shown, 1))]
    rest = report.findings[FINDINGS_SHOWN:]
    if rest:
        blocks.append(f"and {len(rest)} more: {_count(sum(len(f.violations) for f in rest), 'violation')}")
    return "\n\n".join(blocks)


def line(report: Report, violation: Violation, diagnosis: Diagnosis) -> str:
    r"""A violation in one line, as docs/reports.md says: `kvcanary`, then key=value pairs. What is not known is `-`.

    `dict(re.findall(r"(\w+)=(\S+)", line))` parses it: values hold no blanks, the name of the canary is URL-quoted.
    """
    values: dict[str, Any] = {
        "v": LINE_VERSION,
        "canary": quote(report.canary, safe=_UNQUOTED) or None,
        "rank": report.rank,
    }
    values |= columns(violation, diagnosis)
    for name in HASHES:
        values[name] = hash_text(values[name])
    return " ".join(["kvcanary", *(f"{name}={'-' if value is None else value}" for name, value in values.items())])


def columns(violation: Violation, diagnosis: Diagnosis) -> dict[str, Any]:
    """The values of `COLUMNS`; None where one is not known."""
    stored = violation.stored or Record()
    expected = violation.expected
    values = (
        violation.step,
        tag_name(violation.tag),
        "|".join(reason_names(violation.reasons)) or None,
        diagnosis.pattern.value,
        diagnosis.suspect,
        violation.request,
        violation.request_row,
        violation.position,
        violation.page,
        violation.slot,
        stored.token,
        stored.position,
        stored.prev_hash,
        stored.real_kv_hash,
        expected.token,
        expected.prev_hash,
        expected.real_kv_hash,
        violation.prev_slot,
        violation.next_slot,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _block(number: int, finding: Finding) -> str:
    launch = finding.first.launch
    rows = [("where", finding.where), ("reasons", ", ".join(finding.reasons)), *finding.evidence]
    lines = [f"{number}. {finding.pattern.value} ({launch}; {finding.buffers})"]
    lines += [f"   {label:<9} {words}" for label, words in rows]
    lines += textwrap.wrap(finding.meaning, _WIDTH, initial_indent="   => ", subsequent_indent="      ")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
