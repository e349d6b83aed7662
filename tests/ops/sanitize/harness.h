// What the checks share: memory that ends at a guard page, numbers, and comparison with a definition.
//
// A check is a function that calls kernels over generated shapes and says what differs:
//
//   CHECK(rotate) { for (...) near("rotate", got, wanted, 0.01); }
#pragma once
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "exports.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(from, bytes) ASAN_POISON_MEMORY_REGION(from, bytes)
#define ALLOW(from, bytes) ASAN_UNPOISON_MEMORY_REGION(from, bytes)
#else
#define FORBID(from, bytes)
#define ALLOW(from, bytes)
#endif

using quire::bf16;

inline float value_of(bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline float value_of(float x) { return x; }
inline bf16 bf16_of(float x) {  // halves to even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float rounded_of(double x) { return value_of(bf16_of((float)x)); }

// `count` values whose last byte lies before a page without access rights: what the sanitizers do not see (loads of tiles)
// stops there. Begins on a line of 64 bytes if its size is a multiple of that.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count(count) {
    const size_t page = sysconf(_SC_PAGESIZE), bytes = count * sizeof(T);
    room = (bytes + page - 1) / page * page + page;
    base = (char*)mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + room - page, page, PROT_NONE)) abort();
    data = (T*)(base + room - page - bytes);
    memset(data, 0xff, bytes);  // NaN: what is not written shows
    FORBID(base, room - page - bytes);
  }
  Guarded(const Guarded&) = delete;
  Guarded(Guarded&& other) : data(other.data), count(other.count), base(other.base), room(other.room) { other.base = nullptr; }
  ~Guarded() {
    if (!base) return;
    ALLOW(base, room);
    munmap(base, room);
  }
  T& operator[](long i) { return data[i]; }
  const T& operator[](long i) const { return data[i]; }
  operator T*() { return data; }
  operator const T*() const { return data; }

  T* data;
  size_t count;

 private:
  char* base;
  size_t room;
};

struct Random {
  std::mt19937 source;
  explicit Random(unsigned seed) : source(seed) {}
  long below(long n) { return (long)(source() % (unsigned long)n); }
  float normal() { return std::normal_distribution<float>()(source); }
  Guarded<bf16> bf16s(size_t count, float size = 1) {
    Guarded<bf16> made(count);
    for (size_t i = 0; i < count; i++) made[i] = bf16_of(size * normal());
    return made;
  }
  Guarded<float> floats(size_t count) {
    Guarded<float> made(count);
    for (size_t i = 0; i < count; i++) made[i] = normal();
    return made;
  }
  Guarded<int8_t> bytes(size_t count) {
    Guarded<int8_t> made(count);
    for (size_t i = 0; i < count; i++) made[i] = (int8_t)(below(255) - 127);
    return made;
  }
};

extern int comparisons, failures;

// Each of `got` is within `share` of the largest of `want`.
template <class T>
void near(const std::string& what, const T* got, const std::vector<double>& want, double share) {
  double most = 1e-30, off = 0;
  size_t where = 0;
  for (double x : want) most = std::max(most, fabs(x));
  for (size_t i = 0; i < want.size(); i++) {
    const double here = fabs((double)value_of(got[i]) - want[i]);
    if (!(here <= off)) off = here, where = i;  // NaN, too
  }
  comparisons++;
  if (off <= share * most) return;
  failures++;
  fprintf(stderr, "%s: [%zu] is %g, should be %g (largest %g)\n", what.c_str(), where, (double)value_of(got[where]),
          want[where], most);
}

template <class T>
void same(const std::string& what, const T* got, const T* want, size_t count) {
  comparisons++;
  if (!memcmp(got, want, count * sizeof(T))) return;
  failures++;
  fprintf(stderr, "%s: other bits\n", what.c_str());
}

inline std::string named(const char* name, std::initializer_list<long> numbers) {
  std::string text = name;
  for (long n : numbers) text += " " + std::to_string(n);
  return text;
}

struct Check {
  const char* name;
  std::function<void()> run;
  static std::vector<Check>& all() {
    static std::vector<Check> checks;
    return checks;
  }
  Check(const char* name, std::function<void()> run) : name(name), run(run) { all().push_back(*this); }
};
#define CHECK(name)                                  \
  static void check_##name();                        \
  static Check registered_##name(#name, check_##name); \
  static void check_##name()
