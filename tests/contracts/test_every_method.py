"""What holds for every registered method: its price, its repetition, and an estimator that is the command's own run."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixed_results import SMALL, TARGET, two_labels
from method_kinds import quick_and_slow
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

from fairpate.config import EmbeddingConfig
from fairpate.data import Dataset
from fairpate.data.from_arrays import dataset_of
from fairpate.data.registry import embedded
from fairpate.estimators import FairClassifier, parameters_of
from fairpate.methods.base import Method, all_methods, configured, method_names
from fairpate.methods.defaults import FITTED, fitted_to
from fairpate.privacy.mechanism_events import event_json
from fairpate.releases.directory import read_json, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

METHODS = list(method_names())
QUICK: dict[str, Any] = {  # less training than where results are compared with stored ones
    "teachers": {"num_teachers": 8, "fit": {"epochs": 2, "batch_size": 16, "learning_rate": 0.01}},
    "aggregator": {
        "num_queries": 40,
        "gate": {"max_disparity": 0.2, "min_count": 10},
        "mechanism": {"threshold": 4, "threshold_stddev_votes": 3, "noise_stddev_votes": 2},
    },
    "student": {"model": {"name": "logistic"}, "fit": {"epochs": 3, "learning_rate": 0.02}},
    "record_votes": {"num_prototypes": 20, "num_components": 10},
    "weighted_votes": {"embedding": {"num_components": 10, "graph_share": 0}},
    "residual_votes": {"embedding": {"num_components": 10, "graph_share": 0}},
    "ada_ssp": {"embedding": {"num_components": 10, "graph_share": 0}},
    "private_knn": {"sampling_rate": 0.2},
}
VALUES = {**SMALL, **TARGET, **QUICK}


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return two_labels()


def arrays(dataset: Dataset) -> dict[str, Any]:
    private, public = dataset.private, dataset.public
    return {
        "X": private.x.numpy(),
        "y": private.y.numpy(),
        "sensitive_features": private.z.numpy(),
        "public_X": public.x.numpy(),
        "public_sensitive_features": public.z.numpy(),
    }


def estimator_of(config: Method) -> FairClassifier:
    parameters = FairClassifier(config.method).get_params(deep=False)
    sections = {name: getattr(config, name) for name in type(config).model_fields if name in parameters}
    return FairClassifier(**sections | {"method": config.method, "random_state": config.seed, "embedding": None})


@pytest.mark.parametrize("name", quick_and_slow(METHODS))
@pytest.mark.filterwarnings("ignore:δ = ")
def test_an_estimator_has_the_weights_and_the_price_of_the_command(name: str, digits: Dataset, tmp_path: Path) -> None:
    """Bit by bit, twice, on the same records."""
    given = arrays(digits)
    # A record's teacher follows from its content here; the digits' own names are others.
    groups = given["sensitive_features"] if find(name)().reads_groups else None
    records, *_ = dataset_of(**{**given, "sensitive_features": groups})
    dataset = dataclasses.replace(records, test=digits.test)
    config = configured(VALUES, [f"out={tmp_path / 'run'}"], method=name)
    run = run_method(config, Reporter(quiet=True), dataset)
    published = load_student(run.student)

    fitted = estimator_of(config).fit(**given)
    stored, ours = published.network.state_dict(), fitted.network_.state_dict()
    assert stored.keys() == ours.keys()
    assert all(torch.equal(ours[key], value) for key, value in stored.items())
    assert dataclasses.replace(published.card, model=fitted.student_.card.model) == fitted.student_.card

    statement = read_statement(run)
    assert fitted.privacy_.epsilon == (np.inf if statement.epsilon is None else statement.epsilon)
    assert (fitted.privacy_.unit, fitted.privacy_.delta) == (statement.unit, statement.delta)
    assert list(map(event_json, fitted.events_)) == list(statement.events)
    assert fitted.noise_ == statement.noise
    assert read_json(run.record)["method"] == name
    assert np.isinf(fitted.privacy_.epsilon) == (not config.is_private)

    again = clone(fitted).fit(**given)
    options = {"sensitive_features": given["sensitive_features"]}
    np.testing.assert_array_equal(
        again.predict_proba(given["X"], **options), fitted.predict_proba(given["X"], **options)
    )
    np.testing.assert_array_equal(fitted.predict(given["X"], **options), again.predict(given["X"], **options))
    np.testing.assert_allclose(fitted.predict_proba(given["X"], **options).sum(axis=1), 1, atol=1e-5)
    assert fitted.classes_.tolist() == [0, 1]
    assert fitted.n_features_in_ == digits.private.x[0].numel()
    assert "spending" not in vars(fitted.trained_) or fitted.trained_.spending is None  # the operator's


def find(name: str) -> type[Method]:
    return all_methods()[name]


@pytest.mark.parametrize("name", METHODS)
def test_an_estimator_follows_the_rules_of_scikit_learn(name: str) -> None:
    schema, known = find(name), parameters_of(name)
    sections = {
        field for field in schema.model_fields if field not in ("method", "out", "names_earlier", "seed", "data")
    }
    assert sections | {"delta", "model", "idp3", "calibration", "random_state"} <= known.keys()
    assert ("epsilon" in known) == ("epsilon" in type(schema().target).model_fields)
    assert ("folder" in known) == schema.asks_teachers
    fresh = FairClassifier(name)
    assert fresh.get_params(deep=False).keys() == known.keys() | {"method"}
    assert clone(fresh).get_params() == fresh.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict([[0.0]])
    changed = fresh.set_params(target__delta=1e-7, student__model__name="logistic", random_state=4)
    assert changed is fresh
    assert changed.get_params()["target__delta"] == 1e-7
    assert changed.get_params()["student__model__name"] == "logistic"
    assert "'delta': 1e-07" in repr(changed)
    assert clone(changed).get_params() == changed.get_params()
    config = changed._configuration()
    assert (config.target.delta, config.student.model.name, config.seed) == (1e-7, "logistic", 4)
    with pytest.raises(ValueError, match="Invalid parameter 'nonsense'"):
        fresh.set_params(nonsense__weight=1)
    made = FairClassifier(name)
    assert repr(made) == f"FairClassifier(method='{name}')" or name == FITTED
    assert pickle.loads(pickle.dumps(made)).get_params() == made.get_params()  # noqa: S301 - ours
    with pytest.raises(TypeError, match="no parameter 'nonsense'"):
        FairClassifier(name, nonsense=1)
    default = FairClassifier(name, random_state=0)._configuration(num_records=3000, num_public=400)
    # Shards of small teachers follow from a declared number of records alone.
    values = fitted_to(name, count=3000, num_public=400, teachers="networks")
    if values.get("data", {}).get("embedding"):
        # Components are chosen by a declared number of records alone, not by the number that `fit` is given.
        values["data"] = {"embedding": {}}
    assert default == configured(values, method=name), "the command's choices"


@pytest.mark.parametrize(
    "name", ["weighted_votes", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fairpate", "dp_sgd", "f_ld"))]
)
def test_an_estimator_that_is_told_nothing_has_the_weights_of_a_command_that_is(
    name: str, digits: Dataset, tmp_path: Path
) -> None:
    """Settings by the public sizes, and the embedding of public records; noise from a seed, for the comparison.

    Actors train the estimator's teachers; this process trains the command's.
    """
    embedding = {"num_components": 20, "graph_share": 0.0}
    said = {} if name == "f_ld" else {"noise": "seeded"}
    given = arrays(digits)
    fitted = FairClassifier(name, random_state=3, embedding="auto" if name == "f_ld" else embedding, **said).fit(
        **given
    )
    groups = given["sensitive_features"] if find(name)().reads_groups else None
    records, *_ = dataset_of(**{**given, "sensitive_features": groups})
    values = fitted_to(name, count=len(records.private), num_public=len(records.public), teachers="networks")
    here = ["ray.num_actors=0"] if "ray" in find(name).model_fields else []
    config = configured(values | said, ["seed=3", f"out={tmp_path / 'run'}", *here], method=name)
    seen = records if config.data.embedding is None else embedded(records, EmbeddingConfig(**embedding))
    # Moved a little: a copy of the private records is refused as a test split.
    test = dataclasses.replace(seen.private, x=seen.private.x + (1 if seen.private.x.dtype == torch.uint8 else 0.01))
    run = run_method(config, Reporter(quiet=True), dataclasses.replace(seen, test=test))
    stored, ours = load_student(run.student).network.state_dict(), fitted.network_.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in stored.items())
    assert stored.keys() == ours.keys()
