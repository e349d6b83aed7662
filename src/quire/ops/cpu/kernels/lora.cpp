// Adapters: two products in one parallel region, over the tokens of a step grouped by adapter, so that factors are read once for
// all tokens that share them.
//
//   shrink    h = scale * A x      threads share (tokens of an adapter, rows of A)
//   expand    y = y + B h          threads share (tokens of an adapter, panels of 16 outputs)
//
// A x is summed in sixteen lanes over the inputs, B h over the rank, ascending, in float32; y is rounded once. A token's bits do not
// depend on the other tokens, their order, the adapter's number or threads.
#include "layer.h"
#include "team.h"

namespace quire {

constexpr long CHUNK = 32;                     // tokens that share the factors while these are in a cache
constexpr long SERIAL_MAX_PRODUCTS = 1 << 15;  // up to this many one thread is faster than starting a team
constexpr long TOGETHER = 4;                    // panels of a line of y: lines of many tokens share a set of the L1 cache
constexpr int WIDE = LEAF == 16 ? 4 : 2;       // tokens, and rows of A, whose sums fit the registers

struct Chunk {  // tokens order[first] .. of one adapter
  long number, first, count;
};

struct AdapterTokens {
  Scratch<int64_t> order, ends;
  Scratch<Chunk> chunks;
  long count = 0, tokens = 0;  // of chunks, and of their tokens
};

static thread_local AdapterTokens in_scope;

// Groups them by adapter.
AdapterScope::AdapterScope(const int64_t* numbers, long tokens) {
  AdapterTokens& found = in_scope;
  if (!numbers) return;
  const long most = *std::max_element(numbers, numbers + tokens) + 1;
  int64_t *order = found.order.at_least(tokens), *ends = found.ends.at_least(most);
  std::fill(ends, ends + most, 0);
  for (long t = 0; t < tokens; t++)
    if (numbers[t] >= 0) ends[numbers[t]]++, found.tokens++;
  Chunk* chunks = found.chunks.at_least(tokens);
  for (long number = 0, first = 0; number < most; number++) {
    const long count = ends[number], parts = (count + CHUNK - 1) / CHUNK;
    for (long i = 0; i < parts; i++) {
      const long a = count * i / parts;
      chunks[found.count++] = {number, first + a, count * (i + 1) / parts - a};
    }
    ends[number] = first, first += count;
  }
  for (long t = 0; t < tokens; t++)
    if (numbers[t] >= 0) order[ends[numbers[t]]++] = t;
}

AdapterScope::~AdapterScope() { in_scope.count = in_scope.tokens = 0; }

bool touched_by_adapters(LoraTable table) {
  if (!in_scope.count || !table) return false;
  const Chunk* chunks = in_scope.chunks.data;
  return std::any_of(chunks, chunks + in_scope.count, [&](const Chunk& c) { return table[c.number]; });
}

namespace {

inline Floats widened(const bf16* p) { return widen(p); }
inline Floats widened(const float* p) { return load(p); }

// Where all values are bf16, the order of lanes that costs least does: sums by lane and over lanes keep their bits.
template <class X, class W>
constexpr bool ANY_ORDER = std::is_same_v<X, bf16> && std::is_same_v<W, bf16>;
template <bool ANY, class T>
inline Floats lanes(const T* p) {
  if constexpr (ANY) return widen_apart(p);
  else return widened(p);
}
template <bool ANY, class T>
inline void put(T* p, Floats x) {
  if constexpr (ANY) store_apart(p, x);
  else store(p, x);
}

inline long panels_of(const LoraPart& part) { return (part.outs + 15) / 16; }

// h[i][r] of N tokens and R rows of A; x: a line of each token, and its last inputs, fewer than 16, padded with zeros.
template <int N, int R, class X, class W>
inline void dots(const X* const* x, const X (*ends)[16], const W* a, long ins, float* h, long h_row) {
  const long whole = ins / 16 * 16, a_row = (ins + 15) / 16 * 16;
  constexpr bool ANY = ANY_ORDER<X, W>;
  Floats sums[N][R];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[i][r] = floats(0.f);
  const auto step = [&](long k, const auto& at) __attribute__((always_inline)) {
    Floats w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) w[r] = lanes<ANY>(a + r * a_row + k);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
      const Floats v = lanes<ANY>(at(i));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[i][r] = fma(v, w[r], sums[i][r]);
    }
  };
  for (long k = 0; k < whole; k += 16) step(k, [&](int i) { return x[i] + k; });
  if (whole < ins) step(whole, [&](int i) { return ends[i]; });
#pragma GCC unroll 4  // else the sums are kept in memory
  for (int i = 0; i < N; i++)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) h[i * h_row + r] = ANY ? sum_apart(sums[i][r]) : sum_of(sums[i][r]);
}

