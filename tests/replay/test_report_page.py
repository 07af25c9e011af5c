"""The page of a replay: whole, self-contained, well-formed, and nothing in it is taken unescaped."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryRuntimeError
from cupy_kvcanary.demo_command import demo_trace
from cupy_kvcanary.faults import FAULTS
from cupy_kvcanary.replay import ReplayOptions, replay
from cupy_kvcanary.replay_result import ReplayResult
from cupy_kvcanary.replay_text import outcome_rows, summary_rows
from cupy_kvcanary.report_page import REPORTS_SHOWN, write_report_page
from tests.helpers.replay_errors import run_command

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "br", "img"}
HOSTILE = """<script>alert("x")</script> & 'co'"""


class Page(HTMLParser):
    """A page taken apart: every element must be closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []
        self.visible = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]

    @property
    def verdict(self) -> tuple[str, str]:
        (found,) = re.findall(r'<p class="verdict (\w+)">([^<]*)</p>', self.text)
        kind, words = found
        return kind, words


def page_of(result: ReplayResult, title: str = "Replay of a trace") -> Page:
    file = io.BytesIO()
    write_report_page(file, title, result)
    return Page(file.getvalue().decode())


def replayed(**options: Any) -> ReplayResult:
    return replay(demo_trace(), ReplayOptions(device="cpu", page_size=4, **options))


@pytest.fixture(scope="module")
def faulty() -> ReplayResult:
    return replayed(window=256, verify_interval=1, inject=["all"])


@pytest.fixture(scope="module")
def clean() -> ReplayResult:
    return replayed(verify_interval=50)


@pytest.fixture(scope="module")
def page(faulty: ReplayResult) -> Page:
    return page_of(faulty)


# ---- what is in it --------------------------------------------------------------------------------------------------


def test_every_number_of_the_summary_is_there(page: Page, faulty: ReplayResult) -> None:
    for name, value in summary_rows(faulty.summary).items():
        assert f"<th>{name}</th><td>{value}</td>" in page.text
    canary = faulty.summary.canary
    assert canary is not None
    for name, count in (("slots verified", canary.verified_entries), ("violations", canary.violations)):
        assert f"<dt>{name}</dt><dd>{count:,}</dd>" in page.text


def test_every_fault_has_a_line_what_was_done_and_what_the_canary_said(page: Page, faulty: ReplayResult) -> None:
    _, *rows = outcome_rows(faulty.outcomes)
    assert len(rows) == len(FAULTS)
    for number, (outcome, cells) in enumerate(zip(faulty.outcomes, rows, strict=True), 1):
        assert "".join(f"<td>{cell}</td>" for cell in (str(number), *cells)) in page.text
        assert outcome.injection is not None
        assert f"{number}. {outcome.fault}" in page.visible
        assert outcome.injection.what in page.visible
        assert FAULTS[outcome.fault].summary in page.visible


def test_every_report_is_told_in_words_under_its_fault_and_its_patterns_are_explained(
    page: Page, faulty: ReplayResult
) -> None:
    assert len(faulty.reports) <= REPORTS_SHOWN
    assert "no fault explains" not in page.visible
    places = [page.text.index(f"<b>{number}. {o.fault}</b>") for number, o in enumerate(faulty.outcomes, 1)]
    ends = [*places[1:], len(page.text)]
    for outcome, start, end in zip(faulty.outcomes, places, ends, strict=True):
        told = Page(f"<p>{page.text[start:end].split('</summary>', 1)[1].rsplit('</details>', 1)[0]}</p>")
        mine = [report for report in faulty.reports if report.violations[0].reasons & outcome.reasons]
        assert any(report.heading in told.visible for report in mine)
    for report in faulty.reports:
        assert page.visible.count(report.heading) == 1
        for finding in report.findings:
            assert finding.meaning in page.visible
            assert f"<dt>{finding.pattern.value}</dt><dd>{escape(finding.pattern.meaning)}</dd>" in page.text


def test_charts_are_part_of_the_page(page: Page) -> None:
    labels = page.all("aria-label")
    assert labels[:6] == [
        "Batch size over time",
        "Planned entries over time",
        "Pool use over time",
        "Canary time over time",
        "Violations over time",
        "Detection delay of each fault",
    ]
    assert labels[6:] == ["The pool: which row has which slot, and the bad slots"] * len(FAULTS)


