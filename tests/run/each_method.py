"""A run of seconds of any method, on digits of two labels without their colour, where all of them can be trained."""

import dataclasses

from small_runs import QUIET

from fairpate.data import load_data
from fairpate.data.dataset import SPLIT_NAMES
from fairpate.methods.base import configured, method_names
from fairpate.run.run import run_method
from student.student import load_student

METHODS = tuple(method_names())
UNPROTECTED = ("sgd", "f_ld", "covariance_constraint")
ATTRIBUTE = ("pf_ld", "sf_pate", "dp_postprocessing", "dp_oracle_learner", "randomised_response")
RANDOMISED = ("dp_postprocessing", "dp_oracle_learner")  # fine-tuning would undo their mixing: refused there
LINEAR = ("dp_oracle_learner", "covariance_constraint")  # refuse a model that is not
ASKING = ("pate", "fairpate", "pate_s_pre", "pate_s_in", "sf_pate", "private_knn")
SMALL = {
    "noise": "seeded",
    "data": {"options": {"colour_as_feature": False}, "num_public": 120, "num_test": 200},
    "target": {"epsilon": 2, "delta": 1e-4, "accounting": "rdp"},
    "student": {"model": {"name": "mlp", "hidden": [16]}, "fit": {"epochs": 3}},
    "sgd": {"epochs": 3},
    "dp_sgd": {"epochs": 2, "batch_size": 200, "learning_rate": 1.0},
    "f_ld": {"warmup_epochs": 1, "epochs": 2},
    "pf_ld": {"warmup_epochs": 1, "epochs": 2},
    "dp_oracle_learner": {"num_rounds": 4, "min_share": 0.001},
    "weighted_votes": {"embedding": {"num_components": 20, "graph_share": 0}},
    "residual_votes": {"embedding": {"num_components": 20, "graph_share": 0}},
    "ada_ssp": {"embedding": {"num_components": 20, "graph_share": 0}},
    "randomised_response": {"learner": "f_ld"},
    "teachers": {"num_teachers": 10, "fit": {"epochs": 2}},
    "aggregator": {
        "num_queries": 40,
        "mechanism": {"threshold": 0, "threshold_stddev_votes": 1, "noise_stddev_votes": 1},
    },
    "ray": {"num_actors": 0},
}


def load_two_labels(config):
    """Of the digits without their colour, five and more are one label; all other data sets stay as they are."""
    dataset = load_data(config)
    if config.options.get("colour_as_feature", True):
        return dataset
    splits = {name: dataclasses.replace(s := getattr(dataset, name), y=(s.y >= 5).long()) for name in SPLIT_NAMES}
    return dataclasses.replace(dataset, **splits, label_names=("low", "high"))


def config_of(method, out, *overrides):
    linear = ["student.model.name=logistic"] if method in LINEAR else []
    return configured(SMALL, [*linear, *overrides, f"out={out}"], method=method)


def train(out, method, *overrides):
    return run_method(config_of(method, out, *overrides), QUIET, load=load_two_labels)


def weights(folder):
    return {n: v.flatten().tolist() for n, v in load_student(folder.student).network.state_dict().items()}
