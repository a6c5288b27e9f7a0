"""What a page says first follows from the numbers of the run: private or seeded, fair or not, good or useless."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import report_pages

from fairpate.config import fair_rule
from fairpate.fairness.rates import NOTIONS
from fairpate.pages import made_words
from fairpate.report.decision import Choice
from fairpate.report.metrics import Evaluation, GroupResult, WithoutPrivacy, evaluate
from fairpate.report.records import RunStatement, fair_words
from fairpate.types import FOUR_FIFTHS, FairRule

pytestmark = pytest.mark.usefixtures("few_replicates", "remembered_digits")

NB = "\u00a0"
GUARANTEE = replace(report_pages.GUARANTEE, epsilon=1.0, accounting="pld", events=["one table"])


def measured(gap: float = 0.0, *, wrong: float = 0.1, size: int = 1000, refused: int = 0, of: int = 1) -> Evaluation:
    """Two groups of ``size``: half of one and ``gap`` more of the other are predicted yes, ``wrong`` of the labels.

    The first ``refused`` are, and all but one of ``of``.
    """
    predicted = np.concatenate([np.arange(size) < size / 2, np.arange(size) < size * (0.5 + gap)]).astype(int)
    labels = np.where(np.arange(2 * size) % round(1 / wrong) == 0, 1 - predicted, predicted) if wrong else predicted
    return evaluate(
        predicted,
        labels_N=labels,
        groups_N=[0] * size + [1] * size,
        answered_N=(np.arange(2 * size) >= refused) & (np.arange(2 * size) % of == 0),
        class_names=["no", "yes"],
        group_names=["women", "men"],
        generator=np.random.default_rng(0),
        num_replicates=200,
    )


def useless() -> Evaluation:
    return evaluate(
        [0] * 100,
        labels_N=[0] * 60 + [1] * 40,
        groups_N=[0, 1] * 50,
        class_names=["no", "yes"],
        group_names=["women", "men"],
        generator=np.random.default_rng(0),
        num_replicates=20,
    )


def nobody() -> Evaluation:
    return evaluate(
        [],
        labels_N=[],
        groups_N=[],
        class_names=["no", "yes"],
        group_names=["women", "men"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )


def said(evaluation: Evaluation, baseline: WithoutPrivacy | None = None, **changes) -> RunStatement:
    return RunStatement(guarantee=replace(GUARANTEE, **changes), measured=evaluation, without_privacy=baseline)


def fairness_of(evaluation: Evaluation) -> str:
    return said(evaluation).fairness


FAIR, UNFAIR, DOUBTFUL = measured(0.0), measured(0.3), measured(0.1)
BETTER = WithoutPrivacy(accuracy=0.93, num_records=800)


def test_the_gap_decides_by_its_whole_interval() -> None:
    """Of 1,000 records each: a gap of 0 within .05, one of .3 above .25, one of .1 on both sides of .1."""
    assert [fairness_of(found) for found in (FAIR, UNFAIR, DOUBTFUL)] == ["fair", "not fair", "perhaps fair"]
    assert (fairness_of(useless()), fairness_of(nobody())) == ("degenerate", "unknown")
    one_group = measured(refused=1000)
    assert fairness_of(one_group) in ("degenerate", "unknown")


@pytest.mark.parametrize(
    ("evaluation", "changes", "line"),
    [
        (FAIR, {}, "Private and fair"),
        (UNFAIR, {}, "Private but not fair"),
        (DOUBTFUL, {}, "Private, perhaps fair"),
        (FAIR, {"epsilon": 5.0}, "Weakly private, but fair"),
        (UNFAIR, {"epsilon": 5.0}, "Weakly private and not fair"),
        (FAIR, {"epsilon": 12.0}, "Private in name only, but fair"),
        (UNFAIR, {"epsilon": 26.0}, "Private in name only and not fair"),
        (FAIR, {"noise": "seeded: not private"}, "Not private, but fair"),
        (UNFAIR, {"noise": "seeded: not private"}, "Neither private nor fair"),
        (FAIR, {"epsilon": math.inf, "noise": "no noise: not private"}, "Not private, but fair"),
        (FAIR, {"unit": "person"}, "Private and fair"),
        (
            UNFAIR,
            {"unit": "sensitive attribute", "relation": "replace one", "not_protected": "features and labels"},
            "Private (the sensitive attribute alone) but not fair",
        ),
    ],
)
def test_the_verdict_joins_privacy_fairness_and_accuracy(evaluation, changes, line: str) -> None:
    """90 % are right, 93 % without privacy: 3 points."""
    right = f"It is right for 90.0{NB}% of the test records, 3.0 points less than a logistic model without privacy."
    expected = f"{line}. {right}"
    # Labels are the predictions but for a tenth, so that theirs differ by 4/5 of the gap: .24 where that is .3.
    assert (evaluation.perfect_gap > 0.1) == (evaluation is UNFAIR)
    expected += " A model that is always right would not be called fair here either." * (evaluation is UNFAIR)
    assert said(evaluation, BETTER, **changes).line == expected


def test_without_a_baseline_the_most_common_class_stands_in() -> None:
    """Half of the labels are yes, but for the tenth that is turned round: 50 %, and 90 % are right."""
    assert FAIR.majority_accuracy == pytest.approx(0.5)
    found = said(FAIR)
    words = f"Private and fair. It is right for 90.0{NB}% of the test records, 40.0 points more than always “no”."
    assert found.line == words
    accuracy = found.figures[2]
    assert f"Always “no”, the most common class: 50.0{NB}%." in accuracy.details
    # A published page says neither that there is one nor that there is none; the operator's own page knows.
    assert accuracy.details[-1].startswith("How often a model without privacy is right is not published")
    assert "the operator’s own report has it" in accuracy.details[-1]
    operators = replace(found, for_operator=True).figures[2]
    assert operators.details[-1].startswith("The run measured no model without privacy to compare with: method sgd")
    assert "800 private records" in replace(found, for_operator=True, without_privacy=BETTER).figures[2].details[-1]


@pytest.mark.parametrize(
    ("accuracy", "words"),
    [
        (0.93, "3.0 points less than a logistic model without privacy"),
        (0.85, "5.0 points more than a logistic model without privacy that learned from 1,600 private records"),
        (0.90, "as many as a logistic model without privacy"),
    ],
)
def test_points_are_those_of_the_printed_numbers(accuracy: float, words: str) -> None:
    found = said(FAIR, WithoutPrivacy(accuracy=accuracy, num_records=1600))
    assert found.line == f"Private and fair. It is right for 90.0{NB}% of the test records, {words}."
    learned = f"A logistic model without privacy that learned from 1,600 private records: {100 * accuracy:.1f}{NB}%."
    assert found.figures[2].details[-1] == learned


def test_a_model_that_says_one_thing_is_degenerate_whatever_else_holds() -> None:
    found = said(useless(), BETTER)
    assert found.line == "Private, but degenerate: on the test records it predicts 'no' for every record."
    gap = found.figures[1]
    assert (gap.value, gap.word, gap.mood) == ("0.000", "Says nothing", "bad")
    assert gap.details[0] == "The model predicts 'no' for every record: a small gap is no merit then."


def test_without_test_records_nothing_is_claimed() -> None:
    found = said(nobody())
    assert found.line == "Private; how accurate and how fair is unknown: there were no test records."
    assert [figure.value for figure in found.figures[1:]] == ["unknown"] * 3
    assert not any("fair" in figure.word.lower() for figure in found.figures)


def test_what_epsilon_means_is_said_of_the_unit_and_conditionally_of_seeded_noise() -> None:
    assert said(FAIR).guarantee.meaning == (
        "Somebody sees the model, knows all other private data, and has to guess whether one given record was among "
        f"the private ones; both are equally likely. The guess is right at most 73.2{NB}% of the time, that of a "
        f"tossed coin 50{NB}%."
    )
    # Exact metrics, which are published too, are not covered.
    assert "sees the model and its metrics, knows" in said(FAIR, parts=("test",)).guarantee.meaning
    assert "sees the model, knows" in said(FAIR, parts=("validation",)).guarantee.meaning
    assert "one given person was among the people" in said(FAIR, unit="person").guarantee.meaning
    assert "which of two values the sensitive attribute" in (
        said(FAIR, unit="sensitive attribute", relation="replace one").guarantee.meaning
    )
    seeded = said(FAIR, noise="seeded: not private").guarantee.meaning
    assert seeded.startswith("Its noise: seeded: not private. Nothing is bounded. With fresh noise: somebody sees")
    assert said(FAIR, epsilon=math.inf).guarantee.meaning == (
        "No ε is finite: there is no bound on what can be learned about one record."
    )


def test_who_is_protected_is_not_said_where_nobody_is() -> None:
    seeded = said(FAIR, noise="seeded: not private", unit="person").figures[0]
    unit = "everything about one person, even its presence (add or remove one)"
    fresh = f"With fresh noise ε would hold for {unit}, δ = 10⁻⁵."
    assert seeded.details == ("Nothing is protected.", fresh)
    assert said(FAIR, epsilon=math.inf, noise="no noise: not private").figures[0].details == ("Nothing is protected.",)


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        ("record", "If a person has several records, each is protected by itself."),
        ("person", "All records of a person are protected together."),
        ("sensitive attribute", "All else about a record is not protected."),
        ("hospital", "The operator attests that one hospital touches one vote of a query at most."),
    ],
)
def test_who_is_behind_several_records_is_said(unit: str, words: str) -> None:
    assert words in said(FAIR, unit=unit).figures[0].details


def test_earlier_releases_are_summed_beside_the_figure() -> None:
    """e^2 / (1 + e^2) = .8808, rounded up."""
    assert GUARANTEE.words["with_earlier"] == ""
    sums = {"epsilon_with_earlier": 2.0, "epsilon_adaptive_with_earlier": 2.25}
    found = said(FAIR, earlier_releases=2, **sums).figures[0].details[-1]
    assert found == (
        "Together with 2 earlier releases of the same private data it is ε = 2.00, and a guess is right at most "
        f"88.1{NB}% of the time, if all were planned before the first; if later ones depended on earlier ones, it is "
        "ε = 2.25."
    )
    lost = replace(GUARANTEE, earlier_releases=1).words["with_earlier"]
    assert lost == "Together with 1 earlier release of the same private data no ε is finite."


def test_a_model_that_refuses_is_measured_on_what_it_answers() -> None:
    found = said(measured(refused=200), BETTER)
    coverage = found.figures[3]
    assert (coverage.value, coverage.word) == (f"90.0{NB}%", "Answers “women” least")
    assert "On 1,800 answered test records." in found.figures[2].details
    assert f"It answers 90.0{NB}% of the test records (80.0{NB}% of “women”); " in found.line
    assert found.line.endswith(" of its answers are right, 3.0 points less than a logistic model without privacy.")


def test_the_tile_says_of_whom_fewer_are_answered() -> None:
    found = said(measured(refused=200)).figures[3]
    assert f"Answered by group: 80.0{NB}% of “women” and 100{NB}% of “men”." in found.details
    assert not any("by group" in words for words in said(FAIR).figures[3].details)


def test_a_class_that_is_hardly_found_is_in_the_first_line() -> None:
    """Of 312 records of the third class, 3 are found."""
    truth = np.repeat([0, 1, 2], [600, 600, 312])
    predicted = truth.copy()
    predicted[1203:] = np.arange(309) % 2
    found = said(
        evaluate(
            predicted,
            labels_N=truth,
            groups_N=np.arange(1512) % 2,
            class_names=["yes", "no", "manual"],
            group_names=["women", "men"],
            generator=np.random.default_rng(0),
            num_replicates=20,
        )
    )
    rarely = f"1.0{NB}% of the records of this class."
    assert f" It finds “manual” in {rarely}" in found.line
    words = f"“manual” is missed most often: 99.0{NB}% of its records get another class."
    assert words in found.figures[2].details
    # A class that is found as often as others is no headline.
    assert "finds" not in said(FAIR).line


def test_the_cost_of_a_choice_stands_in_the_tile_of_epsilon_in_the_rows_and_among_the_open_points() -> None:
    choice = Choice(num_releases=3, epsilon=3.0, delta=3e-5)
    words = (
        "ε is 1.00 if the model was named before any result was seen. If results decide which model of this comparison "
        "is published, or all private ones are, state ε = 3.00 (δ = 3·10⁻⁵) instead, the cost of all 3 releases."
    )
    alone = said(FAIR, tuning_accounted=False)
    found = replace(alone, choice=choice)
    assert words in found.figures[0].details
    assert dict(found.rows)["the choice"] == words
    assert "state ε = 3.00 (δ = 3·10⁻⁵) instead of ε = 1.00" in found.decision.words
    assert len(found.decision.to_settle) == len(alone.decision.to_settle)
    for shown in (alone, replace(said(FAIR, tuning_accounted=True), choice=choice)):
        assert "of this comparison" not in " ".join(shown.figures[0].details)
        assert "results of a comparison" not in shown.decision.words
        assert "the choice" not in dict(shown.rows)
    # Nothing is protected: there is no cost either.
    seeded = replace(said(FAIR, noise="seeded: not private", tuning_accounted=False), choice=choice)
    assert "of this comparison" not in " ".join(seeded.figures[0].details)
    mixed = Choice(num_releases=2, epsilon=None, delta=None)
    assert "state no ε: its models protect different units" in replace(alone, choice=mixed).decision.words
    assert "no ε can be stated: models of this comparison protect different units" in " ".join(
        replace(alone, choice=mixed).figures[0].details
    )


def test_whether_it_may_be_published_follows_from_the_facts() -> None:
    """Exact metrics, free settings and no use: three points and an audit as advice, each gone once it is settled."""
    private = replace(FAIR, metrics="private")
    few = replace(said(FAIR, tuning_accounted=False), intended_use=None, audited=None)
    assert few.decision.verdict == "Yes, once 3 points are settled."
    assert list(few.decision.parties) == ["Owner of the test records", "Operator", "Advised"]
    assert dict(few.rows)["may it be published?"] == few.decision.words
    settled = replace(said(private, tuning_accounted=True), intended_use="Planning.", audited=True)
    assert settled.decision.words == "Yes: nothing that this page knows of is open."
    owner, operator, users = "Owner of the test records", "Operator", "Those responsible for its use"
    guarantee = settled.guarantee
    undefined = with_interval(FAIR, math.nan, math.nan)
    for who, changes, words in (
        (owner, {"measured": FAIR}, "(1) decide whether accuracy and gap are published"),
        (
            operator,
            {"guarantee": replace(guarantee, tuning_accounted=False)},
            "(1) if results on these records",
        ),
        (
            operator,
            {"guarantee": replace(guarantee, delta=1e-3, declared_units=2000)},
            "(1) train it again with",
        ),
        (users, {"guarantee": replace(guarantee, epsilon=5.0)}, "(1) decide whether ε is small enough: a guess may be"),
        (operator, {"intended_use": None}, "(1) state its purpose"),
        (operator, {"measured": replace(nobody(), metrics="private")}, "(1) measure its accuracy and its gap"),
        (users, {"measured": replace(DOUBTFUL, metrics="private")}, "(1) decide whether a gap of up to 0.1"),
        ("Advised", {"audited": None}, "run fairpate audit, which measures"),
        ("", {"guarantee": replace(guarantee, noise="seeded: not private")}, "No: it is not private."),
        ("", {"guarantee": replace(guarantee, epsilon=20.0)}, "No: its ε and δ bound hardly any guess about one"),
        (operator, {"guarantee": replace(guarantee, delta=1e-3)}, "(1) train it again with"),
        (operator, {"measured": replace(UNFAIR, metrics="private"), "has_reject_option": True}, "(1) find out the gap"),
        (operator, {"measured": replace(undefined, metrics="private")}, "(1) find out whether it is fair"),
        ("", {"measured": replace(measured(refused=2000), metrics="public")}, "No: it answers nothing."),
        ("", {"audited": False}, "No: an audit found that it reveals more than ε allows."),
        ("", {"measured": replace(UNFAIR, metrics="private")}, "No: its gap of 0.300 is above 0.1, the limit for"),
        ("", {"measured": replace(useless(), metrics="private")}, "No: it predicts 'no' for every record."),
    ):
        found = replace(settled, **changes).decision
        points = found.parties if who else {"": found.verdict}
        assert list(points) == [who]
        assert points[who].startswith(words), points
        assert found.verdict.startswith("Yes" if who else "No")
    page = report_pages.public_report(report_pages.published())
    assert page.index("May it be published?") < page.index('class="tiles"')


def test_a_small_gap_among_answers_does_not_hide_who_gets_none() -> None:
    """Of 1,000 women 200 get no answer, of 1,000 men none: .2 apart, above the limit of .1; of 50 it is .05."""
    some, many = (
        said(with_interval(measured(refused=refused), 0.0, 0.05), tuning_accounted=True) for refused in (50, 200)
    )
    for found in (some, many):
        assert found.line.startswith("Private and fair in its answers. It answers 9")
        assert found.figures[1].word == "Fair in its answers"
    assert [found.figures[1].mood for found in (some, many)] == ["good", "doubtful"]
    assert [found.figures[3].mood for found in (some, many)] == ["none", "doubtful"]
    words = f"(1) decide whether it may leave 20.0{NB}% of “women” without an answer, against 0{NB}% of “men”"
    assert [found.decision.parties.get("Those responsible for its use") for found in (some, many)] == [None, words]


@pytest.mark.parametrize(
    ("delta", "units", "words"),
    [
        (
            1e-5,
            20_000,
            "privacy loss exceeds ε, is 1 in 100,000: below 1 in 20,000, the declared number of persons.",
        ),
        (1e-5, None, "How many persons there are is not public; δ is below 1/n for fewer than 100,000."),
        (1e-3, 5_000, "far below one in the number of persons, here 1/5,000"),
    ],
)
def test_delta_is_compared_with_one_in_the_number_of_persons(delta: float, units: int | None, words: str) -> None:
    details = said(FAIR, unit="person", delta=delta, declared_units=units).figures[0].details
    assert any(words in each for each in details), details


def with_interval(found: Evaluation, low: float, high: float) -> Evaluation:
    """The same measurement with this interval of its demographic-parity gap: resampling may find any of few records."""
    reading = NOTIONS["demographic_parity"].reading
    return replace(found, gaps={**found.gaps, reading: replace(found.gaps[reading], value=low, low=low, high=high)})


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (measured(of=19), f"It is of the 5.3{NB}% of the test records that the model answers."),
        (measured(of=3), f"It is of the 33.4{NB}% of the test records that the model answers."),
        (measured(size=29), "Fewer than 30 records of a group cannot show so small a gap."),
    ],
)
def test_few_answers_are_perhaps_fair_at_best(found: Evaluation, why: str) -> None:
    close = with_interval(found, 0.0, 0.05)
    assert fairness_of(close) == "perhaps fair"
    gap = said(close).figures[1]
    assert (gap.word, gap.mood) == ("Perhaps fair", "doubtful")
    assert why in gap.details
    assert gap.details[1] == f"With 95{NB}% confidence up to 0.050: at or below 0.1."
    assert fairness_of(with_interval(found, 0.2, 0.3)) == "not fair"


def test_what_is_fair_is_the_users_threshold_and_every_view_states_it() -> None:
    """Half of one group and .7 of the other are predicted yes: a gap of .2, and a ratio of .714, below four fifths."""
    found = measured(0.2)
    stated = {}
    for said_at in ("0.1", 0.35, "four-fifths", "equalized_odds=0.5", "impact_ratio=0.5"):
        judged = said(replace(found, fair_at=fair_rule(said_at)))
        stated[said_at] = judged.fairness
        figure, rows = judged.figures[1], dict(judged.rows)
        assert fair_words(fair_rule(said_at)) in rows["called fair"]
        assert fair_words(fair_rule(said_at)) in " ".join(figure.details)
    assert list(stated.values()) == ["not fair", "fair", "not fair", "fair", "fair"]
    four_fifths = said(replace(found, fair_at=FOUR_FIFTHS)).figures[1]
    assert four_fifths.name == "Impact-ratio gap"
    assert four_fifths.value == "0.286"  # 1 - .5 / .7
    assert "predicted yes: women against men" in four_fifths.details[0]
    assert fair_words(FOUR_FIFTHS) == "an impact-ratio gap of at most 0.2, the four-fifths rule"
    # A smaller limit needs more records: 3 / .05 = 60.
    few = with_interval(measured(size=59), 0.0, 0.04)
    assert fairness_of(replace(few, fair_at=FairRule(limit=0.05))) == "perhaps fair"
    assert fairness_of(replace(few, fair_at=FairRule(limit=0.06))) == "fair"


@pytest.mark.parametrize("nonsense", ["0", "1.5", "nan", "much", "parity=0.1", "equalized_odds=", "=0.1", ""])
def test_a_threshold_without_meaning_is_refused(nonsense: str) -> None:
    with pytest.raises(ValueError, match="Expected"):
        fair_rule(nonsense)


def test_a_rule_from_python_is_checked_as_text_is() -> None:
    assert fair_rule(FairRule(limit=0.2)) == fair_rule(0.2) == fair_rule("0.2")
    with pytest.raises(ValueError, match="Expected a notion of fairness"):
        fair_rule(FairRule(notion="parity"))  # type: ignore[arg-type]
    for limit in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="Expected a fairness limit above 0"):
            FairRule(limit=limit)


def test_metrics_of_an_earlier_version_have_the_usual_rule() -> None:
    plain = measured().to_json()
    del plain["fair_at"], plain["gaps"]["impact_ratio"]
    earlier = Evaluation.from_json(plain)
    assert earlier.fair_at == FairRule()
    assert fairness_of(replace(earlier, fair_at=FOUR_FIFTHS)) == "unknown"


def test_a_group_without_an_answer_is_named_beside_those_among_whom_a_model_is_fair() -> None:
    """Two groups are treated alike; of the third there is no record."""
    two = measured()
    lacking = GroupResult(name="children", num_records=0, num_answered=0, coverage=math.nan, accuracy=math.nan)
    groups, confusion = (*two.groups, lacking), (*two.confusion_GYC, ((0.0, 0.0), (0.0, 0.0)))
    found = with_interval(replace(two, groups=groups, confusion_GYC=confusion), 0.0, 0.05)
    assert fairness_of(found) == "fair among some"
    assert said(found).line.startswith("Private; fair among women and men; not known for children. It is right ")
    assert "Too few answered test records of children." in said(found).figures[1].details


def of_groups(**groups: tuple[int, float, float, float]) -> Evaluation:
    """Groups of a size, with a share of positive labels, a true-positive and a false-positive rate."""
    z, y, k = [], [], []
    for code, (size, base, tpr, fpr) in enumerate(groups.values()):
        labels, share = np.arange(size) < base * size, np.arange(size) % 100 / 100
        z += [code] * size
        y += labels.astype(int).tolist()
        k += np.where(labels, share < tpr, share < fpr).astype(int).tolist()
    return evaluate(
        k,
        labels_N=y,
        groups_N=z,
        class_names=["no", "yes"],
        group_names=list(groups),
        generator=np.random.default_rng(0),
        num_replicates=200,
    )


ODDS, OPPORTUNITY = fair_rule("equalized_odds=0.1"), fair_rule("equal_opportunity=0.1")


@pytest.mark.parametrize(
    ("groups", "rule", "words"),
    [
        ({"F": (1000, 0.5, 0.5, 0), "M": (1000, 0, 0, 0)}, ODDS, "fairness undefined (not known for M)"),
        ({"F": (1000, 0.5, 0.5, 0), "M": (1000, 0, 0, 0)}, OPPORTUNITY, "fairness undefined (not known for M)"),
        ({"F": (1000, 0.5, 0.9, 0.5), "M": (1000, 1, 0.9, 0)}, ODDS, "fairness undefined (not known for M)"),
        ({"F": (1000, 0.5, 0.9, 0.5), "M": (1000, 1, 0.9, 0)}, OPPORTUNITY, "fair"),
        # One comparison that is known to be unequal suffices.
        ({"F": (1000, 0.5, 0.5, 0.5), "M": (1000, 0, 0, 0)}, ODDS, "not fair"),
        *(
            ({"F": same, "M": same, "X": (1000, 0, 0, 0.1)}, rule, "fair among F and M; not known for X")
            for same in [(1000, 0.5, 0.5, 0.1)]
            for rule in (ODDS, OPPORTUNITY)
        ),
        ({"F": (1000, 0.5, 0.5, 0.1), "M": (1000, 0.5, 0.5, 0.1), "X": (1000, 0, 0, 0.1)}, FairRule(), "not fair"),
        # No group has the class at all.
        ({"F": (1000, 0, 0, 0.5), "M": (1000, 0, 0, 0.5)}, ODDS, "fairness undefined"),
    ],
)
def test_a_group_that_lacks_a_true_class_is_not_among_those_that_are_called_fair(
    groups: dict[str, tuple[int, float, float, float]], rule: FairRule, words: str
) -> None:
    found = said(replace(of_groups(**groups), fair_at=rule, degenerate=()))
    assert found.fairness_words == words
    figure = found.figures[1]
    if words == "fair":
        assert found.line.startswith("Private and fair.")
    else:
        assert "and fair" not in found.line
        assert figure.mood != "good"
    if "undefined" in words:
        assert (figure.value, figure.word) == ("undefined", "Undefined")
    if "not known" in words and rule == ODDS:
        name = "X" if "X" in groups else "M"
        assert any(f"is undefined for {name}" in line for line in figure.details)
        assert f"or more, undefined for {name}" in dict(found.rows)["other gaps"]


def test_an_error_rate_of_a_class_that_is_never_predicted_is_not_called_fair() -> None:
    """Of three classes two are predicted, and always rightly: the false-discovery rate of the third is 0 / 0."""
    truth = [0] * 300 + [1] * 300 + [2] * 3
    found = evaluate(
        [0] * 300 + [1] * 300 + [0] * 3,
        labels_N=truth,
        groups_N=[0, 1] * 301 + [0],
        class_names=["a", "b", "c"],
        group_names=["women", "men"],
        generator=np.random.default_rng(0),
        num_replicates=50,
    )
    assert found.gaps["false_discovery_rate"].left_out == ("c",)
    assert said(replace(found, fair_at=fair_rule("false_discovery_rate=0.3"))).fairness_words == "fairness undefined"
    assert found.fairness["false_discovery_rate"] == dict.fromkeys(("value", "low", "high", "fair_from"))


def test_whom_a_constant_would_serve_better_stands_beside_the_accuracy() -> None:
    """Men: 450 of 500 are no, of whom 100 are lost; women are told apart."""
    confusion_GYC = np.array([[[200, 50], [50, 200]], [[350, 100], [10, 40]]])
    words = "is right about 78.0 % of men, always predicting 'no' about 90.0 %"
    groups, labels, predictions = np.repeat(np.argwhere(confusion_GYC >= 0), confusion_GYC.ravel(), axis=0).T
    found = evaluate(
        predictions,
        labels_N=labels,
        groups_N=groups,
        class_names=["no", "yes"],
        group_names=["women", "men"],
        generator=np.random.default_rng(0),
        num_replicates=5,
    )
    assert f"The model {words}." in said(found).figures[2].details
    assert found.to_json()["underserved"] == [words]


def test_thirty_records_of_each_group_may_be_fair() -> None:
    assert fairness_of(with_interval(measured(size=30), 0.0, 0.05)) == "fair"


def test_a_baseline_that_is_worse_than_a_constant_is_no_merit_to_surpass() -> None:
    """Half of the labels are yes; a logistic model of few records reaches 40 %."""
    found = said(FAIR, WithoutPrivacy(accuracy=0.4, num_records=40))
    words = f"Private and fair. It is right for 90.0{NB}% of the test records, 40.0 points more than always “no”."
    assert found.line == words
    assert found.figures[2].details[-1].endswith(f"learned from 40 private records: 40.0{NB}%.")


def test_the_head_of_a_page_says_when_and_by_which_version() -> None:
    assert made_words("2026-03-05", "1.2.3") == "5 March 2026 · FairPATE 1.2.3"
    assert made_words(None, "1.2.3") == "FairPATE 1.2.3"
