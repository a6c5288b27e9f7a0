"""What tests of runs share: running quietly, reading what was written, copying a run."""

import dataclasses
import json
import shutil
import sqlite3
from pathlib import Path

from aggregator.ledger import LedgerTerms
from fairpate.run.run import run_method
from fairpate.terminal import Reporter

FILES = {"student.safetensors", "statement.json", "record.json", "metrics.json", "report.html"}
QUIET = Reporter(quiet=True)


def run(config):
    return run_method(config, QUIET)


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def copied(folder, to):
    """A copy of a run in another folder: what a repeated command finds."""
    return dataclasses.replace(folder, root=Path(shutil.copytree(folder.root, to)))


def open_terms(folder):
    """The terms that a ledger was made with, read from its file."""
    database = sqlite3.connect(folder.ledger)
    (text,) = database.execute("SELECT terms FROM chain").fetchone()
    database.close()
    return LedgerTerms.from_json(json.loads(text))
