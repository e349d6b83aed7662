// Attention over a scattered cache of each kind, whose unused slots hold NaN: against the definition, and in chunks against
// the whole.
#include "kv_codec.h"
#include "harness.h"

namespace {

struct Kind {
  long heads, kv, D, E, block, window;
  float cap;
  bool sinks;
  long code = quire::KV_BF16;

  long bytes() const { return code == quire::KV_BF16 ? 2 : 1; }
};

struct Paged {
  Kind kind;
  std::vector<std::pair<long, long>> sizes;  // (new tokens, length) of each row
  long blocks, tokens = 0;
  std::vector<long> starts{0};
  Guarded<int> table;
  Guarded<uint8_t> keys, values;  // [blocks, kv, block, D]
  Guarded<float> key_scales, value_scales, sinks;
  Guarded<bf16> q;
  std::vector<std::vector<float>> exact_keys, exact_values;  // of each row [tokens, kv, D]

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
        keys(table.count * k.kv * k.block * k.D * k.bytes()), values(table.count * k.kv * k.block * k.E * k.bytes()),
        key_scales(table.count * k.kv * k.block), value_scales(table.count * k.kv * k.block),
        sinks(random.floats(k.heads)), q(random.bf16s(total(sizes) * k.heads * k.D)) {
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
      quire_write_cache(k_new, k.kv * k.D, keys, key_scales, slots, length, k.kv, k.D, k.block, k.code, 1);
      quire_write_cache(v_new, k.kv * k.E, values, value_scales, slots, length, k.kv, k.E, k.block, k.code, 0);
      for (auto [from, to] : {std::pair{&k_new, &exact_keys}, std::pair{&v_new, &exact_values}}) {
        to->emplace_back();
        for (size_t i = 0; i < from->count; i++) to->back().push_back(value_of((*from)[(long)i]));
      }
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
    quire_attention(at, kind.heads * kind.D, o, keys, values, key_scales, value_scales, kind.code, table + first * blocks,
                    blocks, begins, lengths,
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
            const long at = t * k.kv + h / (k.heads / k.kv);
            double score = 0;
            for (long d = 0; d < k.D; d++) score += (double)value_of(one[d]) * exact_keys[r][at * k.D + d];
            score /= sqrt((double)k.D);
            if (k.cap > 0) score = k.cap * tanh(score / k.cap);
            const double higher = std::max(top, score), shrink = exp(top - higher), weight = exp(score - higher);
            top = higher, all = all * shrink + weight;
            for (long e = 0; e < k.E; e++) sums[e] = sums[e] * shrink + weight * exact_values[r][at * k.E + e];
          }
          for (double sum : sums) made.push_back(sum / all);
        }
    return made;
  }
};

const Kind KINDS[] = {{4, 2, 64, 64, 16, 0, 0, false},    {4, 1, 128, 128, 32, 0, 0, true},  {2, 2, 64, 32, 64, 40, 0, true},
                      {6, 2, 96, 96, 128, 300, 20, true}, {4, 4, 32, 64, 16, 1, 30, false}, {2, 1, 256, 256, 16, 0, 0, false}};

// How far codes lead away: each is this near its value, and sums average.
double allowed(long code) { return code == quire::KV_BF16 ? 0.02 : code == quire::KV_INT8 ? 0.04 : code == quire::KV_E4M3 ? 0.15 : 0.3; }

void check(const Kind& kind, int number) {
  Random random((unsigned)number);
  std::vector<std::pair<long, long>> sizes = {{1, 260}, {7, 7}, {1, 33}, {1, 1}};
  for (int i = 0; i < 3; i++) {
    const long length = 1 + random.below(90);
    sizes.push_back({1 + random.below(length), length});
  }
  sizes.push_back({20, 270});  // the longest is the last: nothing lies after its part of the table
  const Paged paged(kind, sizes, random);
  const auto whole = paged.run(-1, 0, 0);
  near(named("attention", {number, kind.code}), whole.data, paged.definition(), allowed(kind.code));
  const long width = kind.heads * kind.E;
  for (long r = 0; r < (long)sizes.size(); r++)
    for (long from = 0; from < sizes[r].first; from += 9) {
      const long to = std::min(from + 9, sizes[r].first);
      const auto part = paged.run(r, from, to);
      same(named("attention in chunks", {number, kind.code, r, from}), part.data, whole + (paged.starts[r] + from) * width,
           (to - from) * width);
    }
}

}  // namespace

CHECK(attention) {
  int number = 0;
  for (Kind kind : KINDS) {
    check(kind, ++number);
    kind.code = quire::KV_INT8 + number % 3;
    check(kind, number);
  }
}

// Two thousand tokens a split: one row over two of them.
CHECK(attention_in_splits) {
  const Paged paged({2, 1, 32, 32, 64, 0, 0, true}, {{3, 5}, {2, 2500}}, Random(9));
  const auto whole = paged.run(-1, 0, 0);
  near("attention in splits", whole.data, paged.definition(), 0.02);
  for (long t = 0; t < 2; t++) same("attention in splits", paged.run(1, t, t + 1).data, whole + (3 + t) * 64, 64);
}
