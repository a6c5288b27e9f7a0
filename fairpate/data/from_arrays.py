"""Arrays and frames that a caller of an estimator passes, as a data set: features, labels, groups and persons.

A column of ``X`` may contain the groups: it is removed before anything is learned. A frame may be read by a declaration
(:func:`declared_records`). Features of tables become floats, pictures stay bytes. Messages name the argument or column.
"""

import hashlib
import itertools
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from sklearn.utils import _safe_indexing, assert_all_finite, check_array, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, validate_data
from torch import Tensor

from fairpate.config import ConfigError, Section, nearest, parse_config
from fairpate.data import table_files, tables
from fairpate.data.columns import is_missing
from fairpate.data.dataset import SEPARATORS, SPLIT_NAMES, Dataset, Part, Split, alike, counted
from fairpate.data.declaration import as_declared, read_declaration
from fairpate.data.given import Values, as_table, kind_of, values_of
from fairpate.data.large_arrays import Names

GIVEN: tuple[Part, ...] = ("private",)
"""The parts of a data set that a caller of an estimator passes."""
_MOST_DRAWN = 10**7
NO_LABEL = (
    "expected a label for every record, got {} records without one (contains NaN, None, masked or refused ones); leave "
    "them out."
)
NO_GROUP = "some records have no group (None, NaN or masked); give unknown ones a group of their own."
NO_PERSON = "expected a person for every record, got {} records without one (None, NaN or empty); complete them."
_NOT_NUMBERS = (
    "X: column {}: expected numbers, got {}; leave the column out, or declare the table, categories and dates included "
    "(FairClassifier.from_declaration)."
)


class SensitiveFeature(Section):
    """The column of ``X`` that contains the sensitive groups. Public ``edges`` divide a column of numbers into
    intervals; each interval is then a group."""

    column: str | int
    edges: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GivenRecords:
    """The records that a caller passed in, checked and encoded: features ``x`` (N, ...), and, if known, labels, groups
    and persons (N,)."""

    x: Values
    groups: Values | None
    labels: Values | None = None
    persons: Values | None = None


def sensitive_column(said: Any) -> SensitiveFeature | None:
    """Parse ``said``, the parameter ``sensitive_feature`` of a classifier: a column's name, its position, or a mapping
    of ``column`` and ``edges``."""
    if said is None or isinstance(said, SensitiveFeature):
        return said
    column = said.item() if isinstance(said, np.integer) else said
    try:
        found = parse_config(dict(said) if isinstance(said, dict) else {"column": column}, SensitiveFeature)
    except ConfigError as error:
        raise ConfigError(
            f"sensitive_feature: expected a column's name or position, or column and edges, got {said!r}; correct it: "
            f"{error}"
        ) from error
    if list(found.edges) != sorted(set(found.edges)) or not np.isfinite(found.edges).all():
        raise ValueError(
            f"sensitive_feature.edges: expected finite numbers in rising order, got {found.edges}; sort them."
        )
    return found


