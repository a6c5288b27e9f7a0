"""Who votes: numbers by hand arithmetic, and the method that is chosen where none is named."""

import math

import pytest
import torch

from fairpate.data import Dataset, Split
from fairpate.methods.base import configured


def pool_in_two_corners(num_public: int) -> Dataset:
    """Half of the public records at (1, 0), half at (0, 1); nothing else is there."""
    x = torch.eye(2).repeat(num_public // 2, 1)
    codes = torch.arange(num_public) % 2
    public = Split(x=x, y=codes, z=codes, record_id=tuple(map(str, range(num_public))))
    nothing = public.take([])
    return Dataset(
        name="corners",
        kind="tabular",
        private=nothing,
        public=public,
        validation=nothing,
        test=nothing,
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="group",
    )


def test_votes_on_a_label_are_those_of_hand_arithmetic() -> None:
    dataset = pool_in_two_corners(400)
    target = ["target.epsilon=1", "target.delta=1e-5"]
    by_curves = [*target, "target.accounting=rdp"]
    counts = configured({"record_votes": {"num_prototypes": 8, "taught_share": 0.5}}, by_curves, method="record_votes")
    voting = counts.voting(dataset, 4000)
    assert (voting.votes, voting.labels) == (500, 200)
    # A vote is (1/2, x) / |(1/2, x)|: of the x part, 1 / sqrt(1.25) remains, for the half that lies in one's corner.
    vectors = configured({"weighted_votes": {"embedding": {}}}, by_curves, method="weighted_votes")
    weighted = vectors.voting(dataset, 4000)
    share = (199 / 399) / math.sqrt(1.25)
    assert weighted.votes == pytest.approx(4000 * share, rel=0.01)
    assert weighted.noise_stddev_votes == pytest.approx(voting.noise_stddev_votes, rel=0.01)
    neighbours = configured(
        {"private_knn": {"sampling_rate": 0.5, "num_neighbours": 30}, "aggregator": {"num_queries": 1}},
        target,
        method="private_knn",
    )
    assert neighbours.voting(dataset, 20).votes == 10
    assert neighbours.voting(dataset, 1000).votes == 30
