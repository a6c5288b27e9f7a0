"""What the page shows: counts, a forecast and advice that follow from the ledger, and live states that end in time."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from serving import ANALYST, OPERATOR, POOL, TERMS, ids, running, table_votes, tokens_of_both_roles

from aggregator.ledger import Ledger
from aggregator.mechanism import outcome
from aggregator.service.api import Facts, about_json, bodies_for, question_of
from aggregator.service.page import History, PointInTime, advice, forecast, span
from aggregator.session import PublicPool, VotesUnavailableError
from fairpate.data.columns import Feature, feature_codes
from fairpate.data.tables import form_of
from fairpate.privacy.accountant import rdp_data_dependent
from fairpate.types import LOCAL_ANALYST, GateRule

pytestmark = pytest.mark.usefixtures("light_runs")

AS_OPERATOR = {"Authorization": f"Bearer {OPERATOR}"}
HOUR_S, DAY_S = 3600.0, 86400.0


def points(*charges):
    """(seconds, charges) each."""
    return [PointInTime(at_s=at_s, charges=number, answered=[], refused=[]) for at_s, number in charges]


def test_a_history_counts_every_charge_once_whatever_is_open_meanwhile(path):
    verdicts = ["answer", "fairness", "confidence", "free", "answer", "answer"]
    history = History(num_groups=2, num_classes=3)
    with Ledger(path, TERMS) as ledger:
        for number, verdict in enumerate(verdicts):
            reserved = ledger.reserve([f"key-{number}"], [number % 2], table_votes([POOL.questions[number]]))
            history.look(ledger, len(ledger.keys), now_s=10.0 * number)
            assert len(history.open) == 1
            ledger.commit(reserved, [outcome(verdict=verdict, label=number % 3 if verdict == "answer" else None)])
        ledger.reserve(["lost"], [1], table_votes([POOL.questions[9]]))  # a crash leaves it open
        history.look(ledger, len(ledger.keys), now_s=100.0)
    assert len(history.open) == 1
    assert history.by_group() == [
        {"answer": 2, "confidence": 1, "fairness": 0, "free": 0, "open": 0, "answers": [1, 1, 0]},
        {"answer": 1, "confidence": 0, "fairness": 1, "free": 1, "open": 1, "answers": [0, 0, 1]},
    ]
    assert history.points[-1] == PointInTime(at_s=100.0, charges=7, answered=[2, 1], refused=[1, 2])


def test_what_a_run_asked_for_itself_is_no_pace_of_its_callers(path):
    with Ledger(path, TERMS) as ledger:
        for number in range(4):
            ledger.reserve([f"key-{number}"], [0], table_votes([POOL.questions[number]]))
        history = History(num_groups=2, num_classes=3)
        history.begin(ledger, 4, now_s=time.time())
    assert [point.charges for point in history.points] == [4]
    assert forecast(history.points, left=100, is_exact=True, now_s=time.time())[0] is None


def test_a_history_stays_short_and_keeps_its_ends(path):
    history = History(num_groups=2, num_classes=3)
    with Ledger(path, TERMS) as ledger:
        for second in range(3000):
            history.look(ledger, 0, now_s=float(second))
    assert len(history.points) <= 513
    assert (history.points[0].at_s, history.points[-1].at_s) == (0, 2999)
    gaps = [after.at_s - before.at_s for before, after in zip(history.points, history.points[1:], strict=False)]
    assert max(gaps) <= 2 * Counter(gaps).most_common(1)[0][0] + 1


def test_a_history_begins_before_a_restart_with_the_times_that_the_ledger_knows(path):
    with running(path, tokens=tokens_of_both_roles()) as url:
        for numbers in (range(10), range(10, 30)):
            httpx.post(f"{url}/v1/queries", json=ids(numbers), headers={"Authorization": f"Bearer {ANALYST}"})
            time.sleep(1.1)
    with running(path, tokens=tokens_of_both_roles()) as url:
        seen = httpx.get(f"{url}/v1/operator/overview", headers=AS_OPERATOR).json()
    charges = [point["charges"] for point in seen["points"]]
    assert charges[0] == 0
    assert 10 in charges
    assert charges[-1] == 30
    assert [point["at_s"] for point in seen["points"]] == sorted(point["at_s"] for point in seen["points"])
    assert seen["started_s"] > seen["points"][0]["at_s"]
    assert [caller["queries"] for caller in seen["callers"]] == [30]


def test_a_forecast_is_the_rest_over_the_pace():
    """120 queries in the last hour, 360 left: three hours. A quiet hour: the pace of the day, 240 a day."""
    now_s = DAY_S + HOUR_S
    lasts_s, words = forecast(points((0, 0), (DAY_S, 500), (now_s, 620)), left=360, is_exact=True, now_s=now_s)
    assert lasts_s == 3 * HOUR_S
    assert words == "At the pace of the last hour (120 queries), the 360 queries left last about 3 hours."
    lasts_s, words = forecast(points((0, 0), (HOUR_S, 240), (DAY_S, 240)), left=720, is_exact=True, now_s=DAY_S)
    assert lasts_s == 3 * DAY_S
    assert "last day (240 queries)" in words


def test_a_burst_at_the_start_counts_as_the_pace_of_ten_minutes():
    lasts_s, _ = forecast(points((0, 0), (2, 100)), left=600, is_exact=True, now_s=2.0)
    assert lasts_s == HOUR_S


@pytest.mark.parametrize(
    ("left", "is_exact", "lasts_s", "word"),
    [(5, True, None, "No new query"), (0, True, 0.0, "used up"), (5, False, None, "Votes decide")],
)
def test_a_forecast_without_a_pace_says_so(left, is_exact, lasts_s, word):
    found_s, words = forecast(points((0, 7), (9, 7)), left=left, is_exact=is_exact, now_s=9.0)
    assert found_s == lasts_s
    assert word in words


def test_advice_is_healthy_only_where_nothing_needs_anybody():
    fine = {"left": 500, "total": 1000, "lasts_s": None, "chain": "", "num_open": 0}
    assert [each.level for each in advice([], **fine)] == ["ok"]
    assert advice(["disk", "votes"], **fine)[0].words.startswith("The disk")
    assert [each.level for each in advice(["disk", "votes"], **fine)] == ["now", "now"]
    assert [each.level for each in advice([], **{**fine, "left": 99})] == ["soon"]
    assert [each.level for each in advice([], **{**fine, "left": 0})] == ["soon"]
    assert [each.level for each in advice([], **{**fine, "lasts_s": 3600.0})] == ["soon"]
    assert [each.level for each in advice([], **{**fine, "chain": "entry 3 was changed."})] == ["now"]
    assert [each.level for each in advice([], **{**fine, "num_open": 2})] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds"), (1, "1 second"), (90, "2 minutes"), (3600, "1 hour"), (400 * DAY_S, "1 year")],
)
def test_lengths_of_time_in_words(seconds, words):
    assert span(seconds) == words


def test_a_gate_that_is_off_is_said_to_be_off():
    def words(max_disparity: float, min_count: int) -> str:
        terms = replace(TERMS, gate=GateRule(max_disparity=max_disparity, min_count=min_count))
        return about_json(Facts(), POOL, terms, LOCAL_ANALYST)["gate"]

    assert words(float("inf"), 0).startswith("No fairness gate")
    assert "less than 0.1, after 5 answers for a group" in words(0.1, 5)


def test_stored_replies_are_a_file_and_nothing_is_asked_for_it(http):
    asked = http.post("/v1/queries", json=ids(range(12))).json()["replies"]
    keys = [*(reply["key"] for reply in asked), "0" * 64]
    table = pq.read_table(
        io.BytesIO(http.post("/v1/answers", json={"keys": keys, "format": "parquet"}).content)
    ).to_pylist()
    assert [row["status"] for row in table] == [*(reply["status"] for reply in asked), "not_stored"]
    assert [row["label"] for row in table[:12]] == [reply["label"] for reply in asked]
    assert [row["id"] for row in table] == [*range(12), None]
    names = [None if reply["label"] is None else POOL.label_names[reply["label"]] for reply in asked]
    assert [row["label_name"] for row in table[:12]] == names
    text = http.post("/v1/answers", json={"keys": keys, "format": "csv"})
    assert "attachment" in text.headers["content-disposition"]
    written = pyarrow.csv.read_csv(io.BytesIO(text.content)).to_pylist()
    assert [row["key"] for row in written] == keys
    assert http.get("/v1/budget").json()["queries_submitted"] == 12


def test_an_operator_s_overview_agrees_with_the_ledger(http):
    http.post("/v1/queries", json=ids(range(60)))
    seen = http.get("/v1/operator/overview", headers=AS_OPERATOR).json()
    entries = http.get("/v1/operator/ledger?limit=1000", headers=AS_OPERATOR).json()["entries"]
    for group in seen["groups"]:
        of_group = Counter(entry["verdict"] for entry in entries if entry["group"] == group["group"])
        assert {verdict: group[verdict] for verdict in of_group} == of_group
        labels = Counter(entry["label"] for entry in entries if entry["group"] == group["group"])
        assert group["answers"] == [labels[k] for k in range(3)]
    assert seen["queries_left"] == 10_000 - 60
    assert http.get("/v1/operator/overview").status_code == 403
    assert http.get("/v1/operator/events").status_code == 403
    assert http.get("/v1/operator/metrics").status_code == 403
    assert http.post("/v1/operator/verification").status_code == 403


def test_an_operator_sees_what_queries_cost_and_which_ones_cost_most(http):
    """Each beside its own price: the Renyi curve of one query at the order that is named, and of its worst case."""
    for count in (20, 60):
        http.post("/v1/queries", json=ids(range(count)))
        seen = _overview(http, count)["costs"]
        assert sum(seen["bins"]) == count
    entries = http.get("/v1/operator/ledger?limit=1000", headers=AS_OPERATOR).json()["entries"]
    orders, mechanism = [seen["order"]], TERMS.mechanism
    votes = table_votes([POOL.questions[number] for number in range(60)])
    charged = [entry["verdict"] != "free" for entry in entries]
    costs = [
        float(rdp_data_dependent([mechanism.realised(votes[i : i + 1])], orders)[0]) if charged[i] else 0.0
        for i in range(60)
    ]
    worst = float(rdp_data_dependent([mechanism.worst_case(1)], orders)[0])
    assert seen["bins"][-1] == sum(cost >= 0.95 * worst for cost in costs)
    assert [each["of_worst"] * worst for each in seen["dearest"]] == pytest.approx(sorted(costs)[:-9:-1])
    for each in seen["dearest"]:
        number = each["number"] - 1
        assert each["of_total"] == pytest.approx(costs[number] / sum(costs))
        assert (each["group"], each["verdict"]) == (entries[number]["group"], entries[number]["verdict"])
        assert each["votes"] == sorted(votes[number].tolist(), reverse=True)[:2]
        assert each["caller"] == "analyst-1"
    assert "of the queries cost" in seen["words"]


def _overview(http, charges):
    """As soon as it knows of so many charges: a view that was made a moment ago is shown again."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        seen = http.get("/v1/operator/overview", headers=AS_OPERATOR).json()
        if seen["budget"]["queries_submitted"] == charges:
            return seen
        time.sleep(0.1)
    pytest.fail(f"no overview of {charges} charges")


