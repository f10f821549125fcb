// Weights in int4 with a scale for each group of inputs and output, rows in int8 with one for each group: a format of
// gemm.h.
//
// Not a quantiser of weights (quantize.h). A group's products are summed exactly; the sum, as f32, times (scale of the
// weights times scale of the row) is added to those before it, in this order for any number of rows. So all paths give
// the same bits: few rows decode weights on the way, many decode a column tile once.
//
// A number is its four bits without sign less the group's zero point, or less 8 where there are none. 32 inputs of a
// column tile are a chunk of 256 bytes: [4][16 columns][4], low nibbles are inputs 4i to 4i + 3 of it for i < 4, high
// ones the 16 inputs behind them. Weights: [column tiles][G * chunks of a group] chunks; scales bf16 and zero points u8,
// both [column tiles][G][16]. G groups of 32, 64 or 128 inputs; the last may be padded with zeros.
#pragma once

#include "gemm.h"
#include "scratch.h"
#include "tiles_int.h"

namespace moewe {

struct Int4 {
  static constexpr bool kTakesRowsWhole = true;
  static constexpr int kStreams = 2;
  static constexpr int kChunk = 32;        // elements of K
  static constexpr int kChunkBytes = 256;  // of a column tile
#if MOEWE_AMX
  static constexpr int64_t kFewRows = kRows;  // up to so many never see a decoded column tile
#else
  static constexpr int64_t kFewRows = INT64_MAX;
#endif

  // Tiles of bytes. Two groups of 32 would share one: there each has a tile, whose other half is zero.
  struct Panel {
    int8_t* tiles;   // [row tiles][num_tiles][16][64]
    float* scales;   // [row tiles][groups][16]
    int32_t* sums;   // [row tiles][groups][16] what a group's elements sum to, times -8 where there are no zero points
    int64_t num_tiles, groups;
    int32_t group;
    bool has_zeros;
    int8_t* tile(int64_t i) const { return tiles + i * num_tiles * kByteTile; }
    // Where the chunk of row 0 stands in a row tile.
    int64_t chunk(int64_t i) const {
      return (group == kChunk ? i : i / 2) * kByteTile + i % 2 * kChunk;
    }
  };
  struct Weights {
    const uint8_t* nibbles;
    const bf16* scales;
    const uint8_t* zeros;
    int64_t groups;
    int32_t group;
    int64_t tile_bytes() const { return groups * (group / kChunk) * kChunkBytes; }
  };

