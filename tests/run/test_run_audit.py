"""Audits of runs: correct releases stay below their claim, broken ones are found, and a bundle takes what holds."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from method_kinds import quick_and_slow
from small_runs import QUIET
from test_select import candidate, clinic  # noqa: F401 - the fixture

from aggregator import mechanism
from fairpate.data import Dataset, Split
from fairpate.fairness.gate import DemographicParityGate
from fairpate.methods import dp_fair_learning, record_votes, residual_votes
from fairpate.methods.base import configured
from fairpate.nn import private_fit
from fairpate.nn.per_example import ClippedSum
from fairpate.privacy.accountant import least_noise
from fairpate.privacy.audit_bounds import epsilon_lower_bound, guess
from fairpate.privacy.discrete_gaussian import SeededSource
from fairpate.privacy.mechanism_events import NeighbourVotes
from fairpate.releases.directory import RunDirectoryError
from fairpate.report.run_page import Audit, audit_page
from fairpate.run import audit as run_audit
from fairpate.run import private_metrics
from fairpate.run.audit import AuditError, audit_run
from fairpate.run.bounded_answers import AskedBound
from fairpate.run.bundle import verify_bundle, write_bundle
from fairpate.run.run import run_method
from fairpate.types import GateRule
from teachers.neighbours import LocalNeighbourhood, Sampler, blocks_of, label_counts

pytestmark = pytest.mark.usefixtures("light_runs")

WIDTH = 40
LINEAR = {"student": {"model": {"name": "logistic"}}}
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    # Settings, and the canaries that find half the noise for certain.
    "record_votes": ({"record_votes": {"num_prototypes": 20}, "target": {"epsilon": 2.0}}, 1500),
    "weighted_votes": ({}, 1500),
    # Their noise grows with the square of the components, which are as many as the canaries of one release.
    "residual_votes": ({"residual_votes": {"curvature": "private", "embedding": {"num_components": 60}}}, 800),
    # Its eigenvalue is one number of each release: a hundred of them show its noise.
    "ada_ssp": ({"ada_ssp": {"embedding": {"num_components": 20}}}, 2000),
    # One step on all records: of many, the last model alone shows little.
    "dp_sgd": ({"dp_sgd": {"epochs": 1, "batch_size": 200, "num_records": 200}, "target": {"epsilon": 1.0}}, 6_000),
    "dp_postprocessing": ({}, 1500),
    "pate": (
        {
            "teachers": {"num_teachers": 120, "model": {"name": "logistic"}, "fit": {"epochs": 1}},
            "aggregator": {"num_queries": 60, "release": "counts", "mechanism": {"threshold": float("-inf")}},
            "ray": {"num_actors": 0},
        },
        1500,
    ),
}


def split(count: int, name: str) -> Split:
    draws = np.random.default_rng(count)
    x = torch.from_numpy(draws.normal(size=(count, WIDTH)).astype(np.float32))
    z = torch.from_numpy(draws.integers(0, 2, count))
    return Split(x=x, y=(x[:, 0] + 0.3 * z > 0).long(), z=z, record_id=[f"{name}{row}" for row in range(count)])


def two_groups(persons: bool = False, num_private: int = 600) -> Dataset:
    private = split(num_private, "a")
    if persons:
        names = [f"p{row // 2}" for row in range(len(private))]
        private = Split(x=private.x, y=private.y, z=private.z, record_id=private.record_id, person_id=names)
    return Dataset(
        name="made",
        kind="tabular",
        private=private,
        public=split(200, "b"),
        validation=split(50, "c"),
        test=split(300, "d"),
        label_names=("no", "yes"),
        group_names=("F", "M"),
        sensitive_attribute="sex",
        parts="hash/1",
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """The finished run of each method, made when it is first asked for."""
    folder, found = tmp_path_factory.mktemp("audited"), dict[str, Path]()

    def run_of(method: str, **more: Any) -> Path:
        key = f"{method}{json.dumps(more, default=str)}"
        if key not in found:
            persons, num_private = more.pop("persons", False), more.pop("num_private", 600)
            settings = {"target": {"epsilon": 4.0}} | LINEAR | KINDS.get(method, ({}, 0))[0] | more
            settings["out"] = folder / str(len(found))
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("FAIRPATE_STATE", str(folder / f"state-{len(found)}"))
                found[key] = run_method(
                    configured(settings, method=method), QUIET, two_groups(persons, num_private)
                ).root
        return found[key]

    return run_of


def audited(root: Path, *, wanted: Callable[[Audit], bool] = lambda _: True, **options: Any) -> Audit:
    """Audit up to three times, until the outcome is as wanted: by design one in a hundred refutes what holds."""
    for _ in range(3):
        found = audit_run(root, reporter=QUIET, **options)[0]
        if wanted(found):
            break
    return found


def is_refuted(found: Audit) -> bool:
    return found.refuted


def holds(found: Audit) -> bool:
    return not found.refuted


def holds_with_power(found: Audit) -> bool:
    return not found.refuted and found.has_power and found.proved() > 0.15 * found.epsilon


QUICK_KINDS, SLOW_KINDS = ("record_votes", "pate"), ("residual_votes", "dp_sgd", "dp_postprocessing")


def halve_noise(patched: pytest.MonkeyPatch) -> None:
    """Half the noise wherever a release draws it; the events still claim all of it."""
    for module in (record_votes, mechanism):
        whole = module.discrete_gaussians
        patched.setattr(
            module, "discrete_gaussians", lambda stddev, words, source, whole=whole: whole(stddev / 2, words, source)
        )
    of_sums = private_fit.GaussianNoise.add_to
    patched.setattr(private_fit.GaussianNoise, "add_to", lambda self, sums, stddev: of_sums(self, sums, stddev / 2))
    laplace = dp_fair_learning.add_laplace
    patched.setattr(
        dp_fair_learning, "add_laplace", lambda exact, *, epsilon, **how: laplace(exact, epsilon=2 * epsilon, **how)
    )
    of_table = private_metrics.sample_discrete_gaussian
    patched.setattr(private_metrics, "sample_discrete_gaussian", lambda stddev, source: of_table(stddev / 2, source))


def count_twice(patched: pytest.MonkeyPatch) -> None:
    """Every record adds twice what its bound allows."""
    exact = record_votes.with_noise
    patched.setattr(record_votes, "with_noise", lambda table, **how: exact(2 * table, **how))
    total = residual_votes.RecordSums.total
    patched.setattr(residual_votes.RecordSums, "total", lambda self, left, *, norm: 2 * total(self, left, norm=norm))
    clipped = private_fit.GradientClipper.sum

    def doubled(self: Any, *given: Any) -> ClippedSum:
        found = clipped(self, *given)
        torch._foreach_mul_(found.gradients, 2.0)
        return found

    patched.setattr(private_fit.GradientClipper, "sum", doubled)
    table = dp_fair_learning.joint_table
    # Also where the attacker counts what it knows.
    patched.setattr(dp_fair_learning, "joint_table", lambda *given, **how: 2 * table(*given, **how))
    answer = mechanism.ConfidentVotes.answer
    patched.setattr(mechanism.ConfidentVotes, "answer", lambda self, votes_QC, **how: answer(self, 2 * votes_QC, **how))
    patched.setattr(private_metrics, "records_of_unit", lambda records: np.full(len(records), 0.5))


@pytest.mark.parametrize("method", quick_and_slow(KINDS, QUICK_KINDS, SLOW_KINDS))
def test_a_correct_release_stays_below_its_claim_and_its_control_does_not(runs: Any, method: str) -> None:
    found = audited(runs(method), wanted=holds_with_power, num_canaries=KINDS[method][1])
    assert holds_with_power(found)
    (release,) = found.releases
    assert release.found.guesses.num_canaries >= KINDS[method][1]


# Others: tests/run/test_audit_of_each_release.py finds two thirds of their noise, and what counts twice.
FAULTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (halve_noise, {"record_votes": (), "pate": (), "dp_postprocessing": pytest.mark.slow}),
    (
        count_twice,
        {"weighted_votes": (), "pate": ()} | dict.fromkeys(("residual_votes", "dp_postprocessing"), pytest.mark.slow),
    ),
)


# ada_ssp adds up and draws its sums by the functions of residual_votes: each fault of one is a fault of both.
@pytest.mark.parametrize(
    ("fault", "method"),
    [
        pytest.param(fault, method, marks=marks.get(method, pytest.mark.campaign))
        for fault, marks in FAULTS
        for method in KINDS
        if method != "ada_ssp"
    ],
)
def test_half_the_noise_and_a_record_that_counts_twice_are_found(
    runs: Any, method: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = runs(method)
    fault(monkeypatch)
    assert audited(root, wanted=is_refuted, num_canaries=KINDS[method][1]).refuted


@pytest.mark.parametrize(
    "fault",
    [pytest.param(None, marks=pytest.mark.campaign), halve_noise, pytest.param(count_twice, marks=pytest.mark.slow)],
)
def test_the_table_of_private_metrics_is_audited_too(runs: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = runs("weighted_votes", evaluation={"metrics": "private", "score_edges": [0.5]})
    if fault is not None:
        fault(monkeypatch)
    found = audited(root, wanted=is_refuted if fault else holds, num_canaries=800 if fault is halve_noise else 1500)
    assert [release.part for release in found.releases] == ["private", "test"]
    table = found.releases[1]
    # Of a table, the attack is nearly ideal.
    assert max(table.found.bounds(found.delta)) > (found.epsilon if fault else 0.6 * found.epsilon)
    assert found.refuted is (fault is not None)


def exact_by_confidence(patched: pytest.MonkeyPatch) -> None:
    """The second of two tables has no noise."""
    whole = run_audit.draw_table

    def draw_table(*given: Any, **how: Any) -> Any:
        shown = whole(*given, **how)
        if how.get("noisy_sum") is None:
            exact = whole(*given, **how, noisy_sum=lambda exact_RW, **_: exact_RW)
            shown.arrays["weights_SK2"] = exact.arrays["weights_SK2"]
        return shown

    patched.setattr(run_audit, "draw_table", draw_table)


def twice_by_confidence(patched: pytest.MonkeyPatch) -> None:
    """Every record counts twice in the second of two tables."""
    table = AskedBound.table
    patched.setattr(AskedBound, "table", lambda self, *given, weight: 2 * table(self, *given, weight=weight))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param(exact_by_confidence, marks=pytest.mark.slow),
        pytest.param(twice_by_confidence, marks=pytest.mark.campaign),
    ],
)
def test_the_table_by_confidence_is_attacked_by_itself(runs: Any, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = runs("weighted_votes", evaluation={"metrics": "private"}, student={"reject": {"max_error": 0.3}})
    if fault is not None:
        fault(monkeypatch)
    found = audited(root, wanted=is_refuted if fault else holds, num_canaries=1500)
    tables = found.releases[1]
    assert [single.name for single in tables.singles] == ["table of predictions", "table by confidence"]
    assert tables.unseen == ()
    assert found.refuted is (fault is not None)
    # Each table has a share of the budget, and the attack on it alone proves most of what is claimed of it.
    for single in tables.singles:
        assert single.found is not None
        if fault is None:
            assert max(single.found.bounds(found.delta)) > 0.4 * single.claim.epsilon


@pytest.mark.slow
def test_the_table_of_a_model_of_embedded_records_is_audited(clinic: Path, tmp_path: Path) -> None:  # noqa: F811
    """With an odd number of canaries in all, of which every one is guessed."""
    out = tmp_path / "run"
    run_method(
        candidate(clinic, "data.embedding={num_components: 5}", "data.split.validation_share=0", f"out={out}"), QUIET
    )
    assert [each.part for each in audited(out, wanted=holds, num_canaries=303).releases] == ["private", "test"]


@pytest.mark.parametrize("method", ["weighted_votes", pytest.param("record_votes", marks=pytest.mark.campaign)])
@pytest.mark.slow
def test_a_person_with_several_records_is_one_canary(runs: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = runs(method, persons=True)
    assert holds(audited(root, wanted=holds, num_canaries=1500))
    # Persons' votes that are added up and not shortened.
    monkeypatch.setattr(record_votes, "shortened_by_person", lambda votes, rows, *_, **__: (rows, votes))
    assert audited(root, wanted=is_refuted, num_canaries=1500).refuted


@pytest.mark.parametrize(
    "method",
    quick_and_slow(["pate", "weighted_votes", "record_votes", "dp_postprocessing"], ["pate"], ["dp_postprocessing"]),
)
def test_what_private_records_were_read_for_stays_private(
    runs: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = runs(method)
    monkeypatch.setattr("fairpate.run.audit.load_for", lambda *_: two_groups())
    monkeypatch.setattr("fairpate.run.audit.require_data_by_name", lambda _: None)
    found, page = audited(root, wanted=holds, num_canaries=1500, on_private=True), root / "private" / "audit.html"
    assert found.records == "private" and not found.refuted
    assert "Do not publish" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0
    (root / "public" / "audit.json").unlink(missing_ok=True)
    (root / "public" / "audit.html").unlink(missing_ok=True)
    with zipfile.ZipFile(write_bundle(root)[0]) as bundle:
        assert not any("audit" in name for name in bundle.namelist())


def test_a_bundle_takes_an_audit_and_its_check_finds_every_edit(runs: Any, tmp_path: Path) -> None:
    root = runs("pate")
    audited(root, num_canaries=1500)
    path, _ = write_bundle(root, tmp_path / "b.zip")
    verdict = verify_bundle(path)
    assert verdict.holds and any("an audit of these settings" in line for line in verdict.checked)
    values = json.loads((root / "public" / "audit.json").read_text())

    def differs(change: Any) -> str:
        edited = json.loads(json.dumps(values))
        change(edited)
        (root / "public" / "audit.json").write_text(json.dumps(edited))
        return " ".join(verify_bundle(write_bundle(root, tmp_path / "edited.zip")[0]).differs)

    release = "releases"
    assert "other settings" in differs(lambda edited: edited.update(settings="0" * 12))
    assert "of private records" in differs(lambda edited: edited.update(records="private"))
    assert "epsilon is 9" in differs(lambda edited: edited.update(epsilon=9.0))
    assert "counts" in differs(lambda edited: edited[release][0]["found"].update(epsilon_assumption_free=0.0))
    far_apart = values[release][0]["found"]["separation"] | {"t": 60.0}
    found = values[release][0] | {"found": values[release][0]["found"] | {"separation": far_apart}}
    refuted = Audit.from_json(values | {release: [found]})
    assert refuted.refuted and "refuted" in refuted.headline and "Do not publish this run" in audit_page(refuted)
    assert "refuted" in differs(lambda edited: edited.update(json.loads(json.dumps(refuted.to_json()))))
    assert "format" in differs(lambda edited: edited.update(format="another"))
    (root / "public" / "audit.json").write_text(json.dumps(values))


def test_what_cannot_be_audited_says_why(runs: Any) -> None:
    with pytest.raises(AuditError, match="has no privacy guarantee"):
        audited(runs("sgd"))
    with pytest.raises(AuditError, match="has no privacy guarantee"):
        audited(runs("weighted_votes", noise="seeded"))
    with pytest.raises(AuditError, match=r"no attack on the releases of randomised_response"):
        audited(runs("randomised_response"))
    with pytest.raises(AuditError, match=r"--canaries: 12 canaries are too few.*give \d"):
        audited(runs("dp_postprocessing"), num_canaries=10)
    with pytest.raises(RunDirectoryError, match="from Python"):
        audited(runs("weighted_votes"), on_private=True)


def test_an_audit_says_how_long_it_takes_and_has_a_quick_form(runs: Any, fairpate: Any) -> None:
    root = runs("record_votes")
    for _ in range(3):  # by design one in a hundred refutes what holds
        code, _, told = fairpate("audit", root, "--quick")
        if code == 0:
            break
    assert code == 0, told
    assert re.search(r"time +\d+ releases and as many controls: about \d", told), told
    (release,) = json.loads((root / "public" / "audit.json").read_text())["releases"]
    assert release["found"]["guesses"]["num_canaries"] == pytest.approx(2000, abs=release["canaries_each"])


def test_an_audit_of_other_events_than_the_statement_s_is_refused(runs: Any) -> None:
    root = runs("pate")
    path = root / "public" / "statement.json"
    text = path.read_text()
    values = json.loads(text)
    values["events"][0]["noise_stddev_votes"] *= 2
    path.write_text(json.dumps(values))
    try:
        with pytest.raises(AuditError, match="the run's settings now give"):
            audited(root, num_canaries=1500)
    finally:
        path.write_text(text)


def test_the_page_says_what_the_record_says(runs: Any) -> None:
    found, page = audit_run(runs("pate"), reporter=QUIET, num_canaries=1500)
    text = page.read_text()
    assert found.headline in text and found.power_words in text and "fairpate verify" in text
    assert all(single.name in text for release in found.releases for single in release.singles)
    assert Audit.from_json(json.loads((page.parent / "audit.json").read_text())) == found


@pytest.mark.slow
def test_neighbours_stay_below_their_claim_and_half_the_noise_is_found() -> None:
    """Queries of Private-kNN, which the command does not audit: a canary at the query, sampled or not."""
    rate, queries, others = 0.5, 15_000, 12

    def priced(stddev: float) -> list[NeighbourVotes]:
        return [NeighbourVotes(count=1, noise_stddev_votes=stddev, sampling_rate=rate)]

    stddev = least_noise(priced, target_epsilon=2.0, target_delta=1e-5, accounting="pld")
    names = [str(number) for number in range(queries)]

    def nearest(is_in: bool) -> Any:
        places, labels = [1] * others + [0] * is_in, [0] * others + [1] * is_in
        blocks = blocks_of(np.array(places, np.int32)[:, None], np.array(labels), names[: len(labels)], key=bytes(32))
        found = LocalNeighbourhood(list(blocks), count=1, sampler=Sampler(rate, int(is_in)))
        return label_counts(found.nearest(np.zeros((queries, 1), dtype=np.int32), names), 2)

    votes = {is_in: nearest(is_in) for is_in in (True, False)}

    def scores(is_in: bool, noise: float) -> np.ndarray:
        outcomes = mechanism.NearestCounts(
            sampling_rate=rate,
            num_neighbours=1,
            threshold=-math.inf,
            threshold_stddev_votes=noise,
            noise_stddev_votes=noise,
        ).answer(
            votes[is_in],
            groups=[0] * queries,
            keys=names,
            gate=DemographicParityGate(GateRule(max_disparity=math.inf, min_count=1), num_groups=1, num_classes=2),
            source=SeededSource(int(is_in)),
        )
        shown_Q2 = np.array([outcome.counts for outcome in outcomes])
        return (shown_Q2[:, 1] - shown_Q2[:, 0]).astype(float)

    def bound(noise: float) -> float:
        both = np.concatenate([scores(True, noise), scores(False, noise)])
        # Nobody is guessed to be out: a canary that was not sampled looks like one that was left out.
        guesses = guess(both, np.arange(len(both)) < queries, num_guessed_in=300, num_guessed_out=0)
        return epsilon_lower_bound(guesses, delta=1e-5)

    right, broken = bound(stddev), bound(stddev / 2)
    assert 0.2 < right < 2.0 < broken
