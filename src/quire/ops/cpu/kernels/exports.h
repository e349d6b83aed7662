// The functions that Python calls, beside the functions in layer.h, step.h and layout.h. bindings.py reads types from these headers:
// pointers, int, long and float, by value.
#pragma once
#include "common.h"
#include "sampling.h"

EXPORT int quire_init();
EXPORT int quire_threads();

EXPORT void quire_linear(const quire::bf16* x, long x_row, const quire::bf16* w, const quire::bf16* bias, quire::bf16* y,
                         long y_row, long rows, long outs, long ins, int act);
EXPORT void quire_linear_int8(const quire::bf16* x, long x_row, const int8_t* w, const float* w_scale,
                              const int32_t* w_sum, const quire::bf16* bias, quire::bf16* y, long y_row, long rows,
                              long outs, long ins, int act);
EXPORT void quire_linear_int4(const quire::bf16* x, long x_row, const uint8_t* w, const float* w_scale,
                              const uint8_t* w_zero, const uint8_t* codes, const int32_t* order, const quire::bf16* bias,
                              quire::bf16* y, long y_row, long rows, long outs, long ins, long group, int act);
EXPORT void quire_linear_blocks(const quire::bf16* x, long x_row, const uint8_t* w, const int64_t* blocks,
                                const quire::bf16* bias, quire::bf16* y, long y_row, long rows, long outs, long ins, int act);
EXPORT void quire_pack_blocks(const int64_t* numbers, long count);
EXPORT void quire_block_rows(const uint8_t* w, const int64_t* blocks, const int64_t* ids, quire::bf16* y, long rows, long ins);
EXPORT void quire_quantize_rows(const quire::bf16* w, long outs, long ins, int8_t* q, float* scale);
EXPORT void quire_quantize_weights(const int64_t* numbers, long count);
EXPORT void quire_quantize_groups(const quire::bf16* w, long outs, long ins, long group, uint8_t* q, float* scale,
                                  uint8_t* zero);
EXPORT void quire_pack(const quire::bf16* w, quire::bf16* packed, long outs, long filled, long ins, int gated);
EXPORT void quire_pack_weights(const int64_t* parts, long count);
EXPORT void quire_unpack_rows(const quire::bf16* packed, const int64_t* ids, quire::bf16* y, long rows, long ins);
EXPORT void quire_pack_int8(const int8_t* w, int8_t* packed, long outs, long filled, long ins, int gated);

EXPORT void quire_attention(const quire::bf16* q, long q_step, quire::bf16* o, const void* keys, const void* values,
                            const float* key_scales, const float* value_scales, long kind, const int* table,
                            long table_step, const int* starts, const int* lengths, const float* sinks, long rows,
                            long heads, long kv_heads, long D, long E, long block_size, long window, float scale,
                            float softcap);
EXPORT void quire_write_cache(const quire::bf16* from, long step, void* cache, float* scales, const int64_t* slots,
                              long tokens, long heads, long D, long block_size, long kind, int key);

EXPORT void quire_norm(const quire::bf16* x, long step, const quire::bf16* w, quire::bf16* y, long y_step, long rows,
                       long heads, long D, float eps, int kind, const quire::bf16* bias = nullptr);
EXPORT void quire_add_norm(quire::bf16* x, quire::bf16* residual, const quire::bf16* w, long rows, long D, float eps,
                           int kind, const quire::bf16* bias = nullptr);
EXPORT void quire_scale(quire::bf16* x, long step, long rows, long width, float scale, float softcap);
EXPORT void quire_rotate(const quire::bf16* x, long step, const float* cos, const float* sin, quire::bf16* y, long y_step,
                         long rows, long heads, long D, long P, int interleaved);
EXPORT void quire_multiply_sigmoid(quire::bf16* x, const quire::bf16* gate, long gate_row, long gate_step, long rows, long heads, long D);
EXPORT void quire_act_and_mul(const quire::bf16* x, quire::bf16* y, long rows, long I, int act);

EXPORT void quire_masked_argmax(const void* x, long step, int is_bf16, const uint32_t* words, long rows, long V, int64_t* tokens,
                       float* max_logit, float* max_allowed);
EXPORT void quire_mask_logits(float* x, long step, const uint32_t* words, long rows, long V);

EXPORT void quire_draw(const float* x, long step, const int32_t* a, const int32_t* b, const float* floors,
                       const int64_t* last_ids, long rows, long V, int64_t* tokens);
EXPORT void quire_sample(const void* x, long step, int is_bf16, const quire::RowParams* params, const int64_t* positions,
                         long rows, long V, int64_t* tokens, float* max_logit);
EXPORT void quire_cut(const float* x, long step, const quire::RowParams* params, long rows, long V, float* floors,
                      int64_t* last_ids);

EXPORT void quire_causal_conv(const void* x, long step, int is_bf16, const void* w, const void* bias, void* state, long state_step, void* y,
                              long channels, long J, int activate, const int64_t* rows, const int* starts,
                              long count, const int64_t* kept);
EXPORT void quire_linear_recurrence(const void* q, long q_step, const void* k, long k_step, const void* v, long v_step,
                                    const void* raw, long raw_step, const void* write, long write_step, int is_bf16,
                                    const float* bias, const float* a_log, const float* skip, float low, float high,
                                    float* state, long state_step, float* y, long key_heads, long K, long heads, long V, const int64_t* rows,
                                    const int* starts, long count, const int64_t* kept);
EXPORT void quire_selective_scan(const void* x, long x_step, int is_bf16, const float* step, const float* a_log, const void* bs,
                                 long b_step, const void* cs, long c_step, const float* skip, float* state, long state_step, float* y,
                                 long channels, long N, const int64_t* rows, const int* starts, long count, const int64_t* kept);
EXPORT void quire_decaying_sum(const float* x, const float* decay, float* state, long state_step, float* y, long channels,
                               const int64_t* rows, const int* starts, long count, const int64_t* kept);
EXPORT void quire_wkv(const float* k, const float* v, const float* decay, const float* first, float* state, long state_step, float* y,
                      long channels, const int64_t* rows, const int* starts, long count, const int64_t* kept);
EXPORT void quire_gated_rms_norm(const float* x, const void* gate, long gate_step, int is_bf16, const void* w, long w_step,
                                 void* y, long tokens, long groups, long size, float eps, int gate_first);