def test_the_pool_of_a_fault_is_that_of_its_step(faulty: ReplayResult) -> None:
    """Damaged slots are in pages of the requests that read them."""
    for outcome in faulty.outcomes:
        injection = outcome.injection
        assert injection is not None
        owners = faulty.page_owners[injection.step]
        assert {int(owners[slot // 4]) for slot in injection.slots} <= set(injection.rows)
        assert set(injection.rows) <= set(owners.tolist())


def test_a_clean_replay_has_no_charts_and_no_words_of_what_did_not_happen(clean: ReplayResult) -> None:
    page = page_of(clean)
    assert page.verdict == ("good", "Clean: no violations")
    assert page.all("aria-label")[-1] == "Canary time over time"
    for heading in ("Faults", "Patterns", "no fault explains", "was injected", "were read"):
        assert heading not in page.visible


def test_each_chart_marks_the_injections_with_the_numbers_of_the_table() -> None:
    """One fault: its number stands above each chart over time, as the only text in its colour."""
    page = page_of(replayed(verify_interval=1, inject=["record-lost"]))
    charts = re.findall(r'<svg role="img" aria-label="[^"]* over time".*?</svg>', page.text, re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        assert re.findall(r'<g style="fill: var\(--mark\)".*?</g>', chart, re.DOTALL)
        assert "stroke: var(--mark)" in chart


# ---- the verdict ----------------------------------------------------------------------------------------------------


def test_all_found_is_good(page: Page) -> None:
    assert page.verdict == ("good", "11 faults injected, all found, no false alarms")


def test_what_went_wrong_stands_at_the_top(faulty: ReplayResult, clean: ReplayResult) -> None:
    first, *others = faulty.outcomes
    missed = faulty._replace(outcomes=(replace(first, found_step=None), *others), page_owners={})
    page = page_of(missed)
    assert page.verdict == ("bad", "1 of 11 faults not found")
    assert page.text.count('class="missed"') == 1

    canary = clean.summary.canary
    assert canary is not None
    alarmed = replace(clean.summary, canary=replace(canary, false_alarms=1, errors=2), differences=3)
    words = "1 false alarm, 2 calls of the canary failed, plans differ in 3 values"
    assert page_of(ReplayResult(alarmed, clean.series)).verdict == ("bad", words)


def test_without_the_canary_it_says_so() -> None:
    page = page_of(replayed(canary=False))
    assert page.verdict == ("good", "Planned without the canary")
    assert len(page.all("aria-label")) == 3


def test_a_fault_without_a_target_is_not_found_and_drawn_nowhere(clean: ReplayResult, faulty: ReplayResult) -> None:
    aimless = replace(faulty.outcomes[0], injection=None, found_step=None)
    page = page_of(clean._replace(outcomes=(aimless,)))
    assert page.verdict == ("bad", "1 of 1 fault not found")
    assert "no target" in page.visible
    assert "Detection delay of each fault" not in page.all("aria-label")


def test_reports_that_no_fault_explains_stand_apart(faulty: ReplayResult) -> None:
    page = page_of(faulty._replace(outcomes=()))
    assert page.visible.index("Reports that no fault explains") < page.visible.index(faulty.reports[0].heading)
    many = page_of(faulty._replace(outcomes=(), reports=faulty.reports[:1] * (REPORTS_SHOWN + 2)))
    assert many.visible.count(faulty.reports[0].heading) == REPORTS_SHOWN
    assert "2 more reports kept, not shown here." in many.visible


# ---- how it is made -------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    assert not re.search(r"https?:|//\w", re.sub(r"base64,[\w+/=\s]+", "", page.text))
    assert not {"script", "link", "iframe", "object", "a"} & set(page.tags)
    assert all(source.startswith("data:image/png;base64,") for source in page.all("src"))
    for target in page.all("xlink:href"):
        assert target.startswith(("#", "data:image/png;base64,"))


def test_names_within_the_page_are_unique_and_lead_somewhere(page: Page) -> None:
    names = page.all("id")
    assert len(names) == len(set(names))
    targets = {target[1:] for target in page.all("xlink:href") if target.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]*)\)", page.text))
    assert targets
    assert targets <= set(names)


def test_text_is_escaped(faulty: ReplayResult) -> None:
    first, *others = faulty.outcomes
    assert first.injection is not None
    hostile = replace(first, fault=HOSTILE, injection=replace(first.injection, what=HOSTILE))
    reports = tuple(replace(report, canary=HOSTILE) for report in faulty.reports)
    summary = replace(faulty.summary, device=HOSTILE)
    result = ReplayResult(summary, faulty.series, (hostile, *others), reports)
    page = page_of(result, title=HOSTILE)
    assert "script" not in page.tags
    assert page.visible.count(HOSTILE) > 5
    assert "<script" not in page.text


def test_colours_are_variables_that_the_page_has_for_light_and_dark_ground(page: Page) -> None:
    used = set(re.findall(r"var\(--(\w+)\)", page.text))
    light, dark = re.findall(r":root\{([^}]*)\}", page.text)
    for name in used:
        assert f"--{name}:" in light
        assert f"--{name}:" in dark


@pytest.mark.parametrize("points", [1, 2, 600])
def test_any_length_is_drawn(clean: ReplayResult, points: int) -> None:
    fields = {name: np.resize(values, points) for name, values in vars(clean.series).items()}
    series = replace(clean.series, **fields | {"time_s": np.arange(points) * 10.0})
    assert len(page_of(clean._replace(series=series)).all("aria-label")) == 4


def test_the_command_writes_it_and_names_the_trace(tmp_path: Path) -> None:
    target = tmp_path / "replay.html"
    assert run_command("--requests", "2", "--device", "cpu", "--report", str(target)) == 0
    page = Page(target.read_text(encoding="utf-8"))
    assert page.visible.startswith("Replay of a generated trace")
    assert page.verdict == ("good", "Clean: no violations")


def test_without_matplotlib_the_command_says_what_to_install_before_it_runs(tmp_path: Path) -> None:
    target = tmp_path / "replay.html"
    with (
        mock.patch.dict(sys.modules, {"matplotlib": None}),
        pytest.raises(KvCanaryRuntimeError, match=r"cupy-kvcanary\[plot\]") as caught,
    ):
        run_command("--requests", "1", "--device", "cpu", "--report", str(target))
    assert caught.value.slug == "kv-canary-matplotlib-must-be-installed"
    assert not target.exists()
