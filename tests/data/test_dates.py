"""Cells of a declared date: a year or an age where they are one, refused with the reason where they are not."""

from __future__ import annotations

import datetime
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from fairpate import load_data
from fairpate.data import DataError, columns, tables
from fairpate.data.dataset import DataSettingsError
from fairpate.data.from_arrays import declared_records

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

ON = datetime.date(2025, 2, 28)
AGE = {"date": "age", "age_on": str(ON), "bounds": [0, 110]}
YEAR = {"date": "year", "bounds": [1920, 2019]}
DMY, SHORT = {"date_format": "%d.%m.%Y"}, {"date_format": "%d.%m.%y"}


def clinic(born: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "name": "clinic",
        "files": {"private": "private.csv"},
        "label": {"column": "y", "classes": ["no", "yes"]},
        "group": {"column": "sex", "values": ["F", "M"]},
        "features": {"born": born},
    } | others


def rows(born: Any) -> dict[str, Any]:
    """Records with the cells ``born``, a multiple of four."""
    return {"born": born, "sex": ["F", "M"] * (len(born) // 2), "y": ["no", "no", "yes", "yes"] * (len(born) // 4)}


def numbers_of(cell: str, born: dict[str, Any]) -> float:
    """The year or age that a cell becomes."""
    low, high = born["bounds"]
    x = load_data(clinic(born), private=rows([cell] * 4)).private.x
    return float(x[0, 0]) * (high - low) + low


@pytest.mark.parametrize(
    ("cell", "born", "expected"),
    [
        ("1990-02-28", AGE, 35),
        ("1990-03-01", AGE, 34),
        ("2025-02-28", AGE, 0),
        ("1914-03-01", AGE, 110),
        ("1903-02-28", AGE, 110),  # 122 years: clipped
        # Nobody is a year older before the first of March of a year without a 29th of February.
        ("2000-02-29", AGE, 24),
        ("1990-02-28 23:59:59", AGE, 35),
        ("1990-02-28T00:30:00.000+02:00", AGE, 35),
        ("1990-02-28 00:30:00Z", AGE, 35),
        ("28.02.1990", AGE | DMY, 35),
        ("1.3.1990", AGE | DMY, 34),
        ("01.03.31", AGE | SHORT, 93),
        ("01.03.69", AGE | SHORT, 55),
        ("28.02.25", AGE | SHORT, 0),
        ("01.03.25", AGE | SHORT, 99),
        ("29.02.00", AGE | SHORT, 24),
        ("19900228", AGE | {"date_format": "%Y%m%d"}, 35),
        ("28Feb1990", AGE | {"date_format": "%d%b%Y"}, 35),
        ("02/28/90", AGE | {"date_format": "%D"}, 35),
        ("02/1990", AGE | {"date_format": "%m/%Y"}, 35),
        ("1988-366", AGE | {"date_format": "%Y-%j"}, 36),
        ("2027-01-01", AGE | {"bounds": [-10, 10]}, -2),
        ("1800-01-01", AGE | {"bounds": [0, 300]}, 225),
        ("1958-12-31", YEAR, 1958),
        ("31.12.18", YEAR | SHORT, 2018),
        ("31.12.20", YEAR | SHORT, 1920),
        ("1958", YEAR | {"date_format": "%Y"}, 1958),
        ("1850-01-01", YEAR, 1920),  # clipped
    ],
)
def test_a_date_is_its_year_or_an_age(cell: str, born: dict[str, Any], expected: float) -> None:
    assert numbers_of(cell, born) == pytest.approx(expected, abs=1e-4)


NO_DAY = "a day of the calendar, written as"
NUMBER = "not a number"


@pytest.mark.parametrize(
    ("cell", "born", "words"),
    [
        ("31.02.1990", AGE | DMY, f"{NO_DAY} %d.%m.%Y"),
        ("30.02.2000", YEAR | DMY, f"{NO_DAY} %d.%m.%Y"),
        ("31.04.1990", AGE | DMY, NO_DAY),
        ("29.02.1990", AGE | DMY, NO_DAY),
        ("29.02.1900", YEAR | {"bounds": [1900, 1999]} | DMY, NO_DAY),
        ("00.00.1990", AGE | DMY, NO_DAY),
        ("1990-02-31", AGE, f"{NO_DAY} %Y-%m-%d"),
        ("1990-13-01", AGE, NO_DAY),
        ("0000-00-00", AGE, NO_DAY),
        ("1990-02-28x", AGE, NO_DAY),
        ("1990-02-28 or so", AGE, NO_DAY),
        ("1990-02-28 25:00", AGE, NO_DAY),
        ("1990-02-28 00:61", AGE, NO_DAY),
        ("28.02.1990", AGE, NO_DAY),
        ("28.02.90", AGE | DMY, NO_DAY),
        ("28.02.0090", AGE | DMY, "a date at most 122 years before 2025-02-28"),
        ("28.02.1990 x", AGE | DMY, NO_DAY),
        ("28.02.1990", AGE | SHORT, NO_DAY),
        ("29.02.23", AGE | SHORT, NO_DAY),  # neither 2023 nor 1923
        ("2031-01-01", AGE, "a date up to 2025-02-28"),
        ("2025-03-01", AGE, "a date up to 2025-02-28"),
        ("9999-12-31", AGE, "a date up to 2025-02-28"),
        ("0001-01-01", AGE, "a date at most 122 years before 2025-02-28"),
        ("1900-01-01", AGE, "a date at most 122 years before"),
        ("2036-01-01", AGE | {"bounds": [-10, 10]}, "a date up to"),
        ("31.12.50", {"date": "year", "bounds": [1960, 2019]} | SHORT, "a day of a year within the bounds"),
        ("33000", AGE, f"{NUMBER}|spreadsheet"),
        ("44197.5", AGE, f"{NUMBER}|spreadsheet"),
        ("33000", YEAR | DMY, f"{NUMBER}|spreadsheet"),
        ("1958", AGE, f"{NUMBER}|declare years without `date`"),
        ("1958", YEAR, f"{NUMBER}|declare years without `date`"),
        ("9122019", AGE | DMY, f"{NUMBER}|points"),
        ("19900228", AGE, NUMBER),
        # 1.12. or 11.2.? The zero in front is lost.
        ("1122019", AGE | {"date_format": "%d%m%Y"}, f"{NUMBER}|zeros"),
        ("May 1990", AGE, NO_DAY),
        ("1989-366", AGE | {"date_format": "%Y-%j"}, NO_DAY),
    ],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_what_is_no_date_is_refused_with_its_kind(
    cell: str, born: dict[str, Any], words: str, is_given: bool, tmp_path: Path
) -> None:
    frame = pd.DataFrame(rows(["1990-02-28", cell, cell, ""] if born is AGE else [cell] * 4))
    frame.to_csv(tmp_path / "private.csv", index=False)
    given = {"private": frame} if is_given else {"data_dir": tmp_path}
    with pytest.raises(DataError) as error:
        load_data(clinic(born | {"missing": born["bounds"][1]}), **given)
    (line,) = str(error.value).splitlines()
    assert "column born: expected a" in line
    assert f"got {cell!r} in {2 if born is AGE else 4} rows; " in line
    for part in words.split("|"):
        assert part in line


def test_an_unknown_date_is_missing_and_no_age_is_one() -> None:
    born = AGE | {"missing": 50, "unknown": ["99", "00.00.0000", "1900-01-01"]}
    cells = ["99", "00.00.0000", "1900-01-01", "", "1925-03-01", "1926-01-01", "1900-01-01 00:00:00", "2000-01-01"]
    private = load_data(clinic(born), private=rows(cells)).private
    found = {(round(float(age) * 110), bool(lacks)) for age, lacks in private.x}
    # Born on 1926-01-01 one is 99 years old, which the cell `99` does not mean.
    assert found == {(50, True), (99, False), (25, False)}


def test_a_row_that_is_left_out_may_have_any_date() -> None:
    table = rows(["1990-02-31", "1990-02-28", "1990-02-28", "1990-02-28"] * 2) | {"seen": ["x", *["y"] * 7]}
    table["born"][4] = "1990-02-28"
    kept = clinic(AGE, keep=[{"column": "seen", "other_than": "x"}])
    assert len(load_data(kept, private=table).private) == 7
    with pytest.raises(DataError, match="got '1990-02-31' in 1 row"):
        load_data(clinic(AGE), private=table)


def test_groups_and_rules_by_age_read_the_same_dates() -> None:
    by_age = clinic(AGE, group={"column": "born", "values": {"young": {"below": 30}, "old": {"at_least": 30}}})
    by_age["features"] |= {"sex": {"categories": ["F", "M"]}}
    table = rows(["1990-02-28", "2000-01-01", "1990-02-28", "2000-01-01"])
    assert load_data(by_age, private=table).private.z.tolist() == [1, 0, 1, 0]
    for cell in ("1990-02-31", "2026-01-01", "33000"):
        with pytest.raises(DataError, match=f"column born: expected a .*, got '{cell}' in 1 row"):
            load_data(by_age, private=table | {"born": [cell, *table["born"][1:]]})
    with pytest.raises(DataError, match=r"column born: expected a date .*, got '1958' in 1 row"):
        load_data(
            clinic(AGE, keep=[{"column": "born", "at_least": 18}]),
            private=table | {"born": ["1958", *table["born"][1:]]},
        )


DAYS = [datetime.date(1990, 2, 28) + datetime.timedelta(days=397 * place) for place in range(28)]
DAYS[5] = datetime.date(2000, 2, 29)
AGES = [ON.year - day.year - ((day.month, day.day) > (ON.month, ON.day)) for day in DAYS]
FORMS: dict[str, Any] = {
    "text": pa.array([f"{day:%d.%m.%Y}" for day in DAYS]),
    "days": pa.array(DAYS, pa.date32()),
    "milliseconds": pa.array(DAYS, pa.date64()),
    "moments": pa.array([datetime.datetime(*day.timetuple()[:3], 23, 59) for day in DAYS], pa.timestamp("ns")),
    "moments in seconds": pa.array([datetime.datetime(*day.timetuple()[:3]) for day in DAYS], pa.timestamp("s")),
    # Midnight there is the evening before in UTC.
    "moments in a zone": pa.array(pd.to_datetime(DAYS).tz_localize("Europe/Berlin")),
    "categories": pa.array([f"{day:%d.%m.%Y}" for day in DAYS]).dictionary_encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_dates_mean_the_same_with_every_type_and_in_every_file(form: str, tmp_path: Path) -> None:
    table = pa.table(rows(FORMS[form]))
    pq.write_table(table, tmp_path / "t.parquet")
    feather.write_feather(table, tmp_path / "t.feather")
    declared = clinic(AGE | DMY)
    for name in ("t.parquet", "t.feather"):
        x = load_data(declared | {"files": {"private": name}}, data_dir=tmp_path).private.x
        np.testing.assert_allclose(x[:, 0].numpy() * 110, AGES, atol=1e-4)
    for given in (table, table.to_pandas()):
        np.testing.assert_allclose(load_data(declared, private=given).private.x[:, 0].numpy() * 110, AGES, atol=1e-4)
    np.testing.assert_allclose(declared_records(declared, table.to_pandas()).x[:, 0] * 110, AGES, atol=1e-4)
    if form not in ("text", "categories"):  # as pandas writes them
        table.to_pandas().to_csv(tmp_path / "t.csv", index=False)
        x = load_data(clinic(AGE, files={"private": "t.csv"}), data_dir=tmp_path).private.x
        np.testing.assert_allclose(x[:, 0].numpy() * 110, AGES, atol=1e-4)


def test_a_typed_date_that_no_calendar_has_is_refused(tmp_path: Path) -> None:
    for kind, value in ((pa.timestamp("s"), 2**60), (pa.date32(), 2**31 - 1), (pa.date64(), 2**62)):
        stored = pa.array([value] * 4, pa.int32() if kind == pa.date32() else pa.int64()).view(kind)
        feather.write_feather(pa.table(rows(stored)), tmp_path / "t.feather")
        with pytest.raises(DataError, match=r"t\.feather: column born: expected a day of the calendar"):
            load_data(clinic(AGE, files={"private": "t.feather"}), data_dir=tmp_path)


@pytest.mark.parametrize(
    ("born", "words"),
    [
        (AGE | {"date_format": "dd.mm.yyyy"}, "`date_format` with the year, and for an age with the month"),
        (AGE | {"date_format": "%d.%m."}, "got '%d.%m.'"),
        (AGE | {"date_format": "%Y"}, "for an age with the month"),
        (AGE | {"date_format": "%-d.%m.%Y"}, "%d and %m also read one digit"),
        (AGE | {"date_format": "%d.%m.%Y%"}, "such as %d.%m.%Y"),
        (YEAR | {"bounds": [1920, 2020]} | SHORT, "bounds of less than 100 years with the two digits of %y"),
    ],
)
def test_a_format_without_what_is_needed_is_refused_in_the_declaration(born: dict[str, Any], words: str) -> None:
    with pytest.raises(DataSettingsError, match=r"features\.born: ") as error:
        load_data(clinic(born), private=rows(["1.1.1990"] * 4))
    assert words in str(error.value)


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%Y-%m-%d", "%m/%d/%y", "%Y%m%d"])
def test_every_day_is_one_exactly_where_the_calendar_of_python_has_it(form: str) -> None:
    parts = itertools.product((1900, 1999, 2000, 2024), range(14), range(33))
    fields = [{"%Y": f"{y:04}", "%y": f"{y % 100:02}", "%m": f"{m:02}", "%d": f"{d:02}"} for y, m, d in parts]
    cells = [re.sub("%.", lambda found: own[found[0]], form) for own in fields]  # noqa: B023
    expected = []
    for own in fields:
        # Of two digits, the year is one of the hundred before the day.
        year = 2000 if form == "%m/%d/%y" and own["%Y"] == "1900" else int(own["%Y"])
        try:
            expected.append(str(2024 - datetime.date(year, int(own["%m"]), int(own["%d"])).year))
        except ValueError:
            expected.append("refused")
    feature = columns.Feature(bounds=(0, 150), date="age", age_on=datetime.date(2024, 12, 31), date_format=form)
    found = tables.numbers_of_dates(pa.array(cells), feature).to_pylist()
    assert [each if each.isdigit() else "refused" for each in found] == expected


def test_a_date_names_no_person() -> None:
    """Everybody born in one year would be one person."""
    with pytest.raises(DataSettingsError, match="person: born is a date, which becomes a year or an age"):
        load_data(clinic(AGE, person="born"), private=rows(["1990-02-28"] * 4))
