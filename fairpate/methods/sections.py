"""The sections of all methods as types, for editors and type checkers; `make stored` writes them from the classes."""

from collections.abc import Mapping
from typing import Any, TypedDict

from fairpate.config import Section

Setting = Mapping[str, Any] | Section | None


class Sections(TypedDict, total=False):
    """The sections of the methods' configurations, and what else a method configures, by name."""

    ada_ssp: Setting
    aggregator: Setting
    augment: Setting
    backbone: Setting
    covariance_constraint: Setting
    dp_fermi: Setting
    dp_oracle_learner: Setting
    dp_postprocessing: Setting
    dp_sgd: Setting
    evaluation: Setting
    f_ld: Setting
    fair_dp_sgd: Setting
    pate_s_in: Setting
    pf_ld: Setting
    private_knn: Setting
    public_data: Setting
    raco_dp: Setting
    randomised_response: Setting
    ray: Setting
    record_votes: Setting
    residual_votes: Setting
    sf_pate: Setting
    sgd: Setting
    student: Setting
    target: Setting
    teacher_votes: Setting
    teachers: Setting
    thresholds: Setting
    training: Setting
    weighted_votes: Setting
