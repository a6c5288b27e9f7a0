"""Models over sites and their rivals; seconds, bytes and memory of a secure sum; what faults end in.

    python benchmarks/papers/sites.py --sites 500 --numbers 400       one sum: seconds, bytes of site and coordinator
    python benchmarks/papers/sites.py --processes 50 --numbers 400    one sum over HTTP, each site a process: memory too
    python benchmarks/papers/sites.py --faults 500                    500 sums of 5 to 9 sites, each with random faults
    python benchmarks/papers/sites.py --models acs --by PUMA:2 --sites 12     accuracy over sites, and of the rivals
    python benchmarks/papers/sites.py --models acs --sites 50 --method residual_votes --store

With --store, models go to docs/results/sites.json, each group with its command, and what sums take to site_sums.json;
`--table`, or `--models all --table --method METHOD`, prints them as docs/sites.md shows them.

Models are those of `weighted_votes`, or of `residual_votes` with the moments of the public pool, on records that are
dealt as by `fairpate site simulate`. They learn from the exact sums of all records with the noise of as many shares as
there are sites; that the protocol gives the first sum bit for bit is asserted for every row, under seeded noise. The
rivals have the same public pool, embedding and epsilon per record:

    clear votes      sites train teachers (100 in all) and send votes on 1,000 queries to an operator whom all trust
                     (`fairpate aggregate`, noisy counts)
    alone            each site by itself; the mean over the first six sites at most
    federated        DP-SGD by logistic regression on the embedding: clipping per person, or per record where nobody
                     is named, Poisson samples of them at the sites, a secure sum of gradients in every round, with the
                     shares of noise that the plan above has

Nothing was tuned: the federated rival has the settings that `dp_sgd` has by default for as many records in one place,
about 200 rounds, and a secure sum of the model's size in every round where a plan has one sum in all.

`--method dp_fedavg` has rows of its own, since its unit is a whole site, added or removed with all of its records:
DP-FedAvg (McMahan et al., 2018) of the same logistic regression, with all sites in each of 10 rounds, 20 steps of
gradient descent at a site, and the clipping norm and learning rate of the federated rival.

A fault stops a site for good or for a moment, loses or changes a message, repeats an old one, or stops the coordinator;
a party that comes back is made anew from its store. A sum may be exact or not come about: anything else is an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import measured
import numpy as np
import yaml

from fairpate.privacy.discrete_gaussian import SeededSource, discrete_gaussians
from fairpate.sites.secure_sum import STEPS, Coordinator, Draw, Site, SiteKey, Step, SumError
from fairpate.types import IntArray


class Parties:
    """A coordinator and sites in one process, made anew from their stores at every message."""

    def __init__(
        self,
        num_sites: int,
        num_numbers: int,
        *,
        may_vanish: int,
        may_collude: int,
        noise_stddev: float = 2.0**20,
        exact_KD: IntArray | None = None,
    ) -> None:
        self.keys = [SiteKey(hashlib.sha256(str(place).encode()).digest()) for place in range(num_sites)]
        self.draw = Draw(
            plan=bytes(32),
            number=0,
            sites=tuple(key.public for key in self.keys),
            may_vanish=may_vanish,
            may_collude=may_collude,
            size=num_numbers,
            noise_stddev=noise_stddev,
        )
        made_KD = np.random.default_rng(0).integers(-(2**40), 2**40, (num_sites, num_numbers))
        self.exact_KD = made_KD if exact_KD is None else exact_KD
        self.stores: list[dict[str, bytes]] = [{} for _ in range(num_sites)]
        self.kept: dict[str, bytes] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began_s = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began_s

    def message(self, step: Step, place: int, coordinator: Coordinator) -> bytes | None:
        """What site ``place`` sends at this step; None before its list is there, or if it is not in it."""
        site = Site(self.draw, place, self.keys[place], self.stores[place])
        if step == "hello":
            return site.hello()
        if step == "masked":
            found = coordinator.listed("members", place)
        else:
            found = coordinator.listed("survivors" if step == "agreed" else "agreement")
        listed = found if step != "shares" else coordinator.listed("survivors")
        if found is None or listed is None or listed[place] != 1:
            return None
        self.bytes["to a site"] += len(found)
        if step == "masked":
            return site.masked(found, self.exact_KD[place], SeededSource(place))
        return site.agreed(found) if step == "agreed" else site.shares(found)

    def expected(self, places: list[int]) -> IntArray:
        """The sum of these sites' numbers and noise."""
        total_D: IntArray = np.zeros(self.draw.size, dtype=np.int64)
        for place in places:
            source = SeededSource(place)
            words_D = source.machine_words(["sum 0"], self.draw.size)[0]
            total_D = total_D + self.exact_KD[place] + discrete_gaussians(self.draw.share_stddev, words_D, source)
        return total_D

    def summed(self, vanish: int = 0) -> IntArray:
        """The sum by the protocol, after whose first message the last ``vanish`` sites vanish."""
        coordinator = Coordinator(self.draw, self.kept)
        num_sites = len(self.keys)
        for step in STEPS:
            for place in range(num_sites if step == "hello" else num_sites - vanish):
                with self.timed("site"):
                    message = self.message(step, place, coordinator)
                assert message is not None
                self.bytes["from a site"] += len(message)
                with self.timed("coordinator"):
                    coordinator.receive(step, place, message)
            with self.timed("coordinator"):
                coordinator.advance(time_is_up=True)
        total_D = coordinator.total_D
        assert total_D is not None
        assert np.array_equal(total_D, self.expected(list(range(num_sites - vanish))))
        return total_D


