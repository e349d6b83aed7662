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
