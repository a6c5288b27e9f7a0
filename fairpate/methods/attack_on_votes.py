"""An attack on the noisy answers of voters: on noisy counts or labels, on threshold checks, and on the table of private
labels by score.

A canary changes its teacher's vote by a random code over the queries. The score is the correlation of this code with
the answers, or with which queries passed the check. With small teachers it has a cell of the table as well.

Shapes: M canaries, Q queries, C classes, K bins of scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import scipy
import torch

from aggregator.session import mechanism_within
from fairpate.config import EmbeddingConfig
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.data.registry import embedded
from fairpate.fairness.gate import DemographicParityGate
from fairpate.methods.base import Audited
from fairpate.methods.noisy_counts import NoisyCounts, ThresholdsConfig
from fairpate.methods.shadows import (
    MANY,
    MOST_EACH,
    OTHERS,
    Found,
    ShadowData,
    both_kinds,
    gaussian_claim,
    labels_and_groups,
    moments_of,
    own_noise_of,
    reach_of,
    seen_of,
    setting_of,
    squares_seen,
    training_of,
)
from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.privacy.audit_bounds import (
    LESS_NOISE,
    Claimed,
    Coins,
    Drawn,
    NoiseSeen,
    Numbers,
    Seen,
    Shadows,
    answer_scores,
    normal_scores,
)
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.mechanism_events import VoteSums, VoteTables, of_teachers
from fairpate.releases.directory import DataRecord, read_votes
from fairpate.types import FloatArray, GateRule, IntArray

_SURE = 0.02  # a probability of the rarer answer; surer ones do not show their noise


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

    def seen(self, included_M: Coins, counts: NoisyCounts, shown_KC: IntArray) -> Found:
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
        spread, kurtosis = moments_of(float(self.event.noise_stddev_votes))
        # Every cell: noise may be missing on empty ones alone.
        noise = both_kinds(shown_KC - exact_KC, exact_KC > 0, spread, kurtosis=kurtosis)
        drawn = Drawn.of(shown_KC - np.rint(exact_KC).astype(np.int64), self.stddev)
        return Found(found_M / stddev / scale_M, 1 / stddev / scale_M, noise, drawn)

    def claimed(self, facts: DataRecord, counts: NoisyCounts, delta: float) -> Claimed:
        """Return what is claimed of the table alone, with what one canary adds to it without noise."""

        def exact(records: Split) -> dict[str, IntArray]:
            dataset = replace(self.setting.dataset, private=records)
            return {"table": counts.table(dataset, self.event, self.config, lambda exact_KC, **_: exact_KC)}

        reach = reach_of(facts, self.setting.canaries.x, exact)["table"] / self.unit
        return Claimed(name="table by score", claim=gaussian_claim(self.unit, self.stddev, delta), reach=reach)


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """What is stated of the answers, with the control's ``share`` of the noise. ``mechanism`` answers query by query;
    None: all answers are one table."""

    stated: Any
    beside: tuple[Any, ...]
    share: float
    mechanism: Any | None
    num_voters: int
    num_queries: int
    releases_counts: bool

    @classmethod
    def of(cls, config: Any, audited: Audited) -> Self:
        events: Sequence[Any] = audited.events
        (stated, *beside), target = events, config.target
        share = 0.5 if audited.is_control else 1.0
        given: dict[str, Any] = {"stated": stated, "beside": tuple(beside), "share": share}
        if isinstance(stated, VoteSums):
            voters, queries = config.teachers.num_teachers, round(stated.norm**2 / 2)
            return cls(mechanism=None, num_voters=voters, num_queries=queries, releases_counts=True, **given)
        mechanism = config.mechanism
        if target.epsilon is not None:
            mechanism = mechanism_within(
                mechanism,
                target_epsilon=target.epsilon,
                target_delta=target.delta,
                num_queries=config.planned_queries(range(stated.count)),
                beside=tuple(beside),
            )
        return cls(
            mechanism=mechanism.scaled(share),
            num_voters=config.num_voters,
            num_queries=stated.count,
            releases_counts=config.queries.release == "counts",
            **given,
        )

    # Noise is compared with what the statement claims, not with what the mechanism says of itself.
    @property
    def label_noise(self) -> float:
        """The standard deviation of the noise on a count, in votes."""
        return self.share * float(self.stated.noise_stddev_votes)

    @property
    def check_noise(self) -> float:
        """The standard deviation of the noise of a threshold check, in votes; infinite without one."""
        return math.inf if self.mechanism is None else self.share * float(self.stated.threshold_stddev_votes)

    @property
    def threshold(self) -> float:
        return -math.inf if self.mechanism is None else float(self.stated.threshold)

    @property
    def has_check(self) -> bool:
        return math.isfinite(self.threshold)

    def num_canaries(self, thresholds: ThresholdsConfig | None, num_classes: int) -> int:
        """Return so small a number that the votes of the other canaries, and those that share a cell of the table by
        score, hide a canary no more than the noise does."""
        most = [MOST_EACH, self.num_voters // 4, int(self.stated.noise_stddev_votes**2 / 4)]
        if self.has_check:
            most.append(int(self.stated.threshold_stddev_votes**2 / 4))
        found = max(1, min(most))
        if thresholds is not None:
            event = self.beside[0]
            in_cell = max(1, int((event.noise_stddev_votes / getattr(event, "norm", 1)) ** 2 / 4))
            found = min(found, in_cell * thresholds.num_bins * num_classes)
        return found


@dataclass(frozen=True, kw_only=True)
class _Votes:
    """The votes of the other voters (Q, C), and the two classes of each query between which canaries choose, by a code
    of 0 and 1 of their own."""

    votes_QC: IntArray
    first_Q: IntArray
    second_Q: IntArray
    code_QM: IntArray

    @classmethod
    def made(cls, terms: _Terms, num_canaries: int, num_classes: int, generator: np.random.Generator) -> Self:
        """Return made-up votes, which hide a canary least: ties, or numbers at the threshold."""
        queries, rest = terms.num_queries, terms.num_voters - num_canaries
        code_QM = generator.integers(2, size=(queries, num_canaries))
        # Any two classes: a label shows the noise of no others.
        first_Q = generator.integers(num_classes, size=queries)
        second_Q = (first_Q + generator.integers(1, num_classes, size=queries)) % num_classes
        half, rows_Q = -(-rest // 2), np.arange(queries)
        of_first_Q, of_second_Q = np.full(queries, half), np.full(queries, half)
        if terms.has_check:
            of_threshold = min(rest, max(0, round(terms.threshold) - num_canaries // 2))
            # The others pass as surely as a vote may, by made-up teachers: more than the run has, if it takes them.
            half = max(half, of_threshold + round(3 * terms.check_noise / terms.share))
            at_check_Q, is_tied_Q = rows_Q % 2 == 1, rows_Q % 8 == 0
            of_first_Q = np.where(at_check_Q | is_tied_Q, of_threshold, half)
            # No canary's vote may change which class has the most.
            behind = min(rest - of_threshold, max(0, of_threshold - num_canaries))
            of_second_Q = np.where(at_check_Q, behind, of_first_Q)
            # In one order, so that the queries show together whose noise the check has.
            pair_2Q = np.stack([first_Q, second_Q])
            first_Q, second_Q = np.where(is_tied_Q, np.sort(pair_2Q, axis=0), pair_2Q)
        votes_QC = np.zeros((queries, num_classes), np.int64)
        votes_QC[rows_Q, first_Q], votes_QC[rows_Q, second_Q] = of_first_Q, of_second_Q
        return cls(votes_QC=votes_QC, first_Q=first_Q, second_Q=second_Q, code_QM=code_QM)

    def around(self, votes_QC: IntArray) -> Self:
        """Return the votes of a run in the place of made-up ones, without as many for the leading class as there are
        canaries, who choose between the first two."""
        votes_QC, rows_Q = votes_QC.copy(), np.arange(len(votes_QC))
        led_Q = rows_Q, votes_QC.argmax(axis=1)
        votes_QC[led_Q] = np.maximum(votes_QC[led_Q] - self.num_canaries, 0)
        first_Q, second_Q = np.argsort(-votes_QC, axis=1, kind="stable")[:, :2].T
        code_QM = self.code_QM[: len(votes_QC)]
        return replace(self, votes_QC=votes_QC, first_Q=first_Q, second_Q=second_Q, code_QM=code_QM)

    @property
    def num_queries(self) -> int:
        return len(self.votes_QC)

    @property
    def num_canaries(self) -> int:
        return int(self.code_QM.shape[1])

    def cast(self, included_M: Coins) -> IntArray:
        """Return all votes: a teacher votes for one of two classes by its code, and with the canary's record for the
        other one."""
        for_first_Q, rows_Q = (self.code_QM ^ included_M).sum(axis=1), np.arange(self.num_queries)
        cast_QC = self.votes_QC.copy()
        cast_QC[rows_Q, self.first_Q] += for_first_Q
        cast_QC[rows_Q, self.second_Q] += self.num_canaries - for_first_Q
        return cast_QC

    def lead(self, counts_QC: Numbers) -> Numbers:
        """Return by how much the first class is ahead of the second one (Q,)."""
        rows_Q = np.arange(self.num_queries)
        lead_Q: Numbers = counts_QC[rows_Q, self.first_Q] - counts_QC[rows_Q, self.second_Q]
        return lead_Q

    def coded(self, answer_Q: FloatArray) -> FloatArray:
        """Return the correlation of answers with every canary's code, in standard deviations if there were no canary.
        With the canary's record, a teacher whose code is 1 votes for the second class."""
        length = math.sqrt(float((answer_Q**2).sum()))
        score_M: FloatArray = (-answer_Q @ (2 * self.code_QM - 1)) / (length or 1.0)
        return score_M


