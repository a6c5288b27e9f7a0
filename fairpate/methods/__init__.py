"""The methods, a file per paper; a line here makes one known to the command line, sweeps, estimators and pages.

Another package adds its own under the entry point group ``fairpate.methods``, or is named as ``module:Class``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from fairpate.config import ConfigError
from fairpate.named_code import PLACE, named_object
from fairpate.names import nearest

if TYPE_CHECKING:
    from fairpate.methods.definition import Method

DEFAULT = "fairpate"
_GROUP = "fairpate.methods"
_OURS = {
    "fairpate": "pate:FairPate",
    "pate": "pate:Pate",
    "pate_s_pre": "pate:PateSPre",
    "pate_s_in": "pate:PateSIn",
    "sf_pate": "sf_pate:SfPate",
    "private_knn": "private_knn:PrivateKnn",
    "record_votes": "record_votes:RecordVotes",
    "weighted_votes": "weighted_votes:WeightedVotes",
    "sgd": "sgd:Sgd",
    "dp_sgd": "dp_sgd:DpSgd",
    "fair_dp_sgd": "fair_dp_sgd:FairDpSgd",
    "dp_fermi": "dp_fermi:DpFermi",
    "f_ld": "f_ld:FLd",
    "covariance_constraint": "covariance_constraint:CovarianceConstraint",
    "pf_ld": "pf_ld:PfLd",
    "raco_dp": "raco_dp:RacoDp",
    "dp_postprocessing": "dp_postprocessing:Postprocessing",
    "dp_oracle_learner": "dp_oracle_learner:OracleLearner",
    "randomised_response": "randomised_response:RandomisedResponse",
}
_ELSEWHERE = {"own_votes": "own_votes:OwnVotes"}
"""Found by its name and not listed: it trains nothing, and needs a file of votes (`fairpate aggregate`)."""


@cache
def _places() -> dict[str, str]:
    """Where the class of every name is, as ``module:Class``."""
    others = {entry.name: entry.value for entry in metadata.entry_points(group=_GROUP)}
    # Ours last: no other package takes the name of one of ours.
    return others | {name: f"{_GROUP}.{place}" for name, place in _OURS.items()}


def method_names() -> Iterator[str]:
    """Every registered name."""
    return iter(_places())


def own_names() -> Iterator[str]:
    """Those of this package."""
    return iter(_OURS)


@cache
def find_method(name: str) -> type[Method]:
    """The class of a registered name, or of ``module:Class``. ConfigError where there is none that can run."""
    place = name if PLACE.fullmatch(name) else _places().get(name)
    if name in _ELSEWHERE:
        place = f"{_GROUP}.{_ELSEWHERE[name]}"
    if place is None:
        raise ConfigError(f"method: no method {name!r}{nearest(name, list(_places()))}.")
    try:
        found = named_object(place)
    except Exception as error:  # whatever a module of another package raises
        raise ConfigError(
            f"method: {name} cannot be imported ({type(error).__name__}: {error}); give module:Class, its folder in "
            "PYTHONPATH or as the working directory."
        ) from error
    from fairpate.methods.definition import Method

    if not isinstance(found, type) or not issubclass(found, Method):
        raise ConfigError(f"method: {name} is no subclass of fairpate.methods.definition.Method.")
    missing = [word for word in ("title", "paper") if not hasattr(found, word)]
    if missing or found.train is Method.train:
        raise ConfigError(f"method: {name} is no whole method, it lacks {', '.join(missing) or 'train'}; add it.")
    try:
        found()
    except ValueError as error:
        raise ConfigError(f"method: {name} cannot be made from its defaults ({error}); correct its fields.") from error
    return found


def method_title(name: str) -> str:
    """What pages call a method of this package; for any other its name, so that no code of others runs."""
    return find_method(name).title if name in _OURS or name in _ELSEWHERE else name


def all_methods() -> dict[str, type[Method]]:
    """Every registered method by name; imports them all. Another package's that cannot be is left out."""
    found = {}
    for name in method_names():
        try:
            found[name] = find_method(name)
        except ConfigError:
            if name in _OURS:
                raise
    return found
