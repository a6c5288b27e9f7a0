"""The card of a published student: what it says is what was published, and nothing private enters it."""

import json
import math
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fairpate import cli
from fairpate.methods.base import config_digest, configured
from fairpate.privacy.accountant import ConfidentGnmaxQueries, PoissonGaussians, PureReleases
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    AttributeQueries,
    NeighbourVotes,
    PoissonGaussianLaplaces,
    PredictionTables,
    SecretBatchAttributeGaussians,
    SmoothRelease,
    VoteSums,
    VoteTables,
    event_json,
)
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_json
from fairpate.report.records import described_event
from fairpate.run.folder import open_run_directory
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.run.statement import size_remarks
from fairpate.terminal import Reporter
from fairpate.types import TELLS_SIZE, FairRule

pytestmark = pytest.mark.usefixtures("light_runs")

SMALL: dict[str, Any] = {
    "target": {"accounting": "rdp"},
    "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
    "sgd": {"epochs": 1},
    "pf_ld": {"warmup_epochs": 1, "epochs": 2},
    "dp_sgd": {"epochs": 1, "batch_size": 200},
    "student": {"model": {"name": "mlp", "hidden": [16]}, "idp3": {"max_disparity": 0.05, "min_count": 10}},
}


def train(out: Path, method: str, *overrides: str) -> RunDirectory:
    return run_method(configured(SMALL, [f"out={out}", *overrides], method=method), Reporter(quiet=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(folder / "state"))  # what other tests released came not before it
        return train(folder / "trained", "dp_sgd", "target.epsilon=2")


@pytest.fixture(scope="module")
def asked(finished: Any) -> RunDirectory:
    """A run with votes and seeded noise."""
    run: RunDirectory = finished[0]
    return run


def contents(paths: tuple[Path, Path]) -> tuple[str, dict[str, Any]]:
    page, plain = paths
    return page.read_text(encoding="utf-8"), json.loads(plain.read_text(encoding="utf-8"))


class Words(HTMLParser):
    """The text of a page, and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.loaded: list[str | None] = []
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value != "data:,"]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def test_the_card_of_a_trained_method_says_what_its_statement_says(trained: RunDirectory) -> None:
    page, card = contents(write_card(trained.root, intended_use="teaching <b>", contact="me & you"))
    statement = json.loads(trained.statement.read_text())
    for field in ("unit", "relation", "epsilon", "delta", "accounting", "noise"):
        assert card["privacy"][field] == statement[field], field
    assert card["protects"] is True
    metrics = json.loads(trained.metrics.read_text())
    for field in ("accuracy", "coverage", "gaps", "num_records"):
        assert card["evaluation"][field] == metrics[field], field
    assert card["refusals"]["num_orders"] == len(metrics["orders"]["orders"])
    assert card["refusals"]["unrefused"]["coverage"] == 1
    assert card["data"]["name"] == "color_digits"
    assert card["use"] == {"intended": "teaching <b>", "out_of_scope": None, "contact": "me & you"}
    words = Words(page)
    gap = metrics["gaps"]["dp_one_vs_rest"]
    # Of a gap that resampling moves upwards only, the upper end.
    low = "up" if gap["low"] == gap["value"] else f"{gap['low']:.3f}"
    for text in (
        f"{low} to {gap['high']:.3f}",
        "teaching <b>",
        "me & you",
        "Not stated out of scope",
        "Gaussian sums over Poisson samples",
        "add or remove one",
        card["model"]["sha256"],
    ):
        assert text in words.text, text
    assert not words.loaded
    assert f"{math.ceil(100 * statement['epsilon']) / 100:.2f}" in words.text


def test_a_card_says_first_what_its_model_does_not_protect(tmp_path: Path) -> None:
    run = train(tmp_path / "pf_ld", "pf_ld", "target.epsilon=2", "data.options={colour_as_feature: false}")
    statement = json.loads(run.statement.read_text())
    run.statement.write_text(json.dumps(statement | {"remarks": ["Held <loosely>."]}))
    page, card = contents(write_card(run.root))
    bare = "features and labels, which the model is trained on as if they were public"
    assert card["privacy"]["not_protected"] == statement["not_protected"] == bare
    assert card["limits"][0] == f"Not protected: {bare}. The model may reveal them."
    assert card["limits"][1] == "Held <loosely>."
    assert card["publishable"][0].endswith(f"if these may be public too: {bare}.")
    text = Words(page).text
    assert f"Not protected {bare}" in text
    assert "colour_as_feature: false" in text
    assert "Held <loosely>." in text


def test_a_sampling_rate_makes_the_number_of_records_public(trained: RunDirectory, asked: RunDirectory) -> None:
    told, untold = (contents(write_card(run.root))[1] for run in (trained, asked))
    for card, tells in ((told, True), (untold, False)):
        assert any("number of private records" in limit for limit in card["limits"]) == tells
        assert any("but for the number" in item for item in card["not_publishable"]) == tells
        assert not any(limit.startswith("Not protected") for limit in card["limits"])
    assert json.loads(trained.statement.read_text())["remarks"] == [TELLS_SIZE["record"]]


@pytest.mark.parametrize(
    ("declared", "unit", "sampling_rate", "tells"),
    [
        (None, "record", 0.2, True),
        (500, "record", 0.2, False),
        (None, "record", 1.0, False),
        (None, "sensitive attribute", 0.2, False),
    ],
)
def test_a_statement_remarks_that_its_sampling_rate_tells_the_size(
    declared: int | None, unit: Any, sampling_rate: float, tells: bool
) -> None:
    config = configured({}, [f"dp_sgd.num_records={declared or 'null'}"], method="dp_sgd")
    event = PoissonGaussians(count=5, noise_multiplier=2.0, sampling_rate=sampling_rate)
    assert size_remarks(config, (event,), unit) == ((TELLS_SIZE[unit],) if tells else ())


GNMAX = {"count": 3, "threshold": 5.0, "threshold_stddev_votes": 2.0, "noise_stddev_votes": 1.0}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (PoissonGaussians(count=5, noise_multiplier=2.0, sampling_rate=0.1), "5 Gaussian sums over Poisson samples ("),
        (PoissonGaussians(count=1, noise_multiplier=30.0, sampling_rate=1.0), "1 Gaussian sum (noise multiplier 30)"),
        (
            PoissonGaussianLaplaces(count=5, gradient_noise_multiplier=2.0, laplace_scale=3.0, sampling_rate=0.1),
            "5 steps of a Gaussian and a Laplace sum over Poisson samples (",
        ),
        (
            AttributeGaussians(count=10, attribute_noise_multiplier=4.979),
            "10 attribute-level Gaussian sums (each: attribute noise multiplier 4.979)",
        ),
        (
            SecretBatchAttributeGaussians(count=2, attribute_noise_multiplier=4.0, sampling_rate=0.1),
            "2 attribute-level Gaussian sums over Poisson samples (",
        ),
        (PureReleases(count=1, epsilon=3.0), "1 release of pure differential privacy (epsilon 3)"),
        (ConfidentGnmaxQueries(**GNMAX), "3 noisy votes of teachers (each: threshold 5, "),
        (VoteTables(count=1, noise_stddev_votes=3.0), "1 noisy table of votes (noise stddev votes 3)"),
        # 1,251,792,994 / 134,217,728 = 9.327
        (
            VoteSums(count=5, noise_stddev_votes=1_251_792_994.0, norm=2**27, unit="person"),
            "5 noisy tables of weighted votes (each: noise 9.33 times the most that one person adds)",
        ),
        (
            PredictionTables(count=1, noise_stddev_records=2.5, weight=12),
            "1 noisy table of predictions (noise 2.5 times the most that one record adds)",
        ),
        (NeighbourVotes(count=2, noise_stddev_votes=3.0, sampling_rate=0.1), "2 noisy votes of nearest records over "),
        (AttributeQueries(**GNMAX), "3 noisy votes of teachers (each: threshold 5, "),
        (
            SmoothRelease(order=2.0, beta=0.1, noise_stddev=5.0),
            "1 release of the data-dependent privacy cost (order 2, ",
        ),
    ],
)
def test_an_event_is_named_by_what_was_done(event: Any, words: str) -> None:
    assert described_event(event_json(event)).startswith(words)


def test_an_event_of_another_package_brings_its_own_noun() -> None:
    """A card is written where the class of the event is not known."""
    event = {"kind": "NoisySums", "noun": "noisy sum of all records", "count": 2, "width": 8}
    assert described_event(event) == "2 noisy sums of all records (each: width 8)"
    assert described_event(event | {"width": 32667.4}) == "2 noisy sums of all records (each: width 32,667)"


def test_the_card_of_a_run_says_that_seeded_noise_protects_nobody(asked: RunDirectory) -> None:
    page, card = contents(write_card(asked.root))
    statement = json.loads(asked.statement.read_text())
    assert card["privacy"]["epsilon"] == statement["epsilon"]
    assert statement["noise"] == "seeded: not private"
    assert card["protects"] is False
    assert "This model is not private." in page
    assert card["publishable"] == ["Nothing: neither the model nor its predictions or metrics are protected."]
    assert not any(words in page for words in ("The privacy guarantee is for", "each is protected by itself"))
    assert card["model"]["method"] == "fairpate"
    assert f"{statement['queries']['submitted']} queries" in page


def test_nothing_private_enters_a_card(asked: RunDirectory, tmp_path: Path) -> None:
    """Whatever the private part holds, the card is the same to the byte; and so are unpublished settings."""
    root = tmp_path / "run"
    shutil.copytree(asked.root, root)
    before = [path.read_bytes() for path in write_card(root)]
    private = root / "private"
    for path in [path for path in private.rglob("*") if path.is_file()]:
        path.write_text("PLANTED")
    (private / "record.json").write_text(json.dumps({"epsilon": 0.0, "method": "PLANTED"}))
    (private / "metrics.json").write_text(json.dumps({"accuracy": "PLANTED"}))
    # The operator's report, which is renewed with the card, reads this one.
    (private / "without_privacy.json").write_text(json.dumps({"accuracy": 0.123, "num_records": 7}))
    config = root / "config.yaml"
    config.write_text(config.read_text().replace("out: ", "out: PLANTED-"))
    planted = write_card(root)
    assert [path.read_bytes() for path in planted] == before
    assert not any(b"PLANTED" in path.read_bytes() for path in planted)
    assert all(str(asked.root).encode() not in text for text in before)
    shutil.rmtree(private)
    assert [path.read_bytes() for path in write_card(root)] == before


def test_what_was_not_published_gets_no_card(tmp_path: Path) -> None:
    run = train(tmp_path / "sgd", "sgd", "student.idp3=null")
    with pytest.raises(RunDirectoryError, match="publishes nothing"):
        write_card(run.root)
    assert not (run.root / "public").exists()


def test_the_command_writes_beside_the_student(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fairpate", "card", str(trained.root), "--out-of-scope", "decisions on people"])
    cli.main()
    assert capsys.readouterr().out.split() == [str(trained.public / name) for name in ("card.html", "card.json")]
    assert "decisions on people" in (trained.public / "card.html").read_text()
    monkeypatch.setattr(sys, "argv", ["fairpate", "card", "nowhere"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "nowhere" in capsys.readouterr().err


def test_what_is_fair_is_asked_once_and_is_the_same_on_every_page(fairpate: Any, finished: Any, tmp_path: Path) -> None:
    """Another rule is kept with the run and judges the same numbers; it is no other configuration."""
    made, config = finished
    root = shutil.copytree(made.root, tmp_path / "run")
    before = read_json(made.metrics)
    assert before["fair_at"] == {"notion": "demographic_parity", "limit": 0.1}
    code, _, errors = fairpate("report", root, "--fair-at", "equalized_odds=0.45")
    assert code == 0, errors
    rule = {"notion": "equalized_odds", "limit": 0.45}
    run, again = open_run_directory(root)
    metrics = read_json(run.metrics)
    assert metrics["fair_at"] == rule
    assert {**metrics, "fair_at": 0, "without_refusals": 0} == {**before, "fair_at": 0, "without_refusals": 0}
    assert again.evaluation.rule == FairRule(notion="equalized_odds", limit=0.45)
    assert config_digest(again) == config_digest(config)
    words = "equalized-odds gap of at most 0.45"
    page, card = write_card(root)
    assert read_json(card)["evaluation"]["fair_at"] == rule
    for path in (run.public_report, run.private_report, page):
        assert words in path.read_text(encoding="utf-8"), path
    code, output, _ = fairpate("report", root)
    assert code == 0
    assert words in " ".join(output.split())
    code, _, errors = fairpate("report", root, "--fair-at", "much")
    assert (code, "--fair-at: expected a limit above 0 and at most 1" in errors) == (2, True), errors
