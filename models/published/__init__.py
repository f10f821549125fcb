"""Configs of published models by name, for planning without a checkpoint; each file says where its facts are from."""

from .table import published_config, published_names

__all__ = ["published_config", "published_names"]
