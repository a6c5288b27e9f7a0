"""PF-LD as its paper prints it (Tran, Fioretto and Van Hentenryck 2021, arXiv 2009.12562): nothing is guaranteed.

    python benchmarks/papers/reproductions/pf_ld_as_in_paper.py [--epsilon 2.15]

prints, for the paper's example of 10,000 records, what the paper claims and what the accountant charges; with
``--bank SEEDS`` it trains on Bank at the paper's own noise, and keeps accuracy and violation in docs/results/.
:func:`train` runs the printed algorithm:

    theta    <- theta - a( grad J(B) + sum_i lambda_i |grad mu(B_P) - clipped grad mu(B_Gi)| + N(0, (s_p D_p)^2 I) )
    lambda_i <- lambda_i + s( |mu(D_P) - clipped mu(D_Gi)| + N(0, (s_d D_d)^2) )
    D_p = 2 C_p lambda_max / (min |B_Gi| - 1),   D_d = sqrt(2) C_d / (min |D_Gi| - 1)

Means are over the real, private members of a group, the absolute value is taken of every coordinate, and a batch that
lacks a group is skipped, as the published code does. Its price, ``T n / |B|`` sampled Gaussians and T plain ones, is
:func:`epsilon_as_in_paper`. What is wrong with it:

- An attribute that changes alters the sizes of two groups: a gradient moves by up to
  ``2 C_p lambda_max (1 / |B_Gi| + 1 / (|B_Gj| + 1))``, nearly twice D_p.
- grad J(B) is released without noise and shows who is in a batch, so sampling amplifies nothing; nor are the batches
  Poisson samples.
- The sum of absolute values is no gradient of the violation. In a linear softmax of two classes it is the same for the
  weights of both, and so moves no prediction at all.
- The least size and whether a batch is skipped depend on the attributes.

:mod:`fairpate.methods.f_ld` holds the corrected method.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.nn import functional

from fairpate.config import DataConfig, ModelConfig, PrivacyTarget
from fairpate.data import load_data
from fairpate.methods.base import Trained, price
from fairpate.methods.f_ld import Ascent, Descent, PfLdConfig, PfLdNoise, require_members
from fairpate.methods.parity import MeanParity, ValueAlong
from fairpate.nn.fit import said_labels
from fairpate.nn.models import build_model
from fairpate.nn.per_example import GradientClipper
from fairpate.nn.private_fit import GaussianNoise, PrivateRandomness, SeededRandomness
from fairpate.privacy.accountant import DEFAULT_ORDERS, PoissonGaussians, epsilon_of_curve, event_rdp
from fairpate.privacy.mechanism_events import AttributeGaussians
from fairpate.types import Advance

sys.path.append(str(Path(__file__).parents[1]))
import measured

_VIOLATION_TO_GRADIENT = 10.0  # the two noise multipliers of the published code: 50 and 5
_WIDEST = 1e4


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    groups: Tensor,
    config: PfLdConfig,
    noise: PfLdNoise,
    *,
    parity: MeanParity,
    randomness: PrivateRandomness,
    generator: torch.Generator,
    on_progress: Advance = lambda *_: None,
) -> Trained:
    """The printed algorithm, two classes; arguments as :func:`fairpate.methods.f_ld.train_pf_ld`.

    ValueError for more classes and for a group of fewer than two records.
    """
    cells = parity.cells(y, groups)
    sizes_UG = _sizes(parity, cells)
    normals, descent = GaussianNoise(randomness), Descent(model, x, y, config, generator)
    # As printed: multipliers only rise, whatever form this package prefers.
    ascent = Ascent(parity, config.model_copy(update={"multipliers": "absolute", "tolerance": 0.0}))
    clipper = GradientClipper(model, ValueAlong(parity), clip_norm=config.clip_norm)
    spread = noise.violation * math.sqrt(2) * config.clip_value / (float(sizes_UG.min()) - 1)
    for epoch in range(config.warmup_epochs + config.epochs):
        for rows, _ in descent.batches():
            batch = descent.features(rows), y[rows], cells[rows]
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            gradients = list(torch.autograd.grad(loss, descent.parameters))
            # Its sensitivity is divided by members less one: of a group with one member in the batch there is none.
            if ascent.multipliers_UGK.any() and (least := float(parity.group_sizes(batch[2]).min())) <= 1:
                continue
            if ascent.multipliers_UGK.any():
                torch._foreach_add_(gradients, _printed_term(model, clipper, *batch, parity=parity, ascent=ascent))
                reach = 2 * config.clip_norm * config.max_multiplier / (least - 1)
                normals.add_to(gradients, noise.gradient * reach)
            descent.step(gradients, epoch)
        if epoch >= config.warmup_epochs:
            clip = config.clip_value
            exact = parity.measured(model, x, y, cells, sizes_UG, clip_value=clip)
            _ascend(ascent, exact, normals, spread)
        on_progress(epoch + 1, config.warmup_epochs + config.epochs)
    return Trained(
        model=model.eval(),
        events=(AttributeGaussians(count=1, attribute_noise_multiplier=0.0),),
        noise=randomness.label,
        remarks=("PF-LD as in the paper: sensitivities and sampling are wrong, so nothing is guaranteed.",),
    )


def _sizes(parity: MeanParity, cells: Tensor) -> Tensor:
    if parity.shape[2] != 1:
        raise ValueError(
            f"Expected 2 classes in the paper's form, got {parity.num_classes}; use fairpate.methods.f_ld."
        )
    sizes_UG = parity.group_sizes(cells)
    # Sensitivities are divided by members less one.
    require_members(sizes_UG - 1)
    return sizes_UG


def _ascend(ascent: Ascent, violations_UGK: Tensor, normals: GaussianNoise, spread: float) -> None:
    distances_UGK = violations_UGK.abs()
    normals.add_to([distances_UGK], spread)
    # Noise can make a distance negative, which none is.
    ascent.step(distances_UGK.clamp(min=0))


def epsilon_as_in_paper(config: PfLdConfig, noise: PfLdNoise, *, num_records: int, target_delta: float) -> float:
    """What the paper's Lemmas say of a training: no valid price."""
    num_steps = config.epochs * math.ceil(num_records / config.batch_size)
    rate = min(1.0, config.batch_size / num_records)
    sampled = PoissonGaussians(count=num_steps, noise_multiplier=noise.gradient, sampling_rate=rate)
    plain = AttributeGaussians(count=config.epochs, attribute_noise_multiplier=noise.violation)
    orders_A = np.asarray(DEFAULT_ORDERS)
    curve_A = event_rdp(sampled, orders_A) + event_rdp(plain, orders_A)
    return epsilon_of_curve(curve_A, orders_A, target_delta=target_delta)[0]


