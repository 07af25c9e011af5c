"""Violations of a canary as people need them, decoded from the rows that the kernels write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .constants import FREED_POSITION, FREED_TOKEN, CanaryLaunchTag, FailReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Launch = Literal["verify", "write", "sweep"]
Part = Literal["K", "V"]
End = Literal["head", "tail", "sweep"]
Group = Literal["full", "swa"]

_UINT64 = 2**64 - 1
_UNREAD = FailReason.VERIFY_SLOT_OUT_OF_RANGE | FailReason.PAGE_TABLE_HOLE
_WRITE = FailReason.WRITE_TOKEN | FailReason.WRITE_POSITION | FailReason.WRITE_SLOT_OUT_OF_RANGE


class Record(NamedTuple):
    """Fields of a record, or what was expected of them; None where it is not known."""

    token: int | None = None
    position: int | None = None
    prev_hash: int | None = None
    """Hash of the chain before it, unsigned."""
    real_kv_hash: int | None = None
    """Hash of the slot's KV bytes, unsigned."""

    @property
    def is_blank(self) -> bool:
        """All zero: never stamped, or zeroed."""
        return (self.token, self.position, self.prev_hash) == (0, 0, 0) and not self.real_kv_hash

    @property
    def is_tombstone(self) -> bool:
        """What stands in a slot that was freed."""
        return (self.token, self.position) == (FREED_TOKEN, FREED_POSITION)


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One slot of one canary buffer that is not as it must be."""

    tag: CanaryLaunchTag | int
    """The buffer; a plain number where it is no known tag."""
    reasons: FailReason
    """Bits that are not known are kept."""
    step: int
    slot: int
    """Where the seed of a write is out of range, the seed."""
    page_size: int
    stored: Record | None
    """The slot's record; for writes what was to be stored. None where the slot was not read."""
    expected: Record
    """What it should have been. `real_kv_hash` is that of the slot's bytes when they were verified."""
    request: int | None = None
    """Index in the batch."""
    request_row: int | None = None
    """Row of the page table."""
    prev_slot: int | None = None
    """Slot of the position before, by the page table; for writes the seed."""
    prev_record: Record | None = None
    next_slot: int | None = None
    """Slot of the position behind."""
    next_record: Record | None = None

    @property
    def position(self) -> int | None:
        """The expected position: where in its request the slot is read or written."""
        return self.expected.position

    @property
    def page(self) -> int:
        """Page of the slot."""
        return self.slot // self.page_size

    @property
    def launch(self) -> Launch:
        """What found it: the verify or the write of a step, or the sweep."""
        if self.end == "sweep":
            return "sweep"
        # A verify that finds the predecessor out of range has read the slot itself.
        is_seed = self.reasons == FailReason.PREDECESSOR_OUT_OF_RANGE and self.stored is None
        return "write" if self.reasons & _WRITE or is_seed else "verify"

    @property
    def part(self) -> Part | None:
        """Which half of the KV cache; None where the tag is not known."""
        if not isinstance(self.tag, CanaryLaunchTag):
            return None
        return "K" if "_K_" in self.tag.name else "V"

    @property
    def end(self) -> End | None:
        """Which end of the layers; the sweep has buffers of its own."""
        if not isinstance(self.tag, CanaryLaunchTag):
            return None
        ends: dict[str, End] = {"HEAD": "head", "TAIL": "tail", "SWEEP": "sweep"}
        return ends[self.tag.name.split("_")[0]]

    @property
    def group(self) -> Group | None:
        """The pool of full attention or of the sliding window."""
        if not isinstance(self.tag, CanaryLaunchTag):
            return None
        return "full" if self.tag.name.endswith("FULL") else "swa"

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as JSON has them; hashes are hexadecimal strings."""
        return {
            "tag": self.tag.name if isinstance(self.tag, CanaryLaunchTag) else self.tag,
            "launch": self.launch,
            "group": self.group,
            "part": self.part,
            "end": self.end,
            "reasons": reason_names(self.reasons),
            "position": self.position,
            "page": self.page,
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: _record_dict(getattr(self, name)) for name in _RECORDS},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Violation:
        """The violation that `to_dict` was called on."""
        tag = values["tag"]
        return cls(
            tag=CanaryLaunchTag[tag] if isinstance(tag, str) else tag,
            reasons=FailReason(sum(map(_reason_of, values["reasons"]))),
            **{name: values[name] for name in _NUMBERS},
            **{name: _record_of(values[name]) for name in _RECORDS},
        )


_NUMBERS = ("step", "request", "request_row", "slot", "page_size", "prev_slot", "next_slot")
_RECORDS = ("stored", "expected", "prev_record", "next_record")


def _record_dict(record: Record | None) -> dict[str, Any] | None:
    if record is None:
        return None
    hashes = {"prev_hash": hash_text(record.prev_hash), "real_kv_hash": hash_text(record.real_kv_hash)}
    return {"token": record.token, "position": record.position, **hashes}


def _record_of(values: Mapping[str, Any] | None) -> Any:
    if values is None:
        return None
    hashes = (values["prev_hash"], values["real_kv_hash"])
    return Record(values["token"], values["position"], *(None if text is None else int(text, 16) for text in hashes))


def _reason_of(name: str) -> int:
    return int(name, 16) if name.startswith("0x") else FailReason[name]


def decode(rows: NDArray[Any], details: NDArray[Any] | None, *, step: int, page_size: int) -> tuple[Violation, ...]:
    """Violations of a ring's rows.

    Parameters
    ----------
    rows : int64 [n, 8], rows of a violation ring.
    details : int64 [n, 13], their details, or None: what stands there is then None in the violations.
    step : the step that they were found in.
    page_size : slots of a page.

    """
    extras = [None] * len(rows) if details is None else details.tolist()
    return tuple(_decode(row, extra, step, page_size) for row, extra in zip(rows.tolist(), extras, strict=True))


def tag_of(number: int) -> CanaryLaunchTag | int:
    """The tag, or the number itself where there is none."""
    return CanaryLaunchTag(number) if number in CanaryLaunchTag._value2member_map_ else number


def reasons_of(bits: int) -> FailReason:
    """Any int64 as reasons; bits that are not known stay."""
    return FailReason(bits & _UINT64)


def tag_name(tag: CanaryLaunchTag | int) -> str:
    """Such as HEAD_K_FULL, or a number."""
    return tag.name if isinstance(tag, CanaryLaunchTag) else str(tag)


def hash_text(value: int | None) -> str | None:
    """16 hexadecimal digits."""
    return None if value is None else f"{value:#018x}"


def reason_names(reasons: FailReason) -> list[str]:
    """Such as VERIFY_POSITION; what is left of the bits as one hexadecimal number."""
    known = [reason for reason in FailReason if reason in reasons]
    rest = int(reasons) & ~sum(known)
    return [*(str(reason.name) for reason in known), *([f"{rest:#x}"] if rest else [])]


def _decode(row: list[int], details: list[int] | None, step: int, page_size: int) -> Violation:
    kind, slot, *_, bits = row
    stored, expected = _records(row, details)
    return Violation(
        tag=tag_of(kind),
        reasons=reasons_of(bits),
        step=step,
        slot=slot,
        page_size=page_size,
        stored=stored,
        expected=expected,
        **({} if details is None else _neighbours(details, expected.prev_hash)),
    )


def _records(row: list[int], details: list[int] | None) -> tuple[Record | None, Record]:
    """What is stored and what is expected."""
    _, _, position, token, expected_token, stored_hash, aux, bits = row
    if bits & FailReason.WRITE_SLOT_OUT_OF_RANGE:
        return Record(token, position, stored_hash & _UINT64), Record()
    if bits & _WRITE:
        return Record(token, position, stored_hash & _UINT64), Record(expected_token, aux)
    if bits == FailReason.PREDECESSOR_OUT_OF_RANGE and not any(row[2:7]):
        return None, Record()  # the seed of a write
    expected = Record(
        None if expected_token == -1 else expected_token,
        None if details is None or details[2] == -1 else details[2],
        None if bits & FailReason.PREDECESSOR_OUT_OF_RANGE else aux & _UINT64,
    )
    if bits & _UNREAD:
        return None, expected
    if details is None:
        return Record(token, position, stored_hash & _UINT64), expected
    return (
        Record(token, position, stored_hash & _UINT64, details[11] & _UINT64),
        expected._replace(real_kv_hash=details[12] & _UINT64),
    )


def _neighbours(details: list[int], expected_hash: int | None) -> dict[str, Any]:
    """The fields of a violation that come from its details alone."""
    request, request_row, _, prev_slot, *prev, next_slot, token, position, prev_hash, _, _ = details
    # A record that was not read is all zero here. A predecessor that is all zero passes on a hash of 0; a record behind
    # that is all zero has a violation of its own.
    is_read = any(prev) or expected_hash == 0
    return {
        "request": None if request == -1 else request,
        "request_row": None if request_row == -1 else request_row,
        "prev_slot": None if prev_slot == -1 else prev_slot,
        "prev_record": Record(prev[0], prev[1], prev[2] & _UINT64) if prev_slot != -1 and is_read else None,
        "next_slot": None if next_slot == -1 else next_slot,
        "next_record": Record(token, position, prev_hash & _UINT64) if any((token, position, prev_hash)) else None,
    }
