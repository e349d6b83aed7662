// The teams of all threads that call kernels: each has its own, as two engines may run at once.
#include "team.h"

#include <omp.h>
#include <pthread.h>

#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace quire {

namespace {

thread_local bool in_piece = false;

class Team {
 public:
  ~Team() {
    ending = true;
    turn.fetch_add(1);
    futex(&turn, FUTEX_WAKE_PRIVATE, INT32_MAX);
    for (std::thread& helper : helpers) helper.join();
  }

  void run(long size, long pieces, Piece run, const void* work) {
    this->run_piece = run, this->work = work, this->pieces = pieces;  // nobody is inside
    const uint32_t most = (uint32_t)std::min(size, pieces) - 1;
    start_helpers(most);
    next.store(0, std::memory_order_relaxed);
    door.store(OPEN | most * ROOM, std::memory_order_release);
    turn.fetch_add(1);
    if (sleepers.load()) futex(&turn, FUTEX_WAKE_PRIVATE, most);
    take_pieces();
    close();
  }

 private:
  // The door's bits. A helper that finds it closed has come too late, and touches nothing of the work.
  static constexpr uint32_t OPEN = 1u << 31, AWAITED = 1u << 30, ROOM = 1u << 15, INSIDE = ROOM - 1;

  void start_helpers(uint32_t count) {
    while (helpers.size() < count && !refused) try {
        helpers.emplace_back([this, now = turn.load()] { help(now); });
      } catch (const std::system_error&) {
        refused = true;  // a container allows no more threads: the calling thread computes their pieces
      }
  }

  void help(uint32_t seen) {
    pthread_setname_np(pthread_self(), "quire-kernels");
    for (;;) {
      const auto asked = [&] { return turn.load(std::memory_order_acquire) != seen; };
      if (!spin(asked)) {
        sleepers.fetch_add(1);
        while (!asked()) futex(&turn, FUTEX_WAIT_PRIVATE, seen);
        sleepers.fetch_sub(1);
      }
      seen = turn.load(std::memory_order_acquire);
      if (ending) return;
      if (!enter()) continue;
      take_pieces();
      leave();
    }
  }

  bool enter() {
    uint32_t now = door.load(std::memory_order_relaxed);
    while (now & OPEN && (now & INSIDE) < (now & ~(OPEN | AWAITED)) / ROOM)
      if (door.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return true;
    return false;
  }

  void leave() {
    const uint32_t before = door.fetch_sub(1, std::memory_order_acq_rel);
    if (before & AWAITED && (before & INSIDE) == 1) futex(&door, FUTEX_WAKE_PRIVATE, 1);
  }

  void take_pieces() {
    in_piece = true;
    for (long piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
#ifdef QUIRE_LATE_THREADS  // a check of races: no thread does all the work
      usleep(rand() % 60);
#endif
      run_piece(work, piece);
    }
    in_piece = false;
  }

  void close() {
    door.fetch_and(~OPEN, std::memory_order_acq_rel);
    const auto empty = [&] { return !(door.load(std::memory_order_acquire) & INSIDE); };
    if (spin(empty)) return;
    uint32_t now = door.fetch_or(AWAITED, std::memory_order_acq_rel) | AWAITED;
    while (now & INSIDE) {
      futex(&door, FUTEX_WAIT_PRIVATE, now);
      now = door.load(std::memory_order_acquire);
    }
  }

  Piece run_piece = nullptr;
  const void* work = nullptr;
  long pieces = 0;
  std::vector<std::thread> helpers;
  bool refused = false;
  std::atomic<bool> ending{false};
  alignas(2 * LINE) std::atomic<uint32_t> turn{0};  // operations begun: helpers wait for it to change
  std::atomic<uint32_t> sleepers{0};                // helpers that sleep
  alignas(2 * LINE) std::atomic<uint32_t> door{0};
  alignas(2 * LINE) std::atomic<long> next{0};
};

thread_local std::unique_ptr<Team> team;

// A forked process has the calling thread alone. It gets a new team, and leaves the memory of the old one.
[[maybe_unused]] const int forks = pthread_atfork(nullptr, nullptr, [] { (void)team.release(); });

}  // namespace

long team_size() { return in_piece ? 1 : omp_get_max_threads(); }

void run_pieces(long pieces, Piece run, const void* work) {
  const long size = pieces > 1 ? team_size() : 1;
  if (size == 1) {
    for (long piece = 0; piece < pieces; piece++) run(work, piece);
    return;
  }
  if (!team) team = std::make_unique<Team>();
  team->run(size, pieces, run, work);
}

}  // namespace quire
