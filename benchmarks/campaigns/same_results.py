"""Digests of what seeded runs publish, of every method on two data sets and for each unit, to compare two checkouts.

    python benchmarks/campaigns/same_results.py BEFORE.json [--root OTHER_CHECKOUT]
    python benchmarks/campaigns/same_results.py AFTER.json --against BEFORE.json

A rewrite must not change them. The runs are tiny; a method that refuses a data set or a unit is described by its
message. Dates, versions and folders in the published files are left out, and ``out`` with ``--root`` names the code
that runs: the rest of this script is the same for both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

CELLS = (("loans", "record"), ("loans", "person"), ("color_digits", "record"))
ROWS = {"private": 1_500, "public": 400, "validation": 50, "test": 400}
SETTINGS = {
    "seed": 3,
    "noise": "seeded",
    "target": {"epsilon": 8, "delta": 1.0e-4},
    "evaluation": {"least_cell": 1},
    "ray": {"num_actors": 0},
    "teachers": {"num_teachers": 12, "fit": {"epochs": 3}},
    "aggregator": {"num_queries": 100},
    "student": {"model": {"name": "logistic"}, "fit": {"epochs": 5}},
    "sgd": {"epochs": 2},
    "dp_sgd": {"epochs": 2, "batch_size": 200},
    "f_ld": {"warmup_epochs": 1, "epochs": 2},
    "pf_ld": {"warmup_epochs": 1, "epochs": 2},
    "dp_oracle_learner": {"num_rounds": 4, "min_share": 0.001},
    "randomised_response": {"num_rounds": 3},
}
VARYING = re.compile(
    rb"\d{4}-\d\d-\d\d(?:[T ][\d:.+Z]*(?: UTC)?)?"  # dates
    rb"|\b[0-9a-f]{40}\b"  # git revisions
    rb"|\b[0-9a-f]{32}\b"  # the random id of a release
)
NOT_COMPARED = ("software.json", "environment.json", "model.onnx")


def small(dataset: Any) -> Any:
    """Return the first records of each part, and of the digits two classes, so that every method runs on them."""
    import torch

    parts = {}
    for name, rows in ROWS.items():
        split = getattr(dataset, name)
        y = split.y[:rows] if dataset.num_classes == 2 else torch.where(split.y[:rows] < 0, -1, split.y[:rows] % 2)
        values = {"x": split.x[:rows], "y": y, "z": split.z[:rows]}
        ids = {each: tuple(getattr(split, each))[:rows] for each in ("record_id", "unit_id", "person_id")}
        parts[name] = replace(split, **values, **ids)
    names = dataset.label_names if dataset.num_classes == 2 else ("even", "odd")
    return replace(dataset, **parts, label_names=names)


def described(method: str, data: str, unit: str, folder: Path) -> Any:
    """Run one cell and return the digest of every published file, or the message of a refusal."""
    from fairpate.config import DataConfig
    from fairpate.data import load_data
    from fairpate.methods.base import configured
    from fairpate.run.run import run_method
    from fairpate.terminal import Reporter
    from fairpate.types import UserError

    out = folder / f"{method}-{data}-{unit}"
    options = {"colour_as_feature": False} if data == "color_digits" else {}
    try:
        values = SETTINGS | {"data": {"name": data, "options": options} | ({"unit": unit} if unit == "record" else {})}
        config = configured(values, [f"out={out}"], method=method)
        run = run_method(config, Reporter(quiet=True), small(load_data(DataConfig.model_validate(values["data"]))))
    except (UserError, ValueError) as error:  # no answer that a student could learn from, too
        return str(error).replace(str(folder), "FOLDER")
    found = {}
    for path in sorted(path for path in run.root.joinpath("public").rglob("*") if path.is_file()):
        if path.name not in NOT_COMPARED:
            content = VARYING.sub(b"", path.read_bytes().replace(str(folder).encode(), b"FOLDER"))
            found[path.name] = hashlib.sha256(content).hexdigest()
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a line for each cell, and each of its files, that differs."""
    lines = []
    for cell in sorted(before.keys() | after.keys()):
        one, other = before.get(cell), after.get(cell)
        if one != other:
            names = (
                sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
                if isinstance(one, dict) and isinstance(other, dict)
                else [f"{one} -> {other}"]
            )
            lines.append(f"{cell}: {', '.join(names)}")
    return lines


def main() -> int:
    """Write the digests, and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the checkout that runs")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--methods", nargs="*", help="these methods alone")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.root.resolve()))
    import torch

    from fairpate.methods.base import method_names

    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAIRPATE_STATE"] = folder  # these releases are no operator's
        for method in arguments.methods or sorted(method_names()):
            for data, unit in CELLS:
                found[f"{method} {data} {unit}"] = described(method, data, unit, Path(folder))
                print(f"{method} {data} {unit}", flush=True)
                arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text(encoding="utf-8"))
    lines = differences({cell: value for cell, value in before.items() if cell in found}, found)
    print("\n".join(lines) or f"{len(found)} runs: equal byte for byte")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
