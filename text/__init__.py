"""Text in, tokens out and back: tokenizer, chat template, incremental detokenizer, stop matcher (level 1, no torch)."""

from .chat_template import ChatTemplate, TemplateError, check_template_kwargs
from .detokenizer import Detokenizer
from .stop import StopMatcher
from .templates import check_template_option, chosen_template
from .tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopMatcher",
    "TemplateError",
    "Tokenizer",
    "check_template_kwargs",
    "check_template_option",
    "check_tokenizer_files",
    "chosen_template",
    "load_tokenizer",
]
