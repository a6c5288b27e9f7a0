"""The Ray pool: death of an actor, errors with their cause, and waits that end."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import teachers.ray_pool
from fairpate.config import FitConfig, ModelConfig, RayConfig, RidgeConfig, TeachersTraining
from fairpate.data.dataset import Split
from fairpate.types import UserError
from teachers.ensemble import collect_votes, train_ensemble
from teachers.ray_pool import RayPool, number_of_actors
from teachers.work import BlockPool, PoolError, tallied

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

# An actor takes seconds to start. The two of the module stay until its end, and leave a CPU to others.
ONE_ACTOR = RayConfig(num_actors=1, num_cpus=0.1)


@pytest.fixture(scope="module")
def two_actors(ray_session: None) -> Iterator[RayPool]:
    with RayPool(RayConfig(num_actors=2, num_cpus=0.1), stall_timeout_s=60) as pool:
        yield pool


class KillingPool:
    """A Ray pool whose first worker to train, and the first to count votes, is killed while it does."""

    def __init__(self, pool: RayPool, markers: Path):
        self._pool, self._markers = pool, markers
        self.device = pool.device

    def run(self, function: Callable[..., Any], shared: Any, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        return self._pool.run(self._deadly(function), shared, items)

    def sum(self, function: Callable[..., Any], shared: Any, items: Iterable[Any], **progress: Any) -> Any:
        return self._pool.sum(self._deadly(function), shared, items, **progress)

    def _deadly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        marker = self._markers / function.__name__

        def compute_or_die(shared: Any, item: Any, device: str) -> Any:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                return function(shared, item, device)
            killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL))
            killer.start()
            function(shared, item, device)
            killer.join()
            raise AssertionError("unreachable")

        return compute_or_die


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", pytest.param("ridge", marks=pytest.mark.campaign)])
def test_killing_an_actor_while_it_trains_or_votes_changes_nothing(
    model: Any, two_actors: RayPool, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    split = Split(x=x, y=y, z=y, record_id=tuple(str(i) for i in range(200)))
    if model == "ridge":
        config = TeachersTraining(num_teachers=30, ridge=RidgeConfig(), block_size=10)
    else:
        config = TeachersTraining(num_teachers=6, model=ModelConfig(name=model), fit=FitConfig(epochs=20), block_size=2)

    def votes(directory: str, **options: Any) -> np.ndarray:
        how = {"public_x": x} if model == "ridge" else {}
        ensemble = train_ensemble(
            split, config, num_classes=2, seed=1, checkpoint_dir=tmp_path / directory, **how, **options
        )
        return collect_votes(ensemble, x, **options)

    (tmp_path / "killed").mkdir()
    with tallied() as worked:
        disturbed = votes("disturbed", pool=KillingPool(two_actors, tmp_path / "killed"))
    lost = worked.pop("blocks_lost")
    # One in training and one in voting, and what waited for the same actors; each result counts once.
    assert 2 <= lost == worked.pop("blocks_repeated") <= 4
    num_teachers = config.num_teachers
    assert worked == {"blocks_trained": 3, "teachers_trained": num_teachers, "votes_collected": num_teachers * 200}
    assert len(list((tmp_path / "killed").iterdir())) == 2
    np.testing.assert_array_equal(disturbed, votes("quiet"))
    for quiet in (tmp_path / "quiet").iterdir():
        assert quiet.read_bytes() == (tmp_path / "disturbed" / quiet.name).read_bytes()


def test_results_come_with_their_positions(two_actors: RayPool) -> None:
    results = dict(two_actors.run(lambda shared, item, device: (shared * item, device), 10, iter([1, 2, 3, 4])))
    assert results == {0: (10, "cpu"), 1: (20, "cpu"), 2: (30, "cpu"), 3: (40, "cpu")}


def test_an_item_is_read_when_its_turn_comes(two_actors: RayPool) -> None:
    drawn: list[int] = []
    items = (drawn.append(i) or i for i in range(20))
    for finished, _ in enumerate(two_actors.run(lambda *_: 0, None, items), start=1):
        assert len(drawn) <= finished + 4  # two under way, and the next of each


def test_workers_run_at_ordinary_priority_with_their_own_threads(two_actors: RayPool) -> None:
    [(_, (niceness, threads))] = two_actors.run(lambda *_: (os.nice(0), torch.get_num_threads()), None, [0])
    assert (niceness, threads) == (os.nice(0), 1)


def test_a_remote_error_keeps_its_cause(two_actors: RayPool) -> None:
    def fail(shared: Any, item: int, device: str) -> int:
        return 1 // item

    with pytest.raises(PoolError, match="by zero") as raised:
        list(two_actors.run(fail, None, [0]))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_an_actor_that_keeps_dying_ends_the_run(ray_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers.ray_pool, "MOST_LOSSES", 0)
    with (
        RayPool(ONE_ACTOR, stall_timeout_s=60) as pool,
        pytest.raises(PoolError, match="A block of teachers was lost 1 times"),
    ):
        list(pool.run(lambda *_: os.kill(os.getpid(), signal.SIGKILL), None, [0]))


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run(ray_session: None) -> None:
    config = ONE_ACTOR.model_copy(update={"wait_for_nodes_s": 60})
    with RayPool(config, stall_timeout_s=1.0) as pool, pytest.raises(PoolError, match="within 1 s, while 1 blocks"):
        list(pool.run(lambda *_: time.sleep(120), None, [0]))


def test_a_sum_is_the_same_in_whatever_order_ray_tells(two_actors: RayPool, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = two_actors._wait_for_one

    def newest(pending: Mapping[Any, Any]) -> Any:
        if two_actors._starting or not pending:
            return usual(pending)
        settled, _ = ray.wait(list(pending), num_returns=len(pending), timeout=60)
        return settled[-1]

    monkeypatch.setattr(two_actors, "_wait_for_one", newest)
    done: list[int] = []
    total = two_actors.sum(lambda _, item, __: np.full(3, item, dtype=np.uint16), None, range(1, 13), **told(done))
    added = np.diff([0, *done]).tolist()
    assert added != sorted(added)
    assert (total.tolist(), done[-1]) == ([78, 78, 78], 2**12 - 1)


def test_what_is_added_up_is_the_sum_whoever_counted_it(two_actors: RayPool) -> None:
    def counts(num_values: int, item: int, device: str) -> np.ndarray:
        time.sleep(0.02)
        return np.full(num_values, item, dtype=np.uint16)

    for num_values in (10, 100_000):  # totals in the driver's memory, and in the object store
        done: list[int] = []
        total = two_actors.sum(counts, num_values, range(20), **told(done))
        assert (len(done), done[-1], total.dtype) == (20, 2**20 - 1, np.uint16)
        np.testing.assert_array_equal(total, np.full(num_values, 190))
        np.testing.assert_array_equal(BlockPool().sum(counts, num_values, range(20)), total)
    with pytest.raises(ValueError, match="Expected at least one"):
        two_actors.sum(counts, 1, [])


def told(done: list[int]) -> dict[str, Any]:
    """Progress whose last number shows that each item was counted, and once."""
    return {"on_done": lambda position: done.append((done[-1] if done else 0) + 2**position)}


class LosingPool(RayPool):
    """A pool whose first actor dies when the first ``num_told`` of its results were told."""

    num_told = 0

    def _wait_for_one(self, pending: Mapping[Any, Any]) -> Any:
        settled = super()._wait_for_one(pending)
        if settled in pending:
            self.num_told -= 1
            if self.num_told == 0:
                ray.kill(self._ready[0])
        return settled


@pytest.mark.slow
def test_what_a_lost_actor_had_added_is_counted_again_and_once(ray_session: None) -> None:
    with LosingPool(ONE_ACTOR) as pool:
        for num_told in (2, 6):  # on its way, and all added up
            pool.num_told = num_told
            done: list[int] = []
            total = pool.sum(lambda _, item, __: np.full(3, item, dtype=np.uint16), None, range(1, 7), **told(done))
            assert (total.tolist(), done[-1]) == ([21, 21, 21], 2**6 - 1)


def test_a_sum_that_was_interrupted_leaves_nothing_to_the_next(two_actors: RayPool) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two_actors.sum(lambda *_: np.ones(2, dtype=np.uint16), None, range(3), on_done=interrupt)
    total = two_actors.sum(lambda *_: np.ones(2, dtype=np.uint16), None, range(3))
    assert total.tolist() == [3, 3]


@pytest.mark.slow
def test_actors_without_a_place_are_waited_for_while_the_others_work(ray_session: None) -> None:
    most = ray.cluster_resources()["CPU"] - 0.5  # of all CPUs but what the actors of the module have
    with RayPool(RayConfig(num_actors=3, num_cpus=most, wait_for_nodes_s=60)) as pool:
        assert len(dict(pool.run(lambda *_: 0, None, range(9)))) == 9
    nowhere = RayConfig(num_cpus=1000, wait_for_nodes_s=0.5)
    with RayPool(nowhere) as pool, pytest.raises(PoolError, match=r"started within 0\.5 s: .*=1000 .*wait_for_nodes_s"):
        list(pool.run(lambda *_: 0, None, [0]))


@pytest.mark.slow
def test_a_node_that_joins_gets_work_unless_the_number_of_actors_is_set(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cluster has a place for one more actor once the first item is done; the second item waits for it."""
    monkeypatch.setattr(teachers.ray_pool, "_LOOKS_EVERY_S", 0.0)

    def workers(num_actors: int | None) -> int:
        places, seen = [1], tmp_path / str(num_actors)
        seen.mkdir()
        monkeypatch.setattr(teachers.ray_pool, "room_for", lambda **_: (places[0], ""))

        def who(limit_s: float, number: int, _: str) -> int:
            (seen / str(os.getpid())).touch()
            deadline_s = time.monotonic() + limit_s
            while number == 1 and len(list(seen.iterdir())) < 2 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            return os.getpid()

        with RayPool(RayConfig(num_actors=num_actors, num_cpus=0.1), stall_timeout_s=150) as pool:
            found = set[int]()
            # An actor takes a minute to start on a busy machine.
            for _, process in pool.run(who, 140.0 if num_actors is None else 0.5, range(5)):
                places[0] = 2
                found.add(process)
            return len(found)

    assert workers(1) == 1
    assert workers(None) == 2


