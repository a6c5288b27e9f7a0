"""A search over settings inside the guarantee: scikit-learn's interface to a secret number of trials."""

from __future__ import annotations

import itertools
import logging
import pickle
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, ParameterGrid, RandomizedSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from fairpate import FairClassifier, FairSearchCV, announce_search
from fairpate import search as searching
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.mechanism_events import SecretTrials, event_json, flat
from fairpate.privacy.second_accountant import recomputed_epsilon
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.run.choice import TrialsError

pytestmark = pytest.mark.usefixtures("light_runs")

GRID = {"dp_sgd__learning_rate": [1e-9, 1.0]}


def records(count: int = 600) -> tuple[Any, Any, Any]:
    draws = np.random.default_rng(count)
    X = draws.normal(size=(count, 3))
    return X, np.where(X[:, 0] > 0, "yes", "no"), draws.integers(0, 2, count)


def search(grid: Any = GRID, **other: Any) -> FairSearchCV:
    estimator = FairClassifier("dp_sgd", dp_sgd={"epochs": 20, "batch_size": 480, "num_records": 480}, random_state=0)
    return FairSearchCV(estimator, grid, **{"epsilon": 4.0, "expected_trials": 3.0, "random_state": 0} | other)


def fixed(monkeypatch: pytest.MonkeyPatch, *drawn: int) -> None:
    left, otherwise = list(drawn), OsEntropy.randbelow
    monkeypatch.setattr(SecretTrials, "draw", lambda *_: len(drawn))
    monkeypatch.setattr(OsEntropy, "randbelow", lambda self, n: left.pop(0) if left and n == 2 else otherwise(self, n))


def test_the_best_of_the_trials_is_kept_at_the_price_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = records()
    fixed(monkeypatch, 0, 1, 0)
    found = search().fit(X, y)
    assert found.best_params_ == {"dp_sgd__learning_rate": 1.0}
    assert found.score(X, y) > 0.8
    assert set(found.predict(X)) == {"no", "yes"}
    assert found.predict_proba(X).shape == (600, 2)
    assert not hasattr(found, "cv_results_")
    (event,) = found.events_
    assert 3.96 < found.privacy_.epsilon <= 4.0
    # Of each settings: the learning rate changes no event.
    assert len(flat([event])) == 1
    statement = found.statement()
    assert statement.tuning_accounted
    assert statement.epsilon == pytest.approx(4.0, rel=1e-2)
    for events in (found.events_, None):
        plain = statement.part_events["validation"] if events is None else [event_json(each) for each in events]
        plain = [{"unit": "record", "relation": "add or remove one"} | dict(each) for each in plain]
        assert recomputed_epsilon(plain, delta=1e-5) <= 4.0 * 1.001
    assert any("best of a secret random number" in remark for remark in statement.remarks)
    assert len(set(statement.remarks)) == len(statement.remarks)
    assert found.best_score_ == pytest.approx(0.9 * 0.2 * 600, abs=60)


def test_a_record_more_moves_no_other_and_training_never_sees_what_scores_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, y, groups = records()
    parts: list[tuple[set[bytes], set[bytes]]] = []
    fit, score = FairClassifier.fit, searching.score_of

    def seen_by(model: Any, x: Any, *given: Any, **other: Any) -> Any:
        parts.append(({row.astype(np.float32).tobytes() for row in x}, set()))
        assert len(other["sensitive_features"]) == len(x)
        return fit(model, x, *given, **other)

    def scored(student: Any, split: Any, *given: Any) -> int:
        parts[-1][1].update(row.numpy().tobytes() for row in split.x)
        return score(student, split, *given)

    monkeypatch.setattr(FairClassifier, "fit", seen_by)
    monkeypatch.setattr(searching, "score_of", scored)
    for rows in (599, 600):
        fixed(monkeypatch, 1)
        search().fit(X[:rows], y[:rows], sensitive_features=groups[:rows])
    (training, validation), (training_more, validation_more) = parts
    assert not training_more & validation_more
    assert len(training_more) + len(validation_more) == 600
    assert 0.1 < len(validation) / 599 < 0.3
    assert training <= training_more
    assert validation <= validation_more


def test_the_best_model_states_the_price_of_all_trials_wherever_it_goes(tmp_path: Path) -> None:
    X, y, _ = records()
    found = search().fit(X, y)
    best = found.best_estimator_
    assert best.statement() == found.statement()
    assert (best.privacy_, best.events_, best.trained_.events) == (found.privacy_, found.events_, found.events_)
    assert found.privacy_.epsilon == found.statement().epsilon
    loaded = FairClassifier.load(best.save(tmp_path / "saved"))
    assert loaded.statement().epsilon == found.statement().epsilon > 3.9
    assert loaded.statement().tuning_accounted


