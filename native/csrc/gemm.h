// The walk of a matrix product over tiles: prepared rows times columns of a packed matrix, into an epilogue.
//
// Not an operation (linear.h, experts.h are) and not the inner loop (tiles.h). A format of weights is a struct with what
// `Bf16` below has: rows are prepared in the form that it multiplies with, the walk and the epilogues are the same for
// all. Letters: K inputs. A row tile is 16 rows, a column tile 16 columns.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "matrix.h"
#include "team.h"
#include "tiles.h"

namespace moewe {

// What one multiplication gives: up to two row tiles by up to two column tiles, or one row tile by up to four.
struct Results {
  const float* tiles;   // [column tiles][row tiles][16][16]
  int row_tiles;
  int64_t row;          // of the walk, the first of these
  int rows;             // so many are meant; what stands behind them is undefined
  int64_t column_tile;  // of the matrix, the first of these
  int column_tiles;

  // Sixteen columns of a row: both counted from the first of these.
  f32x16 load(int r, int tile) const {
    return f32x16::load(tiles + (tile * row_tiles + r / kRows) * kResults + r % kRows * kColumns);
  }
};

constexpr int64_t kFewRows = 2 * kRows;  // so many are bound by memory

// Weights and rows in bf16.
struct Bf16 {
  // True where a row must be known to its end before any of it can be prepared (its scale, say). Preparing is then work,
  // so there are `prepare_row` and `copy_row` besides, for rows that come several times.
  static constexpr bool kTakesRowsWhole = false;
  // Column tiles that few rows are multiplied with at once: as many streams from memory.
  static constexpr int kStreams = 4;

  // Rows ready to be multiplied: tiles [row tiles][K / 32][16][32]. Rows that a tile lacks hold anything, since no row
  // of a product sees another; columns behind K are zero.
  struct Panel {
    bf16* tiles;
    int64_t depth;
    bf16* tile(int64_t i) const { return tiles + i * depth * kTile; }
  };
  // One matrix.
  struct Weights {
    const bf16* tiles;
    int64_t depth;
  };

  static int64_t depth(int64_t k) { return whole(k, kDepth); }
  static int64_t panel_bytes(int64_t row_tiles, int64_t k) { return row_tiles * depth(k) * kTile * sizeof(bf16); }
  static int64_t column_tile_bytes(int64_t k) { return depth(k) * kTile * sizeof(bf16); }
  // Of rows that are multiplied with `matrix`.
  static Panel panel(void* memory, int64_t /*row_tiles*/, const Matrix& matrix) {
    return {static_cast<bf16*>(memory), depth(matrix.columns)};
  }

  // Matrix `number` of a stack of matrices with so many column tiles each.
  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    const int64_t k = depth(matrix.columns);
    return {static_cast<const bf16*>(matrix.data) + number * tiles * k * kTile, k};
  }

