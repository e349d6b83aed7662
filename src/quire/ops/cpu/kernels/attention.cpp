// Attention of a step over the paged cache: any mix of prompts, chunks and single tokens, in one way.
//
// Keys are taken in tiles of TILE tokens that start at multiples of TILE, one after the other, with a running softmax in
// float; every SPLIT tokens it begins anew, and what was found is merged, in order. A query therefore meets the same
// products in the same order however it came here: alone or in a batch, in one chunk or in many, its splits on one thread
// or on several. Its bits do not change. A tile or a split that it does not see changes nothing.
//
//   item      one row of the batch, one key/value head, up to GROUP of its queries; all splits, or one
//   query     a token times one of the heads that share the key/value head
//   scores    [queries, TILE] = q * k^T, both bf16, in float; weights are rounded to bf16 before they meet v
//
// Keys and values are repacked for the product (tiles.h); for a prompt that is done once for up to GROUP queries. The scales of
// codes go with the scores and the weights.
#include <vector>

#include "exports.h"
#include "tiles.h"

namespace quire {

constexpr long TILE = 256;
constexpr long SPLIT = 2048;
constexpr long GROUP = 512, LEAST_GROUP = 64;
constexpr float LOWEST = -1e30f;  // the running maximum before any key: differences with it are never NaN

struct Call {
  const bf16* q;  // [tokens, heads, D], q_step elements from token to token
  bf16* o;        // [tokens, heads, E], contiguous
  Paged cache;
  const int *starts, *lengths;
  const float* sinks;  // [heads], or null
  long q_step, rows, heads, window;
  float scale, softcap;  // 0: none

  long shared() const { return heads / cache.heads; }
  long queries(long row) const { return starts[row + 1] - starts[row]; }
  long before(long row) const { return lengths[row] - queries(row); }
};

struct State {  // of `count` queries: [count], [count], [count, E]
  float *top, *total, *sums;
};

struct Item {
  long row, head, first, count;  // queries of the row: token * shared + head among those that share
  long split;                    // the only one to do, or -1
  size_t found;                  // where its State goes, then
};

struct Memory {  // of one thread
  Scratch<bf16> keys, values, q, weights;
  Scratch<float> scores, scales, running, merged;
};

inline State state_in(float* memory, long count) {
  const long wide = padded(count, 16);
  return {memory, memory + wide, memory + 2 * wide};
}
inline long state_size(const Call& call, long count) { return 2 * padded(count, 16) + count * call.cache.E; }

// How an item's queries lie: positions, and the first token that one sees.
struct Reach {
  long before, first, shared, window;
  Reach(const Call& call, const Item& item)
      : before(call.before(item.row)), first(item.first), shared(call.shared()), window(call.window) {}
  long position(long i) const { return before + (first + i) / shared; }
  long low(long i) const { return window ? std::max<long>(0, position(i) - window + 1) : 0; }
  long first_split() const { return low(0) / SPLIT; }
  long last_split(long count) const { return position(count - 1) / SPLIT; }
};

// The keys [from, to) of a tile that a query sees.
struct Seen {
  long from, to;
  bool all(long t) const { return t >= from && t + 16 <= to; }  // of the 16 from t on
  Mask some(long t) const { return span(from - t, to - t); }
  long first() const { return from / 16 * 16; }
};

// What scores are multiplied by before 2^x. PLAIN: neither codes nor a softcap, and the product is left to `weigh`.
inline float factor_of(const Call& call) { return call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E; }

// The largest score. scales: of codes, [2, TILE], keys' and values'.
template <bool PLAIN>
inline float peak(const Call& call, float* scores, Seen seen, const float* scales) {
  const Floats factor = floats(factor_of(call)), lowest = floats(LOWEST);
  Floats even = lowest, odd = lowest;
  for (long t = seen.first(); t < seen.to; t += 16) {
    Floats x = load(scores + t);
    if (!PLAIN) {
      x = x * factor;
      if (call.cache.kind != SHORT) x = x * load(scales + t);
      if (call.softcap > 0) x = tanh_of(x) * floats(call.softcap * LOG2E);
      store(scores + t, x);
    }
    if (!seen.all(t)) x = select(seen.some(t), x, lowest);
    const Floats last = even;
    even = max(odd, x);
    odd = last;
  }
  return max_of(max(even, odd)) * (PLAIN ? factor_of(call) : 1.f);
}

// Scores -> weights in bf16, 0 for keys that are not seen, up to `width`; the state moves on.
template <bool PLAIN>
inline void weigh(const Call& call, const float* scores, bf16* weights, Seen seen, long width, const float* scales,
                  float top, State s) {
  const Floats factor = floats(PLAIN ? factor_of(call) : 1.f), below = floats(-top);
  Floats total = floats(0.f);
  const auto weight = [&](long t) {
    Floats x = exp2_below(fma(load(scores + t), factor, below));
    if (!seen.all(t)) x = keep(seen.some(t), x);
    total = total + x;
    return !PLAIN && call.cache.kind != SHORT ? x * load(scales + TILE + t) : x;
  };
  const long first = seen.from / 32 * 32, last = padded(seen.to, 32);
  memset(weights, 0, first * sizeof(bf16));
  for (long t = first; t < last; t += 32) {
    const Floats x = weight(t);
    store(weights + t, x, weight(t + 16));
  }
  memset(weights + last, 0, (width - last) * sizeof(bf16));
  const float shrink = *s.top == top ? 1.f : exp2f(*s.top - top);
  *s.total = fmaf(*s.total, shrink, sum_of(total));
  *s.top = top;
  if (shrink == 1.f) return;
  for (long e = 0; e < call.cache.E; e += 16) store(s.sums + e, floats(shrink) * load(s.sums + e));
}

// Scores of `count` queries -> weights.
template <bool PLAIN>
void soften(const Call& call, const Reach& reach, Memory& m, long start, long end, long first, int count, long width,
            State s) {
  Seen seen[ROWS];
  float top[ROWS];
  for (int i = 0; i < count; i++) {
    const long position = reach.position(first + i), low = reach.low(first + i);
    seen[i] = {std::max<long>(0, low - start), std::min(end, position + 1) - start};
    if (seen[i].to > seen[i].from)
      top[i] = std::max(s.top[first + i], peak<PLAIN>(call, m.scores.data + i * TILE, seen[i], m.scales.data));
  }
  for (int i = 0; i < count; i++) {
    bf16* weights = m.weights.data + i * TILE;
    const State one = {s.top + first + i, s.total + first + i, s.sums + (first + i) * call.cache.E};
    if (seen[i].to > seen[i].from)
      weigh<PLAIN>(call, m.scores.data + i * TILE, weights, seen[i], width, m.scales.data, top[i], one);
    else
      memset(weights, 0, width * sizeof(bf16));
  }
}

// A tile of the cache while an item's queries meet it: packed as far as they have asked for.
struct Tile {
  Memory& m;
  Tokens tokens;
  long start, end;
  bool once;  // only one group of queries asks: what is packed need not last
  long keys = 0, values = 0;

