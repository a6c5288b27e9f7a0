"""Training again would release the same records again: it is refused, or counted, and never happens unnoticed."""

import importlib
import shutil

import pytest
from each_method import METHODS, UNPROTECTED, train
from method_kinds import quick_and_slow
from small_runs import copied

import fairpate.methods.dp_fermi
from fairpate.releases.directory import RunDirectoryError, read_statement
from fairpate.releases.log import read_receipt
from fairpate.releases.odometer import LimitReachedError, Odometer

pytestmark = pytest.mark.usefixtures("light_runs")


def test_models_on_one_data_set_are_one_sum_and_older_ones_are_counted_too(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    # One step over all records, which composes quickly.
    private = ("noise=os_entropy", "dp_sgd.num_records=200", "names_earlier=true")
    first, second = (train(tmp_path / f"run-{seed}", "dp_sgd", *private, f"seed={seed}") for seed in range(2))
    alone, both = read_statement(first), read_statement(second)
    assert (alone.noise, alone.earlier_releases, both.earlier_releases) == ("os_entropy", 0, 1)
    assert both.epsilon < both.epsilon_with_earlier < both.epsilon + alone.epsilon
    assert both.epsilon_with_earlier < both.epsilon_adaptive_with_earlier
    assert "1 earlier result" in both.remarks[-1]
    counted = Odometer().totals(delta=both.delta)
    assert [(total.releases, total.epsilon) for total in counted] == [(2, both.epsilon_with_earlier)]
    Odometer().path.unlink()
    first.receipt.unlink()  # as a version without an odometer left it
    for seed in range(2):
        train(tmp_path / f"run-{seed}", "dp_sgd", *private, f"seed={seed}")
    again = Odometer().totals(delta=both.delta)
    assert [(total.releases, total.epsilon) for total in again] == [(2, pytest.approx(both.epsilon_with_earlier))]


def test_a_model_that_would_pass_the_limit_is_not_released(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", "record", epsilon=1.0, delta=1e-4)
    with pytest.raises(LimitReachedError, match=r"color_digits, unit record: 0 releases.*the limit is 1"):
        train(tmp_path / "run", "dp_sgd", "noise=os_entropy")
    assert list((tmp_path / "run/public").iterdir()) == []
    assert not (tmp_path / "run/private/release.json").exists()


GIVING_UP = pytest.mark.parametrize(
    ("method", "given"),
    [
        ("dp_oracle_learner", ["dp_oracle_learner.min_share=.9"]),
        pytest.param(
            "dp_oracle_learner",
            ["dp_oracle_learner.min_share=.9", "dp_oracle_learner.rules=by_group"],
            marks=pytest.mark.slow,
        ),
        pytest.param("dp_postprocessing", ["dp_postprocessing.min_share=.9"], marks=pytest.mark.slow),
        ("randomised_response", ["randomised_response.form=two_step", "randomised_response.min_share=.9"]),
    ],
)


@GIVING_UP
def test_a_release_that_makes_a_method_give_up_is_counted_each_time(tmp_path, monkeypatch, method, given):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"share.*has been spent"):
            train(tmp_path / "run", method, "noise=os_entropy", *given)
        (total,) = Odometer().totals(delta=1e-4)
        assert (total.releases, total.unit) == (number, "sensitive attribute")
        assert 0 < total.epsilon <= 2 * number
    assert list((tmp_path / "run/public").iterdir()) == []


@GIVING_UP
def test_what_makes_a_method_give_up_is_not_shown_beyond_a_limit(tmp_path, monkeypatch, method, given):
    """Refused alike whether it would give up or not: which of the two would tell what was drawn."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    # Room for the first release of the oracle learner, and for no whole run.
    Odometer().set_limit("color_digits", "sensitive attribute", epsilon=0.5, delta=1e-4)
    refusals = []
    for options in (given, [option for option in given if "min_share" not in option]):
        with pytest.raises(LimitReachedError, match="0 releases") as refused:
            train(tmp_path / "run", method, "noise=os_entropy", *options)
        assert refused.value.__context__ is None
        refusals.append(str(refused.value))
        assert Odometer().totals(delta=1e-4) == []
        shutil.rmtree(tmp_path / "run")
    assert refusals[0] == refusals[1]
    # A run planned at the limit gives up once, and leaves no room for another one that may depend on why.
    Odometer().set_limit("color_digits", "sensitive attribute", epsilon=2 * (1 + 1e-9), delta=1e-4)
    with pytest.raises(ValueError, match="has been spent"):
        train(tmp_path / "run", method, "noise=os_entropy", *given)
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(tmp_path / "run", method, "noise=os_entropy", *given)
    (total,) = Odometer().totals(delta=1e-4)
    assert total.releases == 1


def test_a_training_that_empty_events_end_is_admitted_before_shares_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", "record", epsilon=1.0, delta=1e-4)
    monkeypatch.setattr("fairpate.methods.dp_fermi.release_shares", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(LimitReachedError, match="0 releases"):
        train(tmp_path / "run", "dp_fermi", "noise=os_entropy")


@pytest.mark.parametrize(
    "method",
    quick_and_slow(["record_votes", "weighted_votes", "residual_votes", "ada_ssp"], ["record_votes", "residual_votes"]),
)
def test_noise_is_drawn_only_after_its_charge_is_on_disk(tmp_path, monkeypatch, method):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    drawn = []

    def failing(*_, **__):
        drawn.append([(total.releases, total.epsilon) for total in Odometer().totals(delta=1e-4)])
        # An error between two draws, where there is a second one.
        if len(drawn) == (2 if method == "residual_votes" else 1):
            raise MemoryError
        return real(*_, **__)

    module = {"weighted_votes": "record_votes", "ada_ssp": "residual_votes"}.get(method, method)
    real = importlib.import_module(f"fairpate.methods.{module}").with_noise
    monkeypatch.setattr(f"fairpate.methods.{module}.with_noise", failing)
    with pytest.raises(MemoryError):
        train(tmp_path / "run", method, "noise=os_entropy")
    ((releases, epsilon),) = drawn[0]
    # The sum has loss distributions, which the target's accounting here does without.
    assert (releases, 1.5 < epsilon <= 2, drawn[-1]) == (1, True, drawn[0])
    assert list((tmp_path / "run/public").iterdir()) == []
    monkeypatch.setattr(f"fairpate.methods.{module}.with_noise", real)
    done = train(tmp_path / "run", method, "noise=os_entropy", "names_earlier=true")
    # What was drawn then is counted, and so is what this run draws.
    (total,) = Odometer().totals(delta=1e-4)
    assert (total.releases, read_statement(done).earlier_releases) == (2, 1)
    assert read_statement(done).epsilon == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize(("curvature", "epsilon"), [("public", 0.1), ("private", 2)])
def test_a_limit_at_the_target_admits_residual_votes_with_either_curvature(tmp_path, monkeypatch, curvature, epsilon):
    """Which one follows, the first released sums decide: the reserved plan gives way to what was drawn."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", "record", epsilon=epsilon * (1 + 1e-9), delta=1e-4)
    # Under much noise the pool's moments are the better ones.
    done = train(tmp_path / "run", "residual_votes", "noise=os_entropy", f"target.epsilon={epsilon}")
    row = Odometer().charges("color_digits")[read_receipt(done).run]
    assert row.plan in ((), row.events)
    assert len(row.events) == (2 if curvature == "public" else 3)
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(tmp_path / "other", "weighted_votes", "noise=os_entropy")
    # Nothing is drawn where there is no room for all of it.
    monkeypatch.setattr("fairpate.methods.residual_votes.with_noise", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(tmp_path / "third", "residual_votes", "noise=os_entropy")


def test_a_training_reserves_what_it_will_release(tmp_path, monkeypatch):
    """Another process that asks meanwhile finds no room: a refusal after the draw would reveal its outcome."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    shares, reserved = fairpate.methods.dp_fermi.release_shares, []

    def meanwhile(*given, **named):
        found = shares(*given, **named)
        (total,) = Odometer().totals(delta=1e-4)
        reserved.append(total.epsilon)
        return found

    monkeypatch.setattr("fairpate.methods.dp_fermi.release_shares", meanwhile)
    done = train(tmp_path / "run", "dp_fermi", "noise=os_entropy")
    (total,) = Odometer().totals(delta=1e-4)
    # The sum has loss distributions, which the target's accounting here does without.
    assert [total.epsilon] == reserved
    assert (total.releases, 1.5 < total.epsilon <= read_statement(done).epsilon) == (1, True)


def test_a_released_model_is_not_trained_again(trained, tmp_path):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    model, record = folder.student.read_bytes(), folder.record.read_bytes()
    folder.record.unlink()
    folder.metrics.unlink()
    train(folder.root, "dp_sgd")
    assert (folder.student.read_bytes(), folder.record.read_bytes()) == (model, record)


def test_a_run_of_another_method_in_the_same_folder_is_refused_by_field(trained, tmp_path):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    for other in ("fair_dp_sgd", "fairpate"):
        with pytest.raises(RunDirectoryError, match=f"method: dp_sgd -> {other}"):
            train(folder.root, other)
    with pytest.raises(RunDirectoryError, match=r"dp_sgd\.epochs: 2.0 -> 3.0"):
        train(folder.root, "dp_sgd", "dp_sgd.epochs=3")


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_damaged_or_lost_model_is_never_released_twice(trained, tmp_path, length):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    statement = folder.statement.read_bytes()
    folder.student.write_bytes(folder.student.read_bytes()[:length])
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors.*second release.*--out"):
        train(folder.root, "dp_sgd")
    folder.student.unlink()
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors: missing.*second release"):
        train(folder.root, "dp_sgd")
    assert folder.statement.read_bytes() == statement
    assert not folder.student.exists()


def test_a_model_without_privacy_is_made_again(trained, tmp_path):
    folder = copied(trained("sgd"), tmp_path / "run")
    before = folder.student.read_bytes()
    folder.student.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=r"delete it and give the same command again"):
        train(folder.root, "sgd")
    folder.student.unlink()
    train(folder.root, "sgd")
    assert folder.student.read_bytes() == before


@pytest.mark.parametrize(("method", "remedy"), [("dp_sgd", "restore it from a copy"), ("sgd", "delete .*safetensors")])
def test_a_model_without_its_statement_is_named(trained, tmp_path, method, remedy):
    folder = copied(trained(method), tmp_path / "run")
    folder.statement.unlink()
    with pytest.raises(RunDirectoryError, match=rf"statement\.json: missing, although .* released with it; {remedy}"):
        train(folder.root, method)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"epsilon": 1}'])
def test_a_damaged_statement_is_named(trained, tmp_path, content):
    folder = copied(trained("dp_sgd"), tmp_path / "run")
    folder.statement.write_text(content)
    with pytest.raises(RunDirectoryError, match=r"statement\.json: damaged"):
        train(folder.root, "dp_sgd")


def test_a_model_that_is_trained_again_after_its_files_were_deleted_is_counted_twice(tmp_path, monkeypatch):
    """Its noise is drawn anew, so that both together tell more: a limit sees both."""
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    private = (tmp_path / "run", "dp_sgd", "noise=os_entropy", "target.epsilon=1", "dp_sgd.num_records=200")
    folder = train(*private)
    first = folder.student.read_bytes()
    shutil.rmtree(folder.public)
    Odometer().set_limit("color_digits", "record", epsilon=1.01, delta=1e-4)
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(*private)
    assert not folder.student.exists()
    assert not folder.statement.exists()
    Odometer().set_limit("color_digits", "record", epsilon=10, delta=1e-4)
    train(*private)
    assert folder.student.read_bytes() != first
    assert read_statement(folder).earlier_releases is None  # public pages name them where they are asked to
    (total,) = Odometer().totals(delta=1e-4)
    assert total.releases == 2


@pytest.mark.parametrize("method", quick_and_slow(name for name in METHODS if name not in UNPROTECTED))
def test_a_limit_admits_one_run_that_was_planned_at_it(trained, tmp_path, monkeypatch, method):
    """And then no other one, whatever it is chosen by."""
    planned = read_statement(trained(method))
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    Odometer().set_limit("color_digits", planned.unit, epsilon=planned.epsilon * (1 + 1e-9), delta=planned.delta)
    run = train(tmp_path / "run", method, "noise=os_entropy")
    assert read_statement(run).epsilon == pytest.approx(planned.epsilon)
    assert "earlier release" not in run.public_report.read_text(encoding="utf-8")
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(tmp_path / "other", method, "noise=os_entropy", "seed=1")
    assert not (tmp_path / "other/public/student.safetensors").exists()
    (total,) = Odometer().totals(delta=planned.delta)
    assert total.releases == 1


def test_a_limit_below_what_was_released_says_so(fairpate, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    train(tmp_path / "run", "dp_sgd", "noise=os_entropy", "dp_sgd.num_records=200")
    code, _, errors = fairpate("ledger", "limit", "color_digits", "--epsilon", "0.5", "--delta", "1e-4")
    assert code == 0
    assert "above 0.5: every new release is refused" in errors
    assert "above" not in fairpate("ledger", "limit", "color_digits", "--epsilon", "50", "--delta", "1e-4")[2]
    # Released before there was a limit, it is counted at the limit's order, though it cost less by itself.
    (total,) = Odometer().totals(delta=1e-4)
    limit = f"{total.epsilon * 1.001:.6f}"
    assert (
        "every new release is refused"
        in fairpate("ledger", "limit", "color_digits", "--epsilon", limit, "--delta", "1e-4")[2]
    )
    with pytest.raises(LimitReachedError, match="1 release cost"):
        train(tmp_path / "other", "dp_sgd", "noise=os_entropy", "dp_sgd.num_records=200", "target.epsilon=.01")
