// A mixture layer in one call: the functions that its modules call, in their order, so the same bits.
#include "mixture.h"
#include "team.h"

namespace quire {

constexpr long SERIAL_MAX_ROWS = 16;  // up to this many rows one thread is faster than starting a team

// x = the sum of each token's experts, of whose outputs each rank has a part. weights: of the chosen experts.
static void compute_cut(const Mixture& m, const int64_t* ids, const float* weights, bf16* x, long tokens) {
  static thread_local Scratch<bf16> keep_own, keep_inner, keep_outer;  // of the calling thread
  constexpr long SIZE = sizeof(bf16);
  const long hidden = m.experts.hidden, pairs = tokens * m.experts.chosen;
  const long inner = m.experts.down->ins, own_inner = inner / m.ranks->size, outs = m.experts.down->outs;
  bf16 *own = keep_own.at_least(std::max(pairs * own_inner, tokens * outs)), *all = keep_inner.at_least(pairs * inner);
  bf16* outer = keep_outer.at_least(pairs * outs);
  quire_expert_products(&m.experts, 0, x, hidden, tokens, ids, pairs, own, own_inner);
  gather(*m.ranks, own, own_inner * SIZE, pairs, own_inner * SIZE, all, inner * SIZE);
  quire_expert_products(&m.experts, 1, all, inner, pairs, ids, pairs, outer, outs);
  quire_weighted_sum(outer, nullptr, weights, own, tokens, m.experts.chosen, outs);
  gather(*m.ranks, own, outs * SIZE, tokens, outs * SIZE, x, hidden * SIZE);
}

// x = the sum of each token's experts, of which each rank has whole ones: ranks gather the outputs of pairs of a token and an expert. The
// copies of expert e are first_seat[e] to first_seat[e + 1] of `seats`: a rank, and the number of its expert there. They take turns from
// token to token.
static void compute_placed(const Mixture& m, const int64_t* ids, const float* weights, bf16* x, long tokens) {
  static thread_local Scratch<bf16> keep_own, keep_inner, keep_outer, keep_all;
  static thread_local Scratch<int64_t> keep_counts, keep_places, keep_seats, keep_tokens;  // of the calling thread
  constexpr long SIZE = sizeof(bf16);
  const long hidden = m.experts.hidden, inner = m.experts.down->ins, chosen = m.experts.chosen, pairs = tokens * chosen;
  const long rank = m.ranks->rank, ranks = m.ranks->size;
  int64_t *counts = keep_counts.at_least(ranks), *places = keep_places.at_least(pairs);          // of each rank: its pairs; of each pair: its output
  int64_t *own_seats = keep_seats.at_least(pairs), *own_tokens = keep_tokens.at_least(pairs);  // of this rank's pairs
  std::fill(counts, counts + ranks, 0);
  for (long i = 0; i < pairs; i++) {
    const int64_t first = m.first_seat[ids[i]], copies = m.first_seat[ids[i] + 1] - first;
    const int64_t* seat = m.seats + 2 * (first + i / chosen % copies);
    const long number = counts[seat[0]]++;
    places[i] = number * ranks + seat[0];
    if (seat[0] == rank) own_seats[number] = seat[1], own_tokens[number] = i / chosen;
    m.loads[ids[i]]++;
  }
  const long own = counts[rank], most = *std::max_element(counts, counts + ranks);
  bf16 *rows = keep_own.at_least(own * hidden), *between = keep_inner.at_least(own * inner);
  bf16 *outer = keep_outer.at_least(most * hidden), *all = keep_all.at_least(most * ranks * hidden);
  each_of(own, own * hidden > 1 << 16, [&](long i) { memcpy(rows + i * hidden, x + own_tokens[i] * hidden, hidden * SIZE); });
  if (own) {
    quire_expert_products(&m.experts, 0, rows, hidden, own, own_seats, own, between, inner);
    quire_expert_products(&m.experts, 1, between, inner, own, own_seats, own, outer, hidden);
  }
  gather(*m.ranks, outer, hidden * SIZE, most, hidden * SIZE, all, ranks * hidden * SIZE);
  quire_weighted_sum(all, places, weights, x, tokens, chosen, hidden);
}

void compute(const Mixture& m, bf16* x, long tokens) {
  static thread_local Scratch<bf16> keep_logits, keep_inner, keep_shared, keep_gate;
  static thread_local Scratch<float> keep_floats, keep_weights;
  static thread_local Scratch<int64_t> keep_ids;  // of the calling thread
  const long padded = m.router.outs, count = m.count, chosen = m.experts.chosen, hidden = m.experts.hidden;
  bf16* logits = keep_logits.at_least(tokens * padded);
  float *floats = keep_floats.at_least(tokens * count), *weights = keep_weights.at_least(tokens * chosen);
  int64_t* ids = keep_ids.at_least(tokens * chosen);
  if (m.router_weight)
    quire_router_logits(x, hidden, m.router_weight, m.router_bias, floats, tokens, count, hidden);
  else
    m.router.multiply(x, hidden, logits, padded, tokens);
  for (long t = 0; t < (m.router_weight ? 0 : tokens); t++)
    for (long i = 0; i < count; i++) {
      const uint32_t bits = (uint32_t)logits[t * padded + i] << 16;
      memcpy(floats + t * count + i, &bits, sizeof(bits));
    }
  quire_route(floats, m.correction, &m.routing, tokens, count, ids, weights);
  bf16 *shared = nullptr, *gate = nullptr;
  const long inner = m.shared_down.own_ins(), gate_row = m.shared_gate.outs;
  if (m.shared_down.data) {
    bf16* gated = keep_inner.at_least(tokens * inner);
    shared = keep_shared.at_least(tokens * hidden);
    m.shared_gate_up.multiply(x, hidden, gated, inner, tokens, (int)m.shared_act);
    m.shared_down.multiply(gated, inner, shared, hidden, tokens);
  }
  if (m.shared_gate.data) {
    gate = keep_gate.at_least(tokens * gate_row);
    m.shared_gate.multiply(x, hidden, gate, gate_row, tokens);
  }
  for (long t = 0; m.on_input && t < tokens; t++) {
    const Floats weight = rounded(quire::floats(weights[t]));
    for (long d = t * hidden; d < (t + 1) * hidden; d += 16) store(x + d, widen(x + d) * weight);
    weights[t] = 1;
  }
  if (m.ranks)
    (m.seats ? compute_placed : compute_cut)(m, ids, weights, x, tokens);
  else
    quire_experts(&m.experts, x, hidden, ids, weights, x, tokens);
  if (shared) quire_add_shared(x, shared, gate, gate_row, tokens, hidden);
}

}  // namespace quire

using namespace quire;

// y += sigmoid(gate) * shared, or y += shared if gate is null; gate: one value in a line of gate_row.
EXPORT void quire_add_shared(bf16* y, const bf16* shared, const bf16* gate, long gate_row, long rows, long D) {
  each_of(rows, rows >= SERIAL_MAX_ROWS, [&](long r) {
    alignas(64) bf16 one[16];
    if (gate) std::fill(one, one + 16, gate[r * gate_row]);
    const Floats share = gate ? rounded(times_sigmoid(floats(1.f), widen(one))) : floats(1.f);
    for (long d = 0; d < D; d += 16) {
      const Floats x = widen(shared + r * D + d);
      store(y + r * D + d, widen(y + r * D + d) + (gate ? rounded(share * x) : x));
    }
  });
}
