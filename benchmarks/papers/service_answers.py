"""How often the answers of a service are right on test records, after a run that kept a share of its target for them.

    FAIRPATE_DATA=... python benchmarks/papers/service_answers.py [--data adult:5000] [--seeds 0 1] [--keep 0.5]

Each run of FairPATE has its defaults and seeded noise. It is served twice over HTTP: as it is, and by votes alone,
without free answers. ``charged`` are the queries that used votes, ``answered_free`` those that the released rule
answered. ``label_accuracy`` is the share of right labels among all answers to test records,
``accuracy_without_offsets`` that among the voted ones if the class with most noisy votes were named, ``accuracy`` that
of the released model on all test records. ``gap`` is the largest difference between the groups' shares of a label (one
group against the rest) among all that the service answers, those to the run's own queries included, which its gate
bounds; ``gap_of_new`` is that of the test records alone, ``gap_of_labels`` that of their true labels. Teachers vote in
this process: no cluster is needed.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import measured
import numpy as np
import numpy.typing as npt
import papers
import torch

from aggregator.client import AggregatorClient
from aggregator.service.actor import ServiceSettings
from aggregator.service.writer import no_public_labels
from fairpate.data import Dataset
from fairpate.fairness.rates import dp_one_vs_rest
from fairpate.http_server import HttpServer
from fairpate.methods.defaults import resolved
from fairpate.methods.pate import FairPate
from fairpate.methods.voting import StandingVoters
from fairpate.releases.directory import RunDirectory, read_json, read_votes
from fairpate.run.folder import as_trained, load_for
from fairpate.run.run import run_method
from fairpate.run.serve import open_backend
from fairpate.terminal import Reporter
from fairpate.types import IntArray
from teachers.ensemble import collect_votes
from teachers.work import BlockPool


class VotesHere(FairPate):
    """FairPATE whose teachers vote in this process, also for a service, so that no cluster is needed."""

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        ensemble = self.train_teachers(dataset, run.teachers, BlockPool())
        return StandingVoters(
            ensemble=ensemble.digest,
            ask=lambda features, _: collect_votes(ensemble, torch.from_numpy(features)),
            collected=read_votes(run.votes),
        )


def measure(config: FairPate, *, num_queries: int) -> dict[str, dict[str, Any]]:
    """Run ``config``, serve it twice, once with free answers and once by votes alone, post ``num_queries`` test records
    to each service, and return what the answers are worth, by how they are given."""
    run = run_method(config, Reporter(quiet=True))
    copy = replace(run, root=Path(shutil.copytree(run.root, run.root.with_name("copy"))))
    dataset = as_trained(run, config, load_for(run, config.data))
    found = {
        "": answers(run, config, dataset, num_queries=num_queries, by_votes_alone=False),
        ",votes_alone": answers(copy, config, dataset, num_queries=num_queries, by_votes_alone=True),
    }
    fixed = {
        "accuracy": read_json(run.record)["accuracy"],
        "unit": dataset.unit,
        "relation": "add or remove one",
        "delta": config.target.delta,
    }
    return {name: numbers | fixed for name, numbers in found.items()}


def answers(
    run: RunDirectory, config: FairPate, dataset: Dataset, *, num_queries: int, by_votes_alone: bool
) -> dict[str, Any]:
    """Serve ``run`` over HTTP, post test records until the budget has no room, and return what the answers are
    worth."""
    rows = np.random.default_rng(config.seed).permutation(len(dataset.test))[:num_queries]
    x, truth_Q, groups_Q = (values[rows].numpy() for values in (dataset.test.x, dataset.test.y, dataset.test.z))
    backend = open_backend(run.root, VotesHere.model_construct(**dict(config)))
    if by_votes_alone:
        backend = replace(backend, public_labels=no_public_labels)
    own = len(backend.ledger.keys)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = HttpServer(backend.app, ServiceSettings(port=port))
    try:
        asked = [
            {"features": row, "group": dataset.group_names[group]}
            for row, group in zip(x.tolist(), groups_Q.tolist(), strict=True)
        ]
        with AggregatorClient(f"http://127.0.0.1:{port}", timeout_s=600) as client:
            replies = [reply for batch in client.ask_many(asked) for reply in batch.replies]
    finally:
        server.stop()
        backend.close()
    replies = [reply for reply in replies if reply.status != "over_budget"]
    ledger, labels_Q = backend.ledger, np.array([-1 if reply.label is None else reply.label for reply in replies])
    truth_Q, groups_Q, free_Q = truth_Q[: len(replies)], groups_Q[: len(replies)], np.array([r.free for r in replies])
    answered_Q, right_Q = labels_Q >= 0, labels_Q == truth_Q
    voted_Q = answered_Q & ~free_Q
    counts_QC = np.array([ledger.outcome_of[r.key].counts for r, voted in zip(replies, voted_Q, strict=True) if voted])
    # All that the service has answered, which its gate bounds: the run's own queries too.
    group_of = dict(zip(ledger.keys, ledger.groups, strict=True)) | ledger.free
    shown = [(backend.session.stored(key), group) for key, group in group_of.items()]
    labels, groups = zip(
        *[(each.label, group) for each, group in shown if each and each.label is not None], strict=True
    )
    counts_GC = table_of(np.array(labels), np.array(groups), dataset)
    return {
        "submitted_own": own,
        "submitted": len(replies),
        "charged": len(ledger.keys) - own,
        "answered_free": int((answered_Q & free_Q).sum()),
        "answered": int(answered_Q.sum()),
        "label_accuracy": float(right_Q[answered_Q].mean()),
        "accuracy_free": float(right_Q[answered_Q & free_Q].mean()) if free_Q.any() else None,
        "accuracy_voted": float(right_Q[voted_Q].mean()),
        "accuracy_without_offsets": float((counts_QC.argmax(axis=1) == truth_Q[voted_Q]).mean()),
        "majority_accuracy": float(np.bincount(truth_Q).max() / len(truth_Q)),
        "gap": dp_one_vs_rest(counts_GC[:, None, :]).value,
        "gap_of_new": dp_one_vs_rest(table_of(labels_Q[answered_Q], groups_Q[answered_Q], dataset)[:, None, :]).value,
        "gap_of_labels": dp_one_vs_rest(table_of(truth_Q, groups_Q, dataset)[:, None, :]).value,
    }


def table_of(labels_Q: IntArray, groups_Q: IntArray, dataset: Dataset) -> npt.NDArray[np.float64]:
    """Return how often each group has each label, shape (G, C)."""
    counts_GC = np.zeros((dataset.num_groups, dataset.num_classes))
    np.add.at(counts_GC, (groups_Q, labels_Q), 1)
    return counts_GC


def main() -> None:
    """Measure every data set and seed, and write the file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["adult:5000"], help="NAME or NAME:PUBLIC_RECORDS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help="write docs/results/service_answers.json")
    options = parser.parse_args()
    cells: measured.Cells = {}
    for data, seed in itertools.product(options.data, options.seeds):
        name, _, public = data.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            said = [f"data.name={name}", f"seed={seed}", f"target.epsilon={options.epsilon}", "noise=seeded"]
            said += [f"aggregator.keep={options.keep}", "ray.num_actors=0", f"out={Path(folder) / 'run'}"]
            said += [f"data.num_public={public}"] if public else []
            config = resolved(said, "fairpate")
            assert isinstance(config, FairPate)
            found = measure(config, num_queries=options.queries)
        for way, numbers in found.items():
            print(f"{data}, seed {seed}{way}: {numbers}", flush=True)
            papers.add(cells, f"{name}/keep={options.keep:g},epsilon={options.epsilon:g}{way}", seed, numbers)
    if options.write:
        measured.write("service_answers", command="python " + " ".join([*sys.argv[:1], *sys.argv[1:]]), cells=cells)


if __name__ == "__main__":
    main()
