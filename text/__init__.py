"""Text in, tokens out and back: tokenizer, chat template, incremental detokenizer, stop matcher (level 1, no torch)."""

from .chat_template import ChatTemplate, TemplateError
from .detokenizer import Detokenizer
from .stop import StopMatcher
from .tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "TemplateError",
    "Tokenizer",
    "check_tokenizer_files",
    "load_tokenizer",
]
