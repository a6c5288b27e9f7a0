"""An attack on the noisy answers of voters: on noisy counts or labels, on threshold checks, and on the table of private
labels by score.

A canary changes its teacher's vote by a random code over the queries. The score is the correlation of this code with
the answers, or with which queries passed the check. With small teachers it has a cell of the table as well.

Shapes: M canaries, Q queries, C classes, K bins of scores.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy
import torch

from aggregator.session import mechanism_within
from fairpate.config import EmbeddingConfig
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.data.features import embedded
from fairpate.fairness.gate import DemographicParityGate
from fairpate.methods.base import Audited
from fairpate.methods.noisy_counts import NoisyCounts, ThresholdsConfig
from fairpate.methods.shadows import (
    MANY,
    MOST_EACH,
    OTHERS,
    ShadowData,
    both_kinds,
    gaussian_claim,
    labels_and_groups,
    moments_of,
    own_noise_of,
    reach_of,
    setting_of,
    squares_seen,
    training_of,
)
from fairpate.privacy.accountant import ConfidentGnmaxQueries
from fairpate.privacy.audit import (
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
        spread, kurtosis = moments_of(float(self.event.noise_stddev_votes))
        # Every cell: noise may be missing on empty ones alone.
        noise = both_kinds(shown_KC - exact_KC, exact_KC > 0, spread, kurtosis=kurtosis)
        drawn = Drawn.of(shown_KC - np.rint(exact_KC).astype(np.int64), self.stddev)
        return found_M / stddev / scale_M, 1 / stddev / scale_M, noise, drawn

    def claimed(self, facts: DataRecord, counts: NoisyCounts, delta: float) -> Claimed:
        """Return what is claimed of the table alone, with what one canary adds to it without noise."""

        def exact(records: Split) -> dict[str, IntArray]:
            dataset = replace(self.setting.dataset, private=records)
            return {"table": counts.table(dataset, self.event, self.config, lambda exact_KC, **_: exact_KC)}

        reach = reach_of(facts, self.setting.canaries.x, exact)["table"] / self.unit
        return Claimed(name="table by score", claim=gaussian_claim(self.unit, self.stddev, delta), reach=reach)


def attack_on_votes(
    config: Any, audited: Audited, *, thresholds: ThresholdsConfig | None, is_one_table: bool = False
) -> Shadows | None:
    """Return attacks on the noisy answers that teachers give to a run's queries: on the answers, on which queries pass
    the threshold check, and on the table of private labels by score.

    A canary is a record of one teacher. In every query it changes this teacher's vote from one of two classes to the
    other. The direction of the change is random for each query, and known to the attacker. Where there is a threshold,
    half of the queries have votes at it; all others are a tie of two classes. In the table it is in one cell.

    ``config``: the method. ``thresholds``: its settings of the table of private labels by score, None if it has none.
    ``is_one_table``: all answers are one table, not released query by query. None for events of other mechanisms.
    """
    facts, loaded, is_control = audited.facts, audited.loaded, audited.is_control
    events: Sequence[Any] = audited.events
    if not isinstance(events[0], ConfidentGnmaxQueries | VoteSums):
        return None
    if not all(isinstance(event, VoteTables | VoteSums) for event in events[1:]):
        return None
    (stated, *beside), target = events, config.target
    share = 0.5 if is_control else 1.0
    # Noise is compared with what the statement claims, not with what the mechanism says of itself.
    label_noise, check_noise, threshold = share * stated.noise_stddev_votes, math.inf, -math.inf
    drawn: tuple[Any, ...]
    if is_one_table:
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
        drawn = (of_teachers(mechanism.worst_case(queries), stated.unit),)
        check_noise, threshold = share * stated.threshold_stddev_votes, stated.threshold
    has_check = math.isfinite(threshold)
    # So few canaries that the votes of the others hide one no more than the noise does.
    num_canaries = max(1, min(MOST_EACH, num_voters // 4, int(stated.noise_stddev_votes**2 / 4)))
    if has_check:
        num_canaries = max(1, min(num_canaries, int(stated.threshold_stddev_votes**2 / 4)))
    thresholds = thresholds if beside else None
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
    if loaded is not None and not is_one_table:
        # The run's own votes, without as many votes for the leading class as there are canaries.
        collected = read_votes(audited.run.votes)
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
    if beside or is_one_table:
        if loaded is not None and loaded.embedding is None:
            loaded = embedded(loaded, Embedding.of(loaded.public.x, EmbeddingConfig(graph_share=0)))
        width = min(math.prod(facts.record_shape), MOST_EACH)
        public_x = torch.from_numpy(generator.normal(size=(queries, width)).astype(np.float32))
        public_x = public_x if loaded is None else loaded.public.x
        number_M = np.arange(num_canaries)
        canaries = (public_x[torch.from_numpy(number_M % len(public_x))], *labels_and_groups(facts, num_canaries))
        setting = setting_of(facts, public_x, canaries, num_others=OTHERS, loaded=loaded, is_embedded=True)
        if loaded is not None:
            setting = replace(setting, dataset=replace(setting.dataset, public=loaded.public))
        if is_one_table:
            drawn, ids = config.events(setting.dataset), config.queries(setting.dataset).record_id
        else:
            drawn = (*drawn, *config.beside(setting.dataset))
        if thresholds is not None:
            table = _TableByScore(setting=setting, event=beside[0], config=thresholds, share=share)

    def own_noise(exact_RW: IntArray, *, name: str, **_: Any) -> IntArray:
        stddev = table.stddev if table is not None and name == "bin" else label_noise
        return exact_RW + own_noise_of(exact_RW.shape, stddev)

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
        if is_one_table:
            assert dataset is not None
            arrays = config.noisy(replace(training_of(config, dataset), noisy_sum=noisy_sum), cast_QC).arrays
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
        if dataset is not None and table is not None:
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
            of_labels = squares_seen(noise_QC, label_noise)
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
    releases = [Claimed(name="answers", claim=gaussian_claim(math.sqrt(2 * queries), label_noise, delta))]
    if has_check:
        claim = gaussian_claim(math.sqrt(queries), check_noise, delta)
        releases.append(Claimed(name="threshold checks", claim=claim))
    attack = f"the canary's code in the {'noisy counts' if counted else 'labels'} of all queries"
    if has_check:
        attack += ", and in which of them passed the check"
    if table is not None:
        nobody = cast(np.zeros(num_canaries, np.bool_))
        releases.append(table.claimed(facts, counted_of(nobody, np.ones(queries, np.bool_)), delta))
        attack += ", and likelihood ratio of the number in its cell of the table by score"
    is_gaussian = (counted and not has_check) or queries >= MANY
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
