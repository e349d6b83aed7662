// The choice of experts, and the sum with a shared expert: against plain loops.
#include "harness.h"
#include "mixture.h"

namespace {

double sigmoid(double x) { return 1 / (1 + exp(-x)); }

std::vector<double> scores(const float* logits, long experts, int64_t score) {
  std::vector<double> made(logits, logits + experts);
  double sum = 0;
  for (double& x : made) {
    x = score == quire::SOFTMAX ? exp(x) : score == quire::SIGMOID ? sigmoid(x) : x;
    sum += x;
  }
  if (score == quire::SOFTMAX)
    for (double& x : made) x /= sum;
  return made;
}

}  // namespace

CHECK(route) {
  for (int64_t score = quire::SOFTMAX; score <= quire::LOGITS; score++)
    for (long experts : {1L, 12L, 16L, 33L, 128L})
      for (long tokens : {1L, 30L}) {
        Random random((unsigned)(experts + tokens));
        const long groups = experts % 4 ? 1 : 4, top = groups > 1 ? 2 : 1;
        const long k = std::min(3L, experts / groups * top), size = experts / groups;
        const auto logits = random.floats(tokens * experts), bias = random.floats(experts);
        const quire::Routing how{k, score, score != quire::LOGITS, 0, groups, top, 0, 0, 2};
        Guarded<int64_t> ids(tokens * k);
        Guarded<float> weights(tokens * k);
        quire_route(logits, bias, &how, tokens, experts, ids, weights);
        std::vector<double> want, chosen;
        for (long t = 0; t < tokens; t++) {
          const std::vector<double> s = scores(logits + t * experts, experts, score);
          std::vector<double> choice(experts), best(groups, -1e30);
          for (long i = 0; i < experts; i++) choice[i] = s[i] + bias[i], best[i / size] = std::max(best[i / size], choice[i]);
          std::vector<double> order = best;
          std::sort(order.rbegin(), order.rend());
          for (long i = 0; i < experts; i++)
            if (best[i / size] < order[top - 1]) choice[i] = 0;
          double sum = 0;
          for (long j = 0; j < k; j++) {
            const long id = std::max_element(choice.begin(), choice.end()) - choice.begin();
            choice[id] = -1e30;
            chosen.push_back((double)id), want.push_back(s[id]), sum += s[id];
          }
          for (long j = 0; j < k; j++) {
            double& w = want[t * k + j];
            w = 2 * (score == quire::LOGITS ? sigmoid(w) : w / sum);
          }
        }
        const std::string name = named("route", {(long)score, experts, tokens});
        Guarded<float> found(tokens * k);
        for (long i = 0; i < tokens * k; i++) found[i] = (float)ids[i];
        near(name + " ids", found.data, chosen, 0);
        near(name, weights.data, want, 1e-5);
      }
}

CHECK(add_shared) {
  for (long rows : {1L, 3L, 40L})
    for (bool gates : {false, true}) {
      Random random((unsigned)rows);
      const long D = 48, apart = 32;
      auto y = random.bf16s(rows * D);
      const auto shared = random.bf16s(rows * D), gate = random.bf16s((rows - 1) * apart + 1);
      std::vector<double> want;
      for (long i = 0; i < rows * D; i++) {
        const double share = gates ? sigmoid(value_of(gate[i / D * apart])) : 1;
        want.push_back(value_of(y[i]) + share * value_of(shared[i]));
      }
      quire_add_shared(y, shared, gates ? gate.data : nullptr, apart, rows, D);
      near(named("add_shared", {rows, gates}), y.data, want, 0.01);
    }
}

CHECK(router_logits) {
  for (long experts : {1L, 6L, 33L})
    for (long tokens : {1L, 2L, 15L}) {
      constexpr long D = 80, ROW = D + 8;
      Random random((unsigned)(experts + tokens));
      const auto x = random.bf16s((tokens - 1) * ROW + D);
      const auto w = random.floats(experts * D), bias = random.floats(experts);
      Guarded<float> y(tokens * experts), alone(experts);
      quire_router_logits(x, ROW, w, bias, y, tokens, experts, D);
      std::vector<double> want;
      for (long t = 0; t < tokens; t++)
        for (long e = 0; e < experts; e++) {
          double sum = bias[e];
          for (long d = 0; d < D; d++) sum += (double)value_of(x[t * ROW + d]) * w[e * D + d];
          want.push_back(sum);
        }
      const std::string name = named("router_logits", {experts, tokens});
      near(name, y.data, want, 1e-5);
      quire_router_logits(x + (tokens - 1) * ROW, ROW, w, bias, alone, 1, experts, D);
      same(name + " alone", alone.data, y + (tokens - 1) * experts, experts);
    }
}
