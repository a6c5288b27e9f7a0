"""Every number of every configuration has a range, and what lies outside is refused with the field and the range."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from fairpate.config import ConfigError, SweepConfig, parse_config
from fairpate.methods.base import all_methods, configured

pytestmark = pytest.mark.usefixtures("light_runs")

HUGE, INTEGER, SEED = 1e12, 2**31 - 1, 2**63 - 1
# What each range leaves out: numbers just beyond its ends. By field, or by section and field where names are shared.
AT_LEAST_0 = [-1e-9, 2 * HUGE]
ABOVE_0 = [0.0, -1.0, 2 * HUGE]
SHARE = [-1e-9, 1 + 1e-9]
INSIDE_0_1 = [0.0, 1.0]
BELOW_1 = [-1e-9, 1.0]
COUNT = [0, -1, INTEGER + 1]
COUNT_OR_0 = [-1, INTEGER + 1]
BEYOND: dict[str, Sequence[float]] = {
    **dict.fromkeys(["seed", "seeds"], (-1, SEED + 1)),
    **dict.fromkeys(["num_test", "num_queries", "num_records", "max_records", "block_size", "least_cell"], COUNT),
    **dict.fromkeys(["max_shard_size", "num_prototypes", "num_components", "num_neighbours"], COUNT),
    **dict.fromkeys(["batch_size", "public_batch_size", "width", "hidden", "pretrain"], COUNT),
    **dict.fromkeys(["torch_threads", "records_per_person", "num_rounds", "num_directions", "max_queries"], COUNT),
    **dict.fromkeys(["num_public", "num_validation", "max_retries", "reference_group", "positive_label"], COUNT_OR_0),
    **dict.fromkeys(["label", "min_count", "warmup_epochs", "epochs", "num_actors"], COUNT_OR_0),
    "keep": [-1e-9, 0.9 + 1e-9],
    "DpSgdConfig.epochs": ABOVE_0,
    **dict.fromkeys(["public_rounds", "private_rounds"], COUNT),
    "FairRule.limit": (0.0, -0.1, 1 + 1e-9),
    "ResidualVotesConfig.clip": (0.0, 1 + 1e-9),
    "ResidualVotesConfig.step": [0.0, -1.0, 4.0],
    "num_teachers": [1, 0, -1, INTEGER + 1],
    "num_features": COUNT,
    "num_bins": [1, 0, -1, INTEGER + 1],
    "share": BELOW_1,
    "penalty": ABOVE_0,
    "AdmissionConfig.rounds": [1, 0, INTEGER + 1],
    "rotation_degrees": [-1e-9, 180.1],
    "shear_degrees": [-1e-9, 90.0],
    **dict.fromkeys(["translation_fraction", "scale_fraction", "elastic_fraction"], BELOW_1),
    **dict.fromkeys(["momentum", "label_smoothing"], BELOW_1),
    **dict.fromkeys(
        ["channel_swap", "horizontal_flip", "max_gap", "mixing_gap", "averaged_share", "graph_share"], SHARE
    ),
    **dict.fromkeys(["shares"], SHARE),
    **dict.fromkeys(["target_delta", "delta", "count_share", "failure_probability"], INSIDE_0_1),
    **dict.fromkeys(["frequency_share", "feature_share", "dual_share", "size_share", "histogram_share"], INSIDE_0_1),
    "RacoDpConfig.size_share": BELOW_1,
    "test_share": INSIDE_0_1,
    "score_edges": [-1e-9, 0.0, 1.0, 1 + 1e-9],
    "validation_share": BELOW_1,
    "min_share": [0.0, -1.0, 1.1],
    **dict.fromkeys(["confidence", "min_group_share", "taught_share", "ridge_share", "sampling_rate"], (0.0, 1 + 1e-9)),
    **dict.fromkeys(["learning_rate", "epsilon", "beta", "noise_stddev", "scale_noise_stddev", "num_cpus"], ABOVE_0),
    **dict.fromkeys(["clip_norm", "clip_value", "temperature", "max_temperature", "ridge", "sharpness"], ABOVE_0),
    **dict.fromkeys(["group_sizes", "radius", "matrix_learning_rate", "matrix_noise_ratio", "share_noise"], ABOVE_0),
    "max_minutes": ABOVE_0,
    "max_error": (0.0, -1.0, 1.0),
    "RandomisedResponseConfig.dual_bound": ABOVE_0,
    "order": [1.0, 0.0, 2 * HUGE],
    **dict.fromkeys(["weight_decay", "num_gpus", "wait_for_nodes_s", "weight"], AT_LEAST_0),
    **dict.fromkeys(["dual_bound", "dual_step", "max_multiplier", "tolerance"], AT_LEAST_0),
    "dual_learning_rate": AT_LEAST_0,
    "PrivacyTarget.epsilon": [0.0, -1.0],
    "max_covariance": [-1e-9, -1.0, -math.inf],
    "bound": [-1 - 1e-9, 1 + 1e-9],
    **dict.fromkeys(["GateRule.max_disparity", "GateConfig.max_disparity"], (-1e-9, -1.0, -math.inf)),
    "threshold": [2.0**24, -(2.0**24)],
    **dict.fromkeys(["threshold_stddev_votes", "noise_stddev_votes"], (0.0, -1.0, 2.0**24)),
}
MAY_BE_INFINITE = {
    "PrivacyTarget.epsilon": [math.inf],
    "GateRule.max_disparity": [math.inf],
    "GateConfig.max_disparity": [math.inf],
    "CovarianceConfig.max_covariance": [math.inf],
    "MechanismParameters.threshold": [math.inf, -math.inf],
}
# What makes a section that is left out by default a valid one.
BASES: dict[str, Any] = {
    "aggregator.budget": {"epsilon": 1.0},
    "aggregator": {"num_queries": 100},
    "student.idp3": {"max_disparity": 0.1, "min_count": 1},
    "student.reject": {"max_error": 0.1},
    "record_votes.gate": {"max_disparity": 0.1, "min_count": 1},
    "weighted_votes.gate": {"max_disparity": 0.1, "min_count": 1},
    "residual_votes.gate": {"max_disparity": 0.1, "min_count": 1},
    "teacher_votes.gate": {"max_disparity": 0.1, "min_count": 1},
    "ada_ssp.gate": {"max_disparity": 0.1, "min_count": 1},
    "aggregator.gate": {"max_disparity": 0.1, "min_count": 1},
    "aggregator.mechanism": {"threshold": 60.0, "threshold_stddev_votes": 30.0, "noise_stddev_votes": 12.0},
}


def parts(annotation: Any) -> list[Any]:
    """The types in an annotation, without None, Annotated and the containers around them."""
    arguments = get_args(annotation)
    if not arguments or get_origin(annotation) is dict:
        return [annotation]
    return [part for argument in arguments for part in parts(argument) if isinstance(part, type)]


def numbers(section: type, path: str = ""):
    """(dotted path, its section, its field) of every number in a section and the sections in it."""
    is_model = issubclass(section, BaseModel)
    fields = section.model_fields if is_model else {field.name: field for field in dataclasses.fields(section)}
    hints = get_type_hints(section, include_extras=False)
    for name in fields:
        place = f"{path}.{name}" if path else name
        for part in parts(hints[name]):
            if part in (int, float):
                yield place, section.__name__, name
            elif isinstance(part, type) and (issubclass(part, BaseModel) or dataclasses.is_dataclass(part)):
                yield from numbers(part, place)


def with_value(path: str, value: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    section, prefix = values, ""
    *parents, field = path.split(".")
    for name in parents:
        prefix = f"{prefix}.{name}" if prefix else name
        section = section.setdefault(name, dict(BASES.get(prefix, {})))
    section[field] = value
    return values


# A constraint is right or wrong as a whole: tests/fairness/test_rate_constraints.py holds what its records refuse.
WHOLE = "raco_dp.constraints."
METHOD_OF = {
    number: name
    for name, method in all_methods().items()
    for number in numbers(method)
    if not number[0].startswith(WHOLE)
}
"""Every number of every method, once where methods share it, and a method that has it."""
NUMBERS = [(method, *number) for number, method in METHOD_OF.items()] + [
    ("sweep", *number) for number in numbers(SweepConfig) if number[1] in ("SweepConfig", "TasksConfig")
]
SWEEP = {"data_sets": ["color_digits"], "methods": ["sgd"]}


def declared(method: str, path: str) -> list[float]:
    """Numbers just beyond the range that a field declares, for the fields of new methods: BEYOND need not know them."""
    section: Any = SweepConfig if method == "sweep" else all_methods()[method]
    *parents, field = path.split(".")
    for name in parents:
        (section,) = (part for part in parts(section.model_fields[name].annotation) if issubclass(part, BaseModel))
    found = []
    for bound in section.model_fields[field].metadata:
        found += [bound.gt] if hasattr(bound, "gt") else [bound.ge - 1] if hasattr(bound, "ge") else []
        found += [bound.lt] if hasattr(bound, "lt") else [bound.le + 1] if hasattr(bound, "le") else []
    return found


def shaped(field: str, value: float) -> Any:
    wrapped = {"hidden": [value], "seeds": [value], "group_sizes": [value], "shares": [[value]]}
    wrapped["score_edges"] = [value]
    return wrapped.get(field, value)


def parsed(values, method):
    return parse_config(SWEEP | values, SweepConfig) if method == "sweep" else configured(values, method=method)


def test_the_walk_finds_the_numbers_of_every_section():
    found = {path for _, path, _, _ in NUMBERS}
    assert len(found) > 150
    assert {"aggregator.gate.max_disparity", "augment.channel_swap", "tasks.max_minutes", "seeds"} <= found


@pytest.mark.parametrize(("method", "path", "section", "field"), NUMBERS, ids=[number[1] for number in NUMBERS])
def test_a_number_outside_its_range_is_refused_with_its_field(method, path, section, field):
    name = f"{section}.{field}" if f"{section}.{field}" in BEYOND else field
    beyond = BEYOND.get(name) or declared(method, path)
    assert beyond, f"give {section}.{field} a range"
    infinite = {math.inf, -math.inf} - set(MAY_BE_INFINITE.get(f"{section}.{field}", []))
    for value in [*beyond, math.nan, *infinite, "many"]:
        with pytest.raises(ConfigError) as refused:
            parsed(with_value(path, shaped(field, value)), method)
        assert all(word in str(refused.value) for word in path.split(".")), (value, str(refused.value))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("dp_sgd", "target.epsilon"),
        ("covariance_constraint", "covariance_constraint.max_covariance"),
        ("fairpate", "aggregator.gate.max_disparity"),
        ("fairpate", "aggregator.mechanism.threshold"),
    ],
)
def test_numbers_that_may_be_infinite(method, path):
    assert parsed(with_value(path, math.inf), method)


def test_a_range_is_told_on_the_command_line(fairpate, tmp_path):
    code, _, errors = fairpate("run", "--set", "aggregator.gate.max_disparity=-1")
    assert code == 2
    assert "aggregator.gate.max_disparity: expected >= 0, got -1" in errors
    assert not list(tmp_path.iterdir())
