"""Forecasts before anything is spent: noise, labels and cost of each kind of voters at a target epsilon.

Noise from budget: the teachers, threshold, noises and queries of Confident-GNMax that fit an epsilon and a delta.

A plan is made from votes: those that an assumed consensus would give, or real ones. It keeps the target in one of the
two ways of :mod:`fairpate.methods.pate`: data-independently, whatever the votes, or by the data-dependent privacy
cost. What the votes say beside it (answers, right labels, their price) is a forecast under the assumption. From real
votes every number here is private, the choice among plans included: no epsilon covers it.

Plans are ranked by ``worth``, how many noiseless labels the answers stand for: of Q labels that are right with
probability p among C classes, Q ((p - 1/C) / (1 - 1/C))^2, the information left by uniform label noise to first order.

Not known here: how consensus falls when more teachers share the same records; the caller states it for every
number of teachers. Shapes: R rows of a profile, C classes, A orders, K nodes of a quadrature.

Whether a run can beat the most common class, as far as public facts say: before anything is spent.

Two facts say that it cannot. Labels under so much noise that, were all voters right about every record, they would
stand for fewer than one noiseless label of another class than the most common one: of W noiseless labels
(:func:`fairpate.run.plan.worth_of`) W (1 - m) are, where m is the share of the most common class. And an
earlier run of the same method on the same data, at no smaller epsilon, whose published accuracy is none above m.

m is what the declaration says (``label.shares``), what labels of public records say, or what published runs measured;
where none of them does, it is taken to be as small as it can be. No private record is looked at.

Who could vote on a data set at an epsilon: every kind of voters with settings that fit, and what to expect of it.

Settings are those of :mod:`fairpate.methods.base`, from public facts; the noise is the least that the target allows.
What is expected follows from an assumption, the same for all kinds: of those who vote on a label a share of mean
``agreement`` and standard deviation ``spread`` is right. It is a forecast of noise, not of accuracy: whether models on
shards, or records that lie near, agree that often is what no public fact says.

Theorem 1 of FairPATE as a calculator: what a filter of private records for parity does to a guarantee.

The plans of :mod:`fairpate.run.plan` in words: tables for a terminal, values for a program.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aggregator.budgets import mechanism_within
from aggregator.mechanism import ConfidentGnmax
from fairpate.config import ConfigError, DataConfig, EmbeddingConfig, PrivacyTarget
from fairpate.config_reader import parse_config, read_yaml
from fairpate.data import Dataset, entry_for, load_data
from fairpate.data.dataset import DatasetEntry, DataSettingsError
from fairpate.methods.base import Method, Voting, count_protected, resolved
from fairpate.methods.pate import cost_behind_sorted_filter, preprocessing_factor, target_behind_sorted_filter
from fairpate.privacy import accountant
from fairpate.privacy.accountant import DEFAULT_ORDERS, epsilon_of_curve
from fairpate.report.page import counted, epsilon_text, percent
from fairpate.run.context import RunDirectory, RunFolderError, read_votes
from fairpate.run.learn import require_data_by_name
from fairpate.terminal import facts
from fairpate.types import IntArray, Unit, stepwise, strict
from fairpate.words import delta_text, exact_text

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
    dataset = load_data(data)
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


_FEWEST_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The share of the most common class, and who says so."""

    share: float
    source: str


def cautions(config: Method, dataset: Dataset, run: RunDirectory) -> tuple[str, ...]:
    """Why a run of ``config`` in the folder ``run`` cannot beat the most common class; empty where nothing says so."""
    earlier = list(_earlier(config, run))
    majority = known_majority(config.data, dataset) or next((each for each, _ in earlier), None)
    found = [words for _, words in earlier if words]
    try:
        # Voters where the attribute alone is protected name no class; of other data no public size is known.
        if not config.protects_attribute_only and _entry(config.data, dataset) is not None:
            voting = config.voting(dataset, public_size(config.data, dataset))
            found.append(too_little_to_learn(voting, dataset.num_classes, majority) or "")
    except (NotImplementedError, ConfigError):  # nobody votes; or the run itself says what is wrong
        pass
    return tuple(filter(None, found))


