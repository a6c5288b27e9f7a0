"""`--weights`: from the command line to a published student, on made-up faces."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pretrained import published
from safetensors import safe_open

from fairpate import cli
from student.student import load_student

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

RACES = 5
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def fairpate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Run the command line in an empty folder: (exit code, errors)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRPATE_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fairpate", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(published("resnet18").state_dict(), path)
    return path


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with 100 pictures of noise, named like faces; class 1 is brighter."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "utkface" / "UTKFace").mkdir(parents=True)
    draws = np.random.default_rng(0)
    for number in range(100):
        gender, race = number % 2, number // 2 % RACES
        pixels = draws.integers(90 * gender, 160 + 90 * gender, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "utkface" / "UTKFace" / f"25_{gender}_{race}_2017{number}.jpg")
    return folder


def settings(faces: Path) -> dict[str, Any]:
    return {
        "data": {
            "name": "utkface",
            "data_dir": str(faces),
            "options": {"image_size": 32},
            "num_public": 30,
            "num_validation": 0,
            "num_test": 20,
        },
        "noise": "seeded",
        "teachers": {"num_teachers": 2, "model": {"name": "resnet18"}, "fit": {"epochs": 1}},
        "aggregator": {
            "num_queries": 20,
            "mechanism": {"threshold": 0, "threshold_stddev_votes": 0.1, "noise_stddev_votes": 0.1},
            "gate": {"max_disparity": 1.0, "min_count": 1},
        },
        "student": {"fit": {"epochs": 1}},
        "ray": {"num_actors": 0},
    }


@pytest.fixture
def config(faces: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings(faces)))
    return path


@pytest.mark.slow
def test_a_run_starts_from_the_file_and_names_its_checksum(fairpate: Command, weights: Path, config: Path) -> None:
    checksum = hashlib.sha256(weights.read_bytes()).hexdigest()
    models = ["--set", "backbone.trainable=head", "--set", "student.model=resnet18"]
    command = ["run", config, *models, "--weights", weights, "--out", "run"]
    code, errors = fairpate(*command)
    assert (code, errors.count(f"starts from {weights}, sha256 {checksum}")) == (0, 2), errors
    resolved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert resolved["backbone"]["weights"] == {"path": str(weights), "sha256": checksum}
    with safe_open("run/public/student.safetensors", framework="pt") as file:
        card = file.metadata()["card"]
    assert json.loads(card)["model"]["weights"] == {"sha256": checksum}
    student = load_student(Path("run/public/student.safetensors"))
    assert torch.equal(student.network[1].conv1.weight, published("resnet18").conv1.weight)  # type: ignore[index, union-attr, arg-type]

    moved = weights.rename(weights.with_name("moved.pth"))
    assert fairpate("report", "run") == (0, "")
    elsewhere = [moved if word == weights else word for word in command]
    code, errors = fairpate(*elsewhere)
    assert (code, "starts from" in errors) == (0, False), errors
    moved.rename(weights)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--set", "teachers.model.name=cnn"],
            ["backbone.weights", "resnet18, resnet50, densenet121", "got cnn and mlp"],
        ),
        (["--set", "teachers.model.name=resnet50"], ["no weights of resnet50", "set model.name"]),
        (["--set", "backbone.trainable=head", "--weights", "gone.pth"], ["backbone.weights", "gone.pth"]),
    ],
)
def test_weights_that_cannot_be_used_end_in_one_message(
    options: list[str], words: list[str], fairpate: Command, weights: Path, config: Path
) -> None:
    code, errors = fairpate("run", config, "--weights", weights, "--out", "run", *options)
    assert code == (1 if "no weights of resnet50" in words else 2)
    assert all(word in errors for word in words), errors
    assert "Traceback" not in errors
    assert not Path("run/private/teachers").exists()


@pytest.mark.slow
def test_a_trained_method_starts_from_the_file_too(fairpate: Command, weights: Path, config: Path) -> None:
    options = [
        "--set",
        "student.model=resnet18",
        "--set",
        "backbone.trainable=head",
        "--set",
        "dp_sgd={epochs: 0.2, batch_size: 10}",
    ]
    options += ["--set", "target.accounting=rdp"]
    code, errors = fairpate("run", config, "--method", "dp_sgd", "--weights", weights, *options, "--out", "run")
    assert (code, errors.count("starts from"), "student.model starts from" in errors) == (0, 1, True), errors
