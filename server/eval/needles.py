"""Needles in haystacks: a number is told somewhere in a long text and asked for at its end.

Not a measure of knowledge: it shows whether attention still finds one place among many after a change of format, window
or length. Lengths are tokens of the whole prompt; depth 0 is the beginning, 1 the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FACT = " The secret number of the {colour} door is {number}. "
_QUESTION = "\n\nThe secret number of the {colour} door is"
_COLOURS = ("blue", "green", "red", "yellow", "white", "black", "brown", "grey")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Needle:
    """One question.

    Attributes:
        length: tokens of the prompt, at most.
        depth: where the number is told.
        prompt: token ids.
        answer: what the continuation must hold.
    """

    length: int
    depth: float
    prompt: tuple[int, ...]
    answer: str


def make_needles(
    hay: Sequence[int], lengths: Sequence[int], *, trials: int, encode: Callable[[str], list[int]], seed: int = 0
) -> list[Needle]:
    """Return `trials` questions for each length and depth.

    Args:
        hay: token ids of a text, as long as the longest prompt; each question begins at another place of it.
        lengths: of prompts.
        trials: for each length and depth.
        encode: text to token ids, without those that begin a text.
        seed: of numbers, colours and places.

    Raises:
        ValueError: the text is too short, or a length too small for the question.
    """
    draw = random.Random(seed)
    needles = []
    for length in lengths:
        for depth in DEPTHS:
            for _ in range(trials):
                colour, number = draw.choice(_COLOURS), str(draw.randrange(1000, 10_000))
                fact = encode(_FACT.format(colour=colour, number=number))
                question = encode(_QUESTION.format(colour=colour))
                room = length - len(fact) - len(question)
                if room < 1:
                    raise ValueError(f"--needle {length} has no room; fact and question take {length - room} tokens")
                if len(hay) < room:
                    raise ValueError(f"--needle {length} wants a text of {room} tokens, --text has {len(hay)}")
                start = draw.randrange(len(hay) - room + 1)
                cut = start + round(depth * room)
                prompt = (*hay[start:cut], *fact, *hay[cut : start + room], *question)
                needles.append(Needle(length, depth, prompt, number))
    return needles


def found(needle: Needle, continuation: str) -> bool:
    """Tell whether the continuation names the number before any other digits."""
    digits = "".join(char if char.isdigit() else " " for char in continuation).split()
    return bool(digits) and digits[0] == needle.answer
