"""An epoch of F-LD and of PF-LD as a ratio to a plain epoch of the fit loop.

    OMP_NUM_THREADS=1 python benchmarks/papers/lagrangian.py [--repeats 9] [--layers 2 10]

Synthetic records of the Bank data's size from a seed, two groups, demographic parity, and the paper's network of two
hidden layers of 2 d / 3 and d / 2; of ten the others have d / 2 too, for the paper does not say. Ratios of every round
are kept in docs/results/lagrangian.json.

An epoch is whole: batches, gradients, clips, noise, updates, and the release of violations and the step of the
multipliers that come before it. Contenders take turns in one process with one thread, in processor time; ratios are
taken within a round and the median round is printed.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import measured
import torch
from torch import Tensor, nn

from fairpate.config import FitConfig, ModelConfig
from fairpate.methods import f_ld
from fairpate.methods.f_ld import FldConfig, PfLdConfig, PfLdNoise
from fairpate.methods.parity import MeanParity
from fairpate.nn.fit import fit
from fairpate.nn.models import build_model
from fairpate.nn.private_fit import OsRandomness

NUM_RECORDS, NUM_FEATURES = 28_391, 58
MODELS = {
    layers: ModelConfig(name="mlp", hidden=(2 * NUM_FEATURES // 3, *[NUM_FEATURES // 2] * (layers - 1)))
    for layers in (2, 10)
}
BATCH_SIZES = (16, 64, 256)
NOISE = PfLdNoise(gradient=20.0, violation=40.0, size=20.0)
Records = tuple[Tensor, Tensor, Tensor]


def plain_epoch(model: nn.Module, records: Records, batch_size: int) -> None:
    """What ratios are taken to."""
    x, y, _ = records
    fit(model, x, y, FitConfig(epochs=1, batch_size=batch_size), generator=torch.Generator().manual_seed(0))


def f_ld_epoch(model: nn.Module, records: Records, batch_size: int) -> None:
    """Without privacy."""
    config = FldConfig(warmup_epochs=0, epochs=1, batch_size=batch_size)
    f_ld.train_f_ld(model, *records, config, **_shared())


def pf_ld_epoch(
    model: nn.Module, records: Records, batch_size: int, batches: Literal["public", "poisson"] = "public"
) -> None:
    """On a public partition, or on secret samples."""
    config = PfLdConfig(warmup_epochs=0, epochs=1, batch_size=batch_size, batches=batches)
    f_ld.train_pf_ld(model, *records, config, NOISE, randomness=OsRandomness(), **_shared())


Epoch = Callable[[nn.Module, Records, int], None]
EPOCHS: dict[str, Epoch] = {
    "plain": plain_epoch,
    "f_ld": f_ld_epoch,
    "pf_ld": pf_ld_epoch,
    "pf_ld_secret_batches": lambda model, records, batch_size: pf_ld_epoch(model, records, batch_size, "poisson"),
}


def _shared() -> dict[str, Any]:
    return {
        "parity": MeanParity(constraint="demographic_parity", num_groups=2, num_classes=2),
        "generator": torch.Generator().manual_seed(0),
    }


def _seconds(epoch: Epoch, layers: int, records: Records, batch_size: int) -> float:
    model = build_model(MODELS[layers], input_shape=(NUM_FEATURES,), num_classes=2, generator_seed=0)
    start = time.process_time()
    epoch(model, records, batch_size)
    return time.process_time() - start


def main() -> None:
    """Print one row per network and batch size, and keep the rounds behind it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, nargs="+", choices=sorted(MODELS), default=[2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    records = (
        torch.randn(NUM_RECORDS, NUM_FEATURES, generator=generator),
        torch.randint(0, 2, (NUM_RECORDS,), generator=generator),
        torch.randint(0, 2, (NUM_RECORDS,), generator=generator),
    )
    others, found = [name for name in EPOCHS if name != "plain"], measured.read("lagrangian")
    print(" | ".join(["layers", "batch", "plain ms", *(f"{name} / plain" for name in others)]))
    for layers, batch_size in itertools.product(options.layers, BATCH_SIZES):
        rounds = [
            {name: _seconds(epoch, layers, records, batch_size) for name, epoch in EPOCHS.items()}
            for _ in range(options.repeats + 1)
        ][1:]
        ratios = {f"ratio_{name}": [round(each[name] / each["plain"], 4) for each in rounds] for name in others}
        found[f"layers={layers},batch={batch_size}"] = {"seeds": list(range(options.repeats)), **ratios}
        measured.write("lagrangian", command="python benchmarks/papers/lagrangian.py --layers 2 10", cells=found)
        milliseconds = 1e3 * median(each["plain"] for each in rounds)
        words = [f"{median(values):.2f}x" for values in ratios.values()]
        print(" | ".join([str(layers), str(batch_size), f"{milliseconds:.0f}", *words]), flush=True)


if __name__ == "__main__":
    main()
