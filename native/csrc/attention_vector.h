// The products of attention without tile instructions: a score is a sum over lanes, values are added row by row.
//
// The same arguments as the products of attention_amx.h have after packing, but rows of K and V as they are stored, one
// pointer a key, null for a key that no row sees. Weights stay f32.
#pragma once

#include <algorithm>

#include "attention_tile.h"

namespace moewe {

// queries [lanes][padded], zeros behind `width`; scores [key][16] of keys [begin, end).
template <int R>
inline void score_rows(const bf16* key, const float* queries, int64_t padded, int64_t width, float* scores) {
  f32x16 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = f32x16::zero();
  for (int64_t i = 0; i < padded; i += 16) {
    const f32x16 here = i + 16 <= width ? f32x16::load(key + i) : f32x16::load(key + i, static_cast<int>(width - i));
    for (int r = 0; r < R; ++r) sums[r] = fma(f32x16::load(queries + r * padded + i), here, sums[r]);
  }
  for (int r = 0; r < R; ++r) scores[r] = sum(sums[r]);
}

inline void score(const bf16* const* keys, int begin, int end, const float* queries, int64_t lanes, int64_t width,
                  float* scores) {
  const int64_t padded = (width + 15) / 16 * 16;
  for (int key = begin; key < end; ++key) {
    float* to = scores + key * kQueries;
    f32x16::zero().store(to);
    if (!keys[key]) continue;
    int64_t lane = 0;
    for (; lane + 4 <= lanes; lane += 4) score_rows<4>(keys[key], queries + lane * padded, padded, width, to + lane);
    for (; lane < lanes; ++lane) score_rows<1>(keys[key], queries + lane * padded, padded, width, to + lane);
  }
}

template <int R>
inline void add_value_rows(const bf16* const* values, int begin, int end, const float* weights, int64_t width,
                           int64_t stride, float* sums) {
  for (int64_t i = 0; i < width; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, width - i));
    f32x16 here[R];
    for (int r = 0; r < R; ++r) here[r] = f32x16::load(sums + r * stride + i);
    for (int key = begin; key < end; ++key) {
      if (!values[key]) continue;
      const f32x16 value = n == 16 ? f32x16::load(values[key] + i) : f32x16::load(values[key] + i, n);
      for (int r = 0; r < R; ++r) here[r] = fma(f32x16(weights[key * kQueries + r]), value, here[r]);
    }
    for (int r = 0; r < R; ++r) here[r].store(sums + r * stride + i);
  }
}

// sums [lanes][stride] += weights [key][16] times values of keys [begin, end).
inline void add_values(const bf16* const* values, int begin, int end, const float* weights, int64_t lanes,
                       int64_t width, int64_t stride, float* sums) {
  int64_t lane = 0;
  for (; lane + 4 <= lanes; lane += 4)
    add_value_rows<4>(values, begin, end, weights + lane, width, stride, sums + lane * stride);
  for (; lane < lanes; ++lane)
    add_value_rows<1>(values, begin, end, weights + lane, width, stride, sums + lane * stride);
}

}  // namespace moewe
