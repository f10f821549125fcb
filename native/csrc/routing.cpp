#include "routing.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moewe {

namespace {

constexpr int kChains = 4;  // sums along K that run beside each other, added in one fixed order
constexpr int kPair = 2;    // tokens that share each load of the router

// Logits of R tokens for 16 experts.
template <int R>
void logits_of(const Route& a, int64_t token, int64_t block) {
  const float* column = a.router + block * a.width * 16;
  f32x16 sums[R][kChains];
  for (auto& row : sums)
    for (auto& sum : row) sum = f32x16::zero();
  int64_t k = 0;
  for (; k + kChains <= a.width; k += kChains)
    for (int j = 0; j < kChains; ++j) {
      const f32x16 weights = f32x16::load(column + (k + j) * 16);
      for (int r = 0; r < R; ++r)
        sums[r][j] = fma(f32x16(to_float(a.x[(token + r) * a.width + k + j])), weights, sums[r][j]);
    }
  for (int j = 0; k < a.width; ++k, ++j) {
    const f32x16 weights = f32x16::load(column + k * 16);
    for (int r = 0; r < R; ++r)
      sums[r][j] = fma(f32x16(to_float(a.x[(token + r) * a.width + k])), weights, sums[r][j]);
  }
  const int64_t row_width = (a.experts + 15) / 16 * 16;
  const int here = static_cast<int>(std::min<int64_t>(16, a.experts - block * 16));
  for (int r = 0; r < R; ++r) {
    f32x16 sum = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
    if (a.router_bias) sum = sum + f32x16::load(a.router_bias + block * 16, here);
    sum.store(a.logits + (token + r) * row_width + block * 16);
  }
}

// Where the largest of values[0, n) among those not taken stands: the first of equal ones, and always one that is free.
int64_t best_of(const float* values, const char* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// Marks the experts of all groups but the best ones as taken.
void leave_best_groups(const Route& a, const float* worth, char* taken) {
  const int64_t size = a.experts / a.num_groups;
  std::vector<float> values(a.num_groups);
  for (int64_t g = 0; g < a.num_groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (worth[e] > first) second = first, first = worth[e];
      else if (worth[e] > second) second = worth[e];
    }
    values[g] = a.group_score == kBest || size < 2 ? first : first + second;
  }
  std::vector<char> chosen(a.num_groups, 0);
  for (int32_t i = 0; i < a.top_groups; ++i) chosen[best_of(values.data(), chosen.data(), a.num_groups)] = 1;
  for (int64_t e = 0; e < a.experts; ++e) taken[e] = !chosen[e / size];
}

void scores_of(const Route& a, const float* logits, float* scores) {
  const int64_t padded = (a.experts + 15) / 16 * 16;
  if (a.scoring == kSigmoid) {
    for (int64_t e = 0; e < padded; e += 16) sigmoid(f32x16::load(logits + e)).store(scores + e);
    return;
  }
  float most = logits[0];
  for (int64_t e = 1; e < a.experts; ++e) most = std::max(most, logits[e]);
  f32x16 total = f32x16::zero();
  for (int64_t e = 0; e < padded; e += 16) {
    exp(f32x16::load(logits + e) - f32x16(most)).store(scores + e);
    total = total + f32x16::load(scores + e, static_cast<int>(a.experts - e));
  }
  const f32x16 share(sum(total));
  for (int64_t e = 0; e < padded; e += 16) (f32x16::load(scores + e) / share).store(scores + e);
}

// Sparsemixer's weight of `chosen`: its share among the experts that are not taken yet and close enough to it.
float share_of_close(const Route& a, const float* logits, const char* taken, int64_t chosen) {
  const float best = logits[chosen];
  float total = 0.0f;
  for (int64_t e = 0; e < a.experts; ++e) {
    const bool far = (best - logits[e]) / std::max(std::fabs(logits[e]), best) > 2.0f * a.jitter;
    if (!taken[e] && !far) total += std::exp(logits[e] - best);
  }
  return 1.0f / total;
}

void choose(const Route& a, int64_t token) {
  const int64_t padded = (a.experts + 15) / 16 * 16;
  static thread_local std::vector<float> scores, biased;
  static thread_local std::vector<char> taken;
  scores.resize(padded), biased.resize(padded), taken.assign(padded, 0);
  const float* logits = a.logits + token * padded;
  if (a.scoring != kSparsemixer) scores_of(a, logits, scores.data());
  // Without a bias the logits choose: the order is that of the scores, but survives where scores round to equal.
  const float* choice = logits;
  if (a.selection_bias) {
    for (int64_t e = 0; e < a.experts; ++e) biased[e] = scores[e] + a.selection_bias[e];
    choice = biased.data();
  }
  if (a.top_groups < a.num_groups) leave_best_groups(a, a.selection_bias ? biased.data() : scores.data(), taken.data());
  int32_t* ids = a.expert_ids + token * a.top_k;
  float* weights = a.weights + token * a.top_k;
  float total = 0.0f;
  for (int32_t k = 0; k < a.top_k; ++k) {
    const int64_t best = best_of(choice, taken.data(), a.experts);
    ids[k] = static_cast<int32_t>(best);
    weights[k] = a.scoring == kSparsemixer ? share_of_close(a, logits, taken.data(), best) : scores[best];
    taken[best] = 1;
    total += weights[k];
    a.slot_ids[token * a.top_k + k] = a.slot_of ? a.slot_of[best] : static_cast<int32_t>(best);
  }
  if (a.renormalize) {
    const float divisor = std::max(total, a.min_weight_sum) + 1e-20f;
    for (int32_t k = 0; k < a.top_k; ++k) weights[k] /= divisor;
  }
  for (int32_t k = 0; k < a.top_k; ++k) weights[k] *= a.scaling_factor;
}

// A counting sort of all choices by slot.
void sort_rows(const Route& a) {
  const int64_t choices = a.tokens * a.top_k;
  std::fill(a.tokens_per_slot, a.tokens_per_slot + a.slots, 0);
  for (int64_t i = 0; i < choices; ++i)
    if (a.slot_ids[i] >= 0) ++a.tokens_per_slot[a.slot_ids[i]];
  a.offsets[0] = 0;
  for (int64_t s = 0; s < a.slots; ++s) a.offsets[s + 1] = a.offsets[s] + static_cast<int32_t>(a.tokens_per_slot[s]);
  static thread_local std::vector<int32_t> next;
  next.assign(a.offsets, a.offsets + a.slots);
  for (int64_t i = 0; i < choices; ++i) {
    const int32_t slot = a.slot_ids[i];
    a.rows[i] = slot < 0 ? -1 : next[slot];
    if (slot >= 0) a.row_tokens[next[slot]++] = static_cast<int32_t>(i / a.top_k);
  }
}

}  // namespace

void route(Team& team, const Route& a) {
  const int64_t blocks = (a.experts + 15) / 16, pairs = (a.tokens + kPair - 1) / kPair;
  team.each(pairs * blocks, [&](int64_t i) {
    const int64_t token = i / blocks * kPair, block = i % blocks;
    if (token + kPair <= a.tokens) logits_of<kPair>(a, token, block);
    else logits_of<1>(a, token, block);
  });
  constexpr int64_t kTokens = 8;  // a few at a time, so that threads rarely meet
  team.each((a.tokens + kTokens - 1) / kTokens, [&](int64_t i) {
    for (int64_t t = i * kTokens; t < std::min(a.tokens, (i + 1) * kTokens); ++t) choose(a, t);
  });
  if (!a.tokens_per_slot) return;
  if (team.rank() == 0) sort_rows(a);
  team.barrier();
}

}  // namespace moewe

extern "C" void moewe_route(const moewe::Route* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::route(team, *args); });
}
