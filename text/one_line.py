"""What others wrote, as it may stand in a message: in one line, and cut where it is long.

Not messages. Units: characters.
"""

from __future__ import annotations


def one_line(error: object) -> str:
    """Return a message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters of `text`.

    Example:
        >>> shorten("a black-headed gull", 10)
        'a black...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."
