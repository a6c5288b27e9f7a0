"""Files that serve several methods: what is left out, what is checked all the same, what is refused."""

from pathlib import Path

import pytest

from fairpate.config import ConfigError
from fairpate.methods.base import configured


def faults_of(values, *overrides, method=None):
    with pytest.raises(ConfigError) as caught:
        configured(values, overrides, method=method)
    return str(caught.value).splitlines()


def test_what_only_other_methods_read_is_left_out_of_a_file_and_refused_as_an_option(tmp_path: Path) -> None:
    shared = {"teachers": {"num_teachers": 5}, "aggregator": {"gate": {"max_disparity": 0.2}}, "dp_sgd": {"epochs": 2}}
    assert configured(shared, method="sgd") == configured({}, method="sgd")
    assert configured(shared, method="dp_sgd").dp_sgd.epochs == 2
    assert configured(shared, method="pate").teachers.num_teachers == 5
    assert not hasattr(configured(shared, method="pate").aggregator, "gate")
    (tmp_path / "run.yaml").write_text("method: fairpate\naggregator: {gate: {max_disparity: 0.2}}\n")
    assert configured(tmp_path / "run.yaml").aggregator.gate.max_disparity == 0.2
    told = faults_of({}, "dp_sgd.epochs=2", "aggregator.gate.max_disparity=0.2", method="pate")
    assert told == [
        "dp_sgd.epochs: pate does not read it; leave it out.",
        "aggregator.gate.max_disparity: pate does not read it; leave it out.",
    ]


def test_a_path_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("method: dp_sgd\n", encoding="utf-8")
    assert configured(str(tmp_path / "one.yaml")) == configured(tmp_path / "one.yaml")
    with pytest.raises(ConfigError, match=r"two\.yaml: no such file; give the path of a YAML file"):
        configured(str(tmp_path / "two.yaml"))


def test_all_faults_are_told_at_once_whoever_reads_the_field() -> None:
    values = {
        "dp_sgd": {"epochs": "many", "epoch": 3},
        "pf_ld": {"clip_norm": -1},
        "aggregatr": {},
        "teachers.num_teachers": 5,
        "seed": -1,
        "student": {"model.name": "mlp"},
    }
    told = faults_of(values, "sgd.epoch=3", method="sgd")
    for start, words in (
        ("dp_sgd.epochs: ", "expected a number"),
        ("dp_sgd.epoch: ", "did you mean epochs"),
        ("pf_ld.clip_norm: ", "expected > 0"),
        ("aggregatr: ", "did you mean aggregator"),
        ("teachers.num_teachers: ", "unknown field"),
        ("seed: ", "expected >= 0"),
        ("student.model.name: ", "unknown field"),
        ("sgd.epoch: ", "did you mean epochs"),
    ):
        assert sum(fault.startswith(start) and words in fault for fault in told) == 1, (start, told)
    assert len(told) == 8


def test_a_part_of_a_section_that_another_method_needs_whole_is_taken_where_its_defaults_complete_it() -> None:
    assert configured({"aggregator": {"gate": {"max_disparity": 0.2}}}, method="dp_sgd").method == "dp_sgd"
    told = faults_of({"aggregator": {"budget": {"accept_leak": True}}}, method="dp_sgd")
    assert [fault.partition(":")[0] for fault in told] == ["aggregator.budget"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a {b: *a}\n", "an anchor contains itself"),
        ("data: &a\n  options: *a\n", "an anchor contains itself"),
        (
            f"seed: &a0 [x, x]\n{''.join(f'a{n}: &a{n} [*a{n - 1}, *a{n - 1}]{chr(10)}' for n in range(1, 40))}",
            "100000",
        ),
    ],
)
def test_anchors_that_never_end_are_refused_before_they_are_written_out(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        configured(path)
    assert len(str(caught.value)) < 300
    path.write_text("student: {model: &small {name: logistic}}\nteachers: {model: *small}\n")
    assert configured(path).teachers.model.name == "logistic"


def test_two_options_that_name_different_methods_are_told() -> None:
    assert configured({"method": "pate"}, method="sgd").method == "sgd"
    assert configured({"method": "pate"}, ["method=sgd"], method="sgd").method == "sgd"
    assert faults_of({}, "method=pate", method="sgd") == [
        "method: sgd is asked for, and --set says pate; leave one of them out."
    ]
