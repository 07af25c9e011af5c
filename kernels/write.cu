// Write: stamps a record into the slot of every token that was just written, each chained to the one before it.
// One warp owns a request in one buffer, or one block where requests may be long; its entries go in order, in chunks, so
// that of entries with one slot the last stays. Atomics: violations, counters, status bits, slots of a chunk. Ranges that
// leave the token arrays are cut; slots and seeds that the buffer does not have are neither read nor written. Cost: 24
// bytes read and 32 written an entry and the hashed KV bytes; the latency of three splitmix64 an entry of the longest
// request, or of a prefix scan (affine).

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

__device__ __forceinline__ void count(i64* counter, i64 amount) {
  atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount));
}

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

// The entries of request r. `is_first_thread` in one thread of those that own the request.
__device__ __forceinline__ EntryRange begin_request(const WriteArgs& args, const CanaryBuffer& buffer, i64 r,
                                                    bool is_first_thread) {
  if (r == 0 && is_first_thread) count(buffer.kernel_run_counter, 1);
  int status = 0;
  const EntryRange range = load_range(args, r, status);
  report_status(args.out_status, status);
  return range;
}

struct Entry {
  i64 slot;
  u64 token;
  u64 position;
};

__device__ __forceinline__ Entry no_entry() { return {-1, 0, 0}; }

// Past the end: an entry that is skipped.
__device__ __forceinline__ Entry load_entry(const WriteArgs& args, i64 i, i64 end) {
  if (i >= end) return no_entry();
  const u64 token = static_cast<u64>(args.input_ids[i]);
  const u64 position = static_cast<u64>(args.positions[i]);
  return {args.out_cache_loc[i], token, position};
}

struct ExpectedInput {
  bool is_checked;
  u64 token;
  u64 position;
};

__device__ __forceinline__ ExpectedInput no_expected_input() { return {false, 0, 0}; }

