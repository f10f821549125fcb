#include "draw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace moewe {

namespace {

constexpr int64_t kRun = 256;     // ids whose weights are summed before the sums are added up
constexpr int kBinBits = 16;      // of a float; weights are in [0, 1]
constexpr int kBins = 0x3f80 + 1;  // the bin of 1 is the last

int bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, 4);
  return static_cast<int>(bits >> kBinBits);
}

// exp((logit - best) / temperature), and 0 for what min_p cuts off or what is not allowed at all.
void weigh(const float* logits, int64_t width, float temperature, float min_p, float* weights) {
  f32x16 most(-INFINITY);
  for (int64_t i = 0; i < width; i += 16) {
    alignas(64) float part[16];
    const int here = static_cast<int>(std::min<int64_t>(16, width - i));
    std::fill(part + here, part + 16, -INFINITY);
    std::memcpy(part, logits + i, here * sizeof(float));
    most = max(f32x16::load(part), most);
  }
  const f32x16 best(largest(most)), divisor(temperature), least(min_p), lowest(-87.0f);
  for (int64_t i = 0; i < width; i += 16) {
    const int here = static_cast<int>(std::min<int64_t>(16, width - i));
    const f32x16 power = (f32x16::load(logits + i, here) - best) / divisor;
    const f32x16 weight = where_at_least(power, lowest, exp(power));
    where_at_least(weight, least, weight).store(weights + i, here);
  }
}

struct Bins {
  std::vector<int32_t> counts;
  std::vector<double> sums;
};

// The weights in one bin, largest first.
void sorted_bin(const float* weights, int64_t width, int bin, std::vector<float>& found) {
  found.clear();
  for (int64_t i = 0; i < width; ++i)
    if (bin_of(weights[i]) == bin) found.push_back(weights[i]);
  std::sort(found.begin(), found.end(), std::greater<float>());
}

struct Kept {
  int64_t number;
  float least;  // the smallest weight that stays
};

// How many of the largest weights stay: at most `limit`, and no more than are needed to reach `share` of their sum.
Kept count_kept(const float* weights, int64_t width, int64_t limit, double share) {
  static thread_local Bins bins;
  static thread_local std::vector<float> found;
  bins.counts.assign(kBins, 0), bins.sums.assign(kBins, 0.0);
  for (int64_t i = 0; i < width; ++i) {
    const int bin = bin_of(weights[i]);
    ++bins.counts[bin];
    bins.sums[bin] += weights[i];
  }
  double total = 0.0, wanted = INFINITY;
  int64_t number = 0;
  if (limit < width) {  // the sum of the `limit` largest
    for (int bin = kBins - 1; number < limit; --bin) {
      if (number + bins.counts[bin] <= limit) {
        total += bins.sums[bin];
        number += bins.counts[bin];
        continue;
      }
      sorted_bin(weights, width, bin, found);
      for (size_t i = 0; number < limit; ++i, ++number) total += found[i];
    }
  } else {
    for (int bin = kBins - 1; bin >= 0; --bin) total += bins.sums[bin];
  }
  if (share < 1.0) wanted = share * total;
  double before = 0.0;
  number = 0;
  for (int bin = kBins - 1; bin >= 0; --bin) {
    if (!bins.counts[bin]) continue;
    if (number + bins.counts[bin] < limit && before + bins.sums[bin] < wanted) {  // all of it stays, and more
      before += bins.sums[bin];
      number += bins.counts[bin];
      continue;
    }
    sorted_bin(weights, width, bin, found);
    size_t i = 0;
    for (; i < found.size() && number < limit && (before < wanted || number == 0); ++i, ++number) before += found[i];
    if (i < found.size() || number == limit || before >= wanted) return {number, found[i - 1]};
  }
  return {width, 0.0f};
}

void cut(float* weights, int64_t width, Kept kept) {
  int64_t room = kept.number;  // for the smallest ones that stay: those of lowest id
  for (int64_t i = 0; i < width; ++i) room -= weights[i] > kept.least;
  for (int64_t i = 0; i < width; ++i)
    if (weights[i] < kept.least || (weights[i] == kept.least && room-- <= 0)) weights[i] = 0.0f;
}

// Where the distribution function passes `chance`, in id order.
int64_t invert(const float* weights, int64_t width, double chance) {
  static thread_local std::vector<double> sums;
  sums.clear();
  double total = 0.0;
  for (int64_t start = 0; start < width; start += kRun) {
    double parts[4] = {0.0, 0.0, 0.0, 0.0};
    const int64_t end = std::min(width, start + kRun);
    int64_t i = start;
    for (; i + 4 <= end; i += 4)
      for (int j = 0; j < 4; ++j) parts[j] += weights[i + j];
    for (; i < end; ++i) parts[0] += weights[i];
    total += (parts[0] + parts[1]) + (parts[2] + parts[3]);
    sums.push_back(total);
  }
  const double target = chance * total;
  const int64_t run = std::min<int64_t>(std::upper_bound(sums.begin(), sums.end(), target) - sums.begin(),
                                        static_cast<int64_t>(sums.size()) - 1);
  double reached = run ? sums[run - 1] : 0.0;
  int64_t last = -1;  // sums by another order differ in rounding: the last one that can be drawn
  for (int64_t i = run * kRun; i < std::min(width, (run + 1) * kRun); ++i) {
    if (weights[i] <= 0.0f) continue;
    reached += weights[i];
    last = i;
    if (reached > target) return i;
  }
  for (int64_t i = run * kRun; last < 0 && --i >= 0;)
    if (weights[i] > 0.0f) last = i;
  return std::max<int64_t>(last, 0);
}

}  // namespace

void draw_rows(Team& team, const DrawRows& a) {
  team.each(a.rows, [&](int64_t row) {
    static thread_local std::vector<float> weights;
    weights.resize(a.width);
    weigh(a.logits + row * a.width, a.width, a.temperature[row], a.min_p[row], weights.data());
    const int64_t limit = a.top_k[row] > 0 ? std::min(a.top_k[row], a.width) : a.width;
    if (limit < a.width || a.top_p[row] < 1.0)
      cut(weights.data(), a.width, count_kept(weights.data(), a.width, limit, a.top_p[row]));
    a.tokens[row] = invert(weights.data(), a.width, a.chance[row]);
  });
}

}  // namespace moewe

extern "C" void moewe_draw_rows(const moewe::DrawRows* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::draw_rows(team, *args); });
}
