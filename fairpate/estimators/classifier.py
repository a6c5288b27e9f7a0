"""A classifier of any method: what it is given, what it learns, what it predicts.

Shapes: N private records, M public ones, C classes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from fairpate.app.run import train_model
from fairpate.app.seeds import Stream, stream_seed
from fairpate.app.spending.stating import statement_of
from fairpate.app.terminal.progress import Reporter
from fairpate.data.embedding import embedded
from fairpate.estimators import kept, refusals, told
from fairpate.estimators.parameters import (
    Sizes,
    configuration_of,
    follows_from_size,
    parameters_of,
    seed_of,
    settings_in,
    with_setting,
)
from fairpate.estimators.pipelines import fitted_steps, passes_public_on, steps_in_front
from fairpate.estimators.records import (
    Records,
    dataset_of,
    features,
    person_names,
    private_records,
    public_records,
    records_like,
)
from fairpate.methods.definition import Method
from fairpate.methods.fitted import ONE_RELEASE
from fairpate.types import PrivacyStatement, Unit

Labels = npt.NDArray[Any] | np.ma.MaskedArray[Any, Any]
_NO_SIZES = Sizes(num_records=1, num_public=1)


class FairClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Any method as a classifier.

    ``method`` is a name of `fairpate methods`, or ``module:Class`` of one's own. Every section of its configuration is
    a parameter, given as the section or as a mapping of what is said: ``target``, ``student``, ``public_data``,
    ``noise``, and those of the method itself, such as ``dp_fermi``. What is not said follows from public facts, as for
    a command without a configuration: from the number of private records, the number of public ones, and whether they
    are pictures. Single settings are reached as ``dp_fermi__weight``, in ``set_params`` and in searches. Besides:

    - ``epsilon``, ``delta``, ``model``, ``idp3``, ``calibration``: short for ``target.epsilon``, ``target.delta``,
      ``student.model``, ``student.idp3`` and ``public_data.calibration``, and stand above them; None says nothing.
    - ``public_X``, ``public_sensitive_features``: public records, where ``fit`` is not given them; a number draws so
      many of independent standard normal features, where there is no public record.
    - ``sensitive_feature``: the column of ``X`` that holds the groups, by name or place; it is no feature then. A
      mapping of ``column`` and ``edges`` divides numbers, such as ages, between public edges.
    - ``embedding``: what is seen of a record, as ``data.embedding``: a mapping; None, the record as it is; "auto", an
      embedding of public records where there are some and whole records are protected.
    - ``num_records``: a public number of private records, or of persons where ``fit`` is told them, by which settings
      are chosen; None takes the real one, which then counts as public, and the statement says so.
    - ``folder``, of methods that ask teachers: where teachers, votes and the ledger stay. None: a temporary folder.
    - ``progress``: whether ``fit`` shows how far it is.
    - ``random_state``: an integer is the ``seed`` of the configuration. It is no seed of secret samples and noise,
      which come from the operating system unless ``noise`` is ``seeded``.

    After ``fit``: ``classes_``; ``groups_``, the names of groups that were seen; ``n_features_in_`` and
    ``feature_names_in_``; ``network_`` and ``student_``, the published model, with the embedding that it reads;
    ``trained_``, all that the method released; ``events_``, what touched private records; ``privacy_``, what they cost
    together; ``noise_``, where the noise came from; ``config_``, what ran. A search over settings trains on the same
    records many times: each training costs ``privacy_`` again, and none is counted in the operator's odometer.

    >>> FairClassifier("dp_fermi", epsilon=1.0, dp_fermi={"weight": 2.0}, random_state=0)
    FairClassifier(method='dp_fermi', epsilon=1.0, dp_fermi={'weight': 2.0}, random_state=0)
    """

    def __init__(self, method: str = ONE_RELEASE, **settings: Any) -> None:
        if not isinstance(method, str):
            raise TypeError(f"method: expected a name, got {method!r}.")
        known = parameters_of(method)
        unknown = sorted(settings.keys() - known.keys())
        if unknown:
            raise TypeError(f"{method} has no parameter {unknown[0]!r}; it has {', '.join(known)}.")
        self.method = method
        for name, value in (known | settings).items():
            setattr(self, name, value)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; with ``deep`` also the settings in sections, as ``section__setting``."""
        defaults = parameters_of(self.method).items()
        own = {"method": self.method} | {name: getattr(self, name, default) for name, default in defaults}
        return own | (dict(settings_in(own)) if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Set parameters, and settings in sections as ``section__setting``. ValueError for a name there is not."""
        if "method" in params:
            if not isinstance(params["method"], str):
                raise ValueError(f"method: expected a name, got {params['method']!r}.")
            parameters_of(params["method"])  # a method that there is not changes nothing
            self.method = params["method"]
        known = self.get_params(deep=False)
        for path in sorted(params, key=lambda path: path.count("__")):  # a section before what is in it
            name, *inner = path.split("__")
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for {self.method}; it has {', '.join(known)}.")
            setattr(self, name, with_setting(getattr(self, name, known[name]), inner, params[path]))
        return self

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
        """Train on private ``X``, ``y`` (N,) and, where the method reads them, ``sensitive_features`` (N,).

        ``X``: tables (N, F), or images (N, channels, height, width), bytes or floats. ``public_X`` (M, ...) and
        ``public_sensitive_features`` (M,) have no labels. ``persons`` (N,) says whose each record is: all records of a
        person are protected together then. The sets of classes and groups count as public. ValueError
        for settings out of range, naming the field; for records that are needed and absent, of other lengths or
        columns, missing, or not finite; for public records that did not go through the steps of a pipeline that ``X``
        went through; and where a method that protects the group alone is given it, or an encoding of it, as a column
        of ``X``.
        """
        seed = seed_of(self.random_state)
        private, labels = private_records(self, X, y, sensitive_features)
        public = self._public(public_X, public_sensitive_features, seed)
        whose = person_names(persons, len(private.x))
        protected = whose.num_distinct if whose else len(private.x)
        sizes = Sizes(num_records=self._declared(protected), num_public=0 if public is None else len(public.x))
        config = self._configuration(sizes, seed=seed)
        # All refusals before training: what it releases is spent, whatever fails afterwards.
        refusals.require_inputs(config, private, public)
        refusals.require_classes(config, labels)
        refusals.require_persons_protected(config, given=bool(whose))
        dataset, classes, group_names = dataset_of(
            private.x,
            labels,
            private.groups if config.reads_groups else None,
            persons=whose,
            public_X=None if public is None else public.x,
            public_sensitive_features=None if public is None else public.groups,
        )
        dataset = embedded(dataset, config.data.embedding)
        with _folder(getattr(self, "folder", None)) as folder:
            trained, student = train_model(config, dataset, Reporter(quiet=not self.progress), folder=folder)
        self.classes_, self.groups_ = classes, group_names
        # The data set of the configuration is the records that were given, not the one that commands have by default.
        self.config_ = config.model_copy(update={"data": config.data.model_copy(update={"name": dataset.name})})
        self.trained_, self.student_, self.network_ = trained, student, student.network
        self.events_, self.noise_, self.privacy_ = trained.events, trained.noise, config.price(trained)
        self.statement_ = statement_of(config, trained, remarks=self._remarks(sizes, dataset.unit))
        return self

    def predict_proba(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float32]:
        """Probabilities (N, C), columns as ``classes_``; of a randomised classifier, how often it says each label.

        ``sensitive_features`` (N,) are needed where predictions are mixed by group. NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        records = records_like(self, X, sensitive_features)
        return self.student_.probabilities(features(records.x), self._codes(records.groups))

    def predict(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None, random_state: Any = None
    ) -> Labels:
        """Labels (N,); with ``idp3`` a masked array, masked where the gate refuses.

        ``idp3`` and predictions mixed by group need ``sensitive_features`` (N,), or their column. A randomised
        classifier draws, the same at every call unless ``random_state`` says otherwise. NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        seed = stream_seed(self.config_.seed, Stream.PREDICTION) if random_state is None else seed_of(random_state)
        records = records_like(self, X, sensitive_features)
        student = told.student_for(self, records.groups)
        predicted = student.predict(
            features(records.x), self._codes(records.groups), generator=np.random.default_rng(seed)
        )
        labels: npt.NDArray[Any] = self.classes_[predicted.labels]
        return labels if self.student_.card.idp3 is None else np.ma.masked_array(labels, mask=~predicted.answered)

    def score(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        sample_weight: npt.ArrayLike | None = None,
        *,
        sensitive_features: npt.ArrayLike | None = None,
    ) -> float:
        """The share of right labels among those that are answered; NaN where none is."""
        labels = self.predict(X, sensitive_features=sensitive_features)
        answered = ~np.ma.getmaskarray(labels)
        if not answered.any():
            return float("nan")
        weights = None if sample_weight is None else np.asarray(sample_weight)[answered]
        return float(accuracy_score(np.asarray(y)[answered], np.asarray(labels)[answered], sample_weight=weights))

    def statement(self) -> PrivacyStatement:
        """What may be claimed of the fitted model: as a run publishes it. NotFittedError before ``fit``."""
        check_is_fitted(self, "student_")
        return self.statement_

    def save(self, path: Path | str) -> Path:
        """Write the fitted model to a new folder, without pickle: all that predictions need, and the statement.

        Private and public records, and what was released on the way (``trained_``), are not in it. NotFittedError
        before ``fit``; FileExistsError where something is at ``path``.
        """
        check_is_fitted(self, "student_")
        return kept.save(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The model that :meth:`save` wrote: the same predictions. StudentFileError for a damaged or other folder."""
        loaded: Self = kept.load(cls, Path(path))
        return loaded

    def card(
        self, folder: Path | str, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, **use: Any
    ) -> tuple[Path, Path]:
        """Write the privacy-and-fairness card, measured on test records, to a new run folder: HTML and JSON.

        ``use``: ``intended_use``, ``out_of_scope`` and ``contact``, in your words. Returns the paths of both.
        """
        check_is_fitted(self, "student_")
        return told.write_card_of(self, Path(folder), X, y, sensitive_features, use)

    def plot(self, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, ax: Any = None) -> Any:
        """Accuracy on test records, overall and by group, beside always saying the most common label.

        The title says what it costs: epsilon, disparity and coverage. Returns matplotlib's axes, ``ax`` or new ones.
        """
        check_is_fitted(self, "student_")
        return told.plot(self, X, y, sensitive_features, ax)

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        defaults = {"method": None} | parameters_of(self.method)
        said = (f"{k}={_short(v)}" for k, v in self.get_params(deep=False).items() if _short(v) != _short(defaults[k]))
        text = f"{type(self).__name__}({', '.join(said)})"
        return text if len(text) <= N_CHAR_MAX else f"{text[:N_CHAR_MAX]}..."

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """For notebooks: scikit-learn's diagram, and above it what may be claimed of a fitted model."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {kind: told.in_notebook(self) * (kind == "text/html") + text for kind, text in bundle.items()}

    def _repr_html_inner(self) -> str:
        return told.in_notebook(self) + str(super()._repr_html_inner())

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = getattr(self, "noise", "seeded") != "seeded"
        # Voters of a drawn pool, and features without the sensitive one, are not held to a score on 300 records.
        tags.classifier_tags.poor_score = isinstance(self.public_X, int) or self.sensitive_feature is not None
        tags.classifier_tags.multi_class = not self._learns_two_classes
        return tags

    @property
    def _learns_two_classes(self) -> bool:
        try:
            return self._configuration(seed=0).learns_two_classes
        except ValueError:  # told by fit
            return False

    def _configuration(self, sizes: Sizes = _NO_SIZES, *, seed: int | None = None) -> Method:
        """What the parameters say for so many records. ConfigError, a ValueError, for every fault with its field."""
        given = self.get_params(deep=False)
        return configuration_of(self.method, given, sizes, seed=seed_of(self.random_state) if seed is None else seed)

    def _declared(self, real: int) -> int:
        if self.num_records is not None and self.num_records < 1:
            raise ValueError(f"num_records: expected a positive number or None, got {self.num_records}.")
        return real if self.num_records is None else int(self.num_records)

    def _public(self, x: Any, groups: Any, seed: int) -> Records | None:
        """Public records as they were given to ``fit``, or else to the constructor."""
        in_fit = x is not None
        if not in_fit:
            x, groups = self.public_X, self.public_sensitive_features if groups is None else groups
        if x is None:
            if groups is not None:
                raise ValueError("Expected public_X with public_sensitive_features, got the groups alone.")
            return None
        if not isinstance(x, int | np.integer):
            missed = [each for each in steps_in_front() if not (in_fit and passes_public_on(each))]
            if missed:
                raise ValueError(
                    "public_X: the pipeline's steps change X and not public_X, which would make them incomparable; "
                    "make it Pipeline(..., transform_input=['public_X']) with sklearn's metadata routing "
                    "(docs/python.md, A scaler in front), or leave the steps out."
                )
        return public_records(self, x, groups, seed=stream_seed(seed, Stream.PUBLIC_POOL))

    def _remarks(self, sizes: Sizes, unit: Unit) -> tuple[str, ...]:
        """What qualifies the claim of an estimator beside that of a run."""
        is_private = self.privacy_.relation == "add or remove one" and self.num_records is None
        follows = is_private and follows_from_size(self.method, self.get_params(deep=False), sizes)
        return told.remarks(fitted_steps(steps_in_front()), size_of=f"{unit}s" if follows else None)

    def _codes(self, groups: npt.NDArray[Any] | None) -> npt.NDArray[np.int64] | None:
        """Codes of groups, where predictions need them; where ``fit`` saw none, those of the groups that are given."""
        if groups is None or not self.student_.card.needs_group:
            return None
        names = self.groups_ if len(self.groups_) else np.unique(groups)
        if not np.isin(groups, names).all():
            raise ValueError(f"Expected sensitive_features among {names.tolist()}, got {np.unique(groups).tolist()}.")
        return np.searchsorted(names, groups)


def _short(value: Any) -> str:
    """A parameter in a representation: of records, their shape alone."""
    shape = getattr(value, "shape", None)
    return f"<{type(value).__name__} {'x'.join(map(str, shape))}>" if shape else repr(value)


@contextmanager
def _folder(folder: Path | str | None) -> Iterator[Path]:
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="fairpate-") as root:
        yield Path(root)
