"""Audit a run: canaries in shadow releases, and the lower bounds on epsilon that attacks prove.

A shadow release is drawn for the audit by the run's own method under its settings, from made-up records in the form of
the run's data. A canary is a record that the attacker looks for; a fair coin decides for each canary whether it is
included. No private record is read, so the result may be published. With ``on_private`` the other records are the
private ones, and the result must not be published. The attacker knows all made-up records and what every canary would
add, and reads what a run publishes. Guesses about the coins give lower bounds on epsilon
(:mod:`fairpate.privacy.audit`).

- Tables and sums: a canary has a cell of the table or a direction of its own. The attacker's score is the likelihood
  ratio of the released numbers.
- Teachers' votes: a canary changes its teacher's vote by a random code over the queries. The score is the correlation
  of this code with the answers, or with which queries passed the threshold check. With small teachers it has a cell of
  the table of private labels by score as well.
- SGD family: a canary has a feature of its own. The score is the likelihood ratio of the noisy sums of all steps, in
  the direction of the canary's gradient. Models without such a direction (convolutions) are attacked by how much the
  published model raised the odds of the canary's label, which is weak.

**Every release by itself.** A method may make several releases under noises of their own: a fault in one of them may
drown in the sum of all. Therefore each is attacked by itself, against what the statement claims of it alone. The audit
looks at how much noise it really has, at how this noise is drawn (on every number, fresh, in its own shape), and at the
most that one unit of any kind adds without noise. Releases of a training step beside its gradients (histograms, sizes,
matrices, shares) are attacked in one step on all records. The joint attack adds likelihood ratios that are scaled by
the noise that is seen, not by the noise that is claimed. All tests together hold the stated confidence: each gets an
equal part of the level.

**Power.** What would have been found follows from the claims and from the number of draws, never from what the code
under test released. The control repeats the attack under half the noise: drawn by the audit itself on exact numbers
where the method can release them to a caller, else planned. A control that is further apart than its plan allows is a
finding; one that the attack does not see lowers the power.

Shapes: M canaries of one release, S releases with noises of their own, N records, Q queries, C classes, W numbers per
class.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import scipy
import torch
from torch import Tensor

from aggregator.session import mechanism_within
from fairpate.config import EMBEDDED_NORM, EmbeddingConfig, RayConfig, values_digest
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.data.features import embedded
from fairpate.fairness.gate import DemographicParityGate
from fairpate.fairness.rates import joint_table
from fairpate.methods.base import Method, Training, Watch, price
from fairpate.methods.dp_fair_learning import Postprocessing, released_counts
from fairpate.methods.dp_fermi import DpFermi
from fairpate.methods.dp_sgd import DpSgdFamily
from fairpate.methods.noisy_counts import NoisyCounts, ThresholdsConfig
from fairpate.methods.pate import GnmaxMethod, PateFamily
from fairpate.methods.raco_dp import RacoDp
from fairpate.methods.record_votes import UNITS, RecordVotes, VectorsConfig, WeightedBallot, WeightedVotes
from fairpate.methods.residual_votes import (
    AdaSsp,
    RecordSums,
    ResidualVotes,
    indicators,
    least_eigenvalue,
    votes_themselves,
)
from fairpate.methods.teacher_votes import TeacherVotes
from fairpate.nn.models import scale_bytes
from fairpate.privacy import mechanism_events
from fairpate.privacy.accountant import ConfidentGnmaxQueries, Event, LaplaceReleases, PoissonGaussians, SpentError
from fairpate.privacy.audit import (
    LESS_NOISE,
    IdealAttack,
    NoiseSeen,
    NoiseTest,
    answer_scores,
    gaussian_epsilon,
    gaussian_mu,
    grid_test,
    guess,
    noise_tests,
    normal_scores,
    separate,
    spread_of_samples,
)
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, OsEntropy, log_masses
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces, PredictionTables, event_from, event_json
from fairpate.releases.arrays import Released, read_release
from fairpate.releases.directory import (
    DataRecord,
    RunDirectory,
    read_statement,
    read_votes,
    require_data,
    require_data_by_name,
    write_json,
    write_text,
)
from fairpate.report.run_page import AttackResult, Audit, AuditedRelease, SingleRelease, audit_page
from fairpate.run.bundle import alike
from fairpate.run.folder import finished_run, load_for
from fairpate.run.model import initial_model
from fairpate.run.private_metrics import draw_table, lone_predictions
from fairpate.terminal import Reporter, duration
from fairpate.types import FloatArray, GateRule, IntArray, PrivacyStatement, UsageError, heard_by, strict
from student.student import load_student
from teachers.ensemble import BlockPool

Numbers = npt.NDArray[Any]
SumMethod = WeightedVotes | ResidualVotes | AdaSsp
Coins = npt.NDArray[np.bool_]
MINUTES = 60.0  # default limit of an audit's run time
CANARIES = 20_000  # default number of coin flips of one audit, spread over as many releases as they need
_LOUD = 20.0  # a canary's feature: far beyond every radius and clipping bound
_COPIES = 3  # records of a canary, where persons are protected
_MOST_POOL, _MOST_EACH, _MOST_OF_EIGENVALUE = 1000, 256, 128
_OTHERS, _FEW_OTHERS = 1000, 100  # made-up records of a shadow release; fewer where they add next to nothing
_MOST_CANARIES = 2**24
_FINE = 10.0  # votes; the moments of wider discrete noise are those of a Gaussian
_FAR = 50.0  # of a logarithm of odds
_MOST_NUMBERS = 4096  # of a parameter, whose noise is looked at
_MOST_DRAWS, _MOST_PLACES = 1024, 1024  # steps and numbers of a step, whose noise is looked at one by one
_SAMPLED, _MOST_ALONE = 60, 64  # expected samples with a canary that is alone, and trainings of it
_SURE = 0.02  # a probability of the rarer answer; surer ones do not show their noise
_STILL = 0.05  # standard deviations of the noise, within which weights move as released
_MANY = 100  # steps or queries, whose sum is nearly normal
_LEAST_SPREAD = 1e-4  # of a squared gain: a release without noise must not make all others count for nothing
_ROUNDED = 1.001  # the events add a margin for rounded numbers
_EVENTS_ALIKE = 0.01  # relative; a repeated search for the noise may end at a slightly different float


class AuditError(UsageError):
    """Raised if a run cannot be audited, or if its audit could prove nothing; the message gives reason and remedy."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The noise of one release, in one draw or in several: ``scores_RP`` are its normal scores
    (:func:`fairpate.privacy.audit.normal_scores`), NaN where none was seen; ``divisor`` divides all of it, None if it
    is not of whole numbers."""

    scores_RP: FloatArray
    divisor: int | None = None

    @classmethod
    def of(cls, noise: Numbers, stddev: float) -> Self:
        """Return one draw, of whole numbers with this claimed noise."""
        whole = np.asarray(noise, np.int64).ravel()
        return cls(scores_RP=normal_scores(whole, stddev)[None], divisor=int(np.gcd.reduce(whole)) if whole.size else 0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What an attacker sees of the ``S`` releases of one shadow release.

    ``scores_SM``: the score of every canary in each release, in standard deviations of the claimed noise; NaN for a
    canary that does not enter this release, and no rows for releases that are not attacked. ``gains_SM``: how much the
    score of an included canary is raised on average. ``noise``: for each release, the noise that was seen, in draws of
    several kinds; ``draws``: the same noise number by number.
    """

    scores_SM: FloatArray
    gains_SM: FloatArray
    noise: tuple[tuple[NoiseSeen, ...], ...]
    draws: tuple[Drawn, ...]


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A noisy release of a method with what the statement claims of it alone; ``is_attacked``: scores of
    :class:`Seen` have a row for it. ``is_joint``: this row counts in the attack on all releases together. ``reach``:
    the most that a unit added without noise, over its bound."""

    name: str
    claim: IdealAttack
    is_attacked: bool = True
    is_joint: bool = True
    reach: float | None = None


@dataclass(frozen=True, kw_only=True)
class Shadows:
    """Attacks on simulated ("shadow") releases of one kind, such as noisy tables; ``attack`` describes them in words.

    A canary is a record that the attacker looks for; a fair coin decides whether a release includes it. ``play(coins)``
    draws one shadow release with those canaries whose coins (M,) are true, and returns what the attacker sees.
    ``events``: the accountant's privacy events of one release. ``releases``: its parts with noises of their own.
    ``is_gaussian``: the scores are normally distributed, or sums of many terms. ``is_pure``: the noise of the releases
    is Laplace. ``control_noise``: the share of the noise, 1 for the run itself. ``more``: by release, what all that was
    played shows together. ``unseen``: faults that this attack cannot see, in words.
    """

    attack: str
    events: tuple[Event, ...]
    num_canaries: int
    releases: tuple[Claimed, ...]
    play: Callable[[Coins], Seen]
    is_gaussian: bool = False
    is_pure: bool = False
    control_noise: float = 1.0
    more: Callable[[], Mapping[str, tuple[NoiseSeen | NoiseTest, ...]]] = dict
    unseen: tuple[str, ...] = ()


def audit_run(
    root: Path,
    *,
    reporter: Reporter,
    num_canaries: int = CANARIES,
    on_private: bool = False,
    minutes: float = MINUTES,
) -> tuple[Audit, Path]:
    """Audit the finished run in the folder ``root``: attack simulated releases, and compare the proven lower bound on
    epsilon with the run's claim. Write ``audit.json`` and ``audit.html``, and return the audit and the path of its
    page.

    The attack looks for canaries, records that are added to made-up records or, with ``on_private``, to the run's
    private records. Both files are written to ``public/``, with ``on_private`` to ``private/``. If the shadow releases
    would take longer than ``minutes``, fewer are drawn, and the power says so. Raises AuditError for a run without a
    guarantee, for a method without a known attack, and for too few canaries to detect that half the noise is missing.
    """
    run, config = finished_run(root)
    statement = read_statement(run) if run.statement.is_file() else None
    if not config.is_private or statement is None or statement.noise != OS_ENTROPY or not statement.epsilon:
        raise AuditError(
            f"{root}: this run has no privacy guarantee (method {config.method}, noise "
            f"{'none' if statement is None else statement.noise}), so there is nothing to audit; give a run with a "
            f"finite epsilon and noise {OS_ENTROPY}."
        )
    parts = ["private", *(["test"] if "test" in statement.part_events else [])]
    audited = []
    for part in parts:
        stated = statement.events if part == "private" else statement.part_events[part]
        events = [event_from(event) for event in stated]
        make = partial(shadows_of, run, config, events, part, on_private=on_private)
        shadows, control = make(), make(is_control=True)
        expected, drawn = ([event_json(event) for event in each] for each in (events, shadows.events))
        if not alike(expected, drawn, _EVENTS_ALIKE):
            raise AuditError(
                f"statement.json: states the privacy events {expected}, but the run's settings now give {drawn}; audit "
                "the run with the version of FairPATE that made it (see environment.json)."
            )
        options: dict[str, Any] = {"num_canaries": num_canaries, "minutes": minutes / len(parts), "centred": on_private}
        audited.append(_attacked(shadows, control, statement, part, reporter, **options))
    found = Audit(
        method=config.method,
        unit=statement.unit,
        relation=statement.relation,
        delta=statement.delta,
        epsilon=statement.epsilon,
        # As record.json holds them, without infinities.
        settings=values_digest(strict(config.settings_without())),
        records="private" if on_private else "made",
        not_attacked=tuple(
            words
            for words, is_covered in (
                ("the choice of settings by validation records", "validation" in statement.part_events),
                (
                    "the noise that each site adds by itself (here it is drawn in one place, so that nobody notices a "
                    "site whose noise is missing or known)",
                    run.journal.exists(),
                ),
            )
            if is_covered
        ),
        releases=tuple(audited),
    )
    folder = run.private if on_private else run.public
    write_json(folder / run.audit.name, strict(found.to_json()), private=on_private)
    write_text(folder / run.audit_page.name, audit_page(found), private=on_private)
    return found, folder / run.audit_page.name


def _attacked(
    shadows: Shadows,
    control: Shadows,
    statement: PrivacyStatement,
    part: str,
    reporter: Reporter,
    *,
    num_canaries: int,
    minutes: float,
    centred: bool,
) -> AuditedRelease:
    """Attack shadow releases with the run's noise (``shadows``) and, as a control, releases with half of it
    (``control``); return how many guesses are right in each.

    The attack guesses for canaries (records that it looks for) whether a release includes them; how many it guesses is
    planned beforehand. ``statement``: the run's privacy claim. ``part``: the records that the releases read, "private"
    or "test". ``centred``: subtract from each canary's score its mean over releases. AuditError if ``num_canaries`` are
    too few to detect that half the noise is missing.
    """
    assert statement.epsilon is not None
    delta, epsilon, num_releases = statement.delta, statement.epsilon, -(-num_canaries // shadows.num_canaries)
    total = num_releases * shadows.num_canaries
    mu = None if shadows.is_pure else gaussian_mu(epsilon, delta)
    ideal = IdealAttack(epsilon=epsilon, mu=mu)
    # Half the noise doubles the shift of a Gaussian, and the epsilon of a Laplace variable.
    of_control = IdealAttack(epsilon=2 * epsilon, mu=None if mu is None else 2 * mu)

    def at_best(attack: IdealAttack, count: int) -> AttackResult:
        return AttackResult(
            guesses=attack.guesses(num_canaries=count, delta=delta),
            separation=attack.separation(num_canaries=count) if shadows.is_gaussian else None,
        )

    # Doubled until the ideal attack would detect the control: the message then names a number that suffices.
    needed = total
    while max(at_best(of_control, needed).bounds(delta)) <= epsilon and needed < _MOST_CANARIES:
        needed *= 2
    if needed > total:
        raise AuditError(
            f"--canaries: {total:,} canaries are too few, as even an ideal attack would not detect that half the noise "
            f"is missing; give {needed:,}."
        )
    # One release of each kind that nobody looks at, to say how long all take.
    started = time.perf_counter()
    of_nobody = [of.play(np.zeros(of.num_canaries, np.bool_)) for of in (shadows, control)][:1]
    each_s = time.perf_counter() - started
    # Of the same records once more: their noise must be another.
    of_nobody.append(shadows.play(np.zeros(shadows.num_canaries, np.bool_)))
    fitting = max(2, int(60 * minutes / max(each_s, 1e-9)))
    if fitting < num_releases:
        reporter.note(
            "time",
            f"{num_releases:,} releases and as many controls would take {duration(num_releases * each_s)}; "
            f"{fitting:,} are drawn, in {minutes:g} min: give --minutes for more",
        )
        num_releases = fitting
        total = num_releases * shadows.num_canaries
    else:
        reporter.note(
            "time", f"{num_releases:,} releases and as many controls: about {duration(num_releases * each_s)}"
        )
    planned = at_best(ideal, total)
    reporter.note("power", f"the ideal attack on {total:,} canaries would prove {planned.words(delta)}")

    def drawn(of: Shadows, name: str) -> _Played:
        # The theorem needs fair coins that the attacker cannot predict.
        coins_RM = np.random.default_rng().random((num_releases, of.num_canaries)) < 0.5
        seen: list[Seen] = []
        with reporter.stage(name) as advance:
            for number, coins_M in enumerate(coins_RM):
                # The progress of the audit is counted in releases, not in the steps of a training.
                with heard_by(lambda *_: None):
                    seen.append(of.play(coins_M))
                advance(number + 1, num_releases)
        scores_RSM = np.stack([each.scores_SM for each in seen])
        if centred:
            # Remove what the other records add to a canary's score: its mean over releases, for which no coin is read.
            scores_RSM = scores_RSM - scores_RSM.mean(axis=0)
        gains_S = np.sqrt(np.nanmean(np.stack([each.gains_SM for each in seen]) ** 2, axis=(0, 2)))
        noise = tuple(
            tuple(NoiseSeen.pooled(kind) for kind in zip(*of_release, strict=True))
            for of_release in zip(*(each.noise for each in seen), strict=True)
        )
        return _Played(coins_RM=coins_RM, scores_RSM=scores_RSM, gains_S=gains_S, noise=noise, seen=seen)

    def outcome(scores_N: FloatArray, coins_N: Coins, plan: AttackResult, *, is_gaussian: bool) -> AttackResult:
        kept_N = ~np.isnan(scores_N)
        scores_N, coins_N = scores_N[kept_N], coins_N[kept_N]
        # Fixed before any score was seen: a number that is chosen by the scores would invalidate the bound.
        each = plan.guesses.num_guesses // 2
        return AttackResult(
            guesses=guess(scores_N, coins_N, num_guessed_in=each, num_guessed_out=each),
            separation=separate(scores_N, coins_N) if is_gaussian else None,
        )

    is_joint_S = [release.is_joint for release in shadows.releases if release.is_attacked]
    both = {name: drawn(of, name) for name, of in (("audit", shadows), ("control", control))}
    joint = {
        name: outcome(each.joint_N(is_joint_S), each.coins_RM.ravel(), planned, is_gaussian=shadows.is_gaussian)
        for name, each in both.items()
    }
    tests, more = _tests_of([*of_nobody, *both["audit"].seen]), shadows.more()
    singles, row = [], 0
    for number, release in enumerate(shadows.releases):
        of_all = more.get(release.name, ())
        looked_at = SingleRelease(
            name=release.name,
            claim=release.claim,
            noise=(*both["audit"].noise[number], *(each for each in of_all if isinstance(each, NoiseSeen))),
            tests=(*tests[number], *(each for each in of_all if isinstance(each, NoiseTest))),
            reach=release.reach,
        )
        if not release.is_attacked:
            singles.append(looked_at)
            continue
        results, count = [], 0
        for each in both.values():
            scores_RM = each.scores_RSM[:, row]
            count = int((~np.isnan(scores_RM)).sum())
            plan = at_best(release.claim, count)
            # Laplace noise has no shift in standard deviations.
            is_gaussian = release.claim.mu is not None and (shadows.is_gaussian or not release.is_joint)
            results.append(outcome(scores_RM.ravel(), each.coins_RM.ravel(), plan, is_gaussian=is_gaussian))
        # What the code under test shows of a gain counts up to what is claimed: a fault must not raise the power.
        planned_mu = None if release.claim.mu is None else min(float(both["audit"].gains_S[row]), release.claim.mu)
        singles.append(
            replace(
                looked_at,
                attack=replace(release.claim, mu=planned_mu),
                found=results[0],
                control=results[1],
                control_claim=control.releases[number].claim,
            )
        )
        row += 1
    return AuditedRelease(
        part=part,
        release=shadows.events[0].noun,
        attack=shadows.attack,
        events=tuple(event_json(event) for event in shadows.events),
        num_releases=num_releases,
        canaries_each=shadows.num_canaries,
        control_noise=control.control_noise,
        planned=planned,
        found=joint["audit"],
        control=joint["control"],
        singles=tuple(singles),
        unseen=shadows.unseen,
    )


def _tests_of(seen: Sequence[Seen]) -> list[tuple[NoiseTest, ...]]:
    """Return for each release the tests of how its noise is drawn, over all draws that were ``seen``."""
    draws, found = list(zip(*(each.draws for each in seen), strict=True)), []
    scores = [np.concatenate([each.scores_RP for each in of_release]) for of_release in draws]
    for of_release, score_RP, own in zip(draws, scores, noise_tests(scores), strict=True):
        divisors = [each.divisor for each in of_release if each.divisor is not None]
        num = int((~np.isnan(score_RP)).sum())
        found.append((*own, grid_test(math.gcd(*divisors), num)) if divisors else own)
    return found


@dataclass(frozen=True, kw_only=True)
class _Played:
    coins_RM: Coins
    scores_RSM: FloatArray
    gains_S: FloatArray
    noise: tuple[tuple[NoiseSeen, ...], ...]
    seen: list[Seen]

    def joint_N(self, is_joint_S: Sequence[bool]) -> FloatArray:
        """Return the joint score of every canary: the likelihood ratio of those releases for which ``is_joint_S`` is
        true, under the noise that is seen in their scores. No coin is read for it."""
        total_RM = np.zeros(self.coins_RM.shape)
        for row in np.flatnonzero(is_joint_S).tolist():
            gain = self.gains_S[row]
            scores_RM = self.scores_RSM[:, row]
            # A fair coin adds a quarter of the squared gain to the variance; what is left is noise.
            left = max(float(np.nanvar(scores_RM)) - gain**2 / 4, _LEAST_SPREAD * gain**2)
            if left > 0:
                total_RM += np.nan_to_num((scores_RM - gain / 2) * gain / left)
        return total_RM.ravel()


def _noises(event: Any) -> dict[str, float]:
    """Return the noise scales of a privacy event by the names of its fields. For Laplace noise the only scale is
    1/epsilon, under the name ``epsilon``."""
    if isinstance(event, LaplaceReleases):
        return {"epsilon": 1 / event.epsilon}
    return {
        name: value
        for name, value in vars(event).items()
        if isinstance(value, float)
        and (name.startswith("noise_") or name.endswith(("_stddev_votes", "_multiplier", "laplace_scale")))
    }


def shadows_of(
    run: RunDirectory,
    config: Method,
    events: Sequence[Any],
    part: str,
    *,
    is_control: bool = False,
    on_private: bool = False,
) -> Shadows:
    """Return attacks on shadow releases of a run: releases that its method draws for the audit, with the run's noise or
    (``is_control``) half of it.

    ``events`` are the run's privacy events for the records that the releases read; ``part`` says which records these
    are, "private" or "test". AuditError if no attack is known for the method.
    """
    facts = require_data(run)
    loaded = None
    if on_private:
        require_data_by_name(run)
        loaded = load_for(run, config.data)
    if part == "test":
        return _metrics(run, facts, events[0], config, loaded, is_control=is_control)
    match config:
        case RecordVotes():
            return _cells(run, facts, config, events[0], loaded, is_control=is_control)
        case WeightedVotes() | ResidualVotes() | AdaSsp():
            return _sums(run, facts, config, events, loaded, is_control=is_control)
        case GnmaxMethod() | TeacherVotes() if isinstance(
            events[0], ConfidentGnmaxQueries | mechanism_events.VoteSums
        ) and all(isinstance(event, mechanism_events.VoteTables | mechanism_events.VoteSums) for event in events[1:]):
            return _votes(run, facts, config, events, loaded, is_control=is_control)
        case DpSgdFamily() if all(isinstance(event, PoissonGaussians | PoissonGaussianLaplaces) for event in events):
            if not is_control:
                return _models(facts, config, events, loaded)
            # The same method, planned for what half the noise costs.
            weaker: list[Any] = [
                replace(event, **{name: value / 2 for name, value in _noises(event).items()}) for event in events
            ]
            epsilon = price(weaker, delta=config.target.delta, accounting=config.target.accounting).epsilon
            half = config.model_copy(update={"target": config.target.model_copy(update={"epsilon": epsilon})})
            shadows = _models(facts, half, events, loaded, is_control=True)
            share = min(
                less / noise
                for of_run, of_control in zip(events, shadows.events, strict=True)
                for noise, less in zip(_noises(of_run).values(), _noises(of_control).values(), strict=True)
            )
            # Not always half: the control is planned by its epsilon, and group shares keep their noise.
            return replace(shadows, control_noise=share)
        case Postprocessing() if config.dp_postprocessing.base == "sgd":
            return _counts(facts, config, loaded, is_control=is_control)
    raise AuditError(
        f"method: no attack on the releases of {config.method} is known; audit a run of record_votes, weighted_votes, "
        "residual_votes, ada_ssp, a method with teachers, DP-SGD, or dp_postprocessing with base=sgd."
    )


def _of_gaussian(norm: float, stddev: float, delta: float) -> IdealAttack:
    """Return the strongest attack on a Gaussian release to which a unit adds a vector of this ``norm``."""
    mu = norm / stddev * _ROUNDED
    return IdealAttack(epsilon=gaussian_epsilon(mu, delta), mu=mu)


def _own_noise(shape: tuple[int, ...], stddev: float) -> IntArray:
    """Return noise that the audit draws itself, in whole numbers, by another generator than the code under test."""
    return np.rint(np.random.default_rng().normal(scale=stddev, size=shape)).astype(np.int64)


def _squares(noise: Numbers, stddev: float, *, kurtosis: float = 3.0) -> NoiseSeen:
    return NoiseSeen.of_squares(float(((noise / stddev) ** 2).sum()), noise.size, kurtosis=kurtosis)


def _varied(facts: DataRecord, count: int, *, scale: float = 1.0) -> Tensor:
    """Return random features, drawn with a fixed seed, for ``count`` made-up records. They have the shape and kind that
    ``facts`` states for the run's own records."""
    generator, shape = np.random.default_rng(0), (count, *facts.record_shape)
    if facts.kind == "image":
        return torch.from_numpy(generator.integers(256, size=shape).astype(np.uint8))
    return torch.from_numpy(generator.normal(size=shape).astype(np.float32)) * scale


