"""Writes of prefill and decode steps into a pool of 262,144 slots or more: random slots, prefixes of 1000 tokens.

Bytes moved: three int64 an entry and its record in each buffer, the hashed KV bytes, the seed's record of a request.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import RealKvHashMode, RealKvSource, VerifyOrWriteContext, WritePlan, launch_canary_write_kernel
from cupy_kvcanary.buffers import CHAINS, Chain
from cupy_kvcanary.constants import CANARY_SLOT_BYTES

from . import published
from .batches import RING_CAPACITY
from .case import Case, Launch, PeerLaunch, Prepared, Setup, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "tokens written"

_LEAST_SLOTS = 2**18
_BYTES_PER_TOKEN = 64
_READ_BYTES = 32
_LONG = 4096
_PREFIX = 1000


@dataclass(frozen=True, kw_only=True)
class Work:
    num_requests: int
    extend: int
    num_long: int = 0
    """Of the requests, how many extend by 4096 instead."""
    num_buffers: int = 1
    num_sources: int = 0

    @property
    def tokens(self) -> int:
        return (self.num_requests - self.num_long) * self.extend + self.num_long * _LONG

    @property
    def num_slots(self) -> int:
        return max(_LEAST_SLOTS, 2 * (self.tokens + self.num_requests))

    @property
    def kind(self) -> str:
        """All but the size of the batch."""
        parts = ["mixed" if self.num_long else "prefill" if self.extend > 1 else "decode"]
        parts += [f"{self.num_buffers} buffers"] if self.num_buffers > 1 else []
        parts += [f"{self.num_sources} x {_READ_BYTES} of {_BYTES_PER_TOKEN} bytes"] if self.num_sources else []
        return ", ".join(parts)

    @property
    def name(self) -> str:
        long = f" and {self.num_long} x {_LONG}" if self.num_long else ""
        return f"{self.num_requests - self.num_long} x {self.extend}{long}, {self.kind}"


_QUICK = (
    Work(num_requests=1, extend=4096),
    Work(num_requests=1, extend=1),
    Work(num_requests=256, extend=1),
    Work(num_requests=256, extend=1, num_buffers=4),
    Work(num_requests=4096, extend=1),
    Work(num_requests=256, extend=1, num_long=1, num_buffers=4),
)
_WORKS = (
    *_QUICK,
    Work(num_requests=1, extend=4096, num_buffers=4),
    Work(num_requests=1, extend=4096, num_sources=4),
    Work(num_requests=8, extend=4096),
    Work(num_requests=64, extend=512),
    Work(num_requests=1, extend=32768),
    Work(num_requests=1, extend=131072),
    Work(num_requests=32, extend=1),
    Work(num_requests=1024, extend=1),
    Work(num_requests=256, extend=1, num_sources=4),
    Work(num_requests=256, extend=1, num_buffers=4, num_sources=4),
    Work(num_requests=256, extend=4, num_buffers=4),
    Work(num_requests=65536, extend=1),
    Work(num_requests=1048576, extend=1),
)
_AIMS: dict[Chain, float] = {"splitmix64": 360, "affine": 8}


class WriteSetup(Setup):
    def __init__(self, work: Work, chain: Chain) -> None:
        rng = np.random.default_rng(0)
        self.work, self.chain = work, chain
        lens = np.full(work.num_requests, work.extend)
        lens[: work.num_long] = _LONG
        self.offsets = np.concatenate([[0], np.cumsum(lens)])
        n, num_slots = work.tokens, work.num_slots
        slots = rng.permutation(num_slots - 1)[: n + work.num_requests] + 1
        self.slots, self.seeds = slots[:n], slots[n:]
        self.tokens = rng.integers(0, 2**17, n)
        self.positions = np.arange(n) - np.repeat(self.offsets[:-1], lens) + _PREFIX
        self.records = rng.integers(0, 2**62, (num_slots, 4))
        self.records[self.seeds, 1] = _PREFIX - 1
        self.kv = [rng.integers(0, 256, (num_slots, _BYTES_PER_TOKEN), dtype=np.uint8) for _ in range(work.num_sources)]

    def on(self, arrays: Any) -> Prepared:
        contexts = [self._context(arrays, kind) for kind in range(self.work.num_buffers)]
        arguments = {
            "plan": WritePlan(
                write_offsets=arrays.array(self.offsets),
                write_seed_slot_indices=arrays.array(self.seeds),
                write_num_valid_reqs=arrays.full(1, len(self.seeds), np.int32),
            ),
            "input_ids": arrays.array(self.tokens),
            "positions": arrays.array(self.positions),
            "out_cache_loc": arrays.array(self.slots),
            "enable_write_input_assert": False,
            "expected_input_tokens": None,
            "expected_input_positions": None,
        }
        written = {f"canary_buf {kind}": context.canary_buf for kind, context in enumerate(contexts)}
        written |= {f"violation_write_index {kind}": c.violation_write_index for kind, c in enumerate(contexts)}
        launch = Launch(launch_canary_write_kernel, arguments | {"context": contexts, "chain": self.chain})
        if self.chain != "splitmix64":
            return prepared([launch], written)
        return prepared(
            [launch],
            written,
            lambda: [PeerLaunch("launch_canary_write_kernel", arguments | {"context": c}) for c in contexts],
        )

    def _context(self, arrays: Any, kernel_kind: int) -> VerifyOrWriteContext:
        return VerifyOrWriteContext(
            canary_buf=arrays.array(self.records.view(np.uint8)),
            kernel_kind=kernel_kind,
            violation_ring=arrays.zeros((RING_CAPACITY, 8), np.int64),
            violation_write_index=arrays.zeros(1, np.int32),
            slot_run_counter=arrays.zeros(1, np.int64),
            kernel_run_counter=arrays.zeros(1, np.int64),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=arrays.array(kv), page_size=1, num_bytes_per_token=_BYTES_PER_TOKEN, read_bytes=_READ_BYTES
                )
                for kv in self.kv
            ),
            real_kv_hash_mode=RealKvHashMode.ALL if self.kv else RealKvHashMode.NONE,
            enable_chain_position_assert=arrays.ones(1, np.int32),
        )


def cases() -> Iterator[Case]:
    for work in _WORKS:
        for chain in CHAINS:
            yield _case(work, chain)


def _case(work: Work, chain: Chain) -> Case:
    of_a_slot = CANARY_SLOT_BYTES + work.num_sources * _BYTES_PER_TOKEN
    of_an_entry = 3 * 8 + work.num_buffers * (CANARY_SLOT_BYTES + work.num_sources * _READ_BYTES)
    is_plain = work.num_buffers == 1 and not work.num_sources and not work.num_long
    peer_us = published.WRITE.get((work.num_requests, work.extend)) if is_plain else None
    has_aim = is_plain and (work.num_requests, work.extend) == (1, 4096)
    return Case(
        name=f"{work.name}, {chain}",
        series=f"{chain}, {work.kind}",
        work=work.tokens,
        moved_bytes=work.tokens * of_an_entry + work.num_requests * (16 + work.num_buffers * CANARY_SLOT_BYTES),
        # Twice: what it was before is kept, to check again.
        memory_bytes=2 * work.num_buffers * work.num_slots * of_a_slot + 40 * work.tokens,
        setup=lambda: WriteSetup(work, chain),
        parameters={**asdict(work), "chain": chain, "tokens": work.tokens},
        is_quick=work in _QUICK,
        aims={"device_us": _AIMS[chain]} if has_aim else {},
        published={} if peer_us is None else {"device_us": peer_us},
    )
