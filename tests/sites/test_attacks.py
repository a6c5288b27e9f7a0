"""Attacks by a coordinator, a site or a stranger: each is refused, and no second draw of noise for one sum leaves."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import socketserver
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse
from network import Network, StoppedError, plan_of
from parties import KEYS, Parties, draw_of

from fairpate.config import ModelConfig
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.releases.directory import RunDirectory
from fairpate.sites.coordinator import CoordinatorSums
from fairpate.sites.plan import MOST_PLAN_BYTES, Journal, JournalError, PlanError, SitePlan, read_plan
from fairpate.sites.secure_sum import LISTS, STEPS, Coordinator, LateError, SumError
from fairpate.sites.site import CoordinatorClient, CoordinatorError, Messenger, join, measurable
from student.card import StudentCard
from student.student import Student, build_network, save_student

pytestmark = pytest.mark.usefixtures("light_runs")


def test_a_site_signs_one_list_of_survivors() -> None:
    parties = Parties(draw_of(5, may_vanish=1))
    for step in ("hello", "masked"):
        parties.send(step, range(5))
        parties.coordinator.advance(time_is_up=True) if step == "hello" else None
    lists = []
    for gone in ((), (4,)):
        kept = {key: value for key, value in parties.kept.items() if key not in {f"masked/{place}" for place in gone}}
        coordinator = Coordinator(parties.draw, kept)
        coordinator.advance(time_is_up=True)
        lists.append(coordinator.listed("survivors"))
    first = parties.site(0).agreed(lists[0])
    with pytest.raises(SumError, match="two different lists of survivors"):
        parties.site(0).agreed(lists[1])
    assert parties.site(0).agreed(lists[0]) == first


@pytest.mark.parametrize("other", [{"number": 1}, {"plan": b"q" * 32}, {"plan": b"p" * 31 + b"q"}])
def test_messages_of_another_sum_or_plan_are_refused(other: dict[str, Any]) -> None:
    """A replayed round: each signature is of one plan and one sum."""
    one, two = Parties(draw_of(4)), Parties(draw_of(4, **other))
    for step in STEPS:
        for parties in (one, two):
            parties.send(step, range(4))
        for place in range(4):
            message = one.kept[f"{step}/{place}"]
            fresh = Coordinator(two.draw, {key: value for key, value in two.kept.items() if key != f"{step}/{place}"})
            with pytest.raises(SumError, match="no valid signature for this plan"):
                fresh.receive(step, place, message)
        for parties in (one, two):
            parties.coordinator.advance(time_is_up=True)
    # Also a whole list: a site of the other sum finds that none of it is of its own.
    with pytest.raises(SumError):
        two.site(0).agreed(one.coordinator.listed("survivors"))


def test_a_coordinator_with_another_database_gets_the_old_messages_or_none(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator() as sums:
        works: dict[Any, Any] = {k: lambda k=k: network.join(k, at=2, after=True) for k in range(4)}
        waiting = threading.Thread(target=lambda: network.together(works))
        waiting.start()
        with sums._changed:
            while len(sums._machines[0]._messages["masked"]) < 4:
                sums._machines[0].advance()
                sums._changed.wait(0.05)
        waiting.join()
    assert all(isinstance(network.found[k], StoppedError) for k in range(4)), network.found
    # The same sites with fewer participants: their noise would get other masks.
    with network.coordinator("other") as sums:
        machine = sums._machines[0]
        works = {k: lambda k=k: network.join(k, wait_s=3.0) for k in (0, 1, 2)}
        waiting = threading.Thread(target=lambda: network.together(works))
        waiting.start()
        with sums._changed:
            while len(machine._messages["hello"]) < 3:
                sums._changed.wait(0.05)
            machine.advance(time_is_up=True)
        waiting.join()
        assert machine._messages["masked"] == {}
    for k in (0, 1, 2):
        assert isinstance(network.found[k], SumError)
        assert "two different lists of members" in str(network.found[k])


def test_a_site_whose_folder_was_deleted_does_not_begin_anew(tmp_path: Path) -> None:
    network = Network(tmp_path, 4, wait_s=2.0)
    with network.coordinator() as sums:
        with pytest.raises(StoppedError):
            network.join(0, at=1)
        (tmp_path / "site-0.sqlite").unlink()
        with pytest.raises(SumError, match="folder was deleted"):
            network.join(0)
        assert network.charges[0] == 1
        # Even without the note next to its odometer, the coordinator has its first message, which no other replaces.
        shutil.rmtree(tmp_path / "begun")
        (tmp_path / "site-0.sqlite").unlink()
        works: dict[Any, Any] = {k: lambda k=k: network.join(k, wait_s=60.0) for k in range(4)}
        kept = sums._machines[0]._messages["hello"][0]
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
        assert sums._machines[0]._messages["hello"][0] == kept
    assert isinstance(found[0], SumError)
    assert "lacks this site's own message" in str(found[0])
    # The others had a sum without it: one site may vanish.
    for number, total in enumerate(found["coordinator"]):
        assert np.array_equal(total, network.expected(number, (1, 2, 3)))


def test_two_folders_of_one_site_do_not_both_take_part(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator(), pytest.raises(StoppedError):
        network.join(0, at=1)
    with (
        closing(Messenger(network.plan, KEYS[0], None)) as messenger,  # type: ignore[arg-type]
        pytest.raises(SumError, match="took part in this plan with another folder"),
    ):
        messenger.begin(tmp_path / "elsewhere.sqlite", tmp_path / "begun" / "0", b"", int)


def test_a_journal_that_another_process_has_open_is_refused(tmp_path: Path) -> None:
    plan = plan_of(4)
    with (
        Journal.opened(tmp_path / "journal.sqlite", plan),
        pytest.raises(JournalError, match="another process uses this journal"),
        Journal.opened(tmp_path / "journal.sqlite", plan),
    ):
        pass
    with Journal.opened(tmp_path / "journal.sqlite", plan):
        pass


def test_a_site_continues_with_the_records_with_which_it_began(tmp_path: Path) -> None:
    expected: list[tuple[bytes, Any]] = [(b"one", nullcontext()), (b"one", nullcontext())]
    for records, fault in (*expected, (b"two", pytest.raises(SumError, match="not those with which"))):
        with closing(Messenger(plan_of(4), KEYS[0], None)) as messenger, fault:  # type: ignore[arg-type]
            assert messenger.begin(tmp_path / "journal.sqlite", tmp_path / "begun", records, int) is False


def with_model(plan: SitePlan) -> SitePlan:
    """The plan, whose last sum is about a model."""
    values = json.loads(plan.content) | {"test_events": [{}]}
    return read_plan(json.dumps(values).encode(), "plan")


def test_tables_of_different_models_do_not_add_up(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    network.plan = with_model(network.plan)
    draws = {about: network.plan.draw(1, about) for about in (b"", b"one", b"two")}
    assert len({draw.plan for draw in draws.values()}) == 3
    assert network.plan.draw(0).plan == draws[b""].plan
    # A site keeps the model that its noise was drawn for.
    url = f"http://127.0.0.1:{network.port}"
    client = CoordinatorClient(url, wait_s=0.1)
    with closing(Messenger(network.plan, KEYS[0], client, source=SeededSource(0))) as messenger:
        messenger.begin(tmp_path / "site-0.sqlite", tmp_path / "b", b"", int)
        table = network.exact[0][1]
        for about, fault in ((b"one", "cannot be reached"), (b"two", "another model than before")):
            with pytest.raises(Exception, match=fault):
                messenger.sum(table, stddev=40.0, name="sum 1", about=about)
    client.close()
    # So does the coordinator, which may have been started with another run.
    with Journal.opened(tmp_path / "coordinator.sqlite", network.plan) as journal:
        journal.setdefault("model", b"one")
        again = CoordinatorSums(network.plan, journal, wait_s=0.1)
        with pytest.raises(SumError, match="model differs"):
            again(np.zeros((1, 4), np.int64), stddev=40.0, name="sum 1", about=b"two")


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 3)], ids=["a-group-less", "a-class-more"])
def test_a_model_that_would_fail_on_some_test_records_alone_is_refused_before_one_is_read(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Otherwise a site that does not come back would tell that it has such a record."""
    card = StudentCard(
        model=ModelConfig(name="logistic"),
        input_shape=(2,),
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="g",
    )
    network = build_network(card)
    object.__setattr__(card, "mixing", np.full(shape, 1 / shape[2]).tolist())  # as a coordinator could write it
    run, data = RunDirectory(root=tmp_path), SimpleNamespace(label_names=("no", "yes"), group_names=("a", "b"))
    data.private = SimpleNamespace(x=np.zeros((0, 2)))
    run.student.parent.mkdir(parents=True)
    save_student(Student(card=card, network=network), run.student)
    with pytest.raises(SumError, match="Expected mixing of shape"):
        measurable(run, data)  # type: ignore[arg-type]


