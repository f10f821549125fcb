// Memory for what lives no longer than a call: grown when a call needs more, kept for the next.
//
// Not shared: each thread has its own. What a whole team works on is the calling thread's, taken before the team starts.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

namespace moewe {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  void release() {
    std::free(memory_);
    memory_ = nullptr;
    size_ = 0;
  }

  // At least `bytes`, aligned to a huge page where it is as large as one. What was there before is gone.
  void* take(int64_t bytes) {
    if (bytes > size_) {
      constexpr int64_t kHuge = int64_t{2} << 20;
      const int64_t alignment = bytes >= kHuge ? kHuge : 64;
      const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
      release();
      memory_ = std::aligned_alloc(alignment, rounded);
      if (memory_ == nullptr) throw std::bad_alloc();
      size_ = rounded;
      if (alignment == kHuge) madvise(memory_, rounded, MADV_HUGEPAGE);
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

// Of the thread that calls an exported function: what its team shares.
inline Scratch& call_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Of each member of a team, for itself.
inline Scratch& own_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace moewe
