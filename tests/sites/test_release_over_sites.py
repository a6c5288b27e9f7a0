"""Plan, coordinator and sites over HTTP: one release, charged at every site before anything leaves it."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import threading
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hospitals import folder
from network import plan_of
from serving import free_port

from fairpate.config import ConfigError
from fairpate.data import load_data
from fairpate.data.registry import load_at_site
from fairpate.files import arrays_digest
from fairpate.http_server import HttpServer, HttpSettings
from fairpate.methods.base import configured
from fairpate.methods.defaults import resolved
from fairpate.releases import log
from fairpate.releases.directory import RunDirectory, read_json, read_release, read_statement
from fairpate.releases.log import MetricsFolder, read_receipt
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.run import run
from fairpate.run.bundle import write_bundle
from fairpate.run.folder import open_run_directory
from fairpate.run.run import open_run, run_method
from fairpate.sites import coordinator, plan, secure_sum, site
from fairpate.sites.plan import embedding_file, key_text, new_key
from fairpate.sites.secure_sum import SumError
from fairpate.terminal import Reporter
from fairpate.types import DataSettingsError
from teachers import ensemble, ray_pool
from teachers.work import BlockPool

pytestmark = pytest.mark.usefixtures("light_runs")

GATE = "{max_disparity: 0.3, min_count: 10}"
QUIET = Reporter(quiet=True)
TEACHERS = (
    "teachers.num_teachers=6",
    "teachers.fit.epochs=5",
    "teacher_votes.num_queries=120",
    f"teacher_votes.gate={GATE}",
    "ray.num_actors=0",
)
SMALL_TEACHERS = ("teachers.model=ridge", "teachers.num_teachers=100", "ray.num_actors=0", "target.epsilon=3")
PARTS = (range(700), range(700, 1500), range(1500, 2000))


class KilledError(Exception):
    """A process that was killed, as far as the others can see."""


class Consortium:
    """The files of three sites and a coordinator in one folder, and a plan for them."""

    def __init__(
        self,
        root: Path,
        *options: str,
        method: str = "weighted_votes",
        person: bool = False,
        pool: bool = True,
        **numbers: int,
    ):
        self.root, self.names = root, ("north", "south", "west")
        make = partial(folder, person=person, pool=pool)
        self.own = make(root / "coordinator", None)
        self.data = {name: make(root / name, part) for name, part in zip(self.names, PARTS, strict=True)}
        self.keys = {name: root / f"{name}.key" for name in self.names}
        roster = {name: key_text(new_key(path).public) for name, path in self.keys.items()}
        config = resolved([f"data.declaration={self.own}", "data.name=hospitals", "target.epsilon=1", *options], method)
        self.file = root / "plan.json"
        self.plan = plan.make_plan(
            config, roster, self.file, **{"may_vanish": 0, "may_collude": 1} | numbers, reporter=QUIET
        )
        self.port = free_port()

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(root=self.root / f"run-{name}")

    def serve(self, *, wait_s: float = 60.0) -> Any:
        settings = HttpSettings(port=self.port)
        return coordinator.serve(
            self.file, settings, declaration=self.own, reporter=QUIET, out=self.run("coordinator").root, wait_s=wait_s
        )

    def join(self, name: str, *, agree: Callable[[str], bool] = lambda _: True, wait_s: float = 60.0) -> Any:
        root = site.join(
            f"http://127.0.0.1:{self.port}",
            declaration=self.data[name],
            key=self.keys[name],
            agree=agree,
            reporter=QUIET,
            out=self.run(name).root,
            wait_s=wait_s,
        )
        return None if root is None else RunDirectory(root=root)

    def together(self, **others: Any) -> dict[str, Any]:
        """The folder, or the error, of each party. ``others`` replace what a party does."""
        found: dict[str, Any] = {}

        def act(name: str, work: Callable[[], Any]) -> None:
            try:
                found[name] = work()
            except Exception as error:  # noqa: BLE001 - a test looks at it
                found[name] = error

        works = {"coordinator": self.serve} | {name: lambda name=name: self.join(name) for name in self.names} | others
        threads = [threading.Thread(target=act, args=pair) for pair in works.items()]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return found


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(coordinator, "_LINGER_S", 1.0)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute tables here, where tests can look at them; test_site_commands.py has the processes."""
    monkeypatch.setattr(site, "in_processes", lambda work, messenger: work(messenger))


