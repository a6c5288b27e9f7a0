"""What a tracker gets of a run: what was published, and nothing else; with a real MLflow server where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from small_runs import run
from two_groups import two_groups

from fairpate import log_to_mlflow
from fairpate.estimators import FairClassifier
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_json
from fairpate.report.decision import Choice
from fairpate.run.bundle import OPTIONAL, REQUIRED, verify_bundle
from fairpate.run.publication import read_choice, read_claims, renew_report, state_choice, write_card
from fairpate.run.tracking import BUNDLE, FILES, entry_of

pytestmark = pytest.mark.usefixtures("light_runs")

FAST = ["student.fit.epochs=1", "target.epsilon=2", "data.name=color_digits", "evaluation.least_cell=1"]
HAS_CLIENT = importlib.util.find_spec("mlflow") is not None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(folder / "state"))
        done = run(configured({}, [*FAST, f"out={folder / 'run'}"], method="weighted_votes"))
    write_card(done.root, intended_use="A test.")
    return done


def test_the_accuracy_without_privacy_is_on_the_operators_page_and_in_no_public_file(made: RunDirectory) -> None:
    page, found = made.private_report.read_text(encoding="utf-8"), read_json(made.without_privacy)
    words = f"A logistic model without privacy that learned from {found['num_records']:,} private records: "
    assert words in page and "Do not publish" in page
    assert stat.S_IMODE(made.private.stat().st_mode) == 0o700
    for path in made.public.iterdir():
        content = path.read_bytes()
        assert b"logistic model" not in content and repr(found["accuracy"]).encode() not in content, path.name


def test_the_report_says_what_became_known_after_the_run(made: RunDirectory, tmp_path: Path) -> None:
    """The intended use, an audit, and what a choice by results costs; the rest of the page stays as it is."""
    copy = RunDirectory(root=tmp_path / "run")
    shutil.copytree(made.root, copy.root)
    before = copy.public_report.read_text(encoding="utf-8")
    # The card of the fixture states a use.
    assert "state its purpose" not in before and "run fairpate audit" in before
    renew_report(copy)
    assert copy.public_report.read_text(encoding="utf-8") == before
    choice = Choice(num_releases=3, epsilon=6.0, delta=3e-5)
    state_choice(copy, choice)
    after, operators = (path.read_text(encoding="utf-8") for path in (copy.public_report, copy.private_report))
    for page in (after, operators):
        assert choice.words.replace(" = ", "\u00a0=\u00a0") in page
    assert "A logistic model without privacy" in operators and "A logistic model without privacy" not in after
    assert after.replace(" ", "") != before.replace(" ", "")
    assert after[after.index("</header>") :] == before[before.index("</header>") :]
    assert read_claims(copy).choice == choice == read_choice(copy)
    state_choice(copy, None)
    assert copy.public_report.read_text(encoding="utf-8") == before
    assert not copy.comparison.exists()


def test_an_entry_holds_what_was_published_and_nothing_else(made: RunDirectory) -> None:
    (made.private / "model.onnx").write_bytes(b"of the operator")
    entry, statement, metrics = entry_of(made), read_json(made.statement), read_json(made.metrics)
    (made.private / "model.onnx").unlink()
    assert {path.parent for path in entry.files} == {made.public}
    # The list of what a bundle may hold is the list of what is public.
    assert set(FILES) - {"report.html"} <= {*REQUIRED, *OPTIONAL}
    assert {"statement.json", "metrics.json", "report.html", "card.html", "student.safetensors"} <= {
        path.name for path in entry.files
    }
    gap = metrics["gaps"]["dp_one_vs_rest"]
    expected = {"epsilon": statement["epsilon"], "accuracy": metrics["accuracy"], "coverage": metrics["coverage"]}
    expected |= {"demographic_parity": gap["value"], "demographic_parity_high": gap["high"]}
    assert expected.items() <= entry.metrics.items()
    assert all(np.isfinite(value) for value in entry.metrics.values())
    assert entry.parameters["target.epsilon"] == "2.0" and entry.parameters["method"] == "weighted_votes"
    assert (entry.experiment, entry.name) == ("color_digits", "weighted_votes on color_digits, seed 0")
    assert "May it be published? " in entry.tags["mlflow.note.content"]
    told = json.dumps([entry.parameters, entry.metrics, entry.tags])
    assert str(made.root) not in told and "without_privacy" not in told


def test_nothing_of_a_run_without_a_guarantee_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = run(configured({}, [*FAST, "noise=seeded", f"out={tmp_path / 'run'}"], method="weighted_votes"))
    with pytest.raises(RunDirectoryError, match="nothing of this run may be published"):
        entry_of(seeded)


@pytest.mark.skipif(HAS_CLIENT, reason="MLflow's client is installed")
def test_without_the_client_the_error_names_the_extra(made: RunDirectory, fairpate) -> None:
    code, _, errors = fairpate("log", made.root, "--mlflow", "http://127.0.0.1:1")
    assert code == 2
    assert "--mlflow: needs the extra mlflow" in errors and "pip install 'fairpate[mlflow]'" in errors


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server with a database and a folder of artifacts."""
    command = shutil.which("mlflow")
    if not HAS_CLIENT or command is None:
        pytest.skip("needs a client and a server: `pip install mlflow`, 800 MB")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "files")]
    # The server may be of an environment of its own.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(  # noqa: S603 - the server that is on the path
            [command, "server", *options, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"],
            env=environment,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.3)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
