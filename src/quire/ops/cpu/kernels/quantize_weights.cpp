// Quantizes 16-bit weights to int8 and int4 while they are loaded: the definitions of quantization/int8.py and int4.py, to the bit.
#include "exports.h"

using namespace quire;

// q: [outs, ins], the largest of a row 127 away from 0; ins is a multiple of 16.
EXPORT void quire_quantize_rows(const bf16* w, long outs, long ins, int8_t* q, float* scale) {
#pragma omp parallel for schedule(static)
  for (long o = 0; o < outs; o++) {
    const bf16* row = w + o * ins;
    Floats most = floats(0.f);
    for (long i = 0; i < ins; i += 16) most = max(most, magnitude(widen(row + i)));
    const float top = max_of(most);
    const Floats factor = floats(top > 0 ? 127.f / top : 0.f);
    for (long i = 0; i < ins; i += 16) store_bytes((uint8_t*)q + o * ins + i, to_ints(widen(row + i) * factor));
    scale[o] = top / 127.f;
  }
}

// q: [outs, ins] from 0 to 15; scale, zero: [outs, ins / group]. group is a multiple of 16.
EXPORT void quire_quantize_groups(const bf16* w, long outs, long ins, long group, uint8_t* q, float* scale, uint8_t* zero) {
#pragma omp parallel for schedule(static)
  for (long at = 0; at < outs * (ins / group); at++) {
    const bf16* row = w + at * group;
    Floats low = floats(0.f), high = floats(0.f);  // the negated minimum
    for (long i = 0; i < group; i += 16) {
      low = max(low, floats(0.f) - widen(row + i));
      high = max(high, widen(row + i));
    }
    const float least = max_of(low), range = max_of(high) + least, step = range > 0 ? range / 15.f : 1.f;
    const float middle = rintf(least / step);
    scale[at] = step, zero[at] = (uint8_t)middle;
    for (long i = 0; i < group; i += 16) {
      const Floats found = nearest(widen(row + i) / floats(step)) + floats(middle);
      store_bytes(q + at * group + i, to_ints(min(max(found, floats(0.f)), floats(15.f))));
    }
  }
}
