"""Audits of methods with several noises: each release is attacked by itself, and a fault in one of them is found."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import QUIET
from test_run_audit import audited, holds, is_refuted, runs, two_groups  # noqa: F401 - the fixture

from aggregator import mechanism
from fairpate.config import EMBEDDED_NORM
from fairpate.data import Split
from fairpate.methods import dp_fair_learning, dp_fermi, pate, raco_dp, record_votes, residual_votes, teacher_votes
from fairpate.methods.base import configured
from fairpate.methods.noisy_counts import Bins
from fairpate.nn import private_fit
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.privacy.audit_bounds import IdealAttack, NoiseSeen, gaussian_epsilon, gaussian_mu
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.report.run_page import SURE, AttackResult, Audit, audit_page
from fairpate.run import audit as run_audit
from fairpate.run.audit import CANARIES, Claimed, Drawn, Seen, Shadows
from fairpate.run.run import run_method

# A timeout, so that this long file is among the first to start.
pytestmark = [pytest.mark.usefixtures("light_runs"), pytest.mark.timeout(900)]
TEACHERS = {"num_teachers": 400, "model": {"name": "logistic"}, "fit": {"epochs": 1}}
ROUNDS = {"curvature": "public", "embedding": {"num_components": 100}}
# At epsilon 1, one of several noises is a small part of all.
SETTINGS: dict[str, dict[str, Any]] = {
    "residual_votes": {"residual_votes": ROUNDS, "target": {"epsilon": 1.0}},
    "record_votes": {"record_votes": {"num_prototypes": 20}, "target": {"epsilon": 1.0}},
    "weighted_votes": {"weighted_votes": {"embedding": {"num_components": 200}}, "target": {"epsilon": 1.0}},
    "ada_ssp": {"ada_ssp": {"embedding": {"num_components": 20}}, "target": {"epsilon": 1.0}},
    "pate": {
        "teachers": TEACHERS,
        "aggregator": {"num_queries": 100, "release": "label", "mechanism": {"threshold": 240.0}},
        "ray": {"num_actors": 0},
        "target": {"epsilon": 8.0},
    },
    "dp_sgd": {"dp_sgd": {"epochs": 4, "batch_size": 60, "num_records": 600}, "target": {"epsilon": 2.0}},
    "raco_dp": {"dp_sgd": {"epochs": 4, "batch_size": 60, "num_records": 600}, "target": {"epsilon": 2.0}},
    "dp_fermi": {"dp_sgd": {"epochs": 4, "batch_size": 60, "num_records": 600}, "target": {"epsilon": 2.0}},
}
RENYI = {"target": {"epsilon": 2.0, "accounting": "rdp"}}  # a noise that is planned in a tenth of the time
QUICK = (
    ("residual_votes", "no noise in the rounds"),
    ("pate", "no noise in the check"),
    ("weighted_votes", "no noise on the number of records"),
    ("weighted_votes", "noise drawn from records"),
    ("weighted_votes", "persons by label"),
    ("dp_sgd", "shuffled batches"),
)
# What the same test of the same numbers finds in the releases of another method, or a smaller fault of the same noise.
CAMPAIGNS = (
    ("weighted_votes", "no noise on one coordinate"),
    ("weighted_votes", "uniform instead of Gaussian"),
    ("residual_votes", "no noise on one coordinate"),
    ("residual_votes", "no noise in one round"),
    ("residual_votes", "two thirds in the sums"),
    ("ada_ssp", "exact moments off the diagonal"),
    ("ada_ssp", "one eigenvalue's noise"),
    ("ada_ssp", "no noise on the eigenvalue"),
    ("record_votes", "even noise"),
    ("record_votes", "persons by label"),
    ("pate", "checks share their noise"),
    ("pate", "half the noise in the check"),
    ("pate", "no noise in the labels"),
    ("dp_sgd", "Laplace steps"),
    ("dp_fermi", "matrices' noise drawn once"),
    ("dp_fermi", "matrices' noise used twice"),
    ("dp_fermi", "no noise on matrices"),
    ("raco_dp", "one cell exact"),
    ("raco_dp", "no noise on histograms"),
    ("dp_postprocessing", "one noise for all counts"),
    ("dp_postprocessing", "rounded to hundreds"),
    ("raco_dp", "one cell counts twice"),
    ("residual_votes", "rounds that never ask"),
    ("residual_votes", "one noise for all rounds"),
    ("dp_sgd", "two thirds of the noise"),
    ("pate", "votes count twice"),
    ("pate", "labels have the noise of their check"),
    ("weighted_votes", "two thirds of the noise"),
    ("record_votes", "two thirds of the noise"),
)


def marks(method: str, what: str) -> Any:
    """Of the fault ``what`` in ``method``."""
    if (method, what) in QUICK:
        return ()
    return pytest.mark.campaign if (method, what) in CAMPAIGNS else pytest.mark.slow


Fault = Callable[[pytest.MonkeyPatch], None]


def sums_with(share: float, which: str) -> Fault:
    """Sums whose name begins with ``which`` have this share of their noise."""

    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = record_votes.with_noise

        def with_noise(table: Any, *, stddev: float, row: str, **how: Any) -> Any:
            if not row.startswith(which) or how.get("noisy_sum") is not None:
                return whole(table, stddev=stddev, row=row, **how)
            return whole(table, stddev=share * stddev, row=row, **how) if share else table

        for module in (record_votes, residual_votes, pate, teacher_votes):
            patched.setattr(module, "with_noise", with_noise)

    return fault


def rounds_that_never_ask_for_noise(patched: pytest.MonkeyPatch) -> None:
    """Not even a caller that draws the noise itself gets to see these sums."""
    whole = residual_votes.with_noise

    def with_noise(table: Any, *, row: str, **how: Any) -> Any:
        return table if row.startswith("residuals") else whole(table, row=row, **how)

    patched.setattr(residual_votes, "with_noise", with_noise)


def exact_off_the_diagonal(patched: pytest.MonkeyPatch) -> None:
    whole = residual_votes.noisy_moments

    def noisy_moments(exact_WW: Any, stddev: float, *how: Any) -> Any:
        return exact_WW - np.diag(exact_WW.diagonal()) + np.diag(whole(exact_WW, stddev, *how).diagonal())

    patched.setattr(residual_votes, "noisy_moments", noisy_moments)


def votes_with(share: float, *, of_check: bool) -> Fault:
    """The threshold check, or the counts, have this share of their noise."""

    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = mechanism.discrete_gaussians

        def discrete_gaussians(stddev: float, words: Any, source: Any) -> Any:
            # The check has one number for each query, the counts one for each class.
            return whole(stddev * (share if (words.ndim == 1) is of_check else 1.0), words, source)

        patched.setattr(mechanism, "discrete_gaussians", discrete_gaussians)

    return fault


def steps_with(share: float) -> Fault:
    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = private_fit.GaussianNoise.add_to
        patched.setattr(
            private_fit.GaussianNoise, "add_to", lambda self, sums, stddev: whole(self, sums, share * stddev)
        )

    return fault


def laplace_with(share: float) -> Fault:
    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = private_fit.LaplaceNoise.take
        patched.setattr(private_fit.LaplaceNoise, "take", lambda self, size: share * whole(self, size))

    return fault


def matrices_with(share: float) -> Fault:
    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = dp_fermi.MatrixGame.ascend
        patched.setattr(
            dp_fermi.MatrixGame,
            "ascend",
            lambda self, noise, *, stddev, **how: whole(self, noise, stddev=share * stddev, **how),
        )

    return fault


def clip_twice(patched: pytest.MonkeyPatch) -> None:
    whole = private_fit.GradientClipper.sum

    def doubled(self: Any, *given: Any) -> Any:
        found = whole(self, *given)
        torch._foreach_mul_(found.gradients, 2.0)
        return found

    patched.setattr(private_fit.GradientClipper, "sum", doubled)


def sampled_twice_as_often(patched: pytest.MonkeyPatch) -> None:
    whole = private_fit.PoissonBatches.__init__
    patched.setattr(
        private_fit.PoissonBatches, "__init__", lambda self, count, rate, source: whole(self, count, 2 * rate, source)
    )


def votes_twice(patched: pytest.MonkeyPatch) -> None:
    whole = mechanism.ConfidentVotes.answer
    patched.setattr(mechanism.ConfidentVotes, "answer", lambda self, votes_QC, **how: whole(self, 2 * votes_QC, **how))


Change = Callable[[Any, Any, float], Any]
"""Returns a release from the exact numbers, the noisy ones, and the standard deviation of the noise."""


def sums_by(change: Change, which: str) -> Fault:
    """Sums whose name begins with ``which`` are released otherwise than the code under test does."""

    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = record_votes.with_noise

        def with_noise(table: Any, *, stddev: float, row: str, **how: Any) -> Any:
            noisy = whole(table, stddev=stddev, row=row, **how)
            is_own = row.startswith(which) and how.get("noisy_sum") is None
            return change(table, noisy, stddev) if is_own else noisy

        for module in (record_votes, residual_votes, pate, teacher_votes):
            patched.setattr(module, "with_noise", with_noise)

    return fault


def exact_column(column: int) -> Change:
    return lambda exact, noisy, _: np.where(np.arange(exact.shape[1]) == column, exact, noisy)


def same_in_all_rows(exact: Any, noisy: Any, _: float) -> Any:
    return exact + (noisy - exact)[:1]


def same_in_every_release(exact: Any, noisy: Any, stddev: float) -> Any:
    return exact + np.rint(stddev * np.random.default_rng(1).normal(size=exact.shape)).astype(np.int64)


def drawn_from_the_records(exact: Any, noisy: Any, stddev: float) -> Any:
    seed = zlib.crc32(np.ascontiguousarray(exact).tobytes())
    return exact + np.rint(stddev * np.random.default_rng(seed).normal(size=exact.shape)).astype(np.int64)


def rounded_afterwards(exact: Any, noisy: Any, stddev: float) -> Any:
    return (np.rint(noisy / stddev) * stddev).astype(np.int64)


def even_noise(exact: Any, noisy: Any, _: float) -> Any:
    return exact + (noisy - exact) // 2 * 2


def cut_noise(exact: Any, noisy: Any, stddev: float) -> Any:
    return exact + np.clip(noisy - exact, -2.5 * stddev, 2.5 * stddev).astype(np.int64)


def one_noise_for_all_rounds(patched: pytest.MonkeyPatch) -> None:
    first: list[Any] = []

    def change(exact: Any, noisy: Any, stddev: float) -> Any:
        # Eight rounds in a release.
        if len(first) in (0, 8):
            first[:] = [(noisy - exact) / stddev]
        else:
            first.append(None)
        return exact + np.rint(stddev * first[0]).astype(np.int64)

    sums_by(change, "residuals")(patched)


def records_at_the_bound_twice(patched: pytest.MonkeyPatch) -> None:
    """Only loud records, which are shortened, count once."""
    whole = record_votes.WeightedBallot.votes

    def votes(self: Any, x: torch.Tensor) -> Any:
        is_quiet_N = x.flatten(1).norm(dim=1).numpy() < 1.5 * EMBEDDED_NORM
        return np.where(is_quiet_N[:, None], 2, 1) * whole(self, x)

    patched.setattr(record_votes.WeightedBallot, "votes", votes)


def centred_by_their_mean(patched: pytest.MonkeyPatch) -> None:
    """Votes less the mean vote of all private records: one record more moves all of them."""
    whole = record_votes.WeightedBallot.table

    def table(self: Any, x: torch.Tensor, *how: Any, **named: Any) -> Any:
        return whole(self, x - x.nan_to_num().mean(dim=0), *how, **named)

    patched.setattr(record_votes.WeightedBallot, "table", table)


def persons_shortened_by_label(patched: pytest.MonkeyPatch) -> None:
    whole = record_votes.shortened_by_person

    def shortened(votes: Any, rows: Any, person_N: Any, *, norm: int) -> Any:
        return whole(votes, rows, 100 * person_N + rows, norm=norm)

    patched.setattr(record_votes, "shortened_by_person", shortened)


def votes_by(change: Callable[[Any], Any], *, of_check: bool) -> Fault:
    """The noise of threshold checks (one for each query), or of counts (one for each class too), is changed."""

    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = mechanism.discrete_gaussians

        def discrete_gaussians(stddev: float, words: Any, source: Any) -> Any:
            noise = whole(stddev, words, source)
            return change(noise) if (words.ndim == 1) is of_check else noise

        patched.setattr(mechanism, "discrete_gaussians", discrete_gaussians)

    return fault


def first_for_all(noise: Any) -> Any:
    return np.broadcast_to(noise[:1], noise.shape).copy()


COUNTED = {"aggregator": SETTINGS["pate"]["aggregator"] | {"release": "counts"}}


def one_noise_for_check_and_counts(patched: pytest.MonkeyPatch) -> None:
    """What passes the check is released with the noise with which it passed."""

    def words(self: OsEntropy, keys: Any, count: int) -> Any:
        drawn = np.frombuffer(os.urandom(8 * len(keys) * count), dtype=np.uint64).reshape(len(keys), count).copy()
        drawn[:, 1] = drawn[:, 0]
        return drawn

    patched.setattr(OsEntropy, "machine_words", words)


def laplace_shaped(exact: Any, noisy: Any, stddev: float) -> Any:
    drawn = np.random.default_rng().laplace(scale=stddev / math.sqrt(2), size=exact.shape)
    return exact + np.rint(drawn).astype(np.int64)


def even_shaped(exact: Any, noisy: Any, stddev: float) -> Any:
    drawn = np.random.default_rng().uniform(-math.sqrt(3), math.sqrt(3), size=exact.shape)
    return exact + np.rint(stddev * drawn).astype(np.int64)


def laplace_steps(patched: pytest.MonkeyPatch) -> None:
    def add_to(self: Any, sums: Any, stddev: float) -> None:
        for each in sums:
            each.add_(torch.from_numpy(np.random.default_rng().laplace(scale=stddev / 2**0.5, size=each.shape)))

    patched.setattr(private_fit.GaussianNoise, "add_to", add_to)


def matrices_reused(steps: float) -> Fault:
    """A training draws the noise of its matrices once for this many steps."""

    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = dp_fermi.MatrixGame.ascend

        class Kept:
            def __init__(self, noise: Any) -> None:
                self.noise, self.drawn, self.uses = noise, torch.zeros(0), 0

            def take(self, size: int) -> Any:
                if self.uses % steps == 0:
                    self.drawn = self.noise.take(size)
                self.uses += 1
                return self.drawn

        kept: dict[Any, Kept] = {}

        def ascend(self: Any, noise: Any, **how: Any) -> None:
            if noise not in kept:
                kept.clear()
                kept[noise] = Kept(noise)
            whole(self, kept[noise], **how)

        patched.setattr(dp_fermi.MatrixGame, "ascend", ascend)

    return fault


def noise_on_all_parameters_but_one(patched: pytest.MonkeyPatch) -> None:
    whole = private_fit.GaussianNoise.add_to
    patched.setattr(private_fit.GaussianNoise, "add_to", lambda self, sums, stddev: whole(self, sums[:-1], stddev))


def weights_moved_by_exact_sums(patched: pytest.MonkeyPatch) -> None:
    """What is watched has noise, and the weights move by sums without."""
    whole = private_fit.PrivateTraining.step

    def step(self: Any) -> None:
        watch, add_to, stddevs = self._watch, self._noise.add_to, list[float]()
        self._noise.add_to = lambda _, stddev: stddevs.append(stddev)

        def seeing(name: str, exact: Any, sums: Any, *, norm: float) -> None:
            shown = [each.clone() for each in sums]
            if name == "gradients":
                add_to(shown, stddevs[-1])
            watch(name, exact, shown, norm=norm)

        self._watch = None if watch is None else seeing
        whole(self)
        self._watch, self._noise.add_to = watch, add_to

    patched.setattr(private_fit.PrivateTraining, "step", step)


def shuffled_batches(patched: pytest.MonkeyPatch) -> None:
    """Batches of a partition, each record once in an epoch, instead of Poisson samples at the same rate."""

    class Shuffled:
        def __init__(self, count: int, rate: float, source: Any) -> None:
            self._count, self._size, self._rest = count, max(1, round(count * rate)), torch.zeros(0, dtype=torch.int64)

        def next(self) -> torch.Tensor:
            if len(self._rest) < self._size:
                self._rest = torch.cat([self._rest, torch.randperm(self._count)])
            rows, self._rest = self._rest.tensor_split((self._size,))
            return rows

    patched.setattr(private_fit, "PoissonBatches", Shuffled)


def quiet_records_twice(patched: pytest.MonkeyPatch) -> None:
    whole = private_fit.GradientClipper.sum

    def summed(self: Any, x: torch.Tensor, targets: torch.Tensor, *how: Any) -> Any:
        found, is_quiet_B = whole(self, x, targets, *how), x.flatten(1).norm(dim=1) < 1
        more = whole(self, x[is_quiet_B], targets[is_quiet_B])
        torch._foreach_add_(found.gradients, more.gradients)
        return found

    patched.setattr(private_fit.GradientClipper, "sum", summed)


def one_cell_exact(patched: pytest.MonkeyPatch) -> None:
    whole = private_fit.LaplaceNoise.take
    patched.setattr(
        private_fit.LaplaceNoise, "take", lambda self, size: whole(self, size) * (np.arange(size) < size - 1)
    )


def second_cell_twice(patched: pytest.MonkeyPatch) -> None:
    whole = raco_dp.PricedLoss._summed
    patched.setattr(
        raco_dp.PricedLoss,
        "_summed",
        lambda self, *given: whole(self, *given) * torch.tensor([1.0, 2.0])[:, None],
    )


def counts_by(change: Callable[[Any, Any], Any]) -> Fault:
    def fault(patched: pytest.MonkeyPatch) -> None:
        whole = dp_fair_learning.add_laplace
        patched.setattr(dp_fair_learning, "add_laplace", lambda exact, **how: change(exact, whole(exact, **how)))

    return fault


# Of the right mean square over all numbers and releases, and yet they hide nothing.
SHAPES: list[tuple[str, dict[str, Any], str, Fault, str]] = [
    ("weighted_votes", {}, "no noise on the number of records", sums_by(exact_column(0), "class"), "one place"),
    ("weighted_votes", {}, "no noise on one coordinate", sums_by(exact_column(7), "class"), "one place"),
    ("weighted_votes", {}, "classes share their noise", sums_by(same_in_all_rows, "class"), "go together"),
    ("weighted_votes", {}, "one noise for every release", sums_by(same_in_every_release, "class"), "drawn once"),
    ("weighted_votes", {}, "noise drawn from records", sums_by(drawn_from_the_records, "class"), "two draws"),
    ("weighted_votes", {}, "rounded afterwards", sums_by(rounded_afterwards, "class"), "this far from 0"),
    ("weighted_votes", {}, "even noise", sums_by(even_noise, "class"), "divisible by 2"),
    ("weighted_votes", {}, "noise cut off", sums_by(cut_noise, "class"), "this far from 0"),
    ("weighted_votes", {}, "records at the bound twice", records_at_the_bound_twice, "one unit adds"),
    ("weighted_votes", {}, "centred by their mean", centred_by_their_mean, "one unit adds"),
    ("weighted_votes", {"persons": True}, "persons by label", persons_shortened_by_label, "one unit adds 1.41"),
    ("residual_votes", {}, "one noise for all rounds", one_noise_for_all_rounds, "residuals 1: its numbers"),
    (
        "residual_votes",
        {},
        "no noise on one coordinate",
        sums_by(exact_column(7), "residuals 2"),
        "residuals 2: at one",
    ),
    ("weighted_votes", {}, "Laplace instead of Gaussian", sums_by(laplace_shaped, "class"), "not distributed"),
    ("weighted_votes", {}, "uniform instead of Gaussian", sums_by(even_shaped, "class"), "not distributed"),
    ("ada_ssp", {}, "one eigenvalue's noise", sums_by(same_in_every_release, "eigenvalue"), "least eigenvalue: at one"),
    ("record_votes", {}, "even noise", sums_by(even_noise, "prototype"), "divisible by 2"),
    ("record_votes", {"persons": True}, "persons by label", persons_shortened_by_label, "one unit adds 2.00"),
    ("pate", {}, "labels share their noise", votes_by(first_for_all, of_check=False), "answers: "),
    ("pate", {}, "checks share their noise", votes_by(first_for_all, of_check=True), "threshold checks: "),
    ("pate", COUNTED, "checks and counts share theirs", one_noise_for_check_and_counts, "answers: "),
    ("pate", {}, "labels have the noise of their check", one_noise_for_check_and_counts, "answers: "),
    ("dp_sgd", {}, "no noise on one parameter", noise_on_all_parameters_but_one, "gradients: at one place"),
    ("dp_sgd", {}, "weights moved by exact sums", weights_moved_by_exact_sums, "weights move by something else"),
    ("dp_sgd", RENYI, "shuffled batches", shuffled_batches, "no Poisson samples"),
    ("dp_sgd", {}, "quiet records twice", quiet_records_twice, "gradients: one unit adds"),
    ("dp_sgd", {}, "Laplace steps", laplace_steps, "gradients: its noise is not distributed"),
    ("dp_fermi", {}, "matrices' noise used twice", matrices_reused(2), "matrices: two draws"),
    ("dp_fermi", {}, "matrices' noise drawn once", matrices_reused(math.inf), "matrices: two draws"),
    ("raco_dp", {}, "one cell exact", one_cell_exact, "histograms: at one place"),
    ("raco_dp", {}, "one cell counts twice", second_cell_twice, "histograms: one unit adds 2.00"),
    (
        "dp_postprocessing",
        {},
        "rounded to hundreds",
        counts_by(lambda _, noisy: np.rint(noisy / 100) * 100),
        "counts: ",
    ),
    (
        "dp_postprocessing",
        {},
        "one noise for all counts",
        counts_by(lambda exact, noisy: exact + (noisy - exact).flat[0]),
        "counts: its numbers",
    ),
]


def few_releases(method: str) -> dict[str, Any]:
    """Options of an audit with a quarter of the canaries or less, which show a fault's noise as clearly; the steps of
    a few trainings show theirs."""
    minutes = {"dp_sgd": 0.02, "raco_dp": 0.02, "dp_fermi": 0.05}
    return {"num_canaries": 2500 if method == "residual_votes" else 5000, "minutes": minutes.get(method, 60.0)}


@pytest.mark.parametrize(
    ("method", "more", "fault", "words"),
    [
        pytest.param(
            method,
            more,
            fault,
            words,
            id=f"{method}: {what}",
            marks=marks(method, what),
        )
        for method, more, what, fault, words in SHAPES
    ],
)
def test_noise_that_hides_nothing_and_units_that_count_too_much_are_found(
    runs: Any,  # noqa: F811
    method: str,
    more: dict[str, Any],
    fault: Fault,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, options = runs(method, **(SETTINGS.get(method, {}) | more)), few_releases(method)
    if fault is shuffled_batches:  # the sizes of the batches of two trainings show it
        options["minutes"] = 0.002
    fault(monkeypatch)
    found = audited(root, wanted=lambda each: any(words in one for one in each.findings), **options)
    assert any(words in each for each in found.findings)


FAULTS: list[tuple[str, str, Fault, str]] = [
    ("residual_votes", "no noise in the rounds", sums_with(0.0, "residuals"), "residuals 0"),
    ("residual_votes", "rounds that never ask", rounds_that_never_ask_for_noise, "residuals 0"),
    ("residual_votes", "no noise in one round", sums_with(0.0, "residuals 3"), "residuals 3"),
    ("residual_votes", "two thirds in one round", sums_with(2 / 3, "residuals 1"), "residuals 1"),
    ("residual_votes", "two thirds in the sums", sums_with(2 / 3, "sums"), "sums"),
    ("weighted_votes", "two thirds of the noise", sums_with(2 / 3, "class"), "sums"),
    ("record_votes", "two thirds of the noise", sums_with(2 / 3, "prototype"), "table of votes"),
    ("ada_ssp", "no noise on the eigenvalue", sums_with(0.0, "eigenvalue"), "least eigenvalue"),
    ("ada_ssp", "two thirds on the eigenvalue", sums_with(2 / 3, "eigenvalue"), "least eigenvalue"),
    ("ada_ssp", "exact moments off the diagonal", exact_off_the_diagonal, "off the diagonal"),
    ("pate", "no noise in the check", votes_with(0.0, of_check=True), "threshold checks"),
    ("pate", "half the noise in the check", votes_with(0.5, of_check=True), "threshold checks"),
    ("pate", "no noise in the labels", votes_with(0.0, of_check=False), "answers"),
    ("pate", "two thirds in the labels", votes_with(2 / 3, of_check=False), "answers"),
    ("pate", "votes count twice", votes_twice, "answers"),
    ("dp_sgd", "two thirds of the noise", steps_with(2 / 3), "gradients"),
    ("dp_sgd", "clip twice", clip_twice, "gradients"),
    ("dp_sgd", "sampled twice as often", sampled_twice_as_often, "gradients"),
    ("raco_dp", "no noise on histograms", laplace_with(0.0), "histograms"),
    ("raco_dp", "two thirds on histograms", laplace_with(2 / 3), "histograms"),
    ("dp_fermi", "no noise on matrices", matrices_with(0.0), "matrices"),
    ("dp_fermi", "two thirds on matrices", matrices_with(2 / 3), "matrices"),
]


@pytest.mark.parametrize(
    ("method", "fault", "of_release"),
    [
        pytest.param(method, fault, name, id=f"{method}: {what}", marks=marks(method, what))
        for method, what, fault, name in FAULTS
    ],
)
def test_a_fault_in_one_of_several_releases_is_found_there(
    runs: Any,  # noqa: F811
    method: str,
    fault: Fault,
    of_release: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = runs(method, **SETTINGS[method])
    fault(monkeypatch)
    found = audited(root, wanted=is_refuted, **few_releases(method))
    assert found.refuted
    assert any(of_release in each for each in found.findings)


def pictures(count: int, name: str) -> Split:
    draws = np.random.default_rng(count)
    x, z = draws.integers(0, 256, (count, 1, 8, 8)).astype(np.uint8), draws.integers(0, 2, count)
    y = (x.mean(axis=(1, 2, 3)) > 127).astype(np.int64)
    ids = [f"{name}{row}" for row in range(count)]
    return Split(x=torch.from_numpy(x), y=torch.from_numpy(y), z=torch.from_numpy(z), record_id=ids)


@pytest.mark.slow
def test_a_training_with_convolutions_shows_its_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"private": 300, "public": 50, "validation": 20, "test": 60}
    dataset = replace(two_groups(), kind="image", **{part: pictures(count, part) for part, count in parts.items()})
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    settings = {
        "student": {"model": {"name": "cnn"}},
        "target": {"epsilon": 4.0},
        "dp_sgd": {"epochs": 2, "batch_size": 50, "num_records": 300},
        "out": tmp_path / "run",
    }
    root = run_method(configured(settings, method="dp_sgd"), QUIET, dataset).root
    correct = audited(root, wanted=holds, minutes=0.05)
    assert not correct.refuted and correct.has_power
    with monkeypatch.context() as patched:
        steps_with(2 / 3)(patched)
        found = audited(root, wanted=is_refuted, minutes=0.05)
    assert any("its noise is" in each for each in found.findings)


COUNTS = {"release": "counts", "mechanism": {"threshold": float("-inf")}}
# As many teachers as give a release its 256 canaries.
SMALL_TEACHERS = {
    "num_private": 2400,
    "teachers": {"num_teachers": 1024, "model": {"name": "ridge"}},
    "ray": {"num_actors": 0},
    "target": {"epsilon": 1.0},
}
SLOW, CAMPAIGN = pytest.mark.slow, pytest.mark.campaign
RECORD, PERSON = {"persons": False}, {"persons": True}
LABELS = {"aggregator": {"release": "label"}}


def of_small_teachers(runs: Any, method: str, **more: Any) -> Any:  # noqa: F811
    own = {} if method == "teacher_votes" else {"aggregator": COUNTS | more.get("aggregator", {})}
    return runs(method, **SMALL_TEACHERS | more | own)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        pytest.param("fairpate", RECORD, marks=pytest.mark.campaign),
        pytest.param("fairpate", PERSON, marks=pytest.mark.slow),
        pytest.param("pate", {"aggregator": {"keep": 0.5}}, marks=pytest.mark.campaign),
        pytest.param("pate_s_pre", RECORD, marks=pytest.mark.campaign),
        pytest.param("pate_s_in", RECORD, marks=pytest.mark.campaign),
        pytest.param("pate", LABELS, marks=pytest.mark.slow),
        pytest.param("teacher_votes", RECORD, marks=pytest.mark.campaign),
        pytest.param("teacher_votes", PERSON, marks=pytest.mark.campaign),
    ],
)
def test_both_releases_of_small_teachers_are_attacked(runs: Any, method: str, more: dict[str, Any]) -> None:  # noqa: F811
    found = audited(of_small_teachers(runs, method, **more), wanted=holds)
    (step,) = found.releases
    assert not found.refuted and found.has_power
    assert [single.name for single in step.singles] == ["answers", "table by score"] and len(step.events) == 2
    assert step.found.guesses.num_canaries >= CANARIES and step.control_noise == 0.5
    # Together as much as the statement claims, or less where room is kept; the control of each is further apart.
    assert math.hypot(*(single.claim.mu or 0 for single in step.singles)) <= 1.01 * gaussian_mu(
        found.epsilon, found.delta
    )
    for single in step.singles:
        assert single.found is not None and single.control is not None
        assert max(single.control.bounds(found.delta)) > max(single.found.bounds(found.delta))
    # In the table, one unit has exactly one unit of mass: a person's share of it is rounded down.
    assert step.singles[1].reach == pytest.approx(1.0, abs=1e-4)


def once_per_record(patched: pytest.MonkeyPatch) -> None:
    """The records of a person do not share its mass."""
    whole = Bins.table
    patched.setattr(
        Bins,
        "table",
        lambda self, phi_NW, labels_N, person_N=None: whole(
            self, phi_NW, labels_N, None if person_N is None else np.arange(len(labels_N))
        ),
    )


@pytest.mark.parametrize(
    ("method", "more", "fault", "of_release"),
    [
        pytest.param(method, more, fault, name, id=f"{method}: {what}", marks=mark)
        for method, more, what, fault, name, mark in (
            ("fairpate", RECORD, "two thirds in the counts", votes_with(2 / 3, of_check=False), "answers", SLOW),
            ("fairpate", RECORD, "two thirds in the table", sums_with(2 / 3, "bin"), "table by score", ()),
            ("fairpate", RECORD, "no noise in the table", sums_with(0.0, "bin"), "table by score", CAMPAIGN),
            ("fairpate", PERSON, "a person once per record", once_per_record, "table by score", SLOW),
            (
                "pate",
                LABELS,
                "two thirds in the table beside labels",
                sums_with(2 / 3, "bin"),
                "table by score",
                CAMPAIGN,
            ),
            ("teacher_votes", PERSON, "two thirds in the counts", sums_with(2 / 3, "query"), "answers", SLOW),
            ("teacher_votes", PERSON, "two thirds in the table", sums_with(2 / 3, "bin"), "table by score", CAMPAIGN),
            ("teacher_votes", PERSON, "a person once per record", once_per_record, "table by score", CAMPAIGN),
        )
    ],
)
def test_a_fault_in_either_release_of_small_teachers_is_found_there(
    runs: Any,  # noqa: F811
    method: str,
    more: dict[str, Any],
    fault: Fault,
    of_release: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = of_small_teachers(runs, method, **more)
    fault(monkeypatch)
    other = {"answers": "table by score", "table by score": "answers"}[of_release]

    def is_found_there(found: Audit) -> bool:
        return any(of_release in each for each in found.findings) and not any(other in each for each in found.findings)

    assert is_found_there(audited(root, wanted=is_found_there, num_canaries=5000))


@pytest.mark.parametrize(
    "method", [pytest.param("fairpate", marks=CAMPAIGN), pytest.param("teacher_votes", marks=SLOW)]
)
def test_the_table_of_the_run_s_own_records_is_attacked(
    runs: Any,  # noqa: F811
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = of_small_teachers(runs, method, **PERSON)
    monkeypatch.setattr(run_audit, "load_for", lambda *_: two_groups(True, SMALL_TEACHERS["num_private"]))
    monkeypatch.setattr(run_audit, "require_data_by_name", lambda _: None)
    found = audited(root, wanted=holds, num_canaries=10_000, on_private=True)
    assert not found.refuted and found.has_power and found.records == "private"
    assert "Do not publish" in (root / "private" / "audit.html").read_text()


def correct(delta: float, epsilons: tuple[float, ...], num_canaries: int, *, noise: float = 1.0) -> Shadows:
    """Ideal releases of these claims, with the scores and the noise of a correct method, or the share ``noise``."""
    claims = [IdealAttack(epsilon=gaussian_epsilon(mu, delta), mu=mu) for mu in epsilons]
    draws = np.random.default_rng(3)

    def play(included_M: Any) -> Seen:
        noise_SM = noise * draws.normal(size=(len(claims), num_canaries))
        gain_SM = np.tile([[claim.mu] for claim in claims], num_canaries)
        kinds = [
            tuple(NoiseSeen.of_squares(float((row[of] ** 2).sum()), int(of.sum())) for of in (included_M, ~included_M))
            for row in noise_SM
        ]
        drawn = tuple(Drawn(scores_RP=row[None]) for row in noise_SM)
        return Seen(scores_SM=noise_SM + gain_SM * included_M, gains_SM=gain_SM, noise=tuple(kinds), draws=drawn)

    events = (PoissonGaussians(count=1, noise_multiplier=1.0, sampling_rate=1.0),)
    releases = tuple(Claimed(name=f"release {k}", claim=claim, reach=1.0) for k, claim in enumerate(claims))
    return Shadows(attack="", events=events, num_canaries=num_canaries, releases=releases, play=play, is_gaussian=True)


def simulated(mus: tuple[float, ...], *, num_canaries: int = 2000, noise: float = 1.0) -> Audit:
    delta = 1e-5
    epsilon = gaussian_epsilon(math.hypot(*mus), delta)
    shadows, control = correct(delta, mus, 200, noise=noise), correct(delta, tuple(2 * mu for mu in mus), 200)
    options: dict[str, Any] = {"num_canaries": num_canaries, "minutes": 60.0, "centred": False}
    options |= {"epsilon": epsilon, "delta": delta}
    released = run_audit.attacked(shadows, control, "private", QUIET, **options)
    return Audit(
        method="made",
        unit="record",
        relation="add or remove one",
        delta=delta,
        epsilon=epsilon,
        settings="",
        records="made",
        not_attacked=(),
        releases=(released,),
    )


def test_all_tests_of_an_audit_together_refute_a_correct_method_as_rarely_as_stated() -> None:
    """Five releases that are attacked ideally: 56 tests, each of which could raise a false alarm."""
    runs_ = 80
    alarms = sum(simulated((0.5, 0.4, 0.4, 0.3, 0.3), num_canaries=400).refuted for _ in range(runs_))
    assert stats.binom.sf(alarms - 1, runs_, 1 - SURE) > 1e-3


@pytest.mark.parametrize("noise", [0.5, 2 / 3])
def test_the_power_that_is_stated_does_not_depend_on_the_noise_that_the_code_draws(noise: float) -> None:
    right, broken = simulated((0.3, 0.2)), simulated((0.3, 0.2), noise=noise)
    assert right.has_power and not right.refuted
    for (_, *of_right), (_, *of_broken) in zip(right.powers(), broken.powers(), strict=True):
        assert of_broken == pytest.approx(of_right, abs=0.02)
    assert broken.refuted


def test_the_stated_power_is_the_share_of_faults_that_are_found() -> None:
    rng, count, confidence = np.random.default_rng(1), 120, 0.999
    found = [
        NoiseSeen.of_squares(float(((2 / 3 * rng.normal(size=count)) ** 2).sum()), count).is_off(confidence)
        for _ in range(2000)
    ]
    assert np.mean(found) == pytest.approx(NoiseSeen.of_squares(0.0, count).power(confidence), abs=0.03)
    claim, delta, canaries = IdealAttack(epsilon=gaussian_epsilon(0.5, 1e-5), mu=0.5), 1e-5, 600
    attack = replace(claim, mu=0.9)
    planned = attack.power(claim, num_canaries=canaries, delta=delta, confidence=confidence)
    proved = []
    for _ in range(400):
        included = rng.random(canaries) < 0.5
        separation = run_audit.separate(rng.normal(size=canaries) + 0.9 * included, included)
        proved.append(separation.mu_lower_bound(confidence) > 0.5)
    assert 0.3 < planned < 1 and np.mean(proved) == pytest.approx(planned, abs=0.08)


def test_what_an_attack_does_not_see_has_no_power() -> None:
    """No noise that is seen, no reach, and a control that scores do not follow: nothing would have been found."""
    audit = simulated((0.5,))
    (step,) = audit.releases
    (single,) = step.singles
    alone = replace(single, noise=(), reach=None)
    assert min(alone.powers(audit.delta, audit.each(SURE))) > 0.9
    nothing = replace(single.control.separation, t=0.1) if single.control and single.control.separation else None
    assert nothing is not None and single.control is not None
    blind = replace(alone, control=AttackResult(guesses=single.control.guesses, separation=nothing))
    weak = replace(audit, releases=(replace(step, singles=(blind,)),))
    assert not weak.has_power and weak.power_words.startswith("No power") and "release 0" in weak.power_words
    assert "No power" in audit_page(weak)


def test_what_was_not_attacked_or_shows_too_little_is_said_in_one_sentence_each() -> None:
    audit = simulated((0.5,), num_canaries=10_000)
    (step,) = audit.releases
    assert audit.has_power and audit.unseen == () and "No power" not in audit.power_words
    skipped = replace(audit, not_attacked=("the noise of a site",))
    assert not skipped.has_power and skipped.power_words.startswith("No power over the noise of a site: it did not")
    few, hidden = simulated((0.5,), num_canaries=1000), replace(step, unseen=("a label with the noise of its check",))
    for seen, words in (
        (few, "noise of another shape than stated, of the same size (release 0)"),
        (replace(audit, releases=(hidden,)), "a label with the noise of its check"),
    ):
        assert seen.has_power and seen.unseen == (words,) and f" No power against {words}." in audit_page(seen)
    assert Audit.from_json(replace(audit, releases=(hidden,)).to_json()).unseen == hidden.unseen


def test_a_control_further_apart_than_its_plan_and_too_long_a_canary_are_findings() -> None:
    audit = simulated((0.3, 0.2))
    (step,) = audit.releases
    one, other = step.singles
    assert one.control is not None and one.control.separation is not None
    far = replace(one, control=replace(one.control, separation=replace(one.control.separation, t=90.0)))
    long = replace(other, reach=2.0)
    found = replace(audit, releases=(replace(step, singles=(far, long)),))
    assert found.refuted and len(found.findings) == 2
    assert "control is far from its plan" in found.findings[0] and "2.00 times what its bound" in found.findings[1]
    assert all(each in audit_page(found) for each in found.findings)
    assert Audit.from_json(found.to_json()) == found


@pytest.mark.slow
def test_the_control_of_a_training_has_half_its_noise_at_its_own_sampling_rate(runs: Any) -> None:  # noqa: F811
    """Also where the number of records is not declared, and only the sampling rate shows it."""
    root = runs("dp_sgd", dp_sgd={"epochs": 1, "batch_size": 60})
    audit = audited(root, wanted=lambda found: not found.refuted, num_canaries=20_000, minutes=0.05)
    (step,) = audit.releases
    assert not audit.refuted and step.control_noise == pytest.approx(0.5, abs=0.01)
    (single,) = step.singles
    assert single.reach == pytest.approx(1.0, abs=1e-3)
    noise, samples = single.noise[1], single.noise[2]
    assert noise.value == pytest.approx(1.0, abs=0.02)
    assert samples.what == "samples" and samples.expected == pytest.approx(0.9) and samples.value > 0.85