def measure(num_sites: int, num_numbers: int) -> dict[str, float]:
    """Seconds of processor time and bytes of one sum in which a fiftieth of the sites vanish."""
    vanish, collude = num_sites // 50, max(1, num_sites // 50)
    parties = Parties(num_sites, num_numbers, may_vanish=vanish, may_collude=collude)
    parties.summed(vanish)
    return {
        "seconds": round(parties.seconds["site"] / num_sites, 2),
        "kB from a site": round(parties.bytes["from a site"] / num_sites / 1000, 1),
        "kB to a site": round(parties.bytes["to a site"] / num_sites / 1000, 1),
        "coordinator, seconds": round(parties.seconds["coordinator"], 1),
    }


def sums_table() -> str:
    """The stored sums of 400 numbers as a table in Markdown."""
    found = {name: row for name, row in measured.read("site_sums").items() if name.endswith(" in one process")}
    rows = sorted(found.items(), key=lambda each: int(each[0].split()[0]))
    titles = ["sites", *rows[0][1]]
    lines = [titles, ["-"] * len(titles), *([name.split()[0], *map(str, row.values())] for name, row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def campaign(count: int, seed: int) -> Counter[str]:
    """The outcomes of ``count`` sums with faults at random messages."""
    return Counter(faulty(random.Random(f"{seed} {number}")) for number in range(count))


def faulty(draws: random.Random) -> str:
    """One sum whose messages meet faults; its outcome in words. AssertionError for a wrong sum."""
    num_sites = draws.randint(5, 9)
    parties = Parties(num_sites, 2, may_vanish=draws.randint(0, (num_sites - 2) // 2), may_collude=1)
    rate = draws.choice((0.02, 0.1, 0.3))
    gone: set[int] = set()
    old: list[tuple[Step, int, bytes]] = []
    try:
        for step in STEPS:
            # Twice: a message that was lost, and a site that came back, have another chance before time is up.
            for place in [*draws.sample(range(num_sites), num_sites), *range(num_sites)]:
                coordinator = Coordinator(parties.draw, parties.kept)  # as if it had been stopped in between
                message = None if place in gone else parties.message(step, place, coordinator)
                if message is None:
                    continue
                if draws.random() < rate:
                    fault = draws.choice(("vanish", "lose", "change", "shorten", "replay"))
                    if fault == "vanish":
                        gone.add(place)
                    if fault in ("change", "shorten"):
                        at = draws.randrange(len(message))
                        wrong = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
                        message = wrong if fault == "change" else message[:at]
                    if fault in ("vanish", "lose"):
                        continue
                    if fault == "replay" and old:
                        step_then, place_then, message_then = draws.choice(old)
                        with suppress(SumError):
                            coordinator.receive(step_then, place_then, message_then)
                with suppress(SumError):
                    coordinator.receive(step, place, message)
                    old.append((step, place, message))
            Coordinator(parties.draw, parties.kept).advance(time_is_up=True)
    except SumError as error:
        assert "sum" not in parties.kept
        return "ended: " + ("too few sites" if "Time is up" in str(error) else str(error))
    coordinator = Coordinator(parties.draw, parties.kept)
    flags, total_D = coordinator.listed("survivors"), coordinator.total_D
    assert flags is not None
    assert total_D is not None
    survivors = [place for place in range(num_sites) if flags[place] == 1]
    assert len(survivors) >= parties.draw.least
    assert np.array_equal(total_D, parties.expected(survivors))
    return "exact, all sites" if len(survivors) == num_sites else "exact, some sites lost"


_SITE = """
import json, re, sys, time
from contextlib import closing
from pathlib import Path
import numpy as np
from fairpate.sites.plan import read_key, read_plan
from fairpate.sites.site import CoordinatorClient, Messenger

class Counted(CoordinatorClient):
    sent = received = 0

    def request(self, path, content=None, **others):
        found = super().request(path, content, **others)
        self.sent, self.received = self.sent + len(content or b""), self.received + len(found or b"")
        return found

folder, url = Path(sys.argv[1]), sys.argv[2]
client = Counted(url, wait_s=300)
plan = read_plan(client.request("/v1/plan", most_bytes=2**20), url)
with closing(Messenger(plan, read_key(folder / "own.key"), client)) as messenger:
    messenger.begin(folder / "journal.sqlite", folder / "begun", b"", lambda: None)
    began_s, client.sent, client.received = time.process_time(), 0, 0
    (planned,) = plan.sums
    exact = np.load(folder / "exact.npy")
    total = messenger.sum(exact, stddev=planned.noise_stddev, name=planned.name)
    seconds = time.process_time() - began_s
    messenger.leave()
status = open("/proc/self/status").read()
print(json.dumps({
    "mb": int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 1024,
    "sent": client.sent, "received": client.received, "seconds": seconds, "total": int(total[0, 0]),
    "heavy": sorted({"torch", "ray"} & set(sys.modules)),
}))
"""


def processes(num_sites: int, num_numbers: int) -> dict[str, float]:
    """The most memory, bytes and seconds of ``num_sites`` processes that share one sum of two rows over HTTP."""
    from fairpate.http_server import HttpServer, HttpSettings
    from fairpate.sites.coordinator import CoordinatorSums
    from fairpate.sites.plan import FORMAT, Journal, key_text, new_key, read_plan

    shape = (2, num_numbers // 2)
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folders = [Path(name) / f"site{place}" for place in range(num_sites)]
        numbers, exact = np.random.default_rng(0), np.zeros(shape, dtype=np.int64)
        keys = {}
        for folder in folders:
            folder.mkdir()
            keys[folder.name] = key_text(new_key(folder / "own.key").public)
            own = numbers.integers(-(2**40), 2**40, shape)
            np.save(folder / "exact.npy", own)
            exact += own
        values: dict[str, Any] = {
            "format": FORMAT,
            "id": "0",
            "settings": {},
            "unit": "record",
            "events": [{}],
            "sums": [{"name": "table", "rows": shape[0], "columns": shape[1], "noise_stddev": 2.0**10}],
            "public_arrays": "",
            "embedding": None,
            "sites": keys,
            "may_vanish": 0,
            "may_collude": max(1, num_sites // 50),
            "test_events": [],
        }
        plan, port = read_plan(json.dumps(values).encode(), "plan"), int(free.getsockname()[1])
        free.close()
        with Journal.opened(Path(name) / "coordinator.sqlite", plan) as journal:
            sums = CoordinatorSums(plan, journal, wait_s=300)
            server = HttpServer(sums.app, HttpSettings(port=port))
            command = [sys.executable, "-c", _SITE]
            started = [
                subprocess.Popen([*command, str(folder), f"http://127.0.0.1:{port}"], stdout=subprocess.PIPE)  # noqa: S603
                for folder in folders
            ]
            total = sums(np.zeros(shape, dtype=np.int64), stddev=2.0**10, name="table")
            found = [json.loads(process.communicate()[0]) for process in started]
            server.stop()
    # The noise is that of the operating system: within eight standard deviations of a site's share each.
    assert np.abs(total - exact).max() < 8 * 2.0**10 * math.sqrt(num_sites)
    assert {each["total"] for each in found} == {int(total[0, 0])}
    assert not any(each["heavy"] for each in found)
    most = {name: max(each[name] for each in found) for name in ("mb", "seconds", "sent", "received")}
    return {
        "MB": round(most["mb"]),
        "seconds": round(most["seconds"], 2),
        "kB from a site": round(most["sent"] / 1000, 1),
        "kB to a site": round(most["received"] / 1000, 1),
    }


def _clipped_sum(x_NF: Any, y_NC: Any, unit_N: IntArray, rule: Any, most: float) -> Any:
    """The sum over units of the gradients of each unit's records, which is cut to the norm ``most``."""
    scores = x_NF @ rule.T
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    left = chances / chances.sum(axis=1, keepdims=True) - y_NC
    found, row_N = np.unique(unit_N, return_inverse=True)
    if len(found) == len(unit_N):  # one record each: the norm of an outer product is that of its factors
        norms_N = np.linalg.norm(left, axis=1) * np.linalg.norm(x_NF, axis=1)
    else:
        grads = np.zeros((len(found), *rule.shape))
        np.add.at(grads, row_N, left[:, :, None] * x_NF[:, None, :])
        norms_N = np.linalg.norm(grads.reshape(len(found), -1), axis=1)[row_N]
    return (left * np.minimum(1, most / np.maximum(norms_N, 1e-12))[:, None]).T @ x_NF


def multiplier_within(epsilon: float, rounds: int, rate: float) -> float:
    """The noise of so many Gaussian sums over samples of the units, in norms of one unit."""
    from fairpate.config import PrivacyTarget
    from fairpate.methods.base import noise_within
    from fairpate.privacy.accountant import PoissonGaussians

    return noise_within(
        PrivacyTarget(epsilon=epsilon),
        lambda m: [PoissonGaussians(count=rounds, noise_multiplier=m, sampling_rate=rate)],
    )


class NoisyShares:
    """Adds the noise of all sites' shares to each table; all shares but ``t`` have the priced variance together."""

    def __init__(self, sites: int, t: int, seed: int) -> None:
        self.sites, self.t, self.seed, self.number = sites, t, seed, 0

    def __call__(self, exact_RW: IntArray, *, stddev: float, name: str, **_: Any) -> IntArray:
        number, self.number = self.number, self.number + 1
        for place in range(self.sites):
            source = SeededSource(f"{self.seed} {place} {number}")
            words = source.machine_words([name], exact_RW.size)[0]
            share = stddev / math.sqrt(self.sites - self.t)
            exact_RW = exact_RW + discrete_gaussians(share, words, source).reshape(exact_RW.shape)
        return exact_RW


def joined(splits: list[Any]) -> Any:
    """The records of all splits in one."""
    import torch

    values = {name: torch.cat([getattr(each, name) for each in splits]) for name in ("x", "y", "z")}
    names = {field: [name for each in splits for name in getattr(each, field)] for field in ("record_id", "person_id")}
    return type(splits[0])(**values, **names)


class Hospitals:
    """Records dealt to sites, all parties' data sets in one process, and models of their sums."""

    def __init__(self, data: str, folder: Path, *, sites: int, by: str | None, options: dict[str, Any]) -> None:
        from fairpate.config import DataConfig
        from fairpate.data.registry import embedded, load_at_site
        from fairpate.sites.simulate import deal, site_folders

        source = DataConfig(name=data, options=options, data_dir=Path(os.environ["FAIRPATE_DATA"]))
        self.records = deal(source, folder, sites=sites, by=by)
        self.folder, self.epsilon, self.num_sites = folder, 1.0, sites
        config = self.config("weighted_votes")
        self.together = load_at_site(config.data, has_private=False)
        embedding = self.together.embedding
        assert embedding is not None
        self.sites = []
        for own in site_folders(folder, sites):
            at_site = self.config("weighted_votes", own).data.model_copy(update={"embedding": None})
            self.sites.append(embedded(load_at_site(at_site, has_private=True), embedding))
        self.of_curator = replace(self.together, private=joined([each.private for each in self.sites]))

    def config(self, method: str, party: Path | None = None, *options: str) -> Any:
        from fairpate.methods.defaults import resolved

        if method == "residual_votes":
            options = (*options, "residual_votes.curvature=public")

        declared = (party or self.folder / "coordinator") / "data.yaml"
        name = yaml.safe_load(declared.read_text(encoding="utf-8"))["name"]
        given = [f"data.declaration={declared}", f"data.name={name}", f"target.epsilon={self.epsilon}", *options]
        return resolved(given, method, num_sites=1 if party else self.num_sites)

    def training(self, dataset: Any, noisy_sum: Any) -> Any:
        from torch import nn

        from fairpate.methods.base import Training
        from fairpate.releases.directory import RunDirectory
        from fairpate.terminal import Reporter

        run = RunDirectory(root=self.folder / "run")
        return Training(
            dataset=dataset, model=nn.Identity(), run=run, reporter=Reporter(quiet=True), seed=0, noisy_sum=noisy_sum
        )

    def exact(self, config: Any) -> list[IntArray]:
        """The first table of every site, without noise."""
        found: list[list[IntArray]] = [[] for _ in self.sites]
        for tables, dataset in zip(found, self.sites, strict=True):

            def keep(exact_RW: IntArray, *, kept: list[IntArray] = tables, **_: Any) -> IntArray:
                kept.append(exact_RW)
                return exact_RW

            config.measure(self.training(dataset, keep))
        return [tables[0] for tables in found]

    def released(self, config: Any, dataset: Any, shares: NoisyShares) -> float:
        """The accuracy of the model that is learned from the sums of the records of ``dataset`` with this noise."""
        return self.accuracy(config, config.measure(self.training(dataset, shares)))

    def accuracy(self, config: Any, released: Any) -> float:
        """The accuracy of the model that is learned from a release."""
        from fairpate.nn.fit import predict_logits
        from fairpate.run.run import initial_model

        training = self.training(self.together, None)
        trained = config.learn(replace(training, model=initial_model(config, self.together)), released)
        labels_N = predict_logits(trained.model, self.together.test.x).argmax(dim=1)
        return float((labels_N == self.together.test.y).double().mean())

    def federated(self, num_colluding: int, seed: int) -> float:
        """The accuracy of federated DP-SGD whose rounds are secure sums."""
        parts = [site.private for site in self.sites]
        # A unit is a person where the declaration names persons: all of its records are clipped together.
        unit_Ns = [np.arange(len(part)) if part.person_N is None else part.person_N.numpy() for part in parts]
        settings = self._as_dp_sgd()
        rate = settings.batch_size / sum(part.num_protected for part in parts)
        rounds = round(settings.epochs / rate)
        # Shares of noise as in a plan: some sites may give theirs away.
        excess = math.sqrt(len(self.sites) / (len(self.sites) - num_colluding))
        stddev = multiplier_within(self.epsilon, rounds, rate) * settings.clip_norm * excess
        draws, records = np.random.default_rng(seed), self._records()
        rule = np.zeros((self.together.num_classes, records[0][0].shape[1]))
        for _ in range(rounds):
            total = draws.normal(0, stddev, rule.shape)
            # A site's part of a secure sum.
            for part, (x_NF, y_NC), unit_N in zip(parts, records, unit_Ns, strict=True):
                chosen = (draws.random(part.num_protected) < rate)[unit_N]
                total += _clipped_sum(x_NF[chosen], y_NC[chosen], unit_N[chosen], rule, settings.clip_norm)
            rule -= settings.learning_rate * total / settings.batch_size
        return self._accuracy_of(rule)

    def dp_fedavg(self, seed: int) -> float:
        """The accuracy of DP-FedAvg, whose epsilon is that of a whole site."""
        settings, draws, records = self._as_dp_sgd(), np.random.default_rng(seed), self._records()
        stddev = multiplier_within(self.epsilon, _ROUNDS, 1.0) * settings.clip_norm
        rule = np.zeros((self.together.num_classes, records[0][0].shape[1]))
        for _ in range(_ROUNDS):
            total = draws.normal(0, stddev, rule.shape)
            for x_NF, y_NC in records:
                local, each_N = rule.copy(), np.arange(len(x_NF))
                for _ in range(_LOCAL_STEPS):
                    gradient = _clipped_sum(x_NF, y_NC, each_N, local, math.inf) / len(x_NF)
                    local -= settings.learning_rate * gradient
                update = local - rule
                total += update * min(1, settings.clip_norm / max(np.linalg.norm(update), 1e-12))
            rule += total / len(records)
        return self._accuracy_of(rule)

    def _as_dp_sgd(self) -> Any:
        """As `fairpate run` has for as many units in one place: five epochs of batches of a fiftieth."""
        from fairpate.methods.base import configured
        from fairpate.methods.defaults import fitted_to

        num_units = sum(site.private.num_protected for site in self.sites)
        values = fitted_to("dp_sgd", count=num_units, num_public=len(self.together.public))
        return getattr(configured({"dp_sgd": values["dp_sgd"]}, method="dp_sgd"), "dp_sgd")  # noqa: B009

    def _records(self) -> list[tuple[Any, Any]]:
        """Features with a constant, and labels one-hot, of each site's records."""
        labels_CC, parts = np.eye(self.together.num_classes), [site.private for site in self.sites]
        return [
            (np.hstack([part.x.double().numpy(), np.ones((len(part), 1))]), labels_CC[part.y.numpy()]) for part in parts
        ]

    def _accuracy_of(self, rule: Any) -> float:
        test = self.together.test
        scores = test.x.double().numpy() @ rule[:, :-1].T + rule[:, -1]
        return float((scores.argmax(axis=1) == test.y.numpy()).mean())

    def clear_votes(self) -> float:
        """The accuracy of the student of `fairpate aggregate` on votes that sites sent in clear."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        from fairpate.releases.directory import read_json
        from fairpate.run.run import aggregate
        from fairpate.terminal import Reporter

        teachers = max(2, 100 // len(self.sites))
        config = self.config(
            *("teacher_votes", None, f"teachers.num_teachers={teachers}", "ray.num_actors=0"),
            f"teacher_votes.num_queries={min(1000, len(self.together.public))}",
        )
        votes_QC = sum(self.exact(config))
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        together, queries = self.together, config.queries(self.together)
        classes = [f"class {k}" for k in range(together.num_classes)]
        names = [f"f{k}" for k in range(queries.x.shape[1])]

        def write(split: Any, path: Path, columns: dict[str, Any]) -> None:
            features = dict(zip(names, split.x.double().numpy().T, strict=True))
            groups = [together.group_names[code] for code in split.z.tolist()]
            pq.write_table(pa.table({"record_id": list(split.record_id), "group": groups} | features | columns), path)

        write(queries, folder / "votes.parquet", dict(zip(classes, np.asarray(votes_QC).T, strict=True)))
        labels = [classes[code] for code in together.test.y.tolist()]
        write(together.test, folder / "test.parquet", {"label": labels})
        values: dict[str, Any] = {
            "votes": {
                "path": folder / "votes.parquet",
                "test": folder / "test.parquet",
                "unit": "patient",
                "classes": classes,
                "are_counts": True,
                "num_voters": teachers * len(self.sites),
                "features": names,
            },
            "target": {"epsilon": self.epsilon},
            "aggregator": {"release": "counts", "mechanism": {"threshold": -math.inf, "noise_stddev_votes": 10.0}},
            "student": config.student.model_dump(),
            "out": folder / "run",
        }
        return float(read_json(aggregate(values, [], Reporter(quiet=True)).metrics)["accuracy"])


def models(
    data: str,
    method: str,
    *,
    sites: int,
    by: str | None,
    options: dict[str, Any],
    epsilons: list[float],
    draws: int,
    store: bool,
) -> None:
    """Print a row for every epsilon: accuracies in percent, means over draws of the noise with standard errors."""
    with tempfile.TemporaryDirectory() as name:
        os.environ["FAIRPATE_STATE"] = f"{name}/state"
        hospitals = Hospitals(data, Path(name) / "parties", sites=sites, by=by, options=options)
        test = hospitals.together.test
        majority = np.bincount(test.y.numpy()).max() / len(test)
        print(
            f"{data} by {by or 'chance'}, {method}: {sites} sites of {min(hospitals.records):,} to "
            f"{max(hospitals.records):,} records; the most common class has {majority:.1%} of {len(test):,} "
            "test records"
        )
        for epsilon in epsilons:
            hospitals.epsilon = epsilon
            rows = accuracies(hospitals, method, draws)
            row = {
                title: [round(100 * np.mean(found), 1), round(100 * np.std(found) / math.sqrt(len(found)), 1)]
                for title, found in rows.items()
            }
            print(
                f"epsilon {epsilon:g}: " + ", ".join(f"{title} {m} ± {e}" for title, (m, e) in row.items()), flush=True
            )
            if store:
                cells, groups, dealt = measured.read("sites"), stored_groups(), f"{data} {sites}/{method}"
                cells[f"{dealt}/epsilon={epsilon:g}"] = row
                least, most = f"{min(hospitals.records):,}", f"{max(hospitals.records):,}"
                size = least if least == most else f"{least} to {most}"
                groups[dealt] = {
                    "title": f"{_NAMES[data]} {_DEALT.get(by, f'by {by}')}, {sites} sites of {size} records",
                    "command": shlex.join(["python", "benchmarks/papers/sites.py", *sys.argv[1:]]),
                }
                measured.write(
                    "sites",
                    command="python benchmarks/papers/sites.py --models DATA --store",
                    cells=cells,
                    groups=groups,
                )


def accuracies(hospitals: Hospitals, method: str, draws: int) -> dict[str, list[float]]:
    """The accuracies of a row's columns, one for each draw of the noise, or for each site alone."""
    if method == "dp_fedavg":
        return {"DP-FedAvg": [hospitals.dp_fedavg(draw) for draw in range(draws)]}
    config = hospitals.config(method)
    rows: dict[str, list[float]] = defaultdict(list)
    for draw in range(draws):
        for title, t in zip(_SUMS, (0, 1, hospitals.num_sites // 2), strict=True):
            shares = NoisyShares(hospitals.num_sites, t, draw)
            rows[title].append(hospitals.released(config, hospitals.of_curator, shares))
        for own in hospitals.sites[: 6 if draw == 0 else 0]:
            rows["alone"].append(hospitals.released(config, own, NoisyShares(1, 0, draw)))
        if method == "weighted_votes":
            rows["federated, t = 1"].append(hospitals.federated(1, draw))
            rows["federated, t = K/2"].append(hospitals.federated(hospitals.num_sites // 2, draw))
    if method == "weighted_votes":
        rows["clear votes"] = [hospitals.clear_votes()]
    _assert_exact(hospitals, config)
    return rows


def stored_groups() -> dict[str, dict[str, str]]:
    """Title and command of every group of stored rows."""
    stored = json.loads((measured.FOLDER / "sites.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = stored["groups"]
    return found


_NAMES = {"acs": "ACS", "adult": "Adult", "utkface": "UTKFace", "loans": "Loans"}
_DEALT = {None: "at random", "PUMA:2": "by state"}
_SUMS = ("one curator", "t = 1", "t = K/2")
_COLUMNS = (*_SUMS, "alone", "federated, t = 1", "federated, t = K/2", "clear votes", "DP-FedAvg")
_ROUNDS, _LOCAL_STEPS = 10, 20  # of DP-FedAvg


def table(method: str) -> str:
    """The stored rows of a method as a table in Markdown."""
    cells, epsilons = measured.read("sites"), (0.1, 0.3, 1.0)
    titles = {name: each["title"] for name, each in stored_groups().items() if name.endswith(f"/{method}")}
    order = sorted(titles, key=lambda name: (name.split()[0], int(name.partition("/")[0].split()[1])))
    rows = {(each, epsilon): cells.get(f"{each}/epsilon={epsilon:g}") for each in order for epsilon in epsilons}
    found = {place: row for place, row in rows.items() if row is not None}
    columns = [title for title in _COLUMNS if any(title in row for row in found.values())]
    lines = [["data, sites", "ε", *columns], ["-"] * (len(columns) + 2)]
    for (each, epsilon), row in found.items():
        named = titles[each] if epsilon == epsilons[0] else ""
        lines.append([named, f"{epsilon:g}", *(f"{row[title][0]:.1f}" for title in columns)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _assert_exact(hospitals: Hospitals, config: Any) -> None:
    """Run the protocol on the sites' first tables: its sum, and so its model, is that of one curator with the noise of
    all sites."""
    tables, found = hospitals.exact(config), []

    def keep(exact_RW: IntArray, *, stddev: float, **_: Any) -> IntArray:
        found.append((exact_RW, stddev))
        return exact_RW

    config.measure(hospitals.training(hospitals.of_curator, keep))
    (of_curator, stddev), exact_KD = found[0], np.stack([each.ravel() for each in tables])
    assert np.array_equal(exact_KD.sum(axis=0), of_curator.ravel())
    parties = Parties(
        len(tables), exact_KD.shape[1], may_vanish=0, may_collude=1, noise_stddev=stddev, exact_KD=exact_KD
    )
    assert np.array_equal(parties.summed(), parties.expected(list(range(len(tables)))))


def main() -> None:
    """Print one of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--numbers", type=int, default=400)
    parser.add_argument("--faults", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--models", default=None, metavar="DATA")
    parser.add_argument("--method", default="weighted_votes", choices=("weighted_votes", "residual_votes", "dp_fedavg"))
    parser.add_argument("--by", default=None)
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    if given.table:
        print(table(given.method) if given.models else sums_table())
        return
    if given.models:
        options = dict(each.split("=", 1) for each in given.option)
        models(
            given.models,
            given.method,
            sites=given.sites,
            by=given.by,
            options=options,
            epsilons=given.epsilon,
            draws=given.draws,
            store=given.store,
        )
        return
    row: dict[str, float]
    if given.faults:
        name, row = f"{given.faults} sums with faults", {**campaign(given.faults, given.seed)}
    elif given.processes:
        name, row = f"{given.processes} processes", processes(given.processes, given.numbers)
    else:
        name, row = f"{given.sites} sites in one process", measure(given.sites, given.numbers)
    print(f"{name}: {row}")
    if given.store:
        measured.write(
            "site_sums",
            command="python benchmarks/papers/sites.py --store",
            cells=measured.read("site_sums") | {name: row},
        )


if __name__ == "__main__":
    main()
