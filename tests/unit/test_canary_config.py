"""What a canary is built from: groups, buffers, layers, memory, and a message for each mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import Canary, CanaryConfig, CanaryLaunchTag, KvCanaryError, KvPool, RealKvSource, memory_of
from tests.helpers.canary_errors import SIZES


def layers(count: int, *shape: int) -> list[Any]:
    return [np.zeros(shape, np.float16) for _ in range(count)]


def sources(pool: KvPool, tag: str) -> tuple[RealKvSource, ...]:
    (group,) = pool.groups()
    return group.sources(CanaryLaunchTag[tag], pool)


def hashed(pool: KvPool, names: list[Any], tag: str) -> list[int]:
    """Which of the layers a buffer hashes."""
    return [next(i for i, layer in enumerate(names) if layer is source.tensor) for source in sources(pool, tag)]


@pytest.mark.parametrize(
    ("count", "chosen", "head", "tail"),
    [
        (1, None, [0], [0]),
        (2, None, [0], [1]),
        (30, None, [0], [29]),
        (30, (15,), [15], [15]),
        (30, (0, 10, -1), [0, 10], [10, 29]),
        (30, range(8), [0, 1, 2, 3], [4, 5, 6, 7]),
    ],
)
def test_head_buffers_hash_the_first_layers_and_tail_buffers_the_last(
    count: int, chosen: Any, head: list[int], tail: list[int]
) -> None:
    k = layers(count, 64, 2, 8)
    pool = KvPool(**SIZES, k_layers=k, v_layers=layers(count, 64, 2, 8), layers=chosen)
    assert hashed(pool, k, "HEAD_K_FULL") == head
    assert hashed(pool, k, "TAIL_K_FULL") == tail


@pytest.mark.parametrize(
    ("shape", "page_size", "num_bytes_per_token"),
    [
        ((64, 2, 8), 1, 32),  # slots, heads, head size
        ((4, 16, 2, 8), 16, 32),  # pages, slots of a page, heads, head size
        ((80, 16), 1, 32),  # more rows than slots
    ],
)
def test_a_layer_has_a_row_for_each_slot_or_for_each_page(
    shape: tuple[int, ...], page_size: int, num_bytes_per_token: int
) -> None:
    pool = KvPool(**SIZES, page_size=16, k_layers=layers(1, *shape), v_layers=layers(1, *shape))
    (source,) = sources(pool, "HEAD_V_FULL")
    assert (source.page_size, source.num_bytes_per_token, source.read_bytes) == (
        page_size,
        num_bytes_per_token,
        num_bytes_per_token,
    )


def test_a_source_is_taken_as_it_is() -> None:
    source = RealKvSource(tensor=np.zeros((64, 64), np.uint8), page_size=1, num_bytes_per_token=64, read_bytes=32)
    assert sources(KvPool(**SIZES, k_layers=[source]), "HEAD_K_FULL") == (source,)


def test_a_pool_with_one_tensor_a_layer_has_no_v_buffers() -> None:
    pool = KvPool(**SIZES, k_layers=layers(2, 64, 16))
    assert {tag.name for tag in Canary(pool, CanaryConfig(real_kv_hash="all")).records} == {
        "HEAD_K_FULL",
        "TAIL_K_FULL",
    }


def test_memory_is_announced_in_words() -> None:
    pool = KvPool(num_slots=2**20, max_reqs=256, max_seq_len=4096)
    memory = memory_of(pool, CanaryConfig())
    assert memory.records == 4 * 32 * 2**20
    assert str(memory).startswith("records 128.0 MiB, log ")
    assert memory_of(pool, CanaryConfig(mode="off")).device == 0


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("num_slots must be positive, got 0", {"num_slots": 0}),
        ("max_reqs must be an int, got 4.0", {"max_reqs": 4.0}),
        ("max_seq_len must be positive, got -1", {"max_seq_len": -1}),
        ("page_size must be positive, got 0", {"page_size": 0}),
        ("padding_slot must be non-negative, got -1", {"padding_slot": -1}),
        ("swa_window_size must be non-negative, got -4", {"swa_window_size": -4}),
        ("swa_window_size must be positive, got 0", {"full_to_swa_index_mapping": np.zeros(64, np.int64)}),
        (
            "swa_num_slots must be positive, got 0",
            {"full_to_swa_index_mapping": np.zeros(64, np.int64), "swa_window_size": 8},
        ),
        ("num_slots must be at most 2147483647, got 2147483648", {"num_slots": 2**31}),
        ("kv_token_id_vs_position_offset must be an int, got None", {"kv_token_id_vs_position_offset": None}),
        ("device must be cpu, cuda, cuda:N or a device object, got 'tpu'", {"device": "tpu"}),
    ],
)
def test_a_pool_says_what_is_wrong(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(KvCanaryError) as raised:
        KvPool(**{**SIZES, **changed})
    assert str(raised.value).splitlines()[0] == f"kv-canary: {message}"


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("mode must be one of off, log, raise, got 'loud'", {"mode": "loud"}),
        ("real_kv_hash must be one of none, partial, all, got 'ALL'", {"real_kv_hash": "ALL"}),
        ("chain must be one of splitmix64, affine, got None", {"chain": None}),
        ("check_holes must be a bool, got 1", {"check_holes": 1}),
        ("verify_interval must be positive, got 0", {"verify_interval": 0}),
        ("verify_capacity must be at most 2147483647, got 4294967296", {"verify_capacity": 2**32}),
        ("ring_size must be positive, got 0", {"ring_size": 0}),
        ("stats_interval must be non-negative, got -1", {"stats_interval": -1}),
    ],
)
def test_a_configuration_says_what_is_wrong(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(KvCanaryError) as raised:
        CanaryConfig(**changed)
    assert str(raised.value).splitlines()[0] == f"kv-canary: {message}"


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("k_layers must have at least one layer where KV bytes are hashed, got 0", {}),
        ("layers must be indices of the 2 k_layers, got -3", {"k_layers": layers(2, 64, 16), "layers": (-3,)}),
        ("len(layers) must be at most 8, got 9", {"k_layers": layers(9, 64, 16), "layers": range(9)}),
        ("num_bytes_per_token must be a multiple of 16, got 24", {"k_layers": layers(1, 64, 12)}),
    ],
)
def test_layers_that_cannot_be_hashed_raise_when_the_canary_is_built(message: str, changed: dict[str, Any]) -> None:
    with pytest.raises(KvCanaryError) as raised:
        Canary(KvPool(**SIZES, **changed), CanaryConfig(real_kv_hash="all"))
    assert str(raised.value).splitlines()[0] == f"kv-canary: {message}"
