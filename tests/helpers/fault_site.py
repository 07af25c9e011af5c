"""A tiny paged KV cache under a canary, without an engine: a few requests, stamped, for faults to damage."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_kvcanary.batch import Batch
from cupy_kvcanary.canary import Canary
from cupy_kvcanary.canary_config import CanaryConfig, KvPool
from cupy_kvcanary.constants import FailReason
from cupy_kvcanary.faults import FaultSite, LiveRequest

PAGE = 4
SLOTS = 256
LENGTHS = (41, 34, 27)
"""Tokens of the requests in rows 1, 2 and 3."""


class SmallCache:
    """Every step decodes one token of each request. Slots are handed out page by page, in shuffled order."""

    def __init__(self, *, window: int = 0, expected_tokens: bool = True, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        pages = random.permutation(np.arange(1, SLOTS // PAGE)).reshape(3, -1)
        self.page_table = np.zeros((4, 64), np.int32)
        for row, own in enumerate(pages.tolist(), 1):
            slots = (np.array(own)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
            self.page_table[row] = slots[:64]
        self.mapping: Any = None
        if window:
            shuffled = random.permutation(np.arange(1, SLOTS // PAGE))
            self.mapping = np.append(np.arange(PAGE), (shuffled[:, None] * PAGE + np.arange(PAGE)).reshape(-1))
        self.tokens = random.integers(0, 1000, (4, 64)).astype(np.int32)
        self.kv = np.zeros((4, SLOTS // PAGE, PAGE, 16), np.uint8)
        """K of two layers, V of two layers."""
        self.swa_kv = np.zeros_like(self.kv)
        of_window: dict[str, Any] = (
            {"swa_k_layers": tuple(self.swa_kv[:2]), "swa_v_layers": tuple(self.swa_kv[2:])} if window else {}
        )
        pool = KvPool(
            num_slots=SLOTS,
            max_reqs=3,
            max_seq_len=64,
            page_size=PAGE,
            k_layers=tuple(self.kv[:2]),
            v_layers=tuple(self.kv[2:]),
            swa_window_size=window,
            full_to_swa_index_mapping=self.mapping,
            swa_num_slots=SLOTS if window else 0,
            **of_window,
        )
        config = CanaryConfig(mode="log", real_kv_hash="all", expected_tokens=expected_tokens)
        self.canary = Canary(pool, config)
        self.window = window
        self.steps = 0
        self.prefix_lens = np.zeros(3, np.int64)
        self.extend_lens = np.array(LENGTHS)
        self.input_ids = np.zeros(0, np.int64)
        self.step()

    def begin(self) -> None:
        """The step's inputs are there."""
        positions = [np.arange(p, p + e) for p, e in zip(self.prefix_lens, self.extend_lens, strict=True)]
        self.positions = np.concatenate(positions)
        rows = np.repeat([1, 2, 3], self.extend_lens)
        self.out_cache_loc = self.page_table[rows, self.positions].astype(np.int64)
        self.input_ids = self.tokens[rows, self.positions].astype(np.int64)

    def verify(self) -> None:
        """What stands before the forward."""
        self.batch = Batch(
            page_table=self.page_table,
            prefix_lens=self.prefix_lens,
            extend_seq_lens=self.extend_lens,
            req_pool_indices=np.array([1, 2, 3]),
            input_ids=self.input_ids,
            positions=self.positions,
            out_cache_loc=self.out_cache_loc,
            expected_tokens=self.tokens,
            expected_token_lens=self.prefix_lens + self.extend_lens,
        )
        self.canary.before_forward(self.batch)

    def forward(self) -> None:
        """Write KV: bytes that tell token, position, layer and pool apart."""
        for kv, slots in ((self.kv, self.out_cache_loc), (self.swa_kv, self._mapped(self.out_cache_loc))):
            for index, layer in enumerate(kv.reshape(4, SLOTS, 16)):
                layer[slots, :8] = (self.input_ids * 7 + index + 1).view(np.uint8).reshape(-1, 8)
                layer[slots, 8:] = (self.positions + 1).view(np.uint8).reshape(-1, 8)

    def stamp(self) -> None:
        """What stands behind the forward."""
        self.canary.after_forward(self.batch)
        self.prefix_lens = self.prefix_lens + self.extend_lens
        self.extend_lens = np.ones(3, np.int64)
        self.steps += 1

    def step(self) -> None:
        """A whole step."""
        self.begin()
        self.verify()
        self.forward()
        self.stamp()

    def site(self, seed: int = 0, **changed: Any) -> FaultSite:
        """What faults see of the step."""
        given: dict[str, Any] = {
            "step": self.steps,
            "rng": np.random.default_rng(seed),
            "requests": [
                LiveRequest(row=row, prefix_len=int(self.prefix_lens[row - 1]), first_entry=row - 1, steps_left=9)
                for row in (1, 2, 3)
            ],
            "page_table": self.page_table,
            "records": self.canary.records,
            "kv_layers": tuple(self.kv),
            "page_size": PAGE,
            "input_ids": self.input_ids,
            "mapping": self.mapping,
            "swa_kv_layers": tuple(self.swa_kv) if self.window else (),
            "swa_window_size": self.window,
        }
        return FaultSite(**(given | changed))

    def found(self) -> list[Any]:
        """Violations until now."""
        return [violation for report in self.canary.synchronize() for violation in report.violations]

    def _mapped(self, slots: Any) -> Any:
        return slots if self.mapping is None else self.mapping[slots]


def reasons_of(violations: list[Any]) -> FailReason:
    """Of all of them."""
    reasons = FailReason(0)
    for violation in violations:
        reasons |= violation.reasons
    return reasons