def test_an_operator_s_metrics_hold_outcomes_and_latencies_and_an_analyst_s_do_not(http):
    http.post("/v1/queries", json=ids(range(40)))
    private, public = (http.get(path, headers=AS_OPERATOR).text for path in ("/v1/operator/metrics", "/metrics"))
    for name in ("fairpate_operator_outcomes", "fairpate_request_seconds", "epsilon_data_dependent"):
        assert name in private
        assert name not in public
    for name in (
        "fairpate_queries_submitted ",
        "fairpate_queries_limit 10000.0",
        "fairpate_budget_closed 0.0",
        "fairpate_ready 1.0",
    ):
        assert name in private
        assert name in public


def test_the_chain_is_verified_on_demand_and_a_fault_is_advice(http, path):
    http.post("/v1/queries", json=ids(range(10)))
    told = http.post("/v1/operator/verification", headers=AS_OPERATOR).json()
    assert (told["entries"], told["fault"]) == (2, "")


def test_live_states_come_change_and_end_when_the_service_does(service):
    url = service()
    with httpx.stream("GET", f"{url}/v1/events", timeout=20) as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines)[6:])["budget"]["queries_submitted"] == 0
        httpx.post(f"{url}/v1/queries", json=ids(range(3)))
        assert json.loads(next(lines)[6:])["budget"]["queries_submitted"] == 3


