"""The report of predictions that were made elsewhere: rates by hand and by fairlearn, small cells, and bad tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fairlearn.metrics import MetricFrame, demographic_parity_difference, selection_rate
from page_references import References

from fairpate.config import fair_rule
from fairpate.run.assess import AssessedPredictions, assess_predictions
from fairpate.types import UsageError

pytestmark = pytest.mark.usefixtures("light_runs")


def applicants(number: int = 3000, seed: int = 0) -> pd.DataFrame:
    """Applicants of two sexes and four races, the last of them rare; women are hired less often."""
    random = np.random.default_rng(seed)
    sex = random.choice(["F", "M"], number)
    race = random.choice(["A", "B", "C", "rare"], number, p=[0.6, 0.25, 0.135, 0.015])
    truth = random.random(number) < 0.4
    hired = np.where(random.random(number) < 0.85, truth, ~truth) & ~((sex == "F") & (random.random(number) < 0.4))
    words = np.array(["no", "yes"])
    return pd.DataFrame(
        {"sex": sex, "race": race, "truth": words[truth.astype(int)], "hired": words[hired.astype(int)]}
    )


def by_name(found: AssessedPredictions, division: int = 0) -> dict[str, Any]:
    return {group.name: group for group in found.divisions[division].groups}


def test_rates_ratios_and_gaps_agree_with_fairlearn() -> None:
    table = applicants()
    found = assess_predictions(table, groups=["sex", "race"], prediction="hired", label="truth")
    assert [each.name for each in found.divisions] == ["sex", "race", "sex and race"]
    hired, truth = (table[name] == "yes" for name in ("hired", "truth"))
    for division, groups in ((0, table["sex"]), (1, table["race"])):
        rates = MetricFrame(metrics=selection_rate, y_true=truth, y_pred=hired, sensitive_features=groups).by_group
        shown = by_name(found, division)
        assert {name: each.rate.value for name, each in shown.items()} == pytest.approx(rates.to_dict())
        highest = max(rates[name] for name, each in shown.items() if not each.is_rare)
        for name, each in shown.items():
            assert each.rate.low < each.rate.value < each.rate.high
            assert (
                math.isnan(each.ratio.value)
                if each.is_rare
                else each.ratio.value == pytest.approx(rates[name] / highest)
            )
    measured = found.divisions[0].measured
    assert measured is not None
    assert measured.disparity == pytest.approx(
        demographic_parity_difference(truth, hired, sensitive_features=table["sex"])
    )
    assert ", of F: below four fifths." in found.divisions[0].words
    assert found.line.startswith("Not fair by ")
    assert by_name(found, 1)["rare"].remark == "under 2\u00a0% of the records: no ratio"
    assert "Under 2\u00a0% of the records: rare." in found.divisions[1].words


def test_a_rare_group_is_not_the_highest_and_an_unknown_one_is_counted() -> None:
    """By hand: 10 of 1,010 are all selected; without them 300 of 500 and 150 of 500 are, a ratio of one half."""
    rows = [("A", "1")] * 300 + [("A", "0")] * 200 + [("B", "1")] * 150 + [("B", "0")] * 350 + [("C", "1.0")] * 10
    table = pd.DataFrame([*rows, ("", "1"), (None, "0")], columns=["group", "prediction"])
    found = assess_predictions(table, groups=["group"])
    shown = by_name(found)
    assert (shown["A"].ratio.value, shown["B"].ratio.value) == (1.0, 0.5)
    assert (shown["C"].rate.value, shown["C"].is_rare) == (1.0, True)
    assert found.num_unknown == 2
    assert "2 records" in found.left_out


def test_semicolons_and_another_encoding_are_read(tmp_path: Path) -> None:
    table = applicants().replace({"sex": {"F": "weiblich", "M": "männlich"}})
    for name, encoding in (("umlauts.csv", "cp1252"), ("utf.csv", "utf-8")):
        table.to_csv(tmp_path / name, sep=";", index=False, encoding=encoding)
        found = assess_predictions(tmp_path / name, groups=["sex"], prediction="hired")
        assert set(by_name(found)) == {"weiblich", "männlich"}


def test_a_score_above_the_median_selects() -> None:
    table = {"z": ["a"] * 50 + ["b"] * 50, "score": [*range(50), *range(25, 75)]}
    median = float(np.median(table["score"]))
    shown = by_name(assess_predictions(table, groups=["z"], score="score"))
    assert shown["a"].rate.value == np.mean(np.arange(50) > median)
    assert shown["b"].rate.value == np.mean(np.arange(25, 75) > median)


SEX = ["F"] * 200 + ["M"] * 200
TOP = [1] * 110 + [0] * 90 + [1] * 180 + [0] * 20  # .55 of F and .90 of M, a ratio of .61


@pytest.mark.parametrize("scores", [(0, 1), (3, 5), (0.1, 0.9)])
def test_scores_that_tie_at_the_median_are_counted_and_nobody_above_it_is_no_ratio_of_one(
    scores: tuple[float, float],
) -> None:
    found = assess_predictions({"z": SEX, "s": [scores[top] for top in TOP]}, groups=["z"], score="s")
    (division,) = found.divisions
    assert [group.num_selected for group in division.groups] == [0, 0]
    assert all(math.isnan(group.ratio.value) for group in division.groups)
    assert all(group.remark.startswith("no ratio") for group in division.groups)
    assert (division.num_tied, division.smallest_ratio) == (290, pytest.approx(0.55 / 0.90))
    assert "0 / 0 and undefined. 290 records have exactly the median score" in found.line
    ratio = "the smallest impact ratio is 0.61 (0.531 to 0.695), of F: below four fifths."
    assert found.line.endswith(f"If they were selected too: {ratio}")
    assert found.to_json()["divisions"][0]["groups"][0]["impact_ratio"] is None


def test_some_scores_above_the_median_do_not_hide_the_ties() -> None:
    """By hand: 20 of 200 are above it in both groups, a ratio of 1. 60 and 140 tie: 80 of 200 to 160 of 200 is .5."""
    scores = [9] * 20 + [5] * 60 + [1] * 120 + [9] * 20 + [5] * 140 + [1] * 40
    found = assess_predictions({"z": SEX, "s": scores}, groups=["z"], score="s")
    assert "The smallest impact ratio is 1.00" in found.line
    assert "If they were selected too: the smallest impact ratio is 0.50" in found.line
    assert (found.divisions[0].num_tied, found.divisions[0].smallest_ratio) == (200, 0.5)
    untied = assess_predictions({"z": ["a", "b"] * 100 + ["a"], "s": range(201)}, groups=["z"], score="s")
    assert untied.divisions[0].num_tied == 0  # the median of an odd number


def test_nobody_selected_is_undefined_and_not_a_ratio_of_one() -> None:
    found = assess_predictions({"z": SEX, "prediction": [0] * 400, "label": TOP}, groups=["z"], label="label")
    assert found.divisions[0].words == (
        "Nobody is selected in the groups that are compared: the impact ratio is 0 / 0 and undefined."
    )
    assert "four fifths" not in found.line
    named = assess_predictions({"z": SEX, "prediction": [0] * 400}, groups=["z"], selected="1")
    assert "0 / 0 and undefined" in named.line
    # Of a rare group alone, nothing is compared with it.
    rare = {"z": ["a"] * 500 + ["b"] * 490 + ["c"] * 10, "prediction": [0] * 990 + [1] * 10}
    assert "0 / 0 and undefined" in assess_predictions(rare, groups=["z"]).line
    everybody = assess_predictions({"z": SEX, "prediction": [1] * 400}, groups=["z"], selected="1")
    assert "smallest impact ratio is 1.00" in everybody.line
    assert (
        "No two groups can be compared." in assess_predictions({"z": ["a"] * 400, "prediction": TOP}, groups=["z"]).line
    )


def test_one_predicted_class_without_another_label_is_a_question() -> None:
    with pytest.raises(UsageError, match=r"--selected: missing, but column prediction has the single class '0'"):
        assess_predictions({"z": SEX, "prediction": [0] * 400}, groups=["z"])
    with pytest.raises(UsageError, match=r"single class '0'"):
        assess_predictions({"z": SEX, "prediction": [0] * 400, "y": [0] * 400}, groups=["z"], label="y")


@pytest.mark.parametrize(
    ("labels", "only_predicted", "only_true"),
    [
        (["<=50K.", ">50K."], "'<=50K', '>50K'", "'<=50K.', '>50K.'"),
        (["<=50K", ">50K."], "'>50K'", "'>50K.'"),
        (["<=50k", ">50K"], "'<=50K'", "'<=50k'"),
        (["0", "1"], "'<=50K', '>50K'", "'0', '1'"),
    ],
)
def test_labels_that_are_spelt_otherwise_are_refused_with_the_classes_of_one_column(
    labels: list[str], only_predicted: str, only_true: str
) -> None:
    table = {"z": SEX, "said": [["<=50K", ">50K"][top] for top in TOP], "true": [labels[top] for top in TOP]}
    for selected in (None, ">50K"):
        with pytest.raises(UsageError) as error:
            assess_predictions(table, groups=["z"], prediction="said", label="true", selected=selected)
        assert f"only said has {only_predicted}, and only true has {only_true};" in str(error.value)


def test_a_class_that_one_column_alone_has_is_no_other_spelling() -> None:
    """A class may be never predicted, or predicted and never true."""
    three = [["no", "yes", "maybe"][n % 3] for n in range(400)]
    two = ["yes" if each == "maybe" else each for each in three]
    for said, true in ((two, three), (three, two)):
        found = assess_predictions({"z": SEX, "prediction": said, "y": true}, groups=["z"], label="y", selected="yes")
        assert found.divisions[0].measured is not None
        assert found.divisions[0].measured.accuracy == pytest.approx(
            np.mean([a == b for a, b in zip(two, three, strict=True)])
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("x · y", "z"), ("x", "y · z")),
        (("x ·", "z"), ("x", "· z")),
        (('"x · y"', "z"), ("x · y", "z")),
        (("x", '"y · z"'), ("x", "y · z")),
    ],
)
def test_intersections_of_different_groups_are_different_groups(one: tuple[str, str], other: tuple[str, str]) -> None:
    pairs = [one] * 100 + [other] * 100
    table = {"a": [a for a, _ in pairs], "b": [b for _, b in pairs], "prediction": [1] * 100 + [0] * 50 + [1] * 50}
    found = assess_predictions(table, groups=["a", "b"])
    crossed = found.divisions[-1].groups
    assert sorted((group.num_records, group.rate.value) for group in crossed) == [(100, 0.5), (100, 1.0)]
    assert len({group.name for group in crossed}) == 2


def test_a_column_of_groups_that_is_named_twice_is_one_division() -> None:
    found = assess_predictions({"z": SEX, "prediction": TOP}, groups=["z", "z"])
    assert [(each.name, [group.name for group in each.groups]) for each in found.divisions] == [("z", ["F", "M"])]


@pytest.mark.parametrize("change", ["no", ""])
def test_no_number_of_any_division_shows_a_small_group(change: str) -> None:
    """One record of a group of nine changes, and nothing of the report does; with another rule it is shown."""
    table = applicants(2000)
    table.loc[table["race"] == "rare", "race"] = "A"
    table.loc[:8, ["sex", "race", "hired"]] = ["F", "few", "yes"]
    found = assess_predictions(table, groups=["sex", "race"], prediction="hired", label="truth")
    table.loc[0, "hired"] = change
    other = assess_predictions(table, groups=["sex", "race"], prediction="hired", label="truth")
    assert by_name(found, 1)["few"].num_records is None
    assert "too few records to be shown" in json.dumps(found.to_json())
    assert found.num_left_out == 10  # not nine, which would show its size
    assert found.to_json() == other.to_json()
    everything = assess_predictions(table, groups=["sex", "race"], prediction="hired", least_cell=1)
    assert everything.num_left_out == 0


def overlapping(small: int) -> pd.DataFrame:
    """Three crossings of two columns: the second, of 40 records, is what a1 has and b1 lacks."""
    cells = {("a1", "b1"): (400, 200), ("a1", "b2"): (40, small), ("a2", "b2"): (400, 200)}
    rows = [(a, b, int(n < right), n % 2) for (a, b), (size, right) in cells.items() for n in range(size)]
    return pd.DataFrame(rows, columns=["A", "B", "label", "prediction"])


def test_a_small_cell_does_not_follow_from_groups_that_overlap() -> None:
    def tables(small: int) -> Any:
        found = assess_predictions(overlapping(small), groups=["A", "B"], label="label")
        return found, [None if each.measured is None else each.measured.confusion_GYC for each in found.divisions]

    found, (by_a, by_b, crossed) = tables(15)
    # The number of the crossing's records with label 1: what is shown of a1 less what is shown of b1.
    assert np.sum(np.array(by_a[0]) - np.array(by_b[0]), axis=1)[1] == 15
    assert crossed[1] is not None
    assert not found.finest_alone
    found, (by_a, by_b, crossed) = tables(3)
    assert (by_a, by_b, crossed) == (None, None, (None,) * 3)
    assert "shown by A and B alone" in found.left_out
    assert found.judged is None or found.judged[0].name == "A and B"
    # With all four crossings nothing follows, and columns have their numbers.
    both = pd.concat([overlapping(3), overlapping(200).replace("a1", "a2").query("B == 'b1'")])
    found = assess_predictions(both, groups=["A", "B"], label="label")
    assert not found.finest_alone
    assert all(each.measured is not None for each in found.divisions)
    # By the data alone: the same records with a least cell of 1 hide nothing.
    assert not assess_predictions(overlapping(3), groups=["A", "B"], label="label", least_cell=1).finest_alone


def test_records_of_one_person_make_intervals_wider() -> None:
    table = applicants(300).drop(columns="truth")
    repeated = pd.concat([table.assign(person=table.index)] * 10)
    alone = by_name(assess_predictions(repeated, groups=["sex"], prediction="hired"))["F"]
    together = by_name(assess_predictions(repeated, groups=["sex"], prediction="hired", person="person"))["F"]
    once = by_name(assess_predictions(table, groups=["sex"], prediction="hired"))["F"]
    width = {name: each.rate.high - each.rate.low for name, each in zip("ato", (alone, together, once), strict=True)}
    assert width["t"] == pytest.approx(width["o"], rel=0.15)
    assert width["t"] > 2.5 * width["a"]
    assert together.ratio.low < together.ratio.value < together.ratio.high


def test_the_command_writes_a_page_that_begins_with_what_it_is_not(fairpate: Any, tmp_path: Path) -> None:
    applicants().to_csv(tmp_path / "made.csv", index=False)
    given = ("assess", tmp_path / "made.csv", "--group", "sex", "--prediction", "hired", "--label", "truth")
    code, output, errors = fairpate(*given, "--fair-at", "four-fifths")
    assert code == 0, errors
    page = (tmp_path / "made-fairness.html").read_text(encoding="utf-8")
    assert page.index("Outside any guarantee") < page.index("<h1>")
    assert "the four-fifths rule" in page
    assert References(page).found == []
    assert "below four fifths" in output
    assert "Outside any guarantee" in output
    code, output, _ = fairpate(*given, "--json", "--out", tmp_path / "other.html")
    facts = json.loads(output)
    assert facts["divisions"][0]["groups"][0]["name"] == "F"
    assert facts["divisions"][0]["evaluation"]["fair_at"] == {"notion": "demographic_parity", "limit": 0.1}
    assert (tmp_path / "other.html").exists()
    assert fair_rule("four-fifths").limit == 0.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": ["sexx"]}, "no column sexx; did you mean sex"),
        ({"groups": []}, "at least one column of groups"),
        ({"prediction": "race"}, "only race has 'A', 'B', 'C', 'rare', and only truth has 'no', 'yes'"),
        ({"prediction": "race", "label": None}, "race has 4 classes; name the class"),
        ({"selected": "maybe"}, "'maybe' is not a class of column hired"),
        (
            {"score": "hired", "label": None},
            "expected a finite number in every row of column 'hired', but 0 rows are empty",
        ),
        ({"score": "hired"}, "leave out one of the two options"),
        ({"least_cell": 0}, "expected 1 or more"),
        ({"person": "gap"}, "1 records have no gap"),
    ],
)
def test_a_table_that_cannot_be_assessed_is_refused_with_the_column(changes: dict[str, Any], words: str) -> None:
    table = applicants(100).assign(gap=["", *["x"] * 99])
    given: dict[str, Any] = {"groups": ["sex"], "prediction": "hired", "label": "truth"}
    with pytest.raises((UsageError, ValueError), match=words):
        assess_predictions(table, **(given | changes))


def test_classes_that_one_column_lacks_by_chance_are_named() -> None:
    """Predicted are birds and cats, true are birds and dogs: a small sample of three classes."""
    table = {"z": ["F", "M"] * 50, "prediction": ["bird"] * 60 + ["cat"] * 40, "y": ["bird"] * 50 + ["dog"] * 50}
    given: dict[str, Any] = {"groups": "z", "label": "y", "selected": "bird"}
    with pytest.raises(UsageError, match="name all classes with --classes"):
        assess_predictions(table, **given)
    found = assess_predictions(table, **given, classes=["bird", "cat", "dog"])
    measured = found.divisions[0].measured
    assert measured is not None
    assert (measured.class_names, measured.accuracy) == (("cat", "dog", "bird"), 0.5)
    # A value that is none of the classes is a class written otherwise, as before.
    for column in ("prediction", "y"):
        other = table | {column: ["birds", *table[column][1:]]}
        with pytest.raises(UsageError, match=f"column {column}, but it also has 'birds'; did you mean bird"):
            assess_predictions(other, **given, classes=["bird", "cat", "dog"])
    with pytest.raises(UsageError, match="give a list of names"):
        assess_predictions(table, **given, classes="bird,cat")
    # The class that is selected may be one that nobody has.
    none = assess_predictions(table, **(given | {"selected": "fox"}), classes=["bird", "cat", "dog", "fox"])
    assert "0 / 0 and undefined" in none.line


def test_a_degenerate_model_is_no_verdict_on_any_group() -> None:
    """Class c is predicted for nobody: its impact ratio is 0 / 0 for both groups."""
    table = {"z": ["F"] * 100 + ["M"] * 100, "prediction": ["a", "b"] * 100, "y": ["a", "b", "c", "a"] * 50}
    found = assess_predictions(table, groups="z", label="y", selected="a", fair_at=fair_rule("four-fifths"))
    assert found.line.startswith("Degenerate by z")


def test_a_ratio_of_no_selected_record_is_zero_and_one_group_alone_has_none() -> None:
    table = {"z": ["F"] * 100 + ["M"] * 100, "prediction": ["no"] * 100 + ["yes"] * 100}
    women = by_name(assess_predictions(table, groups="z"))["F"]
    assert (women.ratio.value, women.ratio.low) == (0, 0)
    assert 0 < women.ratio.high < 0.1
    alone = assess_predictions({"z": ["F"] * 20, "prediction": ["no", "yes"] * 10}, groups="z").divisions[0].groups
    assert alone[0].remark == "no ratio: nothing to compare with"


@pytest.mark.parametrize(
    "scores", [[0.1, float("nan")], [0.1, float("inf")], [0.1, None], ["0.1", ""], ["0.1", "1e999"]]
)
def test_a_score_that_is_none_is_named_by_its_column(scores: list[Any]) -> None:
    with pytest.raises(UsageError, match=r"row of column 's', but .*name a column of scores, or remove"):
        assess_predictions({"s": scores * 50, "z": ["F"] * 50 + ["M"] * 50}, groups="z", score="s")


def test_a_column_of_names_that_is_taken_for_scores_is_not_printed() -> None:
    with pytest.raises(UsageError, match="0 rows are empty, NaN or infinite and 100 rows are other text") as caught:
        assess_predictions({"s": ["K102446"] * 100, "z": ["F", "M"] * 50}, groups="z", score="s")
    assert "K102446" not in str(caught.value)
