// Plan offsets: exclusive prefix sums of each request's verify and write lengths, and its chain seed slot.
// One block owns a tile of consecutive requests, one lane one request of each row. No atomics but the status bits.
// Small batches: one launch, each block sums all requests before its tile itself, so that no block waits for another.
// Large ones: totals of the tiles, scan of the totals, then the tiles; an output element at each tile's start carries
// its sums between the launches. Rows and prefixes out of range are padded or clamped. Cost: 48 bytes a request.

struct PlanOffsetsArgs {
  IndexArray req_pool_indices;
  IndexArray prefix_lens;
  IndexArray extend_seq_lens;
  PageTable page_table;
  IndexArray full_to_swa_index_mapping;
  i64* out_verify_offsets_scratch;
  i64* out_write_offsets;
  i64* out_write_seed_slot_indices;
  int* out_verify_num_valid;
  int* out_verify_enable;
  int* out_write_num_valid_reqs;
  int* out_status;
  const int* bs_on_device;
  i64 bs;  // where bs_on_device is given: the most that it may say
  i64 lut_len;
  i64 swa_window_size;
  i64 verify_capacity;
};

// Sums wrap like NumPy's: a hostile length must not be undefined behaviour.
struct Lens {
  u64 verify;
  u64 write;

  __device__ __forceinline__ Lens operator+(const Lens& other) const {
    return {verify + other.verify, write + other.write};
  }
  __device__ __forceinline__ Lens operator-(const Lens& other) const {
    return {verify - other.verify, write - other.write};
  }
};

struct Request {
  ReadRange range;
  Lens lens;
};

__device__ __forceinline__ Request load_request(const PlanOffsetsArgs& args, i64 r, int& status) {
  const i64 row = args.req_pool_indices[r];
  const i64 prefix_len = args.prefix_lens[r];
  const i64 extend_seq_len = args.extend_seq_lens[r];
  const ReadRange range = read_range(args.page_table, row, prefix_len, args.swa_window_size, status);
  const i64 write_len = range.is_active && extend_seq_len > 0 ? extend_seq_len : 0;
  return {range, {static_cast<u64>(range.prefix_len - range.window_start), static_cast<u64>(write_len)}};
}

__device__ __forceinline__ i64 load_seed(const PlanOffsetsArgs& args, const Request& request, int& status) {
  if (request.range.prefix_len == 0 || request.lens.write == 0) return -1;
  const i64 slot = args.page_table.slot(request.range.row, request.range.prefix_len - 1);
  return map_to_swa(slot, args.full_to_swa_index_mapping, args.lut_len, status);
}

__device__ __forceinline__ Lens warp_inclusive_scan(Lens sum, int lane) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Lens before = {__shfl_up_sync(kFullWarp, sum.verify, distance), __shfl_up_sync(kFullWarp, sum.write, distance)};
    if (lane >= distance) sum = sum + before;
  }
  return sum;
}

// Sum over each group of kLanes lanes (a power of two), in every lane of the group.
template <int kLanes>
__device__ __forceinline__ Lens warp_sum(Lens sum) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum = sum + Lens{__shfl_xor_sync(kFullWarp, sum.verify, distance), __shfl_xor_sync(kFullWarp, sum.write, distance)};
  }
  return sum;
}

__device__ __forceinline__ void write_totals(const PlanOffsetsArgs& args, const Lens& total) {
  const i64 total_verify = static_cast<i64>(total.verify);
  const bool fits = total_verify <= args.verify_capacity;
  args.out_verify_offsets_scratch[args.bs] = total_verify;
  args.out_write_offsets[args.bs] = static_cast<i64>(total.write);
  *args.out_verify_num_valid = static_cast<int>(fits ? total_verify : args.verify_capacity);
  *args.out_verify_enable = fits ? 1 : 0;
  *args.out_write_num_valid_reqs = static_cast<int>(args.bs);
}

