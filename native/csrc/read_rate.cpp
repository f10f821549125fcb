// How fast this machine's memory is read: the ceiling of every kernel that streams weights.
//
// Not a kernel of any model. The buffer is made and touched here, by the threads that read it.
#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include "rates.h"

namespace moewe {

namespace {

volatile uint64_t sink;  // keeps what a pass computed alive

constexpr int64_t kPiece = 2 << 20;   // a huge page
constexpr int64_t kPage = 4096;
constexpr int64_t kStreams = 4;       // a core keeps more lines on their way when it reads at several places
constexpr int64_t kAhead = 2048;      // bytes that prefetching is ahead within a stream

// A part of the buffer, touched first by the thread that reads it.
struct Part {
  char* base = nullptr;
  int64_t mapped = 0, bytes = 0;

  // Untouched pages all map to one page of zeros, which would be read from cache: what time does not allow is not read.
  void touch(int64_t wanted, int64_t least, double seconds, double most_seconds) {
    mapped = (wanted + kPiece - 1) / kPiece * kPiece;
    void* where = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (where == MAP_FAILED) {
      mapped = 0;
      return;
    }
    madvise(where, mapped, MADV_HUGEPAGE);  // as packed weights are held
    base = static_cast<char*>(where);
    const Clock::time_point start = Clock::now();
    while (bytes < mapped && (bytes == 0 || seconds_since(start) < (bytes < least ? most_seconds : seconds))) {
      for (const int64_t end = bytes + kPiece; bytes < end; bytes += kPage) base[bytes] = 1;
    }
  }

  void release() {
    if (mapped) munmap(base, mapped);
  }

  uint64_t read() const {
    const int64_t stride = bytes / kStreams;  // a multiple of 64: pieces are
    __m256i sums[kStreams] = {};
    for (int64_t at = 0; at < stride; at += 64)
      for (int64_t stream = 0; stream < kStreams; ++stream) {
        const char* line = base + stream * stride + at;
        _mm_prefetch(line + kAhead, _MM_HINT_T0);
        const __m256i* halves = reinterpret_cast<const __m256i*>(line);
        sums[stream] = _mm256_add_epi64(sums[stream], _mm256_load_si256(halves));
        sums[stream] = _mm256_add_epi64(sums[stream], _mm256_load_si256(halves + 1));
      }
    __m256i all = sums[0];
    for (int64_t stream = 1; stream < kStreams; ++stream) all = _mm256_add_epi64(all, sums[stream]);
    return static_cast<uint64_t>(_mm256_extract_epi64(all, 0) + _mm256_extract_epi64(all, 1) +
                                 _mm256_extract_epi64(all, 2) + _mm256_extract_epi64(all, 3));
  }
};

}  // namespace

}  // namespace moewe

extern "C" {

// Bytes/s that `threads` threads together read, of a buffer of about `bytes` that each touches within `fill_seconds`, and
// within `most_seconds` until `least` are there; what they touched goes to *read_bytes. 0 when there is no memory.
double moewe_read_rate(int threads, int64_t bytes, int64_t least, double fill_seconds, double most_seconds, double seconds,
                       int64_t* read_bytes) {
  using namespace moewe;
  std::vector<Part> parts(threads);
  double took = 0;
  bool going = true;
  on_fresh_team(threads, [&](Team& team) {
    Part& part = parts[team.rank()];
    part.touch(bytes / team.size(), least / team.size(), fill_seconds, most_seconds);
    const double best = best_pass(team, seconds, going, [&] { sink = part.read(); });
    if (team.rank() == 0) took = best;
  });
  int64_t total = 0;
  for (Part& part : parts) {
    total += part.bytes;
    part.release();
  }
  *read_bytes = total;
  return took > 0 ? static_cast<double>(total) / took : 0;
}
}
