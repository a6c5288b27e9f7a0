"""Private and test files are enough: the embedding comes from the declaration, and the rule itself is the model."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest
import torch

from fairpate.config import DataConfig, EmbeddingConfig
from fairpate.data import Dataset, load_data
from fairpate.data.columns import even_records
from fairpate.data.dataset import DataSettingsError, shortened_by_person
from fairpate.data.registry import completed_pool, embedded
from fairpate.methods.base import Method, Training, configured
from fairpate.methods.defaults import resolved
from fairpate.methods.record_votes import UNITS, WeightedBallot
from fairpate.methods.residual_votes import AdaSsp, ResidualVotes
from fairpate.releases.directory import ReleasedArrays, RunDirectory, read_json, read_release, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.server import student_in_one_process
from student.student import load_student

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

DECLARATION = """
name: clinic
files: {private: private.csv, test: test.csv}
label: {column: ill, classes: ["no", "yes"]}
group: {column: sex, values: [F, M]}
features:
  age: {bounds: [0, 100], missing: 50}
  weight: {bounds: [30, 200], scale: log}
  ward: {categories: [A, B, C], other: true}
  code: {bands: {few: 0, some: 10, many: 100}}
"""


def write(folder: Path, name: str, count: int, *, seed: int) -> None:
    draws, lines = random.Random(seed), ["person,age,weight,ward,code,sex,ill"]
    for row in range(count):
        age, ward = draws.randint(0, 100), draws.choice("ABCD")
        ill = "yes" if age + 20 * (ward == "A") + draws.gauss(0, 8) > 55 else "no"
        lines.append(f"{name}{row // 3},{age},{draws.randint(40, 120)},{ward},{draws.randint(0, 300)},")
        lines[-1] += f"{draws.choice('FM')},{ill}"
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clinic")
    write(folder, "private", 900, seed=0)
    write(folder, "test", 400, seed=1)
    write(folder, "public", 40, seed=2)
    (folder / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    (folder / "persons.yaml").write_text(DECLARATION + "person: person\n", encoding="utf-8")
    with_public = DECLARATION.replace("private.csv,", "private.csv, public: public.csv,")
    (folder / "small.yaml").write_text(with_public, encoding="utf-8")
    return folder


def load(path: Path, **settings: object) -> Dataset:
    declared = {"name": "clinic", "declaration": {"path": path}, "embedding": {}} | settings
    return load_data(DataConfig.model_validate(declared))


@pytest.fixture(scope="module")
def dataset(clinic: Path) -> Dataset:
    return load(clinic / "clinic.yaml")


@pytest.fixture(scope="module")
def config(clinic: Path, tmp_path_factory: pytest.TempPathFactory) -> Method:
    declared = [("data.name", "clinic"), ("data.declaration", {"path": str(clinic / "clinic.yaml")})]
    out = tmp_path_factory.mktemp("runs") / "run"
    return resolved([*declared, "target.epsilon=8", ("out", str(out))])


@pytest.fixture(scope="module")
def run(config: Method) -> RunDirectory:
    return run_method(config, Reporter(quiet=True))


def test_the_rule_is_the_model_and_the_report_says_what_decided(run) -> None:
    student, statement = load_student(run.student), read_statement(run)
    assert student.card.model.name == "bounded_logistic"
    assert student.card.num_training_labels is None
    assert 7 < statement.epsilon <= 8
    assert [event["kind"] for event in statement.events] == ["VoteSums", "MomentSums", "VoteSums"]
    (said,) = (remark for remark in statement.remarks if "rule itself" in remark)
    assert "a noisy release of private records" in said
    assert said in (run.public / "report.html").read_text(encoding="utf-8")
    metrics = read_json(run.metrics)
    assert metrics["accuracy"] > metrics["majority_accuracy"] + 0.15


@pytest.mark.slow
def test_least_squares_publish_their_rule_as_well(clinic: Path, dataset: Dataset, tmp_path: Path) -> None:
    declared = [("data.name", "clinic"), ("data.declaration", {"path": str(clinic / "clinic.yaml")})]
    config = resolved([*declared, "target.epsilon=8", ("out", str(tmp_path / "run"))], method="ada_ssp")
    assert isinstance(config, AdaSsp)
    run = run_method(config, Reporter(quiet=True))
    student, stored = load_student(run.student), read_release(run.released)[0]
    assert student.card.model.name == "bounded_logistic"
    metrics = read_json(run.metrics)
    assert metrics["accuracy"] > metrics["majority_accuracy"] + 0.1
    plain = load(clinic / "clinic.yaml", embedding=None).test.x
    votes = WeightedBallot(embedding=dataset.embedding).votes(plain) / UNITS
    scores = votes @ config.rule(stored).T
    assert (student.predict(plain).labels == scores.argmax(axis=1)).mean() > 0.99


@pytest.mark.slow
@pytest.mark.usefixtures("with_graphs")
def test_graph_service_bundle_and_verification_work_on_it(run, dataset, fairpate, tmp_path) -> None:
    assert fairpate("report", str(run.root))[0] == 0
    student, made_up = load_student(run.student), even_records(dataset.feature_codes, 200)
    expected = student.predict(torch.from_numpy(made_up))
    (found,) = onnxruntime.InferenceSession(run.graph).run(["probabilities"], {"records": made_up})
    np.testing.assert_allclose(found, expected.probabilities_NC, atol=1e-4)

    async def asked() -> list[str]:
        app = student_in_one_process(run.student)
        records = [{"features": record.tolist(), "group": "F"} for record in made_up[:50]]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
            return (await client.post("/v1/predictions", json={"records": records})).json()["labels"]

    assert asyncio.run(asked()) == expected.labels[:50].tolist()
    assert fairpate("bundle", str(run.root), "--out", str(tmp_path / "run.zip"))[0] == 0
    assert fairpate("verify", str(tmp_path / "run.zip"))[0] == 0


def test_a_repeated_run_draws_nothing_again_and_learns_the_same_rule(config: Method, run: RunDirectory) -> None:
    before = {path: path.read_bytes() for path in (run.student, run.released, run.statement)}
    run_method(config, Reporter(quiet=True))
    run.student.unlink()
    run_method(config, Reporter(quiet=True))
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("residual_votes.gate={max_disparity: 0.1, min_count: 1}", "residual_votes.gate"),
        ("residual_votes.penalty={}", "residual_votes.penalty"),
        ("residual_votes.taught_share=0.5", "residual_votes.taught_share"),
        ("residual_votes.curvature=public", "residual_votes.curvature"),
        ("student.idp3={max_disparity: 0.1, min_count: 10}", "student.idp3"),
        ("student.model=mlp", "student.model.name"),
        ("student.method=pseudo_label", "student.method"),
        ("public_data.calibration={}", "public_data.calibration"),
        ("public_data.self_label=mlp", "public_data.self_label"),
        ("data.embedding=null", "data.embedding"),
    ],
)
def test_what_needs_public_records_is_refused_with_the_remedy(setting, field, clinic, fairpate, tmp_path) -> None:
    asked = ["run", "--data", str(clinic / "clinic.yaml"), "--epsilon", "1", "--out", str(tmp_path / "run")]
    code, _, errors = fairpate(*asked, "--set", setting)
    assert code == 2
    assert f"{field}: " in errors
    assert "files.public" in " ".join(errors.split())
    assert not (tmp_path / "run" / "public").exists()


@pytest.mark.parametrize("method", ["weighted_votes", "record_votes", "fairpate", "private_knn", "fair_dp_sgd"])
def test_a_method_that_reads_public_records_is_refused_and_names_one_that_does_not(method, dataset, tmp_path) -> None:
    config = configured({"data": {"name": "clinic"}}, method=method)
    with pytest.raises(ValueError, match=f"method: {method} needs public records.* choose residual_votes or dp_sgd"):
        config.check_data(dataset)
    configured({"data": {"name": "clinic"}}, method="dp_sgd").check_data(dataset)


def test_the_embedding_depends_on_the_declaration_alone(clinic: Path, tmp_path: Path, dataset: Dataset) -> None:
    write(tmp_path, "private", 30, seed=5)
    write(tmp_path, "test", 20, seed=6)
    (tmp_path / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    other = load(tmp_path / "clinic.yaml")
    assert other.embedding is not None
    assert dataset.embedding is not None
    records = torch.from_numpy(even_records(dataset.feature_codes, 100))
    assert torch.equal(other.embedding(records), dataset.embedding(records))
    plain, alone = load(clinic / "clinic.yaml", embedding=None).private.x, range(0, 900, 300)
    for row in alone:
        assert torch.equal(dataset.embedding(plain[row : row + 1])[0], dataset.private.x[row])


def test_made_up_records_are_even_in_every_declared_column(dataset: Dataset) -> None:
    features = {code.feature: place for place, code in enumerate(dataset.feature_codes)}
    x = even_records(dataset.feature_codes, 400)
    np.testing.assert_allclose(np.sort(x[:, features["weight"]]), (np.arange(400) + 0.5) / 400, atol=1e-6)
    assert x[:, features["age=missing"]].sum() == 40
    wards = [place for feature, place in features.items() if feature.startswith("ward=")]
    codes = [place for feature, place in features.items() if feature.startswith("code=")]
    for column in (wards, codes):
        assert (x[:, column].sum(axis=1) == 1).all()
        assert np.ptp(x[:, column].sum(axis=0)) <= 1
    assert len(wards) == 4
    assert abs(np.corrcoef(x[:, features["weight"]], x[:, features["age"]])[0, 1]) < 0.15


def test_few_public_records_are_completed_and_many_are_not(clinic: Path) -> None:
    plain = load(clinic / "small.yaml", embedding=None)
    pool = completed_pool(plain)
    assert len(pool) == 40 + 400 - 4 * 40
    assert torch.equal(pool[:40], plain.public.x)
    many = replace(plain, public=plain.public.take(list(range(40)) * 10))
    assert completed_pool(many) is many.public.x
    undeclared = replace(plain, feature_codes=())
    assert completed_pool(undeclared) is plain.public.x
    none = replace(undeclared, public=plain.public.take([]))
    with pytest.raises(DataSettingsError, match=r"data\.embedding: clinic has no public records .*files\.public"):
        embedded(none, EmbeddingConfig())
    with pytest.raises(DataSettingsError, match=r"data\.embedding: color_digits has no public records .*num_public"):
        load_data(DataConfig(num_public=0, embedding=EmbeddingConfig()))


def test_from_python_the_defaults_publish_the_rule(clinic: Path, tmp_path: Path) -> None:
    dataset = load_data(clinic / "clinic.yaml", embedding={})
    config = configured({"target": {"epsilon": 8}, "out": str(tmp_path / "run")}, method="residual_votes")
    run = run_method(config, Reporter(quiet=True), dataset)
    assert load_student(run.student).card.model.name == "bounded_logistic"


def test_a_divided_file_may_set_no_record_aside(clinic: Path, tmp_path: Path) -> None:
    text = DECLARATION.replace("private: private.csv, test: test.csv", "records: private.csv")
    (clinic / "records.yaml").write_text(text, encoding="utf-8")
    sizes = {"num_public": 0, "num_validation": 0, "num_test": 100}
    divided = load(clinic / "records.yaml", **sizes)
    assert [len(split) for split in divided.splits.values()] == [800, 0, 0, 100]


def released(dataset: Dataset, folder: Path) -> ReleasedArrays:
    values = {"target": {"epsilon": 4.0, "delta": 1e-5}, "noise": "seeded"}
    method = configured(values, method="residual_votes")
    assert isinstance(method, ResidualVotes)
    training = Training(
        dataset=dataset, model=None, run=RunDirectory(root=folder), reporter=Reporter(quiet=True), seed=0
    )
    return method.measure(training)


@pytest.mark.parametrize("file", ["clinic.yaml", "persons.yaml"])
def test_one_record_or_person_moves_sums_and_moments_by_its_own_numbers(
    file: str, clinic: Path, tmp_path: Path
) -> None:
    """The noise is seeded, so that it is the same with and without them."""
    dataset = load(clinic / file)
    private, gone = dataset.private, 3 if dataset.unit == "person" else 1
    kept = replace(dataset, private=private.take(range(gone, len(private))))
    whole, without = released(dataset, tmp_path), released(kept, tmp_path)
    assert {event.unit for event in whole.events} == {dataset.unit}
    votes = WeightedBallot(embedding=None).votes(private.x[:gone])
    moved_CW = whole.arrays["sums_CW"] - without.arrays["sums_CW"]
    moved_WW = whole.arrays["moments_WW"] - without.arrays["moments_WW"]
    if gone == 1:
        np.testing.assert_array_equal(moved_CW[int(private.y[0])], votes[0])
        np.testing.assert_array_equal(moved_WW, np.outer(votes[0], votes[0]))
    else:
        rows, numbers = shortened_by_person(votes, private.y[:3].numpy(), np.zeros(3, dtype=np.int64), norm=UNITS)
        np.testing.assert_allclose(moved_CW[rows], numbers, atol=2)
    assert sum(int(each) ** 2 for each in moved_CW.ravel()) <= UNITS**2
    assert sum(int(each) ** 2 for each in moved_WW.ravel()) <= UNITS**4


def test_a_small_pool_joins_the_embedding_and_the_rule_is_published(clinic: Path, fairpate, tmp_path: Path) -> None:
    asked = ["run", "--data", str(clinic / "small.yaml"), "--epsilon", "8", "--set", "noise=seeded"]
    assert fairpate(*asked, "--out", str(tmp_path / "run"))[0] == 0
    run = RunDirectory(root=tmp_path / "run")
    assert load_student(run.student).card.model.name == "bounded_logistic"
    # A student is taught where a setting asks for one.
    gate = "residual_votes.gate={max_disparity: 0.2, min_count: 1}"
    assert fairpate(*asked, "--set", gate, "--out", str(tmp_path / "gate"))[0] == 0
    taught = RunDirectory(root=tmp_path / "gate")
    assert load_student(taught.student).card.model.name == "logistic"
    assert any("learned from 40 public records" in remark for remark in read_statement(taught).remarks)


def test_a_pool_that_lacks_a_group_serves_what_does_not_read_groups(clinic: Path, fairpate, tmp_path: Path) -> None:
    for name in ("private", "test"):
        (tmp_path / f"{name}.csv").write_bytes((clinic / f"{name}.csv").read_bytes())
    rows = (clinic / "public.csv").read_text(encoding="utf-8").splitlines()
    women = [row for row in rows if ",M," not in row]
    (tmp_path / "public.csv").write_text("\n".join(women) + "\n", encoding="utf-8")
    (tmp_path / "small.yaml").write_bytes((clinic / "small.yaml").read_bytes())
    asked = ["run", "--data", str(tmp_path / "small.yaml"), "--epsilon", "8", "--set", "noise=seeded"]
    assert fairpate(*asked, "--out", str(tmp_path / "run"))[0] == 0
    gate = "residual_votes.gate={max_disparity: 0.2, min_count: 1}"
    code, _, errors = fairpate(*asked, "--set", gate, "--out", str(tmp_path / "gate"))
    assert code == 1
    assert "The public split has no member of group of sex M" in " ".join(errors.split())


def test_a_forecast_reads_no_public_record(clinic: Path, fairpate) -> None:
    code, output, _ = fairpate("run", "--data", str(clinic / "clinic.yaml"), "--epsilon", "1", "--dry-run", "--json")
    assert code == 0
    first, *others = json.loads(output)["forecasts"]
    assert (first["method"], first["caution"], first["refused"]) == ("residual_votes", None, None)
    assert all("public records" in each["refused"] or "rows" in each["refused"] for each in others)