def test_a_closed_pool_and_an_impossible_worker_are_refused(ray_session: None) -> None:
    with pytest.raises(PoolError, match="closed"):
        list(RayPool(ONE_ACTOR).run(lambda *_: 0, None, [0]))
    with pytest.raises(PoolError, match=r"1 actors of ray\.num_cpus=1000 .* do not fit: .* room for 0; lower"):
        RayPool(RayConfig(num_cpus=1000))


def test_more_actors_than_fit_are_refused_before_any_work(ray_session: None) -> None:
    num_cpus = int(ray.cluster_resources()["CPU"])
    message = rf"ray\.num_actors: {num_cpus + 1} actors of ray\.num_cpus=1 .* {num_cpus} CPUs .* room for {num_cpus};"
    with pytest.raises(PoolError, match=message) as raised:
        RayPool(RayConfig(num_actors=num_cpus + 1))
    assert isinstance(raised.value, UserError)
    assert number_of_actors(RayConfig(num_actors=num_cpus)) == number_of_actors(RayConfig()) == num_cpus


def test_all_packages_travel_to_a_cluster() -> None:
    folders = [Path(folder) for folder in teachers.ray_pool._own_packages()]
    assert {folder.name for folder in folders} == {"fairpate", "teachers", "aggregator", "student"}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_an_actor_is_not_spread_over_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 1.5, "GPU": 1.0}},
        {"Alive": True, "Resources": {"CPU": 1.5}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert number_of_actors(RayConfig()) == 2
    assert number_of_actors(RayConfig(num_cpus=0.1)) == 30
    assert number_of_actors(RayConfig(num_cpus=0.5, num_gpus=0.5)) == 2
    assert number_of_actors(RayConfig(num_actors=64, wait_for_nodes_s=600)) == 64
    with pytest.raises(PoolError, match="has 3 CPUs and 1 GPUs on 2 nodes, room for 2"):
        RayPool(RayConfig(num_actors=3))
