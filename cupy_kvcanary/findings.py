"""Findings: the violations that belong together, across requests, positions and buffers, and the words for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .diagnosis import Pattern, shift_of
from .violations import hash_text, reason_names, tag_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from .diagnosis import Diagnosis
    from .violations import Record, Violation

_MOST_SHOWN = 6
_GROUPS = {"full": "full attention", "swa": "sliding window"}
_ACROSS_POSITIONS = frozenset({Pattern.SWAPPED, Pattern.KV_SWAPPED})
"""Patterns of several places of one request."""
_OF_POSITIONS = frozenset({Pattern.SHIFTED, Pattern.WRONG_PAGE, Pattern.SWAPPED, Pattern.EVICTED})


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that went wrong, and all violations that tell of it."""

    pattern: Pattern
    violations: tuple[Violation, ...]
    """By buffer and request, then in the order of positions."""
    suspects: tuple[int, ...]
    """Slots in which the trouble is; empty where that is not known."""

    @property
    def first(self) -> Violation:
        """The one that is shown."""
        return self.violations[0]

    @cached_property
    def places(self) -> tuple[Violation, ...]:
        """One violation for each slot and position."""
        places: dict[Hashable, Violation] = {}
        for v in self.violations:
            places.setdefault((v.slot, v.position), v)
        return tuple(places.values())

    @property
    def meaning(self) -> str:
        """What it means, and what else the values say, in sentences."""
        return " ".join([self.pattern.meaning, *self._remarks()])

    @property
    def where(self) -> str:
        """Requests, positions, pages and slots."""
        requests = _distinct((v.request, v.request_row) for v in self.violations)
        words = [_request_words(*request) for request in requests[:_MOST_SHOWN] if request != (None, None)]
        if len(requests) > _MOST_SHOWN:
            words.append(f"{len(requests) - _MOST_SHOWN} more requests")
        return "; ".join([*([", ".join(words)] if words else []), _place_words(self.suspicious)])

    @cached_property
    def suspicious(self) -> tuple[Violation, ...]:
        """The places that are wrong in themselves, or all where it is another slot that is wrong."""
        suspects = set(self.suspects)
        return tuple(v for v in self.places if v.slot in suspects) or self.places

    @cached_property
    def followers(self) -> tuple[Violation, ...]:
        """The places that no longer fit the records before them, and may be right themselves."""
        slots = {v.slot for v in self.suspicious}
        return tuple(v for v in self.places if v.slot not in slots)

    @property
    def buffers(self) -> str:
        """Such as `full attention, K and V, head and tail`."""
        tags = _distinct(v.tag for v in self.violations)
        known = [v for v in self.violations if v.part is not None]
        words = []
        for group in _distinct(v.group for v in known):
            of_group = [v for v in known if v.group == group]
            parts, ends = _distinct(v.part for v in of_group), _distinct(v.end for v in of_group)
            if len(parts) * len(ends) == len({v.tag for v in of_group}):
                words += [_GROUPS[str(group)], " and ".join(map(str, parts)), " and ".join(map(str, ends))]
            else:
                pairs = _distinct(f"{v.part} {v.end}" for v in of_group)
                words += [_GROUPS[str(group)], *pairs]
        words += [f"buffer {tag_name(tag)}" for tag in tags if tag not in {v.tag for v in known}]
        return ", ".join(words)

    @property
    def reasons(self) -> list[str]:
        """Names of all bits."""
        return _distinct(name for v in self.places for name in reason_names(v.reasons))

    @property
    def evidence(self) -> list[tuple[str, str]]:
        """(label, words) of the first violation: what was stored, what was expected, what stands around it."""
        v = self.suspicious[0]
        stored, expected = v.stored, v.expected
        if stored is not None and not stored.real_kv_hash and not expected.real_kv_hash:
            # No KV is hashed.
            stored, expected = stored._replace(real_kv_hash=None), expected._replace(real_kv_hash=None)
        rows = [
            ("stored", "not read" if stored is None else record_words(stored)),
            ("expected", record_words(expected, kv="KV now")),
        ]
        for label, slot, record in (("before", v.prev_slot, v.prev_record), ("behind", v.next_slot, v.next_record)):
            if slot is not None:
                rows.append((label, f"slot {slot}" + ("" if record is None else f": {record_words(record)}")))
        if self.followers:
            rows.append(("follows", f"{_place_words(self.followers)}: no longer fits the record before it"))
        return rows

    def _remarks(self) -> Iterator[str]:
        places = [v for v in self.suspicious if v.stored is not None]
        if self.pattern in _OF_POSITIONS:
            shifts = _distinct(shift for v in places if (shift := shift_of(v)))
            if shifts:
                yield f"Stored minus expected position: {', '.join(f'{shift:+d}' for shift in shifts[:_MOST_SHOWN])}."
        stamped_with_kv = any(v.stored.real_kv_hash for v in places if v.stored)
        has_kv = any(v.expected.real_kv_hash for v in places)
        if self.pattern is Pattern.NEVER_STAMPED and has_kv:
            yield "There are KV bytes: they came without their record."
        if self.pattern is Pattern.KV_CHANGED and not stamped_with_kv:
            yield "The bytes were all zero when the record was stamped."
        if self.pattern is Pattern.KV_CHANGED and not has_kv:
            yield "The bytes are all zero now."
        slots = {v.slot for v in self.places}
        elsewhere = [slot for slot in self.suspects if slot not in slots]
        if elsewhere:
            yield f"Look at slot {ranges(elsewhere)}."


