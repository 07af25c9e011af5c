// The part of CUDA C++ that kernels/*.cu use, for a C++20 compiler on the host.
//
// Kernel sources are compiled unchanged behind this header. A CUDA thread is a fiber (scheduler.cpp). Whatever waits
// for other threads takes its caller's place as a default argument, so that a report names the line in the kernel.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host.h"

// ---- qualifiers ----

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

// Blocks run one after the other, so one static copy serves them all. The build moves these variables to a section of
// their own, where the scheduler overwrites them between blocks and the race detector knows them. (An attribute would
// not do: g++ ignores it in templates, and AddressSanitizer leaves out what has one.)
#define __shared__ static

#define HOST_INLINE inline __attribute__((always_inline))
#define HOST_SITE host::Site at = {__builtin_FILE(), __builtin_LINE()}

// ---- vector types ----

#define HOST_VECTOR(NAME, T)                                                                                          \
    struct __align__(2 * sizeof(T)) NAME##2 { T x, y; };                                                              \
    struct NAME##3 { T x, y, z; };                                                                                    \
    struct __align__(sizeof(T) < 4 ? 4 * sizeof(T) : 16) NAME##4 { T x, y, z, w; };                                   \
    HOST_INLINE NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                                   \
    HOST_INLINE NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }                                           \
    HOST_INLINE NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTOR(char, signed char)
HOST_VECTOR(uchar, unsigned char)
HOST_VECTOR(short, short)
HOST_VECTOR(ushort, unsigned short)
HOST_VECTOR(int, int)
HOST_VECTOR(uint, unsigned)
HOST_VECTOR(longlong, long long)
HOST_VECTOR(ulonglong, unsigned long long)
HOST_VECTOR(float, float)
HOST_VECTOR(double, double)
#undef HOST_VECTOR

using host::blockDim;
using host::blockIdx;
using host::gridDim;
using host::threadIdx;
constexpr int warpSize = host::kWarpSize;

// ---- arithmetic ----

template <class A, class B> HOST_INLINE constexpr std::common_type_t<A, B> min(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return y < x ? y : x;
}
template <class A, class B> HOST_INLINE constexpr std::common_type_t<A, B> max(A a, B b) {
    std::common_type_t<A, B> x = a, y = b;
    return x < y ? y : x;
}

HOST_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
HOST_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
HOST_INLINE int __clz(int v) { return v ? __builtin_clz(v) : 32; }
HOST_INLINE int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
HOST_INLINE int __ffs(int v) { return __builtin_ffs(v); }
HOST_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
HOST_INLINE unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
HOST_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned __int128>(a) * b >> 64;
}
HOST_INLINE long long __mul64hi(long long a, long long b) { return static_cast<__int128>(a) * b >> 64; }
HOST_INLINE unsigned __brev(unsigned v) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (v >> bit & 1) << (31 - bit);
    return reversed;
}
HOST_INLINE unsigned long long __brevll(unsigned long long v) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 | __brev(v >> 32);
}

// ---- loads and stores with a cache hint ----

template <class T> HOST_INLINE T __ldg(const T *p) { return *p; }
template <class T> HOST_INLINE T __ldca(const T *p) { return *p; }
template <class T> HOST_INLINE T __ldcg(const T *p) { return *p; }
template <class T> HOST_INLINE T __ldcs(const T *p) { return *p; }
template <class T> HOST_INLINE T __ldcv(const T *p) { return *p; }
template <class T> HOST_INLINE void __stwb(T *p, std::type_identity_t<T> v) { *p = v; }
template <class T> HOST_INLINE void __stcg(T *p, std::type_identity_t<T> v) { *p = v; }
template <class T> HOST_INLINE void __stcs(T *p, std::type_identity_t<T> v) { *p = v; }
template <class T> HOST_INLINE void __stwt(T *p, std::type_identity_t<T> v) { *p = v; }

// ---- barriers, fences ----

