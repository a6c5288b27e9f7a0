"""The chain of a ledger that is being served, verified beside the queries: what ends the service's writing, what does
not, and what brings it back."""

import hashlib
import hmac
import itertools
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import httpx
import numpy as np
import pytest
from serving import ANALYST, OPERATOR, TERMS, ids, open_backend, running, tokens_of_both_roles, until
from stored_ledgers import answer, execute

from aggregator.ledger import Asker, Ledger, back_end, verified_slices
from aggregator.mechanism import Outcome
from aggregator.store import UnreachableError, head_path, is_database, ledger_files, rows_after

AS_ANALYST = {"Authorization": f"Bearer {ANALYST}"}
AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("short_pauses"),
]
# Of the two back ends, whose chains are verified by the same code, one shows the claim.
in_sqlite = pytest.mark.parametrize(
    "place", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
QUICK = {"health_interval_s": 0.1, "verification_interval_s": 0.1}


@pytest.fixture
def http(place):
    """A client of a service that has answered five requests: ten entries."""
    with (
        running(place, tokens=tokens_of_both_roles(), backend=open_backend(place), **QUICK) as url,
        httpx.Client(base_url=url, timeout=60, headers=AS_ANALYST) as http,
    ):
        for number in range(5):
            assert http.post("/v1/queries", json=ids([number])).status_code == 200
        yield http


def reasons(http):
    return http.get("/readyz").json()["reasons"]


def chain(http):
    return http.get("/v1/operator/overview", headers=AS_OPERATOR).json()["chain"]


def ended(http):
    """Whether new queries are refused for a broken chain, while stored replies go on."""
    until(lambda: reasons(http) == ["chain", "ledger"])
    assert http.get("/readyz").status_code == 503
    assert http.post("/v1/queries", json=ids([20])).status_code == 503
    assert http.post("/v1/queries", json=ids(range(5))).status_code == 200
    assert "fairpate_ready 0.0" in http.get("/metrics").text
    # What an operator sees is made anew every few seconds.
    until(lambda: "fairpate_operator_chain_ok 0.0" in http.get("/v1/operator/metrics", headers=AS_OPERATOR).text)
    until(lambda: chain(http)["fault"])
    assert http.get("/v1/budget").json()["queries_submitted"] == 5
    return True


def goes_on(http):
    until(lambda: reasons(http) == [])
    until(lambda: chain(http)["fault"] == "")
    assert http.post("/v1/queries", json=ids([20])).status_code == 200
    assert http.get("/v1/budget").json()["queries_submitted"] == 6
    return True


def test_a_sound_chain_is_verified_again_and_again(http):
    first = chain(http)
    until(lambda: chain(http)["at_s"] > first["at_s"])
    until(lambda: chain(http)["entries"] == 10)
    assert chain(http)["fault"] == ""
    assert reasons(http) == []


@pytest.mark.parametrize(
    ("number", "column"), [(1, "payload"), pytest.param(4, "kind", marks=pytest.mark.slow), (10, "digest")]
)
def test_an_entry_that_was_changed_ends_writing_until_it_is_put_back(http, place, number, column):
    with closing(back_end(place).reader(place)) as reader:
        ((*values,),) = reader.rows(number - 1, 1)
    row = dict(zip(("number", "kind", "payload", "digest"), values, strict=True))
    statement = f"UPDATE {{entries}} SET {column} = :value WHERE number = {number}"  # noqa: S608
    execute(place, statement, value="x" + row[column][1:])
    assert ended(http)
    assert f"entry {number} " in chain(http)["fault"]
    time.sleep(0.5)  # it was tried to open it again
    assert ended(http)
    execute(place, statement, value=row[column])
    assert goes_on(http)


@in_sqlite
def test_entries_that_were_removed_end_writing(http, place):
    execute(place, "DELETE FROM {entries} WHERE number > 6")
    assert ended(http)


@in_sqlite
def test_a_whole_chain_that_was_written_anew_with_its_key_ends_writing_for_good(http, place):
    """Each digest follows from the one before, and the noted end too: only this process knows what it wrote."""
    with closing(back_end(place).reader(place)) as reader:
        header, rows = reader.header, list(rows_after(reader))
    key = header.key

    def link(previous, kind, text):
        return hmac.new(key, f"{previous}\n{kind}\n{text}".encode(), hashlib.sha256).hexdigest()

    digest = link("", "terms", header.terms)
    edits = []
    for number, kind, text, _ in rows:
        other = json.dumps({**json.loads(text), "at": 1.0}, sort_keys=True, separators=(",", ":"))
        text = other if kind == "reserve" else text
        digest = link(digest, kind, text)
        edits.append((number, text, digest))
    for number, text, digest in reversed(edits):
        statement = "UPDATE {entries} SET payload = :text, digest = :digest WHERE number = :number"
        execute(place, statement, text=text, digest=digest, number=number)
    if is_database(place):
        execute(place, "UPDATE {ledgers} SET digest = :digest", digest=digest)
    else:
        with head_path(place).open("r+b") as file:
            file.write(f"{len(rows):020d} {digest}\n".encode())
    assert ended(http)
    time.sleep(0.5)
    assert ended(http)


FLIP = """
import sys
from pathlib import Path

found = 0
for name in sys.argv[2:]:
    data, wanted = bytearray(Path(name).read_bytes()), sys.argv[1].encode()
    at = data.find(wanted)
    while at >= 0:
        data[at] ^= 1
        found += 1
        at = data.find(wanted)
    with open(name, "r+b") as file:
        file.write(data)
print(found)
"""


def test_a_byte_that_flips_on_the_disk_ends_writing(path):
    """By another process, as a disk does it: in the database's file and in its log, wherever the entry stands."""
    with (
        running(path, tokens=tokens_of_both_roles(), **QUICK) as url,
        httpx.Client(base_url=url, headers=AS_ANALYST) as http,
    ):
        for number in range(5):
            http.post("/v1/queries", json=ids([number]))
        until(lambda: chain(http)["entries"] == 10)
        with closing(back_end(path).reader(path)) as reader:
            key = json.loads(reader.rows(2, 1)[0][2])["keys"][:64]
        files = [str(file) for file in ledger_files(path) if file.suffix in (".sqlite", ".sqlite-wal")]
        done = subprocess.run([sys.executable, "-c", FLIP, key, *files], capture_output=True, text=True, check=True)  # noqa: S603
        assert int(done.stdout) >= 1
        assert ended(http)
        assert "entry 3 " in chain(http)["fault"]


def test_verification_on_demand_ends_writing_too(place):
    with (
        running(place, tokens=tokens_of_both_roles(), backend=open_backend(place), health_interval_s=0.1) as url,
        httpx.Client(base_url=url, headers=AS_ANALYST) as http,
    ):
        for number in range(5):
            http.post("/v1/queries", json=ids([number]))
        execute(place, "UPDATE {entries} SET payload = :text WHERE number = 1", text="{}")
        assert reasons(http) == []
        told = http.post("/v1/operator/verification", headers=AS_OPERATOR).json()
        assert "entry 1 " in told["fault"]
        assert ended(http)


@in_sqlite
def test_an_older_copy_that_is_put_back_is_not_taken_up(http, place, tmp_path):
    """It is whole in itself, and forgets what was charged since it was made."""
    with closing(back_end(place).reader(place)) as reader:
        _, _, _, digest = list(rows_after(reader))[-1]
    older = tmp_path / "older"
    older.mkdir()
    if not is_database(place):
        with closing(sqlite3.connect(place)) as source, closing(sqlite3.connect(older / place.name)) as copy, copy:
            source.backup(copy)
        shutil.copy(head_path(place), older)
    assert http.post("/v1/queries", json=ids([6])).status_code == 200
    if is_database(place):
        execute(place, "DELETE FROM {entries} WHERE number > 10")
        execute(place, "UPDATE {ledgers} SET number = 10, digest = :digest", digest=digest)
    else:
        for file in ledger_files(place):
            file.unlink()
        for file in older.iterdir():
            shutil.copy(file, place.parent)
    until(lambda: "ledger" in reasons(http))
    time.sleep(0.5)
    assert "ledger" in reasons(http)
    assert http.post("/v1/queries", json=ids([20])).status_code == 503
    assert http.get("/v1/budget").json()["queries_submitted"] == 6


@pytest.mark.parametrize(
    ("end", "begin"),
    [
        ("kill", "start"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("pause", "resume"), ("stop", "start"))),
    ],
)
def test_a_database_that_does_not_answer_is_no_broken_chain(own_server, end, begin):
    place = own_server.url(f"outage-{end}")
    with (
        running(place, tokens=tokens_of_both_roles(), backend=open_backend(place), **QUICK) as url,
        httpx.Client(base_url=url, timeout=60, headers=AS_ANALYST) as http,
    ):
        for number in range(5):
            assert http.post("/v1/queries", json=ids([number])).status_code == 200
        getattr(own_server, end)()
        try:
            until(lambda: reasons(http) == ["ledger"])
            if end != "pause":
                assert http.post("/v1/operator/verification", headers=AS_OPERATOR).status_code == 503
            time.sleep(0.5)
            assert chain(http)["fault"] == ""
            assert "fairpate_operator_chain_ok 1.0" in http.get("/v1/operator/metrics", headers=AS_OPERATOR).text
            assert reasons(http) == ["ledger"]
        finally:
            getattr(own_server, begin)()
        until(lambda: reasons(http) == [])
        told = http.post("/v1/operator/verification", headers=AS_OPERATOR).json()
        assert (told["entries"], told["fault"]) == (10, "")
        assert goes_on(http)


