// Sixteen floats at once, on AVX-512 and on AVX2 alike, so that every kernel but the tile products is written once.
//
// Both give the same bits: each operation is one IEEE operation a lane (fma included), and sums over lanes fold in one
// fixed order. bf16 is rounded to nearest, ties to even; NaN stays NaN.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace moewe {

using bf16 = uint16_t;

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>((bits >> 16) | 64);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
  f32x16() = default;
  f32x16(__m512 value) : v(value) {}
  explicit f32x16(float value) : v(_mm512_set1_ps(value)) {}
  static f32x16 zero() { return _mm512_setzero_ps(); }
  static f32x16 load(const float* from) { return _mm512_loadu_ps(from); }
  // The first n of 16, the rest zero; memory behind them is not touched.
  static f32x16 load(const float* from, int n) { return _mm512_maskz_loadu_ps(mask(n), from); }
  static f32x16 load(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
  static f32x16 load(const bf16* from, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), from)); }
  void store(float* to) const { _mm512_storeu_ps(to, v); }
  void store(float* to, int n) const { _mm512_mask_storeu_ps(to, mask(n), v); }
  void store(bf16* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow()); }
  void store(bf16* to, int n) const { _mm256_mask_storeu_epi16(to, mask(n), narrow()); }
  // The same numbers, rounded to bf16.
  f32x16 rounded() const { return widen(narrow()); }

  static __mmask16 mask(int n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n < 0 ? 0 : n)) - 1); }
  static __m512 widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  __m256i narrow() const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(64));
    return _mm512_cvtepi32_epi16(rounded);
  }
};

inline f32x16 operator+(f32x16 a, f32x16 b) { return _mm512_add_ps(a.v, b.v); }
inline f32x16 operator-(f32x16 a, f32x16 b) { return _mm512_sub_ps(a.v, b.v); }
inline f32x16 operator*(f32x16 a, f32x16 b) { return _mm512_mul_ps(a.v, b.v); }
inline f32x16 operator/(f32x16 a, f32x16 b) { return _mm512_div_ps(a.v, b.v); }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }  // a * b + c
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a.v, b.v); }
inline f32x16 min(f32x16 a, f32x16 b) { return _mm512_min_ps(a.v, b.v); }
inline f32x16 round(f32x16 a) { return _mm512_roundscale_ps(a.v, 0); }
// a * 2^n for whole n in [-126, 127].
inline f32x16 scale(f32x16 a, f32x16 n) { return _mm512_scalef_ps(a.v, n.v); }
inline float sum(f32x16 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
// `value` where a >= b, else zero (also where either is NaN).
inline f32x16 where_at_least(f32x16 a, f32x16 b, f32x16 value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), value.v);
}
// `value` where a < b, else `other` (also where a or b is NaN).
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 value, f32x16 other) {
  return _mm512_mask_mov_ps(other.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), value.v);
}

#else

struct f32x16 {
  __m256 lo, hi;
  f32x16() = default;
  f32x16(__m256 low, __m256 high) : lo(low), hi(high) {}
  explicit f32x16(float value) : lo(_mm256_set1_ps(value)), hi(lo) {}
  static f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static f32x16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static f32x16 load(const float* from, int n) {
    alignas(32) float part[16] = {};
    std::memcpy(part, from, count(n) * sizeof(float));
    return load(part);
  }
  static f32x16 load(const bf16* from) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
  }
  static f32x16 load(const bf16* from, int n) {
    alignas(32) bf16 part[16] = {};
    std::memcpy(part, from, count(n) * sizeof(bf16));
    return load(part);
  }
  void store(float* to) const {
    _mm256_storeu_ps(to, lo);
    _mm256_storeu_ps(to + 8, hi);
  }
  void store(float* to, int n) const {
    alignas(32) float part[16];
    store(part);
    std::memcpy(to, part, count(n) * sizeof(float));
  }
  void store(bf16* to) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(lo));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), narrow(hi));
  }
  void store(bf16* to, int n) const {
    alignas(32) bf16 part[16];
    store(part);
    std::memcpy(to, part, count(n) * sizeof(bf16));
  }
  f32x16 rounded() const { return {widen(narrow(lo)), widen(narrow(hi))}; }

  static int count(int n) { return n < 0 ? 0 : n > 16 ? 16 : n; }
  static __m256 widen(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m128i narrow(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(64));
    const __m256i result = _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
    return _mm256_castsi256_si128(packed);
  }
};

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 round(f32x16 a) { return {_mm256_round_ps(a.lo, 0), _mm256_round_ps(a.hi, 0)}; }
inline f32x16 scale(f32x16 a, f32x16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias), 23);
  const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias), 23);
  return {_mm256_mul_ps(a.lo, _mm256_castsi256_ps(low)), _mm256_mul_ps(a.hi, _mm256_castsi256_ps(high))};
}
inline float sum(f32x16 a) {
  const __m256 half = _mm256_add_ps(a.lo, a.hi);
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline float largest(f32x16 a) {
  const __m256 half = _mm256_max_ps(a.lo, a.hi);
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}
inline f32x16 where_at_least(f32x16 a, f32x16 b, f32x16 value) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), value.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ), value.hi)};
}
inline f32x16 where_less(f32x16 a, f32x16 b, f32x16 value, f32x16 other) {
  return {_mm256_blendv_ps(other.lo, value.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(other.hi, value.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

#endif

// e^a within 2 units in the last place: 2^n times a polynomial in [-ln 2 / 2, ln 2 / 2] (Cody and Waite, 1980).
// Below -87 the result is that of -87, above 88 that of 88; NaN stays NaN.
inline f32x16 exp(f32x16 a) {
  a = min(f32x16(88.0f), max(f32x16(-87.0f), a));  // in this order of operands NaN passes
  const f32x16 n = round(a * f32x16(1.44269504f));
  f32x16 r = fma(n, f32x16(-0.693359375f), a);
  r = fma(n, f32x16(2.12194440e-4f), r);
  f32x16 p = fma(f32x16(1.9875691500e-4f), r, f32x16(1.3981999507e-3f));
  p = fma(p, r, f32x16(8.3334519073e-3f));
  p = fma(p, r, f32x16(4.1665795894e-2f));
  p = fma(p, r, f32x16(1.6666665459e-1f));
  p = fma(p, r, f32x16(5.0000001201e-1f));
  p = fma(p, r * r, r + f32x16(1.0f));
  return scale(p, n);
}

inline f32x16 sigmoid(f32x16 a) { return f32x16(1.0f) / (f32x16(1.0f) + exp(f32x16::zero() - a)); }
inline f32x16 silu(f32x16 a) { return a * sigmoid(a); }

}  // namespace moewe
