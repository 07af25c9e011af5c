"""A report as HTML: a small table for notebooks and pages, self-contained, on light and dark ground."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from .report_text import heading

if TYPE_CHECKING:
    from .findings import Finding
    from .reports import Report

FINDINGS_SHOWN: Final = 50

# Colours are those of the page around it, or show on any.
_STYLE = """
.kvcanary-report{font:13px/1.45 system-ui,sans-serif;text-align:left;max-width:72rem}
.kvcanary-report .heading{font-weight:600;margin:.2em 0 .5em}
.kvcanary-report table{border-collapse:collapse;width:100%;color:inherit;background:none;font:inherit}
.kvcanary-report tr{background:none}
.kvcanary-report th,.kvcanary-report td{border-top:1px solid rgba(128,128,128,.35);padding:.45em .9em .45em 0;
 text-align:left;vertical-align:top;white-space:normal;color:inherit}
.kvcanary-report th{font-weight:600;border-top:0;opacity:.7}
.kvcanary-report .pattern{display:inline-block;padding:0 .5em;border-radius:.6em;font-weight:600;white-space:nowrap;
 background:rgba(214,69,56,.18);border:1px solid rgba(214,69,56,.55)}
.kvcanary-report .meaning{margin-top:.35em;max-width:26rem}
.kvcanary-report dl{display:grid;grid-template-columns:max-content 1fr;gap:0 .7em;margin:0;font:12px/1.45 ui-monospace,
 monospace}
.kvcanary-report dt{opacity:.65;font-weight:400}
.kvcanary-report dd{margin:0;overflow-wrap:anywhere}
"""


def html(report: Report) -> str:
    """One `div` with its own style. Nothing in it is taken from the report unescaped."""
    rows = "".join(map(_row, report.findings[:FINDINGS_SHOWN]))
    table = f"<table><tr><th>what happened</th><th>where</th><th>values of the first</th></tr>{rows}</table>"
    rest = len(report.findings) - FINDINGS_SHOWN
    return (
        f'<div class="kvcanary-report"><style>{_STYLE}</style>'
        f'<div class="heading">{escape(heading(report))}</div>'
        f"{table if rows else ''}{f'<div>and {rest} more</div>' if rest > 0 else ''}</div>"
    )


def _row(finding: Finding) -> str:
    where = [finding.where, f"{finding.first.launch}; {finding.buffers}"]
    evidence = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(words)}</dd>"
        for label, words in [("reasons", ", ".join(finding.reasons)), *finding.evidence]
    )
    return (
        f'<tr><td><span class="pattern">{escape(finding.pattern.value)}</span>'
        f'<div class="meaning">{escape(finding.meaning)}</div></td>'
        f"<td>{'<br>'.join(map(escape, where))}</td><td><dl>{evidence}</dl></td></tr>"
    )
