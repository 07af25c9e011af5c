"""One call for every catalogue entry of metrics and ranks, which raises it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest import mock

from cupy_kvcanary.metrics import CanaryCollector, register_metrics
from cupy_kvcanary.ranks import gather_reports
from tests.helpers.health import StubCanary

if TYPE_CHECKING:
    from collections.abc import Callable


def _metrics_without_prometheus_client() -> None:
    with mock.patch.dict(sys.modules, {"prometheus_client": None}):
        register_metrics(StubCanary())


def _two_canaries_of_one_name() -> None:
    collector = CanaryCollector()
    first, second = StubCanary(), StubCanary()
    for canary in (first, second):
        collector.add(canary)


HEALTH_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-prometheus-client-must-be-installed": _metrics_without_prometheus_client,
    "kv-canary-metrics-must-tell-canaries-apart": _two_canaries_of_one_name,
    "kv-canary-comm-must-be-a-communicator": lambda: gather_reports(0, []),
}
