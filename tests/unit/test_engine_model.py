"""The simulated engine: what it writes into the page table is what a correct engine would."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kvcanary.engine_model import BATCH_MULTIPLE, EngineConfig, EngineModel
from cupy_kvcanary.traces import BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cupy_kvcanary.engine_model import Step


class KvContent:
    """What a real engine's KV would hold: every step writes its tokens and then reads what each request attends to.

    A token is told by its position and by the block that it belongs to; beyond a prompt's whole blocks every request's
    tokens are its own.
    """

    def __init__(self, requests: list[TraceRequest], engine: EngineModel) -> None:
        self.engine = engine
        self.requests = requests
        slots = (engine.pool.num_pages + 1) * engine.config.page_size
        self.full = np.full((slots, 2), -1)
        self.window = np.full((slots, 2), -1)

    def tokens(self, row: int, end: int) -> NDArray[np.int64]:
        """[end, 2]: identity and position of the row's first tokens."""
        index = int(self.engine.request_of_row[row])
        request = self.requests[index]
        whole = request.block_ids[: request.input_length // BLOCK_TOKENS]
        shared = np.repeat(np.array(whole, np.int64), BLOCK_TOKENS)[:end]
        identity = np.concatenate([shared, np.full(end - shared.size, -2 - index)])
        return np.stack([identity, np.arange(end)], axis=1)

    def run(self, step: Step) -> None:
        batch = [
            (int(step.req_pool_indices[i]), int(step.prefix_lens[i]), int(step.extend_seq_lens[i]))
            for i in range(step.num_requests)
        ]
        mapping = step.full_to_swa_index_mapping
        for row, prefix, extend in batch:
            slots = step.req_to_token[row, prefix : prefix + extend]
            assert slots.all(), "the padding slot is never written"
            self.full[slots] = self.tokens(row, prefix + extend)[prefix:]
            if mapping is not None:
                assert mapping[slots].all()
                self.window[mapping[slots]] = self.tokens(row, prefix + extend)[prefix:]
        for row, prefix, extend in batch:
            end = prefix + extend
            slots, expected = step.req_to_token[row, :end], self.tokens(row, end)
            np.testing.assert_array_equal(self.full[slots], expected)
            if mapping is not None:
                start = max(prefix - self.engine.config.window, 0)
                np.testing.assert_array_equal(self.window[mapping[slots[start:]]], expected[start:])


def check_batch_and_pool(engine: EngineModel, step: Step) -> None:
    page_size = engine.config.page_size
    rows = step.req_pool_indices[: step.num_requests].tolist()
    assert len(set(rows)) == len(rows) <= engine.config.max_running
    assert 0 not in rows, "row 0 is the padding row"
    assert step.bs == -(-len(rows) // BATCH_MULTIPLE) * BATCH_MULTIPLE
    assert not step.req_pool_indices[step.num_requests : step.bs].any()
    extends = step.extend_seq_lens[: step.num_requests]
    assert extends.min() >= 1
    assert extends.sum() <= engine.config.chunk + step.num_requests

    owners: Counter[int] = Counter()
    for i, row in enumerate(rows):
        used = int(step.prefix_lens[i] + step.extend_seq_lens[i])
        slots = step.req_to_token[row, :used]
        pages = slots // page_size
        np.testing.assert_array_equal(slots % page_size, np.arange(used) % page_size)
        owners.update(pages[::page_size].tolist())
    assert 0 not in owners, "page 0 holds the padding slot"
    shared = {page for page, count in owners.items() if count > 1}
    assert shared <= {page for pages in engine.pool.blocks.values() for page in pages.tolist()}
    assert len(owners) == engine.pool.live_pages
    assert engine.pool.live_pages + engine.pool.cached_pages + engine.pool.free_pages == engine.pool.num_pages


def play(requests: list[TraceRequest], **config: Any) -> Iterator[tuple[EngineModel, Step]]:
    engine = EngineModel(requests, EngineConfig(**config))
    content = KvContent(requests, engine)
    for step in engine.steps():
        check_batch_and_pool(engine, step)
        content.run(step)
        yield engine, step
    assert engine.finished == len(requests)
    assert engine.pool.live_pages == 0


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """A few requests whose prompts branch off a common tree of blocks."""
    ids: dict[tuple[int, ...], int] = {}
    requests, arrival = [], 0.0
    for _ in range(draw(st.integers(3, 8))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.05, 5.0]))
        path = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=4))
        length = (len(path) - 1) * BLOCK_TOKENS + draw(st.sampled_from([100, 1, BLOCK_TOKENS]))
        block_ids = tuple(ids.setdefault(tuple(path[: n + 1]), len(ids)) for n in range(len(path)))
        requests.append(TraceRequest(arrival, length, draw(st.sampled_from([200, 40, 1, 0])), block_ids))
    return requests


