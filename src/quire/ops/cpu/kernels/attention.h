// Shared by the parts of attention: the call, an item's queries, the keys that each query sees, and its softmax state.
#pragma once
#include "kv_tiles.h"

namespace quire {

constexpr long TILE = 256;
constexpr long SPLIT = 2048;
constexpr float LOWEST = -1e30f;  // the running maximum before any key: differences with it are never NaN

struct Call {
  const bf16* q;  // [tokens, heads, D], q_step elements from token to token
  bf16* o;        // [tokens, heads, E], contiguous
  Paged cache;
  const int *starts, *lengths;
  const float* sinks;  // [heads], or null
  long q_step, rows, heads, window;
  float scale, softcap;  // 0: none
  bool both_ways = false;       // a query sees later tokens, too; a window counts to both sides
  const float* bias = nullptr;  // added to scores, times log2(e), by distance: [heads, 2 * distances - 1] and 64 more; or null
  long distances = 0;

  long shared() const { return heads / cache.heads; }
  long queries(long row) const { return starts[row + 1] - starts[row]; }
  long before(long row) const { return lengths[row] - queries(row); }
};

struct State {  // of `count` queries: [count], [count], [count, E]
  float *top, *total, *sums;
  State from(long i, long E) const { return {top + i, total + i, sums + i * E}; }
};

struct Item {
  long row, head, first, count;  // queries of the row: token * shared + head among those that share
  long split;                    // the only one to do, or -1
  size_t found;                  // where its State goes, then
};

// Positions of an item's queries, the tokens [low, high) that each sees, and its biases of them.
struct Reach {
  const Call& call;
  long before, first, shared, window, length, head;
  Reach(const Call& call, const Item& item)
      : call(call), before(call.before(item.row)), first(item.first), shared(call.shared()), window(call.window),
        length(call.lengths[item.row]), head(item.head) {}
  long position(long i) const { return before + (first + i) / shared; }
  long low(long i) const { return window ? std::max<long>(0, position(i) - window + 1) : 0; }
  long high(long i) const {
    if (!call.both_ways) return position(i) + 1;
    return window ? std::min(length, position(i) + window) : length;
  }
  const float* biases(long i) const {  // token 0 has them
    const long of_head = head * shared + (first + i) % shared;
    return call.bias + of_head * (2 * call.distances - 1) + call.distances - 1 - position(i);
  }
  long first_split() const { return low(0) / SPLIT; }
  long last_split(long count) const { return (high(count - 1) - 1) / SPLIT; }
};

void attend(const Call& call);

}  // namespace quire
