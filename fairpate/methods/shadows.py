"""What attacks on the releases of methods are made of: made-up records with canaries, scores, and noise that is seen.

A shadow release is drawn for an audit by a method under the settings of a run, from made-up records in the form of the
run's data (:mod:`fairpate.run.audit`). A canary is a record that the attacker looks for. It is loud: its features lie
far beyond every bound, so that it adds as much as a record may. The other records are at the origin, where they hide it
least.

A method's class has its ``attack``; the attacks that several methods share are in :mod:`attack_on_sums`,
:mod:`attack_on_steps` and :mod:`attack_on_votes`. They import torch, so a method imports them when it is attacked.

Shapes: M canaries of one release, N records, W numbers.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairpate.config import EmbeddingConfig
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.data.embedding import Embedding
from fairpate.methods.base import Method, Training
from fairpate.privacy.audit_bounds import Coins, Drawn, IdealAttack, NoiseSeen, Numbers, Seen, gaussian_epsilon
from fairpate.privacy.discrete_gaussian import log_masses
from fairpate.releases.directory import DataRecord, RunDirectory
from fairpate.terminal import Reporter
from fairpate.types import FloatArray, IntArray, UsageError

LOUD = 20.0  # a canary's feature: far beyond every radius and clipping bound
COPIES = 3  # records of a canary, where persons are protected
MOST_POOL, MOST_EACH = 1000, 256  # public records, and canaries of one release
OTHERS, FEW_OTHERS = 1000, 100  # made-up records of a shadow release; fewer where they add next to nothing
MANY = 100  # steps or queries, whose sum is nearly normal
_FINE = 10.0  # votes; the moments of wider discrete noise are those of a Gaussian
_ROUNDED = 1.001  # the events add a margin for rounded numbers


class AuditError(UsageError):
    """Raised if a run cannot be audited, or if its audit could prove nothing; the message gives reason and remedy."""


def gaussian_claim(norm: float, stddev: float, delta: float) -> IdealAttack:
    """Return the strongest attack on a Gaussian release to which a unit adds a vector of this ``norm``."""
    mu = norm / stddev * _ROUNDED
    return IdealAttack(epsilon=gaussian_epsilon(mu, delta), mu=mu)


def own_noise_of(shape: tuple[int, ...], stddev: float) -> IntArray:
    """Return noise that the audit draws itself, in whole numbers, by another generator than the code under test."""
    return np.rint(np.random.default_rng().normal(scale=stddev, size=shape)).astype(np.int64)


def squares_seen(noise: Numbers, stddev: float, *, kurtosis: float = 3.0) -> NoiseSeen:
    return NoiseSeen.of_squares(float(((noise / stddev) ** 2).sum()), noise.size, kurtosis=kurtosis)


def varied(facts: DataRecord, count: int, *, scale: float = 1.0) -> Tensor:
    """Return random features, drawn with a fixed seed, for ``count`` made-up records. They have the shape and kind that
    ``facts`` states for the run's own records."""
    generator, shape = np.random.default_rng(0), (count, *facts.record_shape)
    if facts.kind == "image":
        return torch.from_numpy(generator.integers(256, size=shape).astype(np.uint8))
    return torch.from_numpy(generator.normal(size=shape).astype(np.float32)) * scale


def made_records(x: Tensor, y: IntArray, z: IntArray, *, name: str, unit: str = "record", copies: int = 1) -> Split:
    """Return made-up records with features ``x``, labels ``y`` and groups ``z``, whose ids begin with ``name``. If
    ``unit`` is "person", each of them becomes a person with ``copies`` equal records."""
    names = [f"{name}-{number}" for number in range(len(x)) for _ in range(copies)]
    index = np.repeat(np.arange(len(x)), copies)
    return Split(
        x=x[torch.from_numpy(index)],
        y=torch.from_numpy(np.asarray(y, np.int64)[index]),
        z=torch.from_numpy(np.asarray(z, np.int64)[index]),
        record_id=[f"{person}-{row}" for row, person in enumerate(names)] if copies > 1 else names,
        person_id=names if unit == "person" else (),
    )


def joined(one: Split, other: Split) -> Split:
    joined: dict[str, Any] = {name: torch.cat([getattr(one, name), getattr(other, name)]) for name in "xyz"}
    return Split(**joined, record_id=[*one.record_id, *other.record_id], person_id=[*one.person_id, *other.person_id])


