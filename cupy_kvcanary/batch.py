"""What a step of an engine runs on, in any of the forms that engines keep it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Requests of a step: what each will read, and what it will write.

    An engine with static buffers builds one Batch around them and gives the same object at every step: from the second
    step on nothing is checked again, and a step costs the host only its launches. All arrays are of one library, on the
    pool's device; index arrays are int32 or int64.

    SGLang: `page_table` is req_to_token, `req_pool_indices` its rows; row 0 is padding. vLLM: `page_table` is a
    `BlockTable` and `prefix_lens` are num_computed_tokens. FlashInfer: `page_table` is a `PageList`. A chunk of a
    prefill is a request with the tokens before it as prefix. Drafts of speculative decoding are written like other
    tokens; the next step's prefix length ends before those that were rejected, whose slots are simply written again.
    """

    page_table: Any
    """int32 or int64 [rows, positions] of slots, a `BlockTable` or a `PageList`."""
    prefix_lens: Any
    """[bs]: tokens of each request whose KV is in the pool already."""
    extend_seq_lens: Any
    """[bs]: tokens of each request that this step writes."""
    req_pool_indices: Any | None = None
    """[bs]: row of each request; None where request i is row i, as in block tables and page lists."""
    input_ids: Any | None = None
    """[tokens]: the tokens of this step, request by request. Here or in `after_forward`, like the next two."""
    positions: Any | None = None
    """[tokens]: position of each token in its request."""
    out_cache_loc: Any | None = None
    """[tokens]: slot that each token's KV is written to."""
    expected_tokens: Any | None = None
    """int32 [rows, width]: the tokens that each row's request really has, from the engine's own books."""
    expected_token_lens: Any | None = None
    """[bs]: how many of them are known."""
    bs: Any | None = None
    """Requests, where the arrays are longer: an int, or int32[1] on the device, which graph replays read anew."""
