"""May a model be published? One verdict, and what has to be settled first, by whom.

The points follow from the facts of a run (:attr:`fairpate.report.records.RunStatement.decision`); their words are in
words.yaml. A point either forbids publication, or has to be settled, or is advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fairpate.pages import counted, delta_text, epsilon_text


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What it costs to choose one of the private releases that a comparison made of the same records by their results,
    or to publish all of them.

    ``epsilon`` and ``delta`` are the cost of ``num_releases`` releases together; both are None if these protect
    different units or have different neighbouring relations, whose costs do not add up.
    """

    num_releases: int
    epsilon: float | None
    delta: float | None

    @property
    def cost(self) -> str:
        """The cost as text, such as "ε = 3.00 (δ = 3·10⁻⁵)"; empty if there is no one ε."""
        if self.epsilon is None or self.delta is None:
            return ""
        return f"ε = {epsilon_text(self.epsilon)} (δ = {delta_text(self.delta)})"

    @property
    def words(self) -> str:
        """A sentence on the cost of a choice by results, as all pages and the terminal state it."""
        if not self.cost:
            return "For a choice by results no ε can be stated: models of this comparison protect different units."
        return (
            "If results decide which model of this comparison is published, or all private ones are, state "
            f"{self.cost} instead, the cost of all {counted(self.num_releases, 'release')}."
        )

    def named(self, epsilon: float) -> str:
        """A sentence on the cost ``epsilon`` of one model of the comparison, and on that of a choice."""
        return f"ε is {epsilon_text(epsilon)} if the model was named before any result was seen. {self.words}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether a model may be published: the reasons that forbid it (``forbidding``), what has to be settled before
    (``to_settle``, pairs of who and what, what matters most first), and advice (``advised``)."""

    forbidding: tuple[str, ...] = ()
    to_settle: tuple[tuple[str, str], ...] = ()
    advised: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The answer to "May it be published?", as one sentence."""
        if self.forbidding:
            return f"No: {'; '.join(self.forbidding)}."
        if self.to_settle:
            are = "is" if len(self.to_settle) == 1 else "are"
            return f"Yes, once {counted(len(self.to_settle), 'point')} {are} settled."
        return "Yes: nothing that this page knows of is open."

    @property
    def parties(self) -> Mapping[str, str]:
        """What each party has to settle, as text; advice under "Advised"."""
        found: dict[str, list[str]] = {}
        for number, (who, what) in enumerate(self.to_settle, 1):
            found.setdefault(who, []).append(f"({number}) {what}")
        if self.advised:
            found["Advised"] = [*self.advised]
        return {who: "; ".join(points) for who, points in found.items()}

    @property
    def words(self) -> str:
        """The verdict and the open points in one paragraph."""
        return " ".join((self.verdict, *(f"{who}: {what}." for who, what in self.parties.items())))
