"""What a model asks for where a request leaves sampling open: the defaults in its generation_config.json.

Not the parameters of a request (runtime/params.py), and not end tokens, which are read whatever `--generation-config`
says (models/config_json.py; those of another file are here). The file is untrusted: each wrong value is one line.
Units: as in SamplingParams; token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..models.config_json import MAX_CONFIG_BYTES
from ..models.json_fields import Fields, read_object, show, show_path
from .config import ModelOptions
from .params import SamplingParams

log = logging.getLogger(__name__)

FILE = "generation_config.json"
# `vllm` is what that server calls it.
OFF = ("none", "vllm")
MAX_ENDS, MAX_TOKEN_ID = 256, 2**31 - 1
_FIELDS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
_NEUTRAL = {"min_p": 0, "repetition_penalty": 1}  # asks for nothing, and need not be told
# What holds without random choices too.
_ALWAYS = ("repetition_penalty", "max_tokens")
# Fields that choose among tokens or end a text in ways that this version lacks, with the value that asks for nothing.
_LACKING: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1,), "diversity_penalty": (0,), "penalty_alpha": (0,),
    "typical_p": (1,), "top_h": (), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "exponential_decay_length_penalty": (),
    "num_beams": (1,), "num_return_sequences": (1,), "min_length": (0,), "min_new_tokens": (0,),
    "stop_strings": ([], ""), "bad_words_ids": ([],), "force_words_ids": ([],), "sequence_bias": ({}, []),
    "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "constraints": ([],), "watermarking_config": (), "dola_layers": (), "max_time": (),
}  # fmt: skip


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds where a request leaves a field out.

    Attributes:
        sampling: fields of SamplingParams by name; `max_tokens` only for those who have no default of their own.
        lacking: what the file asks for and this version does not do, `field=value` each.
        end_token_ids: of a file that `--generation-config` names; those of the model's own are in its config.
        source: the file, as it may be shown; empty without one.
        greedy: the file says `do_sample: false`.
    """

    sampling: dict[str, Any] = {}
    lacking: tuple[str, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    source: str = ""
    greedy: bool = False

    def params(
        self, given: Mapping[str, Any], *, otherwise: Mapping[str, Any] | None = None, room: int | None = None
    ) -> SamplingParams:
        """Return the parameters of a request: what was `given`, else what the file says, else `otherwise`.

        Args:
            given, otherwise: fields of SamplingParams.
            room: tokens left after the prompt; the file's limit, which nobody asked for, gives way to it.
        """
        own = dict(self.sampling)
        if room is not None and "max_tokens" in own:
            own["max_tokens"] = max(1, min(own["max_tokens"], room))
        return SamplingParams(**{**(otherwise or {}), **own, **given})

    def report(self) -> None:
        """Say once, at start, what the file changes and what of it cannot be done."""
        if self.sampling:
            shown = ", ".join(f"{name}={value}" for name, value in self.sampling.items())
            why = " (do_sample is false)" if self.greedy else ""
            log.info("sampling defaults of %s: %s%s; --generation-config none drops them", self.source, shown, why)
        if self.lacking:
            log.warning(
                "%s asks for %s, which this version does not do; answers are made without it",
                self.source, ", ".join(self.lacking),
            )  # fmt: skip


def generation_defaults(model: ModelOptions) -> GenerationDefaults:
    """Return the defaults that `model.generation_config` asks for.

    Raises:
        ValueError: the file is not there, or a value in it is of no use; one line with file, field, value and fix.
    """
    asked = model.generation_config
    if asked in OFF:
        return GenerationDefaults()
    file = Path(model.path) / FILE
    if asked != "auto":
        file = Path(asked).expanduser()
        file = file / FILE if file.is_dir() else file
        if not file.exists():
            raise ValueError(
                f"generation_config={asked!r} names no file ({show_path(file)} is not there); "
                "use auto (the model's), none, or a folder with a generation_config.json"
            )
    if not file.exists():
        return GenerationDefaults()
    content = read_object(file, MAX_CONFIG_BYTES)
    fields = Fields(content=content, where=file.name, defaults={})
    ends = fields.integers("eos_token_id", 0, MAX_TOKEN_ID, MAX_ENDS) if asked != "auto" else ()
    greedy = fields.raw("do_sample") is not None and not fields.flag("do_sample")
    return GenerationDefaults(
        sampling=_sampling(fields, greedy),
        lacking=_lacking(content, greedy),
        end_token_ids=ends,
        source=file.name if asked == "auto" else show_path(file),
        greedy=greedy,
    )


def _sampling(fields: Fields, greedy: bool) -> dict[str, Any]:
    found = {ours: fields.raw(theirs) for theirs, ours in _FIELDS.items() if fields.raw(theirs) is not None}
    for theirs, ours in _FIELDS.items():
        if ours in found:
            _check(fields, theirs, ours, found[ours])
    found = {name: value for name, value in found.items() if value != _NEUTRAL.get(name)}
    if greedy:
        return {"temperature": 0.0, **{name: found[name] for name in _ALWAYS if name in found}}
    return found


def _check(fields: Fields, theirs: str, ours: str, value: Any) -> None:
    """Refuse what SamplingParams refuses, under the file's name of the field."""
    if value == 0 and ours == "max_tokens":
        raise fields.refuse(theirs, value, "is not allowed; use at least 1, or start with --generation-config none")
    try:
        SamplingParams(**{ours: value})
    except ValueError as error:
        fix = str(error).rpartition(" is not allowed; ")[2]
        raise fields.refuse(theirs, value, f"is not allowed; {fix}, or start with --generation-config none") from None


def _lacking(content: dict[str, Any], greedy: bool) -> tuple[str, ...]:
    found = []
    for name, fine in _LACKING.items():
        value = content.get(name)
        if value is None or value is False or any(value == one for one in fine):
            continue
        if greedy and name in ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"):
            continue  # they only thin out what sampling chooses from
        found.append(f"{name}={show(value, limit=40)}")
    return tuple(found)
