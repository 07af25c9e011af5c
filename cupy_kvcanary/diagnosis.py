"""What the pattern of violations means: never stamped, overwritten, shifted, swapped, KV changed and so on.

Each canary buffer is looked at alone, and in it each request in the order of its positions. A conclusion is drawn from
what the records say: positions, chain hashes, neighbours. Where that leaves a choice, the pattern's sentence says "or".
"""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .buffers import CHAINS
from .constants import FailReason
from .reference.records import link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .violations import Record, Violation


class Pattern(enum.Enum):
    """What happened, by a stable name."""

    NEVER_STAMPED = "never_stamped"
    STALE_AFTER_FREE = "stale_after_free"
    OVERWRITTEN = "overwritten"
    EVICTED = "evicted"
    SHIFTED = "shifted"
    SWAPPED = "swapped"
    WRONG_PAGE = "wrong_page"
    DAMAGED_RECORD = "damaged_record"
    PREDECESSOR_CHANGED = "predecessor_changed"
    KV_CHANGED = "kv_changed"
    KV_SWAPPED = "kv_swapped"
    FOREIGN_TOKENS = "foreign_tokens"
    OUT_OF_RANGE = "out_of_range"
    PAGE_TABLE_HOLE = "page_table_hole"
    WRONG_INPUT = "wrong_input"
    UNKNOWN = "unknown"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _MEANINGS[self]


_MEANINGS = {
    Pattern.NEVER_STAMPED: (
        "The record is all zero: never stamped, zeroed, or left behind by a transfer that never landed."
    ),
    Pattern.STALE_AFTER_FREE: "The slot was freed, but the page table still leads to it.",
    Pattern.OVERWRITTEN: (
        "The slot holds another request's record: overwritten by it, or the page table leads there by mistake."
    ),
    Pattern.EVICTED: (
        "The slot holds a later position: its own request came round to it again (a ring of slots, an eviction that "
        "the page table does not show), or another request took it."
    ),
    Pattern.SHIFTED: (
        "The records follow one another, but their positions are all off by the same number: the page-table row is "
        "shifted, or another request has written over its end."
    ),
    Pattern.SWAPPED: (
        "The records belong at another place that is read too: page-table entries were exchanged, or what the slots "
        "hold was."
    ),
    Pattern.WRONG_PAGE: (
        "A whole page holds the records of another page: its page-table entry is wrong, or the page was freed too "
        "early and written by another request."
    ),
    Pattern.DAMAGED_RECORD: (
        "The record was changed after it was stamped: with the expected values in it, the record behind it fits."
    ),
    Pattern.PREDECESSOR_CHANGED: (
        "The record was stamped behind another record than the one that is there now: that one's token or hash was "
        "changed, or this slot is a leftover (a rejected draft, another request's slots from here on)."
    ),
    Pattern.KV_CHANGED: "The KV bytes are not those that the record was stamped with; the record itself fits.",
    Pattern.KV_SWAPPED: "The KV bytes are those of another slot's record: the bytes moved, the records did not.",
    Pattern.FOREIGN_TOKENS: (
        "The records fit one another but are not of this request's tokens: another request's slots, or the forward "
        "pass was given other tokens when they were written."
    ),
    Pattern.OUT_OF_RANGE: "A slot index leads outside of the pool; nothing was read or written there.",
    Pattern.PAGE_TABLE_HOLE: "The page table has the padding slot where a live prefix must have a slot of its own.",
    Pattern.WRONG_INPUT: "The forward pass was given another token or position than expected.",
    Pattern.UNKNOWN: "The reason bits are not known to this version.",
}


class Diagnosis(NamedTuple):
    """What a violation means."""

    pattern: Pattern
    suspect: int | None
    """The slot in which the trouble is: the violation's own, the one before it, or None where that is not known."""


_CHAIN, _POSITION = FailReason.VERIFY_CHAIN_HASH, FailReason.VERIFY_POSITION
_KV, _TOKEN = FailReason.VERIFY_REAL_KV_HASH, FailReason.VERIFY_TOKEN
_PREDECESSOR = FailReason.PREDECESSOR_OUT_OF_RANGE