@pytest.fixture(autouse=True)
def one_trains_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one site train at a time: they are threads here, and torch's own generator draws first weights."""
    lock, train = threading.Lock(), ensemble.train_ensemble

    def alone(*values: Any, **settings: Any) -> Any:
        with lock:
            return train(*values, **settings)

    monkeypatch.setattr(ensemble, "train_ensemble", alone)
    # A plan leaves `ray` to each site, and by default each starts a Ray of its own.
    monkeypatch.setattr(ray_pool, "open_pool", lambda _: nullcontext(BlockPool("cpu")))


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """The noise that all sites added to each sum together, by the number of the sum."""
    drawn: dict[int, Any] = {}
    add, lock = secure_sum._with_noise, threading.Lock()

    def kept(draw: Any, exact_D: Any, source: Any) -> Any:
        noisy_D = add(draw, exact_D, source)
        with lock:
            drawn[draw.number] = drawn.get(draw.number, 0) + noisy_D - exact_D
        return noisy_D

    monkeypatch.setattr(secure_sum, "_with_noise", kept)
    return drawn


def votes_at(group: Consortium, name: str) -> Any:
    """The exact votes of one site's teachers."""
    config = plan.config_of(group.plan, group.data[name], data_dir=None, out=group.root / f"alone-{name}")
    load = plan.loader_of(group.plan, embedding_file(group.file), has_private=True)
    found: list[Any] = []

    def keep(exact_RW: Any, **_: Any) -> Any:
        found.append(exact_RW)
        return exact_RW

    with open_run(config, QUIET, load=load) as opened:
        opened.config.release(dataclasses.replace(opened, noisy_sum=keep))
    assert (found[0].sum(axis=1) == config.teachers.num_teachers).all()
    return found[0]


def by_one_curator(root: Path, group: Consortium, noises: dict[int, Any]) -> Any:
    """The run of somebody who has all records, and adds the noise that the sites added."""
    pool = (group.own.parent / "pool.csv").exists()
    declaration = folder(root, range(2000), person=group.plan.unit == "person", pool=pool)
    (root / "held_out.csv").write_bytes((group.own.parent / "held_out.csv").read_bytes())
    values = {name: value for name, value in group.plan.settings.items() if name != "declaration"}
    config = configured(values, [f"data.declaration={declaration}", f"out={root / 'run'}"])
    left = sorted(noises)
    # Teachers learn from the records of one site alone, also where somebody has those of all sites.
    votes = sum(votes_at(group, name) for name in group.names) if config.method == "teacher_votes" else None

    def add(exact_RW: Any, **_: Any) -> Any:
        # The table by score, which may follow the votes, is a sum over all records.
        exact_RW = exact_RW if votes is None or len(left) < len(noises) else votes
        return exact_RW + noises[left.pop(0)].reshape(exact_RW.shape)

    # With a hashed split, test records are not those of the file but set aside, as at each site.
    load = partial(load_at_site, has_private=True) if config.data.split is not None else load_data
    return run_method(config, QUIET, load=load, sums=lambda *_: add)


