// Routed experts: against the product of each pair by itself, to the bit, for weights of every form.
#include "mixture.h"

#include <thread>

#include "harness.h"

namespace {

constexpr long HIDDEN = 128, INNER = 64, GROUP = 32;

struct Mixture {
  Random random{11};
  std::vector<Guarded<bf16>> floats;
  std::vector<Guarded<int8_t>> bytes;
  std::vector<Guarded<float>> scales;
  std::vector<Guarded<int32_t>> sums;
  std::vector<Guarded<uint8_t>> nibbles;
  std::vector<quire::Weight> gate_up, down;
  quire::Experts experts{};

  Mixture(long count, long chosen, int act) {
    for (long i = 0; i < count; i++) {
      const bool gated = quire::is_gated(act);
      gate_up.push_back(weight(i % 3, gated ? 2 * INNER : INNER, HIDDEN, gated));
      down.push_back(weight((i + 1) % 3, HIDDEN, INNER, false));
    }
    experts = {gate_up.data(), down.data(), count, chosen, HIDDEN, act};
  }

  quire::Weight weight(int form, long outs, long ins, bool gated) {
    const bf16* bias = floats.emplace_back(random.bf16s(outs)).data;
    if (form == 0) {
      const auto w = random.bf16s(outs * ins, 0.1f);
      bf16* packed = floats.emplace_back(outs * ins).data;
      quire_pack(w, packed, outs, outs, ins, gated);
      return {packed, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, bias, outs, ins, 0};
    }
    const long groups = form == 1 ? 1 : ins / GROUP;
    float* scale = scales.emplace_back(outs * groups).data;
    for (long o = 0; o < outs * groups; o++) scale[o] = (float)(1 + o % 7) / 1000;
    if (form == 1) {
      const auto w = random.bytes(outs * ins);
      int8_t* packed = bytes.emplace_back(outs * ins).data;
      int32_t* sum = sums.emplace_back(outs).data;
      for (long o = 0; o < outs; o++) {
        sum[o] = 0;
        for (long k = 0; k < ins; k++) sum[o] += 128 * w[o * ins + k];
      }
      quire_pack_int8(w, packed, outs, outs, ins, gated);
      return {packed, scale, sum, nullptr, nullptr, nullptr, nullptr, bias, outs, ins, 0};
    }
    const auto noise = [&](long size, long most) {
      uint8_t* made = nibbles.emplace_back(size).data;
      for (long i = 0; i < size; i++) made[i] = (uint8_t)random.below(most);
      return made;
    };
    const uint8_t* w = noise(outs * ins / 2, 256);
    return {w, scale, nullptr, noise(outs * groups, 16), nullptr, nullptr, nullptr, bias, outs, ins, GROUP};
  }

  void one(long e, const bf16* x, bf16* y) const {
    Guarded<bf16> inner(INNER);
    gate_up[e].multiply(x, HIDDEN, inner, INNER, 1, (int)experts.act);
    down[e].multiply(inner, INNER, y, HIDDEN, 1);
  }
};

}  // namespace

CHECK(experts) {
  for (int act = quire::SILU; act <= quire::RELU_SQUARED; act++)
    for (long count : {1L, 5L})
      for (long tokens : {1L, 2L, 9L, 40L, 600L}) {
        const long chosen = std::min(count, 3L), apart = HIDDEN + 16;
        Mixture mixture(count, chosen, act);
        Random random((unsigned)tokens);
        const auto x = random.bf16s((tokens - 1) * apart + HIDDEN);
        const auto weights = random.floats(tokens * chosen);
        Guarded<int64_t> ids(tokens * chosen);
        for (long t = 0; t < tokens; t++)
          for (long j = 0; j < chosen; j++) ids[t * chosen + j] = t == 1 && j == 0 ? count : (t * t + j) % count;
        Guarded<bf16> y(tokens * HIDDEN), part(HIDDEN), want(HIDDEN);
        quire_experts(&mixture.experts, x, apart, ids, weights, y, tokens);
        const std::string name = named("experts", {act, count, tokens});
        const long pairs = tokens * chosen, inner = mixture.down[0].ins;
        Guarded<bf16> middle(pairs * inner), outer(pairs * HIDDEN), sum_of(tokens * HIDDEN);
        quire_expert_products(&mixture.experts, 0, x, apart, tokens, ids, pairs, middle, inner);
        quire_expert_products(&mixture.experts, 1, middle, inner, pairs, ids, pairs, outer, HIDDEN);
        quire_weighted_sum(outer, nullptr, weights, sum_of, tokens, chosen, HIDDEN);
        same(named("expert_products", {act, count, tokens}), sum_of.data, y.data, tokens * HIDDEN);
        for (long t : {0L, tokens / 2, tokens - 1}) {
          std::vector<float> sum(HIDDEN);
          for (long j = 0; j < chosen; j++) {
            const long e = ids[t * chosen + j];
            if (e >= count) continue;
            mixture.one(e, x + t * apart, part);
            for (long d = 0; d < HIDDEN; d++) sum[d] += value_of(part[d]) * weights[t * chosen + j];
          }
          for (long d = 0; d < HIDDEN; d++) want[d] = bf16_of(sum[d]);
          same(name, y + t * HIDDEN, want.data, HIDDEN);
        }
      }
}

