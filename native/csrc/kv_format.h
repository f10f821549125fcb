// How an element of K or V is stored, and the way there and back.
//
// Not the paging (attention.h). A quantised format keeps one f32 scale a token and head: value = element * scale.
#pragma once

#include <cstdint>
#include <cstring>

#include "vec.h"

namespace moewe {

enum KvFormat : int32_t { kKvBf16 = 0 };

inline int64_t element_bytes(int32_t /*format*/) { return 2; }

// Widens elements [at, at + width) of a quantised cache to bf16, exactly; their scale is not applied.
inline void widen_row(int32_t /*format*/, const void* cache, int64_t at, int64_t width, bf16* to) {
  std::memcpy(to, static_cast<const bf16*>(cache) + at, width * 2);
}

// Stores `heads` heads of `width` values, which stand side by side, at `slot` of a cache [slots, heads, width].
inline void store_heads(int32_t /*format*/, const float* values, int64_t slot, int64_t heads, int64_t width, void* cache,
                        float* /*scales*/) {
  const int64_t all = heads * width;
  bf16* to = static_cast<bf16*>(cache) + slot * all;
  for (int64_t i = 0; i < all; i += 16) {
    const int n = all - i < 16 ? static_cast<int>(all - i) : 16;
    f32x16::load(values + i, n).store(to + i, n);
  }
}

}  // namespace moewe
