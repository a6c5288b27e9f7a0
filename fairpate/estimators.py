"""scikit-learn's interface: ``FairClassifier`` fits any method on arrays, pipelines included.

What an estimator is given: parameters by name, and the configuration that they say of one method.

What is said stands. What is left out follows from public facts, as for a command without a configuration
(:mod:`fairpate.methods.base`): how many records there are, how many are public, and whether they are pictures. Of a
section that is given as an object only the fields that were set are said.

What stands in front of a fit: the steps of the scikit-learn pipelines that call it.

A step that is fitted to private records, such as a scaler, touches them without an event, so no epsilon counts it; and
public records that do not go through it are incomparable with private ones. A pipeline does not tell its last step of
the others, so the callers are looked at. What happens in another process, or by hand before a fit, is not seen.

What ``fit`` of an estimator refuses before anything is trained, and so before anything is spent.

A fitted estimator in a folder, without pickle.

    student.safetensors      the published model, and
    config.yaml              its method and configuration, as in the folder of a run
    embedding.safetensors    what it reads, where that is an embedding: public numbers
    estimator.json           names of columns, classes and groups, the statement, and the sha256 of the other files

No record is in it, but for what an embedding of pictures holds of public ones.

What a fitted estimator says of itself: remarks of its statement, its card on test records, and a plot.

A classifier of any method: what it is given, what it learns, what it predicts.

Shapes: N private records, M public ones, C classes.

Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``.

:class:`FairClassifier` takes the method by name. Its parameters are the sections that the method's configuration has,
so that they cannot differ from those of the command line, and the same seed on the same records gives the same weights.

    classifier    :class:`FairClassifier`
    parameters    its parameters, and the configuration that they say
    records       arrays and frames as the data set that a run reads
    pipelines     what stands in front of a fit
    kept          the folder of a fitted estimator, without pickle
    told          statement, card and plot
    checks        which of scikit-learn's own checks fail, and why

Which of scikit-learn's own checks an estimator does not pass, and why.

``sklearn.utils.estimator_checks.check_estimator`` takes them as ``expected_failed_checks``. The checks fit small tables
without groups and without public records, so an estimator that needs either is made with ``sensitive_feature`` and with
a number for ``public_X``.
"""

from __future__ import annotations

import inspect
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

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

from fairpate.config_reader import merge, placeless_values
from fairpate.data import Dataset, Split
from fairpate.data.dataset import sha256_of
from fairpate.data.embedding import embedded, save_embedding
from fairpate.estimator_records import (
    Records,
    dataset_of,
    features,
    person_names,
    private_records,
    public_records,
    records_like,
    sensitive_column,
)
from fairpate.methods.base import (
    ONE_RELEASE,
    Method,
    Price,
    Stream,
    configured,
    configured_exactly,
    find_method,
    fitted_to,
    stream_seed,
)
from fairpate.privacy.mechanism_events import event_from
from fairpate.report.metrics import Evaluation
from fairpate.report.page import epsilon_text
from fairpate.run.context import write_json
from fairpate.run.folder import create_run_directory
from fairpate.run.learn import Assessment, assess, record_data
from fairpate.run.publication import fitted_html, write_card
from fairpate.run.run import statement_of, train_model
from fairpate.terminal import Reporter
from fairpate.types import PrivacyStatement, Unit, strict
from student.card import StudentFileError
from student.student import Student, load_student, save_student

