"""Packed names: any sequence of strings, whatever lies in memory or in a file."""

from __future__ import annotations

import copy

import numpy as np
import pyarrow as pa
import pytest

from fairpate.data import large_arrays
from fairpate.data.large_arrays import GatheredNames, Names

TEXTS = ["ann", "", "bob", "ann", "Ø\x1f\n", "bob", "ann"]


@pytest.fixture(params=["memory", "file"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Names:
    """TEXTS as names, in memory or in a mapped file, gathered from blocks, one of which is a slice."""
    if request.param == "file":
        monkeypatch.setattr(large_arrays, "KEPT_BYTES", 1)
    gathered = GatheredNames()
    gathered.append(TEXTS[:2])
    gathered.append([])
    gathered.append(pa.array(["left out", *TEXTS[2:6], "left out"]).slice(1, 4))
    gathered.append(Names(TEXTS[6:]).packed)
    return Names(gathered)


def test_they_are_the_strings_that_were_given(names: Names) -> None:
    assert names == TEXTS == list(names)
    assert names == tuple(TEXTS)
    assert tuple(TEXTS) == names
    assert names == Names(TEXTS)
    assert names != [*TEXTS, "more"]
    assert names != ["Ann", *TEXTS[1:]]
    assert names != "".join(TEXTS)
    assert [names[row] for row in range(-1, 3)] == ["ann", "ann", "", "bob"]
    assert names[2:4] == ["bob", "ann"]
    assert list(names[2:4]) == ["bob", "ann"]
    assert Names(names).packed is names.packed
    assert len({names, Names(TEXTS)}) == 1
    assert copy.deepcopy(names[1:3]) == ["", "bob"]
    assert not Names()


@pytest.mark.parametrize("rows", [[], [2, 3, 4], [4, 0, 0], [6]])
def test_those_of_some_rows_are_taken_in_their_order(names: Names, rows: list[int]) -> None:
    assert names.take(np.array(rows, dtype=np.int64)) == [TEXTS[row] for row in rows]


def test_a_name_that_stood_before_is_repeated(names: Names) -> None:
    assert names.repeated().tolist() == [3, 5, 6]
    assert names[:3].repeated().tolist() == []
    assert names.numbered().tolist() == [0, 1, 2, 0, 3, 2, 0]
    assert names.num_distinct == 4


def test_names_that_share_a_hash_are_told_apart(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_arrays, "hash", lambda _: 0, raising=False)
    assert names.repeated().tolist() == [3, 5, 6]


def test_more_names_than_a_block_holds() -> None:
    texts = [f"record-{number}" for number in range(70_000)]
    assert Names(texts) == texts
    assert len(Names(texts + texts[-2:]).repeated()) == 2
