// Weights in int8 with a scale for each output, rows in int8 with a scale each: a format of gemm.h.
//
// Not a quantiser of weights (quantize.h). A result is the exact sum of whole products, as f32, times (scale of the row
// times scale of the column): the same bits for any instructions, threads and neighbours.
// Weights: [column tiles][K / 64][16 quads][16 columns][4] int8; scales f32 [column tiles][16].
#pragma once

#include "gemm.h"
#include "tiles_int.h"

namespace moewe {

struct Int8 {
  static constexpr bool kTakesRowsWhole = true;

  // Tiles [row tiles][K / 64][16][64] int8, and a scale for each row.
  struct Panel {
    int8_t* tiles;
    float* scales;
    int64_t depth;
    int8_t* tile(int64_t i) const { return tiles + i * depth * kByteTile; }
  };
  struct Weights {
    const int8_t* tiles;
    const float* scales;
    int64_t depth;
  };

  static int64_t depth(int64_t k) { return whole(k, kByteDepth); }
  static int64_t panel_bytes(int64_t row_tiles, int64_t k) {
    return row_tiles * (depth(k) * kByteTile + kRows * static_cast<int64_t>(sizeof(float)));
  }
  static int64_t column_tile_bytes(int64_t k) { return depth(k) * kByteTile; }
  static Panel panel(void* memory, int64_t row_tiles, const Matrix& matrix) {
    const int64_t k = depth(matrix.columns);
    auto* tiles = static_cast<int8_t*>(memory);
    return {tiles, reinterpret_cast<float*>(tiles + row_tiles * k * kByteTile), k};
  }

  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    const int64_t k = depth(matrix.columns), first = number * tiles;
    return {static_cast<const int8_t*>(matrix.data) + first * k * kByteTile,
            static_cast<const float*>(matrix.scales) + first * kColumns, k};
  }

  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    int8_t* to = panel.tile(tile);
    for (int r = 0; r < rows; ++r) {
      const auto byte = [&](int64_t i) { return to + i / kByteDepth * kByteTile + r * kByteDepth + i % kByteDepth; };
      panel.scales[tile * kRows + r] = quantize_row(row_at(r), k, byte);
      for (int64_t i = whole(k, 16) * 16; i < panel.depth * kByteDepth; i += 16) std::memset(byte(i), 0, 16);
    }
  }

  struct Columns {
    const int8_t* tiles;
    const float* scales;
  };
  static Columns open(const Weights& weights, int64_t tile, int /*count*/, int64_t /*rows*/) {
    return {weights.tiles + tile * weights.depth * kByteTile, weights.scales + tile * kColumns};
  }

  template <int MT, int NT>
  static void multiply(const Panel& panel, int64_t tile, const Columns& columns, float* results, int rows) {
    alignas(64) int32_t sums[MT * NT * kResults];
    const int64_t stride = panel.depth * kByteTile;
    multiply_bytes<MT, NT>(panel.tile(tile), stride, columns.tiles, stride, panel.depth, sums, rows);
    for (int n = 0; n < NT; ++n) {
      const f32x16 scales = f32x16::load(columns.scales + n * kColumns);
      for (int r = 0; r < rows; ++r) {
        const int at = (n * MT + r / kRows) * kResults + r % kRows * kColumns;
        const f32x16 scale = f32x16(panel.scales[tile * kRows + r]) * scales;
        (i32x16::load(sums + at).to_float() * scale).store(results + at);
      }
    }
  }
};

}  // namespace moewe