def too_little_to_learn(voting: Voting, num_classes: int, majority: Majority | None) -> str | None:
    """Why labels under this noise teach no class but the most common, even if all voters are right; None if they may.

    Without a known ``majority`` classes are taken to be equally common.
    """
    agreed_1C = np.array([[voting.votes, *[0] * (num_classes - 1)]])
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    right = float(noisy.right_probability(agreed_1C, np.zeros(1, dtype=np.int64))[0])
    worth = worth_of(voting.labels, right, num_classes=num_classes)
    share = 1 / num_classes if majority is None else majority.share
    if worth * (1 - share) >= 1:
        return None
    known = "" if majority is None else f", which is {percent(share)} of records by {majority.source}"
    return (
        f"cannot be expected to beat the most common class{known}: under this noise "
        f"{counted(voting.labels, 'label')} stand for {worth:.2g} without noise even if all voters are right, so for "
        f"{worth * (1 - share):.2g} of another class"
    )


def known_majority(data: DataConfig, dataset: Dataset) -> Majority | None:
    """By the declaration, or by labels of public records; None where neither knows."""
    entry = _entry(data, dataset)
    if entry is not None and entry.class_shares:
        return Majority(share=max(entry.class_shares), source="the declaration")
    labels = dataset.public.y.numpy()
    known = labels[labels >= 0]
    if len(known) < _FEWEST_LABELS:
        return None
    return Majority(share=float(np.bincount(known).max() / len(known)), source="labels of public records")


def public_size(data: DataConfig, dataset: Dataset) -> int:
    """The publisher's count of what is protected, records or persons, less those of the other splits."""
    others = [split for name, split in dataset.splits.items() if name != "private"]
    by_person = dataset.unit == "person" and entry_for(data).persons is not None
    return max(1, count_protected(data) - sum(split.num_protected if by_person else len(split) for split in others))


def _entry(data: DataConfig, dataset: Dataset) -> DatasetEntry | None:
    """What is public of the data set; None for one that was given from Python or comes with votes."""
    try:
        entry = entry_for(data)
    except DataSettingsError:
        return None
    return entry if entry.name == dataset.name else None


def _earlier(config: Method, run: RunDirectory) -> Iterator[tuple[Majority, str]]:
    """Of published runs on the same data beside this one: the majority that they measured, and who did not beat it."""
    epsilon = getattr(config.target, "epsilon", None)
    for path in sorted(run.root.parent.glob("*/public/record.json")):
        record = _record(path)
        majority, accuracy = record.get("majority_accuracy"), record.get("accuracy")
        if record.get("data") != config.data.name or majority is None or accuracy is None or path == run.record:
            continue
        words = ""
        is_dearer = epsilon is not None and (record.get("epsilon") or math.inf) >= epsilon
        if record.get("method") == config.method and is_dearer and accuracy <= majority:
            words = (
                f"an earlier run of {config.method}, {path.parent.parent.name}, did not beat the most common class at "
                f"epsilon {epsilon_text(record['epsilon'])}: {percent(accuracy)} of {percent(majority)}"
            )
        yield Majority(share=majority, source=f"the test records of {path.parent.parent.name}"), words


def _record(path: Path) -> dict[str, Any]:
    """What an earlier run published; nothing of a damaged file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


VOTERS = {
    "weighted_votes": "every record, a vector",
    "record_votes": "every record, one count",
    "private_knn": "nearest records of a secret sample",
    "fairpate": "models trained on shards",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One kind of voters within the target. ``refused`` says why there is none; the numbers are then null.

    ``votes`` decide one label, under noise of ``noise_stddev_votes``; ``labels`` of public records result, of which a
    share of ``winner_kept`` is expected to be the class with most votes, and one of ``right`` to be right, as assumed;
    ``worth``: how many noiseless labels they stand for. ``caution`` says why its model cannot beat the most common
    class, where that is known.
    """

    method: str
    voters: str
    command: str
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    winner_kept: float | None = None
    right: float | None = None
    worth: float | None = None
    caution: str | None = None
    refused: str | None = None


