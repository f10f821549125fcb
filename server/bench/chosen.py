"""From the values of flags to samples, goals and places to write; the same for all load tools.

Not the table of flags (server/cli/tools.py). Units: as the flags say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...text import Tokenizer, load_tokenizer
from .datasets import RANDOM, SHAREGPT, TRACE, Prompts, Sample, random_samples, sharegpt_samples, trace_samples
from .plot import check_format, require
from .report import check_writable

DATASETS = (RANDOM, SHAREGPT, TRACE)
DEFAULT_NUM_PROMPTS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1000, 1024, 128
# Flags of one data set that say nothing with another.
_OF_DATASET = {
    RANDOM: ("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len"),
    SHAREGPT: ("sharegpt_output_len", "dataset_path"),
    TRACE: ("trace_speed", "trace_block_size", "dataset_path"),
}


def dataset_name(tool: Mapping[str, Any]) -> str:
    """Return the data set that is asked for.

    Raises:
        ValueError: there is none of that name, it lacks its file, or a flag of another one is given.
    """
    name = tool.get("dataset_name", RANDOM)
    if name not in DATASETS:
        raise ValueError(f"--dataset-name {name!r} is not known; use {', '.join(DATASETS)}")
    own = _OF_DATASET[name]
    for flags in _OF_DATASET.values():
        for flag in flags:
            if flag in tool and flag not in own:
                raise ValueError(f"--{flag.replace('_', '-')} says nothing about --dataset-name {name}; leave it out")
    if name != RANDOM and "dataset_path" not in tool:
        raise ValueError(f"--dataset-name {name} needs the file; give --dataset-path")
    return str(name)


def chosen_samples(tool: Mapping[str, Any], prompts: Prompts) -> list[Sample]:
    """Return the samples that are asked for."""
    name = dataset_name(tool)
    number = tool.get("num_prompts", None if name == TRACE else DEFAULT_NUM_PROMPTS)
    if number is not None and number < 1:
        raise ValueError(f"--num-prompts {number} is not allowed; use at least 1")
    if name == RANDOM:
        lengths = tool.get("random_input_len", DEFAULT_INPUT_LEN), tool.get("random_output_len", DEFAULT_OUTPUT_LEN)
        ratio, prefix = tool.get("random_range_ratio", 0.0), tool.get("random_prefix_len", 0)
        return random_samples(prompts, number, lengths, range_ratio=ratio, prefix_len=prefix)
    path = Path(tool["dataset_path"]).expanduser()
    if name == SHAREGPT:
        return sharegpt_samples(prompts, path, number, output_len=tool.get("sharegpt_output_len"))
    speed, block_size = tool.get("trace_speed", 1.0), tool.get("trace_block_size", 512)
    return trace_samples(prompts, path, number, speed=speed, block_size=block_size)


def chosen_tokenizer(tool: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer that is named, None when none is."""
    name = tool.get("tokenizer")
    if name is None:
        return None
    from ...models.source import resolve_model

    return load_tokenizer(resolve_model(name, what="tokenizer"))


def chosen_files(tool: Mapping[str, Any]) -> tuple[Path | None, Path | None]:
    """Return where the record and the picture go, once it is sure that they can.

    Raises:
        ValueError: a folder that is not there, or the picture's package that is not installed.
    """
    output = Path(tool["output_json"]).expanduser() if "output_json" in tool else None
    picture = Path(tool["plot"]).expanduser() if "plot" in tool else None
    if output is not None:
        check_writable(output, "--output-json")
    if picture is not None:
        check_format(picture)
        require("matplotlib", "--plot")
        check_writable(picture, "--plot")
    return output, picture
