"""A run whose model answers only where the error rate of its answers is bounded in every group: what it costs, what its
pages say, and that anybody can compute its thresholds again."""

from __future__ import annotations

import asyncio
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from small_runs import QUIET
from test_private_metrics import DECLARED as CLINIC

from fairpate import FairClassifier, load_data
from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory, read_json, read_release, read_statement
from fairpate.releases.odometer import Odometer
from fairpate.report.answers import AnswerGuarantee
from fairpate.run.bounded_answers import AskedBound
from fairpate.run.bundle import verify_bundle, write_bundle
from fairpate.run.private_metrics import WEIGHT
from fairpate.run.publication import read_claims, write_card
from fairpate.run.run import BoundError, run_method
from fairpate.types import AnswerRule, ErrorBound
from student.server import Records, StudentReplica
from student.student import load_student, save_student

pytestmark = [pytest.mark.usefixtures("light_runs"), pytest.mark.usefixtures("own_state")]

DECLARED: dict[str, Any] = CLINIC | {"rows": 4000}
GAUSSIAN = 1.3906  # standard deviation over sensitivity
SETTINGS = {"target": {"epsilon": 3}}


def columns(count: int, prefix: str) -> dict[str, list[Any]]:
    """Records whose label follows the age; for women it is noisier, so that fewer of them can be answered."""
    draws = np.random.default_rng(count)
    age, weight, sex = draws.uniform(0, 100, count), draws.uniform(0, 100, count), draws.integers(0, 2, count)
    sick = draws.random(count) < 1 / (1 + np.exp(-(age - 50) / np.where(sex == 0, 12, 5)))
    return {
        "id": [f"{prefix}{row}" for row in range(count)],
        "age": age.tolist(),
        "weight": weight.tolist(),
        "sex": ["FM"[each] for each in sex],
        "y": ["yes" if each else "no" for each in sick],
        "person": [f"{prefix}{row // 3}" for row in range(count)],
    }


def loaded(**changes: Any) -> Dataset:
    return load_data(
        DECLARED | changes,
        private=columns(4000, "r"),
        public=columns(400, "p"),
        split={"test_share": 0.4},
    )


@pytest.fixture(scope="module")
def clinic() -> Dataset:
    return loaded()


def run(out: Path, dataset: Dataset, *overrides: str) -> RunDirectory:
    options = [f"out={out}", "student.reject.max_error=0.1", *overrides]
    return run_method(configured(SETTINGS, options, method="ada_ssp"), QUIET, dataset)


@pytest.fixture(scope="module")
def private(clinic: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    root = tmp_path_factory.mktemp("bounded")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(root / "state"))
        # By design the first test of a group is not passed in one draw of six or fewer.
        for number in range(5):
            done = run(root / f"run-{number}", clinic, "evaluation.metrics=private")
            if not AnswerGuarantee.from_json(read_json(done.metrics)["answers"]).unmet:
                break
    return done


def thresholds(done: RunDirectory) -> AnswerRule:
    rule = load_student(done.student).card.answers
    assert rule is not None
    return rule


def test_the_bound_costs_nothing_beyond_the_table_of_metrics(private: RunDirectory) -> None:
    statement = read_statement(private)
    assert statement.epsilon == pytest.approx(3, abs=1e-3)
    (event,) = statement.part_events["test"]
    # The Gaussian mechanism of 3 at 1e-5 (Balle and Wang 2018, Theorem 8), which two tables share.
    assert event["count"] == 2
    assert event["noise_stddev_records"] == pytest.approx(GAUSSIAN * math.sqrt(2), rel=2e-3)
    mu = 1 / GAUSSIAN
    assert norm.cdf(mu / 2 - 3 / mu) - math.exp(3) * norm.cdf(-mu / 2 - 3 / mu) == pytest.approx(1e-5, rel=2e-3)