def test_a_stranger_does_not_let_the_coordinator_stop(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator() as sums, httpx.Client(base_url=f"http://127.0.0.1:{network.port}") as client:
        works: dict[Any, Any] = {k: lambda k=k: network.join(k, leaves=False) for k in range(4)}
        network.together(works | {"coordinator": lambda: network.draw(sums)})
        for place in range(4):
            assert client.get(f"/v1/sums/1/sum/{place}").status_code == 200
            for body in (b"", bytes(64), KEYS[place].sign(b"done")):
                assert client.post(f"/v1/done/{place}", content=body).status_code == 422
        assert client.post("/v1/done/4", content=bytes(64)).status_code == 422
        assert sums._done == set()
        signature = KEYS[2].sign(network.plan.draw(0).tag("done", 2))
        assert client.post("/v1/done/2", content=signature).status_code == 200
        assert client.post("/v1/done/3", content=signature).status_code == 422
        assert sums._done == {2}


@pytest.mark.parametrize(
    "settings",
    [
        {"ray": {"num_actors": 64}},
        {"student": {"model": {"weights": {"path": "/srv/any.pth", "sha256": None}}}},
        {"teachers": {"model": {"weights": {"path": "imagenet"}}}},
        {"storage": "s3://bucket/teachers"},
        {"out": "/srv/elsewhere"},
    ],
)
def test_a_plan_chooses_no_folder_file_or_cluster_of_a_site(settings: dict[str, Any]) -> None:
    values = json.loads(plan_of(4).content) | {"settings": settings}
    with pytest.raises(PlanError, match=r"settings\..*: a plan must not set folders, files or machines"):
        read_plan(json.dumps(values).encode(), "plan")


@pytest.mark.parametrize("lie", [1, -(2**57), 2**63 - 1])
def test_a_site_can_shift_the_sum_by_any_numbers_and_nobody_notices(lie: int) -> None:
    """Nothing proves a norm: what such a site can do is in docs/sites.md."""
    parties, honest = Parties(draw_of(4)), Parties(draw_of(4))
    parties.send("hello", range(4))
    parties.coordinator.advance()
    parties.send("masked", range(3))
    site, members = parties.site(3), parties.coordinator.listed("members", 3)
    assert members is not None
    message = site.masked(members, parties.exact[3], parties.source(3))
    body = (np.frombuffer(message[:-64], "<u8") + np.array(lie).astype(np.uint64)).tobytes()
    signed = parties.draw.digest(site._members(members)[0]) + hashlib.sha256(body).digest()
    parties.coordinator.receive("masked", 3, body + site._signed("masked", signed))
    parties.coordinator.advance()
    for step in ("agreed", "shares"):
        parties.send(step, range(4))
        parties.coordinator.advance()
    # Modulo 2^64, in which numpy adds whole numbers.
    assert np.array_equal(parties.coordinator.total_D, honest.run({}) + np.array(lie))


def test_a_second_message_never_takes_the_place_of_the_first() -> None:
    parties = Parties(draw_of(4))
    parties.send("hello", range(4))
    parties.coordinator.advance()
    members = parties.coordinator.listed("members", 0)
    first = parties.site(0).masked(members, parties.exact[0], parties.source(0))
    again = parties.site(0).masked(members, parties.exact[0] + 1, SeededSource(99))
    assert again == first
    other = Parties(parties.draw)
    with pytest.raises(LateError, match="differs from an earlier one"):
        parties.coordinator.receive("hello", 0, other.message("hello", 0) or b"")


class LyingServer(socketserver.ThreadingTCPServer):
    """Answers every request with ``head`` and then ``piece`` for ever, or once; counts the bytes that were taken."""

    daemon_threads = True

    def __init__(self, head: str, piece: bytes, *, for_ever: bool) -> None:
        self.head, self.piece, self.for_ever, self.taken = head, piece, for_ever, 0
        super().__init__(("127.0.0.1", 0), _Lie)


class _Lie(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        request = b""
        while b"\r\n\r\n" not in request:
            request += self.request.recv(2**16)
        try:
            self.request.sendall(server.head.encode() + b"\r\n\r\n")
            while server.taken < 2**30:
                self.request.sendall(server.piece)
                server.taken += len(server.piece)
                if not server.for_ever:
                    return
        except OSError:
            pass  # the site has heard enough


@contextmanager
def lying(head: str, piece: bytes, *, for_ever: bool = True) -> Iterator[LyingServer]:
    with LyingServer(head, piece, for_ever=for_ever) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


LIES = ("in chunks", "without a length", "of a stated length", "gzip", "deflate", "two codings")


@cache
def lie_of(lie: str) -> tuple[str, bytes, str]:
    """Head of a reply, what is sent again and again behind it, and words of the site's refusal."""
    match lie:
        case "in chunks":
            chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
            return "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", chunk, "longer than the {}"
        case "without a length":
            return "HTTP/1.1 200 OK", b" " * 2**16, "longer than the {}"
        case "of a stated length":
            return f"HTTP/1.1 200 OK\r\nContent-Length: {2**40}", b" " * 2**16, "longer than the {}"
        case "gzip":
            return "HTTP/1.1 200 OK\r\nContent-Encoding: gzip", gzip.compress(bytes(2**26)), "compressed"
        case "deflate":
            return "HTTP/1.1 200 OK\r\nContent-Encoding: deflate", zlib.compress(bytes(2**26)), "compressed"
        case _:
            _, bomb, words = lie_of("gzip")
            return "HTTP/1.1 200 OK\r\nContent-Encoding: identity, GZIP", bomb, words


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_of_any_length_takes_no_memory_of_a_site(lie: str, tmp_path: Path) -> None:
    """It is the first reply, before the operator has agreed to anything."""
    head, piece, words = lie_of(lie)
    key = tmp_path / "key"
    key.write_text("5a" * 32, encoding="ascii")
    key.chmod(0o600)
    with lying(head, piece) as server, pytest.raises(CoordinatorError, match=words.format(MOST_PLAN_BYTES)):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        join(url, key=key, agree=bool, reporter=Any, declaration=tmp_path, wait_s=0)
    # What sockets buffer comes on top.
    assert server.taken < MOST_PLAN_BYTES + 2**23


@pytest.mark.parametrize("lie", LIES)
def test_a_file_of_any_length_does_not_fill_the_disk_of_a_site(lie: str, tmp_path: Path) -> None:
    head, piece, words = lie_of(lie)
    with lying(head, piece) as server:
        client = CoordinatorClient(f"http://127.0.0.1:{server.server_address[1]}", wait_s=0)
        with closing(client), pytest.raises(CoordinatorError, match=words.format(2**20)):
            client.request("/v1/embedding", most_bytes=2**20, into=tmp_path / "file")
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size <= 2**20


@pytest.mark.parametrize("status", [202, 404, 409, 410, 503])
@pytest.mark.parametrize("lie", ["in chunks", "gzip"])
def test_a_report_of_an_error_is_read_no_further_than_its_beginning(status: int, lie: str) -> None:
    """A page of a proxy may be long, and is no reason to give up: status 503 is asked again."""
    head, piece, _ = lie_of(lie)
    with lying(head.replace("200 OK", f"{status} Some"), piece) as server:
        client = CoordinatorClient(f"http://127.0.0.1:{server.server_address[1]}", wait_s=0)
        with closing(client), nullcontext() if status == 409 else pytest.raises(CoordinatorError):
            assert client.request("/v1/plan") is None
    assert server.taken < 2**23


@pytest.mark.parametrize("lied", LISTS)
@pytest.mark.parametrize("more", [1, None], ids=["a byte more", "endless"])
def test_no_list_or_sum_of_a_coordinator_is_longer_than_that_of_all_sites(
    lied: str, more: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, honest = Network(tmp_path, 4, wait_s=0.5), CoordinatorSums.listed
    # By hand: a flag of each site, then of each a key, two hashes, a signature and a box; a hash and a signature; a
    # signature. The first sum is of 2 x 3 numbers.
    most = {"members": 4 * (1 + 32 + 64 + 64 + 62), "survivors": 4 * (1 + 96), "agreement": 4 * (1 + 64), "sum": 48}

    def listed(self: CoordinatorSums, number: int, name: str, place: int) -> Response:
        if name != lied:
            return honest(self, number, name, place)
        return StreamingResponse((bytes(2**16) for _ in range(2**14)) if more is None else [bytes(most[name] + more)])

    monkeypatch.setattr(CoordinatorSums, "listed", listed)
    with network.coordinator() as sums:
        works = {k: lambda k=k: network.join(k, leaves=False) for k in range(4)}
        found = network.together(works | {"coordinator": lambda: _first_sum(sums)})
    for k in range(4):
        assert isinstance(found[k], CoordinatorError), found[k]
        assert f"longer than the {most[lied]} bytes" in str(found[k])


def _first_sum(sums: Any) -> Any:
    return sums(np.zeros((2, 3), dtype=np.int64), stddev=40.0, name="sum 0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sums": [{"name": "sum", "rows": 2**26, "columns": 4, "noise_stddev": 40.0}]}, "sums.0: expected at most"),
        ({"sums": [{"name": "sum", "rows": 2, "columns": 1, "noise_stddev": 40.0}] * 1001}, "sums"),
        ({"sites": {str(number): "00" * 64 for number in range(1001)}}, "sites"),
        ({"settings": {"a": " " * 2**20}}, "expected at most 1048576 bytes"),
    ],
    ids=["numbers", "sums", "sites", "bytes"],
)
def test_what_a_plan_makes_a_site_compute_is_bounded(change: dict[str, Any], words: str) -> None:
    values = json.loads(plan_of(4).content) | change
    with pytest.raises(PlanError, match=words):
        read_plan(json.dumps(values).encode(), "plan")


@pytest.mark.parametrize("opened", [b"[", b'{"settings":', b'{"a":'])
def test_a_plan_that_is_nested_without_end_is_refused_as_none(opened: bytes) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        read_plan((opened * 2**20)[:MOST_PLAN_BYTES], "plan")
