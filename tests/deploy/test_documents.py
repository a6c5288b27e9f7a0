"""Every command that the documents show exists, with the options and the files that they name."""

import json
import re
from pathlib import Path

import pytest
from command_lines import CommandError, check, commands_in, commands_in_sentences, is_name, text_of

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.ipynb"))]
CONFIGURATION = re.compile(r"(?:(?:configs|deploy)/[\w./-]+|\bcluster\.yaml)")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist_with_their_options(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = text_of(path)
    told = [line for line in commands_in_sentences(text) if not is_name(line)]
    for line in [*commands_in(text), *told]:
        check(line)
        for name in CONFIGURATION.findall(line):
            assert (ROOT / name).exists() or "NAME" in name, line


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 70


def test_the_page_on_clusters_shows_a_whole_life() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    shown = [name for line in commands_in(text) for name in check(line)]
    for name in ("get-auth-token", "up", "rsync-up", "dashboard", "exec", "attach", "rsync-down", "down"):
        assert f"ray {name}" in shown
    jobs = [f"cluster {name}" for name in ("submit", "jobs", "follow", "stop")]
    for name in (*jobs, "run", "compare", "serve", "query"):
        assert f"fairpate {name}" in shown


@pytest.mark.parametrize(
    "line",
    [
        "ray upp cluster.yaml",
        "ray up",
        "ray up cluster.yaml --num-gpus 4",
        "ray job submit --adress http://localhost:8265 -- fairpate run",
        "ray job submit -- fairpate rum",
        "ray job submit -- fairpate run --workers 4",
        "fairpate cluster submit run --workers 4",
        "fairpate cluster submit --at http://localhost:8265 run",
        "fairpate cluster follow",
        "ray exec cluster.yaml 'cd runs && fairpate serve runs/x --detached'",
        "RAY_ADDRESS=auto fairpate serve",
        "fairpate data lst | grep adult",
        "fairpate serve runs/x --replicas many",
        "fairpate serve runs/x --replicas 0",
        "unheard-of --option",
        "chmod 600 x; ray get-auth-token --make",
    ],
)
def test_a_command_that_cannot_run_is_found(line: str) -> None:
    with pytest.raises(CommandError):
        check(line)


def test_commands_are_found_in_sentences_and_in_notebooks(tmp_path: Path) -> None:
    text = "`fairpate card`, `fairpate run --epsilon E`,\n`ray\nup x` and `fairpate`.\n```\n`fairpate no`\n```\n"
    assert list(commands_in_sentences(text)) == ["fairpate card", "fairpate run --epsilon 1", "ray up x"]
    assert is_name("fairpate ledger show")
    assert is_name("fairpate serve --json")
    assert not is_name("fairpate serve --jason")
    assert not is_name("fairpate run --epsilon 1")
    assert not is_name("fairpate nonsense")
    cells = [
        {"cell_type": "markdown", "source": ["As `fairpate card RUN`."]},
        {"cell_type": "code", "source": ["import fairpate\n", "!fairpate data list"]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    found = text_of(tmp_path / "a.ipynb")
    assert list(commands_in(found)) == ["fairpate data list"]
    assert list(commands_in_sentences(found)) == ["fairpate card RUN"]


def test_commands_are_found_in_both_kinds_of_blocks_and_nothing_else_is() -> None:
    text = """Text with `fairpate nonsense` in a line.

```
ray up x \\
    --yes     # a comment
```

    fairpate run
    fairpate data list | grep adult

```yaml
fairpate: nonsense
```

    teachers/       a folder, not a command
"""
    lines = list(commands_in(text))
    assert [name for line in lines for name in check(line)] == ["ray up", "fairpate run", "fairpate data list"]
