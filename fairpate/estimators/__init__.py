"""Every method behind scikit-learn's interface: ``fit``, ``predict``, ``predict_proba``.

:class:`FairClassifier` takes the method by name. Each registered method also has a class of its own, made from its
definition: :class:`DpSgdClassifier`, :class:`DpFermiClassifier`, :class:`FairPateClassifier` and so on, as ``__all__``
lists them. Parameters are the sections that the method's configuration has, so that they cannot differ from those of
the command line, and the same seed on the same records gives the same weights.

    classifier    :class:`FairClassifier`
    parameters    its parameters, and the configuration that they say
    records       arrays and frames as the data set that a run reads
    pipelines     what stands in front of a fit
    kept          the folder of a fitted estimator, without pickle
    told          statement, card and plot
    checks        which of scikit-learn's own checks fail, and why
"""

from __future__ import annotations

import inspect
from functools import cache

from fairpate.estimators.classifier import FairClassifier
from fairpate.estimators.parameters import parameters_of
from fairpate.estimators.records import dataset_of
from fairpate.methods import class_names, find_method


@cache
def _classifier(name: str, method: str) -> type[FairClassifier]:
    """The class of one registered method: :class:`FairClassifier` with a signature and without ``method``."""
    schema = find_method(method)

    def initialise(self: FairClassifier, **settings: object) -> None:
        FairClassifier.__init__(self, method, **settings)

    def parameter(name: str, default: object = inspect.Parameter.empty, *, first: bool = False) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if first else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default)

    parameters = [parameter("self", first=True), *(parameter(*each) for each in parameters_of(method).items())]
    initialise.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    words = inspect.getdoc(schema) or ""
    text = f"{schema.title} ({schema.paper}).\n\n{words}\n\nParameters and attributes as :class:`FairClassifier`."
    members = {"__init__": initialise, "__doc__": text, "__module__": __name__, "_names_method": False}
    return type(name, (FairClassifier,), members)


_METHOD_OF = {f"{name}Classifier": method for method, name in class_names().items()}
__all__ = ["FairClassifier", "dataset_of", *sorted(_METHOD_OF)]


def __getattr__(name: str) -> type[FairClassifier]:
    if name not in _METHOD_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _classifier(name, _METHOD_OF[name])


def __dir__() -> list[str]:
    return [*globals(), *_METHOD_OF]
