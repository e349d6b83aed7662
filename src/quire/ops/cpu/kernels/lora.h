// Adapters (LoRA): ops/lora.py packs the factors of one adapter for one weight, and is the definition.
#pragma once
#include "common.h"

namespace quire {

struct LoraPart {  // outputs [start, start + outs); A: rows [first, first + rank) of the factors' A; B from element `at` on
  int64_t start, outs, first, rank, at;
  float scale;
};

struct Lora {
  const void *a, *b;           // [rank, ins padded to 16]; of each part [panels of 16 outputs, rank, 16]
  const float *gain, *offset;  // of all outputs and 16 more; may be null
  const LoraPart* parts;
  int64_t count, rank, ins, is_bf16;
};

using LoraTable = const Lora* const*;  // by the adapter's number; null: it does not change this weight

// While it lives, products of the calling thread have these tokens as rows. numbers: of their adapters, -1: none; may be null.
// Scopes do not nest.
struct AdapterScope {
  AdapterScope(const int64_t* numbers, long tokens);
  ~AdapterScope();
};

// Whether the adapter of some token in the scope changes this weight.
bool touched_by_adapters(LoraTable table);

}  // namespace quire

EXPORT void quire_lora(const void* x, long x_row, void* y, long y_row, int is_bf16, const int64_t* numbers, long tokens,
                       const void* table);
