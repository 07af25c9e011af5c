"""A very small serving engine around a canary: it keeps a page table, hands out slots and writes KV bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import Batch, Canary, CanaryConfig, KvPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cupy_kvcanary import Report
    from tests.helpers.backends import ArrayBackend

NUM_SLOTS, ROWS, WIDTH = 128, 6, 32
TOKEN_BYTES = 32


class Engine:
    """Requests are rows of the table, 1 to 5; row 0 is padding. Slots are handed out in a shuffled order."""

    def __init__(self, backend: ArrayBackend, *, pool: Mapping[str, Any] | None = None, **config: Any) -> None:
        self.backend = backend
        self.table = np.zeros((ROWS, WIDTH), np.int32)
        self.tokens = np.zeros((ROWS, WIDTH), np.int32)
        self.lens = np.zeros(ROWS, np.int64)
        rng = np.random.default_rng(7)
        self.free = (rng.permutation(NUM_SLOTS - 1) + 1).tolist()
        self.kv = {
            part: backend.array(np.zeros((NUM_SLOTS, TOKEN_BYTES), np.uint8)) for part in ("k0", "k1", "v0", "v1")
        }
        if config.get("real_kv_hash", "none") != "none":
            layers = {
                "k_layers": [self.kv["k0"], self.kv["k1"]],
                "v_layers": [self.kv["v0"], self.kv["v1"]],
            }
            pool = {**layers, **(pool or {})}
        self.reports: list[Report] = []
        self.canary = Canary(
            KvPool(
                **{
                    "num_slots": NUM_SLOTS,
                    "max_reqs": 8,
                    "max_seq_len": WIDTH,
                    "device": "cuda" if backend.is_gpu else "cpu",
                    **(pool or {}),
                }
            ),
            CanaryConfig(**config),
            on_report=self.reports.append,
            name="test",
        )

    def array(self, values: Any, dtype: Any = np.int64) -> Any:
        return self.backend.array(np.asarray(values, dtype))

    def admit(self, new_tokens: Mapping[int, Sequence[int]]) -> dict[str, Any]:
        """Give each row's new tokens slots, enter them in the table; what the step's batch then says."""
        rows = list(new_tokens)
        prefix_lens = self.lens[rows].copy()
        slots, positions, tokens = [], [], []
        for row, new in new_tokens.items():
            start = int(self.lens[row])
            taken = [self.free.pop() for _ in new]
            self.table[row, start : start + len(new)] = taken
            self.tokens[row, start : start + len(new)] = new
            self.lens[row] += len(new)
            slots += taken
            positions += range(start, start + len(new))
            tokens += list(new)
        return {
            "req_pool_indices": self.array(rows),
            "prefix_lens": self.array(prefix_lens),
            "extend_seq_lens": self.array([len(new) for new in new_tokens.values()]),
            "page_table": self.array(self.table, np.int32),
            "input_ids": self.array(tokens),
            "positions": self.array(positions),
            "out_cache_loc": self.array(slots),
        }

    def step(self, new_tokens: Mapping[int, Sequence[int]], **changed: Any) -> None:
        """One step: verify what the rows have, write the KV of their new tokens, stamp it."""
        fields = self.admit(new_tokens) | changed
        with self.canary.step(Batch(**fields)):
            self.forward(fields)

    def forward(self, fields: Mapping[str, Any]) -> None:
        slots = fields["out_cache_loc"]
        values = (fields["input_ids"] * 7 + fields["positions"] * 3) % 251
        for number, layer in enumerate(self.kv.values()):
            layer[slots] = ((values + number) % 251)[:, None].astype(np.uint8)

    def serve(self, steps: int = 3) -> None:
        """Prefill rows 1, 2 and 3, then decode."""
        self.step({1: [11, 12, 13, 14, 15, 16], 2: [21, 22, 23], 3: [31, 32, 33, 34]})
        for number in range(steps - 1):
            self.step({1: [50 + number], 2: [60 + number], 3: [70 + number]})

    def slot(self, row: int, position: int) -> int:
        return int(self.table[row, position])

    def records(self, tag: Any) -> Any:
        """The records of a buffer as int64 [slots, 4], in place."""
        return self.canary.records[tag].view(np.int64)

    def damage_token(self, slot: int, *tags: Any) -> None:
        """Flip a bit of the record's token in these buffers, or in all."""
        for tag in tags or self.canary.records:
            self.records(tag)[slot, 0] ^= 1
