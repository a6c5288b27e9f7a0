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

METHODS: dict[str, Method] = {
    "sgd": Method(train=train_sgd, promises=lambda _: False),
    "dp_sgd": Method(train=train_dp_sgd),
    "fair_dp_sgd": Method(train=train_fair_dp_sgd),
    "pate": Method(train=train_pate, check=check_pate, asks_teachers=True),
    "fairpate": Method(train=train_fairpate, check=check_pate, asks_teachers=True),
    "pate_s_pre": Method(train=train_pate_s_pre, check=check_pate, asks_teachers=True),
    "pate_s_in": Method(train=train_pate_s_in, check=check_pate, asks_teachers=True),
    "dp_fermi": Method(train=train_dp_fermi, check=check_dp_fermi),
    "f_ld": Method(train=train_f_ld, promises=lambda _: False),
    "pf_ld": Method(train=train_pf_ld, check=check_attribute, promises=pf_ld_promises),
    "sf_pate": Method(train=train_sf_pate, check=check_sf_pate, has_own_teachers=True),
    "raco_dp": Method(train=train_raco_dp, check=check_raco),
    "dp_postprocessing": Method(train=train_dp_postprocessing, check=check_dp_postprocessing),
    "dp_oracle_learner": Method(
        train=train_dp_oracle_learner, check=check_dp_oracle_learner, promises=dp_oracle_learner_promises
    ),
    "randomised_response": Method(train=train_randomised_response, check=check_randomised_response),
}
