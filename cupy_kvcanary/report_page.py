"""The page of a replay: one HTML file with everything in it, for light and dark ground, wide and narrow."""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from .constants import FailReason
from .diagnosis import Pattern
from .faults import FAULTS
from .replay_text import outcome_rows, summary_rows
from .report_charts import COLORS, charts_over_time, delay_chart, pool_chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .injections import FaultOutcome
    from .replay_result import ReplayResult, ReplaySummary
    from .reports import Report

REPORTS_SHOWN: Final = 40
"""Of the reports that are kept; each may be long."""


def write_report_page(file: BinaryIO, title: str, result: ReplayResult) -> None:
    """Write the page: verdict, numbers, charts, faults, and the canary's reports in words. Needs matplotlib.

    Nothing in it is loaded from elsewhere, and all text is escaped.
    """
    shown = result.reports[:REPORTS_SHOWN]
    by_fault, others = _by_fault(result.outcomes, shown)
    sections = [
        _header(title, result),
        _section("Over time", _charts(result)),
        _section("Faults", _faults(result, by_fault)) if result.outcomes else "",
        _section("Reports that no fault explains", _reports(others)) if others else "",
        _rest(len(result.reports) - len(shown)),
        _section("Patterns", _legend(shown)) if shown else "",
        _section("Numbers", _numbers(result.summary)),
    ]
    page = _PAGE.format(title=escape(title), style=_style(), body="\n".join(filter(None, sections)))
    file.write(page.encode())


class _Verdict(NamedTuple):
    is_good: bool
    words: str


def _verdict(result: ReplayResult) -> _Verdict:
    """What went wrong, or that nothing did."""
    summary, outcomes = result.summary, result.outcomes
    found = sum(outcome.found_step is not None for outcome in outcomes)
    wrong = []
    if found < len(outcomes):
        wrong.append(f"{len(outcomes) - found:,} of {_count(len(outcomes), 'fault')} not found")
    if summary.canary is not None and summary.canary.false_alarms:
        wrong.append(_count(summary.canary.false_alarms, "false alarm"))
    if summary.canary is not None and summary.canary.errors:
        wrong.append(f"{_count(summary.canary.errors, 'call')} of the canary failed")
    if summary.differences:
        wrong.append(f"plans differ in {_count(summary.differences, 'value')}")
    if wrong:
        return _Verdict(False, ", ".join(wrong))
    if outcomes:
        return _Verdict(True, f"{_count(found, 'fault')} injected, all found, no false alarms")
    return _Verdict(True, "Planned without the canary" if summary.canary is None else "Clean: no violations")


def _header(title: str, result: ReplayResult) -> str:
    summary, verdict = result.summary, _verdict(result)
    tiles = {"steps": summary.steps, "requests": summary.finished}
    if summary.canary is not None:
        tiles |= {
            "slots verified": summary.canary.verified_entries,
            "records stamped": summary.canary.stamped_records,
            "violations": summary.canary.violations,
            "false alarms": summary.canary.false_alarms,
        }
    cells = "".join(f"<div><dt>{name}</dt><dd>{value:,}</dd></div>" for name, value in tiles.items())
    return (
        f'<header><h1>{escape(title)}</h1><p class="verdict {"good" if verdict.is_good else "bad"}">'
        f'{escape(verdict.words)}</p><dl class="tiles">{cells}</dl></header>'
    )


def _charts(result: ReplayResult) -> str:
    summary, series, outcomes, *_ = result
    charts = "".join(f"<figure>{svg}</figure>" for svg in charts_over_time(summary, series, outcomes))
    marks = []
    if any(outcome.injection for outcome in outcomes):
        marks.append('<b class="mark">┆</b> a fault was injected; its number is that of the table')
    if series.violations.any():
        marks.append('<b class="red">▲</b> violations were read')
    note = f'<p class="note">{"; ".join(marks)}.</p>' if marks else ""
    return f'<div class="charts">{charts}</div>{note}'