def labels_and_groups(facts: DataRecord, count: int) -> tuple[IntArray, IntArray]:
    """Return labels and groups of ``count`` canaries, so that every label occurs with every group."""
    of_group, label_M = np.divmod(np.arange(count), len(facts.label_names))
    return label_M, of_group % len(facts.group_names)


def _units(facts: DataRecord, x: Tensor, odd: Sequence[float]) -> list[Split]:
    """Return units of every kind that a bound must hold for, each by itself: of each label and group with the features
    of a row of ``x``, and with features that are ``odd`` multiples of them. Persons have one record, several equal
    ones, or many of all labels and groups."""
    count, is_person = max(len(facts.label_names) * len(facts.group_names), 2), facts.unit == "person"
    kinds = labels_and_groups(facts, count)
    x = x[torch.arange(count) % len(x)]
    scaled = [(x[:1] * of).to(x.dtype) for of in odd]
    others = [made_records(each, kinds[0][1:2], kinds[1][1:2], name="odd", unit=facts.unit) for each in scaled]
    copies = COPIES if is_person else 1
    each = made_records(x, *kinds, name="unit", unit=facts.unit, copies=copies)
    found = [each.take(list(range(row * copies, (row + 1) * copies))) for row in range(count)]
    if is_person:
        mixed = made_records(x.repeat(4, *[1] * (x.ndim - 1)), *(np.tile(kind, 4) for kind in kinds), name="mixed")
        found += [each.take([0]), replace(mixed, person_id=["mixed"] * len(mixed))]
    return [*found, *others]


def reach_of(
    facts: DataRecord,
    x: Tensor,
    exact: Callable[[Split], Mapping[str, Numbers]],
    *,
    odd: Sequence[float] = (0.0, 0.01, 1 / LOUD, math.nan),
    l1: Sequence[str] = (),
) -> dict[str, float]:
    """Return by name the largest L2 norm, or L1 norm for names in ``l1``, of what a unit adds to the ``exact`` numbers
    of another one, or of several others. ``x`` and its ``odd`` multiples are features of such units: loud ones over
    their factor lie at the bound. NaN counts as infinite."""
    kinds, found = len(facts.label_names) * len(facts.group_names), dict[str, float]()
    # They may add no more in the presence of others than they do alone.
    crowd = made_records(x[: kinds + 3], *labels_and_groups(facts, len(x[: kinds + 3])), name="crowd", unit=facts.unit)
    for others in (crowd.take([0]), crowd):
        without = exact(others)
        for unit in _units(facts, x, odd):
            with_it = exact(joined(others, unit))
            for name, numbers in with_it.items():
                moved = numbers.astype(np.float64) - without[name].astype(np.float64)
                length = float(np.linalg.norm(moved.ravel(), ord=1 if name in l1 else 2))
                found[name] = max(found.get(name, 0.0), math.inf if math.isnan(length) else length)
    return found


@dataclass(frozen=True, kw_only=True)
class ShadowData:
    """The data from which shadow releases are drawn: ``dataset`` with the public records, and two kinds of private
    records.

    ``others`` are included in every release. ``canaries`` are the records that the attacker looks for: a coin decides
    whether a release includes a canary. Each canary has ``copies`` consecutive rows.
    """

    dataset: Dataset
    others: Split
    canaries: Split
    copies: int

    def canary(self, number: int) -> Split:
        """Return the records of one canary."""
        return self.canaries.take(list(range(number * self.copies, (number + 1) * self.copies)))

    def with_canaries(self, included_M: Coins) -> Dataset:
        """Return the data set of one shadow release: its private records are ``others`` and those canaries (records
        that the attacker looks for) whose entries in ``included_M`` are true."""
        rows = np.flatnonzero(np.repeat(included_M, self.copies))
        return replace(self.dataset, private=joined(self.others, self.canaries.take(rows.tolist())))


