"""Votes of a consortium: one release, one price, for the unit that the operator declares; every fault is named."""

import itertools
import math
import re
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binom, norm
from serving import free_port, ids
from small_runs import open_terms, read_json

from aggregator.mechanism import ConfidentGnmax
from aggregator.service.actor import ServiceSettings
from aggregator.session import mechanism_within
from fairpate.http_server import HttpServer
from fairpate.methods.base import configured
from fairpate.methods.own_votes import VotesConfig, VotesFileError, read_votes_file
from fairpate.releases.directory import RunDirectory, read_labels
from fairpate.releases.odometer import Odometer
from fairpate.run.run import aggregate as aggregate_votes
from fairpate.run.serve import _run_with_votes, open_backend
from fairpate.terminal import Reporter
from student.student import load_student

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

SITES, RECORDS = 12, 40
CLASSES = ("no", "yes")


def table(changed=None):
    """Twelve sites that are right nine times in ten; ``changed``: a site that says the contrary everywhere."""
    rng = np.random.default_rng(0)
    age, size = rng.random((2, RECORDS)).round(3)
    truth = age > 0.5
    columns = {
        "record_id": [f"q{row}" for row in range(RECORDS)],
        "group": rng.choice(["F", "M"], RECORDS).tolist(),
        "age": age.tolist(),
        "size": size.tolist(),
    }
    for site in range(SITES):
        said = truth ^ (rng.random(RECORDS) > 0.9) ^ (site == changed)
        columns[f"site {site}"] = [CLASSES[int(yes)] for yes in said]
    return columns


def counted(columns):
    votes = [[columns[f"site {site}"][row] for site in range(SITES)] for row in range(RECORDS)]
    rest = {name: values for name, values in columns.items() if not name.startswith("site")}
    return rest | {name: [said.count(name) for said in votes] for name in CLASSES}


def written(folder, columns, name="votes.csv"):
    path = folder / name
    write = pq.write_table if path.suffix == ".parquet" else pyarrow.csv.write_csv
    write(pa.table(columns), path)
    return path


def config(path, **values):
    return VotesConfig(path=path, **{"unit": "hospital", "classes": CLASSES, "features": ("age", "size")} | values)


def aggregate(fairpate, path, out, *options, features=True):
    named = ("--features", "age,size") if features else ()
    return fairpate(
        "aggregate", path, "--unit", "hospital", "--classes", ",".join(CLASSES), *named, *options, "--out", out
    )


@pytest.fixture
def state(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))


def test_a_column_per_voter_and_counts_per_class_are_the_same_votes_in_both_formats(tmp_path):
    expected = np.array(
        [[row.count(name) for name in CLASSES] for row in zip(*list(table().values())[4:], strict=True)]
    )
    for name in ("votes.csv", "votes.parquet"):
        found = read_votes_file(config(written(tmp_path, table(), name)))
        counts = read_votes_file(
            config(written(tmp_path, counted(table()), f"counts-{name}"), num_voters=SITES, are_counts=True)
        )
        for each in (found, counts):
            np.testing.assert_array_equal(each.votes.votes_QC, expected)
            assert each.num_voters == SITES
            assert each.dataset.group_names == ("F", "M")
            np.testing.assert_allclose(each.dataset.public.x[:, 0], table()["age"], rtol=1e-6)


