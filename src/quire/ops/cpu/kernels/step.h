// The model and the rows that step.cpp reads. native/model.py fills in the model, native/step.py the rows.
#pragma once
#include "layer.h"
#include "sampling.h"

namespace quire {

struct Group {  // layers with one block table, one rotary embedding and one scale of queries
  const float *cos, *sin, *query_scale;  // of each position; cos and sin: [positions, pairs]
  int64_t pairs, blocks;                 // blocks: the block table's number
};

struct Model {  // fixed once it is loaded
  Weight head;
  Norm norm;
  const Layer* const* layers;
  const int64_t* group_of_layer;
  const Group* groups;
  const bf16* table;      // the embeddings, [vocab, hidden], or packed
  const int64_t* blocks;  // of a table in blocks of GGUF files, else null
  RankLink* table_ranks;    // each of them has `words` rows of the table; null: this table has all
  const int64_t* recorded;  // numbers of layers, in order, after which a step keeps the residual stream; count + 1: the final norm's output
  bf16* states;             // of these, [num_recorded, state_rows, hidden]
  int64_t count, num_groups, positions, packed, vocab, num_recorded, state_rows, words;
  float embedding_scale, logit_scale, softcap;
};

struct Rows {  // the state of each row, by its number; a step advances tokens and counts
  int32_t* tokens;
  int64_t *num_computed_tokens, *length, *num_drafts;  // num_drafts: the last tokens of `length`, which a step verifies
  const int32_t* const* blocks;  // by group
  const RowParams* params;
  const int64_t* adapters;           // the numbers of their adapters, -1: none; may be null
  const int64_t* rope_offset;        // of each row: what its rotary positions are beyond its places
  int64_t tokens_step, blocks_step;  // from row to row
  int64_t shift;                     // at position i the model reads the token at i + shift: 1 of a speculator
};

struct Speculator {  // guesses tokens from the hidden states of another model, the target (models/speculators)
  Model model;                    // its layers, the norm before the head, and the table and head that it uses
  Weight states;                  // of what the target recorded; no data: that is one state
  Norm embedding_norm, state_norm;
  Weight join;                    // of both, one beside the other; no data: the first layer reads both (Layer::joined)
  const int64_t* target_ids;      // of each token of the head; null: the same
  int64_t target_vocab;
  int64_t normed_residual;        // a joined layer adds to the state after its norm
  int64_t hands_on_sum;           // the next pass takes the state before the last norm
};

struct Work {  // of each of B work items: row, number of tokens to compute, whether it may draw, draft tokens among `tokens`
  const int64_t *row, *tokens, *draws, *drafts;
  long B;
};

}  // namespace quire

EXPORT int quire_step(const quire::Model* model, const quire::Rows* rows, const int64_t* work_4B, long B, int64_t* drawn,
                      float* whole);
EXPORT int quire_draft(const quire::Model* model, const quire::Rows* rows, const int64_t* work_4B, long B, const int64_t* draws,
                       const quire::Speculator* speculator, const quire::bf16* states, int64_t* drawn, float* whole);
