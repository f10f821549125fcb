// Products of whole numbers: int8 tiles on AMX, and the dot products of four bytes that AVX-512 and AVX2 make.
//
// Not a matrix product and no scales. Sums of whole numbers are exact, so every path gives the same bits in any order;
// K is at most kMostDepth, or a sum might not fit.
//
// A tile of activations is [16 rows][64] int8; of weights [16 quads of K][16 columns][4] int8; both 1 KiB. A tile of
// results is [16 rows][16 columns] int32.
#pragma once

#include "tiles.h"

namespace moewe {

constexpr int kByteDepth = 64;     // elements of K in a tile of bytes
constexpr int kByteTile = 1024;    // bytes of such a tile
constexpr int64_t kMostDepth = 1 << 17;  // times 127 * 127 is less than 2^31

#if defined(__AVX512F__)

struct i32x16 {
  __m512i v;
  static i32x16 all(int32_t value) { return {_mm512_set1_epi32(value)}; }
  static i32x16 load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
  void store(int32_t* to) const { _mm512_storeu_si512(to, v); }
  f32x16 to_float() const { return _mm512_cvtepi32_ps(v); }
};
inline i32x16 operator*(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }

// 64 bytes: four of each of sixteen columns.
struct Bytes {
  __m512i v;
  static Bytes all(uint8_t value) { return {_mm512_set1_epi8(static_cast<char>(value))}; }
  static Bytes load(const void* from) { return {_mm512_loadu_si512(from)}; }
  // Byte i of sixteen, four times in column i.
  static Bytes of_columns(const uint8_t* from) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm512_mullo_epi32(wide, _mm512_set1_epi32(0x01010101))};
  }
  void store(void* to) const { _mm512_storeu_si512(to, v); }
  Bytes low_nibbles() const { return {_mm512_and_si512(v, _mm512_set1_epi8(15))}; }
  Bytes high_nibbles() const { return {_mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))}; }
};
inline Bytes operator-(Bytes a, Bytes b) { return {_mm512_sub_epi8(a.v, b.v)}; }

// sum + the four products of each column: nibbles (0 to 15) times the four signed bytes in `quad`.
inline i32x16 dot_nibbles(i32x16 sum, Bytes nibbles, int32_t quad) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sum.v, nibbles.v, _mm512_set1_epi32(quad))};
#else
  const __m512i pairs = _mm512_maddubs_epi16(nibbles.v, _mm512_set1_epi32(quad));  // at most 2 * 15 * 128
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

// The same for signed bytes.
inline i32x16 dot_signed(i32x16 sum, Bytes bytes, int32_t quad) {
  const __m512i four = _mm512_set1_epi32(quad);
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(bytes.v, 8), 8), odd = _mm512_srai_epi16(bytes.v, 8);
  const __m512i a = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), b = _mm512_srai_epi16(four, 8);
  return {_mm512_add_epi32(sum.v, _mm512_add_epi32(_mm512_madd_epi16(even, a), _mm512_madd_epi16(odd, b)))};
}

// Sixteen numbers, rounded to nearest and cut to what a byte holds.
inline void store_bytes(f32x16 values, int8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(values.v)));
}

#else

struct i32x16 {
  __m256i lo, hi;
  static i32x16 all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static i32x16 load(const int32_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8))};
  }
  void store(int32_t* to) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), hi);
  }
  f32x16 to_float() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};
inline i32x16 operator*(i32x16 a, i32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}

struct Bytes {
  __m256i lo, hi;
  static Bytes all(uint8_t value) {
    const __m256i half = _mm256_set1_epi8(static_cast<char>(value));
    return {half, half};
  }
  static Bytes load(const void* from) {
    const auto* half = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
  }
  static Bytes of_columns(const uint8_t* from) {
    const __m256i four = _mm256_set1_epi32(0x01010101);
    const auto half = [&](const uint8_t* at) {
      const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
      return _mm256_mullo_epi32(wide, four);
    };
    return {half(from), half(from + 8)};
  }
  void store(void* to) const {
    auto* half = static_cast<__m256i*>(to);
    _mm256_storeu_si256(half, lo);
    _mm256_storeu_si256(half + 1, hi);
  }
  Bytes low_nibbles() const {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)};
  }
  Bytes high_nibbles() const { return Bytes{_mm256_srli_epi16(lo, 4), _mm256_srli_epi16(hi, 4)}.low_nibbles(); }
};
inline Bytes operator-(Bytes a, Bytes b) { return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)}; }

inline i32x16 dot_nibbles(i32x16 sum, Bytes nibbles, int32_t quad) {
  const __m256i four = _mm256_set1_epi32(quad), one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(nibbles.lo, four), one)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(nibbles.hi, four), one))};
}

inline i32x16 dot_signed(i32x16 sum, Bytes bytes, int32_t quad) {
  const __m256i four = _mm256_set1_epi32(quad);
  const __m256i a = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), b = _mm256_srai_epi16(four, 8);
  const auto products = [&](__m256i half) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(half, 8), 8), odd = _mm256_srai_epi16(half, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(even, a), _mm256_madd_epi16(odd, b));
  };
  return {_mm256_add_epi32(sum.lo, products(bytes.lo)), _mm256_add_epi32(sum.hi, products(bytes.hi))};
}

