"""The frontier's page without a browser: self-contained, escaped, honest; and the same as pictures."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from run_records import run_record

from fairpate.fairness.rates import DEFAULT
from fairpate.pages import delta_caution
from fairpate.report.figures import on_frontier, script_data
from fairpate.report.frontier import Row, points_of
from fairpate.report.frontier_page import FrontierReport, frontier_report, judged_words
from fairpate.report.paper_figures import frontier_figures
from fairpate.types import REMARKS, FairRule

VOID = {"meta", "link", "input", "br", "wbr"}


class Nesting(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.open, self.words, self.addresses = [], "", []
        self.feed(html)
        assert not self.open
        self.words = " ".join(self.words.replace("\u00a0", "~").split()).replace("~", "\u00a0")

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in {"src", "href"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.words += data


def written(rows, **options):
    return frontier_report(FrontierReport(title="Two <data> sets", rows=rows, **options))


@pytest.fixture(scope="module")
def public(comparison):
    return written(comparison(operator=True))


def model_of(html):
    return json.loads(re.search(r'<script type="application/json" id="model">(.*?)</script>', html, re.DOTALL).group(1))


def drawn(charts):
    """The indices of the points that a plane draws."""
    table = charts["data"]["points"]
    return [row[table["names"].index("i")] for row in table["rows"]]


def test_the_page_is_one_well_formed_file_that_may_fetch_nothing(public):
    page = Nesting(public)
    assert all(address.startswith("data:") for address in page.addresses)
    policy = re.search('Content-Security-Policy" content="([^"]*)"', public).group(1)
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "unsafe-eval" not in policy
    assert "Two <data> sets" in page.words


def test_each_privacy_class_has_a_section_that_names_it(public):
    words = Nesting(public).words.replace("\u00a0", " ")
    assert "Guarantee per record, add or remove one, δ = 10⁻⁵" in words
    assert "Guarantee per sensitive attribute, replace one, δ = 10⁻⁵" in words
    model = model_of(public)
    for panel in model["panels"]:
        points = [model["points"][index] for index in drawn(panel["charts"][0])]
        assert {(model["sentences"][point["privacy"]], point["data"]) for point in points} == {
            (panel["privacy"], panel["data"])
        }


def test_a_page_to_publish_holds_nothing_that_depends_on_votes(public, comparison):
    assert "Do not publish" not in public
    assert "†" not in Nesting(public).words
    assert "Left out: 2 rows whose ε depends on private votes" in Nesting(public).words
    assert not any("†" in series["name"] for series in model_of(public)["series"])
    operators = written(comparison(operator=True), for_operator=True)
    assert "Do not publish" in Nesting(operators).words
    assert "fairpate †" in Nesting(operators).words
    marked = [look for look in model_of(operators)["series"] if "†" in look["name"]]
    assert [look["hollow"] for look in marked] == [True]


def test_results_without_privacy_are_the_operators_unless_the_data_are_public(comparison):
    rows = [
        replace(row, method="sgd", record=replace(row.record, method="sgd", epsilon=math.inf))
        if row.record is not None and row.method == "dp_sgd"
        else row
        for row in comparison()
    ]
    public = written(rows)
    words = Nesting(public).words
    assert "Left out: 12 rows without privacy, which the operator’s page shows: sgd." in words
    assert "Do not publish" not in words
    assert "sgd" not in [series["name"] for series in model_of(public)["series"]]
    operators = Nesting(written(rows, for_operator=True)).words
    assert "Do not publish" in operators
    assert "may reveal private records: sgd." in operators
    benchmark = written(rows, publish_unprotected=True)
    assert "sgd" in [series["name"] for series in model_of(benchmark)["series"]]
    assert "<li>Left out" not in benchmark
    assert "Do not publish" not in written(rows, publish_unprotected=True, for_operator=True)


def test_every_point_carries_its_configuration_and_commands(public):
    model = model_of(public)
    point = next(p for p in model["points"] if model["series"][p["series"]]["name"] == "fairpate")
    assert point["commands"][0].startswith("fairpate run --method fairpate")
    assert len(point["commands"]) == len(point["seeds"]) == 2
    assert set(point["settings"]) == {"target.epsilon", "aggregator.gate.max_disparity", "data.name"}
    assert model["series"][point["series"]]["shared"]["method"] == "fairpate"
    buttons = {int(number) for number in re.findall('data-point="([0-9]+)"', public)}
    assert buttons == set(range(len(model["points"])))


def test_failed_runs_are_listed_with_their_command_and_for_the_operator_with_their_cause(public, comparison):
    words = Nesting(public).words
    assert "1 run without a result" in words
    assert "fairpate run --method dp_fermi --epsilon 0.1" in words
    assert "no <noise> fits" not in words
    assert "no <noise> fits" in Nesting(written(comparison(), for_operator=True)).words


def test_seeded_noise_is_said(comparison):
    rows = comparison()
    seeded = [replace(row, config=row.config | {"noise": "seeded"}) if row.record is not None else row for row in rows]
    assert "Reproducible runs: not private" in written(seeded)
    assert "Reproducible runs: not private" not in written(rows)


@pytest.mark.parametrize("leaks", [False, True])
def test_a_price_of_a_stop_that_depends_on_votes_is_remarked(leaks, comparison):
    record = comparison()[0].record
    told = replace(record, config=record.config | {"aggregator": {"budget": {"accept_leak": leaks}}})
    (point,) = script_data(points_of([told]), notions=[DEFAULT])["points"]
    assert point["remarks"] == [REMARKS["stopped_by_votes"]] * leaks


@pytest.mark.parametrize("noise", ["seeded", "os_entropy"])
def test_pictures_say_that_noise_came_from_a_seed(noise, comparison, monkeypatch):
    rows = [row for row in comparison() if (row.data, row.method) == ("adult", "fairpate")]
    records = [replace(row.record, config=row.config | {"noise": noise}) for row in rows]
    captions = []
    monkeypatch.setattr(
        "fairpate.report.paper_figures._pictures", lambda _, chart, *__: captions.append(" ".join(chart["title"])) or {}
    )
    frontier_figures(points_of(records))
    assert len(captions) == 2
    assert all(("noise from a seed: not private" in caption) == (noise == "seeded") for caption in captions)


def test_a_comparison_without_a_finished_run_is_a_page_too():
    failed = Row(
        digest="x", method="pate", data="adult", seed=0, config={}, command="c", minutes=math.nan, error="broken"
    )
    assert "pate adult, seed 0 failed" in Nesting(written([failed])).words


def test_the_reader_chooses_the_notion_and_what_lacks_it_is_said(public, comparison):
    model = model_of(public)
    assert [notion["measure"] for notion in model["notions"]] == ["demographic-parity gap", "equalized-odds gap"]
    parity, odds = model["notions"]
    for index, point in enumerate(model["points"]):
        assert [point["values"][1], point["words"][1], point["front"], point["undefined"]] == parity["points"][index]
        is_fermi = model["series"][point["series"]]["name"] == "dp_fermi"
        assert (odds["points"][index][0] is None, odds["points"][index][1]) == (
            is_fermi,
            "undefined" if is_fermi else odds["points"][index][1],
        )
    assert "Left out, because a value is undefined: 6 configurations." in Nesting(public).words

    # Of fairpate and dp_sgd every panel shows every configuration by odds too, of dp_fermi none.
    assert [len(drawn(panel["charts"][0])) for panel in model["panels"]] == [9, 9, 6, 6]
    assert [len(drawn(panel["charts"][1])) for panel in model["panels"]] == [9, 9, 0, 0]
    opened = model_of(written(comparison(), notion="equalized_odds"))
    assert opened["titles"][1] == opened["notions"][0]["measure"] == "equalized-odds gap"


def test_the_frontier_counts_no_degenerate_configuration(comparison):
    """A constant predictor with no gap at the least epsilon: nothing beats it, and it says nothing."""
    rows = [row for row in comparison() if (row.data, row.method) == ("adult", "dp_sgd")]
    constant = {"accuracy": 0.5, "disparity": 0.0, "epsilon": 0.01, "degenerate": ("predicts 'no' for every record",)}
    beside = [replace(row, record=replace(row.record, **constant)) for row in rows[:2]]
    sound = [replace(row, record=replace(row.record, accuracy=0.6, disparity=0.1)) for row in rows[2:4]]
    page = written([*beside, *sound])
    assert "2 1 of them on a frontier by demographic-parity gap" in Nesting(page).words
    assert [point["front"] for point in model_of(page)["points"]] == [False, True]
    assert "Degenerate: predicts 'no' for every record" in Nesting(page).words


def test_details_list_only_what_the_run_read(comparison):
    student = {"model": {"name": "logistic"}, "fit": {"epochs": 9}, "method": "supervised"}
    config = {
        "method": "pate",
        "augment": {"scale_fraction": 0.0, "channel_swap": 0.5},
        "data": {"name": "adult", "options": {}},
        "student": student,
        "training": {"optimizer": "adam"},
        "idp3": None,
    }
    (series,) = script_data(points_of([replace(comparison()[0].record, config=config)]), notions=[DEFAULT])["series"]
    assert series["shared"] == {
        "method": "pate",
        "data.name": "adult",
        "student.model.name": "logistic",
        "student.fit.epochs": "9",
        "training.optimizer": "adam",
        "augment.channel_swap": "0.5",
        "student.method": "supervised",
    }


def test_what_is_degenerate_is_named_with_its_point_and_crossed_out(comparison):
    words = "predicts 'no' for every record"
    rows = comparison()
    told = [replace(row, record=replace(row.record, degenerate=(words,))) for row in rows if row.method == "dp_sgd"]
    page = written([*told, *(row for row in rows if row.method != "dp_sgd")])
    sentence = f"Degenerate: {words}, in 2 of 2 runs."
    for point in model_of(page)["points"]:
        is_named = model_of(page)["series"][point["series"]]["name"] == "dp_sgd"
        assert point["degenerate"] == ([sentence] if is_named else [])
        assert not (is_named and point["front"])
    assert "degenerate ones, which are crossed out" in Nesting(page).words
    assert "crossed out" not in Nesting(written(rows)).words


def test_groups_that_a_constant_would_serve_better_are_named_with_the_point_and_beside_the_sentences(comparison):
    rows = [row for row in comparison() if row.data == "adult" and row.method != "dp_fermi"]
    of_one = [
        replace(row, record=replace(row.record, underserved_groups=("<men>",))) if row.method == "dp_sgd" else row
        for row in rows
    ]
    page = written(of_one)
    sentence = "Served worse than by a constant: <men> (in 2 of 2 runs)."
    for point in model_of(page)["points"]:
        is_named = model_of(page)["series"][point["series"]]["name"] == "dp_sgd"
        assert point["cautions"] == point["remarks"] == ([sentence] if is_named else [])
        assert not point["degenerate"]
    assert "3 configurations of dp_sgd with a group that is served worse than by a constant" in Nesting(page).words
    assert sentence in Nesting(page).words
    assert "worse than by a constant" not in Nesting(written(rows)).words


def test_undefined_and_infinite_values_are_said_and_not_drawn(comparison):
    rows = comparison()
    records = [row.record for row in rows if row.record is not None and row.method == "dp_sgd"]
    records = [records[0], replace(records[1], accuracy=None), replace(records[2], epsilon=math.inf), *records[3:]]
    model = script_data(points_of(records), notions=[DEFAULT])
    undefined = [index for index, point in enumerate(model["points"]) if point["undefined"]]
    assert len(undefined) == 1
    (charts,) = model["panels"][0]["charts"]
    assert undefined[0] not in drawn(charts)
    assert model["points"][undefined[0]]["words"][2].startswith("undefined")
    assert (
        '"\\u221e"]' in model["specifications"][charts["planes"][0]]["layer"][-1]["encoding"]["x"]["axis"]["labelExpr"]
    )


def test_a_price_that_depends_on_votes_strikes_no_published_point(comparison):
    points = FrontierReport(title="", rows=comparison(operator=True), for_operator=True).points()
    own = [point for point in points if point.series == "fairpate" and point.panel.data == "adult"]
    without = FrontierReport(title="", rows=comparison()).points()
    alone = {str(p.settings) for p in without if p in on_frontier(without) and p.method == "fairpate"}
    assert {str(p.settings) for p in own if p in on_frontier(points)} == {text for text in alone if "adult" in text}


@pytest.mark.slow
def test_the_same_charts_as_pictures(comparison):
    rows = [row for row in comparison(operator=True) if (row.data, row.method) == ("adult", "fairpate")]
    points = FrontierReport(title="", rows=rows, for_operator=True).points()
    names = {panel: replace(panel, data=r"$\frac{ & <b>") for panel in {point.panel for point in points}}
    files = frontier_figures([replace(point, panel=names[point.panel]) for point in points])
    assert {name.split("-")[0] for name in files} == {"slices", "attainment"}
    assert len(files) == 2 * 2
    for name, content in files.items():
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"%PDF"), name


def judged(*intervals, gap=0.076, fair_from=0.01, **more):
    """What the page says of a configuration whose seeds have these intervals of their demographic-parity gap."""
    fairness = [{"value": gap, "low": low, "high": high, "fair_from": fair_from} for low, high in intervals]
    runs = [
        run_record(seed=seed, disparity=gap, fairness={DEFAULT: each}, **more) for seed, each in enumerate(fairness)
    ]
    (point,) = points_of(runs)
    return judged_words(point, FairRule()).replace("\u00a0", " ")


def test_the_page_judges_a_configuration_by_the_rule_of_a_report():
    """The whole interval of every seed, enough records, and every group: a gap below the limit is not enough."""
    gap, ends = "by its demographic-parity gap of 0.076", "whose 95 % interval (0.050 to"
    assert judged((0.05, 0.1)) == f"It is fair {gap}, {ends} 0.100) is at most 0.1."
    assert judged((0.05, 0.101)) == f"It is perhaps fair {gap}, {ends} 0.101) goes beyond 0.1."
    for few in (0.11, None):
        assert judged((0.05, 0.1), fair_from=few) == (
            f"It is perhaps fair {gap}, {ends} 0.100) is of too few records to decide."
        )
    assert judged((0.11, 0.3)) == f"It is not fair {gap}, whose 95 % interval (0.110 to 0.300) is above 0.1."
    assert judged((None, None)) == f"It is of unknown fairness {gap}, which has no 95 % interval."
    rule = "Fair means that the whole 95 % interval is at most 0.1."
    assert judged((0.05, 0.1), (0.05, 0.09)).startswith("It is fair by its ")
    assert judged((0.05, 0.1), (0.05, 0.09)).endswith(f" in each of 2 runs. {rule}")
    for other, verdict in (((0.05, 0.2), "perhaps fair"), ((0.2, 0.3), "not fair")):
        mixed = judged((0.05, 0.1), other)
        assert mixed.startswith("It is perhaps fair by its ")
        assert mixed.endswith(f": of 2 runs it is fair in 1 and {verdict} in 1. {rule}")
    assert judged((0.05, 0.1), unmeasured_groups=("X",)) == (
        f"It is fair where it is measured, but not known for X, {gap}, {ends} 0.100) is at most 0.1."
    )
    assert judged((0.05, 0.1), degenerate=("predicts 'no' for every record",)).endswith("it is degenerate.")
    # What a gate holds at its margin: resampling moves it upwards only.
    held = judged((0.076, 0.08), coverage=0.9)
    assert held == f"It is fair in its answers {gap}, whose 95 % interval (up to 0.080) is at most 0.1."


def test_no_script_judges_fairness_again():
    """The sentence on the page is the one that was computed with the rule of reports."""
    fairness = {DEFAULT: {"value": 0.076, "low": 0.05, "high": 0.11, "fair_from": 0.01}}
    record = run_record(disparity=0.076, fairness=fairness)
    row = Row(
        digest="a", method="pate", data="adult", seed=0, config={}, command="fairpate run", minutes=1.0, record=record
    )
    page = written([row])
    (sentence,) = model_of(page)["judged"]
    assert ", whose 95\u00a0% interval (0.050 to 0.110) goes beyond 0.1." in sentence and "perhaps fair" in sentence
    assert ".fair.limit ?" not in page
    assert "with 95 % confidence in every run" in page


def test_a_delta_that_is_not_below_one_in_the_public_number_of_records_is_cautioned_against_on_the_page():
    """1/4,000 = .00025: at .003 a mechanism may publish 12 of 4,000 records, whatever its epsilon."""

    def page(delta, units):
        record = run_record(delta=delta, declared_units=units, disparity=0.05)
        row = Row(digest="a", method="pate", data="adult", seed=0, config={}, command="", minutes=1.0, record=record)
        return " ".join(Nesting(written([row])).words.split())

    for delta in (0.003, 0.00025):
        assert delta_caution(delta, 4000, "record") in page(delta, 4000)
    assert "far below one in the number" not in page(0.0002, 4000)
    # Without a public number, from 1e-4 on, with the number for which it would do.
    assert delta_caution(0.001, None, "record") in page(0.001, None)
    assert "far below one" not in page(1e-5, None)
