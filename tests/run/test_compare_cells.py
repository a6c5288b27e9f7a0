"""From a sweep to cells: how many, with which settings, and what is said of those that cannot run."""

import copy
import hashlib
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from method_kinds import quick_and_slow
from scipy.stats import norm
from sweeps import measured

from fairpate.config import ConfigError, SweepConfig, parse_config
from fairpate.methods.base import Method, config_digest, method_names
from fairpate.methods.defaults import resolved
from fairpate.privacy.accountant import PoissonGaussians
from fairpate.releases.directory import RunDirectory, write_json
from fairpate.releases.odometer import RunCharge, charge_values
from fairpate.run.cost_of_choice import choices
from fairpate.run.sweep import Cell, SweepFolder, cells_of, load_sweep

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = Path(__file__).parents[2] / "fairpate" / "examples"
SWEEPS = sorted(
    [
        *(EXAMPLES / f"{name}.yaml" for name in ("demo", "quick")),
        *(CONFIGS / f"{name}.yaml" for name in ("frontier", "faces", "cluster")),
        *(CONFIGS / "paper").glob("*.yaml"),
        *(CONFIGS / "published").glob("frontier_*.yaml"),
    ]
)


def cells(folder: Path = Path(), **values: Any) -> list[Cell]:
    defaults: dict[str, Any] = {"data_sets": ["color_digits"], "methods": ["dp_sgd"]}
    return cells_of(parse_config(defaults | values, SweepConfig), folder=folder)


def test_cells_are_the_product_of_data_sets_seeds_methods_and_grids() -> None:
    found = cells(
        data_sets={"color_digits": None, "small": {"settings": {"data.name": "color_digits", "data.num_test": 100}}},
        seeds=[0, 5],
        grid={"target.epsilon": [1, 2]},
        methods={"dp_sgd": None, "fair_dp_sgd": {"grid": {"fair_dp_sgd.weight": [0.1, 0.2, 0.3]}}},
    )
    # Per data set and seed: two epsilons of DP-SGD, two by three of FairDP-SGD.
    assert len(found) == len({cell.digest for cell in found}) == 2 * 2 * (2 + 6)
    assert [(cell.data, cell.config.seed) for cell in found[::8]] == [
        ("color_digits", 0),
        ("color_digits", 5),
        ("small", 0),
        ("small", 5),
    ]
    assert all(cell.config.data.seed == cell.config.seed for cell in found)
    assert {cell.config.data.num_test for cell in found if cell.data == "small"} == {100}
    weights = [cell.config.fair_dp_sgd.weight for cell in found[:8] if cell.method == "fair_dp_sgd"]
    assert weights == [0.1, 0.2, 0.3] * 2


