// What latent attention (DeepSeek-AI, 2024) does beside attention itself: one product a head, and the rows around it.
//
// Not the projections in front (linear.h) and not attention, which sees one head of K whose first elements are V. Heads
// of K and V are never made: what would expand a latent to them is multiplied with queries, and with what attention
// returns. Letters: T rows, H heads, C width of the latent, R elements that are rotated, N elements of a query beside
// them.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "team.h"
#include "vec.h"

namespace moewe {

// y[t, h] = x[t, h] W[h]^T, in the order of additions of linear.h: the same bits for any number of rows.
struct HeadLinear {
  const bf16* x;  // [T, H, K]
  bf16* out;      // [T, H, O]
  Matrix weight;  // H matrices [O, K] after each other, bf16
  int64_t rows, heads;
  int64_t x_stride, x_head_stride, out_stride, out_head_stride;  // elements from a row, or a head, to the next
};

// The latent is normed, and rounded before the weights and after; the rest of its row, and of the queries, is rotated.
struct LatentRows {
  const bf16* kv;       // [T, C + R]: the latent, and what all heads of K share beside it
  const bf16* queries;  // [T, H, N + R]
  bf16* q;              // [T, H, C + R]; only the last R elements of a head are written
  void* cache;          // [slots, C + R] of the layer
  bf16* scales;         // [slots] of a format with scales, else null
  const int64_t* slots; // [T]; -1: the row is not kept
  const float* cos;     // [T, R], as QkvEpilogue has them
  const float* sin;
  const bf16* norm;     // [C]
  int64_t rows;
  int32_t heads, kv_rank, rope_dim, nope_dim;
  int32_t interleaved;  // as of QkvEpilogue
  int32_t kv_format;    // KvFormat
  float eps;
};

void head_linear(Team& team, const HeadLinear& args);
void latent_rows(Team& team, const LatentRows& args);

}  // namespace moewe

extern "C" {
void moewe_head_linear(const moewe::HeadLinear* args);
void moewe_latent_rows(const moewe::LatentRows* args);
}
