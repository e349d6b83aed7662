// Packs weights for gemm.cpp, and unpacks rows of them.
#include "exports.h"
#include "gemm_kernel.h"

namespace quire {

// w: [outs, ins], row by row; `filled` of the outs exist, the others are zeros.
template <class F>
void pack(const typename F::Weight* w, typename F::Weight* packed, long outs, long filled, long ins, bool gated) {
  const long steps = ins / F::K, bytes = ins * sizeof(*w);
#pragma omp parallel for schedule(static)
  for (long panel = 0; panel < outs / 32; panel++)
    for (int half = 0; half < 2; half++) {
      const long row = gated ? half * (outs / 2) + panel * 16 : panel * 32 + half * 16;
      for (long k = 0; k < steps; k++) {
        char* to = (char*)packed + (panel * steps + k) * STEP_BYTES + half * HALF_BYTES;
        const char* from = (const char*)w + row * bytes + k * 64;
        if (row + 16 <= filled) {
          transpose_words(from, bytes, to);
          continue;
        }
        alignas(64) char edge[16 * 64] = {};
        for (long r = row; r < filled; r++) memcpy(edge + (r - row) * 64, from + (r - row) * bytes, 64);
        transpose_words(edge, 64, to);
      }
    }
}

}  // namespace quire

using namespace quire;

EXPORT void quire_pack(const bf16* w, bf16* packed, long outs, long filled, long ins, int gated) {
  pack<Bf16>(w, packed, outs, filled, ins, gated);
}
// Unpacks rows of a packed weight [.., ins]: y[rows, ins]. The caller checks the ids.
EXPORT void quire_unpack_rows(const bf16* packed, const int64_t* ids, bf16* y, long rows, long ins) {
  const long steps = ins / 32;
#pragma omp parallel for if (rows >= 16) schedule(static)
  for (long r = 0; r < rows; r++) {
    const uint32_t* from = (const uint32_t*)packed + (ids[r] / 16 % 2 * 16 + ids[r] / 32 * steps * 32) * 16 + ids[r] % 16;
    uint32_t* to = (uint32_t*)(y + r * ins);
    for (long k = 0; k < steps; k++, from += 2 * 16 * 16)
      for (long word = 0; word < 16; word++) *to++ = from[word * 16];
  }
}
EXPORT void quire_pack_int8(const int8_t* w, int8_t* packed, long outs, long filled, long ins, int gated) {
  pack<Int8>(w, packed, outs, filled, ins, gated);
}
