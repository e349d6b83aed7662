// What the kernels use of OpenMP's runtime, in plain threads: the thread sanitizer knows how these wait for each other, and
// nothing of libgomp's ways. The threads of a team begin together and a little apart, so that none does all the work.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int MOST = 3;
using Work = void (*)(void*);

struct Team {
  int count = MOST, waiting = 0;
  long turn = 0;
  std::mutex mutex;
  std::condition_variable all;
  bool begun = false;  // its loop
  std::atomic<long> next{0};
  long end = 0, chunk = 1;

  void meet() {
    std::unique_lock<std::mutex> lock(mutex);
    const long now = turn;
    if (++waiting == count) {
      waiting = 0, turn++;
      all.notify_all();
    }
    while (now == turn) all.wait(lock);
  }
  bool take(long* from, long* to) {
    const long at = next.fetch_add(chunk);
    *from = at, *to = std::min(at + chunk, end);
    return at < end;
  }
};

thread_local Team* team = nullptr;
thread_local int number = 0;

void work(Team& with, int as, Work what, void* data) {
  team = &with, number = as;
  with.meet();
  usleep(rand() % 60);
  what(data);
  team = nullptr, number = 0;
}

// They stay for the next region, and so does what they keep.
struct Pool {
  std::mutex mutex;
  std::condition_variable go, done;
  long turn = 0;
  int busy = 0;
  Work what = nullptr;
  void* data = nullptr;
  Team* with = nullptr;

  Pool() {
    for (int as = 1; as < MOST; as++) std::thread([this, as] { serve(as); }).detach();
  }
  void serve(int as) {
    for (long seen = 0;; seen++) {
      std::unique_lock<std::mutex> lock(mutex);
      while (turn == seen) go.wait(lock);
      lock.unlock();
      work(*with, as, what, data);
      lock.lock();
      if (--busy == 0) done.notify_all();
    }
  }
  void run(Team& of, Work asked, void* told) {
    std::unique_lock<std::mutex> lock(mutex);
    what = asked, data = told, with = &of, busy = MOST - 1, turn++;
    go.notify_all();
    lock.unlock();
    work(of, 0, asked, told);
    lock.lock();
    while (busy) done.wait(lock);
  }
};

}  // namespace

extern "C" {

int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return team ? team->count : 1; }
int omp_get_max_threads() { return MOST; }
void GOMP_barrier() {
  if (team) team->meet();
}

void GOMP_parallel(Work what, void* data, unsigned threads, unsigned) {
  static thread_local Pool* pool = new Pool;  // ranks that are threads call at the same time
  if (threads == 1) {  // within another, perhaps
    Team* const outer = team;
    const int as = number;
    team = nullptr, number = 0;
    what(data);
    team = outer, number = as;
    return;
  }
  Team of;
  pool->run(of, what, data);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) { return team && team->take(from, to); }
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* from, long* to) {
  if (!team) {  // a region of one thread
    *from = start, *to = end;
    return start < end;
  }
  {
    std::lock_guard<std::mutex> lock(team->mutex);
    if (!team->begun) team->begun = true, team->next = start, team->end = end, team->chunk = chunk * step;
  }
  return team->take(from, to);
}
void GOMP_loop_end_nowait() {}
void GOMP_loop_end() { GOMP_barrier(); }

}
