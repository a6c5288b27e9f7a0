"""What this machine offers a run: versions, processors, Ray, places on disk and optional extras, with remedies.

Nothing is started or written, and nothing private is read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fairpate.app.extras import MODULES, import_error, install_words, is_missing
from fairpate.app.rundir import environment
from fairpate.app.spending.odometer import state_folder
from fairpate.files import PlaceError, check_output_folder

_LITTLE_DISK = 2**30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: ``level`` ``fix`` says that something does not work as it is, and ``value`` what to do."""

    name: str
    value: str
    level: Literal["ok", "fix"] = "ok"


def findings() -> list[Finding]:
    """All lines, in the order they are printed."""
    return [*_versions(), *_processors(), *_places(), *_extras()]


def _versions() -> Iterator[Finding]:
    found = environment()
    yield Finding(name="fairpate", value=" ".join(filter(None, (found["fairpate"], found["revision"]))))
    yield Finding(name="python", value=found["python"])
    yield Finding(name="platform", value=found["platform"])
    yield from (Finding(name=name, value=version) for name, version in found["libraries"].items())


def _processors() -> Iterator[Finding]:
    import torch

    yield Finding(name="cpus", value=str(os.cpu_count()))
    yield Finding(name="torch threads", value=str(torch.get_num_threads()))
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding(name="gpus", value=", ".join(gpus) or "none")
    address = os.environ.get("RAY_ADDRESS")
    yield Finding(name="ray cluster", value=address or "this machine alone (RAY_ADDRESS is not set)")


def _places() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    room = f"{free / 2**30:.1f} GiB free in {Path.cwd()}"
    if free < _LITTLE_DISK:
        yield Finding(name="disk", value=f"{room}: make room, or give --out elsewhere", level="fix")
    else:
        yield Finding(name="disk", value=room)
    yield _data_folder(os.environ.get("FAIRPATE_DATA"))
    state = state_folder()
    try:
        check_output_folder(state, "FAIRPATE_STATE")
    except PlaceError as error:
        yield Finding(name="state folder", value=str(error), level="fix")
    else:
        yield Finding(name="state folder", value=str(state))


def _data_folder(folder: str | None) -> Finding:
    if not folder:
        return Finding(name="data folder", value="FAIRPATE_DATA is not set; data sets with files need --data-dir")
    if not Path(folder).is_dir():
        return Finding(name="data folder", value=f"FAIRPATE_DATA: {folder} is no folder; make it", level="fix")
    return Finding(name="data folder", value=folder)


def _extras() -> Iterator[Finding]:
    for extra in MODULES:
        error = import_error(extra)
        value = "installed" if error is None else install_words(extra, error)
        level: Literal["ok", "fix"] = "ok" if error is None or is_missing(error) else "fix"
        yield Finding(name=f"extra {extra}", value=value, level=level)