def published_noise(config: PfLdConfig, target: PrivacyTarget, *, num_records: int) -> PfLdNoise:
    """The noise at which the paper's own price is the target's. ValueError where none is."""

    def noise_at(log_scale: float) -> PfLdNoise:
        scale = math.exp(log_scale)
        return PfLdNoise(gradient=scale, violation=_VIOLATION_TO_GRADIENT * scale, size=0.0)

    def excess(log_scale: float) -> float:
        claimed = epsilon_as_in_paper(config, noise_at(log_scale), num_records=num_records, target_delta=target.delta)
        return math.log(max(claimed, 1e-12) / target.epsilon)

    low, high = math.log(0.1), math.log(_WIDEST)
    if not config.epochs or excess(low) <= 0 or excess(high) >= 0:
        raise ValueError(f"Expected a target epsilon that the paper's noise reaches, got {target.epsilon}.")
    return noise_at(brentq(excess, low, high, xtol=1e-3))


def _printed_term(
    model: nn.Module,
    clipper: GradientClipper,
    x: Tensor,
    y: Tensor,
    cells: Tensor,
    *,
    parity: MeanParity,
    ascent: Ascent,
) -> list[Tensor]:
    """``sum_i lambda_i |grad mu(B_P) - clipped grad mu(B_Gi)|``, coordinate by coordinate."""
    total = [torch.zeros_like(p) for p in clipper.parameters]
    targets = torch.stack([y, torch.ones_like(y)], dim=1).float()
    populations = parity.populations(y)
    for u in range(parity.shape[0]):
        mean = parity.values(model(x[populations == u]), y[populations == u]).mean()
        of_all = torch.autograd.grad(mean, clipper.parameters)
        for g in range(parity.num_groups):
            members = cells == u * parity.num_groups + g
            of_group = clipper.sum(x[members], targets[members]).gradients
            weight = float(ascent.multipliers_UGK[u, g, 0].abs())
            for out, whole, part in zip(total, of_all, of_group, strict=True):
                out += weight * (whole - part / int(members.sum())).abs()
    return total


