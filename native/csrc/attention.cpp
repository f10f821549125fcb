#include "attention.h"

#include <algorithm>
#include <vector>

#include "attention_amx.h"
#include "attention_tile.h"
#include "attention_vector.h"
#include "scratch.h"

namespace moewe {

namespace {

constexpr int64_t kUnits = 8;  // of 16 query rows that share the tiles of a KV head which a task has packed
constexpr int64_t kTasksEach = 4;  // for every thread, so that they end together

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int64_t first_visible(const Attention& a, int64_t position) {
  if (a.kind == kWindow) return std::max<int64_t>(0, position - a.window + 1);
  return a.kind == kChunk ? position / a.window * a.window : 0;
}

// Rows [begin, end) of a run, for KV heads [head, head_end).
struct Task {
  const Run& run;
  int64_t begin, end, head, head_end;
};

// How the rows and heads of all runs are cut into tasks. Which cut it is changes no bit.
struct Cut {
  int64_t group, rows_each, heads_each;  // query heads of a KV head; rows of a task; KV heads of one with few rows

  Cut(const Attention& a, int team_size) : group(a.heads / a.kv_heads) {
    rows_each = std::max<int64_t>(1, kUnits * kQueries / group);
    const int64_t wanted = kTasksEach * team_size, runs = std::max<int64_t>(1, a.step->num_runs);
    heads_each = team_size == 1 || runs >= wanted ? a.kv_heads : std::max<int64_t>(1, a.kv_heads * runs / wanted);
  }
  int64_t heads_of(const Run& run) const { return run.num_rows * group > kQueries ? 1 : heads_each; }
  int64_t blocks_of(const Run& run, int64_t kv_heads) const { return (kv_heads + heads_of(run) - 1) / heads_of(run); }
  int64_t tasks_of(const Run& run, int64_t kv_heads) const {
    return (run.num_rows + rows_each - 1) / rows_each * blocks_of(run, kv_heads);
  }
};

// Where everything that a task keeps lies in the scratch of its thread.
struct Work {
  int64_t value_width, query_bytes;  // of the sums of a row; of the packed queries of a unit
  Queries* queries;                  // [units]
  char* packed;                      // [units][query_bytes]
  float* sums;                       // [units][16][value_width]
  float* scores;                     // [2][kKeys][16], of two units
  bf16* weights;                     // [2][16][32]
  bf16* values;                      // packed V of a tile
  bf16* keys;                        // [kKeys][padded Dh] where K is not multiplied where it lies
  bf16* wide_values;                 // [kKeys][value_width] of a format with scales, where V is not packed

  Work(const Attention& a, int64_t units) {
    const int64_t key_width = round_up(a.head_dim, kDepth);
    value_width = round_up(a.value_dim, 32);
    query_bytes = key_width * kQueries * 4;
    const int64_t tile_values = value_width * kKeys * 2, tile_keys = key_width * kKeys * 2;
    const int64_t bytes[] = {round_up(units * int64_t{sizeof(Queries)}, 64), units * query_bytes,
                             units * kQueries * value_width * 4, 2 * kKeys * kQueries * 4, 2 * kTile * 2, tile_values,
                             tile_keys, a.kv_format == kKvBf16 ? 0 : tile_values};
    int64_t all = 0;
    for (const int64_t part : bytes) all += part;
    char* at = static_cast<char*>(own_scratch().take(all));
    auto next = [&, i = 0]() mutable { char* here = at; at += bytes[i++]; return here; };
    queries = reinterpret_cast<Queries*>(next());
    packed = next();
    sums = reinterpret_cast<float*>(next());
    scores = reinterpret_cast<float*>(next());
    weights = reinterpret_cast<bf16*>(next());
    values = reinterpret_cast<bf16*>(next());
    keys = reinterpret_cast<bf16*>(next());
    wide_values = reinterpret_cast<bf16*>(next());
  }
};

// A tile of keys of one KV head, ready to be multiplied.
struct Tile {
  int64_t start;              // position of its first key
  int64_t slots[kKeys];       // -1: no row of the task sees the key
  const bf16* keys[kKeys];    // null likewise
  const bf16* values[kKeys];
  float k_scales[kKeys], v_scales[kKeys];
#if MOEWE_AMX
  KeyGroup groups[kKeys / 16];
#endif
};

// One task: queries packed once, tiles of keys in ascending order, then the quotient of sums and totals.
class Walk {
 public:
  Walk(const Attention& a, const Task& task)
      : a_(a), task_(task), group_(a.heads / a.kv_heads), lanes_((task.end - task.begin) * group_),
        units_((lanes_ + kQueries - 1) / kQueries), work_(a, units_ * (task.head_end - task.head)) {
    softmax_ = {a.scale * kLog2E, a.score_cap * kLog2E, a.score_cap != 0.0f ? a.scale / a.score_cap : 0.0f, nullptr,
                nullptr};
    if (a.kv_format != kKvBf16) softmax_.k_scales = tile_.k_scales, softmax_.v_scales = tile_.v_scales;
    first_ = first_visible(a, position(0));
    last_ = position(lanes_ - 1);
  }

