"""What the repository says of itself for those who get it: one version, named placeholders, checks of every Python."""

import re
import tomllib
from pathlib import Path

import yaml

import fairpate

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    version = PROJECT["version"]
    assert fairpate.__version__ == version
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    newest = re.findall(r"^## \[(\d[^]]*)\]", read("CHANGELOG.md"), re.M)[0]
    assert newest == version
    chart = yaml.safe_load(read("deploy/helm/fairpate/Chart.yaml"))
    assert (chart["version"], chart["appVersion"]) == (version, version)
    for path in ("deploy/Dockerfile", "docs/cluster.md"):
        assert set(re.findall(r"REGISTRY/fairpate:([\d.]+\d)", read(path))) == {version}, path


def test_the_changelog_has_room_for_what_comes_and_is_short() -> None:
    text = read("CHANGELOG.md")
    assert text.index("## [Unreleased]") < text.index(f"## [{PROJECT['version']}]")
    assert len(text.splitlines()) <= 150


def test_every_placeholder_is_named_and_stands_where_it_is_said_to() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (`[^|]+) \| [^|]+ \|$", CONTRIBUTING.partition("## Before the first release")[2], re.M
    )
    named = {placeholder: set(re.findall(r"`([^`]+)`", places)) for placeholder, places in rows}
    assert len(named) == 4
    published = [path for path in ROOT.glob("*") if path.suffix in (".md", ".toml", ".cff")]
    published += [path for path in (ROOT / ".github").rglob("*") if path.is_file()]
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in published
        if path.name != "CONTRIBUTING.md"
    }
    for placeholder, places in named.items():
        assert {path for path, text in texts.items() if placeholder in text} == places, placeholder
    others = {path: re.sub("|".join(map(re.escape, named)), "", text) for path, text in texts.items()}
    assert [path for path, text in others.items() if "example.org" in text] == []


def test_the_wheel_names_authors_and_addresses() -> None:
    assert PROJECT["authors"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(PROJECT["urls"])


def test_every_named_python_runs_the_commands_of_ci() -> None:
    job = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["check"]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == classified == ["3.11", "3.12", "3.13"]
    assert f">={classified[0]}" == PROJECT["requires-python"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert "$(PYTHON) -m venv" in read("Makefile")


def test_templates_of_issues_are_forms() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        values = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(values)
        ids = [field["id"] for field in values["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0
        assert all(field["attributes"]["label"] for field in values["body"] if field["type"] != "markdown")
