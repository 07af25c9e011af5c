"""Scatter of request token ids: requests of half to all of the longest length, into a pool with as many rows.

Bytes moved a token: one int64 read, one int32 written.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import launch_scatter_req_token_ids_kernel

from .case import Case, Launch, PeerLaunch, Prepared, Setup, on_device, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

WORK = "tokens"

_SIZES = ((1, 4096), (32, 1024), (256, 4096), (4096, 256), (1, 131072), (65536, 64), (1048576, 4))
_QUICK_SIZES = _SIZES[:4]


@cache
def _lens(bs: int, longest: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(bs).integers(longest // 2, longest + 1, bs)


class ScatterSetup(Setup):
    def __init__(self, bs: int, longest: int) -> None:
        rng = np.random.default_rng(bs + 1)
        offsets = np.concatenate([[0], np.cumsum(_lens(bs, longest))])
        self.arguments = {
            "flat_in": rng.integers(0, 2**17, offsets[-1]),
            "offsets": offsets,
            "req_pool_indices": rng.permutation(bs),
            "pool_out": np.full((bs, longest), -7777, np.int32),
        }

    def on(self, arrays: Any) -> Prepared:
        arguments = {name: on_device(value, arrays) for name, value in self.arguments.items()}
        launch = Launch(launch_scatter_req_token_ids_kernel, arguments)
        written = {"pool_out": arguments["pool_out"]}
        return prepared([launch], written, lambda: [PeerLaunch("launch_scatter_req_token_ids_kernel", arguments)])


def cases() -> Iterator[Case]:
    for bs, longest in _SIZES:
        yield _case(bs, longest)


def _case(bs: int, longest: int) -> Case:
    tokens = int(_lens(bs, longest).sum())
    return Case(
        name=f"{bs:,} x {longest}",
        series="scatter",
        work=tokens,
        moved_bytes=12 * tokens + 16 * bs,
        memory_bytes=8 * tokens + 2 * 4 * bs * longest + 16 * bs,
        setup=lambda: ScatterSetup(bs, longest),
        parameters={"bs": bs, "longest": longest, "tokens": tokens},
        is_quick=(bs, longest) in _QUICK_SIZES,
    )
