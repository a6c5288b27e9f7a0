"""A run's student predicts raw rows where neither this package nor torch is: with the snippet of the documents."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from small_runs import FILES

import student.student
from fairpate.config import DataConfig, EmbeddingConfig
from fairpate.data import Dataset, embedding, load_data
from fairpate.data.dataset import Split
from fairpate.data.features import feature_names
from fairpate.data.registry import embedded
from fairpate.run import publication
from student.student import load_student

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("with_graphs"),
]
DECLARATION = """
name: visits
task: comes again
rows: 600
files: {records: visits.csv}
features:
  age: {bounds: [20, 60], missing: 45, unknown: ["?", "-9"]}
  bill: {bounds: [0, 5000], scale: log}
  ward: {categories: [A, B, C], aliases: {b: B}, missing: none, other: true}
  code: {bands: {few: 0, some: 10, many: 100}}
label: {column: again, classes: ["no", "yes"]}
groups: {sex: {values: [f, m]}}
num_public: 120
num_validation: 50
"""
FAST = [
    *(
        "data.embedding=null",
        "noise=seeded",
        "teachers.num_teachers=10",
        "teachers.fit.epochs=2",
        "aggregator.num_queries=60",
    ),
    *("aggregator.mechanism.threshold=0", "student.fit.epochs=5", "ray.num_actors=0"),
]
NO_PACKAGE = (
    "import sys\nfor name in ('fairpate', 'torch', 'student', 'aggregator', 'teachers'): sys.modules[name] = None\n"
)


def rows():
    rng = np.random.default_rng(0)
    for _ in range(600):
        age, bill = rng.integers(10, 80), round(float(rng.gamma(1.0, 900.0)), 2)
        ward, sex = rng.choice(["A", "B", "C", "b", "", "D"]), rng.choice(["f", "m"])
        again = "yes" if age + rng.normal(0, 5) > 45 else "no"
        yield {
            "age": str(rng.choice(["?", "-9", "-9.0", "-09"])) if rng.random() < 0.1 else str(age),
            "bill": str(bill),
            "ward": str(ward),
            "code": str(rng.integers(0, 300)),
            "again": again,
            "sex": str(sex),
        }


@pytest.fixture(scope="module")
def visits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("visits")
    (folder / "visits.yaml").write_text(DECLARATION, encoding="utf-8")
    made = list(rows())
    with (folder / "visits.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, made[0])
        writer.writeheader()
        writer.writerows(made)
    return folder / "visits.yaml", made


def run(fairpate, visits, out, *overrides, data=None):
    options = [part for override in (*FAST, *overrides) for part in ("--set", override)]
    code, output, errors = fairpate(
        "run",
        "--method",
        "pate",
        "--data",
        data or visits[0],
        "--set",
        "target.epsilon=8",
        *options,
        "--out",
        out,
        "--yes",
    )
    assert code == 0, errors
    return output, errors


def snippet():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if "onnxruntime" in block]
    return found


def predicted_elsewhere(folder, told, tmp_path):
    """Probabilities of ``told``, by a process in a folder with the two files alone that can import none of ours."""
    there = tmp_path / "elsewhere"
    there.mkdir()
    for name in ("model.onnx", "model.json"):
        shutil.copy(folder / "public" / name, there)
    program = f"{NO_PACKAGE}{snippet()}\nprint(json.dumps(predict(json.load(sys.stdin)).tolist()))"
    done = subprocess.run(  # noqa: S603 - our own snippet
        [sys.executable, "-c", program], input=json.dumps(told), cwd=there, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout))


def predicted_here(folder, told, monkeypatch):
    """The same in this process."""
    names = {}
    monkeypatch.chdir(folder / "public")
    exec(compile(snippet(), "docs/training.md", "exec"), names)  # noqa: S102 - our own snippet
    return names["predict"](told)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["data.embedding={}"]], ids=["columns", "embedding"])
def test_the_documents_snippet_predicts_raw_rows_without_this_package(fairpate, visits, tmp_path, overrides):
    run(fairpate, visits, tmp_path / "run", *overrides)
    # A record is known by the hash of its text, so raw rows are found by what they encode to.
    plain = load_data(DataConfig(name="visits", declaration=visits[0])).test
    by_features = {tuple(np.round(encoded(row), 6)): row for row in visits[1]}
    told = [by_features[tuple(np.round(x, 6))] for x in plain.x.double().numpy().tolist()]
    expected = load_student(tmp_path / "run/public/student.safetensors").probabilities(plain.x)
    found = predicted_elsewhere(tmp_path / "run", told, tmp_path)
    assert len(found) > 100
    assert found.std() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)


def encoded(row):
    """By hand: age with its flag, bill, five wards, three bands."""
    missing = row["age"] == "?" or float(row["age"]) == -9
    age = (45 - 20) / 40 if missing else min(max((float(row["age"]) - 20) / 40, 0), 1)
    bill = min(np.log1p(float(row["bill"])) / np.log1p(5000), 1)
    wards = [row["ward"] == "A", row["ward"] in ("B", "b"), row["ward"] == "C", row["ward"] == "", row["ward"] == "D"]
    code = float(row["code"])
    values = [age, missing, bill, *wards, code < 10, 10 <= code < 100, code >= 100]
    return np.float32(values).astype(float)


def test_the_description_names_classes_groups_and_the_state_of_the_reject_option(fairpate, visits, tmp_path):
    run(fairpate, visits, tmp_path / "run", "student.idp3={max_disparity: 0.1, min_count: 5}")
    assert {path.name for path in (tmp_path / "run/public").iterdir()} == FILES | {
        *("labels.parquet", "model.onnx", "model.json")
    }
    told = json.loads((tmp_path / "run/public/model.json").read_text(encoding="utf-8"))
    assert set(told) == {
        *("format", "sha256", "student_sha256", "opset", "inputs", "output", "classes", "label", "groups"),
        *("encoding", "reject_option", "least_confidence"),
    }
    assert told["classes"] == ["no", "yes"]
    assert told["groups"] == {"attribute": "sex", "names": ["f", "m"], "needed": True}
    assert [code["feature"] for code in told["encoding"]["features"]] == [
        *("age", "age=missing", "bill", "ward=A", "ward=B", "ward=C", "ward=none", "ward=other"),
        *("code=few", "code=some", "code=many"),
    ]
    assert told["encoding"]["features"][4]["values"] == ["B", "b"]
    assert told["reject_option"]["rule"] == {
        "max_disparity": 0.1,
        "min_count": 5,
        "cold_start": "group",
        "gap": "one_vs_rest",
    }
    assert told["reject_option"]["state"]["shape"] == [2, 2]


def test_pictures_are_read_as_bytes_and_a_second_command_writes_nothing_anew(fairpate, visits, tmp_path):
    run(fairpate, visits, tmp_path / "run", "student.model.name=logistic", data="color_digits")
    graph = tmp_path / "run/public/model.onnx"
    told = json.loads((tmp_path / "run/public/model.json").read_text(encoding="utf-8"))
    assert told["inputs"][0]["type"] == "uint8"
    before = graph.stat().st_mtime_ns
    assert fairpate("report", tmp_path / "run")[0] == 0
    assert graph.stat().st_mtime_ns == before
    graph.write_bytes(graph.read_bytes()[:-1])
    assert fairpate("report", tmp_path / "run")[0] == 0
    assert graph.stat().st_mtime_ns != before


@pytest.mark.slow
def test_pictures_go_through_the_embedding_inside_the_graph(fairpate, visits, tmp_path):
    # With the positions in a graph of neighbours too: tests/student/test_portable.py.
    run(fairpate, visits, tmp_path / "run", "data.embedding={graph_share: 0}", data="color_digits")
    held_out = load_data(DataConfig(name="color_digits")).test.x
    session = onnxruntime.InferenceSession((tmp_path / "run/public/model.onnx").read_bytes())
    (found,) = session.run(["probabilities"], {"records": held_out.numpy()})
    student = load_student(tmp_path / "run/public/student.safetensors")
    expected = student.probabilities(held_out)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert expected.std() > 0.01
    ahead = np.diff(np.sort(expected, axis=1)[:, -2:])[:, 0] > 2e-4  # all but ties
    assert ahead.mean() > 0.95
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[ahead].all()
    told = json.loads((tmp_path / "run/public/model.json").read_text(encoding="utf-8"))
    assert told["inputs"][0]["shape"] == ["N", *held_out.shape[1:]]
    assert told["encoding"]["of"].endswith("the graph scales them and places them in the public embedding")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (feature_names(), "oriented gradients"),
        (("my_pictures:edges 0", "my_pictures:edges 1"), "what my_pictures:edges gives for a picture, which is code"),
        (("age", "weight"), "features in the order of the data set"),
    ],
)
@pytest.mark.parametrize("is_embedded", [False, True])
def test_what_a_table_was_made_of_is_said_in_words(names, words, is_embedded, monkeypatch):
    monkeypatch.setattr(embedding, "_STEPS", 0)  # 900 columns of ten thresholds each take minutes
    x = torch.rand(40, len(names))
    split = Split(x=x, y=torch.arange(40) % 2, z=torch.arange(40) % 2, record_id=[str(row) for row in range(40)])
    splits = dict.fromkeys(("private", "public", "validation", "test"), split)
    plain = Dataset(
        **{"name": "mine", "kind": "tabular", "sensitive_attribute": "z", "feature_names": names} | splits,
        label_names=("no", "yes"),
        group_names=("a", "b"),
    )
    dataset = embedded(plain, EmbeddingConfig()) if is_embedded else plain
    told = publication.encoding_of(dataset, (len(names),))
    assert words in told["of"]
    assert [each["feature"] for each in told["features"]] == list(names)


def test_a_run_without_the_packages_is_whole_and_says_how_to_get_them(fairpate, visits, tmp_path, monkeypatch):
    monkeypatch.setattr(student.student, "PACKAGES", ("onnx", "no_such_package"))
    _, errors = run(fairpate, visits, tmp_path / "run")
    (line,) = [line for line in errors.splitlines() if line.startswith("onnx")]
    assert "no_such_package missing; pip install 'fairpate[onnx]'" in line
    assert not (tmp_path / "run/public/model.onnx").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert fairpate("report", tmp_path / "run")[0] == 0
    assert (tmp_path / "run/public/model.onnx").exists()
    with safe_open(tmp_path / "run/public/student.safetensors", framework="pt") as file:
        assert set(file.metadata()) == {"card"}


SCANS = """
name: scans
task: comes again
rows: 300
files: {records: scans.parquet}
features:
  scan: {vector: 3}
  ward: {categories: [A, B]}