def test_a_service_with_a_live_view_stops_at_once(path):
    with ExitStack() as stack, running(path) as url:
        lines = stack.enter_context(httpx.stream("GET", f"{url}/v1/events", timeout=20)).iter_lines()
        assert next(lines) == "event: state"
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5
    del lines


def test_live_views_are_few_and_beyond_them_one_asks_again_and_again(service):
    url = service()
    with ExitStack() as stack:
        views = [stack.enter_context(httpx.stream("GET", f"{url}/v1/events")).iter_lines() for _ in range(8)]
        assert {next(lines) for lines in views} == {"event: state"}
        refused = httpx.get(f"{url}/v1/events")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (503, "events")
        assert httpx.get(f"{url}/v1/state").status_code == 200
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:  # a place is free again once its stream has noticed
        with httpx.stream("GET", f"{url}/v1/events") as again:
            if again.status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail("no place became free")


def test_health_is_told_by_the_state(service):
    def gone(_):
        raise VotesUnavailableError("gone")

    url = service(count_votes=gone, health_interval_s=60)
    httpx.post(f"{url}/v1/queries", json=ids([0]))
    assert httpx.get(f"{url}/v1/state").json()["health"]["reasons"] == ["votes"]


def test_the_analyst_of_the_tests_is_told_apart(http):
    assert http.get("/v1/about").json()["caller"]["role"] == "analyst"
    assert http.get("/v1/about", headers=AS_OPERATOR).json()["caller"]["role"] == "operator"
    assert ANALYST not in http.get("/v1/about").text


