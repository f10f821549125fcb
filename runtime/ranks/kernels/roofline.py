"""What the kernels over rows of logits must move at least.

Not a measurement; topologies/kernel_work.py says what is left out. A draw reads its row again and again: a row of half
a megabyte stays in the second-level cache, so it counts once. Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from ....topologies.kernel_work import Work

_FP32, _ANSWER = 4, 8


def sampling_work(num_rows: int, vocab: int) -> dict[str, Work]:
    """Return the work of each operation over [N, V] logits in fp32.

    Example:
        A row of Qwen3's 151,936 tokens is 0.6 MB: 0.13 us on an H200.
    """
    read = num_rows * vocab * _FP32
    return {
        "scan": Work(bytes=read + num_rows * (_ANSWER + 1)),
        "logprobs": Work(bytes=read + num_rows * (2 * _ANSWER + _FP32 + _ANSWER)),
        "draw": Work(bytes=read + num_rows * (2 * _FP32 + 4 * _ANSWER)),
    }
