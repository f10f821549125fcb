#include "shm.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <vector>

#include "clock.h"

namespace moewe {

namespace {

constexpr int kYieldEvery = 16;
constexpr int64_t kSliceMs = 50;  // a rank that slept through a wake looks again after so long

ShmLine& line(const ShmGroup& g, int rank) { return static_cast<ShmLine*>(g.memory)[rank]; }
char* at(const ShmGroup& g, int64_t offset) { return static_cast<char*>(g.memory) + offset; }
int32_t* ids(const ShmGroup& g, int rank) {
  return reinterpret_cast<int32_t*>(at(g, g.ids_at)) + rank * g.capacity * g.top_k;
}

int64_t now_ms() { return now_ns() / 1000000; }

void say(ShmLine& own, uint32_t& word, uint32_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&own.sleepers, __ATOMIC_SEQ_CST) != 0)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Wait until `word` of `there` has reached `value`, or until the time is up (-1: as long as it takes).
bool wait_for(ShmLine& there, uint32_t& word, uint32_t value, int spins, int64_t deadline) {
  const auto reached = [&](uint32_t seen) { return static_cast<int32_t>(seen - value) >= 0; };
  for (int i = 0; i < spins; ++i) {
    if (reached(__atomic_load_n(&word, __ATOMIC_ACQUIRE))) return true;
    _mm_pause();
    if (i % kYieldEvery == kYieldEvery - 1) sched_yield();  // the rank that is waited for may need this core
  }
  __atomic_fetch_add(&there.sleepers, 1, __ATOMIC_SEQ_CST);
  bool there_yet;
  for (;;) {
    const uint32_t seen = __atomic_load_n(&word, __ATOMIC_SEQ_CST);
    there_yet = reached(seen);
    if (there_yet || (deadline >= 0 && now_ms() >= deadline)) break;
    const timespec slice = {0, kSliceMs * 1000000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
  __atomic_fetch_sub(&there.sleepers, 1, __ATOMIC_SEQ_CST);
  return there_yet;
}

bool wait_all(ShmGroup& g, uint32_t ShmLine::*word, int64_t milliseconds) {
  const int64_t begin = now_ns();
  const int64_t deadline = milliseconds < 0 ? -1 : begin / 1000000 + milliseconds;
  bool all = true;
  for (int r = 0; r < g.ranks && all; ++r)
    all = r == g.rank || wait_for(line(g, r), line(g, r).*word, g.sequence, g.spins, deadline);
  g.wait_began = begin;
  g.wait_ended = now_ns();
  g.waited_ns += g.wait_ended - begin;
  return all;
}

// Rows and choices to where others read them; whole team. Only ranks that all left the last layer come here.
void publish(Team& team, const ShmDispatch& a) {
  const ShmGroup& g = *a.group;
  constexpr int64_t kRowsOnce = 16;
  char* rows = at(g, g.rows_at) + g.rank * g.capacity * g.row_bytes;
  team.each((a.tokens + kRowsOnce - 1) / kRowsOnce, [&](int64_t i) {
    for (int64_t t = i * kRowsOnce; t < std::min(a.tokens, (i + 1) * kRowsOnce); ++t)
      std::memcpy(rows + t * g.row_bytes, static_cast<const char*>(a.x) + t * a.x_stride, g.row_bytes);
  });
}

void announce(const ShmDispatch& a) {
  ShmGroup& g = *a.group;
  std::memcpy(ids(g, g.rank), a.slot_ids, a.tokens * g.top_k * sizeof(int32_t));
  ShmLine& own = line(g, g.rank);
  own.tokens = a.tokens;
  say(own, own.published, ++g.sequence);
}

// From the choices of all ranks: the rows of this rank's slots, and where the answers to its own choices will stand.
ShmFault collect(ShmDispatch& a) {
  ShmGroup& g = *a.group;
  const int32_t slots = g.slot_starts[g.ranks], first = g.slot_starts[g.rank], last = g.slot_starts[g.rank + 1];
  static thread_local std::vector<int32_t> next, own_next;  // where the next row of each slot goes: here, and ours
  next.assign(slots, 0);
  own_next.assign(slots, 0);
  for (int r = 0; r < g.ranks; ++r) {
    if (r == g.rank) own_next = next;  // rows of ranks before this one stand in front of its own
    const int64_t tokens = line(g, r).tokens;
    if (tokens < 0 || tokens > g.capacity) return {kTooManyTokens, r, tokens};
    const int32_t* chosen = ids(g, r);
    const int64_t count = tokens * g.top_k;
    for (int64_t i = 0; i < count; ++i) {
      if (chosen[i] >= slots) return {kNoSuchSlot, r, chosen[i]};
      if (chosen[i] >= 0) ++next[chosen[i]];
    }
  }
  for (int r = 0; r < g.ranks; ++r) {  // counts become offsets within each rank
    int32_t offset = 0;
    for (int32_t s = g.slot_starts[r]; s < g.slot_starts[r + 1]; ++s) {
      const int32_t here = next[s];
      if (r == g.rank) a.tokens_per_slot[s - first] = here;
      next[s] = offset;
      own_next[s] += offset;
      offset += here;
    }
    if (r == g.rank) a.num_rows = offset;
  }
  int64_t foreign = 0;
  for (int r = 0; r < g.ranks; ++r) {
    const int32_t* chosen = ids(g, r);
    for (int64_t t = 0; t < line(g, r).tokens; ++t)
      for (int k = 0; k < g.top_k; ++k) {
        const int32_t slot = chosen[t * g.top_k + k];
        if (slot < first || slot >= last) continue;
        a.row_tokens[next[slot]++] = static_cast<int32_t>(r * g.capacity + t);
        foreign += r != g.rank;
      }
  }
  int64_t readers = 0, stayed = 0;  // pairs of a token and another rank that reads its row; rows and results kept
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int32_t* chosen = a.slot_ids + t * g.top_k;
    for (int k = 0; k < g.top_k; ++k) {
      if (chosen[k] < 0) {
        a.row_of[t * g.top_k + k] = -1;
        continue;
      }
      int owner = 0;
      while (chosen[k] >= g.slot_starts[owner + 1]) ++owner;
      a.row_of[t * g.top_k + k] = static_cast<int32_t>(owner * g.result_capacity + own_next[chosen[k]]++);
      bool known = false;
      for (int before = 0; before < k && !known; ++before)
        known = chosen[before] >= g.slot_starts[owner] && chosen[before] < g.slot_starts[owner + 1];
      if (owner == g.rank)
        stayed += 1 + !known;
      else
        readers += !known;
    }
  }
  const int64_t choices = g.ranks > 1 ? a.tokens * g.top_k * static_cast<int64_t>(sizeof(int32_t)) : 0;
  g.stayed += stayed * g.row_bytes;
  a.bytes_sent = (readers + foreign) * g.row_bytes + choices;
  return {};
}

}  // namespace

void shm_dispatch(Team& team, ShmDispatch& a) {
  publish(team, a);
  if (team.rank() == 0) {
    announce(a);
    wait_all(*a.group, &ShmLine::published, -1);
    a.fault = collect(a);
  }
  team.barrier();
}

void shm_meet(Team& team, ShmGroup& g) {
  if (team.rank() == 0) {
    say(line(g, g.rank), line(g, g.rank).computed, g.sequence);
    wait_all(g, &ShmLine::computed, -1);
  }
  team.barrier();
}

}  // namespace moewe

extern "C" {

void moewe_shm_publish(moewe::ShmDispatch* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::publish(team, *args); });
  moewe::announce(*args);
}

int32_t moewe_shm_wait_published(moewe::ShmGroup* group, int64_t milliseconds) {
  return moewe::wait_all(*group, &moewe::ShmLine::published, milliseconds);
}

int32_t moewe_shm_collect(moewe::ShmDispatch* args) {
  args->fault = moewe::collect(*args);
  return args->fault.kind;
}

void moewe_shm_computed(moewe::ShmGroup* group) {
  moewe::ShmLine& own = moewe::line(*group, group->rank);
  moewe::say(own, own.computed, group->sequence);
}

int32_t moewe_shm_wait_computed(moewe::ShmGroup* group, int64_t milliseconds) {
  return moewe::wait_all(*group, &moewe::ShmLine::computed, milliseconds);
}
}
