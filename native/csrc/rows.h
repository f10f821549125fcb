// What is asked of whole rows of numbers: where the largest stands, and whether all are finite.
//
// Not sampling and not arithmetic that rounds: any order of looking gives the same answer.
#pragma once

#include <cstdint>

#include "team.h"
#include "vec.h"

namespace moewe {

struct ScanRows {
  const void* values;  // [rows, width], f32 or bf16
  int64_t rows, width;
  int64_t* best;    // [rows] the first place of the largest number; null: not asked. Only right where none is NaN.
  uint8_t* finite;  // [rows] 1 where neither infinity nor NaN stands; null: not asked
  int32_t is_bf16;
};

void scan_rows(Team& team, const ScanRows& args);

}  // namespace moewe
