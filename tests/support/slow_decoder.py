"""What `Decoder` must compute, for one sequence: no cache, no chunks, no exchange, heads of latents expanded, in fp64.

Not the product's code and not transformers (which has no model with every switch): tests hold `Decoder` against it over
drawn configs. Loops over rows and heads where they are clearer.
Shapes: T tokens, D width, H query heads, Dh head width; logits [T, V] f64.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from moewe.models.config import ModelConfig, RotaryConfig
from moewe.models.rotary import frequencies
from moewe.models.weights import DenseFFN, LayerWeights, ModelWeights, MoEWeights
from moewe.moe.activation import SILU, Activation
from moewe.moe.routing.reference import route_reference


def slow_logits(config: ModelConfig, weights: ModelWeights, tokens: list[int], *, long: bool = False) -> torch.Tensor:
    """Return the logits after each token; `long`: the sequence may outgrow the rotary embedding's original length."""
    x = weights.embedding.double()[tokens] * config.embedding_multiplier
    for number, layer in enumerate(weights.layers):
        attention = partial(attend, config, layer, number, long=long)
        x = block(config, x, layer.input_norm, layer.input_norm_bias, attention)
        x = block(config, x, layer.post_attention_norm, layer.post_attention_norm_bias, partial(feed, config, layer))
    x = norm(config, x, weights.final_norm, weights.final_norm_bias)
    logits = project(x, weights.head, weights.head_bias) * config.logits_multiplier
    return cap(logits, config.logits_cap)