def test_a_server_has_the_entry_and_the_bundle_holds(
    made: RunDirectory, server: str, fairpate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    code, said, errors = fairpate("log", made.root, "--mlflow", server, "--json")
    assert code == 0, errors
    client = MlflowClient(tracking_uri=server)
    found = client.get_run(json.loads(said)["run_id"])
    entry = entry_of(made)
    assert found.info.status == "FINISHED" and found.info.run_name == entry.name
    assert found.data.metrics == pytest.approx(dict(entry.metrics))
    assert found.data.params == entry.parameters
    assert entry.tags.items() <= found.data.tags.items()
    names = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert names == {path.name for path in entry.files} | {BUNDLE}
    assert names <= {*FILES, BUNDLE}
    for path in entry.files:
        there = Path(client.download_artifacts(found.info.run_id, path.name, str(tmp_path)))
        assert there.read_bytes() == path.read_bytes(), path.name
    assert verify_bundle(Path(client.download_artifacts(found.info.run_id, BUNDLE, str(tmp_path)))).holds
    # Again, into an entry that is there: nothing is made anew.
    assert log_to_mlflow(made.root, server, run_id=found.info.run_id) == found.info.run_id
    assert len(client.search_runs([found.info.experiment_id])) == 1
    # An address where nobody answers, or that the client alone cannot use, is an error that names it.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for address in ("http://127.0.0.1:1", "sqlite:////proc/none/runs.db"):
        code, _, errors = fairpate("log", made.root, "--mlflow", address)
        assert (code, f"--mlflow: {address} takes no entry" in errors) == (2, True), errors


@pytest.mark.slow
def test_an_entry_that_was_begun_and_could_not_be_filled_has_failed(
    made: RunDirectory, server: str, fairpate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refused(*_: object) -> None:
        raise MlflowException("the disk is full")

    monkeypatch.setattr(MlflowClient, "log_artifact", refused)
    code, _, errors = fairpate("log", made.root, "--mlflow", server, "--experiment", "full")
    assert (code, "the disk is full" in errors) == (2, True), errors
    client = MlflowClient(tracking_uri=server)
    (found,) = client.search_runs([client.get_experiment_by_name("full").experiment_id])
    assert found.info.status == "FAILED"


@pytest.mark.slow
def test_an_estimator_logs_itself(server: str) -> None:
    from mlflow import MlflowClient

    X, Y, Z = two_groups(400, 0)
    model = FairClassifier("dp_sgd", epsilon=2.0, dp_sgd={"epochs": 1}).fit(X, Y, sensitive_features=Z)
    made = model.log_to_mlflow(X, Y, server, sensitive_features=Z, experiment="estimators", intended_use="A test.")
    client = MlflowClient(tracking_uri=server)
    found = client.get_run(made)
    assert found.data.metrics["epsilon"] == pytest.approx(model.statement().epsilon)
    assert client.get_experiment(found.info.experiment_id).name == "estimators"
    assert {"card.html", "statement.json", "student.safetensors"} <= {each.path for each in client.list_artifacts(made)}
