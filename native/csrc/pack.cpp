#include "pack.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "tiles.h"

namespace moewe {

namespace {

// rows: the band's first row. A pair of K at a time, because that is what stays together.
void pack_band(const bf16* rows, int count, int64_t num_columns, bf16* tiles) {
  const int64_t depth = whole(num_columns, kDepth);
  for (int64_t k = 0; k < depth; ++k) {
    bf16* tile = tiles + k * kTile;
    if (count < kColumns || (k + 1) * kDepth > num_columns) std::memset(tile, 0, kTile * sizeof(bf16));
    const int here = static_cast<int>(std::min<int64_t>(kDepth, num_columns - k * kDepth));
    for (int column = 0; column < count; ++column) {
      const bf16* from = rows + column * num_columns + k * kDepth;
      bf16* to = tile + column * 2;
      int i = 0;
      for (; i + 2 <= here; i += 2) std::memcpy(to + i / 2 * kDepth, from + i, 2 * sizeof(bf16));
      if (i < here) to[i / 2 * kDepth] = from[i];
    }
  }
}

// One row of a column tile, from its tiles.
void unpack_row(const bf16* tiles, int column, int64_t num_columns, bf16* row) {
  for (int64_t k = 0; k < num_columns; k += kDepth) {
    const bf16* from = tiles + k / kDepth * kTile + column * 2;
    const int here = static_cast<int>(std::min<int64_t>(kDepth, num_columns - k));
    int i = 0;
    for (; i + 2 <= here; i += 2) std::memcpy(row + k + i, from + i / 2 * kDepth, 2 * sizeof(bf16));
    if (i < here) row[k + i] = from[i / 2 * kDepth];
  }
}

// In place a matrix is first copied: whole where its column tiles move, else band by band.
void pack_matrix_in_place(const Pack& args, bf16* matrix, int64_t tiles) {
  const int64_t size = args.num_rows * args.num_columns;
  bf16* copy = static_cast<bf16*>(own_scratch().take(size * sizeof(bf16)));
  std::memcpy(copy, matrix, size * sizeof(bf16));
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Band band = band_of(args.num_rows, args.gate_up, tile);
    pack_band(copy + band.row * args.num_columns, band.count, args.num_columns,
              matrix + tile * kColumns * args.num_columns);
  }
}

}  // namespace

void pack(Team& team, const Pack& args) {
  const int64_t tiles = column_tiles(args.num_rows, args.gate_up);
  const int64_t stride = whole(args.num_columns, kDepth) * kTile, size = args.num_rows * args.num_columns;
  const bool in_place = args.rows == args.tiles;
  if (in_place && args.gate_up) {
    team.each(args.stack, [&](int64_t i) { pack_matrix_in_place(args, args.tiles + i * size, tiles); });
    own_scratch().release();  // as large as a matrix, and not needed again
    return;
  }
  team.each(args.stack * tiles, [&](int64_t i) {
    const Band band = band_of(args.num_rows, args.gate_up, i % tiles);
    const bf16* from = args.rows + i / tiles * size + band.row * args.num_columns;
    if (in_place) {
      const int64_t bytes = band.count * args.num_columns * sizeof(bf16);
      from = static_cast<const bf16*>(std::memcpy(own_scratch().take(bytes), from, bytes));
    }
    pack_band(from, band.count, args.num_columns, args.tiles + i * stride);
  });
}

void gather_rows(Team& team, const GatherRows& args) {
  const int64_t stride = whole(args.num_columns, kDepth) * kTile;
  team.each(args.num_ids, [&](int64_t i) {
    const int64_t id = args.ids[i];
    unpack_row(args.tiles + id / kColumns * stride, static_cast<int>(id % kColumns), args.num_columns,
               args.out + i * args.num_columns);
  });
}

}  // namespace moewe

extern "C" {
void moewe_pack(const moewe::Pack* args) {
  moewe::on_team([args](moewe::Team& team) { moewe::pack(team, *args); });
}
void moewe_gather_rows(const moewe::GatherRows* args) {
  // A row lies in every tile of its band: a line of cache for each pair of inputs.
  const int64_t bytes = args->num_ids * args->num_columns * 32;
  moewe::on_team_for(bytes, [args](moewe::Team& team) { moewe::gather_rows(team, *args); });
}
}
