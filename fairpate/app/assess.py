"""How a published model does on the test split: its metrics, and with IDP3 how much they depend on the order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairpate.app.seeds import Stream, stream_seed
from fairpate.data import Dataset
from fairpate.evaluation.metrics import Evaluation, evaluate
from fairpate.evaluation.reject_option import RejectOptionSpread, reject_option_spread
from fairpate.evaluation.small_cells import shown_records
from fairpate.types import GateRule

if TYPE_CHECKING:
    from student.predict import Student


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Metrics of the student by name, the headline first; with IDP3 also how much they depend on the test order.

    ``measured_N`` marks the test records that the headline's accuracy is over.
    """

    evaluations: dict[str, Evaluation]
    measured_N: npt.NDArray[np.bool_]
    reject_option: RejectOptionSpread | None = None

    @property
    def headline(self) -> Evaluation:
        """Of the student as it predicts."""
        return next(iter(self.evaluations.values()))

    def to_json(self) -> dict[str, Any]:
        """The headline's metrics, and beside them those without refusals."""
        values = self.headline.to_json()
        if self.reject_option is not None:
            unrefused = self.evaluations["student without refusals"]
            values |= {"without_refusals": unrefused.to_json(), "orders": self.reject_option.to_json()}
        return values


def assess(student: Student, dataset: Dataset, *, seed: int, least_cell: int) -> Assessment:
    """Measure the student on the test split: as it predicts, and with IDP3 also unrefused and in other orders.

    What rests on fewer than ``least_cell`` test records of a group, or of a group and class, is left out. A
    randomised student is measured by expectation, but where IDP3 refuses: that depends on the labels drawn.
    """
    test, rule = dataset.test, student.card.idp3
    groups, persons = test.z.numpy(), test.person_N
    prediction = student.predict(test.x, groups, generator=_generator(seed, Stream.PREDICTION))
    expected = prediction.probabilities_NC if student.card.is_randomised else prediction.labels

    def measure(
        predictions: npt.NDArray[Any],
        answered_N: npt.NDArray[np.bool_],
        rule: GateRule | None = None,
        apart_N: npt.NDArray[np.bool_] | None = None,
    ) -> Evaluation:
        return evaluate(
            predictions,
            labels_N=test.y.numpy(),
            groups_N=groups,
            answered_N=answered_N,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            # A fresh one for each measurement: an interval does not depend on what else was measured before.
            generator=_generator(seed, Stream.BOOTSTRAP),
            rule=rule,
            persons_N=persons,
            least_cell=least_cell,
            apart_N=apart_N,
        )

    kept = shown_records(
        groups, test.y.numpy(), prediction.answered, least=least_cell, num_groups=dataset.num_groups, persons_N=persons
    ).kept_N
    headline = measure(expected if rule is None else prediction.labels, prediction.answered, rule)
    measured = prediction.answered & kept
    if rule is None:
        return Assessment(evaluations={"student": headline}, measured_N=measured)
    unrefused = measure(expected, np.ones(len(test), dtype=np.bool_), apart_N=~prediction.answered)
    spread = reject_option_spread(
        prediction.labels,
        groups,
        true_labels_N=test.y.numpy(),
        rule=rule,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        generator=_generator(seed, Stream.ORDERS),
        kept_N=kept,
        least_cell=least_cell,
    )
    return Assessment(
        evaluations={"student with IDP3": headline, "student without refusals": unrefused},
        measured_N=measured,
        reject_option=spread,
    )


def _generator(seed: int, stream: Stream) -> np.random.Generator:
    return np.random.default_rng(stream_seed(seed, stream))
