"""Tables and arrays that a caller passes from Python: which values are missing, and which objects are accepted.

NumPy writes NaN into an array of text as the text `nan`, and drops the mask of a masked array; pandas and Arrow have
missing values and categories of their own. Everything that enters by an estimator, by :func:`fairpate.load_data` or by
:func:`fairpate.assess_predictions` passes through this module before it becomes an array, so that a missing value
never becomes the name of a class, a group or a person. Messages name the argument or column and the kind of its values,
and quote no value.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import numbers
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fairpate.data.columns import PublishedValues, is_missing
from fairpate.types import DataSettingsError

Values = npt.NDArray[Any]


def as_table(frame: Any, name: str, *, wanted: Collection[str] | None = None) -> pa.Table:
    """Return a frame, an Arrow table or batch, or a mapping of columns as an Arrow table; ``name`` is its name in
    messages. Columns that cannot be read are left out unless they are in ``wanted``; None: every column is wanted.

    A missing value of any kind (None, NaN, NaT, NA, masked; in lists and arrays also the text `nan`, which NumPy makes
    of NaN) becomes null. Intervals, periods and columns of both text and numbers become the text that a delimited
    file would have. :class:`DataSettingsError` for anything that is not a table, names the column.
    """
    is_mapping = isinstance(frame, Mapping)
    if is_mapping or (hasattr(frame, "iloc") and hasattr(frame, "columns")):
        # By position: a frame may have two columns of one name.
        given = list(frame.items() if is_mapping else ((each, frame.iloc[:, i]) for i, each in enumerate(frame)))
    elif hasattr(frame, "__arrow_c_stream__") and not hasattr(frame, "dtype"):  # a series has one too
        try:
            # Of polars: its own conversion writes text in a form that all functions of Arrow read.
            table = frame.to_arrow() if hasattr(frame, "to_arrow") else pa.table(frame)
        except (pa.ArrowException, TypeError, ValueError):
            raise _no_table(frame, name) from None
        given = list(zip(table.column_names, table.columns, strict=True))
    else:
        raise _no_table(frame, name)
    columns: dict[str, pa.Array] = {}
    for place, (each, values) in enumerate(given):
        column, is_wanted = str(each), wanted is None or str(each) in wanted
        if is_missing(each):
            raise DataSettingsError(f"{name}: expected a name for every column, got none for column {place}; name it.")
        if column in columns:
            if not is_wanted:
                continue
            raise DataSettingsError(
                f"{name}: expected distinct names of columns, got {column!r} twice; rename or leave out one of them."
            )
        try:
            columns[column] = _column(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            if not is_wanted:
                continue
            kind = getattr(values, "dtype", None)
            got = f"{type(values).__name__}{'' if kind is None else f' ({kind})'}; convert it to one of these"
            # Arrow quotes values: only what this module says itself is shown.
            got = str(error) if isinstance(error, _ColumnError) else got
            raise DataSettingsError(
                f"{name}: column {column}: expected text, numbers or dates, one for each record, got {got}."
            ) from None
        first = next(iter(columns))
        if (length := len(columns[column])) != len(columns[first]):
            raise _no_table(frame, name, f" ({first} has {len(columns[first])} values, {column} has {length})")
    return pa.table(columns)


def _no_table(frame: Any, name: str, reason: str = "") -> DataSettingsError:
    return DataSettingsError(
        f"{name}: expected a frame, a pyarrow.Table or a dictionary of columns of one length, got "
        f"{type(frame).__name__}{reason}; pass one of these."
    )


# The text that NumPy and pandas make of a missing value where an array is made of text.
TEXTS_OF_NOTHING = ("nan", "NaT", "<NA>")


def kind_of(kind: type) -> str:
    """Return in words the kind of values of this type: text, number, truth value, date, list; `object with a text` for
    those whose text is their name, such as intervals; or else the type's name."""
    # In this order: a truth value is an integer too, and a member of an enumeration may be text.
    words = {
        "truth value": (bool, np.bool_),
        "object with a text": (enum.Enum, uuid.UUID),
        "text": (str,),
        "number": (numbers.Real, decimal.Decimal),
        "date": (datetime.date, datetime.time, np.datetime64),
        "list": (list, tuple, np.ndarray),
    }
    # By the name of the package, so that pandas is not imported only to know its types.
    other = "object with a text" if kind.__module__.partition(".")[0] == "pandas" else kind.__name__
    return next((word for word, kinds in words.items() if issubclass(kind, kinds)), other)


def _is_nothing(value: Any) -> bool:
    return is_missing(value) or (isinstance(value, str) and value in TEXTS_OF_NOTHING)


def _kinds(values: Iterable[Any]) -> set[str]:
    return {kind_of(kind) for kind in set(map(type, values))}


class _ColumnError(ValueError):
    """What a column has instead of values of one kind, with the remedy; no value is quoted."""