def checked_records(
    estimator: Any,
    X: Any,
    groups: Any,
    y: Any = None,
    *,
    is_fit: bool = False,
    groups_name: str = "sensitive_features",
) -> GivenRecords:
    """Check and encode the features ``X`` and the groups, and with ``is_fit`` the labels ``y``; return them as one
    object.

    With ``is_fit`` the estimator's attributes that describe columns, such as ``n_features_in_``, are set. Without it,
    ValueError if ``X`` has other columns than in ``fit``. ``groups_name``: the argument of the groups, for messages.
    """
    column, found = sensitive_column(estimator.sensitive_feature), None
    X, y = records_of(X), None if y is None else values_of(y, "y", missing=NO_LABEL)
    if y is not None and len(y) != (count := _num_samples(X)):
        # With the words that scikit-learn's own message has.
        raise ValueError(
            f"y: expected one label per record, got inconsistent numbers of samples ({len(y)} labels for {count} "
            "records); give one for each."
        )
    is_picture = getattr(X, "ndim", None) == 4
    checks: dict[str, Any] = {"dtype": np.float32, "estimator": estimator}
    if is_picture:
        if column is not None:
            raise ValueError("sensitive_feature: pictures have no columns; give sensitive_features to fit.")
        X = np.asarray(X, dtype=None if np.asarray(X).dtype == np.uint8 else np.float32)
        checks |= {"allow_nd": True, "dtype": None}
    elif column is not None:
        X, found = _without_groups(estimator, X, column, **({"y": y} if is_fit else {"reset": False}))
    is_table = not is_picture and column is None
    if not is_picture:
        _require_numbers(X)
    if not is_fit:
        x = validate_data(estimator, X, dtype=np.float32, reset=False) if is_table else check_array(X, **checks)
        return GivenRecords(x=x, groups=_either(found, groups, len(x), groups_name))
    x, labels = validate_data(estimator, X, y, dtype=np.float32) if is_table else check_X_y(X, y, **checks)
    if is_picture:
        # validate_data, which would set it, accepts only tables.
        estimator.n_features_in_ = int(np.prod(x.shape[1:]))
        # An earlier fit on a frame set them; public pictures, which have no column names, would then be refused.
        vars(estimator).pop("feature_names_in_", None)
    check_classification_targets(labels)
    if len(np.unique(labels)) < 2:
        # With the words that scikit-learn's own checks look for.
        raise ValueError("y: a classifier learns two classes or more, got 1 class; give records of another class too.")
    return GivenRecords(x=x, groups=_either(found, groups, len(x), groups_name), labels=labels)


def records_of(X: Any) -> Any:
    """Return ``X`` as an array or a frame that scikit-learn reads: an Arrow table or a mapping of columns as a frame, a
    list of rows with text as an array of objects, which keeps missing values.

    ValueError for masked values, for rows of different lengths, and for two columns of one name.
    """
    if isinstance(X, np.ma.MaskedArray):
        if np.ma.is_masked(X):
            raise ValueError("X: expected a value in every cell, got masked ones; fill them in, or leave records out.")
        return np.ma.getdata(X)
    # A sparse matrix may be a mapping too; scikit-learn refuses it.
    if isinstance(X, pa.Table | pa.RecordBatch | Mapping) and not hasattr(X, "toarray"):
        table = as_table(X, "X")
        try:
            return table.to_pandas()
        except ImportError as error:
            raise ValueError(f"X: a table of type {type(X).__name__} needs pandas, which is not installed.") from error
    if isinstance(X, list | tuple):
        if any(isinstance(row, Mapping) for row in X):
            raise ValueError("X: expected rows of numbers, got dictionaries; give pandas.DataFrame(X).")
        lengths = sorted({len(row) for row in X if isinstance(row, list | tuple | np.ndarray) and np.ndim(row)})
        if len(lengths) > 1:
            raise ValueError(f"X: expected rows of one length, got {lengths[0]} to {lengths[-1]} values; correct them.")
        array = np.asarray(X)
        # In an array of text NaN would be a name.
        return np.array(X, dtype=object) if array.dtype.kind == "U" else array
    names = [] if getattr(X, "columns", None) is None else list(X.columns)
    if again := next((name for name, count in Counter(names).items() if count > 1), None):
        raise ValueError(
            f"X: expected distinct names of columns, got {again!r} twice; rename or leave out one of them."
        )
    return X


