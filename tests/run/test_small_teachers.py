"""A run of FairPATE with its default teachers: two releases in one target, in ledger, odometer and statement."""

import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow

from aggregator.ledger import Asker, Ledger
from aggregator.ledger_audit import verify
from aggregator.service.actor import Backend
from aggregator.session import AggregatorSession, Question
from aggregator.store import LedgerError
from fairpate.data import Dataset, load_data
from fairpate.methods import pate
from fairpate.methods.defaults import resolved
from fairpate.methods.pate import FairPate
from fairpate.methods.voting import StandingVoters
from fairpate.releases.directory import (
    RunDirectory,
    RunDirectoryError,
    read_labels,
    read_release,
    read_statement,
    read_votes,
    save_release,
    write_labels,
)
from fairpate.releases.log import read_receipt
from fairpate.report.records import Guarantee
from fairpate.run.folder import as_trained, load_for
from fairpate.run.run import run_method
from fairpate.run.serve import open_backend, public_pool
from fairpate.terminal import Reporter
from student.student import load_student
from teachers.ensemble import collect_votes
from teachers.work import BlockPool
from tests.run.small_runs import QUIET, copied, open_terms, read_json

pytestmark = pytest.mark.usefixtures("light_runs")

KINDS = ["ConfidentGnmaxQueries", "VoteSums"]


def config_of(out: Any, *overrides: str, method: str = "fairpate") -> Any:
    usual = ("data.name=loans", "target.epsilon=1", "aggregator.num_queries=300", "ray.num_actors=0")
    return resolved([*usual, f"out={out}", *overrides], method)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run_method(config_of(tmp_path_factory.mktemp("small") / "run"), QUIET)


def test_both_releases_are_priced_together_everywhere(made: RunDirectory) -> None:
    statement, terms = read_statement(made), open_terms(made)
    assert [event["kind"] for event in statement.events] == KINDS
    assert (statement.unit, statement.epsilon) == ("person", pytest.approx(1, rel=2e-3))
    assert statement.epsilon <= 1
    receipt = read_receipt(made)
    assert receipt is not None
    assert [type(event).__name__ for event in receipt.events] == KINDS
    assert [type(event).__name__ for event in terms.beside] == KINDS[1:]
    # The queries alone cost less than what their ledger has submitted: the table is in its books.
    assert statement.queries is not None
    assert verify(made.ledger).epsilon_submitted == pytest.approx(statement.queries.epsilon_submitted)
    assert statement.queries.epsilon_submitted == pytest.approx(1, rel=2e-3)
    assert read_json(made.costs)["epsilon_data_independent"] == pytest.approx(1, rel=2e-3)
    assert read_release(made.thresholds)[0].events == terms.beside
    # The rule itself is published, on two classes of which one is twice as common.
    assert read_json(made.record)["accuracy"] > 0.64


def test_pages_name_the_voters_and_the_table_beside_their_answers(made: RunDirectory) -> None:
    asked, table = Guarantee.of(read_statement(made)).events
    assert asked == "300 queries to teachers, every one priced at its worst case"
    assert table.startswith("1 noisy table of weighted votes (noise ")
    page = made.public_report.read_text(encoding="utf-8")
    assert f"Released beside the answers: {table}." in page
    assert "noisy table" in page.partition("May be published")[0]


def test_a_repeated_run_draws_and_charges_nothing_more(made: RunDirectory, tmp_path: Any) -> None:
    before = {path: path.read_bytes() for path in (made.thresholds, made.labels, made.student, made.receipt)}
    made.student.unlink()
    run_method(config_of(made.root), QUIET)
    assert {path: path.read_bytes() for path in before} == before
    # Deleted after it was published, the table is not drawn a second time.
    lost = copied(made, tmp_path / "copy")
    lost.thresholds.unlink()
    with pytest.raises(RunDirectoryError, match=r"thresholds\.safetensors: missing, although .*statement\.json"):
        run_method(config_of(lost.root), QUIET)


