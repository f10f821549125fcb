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

// The largest magnitude among n numbers, a multiple of 16; NaN where one is not finite.
float largest_magnitude(const float* values, int64_t n) {
  f32x16 most = f32x16::zero(), odd = most;
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 here = f32x16::load(values + i);
    most = max(max(here, f32x16::zero() - here), most);
    odd = fma(here, f32x16::zero(), odd);
  }
  const float check = sum(odd);
  return check != check ? check : largest(most);
}

f32x16 nearest(f32x16 values, float low, float high) { return round(max(f32x16(low), min(f32x16(high), values))); }

// One output of a column tile; values are padded with zeros to whole tiles.
void write_int8(const float* values, int64_t depth, int column, int8_t* tiles, float* scales) {
  const float end = largest_magnitude(values, depth * kByteDepth);
  scales[column] = end <= kTiny ? 0.0f : end / 127.0f;  // NaN stays
  const f32x16 scale(end > kTiny ? scales[column] : INFINITY);
  for (int64_t k = 0; k < depth * kByteDepth; k += 16) {
    alignas(16) int8_t bytes[16];
    store_bytes(nearest(f32x16::load(values + k) / scale, -127.0f, 127.0f), bytes);
    for (int i = 0; i < 16; i += 4) std::memcpy(tiles + (k + i) / 4 * 64 + column * 4, bytes + i, 4);
  }
}

// Sixteen evenly spaced numbers for a group of each of sixteen outputs, in units of the output's scale.
struct Grid {
  f32x16 start, step;  // whole, the step in sixteenths
  // The code of a number. On average half a unit is cut off from what a code stands for.
  f32x16 code(f32x16 value) const {
    return nearest((value - start + f32x16(0.5f)) * f32x16(16.0f) / step, 0.0f, 15.0f);
  }
  // Rounded down: sixteenths less 15/32 are never in the middle between two whole numbers.
  f32x16 number(f32x16 code) const {
    return start + round(fma(step * code, f32x16(1.0f / 16.0f), f32x16(-15.0f / 32.0f)));
  }
};

// What is nearest to numbers `start` + `step` * (0 to 15).
Grid grid_near(f32x16 start, f32x16 step) {
  return {nearest(start + f32x16(0.5f), -128.0f, 127.0f), nearest(step * f32x16(16.0f), 1.0f, 255.0f)};
}

// values: [n][16 outputs]; any grid does for none.
Grid best_grid(const float* values, int64_t n) {
  if (n <= 0) return grid_near(f32x16::zero(), f32x16::zero());
  f32x16 low = f32x16::load(values), high = low, total = f32x16::zero();
  for (int64_t i = 0; i < n; ++i) {
    const f32x16 here = f32x16::load(values + i * kColumns);
    low = min(here, low), high = max(here, high), total = total + here;
  }
  const f32x16 middle = (low + high) * f32x16(0.5f), count(static_cast<float>(n));
  f32x16 least(INFINITY);
  Grid best = grid_near(low, f32x16(1.0f));
  // From the whole range, a little less and a little more on, each fitted to the codes that come out, twice.
  for (const float steps : {15.0f, 14.0f, 16.0f}) {
    f32x16 step = (high - low) / f32x16(steps), start = middle - step * f32x16(7.5f);
    for (int turn = 0; turn < 3; ++turn) {
      const Grid grid = grid_near(start, step);
      f32x16 errors = f32x16::zero(), codes = errors, squares = errors, products = errors;
      for (int64_t i = 0; i < n; ++i) {
        const f32x16 here = f32x16::load(values + i * kColumns), code = grid.code(here);
        const f32x16 error = grid.number(code) - here;
        errors = fma(error, error, errors);
        codes = codes + code, squares = fma(code, code, squares), products = fma(code, here, products);
      }
      best.start = where_less(errors, least, grid.start, best.start);
      best.step = where_less(errors, least, grid.step, best.step);
      least = min(errors, least);
      // Least squares; where all codes are alike, the grid stays.
      const f32x16 spread = count * squares - codes * codes, slope = count * products - codes * total;
      step = where_less(f32x16::zero(), spread, slope / spread, step);
      start = (total - step * codes) / count;
    }
  }
  return best;
}

