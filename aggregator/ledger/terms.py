"""What a ledger is a ledger of, and how that is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from aggregator.ledger.chain import canonical
from aggregator.ledger.files import LedgerError
from aggregator.mechanism import Mechanism
from aggregator.mechanisms import mechanism_named
from fairpate.privacy.smooth_release import SmoothRelease
from fairpate.types import Budget, GateRule, Relation, Unit


@dataclass(frozen=True, kw_only=True)
class LedgerTerms:
    """What a ledger is a ledger of; fixed when it is created.

    ``publication`` is how the data-dependent cost may be published, fixed before any vote is seen; None: never.
    ``noise`` is the label of the random source. ``ensemble`` names the teachers that vote (a digest of what determines
    them), so that one ledger never mixes the votes of two ensembles. ValueError for a mechanism that is not registered.
    """

    mechanism: Mechanism
    gate: GateRule
    budget: Budget
    num_teachers: int
    num_classes: int
    num_groups: int
    noise: str
    ensemble: str
    unit: Unit = "record"
    relation: Relation = "add or remove one"
    publication: SmoothRelease | None = None

    def __post_init__(self) -> None:
        # Another class under a registered name would be stored as what it is not.
        if mechanism_named(self.mechanism.name, self.mechanism.parameters) != self.mechanism:
            raise ValueError(f"{type(self.mechanism).__qualname__}: is not the mechanism named {self.mechanism.name}.")

    def to_json(self) -> dict[str, Any]:
        """The terms as plain values, the mechanism by name and parameters."""
        mechanism = {"name": self.mechanism.name, "parameters": self.mechanism.parameters}
        values = asdict(self) | {"mechanism": mechanism}
        if self.publication is not None:
            values["publication"].pop("unit")  # that of the terms; earlier ledgers have it there alone
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LedgerTerms:
        """The terms of :meth:`to_json`. KeyError, TypeError or ValueError for other values."""
        mechanism, publication = values["mechanism"], values["publication"]
        typed = {
            "mechanism": mechanism_named(mechanism["name"], mechanism["parameters"]),
            "gate": GateRule(**values["gate"]),
            "budget": Budget(**values["budget"]),
            "publication": publication and SmoothRelease(**publication),
        }
        return cls(**{**values, **typed})


def check_terms(stored: Mapping[str, Any], terms: LedgerTerms) -> None:
    """LedgerError unless the terms that a ledger was made under are ``terms``; both values are named."""
    # Through JSON, as the stored ones went, in which a tuple is a list.
    asked = json.loads(canonical(terms.to_json()))
    for name in (column.name for column in fields(terms)):
        if stored.get(name) != asked[name] and name == "ensemble":  # a digest of private shards: not to be shown
            raise LedgerError(
                "The ledger was opened for other teachers (ensemble) and cannot go on with these; restore the private "
                "records, settings and library versions of this run, or start a new run folder."
            )
        if stored.get(name) != asked[name]:
            raise LedgerError(
                f"The ledger was opened with {name} = {stored.get(name)} and cannot go on with {asked[name]}; "
                "give the old value, or start a new run folder."
            )