_CARRIED_ON = frozenset({Pattern.OVERWRITTEN, Pattern.SWAPPED, Pattern.WRONG_PAGE})
"""Patterns of a first record that wrong tokens behind it share."""
_OF_BYTES = frozenset({Pattern.KV_CHANGED, Pattern.KV_SWAPPED})
"""Patterns that leave the chain as it is."""


def diagnose(violations: Sequence[Violation]) -> tuple[Diagnosis, ...]:
    """One diagnosis for each violation of a report, in the same order."""
    buffers: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, violation in enumerate(violations):
        buffers[int(violation.tag), violation.launch].append(i)
    found: dict[int, Diagnosis] = {}
    for indices in buffers.values():
        found.update(zip(indices, _Buffer([violations[i] for i in indices]).diagnose(), strict=True))
    return tuple(found[i] for i in range(len(violations)))


def follows(record: Record, before: Record) -> bool:
    """Whether `record` was stamped behind `before`, by either kind of chain."""
    return _passes_on(before.prev_hash, before.token, before.position, record.prev_hash)


class _Buffer:
    """All violations of one buffer, and what is found out about each."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        self.found: dict[int, Diagnosis] = {}
        self.order = sorted(range(len(violations)), key=lambda i: violations[i].position or 0)
        # Indices: by request and position; by the record that belongs there; by the KV that it was stamped with.
        self.at: dict[tuple[int | None, ...], list[int]] = defaultdict(list)
        self.expecting: dict[tuple[int | None, int | None], int] = {}
        self.with_kv: dict[int | None, int] = {}
        # The positions at which a row of the page table is known to have a slot.
        self.positions_of: dict[tuple[int, int], set[int]] = defaultdict(set)
        for i, v in enumerate(violations):
            if v.position is None:
                continue
            self.at[v.request, v.request_row, v.position].append(i)
            self.expecting[v.position, v.expected.prev_hash] = i
            if v.reasons & _KV and v.stored:
                self.with_kv[v.stored.real_kv_hash] = i
            for offset, slot in ((-1, v.prev_slot), (0, v.slot), (1, v.next_slot)):
                if slot is not None and v.request_row is not None:
                    self.positions_of[v.request_row, slot].add(v.position + offset)

    def diagnose(self) -> list[Diagnosis]:
        """What a record says by itself, then runs at other positions, then what may only follow from those."""
        for i in self.order:
            pattern = _pattern_by_itself(self.violations[i])
            if pattern is not None:
                self.found[i] = Diagnosis(pattern, self.violations[i].slot)
        for i in self.order:
            if i not in self.found and self.violations[i].reasons & _POSITION:
                self._diagnose_run(self._run_from(i))
        for i in self.order:
            if i not in self.found:
                self.found[i] = self._diagnose_in_place(i)
        return [self.found[i] for i in range(len(self.violations))]

    def _before(self, i: int) -> int | None:
        """The violation at the position before."""
        v = self.violations[i]
        there = [] if v.position is None else self.at.get((v.request, v.request_row, v.position - 1), [])
        return next((j for j in there if self.violations[j].slot == _slot_before(v)), None)

    def _behind(self, i: int) -> int | None:
        """The violation at the next position."""
        v = self.violations[i]
        there = [] if v.position is None else self.at.get((v.request, v.request_row, v.position + 1), [])
        return next((j for j in there if self.violations[j].prev_slot == v.slot), None)

    # -- records at other positions -----------------------------------------------------------------------------

    def _run_from(self, first: int) -> list[int]:
        """The violations from here on whose records follow one another, all off by the same number."""
        run = [first]
        while (behind := self._behind(run[-1])) is not None and behind not in self.found:
            v = self.violations[behind]
            if v.reasons & _CHAIN or shift_of(v) != shift_of(self.violations[first]):
                break
            run.append(behind)
        return run

    def _diagnose_run(self, run: list[int]) -> None:
        pattern = self._pattern_of_run([self.violations[i] for i in run], self._behind(run[-1]))
        for i in run:
            self.found[i] = Diagnosis(pattern, self.violations[i].slot)

    def _pattern_of_run(self, run: list[Violation], behind: int | None) -> Pattern:
        first = run[0]
        if any(self._comes_round(v) for v in run):
            return Pattern.EVICTED
        if any(self._belongs_elsewhere(v) for v in run):
            return Pattern.SWAPPED
        if len(run) == 1 and _fits_when_mended(first):
            return Pattern.DAMAGED_RECORD
        if not first.reasons & _CHAIN or _follows_no_slot(first):
            return Pattern.SHIFTED
        is_back_in_place = behind is not None and not self.violations[behind].reasons & _POSITION
        if _are_pages(run) and (is_back_in_place or len(run) == first.page_size):
            return Pattern.WRONG_PAGE
        return Pattern.OVERWRITTEN if is_back_in_place or len(run) == 1 else Pattern.SHIFTED

    def _comes_round(self, v: Violation) -> bool:
        """It holds a later record, and its row has the same slot at a later position too."""
        if v.position is None or v.request_row is None or (shift_of(v) or 0) <= 0:
            return False
        return max(self.positions_of[v.request_row, v.slot]) > v.position

    def _belongs_elsewhere(self, v: Violation) -> bool:
        """The record is the one that is missed at another place."""
        if v.position is None or v.stored is None:
            return False
        missed = self.expecting.get((v.stored.position, v.stored.prev_hash))
        if v.reasons & _CHAIN and missed is not None and self.violations[missed].slot != v.slot:
            return True
        if v.request is None or not v.reasons & _POSITION:
            return False
        others = [self.violations[j].stored for j in self.at.get((v.request, v.request_row, v.stored.position), [])]
        return any(other is not None and other.position == v.position for other in others)

    # -- records at their own position --------------------------------------------------------------------------

    def _diagnose_in_place(self, i: int) -> Diagnosis:
        v = self.violations[i]
        if v.reasons & (_CHAIN | _PREDECESSOR):
            return self._of_chain(i)
        if v.reasons & _KV:
            other = self.with_kv.get(v.expected.real_kv_hash) if v.expected.real_kv_hash else None
            is_others = other is not None and self.violations[other].slot != v.slot
            return Diagnosis(Pattern.KV_SWAPPED if is_others else Pattern.KV_CHANGED, v.slot)
        if v.reasons & _TOKEN:
            before = self._before(i)
            if before is not None and self.found[before].pattern in _CARRIED_ON:
                return Diagnosis(self.found[before].pattern, v.slot)
            return Diagnosis(Pattern.DAMAGED_RECORD if _fits_when_mended(v) else Pattern.FOREIGN_TOKENS, v.slot)
        return Diagnosis(Pattern.UNKNOWN, None)

    def _of_chain(self, i: int) -> Diagnosis:
        """The record does not fit the one before it: which of the two is wrong?"""
        v, before = self.violations[i], self._before(i)
        if before is not None and not v.reasons & ~(_CHAIN | _PREDECESSOR):
            said = self.found[before]
            if said.suspect == _slot_before(v) and said.pattern not in _OF_BYTES:
                return said
        if v.reasons & _PREDECESSOR or _follows_no_slot(v):
            return Diagnosis(Pattern.OUT_OF_RANGE, _slot_before(v))
        if _fits_when_mended(v):
            return Diagnosis(Pattern.DAMAGED_RECORD, v.slot)
        if self._belongs_elsewhere(v):
            return Diagnosis(Pattern.SWAPPED, v.slot)
        pattern = _pattern_of_predecessor(v)
        if pattern is not None:
            return Diagnosis(pattern, v.prev_slot)
        end = self._end_of_pages(i)
        if end is not None:
            self.found[end] = Diagnosis(Pattern.WRONG_PAGE, v.slot)
            return self.found[end]
        if v.reasons & _TOKEN or self._fits_neither(i):
            return Diagnosis(Pattern.OVERWRITTEN, v.slot)
        return Diagnosis(Pattern.PREDECESSOR_CHANGED, v.prev_slot)

    def _fits_neither(self, i: int) -> bool:
        """The record behind does not fit this one either, or this one starts a chain, but not as one is started."""
        v, behind = self.violations[i], self._behind(i)
        if v.position == 0:
            return True
        if behind is None or v.stored is None or v.next_record is None:
            return False
        return bool(self.violations[behind].reasons & _CHAIN) and not follows(v.next_record, v.stored)

    def _end_of_pages(self, i: int) -> int | None:
        """The chain breaks at a page's first slot and again whole pages later: the break where they end."""
        v = self.violations[i]
        if v.request is None or v.position is None or not _are_pages_from(v):
            return None
        for j in self.order:
            w = self.violations[j]
            is_behind = (w.request, w.request_row) == (v.request, v.request_row) and (w.position or 0) > v.position
            if is_behind and w.reasons != _TOKEN:
                is_break = w.reasons == _CHAIN and ((w.position or 0) - v.position) % v.page_size == 0
                return j if is_break else None
        return None


