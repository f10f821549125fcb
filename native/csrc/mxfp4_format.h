// Weights in MXFP4 (Open Compute Project, Microscaling formats, 2023): e2m1 codes of four bits, and for each 32 inputs of
// an output a power of two, e8m0. A format of gemm.h; the numbers are exact in bf16.
//
// Not a packing (pack_codes.h). 32 inputs of a column tile are 256 bytes: [4 lines][16 columns][2][2]. Line i holds pairs
// 4i to 4i + 3 of K; a column has two words of 16 bits there, one for the first and one for the second of each pair; from
// the lowest bits on, a word has the codes of the four pairs. Weights: [column tiles][K / 32] of these; scales
// [column tiles][K / 32][16] u8.
#pragma once

#include "decoded.h"
#include "tiles_int.h"

namespace moewe {

struct Mxfp4Codec {
  static constexpr int kLine = 64;  // bytes
  static constexpr int kLines = 4;  // of a tile
  static constexpr int kTileBytes = kLine * kLines;
  static constexpr int kBias = 127, kNoNumber = 255;  // of scales

  struct Weights {
    const uint8_t *codes, *scales;
    int64_t depth;
  };

  static Weights weights(const Matrix& matrix, int64_t first_tile) {
    const int64_t depth = Bf16::depth(matrix.columns);
    return {static_cast<const uint8_t*>(matrix.data) + first_tile * depth * kTileBytes,
            static_cast<const uint8_t*>(matrix.scales) + first_tile * depth * kColumns, depth};
  }

  class Reader {
   public:
    Reader(const Weights& weights, int64_t tile)
        : codes_(weights.codes + tile * weights.depth * kTileBytes),
          scales_(weights.scales + tile * weights.depth * kColumns) {}
    void next(bf16* to) {
      for (int line = 0; line < kLines; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(codes_ + kAhead + line * kLine), _MM_HINT_T0);
      if (is_ordinary(scales_)) decode(codes_, scales_, to);
      else decode_any(codes_, scales_, to);
      codes_ += kTileBytes;
      scales_ += kColumns;
    }

   private:
    static constexpr int kAhead = 2048;  // bytes
    const uint8_t *codes_, *scales_;
  };

 private:
  // e2m1 in bf16; both zeros are +0.
  static constexpr uint16_t kNumbers[16] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                            0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

  // Whether adding to exponents is all there is to do: no result is subnormal or infinite, and every scale is a number.
  static bool is_ordinary(const uint8_t* scales) {
    // 2 to 252 become 0 to 250.
    const __m128i from_two = _mm_sub_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)), _mm_set1_epi8(2));
    const __m128i most = _mm_set1_epi8(static_cast<char>(250));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(from_two, most), most)) == 0xffff;
  }

#if defined(__AVX512F__)
  static void decode(const uint8_t* codes, const uint8_t* scales, bf16* to) {
    // Twice, so that the bit behind a code does not matter.
    const __m512i numbers = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(kNumbers)));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
    const __m512i both = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 16));
    const __m512i exponents = _mm512_slli_epi16(_mm512_sub_epi16(both, _mm512_set1_epi16(kBias)), 7);
    unrolled<kLines>([&](auto line) MOEWE_INLINE {
      const __m512i words = _mm512_loadu_si512(codes + line * kLine);
      unrolled<4>([&](auto i) MOEWE_INLINE {
        const __m512i number = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * i), numbers);
        const __mmask32 some = _mm512_test_epi16_mask(number, number);
        _mm512_storeu_si512(to + (line * 4 + i) * kDepth, _mm512_mask_add_epi16(number, some, number, exponents));
      });
    });
  }
#else
  static void decode(const uint8_t* codes, const uint8_t* scales, bf16* to) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kNumbers));
    const __m128i first = _mm256_castsi256_si128(numbers), second = _mm256_extracti128_si256(numbers, 1);
    const __m128i byte = _mm_set1_epi16(0xff);
    const __m128i even = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
    const __m128i odd = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    const __m256i low = _mm256_broadcastsi128_si256(even), high = _mm256_broadcastsi128_si256(odd);
    for (int half = 0; half < 2; ++half) {  // eight columns
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + half * 8)));
      const __m256i both = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 16));
      const __m256i exponents = _mm256_slli_epi16(_mm256_sub_epi16(both, _mm256_set1_epi16(kBias)), 7);
      for (int line = 0; line < kLines; ++line) {
        __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + line * kLine + half * 32));
        for (int i = 0; i < 4; ++i, words = _mm256_srli_epi16(words, 4)) {
          const __m256i code = _mm256_and_si256(words, _mm256_set1_epi16(15));  // 0 in the upper byte gives 0
          const __m256i upper = _mm256_slli_epi16(_mm256_shuffle_epi8(high, code), 8);
          const __m256i number = _mm256_or_si256(_mm256_shuffle_epi8(low, code), upper);
          const __m256i none = _mm256_cmpeq_epi16(number, _mm256_setzero_si256());
          const __m256i result = _mm256_add_epi16(number, _mm256_andnot_si256(none, exponents));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (line * 4 + i) * kDepth + half * 16), result);
        }
      }
    }
  }
#endif

  static void decode_any(const uint8_t* codes, const uint8_t* scales, bf16* to) {
    for (int column = 0; column < kColumns; ++column) {
      const uint8_t scale = scales[column];
      const float power = scale == kNoNumber ? __builtin_nanf("") : __builtin_ldexpf(1.0f, scale - kBias);
      for (int k = 0; k < kDepth; ++k) {
        const int pair = k / 2, word = pair / 4 * kLine + column * 4 + k % 2 * 2;
        const unsigned code = codes[word + pair % 4 / 2] >> (pair % 2 * 4) & 15u;
        to[pair * kDepth + column * 2 + k % 2] = to_bf16(to_float(kNumbers[code]) * power);
      }
    }
  }
};

using Mxfp4 = Decoded<Mxfp4Codec>;

}  // namespace moewe
