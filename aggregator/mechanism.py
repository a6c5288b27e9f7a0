"""What a mechanism is: how votes become outcomes, and which events that is.

A mechanism is its parameters, frozen, under a name: a ledger stores both, and so knows what it is a ledger of. It draws
outcomes from votes; it names the event that its queries are at their worst, which is what a ledger reserves and what
may be published, and the event that they were, which may depend on votes and stays with the operator. It states no
epsilon, for the accountant alone prices events, and it knows no budget, ledger or file.

A new mechanism is a subclass in a module of its own and a line in :mod:`aggregator.mechanisms`.

Shapes: Q queries, C classes, A orders; ``votes_QC[i, k]`` counts the voters that chose class k for query i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from fairpate.fairness.gate import DemographicParityGate
from fairpate.privacy import accountant
from fairpate.privacy.discrete_gaussian import NoiseSource
from fairpate.privacy.events import Event
from fairpate.privacy.smooth_release import SanitisedRdp, SmoothRelease
from fairpate.types import IntArray, ReleaseKind

FloatArray = npt.NDArray[np.float64]
Verdict = Literal["answer", "confidence", "fairness", "free"]
NOT_CONFIDENT = -1
"""Stands where a mechanism gives no label."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a query: an ``answer`` with its label, or the step that refused it (``free``: before the vote).

    ``label`` is None for every refusal: the noisy argmax that the gate rejected is forgotten, not its cost. ``counts``
    are noisy counts that were released with an answer; None where the mechanism releases labels alone.
    """

    verdict: Verdict
    label: int | None = None
    counts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "answer") != (self.label is not None):
            raise ValueError(f"Expected a label for an answer and for nothing else, got {self.verdict}, {self.label}.")
        if self.counts is not None and self.label is None:
            raise ValueError(f"Expected counts with an answer only, got {self.verdict}.")

    @property
    def is_charged(self) -> bool:
        """Whether private votes were touched."""
        return self.verdict != "free"


# A long ledger holds as many outcomes as reservations, and few different ones.
@lru_cache(maxsize=1024)
def outcome(verdict: Verdict, label: int | None = None) -> Outcome:
    """The :class:`Outcome` of these values: equal ones are one object."""
    return Outcome(verdict=verdict, label=label)


@dataclass(frozen=True, kw_only=True)
class Mechanism(ABC):
    """Draws outcomes and names events; a frozen dataclass whose fields are its public parameters, plain numbers.

    ``name`` is stored in ledgers, and never given to another mechanism. ``voters``: who votes, in a word for pages.
    ``releases`` says what goes with an answer.
    """

    name: ClassVar[str]
    voters: ClassVar[str] = "teachers"
    releases: ClassVar[ReleaseKind] = "label"

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as a ledger stores them."""
        return asdict(self)

    @abstractmethod
    def answer(
        self,
        votes_QC: IntArray,
        *,
        groups: Sequence[int],
        keys: Sequence[str],
        gate: DemographicParityGate,
        source: NoiseSource,
    ) -> list[Outcome]:
        """One outcome per query, in order; answers are counted in ``gate``.

        ``votes_QC`` passes :meth:`is_complete`. ``keys[i]`` finds the noise of query i, so that blocks change nothing.
        Called once the queries are reserved; what it returns is stored before anybody sees it.
        """

    @abstractmethod
    def worst_case(self, num_queries: int) -> Event:
        """The event that so many queries are whatever the votes: what is reserved, and the price that is published."""

    def realised(self, votes_QC: IntArray) -> Event:
        """The event that these queries were, for the operator alone; never dearer than the worst case.

        The worst case itself where no price depends on votes.
        """
        return self.worst_case(len(votes_QC))

    def realised_rdp(self, votes_QC: IntArray, orders_A: FloatArray) -> FloatArray:
        """The Renyi curve of each of these queries, shape (Q, A), for the operator alone."""
        event = self.realised(votes_QC)
        if accountant.prices_each(event):
            return accountant.rdp_of_each_data_dependent(event, orders_A)
        # One by one; where votes do not matter, one stands for all.
        rows = votes_QC[:, None] if event.data_dependent else votes_QC[:1, None]
        curves = [accountant.rdp_data_dependent([self.realised(row_1C)], orders_A) for row_1C in rows]
        return np.broadcast_to(np.reshape(curves, (len(rows), len(orders_A))), (len(votes_QC), len(orders_A)))

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """The same with every noise multiplied by ``factor``, so that a larger factor never costs more."""

    @abstractmethod
    def describe(self) -> str:
        """The parameters in words, a part of a sentence that begins in upper case and may be published."""

    def columns(self) -> dict[str, str]:
        """The parameters for a table: short names, and values as text."""
        return {name: f"{value:g}" for name, value in self.parameters.items()}

    def is_complete(self, votes_QC: IntArray, *, num_teachers: int) -> bool:
        """Whether all voters voted that must. ValueError unless these are counts for at least two classes."""
        return check_votes(votes_QC, num_teachers=num_teachers)

    def chances(self, counts_QC: IntArray, *, num_teachers: int) -> FloatArray:  # noqa: ARG002 - of the subclass
        """What released counts say of every label, shape (Q, C): rows sum to one. ValueError where there are none."""
        raise ValueError(f"{self.name} releases labels alone.")

    def as_in_paper_rdp(self, votes_QC: IntArray, *, rejected_Q: npt.NDArray[np.bool_]) -> FloatArray:  # noqa: ARG002
        """The Renyi curve (A,) that the code published with the paper would charge, for comparison only.

        ``rejected_Q``: labels that the gate refused. The realised price where that code is not known to differ.
        """
        return accountant.rdp_data_dependent([self.realised(votes_QC)])

    def check_publication(self, release: SmoothRelease, *, num_classes: int) -> None:  # noqa: ARG002 - of the subclass
        """ValueError unless the realised price may be published as ``release`` plans, whatever the votes."""
        raise ValueError(f"the price of {self.name} does not depend on votes, so there is nothing to publish of it")

    def publish(self, votes_QC: IntArray, *, release: SmoothRelease, source: NoiseSource) -> SanitisedRdp:  # noqa: ARG002
        """What may be published of the realised price of these queries. ValueError as :meth:`check_publication`."""
        raise ValueError(f"the price of {self.name} does not depend on votes, so there is nothing to publish of it")


