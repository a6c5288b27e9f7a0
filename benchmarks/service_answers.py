"""How often the answers of a service are right on test records, after a run that kept a share of its target for them.

    FAIRPATE_DATA=... nice -n 19 python benchmarks/service_answers.py [--data adult:5000] [--seeds 0 1 2] [--keep 0.5]

Each row is one run of FairPATE with its defaults and seeded noise, and one service of it over HTTP, to which test
records are posted. ``charged`` are the queries that used votes, ``free`` those that the released rule answered.
``right`` is the share of right labels among all answers, ``student`` the accuracy of the released model on all test
records, ``gap`` the largest difference between the groups' shares of a label among all answers, in one-vs-rest.
``without_offsets`` is the share of right labels if the class with most noisy votes is named: of the run's own queries,
whose truth is that of the public pool, as a service without offsets would repeat them. Teachers vote in this process.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import numpy as np
import papers
import torch

from aggregator.client import AggregatorClient
from aggregator.service.server import ServiceSettings
from fairpate.data import Dataset
from fairpate.fairness.rates import dp_one_vs_rest
from fairpate.http_server import HttpServer
from fairpate.methods.base import resolved
from fairpate.methods.pate import FairPate, StandingVoters
from fairpate.run import context
from fairpate.run.context import RunDirectory
from fairpate.run.folder import as_trained, load_for
from fairpate.run.run import run_method
from fairpate.run.serve import open_backend
from fairpate.terminal import Reporter
from teachers.ensemble import BlockPool, collect_votes


class VotesHere(FairPate):
    """FairPATE whose teachers vote in this process, also for a service, so that no cluster is needed."""

    def standing_voters(self, dataset: Dataset, run: RunDirectory) -> StandingVoters:
        ensemble = self.train_teachers(dataset, run.teachers, BlockPool())
        return StandingVoters(
            ensemble=ensemble.digest,
            ask=lambda features, _: collect_votes(ensemble, torch.from_numpy(features)),
            collected=context.read_votes(run.votes),
        )


def measure(config: FairPate, *, num_queries: int) -> dict[str, Any]:
    """Run ``config``, serve it, post ``num_queries`` test records, and return what the answers are worth."""
    run = run_method(config, Reporter(quiet=True))
    dataset = as_trained(run, config, load_for(run, config.data))
    rows = np.random.default_rng(config.seed).permutation(len(dataset.test))[:num_queries]
    x, truth_Q, groups_Q = (values[rows].numpy() for values in (dataset.test.x, dataset.test.y, dataset.test.z))
    backend = open_backend(run.root, VotesHere.model_construct(**dict(config)))
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
    ledger, labels_Q = backend.ledger, np.array([-1 if reply.label is None else reply.label for reply in replies])
    truth_Q, groups_Q, free_Q = truth_Q[: len(replies)], groups_Q[: len(replies)], np.array([r.free for r in replies])
    answered_Q, right_Q = labels_Q >= 0, labels_Q == truth_Q
    voted_Q = answered_Q & ~free_Q
    counts_QC = np.array([ledger.outcome_of[r.key].counts for r, voted in zip(replies, voted_Q, strict=True) if voted])
    counts_GC = np.zeros((dataset.num_groups, dataset.num_classes))
    np.add.at(counts_GC, (groups_Q[answered_Q], labels_Q[answered_Q]), 1)
    return {
        "own": own,
        "submitted": len(replies),
        "charged": len(ledger.keys) - own,
        "free": int((answered_Q & free_Q).sum()),
        "answered": int(answered_Q.sum()),
        "label_accuracy": float(right_Q[answered_Q].mean()),
        "right_free": float(right_Q[answered_Q & free_Q].mean()),
        "right_voted": float(right_Q[voted_Q].mean()),
        "right_without_offsets": float((counts_QC.argmax(axis=1) == truth_Q[voted_Q]).mean()),
        "accuracy": context.read_json(run.record)["accuracy"],
        "gap": dp_one_vs_rest(counts_GC[:, None, :]).value,
        "unit": dataset.unit,
        "relation": "add or remove one",
        "delta": config.target.delta,
    }


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
        print(f"{data}, seed {seed}: {found}", flush=True)
        cell = f"{name}/keep={options.keep:g},epsilon={options.epsilon:g}"
        papers.add(cells, cell, seed, found)
    if options.write:
        measured.write("service_answers", command="python " + " ".join([*sys.argv[:1], *sys.argv[1:]]), cells=cells)


if __name__ == "__main__":
    main()
