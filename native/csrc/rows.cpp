#include "rows.h"

#include <algorithm>
#include <cmath>

namespace moewe {

namespace {

template <class T>
void scan_row(const T* values, int64_t width, int64_t* best, uint8_t* finite) {
  f32x16 most[2] = {f32x16(-INFINITY), f32x16(-INFINITY)}, ill[2] = {f32x16::zero(), f32x16::zero()};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
    for (int j = 0; j < 2; ++j) {
      const f32x16 here = f32x16::load(values + i + j * 16);
      most[j] = max(here, most[j]);
      ill[j] = fma(here, f32x16::zero(), ill[j]);  // 0 for any finite number, NaN for all else
    }
  f32x16 highest = max(most[0], most[1]), sick = ill[0] + ill[1];
  for (; i < width; i += 16) {
    const int left = static_cast<int>(std::min<int64_t>(16, width - i));
    const f32x16 here = f32x16::load(values + i, left);
    sick = fma(here, f32x16::zero(), sick);
    float tail[16];
    here.store(tail);
    std::fill(tail + left, tail + 16, -INFINITY);
    highest = max(f32x16::load(tail), highest);
  }
  if (finite) *finite = sum(sick) == 0.0f;
  if (!best) return;
  const float top = largest(highest);
  int64_t at = 0;
  for (; at + 16 <= width && largest(f32x16::load(values + at)) < top; at += 16) {}
  for (int64_t end = std::min(at + 16, width); at < end; ++at) {
    float here;
    f32x16::load(values + at, 1).store(&here, 1);
    if (here == top) break;
  }
  *best = std::min(at, width - 1);  // a row of NaN names some place, too
}

}  // namespace

void scan_rows(Team& team, const ScanRows& a) {
  team.each(a.rows, [&](int64_t i) {
    int64_t* best = a.best ? a.best + i : nullptr;
    uint8_t* finite = a.finite ? a.finite + i : nullptr;
    if (a.is_bf16) scan_row(static_cast<const bf16*>(a.values) + i * a.width, a.width, best, finite);
    else scan_row(static_cast<const float*>(a.values) + i * a.width, a.width, best, finite);
  });
}

}  // namespace moewe

extern "C" void moewe_scan_rows(const moewe::ScanRows* args) {
  const int64_t bytes = args->rows * args->width * (args->is_bf16 ? 2 : 4);
  moewe::on_team_for(bytes, [&](moewe::Team& team) { moewe::scan_rows(team, *args); });
}
