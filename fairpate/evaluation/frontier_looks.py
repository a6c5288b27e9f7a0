"""How a method looks, on every page and picture the same: shape by family, colour and dash within the family.

Seven colours are told apart by every kind of colour vision (least CIE76 distance above 25 under normal, protan, deutan
and tritan vision, on light and on dark ground), and no family has more methods; a hollow mark says that its epsilon
depends on private votes. Methods of other packages share a family of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fairpate.evaluation.frontier import Point

COLOURS = ("#2b4eff", "#b3181c", "#f28e2b", "#4fa37c", "#7b1fa2", "#b99ae0", "#18212b")
"""On light ground: pages by day, and paper."""
DARK_COLOURS = ("#5cb8ff", "#f55c00", "#ffc185", "#31724b", "#9d4394", "#8d33ff", "#e8ecf0")
"""The same places on dark ground."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "2px,2px,8px,2px")


class Shape(NamedTuple):
    """One shape in every medium: plotly's name, matplotlib's marker, an SVG path in a box of 16."""

    plotly: str
    matplotlib: str | tuple[int, Literal[0, 1, 2], int]
    path: str


SHAPES = (
    Shape("circle", "o", "M8 2.4a5.6 5.6 0 1 0 .01 0z"),
    Shape("square", "s", "M3 3h10v10H3z"),
    Shape("diamond", "D", "M8 1l7 7-7 7-7-7z"),
    Shape("triangle-up", "^", "M8 2l6.6 11.4H1.4z"),
    Shape("triangle-down", "v", "M8 14L1.4 2.6h13.2z"),
    Shape("star", "*", "M8 1l2.1 4.8 5.2.5-3.9 3.4 1.1 5.1L8 12.1l-4.5 2.7 1.1-5.1L.7 6.3l5.2-.5z"),
    Shape("cross", "P", "M6 2h4v4h4v4h-4v4H6v-4H2V6h4z"),
    Shape("x", "X", "M4.5 2L8 5.5 11.5 2 14 4.5 10.5 8l3.5 3.5-2.5 2.5L8 10.5 4.5 14 2 11.5 5.5 8 2 4.5z"),
    Shape("hexagon", "h", "M8 1.5l5.7 3.2v6.6L8 14.5l-5.7-3.2V4.7z"),
    Shape("pentagon", "p", "M8 1.5l6.6 4.8-2.5 7.8H3.9L1.4 6.3z"),
    Shape("triangle-right", ">", "M14 8L2.6 14.6V1.4z"),
    Shape("triangle-left", "<", "M2 8l11.4-6.6v13.2z"),
    Shape("diamond-tall", "d", "M8 .8l4.4 7.2L8 15.2 3.6 8z"),
    Shape("hexagram", (6, 1, 0), "M8 1l2 3.5h4L12 8l2 3.5h-4L8 15l-2-3.5H2L4 8 2 4.5h4z"),
    Shape("star-diamond", (4, 1, 0), "M8 .5l2 5.5 5.5 2-5.5 2-2 5.5-2-5.5L.5 8 6 6z"),
    Shape("hexagon2", "H", "M1.5 8l3.2-5.7h6.6L14.5 8l-3.2 5.7H4.7z"),
    Shape("octagon", "8", "M5.2 1.5h5.6l3.7 3.7v5.6l-3.7 3.7H5.2l-3.7-3.7V5.2z"),
    Shape("star-square", (4, 1, 45), "M2 2l6 3.2L14 2l-3.2 6L14 14l-6-3.2L2 14l3.2-6z"),
)
_SHAPE_OF = {shape.plotly: shape for shape in SHAPES}
_IN_SPACE = frozenset({"circle", "square", "diamond", "cross", "x"})
_HOLLOW_IN_SPACE = frozenset({"circle", "square", "diamond"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """Methods of one kind, which share a shape; each with the place of its colour."""

    title: str
    shape: Shape
    methods: Mapping[str, int]


FAMILIES = (
    Family(
        title="PATE family",
        shape=_SHAPE_OF["circle"],
        methods={"fairpate": 0, "pate": 4, "pate_s_pre": 5, "pate_s_in": 3, "sf_pate": 1, "own_votes": 6},
    ),
    Family(
        title="Records vote",
        shape=_SHAPE_OF["diamond"],
        methods={"weighted_votes": 3, "record_votes": 5, "private_knn": 1},
    ),
    Family(
        title="DP-SGD family",
        shape=_SHAPE_OF["square"],
        methods={"dp_sgd": 2, "fair_dp_sgd": 1, "dp_fermi": 5, "raco_dp": 3, "pf_ld": 4, "f_ld": 0, "sgd": 6},
    ),
    Family(
        title="Noisy rates and labels",
        shape=_SHAPE_OF["cross"],
        methods={"dp_postprocessing": 4, "dp_oracle_learner": 2, "randomised_response": 0},
    ),
    Family(title="Constrained regression", shape=_SHAPE_OF["x"], methods={"covariance_constraint": 0}),
)
_OTHERS = "Other packages"
# A second shape only where another package brings more methods than there are colours.
_OTHER_SHAPES = tuple(_SHAPE_OF[name] for name in ("star", "triangle-up", "triangle-down", "pentagon", "hexagon"))


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one series is drawn; ``place`` is that of its colour among ``COLOURS``, and of its dash."""

    series: str
    family: str
    shape: Shape
    hollow: bool
    place: int

    @property
    def color(self) -> str:
        """On light ground."""
        return COLOURS[self.place]

    @property
    def dash(self) -> str:
        """Of lines, by plotly's name."""
        return DASHES[self.place]

    @property
    def symbol(self) -> str:
        """Plotly's name of the mark in a plane."""
        return self.shape.plotly + ("-open" if self.hollow else "")

    @property
    def symbol_in_space(self) -> str:
        """Plotly's name of the mark in three dimensions, where few exist."""
        name = self.shape.plotly if self.shape.plotly in _IN_SPACE else "x"
        return f"{name}-open" if self.hollow and name in _HOLLOW_IN_SPACE else name


def looks(points: Sequence[Point]) -> dict[str, Look]:
    """A look for each series, ordered by family. Only that of other packages' methods depends on what else is there."""
    methods = {point.series: point.method for point in points}
    placed = _placed(set(methods.values()))
    order = {method: rank for rank, method in enumerate(placed)}
    return {
        series: Look(series=series, family=family, shape=shape, hollow=series != methods[series], place=place)
        for series in sorted(methods, key=lambda series: (order[methods[series]], series))
        for family, shape, place in [placed[methods[series]]]
    }


def by_family(found: Iterable[Look]) -> dict[str, list[Look]]:
    """Looks under the title of their family."""
    families: dict[str, list[Look]] = {}
    for look in found:
        families.setdefault(look.family, []).append(look)
    return families


def _placed(methods: set[str]) -> dict[str, tuple[str, Shape, int]]:
    """Family, shape and place of each method, in the order of families."""
    known = {
        method: (family.title, family.shape, place) for family in FAMILIES for method, place in family.methods.items()
    }
    placed = {method: known[method] for method in known if method in methods}
    for rank, method in enumerate(sorted(methods - known.keys())):
        turn, place = divmod(rank, len(COLOURS))
        placed[method] = (_OTHERS, _OTHER_SHAPES[turn % len(_OTHER_SHAPES)], place)
    return placed