  const bf16* keys_at(long t) {
    bf16* to = m.keys.data + (once ? 0 : t * tokens.cache.D);
    if (t < keys) return to;
    pack_32_keys(tokens, start + t, to, m.scales.data + t, m.scales.data + TILE + t);
    keys = t + 32;
    return to;
  }
  const bf16* values_at(long t) {
    bf16* to = m.values.data + (once ? 0 : t / 32 * STEP);
    if (t < values) return to;
    pack_32_values(tokens, start + t, to, panel());
    values = t + 32;
    return to;
  }
  long panel() const { return (once ? 1 : TILE / 32) * STEP; }
};

// Queries [first, first + count) of an item against one tile.
void meet(const Call& call, const Reach& reach, Memory& m, Tile& tile, long first, int count, State s) {
  const long D = call.cache.D, E = call.cache.E, start = tile.start;
  const long to = std::min(tile.end, reach.position(first + count - 1) + 1);
  if (to <= start || reach.low(first) >= tile.end) return;
  const long width = padded(to - start, 32);
  bf16* weights = m.weights.data;
  float* scores = m.scores.data;
  for (long t = 0; t < width; t += 32)
    product_of_rows<Bf16, false>(count, m.q.data + first * D, D, tile.keys_at(t), STEP, D / 32, scores + t, TILE);
  const bool plain = call.cache.kind == SHORT && !(call.softcap > 0);
  (plain ? soften<true> : soften<false>)(call, reach, m, start, tile.end, first, count, width, s);
  // In steps of 32 tokens, or all at once: the same sums in the same order.
  const long stride = tile.once ? 32 : width;
  if (!tile.once)
    for (long t = 0; t < width; t += 32) tile.values_at(t);
  for (long t = 0; t < width; t += stride) {
    const bf16* values = tile.values_at(t);
    for (long e = 0; e < E; e += 32)
      product_of_rows<Bf16, true>(count, weights + t, TILE, values + e / 32 * tile.panel(), STEP, stride / 32,
                                  s.sums + first * E + e, E);
  }
}

// Queries of an item come in runs: those of one token lie side by side, in q and in o.
struct Run {
  long i, count, token, head;
  template <class F>
  static void each(const Call& call, const Item& item, const F& f) {
    const long shared = call.shared();
    for (Run run = {0, 0, 0, 0}; run.i < item.count; run.i += run.count) {
      const long query = item.first + run.i;
      run.count = std::min(shared - query % shared, item.count - run.i);
      run.token = call.starts[item.row] + query / shared, run.head = item.head * shared + query % shared;
      f(run);
    }
  }
};

void gather_queries(const Call& call, const Item& item, Memory& m, long room) {
  const long D = call.cache.D;
  bf16* q = m.q.at_least(room * D);
  Run::each(call, item, [&](const Run& run) {
    const bf16* from = call.q + run.token * call.q_step + run.head * D;
    memcpy(q + run.i * D, from, run.count * D * sizeof(bf16));
    if (run.i + 8 * run.count < item.count)
      for (long d = 0; d < run.count * D; d += 32) fetch(from + 8 * call.q_step + d);
  });
  if (call.cache.kind != INT8) return;
  float* x = m.scores.data;  // no scores are there yet
  for (long i = 0; i < item.count; i++, q += D) {
    for (long d = 0; d < D; d += 16) store(x + d, widen(q + d));
    turn(x, D);
    for (long d = 0; d < D; d += 16) store(q + d, load(x + d));
  }
}

void begin(const Call& call, State s, long count) {
  std::fill_n(s.top, count, LOWEST);
  memset(s.total, 0, count * sizeof(float));
  memset(s.sums, 0, count * call.cache.E * sizeof(float));
}

// a takes in b, which met later keys.
void merge(const Call& call, State a, State b, long count) {
  const long E = call.cache.E;
  for (long i = 0; i < count; i++) {
    const float top = std::max(a.top[i], b.top[i]), fade = exp2f(a.top[i] - top), part = exp2f(b.top[i] - top);
    a.top[i] = top;
    a.total[i] = a.total[i] * fade + b.total[i] * part;
    for (long e = i * E; e < (i + 1) * E; e += 16)
      store(a.sums + e, fma(load(a.sums + e), floats(fade), load(b.sums + e) * floats(part)));
  }
}

void finish(const Call& call, const Item& item, State s) {
  const long E = call.cache.E;
  Run::each(call, item, [&](const Run& run) {
    bf16* o = call.o + (run.token * call.heads + run.head) * E;
    for (long i = run.i; i < run.i + run.count; i++, o += E) {
      const Floats part = floats(1.f / s.total[i]);
      const float* sums = s.sums + i * E;
      for (long e = 0; e < E; e += 32) store(o + e, part * load(sums + e), part * load(sums + e + 16));
    }
  });
}

// A sink is a score without a value, before all keys.
void begin_merging(const Call& call, const Item& item, State s) {
  begin(call, s, item.count);
  if (!call.sinks) return;
  for (long i = 0; i < item.count; i++) {
    s.top[i] = call.sinks[item.head * call.shared() + (item.first + i) % call.shared()] * LOG2E;
    s.total[i] = 1.f;
  }
}

void run_split(const Call& call, const Item& item, const Reach& reach, Memory& m, long split, State s) {
  const long last = reach.position(item.count - 1), stop = std::min(last + 1, (split + 1) * SPLIT);
  begin(call, s, item.count);
  for (long start = std::max(reach.low(0) / TILE * TILE, split * SPLIT); start < stop; start += TILE) {
    const long end = std::min(start + TILE, last + 1);
    // What lies before the window may be another's: it is packed, and gets weight 0 -- but 0 times NaN is NaN.
    Tile tile = {m, Tokens(call.cache, item.row, item.head, end), start, end, item.count <= ROWS};
    for (long i = 0; i < item.count; i += ROWS)
      meet(call, reach, m, tile, i, (int)std::min<long>(ROWS, item.count - i), s);
  }
}

void run_item(const Call& call, const Item& item, Memory& m, float* found) {
  const long D = call.cache.D, E = call.cache.E;
  const long room = item.count / ROWS * ROWS + touched((int)(item.count % ROWS));
  m.keys.at_least(TILE * D), m.values.at_least(TILE * E), m.weights.at_least(ROWS * TILE);
  m.scores.at_least(std::max(ROWS * TILE, D)), m.scales.at_least(2 * TILE);
  gather_queries(call, item, m, room);
  const Reach reach(call, item);
  // The product writes whole groups of sums: those are last in a state.
  const State running = state_in(m.running.at_least(state_size(call, room)), item.count);
  if (item.split >= 0) {
    run_split(call, item, reach, m, item.split, running);
    memcpy(found + item.found, running.top, state_size(call, item.count) * sizeof(float));
    return;
  }
  if (reach.first_split() == reach.last_split(item.count) && !call.sinks) {  // merging would change nothing
    run_split(call, item, reach, m, reach.first_split(), running);
    return finish(call, item, running);
  }
  const State merged = state_in(m.merged.at_least(state_size(call, item.count)), item.count);
  begin_merging(call, item, merged);
  for (long split = reach.first_split(); split <= reach.last_split(item.count); split++) {
    run_split(call, item, reach, m, split, running);
    merge(call, merged, running, item.count);
  }
  finish(call, item, merged);
}

// What one call does: items, and those whose splits are items of their own.
struct Work {
  std::vector<Item> items, divided;
  std::vector<float> found;  // States of splits; those of one item side by side

