// Weights in int8 with a scale for each output, rows in int8 with a scale for each 64 inputs: a format of gemm.h.
//
// Not a quantiser of weights (quantize.h). The products of 64 inputs are summed exactly; the sum, as f32, times the
// row's scale there is added to those before it, in this order, and what comes out is multiplied with the scale of the
// output. So few rows (by vectors) and many (by tiles) have the same bits, with any instructions, threads, neighbours.
// Weights: [column tiles][K / 64][16 quads][16 columns][4] int8; scales f32 [column tiles][16].
#pragma once

#include "gemm.h"
#include "tiles_int.h"

namespace moewe {

struct Int8 {
  static constexpr bool kTakesRowsWhole = true;
  static constexpr int kStreams = 2;

  struct Panel {
    int8_t* tiles;   // [row tiles][K / 64][16][64]
    float* scales;   // [row tiles][K / 64][16]
    int32_t* sums;   // the same: where `kBiased`, what is to be added to a sum of products
    int64_t depth;
    int8_t* tile(int64_t i) const { return tiles + i * depth * kByteTile; }
  };
  struct Weights {
    const int8_t* tiles;
    const float* scales;
    int64_t depth;
  };

  static int64_t depth(int64_t k) { return whole(k, kByteDepth); }
  static int64_t panel_bytes(int64_t row_tiles, int64_t k) { return row_tiles * depth(k) * (kByteTile + kRows * 8); }
  static int64_t column_tile_bytes(int64_t k) { return depth(k) * kByteTile; }
  static Panel panel(void* memory, int64_t row_tiles, const Matrix& matrix) {
    const int64_t k = depth(matrix.columns);
    auto* tiles = static_cast<int8_t*>(memory);
    auto* scales = reinterpret_cast<float*>(tiles + row_tiles * k * kByteTile);
    return {tiles, scales, reinterpret_cast<int32_t*>(scales + row_tiles * k * kRows), k};
  }

  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    const int64_t k = depth(matrix.columns), first = number * tiles;
    return {static_cast<const int8_t*>(matrix.data) + first * k * kByteTile,
            static_cast<const float*>(matrix.scales) + first * kColumns, k};
  }

  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    for (int r = 0; r < rows; ++r) prepare_row(panel, tile * kRows + r, k, row_at(r));
  }

  // Row `place` of the panel, rows of all its tiles counted.
  static void prepare_row(const Panel& panel, int64_t place, int64_t k, const bf16* row) {
    const int64_t tile = place / kRows, r = place % kRows;
    for (int64_t i = 0; i < panel.depth; ++i) {
      int8_t* to = panel.tile(tile) + i * kByteTile + r * kByteDepth;
      const int64_t n = std::min<int64_t>(kByteDepth, k - i * kByteDepth), at = (tile * panel.depth + i) * kRows + r;
      if (n < kByteDepth) std::memset(to, 0, kByteDepth);
      panel.scales[at] = quantize_row(row + i * kByteDepth, n, [&](int64_t element) { return to + element; });
      if (kBiased) panel.sums[at] = -128 * sum_bytes(to, kByteDepth);
    }
  }

  // The same for a row that stands at `source` already.
  static void copy_row(const Panel& panel, int64_t place, int64_t source) {
    int64_t at = place / kRows * panel.depth * kRows + place % kRows;
    int64_t from = source / kRows * panel.depth * kRows + source % kRows;
    for (int64_t i = 0; i < panel.depth; ++i, at += kRows, from += kRows) {
      std::memcpy(panel.tiles + at * kByteDepth, panel.tiles + from * kByteDepth, kByteDepth);
      panel.scales[at] = panel.scales[from];
      if (kBiased) panel.sums[at] = panel.sums[from];
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
    for (int n = 0; n < NT; ++n)
      for (int m = 0; m < MT; ++m) {
        const int8_t* weights = columns.tiles + n * panel.depth * kByteTile;
        const f32x16 scales = f32x16::load(columns.scales + n * kColumns);
        float* to = results + (n * MT + m) * kResults;
        const int here = std::min(kRows, rows - m * kRows);
#if MOEWE_AMX
        if (here > kVectorRows) {
          multiply_tiles(panel, tile + m, here, scales, to, InPlace{weights});
          continue;
        }
#endif
        for (int r = 0; r < here; r += kMostVectorRows)
          call_with<kMostVectorRows>(std::min(here - r, kMostVectorRows), [&](auto count) MOEWE_INLINE {
            multiply_rows<count>(panel, tile + m, r, weights, scales, to);
          });
      }
  }

#if MOEWE_AMX
  // The first `count` rows of a row tile times a column tile, two tiles of K at a time, so that a pair is summed while
  // the next is multiplied. `source.pair(k)` says where tiles k and k + 1 stand; `source.prepare(k)` is called before
  // that, while others are multiplied, for k beyond the end, too.
  template <class Source>
  static void multiply_tiles(const Panel& panel, int64_t tile, int count, f32x16 scales, float* results,
                             Source&& source) {
    call_with<kRows / 4>(whole(count, 4), [&](auto quarters) MOEWE_INLINE {
      multiply_tiles<4 * quarters>(panel, tile, scales, results, source);
    });
  }
#endif

 private:
  static constexpr int kVectorRows = 4;      // of more rows tiles are faster
  static constexpr int kMostVectorRows = 8;  // at once: more sums than registers

  // Rows [r, r + R) times one column tile.
  template <int R>
  static void multiply_rows(const Panel& panel, int64_t tile, int r, const int8_t* weights, f32x16 scales,
                            float* results) {
    const int8_t* rows = panel.tile(tile) + r * kByteDepth;
    const float* row_scales = panel.scales + tile * panel.depth * kRows + r;
    const int32_t* offsets = panel.sums + tile * panel.depth * kRows + r;
    constexpr int kChains = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // sums that do not wait for each other
    f32x16 sums[R];
    unrolled<R>([&](auto i) MOEWE_INLINE { sums[i] = f32x16::zero(); });
    for (int64_t k = 0; k < panel.depth; ++k, weights += kByteTile, rows += kByteTile) {
      i32x16 products[R][kChains];
      unrolled<R * kChains>([&](auto i) MOEWE_INLINE {
        const bool first = i % kChains == 0;
        products[i / kChains][i % kChains] = i32x16::all(kBiased && first ? offsets[k * kRows + i / kChains] : 0);
      });
      unrolled<16>([&](auto quad) MOEWE_INLINE {
        prefetch_stream<6144, 768>(weights + quad * 64);
        const Bytes bytes = Bytes::load(weights + quad * 64);
        unrolled<R>([&](auto i) MOEWE_INLINE {
          i32x16& product = products[i][quad % kChains];
          product = dot_signed(product, bytes, quad_at(rows + i * kByteDepth + quad * 4));
        });
      });
      unrolled<R>([&](auto i) MOEWE_INLINE {
        sums[i] = fma(total(products[i]).to_float(), f32x16(row_scales[k * kRows + i]), sums[i]);
      });
    }
    unrolled<R>([&](auto i) MOEWE_INLINE { (sums[i] * scales).store(results + (r + i) * kColumns); });
  }
#if MOEWE_AMX
  // Column tiles that lie as they are multiplied.
  struct InPlace {
    const int8_t* weights;
    void prepare(int64_t /*k*/) const {}
    const int8_t* pair(int64_t k) const { return weights + k * kByteTile; }
  };

  template <int R, class Source>
  static void multiply_tiles(const Panel& panel, int64_t tile, f32x16 scales, float* results, Source& source) {
    const int8_t* rows = panel.tile(tile);
    const float* row_scales = panel.scales + tile * panel.depth * kRows;
    const int64_t depth = panel.depth;
    alignas(64) int32_t products[2][2][kResults];
    f32x16 sums[R];
    unrolled<R>([&](auto r) MOEWE_INLINE { sums[r] = f32x16::zero(); });
    const auto add = [&](int64_t k, const int32_t* from) MOEWE_INLINE {
      unrolled<R>([&](auto r) MOEWE_INLINE {
        sums[r] = fma(i32x16::load(from + r * kColumns).to_float(), f32x16(row_scales[k * kRows + r]), sums[r]);
      });
    };
    const auto add_pair = [&](int64_t k, const int32_t (&pair)[2][kResults]) MOEWE_INLINE {
      if (k < depth) add(k, pair[0]);
      if (k + 1 < depth) add(k + 1, pair[1]);
    };
    source.prepare(0);
    multiply_pair<0>(rows, source.pair(0), 0, depth, products[0]);
    source.prepare(2);
    for (int64_t k = 0; k < depth; k += 4) {
      multiply_pair<1>(rows, source.pair(k + 2), k + 2, depth, products[1]);
      source.prepare(k + 4);
      add_pair(k, products[0]);
      multiply_pair<0>(rows, source.pair(k + 4), k + 4, depth, products[0]);
      source.prepare(k + 6);
      add_pair(k + 2, products[1]);
    }
    unrolled<R>([&](auto r) MOEWE_INLINE { (sums[r] * scales).store(results + r * kColumns); });
  }

  // Tiles k and k + 1 along K, as far as they are there; two pairs may be under way at once.
  // `weights` is where the first of them stands.
  template <int Pair>
  static void multiply_pair(const int8_t* rows, const int8_t* weights, int64_t k, int64_t depth,
                            int32_t (&products)[2][kResults]) {
    if (k >= depth) return;
    _tile_loadd(4, rows + k * kByteTile, 64);
    _tile_loadd(6, weights, 64);
    if constexpr (Pair == 0) {  // registers have literal numbers
      _tile_zero(0);
      _tile_dpbssd(0, 4, 6);
      _tile_stored(0, products[0], 64);
    } else {
      _tile_zero(2);
      _tile_dpbssd(2, 4, 6);
      _tile_stored(2, products[0], 64);
    }
    if (k + 1 >= depth) return;
    _tile_loadd(5, rows + (k + 1) * kByteTile, 64);
    _tile_loadd(7, weights + kByteTile, 64);
    if constexpr (Pair == 0) {
      _tile_zero(1);
      _tile_dpbssd(1, 5, 7);
      _tile_stored(1, products[1], 64);
    } else {
      _tile_zero(3);
      _tile_dpbssd(3, 5, 7);
      _tile_stored(3, products[1], 64);
    }
  }
#endif
};

}  // namespace moewe
