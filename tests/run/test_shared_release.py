"""One release, many runs: what comes after it costs nothing, and nothing else ever goes for free."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairpate.config import ConfigError, SweepConfig, parse_config
from fairpate.data import Dataset
from fairpate.methods.base import ReleasingMethod, configured
from fairpate.releases.directory import RunDirectory, RunDirectoryError, RunFolderError, read_release, read_statement
from fairpate.releases.odometer import Odometer
from fairpate.run.compare import Comparison, compare
from fairpate.run.run import run_method
from fairpate.run.sweep import SweepFolder, cells_of
from fairpate.terminal import Reporter

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("own_state"),
]

GATE = {"max_disparity": 0.02, "min_count": 5}
SETTINGS: dict[str, Any] = {
    "noise": "os_entropy",
    "target": {"epsilon": 2.0, "accounting": "rdp"},
    "evaluation": {"least_cell": 1},  # of ten classes: nearly every cell is small
    "student": {"model": {"name": "logistic"}, "fit": {"epochs": 2}},
    "record_votes": {"num_prototypes": 20, "num_components": 10},
    "weighted_votes": {"embedding": {"num_components": 20, "graph_share": 0}},
}
SHARED = ("record_votes", "weighted_votes")


def config_of(out: Path, *overrides: str, method: str = "record_votes") -> Any:
    return configured(SETTINGS, [f"out={out}", *overrides], method=method)


def run(out: Path, dataset: Dataset, *overrides: str, of: Path | None = None, method: str = "record_votes") -> Any:
    return run_method(config_of(out, *overrides, method=method), Reporter(quiet=True), dataset, release_of=of)


def counted() -> list[tuple[int, int]]:
    return [(total.releases, total.not_private) for total in Odometer().totals(delta=1e-5)]


def swept(root: Path, *, num_actors: int = 1, **grid: list[Any]) -> Comparison:
    values = {
        "data_sets": ["color_digits"],
        "methods": ["record_votes"],
        "settings": SETTINGS,
        "grid": {field.replace("__", "."): axis for field, axis in grid.items()},
        "ray": {"num_actors": num_actors},
        "tasks": {"num_cpus": 1, "max_retries": 0},
    }
    sweep = parse_config(values, SweepConfig)
    return compare(sweep, cells_of(sweep, folder=Path()), root, Reporter(quiet=True))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_cells_that_differ_afterwards_share_a_release_that_is_charged_once(tmp_path: Path) -> None:
    first = swept(tmp_path / "sweep", record_votes__gate=[None, GATE])
    assert not first.failed
    assert counted() == [(1, 0)]
    runs = [RunDirectory(root=path) for path in sorted((tmp_path / "sweep/runs").glob("record_votes-*"))]
    tables = {run.released.read_bytes() for run in runs}
    statements = [read_statement(run) for run in runs]
    assert (len(runs), len(tables)) == (2, 1)
    assert statements[0] == statements[1]
    assert "another run" in statements[0].remarks[0]
    assert len({run.student.read_bytes() for run in runs}) == 2, "the gate changed what the student learned"
    # What comes later needs no worker.
    again = swept(tmp_path / "sweep", num_actors=0, record_votes__taught_share=[0.7, 0.4])
    assert len(again.rows) == 2
    assert counted() == [(1, 0)]
    swept(tmp_path / "sweep", num_actors=0, target__epsilon=[2.0, 1.0])
    assert counted() == [(2, 0)]
    for path in (tmp_path / "sweep/runs").glob("release-*/public/released.safetensors"):
        path.unlink()  # a sweep whose release is gone is charged for another
    swept(tmp_path / "sweep", num_actors=0, record_votes__taught_share=[0.4, 0.1])
    assert counted() == [(3, 0)]


def test_a_release_that_no_cell_can_use_is_not_charged(tmp_path: Path) -> None:
    """Settings that come after the release do not suit the data set: of all its cells, or of some."""
    done = swept(tmp_path / "none", num_actors=0, evaluation__metrics=["private"])
    assert counted() == []
    (row,) = done.failed
    assert "evaluation.metrics: private needs test records" in row.error
    done = swept(tmp_path / "one", num_actors=0, evaluation__metrics=["private", "outside"])
    assert counted() == [(1, 0)]
    assert ["evaluation.metrics" in each.error for each in done.failed] == [True]


def test_what_a_release_follows_from_is_every_field_but_those_that_come_afterwards() -> None:
    def name(*overrides: str, method: str = "record_votes", **data: Any) -> str:
        values = SETTINGS | {"data": {"name": "color_digits"} | data}
        config = configured(values, overrides, method=method)
        assert isinstance(config, ReleasingMethod)
        assert type(config).model_validate(config.shared_release).shared_release == config.shared_release
        return str(sorted(config.shared_release.items()))

    same = name()
    afterwards = {
        *("record_votes.rule=linear", "record_votes.taught_share=0.1", f"record_votes.gate={GATE}"),
        *(
            "record_votes.penalty={}",
            "student.fit.epochs=9",
            f"student.idp3={GATE}",
            "public_data.calibration={}",
            "out=elsewhere",
        ),
    }
    assert {name(override) for override in afterwards} == {same}
    before = {
        *("seed=1", "data.seed=1", "data.num_public=200", "target.epsilon=1", "target.delta=1e-6"),
        *("target.accounting=pld", "noise=seeded", "record_votes.num_prototypes=10", "record_votes.embedding=graph"),
        *(
            "record_votes.num_components=7",
            "record_votes.num_records=1000",
            "record_votes.by_group=true",
            "data.embedding={}",
        ),
    }
    names = {name(override) for override in before}
    assert len(names | {same}) == len(before) + 1
    assert name(method="weighted_votes") != same
    weighted = name(method="weighted_votes")
    for override in ("weighted_votes.ridge=3", "weighted_votes.taught_share=0.5", f"weighted_votes.gate={GATE}"):
        assert name(override, method="weighted_votes") == weighted
    assert name("weighted_votes.embedding.num_components=3", method="weighted_votes") != weighted
    moments = name(method="ada_ssp")
    for override in (
        "ada_ssp.ridge_share=1",
        "ada_ssp.failure_probability=0.2",
        f"ada_ssp.gate={GATE}",
        "ray.num_actors=2",
    ):
        assert name(override, method="ada_ssp") == moments
    assert name("ada_ssp.embedding.num_components=3", method="ada_ssp") != moments


def test_cells_of_methods_that_keep_no_release_have_none() -> None:
    values = {"data_sets": ["color_digits"], "methods": ["dp_sgd", "fairpate", *SHARED]}
    cells = cells_of(parse_config(values, SweepConfig), folder=Path())
    files = {cell.method: SweepFolder(root=Path()).shared_file(cell) for cell in cells}
    assert [method for method, file in files.items() if file and file.suffix == ".safetensors"] == list(SHARED)


@pytest.mark.parametrize("method", [pytest.param("record_votes", marks=pytest.mark.slow), "weighted_votes"])
def test_a_run_goes_on_from_the_release_of_another_without_a_look_at_private_records(
    method: str, digits: Dataset, tmp_path: Path
) -> None:
    gate = f"{method}.gate={GATE}"
    first = run(tmp_path / "first", digits, method=method)
    before = counted()
    ruined = dataclasses.replace(
        digits.private, x=torch.zeros_like(digits.private.x), y=torch.zeros_like(digits.private.y)
    )
    blind = dataclasses.replace(digits, private=ruined)
    seen = run(tmp_path / "seen", digits, gate, of=first.root, method=method)
    unseen = run(tmp_path / "unseen", blind, gate, of=first.root, method=method)
    assert seen.student.read_bytes() == unseen.student.read_bytes() != first.student.read_bytes()
    told, own = read_statement(unseen), read_statement(first)
    assert (told.events, told.epsilon, told.earlier_releases) == (own.events, own.epsilon, own.earlier_releases)
    origin = read_release(first.released)[1]
    assert origin.id in told.remarks[0]
    assert "counts once for both" in told.remarks[0]
    assert not own.remarks
    run(tmp_path / "unseen", blind, gate, method=method)
    run(tmp_path / "first", digits, method=method)
    assert counted() == before == [(1, 0)]


def test_a_release_that_an_odometer_does_not_know_is_counted_by_the_run_that_goes_on_from_it(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounting = "target.accounting=pld"  # the odometer's
    first = run(tmp_path / "first", digits, accounting)
    gate = f"record_votes.gate={GATE}"
    for state, source in (("elsewhere", first.root), ("a third place", None)):
        monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / state))
        assert counted() == []
        for _ in range(2):
            following = run(tmp_path / "next", digits, accounting, gate, of=source)
            assert counted() == [(1, 0)]
        assert not following.receipt.exists()
        (total,) = Odometer().totals(delta=1e-5)
        assert total.epsilon == pytest.approx(read_statement(first).epsilon, rel=1e-6)


def test_the_same_settings_on_the_same_release_give_the_same_model(digits: Dataset, tmp_path: Path) -> None:
    first = run(tmp_path / "first", digits)
    again = run(tmp_path / "again", digits, of=first.root)
    assert again.student.read_bytes() == first.student.read_bytes()
    for path in (first.student, first.metrics):
        path.unlink()
    model = again.student.read_bytes()
    assert run(tmp_path / "first", digits).student.read_bytes() == model
    assert counted() == [(1, 0)]


def test_a_release_that_is_gone_is_an_error_or_another_charge(digits: Dataset, tmp_path: Path) -> None:
    done = run(tmp_path / "run", digits)
    table = done.released.read_bytes()
    done.released.unlink()
    run(tmp_path / "run", digits)  # the model is there
    done.student.unlink()
    with pytest.raises(RunDirectoryError, match=r"released.safetensors: missing.*second release"):
        run(tmp_path / "run", digits)
    assert counted() == [(1, 0)]
    done.statement.unlink()
    run(tmp_path / "run", digits)
    assert done.released.read_bytes() != table
    assert counted() == [(2, 0)]


def test_a_copied_folder_is_no_other_release_and_a_copied_receipt_is_no_licence(
    digits: Dataset, tmp_path: Path
) -> None:
    done = run(tmp_path / "run", digits)
    shutil.copytree(done.root, tmp_path / "copy")
    (tmp_path / "copy/public/student.safetensors").unlink()
    run(tmp_path / "copy", digits)
    assert counted() == [(1, 0)]
    receipt = tmp_path / "other/private/release.json"
    receipt.parent.mkdir(parents=True)
    shutil.copy(done.root / "config.yaml", tmp_path / "other/config.yaml")
    shutil.copy(done.receipt, receipt)
    run(tmp_path / "other", digits)
    assert counted() == [(2, 0)]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("target.epsilon=1", r"target.epsilon: 2.0 -> 1.0"),
        ("record_votes.num_prototypes=10", r"record_votes.num_prototypes: 20 -> 10"),
        ("seed=5", r"seed: 0 -> 5"),
    ],
)
def test_a_release_under_other_settings_is_refused_by_field(
    override: str, said: str, digits: Dataset, tmp_path: Path
) -> None:
    first = run(tmp_path / "first", digits)
    with pytest.raises(RunFolderError, match=said):
        run(tmp_path / "second", digits, override, of=first.root)
    assert not (tmp_path / "second").exists()


def test_what_is_no_release_to_go_on_from_is_refused(digits: Dataset, tmp_path: Path) -> None:
    first = run(tmp_path / "first", digits)
    with pytest.raises(ConfigError, match="dp_sgd keeps no release"):
        run(tmp_path / "sgd", digits, of=first.root, method="dp_sgd")
    with pytest.raises(RunFolderError, match="holds no release"):
        run(tmp_path / "second", digits, of=tmp_path)
    other = run(tmp_path / "other", digits)
    with pytest.raises(RunFolderError, match="has a release of its own"):
        run(tmp_path / "other", digits, of=first.root)
    fewer = dataclasses.replace(digits, public=digits.public.take(range(len(digits.public) - 1, -1, -1)))
    with pytest.raises(RunDirectoryError, match="other public records"):
        run(tmp_path / "turned", fewer, of=first.root)
    content = bytearray(other.released.read_bytes())
    content[-1] ^= 1
    other.released.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="not a readable release"):
        run(tmp_path / "third", digits, of=other.root)


def test_the_file_tells_what_is_priced_and_public_and_no_place(digits: Dataset, tmp_path: Path) -> None:
    done = run(tmp_path / "run", digits)
    released, origin = read_release(done.released)
    assert set(released.arrays) == {"votes_KC", "prototype_M", "coordinates_MD"}
    assert released.arrays["votes_KC"].shape == (20, digits.num_classes)
    assert len(released.arrays["prototype_M"]) == len(digits.public)
    assert set(origin.settings) == {"method", "seed", "data", "target", "noise", "record_votes"}
    assert str(tmp_path).encode() not in done.released.read_bytes()
    assert np.issubdtype(released.arrays["votes_KC"].dtype, np.integer)
    again, _ = read_release(run(tmp_path / "again", digits).released)
    assert not np.array_equal(released.arrays["votes_KC"], again.arrays["votes_KC"])  # 200 fresh draws


def test_the_command_goes_on_from_a_run_and_its_configuration(fairpate: Any) -> None:
    quick = ("target.accounting=rdp", "data.embedding={num_components: 10, graph_share: 0}")
    given = [f"--set={override}" for override in (*quick, "student.model.name=logistic", "student.fit.epochs=1")]
    code, *_ = fairpate("run", "--method", "record_votes", "--out", "first", *given)
    assert code == 0
    code, *_ = fairpate("run", "--release-of", "first", "--out", "second", "--set", f"record_votes.gate={GATE}")
    assert code == 0
    assert read_statement(RunDirectory(root=Path("second"))).remarks
    code, _, errors = fairpate("run", "--release-of", "first", "--out", "third", "--epsilon", "1")
    assert code == 2
    assert "target.epsilon" in errors
    assert counted() == [(1, 0)]
