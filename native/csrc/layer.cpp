#include "layer.h"

#include <algorithm>

#include "clock.h"
#include "scratch.h"

namespace moewe {

namespace {

// One for the whole team: what one member finds out, all need.
struct Shared {
  ShmDispatch dispatch{};
  void* scratch = nullptr;
};

void tick(Team& team, const Step& step) {
  if (team.rank() == 0 && step.progress) __atomic_fetch_add(step.progress, 1, __ATOMIC_RELAXED);
}

// `marks` of the layer, or null where nobody asks.
void mark(Team& team, int64_t* marks, Mark part) {
  if (marks && team.rank() == 0) marks[part] = now_ns();
}

// The meeting that has just been: what came before it ended where it began.
void mark_meeting(Team& team, int64_t* marks, const ShmGroup& group, Mark before, Mark meeting) {
  if (!marks || team.rank() != 0) return;
  if (before != kMarks) marks[before] = group.wait_began;
  marks[meeting] = group.wait_ended;
}

// The residual stream, with what a block added, through a norm.
void norm_rows(Team& team, const Norm& fixed, const Step& step, const bf16* added, bf16* out) {
  Norm args = fixed;
  args.x = step.x;
  args.added = added;
  args.out = out;
  args.rows = step.rows;
  norm(team, args);
}

void run_linear(Team& team, const Linear& fixed, const Step& step, const bf16* x, bf16* out, void* scratch) {
  Linear args = fixed;
  args.x = x;
  args.out = out;
  args.rows = step.rows;
  args.scratch = scratch;
  linear(team, args);
}

// Queries of all heads, and K and V of each row where they are kept.
void make_heads(Team& team, const Layer& layer, const Step& step, const AttentionStep& batch, const bf16* x,
                void* scratch) {
  run_linear(team, layer.qkv, step, x, step.qkv, scratch);
  QkvEpilogue heads = layer.heads;
  heads.qkv = step.qkv;
  heads.q = step.q;
  heads.slots = batch.slots;
  heads.rows = step.rows;
  heads.cos = heads.rotary_dim ? step.cos : nullptr;
  heads.sin = heads.rotary_dim ? step.sin : nullptr;
  heads.temperature = layer.uses_temperature ? step.temperature : nullptr;
  qkv_epilogue(team, heads);
}

void run_heads(Team& team, const HeadLinear& fixed, const Step& step, const bf16* x, bf16* out) {
  HeadLinear args = fixed;
  args.x = x;
  args.out = out;
  args.rows = step.rows;
  head_linear(team, args);
}

// The same of latent attention, whose queries see one head that all of them share.
void make_latents(Team& team, const Latent& latent, const Step& step, const AttentionStep& batch, const bf16* x,
                  void* scratch) {
  run_linear(team, latent.kv, step, x, step.kv, scratch);
  if (latent.q_down.weight.rows) {
    run_linear(team, latent.q_down, step, x, step.q_latent, scratch);
    Norm args = latent.q_norm;
    args.x = args.out = step.q_latent;
    args.rows = step.rows;
    norm(team, args);
    x = step.q_latent;
  }
  run_linear(team, latent.q, step, x, step.qkv, scratch);
  LatentRows rows = latent.rows;
  rows.kv = step.kv;
  rows.queries = step.qkv;
  rows.q = step.q;
  rows.slots = batch.slots;
  rows.cos = step.cos;
  rows.sin = step.sin;
  rows.rows = step.rows;
  latent_rows(team, rows);
  run_heads(team, latent.to_latent, step, step.qkv, step.q);
}

void attention_half(Team& team, const Layer& layer, const Step& step, bool has_added, void* scratch) {
  const bf16* x = step.x;
  if (!layer.norm_after) {
    norm_rows(team, layer.input_norm, step, has_added ? step.added : nullptr, step.normed);
    x = step.normed;
  }
  const AttentionStep& batch = step.attention[layer.attention_group];
  if (layer.is_latent) make_latents(team, layer.latent, step, batch, x, scratch);
  else make_heads(team, layer, step, batch, x, scratch);
  Attention args = layer.attention;
  args.q = step.q;
  args.out = step.attended;
  args.step = &batch;
  attention(team, args);
  const bf16* values = step.attended;
  if (layer.is_latent) {
    run_heads(team, layer.latent.to_values, step, step.attended, step.values);
    values = step.values;
  }
  run_linear(team, layer.o, step, values, step.added, scratch);
  if (layer.norm_after) norm_rows(team, layer.input_norm, step, step.added, nullptr);
  else norm_rows(team, layer.ffn_norm, step, step.added, step.normed);
}

// rows[t] *= sigmoid(x[t] . gate), each step rounded as models do.
void gate_rows(Team& team, const bf16* x, const bf16* gate, int64_t rows, int64_t width, bf16* values) {
  team.each(rows, [&](int64_t t) {
    f32x16 sums[2] = {f32x16::zero(), f32x16::zero()};
    for (int64_t i = 0; i < width; i += 16) {
      const int here = static_cast<int>(std::min<int64_t>(16, width - i));
      f32x16& sum = sums[i / 16 % 2];
      sum = fma(f32x16::load(x + t * width + i, here), f32x16::load(gate + i, here), sum);
    }
    const f32x16 score(to_float(to_bf16(sum(sums[0] + sums[1]))));
    const f32x16 factor = sigmoid(score).rounded();
    for (int64_t i = 0; i < width; i += 16) {
      const int here = static_cast<int>(std::min<int64_t>(16, width - i));
      (f32x16::load(values + t * width + i, here) * factor).store(values + t * width + i, here);
    }
  });
}

// All rows through the FFN that has no slots, to `out`.
void run_shared(Team& team, const Layer& layer, const Step& step, const bf16* x, bf16* out, void* scratch) {
  ExpertFfn args = layer.shared;
  args.x = x;
  args.x_stride = args.w13.columns;
  args.row_tokens = nullptr;
  args.tokens_per_slot = &step.rows;
  args.rows = step.rows;
  args.out = out;
  args.scratch = scratch;
  expert_ffn(team, args);
  if (layer.shared_gate) gate_rows(team, x, layer.shared_gate, step.rows, args.w2.rows, out);
}

int64_t ffn_scratch(const ExpertFfn& args, int64_t rows) {
  return args.slots ? expert_ffn_scratch(rows, args.slots, args.w2.rows, args.w2.columns) : 0;
}

// Of all but the experts.
int64_t fixed_scratch(const Layer& layer, const Step& step) {
  const auto of_linear = [&](Linear args) {
    args.rows = step.rows;
    return linear_scratch(args);
  };
  const Latent& latent = layer.latent;
  return std::max({int64_t{64}, of_linear(layer.qkv), of_linear(layer.o), of_linear(latent.kv),
                   of_linear(latent.q_down), of_linear(latent.q), ffn_scratch(layer.shared, step.rows)});
}

int64_t scratch_bytes(const Layer& layer, const Step& step) {
  const bool here = layer.route.experts && !step.group;
  return std::max(fixed_scratch(layer, step), here ? ffn_scratch(layer.experts, step.rows * layer.route.top_k) : 0);
}

// False, on all members of the team alike, where the exchange met a fault.
bool ffn_half(Team& team, const Layer& layer, const Step& step, int64_t* tokens_per_slot, Shared& shared,
              int64_t* marks) {
  const bf16* x = layer.norm_after ? step.x : step.normed;
  if (!layer.route.experts) {
    if (step.rows) run_shared(team, layer, step, x, step.added, shared.scratch);
  } else {
    Route routes = layer.route;
    routes.x = x;
    routes.tokens = step.rows;
    routes.logits = step.logits;
    routes.expert_ids = step.expert_ids;
    routes.slot_ids = step.slot_ids;
    routes.row_tokens = step.row_tokens;
    routes.rows = step.rows_of;
    routes.offsets = step.offsets;
    routes.weights = step.weights;
    routes.tokens_per_slot = tokens_per_slot;
    ExpertFfn experts = layer.experts;
    experts.x = x;
    experts.x_stride = experts.w13.columns;
    experts.row_tokens = step.row_tokens;
    experts.tokens_per_slot = tokens_per_slot;
    experts.out = step.expert_rows;
    Combine sums{};
    sums.rows = step.expert_rows;
    ShmGroup* const group = step.group;
    if (group) {
      routes.tokens_per_slot = nullptr;  // the exchange sorts
      route(team, routes);
      mark(team, marks, kRouted);
      ShmDispatch& dispatch = shared.dispatch;
      if (team.rank() == 0) {
        dispatch.group = group;
        dispatch.x = x;
        dispatch.slot_ids = step.slot_ids;
        dispatch.tokens = step.rows;
        dispatch.x_stride = group->row_bytes;
        dispatch.row_tokens = step.group_row_tokens;
        dispatch.tokens_per_slot = tokens_per_slot;
        dispatch.row_of = step.rows_of;
      }
      team.barrier();
      shm_dispatch(team, dispatch);
      if (dispatch.fault.kind != kNoFault) return false;
      mark_meeting(team, marks, *group, kPublished, kAllPublished);
      mark(team, marks, kDispatched);
      // How many rows come is known only now.
      if (team.rank() == 0)
        shared.scratch = call_scratch().take(std::max(
            fixed_scratch(layer, step),
            expert_ffn_scratch(dispatch.num_rows, experts.slots, experts.w2.rows, experts.w2.columns)));
      team.barrier();
      char* const memory = static_cast<char*>(group->memory);
      bf16* const results = reinterpret_cast<bf16*>(memory + group->results_at);
      experts.x = reinterpret_cast<const bf16*>(memory + group->rows_at);
      experts.row_tokens = step.group_row_tokens;
      experts.out = results + group->rank * group->result_capacity * experts.w2.rows;
      experts.rows = dispatch.num_rows;
      sums.rows = results;
    } else {
      route(team, routes);
      mark(team, marks, kRouted);
      experts.rows = step.offsets[layer.route.slots];
    }
    experts.scratch = shared.scratch;
    expert_ffn(team, experts);
    mark(team, marks, kExpertsRan);
    const bool has_shared = layer.shared.slots && step.rows;
    if (has_shared) {
      run_shared(team, layer, step, x, step.shared, shared.scratch);
      mark(team, marks, kSharedRan);
    }
    if (group) {
      shm_meet(team, *group);
      mark_meeting(team, marks, *group, kMarks, kAllComputed);
    }
    sums.row_of = step.rows_of;
    sums.weights = step.weights;
    sums.shared = has_shared ? step.shared : nullptr;
    sums.out = step.added;
    sums.tokens = step.rows;
    sums.width = experts.w2.rows;
    sums.top_k = layer.route.top_k;
    combine(team, sums);
  }
  if (layer.norm_after && step.rows) norm_rows(team, layer.ffn_norm, step, step.added, nullptr);
  if (layer.route.experts || step.rows) mark(team, marks, layer.route.experts ? kCombined : kDense);
  return true;
}

}  // namespace

}  // namespace moewe