def test_a_declaration_in_the_place_of_a_configuration_is_told_from_one(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("name: own\nfiles: {private: own.csv}\nlabel: {column: y, classes: [a, b]}\n")
    with pytest.raises(ConfigError) as refused:
        cells(tmp_path, data_sets={"own": {"file": "own.yaml"}})
    assert str(refused.value) == (
        "data_sets.own.file: own.yaml is a declaration of records, not a configuration; give own: {settings: "
        "{data.declaration: own.yaml}}, under the name that it declares."
    )


def test_a_choice_among_cells_costs_their_releases_together(tmp_path: Path) -> None:
    """By hand: two tables, each shared by two cells, and one DP-SGD: .9 + 1.9 + 1 at three times delta. With receipts:
    three sums with noise s are one with noise s / sqrt(3), whose exact delta at that epsilon is in closed form."""
    found = cells(
        methods={
            "weighted_votes": {
                "grid": {"target.epsilon": [1, 2], "student.idp3": [None, {"max_disparity": 0.1, "min_count": 9}]}
            },
            "dp_sgd": {"settings": {"target.epsilon": 1}},
            "sgd": None,
        }
    )
    costs = {"weighted_votes": -0.1, "dp_sgd": 0.0}
    rows = [
        measured(cell, cell.config.target.epsilon + costs[cell.method] if cell.method in costs else math.inf)
        for cell in found
    ]
    assert len(rows) == 6
    folder = SweepFolder(root=tmp_path)
    choice = choices(found, rows, folder)["color_digits"]
    assert (choice.num_releases, choice.epsilon, choice.delta) == (3, pytest.approx(3.8), 3e-5)
    noise = 4.5
    for cell in found[:-1]:
        shared = folder.shared_file(cell)
        receipt = RunDirectory(root=folder.run(cell) if shared is None else shared.parents[1]).receipt
        # Written by both cells that share it, under one name: charged once.
        release = RunCharge(
            run=receipt.parts[-3],
            data="color_digits",
            unit="record",
            relation="add or remove one",
            noise="secure",
            method=cell.method,
            path=str(receipt),
            events=(PoissonGaussians(count=1, noise_multiplier=noise, sampling_rate=1),),
        )
        receipt.parent.mkdir(parents=True, exist_ok=True)
        write_json(receipt, charge_values(release), private=True)
        if shared is None:
            alone = receipt
    statements = [RunDirectory(root=folder.run(cell)).statement for cell in found[:-1]]
    for statement in statements:
        statement.parent.mkdir(parents=True, exist_ok=True)
        statement.write_text("{}")
    choice = choices(found, rows, folder)["color_digits"]
    assert choice.num_releases == 3 and choice.epsilon is not None and choice.delta == 1e-5
    mu = math.sqrt(3) / noise
    exact = norm.cdf(mu / 2 - choice.epsilon / mu) - math.exp(choice.epsilon) * norm.cdf(-mu / 2 - choice.epsilon / mu)
    assert 0.98e-5 < exact <= 1e-5
    # A run, or a receipt, on another machine: the events of its release, or of its measurements, are not known.
    for missing in (statements[0], alone):
        content = missing.read_bytes()
        missing.unlink()
        assert choices(found, rows, folder)["color_digits"].epsilon == pytest.approx(3.8)
        missing.write_bytes(content)
    # One release, whatever is learned from it; results that are missing cost nothing; seeded noise is not private.
    assert choices(found, rows[:2], folder) == {}
    failed = [replace(row, record=None, error="failed") for row in rows[1:]]
    assert choices(found, [rows[0], *failed], folder) == {}
    seeded = cells(settings={"noise": "seeded"}, grid={"target.epsilon": [1, 2]})
    assert choices(seeded, [measured(cell, 1.0) for cell in seeded], folder) == {}
    # Costs per record and per person do not add up.
    rows[-2] = replace(rows[-2], record=replace(rows[-2].record, unit="person"))
    choice = choices(found, rows, folder)["color_digits"]
    assert (choice.num_releases, choice.epsilon) == (3, None)


def test_a_method_runs_where_it_is_told_to() -> None:
    two = {"color_digits": None, "small": {"settings": {"data.name": "color_digits", "data.num_test": 100}}}
    found = cells(data_sets=two, methods={"sgd": None, "dp_sgd": {"data_sets": ["small"]}})
    assert [(cell.data, cell.method) for cell in found] == [
        ("color_digits", "sgd"),
        ("small", "sgd"),
        ("small", "dp_sgd"),
    ]
    with pytest.raises(ConfigError) as caught:
        cells(data_sets=two, methods={"dp_sgd": {"data_sets": ["smal", "adult"]}}, grid={"target.epsilon": [0]})
    faults = str(caught.value).splitlines()
    assert faults[0] == (
        "methods.dp_sgd.data_sets: unknown data set smal; did you mean small? known: color_digits, small."
    )
    assert faults[1].startswith("methods.dp_sgd.data_sets: unknown data set adult; known")


def test_what_the_sweep_itself_says_is_refused_in_settings_and_grids() -> None:
    with pytest.raises(ConfigError) as caught:
        cells(
            settings={"data": {"seed": 3}, "ray.num_actors": 2},
            grid={"seed, data.num_test": [1, 2]},
            data_sets={"color_digits": {"settings": {"out": "here"}}},
            methods={"dp_sgd": {"grid": {"method": ["pate", "sgd"]}}},
        )
    faults = str(caught.value)
    for fault in (
        "settings.ray.num_actors: a sweep does not read this field here; use ray.",
        "settings.data.seed: a sweep does not read this field here; use seeds, or set split_by_seed: false.",
        "grid.seed: a sweep does not read this field here; use seeds.",
        "data_sets.color_digits.settings.out: a sweep does not read this field here; use out, or give --out.",
        "methods.dp_sgd.grid.method: a sweep does not read this field here; use methods.",
    ):
        assert fault in faults


@pytest.mark.parametrize("more", [{}, {"methods": {"dp_sgd": {"settings": {"data.num_test": 50}}}}])
def test_a_name_where_the_section_data_is_expected_is_a_fault(tmp_path: Path, more: dict[str, Any]) -> None:
    (tmp_path / "start.yaml").write_text("data: adult\n")
    with pytest.raises(ConfigError, match=r"data_sets\.color_digits\.settings\.data: .*mapping.*'color_digits'"):
        cells(data_sets={"color_digits": {"settings": {"data": "color_digits"}}}, **more)
    with pytest.raises(ConfigError, match=r"data_sets\.mine: data: .*mapping.*'adult'"):
        cells(tmp_path, data_sets={"mine": {"file": "start.yaml"}}, **more)
    with pytest.raises(ConfigError, match=r"data_sets\.color_digits\.settings\.data\.name: expected text, got 7"):
        cells(data_sets={"color_digits": {"settings": {"data": {"name": 7}}}}, **more)


def test_the_split_stays_where_it_is_told_to() -> None:
    found = cells(seeds=[3, 4], split_by_seed=False, settings={"data": {"seed": 7}})
    assert [(cell.config.seed, cell.config.data.seed) for cell in found] == [(3, 7), (4, 7)]


def test_the_method_speaks_after_the_data_set_and_the_data_set_after_the_sweep() -> None:
    def epsilons(**values: Any) -> set[float]:
        return {cell.config.target.epsilon for cell in cells(grid={"target.epsilon": [1]}, **values)}

    assert epsilons() == {1}
    own = {"color_digits": {"grid": {"target": {"epsilon": [2]}}}}
    assert epsilons(data_sets=own) == {2}
    assert epsilons(data_sets=own, methods={"dp_sgd": {"grid": {"target.epsilon": [3, 4]}}}) == {3, 4}
    settings = cells(
        settings={"dp_sgd": {"epochs": 1, "batch_size": 10}},
        data_sets={"color_digits": {"settings": {"dp_sgd.epochs": 2}}},
        methods={"dp_sgd": {"settings": {"dp_sgd.momentum": 0.5}}},
    )[0].config.dp_sgd
    assert (settings.epochs, settings.batch_size, settings.momentum) == (2, 10, 0.5)


def test_fields_move_together_along_one_axis() -> None:
    found = cells(
        methods=["fairpate"],
        settings={"student.idp3": {"max_disparity": 1, "min_count": 5}},
        grid={"aggregator.gate.max_disparity, student.idp3.max_disparity": [0.01, 0.1]},
    )
    margins = [(cell.config.aggregator.gate, cell.config.student.idp3) for cell in found]
    assert [(gate.max_disparity, idp3 and idp3.max_disparity) for gate, idp3 in margins] == [(0.01, 0.01), (0.1, 0.1)]
    own = {"fairpate": {"grid": {"student.idp3, public_data.calibration": [None]}}}
    replaced = cells(methods=own, grid={"student.idp3.max_disparity": [1, 2], "public_data.calibration.weight": [3, 4]})
    assert [cell.config.student.idp3 for cell in replaced] == [None]


def test_a_method_without_a_target_runs_once() -> None:
    found = cells(methods=["sgd", "pate"], grid={"target.epsilon": [1, 2, 3]}, seeds=[0, 1])
    assert [cell.method for cell in found] == ["sgd", *["pate"] * 3] * 2


def test_a_cell_starts_where_the_run_command_starts(tmp_path: Path) -> None:
    for method in ("dp_sgd", "pate_s_pre"):
        assert cells(methods=[method])[0].digest == config_digest(resolved(["data.name=color_digits"], method))
    (tmp_path / "start.yaml").write_text("data: {name: color_digits}\ndp_sgd: {epochs: 3}\n")
    from_file = cells(tmp_path, data_sets={"mine": {"file": "start.yaml"}})[0]
    assert from_file.config.dp_sgd.epochs == 3
    assert from_file.config.dp_sgd.batch_size == type(from_file.config)().dp_sgd.batch_size
    assert (from_file.data, from_file.config.data.name) == ("mine", "color_digits")


def test_digests_name_what_is_computed_and_not_where() -> None:
    base = cells()[0]
    assert base.digest == config_digest(base.config)
    voting = [cells(methods=["pate"], tasks={"torch_threads": threads})[0] for threads in (1, 2)]
    assert [(cell.config.ray.num_actors, cell.config.ray.num_threads) for cell in voting] == [(0, 1), (0, 2)]
    assert voting[0].digest == voting[1].digest
    assert cells(settings={"dp_sgd.clip_norm": 2})[0].digest != base.digest
    assert cells(settings={"dp_sgd.clip_norm": base.config.dp_sgd.clip_norm})[0].digest == base.digest
    named = cells(data_sets={"mine": {"settings": {"data.name": "color_digits"}}})[0]
    assert named.digest == f"{base.digest}-mine"


def test_the_command_of_a_cell_makes_it_again() -> None:
    found = cells(
        data_sets={"color_digits": {"settings": {"data.options": {"sensitive": "colour"}}}},
        methods={
            "fairpate": {
                "settings": {"student.idp3": {"max_disparity": 0.05, "min_count": 5}, "noise": "seeded"},
                "grid": {
                    "aggregator.gate.max_disparity": [0.1, float("inf")],
                    "student.model": [{"name": "mlp", "hidden": [8, 4]}],
                },
            },
            "sgd": None,
            "fair_dp_sgd": {
                "settings": {"public_data.self_label": "mlp", "student.fit.epochs": 2, "dp_sgd.num_records": 500}
            },
        },
        seeds=[0, 2],
        settings={"target.delta": 1e-6, "sgd.epochs": 3, "teachers.num_teachers": 5, "target.relation": "replace one"},
    )
    assert len(found) == 8
    for cell in found:
        words = shlex.split(cell.command)
        assert words[:6] == ["fairpate", "run", "--method", cell.method, "--data", "color_digits"]
        assert words[6::2] == ["--set"] * len(words[7::2])
        again = resolved([*words[7::2], "data.name=color_digits"], cell.method)
        assert config_digest(again) == cell.digest
        assert all(("teachers" in word, "sgd" in word) != (True, True) for word in words)
    assert "--set aggregator.gate.max_disparity=.inf" in found[1].command


TABLE = """name: clinic
rows: 3000
files: {records: [{path: clinic.csv}]}
features: {age: {bounds: [20, 90]}}
label: {column: ill, classes: ["no", "yes"]}
group: {column: sex, values: [f, m]}
"""


@pytest.mark.parametrize("method", quick_and_slow(method_names()))
def test_a_row_and_its_command_are_one_configuration(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On pictures, on tables and on a declaration of one's own, at two epsilons and seeds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinic.yaml").write_text(TABLE, encoding="utf-8")
    (tmp_path / "clinic.csv").write_text("age,ill,sex\n30,no,f\n", encoding="utf-8")
    (tmp_path / "start.yaml").write_text(UNREAD, encoding="utf-8")
    own = {"data.name": "clinic", "data.declaration": "clinic.yaml", "data.num_public": 500}
    found = cells(
        tmp_path,
        data_sets={"color_digits": DIGITS, "from_file": {"file": "start.yaml"} | DIGITS, "own": {"settings": own}},
        methods=[method],
        grid={"target.epsilon": [0.5, 3]},
        seeds=[0, 1],
    )
    assert {cell.data for cell in found} == {"color_digits", "from_file", "own"}
    for cell in found:
        again = repeated(cell)
        assert again.seed == cell.config.seed
        assert config_digest(again) == config_digest(cell.config)


def repeated(cell: Cell) -> Method:
    """What the printed command of a cell means."""
    words = shlex.split(cell.command)
    assert (words[:3], words[4]) == (["fairpate", "run", "--method"], "--data")
    return resolved([*words[7::2], f"data.name={words[5]}"], words[3])


UNREAD = """student: {model: {name: logistic, hidden: [99]}, method: supervised, confidence: 0.5}
teachers: {model: {name: logistic, hidden: [98]}}
"""
DIGITS = {"settings": {"data.name": "color_digits", "data.options.colour_as_feature": False}}


def test_the_command_names_nothing_that_only_its_start_leaves_unread() -> None:
    (cell,) = cells(
        methods={"dp_postprocessing": {"settings": {"dp_postprocessing.base": "dp_sgd", "dp_sgd.epochs": 3}}}
    )
    assert cell.command.partition(" --set ")[2] == "dp_sgd.epochs=3.0 --set dp_postprocessing.base=dp_sgd"


def test_the_command_names_nothing_that_another_setting_leaves_unread() -> None:
    one, two = (cells(settings={"student.model.hidden": [width]})[0] for width in (7, 8))
    assert one.config.student.model.name == "logistic"
    assert one.command == "fairpate run --method dp_sgd --data color_digits"
    assert one.digest == two.digest
    assert one.row(minutes=None, error="lost").config["student"]["model"] == {"name": "logistic"}


def test_the_command_says_what_would_follow_from_another_field() -> None:
    """Sizes of cells have a share of 0 where the command starts, and .3 under odds."""
    odds = {"settings": {"raco_dp.constraint": "equalized_odds"}, "grid": {"raco_dp.size_share": [0.0, None]}}
    without, follows = cells(methods={"raco_dp": odds})
    start = "fairpate run --method raco_dp --data color_digits"
    assert without.command == f"{start} --set raco_dp.size_share=0.0 --set raco_dp.constraint=equalized_odds"
    assert follows.command == f"{start} --set raco_dp.constraint=equalized_odds"


def test_the_command_names_a_file_of_weights_without_its_folder(tmp_path: Path) -> None:
    weights = tmp_path / "alice" / "resnet18.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    (cell,) = cells(settings={"student.model": "resnet18", "backbone.weights": str(weights)})
    assert "alice" not in cell.command
    assert "backbone.weights.path=resnet18.pth" in cell.command
    assert hashlib.sha256(b"weights").hexdigest() in cell.command


def test_every_fault_of_every_cell_is_named_where_it_was_in_paper() -> None:
    with pytest.raises(ConfigError) as caught:
        cells(
            data_sets={"color_digits": {"settings": {"data.options": {"sensitive": "hue"}}}, "adlt": None},
            methods={
                "fair_dp_sgd": {"grid": {"fair_dp_sgd.weight": [0.1, -1], "fair_dp_sgd.temprature": [1]}},
                "fairpte": None,
                "pate": {"settings": {"target.relation": "replace one", "target.accounting": "pld"}},
            },
            grid={"target.epsilon": [1, 0]},
            settings={"dp_sgd": {"epochs": "many"}},
        )
    faults = str(caught.value).splitlines()
    assert len(faults) == len(set(faults))
    for words in (
        ("methods.fairpte", "did you mean fairpate"),
        ("methods.fair_dp_sgd.grid.fair_dp_sgd.weight", "expected >= 0", "-1"),
        ("methods.fair_dp_sgd.grid.fair_dp_sgd.temprature", "did you mean temperature"),
        ("grid.target.epsilon", "expected > 0", "got 0."),
        ("settings.dp_sgd.epochs", "expected a number", "'many'"),
        ("data_sets.color_digits.settings.data.options.sensitive", "hue"),
        ("data_sets.adlt", "did you mean adult"),
    ):
        assert any(all(word in fault for word in words) for fault in faults), words


def test_what_only_a_method_or_a_loader_can_refuse_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        cells(
            data_sets={"color_digits": {"settings": {"data.options": {"sensitive": "hue"}}}, "adlt": None},
            methods={"pate": {"settings": {"target.relation": "replace one", "target.accounting": "pld"}}},
        )
    assert "data_sets.color_digits.settings.data.options.sensitive" in str(caught.value)
    assert "did you mean adult" in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"methods\.pate\.settings\.target\.relation: pate does not read it; leave it out"
    ):
        cells(methods={"pate": {"settings": {"target.relation": "replace one", "target.accounting": "pld"}}})


def test_missing_files_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRPATE_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data_sets\.adult: .*adult\.data: missing file.*fairpate data fetch"):
        cells(data_sets=["adult"])
    with pytest.raises(ConfigError, match=r"data_sets\.adult\.file: .*start\.yaml: no such file"):
        cells(tmp_path, data_sets={"adult": {"file": "start.yaml"}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seeds": []}, ("seeds", "at least 1")),
        ({"seeds": [-1]}, ("seeds.0", "expected >= 0")),
        ({"grid": {"target.epsilon": []}}, ("grid.target.epsilon", "at least 1")),
        ({"grid": {"sgd.epochs, seed": [1], "sgd": [{}]}}, ("grid", "share no field", "'sgd'")),
        ({"methods": {"pate": {"gird": {}}}}, ("methods.pate.gird", "did you mean grid")),
        ({"data_sets": {"adult": {"fle": 1}}}, ("data_sets.adult.fle", "did you mean file")),
        ({"sedes": [1]}, ("sedes", "did you mean seeds")),
        ({"tasks": {"num_cpus": 0}}, ("tasks.num_cpus", "expected > 0")),
    ],
)
def test_the_form_of_a_sweep_is_checked(values: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        cells(**values)
    assert all(word in str(caught.value) for word in words)


def places_of_faults(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        cells_of(load_sweep(path), folder=path.parent)
    return [fault.partition(": ")[0] for fault in str(caught.value).splitlines()]


def test_all_faults_of_the_form_are_told_together_and_then_all_faults_of_the_cells(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "sedes: [1]\n"
        "data_sets: {color_digits: {settings: {data.options: {sensitive: hue}}}, adlt: , bank: {fle: 1}}\n"
        "methods: {fairpte: , dp_sgd: {grid: {dp_sgd.epochs: [many]}}, pate: {gird: {}}}\n"
        "tasks: {num_cpus: 0}\n"
    )
    form = ["data_sets.bank.fle", "methods.pate.gird", "sedes", "tasks.num_cpus"]
    assert sorted(places_of_faults(tmp_path / "sweep.yaml")) == form
    (tmp_path / "sweep.yaml").write_text(
        "data_sets: {color_digits: {settings: {data.options: {sensitive: hue}}}, adlt: }\n"
        "methods: {fairpte: , dp_sgd: {data_sets: [adlt, color_digits, smal], grid: {dp_sgd.epochs: [many]}}}\n"
    )
    assert set(places_of_faults(tmp_path / "sweep.yaml")) == {
        "methods.fairpte",
        "methods.dp_sgd.data_sets",
        "data_sets.color_digits.settings.data.options.sensitive",
        "data_sets.adlt",
        "methods.dp_sgd.grid.dp_sgd.epochs",
    }


def test_overrides_reach_grids(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "data_sets: [color_digits]\nmethods: [dp_sgd]\ngrid: {target.epsilon: [1, 2]}\n"
    )
    sweep = load_sweep(tmp_path / "sweep.yaml", ["grid.target.epsilon=[4]", "seeds=[1,2]"])
    assert sweep.grid == {"target.epsilon": [4]}
    assert sweep.seeds == (1, 2)


# Large ones; and the cells of most of those that a page quotes are read by tests/deploy/test_quoted_results.py too.
SLOW = ("color_mnist", "frontier", "cluster")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.parent.name == "paper" or path.stem in SLOW else (),
        )
        for path in SWEEPS
    ],
)
def test_every_sweep_that_is_offered_is_valid_and_its_commands_repeat_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairpate.data.dataset.DatasetEntry.located", lambda *_: ())
    found = cells_of(load_sweep(path), folder=path.parent)
    assert len({cell.digest for cell in found}) == len(found) > (3 if path.stem == "demo" else 5)
    one_of_each = {(cell.data, cell.method): cell for cell in found}.values()
    assert all(config_digest(repeated(cell)) == config_digest(cell.config) for cell in one_of_each)