def _faults(result: ReplayResult, by_fault: Sequence[Sequence[Report]]) -> str:
    names, *rows = outcome_rows(result.outcomes)
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *names))
    lines = []
    for number, (outcome, cells) in enumerate(zip(result.outcomes, rows, strict=True), 1):
        kind = ' class="missed"' if outcome.found_step is None else ""
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in (str(number), *cells))
        lines.append(f"<tr{kind}>{columns}</tr>")
    table = f'<div class="scroll"><table class="faults"><tr>{head}</tr>{"".join(lines)}</table></div>'
    details = "".join(
        _fault(number, outcome, reports, result)
        for number, (outcome, reports) in enumerate(zip(result.outcomes, by_fault, strict=True), 1)
        if outcome.injection is not None
    )
    chart = ""
    if any(outcome.injection for outcome in result.outcomes):
        chart = f'<figure class="delay">{delay_chart(result.outcomes)}</figure>'
    return f"{table}{chart}<h3>What was done, and what the canary said</h3>{details}"


def _fault(number: int, outcome: FaultOutcome, reports: Sequence[Report], result: ReplayResult) -> str:
    injection = outcome.injection
    if injection is None:
        return ""
    found = "not found" if outcome.delay is None else f"found after {_count(outcome.delay, 'step')}"
    fault = FAULTS.get(outcome.fault)
    parts = [f"<p>{escape(fault.summary)}</p>"] if fault is not None else []
    parts.append(f'<p class="note">Step {injection.step:,}: {escape(injection.what)}.</p>')
    if reports:
        parts.append(reports[0]._repr_html_())
        page_size = reports[0].violations[0].page_size if reports[0].violations else 1
        owners = result.page_owners.get(injection.step)
        if owners is not None:
            bad = {*injection.slots, *_suspects(reports)}
            caption = (
                "The pool in that step, with the slots that were damaged or suspected. What is cached counts as free."
            )
            svg = pool_chart(owners, bad, page_size)
            parts.append(f'<figure class="paper">{svg}<figcaption>{caption}</figcaption></figure>')
        parts.append(_reports(reports[1:]))
    heading = f"<b>{number}. {escape(outcome.fault)}</b> <span>{found}</span>"
    return _details(heading, "".join(parts), is_open=number == 1)


def _suspects(reports: Iterable[Report]) -> set[int]:
    """Slots of the full pool in which the trouble is."""
    return {
        violation.slot if diagnosis.suspect is None else diagnosis.suspect
        for report in reports
        for violation, diagnosis in zip(report.violations, report.diagnoses, strict=True)
        if violation.group == "full"
    }


def _by_fault(outcomes: Sequence[FaultOutcome], reports: Iterable[Report]) -> tuple[list[list[Report]], list[Report]]:
    """The reports from each injection on until the next one, and those before the first: false alarms."""
    starts = [(o.injection.step, index) for index, o in enumerate(outcomes) if o.injection is not None]
    spans = [(index, start, end) for (start, index), (end, _) in pairwise([*sorted(starts), (2**63, -1)])]
    by_fault: list[list[Report]] = [[] for _ in outcomes]
    others: list[Report] = []
    for report in reports:
        index = next((index for index, start, end in spans if start <= report.step < end), None)
        (others if index is None else by_fault[index]).append(report)
    return by_fault, others


def _reports(reports: Iterable[Report]) -> str:
    return "".join(
        _details(
            f"Step {report.step:,}: {_count(len(report.violations) + report.lost, 'violation')}", report._repr_html_()
        )
        for report in reports
    )


def _rest(count: int) -> str:
    return f'<p class="note">{_count(count, "more report")} kept, not shown here.</p>' if count > 0 else ""


def _legend(reports: Iterable[Report]) -> str:
    seen = {diagnosis.pattern for report in reports for diagnosis in report.diagnoses}
    patterns = [pattern for pattern in Pattern if pattern in seen]
    reasons = [r for r in FailReason if any(r in v.reasons for report in reports for v in report.violations)]
    rows = "".join(f"<dt>{escape(p.value)}</dt><dd>{escape(p.meaning)}</dd>" for p in patterns)
    bits = ", ".join(f"{reason.value} {escape(str(reason.name))}" for reason in reasons)
    return f'<dl class="legend">{rows}</dl><p class="note">Reasons are bits: {bits}.</p>'