  // Write up to 16 rows of K elements to row tile `tile`; row_at(i) says where row i begins.
  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    const bf16* from[kRows];
    for (int r = 0; r < rows; ++r) from[r] = row_at(r);
    bf16* to = panel.tile(tile);
    const int64_t full = k / kDepth;
    for (int64_t i = 0; i < full; ++i)
      for (int r = 0; r < rows; ++r)
        std::memcpy(to + i * kTile + r * kDepth, from[r] + i * kDepth, kDepth * sizeof(bf16));
    if (const int left = static_cast<int>(k % kDepth)) {
      for (int r = 0; r < rows; ++r) {
        bf16* last = to + full * kTile + r * kDepth;
        std::memcpy(last, from[r] + full * kDepth, left * sizeof(bf16));
        std::memset(last + left, 0, (kDepth - left) * sizeof(bf16));
      }
    }
  }

  // Column tiles [tile, tile + count), opened once for all rows, so many, that they are multiplied with.
  struct Columns {
    const bf16* tiles;
  };
  static Columns open(const Weights& weights, int64_t tile, int /*count*/, int64_t /*rows*/) {
    return {weights.tiles + tile * weights.depth * kTile};
  }

  template <int MT, int NT>
  static void multiply(const Panel& panel, int64_t tile, const Columns& columns, float* results, int rows) {
    const int64_t stride = panel.depth * kTile;
    moewe::multiply<MT, NT>({panel.tile(tile), stride}, {columns.tiles, stride}, panel.depth, results, rows);
  }

  // Many rows: K is cut into blocks, so that the part of two column tiles at hand stays in L1 while all rows pass by.
  // Sums wait in between as f32, of which each was one already. The next column tiles are asked for meanwhile.
  template <class Epilogue>
  static void multiply_many(const Panel& panel, int64_t first_tile, int64_t rows, const Weights& weights, int64_t first,
                            int64_t last, Epilogue&& epilogue) {
    constexpr int64_t kBlock = 8;  // tiles of K
    constexpr int64_t kMost = 512;  // rows whose sums wait
    alignas(64) float sums[kMost / kRows * 2 * kResults];
    const int64_t stride = panel.depth * kTile;
    for (int64_t column = first; column < last; column += 2) {
      const Strip columns{weights.tiles + column * stride, stride};
      const int num_columns = column + 2 <= last ? 2 : 1;
      const int64_t row_pairs = whole(rows, 2 * kRows);
      Ahead ahead;
      if (column + 4 <= last) {
        const int64_t lines = 2 * stride * int64_t{sizeof(bf16)} / 64, steps = row_pairs * panel.depth;
        ahead = {reinterpret_cast<const char*>(columns.tiles + 2 * stride), static_cast<int>(whole(lines, steps))};
      }
      const char* const end = reinterpret_cast<const char*>(columns.tiles + 4 * stride);
      for (int64_t begin = 0; begin < rows; begin += kMost) {
        const int64_t stop = std::min(rows, begin + kMost);
        for (int64_t k = 0; k < panel.depth; k += kBlock) {
          const int64_t depth = std::min(kBlock, panel.depth - k);
          const Strip part{columns.tiles + k * kTile, stride};
          for (int64_t row = begin; row < stop; row += 2 * kRows) {
            const int here = static_cast<int>(std::min<int64_t>(2 * kRows, rows - row));
            const int row_tiles = here > kRows ? 2 : 1;
            const Strip at{panel.tile(first_tile + row / kRows) + k * kTile, stride};
            float* to = sums + (row - begin) / kRows * 2 * kResults;
            const bool onto = k > 0;
            const bool ends = row + 2 * kRows >= stop;  // the first rows follow, a block of K further
            ahead.rows = ends ? panel.tile(first_tile + begin / kRows) + (k + depth) * kTile : at.tiles + 2 * stride;
            if (row_tiles == 2 && num_columns == 2) moewe::multiply<2, 2>(at, part, depth, to, here, onto, ahead);
            if (row_tiles == 1 && num_columns == 2) moewe::multiply<1, 2>(at, part, depth, to, here, onto, ahead);
            if (row_tiles == 2 && num_columns == 1) moewe::multiply<2, 1>(at, part, depth, to, here, onto, ahead);
            if (row_tiles == 1 && num_columns == 1) moewe::multiply<1, 1>(at, part, depth, to, here, onto, ahead);
            ahead.next += ahead.each * depth * 64;
            if (ahead.next >= end) ahead.each = 0;
            if (k + kBlock >= panel.depth) epilogue(Results{to, row_tiles, row, here, column, num_columns});
          }
        }
      }
    }
  }
};