def test_sizes_that_no_command_could_choose_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """The cell itself starts from a file; the command that repeats it starts from the number of records."""
    (tmp_path / "clinic.yaml").write_text(TABLE.replace("rows: 3000\n", ""), encoding="utf-8")
    (tmp_path / "clinic.csv").write_text("age,ill,sex\n30,no,f\n", encoding="utf-8")
    (tmp_path / "start.yaml").write_text("data: {num_public: 500}\n", encoding="utf-8")
    settings = {"data.name": "clinic", "data.declaration": str(tmp_path / "clinic.yaml")}
    mine = {"mine": {"file": "start.yaml", "settings": settings}}
    with pytest.raises(ConfigError, match=r"^data_sets\.mine: clinic: rows: missing; declare how many"):
        cells(tmp_path, data_sets=mine)
    assert cells(tmp_path, data_sets=mine, methods=["sgd"])[0].command  # whose sizes follow from no number


def test_a_configuration_of_a_run_is_no_sweep_and_is_not_shown(fairpate, tmp_path):
    (tmp_path / "run.yaml").write_text("data: {name: adult}\nteachers: {num_teachers: 200}\n")
    code, output, errors = fairpate("compare", "run.yaml")
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert all(word in errors for word in ("not a comparison", "data, teachers", "fairpate run"))
    assert "200" not in errors


