"""One call for every catalogue entry of the canary's configuration, which raises it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cupy_kvcanary import Canary, CanaryConfig, KvPool

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"num_slots": 64, "max_reqs": 4, "max_seq_len": 16}


def _pool_without_that_layer() -> None:
    layers = [np.zeros((64, 32), np.uint8)] * 2
    Canary(KvPool(**SIZES, k_layers=layers, layers=(0, 2)), CanaryConfig(real_kv_hash="all"))


CANARY_ERROR_CALLS: dict[str, Callable[[], object]] = {
    "kv-canary-must-be-one-of": lambda: CanaryConfig(mode="loud"),  # type: ignore[arg-type]
    "kv-canary-real-kv-needs-layers": lambda: Canary(KvPool(**SIZES), CanaryConfig(real_kv_hash="all")),
    "kv-canary-layer-must-exist": _pool_without_that_layer,
}
