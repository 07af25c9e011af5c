// Verify: every slot that is about to be read holds the record that the page table implies; violations for those that
// do not. kvc_verify takes materialised entries, kvc_verify_batch reads the page table itself. Each warp owns a run of
// consecutive entries; where an entry's predecessor is the entry before, the lane before has its record. Atomics:
// counters, violations, status. What is out of range is reported, never read. Cost: 4 bytes an entry (32 materialised),
// 32 and the hashed KV bytes in each buffer.

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
  int request;      // of the batch; -1: unknown
  bool is_present;  // false: there is nothing to check
  bool is_first;    // it has no predecessor
  bool follows;     // its predecessor is the entry before it
};

__device__ __forceinline__ Entry absent_entry() { return {-1, 0, -1, -1, false, false, false}; }

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

// Reports what is wrong with an entry, if anything: the rule in full, for the few that are not plainly right.
template <typename Chain>
__device__ __forceinline__ void examine(const CanaryBuffer& buffer, const VerifyOptions& options, const Entry& entry,
                                        const Origin& origin, const Record& record, u64 real_kv_hash) {
  const i64 prev_slot = origin.prev_slot;
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
  if (bits == 0) return;
  i64* details = record_violation(buffer, {entry.slot, static_cast<i64>(record.position),
                                           static_cast<i64>(record.token), expected_token,
                                           static_cast<i64>(record.prev_hash), static_cast<i64>(expected_hash), bits});
  if (details == nullptr) return;
  store_details(details, origin);
  store_link(buffer, options, prev_slot, details + kDetailPrevRecord);
  store_link(buffer, options, origin.next_slot, details + kDetailNextRecord);
  details[kDetailRealKvHashes] = static_cast<i64>(record.real_kv_hash);
  details[kDetailRealKvHashes + 1] = static_cast<i64>(real_kv_hash);
}

