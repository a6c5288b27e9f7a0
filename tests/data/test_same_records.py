"""Every table under every option gives the records that it always gave, bit for bit.

`same_records.json` holds a digest of each; `python tests/data/test_same_records.py` writes it anew, where a change of
records is meant. The two data sets without pinned files are read from made ones in the publishers' layouts.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairpate.data import REGISTRY
from fairpate.data.dataset import DatasetEntry, LoadedRecords, Request, divide

KEPT = Path(__file__).with_name("same_records.json")
MADE = ("retired_adult", "folktables")
RETIRED: dict[str, list[str]] = {
    "hours-per-week": ["1", "40", "99"],
    "age": ["17", "38", "90"],
    "capital-gain": ["0", "2174", "99999"],
    "capital-loss": ["0", "1902"],
    "workclass": ["?", "Private", "Federal-gov", "Without-pay"],
    "education": ["Preschool", "HS-grad", "Doctorate"],
    "education-num": ["1", "9", "16"],
    "marital-status": ["Divorced", "Married-AF-spouse"],
    "relationship": ["Wife", "Own-child", "Other-relative"],
    "race": ["White", "Black", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other"],
    "gender": ["Male", "Female"],
    "native-country": ["?", "United-States", "Holand-Netherlands", "Trinadad&Tobago"],
    "income": ["100", "50000", "50001", "200000"],
    "occupation": ["?", "Sales", "Armed-Forces"],
}
CENSUS: dict[str, list[str]] = {
    "RT": ["P"],
    "PWGTP": ["00075", "9", "00000"],
    "AGEP": ["16", "17", "40", "99"],
    "COW": ["1", "9"],
    "SCHL": ["01", "1", "16", "24"],
    "MAR": ["1", "5"],
    "OCCP": ["0010", "430", "4110", "9830", "9920"],
    "POBP": ["001", "59", "60", "303", "554"],
    "RELP": ["00", "0", "05", "17"],
    "WKHP": ["", "00", "1", "40", "99"],
    "SEX": ["1", "2"],
    "RAC1P": ["1", "2", "3", "4", "5", "6", "7", "8", "9"],
    "PINCP": ["", "0000100", "101", "50000", "0050001"],
}
STATES = ("AL", "CA", "PR")


def cases(entry: DatasetEntry) -> Iterator[dict[str, Any]]:
    """Every combination of option values; of the states with files of one layout, those that were made."""
    values = {name: option.allowed for name, option in entry.options.items()}
    if "state" in values:
        values["state"] = STATES
    names = sorted(values)
    for choice in itertools.product(*(values[name] for name in names)):
        yield dict(zip(names, choice, strict=True))


def make_files(folder: Path) -> None:
    """Small files of the data sets whose publishers' bytes are not at hand."""
    draws = random.Random(0)
    _write(folder / "retired_adult" / "adult_reconstruction.csv", _rows(RETIRED, 400, draws))
    for number in ("01", "06", "72"):
        rows = _rows(CENSUS, 900, draws)
        for place, row in enumerate(rows):
            row |= {"SERIALNO": f"2018HU{place // 3:05d}", "SPORDER": f"{1 + place % 3:02d}"}
        _write(folder / "folktables" / f"psam_p{number}.csv", rows)


def _rows(columns: dict[str, list[str]], count: int, draws: random.Random) -> list[dict[str, str]]:
    return [{name: draws.choice(values) for name, values in columns.items()} for _ in range(count)]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def digests(entry: DatasetEntry, options: dict[str, Any], folder: Path) -> dict[str, str]:
    """A short sha256 of each part of what is read, and of the division."""
    found = entry.load(Request(data_dir=folder, seed=0, options=entry.complete_options(options)))
    words = (found.kind, found.label_names, found.group_names, found.sensitive_attribute, found.notes)
    split = found.records
    return {
        "words": _digest(words),
        "features": _digest(found.feature_names),
        "x": _digest((split.x.dtype, tuple(split.x.shape)), split.x.numpy().tobytes()),
        "y": _digest(split.y.dtype, split.y.numpy().tobytes()),
        "z": _digest(split.z.dtype, split.z.numpy().tobytes()),
        "record_id": _digest(tuple(split.record_id)),
        "unit_id": _digest(tuple(split.unit_id)),
        "persons": _digest((found.person_ids and tuple(found.person_ids), found.origins)),
        "splits": _digest({name: tuple(part.record_id) for name, part in _division(entry, found).items()}),
    }


