"""A small CuPy transformer decodes with a paged KV cache under the canary, which then finds an overwritten page.

The weights are random: what matters is what is read and written. All buffers are static and the launches are bound to
them, as in an engine: a step makes three of them and never waits for the GPU. Needs a GPU.
"""

from __future__ import annotations

from typing import Any

try:
    import cupy as cp
except ImportError:
    cp = None

from cupy_kvcanary import (
    FailReason,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    ViolationLog,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
)

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2
PAGE_SIZE, PAGES, STEPS = 4, 16, 16
SLOTS, MAX_LEN = PAGES * PAGE_SIZE, 24
TOKEN_BYTES = LAYERS * 2 * WIDTH * 4


class Decoder:
    """Learned positions, tied embeddings, and a cache [slots, layers, 2, width] of K and V that is written in place."""

    def __init__(self) -> None:
        random = cp.random.RandomState(0)

        def matrix(*shape: int) -> Any:
            return (random.standard_normal(shape) * shape[0] ** -0.5).astype(cp.float32)

        self.tokens, self.positions = matrix(VOCABULARY, WIDTH), matrix(MAX_LEN, WIDTH)
        self.layers = [
            (matrix(WIDTH, 3 * WIDTH), matrix(WIDTH, WIDTH), matrix(WIDTH, 4 * WIDTH), matrix(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        ]
        self.cache = cp.zeros((SLOTS, LAYERS, 2, WIDTH), cp.float32)

    def step(self, tokens: Any, positions: Any, slots: Any, all_slots: Any) -> Any:
        """The likeliest next token of each request."""
        is_past = (cp.arange(MAX_LEN) <= positions[:, None])[:, None, :]
        x = self.tokens[tokens] + self.positions[positions]
        for i, (qkv, out, up, down) in enumerate(self.layers):
            query, key, value = cp.split(normalised(x) @ qkv, 3, axis=-1)
            self.cache[slots, i, 0], self.cache[slots, i, 1] = key, value
            keys, values = (self.cache[all_slots, i, j].reshape(len(tokens), MAX_LEN, HEADS, -1) for j in (0, 1))
            scores = cp.einsum("rhd,rthd->rht", query.reshape(len(tokens), HEADS, -1), keys) * keys.shape[-1] ** -0.5
            weights = cp.where(is_past, cp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
            weights /= weights.sum(axis=-1, keepdims=True)
            x = x + cp.einsum("rht,rthd->rhd", weights, values).reshape(x.shape) @ out
            x = x + cp.maximum(normalised(x) @ up, 0) @ down
        return cp.argmax(normalised(x) @ self.tokens.T, axis=-1)


def normalised(x: Any) -> Any:
    """RMS norm without a gain."""
    return x / cp.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def main() -> None:
    """Decode 16 tokens of two requests, then overwrite a page of the second."""
    if cp is None or not cp.cuda.is_available():
        print("no GPU: this example needs CuPy and a CUDA device")
        return
    decoder = Decoder()
    log = ViolationLog.allocate(ring_capacity=64, device="cuda")
    counter = cp.zeros(2, cp.int64)
    context = VerifyOrWriteContext(
        canary_buf=cp.zeros((SLOTS, 32), cp.uint8),
        kernel_kind=0,
        violation_ring=log.violation_ring,
        violation_write_index=log.violation_write_index,
        slot_run_counter=counter[:1],
        kernel_run_counter=counter[1:],
        real_kv_sources=(
            RealKvSource(tensor=decoder.cache, page_size=1, num_bytes_per_token=TOKEN_BYTES, read_bytes=TOKEN_BYTES),
        ),
        real_kv_hash_mode=RealKvHashMode.ALL,
    )

    # Request rows 1 and 2 of the page table; row 0 is the padding row, page 0 is nobody's.
    pages = cp.array([[0] * 6, [3, 8, 5, 12, 0, 0], [7, 2, 11, 9, 0, 0]])
    req_to_token = (pages[:, :, None] * PAGE_SIZE + cp.arange(PAGE_SIZE)).reshape(3, MAX_LEN).astype(cp.int32)
    rows = cp.array([1, 2])
    positions, tokens = cp.zeros(2, cp.int64), cp.array([17, 42])
    slots = req_to_token[rows, 0].astype(cp.int64)
    verify_plan, write_plan = VerifyPlan.allocate(SLOTS, "cuda"), WritePlan.allocate(2, "cuda")
    plan = launch_canary_plan_kernels.bind(
        verify_plan_out=verify_plan,
        write_plan_out=write_plan,
        req_pool_indices=rows,
        prefix_lens=positions,  # a step that writes position p reads the p tokens before it
        extend_seq_lens=cp.ones(2, cp.int64),
        req_to_token=req_to_token,
        swa_window_size=0,
        full_to_swa_index_mapping=None,
        verify_capacity=SLOTS,
        req_to_verify_expected_tokens=None,
        req_to_verify_expected_tokens_valid_lens=None,
        kv_token_id_vs_position_offset=0,
    )
    verify = launch_canary_verify_kernel.bind(context=context, plan=verify_plan, check_verify_expected_token=False)
    write = launch_canary_write_kernel.bind(
        context=context,
        plan=write_plan,
        input_ids=tokens,
        positions=positions,
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )

    texts = []
    for _ in range(STEPS):
        plan()
        verify()
        texts.append(tokens.copy())
        next_tokens = decoder.step(tokens, positions, slots, req_to_token[rows])
        write()
        tokens[...] = next_tokens
        positions += 1
        slots[...] = req_to_token[rows, positions]
    for row, text in enumerate(cp.stack(texts, axis=1).tolist()):
        print(f"request {row}: {' '.join(map(str, text))}")
    print(f"{int(counter[0])} records stamped or verified, {int(log.violation_write_index[0])} violations")

    print("page 2 is given to another request, which writes its own K and V")
    decoder.cache[2 * PAGE_SIZE : 3 * PAGE_SIZE] = cp.random.RandomState(1).standard_normal((PAGE_SIZE, 1, 1, WIDTH))
    plan()
    verify()
    violations = int(log.violation_write_index[0])
    print(f"{violations} violations")
    for _, slot, position, token, *_, bits in sorted(log.violation_ring[:violations].tolist()):
        print(f"slot {slot} (page {slot // PAGE_SIZE}), position {position}, token {token}: {FailReason(bits)!r}")


if __name__ == "__main__":
    main()
