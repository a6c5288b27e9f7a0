"""scikit-learn's own checks of every method, and the counts of them that docs/python.md states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from method_kinds import OF_EACH_KIND, quick_and_slow
from sklearn.utils.estimator_checks import check_estimator

from fairpate.estimators import FairClassifier, expected_failed_checks, parameters_of
from fairpate.methods.base import DEFAULT, find_method, method_names
from fairpate.methods.defaults import COUNTS, FITTED

pytestmark = pytest.mark.usefixtures("light_runs")

PAGE = (Path(__file__).parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
STATED = {name: (int(run), int(listed)) for name, run, listed in re.findall(r"\| `(\w+)` \| (\d+) \| (\d+) \|", PAGE)}
QUICK = ("dp_sgd",)
FEW_STEPS: dict[str, Any] = {
    "noise": "seeded",
    "ray": {"num_actors": 0},
    "teachers": {"num_teachers": 3, "fit": {"epochs": 2}},
    "student": {"fit": {"epochs": 8}},
    "aggregator": {"num_queries": 20},
    "sgd": {"learning_rate": 0.05, "epochs": 5},
    "dp_sgd": {"epochs": 4},
    "f_ld": {"warmup_epochs": 1, "epochs": 2},
    "pf_ld": {"warmup_epochs": 1, "epochs": 2},
    "dp_postprocessing": {"min_share": 1e-9},
    "randomised_response": {"num_rounds": 5},
}
ALMOST_NO_NOISE = ("dp_postprocessing", "dp_oracle_learner", "randomised_response")


def small(method: str) -> FairClassifier:
    """With settings that train in no time; groups and public records where the method reads some."""
    schema, known = find_method(method), parameters_of(method)
    values = {key: value for key, value in FEW_STEPS.items() if key in known}
    if "accounting" in type(schema().target).model_fields:
        values["target"] = {"accounting": "rdp"}
    if "epsilon" in known:
        values["epsilon"] = 1000.0 if method in ALMOST_NO_NOISE else 8.0
    if not schema().has_student:
        values.pop("student", None)
    if method == "sf_pate":  # it asks about every private record
        values.pop("aggregator")
    if schema().reads_public:
        values["public_X"] = 60
    if schema().reads_groups or schema().reads_public_groups:
        values["sensitive_feature"] = {"column": 1, "edges": (0.7, 100.0)}
    return FairClassifier(method, **values, random_state=0)


@pytest.mark.filterwarnings("ignore:.* occurred during set_params:UserWarning")
@pytest.mark.parametrize("name", quick_and_slow(method_names(), QUICK, OF_EACH_KIND))
def test_scikit_learn_s_checks_pass_or_are_listed_with_their_reason(name: str) -> None:
    estimator = small(name)
    listed = expected_failed_checks(estimator)
    results = check_estimator(estimator, expected_failed_checks=listed, on_skip=None)
    run = [result["check_name"] for result in results if result["status"] != "skipped"]
    if name in STATED:
        assert STATED[name] == (len(run), sum(check in listed for check in run))
    assert listed.keys() <= set(run), "a check that is listed is run"


def test_what_the_page_states_are_methods() -> None:
    """A new method needs no row: what its estimator fails stands on its class."""
    assert set(method_names()) >= STATED.keys() >= {DEFAULT, FITTED, COUNTS, "dp_sgd"}
