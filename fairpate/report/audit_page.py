"""The result of an audit: its record, which ``fairpate verify`` computes again, and its page.

Bounds follow from counts and a t statistic alone, so that anyone with the record can check them. The page, the terminal
and the JSON share the sentences about the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from fairpate.pages import epsilon_text, percent, render
from fairpate.privacy.audit import Guesses, Separation, epsilon_lower_bound, gaussian_epsilon
from fairpate.report.records import upper
from fairpate.types import restored

FORMAT = "fairpate.audit/1"
_SERIES = ("planned", "found", "control")
SURE = 0.99
"""The confidence at which a claim counts as refuted. Much more is out of reach, because delta allows for a few right
guesses."""
_BOUNDS = ("epsilon_assumption_free", "epsilon_if_gaussian")
_bound = lru_cache(epsilon_lower_bound)


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """The result of an attack: its right ``guesses``, and the separation of its scores if these are normal."""

    guesses: Guesses
    separation: Separation | None = None

    def bounds(self, delta: float, confidence: float = 0.95) -> tuple[float, ...]:
        """The lower bound on epsilon without assumptions, followed by the one for Gaussian scores if they are."""
        free = _bound(self.guesses, delta=delta, confidence=confidence)
        if self.separation is None:
            return (free,)
        return free, gaussian_epsilon(self.separation.mu_lower_bound(confidence), delta)

    def words(self, delta: float) -> str:
        """The bounds as words."""
        free, *gaussian = (f"{bound:.2f}" for bound in self.bounds(delta))
        return f"{free} without assumptions" + (f", {gaussian[0]} if scores are Gaussian" if gaussian else "")

    def to_json(self, delta: float) -> dict[str, Any]:
        """Counts and bounds as plain values."""
        return asdict(self) | dict(zip(_BOUNDS, self.bounds(delta), strict=False))


@dataclass(frozen=True, kw_only=True)
class AuditedRelease:
    """One kind of release of the run under attack.

    ``part``: whose records it is of, ``private`` or ``test``. ``planned`` is what the ideal attack finds at the median,
    ``found`` what this attack found, ``control`` what it found with ``control_noise``, about half, of the noise.
    ``canaries_each``: coins per release.
    """

    part: str
    release: str
    attack: str
    events: tuple[Mapping[str, Any], ...]
    num_releases: int
    canaries_each: int
    control_noise: float
    planned: AttackResult
    found: AttackResult
    control: AttackResult

    @property
    def title(self) -> str:
        """The release in words."""
        return f"{upper(self.release)}{' of test records' if self.part == 'test' else ''}"

    @property
    def noise_words(self) -> str:
        """The control's noise in words."""
        return (
            "half the noise" if abs(self.control_noise - 0.5) < 0.01 else f"{percent(self.control_noise)} of the noise"
        )


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An audit of the claim ``epsilon`` at ``delta`` for ``unit`` and ``relation``.

    ``settings``: the digest of the settings that were audited. ``records``: whether the records other than canaries
    were ``made`` up or are the ``private`` ones; the latter audit must not be published. ``not_attacked`` names what
    the statement also covers.
    """

    method: str
    unit: str
    relation: str
    delta: float
    epsilon: float
    settings: str
    records: str
    not_attacked: tuple[str, ...]
    releases: tuple[AuditedRelease, ...]

    def proved(self, confidence: float = 0.95) -> float:
        """The largest lower bound that an attack on the run's releases reached."""
        return max(max(each.found.bounds(self.delta, confidence)) for each in self.releases)

    @property
    def refuted(self) -> bool:
        """True if a lower bound exceeds the claim at a confidence of 99 %.

        Where an attack is nearly ideal, one in twenty of correct releases exceeds it at 95 %.
        """
        return self.proved(SURE) > self.epsilon

    @property
    def has_power(self) -> bool:
        """True if every control, with half the noise, exceeds the claim."""
        return all(max(each.control.bounds(self.delta)) > self.epsilon for each in self.releases)

    @property
    def headline(self) -> str:
        """The result in a sentence."""
        claimed, proved = epsilon_text(self.epsilon), self.proved()
        if self.refuted:
            return f"The claim is refuted: an attack proves ε ≥ {self.proved(SURE):.2f}, and {claimed} is claimed."
        if proved > self.epsilon:
            return (
                f"Not decided: ε ≥ {proved:.2f} at 95 % confidence is more than the {claimed} that is claimed, and at "
                "99 % it is not; repeat the audit with more canaries."
            )
        return f"No attack exceeds the claim: ε ≥ {proved:.2f} is proved, and {claimed} is claimed."

    @property
    def power_words(self) -> str:
        """A sentence on whether the audit would have found missing noise, by its control."""
        proved, noise = min((max(each.control.bounds(self.delta)), each.noise_words) for each in self.releases)
        if self.has_power:
            return (
                f"With {noise} the same attack proves ε ≥ {proved:.2f}, which is more than is claimed: it would have "
                "found such a fault."
            )
        return (
            f"With {noise} the same attack proves no more than ε ≥ {proved:.2f}: this audit could not have found such "
            "a fault. Give more canaries; against some methods no strong attack is known."
        )

    def to_json(self) -> dict[str, Any]:
        """The record, with all bounds and sentences that follow from it."""
        plain = asdict(self)
        for values, each in zip(plain["releases"], self.releases, strict=True):
            values |= {name: getattr(each, name).to_json(self.delta) for name in _SERIES}
        verdict = {"refuted": self.refuted, "has_power": self.has_power, "headline": self.headline}
        return {"format": FORMAT, **plain, **verdict}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Audit:
        """The audit that :meth:`to_json` wrote; ValueError, TypeError or KeyError for anything else."""
        if values["format"] != FORMAT:
            raise ValueError(f"audit.json: expected format {FORMAT}, got {values['format']!r}.")
        plain = {name: values[name] for name in cls.__dataclass_fields__}
        plain["releases"] = [
            release
            | {
                series: {name: release[series][name] for name in AttackResult.__dataclass_fields__}
                for series in _SERIES
            }
            for release in plain["releases"]
        ]
        return restored(cls, plain)


def audit_page(audit: Audit) -> str:
    """The page of an audit, as one HTML document."""
    return render("audit.html", audit=audit)
