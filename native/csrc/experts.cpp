#include "experts.h"

#include <vector>

#include "formats.h"
#include "scratch.h"

namespace moewe {

namespace {

// Rows of one slot that are multiplied together, and where their tiles begin.
struct Segment {
  int64_t slot, row, rows, tile;
};

inline int64_t rows_of(const ExpertFfn& args, int64_t slot) {
  return args.tokens_per_slot ? args.tokens_per_slot[slot] : args.rows;
}

// The rows of all slots that have some, in blocks of at most `most`. Every slot begins a row tile of its own.
const std::vector<Segment>& segments_of(const ExpertFfn& args, int64_t most) {
  static thread_local std::vector<Segment> segments;
  segments.clear();
  int64_t row = 0, tile = 0;
  for (int64_t slot = 0; slot < args.slots; ++slot) {
    const int64_t end = row + rows_of(args, slot);
    while (row < end) {
      const int64_t rows = std::min(most, end - row);
      segments.push_back({slot, row, rows, tile});
      row += rows;
      tile += whole(rows, kRows);
    }
  }
  return segments;
}

// For each row of the panel the first one that is of the same token, itself or one before it.
const std::vector<int32_t>& first_rows(const ExpertFfn& args, const std::vector<Segment>& segments, int64_t row_tiles) {
  static thread_local std::vector<int32_t> first, of_token;
  of_token.clear();
  first.resize(row_tiles * kRows);
  for (const Segment& segment : segments)
    for (int64_t row = 0; row < segment.rows; ++row) {
      const size_t token = args.row_tokens[segment.row + row];
      const auto place = static_cast<int32_t>(segment.tile * kRows + row);
      if (token >= of_token.size()) of_token.resize(token + 1, -1);
      if (of_token[token] < 0) of_token[token] = place;
      first[place] = of_token[token];
    }
  return first;
}

inline f32x16 activate(f32x16 gate, f32x16 up, const ExpertFfn& args) {
  if (args.activation == kSilu) return silu(gate) * up;
  const f32x16 limit(args.limit);
  gate = min(limit, gate);  // in this order of operands NaN passes
  up = min(limit, max(f32x16(-args.limit), up));
  return gate * sigmoid(f32x16(args.alpha) * gate) * (up + f32x16(1.0f));
}

inline f32x16 bias_of(const bf16* bias, int64_t column, int64_t width) {
  return f32x16::load(bias + column, static_cast<int>(std::min<int64_t>(kColumns, width - column)));
}

// Where the activation goes as rows of the next product: into its tiles, in bf16.
struct HiddenTiles {
  const Bf16::Panel& panel;
  const Segment& segment;
  int64_t width;  // F

  // Sixteen of them, which begin at `column`.
  void store(int64_t row, int64_t column, f32x16 values) const {
    bf16* to = panel.tile(segment.tile + row / kRows) + column / kDepth * kTile + row % kRows * kDepth +
               column % kDepth;
    values.store(to);
    const bool last_half = column % kDepth == 0 && column + kColumns >= width;  // nobody writes the other one
    if (last_half) f32x16::zero().store(to + kColumns);
  }
};

// The same as plain rows, for products whose tiles are made of whole rows.
struct HiddenRows {
  bf16* rows;  // a row tile of rows for each of the panel, `stride` apart
  int64_t stride;
  const Segment& segment;

  bf16* at(int64_t row) const { return rows + (segment.tile * kRows + row) * stride; }
  void store(int64_t row, int64_t column, f32x16 values) const { values.store(at(row) + column); }
};

// Writes the activation of gate (first column tile of each pair) and up (second).
template <class Hidden>
struct StoreHidden {
  const ExpertFfn& args;
  const Segment& segment;
  const Hidden hidden;

  void operator()(const Results& results) const {
    for (int tile = 0; tile < results.column_tiles; tile += 2) store_pair(results, tile);
  }

  void store_pair(const Results& results, int tile) const {
    const int64_t width = args.w2.columns, column = (results.column_tile + tile) / 2 * kColumns;
    f32x16 gate_bias, up_bias;
    if (args.b13) {
      const bf16* bias = args.b13 + segment.slot * 2 * width;
      gate_bias = bias_of(bias, column, width);
      up_bias = bias_of(bias + width, column, width);
    }
    for (int r = 0; r < results.rows; ++r) {
      f32x16 gate = results.load(r, tile), up = results.load(r, tile + 1);
      if (args.b13) gate = gate + gate_bias, up = up + up_bias;
      hidden.store(results.row + r, column, activate(gate, up, args));
    }
  }
};

// Writes rows of outputs.
struct StoreRows {
  const ExpertFfn& args;
  const Segment& segment;