def _require_numbers(X: Any) -> None:
    """ValueError that names the first column of ``X`` with values that are no numbers; without it, NumPy's error would
    quote a value and name no column."""
    is_frame = getattr(X, "columns", None) is not None
    if not is_frame and (not isinstance(X, np.ndarray) or X.ndim != 2 or X.dtype.kind not in "OUMm"):
        return
    for place, name in enumerate(X.columns if is_frame else range(X.shape[1])):
        values = _safe_indexing(X, place, axis=1)
        if getattr(values.dtype, "kind", "") in tuple("biufc"):
            continue
        array, shown = np.asarray(values), repr(name) if is_frame else name
        if array.dtype.kind in "Mm":
            raise ValueError(_NOT_NUMBERS.format(shown, "dates"))
        try:
            array.astype(np.float64)
        except ValueError:
            raise ValueError(_NOT_NUMBERS.format(shown, "text")) from None
        except TypeError as error:
            cells = array.tolist()
            kinds = {kind_of(type(cell)) for cell in cells if not is_missing(cell)}
            if any(map(is_missing, cells)) and kinds <= {"number"}:
                raise ValueError(
                    f"X: column {shown}: contains NaN or NA; fill them in, or declare the table."
                ) from None
            if kinds & {"text", "date", "object with a text"}:
                raise ValueError(_NOT_NUMBERS.format(shown, " and ".join(sorted(kinds)))) from None
            raise TypeError(f"X: column {shown}: {error}.") from None


def _without_groups(estimator: Any, X: Any, column: SensitiveFeature, **checks: Any) -> tuple[Any, Values]:
    """Return ``X`` without the sensitive ``column``, and the groups read from that column."""
    names = None if getattr(X, "columns", None) is None else list(X.columns)
    table = X if names is not None else check_array(X, dtype=None, ensure_all_finite=False, estimator=estimator)
    # Only names and number of columns are checked: the column that is removed may contain words.
    validate_data(estimator, table, skip_check_array=True, **checks)
    width = table.shape[1]
    if width == 1:
        # With the words that scikit-learn's own checks look for.
        raise ValueError("X: expected features in addition to the sensitive one, got 1 feature(s); give more columns.")
    # By position: scikit-learn indexes frames and arrays alike.
    place = _place(names, column, width)
    values = values_of(_safe_indexing(table, place, axis=1), "sensitive_feature", missing=NO_GROUP)
    rest = _safe_indexing(table, [other for other in range(width) if other != place], axis=1)
    return rest, _groups_of(values, column)


def _place(names: Sequence[Any] | None, column: SensitiveFeature, width: int) -> int:
    if isinstance(column.column, str):
        if names is None:
            raise ValueError(
                f"sensitive_feature: {column.column!r} is a name, and X has no column names; give a frame, or the "
                "column's position."
            )
        if column.column not in names:
            raise ValueError(f"sensitive_feature: X has no column {column.column!r}{nearest(column.column, names)}.")
        return list(names).index(column.column)
    if not 0 <= column.column < width:
        raise ValueError(
            f"sensitive_feature: expected a column from 0 to {width - 1}, got {column.column}; correct it."
        )
    return column.column


def _groups_of(values: Values, column: SensitiveFeature) -> Values:
    """Return the group of each value of the sensitive column: the value itself, or, if the column has edges, the name
    of its interval."""
    if not column.edges:
        return values
    # By the edges alone: groups without members keep their names, so that names do not reveal who is in the data.
    edges = [f"{edge:g}" for edge in column.edges]
    names = [f"below {edges[0]}", *(f"{low} to {high}" for low, high in itertools.pairwise(edges)), f"from {edges[-1]}"]
    try:
        numbers = values.astype(np.float64)
    except (ValueError, TypeError):
        raise ValueError(
            "sensitive_feature.edges: expected a column of numbers (could not convert string to float); leave them out."
        ) from None
    assert_all_finite(numbers, input_name="sensitive_feature")
    return np.array(names)[np.searchsorted(column.edges, numbers, side="right")]


def _either(found: Values | None, given: Any, count: int, name: str) -> Values | None:
    """Return the groups (N,): those found in the sensitive column (``found``), or those passed as the argument called
    ``name`` (``given``); None if there are neither.

    ValueError if both exist, or if there is not one group for each of ``count`` records.
    """
    if given is None:
        return found
    if found is not None:
        raise ValueError(
            f"{name}: groups are given twice, as sensitive_feature names their column in X; give one of the two."
        )
    if isinstance(given, str):
        raise ValueError(  # noqa: TRY004 - as for other wrong groups
            f"{name}: expected one group for each record, got a single text; give the groups, or name their column of "
            "X in the parameter sensitive_feature."
        )
    return values_of(given, name, missing=NO_GROUP, count=count).ravel()