def broken(column, row, value):
    def change(columns):
        columns[column] = [value if r == row else v for r, v in enumerate(columns[column])]
        return columns

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken("record_id", 3, "q2"), "column record_id: 1 row has an id that another row has too"),
        (broken("record_id", 3, ""), "column record_id: 1 row has no id .the first is row 4"),
        (broken("record_id", 3, None), "column record_id: 1 row has no id .the first is row 4"),
        (broken("group", 5, ""), "column group: 1 row has no group"),
        (broken("group", 5, None), "column group: 1 row has no group"),
        (broken("site 2", 0, "maybe"), "column site 2: 1 row has no vote for one of no, yes"),
        (broken("site 2", 0, ""), "column site 2: 1 row has no vote"),
        (broken("age", 0, math.nan), "column age: 1 row has no finite number"),
        (broken("age", 0, 1e39), "column age: 1 row has no finite number of 32 bits"),
        (lambda columns: {name: v for name, v in columns.items() if name != "size"}, "no column size; the file has"),
        (lambda columns: dict(itertools.islice(columns.items(), 5)), "expected a column for each of 2 or more voters"),
        (lambda columns: {name: v[:0] for name, v in columns.items()}, "no row"),
        (lambda columns: columns | {"label": ["yes"] * RECORDS}, "column label holds true labels; leave it out"),
    ],
)
def test_every_fault_of_votes_names_column_and_rows(tmp_path, change, words):
    with pytest.raises(VotesFileError, match=words):
        read_votes_file(config(written(tmp_path, change(table()), "votes.parquet")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (broken("no", 0, 13), "column no, yes: 1 row has votes whose sum is not 12"),
        (broken("no", 0, -1), "column no: 1 row has no whole number of votes"),
        (broken("no", 0, 0.5), "column no: 1 row has no whole number of votes"),
        (broken("yes", 0, math.nan), "column yes: 1 row has no whole number of votes"),
        (lambda columns: columns | {"perhaps": [0] * RECORDS}, "unknown column perhaps; name it as class or feature"),
        (lambda columns: {name: v for name, v in columns.items() if name != "yes"}, "no column yes; the file has"),
    ],
)
def test_every_fault_of_counts_names_column_and_rows(tmp_path, change, words):
    path = written(tmp_path, change(counted(table())), "votes.parquet")
    with pytest.raises(VotesFileError, match=words):
        read_votes_file(config(path, num_voters=SITES, are_counts=True))


def test_all_faults_are_told_at_once(tmp_path, fairpate, state):
    columns = broken("group", 1, "")(broken("site 3", 2, "maybe")(broken("record_id", 3, "q2")(table())))
    code, _, errors = aggregate(fairpate, written(tmp_path, columns), tmp_path / "run", "--epsilon", "5")
    assert code == 1
    assert all(words in errors for words in ("column record_id", "column group", "column site 3"))
    assert "maybe" not in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --epsilon, or --mechanism"),
        (("--epsilon", "5", "--unit", "<b>"), "votes.unit"),
        (("--epsilon", "5", "--classes", "no"), "expected two or more classes"),
        (("--mechanism", "{threshold: 6}"), "aggregator.mechanism"),
        (("--epsilon", "-1"), "target.epsilon"),
    ],
)
def test_settings_that_cannot_be_are_refused_as_usage(tmp_path, fairpate, state, options, words):
    code, _, errors = aggregate(fairpate, written(tmp_path, table()), tmp_path / "run", *options)
    assert code == 2
    assert words in errors


def test_labels_alone_need_no_features_and_cost_once_however_often_they_are_asked(tmp_path, fairpate, state):
    columns = {name: values for name, values in table().items() if name not in ("age", "size")}
    path, run = written(tmp_path, columns), RunDirectory(root=tmp_path / "run")
    command = (path, run.root, "--epsilon", "8", "--name", "consortium")
    code, output, errors = aggregate(fairpate, *command, features=False)
    assert code == 0, errors
    assert "each hospital changes at most one vote" in output
    assert {each.name for each in run.public.iterdir()} == {"labels.parquet", "statement.json"}
    statement, labels = read_json(run.statement), run.labels.read_bytes()
    assert (statement["unit"], statement["relation"]) == ("hospital", "add or remove one")
    assert "The operator attests that each hospital touches one vote of a query at most" in statement["remarks"][0]
    assert statement["epsilon"] <= 8
    assert open_terms(run).unit == "hospital"
    run.labels.unlink()  # as after a crash between the ledger and the table
    assert aggregate(fairpate, *command, features=False)[0] == 0
    assert run.labels.read_bytes() == labels
    assert read_json(run.statement) == statement
    (total,) = Odometer().totals(delta=1e-5, data="consortium")
    assert (total.unit, total.releases) == ("hospital", 1)
    assert total.epsilon <= 8
    assert statement["queries"]["submitted"] == RECORDS
    assert f"all {len(read_labels(run.labels).labels)} are in it" in fairpate("ledger", "verify", run.root)[1]


def test_other_votes_are_another_ledger(tmp_path, fairpate, state):
    path = written(tmp_path, table())
    assert aggregate(fairpate, path, tmp_path / "run", "--epsilon", "8")[0] == 0
    written(tmp_path, table(changed=4))
    code, _, errors = aggregate(fairpate, path, tmp_path / "run", "--epsilon", "8")
    assert code == 1
    assert "created for other teachers" in errors


