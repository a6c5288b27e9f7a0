"""Run `fairpate demo` once, and write what README and the documentation show of it.

    python benchmarks/papers/demo.py [--out runs/demo] [--page runs/page/report.html]

Writes docs/results/demo.json (the numbers and sentences of this run), the sentences in README.md, the table in
docs/quick-start.md, and two first screens drawn by Chromium: docs/img/demo-report.png, the report of the model that the
demo publishes, and with --page docs/img/report.png, the page of `fairpate compare configs/published/page.yaml`, on
which a reader chooses.
The demo's noise is fresh, so that another run has other numbers. ``tests/deploy/test_quoted_results.py``
holds that both documents show the stored ones, and ``tests/test_wheel.py`` that a fresh demo is near them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import measured
from PIL import Image

ROOT = Path(__file__).parents[2]
README, QUICK_START = ROOT / "README.md", ROOT / "docs" / "quick-start.md"
IMAGES = ROOT / "docs" / "img"
_SIZE = (1200, 860)  # of the picture, in pixels


def main() -> None:
    """Run the demo, or read the results of an earlier one, and write what the documents show of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of an earlier demo; default: a new one, which is not kept")
    parser.add_argument("--page", type=Path, help="page of a comparison to draw as docs/img/report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # An odometer of its own, so that the operator's other releases are not counted.
        environment = os.environ | {"FAIRPATE_STATE": f"{folder}/state", "COLUMNS": "80"}
        out = (options.out or Path(folder) / "demo").absolute()
        command = [str(Path(sys.executable).with_name("fairpate")), "demo", "--out", str(out)]
        # The second command reads the results of the first.
        as_json, as_text = (
            subprocess.run(each, env=environment, capture_output=True, text=True, check=True).stdout  # noqa: S603 - ours
            for each in ([*command, "--json"], command)
        )
        found = json.loads(as_json)
        names = {"rows": [*found["models"]], "sentences": found["sentences"]}
        measured.write("demo", command="fairpate demo", cells=cells_of(found), **names)
        replace(
            README, r"> The model to publish is\s.*?\n\n", textwrap.indent(wrapped(found["sentences"]), "> ") + "\n"
        )
        replace(QUICK_START, r"```text\n.*?```", f"```text\n{table_of(as_text)}\n```")
        draw(Path(found["files"]["this model"]), IMAGES / "demo-report.png")
        if options.page is not None:
            draw(options.page, IMAGES / "report.png")


def cells_of(found: dict[str, Any]) -> measured.Cells:
    """The rows of the demo's table as cells of one seed, by their names there."""
    return {name: {"seeds": [0]} | {of: [value] for of, value in row.items()} for name, row in found["models"].items()}


def replace(path: Path, old: str, new: str) -> None:
    """Write ``new`` in the place of the text of ``path`` that the pattern ``old`` matches first."""
    before, after = re.split(old, path.read_text(encoding="utf-8"), maxsplit=1, flags=re.DOTALL)
    path.write_text(before + new + after, encoding="utf-8")


def wrapped(sentences: list[str]) -> str:
    """The sentences as one paragraph of the documents' width."""
    return textwrap.fill(" ".join(sentences).replace("\u00a0", " "), 138, break_on_hyphens=False) + "\n"


def table_of(printed: str) -> str:
    """The table, the first lines of what the demo printed."""
    lines = itertools.dropwhile(lambda line: not line, (line.rstrip() for line in printed.splitlines()))
    return "\n".join(itertools.takewhile(bool, lines))


def draw(page: Path, picture: Path) -> None:
    """Write the first screen of the HTML file ``page``, once its scripts have run, as a ``picture``."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options = [f"--window-size={_SIZE[0]},{_SIZE[1]}", f"--screenshot={picture}", "--hide-scrollbars", "--no-sandbox"]
    options += ["--headless", "--disable-gpu", "--virtual-time-budget=8000"]
    subprocess.run([chromium, *options, page.resolve().as_uri()], check=True, capture_output=True)  # noqa: S603 - ours
    Image.open(picture).convert("RGB").save(picture, optimize=True)


if __name__ == "__main__":
    main()
