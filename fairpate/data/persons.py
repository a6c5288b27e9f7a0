"""Records by the persons behind them, in parts that hold all records of each of their persons.

Shapes: N records, R parts of a person, W numbers of a vote.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fairpate.types import IntArray

SEPARATORS = ",;|"
"""A name with one of these characters is taken for several persons."""

MOST_RECORDS = 2**17
"""Of one person: squares of sums of votes are then whole numbers that 64 bits hold."""


def whole_persons(person_N: IntArray, size: int) -> Iterator[IntArray]:
    """The rows of all records in parts of about ``size``, person after person."""
    rows = np.argsort(person_N, kind="stable")
    starts = np.flatnonzero(np.diff(person_N[rows], prepend=-1))
    # The first person who begins in each stretch of ``size`` records begins a part.
    first = starts[np.unique(starts // size, return_index=True)[1]]
    yield from np.split(rows, first[1:])


def shortened_by_person(
    votes_NW: IntArray, row_N: IntArray, person_N: IntArray, *, norm: int
) -> tuple[IntArray, IntArray]:
    """What persons add to a table, all together of L2 norm at most ``norm``: rows of the table (R,), numbers (R, W).

    Record n votes ``votes_NW[n]`` for ``row_N[n]``; no vote is longer than ``norm``. A person's votes are added up row
    by row, and shortened where they are longer than that: the longest vector of that direction. Whole numbers, and a
    function of the person's own records alone, bit for bit. ValueError for more than ``MOST_RECORDS`` of one person.
    """
    order = np.lexsort((row_N, person_N))
    rows, persons = row_N[order], person_N[order]
    starts_R = np.flatnonzero((np.diff(rows, prepend=-1) != 0) | (np.diff(persons, prepend=-1) != 0))
    firsts_P = np.flatnonzero(np.diff(persons[starts_R], prepend=-1))
    if np.bincount(person_N, minlength=1).max() > MOST_RECORDS:
        raise ValueError(f"Expected at most {MOST_RECORDS} records of one person; leave some out.")
    sums_RW = np.add.reduceat(votes_NW[order], starts_R, axis=0) if len(order) else votes_NW
    squared_P = np.add.reduceat((sums_RW * sums_RW).sum(axis=1), firsts_P) if len(order) else np.zeros(0, np.int64)
    squared_R1 = np.repeat(squared_P, np.diff(firsts_P, append=len(starts_R)))[:, None]
    # Towards zero, and a little shorter than the bound, so that no rounding of floats makes a vector longer.
    shorter_RW = np.trunc(sums_RW * (norm - 1) / np.sqrt(np.maximum(squared_R1, 1))).astype(np.int64)
    return rows[starts_R], np.where(squared_R1 > norm**2, shorter_RW, sums_RW)
