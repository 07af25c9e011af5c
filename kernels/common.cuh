// Shared by every kernel. Nothing is included: the sources are joined as text, behind the constants that
// cupy_kvcanary/sources.py writes from their Python definitions. All addressing is 64-bit.

using i64 = long long;
using u64 = unsigned long long;

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;

__device__ __forceinline__ i64 clamp(i64 value, i64 low, i64 high) {
  return value < low ? low : value > high ? high : value;
}

__device__ __forceinline__ void report_status(int* out_status, int status) {
  if (status != 0 && out_status != nullptr) atomicOr(out_status, status);
}

__device__ __forceinline__ void count(i64* counter, i64 amount) {
  atomicAdd(reinterpret_cast<u64*>(counter), static_cast<u64>(amount));
}

// Requests of the batch: a number of the launch, or one in device memory that graph replays may find changed.
__device__ __forceinline__ i64 batch_size(i64 bs, const int* bs_on_device) {
  return bs_on_device == nullptr ? bs : clamp(__ldg(bs_on_device), 0, bs);
}

// ---- arrays of slots, rows and lengths ------------------------------------------------------------------------

// An integer array of either width; which one is uniform over the launch, so the branch costs nothing.
struct IndexArray {
  const void* data;
  i64 is_int64;

  __device__ __forceinline__ i64 operator[](i64 index) const {
    return is_int64 ? __ldg(static_cast<const i64*>(data) + index) : __ldg(static_cast<const int*>(data) + index);
  }
};

// A slot of the full pool as a slot of the sliding-window pool; without a mapping the slot itself.
__device__ __forceinline__ i64 map_to_swa(i64 slot, const IndexArray& mapping, i64 lut_len, int& status) {
  if (mapping.data == nullptr || slot < 0) return slot;
  if (slot >= lut_len) {
    status |= kStatusSlotOutOfMapping;
    slot = lut_len - 1;
  }
  return mapping[slot];
}

// Where each request's tokens lie, in one of three forms:
//   slots        entries[row, position] is the slot (page_size 0)
//   block table  entries[row, position / page_size] is the page
//   page list    entries[page_indptr[row] + position / page_size] is the page; page_indptr is not null
struct PageTable {
  IndexArray entries;
  IndexArray page_indptr;
  IndexArray last_page_lens;
  i64 num_rows;
  i64 padding_row;  // contributes nothing; -1: there is none
  i64 max_seq_len;  // positions of a row (not for page lists)
  i64 stride0;      // entries from one row to the next (not for page lists)
  i64 num_entries;  // of a page list
  i64 page_size;
  i64 null_page;  // this page and negative ones hold no token; -1: only negative ones

  // Whether the row is one of a request; a row outside counts as padding.
  __device__ __forceinline__ bool is_active(i64 row, int& status) const {
    if (row >= 0 && row < num_rows) return row != padding_row;
    status |= kStatusRequestRowOutOfRange;
    return false;
  }

  // Positions that may be read in an active row.
  __device__ __forceinline__ i64 seq_len(i64 row) const {
    if (page_indptr.data == nullptr) return max_seq_len;
    const i64 begin = clamp(page_indptr[row], 0, num_entries);
    const i64 num_pages = clamp(page_indptr[row + 1], begin, num_entries) - begin;
    return num_pages == 0 ? 0 : (num_pages - 1) * page_size + clamp(last_page_lens[row], 0, page_size);
  }

  // Slot of a position below seq_len(row) in an active row.
  __device__ __forceinline__ i64 slot(i64 row, i64 position) const {
    if (page_size == 0) return entries[row * stride0 + position];
    // Positions of paged tables fit 32 bits (checked on the host); dividing those is several times cheaper.
    const unsigned page_in_row = static_cast<unsigned>(position) / static_cast<unsigned>(page_size);
    const i64 offset = position - static_cast<i64>(page_in_row) * page_size;
    const i64 first = page_indptr.data == nullptr ? row * stride0 : clamp(page_indptr[row], 0, num_entries);
    const i64 page = entries[first + page_in_row];
    if (page < 0 || page == null_page) return null_page < 0 ? -1 : kTokenToKvSlotPadding;
    return static_cast<i64>(static_cast<u64>(page) * static_cast<u64>(page_size) + static_cast<u64>(offset));
  }
};

