"""Arrays and frames as the data set that a run reads, checked as scikit-learn's own estimators check theirs.

Features of tables become floats, pictures stay bytes. Missing values, sparse matrices and columns that ``fit`` did not
see are refused. A column of ``X`` may hold the groups: it is removed before anything is learned, and ages or other
numbers become groups between public edges. Public records have the columns of private ones, by name where there are
names: if only one of them went through a transformer, they could not be compared.

Shapes: N private records, M public ones, F features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils import _safe_indexing, assert_all_finite, check_array, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from fairpate.config import ConfigError, Section, nearest
from fairpate.config_reader import parse_config
from fairpate.data import Dataset, Split
from fairpate.data.dataset import SEPARATORS, counted
from fairpate.data.large_arrays import Names

Values = npt.NDArray[Any]
_MOST_DRAWN = 10**7
# By name, so that pandas is not imported to ask for its types.
_TYPES_OF_NOTHING = ("NAType", "NaTType", "NoneType")


class SensitiveFeature(Section):
    """The column of ``X`` that holds the groups, and public edges where it holds numbers to be divided."""

    column: str | int
    edges: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckedRecords:
    """Records that were checked: features ``x``, and groups (N,) where they are known."""

    x: Values
    groups: Values | None


def sensitive_column(said: Any) -> SensitiveFeature | None:
    """Return the parameter ``sensitive_feature``, a name, a position or a mapping, as :class:`SensitiveFeature`."""
    if said is None or isinstance(said, SensitiveFeature):
        return said
    column = said.item() if isinstance(said, np.integer) else said
    try:
        found = parse_config(dict(said) if isinstance(said, dict) else {"column": column}, SensitiveFeature)
    except ConfigError as error:
        raise ConfigError(
            f"sensitive_feature: expected a column's name or place, or column and edges, got {said!r}: {error}"
        ) from error
    if list(found.edges) != sorted(set(found.edges)) or not np.isfinite(found.edges).all():
        raise ValueError(f"sensitive_feature.edges: expected finite numbers in rising order, got {found.edges}.")
    return found


def private_records(estimator: Any, X: Any, y: Any, groups: Any) -> tuple[CheckedRecords, Values]:
    """Return the checked records that ``fit`` is given and labels (N,), and set the estimator's columns."""
    column, found = sensitive_column(estimator.sensitive_feature), None
    if _are_pictures(X):
        x, labels = check_X_y(_pictures(X, column), y, allow_nd=True, dtype=None, estimator=estimator)
        # validate_data, which would set it, takes tables only.
        estimator.n_features_in_ = int(np.prod(x.shape[1:]))
        # An earlier fit on a frame left them, and public pictures, which have no names of columns, would be refused.
        vars(estimator).pop("feature_names_in_", None)
    elif column is None:
        x, labels = validate_data(estimator, X, y, dtype=np.float32)
    else:
        rest, found = _without_groups(estimator, X, column, y=y)
        x, labels = check_X_y(rest, y, dtype=np.float32, estimator=estimator)
    check_classification_targets(labels)
    if len(np.unique(labels)) < 2:
        # In words that scikit-learn's own checks look for.
        raise ValueError("y: a classifier learns two classes or more, got 1 class.")
    return CheckedRecords(x=x, groups=_either(found, groups, len(x), "sensitive_features")), labels


def records_like(estimator: Any, X: Any, groups: Any) -> CheckedRecords:
    """Return features with the columns that ``fit`` saw, and groups. ValueError for other columns."""
    column, found = sensitive_column(estimator.sensitive_feature), None
    if _are_pictures(X):
        x = check_array(_pictures(X, column), allow_nd=True, dtype=None, estimator=estimator)
    elif column is None:
        x = validate_data(estimator, X, dtype=np.float32, reset=False)
    else:
        rest, found = _without_groups(estimator, X, column, reset=False)
        x = check_array(rest, dtype=np.float32, estimator=estimator)
    return CheckedRecords(x=x, groups=_either(found, groups, len(x), "sensitive_features"))