@pytest.mark.parametrize(
    ("method", "options", "person", "num_sums"),
    [
        pytest.param("weighted_votes", (), False, 1, marks=pytest.mark.campaign),
        pytest.param("weighted_votes", ("weighted_votes.by_group=true",), False, 1, marks=pytest.mark.campaign),
        pytest.param("record_votes", ("record_votes.num_prototypes=10",), True, 1, marks=pytest.mark.slow),
        pytest.param(
            "record_votes",
            ("record_votes.num_prototypes=10", "target.epsilon=0.3"),
            False,
            1,
            marks=pytest.mark.campaign,
        ),
        ("residual_votes", ("residual_votes.curvature=private",), True, 11),  # no public record anywhere
        pytest.param("residual_votes", ("residual_votes.curvature=public",), False, 6, marks=pytest.mark.campaign),
        pytest.param("teacher_votes", TEACHERS, True, 1, marks=pytest.mark.campaign),
        pytest.param("teacher_votes", SMALL_TEACHERS, True, 2, marks=pytest.mark.slow),
        (
            "weighted_votes",
            ("data.split=hashed", "evaluation.metrics=private", "student.reject.max_error=0.3"),
            True,
            2,
        ),
    ],
)
def test_sites_release_what_one_curator_would_with_the_same_noise(
    method: str,
    options: tuple[str, ...],
    person: bool,
    num_sums: int,
    tmp_path: Path,
    noises: dict[int, Any],
) -> None:
    group = Consortium(
        tmp_path, *options, method=method, person=person, pool="residual_votes.curvature=private" not in options
    )
    assert len(group.plan.sums) == num_sums
    found = group.together()
    assert all(isinstance(each, RunDirectory) for each in found.values()), found
    releases = {name: read_release(run.released)[0] for name, run in found.items()}
    alone = by_one_curator(tmp_path / "all", group, noises)
    expected = read_release(alone.released)[0]
    for released in releases.values():
        assert released.events == expected.events
        assert released.arrays.keys() == expected.arrays.keys()
        for name, array in expected.arrays.items():
            assert np.array_equal(released.arrays[name], array), name
    run = found["coordinator"]
    if group.plan.test_events:
        tables = [read_release(each.metrics_table)[0] for each in (*found.values(), alone)]
        assert len({arrays_digest(table.arrays) for table in tables}) == 1
        # Of each site's own test records, and nothing of them is in the other sum.
        assert read_receipt(MetricsFolder(root=found["north"].root)).events == tables[0].events
        assert read_json(run.metrics) == read_json(alone.metrics)
        assert read_json(run.metrics)["metrics"] == "private"
    # An ordinary run: its reports are written again without a private record.
    before, config = run.public_report.read_bytes(), open_run_directory(run.root)[1]
    run.public_report.unlink()
    run_method(config.model_copy(update={"out": run.root}), QUIET)
    assert run.public_report.read_bytes() == before
    assert run.student.read_bytes() == alone.student.read_bytes()
    statement, other = read_statement(run), read_statement(alone)
    assert (statement.epsilon, statement.unit) == (other.epsilon, "person" if person else "record")
    assert statement.epsilon is not None
    target = group.plan.settings["target"]["epsilon"]
    assert 0.9 * target < statement.epsilon <= target
    # The sums have the noise of the events; numbers beside the diagonal of moments count twice in their norm.
    stated = {event.noise_stddev_votes for event in expected.events}
    stated |= {event["noise_stddev_records"] * event["weight"] for event in group.plan.test_events}
    halves = {math.nextafter(noise / math.sqrt(2), math.inf) for noise in stated if method == "residual_votes"}
    assert {each.noise_stddev for each in group.plan.sums} <= stated | halves
    assert stated <= {each.noise_stddev for each in group.plan.sums}
    assert any("north, south, west" in remark and group.plan.digest in remark for remark in statement.remarks)
    # Pages, card and bundle name the sites, and say who had to be trusted for what.
    published = [before.decode()]
    if group.plan.test_events:  # of one run, as they take a while
        with zipfile.ZipFile(write_bundle(run.root)[0]) as bundle:
            published += [bundle.read(name).decode() for name in ("statement.json", "card.json", "card.html")]
    for said in published:
        assert "north, south, west" in said
        assert f"if at most {group.plan.may_collude} of them collude with the coordinator" in said
    # Every party counts the release once, in its own odometer: here they share one file.
    receipts = [read_receipt(each) for each in found.values()]
    assert len({receipt.run for receipt in receipts if receipt}) == 4
    assert all(receipt is not None and receipt.events == expected.events for receipt in receipts)