def candidates(
    data: DataConfig,
    said: str,
    *,
    epsilon: float,
    delta: float,
    agreement: float | None = None,
    spread: float | None = None,
) -> list[Candidate]:
    """All kinds, the most worth first; of the records only public ones are read. ``said`` names the data in commands.

    None for ``agreement`` and ``spread`` is 0.75 and 0.2. DataError as :func:`fairpate.data.load_data`.
    """
    assumed = {
        "agreement": AGREEMENT if agreement is None else agreement,
        "spread": SPREAD if spread is None else spread,
    }
    assumed_profile(num_teachers=2, num_classes=2, num_rows=1, **assumed)  # refused before minutes of work
    # The embedding of a pool may take a minute, and several kinds have the same one.
    load = cache(lambda embedding: load_data(data.model_copy(update={"embedding": embedding})))
    found = [
        _candidate(method, data, said, load, epsilon=epsilon, delta=delta, **assumed)
        for method in stepwise(list(VOTERS))
    ]
    return sorted(found, key=lambda each: math.inf if each.worth is None else -each.worth)


def _candidate(
    method: str,
    data: DataConfig,
    said: str,
    load: Callable[[EmbeddingConfig | None], Dataset],
    *,
    epsilon: float,
    delta: float,
    agreement: float,
    spread: float,
) -> Candidate:
    at = "" if delta == PrivacyTarget.model_fields["delta"].default else f" --delta {exact_text(delta)}"
    files = "" if data.data_dir is None else f" --data-dir {shlex.quote(str(data.data_dir))}"
    command = f"fairpate run --data {shlex.quote(said)} --epsilon {exact_text(epsilon)}{at} --method {method}{files}"
    known: dict[str, Any] = {"method": method, "voters": VOTERS[method], "command": command}
    try:
        # Field by field: a whole section would take the place of the embedding that a run chooses.
        named = data.model_dump(mode="json", exclude_unset=True)
        fields = [f"data.{field}={json.dumps(value)}" for field, value in named.items()]
        config = resolved([*fields, f"target.epsilon={epsilon}", f"target.delta={delta}"], method)
        config.require_trainable()
        dataset = load(config.data.embedding)
        voting = config.voting(dataset, public_size(data, dataset))
    except ConfigError as error:
        return Candidate(**known, refused=str(error))
    profile = assumed_profile(
        num_teachers=voting.votes, num_classes=dataset.num_classes, agreement=agreement, spread=spread
    )
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    kept, right = (
        float(noisy.right_probability(profile.votes_RC, class_R).mean())
        for class_R in (profile.votes_RC.argmax(axis=1), profile.right_R)
    )
    return Candidate(
        **known,
        **asdict(voting),
        winner_kept=kept,
        right=right,
        worth=worth_of(voting.labels, right, num_classes=dataset.num_classes),
        caution=too_little_to_learn(voting, dataset.num_classes, known_majority(data, dataset)),
    )


