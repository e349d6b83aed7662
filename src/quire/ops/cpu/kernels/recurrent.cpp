// Recurrent layers: causal convolution, linear recurrence (gated delta rule, Mamba-2), selective scan (Mamba-1), decaying sum, RWKV-4's
// mean of values, gated norm.
//
// ops/recurrent.py has the definitions. Each kernel goes through a row's tokens while a tile of the state is in the L1 cache
// or in registers: of a decode step it reads and writes the state once.
#include "exports.h"
#include "recurrent.h"

namespace quire {

constexpr long TOKENS = 16;  // whose inputs are prepared at once

// -- convolution -----------------------------------------------------------------------------------------------------

template <int J, class T>
void convolve(const T* x, long step, const T* w, const T* bias, T* state, T* y, long channels, bool activate, const StateRows& in) {
  each_part(in, channels / 16, [&](long b, long first, long last) {
    for (long c = first * 16; c < last * 16; c += 16) {
      alignas(64) float taps[J][16];
      for (int lane = 0; lane < 16; lane++)
        for (int j = 0; j < J; j++) taps[j][lane] = read1(w + (c + lane) * J + j);
      Floats tap[J], seen[J];
      T* entry = state + in.rows[b] * in.step + c;
      for (int j = 0; j < J; j++) tap[j] = load(taps[j]);
      for (int j = 1; j < J; j++) seen[j] = read16(entry + (j - 1) * channels);
      const Floats offset = bias ? read16(bias + c) : floats(0.f);
      for (long t = in.starts[b]; t < in.starts[b + 1]; t++) {
        for (int j = 1; j < J; j++) seen[j - 1] = seen[j];
        seen[J - 1] = read16(x + t * step + c);
        Floats total = tap[0] * seen[0];
        for (int j = 1; j < J; j++) total = fma(tap[j], seen[j], total);
        total = total + offset;
        store(y + t * channels + c, activate ? activated(total, SILU) : total);
        if (T* to = in.kept_at(state, t))
          for (int j = 1; j < J; j++) store(to + c + (j - 1) * channels, seen[j]);
      }
      for (int j = 1; j < J; j++) store(entry + (j - 1) * channels, seen[j]);
    }
  });
}

// -- linear recurrence -----------------------------------------------------------------------------------------------

template <class T>
struct Recurrence {
  const T *q, *k, *v, *raw, *write;
  long q_step, k_step, v_step, raw_step, write_step;
  const float *bias, *a_log, *skip;
  float low, high;
  float *state, *y;
  long key_heads, K, heads, V;
};

// The inputs of some tokens of one value head.
struct Inputs {
  float *q, *k;  // [TOKENS, K]
  float decay[TOKENS], beta[TOKENS], dot[TOKENS];
};

inline float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

template <class T>
void read_unit(const T* from, float* to, long K, bool unit, float factor) {
  Floats squares = floats(0.f);
  for (long i = 0; i < K; i += 16) {
    const Floats x = read16(from + i);
    squares = fma(x, x, squares);
    store(to + i, x);
  }
  if (!unit) return;
  const Floats scale = floats(factor / sqrtf(sum_of(squares) + 1e-6f));
  for (long i = 0; i < K; i += 16) store(to + i, load(to + i) * scale);
}

template <class T>
void prepare(const Recurrence<T>& r, long head, long t, long count, Inputs& into) {
  const long key_head = head * r.key_heads / r.heads;
  for (long i = 0; i < count; i++) {
    float *q = into.q + i * r.K, *k = into.k + i * r.K;
    read_unit(r.q + (t + i) * r.q_step + key_head * r.K, q, r.K, r.write, 1.f / sqrtf((float)r.K));
    read_unit(r.k + (t + i) * r.k_step + key_head * r.K, k, r.K, r.write, 1.f);
    const float raw = read1(r.raw + (t + i) * r.raw_step + head) + r.bias[head];
    const float step = std::min(std::max(softplus(raw), r.low), r.high);
    into.decay[i] = expf(-expf(r.a_log[head]) * step);
    into.beta[i] = r.write ? 1.f / (1.f + expf(-read1(r.write + (t + i) * r.write_step + head))) : step;
    Floats dot = floats(0.f);
    for (long d = 0; d < r.K; d += 16) dot = fma(load(q + d), load(k + d), dot);
    into.dot[i] = sum_of(dot);
  }
}

// One token of the delta rule on a tile S [K, 16]: reads S for its products with k and q, then updates it in the cache.
inline Floats delta_step(float* s, const float* q, const float* k, long K, float decay, float beta, float dot, Floats v) {
  Floats along_k[2] = {floats(0.f), floats(0.f)}, along_q[2] = {floats(0.f), floats(0.f)};
  for (long i = 0; i < K; i += 2)
    for (int j = 0; j < 2; j++) {
      const Floats x = load(s + (i + j) * 16);
      along_k[j] = fma(x, floats(k[i + j]), along_k[j]);
      along_q[j] = fma(x, floats(q[i + j]), along_q[j]);
    }
  const Floats r = (v - (along_k[0] + along_k[1]) * floats(decay)) * floats(beta);
  for (long i = 0; i < K; i++) store(s + i * 16, fma(floats(k[i]), r, load(s + i * 16) * floats(decay)));
  return fma(floats(dot), r, (along_q[0] + along_q[1]) * floats(decay));
}

// The same without the correction: updates S and multiplies it by q at once.
inline Floats plain_step(float* s, const float* q, const float* k, long K, float decay, float beta, Floats v) {
  Floats along_q[2] = {floats(0.f), floats(0.f)};
  const Floats r = v * floats(beta);
  for (long i = 0; i < K; i += 2)
    for (int j = 0; j < 2; j++) {
      const Floats x = fma(floats(k[i + j]), r, load(s + (i + j) * 16) * floats(decay));
      store(s + (i + j) * 16, x);
      along_q[j] = fma(x, floats(q[i + j]), along_q[j]);
    }
  return along_q[0] + along_q[1];
}

template <class T>
void recur(const Recurrence<T>& r, const StateRows& in) {
  const long tiles = r.V / 16;
  each_part(in, r.heads * tiles, [&](long b, long first, long last) {
    static thread_local Scratch<float> scratch;
    Inputs inputs;
    inputs.q = scratch.at_least(2 * TOKENS * r.K), inputs.k = inputs.q + TOKENS * r.K;
    float* entry = r.state + in.rows[b] * in.step;
    for (long end, tile = first; tile < last; tile = end) {  // of one head
      const long head = tile / tiles;
      end = std::min(last, (head + 1) * tiles);
      for (long t = in.starts[b], stop = in.starts[b + 1]; t < stop; t += TOKENS) {
        const long count = std::min(TOKENS, stop - t);
        prepare(r, head, t, count, inputs);
        for (long one = tile; one < end; one++)
          for (long i = 0; i < count; i++) {
            const long at = head * r.V + (one - head * tiles) * 16;
            const float *q = inputs.q + i * r.K, *k = inputs.k + i * r.K, decay = inputs.decay[i], beta = inputs.beta[i];
            const Floats v = read16(r.v + (t + i) * r.v_step + at);
            float* s = entry + one * r.K * 16;
            Floats y = r.write ? delta_step(s, q, k, r.K, decay, beta, inputs.dot[i], v) : plain_step(s, q, k, r.K, decay, beta, v);
            if (r.skip) y = fma(floats(r.skip[head]), v, y);
            store(r.y + (t + i) * r.heads * r.V + at, y);
            if (float* to = in.kept_at(r.state, t + i)) memcpy(to + one * r.K * 16, s, r.K * 16 * sizeof(float));
          }
      }
    }
  });
}

// -- selective scan --------------------------------------------------------------------------------------------------

template <class T>
void scan(const T* x, long x_step, const float* step, const float* a_log, const T* bs, long b_step, const T* cs, long c_step,
          const float* skip, float* state, float* y, long channels, long N, const StateRows& in) {
  each_part(in, channels / 16, [&](long b, long first, long last) {
    static thread_local Scratch<float> scratch;
    float* rates = scratch.at_least(N * 16);  // -exp(a_log), transposed, for powers of two
    for (long tile = first; tile < last; tile++) {
      float* s = state + in.rows[b] * in.step + tile * N * 16;
      for (long n = 0; n < N; n++)
        for (long lane = 0; lane < 16; lane++) rates[n * 16 + lane] = a_log[(tile * 16 + lane) * N + n];
      for (long n = 0; n < N; n++) store(rates + n * 16, exp2_of(load(rates + n * 16) * floats(LOG2E)) * floats(-LOG2E));
      for (long t = in.starts[b]; t < in.starts[b + 1]; t++) {
        const Floats now = load(step + t * channels + tile * 16), input = read16(x + t * x_step + tile * 16), r = now * input;
        Floats total = floats(0.f);
        for (long n = 0; n < N; n++) {
          const Floats kept = exp2_of(load(rates + n * 16) * now) * load(s + n * 16);
          const Floats next = fma(r, floats(read1(bs + t * b_step + n)), kept);
          store(s + n * 16, next);
          total = fma(next, floats(read1(cs + t * c_step + n)), total);
        }
        store(y + t * channels + tile * 16, fma(load(skip + tile * 16), input, total));
        if (float* to = in.kept_at(state, t)) memcpy(to + tile * N * 16, s, N * 16 * sizeof(float));
      }
    }
  });
}

// -- sums by channel -------------------------------------------------------------------------------------------------

inline Floats exp_of(Floats x) { return exp2_of(x * floats(LOG2E)); }

// The mean of 16 channels' values by their weights: the weighed sum, the weights, and the exponent that both were divided by.
struct Mean {
  Floats total, weights, top;

