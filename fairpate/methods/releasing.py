"""Methods that read private records once, for arrays that are published, and do everything else with those.

What comes after such a release is post-processing: a run may go on from the release of another one, with other settings
of it, and costs nothing more. Which settings those are, a method lists; all others make another release.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

from fairpate.app.identity import determining_values, flat_values
from fairpate.app.released import Origin, Released, pool_digest, read_release, save_release
from fairpate.app.rundir import RunDirectory, RunDirectoryError, RunFolderError
from fairpate.config import ConfigError
from fairpate.data import Dataset
from fairpate.evaluation.private_population import PrivatePopulation
from fairpate.files import write_atomically
from fairpate.methods.definition import Method, PrivateMethod, Training
from fairpate.methods.trained import Trained
from student.predict import Student


class ReleasingMethod(PrivateMethod):
    """One release, then learning from it. ``afterwards``: the dotted fields that only learning reads.

    A field that is not listed makes another release, which is counted: to forget one costs privacy and betrays none.
    """

    afterwards: ClassVar[tuple[str, ...]] = ("student", "public_data")

    @property
    def release_settings(self) -> dict[str, Any]:
        """All that the release follows from, but for records and noise."""
        values = copy.deepcopy(determining_values(self))
        for field in self.afterwards:
            *parents, last = field.split(".")
            section = values
            for name in parents:
                section = section[name]
            section.pop(last)
        values.pop("evaluation", None)
        return values

    @property
    def release_alone(self) -> ReleasingMethod:
        """The same release, with what comes afterwards at its defaults."""
        return type(self).model_validate(self.release_settings | {"data": self.data, "out": self.out})

    def measure(self, training: Training) -> Released:
        """Read private records, once."""
        raise NotImplementedError

    def learn(self, training: Training, released: Released) -> Trained:
        """The model, from what was released and from public records."""
        raise NotImplementedError

    def private_population(
        self,
        released: Released,  # noqa: ARG002 - most releases tell no groups
        dataset: Dataset,  # noqa: ARG002
        student: Student,  # noqa: ARG002
    ) -> PrivatePopulation | None:
        """How ``student`` treats the groups of private records, as far as the release tells; None where it does not."""
        return None

    def train(self, training: Training) -> Trained:
        """Both."""
        return self.learn(training, self.measure(training))


def kept_release(config: ReleasingMethod, training: Training) -> Released:
    """The release of the run's folder; where it has none, one is drawn, counted and kept, in this order.

    RunDirectoryError for one that was made under other settings, or for other public records.
    """
    run, meter = training.run, training.meter
    assert meter is not None
    pool = pool_digest(training.dataset.public.record_id)
    if run.released.exists():
        released, origin = read_release(run.released)
        _require_same(origin, config, run.released)
        if origin.pool != pool:
            raise RunDirectoryError(
                f"{run.released}: was made with other public records of {training.dataset.name}; give those."
            )
        meter.count_again(released.events, noise=config.source.label)
        return released
    released = config.measure(training)
    # Counted before it is kept: a crash between the two leaves one counted that nobody has, never the reverse.
    meter.record(released.events, noise=config.source.label)
    save_release(run.released, released, Origin(id=meter.id, settings=config.release_settings, pool=pool))
    return released


def check_release_of(config: Method, source: Path) -> None:
    """ConfigError or RunDirectoryError unless ``config`` can go on from the release of the run in ``source``."""
    if not isinstance(config, ReleasingMethod):
        raise ConfigError(f"method: {config.method} keeps no release that another run could go on from.")
    found = RunDirectory(root=source).released
    if not found.is_file():
        raise RunFolderError(f"{source}: holds no release ({found.name}); give the folder of a finished run.")
    _require_same(read_release(found)[1], config, found)


def take_release(run: RunDirectory, source: Path) -> None:
    """Let ``run`` go on from the release of the run in ``source``. RunDirectoryError where it has another already."""
    content = RunDirectory(root=source).released.read_bytes()
    has_started = run.statement.exists() or run.receipt.exists() or run.released.exists()
    # The same release again is no second one: a run that was interrupted may be called again.
    if has_started and not (run.released.exists() and run.released.read_bytes() == content):
        raise RunFolderError(f"{run.root}: has a release of its own; give another folder with --out.")
    write_atomically(run.released, lambda temporary: temporary.write_bytes(content))


def shared_remarks(run: RunDirectory) -> tuple[str, ...]:
    """What a statement says where the run went on from another one's release."""
    if not run.released.exists() or run.receipt.exists():
        return ()
    origin = read_release(run.released)[1]
    return (f"Learned from release {origin.id} of another run, whose ε this is: it is spent once, not again.",)


def _require_same(origin: Origin, config: ReleasingMethod, place: Path) -> None:
    before, now = flat_values(origin.settings), flat_values(config.release_settings)
    changes = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise RunFolderError(
            f"{place}: was released under other settings ({'; '.join(changes)}); set them back, or let the run make a "
            "release of its own, which costs its epsilon besides."
        )
