// One token of each row by chance: temperature, min_p, top_k, top_p, and the distribution function inverted in id order.
//
// Not the random numbers (they come as `chance`) and nothing that requests do to logits before. No sort of the
// vocabulary: weights are counted by the first 16 bits of their float, and only those in the deciding bin are sorted.
// A row never looks at another one.
#pragma once

#include <cstdint>

#include "team.h"

namespace moewe {

struct DrawRows {
  const float* logits;       // [rows, width]; -inf is never drawn; the best of a row is finite
  int64_t rows, width;
  const float* temperature;  // [rows], above 0
  const float* min_p;        // [rows] of the best one's weight; 0 keeps all
  const int64_t* top_k;      // [rows] 0 or less keeps all; of equal weights those of lower id stay
  const double* top_p;       // [rows] of what is left; 1 keeps all
  const double* chance;      // [rows] in [0, 1)
  int64_t* tokens;           // [rows]
};

void draw_rows(Team& team, const DrawRows& args);

}  // namespace moewe
