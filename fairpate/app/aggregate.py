"""`fairpate aggregate`: labels, and perhaps a student, of votes that were made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairpate.app.run import release_alone, run_method
from fairpate.app.rundir import RunDirectory
from fairpate.app.terminal.progress import Reporter
from fairpate.app.votes_file import read_votes_file, resolved
from fairpate.methods.load import configured
from fairpate.methods.own_votes import OwnVotes


def aggregate(values: dict[str, Any], overrides: Sequence[str], reporter: Reporter) -> RunDirectory:
    """One release of the labels of a file of votes, however often the command is given; with features, a student too.

    ``values`` and ``overrides`` configure :class:`OwnVotes`. VotesFileError lists all that is wrong with the file,
    ConfigError what is wrong with the settings.
    """
    config = configured(values, overrides, method="own_votes")
    assert isinstance(config, OwnVotes)
    config.check()
    config = config.model_copy(update={"votes": resolved(config.votes)})
    if config.votes.features:
        return run_method(config, reporter, with_graph=True)
    return release_alone(config, reporter, read_votes_file(config.votes).dataset)