__device__ __forceinline__ ExpectedInput load_expected_input(const WriteArgs& args, i64 i, i64 end) {
  if (args.expected_input_tokens == nullptr || i >= end) return no_expected_input();
  const u64 token = static_cast<u64>(args.expected_input_tokens[i]);
  return {true, token, static_cast<u64>(args.expected_input_positions[i])};
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

// Records what is wrong with an entry, given the chain's end before it, and stores it if it is the last of its slot.
__device__ __forceinline__ void finish_entry(const CanaryBuffer& buffer, const Entry& entry,
                                             const ExpectedInput& expected, const ChainEnd& before, bool is_last,
                                             u64 real_kv_hash) {
  const bool has_slot = buffer.has_slot(entry.slot);
  const i64 token = static_cast<i64>(entry.token);
  const i64 position = static_cast<i64>(entry.position);
  const i64 hash = static_cast<i64>(before.hash);
  int bits = 0;
  if (has_slot && expected.is_checked && entry.token != expected.token) bits |= kFailWriteToken;
  if (has_slot && expected.is_checked && entry.position != expected.position) bits |= kFailWritePosition;
  if (entry.slot >= buffer.num_slots) bits |= kFailWriteSlotOutOfRange;
  if (bits != 0) {
    const i64 expected_token = has_slot ? static_cast<i64>(expected.token) : token;
    const i64 expected_position = has_slot ? static_cast<i64>(expected.position) : 0;
    record_violation(buffer, {entry.slot, position, token, expected_token, hash, expected_position, bits});
  }
  const u64 next = before.position + 1;
  if (has_slot && before.checks_position && entry.position != next) {
    record_violation(buffer,
                     {entry.slot, position, token, token, hash, static_cast<i64>(next), kFailWritePosition});
  }
  if (is_last) buffer.store(entry.slot, {entry.token, entry.position, before.hash, real_kv_hash});
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

// From the maps of the first kLanes lanes: a lane's hash before its own map, and that behind all of them.
template <int kLanes>
struct MapScan {
  AffineMap inclusive;

  __device__ __forceinline__ MapScan(AffineMap map, int lane) {
    for (int distance = 1; distance < kLanes; distance *= 2) {
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
    return __shfl_sync(kFullWarp, inclusive(hash), kLanes - 1);
  }
};

// ---- the exact chain, hash by hash ------------------------------------------------------------------------------

// x * multiplier, with the two cross products summed beside the wide one: shorter than the compiler's own order.
__device__ __forceinline__ u64 multiply(u64 x, u64 multiplier) {
  const unsigned low = static_cast<unsigned>(x), multiplier_low = static_cast<unsigned>(multiplier);
  const unsigned high = static_cast<unsigned>(x >> 32) * multiplier_low + __umulhi(low, multiplier_low) +
                        low * static_cast<unsigned>(multiplier >> 32);
  return static_cast<u64>(high) << 32 | low * multiplier_low;
}

// splitmix64 is last_step(mix(first_step(x))). The last step of one and the first of the next, together, are `fold`.
__device__ __forceinline__ u64 first_step(u64 x) { return x ^ (x >> 30); }
__device__ __forceinline__ u64 mix(u64 x) {
  x = multiply(x, 0xBF58476D1CE4E5B9ull);
  return multiply(x ^ (x >> 27), 0x94D049BB133111EBull);
}
__device__ __forceinline__ u64 last_step(u64 x) { return x ^ (x >> 31); }
__device__ __forceinline__ u64 without_last_step(u64 hash) { return hash ^ (hash >> 31) ^ (hash >> 62); }
__device__ __forceinline__ u64 fold(u64 x) { return x ^ (x >> 30) ^ (x >> 31) ^ (x >> 61); }

// A warp's entries as they are walked: the stored ones without a gap, token and position after their first steps.
__device__ __forceinline__ void pack(const Entry& entry, unsigned stored_lanes, int lane, ulonglong2* packed) {
  if (!(stored_lanes >> lane & 1)) return;
  packed[__popc(stored_lanes & lanes_before(lane))] =
      make_ulonglong2(first_step(entry.token), first_step(entry.position));
}

// Walks a chain over packed entries: leaves its hash before each of them and behind the last, and returns the latter,
// all without their last steps. Every lane walks it all, so that nothing but hash after hash is waited for.
__device__ __forceinline__ u64 walk(const ulonglong2* packed, int num_packed, int lane, u64 x, u64* hashes) {
#pragma unroll 8
  for (int k = 0; k < num_packed; ++k) {
    if (lane == 0) hashes[k] = x;
    x = mix(fold(mix(fold(mix(fold(x))) ^ packed[k].x)) ^ packed[k].y);
  }
  if (lane == 0) hashes[num_packed] = x;
  return x;
}

// The hash before a lane's entry, from what a walk left.
__device__ __forceinline__ u64 hash_before(const u64* hashes, unsigned stored_lanes, int lane) {
  return last_step(hashes[__popc(stored_lanes & lanes_before(lane))]);
}

// ---- a warp for a request ---------------------------------------------------------------------------------------

// The chain's hash before each lane's entry and, in `hash`, that behind all of them. Also a barrier of the warp.
template <class Chain>
__device__ __forceinline__ u64 follow_chain(const Entry& entry, unsigned stored_lanes, int lane, u64& hash) {
  __shared__ ulonglong2 packed[kWriteThreads / kWarpSize][kWarpSize];
  __shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize + 1];
  const int warp = threadIdx.x / kWarpSize;
  pack(entry, stored_lanes, lane, packed[warp]);
  __syncwarp();
  hash = last_step(walk(packed[warp], __popc(stored_lanes), lane, without_last_step(hash), hashes[warp]));
  __syncwarp();
  return hash_before(hashes[warp], stored_lanes, lane);
}

template <>
__device__ __forceinline__ u64 follow_chain<AffineChain>(const Entry& entry, unsigned stored_lanes, int lane,
                                                         u64& hash) {
  const MapScan<kWarpSize> scan(affine_map(entry, stored_lanes >> lane & 1), lane);
  const u64 hash_before = scan.before(hash, lane);
  hash = scan.behind(hash);
  __syncwarp();
  return hash_before;
}

// Whether the lane's entry is stored and no later lane has its slot.
__device__ __forceinline__ bool is_last_in_warp(const Entry& entry, unsigned stored_lanes, int lane) {
  // Slots that the buffer has fit 32 bits; the lanes of other slots are masked out.
  const unsigned slot_lanes = __match_any_sync(kFullWarp, static_cast<unsigned>(entry.slot)) & stored_lanes;
  return (stored_lanes >> lane & 1) && lane == highest_lane(slot_lanes);
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
  const EntryRange range = begin_request(args, buffer, r, lane == 0);
  if (range.begin == range.end) return;
  Entry next = load_entry(args, range.begin + lane, range.end);
  ExpectedInput next_expected = load_expected_input(args, range.begin + lane, range.end);
  ChainEnd end = load_seed<Chain>(args, buffer, r, lane == 0);
  i64 num_stored = 0;
  for (i64 first = range.begin; first < range.end; first += kWarpSize) {
    const Entry entry = next;
    const ExpectedInput expected = next_expected;
    next = load_entry(args, first + kWarpSize + lane, range.end);
    next_expected = load_expected_input(args, first + kWarpSize + lane, range.end);
    const bool has_slot = buffer.has_slot(entry.slot);
    const unsigned stored_lanes = __ballot_sync(kFullWarp, has_slot);
    const bool is_last = is_last_in_warp(entry, stored_lanes, lane);
    const u64 real_kv_hash = has_slot ? buffer.hash_real_kv(entry.slot) : 0;

    ChainEnd before = end;
    // With it, the seed was loaded and the chunk before stored: they may be of slots that this one stores.
    before.hash = follow_chain<Chain>(entry, stored_lanes, lane, end.hash);
    before.position = last_position(entry.position, stored_lanes & lanes_before(lane), end.position);
    end.position = last_position(entry.position, stored_lanes, end.position);
    finish_entry(buffer, entry, expected, before, is_last, real_kv_hash);
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

// ---- the exact chain within a block: the last warp walks, the others do the rest --------------------------------

constexpr int kWalkRows = kWriteWalkThreads / kWarpSize - 1;  // of 32 entries in a chunk, one for each warp but the last
constexpr int kWalkChunk = kWalkRows * kWarpSize;

// A warp's entries of a chunk.
struct WalkRow {
  Entry entry;
  ExpectedInput expected;
  unsigned stored_lanes;
  // Known after the first barrier.
  u64 position_before;  // of the last entry stored before the row
  u64 real_kv_hash;
  bool is_last;  // of the chunk's entries that are stored in its slot
};

// Whether one of the entries from i to `end` has the slot.
__device__ __forceinline__ bool is_used(const WriteArgs& args, i64 slot, i64 i, i64 end) {
  bool result = false;
#pragma unroll 8
  for (; i < end; ++i) result |= args.out_cache_loc[i] == slot;
  return result;
}

// Grid: a block for each buffer of each request, at least one for each buffer. While a chunk is walked, the one before
// is finished and the one behind prepared.
extern "C" __global__ void __launch_bounds__(kWriteWalkThreads)
    kvc_write_walk(const __grid_constant__ WriteArgs args) {
  // Of two chunks in turn.
  __shared__ ulonglong2 packed[2][kWalkRows][kWarpSize];
  __shared__ int num_packed[2][kWalkRows];
  __shared__ u64 last_positions[2][kWalkRows];  // of what is packed, if anything is
  __shared__ u64 hashes[2][kWalkRows][kWarpSize + 1];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const bool is_walker = warp == kWalkRows;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  const i64 r = blockIdx.x / num_buffers;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % num_buffers];
  const EntryRange range = begin_request(args, buffer, r, threadIdx.x == 0);
  if (range.begin == range.end) return;

  const auto prepare = [&](i64 first, int half) -> WalkRow {
    const i64 i = first + threadIdx.x;
    const Entry entry = load_entry(args, i, range.end);
    const unsigned stored_lanes = __ballot_sync(kFullWarp, buffer.has_slot(entry.slot));
    pack(entry, stored_lanes, lane, packed[half][warp]);
    const u64 position = last_position(entry.position, stored_lanes, 0);
    if (lane == 0) {
      num_packed[half][warp] = __popc(stored_lanes);
      last_positions[half][warp] = position;
    }
    return {entry, load_expected_input(args, i, range.end), stored_lanes, 0, 0, false};
  };

  WalkRow finished = {no_entry(), no_expected_input(), 0, 0, 0, false};
  WalkRow walked = finished;
  int half = 0;
  if (!is_walker) walked = prepare(range.begin, half);
  const ChainEnd seed = load_seed<SplitMixChain>(args, buffer, r, threadIdx.x == 0);
  u64 x = without_last_step(seed.hash);
  u64 position = seed.position;
  i64 num_stored = 0;
  // Before it, the seed was loaded: it may be of a slot that is stored.
  __syncthreads();
  for (i64 first = range.begin; first < range.end + kWalkChunk; first += kWalkChunk) {
    if (is_walker) {
#pragma unroll 1
      for (int row = 0; row < kWalkRows; ++row) {
        x = walk(packed[half][row], num_packed[half][row], lane, x, hashes[half][row]);
      }
    } else {
      const ChainEnd before = {
          hash_before(hashes[half ^ 1][warp], finished.stored_lanes, lane),
          last_position(finished.entry.position, finished.stored_lanes & lanes_before(lane), finished.position_before),
          seed.checks_position};
      finish_entry(buffer, finished.entry, finished.expected, before, finished.is_last, finished.real_kv_hash);
      num_stored += __popc(finished.stored_lanes);

      finished = walked;
      for (int row = 0; row < kWalkRows; ++row) {
        if (row == warp) finished.position_before = position;
        if (num_packed[half][row] != 0) position = last_positions[half][row];
      }
      const i64 slot = finished.entry.slot;
      if (buffer.has_slot(slot)) finished.real_kv_hash = buffer.hash_real_kv(slot);
      finished.is_last = is_last_in_warp(finished.entry, finished.stored_lanes, lane) &&
                         !is_used(args, slot, first + (warp + 1) * kWarpSize, clamp(range.end, 0, first + kWalkChunk));

      walked = prepare(first + kWalkChunk, half ^ 1);
    }
    __syncthreads();
    half ^= 1;
  }
  if (lane == 0 && !is_walker) count(buffer.slot_run_counter, num_stored);
}

// ---- the affine chain within a block, several entries a thread -------------------------------------------------

constexpr int kScanChunk = kWriteScanThreads * kWriteScanItems;
constexpr int kScanWarps = kWriteScanThreads / kWarpSize;

// Finds the last entry of each slot of a chunk: linear probing, a place for each slot. Entries are known by their index
// in the chunk + 1; 0 is an empty place.
struct SlotTable {
  static constexpr unsigned kSize = 2 * kScanChunk;
  const unsigned* slots;  // of the entries
  unsigned* last_entries;

  static __device__ __forceinline__ unsigned next(unsigned place) { return place + 1 == kSize ? 0 : place + 1; }

  // The place of an entry's slot, for `is_last` after a barrier.
  __device__ __forceinline__ unsigned insert(unsigned i) const {
    const unsigned slot = slots[i];
    unsigned place = static_cast<unsigned>(static_cast<u64>(slot * 0x9E3779B1u) * kSize >> 32);
    while (true) {
      const unsigned found = atomicCAS(&last_entries[place], 0u, i + 1);
      if (found == 0) return place;
      // Whichever entry of its slot is found there: the place is of the same slot for good.
      if (slots[found - 1] == slot) break;
      place = next(place);
    }
    atomicMax(&last_entries[place], i + 1);
    return place;
  }

  __device__ __forceinline__ bool is_last(unsigned i, unsigned place) const { return last_entries[place] == i + 1; }
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
  __shared__ unsigned slots[kScanChunk];
  __shared__ unsigned last_entries[SlotTable::kSize];
  __shared__ WarpRun warp_runs[kScanWarps];
  const SlotTable table = {slots, last_entries};
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned own = threadIdx.x * kWriteScanItems;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  const i64 r = blockIdx.x / num_buffers;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % num_buffers];
  const EntryRange range = begin_request(args, buffer, r, threadIdx.x == 0);
  if (range.begin == range.end) return;
  Entry next[kWriteScanItems];
#pragma unroll
  for (int k = 0; k < kWriteScanItems; ++k) next[k] = load_entry(args, range.begin + own + k, range.end);
  ChainEnd end = load_seed<AffineChain>(args, buffer, r, threadIdx.x == 0);
  i64 num_stored = 0;
  for (i64 first = range.begin; first < range.end; first += kScanChunk) {
    Entry entries[kWriteScanItems];
    for (unsigned place = threadIdx.x; place < SlotTable::kSize; place += kWriteScanThreads) last_entries[place] = 0;
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      entries[k] = next[k];
      slots[own + k] = static_cast<unsigned>(entries[k].slot);
    }
    // Before it, also the seed was loaded and the chunk before stored: they may be of slots that this one stores.
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      next[k] = load_entry(args, first + kScanChunk + own + k, range.end);
    }
    AffineMap map = {1, 0};
    u64 position = 0;
    bool has_position = false;
    u64 addends[kWriteScanItems];
    unsigned places[kWriteScanItems];
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      const Entry& entry = entries[k];
      const bool has_slot = buffer.has_slot(entry.slot);
      num_stored += __popc(__ballot_sync(kFullWarp, has_slot));
      addends[k] = AffineChain::addend(entry.token, entry.position);
      places[k] = has_slot ? table.insert(own + k) : 0;
      if (!has_slot) continue;
      map = map.then({kAffineMultiplier, addends[k]});
      position = entry.position;
      has_position = true;
    }
    const MapScan<kWarpSize> scan(map, lane);
    const unsigned lanes = __ballot_sync(kFullWarp, has_position);
    const u64 position_of_warp = last_position(position, lanes, 0);
    if (lane == kWarpSize - 1) warp_runs[warp] = {scan.inclusive, position_of_warp, lanes != 0};
    __syncthreads();

    // Each warp scans all warps for itself: cheaper than a barrier more.
    WarpRun run = {{1, 0}, 0, false};
    if (lane < kScanWarps) run = warp_runs[lane];
    const MapScan<kScanWarps> scan_of_warps(run.map, lane);
    const unsigned warps = __ballot_sync(kFullWarp, run.has_position);
    const u64 warp_hash = __shfl_sync(kFullWarp, scan_of_warps.before(end.hash, lane), warp);
    const u64 warp_position = last_position(run.position, warps & lanes_before(warp), end.position);
    ChainEnd before = {scan.before(warp_hash, lane), last_position(position, lanes & lanes_before(lane), warp_position),
                       end.checks_position};
    end.hash = scan_of_warps.behind(end.hash);
    end.position = last_position(run.position, warps, end.position);
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      const Entry& entry = entries[k];
      const bool has_slot = buffer.has_slot(entry.slot);
      const bool is_last = has_slot && table.is_last(own + k, places[k]);
      const u64 real_kv_hash = is_last ? buffer.hash_real_kv(entry.slot) : 0;
      finish_entry(buffer, entry, load_expected_input(args, first + own + k, range.end), before, is_last, real_kv_hash);
      if (!has_slot) continue;
      before.hash = kAffineMultiplier * before.hash + addends[k];
      before.position = entry.position;
    }
    // Before the next chunk clears the table.
    __syncthreads();
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}