@pytest.mark.usefixtures("with_graphs")
def test_a_student_learns_and_every_page_says_what_is_attested(tmp_path, fairpate, state):
    path, run = written(tmp_path, table()), RunDirectory(root=tmp_path / "run")
    command = (
        path,
        run.root,
        "--epsilon",
        "40",
        "--set",
        "student.model.name=logistic",
        "--set",
        "student.fit.epochs=60",
    )
    code, _, errors = aggregate(fairpate, *command, "--set", "student.fit.learning_rate=0.1")
    assert code == 0, errors
    said = load_student(run.student).predict(read_votes_file(config(path)).dataset.public.x).labels
    assert (said == (np.array(table()["age"]) > 0.5)).mean() > 0.8
    assert run.graph.exists()
    assert fairpate("card", run.root)[0] == 0
    assert fairpate("report", run.root)[0] == 0
    assert "you attest that each hospital touches one vote" in run.private_report.read_text(encoding="utf-8")
    for page in (run.public_report, run.public / "card.html"):
        text = page.read_text(encoding="utf-8")
        assert "The operator attests that each hospital touches one vote of a query at most" in text
        assert "teachers trained on disjoint shards" not in " ".join(text.split())
    path.rename(moved := path.with_name("moved.csv"))
    code, _, errors = fairpate("serve", run.root)
    assert code == 2
    assert "whose file of votes is gone" in errors
    moved.rename(path)
    assert fairpate("ledger", "limit", "votes", "--epsilon", "10", "--unit", "hospital")[0] == 0
    code, _, errors = aggregate(fairpate, path, tmp_path / "another", "--epsilon", "40")
    assert code == 1
    assert "unit hospital" in errors


TESTED = 300


def held_out(folder, change=lambda columns: columns):
    """Test records, of which F are labelled by age and M the other way round."""
    rng = np.random.default_rng(1)
    age, sex = rng.random(TESTED).round(3), rng.choice(["F", "M"], TESTED)
    columns = {
        "record_id": [f"t{row}" for row in range(TESTED)],
        "group": sex.tolist(),
        "age": age.tolist(),
        "size": rng.random(TESTED).round(3).tolist(),
        "truth": [CLASSES[int(yes)] for yes in (age > 0.5) ^ (sex == "M")],
    }
    return written(folder, change(columns), "held_out.csv")


@pytest.mark.slow
def test_test_records_measure_the_student_when_they_are_named_and_cost_nothing(tmp_path, fairpate, state):
    path, run = written(tmp_path, table()), RunDirectory(root=tmp_path / "run")
    fit = ("student.model.name=logistic", "student.fit.epochs=60", "student.fit.learning_rate=0.1")
    # Fewer than ten women are predicted wrongly.
    fit = (*fit, "evaluation.least_cell=1")
    command = (path, run.root, "--epsilon", "40", *(word for value in fit for word in ("--set", value)))
    code, output, errors = aggregate(fairpate, *command)
    assert code == 0, errors
    assert "no test records" in output
    statement, model = run.statement.read_bytes(), run.student.read_bytes()

    tested = held_out(tmp_path)
    code, output, errors = aggregate(fairpate, *command, "--test", tested, "--label", "truth")
    assert code == 0, errors
    assert "unknown" not in output
    assert (run.statement.read_bytes(), run.student.read_bytes()) == (statement, model)
    columns = pyarrow.csv.read_csv(tested).to_pydict()
    x = torch.tensor([columns["age"], columns["size"]], dtype=torch.float32).T
    said = load_student(run.student).predict(x).labels
    right = np.array([CLASSES[label] for label in said]) == np.array(columns["truth"])
    women = np.array(columns["group"]) == "F"
    metrics = read_json(run.metrics)
    assert (metrics["num_records"], metrics["accuracy"]) == (TESTED, pytest.approx(right.mean()))
    assert metrics["gaps"]["accuracy_parity"]["value"] == pytest.approx(right[women].mean() - right[~women].mean())
    assert right[women].mean() > right[~women].mean() + 0.4

    # Commands that read the folder alone know of them too.
    assert fairpate("report", run.root)[0] == 0
    assert read_json(run.metrics) == metrics
    assert fairpate("card", run.root)[0] == 0
    for page in (run.public_report, run.public / "card.html"):
        assert "no test records" not in page.read_text(encoding="utf-8")
    (total,) = Odometer().totals(delta=1e-5, data="votes")
    assert total.releases == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            broken("truth", 2, "maybe"),
            "held_out.csv: column truth: 1 row has no label among no, yes",
        ),
        (broken("truth", 2, ""), "column truth: 1 row has no label"),
        (broken("group", 0, "X"), r"column group: 1 row has a group that no public record has \(F, M\)"),
        (broken("group", 0, ""), "column group: 1 row has no group"),
        (broken("record_id", 9, "q3"), "column record_id: 1 row has an id of the file of votes"),
        (broken("record_id", 9, "t3"), "column record_id: 1 row has an id that another row has too"),
        (broken("age", 0, math.inf), "column age: 1 row has no finite number"),
        (lambda columns: {name: v for name, v in columns.items() if name != "truth"}, "no column truth; the file has"),
        (lambda columns: {name: v[:0] for name, v in columns.items()}, "held_out.csv: no row"),
    ],
)
def test_every_fault_of_test_records_names_column_and_rows_and_shows_no_label(tmp_path, change, words):
    tested = held_out(tmp_path, change)
    with pytest.raises(VotesFileError, match=words) as raised:
        read_votes_file(config(written(tmp_path, table()), test=tested, label="truth"))
    assert "maybe" not in str(raised.value)


