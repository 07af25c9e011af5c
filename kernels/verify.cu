// Verify: every slot that is about to be read holds the record that the page table implies; violations for those that
// do not. kvc_verify takes materialised entries, kvc_verify_batch reads the page table itself. Each warp owns a run of
// consecutive entries; where an entry's predecessor is the entry before, the lane before has its record. Atomics:
// counters, violations, status. What is out of range is reported, never read. Cost: 36 bytes an entry and buffer.

constexpr int kRows = kVerifyRows;  // of 32 entries that a warp has in flight

// Blocks on a multiprocessor of kernels that are not for plain batches: before 9.0 the compiler needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kBlocks = kVerifyBlocks - 1;
#else
constexpr int kBlocks = kVerifyBlocks;
#endif

// One thing to check: that `slot` holds `position` (and `expected_token`, unless -1) after its predecessor.
struct Entry {
  i64 slot;
  i64 position;
  i64 expected_token;
  bool is_checked;  // false: it is absent, or only the predecessor of the first entry of a warp's run
  bool is_first;    // it has no predecessor
  bool follows;     // its predecessor is the entry before it
};

struct VerifyOptions {
  i64 num_buffers;
  i64 padding_slot;  // -1: none
  i64 check_verify_expected_token;
  i64 check_holes;

  __device__ __forceinline__ bool is_padding(i64 slot) const { return slot >= 0 && slot == padding_slot; }
};

// Adds a neighbour's record to a violation's details, if it may be read.
__device__ __forceinline__ void store_link(const CanaryBuffer& buffer, const VerifyOptions& options, i64 slot,
                                           i64* fields) {
  if (!buffer.has_slot(slot) || options.is_padding(slot)) return;
  const Record record = buffer.load(slot);
  fields[0] = static_cast<i64>(record.token);
  fields[1] = static_cast<i64>(record.position);
  fields[2] = static_cast<i64>(record.prev_hash);
}

// Reports what is wrong with entry t, if anything: the rule in full, for the few entries that are not plainly right.
// Whether a check is left out.
template <typename Chain, typename Walk>
__device__ __forceinline__ bool examine(const CanaryBuffer& buffer, const VerifyOptions& options, Walk& walk, i64 t,
                                        const Entry& entry, const Record& record, u64 real_kv_hash) {
  const i64 prev_slot = walk.prev_slot(t, entry);
  const i64 expected_token = options.check_verify_expected_token ? entry.expected_token : -1;
  i64 bits = 0;
  u64 expected_hash = 0;
  if (prev_slot < 0) {
    expected_hash = anchor_hash();
  } else if (options.is_padding(prev_slot)) {
    expected_hash = record.prev_hash;  // unreachable: nothing is expected
  } else if (prev_slot >= buffer.num_slots) {
    bits |= kFailPredecessorOutOfRange;
  } else {
    const Record prev = buffer.load(prev_slot);
    expected_hash = Chain::link(prev.prev_hash, prev.token, prev.position);
  }
  if (options.is_padding(entry.slot)) {
    bits = options.check_holes ? kFailPageTableHole : 0;
  } else if (!buffer.has_slot(entry.slot)) {
    bits |= kFailVerifySlotOutOfRange;
  } else {
    if (bits == 0 && record.prev_hash != expected_hash) bits |= kFailVerifyChainHash;
    if (record.position != static_cast<u64>(entry.position)) bits |= kFailVerifyPosition;
    if (record.real_kv_hash != real_kv_hash) bits |= kFailVerifyRealKvHash;
    if (expected_token != -1 && record.token != static_cast<u64>(expected_token)) bits |= kFailVerifyToken;
  }
  if (bits != 0) {
    i64* details =
        record_violation(buffer, {entry.slot, static_cast<i64>(record.position), static_cast<i64>(record.token),
                                  expected_token, static_cast<i64>(record.prev_hash),
                                  static_cast<i64>(expected_hash), bits});
    if (details != nullptr) {
      const Origin origin = walk.origin(entry, prev_slot);
      store_details(details, origin);
      store_link(buffer, options, prev_slot, details + kDetailPrevRecord);
      store_link(buffer, options, origin.next_slot, details + kDetailNextRecord);
      details[kDetailRealKvHashes] = static_cast<i64>(record.real_kv_hash);
      details[kDetailRealKvHashes + 1] = static_cast<i64>(real_kv_hash);
    }
  }
  return options.is_padding(entry.slot) || options.is_padding(prev_slot);
}

