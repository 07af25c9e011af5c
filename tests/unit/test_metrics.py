"""What a scrape sees of a canary."""

from __future__ import annotations

import gc
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cupy_kvcanary import KvCanaryError
from cupy_kvcanary.constants import CanaryLaunchTag, FailReason
from cupy_kvcanary.metrics import register_metrics
from tests.helpers.health import StubCanary

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
COUNTERS = {
    "steps": 7,
    "verified_entries": 1000,
    "written_entries": 200,
    "skipped_checks": 3,
    "overflowed_steps": 1,
    "lost_violations": 4,
    "errors": 2,
}


def scrape(registry: CollectorRegistry) -> dict[str, Metric]:
    """The families of one scrape, by name, read back from the text that Prometheus gets."""
    return {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}


def values(family: Metric, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


@pytest.fixture
def canary() -> StubCanary:
    canary = StubCanary()
    canary.set(
        **COUNTERS,
        last_step_s=time.monotonic() - 90,
        protected_tokens=500,
        violations=6,
        violations_by_reason={FailReason.VERIFY_POSITION: 2},
        launches={CanaryLaunchTag.HEAD_K_FULL: 14, CanaryLaunchTag.SWEEP_V_SWA: 5},
    )
    return canary


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_counters_and_gauges(canary: StubCanary, registry: CollectorRegistry) -> None:
    canary.rank = 2
    register_metrics(canary, registry)
    families = scrape(registry)
    for name, expected in {**COUNTERS, "protected_tokens": 500}.items():
        family = families[f"kvcanary_{name}"]
        assert family.type == ("counter" if name in COUNTERS else "gauge"), name
        (sample,) = family.samples
        assert sample.labels == {"canary": "main", "rank": "2"}, name
        assert sample.value == expected, name


def test_the_metrics_are_those_of_the_page(canary: StubCanary, registry: CollectorRegistry) -> None:
    register_metrics(canary, registry)
    families = scrape(registry)
    named = re.findall(r"^\| `(kvcanary_\w+)` \| (\w+) \|([^|]*)\|", PAGE, flags=re.MULTILINE)
    assert {name.removesuffix("_total"): kind for name, kind, _ in named} == {
        name: family.type for name, family in families.items()
    }
    for name, _, labels in named:
        own = set(families[name.removesuffix("_total")].samples[0].labels) - {"canary", "rank"}
        assert own == set(re.findall(r"`(\w+)`", labels)), name


def test_memory_by_kind(canary: StubCanary, registry: CollectorRegistry) -> None:
    register_metrics(canary, registry)
    by_kind = values(scrape(registry)["kvcanary_memory_bytes"], "kind")
    assert by_kind == {"records": 4096, "log": 512, "plans": 64, "pinned_host": 0}


def test_violations_by_reason_and_launches_by_tag(canary: StubCanary, registry: CollectorRegistry) -> None:
    """All reasons are there from the start, so that the first violation shows as an increase."""
    register_metrics(canary, registry)
    families = scrape(registry)
    by_reason = values(families["kvcanary_violations"], "reason")
    assert by_reason == {str(reason.name): 0 for reason in FailReason} | {"VERIFY_POSITION": 2}
    by_tag = values(families["kvcanary_launches"], "tag")
    assert by_tag == {"HEAD_K_FULL": 14, "SWEEP_V_SWA": 5}


def test_the_time_since_the_last_step_is_that_of_the_scrape(canary: StubCanary, registry: CollectorRegistry) -> None:
    register_metrics(canary, registry)
    (sample,) = scrape(registry)["kvcanary_seconds_since_last_step"].samples
    assert sample.value >= 90
    canary.set(last_step_s=None)
    assert scrape(registry)["kvcanary_seconds_since_last_step"].samples == []


def test_every_scrape_reads_the_health_of_now(canary: StubCanary, registry: CollectorRegistry) -> None:
    register_metrics(canary, registry)
    seen = []
    for steps in (8, 9):
        canary.set(steps=steps)
        seen.append(scrape(registry)["kvcanary_steps"].samples[0].value)
    assert seen == [8, 9]


def test_canaries_of_one_process_share_a_registry(canary: StubCanary, registry: CollectorRegistry) -> None:
    draft = StubCanary("draft")
    register_metrics(canary, registry)
    register_metrics(draft, registry)
    register_metrics(draft, registry)
    assert generate_latest(registry).count(b"# TYPE kvcanary_steps_total") == 1
    assert values(scrape(registry)["kvcanary_steps"], "canary") == {"main": 7, "draft": 0}


def test_canaries_that_cannot_be_told_apart_are_refused(canary: StubCanary, registry: CollectorRegistry) -> None:
    canary.rank = 1
    other_rank, namesake = StubCanary(rank=2), StubCanary(rank=1)
    register_metrics(canary, registry)
    register_metrics(other_rank, registry)
    with pytest.raises(
        KvCanaryError, match=r"differ in name or rank from the canaries of its registry, got a second 'main' of rank 1"
    ):
        register_metrics(namesake, registry)
    assert values(scrape(registry)["kvcanary_steps"], "rank") == {"1": 7, "2": 0}


def test_a_canary_that_is_gone_takes_its_series_with_it(registry: CollectorRegistry) -> None:
    canary = StubCanary()
    register_metrics(canary, registry)
    del canary
    gc.collect()
    assert scrape(registry)["kvcanary_steps"].samples == []


def test_the_default_registry_is_prometheus_clients(canary: StubCanary) -> None:
    register_metrics(canary)
    assert values(scrape(REGISTRY)["kvcanary_steps"], "canary") == {"main": 7}