def project(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = x @ matrix.double().T
    return out if bias is None else out + bias.double()


def cap(values: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(values / limit) if limit else values


def rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    out = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return out if weight is None else out * weight.double()


def norm(config: ModelConfig, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if config.norm == "rms":
        return rms(x, weight, config.norm_eps)
    centred = x - x.mean(-1, keepdim=True)
    return rms(centred, weight, config.norm_eps) + bias.double()


def block(config, x, weight, bias, inner) -> torch.Tensor:
    if config.norm_after:
        added = norm(config, inner(x), weight, bias)
    else:
        added = inner(norm(config, x, weight, bias))
    return x + added * config.residual_multiplier


def rotate(config: RotaryConfig, heads: torch.Tensor, long: bool) -> torch.Tensor:
    """Turn each pair of [T, H, Dh] by position times frequency, pair by pair."""
    scaling = config.scaling
    amplitude = 1.0 if scaling is None else scaling.amplitude
    if scaling is not None and scaling.kind == "longrope" and long:
        amplitude = scaling.long_amplitude
    out, half = heads.clone(), config.rotary_dim // 2
    for pair, frequency in enumerate(frequencies(config, long=long).double().tolist()):
        a, b = (2 * pair, 2 * pair + 1) if config.interleaved else (pair, pair + half)
        for position in range(len(heads)):
            cos, sin = amplitude * math.cos(position * frequency), amplitude * math.sin(position * frequency)
            first, second = heads[position, :, a], heads[position, :, b]
            out[position, :, a], out[position, :, b] = first * cos - second * sin, second * cos + first * sin
    return out


def visible(config: ModelConfig, layer: int, row: int) -> range:
    rule = config.attention_of(layer)
    if rule.window:
        return range(max(0, row - rule.window + 1), row + 1)
    return range(row // rule.chunk * rule.chunk if rule.chunk else 0, row + 1)


def attend(config: ModelConfig, weights: LayerWeights, layer: int, x: torch.Tensor, *, long: bool) -> torch.Tensor:
    if config.latent is None:
        q, k, v = heads(config, weights, layer, x, long)
    else:
        q, k, v = heads_of_latent(config, weights, x, long)
    out = torch.zeros(len(x), config.num_heads, v.shape[-1], dtype=torch.float64)
    for row in range(len(x)):
        seen = list(visible(config, layer, row))
        for head in range(config.num_heads):
            of = head // (config.num_heads // k.shape[1])
            scores = cap(k[seen, of] @ q[row, head] * config.attention_scale, config.score_cap)
            sink = weights.sinks.double()[head : head + 1] if weights.sinks is not None else scores[:0]
            shares = torch.softmax(torch.cat([scores, sink]), 0)[: len(seen)]
            out[row, head] = shares @ v[seen, of]
    return project(out.flatten(1), weights.o, weights.o_bias)


def heads(config, weights, layer, x, long):
    num_q, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = project(x, weights.qkv, weights.qkv_bias)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split([num_q * dim, num_kv * dim, num_kv * dim], -1))
    rotary = config.attention_of(layer).rotary

    def normed(part: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if config.qk_norm == "full":
            return rms(part.flatten(1), weight, config.norm_eps).view_as(part)
        if config.qk_norm == "head" or (config.qk_norm == "unit" and rotary):
            return rms(part, weight, config.norm_eps)
        return part

    if not config.qk_norm_after_rotary:
        q, k = normed(q, weights.q_norm), normed(k, weights.k_norm)
    if rotary:
        q, k = rotate(config.rotary, q, long), rotate(config.rotary, k, long)
    if config.qk_norm_after_rotary:
        q, k = normed(q, weights.q_norm), normed(k, weights.k_norm)
    if config.query_temperature is not None and not rotary:
        grow = config.query_temperature
        for position in range(len(x)):
            q[position] *= 1 + grow.scale * math.log(1 + math.floor((position + 1) / grow.floor_scale))
    return q, k, v


def heads_of_latent(config, weights, x, long):
    """Expand K and V of all heads, as latent attention is defined."""
    shape, w = config.latent, weights.latent
    if w.q is not None:
        q = project(x, w.q)
    else:
        q = project(rms(project(x, w.q_a, w.q_a_bias), w.q_a_norm, shape.norm_eps), w.q_b)
    q_nope, q_rope = q.unflatten(-1, (config.num_heads, -1)).split([shape.nope_dim, shape.rope_dim], -1)
    latent, k_rope = project(x, w.kv_a, w.kv_a_bias).split([shape.kv_rank, shape.rope_dim], -1)
    latent = rms(latent, w.kv_a_norm, shape.norm_eps)
    k_nope = torch.einsum("tc,hdc->thd", latent, w.kv_b_k.double())
    v = torch.einsum("tc,hdc->thd", latent, w.kv_b_v.double())
    q_rope, k_rope = rotate(config.rotary, q_rope, long), rotate(config.rotary, k_rope[:, None], long)
    k = torch.cat([k_nope, k_rope.expand(-1, config.num_heads, -1)], -1)
    return torch.cat([q_nope, q_rope], -1), k, v


def feed(config: ModelConfig, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    if weights.moe is None:
        return ffn(x, weights.dense, SILU)
    return mix(config, weights.moe, x)


def ffn(x: torch.Tensor, weights: DenseFFN, activation: Activation) -> torch.Tensor:
    gate, up = project(x, weights.w13, weights.b13).chunk(2, -1)
    if activation.kind == "silu":
        hidden = gate * torch.sigmoid(gate) * up
    else:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        hidden = gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    return project(hidden, weights.w2, weights.b2)


def mix(config: ModelConfig, weights: MoEWeights, x: torch.Tensor) -> torch.Tensor:
    moe, out = config.moe, torch.zeros_like(x)
    routing = route_reference(project(x, weights.router, weights.router_bias), moe.routing, weights.selection_bias)
    for token, (ids, shares) in enumerate(zip(routing.topk_ids.tolist(), routing.topk_weights.double().tolist())):
        for expert, share in zip(ids, shares):
            parts = {k: None if t is None else t[expert] for k, t in vars(weights.experts).items() if k[0] in "wb"}
            row = x[token : token + 1]
            if moe.weigh_input:
                out[token] += ffn(row * share, DenseFFN(**parts), moe.activation)[0]
            else:
                out[token] += share * ffn(row, DenseFFN(**parts), moe.activation)[0]
    if weights.shared is not None:
        shared = ffn(x, weights.shared, SILU)
        out += shared if weights.shared_gate is None else shared * torch.sigmoid(project(x, weights.shared_gate))
    return out
