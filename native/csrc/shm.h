// The exchange of ranks that are processes of one host: rows stay where their owners put them in memory that all map.
//
// Not a transport with messages: a rank publishes its rows and its choices, says so by one number, and reads what others
// published. Every rank knows all choices, so each computes for itself which rows it gets and where results will stand.
// Two meetings a layer: when all have published, and when all have computed; so no buffer is needed twice.
// Letters: W ranks, T tokens of a rank, K choices a token, S slots of the group.
#pragma once

#include <cstdint>

#include "team.h"

namespace moewe {

// The line of one rank; the first W lines of the memory. All zeros at first.
struct alignas(128) ShmLine {
  uint32_t published;  // how many dispatches this rank has published
  uint32_t computed;   // how many of them it has computed
  uint32_t sleepers;   // ranks that sleep until this line changes
  int64_t tokens;      // T of the last dispatch
};

struct ShmGroup {
  void* memory;
  int64_t ids_at, rows_at, results_at;  // byte offsets: ids [W, capacity, K] i32, rows [W, capacity], results [W, results]
  int64_t row_bytes;                    // of a row, stored without gaps
  int64_t capacity, result_capacity;    // rows of one rank
  const int32_t* slot_starts;           // [W + 1] first slot of each rank
  int32_t ranks, rank, top_k;
  int32_t spins;      // looks at a line before sleeping
  uint32_t sequence;  // dispatches so far, counted here
  int64_t stayed;     // bytes of rows and results of this rank that it reads itself, added up here
  int64_t waited_ns;  // in meetings, added up here
  int64_t wait_began, wait_ended;  // of the last meeting, ns of CLOCK_MONOTONIC
};

enum ShmFaultKind : int32_t { kNoFault = 0, kNoSuchSlot = 1, kTooManyTokens = 2 };

// What a rank published that cannot be. All ranks look at the same numbers, so all of them find it.
struct ShmFault {
  int32_t kind, rank;  // whose it is
  int64_t value;       // the slot, or T
};

struct ShmDispatch {
  ShmGroup* group;
  const void* x;            // T rows, x_stride bytes apart
  const int32_t* slot_ids;  // [T, K], -1 sends nothing
  int64_t tokens, x_stride;
  int32_t* row_tokens;       // [result_capacity] out: row of `rows` that each row here is: by slot, source, token, k
  int64_t* tokens_per_slot;  // [own slots] out
  int32_t* row_of;           // [T, K] out: row of `results` with the answer to each choice, -1 for none
  int64_t num_rows;          // out
  int64_t bytes_sent;        // out: read by other ranks: rows (once a rank), choices; and results that will be
  ShmFault fault;            // out: nothing else is valid where its kind is not 0
};

// Publish, wait for all, and work out what goes where. Waits as long as it takes. T is at most the group's capacity.
void shm_dispatch(Team& team, ShmDispatch& args);
// Say that the results of the last dispatch stand in this rank's part, and wait for those of all.
void shm_meet(Team& team, ShmGroup& group);

}  // namespace moewe

extern "C" {
// In three steps, so that a caller can look after other things while it waits. `wait` returns 1 when all ranks are there.
void moewe_shm_publish(moewe::ShmDispatch* args);
int32_t moewe_shm_wait_published(moewe::ShmGroup* group, int64_t milliseconds);
int32_t moewe_shm_collect(moewe::ShmDispatch* args);  // the kind of its fault
void moewe_shm_computed(moewe::ShmGroup* group);
int32_t moewe_shm_wait_computed(moewe::ShmGroup* group, int64_t milliseconds);
}
