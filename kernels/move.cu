// Move: records go from slots to other slots or into a packed array, or packed ones, or tombstones, to slots; in every
// buffer. A block owns some entries in one buffer, a thread every so many 16 bytes of theirs. No atomics but the status
// bits: a destination of several entries holds 16 bytes of any of them at a time, and likewise one that is a source.
// Slots out of range are not touched, and packed as zeros. Cost: in each buffer, a slot's bytes read and written an
// entry (32 written for a tombstone), and its indices.

struct MoveArgs {
  IndexArray src_slots;  // null: records are packed ones or tombstones
  IndexArray dst_slots;  // null: records are packed into out_records
  const u64* records;    // null: none are given
  u64* out_records;
  int* out_status;
  i64 num_entries;
  i64 entries_per_block;
  i64 padding_slot;  // never a destination; -1: there is none
  i64 num_buffers;
  CanaryBuffer buffers[kMaxBuffers];
};

// Two words, or one and a 0 where the slot ends; aligned ones are always two.
__device__ __forceinline__ ulonglong2 load_words(const u64* words, i64 num_words, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<const ulonglong2*>(words);
  return make_ulonglong2(words[0], num_words > 1 ? words[1] : 0);
}

__device__ __forceinline__ void store_words(u64* words, i64 num_words, bool is_aligned, const ulonglong2& stored) {
  if (is_aligned) {
    *reinterpret_cast<ulonglong2*>(words) = stored;
  } else {
    words[0] = stored.x;
    if (num_words > 1) words[1] = stored.y;
  }
}

// Grid: blocks of args.entries_per_block times args.num_buffers.
extern "C" __global__ void __launch_bounds__(kMoveThreads) kvc_move(const __grid_constant__ MoveArgs args) {
  const bool is_from_slots = args.src_slots.data != nullptr;
  const bool is_to_slots = args.dst_slots.data != nullptr;
  const bool is_tombstone = !is_from_slots && args.records == nullptr;
  const unsigned b = blockIdx.x % static_cast<unsigned>(args.num_buffers);
  const CanaryBuffer& buffer = args.buffers[b];
  const i64 words_per_slot = is_tombstone ? kCanaryFieldsPerSlot : buffer.slot_stride / 8;
  const u64 packed_address = reinterpret_cast<u64>(args.records) | reinterpret_cast<u64>(args.out_records);
  const bool is_aligned = buffer.has_aligned_records() && (packed_address & 15) == 0;

  const i64 first = static_cast<i64>(blockIdx.x / static_cast<unsigned>(args.num_buffers)) * args.entries_per_block;
  const i64 num_entries = min(args.entries_per_block, args.num_entries - first);
  // Both fit 32 bits (checked on the host); dividing those is several times cheaper.
  const unsigned pairs_per_slot = static_cast<unsigned>((words_per_slot + 1) / 2);
  const unsigned num_pairs = static_cast<unsigned>(num_entries) * pairs_per_slot;
  bool is_skipped = false;
  for (unsigned pair = threadIdx.x; pair < num_pairs; pair += kMoveThreads) {
    const unsigned entry = pair / pairs_per_slot;
    const i64 i = first + entry;
    const i64 word = 2 * static_cast<i64>(pair - entry * pairs_per_slot);
    const i64 num_words = words_per_slot - word;
    const i64 packed = (b * args.num_entries + i) * words_per_slot + word;

    bool is_in_range = true;
    ulonglong2 moved = make_ulonglong2(0, 0);
    if (is_from_slots) {
      const i64 slot = args.src_slots[i];
      is_in_range = buffer.has_slot(slot);
      if (is_in_range) moved = load_words(buffer.record(slot) + word, num_words, is_aligned);
    } else if (!is_tombstone) {
      moved = load_words(args.records + packed, num_words, is_aligned);
    } else if (word == 0) {
      moved = make_ulonglong2(static_cast<u64>(kFreedToken), static_cast<u64>(kFreedPosition));
    }
    if (is_to_slots) {
      const i64 slot = args.dst_slots[i];
      is_in_range = is_in_range && buffer.has_slot(slot) && slot != args.padding_slot;
      if (is_in_range) store_words(buffer.record(slot) + word, num_words, is_aligned, moved);
    } else {
      store_words(args.out_records + packed, num_words, is_aligned, moved);
    }
    is_skipped |= !is_in_range;
  }
  if (is_skipped) report_status(args.out_status, kStatusMoveSlotOutOfRange);
}
