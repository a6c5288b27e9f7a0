"""Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``.

:class:`FairClassifier` takes the method by name. Each registered method also has a class of its own, made from its
definition: :class:`DpSgdClassifier`, :class:`DpFermiClassifier`, :class:`FairPateClassifier` and so on, as ``__all__``
lists them. Parameters are the sections that the method's configuration has, so that they cannot differ from those of
the command line, and the same seed on the same records gives the same weights.

Shapes: N private records, M public ones, C classes.
"""

from __future__ import annotations

import hashlib
import inspect
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fairpate.app.progress import Reporter
from fairpate.app.run import train_model
from fairpate.app.seeds import Stream, stream_seed
from fairpate.data import Dataset, Split
from fairpate.data.identity import counted
from fairpate.methods import DEFAULT, class_names, find_method
from fairpate.methods.definition import Method
from fairpate.methods.load import configured_exactly

_NO_PARAMETERS = ("method", "out", "seed", "data")
_SHORT = {
    "epsilon": ("target", "epsilon"),
    "delta": ("target", "delta"),
    "model": ("student", "model"),
    "idp3": ("student", "idp3"),
    "calibration": ("public_data", "calibration"),
}
Labels = npt.NDArray[Any] | np.ma.MaskedArray[Any, Any]


class FairClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Any method as a classifier.

    ``method`` is a name of `fairpate methods`, or ``module:Class`` of one's own. Every section of its configuration is
    a parameter, given as the section or as a mapping of what differs from its defaults: ``target``, ``student``,
    ``public_data``, ``noise``, and those of the method itself, such as ``dp_fermi``. Single settings are reached as
    ``dp_fermi__weight``, in ``set_params`` and in searches. Besides:

    - ``epsilon``, ``delta``, ``model``, ``idp3``, ``calibration``: short for ``target.epsilon``, ``target.delta``,
      ``student.model``, ``student.idp3`` and ``public_data.calibration``, and stand above them; None says nothing.
    - ``folder``, of methods that ask teachers: where teachers, votes and the ledger stay. None: a temporary folder.
    - ``random_state``: an integer is the ``seed`` of the configuration. It is no seed of secret samples and noise,
      which come from the operating system unless ``noise`` is ``seeded``.

    After ``fit``: ``classes_``; ``groups_``, the names of groups that were seen; ``network_`` and ``student_``, the
    published model; ``trained_``, all that the method released; ``events_``, what touched private records;
    ``privacy_``, what they cost together; ``noise_``, where the noise came from; ``config_``, what ran. A search over
    settings trains on the same records many times: each training costs ``privacy_`` again, and none is counted in the
    operator's odometer.

    >>> FairClassifier("dp_fermi", epsilon=1.0, dp_fermi={"weight": 2.0}, random_state=0)
    FairClassifier(method='dp_fermi', epsilon=1.0, dp_fermi={'weight': 2.0}, random_state=0)
    """

    _names_method = True

    def __init__(self, method: str = DEFAULT, **settings: Any) -> None:
        known = _parameters(method)
        unknown = sorted(settings.keys() - known.keys())
        if unknown:
            raise TypeError(f"{method} has no parameter {unknown[0]!r}; it has {', '.join(known)}.")
        self.method = method
        for name, value in (known | settings).items():
            setattr(self, name, value)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; with ``deep`` also the settings in sections, as ``section__setting``."""
        own = {"method": self.method} if self._names_method else {}
        own |= {name: getattr(self, name, default) for name, default in _parameters(self.method).items()}
        return own | (dict(_settings(own)) if deep else {})

    def set_params(self, **params: Any) -> FairClassifier:
        """Set parameters, and settings in sections as ``section__setting``. ValueError for a name there is not."""
        if "method" in params and self._names_method:
            self.method = params["method"]
        known = self.get_params(deep=False)
        for path in sorted(params, key=lambda path: path.count("__")):  # a section before what is in it
            name, *inner = path.split("__")
            if name not in known:
                raise ValueError(f"Invalid parameter {name!r} for {self.method}; it has {', '.join(known)}.")
            setattr(self, name, _with(getattr(self, name, known[name]), inner, params[path]))
        return self

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: npt.ArrayLike | None = None,
        public_X: npt.ArrayLike | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
    ) -> FairClassifier:
        """Train on private ``X``, ``y`` (N,) and, where the method reads them, ``sensitive_features`` (N,).

        ``X``: tables (N, F), or images (N, channels, height, width), bytes or floats. ``public_X`` (M, ...) and
        ``public_sensitive_features`` (M,) have no labels. The sets of classes and groups count as public. ValueError
        for settings out of range, naming the field; for records that are needed and absent, or of other lengths; and
        where a method that protects the group alone is given it, or an encoding of it, as a column of ``X``.
        """
        config = self._configuration()
        groups = sensitive_features if config.reads_groups else None
        self._require_inputs(config, groups, public_X, public_sensitive_features)
        dataset, classes, group_names = dataset_of(
            X, y, groups, public_X=public_X, public_sensitive_features=public_sensitive_features
        )
        with _folder(getattr(self, "folder", None)) as folder:
            trained, student = train_model(config, dataset, Reporter(quiet=True), folder=folder)
        self.classes_, self.groups_ = classes, group_names
        self.config_, self.trained_, self.student_, self.network_ = config, trained, student, student.network
        self.events_, self.noise_, self.privacy_ = trained.events, trained.noise, config.price(trained)
        self.n_features_in_ = dataset.private.x[0].numel()
        return self

    def predict_proba(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float32]:
        """Probabilities (N, C), columns as ``classes_``; of a randomised classifier, how often it says each label.

        ``sensitive_features`` (N,) are needed where predictions are mixed by group. NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        return self.student_.probabilities(_features(X), self._codes(sensitive_features))

    def predict(
        self, X: npt.ArrayLike, *, sensitive_features: npt.ArrayLike | None = None, random_state: Any = None
    ) -> Labels:
        """Labels (N,); with ``idp3`` a masked array, masked where the gate refuses.

        ``idp3`` and predictions mixed by group need ``sensitive_features`` (N,). A randomised classifier draws, the
        same at every call unless ``random_state`` says otherwise. NotFittedError before ``fit``.
        """
        check_is_fitted(self, "student_")
        seed = stream_seed(self.config_.seed, Stream.PREDICTION) if random_state is None else _seed(random_state)
        codes, student = self._codes(sensitive_features), self.student_
        if not len(self.groups_) and sensitive_features is not None:
            seen_now = tuple(str(name) for name in np.unique(np.asarray(sensitive_features)))
            student = replace(student, card=replace(student.card, group_names=seen_now))
        predicted = student.predict(_features(X), codes, generator=np.random.default_rng(seed))
        labels: npt.NDArray[Any] = self.classes_[predicted.labels]
        return labels if self.student_.card.idp3 is None else np.ma.masked_array(labels, mask=~predicted.answered)

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        defaults = {"method": None} | _parameters(self.method)
        said = (f"{k}={v!r}" for k, v in self.get_params(deep=False).items() if repr(v) != repr(defaults[k]))
        text = f"{type(self).__name__}({', '.join(said)})"
        return text if len(text) <= N_CHAR_MAX else f"{text[:N_CHAR_MAX]}..."

    def _configuration(self) -> Method:
        """What the parameters say. ConfigError, a ValueError, for every fault with its field."""
        given = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        values = {name: given[name] for name in given if name in find_method(self.method).model_fields}
        for name, (section, field) in _SHORT.items():
            if name not in values and given.get(name) is not None and isinstance(values[section], dict):
                values[section] |= {field: given[name]}
        return configured_exactly(values | {"seed": _seed(self.random_state)}, method=self.method)

    def _require_inputs(self, config: Method, groups: Any, public_x: Any, public_groups: Any) -> None:
        if config.reads_groups and groups is None:
            raise ValueError(f"{self.method} reads groups: give sensitive_features to fit.")
        if (public_x is None) != (public_groups is None):
            raise ValueError("Expected public_X and public_sensitive_features together, got one of them.")
        needing = [f"public_data.{name}" for name, use in config.public_data if use is not None]
        needing += [self.method] if config.reads_public else []
        if needing and public_x is None:
            raise ValueError(f"{needing[0]} needs public records: give public_X and public_sensitive_features to fit.")

    def _codes(self, sensitive_features: npt.ArrayLike | None) -> npt.NDArray[np.int64] | None:
        """Codes of groups; where ``fit`` saw none, those of the groups that are given."""
        if sensitive_features is None:
            return None
        values = np.asarray(sensitive_features)
        names = self.groups_ if len(self.groups_) else np.unique(values)
        if not np.isin(values, names).all():
            raise ValueError(f"Expected sensitive_features among {names.tolist()}, got {np.unique(values).tolist()}.")
        return np.searchsorted(names, values)


def dataset_of(
    X: npt.ArrayLike,
    y: npt.ArrayLike,
    sensitive_features: npt.ArrayLike | None = None,
    *,
    public_X: npt.ArrayLike | None = None,
    public_sensitive_features: npt.ArrayLike | None = None,
) -> tuple[Dataset, npt.NDArray[Any], npt.NDArray[Any]]:
    """Arrays as the data set ``records`` that a run reads, with the names of classes and of groups in order of code.

    Without ``sensitive_features`` all private records are in one group. A record's teacher follows from its content.
    Labels of public records are unknown, -1; there are no test records.
    """
    x, labels = _features(X), np.asarray(y)
    public_x = x[:0] if public_X is None else _features(public_X)
    private_z = labels[:0] if sensitive_features is None else np.asarray(sensitive_features)
    public_z = private_z[:0] if public_X is None else np.asarray(public_sensitive_features)
    if labels.ndim != 1 or not len(x) == len(labels) == (len(labels) if sensitive_features is None else len(private_z)):
        raise ValueError(
            f"Expected one label and one of sensitive_features per record, got {len(x)} records, labels of shape "
            f"{labels.shape} and {len(private_z)} groups."
        )
    if x.ndim not in (2, 4) or not len(x) or public_x.shape[1:] != x.shape[1:] or len(public_z) != len(public_x):
        raise ValueError(
            "Expected records as (N, features) or (N, channels, height, width), public ones of the same shape and with "
            f"one group each, got {tuple(x.shape)}, {tuple(public_x.shape)} and {len(public_z)} public groups."
        )
    classes, codes = np.unique(labels, return_inverse=True)
    of_groups = [values for values in (private_z, public_z) if len(values)]
    groups = np.unique(np.concatenate(of_groups)) if of_groups else np.array([])
    z = np.searchsorted(groups, private_z) if len(private_z) else np.zeros(len(x))
    nothing = Split(x=x[:0], y=_int64(codes[:0]), z=_int64(z[:0]), record_id=())
    dataset = Dataset(
        name="records",
        kind="image" if x.ndim == 4 else "tabular",
        private=_split(x, codes, z),
        public=_split(public_x, np.full(len(public_x), -1), np.searchsorted(groups, public_z)),
        validation=nothing,
        test=nothing,
        label_names=tuple(str(name) for name in classes),
        group_names=tuple(str(name) for name in groups) or ("everyone",),
        sensitive_attribute="group",
    )
    return dataset, classes, groups


def _split(x: Tensor, labels: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Split:
    """Records that are equal but for the group are one unit: what a name shows must not tell of groups."""
    codes = _int64(labels)
    units = tuple(
        hashlib.sha256(row.tobytes() + code.to_bytes(8, "little", signed=True)).hexdigest()
        for row, code in zip(x.numpy(), codes.tolist(), strict=True)
    )
    return Split(x=x, y=codes, z=_int64(groups), record_id=counted(units), unit_id=units)


def _int64(codes: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(codes.astype(np.int64))


def _features(values: npt.ArrayLike) -> Tensor:
    array = np.asarray(values)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=None if array.dtype == np.uint8 else np.float32))


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


@contextmanager
def _folder(folder: Path | str | None) -> Iterator[Path]:
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="fairpate-") as root:
        yield Path(root)


@cache
def _parameters(method: str) -> dict[str, Any]:
    """Name and default of every parameter of a classifier of ``method``."""
    schema = find_method(method)
    sections = {name: value for name, value in schema() if name not in _NO_PARAMETERS}
    short = [name for name, (section, field) in _SHORT.items() if field in type(sections[section]).model_fields]
    folder = {"folder": None} if schema.asks_teachers else {}
    return dict.fromkeys(short) | sections | folder | {"random_state": None}


def _settings(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is in sections and mappings, by ``section__setting``."""
    for name, value in sections.items():
        if prefix:
            yield f"{prefix}{name}", value
        if isinstance(value, dict | BaseModel) or is_dataclass(value):
            yield from _settings(value if isinstance(value, dict) else vars(value), f"{prefix}{name}__")