// Rows [r0, r1) of A with all tokens of a chunk.
template <class X, class W>
void shrink(const Lora& of, const X* x, long x_row, const int64_t* order, long count, long r0, long r1, float* h, long h_row) {
  const W* a = (const W*)of.a;
  const long a_row = (of.ins + 15) / 16 * 16, whole = of.ins / 16 * 16;
  const auto some = [&](long i, auto n) {
    const X* lines[n];
    alignas(64) X ends[n][16] = {};
    for (int j = 0; j < n; j++) {
      lines[j] = x + order[i + j] * x_row;
      memcpy(ends[j], lines[j] + whole, (of.ins - whole) * sizeof(X));
    }
    constexpr int R = n == 1 ? 4 : WIDE;
    long r = r0;
    for (; r + R <= r1; r += R) dots<n, R>(lines, ends, a + r * a_row, of.ins, h + i * h_row + r, h_row);
    for (; r < r1; r++) dots<n, 1>(lines, ends, a + r * a_row, of.ins, h + i * h_row + r, h_row);
    for (long k = 0; k < of.count; k++) {
      const LoraPart& part = of.parts[k];
      for (r = std::max<long>(r0, part.first); r < std::min<long>(r1, part.first + part.rank); r++)
        for (int j = 0; j < n; j++) h[(i + j) * h_row + r] *= part.scale;
    }
  };
  long i = 0;
  for (; i + WIDE <= count; i += WIDE) some(i, std::integral_constant<int, WIDE>{});
  for (; i < count; i++) some(i, std::integral_constant<int, 1>{});
}