# No odometer counts what an estimator releases, so that there is no earlier release to name.
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
    "sensitive_feature": None,
    "public_X": None,
    "public_sensitive_features": None,
    "num_records": None,
    "progress": False,
    "random_state": None,
}
_FEWEST, _MOST = 1, 10**9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Public facts that settings are chosen by: the number of private records, real or declared, and of public ones."""

    num_records: int
    num_public: int


@cache
def parameters_of(method: str) -> dict[str, Any]:
    """Name and default of every parameter of a classifier of ``method``."""
    schema = find_method(method)
    own = {name: value for name, value in schema() if name not in _NO_PARAMETERS}
    short = [name for name, (section, field) in _SHORT.items() if field in type(own[section]).model_fields]
    sections = {name: None if isinstance(value, BaseModel) else value for name, value in own.items()}
    folder = {"folder": None} if schema.asks_teachers else {}
    return dict.fromkeys(short) | sections | folder | _OF_ESTIMATORS


def configuration_of(method: str, given: Mapping[str, Any], sizes: Sizes, *, seed: int) -> Method:
    """What the parameters ``given`` say. ConfigError, a ValueError, for every fault with its field."""
    schema = find_method(method)
    base = fitted_to(method, count=sizes.num_records, num_public=sizes.num_public)
    values = merge(base, _said(schema, given))
    if given["embedding"] == "auto":
        values["data"] = base.get("data", {}) if sizes.num_public else {}
    else:
        values["data"] = {"embedding": plain(given["embedding"])}
    declared = values.get("dp_sgd")
    if given["num_records"] is not None and isinstance(declared, dict):
        # What the section says itself stands above.
        values["dp_sgd"] = {"num_records": plain(given["num_records"])} | declared
    return configured_exactly(values | {"seed": seed}, method=method)


def follows_from_size(method: str, given: Mapping[str, Any], sizes: Sizes) -> bool:
    """Whether the number of private records decides any setting."""
    # Each setting moves one way with the size: where both ends agree, nothing follows from it.
    ends = (Sizes(num_records=size, num_public=sizes.num_public) for size in (_FEWEST, _MOST))
    few, many = (configuration_of(method, given, end, seed=0) for end in ends)
    return few != many


def _said(schema: type[Method], given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: plain(given[name]) for name in given if name in schema.model_fields and given[name] is not None}
    for name, (section, field) in _SHORT.items():
        said = plain(given.get(name))
        if name not in values and said is not None and isinstance(values.get(section, {}), dict):
            values[section] = values.get(section, {}) | {field: said}
    return values


def settings_in(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is in sections and mappings, by ``section__setting``."""
    for name, value in sections.items():
        if prefix:
            yield f"{prefix}{name}", value
        if isinstance(value, dict | BaseModel) or (is_dataclass(value) and not isinstance(value, type)):
            yield from settings_in(value if isinstance(value, dict) else vars(value), f"{prefix}{name}__")


def with_setting(section: Any, path: list[str], value: Any) -> Any:
    """``section`` with the setting at ``path``, as a mapping; it is checked where it is used."""
    if not path:
        return value
    values = plain(section)
    if isinstance(values, str):  # the short form of an architecture
        values = {"name": values}
    values = values if isinstance(values, dict) else {}
    return values | {path[0]: with_setting(values.get(path[0]), path[1:], value)}


def plain(value: Any) -> Any:
    """What is said in sections, mappings and numpy's scalars, as plain values."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def seed_of(random_state: Any) -> int:
    """The seed of a configuration. ConfigError comes later, for one that is out of range."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def steps_in_front() -> tuple[Pipeline, ...]:
    """The pipelines with steps before their last one that are being fitted by the callers, innermost first."""
    return tuple(pipeline for pipeline in _fitting() if _transformers(pipeline))


def fitted_steps(pipelines: tuple[Pipeline, ...]) -> tuple[str, ...]:
    """Names of steps that learn from what they are fitted to."""
    return tuple(
        name for pipeline in pipelines for name, step in _transformers(pipeline) if get_tags(step).requires_fit
    )


def passes_public_on(pipeline: Pipeline) -> bool:
    """Whether ``public_X`` goes through the same steps as ``X``."""
    return "public_X" in (getattr(pipeline, "transform_input", None) or ())


def _fitting() -> Iterator[Pipeline]:
    frame = inspect.currentframe()
    while frame is not None:
        # Of `fit`, `fit_transform` and `fit_predict`, which all fit.
        owner = frame.f_locals.get("self") if frame.f_code.co_name.startswith("fit") else None
        if isinstance(owner, Pipeline):
            yield owner
        frame = frame.f_back


def _transformers(pipeline: Pipeline) -> list[tuple[str, object]]:
    return [(name, step) for name, step in pipeline.steps[:-1] if step not in (None, "passthrough")]


