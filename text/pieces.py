"""What bytes a token stands for, read off a tokenizer.json: the table behind exact incremental detokenising.

Not a tokenizer: it neither splits text nor knows which tokens are special. Tokenizers whose decoder is not a plain map
from token to bytes (word pieces, none at all) have no table; they are decoded through windows (text/detokenizer.py).
Units: token strings in, UTF-8 bytes out (a token may hold part of a character).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level_piece(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentence_piece(token: str, replacements: Sequence[tuple[re.Pattern[str], str]]) -> bytes:
    """Return the bytes of a SentencePiece-like token: after the replacements `<0xNN>` is one byte."""
    for pattern, content in replacements:
        token = pattern.sub(lambda _, content=content: content, token)  # type: ignore[misc]
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode("utf-8", "replace")


class PieceRule:
    """How a tokenizer's tokens become bytes.

    Args:
        piece: token string -> bytes.
        strips_first_space: a blank at the very start of a text is an artefact and not shown.
    """

    def __init__(self, piece: Callable[[str], bytes], *, strips_first_space: bool) -> None:
        self.piece = piece
        self.strips_first_space = strips_first_space


def piece_rule(decoder: dict[str, Any] | None) -> PieceRule | None:
    """Return the rule that the `decoder` part of a tokenizer.json describes, or None when it is not such a map."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(byte_level_piece, strips_first_space=False)
    if kinds == ["Metaspace"]:
        blank = [(re.compile(re.escape(steps[0].get("replacement", "\u2581"))), " ")]
        strips = steps[0].get("prepend_scheme", "always") != "never" and steps[0].get("add_prefix_space", True)
        return PieceRule(lambda token: sentence_piece(token, blank), strips_first_space=bool(strips))
    if "ByteFallback" in kinds:
        return _byte_fallback_rule(steps, kinds.index("ByteFallback"))
    return None


def _byte_fallback_rule(steps: list[dict[str, Any]], position: int) -> PieceRule | None:
    """Replacements, `ByteFallback`, and perhaps the removal of one blank at the start."""
    before, after = steps[:position], steps[position + 1 :]
    if any(step.get("type") != "Replace" for step in before) or any(step.get("type") != "Strip" for step in after):
        return None
    if any(step.get("content") != " " or step.get("start") not in (0, 1) or step.get("stop") for step in after):
        return None
    replacements = []
    for step in before:
        pattern = step.get("pattern", {})
        try:
            source = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
            replacements.append((re.compile(source), str(step.get("content", ""))))
        except (KeyError, re.error):
            return None
    strips = any(step.get("start") for step in after)
    return PieceRule(lambda token: sentence_piece(token, replacements), strips_first_space=strips)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Flatten nested sequences; `Fuse` only joins, so it is left out."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [] if decoder.get("type") == "Fuse" else [decoder]
