"""A method of several releases with learning between them: one file, one plan, and each release drawn once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_runs import QUIET, copied
from torch.nn import functional

from fairpate.data import Dataset
from fairpate.methods.base import ReleasingMethod, Trained, Training, configured
from fairpate.privacy.accountant import LaplaceReleases
from fairpate.privacy.laplace import add_laplace
from fairpate.releases import log
from fairpate.releases.directory import (
    ReleasedArrays,
    RunDirectory,
    RunDirectoryError,
    RunFolderError,
    read_release,
    read_statement,
    save_release,
)
from fairpate.releases.log import ReleaseLog, read_receipt
from fairpate.releases.odometer import LimitReachedError, Odometer, _rows
from fairpate.run.run import run_method, train_model

pytestmark = pytest.mark.usefixtures("light_runs")

EPSILONS = (0.3, 0.5)
drawn: list[str] = []


def event(epsilon: float) -> LaplaceReleases:
    return LaplaceReleases(count=1, epsilon=epsilon, unit="record", relation="add or remove one")


class TwoTables(ReleasingMethod):
    """Counts of labels; then, for the commonest label that they show, sums of its features."""

    title: ClassVar[str] = "two tables"
    paper: ClassVar[str] = "none"
    afterwards: ClassVar[tuple[str, ...]] = (*ReleasingMethod.afterwards, "sum_scale")

    method: str = "test_several_releases:TwoTables"
    sum_scale: float = 1.0

    def measure(self, training: Training) -> ReleasedArrays:
        training.admit([event(epsilon) for epsilon in EPSILONS], self.source.label)
        drawn.append("counts")
        counts_C = functional.one_hot(training.dataset.private.y).sum(dim=0).double()[None]
        noisy = add_laplace(counts_C, l1_sensitivity=1, epsilon=EPSILONS[0], source=self.source)
        return ReleasedArrays(arrays={"counts": noisy}, events=(event(EPSILONS[0]),))

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        private, label = training.dataset.private, int(released.arrays["counts"].argmax())

        def sums() -> ReleasedArrays:
            drawn.append("sums")
            features = functional.normalize(private.x[private.y == label].flatten(1).double(), p=1)
            total = features.sum(dim=0)[None] * self.sum_scale
            noisy = add_laplace(total, l1_sensitivity=self.sum_scale, epsilon=EPSILONS[1], source=self.source)
            return ReleasedArrays(arrays={"sums": noisy}, events=(event(EPSILONS[1]),))

        second = training.release(
            sums, settings=self.settings_without("student", "public_data"), noise=self.source.label, name="sums"
        )
        with torch.no_grad():
            training.model[-1].bias.copy_(torch.from_numpy(second.arrays["sums"][0, : training.dataset.num_classes]))  # type: ignore[index]
        return Trained(model=training.model.eval(), events=(*released.events, *second.events), noise=self.source.label)


class TwoTablesAndAModel(TwoTables):
    """The same, and last a model that is a release itself."""

    releases_model: ClassVar[bool] = True

    method: str = "test_several_releases:TwoTablesAndAModel"

    def learn(self, training: Training, released: ReleasedArrays) -> Trained:
        learned = super().learn(training, released)
        drawn.append("model")
        return Trained(model=learned.model, events=(*learned.events, event(0.1)), noise=learned.noise)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    drawn.clear()


def run(out: Path, dataset: Dataset, *overrides: str, of: Path | None = None, method: str = "TwoTables") -> Any:
    values: dict[str, Any] = {"student": {"model": {"name": "logistic"}}, "target": {"epsilon": 1.0}}
    values["evaluation"] = {"least_cell": 1}  # of ten classes: nearly every cell is small
    config = configured(values, [f"out={out}", *overrides], method=f"test_several_releases:{method}")
    return run_method(config, QUIET, dataset, release_of=of)


def counted() -> list[list[float]]:
    """The epsilons of all events of each run that the odometer holds, in the order of the runs."""
    with Odometer().transaction() as database:
        rows = _rows(database)
    return [[each.epsilon for each in row.events for _ in range(each.count)] for row in rows]


def killed(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_each_release_is_drawn_and_counted_once_and_together_they_are_one_run(digits: Dataset, tmp_path: Path) -> None:
    done = run(tmp_path / "run", digits)
    assert drawn == ["counts", "sums"]
    assert [path.name for path in done.release_files()] == ["released-sums.safetensors", "released.safetensors"]
    assert counted() == [list(EPSILONS)]
    statement = read_statement(done)
    assert statement.epsilon == pytest.approx(sum(EPSILONS), abs=1e-3)
    assert statement.remarks == ()
    first, second = read_release(done.released)[1], read_release(done.public / "released-sums.safetensors")[1]
    assert (first.after, len(second.after), first.id) == ((), 1, second.id)
    model = done.student.read_bytes()
    for path in (done.student, done.metrics):
        path.unlink()
    assert run(tmp_path / "run", digits).student.read_bytes() == model
    assert drawn == ["counts", "sums"]
    assert counted() == [list(EPSILONS)]


def test_a_run_that_was_killed_draws_only_what_it_lacks(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ReleaseLog, "charge", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", digits)
    assert counted() == []  # killed before anything was counted: nothing was kept
    save = save_release
    with monkeypatch.context() as patched:
        patched.setattr(
            log, "save_release", lambda path, *given: killed() if "sums" in path.name else save(path, *given)
        )
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", digits)
    assert drawn == ["counts", "counts", "sums"]
    counts = RunDirectory(root=tmp_path / "run").released.read_bytes()
    assert counted() == [list(EPSILONS)]
    done = run(tmp_path / "run", digits)
    assert drawn == ["counts", "counts", "sums", "sums"]
    assert done.released.read_bytes() == counts
    # Killed between counting and keeping: the sums that nobody has are counted with the next ones.
    assert [sorted(row) for row in counted()] == [[EPSILONS[0], EPSILONS[1], EPSILONS[1]]]


def test_a_release_that_is_gone_or_that_followed_another_one_is_refused(digits: Dataset, tmp_path: Path) -> None:
    done, other = run(tmp_path / "run", digits), run(tmp_path / "other", digits)
    for lost in (done.released, done.public / "released-sums.safetensors"):
        broken = copied(done, tmp_path / f"without {lost.name}")
        broken.student.unlink()
        (broken.public / lost.name).unlink()
        with pytest.raises(RunDirectoryError, match=rf"{lost.name}: missing.*second release"):
            run(broken.root, digits)
    mixed = copied(done, tmp_path / "mixed")
    mixed.student.unlink()
    shutil.copy(other.released, mixed.released)
    with pytest.raises(RunDirectoryError, match=r"released-sums.*was made after other releases"):
        run(mixed.root, digits)
    assert drawn == ["counts", "sums"] * 2
    assert counted() == [list(EPSILONS)] * 2


def test_a_limit_holds_room_for_the_whole_plan_and_for_no_other_run(digits: Dataset, tmp_path: Path) -> None:
    Odometer().set_limit("color_digits", "record", epsilon=0.5, delta=1e-5)
    with pytest.raises(LimitReachedError):
        run(tmp_path / "run", digits)
    assert drawn == []
    assert counted() == []
    # Between the two is the least limit at one Renyi order: only the plan is admitted, as the only release.
    Odometer().set_limit("color_digits", "record", epsilon=sum(EPSILONS) * (1 + 1e-9), delta=1e-5)
    done = run(tmp_path / "run", digits)
    receipt = read_receipt(done)
    assert receipt is not None
    assert receipt.plan == receipt.events
    with pytest.raises(LimitReachedError, match="1 release cost"):
        run(tmp_path / "other", digits)
    assert counted() == [list(EPSILONS)]


def test_a_copy_that_resumes_is_another_run(digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = Training.release

    def first_alone(*given: Any, name: str = "", **options: Any) -> Any:
        return killed() if name else release(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "release", first_alone)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", digits)
    assert counted() == [[EPSILONS[0]]]
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy, original = run(tmp_path / "copy", digits), run(tmp_path / "run", digits)
    assert drawn == ["counts", "sums", "sums"]
    assert counted() == [list(EPSILONS), [EPSILONS[1]]]
    ((remark,), none) = read_statement(copy).remarks, read_statement(original).remarks
    assert read_release(original.released)[1].id in remark
    assert none == ()
    assert read_statement(copy).epsilon == read_statement(original).epsilon


def test_runs_that_learn_from_one_first_release_draw_their_own_second(digits: Dataset, tmp_path: Path) -> None:
    first = run(tmp_path / "first", digits)
    for _ in range(2):
        second = run(tmp_path / "second", digits, "sum_scale=2.0", of=first.root)
    assert drawn == ["counts", "sums", "sums"]
    assert second.released.read_bytes() == first.released.read_bytes()
    assert counted() == [list(EPSILONS), [EPSILONS[1]]]
    assert read_statement(second).epsilon == pytest.approx(sum(EPSILONS), abs=1e-3)
    with pytest.raises(RunFolderError, match=r"seed: 0 -> 1"):
        run(tmp_path / "third", digits, "seed=1", of=first.root)
    # An odometer that knows neither counts both, each once.
    Odometer().path.unlink()
    run(tmp_path / "second", digits, "sum_scale=2.0")
    assert sorted(counted()) == [[EPSILONS[0]], [EPSILONS[1]]]


def test_a_model_that_is_released_after_them_is_counted_in_the_same_run(digits: Dataset, tmp_path: Path) -> None:
    method = "TwoTablesAndAModel"
    done = run(tmp_path / "run", digits, method=method)
    assert drawn == ["counts", "sums", "model"]
    assert [sorted(row) for row in counted()] == [sorted([*EPSILONS, 0.1])]
    assert read_statement(done).epsilon == pytest.approx(sum(EPSILONS) + 0.1, abs=1e-3)
    done.student.unlink()
    with pytest.raises(RunDirectoryError, match=r"student\.safetensors: missing.*second release"):
        run(tmp_path / "run", digits, method=method)
    assert drawn == ["counts", "sums", "model"]
    # Before it was published, a model that may have been seen is counted with the next one.
    done.statement.unlink()
    run(tmp_path / "run", digits, method=method)
    assert drawn == ["counts", "sums", "model", "model"]
    assert [sorted(row) for row in counted()] == [sorted([*EPSILONS, 0.1, 0.1])]


def test_outside_of_a_run_nothing_is_kept(digits: Dataset, tmp_path: Path) -> None:
    config = configured({}, ["student.model.name=logistic"], method="test_several_releases:TwoTables")
    trained, _ = train_model(config, digits, QUIET, folder=tmp_path / "folder")
    assert [np.round(each.epsilon, 6) for each in trained.events] == list(EPSILONS)  # type: ignore[attr-defined]
    assert not (tmp_path / "folder").exists()
    assert counted() == []