def require_inputs(config: Method, private: Records, public: Records | None) -> None:
    """ValueError for records or groups that the configuration reads and nobody gave."""
    if config.reads_groups and private.groups is None:
        raise ValueError(
            f"{config.method} reads groups: give sensitive_features to fit, or name their column: sensitive_feature."
        )
    needing = [f"public_data.{name}" for name, use in config.public_data if use is not None]
    needing += [config.method] if config.reads_public else []
    needing += ["embedding"] if config.data.embedding is not None else []
    if needing and public is None:
        raise ValueError(
            f"{needing[0]} needs public records: give public_X to fit or to the constructor; where there are none, "
            "public_X=1000 draws some, or choose a method that needs none, such as dp_sgd."
        )
    if public is not None and public.groups is None and config.reads_public_groups:
        raise ValueError(
            f"{config.method} reads groups of public records: give public_X and public_sensitive_features together."
        )


def require_classes(config: Method, labels: npt.NDArray[Any]) -> None:
    """ValueError for more classes than the method can tell apart."""
    kind = type_of_target(labels)
    if config.learns_two_classes and kind != "binary":
        # In words that scikit-learn's own checks look for.
        raise ValueError(
            f"Only binary classification is supported. The type of the target is {kind}; choose another method "
            f"than {config.method}."
        )


def require_persons_protected(config: Method, *, given: bool) -> None:
    """ValueError where persons are ``given`` and nothing bounds what their records do together."""
    if given and config.is_private and not config.protects_persons:
        raise ValueError(
            f"persons: {config.method} does not bound what all records of a person do together; leave persons out, "
            "which protects each record by itself, or choose another method (docs/python.md)."
        )


FORMAT = "fairpate.estimator/1"
_STUDENT, _CONFIG, _EMBEDDING = "student.safetensors", "config.yaml", "embedding.safetensors"
_ESTIMATOR = "estimator.json"
_KINDS = "biufU"


