"""Offsets on noisy counts: fixed once, kept over every restart, and without any part in what a query costs."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ledger_terms
import numpy as np
import pytest
from rich.console import Console
from serving import POOL, free_port

from aggregator import ledger_audit
from aggregator.client import AggregatorClient, QueryShell
from aggregator.ledger import NOBODY, Asker, CallerLimit, Ledger, LedgerTerms, Offsets, read_ledger
from aggregator.mechanism import ConfidentCounts, ConfidentGnmax, chance_to_win, lead_needed
from aggregator.service.actor import Backend, ServiceSettings
from aggregator.session import AggregatorSession, OverBudget, Query, epsilon_data_independent
from aggregator.store import LedgerError
from fairpate.fairness.gate import DemographicParityGate
from fairpate.http_server import HttpServer
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.types import GateRule, QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

NO_CHECK = {"threshold": -np.inf, "threshold_stddev_votes": 1.0, "noise_stddev_votes": 4.0}
TERMS = replace(
    ledger_terms.TERMS,
    mechanism=ConfidentCounts(**NO_CHECK),
    gate=GateRule(max_disparity=np.inf, min_count=0),
    num_teachers=100,
    num_classes=2,
    budget=QueryBudget(kind="query_count", delta=1e-5, max_queries=40),
)
OFFSETS = Offsets(votes=(0, 60), released="a digest")
ALICE = Asker("alice", "request")


def votes_of(queries: Any) -> Any:
    """Most vote for class 0: 90 to 60 of a hundred, by the name of the record."""
    zero_Q = np.array([90 - int(query.record_id) % 31 for query in queries])
    return np.stack([zero_Q, 100 - zero_Q], axis=1)


def queries(start: int, stop: int, *, group: int | None = None, asker: Asker = ALICE) -> list[Query]:
    return [
        Query(key=f"key-{i}", group=i % 2 if group is None else group, record_id=str(i), askers=(asker,))
        for i in range(start, stop)
    ]


def session_on(path: Path, terms: LedgerTerms = TERMS, *, offsets: Offsets | None = OFFSETS) -> AggregatorSession:
    ledger = Ledger(path, terms)
    if offsets is not None:
        ledger.fix_offsets(offsets)
    return AggregatorSession(ledger, source=SeededSource(5), with_offsets=True)


def test_they_are_added_after_the_noise_so_one_vote_moves_the_same_counts_as_without_them() -> None:
    """Brute force over all votes of three voters and all their neighbours, under the same noise."""
    mechanism = ConfidentCounts(**NO_CHECK | {"noise_stddev_votes": 0.8})

    def counts(votes_C: tuple[int, ...], **offsets: Any) -> tuple[int, Any]:
        gate = DemographicParityGate(TERMS.gate, num_groups=1, num_classes=3)
        given = {"groups": [0], "keys": ["q"], "gate": gate, "source": SeededSource(2)}
        (outcome,) = mechanism.answer(np.array([votes_C]), **given, **offsets)
        assert outcome.label is not None
        return outcome.label, np.array(outcome.counts)

    triples = [(a, b, 3 - a - b) for a in range(4) for b in range(4 - a)]
    labels = set()
    for votes_C in triples:
        plain, offset = counts(votes_C), counts(votes_C, offsets_C=(0, 2, -1))
        np.testing.assert_array_equal(plain[1], offset[1])
        score_C = plain[1] + [0, 2, -1]
        assert score_C[offset[0]] == score_C.max()
        labels.add((plain[0], offset[0]))
        for other_C in triples:
            if np.abs(np.subtract(votes_C, other_C)).sum() == 2:
                moved_C = counts(other_C, offsets_C=(0, 2, -1))[1] - offset[1]
                assert np.abs(moved_C).max() == 1
    assert len(labels) > 1
    # What is charged is the mechanism's alone, which has no offsets.
    assert mechanism.worst_case(7) == ConfidentGnmax(**NO_CHECK | {"noise_stddev_votes": 0.8}).worst_case(7)


def test_they_are_fixed_once_and_hold_after_every_restart(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    session = session_on(path)
    first = session.ask(queries(0, 10), votes_of)
    entries = session.ledger.head.number
    session.ledger.fix_offsets(OFFSETS)
    assert session.ledger.head.number == entries, "the same offsets are written once"
    session.ledger.close()  # as after a crash: nothing else is kept
    for other, message in (
        (Offsets(votes=(0, 61), released="a digest"), r"votes = \(0, 60\), not \(0, 61\)"),
        (Offsets(votes=(0, 60), released="another"), "released = a digest, not another"),
    ):
        with Ledger(path, TERMS) as ledger, pytest.raises(LedgerError, match=message):
            ledger.fix_offsets(other)
    with Ledger(path, TERMS) as ledger, pytest.raises(ValueError, match="offsets for 2 classes"):
        ledger.fix_offsets(Offsets(votes=(1, 2, 3), released="a digest"))
    found = ledger_audit.verify(path)
    assert (found.offsets, found.reservations, found.without_votes) == ((0, 60), 10, 0)
    again = session_on(path, offsets=None)
    assert again.offsets == OFFSETS
    assert again.ask(queries(0, 10), lambda _: pytest.fail("asked twice")) == first
    # And new ones are answered with them: 60 more votes make most of these answers 1.
    labels = [reply.label for reply in again.ask(queries(10, 30), votes_of) if not isinstance(reply, OverBudget)]
    assert labels.count(1) > 15
    again.ledger.close()


@pytest.mark.parametrize("votes", [(), (0.5, 1), (True, 1)])
def test_they_are_whole_numbers(votes: Any) -> None:
    with pytest.raises(ValueError, match="one whole number of votes for each class"):
        Offsets(votes=votes, released="")


def test_a_ledger_from_before_goes_on_as_it_began(tmp_path: Path) -> None:
    """Its terms have no offsets: it opens, repeats its answers, and gets none once callers were answered."""
    path = tmp_path / "ledger.sqlite"
    before = session_on(path, offsets=None)
    assert "offsets" not in before.ledger.stored_terms
    own = before.ask(queries(0, 4, asker=NOBODY), votes_of)
    mine = before.ask(queries(4, 8), votes_of)
    before.ledger.close()
    with Ledger(path, TERMS) as ledger:
        with pytest.raises(LedgerError, match="answered queries without offsets"):
            ledger.fix_offsets(OFFSETS)
        session = AggregatorSession(ledger, source=SeededSource(5), with_offsets=True)
        assert session.ask(queries(0, 8), votes_of) == own + mine
        assert session.offsets is None


def test_a_mechanism_without_them_gets_none(tmp_path: Path) -> None:
    class Plain(ConfidentCounts):
        takes_offsets = False

    with Ledger(tmp_path / "ledger.sqlite", TERMS) as ledger:
        ledger.terms = replace(TERMS, mechanism=Plain(**NO_CHECK))
        with pytest.raises(ValueError, match="a mechanism that takes offsets"):
            ledger.fix_offsets(OFFSETS)


def test_the_run_s_own_answers_are_named_again_behind_the_gate_and_the_run_repeats_them_as_they_were(
    tmp_path: Path,
) -> None:
    path, terms = tmp_path / "ledger.sqlite", replace(TERMS, gate=GateRule(max_disparity=0.2, min_count=2))

    def by_group(asked: Any) -> Any:
        # After the offsets: class 1 in group 0, class 0 in group 1.
        return np.array([[70, 30] if query.group == 0 else [95, 5] for query in asked])

    first = session_on(path, terms, offsets=None)
    own = first.ask(queries(0, 20, asker=NOBODY), by_group)
    assert {reply.label for reply in own if not isinstance(reply, OverBudget)} == {0}, "one class without offsets"
    first.ledger.fix_offsets(OFFSETS)
    served = AggregatorSession(first.ledger, source=SeededSource(5), with_offsets=True)
    again = served.ask(queries(0, 20), lambda _: pytest.fail("asked twice"))
    gate = DemographicParityGate(terms.gate, num_groups=2, num_classes=2)
    for query, old, new in zip(queries(0, 20), own, again, strict=True):
        assert not isinstance(old, OverBudget)
        assert not isinstance(new, OverBudget)
        assert old.counts is not None
        label = int(np.argmax(np.add(old.counts, OFFSETS.votes)))
        assert (new.label, new.verdict) == ((label, "answer") if gate.admit(query.group, label) else (None, "fairness"))
    assert [reply.verdict for reply in again].count("fairness") > 5, "the gate bounds something now"
    # Its counters are those of the answers with offsets, of new ones too.
    more = served.ask(queries(20, 30), by_group)
    assert [reply.label for reply in more if not isinstance(reply, OverBudget)] == [
        1 - query.group if gate.admit(query.group, 1 - query.group) else None for query in queries(20, 30)
    ]
    plain = AggregatorSession(first.ledger, source=SeededSource(5))
    assert plain.ask(queries(0, 20), lambda _: pytest.fail("asked twice")) == own
    first.ledger.close()


def known(asked: Any) -> list[int | None]:
    """A public rule: class 1 for every third record."""
    return [1 if int(query.record_id) % 3 == 0 else None for query in asked]


def test_what_public_things_decide_is_stored_and_free(tmp_path: Path) -> None:
    path, voted = tmp_path / "ledger.sqlite", []

    def vote(asked: Any) -> Any:
        voted.extend(query.record_id for query in asked)
        return votes_of(asked)

    session = session_on(path)
    session.limit("alice", CallerLimit(max_queries=8))
    before = epsilon_data_independent(TERMS, num_queries=8)
    replies = session.ask(queries(0, 12), vote, public=known)
    assert [reply.label for reply in replies[::3] if not isinstance(reply, OverBudget)] == [1] * 4
    assert sorted(map(int, voted)) == [i for i in range(12) if i % 3], "free ones reach no voter"
    assert (len(session.ledger.keys), session.ledger.charged_to["alice"]) == (8, 8)
    assert session.budget_status().epsilon_submitted == before
    # Neither the caller's limit nor a spent budget refuses them.
    assert [isinstance(reply, OverBudget) for reply in session.ask(queries(12, 15), vote, public=known)] == [
        False,
        True,
        True,
    ]
    session.ask(queries(50, 120, asker=Asker("bob")), vote)
    assert session.room(1) == 0
    assert session.ask(queries(150, 151), vote, public=known)[0] == replies[0]
    session.ledger.close()  # after a crash: stored, counted and free as before
    found = ledger_audit.verify(path)
    assert (found.reservations, found.without_votes) == (40, 6)
    log = [json.loads(line) for _, line in ledger_audit.lines_after(path, ledger_audit.START)]
    assert {line["event"] for line in log} == {"offsets", "free", "charge", "stored", "limit"}
    assert not any("outcomes" in line for line in log)
    again = session_on(path, offsets=None)
    assert again.ask(queries(0, 12), lambda _: pytest.fail("asked twice")) == replies
    again.ledger.close()


def test_free_answers_pass_the_gate_also_after_a_restart(tmp_path: Path) -> None:
    path, terms = tmp_path / "ledger.sqlite", replace(TERMS, gate=GateRule(max_disparity=0.1, min_count=5))
    session = session_on(path, terms)

    def label_of_group(asked: Any) -> list[int | None]:
        return [query.group for query in asked]

    session.ask(queries(0, 30), votes_of, public=label_of_group)
    session.ledger.close()
    session = session_on(path, terms, offsets=None)
    replies = [*session.ask(queries(0, 60), votes_of, public=label_of_group)]
    assert session.ledger.keys == []
    gate = DemographicParityGate(terms.gate, num_groups=2, num_classes=2)
    assert [reply.label is not None for reply in replies if not isinstance(reply, OverBudget)] == [
        gate.admit(i % 2, i % 2) for i in range(60)
    ]
    assert 0 < sum(reply.verdict == "free" for reply in replies if not isinstance(reply, OverBudget)) < 60
    session.ledger.close()


def test_a_caller_whose_token_ended_gets_no_free_answer(tmp_path: Path) -> None:
    session = session_on(tmp_path / "ledger.sqlite")
    refused = session.ask(
        queries(0, 3), votes_of, public=known, admit=lambda asked: [replace(query, askers=()) for query in asked]
    )
    assert refused == (OverBudget(),) * 3
    assert session.ledger.free == {}
    session.ledger.close()


def test_a_lead_that_stands_out_is_one_without_noise_19_times_in_20() -> None:
    needed = lead_needed(4.0)
    noise = np.random.default_rng(0).normal(0, 4, (400_000, 2))
    assert (needed + noise[:, 0] > noise[:, 1]).mean() == pytest.approx(0.95, abs=0.002)
    (chance,) = chance_to_win([[needed, 0.0]], np.array([0]), noise_stddev_votes=4.0)
    assert chance == pytest.approx(0.95, abs=1e-6)
    assert TERMS.mechanism.lead_needed == needed


def test_service_shell_and_page_show_the_lead_and_what_is_free(tmp_path: Path) -> None:
    def public(questions: Any) -> list[int | None]:
        return [0 if POOL.numbers[question.query.key] == 3 else None for question in questions]

    terms = replace(TERMS, num_classes=3)
    ledger = Ledger(tmp_path / "ledger.sqlite", terms)
    ledger.fix_offsets(Offsets(votes=(0, 60, 0), released="a digest"))
    session = AggregatorSession(ledger, source=SeededSource(5), with_offsets=True)

    def votes(questions: Any) -> Any:
        return np.array([[80, 20, 0] if POOL.numbers[q.query.key] % 2 else [50, 50, 0] for q in questions])

    backend = Backend(ledger=ledger, session=session, pool=POOL, count_votes=votes, public_labels=public)
    port = free_port()
    server = HttpServer(backend.app, ServiceSettings(port=port, answer_step_s=0.0))
    url = f"http://127.0.0.1:{port}"
    try:
        with AggregatorClient(url) as client:
            estimate = client.estimate(range(4))
            assert (estimate.new_queries, estimate.without_votes) == (3, 1)
            replies = client.ask(range(4)).replies
            counts = [ledger.outcome_of[reply.key].counts for reply in replies[:3]]
            for reply, counts_C in zip(replies, counts, strict=False):
                assert counts_C is not None
                second, first = sorted(np.add(counts_C, (0, 60, 0)))[-2:]
                assert (reply.lead, reply.stands_out) == (first - second, first - second >= lead_needed(4.0))
            assert replies[0].stands_out, "60 votes more for class 1"
            assert (replies[3].free, replies[3].label, replies[3].lead) == (True, 0, None)
            assert client.budget().queries_submitted == 3
            statement = client.statement()
            assert (statement.lead_needed, statement.offsets) == (lead_needed(4.0), [0, 60, 0])
            console = Console(file=io.StringIO(), width=200)
            shell = QueryShell(client, console)
            shell.onecmd("ask 0:4")
            shell.onecmd("estimate 3:6")
            printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{replies[0].lead} votes, stands out" in printed
        assert "no votes used: free" in printed
        assert "A lead of 9 of 100 votes stands out from the noise 19 times in 20." in printed
        about = httpx.get(f"{url}/v1/about").json()
        assert about["lead"].startswith("A lead of 9 of 100 votes (9.3\u00a0%) stands out 19 times in 20.")
        assert about["lead"].endswith("added to their noisy counts: zero +0, one +60, two +0.")
    finally:
        server.stop()


def test_a_reader_sees_the_offsets(tmp_path: Path) -> None:
    session_on(tmp_path / "ledger.sqlite").ledger.close()
    assert read_ledger(tmp_path / "ledger.sqlite").offsets == OFFSETS
