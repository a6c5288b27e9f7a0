"""`fairpate demo`: private methods side by side on the embedded loans, and what may be claimed of the best of them.

``examples/demo.yaml`` says what is compared. The private model that is right most often on validation records is then
measured again with a reject option: a rule on its answers, which needs no private record and so costs no privacy. Each
number of the table and of the sentences below it is read from what the runs published.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fairpate.cli.base import EXAMPLES
from fairpate.data import Dataset, load_data
from fairpate.fairness.rates import DEFAULT
from fairpate.files import write_atomically
from fairpate.methods.base import Method
from fairpate.pages import counted, decimal, epsilon_text, interval, percent
from fairpate.report.records import RunStatement
from fairpate.run.compare import compare_methods, comparison_outcome
from fairpate.run.context import RunDirectory, read_statement, write_json
from fairpate.run.folder import finished_run
from fairpate.run.learn import Assessment, assess, load_for, read_student
from fairpate.run.publication import read_claims, write_reports
from fairpate.run.sweep import load_sweep
from fairpate.terminal import Output, facts, say, waiting
from fairpate.types import FairRule, GateRule
from fairpate.words import delta_text
from student.student import Student, save_student

# Some way below what pages call fair, so that the whole interval of the gap may lie below it.
_REJECT = GateRule(max_disparity=0.8 * FairRule().limit, min_count=25)
_BEGIN = """\
Who gets a loan without a guarantor? 20,000 invented customers applied 35,188 times. Three methods learn from them who
pays on time, each with a privacy budget of ε = 1 for everything about one customer; then a model learns the same
without privacy. The best private one gets a reject option, which leaves some applications to a person so that no age
group is refused much more often than another. This takes about a minute."""


@dataclass(frozen=True, kw_only=True)
class _Model:
    """The published model of a finished run, its configuration, and its guarantee and metrics."""

    run: RunDirectory
    config: Method
    claims: RunStatement

    def assessed(self, records: Dataset, *, rule: GateRule | None = None) -> tuple[Student, Assessment]:
        """The model with a reject option under ``rule``, and its metrics on the test part of ``records``."""
        placed = load_for(self.run, self.config.data, lambda _: records)
        student = read_student(self.run, is_free=False)
        student = replace(student, card=replace(student.card, idp3=rule))
        return student, assess(student, placed, self.config.evaluation, seed=self.config.seed)

    def with_reject_option(self, records: Dataset, root: Path) -> tuple[RunStatement, Path]:
        """Write the model with its reject option and its report below ``root``; return its claims and the report."""
        student, assessment = self.assessed(records, rule=_REJECT)
        # The published part of a run alone, so that no command takes it for another release.
        run = RunDirectory(root=root)
        run.public.mkdir(parents=True, exist_ok=True)
        for name in ("statement", "embedding", "environment"):
            shutil.copyfile(getattr(self.run, name), getattr(run, name))
        write_json(run.metrics, assessment.to_json())
        write_reports(
            run,
            title=records.name,
            num_public_records=len(records.public),
            spending=None,
            statement=read_statement(run),
            assessment=assessment,
            num_training_labels=student.card.num_training_labels,
            private_population=None,
            without_privacy=None,
        )
        write_atomically(run.student, partial(save_student, student))
        return read_claims(run), run.public_report


def demo(out: Path) -> Output:
    """Compare the methods in ``out``, or read what an earlier demo left there, and state what came out."""
    say(_BEGIN)
    comparison = compare_methods(load_sweep(EXAMPLES / "demo.yaml"), out=out, title="demo")
    if comparison.failed:
        return comparison_outcome(comparison)
    models = [
        _model(comparison.folder.root / "runs" / f"{row.method}-{row.data}-{row.digest}") for row in comparison.rows
    ]
    # The sweep also has one with a reject option, for its page; here the option is put on the chosen model.
    models = [model for model in models if model.config.student.idp3 is None]
    private = [model for model in models if model.claims.guarantee.protects]
    (without,) = (model for model in models if model not in private)
    with waiting("reject option"):
        # As they are in the table: each model places them by the embedding that it keeps.
        records = load_data(without.config.data.model_copy(update={"embedding": None}))
        unseen = replace(records, test=records.validation)
        # By validation records: a model that was chosen by test records looks better on them than it is.
        chosen = max(private, key=lambda model: model.assessed(unseen)[1].headline.accuracy)
        rejecting, report = chosen.with_reject_option(records, out / "chosen")
    why = f"right most often of {len(private)} on {counted(len(records.validation), 'validation record')}"
    sentences = [
        accuracy_sentence(chosen.claims, without.claims, method=chosen.config.method, why=why),
        fairness_sentence(chosen.claims, rejecting),
    ]
    files = {"all models": out / comparison.folder.report.name, "this model": report}
    rows = {
        **{model.config.method: model.claims for model in private},
        f"{without.config.method}, not private": without.claims,
        f"{chosen.config.method}, may reject": rejecting,
    }
    return Output(
        facts={
            "models": {name: _numbers(claims) for name, claims in rows.items()},
            "chosen": chosen.config.method,
            "fair_at": chosen.claims.measured.fair_at.limit,
            "sentences": sentences,
            "files": files,
        },
        words=Group(
            _table(rows),
            *(Text(f"{sentence}\n") for sentence in sentences),
            facts([*((name, str(path)) for name, path in files.items()), ("next", "fairpate new mine")]),
        ),
    )


def _model(root: Path) -> _Model:
    run, config = finished_run(root)
    return _Model(run=run, config=config, claims=read_claims(run))


def _numbers(claims: RunStatement) -> dict[str, float]:
    measured = claims.measured
    return {
        "epsilon": claims.guarantee.epsilon,
        "accuracy": measured.accuracy,
        "disparity": measured.disparity,
        "coverage": measured.coverage,
    }


def _table(rows: Mapping[str, RunStatement]) -> Table:
    measured = next(iter(rows.values())).measured
    table = Table(counted(measured.num_records, "test record"), box=SIMPLE_HEAD)
    for name in ("ε per person", "accuracy", "parity gap", "answered"):
        table.add_column(name, justify="right", no_wrap=True)
    constant = {"epsilon": 0.0, "accuracy": measured.majority_accuracy, "disparity": 0.0, "coverage": 1.0}
    numbers = {name: _numbers(claims) for name, claims in rows.items()}
    for name, each in (numbers | {f"always “{measured.majority_class}”": constant}).items():
        shown = (percent(each["accuracy"]), decimal(each["disparity"]), percent(each["coverage"]))
        table.add_row(name, epsilon_text(each["epsilon"]), *shown)
    return table


def accuracy_sentence(chosen: RunStatement, without: RunStatement, *, method: str, why: str) -> str:
    """State the guarantee and the accuracy of the chosen method, and the same model's accuracy without privacy."""
    guarantee = chosen.guarantee
    return (
        f"{method}, {why}, is {guarantee.strength[0]} at ε = {guarantee.epsilon_words} (δ = "
        f"{delta_text(guarantee.delta)}) for {guarantee.protected}: {percent(chosen.measured.accuracy)} of its answers "
        f"are right, and {percent(without.measured.accuracy)} of those of the same model that learned from the same "
        "records without privacy."
    )