def save(estimator: FairClassifier, folder: Path) -> Path:
    """Write the folder at once, or not at all."""
    if folder.exists():
        raise FileExistsError(f"{folder}: exists already; give a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_student(estimator.student_, temporary)
        config = placeless_values(estimator.config_)
        (temporary / _CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        files = {path.name: sha256_of(path) for path in sorted(temporary.iterdir())}
        text = json.dumps(_described(estimator) | {"files": files}, indent=2, allow_nan=False)
        (temporary / _ESTIMATOR).write_text(text + "\n", encoding="utf-8")
        # A temporary folder is its owner's alone; a saved model is there to be handed on.
        temporary.chmod(0o755)
        temporary.rename(folder)
    # After an interrupt too, or half a model would stay under a hidden name.
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def load(kind: type[FairClassifier], folder: Path) -> Any:
    """The estimator of ``folder``, of the class that it was or of the one that names its method."""
    if not (folder / _ESTIMATOR).is_file():
        if not folder.exists():
            raise StudentFileError(f"{folder}: no such folder; give one that `save` wrote.")
        raise StudentFileError(
            f"{folder}: holds no estimator (no {_ESTIMATOR}); give one that `save` wrote, or restore it from a copy."
        )
    try:
        values = json.loads((folder / _ESTIMATOR).read_text(encoding="utf-8"))
        _require_whole(folder, values)
        return _fitted(kind, folder, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StudentFileError(f"{folder}: not a readable estimator ({error}); restore it from a copy.") from error


def write_student(student: Student, folder: Path) -> None:
    """With the embedding that it reads beside it, which its card knows by checksum."""
    if student.embedding is not None:
        save_embedding(student.embedding, folder / _EMBEDDING)
        student = replace(student, card=replace(student.card, embedding=sha256_of(folder / _EMBEDDING)))
    save_student(student, folder / _STUDENT)


def _require_whole(folder: Path, values: dict[str, Any]) -> None:
    if values["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, found {values['format']}")
    for name, digest in values["files"].items():
        if name not in (_STUDENT, _CONFIG, _EMBEDDING) or sha256_of(folder / name) != digest:
            raise ValueError(f"{name} is not that of its checksum")


def _described(estimator: FairClassifier) -> dict[str, Any]:
    names = getattr(estimator, "feature_names_in_", None)
    column = sensitive_column(estimator.sensitive_feature)
    values: dict[str, Any] = strict(
        {
            "format": FORMAT,
            "classes": _names(estimator.classes_),
            "groups": _names(estimator.groups_),
            "feature_names": None if names is None else names.tolist(),
            "num_features": estimator.n_features_in_,
            "sensitive_feature": None if column is None else column.model_dump(mode="json"),
            "statement": estimator.statement_.to_json(),
        }
    )
    return values


def _names(values: npt.NDArray[Any]) -> dict[str, Any]:
    """An array of names with its type: numbers, truth values or words."""
    words = values.astype(str) if values.dtype == object else values
    # An array of objects may hold what its text does not give back.
    if words.dtype.kind not in _KINDS or not np.array_equal(words, values):
        raise ValueError(f"classes_, groups_: expected words or numbers, which JSON can hold, got {values.tolist()}.")
    return {"type": str(values.dtype), "values": words.tolist()}


def _array(values: dict[str, Any]) -> npt.NDArray[Any]:
    return np.array(values["values"], dtype=values["type"])


def _fitted(kind: type[FairClassifier], folder: Path, values: dict[str, Any]) -> FairClassifier:
    config = configured(folder / _CONFIG)
    estimator = kind(config.method)
    known = parameters_of(config.method).keys() & type(config).model_fields.keys()
    sections = {name: getattr(config, name) for name in known}
    estimator.set_params(
        **sections,
        embedding=plain(config.data.embedding),
        sensitive_feature=values["sensitive_feature"],
        random_state=config.seed,
    )
    statement = PrivacyStatement.from_json(values["statement"])
    estimator.student_ = load_student(folder / _STUDENT)
    estimator.network_, estimator.config_, estimator.statement_ = estimator.student_.network, config, statement
    estimator.classes_, estimator.groups_ = _array(values["classes"]), _array(values["groups"])
    estimator.n_features_in_ = values["num_features"]
    if values["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(values["feature_names"], dtype=object)
    estimator.events_ = tuple(event_from(event, statement.unit) for event in statement.events)
    estimator.noise_, estimator.privacy_ = statement.noise, _price(statement)
    return estimator


def _price(statement: PrivacyStatement) -> Price:
    epsilon = float("inf") if statement.epsilon is None else statement.epsilon
    return Price(
        epsilon=epsilon,
        delta=statement.delta,
        unit=statement.unit,
        relation=statement.relation,
        accounting=statement.accounting,  # type: ignore[arg-type]
    )


_UNACCOUNTED = (
    "Preprocessing outside is not accounted: what was fitted to private records before, such as a scaler, is no event "
    "here, and ε does not cover what it shows."
)
_FOLLOWS_FROM_SIZE = (
    "Settings were chosen by the real number of private {}, which counts as public here: ε covers no change of "
    "it. A declared number (num_records) tells nothing."
)
_NOT_COUNTED = "Fitted from Python: the operator's odometer did not count it, nor other fits on the same records."


def remarks(steps: Sequence[str], *, size_of: str | None) -> tuple[str, ...]:
    """What qualifies the claim: ``steps`` of a pipeline were fitted to the private records before.

    ``size_of``: records or persons, whose real number chose settings.
    """
    unaccounted = _UNACCOUNTED
    if steps:
        unaccounted = f"Fitted to the private records before, by a pipeline: {', '.join(steps)}. {_UNACCOUNTED}"
    return (*([_FOLLOWS_FROM_SIZE.format(size_of)] if size_of else []), unaccounted, _NOT_COUNTED)


def student_for(estimator: FairClassifier, groups: npt.NDArray[Any] | None) -> Student:
    """The published model; where ``fit`` saw no groups, it names those that are given."""
    student = estimator.student_
    if groups is None or len(estimator.groups_):
        return student
    names = tuple(str(name) for name in np.unique(groups))
    return replace(student, card=replace(student.card, group_names=names))


def in_notebook(estimator: FairClassifier) -> str:
    """HTML of what a fitted model guarantees; nothing before ``fit``."""
    if not hasattr(estimator, "statement_"):
        return ""
    return fitted_html(estimator.statement_, name=f"{type(estimator).__name__}: {estimator.method}")


def write_card_of(
    estimator: FairClassifier, folder: Path, X: Any, y: Any, groups: Any, use: Mapping[str, str | None]
) -> tuple[Path, Path]:
    """A run folder of the published part alone, with metrics on test records, and its card."""
    config = estimator.config_
    if not config.is_private:
        raise ValueError(f"method: {config.method} guarantees nothing, so nothing of it is published, and no card.")
    student, dataset = _tested(estimator, X, y, groups)
    run = create_run_directory(config.model_copy(update={"out": folder}))
    record_data(run, dataset, given_from_python=True)
    write_student(student, run.public)
    write_json(run.statement, strict(estimator.statement_.to_json()))
    write_json(run.metrics, _assessed(estimator, student, dataset).to_json())
    return write_card(folder, **use)


def plot(estimator: FairClassifier, X: Any, y: Any, groups: Any, ax: Any) -> Any:
    """Bars of accuracy, a line for the most common label, and the cost in the title."""
    student, dataset = _tested(estimator, X, y, groups)
    measured = _assessed(estimator, student, dataset).headline
    if ax is None:
        from matplotlib import pyplot as plt

        _, ax = plt.subplots(layout="constrained")
    bars = {"all": measured.accuracy} | {group.name: group.accuracy for group in measured.groups}
    ax.bar(range(len(bars)), list(bars.values()), color=["C0", *["C1"] * len(measured.groups)])
    ax.set_xticks(range(len(bars)), list(bars))
    ax.set(ylim=(0, 1), ylabel="accuracy on test records", title=_title(estimator, measured))
    if measured.majority_class is not None:
        always = f"always {measured.majority_class}: {measured.majority_accuracy:.1%}"
        ax.axhline(measured.majority_accuracy, color="black", linestyle="--", label=always)
        ax.legend(loc="lower right")
    return ax


def _assessed(estimator: FairClassifier, student: Student, dataset: Dataset) -> Assessment:
    """Of test records that were embedded already."""
    config = estimator.config_
    return assess(replace(student, embedding=None), dataset, seed=config.seed, least_cell=config.evaluation.least_cell)


def _title(estimator: FairClassifier, measured: Evaluation) -> str:
    statement = estimator.statement_
    cost = "not private" if statement.epsilon is None else f"ε = {epsilon_text(statement.epsilon)}"
    if not statement.noise.startswith("os_entropy"):
        cost = f"{cost}, {statement.noise}"
    gap = measured.disparity
    disparity = "" if gap != gap else f", demographic-parity gap {gap:.3f}"
    degenerate = "".join(f"\n{words}" for words in measured.degenerate)
    coverage = "" if measured.coverage == 1 else f", coverage {measured.coverage:.0%}"
    return f"{statement.method}: accuracy {measured.accuracy:.1%}, {cost}{disparity}{coverage}{degenerate}"


def _tested(estimator: FairClassifier, X: Any, y: Any, groups: Any) -> tuple[Student, Dataset]:
    """The published model, and a data set of test records alone, as its network sees them."""
    records, labels = records_like(estimator, X, groups), column_or_1d(y, warn=True)
    unknown = set(np.unique(labels).tolist()) - set(estimator.classes_.tolist())
    if unknown or len(labels) != len(records.x):
        raise ValueError(f"y: expected {len(records.x)} labels among {estimator.classes_.tolist()}, got others.")
    student = student_for(estimator, records.groups)
    x, card = features(records.x), student.card
    x = x if student.embedding is None else student.embedding(x)
    z = np.zeros(len(x), dtype=np.int64)
    if records.groups is not None:
        names = estimator.groups_ if len(estimator.groups_) else np.unique(records.groups)
        z = np.searchsorted(names, records.groups)
    codes = torch.from_numpy(np.searchsorted(estimator.classes_, labels))
    test = Split(x=x, y=codes, z=torch.from_numpy(z), record_id=tuple(map(str, range(len(x)))))
    nothing = test.take([])
    return student, Dataset(
        name="records",
        kind="image" if x.ndim == 4 else "tabular",
        private=nothing,
        public=nothing,
        validation=nothing,
        test=test,
        label_names=card.label_names,
        group_names=card.group_names,
        sensitive_attribute=card.sensitive_attribute,
    )


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
        require_inputs(config, private, public)
        require_classes(config, labels)
        require_persons_protected(config, given=bool(whose))
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
        student = student_for(self, records.groups)
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
        return save(self, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The model that :meth:`save` wrote: the same predictions. StudentFileError for a damaged or other folder."""
        loaded: Self = load(cls, Path(path))
        return loaded

    def card(
        self, folder: Path | str, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, **use: Any
    ) -> tuple[Path, Path]:
        """Write the privacy-and-fairness card, measured on test records, to a new run folder: HTML and JSON.

        ``use``: ``intended_use``, ``out_of_scope`` and ``contact``, in your words. Returns the paths of both.
        """
        check_is_fitted(self, "student_")
        return write_card_of(self, Path(folder), X, y, sensitive_features, use)

    def plot(self, X: npt.ArrayLike, y: npt.ArrayLike, *, sensitive_features: Any = None, ax: Any = None) -> Any:
        """Accuracy on test records, overall and by group, beside always saying the most common label.

        The title says what it costs: epsilon, disparity and coverage. Returns matplotlib's axes, ``ax`` or new ones.
        """
        check_is_fitted(self, "student_")
        return plot(self, X, y, sensitive_features, ax)

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        defaults = {"method": None} | parameters_of(self.method)
        said = (f"{k}={_short(v)}" for k, v in self.get_params(deep=False).items() if _short(v) != _short(defaults[k]))
        text = f"{type(self).__name__}({', '.join(said)})"
        return text if len(text) <= N_CHAR_MAX else f"{text[:N_CHAR_MAX]}..."

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        """For notebooks: scikit-learn's diagram, and above it what may be claimed of a fitted model."""
        bundle: dict[str, str] = super()._repr_mimebundle_(**kwargs)
        return {kind: in_notebook(self) * (kind == "text/html") + text for kind, text in bundle.items()}

    def _repr_html_inner(self) -> str:
        return in_notebook(self) + str(super()._repr_html_inner())

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
        return remarks(fitted_steps(steps_in_front()), size_of=f"{unit}s" if follows else None)

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


_ORDER, _SUBSET = "check_methods_sample_order_invariance", "check_methods_subset_invariance"
_PLACE_IN_BATCH = (
    "predictions are sums of 32 bits over the embedding's coordinates: the last digit of a probability depends on the "
    "record's place in a batch, by 1e-7, where the check allows 1e-9"
)
_DRAWN = "a randomised classifier draws the label of every record, in the order of X"
_EMPTY_CELL = "its records leave a group without one of the labels, whose rates are then refused"
_FEW_CELLS = ("check_classifier_data_not_an_array", "check_estimators_pickle", "check_pipeline_consistency")
_ALL_CELLS = (
    *_FEW_CELLS,
    "check_classifiers_classes",
    "check_classifiers_train",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input",
)
_OF_METHOD = {
    "dp_postprocessing": dict.fromkeys(_FEW_CELLS, _EMPTY_CELL)
    | dict.fromkeys(("check_classifiers_train", _ORDER, _SUBSET), _DRAWN),
    "dp_oracle_learner": dict.fromkeys(_ALL_CELLS, _EMPTY_CELL),
    "randomised_response": dict.fromkeys(_ALL_CELLS, _EMPTY_CELL) | dict.fromkeys((_ORDER, _SUBSET), _DRAWN),
}
_BY_NAME = {
    "check_no_attributes_set_in_init": "its parameters follow from method, so that no signature lists them",
    "check_do_not_raise_errors_in_init_or_set_params": "a method that there is not has no parameters to take",
}


def expected_failed_checks(estimator: FairClassifier) -> dict[str, str]:
    """Names of checks that ``estimator`` does not pass, each with the reason."""
    named = _BY_NAME if type(estimator) is FairClassifier else {}
    embedded = {} if estimator.public_X is None else {_ORDER: _PLACE_IN_BATCH}
    return named | embedded | _OF_METHOD.get(estimator.method, {})
