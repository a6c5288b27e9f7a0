"""Clipped sums against brute force: one record at a time through autograd, and clipping done by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import ModelConfig
from fairpate.nn import per_example
from fairpate.nn.models import build_model
from fairpate.nn.per_example import ClippedSum, GradientClipper

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
]

BATCH = 5


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def clipped_sum(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    clip_norm: float,
    max_records: int | None = None,
) -> ClippedSum:
    return GradientClipper(model, loss, clip_norm=clip_norm, max_records=max_records).sum(x, y)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def brute_force(model: nn.Module, x: Tensor, y: Tensor, clip_norm: float) -> tuple[list[Tensor], Tensor]:
    """The same sum, one backward pass per record."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, norms = [torch.zeros_like(p) for p in parameters], []
    for i in range(len(x)):
        gradients = torch.autograd.grad(
            loss(model(x[i : i + 1]), y[i : i + 1])[0], parameters, allow_unused=True, materialize_grads=True
        )
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        norms.append(norm)
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += min(1.0, clip_norm / float(norm)) * gradient
    return total, torch.stack(norms)


def images(channels: int = 4, side: int = 9) -> Tensor:
    return torch.randn(BATCH, channels, side, side, dtype=torch.float64, generator=generator())


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "no bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "padding": lambda: nn.Conv2d(4, 6, 3, padding=(1, 2)),
    "stride": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=1),
    "dilation": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2),
    "same": lambda: nn.Conv2d(4, 6, 5, padding="same"),
    "two groups": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1),
    "depthwise, dilated": lambda: nn.Conv2d(4, 8, (3, 2), groups=4, dilation=(1, 2), padding=1),
    "one pixel": lambda: nn.Conv2d(4, 6, 1),
    "as wide as the image": lambda: nn.Conv2d(4, 6, (1, 9)),
}
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (lambda: nn.Linear(7, 4), lambda: torch.randn(BATCH, 7, dtype=torch.float64, generator=generator())),
    "dense without bias": (
        lambda: nn.Linear(7, 4, bias=False),
        lambda: torch.randn(BATCH, 7, dtype=torch.float64, generator=generator()),
    ),
    "dense over positions": (
        lambda: nn.Linear(7, 4),
        lambda: torch.randn(BATCH, 3, 2, 7, dtype=torch.float64, generator=generator()),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), images),
    "group norm of a table": (
        lambda: nn.GroupNorm(2, 6),
        lambda: torch.randn(BATCH, 6, dtype=torch.float64, generator=generator()),
    ),
    "layer norm": (
        lambda: nn.LayerNorm((5, 6)),
        lambda: torch.randn(BATCH, 3, 5, 6, dtype=torch.float64, generator=generator()),
    ),
    **{f"convolution, {name}": (make, images) for name, make in CONVOLUTIONS.items()},
}


def model_of(make: Callable[[], nn.Module], x: Tensor) -> nn.Module:
    """The layer between others, of which the last, that makes three classes of anything, is not trained."""
    torch.manual_seed(0)
    layer = make().double()
    last = nn.Linear(layer(x).flatten(1).shape[1], 3).requires_grad_(False)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), last).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator(1))
    return model


