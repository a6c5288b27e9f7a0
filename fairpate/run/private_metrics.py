"""Metrics on test records: exact ones, or estimates from one noisy table of predictions.

The table counts test records by group z, true label y and predicted label k, and for calibration by declared bins of
the model's score, with exact discrete Gaussian noise on every cell of the table, empty ones too
(:class:`fairpate.privacy.mechanism_events.PredictionTables`). A privacy unit has a total weight of ``WEIGHT``: a record
adds it to one cell, a person divides it among the person's records. Rates, gaps and ratios are functions of the
released table, so they have no further privacy cost.

**Privacy cost.** No other release of the run reads the test records. A hash assigns units to splits, so that adding or
removing a unit changes one split and moves no other unit (``data.split: hashed``). So splits compose in parallel: the
cost of the run is the larger of the two costs, and the table's noise is calibrated to the epsilon and delta of the
training at no further cost. A unit that is replaced stays in its split as long as it keeps its name; runs in which
names depend on content are refused for that relation.

**Predictor.** Each prediction is a function of its record and of released values alone. The reject option is left out,
because whether it refuses depends on earlier records, so that one record could change all later answers; it is
simulated on records that are made up from the noisy table.

**Intervals.** Let A be a noisy number of hits (the sum of a cells of the table) among B noisy records (the sum of m
cells), and n the true number of these records. Then A - p B has variance n p (1 - p) + s^2 (a (1 - p)^2 + (m - a) p^2)
at the true share p: sampling, and noise of standard deviation s. The interval contains every p at which |A - p B| is at
most z standard deviations: Wilson's interval without noise, Fieller's without sampling. n is estimated by B. The
interval is undefined unless B itself is more than z standard deviations of its noise above 0. Differences join two such
intervals by the distances of their ends from the estimate (Newcombe 1998; MOVER, Zou and Donner 2008), ratios do so in
logarithms. The interval of a largest difference goes up to the largest upper end, and down to the largest lower end at
a margin that is simulated (:func:`_low_of_largest`).

Shapes: N records, B bins of scores, G groups, Y true labels, C predicted classes, E outcomes whose rates a notion of
fairness compares (in code ``events``, where they are not privacy events).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from fairpate.config import ConfigError, EvaluationConfig
from fairpate.data import Dataset
from fairpate.data.dataset import OWN_FILES, Split
from fairpate.fairness import rates
from fairpate.fairness.bounded_errors import is_confident
from fairpate.fairness.rates import Events
from fairpate.methods.base import Method, NoisySum, Price, Stream
from fairpate.privacy import discrete_gaussian
from fairpate.privacy.accountant import Event, least_noise
from fairpate.privacy.discrete_gaussian import NoiseSource, OsEntropy, SeededSource, buffered, sample_discrete_gaussian
from fairpate.privacy.mechanism_events import PredictionTables, event_from
from fairpate.releases.directory import ReleasedArrays, RunDirectory, read_release
from fairpate.releases.log import MetricsFolder, ReleaseLog, read_receipt
from fairpate.report import metrics
from fairpate.report.answers import AnswerGuarantee
from fairpate.report.metrics import GAPS, LEVEL, Evaluation, IntervalEstimate
from fairpate.report.reject_option import RejectOptionSpread, reject_option_spread
from fairpate.report.small_cells import shown_records
from fairpate.run.bounded_answers import AskedBound, without_rule
from fairpate.run.opened import OpenRun
from fairpate.types import (
    AnswerRule,
    BoolArray,
    ErrorBound,
    FairRule,
    FloatArray,
    GateRule,
    IntArray,
    MetricsKind,
    PrivacyStatement,
    Unit,
    stream_seed,
)

if TYPE_CHECKING:
    from student.card import StudentCard
    from student.student import Student

# Divided among the records of a person and rounded down, a weight this large loses next to nothing.
WEIGHT = 2**20
# Name of the noisy table of predictions in messages between sites, if it is a sum over several sites.
PREDICTIONS = "predictions"
_LEAST_SHARE = 1e-9  # which has a logarithm
_DRAWS = 1000


def check_metrics(config: Method, dataset: Dataset) -> None:
    """Raise ConfigError if the method or the data set does not allow the metrics that ``evaluation.metrics`` asks for:
    public ones, or private ones with noise."""
    if config.evaluation.metrics == "public" and dataset.parts and not dataset.parts.startswith(OWN_FILES):
        raise ConfigError(
            "evaluation.metrics: got public, but with data.split=hashed the test records are private records; set "
            "evaluation.metrics to private."
        )
    if config.evaluation.metrics != "private":
        return
    if not config.is_private:
        raise ConfigError(
            f"evaluation.metrics: got private, but the method {config.method} has no privacy guarantee that metrics "
            "could share; leave evaluation.metrics out."
        )
    if not dataset.parts:
        raise ConfigError(
            "evaluation.metrics: private needs test records that a hash separates from training records; set "
            "data.split=hashed, with public records in files of their own."
        )
    require_kept_names(config, dataset)


def require_kept_names(config: Method, dataset: Dataset) -> None:
    """Raise ConfigError if replacing a record's content could move this record from the training to the test records,
    or back. Training and metrics might then both read it, and their privacy costs would add up."""
    by_content = not dataset.keeps_names and not config.protects_attribute_only
    if by_content and config.target.stated.get("relation") == "replace one":
        raise ConfigError(
            f"target.relation: with replace one, a replaced record must stay in its split, but {dataset.name} names "
            "records by their content; declare a key column (identity: {key: ...}), or leave target.relation out."
        )


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The evaluations of a student on test records, by name. The first of them is the headline, whose numbers all pages
    state.

    ``measured_N`` marks the test records over which the headline's accuracy is measured; it is empty where the records
    are not at hand. ``reject_option``: how much the results of a student with the reject option IDP3 vary with the
    order of the test records, on which its refusals depend; None for any other student. ``answers``: the thresholds
    below which the student refuses to answer so that the error rate of its answers is bounded, and what they guarantee;
    None if no bound is asked for.
    """

    evaluations: dict[str, Evaluation]
    measured_N: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    reject_option: RejectOptionSpread | None = None
    answers: AnswerGuarantee | None = None

    @property
    def headline(self) -> Evaluation:
        """The evaluation whose numbers all pages state and that the verdict on fairness judges."""
        return next(iter(self.evaluations.values()))

    @property
    def of_answers(self) -> Evaluation:
        """The metrics of the published model with all that it refuses, as a row of a comparison states them.

        The headline of private metrics is of all predictions, before a model refuses any. What its answers have is
        known in part: coverage and accuracy, and with IDP3 the last parity gap of simulated orders, without interval.
        """
        measured, spread, answers = self.headline, self.reject_option, self.answers
        if measured.metrics != "private" or (spread is None and answers is None):
            return measured
        gaps: dict[str, metrics.GapResult] = {}
        if spread is not None:
            coverage, accuracy, of_groups = spread.coverage.mean, spread.accuracy.mean, spread.coverage_G
            shares = [each.mean for each in of_groups]
            gaps[rates.NOTIONS[rates.DEFAULT].reading] = replace(metrics.NOT_MEASURED, value=spread.final_gap.mean)
        elif answers is not None and answers.bound.of == "error":
            coverage, accuracy = answers.coverage.value, answers.accuracy.value
            shares = [each.value for each in answers.answered]
        else:  # of one class alone
            coverage = accuracy = math.nan
            shares = [math.nan] * len(measured.group_names)
        if coverage < metrics.HARDLY_ANY:
            refusing = ["answers hardly any record"]
        else:
            named = zip(measured.group_names, shares, strict=True)
            refusing = [f"answers hardly any record of {name}" for name, share in named if share < metrics.HARDLY_ANY]
        return replace(
            measured,
            coverage=coverage,
            accuracy=accuracy,
            gaps=gaps,
            degenerate=(*measured.degenerate, *refusing),
            underserved=(),
            underserved_groups=(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the metrics of the headline, the first evaluation, as JSON values. For a student with the reject
        option IDP3 they include the metrics without refusals and those for several orders of the records."""
        values = self.headline.to_json()
        if self.reject_option is not None or "student that may refuse" in self.evaluations:
            values["without_refusals"] = self.evaluations["student without refusals"].to_json()
        added = {"orders": self.reject_option, "answers": self.answers}
        return values | {name: each.to_json() for name, each in added.items() if each is not None}


def assess(student: Student, dataset: Dataset, settings: EvaluationConfig, *, seed: int) -> Assessment:
    """Measure the student on the test records. A student that refuses some predictions is measured also without
    refusals; with the reject option IDP3, for other orders of the records too.

    Numbers that count fewer than ``settings.least_cell`` test records of a group, or of a group and class, are left
    out. A student that draws labels at random is measured in expectation; with IDP3 by the labels that it drew, because
    refusals depend on them.
    """
    test, rule, least_cell = dataset.test, student.card.idp3, settings.least_cell
    groups, persons = test.z.numpy(), test.person_N
    prediction = student.predict(test.x, groups, generator=np.random.default_rng(stream_seed(seed, Stream.PREDICTION)))
    expected = prediction.probabilities_NC if student.card.is_randomised else prediction.labels
    offered = None
    if student.card.answers is not None:
        offered = is_confident(student.card.answers, prediction.probabilities_NC, prediction.labels, groups)

    def measure(
        predictions: npt.NDArray[Any],
        answered_N: BoolArray,
        rule: GateRule | None = None,
        apart_N: BoolArray | None = None,
    ) -> Evaluation:
        measured = metrics.evaluate(
            predictions,
            labels_N=test.y.numpy(),
            groups_N=groups,
            answered_N=answered_N,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            # A fresh one for each measurement: an interval does not depend on what else was measured before.
            generator=np.random.default_rng(stream_seed(seed, Stream.BOOTSTRAP)),
            rule=rule,
            offered_N=offered,
            persons_N=persons,
            least_cell=least_cell,
            apart_N=apart_N,
        )
        return replace(measured, metrics=settings.metrics, fair_at=settings.rule)

    kept = shown_records(
        groups, prediction.answered, least=least_cell, num_groups=dataset.num_groups, persons_N=persons
    ).kept_N
    # Refusals depend on the labels drawn, so that with a rule these labels are measured, not their expectation.
    headline = measure(expected if rule is None else prediction.labels, prediction.answered, rule)
    measured = prediction.answered & kept
    if rule is None and student.card.answers is None:
        return Assessment(evaluations={"student": headline}, measured_N=measured)
    # Both evaluations are published, so their difference may show no small cell either.
    unrefused = measure(expected, np.ones(len(test), dtype=np.bool_), apart_N=~prediction.answered)
    name = "student that may refuse" if rule is None else "student with reject option"
    found = Assessment(evaluations={name: headline, "student without refusals": unrefused}, measured_N=measured)
    if rule is None:
        return found
    spread = reject_option_spread(
        prediction.labels,
        groups,
        true_labels_N=test.y.numpy(),
        rule=rule,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        generator=np.random.default_rng(stream_seed(seed, Stream.ORDERS)),
        kept_N=kept,
        persons_N=persons,
        offered_N=offered,
        least_cell=least_cell,
    )
    # The accuracy in other orders would reveal the one that is left out.
    if math.isnan(headline.accuracy) or math.isnan(unrefused.accuracy):
        spread = replace(spread, orders=tuple(replace(order, accuracy=math.nan) for order in spread.orders))
    return replace(found, reject_option=spread)


def table_event(cost: Price, bound: ErrorBound | None = None) -> PredictionTables:
    """Return the privacy event of a noisy table of predictions with the least noise at which the table costs at most
    ``cost``. The event has the unit and relation of ``cost``. With a ``bound`` on the errors of answers, a second
    table, of right and wrong predictions by confidence, is released with it (:mod:`fairpate.run.bounded_answers`), with
    the same noise."""
    count = 1 if bound is None else 2
    table = partial(PredictionTables, count=count, weight=WEIGHT, unit=cost.unit, relation=cost.relation)
    # By loss distributions: their bound is tighter than that of Renyi curves, so that less noise suffices.
    noise = least_noise(
        lambda noise: (table(noise_stddev_records=noise),),
        target_epsilon=cost.epsilon,
        target_delta=cost.delta,
        accounting="pld",
    )
    return table(noise_stddev_records=noise)


def stated_tables(run: RunDirectory, next_event: Callable[[], Event]) -> tuple[Event, ...]:
    """Return the privacy events of all noisy tables of predictions that the run drew for private metrics; the run's
    privacy statement lists them. The last event is that of the stored table. If no table is stored, it is
    ``next_event()``, the event of the table that is still to be drawn."""
    if run.metrics_table.exists():
        return read_release(run.metrics_table)[0].events
    # Tables whose files were deleted may have been seen.
    lost = read_receipt(MetricsFolder(root=run.root))
    return (*(() if lost is None else lost.events), next_event())


def draw_table(
    student: Student,
    test: Split,
    event: PredictionTables,
    source: NoiseSource,
    *,
    num_groups: int,
    num_classes: int,
    edges: Sequence[float] = (),
    noisy_sum: NoisySum | None = None,
    about: bytes = b"",
    asked: AskedBound | None = None,
) -> ReleasedArrays:
    """Predict the test records one by one, and return a noisy table (B, G, Y, C) of how many have each combination of
    score bin, group, true label and prediction. ``edges`` divide scores into B = len(edges) + 1 bins. With a bound
    ``asked`` for, also return the noisy table (S, K, 2) of right and wrong predictions by stratum and confidence bin.

    Records are counted by weight: the records of one privacy unit share the weight ``event.weight``. ``event`` also
    gives the noise. ``noisy_sum`` adds up the tables of several sites; ``about`` is the file of ``student``, which must
    be equal at all sites.
    """
    labels_N, chances_NC = lone_predictions(student, test, source)
    bins_N = np.searchsorted(edges, scores_of(chances_NC, labels_N), side="right")
    table_BGYC = np.zeros((len(edges) + 1, num_groups, num_classes, num_classes), np.int64)
    # Rounded down: the weights of a person's records never add up to more than one weight.
    # Not `+=`, which adds once to a cell that occurs several times.
    np.add.at(table_BGYC, (bins_N, test.z.numpy(), test.y.numpy(), labels_N), event.weight // records_of_unit(test))
    cells = table_BGYC.reshape(-1, num_classes**2)
    if asked is not None:  # one sum of both tables, as one model has one sum
        by_confidence = asked.table(test, labels_N, chances_NC, weight=event.weight)
        cells = np.concatenate([cells.ravel(), by_confidence.ravel()])[:, None]
    stddev = event.noise_stddev_weights
    # On empty cells too: which cells hold no record is private.
    if noisy_sum is not None:
        noisy = noisy_sum(cells, stddev=stddev, name=PREDICTIONS, about=about).ravel()
    else:
        source = buffered(source)
        noisy = cells.ravel() + np.array([sample_discrete_gaussian(stddev, source) for _ in range(cells.size)])
    arrays = {
        "weights_BGYC": noisy[: table_BGYC.size].reshape(table_BGYC.shape),
        "edges": np.array(edges, np.float64),
    }
    if asked is not None:
        arrays |= asked.arrays | {"weights_SK2": noisy[table_BGYC.size :].reshape(by_confidence.shape)}
    return ReleasedArrays(arrays=arrays, events=(event,))


def lone_predictions(student: Student, split: Split, source: NoiseSource) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return the label (N,) that ``student`` predicts for each record, and the probabilities (N, C) of labels. Each
    record is predicted separately, so that its prediction depends on no other record."""
    card = replace(student.card, idp3=None, answers=None)
    alone, groups_N = replace(student, card=card), split.z.numpy()
    # Never seeded by a public number: the label that one record draws must not depend on how many stand before it.
    generator = np.random.default_rng(source.randbelow(2**63))
    if not len(split):
        return np.zeros(0, np.int64), np.zeros((0, len(card.label_names)), np.float32)
    # Row by row: the last digit of a sum may depend on the other rows of a batch.
    found = alone.predict(split.x, groups_N, generator=generator, one_by_one=True)
    return found.labels.astype(np.int64), found.probabilities_NC


def scores_of(chances_NC: npt.NDArray[np.float32], labels_N: IntArray) -> FloatArray:
    """Return the score of each prediction (N,): of two classes the probability of the second, of more that of the class
    that is predicted."""
    score_N = chances_NC[:, 1] if chances_NC.shape[1] == 2 else chances_NC[np.arange(len(labels_N)), labels_N]
    return score_N.astype(np.float64)


def records_of_unit(split: Split) -> IntArray:
    """Return for each record (N,) the number of records of its person; 1 if the unit of privacy is a record."""
    if split.person_N is None:
        return np.ones(len(split), np.int64)
    person_N = split.person_N.numpy()
    return np.bincount(person_N)[person_N]


def release_table(opened: OpenRun, student: Student, event: Event, log: ReleaseLog, *, noise: str) -> ReleasedArrays:
    """Return the noisy table of predictions that is stored with the run. If there is none, draw it from the test
    records and charge it to ``log``, the log of these records.

    ``event`` is the table's privacy event, ``noise`` the label of the noise source, such as ``os_entropy``. Errors as
    in :meth:`ReleaseLog.step`: a table that was published and then deleted is not drawn again.
    """
    assert isinstance(event, PredictionTables)
    dataset, edges, bound = opened.dataset, opened.config.evaluation.score_edges, opened.config.student.reject
    before, asked = without_rule(student), None if bound is None else AskedBound.of(bound, student, dataset)
    source: NoiseSource = OsEntropy()
    if noise != discrete_gaussian.OS_ENTROPY:
        source = SeededSource(stream_seed(opened.seed, Stream.METRICS))
    draw = partial(
        draw_table,
        student,
        dataset.test,
        event,
        source,
        num_groups=dataset.num_groups,
        num_classes=dataset.num_classes,
        edges=edges,
        noisy_sum=opened.noisy_sum,
        about=before,
        asked=asked,
    )
    digest = hashlib.sha256(before).hexdigest()
    settings: dict[str, Any] = {"student": digest, "parts": dataset.parts, "score_edges": list(edges)}
    if bound is not None:
        # Another bound would be another table; what happens to a group without a threshold changes none.
        settings["bound"] = {name: value for name, value in asdict(bound).items() if name != "otherwise"}
    # Sites charge a sum themselves, when its first message leaves.
    events = (event,) if opened.noisy_sum is None else ()
    return log.step(draw, settings=settings, pool="", noise=noise, events=events)


def assess_privately(opened: OpenRun, student: Student, statement: PrivacyStatement) -> Assessment:
    """Return metrics of ``student`` estimated from the noisy table of its predictions (:func:`release_table`), whose
    privacy event ``statement`` lists."""
    event, log = event_from(statement.part_events["test"][-1]), opened.log.of_part("test")
    released = release_table(opened, student, event, log, noise=statement.noise)
    found = assessment_of(
        released,
        student.card,
        seed=opened.seed,
        fair_at=opened.config.evaluation.rule,
        bound=opened.config.student.reject,
    )
    return replace(found, measured_N=np.ones(len(opened.dataset.test), np.bool_))  # for the operator's comparison alone


def assessment_of(
    released: ReleasedArrays, card: StudentCard, *, seed: int, fair_at: FairRule, bound: ErrorBound | None = None
) -> Assessment:
    """Return the metrics that can be estimated from ``released``, a noisy table of predictions. ``card`` describes the
    student that predicted. With a ``bound`` on the errors of answers the metrics include the thresholds that keep it.
    If the student has the reject option IDP3, they include results for several orders of the records, which are
    simulated from the table. All other numbers are those of the model before it refuses anything."""
    measured = evaluation_of(released, group_names=card.group_names, class_names=card.label_names)
    measured = replace(measured, fair_at=fair_at)
    num_groups, num_classes = len(card.group_names), len(card.label_names)
    answers, tables_OGYC = None, np.array(measured.confusion_GYC, np.float64)[None]
    if bound is not None:
        event = released.events[-1]
        assert isinstance(event, PredictionTables)
        counts_SK2, sizes_BGYC = (released.arrays[name] / event.weight for name in ("weights_SK2", "weights_BGYC"))
        rule, answered_S = AskedBound.read(released.arrays, card, bound).rule(
            counts_SK2, sizes_BGYC.sum(axis=0), noise_stddev=event.noise_stddev_records
        )
        answers = guarantee_of(
            rule,
            counts_SK2,
            answered_S,
            card,
            noise_stddev=event.noise_stddev_records,
            unit=event.unit,
            kind="private",
        )
        if card.idp3 is not None:
            # Strata are groups with a predicted label; those that are refused for their confidence come first.
            is_offered_SK = np.arange(counts_SK2.shape[1]) < answered_S[:, None]
            outcomes_OSR = [np.einsum("sk,skr->sr", kept_SK, counts_SK2) for kept_SK in (~is_offered_SK, is_offered_SK)]
            tables_OGYC = np.zeros((2, num_groups, num_classes, num_classes))
            for group, label in np.ndindex(num_groups, num_classes):
                # A wrong prediction stands for another true label: accuracy alone reads it.
                truths = label, (label + 1) % num_classes
                tables_OGYC[:, group, truths, label] = [each[group * num_classes + label] for each in outcomes_OSR]
    name = "student" if card.idp3 is None and answers is None else "student without refusals"
    found = Assessment(evaluations={name: measured}, answers=answers)
    if card.idp3 is None:
        return found
    # Orders are simulated on whole records: noisy counts are rounded, and none is below 0.
    counts_OGYC = np.rint(np.maximum(tables_OGYC, 0.0)).astype(np.int64)
    cells_NX = np.repeat(np.argwhere(counts_OGYC >= 0), counts_OGYC.ravel(), axis=0)
    offered_N, groups_N, truth_N, labels_N = cells_NX.T
    spread = reject_option_spread(
        labels_N,
        groups_N,
        true_labels_N=truth_N,
        rule=card.idp3,
        num_groups=num_groups,
        num_classes=num_classes,
        # A public seed reveals nothing: these records are made up from the released table.
        generator=np.random.default_rng(stream_seed(seed, Stream.ORDERS)),
        offered_N=None if answers is None else offered_N,
    )
    return replace(found, reject_option=spread)


def guarantee_of(
    rule: AnswerRule,
    counts_SK2: FloatArray,
    answered_S: IntArray,
    card: StudentCard,
    *,
    noise_stddev: float,
    unit: Unit,
    kind: MetricsKind,
) -> AnswerGuarantee:
    """Return what the thresholds of ``rule`` guarantee for the student that ``card`` describes, with the share of each
    group that is answered.

    ``counts_SK2``: right and wrong records by stratum and bin, with noise of standard deviation ``noise_stddev``;
    ``answered_S``: how many bins of each stratum the rule answers (:meth:`AskedBound.rule`).
    """
    is_answered_SK1 = (np.arange(counts_SK2.shape[1]) < answered_S[:, None])[..., None]

    def shares_of(event: Literal["answered", "right"], parts: int) -> _Shares:
        """Return in so many parts of the table the share of records that are answered, or of answers that are
        right."""

        def counted(table_SK2: FloatArray) -> Events:
            answered_SK2 = table_SK2 * is_answered_SK1
            both = (answered_SK2, table_SK2) if event == "answered" else (answered_SK2[..., 0], answered_SK2)
            hits_EG, sizes_EG = (each.reshape(1, parts, -1).sum(axis=-1) for each in both)
            return Events(hits_EG=hits_EG, sizes_EG=sizes_EG, cells=[])

        shares = _Shares.of(counted, counts_SK2, noise_stddev, z=_deviations())
        # Without noise they are exact shares of these test records.
        return shares if noise_stddev else shares._replace(low_EG=shares.value_EG, high_EG=shares.value_EG)

    by_group = shares_of("answered", len(card.group_names))
    return AnswerGuarantee(
        rule=rule,
        group_names=card.group_names,
        class_names=card.label_names,
        answered=tuple(by_group.estimate(f"answered of {name}", 0, g) for g, name in enumerate(card.group_names)),
        coverage=shares_of("answered", 1).estimate("answered", 0, 0),
        accuracy=shares_of("right", 1).estimate("right answers", 0, 0),
        num_records=max(0, round(float(counts_SK2.sum()))),
        unit=unit,
        metrics=kind,
    )


def exact_guarantee(bound: ErrorBound, student: Student, dataset: Dataset, config: Method) -> AnswerGuarantee:
    """Return the thresholds that keep ``bound``, from the exact table of the test records, without noise."""
    asked, source = AskedBound.of(bound, student, dataset), SeededSource(stream_seed(config.seed, Stream.METRICS))
    labels_N, chances_NC = lone_predictions(student, dataset.test, source)
    sizes_GYC = np.zeros((dataset.num_groups, dataset.num_classes, dataset.num_classes))
    test = dataset.test
    np.add.at(sizes_GYC, (test.z.numpy(), test.y.numpy(), labels_N), 1 / records_of_unit(test))
    counts_SK2 = asked.table(test, labels_N, chances_NC).astype(np.float64)
    rule, answered_S = asked.rule(counts_SK2, sizes_GYC, noise_stddev=0.0)
    return guarantee_of(
        rule,
        counts_SK2,
        answered_S,
        student.card,
        noise_stddev=0.0,
        unit="person" if test.person_N is not None else "record",
        kind=config.evaluation.metrics,
    )


def evaluation_of(released: ReleasedArrays, *, group_names: Sequence[str], class_names: Sequence[str]) -> Evaluation:
    """Return all metrics that can be estimated from a released noisy table of predictions; the other metrics are
    NaN."""
    *_, event = released.events
    if not isinstance(event, PredictionTables):
        raise ValueError(  # noqa: TRY004 - of a file
            f"metrics.safetensors: expected a table of predictions, got {event}; restore the file from a copy."
        )
    stddev, z = event.noise_stddev_records, _deviations()
    names: dict[str, Any] = {"group_names": tuple(group_names), "class_names": tuple(class_names)}
    table_BGYC = np.asarray(released.arrays["weights_BGYC"] / event.weight, np.float64)
    calibration, two = list[IntervalEstimate](), len(class_names) == 2
    if edges := released.arrays["edges"].tolist():
        # In each bin of scores, the share of records whose true class is the one that the score is of: of two classes
        # the second, else the predicted one. Bins instead of groups: each sums over groups, whose noises add up.
        of_score, event_place = (_truths, 1) if two else (rates.correct, 0)
        in_bins = _Shares.of(of_score, table_BGYC.sum(axis=1), stddev * math.sqrt(table_BGYC.shape[1]), z=z)
        what = f"true {class_names[1]}" if two else "right"
        calibration = [
            in_bins.estimate(f"{what} where the score is {low:g} to {high:g}", event_place, place)
            for place, (low, high) in enumerate(itertools.pairwise((0.0, *edges, 1.0)))
        ]
    # The noises of the bins add up.
    table_GYC, stddev = table_BGYC.sum(axis=0), stddev * math.sqrt(len(table_BGYC))
    size_G = table_GYC.sum(axis=(1, 2))
    right, predicted = (_Shares.of(each, table_GYC, stddev, z=z) for each in (rates.correct, rates.predicted))
    all_1YC, stddev_all = table_GYC.sum(axis=0, keepdims=True), stddev * math.sqrt(len(table_GYC))
    of_all = _Shares.of(rates.correct, all_1YC, stddev_all, z=z).estimate("accuracy", 0, 0)
    total = 0 if math.isnan(of_all.value) else round(float(size_G.sum()))
    # A size is a sum of cells, and so is its noise. It is the size of these records: there is no error of sampling.
    reach = z * stddev * math.sqrt(table_GYC[0].size)
    groups, estimates = [], [of_all]
    for place, (name, size) in enumerate(zip(group_names, size_G.tolist(), strict=True)):
        value, low, high = (max(0.0, size + by) for by in (0.0, -reach, reach))
        estimates.append(IntervalEstimate(name=f"size of {name}", kind="count", value=value, low=low, high=high))
        estimates.append(right.estimate(f"accuracy for {name}", 0, place))
        group, accuracy = metrics.GroupResult(name=name), estimates[-1].value
        if not math.isnan(accuracy):  # the group stands out
            number = round(size)
            group = replace(group, num_records=number, num_answered=number, coverage=1.0, accuracy=accuracy)
        groups.append(group)
    # Of two classes the second is the one that is selected.
    for event_place in [1] if two else range(len(class_names)):
        ratios = impact_ratios(table_GYC, stddev, event_place)
        for place, name in enumerate(group_names):
            said = f"predicted {class_names[event_place]}"
            estimates.append(predicted.estimate(f"{said}: {name}", event_place, place))
            estimates.append(replace(ratios.estimate(f"impact ratio of {name}: {said}", 0, place), kind="ratio"))
    measured = Evaluation(
        num_records=total,
        num_answered=total,
        accuracy=of_all.value,
        coverage=1.0,
        **names,
        groups=tuple(groups),
        gaps={name: gap_of(metric, table_GYC, stddev, **names) for name, metric in GAPS.items()},
        # Sums of squares, to which noise adds: no estimate.
        ermi=math.nan,
        ermi_given_label=math.nan,
        rates_GC=tuple(tuple(row) for row in predicted.value_EG.T.tolist()),
        confusion_GYC=tuple(tuple(tuple(row) for row in table) for table in np.maximum(table_GYC, 0.0).tolist()),
        metrics="private",
        noise_stddev=stddev,
        per_person=event.unit == "person",
        estimates=(*estimates, *calibration),
    )
    return metrics.with_labels(measured) if total else measured


def _truths(joint_GYC: FloatArray) -> Events:
    """Return the events "label y is the true one" for each y."""
    return rates.predicted(joint_GYC.swapaxes(-1, -2))


def impact_ratios(table_GYC: FloatArray, stddev: float, event: int) -> _Shares:
    """Return each group's impact ratio with intervals: its rate of predicting class ``event``, divided by the highest
    rate of any group.

    ``table_GYC``: counts by group, label and prediction, with Gaussian noise of standard deviation ``stddev``. All
    ratios are NaN if the rates of fewer than two groups are known, or if all known rates are 0.

    One group has the highest rate, so a group's impact ratio is the smallest of its ratios to all groups. The lower end
    of its interval is the smallest lower end of these ratios: it is valid as soon as the lower end for the group with
    the highest rate is. The upper end is the smallest upper end: it is valid only if all upper ends are, so they are
    corrected for the number of groups that may have the highest rate (Bonferroni). Together the two ends may miss the
    true ratio twice as often as one end of a single ratio does. If several groups nearly have the highest rate, one of
    the ratios is underestimated, so the lower end hardly ever misses.
    """
    shares = _Shares.of(rates.predicted, table_GYC, stddev, z=_deviations())
    is_known_G = ~np.isnan(shares.value_EG[event])
    # A noisy number of predictions may be below 0: its rate is 0.
    if is_known_G.sum() < 2 or not np.nanmax(shares.value_EG[event]) > 0:
        nothing = np.full((1, len(table_GYC)), np.nan)
        return _Shares(nothing, nothing, nothing)
    num_largest = int((shares.high_EG[event] >= np.nanmax(shares.low_EG[event])).sum())
    comparisons = max(1.0, min(num_largest, is_known_G.sum() - 1) / 2)
    wider = _Shares.of(rates.predicted, table_GYC, stddev, z=_deviations(comparisons))

    def least(ratios_EGG: FloatArray) -> FloatArray:
        # The ratio of a group to itself is 1, without any error.
        ratios_GG = np.where(np.eye(len(table_GYC), dtype=np.bool_), 1.0, ratios_EGG[event])
        return np.where(is_known_G, np.fmin.reduce(ratios_GG, axis=1), np.nan)[None]

    value_EGG, low_EGG, _ = _ratios(shares)
    # A rate of 0 has no logarithm, and its ratio is 0.
    value, low = (np.where(shares.value_EG[event] == 0, 0.0, least(each)) for each in (value_EGG, low_EGG))
    return _Shares(value, low, least(_ratios(wider).high_EG))


def selections(table_GYC: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each group's rate of predicting the second class, and its impact ratio (this rate over the highest
    group's), both from a table without noise. Both have the shape (3, G): the rows are the value, and the lower and
    upper end of its interval."""
    shares, ratios = _Shares.of(rates.predicted, table_GYC, 0.0, z=_deviations()), impact_ratios(table_GYC, 0.0, 1)
    return np.stack([each[1] for each in shares]), np.stack([each[0] for each in ratios])


def _ratios(shares: _Shares) -> _Shares:
    """Return the ratio of each group's share to each other group's share, with intervals: entry [e, i, j] of the arrays
    (E, G, G) is for outcome e, group i over group j."""
    value, low, high = (np.maximum(each, _LEAST_SHARE) for each in shares)
    ratio = value[..., :, None] / value[..., None, :]
    # MOVER in logarithms: the low end joins the low end of a share and the high end of the other.
    below, above = np.log(value / low), np.log(high / value)
    down = np.hypot(below[..., :, None], above[..., None, :])
    up = np.hypot(above[..., :, None], below[..., None, :])
    return _Shares(ratio, ratio * np.exp(-down), ratio * np.exp(up))


def _low_of_largest(alone: _Shares, ends: Callable[..., _Shares], table_GYC: FloatArray, stddev: float) -> float:
    """Return the lower end of the interval of the largest of all differences between groups, at least 0.

    ``alone`` holds every difference with the ends of its own interval. ``ends(z, table)`` returns them with ends at z
    standard deviations.

    The interval may miss the true value with probability 1 - ``LEVEL``. Its upper end is the largest upper end of all
    differences. It misses with half of that probability if one difference is far above all others, and hardly ever if
    several are nearly equal, since one of them is then overestimated. The lower end may use the remaining probability.
    Its margin is a quantile of the largest error of all differences. For this, each difference is assumed to lie as far
    below the lower end as it was estimated, or as it would lie if all shrank in proportion, whichever is nearer (moment
    inequalities: Andrews and Soares 2010). Errors are simulated around the released table, so that anybody can repeat
    them.
    """
    z = _deviations()
    is_known = ~np.isnan(alone.value_EG)
    value_K, largest = alone.value_EG[is_known], float(np.nanmax(alone.value_EG))
    if largest <= 0 or len(value_K) == 1:
        return max(0.0, float(np.nanmax(alone.low_EG)))
    reach_K = np.maximum((value_K - alone.low_EG[is_known]) / z, _LEAST_SHARE)
    drawn = _drawn_around(table_GYC.tobytes(), table_GYC.shape, stddev)
    errors_RK = ends(z, drawn).value_EG[:, is_known]
    # `nanmedian` goes through the columns one by one.
    median = np.nanmedian if np.isnan(errors_RK).any() else np.median
    errors_RK = np.nan_to_num(errors_RK - median(errors_RK, axis=0))
    # In standard deviations of a normal distribution, above and below: the interval, of which `reach_K` is the lower
    # part, allows for skewness already.
    down_K, up_K = np.abs(np.quantile(errors_RK, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)) / z
    errors_RK /= np.maximum(np.where(errors_RK < 0, down_K, up_K), _LEAST_SHARE)
    low = 0.0
    for _ in range(8):  # upwards from 0, where all differences are equal and the margin is widest
        below_K = np.maximum(np.minimum(value_K - low, 0), low * (value_K / largest - 1)) / reach_K
        errors_R = (below_K + errors_RK).max(axis=1)
        missed_above = min(float((errors_R < -z).mean()), (1 - LEVEL) / 2)
        margin = float(np.quantile(errors_R, LEVEL + missed_above))
        # With a wider margin no group may stand out any more: then the low end is 0.
        before, low = low, float(np.fmax.reduce(ends(margin, table_GYC).low_EG, axis=None, initial=0.0))
        if low == before:  # for good
            break
    return low


@lru_cache(maxsize=2)  # all gaps of one table share the draws, and all levels those of its sum over groups
def _drawn_around(table_GYC: bytes, shape: tuple[int, ...], stddev: float) -> FloatArray:
    """Return ``_DRAWS`` simulated noisy tables: each has counts of as many records, drawn with the shares of the table
    ``table_GYC`` (an array of this ``shape``, as bytes), and fresh Gaussian noise of standard deviation ``stddev``."""
    generator, table = np.random.default_rng(0), np.frombuffer(table_GYC)
    chances = np.maximum(table, _LEAST_SHARE)
    counts = generator.multinomial(max(1, round(table.sum())), chances / chances.sum(), size=_DRAWS)
    return (counts + generator.normal(0, stddev, counts.shape)).reshape(_DRAWS, *shape)


def _deviations(comparisons: float = 1) -> float:
    """Return the number of standard deviations at which ``comparisons`` intervals together contain their true values
    with the probability ``LEVEL``."""
    return float(-ndtri((1 - LEVEL) / 2 / comparisons))


class _Shares(NamedTuple):
    """The shares (E, G) of each group's records in which each of E outcomes occurs, such as a prediction, with the ends
    of their intervals; NaN for a group whose noisy number of records is not clearly above its noise."""

    value_EG: FloatArray
    low_EG: FloatArray
    high_EG: FloatArray

    @classmethod
    def of(
        cls, events: rates.RateEvents, table_GYC: FloatArray, stddev: float, *, z: float, rest: bool = False
    ) -> _Shares:
        """Return the share of each group's records in which each of the outcomes ``events`` occurs, with its interval,
        from one noisy table (G, Y, C) or from several that are stacked along leading axes.

        The ends of the intervals are at z standard deviations. ``rest``: return for each group the shares among the
        records of all other groups together.
        """
        # How many noisy cells each count adds up determines its noise.
        found, cells = events(table_GYC), events(np.ones(table_GYC.shape[-3:]))
        hits, sizes, hit_cells, size_cells = (
            each.sum(axis=-1, keepdims=True) - each if rest else each
            for each in (found.hits_EG, found.sizes_EG, cells.hits_EG, cells.sizes_EG)
        )
        noise = (z * stddev) ** 2
        is_known = (sizes > 0) & (sizes > np.sqrt(noise * size_cells))
        value = np.clip(np.where(is_known, rates.divide(hits, sizes), np.nan), 0.0, 1.0)
        drawn = z**2 * np.maximum(sizes, 0.0)
        # The p with (hits - p sizes)^2 <= z^2 variance(p) lie between the roots of square p^2 - twice p + rest.
        square = sizes**2 + drawn - noise * size_cells
        twice = 2 * hits * sizes + drawn - 2 * noise * hit_cells
        # Rounding, or noisy hits below 0 or above the size, may leave no real root.
        root = np.sqrt(np.maximum(twice**2 - 4 * square * (hits**2 - noise * hit_cells), 0.0))
        square = np.where(is_known, square, np.nan)
        low, high = ((twice + sign * root) / 2 / square for sign in (-1, 1))
        return cls(value, np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0))

    def estimate(self, name: str, event: int, group: int) -> IntervalEstimate:
        value, low, high = (float(each[event, group]) for each in self)
        return IntervalEstimate(name=name, kind="share", value=value, low=low, high=high)


def gap_of(
    metric: rates.Metric,
    table_GYC: FloatArray,
    stddev: float,
    *,
    group_names: Sequence[str],
    class_names: Sequence[str],
) -> metrics.GapResult:
    """Return the fairness gap or error rate ``metric`` of a noisy table of predictions, with its interval. A gap is the
    largest difference between groups.

    ``group_names`` and ``class_names`` name the groups and labels between which the difference is largest, and those
    for which a comparison is undefined.
    """
    names = class_names if metric.compare is rates.level else group_names
    if metric.compare is rates.level:
        # Of all groups together, whose noises add up.
        table_GYC, stddev = table_GYC.sum(axis=0, keepdims=True), stddev * math.sqrt(len(table_GYC))

    found = metric.events(table_GYC)
    # A group against itself is no comparison: NaN keeps it out of maxima.
    itself_GG = np.where(np.eye(len(table_GYC), dtype=np.bool_), np.nan, 0.0)

    shares = _Shares.of(metric.events, table_GYC, stddev, z=_deviations())
    # Where the event occurs in no group, the ratio of its rates is 0 / 0.
    occurs_EG = np.nan_to_num(shares.value_EG).max(axis=-1, keepdims=True) > 0
    undefined = np.where(occurs_EG, 0.0, np.nan)[..., None]

    def ends(z: float, joint_GYC: FloatArray) -> _Shares:
        shares_of = partial(_Shares.of, metric.events, joint_GYC, stddev, z=z)
        own = shares_of()
        if metric.compare is rates.level:
            return own
        if metric.compare is rates.below_other:
            ratio, least, most = _ratios(own)
            return _Shares(1 - ratio + itself_GG + undefined, 1 - most + undefined, 1 - least + undefined)
        if metric.compare is rates.pairwise:
            first, other = ([each[..., :, None] + itself_GG for each in own], [each[..., None, :] for each in own])
        else:
            first, other = list(own), list(shares_of(rest=True))
        value = first[0] - other[0]
        # MOVER (Zou and Donner 2008): distances of the ends from the estimates, added in quadrature.
        low = value - np.hypot(first[0] - first[1], other[2] - other[0])
        high = value + np.hypot(first[2] - first[0], other[0] - other[1])
        if metric.compare is rates.to_overall:
            # A group is part of the whole: its distance to it is that to the others, times their share.
            sizes_EG = np.maximum(metric.events(joint_GYC).sizes_EG, 0.0)
            others_EG = 1 - rates.divide(sizes_EG, sizes_EG.sum(axis=-1, keepdims=True))
            far, near = np.maximum(np.abs(low), np.abs(high)), np.maximum(0.0, np.maximum(low, -high))
            value, low, high = np.abs(value) * others_EG, near * others_EG, far * others_EG
        return _Shares(value, low, high)

    alone = ends(_deviations(), table_GYC)
    value = alone.value_EG
    if np.isnan(value).all():
        return replace(metrics.NOT_MEASURED, level=LEVEL, n_undefined=found.sizes_EG.size)
    lacks_EG = np.isnan(shares.value_EG)
    # Comparisons that are undefined although the group itself stands out: of a true class that it hardly has.
    stands_out_G = ~np.isnan(_Shares.of(rates.predicted, table_GYC, stddev, z=_deviations()).value_EG[0])
    lacking = metric.left_out(value, found.cells, lacks_EG=lacks_EG, has_records_G=stands_out_G)
    sizes = found.sizes_EG[~lacks_EG]
    where = rates.located(value, found.cells)
    low = _low_of_largest(alone, ends, table_GYC, stddev)
    # The largest high end lies above the true largest difference as soon as that one interval holds it.
    high = np.nanmax(alone.high_EG)
    largest = max(0.0, float(np.nanmax(value)))
    return metrics.GapResult(
        value=largest,
        low=float(np.clip(low, 0.0, largest)),
        high=float(np.clip(high, largest, 1.0)),
        level=LEVEL,
        n_undefined=int(lacks_EG.sum()),
        min_cell_size=round(float(sizes.min())),
        where=metrics.describe_cell(where, group_names=group_names, class_names=class_names),
        left_out=tuple(names[code] for code in lacking),
    )
