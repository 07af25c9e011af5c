// Runs the threads of a block as fibers of one OS thread, which switch only where a thread waits for others.
//
// Which of the ready fibers goes on is drawn from a seed, so that code which needs a missing barrier fails; when none
// is ready and some still wait, the barrier or warp operation they wait in can never complete, and that is reported.
#include "host.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <utility>
#include <vector>

// Present where the executable is linked with AddressSanitizer.
extern "C" __attribute__((weak)) void __sanitizer_start_switch_fiber(void **fake_stack, const void *, std::size_t);
extern "C" __attribute__((weak)) void __sanitizer_finish_switch_fiber(void *fake_stack, const void **, std::size_t *);

namespace host {

Index threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};

namespace {

// The C library's own: AddressSanitizer's wrapper forgets the red zones of a stack at every switch to it.
const auto switch_context =
    reinterpret_cast<decltype(&swapcontext)>(dlsym(dlopen("libc.so.6", RTLD_LAZY), "swapcontext"));

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStack = 64 * kPage;  // its lowest page is a guard

enum class State { ready, in_barrier, in_warp_operation, returned };

struct Fiber {
    ucontext_t context;
    char *stack;
    void *fake_stack;
    State state;
    // What a waiting thread waits in, and what it brought.
    const char *op;
    unsigned mask;
    std::uint64_t value;
    Site at;
    // The values of its warp in its last warp operation.
    std::uint64_t seen[kWarpSize];
};

struct Scheduler {
    ucontext_t context;
    const void *stack;
    std::size_t stack_size;
};

Scheduler scheduler;
std::vector<Fiber> fibers;
std::vector<unsigned> ready;
unsigned running, arrived, first_arrived, true_predicates, barrier_result;
const Entry *entry;
const void *entry_args;

// SplitMix64
struct Random {
    std::uint64_t state;
    std::uint64_t next() {
        std::uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    std::size_t below(std::size_t n) { return next() % n; }
};

std::string place(Site at) { return std::string(at.file) + ":" + std::to_string(at.line); }

std::string hex(unsigned mask) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

std::string describe(unsigned thread) {
    std::string text = "thread " + std::to_string(thread);
    if (thread >= blockDim.x) return text + " does not exist";
    const Fiber &fiber = fibers[thread];
    switch (fiber.state) {
    case State::ready: return text + " is running";
    case State::returned: return text + " has returned";
    case State::in_barrier: return text + " waits in " + fiber.op + " at " + place(fiber.at);
    case State::in_warp_operation:
        return text + " waits in " + fiber.op + "(" + hex(fiber.mask) + ") at " + place(fiber.at);
    }
    return text;
}

void run_thread() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_size);
    entry->call(entry_args);
    Fiber &self = fibers[running];
    self.state = State::returned;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(nullptr, scheduler.stack, scheduler.stack_size);
    setcontext(&scheduler.context);
}

void prepare(Fiber &fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack + kPage;
    fiber.context.uc_stack.ss_size = kStack - kPage;
    makecontext(&fiber.context, run_thread, 0);
    fiber.fake_stack = nullptr;
    fiber.state = State::ready;
}

void resume(unsigned thread) {
    Fiber &fiber = fibers[thread];
    running = threadIdx.x = thread;
    void *fake_stack = nullptr;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&fake_stack, fiber.stack + kPage, kStack - kPage);
    switch_context(&scheduler.context, &fiber.context);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void suspend() {
    Fiber &self = fibers[running];
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&self.fake_stack, scheduler.stack, scheduler.stack_size);
    switch_context(&self.context, &scheduler.context);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(self.fake_stack, &scheduler.stack, &scheduler.stack_size);
}

void make_ready(unsigned thread) {
    fibers[thread].state = State::ready;
    ready.push_back(thread);
}

bool same_operation(const Fiber &a, const Fiber &b) {
    return a.mask == b.mask && a.at.line == b.at.line && !std::strcmp(a.op, b.op) && !std::strcmp(a.at.file, b.at.file);
}

// The running thread arrives at a warp operation; it returns when all lanes of its mask have.
void meet(const char *op, unsigned mask, std::uint64_t value, Site at, bool orders_memory) {
    unsigned first = running / kWarpSize * kWarpSize, lane = running % kWarpSize;
    Fiber &self = fibers[running];
    self.op = op;
    self.mask = mask;
    self.value = value;
    self.at = at;
    if (!(mask >> lane & 1)) fail(at, std::string(op) + "(" + hex(mask) + "): the mask does not name this lane");
    unsigned here = 1u << lane;
    for (unsigned other = 0; other < kWarpSize && first + other < blockDim.x; ++other) {
        const Fiber &fiber = fibers[first + other];
        if (other == lane || fiber.state != State::in_warp_operation) continue;
        bool named = mask >> other & 1, names_self = fiber.mask >> lane & 1;
        if ((named || names_self) && !same_operation(self, fiber))
            fail(at, std::string(op) + "(" + hex(mask) + ") meets another operation: " + describe(first + other));
        if (named) here |= 1u << other;
    }
    self.state = State::in_warp_operation;
    if (here == mask) {
        std::uint64_t values[kWarpSize] = {};
        for (unsigned other = 0; other < kWarpSize; ++other)
            if (mask >> other & 1) values[other] = fibers[first + other].value;
        for (unsigned other = 0; other < kWarpSize; ++other) {
            if (!(mask >> other & 1)) continue;
            std::memcpy(fibers[first + other].seen, values, sizeof values);
            make_ready(first + other);
        }
        if (orders_memory) races_sync_warp(first / kWarpSize, mask);
    }
    suspend();
}