def assert_matches_brute_force(model: nn.Module, x: Tensor) -> None:
    y = torch.arange(len(x)) % 3
    _, norms = brute_force(model, x, y, 1.0)
    clip_norm = float(norms.median())
    expected, _ = brute_force(model, x, y, clip_norm)
    got = clipped_sum(model, x, y, clip_norm=clip_norm, max_records=3)
    torch.testing.assert_close(got.squared_norms_B.sqrt(), norms, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got.gradients, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_matches_one_backward_pass_per_record(name: str) -> None:
    make, x = LAYERS[name]
    assert_matches_brute_force(model_of(make, x()), x())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_channels_last_changes_no_norm(name: str) -> None:
    model = model_of(CONVOLUTIONS[name], images()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert_matches_brute_force(model, images().contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("name", ["logistic", "bounded_logistic", "hog_logistic", "mlp", "lenet", "cnn"])
def test_whole_models_match(name: str) -> None:
    model = build_model(ModelConfig(name=name), input_shape=(2, 12, 12), num_classes=3, generator_seed=0).double()
    x = torch.rand(BATCH, 2, 12, 12, dtype=torch.float64, generator=generator())
    assert_matches_brute_force(model, x)


@pytest.mark.parametrize(("name", "side"), [("resnet18", 12), pytest.param("densenet121", 32, marks=pytest.mark.slow)])
def test_backbones_that_overwrite_their_activations_match_too(name: str, side: int) -> None:
    model = build_model(ModelConfig(name=name), input_shape=(2, side, side), num_classes=3, generator_seed=0).double()  # type: ignore[arg-type]
    x, y = torch.rand(2, 2, side, side, dtype=torch.float64, generator=generator()), torch.arange(2)
    expected, norms = brute_force(model, x, y, 1.0)
    got = clipped_sum(model, x, y, clip_norm=1.0)
    torch.testing.assert_close(got.squared_norms_B.sqrt(), norms, rtol=1e-9, atol=0)
    torch.testing.assert_close(got.gradients, expected, rtol=1e-9, atol=1e-12)


class Overwriting(nn.Module):
    """Changes, in place, what a layer has produced or what it has read."""

    def __init__(self, *, overwrites_input: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.overwrites_input = overwrites_input

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        hidden = self.first(x)
        (x if self.overwrites_input else hidden).mul_(3)
        return self.second(hidden.relu_())  # type: ignore[no-any-return]


def test_an_output_may_be_overwritten_but_an_input_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose code is trusted, as torchvision's are."""
    trusted = per_example._CONTAINERS | {__name__: {"Overwriting"}}
    monkeypatch.setattr(per_example, "_CONTAINERS", trusted)
    x, y = torch.randn(BATCH, 3, dtype=torch.float64, generator=generator()), torch.arange(BATCH) % 3
    assert_matches_brute_force(Overwriting(overwrites_input=False).double(), x)
    with pytest.raises(ValueError, match="overwritten by a later layer"):
        clipped_sum(Overwriting(overwrites_input=True).double(), x, y, clip_norm=1.0)


def test_frozen_parameters_are_left_out() -> None:
    model = build_model(ModelConfig(name="mlp"), input_shape=(6,), num_classes=3, generator_seed=0).double()
    next(p for p in model.parameters() if p.ndim == 2).requires_grad_(False)
    x = torch.randn(BATCH, 6, dtype=torch.float64, generator=generator())
    assert_matches_brute_force(model, x)


def test_no_single_record_moves_the_sum_by_more_than_the_clip_norm() -> None:
    model = build_model(ModelConfig(name="mlp"), input_shape=(6,), num_classes=3, generator_seed=0)
    x, y = 100 * torch.randn(9, 6, generator=generator()), torch.arange(9) % 3
    whole = clipped_sum(model, x, y, clip_norm=0.3)
    for left_out in range(9):
        rows = [i for i in range(9) if i != left_out]
        rest = clipped_sum(model, x[rows], y[rows], clip_norm=0.3)
        moved = torch.cat([(a - b).flatten() for a, b in zip(whole.gradients, rest.gradients, strict=True)]).norm()
        assert moved <= 0.3 * (1 + 1e-5)


def test_no_record_gives_zeros() -> None:
    model = build_model(ModelConfig(name="mlp"), input_shape=(6,), num_classes=3, generator_seed=0)
    empty = clipped_sum(model, torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), clip_norm=1.0)
    assert not any(gradient.any() for gradient in empty.gradients)
    assert empty.squared_norms_B.sqrt().shape == (0,)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("name", ["logistic", "hog_logistic", "mlp", "lenet"])
def test_a_record_whose_gradient_is_not_finite_adds_nothing(
    name: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an error, which would tell of it, nor a NaN in place of all others."""
    model = build_model(ModelConfig(name=name), input_shape=(2, 8, 8), num_classes=3, generator_seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    x, y = torch.rand(4, 2, 8, 8, generator=generator()), torch.arange(4) % 3
    rest = clipped_sum(model, x[1:], y[1:], clip_norm=0.5)
    x[0] = bad
    whole = clipped_sum(model, x, y, clip_norm=0.5)
    for with_it, without in zip(whole.gradients, rest.gradients, strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-4, atol=1e-6)
    assert "add nothing" in caplog.text


def test_weights_that_are_not_finite_stop_training() -> None:
    model = build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=3, generator_seed=0)
    next(model.parameters()).data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="weights are not finite; lower the learning rate"):
        clipped_sum(model, torch.ones(2, 3), torch.tensor([0, 1]), clip_norm=1.0)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e6, 1e15, 1e25])
@pytest.mark.parametrize("name", ["logistic", "hog_logistic", "mlp", "lenet"])
def test_a_record_alone_adds_at_most_the_clip_norm_whatever_its_size(name: str, size: float) -> None:
    model = build_model(ModelConfig(name=name), input_shape=(2, 8, 8), num_classes=3, generator_seed=0)
    x, y = size * torch.randn(6, 2, 8, 8, generator=generator()), torch.arange(6) % 3
    for i in range(6):
        alone = clipped_sum(model, x[i : i + 1], y[i : i + 1], clip_norm=0.3)
        norm = torch.cat([g.double().flatten() for g in alone.gradients]).norm()
        assert norm <= 0.3
        assert (
            norm > 0.2999
            or float(alone.squared_norms_B.sqrt()) < 0.3
            or not alone.squared_norms_B.sqrt().isfinite().all()
            or size > 1e12
        )


def test_positions_that_cancel_are_clipped_by_what_is_left_of_them() -> None:
    """From products of all pairs of positions, the norm of what is left of 1e8 can come out as 0: no clipping."""
    size, left = 1e8, torch.tensor([[1.0, 2.0, 2.0]])
    steep = torch.cat([torch.full((1, 3), size), torch.full((1, 3), -size) + 0 * left, left])[None]
    positions = per_example.layer_gradient(nn.Linear(2, 3, bias=False), torch.ones(1, 3, 2), steep)
    [(_, total)] = positions.weighted_sums(torch.ones(1))
    assert float(positions.squared_norms()) == pytest.approx(float(total.double().square().sum()), rel=1e-6)
    assert float(positions.squared_norms()) == pytest.approx(18.0, rel=1e-6)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_norms_from_pairs_of_positions_are_those_of_formed_gradients_and_never_less(
    name: str, kind: torch.dtype
) -> None:
    layer: nn.Conv2d = CONVOLUTIONS[name]().to(kind)  # type: ignore[assignment]
    x = images().to(kind)
    gradient = torch.randn(layer(x).shape, dtype=kind, generator=generator(1))
    by_positions = per_example._ConvolutionByPositions(layer, x, gradient)
    exact = per_example._Convolution(layer.double(), x.double(), gradient.double())
    excess = (by_positions.squared_norms() / exact.squared_norms()).sqrt() - 1
    assert float(excess.min()) >= -1e-15
    assert float(excess.max()) <= 2 * x[0, 0].numel() ** 1.5 * torch.finfo(kind).eps
    weights = torch.rand(BATCH, dtype=kind, generator=generator(2))
    for (_, found), (_, expected) in zip(
        by_positions.weighted_sums(weights), exact.weighted_sums(weights.double()), strict=True
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e3 * torch.finfo(kind).eps)


def test_a_convolution_whose_positions_cancel_adds_at_most_the_clip_norm() -> None:
    """Terms of 1e8 that cancel but for 3: what their sum is rounded to is as large as what is left."""
    layer = nn.Conv2d(1, 40, 1, bias=False)
    left = torch.linspace(1, 3, 40)
    for size in (1.0, 1e4, 1e8):
        steep = torch.stack([torch.full((40,), size), left - size], dim=1).reshape(1, 40, 1, 2)
        call = (layer, torch.ones(1, 1, 1, 2), steep)
        found = per_example._ConvolutionByPositions(*call)
        factor = found.squared_norms().rsqrt().float()
        [(_, total)] = found.weighted_sums(factor)
        assert float(total.double().norm()) <= 1 + 1e-6
        if size < 1e8:
            assert float(total.double().norm()) > 0.99


def test_a_layer_of_few_positions_and_many_weights_does_not_form_its_gradients() -> None:
    narrow, wide = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1)
    for layer, side, kind in (
        (narrow, 2, per_example._ConvolutionByPositions),
        (narrow, 8, per_example._Convolution),
        (wide, 2, per_example._Convolution),
    ):
        x = torch.rand(2, layer.in_channels, side, side)
        assert type(per_example.layer_gradient(layer, x, torch.rand(2, layer.out_channels, side, side))) is kind
