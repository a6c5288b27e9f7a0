"""A teacher is a function of its own shard and of public numbers, bit for bit: by brute force over neighbouring data.

One record is dropped, altered or added, or a whole shard is emptied or grown. Every other teacher must keep every bit
of its weights, and cast the same votes.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fairpate.config import AugmentConfig, FitConfig, ModelConfig
from teachers import teacher as stacked
from teachers.ensemble import predict_votes
from teachers.teacher import Shard, StackedWeights, TeacherSpec, train_teachers
from tests.accelerator import DEVICES, NEEDS_GPU

pytestmark = pytest.mark.xdist_group("torchvision")

SIZES = (37, 0, 64, 5, 33, 1, 16, 17, 40)
TOUCHED = 2  # the largest shard, which was the first of its stack when stacks were sorted by size
TABLE, PICTURES = (6,), (2, 8, 8)
CHANGING = AugmentConfig(rotation_degrees=10, horizontal_flip=0.5, channel_swap=0.5, elastic_fraction=0.1)

Change = Callable[[Shard], Shard]
CHANGES: dict[str, Change] = {
    "a record less": lambda shard: Shard(x=shard.x[1:], y=shard.y[1:]),
    "half of the records": lambda shard: Shard(x=shard.x[::2], y=shard.y[::2]),
    "another record": lambda shard: Shard(x=torch.cat([shard.x[:1] * 3 + 1, shard.x[1:]]), y=shard.y),
    "no records": lambda shard: Shard(x=shard.x[:0], y=shard.y[:0]),
    "three times the records": lambda shard: Shard(x=shard.x.repeat(3, *[1] * (shard.x.ndim - 1)), y=shard.y.repeat(3)),
    "a record that no training survives": lambda shard: Shard(
        x=torch.cat([torch.full_like(shard.x[:1], torch.inf), shard.x[1:]]), y=shard.y
    ),
}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.05, "weight_decay": 0.01}
MOMENTUM: dict[str, Any] = {"optimizer": "sgd", "schedule": "cosine"}
TABLES = [
    ("logistic", torch.float32, ADAM),
    ("logistic", torch.float32, MOMENTUM | {"label_smoothing": 0.1}),
    ("mlp", torch.float32, ADAM),
    ("mlp", torch.float32, MOMENTUM),
    ("mlp", torch.float64, ADAM),
    ("mlp", torch.float32, ADAM | {"precision": "bfloat16"}),
]
PICTURE_MODELS = [
    ("logistic", ADAM | {"augment": CHANGING}, 16),
    ("hog_logistic", ADAM, 16),
    pytest.param("lenet", ADAM, 16, marks=pytest.mark.slow),
    ("cnn", MOMENTUM | {"augment": CHANGING}, 16),
    pytest.param("cnn", ADAM | {"precision": "bfloat16"}, 16, marks=pytest.mark.slow),
]


def shards_of(
    shape: tuple[int, ...], sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32
) -> list[Shard]:
    generator = torch.Generator().manual_seed(7)
    return [
        Shard(
            x=torch.randn(size, *shape, generator=generator, dtype=dtype),
            y=torch.randint(0, 3, (size,), generator=generator),
        )
        for size in sizes
    ]


def spec_of(model: str, fit: dict[str, Any]) -> TeacherSpec:
    settings = FitConfig(**{"epochs": 2, "batch_size": 16} | {name: fit[name] for name in fit if name != "augment"})
    augment = fit.get("augment", AugmentConfig())
    architecture = ModelConfig(name=model, hidden=(4,) if model == "cnn" else (8, 5))
    spec = TeacherSpec(model=architecture, fit=settings, num_classes=3, seed=11)
    return replace(spec, augment=augment)


def bits(weights: StackedWeights, teacher: int) -> dict[str, bytes]:
    return {name: value[teacher].contiguous().numpy().tobytes() for name, value in weights.items()}


def changed_teachers(left: StackedWeights, right: StackedWeights) -> set[int]:
    return {t for t in range(len(next(iter(left.values())))) if bits(left, t) != bits(right, t)}


def assert_only_one_changes(
    shards: list[Shard],
    spec: TeacherSpec,
    changes: Iterable[str] = CHANGES,
    *,
    engine: Any = "stacked",
    device: str = "cpu",
) -> None:
    queries = torch.randn(500, *shards[0].x.shape[1:], generator=torch.Generator().manual_seed(3)).numpy()
    before = train_teachers(shards, spec, engine=engine, device=device)
    votes = predict_votes(before, spec, queries, device=device)
    others = [t for t in range(len(shards)) if t != TOUCHED]
    for name in changes:
        neighbours = [*shards[:TOUCHED], CHANGES[name](shards[TOUCHED]), *shards[TOUCHED + 1 :]]
        after = train_teachers(neighbours, spec, engine=engine, device=device)
        assert changed_teachers(before, after) == {TOUCHED}, name
        neighbouring_votes = predict_votes(after, spec, queries, device=device)
        np.testing.assert_array_equal(votes[others], neighbouring_votes[others], err_msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "dtype", "fit"), TABLES)
def test_on_tables_a_record_reaches_its_own_teacher_only(
    model: str, dtype: torch.dtype, fit: dict[str, Any], device: str
) -> None:
    spec = spec_of(model, fit)
    assert_only_one_changes(shards_of(TABLE, dtype=dtype), spec, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "fit", "batch_size"), PICTURE_MODELS)
def test_on_pictures_a_record_reaches_its_own_teacher_only(
    model: str, fit: dict[str, Any], batch_size: int, device: str
) -> None:
    shards = shards_of(PICTURES, (9, 0, 20, 5))
    assert_only_one_changes(shards, spec_of(model, fit | {"batch_size": batch_size}), device=device)


@pytest.mark.parametrize("model", ["cnn", pytest.param("lenet", marks=pytest.mark.slow)])
def test_so_it_does_where_a_convolution_multiplies_other_groups_by_zero(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """As a GPU's tensor cores do: a teacher that diverges makes no other one diverge."""
    real = torch.conv2d

    def with_zeros(images: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = real(images, *args, **options)
        return out + 0 * images.sum(dim=(1, 2, 3), keepdim=True) if options.get("groups", 1) > 1 else out

    monkeypatch.setattr(torch.nn.functional, "conv2d", with_zeros)
    fatal = "a record that no training survives"
    assert_only_one_changes(shards_of(PICTURES, (9, 0, 20, 5)), spec_of(model, ADAM), [fatal, "no records"])


@NEEDS_GPU
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "width"), [("cnn", 40), ("resnet18", 5)])
def test_so_it_does_in_a_wide_stack_of_pictures_that_stay_on_a_gpu(model: str, width: int, precision: str) -> None:
    fit = FitConfig(epochs=2, batch_size=16, precision=precision)
    spec = TeacherSpec(model=ModelConfig(name=model), fit=fit, num_classes=3, seed=11, max_shard_size=60)
    shards = shards_of((3, 64, 64), (*range(3, 2 + width), 20))
    shards[TOUCHED] = Shard(x=shards[TOUCHED].x.repeat(4, 1, 1, 1), y=shards[TOUCHED].y.repeat(4))
    assert_only_one_changes(shards, spec, ["a record less", "no records", "three times the records"], device="cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_so_it_does_in_an_architecture_that_is_stacked_by_vmap(device: str) -> None:
    shards = shards_of((1, 16, 16), (9, 0, 21, 5))
    assert_only_one_changes(shards, spec_of("tanh_cnn", ADAM), ["half of the records"], device=device)


@pytest.mark.parametrize("model", ["mlp", pytest.param("lenet", marks=pytest.mark.slow)])
def test_so_it_does_in_a_loop(model: str) -> None:
    shape, sizes = (TABLE, SIZES) if model == "mlp" else (PICTURES, (9, 0, 20, 5))
    assert_only_one_changes(shards_of(shape, sizes), spec_of(model, ADAM), engine="loop")


def test_so_it_does_in_stacks_of_which_the_last_is_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "_PARAMETERS_AT_ONCE", 1)
    monkeypatch.setattr(stacked, "_FEWEST_TEACHERS_AT_ONCE", 4)
    assert_only_one_changes(shards_of(TABLE), spec_of("mlp", ADAM))


@pytest.mark.parametrize("sizes", [(0, 0, 5), (0, 0, 1, 0), (3, 0, 40)])
def test_so_it_does_among_teachers_without_records(sizes: tuple[int, ...]) -> None:
    assert_only_one_changes(shards_of(TABLE, sizes), spec_of("mlp", ADAM), ["no records"])


def test_at_a_rate_at_which_rounding_grows_no_vote_moves() -> None:
    """Where shapes follow private sizes, a record less in one shard can change hundreds of another teacher's votes."""
    shards = shards_of((20,), (150, 131, 129, 97, 96, 161))
    spec = TeacherSpec(
        model=ModelConfig(hidden=(32,)), fit=FitConfig(epochs=60, learning_rate=0.05), num_classes=3, seed=0
    )
    assert_only_one_changes(shards, spec, ["a record less"])
