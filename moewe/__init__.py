"""moewe serves Mixture-of-Experts language models; this is its facade."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .llm import LLM, CompletionOutput, Logprob, RequestOutput
    from .runtime.config import EngineConfig
    from .runtime.params import SamplingParams, StructuredSpec

# Where each name lives; importing moewe imports none of them (torch takes seconds).
_HOMES = {
    "LLM": ".llm",
    "CompletionOutput": ".llm",
    "Logprob": ".llm",
    "RequestOutput": ".llm",
    "SamplingParams": ".runtime.params",
    "StructuredSpec": ".runtime.params",
    "EngineConfig": ".runtime.config",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredSpec",
    "__version__",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
