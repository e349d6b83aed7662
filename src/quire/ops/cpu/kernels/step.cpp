// A whole step in one call, from the rows' tokens to drawn tokens written back: the same functions in the same order as from
// Python, so the same bits, without the host's time between them (a third of a small model's step).
//
//   places     of each token: its id, its position, its slot in the cache of each KV group
//   x          embeddings; then all layers and the final norm
//   logits     of the rows that draw; each draws a token by its own parameters
#include "step.h"

#include <numeric>

namespace quire {

namespace {

struct Places {  // of one step: T tokens, B rows, S draws; a row draws once, and once after each draft token
  Scratch<int64_t> counts, adapters, ids, positions, slots, last, items, lengths64, tokens;
  Scratch<int> starts, lengths, tables;
  Scratch<bf16> x, residual, both, hidden, logits, spread;
  Scratch<float> whole;
  Scratch<RowParams> params;
};

struct Size {
  long tokens = 0, longest = 0;
  bool there = true;  // the rows have all tokens that the step computes
};

// counts: of each row; a row may have fewer draft tokens than the step allows for.
Size measure(const Rows& r, const Work& w, int64_t* counts) {
  Size size;
  for (long b = 0; b < w.B; b++) {
    const long row = w.row[b], start = r.num_computed_tokens[row], most = start + w.tokens[b];
    const long end = std::min<long>(most, r.length[row]);
    size.there &= end > start && most - w.drafts[b] <= r.length[row] - r.num_drafts[row];
    size.tokens += counts[b] = end - start;
    size.longest = std::max(size.longest, end);
  }
  return size;
}

long block_size_of(const Model& m) {  // of the layers with attention, of which there is one
  long i = 0;
  while (!m.layers[i]->block_size) i++;
  return m.layers[i]->block_size;
}

// The arguments of the layers, by KV group.
void place(const Model& m, const Rows& r, const Work& w, const Size& size, Places& p, Step* steps) {
  const long T = size.tokens, B = w.B, block_size = block_size_of(m), width = (size.longest + block_size - 1) / block_size;
  int64_t *ids = p.ids.at_least(T), *positions = p.positions.at_least(T), *slots = p.slots.at_least(m.num_groups * T);
  int *starts = p.starts.at_least(B + 1), *lengths = p.lengths.at_least(w.B), *tables = p.tables.at_least(m.num_groups * B * width);
  long t = 0;
  for (long b = 0; b < w.B; b++) {
    const long row = w.row[b], start = r.num_computed_tokens[row], end = start + w.tokens[b];
    starts[b] = (int)t, lengths[b] = (int)end;
    for (long g = 0; g < m.num_groups; g++) {
      const int32_t* blocks = r.blocks[m.groups[g].blocks] + row * r.blocks_step;
      memcpy(tables + (g * B + b) * width, blocks, width * sizeof(int32_t));
      for (long i = start; i < end; i++) slots[g * T + t + i - start] = blocks[i / block_size] * block_size + i % block_size;
    }
    for (long i = start; i < end; i++, t++) ids[t] = r.tokens[row * r.tokens_step + i + r.shift], positions[t] = i + r.rope_offset[row];
  }
  starts[B] = (int)t;
  for (long g = 0; g < m.num_groups; g++) {
    const Group& of = m.groups[g];
    steps[g] = {of.cos, of.sin, of.query_scale, positions, slots + g * T, w.row, nullptr, tables + g * B * width, starts, lengths, T, B, width, of.pairs};
  }
}

// By token of the step, or null if no row has an adapter.
int64_t* adapters_of(const Rows& r, const Work& w, long T, Places& p) {
  if (!r.adapters || std::all_of(w.row, w.row + w.B, [&](long row) { return r.adapters[row] < 0; })) return nullptr;
  int64_t* found = p.adapters.at_least(T);
  for (long b = 0; b < w.B; b++) std::fill(found + p.starts.data[b], found + p.starts.data[b + 1], r.adapters[w.row[b]]);
  return found;
}

// Rows of the table; ids: of its own words.
void look_up(const Model& m, const int64_t* ids, long T, bf16* x) {
  const long hidden = m.layers[0]->hidden;
  if (m.blocks)
    quire_block_rows((const uint8_t*)m.table, m.blocks, ids, x, T, hidden);
  else if (m.packed)
    quire_unpack_rows(m.table, ids, x, T, hidden);
  else
    for (long t = 0; t < T; t++) memcpy(x + t * hidden, m.table + ids[t] * hidden, hidden * sizeof(bf16));
}

// Every rank looks up its words, and another in the place of each word that it has not. All get all of it, and take each row from the rank
// that has its word.
void look_up_among_ranks(const Model& m, const int64_t* ids, long T, bf16* x) {
  static thread_local Scratch<int64_t> keep_ids;
  static thread_local Scratch<bf16> keep_own, keep_all;  // of the calling thread
  const long hidden = m.layers[0]->hidden, row = hidden * sizeof(bf16), size = m.table_ranks->size, first = m.table_ranks->rank * m.words;
  int64_t* own_ids = keep_ids.at_least(T);
  for (long t = 0; t < T; t++) own_ids[t] = std::clamp<int64_t>(ids[t] - first, 0, m.words - 1);
  bf16 *own = keep_own.at_least(T * hidden), *all = keep_all.at_least(T * size * hidden);
  look_up(m, own_ids, T, own);
  gather(*m.table_ranks, own, row, T, row, all, size * row);
  for (long t = 0; t < T; t++) memcpy(x + t * hidden, all + (t * size + ids[t] / m.words) * hidden, row);
}

void embed(const Model& m, const int64_t* ids, long T, bf16* x) {
  const long hidden = m.layers[0]->hidden;
  m.table_ranks ? look_up_among_ranks(m, ids, T, x) : look_up(m, ids, T, x);
  if (m.embedding_scale != 1) quire_scale(x, hidden, T, hidden, m.embedding_scale, 0);
}

struct Pass {  // of a speculator
  const Speculator* of;
  const bf16* states;  // of each token
  bf16* next;          // of each work item that draws: what its next pass takes
};

// The input of the first layer, from embeddings.
bf16* join(const Pass& pass, bf16* embeddings, long T, bf16* residual, Places& p) {
  const Speculator& s = *pass.of;
  const long D = s.model.layers[0]->hidden, size = D * sizeof(bf16);
  bf16* both = p.both.at_least(2 * T * D);
  for (long t = 0; t < T; t++) memcpy(both + 2 * t * D, embeddings + t * D, size), memcpy(both + (2 * t + 1) * D, pass.states + t * D, size);
  s.embedding_norm.in_place(both, 2 * D, T, 1, D);
  s.state_norm.in_place(both + D, 2 * D, T, 1, D);
  if (s.join.data) return s.join.multiply(both, 2 * D, embeddings, D, T), embeddings;
  for (long t = 0; t < T; t++) memcpy(residual + t * D, s.normed_residual ? both + (2 * t + 1) * D : pass.states + t * D, size);
  return both;
}

// All layers and the final norm; keeps the states that the model records.
void compute(const Model& m, const Step* const* steps, long T, const int64_t* adapters, bf16* x, bf16* residual) {
  const long hidden = m.layers[0]->hidden, size = T * hidden;
  long from = 0;
  const auto run = [&](long to, const Norm* norm) {
    if (from < to)
      quire_layers(m.layers + from, m.group_of_layer + from, to - from, steps, T, adapters, x, residual, from == 0, norm);
    else if (norm)
      norm->add(x, residual, T, hidden);
    from = to;
  };
  for (long i = 0; i < m.num_recorded && m.recorded[i] <= m.count; i++) {
    bf16* kept = m.states + i * m.state_rows * hidden;
    run(m.recorded[i], nullptr);
    if (from == 0)
      memcpy(kept, x, size * sizeof(bf16));
    else
      for (long j = 0; j < size; j += 16) store(kept + j, widen(x + j) + widen(residual + j));
  }
  run(m.count, &m.norm);
  if (const long n = m.num_recorded; n && m.recorded[n - 1] > m.count)
    memcpy(m.states + (n - 1) * m.state_rows * hidden, x, size * sizeof(bf16));
}

// Advances the rows. Returns the number of draws. Of each, p.last: its token of the step, p.items: its work item, p.lengths64: the
// position of its token.
long advance(const Rows& r, const Work& w, long T, Places& p) {
  int64_t *last = p.last.at_least(T), *items = p.items.at_least(T), *lengths = p.lengths64.at_least(T);
  long S = 0;
  for (long b = 0; b < w.B; b++) {
    const long row = w.row[b], end = r.num_computed_tokens[row] + w.tokens[b], known = r.length[row] - r.num_drafts[row];
    r.num_computed_tokens[row] = end;
    if (!w.draws[b]) continue;
    for (long n = known; n <= end; n++, S++) last[S] = p.starts.data[b + 1] - 1 - (end - n), items[S] = b, lengths[S] = n + r.shift;
  }
  return S;
}

// Keeps the draws of each row up to the first that differs from the draft token at its position, and takes the row back.
void keep_right(const Rows& r, const Work& w, long S, const Places& p, int64_t* drawn, float* whole) {
  for (long s = 0; s < S;) {
    const long b = p.items.data[s], row = w.row[b];
    int32_t* tokens = r.tokens + row * r.tokens_step;
    bool right = true;
    for (; s < S && p.items.data[s] == b; s++) {
      if (!right) continue;
      const long n = p.lengths64.data[s];
      right = tokens[n] == (int32_t)p.tokens.data[s] && s + 1 < S && p.items.data[s + 1] == b && fabsf(p.whole.data[s + 1]) < INFINITY;
      tokens[n] = (int32_t)p.tokens.data[s];
      drawn[b]++, r.num_computed_tokens[row] = n - r.shift, r.length[row] = n - r.shift + 1;
      if (fabsf(whole[b]) < INFINITY) whole[b] = p.whole.data[s];
    }
    r.num_drafts[row] = 0;
  }
}

// Logits of the target's tokens; of those that the head lacks: -inf.
bf16* spread(const Speculator& s, const bf16* logits, long width, long S, Places& p) {
  const long V = s.target_vocab;
  bf16* all = p.spread.at_least(S * V);
  std::fill(all, all + S * V, (bf16)0xff80);
  for (long i = 0; i < S; i++)
    for (long w = 0; w < s.model.vocab; w++) all[i * V + s.target_ids[w]] = logits[i * width + w];
  return all;
}

void draw(const Model& m, const Rows& r, const Work& w, long S, Places& p, int64_t* adapters, const bf16* x, long T, const Pass* pass) {
  const long hidden = m.layers[0]->hidden;
  long width = m.head.all_outs(), vocab = m.vocab;
  const bf16* from = x;
  if (S < T) {
    bf16* some = p.hidden.at_least(S * hidden);
    for (long s = 0; s < S; s++) memcpy(some + s * hidden, x + p.last.data[s] * hidden, hidden * sizeof(bf16));
    from = some;
  }
  bf16* logits = p.logits.at_least(S * width);
  if (adapters)
    for (long s = 0; s < S; s++) adapters[s] = adapters[p.last.data[s]];  // last[s] >= s
  {
    const AdapterScope scope(adapters, S);
    m.head.multiply(from, hidden, logits, width, S);
  }
  if (m.logit_scale != 1 || m.softcap != 0) quire_scale(logits, width, S, width, m.logit_scale, m.softcap);
  if (pass && pass->of->target_ids) logits = spread(*pass->of, logits, width, S, p), width = vocab = pass->of->target_vocab;
  float* most = p.whole.at_least(S);
  RowParams* params = p.params.at_least(S);
  for (long s = 0; s < S; s++) params[s] = r.params[w.row[p.items.data[s]]];
  quire_sample(logits, width, 1, params, p.lengths64.data, S, vocab, p.tokens.at_least(S), most);
}

// pass: of a speculator, else null.
int step(const Model& m, const Rows& rows, const Work& planned, int64_t* drawn, float* whole, const Pass* pass = nullptr) {
  static thread_local Places p;  // of the calling thread
  static thread_local Scratch<Step> keep;
  static thread_local Scratch<const Step*> keep_all;
  const long B = planned.B;
  const Work w{planned.row, p.counts.at_least(B), planned.draws, planned.drafts, B};
  const Size size = measure(rows, planned, p.counts.data);
  if (!size.there) return -1;
  Step* steps = keep.at_least(m.num_groups);
  const Step** all = keep_all.at_least(m.num_groups);
  place(m, rows, w, size, p, steps);
  for (long g = 0; g < m.num_groups; g++) all[g] = steps + g;
  bf16* x = p.x.at_least(size.tokens * m.layers[0]->hidden);
  embed(m, p.ids.data, size.tokens, x);
  bf16* residual = p.residual.at_least(size.tokens * m.layers[0]->hidden);
  if (pass) x = join(*pass, x, size.tokens, residual, p);
  int64_t* adapters = adapters_of(rows, w, size.tokens, p);
  compute(m, all, size.tokens, adapters, x, residual);
  std::fill(drawn, drawn + B, 0);
  std::fill(whole, whole + B, 0.f);
  if (const long S = advance(rows, w, size.tokens, p)) {
    draw(m, rows, w, S, p, adapters, x, size.tokens, pass);
    if (pass) {
      const long D = m.layers[0]->hidden;
      const bf16* states = pass->of->hands_on_sum ? residual : x;
      for (long s = 0; s < S; s++) memcpy(pass->next + p.items.data[s] * D, states + p.last.data[s] * D, D * sizeof(bf16));
    }
    keep_right(rows, w, S, p, drawn, whole);
  }
  return (int)std::count_if(whole, whole + B, [](float most) { return !(fabsf(most) < INFINITY); });
}

}  // namespace

}  // namespace quire

