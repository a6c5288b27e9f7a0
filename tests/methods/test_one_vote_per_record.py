"""One vote per record: what one record moves, what is noised, what is public, and what follows at no cost."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from divergences import delta_at
from torch import Tensor

from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.data.embedding import Nearness, Prototypes, SpaceConfig
from fairpate.methods import record_votes
from fairpate.methods.base import configured
from fairpate.methods.record_votes import RecordVotesConfig, labels_of_cells, labels_of_linear_rule, noisy_votes
from fairpate.privacy.accountant import event_pld
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import VoteTables
from fairpate.releases.directory import RunDirectory, read_statement
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")

EMBEDDINGS = ("components", "graph")


def settings(out: Path, **changed: Any) -> Any:
    values = {
        "noise": "seeded",
        "target": {"epsilon": 2.0, "accounting": "rdp"},
        "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
        "student": {"model": {"name": "logistic"}, "fit": {"epochs": 2}},
        "record_votes": {"num_prototypes": 20} | changed,
    }
    return configured(values, [f"out={out}"], method="record_votes")


def run(config: Any, dataset: Dataset) -> RunDirectory:
    return run_method(config, Reporter(quiet=True), dataset)


def cells(pool: Tensor, embedding: Any = "components", count: int = 20) -> Prototypes:
    return Prototypes.of(pool, SpaceConfig(embedding=embedding, num_components=20), count=count, seed=0)


class Watched:
    """Everything that a run computes on the way to its table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prototypes: list[Prototypes] = []
        self.tables: list[npt.NDArray[np.int64]] = []
        self.stddevs: list[float] = []
        make, release = Prototypes.of, noisy_votes

        def made(*values: Any, **named: Any) -> Prototypes:
            self.prototypes.append(make(*values, **named))
            return self.prototypes[-1]

        def released(*values: Any, **named: Any) -> Any:
            self.stddevs.append(named["stddev"])
            self.tables.append(release(*values, **named))
            return self.tables[-1]

        monkeypatch.setattr(record_votes.Prototypes, "of", made)
        monkeypatch.setattr(record_votes, "noisy_votes", released)


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_one_record_moves_one_cell_by_one_and_nothing_else(
    embedding: str, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise is equal in both runs, so that tables differ by what the record did."""
    watched = Watched(monkeypatch)
    smaller = dataclasses.replace(digits, private=digits.private.take(range(1, len(digits.private))))
    statements = []
    for name, dataset in (("with", digits), ("without", smaller)):
        done = run(settings(tmp_path / name, embedding=embedding, num_prototypes=None), dataset)
        statements.append(read_statement(done))
    moved = watched.tables[0] - watched.tables[1]
    place = watched.prototypes[0].nearest(digits.private.x[:1])[0], int(digits.private.y[0])
    assert moved[place] == 1
    assert np.abs(moved).sum() == 1
    one, other = watched.prototypes
    np.testing.assert_array_equal(one.centres, other.centres)
    np.testing.assert_array_equal(one.coordinates_MD, other.coordinates_MD)
    np.testing.assert_array_equal(one.prototype_M, other.prototype_M)
    assert watched.stddevs[0] == watched.stddevs[1]
    assert statements[0].events == statements[1].events
    assert statements[0].epsilon == statements[1].epsilon <= 2


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_where_a_record_votes_is_its_own_affair(embedding: str, digits: Dataset) -> None:
    """Other voters before and beside it, however many, change nothing: bit by bit the same coordinates."""
    public, private = digits.public.x, digits.private.x
    found = cells(public, embedding)
    full_N = found.nearest(private)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(found.nearest(private[order]), full_N[order.numpy()])
    for part in (slice(0, 1), slice(5, 12), slice(1, None)):
        np.testing.assert_array_equal(found.nearest(private[part]), full_N[part])
    assert len(found.nearest(private[:0])) == 0
    np.testing.assert_array_equal(found.embed(private[order]), found.embed(private)[order.numpy()])


def test_nearness_orders_by_distance_and_does_not_depend_on_other_rows() -> None:
    generator = np.random.default_rng(0)
    rows, others = (generator.normal(size=(size, 30)).astype(np.float32) for size in (700, 40))
    nearness = Nearness.to(others[None], radius=9.0)
    distances = np.linalg.norm(rows[:, None] - others, axis=2)
    found, _ = nearness(rows)
    assert (found.argmax(axis=1) == distances.argmin(axis=1)).mean() > 0.995
    assert (found == np.floor(found)).all()
    assert np.abs(found).max() < 2**23
    for start in range(8):
        np.testing.assert_array_equal(nearness(rows[start : start + 3])[0], found[start : start + 3])
    far, _ = nearness(1e6 * rows)
    assert np.isfinite(far).all()
    assert np.abs(far).max() < 2**23


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_prototypes_are_nearest_to_their_own_records(embedding: str, digits: Dataset) -> None:
    found = cells(digits.public.x, embedding, count=15)
    assert sorted(set(found.prototype_M.tolist())) == list(range(15))
    agreement = (found.nearest(digits.public.x) == found.prototype_M).mean()
    assert agreement > (0.99 if embedding == "components" else 0.9)


def test_every_cell_has_noise_and_empty_ones_too() -> None:
    nobody = np.zeros(0, dtype=np.int64)
    draws = np.stack(
        [noisy_votes(nobody, nobody, shape=(6, 4), stddev=5.0, source=SeededSource(seed)) for seed in range(100)]
    )
    assert (draws.std(axis=0) > 3).all()
    flat = draws.reshape(100, -1)
    correlation = np.corrcoef(flat.T) - np.eye(flat.shape[1])
    assert np.abs(correlation).max() < 0.5, "each cell has noise of its own"


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (2 / 3, False), (3 / 2, False)])
def test_the_noise_has_the_scale_that_is_priced(factor: float, fits: bool) -> None:
    stddev, shape = 6.0, (60, 10)
    one = np.zeros(1, dtype=np.int64)
    noise = noisy_votes(one, one, shape=shape, stddev=factor * stddev, source=SeededSource(5)).astype(float)
    noise[0, 0] -= 1
    ratio = np.square(noise).mean() / stddev**2
    assert (abs(ratio - 1) < 4 * math.sqrt(2 / noise.size)) == fits


def test_the_event_is_the_same_whatever_the_table_and_what_follows(digits: Dataset, tmp_path: Path) -> None:
    two = dataclasses.replace(
        digits,
        **{
            name: dataclasses.replace(part := getattr(digits, name), y=(part.y >= 5).long())
            for name in ("private", "public", "validation", "test")
        },
        label_names=("low", "high"),
    )
    changes: list[tuple[Dataset, dict[str, Any]]] = [
        (digits, {}),
        (digits, {"num_prototypes": 7}),
        (digits, {"embedding": "graph", "rule": "linear"}),
        (two, {"taught_share": 0.2}),
    ]
    events = [
        read_statement(run(settings(tmp_path / str(number), **changed), dataset)).events
        for number, (dataset, changed) in enumerate(changes)
    ]
    assert all(event == events[0] for event in events)
    assert [event["count"] for event in events[0]] == [1]


def test_fairness_and_certainty_cost_nothing(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    gate = {"max_disparity": 0.02, "min_count": 5}
    told, taught = [], []
    for number, changed in enumerate(({}, {"gate": gate}, {"taught_share": 0.3}, {"rule": "linear"})):
        done = run(settings(tmp_path / str(number), **changed), digits)
        told.append(read_statement(done).events)
        taught.append(json.loads(done.record.read_text())["epsilon"])
    assert all(event == told[0] for event in told)
    assert len(set(taught)) == 1
    for table in watched.tables[1:]:
        np.testing.assert_array_equal(table, watched.tables[0])


def test_no_neighbour_of_a_small_data_set_tells_more_than_is_priced() -> None:
    """Records of two places and two labels: all sets of at most two, each with one more, over all tables."""
    pool = torch.tensor([[-1.0], [-0.9], [1.0], [1.1]])
    found = Prototypes.of(pool, SpaceConfig(embedding="components", num_components=1), count=2, seed=0)
    stddev, reach = 1.1, 7
    event = event_pld(VoteTables(count=1, noise_stddev_votes=stddev), 1e-3)
    assert event is not None
    values = np.arange(-reach, reach + 3)
    kinds = [(torch.tensor([[place]]), label) for place in (-1.0, 1.2) for label in (0, 1)]

    def counts(records: list[tuple[Tensor, int]]) -> npt.NDArray[np.int64]:
        """The table without its noise, as the method makes it."""
        places = found.nearest(torch.cat([x for x, _ in records])) if records else np.zeros(0, dtype=np.int64)
        labels = np.array([label for _, label in records], dtype=np.int64)
        noise = noisy_votes(places[:0], labels[:0], shape=(2, 2), stddev=stddev, source=SeededSource(2))
        return noisy_votes(places, labels, shape=(2, 2), stddev=stddev, source=SeededSource(2)) - noise

    def masses(table: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        joint = np.ones(1)
        for count in table.ravel():
            weights = np.exp(-((values - count) ** 2.0) / (2 * stddev**2))
            joint = np.multiply.outer(joint, weights / weights.sum()).ravel()
        return joint

    sets = [list(chosen) for n in range(3) for chosen in itertools.combinations_with_replacement(kinds, n)]
    for others in sets[:: len(sets) // 5]:
        without = masses(counts(others))
        for record in kinds:
            told = masses(counts([*others, record]))
            for epsilon in (0.0, 0.3, 1.0):
                bound = delta_at(event, epsilon) + 1e-4
                for p, q in ((told, without), (without, told)):
                    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= bound


def test_cells_say_what_most_of_their_votes_say_and_how_sure() -> None:
    votes_KC = np.array([[50, 2], [10, 11], [-3, 4]])
    said = labels_of_cells(votes_KC, np.array([0, 1, 2, 0]), stddev=2.0)
    labels, certainty = said.labels_M, said.certainty_M
    assert labels.tolist() == [0, 1, 1, 0]
    assert certainty[0] == certainty[3] > certainty[2] > certainty[1]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_line_learns_what_noisy_cells_say_together(scale: float) -> None:
    """Each cell alone is mostly noise; the units of the features do not matter."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1000, 2, generator=generator)
    private = torch.randn(4000, 2, generator=generator)
    truth = (pool[:, 0] > 0).long().numpy()
    found = cells(scale * pool, count=400)
    table = noisy_votes(
        found.nearest(scale * private),
        (private[:, 0] > 0).long().numpy(),
        shape=(400, 2),
        stddev=15.0,
        source=SeededSource(1),
    )
    alone = labels_of_cells(table, found.prototype_M, stddev=15.0).labels_M
    said = labels_of_linear_rule(table, found.prototype_M, found.coordinates_MD, stddev=15.0)
    together, certainty = said.labels_M, said.certainty_M
    assert (together == truth).mean() > (alone == truth).mean() + 0.04
    assert ((certainty >= 0) & (certainty <= 1)).all()


def test_a_line_through_one_class_is_that_class() -> None:
    found = cells(torch.randn(50, 2, generator=torch.Generator().manual_seed(0)), count=5)
    for table in (np.array([[9, -1]] * 5), np.full((5, 2), -1)):
        said = labels_of_linear_rule(table, found.prototype_M, found.coordinates_MD, stddev=1.0)
        labels, certainty = said.labels_M, said.certainty_M
        assert labels.tolist() == [0] * 50
        assert np.isfinite(certainty).all()


def test_the_number_of_prototypes_follows_from_public_facts() -> None:
    assert RecordVotesConfig(num_prototypes=150).prototypes_of(100, stddev=3) == 150
    assert RecordVotesConfig().prototypes_of(1500, stddev=3) == 150
    assert RecordVotesConfig(num_records=30_000).prototypes_of(5000, stddev=30) == 250
    assert RecordVotesConfig(num_records=30_000).prototypes_of(500, stddev=30) == 50
    assert RecordVotesConfig(num_records=1).prototypes_of(5, stddev=300) == 1


def test_what_cannot_be_is_refused_by_field(digits: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target.relation: .*moves two votes"):
        configured({"target": {"relation": "replace one"}}, method="record_votes").check()
    for epsilon in (21, math.inf):
        with pytest.raises(ConfigError, match=r"target.epsilon: .*up to 20"):
            configured({"target": {"epsilon": epsilon}}, method="record_votes").check()
    with pytest.raises(ConfigError, match=r"record_votes.num_prototypes: expected at most \d+.*got 301"):
        run(settings(tmp_path / "b", num_prototypes=301), digits)


def test_the_public_part_holds_the_noisy_table_and_no_number_of_records(digits: Dataset, tmp_path: Path) -> None:
    done = run(settings(tmp_path / "run"), digits)
    assert {path.name for path in done.public.iterdir()} == {
        *("student.safetensors", "released.safetensors", "statement.json", "record.json", "metrics.json", "report.html")
    }
    statement = read_statement(done)
    assert (statement.unit, statement.relation, statement.accounting) == ("record", "add or remove one", "rdp")
    assert statement.noise == "seeded: not private"
    page = (done.public / "report.html").read_text()
    assert "1 noisy table of votes (noise stddev votes" in page
    for path in done.public.iterdir():
        if path.suffix in (".json", ".html"):
            assert f"{len(digits.private)}" not in path.read_text(), path


@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_small_pools_and_equal_records_have_prototypes_too(embedding: str, count: int) -> None:
    pool = torch.arange(count).repeat_interleave(9)[:, None].float()
    for public in (pool, torch.randn(count, 3, generator=torch.Generator().manual_seed(0))):
        found = cells(public, embedding, count=2)
        assert np.isfinite(found.coordinates_MD).all()
        assert set(found.nearest(public).tolist()) <= {0, 1}