// One column tile of K inputs. values: [K, padded to `inputs`][16 outputs], in units of scales.
void write_int4(const float* values, int64_t k_end, int64_t inputs, int64_t group, uint8_t* lines, uint8_t* grids) {
  for (int64_t first = 0; first < inputs; first += group, grids += Int4::kGrid) {
    const int64_t end = std::min(inputs, first + group);
    const Grid grid = best_grid(values + first * kColumns, std::min(end, k_end) - first);
    alignas(16) int8_t bytes[kColumns];
    store_bytes(grid.start, bytes);
    for (int i = 0; i < kColumns; ++i) grids[i] = static_cast<uint8_t>(bytes[i] + 128);
    alignas(64) float steps[kColumns];
    grid.step.store(steps);
    for (int i = 0; i < kColumns; ++i) grids[kColumns + i] = static_cast<uint8_t>(steps[i]);
    for (int64_t k = first; k < end; k += 8) {
      alignas(16) int8_t codes[8][kColumns];
      for (int i = 0; i < 8; ++i) store_bytes(grid.code(f32x16::load(values + (k + i) * kColumns)), codes[i]);
      uint8_t* line = lines + k / 8 * Int4::kLine;
      for (int column = 0; column < kColumns; ++column)
        for (int even = 0; even < 4; even += 2) {
          const auto code = [&](int i) { return static_cast<unsigned>(codes[i][column]) & 15; };
          const unsigned word = code(even + 1) | code(even + 5) << 4 | code(even + 4) << 8 | code(even) << 12;
          const auto both = static_cast<uint16_t>(word);
          std::memcpy(line + column * 4 + even, &both, 2);
        }
    }
  }
}

// Divides [padded][16 outputs] by what becomes the scales: the largest magnitude is 119.5 of them, so that sixteen
// steps, which are short of 16 each, reach from end to end.
void scale_columns(float* values, int64_t padded, float* scales) {
  f32x16 most = f32x16::zero(), odd = most;
  for (int64_t k = 0; k < padded; ++k) {
    const f32x16 here = f32x16::load(values + k * kColumns);
    most = max(max(here, f32x16::zero() - here), most);
    odd = fma(here, f32x16::zero(), odd);
  }
  const f32x16 any = where_less(f32x16(kTiny), most, most / f32x16(119.5f), f32x16::zero());
  (any + odd).store(scales);  // NaN where a number was not finite
  const f32x16 unit = where_less(f32x16::zero(), any, any, f32x16(INFINITY));
  for (int64_t k = 0; k < padded; ++k) (f32x16::load(values + k * kColumns) / unit).store(values + k * kColumns);
}

}  // namespace

void quantize(Team& team, const Quantize& args) {
  const Matrix& matrix = args.matrix;
  const bool four_bits = matrix.format == kFormatInt4;
  const int64_t depth = whole(matrix.columns, kByteDepth), padded = depth * kByteDepth;
  const int64_t tiles = column_tiles(matrix.rows, args.gate_up);
  team.each(args.stack * tiles, [&](int64_t i) {
    const Band band = band_of(matrix.rows, args.gate_up, i % tiles);
    const int64_t first = i / tiles * matrix.rows + band.row;
    auto* row = static_cast<float*>(own_scratch().take((kColumns + 1) * padded * sizeof(float)));
    float* values = row + padded;  // of all columns, for int4
    auto* scales = static_cast<float*>(const_cast<void*>(matrix.scales)) + i * kColumns;
    for (int column = 0; column < kColumns; ++column) {
      const bool there = column < band.count;  // a lacking output is zeros
      read_row(args, there ? (first + column) * matrix.columns : 0, there ? matrix.columns : 0, padded, row);
      if (four_bits) {
        for (int64_t k = 0; k < padded; ++k) values[k * kColumns + column] = row[k];
      } else {
        write_int8(row, depth, column, static_cast<int8_t*>(const_cast<void*>(matrix.data)) + i * padded * kColumns,
                   scales);
      }
    }
    if (!four_bits) return;
    scale_columns(values, padded, scales);
    write_int4(values, matrix.columns, padded, matrix.group,
               static_cast<uint8_t*>(const_cast<void*>(matrix.data)) + i * depth * Int4::kChunk,
               static_cast<uint8_t*>(const_cast<void*>(matrix.grid)) +
                   i * Int4::groups(matrix.columns, matrix.group) * Int4::kGrid);
  });
}

}  // namespace moewe

extern "C" void moewe_quantize(const moewe::Quantize* args) {
  moewe::on_team([args](moewe::Team& team) { moewe::quantize(team, *args); });
}
