"""The methods that `fairpate train` knows, by name."""

from fairpate.app.methods.fermi import check_dp_fermi, train_dp_fermi
from fairpate.app.methods.lagrangian import check_attribute, pf_ld_promises, train_f_ld, train_pf_ld
from fairpate.app.methods.pate import check_pate, train_fairpate, train_pate, train_pate_s_in, train_pate_s_pre
from fairpate.app.methods.posthoc import (
    check_dp_oracle_learner,
    check_dp_postprocessing,
    check_randomised_response,
    dp_oracle_learner_promises,
    train_dp_oracle_learner,
    train_dp_postprocessing,
    train_randomised_response,
)
from fairpate.app.methods.raco import check_raco, train_raco_dp
from fairpate.app.methods.sf_pate import check_sf_pate, train_sf_pate
from fairpate.app.methods.sgd import train_dp_sgd, train_fair_dp_sgd, train_sgd
from fairpate.app.methods.training import Method
from fairpate.train_config import TrainConfig


def _always(_: TrainConfig) -> bool:
    return True


_PATE = ("teachers", "aggregator", "pate")
_BUDGET = ("aggregator.budget", "aggregator.target_delta")  # the target is the budget of a method
_WITHOUT_GATE = (*_BUDGET, "aggregator.gate")

METHODS: dict[str, Method] = {
    "sgd": Method(train=train_sgd, sections=("sgd",), promises=lambda _: False),
    "dp_sgd": Method(train=train_dp_sgd, sections=("dp_sgd",)),
    "fair_dp_sgd": Method(train=train_fair_dp_sgd, sections=("dp_sgd", "fair_dp_sgd")),
    "pate": Method(train=train_pate, sections=_PATE, ignored=_WITHOUT_GATE, check=check_pate, asks_teachers=True),
    "fairpate": Method(train=train_fairpate, sections=_PATE, ignored=_BUDGET, check=check_pate, asks_teachers=True),
    "pate_s_pre": Method(train=train_pate_s_pre, sections=_PATE, ignored=_BUDGET, check=check_pate, asks_teachers=True),
    "pate_s_in": Method(
        train=train_pate_s_in,
        sections=(*_PATE, "pate_s_in"),
        ignored=_WITHOUT_GATE,
        check=check_pate,
        asks_teachers=True,
    ),
    "dp_fermi": Method(
        train=train_dp_fermi,
        sections=("dp_sgd", "dp_fermi"),
        check=check_dp_fermi,
        attribute_only=lambda config: config.dp_fermi.mode != "all",
    ),
    "f_ld": Method(train=train_f_ld, sections=("f_ld",), promises=lambda _: False, attribute_only=_always),
    "pf_ld": Method(
        train=train_pf_ld,
        sections=("pf_ld",),
        check=check_attribute,
        promises=pf_ld_promises,
        attribute_only=_always,
    ),
    "sf_pate": Method(
        train=train_sf_pate,
        sections=(*_PATE, "sf_pate", "f_ld"),
        ignored=_WITHOUT_GATE,
        check=check_sf_pate,
        has_own_teachers=True,
        attribute_only=_always,
    ),
    "raco_dp": Method(train=train_raco_dp, sections=("dp_sgd", "raco_dp"), check=check_raco),
    "dp_postprocessing": Method(
        train=train_dp_postprocessing,
        sections=("sgd", "dp_sgd", "dp_postprocessing"),
        check=check_dp_postprocessing,
        attribute_only=lambda config: config.dp_postprocessing.base == "sgd",
    ),
    "dp_oracle_learner": Method(
        train=train_dp_oracle_learner,
        sections=("dp_oracle_learner",),
        check=check_dp_oracle_learner,
        promises=dp_oracle_learner_promises,
        attribute_only=_always,
    ),
    "randomised_response": Method(
        train=train_randomised_response,
        sections=("f_ld", "randomised_response"),
        check=check_randomised_response,
        attribute_only=_always,
    ),
}
