"""Private-kNN in `fairpate run`: what is charged and stated, what one record moves, and what a service goes on with."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from method_kinds import quick_and_slow
from threadpoolctl import threadpool_limits

from aggregator import ledger_audit
from aggregator.ledger import Ledger
from aggregator.session import OverBudget, query_key
from aggregator.store import ledger_files
from fairpate.config import ConfigError, DataConfig, RayConfig
from fairpate.data import Dataset, load_data
from fairpate.data.embedding import SpaceConfig
from fairpate.methods.base import configured
from fairpate.methods.private_knn import Clusters, PrivateKnn, WholeCoordinates
from fairpate.methods.voting import choose_queries
from fairpate.privacy import accountant
from fairpate.privacy.mechanism_events import NeighbourVotes
from fairpate.releases.directory import RunDirectory, read_json, read_labels, read_statement
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.run.serve import open_backend
from fairpate.terminal import Reporter
from fairpate.types import TELLS_SIZE, IntArray
from student.student import load_student
from teachers.neighbours import LocalNeighbourhood, Nearest, Sampler, blocks_of, merged

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

SMALL: dict[str, Any] = {
    "noise": "seeded",
    "target": {"epsilon": None},
    "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
    "private_knn": {"num_neighbours": 30, "sampling_rate": 0.2, "noise_stddev_votes": 9},
    "aggregator": {"num_queries": 90, "gate": {"max_disparity": 0.05, "min_count": 10}},
    "student": {"model": {"name": "logistic"}, "fit": {"epochs": 3}},
    "ray": {"num_actors": 0},
}
WITHIN = "target.epsilon=1.5"
EMBEDDINGS = ("components", "graph")
Train = Callable[..., RunDirectory]
Threads = Callable[[int], None]


def config(out: Path, *overrides: str) -> PrivateKnn:
    made = configured(SMALL, [f"out={out}", *overrides], method="private_knn")
    assert isinstance(made, PrivateKnn)
    return made


def run(settings: PrivateKnn, dataset: Dataset | None = None) -> RunDirectory:
    return run_method(settings, Reporter(quiet=True), dataset)


@pytest.fixture
def threads() -> Iterator[Threads]:
    """Of torch, and of the matrix products of numpy."""

    def use(number: int) -> None:
        torch.set_num_threads(number)
        limits.append(threadpool_limits(number))

    limits: list[Any] = []
    yield use
    torch.set_num_threads(1)
    for limit in reversed(limits):
        limit.restore_original_limits()


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_data(DataConfig())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run(config(tmp_path_factory.mktemp("knn") / "run"))


def labels(done: RunDirectory) -> dict[str, int]:
    released = read_labels(done.labels)
    return dict(zip(released.record_ids, released.labels.tolist(), strict=True))


def continuous(event: dict[str, Any], *, delta: float = 1e-5) -> float:
    """dp_accounting's own price of as many Poisson-sampled Gaussians, two counts of which move by one each."""
    single = pld.from_gaussian_mechanism(event["noise_stddev_votes"] / np.sqrt(2), sampling_prob=event["sampling_rate"])
    return float(single.self_compose(event["count"]).get_epsilon_for_delta(delta))


def untimed(ledger):
    """Its charges, but for when they came."""
    return [replace(row, at_s=0.0) for row in ledger_audit.rows(ledger)]


@pytest.mark.parametrize("overrides", [[WITHIN], []], ids=["target", "as configured"])
def test_every_query_is_charged_and_the_statement_is_their_price(overrides: list[str], tmp_path: Path) -> None:
    done = run(config(tmp_path / "run", *overrides))
    statement = read_statement(done)
    (event,) = statement.events
    assert statement.queries is not None
    assert (statement.queries.submitted, event["count"], event["sampling_rate"]) == (90, 90, 0.2)
    assert event["threshold_stddev_votes"] is None
    assert 0 < statement.queries.answered < 90, "the gate refuses some, at full price"
    assert statement.epsilon == pytest.approx(continuous(event), rel=0.01)
    if overrides:
        assert 1.49 < statement.epsilon <= 1.5
    else:
        assert event["noise_stddev_votes"] == 9
    assert (statement.unit, statement.relation, statement.accounting) == ("record", "add or remove one", "pld")
    assert statement.queries.epsilon_submitted == statement.epsilon
    found = ledger_audit.verify(done.ledger)
    assert (found.reservations, found.open, found.epsilon_submitted) == (90, 0, statement.epsilon)
    assert TELLS_SIZE["record"] not in statement.remarks
    assert not done.votes.exists(), "samples are not kept"
    assert read_json(done.costs)["epsilon_data_dependent"] == statement.epsilon