using namespace quire;

// By work item, drawn: how many tokens it drew, the last ones of its row; whole: 0 if none. Returns how many of `whole` are not finite; or -1, with nothing
// changed: a row lacks tokens. All tokens must be in the vocabulary, and all positions in the rotary table.
EXPORT int quire_step(const Model* model, const Rows* rows, const int64_t* work_4B, long B, int64_t* drawn, float* whole) {
  return step(*model, *rows, {work_4B, work_4B + B, work_4B + 2 * B, work_4B + 3 * B, B}, drawn, whole);
}

// A step, then steps of one token for the rows of the work items that have not drawn as often as `draws` says. With a speculator: its passes,
// the first from the hidden states of the target at each token of the step.
EXPORT int quire_draft(const Model* model, const Rows* rows, const int64_t* work_4B, long B, const int64_t* draws,
                       const Speculator* speculator, const bf16* states, int64_t* drawn, float* whole) {
  static thread_local Scratch<int64_t> keep;  // of the calling thread
  static thread_local Scratch<bf16> keep_states, keep_next;
  const long D = model->layers[0]->hidden, T = std::accumulate(work_4B + B, work_4B + 2 * B, 0L);
  int64_t *next = keep.at_least(5 * B), *item = next + 4 * B;  // item: for each work item of a pass, its number in the first pass
  Pass pass{speculator, states, nullptr};
  if (speculator) pass.next = keep_next.at_least(B * D);
  if (speculator && speculator->states.data) {
    bf16* own = keep_states.at_least(T * D);
    speculator->states.multiply(states, speculator->states.ins, own, D, T);
    pass.states = own;
  }
  const Pass* of = speculator ? &pass : nullptr;
  int status = step(*model, *rows, {work_4B, work_4B + B, work_4B + 2 * B, work_4B + 3 * B, B}, drawn, whole, of);
  std::iota(item, item + B, 0);
  for (long n = 1, before = B; status >= 0; n++) {
    long count = 0;
    for (long b = 0; b < before; b++) {
      if (draws[item[b]] <= n) continue;
      if (speculator) memmove(pass.next + count * D, pass.next + b * D, D * sizeof(bf16));
      next[count] = work_4B[item[b]], item[count++] = item[b];
    }
    if (!(before = count)) break;
    std::fill(next + B, next + 3 * B, 1), std::fill(next + 3 * B, next + 4 * B, 0);
    pass.states = pass.next;
    status = step(*model, *rows, {next, next + B, next + 2 * B, next + 3 * B, count}, drawn, whole, of);
  }
  return status;
}
