// The router of a MoE layer: logits in f32, the experts of each token and their weights, and the order of rows by slot.
//
// Not an exchange and no expert: what a token's row goes through afterwards is other files' work. Letters: T tokens,
// D width, E experts, K choices a token, S slots that choices may name, M choices that were not dropped (M <= T * K).
#pragma once

#include <cstdint>

#include "team.h"
#include "vec.h"

namespace moewe {

enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSparsemixer = 2 };
enum GroupScore : int32_t { kBestTwo = 0, kBest = 1 };

struct Route {
  const bf16* x;                // [T, D]
  const float* router;          // [ceil(E / 16)][D][16]: the router's columns of 16 experts after each other, zero-padded
  const float* router_bias;     // [E] or null
  const float* selection_bias;  // [E] or null; chooses, never weighs
  const int32_t* slot_of;       // [E]: the slot that stands for an expert, -1 drops it; null: its own number
  int64_t tokens, width, experts, slots;
  int32_t top_k, scoring, renormalize, num_groups, top_groups, group_score;
  float min_weight_sum, scaling_factor;
  float jitter;              // of kSparsemixer
  float* logits;             // scratch [T, ceil(E / 16) * 16]
  int32_t* expert_ids;       // [T, K] logical, best first
  float* weights;            // [T, K]
  int32_t* slot_ids;         // [T, K]
  int32_t* row_tokens;       // [M] token of each row; rows stand by slot, then token, then k
  int32_t* offsets;          // [S + 1]: rows of slot s are [offsets[s], offsets[s + 1])
  int32_t* rows;             // [T, K] row of each choice, -1 for a dropped one
  int64_t* tokens_per_slot;  // [S]; null: rows are not sorted, since an exchange will do it
};

// Logits, choice and weights. All outputs are there for the whole team when it returns.
void route(Team& team, const Route& args);

}  // namespace moewe