  // Adds a value with a weight of e^key.
  Mean with(Floats key, Floats value) const {
    const Floats most = max(top, key), old = exp_of(top - most), now = exp_of(key - most);
    return {old * total + now * value, old * weights + now, most};
  }
  void write(float* to, long channels) const { store(to, total), store(to + channels, weights), store(to + 2 * channels, top);
  }
};

// -- gated norm ------------------------------------------------------------------------------------------------------

// To the precision of the first argument's type.
inline Floats rounded_to(bf16, Floats x) { return rounded(x); }
inline Floats rounded_to(float, Floats x) { return x; }

template <class T>
void gated_norm(const float* x, const T* gate, const T* w, T* y, long size, float eps, bool gate_first, float* line) {
  Floats squares = floats(0.f);
  for (long d = 0; d < size; d += 16) {
    Floats v = load(x + d);
    if (gate_first) v = v * activated(read16(gate + d), SILU);
    store(line + d, v);
    squares = fma(v, v, squares);
  }
  const Floats factor = floats(1.f / sqrtf(sum_of(squares) / (float)size + eps));
  for (long d = 0; d < size; d += 16) {
    Floats v = rounded_to(T(), load(line + d) * factor) * read16(w + d);
    if (!gate_first) v = rounded_to(T(), v) * activated(read16(gate + d), SILU);
    store(y + d, v);
  }
}

}  // namespace quire

