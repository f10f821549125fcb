#include "pack_codes.h"

#include "formats.h"
#include "scratch.h"

namespace moewe {

namespace {

// The sizes of a matrix, in bytes.
struct Sizes {
  int64_t row, scale_row;    // of the checkpoint
  int64_t tile, scale_tile;  // a column tile

  explicit Sizes(const Matrix& matrix) {
    const int64_t depth = Bf16::depth(matrix.columns);
    const bool four_bits = matrix.format == kFormatMxfp4;
    row = four_bits ? matrix.columns / 2 : matrix.columns;
    scale_row = four_bits ? matrix.columns / kDepth : 0;
    tile = depth * (four_bits ? Mxfp4Codec::kTileBytes : Fp8Codec::kTileBytes);
    scale_tile = four_bits ? depth * kColumns : 0;
  }
};

// Rows of a band, `count` of them.
struct Rows {
  const uint8_t *codes, *scales;
  int count;
};

void pack_fp8(const Rows& rows, int64_t columns, uint8_t* tile) {
  constexpr int kHalf = 8;  // bytes: a pair of K for four outputs
  for (int64_t first = 0; first < columns; first += kDepth, tile += Fp8Codec::kTileBytes) {
    const int here = static_cast<int>(std::min<int64_t>(kDepth, columns - first));
    if (rows.count < kColumns || here < kDepth) std::memset(tile, 0, Fp8Codec::kTileBytes);
    for (int column = 0; column < rows.count; ++column) {
      const uint8_t* from = rows.codes + column * columns + first;
      uint8_t* to = tile + column / 4 * (2 * kHalf) + column % 4 * 2;
      for (int k = 0; k < here; k += 2)
        std::memcpy(to + k / 4 * Fp8Codec::kLine + k / 2 % 2 * kHalf, from + k, std::min(2, here - k));
    }
  }
}

void pack_mxfp4(const Rows& rows, int64_t columns, uint8_t* tile, uint8_t* scales) {
  constexpr uint8_t kOne = Mxfp4Codec::kBias;
  for (int64_t k = 0; k < columns / kDepth; ++k, tile += Mxfp4Codec::kTileBytes, scales += kColumns) {
    if (rows.count < kColumns) {
      std::memset(tile, 0, Mxfp4Codec::kTileBytes);
      std::memset(scales, kOne, kColumns);
    }
    for (int column = 0; column < rows.count; ++column) {
      scales[column] = rows.scales[column * (columns / kDepth) + k];
      const uint8_t* from = rows.codes + column * (columns / 2) + k * (kDepth / 2);
      for (int line = 0; line < Mxfp4Codec::kLines; ++line) {
        uint32_t pairs;  // four of them: the first of each are the lower halves of bytes
        std::memcpy(&pairs, from + line * 4, 4);
        const uint32_t words = _pext_u32(pairs, 0x0f0f0f0f) | _pext_u32(pairs, 0xf0f0f0f0) << 16;
        std::memcpy(tile + line * Mxfp4Codec::kLine + column * 4, &words, 4);
      }
    }
  }
}

// Column tile `tile` of all the stack, from rows that are not its own memory.
void pack_tile(const PackCodes& args, const Sizes& sizes, int64_t tile, const Rows& rows) {
  auto* to = static_cast<uint8_t*>(const_cast<void*>(args.matrix.data)) + tile * sizes.tile;
  if (args.matrix.format == kFormatFp8) return pack_fp8(rows, args.matrix.columns, to);
  auto* scales = static_cast<uint8_t*>(const_cast<void*>(args.matrix.scales)) + tile * sizes.scale_tile;
  pack_mxfp4(rows, args.matrix.columns, to, scales);
}

// A copy of `count` rows from row `first` of all the stack on, in the scratch of this thread.
Rows copied(const PackCodes& args, const Sizes& sizes, int64_t first, int64_t count) {
  auto* copy = static_cast<uint8_t*>(own_scratch().take(count * (sizes.row + sizes.scale_row)));
  uint8_t* scales = copy + count * sizes.row;
  std::memcpy(copy, args.rows + first * sizes.row, count * sizes.row);
  if (sizes.scale_row) std::memcpy(scales, args.scales + first * sizes.scale_row, count * sizes.scale_row);
  return {copy, scales, static_cast<int>(count)};
}

}  // namespace

void pack_codes(Team& team, const PackCodes& args) {
  const int64_t num_rows = args.matrix.rows, tiles = column_tiles(num_rows, args.gate_up);
  const Sizes sizes(args.matrix);
  const bool in_place = args.rows == args.matrix.data;
  if (in_place && args.gate_up) {  // column tiles move, so that a matrix is copied whole
    team.each(args.stack, [&](int64_t i) {
      const Rows all = copied(args, sizes, i * num_rows, num_rows);
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const Band band = band_of(num_rows, true, tile);
        pack_tile(args, sizes, i * tiles + tile,
                  {all.codes + band.row * sizes.row, all.scales + band.row * sizes.scale_row, band.count});
      }
    });
    own_scratch().release();  // as large as a matrix, and not needed again
    return;
  }
  team.each(args.stack * tiles, [&](int64_t i) {
    const Band band = band_of(num_rows, args.gate_up, i % tiles);
    const int64_t first = i / tiles * num_rows + band.row;
    const Rows there{args.rows + first * sizes.row, args.scales ? args.scales + first * sizes.scale_row : nullptr,
                     band.count};
    pack_tile(args, sizes, i, in_place ? copied(args, sizes, first, band.count) : there);
  });
}

}  // namespace moewe

extern "C" void moewe_pack_codes(const moewe::PackCodes* args) {
  moewe::on_team([args](moewe::Team& team) { moewe::pack_codes(team, *args); });
}
