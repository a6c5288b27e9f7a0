"""`fairpate run` with a data set, a method or an epsilon and nothing else."""

import json

import pytest

from fairpate.config import DataConfig
from fairpate.data import load_data
from fairpate.data.embedding import Embedding
from student.card import StudentFileError
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

QUICK = ("--set", "noise=seeded", "--set", "data.embedding={graph_share: 0, num_components: 20}")
QUICK += ("--set", "evaluation.least_cell=1")  # of ten classes: nearly every cell is small
BY_CURVES = ("--set", "target.accounting=rdp")


def test_an_epsilon_alone_is_enough_and_what_is_said_besides_takes_its_place(fairpate, tmp_path):
    code, output, errors = fairpate(
        "run", "--epsilon", "2", "--set", "residual_votes.step=2", *QUICK, *BY_CURVES, "--out", str(tmp_path / "run")
    )
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "method: residual_votes" in written
    assert "step: 2.0" in written
    assert "2.00 at delta" in output
    code, _, errors = fairpate("run", "--epsilon", "2", "--set", "student.fit.epochs=1")
    assert code == 2
    assert "student.fit.epochs: not read because of student.model.name=logistic" in errors


def test_a_method_gets_what_suits_it(fairpate, tmp_path):
    code, _, errors = fairpate(
        "run",
        "--method",
        "dp_sgd",
        "--set",
        "data.embedding.graph_share=0",
        *BY_CURVES,
        "--set",
        "dp_sgd.epochs=1",
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "name: logistic" in written
    assert "num_components: 17" in written  # a hundredth of 1,797 digits


def test_a_run_goes_on_with_the_embedding_of_its_folder(fairpate, tmp_path, monkeypatch):
    """Also where it would come out otherwise, as on another processor; and its student reads records with it."""
    folder = tmp_path / "run"
    command = ("run", "--epsilon", "2", *QUICK, *BY_CURVES, "--out", str(folder))
    assert fairpate(*command)[0] == 0
    dataset = load_data(DataConfig())
    predicted = load_student(folder / "public" / "student.safetensors").predict(dataset.test.x).labels
    accuracy = json.loads((folder / "public" / "metrics.json").read_text())["accuracy"]
    assert (predicted == dataset.test.y.numpy()).mean() == pytest.approx(accuracy, abs=1e-9)

    def turned(*_):
        raise AssertionError

    monkeypatch.setattr(Embedding, "of", turned)
    code, _, errors = fairpate(*command)
    assert code == 0, errors
    stored = folder / "public" / "embedding.safetensors"
    content = stored.read_bytes()
    stored.write_bytes(content[:-8] + bytes(8))
    code, _, errors = fairpate(*command)
    assert code == 1
    assert "restore it from a copy" in errors
    with pytest.raises(StudentFileError, match="is not the embedding that the student was trained with"):
        load_student(folder / "public" / "student.safetensors")
    stored.unlink()
    code, _, errors = fairpate(*command)
    assert code == 1
    assert "missing, although" in errors


def test_what_protects_nobody_keeps_its_embedding_to_itself(fairpate, tmp_path):
    code, _, errors = fairpate("run", "--method", "sgd", *QUICK[2:], "--out", str(tmp_path / "run"))
    assert code == 0, errors
    assert not (tmp_path / "run" / "public").exists()
    assert (tmp_path / "run" / "private" / "embedding.safetensors").is_file()


@pytest.mark.slow  # that a ledger which is gone is missed: tests/run/test_run_ledger.py
@pytest.mark.parametrize("method", ["fairpate", "private_knn"])
def test_voters_that_fill_a_ledger_may_read_an_embedding(fairpate, tmp_path, method):
    """What is written of public records before the first vote is no release that a missing ledger has forgotten."""
    sizes = ("--set", "data.num_public=120", "--set", "ray.num_actors=0")
    command = ("run", "--epsilon", "2", "--method", method, *QUICK, *sizes, "--out", str(tmp_path / "run"))
    code, _, errors = fairpate(*command)
    assert code == 0, errors
    (tmp_path / "run" / "private" / "ledger.sqlite").unlink()
    code, _, errors = fairpate(*command)
    assert code == 1
    assert "ledger is missing, although" in errors
