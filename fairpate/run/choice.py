"""Choose settings within the privacy guarantee, by private validation records: models of one release, or trainings.

**Among models that learn from one release** (:func:`select_settings`) training has no privacy cost, but scoring has:
one validation record may change the score of every candidate model, so noise that suffices for one score would not
suffice for all. The exponential mechanism (McSherry and Talwar 2007) costs no more for many candidates than for two. A
unit adds to each score a whole number from 0 to ``WEIGHT``, and the probability of a candidate is proportional to
exp(epsilon score / WEIGHT). An added unit lowers no score, so numerator and normaliser change in the same direction,
each by a factor of at most exp(epsilon). If neighbouring data sets differ in a replaced unit, scores may change in both
directions, and the exponent is half as large.

**Among trainings that each read private records** (:func:`select_by_trials`) the best of a secret random number K of
trials is published (:class:`fairpate.privacy.mechanism_events.SecretTrials`). A trial draws its settings at random from
the list, trains under an epsilon of its own, and gets a noisy score; a trial that fails counts as the worst. All trials
are charged before the first. K and the settings are drawn once and stored before anything is trained, so that a
repeated command runs the missing trials and no others. What would reveal K or a losing trial is not displayed or
published, and is erased in the end; only the running time of the command depends on K.

Validation records are read by nothing else (``data.split.validation_share``), so the choice composes in parallel with
training and private metrics: epsilon is the largest of the three costs.

Shapes: N validation records, M candidates.
"""

import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairpate.config import ConfigError, values_digest
from fairpate.data import Dataset, load_data
from fairpate.data.dataset import Split
from fairpate.files import PathIn, arrays_digest, make_folder, private_folder, write_atomically
from fairpate.methods.base import Method, Price, PrivateMethod, Stream, all_methods
from fairpate.privacy import accountant, discrete_gaussian
from fairpate.privacy.accountant import Event, PureReleases
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, NoiseSource, OsEntropy, SeededSource
from fairpate.privacy.laplace import choose_cheap
from fairpate.privacy.mechanism_events import PredictionTables, SecretTrials, covering
from fairpate.releases.directory import (
    Origin,
    ReleasedArrays,
    RunDirectory,
    RunDirectoryError,
    RunFolderError,
    changed_fields,
    read_json,
    read_release,
    sole_worker,
    write_json,
)
from fairpate.releases.log import ReleaseLog, read_receipt
from fairpate.releases.odometer import Odometer
from fairpate.run.folder import environment
from fairpate.run.forecast import announce_delta, announce_spending, public_units
from fairpate.run.private_metrics import WEIGHT, lone_predictions, records_of_unit, require_kept_names, table_event
from fairpate.run.run import (
    check_data,
    check_model_files,
    open_run,
    publish_trained,
    run_method,
    students_of,
    trained_student,
    with_pinned_weights,
)
from fairpate.terminal import Reporter
from fairpate.types import IntArray, UserError, heard_by, stream_seed
from student.student import Student, load_student, save_student

Shares = Mapping[str, float] | None


