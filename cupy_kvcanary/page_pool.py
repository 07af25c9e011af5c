"""The KV pool of a simulated engine: pages of slots, prefix blocks that stay cached, and a sliding-window pool."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from .traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Pages = NDArray[np.int64]


class FreePages:
    """A stack of free pages. Page 0 holds the padding slot and is never handed out."""

    def __init__(self, num_pages: int) -> None:
        # Low pages come first, so that a small run stays in a small part of the pool.
        self._stack = np.arange(num_pages, 0, -1)
        self.count = num_pages
        self.freed: list[Pages] = []
        """Pages that became free; whoever is told of them clears it."""

    def take(self, count: int) -> Pages:
        """The `count` pages freed last, the last one first. The caller has checked that there are so many."""
        taken = self._stack[self.count - count : self.count][::-1].copy()
        self.count -= count
        return taken

    def give(self, pages: Pages) -> None:
        """Put pages back."""
        self._stack[self.count : self.count + pages.size] = pages
        self.count += pages.size
        self.freed.append(pages)


class WindowPool:
    """The smaller pool of the sliding-window layers.

    A page of the full pool has a page here from its allocation until no request's window reaches it any more; `mapping`
    leads from the one to the other. Pages of cached prefix blocks stay until somebody needs the room.
    """

    def __init__(self, full_pages: int, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.free = FreePages(num_pages)
        self.mapping = np.zeros((full_pages + 1) * page_size, np.int64)
        """int64[full slots]: window slot of a full slot, 0 (the padding slot) where it has none."""
        self.changed: list[Pages] = []
        """Full pages whose mapping changed; whoever mirrors the mapping clears it."""
        self._by_page = self.mapping.reshape(-1, page_size)
        self._within = np.arange(page_size)
        self._page_size = page_size
        self._users = np.zeros(full_pages + 1, np.int32)
        self._idle: OrderedDict[int, Pages] = OrderedDict()  # block id -> its full pages that still have a page here
        self._idle_pages = 0

    @property
    def available(self) -> int:
        """Pages that can be had: free ones and those of idle blocks."""
        return self.free.count + self._idle_pages

    def holds(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of these full pages have a page here."""
        held: NDArray[np.bool_] = self._by_page[pages, 0] != 0
        return held

    def add(self, pages: Pages) -> None:
        """Give new full pages, which one request's window reaches, a page each."""
        while self.free.count < pages.size:
            self._unmap(self._forget_idle(next(iter(self._idle))))
        self._by_page[pages] = self.free.take(pages.size)[:, None] * self._page_size + self._within
        self._users[pages] = 1
        self.changed.append(pages)

    def enter(self, pages: Pages, block_ids: list[int]) -> None:
        """One more request's window reaches these pages, all of them pages of the cached blocks."""
        for block_id in block_ids:
            if block_id in self._idle:
                self._forget_idle(block_id)
        self._users[pages] += 1

    def leave(self, pages: Pages, block_of_page: Pages, blocks: dict[int, Pages]) -> None:
        """One request's window slid past these pages (or the request ended)."""
        self._users[pages] -= 1
        unused = pages[self._users[pages] == 0]
        owners = block_of_page[unused]
        self._unmap(unused[owners < 0])
        for block_id in dict.fromkeys(owners[owners >= 0].tolist()):
            block = blocks[block_id]
            if self._users[block[-1]] == 0:  # windows leave a block from its front: this was its last page
                self._idle[block_id] = block[self.holds(block)]
                self._idle_pages += self._idle[block_id].size

    def drop(self, block_id: int) -> None:
        """The full pool evicts this block, which no request uses."""
        if block_id in self._idle:
            self._unmap(self._forget_idle(block_id))

    def _forget_idle(self, block_id: int) -> Pages:
        pages = self._idle.pop(block_id)
        self._idle_pages -= pages.size
        return pages

    def _unmap(self, pages: Pages) -> None:
        if not pages.size:
            return
        self.free.give(self._by_page[pages, 0] // self._page_size)
        self._by_page[pages] = 0
        self.changed.append(pages)


class PagePool:
    """Pages of `page_size` slots: free, live (some request reads them) or cached (whole prefix blocks, kept for reuse).

    A prefix block is 512 tokens. Requests with equal block ids read the same pages. When pages run out, the cached
    block that was used least recently goes, of one prefix the deepest first.
    """

    def __init__(self, num_pages: int, page_size: int, window: WindowPool | None = None) -> None:
        self.num_pages = num_pages
        self.window = window
        self.evicted_blocks = 0
        self.blocks: dict[int, Pages] = {}
        """Block id -> its pages, in order."""
        self.block_of_page = np.full(num_pages + 1, -1)
        self.free = FreePages(num_pages)
        self._users = np.zeros(num_pages + 1, np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks without users, least recently used first
        self._pages_per_block = BLOCK_TOKENS // page_size

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self.free.count

    @property
    def cached_pages(self) -> int:
        """Pages of blocks that no request uses."""
        return len(self._idle) * self._pages_per_block

    @property
    def live_pages(self) -> int:
        """Pages that some request uses."""
        return self.num_pages - self.free_pages - self.cached_pages

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a request."""
        return self.free_pages + self.cached_pages

    def can_allocate(self, count: int) -> bool:
        """Whether `count` pages can be had, and as many window pages where there is a window."""
        return self.available >= count and (self.window is None or self.window.available >= count)

    def allocate(self, count: int) -> Pages:
        """`count` pages for one request each, evicting cached blocks as needed. The caller has asked `can_allocate`."""
        while self.free.count < count:
            self._evict(self._idle.popitem(last=False)[0])
        pages = self.free.take(count)
        self._users[pages] = 1
        if self.window is not None:
            self.window.add(pages)
        return pages

    def find_prefix(self, block_ids: tuple[int, ...]) -> int:
        """How many of these blocks, from the first on, are cached."""
        for count, block_id in enumerate(block_ids):
            if block_id not in self.blocks:
                return count
        return len(block_ids)

    def idle_pages_of(self, block_ids: tuple[int, ...]) -> int:
        """Pages that stop being available once these cached blocks are in use."""
        return sum(block_id in self._idle for block_id in block_ids) * self._pages_per_block

    def share(self, block_ids: tuple[int, ...]) -> Pages:
        """One more request uses these cached blocks: their pages, in order."""
        if not block_ids:
            return np.zeros(0, np.int64)
        for block_id in block_ids:
            self._idle.pop(block_id, None)
        pages = np.concatenate([self.blocks[block_id] for block_id in block_ids])
        self._users[pages] += 1
        return pages

    def publish(self, block_id: int, pages: Pages) -> None:
        """Make a block that a request just computed available to others.

        Where two requests computed the same block at the same time, the second keeps its own copy.
        """
        if block_id not in self.blocks:
            self.blocks[block_id] = pages
            self.block_of_page[pages] = block_id

    def release(self, pages: Pages) -> None:
        """One request stops using these pages. Its private ones become free, blocks without users stay cached."""
        self._users[pages] -= 1
        unused = pages[self._users[pages] == 0]
        owners = self.block_of_page[unused]
        self.free.give(unused[owners < 0])
        # The deepest block first, so that it is evicted first: a block without its prefix could not be found.
        for block_id in reversed(dict.fromkeys(owners[owners >= 0].tolist())):
            self._idle[block_id] = None

    def leave_window(self, pages: Pages) -> None:
        """One request's window slid past these pages."""
        if self.window is not None:
            self.window.leave(pages, self.block_of_page, self.blocks)

    def _evict(self, block_id: int) -> None:
        if self.window is not None:
            self.window.drop(block_id)
        pages = self.blocks.pop(block_id)
        self.block_of_page[pages] = -1
        self.free.give(pages)
        self.evicted_blocks += 1