def _column(values: Any) -> pa.Array:
    """Return the ``values`` of one column as an Arrow array; what becomes of missing values and of objects is as in
    :func:`as_table`."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, np.ma.MaskedArray):
        column = _column(np.ma.getdata(values))
        return pc.if_else(pa.array(~np.ma.getmaskarray(values)), column, pa.scalar(None, column.type))
    if isinstance(values, np.ndarray):
        if values.ndim == 2 and values.dtype.kind in "iuf":
            return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), values.shape[1])
        if values.ndim != 1:
            raise _ColumnError(f"an array of shape {values.shape}; give one of one dimension")
        if values.dtype.kind == "U":
            return pa.array(values, mask=np.isin(values, TEXTS_OF_NOTHING))
        return _column(values.tolist()) if values.dtype.kind in "OT" else pa.array(values)
    if hasattr(values, "to_arrow"):
        return values.to_arrow()
    kind = getattr(values, "dtype", None)
    if hasattr(kind, "categories"):
        of = getattr(values, "array", values)  # a series, an index, or the categories themselves
        names = _column(of.categories)
        names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
        return pa.DictionaryArray.from_arrays(pa.array(of.codes, mask=of.codes < 0), names)
    if hasattr(kind, "fill_value"):  # sparse
        return _column(np.asarray(values))
    is_object = str(kind).startswith(("object", "interval", "period"))
    if hasattr(values, "isna") and not is_object:
        return pa.array(values, from_pandas=True)
    if hasattr(values, "toarray"):
        raise _ColumnError("a sparse matrix; use its .toarray()")
    if not is_object and not isinstance(values, list | tuple | range):
        if hasattr(values, "__array__"):
            return _column(np.asarray(values))
        raise _ColumnError(f"{type(values).__name__}; give a list, an array or a series")
    cells = [None if _is_nothing(each) else each for each in values]
    kinds = _kinds(each for each in cells if each is not None)
    if not kinds:
        return pa.nulls(len(cells), pa.string())
    if len(kinds) == 1 and (only := next(iter(kinds))) in ("text", "number", "truth value", "date", "list"):
        try:
            return pa.array([each.tolist() if isinstance(each, np.generic | np.ndarray) else each for each in cells])
        except (pa.ArrowException, OverflowError):
            if only != "number":
                raise
    if not kinds <= {"text", "number", "object with a text"}:
        raise _ColumnError(f"{' and '.join(sorted(kinds))}; give values of one kind")
    return pa.array([None if each is None else PublishedValues.text(each) for each in cells], pa.string())


def values_of(given: Any, name: str, *, missing: str, count: int | None = None, may_mix: bool = False) -> Values:
    """Return the values that a caller passed for the argument ``name`` as an array with one for each record: (N,), or
    (N, 1) if that is given.

    ValueError that begins with ``name`` for missing values (``missing`` says with their number what is missing, and the
    remedy), for another number of values than ``count``, for values of several kinds unless ``may_mix``, and for
    anything that is not a list, an array or a series.
    Intervals, periods and other objects of pandas become their text.
    """

    def refused(got: str, remedy: str = "give a list, an array or a series") -> ValueError:
        return ValueError(f"{name}: expected one value for each record, got {got}; {remedy}.")

    if hasattr(given, "toarray"):
        raise refused(f"a sparse matrix ({type(given).__name__})", "give its .toarray().ravel()")
    if isinstance(given, str):
        raise refused("a single text", "give the values themselves, such as frame[column]")
    if not isinstance(given, list | tuple | range) and not hasattr(given, "__array__"):
        raise refused(type(given).__name__)
    array = np.ma.getdata(given) if isinstance(given, np.ndarray) else _as_objects(given)
    if array.ndim != 1 and array.shape[1:] != (1,):
        raise refused(f"an array of shape {array.shape}", "give one column")
    if count not in (None, len(array)):
        raise ValueError(
            f"{name}: expected one value per record, got {len(array)} values for {count} records; give one for each."
        )
    is_missing_N = np.ma.getmaskarray(given).ravel() if isinstance(given, np.ma.MaskedArray) else np.zeros(1, np.bool_)
    flat: list[Any] = array.ravel().tolist() if array.dtype.kind in "OT" else []
    if array.dtype.kind in "fcmM":
        is_missing_N = is_missing_N | (array != array).ravel()
    elif array.dtype.kind == "U":
        is_missing_N = is_missing_N | np.isin(array, TEXTS_OF_NOTHING).ravel()
    elif flat:
        is_missing_N = is_missing_N | np.array([_is_nothing(each) for each in flat])
    if count := int(is_missing_N.sum()):
        raise ValueError(f"{name}: {missing.format(count)}")
    if not flat:
        return array
    kinds = _kinds(flat)
    if not kinds <= {"text", "number", "truth value", "date", "object with a text"}:
        raise refused(" and ".join(sorted(kinds)), "give text or numbers")
    if len(kinds) > 1:
        if not may_mix:
            raise refused(" and ".join(sorted(kinds)), "give values of one kind, such as text")
        return array
    if kinds <= {"date", "object with a text"}:
        return np.array([str(each) for each in flat]).reshape(array.shape)
    # A series of text stays an array of objects, as scikit-learn leaves it.
    return array if "text" in kinds and not isinstance(given, list | tuple) else np.array(flat).reshape(array.shape)


def _as_objects(given: Any) -> Values:
    """Return a list, a series or another object as an array in which missing values are still what they were."""
    if not isinstance(given, list | tuple):
        return np.asarray(given)
    made = np.empty(len(given), dtype=object)
    made[:] = given if not any(isinstance(each, list | tuple | np.ndarray) for each in given) else [*map(_one, given)]
    return made


def _one(value: Any) -> Any:
    """Return the only item of a list of one, as in a column of an array; any other value unchanged."""
    return value[0] if isinstance(value, list | tuple | np.ndarray) and np.shape(value) == (1,) else value
