"""Audit a run: canaries in shadow releases, and the lower bound on epsilon that an attack proves.

A shadow release is drawn for the audit by the run's own method under its settings, from made-up records in the form of
the run's data. A canary is a record that the attacker looks for; a fair coin decides for each canary whether it is
included. No private record is read, so the result may be published. With ``on_private`` the other records are the
private ones, and the result must not be published. The attacker knows all made-up records and what every canary would
add, and reads what a run publishes. Guesses about the coins give lower bounds on epsilon
(:mod:`fairpate.privacy.audit`).

- Tables and sums: a canary has a cell of the table or a direction of its own. The attacker's score is the likelihood
  ratio of the released numbers.
- Teachers' votes: a canary changes its teacher's vote by a random code over the queries. The score is the correlation
  of this code with the answers.
- SGD family: a canary has a feature of its own. The score is how much the published model raised the odds of its label.

**Power.** Before anything is drawn, the audit computes the bound that an ideal attack would reach with the chosen
number of canaries. A control repeats the audit for the same method planned with half the noise: if the audit does not
detect that the control exceeds the claim, it would not have detected a fault of the run either.

Shapes: M canaries of one release, N records, Q queries, C classes, W numbers per class.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aggregator.session import mechanism_within
from fairpate.config import EMBEDDED_NORM, EmbeddingConfig, RayConfig, values_digest
from fairpate.data import Dataset, entry_for
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding, embedded
from fairpate.fairness.gate import DemographicParityGate
from fairpate.fairness.rates import joint_table
from fairpate.methods.base import Method, PrivateMethod, Training, price
from fairpate.methods.dp_fair_learning import Postprocessing, released_counts
from fairpate.methods.dp_sgd import DpSgdFamily
from fairpate.methods.pate import GnmaxMethod
from fairpate.methods.record_votes import UNITS, RecordVotes, VectorsConfig, WeightedBallot, WeightedVotes
from fairpate.methods.residual_votes import AdaSsp, RecordSums, ResidualVotes, indicators, votes_themselves
from fairpate.nn.models import scale_bytes
from fairpate.privacy import mechanism_events
from fairpate.privacy.accountant import ConfidentGnmaxQueries, Event, LaplaceReleases, PoissonGaussians
from fairpate.privacy.audit import IdealAttack, gaussian_mu, guess, separate
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, OsEntropy
from fairpate.privacy.mechanism_events import PoissonGaussianLaplaces, PredictionTables, event_from, event_json
from fairpate.report.run_page import AttackResult, Audit, AuditedRelease, audit_page
from fairpate.run import context
from fairpate.run.bundle import alike
from fairpate.run.context import DataRecord, RunDirectory, require_data_by_name
from fairpate.run.folder import finished_run, load_for
from fairpate.run.private_metrics import draw_table, lone_predictions
from fairpate.run.release_log import Released, read_release
from fairpate.run.run import initial_model
from fairpate.terminal import Reporter
from fairpate.types import FloatArray, IntArray, PrivacyStatement, UsageError, UserError, strict
from student.student import load_student
from teachers.ensemble import BlockPool

Numbers = npt.NDArray[Any]
SumMethod = WeightedVotes | ResidualVotes | AdaSsp
Coins = npt.NDArray[np.bool_]
CANARIES = 20_000  # default number of coin flips of one audit, spread over as many releases as they need
_LOUD = 20.0  # a canary's feature: far beyond every radius and clipping bound
_COPIES = 3  # records of a canary, where persons are protected
_MOST_POOL, _MOST_EACH = 1000, 256
_RECORDS_UNKNOWN = 1000
_MOST_CANARIES = 2**24
_MANY = 100  # steps or queries, whose sum is nearly normal
_EVENTS_ALIKE = 0.01  # relative; a repeated search for the noise may end at a slightly different float


class AuditError(UsageError):
    """Raised if a run cannot be audited, or if its audit could prove nothing; the message gives reason and remedy."""


@dataclass(frozen=True, kw_only=True)
class Shadows:
    """An attack on simulated ("shadow") releases of one kind, such as noisy tables; ``attack`` describes it in words.

    A canary is a record that the attacker looks for; a fair coin decides whether a release includes it. ``play(coins)``
    draws one shadow release with those canaries whose coins (M,) are true, and returns the attack's score (M,) for
    every canary. ``events``: the accountant's privacy events of one release. ``is_gaussian``: the scores are normally
    distributed, or sums of many terms. ``is_pure``: the noise of the releases is Laplace.
    """

    attack: str
    events: tuple[Event, ...]
    num_canaries: int
    play: Callable[[Coins], FloatArray]
    is_gaussian: bool = False
    is_pure: bool = False


def audit_run(
    root: Path, *, reporter: Reporter, num_canaries: int = CANARIES, on_private: bool = False
) -> tuple[Audit, Path]:
    """Audit the finished run in the folder ``root``: attack simulated releases, and compare the proven lower bound on
    epsilon with the run's claim. Write ``audit.json`` and ``audit.html``, and return the audit and the path of its
    page.

    The attack looks for canaries, records that are added to made-up records or, with ``on_private``, to the run's
    private records. Both files are written to ``public/``, with ``on_private`` to ``private/``. Raises AuditError for a
    run without a guarantee, for a method without a known attack, and for too few canaries to detect that half the noise
    is missing.
    """
    run, config = finished_run(root)
    statement = context.read_statement(run) if run.statement.is_file() else None
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
        shadows, control = make(), make(noise_share=0.5)
        expected, drawn = ([event_json(event) for event in each] for each in (events, shadows.events))
        if not alike(expected, drawn, _EVENTS_ALIKE):
            raise AuditError(
                f"statement.json: states the privacy events {expected}, but the run's settings now give {drawn}; audit "
                "the run with the version of FairPATE that made it (see environment.json)."
            )
        audited.append(_attacked(shadows, control, statement, part, num_canaries, reporter, centred=on_private))
    found = Audit(
        method=config.method,
        unit=statement.unit,
        relation=statement.relation,
        delta=statement.delta,
        epsilon=statement.epsilon,
        # As record.json holds them, without infinities.
        settings=values_digest(strict(config.settings_without())),
        records="private" if on_private else "made",
        not_attacked=("the choice of settings by validation records",) if "validation" in statement.part_events else (),
        releases=tuple(audited),
    )
    folder = run.private if on_private else run.public
    context.write_json(folder / run.audit.name, strict(found.to_json()), private=on_private)
    context.write_text(folder / run.audit_page.name, audit_page(found), private=on_private)
    return found, folder / run.audit_page.name


def _attacked(
    shadows: Shadows,
    control: Shadows,
    statement: PrivacyStatement,
    part: str,
    num_canaries: int,
    reporter: Reporter,
    *,
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
    # Half the noise doubles the shift of a Gaussian, and the epsilon of a Laplace variable.
    ideal, of_control = (
        IdealAttack(epsilon=factor * epsilon, mu=None if mu is None else factor * mu) for factor in (1.0, 2.0)
    )

    def at_best(attack: IdealAttack, count: int) -> AttackResult:
        return AttackResult(
            guesses=attack.guesses(num_canaries=count, delta=delta),
            separation=attack.separation(num_canaries=count) if shadows.is_gaussian else None,
        )

    planned = at_best(ideal, total)
    # Doubled until the ideal attack would detect the control: the message then names a number that suffices.
    needed = total
    while max(at_best(of_control, needed).bounds(delta)) <= epsilon and needed < _MOST_CANARIES:
        needed *= 2
    if needed > total:
        raise AuditError(
            f"--canaries: {total:,} canaries are too few, as even an ideal attack would not detect that half the noise "
            f"is missing; give {needed:,}."
        )
    reporter.note("power", f"the ideal attack on {total:,} canaries would prove {planned.words(delta)}")

    def outcome(of: Shadows, name: str) -> AttackResult:
        # The theorem needs fair coins that the attacker cannot predict.
        coins_RM = np.random.default_rng().random((num_releases, of.num_canaries)) < 0.5
        scores_RM = np.empty(coins_RM.shape)
        with reporter.stage(name) as advance:
            for number, coins_M in enumerate(coins_RM):
                scores_RM[number] = of.play(coins_M)
                advance(number + 1, num_releases)
        if centred:
            # Remove what the other records add to a canary's score: its mean over releases, for which no coin is read.
            scores_RM = scores_RM - scores_RM.mean(axis=0)
        # Fixed before any score was seen: a number that is chosen by the scores would invalidate the bound.
        each = planned.guesses.num_guesses // 2
        scores_M, coins_M = scores_RM.ravel(), coins_RM.ravel()
        return AttackResult(
            guesses=guess(scores_M, coins_M, num_guessed_in=each, num_guessed_out=each),
            separation=separate(scores_M, coins_M) if of.is_gaussian else None,
        )

    return AuditedRelease(
        part=part,
        release=shadows.events[0].noun,
        attack=shadows.attack,
        events=tuple(event_json(event) for event in shadows.events),
        num_releases=num_releases,
        canaries_each=shadows.num_canaries,
        # Not always half: the control is planned by its epsilon, which is no smooth function of little integer noise.
        control_noise=min(
            less / noise
            for of_run, of_control in zip(shadows.events, control.events, strict=True)
            for noise, less in zip(_noises(of_run).values(), _noises(of_control).values(), strict=True)
        ),
        planned=planned,
        found=outcome(shadows, "audit"),
        control=outcome(control, "control"),
    )


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
    noise_share: float = 1.0,
    on_private: bool = False,
) -> Shadows:
    """Return an attack on shadow releases of a run: releases that its method draws for the audit, with ``noise_share``
    times the run's noise.

    ``events`` are the run's privacy events for the records that the releases read; ``part`` says which records these
    are, "private" or "test". AuditError if no attack is known for the method.
    """
    facts = context.require_data(run)
    loaded = None
    if on_private:
        require_data_by_name(run)
        loaded = load_for(run, config.data)
    weaker: list[Any] = []  # the same events with a share of their noise
    for event in events:
        if isinstance(event, LaplaceReleases):
            weaker.append(replace(event, epsilon=event.epsilon / noise_share))
        else:
            scales = {name: value * noise_share for name, value in _noises(event).items()}
            weaker.append(replace(event, **scales))
    if part == "test":
        return _metrics(run, facts, weaker[0], config, loaded)
    if isinstance(config, PrivateMethod) and noise_share != 1:
        # The same method, planned for what half the noise costs: nothing in the release path knows of an audit.
        epsilon = price(weaker, delta=config.target.delta, accounting=config.target.accounting).epsilon
        config = config.model_copy(update={"target": config.target.model_copy(update={"epsilon": epsilon})})
    match config:
        case RecordVotes():
            return _cells(run, facts, config, loaded)
        case WeightedVotes() | ResidualVotes() | AdaSsp():
            return _sums(run, facts, config, events, loaded)
        case GnmaxMethod() if len(events) == 1 and isinstance(events[0], ConfidentGnmaxQueries):
            return _votes(run, facts, config, events[0], noise_share=noise_share, on_private=on_private)
        case DpSgdFamily() if all(isinstance(event, PoissonGaussians | PoissonGaussianLaplaces) for event in events):
            return _models(facts, config, events, loaded)
        case Postprocessing() if config.dp_postprocessing.base == "sgd":
            return _counts(facts, config, loaded)
    raise AuditError(
        f"method: no attack on the releases of {config.method} is known; audit a run of record_votes, weighted_votes, "
        "residual_votes, ada_ssp, a method with teachers, DP-SGD, or dp_postprocessing with base=sgd."
    )


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


def _declared_size(config: Method) -> int:
    """Return the number of private records or persons that the data set's declaration (the YAML file that describes it)
    states; 1000 if it states none."""
    try:
        return entry_for(config.data).protected(config.data.options, config.data.unit)[0]
    except UserError:  # records that came from Python, or a declaration that is gone
        return _RECORDS_UNKNOWN


def _log_ratio(released: Numbers, added: Numbers, stddev: float) -> FloatArray:
    """Return the log-likelihood ratio of the numbers ``released``, with ``added`` in them against without, under
    Gaussian noise of standard deviation ``stddev``, summed over the first axis."""
    return ((released - added / 2) * added / stddev**2).sum(axis=0)


def _cells(run: RunDirectory, facts: DataRecord, config: RecordVotes, loaded: Dataset | None) -> Shadows:
    """Return an attack on the noisy tables of the method record_votes. Each cell of a table has one canary, a record
    that the attacker looks for in this cell. A cell belongs to a prototype (a centre of public records), a label and,
    if the method reads groups, a group."""
    kept = read_release(run.released)[0].arrays
    num_classes, num_rows = len(facts.label_names), len(facts.label_names)
    if config.reads_groups:
        num_rows *= len(facts.group_names)
    public_x = _varied(facts, min(len(kept["prototype_M"]), _MOST_POOL)) if loaded is None else loaded.public.x
    options: dict[str, Any] = {"num_others": _declared_size(config), "loaded": loaded, "is_embedded": False}
    nobody = _setting(facts, public_x, (public_x[:0], *np.zeros((2, 0), np.int64)), **options)

    without_canaries = nobody.with_canaries(np.zeros(0, np.bool_))
    # Found once: they depend on public records and a public seed only, so they are the same in every release.
    found = config.prototypes(without_canaries)

    # Without noise: what the attacker knows of the other records.
    exact = replace(_training(config, without_canaries), noisy_sum=lambda exact_RW, **_: exact_RW)
    known = config.measure(exact, found)
    prototypes, places = np.unique(known.arrays["prototype_M"], return_index=True)
    at_M, row_M = np.repeat(places, num_rows), np.tile(np.arange(num_rows), len(places))
    canaries = (public_x[torch.from_numpy(at_M)], row_M % num_classes, row_M // num_classes)
    setting = _setting(facts, public_x, canaries, **options)
    event: Any = known.events[0]
    added_1M = np.full((1, len(row_M)), 1.0 if isinstance(event, mechanism_events.VoteTables) else float(UNITS))

    def cells(released: Released) -> IntArray:
        arrays = released.arrays
        table_KR = arrays["votes_KC"] if "votes_KC" in arrays else np.hstack([*arrays["votes_GKC"]])
        return table_KR[np.repeat(prototypes, num_rows), row_M]

    def play(included_M: Coins) -> FloatArray:
        found_M = cells(config.measure(_training(config, setting.with_canaries(included_M)), found)) - cells(known)
        return _log_ratio(found_M[None], added_1M, event.noise_stddev_votes)

    attack = "likelihood ratio of the count in the canary's cell"
    return Shadows(attack=attack, events=known.events, num_canaries=len(row_M), play=play, is_gaussian=True)


def _sums(
    run: RunDirectory, facts: DataRecord, config: SumMethod, events: Sequence[Event], loaded: Dataset | None
) -> Shadows:
    """Return an attack on noisy sums of feature vectors, of their products and of residuals. For each coordinate of the
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
    number_M = np.arange(min(width, _MOST_EACH))
    loud_MD = _LOUD * EMBEDDED_NORM * torch.eye(width)[: len(number_M)]
    canaries = (loud_MD, number_M % len(facts.label_names), number_M % len(facts.group_names))
    setting = _setting(facts, public_x, canaries, num_others=_declared_size(config), loaded=loaded, is_embedded=True)
    whole = config.model_copy(update={"ray": RayConfig(num_actors=0)}) if hasattr(config, "ray") else config
    alone = replace(setting.dataset, private=setting.canaries)

    def play(included_M: Coins) -> FloatArray:
        released = whole.measure(_training(whole, setting.with_canaries(included_M)))
        score_M = np.zeros(len(included_M))
        for shown_RW, added_RW, stddev in _sums_and_gains(whole, released, alone):
            # Only this canary moves its own column, and all move the first one, which counts records.
            own = slice(1, 1 + len(included_M))
            score_M += _log_ratio(shown_RW[:, own], added_RW[:, own], stddev)
        return score_M

    attack = "likelihood ratio of all released numbers that the canary alone moves"
    none_M = np.zeros(len(number_M), np.bool_)
    drawn = whole.measure(_training(whole, setting.with_canaries(none_M))).events
    return Shadows(attack=attack, events=drawn, num_canaries=len(number_M), play=play, is_gaussian=True)


