"""Mixed precision: what runs in it, what never does, and that it changes rounding only."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from fairpate.config import FitConfig, ModelConfig, StudentTraining
from fairpate.nn.fit import fit, predict_logits
from fairpate.nn.models import build_model
from fairpate.nn.per_example import CrossEntropy, GradientClipper
from student.student import PublicRecords, train_student

pytestmark = pytest.mark.usefixtures("light_runs")

Precision = Literal["float32", "bfloat16"]


def records(count: int = 96) -> tuple[Tensor, Tensor]:
    """Pictures whose brighter half tells the class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 2
    x = torch.randint(0, 128, (count, 1, 16, 16), generator=generator)
    x[y == 0, :, :8] += 100
    x[y == 1, :, 8:] += 100
    return x.to(torch.uint8), y


def trained(precision: Precision, name: str = "lenet") -> tuple[nn.Module, set[torch.dtype], list[float]]:
    """A model, the types in which its layers produced values while it was trained, and its losses."""
    x, y = records()
    model = build_model(ModelConfig(name=name, hidden=(4,)), input_shape=(1, 16, 16), num_classes=2, generator_seed=0)  # type: ignore[arg-type]
    seen: set[torch.dtype] = set()
    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(lambda *args: seen.add(args[2].dtype)) for layer in layers]
    losses: list[float] = []
    config = FitConfig(epochs=4, batch_size=16, precision=precision)
    fit(model, x, y, config, generator=torch.Generator().manual_seed(1), on_epoch=lambda _, loss: losses.append(loss))
    for handle in handles:
        handle.remove()
    return model, seen, losses


@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_layers_run_in_bfloat16_and_weights_stay_float32(name: str) -> None:
    model, seen, losses = trained("bfloat16", name)
    assert seen == {torch.bfloat16}
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_bfloat16_changes_rounding_only_and_repeats() -> None:
    (exact, seen, losses), (rounded, _, rounded_losses), (again, _, _) = map(
        trained, ("float32", "bfloat16", "bfloat16")
    )
    assert seen == {torch.float32}
    assert rounded_losses == pytest.approx(losses, rel=0.05, abs=1e-3)
    assert rounded_losses != losses
    x, _ = records()
    assert predict_logits(rounded, x).dtype == torch.float32
    assert torch.equal(predict_logits(rounded, x), predict_logits(again, x))
    assert torch.equal(predict_logits(rounded, x).argmax(dim=1), predict_logits(exact, x).argmax(dim=1))


@pytest.mark.slow
def test_fixmatch_learns_in_bfloat16_too() -> None:
    x, y = records()
    public = PublicRecords(answered_x=x[:32], labels=y[:32], unlabelled_x=x[32:])
    config = StudentTraining(
        model=ModelConfig(name="lenet"),
        method="fixmatch",
        fit=FitConfig(epochs=6, batch_size=8, precision="bfloat16"),
    )
    before = build_model(config.model, input_shape=(1, 16, 16), num_classes=2, generator_seed=0)
    model = train_student(
        public, config, num_classes=2, generator=torch.Generator().manual_seed(0), initial_model=before
    )
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert float((predict_logits(model, x).argmax(dim=1) == y).float().mean()) > 0.95


def test_clipping_refuses_rounded_norms() -> None:
    model = build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=2, generator_seed=0)
    clipper = GradientClipper(model, CrossEntropy(), clip_norm=1.0)
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="leave autocast out"):
        clipper.sum(x, y)
    assert clipper.sum(x, y).gradients[0].dtype == torch.float32
