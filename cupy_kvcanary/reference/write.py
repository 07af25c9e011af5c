"""NumPy twin of `kernels/write.cu`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..constants import AFFINE_MULTIPLIER, VIOLATION_FIELDS, FailReason, StatusBit
from .page_table import map_to_swa
from .records import anchor_hash, append_violations, hash_real_kv, link, no_details, records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..buffers import CanaryBufferView, Chain

    Int64s = NDArray[np.int64]
    UInt64s = NDArray[np.uint64]


def write(
    *,
    buffers: tuple[CanaryBufferView, ...],
    write_offsets: Int64s,
    write_seed_slot_indices: Int64s,
    write_num_valid_reqs: NDArray[np.int32],
    input_ids: NDArray[Any],
    positions: NDArray[Any],
    out_cache_loc: NDArray[Any],
    expected_input_tokens: Int64s | None,
    expected_input_positions: Int64s | None,
    full_to_swa_index_mapping: NDArray[Any] | None,
    padding_slot: int,
    chain: Chain,
    out_status: NDArray[np.int32] | None,
) -> None:
    """Same arguments, results and bytes as the kernel, but for the order of violations."""
    num_tokens = len(input_ids)
    num_reqs = int(np.clip(write_num_valid_reqs[0], 0, len(write_seed_slot_indices)))
    given_begins, given_ends = write_offsets[:num_reqs], write_offsets[1 : num_reqs + 1]
    begins = np.clip(given_begins, 0, num_tokens)
    ends = np.clip(given_ends, begins, num_tokens)
    is_cut = num_reqs != write_num_valid_reqs[0] or (begins != given_begins).any() or (ends != given_ends).any()
    status = int(StatusBit.WRITE_OFFSETS_INVALID) if is_cut else 0

    # Requests with entries, and their entries one request after another; ranges may overlap.
    busy = np.flatnonzero(ends > begins)
    lens = (ends - begins)[busy]
    starts = np.cumsum(lens) - lens
    entries = np.repeat(begins[busy] - starts, lens) + np.arange(lens.sum())
    slots, mapping_status = map_to_swa(out_cache_loc[entries].astype(np.int64), full_to_swa_index_mapping)
    for buffer in buffers:
        _write(
            buffer,
            requests=busy,
            seeds=write_seed_slot_indices[busy],
            starts=starts,
            lens=lens,
            slots=slots,
            tokens=input_ids[entries].astype(np.int64),
            positions=positions[entries].astype(np.int64),
            expected_tokens=None if expected_input_tokens is None else expected_input_tokens[entries],
            expected_positions=None if expected_input_positions is None else expected_input_positions[entries],
            padding_slot=padding_slot,
            chain=chain,
        )
    if out_status is not None:
        out_status[0] |= status | mapping_status


def _write(
    buffer: CanaryBufferView,
    *,
    requests: Int64s,
    seeds: Int64s,
    starts: Int64s,
    lens: Int64s,
    slots: Int64s,
    tokens: Int64s,
    positions: Int64s,
    expected_tokens: Int64s | None,
    expected_positions: Int64s | None,
    padding_slot: int,
    chain: Chain,
) -> None:
    fields = records(buffer)
    is_stored = (slots >= 0) & (slots < buffer.num_slots)
    is_outside = slots >= buffer.num_slots

    # Where each request's chain stands: hash and last position stored.
    is_unknown = (seeds >= buffer.num_slots) & (seeds != padding_slot)
    is_seeded = (seeds >= 0) & (seeds < buffer.num_slots) & (seeds != padding_slot)
    seed_tokens, seed_positions, seed_hashes = fields[seeds[is_seeded], :3].T
    end_hashes = np.full(len(seeds), anchor_hash())
    end_hashes[is_seeded] = link(chain, seed_hashes, seed_tokens, seed_positions)
    end_positions = np.zeros(len(seeds), np.int64)
    end_positions[is_seeded] = seed_positions.view(np.int64)

    walk = _walk_affine if chain == "affine" else _walk
    hashes, positions_before = walk(end_hashes, end_positions, starts, lens, tokens, positions, is_stored)

    bits = np.where(is_outside, FailReason.WRITE_SLOT_OUT_OF_RANGE, 0)
    if expected_tokens is not None and expected_positions is not None:
        bits[is_stored & (tokens != expected_tokens)] |= FailReason.WRITE_TOKEN
        bits[is_stored & (positions != expected_positions)] |= FailReason.WRITE_POSITION
    else:
        expected_tokens, expected_positions = tokens, positions
    next_positions = (positions_before.view(np.uint64) + np.uint64(1)).view(np.int64)
    assertion = buffer.enable_chain_position_assert
    is_asserted = np.repeat(is_seeded & (assertion is not None and bool(assertion[0])), lens)
    jumps = is_stored & is_asserted & (positions != next_positions)

    def append(which: NDArray[np.bool_], r: Int64s, *columns: Any) -> None:
        rows = np.empty((np.count_nonzero(which), VIOLATION_FIELDS), np.int64)
        for field, values in enumerate((buffer.kernel_kind, *columns)):
            rows[:, field] = values[which] if isinstance(values, np.ndarray) else values
        details = no_details(len(rows))
        details[:, 0], details[:, 2], details[:, 3] = requests[r[which]], rows[:, 6], seeds[r[which]]
        append_violations(buffer, rows, details)

    stored_hashes = hashes.view(np.int64)
    r_of = np.repeat(np.arange(len(seeds)), lens)
    append(is_unknown, np.arange(len(seeds)), seeds, 0, 0, 0, 0, 0, FailReason.PREDECESSOR_OUT_OF_RANGE)
    append(
        bits != 0,
        r_of,
        slots,
        positions,
        tokens,
        np.where(is_stored, expected_tokens, tokens),
        stored_hashes,
        np.where(is_stored, expected_positions, 0),
        bits,
    )
    append(jumps, r_of, slots, positions, tokens, tokens, stored_hashes, next_positions, FailReason.WRITE_POSITION)

    # NumPy promises nothing about duplicates in an index, so only the last entry of each slot is stored.
    stored = np.flatnonzero(is_stored)[::-1]
    _, firsts = np.unique(slots[stored], return_index=True)
    last = stored[firsts]
    for field, values in enumerate((tokens.view(np.uint64), positions.view(np.uint64), hashes)):
        fields[slots[last], field] = values[last]
    fields[slots[last], 3] = hash_real_kv(buffer, slots[last])
    buffer.slot_run_counter[0] += len(stored)
    buffer.kernel_run_counter[0] += 1


def _walk(
    end_hashes: UInt64s,
    end_positions: Int64s,
    starts: Int64s,
    lens: Int64s,
    tokens: Int64s,
    positions: Int64s,
    moves: NDArray[np.bool_],
) -> tuple[UInt64s, Int64s]:
    """Hash and last position of the chain before each entry, from where each request's chain stands.

    Entries that do not move the chain are those that are not stored.
    """
    hashes = np.empty(len(tokens), np.uint64)
    positions_before = np.empty(len(tokens), np.int64)
    # Step k takes entry k of every request that is long enough.
    for k in range(int(lens.max(initial=0))):
        long = np.flatnonzero(lens > k)
        entries = starts[long] + k
        hashes[entries], positions_before[entries] = end_hashes[long], end_positions[long]
        long, entries = long[moves[entries]], entries[moves[entries]]
        end_hashes[long] = link(
            "splitmix64", end_hashes[long], tokens[entries].view(np.uint64), positions[entries].view(np.uint64)
        )
        end_positions[long] = positions[entries]
    return hashes, positions_before


def _walk_affine(
    end_hashes: UInt64s,
    end_positions: Int64s,
    starts: Int64s,
    lens: Int64s,
    tokens: Int64s,
    positions: Int64s,
    moves: NDArray[np.bool_],
) -> tuple[UInt64s, Int64s]:
    """`_walk` of the affine chain, all at once: after n links h is A**n * (h + sum of A**-(k + 1) * addend k)."""
    r = np.repeat(np.arange(len(lens)), lens)
    links: Int64s = np.cumsum(moves) - moves
    links -= links[starts][r]
    factors = np.ones((2, int(lens.max(initial=0)) + 1), np.uint64)
    factors[:, 1:] = [[AFFINE_MULTIPLIER], [pow(AFFINE_MULTIPLIER, -1, 2**64)]]
    powers, inverse_powers = np.multiply.accumulate(factors, axis=1)
    addends = link("affine", np.zeros(len(tokens), np.uint64), tokens.view(np.uint64), positions.view(np.uint64))
    terms = np.where(moves, addends * inverse_powers[links + moves], np.uint64(0))
    sums = np.cumsum(terms) - terms
    hashes = powers[links] * (end_hashes[r] + (sums - sums[starts][r]))

    last = np.maximum.accumulate(np.where(moves, np.arange(len(moves)), -1))
    before = np.append(-1, last)[:-1]
    return hashes, np.where(before >= starts[r], positions[before], end_positions[r])
