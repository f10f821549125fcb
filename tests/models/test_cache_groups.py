"""Cache groups of a model: which layers share one, and what a token of each is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moewe.models.config import ConfigError, LatentConfig, LayerAttention, ModelConfig
from moewe.models.footprint import cache_groups
from tests.support.random_models import plain_config

PLAIN = plain_config(num_layers=4, head_dim=16)


def names_and_layers(config: ModelConfig) -> list[tuple[str, str, int, tuple[int, ...]]]:
    return [(g.name, g.kind, g.window, g.layers) for g in cache_groups(config, dtype="bfloat16")]


def test_layers_that_see_everything_share_one_group() -> None:
    (group,) = cache_groups(PLAIN, dtype="bfloat16")
    assert (group.name, group.kind, group.window, group.layers) == ("full", "full", 0, (0, 1, 2, 3))
    assert group.bytes_per_token() == 4 * 2 * 2 * 16 * 2


def test_layers_with_equal_windows_share_a_group_in_order_of_first_layers() -> None:
    windows = (8, 0, 8, 32)
    config = replace(PLAIN, layer_attention=tuple(LayerAttention(window=window) for window in windows))
    assert names_and_layers(config) == [
        ("window8", "window", 8, (0, 2)),
        ("full", "full", 0, (1,)),
        ("window32", "window", 32, (3,)),
    ]


def test_chunks_are_a_kind_of_their_own_and_rotary_is_none() -> None:
    layers = (LayerAttention(chunk=16), LayerAttention(window=16), LayerAttention(rotary=False), LayerAttention())
    assert names_and_layers(replace(PLAIN, layer_attention=layers)) == [
        ("chunk16", "chunk", 16, (0,)),
        ("window16", "window", 16, (1,)),
        ("full", "full", 0, (2, 3)),
    ]


def test_a_latent_model_holds_one_row_a_token() -> None:
    latent = LatentConfig(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=96)
    (group,) = cache_groups(replace(PLAIN, latent=latent, head_dim=192), dtype="bfloat16")
    assert (group.name, group.kind, group.num_kv_heads) == ("latent", "latent", 1)
    assert (group.head_dim, group.value_dim) == (576, 512)
    assert group.bytes_per_token() == 4 * 576 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"latent": LatentConfig(kv_rank=8, rope_dim=4, nope_dim=4, value_dim=4),
             "layer_attention": (LayerAttention(), *[LayerAttention(window=4)] * 3)},
            "layer 1 has a window over latent KV",
        ),
        ({"layer_attention": (LayerAttention(window=4, chunk=8),) * 4}, "layer 0 has a window of 4 and chunks of 8"),
    ],
)  # fmt: skip
def test_what_no_group_can_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_groups(replace(PLAIN, **changes), dtype="bfloat16")
