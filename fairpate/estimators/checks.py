"""Which of scikit-learn's own checks an estimator does not pass, and why.

``sklearn.utils.estimator_checks.check_estimator`` takes them as ``expected_failed_checks``. The checks fit small tables
without groups and without public records, so an estimator that needs either is made with ``sensitive_feature`` and with
a number for ``public_X``.
"""

from __future__ import annotations

from fairpate.estimators.classifier import FairClassifier

_ORDER, _SUBSET = "check_methods_sample_order_invariance", "check_methods_subset_invariance"
_PLACE_IN_BATCH = (
    "predictions are sums of 32 bits over the embedding's coordinates: the last digit of a probability depends on the "
    "record's place in a batch, by 1e-7, where the check allows 1e-9"
)
_DRAWN = "a randomised classifier draws the label of every record, in the order of X"
_EMPTY_CELL = "its records leave a group without one of the labels, whose rates are then refused"
_FEW_CELLS = ("check_classifier_data_not_an_array", "check_estimators_pickle", "check_pipeline_consistency")
_ALL_CELLS = (
    *_FEW_CELLS,
    "check_classifiers_classes",
    "check_classifiers_train",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input",
)
_OF_METHOD = {
    "dp_postprocessing": dict.fromkeys(_FEW_CELLS, _EMPTY_CELL)
    | dict.fromkeys(("check_classifiers_train", _ORDER, _SUBSET), _DRAWN),
    "dp_oracle_learner": dict.fromkeys(_ALL_CELLS, _EMPTY_CELL),
    "randomised_response": dict.fromkeys(_ALL_CELLS, _EMPTY_CELL) | dict.fromkeys((_ORDER, _SUBSET), _DRAWN),
}
_BY_NAME = {
    "check_no_attributes_set_in_init": "its parameters follow from method, so that no signature lists them",
    "check_do_not_raise_errors_in_init_or_set_params": "a method that there is not has no parameters to take",
}


def expected_failed_checks(estimator: FairClassifier) -> dict[str, str]:
    """Names of checks that ``estimator`` does not pass, each with the reason."""
    named = _BY_NAME if type(estimator) is FairClassifier else {}
    embedded = {} if estimator.public_X is None else {_ORDER: _PLACE_IN_BATCH}
    return named | embedded | _OF_METHOD.get(estimator.method, {})