  void run() {
    for (int64_t i = 0; i < num_units(); ++i) start(i);
    place_keys(first_ / kKeys * kKeys);
    for (int64_t at = first_ / kKeys * kKeys; at <= last_; at += kKeys) {
      tile_.start = at;
      std::copy(next_slots_, next_slots_ + kKeys, tile_.slots);
      place_keys(at + kKeys);
      for (int64_t head = task_.head; head < task_.head_end; ++head) {
        prefetch(head - task_.head, task_.head_end - task_.head);
        load(head);
        // The scores of a unit are asked for before the softmax of the one before it: tile products run beside vectors.
        const int64_t first = (head - task_.head) * units_;
        Part part = score_unit(first);
        for (int64_t i = 1; i <= units_; ++i) {
          const Part next = i < units_ ? score_unit(first + i) : Part{};
          add(part);
          part = next;
        }
      }
    }
    for (int64_t i = 0; i < num_units(); ++i) finish(i);
  }

 private:
  int64_t num_units() const { return units_ * (task_.head_end - task_.head); }
  int64_t row_of(int64_t lane) const { return task_.begin + lane / group_; }
  int64_t position(int64_t lane) const { return task_.run.position + row_of(lane); }
  int64_t head_of(int64_t unit) const { return task_.head + unit / units_; }
  int64_t lane_of(int64_t unit) const { return unit % units_ * kQueries; }
  // Of a lane of the task: its row and query head, counted over rows of the step.
  int64_t place(int64_t unit, int64_t lane) const {
    return (task_.run.row + row_of(lane)) * a_.heads + head_of(unit) * group_ + lane % group_;
  }

  void start(int64_t unit) {
    Queries& queries = work_.queries[unit];
    const int64_t from = lane_of(unit);
    queries.lanes = std::min<int64_t>(kQueries, lanes_ - from);
    const bf16* rows[kQueries] = {};
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t lane = from + std::min(i, queries.lanes - 1);
      if (i < queries.lanes) rows[i] = a_.q + place(unit, lane) * a_.head_dim;
      const float sink = a_.sinks ? a_.sinks[head_of(unit) * group_ + lane % group_] * kLog2E : 0.0f;
      queries.most[i] = a_.sinks ? std::max(sink, kLowest) : kLowest;
      queries.total[i] = a_.sinks ? 1.0f : 0.0f;  // the weight of a sink below itself
      queries.last[i] = position(lane);
      queries.first[i] = first_visible(a_, queries.last[i]);
    }
    queries.first_min = queries.first[0], queries.first_max = queries.first[kQueries - 1];
    queries.last_min = queries.last[0], queries.last_max = queries.last[kQueries - 1];
    std::fill_n(sums(unit), kQueries * work_.value_width, 0.0f);
#if MOEWE_AMX
    pack_queries(rows, a_.head_dim, reinterpret_cast<bf16*>(work_.packed + unit * work_.query_bytes));
#else
    const int64_t padded = round_up(a_.head_dim, 16);
    auto* to = reinterpret_cast<float*>(work_.packed + unit * work_.query_bytes);
    for (int64_t i = 0; i < queries.lanes; ++i)
      for (int64_t j = 0; j < padded; j += 16)
        f32x16::load(rows[i] + j, static_cast<int>(std::min<int64_t>(16, a_.head_dim - j))).store(to + i * padded + j);
#endif
  }

  // Slots of the keys of the tile at `start` that some row of the task sees.
  void place_keys(int64_t start) {
    std::fill_n(next_slots_, kKeys, -1);
    const int64_t end = std::min(start + kKeys, last_ + 1);
    const int32_t* table = a_.step->tables + task_.run.table;
    for (int64_t at = std::max(start, first_); at < end;) {
      const int64_t block = at / a_.block_size, stop = std::min(end, (block + 1) * a_.block_size);
      for (int64_t slot = table[block] * a_.block_size + at % a_.block_size; at < stop; ++at)
        next_slots_[at - start] = slot++;
    }
  }

  // Asks for a part of the next tile, the more of them the more heads there are: whole rows, as they lie in memory.
  void prefetch(int64_t part, int64_t parts) const {
    for (int64_t key = part * kKeys / parts; key < (part + 1) * kKeys / parts; ++key) {
      const int64_t slot = next_slots_[key];
      if (slot < 0) continue;
      prefetch(a_.k, slot * a_.k_stride, a_.head_dim);
      if (a_.v != a_.k) prefetch(a_.v, slot * a_.v_stride, a_.value_dim);
      if (a_.kv_format == kKvBf16) continue;
      _mm_prefetch(reinterpret_cast<const char*>(a_.k_scales + slot * a_.kv_heads + task_.head), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(a_.v_scales + slot * a_.kv_heads + task_.head), _MM_HINT_T1);
    }
  }

