// From the rows of a checkpoint to the tiles that products read (matrix.h), and back for single rows.
//
// Not a quantiser: elements move, none changes. Padding is written as zeros.
#pragma once

#include "matrix.h"
#include "team.h"
#include "vec.h"

namespace moewe {

struct Pack {
  const bf16* rows;     // [S, N, K], contiguous
  bf16* tiles;          // [S][column tiles][K / 32][16][16][2]; may be `rows` where N and K need no padding
  int64_t stack;        // S
  int64_t num_rows;     // N
  int64_t num_columns;  // K
  int32_t gate_up;      // two halves of N / 2 rows, whose column tiles alternate
};

struct GatherRows {
  const bf16* tiles;    // of one matrix, not gate and up
  const int64_t* ids;   // [T], each in [0, N)
  bf16* out;            // [T, K]
  int64_t num_ids;      // T
  int64_t num_columns;  // K
};

void pack(Team& team, const Pack& args);
void gather_rows(Team& team, const GatherRows& args);

}  // namespace moewe

extern "C" {
void moewe_pack(const moewe::Pack* args);
void moewe_gather_rows(const moewe::GatherRows* args);
}
