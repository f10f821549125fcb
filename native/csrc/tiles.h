// Products of tiles: the inner loop of every matrix product, on AMX, AVX-512 and AVX2.
//
// Not a matrix product (that walks over tiles, see linear.h) and not packing (pack.h). One order of additions along K
// for each path, whatever stands in the other rows and columns: the bits of a row never depend on how many rows there are.
//
// A tile of activations is [16 rows][32] bf16; of weights [16 pairs of K][16 columns][2] bf16; both 1 KiB. Tiles along K
// follow each other. A tile of results is [16 rows][16 columns] f32.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "vec.h"

namespace moewe {

constexpr int kRows = 16;       // of a tile of activations and of results
constexpr int kColumns = 16;    // of a tile of weights and of results
constexpr int kDepth = 32;      // bf16 elements of K in a tile
constexpr int kTile = 512;      // bf16 elements of a tile of activations or weights
constexpr int kResults = 256;   // floats of a tile of results

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__)
#define MOEWE_AMX 1
#endif

// Makes the calling thread ready for tile instructions. A thread that others' code runs on needs it anew for every call:
// torch's own kernels load another configuration, or leave none.
inline void configure_tiles() {
#if MOEWE_AMX
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
#endif
}

// Leaves the tiles of the calling thread as if nobody had used them, so that a switch to another thread need not save them.
inline void release_tiles() {
#if MOEWE_AMX
  _tile_release();
#endif
}

// Row tiles or column tiles, each with all its tiles of K; `stride` elements from one to the next.
struct Strip {
  const bf16* tiles;
  int64_t stride;
};

// What will be wanted after this product, and is asked for meanwhile.
struct Ahead {
  const char* next = nullptr;   // of memory; `each` lines of it with every tile of K
  int each = 0;
  const bf16* rows = nullptr;   // row tiles that follow, in L2; null: unknown, ask for none
};

struct Idle {
  void operator()() const {}
};

// c[NT][MT][16][16] = a (MT row tiles) times b (NT column tiles), over `depth` tiles of K; with `onto`, added to what
// c holds, which gives the same bits as one product over all of K. `rows` is how many of the MT * 16 rows anybody will
// look at; tile instructions compute all. `meanwhile` is called once for every tile of K: vector units are idle then.
#if MOEWE_AMX

