"""A group of few test records is in no verdict, ranking or number that a run publishes, nor in its bundle."""

from __future__ import annotations

import json
import math
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairpate.releases.directory import read_json
from fairpate.report.frontier import Row
from fairpate.report.frontier_page import FrontierReport, frontier_report
from fairpate.run.folder import ShownRun, open_run_directory
from fairpate.types import RunRecord, restored
from student.server import StudentReplica

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import results

pytestmark = pytest.mark.usefixtures("light_runs")

CHILDREN = 4
DECLARATION = """
name: clinic
files: {private: private.csv, public: public.csv, test: test.csv}
label: {column: ill, classes: [no, yes]}
group: {column: who, values: [women, men, children]}
features:
  age: {bounds: [0, 100]}
  weight: {bounds: [30, 200]}
rows: 900
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 304 test records 4 are children, and the model says yes to all of them: they are old."""
    folder = tmp_path_factory.mktemp("clinic")
    random = np.random.default_rng(0)
    for name, count in (("private", 900), ("public", 200), ("test", 304)):
        rows = []
        for place in range(count):
            who = "children" if place < (CHILDREN if name == "test" else count // 3) else ("women", "men")[place % 2]
            age = 90 if who == "children" and name == "test" else int(random.integers(0, 100))
            ill = "yes" if age + random.normal(0, 5) > 50 else "no"
            rows.append([str(age), str(int(random.integers(40, 120))), who, *([] if name == "public" else [ill])])
        head = ["age", "weight", "who", *([] if name == "public" else ["ill"])]
        (folder / f"{name}.csv").write_text("\n".join(map(",".join, [head, *rows])) + "\n", encoding="utf-8")
    (folder / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    return folder


def told(values: Any, name: str = "children") -> list[Any]:
    """Everything that a JSON file has of an entry with this name."""
    if isinstance(values, dict):
        found = [values] if values.get("name") == name else []
        return found + [each for value in values.values() for each in told(value, name)]
    return [each for value in values for each in told(value, name)] if isinstance(values, list) else []


def test_four_children_are_in_no_number_that_is_published(clinic, tmp_path, fairpate):
    out = tmp_path / "run"
    asked = ["--method", "weighted_votes", "--data", str(clinic / "clinic.yaml"), "--epsilon", "8", "--yes"]
    code, *said = fairpate("run", *asked, "--out", str(out))
    assert code == 0, said
    assert "gaps leave out children: too few answered test records" in "".join(said)
    assert fairpate("card", str(out))[0] == 0
    run, _ = open_run_directory(out)
    record, metrics, card = (read_json(path) for path in (run.record, run.metrics, run.card))
    # What is left out is 10 records, whatever the number of children.
    assert metrics["num_records"] == 304 - 10
    unknown = dict.fromkeys(("num_records", "num_answered", "coverage", "accuracy"))
    assert told(metrics) == told(card) == [{"name": "children", **unknown}]
    assert metrics["confusion_GYC"][2] is None
    assert set(metrics["rates_GC"][2]) == {None}
    assert record["unmeasured_groups"] == ["children"]
    assert record["disparity"] == metrics["gaps"]["dp_one_vs_rest"]["value"] < 0.5
    assert "; not known for children. " in card["verdict"]
    for page in ("report.html", "card.html"):
        text = (run.public / page).read_text(encoding="utf-8")
        assert "not known for children" in text
        assert "Confusion: children" not in text
    assert fairpate("bundle", str(out))[0] == 0
    (bundle,) = tmp_path.rglob("*.zip")
    with zipfile.ZipFile(bundle) as packed:
        for name in ("metrics.json", "card.json"):
            assert told(json.loads(packed.read(name))) == [{"name": "children", **unknown}]


def test_a_finished_run_is_measured_again_under_another_least_size(clinic, tmp_path, fairpate):
    """The size decides what is shown and nothing of the model, which is not trained again."""
    out = tmp_path / "run"
    asked = ["run", "--method", "weighted_votes", "--data", str(clinic / "clinic.yaml"), "--epsilon", "8", "--yes"]
    asked += ["--out", str(out)]
    assert fairpate(*asked)[0] == 0
    run, _ = open_run_directory(out)
    model = run.student.read_bytes()
    assert fairpate(*asked, "--set", "evaluation.least_cell=4")[0] == 0
    assert run.student.read_bytes() == model
    assert read_json(run.metrics)["num_records"] == 304
    (children,) = told(read_json(run.metrics))
    assert (children["num_records"], children["num_answered"]) == (4, 4)
    assert open_run_directory(out)[1].evaluation.least_cell == 4


@pytest.mark.parametrize("hidden", [[], ["dp_one_vs_rest", "false_negative_rate"]])
def test_a_table_of_results_is_made_of_runs_that_hide_cells(clinic, tmp_path, fairpate, hidden):
    out = tmp_path / "run"
    asked = ["run", "--method", "weighted_votes", "--data", str(clinic / "clinic.yaml"), "--epsilon", "8", "--yes"]
    assert fairpate(*asked, "--out", str(out))[0] == 0
    run, config = open_run_directory(out)
    metrics = read_json(run.metrics)
    for name in hidden:
        metrics["gaps"][name]["value"] = None
    run.metrics.write_text(json.dumps(metrics), encoding="utf-8")
    run.labels.unlink(missing_ok=True)
    found = results._numbers(run, config)
    assert None in metrics["confusion_GYC"]
    assert [math.isnan(found[name]) for name in ("disparity", "fnr", "accuracy")] == [bool(hidden), bool(hidden), False]


HIDDEN = {
    # By group, true label and prediction: few errors of two groups, and children of whom nothing is shown.
    "one": [[[87, 2], [7, 81]], [[78, 2], [5, 78]], [[1, 0], [0, 3]]],
    "other": [[[90, 3], [4, 80]], [[75, 1], [8, 79]], [[0, 2], [2, 0]]],
    # Other answers are shown: the comparison below is not of files without numbers.
    "shown": [[[67, 22], [7, 81]], [[78, 2], [5, 78]], [[1, 0], [0, 3]]],
}


def write_tests(table: Any, path: Path) -> None:
    """Write as many test records as ``table`` says, by group and prediction: the model says yes to the old."""
    rows, counts = ["age,weight,who,ill"], np.array(table)
    for group, said, label in np.ndindex(counts.shape):
        row = ",".join((("10", "90")[said], "70", ("women", "men", "children")[group], ("no", "yes")[label]))
        rows += [row] * int(counts[group, label, said])
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def page_of_a_comparison(out: Path) -> str:
    """The public page of a comparison of which the run in ``out`` is all."""
    record = restored(RunRecord, read_json(out / "public" / "record.json"))
    told = {name: getattr(record, name) for name in ("method", "data", "seed", "config")}
    row = Row(digest="0", command="fairpate run", minutes=1.0, record=record, **told)
    return frontier_report(FrontierReport(title="Comparison", rows=[row]))


def test_test_sets_that_differ_in_hidden_cells_alone_give_the_same_files(clinic, tmp_path, fairpate):
    """Every byte under ``public/`` (pages with the data of their charts, digests too), of the bundle and of a notebook,
    and every line that a command prints."""
    out, table = tmp_path / "run", clinic / "test.csv"
    before, found = table.read_bytes(), dict[str, dict[str, bytes]]()
    asked = ["run", "--method", "weighted_votes", "--data", str(clinic / "clinic.yaml"), "--epsilon", "8", "--yes"]
    forms = ("egress", "nist", "registry")
    try:
        for name, counts in HIDDEN.items():
            write_tests(counts, table)
            # A finished run measures again what has another least size.
            assert fairpate(*asked, "--out", out, "--set", "evaluation.least_cell=9")[0] == 0
            seen = found[name] = {}
            commands = [["dossier", out, "--for", form] for form in forms]
            for command in ([*asked, "--out", out], ["card", out], ["bundle", out], *commands):
                code, printed, said = fairpate(*command)
                assert code == 0, said
                seen[f"printed by {' '.join(map(str, command))}"] = _without_times(printed + said)
            public = [each for each in (out / "public").rglob("*") if each.is_file()]
            seen |= {str(each.relative_to(out)): each.read_bytes() for each in public}
            seen["in a notebook"] = ShownRun(root=out)._repr_html_().encode()
            seen["page of a comparison"] = page_of_a_comparison(out).encode()
            replica = StudentReplica(out / "public" / "student.safetensors", None)
            seen["service of the student"] = json.dumps(replica.describe()).encode()
            (bundle,) = tmp_path.rglob("*.zip")
            with zipfile.ZipFile(bundle) as packed:
                seen |= {f"bundle: {each}": packed.read(each) for each in packed.namelist()}
            bundle.unlink()
    finally:
        table.write_bytes(before)
    one, other, shown = found.values()
    assert set(one) == set(other) == set(shown) and sum(name.startswith("printed by dossier") for name in one) == 3
    assert {name for name in one if one[name] != other[name]} == set()
    assert {name for name in one if one[name] != shown[name]} >= {
        *("public/metrics.json", "public/report.html", "public/record.json", "public/card.html", "in a notebook"),
        "page of a comparison",
        *("bundle: card.json", "bundle: metrics.json", "bundle: record.json"),
    }


def _without_times(text: str) -> bytes:
    """What a terminal shows of how long a stage took is no number of the test records."""
    return re.sub(r"\d+(\.\d+)? (s|ms|min)\b", "", text).encode()
