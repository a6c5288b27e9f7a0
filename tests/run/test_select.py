"""A choice of settings by private validation records: priced for any number of candidates, drawn once, and stated."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import random
import shutil
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_runs import QUIET, read_json

from fairpate.config import ConfigError, ModelConfig, values_digest
from fairpate.data import Split, registry
from fairpate.data.declaration import read_declaration
from fairpate.methods.base import configured
from fairpate.nn.models import build_model
from fairpate.privacy.accountant import PureReleases, least_noise
from fairpate.privacy.discrete_gaussian import OsEntropy, SeededSource
from fairpate.privacy.mechanism_events import PredictionTables
from fairpate.releases import log
from fairpate.releases.directory import RunDirectory, RunFolderError, read_release, read_statement, save_release
from fairpate.releases.odometer import Odometer, _rows
from fairpate.run import choice
from fairpate.run.bundle import verify_bundle, write_bundle
from fairpate.run.choice import choice_among, group_weights, score_of, select_settings
from fairpate.run.private_metrics import WEIGHT
from fairpate.run.run import run_method
from student.card import StudentCard
from student.student import Student

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("own_state"),
]

DECLARATION = """
name: clinic
files: {private: private.csv, public: public.csv}
label: {column: ill, classes: [no, yes]}
group: {column: sex, values: [F, M]}
identity: {key: id}
features:
  age: {bounds: [0, 100]}