template <int MT, int NT, class Meanwhile = Idle>
inline void multiply(Strip a, Strip b, int64_t depth, float* c, int /*rows*/, bool onto = false, Ahead ahead = {},
                     Meanwhile&& meanwhile = {}) {
  static_assert(MT * NT <= 4);  // tiles 0 to 3 hold results, 4 and 5 rows, 5 (of one row tile), 6 and 7 columns
  if (onto) {
    _tile_loadd(0, c, 64);
    if constexpr (MT * NT > 1) _tile_loadd(1, c + kResults, 64);
    if constexpr (MT * NT > 2) _tile_loadd(2, c + 2 * kResults, 64);
    if constexpr (MT * NT > 3) _tile_loadd(3, c + 3 * kResults, 64);
  } else {
    _tile_zero(0);
    if constexpr (MT * NT > 1) _tile_zero(1);
    if constexpr (MT * NT > 2) _tile_zero(2);
    if constexpr (MT * NT > 3) _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const bf16 *row = a.tiles + k * kTile, *column = b.tiles + k * kTile;
    if (ahead.rows) {
      // Two tiles ahead, every second line: the core fetches the other of a pair. All lines cost more than they save.
      const bf16* from = k + 2 < depth ? row + 2 * kTile : ahead.rows + (k + 2 - depth) * kTile;
      const char* soon = reinterpret_cast<const char*>(from);
      for (int m = 0; m < MT; ++m)
        for (int i = 0; i < 16; i += 2)
          _mm_prefetch(soon + m * a.stride * sizeof(bf16) + i * 64, _MM_HINT_T0);
    }
    for (int i = 0; i < ahead.each; ++i, ahead.next += 64) _mm_prefetch(ahead.next, _MM_HINT_T1);
    _tile_loadd(4, row, 64);
    _tile_loadd(6, column, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (MT == 1) {
      if constexpr (NT > 1) {
        _tile_loadd(7, column + b.stride, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (NT > 2) {
        _tile_loadd(5, column + 2 * b.stride, 64);
        _tile_dpbf16ps(2, 4, 5);
      }
      if constexpr (NT > 3) {
        _tile_loadd(6, column + 3 * b.stride, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    } else {
      _tile_loadd(5, row + a.stride, 64);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (NT > 1) {
        _tile_loadd(7, column + b.stride, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    meanwhile();
  }
  _tile_stored(0, c, 64);
  if constexpr (MT * NT > 1) _tile_stored(1, c + kResults, 64);
  if constexpr (MT * NT > 2) _tile_stored(2, c + 2 * kResults, 64);
  if constexpr (MT * NT > 3) _tile_stored(3, c + 3 * kResults, 64);
}

#else

namespace detail {

#if defined(__AVX512F__)
// Adds both products of a pair of K: a's pair is the same for all columns.
inline f32x16 add_pair(f32x16 sum, uint32_t a, const bf16* b) {
  const __m512i columns = _mm512_loadu_si512(b);
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(a)), reinterpret_cast<__m512bh>(columns));
#else
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(columns, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(columns, _mm512_set1_epi32(0xffff0000)));
  const f32x16 first = fma(f32x16(to_float(static_cast<bf16>(a))), even, sum);
  return fma(f32x16(to_float(static_cast<bf16>(a >> 16))), odd, first);
#endif
}
#else
inline f32x16 add_pair(f32x16 sum, uint32_t a, const bf16* b) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 16));
  const __m256i mask = _mm256_set1_epi32(0xffff0000);
  const f32x16 even(_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16)));
  const f32x16 odd(_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask)));
  const f32x16 first = fma(f32x16(to_float(static_cast<bf16>(a))), even, sum);
  return fma(f32x16(to_float(static_cast<bf16>(a >> 16))), odd, first);
}
#endif

// R rows at once, so that each load of weights serves all of them.
template <int R>
inline void multiply_rows(const bf16* a, const bf16* b, int64_t depth, float* c, bool onto) {
  f32x16 sums[R];
  for (int r = 0; r < R; ++r) sums[r] = onto ? f32x16::load(c + r * kColumns) : f32x16::zero();
  for (int64_t k = 0; k < depth; ++k)
    for (int pair = 0; pair < 16; ++pair)
      for (int r = 0; r < R; ++r) {
        uint32_t both;
        std::memcpy(&both, a + k * kTile + r * kDepth + pair * 2, 4);
        sums[r] = add_pair(sums[r], both, b + k * kTile + pair * 32);
      }
  for (int r = 0; r < R; ++r) sums[r].store(c + r * kColumns);
}

}  // namespace detail

template <int MT, int NT, class Meanwhile = Idle>
inline void multiply(Strip a, Strip b, int64_t depth, float* c, int rows, bool onto = false, Ahead /*ahead*/ = {},
                     Meanwhile&& meanwhile = {}) {
  for (int n = 0; n < NT; ++n)
    for (int m = 0; m < MT; ++m) {
      const int here = rows - m * kRows < kRows ? rows - m * kRows : kRows;
      const bf16 *from = a.tiles + m * a.stride, *column = b.tiles + n * b.stride;
      float* to = c + (n * MT + m) * kResults;
      int r = 0;
      for (; r + 4 <= here; r += 4)
        detail::multiply_rows<4>(from + r * kDepth, column, depth, to + r * kColumns, onto);
      for (; r < here; ++r) detail::multiply_rows<1>(from + r * kDepth, column, depth, to + r * kColumns, onto);
    }
  for (int64_t k = 0; k < depth; ++k) meanwhile();
}

#endif

}  // namespace moewe
