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
  i64 blocks_per_request;
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

// ---- the affine chain by several blocks, an entry a thread ------------------------------------------------------

constexpr int kTile = kWriteScanThreads;
constexpr int kScanWarps = kWriteScanThreads / kWarpSize;

// The last entry of each slot of a tile: linear probing, a place for each slot. Entries are known by their index in
// the tile + 1; 0 is an empty place.
struct SlotTable {
  static constexpr unsigned kSize = 2 * kTile;
  const unsigned* slots;  // of the entries
  unsigned* last_entries;
  unsigned* is_taken_later;  // not 0: an entry behind the tile has the slot

  static __device__ __forceinline__ unsigned first_place(unsigned slot) {
    return static_cast<unsigned>(static_cast<u64>(slot * 0x9E3779B1u) * kSize >> 32);
  }

  static __device__ __forceinline__ unsigned place_behind(unsigned place) { return place + 1 == kSize ? 0 : place + 1; }

  __device__ __forceinline__ void clear(unsigned place) const {
    last_entries[place] = 0;
    is_taken_later[place] = 0;
  }

  // The place of entry i's slot, which then holds the entry or a later one.
  __device__ __forceinline__ unsigned insert(unsigned i) const {
    for (unsigned place = first_place(slots[i]);; place = place_behind(place)) {
      const unsigned found = atomicCAS(&last_entries[place], 0u, i + 1);
      // The entry that is found may change, the slot of a place that is taken does not.
      if (found != 0 && slots[found - 1] != slots[i]) continue;
      if (found != 0) atomicMax(&last_entries[place], i + 1);
      return place;
    }
  }

  // An entry behind the tile has the slot. When all entries are in.
  __device__ __forceinline__ void take_later(unsigned slot) const {
    for (unsigned place = first_place(slot); last_entries[place] != 0; place = place_behind(place)) {
      if (slots[last_entries[place] - 1] != slot) continue;
      atomicOr(&is_taken_later[place], 1u);
      return;
    }
  }

  __device__ __forceinline__ bool is_last(unsigned i, unsigned place) const {
    return last_entries[place] == i + 1 && is_taken_later[place] == 0;
  }
};

// What a warp's entries do to the chain.
struct WarpRun {
  AffineMap map;
  u64 position;  // of the last entry stored, if there is one
  bool has_position;
};

__device__ __forceinline__ u64 power_of_multiplier(int exponent) {
  u64 result = 1;
  u64 square = kAffineMultiplier;
  for (int bit = 1; bit <= kWarpSize; bit *= 2) {
    if (exponent & bit) result *= square;
    square *= square;
  }
  return result;
}

// What the chain's end becomes by all warps' runs; each warp reads them for itself: cheaper than a barrier more.
struct RunScan {
  WarpRun run;  // of the warp that has the lane's number
  MapScan<kScanWarps> maps;
  unsigned has_position;

  static __device__ __forceinline__ WarpRun run_of(const WarpRun* runs, int lane) {
    return lane < kScanWarps ? runs[lane] : WarpRun{{1, 0}, 0, false};
  }
  __device__ __forceinline__ RunScan(const WarpRun* runs, int lane)
      : run(run_of(runs, lane)), maps(run.map, lane), has_position(__ballot_sync(kFullWarp, run.has_position)) {}

  __device__ __forceinline__ ChainEnd before(const ChainEnd& end, int lane, int warp) const {
    return {__shfl_sync(kFullWarp, maps.before(end.hash, lane), warp),
            last_position(run.position, has_position & lanes_before(warp), end.position), end.checks_position};
  }
  __device__ __forceinline__ ChainEnd behind(const ChainEnd& end) const {
    return {maps.behind(end.hash), last_position(run.position, has_position, end.position), end.checks_position};
  }
};

// The warp's share of the entries [begin, end), consecutive ones, as a run. `powers` of the multiplier; whether one of
// them is stored in `seed` is added to `writes_seed`.
__device__ __forceinline__ WarpRun run_before(const WriteArgs& args, const CanaryBuffer& buffer, const u64* powers,
                                              i64 begin, i64 end, i64 seed, bool& writes_seed) {
  const int lane = threadIdx.x % kWarpSize;
  const i64 rows = (end - begin + kWriteScanThreads - 1) / kWriteScanThreads;  // of each warp
  const i64 first = begin + threadIdx.x / kWarpSize * rows * kWarpSize;
  AffineMap map = {1, 0};
  i64 last = -1;
#pragma unroll 4
  for (i64 row = 0; row < rows; ++row) {
    const Entry entry = load_entry(args, first + row * kWarpSize + lane, end);
    const bool is_stored = buffer.has_slot(entry.slot);
    const unsigned stored_lanes = __ballot_sync(kFullWarp, is_stored);
    writes_seed |= is_stored && entry.slot == seed;
    // Each lane keeps its own entries' share of the sum.
    const u64 power = powers[__popc(stored_lanes)];
    map = {map.multiplier * power, map.addend * power};
    const unsigned lanes_behind = ~lanes_before(lane) << 1 & stored_lanes;
    if (is_stored) map.addend += powers[__popc(lanes_behind)] * AffineChain::addend(entry.token, entry.position);
    if (stored_lanes != 0) last = first + row * kWarpSize + highest_lane(stored_lanes);
  }
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    map.addend += __shfl_xor_sync(kFullWarp, map.addend, distance);
  }
  return {map, last < 0 ? 0 : static_cast<u64>(args.positions[last]), last >= 0};
}