def find(violations: Sequence[Violation], diagnoses: Sequence[Diagnosis]) -> tuple[Finding, ...]:
    """Join what belongs together: runs of positions, then the same run in several buffers and requests."""
    readers: dict[Hashable, list[int]] = defaultdict(list)
    for i, v in enumerate(violations):
        readers[v.tag, v.launch, v.request, v.request_row].append(i)
    runs: list[list[int]] = []
    for indices in readers.values():
        indices.sort(key=lambda i: (violations[i].position or 0, violations[i].slot))
        runs += _runs(indices, violations, diagnoses)

    alike: dict[Hashable, list[list[int]]] = defaultdict(list)
    for run in runs:
        first = violations[run[0]]
        places = tuple((violations[i].slot, violations[i].position, violations[i].reasons) for i in run)
        alike[first.launch, first.group, diagnoses[run[0]].pattern, places].append(run)
    findings = [
        Finding(
            pattern=diagnoses[same[0][0]].pattern,
            violations=tuple(violations[i] for run in same for i in run),
            suspects=tuple(_distinct(s for i in same[0] if (s := diagnoses[i].suspect) is not None)),
        )
        for same in alike.values()
    ]
    return tuple(sorted(findings, key=_order))


def _runs(indices: list[int], violations: Sequence[Violation], diagnoses: Sequence[Diagnosis]) -> Iterable[list[int]]:
    """Split one reader's violations of one buffer, given by position, into what tells of the same thing."""
    runs: list[list[int]] = []
    latest: dict[Hashable, list[int]] = {}
    for i in indices:
        v, (pattern, suspect) = violations[i], diagnoses[i]
        if v.position is None or v.launch == "write" or (pattern in _ACROSS_POSITIONS and v.request is not None):
            keys: list[Hashable] = [pattern]
        else:
            keys = [(pattern, v.position - 1, v.prev_slot), (pattern, suspect)]
        run = next((latest[key] for key in keys if key in latest), None)
        if run is None:
            run = []
            runs.append(run)
        run.append(i)
        for key in (pattern, (pattern, v.position, v.slot), (pattern, v.slot)):
            latest[key] = run
    return runs


def _order(finding: Finding) -> tuple[Any, ...]:
    v = finding.first
    rows = (v.launch, -1 if v.request_row is None else v.request_row, -1 if v.request is None else v.request)
    return (*rows, v.position or 0, v.slot, int(v.tag))


def record_words(record: Record, kv: str = "KV") -> str:
    """The fields that are known; `kv` is the word for the last."""
    if record.is_blank:
        return "all zero"
    if record.is_tombstone:
        return "freed (tombstone)"
    fields = {
        "token": record.token,
        "position": record.position,
        "chain": hash_text(record.prev_hash),
        kv: hash_text(record.real_kv_hash),
    }
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None) or "not known"


def ranges(numbers: Iterable[int]) -> str:
    """Such as `3, 5-8`, in the order given; long ones are cut."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_SHOWN]]
    return ", ".join(words) + (" ..." if len(runs) > _MOST_SHOWN else "")


def _request_words(index: int | None, row: int | None) -> str:
    return " ".join([f"request {index}"] * (index is not None) + [f"(row {row})"] * (row is not None))


def _place_words(places: Sequence[Violation]) -> str:
    """Positions, pages and slots."""
    columns = {"position": [v.position for v in places if v.position is not None]}
    # A page of one slot says nothing more, and a slot outside of the pool is in no page.
    if places[0].page_size > 1 and places[0].stored is not None:
        columns["page"] = [v.page for v in places]
    columns["slot"] = [v.slot for v in places]
    return "; ".join(
        f"{name}{'s' if len(set(numbers)) > 1 else ''} {ranges(_distinct(numbers))}"
        for name, numbers in columns.items()
        if numbers
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they come."""
    return list(dict.fromkeys(values))
