// The experts of each token and their weights, from the logits of a router: the definition is `route` of ops/experts.py.
#include "route.h"
#include "team.h"

namespace quire {

namespace {

constexpr long SERIAL_MAX_TOKENS = 16;  // up to this many tokens one thread is faster than starting a team

// The index of the largest value, the lowest among equals; NaN counts as the largest, as in torch's sort.
long best(const float* x, long count) {
  long at = 0;
  for (long i = 1; i < count; i++)
    if (x[i] > x[at] || (x[i] != x[i] && x[at] == x[at])) at = i;
  return at;
}

// score: logits, of `padded` values; a multiple of 16, the last ones -inf.
void to_scores(const Routing& how, float* score, long padded) {
  if (how.score == LOGITS) return;
  Floats top = floats(-INFINITY), sum = floats(0.f);
  if (how.score == SOFTMAX)
    for (long i = 0; i < padded; i += 16) top = max(top, load(score + i));
  const Floats most = floats(how.score == SOFTMAX ? max_of(top) : 0.f), one = floats(1.f);
  for (long i = 0; i < padded; i += 16) {
    const Floats x = load(score + i);
    if (how.score == SIGMOID) {
      store(score + i, one / (one + exp2_of(x * floats(-LOG2E))));
    } else {
      const Floats e = exp2_of((x - most) * floats(LOG2E));
      store(score + i, e);
      sum = sum + e;
    }
  }
  if (how.score == SIGMOID) return;
  const Floats all = floats(sum_of(sum));
  for (long i = 0; i < padded; i += 16) store(score + i, load(score + i) / all);
}

// Lowers the choice where the group is not among the best.
void limit_groups(const Routing& how, float* choice, long experts) {
  static thread_local Scratch<float> keep;
  const long size = experts / how.groups;
  float* group = keep.at_least(how.groups);
  for (long g = 0; g < how.groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (long i = g * size; i < (g + 1) * size; i++) {
      second = std::max(second, std::min(first, choice[i]));
      first = std::max(first, choice[i]);
    }
    group[g] = how.top2 && size > 1 ? first + second : first;
  }
  for (long n = 0; n < how.top_groups; n++) group[best(group, how.groups)] = -INFINITY;
  // A group that is not finite any more is chosen.
  for (long g = 0; g < how.groups; g++)
    if (group[g] > -INFINITY)
      for (long i = g * size; i < (g + 1) * size; i++) choice[i] = how.top2 ? -INFINITY : 0.f;
}

void route(const Routing& how, const float* logits, const float* bias, long experts, int64_t* ids, float* weights) {
  static thread_local Scratch<float> keep;
  const long padded = (experts + 15) / 16 * 16, k = how.k;
  float *score = keep.at_least(2 * padded), *choice = score + padded;
  std::copy(logits, logits + experts, score);
  std::fill(score + experts, score + padded, -INFINITY);
  to_scores(how, score, padded);
  for (long i = 0; i < experts; i++) choice[i] = bias ? score[i] + bias[i] : score[i];
  if (how.groups > how.top_groups) limit_groups(how, choice, experts);
  float sum = 0;
  for (long j = 0; j < k; j++) {
    ids[j] = best(choice, experts);
    choice[ids[j]] = -INFINITY;
    weights[j] = score[ids[j]];
    sum += weights[j];
  }
  if (how.score == LOGITS && how.renormalize) {
    float top = weights[0];
    for (long j = 0; j < k; j++) top = std::max(top, weights[j]);
    sum = 0;
    for (long j = 0; j < k; j++) sum += weights[j] = expf(weights[j] - top);
    for (long j = 0; j < k; j++) weights[j] /= sum;
  } else if (how.score == LOGITS) {
    for (long j = 0; j < k; j++) weights[j] = 1 / (1 + expf(-weights[j]));
  } else if (how.renormalize) {
    for (long j = 0; j < k; j++) weights[j] /= sum + how.eps;
  }
  for (long j = 0; j < k; j++) weights[j] *= how.scale;
}

}  // namespace

}  // namespace quire

using namespace quire;

// logits: [tokens, experts]; bias: [experts], or null; ids and weights: [tokens, k].
EXPORT void quire_route(const float* logits, const float* bias, const Routing* how, long tokens, long experts, int64_t* ids,
                        float* weights) {
  const Routing& h = *how;
  each_of(tokens, tokens > SERIAL_MAX_TOKENS, [&](long t) {
    float* to = weights + t * h.k;
    route(h, logits + t * experts, bias, experts, ids + t * h.k, to);
    if (!h.rounds) return;
    for (long j = 0; j < h.k; j++) {
      alignas(64) float all[16] = {to[j]};
      store(all, rounded(load(all)));
      to[j] = all[0];
    }
  });
}

// y[t + n, e + m], for N tokens and M experts. Each product is summed in the same order, whatever N and M.
template <int N, int M>
static inline void logits_of(const bf16* x, long x_row, const float* w, const float* bias, float* y, long experts, long D) {
  Floats sums[N][M];
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++) sums[n][m] = floats(0.f);
  for (long d = 0; d < D; d += 16)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const Floats v = widen(x + n * x_row + d);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) sums[n][m] = fma(v, load(w + m * D + d), sums[n][m]);
    }
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++) y[n * experts + m] = sum_of(sums[n][m]) + (bias ? bias[m] : 0.f);
}

// y[tokens, experts] = x w^T + bias, w in float; D is a multiple of 16.
EXPORT void quire_router_logits(const bf16* x, long x_row, const float* w, const float* bias, float* y, long tokens, long experts, long D) {
  const long pairs = (experts + 1) / 2;
  each_of((tokens + 1) / 2 * pairs, tokens * experts * D > 1 << 16, [&](long piece) {
    const long t = piece / pairs * 2, e = piece % pairs * 2;
    const auto run = tokens - t > 1 ? (experts - e > 1 ? logits_of<2, 2> : logits_of<2, 1>) : experts - e > 1 ? logits_of<1, 2> : logits_of<1, 1>;
    run(x + t * x_row, x_row, w + e * D, bias ? bias + e : nullptr, y + t * experts + e, experts, D);
  });
}