// What request r reads: its active row, and the positions [window_start, prefix_len). Nothing for other rows.
struct ReadRange {
  i64 row;
  i64 window_start;
  i64 prefix_len;
  bool is_active;
};

__device__ __forceinline__ ReadRange read_range(const PageTable& table, i64 row, i64 prefix_len, i64 window,
                                                int& status) {
  if (!table.is_active(row, status)) return {0, 0, 0, false};
  const i64 seq_len = table.seq_len(row);
  if (prefix_len > seq_len) status |= kStatusPrefixLenOutOfRange;
  prefix_len = clamp(prefix_len, 0, seq_len);
  return {row, window > 0 && prefix_len > window ? prefix_len - window : 0, prefix_len, true};
}

// ---- records and their chain ----------------------------------------------------------------------------------

__device__ __forceinline__ u64 splitmix64(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The two kinds of chain: the hash that a record of (token, position) after `prev_hash` passes on.
struct SplitMixChain {
  static __device__ __forceinline__ u64 link(u64 prev_hash, u64 token, u64 position) {
    return splitmix64(splitmix64(splitmix64(prev_hash) ^ token) ^ position);
  }
};

// h' = A * h + b, so that a run of links is a prefix scan.
struct AffineChain {
  static __device__ __forceinline__ u64 addend(u64 token, u64 position) { return splitmix64(token ^ (position << 32)); }
  static __device__ __forceinline__ u64 link(u64 prev_hash, u64 token, u64 position) {
    return kAffineMultiplier * prev_hash + addend(token, position);
  }
};

__device__ __forceinline__ u64 anchor_hash() { return splitmix64(kCanaryChainAnchor); }

struct Record {
  u64 token;
  u64 position;
  u64 prev_hash;
  u64 real_kv_hash;
};

struct RealKvSource {
  const unsigned char* tensor;
  i64 row_stride;
  i64 page_size;
  i64 num_bytes_per_token;
  i64 num_hashed_bytes;  // of a slot, a multiple of 16

  // Of a slot that the buffer has.
  __device__ __forceinline__ const unsigned char* bytes(i64 slot) const {
    const unsigned row = static_cast<unsigned>(slot) / static_cast<unsigned>(page_size);
    const i64 token_in_row = slot - static_cast<i64>(row) * page_size;
    return tensor + static_cast<i64>(row) * row_stride + token_in_row * num_bytes_per_token;
  }
};

// One canary buffer with what it checks against and where it reports.
struct CanaryBuffer {
  unsigned char* canary_buf;
  i64 num_slots;  // below 2^32, and every source covers them (checked on the host)
  i64 slot_stride;  // below 2^31 (checked on the host)
  i64 kernel_kind;
  i64* violation_ring;
  i64* violation_details;  // null: none
  i64 ring_capacity;
  int* violation_write_index;
  i64* slot_run_counter;
  i64* kernel_run_counter;
  i64* skip_counters;  // null: none
  const int* enable_chain_position_assert;
  i64 num_real_kv_sources;  // 0 also where the mode is NONE
  RealKvSource real_kv_sources[kMaxRealKvSources];

  __device__ __forceinline__ bool has_slot(i64 slot) const { return static_cast<u64>(slot) < static_cast<u64>(num_slots); }

  // Of a slot that the buffer has.
  __device__ __forceinline__ u64* record(i64 slot) const {
    const u64 offset = static_cast<u64>(static_cast<unsigned>(slot)) * static_cast<unsigned>(slot_stride);
    return reinterpret_cast<u64*>(canary_buf + offset);
  }

  // For 16 bytes at once. Uniform over the launch; a stride of 40 is legal.
  __device__ __forceinline__ bool has_aligned_records() const {
    return ((reinterpret_cast<u64>(canary_buf) | static_cast<u64>(slot_stride)) & 15) == 0;
  }

  // Of a slot that the buffer has, where records are aligned. The coherent load: writers of other slots may run beside.
  __device__ __forceinline__ Record load_aligned(i64 slot) const {
    const ulonglong2* halves = reinterpret_cast<const ulonglong2*>(record(slot));
    const ulonglong2 head = halves[0];
    const ulonglong2 tail = halves[1];
    return {head.x, head.y, tail.x, tail.y};
  }

  // Of a slot that the buffer has.
  __device__ __forceinline__ Record load(i64 slot) const {
    if (has_aligned_records()) return load_aligned(slot);
    const u64* fields = record(slot);
    return {fields[0], fields[1], fields[2], fields[3]};
  }

  // To a slot that the buffer has.
  __device__ __forceinline__ void store(i64 slot, const Record& stored) const {
    u64* fields = record(slot);
    if (has_aligned_records()) {
      reinterpret_cast<ulonglong2*>(fields)[0] = make_ulonglong2(stored.token, stored.position);
      reinterpret_cast<ulonglong2*>(fields)[1] = make_ulonglong2(stored.prev_hash, stored.real_kv_hash);
    } else {
      fields[0] = stored.token;
      fields[1] = stored.position;
      fields[2] = stored.prev_hash;
      fields[3] = stored.real_kv_hash;
    }
  }

  // Hash of the slot's KV bytes, source by source; 0 without sources.
  __device__ __forceinline__ u64 hash_real_kv(i64 slot) const {
    u64 hash = 0;
    for (i64 s = 0; s < num_real_kv_sources; ++s) {
      const RealKvSource& source = real_kv_sources[s];
      const unsigned char* bytes = source.bytes(slot);
      u64 source_hash = 0;
#pragma unroll 4
      for (i64 offset = 0; offset < source.num_hashed_bytes; offset += 16) {
        const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(bytes + offset);
        source_hash = splitmix64(splitmix64(source_hash ^ words.x) ^ words.y);
      }
      hash = splitmix64(hash ^ source_hash);
    }
    return hash;
  }
};

struct Violation {
  i64 slot;
  i64 position;
  i64 stored_token;
  i64 expected_token;
  i64 stored_chain_hash;
  i64 expected_aux;
  i64 fail_reason_bits;
};

// Stores the row if the ring has room and counts it. The counter saturates: a sum past the largest int, or a value
// below zero that it held before, ends as the largest int, and no row is stored for it. Returns the place of the row's
// details, or null.
__device__ __forceinline__ i64* record_violation(const CanaryBuffer& buffer, const Violation& violation) {
  const int seq = atomicAdd(buffer.violation_write_index, 1);
  if (seq < 0 || seq == kInt32Max) {
    atomicExch(buffer.violation_write_index, kInt32Max);
    return nullptr;
  }
  if (seq >= buffer.ring_capacity) return nullptr;
  i64* row = buffer.violation_ring + static_cast<i64>(seq) * kViolationFields;
  row[0] = buffer.kernel_kind;
  row[1] = violation.slot;
  row[2] = violation.position;
  row[3] = violation.stored_token;
  row[4] = violation.expected_token;
  row[5] = violation.stored_chain_hash;
  row[6] = violation.expected_aux;
  row[7] = violation.fail_reason_bits;
  if (buffer.violation_details == nullptr) return nullptr;
  return buffer.violation_details + static_cast<i64>(seq) * kViolationDetailFields;
}

// What led to a violation.
struct Origin {
  i64 request;      // of the batch; -1: unknown
  i64 request_row;  // likewise
  i64 expected_position;
  i64 prev_slot;
  i64 next_slot;  // -1: none, or unknown
};

// Fields of a row of details.
constexpr int kDetailPrevRecord = 4;
constexpr int kDetailNextRecord = 8;
constexpr int kDetailRealKvHashes = 11;

// Stores details with zeros for what records and KV bytes would tell.
__device__ __forceinline__ void store_details(i64* details, const Origin& origin) {
  for (int field = 0; field < kViolationDetailFields; ++field) details[field] = 0;
  details[0] = origin.request;
  details[1] = origin.request_row;
  details[2] = origin.expected_position;
  details[3] = origin.prev_slot;
  details[7] = origin.next_slot;
}
