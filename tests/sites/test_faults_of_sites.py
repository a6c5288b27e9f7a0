"""A party stops, at any message: the same sums after all, or a clean end; and one charge at every site."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sites as benchmark
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from network import SHAPES, Network, StoppedError, plan_of
from parties import KEYS

from fairpate.http_server import TlsFiles
from fairpate.sites.plan import Journal, JournalError, PlanError
from fairpate.sites.secure_sum import ENDED, SumError
from fairpate.sites.site import CoordinatorClient, CoordinatorError, PlanEndedError

_REQUESTS = 8  # of a site for one sum: four messages, four lists


def equal(found: Any, network: Network, sites: Any = None) -> bool:
    sites = range(len(network.exact)) if sites is None else sites
    return len(found) == len(SHAPES) and all(
        np.array_equal(total, network.expected(number, sites)) for number, total in enumerate(found)
    )


@pytest.mark.parametrize(
    "first", [pytest.param(each, marks=[pytest.mark.campaign] * (each % 4 > 0)) for each in range(_REQUESTS)]
)
def test_sites_that_were_killed_at_any_request_come_back_and_the_sums_are_the_same(first: int, tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    # All points in turn, each at another one of the four sites.
    points = list(itertools.product(range(2 * _REQUESTS), (False, True)))[first::_REQUESTS]

    def twice(k: int) -> Any:
        at, after = points[k]
        with pytest.raises(StoppedError):
            network.join(k, at=at, after=after)
        return network.join(k)

    with network.coordinator() as sums:
        works = {k: partial(twice, k) for k in range(4)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
    assert all(equal(each, network) for each in found.values()), found
    assert network.charges == [1] * 4


# What a site stores: the plan, a digest of its records, its id, two marks of the charge; then five values of each sum,
# and the end of it.
_STORED, _CHARGED = 5 + 2 * 6, 4


@contextmanager
def failing(at: dict[Path, int], *, after: bool) -> Iterator[set[Path]]:
    """Let the statement with this number that changes a journal fail, before or after it is on the disk, once."""
    do, left, failed = Journal._do, dict(at), set[Path]()

    def act(journal: Journal, command: str, *values: Any) -> Any:
        path = journal.path
        is_meant = path in left and command.startswith("INSERT")
        found = do(journal, command, *values) if after or not is_meant or left[path] else None
        if is_meant:
            left[path] -= 1
            if left[path] < 0:
                del left[path]
                failed.add(path)
                raise JournalError(f"{path}: the disk is full.")
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Journal, "_do", act)
        yield failed


@pytest.mark.parametrize(
    ("first", "after"),
    [
        pytest.param(first, after, marks=[pytest.mark.campaign] * ((first, after) not in ((1, False), (4, True))))
        for first, after in itertools.product(range(math.ceil(_STORED / 4)), (False, True))
    ],
)
def test_a_disk_that_is_full_at_any_moment_stops_a_site_which_continues_with_the_same_sums(
    first: int, after: bool, tmp_path: Path
) -> None:
    """Also a kill between any two of the values that it stores."""
    network = Network(tmp_path, 4)
    numbers = [min(first + k * _STORED // 4, _STORED - 1) for k in range(4)]
    at = {tmp_path / f"site-{k}.sqlite": number for k, number in enumerate(numbers)}

    def twice(k: int) -> Any:
        with pytest.raises(JournalError):
            network.join(k)
        return network.join(k)

    with network.coordinator() as sums, failing(at, after=after) as failed:
        works = {k: partial(twice, k) for k in range(4)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
        assert failed == set(at)
    assert all(equal(each, network) for each in found.values()), found
    # Charged before it is marked as charged: stopped in between, the charge replaces its own row of the odometer.
    assert network.charges == [2 if number == _CHARGED and not after else 1 for number in numbers]


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, 2, 3, 4),
        pytest.param((22, 25, 30, 40), marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.campaign) for each in ((5, 8, 9, 13), (10, 14, 17, 21))),
    ],
)
def test_a_coordinator_whose_disk_is_full_at_any_moment_continues(numbers: tuple[int, ...], tmp_path: Path) -> None:
    network, path = Network(tmp_path, 4), tmp_path / "coordinator.sqlite"
    # The numbers of statements since the last failure; every start stores the plan once more.
    starts = [b - a for a, b in zip((0, *numbers[:-1]), numbers, strict=True)]
    stopped = []

    def coordinate() -> Any:
        # A request that fails is answered with an error, and the site repeats it; elsewhere the process ends.
        for place, start in enumerate(starts):
            with failing({path: start}, after=place % 2 == 1) as failed:
                stopped.append(failed)
                with suppress(JournalError), network.coordinator() as sums:
                    drawing = threading.Thread(target=_quietly, args=(network.draw, sums), daemon=True)
                    drawing.start()
                    deadline_s = time.monotonic() + 30
                    while not failed and time.monotonic() < deadline_s:
                        drawing.join(0.01)
                    sums._journal = _Gone()  # type: ignore[assignment]
                    drawing.join(30)
        with network.coordinator() as sums:
            found = network.draw(sums)
            sums.wait_for_sites(5)  # a site that said it was done while the disk was full does not say it again
            return found

    found = network.together({k: lambda k=k: network.join(k) for k in range(4)} | {"coordinator": coordinate})
    assert all(stopped), stopped
    assert all(equal(each, network) for each in found.values()), found
    assert network.charges == [1] * 4


@pytest.mark.parametrize(
    "points",
    [(5,), *(pytest.param(each, marks=pytest.mark.campaign) for each in ((0, 1, 2, 3), (4, 6, 7)))],
    ids=["one of them", "sent", "listed"],
)
def test_without_a_site_that_never_comes_back_the_others_have_a_sum(points: tuple[int, ...], tmp_path: Path) -> None:
    """Lost after each of these requests, in plans of their own that wait at the same time."""

    def without(at: int) -> tuple[Network, dict[Any, Any]]:
        (folder := tmp_path / str(at)).mkdir()
        network = Network(folder, 4, wait_s=5.0)  # the others must all be in time, on a busy machine too
        with network.coordinator() as sums:
            works = {k: lambda k=k: network.join(k) for k in (1, 2, 3)}
            lost = {0: lambda: network.join(0, at=at, after=True)}
            return network, network.together(works | lost | {"coordinator": lambda: network.draw(sums)})

    with ThreadPoolExecutor(len(points)) as at_once:
        every = dict(zip(points, at_once.map(without, points), strict=True))
    for at, (network, found) in every.items():
        # Its numbers are in the first sum if they arrived: its second message is request number 2.
        (first, second), everybody = found["coordinator"], range(4)
        assert np.array_equal(first, network.expected(0, everybody if at >= 2 else range(1, 4))), at
        assert np.array_equal(second, network.expected(1, range(1, 4))), at
        for k in (1, 2, 3):
            assert all(np.array_equal(a, b) for a, b in zip(found[k], found["coordinator"], strict=True)), at


@pytest.mark.parametrize(
    "messages",
    [*(pytest.param(each, marks=pytest.mark.campaign) for each in ((1, 2, 1, 1, 4), (3, 5, 3, 5), (4, 9, 4))), (9, 16)],
)
def test_a_coordinator_that_was_killed_at_any_message_goes_on_where_it_was(
    messages: tuple[int, ...], tmp_path: Path
) -> None:
    """Killed after each of these numbers of messages since its start."""
    network = Network(tmp_path, 4)

    def until_killed(number: int) -> None:
        killed = threading.Event()
        with network.coordinator() as sums:
            left = [number]

            def counted(receive: Any, *values: Any) -> Any:
                if not left[0]:
                    killed.set()
                    raise StoppedError  # a client sees a failing server
                left[0] -= 1
                return receive(*values)

            for machine in sums._machines:
                machine.receive = partial(counted, machine.receive)  # type: ignore[method-assign]
            drawing = threading.Thread(target=lambda: _quietly(network.draw, sums), daemon=True)
            drawing.start()
            assert killed.wait(30)
            sums._journal = _Gone()  # type: ignore[assignment]
            drawing.join(30)

    def coordinate() -> Any:
        for number in messages:
            until_killed(number)
        with network.coordinator() as again:
            found = network.draw(again)
            again.wait_for_sites(30)
            return found

    works = {k: lambda k=k: network.join(k) for k in range(4)}
    found = network.together(works | {"coordinator": coordinate})
    assert all(equal(each, network) for each in found.values()), found
    assert network.charges == [1] * 4


class _Gone:
    """The journal of a process that is no more."""

    def get(self, _: str) -> Any:
        raise StoppedError


def _quietly(work: Any, *values: Any) -> None:
    with suppress(StoppedError, JournalError):
        work(*values)


def test_too_few_sites_end_the_plan_for_good_and_erase_what_they_drew(tmp_path: Path) -> None:
    network = Network(tmp_path, 5, wait_s=0.5)
    with network.coordinator() as sums:
        works = {k: lambda k=k: network.join(k) for k in (0, 1, 2)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
        assert isinstance(found.pop("coordinator"), SumError)
        assert all(isinstance(each, PlanEndedError) for each in found.values())
        # Late sites do not bring it back, nor does another start of the coordinator.
        with pytest.raises(PlanEndedError):
            network.join(4)
    with network.coordinator() as sums, pytest.raises(SumError, match="has ended"):
        network.draw(sums)
    for k in (0, 1, 2):
        with Journal.opened(tmp_path / f"site-{k}.sqlite", network.plan) as journal:
            assert journal.part("sum 0").get("hello") is None
            assert journal.part("sum 0").get(ENDED) is not None
        with pytest.raises(SumError, match="new plan"):
            network.join(k)
    assert network.charges == [1, 1, 1, 0, 1]


@pytest.mark.slow
def test_faults_at_random_messages_end_in_the_exact_sum_or_in_none() -> None:
    """A small part of the campaign that docs/sites.md counts; another sum would be an AssertionError there."""
    outcomes = benchmark.campaign(25, seed=1)
    assert outcomes.keys() == {"exact, all sites", "exact, some sites lost", "ended: too few sites"}


def test_two_coordinators_never_get_two_sums(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator() as sums:
        works = {k: lambda k=k: _until_masked(network, k) for k in range(4)}
        network.together(works | {"coordinator": lambda: _quietly_ended(network, sums)})
        kept = {k: network.found[k] for k in range(4)}
    assert all(isinstance(each, StoppedError) for each in kept.values()), kept
    # Another one asks the same sites: they have their lists, and repeat what they said.
    with network.coordinator("other") as sums:
        works = {k: lambda k=k: network.join(k) for k in (0, 1, 2, 3)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
    assert all(equal(each, network) for each in found.values()), found
    with network.coordinator() as sums:
        sums._wait_s = 0.5
        with pytest.raises(SumError, match="Time is up"):
            network.draw(sums)


def _until_masked(network: Network, k: int) -> Any:
    return network.join(k, at=2, after=True)


def _quietly_ended(network: Network, sums: Any) -> None:
    # Until all numbers are there; its clock is stopped before anybody agrees to a list.
    with sums._changed:
        while len(sums._machines[0]._messages["masked"]) < 4:
            sums._machines[0].advance()
            sums._changed.wait(0.05)


def test_a_journal_and_a_key_of_another_plan_are_refused(tmp_path: Path) -> None:
    with Journal.opened(tmp_path / "journal.sqlite", plan_of(4)):
        pass
    with (
        pytest.raises(PlanError, match="belongs to another plan"),
        Journal.opened(tmp_path / "journal.sqlite", plan_of(4, number=1)),
    ):
        pass
    with pytest.raises(PlanError, match="does not belong to a site of the plan"):
        plan_of(4).place_of(KEYS[5])


def test_a_full_disk_stops_a_site_before_it_sends(tmp_path: Path) -> None:
    network, opened = Network(tmp_path, 4), Journal.opened

    @contextmanager
    def full(path: Path, plan: Any) -> Iterator[Any]:
        with opened(path, plan) as journal:
            journal.database.execute("PRAGMA max_page_count = 3")
            with suppress(JournalError):
                for number in itertools.count():
                    journal.setdefault(f"other {number}", bytes(99))
            yield journal

    with network.coordinator() as sums, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Journal, "opened", full)
        with pytest.raises(JournalError, match=r"is full.*free space"):
            network.join(0)
        assert sums._machines[0]._messages["hello"] == {}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/sums/0/hello/0", 422),
        ("POST", "/v1/sums/0/masked/0", 409),
        ("POST", "/v1/sums/9/hello/0", 404),
        ("POST", "/v1/sums/0/goodbye/0", 404),
        ("POST", "/v1/sums/0/hello/-1", 422),
        ("GET", "/v1/sums/0/members/0", 202),
        ("GET", "/v1/sums/0/members/4", 404),
        ("GET", "/v1/sums/0/secrets/0", 404),
        ("GET", "/v1/embedding", 404),
    ],
)
def test_requests_that_no_site_makes_are_refused(method: str, path: str, status: int, tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator(), httpx.Client(base_url=f"http://127.0.0.1:{network.port}") as client:
        reply = client.request(method, path, content=b"x" * 10 if method == "POST" else None)
        assert reply.status_code == status, reply.text


@pytest.mark.slow
def test_clocks_that_differ_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, own, clock = Network(tmp_path, 4), threading.local(), time.time
    monkeypatch.setattr(time, "time", lambda: clock() + getattr(own, "years", 0) * 31_557_600)

    def join(k: int) -> Any:
        own.years = (-40, -1, 1, 40)[k]
        return network.join(k)

    with network.coordinator() as sums:
        works = {k: partial(join, k) for k in range(4)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
    assert all(equal(each, network) for each in found.values()), found


def certificate(folder: Path) -> TlsFiles:
    """A certificate of 127.0.0.1 that is its own authority."""
    key, today = ec.generate_private_key(ec.SECP256R1()), datetime.now(tz=UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))
    return TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")


def test_sites_join_over_https_and_refuse_a_certificate_that_they_do_not_know(tmp_path: Path) -> None:
    network, tls = Network(tmp_path, 4), certificate(tmp_path)
    network.tls = tls
    with network.coordinator() as sums:
        client = CoordinatorClient(f"https://127.0.0.1:{network.port}", wait_s=600)
        # At once, instead of for as long as a site waits.
        with pytest.raises(CoordinatorError, match=r"certificate is refused .* --ca"):
            client.request("/v1/plan")
        client.close()
        works = {k: lambda k=k: network.join(k, ca=str(tls.cert)) for k in range(4)}
        found = network.together(works | {"coordinator": lambda: network.draw(sums)})
    assert all(equal(each, network) for each in found.values()), found


def test_plain_http_beyond_this_machine_is_refused() -> None:
    with pytest.raises(PlanError, match="expected https"):
        CoordinatorClient("http://hospital.example:8518", wait_s=1)


def test_a_coordinator_that_never_answers_is_given_up(tmp_path: Path) -> None:
    network = Network(tmp_path, 4)
    with network.coordinator(), pytest.raises(CoordinatorError, match="waits for other sites"):
        network.join(0, wait_s=0.3)
    assert network.charges == [1, 0, 0, 0]


def test_talking_to_a_coordinator_takes_neither_torch_nor_ray_and_little_memory(tmp_path: Path) -> None:
    network, fetched = Network(tmp_path, 4), tmp_path / "fetched"
    code = (
        "import re, sys, fairpate.sites.secure_sum\n"
        "from pathlib import Path\n"
        "from fairpate.sites.site import CoordinatorClient\n"
        f"client = CoordinatorClient('http://127.0.0.1:{network.port}', wait_s=9)\n"
        f"client.request('/v1/embedding', most_bytes=2**28, into=Path({str(fetched)!r}))\n"
        "assert not {'torch', 'ray', 'sklearn', 'fastapi'} & set(sys.modules), sorted(sys.modules)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    embedding = bytes(range(256)) * 2**18  # 64 MiB
    with network.coordinator(embedding=embedding):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000, "kB"
    assert fetched.read_bytes() == embedding