@dataclass(frozen=True, kw_only=True)
class _Released:
    """The answers to all queries: labels (-1 where there is none), counts if they are released, the answers as the rule
    of small teachers reads them, and the table by score."""

    said_Q: IntArray
    numbers_QC: Numbers | None
    counts: NoisyCounts
    table_KC: IntArray | None


@dataclass(frozen=True, kw_only=True)
class _AttackOnVotes:
    """The attack on answers to ``votes``: the method ``config`` answers, and is compared with its ``terms``. It has a
    ``setting`` where records are read beside votes, and a ``table`` where they are released by score."""

    config: Any
    terms: _Terms
    votes: _Votes
    groups: Sequence[int]
    num_groups: int
    ids: Sequence[str]
    setting: ShadowData | None
    table: _TableByScore | None
    event: Any
    is_control: bool

    def play(self, included_M: Coins) -> Seen:
        cast_QC = self.votes.cast(included_M)
        shown = self.answered(cast_QC, included_M)
        passed_Q = shown.said_Q >= 0
        if shown.numbers_QC is not None:
            found = [self._of_counts(cast_QC, shown.numbers_QC, passed_Q)]
        else:
            found = [self._of_labels(cast_QC, shown.said_Q)]
        if self.terms.has_check:
            found.append(self._of_checks(cast_QC, passed_Q))
        if self.table is not None and shown.table_KC is not None:
            found.append(self.table.seen(included_M, shown.counts, shown.table_KC))
        return seen_of(found)

    def answered(self, cast_QC: IntArray, included_M: Coins) -> _Released:
        """Return the method's answers to these votes; of a control, with noise that the audit draws itself where the
        method lets it."""
        dataset = None if self.setting is None else self.setting.with_canaries(included_M)
        noisy_sum = self._own_noise if self.is_control else None
        if self.terms.mechanism is None:
            assert dataset is not None
            arrays = self.config.noisy(training_of(self.config, dataset, noisy_sum=noisy_sum), cast_QC).arrays
            counts = self.config.noisy_counts(self.config.queries(dataset), arrays["counts_QC"], self.event)
            said_Q, numbers_QC = arrays["counts_QC"].argmax(axis=1), arrays["counts_QC"]
            return _Released(said_Q=said_Q, numbers_QC=numbers_QC, counts=counts, table_KC=arrays.get("table_KC"))
        # A gate only hides answers that are charged all the same.
        rule = GateRule(max_disparity=math.inf, min_count=1)
        gate = DemographicParityGate(rule, num_groups=self.num_groups, num_classes=cast_QC.shape[1])
        keys = [str(number) for number in range(len(cast_QC))]
        answers = self.terms.mechanism.answer(cast_QC, groups=self.groups, keys=keys, gate=gate, source=OsEntropy())
        said_Q = np.array([-1 if answer.label is None else answer.label for answer in answers])
        numbers_QC, table_KC = None, None
        if self.terms.releases_counts:
            numbers_QC = np.array([(0,) * cast_QC.shape[1] if each.counts is None else each.counts for each in answers])
            counts = self.counted(numbers_QC, said_Q >= 0)
        else:
            counts = NoisyCounts.of_labels(said_Q[said_Q >= 0], self._named(said_Q >= 0), num_classes=cast_QC.shape[1])
        if dataset is not None and self.table is not None:
            table_KC = self.config.table_by_score(dataset, counts, noisy_sum)
        return _Released(said_Q=said_Q, numbers_QC=numbers_QC, counts=counts, table_KC=table_KC)

    def counted(self, counts_QC: IntArray, passed_Q: Coins) -> NoisyCounts:
        """Return the counts of the queries that passed, as the rule of small teachers reads them."""
        return NoisyCounts(
            counts_QC=counts_QC[passed_Q],
            record_ids=self._named(passed_Q),
            num_voters=self.terms.num_voters,
            noise_stddev_votes=self.terms.label_noise,
        )

    def _named(self, passed_Q: Coins) -> list[str]:
        return [self.ids[row] for row in np.flatnonzero(passed_Q).tolist()]

    def _own_noise(self, exact_RW: IntArray, *, name: str, **_: Any) -> IntArray:
        stddev = self.table.stddev if self.table is not None and name == "bin" else self.terms.label_noise
        return exact_RW + own_noise_of(exact_RW.shape, stddev)

    @property
    def _crowd(self) -> float:
        """The variance of the votes of the other canaries, whose coins the attacker does not know."""
        return self.votes.num_canaries / 4

    def _gains(self, shift: float, passed_Q: Coins) -> FloatArray:
        return np.full(self.votes.num_canaries, shift * math.sqrt(max(int(passed_Q.sum()), 1)))

    def _of_counts(self, cast_QC: IntArray, numbers_QC: Numbers, passed_Q: Coins) -> Found:
        """Return what noisy counts show: the noise itself, and a canary's code in the lead of the first class."""
        votes, label_noise = self.votes, self.terms.label_noise
        known_Q = votes.lead(votes.votes_QC).astype(np.float64)
        lead_Q = np.where(passed_Q, votes.lead(numbers_QC) - known_Q, 0.0)
        noise_QC = (numbers_QC - cast_QC)[passed_Q].astype(np.int64)
        scores_QC = np.full(numbers_QC.shape, np.nan)
        scores_QC[passed_Q] = normal_scores(noise_QC, label_noise)
        return Found(
            score_M=votes.coded(lead_Q),
            gain_M=self._gains(1 / math.sqrt(2 * label_noise**2 + 4 * self._crowd) * 2, passed_Q),
            noise=(squares_seen(noise_QC, label_noise),),
            drawn=Drawn(scores_RP=scores_QC.reshape(1, -1), divisor=int(np.gcd.reduce(noise_QC, axis=None))),
        )

    def _of_labels(self, cast_QC: IntArray, said_Q: IntArray) -> Found:
        """Return what labels show: how often they differ from the exact ones, and a canary's code in them."""
        votes, label_noise, passed_Q = self.votes, self.terms.label_noise, said_Q >= 0
        exact_Q, known_Q = (votes.lead(each).astype(np.float64) for each in (cast_QC, votes.votes_QC))
        is_first_Q, is_second_Q = said_Q == votes.first_Q, said_Q == votes.second_Q
        among_Q = passed_Q & (is_first_Q | is_second_Q) & (exact_Q != 0)
        is_other_Q = np.where(exact_Q > 0, is_second_Q, is_first_Q)
        chance_Q, less_Q = (
            scipy.special.ndtr(-np.abs(exact_Q) / (math.sqrt(2) * label_noise * of)) for of in (1.0, LESS_NOISE)
        )
        scores_Q = answer_scores(is_first_Q, np.where(exact_Q > 0, 1 - chance_Q, chance_Q))
        # The slope of the chance to say the first class, over the spread of the answer.
        spread, crowd = math.sqrt(2) * label_noise, self._crowd
        slope_Q = 2 * scipy.stats.norm.pdf(known_Q / math.hypot(spread, 2 * math.sqrt(crowd)))
        shift = float(slope_Q[passed_Q].mean() if passed_Q.any() else 0.0) * 2 / math.hypot(spread, 2 * crowd**0.5)
        return Found(
            score_M=votes.coded(np.where(passed_Q, is_first_Q - is_second_Q.astype(float), 0.0)),
            gain_M=self._gains(shift, passed_Q),
            noise=(NoiseSeen.of_answers(is_other_Q[among_Q], chance_Q[among_Q], less_Q[among_Q]),),
            drawn=Drawn(scores_RP=np.where(among_Q & (chance_Q > _SURE), scores_Q, np.nan)[None]),
        )

    def _of_checks(self, cast_QC: IntArray, passed_Q: Coins) -> Found:
        """Return what is seen of threshold checks: how often they differ from exact ones, and a canary's code in which
        queries passed."""
        votes, check_noise, crowd = self.votes, self.terms.check_noise, self._crowd
        ahead_Q = cast_QC.max(axis=1) - self.terms.threshold
        chance_Q, less_Q = (scipy.special.ndtr((ahead_Q + 0.5) / (check_noise * of)) for of in (1.0, LESS_NOISE))
        near_Q = (ahead_Q != 0) & (ahead_Q + 0.5 != 0)
        is_above_Q = ahead_Q >= 0
        against = [np.where(is_above_Q, 1 - each, each)[near_Q] for each in (chance_Q, less_Q)]
        is_open_Q = np.minimum(chance_Q, 1 - chance_Q) > _SURE
        drawn = Drawn(scores_RP=np.where(is_open_Q, answer_scores(passed_Q, chance_Q), np.nan)[None])
        of_known_Q = (
            votes.votes_QC[np.arange(votes.num_queries), votes.first_Q]
            + votes.num_canaries / 2
            - self.terms.threshold
            + 0.5
        )
        spread = math.hypot(check_noise, math.sqrt(crowd))
        passes_Q = scipy.special.ndtr(of_known_Q / spread)
        # In a near tie a canary's vote may raise or lower the most votes: the attack leaves these queries out.
        is_sided_Q = votes.lead(votes.votes_QC) >= votes.num_canaries
        slope_Q = is_sided_Q * scipy.stats.norm.pdf(of_known_Q / spread) / spread
        weight_Q = slope_Q / np.maximum(passes_Q * (1 - passes_Q), 1e-9)
        return Found(
            score_M=votes.coded((passed_Q - passes_Q) * weight_Q),
            gain_M=np.full(votes.num_canaries, math.sqrt(float((slope_Q * weight_Q).sum()))),
            noise=(NoiseSeen.of_answers((passed_Q != is_above_Q)[near_Q], *against),),
            drawn=drawn,
        )