def _division(entry: DatasetEntry, found: LoadedRecords) -> dict[str, Any]:
    sizes = {
        "public": min(entry.num_public, len(found.records) // 4),
        "validation": min(entry.num_validation, len(found.records) // 8),
        "test": len(found.records) // 8,
    }
    if entry.name not in MADE:
        has_own = {"test", "held_out"} & set(found.origins or ())
        sizes["test"] = None if has_own else entry.num_test or entry.rows // 4
    return divide(found, sizes, seed=0)


def _digest(value: object, content: bytes = b"") -> str:
    return hashlib.sha256(repr(value).encode() + content).hexdigest()[:16]


def facts(entry: DatasetEntry) -> dict[str, str]:
    """What is known of a table before a file is opened, but for the words of its listing."""
    options = {name: vars(option) for name, option in sorted(entry.options.items())}
    sizes = (entry.rows, entry.num_public, entry.num_validation, entry.num_test)
    needed = [
        [(file.path, file.sha256, file.url, file.member, file.manual, file.note) for file in files]
        for choice in cases(entry)
        for files in (entry.needed_files(choice), *(file.alternatives for file in entry.needed_files(choice)))
    ]
    return {
        "words": _digest((entry.task, entry.publisher, entry.address, entry.licence)),
        "options": _digest(options),
        "sizes": _digest(sizes),
        "files": _digest(needed),
    }


def _key(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_files(folder)
    return folder


KEPT_DIGESTS: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}


# The two largest are read by tests/data/test_published_files.py too.
CHOSEN: dict[str, Any] = {"retired_adult": ()} | dict.fromkeys(("heart", "bank"), pytest.mark.campaign)


def one_at_a_time(entry: DatasetEntry) -> list[dict[str, Any]]:
    """The first combination, and those that differ from it in one option."""
    first, *others = cases(entry)
    return [first, *(each for each in others if sum(each[name] != first[name] for name in each) == 1)]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [pytest.param(name, cases, marks=pytest.mark.campaign, id=f"{name}-all") for name in KEPT_DIGESTS]
    + [pytest.param(name, one_at_a_time, marks=CHOSEN.get(name, pytest.mark.slow), id=name) for name in KEPT_DIGESTS],
)
def test_records_are_what_they_were(
    name: str, chosen: Callable[[DatasetEntry], Iterable[dict[str, Any]]], made: Path, request: pytest.FixtureRequest
) -> None:
    entry = REGISTRY[name]
    folder = made if name in MADE else request.getfixturevalue("data_dir")
    kept = KEPT_DIGESTS[name]["records"]
    assert kept.keys() == {_key(options) for options in cases(entry)}
    for options in chosen(entry):
        assert digests(entry, options, folder) == kept[_key(options)], options


@pytest.mark.parametrize("name", KEPT_DIGESTS)
def test_what_is_known_beforehand_is_what_it_was(name: str) -> None:
    assert facts(REGISTRY[name]) == KEPT_DIGESTS[name]["facts"]


def main() -> None:
    """Write the digests of this checkout."""
    real = Path(os.environ["FAIRPATE_DATA"])
    kept = {}
    with tempfile.TemporaryDirectory() as scratch:
        make_files(Path(scratch))
        for name, entry in sorted(REGISTRY.items()):
            if entry.kind == "tabular":
                folder = Path(scratch) if name in MADE else real
                records = {_key(options): digests(entry, options, folder) for options in cases(entry)}
                kept[name] = {"facts": facts(entry), "records": records}
                sys.stderr.write(f"{name}: {len(records)} combinations of options\n")
    lines = []
    for name, each in kept.items():
        parts = ",\n".join(f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in each["records"].items())
        lines.append(
            f' {json.dumps(name)}: {{\n  "facts": {json.dumps(each["facts"])},\n  "records": {{\n{parts}\n  }}\n }}'
        )
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