def _pattern_by_itself(v: Violation) -> Pattern | None:
    """What the violation says whatever stands around it."""
    if v.reasons & (FailReason.VERIFY_SLOT_OUT_OF_RANGE | FailReason.WRITE_SLOT_OUT_OF_RANGE) or v.launch == "write":
        is_input = v.reasons & (FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION)
        return Pattern.WRONG_INPUT if is_input else Pattern.OUT_OF_RANGE
    if v.reasons & FailReason.PAGE_TABLE_HOLE:
        return Pattern.PAGE_TABLE_HOLE
    return _pattern_of_mark(v.stored)


def _pattern_of_mark(record: Record | None) -> Pattern | None:
    if record is not None and record.is_blank:
        return Pattern.NEVER_STAMPED
    return Pattern.STALE_AFTER_FREE if record is not None and record.is_tombstone else None


def _pattern_of_predecessor(v: Violation) -> Pattern | None:
    """What is wrong with the record before, which is outside of what was verified or whose row was lost."""
    before = v.prev_record
    mark = _pattern_of_mark(before)
    if mark or before is None or before.position is None or v.position is None or before.position == v.position - 1:
        return mark
    return Pattern.EVICTED if before.position >= v.position else Pattern.OVERWRITTEN


def _slot_before(v: Violation) -> int:
    """Of the page table at the position before; negative where there is none."""
    return -1 if v.prev_slot is None else v.prev_slot


