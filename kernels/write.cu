// Write: stamps a record into the slot of every token that was just written, each chained to the one before it. A warp
// owns a request in one buffer, or a block where requests may be long; entries go in order, in chunks, so that of those
// with one slot the last stays. Atomics: violations, counters, status, slots of a chunk. Ranges that leave the arrays are
// cut; slots and seeds out of range are not touched. Cost: 24 bytes read, 32 written and the hashed KV bytes an entry, and
// the latency of three splitmix64 an entry of the longest request (a prefix scan: affine).

struct WriteArgs {
  const i64* write_offsets;
  const i64* write_seed_slot_indices;
  const int* write_num_valid_reqs;
  IndexArray input_ids;
  IndexArray positions;
  IndexArray out_cache_loc;
  IndexArray full_to_swa_index_mapping;
  const i64* expected_input_tokens;  // null, with the next: no input check
  const i64* expected_input_positions;
  int* out_status;
  i64 write_req_capacity;
  i64 num_tokens;
  i64 lut_len;
  i64 padding_slot;  // -1: there is none
  i64 num_buffers;
  CanaryBuffer buffers[kMaxBuffers];
};

// A request's entries, and the slot of the record before them.
struct Request {
  i64 begin;
  i64 end;
  i64 seed;
};

__device__ __forceinline__ Request load_request(const WriteArgs& args, i64 r, int& status) {
  i64 begin = 0;
  i64 end = 0;
  i64 seed = -1;
  if (r < args.write_req_capacity) {
    begin = args.write_offsets[r];
    end = args.write_offsets[r + 1];
    seed = args.write_seed_slot_indices[r];
  }
  // No branch depends on the number of requests: what is loaded above would wait for it.
  const i64 num_valid_reqs = *args.write_num_valid_reqs;
  const i64 num_reqs = clamp(num_valid_reqs, 0, args.write_req_capacity);
  const bool is_valid = r < num_reqs;
  const i64 valid_begin = clamp(begin, 0, args.num_tokens);
  const i64 valid_end = clamp(end, valid_begin, args.num_tokens);
  const bool is_cut = is_valid & ((begin != valid_begin) | (end != valid_end));
  if (is_cut | (num_reqs != num_valid_reqs)) status |= kStatusWriteOffsetsInvalid;
  return {valid_begin, is_valid ? valid_end : valid_begin, seed};
}

// Request r, and the launch is counted; `is_first_thread` in one thread of those that own the request.
__device__ __forceinline__ Request begin_request(const WriteArgs& args, const CanaryBuffer& buffer, i64 r,
                                                 bool is_first_thread) {
  if (r == 0 && is_first_thread) count(buffer.kernel_run_counter, 1);
  int status = 0;
  const Request request = load_request(args, r, status);
  report_status(args.out_status, status);
  return request;
}

struct Entry {
  i64 slot;
  u64 token;
  u64 position;
};

__device__ __forceinline__ Entry no_entry() { return {-1, 0, 0}; }

// Where entry i goes.
__device__ __forceinline__ i64 load_slot(const WriteArgs& args, i64 i) {
  int status = 0;
  const i64 slot = map_to_swa(args.out_cache_loc[i], args.full_to_swa_index_mapping, args.lut_len, status);
  report_status(args.out_status, status);
  return slot;
}

