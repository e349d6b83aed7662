// Attention of packed prompts to themselves: the prompts of one call, and where their keys and values are written.
#pragma once
#include "attention.h"
#include "exports.h"

namespace quire {

// Each prompt begins a block of BLOCK tokens, so that tiles of attention.cpp begin where they would for the prompt alone.
struct Prompts {
  static constexpr long BLOCK = 16;
  const int* starts;
  long rows, blocks = 0, table_step = 0;
  int *lengths, *table, *slots;  // of each row; [rows, table_step]; of each token

  Prompts(const int* starts, long rows) : starts(starts), rows(rows) {
    static thread_local Scratch<int> keep_lengths, keep_table, keep_slots;  // of the calling thread
    lengths = keep_lengths.at_least(rows + 1);
    for (long row = 0; row < rows; row++) {
      lengths[row] = starts[row + 1] - starts[row];
      table_step = std::max(table_step, padded(lengths[row], BLOCK) / BLOCK);
    }
    table = keep_table.at_least(rows * table_step + 1), slots = keep_slots.at_least(starts[rows] + 1);
    for (long row = 0; row < rows; row++) {
      for (long i = 0; i < lengths[row]; i++) slots[starts[row] + i] = (int)(blocks * BLOCK + i);
      for (long i = 0; i < padded(lengths[row], BLOCK) / BLOCK; i++) table[row * table_step + i] = (int)blocks++;
    }
  }
  long tokens() const { return starts[rows]; }

  // The head of a token in a cache of `heads`.
  long at(long token, long head, long heads) const { return (slots[token] / BLOCK * heads + head) * BLOCK + slots[token] % BLOCK; }
};

struct PackedHeads {
  long heads, kv_heads, D, window;
  float scale;
  const float* bias;  // see Call
  long distances;
};

// q: [tokens, heads, D], q_step apart; k and v: [tokens, kv_heads, D], k_step and v_step apart; o: [tokens, heads, D].
void attend_packed(const Prompts& prompts, const PackedHeads& h, const bf16* q, long q_step, const bf16* k, long k_step, const bf16* v, long v_step,
                   bf16* o);

}  // namespace quire

EXPORT void quire_packed_attention(const quire::bf16* q, long q_step, const quire::bf16* k, long k_step, const quire::bf16* v, long v_step, quire::bf16* o,
                                   const int* starts, long rows, long heads, long kv_heads, long D, long window, float scale,
                                   const float* bias, long distances);
