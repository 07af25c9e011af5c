"""Reports of a canary: what was found in a step, for people, logs, notebooks and programs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from . import report_html, report_text
from .catalogue import error
from .diagnosis import diagnose
from .findings import find
from .pool_plot import pool_figure
from .violations import Record, Violation, decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.figure import Figure

    from .diagnosis import Diagnosis
    from .findings import Finding
    from .violations import Group

__all__ = ["Record", "Report", "Violation", "decode"]

REPORT_VERSION: Final = 1
"""Of the dictionaries and JSON."""


@dataclass(frozen=True)
class Report:
    """The violations of one step. `print(report)` explains them."""

    violations: tuple[Violation, ...]
    step: int
    lost: int
    """Violations that the ring had no room for: counted, not described."""
    canary: str
    """Name of the canary."""
    rank: int | None = None
    """Rank of the process, where there are several."""

    @cached_property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """What each violation means, in the order of `violations`."""
        return diagnose(self.violations)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Violations that tell of the same thing, together."""
        return find(self.violations, self.diagnoses)

    @property
    def heading(self) -> str:
        """One line with the counts."""
        return report_text.heading(self)

    def __str__(self) -> str:
        return report_text.text(self)

    def lines(self) -> list[str]:
        """One line for each violation, in a form that does not change: docs/reports.md."""
        return [report_text.line(self, v, d) for v, d in self._diagnosed()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON has them. Hashes are hexadecimal strings: JSON's numbers are not exact there."""
        violations = [
            {**violation.to_dict(), "pattern": diagnosis.pattern.value, "suspect": diagnosis.suspect}
            for violation, diagnosis in self._diagnosed()
        ]
        return {
            "version": REPORT_VERSION,
            "canary": self.canary,
            "rank": self.rank,
            "step": self.step,
            "lost": self.lost,
            "violations": violations,
        }

    def to_json(self, **options: Any) -> str:
        """`to_dict` as JSON; options are those of `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """The report that `to_dict` was called on."""
        try:
            version = values["version"]
            fields = {name: values[name] for name in ("step", "lost", "canary", "rank")}
            violations = tuple(map(Violation.from_dict, values["violations"]))
        except (AttributeError, KeyError, TypeError, ValueError) as reason:
            raise error("kv-canary-report-must-be-readable", name="report", got=repr(reason)) from reason
        if version != REPORT_VERSION:
            raise error("kv-canary-report-must-be-readable", name="report", got=f"version {version!r}")
        return cls(violations, **fields)

    def to_pandas(self) -> Any:
        """A DataFrame with one row for each violation; hashes are UInt64, what is not known is `pandas.NA`."""
        try:
            import pandas as pd
        except ImportError as reason:
            raise error("kv-canary-pandas-must-be-installed", name="pandas", got=repr(reason)) from reason
        rows = [
            {"launch": v.launch, "group": v.group, "part": v.part, "end": v.end, **report_text.columns(v, diagnosis)}
            for v, diagnosis in self._diagnosed()
        ]
        dtypes = dict.fromkeys(report_text.COLUMNS, "Int64") | dict.fromkeys(report_text.HASHES, "UInt64")
        dtypes |= dict.fromkeys(("launch", "group", "part", "end", "tag", "reason", "pattern"), "string")
        return pd.DataFrame(
            {name: pd.array([row[name] for row in rows], dtype=dtype) for name, dtype in dtypes.items()}
        )

    def plot(self, owners: Any, *, group: Group = "full") -> Figure:
        """Draw the pool with the suspects of this report marked; arguments as in `pool_plot.pool_figure`."""
        marked = [
            v.slot if diagnosis.suspect is None else diagnosis.suspect
            for v, diagnosis in self._diagnosed()
            if v.group in (group, None)
        ]
        page_size = self.violations[0].page_size if self.violations else 1
        return pool_figure(owners, marked, page_size=page_size, title=self.heading)

    def _repr_html_(self) -> str:
        return report_html.html(self)

    def _diagnosed(self) -> Iterator[tuple[Violation, Diagnosis]]:
        return zip(self.violations, self.diagnoses, strict=True)