def public_records(estimator: Any, X: Any, groups: Any, *, seed: int) -> CheckedRecords:
    """Return public records; for a number ``X``, that many of independent standard normal features."""
    names = getattr(estimator, "feature_names_in_", None)
    if not isinstance(X, int | np.integer) or isinstance(X, bool):
        columns = getattr(X, "columns", None)
        is_named = columns is not None and all(isinstance(column, str) for column in columns)
        if is_named != (names is not None):
            named, bare = ("X", "public_X") if names is not None else ("public_X", "X")
            raise ValueError(
                f"public_X: {named} has named columns and {bare} has none, so one of them may have gone through a "
                "transformer that the other did not; give both in one form (docs/python.md, A scaler in front)."
            )
        try:
            return records_like(estimator, X, groups)
        except ValueError as error:
            raise ValueError(f"public_X: {error}") from error
    if not 2 <= X <= _MOST_DRAWN:
        raise ValueError(f"public_X: expected records, or a number from 2 to {_MOST_DRAWN} to draw, got {X}.")
    # They depend on no record: on the number of columns alone.
    x = np.random.default_rng(seed).standard_normal((int(X), estimator.n_features_in_)).astype(np.float32)
    column, found = sensitive_column(estimator.sensitive_feature), None
    if column is not None:
        place = _place(None if names is None else list(names), column, x.shape[1])
        if not column.edges:
            raise ValueError("sensitive_feature.edges: needed for the groups of public records that are drawn.")
        x, found = np.delete(x, place, axis=1), _groups_of(x[:, place], column)
    return CheckedRecords(x=x, groups=_either(found, groups, len(x), "public_sensitive_features"))


def _are_pictures(X: Any) -> bool:
    return getattr(X, "ndim", None) == 4 or (isinstance(X, list | tuple) and np.ndim(X) == 4)


def _pictures(X: Any, column: SensitiveFeature | None) -> Values:
    if column is not None:
        raise ValueError("sensitive_feature: pictures have no columns; give sensitive_features to fit.")
    pictures = np.asarray(X)
    return pictures if pictures.dtype == np.uint8 else pictures.astype(np.float32)


def _without_groups(estimator: Any, X: Any, column: SensitiveFeature, **checks: Any) -> tuple[Any, Values]:
    """Return the other columns of ``X``, and the groups in its sensitive column."""
    names = None if getattr(X, "columns", None) is None else list(X.columns)
    table = X if names is not None else check_array(X, dtype=None, ensure_all_finite=False, estimator=estimator)
    # Only names and number of columns are checked: the one that is removed may hold words.
    validate_data(estimator, table, skip_check_array=True, **checks)
    width = table.shape[1]
    if width == 1:
        # In words that scikit-learn's own checks look for.
        raise ValueError("X: expected other features than the sensitive one, got 1 feature(s).")
    # By position: scikit-learn indexes frames and arrays alike.
    place = _place(names, column, width)
    values = np.asarray(_safe_indexing(table, place, axis=1))
    rest = _safe_indexing(table, [other for other in range(width) if other != place], axis=1)
    return rest, _groups_of(values, column)


def _place(names: Sequence[Any] | None, column: SensitiveFeature, width: int) -> int:
    if isinstance(column.column, str):
        if names is None:
            raise ValueError(
                f"sensitive_feature: {column.column!r} is a name, and X has none; give a frame, or the column's place."
            )
        if column.column not in names:
            raise ValueError(f"sensitive_feature: X has no column {column.column!r}{nearest(column.column, names)}.")
        return list(names).index(column.column)
    if not 0 <= column.column < width:
        raise ValueError(f"sensitive_feature: expected a column from 0 to {width - 1}, got {column.column}.")
    return column.column


def _groups_of(values: Values, column: SensitiveFeature) -> Values:
    """Return the values themselves, or with edges the name of the interval of each value."""
    _require_known(values, "sensitive_feature")
    if not column.edges:
        return values
    # By the edges alone: groups without members keep their names, so that no name shows who is there.
    edges = [f"{edge:g}" for edge in column.edges]
    names = [f"below {edges[0]}", *(f"{low} to {high}" for low, high in pairwise(edges)), f"from {edges[-1]}"]
    numbers = values.astype(np.float64)
    assert_all_finite(numbers, input_name="sensitive_feature")
    return np.array(names)[np.searchsorted(column.edges, numbers, side="right")]


def _either(found: Values | None, given: Any, count: int, name: str) -> Values | None:
    """Return the groups of a column, or those that were given, (N,)."""
    if given is None:
        return found
    if found is not None:
        raise ValueError(f"{name}: the parameter sensitive_feature names their column in X; give one of the two.")
    groups: Values = column_or_1d(np.asarray(given))
    if len(groups) != count:
        raise ValueError(f"Expected one of {name} per record, got {len(groups)} for {count} records.")
    _require_known(groups, name)
    return groups


def _require_known(groups: Values, name: str) -> None:
    if any(map(_is_nothing, groups.tolist())):
        raise ValueError(f"{name}: some records have no group (None or NaN); name a group for what is not known.")


