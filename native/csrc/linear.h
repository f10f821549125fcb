// y = x W^T + bias over a packed matrix, with what may follow at once: a residual, or results in f32.
//
// Not a norm in front of it and not the experts' products (experts.h). Letters: T rows, K inputs, N outputs.
#pragma once

#include "matrix.h"
#include "team.h"
#include "vec.h"

namespace moewe {

struct Linear {
  const bf16* x;         // [T, K], rows x_stride elements apart
  Matrix weight;         // [N, K]
  const bf16* bias;      // [N] or null
  const bf16* residual;  // [T, N], rows out_stride apart, or null: added to the rounded product
  void* out;             // [T, N] bf16, or f32 unrounded, rows out_stride elements apart; may be `residual`
  int64_t rows;          // T
  int64_t x_stride, out_stride;
  int32_t f32_out;  // not with a residual
  void* scratch;    // linear_scratch bytes, aligned to 64
};

int64_t linear_scratch(const Linear& args);
void linear(Team& team, const Linear& args);

}  // namespace moewe

extern "C" void moewe_linear(const moewe::Linear* args);  // finds scratch of its own
