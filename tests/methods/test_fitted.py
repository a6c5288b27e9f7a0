"""Settings from public facts: they are valid for every method and data set, and no record is read for them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from fairpate.config import ConfigError, DataConfig, EmbeddingConfig
from fairpate.data import REGISTRY
from fairpate.data.dataset import DatasetEntry
from fairpate.methods.base import configured, method_names, num_features
from fairpate.methods.defaults import default_method, fitted, fitted_to, resolved
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.mark.parametrize("name", list(method_names()))
@pytest.mark.parametrize("data", ["adult", "color_digits", "utkface"])
def test_every_method_gets_a_valid_configuration_of_its_own(name: str, data: str) -> None:
    values = fitted(DataConfig(name=data), name)
    config = configured(values, [f"data.name={data}"], method=name)
    assert config.method == name
    assert (config.data.embedding is None) == config.protects_attribute_only
    assert config.student.model.name == "logistic"


def test_nothing_is_opened_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    for entry in REGISTRY.values():
        monkeypatch.setattr(DatasetEntry, "load", refuse, raising=False)
        for pool in (None, 0, 100):
            assert fitted(DataConfig(name=entry.name, num_public=pool))["method"] == "residual_votes"


def test_sizes_follow_the_publisher_s_count_and_the_pool() -> None:
    def of_digits_and_adult(method: str, section: str, field: str) -> list[Any]:
        data_sets = DataConfig(name="color_digits"), DataConfig(name="adult", num_public=400)
        return [fitted(data, method)[section][field] for data in data_sets]

    assert of_digits_and_adult("dp_sgd", "dp_sgd", "batch_size") == [35, 512]
    # Half a dozen records each, at most 5,000 teachers; the whole pool is queried.
    assert of_digits_and_adult("fairpate", "teachers", "num_teachers") == [299, 5000]
    assert fitted(DataConfig(name="adult", num_public=4000), "fairpate")["aggregator"]["num_queries"] is None


@pytest.mark.parametrize(
    "chosen", ["teachers.model=logistic", "teachers.model={name: mlp, hidden: [8]}", "teachers.fit.epochs=3"]
)
def test_networks_as_teachers_keep_large_shards_and_few_queries(chosen: str) -> None:
    for data, teachers in (("color_digits", 20), ("adult", 488)):
        config: Any = resolved([f"data.name={data}", "data.num_public=1200", chosen], "fairpate")
        assert (config.teachers.num_teachers, config.aggregator.num_queries) == (teachers, 1000)
    few: Any = resolved(["data.name=adult", "data.num_public=400", chosen, "aggregator.release=label"], "fairpate")
    assert few.aggregator.num_queries is None


def test_small_teachers_are_fewer_where_only_their_labels_are_released() -> None:
    """A label shows nothing of a lead that no noise reverses."""
    of_release: list[Any] = [
        resolved(["data.name=adult", "data.num_public=5000", *more], "fairpate")
        for more in ((), ("aggregator.release=counts",), ("aggregator.release=label",))
    ]
    assert [each.teachers.num_teachers for each in of_release] == [5000, 5000, 1085]
    assert {each.teachers.model.name for each in of_release} == {"ridge"}


def test_more_features_are_read_where_more_of_them_can_be_heard() -> None:
    assert [num_features(5000, epsilon) for epsilon in (0.01, 0.1, 0.3, 1, 10, None)] == [10, 33, 50, 50, 50, 50]
    assert [num_features(100, 1), num_features(3000, 1, of_pictures=True)] == [15, 82]


def test_many_classes_of_few_records_are_counted() -> None:
    """Ten digits, 1,797 records: at .1 the noise of sums, 30.7 sqrt 5 in each of nine directions, is 206 for 180
    records of a class, and 1,797 / (4 x 30.7) = 14 counts stand out. At .03 no ten of them do."""
    chosen = {}
    for epsilon in (0.03, 0.1, 0.3, 3):
        overrides = ["data.name=color_digits", f"target.epsilon={epsilon}"]
        chosen[epsilon], why = default_method(overrides)
        assert resolved(overrides).method == chosen[epsilon]
        assert resolved(overrides, "residual_votes").method == "residual_votes"
        if epsilon == 0.1:
            assert all(words in why for words in ("norm would be 206", "180 records", "10 classes", "14 counts")), why
    assert chosen == {0.03: "residual_votes", 0.1: "record_votes", 0.3: "residual_votes", 3: "residual_votes"}


@pytest.mark.parametrize(
    "options", [["data.num_public=0"], ["residual_votes.clip=0.4"], ["residual_votes.curvature=private"]]
)
def test_counts_are_not_taken_without_a_pool_or_where_residual_votes_are_set(options: list[str]) -> None:
    assert resolved(["data.name=color_digits", "target.epsilon=0.1", *options]).method == "residual_votes"


@pytest.mark.parametrize("epsilon", ["inf", "1e-7"])
def test_a_target_without_noise_is_left_to_the_run(epsilon: str) -> None:
    assert resolved(["data.name=color_digits", f"target.epsilon={epsilon}"]).method == "residual_votes"


def test_two_classes_and_persons_are_never_counted() -> None:
    for name in ("adult", "communities", "compas", "parkinsons"):
        for epsilon in (0.003, 0.01, 0.03, 0.1, 1):
            assert default_method([f"data.name={name}", f"target.epsilon={epsilon}"])[0] == "residual_votes"


def test_few_records_have_few_components() -> None:
    def components(**data: Any) -> int:
        found: int = fitted(DataConfig(**data))["data"]["embedding"]["num_components"]
        return found

    assert [components(name=name) for name in ("color_digits", "adult")] == [17, 200]
    # Of 42 persons, or of their 5,875 recordings.
    assert [components(name="parkinsons", unit=unit) for unit in (None, "record")] == [10, 58]


def test_a_method_that_protects_the_attribute_alone_refuses_an_embedding(tmp_path: Any) -> None:
    data = DataConfig(
        options={"colour_as_feature": False}, embedding=EmbeddingConfig(num_components=5, graph_share=0.0)
    )
    config = configured({}, [f"out={tmp_path / 'run'}"], method="dp_postprocessing")
    with pytest.raises(
        ConfigError, match=r"data\.embedding: dp_postprocessing protects .* set data\.embedding to null"
    ):
        run_method(config.model_copy(update={"data": data}), Reporter(quiet=True))


def test_the_configuration_of_one_method_is_read_without_torch_and_other_methods() -> None:
    """Also where its settings are chosen for the data set; a section of another method is checked by that one alone."""
    program = """