def attack_on_votes(config: Any, audited: Audited) -> Shadows | None:
    """Return attacks on the noisy answers that teachers give to a run's queries: on the answers, on which queries pass
    the threshold check, and on the table of private labels by score.

    A canary is a record of one teacher. In every query it changes this teacher's vote from one of two classes to the
    other. The direction of the change is random for each query, and known to the attacker. Where there is a threshold,
    half of the queries have votes at it; all others are a tie of two classes. In the table it is in one cell.

    ``config``: the method, which releases its answers query by query or as one table. None for events of other
    mechanisms.
    """
    facts, loaded, events = audited.facts, audited.loaded, audited.events
    if not isinstance(events[0], ConfidentGnmaxQueries | VoteSums):
        return None
    if not all(isinstance(event, VoteTables | VoteSums) for event in events[1:]):
        return None
    terms = _Terms.of(config, audited)
    is_one_table, thresholds = terms.mechanism is None, config.thresholds if terms.beside else None
    num_classes, num_groups = len(facts.label_names), len(facts.group_names)
    generator = np.random.default_rng(0)
    groups = generator.integers(num_groups, size=terms.num_queries).tolist()
    votes = _Votes.made(terms, terms.num_canaries(thresholds, num_classes), num_classes, generator)
    ids: Sequence[str] = [f"public-{number}" for number in range(terms.num_queries)]
    if loaded is not None and not is_one_table:
        collected = read_votes(audited.run.votes)
        votes, ids = votes.around(collected.votes_QC), collected.record_ids
    setting: ShadowData | None = None
    table: _TableByScore | None = None
    drawn: tuple[Any, ...] = ()
    if terms.mechanism is not None:
        drawn = (of_teachers(terms.mechanism.worst_case(terms.num_queries), terms.stated.unit),)
    if terms.beside or is_one_table:
        setting = _setting_of(audited, votes, generator)
        if is_one_table:
            drawn, ids = config.events(setting.dataset), config.queries(setting.dataset).record_id
        else:
            drawn = (*drawn, *config.beside(setting.dataset))
        if thresholds is not None:
            table = _TableByScore(setting=setting, event=terms.beside[0], config=thresholds, share=terms.share)
    attack = _AttackOnVotes(
        config=config,
        terms=terms,
        votes=votes,
        groups=groups[: votes.num_queries],
        num_groups=num_groups,
        ids=ids,
        setting=setting,
        table=table,
        event=drawn[0],
        is_control=audited.is_control,
    )
    releases = _claims(attack, facts, config.target.delta)
    # Of the run's own votes, few are near a tie and near the threshold at once.
    hidden = terms.has_check and not terms.releases_counts and loaded is not None
    return Shadows(
        attack=_words(attack),
        events=drawn,
        num_canaries=votes.num_canaries,
        releases=releases,
        play=attack.play,
        is_gaussian=(terms.releases_counts and not terms.has_check) or votes.num_queries >= MANY,
        control_noise=terms.share,
        unseen=("a label that is drawn with the noise of its own check",) if hidden else (),
    )


