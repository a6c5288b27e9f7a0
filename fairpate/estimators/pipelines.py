"""What stands in front of a fit: the steps of the scikit-learn pipelines that call it.

A step that is fitted to private records, such as a scaler, touches them without an event, so no epsilon counts it; and
public records that do not go through it are incomparable with private ones. A pipeline does not tell its last step of
the others, so the callers are looked at. What happens in another process, or by hand before a fit, is not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags


def steps_in_front() -> tuple[Pipeline, ...]:
    """The pipelines with steps before their last one that are being fitted by the callers, innermost first."""
    return tuple(pipeline for pipeline in _fitting() if _transformers(pipeline))


def fitted_steps(pipelines: tuple[Pipeline, ...]) -> tuple[str, ...]:
    """Names of steps that learn from what they are fitted to."""
    return tuple(
        name for pipeline in pipelines for name, step in _transformers(pipeline) if get_tags(step).requires_fit
    )


def passes_public_on(pipeline: Pipeline) -> bool:
    """Whether ``public_X`` goes through the same steps as ``X``."""
    return "public_X" in (getattr(pipeline, "transform_input", None) or ())


def _fitting() -> Iterator[Pipeline]:
    frame = inspect.currentframe()
    while frame is not None:
        # Of `fit`, `fit_transform` and `fit_predict`, which all fit.
        owner = frame.f_locals.get("self") if frame.f_code.co_name.startswith("fit") else None
        if isinstance(owner, Pipeline):
            yield owner
        frame = frame.f_back


def _transformers(pipeline: Pipeline) -> list[tuple[str, object]]:
    return [(name, step) for name, step in pipeline.steps[:-1] if step not in (None, "passthrough")]