def _records(x: Tensor, y: IntArray, z: IntArray, *, name: str, unit: str = "record", copies: int = 1) -> Split:
    """Return made-up records with features ``x``, labels ``y`` and groups ``z``, whose ids begin with ``name``. If
    ``unit`` is "person", each of them becomes a person with ``copies`` equal records."""
    names = [f"{name}-{number}" for number in range(len(x)) for _ in range(copies)]
    index = np.repeat(np.arange(len(x)), copies)
    return Split(
        x=x[torch.from_numpy(index)],
        y=torch.from_numpy(np.asarray(y, np.int64)[index]),
        z=torch.from_numpy(np.asarray(z, np.int64)[index]),
        record_id=[f"{person}-{row}" for row, person in enumerate(names)] if copies > 1 else names,
        person_id=names if unit == "person" else (),
    )


def _joined(one: Split, other: Split) -> Split:
    joined: dict[str, Any] = {name: torch.cat([getattr(one, name), getattr(other, name)]) for name in "xyz"}
    return Split(**joined, record_id=[*one.record_id, *other.record_id], person_id=[*one.person_id, *other.person_id])


def _labels_and_groups(facts: DataRecord, count: int) -> tuple[IntArray, IntArray]:
    """Return labels and groups of ``count`` canaries, so that every label occurs with every group."""
    of_group, label_M = np.divmod(np.arange(count), len(facts.label_names))
    return label_M, of_group % len(facts.group_names)


