"""Tests that run on the CPU, and once more on a GPU where the machine has one."""

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