def _follows_no_slot(v: Violation) -> bool:
    """The page table has a negative slot before: the chain hash that is expected behind it means nothing."""
    return v.request is not None and bool(v.position) and _slot_before(v) < 0


def shift_of(v: Violation) -> int | None:
    """How far the stored position is behind the expected one."""
    if v.position is None or v.stored is None or v.stored.position is None:
        return None
    return v.stored.position - v.position


def _are_pages(run: list[Violation]) -> bool:
    """The run is whole pages, displaced by whole pages."""
    first = run[0]
    return _are_pages_from(first) and len(run) % first.page_size == 0 and (shift_of(first) or 0) % first.page_size == 0


def _are_pages_from(v: Violation) -> bool:
    size = v.page_size
    return size > 1 and v.slot % size == 0 and v.position is not None and v.position % size == 0


def _fits_when_mended(v: Violation) -> bool:
    """With the expected values in the record, the one behind it follows: it is this record that was changed."""
    if v.stored is None or v.next_record is None:
        return False
    token = v.stored.token if v.expected.token is None else v.expected.token
    return _passes_on(v.expected.prev_hash, token, v.position, v.next_record.prev_hash)


def _passes_on(prev_hash: int | None, token: int | None, position: int | None, wanted: int | None) -> bool:
    """Whether a record of these values passes on the wanted hash, by either kind of chain."""
    if prev_hash is None or token is None or position is None or wanted is None:
        return False
    fields = (np.array([value % 2**64], np.uint64) for value in (prev_hash, token, position))
    arrays = tuple(fields)
    return any(int(link(chain, *arrays)[0]) == wanted for chain in CHAINS)
