"""The KV of a simulated engine: token ids, KV bytes made from them, and the arrays that a step of a real engine has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .launch import BACKENDS
from .reference.records import splitmix64
from .traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from .arrays import Device
    from .engine_model import EngineModel, Step
    from .traces import TraceRequest

    Int64s = NDArray[np.int64]

VOCABULARY: Final = 2**17
LAYERS: Final = 2
TOKEN_BYTES: Final = 16
"""Bytes of a token in one layer of K or V."""

_WORDS: Final = TOKEN_BYTES // 8
# Salts keep block ids and request indices apart.
_OF_BLOCKS, _OF_REQUESTS = np.uint64(0x5851F42D4C957F2D), np.uint64(0x14057B7EF767814F)


def block_tokens(block_id: int) -> Int64s:
    """Token ids of a prompt block, [512]: equal ids give equal tokens."""
    offsets = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    return _as_tokens(splitmix64(np.array([block_id], np.uint64) ^ _OF_BLOCKS) ^ offsets)


def own_tokens(requests: Int64s, positions: Int64s) -> Int64s:
    """Token ids that no other request has in common, by request index and position: generated ones, for example."""
    return _as_tokens(splitmix64(requests.astype(np.uint64) ^ _OF_REQUESTS) ^ positions.astype(np.uint64))


def _as_tokens(numbers: NDArray[np.uint64]) -> Int64s:
    return (splitmix64(numbers) % np.uint64(VOCABULARY)).astype(np.int64)


class KvModel:
    """What steps of the engine model write and read besides their plan, on the CPU or a GPU.

    Page table and mapping are copies of the engine's, of which only changed pages are brought up to date: what a fault
    does to them stays, and does not lead the engine itself astray. The batch, its tokens and the lengths of expected
    tokens are parts of one static block, copied at once.

    Memory: 64 bytes of KV a slot (K and V of two layers), so that a pool of four million slots takes 256 MB, as much
    for a window's pool, and 8 bytes for each entry of the page table (slot and expected token).
    """

    def __init__(self, engine: EngineModel, xp: ModuleType, device: Device) -> None:
        """`xp` is NumPy or CuPy, whichever has arrays on `device`."""
        config, self._engine, self._xp = engine.config, engine, xp
        capacity, max_tokens = engine.req_pool_indices.size, config.chunk + config.max_running
        lengths = [capacity] * 4 + [max_tokens] * 3 + [1]
        self._host = np.zeros(sum(lengths), np.int64)
        self._block = xp.asarray(self._host)
        self._host_parts = _split(self._host, lengths)
        (
            self.req_pool_indices,
            self.prefix_lens,
            self.extend_seq_lens,
            self.expected_token_lens,
            self.input_ids,
            self.positions,
            self.out_cache_loc,
            bs,
        ) = _split(self._block, lengths)
        self.bs = bs.view("int32")[:1]
        """int32[1]: requests of the batch, with padding."""
        self.num_tokens = 0
        """Entries of the step in `input_ids`, `positions` and `out_cache_loc`: those of one request after another."""
        self.page_table = xp.zeros(engine.req_to_token.shape, "int32")
        self.expected_tokens = xp.zeros(engine.req_to_token.shape, "int32")
        """int32[rows, positions]: true token ids; of batch entry i, `expected_token_lens[i]` are known."""
        self._input_lens = np.array([request.input_length for request in engine.requests])
        self._tokens_of_row = np.full(engine.req_to_token.shape[0], -1)  # request whose tokens a row of it holds

        def zeros(slots: int) -> Any:
            # At a multiple of 64 bytes: real-KV sources have to be aligned.
            return BACKENDS[device.type].allocate_zeros((2, LAYERS, slots, _WORDS), "uint64", device, None)

        window = engine.pool.window
        self.num_slots = (engine.pool.num_pages + 1) * config.page_size
        self.swa_num_slots = 0 if window is None else (window.num_pages + 1) * config.page_size
        self.mapping: Any = None if window is None else xp.zeros(self.num_slots, "int64")
        self.kv = zeros(self.num_slots)
        """uint64[K and V, layers, slots, 2]."""
        self.swa_kv: Any = None if window is None else zeros(self.swa_num_slots)

    def layers(self, kv: Any, index: int) -> tuple[Any, ...]:
        """Layers of K (0) or V (1) of `kv` or `swa_kv` as an engine has them: uint8[pages, page_size, 16]."""
        shape = (-1, self._engine.config.page_size, TOKEN_BYTES)
        return tuple(layer.view("uint8").reshape(shape) for layer in kv[index])

    def load(self, step: Step) -> None:
        """Bring the step's values to where the canary and the forward read them."""
        count = step.num_requests
        engine = self._engine
        self._host[: engine.batch.size] = engine.batch.reshape(-1)
        *_, expected_lens, input_ids, positions, out_cache_loc, bs = self._host_parts
        rows, prefix_lens = step.req_pool_indices[:count], step.prefix_lens[:count]
        lens = step.extend_seq_lens[:count]
        expected_lens[:count] = prefix_lens + lens
        expected_lens[count:] = 0
        ends = np.cumsum(lens)
        self.num_tokens = total = int(ends[-1])
        positions[:total] = np.arange(total) + np.repeat(prefix_lens - (ends - lens), lens)
        row_of_entry = np.repeat(rows, lens)
        out_cache_loc[:total] = step.req_to_token[row_of_entry, positions[:total]]
        input_ids[:total] = own_tokens(engine.request_of_row[row_of_entry], positions[:total])
        for index in np.flatnonzero(prefix_lens < self._input_lens[engine.request_of_row[rows]]).tolist():
            start, end = int(prefix_lens[index]), int(prefix_lens[index] + lens[index])
            tokens = self.tokens_of(engine.request_of_row[rows[index]], start, end)
            input_ids[ends[index] - lens[index] : ends[index]] = tokens
        bs.view(np.int32)[0] = step.bs
        if self._block is not self._host:
            self._block.set(self._host)

        self._copy_pages(self.page_table, step.req_to_token, engine.changed_table_pages())
        if step.full_to_swa_index_mapping is not None:
            self._copy_pages(self.mapping, step.full_to_swa_index_mapping, engine.changed_mapping_pages())
        self._enter_expected_tokens(rows, prefix_lens, row_of_entry)

    def tokens_of(self, request: int, start: int, end: int) -> Int64s:
        """True token ids of a request's positions [start, end)."""
        asked: TraceRequest = self._engine.requests[request]
        positions = np.arange(start, end)
        tokens = own_tokens(np.full(positions.size, request), positions)
        prompt_end = min(end, asked.input_length) if asked.block_ids else 0
        for first in range(start - start % BLOCK_TOKENS, prompt_end, BLOCK_TOKENS):
            begin, stop = max(first, start), min(first + BLOCK_TOKENS, prompt_end)
            block = block_tokens(asked.block_ids[first // BLOCK_TOKENS])
            tokens[begin - start : stop - start] = block[begin - first : stop - first]
        return tokens

    def forward(self) -> None:
        """Write the KV of the step's tokens, as the model's forward pass does."""
        total = self.num_tokens
        self._write_kv(self.out_cache_loc[:total], self.input_ids[:total], self.positions[:total])

    def restore(self, row: int, length: int) -> tuple[Any, Any, Any]:
        """Undo whatever happened to a row: its table, the mapping, and the KV of its first `length` positions.

        Returns slots, positions and tokens (int64[length], on the device), for its records to be stamped again.
        """
        xp, engine = self._xp, self._engine
        window = engine.pool.window
        self.page_table[row] = xp.asarray(engine.req_to_token[row])
        if window is not None:
            self.mapping[...] = xp.asarray(window.mapping)
        slots = xp.asarray(engine.req_to_token[row, :length].astype(np.int64))
        positions = xp.arange(length)
        tokens = xp.asarray(self.tokens_of(int(engine.request_of_row[row]), 0, length))
        self._write_kv(slots, tokens, positions)
        return slots, positions, tokens

    def _write_kv(self, slots: Any, tokens: Any, positions: Any) -> None:
        """Bytes made from token, position and place: equal tokens at equal positions have equal KV."""
        xp = self._xp
        places = xp.arange(1, 2 * LAYERS * _WORDS + 1).astype("uint64").reshape(2, LAYERS, 1, _WORDS)
        seeds = splitmix64(tokens.astype("uint64") ^ (positions.astype("uint64") << np.uint64(32)))
        words = splitmix64(seeds[:, None] ^ (places << np.uint64(17)))
        self.kv[:, :, slots] = words
        if self.mapping is not None:
            self.swa_kv[:, :, self.mapping[slots]] = words

    def _enter_expected_tokens(self, rows: Int64s, prefix_lens: Int64s, row_of_entry: Int64s) -> None:
        xp, engine = self._xp, self._engine
        requests = engine.request_of_row[rows]
        for index in np.flatnonzero(self._tokens_of_row[rows] != requests).tolist():
            row, prefix = int(rows[index]), int(prefix_lens[index])  # the prefix was found in the cache
            self.expected_tokens[row, :prefix] = xp.asarray(self.tokens_of(int(requests[index]), 0, prefix))
        self._tokens_of_row[rows] = requests
        total = self.num_tokens
        self.expected_tokens[xp.asarray(row_of_entry), self.positions[:total]] = self.input_ids[:total]

    def _copy_pages(self, target: Any, source: NDArray[Any], pages: Int64s) -> None:
        # A page that changed twice stands in `pages` twice, with its final content both times: any order is right.
        if pages.size:
            page_size, xp = self._engine.config.page_size, self._xp
            values = source.reshape(-1, page_size)[pages]
            target.reshape(-1, page_size)[xp.asarray(pages)] = xp.asarray(values)


def _split(block: Any, lengths: list[int]) -> list[Any]:
    ends = np.cumsum(lengths).tolist()
    return [block[end - length : end] for end, length in zip(ends, lengths, strict=True)]
