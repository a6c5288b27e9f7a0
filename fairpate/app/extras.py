"""Optional packages, by the extra of `pip install 'fairpate[EXTRA]'` that installs them."""

from __future__ import annotations

import importlib
import warnings

from fairpate.types import UsageError

MODULES = {
    "oidc": ("joserfc",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "postgresql": ("psycopg",),
    "serve": ("ray.serve",),
    "traces": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
}
"""Modules that this project imports from each extra. All of them are imported only where they are needed."""


class MissingExtraError(UsageError):
    """An option that needs an extra which cannot be imported; the message says how to install it."""


def import_error(extra: str) -> Exception | None:
    """Import the modules of ``extra``; return the error of the first that cannot be imported, or None.

    A module that is found may still not work: `ray.serve` comes with Ray and needs packages that only the extra
    installs, and psycopg needs libpq. ModuleNotFoundError is an extra that is not installed; any other error is one
    that is broken.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages themselves
            for module in MODULES[extra]:
                importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        return error
    return None


def require_extra(extra: str, option: str) -> None:
    """MissingExtraError, which names ``option`` as what needs the extra, unless it can be imported."""
    error = import_error(extra)
    if error is not None:
        raise MissingExtraError(f"{option}: needs the extra {extra}, which is {install_words(extra, error)}")


def install_words(extra: str, error: Exception) -> str:
    """What is wrong with ``extra``, and the command that installs it."""
    if is_missing(error):
        return f"not installed ({getattr(error, 'name', None)} is missing): pip install 'fairpate[{extra}]'"
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    return f"installed and broken ({cause}): pip install --force-reinstall 'fairpate[{extra}]'"


def is_missing(error: Exception) -> bool:
    """Whether a package is missing, which a machine may well do without; all else is a broken installation."""
    return isinstance(error, ModuleNotFoundError)