def test_an_empty_sweep_says_what_is_missing(fairpate, tmp_path):
    (tmp_path / "sweep.yaml").write_text("seeds: [0]\n")
    code, _, errors = fairpate("compare", "sweep.yaml")
    assert code == 2
    assert "data_sets: missing; add it." in errors
    assert "methods: missing; add it." in errors


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (
            """
seeds: [-1]
data_sets: [color_digits]
methods:
  fairpate: {grid: {aggregator.gate.max_disparity: []}}
  dp_sgd: {grid: {"target.epsilon": [1], "target": [{delta: 1.0e-6}]}}
grid: {student.fit.epochs: []}
tasks: {num_cpus: 0}
""",
            (
                ("seeds.0", "expected >= 0"),
                ("tasks.num_cpus", "expected > 0"),
                ("methods.fairpate.grid.aggregator.gate.max_disparity", "at least 1"),
                ("methods.dp_sgd.grid", "'target.epsilon' and 'target"),
                ("grid.student.fit.epochs", "at least 1"),
            ),
        ),
        (
            """
data_sets:
  color_digits: {grid: {data.num_test: [many]}}
methods:
  fairpate: {grid: {aggregator.gate.max_disparity: [0.1], teachers: {num_teachers: [1]}}}
  dp_sgd: {grid: {dp_sgd.clip: [1]}, settings: {dp_sgd.momentum: 2}}
grid: {student.fit.learning_rate: [0]}
""",
            (
                ("methods.fairpate.grid.teachers.num_teachers", "expected >= 2"),
                ("methods.dp_sgd.grid.dp_sgd.clip", "did you mean clip_norm"),
                ("methods.dp_sgd.settings.dp_sgd.momentum", "expected < 1"),
                ("grid.student.fit.learning_rate", "expected > 0"),
                ("data_sets.color_digits.grid.data.num_test", "expected a whole number"),
            ),
        ),
    ],
    ids=["form", "cells"],
)
def test_faults_of_grids_are_told_together(fairpate, tmp_path, text, faults):
    (tmp_path / "sweep.yaml").write_text(text)
    code, _, errors = fairpate("compare", "sweep.yaml")
    assert code == 2
    for words in faults:
        assert any(all(word in line for word in words) for line in errors.splitlines()), (words, errors)