def select_settings(
    configs: Sequence[Method], *, epsilon: float, out: Path, reporter: Reporter, group_shares: Shares = None
) -> RunDirectory:
    """Choose one of several settings by how well their models predict private validation records, and run the chosen
    ones in ``out / "model"``. A repeated call resumes.

    ``configs`` are the settings; all their models learn from one release. The release and the result of the choice are
    stored in ``out / "release"``, so that a repeated command draws neither again. ``epsilon``: the privacy cost of the
    choice. ``group_shares``: a public population share for each group's name, so that the score of a model weights all
    groups equally; None weights all records equally. ConfigError for settings that do not share a release, and for a
    data set without separate validation records; other errors as in :func:`fairpate.run.run.run_method`.
    """
    candidates = _candidates(
        configs,
        "that learn from a release of arrays",
        suits=lambda config: config.keeps_release,
        of_all=lambda config: config.shared_release,
        why="the release reads them, and all models learn from one release",
    )
    first = candidates[0]
    # With the settings of the release alone, in which the candidates agree.
    with open_run(first.release_alone.model_copy(update={"out": out / "release"}), reporter) as opened:
        dataset = opened.dataset
        # Before the release is drawn: what is refused here must not cost its epsilon.
        weights = group_weights(dataset, group_shares)
        require_kept_names(first, dataset)
        for each in candidates:
            check_model_files(each, dataset, Reporter(quiet=True))
        released = opened.config.release(opened)
        students = students_of(opened, candidates, released)
        # The guarantee of the release: both are stated as one epsilon for one unit.
        unit, relation = released.events[0].unit, released.events[0].relation
        # Noise of the kind that the release has: the statement names one for both.
        source: NoiseSource = OsEntropy()
        if first.is_seeded:
            source = SeededSource(stream_seed(first.seed, Stream.CHOICE))

        event = PureReleases(count=1, epsilon=epsilon, unit=unit, relation=relation)

        def draw() -> ReleasedArrays:
            scores_M = [score_of(student, dataset.validation, weights, source) for student in students]
            return choice_among(scores_M, event, source)

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
                f"{out / 'release'}: public/{model.choice.name}, the file that states which settings were chosen, is "
                f"missing; copy it from {model.root}."
            )
        log = opened.log.of_part("validation")
        made = log.step(draw, settings=settings, pool="", noise=source.label, events=(event,))
    chosen = candidates[int(made.arrays["chosen"][0])]
    run = run_method(chosen.model_copy(update={"out": out / "model"}), reporter, release_of=out / "release")
    if not run.choice.exists():  # then the statement would not price it
        raise RunDirectoryError(
            f"{run.root}: contains another model than that of the chosen settings; give a new folder with --out."
        )
    return run


def _candidates(
    configs: Sequence[Any], words: str, *, suits: Callable[[Method], bool], of_all: Callable[[Any], Any], why: str
) -> list[Any]:
    """Check ``configs``, the settings to choose from, and return them with the checksums of their files of initial
    weights.

    ConfigError for fewer than two settings, for a data set without separate validation records, and for a method that
    does not suit, as ``words`` describe in the message. ConfigError also if ``of_all(config)``, the
    values that all settings must share, differs between settings; ``why`` is the reason in the message.
    """
    # Pinned as a run pins them: the digest of a candidate must be that of the settings that are run.
    found = [with_pinned_weights(config) for config in configs if suits(config)]
    if len(found) < 2 or len(found) < len(configs):
        others = sorted({config.method for config in configs} - {config.method for config in found})
        got = ", ".join(others) or f"{len(configs)} of them"
        raise ConfigError(
            f"methods: expected at least two settings to choose from, all of methods {words}; got {got}. Change "
            "methods or grids in CONFIG."
        )
    first = found[0]
    for config in found[1:]:
        if changes := changed_fields(of_all(first), of_all(config)):
            raise ConfigError(
                f"methods: settings differ in {'; '.join(changes.values())}; give these fields one value, because "
                f"{why}."
            )
    if first.data.split is None or not first.data.split.validation_share:
        raise ConfigError(
            "data.split: a choice of settings needs validation records that nothing else reads; set "
            "data.split.validation_share to a share above 0."
        )
    return found


def group_weights(dataset: Dataset, shares: Shares) -> IntArray:
    """Return, for each group, the weight (G,) that a correct prediction on one of its records adds to the score of a
    model: at most ``WEIGHT``, and inversely proportional to the group's population share in ``shares``. Without
    ``shares`` every group has the weight ``WEIGHT``.

    ConfigError unless ``shares`` has a share in (0, 1] for exactly the groups of the data.
    """
    if shares is None:
        return np.full(dataset.num_groups, WEIGHT, np.int64)
    if set(shares) != set(dataset.group_names) or not all(0 < share <= 1 for share in shares.values()):
        raise ConfigError(
            "--share: expected a number above 0 and at most 1 for each of the groups "
            f"{', '.join(dataset.group_names)}, got {dict(shares)}; give --share GROUP=SHARE once for each group."
        )
    # The smallest group weighs the most: WEIGHT, the bound of what one unit adds to a score.
    least = min(shares.values())
    return np.array([int(WEIGHT * least / shares[name]) for name in dataset.group_names], np.int64)


