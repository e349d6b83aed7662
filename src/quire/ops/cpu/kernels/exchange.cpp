// An all-gather through shared memory: each rank copies its part into its slot and counts up; then it waits for the counters of
// the others and copies their slots.
//
// Each rank has two slots, used in turn. A rank that fills a slot for exchange n has seen all others at n - 1, so they have read
// what it put there at n - 2.
//
// A wait spins first, because ranks usually arrive within microseconds. Then it sleeps in the kernel, so that ranks that share a
// core do not slow each other.
#include "exchange.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace quire {

constexpr int SPINS = 4000;           // some 100 us
constexpr long NAP_NS = 20'000'000;  // a wake-up that was missed costs at most this

struct alignas(128) Arrival {  // HEADER bytes (parallel/address.py)
  std::atomic<uint32_t> count;     // exchanges whose slot this rank has filled
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `count` changes
};

static long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* nap) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, nap, nullptr, 0);
}

static void pause_core() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

static void arrive(Arrival& mine) {
  mine.count.fetch_add(1);
  if (mine.sleepers.load()) futex(&mine.count, FUTEX_WAKE, INT32_MAX, nullptr);
}

// Whether the rank has arrived at `target` before the deadline.
static bool await(Arrival& theirs, uint32_t target, std::chrono::steady_clock::time_point deadline) {
  auto reached = [&] { return int32_t(theirs.count.load(std::memory_order_acquire) - target) >= 0; };
  for (int i = 0; i < SPINS; i++) {
    if (reached()) return true;
    pause_core();
  }
  const timespec nap{0, NAP_NS};
  theirs.sleepers.fetch_add(1);
  bool came;
  while (!(came = reached()) && std::chrono::steady_clock::now() < deadline) {
    const uint32_t seen = theirs.count.load();
    if (int32_t(seen - target) < 0) futex(&theirs.count, FUTEX_WAIT, seen, &nap);
  }
  theirs.sleepers.fetch_sub(1);
  return came;
}

static char* slot_of(void* memory, int rank, int size, long slot, uint32_t turn) {
  return static_cast<char*>(memory) + size * sizeof(Arrival) + (2l * rank + (turn & 1)) * slot;
}

}  // namespace quire

using namespace quire;

EXPORT int quire_all_gather(void* memory, int rank, int size, long slot, const void* own, long rows, long width, void* all,
                            long timeout_ms) {
  Arrival* arrivals = static_cast<Arrival*>(memory);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const long most = width ? std::max(1l, slot / width) : rows;
  for (long first = 0; first < rows; first += most) {
    const long count = std::min(most, rows - first);
    const uint32_t turn = arrivals[rank].count.load(std::memory_order_relaxed);
    std::memcpy(slot_of(memory, rank, size, slot, turn), static_cast<const char*>(own) + first * width, count * width);
    arrive(arrivals[rank]);
    for (int offset = 0; offset < size; offset++) {
      const int from = (rank + offset) % size;
      if (from != rank && !await(arrivals[from], turn + 1, deadline)) return 1 + from;
      const char* part = slot_of(memory, from, size, slot, turn);
      char* into = static_cast<char*>(all) + (first * size + from) * width;
      for (long row = 0; row < count; row++) std::memcpy(into + row * size * width, part + row * width, width);
    }
  }
  return 0;
}
