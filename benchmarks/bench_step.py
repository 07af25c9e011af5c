"""A whole decode step: plan of the offsets, verify of the prefixes, write of the new tokens, all buffers together.

Four buffers: K and V, head and tail, each with KV bytes of its own where the real KV is hashed. By the launchers, and
as an engine does it: `canary.step` with one Batch that is given again at every step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import (
    WritePlan,
    launch_canary_verify_batch_kernel,
    launch_canary_write_kernel,
    launch_plan_offsets_kernel,
)
from cupy_kvcanary.batch import Batch
from cupy_kvcanary.canary import Canary
from cupy_kvcanary.canary_config import CanaryConfig, KvPool

from . import published
from .batches import FOUR_SOURCES, WIDE_SOURCE, DecodeBatch, Work, batch_of, logs
from .bench_verify import verify_of_each
from .case import Case, Launch, PeerLaunch, Prepared, Setup, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORK = "entries to verify"

_DECODE = Work(bs=256, prefix=4096, num_buffers=4)
_QUICK = (
    Work(bs=32, prefix=1024, num_buffers=4),
    _DECODE,
    replace(_DECODE, chain="affine"),
    replace(_DECODE, **FOUR_SOURCES),
    replace(_DECODE, chain="affine", **FOUR_SOURCES),
)
_WORKS = (
    *_QUICK,
    Work(bs=1, prefix=1, num_buffers=4),
    Work(bs=1, prefix=131072, num_buffers=4),
    Work(bs=4096, prefix=256, num_buffers=4),
    Work(bs=1048576, prefix=1, num_buffers=4, page_size=1),
    Work(bs=64, prefix=65536, num_buffers=4),
    Work(bs=64, prefix=65536, num_buffers=4, chain="affine"),
    Work(bs=32, prefix=1024, num_buffers=4, **FOUR_SOURCES),
    Work(bs=64, prefix=65536, num_buffers=4, **FOUR_SOURCES),
    Work(bs=32, prefix=1024, num_buffers=4, **WIDE_SOURCE),
    Work(bs=256, prefix=1024, num_buffers=4, **WIDE_SOURCE),
    replace(_DECODE, **WIDE_SOURCE),
    Work(bs=256, prefix=8192, num_buffers=4, window=1024),
)
_BY_CANARY = (
    Work(bs=32, prefix=1024, num_buffers=4, chain="affine"),
    replace(_DECODE, chain="affine"),
    replace(_DECODE, chain="affine", **FOUR_SOURCES),
    Work(bs=64, prefix=65536, num_buffers=4, chain="affine"),
)
_AIMS = {
    _DECODE: {"device_us": 40.0, "host_us": 15.0},
    replace(_DECODE, chain="affine"): {"device_us": 40.0, "host_us": 15.0},
    replace(_DECODE, **FOUR_SOURCES): {"device_us": 150.0},
    replace(_DECODE, chain="affine", **FOUR_SOURCES): {"device_us": 150.0},
}


class StepSetup(Setup):
    def __init__(self, work: Work) -> None:
        self.work = work
        self.batch = batch_of(work)

    def on(self, arrays: Any) -> Prepared:
        contexts = self.batch.contexts(arrays, self.work.num_buffers)
        offsets, batch = self.batch.arguments(arrays)
        batch["context"] = contexts
        plan = WritePlan(
            write_offsets=offsets["out_write_offsets"],
            write_seed_slot_indices=offsets["out_write_seed_slot_indices"],
            write_num_valid_reqs=offsets["out_write_num_valid_reqs"],
        )
        write = {"plan": plan, **_new_tokens(self.batch, arrays)}
        launches = [
            Launch(launch_plan_offsets_kernel, offsets),
            Launch(launch_canary_verify_batch_kernel, batch),
            Launch(launch_canary_write_kernel, write | {"context": contexts, "chain": self.work.chain}),
        ]
        # The new tokens' slots are the last ones.
        records = {f"new records {kind}": c.canary_buf[-self.work.bs :] for kind, c in enumerate(contexts)}
        if self.work.chain != "splitmix64":
            return prepared(launches, logs(contexts) | records)

        def for_peer() -> Sequence[PeerLaunch]:
            verify_plan, launch = self.batch.plan_for_peer(arrays, offsets, plan)
            verify = {"context": contexts, "plan": verify_plan, "check_verify_expected_token": False}
            writes = [PeerLaunch("launch_canary_write_kernel", write | {"context": c}) for c in contexts]
            return [launch, *verify_of_each(verify), *writes]

        return prepared(launches, logs(contexts) | records, for_peer)

    def expected(self) -> dict[str, Any]:
        return self.batch.expected_violations | _new_records(self.work, self.batch)


class CanarySetup(Setup):
    """The same through the session object, on clean records: reports of violations are no part of a step."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.batch = batch_of(work, is_damaged=False)

    def on(self, arrays: Any) -> Prepared:
        work, batch = self.work, self.batch
        # Twice the sources: the head buffers hash the first half of the layers, the tail buffers the second.
        layers: dict[str, Any] = {
            name: [source for _ in range(2) for source in batch.real_kv(arrays, batch.num_slots)]
            for name in ("k_layers", "v_layers")
        }
        rows, positions = batch.table.shape
        pool = KvPool(
            num_slots=batch.num_slots,
            max_reqs=rows,
            max_seq_len=positions,
            page_size=work.page_size,
            layers=range(2 * work.num_sources) if work.num_sources else None,
            device="cpu" if arrays is np else "cuda",
            **layers,
        )
        config = CanaryConfig(mode="raise", chain=work.chain, real_kv_hash="all" if work.num_sources else "none")
        canary = Canary(pool, config)
        for records in canary.records.values():
            records[...] = arrays.asarray(batch.records.view(np.uint8))
        step = Batch(
            page_table=batch.page_table(arrays),
            req_pool_indices=arrays.array(batch.rows),
            prefix_lens=arrays.array(batch.prefix_lens),
            extend_seq_lens=arrays.ones(work.bs, np.int64),
            **{name: array for name, array in _new_tokens(batch, arrays).items() if name in _OF_BATCH},
        )

        def call() -> None:
            with canary.step(step):
                pass

        written = {f"new records {kind}": records[-work.bs :] for kind, records in enumerate(canary.records.values())}
        return Prepared(call=call, bound=None, written=written)

    def expected(self) -> dict[str, Any]:
        return _new_records(self.work, self.batch)


