"""Train one model for several hospitals that share no record: on one laptop, each party is a process.

    fairpate new mine --example three-hospitals
    python mine/three_hospitals.py [--sites 3] [--epsilon 0.1] [--out runs/hospitals]

The records are simulated: visits whose readmission depends on age and ward. Every hospital has the same declaration,
the same public pool, its own private visits and its own odometer; the coordinator has the pool and test records. The
commands are printed, so that they can be typed on several machines instead. Afterwards the first hospital trains a
model on its own records only, at the same epsilon, for comparison.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from fairpate.pages import epsilon_text

DECLARATION = """\
name: visits
task: readmitted within 30 days
rows: 2000
files: {private: visits.csv, public: pool.csv, test: test.csv}
label: {column: readmitted, classes: {stays well: "no", comes back: "yes"}}
group: {column: sex, values: {female: F, male: M}}
person: patient
features:
  age: {bounds: [0, 100]}
  weight: {bounds: [20, 250]}
  ward: {categories: [A, B, C, D]}
identity: {key: [visit]}
"""


def write_visits(path: Path, first: int, count: int) -> None:
    """Write ``count`` simulated visits to a CSV file, numbered from ``first`` on; every patient has two visits."""
    lines = ["visit,patient,age,weight,ward,sex,readmitted"]
    for visit in range(first, first + count):
        # Seeded by the number of the visit, so that every party has the same pool.
        draws = random.Random(visit)
        age, ward = draws.randint(0, 99), draws.choice("ABCD")
        again = age + 20 * (ward == "D") + draws.gauss(0, 15) > 55
        words = (visit, f"p{visit // 2}", age, draws.randint(40, 120), ward, draws.choice("FM"), ("no", "yes")[again])
        lines.append(",".join(map(str, words)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def start(party: Path, *words: str) -> subprocess.Popen[str]:
    """Print a `fairpate` command and start it in the folder of ``party``, with an odometer of that party's own."""
    print(f"{party.name:12} fairpate {' '.join(words)}")
    return subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "fairpate", *words, "--json"],
        cwd=party,
        env=os.environ | {"FAIRPATE_STATE": str(party.absolute() / "state")},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a started command and return the facts it printed."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"failed: {output}")
    return json.loads(output)


def published(party: Path, name: str, field: str) -> Any:
    """Return a field of one of the files that the party's run published."""
    return json.loads((party / "run" / "public" / name).read_text(encoding="utf-8"))[field]


def main() -> None:
    """Write the files of all parties, train a joint model, and compare it with one from a single hospital's records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--out", type=Path, default=Path("runs/hospitals"))
    given = parser.parse_args()

    coordinator, hospitals = given.out / "coordinator", [given.out / f"hospital{k}" for k in range(given.sites)]
    for number, party in enumerate([coordinator, *hospitals]):
        party.mkdir(parents=True)
        (party / "visits.yaml").write_text(DECLARATION, encoding="utf-8")
        write_visits(party / "pool.csv", 1_000_000, 500)
        write_visits(party / "test.csv", 2_000_000, 1000)
        if party != coordinator:
            write_visits(party / "visits.csv", 10_000 * number, 400)

    keys = [result(start(party, "site", "key", "own.key"))["key"] for party in hospitals]
    roster = "".join(f"{party.name}: {key}\n" for party, key in zip(hospitals, keys, strict=True))
    (coordinator / "roster.yaml").write_text(roster, encoding="utf-8")
    epsilon = str(given.epsilon)
    planning = ("visits.yaml", "--sites", "roster.yaml", "--epsilon", epsilon, "-o", "plan.json")
    digest = result(start(coordinator, "site", "plan", *planning))["digest"]

    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    serving = ("plan.json", "--data", "visits.yaml", "--out", "run", "--port", port)
    agreed = ("--plan", digest, "--yes")
    joining = (f"http://127.0.0.1:{port}", "--data", "visits.yaml", "--key", "own.key", "--out", "run", *agreed)
    processes = [start(coordinator, "site", "serve", *serving)]
    processes += [start(party, "site", "join", *joining) for party in hospitals]
    for process in processes:
        result(process)
    alone = ("--data", "visits.yaml", "--method", "weighted_votes", "--epsilon", epsilon, "--out", "alone")
    result(start(hospitals[0], "run", *alone))

    accuracy = json.loads((hospitals[0] / "alone/public/metrics.json").read_text(encoding="utf-8"))["accuracy"]
    stated = epsilon_text(published(coordinator, "statement.json", "epsilon"), digits=3)
    print(f"{given.sites} hospitals: {published(coordinator, 'metrics.json', 'accuracy'):.1%} at epsilon {stated}")
    print(f"the first alone: {accuracy:.1%} at the same epsilon")


if __name__ == "__main__":
    main()
