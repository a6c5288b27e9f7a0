"""What one step of fair private training costs when it releases more than a gradient, or protects less than a record.

Events beyond a Gaussian sum on a Poisson sample. A Gaussian and a Laplace release on the *same* Poisson sample:
composed first and amplified once. Gaussians that hide a sensitive attribute alone, on batches that everybody knows. And
the same on secret Poisson batches whose other content is not hidden: whether a record is in the batch may show, so
there is no amplification beyond the mixture of "in" and "out" (joint convexity).

Both their prices, Renyi curves and loss distributions, are registered with the accountant here.

Not known here: who trains, what is protected by what. Shapes: A orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fairpate.privacy import divergences, loss_distributions, subsampled
from fairpate.privacy.accountant import event_pld, event_rdp
from fairpate.privacy.events import ConfidentGnmaxQueries, Event, of_unit
from fairpate.privacy.loss_distributions import LossDistribution
from fairpate.types import Relation, Unit

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AttributeQueries(ConfidentGnmaxQueries):
    """Confident-GNMax queries where only the teachers' sensitive attributes are hidden; priced as the parent."""

    unit: Unit = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"


def of_teachers(event: Event, unit: Unit) -> Event:
    """``event`` of teachers of whom one ``unit`` touches one; where attributes alone are hidden, one is replaced."""
    if unit != "sensitive attribute":
        found: Event = of_unit(event, unit)
        return found
    if not isinstance(event, ConfidentGnmaxQueries):
        return event
    return AttributeQueries(**vars(event) | {"unit": unit})


@dataclass(frozen=True, kw_only=True)
class PoissonGaussianLaplaces:
    """``count`` steps, each a Gaussian sum and a Laplace sum over one fresh Poisson sample of records or persons.

    ``gradient_noise_multiplier``: standard deviation over the L2 norm that a unit may add to the first;
    ``laplace_scale``: scale over the L1 norm that it may add to the second.
    """

    noun: ClassVar[str] = "step of a Gaussian and a Laplace sum"
    unit: Unit = "record"
    relation: ClassVar[Relation] = "add or remove one"
    data_dependent: ClassVar[bool] = False
    count: int
    gradient_noise_multiplier: float
    laplace_scale: float
    sampling_rate: float

    def __post_init__(self) -> None:
        _require(self.count, self.sampling_rate, self.gradient_noise_multiplier, self.laplace_scale)


@dataclass(frozen=True, kw_only=True)
class _AttributeEvent:
    """What hides one record's sensitive attribute."""

    noun: ClassVar[str] = "attribute-level Gaussian sum"
    unit: ClassVar[Unit] = "sensitive attribute"
    relation: ClassVar[Relation] = "replace one"
    data_dependent: ClassVar[bool] = False
    count: int
    attribute_noise_multiplier: float


@dataclass(frozen=True, kw_only=True)
class AttributeGaussians(_AttributeEvent):
    """``count`` Gaussian releases that hide one record's sensitive attribute; all else about the records is public.

    ``attribute_noise_multiplier``: standard deviation over the L2 distance that a change of one attribute may make.
    """

    def __post_init__(self) -> None:
        _require(self.count, 1.0, self.attribute_noise_multiplier)


@dataclass(frozen=True, kw_only=True)
class SecretBatchAttributeGaussians(_AttributeEvent):
    """``count`` such releases on fresh secret Poisson batches, of whose members the step may tell all but that."""

    sampling_rate: float

    def __post_init__(self) -> None:
        _require(self.count, self.sampling_rate, self.attribute_noise_multiplier)


def joint_multiplier(*multipliers: float) -> float:
    """The noise multiplier of several Gaussian releases on the same records, taken as one; 0 if one has no noise."""
    if not all(multiplier > 0 for multiplier in multipliers):
        return 0.0
    # Independent Gaussians on the same records: their precisions add.
    return 1 / math.sqrt(sum(multiplier**-2 for multiplier in multipliers))


@event_rdp.register
def _(event: PoissonGaussianLaplaces, orders_A: FloatArray) -> FloatArray:
    if not event.count:
        return np.zeros(len(orders_A))
    if not event.gradient_noise_multiplier or not event.laplace_scale:
        return np.full(len(orders_A), math.inf)
    # One sample serves both sums: their moments multiply first and are amplified once.
    moments = subsampled.combined_log_moments(
        subsampled.gaussian_log_moments(event.gradient_noise_multiplier),
        subsampled.laplace_log_moments(event.laplace_scale),
    )
    return event.count * subsampled.poisson_rdp(moments, sampling_rate=event.sampling_rate, orders_A=orders_A)


@event_rdp.register
def _(event: AttributeGaussians, orders_A: FloatArray) -> FloatArray:
    return _gaussian_rdp(event.count, event.attribute_noise_multiplier, np.asarray(orders_A, np.float64))


@event_rdp.register
def _(event: SecretBatchAttributeGaussians, orders_A: FloatArray) -> FloatArray:
    orders = np.asarray(orders_A, np.float64)
    # Convexity of the moment: with probability 1 - rate the record is not in the batch, and nothing of it is lost.
    exponent_A = (orders - 1) * _gaussian_rdp(1, event.attribute_noise_multiplier, orders)
    log_in = math.log(event.sampling_rate)
    # math.log1p(-1) is an error and not -inf.
    log_out = math.log1p(-event.sampling_rate) if event.sampling_rate < 1 else -math.inf
    return event.count * np.logaddexp(log_out, log_in + exponent_A) / (orders - 1) if event.count else 0 * orders


@event_pld.register
def _(event: PoissonGaussianLaplaces, interval: float) -> LossDistribution | None:
    if not event.count or not event.gradient_noise_multiplier or not event.laplace_scale:
        return None if event.count else loss_distributions.nothing(interval)
    base = divergences.GaussianAndLaplace(
        noise_multiplier=event.gradient_noise_multiplier, laplace_scale=event.laplace_scale
    )
    step = divergences.on_poisson_sample(base, sampling_rate=event.sampling_rate, interval=interval)
    return loss_distributions.repeated(step, event.count)


@event_pld.register
def _(event: AttributeGaussians, interval: float) -> LossDistribution | None:
    return divergences.gaussians(event.count, event.attribute_noise_multiplier, interval=interval)


@event_pld.register
def _(event: SecretBatchAttributeGaussians, interval: float) -> LossDistribution | None:
    # One step: each is mixed with nothing before steps are composed.
    inside = divergences.gaussians(min(event.count, 1), event.attribute_noise_multiplier, interval=interval)
    if not event.count or inside is None:
        return inside
    step = loss_distributions.mixed_with_nothing(inside, event.sampling_rate)
    return loss_distributions.repeated(step, event.count)


def _gaussian_rdp(count: int, noise_multiplier: float, orders_A: FloatArray) -> FloatArray:
    if not count:
        return np.zeros(len(orders_A))
    return count * orders_A / (2 * noise_multiplier**2) if noise_multiplier else np.full(len(orders_A), math.inf)


def _require(count: int, sampling_rate: float, *noises: float) -> None:
    if count < 0 or not 0 < sampling_rate <= 1 or not all(noise >= 0 for noise in noises):
        raise ValueError(
            f"Expected count >= 0, 0 < sampling_rate <= 1 and noise >= 0, got {count}, {sampling_rate} and {noises}."
        )