extern "C" {

void moewe_layers(const moewe::Layer* const* layers, int64_t count, const moewe::Norm* last, moewe::Step* step) {
  using namespace moewe;
  int64_t bytes = 64;
  for (int64_t i = 0; i < count; ++i) bytes = std::max(bytes, scratch_bytes(*layers[i], *step));
  Shared shared;
  shared.scratch = call_scratch().take(bytes);
  step->bytes_sent = 0;
  step->fault = {};
  on_team([&](Team& team) {
    int64_t* tokens_per_slot = step->tokens_per_slot;
    bool has_added = false;
    for (int64_t i = 0; i < count; ++i) {
      const Layer& layer = *layers[i];
      int64_t* const marks = step->marks ? step->marks + i * kMarks : nullptr;
      if (step->rows) {
        attention_half(team, layer, *step, has_added, shared.scratch);
        mark(team, marks, kAttended);
      }
      tick(team, *step);
      if (!ffn_half(team, layer, *step, tokens_per_slot, shared, marks)) {
        if (team.rank() == 0) step->fault = shared.dispatch.fault;
        return;
      }
      if (layer.route.experts) {
        tokens_per_slot += layer.experts.slots;
        if (step->group && team.rank() == 0) step->bytes_sent += shared.dispatch.bytes_sent;
      }
      tick(team, *step);
      has_added = !layer.norm_after;
    }
    if (step->rows) norm_rows(team, *last, *step, has_added ? step->added : nullptr, step->normed);
  });
}

void moewe_attention_half(const moewe::Layer* layer, moewe::Step* step, int32_t has_added) {
  using namespace moewe;
  void* const scratch = call_scratch().take(scratch_bytes(*layer, *step));
  on_team([&](Team& team) { attention_half(team, *layer, *step, has_added != 0, scratch); });
}
}
