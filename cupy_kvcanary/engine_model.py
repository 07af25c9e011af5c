"""A simulated serving engine: continuous batching with chunked prefill over a paged slot pool.

It moves no KV. It keeps the page table that an engine keeps, step by step, with everything that makes one go wrong:
shared prefixes, recycled rows and slots, eviction, preemption, padding and sliding windows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .catalogue import error
from .constants import REQ_POOL_IDX_PADDING
from .page_pool import PagePool, WindowPool
from .traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .traces import TraceRequest

BATCH_MULTIPLE = 8
"""Batches are padded to a multiple of this with request row 0, as engines do that replay CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine is given. Lengths in tokens; one slot holds one token."""

    pool_slots: int
    """Slots for KV, in whole pages, besides the padding page 0."""
    max_running: int = 512
    """Requests in a batch; the page table has one row more, the padding row 0."""
    page_size: int = 16
    """Slots of a page; divides the 512 tokens of a prefix block."""
    chunk: int = 4096
    """Prompt tokens that are prefilled a step, over all requests together."""
    step_s: float = 0.03
    """Seconds that a step takes on the trace's clock."""
    speedup: float = 1.0
    """Arrivals come this many times faster than in the trace."""
    window: int = 0
    """Sliding window; 0 for none."""
    window_pool_slots: int = 0
    """Slots of the sliding-window pool, in whole pages, besides its page 0."""

    def window_pages_of(self, tokens: int) -> int:
        """Window pages that a request of so many tokens may hold at once: its window, a chunk, and a block's rest."""
        most = (self.window + self.chunk) // self.page_size + BLOCK_TOKENS // self.page_size + 2
        return min(-(-tokens // self.page_size), most)


class Step(NamedTuple):
    """What one step of the engine runs on: static buffers that hold until the next step is asked for."""

    number: int
    time_s: float
    """When the step begins, on the trace's clock divided by the speed-up."""
    num_requests: int
    """Real requests; they come first in the batch, in the order of their admission."""
    bs: int
    """Batch with padding. Buffers beyond it, and lengths of padding requests, hold whatever was left there."""
    req_pool_indices: NDArray[np.int64]
    """int64[capacity]."""
    prefix_lens: NDArray[np.int64]
    """int64[capacity]: tokens whose KV is in the pool."""
    extend_seq_lens: NDArray[np.int64]
    """int64[capacity]: tokens whose KV this step writes."""
    req_to_token: NDArray[np.int32]
    """int32[max_running + 1, max_seq_len]: slot of each row and position."""
    full_to_swa_index_mapping: NDArray[np.int64] | None
    """int64[pool slots + 1 page]: window slot of each slot, 0 where the window slid past it; None without a window."""


class EngineModel:
    """Plays requests (in order of arrival) through a simulated engine; `steps()` does it, once.

    A step decodes one token of every request whose prompt is done and spends the chunk budget on prompts, first come
    first served: at most the last request of the batch is left half prefilled. A request is admitted when its whole
    prompt fits with a page to spare for every running request. When a running request finds no page, the last admitted
    one is preempted: it loses its pages and later prefills again, with what it had generated.
    """

    def __init__(self, requests: Sequence[TraceRequest], config: EngineConfig) -> None:
        self.config = config
        self.requests = requests
        self.finished = 0
        self.preempted = 0
        self.prompt_tokens = 0
        """Tokens of admitted prompts."""
        self.shared_tokens = 0
        """Those of them that were found in the cache."""
        # KV at the end: the last generated token is never fed back.
        self._goals = [r.input_length + max(r.output_length, 1) - 1 for r in requests]
        self._prefill_lens = [r.input_length for r in requests]  # grows when a preempted request has generated tokens
        page_size = config.page_size
        self._columns = -(-max(self._goals) // page_size)  # pages of a row
        self.pool = self._make_pool()

        rows = config.max_running + 1
        capacity = -(-config.max_running // BATCH_MULTIPLE) * BATCH_MULTIPLE
        self.req_to_token = np.zeros((rows, self._columns * page_size), np.int32)
        # Padding requests keep stale lengths; the first ones are as bad as they get.
        self.batch = np.repeat(np.array([[REQ_POOL_IDX_PADDING], [-(2**62)], [2**62]]), capacity, axis=1)
        """int64[3, capacity]: the step's `req_pool_indices`, `prefix_lens` and `extend_seq_lens`."""
        self.req_pool_indices, self.prefix_lens, self.extend_seq_lens = self.batch
        self._table_pages = self.req_to_token.reshape(-1, page_size)
        self._within = np.arange(page_size)
        self._changed_table_pages: list[NDArray[np.int64]] = []

        self.request_of_row = np.full(rows, -1)
        """int64[max_running + 1]: index of the request that holds each row, or held it last."""
        self._kv_lens = np.zeros(rows, np.int64)
        self._goal_of_row = np.zeros(rows, np.int64)
        self._num_pages = np.zeros(rows, np.int64)
        self._window_starts = np.zeros(rows, np.int64)  # first page of the row that still has a window page
        self._free_rows = list(range(rows - 1, 0, -1))
        self._running = np.zeros(config.max_running, np.int64)
        self._num_running = 0
        self._half_prefilled = False  # whether the last running request has prompt left
        self._prefilled: list[tuple[int, int, int]] = []  # this step's prompt parts: row, first token, end
        self._queue: deque[int] = deque()
        self._next_arrival = 0

    def steps(self) -> Iterator[Step]:
        """Every step until the last request is done. Idle time is skipped."""
        mapping = self.pool.window.mapping if self.pool.window is not None else None
        number, now = 0, 0.0
        while True:
            self._accept_arrivals(now)
            if not self._num_running and not self._queue:
                if self._next_arrival == len(self.requests):
                    return
                now = self._arrival_s(self._next_arrival)
                continue
            bs = self._schedule()
            yield Step(
                number,
                now,
                self._num_running,
                bs,
                self.req_pool_indices,
                self.prefix_lens,
                self.extend_seq_lens,
                self.req_to_token,
                mapping,
            )
            self._complete()
            number += 1
            now += self.config.step_s

    def changed_table_pages(self) -> NDArray[np.int64]:
        """Pages of `req_to_token`, flattened to [rows * pages of a row, page_size], written since the last step."""
        return np.concatenate([np.zeros(0, np.int64), *self._changed_table_pages])

    def changed_mapping_pages(self) -> NDArray[np.int64]:
        """Pages of the mapping, reshaped to [pages, page_size], written since the last step."""
        changed = self.pool.window.changed if self.pool.window is not None else []
        return np.concatenate([np.zeros(0, np.int64), *changed])

    def freed_slots(self) -> NDArray[np.int64]:
        """Slots of pages that became free since the last step; the step may have given them to others already."""
        return self._slots_of(self.pool.free.freed)

    def freed_window_slots(self) -> NDArray[np.int64]:
        """Likewise of the sliding-window pool."""
        return self._slots_of(self.pool.window.free.freed if self.pool.window is not None else [])

    def steps_left(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Decode steps that these rows' requests run behind the current step, unless they are preempted."""
        prefill_lens = np.array(self._prefill_lens)[self.request_of_row[rows]]
        left: NDArray[np.int64] = self._goal_of_row[rows] - np.maximum(self._kv_lens[rows] + 1, prefill_lens)
        return left

    def page_owners(self) -> NDArray[np.int32]:
        """int32[pages]: row of a running request that has each page, of one of them where several do; -1: none."""
        owners = np.full(self.pool.num_pages + 1, -1, np.int32)
        for row in self._running[: self._num_running].tolist():
            owners[self._pages_of(row, 0, int(self._num_pages[row]))] = row
        return owners

    def _slots_of(self, pages: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        first_slots = np.concatenate([np.zeros(0, np.int64), *pages]) * self.config.page_size
        return (first_slots[:, None] + self._within).reshape(-1)

    def _make_pool(self) -> PagePool:
        config, longest = self.config, max(self._goals)
        page_size = config.page_size
        if BLOCK_TOKENS % page_size:
            raise error("kv-canary-must-divide", name="page_size", whole=BLOCK_TOKENS, got=page_size)
        needed = {"pool_slots": self._columns * page_size}
        if config.window:
            needed["window_pool_slots"] = config.window_pages_of(longest) * page_size
        for name, least in needed.items():
            got = getattr(config, name)
            if got < least:
                raise error("kv-canary-pool-must-hold-the-longest-request", name=name, least=least, got=got)
        num_pages = config.pool_slots // page_size
        window = WindowPool(num_pages, config.window_pool_slots // page_size, page_size) if config.window else None
        return PagePool(num_pages, page_size, window)

    def _accept_arrivals(self, now: float) -> None:
        while self._next_arrival < len(self.requests) and self._arrival_s(self._next_arrival) <= now:
            self._queue.append(self._next_arrival)
            self._next_arrival += 1

    def _arrival_s(self, request: int) -> float:
        return self.requests[request].arrival_s / self.config.speedup

    def _schedule(self) -> int:
        """Choose the batch, give it pages and fill the buffers; its size with padding."""
        self._allocate_for_decode()
        self._allocate_for_prefill()
        count = self._num_running
        rows = self._running[:count]
        bs = -(-count // BATCH_MULTIPLE) * BATCH_MULTIPLE
        self.req_pool_indices[:count] = rows
        self.req_pool_indices[count:bs] = REQ_POOL_IDX_PADDING
        self.prefix_lens[:count] = self._kv_lens[rows]
        self.extend_seq_lens[:count] = 1
        first_prefilled = count - len(self._prefilled)
        for index, (_, start, end) in enumerate(self._prefilled, first_prefilled):
            self.extend_seq_lens[index] = end - start
        return bs

    def _allocate_for_decode(self) -> None:
        """A page for every decoding request whose last one is full."""
        while True:
            rows = self._running[: self._num_running - self._half_prefilled]
            full = rows[self._kv_lens[rows] == self._num_pages[rows] * self.config.page_size]
            if self.pool.can_allocate(full.size):
                break
            self._preempt_last()
        if full.size:
            self._append_pages(full, self.pool.allocate(full.size))

    def _allocate_for_prefill(self) -> None:
        """Spend the step's chunk on the half prefilled request, then on waiting ones."""
        budget = self.config.chunk
        while budget and (self._half_prefilled or self._admit()):
            row = int(self._running[self._num_running - 1])
            start = int(self._kv_lens[row])
            rest = self._prefill_lens[self.request_of_row[row]] - start
            end = start + min(rest, budget)
            new_pages = -(-end // self.config.page_size) - int(self._num_pages[row])
            if not self.pool.can_allocate(new_pages):  # decoding requests took what was free at its admission
                self._preempt_last()
                return
            self._append_pages(np.full(new_pages, row), self.pool.allocate(new_pages))
            self._prefilled.append((row, start, end))
            self._half_prefilled = end - start < rest
            budget -= end - start

    def _admit(self) -> bool:
        """Move the request that waits longest into the batch, with the part of its prompt that is cached."""
        if not self._queue or not self._free_rows:
            return False
        config, pool, page_size = self.config, self.pool, self.config.page_size
        request, tokens = self.requests[self._queue[0]], self._prefill_lens[self._queue[0]]
        # Whole blocks only, and never the last token: something must be left to compute the next one from.
        sharable = min(request.input_length, tokens - 1) // BLOCK_TOKENS
        shared = request.block_ids[: pool.find_prefix(request.block_ids[:sharable])]
        shared = shared[: self._num_blocks_with_window(shared)]
        shared_len = len(shared) * BLOCK_TOKENS
        new_pages = -(-tokens // page_size) - shared_len // page_size
        if pool.available - pool.idle_pages_of(shared) < new_pages + self._num_running:
            return False
        window = pool.window
        if window is not None and window.available < config.window_pages_of(tokens) + self._num_running:
            return False

        row = self._free_rows.pop()
        self.request_of_row[row] = self._queue.popleft()
        self._goal_of_row[row] = self._goals[self.request_of_row[row]]
        self._kv_lens[row] = shared_len
        self._num_pages[row] = 0
        self._window_starts[row] = max(shared_len - config.window, 0) // page_size
        pages = pool.share(shared)
        if window is not None and shared:
            start = int(self._window_starts[row])
            window.enter(pages[start:], list(shared[start * page_size // BLOCK_TOKENS :]))
        self._append_pages(np.full(pages.size, row), pages)
        self._running[self._num_running] = row
        self._num_running += 1
        self._half_prefilled = True
        self.prompt_tokens += tokens
        self.shared_tokens += shared_len
        return True

    def _num_blocks_with_window(self, block_ids: tuple[int, ...]) -> int:
        """The most of these cached blocks that can be shared: the window before their end must be there, too."""
        if self.pool.window is None or not block_ids:
            return len(block_ids)
        page_size = self.config.page_size
        held = self.pool.window.holds(np.concatenate([self.pool.blocks[block_id] for block_id in block_ids]))
        last_missing = np.maximum.accumulate(np.where(held, -1, np.arange(held.size)))
        ends = np.arange(1, len(block_ids) + 1) * BLOCK_TOKENS
        starts = np.maximum(ends - self.config.window, 0) // page_size
        usable = np.flatnonzero(last_missing[ends // page_size - 1] < starts)
        return int(usable[-1]) + 1 if usable.size else 0

    def _append_pages(self, rows: NDArray[np.int64], pages: NDArray[np.int64]) -> None:
        """Enter pages into the table after those that the rows have: one row many times, or many rows once."""
        if not pages.size:
            return
        one_row = rows.size > 1 and rows[0] == rows[1]
        table_pages = rows * self._columns + self._num_pages[rows] + (np.arange(rows.size) if one_row else 0)
        self._table_pages[table_pages] = pages[:, None] * self.config.page_size + self._within
        self._num_pages[rows] += rows.size if one_row else 1
        self._changed_table_pages.append(table_pages)

    def _pages_of(self, row: int, start: int, end: int) -> NDArray[np.int64]:
        """Pages [start, end) of a row."""
        first_slots = self._table_pages[row * self._columns + start : row * self._columns + end, 0]
        return first_slots.astype(np.int64) // self.config.page_size

    def _complete(self) -> None:
        """The step ran: its tokens are in the pool."""
        self._changed_table_pages.clear()
        self.pool.free.freed.clear()
        if self.pool.window is not None:
            self.pool.window.changed.clear()
            self.pool.window.free.freed.clear()
        count = self._num_running
        rows = self._running[:count]
        self._kv_lens[rows] += self.extend_seq_lens[:count]
        self._publish_blocks()
        if self.config.window:
            self._slide_windows(rows)
        done = self._kv_lens[rows] >= self._goal_of_row[rows]
        if done.any():
            for row in rows[done].tolist():
                self._release(row)
            self.finished += int(done.sum())
            staying = rows[~done]
            self._running[: staying.size] = staying
            self._num_running = staying.size

    def _publish_blocks(self) -> None:
        """Whole prompt blocks that this step completed become shareable."""
        pages_per_block = BLOCK_TOKENS // self.config.page_size
        for row, start, end in self._prefilled:
            request = self.requests[self.request_of_row[row]]
            if request.block_ids:
                for block in range(start // BLOCK_TOKENS, min(end, request.input_length) // BLOCK_TOKENS):
                    pages = self._pages_of(row, block * pages_per_block, (block + 1) * pages_per_block)
                    self.pool.publish(request.block_ids[block], pages)
        self._prefilled.clear()

    def _slide_windows(self, rows: NDArray[np.int64]) -> None:
        starts = np.maximum(self._kv_lens[rows] - self.config.window, 0) // self.config.page_size
        for index in np.flatnonzero(starts > self._window_starts[rows]).tolist():
            row, start = int(rows[index]), int(starts[index])
            self.pool.leave_window(self._pages_of(row, int(self._window_starts[row]), start))
            self._window_starts[row] = start

    def _release(self, row: int) -> None:
        """Give back a row and its pages. The table keeps the stale slots, as an engine's does."""
        pages = self._pages_of(row, 0, int(self._num_pages[row]))
        self.pool.leave_window(pages[self._window_starts[row] :])
        self.pool.release(pages)
        self._free_rows.append(row)

    def _preempt_last(self) -> None:
        """Take the last admitted request out of the batch and put it at the head of the queue."""
        row = int(self._running[self._num_running - 1])
        request, kv_len = int(self.request_of_row[row]), int(self._kv_lens[row])
        if kv_len >= self._prefill_lens[request]:
            self._prefill_lens[request] = kv_len + 1  # with the token that was generated but not yet fed back
        self._release(row)
        self._queue.appendleft(request)
        self._num_running -= 1
        self._half_prefilled = False
        self.preempted += 1
