// Recurrent layers: against plain loops in double, and cut in two against whole, to the bit.
#include "harness.h"

namespace {

double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// Rows 3 and 1 with `first` and `second` tokens, in entries of `size` elements, 16 of them unused.
struct Step {
  Guarded<int64_t> rows{2};
  Guarded<int> starts{3};
  long size;
  Step(long first, long second, long size) : size(size) {
    rows[0] = 3, rows[1] = 1;
    starts[0] = 0, starts[1] = (int)first, starts[2] = (int)(first + second);
  }
  template <class T>
  Guarded<T> state() const {
    Guarded<T> made(4 * (size + 16));
    for (size_t i = 0; i < made.count; i++) made[i] = 0;
    return made;
  }
};

}  // namespace

CHECK(causal_conv) {
  for (long J : {2L, 3L, 4L})
    for (long channels : {16L, 48L})
      for (long tokens : {1L, 2L, 19L}) {
        Random random((unsigned)(J * channels + tokens));
        const long apart = channels + 8, size = (J - 1) * channels;
        const Step whole(tokens, 1, size), begun(tokens - 1, 0, size), ended(1, 1, size);
        const auto x = random.bf16s(tokens * apart + channels), w = random.bf16s(channels * J), bias = random.bf16s(channels);
        auto state = whole.state<bf16>(), other = whole.state<bf16>();
        Guarded<bf16> y((tokens + 1) * channels), parts((tokens + 1) * channels);
        const auto run = [&](const Step& step, long from, bf16* into, bf16* entries) {
          quire_causal_conv(x + from * apart, apart, 1, w, bias, entries, size + 16, into + from * channels, channels, J, 1,
                            step.rows, step.starts, 2, nullptr);
        };
        run(whole, 0, y, state);
        if (tokens > 1) run(begun, 0, parts, other);
        run(ended, tokens - 1, parts, other);
        const std::string name = named("causal_conv", {J, channels, tokens});
        same(name, parts.data, y.data, (tokens + 1) * channels);
        std::vector<double> want;
        for (long t = 0; t <= tokens; t++)
          for (long c = 0; c < channels; c++) {
            const long begin = t == tokens ? t : 0;
            double total = value_of(bias[c]);
            for (long j = 0; j < J; j++)
              if (t - J + 1 + j >= begin) total += (double)value_of(w[c * J + j]) * value_of(x[(t - J + 1 + j) * apart + c]);
            want.push_back(total * sigmoid(total));
          }
        near(name, y.data, want, 0.01);
      }
}

CHECK(linear_recurrence) {
  for (int delta : {0, 1})
    for (long V : {16L, 48L})
      for (long tokens : {1L, 2L, 37L}) {
        constexpr long KEY_HEADS = 2, HEADS = 4, K = 32;
        Random random((unsigned)(V + tokens));
        const long size = HEADS * K * V;
        const Step whole(tokens, 1, size), begun(tokens - 1, 0, size), ended(1, 1, size);
        const auto q = random.floats((tokens + 1) * KEY_HEADS * K), k = random.floats((tokens + 1) * KEY_HEADS * K);
        const auto v = random.floats((tokens + 1) * HEADS * V), raw = random.floats((tokens + 1) * HEADS);
        const auto write = random.floats((tokens + 1) * HEADS), bias = random.floats(HEADS), a_log = random.floats(HEADS);
        auto state = whole.state<float>(), other = whole.state<float>();
        Guarded<float> y((tokens + 1) * HEADS * V), parts((tokens + 1) * HEADS * V);
        const auto run = [&](const Step& step, long from, float* into, float* entries) {
          quire_linear_recurrence(q + from * KEY_HEADS * K, KEY_HEADS * K, k + from * KEY_HEADS * K, KEY_HEADS * K,
                                  v + from * HEADS * V, HEADS * V, raw + from * HEADS, HEADS,
                                  delta ? write + from * HEADS : nullptr, HEADS, 0, bias, a_log, bias, 0.f, INFINITY, entries,
                                  size + 16, into + from * HEADS * V, KEY_HEADS, K, HEADS, V, step.rows, step.starts, 2, nullptr);
        };
        run(whole, 0, y, state);
        if (tokens > 1) run(begun, 0, parts, other);
        run(ended, tokens - 1, parts, other);
        const std::string name = named("linear_recurrence", {delta, V, tokens});
        same(name, parts.data, y.data, (tokens + 1) * HEADS * V);
        std::vector<double> want((tokens + 1) * HEADS * V);
        for (long h = 0; h < HEADS; h++) {
          std::vector<double> s(K * V);
          for (long t = 0; t <= tokens; t++) {
            if (t == tokens) s.assign(K * V, 0);
            const float *qs = q + (t * KEY_HEADS + h / 2) * K, *ks = k + (t * KEY_HEADS + h / 2) * K;
            double q_squares = 1e-6, k_squares = 1e-6;
            for (long i = 0; i < K; i++) q_squares += (double)qs[i] * qs[i], k_squares += (double)ks[i] * ks[i];
            const double q_scale = delta ? 1 / sqrt(q_squares * K) : 1, k_scale = delta ? 1 / sqrt(k_squares) : 1;
            const double step = log1p(exp((double)raw[t * HEADS + h] + bias[h])), decay = exp(-exp((double)a_log[h]) * step);
            for (long d = 0; d < V; d++) {
              const double x = v[(t * HEADS + h) * V + d];
              double along = 0, sum = 0;
              for (long i = 0; i < K; i++) along += s[i * V + d] * decay * ks[i] * k_scale;
              const double r = delta ? sigmoid(write[t * HEADS + h]) * (x - along) : step * x;
              for (long i = 0; i < K; i++) {
                s[i * V + d] = s[i * V + d] * decay + ks[i] * k_scale * r;
                sum += s[i * V + d] * qs[i] * q_scale;
              }
              want[(t * HEADS + h) * V + d] = sum + bias[h] * x;
            }
          }
        }
        near(name, y.data, want, 1e-5);
      }
}