def train_on_bank(num_seeds: int) -> None:
    """Keep accuracy and parity on test records over the epsilon that the paper claims, without noise, and plainly."""
    torch.set_num_threads(1)
    steps: dict[str, Any] = {"warmup_epochs": 15, "epochs": 20, "batch_size": 2048, "optimizer": "sgd"}
    config = PfLdConfig(**steps, learning_rate=0.1, clip_norm=0.3, dual_step=1.0)
    plain = config.model_copy(update={"max_multiplier": 1e-12})
    cells: dict[str, Any] = {}
    for epsilon in (0.3, 1.0, 3.0, math.inf, None):
        found = []
        for seed in range(10, 10 + num_seeds):
            dataset = load_data(DataConfig(name="bank", num_public=1000, seed=seed))
            private, test = dataset.private, dataset.test
            noise = PfLdNoise(gradient=0.0, violation=0.0, size=0.0)
            if epsilon is not None and epsilon < math.inf:
                noise = published_noise(config, PrivacyTarget(epsilon=epsilon), num_records=len(private))
            model = train(
                build_model(
                    ModelConfig(name="logistic"), input_shape=private.x.shape[1:], num_classes=2, generator_seed=seed
                ),
                private.x,
                private.y,
                private.z,
                plain if epsilon is None else config,
                noise,
                parity=MeanParity(constraint="demographic_parity", num_groups=dataset.num_groups, num_classes=2),
                randomness=SeededRandomness(seed),
                generator=torch.Generator().manual_seed(seed),
            ).model
            said = said_labels(model, test.x).argmax(axis=1)
            shares = [float(said[(test.z == group).numpy()].mean()) for group in range(dataset.num_groups)]
            found.append((float((said == test.y.numpy()).mean()), max(shares) - min(shares)))
        name = "plain" if epsilon is None else f"claimed={epsilon:g}"
        unit = {"unit": "sensitive attribute", "relation": "replace one", "delta": PrivacyTarget().delta}
        columns = dict(zip(("accuracy", "parity"), map(list, zip(*found, strict=True)), strict=True))
        cells[f"bank/{name}"] = {"seeds": list(range(10, 10 + num_seeds))} | unit | columns
        print(name, *np.mean(found, axis=0))
    command = f"python benchmarks/papers/reproductions/{Path(__file__).name} --bank {num_seeds}"
    measured.write("pf_ld_as_in_paper", command=command, cells=cells)


def main() -> None:
    """Print the claim and the price of the paper's example."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--epsilon", type=float, default=2.15)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--bank", type=int, metavar="SEEDS", help="train on Bank, on this many seeds")
    options = parser.parse_args()
    if options.bank:
        train_on_bank(options.bank)
        return
    config, target = PfLdConfig(epochs=100, batch_size=500), PrivacyTarget(epsilon=options.epsilon)
    noise = published_noise(config, target, num_records=options.records)
    charged = price(
        [
            AttributeGaussians(count=config.epochs, attribute_noise_multiplier=noise.gradient),
            AttributeGaussians(count=config.epochs, attribute_noise_multiplier=noise.violation),
        ],
        delta=target.delta,
        accounting="rdp",
    )
    print(f"claimed {options.epsilon:g}, costs {charged.epsilon:.3g} at delta {target.delta:g}")


if __name__ == "__main__":
    main()
