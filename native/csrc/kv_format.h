// How an element of K or V is stored, and the way there and back.
//
// Not the paging (attention.h). fp8 (e4m3, no infinities) and int8 keep one bf16 scale a token and head beside the
// elements: value = element * scale. kvcache/scaled.py says the same in torch, to the last bit. Elements become bf16
// without error, so that a scale need not be applied before a product but to its result.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace moewe {

enum KvFormat : int32_t { kKvBf16 = 0, kKvFp8 = 1, kKvInt8 = 2 };

inline int64_t element_bytes(int32_t format) { return format == kKvBf16 ? 2 : 1; }

// A head whose largest magnitude is below this counts as zeros, so that no scale is so small that bits are lost.
constexpr float kSmallestHead = 0x1p-100f;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Bf16Kv {
  using Element = bf16;
  static constexpr bool kScaled = false;
#if defined(__AVX512F__)
  static __m512i widen(const Element* from, __mmask32 here) { return _mm512_maskz_loadu_epi16(here, from); }
#endif
};

struct Fp8Kv {
  using Element = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 448.0f;

  // Of a value within the format: to nearest, ties to even. Below 2^-6 elements are 2^-9 apart, as floats at 2^14 are.
  static Element narrow(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    const uint32_t small = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
    return static_cast<Element>((magnitude < bits_of(0x1p-6f) ? small : normal) | (bits >> 24 & 0x80));
  }

  static bf16 widen(Element element) {
    const uint32_t magnitude = element & 0x7f;
    const uint32_t normal = (magnitude << 4) + (120 << 7);
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f) >> 16;
    return static_cast<bf16>((magnitude < 8 ? small : normal) | (element & 0x80u) << 8);
  }

#if defined(__AVX512F__)
  static __m512i widen(const Element* from, __mmask32 here) {
    // 0 to 7 times 2^-9.
    alignas(64) static constexpr uint16_t kSmall[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i elements = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(here, from));
    const __m512i magnitudes = _mm512_and_si512(elements, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8));
    const __m512i all = _mm512_mask_permutexvar_epi16(normal, is_small, magnitudes, _mm512_load_si512(kSmall));
    return _mm512_or_si512(all, _mm512_slli_epi16(_mm512_and_si512(elements, _mm512_set1_epi16(0x80)), 8));
  }
#endif
};

struct Int8Kv {
  using Element = int8_t;
  static constexpr bool kScaled = true;
  static constexpr float kLargest = 127.0f;

  // Of a value within the format: to nearest, ties to even, as floats at 1.5 * 2^23 round.
  static Element narrow(float value) {
    return static_cast<Element>(bits_of(value + 12582912.0f) - bits_of(12582912.0f));
  }

  static bf16 widen(Element element) { return static_cast<bf16>(bits_of(static_cast<float>(element)) >> 16); }

#if defined(__AVX512F__)
  static __m512i widen(const Element* from, __mmask32 here) {
    const __m256i elements = _mm256_maskz_loadu_epi8(here, from);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(elements)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(elements, 1)));
    const __m256i halves[2] = {_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16)),
                               _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16))};
    return _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
  }
#endif
};

// Writes `width` elements as bf16, and zeros behind them up to a multiple of 32.
template <class Format>
inline void widen_row(const typename Format::Element* from, int64_t width, bf16* to) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < width; i += 32) {
    const __mmask32 here = width - i >= 32 ? 0xffffffffu : (1u << (width - i)) - 1;
    _mm512_storeu_si512(to + i, Format::widen(from + i, here));
  }
#else
  for (int64_t i = 0; i < width; i += 32) {
    typename Format::Element part[32] = {};
    std::memcpy(part, from + i, (width - i < 32 ? width - i : 32) * sizeof(part[0]));
    for (int j = 0; j < 32; ++j) to[i + j] = Format::widen(part[j]);
  }
#endif
}

// Stores one head and returns its scale: NaN where a value is not finite, with elements of 0.
template <class Format>
inline bf16 store_scaled(const float* values, int64_t width, typename Format::Element* to) {
  uint32_t largest = 0;  // magnitudes in the order of their bits: NaN comes last
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = bits_of(values[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const bool is_finite = largest < 0x7f800000;
  if (!is_finite || largest < bits_of(kSmallestHead)) {
    std::memset(to, 0, width);
    return is_finite ? 0 : 0x7fc0;
  }
  // Rounded up, so that no element is beyond the largest of its format.
  const bf16 scale = static_cast<bf16>((bits_of(float_of(largest) / Format::kLargest) + 0xffff) >> 16);
  const float divisor = to_float(scale);
  for (int64_t i = 0; i < width; ++i) to[i] = Format::narrow(values[i] / divisor);
  return scale;
}

template <class Format>
inline void store_scaled_heads(const float* values, int64_t slot, int64_t heads, int64_t width, void* cache,
                               bf16* scales) {
  auto* to = static_cast<typename Format::Element*>(cache) + slot * heads * width;
  for (int64_t head = 0; head < heads; ++head)
    scales[slot * heads + head] = store_scaled<Format>(values + head * width, width, to + head * width);
}

// Stores `heads` heads of `width` values, which stand side by side, at `slot` of a cache [slots, heads, width] with
// scales [slots, heads], null for bf16.
inline void store_heads(int32_t format, const float* values, int64_t slot, int64_t heads, int64_t width, void* cache,
                        bf16* scales) {
  if (format == kKvFp8) return store_scaled_heads<Fp8Kv>(values, slot, heads, width, cache, scales);
  if (format == kKvInt8) return store_scaled_heads<Int8Kv>(values, slot, heads, width, cache, scales);
  const int64_t all = heads * width;
  bf16* to = static_cast<bf16*>(cache) + slot * all;
  for (int64_t i = 0; i < all; i += 16) {
    const int n = all - i < 16 ? static_cast<int>(all - i) : 16;
    f32x16::load(values + i, n).store(to + i, n);
  }
}

}  // namespace moewe
