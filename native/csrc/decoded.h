// Weights in few bits that become bf16, exactly or rounded once, on their way into a product: what such formats share.
//
// Not the codes (mxfp4_format.h, fp8_format.h). Two column tiles are decoded a block of K at a time, into L1, where all
// rows meet them; meanwhile the next block is decoded. What is read from memory is codes and scales. Rows and the order of
// additions are those of bf16, so a product has the bits of one with a matrix in bf16 that holds the same numbers, for any
// number of rows.
//
// A `Codec` says how many bytes a tile of 32 inputs and 16 outputs takes and how to find a matrix; its `Reader` decodes
// one column tile, tile after tile along K.
#pragma once

#include "gemm.h"

namespace moewe {

template <class Codec>
struct Decoded : Walker {
  static constexpr bool kTakesRowsWhole = false;
  static constexpr int kStreams = 2;

  using Panel = Bf16::Panel;
  using Weights = typename Codec::Weights;
  using Reader = typename Codec::Reader;

  static int64_t panel_bytes(int64_t row_tiles, int64_t k) { return Bf16::panel_bytes(row_tiles, k); }
  static int64_t column_tile_bytes(int64_t k) { return Bf16::depth(k) * Codec::kTileBytes; }
  static Panel panel(void* memory, int64_t row_tiles, const Matrix& matrix) {
    return Bf16::panel(memory, row_tiles, matrix);
  }
  static Weights weights(const Matrix& matrix, int64_t number, int64_t tiles) {
    return Codec::weights(matrix, number * tiles);
  }
  template <class RowAt>
  static void prepare(const Panel& panel, int64_t tile, int rows, int64_t k, RowAt&& row_at) {
    Bf16::prepare(panel, tile, rows, k, row_at);
  }

  template <class Epilogue>
  static void walk(const Panel& panel, int64_t first_tile, int64_t rows, const Weights& weights, int64_t first,
                   int64_t last, Epilogue&& epilogue) {
    constexpr int64_t kMost = 512;  // rows whose sums wait
    alignas(64) float sums[kMost / kRows * 2 * kResults];
    alignas(64) bf16 rooms[2][kRoom];
    const int64_t stride = panel.depth * kTile;
    Place here{first, 0, 0};
    if (first >= last || rows <= 0) return;
    Pair pair(weights, here, last);
    Decoding(pair, std::min(kBlock, panel.depth), rooms[0], 1).finish();
    for (int turn = 0; here.column < last; turn ^= 1) {
      const int num_columns = columns_at(here.column, last);
      const int64_t depth = std::min(kBlock, panel.depth - here.k), stop = std::min(rows, here.row + kMost);
      const Strip part{rooms[turn], kBlock * kTile};
      // What follows: the next block of K, or all of K again for other rows or columns.
      Place next{here.column, here.row, here.k + kBlock};
      if (next.k >= panel.depth) next = {here.column, stop, 0};
      if (next.row >= rows) next = {here.column + 2, 0, 0};
      if (next.k == 0 && next.column < last) pair = Pair(weights, next, last);
      const int64_t next_depth = next.column < last ? std::min(kBlock, panel.depth - next.k) : 0;
      Decoding decoding(pair, next_depth, rooms[turn ^ 1], whole(stop - here.row, 2 * kRows) * depth);
      Ahead ahead;
      for (int64_t row = here.row; row < stop; row += 2 * kRows) {
        const int count = static_cast<int>(std::min<int64_t>(2 * kRows, rows - row));
        const int row_tiles = count > kRows ? 2 : 1;
        const Strip at{panel.tile(first_tile + row / kRows) + here.k * kTile, stride};
        float* to = sums + (row - here.row) / kRows * 2 * kResults;
        const bool onto = here.k > 0;
        const bool ends = row + 2 * kRows >= stop;  // the first rows follow, a block of K further
        ahead.rows = ends ? panel.tile(first_tile + here.row / kRows) + (here.k + depth) * kTile : at.tiles + 2 * stride;
        if (row_tiles == 2 && num_columns == 2) multiply<2, 2>(at, part, depth, to, count, onto, ahead, decoding);
        if (row_tiles == 1 && num_columns == 2) multiply<1, 2>(at, part, depth, to, count, onto, ahead, decoding);
        if (row_tiles == 2 && num_columns == 1) multiply<2, 1>(at, part, depth, to, count, onto, ahead, decoding);
        if (row_tiles == 1 && num_columns == 1) multiply<1, 1>(at, part, depth, to, count, onto, ahead, decoding);
        if (here.k + kBlock >= panel.depth) epilogue(Results{to, row_tiles, row, count, here.column, num_columns});
      }
      decoding.finish();
      here = next;
    }
  }

 private:
  static constexpr int64_t kBlock = 4;  // tiles along K: two blocks, and as much of two row tiles, stay in L1
  static constexpr int64_t kRoom = 2 * kBlock * kTile;

  // Where in the walk: column tile, the first of so many rows as there are sums for, tile along K.
  struct Place {
    int64_t column, row, k;
  };
  static int columns_at(int64_t column, int64_t last) { return column + 2 <= last ? 2 : 1; }

  // The column tiles at hand.
  struct Pair {
    Reader readers[2];
    int count;
    Pair(const Weights& weights, const Place& at, int64_t last)
        : readers{Reader(weights, at.column), Reader(weights, at.column + columns_at(at.column, last) - 1)},
          count(columns_at(at.column, last)) {}
  };

  // A block that is being decoded, in about as many steps as there are.
  struct Decoding {
    Pair& pair;
    int64_t tiles, each;
    bf16* room;
    int64_t done = 0;
    Decoding(Pair& from, int64_t depth, bf16* to, int64_t steps)
        : pair(from), tiles(from.count * depth), each(whole(tiles, steps)), room(to) {}
    void operator()() {
      for (int64_t i = 0; i < each && done < tiles; ++i, ++done) {
        const int64_t column = pair.count == 2 ? done % 2 : 0, k = pair.count == 2 ? done / 2 : done;
        pair.readers[column].next(room + (column * kBlock + k) * kTile);
      }
    }
    void finish() {
      while (done < tiles) (*this)();
    }
  };
};

}  // namespace moewe
