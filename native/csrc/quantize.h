// From the rows of a checkpoint to packed int8 or int4 (int8_format.h, int4_format.h), rounded to nearest.
//
// Not products. The scale of an output is its largest magnitude / 127, or / 119.5 for int4, where each group of inputs
// gets sixteen evenly spaced whole numbers besides: of a few sets that span its range, and those that least squares fit
// to the codes that come out, the one with the least squared error.
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
  Matrix matrix;     // where to: data, scales and grid are written, padding as zeros
};

void quantize(Team& team, const Quantize& args);

}  // namespace moewe

extern "C" void moewe_quantize(const moewe::Quantize* args);
