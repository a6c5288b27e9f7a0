"""A run of FairPATE with its default teachers: two releases in one target, in ledger, odometer and statement."""

from typing import Any

import pytest

from aggregator.audit import verify
from fairpate.methods import pate
from fairpate.methods.base import resolved
from fairpate.report.records import Guarantee
from fairpate.run import context
from fairpate.run.context import RunDirectory, RunDirectoryError
from fairpate.run.release_log import read_receipt, read_release
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from tests.run.small_runs import QUIET, copied, open_terms, read_json

KINDS = ["ConfidentGnmaxQueries", "VoteSums"]


def config_of(out: Any, *overrides: str, method: str = "fairpate") -> Any:
    usual = ("data.name=loans", "target.epsilon=1", "aggregator.num_queries=300", "ray.num_actors=0")
    return resolved([*usual, f"out={out}", *overrides], method)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run_method(config_of(tmp_path_factory.mktemp("small") / "run"), QUIET)


def test_both_releases_are_priced_together_everywhere(made: RunDirectory) -> None:
    statement, terms = context.read_statement(made), open_terms(made)
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
    asked, table = Guarantee.of(context.read_statement(made)).events
    assert asked == "300 queries to teachers, every one priced at its worst case"
    assert table.startswith("1 noisy table of weighted votes (noise stddev votes ")
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


@pytest.mark.parametrize("method", ["pate", "pate_s_pre", "pate_s_in", "teacher_votes"])
def test_the_other_methods_with_teachers_do_the_same(method: str, tmp_path: Any) -> None:
    queries = ["teacher_votes.num_queries=300", "student.fit.epochs=3"] if method == "teacher_votes" else []
    usual = ["data.name=loans", "target.epsilon=1", "ray.num_actors=0", f"out={tmp_path / method}"]
    queries = queries or ["aggregator.num_queries=300"]
    run = run_method(resolved([*usual, *queries], method), Reporter(quiet=True))
    statement = context.read_statement(run)
    assert [event["kind"] for event in statement.events][-1] == "VoteSums"
    assert len(statement.events) == 2
    assert statement.epsilon == pytest.approx(1, rel=2e-3)
    assert statement.epsilon <= 1
