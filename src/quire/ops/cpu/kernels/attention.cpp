// Paged attention of one step: any mix of prompts, chunks and single tokens, with one algorithm.
//
// Online softmax over tiles of TILE tokens that start at multiples of TILE, in order, with float accumulators. Every SPLIT
// tokens the softmax restarts, and the partial results are merged in order. So a query computes the same products in the same
// order whether it runs alone or in a batch, in one chunk or in many, with its splits on one thread or on several: its bits do
// not change. A tile or a split without visible keys changes nothing.
//
//   item      one row of the batch, one key/value head, up to GROUP of its queries; all splits, or one
//   query     a token times one of the heads that share the key/value head
//   scores    [queries, 32] = q * k^T, bf16 inputs, float sums; weights are rounded to bf16 before the product with v
//
// Keys and values are packed into panels (kv_tiles.h), a split at a time, once for up to GROUP queries. Few queries use
// attention_decode.h, with the same bits. The scales of a quantized cache multiply the scores and the weights. An int8 cache is
// multiplied as bytes: attention_int8_split.h.
//
// Decision 42 has measurements of prefill, with the changes that brought nothing.
#include <atomic>
#include <vector>

#include "exports.h"
#include "attention_prefill.h"
#include "team.h"

namespace quire {

constexpr long GROUP = 2048, LEAST_GROUP = 64;

inline State state_in(float* memory, long count) {
  const long wide = padded(count, 16);
  return {memory, memory + wide, memory + 2 * wide};
}
inline long state_size(const Call& call, long count) { return 2 * padded(count, 16) + count * call.cache.E; }

// All queries of an item, if they are few, against the tokens [first, stop) of a split.
void attend_few(const Call& call, const Reach& reach, const Tokens& tokens, const DecodeQueries& few, long first, long stop, State s) {
  RunningSoftmax running(reach, 0, few.count, s.sums);
  bool found = false;
  with_softmax(call, running, [&](auto softmax) {
    for (long start = first; start < stop; start += TILE) {
      const long end = std::min(start + TILE, tokens.end);
      const long from = std::max<long>(0, reach.low(0) - start) / 32 * 32, width = padded(end - start, 32);
      long done = from;
      const auto add_values_until = [&](long to) {
        if (done == to) return found;
        values_of_few(few, tokens, start, done, to, !found, s.sums);
        done = to;
        return found = true;
      };
      for (long t = from; t < width; t += 32) scores_of_few(few, tokens, start + t, t);
      for (long t = from; t < width; t += 32) {
        softmax.begin({few.scores + t, TILE, few.weights + t, TILE, few.scales + t, start + t});
        softmax.end([&] { return add_values_until(t); });
      }
      add_values_until(width);
    }
  });
  running.end(s);
}

// The same for a cache of split int8 (attention_int8_split.h).
void attend_few_split(const Call& call, const Reach& reach, const Tokens& tokens, const DecodeQueries& few, long first, long stop, State s) {
  for (long start = first; start < stop; start += TILE) {
    const long end = std::min(start + TILE, tokens.end);
    const long from = std::max<long>(0, reach.low(0) - start) / 32 * 32, width = padded(end - start, 32);
    for (long t = from; t < width; t += 32) scores_of_few(few, tokens, start + t, t);
    softmax_split(call, reach, few.scores, few.weights, few.weight_steps, few.scales, start, end, 0, few.count, width, s);
    values_of_few(few, tokens, start, from, width, start == first, s.sums);
  }
}

// The queries of an item form runs: the heads of one token are contiguous in q and in o.
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

// Copies the queries of an item to m.q; returns the item's softmax state.
State gather(const Call& call, const Item& item, Memory& m) {
  const long room = item.count / ROWS * ROWS + touched((int)(item.count % ROWS));  // rows that the product reads
  const State running = state_in(m.running.at_least(state_size(call, room)), item.count);
  const long D = call.cache.D;
  bf16* q = m.q.at_least(room * D);
  Run::each(call, item, [&](const Run& run) {
    const bf16* from = call.q + run.token * call.q_step + run.head * D;
    memcpy(q + run.i * D, from, run.count * D * sizeof(bf16));
    if (run.i + 8 * run.count < item.count)
      for (long d = 0; d < run.count * D; d += 32) fetch(from + 8 * call.q_step + d);
  });
  if (call.cache.kind != KV_INT8 && call.cache.kind != KV_INT8_SPLIT) return running;
  float *x = m.scores.data, *steps = m.query_steps.at_least(room);  // free: there are no scores yet
  for (long i = 0; i < item.count; i++, q += D) {
    for (long d = 0; d < D; d += 16) store(x + d, widen(q + d));
    hadamard(x, D);
    if (call.cache.kind == KV_INT8_SPLIT) {
      steps[i] = split_query(x, D, (uint8_t*)q);
      continue;
    }
    for (long d = 0; d < D; d += 16) store(q + d, load(x + d));
  }
  return running;
}

void begin(const Call& call, State s, long count) {
  std::fill_n(s.top, count, LOWEST);
  memset(s.total, 0, count * sizeof(float));
  memset(s.sums, 0, count * call.cache.E * sizeof(float));
}

// Merges the state b of later keys into a.
void merge(const Call& call, State a, State b, long count) {
  const long E = call.cache.E;
  for (long i = 0; i < count; i++) {
    const float top = std::max(a.top[i], b.top[i]), scale_a = exp2f(a.top[i] - top), part = exp2f(b.top[i] - top);
    a.top[i] = top;
    a.total[i] = a.total[i] * scale_a + b.total[i] * part;
    for (long e = i * E; e < (i + 1) * E; e += 16)
      store(a.sums + e, fma(load(a.sums + e), floats(scale_a), load(b.sums + e) * floats(part)));
  }
}

// Whether o is written with non-temporal stores: lines of a large output leave the cache before they are read, and a normal
// store would first read them from memory. A prompt of 1024 tokens, 16 heads of 128, AMX: 3.4 -> 3.05 ms.
bool streams(const Call& call) {
  return (uintptr_t)call.o % LINE == 0 && call.starts[call.rows] * call.heads * call.cache.E > 1 << 19;
}

void finish(const Call& call, const Item& item, State s, Memory& m) {
  const long E = call.cache.E;
  const bool past = streams(call), is_split = call.cache.kind == KV_INT8_SPLIT;
  float* ordered = is_split ? m.ordered.at_least(E) : nullptr;
  Run::each(call, item, [&](const Run& run) {
    bf16* o = call.o + (run.token * call.heads + run.head) * E;
    for (long i = run.i; i < run.i + run.count; i++, o += E) {
      const Floats part = floats(1.f / s.total[i]);
      const float* sums = s.sums + i * E;
      if (is_split) natural_order(sums, E, ordered), sums = ordered;
      for (long e = 0; e < E; e += 32) {
        const Floats left = part * load(sums + e), right = part * load(sums + e + 16);
        past ? stream(o + e, left, right) : store(o + e, left, right);
      }
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

// The tokens of the cache that an item reads.
Tokens tokens_of(const Call& call, const Item& item) {
  const Reach reach(call, item);
  const long first = std::max(reach.low(0), item.split * SPLIT) / 32 * 32;
  return Tokens(call.cache, item.row, item.head, first, reach.high(item.count - 1));
}

// One split of an item. Few queries read the cache directly; others read packed panels.
void run_split(const Call& call, const Item& item, Packed& packed, long split, State s) {
  const Reach reach(call, item);
  Memory& m = packed.m;
  const long stop = std::min(packed.tokens.end, (split + 1) * SPLIT);
  const long first = std::max(reach.low(0) / TILE * TILE, split * SPLIT);
  const bool is_split = call.cache.kind == KV_INT8_SPLIT;
  std::fill_n(s.top, item.count, LOWEST);
  memset(s.total, 0, item.count * sizeof(float));
  if (packed.few) {
    const DecodeQueries few = {m.q.data, m.columns.data, m.keys.data, m.scores.data, m.scales.data, m.weights.data,
                     m.query_steps.data, m.weight_steps.data, (int)item.count};
    begin_few(few, call.cache, m.shape);
    return (is_split ? attend_few_split : attend_few)(call, reach, packed.tokens, few, first, stop, s);
  }
  m.shape.take(16);
  packed.begin(first, stop);
  for (long i = 0; i < item.count; i += ROWS)
    (is_split ? attend_many_split : attend_many)(call, reach, packed, i, (int)std::min<long>(ROWS, item.count - i), s);
}

// All splits of an item, one after the other.
void run_whole(const Call& call, const Item& item, Packed& packed) {
  const Reach reach(call, item);
  Memory& m = packed.m;
  const State running = gather(call, item, m);
  const long first = reach.first_split(), last = reach.last_split(item.count);
  if (first == last && !call.sinks) {  // one split: no merge
    run_split(call, item, packed, first, running);
    return finish(call, item, running, m);
  }
  const State merged = state_in(m.merged.at_least(state_size(call, item.count)), item.count);
  begin_merging(call, item, merged);
  for (long split = first; split <= last; split++) {
    run_split(call, item, packed, split, running);
    merge(call, merged, running, item.count);
  }
  finish(call, item, merged, m);
}

// `next`: the thread's next item, or null.
void run_item(const Call& call, const Item& item, const Item* next, Memory& m, float* found) {
  const long D = call.cache.D, E = call.cache.E;
  m.keys.at_least(32 * std::max(D, E)), m.columns.at_least(DECODE_MAX_QUERIES * D), m.weights.at_least(ROWS * TILE);
  m.scores.at_least(std::max(ROWS * TILE, D)), m.scales.at_least(2 * TILE), m.weight_steps.at_least(ROWS);
  const Reach reach(call, item);
  Tokens tokens = tokens_of(call, item), later = next ? tokens_of(call, *next) : tokens;
  if (next) tokens.next = &later;
  Packed packed = {m, tokens, item.count <= DECODE_MAX_QUERIES};
  if (item.split >= 0) {
    const State running = gather(call, item, m);
    run_split(call, item, packed, item.split, running);
    memcpy(found + item.found, running.top, state_size(call, item.count) * sizeof(float));
    return;
  }
  // The panels of one split stay packed, so ROWS queries at a time can pass through it; with several splits, each is packed for all
  // queries of the item.
  const long step = reach.first_split() == reach.last_split(item.count) ? ROWS : item.count;
  for (long i = 0; i < item.count; i += step) {
    Item part = item;
    part.first += i, part.count = std::min(step, item.count - i);
    run_whole(call, part, packed);
  }
}

// The items of one call; those whose splits are items of their own are in `split_items` too.
struct Work {
  const Call& call;
  std::vector<Item> items, split_items;
  std::vector<float> found;  // states of splits, contiguous by item

  // If there are few items, long contexts are split over threads. This changes no bits.
  Work(const Call& call, int threads) : call(call) {
    // The longest first, so that no thread starts a long one last.
    std::vector<std::pair<long, long>> rows;
    rows.reserve(call.rows);
    for (long row = 0; row < call.rows; row++) rows.push_back({-std::min(GROUP, call.queries(row)) * call.lengths[row], row});
    std::sort(rows.begin(), rows.end());
    long group = GROUP;
    for (begin(rows, group); group > LEAST_GROUP && (long)items.size() < 4 * threads; begin(rows, group)) group /= 2;
    if ((long)items.size() < 4 * threads) split_long_items();
  }

  void begin(const std::vector<std::pair<long, long>>& rows, long group) {
    items.clear();
    items.reserve(call.rows * call.cache.heads);
    for (auto [_, row] : rows) {
      const long queries = call.queries(row) * call.shared();
      for (long first = padded(queries, group) - group; first >= 0; first -= group)
        for (long head = 0; head < call.cache.heads; head++)
          items.push_back({row, head, first, std::min(group, queries - first), -1, 0});
    }
  }

  void split_long_items() {
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
      split_items.push_back(item);
      for (item.split = reach.first_split(); item.split <= reach.last_split(item.count); item.split++) {
        item.found = size;
        items.push_back(item);
        size += state_size(call, item.count);
      }
    }
    found.resize(size);
  }
};

// Merges the splits of an item that was split over threads, in order, as run_item does.
void join(const Call& call, const Item& item, Memory& m, float* found) {
  const State merged = state_in(m.merged.at_least(state_size(call, item.count)), item.count);
  begin_merging(call, item, merged);
  const Reach reach(call, item);
  found += item.found;
  for (long split = reach.first_split(); split <= reach.last_split(item.count); split++) {
    merge(call, merged, state_in(found, item.count), item.count);
    found += state_size(call, item.count);
  }
  finish(call, item, merged, m);
}

// The work queue: a thread takes `stride` items at a time. With many items it takes the next one before it has finished the last,
// so that it can prefetch; with few, a thread holds none that another could start.
struct Queue {
  long count, stride;
  bool early;
  std::atomic<long> taken{0};

  Queue(long count, int threads)
      : count(count), stride(std::clamp<long>(count / (16 * threads), 1, 8)), early(count >= 8 * threads) {}
  long after(long i) { return (i + 1) % stride ? i + 1 : taken.fetch_add(stride, std::memory_order_relaxed); }
  template <class F>
  void run(const F& f) {
    for (long i = after(-1); i < count;) {
      const long next = early ? after(i) : count;
      f(i, next < count ? next : -1);
      i = early ? next : after(i);
    }
  }
};

Memory& memory_here() {
  static thread_local Memory memory;
  return memory;
}

void attend(const Call& call) {
  const int threads = (int)team_size();
  Work work(call, threads);
  const std::vector<Item>& items = work.items;
  Queue queue((long)items.size(), threads), joins((long)work.split_items.size(), threads);
  in_shares(true, [&](long, long) {
    Memory& memory = memory_here();
    begin_products();
    memory.shape = {};
    queue.run([&](long i, long next) { run_item(call, items[i], next < 0 ? nullptr : &items[next], memory, work.found.data()); });
    end_products();
    if (work.split_items.empty()) end_streams();
  });
  if (work.split_items.empty()) return;
  in_shares(true, [&](long, long) {
    Memory& memory = memory_here();
    joins.run([&](long i, long) { join(call, work.split_items[i], memory, work.found.data()); });
    end_streams();
  });
}

}  // namespace quire

using namespace quire;

EXPORT void quire_attention(const bf16* q, long q_step, bf16* o, const void* keys, const void* values,
                            const float* key_scales, const float* value_scales, long kind, const int* table,
                            long table_step, const int* starts, const int* lengths, const float* sinks, long rows,
                            long heads, long kv_heads, long D, long E, long block_size, long window, float scale,
                            float softcap) {
  if (is_split(kind, D, E)) kind = KV_INT8_SPLIT;
  Paged cache = {keys, values, key_scales, value_scales, table, kind, table_step, kv_heads, block_size, D, E};
  attend({q, o, cache, starts, lengths, sinks, q_step, rows, heads, window, scale, softcap});
}
