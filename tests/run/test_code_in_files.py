"""Code that a file names runs only where the user allowed it; what was typed, or runs already, is no question."""

import hashlib

import pytest

from fairpate.config import ALLOWED

pytestmark = pytest.mark.usefixtures("light_runs")

RAN = "import pathlib; pathlib.Path('ran').touch()\n"


@pytest.fixture(autouse=True)
def in_the_working_directory(tmp_path, monkeypatch):
    """A module that leaves a trace; its name is new in each test, as what runs already may be named."""
    monkeypatch.delenv(ALLOWED, raising=False)
    example = (tmp_path / "strange.py").with_stem(f"strange_{tmp_path.parent.name.replace('-', '_')}_{tmp_path.name}")
    example.write_text(RAN + "class NoMethod: ...\ndef make(): ...\n")


def place(tmp_path, name):
    return f"{next(tmp_path.glob('strange_*.py')).stem}:{name}"


@pytest.mark.parametrize("command", ["run", "report", "serve", "compare"])
def test_a_file_that_names_a_method_runs_nothing(fairpate, tmp_path, command):
    method = place(tmp_path, "NoMethod")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"method: {method}\n")
    sweep = f"methods: {{'{method}': {{}}}}\ndata_sets: {{color_digits: {{}}}}\n"
    (tmp_path / "sweep.yaml").write_text(sweep)
    given = {"run": str(folder / "config.yaml"), "compare": str(tmp_path / "sweep.yaml")}.get(command, str(folder))
    code, _, errors = fairpate(command, given)
    assert code == 2, errors
    assert (
        f"names {method}, code that would run with your rights; if you trust it, set {ALLOWED}=1 in the environment"
        in errors
    )
    assert not (tmp_path / "ran").exists()


def test_what_is_allowed_or_typed_runs(fairpate, tmp_path, monkeypatch):
    monkeypatch.setenv(ALLOWED, "1")
    (tmp_path / "config.yaml").write_text(f"method: {place(tmp_path, 'NoMethod')}\n")
    code, _, errors = fairpate("run", "config.yaml")
    assert code == 2
    assert "expected a subclass of fairpate.methods.base.Method" in errors
    assert (tmp_path / "ran").exists()


def test_an_estimator_s_folder_runs_nothing(fairpate, tmp_path):
    from fairpate import FairClassifier
    from student.card import StudentFileError

    model = FairClassifier("sgd", sgd={"epochs": 1}).fit([[0.0], [1.0]] * 20, [0, 1] * 20)
    model.save(tmp_path / "model")
    config, described = tmp_path / "model" / "config.yaml", tmp_path / "model" / "estimator.json"
    before = config.read_text()
    config.write_text(before.replace("method: sgd", f"method: {place(tmp_path, 'NoMethod')}"))
    described.write_text(described.read_text().replace(digest(before), digest(config.read_text())))
    with pytest.raises(StudentFileError, match="code that would run with your rights"):
        FairClassifier.load(tmp_path / "model")
    assert not (tmp_path / "ran").exists()


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()
