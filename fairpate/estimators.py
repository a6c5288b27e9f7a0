"""scikit-learn's interface: :class:`FairClassifier` fits any method on arrays and frames, also inside pipelines.

The parameters are the sections of the method's configuration, as for the command line. Parameters that are left out are
chosen from facts that count as public (:mod:`fairpate.methods.base`): the number of records, the number of public ones,
and whether they are pictures.

A saved estimator is a folder without pickle and without private records; an embedding of pictures contains some public
ones:

    student.safetensors      the published model, as in the folder of a run
    config.yaml              its method and configuration
    embedding.safetensors    public numbers that embed a record, if the model reads embedded records
    estimator.json           names of columns, classes and groups, the privacy statement, sha256 of the other files

Shapes: N private records, M public ones, F features, C classes.
"""

import inspect
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import numpy as np
import numpy.typing as npt
import torch
import yaml
from pydantic import BaseModel
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.pipeline import Pipeline
from sklearn.utils import Tags, check_random_state, get_tags
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, column_or_1d

from fairpate import config as configuration
from fairpate.config import ConfigError, flattened, merge, nearest
from fairpate.data import Dataset, Split
from fairpate.data.dataset import sha256_of
from fairpate.data.declaration import read_declaration
from fairpate.data.embedding import save_embedding
from fairpate.data.from_arrays import (
    GIVEN,
    NO_LABEL,
    GivenRecords,
    SensitiveFeature,
    checked_records,
    dataset_of,
    dataset_with,
    declared_records,
    drawn_records,
    features,
    person_names,
    sensitive_column,
)
from fairpate.data.given import Values, values_of
from fairpate.data.overlap import PUBLIC_RECORD, doubts, require_no_copy
from fairpate.data.registry import embedded
from fairpate.fairness import group_tables
from fairpate.methods.base import Method, Price, Stream, configured, find_method
from fairpate.methods.defaults import FITTED, fitted_to, kind_of_teachers
from fairpate.methods.sections import Sections, Setting
from fairpate.pages import delta_caution, epsilon_text
from fairpate.privacy.mechanism_events import event_from
from fairpate.releases.directory import write_json
from fairpate.run.folder import create_run_directory, record_data
from fairpate.run.forecast import public_units
from fairpate.run.private_metrics import assess
from fairpate.run.publication import fitted_html, write_card
from fairpate.run.run import train_model
from fairpate.run.statement import stated_units, statement_of
from fairpate.run.tracking import log_to_mlflow
from fairpate.terminal import Reporter, require_extra
from fairpate.types import REMARKS, PrivacyStatement, restored, stream_seed, strict
from student.card import StudentFileError
from student.student import Prediction, Student, load_student, save_student

# An estimator's statement names no earlier releases: by default no odometer charges what it releases.
_NO_PARAMETERS = ("method", "out", "names_earlier", "seed", "data")
_SHORT = {
    "epsilon": ("target", "epsilon"),
    "delta": ("target", "delta"),
    "model": ("student", "model"),
    "idp3": ("student", "idp3"),
    "calibration": ("public_data", "calibration"),
}
_OF_ESTIMATORS = {
    "embedding": "auto",
    "odometer": None,
    "declaration": None,
    "sensitive_feature": None,
    "public_X": None,
    "public_sensitive_features": None,
    "num_records": None,
    "progress": False,
    "random_state": None,
}
# So far apart that every setting that depends on the size differs between them.
_FEWEST, _MOST = 1, 10**9


@cache
def parameters_of(method: str) -> dict[str, Any]:
    """Return the name and default of every parameter of a classifier of ``method``."""
    schema = find_method(method)
    own = {name: value for name, value in schema() if name not in _NO_PARAMETERS}
    # A short name exists only where the method has the field: sgd has no epsilon.
    short = [name for name, (section, field) in _SHORT.items() if field in type(own[section]).model_fields]
    # A section defaults to None, not to its values: only given values override the choice from public facts.
    sections = {name: None if isinstance(value, BaseModel) else value for name, value in own.items()}
    folder = {"folder": None} if schema.asks_teachers else {}
    return dict.fromkeys(short) | sections | folder | _OF_ESTIMATORS


