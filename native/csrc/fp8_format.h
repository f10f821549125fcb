// Weights in e4m3 (OCP 8-bit floating point, 2023) with an f32 scale for blocks of inputs and outputs: a format of gemm.h.
//
// Not a packing (pack_codes.h). A number is e4m3 times its scale, multiplied in f32 and rounded once to bf16: that is where
// this format rounds. 32 inputs of a column tile are 512 bytes: [8 lines][4 columns at a time][2][4][2]. Line i holds pairs
// 2i and 2i + 1 of K; four columns follow each other with the first of these pairs, then with the second. Weights:
// [column tiles][K / 32] of these; scales f32 [column tiles][K / group] where all 16 outputs of every tile share them, else
// [column tiles][K / group][16]. The last group may be cut short.
#pragma once

#include "decoded.h"
#include "e4m3_table.h"
#include "tiles_int.h"

namespace moewe {

struct Fp8Codec {
  static constexpr int kLine = 64;  // bytes
  static constexpr int kLines = 8;  // of a tile
  static constexpr int kTileBytes = kLine * kLines;

  struct Weights {
    const uint8_t* codes;
    const float* scales;
    int64_t depth, group, groups;
    bool shared;  // scales are those of all outputs of a column tile
    int64_t scales_of_tile() const { return shared ? groups : groups * kColumns; }
  };

  static Weights weights(const Matrix& matrix, int64_t first_tile) {
    const int64_t depth = Bf16::depth(matrix.columns), groups = whole(matrix.columns, matrix.group);
    Weights found{static_cast<const uint8_t*>(matrix.data) + first_tile * depth * kTileBytes,
                  static_cast<const float*>(matrix.scales), depth, matrix.group, groups, matrix.scales_each == 1};
    found.scales += first_tile * found.scales_of_tile();
    return found;
  }

  class Reader {
   public:
    Reader(const Weights& weights, int64_t tile)
        : codes_(weights.codes + tile * weights.depth * kTileBytes),
          scales_(weights.scales + tile * weights.scales_of_tile()),
          group_(weights.group),
          groups_(weights.groups),
          shared_(weights.shared) {}

    void next(bf16* to) {
      for (int line = 0; line < kLines; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(codes_ + kAhead + line * kLine), _MM_HINT_T0);
#if defined(__AVX512VBMI__)
      if (shared_ && group_ % kDepth == 0) decode_shared(to);
      else decode_any(to);
#else
      decode_any(to);
#endif
      codes_ += kTileBytes;
      k_ += kDepth;
    }

   private:
    static constexpr int kAhead = 2048;  // bytes

#if defined(__AVX512VBMI__)
    void decode_shared(bf16* to) {
      if (k_ == end_) {
        table_ = E4m3Table(*scales_++);
        end_ += group_;
      }
      const E4m3Table table = table_;  // in registers: what is written may be anywhere, for all the compiler knows
      unrolled<kLines>([&](auto line) MOEWE_INLINE {
        __m512i first, second;
        table.decode(_mm512_loadu_si512(codes_ + line * kLine), first, second);
        _mm512_storeu_si512(to + line * 2 * kDepth, first);
        _mm512_storeu_si512(to + (line * 2 + 1) * kDepth, second);
      });
    }
    E4m3Table table_;
    int64_t end_ = 0;  // of the inputs that the table is for
#endif

    void decode_any(bf16* to) {
      for (int pair = 0; pair < kDepth / 2; ++pair, to += kDepth) {
        for (int which = 0; which < 2; ++which) {
          // Behind the last input there is nothing to be scaled.
          const int64_t at = std::min((k_ + pair * 2 + which) / group_, groups_ - 1);
          if (at == at_[which]) continue;
          at_[which] = at;
          for (int column = 0; column < kColumns; ++column)
            factors_[column * 2 + which] = scales_[shared_ ? at : at * kColumns + column];
        }
        alignas(16) uint8_t codes[kDepth];
        for (int i = 0; i < 4; ++i) std::memcpy(codes + i * 8, codes_ + pair / 2 * kLine + i * 16 + pair % 2 * 8, 8);
        for (int i = 0; i < kDepth; i += 16) (numbers(codes + i) * f32x16::load(factors_ + i)).store(to + i);
      }
    }
    int64_t at_[2] = {-1, -1};  // groups whose scales these are, for the first and the second of each pair
    float factors_[2 * kColumns];

    const uint8_t* codes_;
    const float* scales_;
    int64_t group_, groups_, k_ = 0;
    bool shared_;
  };

 private:
  // Of sixteen codes.
  static f32x16 numbers(const uint8_t* codes) {
    // As f16 the same bits are a 256th, subnormal ones too; but e4m3 has a NaN where f16 has 1.875.
    const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 1);
    const __m256i bits = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
#if defined(__AVX512F__)
    const f32x16 part(_mm512_cvtph_ps(bits));
#else
    const f32x16 part(_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1)));
#endif
    const f32x16 magnitude = max(part, f32x16::zero() - part);
    return where_less(magnitude, f32x16(1.875f), part * f32x16(256.0f), f32x16(__builtin_nanf("")));
  }
};

using Fp8 = Decoded<Fp8Codec>;

}  // namespace moewe