@pytest.mark.slow
def test_parties_that_were_killed_before_the_table_of_metrics_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their release is stored already, so that the sum about the model is the first that they draw."""
    group = Consortium(tmp_path, "data.split=hashed", "evaluation.metrics=private")
    works = {"coordinator": group.serve, "north": lambda: group.join("north")}
    places = {"coordinator": (run, "assess_privately"), "north": (site, "measurable")}
    stopped: list[str] = []

    def twice(party: str) -> Any:
        with pytest.raises(KilledError):
            works[party]()
        return works[party]()

    def once(party: str, work: Any, *values: Any) -> Any:
        is_own = any(getattr(getattr(each, "run", each), "root", None) == group.run(party).root for each in values)
        if is_own and party not in stopped:
            stopped.append(party)
            raise KilledError
        return work(*values)

    for party, (module, name) in places.items():
        monkeypatch.setattr(module, name, partial(once, party, getattr(module, name)))
    found = group.together(**{party: partial(twice, party) for party in works})
    assert all(isinstance(each, RunDirectory) for each in found.values()), found
    assert sorted(stopped) == sorted(works)
    tables = [read_release(each.metrics_table)[0] for each in found.values()]
    assert len({arrays_digest(table.arrays) for table in tables}) == 1
    # Of every party two, one for each part of the records.
    assert [total.releases for total in Odometer().totals(delta=1e-5)] == [8]


def test_the_sum_has_the_noise_that_is_priced(tmp_path: Path, noises: dict[int, Any]) -> None:
    group = Consortium(tmp_path, "weighted_votes.by_group=true", may_collude=2)
    group.together()
    draw, noise_D = group.plan.draw(0), noises[0]
    assert draw.num_honest == 1
    # With two colluding sites of three, one site alone has all the noise that is priced, and the sum three times that.
    spread = np.sqrt(np.mean(np.square(noise_D, dtype=np.float64))) / (draw.noise_stddev * np.sqrt(3))
    assert abs(spread - 1) < 5 / np.sqrt(2 * len(noise_D))


def test_a_site_that_does_not_agree_is_charged_nothing_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Consortium(tmp_path)
    offers: list[str] = []
    drawn: list[bytes] = []

    class Watched:
        randbelow = staticmethod(secrets.randbelow)

        @staticmethod
        def token_bytes(count: int) -> bytes:
            drawn.append(secrets.token_bytes(count))
            return drawn[-1]

    monkeypatch.setattr(secure_sum, "secrets", Watched)

    def refuse(offer: str) -> bool:
        offers.append(offer)
        return False

    found = group.together(
        coordinator=lambda: group.serve(wait_s=2), north=lambda: group.join("north", agree=refuse, wait_s=30)
    )
    assert found["north"] is None
    assert "epsilon 1 at delta 1e-05" in offers[0]
    assert "700 private records" in offers[0]
    assert "Somebody with records at several sites pays at each." in offers[0]
    assert not group.run("north").root.exists()
    assert isinstance(found["coordinator"], SumError)
    for name in ("south", "west"):
        assert isinstance(found[name], site.PlanEndedError), found
        # The end is clean: the charge is known, and the secrets are gone.
        assert read_receipt(group.run(name)) is not None
        # Nor are they in what SQLite keeps of earlier pages.
        files = list(group.run(name).private.glob("sites.sqlite*"))
        assert len(files) == 2
        content = b"".join(path.read_bytes() for path in files)
        assert not [secret for secret in drawn if secret in content]
    assert len([secret for secret in drawn if len(secret) == 16]) == 4
    assert [total.releases for total in Odometer().totals(delta=1e-5)] == [2]
    # A site that comes back finds the end, and is not charged again.
    assert isinstance(group.together(north=lambda: None)["south"], SumError)
    assert [total.releases for total in Odometer().totals(delta=1e-5)] == [2]


@pytest.mark.parametrize(
    ("killed_before", "rows"), [("row", 4), ("receipt", 5), pytest.param("mark", 4, marks=pytest.mark.slow)]
)
def test_a_site_that_was_killed_while_it_charged_has_charged_before_it_sends(
    killed_before: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the odometer's row and the run's receipt it pays twice; it never pays less than once."""
    group, sent = Consortium(tmp_path), []
    request, record, write = site.CoordinatorClient.request, Odometer.charge, log.write_json
    store = plan.Journal.setdefault

    def killing(work: Any, is_it: Callable[..., bool]) -> Any:
        def act(*values: Any, **named: Any) -> Any:
            if is_it(*values):
                raise KilledError
            return work(*values, **named)

        return act

    own = group.run("south")
    with monkeypatch.context() as patched:
        if killed_before == "row":
            patched.setattr(Odometer, "charge", killing(record, lambda _, release, **__: release.path == str(own.root)))
        elif killed_before == "receipt":
            patched.setattr(log, "write_json", killing(write, lambda path, _: path == own.receipt))
        else:
            patched.setattr(plan.Journal, "setdefault", killing(store, lambda _, key, __: key == "charged"))

        def noted(client: Any, path: str, content: bytes | None = None, **named: Any) -> Any:
            sent.extend([] if content is None else [path])
            return request(client, path, content, **named)

        patched.setattr(site.CoordinatorClient, "request", noted)
        journal = plan.Journal.opened(tmp_path / "coordinator.sqlite", group.plan)
        embedding = embedding_file(group.file).read_bytes()
        with journal as opened:
            sums = coordinator.CoordinatorSums(group.plan, opened, wait_s=5, embedding=embedding)
            server = HttpServer(sums.app, HttpSettings(port=group.port))
            try:
                with pytest.raises(KilledError):
                    group.join("south")
            finally:
                server.stop()
    assert sent == []
    assert len(Odometer().totals(delta=1e-5)) == (0 if killed_before == "row" else 1)
    found = group.together()
    assert all(isinstance(each, RunDirectory) for each in found.values()), found
    assert [total.releases for total in Odometer().totals(delta=1e-5)] == [rows]


