"""FairDP-SGD: DP-SGD with a demographic-parity regulariser on public records (FairPATE, Algorithm 6).

With r = grad DPFR(theta; public batch) (:mod:`fairpate.nn.dpfr`), the expected batch size L and a Poisson sample:

    as_in_paper:  g = (sum_i clip(g_i + lambda r) + noise) / L
    post:        g = (sum_i clip(g_i) + noise) / L + lambda r

r depends on theta, which earlier steps released, and on public records. So as_in_paper is DP-SGD on other per-example
gradients, of norm at most C all the same, and post is DP-SGD and then post-processing: the events are DP-SGD's, and
lambda = 0 is DP-SGD bit for bit. Of a person, g_i is the average over its records, and r is added once. The public
records, groups included, must really be public. That the norm stays at C however long r is takes more care than in
DP-SGD: :mod:`fairpate.nn.shifted_fit`.

Deviations from the paper:
- ``post`` is not the printed algorithm, and is the default: in ``as_in_paper`` one vector eats every record's clipping
  budget, and the regulariser's strength follows the size of the sample.
- The sum is divided by L where the listing divides by the size of the sample, and the sample is Poisson.
- The regulariser's gradient is taken outside the per-example machinery; in the published code public records pass
  through it as if they were private ones. Its other path, DPFR of the private batch, has no privacy and is left out.
- The temperature is 1 where the published code has .01: at .01 the regulariser's gradient, which is of size
  weight / temperature near ties, outweighs the private one, whose norm is at most C, and the model learns nothing else.
  A run in which it does at the start says so.
- r is of a public batch where the listing takes all public records, and batches are stratified by group: public records
  have no labels here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fairpate.app.seeds import Stream
from fairpate.config import Count, DpfrConfig, NotNegative
from fairpate.methods import dp_sgd
from fairpate.methods.definition import Training
from fairpate.methods.dp_sgd import DpSgdFamily
from fairpate.methods.trained import PublicPool, Trained
from fairpate.nn.dense_chain import DenseChain
from fairpate.nn.dpfr import contrast, dpfr_gradient, group_batches
from fairpate.nn.models import memory_format_for, scale_bytes
from fairpate.nn.private_fit import PrivateSteps


class FairDpSgdConfig(DpfrConfig):
    """How DP-SGD is regularised."""

    weight: NotNegative = Field(0.3, description="lambda; 0 switches it off.")
    variant: Literal["as_in_paper", "post"] = Field(
        "post", description="Added to every gradient before clipping, as in the paper; or once, after the noise."
    )
    public_batch_size: Count = Field(64, description="Public records drawn for each step.")


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: PrivateSteps,
    config: FairDpSgdConfig,
    *,
    public: PublicPool,
    generator: torch.Generator,
    **options: Any,
) -> Trained:
    """As :func:`fairpate.methods.dp_sgd.train`, with its ``options``; ``generator`` also draws public batches."""
    return dp_sgd.train(
        model,
        x,
        y,
        steps,
        generator=generator,
        public_gradient=regulariser_gradient(public, config, generator) if config.weight else None,
        before_clipping=config.variant == "as_in_paper",
        **options,
    )


def regulariser_gradient(
    public: PublicPool, config: FairDpSgdConfig, generator: torch.Generator
) -> Callable[[nn.Module], list[Tensor]]:
    """lambda r of one model on a fresh public batch at each call; errors as :func:`fairpate.nn.dpfr.group_batches`."""
    # A generator of its own, so that switching the regulariser off leaves every other draw as it was.
    draws = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator.clone_state())))
    batches = group_batches(public.groups, config.public_batch_size, draws)
    # Every batch has the same number of each group at the same places, so that one contrast serves all.
    contrast_GB = contrast(public.groups[next(batches)])
    memory_format = memory_format_for(public.x)

    # By identity: parameters change in place, so what was found of a model stays true.
    @lru_cache(maxsize=1)
    def anatomy(model: nn.Module) -> tuple[DenseChain | None, list[Tensor]]:
        return DenseChain.of(model), [p for p in model.parameters() if p.requires_grad]

    def gradient(model: nn.Module) -> list[Tensor]:
        x = scale_bytes(public.x.index_select(0, next(batches))).contiguous(memory_format=memory_format)
        chain, parameters = anatomy(model)
        if chain is None:
            logits = model(x)
            slope = config.weight * dpfr_gradient(logits.detach(), contrast_GB, config)
            return list(torch.autograd.grad(logits, parameters, slope, materialize_grads=True))
        values = chain.forward(x)
        slope = config.weight * dpfr_gradient(values[-1], contrast_GB, config)
        sums = {id(p): total for p, total in chain.summed_gradients(values, slope)}
        return [sums[id(p)] for p in parameters]

    return gradient


class FairDpSgd(DpSgdFamily):
    """Within the target for one record or person; parity is learned from the public pool."""

    protects_persons: ClassVar[bool] = True
    title: ClassVar[str] = "FairDP-SGD"
    paper: ClassVar[str] = "Yaghini et al. 2023 (FairPATE), Algorithm 6"

    reads_groups: ClassVar[bool] = False

    method: str = "fair_dp_sgd"
    fair_dp_sgd: FairDpSgdConfig = FairDpSgdConfig()

    @property
    def reads_public(self) -> bool:
        """For its batches."""
        return True

    def train(self, training: Training) -> Trained:
        """DP-SGD, with public batches in its steps."""
        public = PublicPool(x=training.dataset.public.x, groups=training.dataset.public.z)
        self._compare_gradients(training, public)
        with training.reporter.stage(self.method) as advance:
            return train(
                **self.sgd_arguments(training),
                config=self.fair_dp_sgd,
                public=public,
                on_progress=advance,
            )

    def _compare_gradients(self, training: Training, public: PublicPool) -> None:
        """A word where the regulariser's gradient is longer than any private one may be; of public records alone."""
        if not self.fair_dp_sgd.weight:
            return
        # From a generator of its own: training draws the same whether or not this was looked at.
        gradient = regulariser_gradient(public, self.fair_dp_sgd, training.generator(Stream.TRAINING))
        norm = float(torch.stack([part.norm() for part in gradient(training.model)]).norm())
        if norm > self.dp_sgd.clip_norm:
            training.reporter.note(
                "regulariser",
                f"at the start its gradient is {norm / self.dp_sgd.clip_norm:.1f} times dp_sgd.clip_norm and may "
                "outweigh what private records say; lower fair_dp_sgd.weight, or raise its temperature",
            )