def test_an_outage_while_a_round_reads_is_no_fault(own_server):
    place = own_server.url("reading")
    with Ledger(place, TERMS) as ledger:
        for number in range(20):
            answer(ledger, f"key-{number}")
        found = verified_slices(ledger)
        next(found)
        own_server.kill()
        try:
            with pytest.raises(UnreachableError):
                list(found)
            with pytest.raises(UnreachableError):
                list(verified_slices(ledger))
        finally:
            own_server.start()


def test_slices_cover_every_entry_while_others_are_appended(place):
    """Entries of one query and of a thousand, in slices that grow and shrink."""
    votes, outcome = np.tile([40, 15, 5], (1000, 1)), Outcome(verdict="answer", label=0)
    with Ledger(place, TERMS) as ledger:
        for number in range(150):
            answer(ledger, f"key-{number}")
        reserved = ledger.reserve([f"many-{i}" for i in range(1000)], [1] * 1000, votes, [Asker("alice", "r")] * 1000)
        ledger.commit(reserved, [outcome] * 1000)
        for number in range(150, 300):
            answer(ledger, f"key-{number}")
        counts = []
        for count in verified_slices(ledger):
            counts.append(count)
            if len(counts) % 4 == 0:
                answer(ledger, f"later-{len(counts)}")
        assert counts[-1] == 602  # two for each answer, of those that were there when it began
        assert len(counts) > 5
        assert all(before < after for before, after in itertools.pairwise(counts))
        assert list(verified_slices(ledger))[-1] == ledger.head.number > 602
