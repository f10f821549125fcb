"""Paged KV (level 2): who owns a block, what a group of layers keeps; `storage` holds it and brings torch along."""

from .block_pool import BlockPool
from .groups import CacheGroup

__all__ = ["BlockPool", "CacheGroup"]
