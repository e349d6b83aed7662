// A thread's team: the calling thread and helpers, which compute the pieces of an operation.
//
// A thread takes the next piece that nobody has begun, so a helper that the operating system runs late costs nothing: the others take
// its pieces. A piece's results never depend on who computes it, so bits do not depend on the number of threads.
//
// Who waits spins for SPIN_US and then sleeps in the kernel. Threads that spin for long use up the share of the cores that the
// operating system gives to a group of processes; beside a busy process of another group, each then waits for whole time slices.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "common.h"

namespace quire {

constexpr long SPIN_US = 50;  // about what it costs to sleep and to be woken on a virtual machine

inline long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* time = nullptr) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, time, nullptr, 0);
}

inline void pause_core() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Whether `ready()` became true while this thread spun.
template <class F>
bool spin(const F& ready) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::microseconds(SPIN_US);
  do
    for (int i = 0; i < 16; i++) {
      if (ready()) return true;
      pause_core();
    }
  while (Clock::now() < end);
  return false;
}

// Threads that compute the next operation: torch's number. 1 within a piece, because an operation of a piece has no team.
long team_size();

using Piece = void (*)(const void* work, long piece);
void run_pieces(long pieces, Piece run, const void* work);

// f(piece) for all pieces, in any order.
template <class F>
void in_pieces(long pieces, const F& f) {
  run_pieces(pieces, [](const void* work, long piece) { (*static_cast<const F*>(work))(piece); }, &f);
}

// f(share, shares): all work in equal shares, one for each thread; f(0, 1) if not `together`.
template <class F>
void in_shares(bool together, const F& f) {
  const long shares = together ? team_size() : 1;
  in_pieces(shares, [&](long share) { f(share, shares); });
}

// f(i) for all i < count, neighbours by the same thread.
template <class F>
void each_of(long count, bool together, const F& f) {
  in_shares(together && count > 1, [&](long share, long shares) {
    for (long i = count * share / shares; i < count * (share + 1) / shares; i++) f(i);
  });
}

}  // namespace quire
