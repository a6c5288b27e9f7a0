"""Who looks how: every method has a look, and colours of one family can be told apart by any colour vision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from run_records import run_record

from fairpate.methods.base import looks_of, method_names
from fairpate.report.figures import COLOURS, DARK_COLOURS, DASHES, FAMILIES, SHAPES, looks
from fairpate.report.frontier import points_of

# Machado, Oliveira and Fernandes 2009, severity 1, on linear sRGB.
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def linear(colour):
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def seen_by(vision, colour):
    """CIELAB of a colour under one kind of colour vision."""
    share = TO_XYZ @ np.clip(np.array(VISION[vision]) @ linear(colour), 0, 1) / WHITE
    root = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


def contrast(one, other):
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def points(*methods):
    return points_of([run_record(method) for method in methods], looks=looks_of(methods))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [COLOURS, DARK_COLOURS])
def test_colours_are_told_apart_by_every_colour_vision(vision, colours):
    pairs = itertools.combinations([seen_by(vision, colour) for colour in colours], 2)
    assert min(float(np.linalg.norm(one - other)) for one, other in pairs) > 25


def test_colours_stand_out_from_their_ground():
    assert min(contrast(colour, "#ffffff") for colour in COLOURS) > 2
    assert min(contrast(colour, "#1a212a") for colour in DARK_COLOURS) > 2.7


def test_every_method_has_a_family_and_a_look_of_its_own():
    ours = [*method_names(), "own_votes"]
    found = looks(points(*ours))
    assert found.keys() == set(ours)
    assert len({(look.shape, COLOURS[look.place]) for look in found.values()}) == len(ours)
    assert len({(look.shape, DASHES[look.place]) for look in found.values()}) == len(ours)
    assert {look.family for look in found.values()} == {family.title for family in FAMILIES.values()}
    assert len(DASHES) == len(COLOURS) == len(DARK_COLOURS)


def test_a_look_is_the_same_beside_other_methods():
    alone, among = looks(points("fairpate"))["fairpate"], looks(points(*method_names()))["fairpate"]
    assert alone == among


def test_methods_of_other_packages_share_a_shape_that_is_nobody_elses():
    others = [f"package.module:Method{number}" for number in range(9)]
    found = looks(points("fairpate", *others))
    assert next(iter(found)) == "fairpate"
    assert len({(found[name].shape, COLOURS[found[name].place]) for name in others}) == 9
    taken = {family.shape for family in FAMILIES.values()}
    assert not {found[name].shape for name in others} & taken
    assert found[others[0]].family == "Other packages"


def test_what_depends_on_votes_is_hollow_and_otherwise_the_same():
    records = [run_record("fairpate"), run_record("fairpate", epsilon_is_data_dependent=True)]
    found = looks(points_of(records, looks=looks_of(["fairpate"])))
    published, private = found["fairpate"], found["fairpate †"]
    assert (private.shape, private.place) == (published.shape, published.place)
    assert (published.hollow, private.hollow) == (False, True)


def test_shapes_differ_in_every_medium():
    assert len(set(SHAPES.values())) == len(SHAPES)