def person_names(persons: Any, count: int) -> Names:
    """Return the person of each record as text: 7, 7.0 and " 7" are one. No names without ``persons``."""
    if persons is None:
        return Names()
    values = column_or_1d(np.asarray(persons)).tolist()
    if len(values) != count:
        raise ValueError(f"persons: expected one per record, got {len(values)} for {count} records.")
    # Columns with gaps hold floats: 7 and 7.0 are one person.
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    names = ["" if _is_nothing(value) else str(value).strip() for value in whole]
    if unknown := sum(not name for name in names):
        raise ValueError(
            f"persons: expected one for every record, got {unknown} without (None, NaN or empty); complete them."
        )
    if several := sum(any(mark in name for mark in SEPARATORS) for name in names):
        raise ValueError(
            f"persons: expected one for every record, got {several} with {' or '.join(SEPARATORS)} between several; "
            "name one, such as the household that protects all of them, or write single names without these "
            "characters."
        )
    return Names(f"person-{name}" for name in names)


def _is_nothing(value: Any) -> bool:
    return type(value).__name__ in _TYPES_OF_NOTHING or bool(value != value)


def dataset_of(
    X: npt.ArrayLike,
    y: npt.ArrayLike,
    sensitive_features: npt.ArrayLike | None = None,
    *,
    persons: Names | None = None,
    public_X: npt.ArrayLike | None = None,
    public_sensitive_features: npt.ArrayLike | None = None,
) -> tuple[Dataset, Values, Values]:
    """Return arrays as the data set ``records`` that a run reads, and the names of classes and groups in order of code.

    Without ``sensitive_features`` all private records are in one group, and so are public records without theirs. The
    teacher of a record is chosen by its content, or by its person. Labels of public records are unknown, -1; there are
    no test records.
    """
    x, labels = features(X), np.asarray(y)
    public_x = x[:0] if public_X is None else features(public_X)
    if labels.ndim != 1 or len(x) != len(labels):
        raise ValueError(f"Expected one label per record, got {len(x)} records, labels of shape {labels.shape}.")
    if x.ndim not in (2, 4) or not len(x) or public_x.shape[1:] != x.shape[1:]:
        raise ValueError(
            "Expected records as (N, features) or (N, channels, height, width), public ones of the same shape, "
            f"got {tuple(x.shape)} and {tuple(public_x.shape)}."
        )
    classes, codes = np.unique(labels, return_inverse=True)
    private_z = None if sensitive_features is None else np.asarray(sensitive_features)
    public_z = None if public_sensitive_features is None else np.asarray(public_sensitive_features)
    given = [values for values in (private_z, public_z) if values is not None and len(values)]
    # Concatenated they would all become text, in which the groups 1 and 1.0 differ.
    if len({np.issubdtype(values.dtype, np.number) for values in given}) > 1:
        raise ValueError("sensitive_features: private and public ones differ, the one are numbers and the other words.")
    groups: Values = np.unique(np.concatenate(given)) if given else np.array([])

    def codes_of(values: Values | None, count: int) -> Values:
        return np.zeros(count, dtype=np.int64) if values is None or not len(values) else np.searchsorted(groups, values)

    nothing = Split(x=x[:0], y=_int64(codes[:0]), z=_int64(codes[:0]), record_id=())
    dataset = Dataset(
        name="records",
        kind="image" if x.ndim == 4 else "tabular",
        private=replace(_split(x, codes, codes_of(private_z, len(x))), person_id=persons or ()),
        public=_split(public_x, np.full(len(public_x), -1), codes_of(public_z, len(public_x))),
        validation=nothing,
        test=nothing,
        label_names=tuple(str(name) for name in classes),
        group_names=tuple(str(name) for name in groups) or ("everyone",),
        sensitive_attribute="group",
    )
    return dataset, classes, groups


def _split(x: Tensor, labels: Values, groups: Values) -> Split:
    """Return records named by content alone: records that differ only in the group share a name."""
    codes = _int64(labels)
    units = tuple(
        hashlib.sha256(row.tobytes() + code.to_bytes(8, "little", signed=True)).hexdigest()
        for row, code in zip(x.numpy(), codes.tolist(), strict=True)
    )
    return Split(x=x, y=codes, z=_int64(groups), record_id=counted(units), unit_id=units)


def _int64(codes: Values) -> Tensor:
    return torch.from_numpy(codes.astype(np.int64))


def features(values: npt.ArrayLike) -> Tensor:
    """Return bytes as they are, other numbers as floats."""
    array = np.asarray(values)
    kept = np.ascontiguousarray(array, dtype=None if array.dtype == np.uint8 else np.float32)
    # torch warns of memory that it might write to.
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())