def _numbers(summary: ReplaySummary) -> str:
    rows = summary_rows(summary).items()
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<table class="numbers">{cells}</table>'


def _section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>{body}</section>"


def _details(heading: str, body: str, *, is_open: bool = False) -> str:
    return (
        f'<details{" open" if is_open else ""}><summary>{heading}</summary><div class="inside">{body}</div></details>'
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _style() -> str:
    light = "".join(f"--{name}:{value};" for name, value, _ in COLORS.values())
    dark = "".join(f"--{name}:{value};" for name, _, value in COLORS.values())
    return _STYLE.replace("/*light*/", light).replace("/*dark*/", dark)


_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE: Final = """
:root{color-scheme:light dark;/*light*/--ground:#fff;--ink:#33373b;--soft:#6b737c;--card:#f7f8f9;--good:#1a7f4b}
@media (prefers-color-scheme:dark){:root{/*dark*/--ground:#15181c;--ink:#d8dde2;--soft:#98a1ab;--card:#1c2025;
 --good:#4cc38a}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:76rem;margin:0 auto;
 padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem;padding-bottom:.3rem;border-bottom:1px solid var(--grid)}
h3{font-size:1rem;margin:1.6rem 0 .6rem}
.verdict{display:inline-block;margin:0 0 1.1rem;padding:.35rem .9rem;border-radius:1.2rem;font-weight:600}
.verdict.good{color:var(--good);border:1.5px solid var(--good)}
.verdict.bad{color:var(--red);border:1.5px solid var(--red)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.6rem;margin:0}
.tiles div{background:var(--card);border-radius:.5rem;padding:.55rem .8rem}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.2rem 1.6rem}
figure{margin:0;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:44rem}
.paper{background:#fff;color:#33373b;border-radius:.5rem;padding:.8rem;margin:.9rem 0;max-width:40rem}
.paper figcaption{font-size:.85rem;margin-top:.3rem}
.delay{max-width:36rem;margin-top:1.4rem}
.note{color:var(--soft);font-size:.9rem;margin:.7rem 0}
.mark{color:var(--mark)}.red{color:var(--red)}
.scroll{overflow-x:auto}
table{border-collapse:collapse}
.faults,.numbers{width:100%;font-variant-numeric:tabular-nums}
.faults th,.faults td{text-align:left;padding:.35rem 1rem .35rem 0;border-bottom:1px solid var(--grid);
 white-space:nowrap}
.faults td:last-child{white-space:normal;min-width:11rem}
.faults th{color:var(--soft);font-weight:600}
.faults td:first-child{color:var(--mark)}
.faults .missed td{color:var(--red)}
.numbers th,.numbers td{text-align:left;vertical-align:top;padding:.3rem 1rem .3rem 0;
 border-bottom:1px solid var(--grid)}
.numbers th{color:var(--soft);font-weight:400;width:1%;white-space:nowrap}
details{border:1px solid var(--grid);border-radius:.5rem;margin:.5rem 0}
summary{cursor:pointer;padding:.5rem .8rem}
summary span{color:var(--soft)}
.inside{padding:0 .9rem .8rem}
.inside p{margin:.3rem 0}
.legend{display:grid;grid-template-columns:max-content 1fr;gap:.35rem 1.2rem;margin:0}
.legend dt{font-weight:600}.legend dd{margin:0}
@media (max-width:44rem){
 .kvcanary-report tr,.kvcanary-report td{display:block}.kvcanary-report th{display:none}
 .kvcanary-report td+td{border-top:0!important;padding-top:0!important}
 .legend{grid-template-columns:1fr}.legend dd{margin-bottom:.5rem}
 .faults td:last-child{white-space:nowrap}
 .numbers th{white-space:normal;width:34%}
}
"""
