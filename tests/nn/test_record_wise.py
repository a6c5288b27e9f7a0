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
    """Three linear layers and a forward pass of any kind."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.5]))
        self.register_buffer("seen", torch.zeros(4))
        self.norm, self.attention = nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.elsewhere, self.last = [self.first.weight], torch.zeros(4)
        self.written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def reused(m: Any, x: Tensor) -> Tensor:
    return m.second(functional.linear(m.first(x).tanh(), m.first.weight))


def attended(m: Any, x: Tensor) -> Tensor:
    tokens = torch.stack([x, x.flip(1), 2 * x], dim=1)
    return m.second(m.attention(tokens, tokens, tokens)[0].mean(dim=1))


def remembered(m: Any, x: Tensor) -> Tensor:
    out = m.second(m.first(x) + m.last)
    m.last = x.detach().mean(dim=0)
    return out


def counted(m: Any, x: Tensor) -> Tensor:
    m.seen += x.detach().sum(dim=0)
    return m.second(m.first(x))


SUPPORTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a weight used as a function": lambda m, x: functional.linear(
        functional.linear(x, m.first.weight), m.second.weight
    ),
    "a weight used by its layer and as a function": reused,
    "a layer that runs twice": lambda m, x: m.second(m.first(m.first(x).tanh())),
    "a parameter of the model itself": lambda m, x: m.second(m.scale * m.first(x)),
    "statistics of a record": lambda m, x: m.second(m.first(x - x.mean(dim=1, keepdim=True))),
    "an operation in place": lambda m, x: m.second(m.first(x).mul_(2).relu_()),
    "attention": attended,
    "layer norm": lambda m, x: m.second(m.norm(m.first(x))),
}
MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "less the mean of the batch": lambda m, x: m.second(m.first(x - x.mean(dim=0))),
    "a softmax over records": lambda m, x: m.second(m.first(x).softmax(dim=0)),
    "sorted records": lambda m, x: m.second(m.first(x).sort(dim=0).values),
    "attention among records": lambda m, x: m.second(m.attention(x[None], x[None], x[None])[0][0]),
    "what the call before left": remembered,
    "random numbers of its own": lambda m, x: m.second(m.first(x) + torch.randn_like(x)),
}


def records() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 4, dtype=torch.float64, generator=generator), torch.arange(BATCH) % 3


def assert_is_autograd(model: nn.Module, x: Tensor, y: Tensor, engine: Any = "auto") -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    alone = [
        torch.autograd.grad(
            functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]),
            parameters,
            allow_unused=True,
            materialize_grads=True,
        )
        for i in range(len(x))
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in record]).norm() for record in alone])
    clip_norm = float(norms.median())
    got = GradientClipper(model, CrossEntropy(), clip_norm=clip_norm, engine=engine).sum(x, y)
    torch.testing.assert_close(got.norms_B, norms, rtol=1e-9, atol=1e-12)
    factors = (clip_norm / norms).clamp(max=1)
    for ours, *theirs in zip(got.gradients, *alone, strict=True):
        torch.testing.assert_close(
            ours, sum(f * g for f, g in zip(factors, theirs, strict=True)), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_the_closed_forms_do_not_cover_goes_record_by_record(name: str) -> None:
    torch.manual_seed(0)
    model = Written(SUPPORTED[name]).double()
    with pytest.raises(ValueError, match=r"Module of the model itself \(Written\).*use engine `functional`"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0, engine="book_keeping")
    assert GradientClipper(model, CrossEntropy(), clip_norm=1.0).engine == "functional"
    assert_is_autograd(model, *records())


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_records_is_refused_at_its_first_batch(name: str) -> None:
    torch.manual_seed(0)
    model = Written(MIXING[name]).double()
    clipper = GradientClipper(model, CrossEntropy(), clip_norm=1.0)
    with pytest.raises(ValueError, match="mixes records, so no record has a gradient of its own"):
        clipper.sum(*records())


def test_the_error_names_the_innermost_module_that_mixes() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(dim=0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Centred()), nn.Linear(4, 3)).double()
    with pytest.raises(ValueError, match=r"Module 1\.1 \(Centred\) gives a record another output"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(*records())


def test_one_record_is_enough_to_find_out() -> None:
    x, y = records()
    with pytest.raises(ValueError, match="mixes records"):
        GradientClipper(Written(MIXING["less the mean of the batch"]).double(), CrossEntropy(), clip_norm=1.0).sum(
            x[:1], y[:1]
        )


def test_what_a_forward_pass_changes_is_found_and_put_back() -> None:
    model = Written(counted).double()
    with pytest.raises(ValueError, match="changes seen, so that records reach the model unclipped"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(*records())
    assert not model.seen.any()  # type: ignore[operator]


def test_embeddings_that_shorten_themselves_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"changes 0\.weight"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))
    assert torch.equal(model[0].weight, before)


def test_a_parameter_read_from_another_place_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model = Written(lambda m, x: m.second(functional.linear(x, m.elsewhere[0]))).double()
    model.elsewhere = [model.first.weight]
    with pytest.raises(ValueError, match=r"Parameter first\.weight: per-example gradients do not sum"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(*records())


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
    with pytest.raises(ValueError, match=rf"Module 1 \({name}\) mixes the records.*use GroupNorm or LayerNorm"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0)


def test_instance_norm_without_running_statistics_is_a_function_of_the_record() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(4, 3))
    assert_is_autograd(model.double(), *records())


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
    "a subclass": lambda: nn.Sequential(Doubled(4, 4), nn.Linear(4, 3)),
    "a parametrised weight": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
    "a softmax over any axis": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 3)),
    "a layer without a closed form": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 3)),
}


@pytest.mark.parametrize("name", ALTERED)
def test_what_is_altered_is_not_known_and_right_all_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = ALTERED[name]().double()
    assert unknown_module(model) is not None
    assert_is_autograd(model, *records())


@pytest.mark.parametrize("name", get_args(ModelConfig.model_fields["name"].annotation))
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
    with pytest.raises(ValueError, match="LayerNorm reads records without an axis of their own"):
        GradientClipper(model, CrossEntropy(), clip_norm=1.0).sum(*records())


def test_dropout_draws_for_every_record_and_is_on_after_the_trial() -> None:
    torch.manual_seed(0)
    model = Written(lambda m, x: m.second(m.dropout(m.first(x))))
    model.dropout = nn.Dropout(0.5)
    x = torch.ones(200, 4)
    got = GradientClipper(model, CrossEntropy(), clip_norm=1e6).sum(x, torch.zeros(200, dtype=torch.long))
    assert model.dropout.training
    assert len(got.norms_B.unique()) > 5


def test_the_trial_is_made_once() -> None:
    calls: list[int] = []
    model = Written(lambda m, x: calls.append(len(x)) or m.second(m.first(x))).double()
    clipper = GradientClipper(model, CrossEntropy(), clip_norm=1.0)
    clipper.sum(*records())
    first = len(calls)
    clipper.sum(*records())
    assert len(calls) - first == 1
