// Routed experts: of each token, the sum of its experts' outputs by their weights.
//
//   pairs      a counting sort of (token, choice) by expert, in token order
//   inner      gate and up of each expert for its rows in one pass, with the activation
//   outer      down of each expert
//   y          of each token, the sum over its choices in the router's order, in float32
//
// Threads share each product by the memory that they read, not by experts, so a step of few tokens, whose experts differ in rows
// but not in bytes, keeps all of them busy. Two barriers a layer. A row's result does not depend on the other rows.
#include "experts.h"
#include "team.h"

namespace quire {

namespace {

struct Pairs {  // of one call, sorted by expert
  Scratch<int64_t> first, token, place;  // of each expert: its first pair; of each pair: its token; of each choice: its pair, or -1
  Scratch<bf16> inner, outer;
};

// Ids outside of the experts have no pair: they add nothing.
void sort(const Experts& e, const int64_t* ids, long tokens, Pairs& p) {
  const long all = tokens * e.chosen;
  int64_t *first = p.first.at_least(e.count + 2), *token = p.token.at_least(all), *place = p.place.at_least(all);
  const auto known = [&](long i) { return ids[i] >= 0 && ids[i] < e.count; };
  std::fill(first, first + e.count + 2, 0);
  for (long i = 0; i < all; i++)
    if (known(i)) first[ids[i] + 2]++;
  for (long i = 2; i < e.count + 2; i++) first[i] += first[i - 1];
  for (long i = 0; i < all; i++) {
    place[i] = known(i) ? first[ids[i] + 1]++ : -1;
    if (known(i)) token[place[i]] = i / e.chosen;
  }
}

// A thread multiplies a row by a panel in about the time in which it reads 6 bytes of weights for each input (AVX2, bf16).
constexpr long ROW_BYTES = 6;

// The share of thread t of the experts' panels, in pairs of panels: f(expert, panel0, panel1).
template <class F>
void deal(const Weight* weights, const int64_t* first, long count, long t, long team, const F& f) {
  const auto each = [&](long i) { return weights[i].ins * (8 * weights[i].bits() + 2 * ROW_BYTES * (first[i + 1] - first[i])); };
  const auto parts = [&](long i) { return first[i + 1] > first[i] ? (weights[i].outs / 32 + 1) / 2 : 0; };
  long total = 0;
  for (long i = 0; i < count; i++) total += parts(i) * each(i);
  const long from = total * t / team, to = total * (t + 1) / team;
  long before = 0;
  for (long i = 0; i < count && before < to; i++) {
    const long all = parts(i), one = each(i);
    // The first part that begins at or after `at`.
    const auto part = [&](long at) { return std::clamp((at - before + one - 1) / one, 0L, all); };
    const long a = part(from), b = part(to);
    if (a < b) f(i, 2 * a, std::min<long>(2 * b, weights[i].outs / 32));
    before += all * one;
  }
}

// The rows of an expert's pairs, one after the other; rows that already are so are not copied.
const bf16* gather(const bf16* x, long& x_row, const int64_t* token, long rows, long width) {
  static thread_local Scratch<bf16> keep;
  const bf16* from = x + token[0] * x_row;
  if (token[rows - 1] - token[0] == rows - 1) return from;
  bf16* to = keep.at_least(rows * width);
  for (long r = 0; r < rows; r++) memcpy(to + r * width, x + token[r] * x_row, width * sizeof(bf16));
  x_row = width;
  return to;
}

// y: features [d0, d1) of a token.
void add(const Experts& e, const bf16* outer, const int64_t* place, const float* weights, bf16* y, long d0, long d1) {
  for (long d = d0; d < d1; d += 16) {
    Floats sum = floats(0.f);
    for (long j = 0; j < e.chosen; j++)
      if (place[j] >= 0) sum = sum + widen(outer + place[j] * e.hidden + d) * floats(weights[j]);
    store(y + d, sum);
  }
}

}  // namespace

}  // namespace quire

using namespace quire;