def test_a_replaced_record_that_could_move_to_another_part_is_refused() -> None:
    X, y, _ = records()
    replaced = FairSearchCV(FairClassifier("dp_sgd", target={"relation": "replace one"}), GRID)
    with pytest.raises(ValueError, match="a replaced record must stay in its split"):
        replaced.fit(X, y)


@pytest.mark.parametrize("error", [ValueError, FloatingPointError, torch.linalg.LinAlgError])
def test_nothing_is_heard_of_a_trial_that_warns_logs_or_fails(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    X, y, _ = records()
    fit = FairClassifier.fit

    def noisy(model: FairClassifier, *given: Any, **other: Any) -> Any:
        warnings.warn("of a trial", RuntimeWarning, stacklevel=1)
        logging.getLogger("fairpate.nn.per_example").warning("of a trial")
        if model.dp_sgd["learning_rate"] < 1:
            raise error("of a trial")
        return fit(model, *given, **other)

    monkeypatch.setattr(FairClassifier, "fit", noisy)
    fixed(monkeypatch, 0, 1)
    with warnings.catch_warnings(record=True) as heard:
        assert search().fit(X, y).best_params_ == {"dp_sgd__learning_rate": 1.0}
    assert not [each for each in heard if "of a trial" in str(each.message)]
    assert not caplog.records
    logging.getLogger("fairpate.nn.per_example").warning("afterwards")
    assert len(caplog.records) == 1


def test_records_of_a_person_stay_together_and_persons_are_what_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = records()
    fixed(monkeypatch, 1)
    found = search().fit(X, y, persons=np.arange(600) // 3)
    assert (found.privacy_.unit, found.statement().unit) == ("person", "person")
    assert {event.unit for event in flat(found.events_)} == {"person"}


def test_the_price_is_that_of_the_dearest_settings() -> None:
    X, y, _ = records()
    found = search({"dp_sgd__epochs": [1, 2], "dp_sgd__learning_rate": [0.5]}).fit(X, y)
    (event,) = found.events_
    assert len(event.trials) == 2
    assert accountant.epsilon([event], target_delta=1e-5).epsilon <= 4.0
    assert found.best_params_ in list(ParameterGrid({"dp_sgd__epochs": [1, 2], "dp_sgd__learning_rate": [0.5]}))


def test_what_cannot_be_priced_is_refused_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, _ = records()
    monkeypatch.setattr(FairClassifier, "fit", lambda *_, **__: pytest.fail("trained"))
    for made, words in (
        (search({"dp_sgd__epochs": [1]}), "at least two settings"),
        (search({"epsilon": [1, 2]}), "epsilon, which all trials share"),
        (search(validation_share=1.0), "validation_share"),
        (search(expected_trials=1.0), "expected_trials"),
        (FairSearchCV(FairClassifier("dp_sgd", noise="seeded"), GRID), "noise seeded"),
        (FairSearchCV(FairClassifier("raco_dp", sensitive_feature=0), {"raco_dp__min_share": [0.01, 0.02]}), "raco_dp"),
    ):
        with pytest.raises(ValueError, match=words):
            made.fit(X, y)
    with pytest.raises(NotFittedError):
        search().predict(X)


def test_trials_that_all_fail_are_an_error_that_names_the_price(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("the noise was too large")

    X, y, _ = records()
    monkeypatch.setattr(FairClassifier, "fit", fails)
    with pytest.raises(TrialsError, match="the privacy cost was spent"):
        search().fit(X, y)


def test_groups_count_alike_where_their_shares_are_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y, groups = records()
    fixed(monkeypatch, 1)
    found = search(group_shares={0: 0.5, 1: 0.5}).fit(X, y, sensitive_features=groups)
    assert found.best_score_ > 30
    with pytest.raises(ValueError, match="expected a number above 0"):
        search(group_shares={0: 0.5}).fit(X, y, sensitive_features=groups)


def test_it_is_a_scikit_learn_estimator() -> None:
    made = search(expected_trials=2.0)
    copy = clone(made)
    assert copy.get_params()["estimator__dp_sgd"] == made.estimator.dp_sgd
    assert copy.set_params(estimator__random_state=3).estimator.random_state == 3
    assert clone(copy).expected_trials == 2.0
    assert pickle.loads(pickle.dumps(made)).param_grid == GRID  # noqa: S301 - our own


@pytest.mark.slow
def test_scikit_learn_s_checks_pass() -> None:
    named = {
        "check_no_attributes_set_in_init": "its estimator's parameters follow from method, as those of FairClassifier",
        "check_do_not_raise_errors_in_init_or_set_params": "likewise",
        "check_fit_idempotent": "each fit draws its trials and their noise anew",
        "check_supervised_y_2d": "likewise",
        "check_classifier_data_not_an_array": "likewise",
    }
    made = search(epsilon=50.0, expected_trials=1.5).set_params(estimator__target={"accounting": "rdp"})
    found = check_estimator(made, on_fail=None, on_skip=None)
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert failed.keys() <= named.keys(), failed


def test_all_trials_are_two_rows_of_the_odometer_and_a_limit_refuses_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of parts that compose in parallel: a unit pays what the dearer of both costs, whatever K was."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path))
    X, y, _ = records()
    fixed(monkeypatch, 0, 1, 0)
    found = search()
    found.estimator.set_params(odometer="clinic")
    found.fit(X, y)
    (total,) = Odometer().totals(delta=1e-5, data="clinic")
    assert total.releases == 2
    assert total.epsilon == pytest.approx(found.privacy_.epsilon, rel=1e-2)
    assert not any("did not count" in remark for remark in found.statement().remarks)
    Odometer().set_limit("clinic", "record", epsilon=5, delta=1e-5)
    monkeypatch.setattr(FairClassifier, "fit", lambda *_, **__: pytest.fail("trained beyond the limit"))
    with pytest.raises(LimitReachedError):
        found.fit(X, y)
    assert [each.releases for each in Odometer().totals(delta=1e-5, data="clinic")] == [2]


@pytest.mark.slow  # nine searches
def test_only_searches_that_divide_the_same_records_alike_have_parts_of_one_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The odometer takes parts of one rule for disjoint, so a rule names everything that assigns a unit to a part."""
    X, y, _ = records(200)
    persons, folders = np.arange(200) // 2, itertools.count()

    def rule_of(X: Any, persons: Any = None, **other: Any) -> str:
        monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / str(next(folders))))
        fixed(monkeypatch, 1)
        made = search(**{"epsilon": 20.0} | other)
        made.estimator.set_params(odometer="clinic")
        made.fit(X, y, persons=persons)
        with closing(sqlite3.connect(Odometer().path)) as database, database:
            found = {part.partition("/") for (part,) in database.execute("SELECT part FROM parts")}
        assert {part for *_, part in found} == {"private", "validation"}
        ((rule, _),) = {(rule, slash) for rule, slash, _ in found}
        return str(rule)

    first = rule_of(X)
    assert rule_of(X) == first
    others = [
        rule_of(2 * X),  # the same records, named by other content
        rule_of(X[::-1]),
        rule_of(X, persons),
        rule_of(X, persons[::-1]),  # the same names, of other records
        rule_of(X, validation_share=0.2000001),
        rule_of(X, random_state=1),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_a_search_of_scikit_learn_is_announced_as_it_is_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings at 1 and 2 in three folds, and the dearer one again: 3 (1 + 2) + 2 = 11."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path))
    X, y, _ = records(120)
    plain = FairClassifier("weighted_votes", public_X=60, odometer="clinic", random_state=0)
    for estimator, name in (
        (plain, "epsilon"),
        (make_pipeline(FunctionTransformer(), plain), "fairclassifier__epsilon"),
    ):
        grid = GridSearchCV(estimator, {name: [1.0, 2.0]}, cv=3)
        with pytest.warns(UserWarning, match=r"11.00 in sum \(0.00 so far\), above 10"):
            assert announce_search(grid, y) == "7 trainings on clinic, of at most ε = 11.00 in sum; so far nothing"
    drawn = RandomizedSearchCV(
        plain.set_params(epsilon=0.5), {"weighted_votes__taught_share": [0.5, 1.0]}, n_iter=2, cv=2
    )
    assert "5 trainings on clinic, of at most ε = 2.50 in sum" in announce_search(drawn, y)
    drawn.fit(X, y)
    assert [total.releases for total in Odometer().totals(delta=1e-5, data="clinic")] == [5]
    Odometer().set_limit("clinic", "record", epsilon=3, delta=1e-5)
    with pytest.raises(ValueError, match="above the limit of 3"):
        announce_search(drawn, y)
    for wrong in (
        GridSearchCV(FairClassifier("dp_sgd", epsilon=1.0), {}),
        GridSearchCV(plain, {"epsilon": [None]}),
        RandomizedSearchCV(plain, {"epsilon": [1.0, 2.0]}),
    ):
        with pytest.raises(TypeError, match="epsilon"):
            announce_search(wrong, y)