// Hands each warp a run of consecutive entries of the block's buffer, and counts. A walk gives the entries to all lanes,
// in ascending order. It begins one entry before the run, so that the run's first entry has its predecessor beside it.
// In a walk with kIsPlain nothing but chain and position is to be checked: no real KV, no tokens, records of 16-byte parts.
template <typename Chain, typename Walk>
__device__ __forceinline__ void verify_entries(const CanaryBuffer& buffer, const VerifyOptions& options,
                                               const int* enable, int num_entries, Walk& walk) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned num_buffers = static_cast<unsigned>(options.num_buffers);
  const int warps_per_block = blockDim.x / kWarpSize;
  const unsigned block = blockIdx.x / num_buffers;
  const unsigned num_warps = gridDim.x / num_buffers * warps_per_block;
  const unsigned warp = block * warps_per_block + threadIdx.x / kWarpSize;
  const i64 run_len = (static_cast<unsigned>(num_entries) + num_warps - 1) / num_warps;
  const i64 begin = warp * run_len;
  const i64 end = min(begin + run_len, static_cast<i64>(num_entries));
  if (begin < end) {
    const i64 walk_begin = begin > 0 ? begin - 1 : 0;
    walk.start(walk_begin);
    u64 carried_link = 0;  // of the last lane's entry in the row before, for lane 0
    unsigned carried_is_read = 0;
    int num_skipped = 0;
    for (i64 first = walk_begin; first < end; first += kRows * kWarpSize) {
      Entry entries[kRows];
      Record records[kRows];
      u64 real_kv_hashes[kRows];
      bool is_read[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const i64 t = first + k * kWarpSize + lane;
        entries[k] = walk.entry(t, t < end);
        entries[k].is_checked &= t >= begin;
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const i64 slot = entries[k].slot;
        is_read[k] = buffer.has_slot(slot) && slot != options.padding_slot;
        records[k] = {0, 0, 0, 0};
        real_kv_hashes[k] = 0;
        if (is_read[k]) records[k] = Walk::kIsPlain ? buffer.load_aligned(slot) : buffer.load(slot);
        if (is_read[k] && !Walk::kIsPlain) real_kv_hashes[k] = buffer.hash_real_kv(slot);
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Entry& entry = entries[k];
        const Record& record = records[k];
        const unsigned is_read_mask = __ballot_sync(kFullWarp, is_read[k]);
        const bool is_before_read = lane == 0 ? carried_is_read : is_read_mask >> (lane - 1) & 1;
        carried_is_read = is_read_mask >> (kWarpSize - 1);
        // A rotation: lane 0 gets the last lane's value, which it needs in the next row.
        const u64 link = Chain::link(record.prev_hash, record.token, record.position);
        const u64 rotated = __shfl_sync(kFullWarp, link, (lane + kWarpSize - 1) % kWarpSize);
        const u64 link_before = lane == 0 ? carried_link : rotated;
        carried_link = rotated;

        const u64 expected_hash = entry.is_first ? anchor_hash() : link_before;
        const bool is_right = is_read[k] && (entry.is_first || (entry.follows && is_before_read)) &&
                              record.prev_hash == expected_hash &&
                              record.position == static_cast<u64>(entry.position) &&
                              record.real_kv_hash == real_kv_hashes[k] &&
                              (Walk::kIsPlain || !options.check_verify_expected_token || entry.expected_token == -1 ||
                               record.token == static_cast<u64>(entry.expected_token));
        if (entry.is_checked && !is_right) {
          const i64 t = first + k * kWarpSize + lane;
          num_skipped += examine<Chain>(buffer, options, walk, t, entry, record, real_kv_hashes[k]);
        }
      }
    }
    if (buffer.skip_counters != nullptr) {
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        num_skipped += __shfl_xor_sync(kFullWarp, num_skipped, distance);
      }
      if (lane == 0 && num_skipped != 0) count(buffer.skip_counters, num_skipped);
    }
  }
  if (block == 0 && threadIdx.x == 0) {
    count(buffer.slot_run_counter, num_entries);
    count(buffer.kernel_run_counter, 1);
    if (buffer.skip_counters != nullptr && __ldg(enable) == 0) count(buffer.skip_counters + 1, 1);
  }
}

