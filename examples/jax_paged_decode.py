"""A small JAX transformer decodes with a paged KV cache under the canary, which then finds an overwritten page.

The weights are random: what matters is what is read and written. Each step plans, verifies what it is about to read,
computes, and stamps what it wrote. JAX arrays are immutable, so the canary's own buffers are NumPy arrays, on the CPU;
the cache and the page table go in as they are, without a copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cupy_kvcanary import (
    BlockTable,
    FailReason,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    ViolationLog,
    WritePlan,
    launch_canary_verify_batch_kernel,
    launch_canary_write_kernel,
    plan_offsets,
)

jax.config.update("jax_platforms", "cpu")

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2
PAGE_SIZE, PAGES, MAX_PAGES = 4, 16, 6
SLOTS, MAX_LEN = PAGES * PAGE_SIZE, MAX_PAGES * PAGE_SIZE


def random_weights(key: jax.Array) -> dict[str, Any]:
    """Of a decoder with learned positions and tied embeddings."""

    def matrix(*shape: int) -> jax.Array:
        nonlocal key
        key, now = jax.random.split(key)
        return jax.random.normal(now, shape) * shape[0] ** -0.5

    layers = [
        {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"tokens": matrix(VOCABULARY, WIDTH), "positions": matrix(MAX_LEN, WIDTH), "layers": layers}


def normalised(x: jax.Array) -> jax.Array:
    """RMS norm without a gain."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@jax.jit
def decode_step(
    weights: dict[str, Any], cache: jax.Array, block_table: jax.Array, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each request: the cache [slots, layers, 2, width] with its K and V, and the likeliest next ones."""
    all_slots = (block_table[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)).reshape(len(tokens), MAX_LEN)
    slots = jnp.take_along_axis(all_slots, positions[:, None], axis=1)[:, 0]
    is_past = (jnp.arange(MAX_LEN) <= positions[:, None])[:, None, :]
    x = weights["tokens"][tokens] + weights["positions"][positions]
    for i, layer in enumerate(weights["layers"]):
        query, key, value = jnp.split(normalised(x) @ layer["qkv"], 3, axis=-1)
        cache = cache.at[slots, i].set(jnp.stack([key, value], axis=1))
        keys, values = (cache[all_slots, i, j].reshape(len(tokens), MAX_LEN, HEADS, -1) for j in (0, 1))
        scores = jnp.einsum("rhd,rthd->rht", query.reshape(len(tokens), HEADS, -1), keys)
        attention = jax.nn.softmax(jnp.where(is_past, scores / keys.shape[-1] ** 0.5, -jnp.inf))
        x += jnp.einsum("rht,rthd->rhd", attention, values).reshape(x.shape) @ layer["out"]
        x += jax.nn.gelu(normalised(x) @ layer["up"]) @ layer["down"]
    return cache, jnp.argmax(normalised(x) @ weights["tokens"].T, axis=-1)


class Canary:
    """A record for each slot of the cache, with a hash of all its K and V."""

    def __init__(self) -> None:
        self.records = np.zeros((SLOTS, 32), np.uint8)
        self.log = ViolationLog.allocate(ring_capacity=64)
        self.entries_seen, self.launches = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def over(self, cache: jax.Array) -> VerifyOrWriteContext:
        """The canary over the cache of a step: every step makes a new one."""
        token_bytes = LAYERS * 2 * WIDTH * 4
        return VerifyOrWriteContext(
            canary_buf=self.records,
            kernel_kind=0,
            violation_ring=self.log.violation_ring,
            violation_write_index=self.log.violation_write_index,
            slot_run_counter=self.entries_seen,
            kernel_run_counter=self.launches,
            real_kv_sources=(
                RealKvSource(tensor=cache, page_size=1, num_bytes_per_token=token_bytes, read_bytes=token_bytes),
            ),
            real_kv_hash_mode=RealKvHashMode.ALL,
        )

    def verify(self, cache: jax.Array, step: Any, rows: jax.Array, prefix_lens: jax.Array, table: BlockTable) -> int:
        """Check what the step is about to read; violations so far."""
        launch_canary_verify_batch_kernel(
            context=self.over(cache),
            req_pool_indices=rows,
            prefix_lens=prefix_lens,
            req_to_token=table,
            full_to_swa_index_mapping=None,
            verify_offsets_scratch=step.verify_offsets,
            verify_num_valid=step.verify_num_valid,
            verify_enable=step.verify_enable,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
            swa_window_size=0,
            verify_capacity=SLOTS,
            check_verify_expected_token=False,
        )
        return int(self.log.violation_write_index[0])

    def write(self, cache: jax.Array, step: Any, tokens: Any, positions: Any, table: BlockTable) -> None:
        """Stamp what the step wrote: one token of each request."""
        positions = np.asarray(positions, np.int64)
        pages = np.take_along_axis(np.asarray(table.block_table), positions[:, None] // PAGE_SIZE, axis=1)[:, 0]
        launch_canary_write_kernel(
            context=self.over(cache),
            plan=WritePlan(
                write_offsets=step.write_offsets,
                write_seed_slot_indices=step.write_seed_slot_indices,
                write_num_valid_reqs=step.write_num_valid_reqs,
            ),
            input_ids=np.asarray(tokens, np.int64),
            positions=positions,
            out_cache_loc=pages * PAGE_SIZE + positions % PAGE_SIZE,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )


def main() -> None:
    """Decode 16 tokens of two requests, then overwrite a page of the second."""
    weights = random_weights(jax.random.key(0))
    cache = jnp.zeros((SLOTS, LAYERS, 2, WIDTH))
    canary = Canary()
    # Pages of each request, in any order; page 0 is nobody's.
    table = BlockTable(block_table=jnp.array([[3, 8, 5, 12, 0, 0], [7, 2, 11, 9, 0, 0]]), page_size=PAGE_SIZE)
    rows, ones = jnp.arange(2), jnp.ones(2, jnp.int32)
    tokens, texts = jnp.array([17, 42]), []
    for position in range(16):
        prefix_lens = jnp.full(2, position)
        step = plan_offsets(rows, prefix_lens, ones, table)
        violations = canary.verify(cache, step, rows, prefix_lens, table)
        texts.append(tokens)
        cache, next_tokens = decode_step(weights, cache, table.block_table, tokens, prefix_lens)
        canary.write(cache, step, tokens, prefix_lens, table)
        tokens = next_tokens
    for row, text in enumerate(jnp.stack(texts, axis=1).tolist()):
        print(f"request {row}: {' '.join(map(str, text))}")
    print(f"{int(canary.entries_seen[0])} records stamped or verified, {violations} violations")

    print("page 2 is given to another request, which writes its own K and V")
    page = slice(2 * PAGE_SIZE, 3 * PAGE_SIZE)
    cache = cache.at[page].set(jax.random.normal(jax.random.key(1), cache[page].shape))
    prefix_lens = jnp.full(2, 16)
    step = plan_offsets(rows, prefix_lens, ones, table)
    violations = canary.verify(cache, step, rows, prefix_lens, table)
    print(f"{violations} violations")
    for _, slot, position, token, *_, bits in sorted(canary.log.violation_ring[:violations].tolist()):
        print(f"slot {slot} (page {slot // PAGE_SIZE}), position {position}, token {token}: {FailReason(bits)!r}")


if __name__ == "__main__":
    main()
