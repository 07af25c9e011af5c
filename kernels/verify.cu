// Verify: every slot that is about to be read holds the record that the page table implies; violations for those that
// do not. kvc_verify takes materialised entries, kvc_verify_batch reads the page table itself. Each warp owns a run of
// consecutive entries; where an entry's predecessor is the entry before, its record comes from the lane before. Atomics:
// counters, violations, status. What is out of range is reported, never read. Cost: 36 bytes an entry and buffer.

constexpr int kRows = kVerifyRows;  // of 32 entries that a warp has in flight

// One thing to check: that `slot` holds `position` (and `expected_token`, unless -1) after `prev_slot`.
struct Entry {
  i64 slot;
  i64 prev_slot;
  i64 position;
  i64 expected_token;
  bool is_present;
};

struct VerifyOptions {
  i64 num_buffers;
  i64 padding_slot;  // -1: none
  i64 check_verify_expected_token;
  i64 check_holes;

  __device__ __forceinline__ bool is_padding(i64 slot) const { return slot >= 0 && slot == padding_slot; }
};

// The value of the lane before; lane 0 gets `carried`, which becomes the value of the last lane.
__device__ __forceinline__ u64 from_lane_before(u64 value, u64& carried) {
  const u64 before = __shfl_up_sync(kFullWarp, value, 1);
  const u64 first = carried;
  carried = __shfl_sync(kFullWarp, value, kWarpSize - 1);
  return threadIdx.x % kWarpSize == 0 ? first : before;
}

// The slot of the entry before this lane's, and the hash that its record passes on; carried from row to row.
struct Predecessor {
  u64 slot;
  u64 link;
};

// Whether the entry is as the record says; if not, a violation. `before` is the entry of the lane before.
template <typename Chain>
__device__ __forceinline__ void check_entry(const CanaryBuffer& buffer, const VerifyOptions& options, const Entry& entry,
                                            const Record& record, const Predecessor& before) {
  i64 bits = 0;
  u64 expected_hash = 0;
  if (entry.prev_slot < 0) {
    expected_hash = anchor_hash();
  } else if (options.is_padding(entry.prev_slot)) {
    expected_hash = record.prev_hash;  // unreachable: nothing is expected
  } else if (entry.prev_slot >= buffer.num_slots) {
    bits |= kFailPredecessorOutOfRange;
  } else if (static_cast<u64>(entry.prev_slot) == before.slot) {
    expected_hash = before.link;
  } else {
    // Rare: the first entry of a warp's run or of a window.
    const Record prev = buffer.load(entry.prev_slot);
    expected_hash = Chain::link(prev.prev_hash, prev.token, prev.position);
  }

  if (options.is_padding(entry.slot)) {
    bits = options.check_holes ? kFailPageTableHole : 0;
  } else if (!buffer.has_slot(entry.slot)) {
    bits |= kFailVerifySlotOutOfRange;
  } else {
    if (bits == 0 && record.prev_hash != expected_hash) bits |= kFailVerifyChainHash;
    if (record.position != static_cast<u64>(entry.position)) bits |= kFailVerifyPosition;
    if (record.real_kv_hash != buffer.hash_real_kv(entry.slot)) bits |= kFailVerifyRealKvHash;
    if (options.check_verify_expected_token && entry.expected_token != -1 &&
        record.token != static_cast<u64>(entry.expected_token)) {
      bits |= kFailVerifyToken;
    }
  }
  if (bits != 0) {
    record_violation(buffer, {entry.slot, static_cast<i64>(record.position), static_cast<i64>(record.token),
                              entry.expected_token, static_cast<i64>(record.prev_hash), static_cast<i64>(expected_hash),
                              bits});
  }
}

