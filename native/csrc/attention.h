// Attention over pages of K and V: prompts and single rows alike, one walk over tiles of keys.
//
// Not the write of K and V (heads.h). Tiles of kKeys keys begin at multiples of kKeys of the sequence, and a row goes
// through those that it sees in ascending order, whatever rows are computed beside it: how a prompt is cut, what else
// runs and where blocks lie changes no bit. Letters: T rows, H query heads, Hkv KV heads, Dh and Dv widths of a head of
// K and V.
#pragma once

#include <cstdint>

#include "kv_format.h"
#include "team.h"
#include "vec.h"

namespace moewe {

constexpr int kKeys = 64;  // of a tile

enum AttentionKind : int32_t { kFull = 0, kWindow = 1, kChunk = 2 };

// Consecutive rows of one sequence, at [position, position + num_rows). Block i of the sequence is tables[table + i].
struct Run {
  int64_t row, num_rows, position, table;
};

// What the layers of a cache group share in a step.
struct AttentionStep {
  const Run* runs;
  const int32_t* tables;  // entries of blocks that no row sees are not looked at
  const int64_t* slots;   // [T] where K and V of each row are written
  int64_t num_runs;
};

struct Attention {
  const bf16* q;  // [T, H, Dh]
  bf16* out;      // [T, H, Dv]; rows of no run are left alone
  const AttentionStep* step;
  const void* k;          // of a token: [Hkv, Dh]
  const void* v;          // of a token: [Hkv, Dv]; may lie in k
  const bf16* k_scales;   // [slots, Hkv] of a format with scales, else null; those of V are those of K where V lies in it
  const bf16* v_scales;
  const float* sinks;     // [H] scores that take part in every softmax and have no value, or null
  int64_t block_size;
  int64_t k_stride, v_stride;  // elements from a token to the next
  int64_t window;              // of kWindow (tokens a row sees, its own included) and kChunk
  int32_t heads, kv_heads, head_dim, value_dim;
  int32_t kind;       // AttentionKind
  int32_t kv_format;  // KvFormat
  float scale;        // on scores, > 0
  float score_cap;    // scaled scores become cap * tanh(score / cap); 0 leaves them
};

void attention(Team& team, const Attention& args);

}  // namespace moewe