def gated(labels: Sequence[int], groups: Sequence[int], gate: DemographicParityGate) -> list[Outcome]:
    """What the demographic-parity gate makes of labels, in order (FairPATE, arXiv 2302.09183, Algorithm 1).

    A refusal is ``free`` when, from public counts alone, the gate would reject every label for the group; what was
    drawn for such a query is not looked at. A ``fairness`` refusal comes after the vote and therefore costs what an
    answer costs.
    """
    return [_gated(gate, group, label) for group, label in zip(groups, labels, strict=True)]


def _gated(gate: DemographicParityGate, group: int, label: int) -> Outcome:
    # A label that the gate admits says already that it does not reject them all.
    if label != NOT_CONFIDENT and gate.admit(group, label):
        return outcome("answer", label)
    if not gate.accepts_any(group):
        return outcome("free")
    return outcome("confidence" if label == NOT_CONFIDENT else "fairness")


def check_votes(votes_QC: IntArray, *, num_teachers: int) -> bool:
    """Whether every teacher voted on every query. ValueError unless these are counts for at least two classes."""
    # Signed whole numbers alone: noise is negative too, and others would wrap around or be rounded.
    if votes_QC.ndim != 2 or votes_QC.shape[1] < 2 or votes_QC.dtype.kind != "i":
        raise ValueError(f"Expected integer votes for at least two classes, got {votes_QC.dtype} of {votes_QC.shape}.")
    if votes_QC.size and votes_QC.min() < 0:
        raise ValueError("Expected votes >= 0.")
    totals: list[int] = votes_QC.sum(axis=1).tolist()
    return totals.count(num_teachers) == len(totals)