inline void store_bytes(f32x16 values, int8_t* to) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(values.lo), _mm256_cvtps_epi32(values.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

#endif

inline int32_t quad_at(const int8_t* from) {
  int32_t quad;
  std::memcpy(&quad, from, 4);
  return quad;
}

// The sum of n bytes; n is a multiple of 32.
inline int32_t sum_bytes(const int8_t* from, int64_t n) {
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// The largest magnitude of n numbers; NaN where one is not finite. As whole numbers the bits stand in the same order.
inline float largest_magnitude(const bf16* from, int64_t n) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i best = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    best = _mm256_max_epu16(best, _mm256_and_si256(bits, mask));
  }
  alignas(32) uint16_t each[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), best);
  uint16_t largest = 0;
  for (const uint16_t one : each) largest = one > largest ? one : largest;
  for (; i < n; ++i) {
    const uint16_t one = from[i] & 0x7fff;
    largest = one > largest ? one : largest;
  }
  return to_float(largest >= 0x7f80 ? bf16{0x7fc0} : largest);
}

// Writes n numbers as whole ones, byte(i) being where the sixteen from i on go; returns what they are to be multiplied
// with. Numbers too small for a float to divide by are zeros; with one that is not finite nothing is any more.
template <class ByteAt>
inline float quantize_row(const bf16* from, int64_t n, ByteAt&& byte) {
  const float largest = largest_magnitude(from, n), scale = largest / 127.0f;
  const bool fine = largest > 1e-30f;
  const f32x16 factor(fine ? 127.0f / largest : 0.0f);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store_bytes(f32x16::load(from + i) * factor, byte(i));
  if (i < n) store_bytes(f32x16::load(from + i, static_cast<int>(n - i)) * factor, byte(i));
  return largest <= 1e-30f ? 0.0f : scale;  // NaN is not
}

#if MOEWE_AMX

// As `multiply` of tiles.h, over tiles of bytes; strides and positions count bytes.
template <int MT, int NT>
inline void multiply_bytes(const int8_t* a, int64_t a_stride, const int8_t* b, int64_t b_stride, int64_t depth,
                           int32_t* c, int /*rows*/) {
  static_assert(MT >= 1 && MT <= 2 && NT >= 1 && NT <= 2);
  _tile_zero(0);
  if constexpr (NT == 2) _tile_zero(1);
  if constexpr (MT == 2) _tile_zero(2);
  if constexpr (MT == 2 && NT == 2) _tile_zero(3);
  for (int64_t k = 0; k < depth; ++k) {
    _mm_prefetch(reinterpret_cast<const char*>(b + (k + 8) * kByteTile), _MM_HINT_T0);
    _tile_loadd(4, a + k * kByteTile, 64);
    _tile_loadd(6, b + k * kByteTile, 64);
    _tile_dpbssd(0, 4, 6);
    if constexpr (NT == 2) {
      _tile_loadd(7, b + b_stride + k * kByteTile, 64);
      _tile_dpbssd(1, 4, 7);
    }
    if constexpr (MT == 2) {
      _tile_loadd(5, a + a_stride + k * kByteTile, 64);
      _tile_dpbssd(2, 5, 6);
      if constexpr (NT == 2) _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  if constexpr (NT == 2) _tile_stored(1, c + MT * kResults, 64);
  if constexpr (MT == 2) _tile_stored(2, c + kResults, 64);
  if constexpr (MT == 2 && NT == 2) _tile_stored(3, c + MT * kResults + kResults, 64);
}

#else

namespace detail {

// R rows at once, so that each load of weights serves all of them.
template <int R>
inline void multiply_byte_rows(const int8_t* a, const int8_t* b, int64_t depth, int32_t* c) {
  i32x16 sums[R];
#if defined(__AVX512VNNI__)
  // That instruction takes one side without sign: 128 is added to the weights, and comes off again with the row's sum.
  const Bytes bias = Bytes::all(128);
  for (int r = 0; r < R; ++r) {
    int32_t sum = 0;
    for (int64_t k = 0; k < depth; ++k) sum += sum_bytes(a + k * kByteTile + r * kByteDepth, kByteDepth);
    sums[r] = i32x16::all(-128 * sum);
  }
#else
  for (int r = 0; r < R; ++r) sums[r] = i32x16::all(0);
#endif
  for (int64_t k = 0; k < depth; ++k)
    for (int quad = 0; quad < 16; ++quad) {
      Bytes weights = Bytes::load(b + k * kByteTile + quad * 64);
#if defined(__AVX512VNNI__)
      weights = weights - bias;  // as numbers without sign, plus 128
#endif
      for (int r = 0; r < R; ++r) {
        const int32_t four = quad_at(a + k * kByteTile + r * kByteDepth + quad * 4);
#if defined(__AVX512VNNI__)
        sums[r].v = _mm512_dpbusd_epi32(sums[r].v, weights.v, _mm512_set1_epi32(four));
#else
        sums[r] = dot_signed(sums[r], weights, four);
#endif
      }
    }
  for (int r = 0; r < R; ++r) sums[r].store(c + r * kColumns);
}

}  // namespace detail

template <int MT, int NT>
inline void multiply_bytes(const int8_t* a, int64_t a_stride, const int8_t* b, int64_t b_stride, int64_t depth,
                           int32_t* c, int rows) {
  for (int n = 0; n < NT; ++n)
    for (int m = 0; m < MT; ++m) {
      const int here = rows - m * kRows < kRows ? rows - m * kRows : kRows;
      const int8_t* from = a + m * a_stride;
      int32_t* to = c + (n * MT + m) * kResults;
      int r = 0;
      for (; r + 4 <= here; r += 4)
        detail::multiply_byte_rows<4>(from + r * kByteDepth, b + n * b_stride, depth, to + r * kColumns);
      for (; r < here; ++r)
        detail::multiply_byte_rows<1>(from + r * kByteDepth, b + n * b_stride, depth, to + r * kColumns);
    }
}

#endif

}  // namespace moewe
