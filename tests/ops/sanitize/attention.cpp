// Attention over a scattered cache whose unused slots hold NaN: against the definition, and in chunks against the whole.
#include "harness.h"

namespace {

struct Kind {
  long heads, kv, D, E, block, window;
  float cap;
  bool sinks;
};

struct Paged {
  Kind kind;
  std::vector<std::pair<long, long>> sizes;  // (new tokens, length) of each row
  long blocks, tokens = 0;
  std::vector<long> starts{0};
  Guarded<int> table;
  Guarded<bf16> keys, values, q;
  Guarded<float> sinks;

  static long most(const Kind& k, const std::vector<std::pair<long, long>>& sizes) {
    long most = 0;
    for (auto [fresh, length] : sizes) most = std::max(most, (length + k.block - 1) / k.block);
    return most;
  }
  static long total(const std::vector<std::pair<long, long>>& sizes) {
    long total = 0;
    for (auto [fresh, length] : sizes) total += fresh;
    return total;
  }

  Paged(const Kind& k, const std::vector<std::pair<long, long>>& sizes, Random random)
      : kind(k), sizes(sizes), blocks(most(k, sizes)), table(blocks * sizes.size()),
        keys(blocks * sizes.size() * k.kv * k.block * k.D), values(blocks * sizes.size() * k.kv * k.block * k.E),
        q(random.bf16s(total(sizes) * k.heads * k.D)), sinks(random.floats(k.heads)) {
    const long rows = (long)sizes.size();
    std::vector<int> order(blocks * rows);
    for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
    std::shuffle(order.begin(), order.end(), random.source);
    for (size_t i = 0; i < order.size(); i++) table[i] = order[i];
    for (auto [fresh, length] : sizes) starts.push_back(starts.back() + fresh);
    tokens = starts.back();
    for (long r = 0; r < rows; r++) {  // through the kernel that writes the cache
      const long length = sizes[r].second;
      const auto k_new = random.bf16s(length * k.kv * k.D), v_new = random.bf16s(length * k.kv * k.E);
      Guarded<int64_t> slots(length);
      for (long t = 0; t < length; t++) slots[t] = (int64_t)table[r * blocks + t / k.block] * k.block + t % k.block;
      quire_write_cache(k_new, k.kv * k.D, keys, slots, length, k.kv, k.D, k.block);
      quire_write_cache(v_new, k.kv * k.E, values, slots, length, k.kv, k.E, k.block);
    }
  }

  // New tokens [from, to) of a row, or of every row.
  Guarded<bf16> run(long row, long from, long to) const {
    const long first = row < 0 ? 0 : row, count = row < 0 ? (long)sizes.size() : 1;
    Guarded<int> begins(count + 1), lengths(count);
    begins[0] = 0;
    for (long r = 0; r < count; r++) {
      const auto [fresh, length] = sizes[first + r];
      begins[r + 1] = begins[r] + (int)(row < 0 ? fresh : to - from);
      lengths[r] = (int)(row < 0 ? length : length - fresh + to);
    }
    const bf16* at = q + (starts[first] + (row < 0 ? 0 : from)) * kind.heads * kind.D;
    Guarded<bf16> o((size_t)begins[count] * kind.heads * kind.E);
    quire_attention(at, kind.heads * kind.D, o, keys, values, table + first * blocks, blocks, begins, lengths,
                    kind.sinks ? sinks.data : nullptr, count, kind.heads, kind.kv, kind.D, kind.E, kind.block, kind.window,
                    1 / sqrtf((float)kind.D), kind.cap);
    return o;
  }

  std::vector<double> definition() const {
    std::vector<double> made;
    const Kind& k = kind;
    for (size_t r = 0; r < sizes.size(); r++)
      for (long n = 0; n < sizes[r].first; n++)
        for (long h = 0; h < k.heads; h++) {
          const long position = sizes[r].second - sizes[r].first + n, low = k.window ? std::max(0L, position - k.window + 1) : 0;
          const bf16* one = q + ((starts[r] + n) * k.heads + h) * k.D;
          std::vector<double> sums(k.E);
          double top = k.sinks ? sinks[h] : -1e300, all = k.sinks ? 1 : 0;
          for (long t = low; t <= position; t++) {
            const long slot = ((long)table[r * blocks + t / k.block] * k.kv + h / (k.heads / k.kv)) * k.block + t % k.block;
            double score = 0;
            for (long d = 0; d < k.D; d++) score += (double)value_of(one[d]) * value_of(keys[slot * k.D + d]);
            score /= sqrt((double)k.D);
            if (k.cap > 0) score = k.cap * tanh(score / k.cap);
            const double higher = std::max(top, score), shrink = exp(top - higher), weight = exp(score - higher);
            top = higher, all = all * shrink + weight;
            for (long e = 0; e < k.E; e++) sums[e] = sums[e] * shrink + weight * value_of(values[slot * k.E + e]);
          }
          for (double sum : sums) made.push_back(sum / all);
        }
    return made;
  }
};

const Kind KINDS[] = {{4, 2, 64, 64, 16, 0, 0, false},    {4, 1, 128, 128, 32, 0, 0, true},  {2, 2, 64, 32, 64, 40, 0, true},
                      {6, 2, 96, 96, 128, 300, 20, true}, {4, 4, 32, 64, 16, 1, 30, false}, {2, 1, 256, 256, 16, 0, 0, false}};

}  // namespace

CHECK(attention) {
  int number = 0;
  for (const Kind& kind : KINDS) {
    Random random((unsigned)++number);
    std::vector<std::pair<long, long>> sizes = {{1, 260}, {7, 7}, {1, 33}, {1, 1}};
    for (int i = 0; i < 3; i++) {
      const long length = 1 + random.below(90);
      sizes.push_back({1 + random.below(length), length});
    }
    sizes.push_back({20, 270});  // the longest is the last: nothing lies behind its part of the table
    const Paged paged(kind, sizes, random);
    const auto whole = paged.run(-1, 0, 0);
    near(named("attention", {number}), whole.data, paged.definition(), 0.02);
    const long width = kind.heads * kind.E;
    for (long r = 0; r < (long)sizes.size(); r++)
      for (long from = 0; from < sizes[r].first; from += 9) {
        const long to = std::min(from + 9, sizes[r].first);
        const auto part = paged.run(r, from, to);
        same(named("attention in chunks", {number, r, from}), part.data, whole + (paged.starts[r] + from) * width,
             (to - from) * width);
      }
  }
}