def test_what_a_method_does_not_read_changes_nothing_of_its_cells() -> None:
    plain = {cell.method: cell for cell in cells(methods=["sgd", "dp_sgd", "raco_dp"])}
    settings = {"raco_dp.bound": 0.5, "noise": "seeded"}
    told = {
        cell.method: cell for cell in cells(methods=["sgd", "dp_sgd", "raco_dp", "pate"], settings=settings | BUDGET)
    }
    assert told["sgd"] == plain["sgd"]
    assert not told["sgd"].config.is_seeded
    assert told["dp_sgd"].config.is_seeded
    assert told["dp_sgd"].config.dp_sgd == plain["dp_sgd"].config.dp_sgd
    bounds = cells(methods=["dp_sgd", "raco_dp"], grid={"raco_dp.bound": [0.1, 0.2]})
    assert [cell.method for cell in bounds] == ["dp_sgd", "raco_dp", "raco_dp"]
    assert bounds[0] == plain["dp_sgd"]
    assert not {"raco_dp", "teachers", "aggregator"} & told["dp_sgd"].config.model_dump().keys()


BUDGET = {
    "aggregator.release": "label",
    "aggregator.budget": {"accept_leak": True, "epsilon": 2},
}


def test_of_fields_that_move_together_a_method_takes_what_it_reads() -> None:
    found = cells(
        methods=["dp_sgd", "pate", "fairpate", "pate_s_in"],
        grid={"aggregator.gate.max_disparity, target.epsilon": [1, 2], "pate_s_in.weight": [0.1, 0.2, 0.3]},
    )
    assert [cell.method for cell in found] == ["dp_sgd"] * 2 + ["pate"] * 2 + ["fairpate"] * 2 + ["pate_s_in"] * 6
    assert [cell.config.target.epsilon for cell in found[:6]] == [1, 2] * 3
    assert [cell.config.aggregator.gate.max_disparity for cell in found[4:6]] == [1, 2]