def test_thresholds_follow_from_what_was_released(private: RunDirectory) -> None:
    """By the tests' own sums and an exact tail of the noisy counts, from the file that is published."""
    released, _ = read_release(private.metrics_table)
    counts, edges = released.arrays["weights_SK2"] / WEIGHT, released.arrays["confidence_edges"]
    assert counts.shape == (2, 12, 2)
    assert (np.diff(edges) <= 0).all()
    rule = thresholds(private)
    guarantee = AnswerGuarantee.from_json(read_json(private.metrics)["answers"])
    assert guarantee.rule == rule
    for group, row in enumerate(rule.thresholds_GC):
        (threshold,) = set(row)
        assert threshold is not None
        answered = 12 if threshold == 0 else 1 + int(np.flatnonzero(edges == threshold)[-1])
        right, wrong = counts[group, :answered].sum(axis=0)
        # Of the answers, less than a tenth is wrong by more than two standard deviations of noise and sampling.
        spread = math.sqrt(answered * (2 * GAUSSIAN**2) * 0.82 + (right + wrong) * 0.09)
        assert wrong - 0.1 * (right + wrong) < -1.9 * spread
        share = guarantee.answered[group]
        assert share.value == pytest.approx((right + wrong) / counts[group].sum(), abs=1e-6)
        assert share.low < share.value
    # Labels of men are clearer.
    assert guarantee.answered[1].value > guarantee.answered[0].value + 0.05


def test_the_published_model_refuses_below_its_thresholds(private: RunDirectory, clinic: Dataset) -> None:
    student = replace(load_student(private.student), embedding=None)
    chances = student.probabilities(clinic.test.x, clinic.test.z.numpy())
    predicted = student.predict(clinic.test.x, clinic.test.z.numpy())
    least_G = np.array([row[0] for row in thresholds(private).thresholds_GC])
    least_N = least_G[clinic.test.z.numpy()]
    np.testing.assert_array_equal(predicted.answered, chances.max(axis=1) >= least_N)
    assert 0.2 < predicted.answered.mean() < 0.95
    with pytest.raises(ValueError, match="sensitive_features"):
        student.predict(clinic.test.x)


def test_the_same_command_again_draws_nothing_and_changes_nothing(
    private: RunDirectory, clinic: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(private.root.parent / "state"))
    before = {path.name: path.read_bytes() for path in private.public.iterdir() if path.suffix != ".html"}
    spent = Odometer().totals(delta=1e-5)
    run(private.root, clinic, "evaluation.metrics=private")
    assert Odometer().totals(delta=1e-5) == spent
    assert {path.name: path.read_bytes() for path in private.public.iterdir() if path.suffix != ".html"} == before


def test_every_page_says_what_is_guaranteed_and_of_whom(private: RunDirectory) -> None:
    write_card(private.root)
    said = (
        "Of the answers in each of 2 groups at most 10 % are wrong, with probability 95 % over the test sample and the "
        "noise"
    )
    answers = read_json(private.metrics)["answers"]
    assert answers["said"] == said == read_statement(private).errors_of_answers
    assert said in str(read_statement(private))
    for page in (private.public_report, private.card_page):
        text = page.read_text(encoding="utf-8")
        assert said in text
        assert "It speaks of the population from which about" in text
        # Its accuracy is that of all predictions.
        assert "before it refuses any" in text.lower()
        assert "Answers everything" not in text
    row, line = read_json(private.record), read_claims(private).line
    assert f"{100 * row['accuracy']:.3g} % of its answers are right, on {100 * row['coverage']:.3g} % of" in line
    assert ". Before it refuses any: " in line
    # No gap among its answers is known, so it is not called fair.
    assert not line.startswith("Private and fair")
    fairness = read_claims(private).figures[1]
    assert fairness.mood != "good"
    assert fairness.details[0] == "Of all predictions: the gap of those that it answers is not known."


def test_verify_computes_the_thresholds_again(private: RunDirectory, tmp_path: Path) -> None:
    bundle = write_bundle(private.root, tmp_path / "bundle.zip")[0]
    verdict = verify_bundle(bundle)
    assert verdict.holds, verdict.differs
    folder = tmp_path / "edited"
    zipfile.ZipFile(bundle).extractall(folder)
    student = load_student(folder / "student.safetensors")
    rule = student.card.answers
    assert rule is not None
    looser = replace(rule, thresholds_GC=tuple((0.5, 0.5) for _ in rule.thresholds_GC))
    save_student(replace(student, card=replace(student.card, answers=looser)), folder / "student.safetensors")
    verdict = verify_bundle(folder)
    assert not verdict.holds
    assert any("thresholds are not those" in words for words in verdict.differs)


