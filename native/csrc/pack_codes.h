// From the rows of a quantised checkpoint to the tiles that products read (mxfp4_format.h, fp8_format.h).
//
// Not a quantiser: codes move, none changes. Padding is codes of zero, and in MXFP4 scales of one. Scales of fp8 are few
// and come in their order already.
#pragma once

#include "matrix.h"
#include "team.h"

namespace moewe {

struct PackCodes {
  const uint8_t* rows;    // fp8: [S, N, K]; MXFP4: [S, N, K / 2], the lower four bits first
  const uint8_t* scales;  // of MXFP4: [S, N, K / 32], else null
  int64_t stack;          // S
  int32_t gate_up;        // two halves of N / 2 rows, whose column tiles alternate
  Matrix matrix;          // where to: data, and scales of MXFP4. They may be `rows` and `scales` where nothing needs padding.
};

void pack_codes(Team& team, const PackCodes& args);

}  // namespace moewe

extern "C" void moewe_pack_codes(const moewe::PackCodes* args);