__device__ __forceinline__ int entries_to_check(const int* enable, const int* num_valid, i64 capacity) {
  return __ldg(enable) == 0 ? 0 : static_cast<int>(clamp(__ldg(num_valid), 0, capacity));
}

// ---- materialised entries -------------------------------------------------------------------------------------

struct VerifyArgs {
  CanaryBuffer buffers[kMaxBuffers];
  VerifyOptions options;
  const i64* verify_slot_indices;
  const i64* verify_expected_tokens;
  const i64* verify_expected_positions;
  const i64* verify_prev_slot_indices;
  const int* verify_num_valid;
  const int* enable;
  i64 verify_capacity;
};

// The entries as they stand in the arrays.
struct PlanWalk {
  static constexpr bool kIsPlain = false;
  const VerifyArgs& args;

  __device__ __forceinline__ void start(i64) {}

  __device__ __forceinline__ Entry entry(i64 t, bool is_in_run) const {
    if (!is_in_run) return {-1, 0, -1, false, false, false};
    const i64 prev_slot = __ldg(args.verify_prev_slot_indices + t);
    return {__ldg(args.verify_slot_indices + t),
            __ldg(args.verify_expected_positions + t),
            __ldg(args.verify_expected_tokens + t),
            true,
            prev_slot < 0,
            t > 0 && __ldg(args.verify_slot_indices + t - 1) == prev_slot};
  }

  __device__ __forceinline__ i64 prev_slot(i64 t, const Entry&) const { return __ldg(args.verify_prev_slot_indices + t); }

  __device__ __forceinline__ Origin origin(const Entry& entry, i64 prev_slot) const {
    return {-1, -1, entry.position, prev_slot, -1};
  }
};

