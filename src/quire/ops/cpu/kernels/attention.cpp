// Attention of a step over the paged cache: any mix of prompts, chunks and single tokens, in one way.
//
// Keys are taken in tiles of TILE tokens that start at multiples of TILE, one after the other, with a running
// softmax in float. A query therefore meets the same products in the same order however it came here, alone or in a
// batch, in one chunk or in many: its bits do not change. A tile it does not see changes nothing.
//
//   item      one row of the batch, one key/value head, up to GROUP of its queries
//   query     a token times one of the heads that share the key/value head
//   scores    [queries, TILE] = q * k^T, both bf16, in float; weights are rounded to bf16 before they meet v
//
// Cache: keys [blocks, heads, block_size, D], values [blocks, heads, block_size, E]; a block holds a multiple of 16
// tokens. Both are repacked tile by tile for the product (product.h); for a prompt that is done once for GROUP queries.
#include "exports.h"
#include "product.h"

namespace quire {

constexpr long TILE = 256;
constexpr long GROUP = 256;
constexpr float LOWEST = -1e30f;  // the running maximum before any key: differences with it are never NaN

struct Call {
  const bf16* q;  // [tokens, heads, D], token_step elements from token to token
  bf16* o;        // [tokens, heads, E], contiguous
  const bf16 *keys, *values;
  const int* table;  // [rows, table_step]: blocks of each row
  const int *starts, *lengths;
  const float* sinks;  // [heads], or null
  long q_step, table_step, rows, heads, kv_heads, D, E, block_size, window;
  float scale, softcap;  // 0: none

