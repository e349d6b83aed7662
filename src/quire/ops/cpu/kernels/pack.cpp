// Packs weights for gemm.cpp, and unpacks rows of them.
#include <algorithm>
#include <vector>

#include "exports.h"
#include "gemm_kernel.h"
#include "team.h"

namespace quire {

namespace {

// Some rows of a weight. quantization/bf16_packed.py writes it.
struct RowsOfWeight {
  const char* from;       // the first of them
  int64_t step, count;    // bytes from row to row; rows that exist: others are zeros
  char* to;               // the packed weight
  int64_t first, rows;    // in the weight; multiples of 16
  int64_t outs, ins, gated;
};

constexpr long TASK_BYTES = 1 << 20;  // bytes that a thread packs before it looks for more

// Packs 16 rows from row `at` of a part on.
template <class F>
void pack_rows(const RowsOfWeight& part, long at) {
  const long steps = part.ins / F::K, row = part.first + at, half_outs = part.outs / 2;
  const long half = part.gated ? row >= half_outs : row / 16 % 2;
  const long panel = part.gated ? (row - half * half_outs) / 16 : row / 32;
  char* to = part.to + panel * steps * STEP_BYTES + half * HALF_BYTES;
  const char* from = part.from + at * part.step;
  for (long k = 0; k < steps; k++, to += STEP_BYTES, from += 64) {
    if (at + 16 <= part.count) {
      transpose_words(from, part.step, to);
      continue;
    }
    alignas(64) char edge[16 * 64] = {};
    for (long r = at; r < part.count; r++) memcpy(edge + (r - at) * 64, from + (r - at) * part.step, 64);
    transpose_words(edge, 64, to);
  }
}

// Threads take neighbouring rows together, because the first write to a huge page clears all of it.
template <class F>
void pack_all(const RowsOfWeight* parts, long count) {
  std::vector<long> ends;  // of each part, in units of 16 rows
  long units = 0, bytes = 1;
  for (long i = 0; i < count; i++) ends.push_back(units += parts[i].rows / 16), bytes += parts[i].rows * parts[i].ins * 64 / F::K;
  const long each = std::max(1L, TASK_BYTES * units / bytes);
  in_pieces((units + each - 1) / each, [&](long at) {
    const long first = at * each;
    long part = std::upper_bound(ends.begin(), ends.end(), first) - ends.begin();
    for (long unit = first; unit < std::min(first + each, units); unit++) {
      while (unit >= ends[part]) part++;
      pack_rows<F>(parts[part], (unit - ends[part]) * 16 + parts[part].rows);
    }
  });
}

// w: [outs, ins], row by row; `filled` of the outs exist.
template <class F>
void pack(const typename F::Weight* w, typename F::Weight* packed, long outs, long filled, long ins, bool gated) {
  const RowsOfWeight all{(const char*)w, ins * (long)sizeof(*w), filled, (char*)packed, 0, outs, outs, ins, gated};
  pack_all<F>(&all, 1);
}

}  // namespace

}  // namespace quire

using namespace quire;

EXPORT void quire_pack(const bf16* w, bf16* packed, long outs, long filled, long ins, int gated) {
  pack<Bf16>(w, packed, outs, filled, ins, gated);
}
// Packs rows of many weights: `count` times the numbers of a RowsOfWeight.
EXPORT void quire_pack_weights(const int64_t* parts, long count) { pack_all<Bf16>((const RowsOfWeight*)parts, count); }
// Unpacks rows of a packed weight [.., ins]: y[rows, ins]. The caller checks the ids.
EXPORT void quire_unpack_rows(const bf16* packed, const int64_t* ids, bf16* y, long rows, long ins) {
  const long steps = ins / 32;
  each_of(rows, rows >= 16, [&](long r) {
    const uint32_t* from = (const uint32_t*)packed + (ids[r] / 16 % 2 * 16 + ids[r] / 32 * steps * 32) * 16 + ids[r] % 16;
    uint32_t* to = (uint32_t*)(y + r * ins);
    for (long k = 0; k < steps; k++, from += 2 * 16 * 16)
      for (long word = 0; word < 16; word++) *to++ = from[word * 16];
  });
}
EXPORT void quire_pack_int8(const int8_t* w, int8_t* packed, long outs, long filled, long ins, int gated) {
  pack<Int8>(w, packed, outs, filled, ins, gated);
}
