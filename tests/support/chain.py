"""CHAIN(f): checkpoints that say exactly what a test scripts, on any runtime, with an ordinary folder and no hooks.

Not a mock: a true Mixtral whose embeddings are one-hot, whose attention and experts add nothing, and whose head maps
token t to f(t). Ids: 0 `<unk>`, 1 `<s>`, 2 `</s>`, 3..258 the bytes, from FIRST_ID on the scripted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedTokenizerFast

from .fixtures import edit_json, new_folder

UNK, BOS, EOS, BYTE_0 = 0, 1, 2, 3
FIRST_ID = BYTE_0 + 256
LARGE = 20.0
# A vocabulary holds each string once, but two ids may have to carry the same text: their entries end in a mark that
# names the id, and the decoder drops it.
MARK = ("\ue000", "\ue001")


@dataclass(frozen=True)
class Chain:
    """A scripted checkpoint: its folder, the ids that greedy decoding yields (an end token included) and their text."""

    path: Path
    token_ids: list[int]
    text: str


def byte_id(byte: int) -> int:
    """Return the id of the token that stands for one byte of a prompt."""
    return BYTE_0 + byte


def build_tokenizer(strings: Sequence[str | bytes] = ()) -> Tokenizer:
    """Return a tokenizer that encodes any text byte by byte and whose ids from FIRST_ID on decode to `strings`.

    A `bytes` entry is one byte that need not be a whole character.
    """
    vocab = {"<unk>": UNK, "<s>": BOS, "</s>": EOS}
    vocab |= {f"<0x{byte:02X}>": byte_id(byte) for byte in range(256)}
    for i, string in enumerate(strings, FIRST_ID):
        if isinstance(string, bytes):
            assert len(string) == 1, "a bytes entry is one byte"
            string = f"<0x{string[0]:02X}>"
        vocab[f"{string}{MARK[0]}{i}{MARK[1]}"] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"{MARK[0]}[0-9]+{MARK[1]}"), ""), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_tokenizer(folder: Path, strings: Sequence[str | bytes] = (), *, chat_template: str | None = None) -> None:
    """Write tokenizer.json and tokenizer_config.json of `build_tokenizer` as transformers does."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(strings), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    if chat_template is not None:
        edit_json(folder / "tokenizer_config.json", {"chat_template": chat_template})


def chain(
    script: Sequence[str | bytes | int],
    *,
    eos_token_ids: int | list[int] | None = EOS,
    loop: bool = False,
    chat_template: str | None = None,
    max_position_embeddings: int = 4096,
    large: float = LARGE,
) -> Chain:
    """Write a checkpoint whose greedy answer to every prompt is `script`, then `</s>` (with `loop`: the script again).

    Args:
        script: a string is one token that carries it, bytes are one token a byte, an int is that id itself
            (each at most once, and never the last token of a prompt).
        eos_token_ids: written to generation_config.json; the tokenizer's own end token stays `</s>`.
        loop: go on with the first token after the last, so that only a limit or a stop string ends the text.
        large: logit lead of the scripted token, before the final norm's sqrt(hidden).
    """
    strings: list[str | bytes] = []
    ids: list[int] = []
    for item in script:
        if isinstance(item, int):
            ids.append(item)
            continue
        for part in [item] if isinstance(item, str) else [item[i : i + 1] for i in range(len(item))]:
            ids.append(FIRST_ID + len(strings))
            strings.append(part)
    if len(set(ids)) != len(ids):
        raise ValueError("a chain is first-order: every id may appear once; write repeated text as strings")
    following = dict(zip(ids, [*ids[1:], ids[0] if loop else EOS]))
    vocab_size = -(-(max([FIRST_ID + len(strings), *ids]) + 1) // 32) * 32
    folder = chain_map(
        following, ids[0], vocab_size=vocab_size, max_position_embeddings=max_position_embeddings, large=large
    )
    write_tokenizer(folder, strings, chat_template=chat_template)
    edit_json(folder / "generation_config.json", {"eos_token_id": eos_token_ids})
    token_ids = ids if loop else [*ids, EOS]
    return Chain(path=folder, token_ids=token_ids, text=build_tokenizer(strings).decode(ids, skip_special_tokens=True))


def chain_map(
    following: Mapping[int, int],
    default: int,
    *,
    vocab_size: int,
    max_position_embeddings: int = 4096,
    large: float = LARGE,
) -> Path:
    """Write a checkpoint without tokenizer: the greedy token after t is `following[t]`, else `default`."""
    config = MixtralConfig(
        hidden_size=vocab_size,
        vocab_size=vocab_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=BOS,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("o_proj.weight", "experts.down_proj")):
                tensor.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.lm_head.weight.zero_()
        for token in range(vocab_size):
            model.lm_head.weight[following.get(token, default), token] = large
    folder = new_folder("chain")
    model.save_pretrained(folder)
    return folder
