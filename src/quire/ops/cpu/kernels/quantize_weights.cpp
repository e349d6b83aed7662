// Quantizes 16-bit weights to int8 and int4 while they are loaded: the definitions of quantization/int8.py and int4.py, to the bit.
#include <algorithm>
#include <vector>

#include "exports.h"
#include "gemm_kernel.h"
#include "team.h"

namespace quire {

namespace {

// q: the largest 127 away from 0. Returns the scale; ins is a multiple of 16.
inline float quantize_row(const bf16* row, long ins, int8_t* q) {
  Floats most = floats(0.f);
  for (long i = 0; i < ins; i += 16) most = max(most, magnitude(widen(row + i)));
  const float top = max_of(most);
  const Floats factor = floats(top > 0 ? 127.f / top : 0.f);
  for (long i = 0; i < ins; i += 16) store_bytes((uint8_t*)q + i, to_ints(widen(row + i) * factor));
  return top / 127.f;
}

// q: from 0 to 15; group is a multiple of 16.
inline void quantize_group(const bf16* row, long group, uint8_t* q, float& scale, uint8_t& zero) {
  Floats low = floats(0.f), high = floats(0.f);  // the negated minimum
  for (long i = 0; i < group; i += 16) {
    low = max(low, floats(0.f) - widen(row + i));
    high = max(high, widen(row + i));
  }
  const float least = max_of(low), range = max_of(high) + least, step = range > 0 ? range / 15.f : 1.f;
  const float middle = rintf(least / step);
  scale = step, zero = (uint8_t)middle;
  for (long i = 0; i < group; i += 16) {
    const Floats found = nearest(widen(row + i) / floats(step)) + floats(middle);
    store_bytes(q + i, to_ints(min(max(found, floats(0.f)), floats(15.f))));
  }
}

// Rows of a weight in the panels that they fill: the first and the second 16 outputs of a panel. quantization/quantize_on_load_cpu.py writes it.
struct RowsToQuantize {
  const char* from[2];  // of the first panel
  int64_t count[2];     // rows that exist from there on: others are zeros
  int64_t step, apart;  // bytes from row to row; rows from panel to panel
  char* to;             // the first panel
  int64_t panels, ins, group;  // group 0: int8
  float* scale;  // int8: of the first row of from[0], and `second` floats later of the first row of from[1]; int4: of the first panel, [groups, 32]
  char* other;   // int8: 128 times the sum of each row's codes; int4: zero points, as the scales
  int64_t second;
};

// The codes of row `r` of a panel, `ins` rounded up to 64 of them.
void quantize_output(const RowsToQuantize& part, long panel, long r, uint8_t* q) {
  const long half = r / 16, row = panel * part.apart + r % 16, groups = part.group ? part.ins / part.group : 1;
  if (row >= part.count[half]) return;
  const bf16* from = (const bf16*)(part.from[half] + row * part.step);
  if (part.group == 0) {
    const long at = half * part.second + row;
    part.scale[at] = quantize_row(from, part.ins, (int8_t*)q);
    int32_t sum = 0;
    for (long i = 0; i < part.ins; i++) sum += (int8_t)q[i];
    ((int32_t*)part.other)[at] = sum * 128;
    return;
  }
  for (long g = 0; g < groups; g++) {
    const long at = (panel * groups + g) * 32 + r;
    quantize_group(from + g * part.group, part.group, q + g * part.group, part.scale[at], ((uint8_t*)part.other)[at]);
  }
}

// codes: room for 32 rows, each of ins rounded up to 64.
void quantize_panel(const RowsToQuantize& part, long panel, uint8_t* codes) {
  const long width = (part.ins + 63) / 64 * 64, bytes = part.group ? part.ins * 16 : part.ins * 32;
  memset(codes, 0, 32 * width);
  for (long r = 0; r < 32; r++) quantize_output(part, panel, r, codes + r * width);
  char* to = part.to + panel * bytes;
  if (part.group == 0) {
    for (long k = 0; k < part.ins; k += 64, to += STEP_BYTES)
      for (long half = 0; half < 2; half++) transpose_words(codes + half * 16 * width + k, width, to + half * HALF_BYTES);
    return;
  }
  for (long i = 0; i < 16 * width; i++) codes[i] |= codes[16 * width + i] << 4;
  for (long k = 0; k < part.ins; k += 64, to += HALF_BYTES) {
    alignas(64) char words[HALF_BYTES];
    transpose_words(codes + k, width, words);
    memcpy(to, words, std::min(64L, (long)part.ins - k) * 16);
  }
}

}  // namespace

}  // namespace quire

using namespace quire;

// q: [outs, ins]
EXPORT void quire_quantize_rows(const bf16* w, long outs, long ins, int8_t* q, float* scale) {
  each_of(outs, true, [&](long o) { scale[o] = quantize_row(w + o * ins, ins, q + o * ins); });
}

// q: [outs, ins]; scale, zero: [outs, ins / group]
EXPORT void quire_quantize_groups(const bf16* w, long outs, long ins, long group, uint8_t* q, float* scale, uint8_t* zero) {
  each_of(outs * (ins / group), true, [&](long at) {
    quantize_group(w + at * group, group, q + at * group, scale[at], zero[at]);
  });
}

// Quantizes and packs rows of many weights: `count` times the numbers of a RowsToQuantize.
EXPORT void quire_quantize_weights(const int64_t* numbers, long count) {
  const RowsToQuantize* parts = (const RowsToQuantize*)numbers;
  std::vector<long> ends;  // of each part, in panels
  long panels = 0, width = 0;
  for (long i = 0; i < count; i++) ends.push_back(panels += parts[i].panels), width = std::max(width, (long)parts[i].ins + 63);
  in_pieces(panels, [&](long panel) {
    static thread_local Scratch<uint8_t> codes;
    const long at = std::upper_bound(ends.begin(), ends.end(), panel) - ends.begin();
    quantize_panel(parts[at], panel - ends[at] + parts[at].panels, codes.at_least(32 * width));
  });
}
