// Shared by every kernel. Nothing is included: the sources are joined as text, behind the constants that
// cupy_kvcanary/sources.py writes from their Python definitions. All addressing is 64-bit.

using i64 = long long;
using u64 = unsigned long long;

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;

// An integer array of either width; which one is uniform over the launch, so the branch costs nothing.
struct IndexArray {
  const void* data;
  i64 is_int64;

  __device__ __forceinline__ i64 operator[](i64 index) const {
    return is_int64 ? __ldg(static_cast<const i64*>(data) + index) : __ldg(static_cast<const int*>(data) + index);
  }
};

__device__ __forceinline__ i64 clamp(i64 value, i64 low, i64 high) {
  return value < low ? low : value > high ? high : value;
}

// A slot of the full pool as a slot of the sliding-window pool; without a mapping the slot itself.
__device__ __forceinline__ i64 map_to_swa(i64 slot, const IndexArray& mapping, i64 lut_len, int& status) {
  if (mapping.data == nullptr || slot < 0) return slot;
  if (slot >= lut_len) {
    status |= kStatusSlotOutOfMapping;
    slot = lut_len - 1;
  }
  return mapping[slot];
}

__device__ __forceinline__ void report_status(int* out_status, int status) {
  if (status != 0 && out_status != nullptr) atomicOr(out_status, status);
}