  // Few rows with long contexts are divided, so that no thread waits; nobody's bits change.
  Work(const Call& call, int threads) {
    long group = GROUP;
    for (begin(call, group); group > LEAST_GROUP && (long)items.size() < 4 * threads; begin(call, group)) group /= 2;
    if ((long)items.size() < 4 * threads) divide(call);
    // The longest first, so that no thread begins one when the others are done.
    const auto effort = [&](const Item& item) {
      return item.count * (item.split < 0 ? (long)call.lengths[item.row] : std::min<long>(SPLIT, call.lengths[item.row]));
    };
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return effort(a) > effort(b); });
  }

  void begin(const Call& call, long group) {
    items.clear();
    for (long row = 0; row < call.rows; row++) {
      const long queries = call.queries(row) * call.shared();
      for (long first = 0; first < queries; first += group)
        for (long head = 0; head < call.cache.heads; head++)
          items.push_back({row, head, first, std::min(group, queries - first), -1, 0});
    }
  }

  void divide(const Call& call) {
    std::vector<Item> whole;
    whole.swap(items);
    size_t size = 0;
    for (Item item : whole) {
      const Reach reach(call, item);
      if (reach.first_split() == reach.last_split(item.count)) {
        items.push_back(item);
        continue;
      }
      item.found = size;
      divided.push_back(item);
      for (item.split = reach.first_split(); item.split <= reach.last_split(item.count); item.split++) {
        item.found = size;
        items.push_back(item);
        size += state_size(call, item.count);
      }
    }
    found.resize(size);
  }
};

