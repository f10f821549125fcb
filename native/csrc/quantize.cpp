#include "quantize.h"

#include <cmath>

#include "formats.h"
#include "scratch.h"

namespace moewe {

namespace {

constexpr float kTiny = 1e-30f;  // nothing larger than this is zero

// n numbers of a row, from element `at` of all rows on, as floats, and zeros behind them up to `padded`.
void read_row(const Quantize& args, int64_t at, int64_t n, int64_t padded, float* to) {
  if (args.source == kSourceF32) {
    std::memcpy(to, static_cast<const float*>(args.rows) + at, n * sizeof(float));
  } else {
    const auto* from = static_cast<const uint16_t*>(args.rows) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = args.source == kSourceBf16 ? to_float(from[i]) : _cvtsh_ss(from[i]);
  }
  std::memset(to + n, 0, (padded - n) * sizeof(float));
}

// The number of largest magnitude among n, a multiple of 16; NaN where one is not finite.
float extreme(const float* values, int64_t n) {
  f32x16 high = f32x16::zero(), low = high, odd = high;
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 here = f32x16::load(values + i);
    high = max(here, high);
    low = max(f32x16::zero() - here, low);
    odd = fma(here, f32x16::zero(), odd);
  }
  const float most = largest(high), least = largest(low), check = sum(odd);
  return check != check ? check : most >= least ? most : -least;
}

f32x16 nearest(f32x16 values, float low, float high) { return round(max(f32x16(low), min(f32x16(high), values))); }

// One output of a column tile; values are padded with zeros to whole tiles.
void write_int8(const float* values, int64_t depth, int column, int8_t* tiles, float* scales) {
  const float end = std::fabs(extreme(values, depth * kByteDepth));
  scales[column] = end <= kTiny ? 0.0f : end / 127.0f;  // NaN stays
  const f32x16 scale(end > kTiny ? scales[column] : INFINITY);
  for (int64_t k = 0; k < depth * kByteDepth; k += 16) {
    alignas(16) int8_t bytes[16];
    store_bytes(nearest(f32x16::load(values + k) / scale, -127.0f, 127.0f), bytes);
    for (int i = 0; i < 16; i += 4) std::memcpy(tiles + (k + i) / 4 * 64 + column * 4, bytes + i, 4);
  }
}

float squared_error(const float* values, int64_t n, float scale) {
  const f32x16 factor(1.0f / scale), back(-scale);
  f32x16 errors = f32x16::zero();
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 here = f32x16::load(values + i), error = fma(nearest(here * factor, -8.0f, 7.0f), back, here);
    errors = fma(error, error, errors);
  }
  return sum(errors);
}

// The scale of a group, as bf16; zero for a group of zeros, NaN for one that is not finite.
bf16 scale_of(const float* values, int64_t n) {
  const float end = extreme(values, n);
  if (!(std::fabs(end) > kTiny)) return to_bf16(end != end ? end : 0.0f);
  // What the extreme is divided by. -8 comes first: it wins where the group fits as well with another.
  constexpr float kEnds[] = {-8.0f, -8.5f, -7.5f, -9.0f, -7.0f, 7.0f, 7.5f, 8.0f, 8.5f};
  bf16 best = 0;
  float least = INFINITY;
  for (const float to : kEnds) {
    const bf16 scale = to_bf16(end / to);
    const float error = squared_error(values, n, to_float(scale));
    if (error < least) least = error, best = scale;
  }
  return best;
}

void write_int4(const float* values, int64_t groups, int64_t group, int column, uint8_t* nibbles, bf16* scales) {
  for (int64_t g = 0; g < groups; ++g) {
    const float* here = values + g * group;
    const bf16 rounded = scale_of(here, group);
    const float scale = to_float(rounded), factor = std::fabs(scale) > 0.0f ? 1.0f / scale : 0.0f;
    scales[g * kColumns + column] = rounded;
    for (int64_t i = 0; i < group; i += 16) {
      const int64_t k = g * group + i;
      alignas(16) int8_t codes[16];
      store_bytes(nearest(f32x16::load(here + i) * f32x16(factor), -8.0f, 7.0f) + f32x16(8.0f), codes);
      uint8_t* to = nibbles + k / Int4::kChunk * Int4::kChunkBytes + column * 4;
      for (int j = 0; j < 16; ++j) {  // the first half of a chunk is low nibbles, the second high ones
        uint8_t& byte = to[j / 4 * 64 + j % 4];
        byte = k % Int4::kChunk == 0 ? static_cast<uint8_t>(codes[j] & 15)
                                     : static_cast<uint8_t>(byte | (codes[j] & 15) << 4);
      }
    }
  }
}

}  // namespace

void quantize(Team& team, const Quantize& args) {
  const Matrix& matrix = args.matrix;
  const bool four_bits = matrix.format == kFormatInt4;
  const int64_t unit = four_bits ? matrix.group : kByteDepth, units = whole(matrix.columns, unit);
  const int64_t tiles = column_tiles(matrix.rows, args.gate_up), padded = units * unit;
  team.each(args.stack * tiles, [&](int64_t i) {
    const Band band = band_of(matrix.rows, args.gate_up, i % tiles);
    const int64_t first = i / tiles * matrix.rows + band.row;
    auto* values = static_cast<float*>(own_scratch().take(padded * sizeof(float)));
    for (int column = 0; column < kColumns; ++column) {
      const bool there = column < band.count;  // a lacking output is zeros
      read_row(args, there ? (first + column) * matrix.columns : 0, there ? matrix.columns : 0, padded, values);
      if (four_bits) {
        write_int4(values, units, unit, column,
                   static_cast<uint8_t*>(const_cast<void*>(matrix.data)) + i * padded * kColumns / 2,
                   static_cast<bf16*>(const_cast<void*>(matrix.scales)) + i * units * kColumns);
      } else {
        write_int8(values, units, column, static_cast<int8_t*>(const_cast<void*>(matrix.data)) + i * padded * kColumns,
                   static_cast<float*>(const_cast<void*>(matrix.scales)) + i * kColumns);
      }
    }
  });
}

}  // namespace moewe

extern "C" void moewe_quantize(const moewe::Quantize* args) {
  moewe::on_team([args](moewe::Team& team) { moewe::quantize(team, *args); });
}