def test_a_coordinator_without_any_record_is_told_what_to_declare(tmp_path: Path) -> None:
    options = ("residual_votes.curvature=private", "data.split=hashed", "evaluation.metrics=private")
    with pytest.raises(DataSettingsError, match="coordinator, who reads no private records"):
        Consortium(tmp_path, *options, method="residual_votes", pool=False)


def test_a_limit_without_room_refuses_before_anything_leaves(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    Odometer().set_limit("hospitals", "record", epsilon=0.5, delta=1e-5)
    with plan.Journal.opened(tmp_path / "coordinator.sqlite", group.plan) as journal:
        sums = coordinator.CoordinatorSums(
            group.plan, journal, wait_s=5, embedding=embedding_file(group.file).read_bytes()
        )
        server = HttpServer(sums.app, HttpSettings(port=group.port))
        try:
            with pytest.raises(LimitReachedError, match=r"limit is 0\.5"):
                group.join("south")
        finally:
            server.stop()
        assert not any(journal.part("sum 0").get(f"hello/{place}") for place in range(3))
    assert Odometer().totals(delta=1e-5) == []


def test_without_a_coordinator_a_site_gives_up_in_time(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    with pytest.raises(site.CoordinatorError, match=r"cannot be reached .* for 0\.3 s"):
        group.join("south", wait_s=0.3)


def test_a_site_refuses_a_plan_whose_numbers_are_not_those_of_its_method(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    values = json.loads(group.plan.content)
    config = plan.config_of(group.plan, group.data["north"], data_dir=None, out=None)
    load = plan.loader_of(group.plan, embedding_file(group.file), has_private=True)
    plan.require_rehearsed(group.plan, config, load(config.data))

    def refused(**changes: Any) -> str:
        other = plan.read_plan(json.dumps(values | changes).encode(), "plan")
        with pytest.raises(plan.PlanError) as refusal:
            plan.require_rehearsed(other, config, load(config.data))
        return str(refusal.value)

    less = values["sums"][0] | {"noise_stddev": values["sums"][0]["noise_stddev"] / 2}
    assert refused(sums=[less]).startswith("sums: ")
    assert refused(events=[values["events"][0] | {"noise_stddev_votes": 1e9}]).startswith("events: ")
    assert refused(unit="person").startswith("unit: ")
    assert refused(test_events=[{}]).startswith("test_events: ")
    assert refused(public_arrays="0" * 64).startswith("public_arrays: ")
    embedding_file(group.file).write_bytes(b"another")
    with pytest.raises(plan.PlanError, match="embedding"):
        plan.loader_of(group.plan, embedding_file(group.file), has_private=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"out": "/srv/elsewhere"}}, r"settings\.out: a plan must not set folders"),
        ({"settings": {"data": {"data_dir": "/srv"}}}, r"settings\.data\.data_dir: a plan must not set folders"),
        ({"may_collude": 1.5}, "may_collude: expected a whole number"),
        ({"sums": [{"name": "sum 0", "rows": 1.0, "columns": 2, "noise_stddev": 40.0}]}, "rows: expected a whole"),
        ({"sums": [{"name": "sum 0", "rows": 1, "columns": 2, "noise_stddev": math.inf}]}, "noise_stddev: expected"),
        ({"sites": {"north\nCosts nothing": "00"}}, "expected names of at most 64"),
    ],
)
def test_a_plan_that_says_more_or_less_than_a_plan_does_is_refused(changes: dict[str, Any], message: str) -> None:
    values = json.loads(plan_of(5).content)
    with pytest.raises(plan.PlanError, match=message):
        plan.read_plan(json.dumps(values | changes).encode(), "plan")