def drawn_records(estimator: Any, count: int, groups: Any, generator: np.random.Generator) -> GivenRecords:
    """Return ``count`` public records of independent standard normal features, which depend on the number of columns
    of ``X`` alone and not on any record."""
    if not 2 <= count <= _MOST_DRAWN:
        raise ValueError(
            f"public_X: expected records, or how many to draw, from 2 to {_MOST_DRAWN}, got {count}; correct it."
        )
    x = generator.standard_normal((count, estimator.n_features_in_)).astype(np.float32)
    column, found = sensitive_column(estimator.sensitive_feature), None
    if column is not None:
        names = getattr(estimator, "feature_names_in_", None)
        place = _place(None if names is None else list(names), column, x.shape[1])
        if not column.edges:
            raise ValueError(
                "sensitive_feature.edges: drawn public records (public_X is a number) need edges for their groups, "
                "got none; give edges, or records as public_X."
            )
        x, found = np.delete(x, place, axis=1), _groups_of(x[:, place], column)
    return GivenRecords(x=x, groups=_either(found, groups, len(x), "public_sensitive_features"))


def declared_records(declaration: Any, X: Any, name: str = "X") -> GivenRecords:
    """Encode a frame by its declaration: numbers are scaled by their declared bounds, and each category becomes a
    feature of 0 or 1.

    Decimal commas and dates are read as in files, whether the frame has them as text or with a type. DataError, a
    ValueError, names every column with undeclared values, and one of which nearly all values are clipped. ValueError
    for a declaration of pictures, or one that leaves rows out. ``name`` is the frame's name in errors.
    """
    table = read_declaration(declaration, given=GIVEN)
    if table.pictures or table.keep:
        raise ValueError(
            f"declaration: {table.name} declares `pictures` or `keep`, which an estimator does not apply; use "
            "fairpate.load_data and fairpate.run_method."
        )
    options, faults = {key: option.default for key, option in table.all_options.items()}, tables.TableFaults()
    wanted = table.used(options)
    batches = table_files.plain_batches(as_table(X, name, wanted=wanted), name, wanted=wanted)
    rows = as_declared(table, pa.concat_tables(batches), options)
    faults.rows[name] += len(rows)
    features = table.visible(options)
    x = tables.encode(rows, features, name, faults)
    labels: Values | None = None
    groups: Values | None = None
    if table.label.column in rows.column_names:
        found = tables.cells(rows, table.label.column, name, faults)
        codes_N = tables.codes_of(found, table.label, "class", may_lack=True)
        # Labels of public records may be unknown: -1.
        labels = None if (codes_N < 0).any() else np.array(table.label.names)[codes_N]
    chosen = table.chosen_groups(options).values()
    if {group.column for group in chosen} <= set(rows.column_names):
        groups = np.array(table.group_names(options))[tables.crossed_codes(rows, chosen, name, faults)]
    faults.require_none()
    person, persons = table.person, None
    if person is not None and not person.when and person.column in rows.column_names:
        persons = np.array(table_files.text_of(rows[person.column]).to_pylist())
    return GivenRecords(x=x, labels=labels, groups=groups, persons=persons)


def person_names(persons: Any, count: int) -> Names:
    """Return the name of each record's person as text; empty if ``persons`` is None. The numbers 7 and 7.0, and the
    texts "7" and " 7", name the same person; for other names that are probably one there is a warning."""
    if persons is None:
        return Names()
    values = values_of(persons, "persons", missing=NO_PERSON, may_mix=True).ravel().tolist()
    if len(values) != count:
        raise ValueError(f"persons: expected a person for each of {count} records, got {len(values)} persons.")
    # Columns with gaps contain floats: 7 and 7.0 are one person.
    whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    names = [str(value).strip() for value in whole]
    if unknown := sum(not name for name in names):
        raise ValueError(f"persons: {NO_PERSON.format(unknown)}")
    if several := sum(any(mark in name for mark in SEPARATORS) for name in names):
        raise ValueError(
            f"persons: expected one person per record, got {' or '.join(SEPARATORS)} in {several} of {len(names)} "
            "names, as between several persons; give one name, such as that of the household, which protects all of "
            "them, or write single names without these characters."
        )
    for each in alike({"persons": names}):
        warnings.warn(
            f"persons: {each.names:,} names equal another one {each.words}, and count as different persons; write each "
            "person in one way.",
            UserWarning,
            stacklevel=2,
        )
    return Names(f"person-{name}" for name in names)


