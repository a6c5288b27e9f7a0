"""The documentation site, built by Sphinx from the Markdown and the notebooks of this folder: `make docs`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "papers"))
import generated
import measured

gc.disable()  # doctrees stay: looking through them again and again would be a seventh of a build

project = "FairPATE"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results"]  # what the pages link to as files
html_theme = "furo"
html_title = "FairPATE"
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_show_search_summary = False  # it asks a server for the pages, and there may be none
myst_heading_anchors = 4  # the anchors that a repository host makes
autodoc_member_order = "bysource"
autodoc_type_aliases = {name: name for name in ("BoolArray", "FloatArray", "IntArray", "Labels", "Table")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
nb_execution_mode = os.environ.get("TUTORIALS", "force")  # "off" builds the pages without running the notebooks
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # progress

# What tutorials run: this environment's commands, and each an odometer in the folder that it runs in.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["FAIRPATE_STATE"] = "state"

BELOW: dict[str, Callable[[], str]] = {
    "reference/commands": generated.commands,
    "reference/configuration": generated.configuration,
    **{f"reference/{page}": partial(generated.interface, page) for page in generated.MODULES},
}


REACHED = {
    # The seconds of a bar of progress, too pale on the ground of an output.
    '<span class=" -Color -Color-Yellow">': '<span class=" -Color">',
    "<pre>": '<pre tabindex="0">',  # what scrolls sideways is reached by the keyboard too
    '<div class="table-wrapper ': '<div tabindex="0" class="table-wrapper ',
    'role="heading">': 'role="heading" aria-level="2">',
    '<dl>\n<dd><em class="sig-param">': '<dl role="presentation">\n<dd><em class="sig-param">',  # lines of a signature
}
"""What the theme leaves out for those who use a keyboard or have pages read to them."""


def setup(app: Any) -> None:
    """Pages get what is generated from the code as they are read, in every build."""
    app.connect("source-read", fill_in)
    app.connect("build-finished", make_reachable)
    app.connect("build-finished", write_live_pages)
    app.connect("env-get-outdated", lambda *_: [*BELOW, "coverage"])


def write_live_pages(app: Any, error: Exception | None) -> None:
    """Write the interactive frontier, which live-frontier.md shows in a frame."""
    if error is None and app.builder.format == "html":
        Path(app.outdir, "frontier.html").write_text(generated.live_frontier(), encoding="utf-8")


def fill_in(_: Any, page: str, source: list[str]) -> None:
    """Navigation for the index, numbers for tables of results, and what pages of reference are a reference of."""
    if page == "index":
        source[0] = generated.navigation(source[0])
    elif page == "coverage":
        source[0] = measured.filled(source[0])
    elif page in BELOW:
        source[0] += "\n" + BELOW[page]()


def make_reachable(app: Any, _: Exception | None) -> None:
    """Complete every page of a finished build; a page that is complete stays as it is."""
    for page in Path(app.outdir).rglob("*.html"):
        text = before = page.read_text(encoding="utf-8")
        for lacking, complete in REACHED.items():
            text = text.replace(lacking, complete)
        if text != before:
            page.write_text(text, encoding="utf-8")