// x: [tokens, hidden], x_row elements from row to row; ids and weights: [tokens, chosen]; y: [tokens, hidden], which may be x if its
// rows are one after the other.
EXPORT void quire_experts(const Experts* experts, const bf16* x, long x_row, const int64_t* ids, const float* weights, bf16* y,
                          long tokens) {
  static thread_local Pairs keep;  // of the calling thread
  const Experts& e = *experts;
  const long inner_width = e.down->ins, hidden = e.hidden;
  sort(e, ids, tokens, keep);
  const int64_t *first = keep.first.data, *token = keep.token.data, *place = keep.place.data;
  bf16* inner = keep.inner.at_least(tokens * e.chosen * inner_width);
  bf16* outer = keep.outer.at_least(tokens * e.chosen * hidden);
  in_shares(true, [&](long t, long team) {
    deal(e.gate_up, first, e.count, t, team, [&](long i, long panel0, long panel1) {
      const long a = first[i], rows = first[i + 1] - a;
      long step = x_row;
      const bf16* from = gather(x, step, token + a, rows, hidden);
      e.gate_up[i].panels(from, step, inner + a * inner_width, inner_width, rows, e.act, panel0, panel1);
    });
  });
  in_shares(true, [&](long t, long team) {
    deal(e.down, first, e.count, t, team, [&](long i, long panel0, long panel1) {
      const long a = first[i], rows = first[i + 1] - a;
      e.down[i].panels(inner + a * inner_width, inner_width, outer + a * hidden, hidden, rows, NO_ACTIVATION, panel0, panel1);
    });
  });
  in_shares(true, [&](long t, long team) {
    if (tokens >= team)
      for (long r = tokens * t / team; r < tokens * (t + 1) / team; r++)
        add(e, outer, place + r * e.chosen, weights + r * e.chosen, y + r * hidden, 0, hidden);
    else
      for (long r = 0; r < tokens; r++)
        add(e, outer, place + r * e.chosen, weights + r * e.chosen, y + r * hidden, hidden / 16 * t / team * 16, hidden / 16 * (t + 1) / team * 16);
  });
}

// y of each head: the head's x times its own weight. x: [tokens, heads, ins], with x_row and x_head elements from one to the next.
EXPORT void quire_per_head(const Weight* weights, long heads, const bf16* x, long x_row, long x_head, bf16* y, long y_row, long y_head,
                           long tokens) {
  static thread_local Scratch<int64_t> keep;  // of the calling thread
  int64_t* first = keep.at_least(heads + 1);
  for (long h = 0; h <= heads; h++) first[h] = h * tokens;
  in_shares(true, [&](long t, long team) {
    deal(weights, first, heads, t, team, [&](long h, long panel0, long panel1) {
      weights[h].panels(x + h * x_head, x_row, y + h * y_head, y_row, tokens, NO_ACTIVATION, panel0, panel1);
    });
  });
}

// y of each pair of a row and an expert: the row times the expert's gate and up, with the activation; or times its down. Pair i has
// row i * rows / pairs of x. y: [pairs, outs]; zeros where an id is outside of the experts.
EXPORT void quire_expert_products(const Experts* experts, int down, const bf16* x, long x_row, long rows, const int64_t* ids, long pairs,
                                  bf16* y, long outs) {
  static thread_local Pairs keep;  // of the calling thread
  Experts e = *experts;
  e.chosen = pairs / rows;
  sort(e, ids, rows, keep);
  const Weight* weights = down ? e.down : e.gate_up;
  const long ins = weights->ins, act = down ? NO_ACTIVATION : e.act;
  const int64_t *first = keep.first.data, *token = keep.token.data, *place = keep.place.data;
  bf16* sorted = keep.outer.at_least(pairs * outs);
  in_shares(true, [&](long t, long team) {
    deal(weights, first, e.count, t, team, [&](long i, long panel0, long panel1) {
      const long a = first[i], count = first[i + 1] - a;
      long step = x_row;
      const bf16* from = gather(x, step, token + a, count, ins);
      weights[i].panels(from, step, sorted + a * outs, outs, count, act, panel0, panel1);
    });
  });
  each_of(pairs, true, [&](long i) {
    if (place[i] >= 0)
      memcpy(y + i * outs, sorted + place[i] * outs, outs * sizeof(bf16));
    else
      std::fill(y + i * outs, y + (i + 1) * outs, bf16{});
  });
}

// y of each token: the sum of its rows of x times their weights, in the order of its pairs. x: [., D]; D is a multiple of 16. places: the row of
// each pair [tokens, chosen]; null: pair i has row i.
EXPORT void quire_weighted_sum(const bf16* x, const int64_t* places, const float* weights, bf16* y, long tokens, long chosen, long D) {
  static thread_local Scratch<int64_t> keep;  // of the calling thread
  const Experts e{nullptr, nullptr, 0, chosen, D, NO_ACTIVATION};
  if (!places) {
    int64_t* in_order = keep.at_least(tokens * chosen);
    for (long i = 0; i < tokens * chosen; i++) in_order[i] = i;
    places = in_order;
  }
  each_of(tokens, tokens * chosen * D > 1 << 16, [&](long r) {
    add(e, x, places + r * chosen, weights + r * chosen, y + r * D, 0, D);
  });
}
