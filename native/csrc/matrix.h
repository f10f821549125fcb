// A packed weight matrix, or a stack of them, as kernels are handed it.
//
// Not its making (pack.h) and not its product (gemm.h). Letters: N outputs, K inputs; [N, K] as checkpoints store it.
// Column tiles (16 outputs) follow each other, in each of them tiles along K; N is padded to 16 and K to a whole tile
// with zeros. In a gate-and-up matrix [2F, K] the two halves are padded each for itself, and their column tiles
// alternate (gate 0, up 0, gate 1, ...), so that one pair of column tiles holds what one block of SiLU(gate) * up needs.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moewe {

enum MatrixFormat : int32_t { kFormatBf16 = 0, kFormatInt8 = 1, kFormatInt4 = 2, kFormatMxfp4 = 3, kFormatFp8 = 4 };

struct Matrix {
  const void* data;     // tiles; the matrices of a stack follow each other
  const void* scales;   // of quantised formats, as the file of each has them
  const void* grid;     // of int4: where the numbers of each group begin, and their step
  int64_t rows;         // N, of one matrix
  int64_t columns;      // K
  int32_t format;       // a MatrixFormat
  int32_t group;        // of int4 and fp8, elements of K that share sixteen numbers or a scale; else 0
  int32_t scales_each;  // of fp8, scales of a column tile for each group: 1, or 16 where outputs differ; else 0
};

inline int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }  // how many `of` hold n

// Column tiles of a matrix with N rows.
inline int64_t column_tiles(int64_t rows, bool gate_up) {
  return gate_up ? 2 * whole(rows / 2, 16) : whole(rows, 16);
}

// The rows of a matrix that stand in a column tile: the first of them and how many there are (at most 16).
struct Band {
  int64_t row;
  int count;
};

inline Band band_of(int64_t rows, bool gate_up, int64_t tile) {
  if (!gate_up) return {tile * 16, static_cast<int>(std::min<int64_t>(16, rows - tile * 16))};
  const int64_t half = rows / 2, row = tile / 2 * 16;
  return {tile % 2 * half + row, static_cast<int>(std::min<int64_t>(16, half - row))};
}

}  // namespace moewe
