"""Imported by Python processes that tests start: they leave out model.onnx, 6 processor seconds of a run, as where its
packages are missing (`with_graphs` of tests/conftest.py writes it). They do not have pandas, as where fairlearn is
missing: pyarrow would import it for the first value that it converts, half a processor second. What torch knows of the
shapes of tensors without values, which it traces graphs with, is loaded when it is asked for: a third of its import."""

import atexit
import gc
import importlib
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


class LazyShapes:
    @staticmethod
    def find_spec(name, *_):
        return ModuleSpec(name, LazyShapes) if name == "torch._meta_registrations" else None

    @staticmethod
    def create_module(_):
        return None

    @staticmethod
    def exec_module(module):
        def loaded(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if LazyShapes in sys.meta_path:
                sys.meta_path.remove(LazyShapes)
                del sys.modules[module.__name__]
            return getattr(importlib.import_module(module.__name__), name)

        module.__getattr__ = loaded
        # What its import also does, as far as somebody needs it who traces nothing.
        torch = sys.modules["torch"]
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


gc.set_threshold(50_000, 10, 10)  # what is imported stays, as in tests/conftest.py
atexit.register(gc.freeze)  # also at the end: half a second where torch is imported
sys.modules["onnxscript"] = None
sys.meta_path[:0] = [WithoutPandas, LazyShapes]