  void operator()(const Results& results) const {
    const int64_t width = args.w2.rows;
    for (int tile = 0; tile < results.column_tiles; ++tile) {
      const int64_t column = (results.column_tile + tile) * kColumns;
      const int count = static_cast<int>(std::min<int64_t>(kColumns, width - column));
      f32x16 bias;
      if (args.b2) bias = bias_of(args.b2 + segment.slot * width, column, width);
      bf16* to = args.out + (segment.row + results.row) * width + column;
      for (int r = 0; r < results.rows; ++r, to += width) {
        f32x16 sum = results.load(r, tile);
        if (args.b2) sum = sum + bias;
        if (count == kColumns) sum.store(to);
        else sum.store(to, count);
      }
    }
  }
};

// Run task(segment, first column tile, last) for all pairs of a segment and a block of columns.
template <class Task>
void each_block(Team& team, const std::vector<Segment>& segments, int64_t columns, int64_t block, Task&& task) {
  const int64_t blocks = whole(columns, block);
  team.each(static_cast<int64_t>(segments.size()) * blocks, [&](int64_t i) {
    const int64_t first = i % blocks * block;
    task(segments[i / blocks], first, std::min(columns, first + block));
  });
}

// Down: of w2; its rows are prepared as those of Format are.
template <class Format, class Down = Format>
void expert_ffn_in(Team& team, const ExpertFfn& args) {
  const int64_t width = args.w13.columns, ffn_width = args.w2.columns;
  const int64_t columns13 = column_tiles(args.w13.rows, true), columns2 = column_tiles(args.w2.rows, false);
  const int64_t row_tiles = whole(args.rows, kRows) + std::min(args.slots, args.rows);
  int64_t most = 0, used = 0;
  for (int64_t slot = 0; slot < args.slots; ++slot) {
    most = std::max(most, rows_of(args, slot));
    used += rows_of(args, slot) > 0;
  }
  const Cut cut13 = cut<Format>(most, columns13, width, used, team.size());
  const Cut cut2 = cut<Down>(most, columns2, ffn_width, used, team.size());
  const auto& segments = segments_of(args, std::min(cut13.rows, cut2.rows));

  char* memory = static_cast<char*>(args.scratch);
  const auto panel = Format::panel(memory, row_tiles, args.w13);
  const auto hidden = Down::panel(memory + panel_bytes(row_tiles, width), row_tiles, args.w2);
  // Run task(segment, first of up to sixteen rows in it, how many) for all rows.
  const auto each_row_tile = [&](auto&& task) {
    team.each(static_cast<int64_t>(segments.size()), [&](int64_t i) {
      for (int64_t row = 0; row < segments[i].rows; row += kRows)
        task(segments[i], row, static_cast<int>(std::min<int64_t>(kRows, segments[i].rows - row)));
    });
  };
  const auto row_at = [&](int64_t sorted) {
    return args.x + (args.row_tokens ? args.row_tokens[sorted] : sorted) * args.x_stride;
  };
  bool is_prepared = false;
  if constexpr (Format::kTakesRowsWhole) {
    // A token goes to several slots: its row is prepared once and copied. Few rows are not worth meeting once more.
    if (args.row_tokens && segments.size() > 1 && args.rows > kFewRows) {
      const auto& first = first_rows(args, segments, row_tiles);
      const auto each_row = [&](auto&& task) {
        each_row_tile([&](const Segment& segment, int64_t row, int rows) {
          for (int64_t r = row; r < row + rows; ++r) task(segment.tile * kRows + r, segment.row + r);
        });
      };
      each_row([&](int64_t place, int64_t sorted) {
        if (first[place] == place) Format::prepare_row(panel, place, width, row_at(sorted));
      });
      each_row([&](int64_t place, int64_t) {
        if (first[place] != place) Format::copy_row(panel, place, first[place]);
      });
      is_prepared = true;
    }
  }
  if (!is_prepared)
    each_row_tile([&](const Segment& segment, int64_t row, int rows) {
      Format::prepare(panel, segment.tile + row / kRows, rows, width,
                      [&](int r) { return row_at(segment.row + row + r); });
    });
  const auto multiply13 = [&](auto&& hidden_of) {
    each_block(team, segments, columns13, cut13.columns, [&](const Segment& segment, int64_t first, int64_t last) {
      using Hidden = decltype(hidden_of(segment));
      multiply_block<Format>(panel, segment.tile, segment.rows, Format::weights(args.w13, segment.slot, columns13),
                             first, last, StoreHidden<Hidden>{args, segment, hidden_of(segment)});
    });
  };
  if constexpr (Format::kTakesRowsWhole) {
    auto* rows_memory = reinterpret_cast<bf16*>(memory + panel_bytes(row_tiles, width) +
                                                panel_bytes(row_tiles, ffn_width));
    const auto hidden_of = [&](const Segment& segment) {
      return HiddenRows{rows_memory, whole(ffn_width, kColumns) * kColumns, segment};
    };
    multiply13(hidden_of);
    each_row_tile([&](const Segment& segment, int64_t row, int rows) {
      const HiddenRows from = hidden_of(segment);
      Down::prepare(hidden, segment.tile + row / kRows, rows, ffn_width, [&](int r) { return from.at(row + r); });
    });
  } else {
    multiply13([&](const Segment& segment) { return HiddenTiles{hidden, segment, ffn_width}; });
  }
  each_block(team, segments, columns2, cut2.columns, [&](const Segment& segment, int64_t first, int64_t last) {
    multiply_block<Down>(hidden, segment.tile, segment.rows, Down::weights(args.w2, segment.slot, columns2), first, last,
                         StoreRows{args, segment});
  });
}

// Columns [first, first + count) of one token.
inline void combine_block(const Combine& args, int64_t token, int64_t column, int count) {
  f32x16 sum = f32x16::zero();
  for (int k = 0; k < args.top_k; ++k) {
    const int64_t row = args.row_of[token * args.top_k + k];
    if (row < 0) continue;
    sum = sum + f32x16::load(args.rows + row * args.width + column, count) *
                    f32x16(args.weights[token * args.top_k + k]);
  }
  const int64_t at = token * args.width + column;
  if (args.shared) sum = sum.rounded() + f32x16::load(args.shared + at, count);
  if (args.residual) sum = f32x16::load(args.residual + at, count) + sum.rounded();
  sum.store(args.out + at, count);
}

}  // namespace

int64_t expert_ffn_scratch(int64_t rows, int64_t slots, int64_t width, int64_t ffn_width) {
  const int64_t row_tiles = whole(rows, kRows) + std::min(slots, rows);
  const int64_t hidden_rows = row_tiles * kRows * whole(ffn_width, kColumns) * kColumns * sizeof(bf16);
  return panel_bytes(row_tiles, width) + panel_bytes(row_tiles, ffn_width) + hidden_rows;
}

void expert_ffn(Team& team, const ExpertFfn& args) {
  if (args.w13.format == kFormatInt4 && args.w2.format == kFormatInt8) return expert_ffn_in<Int4, Int8>(team, args);
  in_format(args.w13.format, [&](auto format) { expert_ffn_in<decltype(format)>(team, args); });
}

void combine(Team& team, const Combine& args) {
  // A few tasks a thread; of few tokens each is cut into columns too.
  constexpr int64_t kTaskColumns = 512;
  const int64_t blocks = whole(args.width, kTaskColumns);
  const int64_t together = std::max<int64_t>(1, args.tokens * blocks / (8 * team.size()));
  const int64_t parts = args.tokens * blocks;
  team.each(whole(parts, together), [&](int64_t task) {
    for (int64_t part = task * together; part < std::min(parts, (task + 1) * together); ++part) {
      const int64_t first = part % blocks * kTaskColumns, last = std::min(args.width, first + kTaskColumns);
      for (int64_t column = first; column < last; column += kColumns)
        combine_block(args, part / blocks, column, static_cast<int>(std::min<int64_t>(kColumns, last - column)));
    }
  });
}

}  // namespace moewe

namespace {

moewe::ExpertFfn with_scratch(const moewe::ExpertFfn& args) {
  moewe::ExpertFfn own = args;
  const int64_t bytes = moewe::expert_ffn_scratch(own.rows, own.slots, own.w13.columns, own.w2.columns);
  own.scratch = moewe::call_scratch().take(bytes);
  return own;
}

}  // namespace

extern "C" {

void moewe_expert_ffn(const moewe::ExpertFfn* args) {
  const moewe::ExpertFfn own = with_scratch(*args);
  moewe::on_team([&own](moewe::Team& team) { moewe::expert_ffn(team, own); });
}

void moewe_combine(const moewe::Combine* args) {
  moewe::on_team([args](moewe::Team& team) { moewe::combine(team, *args); });
}

void moewe_expert_ffn_combine(const moewe::ExpertFfn* ffn, const moewe::Combine* combine) {
  const moewe::ExpertFfn own = with_scratch(*ffn);
  moewe::on_team([&own, combine](moewe::Team& team) {
    moewe::expert_ffn(team, own);
    moewe::combine(team, *combine);
  });
}

}
