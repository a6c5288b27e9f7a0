"""Imported by Python processes that tests start: they leave out model.onnx, 6 processor seconds of a run, as where its
packages are missing (`with_graphs` of tests/conftest.py writes it). They do not have pandas, as where fairlearn is
missing: pyarrow would import it for the first value that it converts, half a processor second."""

import atexit
import gc
import sys
from importlib.machinery import ModuleSpec


class WithoutPandas:
    @staticmethod
    def find_spec(name, *_):
        # Who only asks where it is, as torch does, is told.
        return ModuleSpec(name, WithoutPandas) if name == "pandas" else None

    @staticmethod
    def create_module(_):
        return None

    @staticmethod
    def exec_module(module):
        raise ModuleNotFoundError(name=module.__name__)


gc.set_threshold(50_000, 10, 10)  # what is imported stays, as in tests/conftest.py
atexit.register(gc.freeze)  # also at the end: half a second where torch is imported
sys.modules["onnxscript"] = None
sys.meta_path.insert(0, WithoutPandas)
