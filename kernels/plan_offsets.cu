// Plan offsets: exclusive prefix sums of each request's verify and write lengths, and its chain seed slot.
// One thread owns one request, one block a tile of blockDim.x consecutive ones. No atomics but the status bits.
// Small batches: one launch, each block sums all requests before its tile itself, so that no block waits for another.
// Large ones: totals of the tiles, scan of the totals, then the tiles; an output element at each tile's start carries
// its sums between the launches. Rows and prefixes out of range are padded or clamped. Cost: 48 bytes a request.

struct PlanOffsetsArgs {
  IndexArray req_pool_indices;
  IndexArray prefix_lens;
  IndexArray extend_seq_lens;
  IndexArray req_to_token;
  IndexArray full_to_swa_index_mapping;
  i64* out_verify_offsets_scratch;
  i64* out_write_offsets;
  i64* out_write_seed_slot_indices;
  int* out_verify_num_valid;
  int* out_verify_enable;
  int* out_write_num_valid_reqs;
  int* out_status;
  i64 bs;
  i64 max_reqs;
  i64 max_seq_len;
  i64 req_to_token_stride0;
  i64 lut_len;
  i64 swa_window_size;
  i64 verify_capacity;
  i64 requests_per_tile;
};

// Sums wrap like NumPy's: a hostile length must not be undefined behaviour.
struct Lens {
  u64 verify;
  u64 write;

  __device__ __forceinline__ Lens operator+(const Lens& other) const {
    return {verify + other.verify, write + other.write};
  }
};

struct Request {
  i64 row;  // kReqPoolIdxPadding: contributes nothing
  i64 prefix_len;
  Lens lens;
};

__device__ __forceinline__ Request load_request(const PlanOffsetsArgs& args, i64 r, int& status) {
  i64 row = args.req_pool_indices[r];
  i64 prefix_len = args.prefix_lens[r];
  const i64 extend_seq_len = args.extend_seq_lens[r];
  if (row < 0 || row >= args.max_reqs) {
    status |= kStatusRequestRowOutOfRange;
    row = kReqPoolIdxPadding;
  }
  if (row == kReqPoolIdxPadding) return {row, 0, {0, 0}};
  if (prefix_len > args.max_seq_len) status |= kStatusPrefixLenOutOfRange;
  prefix_len = clamp(prefix_len, 0, args.max_seq_len);
  const i64 window = args.swa_window_size;
  const i64 verify_len = window > 0 && prefix_len > window ? window : prefix_len;
  return {row, prefix_len, {static_cast<u64>(verify_len), static_cast<u64>(extend_seq_len > 0 ? extend_seq_len : 0)}};
}

__device__ __forceinline__ i64 load_seed(const PlanOffsetsArgs& args, const Request& request, int& status) {
  if (request.prefix_len == 0 || request.lens.write == 0) return -1;
  const i64 slot = args.req_to_token[request.row * args.req_to_token_stride0 + request.prefix_len - 1];
  return map_to_swa(slot, args.full_to_swa_index_mapping, args.lut_len, status);
}

__device__ __forceinline__ Lens warp_inclusive_scan(Lens sum, int lane) {
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Lens before = {__shfl_up_sync(kFullWarp, sum.verify, distance), __shfl_up_sync(kFullWarp, sum.write, distance)};
    if (lane >= distance) sum = sum + before;
  }
  return sum;
}

__device__ __forceinline__ Lens warp_sum(Lens sum) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    sum = sum + Lens{__shfl_xor_sync(kFullWarp, sum.verify, distance), __shfl_xor_sync(kFullWarp, sum.write, distance)};
  }
  return sum;
}

