// Draws and cuts: against sorting, and against noise in doubles.
#include <algorithm>

#include "harness.h"

namespace {

uint32_t mixed(uint32_t x) {
  x ^= x >> 16, x *= 0x7FEB352D, x ^= x >> 15, x *= 0x846CA68B;
  return x ^ x >> 16;
}

double noise(uint32_t token, uint32_t a, uint32_t b) {
  const uint32_t word = mixed(mixed(token * 0x9E3779B9 + a) ^ b) & 0x7fffffff;
  return -log(-log1p(-std::min((float)((word + 0.5) / 2147483648.0), 1.f - 0x1p-24f)));
}

// Some are equal: multiples of a quarter.
Guarded<float> tied(Random& random, long count) {
  auto x = random.floats(count);
  for (long i = 0; i < count; i++) x[i] = roundf(x[i] * 4) / 4;
  return x;
}

}  // namespace

CHECK(draw) {
  for (long rows : {1L, 5L})
    for (long V : {1L, 15L, 16L, 259L}) {
      Random random((unsigned)(rows * V));
      const long step = V + 3;
      const auto x = tied(random, (rows - 1) * step + V), floors = tied(random, rows);
      Guarded<int32_t> a(rows), b(rows);
      Guarded<int64_t> got(rows), last(rows);
      std::vector<double> lost, none(rows, 0);
      for (long r = 0; r < rows; r++) a[r] = (int32_t)random.source(), b[r] = (int32_t)random.source(), last[r] = random.below(V);
      for (const float* floor : {(const float*)nullptr, (const float*)floors}) {
        lost.clear();
        quire_draw(x, step, a, b, floor, last, rows, V, got);
        for (long r = 0; r < rows; r++) {
          double best = -INFINITY, mine = -INFINITY;
          for (long v = 0; v < V; v++)
            if (const float value = x[r * step + v]; !floor || value > floor[r] || (value == floor[r] && v <= last[r])) {
              const double score = value + noise((uint32_t)v, (uint32_t)a[r], (uint32_t)b[r]);
              best = std::max(best, score);
              if (got[r] == v) mine = score;
            }
          lost.push_back(best == -INFINITY ? (double)got[r] : best - mine);
        }
        std::vector<float> found(lost.begin(), lost.end());
        found.push_back(1), none.resize(rows), none.push_back(1);  // so that there is a size to compare with
        near(named("draw", {rows, V, floor != nullptr}), found.data(), none, 1e-5);
      }
    }
}

CHECK(cut) {
  for (int ties : {0, 1})
    for (long V : {1L, 15L, 300L, 3000L})
      for (long k : {0L, 1L, 7L, 400L})
        for (double p : {1.0, 0.9, 0.0})
          for (double m : {0.0, 0.05}) {
            Random random((unsigned)(V + k));
            const auto x = ties ? tied(random, V) : random.floats(V);
            const quire::RowParams params{1.f, 0, k, p, log(m)};
            Guarded<float> got(1);
            Guarded<int64_t> last(1);
            quire_cut(x, V, &params, 1, V, got, last);
            std::vector<long> order(V);
            for (long v = 0; v < V; v++) order[v] = v;
            std::stable_sort(order.begin(), order.end(), [&](long a, long b) { return x[a] > x[b]; });
            const auto lost = [&](long i) { return (double)x[order[i]] - x[order[0]]; };
            long count = 0, kept = 0;
            while (count < V && (!k || count < k) && lost(count) >= log(m)) count++;
            double total = 0, sum = 0;
            for (long i = 0; i < count; i++) total += exp(lost(i));
            while (kept < count && (!kept || sum < p * total)) sum += exp(lost(kept++));
            if (p == 1) kept = count;
            std::vector<double> want(V, 1);
            std::vector<float> found(V);
            for (long i = 0; i < V; i++) want[order[i]] = i < kept ? 2 : 1;
            for (long v = 0; v < V; v++) found[v] = x[v] > got[0] || (x[v] == got[0] && v <= last[0]) ? 2 : 1;
            near(named("cut", {ties, V, k, (long)(p * 10), (long)(m * 100)}), found.data(), want, 1e-6);
          }
}

CHECK(sample) {
  for (long V : {1L, 15L, 300L, 3000L})
    for (int is_bf16 : {0, 1}) {
      constexpr long rows = 4;
      Random random((unsigned)V);
      const long step = V + 3;
      const auto x = tied(random, (rows - 1) * step + V);
      const auto short_x = random.bf16s((rows - 1) * step + V);
      const quire::RowParams params[] = {
          {0.f, 1, 0, 1, -INFINITY}, {1.f, 2, 0, 1, -INFINITY}, {0.7f, 3, 7, 0.9, log(0.05)}, {1.5f, 0xffffffff, 400, 0.5, -INFINITY}};
      const int64_t positions[] = {0, 5, 1L << 33, 9};
      Guarded<int64_t> got(rows), want(rows), last(1);
      Guarded<float> whole(rows), floor(1), kept(1), logits(V), by_parts(rows);
      const void* from = is_bf16 ? (const void*)short_x.data : x.data;
      quire_sample(from, step, is_bf16, params, positions, rows, V, got, whole);
      for (long r = 0; r < rows; r++) {
        for (long v = 0; v < V; v++) logits[v] = is_bf16 ? value_of(short_x[r * step + v]) : x[r * step + v];
        quire_masked_argmax(logits, V, 0, nullptr, 1, V, want + r, by_parts + r, kept);
        if (params[r].temperature == 0) continue;
        for (long v = 0; v < V; v++) logits[v] /= params[r].temperature;
        const uint32_t word = mixed(params[r].seed ^ (uint32_t)positions[r]);
        const int32_t a[] = {(int32_t)word}, b[] = {(int32_t)mixed(mixed(word) + 0x85EBCA6B)};
        quire_cut(logits, V, params + r, 1, V, floor, last);
        quire_draw(logits, V, a, b, floor, last, 1, V, want + r);
      }
      same(named("sample", {V, is_bf16}), got.data, want.data, rows);
      same(named("sample's best", {V, is_bf16}), whole.data, by_parts.data, rows);
    }
}
