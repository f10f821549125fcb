// Weights in int4: each group of inputs of an output has sixteen of the numbers that int8 has; a format of gemm.h.
//
// Not a quantiser of weights (quantize.h). A number is (start + (step * code >> 4)) * scale, with a code of four bits;
// start and step are those of its group, the scale is that of its output. So codes become int8, exactly, and are
// multiplied as such (int8_format.h): few rows decode them on the way, many meet a column tile that is decoded once.
// Both ways give the same bits.
//
// 64 inputs of a column tile are a chunk of 512 bytes: [8 lines][16 columns][4]. Line i holds quads 2i and 2i + 1: from
// the lowest bits on, a word of 16 bits has the codes of element b of the first, b and a of the second, a of the first,
// where a and b are the even and the odd of two elements. Weights: [column tiles][K / 64] chunks; grid [column tiles]
// [G][2][16] u8: starts, with 128 added, then steps; scales f32 [column tiles][16]. G groups of 32, 64 or 128 inputs,
// as many as cover the chunks.
#pragma once

#include "int8_format.h"
#include "scratch.h"

namespace moewe {

struct Int4 {
  static constexpr bool kTakesRowsWhole = true;
  static constexpr int kStreams = 2;
  static constexpr int kLine = 64;            // bytes, of codes for eight inputs
  static constexpr int kLines = 8;            // of a chunk
  static constexpr int kChunk = kLine * kLines;
  static constexpr int kGrid = 2 * kColumns;  // bytes of a group
#if MOEWE_AMX
  static constexpr int64_t kUndecoded = kRows;  // rows: up to so many are faster without decoded column tiles
  static constexpr int kVectorRows = 4;         // of more rows tiles are faster
#else
  static constexpr int64_t kUndecoded = 8, kVectorRows = 8;
#endif

  using Panel = Int8::Panel;
  struct Weights {
    const uint8_t* codes;
    const uint8_t* grid;
    const float* scales;
    int64_t depth, groups;
    int shift;  // a group is 32 inputs times two to this
    const uint8_t* grid_of(int64_t part) const { return grid + (part >> shift) * kGrid; }  // of 32 inputs
  };

  static int64_t groups(int64_t k, int64_t group) { return whole(Int8::depth(k) * kByteDepth, group); }
  static int64_t panel_bytes(int64_t row_tiles, int64_t k) { return Int8::panel_bytes(row_tiles, k); }
  static int64_t column_tile_bytes(int64_t k) { return Int8::depth(k) * (kChunk + 2 * kGrid); }
  static Panel panel(void* memory, int64_t row_tiles, const Matrix& matrix) {
    return Int8::panel(memory, row_tiles, matrix);
  }
  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    const int64_t depth = Int8::depth(matrix.columns), count = groups(matrix.columns, matrix.group);
    const int64_t first = number * tiles;
    return {static_cast<const uint8_t*>(matrix.data) + first * depth * kChunk,
            static_cast<const uint8_t*>(matrix.grid) + first * count * kGrid,
            static_cast<const float*>(matrix.scales) + first * kColumns, depth, count, __builtin_ctz(matrix.group) - 5};
  }
  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    Int8::prepare(panel, tile, rows, k, row_at);
  }
  static void prepare_row(const Panel& panel, int64_t place, int64_t k, const bf16* row) {
    Int8::prepare_row(panel, place, k, row);
  }
  static void copy_row(const Panel& panel, int64_t place, int64_t source) { Int8::copy_row(panel, place, source); }

  struct Columns {
    Weights weights;        // from the first of these columns on
    const int8_t* decoded;  // [count][K / 64][16 quads][16 columns][4], or null
  };
  static Columns open(const Weights& weights, int64_t tile, int count, int64_t rows) {
    Weights from = weights;
    from.codes += tile * weights.depth * kChunk;
    from.grid += tile * weights.groups * kGrid;
    from.scales += tile * kColumns;
    return {from, rows > kUndecoded ? decode(from, count) : nullptr};
  }

  template <int MT, int NT>
  static void multiply(const Panel& panel, int64_t tile, const Columns& columns, float* results, int rows) {
    if (columns.decoded) {
      Int8::multiply<MT, NT>(panel, tile, {columns.decoded, columns.weights.scales}, results, rows);
      return;
    }
    static_assert(kUndecoded <= kRows && kVectorRows <= 8);
    for (int n = 0; n < NT; ++n) {
      float* to = results + n * MT * kResults;
#if MOEWE_AMX
      if (rows > kVectorRows) {
        const f32x16 scales = f32x16::load(columns.weights.scales + n * kColumns);
        Int8::multiply_tiles(panel, tile, rows, scales, to, Decoding(columns.weights, n));
        continue;
      }
#endif
      call_with<8>(rows, [&](auto count) MOEWE_INLINE { multiply_rows<count>(panel, tile, columns.weights, n, to); });
    }
  }

 private:
  // The codes of a group become bytes.
  struct Grid {
    Bytes starts;
    Words steps, steps16;
    explicit Grid(const uint8_t* from)
        : starts(Bytes::of_columns(from)), steps(Words::of_columns(from + kColumns)), steps16(steps.times16()) {}
    // Two quads, with 128 added. A product of step and code has twelve bits, the lowest four of which are cut off:
    // words are shifted so that the other eight are the upper byte of their product, or the lower one above it.
    void decode(const uint8_t* line, Bytes& first, Bytes& second) const {
      const Words codes = Words::load(line);
      first = starts + bytes_of(low_product(codes & 0x000f, steps16), high_product(codes & 0xf000, steps));
      second = starts + bytes_of(low_product(codes & 0x00f0, steps), high_product(codes & 0x0f00, steps16));
    }
    // Where numbers are to have their sign: 128 more is 128 less.
    Grid with_sign() const {
      Grid grid = *this;
      grid.starts = starts + Bytes::all(128);
      return grid;
    }
  };

  // The first R rows of a row tile times column tile n.
  template <int R>
  static void multiply_rows(const Panel& panel, int64_t tile, const Weights& weights, int n, float* results) {
    const uint8_t* codes = weights.codes + n * weights.depth * kChunk;
    const int8_t* rows = panel.tile(tile);
    const int64_t first = tile * panel.depth * kRows;
    const float* row_scales = panel.scales + first;
    const int32_t* offsets = panel.sums + first;
    constexpr int kChains = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // sums that do not wait for each other
    f32x16 sums[R];
    unrolled<R>([&](auto i) MOEWE_INLINE { sums[i] = f32x16::zero(); });
    for (int64_t k = 0; k < weights.depth; ++k, codes += kChunk, rows += kByteTile) {
      i32x16 products[R][kChains];
      unrolled<R * kChains>([&](auto i) MOEWE_INLINE {
        const bool first = i % kChains == 0;
        products[i / kChains][i % kChains] = i32x16::all(kBiased && first ? offsets[k * kRows + i / kChains] : 0);
      });
      unrolled<2>([&](auto half) MOEWE_INLINE {
        const Grid here(weights.grid_of(2 * k + half) + n * weights.groups * kGrid);
        unrolled<kLines / 2>([&](auto i) MOEWE_INLINE {
          constexpr int kHere = half * kLines / 2 + i;
          prefetch_stream<3072, 512>(codes + kHere * kLine);
          Bytes pair[2];
          here.decode(codes + kHere * kLine, pair[0], pair[1]);
          if (!kBiased) pair[0] = pair[0] + Bytes::all(128), pair[1] = pair[1] + Bytes::all(128);
          unrolled<2 * R>([&](auto j) MOEWE_INLINE {
            constexpr int kQuad = 2 * kHere + j % 2;
            i32x16& product = products[j / 2][kQuad % kChains];
            product = dot_biased(product, pair[j % 2], quad_at(rows + j / 2 * kByteDepth + kQuad * 4));
          });
        });
      });
      unrolled<R>([&](auto i) MOEWE_INLINE {
        sums[i] = fma(total(products[i]).to_float(), f32x16(row_scales[k * kRows + i]), sums[i]);
      });
    }
    const f32x16 scales = f32x16::load(weights.scales + n * kColumns);
    unrolled<R>([&](auto i) MOEWE_INLINE { (sums[i] * scales).store(results + i * kColumns); });
  }
  static constexpr int kAhead = 2048;  // bytes of codes

