// The blocks of GGUF files, as gemm_blocks.cpp multiplies them and pack_blocks.cpp writes them.
#pragma once
#include "common.h"

namespace quire {

// STORED: bits of a weight in a record. With LOOKUP they are the number of a byte in a table, of signed bytes. FACTORS: a block has
// several groups, each with an integer factor of the block's scale.
template <int STORED_, int GROUP_, int BLOCK_, bool MINIMA_, int ZERO_, bool LOOKUP_ = false>
struct Form {
  static constexpr int STORED = STORED_, BITS = LOOKUP_ ? 8 : STORED_, GROUP = GROUP_, BLOCK = BLOCK_;
  static constexpr int GROUPS = BLOCK / GROUP, CHUNKS = BLOCK / 32;
  static constexpr bool MINIMA = MINIMA_, LOOKUP = LOOKUP_, FACTORS = GROUPS > 1;
  static constexpr long FACTOR_BYTES = FACTORS ? GROUPS * 32 : 0;
  static constexpr long HEADER = (MINIMA ? 2 : 1) * (64 + FACTOR_BYTES), CHUNK = STORED == 8 ? 1024 : 512 + (STORED - 4) * 128;
  static constexpr long RECORD = HEADER + CHUNKS * CHUNK;
  static constexpr int zero(bool moved) { return BITS == 8 ? (moved ? 128 : 0) : ZERO_; }
};
using Q4_0 = Form<4, 32, 32, false, 8>;
using Q8_0 = Form<8, 32, 32, false, 0>;
using Q4_K = Form<4, 32, 256, true, 0>;
using Q5_K = Form<5, 32, 256, true, 0>;
using Q6_K = Form<6, 16, 256, false, 32>;
using Q4_1 = Form<4, 32, 32, true, 0>;
using Q5_0 = Form<5, 32, 32, false, 16>;
using Q5_1 = Form<5, 32, 32, true, 0>;
using Q2_K = Form<4, 16, 256, true, 0>;
using Q3_K = Form<4, 16, 256, false, 4>;
using SmallLookup = Form<4, 32, 32, false, 0, true>;
using Lookup = Form<4, 32, 256, false, 0, true>;
using FineLookup = Form<4, 16, 256, false, 0, true>;

// A table of the signed bytes that 4 bits stand for, the factor of all scales, and whether a block's scale is bf16, not float16.
struct Codes {
  int8_t bytes[16];
  float unit;
  bool wide;
};
constexpr int FIRST_CODES = 10;
constexpr Codes IQ4{{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, 1, false};
constexpr Codes CODES[] = {  // by the form's number, from FIRST_CODES on; gguf_blocks.py has the same
    IQ4, IQ4, {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, 1, true},
    {{4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, .25f, false},
    {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}, 1, false},
    {{8, 25, 43, -8, -25, -43}, .125f, false}, {{1, 7, 9, -1, -7, -9}, .125f, false}, {{-1, 0, 1, 2}, 1, false}};

template <class Call>
inline void with_form(long form, Call call) {  // numbers of gguf_blocks.py
  switch (form) {
    case 0: return call(Q4_0{});
    case 1: return call(Q8_0{});
    case 2: return call(Q4_K{});
    case 3: return call(Q5_K{});
    case 4: return call(Q6_K{});
    case 5: return call(Q4_1{});
    case 6: return call(Q5_0{});
    case 7: return call(Q5_1{});
    case 8: return call(Q2_K{});
    case 9: return call(Q3_K{});
    case 10: case 12: case 17: return call(SmallLookup{});
    case 11: case 13: case 14: return call(Lookup{});
    case 15: case 16: return call(FineLookup{});
  }
}

}  // namespace quire