@settings(max_examples=60, deadline=None)
@given(
    requests=traces(),
    page_size=st.sampled_from([4, 64, 512]),
    chunk=st.sampled_from([100, 700, 4096]),
    max_running=st.sampled_from([5, 3, 1]),
    window=st.sampled_from([0, 1, 100, 700]),
    spare_pages=st.integers(0, 6),
)
def test_every_slot_holds_what_its_request_wrote(
    requests: list[TraceRequest], page_size: int, chunk: int, max_running: int, window: int, spare_pages: int
) -> None:
    """With a pool that barely holds the longest request: sharing, eviction, preemption and recycling all happen."""
    longest = max(r.input_length + r.output_length for r in requests)
    pages = -(-longest // page_size) + spare_pages
    sizes: dict[str, Any] = {"pool_slots": pages * page_size, "page_size": page_size, "chunk": chunk, "window": window}
    if window:
        window_pages = EngineConfig(**sizes).window_pages_of(longest) + spare_pages
        sizes["window_pool_slots"] = window_pages * page_size
    for _ in play(requests, max_running=max_running, **sizes):
        pass


def test_prompts_are_prefilled_in_chunks_and_answers_decoded_one_token_a_step() -> None:
    """The first token comes from the prefill, and the last one is never fed back: 3 tokens take two decode steps."""
    requests = [TraceRequest(0.0, 150, 3), TraceRequest(0.0, 80, 1)]
    batches = [
        list(zip(step.prefix_lens[: step.num_requests], step.extend_seq_lens[: step.num_requests], strict=True))
        for _, step in play(requests, pool_slots=512, chunk=100)
    ]
    assert batches == [[(0, 100)], [(100, 50), (0, 50)], [(150, 1), (50, 30)], [(151, 1)]]


def test_idle_time_is_skipped() -> None:
    requests = [TraceRequest(0.0, 10, 2), TraceRequest(100.0, 10, 2)]
    assert [step.time_s for _, step in play(requests, pool_slots=64, speedup=10.0)] == [0.0, 0.03, 10.0, 10.03]


def test_equal_block_ids_read_the_same_slots_and_rows_and_slots_are_reused() -> None:
    prefix = 2 * BLOCK_TOKENS
    requests = [
        TraceRequest(0.0, prefix + 10, 5, (1, 2, 3)),
        TraceRequest(0.1, prefix + 20, 2, (1, 2, 4)),
        TraceRequest(9.0, prefix + 20, 2, (1, 2, 4)),
        TraceRequest(9.9, 30, 2),
    ]
    tables: list[NDArray[np.int32]] = []
    starts, rows = [], []
    for engine, step in play(requests, pool_slots=4096):
        for i in range(step.num_requests):
            row = int(step.req_pool_indices[i])
            if engine.request_of_row[row] == len(tables):  # its first step
                tables.append(step.req_to_token[row].copy())
                starts.append(int(step.prefix_lens[i]))
                rows.append(row)
    assert starts == [0, prefix, prefix, 0]
    for table in tables[1:3]:
        np.testing.assert_array_equal(table[:prefix], tables[0][:prefix])
    assert tables[1][prefix] != tables[0][prefix]
    assert rows[3] in rows[:3]
    assert tables[3][0] in np.concatenate(tables[:3])


def test_a_full_pool_evicts_cached_blocks_the_deepest_of_the_oldest_first() -> None:
    requests = [
        TraceRequest(0.0, 2 * BLOCK_TOKENS + 1, 1, (1, 2, 9)),
        TraceRequest(1.0, 2 * BLOCK_TOKENS + 1, 1, (3, 4, 8)),
        TraceRequest(2.0, BLOCK_TOKENS, 1),
    ]
    cached = {}
    for engine, step in play(requests, pool_slots=4 * BLOCK_TOKENS + 64):
        cached[step.number] = set(engine.pool.blocks)
    assert cached[2] == {1, 3, 4}
    assert engine.pool.evicted_blocks == 1


def test_the_last_admitted_request_is_preempted_and_prefills_again_with_its_tokens() -> None:
    requests = [TraceRequest(0.0, 60, 40), TraceRequest(0.0, 60, 20)]
    seen = [
        (engine.preempted, step.num_requests, int(step.extend_seq_lens[step.num_requests - 1]))
        for engine, step in play(requests, pool_slots=9 * 16)
    ]
    preempted_at = next(i for i, (preempted, _, _) in enumerate(seen) if preempted)
    assert seen[preempted_at - 1][1] == 2
    assert seen[preempted_at][1] == 1
    generated = preempted_at  # one token a step, the first one in step 0
    readmitted = next(extend for preempted, _, extend in seen[preempted_at:] if extend > 1)
    assert readmitted == 60 + generated


def test_slots_behind_the_window_map_to_the_padding_slot() -> None:
    window, page_size = 40, 16
    requests = [TraceRequest(0.0, 100, 30)]
    for engine, step in play(requests, pool_slots=256, window=window, window_pool_slots=256, page_size=page_size):
        assert step.full_to_swa_index_mapping is not None
        prefix = int(step.prefix_lens[0])
        mapped = step.full_to_swa_index_mapping[step.req_to_token[step.req_pool_indices[0]]]
        behind = max(prefix - window, 0) // page_size * page_size  # whole pages
        assert not mapped[:behind].any()
        inside = mapped[behind : prefix + step.extend_seq_lens[0]]
        assert inside.all()
        assert len(set(inside.tolist())) == inside.size
        assert engine.pool.window is not None
        held = engine.pool.window.num_pages - engine.pool.window.free.count
        assert held == -(-inside.size // page_size)


def test_changed_pages_are_enough_to_keep_a_mirror() -> None:
    """What a GPU copy of page table and mapping relies on."""
    requests = [TraceRequest(0.02 * i, 100 + 100 * i, 30) for i in range(8)]
    tables = mappings = None
    for engine, step in play(requests, pool_slots=2048, window=64, window_pool_slots=1024, max_running=4, chunk=256):
        assert step.full_to_swa_index_mapping is not None
        table, mapping = step.req_to_token.reshape(-1, 16), step.full_to_swa_index_mapping.reshape(-1, 16)
        if tables is None or mappings is None:
            tables, mappings = np.zeros_like(table), np.zeros_like(mapping)
        for mirror, source, changed in (
            (tables, table, engine.changed_table_pages()),
            (mappings, mapping, engine.changed_mapping_pages()),
        ):
            mirror[changed] = source[changed]
            np.testing.assert_array_equal(mirror, source)


def test_lengths_of_padding_requests_start_as_bad_as_they_get() -> None:
    _, step = next(play([TraceRequest(0.0, 10, 2)], pool_slots=64))
    assert step.bs == BATCH_MULTIPLE
    assert step.prefix_lens[1 : step.bs].max() < 0
    assert step.extend_seq_lens[1 : step.bs].min() > 2**60


@pytest.mark.parametrize("window", [0, 64])
def test_a_prompt_is_not_shared_beyond_its_last_token(window: int) -> None:
    """A prompt that is cached whole still computes one block: the first answer token comes from its last token."""
    request = TraceRequest(0.0, 2 * BLOCK_TOKENS, 1, (1, 2))
    again = TraceRequest(1.0, 2 * BLOCK_TOKENS, 1, (1, 2))
    steps = play([request, again], pool_slots=4096, window=window, window_pool_slots=4096)
    assert [(int(step.prefix_lens[0]), int(step.extend_seq_lens[0])) for _, step in steps][-1] == (512, 512)
