"""A fitted estimator in a folder, without pickle.

    student.safetensors      the published model, and
    config.yaml              its method and configuration, as in the folder of a run
    embedding.safetensors    what it reads, where that is an embedding: public numbers
    estimator.json           names of columns, classes and groups, the statement, and the sha256 of the other files

No record is in it, but for what an embedding of pictures holds of public ones.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from fairpate.app.identity import placeless_values
from fairpate.data.embedding_file import save_embedding
from fairpate.data.files import sha256_of
from fairpate.estimators.parameters import parameters_of, plain
from fairpate.estimators.records import sensitive_column
from fairpate.methods.load import load_method
from fairpate.methods.pate import require_allowed
from fairpate.methods.trained import Price
from fairpate.privacy.event_values import event_from
from fairpate.strict_json import strict
from fairpate.types import PrivacyStatement
from student.card import StudentFileError
from student.predict import Student, load_student, save_student

if TYPE_CHECKING:
    from fairpate.estimators.classifier import FairClassifier

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
    config = load_method(folder / _CONFIG)
    # A folder may come from anybody: to load it must never run code that it names.
    require_allowed(config, allow_code=False)
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
