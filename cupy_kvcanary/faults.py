"""Faults of KV caches on purpose: named, seeded, and each on a target where the canary must find it.

A fault changes arrays in place, NumPy's or CuPy's, as the bug that it imitates would: element by element. Of an engine
it knows what `FaultSite` shows. Faults keep to slots that one request alone reads, so that restoring that request
undoes everything.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from .constants import FREED_POSITION, FREED_TOKEN, FailReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .constants import CanaryLaunchTag


@dataclass(frozen=True, kw_only=True)
class LiveRequest:
    """A request of the step's batch, as faults see it."""

    row: int
    """Of the page table."""
    prefix_len: int
    """Tokens whose KV is in the pool."""
    extend_len: int = 1
    """Tokens whose KV the step writes."""
    own_from: int = 0
    """First position whose slot no other request reads and no prefix cache keeps."""
    first_entry: int = 0
    """Index of its first token in the step's `input_ids`."""
    steps_left: int = 1
    """Steps that it runs behind this one."""

    @property
    def own(self) -> range:
        """Its own positions, but for the last one: the next record is chained to that."""
        return range(self.own_from, self.prefix_len - 1)


@dataclass(frozen=True, kw_only=True)
class FaultSite:
    """What a fault may look at and touch in one step. Arrays are written in place."""

    step: int
    rng: np.random.Generator
    requests: Sequence[LiveRequest]
    page_table: Any
    """int32[rows, positions]: slots."""
    records: Mapping[CanaryLaunchTag, Any]
    """uint8[slots, 32] of each canary buffer, as `Canary.records`."""
    kv_layers: Sequence[Any]
    """uint8[pages, page_size, bytes] of the hashed layers of K and V."""
    page_size: int
    input_ids: Any
    """int64: tokens of the step, one request after another; not yet read by the forward."""
    mapping: Any | None = None
    """int64[slots]: slots of the sliding-window pool."""
    swa_kv_layers: Sequence[Any] = ()
    swa_window_size: int = 0
    steps_to_find: int = 1
    """Steps until a violation is read at the latest; a target lives longer."""

    @property
    def targets(self) -> list[LiveRequest]:
        """Requests that live long enough."""
        return [request for request in self.requests if request.steps_left > self.steps_to_find]

    def pick(self, least: int) -> LiveRequest | None:
        """One of them that has at least so many positions that may be touched; None where there is none."""
        fit = [request for request in self.targets if len(request.own) >= least]
        return fit[self.rng.integers(len(fit))] if fit else None

    def slots(self, row: int, positions: Sequence[int]) -> list[int]:
        """Slots of a row's positions."""
        return [int(self.page_table[row, position]) for position in positions]

    def pick_page(self, request: LiveRequest, room_before: int = 0) -> range:
        """The positions of a page that may be touched, and so many before it. `least` was two pages and those."""
        first = -(-(request.own.start + room_before) // self.page_size)
        page = int(self.rng.integers(first, request.own.stop // self.page_size))
        return range(page * self.page_size, (page + 1) * self.page_size)

    def stays_in_window(self, request: LiveRequest, position: int) -> bool:
        """Whether the request still reads the position in the window's pool when a fault is found."""
        read_until = request.prefix_len + request.extend_len + self.steps_to_find
        return self.mapping is not None and position >= read_until - self.swa_window_size

    def records_of(self, slots: Sequence[int]) -> list[Places]:
        """The canary buffers, and where the slots are in each."""
        return [
            Places(buffer, self._mapped(slots) if tag.name.endswith("SWA") else list(slots), tag.name.endswith("SWA"))
            for tag, buffer in self.records.items()
        ]

    def kv_of(self, slots: Sequence[int]) -> list[Places]:
        """The layers as [slots, bytes], and where the slots are in each."""
        full = [Places(layer.reshape(-1, layer.shape[-1]), list(slots), False) for layer in self.kv_layers]
        mapped = self._mapped(slots)
        return full + [Places(layer.reshape(-1, layer.shape[-1]), mapped, True) for layer in self.swa_kv_layers]

    def _mapped(self, slots: Sequence[int]) -> list[int]:
        return [int(self.mapping[slot]) for slot in slots] if self.mapping is not None else list(slots)


class Places(NamedTuple):
    """An array by slot, and the slots that a fault is about, 0 where the window's pool has none."""

    array: Any
    slots: list[int]
    is_swa: bool


class Damage(NamedTuple):
    """What a fault did, in words; the slots that are read damaged or wrongly; the rows whose requests read them."""

    what: str
    slots: list[int]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A fault that was injected."""

    fault: str
    step: int
    what: str
    """What was done, in words."""
    slots: tuple[int, ...]
    """Slots that are read damaged, or in place of others."""
    rows: tuple[int, ...]
    """Rows of the page table whose requests read them."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault. Called with a site, it injects itself, or returns None where the site has no target for it."""

    name: str
    summary: str
    """What goes wrong in an engine."""
    shows_as: FailReason
    """Reasons that its violations have at least, with expected tokens and all KV bytes checked."""
    damage: Callable[[FaultSite], Damage | None] = field(repr=False)
    is_after_step: bool = False
    """Injected behind the stamping of the step's records, not before their verification."""
    needs_window: bool = False

    def __call__(self, site: FaultSite) -> Injection | None:
        """Damage the site."""
        damage = self.damage(site)
        if damage is None:
            return None
        return Injection(
            fault=self.name, step=site.step, what=damage.what, slots=tuple(damage.slots), rows=tuple(damage.rows)
        )


def _swap_table_entries(site: FaultSite) -> Damage | None:
    request = site.pick(2)
    if request is None:
        return None
    row = request.row
    one, other = sorted(int(position) for position in site.rng.choice(np.array(request.own), 2, replace=False))
    slots = site.slots(row, (one, other))
    site.page_table[row, one], site.page_table[row, other] = slots[1], slots[0]
    what = f"entries {one} and {other} of page-table row {row} exchanged (slots {slots[0]} and {slots[1]})"
    return Damage(what, slots, [row])


def _free_page(site: FaultSite) -> Damage | None:
    request = site.pick(2 * site.page_size)
    if request is None:
        return None
    positions = site.pick_page(request)
    slots = site.slots(request.row, positions)
    for records in site.records_of(slots):
        for slot in records.slots:
            fields = records.array[slot].view("int64")
            for index, value in enumerate((FREED_TOKEN, FREED_POSITION, 0, 0)):
                fields[index] = value
    what = f"the page of positions {_span(positions)} of row {request.row} freed while the request still reads it"
    return Damage(what, slots, [request.row])


def _flip_kv_bit(site: FaultSite, request: LiveRequest, position: int) -> Damage:
    slots = site.slots(request.row, [position])
    layers = [kv for kv in site.kv_of(slots) if not kv.is_swa or site.stays_in_window(request, position)]
    layer = layers[site.rng.integers(len(layers))]
    byte, bit = int(site.rng.integers(layer.array.shape[1])), int(site.rng.integers(8))
    layer.array[layer.slots[0], byte] ^= 1 << bit
    pool = "window pool's KV" if layer.is_swa else "KV"
    what = f"bit {bit} of {pool} byte {byte} of slot {layer.slots[0]} flipped (row {request.row}, position {position})"
    return Damage(what, slots, [request.row])


def _flip_kv_bit_before(site: FaultSite) -> Damage | None:
    request = site.pick(1)
    return None if request is None else _flip_kv_bit(site, request, int(site.rng.choice(np.array(request.own))))


def _flip_kv_bit_after(site: FaultSite) -> Damage | None:
    fit = [request for request in site.targets if request.prefix_len >= request.own_from]
    if not fit:
        return None
    request = fit[site.rng.integers(len(fit))]
    return _flip_kv_bit(site, request, request.prefix_len + request.extend_len - 1)


def _lose_record(site: FaultSite) -> Damage | None:
    request = site.pick(2)
    if request is None:
        return None
    # Not position 0: what was lost shows by its position, too.
    position = int(site.rng.integers(max(request.own.start, 1), request.own.stop))
    slots = site.slots(request.row, [position])
    buffers = [found for found in site.records_of(slots) if not found.is_swa or site.stays_in_window(request, position)]
    buffer = buffers[site.rng.integers(len(buffers))]
    buffer.array[buffer.slots[0]] = 0
    what = f"the record of slot {buffer.slots[0]} zeroed in one buffer (row {request.row}, position {position})"
    return Damage(what, slots, [request.row])


def _swap_tokens(site: FaultSite) -> Damage | None:
    tokens = site.input_ids
    fit = [request for request in site.targets if request.prefix_len >= request.own_from]
    pairs = [
        (one, other)
        for one, other in itertools.pairwise(fit)
        if int(tokens[one.first_entry]) != int(tokens[other.first_entry])
    ]
    if not pairs:
        return None
    one, other = pairs[site.rng.integers(len(pairs))]
    kept = int(tokens[one.first_entry])
    tokens[one.first_entry] = int(tokens[other.first_entry])
    tokens[other.first_entry] = kept
    slots = site.slots(one.row, [one.prefix_len]) + site.slots(other.row, [other.prefix_len])
    what = (
        f"the input tokens of row {one.row}, position {one.prefix_len} and row {other.row}, position "
        f"{other.prefix_len} exchanged before the forward"
    )
    return Damage(what, slots, [one.row, other.row])


def _exchange_rows(site: FaultSite) -> Damage | None:
    fit = [request for request in site.targets if len(request.own) >= 1]
    if len(fit) < 2:
        return None
    chosen = site.rng.choice(len(fit), 2, replace=False)
    one, other = sorted((fit[index] for index in chosen.tolist()), key=lambda request: request.prefix_len)
    table, length = site.page_table, one.prefix_len
    kept = table[one.row, :length].copy()
    table[one.row, :length] = table[other.row, :length]
    table[other.row, :length] = kept
    what = f"the first {length} entries of page-table rows {one.row} and {other.row} exchanged"
    return Damage(what, [], [one.row, other.row])


def _lose_transfer(site: FaultSite) -> Damage | None:
    request = site.pick(2 * site.page_size)
    if request is None:
        return None
    positions = site.pick_page(request)
    slots = site.slots(request.row, positions)
    for places in site.records_of(slots) + site.kv_of(slots):
        for slot in places.slots:
            places.array[slot] = 0
    what = f"the page of positions {_span(positions)} of row {request.row} zeroed, KV and records: it never arrived"
    return Damage(what, slots, [request.row])


def _shift_page(site: FaultSite) -> Damage | None:
    request = site.pick(2 * site.page_size + 1)
    if request is None:
        return None
    positions = site.pick_page(request, room_before=1)
    slots = site.slots(request.row, range(positions.start - 1, positions.stop))
    for position, slot in zip(positions, slots[:-1], strict=True):
        site.page_table[request.row, position] = slot
    what = f"entries {_span(positions)} of page-table row {request.row} each lead to the slot of the position before"
    return Damage(what, slots, [request.row])


def _leave_mapping_stale(site: FaultSite) -> Damage | None:
    mapping = site.mapping
    if mapping is None:
        return None
    targets = []
    for request in site.targets:
        # The last page that no step writes any more; the page behind it is mapped, too.
        start = ((request.prefix_len - 1) // site.page_size - 1) * site.page_size
        if start >= request.own.start and site.stays_in_window(request, start):
            targets.append((request.row, range(start, start + site.page_size)))
    if not targets:
        return None
    row, positions = targets[site.rng.integers(len(targets))]
    slots = site.slots(row, positions)
    others = site.slots(row, range(positions.stop, positions.stop + site.page_size))
    for slot, other in zip(slots, others, strict=True):
        mapping[slot] = int(mapping[other])
    what = f"the mapping of the page of positions {_span(positions)} of row {row} leads to another window page"
    return Damage(what, slots, [row])


_LATE_TOKENS: Final = 3


def _write_late(site: FaultSite) -> Damage | None:
    victim = site.pick(2 * _LATE_TOKENS + 1)
    if victim is None:
        return None
    start = int(site.rng.integers(victim.own.start, victim.own.stop - 2 * _LATE_TOKENS))
    written = range(start, start + _LATE_TOKENS)
    # What a finished request would write: the KV and records of other tokens at other positions.
    slots = site.slots(victim.row, written)
    sources = site.slots(victim.row, range(written.stop, written.stop + _LATE_TOKENS))
    pairs = zip(site.records_of(slots) + site.kv_of(slots), site.records_of(sources) + site.kv_of(sources), strict=True)
    for places, source in pairs:
        for slot, source_slot in zip(places.slots, source.slots, strict=True):
            places.array[slot] = places.array[source_slot]
    what = (
        f"KV and records of positions {_span(written)} of row {victim.row} overwritten, as by a request that finished"
    )
    return Damage(what, slots, [victim.row])


def _span(positions: range) -> str:
    return f"{positions.start} to {positions.stop - 1}"


_CHAIN, _POSITION = FailReason.VERIFY_CHAIN_HASH, FailReason.VERIFY_POSITION
_REAL_KV, _TOKEN = FailReason.VERIFY_REAL_KV_HASH, FailReason.VERIFY_TOKEN

FAULTS: Final[dict[str, Fault]] = {
    fault.name: fault
    for fault in (
        Fault(
            name="table-entry-swapped",
            summary="Two entries of a request's page table are exchanged.",
            shows_as=_CHAIN | _POSITION | _TOKEN,
            damage=_swap_table_entries,
        ),
        Fault(
            name="page-freed-too-early",
            summary="The allocator takes back a page that a running request still reads.",
            shows_as=_CHAIN | _POSITION | _REAL_KV | _TOKEN,
            damage=_free_page,
        ),
        Fault(
            name="kv-bit-flipped-before",
            summary="A bit of KV changes in memory, between the steps that wrote and that read it.",
            shows_as=_REAL_KV,
            damage=_flip_kv_bit_before,
        ),
        Fault(
            name="kv-bit-flipped-after",
            # Between the forward and the stamping nothing could tell: the record is made of the bytes that are there.
            summary="A bit of KV changes right after the forward wrote it and its record was stamped.",
            shows_as=_REAL_KV,
            damage=_flip_kv_bit_after,
            is_after_step=True,
        ),
        Fault(
            name="record-lost",
            summary="A slot's KV was moved without its record.",
            shows_as=_CHAIN | _POSITION | _REAL_KV | _TOKEN,
            damage=_lose_record,
        ),
        Fault(
            name="token-swapped",
            summary="Two requests' input tokens are exchanged before the forward. KV and records agree with each "
            "other: only expected tokens tell.",
            shows_as=_TOKEN,
            damage=_swap_tokens,
        ),
        Fault(
            name="rows-exchanged",
            summary="Two requests read each other's cache, which is consistent in itself: only expected tokens tell.",
            shows_as=_TOKEN,
            damage=_exchange_rows,
        ),
        Fault(
            name="transfer-never-landed",
            summary="A page that was to come from the host or another machine never arrived: its memory is still zero.",
            shows_as=_CHAIN | _POSITION | _TOKEN,
            damage=_lose_transfer,
        ),
        Fault(
            name="page-boundary-off-by-one",
            summary="From a page boundary on, entries of the page table lead to the slot of the token before.",
            shows_as=_CHAIN | _POSITION | _TOKEN,
            damage=_shift_page,
        ),
        Fault(
            name="stale-mapping",
            summary="The mapping to the sliding-window pool still leads to another page.",
            shows_as=_CHAIN | _POSITION | _TOKEN,
            damage=_leave_mapping_stale,
            needs_window=True,
        ),
        Fault(
            name="late-write",
            summary="A finished request goes on writing into slots that were given to another.",
            shows_as=_CHAIN | _POSITION | _TOKEN,
            damage=_write_late,
        ),
    )
}
"""Every fault by name."""
