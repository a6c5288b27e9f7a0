"""Methods that protect the sensitive attribute alone: refused as a feature, and told by no name, place or order."""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fairpate.config import ConfigError, SweepConfig, parse_config
from fairpate.data import REGISTRY, DataError, load_data
from fairpate.data.dataset import Split
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_labels
from fairpate.run.folder import as_trained
from fairpate.run.run import run_method
from fairpate.run.sweep import cells_of
from fairpate.terminal import Reporter
from fairpate.types import REMARKS
from teachers.ensemble import assign_teachers, shard_key

pytestmark = pytest.mark.usefixtures("light_runs")

REFUSING = (
    ["method=f_ld"],
    ["method=covariance_constraint"],
    ["method=pf_ld"],
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
            assert entry.option_showing_attribute({name: True}) == name
            assert entry.option_showing_attribute({name: False}) is None


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


DECLARED = """name: clinic
rows: 600
files:
  records: [{path: clinic.csv}]
features:
  age: {bounds: [20, 200]}
  dose: {bounds: [0, 3]}
label: {column: ill, classes: ["no", "yes"]}
group: {column: sex, values: [f, m]}
num_public: 50
num_validation: 0
num_test: 50
"""
Row = tuple[int, int, str, str]
"""Age, dose, illness and sex."""


def declared(folder: Path, rows: Sequence[Row], undeclared: str) -> Path:
    """The rows as a table with one column that nobody declared, which tells the sex."""
    folder.mkdir()
    lines = [f"{age},{dose},{undeclared[sex == 'm']},{ill},{sex}\n" for age, dose, ill, sex in rows]
    (folder / "clinic.csv").write_text("age,dose,salutation,ill,sex\n" + "".join(lines), encoding="utf-8")
    (folder / "clinic.yaml").write_text(DECLARED, encoding="utf-8")
    return folder / "clinic.yaml"


def sorted_by_sex() -> list[Row]:
    """600 rows, of which many differ in nothing but the sex."""
    draws = np.random.default_rng(0).integers([20, 0, 0, 0], [200, 3, 2, 2], size=(600, 4)).tolist()
    rows = [(age, dose, ("no", "yes")[ill], "fm"[sex]) for age, dose, ill, sex in draws]
    return sorted(rows, key=lambda row: row[3])


def released(declaration: Path, out: Path, *overrides: str) -> RunDirectory:
    settings = (
        *("method=sf_pate", "student.model.name=logistic", "teachers.num_teachers=5", "teachers.fit.epochs=1"),
        *("teachers.model.name=logistic", "target.epsilon=50", "f_ld={warmup_epochs: 1, epochs: 1}", "noise=seeded"),
        *("aggregator.mechanism={threshold: 0, threshold_stddev_votes: 1, noise_stddev_votes: 1}", "ray.num_actors=0"),
    )
    values = {"data": {"name": "clinic", "declaration": str(declaration)}}
    return run_method(configured(values, [*settings, f"out={out}", *overrides]), Reporter(quiet=True))


def test_swapped_attributes_of_equals_and_a_reversed_file_change_labels_alone(tmp_path: Path) -> None:
    rows = sorted_by_sex()
    # Between rows that are equal but for the sex, the sexes go round; then the file is turned.
    places = defaultdict(list)
    for place, row in enumerate(rows):
        places[row[:3]].append(place)
    swapped = list(rows)
    for alike in places.values():
        for place, other in zip(alike, [*alike[1:], alike[0]], strict=True):
            swapped[place] = rows[other]
    assert swapped != rows
    first = released(declared(tmp_path / "a", rows, "FM"), tmp_path / "run")
    second = released(declared(tmp_path / "b", swapped[::-1], "XY"), tmp_path / "other")
    labelled, again = read_labels(first.labels), read_labels(second.labels)
    assert labelled.record_ids == again.record_ids
    assert len(set(labelled.record_ids)) == len(labelled.record_ids) < len(rows)
    assert not [name for name in labelled.record_ids if name.count("-") > 1]  # no counter
    named = sorted(path.name for path in first.public.iterdir())
    assert named == sorted(path.name for path in second.public.iterdir())
    assert {"labels.parquet", "record.json", "report.html", "statement.json"} <= set(named)
    for name in set(named) - {"labels.parquet"}:
        assert (first.public / name).read_bytes() == (second.public / name).read_bytes(), name
    private, turned = (load_data(tmp_path / folder / "clinic.yaml").private for folder in "ab")
    assert sorted(private.unit_id) == sorted(turned.unit_id)
    key = shard_key(0)
    shards = [
        Counter(zip(assign_teachers(split.unit_id, 5, key).tolist(), split.unit_id, strict=True))
        for split in (private, turned)
    ]
    assert shards[0] == shards[1]


def test_the_order_of_public_names_tells_no_group_of_a_sorted_file(tmp_path: Path) -> None:
    declaration = declared(tmp_path / "a", sorted_by_sex(), "FM")
    run = released(declaration, tmp_path / "run")
    private = private_of(declaration, run)
    groups_of, unit_of = defaultdict(list), dict(zip(private.record_id, private.unit_id, strict=True))
    for unit, group in zip(private.unit_id, private.z.tolist(), strict=True):
        groups_of[unit].append(group)
    named = [groups_of[unit_of[name]] for name in read_labels(run.labels).record_ids]
    places = [np.flatnonzero([groups == {group} for groups in map(set, named)]) for group in (0, 1)]
    assert min(map(len, places)) > 100
    assert stats.ks_2samp(*places).pvalue > 1e-3


def private_of(declaration: Path, run: RunDirectory) -> Split:
    """Private records as the run of :func:`released` had them."""
    config = configured(
        {"data": {"name": "clinic", "declaration": str(declaration)}}, ["method=sf_pate", "noise=seeded"]
    )
    return as_trained(run, config, load_data(declaration)).private


def test_a_key_that_counts_the_rows_of_a_sorted_file_is_not_published(tmp_path: Path) -> None:
    declaration = declared(tmp_path / "a", sorted_by_sex(), "FM")
    header, *lines = (tmp_path / "a" / "clinic.csv").read_text(encoding="utf-8").splitlines()
    numbered = [f"row,{header}", *(f"{row:03},{line}" for row, line in enumerate(lines))]
    (tmp_path / "a" / "clinic.csv").write_text("\n".join(numbered) + "\n", encoding="utf-8")
    declaration.write_text(f"{DECLARED}identity: {{key: row}}\n", encoding="utf-8")
    run = released(declaration, tmp_path / "run")
    names, private = read_labels(run.labels).record_ids, private_of(declaration, run)
    assert private.unit_id[0].startswith("clinic-")
    assert set(names).isdisjoint(private.unit_id)
    group_of = dict(zip(private.record_id, private.z.tolist(), strict=True))
    groups = np.array([group_of[name] for name in sorted(names)])
    places = [np.flatnonzero(groups == group) for group in (0, 1)]
    assert min(map(len, places)) > 100
    assert stats.ks_2samp(*places).pvalue > 1e-3


def test_a_column_that_nobody_declared_is_in_no_name(tmp_path: Path) -> None:
    rows = sorted_by_sex()
    names = [list(load_data(declared(tmp_path / words, rows, words)).private.record_id) for words in ("FM", "MF", "XX")]
    assert names[0] == names[1] == names[2]


def test_the_order_among_equals_is_drawn_for_each_private_run(tmp_path: Path) -> None:
    declaration = declared(tmp_path / "a", sorted_by_sex(), "FM")
    dataset = load_data(declaration)
    config = configured({"data": {"name": "clinic", "declaration": str(declaration)}}, ["method=sf_pate"])
    runs = [RunDirectory(root=tmp_path / name) for name in ("one", "two")]
    first, again, second = (as_trained(run, config, dataset).private for run in (runs[0], runs[0], runs[1]))
    assert torch.equal(first.z, again.z)
    assert first.record_id == again.record_id
    assert first.unit_id == again.unit_id == second.unit_id
    assert set(first.record_id).isdisjoint(second.record_id)
    assert torch.equal(first.x, second.x)
    assert not torch.equal(first.z, second.z)
    assert stat.S_IMODE((runs[0].private / "order.key").stat().st_mode) == 0o600
    runs[0].receipt.write_text("{}")
    (runs[0].private / "order.key").unlink()
    with pytest.raises(RunDirectoryError, match=r"order\.key: missing, although a release"):
        as_trained(runs[0], config, dataset)


WRITTEN = """name: clinic
rows: 600
files:
  records: [{path: women.csv}, {path: men.csv}]
features:
  age: {bounds: [20, 60], unknown: [none, "0"]}
  ward: {categories: [A, B], aliases: {a: A}, other: true}
keep: [{column: pregnant, other_than: ["yes"]}]
label: {column: ill, classes: {"no": {at_most: 3}, "yes": {above: 3}}}
group: {column: sex, values: [f, m]}
num_public: 50
num_validation: 0
num_test: 50
"""


def test_a_name_does_not_tell_how_a_file_writes_its_values(tmp_path: Path) -> None:
    # One meaning in two ways: a program per file, an alias, two words that are no category, a clipped number.
    ways = {
        "f": (["30", "60", "none", "0"], ["A", "Mrs"], ["1", "5"], "no"),
        "m": (["30.0", "75", "", "0.0"], ["a", "Mr"], ["3", "4.5"], ""),
    }
    head = "age,ward,pregnant,ill,sex\n"
    draws = np.random.default_rng(0).integers([4, 2, 2], size=(300, 3)).tolist()
    for name, sex in (("women", "f"), ("men", "m")):
        ages, wards, ills, pregnant = ways[sex]
        lines = (f"{ages[age]},{wards[ward]},{pregnant},{ills[ill]},{sex}\n" for age, ward, ill in draws)
        (tmp_path / f"{name}.csv").write_text(head + "".join(lines), encoding="utf-8")
    (tmp_path / "clinic.yaml").write_text(WRITTEN, encoding="utf-8")
    private = load_data(tmp_path / "clinic.yaml").private
    sexes_of, names_of = defaultdict(set), defaultdict(set)
    for row, unit in enumerate(private.unit_id):
        sexes_of[unit].add(int(private.z[row]))
        names_of[private.x[row].numpy().tobytes(), int(private.y[row])].add(unit)
    assert len(names_of) > 8
    assert {len(names) for names in names_of.values()} == {1}
    assert {len(sexes) for sexes in sexes_of.values()} == {2}


@pytest.mark.parametrize("named", ["identity: {key: path}", "identity: {text: [path, name]}", "person: path"])
def test_the_path_of_a_picture_in_a_folder_of_its_group_names_nothing(named: str, tmp_path: Path) -> None:
    text = (
        "name: pets\nkind: images\nrows: 9\nfiles: {records: pets}\npictures: {size: 8}\n"
        "label: {column: level_1, classes: [cat, dog]}\ngroup: {column: level_2, values: [women, men]}\n"
    )
    (tmp_path / "pets.yaml").write_text(f"{text}{named}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"(identity|person): path may be the sensitive attribute, or reveals it"):
        load_data(tmp_path / "pets.yaml")


def test_that_reading_tells_is_stated_of_frames_too(tmp_path: Path) -> None:
    dataset = load_data(declared(tmp_path / "a", sorted_by_sex(), "FM"))
    settings = ["method=randomised_response", "student.model.name=logistic", f"out={tmp_path / 'run'}"]
    run = run_method(configured({}, settings), Reporter(quiet=True), dataset)
    assert REMARKS["reading_tells"] in json.loads(run.statement.read_text(encoding="utf-8"))["remarks"]
