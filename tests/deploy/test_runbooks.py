"""docs/operations.md is typed as it stands: as root, beside a service under the units of deploy/."""

import importlib
import re
from pathlib import Path

import own_machine
import pytest

from fairpate.methods.base import configured
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
NOT_HERE = ("promtool", "pg_isready", "iostat", "journalctl")  # programs of others, which a machine may lack
SMALL = {
    "ray.num_actors": 0,
    "teachers.num_teachers": 10,
    "teachers.fit.epochs": 2,
    "data.num_public": 120,
    "data.num_test": 200,
    "data.options.colour_as_feature": "false",
    "aggregator.num_queries": 40,
    "aggregator.mechanism.threshold": 0,
    "aggregator.mechanism.threshold_stddev_votes": 1,
    "aggregator.mechanism.noise_stddev_votes": 1,
    "target.epsilon": "null",
    "aggregator.budget": "{max_queries: 100}",
    "student.fit.epochs": 3,
}

pytestmark = [
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.skipif(bool(own_machine.why_not()), reason=own_machine.why_not()),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that leaves room for queries, and the operator's odometer, as folders of the machine."""
    folder = tmp_path_factory.mktemp("made")
    overrides = [f"out={folder / 'run'}", *(f"{name}={value}" for name, value in SMALL.items())]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(folder / "state"))
        run_method(configured({}, overrides, method="fairpate"), Reporter(quiet=True))
    # Compiled by root: the service's user may not write beside modules, and each of its commands would compile them.
    for name in COMPILED:
        importlib.import_module(name)
    return {folder / "run": "/srv/fairpate/RUN", folder / "state": "/var/lib/fairpate/state"}


COMPILED = ("aggregator.client", "aggregator.service.actor", "fairpate.cli.services", "fairpate.run.publication")


def replaced(text):
    """What is in capitals is replaced, as the page asks; the run is called RUN."""
    return text.replace("/BACKUP_FOLDER", "/srv/backup").replace("/ANCHOR_FOLDER", "/srv/anchor")


SET_UP = [line for line in own_machine.commands_of(replaced(PAGE.partition("## Watch")[0])) if line != "fairpate"]
UNITS = (
    "for unit in deploy/fairpate*.service deploy/fairpate*.timer; do sed "
    "'s,/BACKUP_FOLDER,/srv/backup,; s,/ANCHOR_FOLDER,/srv/anchor,' $unit > /etc/systemd/system/$(basename $unit); done"
)
ROOTS = "FAIRPATE_STATE=/var/lib/fairpate/state /opt/fairpate/.venv/bin/fairpate"
OWNERS = "find /srv /var/lib/fairpate /etc/fairpate -mindepth 1 -not -user fairpate"


def failed(results):
    return [(line, code, said) for line, code, said in results if code]


@pytest.mark.slow  # a dozen processes
def test_an_anchor_works_under_the_units_and_files_of_root_are_the_services(tmp_path, made):
    """Without a service: each unit's folders are read-only but those that it names, for a user without privileges."""
    before = [line for line in SET_UP if "systemctl" not in line and "tokens add" not in line]
    anchor = "head -c 20 /srv/anchor/anchor"
    lines = [
        *before,
        UNITS,
        # As root without the page's function, as somebody types it who skipped that: what root leaves can be used.
        f"{ROOTS} tokens add /srv/fairpate/RUN alice",
        f"{ROOTS} ledger backup /srv/fairpate/RUN /srv/backup/copy.sqlite",
        f"{ROOTS} ledger anchor /srv/fairpate/RUN /srv/anchor/anchor",
        f"{ROOTS} ledger restore /srv/backup/copy.sqlite /srv/fairpate/RUN",
        OWNERS,
        "systemctl start fairpate-backup fairpate-verify",
        "protected fairpate-verify sh -c 'echo > /srv/anchor/anchor'",
        anchor,
        # The writer of the ledger, as the service's unit lets it.
        "protected fairpate /opt/fairpate/.venv/bin/python /srv/fairpate/charge.py",
        anchor,
        OWNERS,
    ]
    (tmp_path / "charge.py").write_text(CHARGE, encoding="utf-8")
    lines.insert(len(before), f"install --owner fairpate {tmp_path}/charge.py /srv/fairpate/charge.py")
    results = own_machine.typed(lines, tmp_path / "machine", made)
    refused, *others = failed(results)
    assert (refused[0], others) == ("protected fairpate-verify sh -c 'echo > /srv/anchor/anchor'", [])
    first, second = (int(said) for line, _, said in results if line == anchor)
    assert second == first + 2  # a charge and its outcome
    assert [said for line, _, said in results if line == OWNERS] == ["", ""]


CHARGE = """
import json, sqlite3
import numpy as np
from aggregator.ledger import Ledger, LedgerTerms
from aggregator.mechanism import Outcome
from fairpate.releases.run_ledger import place_of
from fairpate.releases.directory import run_at
from pathlib import Path

run = run_at(Path("/srv/fairpate/RUN"))
database = sqlite3.connect(run.ledger)
(text,) = database.execute("SELECT terms FROM chain").fetchone()
database.close()
place, terms = place_of(run), LedgerTerms.from_json(json.loads(text))
with Ledger(place.ledger, terms, create=False, anchor=place.anchor) as ledger:
    votes_QC = np.zeros((1, terms.num_classes), dtype=np.int64)
    ledger.commit(ledger.reserve(["query"], [0], votes_QC), [Outcome(verdict="answer", label=0)])
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_does_what_it_says_beside_a_running_service(tmp_path, made):
    everything = own_machine.commands_of(replaced(PAGE))
    beside = "systemctl start fairpate-backup fairpate-verify"  # the other test types it without a service
    lines = []
    for number, line in enumerate(everything):
        if line.startswith(NOT_HERE) or line in ("fairpate",):
            continue
        # What the page says twice and changes nothing is typed once, at the end.
        if line.startswith(("curl", "fairpate ledger verify")) and line in everything[number + 1 :]:
            continue
        # A service takes many seconds to start: once at the beginning, and once after all that needs it stopped.
        if number > everything.index("systemctl stop fairpate") and line.startswith("systemctl s") and "-" not in line:
            continue
        if line in ("systemctl restart fairpate", beside):
            continue
        lines.append(line)
        if line.startswith("cp deploy/fairpate"):
            lines.append(UNITS)  # with folders in the place of capitals
        if line.startswith("fairpate tokens revoke"):
            lines.append("fairpate tokens add /srv/fairpate/RUN alice")  # whom a later section slows down
    lines += ["systemctl restart fairpate", "systemctl start fairpate"]
    ask = "fairpate query --token-file /etc/fairpate/analysts.tokens ask {}"
    anchor = "head -c 20 /srv/anchor/anchor"
    lines += [anchor, ask.format(100), anchor, beside, OWNERS, "cat /var/log/fairpate/service.jsonl | head -c 200"]
    assert sum(line.startswith("fairpate ") for line in everything) >= 15
    results = own_machine.typed(lines, tmp_path / "machine", made)
    assert failed(results) == []
    first, second = (int(said) for line, _, said in results if line == anchor)
    assert second > first
    assert [said for line, _, said in results if line == OWNERS] == [""]
    (total,) = (said for line, _, said in results if line == "fairpate ledger total")
    assert "color_digits" in total
    assert re.search(r'"(level|time)"', results[-1][2])
