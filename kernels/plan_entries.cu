// Plan entries: slot, predecessor's slot, position and expected token of each entry to verify; zeros behind the batch's
// write offsets. A warp owns 32 consecutive entries a round, a lane one of them, which it finds by a search of the
// offsets, their upper levels in shared memory. No atomics but the status bits. An entry that hostile offsets place
// outside what its request reads is left untouched. Cost: 32 bytes written and a table entry read for each entry.

struct PlanEntriesArgs {
  const i64* req_pool_indices;
  const i64* prefix_lens;
  PageTable page_table;
  IndexArray full_to_swa_index_mapping;
  const i64* verify_offsets_scratch;
  const int* verify_enable;
  const int* req_to_verify_expected_tokens;
  const i64* req_to_verify_expected_tokens_valid_lens;
  i64* out_verify_slot_indices;
  i64* out_verify_expected_tokens;
  i64* out_verify_expected_positions;
  i64* out_verify_prev_slot_indices;
  i64* out_write_offsets;
  int* out_status;
  const int* bs_on_device;
  i64 bs;  // where bs_on_device is given: the most that it may say
  i64 lut_len;
  i64 swa_window_size;
  i64 verify_capacity;  // below 2^31
  i64 kv_token_id_vs_position_offset;
  i64 num_expected_rows;  // 0: there are no expected tokens
  i64 max_context_len;
  i64 expected_stride0;
  i64 write_offsets_len;
  i64 sample_stride;  // a power of two: kPlanEntriesThreads samples of the offsets cover the batch
};

// Last request whose offset is not above t. Where hostile offsets are not sorted: the one at which this search ends.
__device__ __forceinline__ int request_of(const PlanEntriesArgs& args, const i64* sampled_offsets, i64 t) {
  int sample = 0;
#pragma unroll
  for (int step = kPlanEntriesThreads / 2; step > 0; step /= 2) {
    if (sampled_offsets[sample + step] <= t) sample += step;
  }
  i64 r = sample * args.sample_stride;
  for (i64 step = args.sample_stride / 2; step > 0; step /= 2) {
    if (r + step < args.bs && args.verify_offsets_scratch[r + step] <= t) r += step;
  }
  return static_cast<int>(r);
}

// Of a position in an active row; -1 is any token.
__device__ __forceinline__ i64 expected_token(const PlanEntriesArgs& args, int r, i64 row, i64 position) {
  if (row >= args.num_expected_rows) return -1;
  const i64 index = position + args.kv_token_id_vs_position_offset;
  const i64 valid_len = args.req_to_verify_expected_tokens_valid_lens[r];
  if (index < 0 || index >= valid_len || index >= args.max_context_len) return -1;
  return __ldg(args.req_to_verify_expected_tokens + row * args.expected_stride0 + index);
}

// Grid: any, at least 1.
extern "C" __global__ void __launch_bounds__(kPlanEntriesThreads) kvc_plan_entries(const PlanEntriesArgs launched) {
  PlanEntriesArgs args = launched;
  args.bs = batch_size(args.bs, args.bs_on_device);
  __shared__ i64 sampled_offsets[kPlanEntriesThreads];
  const i64 sampled_r = threadIdx.x * args.sample_stride;
  sampled_offsets[threadIdx.x] = sampled_r < args.bs ? args.verify_offsets_scratch[sampled_r] : kInt32Max;
  const i64 num_threads = static_cast<i64>(gridDim.x) * kPlanEntriesThreads;
  for (i64 i = args.bs + 1 + static_cast<i64>(blockIdx.x) * kPlanEntriesThreads + threadIdx.x;
       i < args.write_offsets_len; i += num_threads) {
    args.out_write_offsets[i] = 0;
  }
  i64 num_entries = 0;
  if (args.bs > 0 && *args.verify_enable != 0) {
    num_entries = clamp(args.verify_offsets_scratch[args.bs], 0, args.verify_capacity);
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarpSize;
  // Consecutive warps' entries go to different blocks: few entries use many multiprocessors.
  const i64 warp = static_cast<i64>(threadIdx.x / kWarpSize) * gridDim.x + blockIdx.x;
  int status = 0;
  for (i64 first = warp * kWarpSize; first < num_entries; first += num_threads) {
    const i64 t = first + lane;
    int r = -1;
    ReadRange range = {};
    u64 index = 0;  // wraps at offsets above t
    if (t < num_entries) {
      r = request_of(args, sampled_offsets, t);
      range = read_range(args.page_table, args.req_pool_indices[r], args.prefix_lens[r], args.swa_window_size, status);
      index = static_cast<u64>(t) - static_cast<u64>(args.verify_offsets_scratch[r]);
    }
    const bool is_read = index < static_cast<u64>(range.prefix_len - range.window_start);
    const i64 position = is_read ? range.window_start + static_cast<i64>(index) : -1;
    const bool follows_lane_before = __shfl_up_sync(kFullWarp, r, 1) == r && lane > 0 && index > 0;

    i64 slot = -1;
    i64 prev_slot = -1;
    if (is_read) {
      slot = args.page_table.slot(range.row, position);
      // Before the first slot is mapped, so that both loads are under way at once.
      if (position > 0 && !follows_lane_before) prev_slot = args.page_table.slot(range.row, position - 1);
      slot = map_to_swa(slot, args.full_to_swa_index_mapping, args.lut_len, status);
      prev_slot = map_to_swa(prev_slot, args.full_to_swa_index_mapping, args.lut_len, status);
    }
    const i64 slot_of_lane_before = __shfl_up_sync(kFullWarp, slot, 1);
    if (is_read) {
      args.out_verify_slot_indices[t] = slot;
      args.out_verify_expected_tokens[t] = expected_token(args, r, range.row, position);
      args.out_verify_expected_positions[t] = position;
      args.out_verify_prev_slot_indices[t] = follows_lane_before ? slot_of_lane_before : prev_slot;
    }
  }
  report_status(args.out_status, status);
}
