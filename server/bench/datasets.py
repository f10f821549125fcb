"""What is asked: synthetic prompts, conversations in ShareGPT's form, and traces with their own times.

Not the sending (server/bench/load.py). Same seed, same samples. A prompt is text or token ids; without a tokenizer a
word of our list counts as a token, and a token of a conversation as 4 characters.
Units: tokens; seconds after the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...text import Tokenizer
from .words import WORDS

RANDOM, SHAREGPT, TRACE = "random", "sharegpt", "trace"
FIRST_ID = 100  # below it many vocabularies keep special tokens
CHARS_PER_TOKEN = 4
# As other servers' load tools filter: shorter ones say nothing, longer ones crowd out the rest.
FEWEST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
Ids = np.ndarray  # [length] i64
Spell = Callable[[Ids], Any]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request to make.

    Attributes:
        prompt: text or token ids.
        prompt_len: tokens of it, as far as is known here.
        output_len: most tokens to generate.
        arrival: when it leaves, of a trace; else None.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    arrival: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How prompts are spelled.

    Attributes:
        as_ids: token ids, else text.
        vocab_size: ids lie below.
        tokenizer: makes texts of exact length and counts those of conversations; None estimates.
        seed: of everything random.
    """

    as_ids: bool
    vocab_size: int = 1000
    tokenizer: Tokenizer | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_ID:
            raise ValueError(f"--vocab-size {self.vocab_size} is not allowed; use more than {FIRST_ID}")

    def spell(self, ids: Ids) -> str | list[int]:
        """Return a prompt of as many tokens as `ids`, which lie in [FIRST_ID, vocab_size)."""
        if self.as_ids:
            return [int(token) for token in ids]
        if self.tokenizer is None:
            return " ".join(WORDS[token % len(WORDS)] for token in ids.tolist())
        return _exact_text(self.tokenizer, ids)

    def ids(self, rng: np.random.Generator, length: int) -> Ids:
        """Return random ids."""
        return rng.integers(FIRST_ID, self.vocab_size, length)

    def count(self, text: str) -> int:
        """Return the tokens of `text`, or an estimate."""
        if self.tokenizer is None:
            return math.ceil(len(text) / CHARS_PER_TOKEN)
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def _exact_text(tokenizer: Tokenizer, ids: Ids) -> str:
    """Return text that encodes to as many tokens as there are ids, or as near as a few tries come."""
    wanted = len(ids)
    pool = [int(token) for token in ids if int(token) not in tokenizer.special_ids] or [FIRST_ID]
    current, text = pool, ""
    for _ in range(8):
        text = tokenizer.decode(current)
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if len(encoded) == wanted:
            return text
        missing = wanted - len(encoded)
        current = encoded[:wanted] if missing < 0 else encoded + (pool * (missing // len(pool) + 1))[:missing]
    return text


def random_samples(
    prompts: Prompts, number: int, lengths: tuple[int, int], *, range_ratio: float = 0.0, prefix_len: int = 0
) -> list[Sample]:
    """Return synthetic samples.

    Args:
        number: how many.
        lengths: tokens of prompt and output on average.
        range_ratio: lengths are uniform within this share of the average on either side, from 0 to below 1.
        prefix_len: tokens that all prompts begin with, beside the prompt's own.
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio {range_ratio:g} is not allowed; use 0 to below 1")
    for name, value, least in (("input", lengths[0], 1), ("output", lengths[1], 1), ("prefix", prefix_len, 0)):
        if value < least:
            raise ValueError(f"--random-{name}-len {value} is not allowed; use at least {least}")
    rng = np.random.default_rng(prompts.seed)
    prefix = prompts.ids(rng, prefix_len)
    drawn = [
        rng.integers(max(1, math.floor(mean * (1 - range_ratio))), math.ceil(mean * (1 + range_ratio)) + 1, number)
        for mean in lengths
    ]
    made = []
    for own, output in zip(*(column.tolist() for column in drawn), strict=True):
        ids = np.concatenate([prefix, prompts.ids(rng, own)])
        made.append(Sample(prompt=prompts.spell(ids), prompt_len=len(ids), output_len=output))
    return made


def sharegpt_samples(prompts: Prompts, path: Path, number: int, *, output_len: int | None = None) -> list[Sample]:
    """Return the first question of conversations, in random order, with the length of its answer.

    Args:
        path: JSON, a list of objects with `conversations` (`from`, `value`) or `messages` (`role`, `content`).
        number: at most so many.
        output_len: instead of the answer's length.
    """
    try:
        with path.open(encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--dataset-path {str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(data, list):
        raise ValueError(f"--dataset-path {str(path)!r} does not hold a list of conversations, as ShareGPT's file does")
    made: list[Sample] = []
    for position in np.random.default_rng(prompts.seed).permutation(len(data)).tolist():
        if len(made) == number:
            break
        turns = _turns(data[position])
        if len(turns) < 2:
            continue
        prompt_len = prompts.count(turns[0])
        answer_len = prompts.count(turns[1]) if output_len is None else output_len
        too_short = prompt_len < FEWEST_TOKENS or (output_len is None and answer_len < FEWEST_TOKENS)
        if too_short or prompt_len > MOST_PROMPT_TOKENS or prompt_len + answer_len > MOST_TOKENS:
            continue
        made.append(Sample(prompt=turns[0], prompt_len=prompt_len, output_len=answer_len))
    if not made:
        raise ValueError(
            f"--dataset-path {str(path)!r} holds no conversation of two turns with {FEWEST_TOKENS} to "
            f"{MOST_PROMPT_TOKENS} prompt tokens and at most {MOST_TOKENS} in all"
        )
    return made


def _turns(entry: Any) -> list[str]:
    turns = (entry.get("conversations") or entry.get("messages") or ()) if isinstance(entry, dict) else ()
    texts = []
    for turn in turns[:2] if isinstance(turns, Sequence) else ():
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(text, str):
            return []
        texts.append(text)
    return texts


def trace_samples(
    prompts: Prompts, path: Path, number: int | None, *, speed: float = 1.0, block_size: int = 512
) -> list[Sample]:
    """Return the requests of a trace, at the times it says, the earliest at 0.

    Args:
        path: JSON lines with `timestamp` (ms), `input_length`, `output_length`, and perhaps `hash_ids`: one number a
            block of the prompt, equal where blocks are equal, so that shared prefixes are shared here too.
        number: only the first so many; None takes all.
        speed: 2 replays in half the time.
        block_size: tokens of a block of `hash_ids`.
    """
    if not (speed > 0 and math.isfinite(speed)):
        raise ValueError(f"--trace-speed {speed:g} is not allowed; use a number above 0, 1 for the trace's own times")
    if block_size < 1:
        raise ValueError(f"--trace-block-size {block_size} is not allowed; use at least 1")
    made: list[Sample] = []
    for where, entry in _lines(path):
        if len(made) == number:
            break
        try:
            at, length = float(entry["timestamp"]) / 1000 / speed, int(entry["input_length"])
            output, hashes = max(1, int(entry["output_length"])), [int(h) for h in entry.get("hash_ids") or ()]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{where} lacks timestamp, input_length or output_length, as numbers") from None
        if length < 1 or not math.isfinite(at):
            raise ValueError(f"{where} has input_length={length} and timestamp={at}; both must make sense")
        blocks = [prompts.ids(np.random.default_rng([prompts.seed, 1, h % 2**63]), block_size) for h in hashes]
        own = max(0, length - len(hashes) * block_size)
        tail = prompts.ids(np.random.default_rng([prompts.seed, 2, len(made)]), own)
        ids = np.concatenate([*blocks, tail])[:length]
        made.append(Sample(prompt=prompts.spell(ids), prompt_len=length, output_len=output, arrival=at))
    if not made:
        raise ValueError(f"--dataset-path {str(path)!r} holds no request")
    start = min(sample.arrival or 0.0 for sample in made)
    shifted = [replace(sample, arrival=(sample.arrival or 0.0) - start) for sample in made]
    return sorted(shifted, key=lambda sample: sample.arrival or 0.0)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where it stands, the object) of each line that is not empty."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"line {number} of {str(path)!r}"
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("it is no object")
                yield where, entry
    except OSError as error:
        raise ValueError(f"--dataset-path {str(path)!r} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"--dataset-path {str(path)!r} is not JSON lines: {error}") from None
