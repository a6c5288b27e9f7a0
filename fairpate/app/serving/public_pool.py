"""What a service shows of a run: its public records, how one is written down, and the run in public words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from aggregator.service.about import Facts
from aggregator.service.questions import PublicPool
from fairpate.app.release import choose_queries
from fairpate.app.rundir import RunDirectory
from fairpate.data import REGISTRY, Dataset, entry_for
from fairpate.data.declared.form import form_of
from fairpate.data.embedding import Embedding
from fairpate.later import torch
from fairpate.methods.voting import VotingMethod
from fairpate.votes_config import QueriesConfig


def public_pool(dataset: Dataset, settings: QueriesConfig, *, takes_posted: bool = True) -> PublicPool:
    """Every public record, each content once; the run's own queries come first, in the order they were asked.

    ``takes_posted``: whether the voters can vote on other records too.
    """
    public = choose_queries(dataset, settings.model_copy(update={"num_queries": None, "admission": None}))
    return PublicPool(
        features=public.x.numpy(),
        groups_N=public.z.numpy(),
        record_ids=public.record_id,
        group_names=dataset.group_names,
        label_names=dataset.label_names,
        takes_posted=takes_posted,
        form=form_of(dataset.feature_codes),
        place=_placed_by(dataset.embedding),
    )


def public_words(run: RunDirectory, config: VotingMethod, dataset: Dataset) -> Facts:
    """What the page says of the run, in public words."""
    declared = entry_for(config.data) if config.data.declaration is not None else REGISTRY.get(dataset.name)
    task = "" if declared is None else declared.task
    return Facts(
        run=run.root.name,
        method=config.title,
        data=dataset.name,
        task=task,
        attribute=dataset.sensitive_attribute,
        record=_record_words(dataset),
    )


def _record_words(dataset: Dataset) -> str:
    """Of records that are seen as coordinates: how many features each has. Empty where the pool shows the features."""
    if dataset.embedding is None:
        return ""
    (coordinates,) = dataset.public.x.shape[1:]
    features = " × ".join(map(str, dataset.embedding.record_shape))
    return f"{features} features, seen as {coordinates} coordinates of the public embedding"


def _placed_by(embedding: Embedding | None) -> Callable[[npt.NDArray[np.float32]], npt.NDArray[np.generic]]:
    """What every record went through; the same record has the same place, bit for bit."""
    if embedding is None:
        return lambda features: features
    return lambda features: embedding(torch.from_numpy(features)[None])[0].numpy()
