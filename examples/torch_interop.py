"""torch tensors in, torch tensors out: stamp a request's KV slots, overwrite one, find it. On the CPU or on CUDA."""

import torch

from cupy_kvcanary import (
    FailReason,
    VerifyOrWriteContext,
    WritePlan,
    launch_canary_verify_batch_kernel,
    launch_canary_write_kernel,
    plan_offsets,
)

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
row, slots = torch.tensor([2]), torch.tensor([5, 9, 3, 7, 11, 13])
req_to_token = torch.zeros(6, 16, dtype=torch.int32)  # page table: request row, position -> slot
req_to_token[2, :6] = slots
context = VerifyOrWriteContext(
    canary_buf=torch.zeros(64, 32, dtype=torch.uint8),  # a record for each KV slot
    kernel_kind=0,
    violation_ring=torch.zeros(100, 8, dtype=torch.int64),
    violation_write_index=torch.zeros(1, dtype=torch.int32),
    slot_run_counter=torch.zeros(1, dtype=torch.int64),
    kernel_run_counter=torch.zeros(1, dtype=torch.int64),
)

# A step that computes six new tokens of the request; their records are stamped.
step = plan_offsets(row, torch.tensor([0]), torch.tensor([6]), req_to_token)
print("write offsets:", step.write_offsets)
launch_canary_write_kernel(
    context=context,
    plan=WritePlan(
        write_offsets=step.write_offsets,
        write_seed_slot_indices=step.write_seed_slot_indices,
        write_num_valid_reqs=step.write_num_valid_reqs,
    ),
    input_ids=torch.arange(11, 17),
    positions=torch.arange(6),
    out_cache_loc=slots,
    enable_write_input_assert=False,
    expected_input_tokens=None,
    expected_input_positions=None,
)

context.canary_buf[7] = context.canary_buf[5]  # slot 7 is given to another request, whose first token it now holds

# The next step reads all six: position 3 should be in slot 7, and position 4 should follow on it.
step = plan_offsets(row, torch.tensor([6]), torch.tensor([1]), req_to_token)
launch_canary_verify_batch_kernel(
    context=context,
    req_pool_indices=row,
    prefix_lens=torch.tensor([6]),
    req_to_token=req_to_token,
    full_to_swa_index_mapping=None,
    verify_offsets_scratch=step.verify_offsets,
    verify_num_valid=step.verify_num_valid,
    verify_enable=step.verify_enable,
    req_to_verify_expected_tokens=None,
    req_to_verify_expected_tokens_valid_lens=None,
    kv_token_id_vs_position_offset=0,
    swa_window_size=0,
    verify_capacity=64,
    check_verify_expected_token=False,
)
for violation in context.violation_ring[: context.violation_write_index.item()].tolist():
    print(f"slot {violation[1]}, position {violation[2]}: {FailReason(violation[7])!r}")
