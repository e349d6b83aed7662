// A thread's team: each piece is computed once, whoever is late, in teams of all sizes, in teams of several callers, and within a piece.
#include "team.h"

#include <omp.h>

#include <thread>

#include "harness.h"

namespace {

// How often each piece was computed.
void count_pieces(const char* name, long pieces) {
  std::vector<int> counts(pieces + 1), once(pieces + 1, 1);
  once[pieces] = 0;
  quire::in_pieces(pieces, [&](long piece) { counts[piece]++; });
  same(named(name, {pieces}), counts.data(), once.data(), pieces + 1);
}

}  // namespace

CHECK(team_sizes) {
  for (int size : {1, 2, 5, 3, 9, 2}) {
    omp_set_num_threads(size);
    for (long pieces : {0L, 1L, 2L, 7L, 300L})
      for (int turn = 0; turn < 20; turn++) count_pieces("team_sizes", pieces);
    std::vector<int> counts(100);
    const std::vector<int> once(100, 1);
    quire::each_of(100, true, [&](long i) { counts[i]++; });
    same(named("each_of", {size}), counts.data(), once.data(), 100);
  }
  omp_set_num_threads(3);
}

// The thread that has the first piece waits until all others are done: a thread that is late keeps only its piece.
CHECK(late_thread) {
  omp_set_num_threads(3);
  for (int turn = 0; turn < 10; turn++) {
    std::atomic<int> done{0};
    const long shares = 12;
    quire::in_pieces(shares, [&](long share) {
      for (int ms = 0; !share && done < shares - 1 && ms < 10000; ms++) usleep(1000);
      done += share ? 1 : 100 * (done == shares - 1);
    });
    const int got = done, want = 111;
    same(named("late_thread", {turn}), &got, &want, 1);
  }
}

CHECK(team_in_a_piece) {
  omp_set_num_threads(3);
  std::vector<int> counts(40 * 10);
  const std::vector<int> once(40 * 10, 1);
  quire::in_pieces(40, [&](long outer) { quire::each_of(10, true, [&](long i) { counts[outer * 10 + i]++; }); });
  same("team_in_a_piece", counts.data(), once.data(), 400);
  count_pieces("team after a piece's", 50);
}

// Callers that begin and end, as engines do: each has a team, whose helpers end with it.
CHECK(teams_of_callers) {
  constexpr int CALLERS = 4, PIECES = 30;
  std::vector<int> counts(CALLERS * PIECES), wanted(CALLERS * PIECES, 50);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < CALLERS; caller++)
    callers.emplace_back([&, caller] {
      omp_set_num_threads(3);
      for (int turn = 0; turn < 50; turn++) {
        if (turn % 10 == 0) usleep(300);  // the helpers sleep
        quire::in_pieces(PIECES, [&](long piece) { counts[caller * PIECES + piece]++; });
      }
    });
  for (std::thread& caller : callers) caller.join();
  same("teams_of_callers", counts.data(), wanted.data(), CALLERS * PIECES);
}
