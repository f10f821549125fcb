// Whole numbers in vectors: the dot products of four bytes that AVX-512 and AVX2 make, and rows as bytes with a scale.
//
// Not a matrix product. Sums of whole numbers are exact, so every path gives the same bits, tiles of AMX included.
//
// A tile of activations is [16 rows][64] int8; of weights [16 quads of K][16 columns][4] int8; both 1 KiB. A tile of
// results is [16 rows][16 columns] int32.
#pragma once

#include <type_traits>
#include <utility>

#include "tiles.h"

namespace moewe {

constexpr int kByteDepth = 64;     // elements of K in a tile of bytes
constexpr int kByteTile = 1024;    // bytes of such a tile

// Of a lambda: where it is called its variables are to be registers.
#define MOEWE_INLINE __attribute__((always_inline))

namespace detail {
template <class F, int... I>
MOEWE_INLINE inline void call_each(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
}  // namespace detail

// f(0), ..., f(N - 1) with numbers that the compiler knows, so that arrays of vectors stay in registers: loops are
// unrolled too late for that.
template <int N, class F>
MOEWE_INLINE inline void unrolled(F&& f) {
  detail::call_each(f, std::make_integer_sequence<int, N>{});
}

// f(n) for a number n of 1 to Most, as one that the compiler knows.
template <int Most, class F>
inline void call_with(int n, F&& f) {
  if constexpr (Most > 1) {
    if (n < Most) return call_with<Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>{});
}

#if defined(__AVX512F__)

struct i32x16 {
  __m512i v;
  static i32x16 all(int32_t value) { return {_mm512_set1_epi32(value)}; }
  static i32x16 load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
  void store(int32_t* to) const { _mm512_storeu_si512(to, v); }
  f32x16 to_float() const { return _mm512_cvtepi32_ps(v); }
};

inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

// 64 bytes: four of each of sixteen columns.
struct Bytes {
  __m512i v;
  static Bytes all(uint8_t value) { return {_mm512_set1_epi8(static_cast<char>(value))}; }
  static Bytes load(const void* from) { return {_mm512_loadu_si512(from)}; }
  // Byte i of sixteen, four times in column i.
  static Bytes of_columns(const uint8_t* from) {
    const __m512i sixteen = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return {_mm512_shuffle_epi8(sixteen, _mm512_mullo_epi32(numbers, _mm512_set1_epi32(0x01010101)))};
  }
  void store(void* to) const { _mm512_storeu_si512(to, v); }
};
inline Bytes operator+(Bytes a, Bytes b) { return {_mm512_add_epi8(a.v, b.v)}; }

// 32 words of 16 bits, none with a sign: two of each of sixteen columns.
struct Words {
  __m512i v;
  static Words load(const void* from) { return {_mm512_loadu_si512(from)}; }
  // Byte i of sixteen, twice in column i.
  static Words of_columns(const uint8_t* from) {
    return {_mm512_and_si512(Bytes::of_columns(from).v, _mm512_set1_epi16(0x00ff))};
  }
  Words times16() const { return {_mm512_slli_epi16(v, 4)}; }
};
inline Words operator&(Words a, int mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi16(static_cast<int16_t>(mask)))};
}
inline Words low_product(Words a, Words b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
inline Words high_product(Words a, Words b) { return {_mm512_mulhi_epu16(a.v, b.v)}; }
// Of each word the upper byte of `high`, and below it that of `low`, which has no other.
inline Bytes bytes_of(Words high, Words low) {
  return {_mm512_ternarylogic_epi32(high.v, _mm512_set1_epi16(-0x100), low.v, 0xea)};
}

// sum + the four products of each column: signed bytes times those in `quad`. Where `kBiased`, 128 times the sum of all
// quads is to be taken off what comes out.
#if defined(__AVX512VNNI__)
constexpr bool kBiased = true;  // the instruction takes one side without sign: 128 is added to it
// The same for bytes that have the 128 already, where there is one to be added.
inline i32x16 dot_biased(i32x16 sum, Bytes bytes, int32_t quad) {
  return {_mm512_dpbusd_epi32(sum.v, bytes.v, _mm512_set1_epi32(quad))};
}
inline i32x16 dot_signed(i32x16 sum, Bytes bytes, int32_t quad) {
  return dot_biased(sum, bytes + Bytes::all(128), quad);
}
#else
constexpr bool kBiased = false;
inline i32x16 dot_signed(i32x16 sum, Bytes bytes, int32_t quad) {
  const __m512i four = _mm512_set1_epi32(quad);
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(bytes.v, 8), 8), odd = _mm512_srai_epi16(bytes.v, 8);
  const __m512i a = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 8), b = _mm512_srai_epi16(four, 8);
  return {_mm512_add_epi32(sum.v, _mm512_add_epi32(_mm512_madd_epi16(even, a), _mm512_madd_epi16(odd, b)))};
}
inline i32x16 dot_biased(i32x16 sum, Bytes bytes, int32_t quad) { return dot_signed(sum, bytes, quad); }
#endif

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

inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }

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
    const __m256i sixteen = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i numbers = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), four = _mm256_set1_epi32(0x01010101);
    const __m256i low = _mm256_mullo_epi32(numbers, four), high = _mm256_add_epi8(low, _mm256_set1_epi8(8));
    return {_mm256_shuffle_epi8(sixteen, low), _mm256_shuffle_epi8(sixteen, high)};
  }
  void store(void* to) const {
    auto* half = static_cast<__m256i*>(to);
    _mm256_storeu_si256(half, lo);
    _mm256_storeu_si256(half + 1, hi);
  }
};
inline Bytes operator+(Bytes a, Bytes b) { return {_mm256_add_epi8(a.lo, b.lo), _mm256_add_epi8(a.hi, b.hi)}; }

struct Words {
  __m256i lo, hi;
  static Words load(const void* from) {
    const Bytes bytes = Bytes::load(from);
    return {bytes.lo, bytes.hi};
  }
  static Words of_columns(const uint8_t* from) {
    const __m256i mask = _mm256_set1_epi16(0x00ff);
    const Bytes bytes = Bytes::of_columns(from);
    return {_mm256_and_si256(bytes.lo, mask), _mm256_and_si256(bytes.hi, mask)};
  }
  Words times16() const { return {_mm256_slli_epi16(lo, 4), _mm256_slli_epi16(hi, 4)}; }
};
inline Words operator&(Words a, int mask) {
  const __m256i all = _mm256_set1_epi16(static_cast<int16_t>(mask));
  return {_mm256_and_si256(a.lo, all), _mm256_and_si256(a.hi, all)};
}
inline Words low_product(Words a, Words b) { return {_mm256_mullo_epi16(a.lo, b.lo), _mm256_mullo_epi16(a.hi, b.hi)}; }
inline Words high_product(Words a, Words b) { return {_mm256_mulhi_epu16(a.lo, b.lo), _mm256_mulhi_epu16(a.hi, b.hi)}; }
inline Bytes bytes_of(Words high, Words low) {
  const __m256i mask = _mm256_set1_epi16(-0x100);
  return {_mm256_or_si256(_mm256_and_si256(high.lo, mask), low.lo),
          _mm256_or_si256(_mm256_and_si256(high.hi, mask), low.hi)};
}

constexpr bool kBiased = false;
inline i32x16 dot_signed(i32x16 sum, Bytes bytes, int32_t quad) {
  const __m256i four = _mm256_set1_epi32(quad);
  const __m256i a = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), b = _mm256_srai_epi16(four, 8);
  const auto products = [&](__m256i half) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(half, 8), 8), odd = _mm256_srai_epi16(half, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(even, a), _mm256_madd_epi16(odd, b));
  };
  return {_mm256_add_epi32(sum.lo, products(bytes.lo)), _mm256_add_epi32(sum.hi, products(bytes.hi))};
}
inline i32x16 dot_biased(i32x16 sum, Bytes bytes, int32_t quad) { return dot_signed(sum, bytes, quad); }

inline void store_bytes(f32x16 values, int8_t* to) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(values.lo), _mm256_cvtps_epi32(values.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

#endif

// Ask for what follows in a stream from memory, so many bytes further: L2 early, with more under way than L1 can wait
// for, then L1.
template <int Early, int Late>
MOEWE_INLINE inline void prefetch_stream(const void* at) {
  const auto* bytes = static_cast<const char*>(at);
  _mm_prefetch(bytes + Early, _MM_HINT_T1);
  _mm_prefetch(bytes + Late, _MM_HINT_T0);
}

// What N sums come to together.
template <int N>
inline i32x16 total(const i32x16 (&sums)[N]) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1) return sums[0];
  else if constexpr (N == 2) return sums[0] + sums[1];
  else return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

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
  // The instruction finds the smallest of eight.
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(best), _mm256_extracti128_si256(best, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  auto largest = static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
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

}  // namespace moewe