def score_of(student: Student, validation: Split, weights_G: IntArray, source: NoiseSource) -> int:
    """Return the score of ``student`` in a choice among models: the summed weights of the validation records that it
    predicts correctly. The records of one person share the weight of one record. ``source`` gives the random bits for
    students that draw labels at random."""
    labels_N, _ = lone_predictions(student, validation, source)
    right_N = labels_N == validation.y.numpy()
    # Rounded down record by record: those of a person never add up to more than one weight.
    return int((weights_G[validation.z.numpy()] // records_of_unit(validation))[right_N].sum())


def choice_among(scores_M: Sequence[int], event: PureReleases, source: NoiseSource) -> ReleasedArrays:
    """Choose one of several models by the exponential mechanism, and return its index as a release. ``scores_M`` are
    the models' scores; ``event`` is the privacy event of the choice, and fixes its epsilon. The draw has exactly the
    mechanism's probabilities: no floating-point number is involved."""
    # The textbook mechanism halves the exponent, which scores that change in one direction do not need.
    sensitivity = Fraction(WEIGHT, 2) if event.relation == "add or remove one" else Fraction(WEIGHT)
    # Exact fractions: probabilities in floating point would leak through their rounding (Ilvento 2020).
    costs = [Fraction(-score) for score in scores_M]
    place = choose_cheap(costs, sensitivity=sensitivity, epsilon=event.epsilon, source=source)
    return ReleasedArrays(arrays={"chosen": np.array([place], np.int64)}, events=(event,))


class TrialsError(UserError):
    """Raised if every trial, a training in a choice among settings, failed, so that there is no model; the privacy cost
    was charged nevertheless."""


# Errors that noise may cause in a trial: the trial then counts as the worst, as an error message would reveal it.
MAY_FAIL = (UserError, ValueError, ArithmeticError, RuntimeError)


@contextmanager
def unheard() -> Iterator[None]:
    """Context manager: suppress progress, warnings and logs inside the ``with`` block, in which secret trials run,
    because these messages would reveal the number of trials or a trial that was not chosen."""
    # Restored afterwards, as the caller may have disabled some levels itself.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with heard_by(lambda *_: None), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The plan of a choice among trainings (trials): a secret random number of them is run, and the model with the best
    noisy score is published.

    ``epsilon`` is that of one training. ``trainings`` is the privacy event of all trainings together, and ``scores``
    that of all noisy scores. Each of the two has the ``cost`` that the user asked for; the costs do not add up, because
    trainings and scores read disjoint records. Each score has noise of standard deviation ``noise_stddev_records``, in
    records.
    """

    epsilon: float
    cost: Price
    trainings: SecretTrials
    scores: SecretTrials
    noise_stddev_records: float

    def with_noise(self, exact: int, source: NoiseSource) -> int:
        """Return the integer score ``exact`` of a trained model plus noise of the planned standard deviation, drawn
        from ``source``."""
        return exact + discrete_gaussian.sample_discrete_gaussian(self.noise_stddev_records * WEIGHT, source)

    def charge(
        self,
        logs: Sequence[ReleaseLog],
        data: str,
        reporter: Reporter,
        *,
        is_own: bool,
        units: int | None,
        also_tests: bool = False,
    ) -> None:
        """Announce the privacy cost of the planned trials on the data set ``data``, then charge all trainings and all
        scores to the odometer (the database of privacy costs).

        ``logs``: the release logs of trainings and of scores. ``also_tests``: private metrics on test records will
        follow, at the same cost, so their limit is checked too. ``is_own``: the records are the user's own, so a high
        cost needs the user's confirmation. ``units``: the public number of protected units; None: not public.
        LimitReachedError, with nothing charged, if a limit of the odometer would be exceeded.
        """
        counted = list(zip(logs, (self.trainings, self.scores), strict=True))
        # All limits before the first charge: a refusal later would leave charges without a model.
        for log, event in counted:
            log.check([event], noise=OS_ENTROPY)
        announce_spending(self.cost, data, reporter, is_own=is_own)
        announce_delta(self.cost.delta, units, self.cost.unit, reporter, is_own=is_own)
        if also_tests:
            logs[0].of_part("test").check([table_event(self.cost)], noise=OS_ENTROPY)
        for log, event in counted:
            log.charge([event], noise=OS_ENTROPY)


def _at(config: Any, epsilon: float) -> Any:
    """Return the settings ``config`` of a training with another target ``epsilon``."""
    return config.model_copy(update={"target": config.target.model_copy(update={"epsilon": epsilon})})


def plan_trials(
    candidates: Sequence[tuple[Any, Dataset]], *, epsilon: float, delta: float, expected_trials: float
) -> Trials:
    """Return a plan for a secret random number of trainings (trials), ``expected_trials`` on average. Together they
    cost at most ``epsilon`` at ``delta``, and at least 99.5 % of it.

    ``candidates``: the settings that trials draw from, each with its data set. ConfigError for a method whose privacy
    events are not known before training, for events without Renyi curves, and if all trials exceed ``epsilon`` even
    when each of them trains at the least possible epsilon.
    """
    of_one = epsilon
    # Step by step: no formula gives the cost of one trial from that of all.
    while True:
        found = []
        for config, dataset in candidates:
            events = _at(config, of_one).planned_events(dataset)
            if events is None:
                known = [
                    f"{name} {method.known_before}".rstrip()
                    for name, method in all_methods().items()
                    if method.known_before is not None
                ]
                raise ConfigError(
                    f"method: the privacy cost of {config.method} is not known before it trains, but trials are "
                    f"charged beforehand; choose one of {', '.join(known)}."
                )
            found.append(events)
        # Settings with the same events are one kind of trial, so that the joint cost is computed for few.
        trials = tuple(dict.fromkeys(found))
        unit, relation = trials[0][0].unit, trials[0][0].relation
        try:
            trainings = SecretTrials(expected_trials=expected_trials, trials=trials, unit=unit, relation=relation)
            spent = accountant.epsilon([trainings], target_delta=delta).epsilon
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"methods: the joint privacy cost of all trials cannot be computed ({error}); choose other methods."
            ) from error
        if 0.995 * epsilon <= spent <= epsilon:
            break
        # The price of all grows nearly in proportion to that of one; a little less, so that the last step fits.
        of_one *= 0.998 * epsilon / spent
        if not of_one > epsilon / 1000:
            raise ConfigError(
                f"--trials {expected_trials:g}: too many to stay within epsilon {epsilon:g} at delta {delta:g}; raise "
                "epsilon, or lower --trials."
            )

    def of_scores(noise: float) -> tuple[SecretTrials]:
        score = PredictionTables(count=1, noise_stddev_records=noise, weight=WEIGHT, unit=unit, relation=relation)
        return (SecretTrials(expected_trials=expected_trials, trials=((score,),), unit=unit, relation=relation),)

    noise = accountant.least_noise(of_scores, target_epsilon=epsilon, target_delta=delta)
    return Trials(
        epsilon=of_one,
        cost=Price(epsilon=epsilon, delta=delta, unit=unit, relation=relation, accounting="rdp"),
        trainings=trainings,
        scores=of_scores(noise)[0],
        noise_stddev_records=noise,
    )


@dataclass(frozen=True, kw_only=True)
class _TrialsFolder(RunDirectory):
    """The file paths of a choice among trainings (trials), which is charged under a receipt of its own. The receipt,
    the record of what was charged, is in ``workplace``, because ``root``, the folder of the published run, is created
    only after the last trial."""

    receipt = PathIn("workplace", "release.json")

    @property
    def workplace(self) -> Path:
        """The folder with the files of all trials; it must not be published, and is erased after the last trial."""
        return self.root.parent / "trials"


@dataclass(frozen=True, kw_only=True)
class _ScoresFolder(_TrialsFolder):
    receipt = PathIn("workplace", "choice_release.json")


def select_by_trials(
    configs: Sequence[Method],
    *,
    epsilon: float,
    expected_trials: float,
    out: Path,
    reporter: Reporter,
    group_shares: Shares = None,
) -> RunDirectory:
    """Run a secret random number of trainings (trials), each with settings drawn at random, and publish the model with
    the best noisy score in ``out / "model"``. A repeated call resumes.

    ``configs``: the settings that trials draw from; their own ``target.epsilon`` is not read. ``epsilon``: the privacy
    cost of all trainings together, and also the cost of all scores, at the settings' ``target.delta``.
    ``expected_trials``: the mean number of trials. ``group_shares`` as in :func:`select_settings`. ConfigError for
    settings whose privacy events are not known before training or that read different records, TrialsError if every
    trial failed; other errors as in :func:`fairpate.run.run.run_method`.
    """
    run = RunDirectory(root=out / "model")
    candidates = _candidates(
        configs,
        "with a target",
        suits=lambda config: config.meets_target,
        of_all=lambda config: {
            "data": config.data.model_dump(mode="json", exclude={"embedding"}),
            "target": {"delta": config.target.delta, "relation": config.target.relation},
            "noise": config.noise,
            "evaluation": config.evaluation.model_dump(mode="json"),
        },
        why="all trials are charged together",
    )
    if candidates[0].noise != OS_ENTROPY:
        raise ConfigError(
            f"noise: a choice by --trials needs {OS_ENTROPY}, got {candidates[0].noise}; leave out the field noise."
        )
    first, datasets, loaded = candidates[0], list[Dataset](), dict[str, Dataset]()
    with reporter.stage("data"):
        for config in candidates:
            key = config.data.model_dump_json()  # most candidates have the same data: it is loaded once
            dataset = loaded[key] = loaded[key] if key in loaded else load_data(config.data)
            check_data(config, dataset)
            require_kept_names(config, dataset)
            # Quiet: each candidate would report its weights file again.
            check_model_files(config, dataset, Reporter(quiet=True))
            datasets.append(dataset)
    dataset = datasets[0]
    weights = group_weights(dataset, group_shares)
    budget = {"epsilon": epsilon, "delta": first.target.delta, "expected_trials": expected_trials}
    with reporter.stage("plan"):
        plan = plan_trials(list(zip(candidates, datasets, strict=True)), **budget)
    planned = [_at(config, plan.epsilon).model_copy(update={"out": run.root}) for config in candidates]
    settings = {
        "candidates": [values_digest(config.settings_without()) for config in planned],
        "group_weights": weights.tolist(),
        "epsilon": epsilon,
        "expected_trials": expected_trials,
        "parts": dataset.parts,
    }
    make_folder(out)
    with sole_worker(out, "fairpate select"):
        folder, of_scores = _TrialsFolder(root=run.root), _ScoresFolder(root=run.root)
        state_file = folder.workplace / "state.json"
        # The best model is published and its trials are erased: only files that follow from it may be missing.
        if run.student.exists():
            kept, origin = read_release(run.choice)
            if changed_fields(origin.settings, settings):
                raise RunFolderError(
                    f"{run.root}: contains the result of a choice among other settings; give another folder with --out."
                )
            shutil.rmtree(folder.workplace, ignore_errors=True)
            return run_method(planned[int(kept.arrays["chosen"][0])], reporter)
        private_folder(folder.workplace)
        part = dataset.parts
        logs = [
            ReleaseLog(each, Odometer(), data=dataset.name, method="secret trials", part=name and f"{part}/{name}")
            for each, name in ((folder, dataset.part and "private"), (of_scores, dataset.part and "validation"))
        ]
        # A copy of a folder whose trials were drawn is another run, with other noise: it pays too.
        if not state_file.exists() or any(log.stored() is None for log in logs):
            also_tests, units = first.evaluation.metrics == "private", public_units(first, dataset)
            is_own = first.data.declaration is not None
            plan.charge(logs, dataset.name, reporter, is_own=is_own, units=units, also_tests=also_tests)
        if not state_file.exists():
            # Charged, then drawn, then stored, then tried: a crash before this line has drawn nothing that was used.
            source = OsEntropy()
            drawn = [source.randbelow(len(planned)) for _ in range(plan.trainings.draw(source))]
            # With the date: a run that is dated by its last trial would show how long all of them took, a hint of K.
            begun = {"settings": settings, "drawn": drawn, "environment": environment()}
            write_json(state_file, begun, private=True)
        state = read_json(state_file)
        if changes := changed_fields(state["settings"], settings):
            raise RunFolderError(
                f"{out}: the trials in this folder were charged under other settings ({'; '.join(changes.values())}); "
                "set these fields back, or give another folder with --out."
            )
        reporter.note("trials", f"a secret number of trials, {expected_trials:g} expected; none of them is displayed")
        trials = [(planned[number], datasets[number]) for number in state["drawn"]]
        best, outcome = _best_trial(trials, plan, weights, folder.workplace)
        receipt, chosen = read_receipt(folder), state["drawn"][best]
        assert receipt is not None
        student = load_student(folder.workplace / f"{best}.safetensors")
        made = ReleasedArrays(arrays={"chosen": np.array([chosen], np.int64)}, events=(plan.scores,))
        done = publish_trained(
            planned[chosen],
            replace(student, embedding=datasets[chosen].embedding),
            counted_by=receipt,
            choice=(made, Origin(id=logs[1].id, settings=settings, pool="")),
            remarks=outcome["remarks"],
            environment=state["environment"],
            reporter=reporter,
        )
        shutil.rmtree(folder.workplace)
    return done


def _best_trial(
    trials: Sequence[tuple[PrivateMethod, Dataset]], plan: Trials, weights_G: IntArray, folder: Path
) -> tuple[int, dict[str, Any]]:
    """Run those of ``trials``, settings with their data sets, whose outcome is not stored in ``folder`` yet; return the
    index and the outcome of the trial with the best noisy score."""
    source, outcomes = OsEntropy(), []
    with unheard():
        for place, (config, dataset) in enumerate(trials):
            path, model = folder / f"{place}.json", folder / f"{place}.safetensors"
            if not path.exists():
                outcome: dict[str, Any] = {"score": None, "remarks": []}
                try:
                    work = RunDirectory(root=folder / f"{place}")
                    trained, student = trained_student(config, dataset, work, Reporter(quiet=True))
                except MAY_FAIL:
                    pass
                else:
                    require_planned(trained.events, plan.trainings)
                    bare = replace(student, embedding=None)  # the records are embedded already
                    exact = score_of(bare, dataset.validation, weights_G, source)
                    outcome = {"score": plan.with_noise(exact, source), "remarks": list(trained.remarks)}
                    write_atomically(model, partial(save_student, bare), private=True)
                # Written last, since this file marks the trial as done: by now its model is stored.
                write_json(path, outcome, private=True)
            outcomes.append(read_json(path))
    # Of equal scores the first: trials are exchangeable, so that this is a fair draw among them.
    scores = [-math.inf if each["score"] is None else each["score"] for each in outcomes]
    best = scores.index(max(scores))
    if outcomes[best]["score"] is None:
        raise TrialsError(
            "select: every trial failed, so there is no model, and the privacy cost was charged; try the settings on "
            "made-up records until they work, and select again."
        )
    return best, outcomes[best]


def require_planned(events: Sequence[Event], trainings: SecretTrials) -> None:
    """Raise RuntimeError if a trial has privacy events (``events``) that are not among those charged for one of the
    planned ``trainings``."""
    if not any(covering(each, events) == each for each in trainings.trials):
        raise RuntimeError(
            f"A trial had privacy events that were not charged: {events}; report this as a defect of the method."
        )
