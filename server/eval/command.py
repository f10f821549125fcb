"""The command `moewe eval`: a text is read by a model, once or beside another format or topology, and scored.

Not the arithmetic (server/eval/scores.py). Runs on a session of its own in this terminal; two runs come one after the
other, so that only one model is held at a time. Units: tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.params import MAX_LOGPROBS, SamplingParams
from ..commands.local import start
from ..flags.table import ENGINE_FLAGS
from ..flags.values import Settings, convert
from ..terminal.bars import counting
from ..terminal.stdout import put
from .needles import DEPTHS, Needle, found, make_needles
from .scores import Place, agreement, perplexity, place_of

if TYPE_CHECKING:
    from ...runtime.session import Session

CONTEXT, MOST_TOKENS, TRIALS = 1024, 100_000, 4
ANSWER_TOKENS = 8


def evaluate(settings: Settings) -> int:
    """Run the command; returns the exit code."""
    tool = settings.tool
    for name, least, value in (
        ("context", 2, tool.get("context", CONTEXT)),
        ("most-tokens", 2, tool.get("most_tokens", MOST_TOKENS)),
        ("needle-trials", 1, tool.get("needle_trials", TRIALS)),
    ):
        if value < least:
            raise ValueError(f"--{name} {value} is not allowed; use at least {least}")
    text = read_text(tool.get("text"))
    lengths = [_length(item) for item in tool.get("needle", ())]
    other = against(settings, tool["against"]) if tool.get("against") else None
    out = Path(tool["output_json"]) if "output_json" in tool else None

    report, places = _one(settings, text, lengths, tool, "model")
    runs = {"model": report}
    if other is not None:
        runs["against"], theirs = _one(other, text, lengths, tool, "against")
        near = agreement(places, theirs)
        runs["against"]["settings"] = list(tool["against"])
        runs["agreement"] = asdict(near)
    put(shown(runs))
    if out is not None:
        try:
            out.write_text(json.dumps(runs, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"--output-json {str(out)!r} cannot be written: {error.strerror}") from None
    return 0


def read_text(file: str | None) -> str:
    """Return the text of a file."""
    if file is None:
        raise ValueError("no --text is given; name a text file, best one that the model has not seen")
    try:
        return Path(file).read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--text {file!r} is not UTF-8 text; convert it, for example with iconv") from None
    except OSError as error:
        raise ValueError(f"--text {file!r} cannot be read: {error.strerror}") from None


def against(settings: Settings, words: Sequence[str]) -> Settings:
    """Return the settings of the other run: those of this one but for `words`, each FLAG=VALUE of the engine.

    Raises:
        ValueError: a word is no such setting.
    """
    known = {flag.name: flag for flag in ENGINE_FLAGS}
    engine = dict(settings.engine)
    for word in words:
        name, equals, value = word.partition("=")
        flag = known.get(name.removeprefix("--").replace("_", "-"))
        if not equals or flag is None:
            raise ValueError(f"--against {word!r} is no setting of an engine; write one like quantization=int8")
        if flag.kind in ("bool", "switch"):
            raw: Any = {"true": True, "false": False}.get(value.lower(), value)
        else:
            raw = value
        engine[flag.target] = convert(flag, raw, where=f"--against {name}")
    return replace(settings, engine=engine)


def windows(token_ids: Sequence[int], length: int) -> list[list[int]]:
    """Return the text in pieces of `length` tokens that do not overlap; a rest of one token is left out.

    Example:
        >>> windows([1, 2, 3, 4, 5], 2)
        [[1, 2], [3, 4]]
    """
    pieces = [list(token_ids[i : i + length]) for i in range(0, len(token_ids), length)]
    return [piece for piece in pieces if len(piece) > 1]


def _one(
    settings: Settings, text: str, lengths: Sequence[int], tool: dict[str, Any], name: str
) -> tuple[dict[str, Any], list[Place]]:
    """Return the report of one run and what it said of each place of the text."""
    with start(settings) as session:
        context = min(tool.get("context", CONTEXT), session.max_model_len - 1)
        ids = session.encode(text, add_special_tokens=False)
        pieces = windows(ids[: tool.get("most_tokens", MOST_TOKENS)], context)
        if not pieces:
            raise ValueError(f"--text has {len(ids)} tokens; two are the least")
        longest = max(lengths, default=0)
        if longest > session.max_model_len - ANSWER_TOKENS:
            raise ValueError(
                f"--needle {longest} does not fit: a prompt may have {session.max_model_len - ANSWER_TOKENS} tokens "
                "here; raise --max-model-len"
            )
        needles = make_needles(
            ids,
            lengths,
            trials=tool.get("needle_trials", TRIALS),
            encode=lambda part: session.encode(part, add_special_tokens=False),
        )
        with counting(f"texts and questions ({name})", len(pieces) + len(needles)) as advance:
            places = list(_read(session, pieces, advance))
            hits = _ask(session, needles, advance)
        report: dict[str, Any] = {
            "model": session.resolved.config.model.model,
            "topology": session.resolved.topology.long(),
            "perplexity": perplexity(places),
            "num_tokens": len(places),
            "context": context,
        }
        if needles:
            report["needles"] = _table(needles, hits)
    return report, places


def _read(session: Session, pieces: Sequence[list[int]], advance: Callable[[], None]) -> Iterator[Place]:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=MAX_LOGPROBS)
    said: list[list[Place | None]] = [[] for _ in pieces]
    for index, delta in session.stream(pieces, [params] * len(pieces)):
        said[index] += map(place_of, delta.prompt_logprobs)
        if delta.finish_reason == "error":
            raise ValueError(f"the text could not be read: {delta.error}")
        if delta.finish_reason is not None:
            advance()
    for piece, places in zip(pieces, said, strict=True):
        assert len(places) == len(piece), (len(places), len(piece))
        yield from (place for place in places if place is not None)


def _ask(session: Session, needles: Sequence[Needle], advance: Callable[[], None]) -> list[bool]:
    if not needles:
        return []
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    answers = [""] * len(needles)
    for index, delta in session.stream([needle.prompt for needle in needles], [params] * len(needles)):
        answers[index] += delta.text
        if delta.finish_reason == "error":
            raise ValueError(f"a question could not be asked: {delta.error}")
        if delta.finish_reason is not None:
            advance()
    return [found(needle, answer) for needle, answer in zip(needles, answers, strict=True)]


def _table(needles: Sequence[Needle], hits: Sequence[bool]) -> list[dict[str, Any]]:
    rows = []
    for length in dict.fromkeys(needle.length for needle in needles):
        shares = {}
        for depth in DEPTHS:
            of_cell = [
                hit
                for needle, hit in zip(needles, hits, strict=True)
                if (needle.length, needle.depth) == (length, depth)
            ]
            shares[f"{depth:g}"] = sum(of_cell) / len(of_cell)
        rows.append({"length": length, "found": shares})
    return rows


def shown(runs: dict[str, Any]) -> str:
    """Return the report for people."""
    lines = []
    for name in ("model", "against"):
        if (run := runs.get(name)) is None:
            continue
        what = f" ({', '.join(run['settings'])})" if "settings" in run else ""
        lines.append(f"{name:<8} {run['model']}  {run['topology']}{what}")
        lines.append(
            f"         perplexity {run['perplexity']:.4f} over {run['num_tokens']:,} tokens "
            f"in pieces of {run['context']:,}"
        )
        for row in run.get("needles", ()):
            cells = "  ".join(f"{depth}: {share:.0%}" for depth, share in row["found"].items())
            lines.append(f"         needle in {row['length']:,} tokens, found by depth  {cells}")
    if near := runs.get("agreement"):
        ratio = runs["against"]["perplexity"] / runs["model"]["perplexity"] - 1
        lines.append(
            f"against beside model: perplexity {ratio:+.2%}, same likeliest token at {near['top1']:.2%} of places, "
            f"KL(model || against) at least {near['kl']:.5f} nats a token"
        )
    return "\n".join(lines) + "\n"


def _length(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 16 <= int(text) < 1 << 24:
        raise ValueError(f"--needle {text!r} is no length of a prompt; use whole tokens, 16 or more")
    return int(text)