def test_given_again_the_command_draws_nothing_and_another_run_repeats_a_seeded_one(
    finished: RunDirectory, tmp_path: Path
) -> None:
    before = ledger_audit.verify(finished.ledger)
    run(config(finished.root))
    assert ledger_audit.verify(finished.ledger) == before
    again = run(config(tmp_path / "again"))
    assert labels(again) == labels(finished)
    assert untimed(again.ledger) == untimed(finished.ledger)


def test_without_a_seed_every_run_has_samples_of_its_own(tmp_path: Path) -> None:
    rows = [ledger_audit.rows(run(config(tmp_path / name, "noise=os_entropy")).ledger) for name in ("one", "two")]
    assert [row.key for row in rows[0]] == [row.key for row in rows[1]]
    assert sum(a.votes != b.votes for a, b in zip(*rows, strict=True)) > 60


def test_a_check_is_one_event_with_the_counts_and_refuses(tmp_path: Path) -> None:
    check = ["private_knn.threshold=20", "private_knn.threshold_stddev_votes=13.5"]
    done = run(config(tmp_path / "run", WITHIN, *check))
    statement = read_statement(done)
    (event,) = statement.events
    # Scaled by one factor, which both price.
    assert event["threshold_stddev_votes"] / event["noise_stddev_votes"] == pytest.approx(1.5)
    assert statement.queries is not None
    assert statement.queries.rejected_confidence > 10
    expected = accountant.epsilon_pld(
        [NeighbourVotes(**{k: v for k, v in event.items() if k not in ("kind", "noun")})], target_delta=1e-5
    )
    assert statement.epsilon == expected <= 1.5


