// The encoder layers that encoder.cpp reads. native/fused_encoder.py fills them in.
#pragma once
#include "layer.h"
#include "packed_attention.h"

namespace quire {

struct EncoderLayer {  // fixed once the model is loaded
  Weight qkv, o, up, down;
  Norm after_attention, after_mlp;  // of the sum with what the half adds
  const float* bias;                // of scores by distance (attention.h); may be null
  int64_t heads, kv_heads, D, window, act, distances;
  int64_t rotary;  // which of the step's angles; -1: none
  int64_t runs;    // which of the step's runs of tokens attend to each other
  float scale;
};

struct EncoderStep {
  const float* const *cos, *const *sin;  // by rotary embedding: [tokens, pairs]
  const int* const* starts;              // by kind of runs: [count + 1]
  const int64_t* counts;                 // of runs
  int64_t pairs;
};

}  // namespace quire

EXPORT void quire_encoder(const quire::EncoderLayer* const* layers, long count, const quire::Norm* first, const quire::EncoderStep* step,
                          long hidden, quire::bf16* x, quire::bf16* y);
