"""Plain stochastic gradient descent: what no privacy gives. Robbins and Monro 1951; here for comparison only.

    theta <- theta - learning_rate * mean of grad l(theta; x_i, y_i) over a shuffled batch

Deviations: none. Its one event is a sum without noise over all records, which every accountant prices at infinity.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from fairpate.config import FitConfig, RecordTerms
from fairpate.methods.definition import Training, UnprotectedMethod, arguments
from fairpate.methods.trained import NO_NOISE, Progress, Trained
from fairpate.nn.fit import fit
from fairpate.privacy.events import PoissonGaussians
from fairpate.types import Relation


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    config: FitConfig,
    *,
    generator: torch.Generator,
    relation: Relation = "add or remove one",
    on_progress: Progress = lambda *_: None,
) -> Trained:
    """Train ``model`` in place on private ``x`` (N, ...) and ``y`` (N,); errors as :func:`fairpate.nn.fit.fit`."""
    fit(model, x, y, config, generator=generator, on_epoch=lambda epoch, _: on_progress(epoch + 1, config.epochs))
    event = PoissonGaussians(count=1, noise_multiplier=0.0, sampling_rate=1.0, relation=relation)
    return Trained(model=model, events=(event,), noise=NO_NOISE)


class Sgd(UnprotectedMethod):
    """No privacy: for comparison only."""

    title: ClassVar[str] = "plain SGD"
    paper: ClassVar[str] = "Robbins and Monro 1951"
    reads_groups: ClassVar[bool] = False

    method: str = "sgd"
    target: RecordTerms = RecordTerms()
    sgd: FitConfig = FitConfig()

    def train(self, training: Training) -> Trained:
        """On private records, without noise."""
        with training.reporter.stage(self.method) as advance:
            trained = train(**arguments(training), config=self.sgd, relation=self.target.relation, on_progress=advance)
        return trained.of_unit(training.dataset.unit)
