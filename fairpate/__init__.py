"""FairPATE: accurate, differentially private and fair classifiers from many teachers."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fairpate")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
