"""The papers' figures with what we measure, drawn from docs/results/ alone: one picture per paper in docs/img/.

    python benchmarks/papers/figures.py

Lines are means over seeds, bars one standard deviation. A paper's own points, where its text or files give numbers, are
hollow squares. A cell with a degenerate seed is crossed out. A panel without results is left empty and says so.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import measured
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "docs" / "img"
_INK, _MUTED = "#18212b", "#5b6672"
_COLOURS = ("#00224e", "#575c6d", "#a59c74", "#d9b300", "#7c1d1d", "#2f6f4f")
CROSS = "x"
Panel = Callable[[Any], None]


class Chart(Axes):
    """Axes that know which results they are drawn from."""

    def __init__(self, *places: Any, **look: Any) -> None:
        super().__init__(*places, **look)
        self.drawn_from: set[str] = set()


def main() -> None:
    """Draw all of them."""
    matplotlib.rcParams |= {
        "svg.fonttype": "none",
        "svg.hashsalt": "fairpate",
    }  # text as text; the same file every time
    for name, panels in PICTURES.items():
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4.1 * columns, 3.3 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, subplot_kw={"axes_class": Chart}).ravel()
        for axis, panel in zip(axes, panels, strict=False):
            panel(axis)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        if any(line.get_marker() == CROSS for axis in axes for line in axis.lines):
            figure.supxlabel("crossed out: a degenerate model in one seed or more", fontsize=7, color=_MUTED)
        FOLDER.mkdir(exist_ok=True)
        sources = [f"{file}.json {digest(file)}" for file in sorted(set().union(*(axis.drawn_from for axis in axes)))]
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Source": ", ".join(sources)})


def digest(file: str) -> str:
    """Of an experiment's results; a picture holds those of all that it was drawn from."""
    return hashlib.sha256((measured.FOLDER / f"{file}.json").read_bytes()).hexdigest()[:16]


def curve(axis: Any, file: str, names: Sequence[str], x: str | Sequence[float], y: str, **look: Any) -> None:
    """``y`` over ``x``, a metric of the cells or given numbers, through the cells that were run."""
    cells = measured.read(file)
    if cells:
        axis.drawn_from.add(file)
    points = []
    for index, name in enumerate(names):
        if name in cells:
            ys = _known(measured.values(cells, name, y))
            xs = _known(measured.values(cells, name, x)) if isinstance(x, str) else [x[index]]
            is_worthless = measured.is_degenerate(cells[name])
            points.append((statistics.fmean(xs), statistics.fmean(ys), _spread(ys), is_worthless))
    if points:
        at, mean, spread, _ = zip(*points, strict=True)
        axis.errorbar(at, mean, spread, marker="o", markersize=3.5, linewidth=1.2, capsize=2, **look)
    for x_crossed, y_crossed, _, is_worthless in points:
        if is_worthless:
            axis.plot(x_crossed, y_crossed, CROSS, color="#c00000", markersize=8, markeredgewidth=1.4, zorder=4)


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if value == value]


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def finish(axis: Any, title: str, x: str, y: str) -> None:
    """Titles, or that nothing was run."""
    axis.set_title(title, fontsize=9, color=_INK)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25, linewidth=0.6)
    handles, _ = axis.get_legend_handles_labels()
    if handles:
        axis.legend(fontsize=6.5, frameon=False)
    else:
        axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", color=_MUTED)


def printed(axis: Any, points: Sequence[tuple[float, float]], label: str, colour: str = _INK) -> None:
    """The paper's own points."""
    axis.plot(*zip(*points, strict=True), "s", fillstyle="none", color=colour, markersize=5, label=label)


def grid(data: str, epsilon: str, *, figure: int, weight: str = "1") -> Panel:
    """FairPATE: accuracy over disparity of every family at one budget, with IDP3 at four margins."""

    def draw(axis: Any) -> None:
        settings = {
            "fairpate": "fairpate/epsilon={},max_disparity={}",
            "pate_s_in, weight 1": "pate_s_in/epsilon={},weight=1,max_disparity={}",
            "dp_sgd": "dp_sgd/max_disparity={1},epsilon={0}",
            f"fair_dp_sgd, weight {weight}": f"fair_dp_sgd/weight={weight},max_disparity={{1}},epsilon={{0}}",
        }
        for colour, (label, name) in zip(_COLOURS, settings.items(), strict=False):
            names = [f"{data}/{name.format(epsilon, margin)}" for margin in ("0.01", "0.05", "0.1", "0.2")]
            curve(axis, data, names, "parity", "accuracy", color=colour, label=label)
        finish(axis, f"FairPATE, Figure {figure}: {data}, epsilon {epsilon}", "disparity", "accuracy of answered")

    return draw


