// What the CUDA layer (cuda.h), the scheduler, the race detector and the worker share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace host {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreads = 1024;

// A place in a kernel source; the sources carry #line, so this is the .cu file and its line.
struct Site {
    const char *file;
    int line;
};

struct Entry {
    const char *name;
    std::size_t args_size;
    void (*call)(const void *args);
};

// Defined by the generated translation unit of a kernel source; ends with a null name.
extern const Entry entries[];

// ---- scheduler.cpp: threads, barriers, warp operations ----

struct Index {
    unsigned x, y, z;
};

// CUDA's variables, set whenever another thread goes on.
extern Index threadIdx, blockIdx, blockDim, gridDim;

// The section that the build moves __shared__ variables to; both null in a kernel without any.
extern "C" __attribute__((weak)) char __start_kvc_shared[], __stop_kvc_shared[];

// Waits until every thread of the block is here; returns how many of them brought a true predicate.
unsigned barrier(const char *op, bool predicate, Site at);

// Waits until every lane of `mask` is here; returns the 32 values they brought, those of other lanes zero.
const std::uint64_t *exchange(const char *op, unsigned mask, std::uint64_t value, Site at);

// The same without values, and it orders the memory accesses of these lanes.
void sync_warp(const char *op, unsigned mask, Site at);

// Prints the text with kernel, block, thread and line, and ends the process.
[[noreturn]] void fail(Site at, const std::string &text);

// "kernel K, block B, thread T" of the running thread; empty between launches.
std::string position();

// Runs all blocks, one after the other, in an order that `seed` shuffles, and after each block `after_block`.
void launch(const Entry &entry, const void *args, unsigned grid, unsigned block, std::uint64_t seed,
            void (*after_block)());

// ---- races.cpp: happens-before between the threads of a launch ----

void watch(const std::string &name, const void *begin, std::size_t size);
void forget_watched();
void races_begin_launch();
void races_begin_block();
void races_barrier();
void races_sync_warp(unsigned warp, unsigned mask);
void races_atomic(const void *address, std::size_t size);

}  // namespace host
