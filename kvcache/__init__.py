"""Paged KV: block pools, cache groups and storage (level 2)."""

from .block_pool import BlockPool
from .groups import CacheGroup
from .storage import KVStorage, Pages

__all__ = ["BlockPool", "CacheGroup", "KVStorage", "Pages"]
