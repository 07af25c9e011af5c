"""The offsets plan of a decode batch: every request has a prefix of up to 4096 tokens and extends by one.

Bytes moved a request: three int64 read, three written, and a sector of the page table for the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kvcanary import PLAN_BS_BLOCK_SIZE, BlockTable, PageList, launch_plan_offsets_kernel

from . import published
from .case import SECTOR, Case, Launch, PeerLaunch, Prepared, Setup, on_device, prepared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .batches import Table

WORK = "requests"

PAGE_SIZE = 16
_MOST_ROWS = 65536
_UNTOUCHED = -7777


@dataclass(frozen=True, kw_only=True)
class Work:
    bs: int
    window: int = 0
    table: Table = "slots"

    @property
    def rows(self) -> int:
        """Of the page table; requests of a larger batch share them."""
        return min(self.bs, _MOST_ROWS) + 1

    @property
    def width(self) -> int:
        return 4096 if self.bs <= _MOST_ROWS else 64

    @property
    def lut_len(self) -> int:
        return 2**22 if self.window else 0

    @property
    def memory_bytes(self) -> int:
        table = 4 * self.rows * self.width // (1 if self.table == "slots" else PAGE_SIZE)
        return table + 8 * self.lut_len + 6 * 8 * self.bs


_SIZES = (1, 32, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1048576)
_QUICK_SIZES = (1, 256, 1024, 4096, 8192, 65536, 1048576)
_OTHER_SIZES = (256, 4096, 1048576)
_WORKS = (
    *(Work(bs=bs) for bs in _SIZES),
    *(Work(bs=bs, window=1024) for bs in _OTHER_SIZES),
    *(Work(bs=bs, table="block table") for bs in _OTHER_SIZES),
    *(Work(bs=bs, table="page list") for bs in _OTHER_SIZES),
)
_AIMS = {1: 2.0, 32: 2.0, 256: 2.0, 4096: 4.0, 1048576: 30.0}


def make_arguments(work: Work) -> dict[str, Any]:
    """Keyword arguments of the launcher, in host memory."""
    rng = np.random.default_rng(0)
    bs, rows, width = work.bs, work.rows, work.width
    most = work.lut_len or 2**24
    table: Any
    if work.table == "slots":
        table = rng.integers(1, most, (rows, width), dtype=np.int32)
    else:
        pages = rng.integers(1, most // PAGE_SIZE, (rows, width // PAGE_SIZE), dtype=np.int32)
        table = _paged(work.table, pages)
    return {
        "req_pool_indices": rng.permutation(bs) % (rows - 1) + 1,
        "prefix_lens": rng.integers(1, width, bs),
        "extend_seq_lens": np.ones(bs, np.int64),
        "req_to_token": table,
        "full_to_swa_index_mapping": rng.permutation(work.lut_len) if work.window else None,
        # As long as the peer wants it.
        "out_verify_offsets_scratch": np.full(max(bs, PLAN_BS_BLOCK_SIZE) + 1, _UNTOUCHED, np.int64),
        "out_write_offsets": np.full(bs + 1, _UNTOUCHED, np.int64),
        "out_write_seed_slot_indices": np.full(bs, _UNTOUCHED, np.int64),
        "out_verify_num_valid": np.full(1, _UNTOUCHED, np.int32),
        "out_verify_enable": np.full(1, _UNTOUCHED, np.int32),
        "out_write_num_valid_reqs": np.full(1, _UNTOUCHED, np.int32),
        "swa_window_size": work.window,
        "verify_capacity": 2**31 - 1,
        "bs_block_size": bs,
    }


def _paged(table: Table, pages: np.ndarray[Any, Any]) -> Any:
    if table == "block table":
        return BlockTable(block_table=pages, page_size=PAGE_SIZE)
    rows, of_a_row = pages.shape
    return PageList(
        indptr=np.arange(rows + 1) * of_a_row,
        indices=pages.ravel(),
        last_page_len=np.full(rows, PAGE_SIZE),
        page_size=PAGE_SIZE,
    )


def arguments_on(arguments: dict[str, Any], arrays: Any) -> dict[str, Any]:
    """The arguments as arrays of NumPy or CuPy."""

    def move(value: Any) -> Any:
        if isinstance(value, (BlockTable, PageList)):
            return type(value)(**{name: on_device(field, arrays) for name, field in vars(value).items()})
        return on_device(value, arrays)

    return {name: move(value) for name, value in arguments.items()}


class OffsetsSetup(Setup):
    def __init__(self, work: Work) -> None:
        self.work = work
        self.arguments = make_arguments(work)

    def on(self, arrays: Any) -> Prepared:
        arguments = arguments_on(self.arguments, arrays)
        written = {name: array for name, array in arguments.items() if name.startswith("out_")}
        launch = Launch(launch_plan_offsets_kernel, arguments)
        if self.work.table != "slots":
            return prepared([launch], written)
        return prepared([launch], written, lambda: [PeerLaunch("launch_plan_offsets_kernel", arguments)])


def cases() -> Iterator[Case]:
    for work in _WORKS:
        yield _case(work)


def _case(work: Work) -> Case:
    is_plain = work.table == "slots" and not work.window
    series = f"window {work.window}" if work.window else work.table
    aim = _AIMS.get(work.bs) if is_plain else None
    peer_us = published.OFFSETS.get(work.bs) if is_plain else None
    return Case(
        name=f"{work.bs:,}" if is_plain else f"{work.bs:,}, {series}",
        series=series,
        work=work.bs,
        moved_bytes=work.bs * (6 * 8 + SECTOR * (2 if work.window else 1)),
        memory_bytes=work.memory_bytes,
        setup=lambda: OffsetsSetup(work),
        parameters={"bs": work.bs, "window": work.window, "table": work.table},
        is_quick=is_plain and work.bs in _QUICK_SIZES,
        aims={} if aim is None else {"device_us": aim},
        published="refused" if work.bs > published.OFFSETS_MOST_REQUESTS else {"device_us": peer_us} if peer_us else {},
    )
