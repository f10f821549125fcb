"""What the norms around blocks must move at least, and the work of a whole layer's attention by kernel.

Not a measurement; topologies/kernel_work.py says what is left out. Letters: T rows, D width.
"""

from __future__ import annotations

from ...attention.kernels.roofline import AttentionRows
from ...quant import NumberFormat
from ...topologies.kernel_work import Work
from ..config import ModelConfig
from ..footprint import cache_groups

_BF16 = 2


def norm_work(num_rows: int, width: int, *, adds: bool, itemsize: int = _BF16) -> Work:
    """Return the work of `triton_norm`: rows in and out; with `adds` what is added comes in and the sum goes out."""
    return Work(bytes=(num_rows * (4 if adds else 2) + 1) * width * itemsize)


def attention_rows(config: ModelConfig, held: NumberFormat) -> list[AttentionRows]:
    """Return what each kind of layer of a model attends over, with KV in the format `held`."""
    return [AttentionRows(group=group, num_heads=config.num_heads) for group in cache_groups(config, dtype=held)]


def rows_work(config: ModelConfig, rows: AttentionRows, num_rows: int) -> Work:
    """Return the work of the rows between products and attention: `triton_heads`, or `triton_latent_rows`."""
    if config.latent is not None:
        return rows.latent_rows(num_rows)
    return rows.heads(num_rows, config.rotary.rotary_dim)