def fairness_sentence(claims: RunStatement, rejecting: RunStatement) -> str:
    """State the gap of a model without and with its reject option, and what the rule calls either."""
    measured, less = claims.measured, rejecting.measured.measured(DEFAULT)
    gap = measured.measured(DEFAULT)
    answer, group = gap.where.removeprefix("predicted ").split(": ", 1)
    place, code = measured.group_names.index(group), measured.class_names.index(answer)
    rates_G = np.array(measured.rates_GC)[:, code]
    # Rates are over answered records, so that those of several groups are joined in proportion to these.
    others_G = np.array([each.num_answered for each in measured.groups]) * (np.arange(len(rates_G)) != place)
    return (
        f"It says “{answer}” to {percent(rates_G[place])} of the group “{group}” and to "
        f"{percent(rates_G @ others_G / others_G.sum())} of all others, a gap of {decimal(gap.value)}: "
        f"{claims.fairness}, as a gap counts as fair here up to {measured.fair_at.limit:g}, with its whole 95 % "
        f"interval; with a reject option that leaves {percent(1 - rejecting.measured.coverage)} of the records to a "
        f"person, the gap is {decimal(less.value)} (interval {interval(less)}): {rejecting.fairness}, and "
        f"{percent(rejecting.measured.accuracy)} of its answers are right."
    )
