"""What metrics and choices inside the guarantee are worth on Adult: intervals over replications, and tuning by seed.

    FAIRPATE_DATA=... OMP_NUM_THREADS=1 python benchmarks/papers/private_metrics.py
        [--replications 1000] [--seeds 0 1 2 3 4]

``intervals``: the population are all records of Adult with the predictions of a logistic regression. A replication
draws test records from it with replacement, and noise; a row says how often an interval holds the value in the
population, its median width over that of an ideal one (2 * 1.96 standard deviations of the estimates over
replications), and how often it is undefined. Groups are sexes, and races, of which the smallest has 40 test records.

``tuning``: `adult.test` is the public pool, and `adult.data` is divided by a hash into private, validation and test
records. Nine settings of weighted votes learn from one release. The choice of `fairpate select` is compared with the
best by exact accuracy on the same validation records, which nothing accounts for, and with the defaults. Accuracies are
exact, on the test records; ``interval`` is the width of the private one. delta 1e-5, one record added or removed.

``trials``: the same settings, each with a release of its own, by a secret number of trials at the same epsilon.

``rivals``: five methods on Adult and UTKFace, as `fairpate select` publishes them: settings chosen by private
validation records, metrics from a noisy table, and training, choice and table at one epsilon. ``exact`` is the accuracy
on the test records, which a run on private records could not show. Pictures of UTKFace are dealt to a public folder
(3,000) and a private one by a seed, each once, for the time of the benchmark. delta 1e-5 (UTKFace: 1e-6).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from zipfile import ZipFile

import measured
import numpy as np
import yaml
from sklearn.linear_model import LogisticRegression

from fairpate.config import DataConfig, read_yaml
from fairpate.data import load_data
from fairpate.data.pictures import WELL_FORMED
from fairpate.data.registry import CODEBOOKS
from fairpate.fairness import rates
from fairpate.methods.base import Price, configured
from fairpate.privacy.accountant import PureReleases
from fairpate.privacy.discrete_gaussian import OsEntropy
from fairpate.privacy.mechanism_events import PredictionTables
from fairpate.releases.directory import ReleasedArrays
from fairpate.report.metrics import GAPS
from fairpate.run import private_metrics
from fairpate.run.choice import choice_among, group_weights, score_of, select_by_trials, select_settings
from fairpate.run.private_metrics import WEIGHT, _Shares, draw_table, evaluation_of, table_event
from fairpate.run.run import open_run, students_of
from fairpate.terminal import Reporter
from student.student import load_student

COMMAND = "python benchmarks/papers/private_metrics.py"
EPSILONS, DELTA = (0.3, 1.0, 3.0), 1e-5
TEST_RECORDS = 5000
GRID = [(share, rate) for share in (0.4, 0.7, 1.0) for rate in (0.001, 0.01, 0.1)]
SHOWN = ("accuracy", "accuracy for", "impact ratio", "dp_one_vs_rest", "equal_opportunity", "eo_lowy", "false_negative")


def table_at(epsilon: float) -> Any:
    """The event of a table at ``epsilon``."""
    return table_event(
        Price(epsilon=epsilon, delta=DELTA, unit="record", relation="add or remove one", accounting="pld")
    )


def adult_by(sensitive: str, *, least: int = 0) -> tuple[Any, dict[str, Any]]:
    """The shares (G, Y, C) of all records of Adult, as a logistic regression predicts them, and the names of codes.
    Only groups of ``least`` of the test records or more are part of the population.
    """
    data = load_data(DataConfig(name="adult", options={"sensitive": sensitive}))
    parts = [data.private, data.public, data.validation, data.test]
    x, y, z = (np.concatenate([getattr(part, name).numpy() for part in parts]) for name in "xyz")
    predicted = LogisticRegression(max_iter=300).fit(x[::2], y[::2]).predict(x)
    joint_GYC = rates.joint_table(predicted, z, labels_N=y, num_groups=data.num_groups, num_classes=2) / len(y)
    kept = [group for group in range(data.num_groups) if joint_GYC[group].sum() * TEST_RECORDS >= least]
    names = {"group_names": [data.group_names[group] for group in kept], "class_names": data.label_names}
    return (joint_GYC[kept] / joint_GYC[kept].sum() if least else joint_GYC), names


def intervals(sensitive: str, replications: int, *, least: int = 0) -> None:
    """Keep a cell per epsilon and quantity, of groups of ``least`` of the test records or more."""
    joint_GYC, names = adult_by(sensitive, least=least)
    population = f"{sensitive} from {least} records" if least else sensitive
    exact = ReleasedArrays(
        arrays={"weights_BGYC": np.rint(joint_GYC * 1e9)[None], "edges": np.zeros(0)},
        events=(PredictionTables(count=1, noise_stddev_records=1e-9, weight=1),),
    )
    of_population = evaluation_of(exact, **names)
    gaps = {name: metric for name, metric in GAPS.items() if name.startswith(SHOWN)}
    truth = {each.name: each.value for each in of_population.estimates} | {
        name: metric(joint_GYC).value for name, metric in gaps.items()
    }
    for epsilon in EPSILONS:
        event, draws = table_at(epsilon), np.random.default_rng(2000)
        found: dict[str, list[Any]] = {name: [] for name in truth if name.startswith(SHOWN)}
        for _ in range(replications):
            counts_GYC = draws.multinomial(TEST_RECORDS, joint_GYC.ravel()).reshape(joint_GYC.shape)
            noisy_GYC = counts_GYC + draws.normal(0, event.noise_stddev_records, joint_GYC.shape)
            arrays = {"weights_BGYC": np.rint(noisy_GYC * WEIGHT)[None], "edges": np.zeros(0)}
            # The other gaps would take more than half of the time.
            with patch.object(private_metrics, "GAPS", gaps):
                measured_now = evaluation_of(ReleasedArrays(arrays=arrays, events=(event,)), **names)
            for name, each in {**measured_now.gaps, **{each.name: each for each in measured_now.estimates}}.items():
                if name in found:
                    found[name].append(each)
        cells = {}
        for name, each in found.items():
            known = [one for one in each if not math.isnan(one.low)]
            held = [one.low - 1e-9 <= truth[name] <= one.high + 1e-9 for one in known]
            width = float(np.median([one.high - one.low for one in known])) if known else math.nan
            ideal = 2 * 1.96 * float(np.std([one.value for one in known])) if known else 0.0
            cells[f"{population}, {epsilon:g}, {name}"] = {
                "replications": replications,
                "held": float(np.mean(held)) if held else math.nan,
                "width": width,
                "width_over_ideal": width / ideal if ideal else math.nan,
                "undefined": 1 - len(known) / replications,
            }
        keep(cells)


def fixed_reach(replications: int = 10000) -> None:
    """Keep how wide an interval of fixed reach around the largest accuracy gap between races must be, over the ideal
    width: to hold 93 % for Adult, and to do so also if one group of the same size had .1 less accuracy than all others.
    """
    joint_GYC, names = adult_by("race")
    accuracy_G = np.full(len(joint_GYC), 0.84)
    accuracy_G[names["group_names"].index("Amer-Indian-Eskimo")] -= 0.1
    is_right_GYC = np.eye(2, dtype=np.bool_)[None]
    lower_GYC = joint_GYC.sum(axis=2, keepdims=True) * np.abs(~is_right_GYC - accuracy_G[:, None, None])
    for epsilon in EPSILONS[1:]:  # at .3 the smallest groups are undefined
        stddev, draws, errors = table_at(epsilon).noise_stddev_records, np.random.default_rng(2000), []
        for population in (joint_GYC, lower_GYC):
            noisy_RGYC = draws.normal(0, stddev, (replications, *population.shape))
            noisy_RGYC += draws.multinomial(TEST_RECORDS, population.ravel(), size=replications).reshape(
                noisy_RGYC.shape
            )
            rates_RG = _Shares.of(rates.correct, noisy_RGYC, stddev, z=1.96).value_EG[:, 0]
            gaps_R = np.nanmax(rates_RG, axis=1) - np.nanmin(rates_RG, axis=1)
            errors.append(gaps_R - GAPS["accuracy_parity"](population).value)
        ideal = 2 * 1.96 * float(np.std(errors[0]))
        alone, both = (narrowest(some, 0.93) / ideal for some in (errors[:1], errors))
        keep({f"race, {epsilon:g}, fixed reach": {"adult": alone, "both": both}})


def narrowest(errors: Sequence[Any], level: float) -> float:
    """The least width of an interval around an estimate that holds the truth in a share of ``level`` of all errors."""
    reaches = np.minimum(np.quantile(np.concatenate(errors), np.linspace(0, 1 - level, 200)), 0)
    widths = [
        max(np.quantile(np.where(each >= reach, each, np.inf), level, method="higher") for each in errors) - reach
        for reach in reaches
    ]
    return float(min(widths))


def adult_in_parts(folder: Path) -> dict[str, Any]:
    """The data section of Adult with `adult.test` as its public pool."""
    declared = read_yaml(CODEBOOKS / "adult.yaml", as_text=True)
    files = declared["files"]
    declared |= {"name": "adult_in_parts", "files": {"records": files["records"], "public": files["test"]}}
    del declared["options"]
    path = folder / "adult.yaml"
    path.write_text(yaml.safe_dump(declared, sort_keys=False), encoding="utf-8")
    shares = {"split": {"test_share": 0.25, "validation_share": 0.1}, "num_public": 4000}
    return {"name": "adult_in_parts", "declaration": str(path), "data_dir": os.environ["FAIRPATE_DATA"], **shares}


def faces_in_parts(folder: Path) -> dict[str, Any]:
    """The data section of UTKFace with 3,000 public pictures in a folder of their own."""
    genders, races = ("male", "female"), ("White", "Black", "Asian", "Indian", "Others")
    with ZipFile(Path(os.environ["FAIRPATE_DATA"], "utkface", "UTKFace-64px.zip")) as archive:
        # Each picture once: a copy on the other side would make a private face public.
        found = {}
        for name in sorted(filter(lambda name: WELL_FORMED.fullmatch(name.rpartition("/")[2]), archive.namelist())):
            content = archive.read(name)
            found[hashlib.sha256(content).hexdigest()] = (name.rpartition("/")[2], content)
    keys = sorted(found)
    random.Random(7).shuffle(keys)
    for place, key in enumerate(keys):
        _, gender, race, _ = found[key][0].split("_", 3)
        path = folder / ("public" if place < 3000 else "private") / genders[int(gender)] / races[int(race)]
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{key}.jpg").write_bytes(found[key][1])
    declared = {
        "name": "faces_in_parts",
        "kind": "images",
        "files": {"private": "private", "public": "public"},
        "pictures": {"size": 64, "channels": 3},
        "label": {"column": "level_1", "classes": list(genders)},
        "group": {"column": "level_2", "values": list(races)},
        "rows": len(keys),
    }
    (folder / "faces.yaml").write_text(yaml.safe_dump(declared, sort_keys=False), encoding="utf-8")
    shares = {"split": {"test_share": 0.2, "validation_share": 0.1}}
    return {"name": "faces_in_parts", "declaration": str(folder / "faces.yaml"), "data_dir": str(folder), **shares}


def settings_on_adult(folder: Path, *, seed: int, epsilon: float, noise: str) -> list[Any]:
    """The nine settings of weighted votes, on Adult in parts."""
    base = {"data": {**adult_in_parts(folder), "seed": seed}, "seed": seed, "target": {"epsilon": epsilon}}
    base |= {"noise": noise, "student": {"model": {"name": "logistic"}, "fit": {"epochs": 30, "batch_size": 128}}}
    return [
        configured(
            base,
            [f"weighted_votes.taught_share={share}", f"student.fit.learning_rate={rate}"],
            method="weighted_votes",
        )
        for share, rate in GRID
    ]


_STEPS = {"dp_sgd.learning_rate": (0.2, 0.5), "dp_sgd.epochs": (5, 10)}
_FIT = {"student.fit.learning_rate": (0.001, 0.01, 0.1), "student.fit.epochs": (30,), "student.fit.batch_size": (128,)}
METHODS: dict[str, dict[str, tuple[Any, ...]]] = {
    "weighted_votes": {"weighted_votes.taught_share": (0.4, 0.7, 1.0), **_FIT},
    "residual_votes": {"student.model.name": ("logistic", "mlp")},
    "record_votes": {"record_votes.taught_share": (0.4, 0.7, 1.0), **_FIT},
    "dp_sgd": _STEPS,
    "fair_dp_sgd": {"fair_dp_sgd.weight": (0.3, 1.0), **_STEPS},
}
"""For each method the settings to choose from: by trials for the SGD family, whose settings each need a training."""


def published(data: dict[str, Any], method: str, *, seed: int, epsilon: float, delta: float) -> dict[str, Any]:
    """What `fairpate select` publishes of ``method``, and the exact accuracy on the test records."""
    base: dict[str, Any] = {"data": {**data, "seed": seed, "embedding": {}}, "seed": seed, "noise": "os_entropy"}
    base |= {"target": {"epsilon": epsilon, "delta": delta}, "evaluation": {"metrics": "private"}}
    base["student"] = {"model": {"name": "logistic"}}
    if by_trials := method.endswith("dp_sgd"):
        base["dp_sgd"] = {"batch_size": 512}
    grid = METHODS[method]
    configs = [
        configured(base, [f"{name}={value}" for name, value in zip(grid, values, strict=True)], method=method)
        for values in itertools.product(*grid.values())
    ]
    with TemporaryDirectory() as folder:
        os.environ["FAIRPATE_STATE"] = folder
        common: dict[str, Any] = {"epsilon": epsilon, "out": Path(folder) / "out", "reporter": Reporter(quiet=True)}
        run = (
            select_by_trials(configs, expected_trials=10, **common) if by_trials else select_settings(configs, **common)
        )
        metrics, statement = (json.loads(path.read_text(encoding="utf-8")) for path in (run.metrics, run.statement))
        # The student embeds records itself.
        records = load_data(configs[0].data.model_copy(update={"embedding": None}))
        test, student = records.test, load_student(run.student)
        labels = student.predict(test.x, test.z.numpy()).labels
    accuracy, gap = metrics["estimates"][0], metrics["gaps"]["dp_one_vs_rest"]
    assert metrics["metrics"] == "private"
    return {
        "epsilon": statement["epsilon"],
        "tuning_accounted": statement["tuning_accounted"],
        "accuracy": accuracy["value"],
        "accuracy_interval": [accuracy["low"], accuracy["high"]],
        "gap": gap["value"],
        "gap_interval": [gap["low"], gap["high"]],
        "exact": float((labels == test.y.numpy()).mean()),
    }


def rivals(name: str, seeds: list[int], methods: list[str], epsilons: list[float]) -> None:
    """Keep a cell for each method and epsilon on one data set."""
    delta = {"adult": DELTA, "utkface": 1e-6}[name]
    with TemporaryDirectory() as folder:
        data = {"adult": adult_in_parts, "utkface": faces_in_parts}[name](Path(folder))
        for method, epsilon in itertools.product(methods, epsilons):
            found = [published(data, method, seed=seed, epsilon=epsilon, delta=delta) for seed in seeds]
            cell = {key: [each[key] for each in found] for key in found[0]}
            guarantee = {"unit": "record", "relation": "add or remove one", "delta": delta, "seeds": seeds}
            keep({f"{name}, {epsilon:g}, {method}": guarantee | cell})


def trials(seed: int, epsilon: float) -> float:
    """The exact test accuracy of the best of a secret number of trials, ten expected."""
    with TemporaryDirectory() as folder:
        os.environ["FAIRPATE_STATE"] = folder
        configs = settings_on_adult(Path(folder), seed=seed, epsilon=epsilon, noise="os_entropy")
        out = Path(folder) / "out"
        run = select_by_trials(configs, epsilon=epsilon, expected_trials=10, out=out, reporter=Reporter(quiet=True))
        return float(json.loads(run.metrics.read_text(encoding="utf-8"))["accuracy"])


def tuning(seed: int, epsilon: float) -> dict[str, float]:
    """Exact test accuracies of three choices among the same students, and the width of a private interval."""
    with TemporaryDirectory() as folder:
        configs = settings_on_adult(Path(folder), seed=seed, epsilon=epsilon, noise="seeded")
        alone = configs[0].release_alone.model_copy(update={"out": Path(folder) / "release"})
        with open_run(alone, Reporter(quiet=True)) as opened:
            dataset, released = opened.dataset, opened.config.release(opened)
            students = students_of(opened, configs, released)
            event = released.events[0]
            source, weights = OsEntropy(), group_weights(dataset, None)
            scores = [score_of(student, dataset.validation, weights, source) for student in students]
            price = PureReleases(count=1, epsilon=epsilon, unit=event.unit, relation=event.relation)
            made = choice_among(scores, price, source)
            chosen = int(made.arrays["chosen"][0])
            x, groups, y = dataset.test.x, dataset.test.z.numpy(), dataset.test.y.numpy()
            exact = [float((student.predict(x, groups).labels == y).mean()) for student in students]
            table = draw_table(students[chosen], dataset.test, table_at(epsilon), source, num_groups=2, num_classes=2)
            estimate = evaluation_of(table, group_names=dataset.group_names, class_names=dataset.label_names).estimates[
                0
            ]
        return {
            "private_choice": exact[chosen],
            "free_choice": exact[int(np.argmax(scores))],
            "defaults": exact[GRID.index((0.7, 0.001))],
            "worst": min(exact),
            "interval": estimate.high - estimate.low,
            "held": float(estimate.low <= exact[chosen] <= estimate.high),
        }


def keep(cells: dict[str, dict[str, Any]]) -> None:
    """Print cells and add them to the file at once, as it is by now: another process may be measuring too."""
    for name, cell in cells.items():
        print(name, cell, flush=True)
    measured.write("private_metrics", command=COMMAND, cells=measured.read("private_metrics") | cells)


def main() -> None:
    """Measure, print and keep everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replications", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--only", choices=("intervals", "tuning", "trials", "rivals"))
    parser.add_argument("--data", choices=("adult", "utkface"), nargs="+", default=["adult", "utkface"])
    parser.add_argument("--methods", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    options = parser.parse_args()
    for sensitive, least in (("sex", 0), ("race", 0), ("race", 100)) if options.only in (None, "intervals") else ():
        intervals(sensitive, options.replications, least=least)
    if options.only in (None, "intervals"):
        fixed_reach()
    guarantee = {"unit": "record", "relation": "add or remove one", "delta": DELTA, "seeds": options.seeds}
    for name in options.data if options.only in (None, "rivals") else ():
        rivals(name, options.seeds, options.methods, options.epsilons)
    for epsilon in EPSILONS if options.only in (None, "trials") else ():
        found: dict[str, Any] = {"by_trials": [trials(seed, epsilon) for seed in options.seeds]}
        keep({f"trials, {epsilon:g}": guarantee | found})
    for epsilon in EPSILONS if options.only in (None, "tuning") else ():
        each = [tuning(seed, epsilon) for seed in options.seeds]
        keep({f"tuning, {epsilon:g}": guarantee | {name: [one[name] for one in each] for name in each[0]}})


if __name__ == "__main__":
    main()
