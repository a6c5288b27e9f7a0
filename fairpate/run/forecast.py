"""Before a run: what it will spend, with the question that a large sum raises, and a forecast of what can be heard.

The forecast (`fairpate run --dry-run`, :class:`RunForecast`) is computed from public facts alone.

No private record is read, and no assumption is made about how far voters agree. The noise on the votes determines by
how many votes the winning class has to lead: the difference of two Gaussian noises of standard deviation sigma is at
most 1.645 sqrt(2) sigma 19 times in 20.

A run warns before it spends anything if it cannot beat the most common class (:func:`cautions`), for two reasons:

* The labels carry too little information even if all voters are right. Q labels that are right with probability p among
  C classes teach as much as W = Q ((p - 1/C) / (1 - 1/C))^2 noiseless labels (uniform label noise, to first order). If
  the most common class has the share m, W (1 - m) of them are of another class. Fewer than one teach nothing.
* A published run of the same method on the same data, at no smaller epsilon, did not beat m.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Column
from rich.text import Text

from aggregator.mechanism import ConfidentGnmax
from fairpate import types
from fairpate.config import ConfigError, DataConfig, Override
from fairpate.data import Dataset, entry_for, load_once
from fairpate.data.dataset import DatasetEntry
from fairpate.data.declaration import QUESTION, open_questions
from fairpate.methods import base, defaults
from fairpate.methods.base import Method, Price
from fairpate.pages import SEEN, counted, delta_caution, delta_text, epsilon_text, is_void_delta, meaning, percent
from fairpate.releases.directory import RunDirectoryError, read_json
from fairpate.releases.odometer import Odometer, spent
from fairpate.run.opened import OpenRun
from fairpate.terminal import Reporter, listing


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """The forecast of a run of ``method``, which `fairpate run --dry-run` displays: the run's cost, and the noise on
    its labels.

    ``epsilon``: the epsilon that the run would publish; None: no guarantee. ``votes``: the number of votes that decide
    a label. ``noise_stddev_votes``: the standard deviation of the noise on each count of votes. ``labels``: the number
    of public records that get a label. ``lead_needed``: the share of votes by which the winning class must lead to win
    despite the noise 19 times in 20 (above 1: it cannot). ``votes``, ``noise_stddev_votes``, ``labels`` and
    ``lead_needed`` are None for a method that releases no labels, and if the number of private records is not public.

    ``heard``: what stands out from the noise, in the words of `fairpate run`; None as for the numbers.
    ``caution``: why the model cannot be more accurate than always predicting the most common class. ``refused``: why
    this method cannot run; then all numbers are None.
    """

    method: str
    epsilon: float | None = None
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    lead_needed: float | None = None
    heard: str | None = None
    caution: str | None = None
    refused: str | None = None


def forecast(config: Method, dataset: Dataset, cost: Price | None) -> RunForecast:
    """Return the forecast of a run of ``config`` whose privacy cost is ``cost``. It is computed from public facts: the
    public records of ``dataset`` and its declaration. Private records are not read."""
    epsilon = None if cost is None else cost.epsilon
    (voting, majority), caution = known_beforehand(config, dataset), None
    if voting is None:
        return RunForecast(method=config.method, epsilon=epsilon)
    if not config.protects_attribute_only:  # otherwise the votes are about groups, not about classes
        caution = too_little_to_learn(voting, dataset.num_classes, majority)
    facts = {name: getattr(voting, name) for name in ("votes", "noise_stddev_votes", "labels", "lead_needed")}
    heard = unheard(config, voting) or voting.lead_words
    return RunForecast(method=config.method, epsilon=epsilon, heard=heard, caution=caution, **facts)


# Public labels; the share of the most common class among fewer is mostly chance.
_FEWEST_LABELS = 10


@dataclass(frozen=True, kw_only=True)
class Majority:
    """The share of the most common class among records, which the accuracy of a useful model must exceed; ``source``
    says in words where the number is from."""

    share: float
    source: str


def known_beforehand(config: Method, dataset: Dataset) -> tuple[base.ExpectedVotes | None, Majority | None]:
    """Return what public records and the data set's declaration (its public description) show about a run of
    ``config``. The first item is the expected votes: how many votes decide a label, with how much noise. The second is
    the share of the most common class.

    The votes are None without a public number of private records; the share is None without declared class shares or
    enough labels of public records.
    """
    try:
        entry: DatasetEntry | None = entry_for(config.data)
    except types.DataSettingsError:
        entry = None
    # A data set that was given from Python, or comes with votes, has no public entry.
    if entry is not None and entry.name != dataset.name:
        entry = None
    labels = dataset.public.y.numpy()
    known, majority = labels[labels >= 0], None  # -1 marks a public record without a label
    if entry is not None and entry.class_shares:
        majority = Majority(share=max(entry.class_shares), source="the declaration")
    elif len(known) >= _FEWEST_LABELS:
        majority = Majority(share=float(np.bincount(known).max() / len(known)), source="labels of public records")
    if entry is None or entry.rows is None:
        return None, majority
    # The publisher's count of what is protected, records or persons, less those of the other splits.
    others = [split for name, split in dataset.splits.items() if name != "private"]
    by_person = dataset.unit == "person" and entry.persons is not None
    apart = sum(split.num_protected if by_person else len(split) for split in others)
    # At least one: a publisher's count may be below the records of the other splits.
    private = entry.protected(config.data.options, config.data.unit)[0] - apart
    return config.voting(dataset, max(1, private)), majority


def other_voters(overrides: Sequence[Override], chosen: str) -> list[RunForecast]:
    """Return forecasts of runs on the same data by methods with other kinds of voters, which label public records:
    teachers, nearest neighbours or single records. ``chosen`` is the method that is left out.

    ``overrides`` are the user's settings, including the data set; each method's other settings follow from them. The
    forecast in which the winning class needs the smallest lead comes first, methods that cannot run come last.
    DataError as in :func:`fairpate.data.load_data`.
    """
    found = []
    for method in types.stepwise([name for name in base.voters_of_each_kind() if name != chosen]):
        try:
            config = defaults.resolved(overrides, method)
            config.require_trainable()
            # Several kinds see the pool through the same embedding, and one may take a minute to compute.
            dataset = load_once(config.data)
            config.check_data(dataset)
            found.append(forecast(config, dataset, config.planned_cost(dataset)))
        except (ConfigError, types.DataSettingsError) as error:
            found.append(RunForecast(method=method, refused=str(error)))
    return sorted(found, key=lambda each: math.inf if each.lead_needed is None else each.lead_needed)


def describe(
    data: str,
    cost: Price | None,
    spent: str | None,
    found: Sequence[RunForecast],
    *,
    why: str | None = None,
    caution: str = "",
    with_metrics: bool = False,
) -> Group:
    """Return what `fairpate run --dry-run` displays: a sentence on the privacy cost of the run on the data set
    ``data``, and a table of the forecasts ``found``. The first forecast is that of the run itself.

    ``cost``: the privacy cost; None: the run has no guarantee. ``spent``: None or, if the run costs nothing more, the
    reason, which the sentence then states instead of the cost. ``why``: a sentence on why this method is run, if the
    user named none. ``caution``: a caution about delta. ``with_metrics``: the cost covers the published metrics too.
    """
    run = found[0]
    if spent is not None:
        sentence = f"{run.method} on {data} would spend nothing more: {spent}."
    elif cost is None:
        sentence = f"{run.method} on {data} would give no privacy guarantee."
    else:
        sentence = f"{run.method} on {data} would spend {cost_words(cost)}, {cost.relation}. " + meaning(
            cost.epsilon, cost.delta, unit=cost.unit, relation=cost.relation, seen=SEEN[with_metrics]
        )
    right = [Column(name, justify="right") for name in ("epsilon", "votes a label", "noise", "lead needed", "labels")]
    table = listing("method", "who votes", *right)
    for each in found:
        voters = base.voters_of_each_kind().get(
            each.method, "nobody" if each.votes is None and not each.refused else "teachers"
        )
        numbers = [""] * 5
        if each.refused is None:
            numbers[0] = "none" if each.epsilon is None else epsilon_text(each.epsilon)
        if each.votes is not None and each.lead_needed is not None:
            lead = percent(each.lead_needed) if each.lead_needed <= 1 else "never"
            numbers[1:] = [f"{each.votes:,}", f"{each.noise_stddev_votes:.3g}", lead, f"{each.labels:,}"]
        table.add_row(each.method, voters, *numbers)
    notes = [f"{each.method}: {each.refused or each.caution}" for each in found if each.refused or each.caution]
    if why is not None:
        notes.append(why)
    if run.heard:
        notes.append(f"noise: {run.heard}{'' if run.heard.endswith('.') else '.'}")
    # How often a label survives its noise says little about how often voters are right.
    notes += ["Nothing was trained, charged or written.", "Accuracy is not forecast."]
    if any(each.votes is not None for each in found):
        notes.append(
            "lead needed: if a class leads by this share of the votes (of small teachers: on average over the queries, "
            "to whose counts one rule is fitted), it also leads with noise 19 times in 20."
        )
    sentence += f"\n{caution}" if caution else ""
    return Group(Text(f"{sentence}\n"), table, Text("\n" + "\n".join(notes)))


def announce_votes(opened: OpenRun) -> None:
    """Print cautions, and which lead of the votes stands out from their noise. If none does, ask for confirmation,
    unless the release was charged already: the run then loses nothing more."""
    config, reporter = opened.config, opened.reporter
    voting, majority = known_beforehand(config, opened.dataset)
    for words in cautions(opened, voting, majority):
        reporter.note("caution", words)
    if voting is None or opened.log.stored() is not None:
        return
    if question := unheard(config, voting):
        reporter.consent(question)
        return
    reporter.note("noise", voting.lead_words)
    if voting.fitted_together and config.leaves_room:
        one = percent(voting.lead_of_one) if voting.lead_of_one <= 1 else "no lead"
        reporter.note("noise", f"in a single answer of a service, {one} of them does")


def cautions(opened: OpenRun, voting: base.ExpectedVotes | None, majority: Majority | None) -> list[str]:
    """Return the reasons why the model of a run cannot be more accurate than always predicting the most common class;
    empty if no reason is known. Other arguments as :func:`known_beforehand` returns them."""
    config, run, found = opened.config, opened.run, list[str]()
    epsilon = config.target.stated.get("epsilon")
    # Runs in the folder of this one: others are not searched for.
    for path in sorted(run.root.parent.glob("*/public/record.json")):
        try:
            record = read_json(path)
        except RunDirectoryError:  # damaged, or of another program
            continue
        name, share, accuracy = path.parent.parent.name, record.get("majority_accuracy"), record.get("accuracy")
        if path == run.record or record.get("data") != config.data.name or share is None or accuracy is None:
            continue
        majority = majority or Majority(share=share, source=f"the test records of {name}")
        # JSON has no infinity: null means infinite.
        other = math.inf if record.get("epsilon") is None else record["epsilon"]
        is_dearer = epsilon is not None and other >= epsilon
        if record.get("method") == config.method and is_dearer and accuracy <= share:
            found.append(
                f"an earlier run of {config.method}, {name}, did not beat the most common class at epsilon "
                f"{epsilon_text(other)}: {percent(accuracy)} of {percent(share)}"
            )
    # Where the attribute alone is protected, the votes are about groups, not about classes.
    if voting is not None and not config.protects_attribute_only:
        words = too_little_to_learn(voting, opened.dataset.num_classes, majority)
        found += [] if words is None else [words]
    return found


def too_little_to_learn(voting: base.ExpectedVotes, num_classes: int, majority: Majority | None) -> str | None:
    """Return, in words, why a student cannot learn more than the most common class from noisy labels, even if all
    voters are right; None if it may learn more.

    ``voting``: the number of labels, the votes that decide a label, and their noise. ``majority``: the share of the
    most common class; if it is None, all classes are assumed to be equally common.
    """
    # All voters agree: no other votes survive the noise more often.
    agreed_1C = np.array([[voting.votes, *[0] * (num_classes - 1)]])
    # Only the noise on the counts is read: every query passes a threshold of -inf.
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    right = float(noisy.right_probability(agreed_1C, np.zeros(1, dtype=np.int64))[0])
    # The labels without noise that teach as much.
    worth = voting.labels * max(0.0, (right - 1 / num_classes) / (1 - 1 / num_classes)) ** 2
    share = 1 / num_classes if majority is None else majority.share
    if worth * (1 - share) >= 1:
        return None
    known = "" if majority is None else f", which is {percent(share)} of records by {majority.source}"
    return (
        f"cannot be expected to beat the most common class{known}: under this noise "
        f"{counted(voting.labels, 'label')} stand for {worth:.2g} without noise even if all voters are right, so for "
        f"{worth * (1 - share):.2g} of another class"
    )


def unheard(config: Method, voting: base.ExpectedVotes) -> str | None:
    """Return, in words, that no lead of the votes stands out from their noise, and what would; None if some lead
    does."""
    if voting.lead_needed <= 1:
        return None
    others, last = list[str](), f"an epsilon about {voting.lead_needed:.1f} times as large"
    if config.trains_teachers:
        others.append(f"{math.ceil(voting.votes * voting.lead_needed):,} teachers")
        # The noise of single labels grows with the root of their number.
        if not voting.fitted_together and (queries := int(voting.labels / voting.lead_needed**2)):
            others.append(counted(queries, "query", "queries"))
    would_do = f"{', '.join(others)} or {last}" if others else last
    return (
        f"Even if all {voting.votes:,} voters agree, the noise of {voting.noise_stddev_votes:.3g} votes on each count "
        f"hides it, so epsilon would be spent on chance: {would_do} would be heard."
    )


def cost_words(cost: Price) -> str:
    """Return a cost in the words of `fairpate run`, of its `--dry-run` and of what it spent at its end."""
    return f"at most ε = {epsilon_text(cost.epsilon)} (δ = {delta_text(cost.delta)}) of each {cost.unit}"


def announce_spending(cost: Price | None, data: str, reporter: Reporter, *, is_own: bool) -> None:
    """Print what a release on the data set ``data`` may cost and what earlier releases cost; ask the user for
    confirmation if the total exceeds a limit.

    ``is_own``: the data set is the user's own. If ``cost`` is None, nothing is printed: the run has no guarantee, or
    its noise is seeded and so not private.
    """
    if cost is None:
        return
    odometer = Odometer()
    reporter.note("spends", f"{cost_words(cost)}; so far {spent(data, odometer, delta=cost.delta)}")
    if question := question_above(data, planned=cost.epsilon, odometer=odometer, delta=cost.delta, is_own=is_own):
        reporter.consent(question)


def public_units(config: Method, dataset: Dataset) -> int | None:
    """Return the declared number of protected units, which is public; None if none is declared."""
    return config.declared_units if dataset.declared_units is None else dataset.declared_units


def announce_delta(delta: float, units: int | None, unit: types.Unit, reporter: Reporter, *, is_own: bool) -> None:
    """Print a caution if ``delta`` is large for the public number of ``units`` (None: not public). Ask for confirmation
    if it is so large that a guarantee says next to nothing, and the records are the user's own (``is_own``)."""
    if caution := delta_caution(delta, units, unit):
        reporter.note("caution", caution)
        if is_own and is_void_delta(delta, units):
            reporter.consent(
                f"δ = {delta_text(delta)} is so large that the guarantee says next to nothing about one {unit}; lower "
                "it with --delta."
            )


