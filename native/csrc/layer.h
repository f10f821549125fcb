// Decoder layers in one call: norm, attention, norm, and the FFN or the experts, with everything between them.
//
// Not a decoder (embedding and head are models/decoder.py's) and no kernel of its own: the operations of the other files
// in the order of a layer, each over the whole team, so that nothing but they takes time. The same bits as the same
// operations called one by one. Ranks that exchange rows run the attention half alone; an exchange goes on from there.
//
// The residual stream x is [T, D]; `added` [T, D] is what the block before adds to it, and joins it in the next norm.
#pragma once

#include "attention.h"
#include "experts.h"
#include "heads.h"
#include "latent.h"
#include "linear.h"
#include "norm.h"
#include "routing.h"
#include "shm.h"

namespace moewe {

// Latent attention: what makes queries and the row that is kept of a token, and its products a head.
struct Latent {
  Linear kv;           // [C + R]
  Linear q_down;       // to a latent of their own that queries are made from; weight.rows = 0: they are made from x
  Norm q_norm;         // of that latent
  Linear q;            // [H * (N + R)]
  LatentRows rows;
  HeadLinear to_latent;  // from the N elements of a query to C
  HeadLinear to_values;  // from the C elements that attention returns
};

// What is fixed: weights and switches. Pointers to rows, and numbers of rows, are filled in for each step.
struct Layer {
  Norm input_norm, ffn_norm;
  Linear qkv, o;
  QkvEpilogue heads;
  Latent latent;      // in place of `qkv` and `heads` where is_latent
  Attention attention;
  Route route;        // where experts > 0
  ExpertFfn experts;  // routed
  ExpertFfn shared;   // shared experts, or the dense FFN of a layer without experts; slots = 0: none
  const bf16* shared_gate;  // [D] scales what shared experts give by sigmoid(x . gate), or null
  int32_t norm_after;       // norms stand behind the blocks, not in front of them
  int32_t attention_group;  // which of the step's attention batches
  int32_t uses_temperature;  // of the step, on the queries
  int32_t is_latent;
};

// What the marks of a layer end, in the order of time (kDense takes the place of all after kAttended).
enum Mark : int32_t {
  kAttended, kRouted, kPublished, kAllPublished, kDispatched, kExpertsRan, kSharedRan, kAllComputed, kCombined, kDense,
  kMarks
};

// What changes from step to step. Buffers are of the caller.
struct Step {
  int64_t rows;    // T; 0 only where ranks exchange rows
  bf16* x;         // [T, D]
  bf16* added;     // [T, D]
  bf16* normed;    // [T, D]
  bf16* shared;    // [T, D]
  bf16* qkv;       // [T, qkv stride], or queries of latent attention: [T, H, N + R]
  bf16* q;         // [T, H, Dh], Dh = C + R of latent attention
  bf16* attended;  // [T, H, Dv], Dv = C of latent attention
  bf16* kv;        // of latent attention: [T, C + R]
  bf16* q_latent;  // [T, width of the latent of queries]
  bf16* values;    // [T, H, elements of a value]
  const float* cos;          // [T, R]
  const float* sin;
  const float* temperature;  // [T] for layers without rotary, or null
  const AttentionStep* attention;  // one a cache group
  float* logits;             // of the router: [T, E padded to 16]
  int32_t* expert_ids;       // [T, K]
  int32_t* slot_ids;         // [T, K]
  int32_t* row_tokens;       // [T * K]
  int32_t* rows_of;          // [T, K]
  int32_t* offsets;          // [S + 1]
  float* weights;            // [T, K]
  bf16* expert_rows;         // [T * K, D]
  int64_t* tokens_per_slot;  // [MoE layers, slots of this rank], a row for each MoE layer that runs, in order
  int64_t* progress;         // counted up after each half of a layer, or null
  ShmGroup* group;           // ranks that exchange rows, or null
  int32_t* group_row_tokens;  // [most rows of this rank]
  int64_t* marks;             // [layers, kMarks], zeros at first: when each part ended, ns of CLOCK_MONOTONIC; or null
  int64_t bytes_sent;         // out: what the exchange counted
  ShmFault fault;             // out: why the layers ended early, where its kind is not 0; nothing else is valid then
};

}  // namespace moewe

extern "C" {
// Layers from the first on, and the norm behind the last one, which reads what that layer adds; its result is `normed`.
void moewe_layers(const moewe::Layer* const* layers, int64_t count, const moewe::Norm* last, moewe::Step* step);
// Norm, attention, and the norm in front of the FFN. What the FFN reads is `normed`, or `x` where norms stand behind.
// has_added: `added` holds what the layer before adds.
void moewe_attention_half(const moewe::Layer* layer, moewe::Step* step, int32_t has_added);
}
