// From the rows of a checkpoint to packed int8 or int4 (int8_format.h, int4_format.h), rounded to nearest, and back.
//
// Not products. A scale is chosen for each output (int8: largest magnitude / 127) or each group of it (int4: of a few
// that map the number of largest magnitude near the end of the range, the one with the least squared error).
#pragma once

#include "matrix.h"
#include "team.h"
#include "vec.h"

namespace moewe {

enum SourceFormat : int32_t { kSourceBf16 = 0, kSourceF16 = 1, kSourceF32 = 2 };

struct Quantize {
  const void* rows;  // [S, N, K], contiguous
  int64_t stack;     // S
  int32_t source;    // a SourceFormat
  int32_t gate_up;   // two halves of N / 2 rows, whose column tiles alternate
  Matrix matrix;     // where to: its data and scales are written, padding as zeros; no zero points
};

void quantize(Team& team, const Quantize& args);

}  // namespace moewe

extern "C" void moewe_quantize(const moewe::Quantize* args);
