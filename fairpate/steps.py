"""How far long work is: loops report it here, and a command that listens shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Advance = Callable[[int, int], None]
_listener: ContextVar[Advance | None] = ContextVar("listener", default=None)


def tell(done: int, total: int) -> None:
    """So many steps of all are done."""
    listener = _listener.get()
    if listener is not None:
        listener(done, total)


@contextmanager
def heard_by(advance: Advance) -> Iterator[None]:
    """Inside, ``advance(done, total)`` is told every step."""
    token = _listener.set(advance)
    try:
        yield
    finally:
        _listener.reset(token)
