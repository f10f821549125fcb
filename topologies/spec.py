"""The `EPxDPy` grammar: text in, `Topology` out, and back.

Not a grid of ranks (grid.py) and not a check against a model or a machine (budget.py): only what the words mean.
Units: ranks. x ranks share one expert-parallel group, y independent replicas of it exist: x*y ranks in all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

OWN_DIALECT = "moewe"
DIALECTS = (OWN_DIALECT, "vllm", "sglang", "deepseek")
MAX_RANKS = 1 << 20
MAX_RATE = 10**9  # MB/s
MAX_DELAY = 10**6  # microseconds: more than a second would pass for a rank that is stuck
EXAMPLE = "EP2DP1"
_SHORT = re.compile(r"EP\s*([0-9]{1,7})\s*DP\s*([0-9]{1,7})", re.IGNORECASE)
_FOREIGN = re.compile(r"(EP|DP|TP)\s*=?\s*([0-9]{1,7})[\s,/]*", re.IGNORECASE)
_OWN_KEYS = ("adp", "atp", "red", "domains", "rate", "delay")
_SIZES = re.compile(r"[0-9]{1,7}(\+[0-9]{1,7})*")
_LATER_KEYS = ("etp", "pp")


class TopologyError(ValueError):
    """A topology, layout or budget that cannot be used; the message is one line with the value and the fix."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`dp` independent replicas of one expert-parallel group of `ep` ranks.

    Attributes:
        ep: x, ranks of a group; each replica holds every routed expert once.
        dp: y, replicas; nothing synchronises between them.
        adp: attention data parallelism inside a group; each of its parts owns its requests and their KV.
        atp: attention tensor parallelism inside a group; adp * atp = ep.
        red: R, redundant expert slots of a replica beside the E that hold every expert once.
        domains: how many consecutive ranks of a group sit in each domain; empty: the machine says it. Naming them on
            one host emulates several.
        rate, delay: of the emulated link between domains, MB/s and microseconds; 0 does not slow it down.
    """

    ep: int
    dp: int
    adp: int
    atp: int = 1
    red: int = 0
    domains: tuple[int, ...] = ()
    rate: int = 0
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("ep", 1), ("dp", 1), ("adp", 1), ("atp", 1), ("red", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TopologyError(f"{name}={value!r} is not allowed; use an integer of at least {least}")
        if self.adp * self.atp != self.ep:
            raise TopologyError(
                f"adp={self.adp} times atp={self.atp} is {self.adp * self.atp}, but the group has ep={self.ep} ranks; "
                f"use adp={self.ep},atp=1 or another pair whose product is {self.ep}"
            )
        if self.num_ranks > MAX_RANKS:
            raise TopologyError(f"{self.short()} means {self.num_ranks:,} ranks; use at most {MAX_RANKS:,}")
        self._check_domains()

    def _check_domains(self) -> None:
        spelled = "+".join(map(str, self.domains))
        if any(size < 1 for size in self.domains):
            raise TopologyError(f"domains={spelled} is not allowed; each has at least 1 rank")
        if self.domains and sum(self.domains) != self.ep:
            raise TopologyError(
                f"domains={spelled} is {sum(self.domains)} ranks, but the group has ep={self.ep}; they share its ranks"
            )
        for name, most in (("rate", MAX_RATE), ("delay", MAX_DELAY)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise TopologyError(f"{name}={value!r} is not allowed; use a whole number up to {most}")
            if value and len(self.domains) < 2:
                raise TopologyError(
                    f"{name}={value} is of the link between domains, and there is but one; name some, like domains=2+2"
                )

    @property
    def num_ranks(self) -> int:
        """All ranks of all replicas: x * y."""
        return self.ep * self.dp

    def short(self) -> str:
        """Return `EPxDPy`, which leaves out the attention layout and redundant slots."""
        return f"EP{self.ep}DP{self.dp}"

    def long(self) -> str:
        """Return the canonical form, which says everything: `EP2DP1[adp=2,atp=1,red=0]`."""
        fields = f"adp={self.adp},atp={self.atp},red={self.red}"
        if self.domains:
            fields += f",domains={'+'.join(map(str, self.domains))}"
        for name in ("rate", "delay"):
            fields += f",{name}={getattr(self, name)}" if getattr(self, name) else ""
        return f"{self.short()}[{fields}]"

    def __str__(self) -> str:
        return self.long()

    def warnings(self) -> list[str]:
        """Return a line for each thing that reads like a slip."""
        if self.ep == self.dp and self.ep > 1:
            return [
                f"{self.short()} means {self.dp} replicas of a group of {self.ep} ranks, {self.num_ranks} ranks in "
                f"all; did you mean EP{self.ep}DP1? (others count DP inside the group: --dialect vllm|sglang|deepseek)"
            ]
        return []


def make_topology(ep: int, dp: int = 1, *, adp: int | None = None, atp: int | None = None, red: int = 0) -> Topology:
    """Return a topology with `adp` and `atp` filled in: what is given decides the other, else adp = ep."""
    if adp is None:
        adp = ep // atp if atp and ep % atp == 0 else ep
    if atp is None:
        atp = ep // adp if adp and ep % adp == 0 else 1
    return Topology(ep=ep, dp=dp, adp=adp, atp=atp, red=red)


def parse_topology(text: str, *, dialect: str | None = None) -> Topology:
    """Return the topology that `text` spells, in any case.

    Args:
        text: `EP64DP3` or `EP64DP3[adp=64,atp=1,red=32]`.
        dialect: None or `moewe` for ours; `vllm`, `sglang` or `deepseek` read `EP144DP144` as one group whose
            attention is data parallel over 144 ranks (EP144DP1).

    Raises:
        TopologyError: not in the grammar, or numbers that do not fit together.

    Example:
        >>> parse_topology("ep4dp2").long()
        'EP4DP2[adp=4,atp=1,red=0]'
    """
    if dialect is not None and dialect not in DIALECTS:
        raise TopologyError(f"dialect {dialect!r} is not known; use one of: {', '.join(DIALECTS)}")
    head, fields = _split(text)
    if dialect not in (None, OWN_DIALECT):
        return _parse_foreign(text, head, fields, dialect)
    match = _SHORT.fullmatch(head)
    if match is None and (long := re.search(r"[0-9]{8,}", head)) is not None:
        raise TopologyError(f"topology {shown(head)}: {long[0][:40]} is not a number of ranks; use up to 7 digits")
    if match is None:
        raise TopologyError(f"topology {shown(text)} is not of the form EPxDPy; {_suggestion(head)}")
    topology = make_topology(
        int(match[1]), int(match[2]), adp=fields.get("adp"), atp=fields.get("atp"), red=fields.get("red", 0)
    )
    if not {"domains", "rate", "delay"} & set(fields):
        return topology
    return replace(
        topology, domains=fields.get("domains", ()), rate=fields.get("rate", 0), delay=fields.get("delay", 0)
    )


def shown(text: str) -> str:
    """Return a text that was given, in quotes and no longer than a line."""
    text = text.strip()
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """Return what stands before the brackets, and the fields within them."""
    head, bracket, rest = text.strip().partition("[")
    if not bracket:
        return head.strip(), {}
    if not rest.endswith("]"):
        raise TopologyError(f"topology {shown(text)} has an open bracket; write it like EP2DP1[adp=2,atp=1,red=0]")
    fields: dict[str, Any] = {}
    for item in rest[:-1].split(","):
        key, _, value = (part.strip().lower() for part in item.partition("="))
        if key not in _OWN_KEYS + _LATER_KEYS:
            raise TopologyError(
                f"topology {shown(text)} has the unknown field {key!r}; known are {', '.join(_OWN_KEYS)}"
            )
        if key in fields:
            raise TopologyError(f"topology {shown(text)} gives {key} twice; give it once")
        if key == "domains":
            if not _SIZES.fullmatch(value):
                raise TopologyError(f"topology {shown(text)} has domains={value!r}; write their sizes like domains=2+2")
            fields[key] = tuple(map(int, value.split("+")))
            continue
        if not re.fullmatch(r"[0-9]{1,7}", value):
            raise TopologyError(f"topology {shown(text)} has {key}={value!r}; use a whole number")
        fields[key] = int(value)
    for key in _LATER_KEYS:
        if fields.pop(key, 1) != 1:
            raise TopologyError(
                f"topology {shown(text)} asks for {key} above 1, which is not available; leave {key} out"
            )
    return head.strip(), fields


def _parse_foreign(text: str, head: str, fields: dict[str, Any], dialect: str) -> Topology:
    sizes: dict[str, int] = {}
    position = 0
    while match := _FOREIGN.match(head, position):
        key, position = match[1].upper(), match.end()
        if key in sizes:
            raise TopologyError(f"topology {shown(text)} gives {key} twice; give it once")
        sizes[key] = int(match[2])
    if position != len(head) or "EP" not in sizes:
        raise TopologyError(
            f"topology {shown(text)} is not of the form EPxDPy with --dialect {dialect}; example: EP8DP8"
        )
    if set(fields) - {"red"}:
        raise TopologyError(
            f"topology {shown(text)}: with --dialect {dialect} DP and TP say adp and atp; leave those out"
        )
    ep, adp = sizes["EP"], sizes.get("DP", 1)
    if ep < 1 or adp < 1 or ep % adp:
        raise TopologyError(
            f"topology {shown(text)}: with --dialect {dialect} DP counts attention replicas inside the group, "
            f"so DP{adp} must divide EP{ep}; for replicas of whole groups leave --dialect out"
        )
    # SGLang's TP is the width of the whole group, vLLM's the share of one attention replica.
    expected_tp = ep if dialect == "sglang" else ep // adp
    if sizes.get("TP", expected_tp) != expected_tp:
        raise TopologyError(
            f"topology {shown(text)}: with --dialect {dialect} EP{ep} and DP{adp} go with TP{expected_tp}, "
            f"not TP{sizes['TP']}; write TP{expected_tp} or leave it out"
        )
    return make_topology(ep, 1, adp=adp, red=fields.get("red", 0))


def _suggestion(head: str) -> str:
    """Return the likely intent behind a text that is not in the grammar."""
    squeezed = re.sub(r"[\s,/X_=-]", "", head.upper())
    if match := re.fullmatch(r"DP([0-9]+)EP([0-9]+)", squeezed):
        return f"did you mean EP{match[2]}DP{match[1]}?"
    if match := re.fullmatch(r"EP([0-9]+)DP([0-9]+)", squeezed):
        return f"did you mean EP{match[1]}DP{match[2]}?"
    if match := re.fullmatch(r"(?:EP|DEP)([0-9]+)", squeezed):
        return f"did you mean EP{match[1]}DP1?"
    if match := re.fullmatch(r"TEP([0-9]+)", squeezed):
        return f"did you mean EP{match[1]}DP1[atp={match[1]}]?"
    return f"write for example {EXAMPLE}: one replica of a group of two ranks"