HOST_INLINE void __syncthreads(HOST_SITE) { host::barrier("__syncthreads", false, at); }
HOST_INLINE int __syncthreads_count(int p, HOST_SITE) { return host::barrier("__syncthreads_count", p != 0, at); }
HOST_INLINE int __syncthreads_or(int p, HOST_SITE) { return host::barrier("__syncthreads_or", p != 0, at) != 0; }
HOST_INLINE int __syncthreads_and(int p, HOST_SITE) {
    return host::barrier("__syncthreads_and", p != 0, at) == blockDim.x;
}
HOST_INLINE void __syncwarp(unsigned mask = 0xffffffffu, HOST_SITE) { host::sync_warp("__syncwarp", mask, at); }

// All threads share one OS thread, and only barriers order memory here, so a fence has nothing to do.
HOST_INLINE void __threadfence() {}
HOST_INLINE void __threadfence_block() {}
HOST_INLINE void __threadfence_system() {}
HOST_INLINE void __nanosleep(unsigned) {}
HOST_INLINE void __trap(HOST_SITE) { host::fail(at, "__trap"); }

// ---- warp operations ----

namespace host {

HOST_INLINE unsigned lane() { return threadIdx.x % kWarpSize; }

template <class T> HOST_INLINE std::uint64_t to_bits(T value) {
    static_assert(std::is_arithmetic_v<T>, "warp operations take numbers");
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> HOST_INLINE T from_bits(std::uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The value of lane `source`, or the own one where the source lies outside the segment of `width` lanes.
template <class T>
HOST_INLINE T shuffle(const char *op, unsigned mask, T value, long long source, bool inside, Site at) {
    const std::uint64_t *values = exchange(op, mask, to_bits(value), at);
    if (!inside) return value;
    if (!(mask >> source & 1))
        fail(at, std::string(op) + " reads lane " + std::to_string(source) + ", not in its mask");
    return from_bits<T>(values[source]);
}

template <class T, class F> HOST_INLINE T reduce(const char *op, unsigned mask, T value, F combine, Site at) {
    const std::uint64_t *values = exchange(op, mask, to_bits(value), at);
    for (unsigned other = 0; other < kWarpSize; ++other)
        if (other != lane() && mask >> other & 1) value = combine(value, from_bits<T>(values[other]));
    return value;
}

}  // namespace host

template <class T> HOST_INLINE T __shfl_sync(unsigned mask, T v, int source, int width = warpSize, HOST_SITE) {
    int first = host::lane() & ~(width - 1);
    return host::shuffle("__shfl_sync", mask, v, first + (source & (width - 1)), true, at);
}
template <class T> HOST_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = warpSize, HOST_SITE) {
    long long first = host::lane() & ~(width - 1), source = static_cast<long long>(host::lane()) - delta;
    return host::shuffle("__shfl_up_sync", mask, v, source, source >= first, at);
}
template <class T> HOST_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = warpSize, HOST_SITE) {
    long long first = host::lane() & ~(width - 1), source = static_cast<long long>(host::lane()) + delta;
    return host::shuffle("__shfl_down_sync", mask, v, source, source < first + width, at);
}
template <class T> HOST_INLINE T __shfl_xor_sync(unsigned mask, T v, int bits, int width = warpSize, HOST_SITE) {
    int first = host::lane() & ~(width - 1), source = host::lane() ^ bits;
    return host::shuffle("__shfl_xor_sync", mask, v, source, source < first + width, at);
}

HOST_INLINE unsigned __ballot_sync(unsigned mask, int predicate, HOST_SITE) {
    const std::uint64_t *values = host::exchange("__ballot_sync", mask, predicate != 0, at);
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < host::kWarpSize; ++lane) ballot |= static_cast<unsigned>(values[lane]) << lane;
    return ballot;
}
HOST_INLINE int __any_sync(unsigned mask, int predicate, HOST_SITE) {
    return host::reduce("__any_sync", mask, int{predicate != 0}, [](int a, int b) { return a | b; }, at);
}
HOST_INLINE int __all_sync(unsigned mask, int predicate, HOST_SITE) {
    return host::reduce("__all_sync", mask, int{predicate != 0}, [](int a, int b) { return a & b; }, at);
}
template <class T> HOST_INLINE unsigned __match_any_sync(unsigned mask, T v, HOST_SITE) {
    const std::uint64_t *values = host::exchange("__match_any_sync", mask, host::to_bits(v), at);
    unsigned equal = 0;
    for (unsigned lane = 0; lane < host::kWarpSize; ++lane)
        if (mask >> lane & 1 && values[lane] == host::to_bits(v)) equal |= 1u << lane;
    return equal;
}

