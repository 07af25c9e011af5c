// Answers requests from stdin on stdout: arrays in, launches one after the other, arrays out.
//
// A request, all integers 64 bits wide:  seed, seconds, count of arrays, count of launches;
// for each array   address, size, length of its name, name, bytes;
// for each launch  length of the entry's name, name, grid, block, size of the arguments, arguments,
//                  count of pointers among them, (offset in the arguments, array) each.
// The answer is one byte, then the bytes of all arrays. After a report on stderr there is none: the process ends.
#include "host.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>

extern "C" __attribute__((weak)) void __asan_poison_memory_region(const volatile void *, std::size_t);

// Reports pass through SIGABRT, where the position is added; leaks are no concern of a kernel.
extern "C" const char *__asan_default_options() { return "abort_on_error=1:handle_abort=0:detect_leaks=0"; }
extern "C" const char *__ubsan_default_options() { return "abort_on_error=1:handle_abort=0:print_stacktrace=1"; }

namespace {

constexpr std::size_t kGuard = 64;
constexpr unsigned char kGuardByte = 0xa5;

bool has_red_zones() { return __asan_poison_memory_region != nullptr; }

// An array exactly its size, with the alignment it has where it comes from. AddressSanitizer has its red zones on both
// sides; without it guard bytes stand there.
struct Array {
    std::string name;
    std::size_t size;
    char *block, *data;
};

std::vector<Array> arrays;

std::uint64_t read_number() {
    std::uint64_t value;
    if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(0);
    return value;
}

void read_bytes(void *to, std::size_t size) {
    if (size && std::fread(to, size, 1, stdin) != 1) std::exit(0);
}

std::string read_text() {
    std::string text(read_number(), 0);
    read_bytes(text.data(), text.size());
    return text;
}

void read_array() {
    std::size_t offset = read_number() % alignof(std::max_align_t), size = read_number();
    std::size_t guard = has_red_zones() ? 0 : kGuard;
    Array array{read_text(), size, static_cast<char *>(std::malloc(guard + offset + size + guard)), nullptr};
    array.data = array.block + guard + offset;
    if (has_red_zones()) {
        __asan_poison_memory_region(array.block, offset);
    } else {
        std::memset(array.block, kGuardByte, guard + offset);
        std::memset(array.data + size, kGuardByte, guard);
    }
    read_bytes(array.data, size);
    host::watch(array.name, array.data, size);
    arrays.push_back(array);
}

void check_guards() {
    if (has_red_zones()) return;
    for (const Array &array : arrays)
        for (const char *p = array.block; p < array.data + array.size + kGuard; ++p) {
            if (p == array.data) p += array.size;
            if (static_cast<unsigned char>(*p) == kGuardByte) continue;
            std::fprintf(stderr, "%s or another of its block: %s of %zu bytes is written at byte %td\n",
                         host::position().c_str(), array.name.c_str(), array.size, p - array.data);
            std::exit(1);
        }
}

const host::Entry &find_entry(const std::string &name) {
    for (const host::Entry *entry = host::entries; entry->name; ++entry)
        if (name == entry->name) return *entry;
    std::fprintf(stderr, "no entry %s in this source\n", name.c_str());
    std::exit(1);
}

void run_launch(std::uint64_t seed) {
    const host::Entry &entry = find_entry(read_text());
    unsigned grid = read_number(), block = read_number();
    std::string args = read_text();
    if (args.size() != entry.args_size || block < 1 || block > host::kMaxThreads) {
        std::fprintf(stderr, "%s: %zu bytes of arguments for %zu, %u threads a block for at most %u\n", entry.name,
                     args.size(), entry.args_size, block, host::kMaxThreads);
        std::exit(1);
    }
    for (std::uint64_t pointers = read_number(); pointers; --pointers) {
        std::size_t offset = read_number();
        const char *data = arrays.at(read_number()).data;
        std::memcpy(args.data() + offset, &data, sizeof data);
    }
    host::launch(entry, args.data(), grid, block, seed, check_guards);
}

void on_signal(int signal) {
    const char *text = signal == SIGALRM ? "it does not end" : strsignal(signal);
    std::fprintf(stderr, "%s: %s\n", host::position().c_str(), text);
    std::fflush(stderr);
    _exit(1);
}

}  // namespace

int main() {
    for (int signal : {SIGABRT, SIGALRM, SIGFPE, SIGILL}) std::signal(signal, on_signal);
    if (!has_red_zones())
        for (int signal : {SIGSEGV, SIGBUS}) std::signal(signal, on_signal);
    for (;;) {
        std::uint64_t seed = read_number();
        alarm(read_number());
        std::uint64_t array_count = read_number(), launch_count = read_number();
        while (array_count--) read_array();
        while (launch_count--) run_launch(seed++);
        alarm(0);
        std::putchar(0);
        for (const Array &array : arrays) std::fwrite(array.data, 1, array.size, stdout);
        std::fflush(stdout);
        host::forget_watched();
        for (const Array &array : arrays) std::free(array.block);
        arrays.clear();
    }
}