def _settings_in(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in sections and mappings as pairs of name (``section__setting``) and value."""
    for name, value in sections.items():
        if prefix:
            yield f"{prefix}{name}", value
        if isinstance(value, dict | BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
            yield from _settings_in(value if isinstance(value, dict) else vars(value), f"{prefix}{name}__")


def _with_setting(section: Any, path: list[str], value: Any) -> Any:
    """Return a copy of ``section`` as a mapping in which the setting at ``path`` has the new ``value``; only ``fit``
    validates it."""
    if not path:
        return value
    values = _plain(section)
    if isinstance(values, str):  # the short form of an architecture
        values = {"name": values}
    values = values if isinstance(values, dict) else {}
    return values | {path[0]: _with_setting(values.get(path[0]), path[1:], value)}


def _plain(value: Any) -> Any:
    """Return ``value`` with sections and mappings as plain dicts, and numpy values as Python's. Of a section, only the
    fields that were set explicitly are included."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def seed_of(random_state: Any) -> int:
    """Return the configuration's seed for ``random_state``: an integer itself, else a number drawn from it."""
    # A seed out of range is refused when the configuration is made.
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _pipelines_in_front() -> list[tuple[Pipeline, list[tuple[str, object]]]]:
    """Return the scikit-learn pipelines on the call stack that are fitting this estimator, innermost first, each with
    its steps before the estimator.

    The caller warns about their steps. A step that is fitted to private records, such as a scaler, reads them without a
    privacy event, so no epsilon covers it; and public records that do not pass through it are not comparable with
    private ones. Steps in another process, or applied by hand before a fit, are not detected.
    """
    # A pipeline does not pass its other steps to the last one, so the stack is searched.
    found = []
    frame = inspect.currentframe()
    while frame is not None:
        # `fit`, `fit_transform` and `fit_predict` all fit.
        owner = frame.f_locals.get("self") if frame.f_code.co_name.startswith("fit") else None
        if isinstance(owner, Pipeline):
            steps = [(name, step) for name, step in owner.steps[:-1] if step not in (None, "passthrough")]
            found += [(owner, steps)] if steps else []
        frame = frame.f_back
    return found


_FORMAT = "fairpate.estimator/1"
_STUDENT, _CONFIG, _EMBEDDING = "student.safetensors", "config.yaml", "embedding.safetensors"
_ESTIMATOR = "estimator.json"
# NumPy's letters for truth values, integers, floats and text.
_KINDS = "biufU"


def _write_student(student: Student, folder: Path) -> None:
    """Write the model, and the embedding that it reads, to ``folder``. The description in the model's file contains the
    checksum of the embedding's file."""
    if student.embedding is not None:
        save_embedding(student.embedding, folder / _EMBEDDING)
        student = replace(student, card=replace(student.card, embedding=sha256_of(folder / _EMBEDDING)))
    save_student(student, folder / _STUDENT)


def delta_caution_of(config: Method, dataset: Dataset) -> str:
    """Return a caution if the delta of ``config`` is large for the public number of private records; else empty."""
    unit = "sensitive attribute" if config.protects_attribute_only else dataset.unit
    return delta_caution(config.target.delta, public_units(config, dataset), unit) if config.is_private else ""


LabelArray = npt.NDArray[Any] | np.ma.MaskedArray[Any, Any]


class Parameters(Sections, total=False):
    """The parameters of :class:`FairClassifier` for all methods of this package together, for type checkers and
    editors: those that are not sections of a configuration, and the sections.

    A single method accepts only those that are sections of its own configuration (`fairpate methods NAME`).
    """

    epsilon: float | None
    delta: float | None
    model: str | Setting
    idp3: Setting
    calibration: Setting
    noise: Literal["os_entropy", "seeded"]
    embedding: str | Mapping[str, Any] | None
    declaration: str | Mapping[str, Any] | None
    sensitive_feature: str | int | Mapping[str, Any] | SensitiveFeature | None
    odometer: str | None
    public_X: Any
    public_sensitive_features: Any
    num_records: int | None
    progress: bool
    random_state: Any
    folder: Path | str | None
    storage: str | None


_NO_BETTER = "FairClassifier: on its own training records {} is right {:.1%} of the time, and always {!r} {:.1%}."
_UNSCALED = (
    "FairClassifier: {} of X has values beyond {:g}, and no public records scale {}: clipping and noise then decide "
    "what is learned. Divide by public bounds, give public_X, or declare the table (FairClassifier.from_declaration)."
)
_MOST_UNSCALED = 20.0
_MOST_JUDGED = 10_000


class FairClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A scikit-learn classifier that is trained by any method of this package, or by one of your own.

    ``method`` is a name of `fairpate methods`, or ``module:Class`` of your own. Every section of its configuration is a
    parameter, given as the section or as a mapping: ``target``, ``student``, ``public_data``, ``noise``, and those of
    the method itself, such as ``dp_fermi``. Settings that are not given are chosen from facts that count as public:
    the number of private records, the number of public ones, and whether they are pictures. Single settings are reached
    as ``dp_fermi__weight``, in ``set_params`` and in searches. Further parameters:

    - ``epsilon``, ``delta``, ``model``, ``calibration``: short for ``target.epsilon``, ``target.delta``,
      ``student.model`` and ``public_data.calibration``, which they override; None: not given.
    - ``idp3``: short for ``student.idp3``, a demographic-parity gate that may refuse to answer at prediction.
    - ``public_X``, ``public_sensitive_features``: public records, if they are not given to ``fit``. A public record is
      one that anyone may see, such as a published or a made-up one; a copy of private records is refused. A number
      draws that many records of independent standard normal features, for use without any public record.
    - ``sensitive_feature``: the column of ``X`` that contains the groups, by name or position; it is then no feature. A
      mapping of ``column`` and ``edges`` divides numbers, such as ages, between public edges.
    - ``declaration``: a declaration of a table (a YAML file or a mapping) by which frames are encoded; see
      :meth:`from_declaration`.
    - ``embedding``: how records are embedded, as ``data.embedding``: a mapping; None: not at all; "auto": by an
      embedding of public records if there are some and whole records are protected.
    - ``num_records``: a public number of private records (of persons, if ``fit`` gets persons), by which settings are
      chosen. None: settings are chosen by the real number, which then counts as public, as the statement says.
    - ``odometer``: a name for the records, under which the operator's odometer charges each fit, together with runs on
      the data set of that name; ``fit`` is then refused beyond a limit (`fairpate ledger limit NAME`). None: nothing is
      charged.
    - ``folder``, for methods that ask teachers: the folder of teachers, votes and the ledger; None: a temporary one.
    - ``progress``: whether ``fit`` displays its progress.
    - ``random_state``: an integer is the ``seed`` of the configuration. It does not seed secret samples and noise,
      which come from the operating system unless ``noise`` is ``seeded``.

    After ``fit``: ``classes_``; ``groups_``, the names of the groups in the records; ``n_features_in_`` and
    ``feature_names_in_``; ``network_`` and ``student_``, the published model, with the embedding that it reads;
    ``trained_``, everything that the method released; ``events_``, the privacy events of the training; ``privacy_``,
    their total cost; ``noise_``, the source of the noise; ``config_``, the configuration that ran.

    A search over settings trains on the same records many times: each training costs ``privacy_`` again. The operator's
    odometer adds these costs up if ``odometer`` is given.

    >>> FairClassifier("dp_fermi", epsilon=1.0, dp_fermi={"weight": 2.0}, random_state=0)
    FairClassifier(method='dp_fermi', epsilon=1.0, dp_fermi={'weight': 2.0}, random_state=0)
    >>> rows = np.random.default_rng(0).uniform(-1, 1, size=(2000, 2))
    >>> model = FairClassifier("weighted_votes", epsilon=3.0, embedding=None).fit(rows, rows[:, 0] > 0, public_X=1000)
    >>> model.statement().epsilon <= 3.0
    True
    >>> model.score(rows, rows[:, 0] > 0) > 0.8
    True
    """

    def __init__(self, method: str = FITTED, **settings: Unpack[Parameters]) -> None:
        if not isinstance(method, str):
            raise TypeError(f"method: expected a name that `fairpate methods` lists, got {method!r}.")
        known = parameters_of(method)
        unknown = sorted(settings.keys() - known.keys())
        if unknown:
            raise TypeError(f"{method} has no parameter {unknown[0]!r}{nearest(unknown[0], known)}.")
        sections = dict(find_method(method)())
        # A field that no section has is refused here; values are checked in `fit`.
        for name, value in settings.items():
            section = sections.get(name)
            fields = type(section).model_fields if isinstance(section, BaseModel) else {}
            for field in value if isinstance(value, Mapping) and fields else ():
                if field not in fields:
                    raise ConfigError(f"{name}.{field}: unknown field{nearest(field, fields)}.")
        self.method = method
        for name, value in (known | settings).items():
            setattr(self, name, value)

    @classmethod
    def from_declaration(
        cls, declaration: Path | str | Mapping[str, Any], /, method: str = FITTED, **settings: Unpack[Parameters]
    ) -> Self:
        """Return a classifier of frames with the columns of a declared table, categories and missing values included.

        Numbers are scaled by their declared bounds, never by the records. ``fit`` takes labels, groups and persons from
        the declared columns unless they are given; ``predict`` needs the columns of features alone. ConfigError, a
        ValueError, for a declaration with faults.

        >>> clinic = {
        ...     "name": "clinic", "task": "comes back", "rows": 400, "files": {"private": "visits.csv"},
        ...     "label": {"column": "back", "classes": ["no", "yes"]},
        ...     "group": {"column": "sex", "values": ["F", "M"]},
        ...     "features": {"age": {"bounds": [0, 110], "missing": 50}, "ward": {"categories": ["A", "B"]}},
        ... }
        >>> model = FairClassifier.from_declaration(clinic, "weighted_votes", epsilon=1.0, public_X=1000)
        >>> model.declaration["name"]
        'clinic'
        """
        # Only to refuse its faults now: records are encoded in `fit`.
        read_declaration(declaration if isinstance(declaration, Mapping) else Path(declaration), given=GIVEN)
        settings["declaration"] = dict(declaration) if isinstance(declaration, Mapping) else str(declaration)
        return cls(method, **settings)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters by name; with ``deep`` also the settings in sections, as ``section__setting``."""
        # Not from the signature, where scikit-learn looks: it names only `method`.
        defaults = parameters_of(self.method).items()
        own = {"method": self.method} | {name: getattr(self, name, default) for name, default in defaults}
        return own | (dict(_settings_in(own)) if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Set parameters, and settings in sections as ``section__setting``. ValueError for an unknown name."""
        # The method first: the other names depend on it.
        if "method" in params:
            if not isinstance(params["method"], str):
                raise ValueError(f"method: expected a name that `fairpate methods` lists, got {params['method']!r}.")
            parameters_of(params["method"])  # an unknown method is refused before anything is changed
            self.method = params["method"]
        known = self.get_params(deep=False)
        # A section before the settings in it, which would otherwise be lost.
        for path in sorted(params, key=lambda path: path.count("__")):
            name, *inner = path.split("__")
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for {self.method}; give one of {', '.join(known)}.")
            setattr(self, name, _with_setting(getattr(self, name, known[name]), inner, params[path]))
        return self

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike | None = None,
        *,
        sensitive_features: npt.ArrayLike | None = None,
        public_X: npt.ArrayLike | int | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
        persons: npt.ArrayLike | None = None,
    ) -> Self:
        """Train on private ``X``, ``y`` (N,) and, if the method reads them, ``sensitive_features`` (N,).

        ``X``: tables (N, F), or images (N, channels, height, width), bytes or floats. ``public_X`` (M, ...) and
        ``public_sensitive_features`` (M,) have no labels. ``persons`` (N,) names the person of each record: all records
        of a person are then protected together. The sets of classes and groups count as public. With a declaration
        ``X`` and ``public_X`` are frames of its columns, which contain labels, groups and persons unless these are
        given.

        Warnings, to be seen by the operator alone: a column of ``X`` is not scaled, two persons are probably one whose
        name is written in two ways, delta is not below one in the public number of private records, or the model is no
        better on its own training records than always predicting the most common class.

        Raises:
            ValueError: A setting is out of range (the message names it). An array that the method needs is not given,
                differs in length or columns from the others, or has missing or infinite values. Public records are
                ``X``, or more of them equal private ones than chance explains (:mod:`fairpate.data.overlap`), or they
                did not pass through the steps of a pipeline as ``X`` did. The method protects only the group, and a
                column of ``X`` is or encodes the group.
        """
        if self.declaration is not None:
            found = declared_records(self.declaration, X)
            X, y = found.x, found.labels if y is None else y
            sensitive_features = found.groups if sensitive_features is None else sensitive_features
            persons = found.persons if persons is None else persons
        config, dataset, classes, group_names = self._prepared(
            X, y, sensitive_features, public_X, public_sensitive_features, persons
        )
        dataset = self._with_public_size(config, dataset)
        if caution := delta_caution_of(config, dataset):
            warnings.warn(caution, UserWarning, stacklevel=2)
        if not len(dataset.public) and config.data.embedding is None and dataset.kind == "tabular":
            largest_F = np.abs(dataset.private.x.numpy()).max(axis=0)
            if places := np.flatnonzero(largest_F > _MOST_UNSCALED).tolist():
                column = f"column {places[0]}" if len(places) == 1 else f"{len(places)} columns"
                text = _UNSCALED.format(column, _MOST_UNSCALED, "it" if len(places) == 1 else "them")
                warnings.warn(text, UserWarning, stacklevel=2)
        folder = getattr(self, "folder", None)
        with tempfile.TemporaryDirectory(prefix="fairpate-") if folder is None else nullcontext(folder) as root:
            reporter = Reporter(quiet=not self.progress)
            trained, student = train_model(config, dataset, reporter, folder=Path(root), odometer=self.odometer)
        # Set when everything has succeeded: an estimator whose training failed does not look fitted.
        self.classes_, self.groups_ = classes, group_names
        # The configuration's data set is the given records, not the default one of commands.
        self.config_ = config.model_copy(update={"data": config.data.model_copy(update={"name": dataset.name})})
        self.trained_, self.student_, self.network_ = trained, student, student.network
        self.events_, self.noise_, self.privacy_ = trained.events, trained.noise, config.price(trained)
        # In addition to the remarks of a run.
        remarks = []
        if self.privacy_.relation == "add or remove one" and self._follows_from_size(len(dataset.public)):
            remarks.append(REMARKS["follows_from_size"].format(f"{dataset.unit}s"))
        steps = [name for _, steps in _pipelines_in_front() for name, step in steps if get_tags(step).requires_fit]
        fitted = f"Fitted to the private records before, by a pipeline: {', '.join(steps)}. " if steps else ""
        remarks += [f"{fitted}{REMARKS['unaccounted']}", *([] if self.odometer else [REMARKS["not_counted"]])]
        units = stated_units(config, dataset, trained.events)
        self.statement_ = statement_of(config, trained, remarks=remarks, units=units)
        # The data set is embedded already. If there are many records, the first ones suffice.
        judged = dataset.private.take(range(min(len(dataset.private), _MOST_JUDGED)))
        bare = replace(student, embedding=None)
        right = bare.probabilities(judged.x, judged.z.numpy() if student.card.needs_group else None).argmax(axis=1)
        accuracy = float((right == judged.y.numpy()).mean())
        shares_C = np.bincount(judged.y.numpy(), minlength=len(classes)) / len(judged)
        if accuracy <= shares_C.max():
            text = _NO_BETTER.format(config.method, accuracy, str(classes[shares_C.argmax()]), shares_C.max())
            warnings.warn(text, UserWarning, stacklevel=2)
        return self

    def _follows_from_size(self, num_public: int) -> bool:
        """Return True if settings are chosen by the real number of private records, which the statement then calls
        public."""
        if self.num_records is not None:
            return False
        # Each setting is monotone in the size: if both extremes agree, the settings reveal nothing about it.
        few, many = (self._configuration(num_records=size, num_public=num_public, seed=0) for size in (_FEWEST, _MOST))
        return few != many

    def _with_public_size(self, config: Method, dataset: Dataset) -> Dataset:
        """Return ``dataset`` with its public number of private records or persons, if there is one: the given
        ``num_records``, or the real number if the statement calls it public."""
        units = self.num_records
        if config.target.stated.get("relation") != "replace one" and self._follows_from_size(len(dataset.public)):
            units = dataset.private.num_protected
        return replace(dataset, declared_units=units)

    def _records(self, X: Any, groups: Any) -> GivenRecords:
        """Check and encode records that are to be predicted; return their features, and their groups if known."""
        if self.declaration is None:
            return checked_records(self, X, groups)
        found = declared_records(self.declaration, X)
        return checked_records(self, found.x, found.groups if groups is None else groups)

    def predict_proba(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the probabilities (N, C) of the classes, in the order of ``classes_``.

        A randomised classifier draws its labels with these probabilities. ``sensitive_features`` (N,) are needed if
        predictions depend on the group. NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        records = self._records(X, sensitive_features)
        groups = self._codes(records.groups) if self.student_.card.needs_group else None
        return self.student_.probabilities(features(records.x), groups)

    def predict(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None, random_state: Any = None
    ) -> LabelArray:
        """Return the predicted labels (N,). With ``idp3``, a demographic-parity gate at prediction, the result is a
        masked array in which records that the gate refuses are masked.

        ``sensitive_features`` (N,), or their column in ``X``, are needed with ``idp3`` and if predictions depend on the
        group. A randomised classifier draws labels, the same ones at every call unless ``random_state`` differs.
        NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        seed = stream_seed(self.config_.seed, Stream.PREDICTION) if random_state is None else seed_of(random_state)
        records = self._records(X, sensitive_features)
        groups = self._codes(records.groups) if self.student_.card.needs_group else None
        student = self._student_for(records.groups)
        predicted = student.predict(features(records.x), groups, generator=np.random.default_rng(seed))
        labels: npt.NDArray[Any] = self.classes_[predicted.labels]
        return labels if self.student_.card.idp3 is None else np.ma.masked_array(labels, mask=~predicted.answered)

    def score(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike | None = None,
        sample_weight: npt.ArrayLike | None = None,
        *,
        sensitive_features: npt.ArrayLike | None = None,
    ) -> float:
        """Return the accuracy on records that the model does not refuse to answer; NaN if it refuses all of them. With
        a declaration, ``X`` may contain the labels, and ``y`` is then None."""
        given = self._labels(X, y)
        labels = self.predict(X, sensitive_features=sensitive_features)
        y = values_of(given, "y", missing=NO_LABEL, count=len(labels)).ravel()
        weights = np.ones(len(labels))
        if sample_weight is not None:
            missing = "some records have no weight (NaN, None or masked); give each a number."
            weights = values_of(sample_weight, "sample_weight", missing=missing, count=len(labels)).ravel()
        answered = ~np.ma.getmaskarray(labels)
        if not answered.any():
            return float("nan")
        found = np.ma.getdata(labels)[answered]
        return float(accuracy_score(y[answered], found, sample_weight=weights[answered]))

    def _labels(self, X: Any, y: Any) -> Any:
        """Return the labels ``y`` unchanged, or, if ``y`` is None, the labels in the label column of the declared frame
        ``X``."""
        if y is None and self.declaration is not None:
            y = declared_records(self.declaration, X).labels
        if y is None:
            raise ValueError("y: expected labels, got none; give them, or a declared frame with its label column.")
        return y

    def statement(self) -> PrivacyStatement:
        """Return the privacy statement of the fitted model, as a run publishes it. NotFittedError before ``fit``."""
        check_is_fitted(self, "student_")
        return self.statement_

    def save(self, path: Path | str) -> Path:
        """Write the fitted model to a new folder, without pickle: everything that predictions need, and the statement.

        Private and public records, and the releases during training (``trained_``), are left out. NotFittedError before
        ``fit``; FileExistsError if ``path`` exists.
        """
        check_is_fitted(self, "student_")
        folder = Path(path)
        if folder.exists():
            raise FileExistsError(f"{folder}: exists already; give a new folder.")
        typed = {}
        for what, names in (("classes", self.classes_), ("groups", self.groups_)):
            words = names.astype(str) if names.dtype == object else names
            # Other objects may not be what their text says, and could not be restored from it.
            if words.dtype.kind not in _KINDS or not np.array_equal(words, names):
                raise ValueError(
                    f"classes_, groups_: expected text or numbers, which JSON can hold, got {names.tolist()}; fit with "
                    "labels and groups of these types."
                )
            typed[what] = {"type": str(names.dtype), "values": words.tolist()}
        folder.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the final rename is one step on one file system.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / "estimator"
            made.mkdir()
            _write_student(self.student_, made)
            config = configuration.without(self.config_.model_dump(mode="json"), configuration.NOT_IN_DIGESTS)
            (made / _CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            columns, column = getattr(self, "feature_names_in_", None), sensitive_column(self.sensitive_feature)
            described = {
                "format": _FORMAT,
                **typed,
                "feature_names": None if columns is None else columns.tolist(),
                "num_features": self.n_features_in_,
                "sensitive_feature": None if column is None else column.model_dump(mode="json"),
                "declaration": configuration.read_yaml(Path(self.declaration), as_text=True)
                if isinstance(self.declaration, str)
                else self.declaration,
                "statement": asdict(self.statement_),
                "files": {file.name: sha256_of(file) for file in sorted(made.iterdir())},
            }
            write_json(made / _ESTIMATOR, strict(described))
            made.rename(folder)
        return folder

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Return the model that :meth:`save` wrote; it makes the same predictions.

        StudentFileError for a folder that is damaged or contains something else.
        """
        folder = Path(path)
        if not folder.exists():
            raise StudentFileError(f"{folder}: no such folder; give one that `save` wrote.")
        if not (folder / _ESTIMATOR).is_file():
            raise StudentFileError(
                f"{folder}: holds no estimator (no {_ESTIMATOR}); give one that `save` wrote, or restore it from a "
                "copy."
            )
        try:
            values = json.loads((folder / _ESTIMATOR).read_text(encoding="utf-8"))
            if values["format"] != _FORMAT:
                raise ValueError(  # noqa: TRY301 - reported below
                    f"estimator.json: expected format {_FORMAT}, got {values['format']}; load it with the "
                    "version of fairpate that saved it"
                )
            for name, digest in values["files"].items():
                # Only these names: a folder may come from others, and a name such as `../x` would lead out of it.
                if name not in (_STUDENT, _CONFIG, _EMBEDDING) or sha256_of(folder / name) != digest:
                    raise ValueError(f"the file {name} does not match its checksum")  # noqa: TRY301 - as above
            config = configured(folder / _CONFIG)
            estimator = cls(config.method)
            known = parameters_of(config.method).keys() & type(config).model_fields.keys()
            estimator.set_params(
                **{name: getattr(config, name) for name in known},
                embedding=_plain(config.data.embedding),
                sensitive_feature=values["sensitive_feature"],
                declaration=values.get("declaration"),
                random_state=config.seed,
            )
            statement = restored(PrivacyStatement, values["statement"])
            student = load_student(folder / _STUDENT)
            estimator.student_, estimator.network_ = student, student.network
            estimator.config_, estimator.statement_ = config, statement
            estimator.classes_, estimator.groups_ = (
                np.array(values[each]["values"], dtype=values[each]["type"]) for each in ("classes", "groups")
            )
            estimator.n_features_in_ = values["num_features"]
            if values["feature_names"] is not None:
                # Of type object, as scikit-learn sets it and compares it.
                estimator.feature_names_in_ = np.array(values["feature_names"], dtype=object)
            estimator.events_ = tuple(map(event_from, statement.events))
            estimator.noise_ = statement.noise
            stated = {name: getattr(statement, name) for name in ("delta", "unit", "relation", "accounting")}
            epsilon = float("inf") if statement.epsilon is None else statement.epsilon
            estimator.privacy_ = Price(epsilon=epsilon, **stated)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StudentFileError(f"{folder}: not a readable estimator ({error}); restore it from a copy.") from error
        return estimator

    def card(
        self, folder: Path | str, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, **use: Any
    ) -> tuple[Path, Path]:
        """Write the privacy-and-fairness card, measured on test records, to a new run folder; return the HTML and JSON
        paths.

        ``use``: ``intended_use``, ``out_of_scope`` and ``contact``, in your words.
        """
        check_is_fitted(self, "student_")
        config = self.config_
        if not config.is_private:
            raise ValueError(
                f"method: {config.method} has no privacy guarantee, so neither model nor card may be published; choose "
                "another method."
            )
        bare, dataset = self._test_set(X, y, sensitive_features)
        assessed = assess(bare, dataset, config.evaluation, seed=config.seed)
        run = create_run_directory(config.model_copy(update={"out": Path(folder)}))
        record_data(run, dataset, given_from_python=True)
        _write_student(replace(bare, embedding=self.student_.embedding), run.public)
        write_json(run.statement, strict(self.statement_))
        write_json(run.metrics, assessed.to_json())
        return write_card(Path(folder), **use)

    def log_to_mlflow(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        uri: str | None = None,
        *,
        sensitive_features: Any = None,
        experiment: str | None = None,
        run_id: str | None = None,
        **use: Any,
    ) -> str:
        """Log the model to MLflow, measured on test records: its statement, metrics, gaps, card and file. Return the id
        of the entry.

        Other arguments as in :func:`fairpate.log_to_mlflow` and :meth:`card`. Within ``with mlflow.start_run() as
        run:`` give ``run_id=run.info.run_id``.
        """
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            self.card(folder, X, y, sensitive_features=sensitive_features, **use)
            return log_to_mlflow(folder, uri, experiment=experiment, run_id=run_id)

    def by_group(
        self, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, reference: Any = None
    ) -> Any:
        """Return the metrics of the predictions for ``X`` as a pandas frame: a row for each group, and one for all.

        Columns: ``count`` (records), ``coverage`` (share answered), and of the answered records ``accuracy``, for each
        class ``selection_rate`` (share of predictions) and ``recall`` (share of its records that are predicted it);
        with two classes those of the second class alone, with ``false_negative_rate`` and ``false_positive_rate``; and
        ``calibration_error``, the expected calibration error of :meth:`predict_proba` in ten bins, unless the
        classifier draws its labels. With ``reference``, the name of a group, each rate has two further columns:
        ``<rate>_difference`` and ``<rate>_ratio`` to the rate of that group.

        ``frame.attrs`` has the largest ``difference`` and smallest ``ratio`` between groups, by column. NaN where a
        group has no such record. The numbers are exact: they are yours, and no epsilon covers them. Where pandas is not
        installed, the result is an Arrow table with the column ``group``. ValueError for an unknown ``reference``.
        """
        predicted, dataset = self._predicted(X, y, sensitive_features)
        rows = group_tables.rates_by_group(
            dataset.test.y.numpy(),
            predicted.labels,
            dataset.test.z.numpy(),
            answered_N=predicted.answered,
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            # Of a randomised classifier they are the chances of the labels that it draws.
            scores_NC=predicted.probabilities_NC if self.student_.card.mixing is None else None,
            reference=None if reference is None else str(reference),
        )
        return group_tables.as_frame(rows)

    def by_threshold(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: Any = None,
        thresholds: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    ) -> Any:
        """Return the rates by group if the second of two classes is predicted from each of ``thresholds`` on: a pandas
        frame with the index (threshold, group) and the columns ``count``, ``accuracy``, ``selection_rate``, ``recall``,
        ``false_negative_rate`` and ``false_positive_rate``.

        Every record counts, also those that the model refuses. A threshold that is chosen by private records is a
        choice that no epsilon covers. Without pandas, as :meth:`by_group`. ValueError for more than two classes, for
        thresholds outside of 0 to 1, and for a classifier that draws its labels and has no scores.
        """
        predicted, dataset = self._predicted(X, y, sensitive_features)
        if self.student_.card.mixing is not None:
            raise ValueError(f"thresholds: {self.method} draws its labels and has no scores; take by_group.")
        rows = group_tables.rates_at_thresholds(
            dataset.test.y.numpy(),
            predicted.probabilities_NC[:, -1],
            dataset.test.z.numpy(),
            class_names=dataset.label_names,
            group_names=dataset.group_names,
            thresholds=thresholds,
        )
        return group_tables.as_frame(rows)

    def _predicted(self, X: Any, y: Any, groups: Any) -> tuple[Prediction, Dataset]:
        """Return the model's predictions for test records, and these as a data set of encoded features."""
        bare, dataset = self._test_set(X, y, groups)
        return bare.predict(dataset.test.x, dataset.test.z.numpy(), generator=np.random.default_rng(0)), dataset

    def plot(self, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, ax: Any = None) -> Any:
        """Draw the accuracy on test records, overall and by group, with the accuracy of always predicting the most
        common label.

        The title shows accuracy, epsilon, disparity and coverage. Returns matplotlib's axes, ``ax`` or new ones, which
        need ``pip install 'fairpate[plot]'``.
        """
        bare, dataset = self._test_set(X, y, sensitive_features)
        measured = assess(bare, dataset, self.config_.evaluation, seed=self.config_.seed).headline
        statement = self.statement_
        if ax is None:
            require_extra("plot", "plot")
            from matplotlib import pyplot as plt

            _, ax = plt.subplots(layout="constrained")
        cost = "not private" if statement.epsilon is None else f"ε = {epsilon_text(statement.epsilon)}"
        cost += "" if statement.noise.startswith("os_entropy") else f", {statement.noise}"
        title = f"{statement.method}: accuracy {measured.accuracy:.1%}, {cost}"
        title += "" if np.isnan(measured.disparity) else f", demographic-parity gap {measured.disparity:.3f}"
        title += "" if measured.coverage == 1 else f", coverage {measured.coverage:.0%}"
        title = "\n".join([title, *measured.degenerate])
        bars = {"all": measured.accuracy} | {group.name: group.accuracy for group in measured.groups}
        ax.bar(range(len(bars)), list(bars.values()), color=["C0", *["C1"] * len(measured.groups)])
        ax.set_xticks(range(len(bars)), list(bars))
        ax.set(ylim=(0, 1), ylabel="accuracy on test records", title=title)
        if measured.majority_class is not None:
            always = f"always {measured.majority_class}: {measured.majority_accuracy:.1%}"
            ax.axhline(measured.majority_accuracy, color="black", linestyle="--", label=always)
            ax.legend(loc="lower right")
        return ax

    def _test_set(self, X: Any, y: Any, groups: Any) -> tuple[Student, Dataset]:
        """Return test records as a data set of encoded features, in the embedding if there is one, and the model for
        such features, without its embedding."""
        check_is_fitted(self, "student_")
        given = values_of(self._labels(X, y), "y", missing=NO_LABEL)
        records, labels = self._records(X, groups), column_or_1d(given, warn=True)
        unknown = set(np.unique(labels).tolist()) - set(self.classes_.tolist())
        if unknown or len(labels) != len(records.x):
            raise ValueError(
                f"y: expected {len(records.x)} labels among {self.classes_.tolist()}, got other labels, or more or "
                "fewer of them; give the label of each record of X."
            )
        student = self._student_for(records.groups)
        x, card = features(records.x), student.card
        x = x if student.embedding is None else student.embedding(x)
        z, codes = self._codes(records.groups), torch.from_numpy(np.searchsorted(self.classes_, labels))
        z = np.zeros(len(x), dtype=np.int64) if z is None else z
        test = Split(x=x, y=codes, z=torch.from_numpy(z), record_id=tuple(map(str, range(len(x)))))
        dataset = dataset_with(
            {"test": test},
            label_names=card.label_names,
            group_names=card.group_names,
            sensitive_attribute=card.sensitive_attribute,
        )
        return replace(student, embedding=None), dataset

    def _student_for(self, groups: npt.NDArray[Any] | None) -> Student:
        """Return the published model. If it was trained without groups, return a copy in which the names of the groups
        are those in ``groups``, so that it can be measured by group."""
        if groups is None or len(self.groups_):
            return self.student_
        names = tuple(str(name) for name in np.unique(groups))
        return replace(self.student_, card=replace(self.student_.card, group_names=names))

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        def short(value: Any) -> str:  # of records it shows the shape alone
            shape = getattr(value, "shape", None)
            return f"<{type(value).__name__} {'x'.join(map(str, shape))}>" if shape else repr(value)

        defaults = {"method": None} | parameters_of(self.method)
        given = self.get_params(deep=False).items()
        said = (f"{name}={short(value)}" for name, value in given if short(value) != short(defaults[name]))
        text = f"{type(self).__name__}({', '.join(said)})"
        return text if len(text) <= N_CHAR_MAX else f"{text[:N_CHAR_MAX]}..."

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """Return what a notebook displays: scikit-learn's diagram of the estimator, and above it the privacy guarantee
        once the model is fitted."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {kind: self._guarantee_html() * (kind == "text/html") + text for kind, text in bundle.items()}

    def _repr_html_inner(self) -> str:
        return self._guarantee_html() + str(super()._repr_html_inner())

    def _guarantee_html(self) -> str:
        name = f"{type(self).__name__}: {self.method}"
        return fitted_html(self.statement_, name=name) if hasattr(self, "statement_") else ""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        # Fresh noise gives another model at each fit; scikit-learn then skips its checks for equal results.
        tags.non_deterministic = getattr(self, "noise", "seeded") != "seeded"
        # With a drawn pool, or without the sensitive column, a check on 300 records must not expect a high score.
        tags.classifier_tags.poor_score = isinstance(self.public_X, int) or self.sensitive_feature is not None
        try:
            # Tags are read many times in a fit, and for all methods but one the class knows the answer.
            answer = find_method(self.method).learns_two_classes
            two_classes = answer if isinstance(answer, bool) else self._configuration(seed=0).learns_two_classes
            tags.classifier_tags.multi_class = not two_classes
        except ValueError:  # fit reports it; tags are read earlier
            tags.classifier_tags.multi_class = True
        return tags

    def _prepared(
        self, X: Any, y: Any, sensitive_features: Any, public_X: Any, public_sensitive_features: Any, persons: Any
    ) -> tuple[Method, Dataset, Values, Values]:
        """Check the arguments of ``fit``; return the configuration, the data set, and the names of classes and
        groups."""
        seed = seed_of(self.random_state)
        private = checked_records(self, X, sensitive_features, y, is_fit=True)
        labels = private.labels
        assert labels is not None
        public = self._public(public_X, public_sensitive_features, seed)
        names = person_names(persons, len(private.x))
        if self.num_records is not None and self.num_records < 1:
            raise ValueError(f"num_records: expected a positive number or None, got {self.num_records}; correct it.")
        count = names.num_distinct if names else len(private.x)
        config = self._configuration(
            num_records=count if self.num_records is None else int(self.num_records),
            num_public=0 if public is None else len(public.x),
            seed=seed,
        )
        # Everything is refused before training, because the cost of its releases stays spent if something fails later.
        if config.reads_groups and private.groups is None:
            raise ValueError(
                f"{config.method} reads groups: give sensitive_features to fit, or name their column in "
                "sensitive_feature."
            )
        needing = [f"public_data.{name}" for name, use in config.public_data if use is not None]
        needing += [config.method] if config.reads_public else []
        needing += ["embedding"] if config.data.embedding is not None else []
        if needing and public is None:
            raise ValueError(
                f"{needing[0]} needs public records: give public_X to fit or to the constructor ({PUBLIC_RECORD}); if "
                "you have none, public_X=1000 draws some, or choose a method that needs none, such as dp_sgd."
            )
        if public is not None and public.groups is None and config.reads_public_groups:
            raise ValueError(
                f"{config.method} reads groups of public records: give public_X and public_sensitive_features together."
            )
        if config.learns_two_classes and (kind := type_of_target(labels)) != "binary":
            # With the words that scikit-learn's own checks look for.
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}; choose another method "
                f"than {config.method}."
            )
        if names and config.is_private and not config.protects_persons:
            raise ValueError(
                f"persons: {config.method} does not bound the joint influence of a person's records; choose another "
                "method (docs/python.md), or leave persons out, which protects each record by itself."
            )
        pool = self.public_X if public_X is None else public_X
        if X is pool:  # records so few that chance may repeat them
            raise ValueError(f"public_X: expected other records than X, got X itself; {PUBLIC_RECORD}.")
        if public is not None and not isinstance(pool, int | np.integer):  # drawn ones are of no source
            own, others = ((features(each.x), each.groups) for each in (private, public))
            require_no_copy(own, {"public_X": others})
            for doubt in doubts(own, {"public_X": others}):
                warnings.warn(doubt, UserWarning, stacklevel=2)
        dataset, classes, group_names = dataset_of(
            private.x,
            labels,
            # Groups that the method does not read are not passed on, so that nothing can depend on them.
            private.groups if config.reads_groups else None,
            persons=names,
            public_X=None if public is None else public.x,
            public_sensitive_features=None if public is None else public.groups,
        )
        return config, embedded(dataset, config.data.embedding), classes, group_names

    def _configuration(self, *, num_records: int = 1, num_public: int = 1, seed: int | None = None) -> Method:
        """Return the method's configuration: parameters of this classifier set their sections, and all other settings
        are chosen by ``num_records`` and ``num_public``, the public numbers of private and of public records.

        ConfigError, a ValueError, lists every fault with its field.
        """
        given = self.get_params(deep=False)
        fields = find_method(self.method).model_fields
        said = {name: _plain(value) for name, value in given.items() if name in fields and value is not None}
        for name, (section, field) in _SHORT.items():
            value = _plain(given.get(name))
            if name not in said and value is not None and isinstance(said.get(section, {}), dict):
                said[section] = said.get(section, {}) | {field: value}
        # Shards follow from a declared number alone: one record more would otherwise move all of them.
        teachers = "networks" if given["num_records"] is None else kind_of_teachers(said)
        start = fitted_to(self.method, count=num_records, num_public=num_public, teachers=teachers)
        values = merge(start, said)
        # The records are those of `fit`, so no other setting of the section `data` applies.
        if given["embedding"] == "auto":
            values["data"] = start.get("data", {}) if num_public else {}
            if values["data"].get("embedding") and given["num_records"] is None:
                # The embedding's size is chosen by a declared number alone: epsilon covers no choice by the real one.
                values["data"] = {"embedding": {}}
        else:
            values["data"] = {"embedding": _plain(given["embedding"])}
        declared = values.get("dp_sgd")
        if given["num_records"] is not None and isinstance(declared, dict):
            # A number in the section itself takes precedence.
            values["dp_sgd"] = {"num_records": _plain(given["num_records"])} | declared
        values |= {"seed": seed_of(self.random_state) if seed is None else seed}
        config = configured(values, method=self.method, exactly=True)
        cause, before = "public_data.self_label", flattened(merge(type(config)().model_dump(), start))
        unread = tuple(f"{field}." for field, why in config.unread.items() if why == cause)
        # Sections of a whole configuration may set what its method leaves unread; a mapping was written for this
        # method.
        written = {name: value for name, value in said.items() if isinstance(given.get(name), Mapping)}
        for field, value in flattened(written).items():
            # A saved estimator has all settings, unread ones at their defaults.
            if f"{field}.".startswith(unread) and value != before.get(field):
                raise ConfigError(f"{field}: not read because of {cause}; leave it out, or change {cause}.")
        return config

    def _public(self, X: Any, groups: Any, seed: int) -> GivenRecords | None:
        """Return the public records that were given to ``fit``, or else to the constructor. If ``X`` is a number, draw
        that many records of independent standard normal features."""
        in_fit = X is not None
        if not in_fit:
            X, groups = self.public_X, self.public_sensitive_features if groups is None else groups
        if X is None:
            if groups is not None:
                raise ValueError(
                    "public_sensitive_features: given without public_X; give both, or leave the groups out."
                )
            return None
        names = getattr(self, "feature_names_in_", None)
        if not isinstance(X, int | np.integer) or isinstance(X, bool):
            passed_on = [getattr(each, "transform_input", None) or () for each, _ in _pipelines_in_front()]
            if self.declaration is not None:
                declared = declared_records(self.declaration, X, "public_X")
                X, groups = declared.x, declared.groups if groups is None else groups
            elif not all(in_fit and "public_X" in arguments for arguments in passed_on):
                raise ValueError(
                    "public_X: the pipeline's steps change X and not public_X, which would make them incomparable; "
                    "make it Pipeline(..., transform_input=['public_X']) with sklearn's metadata routing "
                    "(docs/python.md, A scaler in front), or leave the steps out."
                )
            columns = getattr(X, "columns", None)
            is_named = columns is not None and all(isinstance(column, str) for column in columns)
            if is_named != (names is not None):
                named, bare = ("X", "public_X") if names is not None else ("public_X", "X")
                raise ValueError(
                    f"public_X: {named} has named columns and {bare} has none, so one of them may have gone through a "
                    "transformer that the other did not; give both in one form (docs/python.md, A scaler in front)."
                )
            try:
                return checked_records(self, X, groups, groups_name="public_sensitive_features")
            except ValueError as error:
                if str(error).startswith("public_sensitive_features: "):
                    raise
                raise ValueError(f"public_X: {str(error).removeprefix('X: ')}") from error
        generator = np.random.default_rng(stream_seed(seed, Stream.PUBLIC_POOL))
        return drawn_records(self, int(X), groups, generator)

    def _codes(self, groups: npt.NDArray[Any] | None) -> npt.NDArray[np.int64] | None:
        """Return the code (N,) of each record's group: its index among the groups in ``fit``, or, if ``fit`` got none,
        among those in ``groups``.

        ValueError for a group that was not in ``fit``.
        """
        if groups is None:
            return None
        names = self.groups_ if len(self.groups_) else np.unique(groups)
        if not np.isin(groups, names).all():
            raise ValueError(
                f"sensitive_features: expected groups among {names.tolist()}, those of `fit`, got "
                f"{np.unique(groups).tolist()}; leave out records of other groups."
            )
        return np.searchsorted(names, groups)


def expected_failed_checks(estimator: FairClassifier) -> dict[str, str]:
    """Return the names of scikit-learn's checks that ``estimator`` does not pass, each with the reason.

    Pass the result to ``sklearn.utils.estimator_checks.check_estimator`` as ``expected_failed_checks``. The checks fit
    small tables without groups and without public records, so an estimator that needs either must be made with
    ``sensitive_feature`` and with a number for ``public_X``.
    """
    known = configuration.read_yaml(Path(__file__).with_name("failed_checks.yaml"))
    named = known["FairClassifier"] if type(estimator) is FairClassifier else {}
    embedded = {} if estimator.public_X is None else known["with_public_records"]
    return {**named, **embedded, **find_method(estimator.method).failed_checks}
