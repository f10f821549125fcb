"""The demo checkpoint: a dense model carved into a true MoE, built on first use (see docs/demo.md)."""

from .checkpoint import ensure_demo_checkpoint
from .errors import DemoError

__all__ = ["DemoError", "ensure_demo_checkpoint"]
