// All formats of weights, and the way from a matrix to the code for its own.
//
// Not the formats themselves: bf16 stands in gemm.h, the others in files of their own.
#pragma once

#include "fp8_format.h"
#include "gemm.h"
#include "int4_format.h"
#include "int8_format.h"
#include "mxfp4_format.h"

namespace moewe {

// Call f with an object of the format's type.
template <class F>
void in_format(int32_t format, F&& f) {
  if (format == kFormatInt8) return f(Int8{});
  if (format == kFormatInt4) return f(Int4{});
  if (format == kFormatMxfp4) return f(Mxfp4{});
  if (format == kFormatFp8) return f(Fp8{});
  f(Bf16{});
}

// Room for prepared rows of K elements, whatever the format; whole cache lines. Rows in bf16 serve all others.
inline int64_t panel_bytes(int64_t row_tiles, int64_t k) {
  const int64_t most = std::max({Bf16::panel_bytes(row_tiles, k), Int8::panel_bytes(row_tiles, k),
                                 Int4::panel_bytes(row_tiles, k)});
  return whole(most, 64) * 64;
}

}  // namespace moewe
