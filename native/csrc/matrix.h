// A packed weight matrix, or a stack of them, as kernels are handed it.
//
// Not its making (pack.h) and not its product (gemm.h). Letters: N outputs, K inputs; [N, K] as checkpoints store it.
// Column tiles (16 outputs) follow each other, in each of them tiles along K; N is padded to 16 and K to a whole tile
// with zeros. In a gate-and-up matrix [2F, K] the two halves are padded each for itself, and their column tiles
// alternate (gate 0, up 0, gate 1, ...), so that one pair of column tiles holds what one block of SiLU(gate) * up needs.
#pragma once

#include <cstdint>

namespace moewe {

enum MatrixFormat : int32_t { kFormatBf16 = 0, kFormatInt8 = 1, kFormatInt4 = 2 };

struct Matrix {
  const void* data;     // tiles; the matrices of a stack follow each other
  const float* scales;  // of quantised formats
  const void* zeros;    // of int4 with zero points
  int64_t rows;         // N, of one matrix
  int64_t columns;      // K
  int32_t format;       // a MatrixFormat
  int32_t group;        // elements of K that share a scale; 0 where a whole row does
};

inline int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of; }  // how many `of` hold n

// Column tiles of a matrix with N rows.
inline int64_t column_tiles(int64_t rows, bool gate_up) {
  return gate_up ? 2 * whole(rows / 2, 16) : whole(rows, 16);
}

}  // namespace moewe
