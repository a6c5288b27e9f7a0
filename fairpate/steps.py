"""How far long work is: loops report it here, and a command that listens shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Advance = Callable[[int, int], None]
ItemT = TypeVar("ItemT")
_listener: ContextVar[Advance | None] = ContextVar("listener", default=None)


def tell(done: int, total: int) -> None:
    """So many steps of all are done."""
    listener = _listener.get()
    if listener is not None:
        listener(done, total)


def stepwise(items: Sequence[ItemT]) -> Iterator[ItemT]:
    """The items, of which each is told when the next one is asked for."""
    for number, item in enumerate(items, 1):
        yield item
        tell(number, len(items))


@contextmanager
def heard_by(advance: Advance) -> Iterator[None]:
    """Inside, ``advance(done, total)`` is told every step."""
    token = _listener.set(advance)
    try:
        yield
    finally:
        _listener.reset(token)
