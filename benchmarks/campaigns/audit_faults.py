"""Plant random faults in releases, audit each at few canaries, and count what is found.

    python benchmarks/campaigns/audit_faults.py [--faults 30] [--seed 0] [--canaries 2000] [--only METHOD ...] [--json]

Each fault is drawn: a method, one or two of its releases, and what goes wrong there, such as less noise, noise on half
of the draws, noise that numbers share, or a unit that counts too much. None of the kinds is among those of the tests
(tests/run/test_audit_of_each_release.py); shares of the noise are drawn from 0 to 2/3, the least that an audit promises
to find. Correct methods are audited in between. A fault counts as

- found: the audit refutes the claim,
- no power: it does not, and says "No power" over the release or over noise of another shape,
- missed: it says that it would have found two thirds of the noise and a unit that counts twice.

The campaign ends with an error if a fault is missed, or if more correct methods are refuted than one in a hundred
explains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

# Before the tests' folders, one of which is called `aggregator` too.
import aggregator.mechanism
import fairpate
import fairpate.methods.pate
import fairpate.methods.record_votes
import fairpate.methods.residual_votes
import fairpate.methods.teacher_votes
import fairpate.nn.private_fit
from fairpate.methods.base import configured
from fairpate.report.run_page import Audit
from fairpate.run.audit import audit_run
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

_ROOT = Path(fairpate.__file__).parents[1]
sys.path += [str(_ROOT / "tests" / "run"), str(_ROOT / "tests")]
QUIET = Reporter(quiet=True)
# Names are replaced that these modules do not export.
mechanism: Any = aggregator.mechanism
private_fit: Any = fairpate.nn.private_fit
residual_votes: Any = fairpate.methods.residual_votes
Planted = Callable[[ExitStack], None]
Change = Callable[[Any, Any, float, np.random.Generator], Any]
"""Returns what is released from the exact numbers, the noisy ones, the standard deviation and the draws of a fault."""


def _less(share: float) -> Change:
    return lambda exact, noisy, *_: exact + np.rint(share * (noisy - exact)).astype(np.int64)


def _on_some_draws(exact: Any, noisy: Any, _: float, draws: np.random.Generator) -> Any:
    return noisy if draws.random() < 0.5 else exact


def _mirrored(exact: Any, noisy: Any, *_: Any) -> Any:
    """The second half of the numbers has the noise of the first with the other sign."""
    noise = (noisy - exact).reshape(-1)
    half = len(noise) // 2
    noise[half : 2 * half] = -noise[:half]
    return exact + noise.reshape(exact.shape)


def _periodic(exact: Any, noisy: Any, *_: Any) -> Any:
    noise = (noisy - exact).reshape(-1)
    period = max(1, len(noise) // 3)
    return exact + np.resize(noise[:period], len(noise)).reshape(exact.shape)


def _one_sign(exact: Any, noisy: Any, _: float, draws: np.random.Generator) -> Any:
    return exact + np.abs(noisy - exact) * draws.choice([-1, 1])


def _only_where_records_are(exact: Any, noisy: Any, *_: Any) -> Any:
    return np.where(exact == 0, exact, noisy)


def _only_where_none_are(exact: Any, noisy: Any, *_: Any) -> Any:
    return np.where(exact == 0, noisy, exact)


def _two_steps(exact: Any, _: Any, stddev: float, draws: np.random.Generator) -> Any:
    """Of the right mean square, and never near 0 or far from it."""
    return exact + np.rint(stddev * draws.choice([-1.0, 1.0], exact.shape)).astype(np.int64)


def _triangle(exact: Any, _: Any, stddev: float, draws: np.random.Generator) -> Any:
    drawn = draws.uniform(-1, 1, (2, *exact.shape)).sum(axis=0) * stddev * np.sqrt(1.5)
    return exact + np.rint(drawn).astype(np.int64)


def _counted(factor: float) -> Change:
    return lambda exact, noisy, *_: noisy + np.rint((factor - 1) * exact).astype(np.int64)


CHANGES: dict[str, Callable[[np.random.Generator], Change]] = {
    "less noise": lambda draws: _less(draws.uniform(0, 2 / 3)),
    "noise on half of the draws": lambda _: _on_some_draws,
    "mirrored noise": lambda _: _mirrored,
    "periodic noise": lambda _: _periodic,
    "one sign for all": lambda _: _one_sign,
    "noise only where records are": lambda _: _only_where_records_are,
    "noise only where none are": lambda _: _only_where_none_are,
    "two values": lambda _: _two_steps,
    "triangular noise": lambda _: _triangle,
    "counted too much": lambda draws: _counted(draws.uniform(1.5, 3)),
}


def in_sums(which: str, kind: str, draws: np.random.Generator) -> Planted:
    """The fault ``kind`` in sums whose name begins with ``which``."""
    change, whole = CHANGES[kind](draws), list[Any]()

    def with_noise(table: Any, *, stddev: float, row: str, **how: Any) -> Any:
        if not row.startswith(which):
            return whole[0](table, stddev=stddev, row=row, **how)
        REACHED[which] += 1
        if how.get("noisy_sum") is not None:
            # A caller that draws its own noise sees a fault in the numbers, and none in the noise.
            table = np.rint(change(table, table, 0.0, draws)).astype(np.int64) if kind == "counted too much" else table
            return whole[0](table, stddev=stddev, row=row, **how)
        return change(table, whole[0](table, stddev=stddev, row=row, **how), stddev, draws)

    def plant(stack: ExitStack) -> None:
        # Around an earlier fault, if there are two.
        whole[:] = [residual_votes.with_noise]
        for name in ("record_votes", "residual_votes", "pate", "teacher_votes"):
            stack.enter_context(mock.patch(f"fairpate.methods.{name}.with_noise", with_noise))

    return plant


def in_votes(release: str, kind: str, draws: np.random.Generator) -> Planted:
    """The fault in the noise of threshold checks (one number for each query), or of answers (one for each class)."""
    whole, of_check = list[Any](), release == "checks"
    share = draws.uniform(0, 2 / 3)

    def changed(noise: Any, stddev: float) -> Any:
        if kind == "less noise":
            return np.rint(share * noise).astype(np.int64)
        if kind == "noise on half of the draws":
            return noise * (draws.random(len(noise)) < 0.5).reshape(-1, *[1] * (noise.ndim - 1))
        if kind == "mirrored noise":
            half = len(noise) // 2
            return np.concatenate([noise[:half], -noise[: len(noise) - half]])
        if kind == "periodic noise":
            return noise[np.arange(len(noise)) % max(1, len(noise) // 3)]
        if kind == "one sign for all":
            return np.abs(noise) * draws.choice([-1, 1])
        return np.rint(stddev * draws.choice([-1.0, 1.0], noise.shape)).astype(np.int64)

    def discrete_gaussians(stddev: float, words: Any, source: Any) -> Any:
        noise = whole[0](stddev, words, source)
        if (words.ndim == 1) is not of_check:
            return noise
        REACHED[release] += 1
        return changed(noise, stddev)

    def plant(stack: ExitStack) -> None:
        whole[:] = [mechanism.discrete_gaussians]
        stack.enter_context(mock.patch.object(mechanism, "discrete_gaussians", discrete_gaussians))

    return plant


def in_steps(kind: str, draws: np.random.Generator) -> Planted:
    """The fault in the noise, the clipping or the samples of a training."""
    add_to, clipped, share = private_fit.GaussianNoise.add_to, private_fit.GradientClipper.sum, draws.uniform(0, 2 / 3)
    factor, calls, kept = draws.uniform(1.5, 3), [0], list[Any]()

    def noise(self: Any, sums: Any, stddev: float) -> None:
        calls[0] += 1
        REACHED["gradients"] += 1
        if kind == "less noise":
            add_to(self, sums, share * stddev)
        elif kind == "noise in every second step":
            add_to(self, sums, stddev * (calls[0] % 2))
        elif kind == "noise of the step before last":
            drawn = [torch.zeros_like(each) for each in sums]
            add_to(self, drawn, stddev)
            # Each noise is used in two steps.
            kept.append(drawn)
            used = kept[-3] if len(kept) % 4 in (3, 0) and len(kept) > 2 else drawn
            for each, own in zip(sums, used, strict=True):
                each.add_(own.reshape(each.shape))
        elif kind == "one sign for all":
            before = [each.clone() for each in sums]
            add_to(self, sums, stddev)
            sign = draws.choice([-1.0, 1.0])
            for each, was in zip(sums, before, strict=True):
                each.copy_(was + sign * (each - was).abs())
        else:
            add_to(self, sums, stddev)

    def summed(self: Any, *given: Any) -> Any:
        found = clipped(self, *given)
        if kind == "clipped too late":
            torch._foreach_mul_(found.gradients, factor)
        return found

    class Fixed(private_fit.PoissonBatches):  # type: ignore[misc]
        """Every sample holds the last record."""

        def __init__(self, count: int, rate: float, source: Any) -> None:
            super().__init__(count, rate, source)
            self._last = count - 1

        def next(self) -> torch.Tensor:
            return torch.unique(torch.cat([super().next(), torch.tensor([self._last])]))

    def plant(stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(private_fit.GaussianNoise, "add_to", noise))
        stack.enter_context(mock.patch.object(private_fit.GradientClipper, "sum", summed))
        if kind == "one record in every sample":
            stack.enter_context(mock.patch.object(private_fit, "PoissonBatches", Fixed))

    return plant


REACHED = Counter[str]()
"""How often a planted fault was reached, by release."""
OF_ONE_NUMBER = ("less noise", "noise on half of the draws", "two values", "triangular noise")
OF_VOTES = (
    "less noise",
    "noise on half of the draws",
    "mirrored noise",
    "periodic noise",
    "one sign for all",
    "two values",
)
OF_STEPS = (
    "less noise",
    "noise in every second step",
    "noise of the step before last",
    "one sign for all",
    "clipped too late",
    "one record in every sample",
)
RELEASES: dict[str, tuple[str, ...]] = {
    "weighted_votes": ("class",),
    "record_votes": ("prototype",),
    "ada_ssp": ("sums", "eigenvalue"),
    "residual_votes": ("sums", "residuals 0", "residuals 2", "residuals 4"),
    "pate": ("answers", "checks"),
    "dp_sgd": ("gradients",),
}


def drawn_fault(method: str, draws: np.random.Generator) -> tuple[str, list[Planted]]:
    """Return a fault of one or two releases of ``method``, in words and as what plants it."""
    count = min(len(RELEASES[method]), int(draws.integers(1, 3)))
    words, planted = [], list[Planted]()
    for release in draws.permutation(RELEASES[method])[:count].tolist():
        if method == "dp_sgd":
            kind = str(draws.choice(OF_STEPS))
            planted.append(in_steps(kind, draws))
        elif method == "pate":
            kind = str(draws.choice(OF_VOTES))
            planted.append(in_votes(release, kind, draws))
        else:
            kind = str(draws.choice(OF_ONE_NUMBER if release == "eigenvalue" else list(CHANGES)))
            planted.append(in_sums(release, kind, draws))
        words.append(f"{release}: {kind}")
    return "; ".join(words), planted


def campaign(num_faults: int, seed: int, num_canaries: int, methods: list[str]) -> list[dict[str, Any]]:
    """Audit ``num_faults`` faults, and a correct method after every fifth; return a record of each."""
    from test_audit_of_each_release import SETTINGS, few_releases  # type: ignore[import-not-found]
    from test_run_audit import LINEAR, two_groups  # type: ignore[import-not-found]

    draws, found, runs = np.random.default_rng(seed), list[dict[str, Any]](), dict[str, Path]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAIRPATE_STATE"] = str(Path(folder) / "state")
        for number in range(num_faults):
            method = methods[number % len(methods)]
            if method not in runs:
                settings = LINEAR | SETTINGS[method] | {"out": Path(folder) / method}
                runs[method] = run_method(configured(settings, method=method), QUIET, two_groups()).root
            words, planted = drawn_fault(method, draws)
            for fault, plants in [(words, planted), *([("", list[Planted]())] if number % 5 == 4 else [])]:
                began_s = time.monotonic()
                REACHED.clear()
                with ExitStack() as stack:
                    for plant in plants:
                        plant(stack)
                    # A training of few epochs needs more: fewer are refused.
                    least = 4000 if method == "dp_sgd" else 0
                    options = few_releases(method) | {"num_canaries": max(num_canaries, least)}
                    audit = audit_run(runs[method], reporter=QUIET, **options)[0]
                if unreached := [each for each in filter(None, fault.split("; ")) if not REACHED[each.split(": ")[0]]]:
                    raise RuntimeError(f"{method}: {', '.join(unreached)} was planted where nothing passes.")
                outcome = _outcome(fault, audit)
                said = audit.findings[0] if audit.refuted else audit.power_words
                seconds = round(time.monotonic() - began_s, 1)
                found.append({"method": method, "fault": fault, "outcome": outcome, "said": said, "seconds": seconds})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def _outcome(fault: str, audit: Audit) -> str:
    if not fault:
        return "refuted" if audit.refuted else "holds"
    if audit.refuted:
        return "found"
    kinds = [each.rpartition(": ")[2] for each in fault.split("; ")]
    # Over the shape of noise, audits say separately whether they have power.
    is_shape = all(kind in ("two values", "triangular noise") for kind in kinds)
    return "no power" if not audit.has_power or (audit.unseen and is_shape) else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--only", nargs="+", default=list(RELEASES), choices=list(RELEASES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = campaign(given.faults, given.seed, given.canaries, given.only)
    of_faults = Counter(each["outcome"] for each in found if each["fault"])
    of_correct = Counter(each["outcome"] for each in found if not each["fault"])
    summary = {"faults": dict(of_faults), "correct": dict(of_correct), "seed": given.seed, "canaries": given.canaries}
    print(json.dumps(summary | {"audits": found} if given.json else summary, indent=1))
    if of_faults["missed"] or of_correct["refuted"] > 1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
