"""Without test records a run ends well, and no page claims an accuracy or a gap."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fairpate.releases.directory import read_json
from fairpate.run.folder import open_run_directory

pytestmark = pytest.mark.usefixtures("light_runs")

DECLARATION = """
name: clinic
files: {private: private.csv, public: public.csv}
label: {column: ill, classes: [no, yes]}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100]}
  weight: {bounds: [30, 200]}
rows: 600
"""
METHODS = {
    "weighted_votes": ["target.accounting=rdp", "noise=seeded"],
    "fairpate": ["teachers.num_teachers=20", "student.idp3={max_disparity: 0.2, min_count: 5}", "ray.num_actors=0"],
    "dp_sgd": ["dp_sgd.epochs=1", "target.accounting=rdp", "noise=seeded"],
}


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clinic")
    draws = random.Random(0)
    for name, count in (("private", 600), ("public", 150)):
        rows = [(draws.randint(0, 100), draws.randint(40, 120), draws.choice("FM")) for _ in range(count)]
        label = [f",{'yes' if age > 50 else 'no'}" if name == "private" else "" for age, _, _ in rows]
        lines = ["age,weight,sex" + ",ill" * (name == "private")]
        lines += [f"{age},{weight},{sex}{ill}" for (age, weight, sex), ill in zip(rows, label, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_claimed(method, clinic, tmp_path, fairpate):
    settings = [word for value in METHODS[method] for word in ("--set", value)]
    data = ["--data", str(clinic / "clinic.yaml"), "--epsilon", "4", "--out", str(tmp_path / "run")]
    code, *said = fairpate("run", "--method", method, *data, *settings)
    assert code == 0, said
    assert "unknown: there were no test records" in "".join(said)
    assert fairpate("card", str(tmp_path / "run"))[0] == 0
    run, _ = open_run_directory(tmp_path / "run")
    record = read_json(run.record)
    assert (record["accuracy"], record["coverage"], record["disparity"], record["degenerate"]) == (None,) * 3 + ([],)
    for page in ("report.html", "card.html"):
        text = (run.public / page).read_text(encoding="utf-8")
        assert "no test records" in text
        assert "Degenerate" not in text
        assert "Equalized odds" not in text