def test_one_record_moves_two_votes_of_the_queries_that_sampled_it(digits: Dataset, tmp_path: Path) -> None:
    """The last record, so that the seeded samples of the others stay."""
    smaller = dataclasses.replace(digits, private=digits.private.take(range(len(digits.private) - 1)))
    few = ["private_knn.num_neighbours=100"]
    statements, rows = [], []
    for name, dataset in (("with", digits), ("without", smaller)):
        done = run(config(tmp_path / name, *few), dataset)
        rows.append(np.array([row.votes for row in ledger_audit.rows(done.ledger)]))
        statements.append(dataclasses.replace(read_statement(done), earlier_releases=None, epsilon_with_earlier=None))
    moved_QC = rows[0] - rows[1]
    assert set(np.square(moved_QC).sum(axis=1).tolist()) == {0, 2}
    entered = moved_QC[:, int(digits.private.y[-1])]
    assert (entered[np.abs(moved_QC).sum(axis=1) > 0] == 1).all()
    assert 1 <= (entered == 1).sum() < 0.5 * len(rows[0])
    assert statements[0].events == statements[1].events
    assert statements[0].epsilon == statements[1].epsilon


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_where_a_record_lies_is_its_own_affair(embedding: Any, digits: Dataset) -> None:
    public, private = digits.public.x, digits.private.x
    place = WholeCoordinates.of(public, SpaceConfig(embedding=embedding, num_components=20), seed=0)
    full = place(private)
    order = torch.randperm(len(private), generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(place(private[order]), full[order.numpy()])
    for part in (slice(0, 1), slice(5, 12), slice(1, None)):
        np.testing.assert_array_equal(place(private[part]), full[part])
    assert full.dtype == np.int32
    assert np.abs(place(public)).max() == 2**15


@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("side", [17, pytest.param(28, marks=pytest.mark.slow)])
def test_neighbours_do_not_depend_on_order_blocks_parts_or_threads(embedding: Any, side: int, threads: Threads) -> None:
    """Pictures that come in pairs, so that many distances are equal."""
    generator = torch.Generator().manual_seed(side)
    pool, queries = torch.randint(0, 256, (2, 40, 2, side, side), dtype=torch.uint8, generator=generator)
    private = torch.randint(0, 256, (60, 2, side, side), dtype=torch.uint8, generator=generator).repeat(2, 1, 1, 1)
    names, own = np.array([f"record {row}" for row in range(120)]), np.arange(120)
    place = WholeCoordinates.of(pool, SpaceConfig(embedding=embedding, num_components=20), seed=0)

    def found(rows: IntArray, *, size: int, parts: int) -> Nearest:
        blocks = list(blocks_of(place(private[rows]), own[rows], names[rows].tolist(), key=bytes(32), size=size))
        asked, sampler = [str(query) for query in range(40)], Sampler(1.0)
        return merged(
            [
                LocalNeighbourhood(blocks[part::parts], count=9, sampler=sampler).nearest(place(queries), asked)
                for part in range(parts)
            ]
        )

    threads(1)
    once = found(own, size=120, parts=1)
    for number in (1, 3):
        threads(number)
        for rows, size, parts in ((own, 7, 3), (np.random.default_rng(number).permutation(120), 64, 2)):
            again = found(rows, size=size, parts=parts)
            np.testing.assert_array_equal(again["label"], once["label"])
            np.testing.assert_array_equal(again["squared"], once["squared"])


def test_records_far_outside_the_pool_and_in_tiny_units_lie_somewhere() -> None:
    pool = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    far = WholeCoordinates.of(pool, SpaceConfig(embedding="components", num_components=3), seed=0)(
        torch.full((1, 3), 1e9)
    )
    assert np.abs(far).max() == 2**19
    near = WholeCoordinates.of(1e-6 * pool, SpaceConfig(embedding="components", num_components=3), seed=0)(1e-6 * pool)
    assert len(np.unique(near, axis=0)) == 20, "the unit of features does not matter"


def test_a_query_that_a_crash_left_open_is_charged_and_sampled_again(finished: RunDirectory, tmp_path: Path) -> None:
    settings = config(tmp_path / "run")
    copy = RunDirectory(root=shutil.copytree(finished.root, tmp_path / "run"))
    for file in [*ledger_files(copy.ledger), *copy.public.iterdir(), copy.receipt]:
        file.unlink()
    dataset = load_data(settings.data)
    plan = settings.plan(dataset)
    queries = choose_queries(dataset, settings.queries)
    rows = ledger_audit.rows(finished.ledger)
    digest = settings._digest(dataset.private)
    with Ledger(copy.ledger, plan.terms(digest)) as ledger:
        key = query_key(queries.x[0].numpy(), int(queries.z[0]))
        assert key == rows[0].key
        ledger.reserve([key], [int(queries.z[0])], np.array([rows[0].votes]))
    done = run(settings)
    found = ledger_audit.verify(done.ledger)
    assert (found.reservations, found.open, found.queries) == (90, 1, 89), "the last one found no room"
    assert read_statement(done).epsilon == read_statement(finished).epsilon


@pytest.mark.slow
def test_actors_find_what_one_process_finds(finished: RunDirectory, tmp_path: Path, ray_session: Any) -> None:
    done = run(config(tmp_path / "run", "ray.num_actors=1"))  # of several: tests/methods/test_residual_votes.py
    assert untimed(done.ledger) == untimed(finished.ledger)


@pytest.mark.parametrize("num_actors", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_service_asks_fresh_samples_until_the_number_is_reached(
    num_actors: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if num_actors:
        request.getfixturevalue("ray_session")
    settings = config(tmp_path / "run", "noise=os_entropy", "aggregator.budget={max_queries: 93}")
    done = run(settings)
    assert read_statement(done).events[0]["count"] == 90
    backend = open_backend(done.root, settings.model_copy(update={"ray": RayConfig(num_actors=num_actors)}))
    try:
        assert backend.try_vote is not None
        backend.try_vote()
        asked = [backend.pool.questions[number] for number in range(100)]
        by_key = {question.query.key: question for question in asked}

        def vote(queries: Any) -> Any:
            return backend.count_votes([by_key[query.key] for query in queries])

        before = backend.session.budget_status()
        assert backend.session.ask([question.query for question in asked[:90]], vote)
        assert backend.session.budget_status() == before
        first = backend.session.ask([question.query for question in asked], vote)
        assert sum(isinstance(reply, OverBudget) for reply in first) == 7
        assert backend.session.ask([question.query for question in asked], vote) == first
        status = backend.session.budget_status()
        assert (status.queries_submitted, status.closed) == (93, True)
        assert status.epsilon_submitted == read_statement(done).epsilon, "stated before the service answers"
        counts = backend.count_votes([asked[95]] * 40)
        assert counts.shape == (40, 10)
        assert (counts.sum(axis=1) <= 30).all()
        assert len(np.unique(counts, axis=0)) > 10, "each a sample of its own"
    finally:
        backend.ledger.close()
        backend.close()
    assert settings.plan(load_data(settings.data)).worst_case(93) == [
        NeighbourVotes(count=93, noise_stddev_votes=9, sampling_rate=0.2)
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["aggregator.budget={epsilon: 2, accept_leak: true}"], "aggregator.budget.accept_leak"),
        (["aggregator.num_queries=100000"], "aggregator.num_queries"),
        (["private_knn.noise_stddev_votes=0.01"], r"private_knn.noise_stddev_votes: at 0.01 .* epsilon [1-9]"),
        (["private_knn.queries=typical", "aggregator.num_queries=null"], "private_knn.queries: typical needs"),
        (
            ["private_knn.queries=typical", "aggregator.admission={}"],
            "aggregator.admission: typical queries are chosen",
        ),
        (["target.epsilon=21"], "target.epsilon: the cost of neighbours is computed up to 20, got 21"),
    ],
)
def test_what_cannot_be_is_refused_by_field(overrides: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        run(config(tmp_path / "run", "target.epsilon=null", *overrides))
    with pytest.raises(ConfigError, match=r"aggregator.budget: target.epsilon is the budget"):
        run(config(tmp_path / "run", WITHIN, "aggregator.budget={max_queries: 9}"))


@pytest.mark.parametrize("field", ["teachers.num_teachers=3", "aggregator.mechanism.threshold=3"])
def test_what_teachers_read_is_not_read_here(field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{field.partition('=')[0]}: private_knn does not read it"):
        config(tmp_path / "run", field)


def test_a_limit_on_the_price_is_kept_by_curves(tmp_path: Path) -> None:
    done = run(config(tmp_path / "run", "aggregator.budget={epsilon: 1.0}"))
    statement = read_statement(done)
    count = statement.events[0]["count"]
    assert 5 < count < 90
    event = NeighbourVotes(count=count, noise_stddev_votes=9.0, sampling_rate=0.2)
    assert accountant.epsilon([event], target_delta=1e-5).epsilon <= 1.0
    assert statement.epsilon == accountant.epsilon_pld([event], target_delta=1e-5) < 1.0


def test_pages_speak_of_neighbours_and_hold_no_number_of_records(finished: RunDirectory, digits: Dataset) -> None:
    write_card(finished.root)
    page = (finished.public / "report.html").read_text()
    assert "nearest records of a sample" in page
    without_meanings = re.sub(r'title="[^"]*"|<p popover.*?</p>', "", page, flags=re.DOTALL)
    assert "teacher" not in without_meanings
    card = json.loads((finished.public / "card.json").read_text())
    assert card["privacy"]["events"] == [
        "90 queries to the nearest records of Poisson samples, every one priced at its worst case"
    ]
    assert not card["privacy"]["tells_size"]
    assert "Consensus of the neighbours" in finished.private_report.read_text()
    for path in finished.public.iterdir():
        if path.suffix in (".json", ".html"):
            assert f"{len(digits.private)}" not in path.read_text(), path


@pytest.mark.parametrize("queries", quick_and_slow(["first", "typical"], ["typical"]))
def test_counts_are_released_at_the_price_of_labels_and_teach(queries: str, tmp_path: Path, digits: Dataset) -> None:
    options = [f"private_knn.queries={queries}", "aggregator.num_queries=60"]
    counts = config(tmp_path / "counts", *options, "aggregator.release=counts")
    with_counts, alone = run(counts), run(config(tmp_path / "labels", *options))
    assert labels(with_counts) == labels(alone)
    statements = read_statement(with_counts), read_statement(alone)
    assert statements[0].events == statements[1].events
    assert statements[0].epsilon == statements[1].epsilon
    released = read_labels(with_counts.labels)
    assert released.counts is not None
    own_counts = released.counts[np.arange(len(released.labels)), released.labels]
    np.testing.assert_array_equal(own_counts, released.counts.max(axis=1))
    noise = statements[0].events[0]["noise_stddev_votes"]
    of = {row.key: row.votes for row in ledger_audit.rows(with_counts.ledger)}
    key_of = {
        name: query_key(x.numpy(), int(z))
        for name, x, z in zip(digits.public.record_id, digits.public.x, digits.public.z, strict=True)
    }
    votes = np.array([of[key_of[name]] for name in released.record_ids])
    assert 2 / 3 < (released.counts - votes).std() / noise < 3 / 2
    assert not torch.equal(
        *(next(iter(load_student(done.student).network.parameters())) for done in (with_counts, alone))
    )
    assert read_labels(alone.labels).counts is None


TYPICAL = ["private_knn.queries=typical", "aggregator.num_queries=25"]


def test_typical_records_are_asked_about_and_their_clusters_teach(tmp_path: Path, digits: Dataset) -> None:
    settings = config(tmp_path / "run", *TYPICAL, "aggregator.gate.max_disparity=.inf", "private_knn.num_neighbours=20")
    done = run(settings)
    statement = read_statement(done)
    assert statement.queries is not None
    assert (statement.queries.submitted, statement.events[0]["count"]) == (25, 25)
    assert statement.epsilon == pytest.approx(continuous(statement.events[0]), rel=0.01)
    clusters = settings._clusters(digits.public)
    names = [digits.public.record_id[row] for row in clusters.typical_K.tolist()]
    assert labels(done).keys() == set(names)
    label_of = labels(done)
    taught = settings._of_clusters(digits, read_labels(done.labels))
    assert taught.record_ids == digits.public.record_id
    assert taught.labels.tolist() == [label_of[names[cluster]] for cluster in clusters.cluster_M.tolist()]
    assert load_student(done.student).card.num_training_labels == 25
    assert run(settings).ledger == done.ledger
    assert ledger_audit.verify(done.ledger).reservations == 25, "nothing is asked twice"


def test_the_gate_stands_before_clusters_too(tmp_path: Path, digits: Dataset) -> None:
    settings = config(tmp_path / "run", *TYPICAL, "aggregator.gate.min_count=5")
    done = run(settings)
    taught = settings._of_clusters(digits, read_labels(done.labels))
    label_of, clusters = labels(done), settings._clusters(digits.public)
    answered = [digits.public.record_id[row] in label_of for row in clusters.typical_K.tolist()]
    assert 0 < len(taught.labels) < sum(answered[cluster] for cluster in clusters.cluster_M.tolist())
    assert "of 25 public queries" in (done.public / "report.html").read_text()


@pytest.mark.parametrize("count", [1, 7, 40])
def test_each_cluster_has_a_typical_record_of_its_own(count: int) -> None:
    generator = np.random.default_rng(count)
    coordinates = generator.integers(-100, 100, (40, 2)).astype(np.int32)
    found = Clusters.of(coordinates, count, seed=0)
    assert found.cluster_M[found.typical_K].tolist() == list(range(count))
    for cluster, typical in enumerate(found.typical_K.tolist()):
        members = coordinates[found.cluster_M == cluster]
        distances = np.square(members - members.mean(axis=0)).sum(axis=1)
        own = np.square(coordinates[typical] - members.mean(axis=0)).sum()
        assert own == pytest.approx(distances.min())
    with pytest.raises(ConfigError, match=r"aggregator.num_queries: expected at most 3, .*got 4"):
        Clusters.of(coordinates[[0, 1, 2, 0]], 4, seed=0)