  static int64_t panel_bytes(int64_t row_tiles, int64_t k) {
    const int64_t chunks = whole(k, 128) * 4;
    return row_tiles * chunks * (kByteTile + kRows * 8);
  }
  static int64_t column_tile_bytes(int64_t k) { return whole(k, kChunk) * (kChunkBytes + kColumns * 2); }
  static Panel panel(void* memory, int64_t row_tiles, const Matrix& matrix) {
    const int64_t groups = whole(matrix.columns, matrix.group);
    const int64_t tiles = groups * std::max<int64_t>(1, matrix.group / kByteDepth);
    auto* bytes = static_cast<int8_t*>(memory);
    auto* scales = reinterpret_cast<float*>(bytes + row_tiles * tiles * kByteTile);
    auto* sums = reinterpret_cast<int32_t*>(scales + row_tiles * groups * kRows);
    return {bytes, scales, sums, tiles, groups, matrix.group, matrix.zeros != nullptr};
  }
  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    const int64_t groups = whole(matrix.columns, matrix.group), first = number * tiles * groups;
    const auto* zeros = static_cast<const uint8_t*>(matrix.zeros);
    return {static_cast<const uint8_t*>(matrix.data) + first * (matrix.group / kChunk) * kChunkBytes,
            static_cast<const bf16*>(matrix.scales) + first * kColumns, zeros ? zeros + first * kColumns : nullptr,
            groups, matrix.group};
  }

  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    const int64_t group = panel.group, chunks = group / kChunk;
    for (int r = 0; r < rows; ++r) {
      const bf16* from = row_at(r);
      int8_t* row = panel.tile(tile) + r * kByteDepth;
      for (int64_t g = 0; g < panel.groups; ++g) {
        const int64_t n = std::min(group, k - g * group), at = (tile * panel.groups + g) * kRows + r;
        const auto byte = [&](int64_t i) { return row + panel.chunk(g * chunks + i / kChunk) + i % kChunk; };
        for (int64_t i = n / kChunk; i < chunks; ++i) std::memset(byte(i * kChunk), 0, kChunk);
        if (group == kChunk) std::memset(row + g * kByteTile + (g + 1) % 2 * kChunk, 0, kChunk);
        panel.scales[at] = quantize_row(from + g * group, n, byte);
        int32_t sum = 0;
        for (int64_t i = 0; i < chunks; ++i) sum += sum_bytes(byte(i * kChunk), kChunk);
        panel.sums[at] = panel.has_zeros ? -sum : -8 * sum;
      }
    }
  }

  struct Columns {
    Weights weights;
    int64_t tile;
    const int8_t* decoded;  // [count][tiles along K][16 quads][16 columns][4], or null
  };
  static Columns open(const Weights& weights, int64_t tile, int count, int64_t rows) {
    return {weights, tile, rows > kFewRows ? decode(weights, tile, count) : nullptr};
  }

  template <int MT, int NT>
  static void multiply(const Panel& panel, int64_t tile, const Columns& columns, float* results, int rows) {
    for (int n = 0; n < NT; ++n)
      for (int m = 0; m < MT; ++m) {
        const int here = std::min(kRows, rows - m * kRows);
        float* to = results + (n * MT + m) * kResults;
#if MOEWE_AMX
        if (columns.decoded) {
          multiply_decoded(panel, tile + m, columns, n, to);
          continue;
        }
#endif
        for (int r = 0; r < here;) {
          const int left = here - r;
          if (left >= 8) r = multiply_rows<8>(panel, tile + m, r, columns, n, to);
          else if (left >= 4) r = multiply_rows<4>(panel, tile + m, r, columns, n, to);
          else if (left >= 2) r = multiply_rows<2>(panel, tile + m, r, columns, n, to);
          else r = multiply_rows<1>(panel, tile + m, r, columns, n, to);
        }
      }
  }

 private:
  // Rows [r, r + R) times one column tile; returns r + R.
  template <int R>
  static int multiply_rows(const Panel& panel, int64_t tile, int r, const Columns& columns, int n, float* results) {
    const Weights& weights = columns.weights;
    const int64_t column_tile = columns.tile + n, first = column_tile * weights.groups * kColumns;
    const uint8_t* nibbles = weights.nibbles + column_tile * weights.tile_bytes();
    const bf16* scales = weights.scales + first;
    const uint8_t* zeros = weights.zeros ? weights.zeros + first : nullptr;
    const int8_t* rows = panel.tile(tile) + r * kByteDepth;
    const int32_t* offsets = panel.sums + tile * weights.groups * kRows + r;
    const float* row_scales = panel.scales + tile * weights.groups * kRows + r;
    const int chunks = weights.group / kChunk;
    f32x16 sums[R];
    for (int i = 0; i < R; ++i) sums[i] = f32x16::zero();
    for (int64_t g = 0; g < weights.groups; ++g) {
      i32x16 whole_sums[R];
      for (int i = 0; i < R; ++i) whole_sums[i] = i32x16::all(offsets[g * kRows + i]);
      if (zeros) {
        const i32x16 zero = of_bytes(zeros + g * kColumns);
        for (int i = 0; i < R; ++i) whole_sums[i] = whole_sums[i] * zero;
      }
      for (int chunk = 0; chunk < chunks; ++chunk, nibbles += kChunkBytes) {
        for (int line = 0; line < kChunkBytes; line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(nibbles + kAhead + line), _MM_HINT_T0);
        const int8_t* quads = rows + panel.chunk(g * chunks + chunk);
        for (int quad = 0; quad < 4; ++quad) {
          const Bytes both = Bytes::load(nibbles + quad * 64), low = both.low_nibbles(), high = both.high_nibbles();
          for (int i = 0; i < R; ++i) {
            const int8_t* here = quads + i * kByteDepth + quad * 4;
            whole_sums[i] = dot_nibbles(whole_sums[i], low, quad_at(here));
            whole_sums[i] = dot_nibbles(whole_sums[i], high, quad_at(here + 16));
          }
        }
      }
      const f32x16 scale = f32x16::load(scales + g * kColumns);
      for (int i = 0; i < R; ++i)
        sums[i] = fma(whole_sums[i].to_float(), scale * f32x16(row_scales[g * kRows + i]), sums[i]);
    }
    for (int i = 0; i < R; ++i) sums[i].store(results + (r + i) * kColumns);
    return r + R;
  }
  static constexpr int kAhead = 2048;  // bytes of weights

  static i32x16 of_bytes(const uint8_t* from) {
    alignas(64) int32_t wide[kColumns];
    for (int i = 0; i < kColumns; ++i) wide[i] = from[i];
    return i32x16::load(wide);
  }

  // Column tiles as signed bytes.
  static const int8_t* decode(const Weights& weights, int64_t tile, int count) {
    static thread_local Scratch scratch;
    const int chunks = weights.group / kChunk;
    const int64_t tiles = whole(weights.groups * chunks, 2);
    auto* decoded = static_cast<int8_t*>(scratch.take(count * tiles * kByteTile));
    for (int n = 0; n < count; ++n) {
      const uint8_t* nibbles = weights.nibbles + (tile + n) * weights.tile_bytes();
      const uint8_t* zeros = weights.zeros ? weights.zeros + (tile + n) * weights.groups * kColumns : nullptr;
      int8_t* to = decoded + n * tiles * kByteTile;
      for (int64_t g = 0; g < weights.groups; ++g) {
        const Bytes zero = zeros ? Bytes::of_columns(zeros + g * kColumns) : Bytes::all(8);
        for (int chunk = 0; chunk < chunks; ++chunk, nibbles += kChunkBytes, to += kByteTile / 2) {
          _mm_prefetch(reinterpret_cast<const char*>(nibbles + kAhead), _MM_HINT_T0);
          for (int quad = 0; quad < 4; ++quad) {
            const Bytes both = Bytes::load(nibbles + quad * 64);
            (both.low_nibbles() - zero).store(to + quad * 64);
            (both.high_nibbles() - zero).store(to + (quad + 4) * 64);
          }
        }
      }
      if (weights.groups * chunks % 2) std::memset(to, 0, kByteTile / 2);
    }
    return decoded;
  }

