"""Who could vote on a data set at an epsilon: every kind of voters with settings that fit, and what to expect of it.

Settings are those of :mod:`fairpate.methods.fitted`, from public facts; the noise is the least that the target allows.
What is expected follows from an assumption, the same for all kinds: of those who vote on a label a share of mean
``agreement`` and standard deviation ``spread`` is right. It is a forecast of noise, not of accuracy: whether models on
shards, or records that lie near, agree that often is what no public fact says.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from aggregator.gnmax import ConfidentGnmax
from fairpate.app.planning.outlook import known_majority, public_size, too_little_to_learn
from fairpate.app.planning.plan import AGREEMENT, SPREAD, assumed_profile, worth_of
from fairpate.config import ConfigError, DataConfig, EmbeddingConfig, PrivacyTarget
from fairpate.data import Dataset, load_dataset
from fairpate.meaning import exact_text
from fairpate.methods.fitted import resolved
from fairpate.steps import stepwise

VOTERS = {
    "weighted_votes": "every record, a vector",
    "record_votes": "every record, one count",
    "private_knn": "nearest records of a secret sample",
    "fairpate": "models trained on shards",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One kind of voters within the target. ``refused`` says why there is none; the numbers are then null.

    ``votes`` decide one label, under noise of ``noise_stddev_votes``; ``labels`` of public records result, of which a
    share of ``winner_kept`` is expected to be the class with most votes, and one of ``right`` to be right, as assumed;
    ``worth``: how many noiseless labels they stand for. ``caution`` says why its model cannot beat the most common
    class, where that is known.
    """

    method: str
    voters: str
    command: str
    votes: int | None = None
    noise_stddev_votes: float | None = None
    labels: int | None = None
    winner_kept: float | None = None
    right: float | None = None
    worth: float | None = None
    caution: str | None = None
    refused: str | None = None


def candidates(
    data: DataConfig,
    said: str,
    *,
    epsilon: float,
    delta: float,
    agreement: float | None = None,
    spread: float | None = None,
) -> list[Candidate]:
    """All kinds, the most worth first; of the records only public ones are read. ``said`` names the data in commands.

    None for ``agreement`` and ``spread`` is 0.75 and 0.2. DataError as :func:`fairpate.data.load_dataset`.
    """
    assumed = {
        "agreement": AGREEMENT if agreement is None else agreement,
        "spread": SPREAD if spread is None else spread,
    }
    assumed_profile(num_teachers=2, num_classes=2, num_rows=1, **assumed)  # refused before minutes of work
    # The embedding of a pool may take a minute, and several kinds have the same one.
    load = cache(lambda embedding: load_dataset(data.model_copy(update={"embedding": embedding})))
    found = [
        _candidate(method, data, said, load, epsilon=epsilon, delta=delta, **assumed)
        for method in stepwise(list(VOTERS))
    ]
    return sorted(found, key=lambda each: math.inf if each.worth is None else -each.worth)


def _candidate(
    method: str,
    data: DataConfig,
    said: str,
    load: Callable[[EmbeddingConfig | None], Dataset],
    *,
    epsilon: float,
    delta: float,
    agreement: float,
    spread: float,
) -> Candidate:
    at = "" if delta == PrivacyTarget.model_fields["delta"].default else f" --delta {exact_text(delta)}"
    files = "" if data.data_dir is None else f" --data-dir {shlex.quote(str(data.data_dir))}"
    command = f"fairpate run --data {shlex.quote(said)} --epsilon {exact_text(epsilon)}{at} --method {method}{files}"
    known: dict[str, Any] = {"method": method, "voters": VOTERS[method], "command": command}
    try:
        # Field by field: a whole section would take the place of the embedding that a run chooses.
        named = data.model_dump(mode="json", exclude_unset=True)
        fields = [f"data.{field}={json.dumps(value)}" for field, value in named.items()]
        config = resolved([*fields, f"target.epsilon={epsilon}", f"target.delta={delta}"], method)
        config.require_trainable()
        dataset = load(config.data.embedding)
        voting = config.voting(dataset, public_size(data, dataset))
    except ConfigError as error:
        return Candidate(**known, refused=str(error))
    profile = assumed_profile(
        num_teachers=voting.votes, num_classes=dataset.num_classes, agreement=agreement, spread=spread
    )
    noisy = ConfidentGnmax(
        threshold=-math.inf, threshold_stddev_votes=1.0, noise_stddev_votes=voting.noise_stddev_votes
    )
    kept, right = (
        float(noisy.right_probability(profile.votes_RC, class_R).mean())
        for class_R in (profile.votes_RC.argmax(axis=1), profile.right_R)
    )
    return Candidate(
        **known,
        **asdict(voting),
        winner_kept=kept,
        right=right,
        worth=worth_of(voting.labels, right, num_classes=dataset.num_classes),
        caution=too_little_to_learn(voting, dataset.num_classes, known_majority(data, dataset)),
    )


def describe_candidates(found: Sequence[Candidate], *, epsilon: float, chosen: str) -> Group:
    """A table, the command of each, and the method that a run takes of itself: ``chosen``."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("method", "who votes", "votes a label", "noise", "labels", "winner kept", "worth"):
        table.add_column(name, justify="left" if name in ("method", "who votes") else "right")
    for each in found:
        table.add_row(each.method, each.voters, *_numbers(each))
    lines = [f"  {each.command}" if each.refused is None else f"  {each.method}: {each.refused}" for each in found]
    lines += [f"  {each.method}: {each.caution}" for each in found if each.caution]
    lines += [
        "",
        "winner kept: the share of labels that are the class with most votes, unchanged by noise; no accuracy.",
    ]
    lines += ["", f"Where no method is named: {chosen}."]
    title = f"Who could vote, each at a published epsilon of {epsilon:g}, with settings from public facts:"
    return Group(Text(title), table, Text("\n".join(["", *lines, ""])))


def _numbers(each: Candidate) -> list[str]:
    if each.refused is not None:
        return ["–"] * 5
    noise, kept, worth = each.noise_stddev_votes or 0.0, each.winner_kept or 0.0, each.worth or 0.0
    return [f"{each.votes}", f"{noise:.3g}", f"{each.labels}", f"{kept:.1%}", f"{worth:.0f}"]
