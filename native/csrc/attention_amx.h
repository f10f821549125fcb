// The products of attention on AMX, and how their operands are packed.
//
// Not the softmax (attention_tile.h) and no paging. Scores are K Q^T: 16 keys, straight from the cache, are the rows of
// a tile, and 16 queries, packed once, its columns. Values are P V: weights are turned into rows of queries, and V is
// packed by pairs of keys. The columns of V stand in the order that one unpack instruction leaves: see `column_order`.
#pragma once

#include "attention_tile.h"

#if MOEWE_AMX

namespace moewe {

// 16x16 of 32 bits, in registers.
inline void transpose(__m512i* rows) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(rows[i + j], rows[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
}

// Packs 16 query rows [16][width], with nothing but zeros behind their end: [width / 32][16 pairs][16 queries][2].
inline void pack_queries(const bf16* const* rows, int64_t width, bf16* to) {
  for (int64_t i = 0; i < width; i += kDepth) {
    const __mmask32 here = width - i >= kDepth ? 0xffffffffu : (1u << (width - i)) - 1;
    __m512i parts[16];
    for (int lane = 0; lane < 16; ++lane)
      parts[lane] = rows[lane] ? _mm512_maskz_loadu_epi16(here, rows[lane] + i) : _mm512_setzero_si512();
    transpose(parts);
    for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(to + (i / kDepth) * kTile + pair * 32, parts[pair]);
  }
}

struct KeyGroup {
  const bf16* rows;  // of the first of 16 keys; readable to a multiple of 32 elements
  int64_t bytes;     // from a key to the next
};

// scores[16 N][16] of N groups of keys.
template <int N>
inline void score(const KeyGroup* groups, const bf16* queries, int64_t depth, float* scores) {
  static_assert(N == 2 || N == 4);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (N == 4) _tile_zero(2);
  if constexpr (N == 4) _tile_zero(3);
  for (int64_t i = 0; i < depth; ++i) {
    _tile_loadd(6, queries + i * kTile, 64);
    _tile_loadd(4, groups[0].rows + i * kDepth, groups[0].bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, groups[1].rows + i * kDepth, groups[1].bytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (N == 4) {
      _tile_loadd(4, groups[2].rows + i * kDepth, groups[2].bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, groups[3].rows + i * kDepth, groups[3].bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + kResults, 64);
  if constexpr (N == 4) _tile_stored(2, scores + 2 * kResults, 64);
  if constexpr (N == 4) _tile_stored(3, scores + 3 * kResults, 64);
}

// Turns weights [32 keys][16] into bf16 rows of queries [16][32 keys].
inline void pack_weights(const float* weights, bf16* to) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kInterleave);
  __m512i pairs[16];
  for (int i = 0; i < 16; ++i) {
    const __m512 even = _mm512_loadu_ps(weights + 2 * i * kQueries);
    const __m512 odd = _mm512_loadu_ps(weights + (2 * i + 1) * kQueries);
    pairs[i] = _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
  }
  transpose(pairs);
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 32, pairs[i]);
}

// Packs rows of V of a pair of keys, either null for zeros: [width / 16][16 pairs][16 columns][2], this pair's part.
template <class Format>
inline void pack_values(const typename Format::Element* even, const typename Format::Element* odd, int64_t width,
                        bf16* to) {
  for (int64_t i = 0; i < width; i += 32) {
    const __mmask32 here = width - i >= 32 ? 0xffffffffu : (1u << (width - i)) - 1;
    const __m512i a = even ? Format::widen(even + i, here) : _mm512_setzero_si512();
    const __m512i b = odd ? Format::widen(odd + i, here) : _mm512_setzero_si512();
    _mm512_storeu_si512(to + (i / 16) * kTile, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(to + (i / 16 + 1) * kTile, _mm512_unpackhi_epi16(a, b));
  }
}

// Puts 32 sums back into the order of columns that `pack_values` left.
inline void column_order(const float* sums, f32x16& first, f32x16& second) {
  const __m512i from_first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i from_second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16);
  first = _mm512_permutex2var_ps(a, from_first, b);
  second = _mm512_permutex2var_ps(a, from_second, b);
}

// sums[16][width] += weights of N halves [N][16][32] times values [N][width / 16] tiles; width a multiple of 32.
template <int N>
inline void add_values(const bf16* weights, const bf16* values, int64_t width, float* sums) {
  static_assert(N == 1 || N == 2);
  const int64_t half = width * kHalf, bytes = width * 4;
  _tile_loadd(4, weights, 64);
  if constexpr (N == 2) _tile_loadd(5, weights + kTile, 64);
  for (int64_t i = 0; i < width; i += 32, values += 2 * kTile) {
    _tile_loadd(0, sums + i, bytes);
    _tile_loadd(1, sums + i + 16, bytes);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + kTile, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (N == 2) {
      _tile_loadd(6, values + half, 64);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, values + half + kTile, 64);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, sums + i, bytes);
    _tile_stored(1, sums + i + 16, bytes);
  }
}

}  // namespace moewe

#endif