@pytest.mark.slow
def test_a_crash_before_the_table_is_stored_charges_it_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    config, run = config_of(tmp_path / "run"), RunDirectory(root=tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(pate, "save_release", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_method(config, QUIET)
    first = read_receipt(run)
    assert first is not None
    assert not run.thresholds.exists()
    assert [type(event).__name__ for event in first.events] == KINDS, "charged with the first query"
    run_method(config, QUIET)
    assert read_receipt(run) == first
    assert run.thresholds.is_file()


@pytest.mark.parametrize(
    "method", quick_and_slow(["pate", "pate_s_pre", "pate_s_in", "teacher_votes"], [], ["teacher_votes"])
)
def test_the_other_methods_with_teachers_do_the_same(method: str, tmp_path: Any) -> None:
    queries = ["teacher_votes.num_queries=300"] if method == "teacher_votes" else []
    usual = ["data.name=loans", "target.epsilon=1", "ray.num_actors=0", f"out={tmp_path / method}"]
    queries = queries or ["aggregator.num_queries=300"]
    run = run_method(resolved([*usual, *queries], method), Reporter(quiet=True))
    statement = read_statement(run)
    assert [event["kind"] for event in statement.events][-1] == "VoteSums"
    assert len(statement.events) == 2
    assert statement.epsilon == pytest.approx(1, rel=2e-3)
    assert statement.epsilon <= 1


class VotesHere(FairPate):
    """FairPATE whose teachers vote in this process, also for a service, so that no cluster is needed."""

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        ensemble = self.train_teachers(dataset, run.teachers, BlockPool())
        return StandingVoters(
            ensemble=ensemble.digest,
            ask=lambda features, _: collect_votes(ensemble, torch.from_numpy(features)),
            collected=read_votes(run.votes),
        )


def backend_of(config: Any) -> Backend:
    return open_backend(config.out, VotesHere.model_construct(**dict(config)))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run per person that keeps a part of its target, with the number of queries that is chosen then."""
    config = resolved(
        [
            "data.name=loans",
            "target.epsilon=1",
            "aggregator.keep=.5",
            "ray.num_actors=0",
            f"out={tmp_path_factory.mktemp('kept') / 'run'}",
        ],
        "fairpate",
    )
    run_method(config, QUIET)
    return config


def of_test_records(config: Any, count: int) -> tuple[Dataset, list[Question]]:
    run = RunDirectory(root=config.out)
    dataset = as_trained(run, config, load_for(run, config.data))
    pool = public_pool(dataset)
    rows = zip(dataset.test.x[:count].tolist(), dataset.test.z[:count].tolist(), strict=True)
    return dataset, [pool.posted(x, pool.group_names[group]) for x, group in rows]


def ask_all(backend: Backend, questions: list[Question]) -> Any:
    of = {question.query.key: question for question in questions}
    return backend.session.ask(
        [question.query for question in questions],
        lambda asked: backend.count_votes([of[query.key] for query in asked]),
        public=lambda asked: backend.public_labels([of[query.key] for query in asked]),
    )


@pytest.mark.slow
def test_a_service_of_kept_queries_is_right_more_often_than_the_most_common_class(kept: Any, tmp_path: Any) -> None:
    copy = copied(RunDirectory(root=kept.out), tmp_path / "copy")
    config = kept.model_copy(update={"out": copy.root})
    dataset, questions = of_test_records(config, 320)
    backend = backend_of(config)
    ledger, own = backend.ledger, len(backend.ledger.keys)
    assert own == kept.aggregator.num_queries
    before = ledger.offsets
    assert before is not None
    replies = ask_all(backend, questions)
    charged, free = len(ledger.keys) - own, len(ledger.free)
    assert charged > 20
    assert free > 100
    assert charged + free == 320
    labelled = zip(replies, dataset.test.y[:320].tolist(), strict=True)
    right = [reply.label == label for reply, label in labelled if reply.label is not None]
    assert np.mean(right) > 0.74, "always the most common class: .67"
    # Without offsets the same noisy counts name one class nearly everywhere.
    counts_QC = np.array([r.counts for r in replies if r.counts is not None])
    assert np.bincount(counts_QC.argmax(axis=1), minlength=2).max() > 0.9 * len(counts_QC)
    # Free answers are those of the published model.
    student = load_student(copy.student)
    shown = {key: ledger.outcome_of[key].label for key in ledger.free if ledger.outcome_of[key].label is not None}
    for row, question in enumerate(questions):
        if question.query.key in shown:
            said = student.network(dataset.test.x[row : row + 1]).argmax()
            assert shown[question.query.key] == int(said)
    ledger.close()
    backend.close()
    # Opened again, as after a crash: the same offsets, the same replies, and nothing charged a second time.
    again = backend_of(config)
    assert (again.ledger.offsets, ask_all(again, questions)) == (before, replies)
    assert len(again.ledger.keys) == own + charged
    again.ledger.close()
    # The run repeats its own labels as it released them.
    labels = copy.labels.read_bytes()
    run_method(config, QUIET)
    assert copy.labels.read_bytes() == labels
    statement = read_statement(copy)
    assert statement.epsilon is not None
    assert statement.epsilon <= 1


def test_another_released_table_is_refused_once_offsets_follow_from_the_first(kept: Any, tmp_path: Any) -> None:
    copy = copied(RunDirectory(root=kept.out), tmp_path / "copy")
    config = kept.model_copy(update={"out": copy.root})
    backend_of(config).ledger.close()
    released, origin = read_release(copy.thresholds)
    table_KC = released.arrays["table_KC"] + 1
    save_release(copy.thresholds, dataclasses.replace(released, arrays={"table_KC": table_KC}), origin)
    with pytest.raises(LedgerError, match=r"offsets of this ledger were fixed .* released = \w+, not \w+; restore"):
        backend_of(config)
    copy.thresholds.unlink()
    with pytest.raises(RunDirectoryError, match=r"thresholds\.safetensors: missing, and a service of this run needs"):
        backend_of(config)
    whole = read_labels(RunDirectory(root=kept.out).labels)
    shutil.copy(RunDirectory(root=kept.out).thresholds, copy.thresholds)
    dataset, _ = of_test_records(config, 1)
    for labels, what in (
        (dataclasses.replace(whole, counts=None), "no counts"),
        (dataclasses.replace(whole, record_ids=("gone", *whole.record_ids[1:])), "records that are not in the public"),
    ):
        write_labels(labels, copy.labels)
        with pytest.raises(RunDirectoryError, match=rf"labels\.parquet: has {what}"):
            config.service_rule(dataset, copy)
    copy.labels.unlink()
    with pytest.raises(RunDirectoryError, match=r"labels\.parquet: cannot be read"):
        config.service_rule(dataset, copy)


def test_a_ledger_that_a_session_from_python_answered_from_is_served_without_offsets(kept: Any, tmp_path: Any) -> None:
    copy = copied(RunDirectory(root=kept.out), tmp_path / "copy")
    config = kept.model_copy(update={"out": copy.root})
    _, questions = of_test_records(config, 10)
    voters = VotesHere.model_construct(**dict(config))
    plan = config.plan(of_test_records(config, 1)[0])
    terms = plan.terms(voters.standing_voters(plan.dataset, copy).ensemble)
    with Ledger(copy.ledger, terms) as ledger:  # as a session from Python answers
        session = AggregatorSession(ledger, source=config.source)
        asked = [dataclasses.replace(question.query, askers=(Asker("alice"),)) for question in questions]
        half = kept.num_voters // 2
        before = session.ask(asked, lambda new: np.array([[kept.num_voters - half, half]] * len(new)))
    backend = backend_of(config)
    assert backend.session.offsets is None
    assert ask_all(backend, questions) == before
    assert list(backend.public_labels(questions)) == [None] * 10
    backend.ledger.close()


def test_how_many_queries_leave_room_follows_from_public_numbers() -> None:
    def queries_of(*overrides: str, method: str = "fairpate") -> int | None:
        chosen = resolved(["data.name=loans", "target.epsilon=1", *overrides], method).aggregator.num_queries
        assert chosen is None or isinstance(chosen, int)
        return chosen

    assert queries_of() is None
    assert queries_of("aggregator.keep=.5") == 200, "few voters: the fewest to which a rule is fitted"
    larger = queries_of("aggregator.keep=.5", "target.epsilon=3")
    assert larger is not None
    # A lead of 8 % stands out: noise of sqrt(2 Q) times that of one count, on 3,333 voters.
    config = resolved(["data.name=loans", "target.epsilon=3", "aggregator.keep=.5"], "fairpate")
    assert config.voting(load_data(config.data), 0).lead_of_one == pytest.approx(0.08, rel=0.1)
    assert queries_of("aggregator.keep=.5", "target.epsilon=3", "aggregator.num_queries=77") == 77
    assert queries_of("aggregator.keep=.5", "target.epsilon=20") is None, "more than the pool has"
    networks = queries_of("teachers.model.name=logistic")
    assert queries_of("aggregator.keep=.5", "teachers.model.name=logistic") == networks
