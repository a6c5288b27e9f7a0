"""What a fitted estimator says of itself: remarks of its statement, its card on test records, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.validation import column_or_1d

from fairpate.app.assess import Assessment, assess
from fairpate.app.notebook import fitted_html
from fairpate.app.publication.card import write_card
from fairpate.app.rundir import create_run_directory, write_json
from fairpate.app.trained_on import record_data
from fairpate.data import Dataset, Split
from fairpate.estimators.kept import write_student
from fairpate.estimators.records import features, records_like
from fairpate.evaluation.metrics import Evaluation
from fairpate.evaluation.page import epsilon_text
from fairpate.strict_json import strict
from student.predict import Student

if TYPE_CHECKING:
    from fairpate.estimators.classifier import FairClassifier

_UNACCOUNTED = (
    "Preprocessing outside is not accounted: what was fitted to private records before, such as a scaler, is no event "
    "here, and ε does not cover what it shows."
)
_FOLLOWS_FROM_SIZE = (
    "Settings were chosen by the real number of private {}, which counts as public here: ε covers no change of "
    "it. A declared number (num_records) tells nothing."
)
_NOT_COUNTED = "Fitted from Python: the operator's odometer did not count it, nor other fits on the same records."


def remarks(steps: Sequence[str], *, size_of: str | None) -> tuple[str, ...]:
    """What qualifies the claim: ``steps`` of a pipeline were fitted to the private records before.

    ``size_of``: records or persons, whose real number chose settings.
    """
    unaccounted = _UNACCOUNTED
    if steps:
        unaccounted = f"Fitted to the private records before, by a pipeline: {', '.join(steps)}. {_UNACCOUNTED}"
    return (*([_FOLLOWS_FROM_SIZE.format(size_of)] if size_of else []), unaccounted, _NOT_COUNTED)


def student_for(estimator: FairClassifier, groups: npt.NDArray[Any] | None) -> Student:
    """The published model; where ``fit`` saw no groups, it names those that are given."""
    student = estimator.student_
    if groups is None or len(estimator.groups_):
        return student
    names = tuple(str(name) for name in np.unique(groups))
    return replace(student, card=replace(student.card, group_names=names))


def in_notebook(estimator: FairClassifier) -> str:
    """HTML of what a fitted model guarantees; nothing before ``fit``."""
    if not hasattr(estimator, "statement_"):
        return ""
    return fitted_html(estimator.statement_, name=f"{type(estimator).__name__}: {estimator.method}")


def write_card_of(
    estimator: FairClassifier, folder: Path, X: Any, y: Any, groups: Any, use: Mapping[str, str | None]
) -> tuple[Path, Path]:
    """A run folder of the published part alone, with metrics on test records, and its card."""
    config = estimator.config_
    if not config.is_private:
        raise ValueError(f"method: {config.method} guarantees nothing, so nothing of it is published, and no card.")
    student, dataset = _tested(estimator, X, y, groups)
    run = create_run_directory(config.model_copy(update={"out": folder}))
    record_data(run, dataset, given_from_python=True)
    write_student(student, run.public)
    write_json(run.statement, strict(estimator.statement_.to_json()))
    write_json(run.metrics, _assessed(estimator, student, dataset).to_json())
    return write_card(folder, **use)


def plot(estimator: FairClassifier, X: Any, y: Any, groups: Any, ax: Any) -> Any:
    """Bars of accuracy, a line for the most common label, and the cost in the title."""
    student, dataset = _tested(estimator, X, y, groups)
    measured = _assessed(estimator, student, dataset).headline
    if ax is None:
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(layout="constrained")
    bars = {"all": measured.accuracy} | {group.name: group.accuracy for group in measured.groups}
    ax.bar(range(len(bars)), list(bars.values()), color=["C0", *["C1"] * len(measured.groups)])
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set(ylim=(0, 1), ylabel="accuracy on test records", title=_title(estimator, measured))
    if measured.majority_class is not None:
        always = f"always {measured.majority_class}: {measured.majority_accuracy:.1%}"
        ax.axhline(measured.majority_accuracy, color="black", linestyle="--", label=always)
        ax.legend(loc="lower right")
    return ax


def _assessed(estimator: FairClassifier, student: Student, dataset: Dataset) -> Assessment:
    """Of test records that were embedded already."""
    config = estimator.config_
    return assess(replace(student, embedding=None), dataset, seed=config.seed, least_cell=config.evaluation.least_cell)


def _title(estimator: FairClassifier, measured: Evaluation) -> str:
    statement = estimator.statement_
    cost = "not private" if statement.epsilon is None else f"ε = {epsilon_text(statement.epsilon)}"
    if not statement.noise.startswith("os_entropy"):
        cost = f"{cost}, {statement.noise}"
    gap = measured.disparity
    disparity = "" if gap != gap else f", demographic-parity gap {gap:.3f}"
    degenerate = "".join(f"\n{words}" for words in measured.degenerate)
    coverage = "" if measured.coverage == 1 else f", coverage {measured.coverage:.0%}"
    return f"{statement.method}: accuracy {measured.accuracy:.1%}, {cost}{disparity}{coverage}{degenerate}"


def _tested(estimator: FairClassifier, X: Any, y: Any, groups: Any) -> tuple[Student, Dataset]:
    """The published model, and a data set of test records alone, as its network sees them."""
    records, labels = records_like(estimator, X, groups), column_or_1d(y, warn=True)
    unknown = set(np.unique(labels).tolist()) - set(estimator.classes_.tolist())
    if unknown or len(labels) != len(records.x):
        raise ValueError(f"y: expected {len(records.x)} labels among {estimator.classes_.tolist()}, got others.")
    student = student_for(estimator, records.groups)
    x, card = features(records.x), student.card
    x = x if student.embedding is None else student.embedding(x)
    z = np.zeros(len(x), dtype=np.int64)
    if records.groups is not None:
        names = estimator.groups_ if len(estimator.groups_) else np.unique(records.groups)
        z = np.searchsorted(names, records.groups)
    codes = torch.from_numpy(np.searchsorted(estimator.classes_, labels))
    test = Split(x=x, y=codes, z=torch.from_numpy(z), record_id=tuple(map(str, range(len(x)))))
    nothing = test.take([])
    return student, Dataset(
        name="records",
        kind="image" if x.ndim == 4 else "tabular",
        private=nothing,
        public=nothing,
        validation=nothing,
        test=test,
        label_names=card.label_names,
        group_names=card.group_names,
        sensitive_attribute=card.sensitive_attribute,
    )
