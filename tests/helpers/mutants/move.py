"""Mutants of the move kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.helpers.backends import ArrayBackend
from tests.helpers.buffers import HostBuffer
from tests.helpers.move import move
from tests.helpers.mutation import DIFFERS, Mutant, Reach, mutants


def reach(use: str, stride: int = 32, num_buffers: int = 1, packed_at: int = 0, **arrays: Any) -> Reach:
    """A move between the slots of buffers of four that are all 0x11, of packed records that are all 0x22.

    `packed_at` bytes behind a multiple of 16 are the packed records.
    """
    slots = {name: np.array(values) for name, values in arrays.items()}
    (first, *_) = slots.values()

    def run() -> None:
        buffers = [HostBuffer(np.full((4, stride), 0x11, np.uint8)) for _ in range(num_buffers)]
        memory = np.full(num_buffers * len(first) * stride + 16, 0x22, np.uint8)
        packed = memory[packed_at : packed_at - 16].reshape(num_buffers, len(first), stride)
        records = {"export": {"out_records": packed}, "import": {"records": packed}}.get(use, {})
        move(ArrayBackend("numpy"), use, buffers, slots | records)

    return (("kvc_move", run),)


copy = partial(reach, "copy")
forget = partial(reach, "forget")
exports = partial(reach, "export")
imports = partial(reach, "import")

ALIGNED_READ = "if (is_aligned) return *reinterpret_cast<const ulonglong2*>(words)"
READ = "return make_ulonglong2(words[0]"
ALIGNED_WRITTEN = "*reinterpret_cast<ulonglong2*>(words) = stored"
SECOND_WRITTEN = "if (num_words > 1) words[1] = stored.y"
SRC_READ = "moved = load_words(buffer.record(slot)"
SLOT_READ = "return is_int64 ? __ldg(static_cast<const i64*>(data) + index)"

MUTANTS: list[Mutant] = [
    *mutants(
        "bound",
        "address",
        "heap-buffer-overflow",
        [
            (
                copy(src_slots=[4], dst_slots=[2]),
                "source behind the buffer",
                "static_cast<u64>(slot) < static_cast<u64>(num_slots)",
                "static_cast<u64>(slot) <= static_cast<u64>(num_slots)",
                ALIGNED_READ,
            ),
            (
                exports(src_slots=[4]),
                "source of an export",
                "if (is_in_range) moved",
                "moved",
                ALIGNED_READ,
            ),
            (
                imports(dst_slots=[4]),
                "destination behind the buffer",
                "is_in_range && buffer.has_slot(slot) &&",
                "is_in_range &&",
                ALIGNED_WRITTEN,
            ),
            (
                copy(src_slots=[1], dst_slots=[2]),
                "entries of a block",
                "min(args.entries_per_block, args.num_entries - first)",
                "args.entries_per_block",
                SLOT_READ,
            ),
            (
                imports(dst_slots=[1, 2]),
                "pairs of the entries",
                "pair < num_pairs",
                "pair <= num_pairs",
                ALIGNED_READ,
            ),
            (
                exports(src_slots=[1, 2]),
                "pairs of a slot",
                "(words_per_slot + 1) / 2",
                "(words_per_slot + 3) / 2",
                ALIGNED_WRITTEN,
            ),
            (
                imports(dst_slots=[1], num_buffers=2),
                "packed records of a buffer",
                "(b * args.num_entries + i)",
                "((b + 1) * args.num_entries + i)",
                ALIGNED_READ,
            ),
            (
                exports(src_slots=[3], stride=40),
                "last word that is read",
                "num_words > 1 ? words[1] : 0",
                "words[1]",
                READ,
            ),
            (
                imports(dst_slots=[3], stride=40),
                "last word that is written",
                SECOND_WRITTEN,
                "words[1] = stored.y",
                SECOND_WRITTEN.removeprefix("if (num_words > 1) "),
            ),
        ],
    ),
    # A slot below zero is far behind the buffer, where anything may lie.
    *mutants(
        "bound",
        "address",
        "AddressSanitizer",
        [
            (
                use,
                f"{side} before the buffer",
                "static_cast<u64>(slot) < static_cast<u64>(num_slots)",
                "slot < num_slots",
                line,
            )
            for use, side, line in (
                (copy(src_slots=[-1], dst_slots=[2]), "source", ALIGNED_READ),
                (forget(dst_slots=[-1]), "destination", ALIGNED_WRITTEN),
            )
        ],
    ),
    *mutants(
        "bound",
        "address",
        "misaligned address",
        [
            (
                copy(src_slots=[0], dst_slots=[1], stride=40),
                "slots at 16 bytes",
                "static_cast<u64>(slot_stride)) & 15) == 0",
                "static_cast<u64>(slot_stride)) & 7) == 0",
                ALIGNED_WRITTEN,
            ),
            (
                exports(src_slots=[0], packed_at=8),
                "packed records at 16 bytes",
                "(packed_address & 15) == 0",
                "(packed_address & 7) == 0",
                ALIGNED_WRITTEN,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "null pointer",
        [
            (
                forget(dst_slots=[1]),
                "no sources",
                "is_from_slots = args.src_slots.data != nullptr",
                "is_from_slots = true",
                SLOT_READ,
            ),
        ],
    ),
    *mutants(
        "bound",
        "address",
        "SEGV on unknown address",
        [
            (
                forget(dst_slots=[1]),
                "no packed records",
                "!is_from_slots && args.records == nullptr",
                "false",
                ALIGNED_READ,
            ),
        ],
    ),
    *mutants(
        "bound",
        "plain",
        DIFFERS,
        [
            (forget(dst_slots=[0, 1]), "padding slot", " && slot != args.padding_slot", "", ""),
            (
                forget(dst_slots=[1], stride=48),
                "words of a tombstone",
                "is_tombstone ? kCanaryFieldsPerSlot : ",
                "",
                "",
            ),
            (
                copy(src_slots=[4], dst_slots=[1]),
                "destination of no source",
                "is_in_range = is_in_range && buffer",
                "is_in_range = buffer",
                "",
            ),
            (exports(src_slots=[4, 1]), "slots that are reported", "is_skipped |= !is_in_range", "", ""),
        ],
    ),
]
