"""Sweeps: verify cached slots that no running request reads, a bounded slice at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .canary_config import GroupName


@dataclass(frozen=True, kw_only=True)
class SweepChunk:
    """Cached slots, as a prefix tree or an allocator knows them: arrays of one length, or lists."""

    slots: Any
    """[n], int64."""
    positions: Any
    """[n], int64: position of each slot's token."""
    prev_slots: Any
    """[n], int64: slot of the token before it; -1 at a prefix's start."""
    tokens: Any | None = None
    """[n], int64: its token; None, like -1, to expect no particular one."""
    group: GroupName | None = None
    """Whose slots they are; None for the canary's first group."""


class Sweep:
    """A sweep under way. Each due step takes a slice; the chunks are asked for one by one, when their turn comes.

    What a chunk names must stay cached until it was verified, within `len(chunk) / sweep_slice` due steps.
    """

    def __init__(self, chunks: Iterable[SweepChunk], total: int | None) -> None:
        self.verified = 0
        """Entries verified so far."""
        self.total = total
        """Entries in all, where whoever handed them over knows."""
        self.is_done = False
        self._chunks = iter(chunks)
        self._chunk: SweepChunk | None = None
        self._next = 0  # entry of the chunk

    @property
    def progress(self) -> float | None:
        """From 0 to 1; None where the total is not known."""
        if self.is_done:
            return 1.0
        return None if self.total is None else min(self.verified / max(self.total, 1), 1.0)

    def cancel(self) -> None:
        """Verify no more."""
        self.is_done = True

    def take(self, most: int) -> tuple[SweepChunk, slice] | None:
        """The next entries, at most so many; None when there are no more."""
        while not self.is_done:
            if self._chunk is None:
                self._chunk, self._next = next(self._chunks, None), 0
                if self._chunk is None:
                    self.is_done = True
                    break
            end = min(self._next + most, len(self._chunk.slots))
            if self._next < end:
                taken = self._chunk, slice(self._next, end)
                self.verified += end - self._next
                self._next = end
                return taken
            self._chunk = None
        return None

    def __repr__(self) -> str:
        of = "" if self.total is None else f" of {self.total:,}"
        return f"Sweep({self.verified:,}{of} entries verified{', done' if self.is_done else ''})"
