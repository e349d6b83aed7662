// The argmax of each row over the tokens that a bit mask allows; and a mask applied to logits.
//
// Among equal logits the lowest id wins. Bit i % 32 of word i / 32 is token i; there is a word for every 32 tokens.
#include "common.h"
#include "exports.h"
#include "logits.h"
#include "team.h"

namespace quire {

alignas(64) static const int32_t PLACES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) static const int32_t POWERS[16] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                               1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

inline Mask mask_of(uint32_t bits) { return less(ints(0), ints((int32_t)(bits & 0xffff)) & load(POWERS)); }
inline uint32_t bits_at(const uint32_t* words, long at) { return words[at / 32] >> (at % 32); }

// max_logit: the maximum of all, NaN if one is NaN or +inf. max_allowed: the maximum of the allowed, -inf if there is none.
template <class T>
inline void argmax_row(const T* x, const uint32_t* words, long V, int64_t* token, float* max_logit, float* max_allowed) {
  const Floats limit = floats(INFINITY), nothing = floats(-INFINITY);
  Floats top = nothing, allowed = nothing, wrong = floats(0.f);
  Ints found = ints(0), at = load(PLACES);
  long v = 0;
  for (; v + 16 <= V; v += 16, at = at + 16) {
    const Floats value = sixteen(x + v);
    wrong = select(less(value, limit), wrong, floats(1.f));
    top = max(value, top);
    const Floats left = words ? select(mask_of(bits_at(words, v)), value, nothing) : value;
    const Mask better = less(allowed, left);
    found = select(better, at, found);
    allowed = select(better, left, allowed);
  }
  float most = max_of(top), best = max_of(allowed);
  bool bad = sum_of(wrong) > 0.f;
  alignas(64) float values[16];
  alignas(64) int32_t ids[16];
  store(values, allowed);
  store(ids, found);
  long id = V;
  for (int i = 0; i < 16; i++)
    if (values[i] == best && ids[i] < id) id = ids[i];
  for (; v < V; v++) {
    const float value = one(x + v);
    bad |= !(value < INFINITY);
    most = most < value ? value : most;
    if ((!words || bits_at(words, v) & 1) && best < value) best = value, id = v;
  }
  *token = id < V ? id : 0;
  *max_logit = bad ? NAN : most;
  *max_allowed = best;
}

template <class T>
inline void argmax_rows(const T* x, long step, const uint32_t* words, long rows, long V, int64_t* tokens, float* max_logit,
                      float* max_allowed) {
  const long width = (V + 31) / 32;
  in_pieces(rows, [&](long r) {
    argmax_row(x + r * step, words ? words + r * width : nullptr, V, tokens + r, max_logit + r, max_allowed + r);
  });
}

}  // namespace quire

using namespace quire;

// words: [rows, ceil(V / 32)], or none.
EXPORT void quire_masked_argmax(const void* x, long step, int is_bf16, const uint32_t* words, long rows, long V, int64_t* tokens,
                       float* max_logit, float* max_allowed) {
  if (is_bf16)
    argmax_rows((const bf16*)x, step, words, rows, V, tokens, max_logit, max_allowed);
  else
    argmax_rows((const float*)x, step, words, rows, V, tokens, max_logit, max_allowed);
}

// Sets logits whose bit is 0 to -inf.
EXPORT void quire_mask_logits(float* x, long step, const uint32_t* words, long rows, long V) {
  const long width = (V + 31) / 32;
  in_pieces(rows, [&](long r) {
    const uint32_t* mine = words + r * width;
    float* row = x + r * step;
    long v = 0;
    for (; v + 16 <= V; v += 16) {
      const uint32_t bits = bits_at(mine, v) & 0xffff;
      if (bits == 0)
        store(row + v, floats(-INFINITY));
      else if (bits != 0xffff)
        store(row + v, select(mask_of(bits), load(row + v), floats(-INFINITY)));
    }
    for (; v < V; v++)
      if (!(bits_at(mine, v) & 1)) row[v] = -INFINITY;
  });
}
