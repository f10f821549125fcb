#include "heads.h"

#include <algorithm>

#include "kv_format.h"
#include "norm.h"
#include "scratch.h"

namespace moewe {

namespace {

void round_all(float* values, int64_t width) {  // may round what stands behind, up to a whole vector
  for (int64_t i = 0; i < width; i += 16) f32x16::load(values + i).rounded().store(values + i);
}

void norm_heads(const QkvEpilogue& a, float* values) {
  const int64_t queries = a.heads, all = a.heads + a.kv_heads, width = a.head_dim;
  if (a.head_norm == kAllHeads) {
    norm_part(values, queries * width, a.norm_weights, a.eps);
    norm_part(values + queries * width, (all - queries) * width, a.norm_weights + queries * width, a.eps);
    return;
  }
  for (int64_t head = 0; head < all; ++head)
    norm_part(values + head * width, width, a.norm_weights ? a.norm_weights + head * width : nullptr, a.eps);
}

void do_row(const QkvEpilogue& a, int64_t row, float* values) {
  const bf16* from = a.qkv + row * a.stride;
  const int64_t q_width = a.heads * a.head_dim, k_width = a.kv_heads * a.head_dim, width = q_width + k_width;
  for (int64_t i = 0; i < width; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, width - i));
    f32x16::load(from + i, n).store(values + i);
  }
  if (a.head_norm != kNoHeadNorm && !a.norm_after_rotary) norm_heads(a, values);
  if (a.cos) {
    rotate_heads(values, a.heads + a.kv_heads, a.head_dim, a.rotary_dim, a.interleaved, a.cos + row * a.rotary_dim,
                 a.sin + row * a.rotary_dim);
    round_all(values, width);
  }
  if (a.head_norm != kNoHeadNorm && a.norm_after_rotary) norm_heads(a, values);
  bf16* q = a.q + row * q_width;
  const f32x16 temperature(a.temperature ? a.temperature[row] : 1.0f);
  for (int64_t i = 0; i < q_width; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, q_width - i));
    (f32x16::load(values + i) * temperature).store(q + i, n);
  }
  const int64_t slot = a.slots[row];
  if (slot < 0) return;
  store_heads(a.kv_format, values + q_width, slot, a.kv_heads, a.head_dim, a.k_cache, a.k_scales);
  const int64_t v_width = a.kv_heads * a.value_dim;
  for (int64_t i = 0; i < v_width; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, v_width - i));
    f32x16::load(from + width + i, n).store(values + i);
  }
  store_heads(a.kv_format, values, slot, a.kv_heads, a.value_dim, a.v_cache, a.v_scales);
}

}  // namespace

void norm_part(float* values, int64_t width, const bf16* weights, float eps) {
  const f32x16 factor(inverse_rms(values, width, eps));
  for (int64_t i = 0; i < width; i += 16) {
    const int n = static_cast<int>(std::min<int64_t>(16, width - i));
    f32x16 here = (f32x16::load(values + i, n) * factor).rounded();
    if (weights) here = (here * f32x16::load(weights + i, n)).rounded();
    here.store(values + i, n);
  }
}

void rotate_heads(float* values, int64_t heads, int64_t head_dim, int64_t width, bool interleaved, const float* cos,
                  const float* sin) {
  const int64_t half = width / 2;
  for (int64_t head = 0; head < heads; ++head) {
    float* here = values + head * head_dim;
    if (interleaved) {
      for (int64_t i = 0; i < width; i += 2) {
        const float a = here[i], b = here[i + 1];
        here[i] = __builtin_fmaf(b, sin[i], a * cos[i]);
        here[i + 1] = __builtin_fmaf(a, sin[i + 1], b * cos[i + 1]);
      }
    } else {
      float* there = here + half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = here[i], b = there[i];
        here[i] = __builtin_fmaf(b, sin[i], a * cos[i]);
        there[i] = __builtin_fmaf(a, sin[i + half], b * cos[i + half]);
      }
    }
  }
}

void qkv_epilogue(Team& team, const QkvEpilogue& a) {
  const int64_t width = std::max<int64_t>((a.heads + a.kv_heads) * a.head_dim, a.kv_heads * a.value_dim);
  auto* values = static_cast<float*>(own_scratch().take((width + 16) * 4));
  team.each(a.rows, [&](int64_t row) { do_row(a, row, values); });
}

}  // namespace moewe

extern "C" void moewe_qkv_epilogue(const moewe::QkvEpilogue* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::qkv_epilogue(team, *args); });
}
