// The gated FFNs of a MoE layer: rows sorted by slot -> w13 -> activation -> w2, and what may follow: the combine.
//
// Not routing (routing.h) and not an exchange. A dense or shared FFN is one slot that all rows go through.
// Letters: T tokens, K choices a token, M rows, S slots, D width, F expert width.
#pragma once

#include "matrix.h"
#include "team.h"
#include "vec.h"

namespace moewe {

enum Activation : int32_t { kSilu = 0, kClamped = 1 };

struct ExpertFfn {
  const bf16* x;                   // [T, D], rows x_stride elements apart
  int64_t x_stride;
  const int32_t* row_tokens;       // [M] row of x that each sorted row is; null: row i is row i of x
  const int64_t* tokens_per_slot;  // [S], sums to M; null: one slot has all `rows`
  int64_t slots, rows;             // S, and M or more (for scratch, where M is not known yet)
  Matrix w13;                      // [S, 2F, D], gate and up
  Matrix w2;                       // [S, D, F]
  const bf16* b13;                 // [S, 2F] or null
  const bf16* b2;                  // [S, D] or null
  int32_t activation;              // an Activation
  float alpha, limit;              // of kClamped
  bf16* out;                       // [M, D], rounded, unweighted
  void* scratch;                   // expert_ffn_scratch bytes, aligned to 64
};

// Sum of each token's rows with their weights: ascending k, in f32 from zero, rounded once; then, each rounded, plus
// what shared experts gave, and the residual plus that.
struct Combine {
  const bf16* rows;       // [M, D]
  const int32_t* row_of;  // [T, K] row of each choice, -1 for a dropped one
  const float* weights;   // [T, K]; those of dropped choices are not read
  const bf16* shared;     // [T, D] or null
  const bf16* residual;   // [T, D] or null; may be `out`
  bf16* out;              // [T, D]
  int64_t tokens, width;  // T, D
  int32_t top_k;          // K
};

// For at most so many rows and slots, so that it can be known before the rows are.
int64_t expert_ffn_scratch(int64_t rows, int64_t slots, int64_t width, int64_t ffn_width);
void expert_ffn(Team& team, const ExpertFfn& args);
void combine(Team& team, const Combine& args);

}  // namespace moewe

extern "C" {
void moewe_expert_ffn(const moewe::ExpertFfn* args);  // finds scratch of its own
void moewe_combine(const moewe::Combine* args);
// Both: `combine` reads what `ffn` wrote.
void moewe_expert_ffn_combine(const moewe::ExpertFfn* ffn, const moewe::Combine* combine);
}
