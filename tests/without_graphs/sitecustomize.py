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
    name = "torch._meta_registrations"

    @classmethod
    def find_spec(cls, name, *_):
        if name == "torchvision" and cls.name in sys.modules:  # whose own shapes are registered beside them
            cls.load()
        return ModuleSpec(name, cls) if name == cls.name else None

    @classmethod
    def load(cls):
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)
            del sys.modules[cls.name]
        return importlib.import_module(cls.name)

    @staticmethod
    def create_module(_):
        return None

    @classmethod
    def exec_module(cls, module):
        def asked(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(cls.load(), name)

        module.__getattr__ = asked
        # What its import also does, as far as somebody needs it who traces nothing.
        torch = sys.modules["torch"]
        torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


gc.set_threshold(50_000, 10, 10)  # what is imported stays, as in tests/conftest.py
atexit.register(gc.freeze)  # also at the end: half a second where torch is imported
sys.modules["onnxscript"] = None
sys.meta_path[:0] = [WithoutPandas, LazyShapes]