// No thread is ready: the first of the waiting ones, and what those it waits for do instead.
[[noreturn]] void fail_stuck() {
    running = 0;
    while (fibers[running].state == State::returned) ++running;
    threadIdx.x = running;
    const Fiber &self = fibers[running];
    bool in_warp = self.state == State::in_warp_operation;
    unsigned first = in_warp ? running / kWarpSize * kWarpSize : 0, end = in_warp ? first + kWarpSize : blockDim.x;
    std::string text = self.op;
    if (in_warp) text += "(" + hex(self.mask) + ")";
    text += " is not reached by all threads";
    unsigned missing = 0;
    for (unsigned thread = first; thread < end; ++thread) {
        if (in_warp && !(self.mask >> (thread - first) & 1)) continue;
        if (thread < blockDim.x && fibers[thread].state == self.state && same_operation(self, fibers[thread])) continue;
        if (missing++ < 4) text += "\n  " + describe(thread);
    }
    if (missing > 4) text += "\n  and " + std::to_string(missing - 4) + " more";
    fail(self.at, text);
}

void run_block(Random &random) {
    ready.clear();
    arrived = true_predicates = 0;
    for (unsigned thread = 0; thread < blockDim.x; ++thread) {
        prepare(fibers[thread]);
        ready.push_back(thread);
    }
    unsigned returned = 0;
    while (!ready.empty()) {
        std::swap(ready[random.below(ready.size())], ready.back());
        unsigned thread = ready.back();
        ready.pop_back();
        resume(thread);
        returned += fibers[thread].state == State::returned;
    }
    if (returned < blockDim.x) fail_stuck();
}

// Shared memory starts undefined. Byte by byte: AddressSanitizer would object to a memset over its red zones.
void overwrite_shared(Random &random) {
    for (volatile char *byte = __start_kvc_shared; byte < __stop_kvc_shared; ++byte) *byte = random.next();
}

void make_fibers(unsigned count) {
    while (fibers.size() < count) {
        void *stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, kPage, PROT_NONE)) std::perror("fiber stack"), std::exit(1);
        fibers.emplace_back().stack = static_cast<char *>(stack);
    }
}

}  // namespace

unsigned barrier(const char *op, bool predicate, Site at) {
    Fiber &self = fibers[running];
    self.op = op;
    self.mask = 0;
    self.at = at;
    if (arrived == 0) first_arrived = running;
    if (!same_operation(self, fibers[first_arrived]))
        fail(at, std::string(op) + " meets another barrier: " + describe(first_arrived));
    self.state = State::in_barrier;
    true_predicates += predicate;
    if (++arrived == blockDim.x) {
        barrier_result = true_predicates;
        arrived = true_predicates = 0;
        for (unsigned thread = 0; thread < blockDim.x; ++thread) make_ready(thread);
        races_barrier();
    }
    suspend();
    return barrier_result;
}

const std::uint64_t *exchange(const char *op, unsigned mask, std::uint64_t value, Site at) {
    meet(op, mask, value, at, false);
    return fibers[running].seen;
}

void sync_warp(const char *op, unsigned mask, Site at) { meet(op, mask, 0, at, true); }

std::string position() {
    if (!entry) return "";
    return std::string("kernel ") + entry->name + ", block " + std::to_string(blockIdx.x) + ", thread " +
           std::to_string(running);
}

void fail(Site at, const std::string &text) {
    std::fprintf(stderr, "%s, %s: %s\n", position().c_str(), place(at).c_str(), text.c_str());
    std::fflush(stderr);
    _exit(1);
}

void launch(const Entry &launched, const void *args, unsigned grid, unsigned block, std::uint64_t seed,
            void (*after_block)()) {
    Random random{seed};
    entry = &launched;
    entry_args = args;
    gridDim.x = grid;
    blockDim.x = block;
    make_fibers(block);
    races_begin_launch();
    std::vector<unsigned> order(grid);
    for (unsigned i = 0; i < grid; ++i) {
        std::size_t j = random.below(i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (unsigned i : order) {
        blockIdx.x = i;
        overwrite_shared(random);
        races_begin_block();
        run_block(random);
        after_block();
    }
    entry = nullptr;
}

}  // namespace host