def dataset_of(
    X: Values,
    y: Values,
    sensitive_features: Values | None = None,
    *,
    persons: Names | None = None,
    public_X: Values | None = None,
    public_sensitive_features: Values | None = None,
) -> tuple[Dataset, Values, Values]:
    """Return checked arrays as a data set named ``records``, and the names of classes and groups in the order of their
    codes.

    Without groups, all records are in one group. The teacher of a record is chosen by its content, or by its person.
    Labels of public records are unknown, -1; there are no test records.
    """
    x = features(X)
    public_x = x[:0] if public_X is None else features(public_X)
    if x.ndim not in (2, 4) or not len(x) or public_x.shape[1:] != x.shape[1:]:
        raise ValueError(
            "X: expected records as (N, features) or (N, channels, height, width), and public_X of the same form, "
            f"got {tuple(x.shape)} and {tuple(public_x.shape)}; reshape them."
        )
    classes, codes = np.unique(y, return_inverse=True)
    given = [each for each in (sensitive_features, public_sensitive_features) if each is not None and len(each)]
    # Concatenated, they would all become text, in which the groups 1 and 1.0 differ.
    if len({np.issubdtype(values.dtype, np.number) for values in given}) > 1:
        raise ValueError(
            "sensitive_features: private and public groups differ in type; give both as numbers or both as text."
        )
    groups: Values = np.unique(np.concatenate(given)) if given else np.array([])
    private_codes, public_codes = (
        np.zeros(count, dtype=np.int64) if values is None or not len(values) else np.searchsorted(groups, values)
        for values, count in ((sensitive_features, len(x)), (public_sensitive_features, len(public_x)))
    )
    private = replace(_split(x, codes, private_codes), person_id=persons or ())
    dataset = dataset_with(
        # Test records are given later: `fit` has none.
        {"private": private, "public": _split(public_x, np.full(len(public_x), -1), public_codes)},
        label_names=tuple(str(name) for name in classes),
        group_names=tuple(str(name) for name in groups) or ("everyone",),
        sensitive_attribute="group",
        keeps_names=bool(persons),
    )
    return dataset, classes, groups


def dataset_with(splits: Mapping[str, Split], **facts: Any) -> Dataset:
    """Return a data set named ``records`` of the given ``splits``; the other splits are empty. ``facts`` are its other
    fields."""
    some = next(iter(splits.values()))
    facts |= {"kind": "image" if some.x.ndim == 4 else "tabular", **dict.fromkeys(SPLIT_NAMES, some.take([])), **splits}
    return Dataset(name="records", **facts)


def _split(x: Tensor, labels: Values, groups: Values) -> Split:
    """Return records as a split, in which a record's id is a digest of its features and label; the group does not enter
    the digest."""
    codes = torch.as_tensor(labels, dtype=torch.int64)
    units = tuple(
        hashlib.sha256(row.tobytes() + code.to_bytes(8, "little", signed=True)).hexdigest()
        for row, code in zip(x.numpy(), codes.tolist(), strict=True)
    )
    z = torch.as_tensor(groups, dtype=torch.int64)
    return Split(x=x, y=codes, z=z, record_id=counted(units), unit_id=units)


def features(values: npt.ArrayLike) -> Tensor:
    """Return the feature ``values`` as a tensor: bytes unchanged, other numbers as 32-bit floats."""
    array = np.asarray(values)
    kept = np.ascontiguousarray(array, dtype=None if array.dtype == np.uint8 else np.float32)
    # torch warns about memory that is not writable.
    return torch.from_numpy(kept if kept.flags.writeable else kept.copy())