def test_faults_of_votes_and_of_test_records_are_told_together(tmp_path):
    votes, tested = (
        written(tmp_path, broken("site 3", 2, "maybe")(table())),
        held_out(tmp_path, broken("truth", 1, "")),
    )
    with pytest.raises(VotesFileError, match=r"votes.csv: column site 3: .*\n.*held_out.csv: column truth"):
        read_votes_file(config(votes, test=tested, label="truth"))


def test_test_records_without_features_are_refused(tmp_path, fairpate, state):
    path = written(tmp_path, {name: values for name, values in table().items() if name not in ("age", "size")})
    options = ("--epsilon", "8", "--test", held_out(tmp_path))
    code, _, errors = aggregate(fairpate, path, tmp_path / "run", *options, features=False)
    assert code == 2
    assert "votes" in errors and "test records" in errors and "features" in errors


def test_a_public_file_holds_no_digest_of_votes(tmp_path, fairpate, state):
    path, run = written(tmp_path, table()), RunDirectory(root=tmp_path / "run")
    assert aggregate(fairpate, path, run.root, "--epsilon", "8", "--set", "student.fit.epochs=1")[0] == 0
    ensemble = open_terms(run).ensemble
    assert len(ensemble) == 16
    for file in run.public.iterdir():
        assert ensemble.encode() not in file.read_bytes(), file


def answers(votes_QC, sigma):
    """P[answers] over all sequences of labels of two classes, with discrete Gaussian noise on each count, exactly."""
    values = np.arange(-60, 61)
    mass = np.exp(-(values**2) / (2 * sigma**2))
    gap = np.convolve(mass / mass.sum(), mass / mass.sum())  # of noise 1 - noise 0, from -120 to 120
    gaps = np.arange(-120, 121)
    one_Q = [gap[gaps > n - y].sum() + gap[gaps == n - y].sum() / 2 for n, y in votes_QC]
    return np.array(
        [
            math.prod(one if label else 1 - one for label, one in zip(labels, one_Q, strict=True))
            for labels in itertools.product((0, 1), repeat=len(one_Q))
        ]
    )


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_the_price_covers_a_hospital_that_says_the_contrary_everywhere(tmp_path, fairpate, state, epsilon):
    """Brute force over all sequences of answers: no set of them is likelier than e^eps times, plus delta."""
    neighbour = written(tmp_path, table(changed=7), "neighbour.csv")
    asked = ("--epsilon", str(epsilon), "--set", "aggregator.num_queries=8")
    columns = {name: values for name, values in table().items() if name not in ("age", "size")}
    code, _, errors = aggregate(fairpate, written(tmp_path, columns), tmp_path / "run", *asked, features=False)
    assert code == 0, errors
    statement = read_json(tmp_path / "run/public/statement.json")
    sigma = statement["events"][0]["noise_stddev_votes"]
    path = written(tmp_path, table())
    votes, other = (read_votes_file(config(each)).votes.votes_QC[:8] for each in (path, neighbour))
    assert (np.abs(votes - other).sum(axis=1) == 2).all()
    one, two = answers(votes.tolist(), sigma), answers(other.tolist(), sigma)
    assert one.sum() == pytest.approx(1)
    spent = max(np.maximum(p - math.exp(statement["epsilon"]) * q, 0).sum() for p, q in ((one, two), (two, one)))
    assert spent <= statement["delta"]
    looser = max(np.maximum(p - math.exp(0.2 * statement["epsilon"]) * q, 0).sum() for p, q in ((one, two), (two, one)))
    assert looser > statement["delta"]  # the bound is one that votes can nearly reach