// Hands each warp a run of consecutive entries of the block's buffer, and counts. `walk_from(t)` gives the walk from
// entry t on: a function of the index and of whether the lane has an entry, called by all lanes in ascending order.
template <typename Chain, typename WalkFrom>
__device__ __forceinline__ void verify_entries(const CanaryBuffer& buffer, const VerifyOptions& options, i64 num_entries,
                                               const WalkFrom& walk_from) {
  const unsigned num_buffers = static_cast<unsigned>(options.num_buffers);
  const i64 block = blockIdx.x / num_buffers;
  const i64 warps_per_block = blockDim.x / kWarpSize;
  const i64 num_warps = gridDim.x / num_buffers * warps_per_block;
  const i64 warp = block * warps_per_block + threadIdx.x / kWarpSize;
  constexpr i64 kStep = kRows * kWarpSize;
  const i64 num_steps = (num_entries + kStep - 1) / kStep;
  const i64 begin = num_steps * warp / num_warps * kStep;
  const i64 end = clamp(num_steps * (warp + 1) / num_warps * kStep, 0, num_entries);
  if (begin < end) {
    auto walk = walk_from(begin);
    Predecessor carried = {~0ull, 0};  // no slot: slots of the buffer are below 2^32
    for (i64 first = begin + threadIdx.x % kWarpSize; first - threadIdx.x % kWarpSize < end; first += kStep) {
      Entry entries[kRows];
      Record records[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) entries[k] = walk(first + k * kWarpSize, first + k * kWarpSize < end);
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const i64 slot = entries[k].slot;
        records[k] = {0, 0, 0, 0};
        if (entries[k].is_present && buffer.has_slot(slot) && !options.is_padding(slot)) records[k] = buffer.load(slot);
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const Record& record = records[k];
        const u64 link = Chain::link(record.prev_hash, record.token, record.position);
        const Predecessor before = {from_lane_before(static_cast<u64>(entries[k].slot), carried.slot),
                                    from_lane_before(link, carried.link)};
        if (entries[k].is_present) check_entry<Chain>(buffer, options, entries[k], record, before);
      }
    }
  }
  if (block == 0 && threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<u64*>(buffer.slot_run_counter), static_cast<u64>(num_entries));
    atomicAdd(reinterpret_cast<u64*>(buffer.kernel_run_counter), 1ull);
  }
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

template <typename Chain>
__device__ __forceinline__ void verify(const VerifyArgs& args) {
  const i64 num_entries = *args.enable != 0 ? clamp(*args.verify_num_valid, 0, args.verify_capacity) : 0;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % static_cast<unsigned>(args.options.num_buffers)];
  verify_entries<Chain>(buffer, args.options, num_entries, [&](i64) {
    return [&](i64 t, bool has_entry) {
      if (!has_entry) return Entry{-1, -1, 0, -1, false};
      return Entry{__ldg(args.verify_slot_indices + t), __ldg(args.verify_prev_slot_indices + t),
                   __ldg(args.verify_expected_positions + t), __ldg(args.verify_expected_tokens + t), true};
    };
  });
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads) kvc_verify(const __grid_constant__ VerifyArgs args) {
  verify<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads) kvc_verify_affine(const __grid_constant__ VerifyArgs args) {
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
  i64 bs;
  i64 lut_len;
  i64 swa_window_size;
  i64 verify_capacity;
  i64 expected_rows;
  i64 expected_width;
  i64 expected_stride0;
  i64 kv_token_id_vs_position_offset;
};

// Last request whose offset is at most t, searched by the whole warp: 32 offsets a step.
__device__ __forceinline__ i64 find_request(const i64* offsets, i64 bs, i64 t) {
  const int lane = threadIdx.x % kWarpSize;
  i64 first = 0;
  for (i64 count = bs; count > 1;) {
    const i64 stride = (count + kWarpSize - 1) / kWarpSize;
    const bool is_at_most = lane * stride < count && __ldg(offsets + first + lane * stride) <= t;
    const unsigned at_most = __ballot_sync(kFullWarp, is_at_most);
    const i64 skipped = at_most == 0 ? 0 : (kWarpSize - 1 - __clz(static_cast<int>(at_most))) * stride;
    first += skipped;
    count = count - skipped < stride ? count - skipped : stride;
  }
  return first;
}

