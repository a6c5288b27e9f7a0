"""Which name was meant: the one helper behind every "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: object, known: Iterable[object]) -> str:
    """A remedy that completes a message: the nearest known name, and all of them."""
    names = [str(name) for name in known]
    close = difflib.get_close_matches(str(value), names, n=1)
    guess = f"; did you mean {close[0]}?" if close else ";"
    return f"{guess} known: {', '.join(names) or 'none'}"