def _units(facts: DataRecord, x: Tensor, odd: Sequence[float]) -> list[Split]:
    """Return units of every kind that a bound must hold for, each by itself: of each label and group with the features
    of a row of ``x``, and with features that are ``odd`` multiples of them. Persons have one record, several equal
    ones, or many of all labels and groups."""
    count, is_person = max(len(facts.label_names) * len(facts.group_names), 2), facts.unit == "person"
    kinds = _labels_and_groups(facts, count)
    x = x[torch.arange(count) % len(x)]
    scaled = [(x[:1] * of).to(x.dtype) for of in odd]
    others = [_records(each, kinds[0][1:2], kinds[1][1:2], name="odd", unit=facts.unit) for each in scaled]
    copies = _COPIES if is_person else 1
    each = _records(x, *kinds, name="unit", unit=facts.unit, copies=copies)
    found = [each.take(list(range(row * copies, (row + 1) * copies))) for row in range(count)]
    if is_person:
        mixed = _records(x.repeat(4, *[1] * (x.ndim - 1)), *(np.tile(kind, 4) for kind in kinds), name="mixed")
        found += [each.take([0]), replace(mixed, person_id=["mixed"] * len(mixed))]
    return [*found, *others]


def _reach(
    facts: DataRecord,
    x: Tensor,
    exact: Callable[[Split], Mapping[str, Numbers]],
    *,
    odd: Sequence[float] = (0.0, 0.01, 1 / _LOUD, math.nan),
    l1: Sequence[str] = (),
) -> dict[str, float]:
    """Return by name the largest L2 norm, or L1 norm for names in ``l1``, of what a unit adds to the ``exact`` numbers
    of another one, or of several others. ``x`` and its ``odd`` multiples are features of such units: loud ones over
    their factor lie at the bound. NaN counts as infinite."""
    kinds, found = len(facts.label_names) * len(facts.group_names), dict[str, float]()
    # They may add no more in the presence of others than they do alone.
    crowd = _records(x[: kinds + 3], *_labels_and_groups(facts, len(x[: kinds + 3])), name="crowd", unit=facts.unit)
    for others in (crowd.take([0]), crowd):
        without = exact(others)
        for unit in _units(facts, x, odd):
            with_it = exact(_joined(others, unit))
            for name, numbers in with_it.items():
                moved = numbers.astype(np.float64) - without[name].astype(np.float64)
                length = float(np.linalg.norm(moved.ravel(), ord=1 if name in l1 else 2))
                found[name] = max(found.get(name, 0.0), math.inf if math.isnan(length) else length)
    return found


@dataclass(frozen=True, kw_only=True)
class ShadowData:
    """The data from which shadow releases are drawn: ``dataset`` with the public records, and two kinds of private
    records.

    ``others`` are included in every release. ``canaries`` are the records that the attacker looks for: a coin decides
    whether a release includes a canary. Each canary has ``copies`` consecutive rows.
    """

    dataset: Dataset
    others: Split
    canaries: Split
    copies: int

    def with_canaries(self, included_M: Coins) -> Dataset:
        """Return the data set of one shadow release: its private records are ``others`` and those canaries (records
        that the attacker looks for) whose entries in ``included_M`` are true."""
        rows = np.flatnonzero(np.repeat(included_M, self.copies))
        return replace(self.dataset, private=_joined(self.others, self.canaries.take(rows.tolist())))


def _setting(
    facts: DataRecord,
    public_x: Tensor,
    canaries: tuple[Tensor, IntArray, IntArray],
    *,
    num_others: int,
    loaded: Dataset | None,
    is_embedded: bool,
) -> ShadowData:
    """Return the data from which shadow releases are drawn: public records with features ``public_x``, canaries, and
    other private records.

    ``canaries`` gives the features, labels and groups of the records that the attacker looks for. The other private
    records are those of the run in ``loaded`` or, if ``loaded`` is None, ``num_others`` made-up ones.
    """
    # At the origin: of all records these hide a canary least, and epsilon holds for any.
    others_x = torch.zeros(num_others, *public_x.shape[1:], dtype=public_x.dtype)
    sizes = len(facts.label_names), len(facts.group_names)
    public, others = (
        _records(x, *(np.arange(len(x)) % size for size in sizes), name=name, unit=unit)
        for x, name, unit in ((public_x, "public", "record"), (others_x, "made", facts.unit))
    )
    # If persons are protected, a canary is a person with several records, which a guarantee per record does not cover.
    copies, embedding = _COPIES if facts.unit == "person" else 1, None
    if is_embedded:
        # Canaries are coordinates already. Methods expect an embedding with such a data set; this one is never applied.
        embedding = Embedding.of(torch.eye(2, public_x.shape[1]), EmbeddingConfig(num_components=1))
    return ShadowData(
        dataset=Dataset(
            name=facts.name,
            kind="image" if public_x.ndim == 4 else "tabular",
            private=others,
            public=public,
            validation=public,
            test=public,
            label_names=facts.label_names,
            group_names=facts.group_names,
            sensitive_attribute=facts.sensitive_attribute,
            embedding=embedding,
        ),
        others=others if loaded is None else loaded.private,
        canaries=_records(*canaries, name="canary", unit=facts.unit, copies=copies),
        copies=copies,
    )


def _training(config: Method, dataset: Dataset, model: torch.nn.Module | None = None) -> Training:
    """Return the context in which a method draws a release for the audit alone: nothing is stored, and no privacy cost
    is charged."""
    return Training(
        dataset=dataset,
        model=model or torch.nn.Identity(),
        run=RunDirectory(root=Path(tempfile.gettempdir()) / "fairpate-audit"),
        reporter=Reporter(quiet=True),
        seed=config.seed,
    )