#if MOEWE_AMX
  // A row tile times a decoded column tile, two groups at a time, so that one is summed while the next is multiplied.
  static void multiply_decoded(const Panel& panel, int64_t tile, const Columns& columns, int n, float* results) {
    const Weights& weights = columns.weights;
    const int64_t groups = weights.groups;
    const int64_t column_tiles = whole(groups * (weights.group / kChunk), 2);
    const int8_t* rows = panel.tile(tile);
    const int8_t* decoded = columns.decoded + n * column_tiles * kByteTile;
    const bf16* scales = weights.scales + (columns.tile + n) * groups * kColumns;
    const float* row_scales = panel.scales + tile * groups * kRows;
    alignas(64) int32_t products[2][2][kResults];
    f32x16 sums[kRows];
    for (int r = 0; r < kRows; ++r) sums[r] = f32x16::zero();
    const auto multiply_pair = [&](int64_t g) {
      if (g >= groups) return;
      if (weights.group == kChunk) multiply_halves(rows + g * kByteTile, decoded + g / 2 * kByteTile, products[g / 2 % 2]);
      else multiply_wide(panel, g, rows, decoded, products[g / 2 % 2]);
    };
    multiply_pair(0);
    for (int64_t g = 0; g < groups; g += 2) {
      multiply_pair(g + 2);
      for (int64_t i = g; i < std::min(groups, g + 2); ++i)
        add_group(products[g / 2 % 2][i - g], scales + i * kColumns, row_scales + i * kRows, sums);
    }
    for (int r = 0; r < kRows; ++r) sums[r].store(results + r * kColumns);
  }

  // Two groups of 32 in one tile of weights: rows are zero where the other one stands. An odd last group reads what
  // stands behind the row tile, which is there, and nobody looks at its product.
  static void multiply_halves(const int8_t* rows, const int8_t* decoded, int32_t products[2][kResults]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, decoded, 64);
    _tile_loadd(4, rows, 64);
    _tile_loadd(5, rows + kByteTile, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    _tile_stored(0, products[0], 64);
    _tile_stored(1, products[1], 64);
  }

  static void multiply_wide(const Panel& panel, int64_t g, const int8_t* rows, const int8_t* decoded,
                            int32_t products[2][kResults]) {
    const int64_t wide = panel.group / kByteDepth;
    _tile_zero(2);
    for (int64_t i = g * wide; i < (g + 1) * wide; ++i) {
      _tile_loadd(4, rows + i * kByteTile, 64);
      _tile_loadd(6, decoded + i * kByteTile, 64);
      _tile_dpbssd(2, 4, 6);
    }
    _tile_stored(2, products[0], 64);
    if (g + 1 >= panel.groups) return;
    _tile_zero(3);
    for (int64_t i = (g + 1) * wide; i < (g + 2) * wide; ++i) {
      _tile_loadd(5, rows + i * kByteTile, 64);
      _tile_loadd(7, decoded + i * kByteTile, 64);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(3, products[1], 64);
  }

  static void add_group(const int32_t* products, const bf16* scales, const float* row_scales, f32x16* sums) {
    const f32x16 scale = f32x16::load(scales);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const f32x16 product = i32x16::load(products + r * kColumns).to_float();
      sums[r] = fma(product, scale * f32x16(row_scales[r]), sums[r]);
    }
  }
#endif
};

}  // namespace moewe
