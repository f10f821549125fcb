// How many operations/s this machine's matrix products reach when all numbers are in cache: the other ceiling of a kernel.
//
// Not a kernel of any model. For each number format the fastest of the instructions that were compiled for counts.
#include <algorithm>
#include <cstdint>

#include "rates.h"
#include "tiles.h"

namespace moewe {

namespace {

volatile uint64_t sink;  // keeps what a pass computed alive
constexpr int kBf16 = 0, kInt8 = 1;

#if MOEWE_AMX

constexpr int kSteps = 4096;  // of a pass: less than a tenth of a millisecond
constexpr int kPanel = 4;     // tiles along K

// Two tiles of rows times two of columns, all of them in the first-level cache. Product(results, a, b) takes numbers.
#define MOEWE_TILE_PASS(NAME, PRODUCT, DEPTH)                       \
  struct NAME {                                                     \
    static constexpr double kOperations = 4.0 * 2 * 16 * 16 * DEPTH; \
    static uint64_t pass() {                                        \
      alignas(64) static thread_local char tiles[4][kPanel][1024];  \
      _tile_zero(0);                                                \
      _tile_zero(1);                                                \
      _tile_zero(2);                                                \
      _tile_zero(3);                                                \
      for (int step = 0; step < kSteps; ++step) {                   \
        const int k = step % kPanel;                                \
        _tile_loadd(4, tiles[0][k], 64);                            \
        _tile_loadd(5, tiles[1][k], 64);                            \
        _tile_loadd(6, tiles[2][k], 64);                            \
        _tile_loadd(7, tiles[3][k], 64);                            \
        PRODUCT(0, 4, 6);                                           \
        PRODUCT(1, 4, 7);                                           \
        PRODUCT(2, 5, 6);                                           \
        PRODUCT(3, 5, 7);                                           \
      }                                                             \
      _tile_stored(0, tiles[0][0], 64);                             \
      return static_cast<uint64_t>(tiles[0][0][0]);                 \
    }                                                               \
  };
MOEWE_TILE_PASS(Bf16, _tile_dpbf16ps, 32)
MOEWE_TILE_PASS(Int8, _tile_dpbssd, 64)
#undef MOEWE_TILE_PASS

template <class Measure>
double best_of(int format, Measure&& measure) {
  return format == kBf16 ? measure(Bf16{}) : measure(Int8{});
}

#else

constexpr int kSteps = 32768;

// Twelve sums in registers, so that none waits for itself: two units with a latency of 4 or 5 cycles.
template <class Step>
struct Vectors {
  static constexpr double kOperations = 12.0 * Step::kOperations;

  static uint64_t pass() {
    using Sum = typename Step::Sum;
    // Not an array: the compiler would keep that in memory.
    Sum s0{}, s1{}, s2{}, s3{}, s4{}, s5{}, s6{}, s7{}, s8{}, s9{}, s10{}, s11{};
    Sum a = Step::ones(), b = a;
    const auto each_sum = [&](auto&& f) {
      f(s0), f(s1), f(s2), f(s3), f(s4), f(s5), f(s6), f(s7), f(s8), f(s9), f(s10), f(s11);
    };
    for (int i = 0; i < kSteps; ++i)
      each_sum([&](Sum& sum) {
        sum = Step::add_product(sum, a, b);
        asm volatile("" : "+x"(sum), "+x"(a), "+x"(b));  // no step is known to be like the one before
      });
    uint64_t all = 0;
    each_sum([&](Sum& sum) { all += Step::bits(sum); });
    return all;
  }
};

#if defined(__AVX512F__)

struct Widened {  // bf16 that became f32
  using Sum = __m512;
  static constexpr double kOperations = 2.0 * 16;
  static Sum ones() { return _mm512_set1_ps(1.0f); }
  static Sum add_product(Sum sum, Sum a, Sum b) { return _mm512_fmadd_ps(a, b, sum); }
  static uint64_t bits(Sum sum) { return static_cast<uint64_t>(_mm512_cvtss_f32(sum)); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Sum = __m512;
  static constexpr double kOperations = 2.0 * 32;
  static Sum ones() { return _mm512_castsi512_ps(_mm512_set1_epi16(0x3f80)); }
  static Sum add_product(Sum sum, Sum a, Sum b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static uint64_t bits(Sum sum) { return static_cast<uint64_t>(_mm512_cvtss_f32(sum)); }
};
#else
using Pairs = Widened;
#endif

struct Bytes {
  using Sum = __m512i;
  static constexpr double kOperations = 2.0 * 64;
  static Sum ones() { return _mm512_set1_epi8(1); }
  static Sum add_product(Sum sum, Sum a, Sum b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
#endif
  }
  static uint64_t bits(Sum sum) { return static_cast<uint64_t>(_mm512_cvtsi512_si32(sum)); }
};

#else

struct Widened {
  using Sum = __m256;
  static constexpr double kOperations = 2.0 * 8;
  static Sum ones() { return _mm256_set1_ps(1.0f); }
  static Sum add_product(Sum sum, Sum a, Sum b) { return _mm256_fmadd_ps(a, b, sum); }
  static uint64_t bits(Sum sum) { return static_cast<uint64_t>(_mm256_cvtss_f32(sum)); }
};
using Pairs = Widened;

struct Bytes {
  using Sum = __m256i;
  static constexpr double kOperations = 2.0 * 32;
  static Sum ones() { return _mm256_set1_epi8(1); }
  static Sum add_product(Sum sum, Sum a, Sum b) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
#endif
  }
  static uint64_t bits(Sum sum) { return static_cast<uint64_t>(_mm256_extract_epi32(sum, 0)); }
};

#endif

// Products of bf16 pairs are slower than those of widened numbers on some CPUs, and twice as fast on others.
template <class Measure>
double best_of(int format, Measure&& measure) {
  if (format == kInt8) return measure(Vectors<Bytes>{});
  return std::max(measure(Vectors<Pairs>{}), measure(Vectors<Widened>{}));
}

#endif

}  // namespace

}  // namespace moewe

// Operations/s (a multiplication and an addition are two) of `threads` threads together; format 0 is bf16, 1 is int8.
extern "C" double moewe_matrix_rate(int threads, int format, double seconds) {
  using namespace moewe;
  return best_of(format, [&](auto unit) {
    using Unit = decltype(unit);
    double took = 1;
    bool going = true;
    on_fresh_team(threads, [&](Team& team) {
      const double best = best_pass(team, seconds, going, [] { sink = Unit::pass(); });
      if (team.rank() == 0) took = best;
    });
    return Unit::kOperations * kSteps * threads / took;
  });
}
