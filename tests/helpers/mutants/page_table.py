"""Mutants of what the planning kernels share: reading a page table, mapping a slot, reporting a status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cupy_kvcanary.page_tables import BlockTable, PageList
from tests.helpers.mutation import Mutant, Reach, mutants

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOT_READ = "return entries[row * stride0 + position]"
PAGE_READ = "const i64 page = entries[first + page_in_row]"
MAPPING_READ = "return mapping[slot]"


class Request(Protocol):
    """Plans one request, whose last prefix position is read; the kernels that read it."""

    def __call__(
        self, row: int, prefix_len: int, table: Any, *, mapping: Any = None, has_status: bool = True
    ) -> Reach: ...


def slots(slot: int = 1) -> Any:
    """Two rows of three positions."""
    return np.full((2, 3), slot, np.int32)


def pages(indptr: list[int], last_page_len: int = 1) -> PageList:
    """A row of a list of two pages of four positions."""
    return PageList(
        indptr=np.array(indptr), indices=np.array([5, 6]), last_page_len=np.array([last_page_len]), page_size=4
    )


def page_table_mutants(request: Request) -> Iterator[Mutant]:
    blocks = BlockTable(block_table=np.array([[5, 6]]), page_size=4)
    yield from mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (request(-1, 3, slots()), "row before the table", "row >= 0 && row <", "row <", SLOT_READ),
            (request(2, 1, slots()), "row behind the table", "row < num_rows", "row <= num_rows", SLOT_READ),
            (
                request(2, 1, slots()),
                "a row that is no request's",
                "if (!table.is_active(row, status)) return {0, 0, 0, false};",
                "table.is_active(row, status);",
                SLOT_READ,
            ),
            (
                request(1, -3, slots()),
                "negative prefix",
                "(prefix_len, 0, seq_len)",
                "(prefix_len, -9, seq_len)",
                SLOT_READ,
            ),
            (request(1, 4, slots()), "prefix longer than a row", "0, seq_len)", "0, seq_len + 1)", SLOT_READ),
            (
                request(0, 12, pages([-1, 2])),
                "pages before the list, counted",
                "begin = clamp(page_indptr[row], 0, num_entries)",
                "begin = clamp(page_indptr[row], -9, num_entries)",
                PAGE_READ,
            ),
            (
                request(0, 1, pages([-1, 2])),
                "pages before the list, read",
                ": clamp(page_indptr[row], 0, num_entries)",
                ": clamp(page_indptr[row], -9, num_entries)",
                PAGE_READ,
            ),
            (
                request(0, 12, pages([0, 3])),
                "pages behind the list",
                "clamp(page_indptr[row + 1], begin, num_entries)",
                "clamp(page_indptr[row + 1], begin, num_entries + 1)",
                PAGE_READ,
            ),
            (
                request(0, 9, pages([0, 2], 5)),
                "last page too long",
                "clamp(last_page_lens[row], 0, page_size)",
                "clamp(last_page_lens[row], 0, page_size + 1)",
                PAGE_READ,
            ),
            (
                request(1, 1, slots(-1), mapping=[7, 8]),
                "slot before the mapping",
                "nullptr || slot < 0) return",
                "nullptr) return",
                MAPPING_READ,
            ),
            (
                request(1, 1, slots(2), mapping=[7, 8]),
                "slot behind the mapping",
                "slot >= lut",
                "slot > lut",
                MAPPING_READ,
            ),
            (
                request(1, 1, slots(5), mapping=[7, 8]),
                "slot clamped one too far",
                "slot = lut_len - 1",
                "slot = lut_len",
                MAPPING_READ,
            ),
        ],
    )
    # A negative number of positions is a page far behind the list; a null pointer with an index is just an address.
    yield from mutants(
        "bound",
        "address",
        "AddressSanitizer",
        [
            (
                request(0, 3, pages([2, 1])),
                "pages that end before they begin",
                "clamp(page_indptr[row + 1], begin, num_entries)",
                "clamp(page_indptr[row + 1], 0, num_entries)",
                PAGE_READ,
            ),
            (request(0, 3, pages([1, 1])), "no pages", "num_pages == 0 ? 0", "num_pages < 0 ? 0", PAGE_READ),
            (
                request(0, 3, pages([0, 1], -3)),
                "last page of a negative length",
                "clamp(last_page_lens[row], 0, page_size)",
                "clamp(last_page_lens[row], -9, page_size)",
                PAGE_READ,
            ),
            (
                request(1, 1, slots()),
                "no list of pages, counted",
                "if (page_indptr.data == nullptr) return max_seq_len;",
                "",
                "static_cast<const int*>(data) + index",
            ),
        ],
    )
    yield from mutants(
        "bound",
        "address",
        "null pointer",
        [
            (
                request(0, 1, blocks),
                "no list of pages, read",
                "page_indptr.data == nullptr ? row * stride0 : ",
                "",
                "static_cast<const int*>(data) + index",
            ),
            (request(1, 1, slots()), "no mapping", "mapping.data == nullptr || slot", "slot", MAPPING_READ),
            (
                request(-1, 1, slots(), has_status=False),
                "no status",
                "status != 0 && out_status != nullptr",
                "status != 0",
                "atomicOr(out_status, status)",
            ),
        ],
    )
