"""`fairpate run` with a data set, a method or an epsilon and nothing else."""

import pytest
from safetensors.torch import load_file, save_file

QUICK = ("--set", "noise=seeded", "--set", "data.embedding.graph_share=0")


def test_an_epsilon_alone_is_enough_and_what_is_said_besides_takes_its_place(fairpate, tmp_path):
    code, output, errors = fairpate(
        "run", "--epsilon", "2", "--set", "student.fit.epochs=1", *QUICK, "--out", str(tmp_path / "run")
    )
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "method: weighted_votes" in written
    assert "epochs: 1" in written
    assert "2.00 at delta" in output


def test_a_method_gets_what_suits_it(fairpate, tmp_path):
    code, _, errors = fairpate("run", "--method", "dp_sgd", *QUICK, "--out", str(tmp_path / "run"))
    assert code == 0, errors
    written = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "name: logistic" in written
    assert "num_components: 200" in written


def test_a_run_whose_embedding_comes_out_otherwise_is_refused(fairpate, tmp_path):
    """As on another processor: the components of the pool have turned."""
    folder = tmp_path / "run"
    command = ("run", "--epsilon", "2", "--set", "student.fit.epochs=1", *QUICK, "--out", str(folder))
    assert fairpate(*command)[0] == 0
    assert fairpate(*command)[0] == 0
    stored = folder / "public" / "coordinates.safetensors"
    coordinates = load_file(stored)["public"]
    assert coordinates.shape[0] == 64
    save_file({"public": coordinates.flip(1).contiguous()}, stored)
    code, _, errors = fairpate(*command)
    assert code == 1
    assert "came out otherwise on this machine" in errors


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
    assert "gone, although" in errors
