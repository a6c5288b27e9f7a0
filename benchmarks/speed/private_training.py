"""One step of DP-SGD as a ratio to one of plain SGD, and the same step by Opacus and by ``vmap``.

    OMP_NUM_THREADS=1 python benchmarks/speed/private_training.py [--repeats 15] [--device cuda] [--cases 3]

Synthetic records from a seed. Every step is whole: it draws its batch (Poisson, or the next rows of a shuffle), gathers
it, runs forward and backward, and updates; the private ones also clip and add noise. ``plain`` is autograd, ``by hand``
is plain SGD by the hand-written pass that the private step uses where a model is a chain of dense layers. Opacus is
given this project's batches and its own insecure noise, and images in contiguous layout, in which its norms are right;
``Opacus`` is the faster of its hooks and its ghost clipping. Contenders take turns in one process with one thread,
in processor time, or in time where the device is a GPU, which has two rows more (on a processor: ``--cases 5``).
``noise`` is the share of a private step that draws its batch and its noise. Ratios are taken within a round and the
median round is printed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from turns import Step, seconds_by_round

from fairpate.config import ModelConfig
from fairpate.methods.dp_sgd import FairDpSgdConfig, regulariser_gradient
from fairpate.nn.models import build_model, memory_format_for, to_memory_format
from fairpate.nn.per_example import CrossEntropy, DenseChain
from fairpate.nn.private_fit import (
    DP_SGD,
    GaussianNoise,
    OsRandomness,
    PoissonBatches,
    PrivateSteps,
    PrivateTraining,
    PublicGradient,
    ShiftedClipper,
    StepPlan,
)

LEARNING_RATE, CLIP_NORM, NOISE_MULTIPLIER, BATCHES_PER_EPOCH = 0.05, 1.0, 1.0, 40
COLUMNS = (
    ("DP-SGD", "plain"),
    ("DP-SGD", "by hand"),
    ("FairDP-SGD", "DP-SGD"),
    ("Algorithm 6", "DP-SGD"),
    ("hooks", "plain"),
    ("ghost", "plain"),
    ("vmap", "plain"),
    ("Opacus", "DP-SGD"),
    ("noise", "DP-SGD"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    model: ModelConfig
    input_shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    runs_in_opacus: bool = True

    def records(self, device: str) -> tuple[Tensor, Tensor]:
        """As many as make the batch size the expected one at a sampling rate of 1 / 40."""
        generator, count = torch.Generator().manual_seed(0), BATCHES_PER_EPOCH * self.batch_size
        x = torch.randn(count, *self.input_shape, generator=generator)
        return x.to(device), torch.randint(0, self.num_classes, (count,), generator=generator).to(device)

    def fresh_model(self, x: Tensor) -> nn.Module:
        """Equal weights for every contender, on the device of ``x``."""
        model = build_model(self.model, input_shape=self.input_shape, num_classes=self.num_classes, generator_seed=0)
        return model.to(x.device)


_TABLE: dict[str, Any] = {"input_shape": (102,), "num_classes": 2, "batch_size": 512}
_IMAGES: dict[str, Any] = {"input_shape": (2, 28, 28), "num_classes": 10, "batch_size": 256}
CASES = (
    Case(name="logistic, 102 features", model=ModelConfig(name="logistic"), **_TABLE),
    Case(name="MLP, two hidden layers", model=ModelConfig(name="mlp", hidden=(128, 128)), **_TABLE),
    Case(name="ColorMNIST CNN", model=ModelConfig(name="lenet"), **_IMAGES),
)
_FACES: dict[str, Any] = {"input_shape": (3, 64, 64), "num_classes": 2, "batch_size": 256}
ON_A_GPU = (
    Case(name="small CNN, 64 pixels", model=ModelConfig(name="cnn"), **_FACES),
    # Opacus's hooks refuse a network that adds in place, as torchvision's does.
    Case(name="ResNet-18, 64 pixels", model=ModelConfig(name="resnet18"), runs_in_opacus=False, **_FACES),
)


class Shuffle:
    """Batches of one size, epoch after epoch."""

    def __init__(self, num_records: int, batch_size: int) -> None:
        self._num_records, self._batch_size = num_records, batch_size
        self._generator = torch.Generator().manual_seed(0)
        self._left: list[Tensor] = []

    def next(self) -> Tensor:
        """The rows of the next batch."""
        if not self._left:
            order = torch.randperm(self._num_records, generator=self._generator)
            self._left = list(torch.split(order, self._batch_size))
        return self._left.pop()


def plain_step(case: Case, x: Tensor, y: Tensor) -> Step:
    """Autograd, images channels-last."""
    model, batches = case.fresh_model(x), Shuffle(len(x), case.batch_size)
    to_memory_format(model, memory_format_for(x))
    parameters: list[Tensor] = list(model.parameters())

    def step() -> None:
        rows = batches.next().to(x.device)
        batch = x.index_select(0, rows).contiguous(memory_format=memory_format_for(x))
        gradients = torch.autograd.grad(functional.cross_entropy(model(batch), y.index_select(0, rows)), parameters)
        _update(parameters, list(gradients))

    return step


def by_hand_step(case: Case, x: Tensor, y: Tensor) -> Step | None:
    """Plain SGD without autograd, or None for what is no chain of dense layers."""
    model, batches, loss = case.fresh_model(x), Shuffle(len(x), case.batch_size), CrossEntropy()
    chain = DenseChain.of(model)
    if chain is None:
        return None
    parameters: list[Tensor] = list(model.parameters())

    def step() -> None:
        rows = batches.next().to(x.device)
        values = chain.forward(x.index_select(0, rows))
        gradient = loss.gradient(values[-1], y.index_select(0, rows)).div_(len(rows))
        found = {id(parameter): value for parameter, value in chain.summed_gradients(values, gradient)}
        _update(parameters, [found[id(p)] for p in parameters])

    return step


def private_step(
    case: Case, x: Tensor, y: Tensor, public_gradient: PublicGradient | None = None, plan: StepPlan = DP_SGD
) -> Step:
    """What a private training repeats."""
    steps = PrivateSteps(
        num_steps=0,
        sampling_rate=1 / BATCHES_PER_EPOCH,
        expected_batch_size=case.batch_size,
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        learning_rate=LEARNING_RATE,
    )
    training = PrivateTraining(
        case.fresh_model(x),
        x,
        y,
        CrossEntropy(),
        steps,
        randomness=OsRandomness(),
        public_gradient=public_gradient,
        plan=plan,
    )
    return training.step


def noise_step(case: Case, x: Tensor) -> Step:
    """What a private step draws: its batch, and a normal number for each parameter."""
    batches, noise = PoissonBatches(len(x), 1 / BATCHES_PER_EPOCH, OsRandomness()), GaussianNoise(OsRandomness())
    sums = [torch.zeros_like(p) for p in case.fresh_model(x).parameters()]

    def step() -> None:
        batches.next()
        noise.add_to(sums, NOISE_MULTIPLIER)

    return step


def fair_step(case: Case, x: Tensor, y: Tensor, *, before_clipping: bool = False) -> Step:
    """The same, regularised on public batches of the size that ``fair_dp_sgd`` has by default.

    ``before_clipping``: as the paper's Algorithm 6 is printed.
    """
    groups, generator = torch.arange(len(x), device=x.device) % 2, torch.Generator().manual_seed(0)
    public = regulariser_gradient(x, groups, FairDpSgdConfig(), generator)
    if before_clipping:
        return private_step(case, x, y, plan=StepPlan(clipper=partial(ShiftedClipper, public_gradient=public)))
    return private_step(case, x, y, public)


def vmap_step(case: Case, x: Tensor, y: Tensor) -> Step:
    """Per-example gradients by ``vmap(grad)``, with torch's own noise."""
    model, loss = case.fresh_model(x), CrossEntropy()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def record_loss(values: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
        return loss(functional_call(model, values, (record[None],)), label[None])[0]

    per_record = vmap(grad(record_loss), in_dims=(None, 0, 0))
    batches = PoissonBatches(len(x), 1 / BATCHES_PER_EPOCH, OsRandomness())

    def step() -> None:
        rows = batches.next().to(x.device)
        gradients = list(per_record(parameters, x[rows], y[rows]).values())
        norms_B = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factors_B = (CLIP_NORM / norms_B).clamp(max=1)
        sums = [torch.einsum("b,b...->...", factors_B, g) for g in gradients]
        noisy = [(g + NOISE_MULTIPLIER * CLIP_NORM * torch.randn_like(g)) / case.batch_size for g in sums]
        _update(list(model.parameters()), noisy)

    return step


def opacus_step(case: Case, x: Tensor, y: Tensor, mode: Literal["hooks", "ghost"]) -> Step:
    """Opacus's wrapped model, loss and optimiser."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    warnings.filterwarnings("ignore", message="Full backward hook", category=UserWarning)
    batches = PoissonBatches(len(x), 1 / BATCHES_PER_EPOCH, OsRandomness())
    noise: dict[str, Any] = {
        "noise_multiplier": NOISE_MULTIPLIER,
        "max_grad_norm": CLIP_NORM,
        "expected_batch_size": case.batch_size,
    }
    criterion: Any = nn.CrossEntropyLoss()
    plain = case.fresh_model(x)
    sgd = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    model: nn.Module
    optimizer: Any
    if mode == "hooks":
        model, optimizer = GradSampleModule(plain), DPOptimizer(sgd, **noise)
    else:
        model = GradSampleModuleFastGradientClipping(plain, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(sgd, **noise)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)

    def step() -> None:
        rows = batches.next().to(x.device)
        optimizer.zero_grad()
        criterion(model(x.index_select(0, rows)), y.index_select(0, rows)).backward()
        optimizer.step()

    return step


@torch.no_grad()
def _update(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(parameters, gradients, alpha=-LEARNING_RATE)


def contenders(case: Case, device: str) -> dict[str, Step]:
    """All that can run the case; without Opacus installed, the others."""
    x, y = case.records(device)
    steps: dict[str, Step | None] = {
        "plain": plain_step(case, x, y),
        "by hand": by_hand_step(case, x, y),
        "DP-SGD": private_step(case, x, y),
        "FairDP-SGD": fair_step(case, x, y),
        "Algorithm 6": fair_step(case, x, y, before_clipping=True),
        "vmap": vmap_step(case, x, y),
        "noise": noise_step(case, x),
    }
    try:
        for mode in ("hooks", "ghost") if case.runs_in_opacus else ():
            steps[mode] = opacus_step(case, x, y, mode)
    except ModuleNotFoundError as missing:
        print(f"Opacus is left out: {missing}.")
    return {name: step for name, step in steps.items() if step is not None}


def with_faster_of(name: str, contenders: tuple[str, str], rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """``rounds`` with the contender under ``name`` whose median is the lower; as they were where one did not run."""
    if any(each not in rounds[0] for each in contenders):
        return rounds
    faster = min(contenders, key=lambda each: median(one[each] for one in rounds))
    return [one | {name: one[faster]} for one in rounds]


def ratio(rounds: list[dict[str, float]], above: str, below: str) -> str:
    """The median over rounds, or a dash where a contender did not run."""
    if above not in rounds[0] or below not in rounds[0]:
        return "-"
    return f"{median(each[above] / each[below] for each in rounds):.2f}x"


def _gpu_clock_s() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print one row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, help="So many of the rows; default: all of the device.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = options.device == "cuda"
    print(" | ".join(["model", "batch", "plain ms", *(f"{above} / {below}" for above, below in COLUMNS)]))
    for case in (*CASES, *ON_A_GPU)[: options.cases or (None if on_gpu else len(CASES))]:
        steps = contenders(case, options.device)
        timed = seconds_by_round(steps, options.repeats, _gpu_clock_s if on_gpu else time.process_time)
        rounds = with_faster_of("Opacus", ("hooks", "ghost"), timed)
        cells = [case.name, str(case.batch_size), f"{1e3 * median(each['plain'] for each in rounds):.3f}"]
        print(" | ".join(cells + [ratio(rounds, above, below) for above, below in COLUMNS]), flush=True)


if __name__ == "__main__":
    main()
