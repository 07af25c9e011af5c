// Write: stamps a record into the slot of every token that was just written, each chained to the one before it.
// One warp or block owns a request in one buffer; its entries go in order, in chunks, so that of entries with one slot
// the last stays. Atomics: violations, counters, status bits. Ranges that leave the token arrays are cut; slots and
// seeds that the buffer does not have are neither read nor written. Cost: 24 bytes read and 32 written an entry and
// the hashed KV bytes; the latency of three splitmix64 an entry of the longest request, or of a prefix scan (affine).

struct WriteArgs {
  const i64* write_offsets;
  const i64* write_seed_slot_indices;
  const int* write_num_valid_reqs;
  const i64* input_ids;
  const i64* positions;
  const i64* out_cache_loc;
  const i64* expected_input_tokens;  // null, with the next: no input check
  const i64* expected_input_positions;
  int* out_status;
  i64 write_req_capacity;
  i64 num_tokens;
  i64 padding_slot;  // -1: there is none
  i64 num_buffers;
  CanaryBuffer buffers[kMaxBuffers];
};

struct EntryRange {
  i64 begin;
  i64 end;
};

__device__ __forceinline__ EntryRange load_range(const WriteArgs& args, i64 r, int& status) {
  const i64 num_valid_reqs = *args.write_num_valid_reqs;
  const i64 num_reqs = clamp(num_valid_reqs, 0, args.write_req_capacity);
  if (num_reqs != num_valid_reqs) status |= kStatusWriteOffsetsInvalid;
  if (r >= args.write_req_capacity) return {0, 0};
  // Loaded beside the number of requests, not after it.
  const i64 begin = args.write_offsets[r];
  const i64 end = args.write_offsets[r + 1];
  if (r >= num_reqs) return {0, 0};
  const i64 valid_begin = clamp(begin, 0, args.num_tokens);
  const i64 valid_end = clamp(end, valid_begin, args.num_tokens);
  if (begin != valid_begin || end != valid_end) status |= kStatusWriteOffsetsInvalid;
  return {valid_begin, valid_end};
}

struct Entry {
  i64 slot;
  u64 token;
  u64 position;
  u64 expected_token;  // the token itself where it is not checked; so the position
  u64 expected_position;
};

// Past the end: an entry that is skipped.
__device__ __forceinline__ Entry load_entry(const WriteArgs& args, i64 i, i64 end) {
  if (i >= end) return {-1, 0, 0, 0, 0};
  const u64 token = static_cast<u64>(args.input_ids[i]);
  const u64 position = static_cast<u64>(args.positions[i]);
  Entry entry = {args.out_cache_loc[i], token, position, token, position};
  if (args.expected_input_tokens != nullptr) {
    entry.expected_token = static_cast<u64>(args.expected_input_tokens[i]);
    entry.expected_position = static_cast<u64>(args.expected_input_positions[i]);
  }
  return entry;
}

// Where a request's chain stands.
struct ChainEnd {
  u64 hash;
  u64 position;  // of the last entry stored
  bool checks_position;
};

// The chain's end at the seed; `is_reporter` in the one thread that records a seed that the buffer does not have.
template <class Chain>
__device__ __forceinline__ ChainEnd load_seed(const WriteArgs& args, const CanaryBuffer& buffer, i64 r,
                                              bool is_reporter) {
  const i64 seed = args.write_seed_slot_indices[r];
  const int* assertion = buffer.enable_chain_position_assert;
  const bool checks_position = assertion != nullptr && *assertion != 0;
  if (seed >= buffer.num_slots && seed != args.padding_slot && is_reporter) {
    record_violation(buffer, {seed, 0, 0, 0, 0, 0, kFailPredecessorOutOfRange});
  }
  if (!buffer.has_slot(seed) || seed == args.padding_slot) return {anchor_hash(), 0, false};
  const Record record = buffer.load(seed);
  return {Chain::link(record.prev_hash, record.token, record.position), record.position, checks_position};
}