  void prefetch(const void* cache, int64_t at, int64_t width) const {
    const int64_t size = element_bytes(a_.kv_format), begin = (at + task_.head * width) * size;
    const int64_t end = (at + task_.head_end * width) * size;
    for (int64_t i = begin; i < end; i += 64) _mm_prefetch(static_cast<const char*>(cache) + i, _MM_HINT_T1);
  }

  void load(int64_t head) {
    if (a_.kv_format == kKvFp8) load_as<Fp8Kv>(head);
    else if (a_.kv_format == kKvInt8) load_as<Int8Kv>(head);
    else load_as<Bf16Kv>(head);
  }

  // Keys of a format with scales are made bf16 here; their scales are left to the softmax.
  template <class Format>
  void load_as(int64_t head) {
    using Element = typename Format::Element;
    const int64_t width = round_up(a_.head_dim, kDepth);
    const Element* values[kKeys];
    for (int key = 0; key < kKeys; ++key) {
      const int64_t slot = tile_.slots[key];
      tile_.keys[key] = tile_.values[key] = nullptr;
      values[key] = nullptr;
      tile_.k_scales[key] = tile_.v_scales[key] = 0.0f;
      if (slot < 0) continue;
      const Element* k = static_cast<const Element*>(a_.k) + slot * a_.k_stride + head * a_.head_dim;
      values[key] = static_cast<const Element*>(a_.v) + slot * a_.v_stride + head * a_.value_dim;
      if constexpr (Format::kScaled) {
        widen_row<Format>(k, a_.head_dim, work_.keys + key * width);
        tile_.keys[key] = work_.keys + key * width;
        tile_.k_scales[key] = to_float(a_.k_scales[slot * a_.kv_heads + head]);
        tile_.v_scales[key] = to_float(a_.v_scales[slot * a_.kv_heads + head]);
      } else {
        tile_.keys[key] = k;
      }
    }
#if MOEWE_AMX
    group_keys(Format::kScaled);
    for (int pair = 0; pair < kKeys / 2; ++pair)
      pack_values<Format>(values[2 * pair], values[2 * pair + 1], a_.value_dim,
                          work_.values + (pair / 16) * kHalf * work_.value_width + pair % 16 * 32);
#else
    for (int key = 0; key < kKeys; ++key) {
      if constexpr (Format::kScaled) {
        if (!values[key]) continue;
        tile_.values[key] = work_.wide_values + key * work_.value_width;
        widen_row<Format>(values[key], a_.value_dim, work_.wide_values + key * work_.value_width);
      } else {
        tile_.values[key] = values[key];
      }
    }
#endif
  }

#if MOEWE_AMX
  // Sixteen keys of one block are read where they lie, those that no row sees too: their scores are masked.
  void group_keys(bool are_widened) {
    const int64_t width = round_up(a_.head_dim, kDepth);
    const bool in_place = !are_widened && a_.block_size % 16 == 0 && a_.head_dim % kDepth == 0;
    for (int i = 0; i < kKeys; i += 16) {
      KeyGroup& group = tile_.groups[i / 16];
      const auto seen = std::find_if(tile_.keys + i, tile_.keys + i + 16, [](const bf16* key) { return key != nullptr; });
      if (in_place && seen != tile_.keys + i + 16) {
        group = {*seen - (seen - (tile_.keys + i)) * a_.k_stride, a_.k_stride * 2};
        continue;
      }
      group = {work_.keys + i * width, width * 2};
      for (int key = i; key < i + 16; ++key) {
        if (are_widened && tile_.keys[key]) continue;
        bf16* to = work_.keys + key * width;
        std::fill_n(to, width, bf16{0});
        if (tile_.keys[key]) std::copy_n(tile_.keys[key], a_.head_dim, to);
      }
    }
  }
#endif

  // Scores of keys [begin, end) of the tile at hand, and the unit whose they are.
  struct Part {
    int64_t unit;
    int begin, end;
    bool masked;
    float* scores;
  };