#if MOEWE_AMX
  // Tiles of one column tile, two at a time, as tiles of int8 that are decoded while others are multiplied.
  class Decoding {
   public:
    Decoding(const Weights& weights, int n)
        : weights_(weights), codes_(weights.codes + n * weights.depth * kChunk),
          grid_(n * weights.groups * kGrid) {}
    void prepare(int64_t k) {
      int8_t* to = rooms_[k / 2 % 2];
      for (const int64_t end = std::min(k + 2, weights_.depth); k < end; ++k, to += kByteTile) decode_chunk(k, to);
    }
    const int8_t* pair(int64_t k) const { return rooms_[k / 2 % 2]; }

   private:
    MOEWE_INLINE void decode_chunk(int64_t k, int8_t* to) const {
      const uint8_t* codes = codes_ + k * kChunk;
      unrolled<2>([&](auto half) MOEWE_INLINE {
        const Grid here = Grid(weights_.grid_of(2 * k + half) + grid_).with_sign();
        unrolled<kLines / 2>([&](auto i) MOEWE_INLINE {
          constexpr int kHere = half * kLines / 2 + i;
          prefetch_stream<3072, 512>(codes + kHere * kLine);
          Bytes first, second;
          here.decode(codes + kHere * kLine, first, second);
          first.store(to + kHere * 2 * kLine);
          second.store(to + (kHere * 2 + 1) * kLine);
        });
      });
    }

    const Weights& weights_;
    const uint8_t* codes_;
    int64_t grid_;
    alignas(64) int8_t rooms_[2][2 * kByteTile];
  };
#endif

  // Column tiles as tiles of int8.
  static const int8_t* decode(const Weights& weights, int count) {
    static thread_local Scratch scratch;
    auto* decoded = static_cast<int8_t*>(scratch.take(count * weights.depth * kByteTile));
    const uint8_t* codes = weights.codes;
    int8_t* to = decoded;
    for (int n = 0; n < count; ++n) {
      for (int64_t part = 0; part < 2 * weights.depth; ++part) {
        const Grid here = Grid(weights.grid_of(part) + n * weights.groups * kGrid).with_sign();
        for (int line = 0; line < kLines / 2; ++line, codes += kLine, to += 2 * kLine) {
          _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead), _MM_HINT_T0);
          Bytes first, second;
          here.decode(codes, first, second);
          first.store(to);
          second.store(to + kLine);
        }
      }
    }
    return decoded;
  }
};

}  // namespace moewe
