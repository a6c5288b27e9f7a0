"""The demo: its sentences follow from its numbers, and its numbers from what the runs published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fairpate.cli.commands import EXAMPLES
from fairpate.methods.defaults import default_method
from fairpate.report.metrics import Evaluation, evaluate
from fairpate.report.records import Guarantee, RunStatement
from fairpate.run.compare import claims_in_words
from fairpate.run.sweep import cells_of, load_sweep

pytestmark = pytest.mark.usefixtures("light_runs")

NB = "\u00a0"
GUARANTEE = Guarantee(
    unit="person", relation="add or remove one", epsilon=0.991, delta=1e-5, accounting="pld", noise="os_entropy",
    tuning_accounted=False, events=["one table"],
)  # fmt: skip


def measured(refused_A: float, refused_B: float) -> Evaluation:
    """Groups A, B and C of 1,000, 2,000 and 2,000: B and C are refused alike, and nine of ten answers are right."""
    refused = np.concatenate(
        [np.arange(1000) < 1000 * refused_A, np.arange(2000) < 2000 * refused_B, np.arange(2000) < 2000 * refused_B]
    )
    predicted = 1 - refused.astype(int)
    return evaluate(
        predicted,
        labels_N=np.where(np.arange(5000) % 10 == 0, 1 - predicted, predicted),
        groups_N=[0] * 1000 + [1] * 2000 + [2] * 2000,
        class_names=["no", "yes"],
        group_names=["A", "B", "C"],
        generator=np.random.default_rng(0),
        num_replicates=100,
    )


def test_the_first_sentence_names_the_model_its_verdicts_what_it_leaves_to_a_person_and_the_model_without_privacy() -> (
    None
):
    claims = RunStatement(guarantee=GUARANTEE, measured=measured(0.6, 0.3))
    rejecting = replace(claims, measured=measured(0.32, 0.3))
    sentence, _ = claims_in_words(claims, claims, rejecting, method="dp_sgd")
    assert sentence.startswith(
        "The model to publish is dp_sgd, the default method, with a reject option: private at ε = 1.00 (δ = 10⁻⁵) for "
        "everything about one person, and fair, with a gap of 0.020 ("
    )
    assert f" with 95{NB}% confidence; at most 0.1 is called fair). 90.0{NB}% of its answers are right; " in sentence
    assert f"without privacy 90.0{NB}%, which may be shown as these people are invented. It leaves " in sentence
    seeded = replace(rejecting, guarantee=replace(GUARANTEE, noise="seeded: not private"))
    words = claims_in_words(claims, claims, seeded, method="dp_sgd")[0]
    assert "with a reject option: not private at ε = 1.00" in words


def test_the_second_sentence_names_both_shares_and_the_gap_of_the_model_that_refuses_nothing() -> None:
    claims = RunStatement(guarantee=GUARANTEE, measured=measured(0.6, 0.3))
    _, sentence = claims_in_words(claims, claims, claims, method="dp_sgd")
    assert sentence == (
        f"Without the reject option it says “no” to 60.0{NB}% of “A” and to 30.0{NB}% of all others: a gap of 0.300, "
        "not fair."
    )


def test_a_model_that_is_not_fair_is_called_so_where_it_is_to_be_published() -> None:
    claims = RunStatement(guarantee=GUARANTEE, measured=measured(0.6, 0.3))
    sentence, _ = claims_in_words(claims, claims, claims, method="dp_sgd")
    assert "for everything about one person, and not fair, with a gap of 0.300 (" in sentence


def test_the_demo_compares_three_private_methods_at_one_epsilon_with_fresh_noise() -> None:
    cells = cells_of(load_sweep(EXAMPLES / "demo.yaml"), folder=EXAMPLES)
    private = [cell.config for cell in cells if cell.config.is_private]
    assert [config.method for config in private] == [*["residual_votes"] * 2, "fairpate", "dp_sgd"]
    assert {(config.target.epsilon, config.target.delta, config.is_seeded) for config in private} == {(1, 1e-5, False)}
    assert len(cells) == 5


def test_the_model_with_the_reject_option_is_that_of_the_default_method() -> None:
    (rejecting,) = (
        cell.config
        for cell in cells_of(load_sweep(EXAMPLES / "demo.yaml"), folder=EXAMPLES)
        if cell.config.student.idp3
    )
    assert rejecting.method == default_method(["data.name=loans", "target.epsilon=1"])[0]