def _sums_and_gains(config: SumMethod, released: Released, canaries: Dataset) -> list[tuple[Numbers, Numbers, float]]:
    """Return for each noisy sum in ``released`` three things: its released values, what all ``canaries`` together add
    to it, and the standard deviation of its noise. A later sum is computed from the released values of earlier ones."""
    arrays, parts = released.arrays, list[tuple[Numbers, Numbers, float]]()
    if isinstance(config, AdaSsp):
        sums, moments, _ = (event.noise_stddev_votes for event in config.events())
        ballot = WeightedBallot.of(canaries, config.ada_ssp.embedding)
        records = RecordSums.of(ballot, canaries.private, BlockPool())
        exact_WW = records.total(votes_themselves, norm=UNITS**2)
        return [
            (arrays["sums_CW"], records.total(partial(indicators, num_classes=canaries.num_classes), norm=UNITS), sums),
            (np.triu(arrays["moments_WW"], 1), np.triu(exact_WW, 1), moments / math.sqrt(2)),
            (arrays["moments_WW"].diagonal()[None], exact_WW.diagonal()[None], moments),
        ]

    # Run the method again on the canaries alone. Each noisy sum that it asks for is replaced by the released one, so
    # that every later sum is computed from the released rule.
    def shown(exact_RW: IntArray, *, stddev: float, name: str, **_: Any) -> IntArray:
        match name.split():
            case ["moments"]:
                found = np.triu(arrays["moments_WW"], 1)
            case ["squares"]:
                found = arrays["moments_WW"].diagonal()[None].copy()
            case ["residuals", number, _]:
                found = arrays["residuals_RCW"][int(number.strip(","))]
            case _:
                found = (arrays["sums_CW"] if "sums_CW" in arrays else arrays["sums_GCW"]).reshape(exact_RW.shape)
        parts.append((found, exact_RW, stddev))
        return found

    config.measure(replace(_training(config, canaries), noisy_sum=shown))
    return parts


