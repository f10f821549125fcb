"""Which layers are MoE and which see a window or a chunk, against the lists that transformers makes."""

import pytest

from moewe.models.families import load_config
from tests.support.configs import DELETE, edited_config, reference_config, refusal, saved_config

SLIDING, FULL = "sliding_attention", "full_attention"


def test_sparse_step_and_dense_list_choose_layers():  # P-LOAD-08
    folder = saved_config("T-QW2", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    config = load_config(folder)
    assert config.moe_layers == (1, 5) and config.dense_width == 96
    assert [config.is_moe(layer) for layer in range(6)] == [False, True, False, False, False, True]


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"moe_layer_start_index": 0}, (0, 1, 2, 3, 4, 5)),
        ({"moe_layer_start_index": 2}, (2, 3, 4, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3}, (1, 2, 3)),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 2}, (1, 3, 5)),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 4, "moe_layer_interval": 3}, (2,)),
        ({"moe_layer_start_index": 6}, ()),
    ],
)
def test_interval_between_two_layers(fields, layers):
    assert load_config(saved_config("T-ERN", num_hidden_layers=6, **fields)).moe_layers == layers


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"interleave_moe_layer_step": 1}, (0, 1, 2, 3)),
        ({"interleave_moe_layer_step": 3}, (2,)),
        ({"moe_layers": [3, 0]}, (0, 3)),
        ({"moe_layers": []}, ()),
    ],
)
def test_layers_of_llama4(fields, layers):
    assert load_config(saved_config("T-LL4", **fields)).moe_layers == layers
    assert sorted(reference_config("T-LL4", **fields).moe_layers) == list(layers)


# -- windows ---------------------------------------------------------------------------------------------------------

