"""Search settings within a privacy guarantee: :class:`FairSearchCV` keeps the best of a secret random number of trials,
and :func:`announce_search` checks an odometer before one of scikit-learn's own searches.
"""

import hashlib
import itertools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import GridSearchCV, ParameterGrid, RandomizedSearchCV, check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import Tags, _safe_indexing, get_tags
from sklearn.utils.validation import check_is_fitted

from fairpate import config as configuration
from fairpate.data.dataset import Dataset, keyed_uniform
from fairpate.data.from_arrays import NO_GROUP, NO_PERSON, checked_records, dataset_of, person_names, records_of
from fairpate.data.given import values_of
from fairpate.estimators import FairClassifier, LabelArray, delta_caution_of, seed_of
from fairpate.files import private_folder
from fairpate.methods.base import price
from fairpate.pages import epsilon_text
from fairpate.privacy.discrete_gaussian import OS_ENTROPY, OsEntropy
from fairpate.releases.directory import RunDirectory
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import Odometer, spent
from fairpate.run import choice
from fairpate.run.choice import score_of
from fairpate.run.forecast import public_units, question_above
from fairpate.run.private_metrics import WEIGHT, require_kept_names
from fairpate.run.statement import statement_of
from fairpate.terminal import Reporter
from fairpate.types import REMARKS, PrivacyStatement


