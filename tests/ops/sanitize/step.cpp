// A step in one call has the bits of its parts, and moves rows on.
#include "step.h"

#include "small_layer.h"

CHECK(step) {
  constexpr long hidden = SmallLayer::hidden, kv = SmallLayer::kv, D = SmallLayer::D, block = SmallLayer::block, P = SmallLayer::P;
  const long V = 70, padded = 96, R = 4, L = 3 * block + 1, M = 4, num_blocks = R * M + 1;
  for (int packed : {1, 0}) {
    Random random(7);
    SmallLayer small(random, num_blocks);
    quire::Layer& l = small.layer;
    auto &keys = small.keys, &values = small.values;
    for (long i = 0; i < num_blocks * kv * block * D; i++) keys[i] = values[i] = 0;
    const quire::Layer* layers[] = {&l, &l};
    const int64_t groups[] = {0, 0};
    const auto cos = random.floats(L * P), sin = random.floats(L * P);
    const auto table = random.bf16s(V * hidden);
    quire::Model m{};
    m.head = small.weight(padded, V, hidden, false, table);
    const quire::Group group{cos, sin, nullptr, P, 0};
    m.layers = layers, m.group_of_layer = groups, m.groups = &group, m.norm = l.attention_in;
    m.table = packed ? (const bf16*)m.head.data : table.data;
    m.count = 2, m.num_groups = 1, m.positions = L, m.packed = packed, m.vocab = V;
    m.embedding_scale = m.logit_scale = 1;

    Guarded<int32_t> tokens(R * L), blocks(R * M);
    Guarded<int64_t> computed(R), length(R), drafts(R), rope_offset(R);
    Guarded<quire::RowParams> params(R);
    for (long r = 0; r < R; r++) {
      for (long i = 0; i < L; i++) tokens[r * L + i] = (int)random.below(V);
      for (long i = 0; i < M; i++) blocks[r * M + i] = (int)(1 + i * R + r);
      computed[r] = 0, length[r] = 20 + r, drafts[r] = rope_offset[r] = 0;
      params[r] = {r == 1 ? 0.f : 0.7f, (uint32_t)r, r == 3 ? 5 : 0, r == 2 ? 0.8 : 1, -INFINITY};
    }
    const int32_t* tables[] = {blocks};
    const quire::Rows rows{tokens, computed, length, drafts, tables, params, nullptr, rope_offset, L, M, 0};

    // A whole prompt, a part of one, and one that ends here but does not draw.
    const int64_t first[4][3] = {{2, 0, 1}, {22, 7, 21}, {1, 1, 0}, {0, 0, 0}};
    Guarded<int64_t> drawn(3);
    Guarded<float> whole(3);
    const int did = quire_step(&m, &rows, first[0], 3, drawn, whole), yes = 0, no = -1;
    same("step", &did, &yes, 1);
    const int64_t drawn_by[] = {1, 0, 0}, computed_by[] = {7, 21, 22, 0}, length_by[] = {20, 21, 23, 23};
    same("step drew", drawn.data, drawn_by, 3);
    same("step computed", computed.data, computed_by, R);
    same("step lengths", length.data, length_by, R);

    // The same by hand, in another cache: T tokens in the order of the work.
    const long T = 50, B = 3;
    Guarded<bf16> other_keys(num_blocks * kv * block * D), other_values(num_blocks * kv * block * D), x(T * hidden);
    for (long i = 0; i < num_blocks * kv * block * D; i++) other_keys[i] = other_values[i] = 0;
    Guarded<int64_t> positions(T), slots(T);
    Guarded<int> starts(B + 1), lengths(B), places(B * 2);
    long t = 0;
    for (long b = 0; b < B; b++) {
      starts[b] = (int)t, lengths[b] = (int)first[1][b];
      for (long i = 0; i < 2; i++) places[b * 2 + i] = blocks[first[0][b] * M + i];
      for (long i = 0; i < first[1][b]; i++, t++) {
        positions[t] = i, slots[t] = blocks[first[0][b] * M + i / block] * block + i % block;
        memcpy(x.data + t * hidden, table.data + tokens[first[0][b] * L + i] * hidden, hidden * sizeof(bf16));
      }
    }
    starts[B] = (int)t;
    l.keys = other_keys.data, l.values = other_values.data;
    const quire::Step s{cos, sin, nullptr, positions, slots, nullptr, nullptr, places, starts, lengths, T, B, 2, P};
    const quire::Step* steps[] = {&s};
    Guarded<bf16> residual(T * hidden);
    quire_layers(layers, groups, 2, steps, T, nullptr, x, residual, 1, &m.norm);
    same("step's keys", keys.data, other_keys.data, keys.count);
    same("step's values", values.data, other_values.data, values.count);
    Guarded<bf16> logits(padded);
    m.head.multiply(x.data + 21 * hidden, hidden, logits, padded, 1);
    const int64_t position = 22;
    Guarded<int64_t> token(1);
    Guarded<float> most(1);
    quire_sample(logits, padded, 1, &params[2], &position, 1, V, token, most);
    same("step's highest", whole.data, most.data, 1);
    const int32_t written = (int32_t)token[0];
    same("step's token in its row", tokens.data + 2 * L + 22, &written, 1);

    l.keys = keys.data, l.values = values.data;
    // Three steps of one token; then the same tokens by a step with a right and a wrong draft token, which allows for three.
    const int64_t next[4][1] = {{2}, {1}, {1}, {0}}, verify[4][1] = {{2}, {4}, {1}, {3}};
    for (int i = 0; i < 3; i++) quire_step(&m, &rows, next[0], 1, drawn, whole);
    const int32_t drew[] = {tokens[2 * L + 23], tokens[2 * L + 24]};
    // The same three by one call.
    const int64_t draws[] = {3}, after_three[] = {25, 26};
    computed[2] = 22, length[2] = 23, tokens[2 * L + 23] = tokens[2 * L + 24] = 0;
    quire_draft(&m, &rows, next[0], 1, draws, nullptr, nullptr, drawn, whole);
    const int64_t moved[] = {computed[2], length[2]};
    same("draft", moved, after_three, 2);
    same("tokens of a draft", tokens.data + 2 * L + 23, drew, 2);
    computed[2] = 22, length[2] = 25, drafts[2] = 2, tokens[2 * L + 24] = (drew[1] + 1) % (int)V;
    quire_step(&m, &rows, verify[0], 1, drawn, whole);
    const int64_t after[] = {2, 24, 25, 0}, found[] = {drawn[0], computed[2], length[2], drafts[2]};
    same("step with draft tokens", found, after, 4);
    same("tokens of a step with draft tokens", tokens.data + 2 * L + 23, drew, 2);
    computed[2] = 22, length[2] = 23;

    // One token more than a row has: nothing may happen.
    const int64_t more[4][2] = {{2, 1}, {1, 1}, {1, 1}, {0, 0}};
    const int did_more = quire_step(&m, &rows, more[0], 2, drawn, whole);
    same("step without tokens", &did_more, &no, 1);
    same("rows of a step that cannot be", computed.data, computed_by, R);
  }
}
