"""Which models have per-example gradients: what is refused, and that everything else has those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from doubled import Doubled
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.nn.per_example import CrossEntropy, GradientClipper, unknown_module

BATCH = 5


class Written(nn.Module):
    """Linear layers and a forward pass of any kind, which the type does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x - x.mean(dim=0)))  # type: ignore[no-any-return]


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 4, dtype=torch.float64, generator=generator), torch.arange(BATCH) % 3


def refused(model: nn.Module) -> str:
    with pytest.raises(ValueError, match="known to run once, on their own weights") as caught:
        GradientClipper(model, CrossEntropy(), clip_norm=1.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm1d(4), "BatchNorm1d"),
        (nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm1d"),
        (nn.BatchNorm1d(4).requires_grad_(False).eval(), "BatchNorm1d"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "InstanceNorm1d"),
    ],
)
def test_layers_that_keep_statistics_are_refused_by_name(norm: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 3))
    assert refused(model).startswith(f"Module 1 ({name})")
    assert "use" in refused(model)
    assert "GroupNorm or LayerNorm" in refused(model)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda _, __, output: output.tanh())
    return model


def own_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    linear = model[0]
    linear.forward = lambda x: 2 * functional.linear(x, linear.weight)  # type: ignore[method-assign]
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))


def foreign() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    return model


ALTERED: dict[str, Callable[[], nn.Module]] = {
    "a hook": hooked,
    "a forward of its own": own_forward,
    "two layers that share a weight": tied,
    "a layer twice": twice,
    "a parameter that no layer has": foreign,
    "a forward pass in Python": Written,
    "a layer that looks records up": lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten()),
    "a subclass": lambda: nn.Sequential(Doubled(4, 4), nn.Linear(4, 3)),
    "a parametrised weight": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "a softmax over any axis": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 3)),
    "a layer without a closed form": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", ALTERED)
def test_what_is_altered_is_refused(name: str) -> None:
    assert refused(ALTERED[name]()).startswith("Module ")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("resnet50", "densenet121")))
        for name in get_args(ModelConfig.model_fields["name"].annotation)
    ],
)
def test_the_architectures_of_this_project_are_known(name: Any) -> None:
    model = build_model(ModelConfig(name=name), input_shape=(2, 32, 32), num_classes=3, generator_seed=0)
    assert unknown_module(model) is None


def test_flattening_records_together_is_not_known() -> None:
    assert unknown_module(nn.Sequential(nn.Flatten(0), nn.Linear(8, 3))) == "Module 0 (Flatten)"
    assert unknown_module(nn.Sequential(nn.Unflatten(0, (2, 2)), nn.Linear(8, 3))) == "Module 0 (Unflatten)"
    assert unknown_module(nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten(1), nn.Linear(8, 3))) is None
    assert unknown_module(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((5, 4)).requires_grad_(False))) is not None


def test_a_layer_norm_over_records_is_refused_where_it_runs() -> None:
    model = nn.Sequential(nn.LayerNorm((BATCH, 4)), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match="LayerNorm reads an input without an axis for records"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(*records())
