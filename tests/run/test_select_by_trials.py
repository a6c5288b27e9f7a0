"""A choice among trainings: charged before it begins, by a secret number of trials that no crash redraws."""

from __future__ import annotations

import json
import logging
import shutil
import stat
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import BaseModel
from small_runs import QUIET, read_json
from test_select import DECLARATION, candidate, clinic, parts_counted  # noqa: F401 - a fixture

from fairpate.config import ConfigError, PrivacyTarget
from fairpate.methods.base import configured
from fairpate.privacy import accountant
from fairpate.privacy.accountant import PureReleases
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.mechanism_events import SecretTrials, event_from, flat
from fairpate.releases.directory import RunDirectory, RunFolderError, read_statement
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.run import choice
from fairpate.run.bundle import verify_bundle, write_bundle
from fairpate.run.choice import TrialsError, plan_trials, select_by_trials
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("own_state"),
]

assert DECLARATION


@pytest.fixture
def configs(clinic: Path) -> list[Any]:  # noqa: F811
    """The second and the third learn; the last by another method."""
    data = {"name": "clinic", "declaration": str(clinic), "split": {"validation_share": 0.3}}
    sgd = {"data": data, "evaluation": {"metrics": "private"}, "student": {"model": {"name": "logistic"}}}
    steps = {"dp_sgd": {"epochs": 20, "batch_size": 800, "learning_rate": 0.5, "num_records": 800}}
    learns = ("student.fit.epochs=30", "student.fit.learning_rate=0.05")
    return [candidate(clinic), candidate(clinic, *learns), configured(sgd | steps, [], method="dp_sgd")]


def select(configs: list[Any], out: Path, **other: Any) -> RunDirectory:
    return select_by_trials(configs, **{"epsilon": 2.0, "expected_trials": 4.0, "out": out, "reporter": QUIET} | other)


def fixed(monkeypatch: pytest.MonkeyPatch, *drawn: int) -> None:
    """Let trials draw these settings."""
    left = list(drawn)
    monkeypatch.setattr(SecretTrials, "draw", lambda *_: len(drawn))
    monkeypatch.setattr(OsEntropy, "randbelow", _first_few(left, OsEntropy.randbelow))


def _first_few(left: list[int], otherwise: Any) -> Any:
    return lambda self, below: left.pop(0) if left and below == 3 else otherwise(self, below)