def test_a_service_refuses_alike(private: RunDirectory, clinic: Dataset) -> None:
    test = clinic.test.take(range(60))
    replica = StudentReplica(private.student, None)
    rows = [
        {"features": x, "group": clinic.group_names[z]} for x, z in zip(test.x.tolist(), test.z.tolist(), strict=True)
    ]
    labels = asyncio.run(replica.answer(Records.model_validate({"records": rows})))["labels"]
    assert replica.describe()["answers"]["bound"]["max_error"] == 0.1
    expected = load_student(private.student).predict(test.x, test.z.numpy())
    assert 0 < expected.answered.sum() < 60
    shown = zip(expected.labels.tolist(), expected.answered.tolist(), strict=True)
    assert labels == [label if answered else None for label, answered in shown]


def test_without_private_metrics_the_thresholds_are_exact_and_no_epsilon_covers_them(
    clinic: Dataset, tmp_path: Path
) -> None:
    public = replace(clinic, parts="")
    done = run(tmp_path / "run", public, "student.reject.groups=all")
    metrics = read_json(done.metrics)
    answers = AnswerGuarantee.from_json(metrics["answers"])
    assert len(set(thresholds(done).thresholds_GC)) == 1
    assert not load_student(done.student).card.needs_group
    assert any("no epsilon covers them" in words for words in answers.conditions)
    assert metrics["coverage"] < metrics["without_refusals"]["coverage"] == 1
    assert [each.value for each in answers.answered] == [group["coverage"] for group in metrics["groups"]]


def test_a_bound_that_no_group_can_have_refuses_everything_or_stops(clinic: Dataset, tmp_path: Path) -> None:
    hard = ("student.reject.max_error=0.0001", "evaluation.metrics=private")
    with pytest.raises(BoundError, match="wrong answers cannot be guaranteed for F and M"):
        run(tmp_path / "run", clinic, *hard, "student.reject.otherwise=stop")
    assert not (tmp_path / "run" / "public" / "report.html").exists()
    spent = Odometer().totals(delta=1e-5)
    done = run(tmp_path / "run", clinic, *hard)
    assert Odometer().totals(delta=1e-5) == spent
    answers = AnswerGuarantee.from_json(read_json(done.metrics)["answers"])
    assert answers.unmet == ("F", "M")
    assert answers.sentence.startswith("The model answers nothing")
    assert "but it answers nothing" in read_claims(done).line


def test_a_row_of_a_comparison_is_of_the_answers(private: RunDirectory, clinic: Dataset) -> None:
    """Which the noisy tables estimate, where the pages' metrics are of all predictions."""
    row, test = read_json(private.record), clinic.test
    student = replace(load_student(private.student), embedding=None)
    predicted = student.predict(test.x, test.z.numpy())
    right = (predicted.labels == test.y.numpy())[predicted.answered]
    # Within five standard deviations of the noise of 48 cells.
    within = 5 * GAUSSIAN * math.sqrt(2 * 48)
    assert row["coverage"] == pytest.approx(predicted.answered.mean(), abs=within / len(test))
    assert row["accuracy"] == pytest.approx(right.mean(), abs=within / len(right))
    assert row["accuracy"] > read_json(private.metrics)["accuracy"] + 0.02
    assert row["disparity"] is None
    assert row["fairness"]["demographic_parity"] == dict.fromkeys(("value", "low", "high", "fair_from"))
    assert (row["max_error"], row["max_error_confidence"]) == (0.1, 0.95)