// Past the end: an entry that is skipped.
__device__ __forceinline__ Entry load_entry(const WriteArgs& args, i64 i, i64 end) {
  if (i >= end) return no_entry();
  const u64 token = static_cast<u64>(args.input_ids[i]);
  const u64 position = static_cast<u64>(args.positions[i]);
  return {load_slot(args, i), token, position};
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

__device__ __forceinline__ void store_write_details(i64* details, const WriteArgs& args, i64 r, i64 expected_position) {
  if (details != nullptr) store_details(details, {r, -1, expected_position, args.write_seed_slot_indices[r], -1});
}

// The chain's end at the seed of request r; `is_reporter` in the one thread that records a seed that the buffer does not
// have.
template <class Chain>
__device__ __forceinline__ ChainEnd load_seed(const WriteArgs& args, const CanaryBuffer& buffer, i64 r, i64 seed,
                                              bool is_reporter) {
  const int* assertion = buffer.enable_chain_position_assert;
  const bool checks_position = assertion != nullptr && *assertion != 0;
  if (seed >= buffer.num_slots && seed != args.padding_slot && is_reporter) {
    i64* details = record_violation(buffer, {seed, 0, 0, 0, 0, 0, kFailPredecessorOutOfRange});
    store_write_details(details, args, r, 0);
  }
  if (!buffer.has_slot(seed) || seed == args.padding_slot) return {anchor_hash(), 0, false};
  const Record record = buffer.load(seed);
  return {Chain::link(record.prev_hash, record.token, record.position), record.position, checks_position};
}

// Records what is wrong with an entry of request r, given the chain's end before it, and stores it if it is the last of
// its slot.
__device__ __forceinline__ void finish_entry(const WriteArgs& args, const CanaryBuffer& buffer, i64 r,
                                             const Entry& entry, const ExpectedInput& expected,
                                             const ChainEnd& before, bool is_last, u64 real_kv_hash) {
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
    i64* details =
        record_violation(buffer, {entry.slot, position, token, expected_token, hash, expected_position, bits});
    store_write_details(details, args, r, expected_position);
  }
  const u64 next = before.position + 1;
  if (has_slot && before.checks_position && entry.position != next) {
    const i64 expected_position = static_cast<i64>(next);
    i64* details = record_violation(
        buffer, {entry.slot, position, token, token, hash, expected_position, kFailWritePosition});
    store_write_details(details, args, r, expected_position);
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

// splitmix64(x) is last_step(mix(first_step(x))); fold(x, y) is first_step(last_step(x)) ^ y.
__device__ __forceinline__ u64 first_step(u64 x) { return x ^ (x >> 30); }
__device__ __forceinline__ u64 without_first_step(u64 x) { return x ^ (x >> 30) ^ (x >> 60); }
__device__ __forceinline__ u64 last_step(u64 x) { return x ^ (x >> 31); }
__device__ __forceinline__ u64 without_last_step(u64 x) { return x ^ (x >> 31) ^ (x >> 62); }
__device__ __forceinline__ u64 mix(u64 x) {
  x = multiply(x, 0xBF58476D1CE4E5B9ull);
  return multiply(x ^ (x >> 27), 0x94D049BB133111EBull);
}
__device__ __forceinline__ u64 fold(u64 x, u64 y) { return ((x >> 30) ^ (x >> 31) ^ (x >> 61)) ^ (x ^ y); }

// An entry as it is walked.
__device__ __forceinline__ void pack(const Entry& entry, ulonglong2& packed) {
  packed = make_ulonglong2(first_step(entry.token), first_step(entry.position));
}

// Walks a chain over packed entries: leaves its hash before each of them and behind the last, and returns the latter,
// all without their last steps. One thread does it: nothing but hash after hash takes time.
__device__ __forceinline__ u64 walk(const ulonglong2* packed, int num_packed, u64 x, u64* hashes) {
#pragma unroll 8
  for (int k = 0; k < num_packed; ++k) {
    hashes[k] = x;
    x = mix(fold(mix(fold(mix(fold(x, 0)), packed[k].x)), packed[k].y));
  }
  hashes[num_packed] = x;
  return x;
}

// ---- a warp for a request ---------------------------------------------------------------------------------------

// The chain's hash before each lane's entry and, in `hash`, that behind all of them. Also a barrier of the warp.
template <class Chain>
__device__ __forceinline__ u64 follow_chain(const Entry& entry, unsigned stored_lanes, int lane, u64& hash) {
  __shared__ ulonglong2 packed[kWriteThreads / kWarpSize][kWarpSize];
  __shared__ u64 hashes[kWriteThreads / kWarpSize][kWarpSize + 1];
  const int warp = threadIdx.x / kWarpSize;
  const int place = __popc(stored_lanes & lanes_before(lane));
  const int num_packed = __popc(stored_lanes);
  if (stored_lanes >> lane & 1) pack(entry, packed[warp][place]);
  __syncwarp();
  if (lane == 0) walk(packed[warp], num_packed, without_last_step(hash), hashes[warp]);
  __syncwarp();
  hash = last_step(hashes[warp][num_packed]);
  return last_step(hashes[warp][place]);
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
  const Request request = begin_request(args, buffer, r, lane == 0);
  if (request.begin == request.end) return;
  // Loaded beside the seed, not after it.
  Entry entry = load_entry(args, request.begin + lane, request.end);
  ExpectedInput expected = load_expected_input(args, request.begin + lane, request.end);
  ChainEnd end = load_seed<Chain>(args, buffer, r, request.seed, lane == 0);
  i64 num_stored = 0;
  for (i64 first = request.begin; first < request.end; first += kWarpSize) {
    const bool has_slot = buffer.has_slot(entry.slot);
    const unsigned stored_lanes = __ballot_sync(kFullWarp, has_slot);
    const bool is_last = is_last_in_warp(entry, stored_lanes, lane);
    const u64 real_kv_hash = has_slot ? buffer.hash_real_kv(entry.slot) : 0;

    ChainEnd before = end;
    // With it, the seed was loaded and the chunk before stored: they may be of slots that this one stores.
    before.hash = follow_chain<Chain>(entry, stored_lanes, lane, end.hash);
    before.position = last_position(entry.position, stored_lanes & lanes_before(lane), end.position);
    end.position = last_position(entry.position, stored_lanes, end.position);
    finish_entry(args, buffer, r, entry, expected, before, is_last, real_kv_hash);
    num_stored += __popc(stored_lanes);
    entry = load_entry(args, first + kWarpSize + lane, request.end);
    expected = load_expected_input(args, first + kWarpSize + lane, request.end);
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}

extern "C" __global__ void __launch_bounds__(kWriteThreads, kWriteBlocks)
    kvc_write(const __grid_constant__ WriteArgs args) {
  write_by_warps<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kWriteThreads, kWriteBlocks)
    kvc_write_affine(const __grid_constant__ WriteArgs args) {
  write_by_warps<AffineChain>(args);
}

// ---- the exact chain within a block: a thread of the last warp walks, the other warps do the rest ----------------

constexpr int kWalkRows = kWriteWalkThreads / kWarpSize - 1;  // of 32 entries in a chunk, one for each other warp
constexpr int kWalkChunk = kWalkRows * kWarpSize;
constexpr unsigned kNoSlot = ~0u;  // more slots than a buffer has

// An entry on its way from one chunk's turn to the next.
struct WalkedEntry {
  Entry entry;
  ExpectedInput expected;
  unsigned stored_lanes;  // of the warp
  int place;              // in the chunk's packed entries
  u64 position_before;    // of the last entry stored before it
  u64 real_kv_hash;
  bool is_last;  // of the chunk's entries that are stored in its slot
};

// Whether one of a chunk's entries from i on has the slot.
__device__ __forceinline__ bool is_used(const unsigned* slots, unsigned slot, int i) {
  bool result = false;
#pragma unroll 8
  for (; i < kWalkChunk; ++i) result |= slots[i] == slot;
  return result;
}

// Grid: a block for each buffer of each request, at least one for each buffer. While a chunk is walked, the one before
// is finished and the next one prepared.
extern "C" __global__ void __launch_bounds__(kWriteWalkThreads)
    kvc_write_walk(const __grid_constant__ WriteArgs args) {
  // Of two chunks in turn; skipped entries leave no gap.
  __shared__ ulonglong2 packed[2][kWalkChunk];
  __shared__ int num_packed[2];
  __shared__ u64 hashes[2][kWalkChunk + 1];
  __shared__ unsigned slots[2][kWalkChunk];  // kNoSlot where the buffer does not have it
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const bool is_of_walker = warp == kWalkRows;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  const i64 r = blockIdx.x / num_buffers;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % num_buffers];
  const Request request = begin_request(args, buffer, r, threadIdx.x == 0);
  if (request.begin == request.end) return;

  const auto prepare = [&](i64 first, int half) -> WalkedEntry {
    const i64 i = first + threadIdx.x;
    const Entry entry = load_entry(args, i, request.end);
    const ExpectedInput expected = load_expected_input(args, i, request.end);
    unsigned stored_lanes = 0;
    int place = 0;
    int num_stored = 0;
    // Each warp counts in all rows for itself: cheaper than a barrier more.
#pragma unroll
    for (int row = 0; row < kWalkRows; ++row) {
      const i64 of_row = first + row * kWarpSize + lane;
      const bool is_stored = of_row < request.end && buffer.has_slot(load_slot(args, of_row));
      const unsigned lanes = __ballot_sync(kFullWarp, is_stored);
      if (row < warp) place += __popc(lanes);
      if (row == warp) stored_lanes = lanes;
      num_stored += __popc(lanes);
    }
    place += __popc(stored_lanes & lanes_before(lane));
    if (stored_lanes >> lane & 1) pack(entry, packed[half][place]);
    slots[half][threadIdx.x] = buffer.has_slot(entry.slot) ? static_cast<unsigned>(entry.slot) : kNoSlot;
    if (threadIdx.x == 0) num_packed[half] = num_stored;
    return {entry, expected, stored_lanes, place, 0, 0, false};
  };

  WalkedEntry finished = {no_entry(), no_expected_input(), 0, 0, 0, 0, false};
  WalkedEntry walked = finished;
  int half = 0;
  ChainEnd seed = {0, 0, false};
  if (is_of_walker) {
    seed = load_seed<SplitMixChain>(args, buffer, r, request.seed, lane == 0);
  } else {
    walked = prepare(request.begin, half);
  }
  __syncthreads();
  // Its position, while the first chunk is walked. It may be of a slot that is stored: not before the next barrier.
  if (!is_of_walker) seed = load_seed<SplitMixChain>(args, buffer, r, request.seed, false);
  u64 x = without_last_step(seed.hash);
  u64 position = seed.position;
  i64 num_stored = 0;
  for (i64 first = request.begin; first < request.end + kWalkChunk; first += kWalkChunk) {
    if (!is_of_walker) {
      const u64 hash = last_step(hashes[half ^ 1][finished.place]);
      const ChainEnd before = {hash, finished.position_before, seed.checks_position};
      finish_entry(args, buffer, r, finished.entry, finished.expected, before, finished.is_last,
                   finished.real_kv_hash);
      num_stored += __popc(finished.stored_lanes);

      finished = walked;
      const auto position_of = [&](int place) { return without_first_step(packed[half][place].y); };
      finished.position_before = finished.place == 0 ? position : position_of(finished.place - 1);
      if (num_packed[half] != 0) position = position_of(num_packed[half] - 1);
      const i64 slot = finished.entry.slot;
      if (buffer.has_slot(slot)) finished.real_kv_hash = buffer.hash_real_kv(slot);
      finished.is_last = is_last_in_warp(finished.entry, finished.stored_lanes, lane) &&
                         !is_used(slots[half], static_cast<unsigned>(slot), (warp + 1) * kWarpSize);

      walked = prepare(first + kWalkChunk, half ^ 1);
    } else if (lane == 0) {
      x = walk(packed[half], num_packed[half], x, hashes[half]);
    }
    // Also, this chunk's entries are stored behind those of the chunk before: slots may be the same.
    __syncthreads();
    half ^= 1;
  }
  if (lane == 0 && !is_of_walker) count(buffer.slot_run_counter, num_stored);
}

// ---- the affine chain within a block, several entries a thread -------------------------------------------------

constexpr int kScanChunk = kWriteScanThreads * kWriteScanItems;
constexpr int kScanWarps = kWriteScanThreads / kWarpSize;

// The last entry of each slot of a chunk: linear probing, a place for each slot. Entries are known by their index in
// the chunk + 1; 0 is an empty place.
struct SlotTable {
  static constexpr unsigned kSize = 2 * kScanChunk;
  const unsigned* slots;  // of the entries
  unsigned* last_entries;

  static __device__ __forceinline__ unsigned first_place(unsigned slot) {
    return static_cast<unsigned>(static_cast<u64>(slot * 0x9E3779B1u) * kSize >> 32);
  }

  // Takes the place if it is empty; returns the entry that was there before.
  __device__ __forceinline__ unsigned take(unsigned i, unsigned place) const {
    return atomicCAS(&last_entries[place], 0u, i + 1);
  }

  // From the first place, where `found` was: the place of the entry's slot, which then holds the entry or a later one.
  __device__ __forceinline__ unsigned insert(unsigned i, unsigned place, unsigned found) const {
    // The entry that is found may change, the slot of a place that is taken does not.
    while (found != 0 && slots[found - 1] != slots[i]) {
      place = place + 1 == kSize ? 0 : place + 1;
      found = take(i, place);
    }
    if (found != 0) atomicMax(&last_entries[place], i + 1);
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
  const Request request = begin_request(args, buffer, r, threadIdx.x == 0);
  if (request.begin == request.end) return;
  Entry next[kWriteScanItems];
#pragma unroll
  for (int k = 0; k < kWriteScanItems; ++k) next[k] = load_entry(args, request.begin + own + k, request.end);
  ChainEnd end = load_seed<AffineChain>(args, buffer, r, request.seed, threadIdx.x == 0);
  i64 num_stored = 0;
  for (i64 first = request.begin; first < request.end; first += kScanChunk) {
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
      next[k] = load_entry(args, first + kScanChunk + own + k, request.end);
    }
    unsigned places[kWriteScanItems];
    unsigned found[kWriteScanItems];
    // All at once: they take a while.
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      places[k] = SlotTable::first_place(static_cast<unsigned>(entries[k].slot));
      found[k] = buffer.has_slot(entries[k].slot) ? table.take(own + k, places[k]) : 0;
    }
    u64 addends[kWriteScanItems];
    AffineMap map = {1, 0};
    u64 position = 0;
    bool has_position = false;
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) {
      const bool has_slot = buffer.has_slot(entries[k].slot);
      num_stored += __popc(__ballot_sync(kFullWarp, has_slot));
      addends[k] = AffineChain::addend(entries[k].token, entries[k].position);
      if (!has_slot) continue;
      map = map.then({kAffineMultiplier, addends[k]});
      position = entries[k].position;
      has_position = true;
    }
#pragma unroll
    for (int k = 0; k < kWriteScanItems; ++k) places[k] = table.insert(own + k, places[k], found[k]);
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
      const ExpectedInput expected = load_expected_input(args, first + own + k, request.end);
      finish_entry(args, buffer, r, entry, expected, before, is_last, real_kv_hash);
      if (!has_slot) continue;
      before.hash = kAffineMultiplier * before.hash + addends[k];
      before.position = entry.position;
    }
    // Before the next chunk clears the table.
    __syncthreads();
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}