import json, sys
from fairpate.methods.base import configured
from fairpate.methods.defaults import resolved

def loaded():
    return sorted(name for name in sys.modules if name == "torch" or name.startswith("fairpate.methods."))

configured({"dp_sgd": {"epochs": 3}}, [("target.epsilon", 2.0)], method="dp_sgd")
resolved(["data.name=color_digits"], "dp_sgd")
alone = loaded()
configured({"f_ld": {"epochs": 2}}, method="dp_sgd")
print(json.dumps([alone, loaded()]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    alone, with_others = json.loads(ended.stdout)
    assert alone == ["fairpate.methods.base", "fairpate.methods.defaults", "fairpate.methods.dp_sgd"]
    used = {"fairpate.methods.f_ld", "fairpate.methods.parity", "torch"}  # by F-LD itself
    assert set(with_others) - set(alone) <= used


def test_what_follows_from_the_sum_over_sites_counts_the_records_of_all() -> None:
    alone, together = (
        fitted_to("weighted_votes", count=2_000, num_public=1_000, num_sites=number) for number in (1, 5)
    )
    assert alone["data"]["embedding"]["num_components"] == 20
    assert together["data"]["embedding"]["num_components"] == 100
    teachers = [fitted_to("pate", count=2_000, num_public=1_000, num_sites=number)["teachers"] for number in (1, 5)]
    assert teachers[0]["num_teachers"] == teachers[1]["num_teachers"]
