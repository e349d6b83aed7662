// An all-gather through shared memory: each rank copies its part into its slot and counts up; then it waits for the counters of
// the others and copies their slots.
//
// Each rank has two slots, used in turn. A rank that fills a slot for exchange n has seen all others at n - 1, so they have read
// what it put there at n - 2.
//
// A wait spins first, because ranks usually arrive within microseconds. Then it sleeps in the kernel, so that ranks that share a
// core do not slow each other. A rank that sleeps looks now and then whether the process that it waits for has ended, or is stopped.
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "layer.h"
#include "team.h"

namespace quire {

constexpr long NAP_MS = 20;             // a wake-up that was missed costs at most this
constexpr long LOOK_MS = 200;           // how often a rank looks whether another is alive
constexpr long STOPPED_MS = 10'000;     // how long a rank may be stopped, as by a debugger
constexpr long PARALLEL_BYTES = 1 << 18;  // from which on several threads copy

struct alignas(128) Arrival {  // HEADER bytes (parallel/rank_address.py)
  std::atomic<uint32_t> count;     // exchanges whose slot this rank has filled
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `count` changes
  std::atomic<int32_t> process;    // 0: it has not joined yet
};

static void arrive(Arrival& mine) {
  mine.count.fetch_add(1);
  if (mine.sleepers.load()) futex(&mine.count, FUTEX_WAKE, INT32_MAX);
}

// The letter of a process' state in /proc, which knows one that has ended before its parent has seen it; 0: there is no such process.
static char state_of(int process) {
  char name[32], text[512];
  snprintf(name, sizeof(name), "/proc/%d/stat", process);
  const int file = ::open(name, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT ? 0 : '?';
  const ssize_t size = ::read(file, text, sizeof(text) - 1);
  ::close(file);
  if (size <= 0) return size < 0 && errno == ESRCH ? 0 : '?';
  text[size] = 0;
  const char* end = strrchr(text, ')');  // of the process' name
  return end && end[1] == ' ' ? end[2] : '?';
}

// RANK_ENDED or RANK_STOPPED; 0: the process is alive, or nothing is known of it.
static int fault_of(const Arrival& theirs) {
  const int process = theirs.process.load();
  const char state = process ? state_of(process) : '?';
  if (state == 'Z' || state == 'X' || (!state && state_of(getpid()))) return RANK_ENDED;  // (there may be no /proc)
  return state == 'T' || state == 't' ? RANK_STOPPED : 0;
}

// 0: the rank has arrived at `target`. Time in which this process itself was stopped does not count.
static int await(Arrival& theirs, uint32_t target, long timeout_ms) {
  using Clock = std::chrono::steady_clock;
  auto reached = [&] { return int32_t(theirs.count.load(std::memory_order_acquire) - target) >= 0; };
  if (spin(reached)) return 0;
  const timespec nap{0, NAP_MS * 1'000'000};
  long waited_us = 0, looked_us = 0, stopped_us = 0;
  int fault = 0;
  theirs.sleepers.fetch_add(1);
  while (!reached()) {
    const auto before = Clock::now();
    const uint32_t seen = theirs.count.load();
    if (int32_t(seen - target) < 0) futex(&theirs.count, FUTEX_WAIT, seen, &nap);
    const long slept_us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - before).count();
    waited_us += std::min(slept_us, 5000 * NAP_MS);
    if (waited_us - looked_us >= 1000 * LOOK_MS) {
      const int found = fault_of(theirs);
      stopped_us = found == RANK_STOPPED ? stopped_us + waited_us - looked_us : 0;
      looked_us = waited_us;
      if (found == RANK_ENDED || stopped_us >= 1000 * STOPPED_MS) fault = found;
    }
    if (!fault && waited_us >= 1000 * timeout_ms) fault = stopped_us ? RANK_STOPPED : RANK_LATE;
    if (fault) {
      fault = reached() ? 0 : fault;  // it may have arrived before it ended
      break;
    }
  }
  theirs.sleepers.fetch_sub(1);
  return fault;
}

static void copy_rows(char* to, long to_row, const char* from, long from_row, long rows, long width) {
  each_of(rows, rows * width >= PARALLEL_BYTES, [&](long row) { memcpy(to + row * to_row, from + row * from_row, width); });
}

void gather(RankLink& link, const void* own, long own_row, long rows, long width, void* all, long all_row) {
  Arrival* arrivals = static_cast<Arrival*>(link.memory);
  const long most = width ? std::max<long>(1, link.slot / width) : std::max<long>(1, rows);
  for (long first = 0; first < rows && !link.fault; first += most) {
    const long count = std::min(most, rows - first);
    const uint32_t turn = arrivals[link.rank].count.load(std::memory_order_relaxed);
    const auto slot_of = [&](long rank) {
      return static_cast<char*>(link.memory) + link.size * sizeof(Arrival) + (2 * rank + (turn & 1)) * link.slot;
    };
    copy_rows(slot_of(link.rank), width, static_cast<const char*>(own) + first * own_row, own_row, count, width);
    arrive(arrivals[link.rank]);
    for (long offset = 0; offset < link.size; offset++) {
      const long from = (link.rank + offset) % link.size;
      if (from != link.rank)
        if (const int fault = await(arrivals[from], turn + 1, link.timeout_ms)) {
          link.lost = from, link.fault = fault;
          return;
        }
      copy_rows(static_cast<char*>(all) + first * all_row + from * width, all_row, slot_of(from), width, count, width);
    }
  }
}

void Weight::multiply_among_ranks(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const {
  static thread_local Scratch<bf16> keep_x, keep_y;  // of the calling thread
  constexpr long SIZE = sizeof(bf16);
  if (x_ranks) {
    bf16* all = keep_x.at_least(rows * ins);
    gather(*x_ranks, x, x_row * SIZE, rows, own_ins() * SIZE, all, ins * SIZE);
    x = all, x_row = ins;
  }
  if (!y_ranks) return multiply_alone(x, x_row, y, y_row, rows, act);
  const long width = is_gated(act) ? outs / 2 : outs;
  bf16* own = keep_y.at_least(rows * width);
  multiply_alone(x, x_row, own, width, rows, act);
  gather(*y_ranks, own, width * SIZE, rows, width * SIZE, y, y_row * SIZE);
}

}  // namespace quire

using namespace quire;

EXPORT void quire_join_ranks(RankLink* link) { static_cast<Arrival*>(link->memory)[link->rank].process.store(getpid()); }

EXPORT void quire_all_gather(RankLink* link, const void* own, long rows, long width, void* all) {
  gather(*link, own, width, rows, width, all, link->size * width);
}