// Grid: args.blocks_per_request blocks for each buffer of each request, at least one for each buffer. Each block takes
// every so many-th tile of the request, and works out by itself what the entries before do to the chain, and which of
// the tile's slots the entries behind write again: no block waits for another. A request that writes its own seed's slot
// is left to its first block; the others do not read the seed before they know.
extern "C" __global__ void __launch_bounds__(kWriteScanThreads, kWriteScanBlocks)
    kvc_write_affine_scan(const __grid_constant__ WriteArgs args) {
  __shared__ u64 powers[kWarpSize + 1];
  __shared__ unsigned slots[kTile];
  __shared__ unsigned last_entries[SlotTable::kSize];
  __shared__ unsigned is_taken_later[SlotTable::kSize];
  __shared__ WarpRun runs_before[kScanWarps];
  __shared__ WarpRun runs[kScanWarps];
  const SlotTable table = {slots, last_entries, is_taken_later};
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned num_buffers = static_cast<unsigned>(args.num_buffers);
  unsigned num_blocks = static_cast<unsigned>(args.blocks_per_request);
  const unsigned block = blockIdx.x / num_buffers % num_blocks;
  const i64 r = blockIdx.x / num_buffers / num_blocks;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % num_buffers];
  const bool is_reporter = block == 0 && threadIdx.x == 0;
  const Request request = begin_request(args, buffer, r, is_reporter);
  const i64 first_tile = request.begin + static_cast<i64>(block) * kTile;
  if (first_tile >= request.end) return;
  Entry next = load_entry(args, first_tile + threadIdx.x, request.end);
  if (threadIdx.x <= kWarpSize) powers[threadIdx.x] = power_of_multiplier(threadIdx.x);
  ChainEnd end = {0, 0, false};
  if (block == 0) end = load_seed<AffineChain>(args, buffer, r, request.seed, is_reporter);
  const i64 seed = request.seed == args.padding_slot ? -1 : request.seed;
  i64 chain_begin = request.begin;  // where `end` stands
  i64 num_stored = 0;
  for (i64 first = first_tile; first < request.end; first += static_cast<i64>(num_blocks) * kTile) {
    const Entry entry = next;
    for (unsigned place = threadIdx.x; place < SlotTable::kSize; place += kWriteScanThreads) table.clear(place);
    slots[threadIdx.x] = static_cast<unsigned>(entry.slot);
    // Before it, also the seed was loaded and the tile before stored: they may be of slots that this one stores.
    __syncthreads();
    const bool has_slot = buffer.has_slot(entry.slot);
    const unsigned place = has_slot ? table.insert(threadIdx.x) : 0;
    bool writes_seed = has_slot && entry.slot == seed;
    const unsigned stored_lanes = __ballot_sync(kFullWarp, has_slot);
    num_stored += __popc(stored_lanes);
    const MapScan<kWarpSize> scan(affine_map(entry, has_slot), lane);
    const u64 position_of_warp = last_position(entry.position, stored_lanes, 0);
    const WarpRun run_of_before = run_before(args, buffer, powers, chain_begin, first, seed, writes_seed);
    if (lane == kWarpSize - 1) runs[warp] = {scan.inclusive, position_of_warp, stored_lanes != 0};
    if (lane == 0) runs_before[warp] = run_of_before;
    __syncthreads();

    if (num_blocks > 1) {
#pragma unroll 4
      for (i64 i = first + kTile + threadIdx.x; i < request.end; i += kWriteScanThreads) {
        const i64 slot = load_slot(args, i);
        if (!buffer.has_slot(slot)) continue;
        table.take_later(static_cast<unsigned>(slot));
        writes_seed |= slot == seed;
      }
      if (__syncthreads_or(writes_seed)) {
        if (block != 0) return;
        num_blocks = 1;
      }
    }
    if (block != 0 && first == first_tile) end = load_seed<AffineChain>(args, buffer, r, request.seed, false);
    next = load_entry(args, first + static_cast<i64>(num_blocks) * kTile + threadIdx.x, request.end);
    end = RunScan(runs_before, lane).behind(end);
    const RunScan scan_of_warps(runs, lane);
    const ChainEnd before_warp = scan_of_warps.before(end, lane, warp);
    const ChainEnd before = {scan.before(before_warp.hash, lane),
                             last_position(entry.position, stored_lanes & lanes_before(lane), before_warp.position),
                             end.checks_position};
    end = scan_of_warps.behind(end);
    chain_begin = first + kTile;
    const bool is_last = has_slot && table.is_last(threadIdx.x, place);
    const u64 real_kv_hash = is_last ? buffer.hash_real_kv(entry.slot) : 0;
    const ExpectedInput expected = load_expected_input(args, first + threadIdx.x, request.end);
    finish_entry(args, buffer, r, entry, expected, before, is_last, real_kv_hash);
    // Before the next tile clears the table.
    __syncthreads();
  }
  if (lane == 0) count(buffer.slot_run_counter, num_stored);
}