  long shared() const { return heads / kv_heads; }
};

struct Item {
  long row, head, first, count;  // queries of the row: token * shared + head among those that share
};

struct Memory {  // of one thread
  Scratch<bf16> packed, q, weights;
  Scratch<float> scores, sums;
  Scratch<float> top, total;
};

inline long padded(long n, long to) { return (n + to - 1) / to * to; }

// 16 keys of D -> the two halves of a panel of 32 columns, for each 32 of D.
inline void pack_keys(const bf16* from, long D, long half, bf16* to) {
  for (long d = 0; d < D / 32; d++) transpose_words(from + d * 32, D * 2, to + d * STEP + half * HALF);
}

// 16 values of E -> rows r..r+7 (pairs of tokens) of each panel of 32 columns; tokens from `count` on are zeros.
inline void pack_values(const bf16* from, long E, long r, long count, bf16* to, long panel_step) {
  for (long pair = 0; pair < 8; pair++)
    for (long e = 0; e < E / 32; e++) {
      const bf16* at = from + 2 * pair * E + e * 32;
      bf16* line = to + e * panel_step + (r + pair) * 32;
      interleave(2 * pair < count ? at : nullptr, 2 * pair + 1 < count ? at + E : nullptr, line, line + HALF);
    }
}

// Keys as [TILE / 32][D / 32] steps, values as [E / 32][TILE / 32] steps. Tokens from `end` on are zeros.
void pack_tile(const Call& call, const Item& item, long start, long end, bf16* keys, bf16* values) {
  const int* table = call.table + item.row * call.table_step;
  for (long t = start; t < padded(end, 32); t += 16) {
    const long at = std::min(t, (end - 1) / 16 * 16), here = t - start;
    const long slot = ((long)table[at / call.block_size] * call.kv_heads + item.head) * call.block_size + at % call.block_size;
    pack_keys(call.keys + slot * call.D, call.D, here / 16 % 2, keys + here / 32 * (call.D / 32) * STEP);
    const long count = std::max<long>(0, std::min<long>(16, end - t));
    pack_values(call.values + slot * call.E, call.E, here % 32 / 2, count, values + here / 32 * STEP, TILE / 32 * STEP);
  }
}

struct State {  // of one query
  float *top, *total, *sums;
};

// Scores of keys [from, to) of the tile -> weights in bf16; the state moves on. Others get weight 0, up to `width`.
inline void soften(const Call& call, float* scores, bf16* weights, long from, long to, long width, State s) {
  Floats most = floats(LOWEST);
  const Floats factor = floats(call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2E);
  for (long t = from / 16 * 16; t < to; t += 16) {
    Floats x = load(scores + t) * factor;
    if (call.softcap > 0) x = tanh_of(x) * floats(call.softcap * LOG2E);
    store(scores + t, x);
    most = select(span(from - t, to - t), max(most, x), most);
  }
  const float top = std::max(*s.top, max_of(most)), shrink = exp2f(*s.top - top);
  Floats total = floats(0.f);
  for (long t = 0; t < width; t += 16) {
    Floats x = floats(0.f);
    if (t + 16 > from && t < to) {
      x = keep(span(from - t, to - t), exp2_of(load(scores + t) - floats(top)));
      total = total + x;
    }
    store(weights + t, x);
  }
  *s.total = fmaf(*s.total, shrink, sum_of(total));
  if (shrink != 1.f)
    for (long e = 0; e < call.E; e += 16) store(s.sums + e, floats(shrink) * load(s.sums + e));
  *s.top = top;
}

// Queries [first, first + count) of an item against one tile.
void meet(const Call& call, const Item& item, Memory& m, long first, int count, long start, long end, const bf16* keys,
          const bf16* values) {
  const long shared = call.shared(), before = call.lengths[item.row] - (call.starts[item.row + 1] - call.starts[item.row]);
  const auto position = [&](long i) { return before + (item.first + first + i) / shared; };
  const auto low = [&](long i) { return call.window ? std::max<long>(0, position(i) - call.window + 1) : 0; };
  const long to = std::min(end, position(count - 1) + 1);
  if (to <= start || low(0) >= end) return;
  const long width = padded(to - start, 32);
  bf16* weights = m.weights.data;
  float* scores = m.scores.data;
  for (long t = 0; t < width; t += 32)
    product_of_rows<Bf16, false>(count, m.q.data + first * call.D, call.D, keys + t / 32 * (call.D / 32) * STEP, STEP,
                           call.D / 32, scores + t, TILE);
  for (int i = 0; i < count; i++) {
    const long from = std::max<long>(0, low(i) - start), until = std::min(end, position(i) + 1) - start;
    if (until <= from) {
      memset(weights + i * TILE, 0, width * sizeof(bf16));
      continue;
    }
    soften(call, scores + i * TILE, weights + i * TILE, from, until, width,
           {m.top.data + first + i, m.total.data + first + i, m.sums.data + (first + i) * call.E});
  }
  for (long e = 0; e < call.E; e += 32)
    product_of_rows<Bf16, true>(count, weights, TILE, values + e / 32 * (TILE / 32) * STEP, STEP, width / 32,
                          m.sums.data + first * call.E + e, call.E);
}

void begin_item(const Call& call, const Item& item, Memory& m) {
  const long shared = call.shared(), room = item.count / ROWS * ROWS + touched((int)(item.count % ROWS));
  bf16* q = m.q.at_least(room * call.D);
  float* top = m.top.at_least(room);
  float* total = m.total.at_least(room);
  memset(m.sums.at_least(room * call.E), 0, room * call.E * sizeof(float));
  m.weights.at_least(ROWS * TILE);
  m.scores.at_least(ROWS * TILE);
  m.packed.at_least(TILE * (call.D + call.E));
  for (long i = 0; i < item.count; i++) {
    const long query = item.first + i, token = call.starts[item.row] + query / shared, head = item.head * shared + query % shared;
    memcpy(q + i * call.D, call.q + token * call.q_step + head * call.D, call.D * sizeof(bf16));
    top[i] = call.sinks ? call.sinks[head] * LOG2E : LOWEST;
    total[i] = call.sinks ? 1.f : 0.f;
  }
}

void run_item(const Call& call, const Item& item, Memory& m) {
  begin_item(call, item, m);
  const long length = call.lengths[item.row], queries = call.starts[item.row + 1] - call.starts[item.row];
  const long shared = call.shared(), before = length - queries;
  const long last = before + (item.first + item.count - 1) / shared;
  const long lowest = call.window ? std::max<long>(0, before + item.first / shared - call.window + 1) : 0;
  bf16 *keys = m.packed.data, *values = keys + TILE * call.D;
  for (long start = lowest / TILE * TILE; start <= last; start += TILE) {
    const long end = std::min(start + TILE, last + 1);
    // What lies before the window may be another's: it is packed, and gets weight 0 -- but 0 times NaN is NaN.
    pack_tile(call, item, start, end, keys, values);
    for (long i = 0; i < item.count; i += ROWS)
      meet(call, item, m, i, (int)std::min<long>(ROWS, item.count - i), start, end, keys, values);
  }
  for (long i = 0; i < item.count; i++) {
    const long query = item.first + i, token = call.starts[item.row] + query / shared, head = item.head * shared + query % shared;
    bf16* o = call.o + (token * call.heads + head) * call.E;
    const Floats part = floats(1.f / m.total.data[i]);
    for (long e = 0; e < call.E; e += 16) store(o + e, part * load(m.sums.data + i * call.E + e));
  }
}

void attend(const Call& call) {
  static Scratch<Item> items;  // one call at a time
  long count = 0, most = 0;
  for (long row = 0; row < call.rows; row++)
    most += call.kv_heads * ((call.starts[row + 1] - call.starts[row]) * call.shared() / GROUP + 1);
  Item* item = items.at_least(most + 1);
  for (long row = 0; row < call.rows; row++) {
    const long queries = (call.starts[row + 1] - call.starts[row]) * call.shared();
    for (long first = 0; first < queries; first += GROUP)
      for (long head = 0; head < call.kv_heads; head++)
        item[count++] = {row, head, first, std::min(GROUP, queries - first)};
  }
  // The longest first, so that no thread begins one when the others are done.
  std::stable_sort(item, item + count, [&](const Item& a, const Item& b) {
    return a.count * call.lengths[a.row] > b.count * call.lengths[b.row];
  });
#pragma omp parallel
  {
    static thread_local Memory memory;
    begin_products();
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < count; i++) run_item(call, item[i], memory);
    end_products();
  }
}

}  // namespace quire

using namespace quire;

EXPORT void quire_attention(const bf16* q, long q_step, bf16* o, const bf16* keys, const bf16* values, const int* table,
                            long table_step, const int* starts, const int* lengths, const float* sinks, long rows,
                            long heads, long kv_heads, long D, long E, long block_size, long window, float scale,
                            float softcap) {
  attend({q, o, keys, values, table, starts, lengths, sinks, q_step, table_step, rows, heads, kv_heads, D, E, block_size,
          window, scale, softcap});
}

// New keys (or values) of T tokens, [T, heads, D] with `step` elements from token to token, to their slots.
EXPORT void quire_write_cache(const bf16* from, long step, bf16* cache, const int64_t* slots, long tokens, long heads,
                              long D, long block_size) {
#pragma omp parallel for if (tokens >= 64) schedule(static)
  for (long t = 0; t < tokens; t++) {
    const long block = slots[t] / block_size, place = slots[t] % block_size;
    for (long h = 0; h < heads; h++)
      memcpy(cache + ((block * heads + h) * block_size + place) * D, from + t * step + h * D, D * sizeof(bf16));
  }
}