def draft_caution(data: DataConfig) -> str:
    """Return a caution if the declaration of the records ``data`` is a draft whose questions were not all answered;
    otherwise an empty text."""
    if data.declaration is None:
        return ""
    path = data.declaration.path
    if not (questions := open_questions(path.read_text(encoding="utf-8"))):
        return ""
    return (
        f"{path}: {counted(questions, 'question')} of the draft to answer (the lines with `{QUESTION}`): an answer may "
        "change what is read and whom the guarantee protects."
    )


# Total epsilon of releases on the user's own records above which a command asks for confirmation, if no limit is set:
# at this epsilon a guess about a record improves by a factor of at most 22,000.
ASK_ABOVE = 10.0


def question_above(data: str, *, planned: float, odometer: Odometer, delta: float, is_own: bool) -> str | None:
    """Return the question to ask the user before releases on ``data`` that cost an epsilon of ``planned`` in sum; None
    if no question is needed.

    A question is needed if the total with earlier releases exceeds the operator's limit, which will refuse some of the
    releases. Without a limit it is needed above :data:`ASK_ABOVE`, if the records are the user's own (``is_own``).
    """
    before = max((total.epsilon for total in odometer.totals(delta=delta, data=data) if total.releases), default=0.0)
    limit, after = min(odometer.limits(data).values(), default=None), before + planned
    if after <= (ASK_ABOVE if limit is None else limit) or (limit is None and not is_own):
        return None
    bound = (
        f"{ASK_ABOVE:g}, and no limit is set" if limit is None else f"the limit of {limit:g}, which refuses the rest"
    )
    return (
        f"The releases on {data} may come to ε = {epsilon_text(after)} in sum ({epsilon_text(before)} so far), above "
        f"{bound}."
    )