#define HOST_REDUCE(NAME, REQUIREMENT, EXPRESSION)                                                                    \
    template <class T> requires REQUIREMENT<T> HOST_INLINE T NAME(unsigned mask, T v, HOST_SITE) {                    \
        return host::reduce(#NAME, mask, v, [](T a, T b) -> T { return EXPRESSION; }, at);                            \
    }
HOST_REDUCE(__reduce_add_sync, std::integral, static_cast<unsigned>(a) + static_cast<unsigned>(b))
HOST_REDUCE(__reduce_min_sync, std::integral, b < a ? b : a)
HOST_REDUCE(__reduce_max_sync, std::integral, a < b ? b : a)
HOST_REDUCE(__reduce_and_sync, std::unsigned_integral, a & b)
HOST_REDUCE(__reduce_or_sync, std::unsigned_integral, a | b)
HOST_REDUCE(__reduce_xor_sync, std::unsigned_integral, a ^ b)
#undef HOST_REDUCE

// Hardware promises nothing about which other lanes are in step; here none is.
HOST_INLINE unsigned __activemask() { return 1u << host::lane(); }

// ---- atomics ----

namespace host {

template <class T>
concept Atomic = std::same_as<T, int> || std::same_as<T, unsigned> || std::same_as<T, unsigned long long>;
template <class T>
concept AtomicBits = Atomic<T> || std::same_as<T, long long>;

// Threads switch only where they wait, so this is atomic as it stands. It is not instrumented for races (an atomic is
// announced as such instead), but it is for bounds and alignment.
template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T update(T *address, F next) {
    T old = *address;
    *address = next(old);
    return old;
}

template <class T, class F> HOST_INLINE T atomic(T *address, F next) {
#ifdef KVC_RACES
    races_atomic(address, sizeof(T));
#endif
    return update(address, next);
}

}  // namespace host

#define HOST_ATOMIC(NAME, REQUIREMENT, EXPRESSION)                                                                    \
    template <class T> requires host::REQUIREMENT<T> HOST_INLINE T NAME(T *address, std::type_identity_t<T> v) {      \
        return host::atomic(address, [v](T old) -> T { return EXPRESSION; });  \
    }
HOST_ATOMIC(atomicAdd, Atomic, static_cast<std::make_unsigned_t<T>>(old) + static_cast<std::make_unsigned_t<T>>(v))
HOST_ATOMIC(atomicExch, Atomic, v)
HOST_ATOMIC(atomicMin, AtomicBits, v < old ? v : old)
HOST_ATOMIC(atomicMax, AtomicBits, old < v ? v : old)
HOST_ATOMIC(atomicAnd, AtomicBits, old & v)
HOST_ATOMIC(atomicOr, AtomicBits, old | v)
HOST_ATOMIC(atomicXor, AtomicBits, old ^ v)
#undef HOST_ATOMIC
template <class T> requires host::Atomic<T>
HOST_INLINE T atomicCAS(T *address, std::type_identity_t<T> compare, std::type_identity_t<T> v) {
    return host::atomic(address, [=](T old) { return old == compare ? v : old; });
}

// ---- how the generated translation unit lists its entries ----

namespace host {

template <class Args> constexpr std::size_t args_size(void (*)(Args)) { return sizeof(Args); }

template <class Args> void call(void (*kernel)(Args), const void *args) { kernel(*static_cast<const Args *>(args)); }

}  // namespace host

#define HOST_ENTRY(NAME) {#NAME, host::args_size(NAME), [](const void *args) { host::call(NAME, args); }}