CHECK(selective_scan) {
  for (long N : {6L, 16L})
    for (long tokens : {1L, 9L}) {
      constexpr long CHANNELS = 48;
      Random random((unsigned)(N + tokens));
      const long size = CHANNELS * N;
      const Step whole(tokens, 1, size);
      const auto x = random.bf16s((tokens + 1) * CHANNELS), b = random.bf16s((tokens + 1) * N), c = random.bf16s((tokens + 1) * N);
      auto step = random.floats((tokens + 1) * CHANNELS);
      const auto a_log = random.floats(CHANNELS * N), skip = random.floats(CHANNELS);
      for (size_t i = 0; i < step.count; i++) step[i] = fabsf(step[i]);
      auto state = whole.state<float>();
      Guarded<float> y((tokens + 1) * CHANNELS);
      quire_selective_scan(x, CHANNELS, 1, step, a_log, b, N, c, N, skip, state, size + 16, y, CHANNELS, N, whole.rows,
                           whole.starts, 2, nullptr);
      std::vector<double> want, s(CHANNELS * N);
      for (long t = 0; t <= tokens; t++) {
        if (t == tokens) s.assign(CHANNELS * N, 0);
        for (long d = 0; d < CHANNELS; d++) {
          const double in = value_of(x[t * CHANNELS + d]), dt = step[t * CHANNELS + d];
          double sum = skip[d] * in;
          for (long n = 0; n < N; n++) {
            double& one = s[d * N + n];
            one = exp(-dt * exp((double)a_log[d * N + n])) * one + dt * in * value_of(b[t * N + n]);
            sum += one * value_of(c[t * N + n]);
          }
          want.push_back(sum);
        }
      }
      near(named("selective_scan", {N, tokens}), y.data, want, 1e-5);
    }
}

CHECK(gated_rms_norm) {
  for (long tokens : {1L, 5L})
    for (int gate_first : {0, 1}) {
      constexpr long GROUPS = 3, SIZE = 32;
      Random random((unsigned)tokens);
      const auto x = random.floats(tokens * GROUPS * SIZE);
      const auto gate = random.bf16s(tokens * GROUPS * SIZE), w = random.bf16s(GROUPS * SIZE);
      Guarded<bf16> y(tokens * GROUPS * SIZE);
      quire_gated_rms_norm(x, gate, GROUPS * SIZE, 1, w, SIZE, y, tokens, GROUPS, SIZE, 1e-5f, gate_first);
      std::vector<double> want;
      for (long i = 0; i < tokens * GROUPS; i++) {
        double line[SIZE], gates[SIZE], squares = 0;
        for (long d = 0; d < SIZE; d++) {
          const double g = value_of(gate[i * SIZE + d]);
          gates[d] = g * sigmoid(g), line[d] = x[i * SIZE + d] * (gate_first ? gates[d] : 1);
          squares += line[d] * line[d];
        }
        for (long d = 0; d < SIZE; d++)
          want.push_back(line[d] / sqrt(squares / SIZE + 1e-5) * value_of(w[i % GROUPS * SIZE + d]) * (gate_first ? 1 : gates[d]));
      }
      near(named("gated_rms_norm", {tokens, gate_first}), y.data, want, 0.01);
    }
}

CHECK(sums_by_channel) {
  for (long tokens : {1L, 2L, 19L}) {
    constexpr long CHANNELS = 48;
    Random random((unsigned)tokens);
    const Step whole(tokens, 1, CHANNELS), wide(tokens, 1, 3 * CHANNELS);
    const auto x = random.floats((tokens + 1) * CHANNELS), v = random.floats((tokens + 1) * CHANNELS);
    const auto decay = random.floats(CHANNELS), first = random.floats(CHANNELS);
    auto state = whole.state<float>(), means = wide.state<float>();
    Guarded<float> y((tokens + 1) * CHANNELS), mean((tokens + 1) * CHANNELS);
    quire_decaying_sum(x, v, state, CHANNELS + 16, y, CHANNELS, whole.rows, whole.starts, 2, nullptr);
    quire_wkv(x, v, decay, first, means, 3 * CHANNELS + 16, mean, CHANNELS, wide.rows, wide.starts, 2, nullptr);
    std::vector<double> sums, found;
    for (long t = 0; t <= tokens; t++)
      for (long c = 0; c < CHANNELS; c++) {
        const long at = t * CHANNELS + c;
        const bool begins = t == 0 || t == tokens;
        sums.push_back(x[at] + (begins ? 0 : v[at] * sums[at - CHANNELS]));
        double total = 0, weights = 0;
        for (long i = t == tokens ? t : 0; i <= t; i++) {
          const double age = (double)(t - 1 - i) * exp((double)decay[c]), key = x[i * CHANNELS + c];
          const double weight = exp(i == t ? key + first[c] : key - age);
          total += weight * v[i * CHANNELS + c], weights += weight;
        }
        found.push_back(total / weights);
      }
    near(named("decaying_sum", {tokens}), y.data, sums, 1e-5);
    near(named("wkv", {tokens}), mean.data, found, 1e-4);
  }
}
