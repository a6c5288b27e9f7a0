"""Which public records a run submits as queries: within its budget, each once, perhaps in rounds of admission."""

import dataclasses

import pyarrow.parquet as pq
import pytest
from small_runs import read_json, run

from aggregator.ledger import Ledger
from aggregator.session import AggregatorSession
from fairpate.config import ConfigError
from fairpate.data import load_data
from fairpate.methods.voting import choose_queries
from fairpate.privacy.accountant import ConfidentGnmaxQueries, epsilon
from fairpate.releases.directory import read_statement

pytestmark = pytest.mark.usefixtures("light_runs")


def test_more_queries_than_public_records_are_refused_before_anything_starts(small_config, tmp_path):
    with pytest.raises(ConfigError, match=r"num_queries: expected at most 300, the number of .* got 400"):
        run(small_config(tmp_path / "run", "aggregator.num_queries=400"))
    assert not (tmp_path / "run").exists()


def test_a_run_stops_at_the_query_that_crosses_its_budget(small_config, tmp_path):
    mechanism = small_config(tmp_path).aggregator.mechanism
    priced = [
        epsilon([ConfidentGnmaxQueries(count=n, **dataclasses.asdict(mechanism))], target_delta=1e-5).epsilon
        for n in (40, 41)
    ]
    limit = sum(priced) / 2
    folder = run(small_config(tmp_path / "run", f"aggregator.budget={{epsilon: {limit!r}}}"))
    statement = read_statement(folder)
    assert statement.queries.submitted == 40
    assert statement.epsilon == statement.queries.epsilon_submitted == priced[0] < limit


def test_a_budget_without_room_for_one_query_ends_the_run(small_config, tmp_path):
    with pytest.raises(ConfigError, match=r"aggregator\.budget: .* no room for one query"):
        run(small_config(tmp_path / "run", "aggregator.budget={epsilon: 0.01}"))


ADMISSION = ("aggregator.admission={rounds: 4}", "student.fit.epochs=8")


@pytest.fixture(scope="module")
def in_rounds(small_config, tmp_path_factory):
    return run(small_config(tmp_path_factory.mktemp("admission") / "run", *ADMISSION))


def test_admission_pays_for_fewer_rejections_and_gets_more_labels(small_config, tmp_path, in_rounds):
    found = {"rounds": read_statement(in_rounds), "in order": read_statement(run(small_config(tmp_path / "run")))}
    rounds, in_order = (found[name].queries for name in ("rounds", "in order"))
    assert rounds.rejected_fairness < in_order.rejected_fairness
    assert rounds.answered >= in_order.answered
    assert rounds.submitted <= in_order.submitted == 80
    assert rounds.answered / rounds.submitted > in_order.answered / in_order.submitted
    assert found["rounds"].epsilon == found["in order"].epsilon  # the cost of all 80
    assert found["in order"].epsilon == in_order.epsilon_submitted
    assert rounds.epsilon_submitted < found["rounds"].epsilon
    (remark,) = found["rounds"].remarks
    assert remark.startswith("Released labels may have decided")
    assert found["in order"].remarks == ()


def test_interrupted_between_rounds_the_same_queries_are_submitted_again(small_config, tmp_path, in_rounds):
    config = small_config(tmp_path / "second", *ADMISSION)
    release, done = AggregatorSession.ask, []

    def interrupted(session, queries, vote):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(queries)
        return release(session, queries, vote)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AggregatorSession, "ask", interrupted)
        run(config)
    second = run(config)
    assert pq.read_table(second.labels).equals(pq.read_table(in_rounds.labels))
    assert read_json(second.statement) == read_json(in_rounds.statement)


@pytest.mark.parametrize(("step", "times_paid"), [("reserve", 1), ("commit", 2)])
def test_interrupted_before_or_after_its_queries_are_paid_it_releases_the_same(
    finished, tmp_path, monkeypatch, step, times_paid
):
    """What was paid for and not yet answered is paid for again."""
    undisturbed, config = finished
    config = config.model_copy(update={"out": tmp_path / "run"})

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, step, interrupted)
        run(config)
    again = run(config)
    assert pq.read_table(again.labels).equals(pq.read_table(undisturbed.labels))
    stated, once = read_json(again.statement), read_json(undisturbed.statement)
    assert [event["count"] for event in stated["events"]] == [times_paid * event["count"] for event in once["events"]]
    assert (stated["epsilon"] > once["epsilon"]) == (times_paid > 1)


def test_admission_needs_to_know_how_many(small_config, tmp_path):
    with pytest.raises(ConfigError, match="expected num_queries with admission"):
        small_config(tmp_path, ADMISSION[0], "aggregator.num_queries=null")


def test_a_budget_leaks_with_its_flag_alone(small_config, tmp_path):
    for limit, kind in (
        ("{epsilon: 2}", "data_independent"),
        ("{epsilon: 2, accept_leak: true}", "data_dependent"),
        ("{max_queries: 2}", "query_count"),
    ):
        budget = small_config(tmp_path, f"aggregator.budget={limit}").aggregator.budget
        assert (budget.kind, budget.at(1e-5).kind) == (kind, kind)


def test_equal_records_are_one_query(small_config, tmp_path):
    config = small_config(tmp_path / "run", "aggregator.num_queries=3")
    dataset = load_data(config.data)
    public = dataset.public
    doubled = public.take([0, 0, 1, 2])
    doubled = dataclasses.replace(doubled, record_id=("a", "again", "b", "c"))
    chosen = choose_queries(dataclasses.replace(dataset, public=doubled), config.queries)
    assert chosen.record_id == ("a", "b", "c")