class FairSearchCV(MetaEstimatorMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A search over settings within the privacy guarantee: the best of a secret random number of trials is kept.

    ``fit`` draws a secret number of trials K. In each trial it draws one of the settings in ``param_grid`` at random
    and trains a copy of ``estimator`` with it. The model with the best score is kept; the other models and K are
    discarded (:class:`fairpate.privacy.mechanism_events.SecretTrials`). A score is the noisy number of correct
    predictions among validation records. These are a share of the records, or of the persons, selected by a keyed hash
    of their content or name, and no training reads them. So trainings and scores compose in parallel, and together cost
    ``epsilon`` at ``delta``.

    - ``estimator``: a :class:`FairClassifier` of a method whose events are known before it trains: ``dp_sgd``,
      ``fair_dp_sgd``, ``weighted_votes``, ``record_votes``, ``ada_ssp``, or ``residual_votes`` with a curvature. Its
      own epsilon and delta are not read: the budget of all trials determines that of one.
    - ``param_grid``: parameters with their values, as for ``GridSearchCV``; fixed beforehand, without looking at ``X``.
    - ``expected_trials``: the expected number of trials; settings are drawn with replacement.
    - ``validation_share``: the share of records that are used only for scores.
    - ``group_shares``: a public population share for each group, so that the score weights all groups equally; None
      weights all records equally.
    - ``random_state``: the key of the hash; it seeds neither K nor the choice of settings.

    If the ``estimator`` has an ``odometer``, all trials and scores are charged to the operator's odometer at once.

    After ``fit``: ``best_estimator_``, ``best_params_`` and ``best_score_`` (the noisy number of correct predictions),
    ``classes_``, and as in :class:`FairClassifier` ``events_``, ``privacy_`` and ``statement_``, in which
    ``tuning_accounted`` is true. There is no ``cv_results_``: the guarantee does not cover results of other trials.
    Only the running time of ``fit`` reveals K.

    >>> search = FairSearchCV(FairClassifier("dp_sgd"), {"dp_sgd__learning_rate": [0.1, 0.5]}, epsilon=2.0)
    """

    def __init__(
        self,
        estimator: FairClassifier,
        param_grid: Any,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        expected_trials: float = 10.0,
        validation_share: float = 0.2,
        group_shares: Mapping[Any, float] | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator, self.param_grid = estimator, param_grid
        self.epsilon, self.delta, self.expected_trials = epsilon, delta, expected_trials
        self.validation_share, self.group_shares, self.random_state = validation_share, group_shares, random_state

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: npt.ArrayLike | None = None,
        public_X: npt.ArrayLike | int | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
        persons: npt.ArrayLike | None = None,
    ) -> Self:
        """Train the trials and keep the best model; arguments and errors as in :meth:`FairClassifier.fit`.

        ValueError also for fewer than two settings, for settings that change the privacy cost, and for methods whose
        events are not known before training; TrialsError if every trial failed, which costs the same.
        """
        settings = list(ParameterGrid(self.param_grid))
        priced = sorted({name for each in settings for name in each} & {"epsilon", "delta", "target", "noise"})
        if len(settings) < 2 or priced:
            got = f"{', '.join(priced)}, which all trials share" if priced else f"{len(settings)} of them"
            raise ValueError(
                f"param_grid: expected at least two settings with the same privacy cost, got {got}; correct the grid."
            )
        if not 0 < self.validation_share < 1:
            raise ValueError(
                f"validation_share: expected a number between 0 and 1, got {self.validation_share}; correct it."
            )
        base = clone(self.estimator).set_params(delta=self.delta)
        if base.declaration is not None:
            raise ValueError("estimator: a search needs encoded records; give arrays instead of a declaration.")
        seed, counted_as = seed_of(self.random_state), base.odometer
        base.odometer = None  # a row for each trial would reveal K
        X = records_of(X)
        checked = checked_records(base, X, sensitive_features, y, is_fit=True)
        labels = checked.labels
        assert labels is not None
        names = person_names(persons, len(labels))
        whole, *_ = dataset_of(checked.x, labels, checked.groups, persons=names)
        # By person, or by content: adding a unit moves no other.
        units = names or whole.private.unit_id
        is_training_N = keyed_uniform(units, seed=seed, purpose="parts") >= self.validation_share
        rows, kept_apart = np.flatnonzero(is_training_N), np.flatnonzero(~is_training_N)
        given: dict[str, Any] = {"public_X": public_X, "public_sensitive_features": public_sensitive_features}
        for name, each, missing in (
            ("sensitive_features", sensitive_features, NO_GROUP),
            ("persons", persons, NO_PERSON),
        ):
            values = None if each is None else values_of(each, name, missing=missing, may_mix=True)
            given[name] = None if values is None else values.ravel()[rows]
        # Frames keep their column names.
        x, y = _safe_indexing(X, rows), labels[rows]
        candidates = [clone(base).set_params(**each) for each in settings]
        prepared = [each.set_params(epsilon=self.epsilon)._prepared(x, y, **given) for each in candidates]
        for config, *_ in prepared:
            require_kept_names(config, whole)
            if not config.draws_fresh_noise:
                noise = "seeded" if config.is_seeded else "none"
                raise ValueError(
                    f"estimator: {config.method} with noise {noise} cannot be searched "
                    f"privately, because trials need fresh noise; set noise={OS_ENTROPY!r}, or choose a private method."
                )
        # Here and not in a trial, of which nothing is heard.
        config, dataset, *_ = prepared[0]
        sized = candidates[0]._with_public_size(config, dataset)
        if caution := delta_caution_of(config, sized):
            warnings.warn(caution, UserWarning, stacklevel=2)
        budget = {"epsilon": self.epsilon, "delta": self.delta, "expected_trials": self.expected_trials}
        plan = choice.plan_trials([(config, dataset) for config, dataset, *_ in prepared], **budget)
        shares = None if self.group_shares is None else {str(name): each for name, each in self.group_shares.items()}
        weights = choice.group_weights(whole, shares)
        validation = whole.private.take(kept_apart.tolist())
        if counted_as is not None:
            self._charge(plan, counted_as, whole, names, seed, public_units(config, sized))
        source, best = OsEntropy(), None
        with choice.unheard():
            for number in [source.randbelow(len(settings)) for _ in range(plan.trainings.draw(source))]:
                model = clone(candidates[number]).set_params(epsilon=plan.epsilon, progress=False)
                try:
                    model.fit(x, y, **given)
                except choice.MAY_FAIL:
                    # A trial that fails counts as the worst: its error would reveal something about it.
                    continue
                choice.require_planned(model.events_, plan.trainings)
                # A class that training records lack is never predicted: its code matches no prediction.
                known = {str(name): code for code, name in enumerate(model.classes_)}
                codes = np.array([known.get(name, -1) for name in whole.label_names])
                coded = replace(validation, y=torch.from_numpy(codes[validation.y.numpy()]))
                score = plan.with_noise(score_of(model.student_, coded, weights, source), source)
                # Of equal scores the first: trials are exchangeable, so that this is a fair draw among them.
                if best is None or score > best[0]:
                    best = score, number, model
        if best is None:
            raise choice.TrialsError(
                "FairSearchCV: every trial failed, and the privacy cost was spent; try the settings on made-up records "
                "before you search again."
            )
        score, number, model = best
        self.best_estimator_, self.best_params_, self.best_score_ = model, settings[number], score / WEIGHT
        self.classes_, self.n_features_in_ = model.classes_, model.n_features_in_
        if hasattr(model, "feature_names_in_"):
            self.feature_names_in_ = model.feature_names_in_
        self.events_ = (plan.trainings,)
        trained = replace(model.trained_, events=self.events_)
        parts = {"validation": (plan.scores,)}
        stated = {"parts": parts, "units": model.statement_.declared_units}
        own = statement_of(model.config_, trained, **stated).remarks
        own = own if counted_as is None else (*own, REMARKS["not_counted"])
        others = tuple(remark for remark in model.statement_.remarks if remark not in own)
        self.statement_ = statement_of(model.config_, trained, remarks=others, **stated)
        assert self.statement_.epsilon is not None
        # A unit is in one part, so the larger of the two costs holds.
        self.privacy_ = replace(price(self.events_, delta=self.delta), epsilon=self.statement_.epsilon)
        # The best model is known only by the choice: it states the cost of all trials, and not that of one.
        model.trained_, model.events_ = trained, self.events_
        model.privacy_, model.statement_ = self.privacy_, self.statement_
        return self

    def _charge(
        self,
        plan: choice.Trials,
        counted_as: str,
        whole: Dataset,
        names: Sequence[str] | None,
        seed: int,
        units: int | None,
    ) -> None:
        """Announce all trials, and charge them to the odometer, under the name ``counted_as``, as two releases from
        disjoint parts of the records ``whole``, of the persons ``names``; ``units``: their public number."""
        # Everything that assigns a unit to a part, as for a data set's hashed split: parts of one rule count as
        # disjoint, and records under other names, or names of other persons, are divided otherwise.
        digest = hashlib.sha256()
        for row in zip(whole.private.unit_id, names or itertools.repeat(""), strict=False):
            digest.update(repr(row).encode())
        division = (bool(names), digest.hexdigest(), seed, self.validation_share)
        rule, logs = f"search {hashlib.sha256(repr(division).encode()).hexdigest()[:16]}", []
        with tempfile.TemporaryDirectory(prefix="fairpate-") as root:
            for part in ("private", "validation"):
                run = RunDirectory(root=Path(root) / part)
                run.root.mkdir()
                private_folder(run.receipt.parent)
                part = f"{rule}/{part}"
                logs.append(ReleaseLog(run, Odometer(), data=counted_as, method="secret trials", part=part))
            reporter = Reporter(quiet=not self.estimator.progress)
            plan.charge(logs, counted_as, reporter, is_own=True, units=units)

    def predict(self, X: npt.ArrayLike, **given: Any) -> LabelArray:
        """Return the labels of the best model; arguments as in :meth:`FairClassifier.predict`."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict(X, **given)

    def predict_proba(self, X: npt.ArrayLike, **given: Any) -> npt.NDArray[np.float32]:
        """Return the probabilities of the best model; arguments as in :meth:`FairClassifier.predict_proba`."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict_proba(X, **given)

    def score(
        self, X: npt.ArrayLike, y: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None, **given: Any
    ) -> float:
        """Return the accuracy of the best model; arguments as in :meth:`FairClassifier.score`."""
        check_is_fitted(self, "best_estimator_")
        return float(self.best_estimator_.score(X, y, sample_weight, **given))

    def statement(self) -> PrivacyStatement:
        """Return the privacy statement of the best model, which covers the choice among all trials. NotFittedError
        before ``fit``."""
        check_is_fitted(self, "best_estimator_")
        return self.statement_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.input_tags, tags.classifier_tags = inner.input_tags, inner.classifier_tags
        # With the few records of scikit-learn's checks, noise may decide the result.
        tags.non_deterministic = tags.classifier_tags.poor_score = True
        return tags


def announce_search(search: Any, y: npt.ArrayLike) -> str:
    """Check, before a scikit-learn search over a :class:`FairClassifier`, that the odometer's limit has room for all
    its trainings. Return a sentence on what the search will spend. Call this before the search's ``fit``.

    Such a search (``GridSearchCV`` or ``RandomizedSearchCV``; its estimator may be a pipeline that ends in the
    classifier) trains once for each combination of settings and fold, and once more if it refits. Each training costs
    its epsilon, and the classifier's odometer adds them up. Without this check, a search that exceeds the limit fails
    midway, after its first trainings have been charged.

    ValueError if the sum is above the limit; UserWarning if there is no limit and the sum is above 10. TypeError for
    another kind of search, for a classifier without ``odometer`` or ``epsilon``, and if the search draws epsilon at
    random.
    """
    is_grid, is_drawn = isinstance(search, GridSearchCV), isinstance(search, RandomizedSearchCV)
    final = search.estimator.steps[-1][1] if isinstance(search.estimator, Pipeline) else search.estimator
    if not (is_grid or is_drawn) or not isinstance(final, FairClassifier) or final.odometer is None:
        raise TypeError(
            "search: expected a GridSearchCV or RandomizedSearchCV over a FairClassifier with odometer and epsilon; "
            "give one."
        )
    drawn = np.atleast_1d(search.param_distributions) if is_drawn else ()
    if any(name.endswith("epsilon") for each in drawn for name in each):
        raise TypeError(
            "param_distributions: the cost of an epsilon that is drawn at random is not known beforehand; set epsilon "
            "in the estimator."
        )
    settings = list(ParameterGrid(search.param_grid)) if is_grid else [{}] * search.n_iter
    costs = []
    for each in settings:
        model = clone(search.estimator).set_params(**each)
        model = model.steps[-1][1] if isinstance(model, Pipeline) else model
        if model.epsilon is None:
            raise TypeError(
                "epsilon: expected a number in every combination of settings, got None; set it in the estimator."
            )
        costs.append(model.epsilon)
    folds = check_cv(search.cv, y, classifier=True).get_n_splits(None, y)
    # Which settings are refitted is not known yet: at most the dearest.
    planned = folds * sum(costs) + (max(costs) if search.refit else 0.0)
    trainings = folds * len(settings) + bool(search.refit)
    delta = final.delta or configuration.PrivacyTarget().delta
    odometer = Odometer()
    question = question_above(final.odometer, planned=planned, odometer=odometer, delta=delta, is_own=True)
    if question and odometer.limits(final.odometer):
        raise ValueError(f"{question} Search fewer settings, or use FairSearchCV, which spends one epsilon.")
    if question:
        warnings.warn(f"{question} FairSearchCV spends one epsilon.", UserWarning, stacklevel=2)
    before = spent(final.odometer, odometer, delta=delta)
    return f"{trainings} trainings on {final.odometer}, of at most ε = {epsilon_text(planned)} in sum; so far {before}"
