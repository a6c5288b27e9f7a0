"""The methods that `fairpate train` knows, by name."""

from fairpate.app.methods.pate import check_pate, train_fairpate, train_pate, train_pate_s_in, train_pate_s_pre
from fairpate.app.methods.sgd import train_dp_sgd, train_fair_dp_sgd, train_sgd
from fairpate.app.methods.training import Method

METHODS: dict[str, Method] = {
    "sgd": Method(train=train_sgd, is_private=False),
    "dp_sgd": Method(train=train_dp_sgd),
    "fair_dp_sgd": Method(train=train_fair_dp_sgd),
    "pate": Method(train=train_pate, check=check_pate),
    "fairpate": Method(train=train_fairpate, check=check_pate),
    "pate_s_pre": Method(train=train_pate_s_pre, check=check_pate),
    "pate_s_in": Method(train=train_pate_s_in, check=check_pate),
}
