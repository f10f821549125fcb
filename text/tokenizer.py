"""A checkpoint's tokenizer: text to token ids and back, with its special tokens and its chat template.

Not the incremental detokenizer (text/detokenizer.py). Reads `tokenizer.json` itself; only a folder without one goes
through transformers, imported at that moment and without remote code.
Units: characters in, token ids out. `add_special_tokens` never yields two BOS tokens in a row at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from .detokenizer import Detokenizer
from .one_line import one_line
from .pieces import PieceRule, piece_rule
from .templates import NamedTemplates, find_templates, templates_of

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_VOCABULARIES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json")


class Tokenizer:
    """Encodes and decodes for one model. Made by `load_tokenizer`.

    Args:
        backend: does the work.
        config: tokenizer_config.json (special tokens, `add_bos_token`, `added_tokens_decoder`).
        templates: the chat templates of the model.

    Attributes:
        special_tokens: the special tokens that have a role, as text; templates see them by these names.
        templates: as given.
        chat_template: the one for chats, or None.
        whole_texts: text of each token; None for one whose bytes are no whole characters.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: dict[str, Any], templates: NamedTemplates | None = None
    ) -> None:
        self._backend = backend
        self._config = config
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = _named_tokens(config)
        self._add_missing_tokens(config)
        self._added_content = {token_id: str(t) for token_id, t in backend.get_added_tokens_decoder().items()}
        flagged = {token_id for token_id, t in backend.get_added_tokens_decoder().items() if t.special}
        named = {backend.token_to_id(text) for text in self.special_tokens.values()}
        self.special_ids: frozenset[int] = frozenset(flagged | {i for i in named if i is not None})
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.templates = templates or NamedTemplates()
        self.chat_template = self.templates.chosen(self.special_tokens)
        self._spec = json.loads(backend.to_str())
        rule = piece_rule(self._spec.get("decoder"))
        self._rule: PieceRule | None = rule if rule is not None and self._agrees(rule) else None
        self._pieces: dict[int, bytes] = {}
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self.token_bytes)
        self._longest_token = 0

    def single_token(self, text: str) -> int | None:
        """Return the token that is all of `text`; None where it takes several, or none."""
        ids = self.encode(text, add_special_tokens=False) if text else []
        return ids[0] if len(ids) == 1 else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with what the tokenizer adds around it (BOS at most once)."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"text holds a lone surrogate at character {error.start}; send well-formed Unicode"
                ) from None
        # The batch form lets other threads run; the plain one holds the interpreter for all of a long text.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not add_special_tokens:
            return ids
        if "add_bos_token" in self._config or "add_eos_token" in self._config:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            if self._config.get("add_bos_token") and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
            if self._config.get("add_eos_token") and self.eos_token_id is not None:
                ids = [*ids, self.eos_token_id]
        if len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence: what `Detokenizer` gives, at once."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.add(ids) + detokenizer.flush()

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself (U+FFFD for part of a character), special tokens by name."""
        if token_id in self._added_content:
            return self._added_content[token_id]
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for; empty for an id without a token."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece(token_id)
        return piece

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least, known without tokenising (0 when it cannot be told)."""
        if self._spec.get("normalizer") is not None:
            return 0
        if not self._longest_token:
            self._longest_token = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1) or 1
        return len(text) // self._longest_token

    @property
    def has_pieces(self) -> bool:
        """True when each token stands for fixed bytes, so `token_bytes` is all that decoding needs."""
        return self._rule is not None

    @property
    def strips_first_space(self) -> bool:
        """True when a blank at the very start of a text is an artefact of the tokenizer."""
        return self._rule is not None and self._rule.strips_first_space

    def decode_window(self, ids: list[int]) -> str:
        """Return what the tokenizer's own decoder makes of a few tokens (for tokens without fixed bytes)."""
        return str(self._backend.decode(ids, skip_special_tokens=False)) if ids else ""

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added_content:
            return self._added_content[token_id].encode("utf-8", "replace")
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._rule is None:
            return self.decode_window([token_id]).encode("utf-8", "replace")
        return self._rule.piece(token)

    def _agrees(self, rule: PieceRule) -> bool:
        """Check the rule against the library's own decoder on a line with blanks, accents and an emoji."""
        ids = self._backend.encode("Hello, w\u00f6rld  of 12 \U0001f40d s", add_special_tokens=False).ids
        ids = [token_id for token_id in ids if token_id not in self._added_content]
        data = b"".join(rule.piece(self._backend.id_to_token(token_id) or "") for token_id in ids)
        if rule.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace") == self.decode_window(ids)

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token_id = self._backend.token_to_id(text) if text is not None else None
        return None if token_id is None else int(token_id)

    def _add_missing_tokens(self, config: dict[str, Any]) -> None:
        """Add tokens that only tokenizer_config.json names, in the order of their ids."""
        known = set(self._backend.get_added_tokens_decoder())
        missing = []
        for key, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if int(key) not in known and isinstance(entry, dict):
                flags = {k: v for k, v in entry.items() if k in ("single_word", "lstrip", "rstrip", "normalized")}
                missing.append(tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags))
        self._backend.add_tokens(missing)


class _WholeTexts(dict[int, str | None]):
    """`Tokenizer.whole_texts`, filled as tokens are asked for."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def check_tokenizer_files(path: Path) -> None:
    """Refuse a model folder without any file that could hold a tokenizer; reads only names.

    Raises:
        ValueError: one line that names the folder and the fix.
    """
    if path.is_dir() and not any(next(path.glob(pattern), None) for pattern in _VOCABULARIES):
        raise ValueError(
            f"folder {str(path)!r} holds no tokenizer (neither tokenizer.json nor another vocabulary); add its files, "
            "give another with --tokenizer, or use --skip-tokenizer-init to work with token ids"
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        ValueError: nothing usable there; one line that names path and fix.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        check_tokenizer_files(path)
        return _load_through_transformers(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"tokenizer={str(file)!r} cannot be read ({error}); fetch the file again") from None
    config = _read_json(path / "tokenizer_config.json")
    for name, value in _read_json(path / "special_tokens_map.json").items():
        config.setdefault(name, value)
    return Tokenizer(backend, config, find_templates(path, config))


def _load_through_transformers(path: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"tokenizer={str(path)!r} has no tokenizer.json and transformers cannot load it ({one_line(error)[:400]}); "
            "give another with --tokenizer, or --skip-tokenizer-init to work with token ids"
        ) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(
            f"tokenizer={str(path)!r} is a {type(loaded).__name__}, which has no tokenizer.json form; "
            "convert it, give another with --tokenizer, or use --skip-tokenizer-init"
        )
    config = {name: str(getattr(loaded, name)) for name in _NAMED_TOKENS if getattr(loaded, name, None) is not None}
    try:
        templates = NamedTemplates(sources=templates_of(getattr(loaded, "chat_template", None)))
    except ValueError as error:
        templates = NamedTemplates(problem=f"chat template cannot be read: {error}")
    return Tokenizer(backend, config, templates)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name}={str(file)!r} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name}={str(file)!r} holds no JSON object; fetch the file again")
    return value


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that have a role, as text."""
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in _NAMED_TOKENS}
    tokens = {}
    for name, value in {**(extra if isinstance(extra, dict) else {}), **named}.items():
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
