// The layers that layer.cpp reads. native/fused_decoder.py fills them in.
#pragma once
#include "exchange.h"
#include "exports.h"
#include "lora.h"

namespace quire {

struct Weight {
  const void* data;
  const float* scale;    // null: bf16
  const int32_t* sum;    // int8
  const uint8_t* zero;   // int4: not null
  const uint8_t* codes;  // int4: the byte of each nibble, 16; may be null
  const int32_t* order;  // int4; may be null
  const int64_t* blocks; // blocks of GGUF files: not null (gemm_blocks.cpp)
  const bf16* bias;
  int64_t outs, ins, group;
  LoraTable lora;        // null: no adapter may change it
  RankLink *x_ranks, *y_ranks;  // x, or y, is this rank's part, and all parts are gathered; null: whole

  long own_ins() const { return x_ranks ? ins / x_ranks->size : ins; }    // of x
  long all_outs() const { return y_ranks ? outs * y_ranks->size : outs; }  // of y, if it is not gated

  // With the adapters of the calling thread's `AdapterScope`, whose tokens x then has; tokens without one keep their bits.
  void multiply(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act = NO_ACTIVATION) const {
    x_ranks || y_ranks ? multiply_among_ranks(x, x_row, y, y_row, rows, act) : multiply_alone(x, x_row, y, y_row, rows, act);
  }
  // Without an exchange.
  void multiply_alone(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const {
    touched_by_adapters(lora) ? multiply_adapted(x, x_row, y, y_row, rows, act) : product(x, x_row, y, y_row, rows, act);
  }
  void product(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const {
    if (blocks)
      quire_linear_blocks(x, x_row, (const uint8_t*)data, blocks, bias, y, y_row, rows, outs, ins, act);
    else if (zero)
      quire_linear_int4(x, x_row, (const uint8_t*)data, scale, zero, codes, order, bias, y, y_row, rows, outs, ins, group, act);
    else if (scale)
      quire_linear_int8(x, x_row, (const int8_t*)data, scale, sum, bias, y, y_row, rows, outs, ins, act);
    else
      quire_linear(x, x_row, (const bf16*)data, bias, y, y_row, rows, outs, ins, act);
  }

  // Panels [panel0, panel1) of the same product, by the calling thread alone; of a gated weight an even number from an even one on.
  void panels(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const {
    (this->*(blocks ? &Weight::panels_blocks : zero ? &Weight::panels_int4 : scale ? &Weight::panels_int8 : &Weight::panels_bf16))(x, x_row, y, y_row, rows, act, panel0, panel1);
  }
  long bits() const { return zero || blocks ? 4 : scale ? 8 : 16; }

 private:
  void multiply_among_ranks(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const;
  void multiply_adapted(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act) const;
  void panels_bf16(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const;
  void panels_int8(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const;
  void panels_blocks(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const;
  void panels_int4(const bf16* x, long x_row, bf16* y, long y_row, long rows, int act, long panel0, long panel1) const;
};

struct Norm {
  const bf16* weight;  // null: all ones
  int64_t kind;        // NormKind
  float eps;
  const bf16* bias;    // of a layer norm; null: none

  // Of `heads` vectors of D in each of `rows` lines, `step` elements apart.
  void in_place(bf16* x, long step, long rows, long heads, long D) const {
    if (kind) quire_norm(x, step, weight, x, step, rows, heads, D, eps, (int)kind, bias);
  }
  // x, residual = norm(x + residual), x + residual.
  void add(bf16* x, bf16* residual, long rows, long D) const {
    quire_add_norm(x, residual, weight, rows, D, eps, (int)kind, bias);
  }
};

struct Mixture;
struct DeltaNet;
struct Mamba2Mixer;

struct Layer {  // fixed once the model is loaded; a half without weights (qkv, delta_net or mamba2_mixer; gate_up or mixture) is not run
  Weight qkv, o, gate_up, down;
  Norm attention_in, attention_out, mlp_in, mlp_out, q_norm, k_norm, v_norm;
  void *keys, *values;
  float *key_scales, *value_scales;  // of a quantized cache
  const float* sinks;
  const DeltaNet* delta_net;  // in place of attention; may be null
  const Mamba2Mixer* mamba2_mixer;       // likewise
  const Mixture* mixture;     // the MLP, in place of gate_up and down; may be null
  RankLink* flat_ranks;       // that split the heads of flat norms; may be null
  int64_t kind, hidden, heads, kv_heads, D, rope, interleaved, block_size, window, act;
  int64_t kv_parts;    // 2: keys and values; 1: keys, which are values before norm and rotation; 0: another layer has them
  int64_t flat_norms;  // q_norm and k_norm are over all heads at once
  int64_t gated;       // after a head's query comes the gate of its output
  int64_t parallel;    // the MLP's input is the attention's
  int64_t kv_copies;   // of flat_ranks: the number of neighbours with the same keys and values
  int64_t joined;      // x is [tokens, 2 * hidden], what attention reads; and the residual is there (Speculator)
  float scale, softcap, residual_scale;
};

struct Step {  // shared by the layers of a group
  const float *cos, *sin, *query_scale;  // query_scale may be null
  const int64_t *positions, *slots;      // positions: lines of these three; null: a token's number
  const int64_t *state_rows, *kept;      // of recurrent layers; kept may be null (recurrent.h)
  const int *table, *starts, *lengths;
  int64_t tokens, rows, table_step, pairs;
};

}  // namespace quire

EXPORT void quire_layers(const quire::Layer* const* layers, const int64_t* groups, long count, const quire::Step* const* steps,
                         long tokens, const int64_t* adapters, quire::bf16* x, quire::bf16* residual, int first,
                         const quire::Norm* norm);
