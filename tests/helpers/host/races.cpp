// Finds data races between the threads of a launch.
//
// Kernels compiled with -fsanitize=thread call a function at each memory access; these are those functions. The order
// they go by is CUDA's: __syncthreads orders the threads of a block, __syncwarp the lanes it names, and nothing else
// orders anything within a launch: no shuffle, no vote, no fence, no atomic. So the outcome does not depend on which
// thread happened to run first. (The runtime of ThreadSanitizer itself does not fit: it takes a third of a second and
// most of a gigabyte for 1024 fibers, and a thread of a later block gets the identity of a finished one, so that races
// between the two go unseen.)
#include "host.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>

extern "C" char __executable_start[];

namespace host {
namespace {

enum class Kind : std::uint8_t { read, atomic, write };

struct Access {
    std::uintptr_t pc;
    unsigned block, epoch, clock;
    std::uint16_t thread;
    Kind kind;
    std::uint8_t bytes;  // which of the eight bytes of a word

    unsigned warp() const { return thread / kWarpSize; }
    unsigned lane() const { return thread % kWarpSize; }
};

// The accesses to an aligned word of eight bytes that a later one can still race with.
using Word = std::vector<Access>;

struct Region {
    std::string name;
    std::uintptr_t begin, end;
    std::vector<Word> words;
};

std::vector<Region> regions;  // by address
Region shared{"shared memory", 0, 0, {}};

// Barriers that the running block has passed; within such an epoch, a vector clock for each lane of each warp.
unsigned epoch;
unsigned clocks[kMaxThreads / kWarpSize][kWarpSize][kWarpSize];

bool happens_before(const Access &a, const Access &b) {
    if (a.block != b.block) return false;
    if (a.epoch != b.epoch || a.thread == b.thread) return true;
    return a.warp() == b.warp() && a.clock <= clocks[b.warp()][b.lane()][a.lane()];
}

bool conflict(Kind a, Kind b) { return a != b || a == Kind::write; }

// Accesses of one kind to the same bytes, none ordered before another: two of different blocks conflict with whatever
// conflicts with a third; so do two of different warps of the third's block. Keeping more would cost quadratic time.
bool redundant(const Word &word, const Access &access) {
    const Access *first = nullptr;
    for (const Access &old : word) {
        if (old.kind != access.kind || (old.bytes & access.bytes) != access.bytes) continue;
        if (!first) first = &old;
        else if (old.block != first->block) return true;
        else if (old.block == access.block && old.warp() != first->warp()) return true;
    }
    return false;
}

// file:line of a return address. The innermost inlined call that lies in a kernel, not in this layer.
std::string source_line(std::uintptr_t pc) {
    char command[128];
    std::snprintf(command, sizeof command, "addr2line -i -e /proc/%d/exe 0x%zx", getpid(),
                  pc - 1 - reinterpret_cast<std::uintptr_t>(__executable_start));
    std::string found = "an unknown line";
    if (FILE *pipe = popen(command, "r")) {
        char line[1024];
        while (std::fgets(line, sizeof line, pipe)) {
            line[std::strcspn(line, " \n")] = 0;
            if (std::strstr(line, "cuda.h:") || std::strstr(line, "??")) continue;
            found = line + (line[0] == '.' ? 2 : 0);  // without the "./" of the folder it was compiled in
            break;
        }
        pclose(pipe);
    }
    return found;
}

const char *verb(Kind kind) {
    return kind == Kind::read ? "reads" : kind == Kind::write ? "writes" : "atomically updates";
}

[[noreturn]] void report(const Region &region, std::uintptr_t address, const Access &now, const Access &before) {
    std::fprintf(stderr,
                 "%s, %s: data race: %s byte %zu of %s, which block %u, thread %u %s at %s, with no barrier between\n",
                 position().c_str(), source_line(now.pc).c_str(), verb(now.kind),
                 static_cast<std::size_t>(address - region.begin), region.name.c_str(), before.block,
                 unsigned{before.thread}, verb(before.kind), source_line(before.pc).c_str());
    std::fflush(stderr);
    _exit(1);
}

void access_word(const Region &region, Word &word, std::uintptr_t base, const Access &now) {
    std::size_t kept = 0;
    for (Access &old : word) {
        unsigned both = old.bytes & now.bytes;
        if (both) {
            if (happens_before(old, now)) {
                // What races with `old` later on, races with `now` too.
                if (now.kind == Kind::write || now.kind == old.kind) old.bytes &= ~both;
            } else if (conflict(old.kind, now.kind)) {
                report(region, base + __builtin_ctz(both), now, old);
            }
        }
        if (old.bytes) word[kept++] = old;
    }
    word.resize(kept);
    if (!redundant(word, now)) word.push_back(now);
}

Region *region_of(std::uintptr_t address) {
    if (address >= shared.begin && address < shared.end) return &shared;
    auto after = std::upper_bound(regions.begin(), regions.end(), address,
                                  [](std::uintptr_t a, const Region &region) { return a < region.begin; });
    return after == regions.begin() || address >= after[-1].end ? nullptr : &after[-1];
}

void access(const void *pointer, std::size_t size, Kind kind, const void *return_address) {
    std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(pointer);
    Region *region = region_of(begin);
    if (!region) return;  // a local variable or an argument
    std::uintptr_t end = std::min(begin + size, region->end), first_word = region->begin / 8;
    if (region->words.empty()) region->words.resize((region->end + 7) / 8 - first_word);
    Access now{reinterpret_cast<std::uintptr_t>(return_address), blockIdx.x, epoch, 0,
               static_cast<std::uint16_t>(threadIdx.x), kind, 0};
    now.clock = clocks[now.warp()][now.lane()][now.lane()];
    for (std::uintptr_t base = begin & ~std::uintptr_t{7}; base < end; base += 8) {
        unsigned bytes = 0xff;
        if (base < begin) bytes &= 0xff << (begin - base);
        if (base + 8 > end) bytes &= 0xff >> (base + 8 - end);
        now.bytes = static_cast<std::uint8_t>(bytes);
        access_word(*region, region->words[base / 8 - first_word], base, now);
    }
}

}  // namespace

void watch(const std::string &name, const void *begin, std::size_t size) {
    std::uintptr_t address = reinterpret_cast<std::uintptr_t>(begin);
    auto after = std::upper_bound(regions.begin(), regions.end(), address,
                                  [](std::uintptr_t a, const Region &region) { return a < region.begin; });
    regions.insert(after, Region{name, address, address + size, {}});
}

void forget_watched() { regions.clear(); }

void races_begin_launch() {
    for (Region &region : regions) region.words.clear();
    shared.begin = reinterpret_cast<std::uintptr_t>(__start_kvc_shared);
    shared.end = reinterpret_cast<std::uintptr_t>(__stop_kvc_shared);
}

void races_begin_block() {
    shared.words.clear();
    races_barrier();
}

void races_barrier() {
    ++epoch;
    // A lane's own entry is one ahead of what the others know of it.
    std::memset(clocks, 0, sizeof clocks);
    for (auto &warp : clocks)
        for (unsigned lane = 0; lane < kWarpSize; ++lane) warp[lane][lane] = 1;
}

void races_sync_warp(unsigned warp, unsigned mask) {
    unsigned joined[kWarpSize] = {};
    for (unsigned lane = 0; lane < kWarpSize; ++lane)
        if (mask >> lane & 1)
            for (unsigned other = 0; other < kWarpSize; ++other)
                joined[other] = std::max(joined[other], clocks[warp][lane][other]);
    for (unsigned lane = 0; lane < kWarpSize; ++lane)
        if (mask >> lane & 1) {
            std::memcpy(clocks[warp][lane], joined, sizeof joined);
            ++clocks[warp][lane][lane];
        }
}

void races_atomic(const void *address, std::size_t size) {
    access(address, size, Kind::atomic, __builtin_return_address(0));
}

}  // namespace host

