"""A canary's health as metrics of prometheus-client, read when they are scraped."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .catalogue import error
from .constants import FailReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from .canary import Canary

_COUNTERS = {
    "steps": "Steps that were called.",
    "verified_entries": "Slots that were verified.",
    "written_entries": "Records that were written.",
    "skipped_checks": "Checks that were left out.",
    "overflowed_steps": "Steps that were not verified, as their entries did not fit into the plan.",
    "lost_violations": "Violations that the ring had no room for.",
    "errors": "Calls that failed and were logged.",
}
"""Counters with no labels of their own: fields of `Health`, and what they count."""


class CanaryCollector:
    """Collector of any number of canaries. `register_metrics` makes one for a registry.

    Every metric has the labels `canary` (its name) and `rank` (empty outside of a parallel engine). Canaries are not
    kept alive: one that is gone takes its series with it.
    """

    def __init__(self) -> None:
        self._labels: WeakKeyDictionary[Canary, tuple[str, str]] = WeakKeyDictionary()
        self._lock = Lock()

    def add(self, canary: Canary) -> None:
        """Collect this canary too. No other one may have both its name and its rank."""
        labels = (canary.name, "" if canary.rank is None else str(canary.rank))
        with self._lock:
            if any(taken == labels and other is not canary for other, taken in self._labels.items()):
                got = f"a second {canary.name!r}" + ("" if canary.rank is None else f" of rank {canary.rank}")
                raise error("kv-canary-metrics-must-tell-canaries-apart", name="canary", got=got)
            self._labels[canary] = labels

    def collect(self) -> Iterator[Metric]:
        """The metrics of now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            canaries = [(labels, canary.health(), canary.memory) for canary, labels in self._labels.items()]

        def counter(name: str, text: str, *label: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"kvcanary_{name}", text, labels=["canary", "rank", *label])

        def gauge(name: str, text: str, *label: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"kvcanary_{name}", text, labels=["canary", "rank", *label])

        plain = {name: counter(name, text) for name, text in _COUNTERS.items()}
        violations = counter("violations", "Violations that were reported, once for each reason of each.", "reason")
        launches = counter("launches", "Launches that ran on the device.", "tag")
        tokens = gauge("protected_tokens", "Cached tokens of the last step's batch, whose records it verified.")
        idle = gauge("seconds_since_last_step", "Seconds since the last step; absent before the first.")
        memory = gauge("memory_bytes", "Memory that the canary took.", "kind")
        for labels, health, taken in canaries:
            for name, family in plain.items():
                family.add_metric(labels, getattr(health, name))
            # All reasons from the start: a series that begins with 1 shows no increase.
            for reason in FailReason:
                violations.add_metric([*labels, str(reason.name)], health.violations_by_reason.get(reason, 0))
            for tag, count in health.launches.items():
                launches.add_metric([*labels, tag.name], count)
            tokens.add_metric(labels, health.protected_tokens)
            if (idle_s := health.idle_s) is not None:
                idle.add_metric(labels, idle_s)
            for kind, num_bytes in asdict(taken).items():
                memory.add_metric([*labels, kind], num_bytes)
        yield from (*plain.values(), violations, launches, tokens, idle, memory)


_collectors: WeakKeyDictionary[CollectorRegistry, CanaryCollector] = WeakKeyDictionary()
_collectors_lock = Lock()


def register_metrics(canary: Canary, registry: CollectorRegistry | None = None) -> None:
    """Show a canary's health to whoever scrapes a registry of prometheus-client.

    Parameters
    ----------
    canary : a `Canary`; several in one registry need different names or ranks.
    registry : None for prometheus-client's default one.

    Raises
    ------
    KvCanaryError
        Another canary of the registry has this name and rank.
    KvCanaryRuntimeError
        prometheus-client is not installed.

    """
    try:
        prometheus_client = import_module("prometheus_client")
    except ImportError as reason:
        raise error(
            "kv-canary-prometheus-client-must-be-installed", name="prometheus_client", got=repr(reason)
        ) from reason
    if registry is None:
        registry = prometheus_client.REGISTRY
    with _collectors_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = CanaryCollector()
            registry.register(collector)
            _collectors[registry] = collector
    collector.add(canary)
