"""An open run: what every stage of a run reads, while this process has its folder locked."""

from dataclasses import dataclass

from fairpate.methods.base import Method, Training
from fairpate.releases.log import ReleaseLog


@dataclass(frozen=True, kw_only=True)
class OpenRun(Training):
    """A run whose folder this process has locked, with everything that the stages of the run read: data, settings and
    release log."""

    config: Method
    log: ReleaseLog