def _with(section: Any, path: list[str], value: Any) -> Any:
    """``section`` with the setting at ``path``, as a mapping; it is checked where it is used."""
    if not path:
        return value
    values = _plain(section)
    values = values if isinstance(values, dict) else {}
    return values | {path[0]: _with(values.get(path[0]), path[1:], value)}


def _plain(value: Any) -> Any:
    """Sections, mappings and numpy's scalars as plain values."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump()
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


@cache
def _classifier(name: str, method: str) -> type[FairClassifier]:
    """The class of one registered method: :class:`FairClassifier` with a signature and without ``method``."""
    schema = find_method(method)

    def initialise(self: FairClassifier, **settings: Any) -> None:
        FairClassifier.__init__(self, method, **settings)

    def parameter(name: str, default: Any = inspect.Parameter.empty, *, first: bool = False) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if first else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default)

    parameters = [parameter("self", first=True), *(parameter(*each) for each in _parameters(method).items())]
    initialise.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    words = inspect.getdoc(schema) or ""
    text = f"{schema.title} ({schema.paper}).\n\n{words}\n\nParameters and attributes as :class:`FairClassifier`."
    members = {"__init__": initialise, "__doc__": text, "__module__": __name__, "_names_method": False}
    return type(name, (FairClassifier,), members)


_METHOD_OF = {f"{name}Classifier": method for method, name in class_names().items()}
__all__ = ["FairClassifier", *sorted(_METHOD_OF)]


def __getattr__(name: str) -> type[FairClassifier]:
    if name not in _METHOD_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classifier(name, _METHOD_OF[name])


def __dir__() -> list[str]:
    return [*globals(), *_METHOD_OF]
