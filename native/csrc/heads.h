// What happens to the rows of the q, k and v product before attention: norm of heads, rotation, and the write of K, V.
//
// Not the product and not attention. Every step rounds to bf16 where models/layers.py does. Letters: T rows, H query
// heads, Hkv KV heads, Dh width of a head of q and k, Dv of v, R elements of a head that are rotated.
#pragma once

#include <cstdint>

#include "team.h"
#include "vec.h"

namespace moewe {

enum HeadNorm : int32_t { kNoHeadNorm = 0, kEachHead = 1, kAllHeads = 2, kUnitHead = 3 };

struct QkvEpilogue {
  const bf16* qkv;           // [T, stride]: q [H, Dh], k [Hkv, Dh], v [Hkv, Dv] of each row
  bf16* q;                   // [T, H, Dh]
  void* k_cache;             // [slots, Hkv, Dh] of the layer
  void* v_cache;             // [slots, Hkv, Dv]
  bf16* k_scales;            // [slots, Hkv] of a format with scales, else null
  bf16* v_scales;
  const int64_t* slots;      // [T]; -1: K and V of the row are not kept
  const float* cos;          // [T, R] as models/rotary.py lays them out: the element that is subtracted has its sin negated
  const float* sin;          // null: no rotation
  const float* temperature;  // [T], factor on the queries, or null
  const bf16* norm_weights;  // [H + Hkv, Dh], or null for a norm without weights
  int64_t rows, stride;
  int32_t heads, kv_heads, head_dim, value_dim, rotary_dim;
  int32_t interleaved;        // 1: pairs that turn stand side by side; 0: half of R apart
  int32_t head_norm;          // HeadNorm
  int32_t norm_after_rotary;
  int32_t kv_format;          // KvFormat
  float eps;
};

void qkv_epilogue(Team& team, const QkvEpilogue& args);

// RMSNorm of `width` elements in place: rounded before the weights, if there are any, and after.
void norm_part(float* values, int64_t width, const bf16* weights, float eps);

// Turns the first `width` of each of `heads` heads, `head_dim` apart, in place: in f32, not rounded.
void rotate_heads(float* values, int64_t heads, int64_t head_dim, int64_t width, bool interleaved, const float* cos,
                  const float* sin);

}  // namespace moewe
