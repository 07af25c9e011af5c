"""Torch tensors go in zero-copy and results come back through DLPack."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cupy_kvcanary import (
    KvCanaryError,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    launch_canary_verify_kernel,
    launch_plan_offsets_kernel,
    plan_offsets,
)
from cupy_kvcanary.arrays import view_array
from tests.helpers.backends import require_gpu
from tests.helpers.buffers import HostBuffer, HostSource
from tests.helpers.interop import NUMPY, buffer_with_kv, converted, entries
from tests.helpers.plan_offsets import OUTPUTS, expected_outputs, make_arguments
from tests.helpers.verify import make_plan

torch = pytest.importorskip("torch", reason="torch is not installed")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_batch() -> dict[str, object]:
    rng = np.random.default_rng(0)
    table = rng.integers(1, 90, (9, 30))
    columns = (rng.integers(0, high, 20) for high in (9, 31, 3))
    return make_arguments(*columns, table, mapping=rng.integers(0, 50, 90), window=11)


@pytest.mark.parametrize("device", DEVICES)
def test_strict_launcher_writes_into_tensors(device: str) -> None:
    if device == "cuda":
        require_gpu()
    arguments = make_batch()
    tensors = {
        name: torch.from_numpy(value.copy()).to(device) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    launch_plan_offsets_kernel(**tensors)
    for name, value in expected_outputs(arguments).items():
        np.testing.assert_array_equal(tensors[name].cpu().numpy(), value, err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_shared_with_torch(device: str) -> None:
    if device == "cuda":
        require_gpu()
    arguments = make_batch()
    names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token")
    inputs = [torch.from_numpy(arguments[name]).to(device) for name in names]
    plan = plan_offsets(*inputs, like="numpy" if device == "cpu" else "cupy")
    offsets = torch.from_dlpack(plan.write_offsets)
    expected = expected_outputs(arguments)["out_write_offsets"]
    np.testing.assert_array_equal(offsets.cpu().numpy(), expected)
    assert offsets.data_ptr() == view_array("a", plan.write_offsets).pointer


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_tensors_on_the_inputs_device(device: str) -> None:
    if device == "cuda":
        require_gpu()
    arguments = make_batch()
    names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "req_to_token")
    plan = plan_offsets(*(torch.from_numpy(arguments[name]).to(device) for name in names))
    assert isinstance(plan.write_offsets, torch.Tensor)
    assert (plan.write_offsets.device.type, plan.write_offsets.dtype) == (device, torch.int64)
    np.testing.assert_array_equal(plan.write_offsets.cpu().numpy(), expected_outputs(arguments)["out_write_offsets"])


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_are_verified_against_a_bfloat16_cache(device: str) -> None:
    """One layer of a KV cache of two: a changed element of that layer is found, one of the other is not."""
    if device == "cuda":
        require_gpu()
    cache = torch.randn(8, 2, 16, dtype=torch.bfloat16)
    layer = cache[:, 1].contiguous().view(torch.uint8).numpy()
    stamped = HostBuffer.empty(8, sources=[HostSource(layer, 1, 32, 32)], mode=2)
    stamped.stamp([5, 2, 7], [11, 12, 13])
    cache = cache.to(device)
    context = VerifyOrWriteContext(
        canary_buf=torch.from_numpy(stamped.canary_buf).to(device),
        kernel_kind=3,
        violation_ring=torch.zeros(4, 8, dtype=torch.int64, device=device),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
        slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        real_kv_sources=(RealKvSource(tensor=cache[:, 1], page_size=1, num_bytes_per_token=32, read_bytes=32),),
        real_kv_hash_mode=2,
    )
    plan = VerifyPlan(
        verify_slot_indices=torch.tensor([5, 2, 7], device=device),
        verify_expected_tokens=torch.tensor([11, -1, 13], device=device),
        verify_expected_positions=torch.tensor([0, 1, 2], device=device),
        verify_prev_slot_indices=torch.tensor([-1, 5, 2], device=device),
        verify_num_valid=torch.full((1,), 3, dtype=torch.int32, device=device),
        enable=torch.ones(1, dtype=torch.int32, device=device),
    )
    cache[2, 0] += 1
    launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=True)
    assert context.violation_write_index.item() == 0
    cache[2, 1, 5] += 1
    launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=True)
    assert context.violation_write_index.item() == 1
    assert context.violation_ring[0, [0, 1, 2, 3, 7]].tolist() == [3, 2, 1, 12, 4]
    assert (context.slot_run_counter.item(), context.kernel_run_counter.item()) == (6, 2)


@pytest.mark.gpu
def test_the_launch_goes_on_torchs_current_stream() -> None:
    """A slow writer before the launch and a reader after it, all on one side stream, see each other's work."""
    require_gpu()
    arguments = make_batch()
    tensors = {
        name: torch.from_numpy(value.copy()).to("cuda") if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    prefix_lens = tensors["prefix_lens"].clone()
    launch_plan_offsets_kernel(**tensors)
    torch.cuda.synchronize()
    expected = expected_outputs(arguments)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            tensors["prefix_lens"].zero_()
            torch.cuda._sleep(1_000_000)
            tensors["prefix_lens"].copy_(prefix_lens)
            launch_plan_offsets_kernel(**tensors)
            read = tensors["out_verify_offsets_scratch"].clone()
            plan = plan_offsets(
                *(tensors[n] for n in ("req_pool_indices", "prefix_lens", "extend_seq_lens")),
                tensors["req_to_token"],
                swa_window_size=11,
            )
            total = plan.verify_offsets[-1].clone()
            side.synchronize()
            np.testing.assert_array_equal(read.cpu().numpy(), expected["out_verify_offsets_scratch"])
            assert int(total) == int(read[20])


@pytest.mark.gpu
def test_the_launch_is_captured_in_a_torch_graph() -> None:
    require_gpu()
    arguments = make_batch()
    tensors = {
        name: torch.from_numpy(value.copy()).to("cuda") if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    launch_plan_offsets_kernel(**tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_plan_offsets_kernel(**tensors)
    for name in OUTPUTS:
        tensors[name].fill_(-7777)
    graph.replay()
    torch.cuda.synchronize()
    for name, value in expected_outputs(arguments).items():
        np.testing.assert_array_equal(tensors[name].cpu().numpy(), value, err_msg=name)


def test_a_tensor_that_requires_grad_is_refused() -> None:
    with pytest.raises(KvCanaryError, match=r"prefix_lens must not require grad[\s\S]*detach"):
        plan_offsets([1], torch.ones(1, requires_grad=True), [1], [[0, 1]])


@pytest.mark.parametrize("name", ["prefix_lens", "out_write_offsets"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(20, device="meta"), "must be on a CPU or CUDA device, got meta"),
        (torch.zeros(20, dtype=torch.int64).to_sparse(), "must be an array"),
        (torch.zeros(20).requires_grad_(), "must not require grad"),
        (torch.zeros(20, dtype=torch.bfloat16), "must have dtype int64, got bfloat16"),
        (torch.zeros(41, dtype=torch.int64)[::2], "must be contiguous"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_by_name(name: str, tensor: Any, message: str) -> None:
    arguments, _ = converted(make_batch(), torch.from_numpy)
    with pytest.raises(KvCanaryError, match=f"{name} {message}"):
        launch_plan_offsets_kernel(**arguments | {name: tensor})


def test_odd_strides_of_single_rows_do_not_matter() -> None:
    table = torch.as_strided(torch.arange(8, dtype=torch.int32), (1, 8), (999, 1))
    one = torch.as_strided(torch.ones(1, dtype=torch.int64), (1,), (7,))
    assert plan_offsets(one - 1, one, one, table).totals().verify_entries == 0
    assert view_array("a", one).is_contiguous
    assert view_array("a", table).row_stride == 8


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_a_kv_cache_of_any_dtype_is_verified_as_bytes(dtype: str) -> None:
    buffer, kv = buffer_with_kv()
    cache = torch.from_numpy(kv).view(getattr(torch, dtype))
    buffer.sources = [HostSource(cache, 1, 64, 64)]
    context = buffer.on_device(NUMPY)
    for violations in (0, 1):
        launch_canary_verify_kernel(context=context, plan=make_plan(NUMPY, entries()), check_verify_expected_token=True)
        assert context.violation_write_index.tolist() == [violations]
        kv[3, 5] ^= 1


def test_strided_tensors_are_refused_or_right() -> None:
    ones, table = torch.ones(4, dtype=torch.int64), torch.arange(40, dtype=torch.int32).reshape(4, 10)
    with pytest.raises(KvCanaryError, match="prefix_lens must be contiguous"):
        plan_offsets(ones[:2], ones[::2], ones[:2], table)
    with pytest.raises(KvCanaryError, match="req_to_token must have contiguous rows"):
        plan_offsets(ones, ones, ones, table.t())
    plan = plan_offsets(ones, ones * 2, ones, table[:, 3:8])
    assert plan.write_seed_slot_indices.tolist() == [14] * 4


@pytest.mark.gpu
def test_repeated_calls_take_other_tensors_and_still_check_them() -> None:
    """A form of call that was checked is launched by a template: other addresses, the same results and errors."""
    require_gpu()
    for seed in range(4):
        arguments = make_batch() | {"prefix_lens": np.random.default_rng(seed).integers(0, 31, 20)}
        tensors = {
            name: torch.from_numpy(value.copy()).to("cuda") if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        for _ in range(2):
            launch_plan_offsets_kernel(**tensors)
        for name, value in expected_outputs(arguments).items():
            np.testing.assert_array_equal(tensors[name].cpu().numpy(), value, err_msg=name)
        shared = tensors["out_verify_num_valid"]
        with pytest.raises(KvCanaryError, match="must not overlap"):
            launch_plan_offsets_kernel(**tensors | {"out_verify_enable": shared})
        with pytest.raises(KvCanaryError, match="swa_window_size must be an int, got True"):
            launch_plan_offsets_kernel(**tensors | {"swa_window_size": True})


@pytest.mark.gpu
def test_a_bound_launch_only_launches() -> None:
    require_gpu()
    arguments = make_batch()
    tensors = {
        name: torch.from_numpy(value.copy()).to("cuda") if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    bound = launch_plan_offsets_kernel.bind(**tensors)
    for prefix_len in (3, 7):
        tensors["prefix_lens"].fill_(prefix_len)
        bound()
        expected = expected_outputs(arguments | {"prefix_lens": np.full(20, prefix_len)})
        for name in OUTPUTS:
            np.testing.assert_array_equal(tensors[name].cpu().numpy(), expected[name], err_msg=name)


def test_a_bound_launch_on_the_cpu() -> None:
    arguments = make_batch()
    bound = launch_plan_offsets_kernel.bind(**arguments)
    bound()
    for name, value in expected_outputs(arguments | {"out_status": np.zeros(1, np.int32)}).items():
        np.testing.assert_array_equal(arguments[name], value, err_msg=name)
    with pytest.raises(KvCanaryError, match="bs must be an int"):
        launch_plan_offsets_kernel.bind(**arguments | {"bs": 1.5})


@pytest.mark.gpu
def test_a_first_call_inside_a_capture_says_to_warm_up() -> None:
    """In a process of its own, where nothing was compiled yet."""
    require_gpu()
    code = """
import torch, cupy, cupy_kvcanary as k
one = torch.ones(1, dtype=torch.int64, device="cuda")
table = torch.ones(2, 4, dtype=torch.int32, device="cuda")
def outputs():
    sizes = {"out_verify_offsets_scratch": 4097, "out_write_offsets": 2, "out_write_seed_slot_indices": 1}
    return {n: torch.zeros(s, dtype=torch.int64, device="cuda") for n, s in sizes.items()} | {
        n: torch.zeros(1, dtype=torch.int32, device="cuda")
        for n in ("out_verify_num_valid", "out_verify_enable", "out_write_num_valid_reqs")}
arguments = dict(req_pool_indices=one, prefix_lens=one, extend_seq_lens=one, req_to_token=table,
                 full_to_swa_index_mapping=None, swa_window_size=0, verify_capacity=9, **outputs())
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        k.launch_plan_offsets_kernel(**arguments)
except k.KvCanaryRuntimeError as error:
    assert "warmup()" in str(error), error
else:
    raise AssertionError("captured")
k.warmup()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    k.launch_plan_offsets_kernel(**arguments)
for _ in range(100):
    graph.replay()
torch.cuda.synchronize()
assert arguments["out_verify_num_valid"].item() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