def test_the_documented_shares_of_right_labels_are_those_of_the_noise_that_the_accountant_demands():
    """By the normal distribution: all of twelve sites are right nine times in ten."""
    text = (Path(__file__).parents[2] / "docs" / "your-votes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) % \| (\d+) % \| (\d+) % \|$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 3, 5, 10]
    one = ConfidentGnmax(threshold=-math.inf, threshold_stddev_votes=1, noise_stddev_votes=1)
    right = np.arange(SITES + 1)
    for epsilon, *shares in rows:
        for num_queries, share in zip((10, 40, 100), shares, strict=True):
            mechanism = mechanism_within(one, target_epsilon=float(epsilon), target_delta=1e-5, num_queries=num_queries)
            lead = (2 * right - SITES) / (mechanism.noise_stddev_votes * math.sqrt(2))
            expected = (binom.pmf(right, SITES, 0.9) * norm.cdf(lead)).sum()
            assert round(100 * expected) == int(share)


def test_a_large_delta_is_asked_about(tmp_path, fairpate, state):
    path = written(tmp_path, table())
    code, _, errors = aggregate(fairpate, path, tmp_path / "run", "--epsilon", "5", "--delta", "0.05")
    assert (code, "fewer than 20;" in errors, "give --yes" in errors) == (2, True, True), errors
    assert not Odometer().totals(delta=1e-5)
    code, _, errors = aggregate(fairpate, path, tmp_path / "run", "--epsilon", "5", "--delta", "0.05", "--yes")
    assert code == 0, errors
    assert "fewer than 20;" in read_json(tmp_path / "run" / "public" / "statement.json")["remarks"][0]


def test_the_method_by_its_name_takes_the_records_of_the_file_and_no_others(tmp_path, fairpate, state):
    path = written(tmp_path, {name: values for name, values in table().items() if name not in ("age", "size")})
    sets = [f"votes.path={path}", "votes.unit=hospital", 'votes.classes=["no", "yes"]', "votes.num_voters=12"]
    options = [part for setting in (*sets, "target.epsilon=8") for part in ("--set", setting)]
    code, _, errors = fairpate("run", "--method", "own_votes", *options, "--out", tmp_path / "run")
    assert code == 2
    assert "votes.features" in errors
    assert not (tmp_path / "run").exists()
    code, _, errors = fairpate("run", "--method", "own_votes", "--out", tmp_path / "other")
    assert code == 2
    assert "path, unit or classes missing" in errors


@pytest.mark.parametrize("features", [True, False])
def test_a_service_answers_what_is_in_the_file_and_nothing_else(state, tmp_path, features):
    """Labels of the run again for free, further records of the file charged, and no record that nobody voted on."""
    columns = {name: values for name, values in table().items() if features or name not in ("age", "size")}
    votes = {"path": str(written(tmp_path, columns)), "unit": "hospital", "classes": list(CLASSES)}
    votes["features"] = ["age", "size"] if features else []
    noise = "aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}"
    run = aggregate_votes(
        {"votes": votes, "out": str(tmp_path / "run")}, [noise, "aggregator.num_queries=25"], Reporter(quiet=True)
    )
    (found, config), released = _run_with_votes(run.root), read_labels(run.labels)
    backend = open_backend(found.root, config)
    server = HttpServer(backend.app, settings := ServiceSettings(port=free_port(), answer_step_s=0))
    try:
        with httpx.Client(base_url=settings.url) as http:
            asked = http.post("/v1/queries", json=ids(range(25))).json()["replies"]
            assert http.get("/v1/budget").json()["queries_submitted"] == 25
            labels = {name: reply["label"] for name, reply in zip(backend.pool.record_ids, asked, strict=False)}
            answered = {name: label for name, label in labels.items() if label is not None}
            assert answered == dict(zip(released.record_ids, released.labels.tolist(), strict=True))
            assert http.post("/v1/queries", json=ids(range(25, 30))).status_code == 200
            assert http.get("/v1/budget").json()["queries_submitted"] == 30
            posted = {"features": backend.pool.features[0].tolist(), "group": "F"}
            assert http.post("/v1/queries", json={"queries": [posted]}).status_code == 422
            assert http.get("/readyz").status_code == 200
            assert http.get("/v1/about").json()["takes_posted"] is False
    finally:
        server.stop()
        backend.close()


def test_groups_are_needed_for_a_gate_only(tmp_path, fairpate, state):
    columns = {name: values for name, values in table().items() if name != "group"}
    path = written(tmp_path, columns)
    code, _, errors = aggregate(fairpate, path, tmp_path / "run", "--epsilon", "5")
    assert code == 0, errors
    gate = ("--set", "aggregator.gate={max_disparity: 0.1, min_count: 5}")
    code, _, errors = aggregate(fairpate, path, tmp_path / "gated", "--epsilon", "5", *gate)
    assert (code, "has no column group, and a gate needs groups; name their column (--group)" in errors) == (2, True)
    code, _, errors = aggregate(fairpate, path, tmp_path / "named", "--epsilon", "5", "--group", "sex")
    assert (code, "no column sex; the file has" in errors) == (1, True)


def voters(count, records=400):
    """Voters of whom more choose `yes` the larger age - size is: votes of which a line says nearly all."""
    rng = np.random.default_rng(3)
    age, size = rng.random((2, records)).round(3)
    yes = rng.binomial(count, 1 / (1 + np.exp(-4 * (age - size))))
    columns = {"record_id": [f"q{row}" for row in range(records)], "age": age.tolist(), "size": size.tolist()}
    return columns | {"no": (count - yes).tolist(), "yes": yes.tolist()}


@pytest.mark.parametrize("release", ["counts", "label"])
def test_where_no_single_answer_stands_out_a_student_learns_from_all_of_them(tmp_path, state, release):
    path, run = written(tmp_path, voters(300)), RunDirectory(root=tmp_path / "run")
    votes = {"path": str(path), "num_voters": 300, "are_counts": True, "unit": "hospital", "classes": CLASSES}
    values = {"votes": votes | {"features": ("age", "size")}, "noise": "seeded", "out": str(run.root)}
    learning = {"model": "logistic", "fit": {"epochs": 30, "learning_rate": 0.05}}
    chosen = ["target.epsilon=0.5", f"aggregator.release={release}", f"student={learning}"]
    config_ = configured(values, chosen, method="own_votes")
    dataset = read_votes_file(config_.votes).dataset
    # 1.645 sqrt(2) times the noise on a count, over the number of voters.
    assert config_.voting(dataset, 0).lead_of_one > 1 > config_.voting(dataset, 0).lead_needed
    aggregate_votes(values, chosen, Reporter(quiet=True))
    right = np.array(voters(300)["age"]) > np.array(voters(300)["size"])
    labelled = read_labels(run.labels)
    assert 0.5 < (labelled.labels == right).mean() < 0.75
    assert (load_student(run.student).predict(dataset.public.x).labels == right).mean() > 0.88


@pytest.mark.parametrize(
    ("epsilon", "features", "is_fitted"),
    [(0.5, ("age", "size"), True), (5.0, ("age", "size"), False), (0.5, (), False)],
)
def test_a_rule_is_fitted_only_where_single_answers_are_lost_and_a_student_can_be_trained(
    tmp_path, epsilon, features, is_fitted
):
    columns = {name: values for name, values in voters(300).items() if name not in {"age", "size"} - set(features)}
    votes = {"path": str(written(tmp_path, columns)), "num_voters": 300, "are_counts": True, "features": features}
    values = {"votes": votes | {"unit": "hospital", "classes": CLASSES}, "target": {"epsilon": epsilon}}
    config_ = configured(values, method="own_votes")
    expected = config_.voting(read_votes_file(config_.votes).dataset, 0)
    noise = config_.plan(read_votes_file(config_.votes).dataset).mechanism.noise_stddev_votes
    assert expected.lead_of_one == pytest.approx(1.645 * math.sqrt(2) * noise / 300, rel=1e-3)
    assert expected.fitted_together == is_fitted