// Column by column: they are read from memory once, and meet all rows while they are in cache.
template <class Format, class Epilogue>
void multiply_columns(const typename Format::Panel& panel, int64_t first_tile, int64_t rows,
                      const typename Format::Weights& weights, int64_t first, int64_t last, Epilogue&& epilogue) {
  constexpr int kStreams = Format::kStreams;
  if constexpr (kStreams == 4) {
    if (rows > kFewRows) return Format::multiply_many(panel, first_tile, rows, weights, first, last, epilogue);
  }
  alignas(64) float tiles[4 * kResults];
  const int64_t rows_once = kStreams == 4 ? kRows : 2 * kRows;
  for (int64_t column = first; column < last;) {
    const int64_t left = last - column;
    const int num_columns = left >= kStreams ? kStreams : left >= 2 ? 2 : 1;
    const auto columns = Format::open(weights, column, num_columns, rows);
    for (int64_t row = 0; row < rows; row += rows_once) {
      const int here = static_cast<int>(std::min<int64_t>(rows_once, rows - row));
      const int row_tiles = here > kRows ? 2 : 1;
      const int64_t tile = first_tile + row / kRows;
      if constexpr (kStreams == 4) {
        if (num_columns == 4) Format::template multiply<1, 4>(panel, tile, columns, tiles, here);
      } else {
        if (row_tiles == 2 && num_columns == 2) Format::template multiply<2, 2>(panel, tile, columns, tiles, here);
        if (row_tiles == 2 && num_columns == 1) Format::template multiply<2, 1>(panel, tile, columns, tiles, here);
      }
      if (row_tiles == 1 && num_columns == 2) Format::template multiply<1, 2>(panel, tile, columns, tiles, here);
      if (row_tiles == 1 && num_columns == 1) Format::template multiply<1, 1>(panel, tile, columns, tiles, here);
      epilogue(Results{tiles, row_tiles, row, here, column, num_columns});
    }
    column += num_columns;
  }
}

// A format that goes through rows and columns in a way of its own, `walk`, instead of `multiply_columns`.
struct Walker {};

// Rows [0, rows), which begin at row tile `first_tile` of the panel, times column tiles [first, last).
template <class Format, class Epilogue>
void multiply_block(const typename Format::Panel& panel, int64_t first_tile, int64_t rows,
                    const typename Format::Weights& weights, int64_t first, int64_t last, Epilogue&& epilogue) {
  if constexpr (std::is_base_of_v<Walker, Format>)
    Format::walk(panel, first_tile, rows, weights, first, last, epilogue);
  else multiply_columns<Format>(panel, first_tile, rows, weights, first, last, epilogue);
}

// How a product is cut into tasks. It decides no bit: each element of the result is one multiplication of whole rows
// and columns, whatever task it falls to.
struct Cut {
  int64_t rows;     // of a block, a multiple of 32
  int64_t columns;  // column tiles of a task, even
};

// rows: of one matrix, the most that any has. A block of rows stays in half of L2 while the columns of its tasks pass by
// and are read from memory once a block; a task reads enough weights that starting it costs nothing beside them.
template <class Format>
Cut cut(int64_t rows, int64_t column_tiles, int64_t k, int64_t matrices, int team) {
  constexpr int64_t kPanelBytes = int64_t{1} << 20, kTaskBytes = int64_t{64} << 10, kPair = 2 * kRows;
  constexpr int64_t kStreams = Format::kStreams;
  const int64_t pair_bytes = Format::panel_bytes(2, k), fit = std::max<int64_t>(1, kPanelBytes / pair_bytes);
  const int64_t pairs = std::max<int64_t>(1, whole(rows, kPair));
  const int64_t wanted = team > 1 ? 4 * team : 1;
  Cut result;
  int64_t blocks = whole(pairs, fit);
  const auto tasks = [&] { return std::max<int64_t>(1, matrices * whole(column_tiles, result.columns)) * blocks; };
  if (pairs == 1) {
    result.columns = kStreams * whole(kTaskBytes, kStreams * Format::column_tile_bytes(k));
  } else {
    // Columns that follow each other are asked for in time; few columns, and every core must get its share.
    result.columns = 16;
    while (result.columns > 2 && tasks() < wanted) result.columns /= 2;
  }
  // Then more blocks of rows.
  if (tasks() < wanted) blocks = std::min(pairs, whole(wanted * blocks, tasks()));
  result.rows = whole(pairs, blocks) * kPair;
  return result;
}

}  // namespace moewe
