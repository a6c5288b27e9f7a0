"""Imported by Python processes that tests start: they leave out model.onnx, 6 processor seconds of a run, as where its
packages are missing (`with_graphs` of tests/conftest.py writes it)."""

import sys

sys.modules["onnxscript"] = None