def _models(facts: DataRecord, config: DpSgdFamily, events: Sequence[Event], loaded: Dataset | None) -> Shadows:
    """Return an attack on published models of the DP-SGD family. Each canary (a record that the attacker looks for) has
    a feature of its own, which is 0 in every other record, so that the model's weight of this feature depends on the
    canary alone."""
    rates = {rate for event in events if (rate := getattr(event, "sampling_rate", 1.0)) < 1}
    # The rate of the run, with which the number of records was published; coins must not change it.
    size = config.dp_sgd.num_records or round(config.dp_sgd.batch_size / min(rates, default=1.0))
    config = config.model_copy(update={"dp_sgd": config.dp_sgd.model_copy(update={"num_records": size})})
    width = math.prod(facts.record_shape)
    number_M = np.random.default_rng(0).permutation(width)[:_MOST_EACH]
    loud_MD = torch.zeros(len(number_M), width)
    loud_MD[torch.arange(len(number_M)), torch.from_numpy(number_M)] = 255 if facts.kind == "image" else _LOUD
    canary_x = loud_MD.reshape(-1, *facts.record_shape)
    canary_x = canary_x.to(torch.uint8) if facts.kind == "image" else canary_x
    label_M = np.arange(len(number_M)) % len(facts.label_names)
    canaries = (canary_x, label_M, np.arange(len(number_M)) % len(facts.group_names))
    public_x = torch.zeros(_MOST_EACH, *facts.record_shape, dtype=canary_x.dtype) if loaded is None else loaded.public.x
    # Half of the canaries are included on average: a shadow release is as large as that of the run.
    setting = _setting(
        facts, public_x, canaries, num_others=max(0, size - len(number_M) // 2), loaded=loaded, is_embedded=False
    )
    replaced = getattr(events[0], "relation", "") == "replace one"

    def odds(model: torch.nn.Module) -> FloatArray:
        """Return the log odds that ``model`` gives to every canary's label."""
        with torch.no_grad():
            logits_MC = model.eval()(scale_bytes(canary_x)).double()
        own_M = logits_MC.gather(1, torch.from_numpy(label_M)[:, None])
        rest_MC = logits_MC.scatter(1, torch.from_numpy(label_M)[:, None], -math.inf)
        return (own_M[:, 0] - rest_MC.logsumexp(dim=1)).numpy()

    def play(included_M: Coins) -> FloatArray:
        dataset = setting.with_canaries(included_M)
        if replaced:  # by a record at the origin
            rest = setting.canaries.take(np.flatnonzero(np.repeat(~included_M, setting.copies)).tolist())
            dataset = replace(dataset, private=_joined(dataset.private, replace(rest, x=torch.zeros_like(rest.x))))
        # Subtract the odds under the initial model, whose weights a public seed draws.
        before = odds(initial_model(config, dataset))
        trained = config.train(_training(config, dataset, initial_model(config, dataset)))
        return odds(trained.model) - before

    whole = setting.with_canaries(np.ones(len(number_M), np.bool_))
    drawn = config.train(_training(config, whole, initial_model(config, whole))).events
    # Without sampling, a step is Gaussian itself.
    is_gaussian = not rates or sum(getattr(event, "count", 0) for event in events) >= _MANY
    attack = "how much the published model raised the odds of the canary's label"
    return Shadows(attack=attack, events=drawn, num_canaries=len(number_M), play=play, is_gaussian=is_gaussian)


def _votes(
    run: RunDirectory,
    facts: DataRecord,
    config: GnmaxMethod,
    stated: ConfidentGnmaxQueries,
    *,
    noise_share: float,
    on_private: bool,
) -> Shadows:
    """Return an attack on the noisy answers that teachers give to a run's queries.

    A canary is a record of one teacher. In every query it changes this teacher's vote from one of two classes to the
    other. The direction of the change is random for each query, and known to the attacker.
    """
    mechanism, target = config.mechanism, config.target
    if target.epsilon is not None:
        asked = config.aggregator.num_queries or stated.count
        mechanism = mechanism_within(
            mechanism, target_epsilon=target.epsilon, target_delta=target.delta, num_queries=asked
        )
    mechanism = mechanism.scaled(noise_share)
    num_voters, queries = config.num_voters, stated.count
    event: Any = mechanism_events.of_teachers(mechanism.worst_case(queries), stated.unit)
    # So few canaries that the votes of the others hide one no more than the noise does.
    num_canaries = max(1, min(_MOST_EACH, num_voters // 4, int(event.noise_stddev_votes**2 / 4)))
    generator = np.random.default_rng(0)
    groups = generator.integers(len(facts.group_names), size=queries).tolist()
    code_QM = generator.integers(2, size=(queries, num_canaries))
    sign_QM = 2 * code_QM - 1
    votes_QC = np.zeros((queries, len(facts.label_names)), np.int64)
    rest = num_voters - num_canaries
    # Two classes share the votes, as near to a tie as the check lets pass.
    votes_QC[:, 0] = max(-(-rest // 2), min(rest, event.threshold)) if math.isfinite(event.threshold) else -(-rest // 2)
    votes_QC[:, 1] = rest - votes_QC[:, 0]
    if on_private:
        # The run's own votes, without as many votes for the leading class as there are canaries.
        votes_QC = context.read_votes(run.votes).votes_QC.copy()
        queries, leader_Q = len(votes_QC), votes_QC.argmax(axis=1)
        led_Q = np.arange(queries), leader_Q
        votes_QC[led_Q] = np.maximum(votes_QC[led_Q] - num_canaries, 0)
    first_Q, second_Q = np.argsort(-votes_QC, axis=1, kind="stable")[:, :2].T
    keys, rows_Q = [str(number) for number in range(queries)], np.arange(queries)

    def play(included_M: Coins) -> FloatArray:
        # A teacher votes for one of two classes by its code, and with the canary's record for the other one.
        for_first_Q = (code_QM[:queries] ^ included_M).sum(axis=1)
        cast_QC = votes_QC.copy()
        cast_QC[rows_Q, first_Q] += for_first_Q
        cast_QC[rows_Q, second_Q] += num_canaries - for_first_Q
        gate = DemographicParityGate(config.gate, num_groups=len(facts.group_names), num_classes=len(facts.label_names))
        answers = mechanism.answer(cast_QC, groups=groups[:queries], keys=keys, gate=gate, source=OsEntropy())
        lead_Q = np.zeros(queries)
        for query, answer in enumerate(answers):
            first, second = int(first_Q[query]), int(second_Q[query])
            if answer.counts is not None:
                known = votes_QC[query, first] - votes_QC[query, second]
                lead_Q[query] = answer.counts[first] - answer.counts[second] - known
            elif answer.label is not None:
                lead_Q[query] = (answer.label == first) - float(answer.label == second)
        # With the canary's record, a teacher whose code is 1 votes for the second class.
        return -(lead_Q @ sign_QM[:queries])

    counted = config.queries.release == "counts"
    attack = f"the canary's code in the {'noisy counts' if counted else 'labels'} of all queries"
    is_gaussian = (counted and event.threshold == -math.inf) or queries >= _MANY
    return Shadows(attack=attack, events=(event,), num_canaries=num_canaries, play=play, is_gaussian=is_gaussian)


def _counts(facts: DataRecord, config: Postprocessing, loaded: Dataset | None) -> Shadows:
    """Return an attack on the noisy counts by group, label and prediction that the method dp_postprocessing releases.
    For every label and prediction there are canaries (records that the attacker looks for); a fair coin for each canary
    decides to which of two groups it belongs."""
    num_groups, num_classes = len(facts.group_names), len(facts.label_names)
    epsilon, pairs = config.target.epsilon, num_groups // 2
    pair_M, label_M, said_M = np.indices((pairs, num_classes, num_classes)).reshape(3, -1)
    first_M = 2 * pair_M
    # Large enough that no noisy count falls below 0, where it would be cut.
    crowd = 1000 + round(100 / epsilon)
    cells = np.indices((num_groups, num_classes, num_classes)).reshape(3, -1)
    groups_N, labels_N, saids_N = np.repeat(cells, crowd, axis=1)
    if loaded is not None:
        groups_N, labels_N = loaded.private.z.numpy(), loaded.private.y.numpy()
        saids_N = labels_N  # the predictions of a perfect model
    known_GYC = joint_table(saids_N, groups_N, num_groups=num_groups, num_classes=num_classes, labels_N=labels_N)

    def play(included_M: Coins) -> FloatArray:
        found_GYC = released_counts(
            np.concatenate([saids_N, said_M]),
            np.concatenate([labels_N, label_M]),
            np.concatenate([groups_N, first_M + included_M]),
            epsilon=epsilon,
            source=config.source,
            num_groups=num_groups,
            num_classes=num_classes,
        )
        without_M, with_M = (
            found_GYC[first_M + group, label_M, said_M] - known_GYC[first_M + group, label_M, said_M]
            for group in (0, 1)
        )
        # The log-likelihood ratio of Laplace noise, by the distances from the counts without and with the canary.
        ratio_M: FloatArray = np.abs(with_M) - np.abs(with_M - 1) + np.abs(without_M - 1) - np.abs(without_M)
        return ratio_M * epsilon / 2

    attack = "likelihood ratio of the two counts between which the canary's attribute decides"
    drawn = (LaplaceReleases(count=1, epsilon=epsilon),)
    return Shadows(attack=attack, events=drawn, num_canaries=len(first_M), play=play, is_pure=True)


def _metrics(
    run: RunDirectory, facts: DataRecord, event: PredictionTables, config: Method, loaded: Dataset | None
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

    def play(included_M: Coins) -> FloatArray:
        rows_N = np.repeat(included_M, copies)
        records = _joined(base, canaries.take(np.flatnonzero(rows_N).tolist()))
        if moved:
            records = _joined(records, moved_ones.take(np.flatnonzero(~rows_N).tolist()))
        table_BGYC = draw_table(student, records, event, OsEntropy(), **sizes).arrays["weights_BGYC"] / event.weight
        # The difference of two cells has the noise of both.
        found_M = table_BGYC[cells_M] - (table_BGYC[others_M] - 1 if moved else 0)
        added, stddev = (2.0, math.sqrt(2) * event.noise_stddev_records) if moved else (1.0, event.noise_stddev_records)
        return _log_ratio(found_M[None], np.full((1, len(found_M)), added), stddev)

    attack = "likelihood ratio of the number in the canary's cell"
    return Shadows(attack=attack, events=(event,), num_canaries=len(place_M), play=play, is_gaussian=True)
