"""Audit a run: canaries in shadow releases, and the lower bounds on epsilon that attacks prove.

A shadow release is drawn for the audit by the run's own method under its settings, from made-up records in the form of
the run's data. A canary is a record that the attacker looks for; a fair coin decides for each canary whether it is
included. No private record is read, so the result may be published. With ``on_private`` the other records are the
private ones, and the result must not be published. The attacker knows all made-up records and what every canary would
add, and reads what a run publishes. Guesses about the coins give lower bounds on epsilon
(:mod:`fairpate.privacy.audit_bounds`).

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
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fairpate.config import values_digest
from fairpate.data.dataset import Split
from fairpate.fairness.bounded_errors import confidences
from fairpate.methods.base import Audited, Method, all_methods
from fairpate.methods.shadows import (
    COPIES,
    LOUD,
    MOST_EACH,
    AuditError,
    both_kinds,
    gaussian_claim,
    joined,
    log_ratio,
    made_records,
    moments_of,
    own_noise_of,
    reach_of,
    varied,
)
from fairpate.privacy.audit_bounds import (
    Claimed,
    Coins,
    Drawn,
    IdealAttack,
    NoiseSeen,
    NoiseTest,
    Numbers,
    Seen,
    Shadows,
    gaussian_mu,
    grid_test,
    guess,
    noise_tests,
    separate,
)
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, OsEntropy
from fairpate.privacy.mechanism_events import PredictionTables, event_from, event_json
from fairpate.releases.directory import read_release, read_statement, require_data, require_data_by_name
from fairpate.report.run_page import AttackResult, Audit, AuditedRelease, SingleRelease
from fairpate.run.bounded_answers import AskedBound
from fairpate.run.bundle import alike
from fairpate.run.folder import finished_run, load_for
from fairpate.run.private_metrics import draw_table, lone_predictions, scores_of
from fairpate.run.publication import renew_report, write_audit
from fairpate.run.run import initial_model
from fairpate.terminal import Reporter, duration
from fairpate.types import FloatArray, IntArray, heard_by, strict
from student.student import load_student

MINUTES = 60.0  # default limit of an audit's run time
CANARIES = 20_000  # default number of coin flips of one audit, spread over as many releases as they need
QUICK_MINUTES, QUICK_CANARIES = 2.0, 2_000  # of `fairpate audit --quick`
_LONG_S = 60.0  # an audit that takes longer names the quick form
_MOST_CANARIES = 2**24
_LEAST_SPREAD = 1e-4  # of a squared gain: a release without noise must not make all others count for nothing
_EVENTS_ALIKE = 0.01  # relative; a repeated search for the noise may end at a slightly different float


def audit_size(canaries: int | None, minutes: float | None, *, quick: bool) -> tuple[int, float]:
    """Return the number of canaries and the longest time of an audit in minutes: those given, else the usual ones."""
    usual = (QUICK_CANARIES, QUICK_MINUTES) if quick else (CANARIES, MINUTES)
    return usual[0] if canaries is None else canaries, usual[1] if minutes is None else minutes


def audit_run(
    root: Path, *, reporter: Reporter, num_canaries: int = CANARIES, on_private: bool = False, minutes: float = MINUTES
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
    if on_private:
        require_data_by_name(run)
    facts, loaded = require_data(run), load_for(run, config.data) if on_private else None
    stated = {"private": statement.events, "test": statement.part_events.get("test", ())}
    parts = {part: tuple(map(event_from, events)) for part, events in stated.items() if events}
    releases = []
    for part, events in parts.items():
        audited = Audited(
            run=run, facts=facts, events=events, loaded=loaded, is_control=False, initial_model=initial_model
        )
        shadows, control = (_shadows(config, replace(audited, is_control=each), part) for each in (False, True))
        expected, drawn = ([event_json(event) for event in each] for each in (events, shadows.events))
        if not alike(expected, drawn, _EVENTS_ALIKE):
            raise AuditError(
                f"statement.json: states the privacy events {expected}, but the run's settings now give {drawn}; audit "
                "the run with the version of FairPATE that made it (see environment.json)."
            )
        options: dict[str, Any] = {"num_canaries": num_canaries, "minutes": minutes / len(parts), "centred": on_private}
        options |= {"epsilon": statement.epsilon, "delta": statement.delta}
        releases.append(attacked(shadows, control, part, reporter, **options))
    not_attacked = []
    if "validation" in statement.part_events:
        not_attacked.append("the choice of settings by validation records")
    if run.journal.exists():
        not_attacked.append(
            "the noise that each site adds by itself (here it is drawn in one place; each site attacks its own program "
            "with `fairpate site audit PLAN`)"
        )
    found = Audit(
        method=config.method,
        unit=statement.unit,
        relation=statement.relation,
        delta=statement.delta,
        epsilon=statement.epsilon,
        # As record.json holds them, without infinities.
        settings=values_digest(strict(config.settings_without())),
        records="private" if on_private else "made",
        not_attacked=tuple(not_attacked),
        releases=tuple(releases),
    )
    folder = run.private if on_private else run.public
    write_audit(found, folder / run.audit.name, folder / run.audit_page.name, private=on_private)
    renew_report(run)  # it says whether an audit was run
    return found, folder / run.audit_page.name


def attacked(
    shadows: Shadows,
    control: Shadows,
    part: str,
    reporter: Reporter,
    *,
    epsilon: float,
    delta: float,
    num_canaries: int,
    minutes: float,
    centred: bool,
) -> AuditedRelease:
    """Attack shadow releases with the run's noise (``shadows``) and, as a control, releases with half of it
    (``control``); return how many guesses are right in each.

    The attack guesses for canaries (records that it looks for) whether a release includes them; how many it guesses is
    planned beforehand. ``epsilon`` and ``delta``: the privacy claim. ``part``: the records that the releases read,
    "private" or "test". ``centred``: subtract from each canary's score its mean over releases. AuditError if
    ``num_canaries`` are too few to detect that half the noise is missing.
    """
    mu = None if shadows.is_pure else gaussian_mu(epsilon, delta)
    ideal = IdealAttack(epsilon=epsilon, mu=mu)
    # Half the noise doubles the shift of a Gaussian, and the epsilon of a Laplace variable.
    of_control = IdealAttack(epsilon=2 * epsilon, mu=None if mu is None else 2 * mu)
    num_releases = -(-num_canaries // shadows.num_canaries)
    _require_enough(of_control, epsilon, delta, num_releases * shadows.num_canaries, is_gaussian=shadows.is_gaussian)
    # One release that nobody looks at, and one of the control, to say how long all take.
    started = time.perf_counter()
    of_nobody = [of.play(np.zeros(of.num_canaries, np.bool_)) for of in (shadows, control)][:1]
    each_s = time.perf_counter() - started
    # Of the same records once more: their noise must be another.
    of_nobody.append(shadows.play(np.zeros(shadows.num_canaries, np.bool_)))
    num_releases = _number_in_time(num_releases, each_s, minutes, reporter, is_default=num_canaries == CANARIES)
    planned = _at_best(ideal, num_releases * shadows.num_canaries, delta, is_gaussian=shadows.is_gaussian)
    words = f"the ideal attack on {num_releases * shadows.num_canaries:,} canaries would prove {planned.words(delta)}"
    reporter.note("power", words)
    options: dict[str, Any] = {"num_releases": num_releases, "centred": centred, "reporter": reporter}
    played, of_half = _Played.drawn(shadows, "audit", **options), _Played.drawn(control, "control", **options)
    is_joint_S = [release.is_joint for release in shadows.releases if release.is_attacked]
    found, as_control = (
        _outcome(each.joint_N(is_joint_S), each.coins_RM.ravel(), planned) for each in (played, of_half)
    )
    return AuditedRelease(
        part=part,
        release=shadows.events[0].noun,
        attack=shadows.attack,
        events=tuple(event_json(event) for event in shadows.events),
        num_releases=num_releases,
        canaries_each=shadows.num_canaries,
        control_noise=control.control_noise,
        planned=planned,
        found=found,
        control=as_control,
        singles=_singles(shadows, control, played, of_half, of_nobody, delta),
        unseen=shadows.unseen,
    )


def _at_best(attack: IdealAttack, count: int, delta: float, *, is_gaussian: bool) -> AttackResult:
    """Return the median result of this attack on ``count`` canaries."""
    return AttackResult(
        guesses=attack.guesses(num_canaries=count, delta=delta),
        separation=attack.separation(num_canaries=count) if is_gaussian else None,
    )


def _require_enough(of_control: IdealAttack, epsilon: float, delta: float, total: int, *, is_gaussian: bool) -> None:
    """Raise AuditError if even the ideal attack on the control proves no more than ``epsilon`` with ``total``
    canaries; the message names a number that suffices."""
    needed = total
    while max(_at_best(of_control, needed, delta, is_gaussian=is_gaussian).bounds(delta)) <= epsilon:
        if needed >= _MOST_CANARIES:
            break
        needed *= 2
    if needed > total:
        raise AuditError(
            f"--canaries: {total:,} canaries are too few, as even an ideal attack would not detect that half the noise "
            f"is missing; give {needed:,}."
        )


def _number_in_time(num_releases: int, each_s: float, minutes: float, reporter: Reporter, *, is_default: bool) -> int:
    """Return how many releases are drawn in ``minutes``, at most ``num_releases``, if one and its control take
    ``each_s``; report the time. ``is_default``: the number of canaries is the default one, so that a quick audit is
    named where it helps."""
    fitting = max(2, int(60 * minutes / max(each_s, 1e-9)))
    if fitting < num_releases:
        reporter.note(
            "time",
            f"{num_releases:,} releases and as many controls would take {duration(num_releases * each_s)}; "
            f"{fitting:,} are drawn, in {minutes:g} min: give --minutes for more",
        )
        return fitting
    shorter = "; --quick draws a tenth" if num_releases * each_s > _LONG_S and is_default else ""
    words = f"{num_releases:,} releases and as many controls: about {duration(num_releases * each_s)}{shorter}"
    reporter.note("time", words)
    return num_releases


def _outcome(scores_N: FloatArray, coins_N: Coins, plan: AttackResult) -> AttackResult:
    """Return how many of the guesses that ``plan`` fixes are right, and if it has a separation, how far the scores are
    apart; canaries without a score are left out."""
    kept_N = ~np.isnan(scores_N)
    scores_N, coins_N = scores_N[kept_N], coins_N[kept_N]
    # Fixed before any score was seen: a number that is chosen by the scores would invalidate the bound.
    each = plan.guesses.num_guesses // 2
    return AttackResult(
        guesses=guess(scores_N, coins_N, num_guessed_in=each, num_guessed_out=each),
        separation=None if plan.separation is None else separate(scores_N, coins_N),
    )


def _singles(
    shadows: Shadows, control: Shadows, played: "_Played", of_half: "_Played", of_nobody: Sequence[Seen], delta: float
) -> tuple[SingleRelease, ...]:
    """Return what was found of each release by itself: in the audit (``played``), its control (``of_half``) and draws
    that nobody guessed in (``of_nobody``)."""
    tests, more = _tests_of([*of_nobody, *played.seen]), shadows.more()
    found, row = list[SingleRelease](), 0
    for number, release in enumerate(shadows.releases):
        of_all = more.get(release.name, ())
        single = SingleRelease(
            name=release.name,
            claim=release.claim,
            noise=(*played.noise[number], *(each for each in of_all if isinstance(each, NoiseSeen))),
            tests=(*tests[number], *(each for each in of_all if isinstance(each, NoiseTest))),
            reach=release.reach,
        )
        if release.is_attacked:
            results = []
            for each in (played, of_half):
                scores_RM = each.scores_RSM[:, row]
                num_scores = int((~np.isnan(scores_RM)).sum())
                is_gaussian = shadows.is_gaussian or not release.is_joint
                plan = _at_best(release.claim, num_scores, delta, is_gaussian=is_gaussian)
                results.append(_outcome(scores_RM.ravel(), each.coins_RM.ravel(), plan))
            # What the code under test shows of a gain counts up to what is claimed: a fault must not raise the power.
            planned_mu = None if release.claim.mu is None else min(float(played.gains_S[row]), release.claim.mu)
            attack, claimed = replace(release.claim, mu=planned_mu), control.releases[number].claim
            single = replace(single, attack=attack, found=results[0], control=results[1], control_claim=claimed)
            row += 1
        found.append(single)
    return tuple(found)


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
    """Shadow releases that were drawn: the coins of their canaries and what the attacker sees of each."""

    coins_RM: Coins
    scores_RSM: FloatArray
    gains_S: FloatArray
    noise: tuple[tuple[NoiseSeen, ...], ...]
    seen: list[Seen]

    @classmethod
    def drawn(cls, of: Shadows, name: str, *, num_releases: int, centred: bool, reporter: Reporter) -> Self:
        """Draw releases, with a fair coin for each canary, and return what is seen of them. ``name``: the stage that
        the reporter shows; ``centred``: subtract from each canary's score its mean over releases."""
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
        return cls(coins_RM=coins_RM, scores_RSM=scores_RSM, gains_S=gains_S, noise=noise, seen=seen)

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


