#include "linear.h"

#include "formats.h"
#include "scratch.h"

namespace moewe {

namespace {

// Writes what a multiplication gave: bias in f32, then one rounding, then the residual and its rounding.
struct Store {
  const Linear& args;
  int64_t first_row;  // of the block

  void operator()(const Results& results) const {
    for (int tile = 0; tile < results.column_tiles; ++tile) {
      const int64_t column = (results.column_tile + tile) * kColumns;
      const int count = static_cast<int>(std::min<int64_t>(kColumns, args.weight.rows - column));
      const f32x16 bias = args.bias ? f32x16::load(args.bias + column, count) : f32x16::zero();
      for (int r = 0; r < results.rows; ++r) {
        f32x16 sum = results.load(r, tile);
        if (args.bias) sum = sum + bias;
        const int64_t at = (first_row + results.row + r) * args.out_stride + column;
        if (args.f32_out) {
          store(sum, static_cast<float*>(args.out) + at, count);
          continue;
        }
        if (args.residual) sum = load(args.residual + at, count) + sum.rounded();
        store(sum, static_cast<bf16*>(args.out) + at, count);
      }
    }
  }

  static f32x16 load(const bf16* from, int count) {
    return count == kColumns ? f32x16::load(from) : f32x16::load(from, count);
  }
  template <class T>
  static void store(f32x16 value, T* to, int count) {
    if (count == kColumns) value.store(to);
    else value.store(to, count);
  }
};

template <class Format>
void linear_in(Team& team, const Linear& args) {
  const int64_t k = args.weight.columns, row_tiles = whole(args.rows, kRows);
  const auto panel = Format::panel(args.scratch, row_tiles, args.weight);
  team.each(row_tiles, [&](int64_t tile) {
    const int rows = static_cast<int>(std::min<int64_t>(kRows, args.rows - tile * kRows));
    Format::prepare(panel, tile, rows, k, [&](int r) { return args.x + (tile * kRows + r) * args.x_stride; });
  });
  const int64_t columns = column_tiles(args.weight.rows, false);
  const auto weights = Format::weights(args.weight, 0, columns);
  const Cut size = cut<Format>(args.rows, columns, k, 1, team.size());
  const int64_t column_blocks = whole(columns, size.columns);
  team.each(whole(args.rows, size.rows) * column_blocks, [&](int64_t task) {
    const int64_t row = task / column_blocks * size.rows, column = task % column_blocks * size.columns;
    multiply_block<Format>(panel, row / kRows, std::min(size.rows, args.rows - row), weights, column,
                           std::min(columns, column + size.columns), Store{args, row});
  });
}

}  // namespace

int64_t linear_scratch(const Linear& args) { return panel_bytes(whole(args.rows, kRows), args.weight.columns); }

void linear(Team& team, const Linear& args) {
  in_format(args.weight.format, [&](auto format) { linear_in<decltype(format)>(team, args); });
}

}  // namespace moewe

extern "C" void moewe_linear(const moewe::Linear* args) {
  moewe::Linear own = *args;
  own.scratch = moewe::call_scratch().take(moewe::linear_scratch(own));
  moewe::on_team([&own](moewe::Team& team) { moewe::linear(team, own); });
}
