"""What cannot work is refused before anything is trained, asked or written: budgets, teachers, places."""

import numpy as np
import pytest

from aggregator.ledger import LedgerTerms
from aggregator.mechanism import ConfidentGnmax
from aggregator.session import queries_that_fit
from fairpate.config import DataConfig
from fairpate.data import load_data
from fairpate.files import PlaceError, check_output
from fairpate.privacy.accountant import ConfidentGnmaxQueries, epsilon
from fairpate.run.run import run_method
from fairpate.types import GateRule, QueryBudget

pytestmark = pytest.mark.usefixtures("light_runs")

MECHANISM = ConfidentGnmax(threshold=20, threshold_stddev_votes=40, noise_stddev_votes=25)


TOO_LITTLE = ("--set", "aggregator.budget={epsilon: 0.1}")
TOO_MANY = ("--set", "teachers.num_teachers=2000", "--set", "data.embedding=null")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--method=fairpate", *TOO_LITTLE], ["aggregator.budget", "epsilon 0.1", "no room for one"]),
        (["run", "--set", "teachers.num_teachers=100000"], ["teachers.num_teachers", "100000", "lower it"]),
        (["run", "--method", "fairpate", *TOO_MANY], ["teachers.num_teachers", "2000"]),
        (["run", "--method", "pate", *TOO_MANY], ["teachers.num_teachers", "2000"]),
    ],
)
def test_what_public_facts_rule_out_is_refused_before_a_folder_is_made(fairpate, tmp_path, arguments, words):
    code, _, errors = fairpate(*arguments)
    assert code == 2
    assert all(word in errors for word in words), errors
    assert not (tmp_path / "runs").exists()


def test_an_address_without_a_cluster_is_refused_before_data_are_read(fairpate, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the session's own Ray
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:1")
    code, _, errors = fairpate("run", "--method", "fairpate")
    assert code == 1
    assert errors.startswith("error RAY_ADDRESS=127.0.0.2:1: nobody answers at 127.0.0.2:1 (Connection refused)")
    assert not (tmp_path / "runs").exists()


def test_the_message_about_teachers_does_not_tell_how_many_records_there_are(fairpate):
    size = len(load_data(DataConfig()).private)
    code, _, errors = fairpate("run", "--method", "fairpate", "--set", f"teachers.num_teachers={size + 1}")
    assert (code, "lower it" in errors) == (2, True), errors
    assert not any(number in errors.replace(str(size + 1), "") for number in (f"{size}", f"{size:,}"))


@pytest.mark.parametrize("place", ["/proc/run", "{file}/run", "{file}", "/dev/null/run", "x" * 300])
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--out"],
        ["run", "--method", "dp_sgd", "--out"],
        ["compare", "sweep.yaml", "--out"],
        ["run", "config.yaml"],
    ],
)
def test_an_impossible_place_is_refused_before_any_work(fairpate, tmp_path, monkeypatch, arguments, place):
    def nothing(*_, **__):
        raise AssertionError("work began")

    monkeypatch.setattr("fairpate.data.registry.entry_for", nothing)
    (tmp_path / "file").touch()
    place = place.format(file=tmp_path / "file")
    (tmp_path / "sweep.yaml").write_text("data_sets: [color_digits]\nmethods: [sgd]\n")
    (tmp_path / "config.yaml").write_text(f"out: {place}\n")
    code, output, errors = fairpate(*arguments, *([] if arguments[-1] == "config.yaml" else [place]))
    assert (code, output) == (2, "")
    assert place in errors
    assert "Errno" not in errors


def test_a_run_of_another_configuration_is_told_before_its_data_are_loaded(fairpate, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\n")
    monkeypatch.setitem(run_method.__kwdefaults__, "load", lambda _: pytest.fail("loaded"))
    code, _, errors = fairpate("run", "--out", "run")
    assert code == 2
    assert "seed: 7 -> 0" in errors


def test_places_that_can_be_written_pass_and_nothing_stays_behind(tmp_path):
    check_output(tmp_path / "new" / "deep", "--out")
    check_output(tmp_path / "answers.parquet", "--out", is_file=True, suffixes=(".parquet",))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/answers.parquet", "answers.txt", ".", "/dev/null"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(PlaceError, match="--out"):
        check_output(tmp_path / name, "--out", is_file=True, suffixes=(".parquet", ".csv") if "txt" in name else ())


def terms(budget):
    return LedgerTerms(
        mechanism=MECHANISM,
        gate=GateRule(max_disparity=0.1, min_count=1),
        budget=budget,
        num_teachers=100,
        num_classes=10,
        num_groups=2,
        noise="os_entropy",
        ensemble="any",
    )


@pytest.mark.parametrize("limit", [0.5, 1.0, 4.0])
def test_the_planned_queries_that_fit_are_those_whose_price_is_within_the_budget(limit):
    def price(count):
        return epsilon([ConfidentGnmaxQueries(count=count, **vars(MECHANISM))], target_delta=1e-5).epsilon

    expected = int(np.searchsorted([price(count) for count in range(1, 301)], limit, side="right"))
    budget = QueryBudget(kind="data_independent", delta=1e-5, epsilon=limit)
    assert queries_that_fit(terms(budget), 300) == expected
    assert queries_that_fit(terms(QueryBudget(kind="query_count", delta=1e-5, max_queries=7)), 300) == 7


def test_a_declaration_given_to_a_comparison_is_called_one(fairpate, tmp_path):
    (tmp_path / "clinic.yaml").write_text(
        "name: clinic\nfiles: {records: a.csv}\nlabel: {column: y}\n", encoding="utf-8"
    )
    code, _, said = fairpate("compare", "clinic.yaml")
    assert (code, "clinic.yaml: a declaration of records, not a comparison" in said) == (2, True), said
    code, _, said = fairpate("run", "clinic.yaml")
    assert (code, "give the file with --data clinic.yaml" in said) == (2, True), said
