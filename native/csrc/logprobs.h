// Log-probabilities of rows of logits: of one token each, with its rank, and of the most likely ones.
//
// Not sampling (draw.h) and not the logits (linear.h). No sort of the vocabulary: a heap holds the largest seen so far.
// Sums run in one order for a width, and a row never looks at another one. Letters: N answers, V logits a row, n most
// likely ones.
#pragma once

#include <cstdint>

#include "team.h"

namespace moewe {

struct RowLogprobs {
  const float* logits;      // [rows, V], without NaN; the best of a row is finite
  const int64_t* row_ids;   // [N] the row of each answer
  const int64_t* tokens;    // [N], each in [0, V)
  int64_t answers;          // N
  int64_t width, num_top;   // V; n, at most V
  float* chosen;            // [N], of the token
  int64_t* ranks;           // [N] how many logits are at least as large as the token's
  int64_t* top_ids;         // [N, n], largest first, of equal ones the lower id
  float* top;               // [N, n]
  float least;              // what is below is reported as this
};

void row_logprobs(Team& team, const RowLogprobs& args);

}  // namespace moewe

extern "C" void moewe_row_logprobs(const moewe::RowLogprobs* args);
