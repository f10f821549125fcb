"""Number formats for weights and KV (level 1)."""

from .formats import FORMATS, NumberFormat, parse_format

__all__ = ["FORMATS", "NumberFormat", "parse_format"]