def test_a_plan_cannot_name_code_nor_be_taken_with_another_declaration(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    values = json.loads(group.plan.content)
    values["settings"]["method"] = "os:system"
    with pytest.raises(ConfigError, match="code that would run"):
        plan.config_of(plan.read_plan(json.dumps(values).encode(), "plan"), group.own, data_dir=None, out=None)
    group.data["north"].write_text(group.own.read_text() + "licence: own\n", encoding="utf-8")
    with pytest.raises(plan.PlanError, match="not the declaration of the plan"):
        plan.config_of(group.plan, group.data["north"], data_dir=None, out=None)


@pytest.mark.parametrize(
    ("options", "method", "fault"),
    [
        (("noise=seeded",), "weighted_votes", "noise"),
        ((), "residual_votes", "residual_votes.curvature"),
        ((), "dp_sgd", "method"),
    ],
)
def test_methods_and_settings_that_sites_cannot_share_are_refused(
    options: tuple[str, ...], method: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"^{fault}"):
        Consortium(tmp_path, *options, method=method)


def test_a_rehearsal_reads_no_private_record(tmp_path: Path) -> None:
    group = Consortium(tmp_path)
    config = plan.config_of(group.plan, group.data["north"], data_dir=None, out=None)
    load = plan.loader_of(group.plan, embedding_file(group.file), has_private=True)
    dataset = load(config.data)
    assert len(dataset.private) == 700
    one = dataclasses.replace(dataset, private=dataset.private.take(range(1)))
    assert plan.rehearse(config, dataset) == plan.rehearse(config, one)
