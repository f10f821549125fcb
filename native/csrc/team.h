// A team of threads that runs one function together, with barriers and shared loops.
//
// Not OpenMP: its barriers give the core away late or never when ranks share cores, and torch's threads spin beside them.
// Each thread of the caller has a team of its own (ranks may be threads of one process), made at the first use.
// A function that runs on a team must give the same bits for every team size: each output element has one owner.
#pragma once

#include <atomic>
#include <cstdint>

namespace moewe {

struct TeamState;

// What one member of the team sees.
class Team {
 public:
  Team(TeamState& state, int rank, int size) : state_(state), rank_(rank), size_(size) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Wait until all members are here. What they wrote before is visible after.
  void barrier();

  // Call f(i) once for each i in [0, n), on whichever member is free next, then wait for all. All members call it.
  template <class F>
  void each(int64_t n, F&& f) {
    if (size_ == 1) {
      for (int64_t i = 0; i < n; ++i) f(i);
      return;
    }
    for (int64_t i; (i = next()) < n;) f(i);
    barrier();
  }

 private:
  int64_t next();

  TeamState& state_;
  int rank_, size_;
};

using Body = void (*)(Team& team, void* context);

// Run body(team, context) on every member of the calling thread's team and return when all are done.
void run_on_team(Body body, void* context);

// Run body(team, context) on the calling thread, as a team of one.
void run_alone(Body body, void* context);

// The same for anything that can be called with a Team&.
template <class F>
void on_team(F&& f) {
  run_on_team([](Team& team, void* context) { (*static_cast<F*>(context))(team); }, &f);
}

// For work that reads `bytes`: alone where that is over before another thread would have woken.
template <class F>
void on_team_for(int64_t bytes, F&& f) {
  constexpr int64_t kWorthIt = 256 << 10;
  const Body body = [](Team& team, void* context) { (*static_cast<F*>(context))(team); };
  if (bytes < kWorthIt) run_alone(body, &f);
  else run_on_team(body, &f);
}

}  // namespace moewe

extern "C" {
// How many threads, the caller included, a team of the calling thread has from now on. Returns what is set (at least 1).
int moewe_set_threads(int threads);
}