  // Only halves that some lane sees are looked at, which changes nothing for the other lanes.
  Part score_unit(int64_t unit) {
    Queries& queries = work_.queries[unit];
    const int64_t from = std::max<int64_t>(0, queries.first_min - tile_.start);
    const int64_t to = std::min<int64_t>(kKeys, queries.last_max + 1 - tile_.start);
    if (from >= to) return {};
    const int begin = static_cast<int>(from / kHalf * kHalf), end = static_cast<int>(round_up(to, kHalf));
    const bool masked = tile_.start + begin < queries.first_max || tile_.start + end - 1 > queries.last_min;
    if (masked)
      for (int i = 0; i < kQueries; ++i) {  // distances are small or of no matter: f32 holds them
        queries.low[i] = static_cast<float>(queries.first[i] - tile_.start);
        queries.high[i] = static_cast<float>(queries.last[i] - tile_.start);
      }
    float* scores = work_.scores + unit % 2 * kKeys * kQueries;
    const char* packed = work_.packed + unit * work_.query_bytes;
#if MOEWE_AMX
    const int64_t depth = round_up(a_.head_dim, kDepth) / kDepth;
    const auto* rows = reinterpret_cast<const bf16*>(packed);
    if (end - begin == kKeys) score<4>(tile_.groups, rows, depth, scores);
    else score<2>(tile_.groups + begin / 16, rows, depth, scores + begin * kQueries);
#else
    score(tile_.keys, begin, end, reinterpret_cast<const float*>(packed), queries.lanes, a_.head_dim, scores);
#endif
    return {unit, begin, end, masked, scores};
  }

  void add(const Part& part) {
    if (part.begin >= part.end) return;
    const int64_t unit = part.unit;
    const int begin = part.begin, end = part.end;
    Queries& queries = work_.queries[unit];
    float* scores = part.scores;
    const f32x16 correction = softmax_step(softmax_, queries, part.masked, begin, end, scores);
    rescale(correction, sums(unit), work_.value_width, queries.lanes);
#if MOEWE_AMX
    const bf16* values = work_.values + begin / kHalf * kHalf * work_.value_width;
    for (int i = begin; i < end; i += kHalf) pack_weights(scores + i * kQueries, work_.weights + (i - begin) / kHalf * kTile);
    if (end - begin == kKeys) add_values<2>(work_.weights, values, work_.value_width, sums(unit));
    else add_values<1>(work_.weights, values, work_.value_width, sums(unit));
#else
    add_values(tile_.values, begin, end, scores, queries.lanes, a_.value_dim, work_.value_width, sums(unit));
#endif
  }

  void finish(int64_t unit) {
    const Queries& queries = work_.queries[unit];
    for (int64_t i = 0; i < queries.lanes; ++i) {
      const f32x16 total(queries.total[i]);
      const float* from = sums(unit) + i * work_.value_width;
      bf16* to = a_.out + place(unit, lane_of(unit) + i) * a_.value_dim;
      for (int64_t j = 0; j < a_.value_dim; j += 32) {
        f32x16 first, second;
#if MOEWE_AMX
        column_order(from + j, first, second);
#else
        first = f32x16::load(from + j), second = f32x16::load(from + j + 16);
#endif
        // A sum of -0 becomes 0: whether one met masked keys must not show.
        (first / total + f32x16::zero()).store(to + j, static_cast<int>(std::min<int64_t>(16, a_.value_dim - j)));
        (second / total + f32x16::zero()).store(to + j + 16, static_cast<int>(std::min<int64_t>(16, a_.value_dim - j - 16)));
      }
    }
  }

  float* sums(int64_t unit) const { return work_.sums + unit * kQueries * work_.value_width; }

  const Attention& a_;
  const Task& task_;
  const int64_t group_, lanes_, units_;  // query heads of a KV head; query rows of a KV head; units of a KV head
  Work work_;
  SoftmaxArgs softmax_;
  Tile tile_;
  int64_t next_slots_[kKeys];
  int64_t first_, last_;  // positions that some row of the task sees
};

}  // namespace

void attention(Team& team, const Attention& a) {
  const Cut cut(a, team.size());
  static thread_local std::vector<int64_t> ends;  // of the tasks of each run
  ends.clear();
  int64_t num_tasks = 0;
  for (int64_t i = 0; i < a.step->num_runs; ++i) ends.push_back(num_tasks += cut.tasks_of(a.step->runs[i], a.kv_heads));
  team.each(num_tasks, [&](int64_t i) {
    i = num_tasks - 1 - i;  // prompts stand last and the end of a prompt sees most: long tasks first
    const int64_t which = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    const Run& run = a.step->runs[which];
    const int64_t heads = cut.heads_of(run), blocks = cut.blocks_of(run, a.kv_heads);
    if (which) i -= ends[which - 1];
    const int64_t begin = i / blocks * cut.rows_each, head = i % blocks * heads;
    const Task task{run, begin, std::min(begin + cut.rows_each, run.num_rows), head, std::min<int64_t>(head + heads, a.kv_heads)};
    Walk(a, task).run();
  });
}

}  // namespace moewe

extern "C" void moewe_attention(const moewe::Attention* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::attention(team, *args); });
}