identity: {key: id}
label: {column: again, classes: ["no", "yes"]}
groups: {sex: {values: [f, m]}}
num_public: 100
num_validation: 20
"""


@pytest.mark.filterwarnings("ignore:unclosed file")  # the snippet ends with its program
def test_a_vector_beside_declared_columns_is_told_element_by_element(fairpate, tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    columns = {
        "id": [f"scan {row}" for row in range(300)],
        "scan": rng.normal(size=(300, 3)).astype(np.float32).tolist(),
        "ward": rng.choice(["A", "B"], 300).tolist(),
        "again": rng.choice(["no", "yes"], 300).tolist(),
        "sex": rng.choice(["f", "m"], 300).tolist(),
    }
    pq.write_table(pa.table(columns), tmp_path / "scans.parquet")
    (tmp_path / "scans.yaml").write_text(SCANS, encoding="utf-8")
    run(fairpate, None, tmp_path / "run", data=tmp_path / "scans.yaml")
    told = [{"scan": scan, "ward": ward} for scan, ward in zip(columns["scan"], columns["ward"], strict=True)]
    x = torch.tensor([[*row["scan"], row["ward"] == "A", row["ward"] == "B"] for row in told], dtype=torch.float32)
    expected = load_student(tmp_path / "run/public/student.safetensors").probabilities(x)
    np.testing.assert_allclose(predicted_here(tmp_path / "run", told, monkeypatch), expected, atol=1e-5)
