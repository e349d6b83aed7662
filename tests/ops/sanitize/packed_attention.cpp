// Attention of packed prompts: against loops, and a prompt alone against the same prompt in company.
#include "packed_attention.h"

#include "harness.h"

CHECK(packed_attention) {
  const std::vector<std::vector<long>> batches = {{1}, {5, 1, 16}, {33, 17, 40}, {257, 2}};
  for (const auto& lengths : batches)
    for (long window : {0L, 1L, 6L, 300L})
      for (bool biased : {false, true}) {
        const long heads = 4, kv = biased ? 4 : 2, D = window == 6 ? 64 : window == 1 ? 40 : 32, width = (heads + 2 * kv) * D, distances = 260;
        std::vector<int> starts = {0};
        for (long n : lengths) starts.push_back(starts.back() + (int)n);
        const long T = starts.back(), rows = (long)lengths.size();
        Random random((unsigned)(T + window));
        const auto qkv = random.bf16s(T * width);
        Guarded<float> bias(heads * (2 * distances - 1) + 64);
        for (size_t i = 0; i < bias.count; i++) bias[(long)i] = (float)random.below(100) / 50.f;
        Guarded<bf16> o(T * heads * D);
        const auto run = [&](long first, const int* from, long count, bf16* to) {
          const bf16* q = qkv + first * width;
          quire_packed_attention(q, width, q + heads * D, width, q + (heads + kv) * D, width, to, from, count, heads, kv, D, window,
                                 0.2f, biased ? bias.data : nullptr, distances);
        };
        run(0, starts.data(), rows, o);
        std::vector<double> want;
        for (long row = 0; row < rows; row++)
          for (long i = starts[row]; i < starts[row + 1]; i++)
            for (long h = 0; h < heads; h++) {
              std::vector<double> sums(D);
              double total = 0;
              for (long j = starts[row]; j < starts[row + 1]; j++) {
                if (window && std::abs(i - j) >= window) continue;
                const bf16 *q = qkv + i * width + h * D, *k = qkv + j * width + (heads + h * kv / heads) * D, *v = k + kv * D;
                double score = 0;
                for (long d = 0; d < D; d++) score += 0.2 * value_of(q[d]) * value_of(k[d]);
                if (biased) score += bias[h * (2 * distances - 1) + distances - 1 + j - i] * log(2.0);
                const double weight = exp(score);
                total += weight;
                for (long d = 0; d < D; d++) sums[d] += weight * value_of(v[d]);
              }
              for (double sum : sums) want.push_back(sum / total);
            }
        const std::string name = named("packed_attention", {T, window, biased});
        near(name, o.data, want, 0.02);
        for (long row = 0; row < rows; row++) {
          const int one[] = {0, (int)lengths[row]};
          Guarded<bf16> alone(lengths[row] * heads * D);
          run(starts[row], one, 1, alone);
          same(name + " alone", alone.data, o + starts[row] * heads * D, lengths[row] * heads * D);
        }
      }
}