def test_what_no_cell_reads_is_checked_all_the_same() -> None:
    with pytest.raises(ConfigError) as caught:
        cells(
            methods={"sgd": {"grid": {"target.epsilon": [1]}}},
            settings={
                "aggregator": {"num_queris": 3},
                "dp_sgd.epochs": "many",
                "aggregatr": 1,
                "sgd.epoch": 2,
                "student": {"model.width": 3},
            },
            grid={"target.epsilon": [2, 0], "pf_ld.clip_norm": [-1]},
        )
    faults = str(caught.value).splitlines()
    assert len(faults) == 8
    for start, words in (
        ("settings.aggregator.num_queris", "did you mean num_queries"),
        ("settings.dp_sgd.epochs", "expected a number"),
        ("settings.aggregatr", "did you mean aggregator"),
        ("settings.student.model.width", "unknown field"),
        ("settings.sgd.epoch", "did you mean epochs"),
        ("grid.target.epsilon", "got 0."),
        ("grid.pf_ld.clip_norm", "expected > 0"),
        ("methods.sgd.grid.target.epsilon", "sgd does not read it; leave it out."),
    ):
        assert sum(fault.startswith(f"{start}: ") and words in fault for fault in faults) == 1, (start, faults)


def test_settings_that_were_given_are_not_written_into():
    given = {"student": {"model": {"name": "mlp", "hidden": [16]}}, "student.model": {"name": "lenet"}}
    before = copy.deepcopy(given)
    sweep = parse_config({"data_sets": ["color_digits"], "methods": ["dp_sgd"], "settings": given}, SweepConfig)
    cells_of(sweep, folder=Path())
    assert given == before