// The splits of a divided item, in order, as run_item does.
void join(const Call& call, const Item& item, Memory& m, float* found) {
  const State merged = state_in(m.merged.at_least(state_size(call, item.count)), item.count);
  begin_merging(call, item, merged);
  const Reach reach(call, item);
  found += item.found;
  for (long split = reach.first_split(); split <= reach.last_split(item.count); split++) {
    merge(call, merged, state_in(found, item.count), item.count);
    found += state_size(call, item.count);
  }
  finish(call, item, merged);
}

void attend(const Call& call) {
  Work work(call, omp_get_max_threads());
#pragma omp parallel
  {
    static thread_local Memory memory;
    begin_products();
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < work.items.size(); i++) run_item(call, work.items[i], memory, work.found.data());
    end_products();
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < work.divided.size(); i++) join(call, work.divided[i], memory, work.found.data());
  }
}

}  // namespace quire

using namespace quire;

EXPORT void quire_attention(const bf16* q, long q_step, bf16* o, const void* keys, const void* values,
                            const float* key_scales, const float* value_scales, long kind, const int* table,
                            long table_step, const int* starts, const int* lengths, const float* sinks, long rows,
                            long heads, long kv_heads, long D, long E, long block_size, long window, float scale,
                            float softcap) {
  const Paged cache = {keys, values, key_scales, value_scales, table, kind, table_step, kv_heads, block_size, D, E};
  attend({q, o, cache, starts, lengths, sinks, q_step, rows, heads, window, scale, softcap});
}