// Records what is wrong with an entry, given the chain's end before it.
__device__ __forceinline__ void check_entry(const CanaryBuffer& buffer, const Entry& entry, const ChainEnd& before) {
  const bool has_slot = buffer.has_slot(entry.slot);
  const i64 token = static_cast<i64>(entry.token);
  const i64 position = static_cast<i64>(entry.position);
  const i64 hash = static_cast<i64>(before.hash);
  int bits = 0;
  if (has_slot && entry.token != entry.expected_token) bits |= kFailWriteToken;
  if (has_slot && entry.position != entry.expected_position) bits |= kFailWritePosition;
  if (entry.slot >= buffer.num_slots) bits |= kFailWriteSlotOutOfRange;
  if (bits != 0) {
    const i64 expected_token = has_slot ? static_cast<i64>(entry.expected_token) : token;
    const i64 expected_position = has_slot ? static_cast<i64>(entry.expected_position) : 0;
    record_violation(buffer, {entry.slot, position, token, expected_token, hash, expected_position, bits});
  }
  const u64 next = before.position + 1;
  if (has_slot && before.checks_position && entry.position != next) {
    record_violation(buffer,
                     {entry.slot, position, token, token, hash, static_cast<i64>(next), kFailWritePosition});
  }
}

__device__ __forceinline__ void count(i64* counter, i64 amount) {
  atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount));
}

// ---- the chain within a warp ------------------------------------------------------------------------------------

__device__ __forceinline__ int highest_lane(unsigned lanes) { return kWarpSize - 1 - __clz(static_cast<int>(lanes)); }

__device__ __forceinline__ unsigned lanes_before(int lane) { return (1u << lane) - 1; }

// The position in the last of the lanes that have one, or else `otherwise`.
__device__ __forceinline__ u64 last_position(u64 position, unsigned lanes, u64 otherwise) {
  const u64 last = __shfl_sync(kFullWarp, position, highest_lane(lanes));
  return lanes != 0 ? last : otherwise;
}

// h -> multiplier * h + addend: what a run of entries does to an affine chain.
struct AffineMap {
  u64 multiplier;
  u64 addend;

  __device__ __forceinline__ u64 operator()(u64 hash) const { return multiplier * hash + addend; }
  __device__ __forceinline__ AffineMap then(const AffineMap& next) const {
    return {multiplier * next.multiplier, next(addend)};
  }
};

__device__ __forceinline__ AffineMap affine_map(const Entry& entry, bool is_stored) {
  if (!is_stored) return {1, 0};
  return {kAffineMultiplier, AffineChain::addend(entry.token, entry.position)};
}

__device__ __forceinline__ AffineMap shuffle_up(const AffineMap& map, int distance) {
  return {__shfl_up_sync(kFullWarp, map.multiplier, distance), __shfl_up_sync(kFullWarp, map.addend, distance)};
}

// From the maps of the lanes: this lane's hash before its own map and, in `hash`, that behind all of them.
struct WarpScan {
  AffineMap inclusive;

  __device__ __forceinline__ WarpScan(AffineMap map, int lane) {
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const AffineMap before = shuffle_up(map, distance);
      if (lane >= distance) map = before.then(map);
    }
    inclusive = map;
  }

  __device__ __forceinline__ u64 before(u64 hash, int lane) const {
    const u64 behind_last_lane = shuffle_up(inclusive, 1)(hash);
    return lane == 0 ? hash : behind_last_lane;
  }

  __device__ __forceinline__ u64 behind(u64 hash) const {
    return __shfl_sync(kFullWarp, inclusive(hash), kWarpSize - 1);
  }
};

// The chain's hash before each lane's entry and, in `hash`, that behind all of them. Also a barrier of the warp.
// Every lane walks the whole chain, through shared memory, where skipped entries leave no gap: the hash that waits for
// the hash before is all that a step takes.
template <class Chain>
__device__ __forceinline__ u64 walk_chain(const Entry& entry, unsigned stored_lanes, int lane, u64& hash) {
  __shared__ ulonglong2 stored[kWriteThreads];
  __shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize + 1];
  const int warp = threadIdx.x / kWarpSize;
  const ulonglong2* entries = stored + warp * kWarpSize;
  const int rank = __popc(stored_lanes & lanes_before(lane));
  const int num_stored = __popc(stored_lanes);
  if (stored_lanes >> lane & 1) stored[warp * kWarpSize + rank] = make_ulonglong2(entry.token, entry.position);
  __syncwarp();
