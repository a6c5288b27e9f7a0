"""Noise from budget: the teachers, threshold, noises and queries of Confident-GNMax that fit an epsilon and a delta.

A plan is made from votes: those that an assumed consensus would give, or real ones. It keeps the target in one of the
two ways of :mod:`fairpate.methods.voting`: data-independently, whatever the votes, or by the data-dependent privacy
cost. What the votes say beside it (answers, right labels, their price) is a forecast under the assumption. From real
votes every number here is private, the choice among plans included: no epsilon covers it.

Plans are ranked by ``worth``, how many noiseless labels the answers stand for: of Q labels that are right with
probability p among C classes, Q ((p - 1/C) / (1 - 1/C))^2, the information left by uniform label noise to first order.

Not known here: how consensus falls when more teachers share the same records; the caller states it for every
number of teachers. Shapes: R rows of a profile, C classes, A orders, K nodes of a quadrature.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy

from aggregator.gnmax import ConfidentGnmax
from aggregator.ledger.budget import mechanism_within
from fairpate.app.rundir import RunDirectory, RunFolderError
from fairpate.app.tables import read_votes
from fairpate.app.trained_on import require_data_by_name
from fairpate.config import ConfigError, DataConfig, PrivacyTarget
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data import load_dataset
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS
from fairpate.privacy.conversion import epsilon_of_curve
from fairpate.steps import stepwise
from fairpate.types import IntArray, Unit

FloatArray = npt.NDArray[np.float64]
Price = Literal["data_independent", "data_dependent"]
_PROFILE_ROWS = 100
_TEACHER_COUNTS = (50, 100, 200, 400)
AGREEMENT, SPREAD = 0.75, 0.2
_THRESHOLD_SHARES = (-math.inf, 0.4, 0.5, 0.6, 0.7)
_NOISE_RATIOS = (1.5, 3.0)
_NOISE_SHARES = (0.05, 0.075, 0.1, 0.15, 0.2, 0.3)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Votes that are expected of ``num_teachers``, each row for an equal share of the queries.

    ``right_R`` is the class that counts as right. ``from_votes``: the rows are real votes, hence private.
    """

    votes_RC: IntArray
    right_R: IntArray
    from_votes: bool = False

    @property
    def num_teachers(self) -> int:
        """Votes of one row."""
        return int(self.votes_RC[0].sum())

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return int(self.votes_RC.shape[1])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to spend the target. ``answered``, ``winner_kept`` and ``right`` are shares: of the queries, and of their
    answers.

    ``winner_kept``: the answer is the class with most votes, which noise left unchanged. Right is what the profile
    counts as right. ``epsilon`` holds for any votes; ``epsilon_data_dependent`` is what these
    votes would cost.
    """

    num_teachers: int
    num_queries: int
    mechanism: ConfidentGnmax
    epsilon: float
    epsilon_data_dependent: float
    answered: float
    winner_kept: float
    right: float
    worth: float


def assumed_profile(
    *, num_teachers: int, num_classes: int, agreement: float, spread: float, num_rows: int = _PROFILE_ROWS
) -> Profile:
    """The share of teachers that vote for the right class has mean ``agreement`` and standard deviation ``spread``.

    Over queries it follows a Beta law; the other votes are divided evenly. ValueError unless 0 < agreement < 1 and
    0 <= spread^2 < agreement (1 - agreement).
    """
    if not 0 < agreement < 1 or not 0 <= spread**2 < agreement * (1 - agreement):
        raise ConfigError(
            "Expected 0 < agreement < 1 and a spread whose square is below agreement * (1 - agreement), got "
            f"{agreement} and {spread}."
        )
    # The middles of slices that are equally likely.
    middle_R = (np.arange(num_rows) + 0.5) / num_rows
    share_R = np.full(num_rows, agreement)
    if spread:
        # The sum of both parameters of the Beta law that has this mean and variance.
        total = agreement * (1 - agreement) / spread**2 - 1
        share_R = scipy.stats.beta.ppf(middle_R, agreement * total, (1 - agreement) * total)
    right_R = np.rint(share_R * num_teachers).astype(np.int64)
    # Rounded down below, floor((n + k) / m) over k from 0 to m - 1 add up to n: no vote is lost.
    others_RC = (num_teachers - right_R)[:, None] + np.arange(num_classes - 1)[::-1]
    return Profile(
        votes_RC=np.column_stack([right_R, others_RC // (num_classes - 1)]), right_R=np.zeros(num_rows, dtype=np.int64)
    )


def profile_of_votes(votes_QC: IntArray) -> Profile:
    """Real votes; what most teachers chose counts as right, for the truth is not among them. Private."""
    return Profile(votes_RC=votes_QC, right_R=votes_QC.argmax(axis=1), from_votes=True)


def profile_of_run(run: RunDirectory, data: str) -> Profile:
    """The votes of a run on ``data``. RunFolderError where there are none, or of another data set."""
    if not run.votes.is_file():
        raise RunFolderError(f"--votes: {run.votes} is missing: no votes; give a run of a method with teachers.")
    require_data_by_name(run)
    name = str((read_yaml(run.config).get("data") or {}).get("name"))
    if name != data:
        raise RunFolderError(
            f"--votes: {run.root} is a run on {name}, not on {data}; give --data {name}, or a run on {data}."
        )
    return profile_of_votes(read_votes(run.votes).votes_QC)


def plan_for(
    data: DataConfig,
    *,
    epsilon: float,
    delta: float,
    query_counts: Sequence[int],
    teacher_counts: Sequence[int] | None = None,
    agreement: float | None = None,
    spread: float | None = None,
    votes: Path | None = None,
) -> Proposal:
    """Plans for a data set, of which only the number of classes and of public records is read.

    None for ``teacher_counts``, ``agreement`` and ``spread`` is 50 to 400, 0.75 and 0.2. With ``votes``, a run on the
    data set, its real votes stand for the assumption and the number of teachers is theirs; ConfigError where one of the
    three is given beside it. Queries beyond the public pool are left out. ConfigError where none is left; errors as the
    functions called.
    """
    parse_config({"epsilon": epsilon, "delta": delta}, PrivacyTarget)
    assumed = {"--teachers": teacher_counts, "--agreement": agreement, "--spread": spread}
    given = [option for option, value in assumed.items() if value is not None]
    if votes is not None and given:
        raise ConfigError(f"{', '.join(given)}: nothing is assumed beside --votes; leave out the one or the other.")
    dataset = load_dataset(data)
    counts = sorted({count for count in query_counts if count <= len(dataset.public)})
    if not counts:
        raise ConfigError(
            f"--queries: {min(query_counts)} and more, but {len(dataset.public)} public records; lower it."
        )
    if votes is not None:
        profiles = [profile_of_run(RunDirectory(root=votes), data.name)]
        assumption = f"Votes of {votes}: {profiles[0].num_teachers} teachers, {len(profiles[0].votes_RC)} queries."
    else:
        agreement = AGREEMENT if agreement is None else agreement
        spread = SPREAD if spread is None else spread
        profiles = [
            assumed_profile(num_teachers=count, num_classes=dataset.num_classes, agreement=agreement, spread=spread)
            for count in sorted(set(teacher_counts or _TEACHER_COUNTS))
        ]
        assumption = f"Assumed: {agreement:.0%} of teachers are right, with a standard deviation of {spread:.0%}."
    proposal = propose(profiles, epsilon=epsilon, delta=delta, query_counts=counts, assumption=assumption)
    return replace(proposal, unit=dataset.unit)


def plans(
    profiles: Sequence[Profile], *, epsilon: float, delta: float, query_counts: Sequence[int], price: Price
) -> list[Plan]:
    """The best plan for every profile and number of queries, in falling order of worth; none where nothing fits.

    ``price`` is what the target limits. The noise scales with it under ``data_independent``; under ``data_dependent``,
    where more noise may cost more, it is the best of some shares of the teachers.
    """
    best: dict[tuple[int, int], Plan] = {}
    for profile, share, ratio in stepwise(list(itertools.product(profiles, _THRESHOLD_SHARES, _NOISE_RATIOS))):
        found = (
            [_fitted(profile, share, ratio, epsilon, delta, count) for count in query_counts]
            if price == "data_independent"
            else _affordable(profile, share, ratio, epsilon, delta, query_counts)
        )
        for plan in found:
            key = plan.num_teachers, plan.num_queries
            best[key] = max(best.get(key, plan), plan, key=lambda plan: plan.worth)
    return sorted(best.values(), key=lambda plan: -plan.worth)


def _fitted(profile: Profile, share: float, ratio: float, epsilon: float, delta: float, num_queries: int) -> Plan:
    """The least noise at which the queries fit whatever the votes."""
    noises = _noises(epsilon, delta, num_queries, ratio, math.isfinite(share))
    mechanism = replace(noises, threshold=share * profile.num_teachers)
    return _forecast(profile, mechanism, delta, [num_queries])[0]


def _affordable(
    profile: Profile, share: float, ratio: float, epsilon: float, delta: float, query_counts: Sequence[int]
) -> list[Plan]:
    """Noises at which the queries would fit by the price of these votes."""
    found = []
    for noise in (share_of_teachers * profile.num_teachers for share_of_teachers in _NOISE_SHARES):
        mechanism = ConfidentGnmax(
            threshold=share * profile.num_teachers, threshold_stddev_votes=ratio * noise, noise_stddev_votes=noise
        )
        found += _forecast(profile, mechanism, delta, query_counts)
    return [plan for plan in found if plan.epsilon_data_dependent <= epsilon]


def _forecast(profile: Profile, mechanism: ConfidentGnmax, delta: float, query_counts: Sequence[int]) -> list[Plan]:
    """What the votes say of one mechanism, for every number of queries."""
    answer_R = mechanism.answer_probability(profile.votes_RC)
    answered = float(answer_R.mean())
    kept, right = (
        float(answer_R @ mechanism.right_probability(profile.votes_RC, class_R) / answer_R.sum())
        if answered > 0
        else math.nan
        for class_R in (profile.votes_RC.argmax(axis=1), profile.right_R)
    )
    # Renyi costs add up: so many queries like these cost so many times the mean over the rows.
    row_A = accountant.rdp_data_dependent([mechanism.realised(profile.votes_RC)]) / len(profile.votes_RC)
    return [
        Plan(
            num_teachers=profile.num_teachers,
            num_queries=count,
            mechanism=mechanism,
            epsilon=accountant.epsilon([mechanism.worst_case(count)], target_delta=delta).epsilon,
            epsilon_data_dependent=epsilon_of_curve(count * row_A, DEFAULT_ORDERS, target_delta=delta)[0],
            answered=answered,
            winner_kept=kept,
            right=right,
            worth=worth_of(count * answered, right, num_classes=profile.num_classes) if answered > 0 else 0.0,
        )
        for count in query_counts
    ]


def worth_of(labels: float, right: float, *, num_classes: int) -> float:
    """How many noiseless labels as many stand for of which a share of ``right`` is right, as the module says."""
    chance = 1 / num_classes
    return labels * max(0.0, (right - chance) / (1 - chance)) ** 2


@lru_cache(maxsize=1024)
def _noises(epsilon: float, delta: float, num_queries: int, ratio: float, has_threshold: bool) -> ConfidentGnmax:
    """The least noises that keep the queries within the target; any finite threshold costs the same."""
    unscaled = ConfidentGnmax(
        threshold=0.0 if has_threshold else -math.inf, threshold_stddev_votes=ratio, noise_stddev_votes=1.0
    )
    return mechanism_within(unscaled, target_epsilon=epsilon, target_delta=delta, num_queries=num_queries)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What `fairpate plan` says: the plans that hold for any votes, and those that hold for such votes alone."""

    epsilon: float
    delta: float
    assumption: str
    from_votes: bool
    for_any_votes: Sequence[Plan]
    for_these_votes: Sequence[Plan]
    unit: Unit = "record"


def propose(
    profiles: Sequence[Profile], *, epsilon: float, delta: float, query_counts: Sequence[int], assumption: str
) -> Proposal:
    """Plans in both ways of keeping the target."""

    def kept(price: Price) -> list[Plan]:
        return plans(profiles, epsilon=epsilon, delta=delta, query_counts=query_counts, price=price)

    return Proposal(
        epsilon=epsilon,
        delta=delta,
        assumption=assumption,
        from_votes=any(profile.from_votes for profile in profiles),
        for_any_votes=kept("data_independent"),
        for_these_votes=kept("data_dependent"),
    )