// Hands each warp a run of consecutive entries of its block's kGroup buffers, and counts. A walk gives the entries to all
// lanes, in ascending order. It begins one entry before the run, so that the run's first entry has its predecessor beside
// it. A row of 32 entries is looked up while the records of the row before are on their way. Where a walk is plain, nothing
// but chain and position is to be checked: no real KV, no tokens; records have parts of 16 bytes, and buffers as many slots.
template <typename Chain, int kGroup, typename Walk>
__device__ __forceinline__ void verify_entries(const CanaryBuffer* all_buffers, const VerifyOptions& options,
                                               const int* enable, int num_entries, Walk& walk) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned num_groups = static_cast<unsigned>(options.num_buffers) / kGroup;
  const unsigned block = blockIdx.x / num_groups;
  const CanaryBuffer* buffers = all_buffers + blockIdx.x % num_groups * kGroup;
  const unsigned warps_per_block = blockDim.x / kWarpSize;
  const unsigned num_warps = gridDim.x / num_groups * warps_per_block;
  const unsigned warp = block * warps_per_block + threadIdx.x / kWarpSize;
  // Entries fit 31 bits, and so do those that a run or two have more.
  const unsigned run_len = (static_cast<unsigned>(num_entries) + num_warps - 1) / num_warps;
  const unsigned begin = warp * run_len;
  const unsigned end = min(begin + run_len, static_cast<unsigned>(num_entries));
  if (begin < end) {
    const unsigned walk_begin = begin > 0 ? begin - 1 : 0;
    walk.start(walk_begin, end);
    u64 carried_links[kGroup] = {};  // of the last lane's entry in the row before, for lane 0
    unsigned carried_is_read = 0;
    int num_skipped = 0;
    Entry next = absent_entry();
    if (Walk::kIsPlain) next = walk.entry(walk_begin + lane);
    for (unsigned first = walk_begin; first < end; first += kWarpSize) {
      const Entry entry = Walk::kIsPlain ? next : walk.entry(first + lane);
      const bool is_read = buffers[0].has_slot(entry.slot) && entry.slot != options.padding_slot;
      Record records[kGroup];
      u64 real_kv_hashes[kGroup];
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        records[g] = {0, 0, 0, 0};
        if (is_read) records[g] = Walk::kIsPlain ? buffers[g].load_aligned(entry.slot) : buffers[g].load(entry.slot);
      }
      if (Walk::kIsPlain) next = walk.entry(first + kWarpSize + lane);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        real_kv_hashes[g] = Walk::kIsPlain ? 0 : walk.hash_real_kv(buffers[g], entry.slot, is_read);
      }
      const unsigned is_read_mask = __ballot_sync(kFullWarp, is_read);
      const bool is_before_read = (is_read_mask << 1 | carried_is_read) >> lane & 1;
      carried_is_read = is_read_mask >> (kWarpSize - 1);
      const bool may_be_right = is_read && (entry.is_first || (entry.follows && is_before_read));
      bool is_right = true;
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        const Record& record = records[g];
        // A rotation: lane 0 gets the last lane's value, which it needs in the next row.
        const u64 link = Chain::link(record.prev_hash, record.token, record.position);
        const u64 rotated = __shfl_sync(kFullWarp, link, (lane + kWarpSize - 1) % kWarpSize);
        const u64 link_before = lane == 0 ? carried_links[g] : rotated;
        carried_links[g] = rotated;
        const u64 expected_hash = entry.is_first ? anchor_hash() : link_before;
        // One comparison: each of the three is zero where it is right.
        is_right &= ((record.prev_hash ^ expected_hash) | (record.position ^ static_cast<u64>(entry.position)) |
                     (record.real_kv_hash ^ real_kv_hashes[g])) == 0;
        is_right &= Walk::kIsPlain || !options.check_verify_expected_token || entry.expected_token == -1 ||
                    record.token == static_cast<u64>(entry.expected_token);
      }
      if (!(may_be_right && is_right) && entry.is_present && first + lane >= begin) {
        const Origin origin = walk.origin(first + lane, entry);
#pragma unroll 1
        for (int g = 0; g < kGroup; ++g) {
          Record record = records[0];
          // Not kept in registers: its number is not known to the compiler.
          if (g > 0 && is_read) record = buffers[g].load_aligned(entry.slot);
          examine<Chain>(buffers[g], options, entry, origin, record, real_kv_hashes[0]);
        }
        num_skipped += options.is_padding(entry.slot) || options.is_padding(origin.prev_slot);
      }
    }
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      num_skipped += __shfl_xor_sync(kFullWarp, num_skipped, distance);
    }
    for (int g = 0; g < kGroup; ++g) {
      if (lane == 0 && num_skipped != 0 && buffers[g].skip_counters != nullptr) {
        count(buffers[g].skip_counters, num_skipped);
      }
    }
  }
  if (block == 0 && threadIdx.x < kGroup) {
    const CanaryBuffer& buffer = buffers[threadIdx.x];
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
  unsigned end;

  __device__ __forceinline__ void start(unsigned, unsigned run_end) { end = run_end; }

  __device__ __forceinline__ Entry entry(unsigned t) const {
    if (t >= end) return absent_entry();
    const i64 prev_slot = __ldcs(args.verify_prev_slot_indices + t);
    return {__ldcs(args.verify_slot_indices + t),
            __ldcs(args.verify_expected_positions + t),
            __ldcs(args.verify_expected_tokens + t),
            -1,
            true,
            prev_slot < 0,
            t > 0 && __ldg(args.verify_slot_indices + t - 1) == prev_slot};
  }

  __device__ __forceinline__ u64 hash_real_kv(const CanaryBuffer& buffer, i64 slot, bool is_read) const {
    return is_read ? buffer.hash_real_kv(slot) : 0;
  }

  __device__ __forceinline__ Origin origin(unsigned t, const Entry& entry) const {
    return {-1, -1, entry.position, __ldg(args.verify_prev_slot_indices + t), -1};
  }
};