def test_a_record_that_is_written_down_goes_where_every_record_went():
    form = form_of(feature_codes([("age", Feature(bounds=(0, 100)))]))
    pool = PublicPool(
        features=np.array([[0.5], [1.0]], dtype=np.float32),
        groups_N=np.array([0, 1]),
        record_ids=("a", "b"),
        group_names=("red", "green"),
        label_names=("no", "yes"),
        form=form,
        place=lambda features: 2 * features,
    )
    records = [{"record": {"age": 25.0}, "group": "red"}, {"record": {"age": 50.0}, "group": "green"}]
    young, old = (question_of(query, pool).query.key for query in bodies_for(pool)[0](queries=records).queries)
    assert young == pool.questions[0].query.key
    assert pool.numbers.get(old) == 1
    assert pool.numbers.get("0" * 64) is None


def test_a_code_that_is_sent_as_a_number_is_the_query_of_its_text():
    features = [
        ("level", Feature(categories=("1", "2"), unknown=("9",))),
        ("city", Feature(categories=("1", "2"), other=True)),
        ("age", Feature(bounds=(0, 100), missing="50", unknown=("?",))),
    ]
    form = form_of(feature_codes(features))
    width = sum(map(len, form.columns.values()))
    pool = replace(POOL, form=form, features=np.zeros((len(POOL), width), dtype=np.float32))
    of_body, group = bodies_for(pool)[0], POOL.group_names[0]

    def asked(**values):
        record = {"level": "1", "city": "1", "age": 25} | values
        body = json.dumps({"queries": [{"record": record, "group": group}]})
        (query,) = of_body.model_validate_json(body).queries
        return question_of(query, pool).features.tolist()

    assert asked() == [1, 0, 1, 0, 0, 0.25, 0]
    for value in ("2", 2, 2.0, " 2 "):
        assert asked(level=value, city=value) == [0, 1, 0, 1, 0, 0.25, 0]
    for level, city, age in ((9, 3, None), (None, "3", "?"), ("9", True, None)):
        assert asked(level=level, city=city, age=age) == [0, 0, 0, 0, 1, 0.5, 1]
    for wrong in (
        {"level": 3},
        {"level": [2]},
        {"city": [2]},
        {"city": {}},
        {"city": None},
        {"age": True},
        {"age": "3"},
    ):
        with pytest.raises(ValidationError):
            asked(**wrong)


def test_a_record_has_as_many_columns_as_its_form():
    form = form_of(feature_codes([(f"column {place}", Feature(bounds=(0, 1))) for place in range(100)]))
    queries, _ = bodies_for(replace(POOL, form=form))
    record = {f"column {place}": 0.5 for place in range(100)}
    (query,) = queries(queries=[{"record": record, "group": POOL.group_names[0]}]).queries
    assert len(query.record.model_dump()) == 100
    with pytest.raises(ValidationError, match="at most 100 fields, got 101"):
        queries(queries=[{"record": record | {"another": 1}, "group": POOL.group_names[0]}])


def test_a_record_of_the_pool_with_a_negative_zero_is_the_one_that_is_posted_with_a_zero():
    pool = PublicPool(
        features=np.array([[-0.0, 1.0]], dtype=np.float32),
        groups_N=np.array([0]),
        record_ids=("a",),
        group_names=("red",),
        label_names=("no", "yes"),
    )
    for zero in (0, -0.0):
        assert pool.posted([zero, 1.0], "red").query.key == pool.questions[0].query.key