using namespace quire;

// J: taps, 2 to 4. x and y [tokens, channels], state [., J - 1, channels], w [channels, J]; channels: a multiple of 16.
EXPORT void quire_causal_conv(const void* x, long step, int is_bf16, const void* w, const void* bias, void* state, long state_step, void* y,
                              long channels, long J, int activate, const int64_t* rows, const int* starts,
                              long count, const int64_t* kept) {
  const StateRows in = {rows, starts, count, state_step, kept};
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    const auto run = J == 2 ? convolve<2, T> : J == 3 ? convolve<3, T> : convolve<4, T>;
    run((const T*)x, step, (const T*)w, (const T*)bias, (T*)state, (T*)y, channels, activate, in);
  });
}

// q and k [tokens, key_heads, K], v [tokens, heads, V], raw and write [tokens, heads]; write: null without the delta rule.
EXPORT void quire_linear_recurrence(const void* q, long q_step, const void* k, long k_step, const void* v, long v_step,
                                    const void* raw, long raw_step, const void* write, long write_step, int is_bf16,
                                    const float* bias, const float* a_log, const float* skip, float low, float high,
                                    float* state, long state_step, float* y, long key_heads, long K, long heads, long V, const int64_t* rows,
                                    const int* starts, long count, const int64_t* kept) {
  const StateRows in = {rows, starts, count, state_step, kept};
  with_type(is_bf16, [&](auto type) {
    using T = const decltype(type);
    recur<decltype(type)>({(T*)q, (T*)k, (T*)v, (T*)raw, (T*)write, q_step, k_step, v_step, raw_step, write_step, bias, a_log, skip,
                           low, high, state, y, key_heads, K, heads, V}, in);
  });
}