def describe_candidates(found: Sequence[Candidate], *, epsilon: float, chosen: str) -> Group:
    """A table, the command of each, and the method that a run takes of itself: ``chosen``."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("method", "who votes", "votes a label", "noise", "labels", "winner kept", "worth"):
        table.add_column(name, justify="left" if name in ("method", "who votes") else "right")
    for each in found:
        table.add_row(each.method, each.voters, *_numbers(each))
    lines = [f"  {each.command}" if each.refused is None else f"  {each.method}: {each.refused}" for each in found]
    lines += [f"  {each.method}: {each.caution}" for each in found if each.caution]
    lines += [
        "",
        "winner kept: the share of labels that are the class with most votes, unchanged by noise; no accuracy.",
    ]
    lines += ["", f"Where no method is named: {chosen}."]
    title = f"Who could vote, each at a published epsilon of {epsilon:g}, with settings from public facts:"
    return Group(Text(title), table, Text("\n".join(["", *lines, ""])))


def _numbers(each: Candidate) -> list[str]:
    if each.refused is not None:
        return ["–"] * 5
    noise, kept, worth = each.noise_stddev_votes or 0.0, each.winner_kept or 0.0, each.worth or 0.0
    return [f"{each.votes}", f"{noise:.3g}", f"{each.labels}", f"{kept:.1%}", f"{worth:.0f}"]


def cost_of_filter(epsilon: float, delta: float, disparity: float) -> dict[str, Any]:
    """The factor K; the cost of what is (epsilon, delta) without the filter; and what costs that with it.

    ValueError for numbers that are no guarantee or no disparity.
    """
    cost = cost_behind_sorted_filter(epsilon, delta, max_disparity=disparity)
    target = target_behind_sorted_filter(epsilon, delta, max_disparity=disparity)
    return {
        "factor": preprocessing_factor(disparity),
        "given": {"epsilon": epsilon, "delta": delta, "disparity": disparity},
        "cost": dict(zip(("epsilon", "delta"), cost, strict=True)),
        "target": dict(zip(("epsilon", "delta"), target, strict=True)),
    }


def describe_cost(cost: dict[str, Any]) -> RenderableType:
    """The same in words: what is charged is rounded up, and what may be spent down."""
    given = _guarantee(cost["given"], rounding=None)
    charged = _guarantee(cost["cost"], rounding=ROUND_CEILING)
    allowed = _guarantee(cost["target"], rounding=ROUND_FLOOR)
    return facts(
        [
            ("records", f"one added or removed changes at most {cost['factor']} of those kept"),
            ("cost", f"{given} behind the filter costs {charged}"),
            ("target", f"to cost {given}, spend {allowed} behind it"),
            ("holds for", "two groups and the filter that sorts (docs/training.md); never for a stream of records"),
        ]
    )


def _guarantee(found: dict[str, float], *, rounding: str | None) -> str:
    epsilon, delta = (_rounded(found[name], rounding) for name in ("epsilon", "delta"))
    return f"epsilon {epsilon:.10g}, delta {delta_text(delta)}"


def _rounded(value: float, rounding: str | None) -> float:
    """To four digits; what is wrong in the sixteenth is no reason to round on."""
    return value if rounding is None else float(Context(prec=4, rounding=rounding).create_decimal(f"{value:.12g}"))


_NUM_PLANS = 6


def describe(proposal: Proposal) -> Group:
    """The best plans as tables."""
    source = "these votes" if proposal.from_votes else "the assumption"
    warning = (
        "Operator only: every number below was computed from private votes. Choosing by them costs privacy that no "
        "epsilon here covers."
        if proposal.from_votes
        else "From an assumption and no votes: nothing here costs privacy. Below, the numbers under ε alone are "
        "guarantees."
    )
    notes = (
        f"ε: at delta {delta_text(proposal.delta)}, add or remove one {proposal.unit}, whatever the votes; this is "
        f"what a run publishes.\nby votes, answered, winner kept: what {source} would give; the epsilon by votes "
        "must not be published."
        "\nwinner kept: the share of answers that are the class with most votes, unchanged by noise. It is no "
        "accuracy: where most teachers err, the answer is wrong."
        "\nworth: how many noiseless labels the answers stand for."
    )
    return Group(
        Text(f"{warning}\n{proposal.assumption}\n\nWithin epsilon {proposal.epsilon:g} whatever the votes:"),
        _table(proposal.for_any_votes[:_NUM_PLANS]),
        Text(
            f"\nWithin epsilon {proposal.epsilon:g} by the data-dependent privacy cost alone, which is no guarantee "
            "and leaks:"
        ),
        _table(proposal.for_these_votes[:_NUM_PLANS]),
        Text(f"\n{notes}"),
    )


def _table(found: Sequence[Plan]) -> Table | Text:
    if not found:
        return Text("\n  nothing fits\n")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in (
        *("teachers", "queries", *found[0].mechanism.columns()),
        *("ε", "by votes", "answered", "winner kept", "worth"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in found:
        table.add_row(
            str(plan.num_teachers),
            str(plan.num_queries),
            *plan.mechanism.columns().values(),
            epsilon_text(plan.epsilon),
            epsilon_text(plan.epsilon_data_dependent),
            f"{plan.answered:.0%}",
            "undefined" if math.isnan(plan.winner_kept) else f"{plan.winner_kept:.1%}",
            f"{plan.worth:.0f}",
        )
    return table


def proposal_json(proposal: Proposal) -> dict[str, Any]:
    """The plans as values of strict JSON, in which no threshold, and what is undefined, is null."""

    def rows(found: Sequence[Plan]) -> list[dict[str, Any]]:
        return [{**vars(plan), "mechanism": plan.mechanism.parameters} for plan in found]

    values = {
        "epsilon": proposal.epsilon,
        "delta": proposal.delta,
        "unit": proposal.unit,
        "assumption": proposal.assumption,
        "from_private_votes": proposal.from_votes,
        "right": "as most teachers chose" if proposal.from_votes else "by the assumption",
        "for_any_votes": rows(proposal.for_any_votes),
        "for_these_votes": rows(proposal.for_these_votes),
    }
    return dict(strict(values))
