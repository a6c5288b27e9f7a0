"""Made-up records of a new project, as files: drawn from a fixed seed, they say of nobody anything.

Of each kind there are three parts, which share no record; public ones have no label. Groups differ a little in how
often the label is yes, so that fairness is something to look at.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from PIL import Image

from fairpate.fairness.rates import FloatArray

Kind = Literal["table", "images", "embeddings"]
Files = dict[str, bytes]
_SIZES = {"table": (1200, 400, 400), "images": (900, 300, 300), "embeddings": (1200, 400, 400)}
_PARTS = ("private", "public", "test")
_WARDS = ("surgery", "medicine", "other")
_SEED = 20260101
_SIDE, _SPOT = 16, 5
_WIDTH = 32


def example_files(kind: Kind) -> Files:
    """Every file of the examples by its path in the project."""
    return _MAKERS[kind](np.random.default_rng(_SEED), _SIZES[kind])


def _visits(generator: np.random.Generator, sizes: Sequence[int]) -> Files:
    """Visits to a hospital: older patients with longer and earlier stays come back more often, and women a little."""
    count = sum(sizes)
    is_woman_N = generator.random(count) < 0.5
    age_N = np.clip(generator.normal(62, 15, count), 18, 100).round().astype(int)
    days_N = np.minimum(generator.poisson(6, count), 30)
    earlier_N = np.minimum(generator.poisson(1.2, count), 10)
    ward_N = generator.integers(len(_WARDS), size=count)
    score_N = 0.09 * (age_N - 62) + 0.35 * (days_N - 6) + 0.9 * (earlier_N - 1.2) + 0.3 * is_woman_N
    back_N = generator.logistic(size=count) < 1.5 * score_N
    rows = [
        (f"v{n:05d}", _sex(is_woman_N[n]), age_N[n], days_N[n], earlier_N[n], _WARDS[ward_N[n]], _yes(back_N[n]))
        for n in range(count)
    ]
    return _tables(("visit", "sex", "age", "days", "earlier_visits", "ward", "readmitted"), rows, sizes)


def _scans(generator: np.random.Generator, sizes: Sequence[int]) -> Files:
    """Grey pictures, some with a bright spot; more often those of men, which are a little brighter as a whole."""
    count = sum(sizes)
    is_woman_N = generator.random(count) < 0.5
    has_spot_N = generator.random(count) < np.where(is_woman_N, 0.45, 0.55)
    pixels_NHW = generator.normal(90, 20, (count, _SIDE, _SIDE)) + np.where(is_woman_N, 0, 8)[:, None, None]
    corners_N2 = generator.integers(3, 7, size=(count, 2))
    files, rows = {}, []
    for n in range(count):
        if has_spot_N[n]:
            top, left = corners_N2[n]
            pixels_NHW[n, top : top + _SPOT, left : left + _SPOT] += 70
        path = f"pictures/scan{n:04d}.png"
        files[path] = _png(pixels_NHW[n])
        rows.append((path, _sex(is_woman_N[n]), _yes(has_spot_N[n])))
    return files | _tables(("path", "sex", "spot"), rows, sizes)


def _notes(generator: np.random.Generator, sizes: Sequence[int]) -> Files:
    """Vectors as a language model gives them for letters; some directions say what is urgent, and one the sex."""
    count = sum(sizes)
    is_woman_N = generator.random(count) < 0.5
    vectors_NF = generator.normal(size=(count, _WIDTH))
    vectors_NF[:, 0] += np.where(is_woman_N, 0.6, -0.6)
    score_N = vectors_NF[:, :4].sum(axis=1) + generator.logistic(scale=0.4, size=count)
    rows = [(f"n{n:05d}", _sex(is_woman_N[n]), _yes(score_N[n] > 0)) for n in range(count)]
    arrays = dict(zip(_PARTS, np.split(vectors_NF.astype(np.float32), np.cumsum(sizes)[:-1]), strict=True))
    return {f"example_{part}.npy": _npy(array) for part, array in arrays.items()} | _tables(
        ("note", "sex", "urgent"), rows, sizes
    )


_MAKERS: Mapping[Kind, Callable[[np.random.Generator, Sequence[int]], Files]] = {
    "table": _visits,
    "images": _scans,
    "embeddings": _notes,
}


def _tables(header: Sequence[str], rows: Iterable[Sequence[object]], sizes: Sequence[int]) -> Files:
    """A CSV file for each part; the last column is the label."""
    found, left = {}, iter(rows)
    for part, size in zip(_PARTS, sizes, strict=True):
        text, width = io.StringIO(), len(header) - (part == "public")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header[:width])
        writer.writerows([next(left)[:width] for _ in range(size)])
        found[f"example_{part}.csv"] = text.getvalue().encode()
    return found


def _png(pixels_HW: FloatArray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.clip(pixels_HW, 0, 255).astype(np.uint8)).save(content, "PNG")
    return content.getvalue()


def _npy(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def _sex(is_woman: bool) -> str:
    return "F" if is_woman else "M"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
