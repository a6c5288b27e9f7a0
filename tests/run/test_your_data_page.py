"""docs/your-data.md from its first command to its last, on files made here; serving alone is tested elsewhere."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest

from fairpate.releases.directory import read_json, read_statement
from fairpate.run.folder import open_run_directory

pytestmark = pytest.mark.usefixtures("light_runs")

PAGE = (Path(__file__).parents[2] / "docs" / "your-data.md").read_text(encoding="utf-8")
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    fairpate ")]
DECLARATION, PROGRAM = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("yaml", "python"))


def write(path: Path, count: int, first: int, draws: random.Random, *, label: bool = True) -> None:
    """Visits of persons, of whom each has two; age tells most of the label."""
    lines = ["visit,patient,age,weight,ward,sex" + ",readmitted" * label]
    for visit in range(first, first + count):
        age, weight = draws.randint(0, 99), draws.choice(["", str(draws.randint(40, 120))])
        again = ("no", "yes")[age + draws.gauss(0, 10) > 50]
        row = [visit, f"p{visit // 2}", age, weight, draws.choice("ABCD"), draws.choice("FM"), again]
        lines.append(",".join(map(str, row if label else row[:-1])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draws = random.Random(0)
    write(tmp_path / "patients.csv", 3000, 0, draws)
    write(tmp_path / "pool.csv", 600, 10_000, draws, label=False)
    write(tmp_path / "held_out.csv", 400, 20_000, draws)
    return tmp_path


@pytest.mark.slow
def test_every_command_does_what_the_page_says(folder, fairpate):
    shown = [shlex.split(line)[1:] for line in COMMANDS]
    assert [words[0] for words in shown] == ["data", "data", "run", "run", "card", "serve"]
    for words in shown[:-1]:
        code, said, complaint = fairpate(*words)
        assert code == 0, (words, complaint)
        if words[:2] == ["data", "declare"]:
            draft = (folder / "hospital.yaml").read_text(encoding="utf-8")
            assert "# ?" in draft
            (folder / "hospital.yaml").write_text(DECLARATION, encoding="utf-8")
        if words[:2] == ["data", "check"]:
            assert "nothing is refused" in said
    run, config = open_run_directory(folder / "runs" / "hospital")
    statement = read_statement(run)
    assert (statement.unit, config.data.name) == ("person", "hospital")
    assert statement.epsilon <= 2
    assert read_json(run.record)["accuracy"] > 0.8
    for name in ("student.safetensors", "statement.json", "report.html", "card.html"):
        assert (run.public / name).is_file(), name
    assert not [path.name for path in run.public.iterdir() if "p1499" in path.read_text(errors="ignore")]


def test_the_program_runs_as_it_stands(folder, monkeypatch, capsys):
    (folder / "hospital.yaml").write_text(DECLARATION, encoding="utf-8")
    monkeypatch.chdir(folder)
    exec(compile(PROGRAM, "docs/your-data.md", "exec"), {})  # noqa: S102 - the page is ours
    assert float(capsys.readouterr().out.split()[-1]) <= 2
