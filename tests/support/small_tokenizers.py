"""Small tokenizers of the three kinds that checkpoints bring, written as folders.

Not fixtures of models. Units: token ids.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The gull flies over the sea and the sea is wide.",
    "Möwen fliegen über das Meer, \U0001f426 \U0001f30a 海の鳥 \U0001f468\u200d\U0001f469\u200d\U0001f467.",
    "  two  blanks\tand a tab\nand a line\n\n",
] * 20


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return str(tokenizer.to_str())


def byte_fallback() -> Tokenizer:
    """Like Llama's: blanks are \u2581, one is put in front, unknown characters are bytes."""
    words = ["\u2581", "\u2581the", "\u2581sea", "gull", "\u2581gull", "e", "s", "a", "t", "h", "\u00f6"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """A tokenizer whose tokens are no fixed bytes: pieces with ## join, others get a blank."""
    words = ["[UNK]", "<s>", "</s>", "the", "sea", "gull", "##s", "fly", "##ing", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece}


def write(folder: Path, kind: str, **config: object) -> Path:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | config))
    return folder