// ---- what g++ and clang call under -fsanitize=thread ----

using host::access;
using host::Kind;

#define CALLER __builtin_return_address(0)
#define ACCESS(SIZE)                                                                                                  \
    void __tsan_read##SIZE(void *p) { access(p, SIZE, Kind::read, CALLER); }                                          \
    void __tsan_write##SIZE(void *p) { access(p, SIZE, Kind::write, CALLER); }                                        \
    void __tsan_unaligned_read##SIZE(void *p) { access(p, SIZE, Kind::read, CALLER); }                                \
    void __tsan_unaligned_write##SIZE(void *p) { access(p, SIZE, Kind::write, CALLER); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void *p, std::size_t size) { access(p, size, Kind::read, CALLER); }
void __tsan_write_range(void *p, std::size_t size) { access(p, size, Kind::write, CALLER); }
void *__tsan_memcpy(void *to, const void *from, std::size_t size) {
    access(from, size, Kind::read, CALLER);
    access(to, size, Kind::write, CALLER);
    return std::memcpy(to, from, size);
}
void *__tsan_memmove(void *to, const void *from, std::size_t size) {
    access(from, size, Kind::read, CALLER);
    access(to, size, Kind::write, CALLER);
    return std::memmove(to, from, size);
}
void *__tsan_memset(void *to, int value, std::size_t size) {
    access(to, size, Kind::write, CALLER);
    return std::memset(to, value, size);
}
}
