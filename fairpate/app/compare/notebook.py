"""What a comparison shows of itself in a notebook: its sentences and one picture, of what may be published.

Never its page, whose drawing library alone is megabytes: the size is that of one picture, some hundred kilobytes.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairpate.app.notebook import from_here, notebook_html
from fairpate.evaluation.frontier import Point, by_panel
from fairpate.evaluation.frontier_charts import class_label
from fairpate.evaluation.frontier_figures import slices_picture
from fairpate.evaluation.frontier_page import FrontierReport
from fairpate.evaluation.frontier_words import findings
from fairpate.evaluation.page import counted, epsilon_text

if TYPE_CHECKING:
    from fairpate.app.compare.run import Comparison

_MOST_POINTS = 1000  # a picture of more takes seconds, each time that it is shown
_MOST_PANELS = 12


def comparison_html(comparison: Comparison) -> str:
    """A comparison in a notebook: its page's sentences about what may be published, and the slices of one data set."""
    folder = comparison.folder
    report = FrontierReport(
        title=folder.root.name,
        rows=comparison.rows,
        publish_unprotected=folder.publish_unprotected,
        notion=comparison.notion,
    )
    points = report.points()
    panels = by_panel(points)
    seeded = ["Noise from a seed: not private."] if any(point.is_seeded for point in points) else []
    told = [*seeded, *(sentence for found in list(panels.values())[:_MOST_PANELS] for sentence in _panel_words(found))]
    if len(panels) > _MOST_PANELS:
        told.append(f"{counted(len(panels) - _MOST_PANELS, 'more data set')} on the page.")
    shown = next((found for found in panels.values() if len(found) <= _MOST_POINTS), [])
    picture = slices_picture(shown) if shown else b""
    done = sum(row.record is not None for row in comparison.rows)
    return notebook_html(
        title=f"{report.title}: {counted(len(points), 'configuration')}, {counted(done, 'run')}",
        sentences=told,
        picture=base64.b64encode(picture).decode("ascii"),
        alt=f"Slices of {shown[0].panel.data}" if shown else "",
        commands=[
            ("Page", from_here(folder.report)),
            ("For a paper", f"fairpate figures {shlex.quote(from_here(folder.root))}"),
        ],
    )


def _panel_words(points: Sequence[Point]) -> list[str]:
    panel = points[0].panel
    found = findings(points)
    of = f"{panel.data}, {class_label(panel.privacy)}"
    if not found.budgets:
        return [f"{of}: no configuration with a finite ε can be compared."]
    first = found.budgets[0]
    aside = f" Not in these sentences: {'; '.join(found.left_out)}." if found.left_out else ""
    return [f"{of}, ε up to {epsilon_text(first.epsilon)}: {' '.join(first.sentences)}{aside}"]