def _log_ratio(released: Numbers, added: Numbers, stddev: float) -> tuple[FloatArray, FloatArray]:
    """Return the scores of canaries from the numbers ``released``, projected on the numbers ``added`` by an included
    canary, in standard deviations of the noise; and the gain of an included canary, both summed over the first axis.

    Score and gain give the log-likelihood ratio. A canary that adds nothing has no score (NaN).
    """
    gain_M = np.sqrt((np.asarray(added, np.float64) ** 2).sum(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        score_M = (released * added).sum(axis=0) / gain_M / stddev
    return np.where(gain_M > 0, score_M, np.nan), gain_M / stddev


def _both_kinds(noise_RM: Numbers, included_M: Coins, stddev: float, *, kurtosis: float = 3.0) -> tuple[NoiseSeen, ...]:
    """Return the noise that is seen where canaries are included, and where they are not: noise may be missing only on
    numbers that are otherwise 0."""
    return tuple(_squares(noise_RM[..., kept_M], stddev, kurtosis=kurtosis) for kept_M in (included_M, ~included_M))


def _moments_of(stddev: float) -> tuple[float, float]:
    """Return the standard deviation and the kurtosis of the discrete Gaussian of parameter ``stddev``."""
    if stddev > _FINE:
        return stddev, 3.0
    value, log_mass = log_masses(stddev)
    second, fourth = (float((np.exp(log_mass) * value.astype(np.float64) ** power).sum()) for power in (2, 4))
    return math.sqrt(second), fourth / second**2


def _cells(
    run: RunDirectory, facts: DataRecord, config: RecordVotes, stated: Any, loaded: Dataset | None, *, is_control: bool
) -> Shadows:
    """Return an attack on the noisy tables of the method record_votes. Each cell of a table has one canary, a record
    that the attacker looks for in this cell. A cell belongs to a prototype (a centre of public records), a label and,
    if the method reads groups, a group."""
    kept = read_release(run.released)[0].arrays
    num_classes, num_rows = len(facts.label_names), len(facts.label_names)
    if config.reads_groups:
        num_rows *= len(facts.group_names)
    public_x = _varied(facts, min(len(kept["prototype_M"]), _MOST_POOL)) if loaded is None else loaded.public.x
    options: dict[str, Any] = {"num_others": _FEW_OTHERS, "loaded": loaded, "is_embedded": False}
    nobody = _setting(facts, public_x, (public_x[:0], *np.zeros((2, 0), np.int64)), **options)

    without_canaries = nobody.with_canaries(np.zeros(0, np.bool_))
    # Found once: they depend on public records and a public seed only, so they are the same in every release.
    found = config.prototypes(without_canaries)

    def without_noise(dataset: Dataset, *, noise: float = 0.0) -> Released:
        def here(exact_RW: IntArray, **_: Any) -> IntArray:
            return exact_RW + _own_noise(exact_RW.shape, noise)

        return config.measure(replace(_training(config, dataset), noisy_sum=here), found)

    # Without noise: what the attacker knows of the other records.
    known = without_noise(without_canaries)
    prototypes, places = np.unique(known.arrays["prototype_M"], return_index=True)
    at_M, row_M = np.repeat(places, num_rows), np.tile(np.arange(num_rows), len(places))
    canaries = (public_x[torch.from_numpy(at_M)], row_M % num_classes, row_M // num_classes)
    setting = _setting(facts, public_x, canaries, **options)
    stddev, added = stated.noise_stddev_votes, 1.0 if isinstance(stated, mechanism_events.VoteTables) else float(UNITS)
    spread, kurtosis = _moments_of(stddev)
    of_claim = stddev / 2 if is_control else stddev

    def table(released: Released) -> IntArray:
        arrays = released.arrays
        return arrays["votes_KC"] if "votes_KC" in arrays else np.hstack([*arrays["votes_GKC"]])

    cells_M = np.repeat(prototypes, num_rows), row_M

    def play(included_M: Coins) -> Seen:
        dataset = setting.with_canaries(included_M)
        shown = (
            without_noise(dataset, noise=of_claim) if is_control else config.measure(_training(config, dataset), found)
        )
        found_M = (table(shown) - table(known))[cells_M]
        score_M, gain_M = _log_ratio(found_M[None], np.full((1, len(found_M)), added), of_claim)
        exact_KR = table(known).copy()
        exact_KR[cells_M] += np.int64(added) * included_M
        noise_KR = table(shown) - exact_KR
        # Noise may be missing only on numbers that are otherwise 0.
        noise = _both_kinds(noise_KR, exact_KR != table(known), spread, kurtosis=kurtosis)
        draws = (Drawn.of(noise_KR, of_claim),)
        return Seen(scores_SM=score_M[None], gains_SM=gain_M[None], noise=(noise,), draws=draws)

    def exact(records: Split) -> dict[str, IntArray]:
        return {"table": table(without_noise(replace(setting.dataset, private=records)))}

    claim = _of_gaussian(added, of_claim, config.target.delta)
    reach = _reach(facts, public_x, exact)["table"] / added
    return Shadows(
        attack="likelihood ratio of the count in the canary's cell",
        events=known.events,
        num_canaries=len(row_M),
        releases=(Claimed(name="table of votes", claim=claim, reach=reach),),
        play=play,
        is_gaussian=True,
        control_noise=0.5 if is_control else 1.0,
    )


def _sums(
    run: RunDirectory,
    facts: DataRecord,
    config: SumMethod,
    events: Sequence[Any],
    loaded: Dataset | None,
    *,
    is_control: bool,
) -> Shadows:
    """Return attacks on noisy sums of feature vectors, of their products and of residuals. For each coordinate of the
    feature vectors there is one canary (a record that the attacker looks for), whose features lie along this
    coordinate."""
    if isinstance(config, ResidualVotes):
        # The run's released sums chose the curvature; those of a shadow release might choose the other.
        kind = "private" if any(isinstance(event, mechanism_events.MomentSums) for event in events) else "public"
        own = config.residual_votes.model_copy(update={"curvature": kind})
        config = config.model_copy(update={"residual_votes": own})
    if loaded is not None and loaded.embedding is None:
        section: VectorsConfig = getattr(config, config.method)
        loaded = embedded(loaded, Embedding.of(loaded.public.x, section.embedding))
    kept = read_release(run.released)[0].arrays["pool_MW"]
    width = kept.shape[1] - 1
    pool_MD = (
        np.random.default_rng(0).normal(size=(min(len(kept), _MOST_POOL), width)) * EMBEDDED_NORM / math.sqrt(width)
    )
    public_x = torch.from_numpy(pool_MD.astype(np.float32)) if loaded is None else loaded.public.x
    # The least eigenvalue is one number of each release: it needs more releases.
    number_M = np.arange(min(width, _MOST_OF_EIGENVALUE if isinstance(config, AdaSsp) else _MOST_EACH))
    loud_MD = _LOUD * EMBEDDED_NORM * torch.eye(width)[: len(number_M)]
    canaries = (loud_MD, *_labels_and_groups(facts, len(number_M)))
    # Many where the number that all records share must not decide about the least eigenvalue.
    num_others = _OTHERS if isinstance(config, AdaSsp) else _FEW_OTHERS
    setting = _setting(facts, public_x, canaries, num_others=num_others, loaded=loaded, is_embedded=True)
    is_adassp, num_canaries = isinstance(config, AdaSsp), len(number_M)
    if is_adassp and loaded is None:
        # In every direction but the last canary's there are records: it alone decides about the least eigenvalue.
        filled_D = np.repeat(np.delete(np.arange(width), num_canaries - 1), _COPIES)
        filled_x = _LOUD * EMBEDDED_NORM * torch.eye(width)[torch.from_numpy(filled_D)]
        kinds = (filled_D % len(facts.label_names), filled_D % len(facts.group_names))
        filling = _records(filled_x, *kinds, name="filling", unit=facts.unit)
        setting = replace(setting, others=_joined(setting.others, filling))
    whole = config.model_copy(update={"ray": RayConfig(num_actors=0)}) if hasattr(config, "ray") else config

    def made_of(records: Split) -> Dataset:
        return replace(setting.dataset, private=records)

    no_coins_M = np.zeros(num_canaries, np.bool_)
    drawn = whole.measure(_training(whole, setting.with_canaries(no_coins_M)))
    of_sums, of_last = events[0], events[-1]
    moments = next((event for event in events if isinstance(event, mechanism_events.MomentSums)), None)
    event_of = {
        name: {"sums": of_sums, "moments": moments, "squares": moments}.get(name, of_last)
        for name in _numbers(drawn.arrays)
    }
    # Noise off the diagonal has half the variance; both parts are priced by the norm of the whole matrix.
    scale = {name: math.sqrt(0.5) if name == "moments" else 1.0 for name in event_of}
    stddevs = {name: scale[name] * event.noise_stddev_votes for name, event in event_of.items()}
    share = 0.5 if is_control else 1.0
    # Of the moments only numbers above the diagonal are released.
    above = np.triu_indices(width + 1, 1)
    special = setting.canaries.take(list(range((num_canaries - 1) * setting.copies, num_canaries * setting.copies)))

    def eigenvalues(
        exact: dict[str, IntArray], is_in: bool, least: Callable[[FloatArray], float]
    ) -> tuple[float, float]:
        """Return the least eigenvalue of the second moments without the last canary, and with it."""
        matrix_WW, own_WW = (
            _symmetric(each) for each in (exact, exact_sums(whole, made_of(special), _shown_of(exact)))
        )
        with_WW = matrix_WW if is_in else matrix_WW + own_WW
        return least(with_WW - own_WW), least(with_WW)

    def play(included_M: Coins) -> Seen:
        dataset = setting.with_canaries(included_M)
        own_noise: dict[str, IntArray] = {}
        if is_control:

            def noisy(name: str, exact_RW: IntArray) -> IntArray:
                own_noise[name] = _own_noise(exact_RW.shape, stddevs[name])
                return exact_RW + own_noise[name]

            whole_exact = exact_sums(whole, dataset, noisy)
            for name, exact in whole_exact.items():
                if is_adassp:
                    noisy(name, exact)
                # A sum that was not asked for has none of the audit's noise: the control is then far from its plan.
                own_noise.setdefault(name, np.zeros(exact.shape, np.int64))
            shown = {name: exact + own_noise[name] for name, exact in whole_exact.items()}
        else:
            shown = _numbers(whole.measure(_training(whole, dataset)).arrays)
            whole_exact = exact_sums(whole, dataset, _shown_of(shown))
        if is_adassp:
            before, after = eigenvalues(whole_exact, bool(included_M[-1]), lambda each: np.linalg.eigvalsh(each)[0])
            whole_exact["eigenvalue"] = np.rint(after if included_M[-1] else before).astype(np.int64)[None, None]
            if is_control:
                own_noise["eigenvalue"] = _own_noise((1, 1), stddevs["eigenvalue"])
                shown["eigenvalue"] = whole_exact["eigenvalue"] + own_noise["eigenvalue"]
        added = exact_sums(whole, made_of(setting.canaries), _shown_of(shown))
        scores, gains, draws = [], [], []
        noises: list[tuple[NoiseSeen, ...]] = []
        for name in event_of:
            # The control halves the noise of one release alone: the rounds that follow were computed under all of it.
            drawn_RW = np.rint(share * own_noise[name]) if is_control else shown[name] - whole_exact[name]
            noise_RW, stddev = shown[name] - whole_exact[name], stddevs[name]
            if name == "eigenvalue":
                score_M, gain_M = (np.full(num_canaries, np.nan) for _ in range(2))
                moved = after - before
                score_M[-1] = (included_M[-1] * moved + drawn_RW[0, 0]) / (share * stddev)
                gain_M[-1] = moved / (share * stddev)
                noises.append((_squares(noise_RW, stddev),))
                draws.append(Drawn.of(noise_RW, stddev))
            else:
                # Only this canary moves its own column, and all move the first one, which counts records.
                added_RM = added[name][:, 1 : 1 + num_canaries]
                found_RM = drawn_RW[:, 1 : 1 + num_canaries] + included_M * added_RM
                score_M, gain_M = _log_ratio(found_RM, added_RM, share * stddev)
                # Noise may be missing only on numbers that are otherwise 0.
                is_zero_RW = whole_exact[name] == 0
                numbers = (noise_RW, is_zero_RW) if name != "moments" else (noise_RW[above], is_zero_RW[above])
                noises.append(_both_kinds(numbers[0], ~numbers[1], stddev))
                draws.append(Drawn.of(numbers[0], stddev))
            scores.append(score_M)
            gains.append(gain_M)
        return Seen(scores_SM=np.stack(scores), gains_SM=np.stack(gains), noise=tuple(noises), draws=tuple(draws))

    shown = _numbers(drawn.arrays)

    def exact(records: Split) -> dict[str, Numbers]:
        found: dict[str, Numbers] = exact_sums(whole, made_of(records), _shown_of(shown))
        if "moments" in found:
            # Both parts are priced by the norm of the whole matrix.
            found["moments"] = found["squares"] = _symmetric(found)
        return found

    norms = _reach(facts, loud_MD, exact)
    reaches = {name: norms.get(name, 0.0) / event.norm for name, event in event_of.items()}
    if is_adassp:
        # By the method's own function: its rounding and its scale are part of what is bounded.
        of_others = exact_sums(whole, setting.with_canaries(no_coins_M), _shown_of(shown))
        before, after = eigenvalues(
            of_others, False, lambda each: int(least_eigenvalue(np.rint(each).astype(np.int64))[0, 0])
        )
        reaches["eigenvalue"] = abs(after - before) / event_of["eigenvalue"].norm
    releases = tuple(
        Claimed(
            name=_WORDS.get(name, name),
            claim=_of_gaussian(event.norm, share * event.noise_stddev_votes, config.target.delta),
            reach=reaches[name],
        )
        for name, event in event_of.items()
    )
    return Shadows(
        attack="likelihood ratio of all released numbers that the canary alone moves",
        events=drawn.events,
        num_canaries=num_canaries,
        releases=releases,
        play=play,
        is_gaussian=True,
        control_noise=share,
    )


_WORDS = {"moments": "second moments off the diagonal", "squares": "second moments on the diagonal"}
_WORDS |= {"eigenvalue": "least eigenvalue"}
_Shown = Callable[[str, IntArray], IntArray]


def _numbers(arrays: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return the matrices of a release of sums by name, each with one row per sum and one column per coordinate."""
    sums = arrays["sums_CW"] if "sums_CW" in arrays else arrays["sums_GCW"]
    found = {"sums": sums.reshape(-1, sums.shape[-1])}
    if "moments_WW" in arrays:
        found |= {"moments": np.triu(arrays["moments_WW"], 1), "squares": arrays["moments_WW"].diagonal()[None].copy()}
    if "eigenvalue_11" in arrays:
        found["eigenvalue"] = arrays["eigenvalue_11"]
    return found | {f"residuals {k}": each for k, each in enumerate(arrays.get("residuals_RCW", ()))}


def _shown_of(numbers: Mapping[str, Numbers]) -> _Shown:
    return lambda name, _: numbers[name]


def _symmetric(exact: Mapping[str, Numbers]) -> FloatArray:
    above = exact["moments"].astype(np.float64)
    return above + above.T + np.diag(exact["squares"][0].astype(np.float64))


def exact_sums(config: SumMethod, dataset: Dataset, shown: _Shown) -> dict[str, IntArray]:
    """Return the exact sums that ``config`` computes of the private records of ``dataset``, by name. ``shown`` returns
    what is released in the place of each: later sums depend on it."""
    if isinstance(config, AdaSsp):
        ballot = WeightedBallot.of(dataset, config.ada_ssp.embedding)
        records = RecordSums.of(ballot, dataset.private, BlockPool())
        exact_WW = records.total(votes_themselves, norm=UNITS**2)
        return {
            "sums": records.total(partial(indicators, num_classes=dataset.num_classes), norm=UNITS),
            "moments": np.triu(exact_WW, 1),
            "squares": exact_WW.diagonal()[None].copy(),
        }
    found: dict[str, IntArray] = {}

    def here(exact_RW: IntArray, *, name: str, **_: Any) -> IntArray:
        # The names of sums over sites: "class", "sums, class", "moments", "squares", "residuals 3, class".
        own = "sums" if name == "class" else name.split(",")[0]
        found[own] = exact_RW
        return shown(own, exact_RW).reshape(exact_RW.shape)

    released = config.measure(replace(_training(config, dataset), noisy_sum=here))
    # Code that releases a sum without asking for its noise releases the exact one.
    return _numbers(released.arrays) | found


@dataclass(kw_only=True)
class _Sums:
    """What a training's noisy sums showed by name: squares of the noise over its claim, and the largest exact norm."""

    total: float = 0.0
    num: int = 0
    norm: float = 0.0


def _models(
    facts: DataRecord,
    config: DpSgdFamily,
    stated: Sequence[Event],
    loaded: Dataset | None,
    *,
    is_control: bool = False,
) -> Shadows:
    """Return an attack on trainings of the DP-SGD family. Each canary (a record that the attacker looks for) has a
    feature of its own, which is 0 in every other record, so that the model's weights of this feature depend on the
    canary alone.

    The attacker sees the noisy sums of all steps, which the guarantee is for. ``stated``: the privacy events of the
    run, whose noise is claimed; of a control (``is_control``) that of its own training's events is claimed.
    """
    rates = {rate for event in stated if (rate := getattr(event, "sampling_rate", 1.0)) < 1}
    # The rate of the run, with which the number of records was published; coins must not change it.
    size = config.dp_sgd.num_records or round(config.dp_sgd.batch_size / min(rates, default=1.0))
    config = config.model_copy(update={"dp_sgd": config.dp_sgd.model_copy(update={"num_records": size})})
    width = math.prod(facts.record_shape)
    number_M = np.random.default_rng(0).permutation(width)[:_MOST_EACH]
    loud_MD = torch.zeros(len(number_M), width)
    loud_MD[torch.arange(len(number_M)), torch.from_numpy(number_M)] = 255 if facts.kind == "image" else _LOUD
    canary_x = loud_MD.reshape(-1, *facts.record_shape)
    canary_x = canary_x.to(torch.uint8) if facts.kind == "image" else canary_x
    canaries = (canary_x, *_labels_and_groups(facts, len(number_M)))
    label_M = canaries[1]
    public_x = torch.zeros(_MOST_EACH, *facts.record_shape, dtype=canary_x.dtype) if loaded is None else loaded.public.x
    # Half of the canaries are included on average: a shadow release is as large as that of the run.
    setting = _setting(
        facts, public_x, canaries, num_others=max(0, size - len(number_M) // 2), loaded=loaded, is_embedded=False
    )
    true_M, seen_x = torch.from_numpy(label_M), scale_bytes(canary_x)

    def odds(model: torch.nn.Module) -> FloatArray:
        """Return the log odds that ``model`` gives to every canary's label."""
        with torch.no_grad():
            logits_MC = model.eval()(seen_x).double()
        own_M = logits_MC.gather(1, true_M[:, None])
        rest_MC = logits_MC.scatter(1, true_M[:, None], -math.inf)
        return (own_M[:, 0] - rest_MC.logsumexp(dim=1)).numpy()

    def trained(dataset: Dataset, watch: Watch, model: torch.nn.Module) -> Any:
        return config.train(replace(_training(config, dataset, model), watch=watch))

    # First one canary alone, without the others: how far it moves the exact sums of all steps, and how often it is
    # sampled, whatever is drawn.
    sums: dict[str, _Sums] = {}

    def reached(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:  # noqa: ARG001
        kept, length = sums.setdefault(name, _Sums()), _length(name, exact) / norm
        kept.norm, kept.num, kept.total = max(kept.norm, length), kept.num + 1, kept.total + (length > 0)

    # A convolution shares its weights among places: no canary has a direction of its own.
    first = next(initial_model(config, setting.dataset).parameters())
    has_direction = first.ndim == 2 and first.shape[1] == width
    labels = min(len(facts.label_names), len(number_M))
    # Where shadow releases do not show who is sampled, as many steps as it takes to see twice the rate.
    wanted = 0.0 if has_direction and loaded is None else _SAMPLED / min(rates, default=math.inf)
    for number in range(_MOST_ALONE):
        if number >= labels and sums["gradients"].num >= wanted:
            break
        start = number % labels * setting.copies
        alone = replace(setting.dataset, private=setting.canaries.take(list(range(start, start + setting.copies))))
        # Of so few records noisy group shares may be all 0.
        public = _with_public_shares(config, facts)
        public.train(replace(_training(public, alone, initial_model(public, alone)), watch=reached))
    one_step = _OneStep.of(config, facts, canary_x)
    whole = setting.with_canaries(np.ones(len(number_M), np.bool_))
    events = trained(whole, reached_by_many := _Names(), initial_model(config, whole)).events
    multipliers = _multipliers(config, tuple(events if is_control else stated))
    if unknown := set(reached_by_many.names) - set(multipliers):
        raise AuditError(f"method: {config.method} releases {', '.join(sorted(unknown))}, for which no audit is known.")
    rate = next((r for event in events if (r := getattr(event, "sampling_rate", 1.0)) < 1), 1.0)
    is_replaced = getattr(events[0], "relation", "") == "replace one"

    def play(included_M: Coins) -> Seen:
        dataset = setting.with_canaries(included_M)
        if is_replaced:  # by a record at the origin
            rest = setting.canaries.take(np.flatnonzero(np.repeat(~included_M, setting.copies)).tolist())
            dataset = replace(dataset, private=_joined(dataset.private, replace(rest, x=torch.zeros_like(rest.x))))
        model = initial_model(config, dataset)
        # Subtract the odds under the initial model, whose weights a public seed draws.
        before = odds(model)
        seen = {name: [_Sums(), _Sums()] for name in multipliers}
        rows = {name: list[FloatArray]() for name in multipliers}
        ratio_M, squared_M = np.zeros(len(number_M)), np.zeros(len(number_M))
        counts_M, steps = np.zeros(len(number_M)), _Steps(config, number_M)

        def watch(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:
            multiplier, variance, _ = multipliers[name]
            pairs = [
                tuple(np.asarray(_on_cpu(each), np.float64).ravel()[:_MOST_NUMBERS] for each in pair)
                for pair in zip(exact, released, strict=True)
            ]
            # Noise may be missing on empty samples alone.
            of = seen[name][any(was_P.any() for was_P, _ in pairs)]
            for was_P, shown_P in pairs:
                of.total += float((((shown_P - was_P) / (norm * multiplier)) ** 2).sum()) / variance
                of.num += len(was_P)
            if num_rows[name] < _MOST_DRAWS:
                num_rows[name] += 1
                each = max(1, _MOST_PLACES // len(pairs))
                noise_P = np.concatenate([(shown_P - was_P)[:each] for was_P, shown_P in pairs])
                stddev = norm * multiplier * math.sqrt(variance)
                rows[name].append(normal_scores(noise_P, stddev, laplace=name == "histograms"))
            if name == "gradients" and has_direction:
                # Its own feature's weights show in the exact sum whether a canary is in the sample.
                exact_HD = next(each for each in exact if each.shape == first.shape)
                counts_M[:] += (exact_HD.detach().cpu()[:, number_M] != 0).any(dim=0).numpy()
                shown_HD = next(each for each in released if each.shape == first.shape)
                steps.see(model, shown_HD, stddev=norm * multiplier)
                shift_M, score_M = _along(model, shown_HD, norm)
                weight_M, projected_M = np.minimum(shift_M, 1.0) / multiplier, score_M / multiplier
                # The likelihood ratio of a Poisson sample: the canary is in it with the sampling rate.
                raised_M = np.clip(projected_M * weight_M - weight_M**2 / 2, -_FAR, _FAR)
                ratio_M[:] += raised_M if rate == 1 else np.log1p(rate * np.expm1(raised_M))
                squared_M[:] += weight_M**2 if rate == 1 else rate**2 * np.expm1(np.minimum(weight_M**2, _FAR))

        def _along(model: torch.nn.Module, shown_HD: Tensor, norm: float) -> tuple[FloatArray, FloatArray]:
            """Return the norm of every canary's gradient by its own feature's weights, over the clipping bound, and
            the released sum in its direction."""
            weights = next(model.parameters())
            with torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(model(seen_x.to(weights.device)), true_M, reduction="sum")
                # Only its own canary has a feature, so that one gradient of the sum has that of each in its column.
                (slopes_HD,) = torch.autograd.grad(loss, [weights])
            columns = torch.from_numpy(number_M)
            slope_HM, shown_HM = (each.detach().cpu()[:, columns].double().numpy() for each in (slopes_HD, shown_HD))
            length_M = np.linalg.norm(slope_HM, axis=0)
            return length_M / norm, (slope_HM * shown_HM).sum(axis=0) / np.maximum(length_M, 1e-30) / norm

        result = trained(dataset, watch, model)
        if has_direction:
            gain_M = np.sqrt(squared_M)
            score_M = ratio_M / np.maximum(gain_M, 1e-30) + gain_M / 2
        else:
            # Of unknown gain: this attack alone has no power, whatever it finds.
            score_M, gain_M = odds(result.model) - before, np.zeros(len(number_M))
        noise = {
            name: [NoiseSeen.of_squares(each.total, each.num, kurtosis=multipliers[name][2]) for each in seen[name]]
            for name in names
        }
        if has_direction and loaded is None:
            sampled.extend(counts_M[included_M].tolist())
            moved.append(steps.apart)
            num_steps.append(steps.num)
        of_beside = one_step.seen(included_M)
        draws = [
            Drawn(scores_RP=np.array(rows[name]) if rows[name] else np.zeros((0, num_places.get(name, 0))))
            for name in names
        ]
        num_places.update({name: each.scores_RP.shape[1] for name, each in zip(names, draws, strict=True)})
        return Seen(
            scores_SM=np.stack([score_M, *(score for score, _ in of_beside)]),
            gains_SM=np.stack([gain_M, *(gain for _, gain in of_beside)]),
            noise=tuple(tuple(noise[name]) for name in names),
            draws=tuple(draws),
        )

    # Of all that is played: how often canaries were sampled, how weights moved, and the steps whose noise is kept.
    sampled, moved, num_steps = list[float](), list[float](), list[int]()
    num_rows, num_places = dict.fromkeys(multipliers, 0), dict[str, int]()
    names = [name for name in multipliers if name in reached_by_many.names]

    def more() -> dict[str, tuple[NoiseSeen | NoiseTest, ...]]:
        found: list[NoiseSeen | NoiseTest] = []
        if moved:
            found.append(NoiseTest(what="weights", value=max(moved), p_value=float(max(moved) <= _STILL)))
        if rate < 1:
            # Of canaries without a direction, as it was seen of one alone.
            in_samples = sums["gradients"]
            if sampled:
                in_samples = _Sums(total=sum(sampled), num=num_steps[0] * len(sampled))
                found.append(spread_of_samples(sampled, num_steps=num_steps[0], rate=rate))
            found.append(NoiseSeen.of_samples(int(in_samples.total), in_samples.num, rate=rate))
        return {"gradients": tuple(found)}

    delta, releases = config.target.delta, []
    for name in names:
        reach = max(sums[name].norm if name in sums else 0.0, one_step.reach.get(name, 0.0))
        if name == "gradients":
            # Of the gradients alone, where each step releases more.
            count = sum(getattr(event, "count", 0) for event in events if getattr(event, "sampling_rate", 1.0) == rate)
            alone_event = PoissonGaussians(
                count=count,
                noise_multiplier=multipliers[name][0],
                sampling_rate=rate,
                relation=events[0].relation,
            )
            epsilon = price([alone_event], delta=delta, accounting=config.target.accounting).epsilon
            claim = IdealAttack(epsilon=epsilon, mu=gaussian_mu(epsilon, delta) if epsilon else 0.0)
            releases.append(Claimed(name=name, claim=claim, reach=reach))
        else:
            # The others in one step on all records, where no sample of others hides a canary.
            claim = one_step.claim(name, delta)
            releases.append(Claimed(name=name, claim=claim, is_joint=False, reach=reach))
    # Without sampling, a step is Gaussian itself.
    is_gaussian = rate == 1 or sum(getattr(event, "count", 0) for event in events) >= _MANY
    attack = (
        "likelihood ratio of the noisy sums of all steps in the direction of the canary's gradient"
        if has_direction
        else "how much the published model raised the odds of the canary's label"
    )
    return Shadows(
        attack=attack,
        events=events,
        num_canaries=len(number_M),
        releases=tuple(releases),
        play=play,
        is_gaussian=is_gaussian,
        more=more,
    )


class _Steps:
    """Compares how the weights of the canaries' features move with what the steps of a training release."""

    def __init__(self, config: DpSgdFamily, number_M: IntArray) -> None:
        self._momentum, self._number_M = config.dp_sgd.momentum, number_M
        self._scale = config.dp_sgd.batch_size / config.dp_sgd.learning_rate
        self._weights_HM = self._velocity_HM = np.zeros((0, 0))
        self.num, self.apart = 0, 0.0
        """The number of steps, and the largest difference in standard deviations of the noise."""

    def see(self, model: torch.nn.Module, shown_HD: Tensor, *, stddev: float) -> None:
        """See the weights before a step that releases ``shown_HD``."""
        weights_HM, shown_HM = (
            each.detach().cpu()[:, self._number_M].double().numpy() for each in (next(model.parameters()), shown_HD)
        )
        if self.num:
            apart = np.abs((self._weights_HM - weights_HM) * self._scale - self._velocity_HM).max()
            # Weights are rounded to floats of 24 bits.
            rounded = 2.0**-22 * max(1.0, float(np.abs(weights_HM).max())) * self._scale
            self.apart = max(self.apart, (float(apart) - rounded) / stddev)
            shown_HM = shown_HM + self._momentum * self._velocity_HM
        self._weights_HM, self._velocity_HM, self.num = weights_HM, shown_HM, self.num + 1


def _length(name: str, arrays: Sequence[Any]) -> float:
    """Return the length of what a step releases, in the norm of its sensitivity; infinite if it has NaN."""
    flat = np.concatenate([np.asarray(part, np.float64).ravel() for part in map(_on_cpu, arrays)])
    return float(np.nan_to_num(np.linalg.norm(flat, ord=1 if name == "histograms" else 2), nan=math.inf))


def _with_public_shares(config: DpSgdFamily, facts: DataRecord) -> DpSgdFamily:
    """Return a configuration whose steps do not depend on noisy shares of groups."""
    if not isinstance(config, DpFermi) or config.dp_fermi.shares is not None:
        return config
    num_groups, own = len(facts.group_names), config.dp_fermi
    num_events = len(facts.label_names) if own.constraint == "equalized_odds" else 1
    shares = ((1 / num_groups,) * num_groups,) * num_events
    return config.model_copy(update={"dp_fermi": own.model_copy(update={"shares": shares})})


@dataclass(frozen=True, kw_only=True)
class _OneStep:
    """Trainings of one step on all records, with the noise that the target asks for: the releases of a step beside its
    gradients are attacked there, and every kind of unit shows what it adds.

    ``own``: by release, what each canary adds (M, P), in units of the bound; ``reach``: the most that any unit adds.
    """

    config: DpSgdFamily
    facts: DataRecord
    setting: ShadowData
    multipliers: dict[str, tuple[float, float, float]]
    own: dict[str, FloatArray]
    reach: dict[str, float]

    @classmethod
    def of(cls, config: DpSgdFamily, facts: DataRecord, canary_x: Tensor) -> Self:
        sgd = {"epochs": 1.0, "batch_size": _OTHERS, "num_records": _OTHERS}
        single = config.model_copy(update={"dp_sgd": config.dp_sgd.model_copy(update=sgd)})
        canaries = (canary_x, *_labels_and_groups(facts, len(canary_x)))
        setting = _setting(facts, canary_x[:1] * 0, canaries, num_others=_OTHERS, loaded=None, is_embedded=False)
        public, copies, numbers = _with_public_shares(single, facts), setting.copies, range(len(canary_x))

        def exact(records: Split) -> dict[str, FloatArray]:
            dataset, found = replace(setting.dataset, private=records), dict[str, FloatArray]()

            def watch(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:  # noqa: ARG001
                flat = np.concatenate([np.asarray(part, np.float64).ravel() for part in map(_on_cpu, exact)])
                found[name] = flat / norm

            # Shares that are released may all be 0 for so few records; the steps do not depend on declared ones.
            for each in (single, public)[: 1 + (public is not single)]:
                with suppress(SpentError):
                    each.train(replace(_training(each, dataset, initial_model(each, dataset)), watch=watch))
            return found

        model = initial_model(single, setting.dataset)
        events = single.train(replace(_training(single, setting.dataset, model), watch=(names := _Names()))).events
        # Without NaN, of which a training warns.
        reach = _reach(facts, canary_x, exact, odd=(0.0, 0.01, 1 / _LOUD), l1=("histograms",))
        own: dict[str, FloatArray] = {}
        beside = sorted(names.names - {"gradients"})
        if beside:
            alone = setting.others.take([0])
            added = [setting.canaries.take(list(range(m * copies, (m + 1) * copies))) for m in numbers]
            of_one, of_each = exact(alone), [exact(_joined(alone, canary)) for canary in added]
            own = {name: np.stack([of_both[name] - of_one[name] for of_both in of_each]) for name in beside}
        multipliers = _multipliers(single, events)
        return cls(config=single, facts=facts, setting=setting, multipliers=multipliers, own=own, reach=reach)

    def claim(self, name: str, delta: float) -> IdealAttack:
        """Return the strongest attack on what is claimed of this release of the one step."""
        scale = self.multipliers[name][0]
        return IdealAttack(epsilon=1 / scale, mu=None) if name == "histograms" else _of_gaussian(1.0, scale, delta)

    def seen(self, included_M: Coins) -> list[tuple[FloatArray, FloatArray]]:
        """Draw one step with these canaries; return the scores and gains (M,) of each release but the gradients."""
        if not self.own:
            return []
        noise: dict[str, FloatArray] = {}

        def watch(name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:
            flat = [
                np.concatenate([np.asarray(_on_cpu(p), np.float64).ravel() for p in each]) for each in (exact, released)
            ]
            noise[name] = (flat[1] - flat[0]) / norm

        dataset = self.setting.with_canaries(included_M)
        self.config.train(replace(_training(self.config, dataset, initial_model(self.config, dataset)), watch=watch))
        found = []
        for name in self.multipliers:
            if name == "gradients":
                continue
            own_MP, (scale, variance, _) = self.own[name], self.multipliers[name]
            # The attacker does not know the coins of the others: each adds half of what it adds, give or take.
            found_P = noise[name] + (included_M - 0.5) @ own_MP
            spread_PP = scale**2 * variance * np.eye(own_MP.shape[1]) + own_MP.T @ own_MP / 4
            along_MP = np.linalg.solve(spread_PP, own_MP.T).T
            squared_M = (along_MP * own_MP).sum(axis=1)
            # Without the canary's own coin, by Sherman and Morrison.
            rest_M = 1 - squared_M / 4
            gain_M = np.sqrt(squared_M / rest_M)
            score_M = (along_MP @ found_P + squared_M / 2) / rest_M / np.maximum(gain_M, 1e-30)
            found.append((score_M, gain_M))
        return found


def _on_cpu(values: Any) -> Any:
    return values.detach().cpu() if isinstance(values, Tensor) else values


class _Names:
    """Remembers the names of the releases of a training."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, name: str, exact: Sequence[Any], released: Sequence[Any], *, norm: float) -> None:  # noqa: ARG002
        self.names.add(name)


def _multipliers(config: DpSgdFamily, events: Sequence[Any]) -> dict[str, tuple[float, float, float]]:
    """Return for each release of a step its noise multiplier or scale, the variance of noise of scale 1, and its
    kurtosis. They follow from the events of the statement: one event may stand for two releases on one sample, whose
    squares of sensitivity over noise add up to the event's."""
    (of_steps, *others), normal = events, (1.0, 3.0)
    if isinstance(config, RacoDp):
        joint, share = of_steps.gradient_noise_multiplier, config.raco_dp.resolved_size_share
        found = {
            "gradients": (joint / math.sqrt(1 - share), *normal),
            "histograms": (of_steps.laplace_scale, 2.0, 6.0),
        }
        return found | ({"sizes of cells": (joint / math.sqrt(share), *normal)} if share else {})
    joint = of_steps.noise_multiplier
    if not isinstance(config, DpFermi) or not config.dp_fermi.weight:
        return {"gradients": (joint, *normal)}
    ratio = config.dp_fermi.matrix_noise_ratio
    of_model = joint * math.sqrt(1 + ratio**-2)
    found = {"gradients": (of_model, *normal), "matrices": (ratio * of_model, *normal)}
    for of_shares in others:
        found["group shares"] = (of_shares.noise_multiplier, *normal)
    return found


@dataclass(frozen=True, kw_only=True)
class _TableByScore:
    """What the attacker knows of the noisy table of private labels by score, whose bins follow from released counts.

    A canary has one unit of mass in one cell, which it may share with others. ``event``: as stated; ``share``: the
    share of its noise.
    """

    setting: ShadowData
    event: Any
    config: ThresholdsConfig
    share: float

    @property
    def unit(self) -> float:
        """The bound on what a person or record adds."""
        return float(getattr(self.event, "norm", 1.0))

    @property
    def stddev(self) -> float:
        return self.share * float(self.event.noise_stddev_votes)

    def seen(
        self, included_M: Coins, counts: NoisyCounts, shown_KC: IntArray
    ) -> tuple[FloatArray, FloatArray, tuple[NoiseSeen, ...], Drawn]:
        """Return scores and gains (M,) of the canaries from the released table ``shown_KC``, and its noise."""
        others, canaries = self.setting.others, self.setting.canaries
        bins, ballot = counts.bins(self.setting.dataset, num_bins=self.config.num_bins)
        person_N = None if others.person_N is None else others.person_N.numpy()
        known_KC = bins.table(ballot.votes(others.x), others.y.numpy(), person_N)
        each = slice(None, None, self.setting.copies)
        cell_2M = bins.numbers(ballot.votes(canaries.x[each])), canaries.y[each].numpy()
        of_canaries_KC, all_KC = np.zeros(known_KC.shape), np.zeros(known_KC.shape)
        np.add.at(of_canaries_KC, cell_2M, included_M)
        np.add.at(all_KC, cell_2M, 1.0)
        # The attacker does not know the coins of the other canaries in a cell.
        others_M, stddev = all_KC[cell_2M] - 1, self.stddev / self.unit
        scale_M = np.sqrt(1 + others_M / 4 / stddev**2)
        found_M = (shown_KC - known_KC)[cell_2M] / self.unit - others_M / 2
        exact_KC = known_KC + self.unit * of_canaries_KC
        spread, kurtosis = _moments_of(float(self.event.noise_stddev_votes))
        # Every cell: noise may be missing on empty ones alone.
        noise = _both_kinds(shown_KC - exact_KC, exact_KC > 0, spread, kurtosis=kurtosis)
        drawn = Drawn.of(shown_KC - np.rint(exact_KC).astype(np.int64), self.stddev)
        return found_M / stddev / scale_M, 1 / stddev / scale_M, noise, drawn

    def claimed(self, facts: DataRecord, counts: NoisyCounts, delta: float) -> Claimed:
        """Return what is claimed of the table alone, with what one canary adds to it without noise."""

        def exact(records: Split) -> dict[str, IntArray]:
            dataset = replace(self.setting.dataset, private=records)
            return {"table": counts.table(dataset, self.event, self.config, lambda exact_KC, **_: exact_KC)}

        reach = _reach(facts, self.setting.canaries.x, exact)["table"] / self.unit
        return Claimed(name="table by score", claim=_of_gaussian(self.unit, self.stddev, delta), reach=reach)


def _votes(
    run: RunDirectory,
    facts: DataRecord,
    config: GnmaxMethod | TeacherVotes,
    events: Sequence[Any],
    loaded: Dataset | None,
    *,
    is_control: bool,
) -> Shadows:
    """Return attacks on the noisy answers that teachers give to a run's queries: on the answers, on which queries pass
    the threshold check, and on the table of private labels by score.

    A canary is a record of one teacher. In every query it changes this teacher's vote from one of two classes to the
    other. The direction of the change is random for each query, and known to the attacker. Where there is a threshold,
    half of the queries have votes at it; all others are a tie of two classes. In the table it is in one cell.
    """
    (stated, *beside), target = events, config.target
    share = 0.5 if is_control else 1.0
    # Noise is compared with what the statement claims, not with what the mechanism says of itself.
    label_noise, check_noise, threshold = share * stated.noise_stddev_votes, math.inf, -math.inf
    drawn: tuple[Any, ...]
    if isinstance(config, TeacherVotes):
        num_voters, queries, counted = config.teachers.num_teachers, round(stated.norm**2 / 2), True
    else:
        mechanism = config.mechanism
        if target.epsilon is not None:
            mechanism = mechanism_within(
                mechanism,
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                num_queries=config.planned_queries(range(stated.count)),
                beside=tuple(beside),
            )
        mechanism = mechanism.scaled(share)
        num_voters, queries, counted = config.num_voters, stated.count, config.queries.release == "counts"
        drawn = (mechanism_events.of_teachers(mechanism.worst_case(queries), stated.unit),)
        check_noise, threshold = share * stated.threshold_stddev_votes, stated.threshold
    has_check = math.isfinite(threshold)
    # So few canaries that the votes of the others hide one no more than the noise does.
    num_canaries = max(1, min(_MOST_EACH, num_voters // 4, int(stated.noise_stddev_votes**2 / 4)))
    if has_check:
        num_canaries = max(1, min(num_canaries, int(stated.threshold_stddev_votes**2 / 4)))
    thresholds = config.thresholds if isinstance(config, PateFamily | TeacherVotes) and beside else None
    if thresholds is not None:
        # Likewise of those that share a cell of the table.
        in_cell = max(1, int((beside[0].noise_stddev_votes / getattr(beside[0], "norm", 1)) ** 2 / 4))
        num_canaries = min(num_canaries, in_cell * thresholds.num_bins * len(facts.label_names))
    generator = np.random.default_rng(0)
    groups = generator.integers(len(facts.group_names), size=queries).tolist()
    code_QM = generator.integers(2, size=(queries, num_canaries))
    votes_QC = np.zeros((queries, len(facts.label_names)), np.int64)
    rest = num_voters - num_canaries
    half = -(-rest // 2)
    # Any two classes: a label shows the noise of no others.
    first_Q = generator.integers(votes_QC.shape[1], size=queries)
    second_Q = (first_Q + generator.integers(1, votes_QC.shape[1], size=queries)) % votes_QC.shape[1]
    rows_Q, of_first_Q, of_second_Q = np.arange(queries), np.full(queries, half), np.full(queries, half)
    if has_check:
        of_threshold = min(rest, max(0, round(threshold) - num_canaries // 2))
        # The others pass as surely as a vote may, by made-up teachers: more than the run has, if it takes them.
        half = max(half, of_threshold + round(3 * check_noise / share))
        at_check_Q, is_tied_Q = rows_Q % 2 == 1, rows_Q % 8 == 0
        of_first_Q = np.where(at_check_Q | is_tied_Q, of_threshold, half)
        # No canary's vote may change which class has the most.
        behind = min(rest - of_threshold, max(0, of_threshold - num_canaries))
        of_second_Q = np.where(at_check_Q, behind, of_first_Q)
        # In one order, so that the queries show together whose noise the check has.
        pair_2Q = np.stack([first_Q, second_Q])
        first_Q, second_Q = np.where(is_tied_Q, np.sort(pair_2Q, axis=0), pair_2Q)
    votes_QC[rows_Q, first_Q], votes_QC[rows_Q, second_Q] = of_first_Q, of_second_Q
    ids: Sequence[str] = [f"public-{number}" for number in range(queries)]
    if loaded is not None and not isinstance(config, TeacherVotes):
        # The run's own votes, without as many votes for the leading class as there are canaries.
        collected = read_votes(run.votes)
        votes_QC, ids = collected.votes_QC.copy(), collected.record_ids
        queries, leader_Q = len(votes_QC), votes_QC.argmax(axis=1)
        led_Q = np.arange(queries), leader_Q
        votes_QC[led_Q] = np.maximum(votes_QC[led_Q] - num_canaries, 0)
        first_Q, second_Q = np.argsort(-votes_QC, axis=1, kind="stable")[:, :2].T
    code_QM, groups = code_QM[:queries], groups[:queries]
    sign_QM = 2 * code_QM - 1
    keys, rows_Q = [str(number) for number in range(queries)], np.arange(queries)
    # A gate only hides answers that are charged all the same.
    rule = GateRule(max_disparity=math.inf, min_count=1)
    setting, table = None, None
    if beside or isinstance(config, TeacherVotes):
        if loaded is not None and loaded.embedding is None:
            loaded = embedded(loaded, Embedding.of(loaded.public.x, EmbeddingConfig(graph_share=0)))
        width = min(math.prod(facts.record_shape), _MOST_EACH)
        public_x = torch.from_numpy(generator.normal(size=(queries, width)).astype(np.float32))
        public_x = public_x if loaded is None else loaded.public.x
        number_M = np.arange(num_canaries)
        canaries = (public_x[torch.from_numpy(number_M % len(public_x))], *_labels_and_groups(facts, num_canaries))
        setting = _setting(facts, public_x, canaries, num_others=_OTHERS, loaded=loaded, is_embedded=True)
        if loaded is not None:
            setting = replace(setting, dataset=replace(setting.dataset, public=loaded.public))
        if isinstance(config, TeacherVotes):
            drawn, ids = config.events(setting.dataset), config.queries(setting.dataset).record_id
        elif isinstance(config, PateFamily):
            drawn = (*drawn, *config.beside(setting.dataset))
        if thresholds is not None:
            table = _TableByScore(setting=setting, event=beside[0], config=thresholds, share=share)

    def own_noise(exact_RW: IntArray, *, name: str, **_: Any) -> IntArray:
        stddev = table.stddev if table is not None and name == "bin" else label_noise
        return exact_RW + _own_noise(exact_RW.shape, stddev)

    noisy_sum = own_noise if is_control else None

    def cast(included_M: Coins) -> IntArray:
        # A teacher votes for one of two classes by its code, and with the canary's record for the other one.
        for_first_Q = (code_QM ^ included_M).sum(axis=1)
        cast_QC = votes_QC.copy()
        cast_QC[rows_Q, first_Q] += for_first_Q
        cast_QC[rows_Q, second_Q] += num_canaries - for_first_Q
        return cast_QC

    def answered(
        cast_QC: IntArray, included_M: Coins
    ) -> tuple[IntArray, Numbers | None, NoisyCounts | None, IntArray | None]:
        """Return the released labels (-1 where there is none) and, if they are released, the counts; the answers as
        the rule reads them; and the table by score."""
        dataset = None if setting is None else setting.with_canaries(included_M)
        if isinstance(config, TeacherVotes):
            assert dataset is not None
            arrays = config.noisy(replace(_training(config, dataset), noisy_sum=noisy_sum), cast_QC).arrays
            counts = config.noisy_counts(config.queries(dataset), arrays["counts_QC"], drawn[0])
            return arrays["counts_QC"].argmax(axis=1), arrays["counts_QC"], counts, arrays.get("table_KC")
        gate = DemographicParityGate(rule, num_groups=len(facts.group_names), num_classes=len(facts.label_names))
        answers = mechanism.answer(cast_QC, groups=groups, keys=keys, gate=gate, source=OsEntropy())
        said_Q = np.array([-1 if answer.label is None else answer.label for answer in answers])
        numbers_QC, table_KC = None, None
        if counted:
            numbers_QC = np.array([(0,) * cast_QC.shape[1] if each.counts is None else each.counts for each in answers])
            counts = counted_of(numbers_QC, said_Q >= 0)
        else:
            named = [ids[row] for row in np.flatnonzero(said_Q >= 0).tolist()]
            counts = NoisyCounts.of_labels(said_Q[said_Q >= 0], named, num_classes=cast_QC.shape[1])
        if dataset is not None and isinstance(config, PateFamily):
            table_KC = config.table_by_score(dataset, counts, noisy_sum)
        return said_Q, numbers_QC, counts, table_KC

    def counted_of(counts_QC: IntArray, passed_Q: Coins) -> NoisyCounts:
        return NoisyCounts(
            counts_QC=counts_QC[passed_Q],
            record_ids=[ids[row] for row in np.flatnonzero(passed_Q).tolist()],
            num_voters=num_voters,
            noise_stddev_votes=label_noise,
        )

    crowd = num_canaries / 4  # variance of the votes of the other canaries, whose coins the attacker does not know

    def play(included_M: Coins) -> Seen:
        cast_QC = cast(included_M)
        said_Q, numbers_QC, counts, table_KC = answered(cast_QC, included_M)
        passed_Q = said_Q >= 0
        lead_Q, exact_Q = np.zeros(queries), (cast_QC[rows_Q, first_Q] - cast_QC[rows_Q, second_Q]).astype(np.float64)
        known_Q = (votes_QC[rows_Q, first_Q] - votes_QC[rows_Q, second_Q]).astype(np.float64)
        if numbers_QC is not None:
            lead_Q = np.where(passed_Q, numbers_QC[rows_Q, first_Q] - numbers_QC[rows_Q, second_Q] - known_Q, 0.0)
            noise_QC = (numbers_QC - cast_QC)[passed_Q].astype(np.int64)
            of_labels = _squares(noise_QC, label_noise)
            scores_QC = np.full(numbers_QC.shape, np.nan)
            scores_QC[passed_Q] = normal_scores(noise_QC, label_noise)
            draws = [Drawn(scores_RP=scores_QC.reshape(1, -1), divisor=int(np.gcd.reduce(noise_QC, axis=None)))]
        else:
            lead_Q = np.where(passed_Q, (said_Q == first_Q) - (said_Q == second_Q).astype(float), 0.0)
            among_Q = passed_Q & np.isin(said_Q, np.stack([first_Q, second_Q])) & (exact_Q != 0)
            among_Q &= (said_Q == first_Q) | (said_Q == second_Q)
            is_other_Q = np.where(exact_Q > 0, said_Q == second_Q, said_Q == first_Q)
            chance_Q, less_Q = (
                scipy.special.ndtr(-np.abs(exact_Q) / (math.sqrt(2) * label_noise * of)) for of in (1.0, LESS_NOISE)
            )
            of_labels = NoiseSeen.of_answers(is_other_Q[among_Q], chance_Q[among_Q], less_Q[among_Q])
            says_first_Q = np.where(exact_Q > 0, 1 - chance_Q, chance_Q)
            scores_Q = answer_scores(said_Q == first_Q, says_first_Q)
            shows_Q = among_Q & (chance_Q > _SURE)
            draws = [Drawn(scores_RP=np.where(shows_Q, scores_Q, np.nan)[None])]
        # With the canary's record, a teacher whose code is 1 votes for the second class.
        scores = [_coded(-lead_Q, sign_QM)]
        num_passed = max(int(passed_Q.sum()), 1)
        if counted:
            shift = 1 / math.sqrt(2 * label_noise**2 + 4 * crowd) * 2
        else:
            # The slope of the chance to say the first class, over the spread of the answer.
            spread = math.sqrt(2) * label_noise
            slope_Q = 2 * scipy.stats.norm.pdf(known_Q / math.hypot(spread, 2 * math.sqrt(crowd)))
            shift = float(slope_Q[passed_Q].mean() if passed_Q.any() else 0.0) * 2 / math.hypot(spread, 2 * crowd**0.5)
        gains = [np.full(num_canaries, shift * math.sqrt(num_passed))]
        noise: list[tuple[NoiseSeen, ...]] = [(of_labels,)]
        if has_check:
            ahead_Q = cast_QC.max(axis=1) - threshold
            chance_Q, less_Q = (scipy.special.ndtr((ahead_Q + 0.5) / (check_noise * of)) for of in (1.0, LESS_NOISE))
            near_Q = (ahead_Q != 0) & (ahead_Q + 0.5 != 0)
            is_above_Q = ahead_Q >= 0
            against = [np.where(is_above_Q, 1 - each, each)[near_Q] for each in (chance_Q, less_Q)]
            noise.append((NoiseSeen.of_answers((passed_Q != is_above_Q)[near_Q], *against),))
            is_open_Q = np.minimum(chance_Q, 1 - chance_Q) > _SURE
            draws.append(Drawn(scores_RP=np.where(is_open_Q, answer_scores(passed_Q, chance_Q), np.nan)[None]))
            of_known_Q = votes_QC[rows_Q, first_Q] + num_canaries / 2 - threshold + 0.5
            spread = math.hypot(check_noise, math.sqrt(crowd))
            chance_Q = scipy.special.ndtr(of_known_Q / spread)
            # In a near tie a canary's vote may raise or lower the most votes: the attack leaves these queries out.
            is_sided_Q = known_Q >= num_canaries
            slope_Q = is_sided_Q * scipy.stats.norm.pdf(of_known_Q / spread) / spread
            weight_Q = slope_Q / np.maximum(chance_Q * (1 - chance_Q), 1e-9)
            scores.append(_coded(-(passed_Q - chance_Q) * weight_Q, sign_QM))
            gains.append(np.full(num_canaries, math.sqrt(float((slope_Q * weight_Q).sum()))))
        if table is not None and counts is not None and table_KC is not None:
            score_M, gain_M, of_table, drawn_table = table.seen(included_M, counts, table_KC)
            draws.append(drawn_table)
            scores.append(score_M)
            gains.append(gain_M)
            noise.append(of_table)
        return Seen(scores_SM=np.stack(scores), gains_SM=np.stack(gains), noise=tuple(noise), draws=tuple(draws))

    delta = target.delta
    releases = [Claimed(name="answers", claim=_of_gaussian(math.sqrt(2 * queries), label_noise, delta))]
    if has_check:
        claim = _of_gaussian(math.sqrt(queries), check_noise, delta)
        releases.append(Claimed(name="threshold checks", claim=claim))
    attack = f"the canary's code in the {'noisy counts' if counted else 'labels'} of all queries"
    if has_check:
        attack += ", and in which of them passed the check"
    if table is not None:
        nobody = cast(np.zeros(num_canaries, np.bool_))
        releases.append(table.claimed(facts, counted_of(nobody, np.ones(queries, np.bool_)), delta))
        attack += ", and likelihood ratio of the number in its cell of the table by score"
    is_gaussian = (counted and not has_check) or queries >= _MANY
    # Of the run's own votes, few are near a tie and near the threshold at once.
    hidden = has_check and not counted and loaded is not None
    return Shadows(
        attack=attack,
        events=drawn,
        num_canaries=num_canaries,
        releases=tuple(releases),
        play=play,
        is_gaussian=is_gaussian,
        control_noise=share,
        unseen=("a label that is drawn with the noise of its own check",) if hidden else (),
    )


def _coded(answer_Q: FloatArray, sign_QM: IntArray) -> FloatArray:
    """Return the correlation of answers with every canary's code of signs, in standard deviations if there were no
    canary."""
    length = math.sqrt(float((answer_Q**2).sum()))
    score_M: FloatArray = (answer_Q @ sign_QM) / (length or 1.0)
    return score_M


def _counts(facts: DataRecord, config: Postprocessing, loaded: Dataset | None, *, is_control: bool) -> Shadows:
    """Return an attack on the noisy counts by group, label and prediction that the method dp_postprocessing releases.
    For every label and prediction there are canaries (records that the attacker looks for); a fair coin for each canary
    decides to which of two groups it belongs."""
    num_groups, num_classes = len(facts.group_names), len(facts.label_names)
    epsilon, pairs = config.target.epsilon * (2.0 if is_control else 1.0), num_groups // 2
    pair_M, label_M, said_M = np.indices((pairs, num_classes, num_classes)).reshape(3, -1)
    first_M = 2 * pair_M
    # Large enough that no noisy count falls below 0, where it would be cut.
    crowd = 1000 + round(100 / config.target.epsilon)
    cells = np.indices((num_groups, num_classes, num_classes)).reshape(3, -1)
    groups_N, labels_N, saids_N = np.repeat(cells, crowd, axis=1)
    if loaded is not None:
        groups_N, labels_N = loaded.private.z.numpy(), loaded.private.y.numpy()
        saids_N = labels_N  # the predictions of a perfect model
    sizes: dict[str, Any] = {"num_groups": num_groups, "num_classes": num_classes}
    known_GYC = joint_table(saids_N, groups_N, labels_N=labels_N, **sizes)
    # What one unit of each label and prediction moves, from the first group to any other.
    moved = [
        joint_table(said, group, labels_N=label, **sizes).astype(np.float64)
        - joint_table(said, 0 * group, labels_N=label, **sizes)
        for group, label, said in np.indices((num_groups, num_classes, num_classes)).reshape(3, -1, 1).swapaxes(0, 1)
    ]
    reach = max(float(np.abs(each_GYC).sum()) for each_GYC in moved) / 2

    def play(included_M: Coins) -> Seen:
        found_GYC = released_counts(
            np.concatenate([saids_N, said_M]),
            np.concatenate([labels_N, label_M]),
            np.concatenate([groups_N, first_M + included_M]),
            epsilon=epsilon,
            source=config.source,
            **sizes,
        )
        without_M, with_M = (
            found_GYC[first_M + group, label_M, said_M] - known_GYC[first_M + group, label_M, said_M]
            for group in (0, 1)
        )
        # The log-likelihood ratio of Laplace noise, by the distances from the counts without and with the canary.
        ratio_M: FloatArray = np.abs(with_M) - np.abs(with_M - 1) + np.abs(without_M - 1) - np.abs(without_M)
        exact_GYC = known_GYC.copy()
        np.add.at(exact_GYC, (first_M + included_M, label_M, said_M), 1)
        noise_GYC = found_GYC - exact_GYC
        # A count that falls below 0 is cut.
        stddev, drawn = math.sqrt(2) * 2 / epsilon, Drawn(scores_RP=np.zeros((0, 0)))
        noise: tuple[NoiseSeen, ...] = ()
        if loaded is None:
            noise = (_squares(noise_GYC, stddev, kurtosis=6.0),)
            drawn = Drawn(scores_RP=normal_scores(noise_GYC.ravel(), stddev, laplace=True)[None])
        gains_SM = np.ones((1, len(ratio_M)))
        return Seen(scores_SM=(ratio_M * epsilon / 2)[None], gains_SM=gains_SM, noise=(noise,), draws=(drawn,))

    drawn = (LaplaceReleases(count=1, epsilon=epsilon),)
    return Shadows(
        attack="likelihood ratio of the two counts between which the canary's attribute decides",
        events=drawn,
        num_canaries=len(first_M),
        releases=(Claimed(name="counts", claim=IdealAttack(epsilon=epsilon, mu=None), reach=reach),),
        play=play,
        is_pure=True,
        control_noise=0.5 if is_control else 1.0,
    )


def _metrics(
    run: RunDirectory,
    facts: DataRecord,
    event: PredictionTables,
    config: Method,
    loaded: Dataset | None,
    *,
    is_control: bool,
) -> Shadows:
    """Return an attack on the noisy table of test records from which private metrics are computed. Every combination of
    group, true label and prediction that the model makes has a canary, a record that the attacker looks for."""
    # Made-up records have the form of the run's: embedded already, if an embedding belongs to the data set.
    student, edges = replace(load_student(run.student), embedding=None), config.evaluation.score_edges
    tried_x = _varied(facts, _MOST_EACH, scale=_LOUD)
    tried = _records(tried_x, *np.zeros((2, len(tried_x)), np.int64), name="tried")
    said_N, score_N = lone_predictions(student, tried, OsEntropy())
    bin_N = np.searchsorted(edges, score_N, side="right")
    _, places = np.unique(np.stack([bin_N, said_N]), axis=1, return_index=True)
    num_groups, num_classes = len(facts.group_names), len(facts.label_names)
    # One canary for each cell. If neighbours replace a unit, two cells share a canary that moves between them.
    place_M, group_M, label_M = np.indices((len(places), num_groups, num_classes)).reshape(3, -1)
    place_M = places[place_M]
    moved = {"sensitive attribute": "group"}.get(event.unit, "label") if event.relation == "replace one" else ""
    if moved:
        kept_M = (group_M if moved == "group" else label_M) == 0
        place_M, group_M, label_M = place_M[kept_M], group_M[kept_M], label_M[kept_M]
    cells_M = bin_N[place_M], group_M, label_M, said_N[place_M]
    others_M = bin_N[place_M], group_M + (moved == "group"), label_M + (moved == "label"), said_N[place_M]
    copies = _COPIES if event.unit == "person" else 1
    x = tried_x[torch.from_numpy(place_M)]
    canaries = _records(x, label_M, group_M, name="canary", unit=event.unit, copies=copies)
    moved_ones = _records(x, others_M[2], others_M[1], name="canary", unit=event.unit, copies=copies)
    base = loaded.test if loaded is not None else canaries.take(range(0))
    sizes: dict[str, Any] = {"num_groups": num_groups, "num_classes": num_classes, "edges": edges}
    claimed = event.noise_stddev_records * (0.5 if is_control else 1.0)
    spread, kurtosis = _moments_of(event.noise_stddev_weights)

    def own_noise(exact_RW: IntArray, **_: Any) -> IntArray:
        return exact_RW + _own_noise(exact_RW.shape, claimed * event.weight)

    def exact_of(records: Split) -> Numbers:
        shown = draw_table(student, records, event, OsEntropy(), noisy_sum=lambda exact_RW, **_: exact_RW, **sizes)
        return shown.arrays["weights_BGYC"]

    known_BGYC = exact_of(base) if len(base) else 0

    def play(included_M: Coins) -> Seen:
        rows_N = np.repeat(included_M, copies)
        records = _joined(base, canaries.take(np.flatnonzero(rows_N).tolist()))
        if moved:
            records = _joined(records, moved_ones.take(np.flatnonzero(~rows_N).tolist()))
        how: dict[str, Any] = sizes | ({"noisy_sum": own_noise} if is_control else {})
        shown_BGYC = draw_table(student, records, event, OsEntropy(), **how).arrays["weights_BGYC"] - known_BGYC
        table_BGYC = shown_BGYC / event.weight
        # The difference of two cells has the noise of both.
        found_M = table_BGYC[cells_M] - (table_BGYC[others_M] - 1 if moved else 0)
        added, stddev = (2.0, math.sqrt(2) * claimed) if moved else (1.0, claimed)
        score_M, gain_M = _log_ratio(found_M[None], np.full((1, len(found_M)), added), stddev)
        # Shares of a person's records are rounded down.
        added_BGYC, each = np.zeros(shown_BGYC.shape, np.int64), event.weight // copies * copies
        np.add.at(added_BGYC, cells_M, each * included_M)
        if moved:
            np.add.at(added_BGYC, others_M, each * ~included_M)
        noise_BGYC = shown_BGYC - added_BGYC
        noise = _both_kinds(noise_BGYC, added_BGYC > 0, spread, kurtosis=kurtosis)
        draws = (Drawn.of(noise_BGYC, event.noise_stddev_weights),)
        return Seen(scores_SM=score_M[None], gains_SM=gain_M[None], noise=(noise,), draws=draws)

    # Where records are replaced, each adds as much as it takes away.
    own_x = tried_x[torch.from_numpy(places)]
    reach = _reach(facts, own_x, lambda records: {"table": exact_of(records)})["table"] / event.weight
    claim = _of_gaussian(event.as_sums.norm / event.weight, claimed, config.target.delta)
    return Shadows(
        attack="likelihood ratio of the number in the canary's cell",
        events=(event,),
        num_canaries=len(place_M),
        releases=(Claimed(name="table of predictions", claim=claim, reach=reach),),
        play=play,
        is_gaussian=True,
        control_noise=0.5 if is_control else 1.0,
    )