// x [tokens, channels], step and y the same in float, a_log [channels, N], bs and cs [tokens, N].
EXPORT void quire_selective_scan(const void* x, long x_step, int is_bf16, const float* step, const float* a_log, const void* bs,
                                 long b_step, const void* cs, long c_step, const float* skip, float* state, long state_step, float* y,
                                 long channels, long N, const int64_t* rows, const int* starts, long count, const int64_t* kept) {
  const StateRows in = {rows, starts, count, state_step, kept};
  with_type(is_bf16, [&](auto type) {
    using T = const decltype(type);
    scan<decltype(type)>((T*)x, x_step, step, a_log, (T*)bs, b_step, (T*)cs, c_step, skip, state, y, channels, N, in);
  });
}

// x, decay and y [tokens, channels], state [., channels]; channels: a multiple of 16.
EXPORT void quire_decaying_sum(const float* x, const float* decay, float* state, long state_step, float* y, long channels,
                               const int64_t* rows, const int* starts, long count, const int64_t* kept) {
  const StateRows in = {rows, starts, count, state_step, kept};
  each_part(in, channels / 16, [&](long b, long first, long last) {
    for (long c = first * 16; c < last * 16; c += 16) {
      float* entry = state + in.rows[b] * in.step + c;
      Floats sum = load(entry);
      for (long t = in.starts[b]; t < in.starts[b + 1]; t++) {
        const long at = t * channels + c;
        sum = load(decay + at) * sum + load(x + at);
        store(y + at, sum);
        if (float* to = in.kept_at(state, t)) store(to + c, sum);
      }
      store(entry, sum);
    }
  });
}

// k, v and y [tokens, channels], decay and first [channels], state [., 3, channels].
EXPORT void quire_wkv(const float* k, const float* v, const float* decay, const float* first, float* state, long state_step, float* y,
                      long channels, const int64_t* rows, const int* starts, long count, const int64_t* kept) {
  const StateRows in = {rows, starts, count, state_step, kept};
  each_part(in, channels / 16, [&](long b, long from, long last) {
    for (long c = from * 16; c < last * 16; c += 16) {
      float* entry = state + in.rows[b] * in.step + c;
      Mean mean{load(entry), load(entry + channels), load(entry + 2 * channels)};
      mean.top = select(less(floats(0.f), mean.weights), mean.top, floats(-1e30f));  // of a row that starts
      const Floats fall = exp_of(load(decay + c)), more = load(first + c);
      for (long t = in.starts[b]; t < in.starts[b + 1]; t++) {
        const long at = t * channels + c;
        const Floats key = load(k + at), value = load(v + at);
        const Mean now = mean.with(key + more, value);
        store(y + at, now.total / now.weights);
        mean.top = mean.top - fall;
        mean = mean.with(key, value);
        if (float* to = in.kept_at(state, t)) mean.write(to + c, channels);
      }
      mean.write(entry, channels);
    }
  });
}

// Groups of `size` features in each of `tokens` lines; w: of one group, or of all features (w_step = size).
EXPORT void quire_gated_rms_norm(const float* x, const void* gate, long gate_step, int is_bf16, const void* w, long w_step,
                                 void* y, long tokens, long groups, long size, float eps, int gate_first) {
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    each_of(tokens * groups, tokens >= 4, [&](long part) {
      static thread_local Scratch<float> scratch;
      const long t = part / groups, g = part % groups, at = part * size;
      gated_norm<T>(x + at, (const T*)gate + t * gate_step + g * size, (const T*)w + g * w_step, (T*)y + at, size, eps,
                    gate_first, scratch.at_least(size));
    });
  });
}
