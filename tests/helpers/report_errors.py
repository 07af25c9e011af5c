"""One call for every catalogue entry of reports, which raises it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest import mock

from cupy_kvcanary.reports import Report

if TYPE_CHECKING:
    from collections.abc import Callable

EMPTY = Report((), step=1, lost=0, canary="canary")


def _table_without_pandas() -> object:
    with mock.patch.dict(sys.modules, {"pandas": None}):
        return EMPTY.to_pandas()


REPORT_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-pandas-must-be-installed": _table_without_pandas,
    "kv-canary-report-must-be-readable": lambda: Report.from_dict(EMPTY.to_dict() | {"version": 2}),
}
