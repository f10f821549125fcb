"""Takes the output of a model apart while it comes: reasoning, answer, calls of tools. One parser a family's format."""

from .events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text, merged
from .forced import forced_schema
from .output import OutputParser
from .table import REASONING_FORMATS, TOOL_FORMATS, OutputFormat, forced_parser, output_format

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Event",
    "OutputFormat",
    "OutputParser",
    "Reasoning",
    "Text",
    "forced_parser",
    "forced_schema",
    "merged",
    "output_format",
]
