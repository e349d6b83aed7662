// All passes of a speculator in one call: rows that draw together get the tokens that each gets alone.
#include "small_layer.h"
#include "step.h"

CHECK(speculator) {
  constexpr long hidden = SmallLayer::hidden, kv = SmallLayer::kv, D = SmallLayer::D, block = SmallLayer::block, P = SmallLayer::P;
  const long V = 70, own = 40, padded = 64, R = 3, L = 2 * block, M = 2, num_blocks = R * M + 1, E = 3 * hidden;
  for (int joined_by_weight : {1, 0}) {
    Random random(11);
    SmallLayer small(random, num_blocks);
    const auto norm = [&] { return quire::Norm{small.memory.emplace_back(random.bf16s(hidden)).data, quire::RMS, 1e-6f}; };
    quire::Layer& l = small.layer;
    for (long i = 0; i < num_blocks * kv * block * D; i++) small.keys[i] = small.values[i] = 0;
    if (!joined_by_weight) l.qkv = small.made(random, {SmallLayer::heads * D, kv * D, kv * D}, 2 * hidden), l.joined = 1;
    const quire::Layer* layers[] = {&l};
    const int64_t groups[] = {0};
    const auto cos = random.floats(L * P), sin = random.floats(L * P);
    const auto table = random.bf16s(V * hidden);
    const quire::Group group{cos, sin, nullptr, P, 0};
    Guarded<int64_t> target_ids(own);
    for (long i = 0; i < own; i++) target_ids[i] = i + i / 2;

    quire::Speculator s{};
    quire::Model& m = s.model;
    m.head = small.weight(padded, own, hidden, false, random.bf16s(own * hidden));
    m.layers = layers, m.group_of_layer = groups, m.groups = &group, m.norm = norm(), m.table = table.data;
    m.count = 1, m.num_groups = 1, m.positions = L, m.vocab = own, m.embedding_scale = m.logit_scale = 1;
    s.states = small.made(random, {hidden}, E);
    s.embedding_norm = norm(), s.state_norm = norm();
    if (joined_by_weight) s.join = small.made(random, {hidden}, 2 * hidden);
    s.target_ids = target_ids, s.target_vocab = V, s.hands_on_sum = joined_by_weight, s.normed_residual = 1;

    Guarded<int32_t> tokens(R * L), blocks(R * M);
    Guarded<int64_t> computed(R), length(R), drafts(R), rope_offset(R);
    Guarded<quire::RowParams> params(R);
    for (long r = 0; r < R; r++) {
      for (long i = 0; i < L; i++) tokens[r * L + i] = (int)random.below(V);
      for (long i = 0; i < M; i++) blocks[r * M + i] = (int)(1 + i * R + r);
      rope_offset[r] = 0;
      params[r] = {r == 1 ? 0.f : 0.7f, (uint32_t)r, 0, 1, -INFINITY};
    }
    const int32_t* tables[] = {blocks};
    const quire::Rows rows{tokens, computed, length, drafts, tables, params, nullptr, rope_offset, L, M, 1};

    // A prompt over a block's end, two tokens, and one; they draw three tokens, one, and two.
    const int64_t work[4][R] = {{0, 1, 2}, {19, 2, 1}, {1, 1, 1}, {0, 0, 0}}, draws[R] = {3, 1, 2};
    const auto states = random.bf16s((19 + 2 + 1) * E);
    const auto begin = [&] {
      for (long r = 0; r < R; r++) computed[r] = 0, length[r] = work[1][r], drafts[r] = 0;
    };
    Guarded<int64_t> drawn(R);
    Guarded<float> whole(R);
    begin();
    const int did = quire_draft(&m, &rows, work[0], R, draws, &s, states, drawn, whole), yes = 0;
    same("speculator", &did, &yes, 1);
    const int64_t computed_by[] = {21, 2, 2}, length_by[] = {22, 3, 3};
    same("speculator computed", computed.data, computed_by, R);
    same("speculator lengths", length.data, length_by, R);
    Guarded<int32_t> together(R * L);
    memcpy(together.data, tokens.data, R * L * sizeof(int32_t));
    begin();
    for (long r = 0, before = 0; r < R; before += work[1][r++]) {
      for (long i = work[1][r] + 1; i < L; i++) tokens[r * L + i] = 0;
      const int64_t alone[] = {work[0][r], work[1][r], 1, 0};
      quire_draft(&m, &rows, alone, 1, draws + r, &s, states.data + before * E, drawn, whole);
      same("tokens of a speculator", tokens.data + r * L, together.data + r * L, work[1][r] + 1 + draws[r]);
    }
  }
}