#pragma unroll 8
  for (int k = 0; k < num_stored; ++k) {
    if (lane == 0) hashes[warp][k] = hash;
    hash = Chain::link(hash, entries[k].x, entries[k].y);
  }
  if (lane == 0) hashes[warp][num_stored] = hash;
  __syncwarp();
  return hashes[warp][rank];
}

template <>
__device__ __forceinline__ u64 walk_chain<AffineChain>(const Entry& entry, unsigned stored_lanes, int lane, u64& hash) {
  const WarpScan scan(affine_map(entry, stored_lanes >> lane & 1), lane);
  const u64 hash_before = scan.before(hash, lane);
  hash = scan.behind(hash);
  __syncwarp();
  return hash_before;
}

// Grid: a warp for each buffer of each request, at least one for each buffer.
template <class Chain>
__device__ __forceinline__ void write_by_warps(const WriteArgs& args) {
  const int lane = threadIdx.x % kWarpSize;
  // Warps fit 32 bits (checked on the host).
  const unsigned warp = blockIdx.x * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  const i64 r = warp / num_buffers;
  const CanaryBuffer& buffer = args.buffers[warp % num_buffers];
  if (r == 0 && lane == 0) count(buffer.kernel_run_counter, 1);

  int status = 0;
  const EntryRange range = load_range(args, r, status);
  report_status(args.out_status, status);
  if (range.begin == range.end) return;
  Entry next = load_entry(args, range.begin + lane, range.end);
  ChainEnd end = load_seed<Chain>(args, buffer, r, lane == 0);
  i64 num_stored = 0;
  for (i64 first = range.begin; first < range.end; first += kWarpSize) {
    const Entry entry = next;
    next = load_entry(args, first + kWarpSize + lane, range.end);
    const bool has_slot = buffer.has_slot(entry.slot);
    const unsigned stored_lanes = __ballot_sync(kFullWarp, has_slot);
    // Slots that the buffer has fit 32 bits; the lanes of other slots are masked out.
    const unsigned slot_lanes = __match_any_sync(kFullWarp, static_cast<unsigned>(entry.slot)) & stored_lanes;
    const u64 real_kv_hash = has_slot ? buffer.hash_real_kv(entry.slot) : 0;

    ChainEnd before = end;
    // With it, the seed was loaded and the chunk before stored: they may be of slots that this one stores.
    before.hash = walk_chain<Chain>(entry, stored_lanes, lane, end.hash);
    before.position = last_position(entry.position, stored_lanes & lanes_before(lane), end.position);
    end.position = last_position(entry.position, stored_lanes, end.position);
    check_entry(buffer, entry, before);
    if (has_slot && lane == highest_lane(slot_lanes)) {
      buffer.store(entry.slot, {entry.token, entry.position, before.hash, real_kv_hash});
    }
    num_stored += __popc(stored_lanes);
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}

extern "C" __global__ void __launch_bounds__(kWriteThreads) kvc_write(const __grid_constant__ WriteArgs args) {
  write_by_warps<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kWriteThreads) kvc_write_affine(const __grid_constant__ WriteArgs args) {
  write_by_warps<AffineChain>(args);
}

// ---- the affine chain within a block, several entries a thread -------------------------------------------------

constexpr int kScanChunk = kWriteScanThreads * kWriteScanItems;
constexpr int kScanWarps = kWriteScanThreads / kWarpSize;

// What is stored last in each slot of a chunk: words of (index of an entry + 1, slot), linear probing, larger words
// first. So an entry finds the last one of its slot before earlier ones; words of earlier chunks count as empty. All
// words come by atomicMax, so the first of a slot does not depend on the order of threads.
struct LastEntries {
  static constexpr unsigned kSize = 2 * kScanChunk;
  u64* words;

  static __device__ __forceinline__ unsigned place(unsigned slot) {
    return static_cast<unsigned>(static_cast<u64>(slot * 0x9E3779B1u) * kSize >> 32);
  }
  static __device__ __forceinline__ unsigned next(unsigned p) { return p + 1 == kSize ? 0 : p + 1; }
  static __device__ __forceinline__ u64 word_of(i64 i, i64 slot) {
    return static_cast<u64>(i + 1) << 32 | static_cast<u64>(slot);
  }

  // `first` is the index of the chunk's first entry.
  __device__ __forceinline__ void insert(i64 i, i64 slot, i64 first) const {
    u64 word = word_of(i, slot);
    for (unsigned p = place(static_cast<unsigned>(slot));; p = next(p)) {
      const u64 found = atomicMax(&words[p], word);
      if (found >> 32 <= static_cast<u64>(first) || static_cast<unsigned>(found) == static_cast<unsigned>(word)) return;
      // Whichever of the two is smaller moves on.
      if (found < word) word = found;
    }
  }

  // After a barrier: whether the entry, which was inserted, is the last one of its slot.
  __device__ __forceinline__ bool has_last(i64 i, i64 slot) const {
    unsigned p = place(static_cast<unsigned>(slot));
    while (static_cast<unsigned>(words[p]) != static_cast<unsigned>(slot)) p = next(p);
    return words[p] == word_of(i, slot);
  }
};

// What a warp's entries of a chunk do to the chain.
struct WarpRun {
  AffineMap map;
  u64 position;  // of the last entry stored, if there is one
  bool has_position;
};

// Grid: a block for each buffer of each request, at least one for each buffer.
extern "C" __global__ void __launch_bounds__(kWriteScanThreads)
    kvc_write_affine_scan(const __grid_constant__ WriteArgs args) {
  __shared__ u64 words[LastEntries::kSize];
  __shared__ WarpRun warp_runs[kScanWarps];
  const LastEntries last_entries = {words};
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  const i64 r = blockIdx.x / num_buffers;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % num_buffers];
  if (r == 0 && threadIdx.x == 0) count(buffer.kernel_run_counter, 1);

  int status = 0;
  const EntryRange range = load_range(args, r, status);
  report_status(args.out_status, status);
  if (range.begin == range.end) return;
  ChainEnd end = load_seed<AffineChain>(args, buffer, r, threadIdx.x == 0);
  for (unsigned p = threadIdx.x; p < LastEntries::kSize; p += kWriteScanThreads) words[p] = 0;
  __syncthreads();
  i64 num_stored = 0;
  for (i64 first = range.begin; first < range.end; first += kScanChunk) {
    const i64 own_first = first + threadIdx.x * kWriteScanItems;
    Entry entries[kWriteScanItems];
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) entries[k] = load_entry(args, own_first + k, range.end);
    AffineMap map = {1, 0};
    u64 position = 0;
    bool has_position = false;
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      const bool has_slot = buffer.has_slot(entries[k].slot);
      num_stored += __popc(__ballot_sync(kFullWarp, has_slot));
      map = map.then(affine_map(entries[k], has_slot));
      if (!has_slot) continue;
      last_entries.insert(own_first + k, entries[k].slot, first);
      position = entries[k].position;
      has_position = true;
    }
    const WarpScan scan(map, lane);
    const unsigned lanes = __ballot_sync(kFullWarp, has_position);
    const u64 position_of_warp = last_position(position, lanes, 0);
    if (lane == kWarpSize - 1) warp_runs[warp] = {scan.inclusive, position_of_warp, lanes != 0};
    __syncthreads();

    // Each warp scans all warps for itself: cheaper than a barrier more.
    WarpRun run = {{1, 0}, 0, false};
    if (lane < kScanWarps) run = warp_runs[lane];
    const WarpScan scan_of_warps(run.map, lane);
    const unsigned warps = __ballot_sync(kFullWarp, run.has_position);
    const u64 warp_hash = __shfl_sync(kFullWarp, scan_of_warps.before(end.hash, lane), warp);
    const u64 warp_position = last_position(run.position, warps & lanes_before(warp), end.position);
    ChainEnd before = end;
    before.hash = scan.before(warp_hash, lane);
    before.position = last_position(position, lanes & lanes_before(lane), warp_position);
    end.hash = scan_of_warps.behind(end.hash);
    end.position = last_position(run.position, warps, end.position);
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      const Entry& entry = entries[k];
      check_entry(buffer, entry, before);
      if (!buffer.has_slot(entry.slot)) continue;
      if (last_entries.has_last(own_first + k, entry.slot)) {
        buffer.store(entry.slot, {entry.token, entry.position, before.hash, buffer.hash_real_kv(entry.slot)});
      }
      before.hash = AffineChain::link(before.hash, entry.token, entry.position);
      before.position = entry.position;
    }
    // Before the next chunk takes the shared memory and stores.
    __syncthreads();
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}
