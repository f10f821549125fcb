#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "tiles.h"

namespace moewe {

namespace {

// Within a step calls follow each other after some 10 us: a sleeping thread would miss half of it. Longer waits sleep.
constexpr int kSpins = 4000;
constexpr int kYieldEvery = 64;  // ranks that share a core: let the one that is waited for run

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until `word` is no longer `seen`; `sleepers` tells who changes it whether anybody must be woken.
void wait_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return;
    _mm_pause();
    if (i % kYieldEvery == kYieldEvery - 1) sched_yield();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == seen) futex_wait(word, seen);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void change(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
  word.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

}  // namespace

struct TeamState {
  alignas(64) std::atomic<uint32_t> round{0};  // a new one starts a function
  std::atomic<uint32_t> round_sleepers{0};
  alignas(64) std::atomic<uint32_t> generation{0};  // of the barrier
  std::atomic<uint32_t> generation_sleepers{0};
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int64_t> next{0};  // of the shared loop
  int size = 1;
  Body body = nullptr;
  void* context = nullptr;
  bool ending = false;
  std::vector<std::thread> threads;

  const int wanted;

  explicit TeamState(int number) : wanted(number) {
    try {
      for (int rank = 1; rank < wanted; ++rank) threads.emplace_back([this, rank] { serve(rank); });
    } catch (const std::system_error&) {
      // The host gives no more threads: those that are there do all of it.
    }
    size = static_cast<int>(threads.size()) + 1;
  }

  ~TeamState() {
    ending = true;
    change(round, round_sleepers);
    for (auto& thread : threads) thread.join();
  }

  void serve(int rank) {
    configure_tiles();
    for (uint32_t seen = 0;; ++seen) {
      wait_change(round, seen, round_sleepers);
      if (ending) return;
      Team team(*this, rank, size);
      body(team, context);
      team.barrier();
    }
  }
};

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t seen = state_.generation.load(std::memory_order_acquire);
  if (state_.arrived.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    state_.arrived.store(0, std::memory_order_relaxed);
    state_.next.store(0, std::memory_order_relaxed);  // every shared loop ends with a barrier
    change(state_.generation, state_.generation_sleepers);
  } else {
    wait_change(state_.generation, seen, state_.generation_sleepers);
  }
}

int64_t Team::next() { return state_.next.fetch_add(1, std::memory_order_relaxed); }

namespace {
thread_local int threads_wanted = 1;
thread_local std::unique_ptr<TeamState> own_team;
}  // namespace

void run_on_team(Body body, void* context) {
  if (!own_team || own_team->wanted != threads_wanted) {
    own_team.reset();
    own_team = std::make_unique<TeamState>(threads_wanted);
  }
  configure_tiles();
  TeamState& state = *own_team;
  Team team(state, 0, state.size);
  if (state.size > 1) {
    state.body = body;
    state.context = context;
    change(state.round, state.round_sleepers);
  }
  body(team, context);
  team.barrier();
  release_tiles();
}

void run_alone(Body body, void* context) {
  static TeamState nobody(1);  // a team of one looks at none of it
  configure_tiles();
  Team team(nobody, 0, 1);
  body(team, context);
  release_tiles();
}

}  // namespace moewe

extern "C" int moewe_set_threads(int threads) {
  moewe::threads_wanted = threads < 1 ? 1 : threads;
  return moewe::threads_wanted;
}