def _setting_of(audited: Audited, votes: _Votes, generator: np.random.Generator) -> ShadowData:
    """Return the records of shadow releases whose table by score, or one table, reads them: each canary has the
    features of a public record, and with them a cell."""
    facts, loaded = audited.facts, audited.loaded
    if loaded is not None and loaded.embedding is None:
        loaded = embedded(loaded, Embedding.of(loaded.public.x, EmbeddingConfig(graph_share=0)))
    width = min(math.prod(facts.record_shape), MOST_EACH)
    public_x = torch.from_numpy(generator.normal(size=(votes.num_queries, width)).astype(np.float32))
    public_x = public_x if loaded is None else loaded.public.x
    number_M = np.arange(votes.num_canaries)
    canaries = (public_x[torch.from_numpy(number_M % len(public_x))], *labels_and_groups(facts, votes.num_canaries))
    setting = setting_of(facts, public_x, canaries, num_others=OTHERS, loaded=loaded, is_embedded=True)
    if loaded is not None:
        setting = replace(setting, dataset=replace(setting.dataset, public=loaded.public))
    return setting


def _claims(attack: _AttackOnVotes, facts: DataRecord, delta: float) -> tuple[Claimed, ...]:
    """Return what is claimed of each release alone."""
    terms, votes = attack.terms, attack.votes
    claim = gaussian_claim(math.sqrt(2 * votes.num_queries), terms.label_noise, delta)
    found = [Claimed(name="answers", claim=claim)]
    if terms.has_check:
        claim = gaussian_claim(math.sqrt(votes.num_queries), terms.check_noise, delta)
        found.append(Claimed(name="threshold checks", claim=claim))
    if attack.table is not None:
        nobody = votes.cast(np.zeros(votes.num_canaries, np.bool_))
        counts = attack.counted(nobody, np.ones(votes.num_queries, np.bool_))
        found.append(attack.table.claimed(facts, counts, delta))
    return tuple(found)


def _words(attack: _AttackOnVotes) -> str:
    counts = "noisy counts" if attack.terms.releases_counts else "labels"
    checks = ", and in which of them passed the check" if attack.terms.has_check else ""
    table = ", and likelihood ratio of the number in its cell of the table by score" if attack.table is not None else ""
    return f"the canary's code in the {counts} of all queries{checks}{table}"