def test_trials_their_scores_and_metrics_cost_what_was_asked_for(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed(monkeypatch, 0, 1, 2, 0)
    run = select(configs, tmp_path)
    statement = read_statement(run)
    assert statement.tuning_accounted
    assert statement.epsilon is not None
    assert 1.98 < statement.epsilon <= 2.0
    (trainings,) = map(event_from, statement.events)
    (scores,) = map(event_from, statement.part_events["validation"])
    assert isinstance(trainings, SecretTrials)
    assert isinstance(scores, SecretTrials)
    assert {type(event).__name__ for event in flat([trainings])} == {"VoteSums", "PoissonGaussians"}
    for event in (trainings, scores):
        assert 1.98 < accountant.epsilon([event], target_delta=1e-5).epsilon <= 2.0
        assert (event.expected_trials, event.eta) == (4, 0)
    # A row for each part, with the price of all trials; and none of a single trial.
    assert parts_counted() == ["private", "test", "validation"]
    (total,) = Odometer().totals(delta=1e-5)
    assert 1.98 < total.epsilon <= 2.0
    # The first does not learn; the record is that of a training at the price of one trial.
    config = read_json(run.record)["config"]
    assert config["target"]["epsilon"] < 1.2
    assert any("best of a secret random number of trials" in remark for remark in statement.remarks)
    assert "The choice of settings is part of ε" in run.public_report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_bundle_of_it_is_verified_by_the_second_accountant(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed(monkeypatch, 1, 2)
    bundle, _ = write_bundle(select(configs, tmp_path).root)
    verdict = verify_bundle(bundle)
    assert verdict.holds, verdict.differs
    assert verdict.recomputed == pytest.approx(2.0, rel=1e-2)
    assert "the settings are those that were chosen among 3" in verdict.checked
    folder = tmp_path / "open"
    zipfile.ZipFile(bundle).extractall(folder)
    statement = read_json(folder / "statement.json")
    statement["events"][0]["expected_trials"] = 2.0
    (folder / "statement.json").write_text(json.dumps(statement))
    assert any("not of the same secret number" in each for each in verify_bundle(folder).differs)


def test_nothing_that_is_shown_or_kept_tells_how_many_trials_there_were(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, trained = choice.trained_student, []

    def counted(*given: Any) -> Any:
        trained.append(given)
        return original(*given)

    def traces(out: Path, *drawn: int) -> tuple[list[str], Any, list[str]]:
        with monkeypatch.context() as patched:
            patched.setenv("FAIRPATE_STATE", str(out / "state"))
            patched.setattr(choice, "trained_student", counted)
            fixed(patched, *drawn)
            trained.clear()
            select(configs, out / "out", reporter=Reporter())
            assert len(trained) == len(drawn)
            files = sorted(str(path.relative_to(out)) for path in (out / "out").rglob("*") if path.is_file())
            shown = [line.split()[0] for line in "".join(capsys.readouterr()).splitlines() if line.strip()]
            return files, shown, parts_counted()

    assert traces(tmp_path / "a", 1) == traces(tmp_path / "b", 0, 1, 0, 0, 1)


def test_a_crash_neither_redraws_the_number_nor_drops_a_trial_and_charges_nothing_twice(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, done = choice.trained_student, []

    def killed_at(count: int) -> Any:
        def train(config: Any, *given: Any) -> Any:
            if len(done) == count:
                raise KeyboardInterrupt
            done.append(config.student.fit.epochs if config.method == "weighted_votes" else "sgd")
            return original(config, *given)

        return train

    out, state = tmp_path / "out", tmp_path / "out/trials/state.json"
    with monkeypatch.context() as patched:
        fixed(patched, 0, 2, 1, 2)
        patched.setattr(choice, "trained_student", killed_at(2))
        with pytest.raises(KeyboardInterrupt):
            select(configs, out)
    kept = state.read_bytes()
    assert read_json(state)["drawn"] == [0, 2, 1, 2]
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    charged = parts_counted()
    assert charged == ["private", "validation"]
    # Nothing of the trials is where anything is published.
    assert not (out / "model").exists()
    with monkeypatch.context() as patched:
        patched.setattr(SecretTrials, "draw", lambda *_: pytest.fail("drawn again"))
        patched.setattr(choice, "trained_student", killed_at(3))
        with pytest.raises(KeyboardInterrupt):
            select(configs, out)
        assert state.read_bytes() == kept
        patched.setattr(choice, "trained_student", killed_at(99))
        # Killed once more when the winner is published.
        patched.setattr(choice, "publish_trained", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            select(configs, out)
    assert done == [0, "sgd", 30, "sgd"]
    monkeypatch.setattr(choice, "trained_student", lambda *_: pytest.fail("trained again"))
    run = select(configs, out)
    assert parts_counted() == [charged[0], "test", charged[1]]
    assert not (out / "trials").exists()
    before = {path.name: path.read_bytes() for path in run.public.iterdir()}
    again = select(configs, out)
    assert {path.name: path.read_bytes() for path in again.public.iterdir()} == before
    assert len(parts_counted()) == 3
    with pytest.raises(RunFolderError, match="other settings"):
        select(configs[:2], out)
    # A report of it makes nothing anew.
    run_method(configured(run.config).model_copy(update={"out": run.root}), QUIET)
    assert len(parts_counted()) == 3


def test_a_copy_of_a_folder_whose_trials_were_drawn_pays_for_its_own(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = choice.trained_student
    fixed(monkeypatch, 1)
    monkeypatch.setattr(choice, "trained_student", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        select(configs, tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    for attempt in range(2):  # the copy is charged before it trains, and once
        with pytest.raises(KeyboardInterrupt):
            select(configs, tmp_path / "copy")
        assert parts_counted() == ["private"] * 2 + ["validation"] * 2, attempt
    monkeypatch.setattr(choice, "trained_student", original)
    for folder in ("copy", "out"):
        select(configs, tmp_path / folder)
    assert parts_counted() == ["private"] * 2 + ["test"] * 2 + ["validation"] * 2


def test_nothing_is_heard_of_a_trial_that_warns_logs_or_fails(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = choice.trained_student

    def train(config: Any, *given: Any) -> Any:
        warnings.warn("of a trial", RuntimeWarning, stacklevel=1)
        logging.getLogger("fairpate.nn.per_example").warning("of a trial")
        if config.method == "dp_sgd":
            raise FloatingPointError("of a trial")
        return original(config, *given)

    monkeypatch.setattr(choice, "trained_student", train)
    fixed(monkeypatch, 2, 1)
    with warnings.catch_warnings(record=True) as heard:
        assert read_json(select(configs, tmp_path / "out").record)["method"] == "weighted_votes"
    assert not [each for each in heard if "of a trial" in str(each.message)]
    assert not [each for each in caplog.messages if "of a trial" in each]


def test_the_charge_is_there_before_the_first_trial_and_a_crash_before_the_draw_charges_once(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(SecretTrials, "draw", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            select(configs, tmp_path / "out")
    assert parts_counted() == ["private", "validation"]
    fixed(monkeypatch, 1)
    select(configs, tmp_path / "out")
    assert parts_counted() == ["private", "test", "validation"]


def test_a_limit_refuses_all_of_it_before_anything_is_trained_or_charged(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "trained_student", lambda *_: pytest.fail("trained"))
    Odometer().set_limit("clinic", "record", epsilon=1.5, delta=1e-5)
    with pytest.raises(LimitReachedError):
        select(configs, tmp_path / "out")
    assert parts_counted() == []


def test_a_trial_that_fails_is_the_worst_and_all_failing_is_an_error_that_was_charged(
    configs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = choice.trained_student

    def train(config: Any, *given: Any) -> Any:
        if config.method == "dp_sgd":
            raise ValueError("the noise was too large")
        return original(config, *given)

    monkeypatch.setattr(choice, "trained_student", train)
    fixed(monkeypatch, 2, 1, 2)
    assert read_json(select(configs, tmp_path / "a").record)["method"] == "weighted_votes"
    fixed(monkeypatch, 2, 2)
    with pytest.raises(TrialsError, match="the privacy cost was charged"):
        select(configs, tmp_path / "b")


def test_scores_have_the_noise_that_is_charged() -> None:
    """The standard deviation of 400 draws: its own is 1 / sqrt(2 n) of it. One in ten million is farther than 5.5."""

    class Pure(BaseModel):
        target: PrivacyTarget = PrivacyTarget()

        def planned_events(self, _: Any) -> tuple[PureReleases]:
            epsilon = self.target.epsilon
            return (PureReleases(count=1, epsilon=epsilon, unit="record", relation="add or remove one"),)

    plan = plan_trials([(Pure(), None)], epsilon=1.0, delta=1e-5, expected_trials=5.0)
    drawn = np.array([plan.with_noise(7 * choice.WEIGHT, OsEntropy()) for _ in range(400)]) / choice.WEIGHT
    assert abs((drawn - 7).std() / plan.noise_stddev_records - 1) < 5.5 / np.sqrt(800)
    assert abs(drawn.mean() - 7) < 5.5 * plan.noise_stddev_records / np.sqrt(400)
    assert 0.4 < plan.epsilon < 1


def test_settings_that_cannot_be_charged_together_are_refused_before_anything_is_charged(
    configs: list[Any],
    clinic: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    seeded = [candidate(clinic, "noise=seeded"), candidate(clinic, "noise=seeded", "student.fit.epochs=3")]
    for given, words in (
        (configs[:1], "at least two settings"),
        (
            [*configs, candidate(clinic, "target.delta=1e-6")],
            r"target\.delta: 1e-05 -> 1e-06; .* all trials are charged",
        ),
        ([*configs, candidate(clinic, "data.seed=3")], r"data\.seed"),
        (seeded, "needs os_entropy"),
        ([configured({}, method="dp_sgd"), configured({"seed": 1}, method="dp_sgd")], r"data\.split"),
        ([*configs, configured(_data(clinic), [], method="pf_ld")], "cost of pf_ld is not known before"),
    ):
        with pytest.raises(ConfigError, match=words):
            select(given, tmp_path / "out")
    assert parts_counted() == []


def _data(clinic: Path) -> dict[str, Any]:  # noqa: F811
    data = {"name": "clinic", "declaration": str(clinic), "split": {"validation_share": 0.3}}
    return {"data": data, "evaluation": {"metrics": "private"}}


def test_the_command_takes_trials(clinic: Path, tmp_path: Path, fairpate: Any) -> None:  # noqa: F811
    settings = {"student.model.name": "logistic", "evaluation.metrics": "private"}
    settings |= {"weighted_votes.embedding.num_components": 5}
    sweep = {
        "data_sets": {"clinic": {"settings": {"data": _data(clinic)["data"]}}},
        "methods": ["weighted_votes"],
        "settings": settings,
        "grid": {"student.fit.epochs": [0, 20]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    begun = ("select", "sweep.yaml", "--epsilon", "1", "--out", "out", "--trials")
    code, _, errors = fairpate(*begun, "1")
    assert (code, "--trials: expected a number above 1" in errors) == (2, True)
    code, _, errors = fairpate("select", "sweep.yaml", "--epsilon", "11", "--out", "dear", "--trials", "3")
    assert (code, "ε = 11.00 in sum (0.00 so far), above 10" in errors, "give --yes" in errors) == (2, True, True), (
        errors
    )
    code, _, errors = fairpate(*begun, "3")
    assert code == 0, errors
    assert "spends       at most ε = 1.00 (δ = 10⁻⁵) of each record; so far nothing" in errors  # nor was the dear one
    assert "a secret number of trials, 3 expected" in errors
    assert read_statement(RunDirectory(root=tmp_path / "out/model")).tuning_accounted
