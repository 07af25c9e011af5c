"""Torch tensors go in zero-copy and results come back through DLPack."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_kvcanary import KvCanaryError, launch_plan_offsets_kernel, plan_offsets
from cupy_kvcanary.arrays import view_array
from tests.helpers.backends import require_gpu
from tests.helpers.plan_offsets import OUTPUTS, expected_outputs, make_arguments

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
    plan = plan_offsets(*(torch.from_numpy(arguments[name]).to(device) for name in names))
    offsets = torch.from_dlpack(plan.write_offsets)
    expected = expected_outputs(arguments)["out_write_offsets"]
    np.testing.assert_array_equal(offsets.cpu().numpy(), expected)
    assert view_array("a", offsets).pointer == view_array("a", plan.write_offsets).pointer


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
            total = torch.from_dlpack(plan.verify_offsets)[-1].clone()
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


def test_strided_tensors_are_refused_or_right() -> None:
    ones, table = torch.ones(4, dtype=torch.int64), torch.arange(40, dtype=torch.int32).reshape(4, 10)
    with pytest.raises(KvCanaryError, match="prefix_lens must be contiguous"):
        plan_offsets(ones[:2], ones[::2], ones[:2], table)
    with pytest.raises(KvCanaryError, match="req_to_token must have contiguous rows"):
        plan_offsets(ones, ones, ones, table.t())
    plan = plan_offsets(ones, ones * 2, ones, table[:, 3:8])
    assert plan.write_seed_slot_indices.tolist() == [14] * 4