BY_LISTS = [
    ("T-Q2D", {"use_sliding_window": True, "max_window_layers": 1}),
    ("T-Q2D", {"use_sliding_window": True, "max_window_layers": 0}),
    ("T-Q2D", {"use_sliding_window": True}),
    ("T-Q2D", {"max_window_layers": 0}),
    ("T-Q2D", {"use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL, SLIDING]}),
    ("T-QWD", {"use_sliding_window": True, "max_window_layers": 3}),
    ("T-QW2", {"use_sliding_window": True, "max_window_layers": 3}),
    ("T-QW2", {"use_sliding_window": True, "layer_types": [FULL, SLIDING, FULL, FULL]}),
    ("T-QW2", {}),
    ("T-DOT", {"max_window_layers": 2}),
    ("T-DOT", {"sliding_window": None, "max_window_layers": 0}),
    ("T-GOS", {"layer_types": [FULL, SLIDING, SLIDING, FULL]}),
    ("T-GOS", {"layer_types": None}),
]


@pytest.mark.parametrize(("name", "fields"), BY_LISTS, ids=str)
@pytest.mark.parametrize("listed", [True, False])
def test_windows_are_those_of_transformers(name, fields, listed):
    fields = {"num_hidden_layers": 4, "sliding_window": 8} | fields
    reference = reference_config(name, **fields)
    folder = saved_config(name, **fields)
    if not listed and fields.get("layer_types") is None:  # as transformers 4 wrote it
        changes = {"layer_types": DELETE, "sliding_window": fields["sliding_window"]}
        folder = edited_config(name, **fields | changes)
    windows = [load_config(folder).attention_of(layer).window for layer in range(4)]
    assert windows == [8 if kind == SLIDING else 0 for kind in reference.layer_types]


@pytest.mark.parametrize(
    ("name", "fields", "window"),
    [
        ("T-MIS", {"sliding_window": 8}, 8),
        ("T-MIS", {"sliding_window": None}, 0),
        ("T-MIS", {"sliding_window": DELETE, "max_position_embeddings": 8192}, 4096),
        ("T-MIX", {"sliding_window": 8}, 8),
        ("T-MIX", {"sliding_window": DELETE}, 0),
        ("T-PHI", {"sliding_window": 100}, 100),
        ("T-PHI", {"sliding_window": 1280}, 0),  # as long as the longest sequence
        ("T-QW3", {"sliding_window": 8}, 0),
        ("T-QW3", {"sliding_window": 8, "use_sliding_window": True}, 8),
        ("T-QW3", {"sliding_window": None, "use_sliding_window": True}, 0),
        ("T-QW3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": [SLIDING] * 2}, 8),
        ("T-LLA", {"layer_types": [FULL, FULL]}, 0),
        ("T-LLA", {"sliding_window": 8, "use_sliding_window": False}, 0),
    ],
)
def test_windows_of_all_layers(name, fields, window):
    config = load_config(edited_config(name, **fields))
    assert {config.attention_of(layer).window for layer in range(config.num_layers)} == {window}
    assert (config.layer_attention == ()) == (window == 0)


def test_chunks_and_layers_without_rotary():
    def kinds(**fields):
        config = load_config(saved_config("T-LL4", **fields))
        read = [(a.chunk, a.rotary) for a in map(config.attention_of, range(4))]
        reference = reference_config("T-LL4", **fields)
        assert [rotary for _, rotary in read] == [bool(mark) for mark in reference.no_rope_layers[:4]]
        assert [chunk > 0 for chunk, _ in read] == [kind == "chunked_attention" for kind in reference.layer_types]
        return read

    assert kinds() == [(16, True)] * 3 + [(0, False)]
    assert kinds(no_rope_layer_interval=2) == [(16, True), (0, False)] * 2
    assert kinds(no_rope_layers=[0, 1, 1, 1]) == [(0, False)] + [(16, True)] * 3
    assert kinds(attention_chunk_size=None) == [(0, True)] * 3 + [(0, False)]
    assert kinds(layer_types=["chunked_attention"] * 3 + [FULL], no_rope_layers=[1, 0, 1, 1])[1] == (16, False)
    long = load_config(saved_config("T-LL4", attention_chunk_size=4096))
    assert [layer.chunk for layer in long.layer_attention] == [0] * 4


REFUSED = {
    "step of zero": ("T-QW3", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "dense layers as a string": ("T-QW3", {"mlp_only_layers": "1"}, "mlp_only_layers"),
    "interval of zero": ("T-ERN", {"moe_layer_interval": 0}, "moe_layer_interval"),
    "start as a list": ("T-ERN", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index"),
    "layer beyond the last": ("T-LL4", {"moe_layers": [1, 4]}, "moe_layers"),
    "window of zero": ("T-MIS", {"sliding_window": 0}, "sliding_window = 0"),
    "window as a string": ("T-MIX", {"sliding_window": "8"}, "sliding_window"),
    "window in a family without": ("T-LLA", {"sliding_window": 8}, "sliding_window = 8 asks for windows"),
    "window switched on in a family without": ("T-LLA", {"use_sliding_window": True}, "use_sliding_window"),
    "switch as a number": ("T-QWD", {"use_sliding_window": 1}, "use_sliding_window"),
    "list of a family without": ("T-LLA", {"layer_types": [FULL, SLIDING]}, "layer_types"),
    "list against the rule": ("T-MIS", {"layer_types": [FULL, SLIDING, SLIDING]}, "layer_types"),
    "list without a window": ("T-QWD", {"layer_types": [FULL, SLIDING]}, "set sliding_window"),
    "list too short": ("T-GOS", {"layer_types": [FULL]}, "list of 4 words"),
    "list of numbers": ("T-GOS", {"layer_types": [1, 2, 3, 4]}, "layer_types = 1"),
    "list of lists": ("T-GOS", {"layer_types": [[FULL]] * 4}, "layer_types"),
    "unknown kind": ("T-GOS", {"layer_types": [FULL] * 3 + ["linear_attention"]}, "'linear_attention'"),
    "chunks without length": ("T-LL4", {"attention_chunk_size": None}, "set attention_chunk_size"),
    "chunks of zero": ("T-LL4", {"attention_chunk_size": 0}, "attention_chunk_size"),
    "too few marks": ("T-LL4", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
    "marks of two": ("T-LL4", {"no_rope_layers": [2] * 4}, "no_rope_layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_by_name(case):
    fixture, changes, expected = REFUSED[case]
    assert expected in refusal(edited_config(fixture, **changes))