CHECK(per_head) {
  constexpr long HEADS = 5, WIDE = HIDDEN + 32;
  Mixture mixture(HEADS, 1, quire::SILU);
  for (long tokens : {1L, 3L, 40L}) {
    Random random((unsigned)tokens);
    const auto x = random.bf16s(tokens * HEADS * WIDE);
    const long inner = mixture.gate_up[0].outs;
    Guarded<bf16> y(tokens * HEADS * inner), want(inner);
    quire_per_head(mixture.gate_up.data(), HEADS, x, HEADS * WIDE, WIDE, y, HEADS * inner, inner, tokens);
    for (long t = 0; t < tokens; t++)
      for (long h = 0; h < HEADS; h++) {
        mixture.gate_up[h].multiply(x + (t * HEADS + h) * WIDE, HIDDEN, want, inner, 1);
        same(named("per_head", {tokens, t, h}), y + (t * HEADS + h) * inner, want.data, inner);
      }
  }
}

// Two ranks with whole experts, of which both have one, give the bits of one process.
CHECK(placed_experts) {
  constexpr long COUNT = 5, CHOSEN = 2, RANKS = 2, OWN = 3, SLOT = 4096;
  const int64_t first[COUNT + 1] = {0, 1, 2, 4, 5, 6}, seats[][2] = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {1, 2}, {0, 2}};
  const long numbers[RANKS][OWN] = {{0, 2, 4}, {1, 2, 3}};
  alignas(128) static char memory[RANKS * (128 + 2 * SLOT)];
  Mixture made(COUNT, CHOSEN, quire::SILU);
  Random random(5);
  const auto router = random.floats(COUNT * HIDDEN);
  quire::Mixture whole{};
  whole.router_weight = router, whole.experts = made.experts, whole.count = COUNT;
  whole.routing = {CHOSEN, quire::SOFTMAX, 1, 0, 1, 1, 0, 0.f, 1.f};
  for (long tokens : {1L, 2L, 40L}) {
    const auto x = random.bf16s(tokens * HIDDEN);
    Guarded<bf16> want(tokens * HIDDEN);
    memcpy(want.data, x.data, tokens * HIDDEN * sizeof(bf16));
    quire::compute(whole, want, tokens);
    memset(memory, 0, sizeof(memory));
    std::vector<Guarded<bf16>> found;
    for (long rank = 0; rank < RANKS; rank++) memcpy(found.emplace_back(tokens * HIDDEN).data, x.data, tokens * HIDDEN * sizeof(bf16));
    std::vector<std::thread> ranks;
    for (long rank = 0; rank < RANKS; rank++)
      ranks.emplace_back([&, rank] {
        quire::RankLink link{memory, rank, RANKS, SLOT, 60000, 0, 0};
        quire_join_ranks(&link);
        quire::Weight gate_up[OWN], down[OWN];
        for (long i = 0; i < OWN; i++) gate_up[i] = made.gate_up[numbers[rank][i]], down[i] = made.down[numbers[rank][i]];
        int64_t loads[COUNT] = {};
        quire::Mixture part = whole;
        part.ranks = &link, part.first_seat = first, part.seats = seats[0], part.loads = loads;
        part.experts = {gate_up, down, OWN, CHOSEN, HIDDEN, quire::SILU};
        quire::compute(part, found[rank], tokens);
      });
    for (auto& each : ranks) each.join();
    for (long rank = 0; rank < RANKS; rank++) same(named("placed_experts", {tokens, rank}), found[rank].data, want.data, tokens * HIDDEN);
  }
}