// Exclusive prefix sum of `own` over the block's threads, plus the sum of all threads' `before`.
// Every thread takes part, in whole warps; `block_total` becomes the sum of everything.
__device__ __forceinline__ Lens block_exclusive_scan(Lens own, Lens before, Lens& block_total) {
  __shared__ Lens warp_own[kMaxBlockThreads / kWarpSize];
  __shared__ Lens warp_before[kMaxBlockThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int num_warps = blockDim.x / kWarpSize;

  const Lens inclusive = warp_inclusive_scan(own, lane);
  const Lens warp_before_sum = warp_sum(before);
  if (lane == kWarpSize - 1) {
    warp_own[warp] = inclusive;
    warp_before[warp] = warp_before_sum;
  }
  __syncthreads();
  // Each warp adds up the others' sums for itself: cheaper than a second barrier.
  const bool is_warp = lane < num_warps;
  const Lens none = {0, 0};
  const Lens warps_own = is_warp ? warp_own[lane] : none;
  const Lens warps_before = is_warp ? warp_before[lane] : none;
  block_total = warp_sum(warps_own + warps_before);
  const Lens base = warp_sum(warps_before + (lane < warp ? warps_own : none));
  return {base.verify + inclusive.verify - own.verify, base.write + inclusive.write - own.write};
}

// Plans the block's tile; `before` holds this thread's share of the sums of all requests ahead of the tile.
__device__ __forceinline__ void plan_tile(const PlanOffsetsArgs& args, Lens before) {
  const i64 bs = args.bs;
  const i64 r = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  int status = 0;
  Request request = {kReqPoolIdxPadding, 0, {0, 0}};
  if (r < bs) request = load_request(args, r, status);
  const i64 seed = load_seed(args, request, status);  // its latency hides behind the scan

  Lens total;
  const Lens offset = block_exclusive_scan(request.lens, before, total);
  if (r < bs) {
    args.out_verify_offsets_scratch[r] = static_cast<i64>(offset.verify);
    args.out_write_offsets[r] = static_cast<i64>(offset.write);
    args.out_write_seed_slot_indices[r] = seed;
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    const i64 total_verify = static_cast<i64>(total.verify);
    const bool fits = total_verify <= args.verify_capacity;
    args.out_verify_offsets_scratch[bs] = total_verify;
    args.out_write_offsets[bs] = static_cast<i64>(total.write);
    *args.out_verify_num_valid = static_cast<int>(fits ? total_verify : args.verify_capacity);
    *args.out_verify_enable = fits ? 1 : 0;
    *args.out_write_num_valid_reqs = static_cast<int>(bs);
  }
  report_status(args.out_status, status);
}

// Sum over this thread's share of the requests in [begin, end).
__device__ __forceinline__ Lens sum_requests(const PlanOffsetsArgs& args, i64 begin, i64 end) {
  Lens sum = {0, 0};
  int ignored_status = 0;  // the tile that owns the request reports it
#pragma unroll 4
  for (i64 r = begin + threadIdx.x; r < end; r += blockDim.x) sum = sum + load_request(args, r, ignored_status).lens;
  return sum;
}

// The whole plan in one launch. Grid: ceil(bs / blockDim.x), at least 1.
extern "C" __global__ void __launch_bounds__(kMaxBlockThreads) kvc_plan_offsets(const PlanOffsetsArgs args) {
  plan_tile(args, sum_requests(args, 0, static_cast<i64>(blockIdx.x) * blockDim.x));
}

// First of three launches: each block leaves its tile's sums in the offsets at the tile's start.
extern "C" __global__ void __launch_bounds__(kMaxBlockThreads) kvc_plan_offsets_tile_sums(const PlanOffsetsArgs args) {
  const i64 begin = static_cast<i64>(blockIdx.x) * args.requests_per_tile;
  const i64 end = clamp(begin + args.requests_per_tile, 0, args.bs);
  Lens total;
  block_exclusive_scan({0, 0}, sum_requests(args, begin, end), total);
  if (threadIdx.x == 0) {
    args.out_verify_offsets_scratch[begin] = static_cast<i64>(total.verify);
    args.out_write_offsets[begin] = static_cast<i64>(total.write);
  }
}

// Second: one block turns the tiles' sums into their exclusive prefix sums, in place.
extern "C" __global__ void __launch_bounds__(kMaxBlockThreads) kvc_plan_offsets_scan_sums(const PlanOffsetsArgs args) {
  const i64 num_tiles = (args.bs + args.requests_per_tile - 1) / args.requests_per_tile;
  Lens carry = {0, 0};
  for (i64 first_tile = 0; first_tile < num_tiles; first_tile += blockDim.x) {
    const i64 tile = first_tile + threadIdx.x;
    const i64 r = tile * args.requests_per_tile;
    Lens own = {0, 0};
    if (tile < num_tiles) {
      own = {static_cast<u64>(args.out_verify_offsets_scratch[r]), static_cast<u64>(args.out_write_offsets[r])};
    }
    Lens chunk_total;
    const Lens offset = carry + block_exclusive_scan(own, {0, 0}, chunk_total);
    if (tile < num_tiles) {
      args.out_verify_offsets_scratch[r] = static_cast<i64>(offset.verify);
      args.out_write_offsets[r] = static_cast<i64>(offset.write);
    }
    carry = carry + chunk_total;
    __syncthreads();  // the next round writes the shared sums again
  }
}

// Third: each block plans its tile from the sums that stand at the tile's start. Grid: ceil(bs / blockDim.x), and
// blockDim.x is requests_per_tile. Thread 0 alone reads them, and it alone overwrites them later.
extern "C" __global__ void __launch_bounds__(kMaxBlockThreads) kvc_plan_offsets_tiles(const PlanOffsetsArgs args) {
  Lens before = {0, 0};
  if (threadIdx.x == 0) {
    const i64 r = static_cast<i64>(blockIdx.x) * blockDim.x;
    before = {static_cast<u64>(args.out_verify_offsets_scratch[r]), static_cast<u64>(args.out_write_offsets[r])};
  }
  plan_tile(args, before);
}