// The entries of a batch, for a warp that walks them in ascending order.
struct BatchWalk {
  const VerifyBatchArgs& args;
  int& status;
  i64 run_begin;
  i64 r;
  i64 begin;  // entries of request r: [begin, end), once a lane has advanced to it
  i64 end;
  ReadRange range;
  u64 carried_slot;

  // Moves on to the request of entry t: by doubling steps, since many requests may be empty.
  __device__ __forceinline__ void advance(i64 t) {
    const i64* offsets = args.verify_offsets_scratch;
    i64 step = 1;
    while (r + step < args.bs && __ldg(offsets + r + step) <= t) {
      r += step;
      step *= 2;
    }
    for (step /= 2; step > 0; step /= 2) {
      if (r + step < args.bs && __ldg(offsets + r + step) <= t) r += step;
    }
    begin = __ldg(offsets + r);
    end = __ldg(offsets + r + 1);
    range = read_range(args.page_table, args.req_pool_indices[r], args.prefix_lens[r], args.swa_window_size, status);
  }

  __device__ __forceinline__ i64 slot_at(i64 position) {
    return map_to_swa(args.page_table.slot(range.row, position), args.full_to_swa_index_mapping, args.lut_len, status);
  }

  __device__ __forceinline__ i64 expected_token_at(i64 position) const {
    if (args.expected_tokens == nullptr || range.row >= args.expected_rows) return -1;
    const i64 index = position + args.kv_token_id_vs_position_offset;
    if (index < 0 || index >= args.expected_width || index >= args.expected_valid_lens[r]) return -1;
    return __ldg(args.expected_tokens + range.row * args.expected_stride0 + index);
  }

  __device__ __forceinline__ Entry operator()(i64 t, bool has_entry) {
    Entry entry = {-1, -1, 0, -1, false};
    if (has_entry) {
      if (t >= end) advance(t);
      entry.position = range.window_start + (t - begin);
      // Offsets that are not those of this batch must not lead outside of the row.
      entry.is_present = t >= begin && entry.position < range.prefix_len;
    }
    if (entry.is_present) {
      entry.slot = slot_at(entry.position);
      entry.expected_token = expected_token_at(entry.position);
    }
    const i64 slot_before = static_cast<i64>(from_lane_before(static_cast<u64>(entry.slot), carried_slot));
    if (entry.is_present && entry.position > 0) {
      const bool is_entry_before = entry.position > range.window_start && t > run_begin;
      entry.prev_slot = is_entry_before ? slot_before : slot_at(entry.position - 1);
    }
    return entry;
  }
};

template <typename Chain>
__device__ __forceinline__ void verify_batch(const VerifyBatchArgs& args) {
  const bool is_enabled = *args.verify_enable != 0 && args.bs > 0;
  const i64 num_entries = is_enabled ? clamp(*args.verify_num_valid, 0, args.verify_capacity) : 0;
  const CanaryBuffer& buffer = args.buffers[blockIdx.x % static_cast<unsigned>(args.options.num_buffers)];
  int status = 0;
  verify_entries<Chain>(buffer, args.options, num_entries, [&](i64 t) {
    const i64 r = find_request(args.verify_offsets_scratch, args.bs, t);
    return BatchWalk{args, status, t, r, 0, 0, {0, 0, 0, false}, 0};
  });
  report_status(args.out_status, status);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads)
    kvc_verify_batch(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<SplitMixChain>(args);
}

extern "C" __global__ void __launch_bounds__(kVerifyThreads)
    kvc_verify_batch_affine(const __grid_constant__ VerifyBatchArgs args) {
  verify_batch<AffineChain>(args);
}
