// Timing of passes that a team of threads makes together: what the ceilings of this machine are measured with.
//
// Not for kernels: nothing here computes for a model. The best pass counts, since everything else on the machine only
// makes passes longer. Units: seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

#include "team.h"

namespace moewe {

using Clock = std::chrono::steady_clock;

// Passes that end later only keep the machine busy for those that measure beside us and began a little later.
constexpr double kCountedShare = 0.75;
constexpr int kLeastPasses = 4;  // that count, however long they take

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Runs f(team) on a team of its own, so that the caller's keeps its size.
template <class F>
void on_fresh_team(int threads, F&& f) {
  std::thread([&] {
    moewe_set_threads(threads);
    on_team([&](Team& team) { f(team); });
  }).join();
}

// Runs pass() on all members until `seconds` are over, and longer where that is not enough for some passes; returns, on
// member 0, how long the best counted one took. Members share `going`.
template <class Pass>
double best_pass(Team& team, double seconds, bool& going, Pass&& pass) {
  const Clock::time_point begin = Clock::now();
  double best = 0, end = seconds;
  int passes = 0;
  while (true) {
    team.barrier();
    const Clock::time_point start = Clock::now();
    pass();
    team.barrier();
    if (team.rank() == 0) {
      const double took = seconds_since(start), passed = seconds_since(begin);
      if (++passes <= kLeastPasses || passed <= kCountedShare * seconds) {
        best = passes == 1 ? took : std::min(best, took);
        end = std::max(end, passed / kCountedShare);
      }
      going = passed < end;
    }
    team.barrier();
    if (!going) return best;
  }
}

}  // namespace moewe
