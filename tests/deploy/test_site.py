"""The documentation site: what it takes from the code is complete, it builds without a warning, and asks no network."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import browser
import pytest
from command_lines import _tree as command_tree

ROOT = Path(__file__).parents[2]
sys.path.extend([str(ROOT / "docs"), str(ROOT / "benchmarks" / "papers"), str(ROOT / "tests")])

import generated  # noqa: E402
import ten_minutes  # noqa: E402

import fairpate  # noqa: E402
from fairpate.cli.summaries import as_yaml, fields_of  # noqa: E402
from fairpate.methods.base import all_methods, config_digest  # noqa: E402
from fairpate.methods.defaults import resolved  # noqa: E402
from fairpate.run.sweep import cells_of, load_sweep  # noqa: E402

pytestmark = pytest.mark.usefixtures("light_runs")

PAGES = [path for path in sorted((ROOT / "docs").rglob("*")) if path.suffix in (".md", ".ipynb")]


def test_the_index_lists_every_page_below_one_heading():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))\)", index)
    assert sorted(listed) == [str(path.relative_to(ROOT / "docs")) for path in PAGES if path.name != "index.md"]
    found = generated.navigation(index)
    for page in listed:
        assert f"\n{page.rpartition('.')[0]}\n" in found


configuration = cache(generated.configuration)


def test_every_field_of_every_method_is_in_the_reference():
    text = configuration()
    for method in all_methods().values():
        for each in fields_of(method()):
            assert f"| `{each['field']}` |" in text or each["field"] == "method", each
            assert as_yaml(each.get("default", "")) in text
            assert " ".join(each["meaning"].split()).replace("``", "`").replace("|", "&#124;") in text
    for inside in ("student.idp3.max_disparity", "data.embedding.mirrored", "public_data.pretrain"):
        assert f"| `{inside}` |" in text  # sections that are null by default


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("| `seed` | whole number at least 0<br>default `0` |", "never of noise"),
        ("| `data.unit` | `record` or null<br>default `null` |", "all records of a person together"),
        ("| `student.label_smoothing` | number at least 0 and below 1<br>default `0.0` |", ""),
        ("| `teachers.num_teachers` | whole number at least 2<br>default `100` |", "*Read by pate, fairpate, "),
        (
            "| `noise` | `os_entropy`, `seeded`<br>default `os_entropy` |",
            "*Read by all but sgd, f_ld, covariance_constraint.*",
        ),
    ],
)
def test_a_row_says_values_default_meaning_and_readers(start, words):
    rows = [row for row in configuration().splitlines() if row.startswith(start)]
    assert len(rows) == 1
    assert words in rows[0]


def test_every_command_is_in_the_reference():
    text = generated.commands()
    for path in paths(command_tree()["fairpate"], "fairpate"):
        assert f"`{path}`\n" in text, path
    assert "`--set <list[str]>`: Set a field, as in section.field=value" in text


def paths(command, path):
    inner = getattr(command, "commands", {})
    return [longer for name in inner for longer in paths(inner[name], f"{path} {name}")] or [path]


def test_every_public_name_is_in_the_reference():
    text = generated.interface("python")
    for name in fairpate.__all__:
        assert f":: fairpate.{name}\n" in text or name == "__version__"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, tutorials run."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-d", folder / "doctrees", ROOT / "docs", folder / "site"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *options], capture_output=True, text=True, check=False)  # noqa: S603
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three notebooks that train, serve and sweep
def test_the_live_frontier_holds_every_recorded_configuration_and_fetches_nothing(site, monkeypatch):
    cells = json.loads((ROOT / "docs" / "results" / "utkface.json").read_text(encoding="utf-8"))["cells"]
    page = (site / "frontier.html").read_text(encoding="utf-8")
    (text,) = re.findall(r'<script type="application/json" id="model">(.*?)</script>', page, re.DOTALL)
    points = json.loads(text)["points"]
    assert len(points) == len(cells)
    accuracies = sorted(round(sum(each["accuracy"]) / len(each["accuracy"]), 4) for each in cells.values())
    assert sorted(round(point["values"][2], 4) for point in points) == pytest.approx(accuracies, abs=2e-4)
    assert all(point["commands"] for point in points)
    paper, found = ROOT / "configs" / "paper", set()
    monkeypatch.setattr("fairpate.data.dataset.DatasetEntry.located", lambda *_: ())
    cells = cells_of(load_sweep(paper / "utkface.yaml"), folder=paper)
    for point in points[::25]:  # the command below a configuration gives exactly that one
        _, _, _, method, _, data, *words = shlex.split(point["commands"][0])
        run = resolved([f"data.name={data}", *words[1::2]], method)
        found.add(config_digest(run.model_copy(update={"noise": "seeded"} if run.is_private else {})))
        assert "noise=seeded" not in words
    assert len(found) == len(points[::25])
    assert found <= {cell.digest for cell in cells}
    assert "default-src 'none'" in page
    assert len(page) < 1.3e6


@pytest.mark.slow
def test_every_link_inside_leads_somewhere(site):
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    ids = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for address in re.findall(r'<a\b[^>]*\bhref="([^"]+)"', re.sub(r'srcdoc="[^"]*"', "", text)):
            if re.match(r"\w+:", address):
                continue
            path, _, anchor = unescape(unquote(address)).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, address)
            assert not anchor or target.suffix != ".html" or anchor in ids[target], (page, address)


class Page(browser.Browser):
    is_drawn = "document.readyState === 'complete'"


WIDTH = "document.documentElement.scrollWidth"


# Pages of one kind are made alike: of the reference's modules, of tutorials, of results and of other text. Of each a
# small one. The frontier's own page is looked through in tests/report/test_frontier_browser.py.
OF_EACH_KIND = (
    *("index", "search", "genindex", "live-frontier", "quick-start", "concepts", "results-speed"),
    *("learning", "commands", "configuration", "own-table"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["barriers of each kind", "all barriers"]
)
def test_it_reads_from_files_and_asks_no_other_host(site, tmp_path, monkeypatch, every):
    monkeypatch.setattr(browser, "Browser", Page)
    with browser.opened_tab(tmp_path / "profile") as tab:
        for page in sorted(site.rglob("*.html")):
            is_looked_through = browser.AXE is not None and (every or page.stem in OF_EACH_KIND)
            tab.open(page.as_uri(), width=1280, height=900)
            assert not is_looked_through or browser.barriers(tab) == [], page
            assert tab.run(WIDTH) <= 1280, page
            tab.resize(width=390, height=900)
            assert tab.run(WIDTH) <= 390, page
            # Where it is narrow, what scrolls sideways is more; all else is the same for every page.
            rules = () if page.name == "index.html" else ("scrollable-region-focusable",)
            assert not is_looked_through or browser.barriers(tab, rules=rules) == [], page
            assert browser.faults(tab) == [], page
            others = [address for address in tab.requests if not address.startswith(("file:", "data:", "about:"))]
            assert others == [], page
        tab.open(f"{(site / 'search.html').as_uri()}?q=epsilon", width=1280, height=900)
        assert tab.until("document.querySelectorAll('#search-results li').length > 5")


@pytest.mark.slow
def test_pictures_are_those_of_the_code(tmp_path):
    import pictures  # with matplotlib, which no other test here needs

    pictures.main(tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == 8
    for name, text in drawn.items():
        kept = (ROOT / "docs" / "img" / name).read_text(encoding="utf-8")
        assert words_of(text) == words_of(kept), "draw them anew: python docs/pictures.py"


def words_of(picture):
    return re.findall(r"<text[^>]*>([^<]*)<", picture)


def test_notebooks_keep_no_outputs():
    for path in PAGES:
        if path.suffix == ".ipynb":
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path


def test_the_list_of_ten_minutes_is_that_of_its_script():
    text = (ROOT / "docs" / "ten-minutes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \| `(.*)` \| ([\d.]+) s \| (?:([\d.]+) s)? ?\|$", text, re.MULTILINE)
    assert [row[:2] for row in rows] == list(ten_minutes.STEPS)
    steps = [ten_minutes.Timed(waited=float(row[2]), worked=float(row[3] or 0), load=1) for row in rows]
    together, worked = map(int, re.search(r"^Together (\d+) s, on .*; (\d+) s of them", text, re.MULTILINE).groups())
    assert sum(step.waited for step in steps) == pytest.approx(together, abs=len(rows))
    assert sum(step.worked for step in steps) == pytest.approx(worked, abs=len(rows))
    assert "\n".join(ten_minutes.table(steps).splitlines()[:-1]) in text