rows: 900
"""


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clinic")
    draws = random.Random(0)
    for name, count in (("private", 900), ("public", 200)):
        rows = [(f"{name}{row}", draws.randint(0, 100), draws.choice("FM")) for row in range(count)]
        lines = ["id,age,sex,ill", *(f"{key},{age},{sex},{'yes' if age > 50 else 'no'}" for key, age, sex in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "clinic.yaml").write_text(DECLARATION, encoding="utf-8")
    return folder / "clinic.yaml"


def candidate(clinic: Path, *overrides: str) -> Any:
    values = {
        "data": {"name": "clinic", "declaration": str(clinic), "split": {"validation_share": 0.3}},
        "target": {"epsilon": 1},
        "evaluation": {"metrics": "private"},
        "student": {"model": {"name": "logistic"}, "fit": {"epochs": 0}},
        "weighted_votes": {"embedding": {"num_components": 5}},
    }
    return configured(values, list(overrides), method="weighted_votes")


@pytest.fixture
def candidates(clinic: Path) -> list[Any]:
    """The second learns, the others do not; its accuracy is better by far."""
    learns = ("student.fit.epochs=30", "student.fit.learning_rate=0.05")
    return [candidate(clinic), candidate(clinic, *learns), candidate(clinic, "student.fit.batch_size=16")]


def chosen_in(out: Path) -> int:
    released, _ = read_release(RunDirectory(root=out / "release").choice)
    return int(released.arrays["chosen"][0])


def parts_counted() -> list[str]:
    with Odometer().transaction() as database:
        return sorted(row.part.partition("/")[2] for row in _rows(database))


def test_release_choice_and_metrics_cost_the_largest_of_the_three(candidates: list[Any], tmp_path: Path) -> None:
    run = select_settings(candidates, epsilon=0.9, out=tmp_path, reporter=QUIET)
    statement = read_statement(run)
    assert chosen_in(tmp_path) == 1
    assert read_json(run.record)["config"]["student"]["fit"]["epochs"] == 30
    assert statement.tuning_accounted
    assert statement.epsilon == pytest.approx(1, abs=1e-3)
    assert [event["epsilon"] for event in statement.part_events["validation"]] == [0.9]
    assert parts_counted() == ["private", "test", "validation"]
    (total,) = Odometer().totals(delta=1e-5)
    assert total.epsilon == pytest.approx(1, abs=1e-3)
    text = run.public_report.read_text(encoding="utf-8")
    assert "The choice of settings is part of ε" in text
    assert "of validation records alone" in text
    bundle, _ = write_bundle(run.root)
    verdict = verify_bundle(bundle)
    assert verdict.holds
    assert "the settings are those that were chosen among 3" in verdict.checked
    folder = tmp_path / "open"
    zipfile.ZipFile(bundle).extractall(folder)
    record = read_json(folder / "record.json")
    record["config"]["student"]["fit"]["epochs"] = 31
    (folder / "record.json").write_text(json.dumps(record))
    assert any("not the settings that were chosen" in each for each in verify_bundle(folder).differs)
    (folder / "choice.safetensors").unlink()
    assert any(each.startswith("choice.safetensors") for each in verify_bundle(folder).differs)


def test_a_repeated_command_makes_no_second_choice_and_a_crash_counts_one_that_nobody_has(
    candidates: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = save_release

    def killed(path: Path, *given: Any) -> None:
        if path.name == "choice.safetensors":
            raise KeyboardInterrupt
        save(path, *given)

    with monkeypatch.context() as patched:
        patched.setattr(log, "save_release", killed)
        with pytest.raises(KeyboardInterrupt):
            select_settings(candidates, epsilon=0.01, out=tmp_path, reporter=QUIET)
    assert parts_counted() == ["private", "validation"]
    first = select_settings(candidates, epsilon=0.01, out=tmp_path, reporter=QUIET)
    assert parts_counted() == ["private", "test", "validation"]
    # In one row, and stated as two choices.
    assert [event["count"] for event in read_statement(first).part_events["validation"]] == [1, 1]
    files = {path.name: path.read_bytes() for path in first.public.iterdir() if path.suffix == ".safetensors"}
    monkeypatch.setattr(choice, "choice_among", lambda *_, **__: pytest.fail("drawn again"))
    again = select_settings(candidates, epsilon=0.01, out=tmp_path, reporter=QUIET)
    assert {path.name: path.read_bytes() for path in again.public.iterdir() if path.name in files} == files
    assert len(parts_counted()) == 3
    with pytest.raises(RunFolderError, match="released under other settings"):
        select_settings(candidates[:2], epsilon=0.01, out=tmp_path, reporter=QUIET)


def test_a_choice_is_counted_by_an_odometer_that_did_not_see_it(
    candidates: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = select_settings(candidates, epsilon=0.9, out=tmp_path, reporter=QUIET)
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "other"))
    config = configured(run.config).model_copy(update={"out": run.root})
    run_method(config, QUIET)
    assert parts_counted() == ["private", "test", "validation"]
    run_method(config, QUIET)
    assert parts_counted() == ["private", "test", "validation"]


def test_a_choice_belongs_to_its_release_and_to_models_as_they_are_pinned(
    candidates: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_seed(config: Any) -> Any:
        return config.model_copy(update={"seed": 7})

    # As where a checksum of a weights file is pinned: the settings that run are not those that were given.
    monkeypatch.setattr(choice, "with_pinned_weights", with_seed)
    select_settings(candidates, epsilon=3.0, out=tmp_path / "a", reporter=QUIET)
    _, origin = read_release(RunDirectory(root=tmp_path / "a/release").choice)
    digests = [values_digest(with_seed(config).settings_without()) for config in candidates]
    assert origin.settings["candidates"] == digests
    # The choice of one release does not stand beside another.
    select_settings(candidates, epsilon=3.0, out=tmp_path / "b", reporter=QUIET)
    kept = RunDirectory(root=tmp_path / "a/release")
    kept.released.write_bytes(RunDirectory(root=tmp_path / "b/release").released.read_bytes())
    with pytest.raises(RunFolderError, match=r"released under other settings \(release"):
        select_settings(candidates, epsilon=3.0, out=tmp_path / "a", reporter=QUIET)


def test_only_the_chosen_settings_state_the_choice_which_may_be_dearer_than_the_release(
    candidates: list[Any], tmp_path: Path
) -> None:
    chosen = read_statement(select_settings(candidates, epsilon=3.0, out=tmp_path, reporter=QUIET))
    assert chosen.epsilon == pytest.approx(3, abs=1e-2)
    other = candidates[0].model_copy(update={"out": tmp_path / "other"})
    statement = read_statement(run_method(other, QUIET, release_of=tmp_path / "release"))
    assert not statement.tuning_accounted
    assert set(statement.part_events) == {"test"}


def test_what_cannot_be_chosen_privately_is_refused_before_anything_is_released(
    candidates: list[Any], clinic: Path, tmp_path: Path
) -> None:
    for configs, words in (
        ([*candidates, candidate(clinic, "target.epsilon=2")], r"target\.epsilon: 1.0 -> 2.0; .* the release reads"),
        ([*candidates, configured({}, method="dp_sgd")], r"a release of arrays; got dp_sgd\."),
        (candidates[:1], "at least two settings"),
        (
            [
                candidate(clinic, "data.split.validation_share=0", f"seed={0}", *more)
                for more in ((), ("student.fit.epochs=1",))
            ],
            r"data\.split: a choice of settings needs validation records",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            select_settings(configs, epsilon=1.0, out=tmp_path / "out", reporter=QUIET)
    with pytest.raises(
        ConfigError, match=r"--share: expected a number above 0 and at most 1 for each of the groups F, M"
    ):
        select_settings(candidates, epsilon=1.0, out=tmp_path / "out", reporter=QUIET, group_shares={"F": 0.5})
    assert parts_counted() == []


def rule(weights: Any) -> Student:
    network = build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=2, generator_seed=0)
    with torch.no_grad():
        network[-1].weight.copy_(torch.tensor([[0.0] * 3, list(weights)]))  # type: ignore[index,union-attr]
        network[-1].bias.zero_()  # type: ignore[index,union-attr]
    card = StudentCard(
        model=ModelConfig(name="logistic"),
        input_shape=(3,),
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="g",
        idp3=None,
    )
    return Student(card=card, network=network.eval())


KINDS = list(itertools.product(((1.0, 0.2, -1.0), (-1.0, 1.0, 0.3)), (0, 1), (0, 1)))


def scores_of(students: list[Student], records: Any, persons: Any = (), weights: Any = (WEIGHT, WEIGHT)) -> list[int]:
    x = torch.tensor([each[0] for each in records]).reshape(-1, 3)
    y, z = (torch.tensor([each[k] for each in records], dtype=torch.int64) for k in (1, 2))
    split = Split(x=x, y=y, z=z, record_id=tuple(f"r{n}" for n in range(len(records))), person_id=tuple(persons))
    return [score_of(student, split, np.array(weights), OsEntropy()) for student in students]


def log_chances(scores: list[int], *, epsilon: float, halves: int) -> np.ndarray:
    """Of the exponential mechanism, by its definition."""
    exponent = epsilon * np.array(scores, float) / WEIGHT / halves
    return exponent - np.logaddexp.reduce(exponent)


def test_over_tiny_data_sets_no_choice_among_128_candidates_moves_by_more_than_its_price() -> None:
    """Adding any record to any of 45 sets of up to two, and replacing one by any other; and all records of a person.

    Two kinds of features leave four ways to predict: four rules, each 32 times, are as different as 128.
    """
    epsilon = 1.3
    rules = [rule(weights) for weights in ((1.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, -1.0, 0.0))]
    said = {tuple(each.predict(torch.tensor(sorted({kind[0] for kind in KINDS}))).labels.tolist()) for each in rules}
    assert len(said) == 4

    @cache
    def of_records(*records: Any) -> list[int]:
        return scores_of(rules, records) * 32

    def scores(records: Any, persons: Any = ()) -> list[int]:
        # A score is a sum, and many of these sets are the same records in another order.
        return scores_of(rules, records, persons) * 32 if persons else of_records(*sorted(records))

    farthest = {"added": 0.0, "replaced": 0.0, "person": 0.0}
    for base in itertools.chain.from_iterable(itertools.combinations_with_replacement(KINDS, k) for k in range(3)):
        without = log_chances(scores(base), epsilon=epsilon, halves=1)
        every = [scores((*base, kind)) for kind in KINDS]
        for each in every:
            moved = np.abs(log_chances(each, epsilon=epsilon, halves=1) - without).max()
            farthest["added"] = max(farthest["added"], float(moved))
        halved = [log_chances(each, epsilon=epsilon, halves=2) for each in every]
        for one, other in itertools.combinations(halved, 2):
            farthest["replaced"] = max(farthest["replaced"], float(np.abs(one - other).max()))
        for own in ([KINDS[0]] * 3, [KINDS[0], KINDS[3], KINDS[6]], KINDS[:7]):
            persons = [*(f"p{n}" for n in range(len(base))), *["new"] * len(own)]
            with_them = log_chances(scores((*base, *own), persons), epsilon=epsilon, halves=1)
            farthest["person"] = max(farthest["person"], float(np.abs(with_them - without).max()))
    assert 0.5 * epsilon < farthest["added"] <= epsilon * (1 + 1e-9)
    assert 0.5 * epsilon < farthest["replaced"] <= epsilon * (1 + 1e-9)
    assert farthest["person"] <= epsilon * (1 + 1e-9)


def test_release_choice_among_128_and_table_together_cost_no_more_than_the_largest_of_the_three() -> None:
    """The joint distribution of all three, over tiny data sets and their neighbours, each step in view of the last.

    The release is a noisy count of positive training records, which decides what each candidate says; the table is a
    noisy count of the test records that the chosen candidate gets right. A record that were in two parts costs more.
    """
    epsilon, delta, draws = 1.0, 0.01, np.random.default_rng(3)
    rules = [rule(draws.normal(size=3)) for _ in range(8)]

    def table(noise: float) -> tuple[PredictionTables]:
        return (PredictionTables(count=1, noise_stddev_records=noise, weight=WEIGHT),)

    stddev = least_noise(table, target_epsilon=epsilon, target_delta=delta, accounting="pld")
    seen = np.arange(-12, 16)

    def noisy(exact_M: Any) -> Any:
        """The chances (M, values) of a whole number with discrete Gaussian noise."""
        chances = np.exp(-np.square(seen - np.asarray(exact_M)[:, None]) / (2 * stddev**2))
        return chances / chances.sum(axis=1, keepdims=True)

    def joint(training: Any, validation: Any, test: Any) -> Any:
        scores, right = (np.array(scores_of(rules, each) * 16) for each in (validation, test))
        parts = []
        for released, chance in zip(seen, noisy([sum(each[1] for each in training)])[0], strict=True):
            order = np.roll(np.arange(128), released)
            chosen_M = np.exp(log_chances(list(scores[order]), epsilon=epsilon, halves=1))
            parts.append(chance * chosen_M[:, None] * noisy(right[order] / WEIGHT))
        return np.stack(parts)

    def cost(one: Any, other: Any) -> float:
        """Delta at epsilon, in the worse direction."""
        return float(max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((one, other), (other, one))))

    bases = [((), (), ()), ((KINDS[2],), (KINDS[5],), (KINDS[0],)), (KINDS[:2], KINDS[4:6], KINDS[6:])]
    worst = [0.0, 0.0, 0.0]
    for base in bases:
        without = joint(*base)
        for part, kind in itertools.product(range(3), KINDS):
            grown = [(*each, kind) if place == part else each for place, each in enumerate(base)]
            worst[part] = max(worst[part], cost(joint(*grown), without))
    assert max(worst) <= delta * (1 + 1e-6)
    assert worst[0] > 0.8 * delta
    assert worst[1] < 1e-12  # a pure epsilon
    assert worst[2] > 0.8 * delta
    twice = [(*each, KINDS[2]) if place != 1 else each for place, each in enumerate(bases[1])]
    assert cost(joint(*twice), joint(*bases[1])) > 2 * delta


@pytest.mark.parametrize(("relation", "halves"), [("add or remove one", 1), ("replace one", 2)])
def test_candidates_are_drawn_with_the_chances_of_the_mechanism(relation: Any, halves: int) -> None:
    """Chi-squared of 4,000 draws with 3 degrees of freedom; the other relation's chances are refused."""
    scores, epsilon, source = [3 * WEIGHT, 2 * WEIGHT, WEIGHT // 2, 0], 0.8, SeededSource(1)
    event = PureReleases(count=1, epsilon=epsilon, unit="record", relation=relation)
    made = [choice_among(scores, event, source) for _ in range(4000)]
    assert made[0].events == (event,)
    counts = Counter(int(each.arrays["chosen"][0]) for each in made)
    found = np.array([counts[place] for place in range(4)])

    def distance(halves: int) -> float:
        expected = 4000 * np.exp(log_chances(scores, epsilon=epsilon, halves=halves))
        return float((np.square(found - expected) / expected).sum())

    assert distance(halves) < 16.3  # one in a thousand
    assert distance(3 - halves) > 100


def test_declared_shares_count_groups_alike_and_never_a_record_more_than_once() -> None:
    class Two:
        group_names, num_groups = ("a", "b"), 2

    weights = group_weights(Two, {"a": 0.8, "b": 0.2})  # type: ignore[arg-type]
    assert weights.tolist() == [WEIGHT // 4, WEIGHT]
    assert group_weights(Two, None).tolist() == [WEIGHT, WEIGHT]  # type: ignore[arg-type]
    student = rule((1.0, 0.0, 0.0))
    right_a, right_b = ((1.0, 0.2, -1.0), 1, 0), ((1.0, 0.2, -1.0), 1, 1)
    assert scores_of([student], [right_a] * 4 + [right_b], weights=weights) == [2 * WEIGHT]
    # Three records of a person, two of them predicted rightly: two thirds, rounded down.
    wrong = ((1.0, 0.2, -1.0), 0, 0)
    assert scores_of([student], [right_a, right_a, wrong], ["p"] * 3) == [2 * (WEIGHT // 3)]


def test_the_command_chooses_among_the_cells_of_a_comparison(clinic: Path, tmp_path: Path, fairpate: Any) -> None:
    data = {"name": "clinic", "declaration": str(clinic), "split": {"validation_share": 0.3}}
    settings = {"evaluation.metrics": "private", "student.model.name": "logistic", "target.epsilon": 1}
    settings |= {"weighted_votes.embedding.num_components": 5}
    sweep = {
        "data_sets": {"clinic": {"settings": {"data": data}}},
        "methods": ["weighted_votes"],
        "settings": settings,
        "grid": {"student.fit.epochs": [0, 20]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    begun = ("select", "sweep.yaml", "--epsilon", "1", "--out", "out")
    code, _, errors = fairpate(*begun, "--share", "F")
    assert (code, "--share: F is not a share of a group; give GROUP=SHARE" in errors) == (2, True)
    code, *said = fairpate(*begun, "--share", "F=.5", "--share", "M=.5")
    assert code == 0, said
    assert read_statement(RunDirectory(root=tmp_path / "out/model")).tuning_accounted
    assert math.isfinite(read_json(tmp_path / "out/model/public/metrics.json")["accuracy"])


@pytest.mark.parametrize(
    ("part", "is_accounted"), [("private", False), pytest.param("public", True, marks=pytest.mark.slow)]
)
def test_a_statement_names_a_known_data_set_whatever_a_declaration_calls_its_files(
    clinic: Path,
    candidates: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    is_accounted: bool,
) -> None:
    digest = hashlib.sha256(clinic.with_name(f"{part}.csv").read_bytes()).hexdigest()
    monkeypatch.setattr(registry, "_files_of_test_records", lambda: {digest: "census"})
    statement = read_statement(select_settings(candidates, epsilon=1.0, out=tmp_path, reporter=QUIET))
    assert "validation" in statement.part_events
    assert statement.tuning_accounted is is_accounted
    (said,) = [remark for remark in statement.remarks if "census" in remark]
    assert ("public records of this run" in said) is is_accounted


def test_test_records_of_known_data_sets_are_recognised_by_content(clinic: Path, tmp_path: Path) -> None:
    names = registry._files_of_test_records()
    adult = read_declaration(registry.CODEBOOKS / "adult.yaml").files
    assert names[adult.test[0].sha256] == "adult"
    assert adult.records[0].sha256 not in names  # only read for training
    # A gzipped copy is the same file.
    content = clinic.with_name("public.csv").read_bytes()
    (tmp_path / "other.csv.gz").write_bytes(gzip.compress(content))
    shutil.copy(clinic.with_name("private.csv"), tmp_path)
    declared = tmp_path / "clinic.yaml"
    declared.write_text(DECLARATION.replace("public.csv", "other.csv"), encoding="utf-8")
    names[hashlib.sha256(content).hexdigest()] = "census"
    try:
        assert registry.compared_on(candidate(declared).data) == {"census": False}
    finally:
        names.pop(hashlib.sha256(content).hexdigest())
    assert registry.compared_on(candidate(declared).data) == {}