// Sum of the `warp_own` of all warps before this one and of the `warp_before` of all warps. Every thread calls it, the
// last lane of each warp with the warp's values.
template <int kThreads>
__device__ __forceinline__ Lens sum_before_warp(Lens warp_own, Lens warp_before) {
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ Lens own[kWarps];
  __shared__ Lens before[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;
  if (lane == kWarpSize - 1) {
    own[warp] = warp_own;
    before[warp] = warp_before;
  }
  __syncthreads();
  // Each warp adds up the others' sums for itself: cheaper than a second barrier.
  const int other = lane % kWarps;
  Lens sum = {0, 0};
  if (other < num_warps) {
    sum = before[other];
    if (other < warp) sum = sum + own[other];
  }
  return warp_sum<kWarps>(sum);
}

// What the last thread holds, in every thread. Its barrier also lets sum_before_warp be called again.
__device__ __forceinline__ Lens from_last_thread(const Lens& value) {
  __shared__ Lens shared_value;
  if (threadIdx.x == blockDim.x - 1) shared_value = value;
  __syncthreads();
  return shared_value;
}

// Plans request r, one for each thread of the block; returns the sums up to and with it. `warp_before` is this warp's
// share of what comes before the block's requests besides `carry`, in its last lane.
template <int kThreads>
__device__ __forceinline__ Lens plan_row(const PlanOffsetsArgs& args, i64 r, Lens carry, Lens warp_before) {
  int status = 0;
  Request request = {};
  if (r < args.bs) request = load_request(args, r, status);
  const i64 seed = load_seed(args, request, status);  // its latency hides behind the scan
  const Lens inclusive = warp_inclusive_scan(request.lens, threadIdx.x % kWarpSize);
  const Lens end = carry + sum_before_warp<kThreads>(inclusive, warp_before) + inclusive;
  if (r < args.bs) {
    const Lens offset = end - request.lens;
    args.out_verify_offsets_scratch[r] = static_cast<i64>(offset.verify);
    args.out_write_offsets[r] = static_cast<i64>(offset.write);
    args.out_write_seed_slot_indices[r] = seed;
    if (r == args.bs - 1) write_totals(args, end);
  }
  report_status(args.out_status, status);
  return end;
}

// Sum over this warp's share of the requests in [begin, end), in every lane; kInFlight requests a thread at once.
template <int kInFlight>
__device__ __forceinline__ Lens sum_requests(const PlanOffsetsArgs& args, i64 begin, i64 end) {
  Lens sum = {0, 0};
  int ignored_status = 0;  // the tile that owns the request reports it
#pragma unroll kInFlight
  for (i64 r = begin + threadIdx.x; r < end; r += blockDim.x) sum = sum + load_request(args, r, ignored_status).lens;
  return warp_sum<kWarpSize>(sum);
}

__device__ __forceinline__ PlanOffsetsArgs with_batch_size(PlanOffsetsArgs args) {
  args.bs = batch_size(args.bs, args.bs_on_device);
  return args;
}

// Whether a block has nothing to plan; of an empty batch the first block writes the totals.
__device__ __forceinline__ bool is_behind_batch(const PlanOffsetsArgs& args, i64 begin) {
  if (begin < args.bs) return false;
  if (begin == 0 && threadIdx.x == 0) write_totals(args, {0, 0});
  return true;
}

// The whole plan in one launch. Grid: ceil(bs / blockDim.x), at least 1.
extern "C" __global__ void __launch_bounds__(kPlanOffsetsSingleThreads) kvc_plan_offsets(const PlanOffsetsArgs launched) {
  const PlanOffsetsArgs args = with_batch_size(launched);
  const i64 begin = static_cast<i64>(blockIdx.x) * blockDim.x;
  if (is_behind_batch(args, begin)) return;
  Lens before = {0, 0};
  if (begin > 0) before = sum_requests<4>(args, 0, begin);
  plan_row<kPlanOffsetsSingleThreads>(args, begin + threadIdx.x, {0, 0}, before);
}

// First of three launches: each block leaves its tile's sums in the offsets at the tile's start.
extern "C" __global__ void __launch_bounds__(kPlanOffsetsTileThreads)
    kvc_plan_offsets_tile_sums(const PlanOffsetsArgs launched) {
  const PlanOffsetsArgs args = with_batch_size(launched);
  const i64 begin = static_cast<i64>(blockIdx.x) * kPlanOffsetsTile;
  if (begin >= args.bs) return;
  const i64 end = clamp(begin + kPlanOffsetsTile, 0, args.bs);
  const Lens sum = sum_before_warp<kPlanOffsetsTileThreads>({0, 0}, sum_requests<2>(args, begin, end));
  if (threadIdx.x == 0) {
    args.out_verify_offsets_scratch[begin] = static_cast<i64>(sum.verify);
    args.out_write_offsets[begin] = static_cast<i64>(sum.write);
  }
}

// Second: one block turns the tiles' sums into their exclusive prefix sums, in place.
extern "C" __global__ void __launch_bounds__(kPlanOffsetsScanThreads)
    kvc_plan_offsets_scan_sums(const PlanOffsetsArgs launched) {
  const PlanOffsetsArgs args = with_batch_size(launched);
  Lens carry = {0, 0};
  for (i64 first_r = 0; first_r < args.bs; first_r += static_cast<i64>(blockDim.x) * kPlanOffsetsTile) {
    const i64 r = first_r + static_cast<i64>(threadIdx.x) * kPlanOffsetsTile;
    Lens own = {0, 0};
    if (r < args.bs) {
      own = {static_cast<u64>(args.out_verify_offsets_scratch[r]), static_cast<u64>(args.out_write_offsets[r])};
    }
    const Lens inclusive = warp_inclusive_scan(own, threadIdx.x % kWarpSize);
    const Lens end = carry + sum_before_warp<kPlanOffsetsScanThreads>(inclusive, {0, 0}) + inclusive;
    if (r < args.bs) {
      const Lens offset = end - own;
      args.out_verify_offsets_scratch[r] = static_cast<i64>(offset.verify);
      args.out_write_offsets[r] = static_cast<i64>(offset.write);
    }
    carry = from_last_thread(end);
  }
}

// Blocks of tiles that fill a multiprocessor's threads: 1024 on 7.5, 1536 on 8.6, 8.9 and 12.0, 2048 on the others.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kTileBlocks = 1024 / kPlanOffsetsTileThreads;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200)
constexpr int kTileBlocks = 1536 / kPlanOffsetsTileThreads;
#else
constexpr int kTileBlocks = 2048 / kPlanOffsetsTileThreads;
#endif

// Third: each block plans its tile, row by row, from the sums that stand at the tile's start. All threads have read
// those before the first row's barrier, behind which they are overwritten. Grid: ceil(bs / kPlanOffsetsTile).
extern "C" __global__ void __launch_bounds__(kPlanOffsetsTileThreads, kTileBlocks)
    kvc_plan_offsets_tiles(const PlanOffsetsArgs launched) {
  const PlanOffsetsArgs args = with_batch_size(launched);
  const i64 begin = static_cast<i64>(blockIdx.x) * kPlanOffsetsTile;
  if (is_behind_batch(args, begin)) return;
  Lens carry = {static_cast<u64>(args.out_verify_offsets_scratch[begin]),
                static_cast<u64>(args.out_write_offsets[begin])};
  for (i64 row = begin; row < begin + kPlanOffsetsTile; row += blockDim.x) {
    carry = from_last_thread(plan_row<kPlanOffsetsTileThreads>(args, row + threadIdx.x, carry, {0, 0}));
  }
}
