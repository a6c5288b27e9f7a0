"""Sections of methods that ask voters: teachers, what is asked and what that may cost, and how answers are drawn."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from fairpate.config import LARGEST, Count, FitConfig, ModelConfig, Positive, Section, Terms
from fairpate.types import MAX_THRESHOLD_VOTES, Budget, BudgetKind, GateRule, MechanismParameters, ReleaseKind


class TeacherModelConfig(ModelConfig):
    """The architecture of teachers, or any model of one's own with scikit-learn's `fit` and `predict`."""

    python: str | None = Field(
        None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="module:factory, which makes a new one for every teacher; runs with --allow-code only. Then no "
        "other field of `model`, nor `fit`, `standardize` or `engine`, is read.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_architecture(cls, values: Any) -> Any:
        return dict(values) if isinstance(values, ModelConfig) else values


class TeachersConfig(Section):
    """The ensemble that votes."""

    num_teachers: Count = Field(100, ge=2)
    model: TeacherModelConfig = TeacherModelConfig()
    fit: FitConfig = FitConfig()
    standardize: bool = Field(False, description="Scale features by each teacher's own shard.")
    max_shard_size: Count | None = Field(
        None, description="Most records of a teacher; of a larger shard a keyed choice stays. null: all stay."
    )
    engine: Literal["auto", "loop", "stacked"] = "auto"
    block_size: Count | None = Field(None, description="Teachers per Ray task; null chooses.")

    @model_validator(mode="after")
    def _scales_once(self) -> TeachersConfig:
        if self.standardize and self.model.weights is not None:
            raise ValueError("Expected standardize: false with model.weights, got true: the file brings its own scale.")
        if self.model.trainable == "head" and (self.model.dropout or not self.fit.augment.is_identity):
            raise ValueError(
                "Expected neither model.dropout nor fit.augment with model.trainable: head: features are computed once."
            )
        return self


class BudgetConfig(Section):
    """What may ever be spent, by a run and by the service that goes on after it; fixed when the ledger is made."""

    kind: BudgetKind = Field("data_independent", description="What is limited; see fairpate.types.Budget.")
    epsilon: Positive | None = Field(None, description="Limit at `target.delta`; not for query_count.")
    max_queries: Count | None = Field(None, description="Limit of query_count.")
    accept_leak: bool = Field(False, description="data_dependent needs true: when it stops depends on private votes.")

    @model_validator(mode="after")
    def _is_a_budget(self) -> BudgetConfig:
        # Any delta would do: the other fields are checked.
        self.at(0.5)
        if self.kind == "data_dependent" and not self.accept_leak:
            raise ValueError(
                "Expected accept_leak: true with kind data_dependent, got false: it stops where private votes say so, "
                "which leaks; set it, or use data_independent."
            )
        return self

    def at(self, target_delta: float) -> Budget:
        """The budget, with the delta that its epsilon belongs to."""
        return Budget(kind=self.kind, delta=target_delta, epsilon=self.epsilon, max_queries=self.max_queries)


class PublicationConfig(Section):
    """How the data-dependent privacy cost is published, by smooth sensitivity; fixed before any vote."""

    order: float = Field(gt=1, le=LARGEST, description="Renyi order of the published price.")
    beta: Positive = Field(description="Discount per record; order < 1 / (2 beta).")
    noise_stddev: Positive = Field(description="Noise in multiples of the smooth sensitivity.")
    scale_noise_stddev: Positive = Field(description="Noise on its logarithm, in multiples of beta.")


class AdmissionConfig(Section):
    """Queries in rounds, each chosen by a student of the labels released before it; see aggregator.admission."""

    rounds: Count = Field(10, ge=2, description="The first one takes public records in their order.")
    uncertain_first: bool = Field(False, description="Of those admitted, submit those the student doubts most first.")
    fit: FitConfig | None = Field(None, description="Training between rounds; null: as student.fit.")


class QueriesConfig(Section):
    """Which public records are asked about, and what that may cost."""

    num_queries: Count | None = Field(None, description="Queries submitted; null submits the whole public split.")
    budget: BudgetConfig | None = Field(
        None,
        description="null: the target; without one data_independent, room for the run's queries and for one block that "
        "a crash may waste.",
    )
    admission: AdmissionConfig | None = Field(
        None, description="null: Algorithm 1, public records in their order. Needs num_queries."
    )
    release: ReleaseKind = Field(
        "label",
        description="`counts`: every answer comes with all noisy counts, which say how sure the voters were, and the "
        "student learns from them. At the same price, as long as no price depends on votes.",
    )

    @model_validator(mode="after")
    def _admission_chooses(self) -> QueriesConfig:
        if self.admission is not None and self.num_queries is None:
            raise ValueError("Expected num_queries with admission, got null: it chooses that many of the public split.")
        return self


class AggregatorConfig(QueriesConfig):
    """Confident-GNMax and what it may cost."""

    mechanism: MechanismParameters = Field(
        MechanismParameters(threshold=60, threshold_stddev_votes=30, noise_stddev_votes=12),
        description="With a target, both noises are multiplied by the factor at which the queries fit.",
    )
    publication: PublicationConfig | None = Field(
        None, description="null: the data-dependent privacy cost stays private."
    )

    @model_validator(mode="after")
    def _counts_have_one_price(self) -> AggregatorConfig:
        depends = self.budget is not None and self.budget.kind == "data_dependent"
        if self.release == "counts" and (depends or self.publication is not None):
            expected = "another budget.kind" if depends else "no publication"
            found = "data_dependent" if depends else "one"
            raise ValueError(
                f"Expected {expected} with release: counts, got {found}: the price that depends on votes is that of "
                "the label alone; leave it out, or set release: label."
            )
        return self

    @model_validator(mode="after")
    def _noise_is_positive(self) -> AggregatorConfig:
        for field in ("threshold_stddev_votes", "noise_stddev_votes"):
            value = getattr(self.mechanism, field)
            if not 0 < value <= MAX_THRESHOLD_VOTES:
                raise ValueError(f"Expected 0 < mechanism.{field} <= {MAX_THRESHOLD_VOTES:.0f} in a run, got {value}.")
        return self


class GatedAggregatorConfig(AggregatorConfig):
    """Confident&Fair-GNMax: a demographic-parity gate beside it."""

    gate: GateRule = GateRule(max_disparity=0.1, min_count=25)


class GatedQueriesConfig(QueriesConfig):
    """With a demographic-parity gate before an answer leaves."""

    gate: GateRule = GateRule(max_disparity=0.1, min_count=25)


class QueriesTarget(Terms):
    """What released labels may cost together: one record added or removed."""

    epsilon: Positive | None = Field(None, description="To publish. null: the noise is as configured.")