def queries_over(file_data: str, epsilons: Sequence[str]) -> Panel:
    """FairPATE, Figures 12 and 14: answered queries over the budget, a line per margin."""

    def draw(axis: Any) -> None:
        for colour, margin in zip(_COLOURS, ("0", "0.01", "0.05", "0.1", "0.5"), strict=False):
            share = "0.5" if file_data == "utkface" else "0.6"
            names = [f"{file_data}/threshold={share},epsilon={eps},margin={margin}" for eps in epsilons]
            numbers = [float(eps) for eps in epsilons]
            curve(axis, "query_experiments", names, numbers, "answered", color=colour, label=f"margin {margin}")
        finish(axis, f"FairPATE, Figures 12, 14: {file_data}", "data-dependent epsilon", "answered queries")

    return draw


def queries_by_threshold(data: str, epsilon: str) -> Panel:
    """FairPATE, Figures 13 and 15: answered queries over the margin, a line per threshold."""

    def draw(axis: Any) -> None:
        margins = ("0", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5")
        for colour, share in zip(_COLOURS, ("0.3", "0.5", "0.7", "0.9"), strict=False):
            names = [f"{data}/threshold={share},epsilon={epsilon},margin={margin}" for margin in margins]
            look = {"color": colour, "label": f"T = {share} teachers"}
            curve(axis, "query_experiments", names, [float(margin) for margin in margins], "answered", **look)
        finish(axis, f"FairPATE, Figures 13, 15: {data}, epsilon {epsilon}", "margin", "answered queries")

    return draw


def table_1(data: str, paper: dict[str, tuple[float, float]]) -> Panel:
    """FairPATE, Table 1: accuracy over disparity of every method at its largest budget, with IDP3."""

    def draw(axis: Any) -> None:
        budget = "10" if data == "utkface" else "2.88"
        margins = ("0.01", "0.1", "0.2")
        for colour, method in zip(_COLOURS, ("fairpate", "pate_s_pre", "pate_s_in", "pate"), strict=False):
            names = [f"{data}/{method}/epsilon={budget},max_disparity={margin}" for margin in margins]
            curve(axis, f"table1_{data}", names, "parity", "accuracy", color=colour, label=method)
        for colour, method in zip(_COLOURS[4:], ("dp_sgd", "fair_dp_sgd"), strict=False):
            names = [f"{data}/{method}/max_disparity={margin},epsilon={budget}" for margin in margins]
            curve(axis, f"table1_{data}", names, "parity", "accuracy", color=colour, label=method)
        for colour, (method, point) in zip(_COLOURS, paper.items(), strict=False):
            printed(axis, [point], f"{method}, the paper", colour)
        axis.margins(x=0.1, y=0.5)
        finish(axis, f"FairPATE, Table 1: {data}, epsilon {budget}", "disparity", "accuracy of answered")

    return draw


def calibration(axis: Any) -> None:
    """FairPATE, Figures 10 and 11: what calibration on public records trades."""
    for colour, epsilon in zip(_COLOURS, ("1.5", "5", "10"), strict=False):
        names = [
            f"utkface/fairpate/epsilon={epsilon}{weight}" for weight in ("", ",weight=0.3", ",weight=1", ",weight=3")
        ]
        curve(axis, "calibration_utkface", names, "parity", "accuracy", color=colour, label=f"epsilon {epsilon}")
    for gap, style in ((0.24, "--"), (0.15, ":")):
        axis.axvline(
            gap, linestyle=style, color=_MUTED, linewidth=1, label=f"the paper {'before' if gap > 0.2 else 'after'}"
        )
    finish(axis, "FairPATE, Figures 10, 11: weights 0, .3, 1, 3", "disparity", "accuracy")


def tradeoff(notion: str, data: str, epsilon: str, paper: Sequence[tuple[float, float]] = ()) -> Panel:
    """DP-FERMI, Figures 2, 3, 4, 7, 8 and 9: accuracy over the violation of parity or of equalized odds."""
    file, rival = {
        "parity": ("fermi_parity", [f"max_multiplier={cap}" for cap in (0.2, 0.5, 1, 2, 5)]),
        "odds": ("fermi_odds", [f"dual_step={step}" for step in (0.5, 5)]),
    }[notion]

    def draw(axis: Any) -> None:
        lines = {
            "DP-FERMI (record)": ("dp_fermi", [f"weight={weight}" for weight in (0, 1, 4, 16, 64)]),
            "PF-LD (attribute)": ("pf_ld", rival),
            "DP-postprocessing (attribute)": ("dp_postprocessing", [f"max_gap={gap}" for gap in (0, 0.05, 0.1)]),
        }
        for colour, (label, (method, settings)) in zip(_COLOURS, lines.items(), strict=False):
            names = [f"{data}/{method}/{setting},epsilon={epsilon}" for setting in settings]
            curve(axis, file, names, notion, "accuracy", color=colour, label=label)
        if paper:
            printed(axis, paper, "DP-FERMI, the paper (attribute)")
        figures = "4, 9" if notion == "odds" else "2, 3, 7, 8"
        finish(axis, f"DP-FERMI, Figures {figures}: {data}, epsilon {epsilon}", f"violation of {notion}", "accuracy")

    return draw


def faces(file: str, title: str) -> Panel:
    """DP-FERMI, Figure 5: accuracy over disparity, a line per epsilon."""

    def draw(axis: Any) -> None:
        for colour, epsilon in zip(_COLOURS, ("10", "25", "50", "100", "200"), strict=False):
            names = [f"utkface/dp_fermi/weight={w},epsilon={epsilon}" for w in (0, 1, 4, 16, 64)]
            curve(axis, file, names, "parity", "accuracy", color=colour, label=f"epsilon {epsilon}")
        finish(axis, title, "disparity", "accuracy, nine ages")

    return draw


def over_epsilon(notion: str, gap: str, y: str) -> Panel:
    """PF-LD, Figure 2."""

    def draw(axis: Any) -> None:
        for colour, method in zip(_COLOURS, ("pf_ld", "randomised_response"), strict=False):
            names = [f"bank/{method}/constraint={notion},epsilon={eps}" for eps in ("0.1", "0.3", "1", "3")]
            curve(axis, "mean_parity_epsilon", names, (0.1, 0.3, 1, 3), gap, color=colour, label=method)
        axis.set_xscale("log")
        finish(axis, f"PF-LD, Figure 2: Bank, {notion.replace('_', ' ')}", "epsilon", y)

    return draw


def clipping(gap: str, y: str) -> Panel:
    """PF-LD, Figure 3."""

    def draw(axis: Any) -> None:
        norms = ("0.01", "0.03", "0.1", "0.3", "1", "3", "10")
        for colour, epsilon in zip(_COLOURS, ("0.3", "1", "3"), strict=False):
            names = [f"bank/pf_ld/clip_norm={norm},epsilon={epsilon}" for norm in norms]
            look = {"color": colour, "label": f"epsilon {epsilon}"}
            curve(axis, "mean_parity_clipping", names, [float(norm) for norm in norms], gap, **look)
        axis.set_xscale("log")
        finish(axis, "PF-LD, Figure 3: Bank, demographic parity", "C_p", y)

    return draw


def targets(data: str) -> Panel:
    """RaCO-DP, Figure 3."""

    def draw(axis: Any) -> None:
        bounds = ("0.01", "0.02", "0.05", "0.1", "0.15")
        for colour, epsilon in zip(_COLOURS, ("0.5", "3"), strict=False):
            names = [f"{data}/raco_dp/bound={bound},epsilon={epsilon}" for bound in bounds]
            look = {"color": colour, "label": f"epsilon {epsilon}"}
            curve(axis, "raco_targets", names, [float(bound) for bound in bounds], "parity", **look)
        axis.plot([0, 0.15], [0, 0.15], ":", color=_MUTED, label="as asked")
        finish(axis, f"RaCO-DP, Figure 3: {data}", "bound", "gap of hard labels, test")

    return draw


def missed(axis: Any) -> None:
    """RaCO-DP, Figure 5a."""
    for colour, epsilon in zip(_COLOURS, ("0.5", "1", "3", "100"), strict=False):
        names = [f"adult/raco_dp/bound={bound},epsilon={epsilon}" for bound in ("0.05", "0.1", "0.2", "0.3", "0.4")]
        curve(axis, "raco_fnr", names, "fnr", "accuracy", color=colour, label=f"epsilon {epsilon}")
    finish(axis, "RaCO-DP, Figure 5a: Adult", "false negative rate", "accuracy")


def clipped(axis: Any) -> None:
    """RaCO-DP, Figure 6."""
    norms = ("0.5", "1", "2", "5", "12.5", "25", "50")
    names = [f"adult/raco_dp/clip_norm={norm}" for norm in norms]
    curve(axis, "raco_clipping", names, [float(norm) for norm in norms], "fnr", color=_COLOURS[0], label="epsilon 100")
    axis.axhline(0.05, linestyle=":", color=_MUTED)
    axis.set_xscale("log")
    finish(axis, "RaCO-DP, Figure 6: bound .05, Adult", "clipping norm", "false negative rate")


def hardened(axis: Any) -> None:
    """RaCO-DP, Figure 7."""
    for colour, counts in zip(_COLOURS, ("probabilities", "labels"), strict=False):
        bounds = ("0.01", "0.05", "0.1")
        names = [f"adult/raco_dp/bound={bound},counts={counts},epsilon=3" for bound in bounds]
        look = {"color": colour, "label": f"multipliers see {counts}"}
        curve(axis, "raco_dual", names, [float(bound) for bound in bounds], "parity", **look)
    axis.plot([0, 0.1], [0, 0.1], ":", color=_MUTED, label="as asked")
    finish(axis, "RaCO-DP, Figure 7: Adult, epsilon 3", "bound", "gap of hard labels, test")


def sized(data: str, metric: str, label: str) -> Panel:
    """RaCO-DP, Remark 3: over the budget, a line per share that sizes of cells take."""

    def draw(axis: Any) -> None:
        epsilons = ("0.5", "1", "3")
        for colour, share in zip(_COLOURS, ("0", "0.1", "0.3"), strict=False):
            names = [f"{data}/raco_dp/constraint=equalized_odds,size_share={share},epsilon={eps}" for eps in epsilons]
            look = {"color": colour, "label": f"sizes take {share}"}
            curve(axis, "raco_sizes", names, [float(eps) for eps in epsilons], metric, **look)
        finish(axis, f"RaCO-DP, Remark 3, odds: {data}", "epsilon", label)

    return draw


def gammas(method: str, title: str) -> Panel:
    """Jagielski et al., Figure 1: error over the violation along the gap that is asked for."""

    def draw(axis: Any) -> None:
        for colour, epsilon in zip(_COLOURS, ("1", "3", "10", "inf"), strict=False):
            said = [f"equalized_odds/epsilon={epsilon},gap={gap}" for gap in ("0", "0.02", "0.05", "0.1", "0.2", "1")]
            names = [f"communities/{method}/{words}" for words in said]
            curve(axis, "posthoc", names, "odds", "error", color=colour, label=f"epsilon {epsilon}")
        finish(axis, title, "largest discrepancy to group 0", "error")

    return draw


EPSILONS = ("1", "2", "4", "6", "8", "10")
FAIR = {"fairpate": (0.01, 0.838), "pate_s_pre": (0.01, 0.826), "pate_s_in": (0.01, 0.814)}
FAIR_DIGITS = {"fairpate": (0.01, 0.856), "pate_s_pre": (0.01, 0.809), "pate_s_in": (0.01, 0.846)}
PICTURES: dict[str, list[Panel]] = {
    "paper-fairpate": [
        table_1("utkface", FAIR),
        table_1("color_mnist", FAIR_DIGITS),
        calibration,
        *(grid("utkface", epsilon, figure=2) for epsilon in ("2", "6", "10")),
        *(grid("fairface", epsilon, figure=4, weight="0.1") for epsilon in ("2", "4", "6")),
        queries_over("utkface", EPSILONS),
        queries_over("color_mnist", ("0.5", "1", "1.5", "2", "2.5", "3")),
        queries_by_threshold("utkface", "8"),
    ],
    "paper-dp-fermi": [
        tradeoff("parity", "adult", "0.5", [(0.05, 0.8124), (0.1, 0.8206)]),
        tradeoff("parity", "credit_default", "0.5", [(0.01, 0.8042), (0.02, 0.8099), (0.05, 0.8108)]),
        tradeoff("parity", "parkinsons_row", "0.5", [(0.02, 0.9135), (0.05, 0.9412), (0.1, 0.9527)]),
        tradeoff("odds", "adult", "0.5", [(0.01, 0.7625), (0.02, 0.7658), (0.05, 0.8179)]),
        tradeoff("odds", "credit_default", "0.5"),
        tradeoff("odds", "parkinsons_row", "0.5"),
        tradeoff("odds", "adult", "3", [(0.01, 0.7625), (0.02, 0.7658), (0.05, 0.8188)]),
        tradeoff("odds", "parkinsons_row", "3"),
        faces("fermi_faces", "DP-FERMI, Figure 5: one hidden layer on gradients"),
        faces("fermi_faces_cnn", "DP-FERMI, Figure 5: a convolutional network"),
    ],
    "paper-pf-ld": [
        over_epsilon("demographic_parity", "parity", "violation"),
        over_epsilon("equalized_odds", "odds", "violation"),
        clipping("parity", "violation"),
        over_epsilon("demographic_parity", "accuracy", "accuracy"),
        over_epsilon("equalized_odds", "accuracy", "accuracy"),
        clipping("accuracy", "accuracy"),
    ],
    "paper-raco-dp": [
        targets("adult"),
        targets("credit_default"),
        targets("parkinsons_row"),
        missed,
        clipped,
        hardened,
        sized("adult", "accuracy", "accuracy"),
        sized("adult", "odds_full", "equalized-odds gap"),
        sized("parkinsons_row", "odds_full", "equalized-odds gap"),
    ],
    "paper-jagielski": [
        gammas("oracle_as_in_paper", "Jagielski, Figure 1: oracle learner as printed"),
        gammas("oracle_once", "the same, feature sums once"),
        gammas("postprocessing", "Jagielski, Figure 1: DP-postprocessing"),
    ],
}


if __name__ == "__main__":
    main()
