// The norms around the blocks of a layer, with the residual stream that they read: RMSNorm, and LayerNorm with a bias.
//
// Not the norm of heads (heads.h). Sums run in f32, in one order for a width. RMSNorm rounds to bf16 before the weight
// is applied and once after, as models/layers.py does; LayerNorm rounds once. Letters: T rows, D width.
#pragma once

#include <cstdint>

#include "team.h"
#include "vec.h"

namespace moewe {

enum NormKind : int32_t { kRmsNorm = 0, kLayerNorm = 1 };

struct Norm {
  bf16* x;             // [T, D] the residual stream
  const bf16* added;   // [T, D] what a block adds to it before it is normed, or null
  const bf16* weight;  // [D]
  const bf16* bias;    // [D] of a LayerNorm
  bf16* out;           // [T, D], or tiles of activations (see tiles.h) with zero rows and columns as padding
  int64_t rows, width;
  float eps;
  float multiplier;    // on what is added, rounded to bf16 if it is not 1
  int32_t kind;        // NormKind
  int32_t tiles;       // 1: `out` is tiles
  int32_t norms_added; // 1: norm what is added instead of the sum; `out` is not written
};

void norm(Team& team, const Norm& args);

// What RMSNorm multiplies a row with: 1 / sqrt(mean of squares + eps). `width` floats, 64-byte vectors at a time.
float inverse_rms(const float* values, int64_t width, float eps);

}  // namespace moewe
