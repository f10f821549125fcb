"""What `moewe top` draws: a block a server, a line a rank with its saturation as a bar of components.

Not the figures (server/top/figures.py). Fits 80 columns and 24 lines, and uses what more there is. Bars are made of
letters as well as of colours, so that they read without colours. Texts of a server are shown as plain text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...telemetry import MEMORY_PARTS
from .figures import MEMORY_COMPONENTS, RankFigures, ServerFigures

LETTERS = {"routed": "R", "shared": "S", "attention": "A", "dense": "D", "kv": "K"}
_STYLES = {"routed": "black on cyan", "shared": "black on blue", "attention": "black on green",
           "dense": "black on yellow", "kv": "black on magenta"}  # fmt: skip
_LEAST_HEAD, _LEAST_RANKS = 1, 2  # lines of a server, however many share the height
_WIDTH_WITHOUT_BAR = 50
_FULL = 0.9  # a share of the ceiling, or of the KV blocks, that is worth a colour


def draw(servers: Sequence[ServerFigures | Lost], width: int, height: int) -> RenderableType:
    """Return all servers one below the other, the legend last.

    Args:
        servers: figures, or why there are none.
        width, height: of the terminal, in characters.
    """
    room = (height - 1) // max(1, len(servers))
    blocks: list[RenderableType] = []
    for server in servers:
        blocks += server.lines() if isinstance(server, Lost) else _server(server, width, room)
    return Group(*blocks, _legend(width))


class Lost:
    """A server that gives no figures.

    Args:
        url: of the server.
        reason: one line.
    """

    def __init__(self, url: str, reason: str) -> None:
        self.url, self.reason = url, reason

    def lines(self) -> list[Text]:
        """Return what is drawn in place of the figures."""
        return [_line(Text(self.url, "bold")), _line(Text(f"  {self.reason}", "red"))]


def bar(components: Mapping[str, float], width: int) -> Text:
    """Return a bar of `width` characters, all of which are the ceiling; what goes beyond is cut off.

    Args:
        components: share of the ceiling by component.
        width: in characters.
    """
    text = Text()
    done, drawn = 0.0, 0
    for name in MEMORY_COMPONENTS:
        done += components.get(name, 0.0)
        upto = min(width, round(done * width))  # ends are rounded, not lengths: errors do not add up
        text.append(LETTERS[name] * (upto - drawn), _STYLES[name])
        drawn = max(drawn, upto)
    return text.append("·" * (width - drawn), "dim")


def _server(server: ServerFigures, width: int, room: int) -> list[Text]:
    title = Text(server.url, "bold").append("" if server.ready else "  NOT READY", "bold red")  # before what is cut off
    title.append(f"  {server.model}  {server.topology}  moewe {server.version}", "not bold")
    advice = Text(f"  advice {server.advice}" if server.advice else "", "green")
    heads = (title, _load(server), _latencies(server), advice, _experts(server), _links_and_cost(server),
             _memory(server.ranks))  # fmt: skip
    lines = [_line(text) for text in heads if text.plain]  # what comes last goes first where many servers are shown
    lines = lines[: max(_LEAST_HEAD, room - min(_LEAST_RANKS, len(server.ranks)))]
    room = max(1, room - len(lines))
    ranks = sorted(server.ranks, key=lambda rank: (-rank.saturation, rank.replica, rank.rank))
    shown = ranks if len(ranks) <= room else ranks[: max(1, room - 1)]
    for rank in sorted(shown, key=lambda rank: (rank.replica, rank.rank)):
        lines.append(_line(_rank(rank, max(10, width - _WIDTH_WITHOUT_BAR))))
    if rest := ranks[len(shown) :]:
        lines.append(_line(Text(f"  {len(rest)} more at {rest[-1].saturation:.0%} to {rest[0].saturation:.0%}", "dim")))
    return lines


def _load(server: ServerFigures) -> Text:
    rates = f"  {server.tokens_per_second:.1f} tok/s  prompt {server.prompt_tokens_per_second:.1f} tok/s"
    text = Text(f"{rates}  running {server.running}  waiting {server.waiting}")
    return text.append(f"  preempted {server.preemptions}", "yellow") if server.preemptions else text


def _latencies(server: ServerFigures) -> Text:
    shown = (
        f"{name} {_times(p50, p95)}"
        for name, p50, p95 in (
            ("TTFT", server.ttft_p50, server.ttft_p95),
            ("TPOT", server.tpot_p50, server.tpot_p95),
            ("ITL", server.itl_p50, server.itl_p95),
        )
    )
    return Text(f"  {'  '.join(shown)} (p50/p95)")


def _links_and_cost(server: ServerFigures) -> Text:
    text = Text()
    if any(server.link_bytes.values()):
        text.append(f"  links {_rate(server.link_bytes['domain'])} in, {_rate(server.link_bytes['between'])} between")
    if (cost := server.cost_per_million_tokens.get("output")) is not None:
        text.append(f"  {cost:.3g} for 1M output tokens")
    return text


def _experts(server: ServerFigures) -> Text:
    """Return how uneven ranks are and which experts make them so; the hottest first, so that a cut takes the least."""
    text = Text()
    if server.imbalance is not None:
        text.append(f"  imbalance {server.imbalance:.2f}")
    if server.hottest:
        text.append(f"  hottest {'  '.join(map(_expert, server.hottest))}")
    return text


def _expert(item: Mapping[str, Any]) -> str:
    times = item.get("times_mean")
    share = f" {times:.1f}x" if isinstance(times, int | float) else ""
    return f"L{item.get('layer')}/E{item.get('expert')}{share}"


def _memory(ranks: Sequence[RankFigures]) -> Text:
    """Return what all ranks hold: weights, KV as a row of its own, rows on their way, and the rest, graphs included."""
    if not any(rank.memory for rank in ranks):
        return Text("  memory -", "dim")
    sums = {part: sum(rank.memory.get(part, 0.0) for rank in ranks) for part in MEMORY_PARTS}
    sums["other"] += sums["graphs"]
    held = {part: _size(num_bytes) for part, num_bytes in sums.items()}
    kv = " ".join(f"{held[f'kv_{part}']} {part}" for part in ("used", "reserved", "free"))
    return Text(f"  weights {held['weights']}  KV {kv}  exchange {held['exchange']}  other {held['other']}")


def _rank(rank: RankFigures, width: int) -> Text:
    domain = "" if rank.domain is None else f" d{rank.domain}"
    text = Text(f"  {f'{rank.replica}.{rank.rank}{domain}':<9}")
    text.append_text(bar(rank.components, width))
    text.append(f" {rank.saturation:>4.0%}", "bold red" if rank.saturation >= _FULL else "bold")
    text.append(f" {'cache' if rank.cache_resident else '':<5}", "dim")  # of the share, the verdict holds as well
    text.append(f" {rank.bound or '':<9}", "yellow")
    text.append(f" busy {rank.busy:>4.0%}")
    return text.append(f" KV {rank.kv_usage:>4.0%}", "red" if rank.kv_usage >= _FULL else "")


def _legend(width: int) -> Text:
    text = Text("  ")
    for name in MEMORY_COMPONENTS:
        text.append(LETTERS[name], _STYLES[name]).append(f" {name}  ", "dim")
    return _line(text.append("bar: of the memory ceiling", "dim"))


def _line(text: Text) -> Text:
    """Return `text` as one line; control characters in what a server says must not steer the terminal."""
    text.plain = "".join("?" if unicodedata.category(char) == "Cc" else char for char in text.plain)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _times(*seconds: float | None) -> str:
    return "/".join("-" if value is None else _time(value) for value in seconds)


def _time(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds >= 1 else f"{1000 * seconds:.0f}ms"


def _size(num_bytes: float) -> str:
    for unit in ("B", "K", "M"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f}{unit}" if num_bytes >= 9.95 or unit == "B" else f"{num_bytes:.1f}{unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f}G"


def _rate(num_bytes: float) -> str:
    for unit in ("B/s", "KB/s", "MB/s", "GB/s"):
        if num_bytes < 1000 or unit == "GB/s":
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B/s" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit takes all")