// One panel of outputs of N tokens. ANY: in any order of lanes, without gain and offset.
template <int N, bool ANY, class X, class W>
inline void panel_of(const Lora& of, const LoraPart& part, long panel, X* const* y, const float* h, long h_row) {
  const W* b = (const W*)of.b + part.at + panel * part.rank * 16;
  const long out = part.start + panel * 16, left = std::min(16L, part.outs - panel * 16);
  Floats sums[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) sums[i] = floats(0.f);
  for (long r = 0; r < part.rank; r++) {
    const Floats w = lanes<ANY>(b + r * 16);
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) sums[i] = fma(floats(h[i * h_row + part.first + r]), w, sums[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) {
    alignas(64) X some[16] = {};
    if (left < 16) memcpy(some, y[i] + out, left * sizeof(X));
    X* at = left < 16 ? some : y[i] + out;
    Floats v = lanes<ANY>(at) + sums[i];
    if (!ANY && of.gain) v = v * load(of.gain + out);
    if (!ANY && of.offset) v = v + load(of.offset + out);
    put<ANY>(at, v);
    if (left < 16) memcpy(y[i] + out, some, left * sizeof(X));
  }
}

// Panels [p0, p1), counted through all parts, of all tokens of a chunk.
template <bool ANY, class X, class W>
void expand(const Lora& of, X* y, long y_row, const int64_t* order, long count, long p0, long p1, const float* h, long h_row) {
  for (long k = 0, before = 0; k < of.count; before += panels_of(of.parts[k++])) {
    const long first = std::max(p0 - before, 0L), last = std::min(p1 - before, panels_of(of.parts[k]));
    for (long panel = first; panel < last; panel += TOGETHER) {
      const auto some = [&](long i, auto n) {
        X* lines[n];
        for (int j = 0; j < n; j++) lines[j] = y + order[i + j] * y_row;
        for (long each = panel; each < std::min(last, panel + TOGETHER); each++)
          panel_of<n, ANY, X, W>(of, of.parts[k], each, lines, h + i * h_row, h_row);
      };
      long i = 0;
      for (; i + 4 <= count; i += 4) some(i, std::integral_constant<int, 4>{});
      for (; i < count; i++) some(i, std::integral_constant<int, 1>{});
    }
  }
}

struct Costs {  // of all chunks; a chunk's work has equal units
  long units, each;
  long all() const { return units * each; }
};

Costs shrink_cost(const Lora& of, long count) { return {of.rank, (count + 4) * of.ins}; }

Costs expand_cost(const Lora& of, long count) {
  long panels = 0, most = 0;
  for (long k = 0; k < of.count; k++) panels += panels_of(of.parts[k]), most = std::max<long>(most, of.parts[k].rank);
  return {panels, (count + 4) * 16 * (most + 4)};
}

// Calls f(chunk, its factors, first unit, last unit) for the share of thread t: equal parts of the sum of costs.
template <class C, class F>
void each_share(const AdapterTokens& tokens, LoraTable table, long t, long team, const C& cost_of, const F& f) {
  long all = 0, before = 0;
  const auto each = [&](const auto& g) {
    for (const Chunk* c = tokens.chunks.data; c < tokens.chunks.data + tokens.count; c++)
      if (const Lora* of = table[c->number]) g(*c, *of, cost_of(*of, c->count));
  };
  each([&](const Chunk&, const Lora&, const Costs& cost) { all += cost.all(); });
  const long from = all / team * t, to = t + 1 == team ? all : all / team * (t + 1);
  each([&](const Chunk& c, const Lora& of, const Costs& cost) {
    const auto unit = [&](long at) { return std::clamp(at - before, 0L, cost.all()) / std::max(1L, cost.each); };
    const long first = unit(from), last = unit(to);
    if (first < last) f(c, of, first, last);
    before += cost.all();
  });
}

template <class X>
void add(const AdapterTokens& tokens, LoraTable table, const X* x, long x_row, X* y, long y_row) {
  static thread_local Scratch<float> keep;  // of the calling thread
  long most = 0, products = 0;
  for (const Chunk* c = tokens.chunks.data; c < tokens.chunks.data + tokens.count; c++)
    if (const Lora* of = table[c->number]) {
      most = std::max<long>(most, of->rank);
      products += shrink_cost(*of, c->count).all() + expand_cost(*of, c->count).all();
    }
  if (!products) return;
  float* h = keep.at_least(tokens.tokens * most);
  const int64_t* order = tokens.order.data;
  const bool together = products > SERIAL_MAX_PRODUCTS;
  in_shares(together, [&](long t, long team) {
    each_share(tokens, table, t, team, shrink_cost, [&](const Chunk& c, const Lora& of, long r0, long r1) {
      const auto run = of.is_bf16 ? shrink<X, bf16> : shrink<X, float>;
      run(of, x, x_row, order + c.first, c.count, r0, r1, h + c.first * most, most);
    });
  });
  in_shares(together, [&](long t, long team) {
    each_share(tokens, table, t, team, expand_cost, [&](const Chunk& c, const Lora& of, long p0, long p1) {
      constexpr bool ANY = ANY_ORDER<X, bf16>;
      const auto of_bf16 = of.gain || of.offset ? expand<false, X, bf16> : expand<ANY, X, bf16>;
      const auto run = of.is_bf16 ? of_bf16 : expand<false, X, float>;
      run(of, y, y_row, order + c.first, c.count, p0, p1, h + c.first * most, most);
    });
  });
}

}  // namespace

// The activation comes after the deltas. It rounds its input, so it gives the bits of the product's own.
void Weight::multiply_adapted(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const {
  static thread_local Scratch<bf16> keep;  // of the calling thread
  const bool gates = is_gated(act);
  bf16* to = gates ? keep.at_least(rows * outs) : y;
  const long to_row = gates ? outs : y_row;
  product(x, x_row, to, to_row, rows, gates ? HALVES : NO_ACTIVATION);
  add(in_scope, lora, x, x_row, to, to_row);
  if (act == NO_ACTIVATION) return;
  const long width = gates ? outs / 2 : outs;
  each_of(rows, rows >= 16, [&](long r) {
    for (long i = 0; i < width; i += 16) {
      const Floats v = widen(to + r * to_row + i);
      store(y + r * y_row + i, gates ? gated(v, widen(to + r * to_row + width + i), act) : ungated(v, act));
    }
  });
}

}  // namespace quire

using namespace quire;

// The same for tokens whose adapters are `numbers`; x and y: bf16 or float. table: addresses of `Lora`.
EXPORT void quire_lora(const void* x, long x_row, void* y, long y_row, int is_bf16, const int64_t* numbers, long tokens,
                       const void* table) {
  const AdapterScope scope(numbers, tokens);
  if (is_bf16)
    add(in_scope, (LoraTable)table, (const bf16*)x, x_row, (bf16*)y, y_row);
  else
    add(in_scope, (LoraTable)table, (const float*)x, x_row, (float*)y, y_row);
}