def test_behind_idp3_thresholds_are_by_group_and_predicted_label(clinic: Dataset, tmp_path: Path) -> None:
    idp3 = "student.idp3={max_disparity: 0.1, min_count: 20}"
    done = run(tmp_path / "run", clinic, idp3, "evaluation.metrics=private", "student.reject.max_error=0.2")
    assert read_release(done.metrics_table)[0].arrays["weights_SK2"].shape == (4, 12, 2)
    orders, row = read_json(done.metrics)["orders"], read_json(done.record)
    # Both rules refuse: what is simulated from the table is near what the test records get in one order.
    student = replace(load_student(done.student), embedding=None)
    answered = student.predict(clinic.test.x, clinic.test.z.numpy()).answered
    assert orders["coverage"]["mean"] == pytest.approx(answered.mean(), abs=0.08)
    assert orders["final_gap"]["mean"] < 0.11
    assert row["coverage"] == orders["coverage"]["mean"]
    assert row["disparity"] == orders["final_gap"]["mean"]
    verdict = verify_bundle(write_bundle(done.root, tmp_path / "bundle.zip")[0])
    assert verdict.holds, verdict.differs
    assert ". Before it refuses any: " in read_claims(done).line
    exact = run(tmp_path / "exact", replace(clinic, parts=""), idp3)
    metrics = read_json(exact.metrics)
    confident = load_student(exact.student).card.answers
    assert confident is not None
    assert metrics["coverage"] < metrics["without_refusals"]["coverage"]
    assert all(order["coverage"] < 1 for order in metrics["orders"]["orders"])


def moved_cells(asked: AskedBound, dataset: Dataset, labels_N: Any, chances_NC: Any, rows: Any) -> Any:
    test = dataset.test
    full = asked.table(test, labels_N, chances_NC)
    return full - asked.table(test.take(rows), labels_N[rows], chances_NC[rows])


@pytest.mark.parametrize("by", ["record", "person"])
def test_one_unit_moves_one_cell_by_one(by: str) -> None:
    dataset = loaded(**({"person": "person"} if by == "person" else {}))
    draws, size = np.random.default_rng(0), len(dataset.test)
    chances_NC = draws.dirichlet([1, 1], size).astype(np.float32)
    labels_N = chances_NC.argmax(axis=1)
    student = type("Fixed", (), {})  # only its confidences on the public pool are needed
    student.card = type("Card", (), {"idp3": None})
    student.probabilities = staticmethod(lambda x, _: draws.dirichlet([1, 1], len(x)).astype(np.float32))
    asked = AskedBound.of(ErrorBound(max_error=0.1), student, dataset)  # type: ignore[arg-type]
    units_N = np.arange(size) if dataset.test.person_N is None else dataset.test.person_N.numpy()
    assert asked.table(dataset.test, labels_N, chances_NC).sum() == len(np.unique(units_N))
    for unit in np.unique(units_N)[:40]:
        moved = moved_cells(asked, dataset, labels_N, chances_NC, np.flatnonzero(units_N != unit).tolist())
        assert moved.sum() == np.abs(moved).sum() == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["student.reject.max_error=0"], "max_error"),
        (["student.reject.max_error=0.1", "student.reject.confidence=1"], "confidence"),
        (["student.reject.max_error=0.1", "student.reject.of=wrong"], "of"),
    ],
)
def test_a_bound_that_makes_no_sense_is_a_usage_error(
    overrides: list[str], words: str, tmp_path: Path, fairpate: Any
) -> None:
    options = [part for each in overrides for part in ("--set", each)]
    code, _, said = fairpate("run", "--data", "loans", "--out", tmp_path / "run", *options)
    assert code == 2
    assert "student.reject" in said
    assert words in said
    assert not (tmp_path / "run").exists()


def test_rates_of_one_class_are_refused_behind_idp3(clinic: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"student\.reject\.of: false_negative is not bounded behind"):
        run(
            tmp_path / "run",
            clinic,
            "student.reject.of=false_negative",
            "student.idp3={max_disparity: 0.1, min_count: 20}",
        )


def test_misses_alone_can_be_bounded(clinic: Dataset, tmp_path: Path) -> None:
    done = run(
        tmp_path / "run",
        clinic,
        "student.reject.of=false_negative",
        "evaluation.metrics=private",
        "student.reject.max_error=0.2",
    )
    answers = AnswerGuarantee.from_json(read_json(done.metrics)["answers"])
    assert "that are yes, at most 20 % are called no" in answers.sentence
    # About half of the test records are counted: those of the second class.
    assert 0.35 * len(clinic.test) < answers.num_records < 0.65 * len(clinic.test)


def test_a_fit_without_test_records_refuses_the_bound() -> None:
    classifier = FairClassifier("sgd", student={"reject": {"max_error": 0.1}})
    with pytest.raises(ConfigError, match=r"student\.reject: needs test records"):
        classifier.fit(np.eye(4), [0, 1, 0, 1])
