// Packs the blocks of GGUF files as gemm_blocks.cpp multiplies them: the same integers in another order.
//
// Source of the blocks' layouts: ggml-org/ggml, docs and gguf-py's definitions of them.
#include <algorithm>
#include <vector>

#include "block_forms.h"
#include "exports.h"
#include "team.h"

namespace quire {

namespace {

// One block of one output.
struct Block {
  uint16_t scale = 0, minimum = 0;
  uint8_t factor[16] = {}, least[16] = {}, q[256] = {};

  void nibbles(const uint8_t* from, int at) {  // 16 bytes: the low halves first
    for (int j = 0; j < 16; j++) q[at + j] = from[j] & 15, q[at + 16 + j] = from[j] >> 4;
  }
  void long_nibbles(const uint8_t* from) {  // four times 32 bytes
    for (int g = 0; g < 4; g++)
      for (int j = 0; j < 32; j++) q[g * 64 + j] = from[g * 32 + j] & 15, q[g * 64 + 32 + j] = from[g * 32 + j] >> 4;
  }
  void fifth_bits(const uint8_t* from) {
    for (int j = 0; j < 32; j++) q[j] |= (from[j / 8] >> j % 8 & 1) << 4;
  }
  void pairs(const uint8_t* from) {  // 64 bytes with four times two bits
    for (int i = 0; i < 256; i++) q[i] = from[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
  }
  void six_bits(const uint8_t* from) {
    for (int g = 0; g < 8; g++) {
      factor[g] = g < 4 ? from[g] & 63 : (from[g + 4] & 15) | from[g - 4] >> 6 << 4;
      least[g] = g < 4 ? from[g + 4] & 63 : from[g + 4] >> 4 | from[g] >> 6 << 4;
    }
  }
};

inline uint16_t half_at(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Bytes of a block in the file. Others than the first 13 forms come as quantization/gguf_blocks.py unpacks them.
constexpr int SIZES[] = {18, 34, 144, 176, 210, 20, 22, 24, 84, 110, 18, 136, 17};
template <class F>
constexpr int PLAIN = 2 + F::FACTOR_BYTES / 32 + F::BLOCK;  // the scale, factors, and a byte for each input

template <class F>
void read_block(long form, const uint8_t* from, Block& to) {
  to.scale = half_at(from);
  switch (form) {
    case 0: case 10: return to.nibbles(from + 2, 0);
    case 1: return (void)memcpy(to.q, from + 2, 32);
    case 2: case 3:
      to.minimum = half_at(from + 2);
      to.six_bits(from + 4);
      to.long_nibbles(from + (form == 2 ? 16 : 48));
      for (int i = 0; form == 3 && i < 256; i++) to.q[i] |= (from[16 + i % 32] >> i / 32 & 1) << 4;
      return;
    case 4:
      for (int i = 0; i < 256; i++) {
        const int half = i / 128, quarter = i % 128 / 32, j = i % 32;
        const uint8_t low = from[half * 64 + quarter % 2 * 32 + j];
        to.q[i] = (quarter < 2 ? low & 15 : low >> 4) | (from[128 + half * 32 + j] >> 2 * quarter & 3) << 4;
      }
      memcpy(to.factor, from + 192, 16);
      to.scale = half_at(from + 208);
      return;
    case 5: case 7:
      to.minimum = half_at(from + 2) ^ 0x8000;  // they are added
      to.nibbles(from + (form == 5 ? 4 : 8), 0);
      if (form == 7) to.fifth_bits(from + 4);
      return;
    case 6: to.nibbles(from + 6, 0); return to.fifth_bits(from + 2);
    case 8:
      to.scale = half_at(from + 80), to.minimum = half_at(from + 82);
      for (int g = 0; g < 16; g++) to.factor[g] = from[g] & 15, to.least[g] = from[g] >> 4;
      return to.pairs(from + 16);
    case 9:
      to.scale = half_at(from + 108);
      to.pairs(from + 32);
      for (int i = 0; i < 256; i++) to.q[i] |= (from[i % 32] >> i / 32 & 1) << 2;
      for (int g = 0; g < 16; g++) {
        const int low = g < 8 ? from[96 + g] & 15 : from[96 + g - 8] >> 4, high = from[104 + g % 4] >> g / 4 * 2 & 3;
        to.factor[g] = (uint8_t)((low | high << 4) - 32);
      }
      return;
    case 11:
      for (int g = 0; g < 8; g++) {
        const int low = from[4 + g / 2] >> g % 2 * 4 & 15, high = half_at(from + 2) >> g * 2 & 3;
        to.factor[g] = (uint8_t)((low | high << 4) - 32);
        to.nibbles(from + 8 + g * 16, g * 32);
      }
      return;
    case 12:  // 2^(byte - 128) as bf16
      to.scale = from[0] < 2 ? 32 << from[0] : (uint16_t)((from[0] - 1) << 7);
      return to.nibbles(from + 1, 0);
    default:
      memcpy(to.factor, from + 2, F::FACTOR_BYTES / 32);
      memcpy(to.q, from + 2 + F::FACTOR_BYTES / 32, F::BLOCK);
  }
}

inline void put(uint8_t* to, uint32_t word, bool first) {
  uint32_t before = 0;
  if (!first) memcpy(&before, to, 4);
  before |= word;
  memcpy(to, &before, 4);
}

// `count` outputs of a panel, 32 at most; `step`: bytes from row to row. The memory of missing ones is zero.
template <class F>
void pack_panel(long form, const uint8_t* from, long step, long count, long blocks, uint8_t* to) {
  const long size = form < (long)std::size(SIZES) ? SIZES[form] : PLAIN<F>;
  for (long b = 0; b < blocks; b++, to += F::RECORD) {
    for (long o = 0; o < count; o++) {
      Block block;
      read_block<F>(form, from + o * step + b * size, block);
      memcpy(to + o * 2, &block.scale, 2);
      if (F::MINIMA) memcpy(to + 64 + o * 2, &block.minimum, 2);
      uint8_t* factors = to + (F::MINIMA ? 128 : 64) + o;
      for (int g = 0; F::FACTORS && g < F::GROUPS; g++) {
        factors[g * 32] = block.factor[g];
        if (F::MINIMA) factors[F::FACTOR_BYTES + g * 32] = block.least[g];
      }
      constexpr int MORE = F::STORED - 4, EACH = MORE > 0 ? 4 / MORE : 1;
      const int part = o / 16, lane = o % 16 * 4;
      for (int line = 0; line < F::BLOCK / 4; line++) {
        uint8_t* chunk = to + F::HEADER + line / 8 * F::CHUNK + lane;
        const int i = line % 8;
        uint32_t word;
        memcpy(&word, block.q + line * 4, 4);
        if (F::STORED == 8) {
          memcpy(chunk + part * 512 + i * 64, &word, 4);
          continue;
        }
        put(chunk + i * 64, (word & 0x0f0f0f0f) << part * 4, part == 0);
        if (MORE > 0) put(chunk + 512 + i / EACH * 64, (word >> 4 & 0x0f0f0f0f) << (i % EACH * 2 + part) * MORE, part == 0 && i % EACH == 0);
      }
    }
  }
}

// Rows of one form: where the file has them, `step` bytes apart, and where their panels go, `stride` bytes apart.
struct RowsOfBlocks {
  const uint8_t* from;
  int64_t step, count;
  uint8_t* to;
  int64_t stride, form, blocks;
};

}  // namespace

}  // namespace quire

using namespace quire;

// Packs rows of many weights: `count` times the numbers of a RowsOfBlocks. The memory of their last panels is zero.
EXPORT void quire_pack_blocks(const int64_t* numbers, long count) {
  const RowsOfBlocks* parts = (const RowsOfBlocks*)numbers;
  std::vector<long> ends;  // of each part, in panels
  long panels = 0;
  for (long i = 0; i < count; i++) ends.push_back(panels += (parts[i].count + 31) / 32);
  in_pieces(panels, [&](long panel) {
    const long at = std::upper_bound(ends.begin(), ends.end(), panel) - ends.begin();
    const RowsOfBlocks& part = parts[at];
    const long number = panel - ends[at] + (part.count + 31) / 32, rows = std::min(32L, (long)part.count - number * 32);
    with_form(part.form, [&](auto form) {
      pack_panel<decltype(form)>(part.form, part.from + number * 32 * part.step, part.step, rows, part.blocks, part.to + number * part.stride);
    });
  });
}
