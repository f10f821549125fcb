#include "logprobs.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace moewe {

namespace {

constexpr int64_t kRun = 1024;   // logits whose weights are summed in f32 before the sums are added up
constexpr int64_t kLook = 64;    // logits that are passed by at once where none of them is among the largest

struct Place {
  float value;
  int64_t id;
};

bool is_better(const Place& a, const Place& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// The `num` largest, best first: a heap with the worst of them on top.
void find_largest(const float* logits, int64_t width, int64_t num, std::vector<Place>& found) {
  found.clear();
  int64_t i = 0;
  for (; i < num; ++i) found.push_back({logits[i], i});
  std::make_heap(found.begin(), found.end(), is_better);
  const auto offer = [&](int64_t id) {
    if (!(logits[id] > found.front().value)) return;  // an equal one has a higher id
    std::pop_heap(found.begin(), found.end(), is_better);
    found.back() = {logits[id], id};
    std::push_heap(found.begin(), found.end(), is_better);
  };
  for (; i + kLook <= width; i += kLook) {
    const float* here = logits + i;
    const f32x16 most = max(max(f32x16::load(here), f32x16::load(here + 16)),
                            max(f32x16::load(here + 32), f32x16::load(here + 48)));
    if (largest(most) > found.front().value)
      for (int64_t j = i; j < i + kLook; ++j) offer(j);
  }
  for (; i < width; ++i) offer(i);
  std::sort_heap(found.begin(), found.end(), is_better);
}

struct Sums {
  double total;   // of exp(logit - best)
  int64_t above;  // logits that are at least `limit`
};

// In runs: within one the error of a sum in f32 stays that of a few additions.
Sums add_up(const float* logits, int64_t width, float best, float limit) {
  const f32x16 top(best), bound(limit), one(1.0f), lowest(-87.0f);
  Sums all{0.0, 0};
  for (int64_t start = 0; start < width; start += kRun) {
    const int64_t end = std::min(width, start + kRun);
    f32x16 weights[2] = {f32x16::zero(), f32x16::zero()}, counts = f32x16::zero();
    int64_t i = start;
    for (int j = 0; i + 16 <= end; i += 16, j ^= 1) {
      const f32x16 here = f32x16::load(logits + i), power = here - top;
      weights[j] = weights[j] + where_at_least(power, lowest, exp(power));
      counts = counts + where_at_least(here, bound, one);
    }
    if (i < end) {
      alignas(64) float tail[16];
      std::fill(tail, tail + 16, -INFINITY);
      std::copy(logits + i, logits + end, tail);
      const f32x16 power = f32x16::load(tail) - top;
      weights[0] = weights[0] + where_at_least(power, lowest, exp(power));
      for (; i < end; ++i) all.above += logits[i] >= limit;
    }
    all.total += sum(weights[0] + weights[1]);
    all.above += static_cast<int64_t>(sum(counts));
  }
  return all;
}

void do_row(const RowLogprobs& a, int64_t i) {
  static thread_local std::vector<Place> found;
  const float* logits = a.logits + a.row_ids[i] * a.width;
  find_largest(logits, a.width, std::max<int64_t>(1, a.num_top), found);
  const float best = found[0].value, own = logits[a.tokens[i]];
  const Sums sums = add_up(logits, a.width, best, own);
  const double shift = best + std::log(sums.total);
  const auto logprob = [&](float logit) { return std::max(static_cast<float>(logit - shift), a.least); };
  a.chosen[i] = logprob(own);
  a.ranks[i] = sums.above;
  for (int64_t j = 0; j < a.num_top; ++j) {
    a.top_ids[i * a.num_top + j] = found[j].id;
    a.top[i * a.num_top + j] = logprob(found[j].value);
  }
}

}  // namespace

void row_logprobs(Team& team, const RowLogprobs& a) {
  team.each(a.answers, [&](int64_t i) { do_row(a, i); });
}

}  // namespace moewe

extern "C" void moewe_row_logprobs(const moewe::RowLogprobs* args) {
  moewe::on_team_for(args->answers * args->width * 4, [&](moewe::Team& team) { moewe::row_logprobs(team, *args); });
}
