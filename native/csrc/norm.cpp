#include "norm.h"

#include <algorithm>
#include <cmath>

#include "scratch.h"
#include "tiles.h"

namespace moewe {

namespace {

int lanes(int64_t at, int64_t width) { return static_cast<int>(std::min<int64_t>(16, width - at)); }

// Sums f(values at i) over vectors of 16; two of them at a time, so that additions need not wait for each other.
template <class F>
float sum_of(const float* values, int64_t width, F&& f) {
  f32x16 sums[2] = {f32x16::zero(), f32x16::zero()};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
    for (int j = 0; j < 2; ++j) sums[j] = f(f32x16::load(values + i + j * 16), sums[j]);
  for (int j = 0; i + 16 <= width; i += 16, j ^= 1) sums[j] = f(f32x16::load(values + i), sums[j]);
  float total = sum(sums[0] + sums[1]);
  if (i < width) {
    float tail[16] = {};
    f(f32x16::load(values + i, lanes(i, width)), f32x16::zero()).store(tail);
    for (int j = 0; j < lanes(i, width); ++j) total += tail[j];
  }
  return total;
}

// Where element `column` (a multiple of 16) of a row goes.
bf16* place(const Norm& a, int64_t row, int64_t column) {
  if (!a.tiles) return a.out + row * a.width + column;
  const int64_t depth = (a.width + kDepth - 1) / kDepth;
  return a.out + ((row / kRows) * depth + column / kDepth) * kTile + (row % kRows) * kDepth + column % kDepth;
}

// The normed values, rounded, of 16 elements of a row.
struct Scaled {
  const Norm& a;
  float factor, shift;

  f32x16 operator()(const float* values, int64_t i, int n) const {
    const f32x16 weight = f32x16::load(a.weight + i, n), here = f32x16::load(values + i, n) * f32x16(factor);
    if (a.kind == kRmsNorm) return (here.rounded() * weight).rounded();
    return ((here + f32x16(shift)) * weight + f32x16::load(a.bias + i, n)).rounded();
  }
};

Scaled scaled(const Norm& a, const float* values) {
  if (a.kind == kRmsNorm) return {a, inverse_rms(values, a.width, a.eps), 0.0f};
  const float width = static_cast<float>(a.width);
  const float mean = sum_of(values, a.width, [](f32x16 v, f32x16 s) { return s + v; }) / width;
  const float variance = sum_of(values, a.width, [&](f32x16 v, f32x16 s) {
    const f32x16 distance = v - f32x16(mean);
    return fma(distance, distance, s);
  }) / width;
  const float factor = 1.0f / std::sqrt(variance + a.eps);
  return {a, factor, -mean * factor};
}

f32x16 added_part(const Norm& a, f32x16 added) {
  return a.multiplier == 1.0f ? added : (added * f32x16(a.multiplier)).rounded();
}

void norm_row(const Norm& a, int64_t row, float* values) {
  bf16* x = a.x + row * a.width;
  const bf16* added = a.added ? a.added + row * a.width : nullptr;
  for (int64_t i = 0; i < a.width; i += 16) {
    const int n = lanes(i, a.width);
    f32x16 here = f32x16::load((a.norms_added ? added : x) + i, n);
    if (added && !a.norms_added) {
      here = (here + added_part(a, f32x16::load(added + i, n))).rounded();
      here.store(x + i, n);
    }
    here.store(values + i);
  }
  const Scaled normed = scaled(a, values);
  for (int64_t i = 0; i < a.width; i += 16) {
    const int n = lanes(i, a.width);
    const f32x16 here = normed(values, i, n);
    if (a.norms_added) (f32x16::load(x + i, n) + added_part(a, here)).store(x + i, n);
    else here.store(place(a, row, i), a.tiles ? 16 : n);
  }
}

void zero_columns(const Norm& a, int64_t row, int64_t from) {
  const int64_t end = (a.width + kDepth - 1) / kDepth * kDepth;
  for (int64_t i = from; i < end; i += 16) f32x16::zero().store(place(a, row, i));
}

}  // namespace

float inverse_rms(const float* values, int64_t width, float eps) {
  const float squares = sum_of(values, width, [](f32x16 v, f32x16 s) { return fma(v, v, s); });
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

void norm(Team& team, const Norm& a) {
  const int64_t padded = a.tiles && !a.norms_added ? (a.rows + kRows - 1) / kRows * kRows : a.rows;
  auto* values = static_cast<float*>(own_scratch().take((a.width + 16) * 4));
  team.each(padded, [&](int64_t row) {
    if (row >= a.rows) return zero_columns(a, row, 0);
    norm_row(a, row, values);
    if (a.tiles && !a.norms_added) zero_columns(a, row, (a.width + 15) / 16 * 16);
  });
}

}  // namespace moewe

extern "C" void moewe_norm(const moewe::Norm* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::norm(team, *args); });
}