def _shadows(config: Method, audited: Audited, part: str) -> Shadows:
    """Return attacks on shadow releases of a run, which its method draws for the audit; ``part`` says which records
    these read, "private" or "test". AuditError if no attack is known for the method."""
    shadows = _metrics(config, audited) if part == "test" else config.attack(audited)
    if shadows is None:
        known = [name for name, method in all_methods().items() if method.attack is not Method.attack]
        raise AuditError(
            f"method: no attack on the releases of {config.method} is known; audit a run of {', '.join(known)}."
        )
    return shadows


def _metrics(config: Method, audited: Audited) -> Shadows:
    """Return an attack on the noisy tables of test records from which private metrics, and the thresholds of a model
    that may refuse, are computed. Every combination of group, true label and prediction that the model makes has a
    canary, a record that the attacker looks for."""
    run, facts, event, is_control = audited.run, audited.facts, audited.events[0], audited.is_control
    assert isinstance(event, PredictionTables)
    # Made-up records have the form of the run's: embedded already, if an embedding belongs to the data set.
    student, edges = replace(load_student(run.student), embedding=None), config.evaluation.score_edges
    bound, asked = config.student.reject, None
    if bound is not None and run.metrics_table.exists():
        asked = AskedBound.read(read_release(run.metrics_table)[0].arrays, student.card, bound)
    tried_x = varied(facts, MOST_EACH, scale=LOUD)
    if asked is not None:  # some of them less loud: of other confidences
        tried_x = torch.cat([tried_x, varied(facts, MOST_EACH), varied(facts, MOST_EACH, scale=1 / LOUD)])
    tried = made_records(tried_x, *np.zeros((2, len(tried_x)), np.int64), name="tried")
    said_N, chances_NC = lone_predictions(student, tried, OsEntropy())
    bin_N = np.searchsorted(edges, scores_of(chances_NC, said_N), side="right")
    apart_N = np.zeros(len(tried_x), np.int64) if asked is None else asked.bins.numbers(confidences(chances_NC))
    places = _one_of_each(np.stack([bin_N, said_N]), apart_N)
    num_groups, num_classes = len(facts.group_names), len(facts.label_names)
    # One canary for each cell. If neighbours replace a unit, two cells share a canary that moves between them.
    place_M, group_M, label_M = np.indices((len(places), num_groups, num_classes)).reshape(3, -1)
    place_M = places[place_M]
    moved = {"sensitive attribute": "group"}.get(event.unit, "label") if event.relation == "replace one" else ""
    if moved:
        kept_M = (group_M if moved == "group" else label_M) == 0
        place_M, group_M, label_M = place_M[kept_M], group_M[kept_M], label_M[kept_M]
    copies, num_canaries = COPIES if event.unit == "person" else 1, len(place_M)
    x = tried_x[torch.from_numpy(place_M)]
    canaries = made_records(x, label_M, group_M, name="canary", unit=event.unit, copies=copies)
    labels_M, groups_M = label_M + (moved == "label"), group_M + (moved == "group")
    moved_ones = made_records(x, labels_M, groups_M, name="canary", unit=event.unit, copies=copies)
    base = audited.loaded.test if audited.loaded is not None else canaries.take(range(0))
    sizes: dict[str, Any] = {"num_groups": num_groups, "num_classes": num_classes, "edges": edges, "asked": asked}
    tables = {"table of predictions": "weights_BGYC"} | (
        {} if asked is None else {"table by confidence": "weights_SK2"}
    )
    claimed = event.noise_stddev_records * (0.5 if is_control else 1.0)
    spread, kurtosis = moments_of(event.noise_stddev_weights)

    def own_noise(exact_RW: IntArray, **_: Any) -> IntArray:
        return exact_RW + own_noise_of(exact_RW.shape, claimed * event.weight)

    def drawn(records: Split, **how: Any) -> dict[str, Numbers]:
        shown = draw_table(student, records, event, OsEntropy(), **sizes, **how)
        return {name: shown.arrays[of].ravel() for name, of in tables.items()}

    def exact_of(records: Split) -> dict[str, Numbers]:
        return drawn(records, noisy_sum=lambda exact_RW, **_: exact_RW)

    def each_alone(records: Split) -> dict[str, Numbers]:
        """What each canary adds to the cells of each table (cells, M) if it is the only record."""
        alone = [exact_of(records.take(range(row * copies, (row + 1) * copies))) for row in range(num_canaries)]
        return {name: np.stack([each[name] for each in alone], axis=1) for name in tables}

    known = exact_of(base)
    with_it = each_alone(canaries)
    without = each_alone(moved_ones) if moved else {name: 0 * each for name, each in with_it.items()}
    added, alone = {}, {}
    for name in tables:
        touched = with_it[name] + without[name] > 0
        # A cell that several canaries share tells nothing of one.
        alone[name] = ~(touched & (touched.sum(axis=1, keepdims=True) > 1)).any(axis=0)
        added[name] = (with_it[name] - without[name]) * alone[name] / event.weight

    def play(included_M: Coins) -> Seen:
        rows_N = np.repeat(included_M, copies)
        records = joined(base, canaries.take(np.flatnonzero(rows_N).tolist()))
        if moved:
            records = joined(records, moved_ones.take(np.flatnonzero(~rows_N).tolist()))
        shown = drawn(records, **({"noisy_sum": own_noise} if is_control else {}))
        scores, gains, noise, draws = [], [], [], []
        for name in tables:
            found = shown[name] - known[name]
            moved_by = (found[:, None] - without[name]) / event.weight
            score_M, gain_M = log_ratio(moved_by, added[name], claimed)
            if alone[name].any():
                scores.append(score_M)
                gains.append(np.where(gain_M > 0, gain_M, np.nan))
            certain = with_it[name] @ included_M + without[name] @ ~included_M
            noise.append(both_kinds(found - certain, certain > 0, spread, kurtosis=kurtosis))
            draws.append(Drawn.of(found - certain, event.noise_stddev_weights))
        return Seen(scores_SM=np.stack(scores), gains_SM=np.stack(gains), noise=tuple(noise), draws=tuple(draws))

    # Where records are replaced, each adds as much as it takes away.
    own_x = tried_x[torch.from_numpy(places)]
    reach = reach_of(facts, own_x, exact_of)
    claim = gaussian_claim(event.as_sums.norm / event.weight, claimed, config.target.delta)
    return Shadows(
        attack="likelihood ratio of the numbers in the canary's cells",
        events=(event,),
        num_canaries=num_canaries,
        releases=tuple(
            Claimed(name=name, claim=claim, is_attacked=bool(alone[name].any()), reach=reach[name] / event.weight)
            for name in tables
        ),
        play=play,
        is_gaussian=True,
        control_noise=0.5 if is_control else 1.0,
        unseen=() if bound is None or asked is not None else ("the table by confidence, which is released with it",),
    )


def _one_of_each(kind_KN: IntArray, apart_N: IntArray) -> IntArray:
    """Return a row of each kind; of its rows, one whose number in ``apart_N`` no row before has, if there is one."""
    _, kind_N = np.unique(kind_KN, axis=1, return_inverse=True)
    chosen: list[int] = []
    for kind in range(int(kind_N.max()) + 1):
        rows = np.flatnonzero(kind_N == kind)
        free = rows[~np.isin(apart_N[rows], apart_N[chosen])]
        chosen.append(int((free if len(free) else rows)[0]))
    return np.array(chosen)
