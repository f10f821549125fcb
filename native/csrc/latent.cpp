#include "latent.h"

#include <algorithm>

#include "gemm.h"
#include "heads.h"
#include "kv_format.h"
#include "scratch.h"

namespace moewe {

namespace {

constexpr int64_t kPanelBytes = int64_t{1} << 18;  // of the rows that a task prepares: they stay in L2 beside a matrix

// Writes what a multiplication gave for one head, rounded once.
struct StoreHead {
  bf16* out;  // of the first row
  int64_t stride, columns;

  void operator()(const Results& results) const {
    for (int tile = 0; tile < results.column_tiles; ++tile) {
      const int64_t column = (results.column_tile + tile) * kColumns;
      const int count = static_cast<int>(std::min<int64_t>(kColumns, columns - column));
      for (int r = 0; r < results.rows; ++r) {
        bf16* to = out + (results.row + r) * stride + column;
        if (count == kColumns) results.load(r, tile).store(to);
        else results.load(r, tile).store(to, count);
      }
    }
  }
};

// Rows of a task: few enough for their panel, and so that there are tasks for every thread.
int64_t rows_each(const HeadLinear& a, int team) {
  constexpr int64_t kPair = 2 * kRows;
  const int64_t pairs = std::max<int64_t>(1, whole(a.rows, kPair));
  const int64_t fit = std::max<int64_t>(1, kPanelBytes / Bf16::panel_bytes(2, a.weight.columns));
  const int64_t wanted = team > 1 ? whole(4 * team, a.heads) : 1;
  const int64_t blocks = std::min(pairs, std::max(whole(pairs, fit), wanted));
  return whole(pairs, blocks) * kPair;
}

void do_row(const LatentRows& a, int64_t row, float* values) {
  const int64_t width = a.kv_rank + a.rope_dim, query = a.nope_dim + a.rope_dim;
  const float *cos = a.cos + row * a.rope_dim, *sin = a.sin + row * a.rope_dim;
  // Rotated, and rounded as it is stored: `heads` heads of R.
  const auto rotate = [&](float* from, int64_t heads) {
    rotate_heads(from, heads, a.rope_dim, a.rope_dim, a.interleaved, cos, sin);
  };
  const int64_t slot = a.slots[row];
  if (slot >= 0) {
    const bf16* kv = a.kv + row * width;
    for (int64_t i = 0; i < width; i += 16) {
      const int n = static_cast<int>(std::min<int64_t>(16, width - i));
      f32x16::load(kv + i, n).store(values + i, n);
    }
    norm_part(values, a.kv_rank, a.norm, a.eps);
    float* const rest = values + a.kv_rank;
    rotate(rest, 1);
    for (int64_t i = 0; i < a.rope_dim; ++i) rest[i] = to_float(to_bf16(rest[i]));
    store_heads(a.kv_format, values, slot, 1, width, a.cache, a.scales);
  }
  const auto each_part = [&](auto&& f) {  // of a head: 16 elements of its R at most
    for (int64_t head = 0; head < a.heads; ++head)
      for (int64_t i = 0; i < a.rope_dim; i += 16) f(head, i, static_cast<int>(std::min<int64_t>(16, a.rope_dim - i)));
  };
  each_part([&](int64_t head, int64_t i, int n) {
    const bf16* from = a.queries + (row * a.heads + head) * query + a.nope_dim + i;
    f32x16::load(from, n).store(values + head * a.rope_dim + i, n);
  });
  rotate(values, a.heads);
  each_part([&](int64_t head, int64_t i, int n) {
    bf16* to = a.q + (row * a.heads + head) * width + a.kv_rank + i;
    f32x16::load(values + head * a.rope_dim + i, n).store(to, n);
  });
}

}  // namespace

void head_linear(Team& team, const HeadLinear& a) {
  const int64_t k = a.weight.columns, columns = column_tiles(a.weight.rows, false);
  const int64_t most = rows_each(a, team.size()), blocks = whole(a.rows, most);
  team.each(a.heads * blocks, [&](int64_t task) {
    const int64_t head = task / blocks, first = task % blocks * most, rows = std::min(most, a.rows - first);
    const int64_t row_tiles = whole(rows, kRows);
    const auto panel = Bf16::panel(own_scratch().take(Bf16::panel_bytes(row_tiles, k)), row_tiles, a.weight);
    const bf16* x = a.x + first * a.x_stride + head * a.x_head_stride;
    for (int64_t tile = 0; tile < row_tiles; ++tile) {
      const int here = static_cast<int>(std::min<int64_t>(kRows, rows - tile * kRows));
      Bf16::prepare(panel, tile, here, k, [&](int r) { return x + (tile * kRows + r) * a.x_stride; });
    }
    bf16* out = a.out + first * a.out_stride + head * a.out_head_stride;
    multiply_block<Bf16>(panel, 0, rows, Bf16::weights(a.weight, head, columns), 0, columns,
                         StoreHead{out, a.out_stride, a.weight.rows});
  });
}

void latent_rows(Team& team, const LatentRows& a) {
  const int64_t width = std::max<int64_t>(a.kv_rank + a.rope_dim, a.heads * a.rope_dim);
  auto* values = static_cast<float*>(own_scratch().take((width + 16) * 4));
  team.each(a.rows, [&](int64_t row) { do_row(a, row, values); });
}

}  // namespace moewe

extern "C" {
void moewe_head_linear(const moewe::HeadLinear* args) {
  moewe::on_team([&](moewe::Team& team) { moewe::head_linear(team, *args); });
}
void moewe_latent_rows(const moewe::LatentRows* args) {
  const int64_t query = args->heads * (args->nope_dim + args->rope_dim);
  moewe::on_team_for(args->rows * query * 2, [&](moewe::Team& team) { moewe::latent_rows(team, *args); });
}
}
