"""Both pages as a browser reads them: well formed, self-contained, escaped, honest about what is missing."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from report_pages import PAGES, VOTING, Page, course, measured, operated, published, reordered

from fairpate.pages import decimal, delta_caution, percent
from fairpate.report.metrics import WithoutPrivacy, evaluate
from fairpate.report.records import PrivateReport, PublicReport
from fairpate.report.run_page import private_report, public_report
from fairpate.types import REMARKS, GateRule

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_is_one_well_formed_file_that_fetches_and_runs_nothing(kind: str) -> None:
    html = PAGES[kind]()
    page = Page(html)
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [value for name, value in page.attributes if name in ("href", "src")]
    assert links == ["data:,"]
    assert not re.search(r"url\((?!#)|@import|https?:", html)


@pytest.mark.parametrize("kind", PAGES)
def test_every_drawing_is_xml_with_a_name_and_finite_coordinates(kind: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", PAGES[kind](), flags=re.DOTALL)
    assert drawings
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)  # noqa: S314 - our own output
        assert root.get("aria-label") or root.get("aria-hidden")
        numbers = [value for element in root.iter() for value in element.attrib.values()]
        assert not any(re.search(r"\b(nan|inf)\b", value) for value in numbers)


@pytest.mark.parametrize("kind", PAGES)
def test_names_from_outside_are_escaped(kind: str) -> None:
    hostile = '<script>alert(1)</script> & "co"'
    named = measured(group_names=(hostile, "green"))
    page = Page(PAGES[kind](title=hostile, evaluations={hostile: named}))
    assert "script" not in page.tags
    assert hostile in page.words


def test_the_public_page_tells_the_run() -> None:
    words = Page(public_report(published())).words
    report = published()
    for expected in (
        "100 teachers answered 3 of 6 public queries",
        "ε\u00a0=\u00a06.13",
        "Protects one record, even its presence (add or remove one), δ\u00a0=\u00a010⁻⁵.",
        "If a person has several records, each is protected by itself.",
        percent(report.claims.measured.accuracy),
        decimal(report.claims.measured.disparity),
        "The choice of settings is not part of ε",
        "It does not bound the final gap",
        "1 refused for low consensus, 1 by the fairness gate, 1 before the vote",
    ):
        assert expected in words
    assert "not private" not in words


def test_a_run_without_votes_tells_its_training_and_no_queries() -> None:
    events = ["5 Gaussian sums over Poisson samples"]
    own = {"voting": None, "method": "dp_<sgd>", "events": events}
    words = Page(public_report(published(**own, not_protected="features"))).words
    for expected in (
        "The model was trained by dp_<sgd>, which cost ε\u00a0=\u00a06.13.",
        "From private records to a model The model, and any noisy table that it learned from, were computed from "
        "private records at the cost ε",
        "Touched private records: 5 Gaussian sums over Poisson samples. Noise: fresh, from the operating system",
        "How the model treats the groups",
        "The model, and whatever is computed from it, satisfies (ε, δ)-differential privacy with ε\u00a0=\u00a06.13",
        "Not guaranteed Not protected: features. The model may reveal them.",
    ):
        assert expected in words
    for absent in ("teacher", "quer", "released label", "vote", "γ", "student accuracy", "fairness gate"):
        assert absent not in words
    bare = Page(public_report(published(**own, epsilon=math.inf, noise="no noise: not private"))).words
    assert "This model is not private. Its noise: no noise: not private." in bare
    assert "Guaranteed Nothing: no ε is finite." in bare
    assert "seed" not in bare


def test_every_submitted_query_counts_in_the_guarantee_and_in_the_chart() -> None:
    words = Page(public_report(published())).words
    for expected in (
        "every submitted query is charged at its worst case",
        "1 refusal before the vote used no votes; the bound counts them all the same",
        "refusals before the vote included",
    ):
        assert expected in words


def test_the_order_of_predictions_is_told_when_the_student_may_refuse() -> None:
    heading = "How much the order of predictions matters"
    assert heading not in Page(public_report(published())).words
    spread = reordered()
    words = Page(public_report(published(reject_option=spread))).words
    for expected in (
        heading,
        "10 random orders of the same 80 predictions",
        "γ\u00a0=\u00a00.3 against all other groups, after 2 answers",
        "once every group has 2 answers",
        percent(spread.coverage.low),
        percent(spread.accuracy.mean),
        decimal(spread.max_gap.high),
    ):
        assert expected in words
    never_warm = Page(public_report(published(reject_option=reordered(min_count=60)))).words
    assert re.search(r"Largest gap on the way.{0,90}undefined in 10 orders undefined undefined undefined", never_warm)


def test_only_the_operators_page_shows_what_depends_on_votes() -> None:
    private = Page(private_report(operated())).words
    assert "Operator only. Do not publish." in private
    for epsilon in ("6.13", "2.35", "1.79"):
        assert epsilon in private
    public = Page(public_report(published())).words
    for secret in ("2.35", "1.79", "onsensus of the teachers", "Rényi"):
        assert secret not in public


@pytest.mark.parametrize(
    ("dependent", "as_in_paper", "rejected", "words"),
    [
        # Rounded up to hundredths: 6.13 published; 2.35 and 1.80, then 4.39 and 4.54, then 2.35 twice.
        (2.3456, 1.7912, 1, ("3.78 below the data-independent", "0.55 below the data-dependent", "1 rejection by")),
        (4.3823, 4.5350, 4, ("1.74 below the data-independent", "0.15 above the data-dependent", "4 rejections by")),
        (
            2.3456,
            2.3444,
            0,
            ("3.78 below the data-independent", "equal to the data-dependent", "gate rejected none"),
        ),
        (6.1234, 6.1234, 0, ("equal to the data-independent", "equal to the data-dependent", "rejected none")),
        (6.2, 6.1234, 0, ("0.07 above the data-independent", "0.07 below the data-dependent", "rejected none")),
        (math.inf, 6.0, 0, ("above the data-independent", "below the data-dependent", "rejected none")),
    ],
)
def test_the_ledgers_are_compared_by_their_numbers(
    dependent: float, as_in_paper: float, rejected: int, words: tuple[str, ...]
) -> None:
    page = private_report(
        operated(
            public=published(rejected_fairness=rejected, rejected_confidence=2 - rejected),
            epsilon_data_dependent_course=course([0.5] * 5 + [dependent]),
            epsilon_as_in_paper_course=course([0.5] * 5 + [as_in_paper]),
        )
    )
    for expected in words:
        assert expected in Page(page).words
    assert "Too low" not in page


@pytest.mark.parametrize(
    ("trained", "words"),
    [
        (3, "The student was trained on these labels."),
        (2, "The student was trained on 2 of these labels: the other 1 answer queries from outside the run."),
        (None, "The student was trained on an unrecorded number of released labels."),
    ],
)
def test_what_the_student_was_trained_on_stands_apart_from_what_the_ledger_released(
    trained: int | None, words: str
) -> None:
    public = published(num_training_labels=trained)
    for page in (public_report(public), private_report(operated(public=public))):
        assert "100 teachers answered 3 of 6 public queries" in Page(page).words
        assert words in Page(page).words


def test_where_no_price_depends_on_votes_there_is_one_ledger() -> None:
    """Noisy counts cost what they cost: a rejection by the gate is in the ledger, and no other stands beside it."""
    same = published().voting.epsilon_course
    alone = {"epsilon_data_dependent_course": same, "epsilon_as_in_paper_course": same}
    words = Page(private_report(operated(**alone, rdp_Q=[0.1] * 6))).words
    assert "The ledger of this run" in words
    assert "costs the same whatever the votes" in words
    assert "1 rejection by the fairness gate cost the same as an answer." in words
    for other in ("as in the paper", "Three ledgers", "Data-dependent", "leaves out"):
        assert other not in words, other
    # The same totals by votes that all cost their worst case only at times are three ledgers.
    assert "Three ledgers" in Page(private_report(operated(**alone))).words


def test_what_queries_cost_is_told_by_their_costs() -> None:
    # Costs 1e-3, 2e-4, .05, .1, 0, 0: the dearest of six is .1 of .1512. Of the worst case, .1, half cost .6 %
    # or more and one all of it. Voted on are the first five, with .95, .9, .7, .4 and 1 of the teachers; the clearest
    # three of them cost 0, 1e-3 and 2e-4.
    words = Page(private_report(operated())).words
    assert "half of the queries cost 1\u00a0% of it or more, and 1 of 6 queries all of it." in words
    assert "The dearest 1 of 6 made up 66\u00a0% of the cost." in words
    when = "2026\u201101\u201101 00:00:03"
    assert f"№ 4 green refused: too little consensus 40 : 35 100\u00a0% 66.14\u00a0% {when}" in words
    assert "On half of the queries that were voted on, 90\u00a0% of the teachers or more agree." in words
    assert "The 3 with the clearest votes made up 1\u00a0% of the cost." in words
    unanimous = operated(votes_QC=[[100, 0, 0]] * 6)
    assert "On half of the queries that were voted on, all teachers agree." in Page(private_report(unanimous)).words
    # The other way round: what is clear was dear.
    dear = {"rdp_Q": [0.1, 0.3, 0.0, 0.1, 0.4, 0.0], "rdp_worst_Q": [0.5] * 6}
    words = Page(private_report(operated(**dear))).words
    assert "and none of them all of it" in words
    assert "The 3 with the clearest votes made up 89\u00a0% of the cost." in words
    words = Page(private_report(operated(rdp_Q=[0.0] * 6, outcomes_Q=["free"] * 6))).words
    assert "No query has cost anything." in words
    assert "No query was voted on." in words


def test_sentences_about_steps_and_sizes_follow_from_the_settings() -> None:
    counts = {"rejected_fairness": 0, "refused_free": 0, "answered": 5}
    page = public_report(published(mechanism="Label noise of 15 votes", **counts))
    words = Page(page).words
    assert "Label noise of 15 votes. Fairness margin" in words
    for absent in ("rejected: charged", "before the vote used no votes", "declared"):
        assert absent not in words
    words = Page(public_report(published())).words
    assert "1 query that the fairness gate rejected: charged in full" in words
    assert "which step refused the others, is covered too" in words
    assert "is covered too" not in Page(public_report(published(remarks=(REMARKS["stopped_by_votes"],)))).words


@pytest.mark.parametrize(
    ("delta", "units", "begin", "is_cautioned"),
    [
        (1e-5, 5000, "Private", False),
        (1e-5, None, "Private", False),
        (1e-3, 5000, "Weakly private", True),
        (0.1, 5000, "Private in name only", True),
        (0.1, None, "Private in name only", True),
        (1e-3, None, "Private", True),
    ],
)
def test_the_first_screen_says_that_delta_is_large(
    delta: float, units: int | None, begin: str, is_cautioned: bool
) -> None:
    report = published(epsilon=1.0, delta=delta, declared_units=units)
    statement = report.claims
    assert statement.line.startswith((f"{begin},", f"{begin} ", f"{begin};"))
    caution = delta_caution(delta, units, "record")
    privacy, opening = statement.figures[0], public_report(report).partition("</header>")[0]
    assert privacy.word == begin
    assert (privacy.mood == "good") == (begin == "Private")
    assert bool(caution) == is_cautioned == (caution != "" and caution in privacy.details)
    assert caution in opening.replace("\u00a0", " ")
    assert (("warning", caution) in statement.rows) == is_cautioned


def test_a_public_report_refuses_the_operators_claims() -> None:
    public = published()
    baseline = WithoutPrivacy(accuracy=0.9, num_records=100)
    for changes in ({"for_operator": True}, {"without_privacy": baseline}):
        with pytest.raises(AssertionError, match="operator"):
            public_report(replace(public, claims=replace(public.claims, **changes)))


def test_a_seeded_run_is_called_not_private_and_promises_nothing() -> None:
    seeded = {"noise": "seeded: not private"}
    for html in (PAGES["public"](**seeded), PAGES["private"](**seeded)):
        assert "Reproducible run: not private." in html
    words = Page(public_report(published(**seeded))).words
    assert "With fresh noise the labels would satisfy" in words
    assert "computed from them, satisfy" not in words
    assert "Not private: not to be published" in words
    assert "May be published" not in words


def test_what_qualifies_the_promise_stands_with_it() -> None:
    assert "Not guaranteed Held <loosely>." in Page(public_report(published(remarks=("Held <loosely>.",)))).words


def constant_report() -> PublicReport:
    labels = [0] * 50 + [1] * 30
    everybody = evaluate(
        [0] * 80,
        labels_N=labels,
        groups_N=[0, 1] * 40,
        class_names=["<zero>", "one", "two"],
        group_names=["red", "green"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )
    return published(evaluations={"student": everybody})


def test_a_student_that_predicts_one_class_is_named_before_its_gap() -> None:
    report = constant_report()
    for html in (public_report(report), private_report(operated(public=report))):
        words = Page(html).words
        line = "Weakly private, but degenerate: on the test records it predicts '<zero>' for every record."
        assert 0 <= words.index(line) < words.index("Demographic-parity gap")
        assert "On 80 answered test records. Always “<zero>”, the most common class: 62.5\u00a0%." in words
    assert "1 of 3 classes are predicted for some record." in Page(public_report(report)).words
    for html in (public_report(published()), private_report(operated())):
        assert "the most common class: " in Page(html).words.lower()
    useful = evaluate(
        [0, 1, 2] * 20,
        labels_N=[0, 1, 2] * 20,
        groups_N=[0] * 30 + [1] * 30,
        class_names=["zero", "one", "two"],
        group_names=["red", "green"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )
    words = Page(public_report(published(evaluations={"student": useful}))).words
    assert "egenerate" not in words
    assert "Always “zero”, the most common class: 33.3\u00a0%" in words
    assert "3 of 3 classes are predicted for some record." in words


def test_undefined_numbers_are_called_undefined() -> None:
    nobody = measured(answered=[False] * 80)
    words = Page(PAGES["public"](evaluations={"student": nobody}, answered_GC=[[0, 0, 0], [0, 0, 0]])).words
    assert words.count("undefined") > 5
    assert not re.search(r"\b(nan|None|inf)\b", words)


def test_nothing_asked_and_no_noise_still_make_a_page() -> None:
    none = replace(VOTING, submitted=0, answered=0, epsilon_course=[])
    public = published(voting=none, epsilon=0.0)
    empty = {name: [] for name in operated().__dict__ if name.endswith(("_Q", "_QC", "_course"))}
    assert "undisclosed" in Page(public_report(public)).words
    Page(private_report(PrivateReport(operators=public, rdp_order=8.0, **empty)))
    words = Page(PAGES["public"](epsilon=math.inf, epsilon_course=course([math.inf] * 6))).words
    assert "ε\u00a0=\u00a0∞" in words
    assert "This student is not private." in words
    ungated = Page(PAGES["public"](gate=GateRule(max_disparity=math.inf, min_count=0))).words
    assert "No fairness gate." in ungated
    assert "No fairness margin was set" in ungated
    assert "γ" not in ungated
