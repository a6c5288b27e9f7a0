"""`fairpate doctor` tells what is there, and what has to be fixed."""

import json
import os

import torch

from fairpate import __version__


def test_it_tells_what_this_machine_has(fairpate, monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FAIRPATE_DATA", str(tmp_path))
    code, out, _ = fairpate("doctor", "--json")
    told = {finding["name"]: finding["value"] for finding in json.loads(out)["findings"]}
    assert code == 0
    assert told["fairpate"].startswith(__version__)
    assert told["torch"] == torch.__version__
    assert told["cpus"] == str(os.cpu_count())
    assert (told["data folder"], told["state folder"]) == (str(tmp_path), str(tmp_path / "state"))
    assert {"gpus", "torch threads", "ray cluster", "disk", "extra onnx", "extra postgresql"} <= told.keys()
    assert not (tmp_path / "state").exists()


def test_what_does_not_work_is_named_with_its_remedy(fairpate, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "file"))
    monkeypatch.setenv("FAIRPATE_DATA", str(tmp_path / "nowhere"))
    code, out, _ = fairpate("doctor")
    assert code == 1
    assert "fix: FAIRPATE_STATE" in out
    assert f"fix: FAIRPATE_DATA: {tmp_path / 'nowhere'} is no folder" in out


def test_an_extra_that_is_not_installed_says_how_to_install_it(fairpate, monkeypatch):
    monkeypatch.setattr("fairpate.app.terminal.doctor._EXTRAS", {"onnx": ("no_such_package.part",)})
    assert "not installed: pip install 'fairpate[onnx]'" in fairpate("doctor")[1]
