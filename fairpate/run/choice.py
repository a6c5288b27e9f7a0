"""A choice of settings inside the guarantee: among models that learn from one release, by private validation records.

Training several models from one release costs nothing. Their scores do: one validation record moves the score of every
candidate, so that noise for the two counts that one vote moves would be too little. The exponential mechanism (McSherry
and Talwar 2007) needs no more for many candidates than for two. A unit adds to each score a whole number from 0 to
``WEIGHT``, and the probability of a candidate is in proportion to exp(epsilon score / WEIGHT): a unit that is added
lowers no score, so that numerator and normaliser move in the same direction, each by a factor of exp(epsilon) at most.
Where a unit is replaced, scores may move in both directions, and the exponent is half of that.

Validation records are a part of the data set that nothing else reads (``data.split: hashed`` with
``data.validation_share``), so the choice composes in parallel with the release and with private metrics: epsilon is the
largest of the three costs. The choice is kept, and a repeated command makes no second one.

Not here: a choice among several releases, which needs a secret number of trials.

Shapes: N validation records, M candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from fairpate.config import ConfigError
from fairpate.config_reader import flat_values, values_digest
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.methods.base import Method, ReleasingMethod, Stream, stream_seed
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.laplace import PureReleases, choose_cheap
from fairpate.run.context import RunDirectory, RunDirectoryError, changed_fields
from fairpate.run.private_metrics import WEIGHT, lone_predictions, records_of_unit, require_kept_names
from fairpate.run.release_log import Released, arrays_digest
from fairpate.run.run import one_release, run_method, with_pinned_weights
from fairpate.terminal import Reporter
from fairpate.types import IntArray, Relation, Unit
from student.student import Student


def select_settings(
    configs: Sequence[Method],
    *,
    epsilon: float,
    out: Path,
    reporter: Reporter,
    group_shares: Mapping[str, float] | None = None,
) -> RunDirectory:
    """Choose one of ``configs``, which learn from one release, and run it in ``out / "model"``; resumable.

    The release is kept in ``out / "release"``, with the choice. ``epsilon``: the price of the choice. ``group_shares``:
    a public share for each group's name, by which the score counts all groups alike; None: every record counts alike.
    ConfigError for candidates that do not share a release and for a data set without validation records of their own;
    other errors as :func:`fairpate.run.run.run_method`.
    """
    # Pinned as a run pins them: the digest of a candidate must be that of the settings that are run.
    candidates = [with_pinned_weights(config) for config in configs if isinstance(config, ReleasingMethod)]
    if len(candidates) < 2 or len(candidates) < len(configs):
        others = sorted({config.method for config in configs} - {config.method for config in candidates})
        found = f"{', '.join(others)} without one" if others else f"{len(configs)} of them"
        raise ConfigError(f"methods: expected two settings or more that learn from a release of arrays, got {found}.")
    first = candidates[0]
    for config in candidates[1:]:
        changes = changed_fields(flat_values(first.release_settings), flat_values(config.release_settings))
        if changes:
            raise ConfigError(
                f"{'; '.join(changes.values())}: read by the release, and a choice is among models of one release; "
                "give these fields one value."
            )
    if first.data.split != "hashed" or not first.data.validation_share:
        raise ConfigError(
            "data.validation_share: a choice needs validation records apart from all others; set data.split=hashed and "
            "a share above 0."
        )

    # Called before the release is drawn: what is refused here must not cost its epsilon.
    def check(dataset: Dataset) -> None:
        group_weights(dataset, group_shares)
        require_kept_names(first, dataset)

    opening = one_release(candidates, reporter, out=out / "release", check=check)
    with opening as (dataset, log, released, students):
        weights = group_weights(dataset, group_shares)
        # The guarantee of the release: both are stated as one epsilon for one unit.
        unit, relation = released.events[0].unit, released.events[0].relation
        # Noise of the kind that the release has: the statement names one for both.
        source: NoiseSource = OsEntropy()
        if first.is_seeded:
            source = SeededSource(stream_seed(first.seed, Stream.CHOICE))

        event = PureReleases(count=1, epsilon=epsilon, unit=unit, relation=relation)

        def draw() -> Released:
            scores_M = [score_of(student, dataset.validation, weights, source) for student in students]
            return choice_among(scores_M, epsilon=epsilon, unit=unit, relation=relation, source=source)

        settings = {
            "candidates": [values_digest(config.settings_without()) for config in candidates],
            # All that the draw depends on: under other settings the choice that is kept is refused.
            "group_weights": weights.tolist(),
            "epsilon": epsilon,
            "parts": dataset.parts,
            "release": arrays_digest(released.arrays),
        }
        model = RunDirectory(root=out / "model")
        if model.choice.exists() and not RunDirectory(root=out / "release").choice.exists():
            raise RunDirectoryError(
                f"{out / 'release'}: lacks the choice that {model.root} states; copy {model.choice.name} back."
            )
        made = log.of_part("validation").step(draw, settings=settings, pool="", noise=source.label, events=(event,))
    chosen = candidates[int(made.arrays["chosen"][0])]
    run = run_method(chosen.model_copy(update={"out": out / "model"}), reporter, release_of=out / "release")
    if not run.choice.exists():  # then the statement would not price it
        raise RunDirectoryError(f"{run.root}: holds another model than the chosen one; give a new folder with --out.")
    return run


def group_weights(dataset: Dataset, shares: Mapping[str, float] | None) -> IntArray:
    """The weight (G,) of a record of each group: in proportion to one over its group's declared share, and at most
    ``WEIGHT``. ConfigError for names or shares that are not those of all groups."""
    if shares is None:
        return np.full(dataset.num_groups, WEIGHT, np.int64)
    if set(shares) != set(dataset.group_names) or not all(0 < share <= 1 for share in shares.values()):
        raise ConfigError(
            f"--share: expected a number in (0, 1] for each of {', '.join(dataset.group_names)}, got {dict(shares)}."
        )
    # The smallest group weighs the most: WEIGHT, the bound of what one unit adds to a score.
    least = min(shares.values())
    return np.array([int(WEIGHT * least / shares[name]) for name in dataset.group_names], np.int64)


def score_of(student: Student, validation: Split, weights_G: IntArray, source: NoiseSource) -> int:
    """The sum of the weights of validation records that ``student`` predicts rightly; a person's records share one
    weight."""
    labels_N, _ = lone_predictions(student, validation, source)
    right_N = labels_N == validation.y.numpy()
    # Rounded down record by record: those of a person never add up to more than one weight.
    return int((weights_G[validation.z.numpy()] // records_of_unit(validation))[right_N].sum())


def choice_among(
    scores_M: Sequence[int], *, epsilon: float, unit: Unit, relation: Relation, source: NoiseSource
) -> Released:
    """Draw the place of one candidate by the exponential mechanism, exactly."""
    # The mechanism's own exponent is halved, which scores that move in one direction do not need.
    sensitivity = Fraction(WEIGHT, 2) if relation == "add or remove one" else Fraction(WEIGHT)
    # Exact fractions: probabilities in floating point would leak through their rounding (Ilvento 2020).
    costs = [Fraction(-score) for score in scores_M]
    place = choose_cheap(costs, sensitivity=sensitivity, epsilon=epsilon, source=source)
    event = PureReleases(count=1, epsilon=epsilon, unit=unit, relation=relation)
    return Released(arrays={"chosen": np.array([place], np.int64)}, events=(event,))