template <typename Chain>
__device__ __forceinline__ void verify(const VerifyArgs& args) {
  PlanWalk walk = {args, 0};
  verify_entries<Chain, 1>(args.buffers, args.options, args.enable,
                           entries_to_check(args.enable, args.verify_num_valid, args.verify_capacity), walk);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify(const __grid_constant__ VerifyArgs args) {
  verify<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_affine(const __grid_constant__ VerifyArgs args) {
  verify<AffineChain>(args);
}

// ---- KV bytes of a warp's slots together ------------------------------------------------------------------------

constexpr int kStagedParts = 8;  // of 16 bytes of each slot that a warp has in shared memory
constexpr int kLanesApart = kWarpSize / kStagedParts;

// Each lane hashes a slot of its own, but lanes that each walk bytes of their own touch 32 lines of memory at every
// step. So the warp loads 128 bytes of each slot, 8 lanes one slot's, and hands them over through shared memory. The next
// 128 are on their way meanwhile. `bytes` is the lane's slot; null: none, and its hash means nothing.
__device__ __forceinline__ u64 hash_together(const unsigned char* bytes, i64 num_bytes) {
  // A part more for each slot, so that lanes that read theirs meet in no bank.
  __shared__ ulonglong2 staged[kVerifyThreads / kWarpSize][kWarpSize][kStagedParts + 1];
  ulonglong2(*slots)[kStagedParts + 1] = staged[threadIdx.x / kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  const int part = lane % kStagedParts;
  const unsigned char* parts[kStagedParts];  // of the slots of lanes kLanesApart from each other
#pragma unroll
  for (int k = 0; k < kStagedParts; ++k) {
    const u64 of_slot = __shfl_sync(kFullWarp, reinterpret_cast<u64>(bytes), lane / kStagedParts + k * kLanesApart);
    parts[k] = of_slot == 0 ? nullptr : reinterpret_cast<const unsigned char*>(of_slot) + part * 16;
  }
  ulonglong2 loaded[kStagedParts];
  const auto load = [&](i64 offset) {
#pragma unroll
    for (int k = 0; k < kStagedParts; ++k) {
      loaded[k] = make_ulonglong2(0, 0);
      if (parts[k] != nullptr && offset + part * 16 < num_bytes) {
        loaded[k] = __ldcs(reinterpret_cast<const ulonglong2*>(parts[k] + offset));
      }
    }
  };
  u64 hash = 0;
  load(0);
  for (i64 offset = 0; offset < num_bytes; offset += kStagedParts * 16) {
    // The parts before were read.
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kStagedParts; ++k) slots[lane / kStagedParts + k * kLanesApart][part] = loaded[k];
    __syncwarp();
    load(offset + kStagedParts * 16);
#pragma unroll
    for (int k = 0; k < kStagedParts; ++k) {
      if (offset + k * 16 < num_bytes) hash = splitmix64(splitmix64(hash ^ slots[lane][k].x) ^ slots[lane][k].y);
    }
  }
  return hash;
}

// The same hash as `CanaryBuffer::hash_real_kv`, by all lanes of a warp.
__device__ __forceinline__ u64 hash_real_kv_together(const CanaryBuffer& buffer, i64 slot, bool is_read) {
  u64 hash = 0;
  for (i64 s = 0; s < buffer.num_real_kv_sources; ++s) {
    const RealKvSource& source = buffer.real_kv_sources[s];
    hash = splitmix64(hash ^ hash_together(is_read ? source.bytes(slot) : nullptr, source.num_hashed_bytes));
  }
  return is_read ? hash : 0;
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

enum class BatchKind {
  kGeneral,
  kWideKv,  // with real KV of many bytes a slot
  kPlain,   // the common one: a table of int32 slots, no mapping, no expected tokens, no real KV
};

// The entries of a batch as its page table implies them. Without the branches that a plain batch does not need, an entry
// costs half the instructions.
template <BatchKind kKind>
struct BatchWalk {
  static constexpr bool kIsPlain = kKind == BatchKind::kPlain;
  const VerifyBatchArgs& args;
  int bs;
  unsigned run_end;
  int r;
  unsigned begin;       // of the entries of request r
  unsigned end;         // 0 before a lane has looked at a request
  unsigned end_of_row;  // of those that its row has
  i64 first_position;   // position of an entry t: first_position + t
  i64 row;
  const int* row_slots;  // of a plain batch
  int status;

  // Last request whose offset is at most t, searched by the whole warp: 32 offsets a step.
  __device__ __forceinline__ void start(unsigned t, unsigned end_of_run) {
    const int lane = threadIdx.x % kWarpSize;
    run_end = end_of_run;
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
  __device__ __forceinline__ void advance(unsigned t) {
    end_of_row = 0;
    end = run_end;
    if (t >= run_end) return;
    const i64* offsets = args.verify_offsets_scratch;
    int step = 1;
    while (step < bs - r && __ldg(offsets + r + step) <= t) {
      r += step;
      step *= 2;
    }
    for (step /= 2; step > 0; step /= 2) {
      if (step < bs - r && __ldg(offsets + r + step) <= t) r += step;
    }
    const i64 first = __ldg(offsets + r);
    const i64 behind = __ldg(offsets + r + 1);
    const ReadRange range = range_of(r);
    // Offsets that are not those of this batch must not lead outside of the row.
    if (first < 0 || first > t) return;
    begin = static_cast<unsigned>(first);
    end = static_cast<unsigned>(clamp(behind, 0, run_end));
    end_of_row = static_cast<unsigned>(clamp(first + range.prefix_len - range.window_start, 0, run_end));
    first_position = range.window_start - first;
    row = range.row;
    row_slots = slots_of(row);
  }

  __device__ __forceinline__ ReadRange range_of(int request) {
    return read_range(args.page_table, args.req_pool_indices[request], args.prefix_lens[request], args.swa_window_size,
                      status);
  }

  __device__ __forceinline__ const int* slots_of(i64 of_row) const {
    return static_cast<const int*>(args.page_table.entries.data) + of_row * args.page_table.stride0;
  }

  __device__ __forceinline__ i64 slot_at(i64 of_row, i64 position, int& status) const {
    if (kIsPlain) return __ldg(slots_of(of_row) + position);
    return map_to_swa(args.page_table.slot(of_row, position), args.full_to_swa_index_mapping, args.lut_len, status);
  }

  __device__ __forceinline__ i64 expected_token_at(i64 position) const {
    if (kIsPlain || row >= args.expected_rows) return -1;
    const i64 index = position + args.kv_token_id_vs_position_offset;
    if (index < 0 || index >= args.expected_width || index >= args.expected_valid_lens[r]) return -1;
    return __ldg(args.expected_tokens + row * args.expected_stride0 + index);
  }

  __device__ __forceinline__ Entry entry(unsigned t) {
    if (t >= end) advance(t);
    if (t >= end_of_row) return absent_entry();
    const i64 position = first_position + t;
    const i64 slot = kIsPlain ? __ldg(row_slots + position) : slot_at(row, position, status);
    return {slot, position, expected_token_at(position), r, true, position == 0, t > begin};
  }

  __device__ __forceinline__ u64 hash_real_kv(const CanaryBuffer& buffer, i64 slot, bool is_read) const {
    if (kKind == BatchKind::kWideKv) return hash_real_kv_together(buffer, slot, is_read);
    return is_read ? buffer.hash_real_kv(slot) : 0;
  }

  __device__ __forceinline__ Origin origin(unsigned, const Entry& entry) {
    const ReadRange range = range_of(entry.request);
    const i64 next = entry.position + 1;
    int ignored = 0;  // it is the status of another entry
    return {entry.request, range.row, entry.position,
            entry.is_first ? -1 : slot_at(range.row, entry.position - 1, status),
            next < range.prefix_len ? slot_at(range.row, next, ignored) : -1};
  }
};

template <typename Chain, BatchKind kKind, int kGroup = 1>
__device__ __forceinline__ void verify_batch(const VerifyBatchArgs& args) {
  const int bs = static_cast<int>(batch_size(args.bs, args.bs_on_device));
  const int num_entries =
      bs == 0 ? 0 : entries_to_check(args.verify_enable, args.verify_num_valid, args.verify_capacity);
  BatchWalk<kKind> walk = {args, bs, 0, 0, 0, 0, 0, 0, 0, nullptr, 0};
  verify_entries<Chain, kGroup>(args.buffers, args.options, args.verify_enable, num_entries, walk);
  report_status(args.out_status, walk.status);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_batch(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, BatchKind::kGeneral>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kBlocks)
    kvc_verify_batch_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, BatchKind::kGeneral>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyLargeBlocks)
    kvc_verify_batch_wide(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, BatchKind::kWideKv>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyLargeBlocks)
    kvc_verify_batch_wide_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, BatchKind::kWideKv>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
    kvc_verify_batch_plain(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, BatchKind::kPlain>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks)
    kvc_verify_batch_plain_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, BatchKind::kPlain>(args);
}

// The same with four buffers to a warp: as many records on their way at once, and one lookup of the slot.
extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyLargeBlocks)
    kvc_verify_batch_plain_fours(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain, BatchKind::kPlain, kVerifyGroup>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads, kVerifyLargeBlocks)
    kvc_verify_batch_plain_fours_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain, BatchKind::kPlain, kVerifyGroup>(args);
}