_OF_BATCH = ("input_ids", "positions", "out_cache_loc")


def _new_tokens(batch: DecodeBatch, arrays: Any) -> dict[str, Any]:
    return {
        "input_ids": arrays.array(batch.new_tokens),
        "positions": arrays.array(batch.prefix_lens),
        "out_cache_loc": arrays.array(batch.new_slots),
        "enable_write_input_assert": False,
        "expected_input_tokens": None,
        "expected_input_positions": None,
    }


def _new_records(work: Work, batch: DecodeBatch) -> dict[str, Any]:
    """The new records of each buffer, by NumPy's write into one buffer of the same records."""
    (context,) = batch.contexts(np, 1)
    seeds = batch.table[1:, work.prefix - 1].astype(np.int64)
    launch_canary_write_kernel(
        context=context,
        plan=WritePlan(
            write_offsets=np.arange(work.bs + 1),
            write_seed_slot_indices=seeds if batch.mapping is None else batch.mapping[seeds],
            write_num_valid_reqs=np.full(1, work.bs, np.int32),
        ),
        **_new_tokens(batch, np),
        chain=work.chain,
    )
    return {f"new records {kind}": context.canary_buf[-work.bs :] for kind in range(work.num_buffers)}


def cases() -> Iterator[Case]:
    for work in _WORKS:
        yield step_case(work, is_quick=work in _QUICK)
    for work in _BY_CANARY:
        yield replace(
            step_case(work, is_quick=work in _BY_CANARY[:2]),
            name=f"canary.step: {work.name}",
            series=f"canary.step, {work.kind}",
            setup=partial(CanarySetup, work),
        )


def step_case(work: Work, *, is_quick: bool = False) -> Case:
    sources = (work.num_sources, work.read_bytes)
    return Case(
        name=work.name,
        series=work.kind,
        work=work.entries,
        moved_bytes=work.offsets_bytes + work.verify_bytes + work.write_bytes,
        memory_bytes=work.memory_bytes,
        setup=lambda: StepSetup(work),
        parameters=work.parameters,
        is_quick=is_quick,
        aims=_AIMS.get(work, {}),
        published=published.STEP.get((work.bs, work.prefix, *sources), {}) if work.num_buffers == 4 else {},
    )
