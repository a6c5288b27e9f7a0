"""Hospitals with a declaration, a public pool, and private records of their own; and the same records in one place."""

from __future__ import annotations

import random
from pathlib import Path

DECLARATION = """\
name: hospitals
task: readmitted within 30 days
rows: 3000
files: {private: patients.csv, public: pool.csv, test: held_out.csv}
label: {column: readmitted, classes: {stays well: "no", comes back: "yes"}}
group: {column: sex, values: {female: F, male: M}}
features:
  age: {bounds: [0, 110]}
  weight: {bounds: [20, 250]}
  ward: {categories: [A, B, C]}
identity: {key: [visit]}
"""
_HEADER = "visit,patient,age,weight,ward,sex"


def write(path: Path, first: int, count: int, *, label: bool = True) -> None:
    """Visits whose label age tells; every visit is a function of its number."""
    lines = [_HEADER + ",readmitted" * label]
    for visit in range(first, first + count):
        draws = random.Random(visit)
        age = draws.randint(0, 99)
        row = [visit, f"p{visit // 2}", age, draws.randint(40, 120), draws.choice("ABC"), draws.choice("FM")]
        row += [("no", "yes")[age + draws.gauss(0, 10) > 50]] if label else []
        lines.append(",".join(map(str, row)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def folder(path: Path, records: range | None, *, person: bool = False, pool: bool = True) -> Path:
    """The files of one party: a site's private records, or the coordinator's test records for ``records`` None."""
    path.mkdir()
    declared = DECLARATION if pool else DECLARATION.replace(" public: pool.csv,", "")
    (path / "hospitals.yaml").write_text(declared + "person: patient\n" * person, encoding="utf-8")
    if pool:
        write(path / "pool.csv", 100_000, 300, label=False)
    if records is None:
        write(path / "held_out.csv", 200_000, 400)
    else:
        write(path / "patients.csv", records.start, len(records))
    return path / "hospitals.yaml"
