// One tile of keys for 16 query rows: scores, the step of the online softmax, and the sum of values.
//
// Not the walk over tiles (attention.cpp). Scores stand with keys in rows and the 16 queries in lanes, [key][16] f32:
// the softmax then needs no sums across lanes, and scales and masks of a key are one number. A lane's bits depend on
// no other lane. Keys that a lane does not see weigh exactly 0, so that a tile of which it sees none changes nothing.
#pragma once

#include <cmath>

#include "attention.h"
#include "tiles.h"

namespace moewe {

constexpr int kHalf = 32;     // keys: the depth of a product with values
constexpr int kQueries = 16;  // lanes
constexpr float kLowest = -3e38f;
constexpr float kLog2E = 1.44269504f;

#if defined(__AVX512F__)
inline f32x16 where_between(float key, f32x16 low, f32x16 high, f32x16 seen, f32x16 unseen) {
  const __m512 at = _mm512_set1_ps(key);
  const __mmask16 is_seen = _mm512_cmp_ps_mask(low.v, at, _CMP_LE_OQ) & _mm512_cmp_ps_mask(at, high.v, _CMP_LE_OQ);
  return _mm512_mask_blend_ps(is_seen, unseen.v, seen.v);
}
inline bool all_ones(f32x16 a) { return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0; }
#else
inline __m256 blend_between(__m256 at, __m256 low, __m256 high, __m256 seen, __m256 unseen) {
  const __m256 is_seen = _mm256_and_ps(_mm256_cmp_ps(low, at, _CMP_LE_OQ), _mm256_cmp_ps(at, high, _CMP_LE_OQ));
  return _mm256_blendv_ps(unseen, seen, is_seen);
}
inline f32x16 where_between(float key, f32x16 low, f32x16 high, f32x16 seen, f32x16 unseen) {
  const __m256 at = _mm256_set1_ps(key);
  return {blend_between(at, low.lo, high.lo, seen.lo, unseen.lo), blend_between(at, low.hi, high.hi, seen.hi, unseen.hi)};
}
inline bool all_ones(f32x16 a) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, one, _CMP_NEQ_UQ), _mm256_cmp_ps(a.hi, one, _CMP_NEQ_UQ))) == 0;
}
#endif

// 2^a for a <= 0, within 3e-6 of it: weights are rounded to bf16. Exactly 1 at 0; below -126 as at -126; NaN stays NaN.
inline f32x16 exp2_below(f32x16 a) {
  a = max(f32x16(-126.0f), a);
  const f32x16 n = round(a), r = a - n;
  f32x16 p = fma(f32x16(0.009582853876f), r, f32x16(0.0559064262f));
  p = fma(p, r, f32x16(0.2402409911f));
  p = fma(p, r, f32x16(0.6931241751f));
  return scale(fma(p, r, f32x16(1.0f)), n);
}

// What is kept of 16 query rows from tile to tile. Lanes behind the last row repeat it.
struct Queries {
  float most[kQueries], total[kQueries];      // largest scaled score times log2 e, and the sum of weights below it
  float low[kQueries], high[kQueries];        // scratch: first and last key of the tile at hand that a lane sees
  int64_t first[kQueries], last[kQueries];    // positions that a lane sees
  int64_t first_min, first_max, last_min, last_max;  // over all lanes
  int64_t lanes;
};

struct SoftmaxArgs {
  float factor;           // scale * log2 e
  float cap, inverse_cap; // of scaled scores, times log2 e; scale / cap. 0: no cap
  const float* k_scales;  // [kKeys] of the tile, or null
  const float* v_scales;
};

// Turns scores of keys [begin, end), whole halves, into weights below the new maximum. Returns what the sums so far,
// and all values that were added up, must be multiplied with.
template <bool Masked, bool Scaled>
inline f32x16 softmax_step(const SoftmaxArgs& a, Queries& queries, int begin, int end, float* scores) {
  f32x16 low, high;
  if constexpr (Masked) low = f32x16::load(queries.low), high = f32x16::load(queries.high);
  f32x16 tops[4] = {f32x16(-INFINITY), f32x16(-INFINITY), f32x16(-INFINITY), f32x16(-INFINITY)};
  float factor = a.factor;
  const bool stores = Masked || Scaled || a.cap != 0.0f;
  if (a.cap != 0.0f) factor = 1.0f;
  for (int key = begin; key < end; key += 4)
    for (int j = 0; j < 4; ++j) {
      f32x16 here = f32x16::load(scores + (key + j) * kQueries);
      if constexpr (Scaled) here = here * f32x16(a.k_scales[key + j]);
      if (a.cap != 0.0f) {  // tanh(x) = 1 - 2 / (e^2x + 1)
        const f32x16 grown = exp(here * f32x16(2.0f * a.inverse_cap)) + f32x16(1.0f);
        here = f32x16(a.cap) * (f32x16(1.0f) - f32x16(2.0f) / grown);
      }
      if constexpr (Masked) here = where_between(static_cast<float>(key + j), low, high, here, f32x16(-INFINITY));
      if (stores) here.store(scores + (key + j) * kQueries);
      tops[j] = max(tops[j], here);  // a NaN need not stay in `tops`: its weight will be NaN
    }
  const f32x16 before = f32x16::load(queries.most);
  const f32x16 most = max(before, max(max(tops[0], tops[1]), max(tops[2], tops[3])) * f32x16(factor));
  const f32x16 correction = exp2_below(before - most), below = f32x16::zero() - most;
  f32x16 sums[4] = {f32x16::zero(), f32x16::zero(), f32x16::zero(), f32x16::zero()};
  for (int key = begin; key < end; key += 4)
    for (int j = 0; j < 4; ++j) {
      f32x16 weight = exp2_below(fma(f32x16::load(scores + (key + j) * kQueries), f32x16(factor), below));
      if constexpr (Masked) weight = where_between(static_cast<float>(key + j), low, high, weight, f32x16::zero());
      sums[j] = sums[j] + weight;
      if constexpr (Scaled) weight = weight * f32x16(a.v_scales[key + j]);
      // Once more: zero times a scale that is NaN is not zero.
      if constexpr (Masked && Scaled)
        weight = where_between(static_cast<float>(key + j), low, high, weight, f32x16::zero());
      weight.store(scores + (key + j) * kQueries);
    }
  const f32x16 total = f32x16::load(queries.total) * correction;
  (total + ((sums[0] + sums[1]) + (sums[2] + sums[3]))).store(queries.total);
  most.store(queries.most);
  return correction;
}

inline f32x16 softmax_step(const SoftmaxArgs& a, Queries& queries, bool masked, int begin, int end, float* scores) {
  const bool scaled = a.k_scales != nullptr;
  if (masked)
    return scaled ? softmax_step<true, true>(a, queries, begin, end, scores)
                  : softmax_step<true, false>(a, queries, begin, end, scores);
  return scaled ? softmax_step<false, true>(a, queries, begin, end, scores)
                : softmax_step<false, false>(a, queries, begin, end, scores);
}

// Multiplies the values added up so far, [16][stride].
inline void rescale(f32x16 correction, float* sums, int64_t stride, int64_t lanes) {
  if (all_ones(correction)) return;
  float factors[kQueries];
  correction.store(factors);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    if (factors[lane] == 1.0f) continue;
    for (int64_t i = 0; i < stride; i += 16) {
      float* at = sums + lane * stride + i;
      (f32x16::load(at) * f32x16(factors[lane])).store(at);
    }
  }
}

}  // namespace moewe
