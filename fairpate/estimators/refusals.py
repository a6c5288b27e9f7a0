"""What ``fit`` of an estimator refuses before anything is trained, and so before anything is spent."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from sklearn.utils.multiclass import type_of_target

from fairpate.estimators.records import Records
from fairpate.methods.definition import Method


def require_inputs(config: Method, private: Records, public: Records | None) -> None:
    """ValueError for records or groups that the configuration reads and nobody gave."""
    if config.reads_groups and private.groups is None:
        raise ValueError(
            f"{config.method} reads groups: give sensitive_features to fit, or name their column: sensitive_feature."
        )
    needing = [f"public_data.{name}" for name, use in config.public_data if use is not None]
    needing += [config.method] if config.reads_public else []
    needing += ["embedding"] if config.data.embedding is not None else []
    if needing and public is None:
        raise ValueError(
            f"{needing[0]} needs public records: give public_X to fit or to the constructor; where there are none, "
            "public_X=1000 draws some, or choose a method that needs none, such as dp_sgd."
        )
    if public is not None and public.groups is None and config.reads_public_groups:
        raise ValueError(
            f"{config.method} reads groups of public records: give public_X and public_sensitive_features together."
        )


def require_classes(config: Method, labels: npt.NDArray[Any]) -> None:
    """ValueError for more classes than the method can tell apart."""
    kind = type_of_target(labels)
    if config.learns_two_classes and kind != "binary":
        # In words that scikit-learn's own checks look for.
        raise ValueError(
            f"Only binary classification is supported. The type of the target is {kind}; choose another method "
            f"than {config.method}."
        )


def require_persons_protected(config: Method, *, given: bool) -> None:
    """ValueError where persons are ``given`` and nothing bounds what their records do together."""
    if given and config.is_private and not config.protects_persons:
        raise ValueError(
            f"persons: {config.method} does not bound what all records of a person do together; leave persons out, "
            "which protects each record by itself, or choose another method (docs/python.md)."
        )
