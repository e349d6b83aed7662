// The rows of a step for recurrent layers, and how their kernels share out work.
//
// A work item is some tiles of 16 channels of one row, and goes through all of the row's tokens. Nothing is computed across items
// or across tokens of one item, except through the state: so a row's bits depend neither on other rows nor on the cuts of its prompt.
#pragma once
#include "team.h"

namespace quire {

// Row b has the tokens [starts[b], starts[b + 1]), and entry rows[b] of a state, whose entries are `step` elements apart.
// The state after token t is also copied to entry kept[t]; 0: to none; kept may be null.
struct StateRows {
  const int64_t* rows;
  const int* starts;
  long count, step;
  const int64_t* kept;

  template <class T>
  T* kept_at(T* state, long t) const {
    return kept && kept[t] ? state + kept[t] * step : nullptr;
  }
};

inline Floats read16(const float* p) { return load(p); }
inline Floats read16(const bf16* p) { return widen(p); }
inline float read1(const float* p) { return *p; }
inline float read1(const bf16* p) {
  const uint32_t bits = (uint32_t)*p << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Calls f(T()) with the type of activations.
template <class F>
inline void with_type(int is_bf16, const F& f) {
  is_bf16 ? f(bf16()) : f(float());
}

// Calls f(b, first tile, last tile) for all rows that have tokens, in parallel, with enough parts of each row for all threads.
template <class F>
inline void each_part(const StateRows& in, long tiles, const F& f) {
  const long parts = std::min(tiles, std::max(1L, (4L * team_size() + in.count - 1) / std::max(1L, in.count)));
  in_pieces(in.count * parts, [&](long piece) {
    const long b = piece / parts, part = piece % parts;
    if (in.starts[b + 1] > in.starts[b]) f(b, tiles * part / parts, tiles * (part + 1) / parts);
  });
}

}  // namespace quire
