// What the 128 magnitudes of e4m3 become under one scale, rounded to bf16, as tables for lookups of bytes (AVX-512 VBMI).
//
// Not a format of weights (fp8_format.h).
#pragma once

#include "vec.h"

#if defined(__AVX512VBMI__)

namespace moewe {

namespace detail {

struct E4m3Magnitudes {
  alignas(64) float of[128];
  constexpr E4m3Magnitudes() : of() {
    float unit = 0x1p-9f;
    for (int code = 0; code < 127; ++code) {
      if (code >= 16 && code % 8 == 0) unit *= 2;
      of[code] = static_cast<float>(code < 8 ? code : code % 8 + 8) * unit;
    }
    of[127] = __builtin_nanf("");
  }
};
inline constexpr E4m3Magnitudes kE4m3Magnitudes;

struct EvenBytes {
  alignas(64) uint8_t at[64];
  constexpr EvenBytes() : at() {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(2 * i);
  }
};
inline constexpr EvenBytes kEvenBytes;

}  // namespace detail

class E4m3Table {
 public:
  E4m3Table() = default;
  explicit E4m3Table(float scale) {
    const __m512i even = _mm512_load_si512(detail::kEvenBytes.at), odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    const f32x16 factor(scale);
    // The instruction that rounds takes what is subnormal for zero.
    const float size = __builtin_fabsf(scale);
    const bool is_ordinary = size > 0x1p-100f && size < 0x1p100f;
    for (int half = 0; half < 2; ++half) {
      __m512i words[2];
      for (int i = 0; i < 2; ++i) {
        const float* from = detail::kE4m3Magnitudes.of + half * 64 + i * 32;
        words[i] = narrow(f32x16::load(from) * factor, f32x16::load(from + 16) * factor, is_ordinary);
      }
      low_[half] = _mm512_permutex2var_epi8(words[0], even, words[1]);
      high_[half] = _mm512_permutex2var_epi8(words[0], odd, words[1]);
    }
  }

  // 32 numbers each: of the bytes in the lower and in the upper half of every 16.
  void decode(__m512i codes, __m512i& first, __m512i& second) const {
    const __m512i low = _mm512_permutex2var_epi8(low_[0], codes, low_[1]);  // their upper bit plays no part
    const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], codes, high_[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), 0x78);  // a ^ (b & c)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }

 private:
  static __m512i narrow(f32x16 first, f32x16 second, bool is_ordinary) {
#if defined(__AVX512BF16__)
    if (is_ordinary) return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
#endif
    return _mm512_inserti64x4(_mm512_castsi256_si512(first.narrow()), second.narrow(), 1);
  }

  __m512i low_[2], high_[2];
};

}  // namespace moewe

#endif
