// The clock that all processes of a host share. Not for measuring rates (rates.h).
#pragma once

#include <time.h>

#include <cstdint>

namespace moewe {

// Nanoseconds of CLOCK_MONOTONIC.
inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

}  // namespace moewe
