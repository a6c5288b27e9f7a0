"""A run with teachers of one's own: boosted trees on an embedding, from a module in the working directory."""

import shutil

import pytest
from safetensors import safe_open
from small_runs import read_json

from fairpate.config import ConfigError
from fairpate.methods.base import configured
from fairpate.run.compare import compare_methods

MODULE = """
from sklearn.ensemble import HistGradientBoostingClassifier

def make_teacher(random_state):
    return HistGradientBoostingClassifier(max_iter=3, min_samples_leaf=5, random_state=random_state)
"""
PLACE = 'teachers.model={python: "boosted_of_mine:make_teacher"}'
FAST = [
    *("noise=seeded", "data.embedding={num_components: 20, graph_share: 0}", "teachers.num_teachers=8"),
    *("aggregator.num_queries=60", "aggregator.mechanism.threshold=4", "aggregator.mechanism.noise_stddev_votes=1"),
    *("aggregator.mechanism.threshold_stddev_votes=1", "student.fit.epochs=3", "ray.num_actors=0"),
]


def command(method, out, *options):
    sets = [part for override in (*FAST, PLACE) for part in ("--set", override)]
    return ("run", "--method", method, *sets, "--out", out, *options)


@pytest.fixture
def module(tmp_path):
    (tmp_path / "boosted_of_mine.py").write_text(MODULE, encoding="utf-8")
    return tmp_path / "boosted_of_mine.py"


def test_boosted_trees_teach_a_published_student(fairpate, tmp_path, module):
    code, _, errors = fairpate(*command("fairpate", tmp_path / "run", "--allow-code"))
    assert code == 0, errors
    votes = sorted((tmp_path / "run/private/teachers").iterdir())
    assert [file.suffix for file in votes] == [".safetensors"] * 2
    with safe_open(votes[0], framework="numpy") as file:
        assert set(file.keys()) == {"predictions", "failed"}
    assert read_json(tmp_path / "run/public/statement.json")["unit"] == "record"
    statement = (tmp_path / "run/public/statement.json").read_bytes()
    module.unlink()  # all votes are there, so neither the code nor the permission is needed
    assert fairpate(*command("fairpate", tmp_path / "run"))[0] == 0
    assert (tmp_path / "run/public/statement.json").read_bytes() == statement
    code, _, errors = fairpate("serve", tmp_path / "run")
    assert code == 2
    assert "whose teachers were not kept" in errors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pate", "pate_s_pre", "pate_s_in"])
def test_every_method_that_trains_teachers_takes_them(fairpate, tmp_path, module, method):
    code, _, errors = fairpate(*command(method, tmp_path / "run", "--allow-code"))
    assert code == 0, errors


def test_code_does_not_run_unless_it_is_allowed(fairpate, tmp_path, module):
    module.write_text("raise SystemExit('ran')", encoding="utf-8")
    code, _, errors = fairpate(*command("fairpate", tmp_path / "run"))
    assert code == 2
    assert "boosted_of_mine:make_teacher is code that would run with your rights; if you trust it" in errors
    assert not (tmp_path / "run").exists()
    sweep = {"data_sets": ["color_digits"], "methods": {"pate": {}}, "settings": {"teachers.model.python": "x:y"}}
    with pytest.raises(ConfigError, match="allow-code"):
        compare_methods(sweep, out=tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_an_interrupted_training_asks_the_rest(fairpate, tmp_path, module):
    assert fairpate(*command("pate", tmp_path / "run", "--allow-code"))[0] == 0
    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "run", folder)
    (folder / "private/votes.parquet").unlink()
    files = sorted((folder / "private/teachers").iterdir())
    kept = files[0].stat().st_mtime_ns
    files[1].unlink()
    code, _, errors = fairpate(*command("pate", folder))
    assert code == 2  # votes are missing, so the code would run
    assert "--allow-code" in errors
    assert fairpate(*command("pate", folder, "--allow-code"))[0] == 0
    assert files[0].stat().st_mtime_ns == kept
    assert (folder / "private/votes.parquet").read_bytes() == (tmp_path / "run/private/votes.parquet").read_bytes()


def test_settings_that_lead_nowhere_are_refused():
    with pytest.raises(ConfigError, match=r"teachers.model.python"):
        configured({"teachers": {"model": {"python": "no colon"}}}, method="pate")
    with pytest.raises(ConfigError, match="sf_pate trains teachers of its own kind"):
        configured({"teachers": {"model": {"python": "a:b"}}}, method="sf_pate").check()
    with pytest.raises(ConfigError, match=r"student.model.python"):
        configured({"student": {"model": {"python": "a:b"}}}, method="pate")