template <typename Chain>
__device__ __forceinline__ void verify(const VerifyArgs& args) {
  PlanWalk walk = {args};
  verify_entries<Chain>(args.buffers[blockIdx.x % static_cast<unsigned>(args.options.num_buffers)], args.options,
                        args.enable, entries_to_check(args.enable, args.verify_num_valid, args.verify_capacity), walk);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify(const __grid_constant__ VerifyArgs args) {
  verify<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_affine(const __grid_constant__ VerifyArgs args) {
  verify<AffineChain>(args);
}

// ---- straight from the page table -----------------------------------------------------------------------------

struct VerifyBatchArgs {
  CanaryBuffer buffers[kMaxBuffers];
  VerifyOptions options;
  IndexArray req_pool_indices;
  IndexArray prefix_lens;
  PageTable page_table;
  IndexArray full_to_swa_index_mapping;
  const i64* verify_offsets_scratch;
  const int* verify_num_valid;
  const int* verify_enable;
  const int* expected_tokens;  // [expected_rows, expected_width], null: none
  IndexArray expected_valid_lens;
  int* out_status;
  const int* bs_on_device;
  i64 bs;  // where bs_on_device is given: the most that it may say
  i64 lut_len;
  i64 swa_window_size;
  i64 verify_capacity;
  i64 expected_rows;
  i64 expected_width;
  i64 expected_stride0;
  i64 kv_token_id_vs_position_offset;
};

// The entries of a batch as its page table implies them. A plain batch, the common one, has a table of int32 slots,
// no mapping and no expected tokens; without the branches for those, an entry costs half the instructions.
template <bool kIsPlainBatch>
struct BatchWalk {
  static constexpr bool kIsPlain = kIsPlainBatch;
  const VerifyBatchArgs& args;
  int bs;
  int status;
  int r;
  i64 end;  // of the entries of request r; 0 before a lane has looked at one
  ReadRange range;
  i64 first_position;  // position of an entry t of request r: first_position + t
  const int* row_slots;  // of the row, in a plain batch

  // Last request whose offset is at most t, searched by the whole warp: 32 offsets a step.
  __device__ __forceinline__ void start(i64 t) {
    const int lane = threadIdx.x % kWarpSize;
    r = 0;
    end = 0;
    for (int count = bs; count > 1;) {
      const int stride = (count + kWarpSize - 1) / kWarpSize;
      const bool is_at_most = lane * stride < count && __ldg(args.verify_offsets_scratch + r + lane * stride) <= t;
      const unsigned at_most = __ballot_sync(kFullWarp, is_at_most);
      const int skipped = at_most == 0 ? 0 : (kWarpSize - 1 - __clz(static_cast<int>(at_most))) * stride;
      r += skipped;
      count = count - skipped < stride ? count - skipped : stride;
    }
  }

  // Moves on to the request of entry t: by doubling steps, since many requests may be empty.
  __device__ __forceinline__ void advance(i64 t) {
    const i64* offsets = args.verify_offsets_scratch;
    int step = 1;
    while (step < bs - r && __ldg(offsets + r + step) <= t) {
      r += step;
      step *= 2;
    }
    for (step /= 2; step > 0; step /= 2) {
      if (step < bs - r && __ldg(offsets + r + step) <= t) r += step;
    }
    const i64 begin = __ldg(offsets + r);
    end = __ldg(offsets + r + 1);
    range = read_range(args.page_table, args.req_pool_indices[r], args.prefix_lens[r], args.swa_window_size, status);
    // Offsets that are not those of this batch must not lead outside of the row.
    const bool is_of_batch = begin >= 0 && begin <= t;
    if (!is_of_batch) range.prefix_len = 0;
    first_position = is_of_batch ? range.window_start - begin : 0;
    row_slots = static_cast<const int*>(args.page_table.entries.data) + range.row * args.page_table.stride0;
  }

  __device__ __forceinline__ i64 slot_at(i64 position, int& status) const {
    if (kIsPlain) return __ldg(row_slots + position);
    return map_to_swa(args.page_table.slot(range.row, position), args.full_to_swa_index_mapping, args.lut_len, status);
  }

  __device__ __forceinline__ i64 expected_token_at(i64 position) const {
    if (kIsPlain || range.row >= args.expected_rows) return -1;
    const i64 index = position + args.kv_token_id_vs_position_offset;
    if (index < 0 || index >= args.expected_width || index >= args.expected_valid_lens[r]) return -1;
    return __ldg(args.expected_tokens + range.row * args.expected_stride0 + index);
  }

  __device__ __forceinline__ Entry entry(i64 t, bool is_in_run) {
    if (!is_in_run) return {-1, 0, -1, false, false, false};
    if (t >= end) advance(t);
    const i64 position = first_position + t;
    if (position >= range.prefix_len) return {-1, 0, -1, false, false, false};
    return {slot_at(position, status), position,      expected_token_at(position),
            true,                      position == 0, position > range.window_start};
  }

  __device__ __forceinline__ i64 prev_slot(i64, const Entry& entry) {
    return entry.is_first ? -1 : slot_at(entry.position - 1, status);
  }

  __device__ __forceinline__ Origin origin(const Entry& entry, i64 prev_slot) const {
    const i64 next = entry.position + 1;
    int ignored = 0;  // it is the status of another entry
    return {r, range.row, entry.position, prev_slot, next < range.prefix_len ? slot_at(next, ignored) : -1};
  }
};

template <typename Chain, bool kIsPlain>
__device__ __forceinline__ void verify_batch(const VerifyBatchArgs& args) {
  const int bs = static_cast<int>(batch_size(args.bs, args.bs_on_device));
  const int num_entries =
      bs == 0 ? 0 : entries_to_check(args.verify_enable, args.verify_num_valid, args.verify_capacity);
  BatchWalk<kIsPlain> walk = {args, bs, 0, 0, 0, {0, 0, 0, false}, 0, nullptr};
  verify_entries<Chain>(args.buffers[blockIdx.x % static_cast<unsigned>(args.options.num_buffers)], args.options,
                        args.verify_enable, num_entries, walk);
  report_status(args.out_status, walk.status);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_batch(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, false>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_batch_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, false>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
    kvc_verify_batch_plain(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, true>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
    kvc_verify_batch_plain_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, true>(args);
}