def setting_of(
    facts: DataRecord,
    public_x: Tensor,
    canaries: tuple[Tensor, IntArray, IntArray],
    *,
    num_others: int,
    loaded: Dataset | None,
    is_embedded: bool,
) -> ShadowData:
    """Return the data from which shadow releases are drawn: public records with features ``public_x``, canaries, and
    other private records.

    ``canaries`` gives the features, labels and groups of the records that the attacker looks for. The other private
    records are those of the run in ``loaded`` or, if ``loaded`` is None, ``num_others`` made-up ones.
    """
    # At the origin: of all records these hide a canary least, and epsilon holds for any.
    others_x = torch.zeros(num_others, *public_x.shape[1:], dtype=public_x.dtype)
    sizes = len(facts.label_names), len(facts.group_names)
    public, others = (
        made_records(x, *(np.arange(len(x)) % size for size in sizes), name=name, unit=unit)
        for x, name, unit in ((public_x, "public", "record"), (others_x, "made", facts.unit))
    )
    # If persons are protected, a canary is a person with several records, which a guarantee per record does not cover.
    copies, embedding = COPIES if facts.unit == "person" else 1, None
    if is_embedded:
        # Canaries are coordinates already. Methods expect an embedding with such a data set; this one is never applied.
        embedding = Embedding.of(torch.eye(2, public_x.shape[1]), EmbeddingConfig(num_components=1))
    return ShadowData(
        dataset=Dataset(
            name=facts.name,
            kind="image" if public_x.ndim == 4 else "tabular",
            private=others,
            public=public,
            validation=public,
            test=public,
            label_names=facts.label_names,
            group_names=facts.group_names,
            sensitive_attribute=facts.sensitive_attribute,
            embedding=embedding,
        ),
        others=others if loaded is None else loaded.private,
        canaries=made_records(*canaries, name="canary", unit=facts.unit, copies=copies),
        copies=copies,
    )


def training_of(config: Method, dataset: Dataset, model: torch.nn.Module | None = None, **seen_by: Any) -> Training:
    """Return the context in which a method draws a release for the audit alone: nothing is stored, and no privacy cost
    is charged. ``seen_by``: a ``watch`` or a ``noisy_sum``, through which the audit sees it."""
    return Training(
        dataset=dataset,
        model=model or torch.nn.Identity(),
        run=RunDirectory(root=Path(tempfile.gettempdir()) / "fairpate-audit"),
        reporter=Reporter(quiet=True),
        seed=config.seed,
        **seen_by,
    )


class Found(NamedTuple):
    """What is seen of one release in one draw: scores and gains (M,) of the canaries, and the noise."""

    score_M: FloatArray
    gain_M: FloatArray
    noise: tuple[NoiseSeen, ...]
    drawn: Drawn


def seen_of(found: Sequence[Found]) -> Seen:
    """Return what is seen of all releases of one shadow release."""
    scores, gains, noise, draws = zip(*found, strict=True)
    return Seen(scores_SM=np.stack(scores), gains_SM=np.stack(gains), noise=noise, draws=draws)


def log_ratio(released: Numbers, added: Numbers, stddev: float) -> tuple[FloatArray, FloatArray]:
    """Return the scores of canaries from the numbers ``released``, projected on the numbers ``added`` by an included
    canary, in standard deviations of the noise; and the gain of an included canary, both summed over the first axis.

    Score and gain give the log-likelihood ratio. A canary that adds nothing has no score (NaN).
    """
    gain_M = np.sqrt((np.asarray(added, np.float64) ** 2).sum(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        score_M = (released * added).sum(axis=0) / gain_M / stddev
    return np.where(gain_M > 0, score_M, np.nan), gain_M / stddev


def both_kinds(noise_RM: Numbers, included_M: Coins, stddev: float, *, kurtosis: float = 3.0) -> tuple[NoiseSeen, ...]:
    """Return the noise that is seen where canaries are included, and where they are not: noise may be missing only on
    numbers that are otherwise 0."""
    return tuple(squares_seen(noise_RM[..., kept_M], stddev, kurtosis=kurtosis) for kept_M in (included_M, ~included_M))


def moments_of(stddev: float) -> tuple[float, float]:
    """Return the standard deviation and the kurtosis of the discrete Gaussian of parameter ``stddev``."""
    if stddev > _FINE:
        return stddev, 3.0
    value, log_mass = log_masses(stddev)
    second, fourth = (float((np.exp(log_mass) * value.astype(np.float64) ** power).sum()) for power in (2, 4))
    return math.sqrt(second), fourth / second**2
