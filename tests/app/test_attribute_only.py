"""Methods that protect the sensitive attribute alone refuse it as a feature, in commands and sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairpate.app.compare.cells import cells_of
from fairpate.app.run import run_method
from fairpate.app.terminal.progress import Reporter
from fairpate.compare_config import SweepConfig
from fairpate.config import ConfigError
from fairpate.config_reader import parse_config
from fairpate.data import REGISTRY
from fairpate.data.registry import option_showing_attribute
from fairpate.methods.load import configured

REFUSING = (
    ["method=f_ld"],
    ["method=covariance_constraint"],
    ["method=pf_ld"],
    ["method=pf_ld", "pf_ld.form=as_in_paper"],
    ["method=sf_pate"],
    ["method=sf_pate", "sf_pate.variant=sf_t"],
    ["method=dp_postprocessing"],
    ["method=dp_oracle_learner", "student.model.name=logistic"],
    ["method=randomised_response", "student.model.name=logistic"],
    ["method=dp_fermi", "dp_fermi.mode=sens_public_batches"],
)
PROTECTING_RECORDS = (
    ["method=dp_fermi"],
    ["method=dp_postprocessing", "dp_postprocessing.base=dp_sgd"],
    ["method=pate"],
    ["method=raco_dp"],
)
SHOWN = (
    ("colour_as_feature", ["data.name=color_digits"]),
    ("colour_as_feature", ["data.name=color_digits", "data.options={sensitive: label}"]),
    ("sensitive_as_feature", ["data.name=adult", "data.options={sensitive_as_feature: true}"]),
    ("sensitive_as_feature", ["data.name=bank", "data.options={sensitive: marital, sensitive_as_feature: true}"]),
)


def train(out: Path, *overrides: str) -> None:
    run_method(configured({}, [*overrides, f"out={out}"]), Reporter(quiet=True))


@pytest.mark.parametrize("settings", REFUSING, ids=" ".join)
@pytest.mark.parametrize(("option", "data"), SHOWN)
def test_a_command_is_refused_before_data_are_read(
    settings: list[str], option: str, data: list[str], tmp_path: Path
) -> None:
    method = settings[0].removeprefix("method=")
    refusal = (
        rf"^data\.options\.{option}: {method} protects the sensitive attribute alone .* set it to false, or choose"
    )
    with pytest.raises(ConfigError, match=refusal):
        train(tmp_path / "run", *settings, *data, f"data.data_dir={tmp_path / 'nowhere'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("settings", PROTECTING_RECORDS, ids=" ".join)
def test_methods_that_protect_whole_records_go_on_to_read_data(settings: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such data folder"):
        train(tmp_path / "run", *settings, *SHOWN[2][1], f"data.data_dir={tmp_path / 'nowhere'}")


@pytest.mark.parametrize("settings", REFUSING, ids=" ".join)
def test_an_attribute_out_of_sight_is_no_reason_to_refuse(settings: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: no such data folder"):
        train(tmp_path / "run", *settings, "data.name=adult", f"data.data_dir={tmp_path / 'nowhere'}")


def test_every_option_that_shows_an_attribute_says_so() -> None:
    for entry in REGISTRY.values():
        showing = {name for name in entry.options if name in ("sensitive_as_feature", "colour_as_feature")}
        assert {name for name, option in entry.options.items() if option.shows_attribute} == showing
        for name in showing:
            assert option_showing_attribute(entry.name, {name: True}) == name
            assert option_showing_attribute(entry.name, {name: False}) is None
    assert option_showing_attribute("no data set", {"sensitive_as_feature": True}) is None


def test_a_sweep_lists_them_with_its_other_faults() -> None:
    values: dict[str, Any] = {
        "data_sets": {"color_digits": None},
        "methods": {
            "dp_sgd": {"grid": {"dp_sgd.epochs": [-1]}},
            "pf_ld": None,
            "sf_pate": {"settings": {"data.options.colour_as_feature": True}},
            "f_ld": {"settings": {"data.options.colour_as_feature": False}},
        },
    }
    with pytest.raises(ConfigError) as raised:
        cells_of(parse_config(values, SweepConfig), folder=Path())
    faults = str(raised.value).splitlines()
    assert len(faults) == 3
    assert "dp_sgd.epochs" in faults[0]
    assert faults[1].startswith("data_sets.color_digits: data.options.colour_as_feature: pf_ld protects")
    assert faults[2].startswith("methods.sf_pate.settings.data.options.colour_as_feature: sf_pate protects")
