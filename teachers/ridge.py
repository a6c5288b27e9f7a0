"""Small teachers in closed form: ridge regression of a shard's labels, for thousands of teachers in one batched solve.

What a query costs at a data-independent epsilon depends on the number of teachers alone, not on how good each of them
is: thousands of teachers of a dozen records each outvote the noise in which hundreds of better ones drown. A teacher
minimises

    sum_i w_i |e_(y_i) - W phi(x_i) - b|^2  +  penalty (|W|^2 + |b|^2 / 100)

over its records, with phi(x) from :class:`FeatureMap` and one-hot labels e. The weights w make every class of the shard
weigh the same: otherwise nearly every small teacher votes for the most common class, and their sum says nothing. A
class that the shard lacks gets no vote. A teacher without records casts a fixed public vote.

A teacher is a function of its own shard and of public numbers, bit for bit. Its moments are products of its own records
alone, and the systems that are solved together have the same public shape whatever the shards hold.

Shapes: T teachers, N records of a shard, F columns, K features, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BIAS = 10.0  # the feature that stands for the intercept: its penalty is a hundredth of that of the others
_LONGEST = 2.0  # of a vector of K features, in units of sqrt(K), the norm of a typical public record
_EVENNESS = 0.85  # 1: all features vary alike; 0: as they do in the public records
_LEAST_SPREAD = 1e-6  # of the widest feature's: less is rounding


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """The public feature map phi of small teachers: the features that vary most over the public records, rescaled so
    that they vary more evenly, with longer vectors shortened to 2 sqrt(K).

    A feature of standard deviation s has s^0.15 after rescaling: few records say little about many features of equal
    size, and the label may be in narrow ones. ``columns_K``, ``mean_K`` and ``scale_K`` are computed from public
    records alone, so phi(x) depends on no other private record. It is meant for embedded records, whose columns are
    principal components.
    """

    columns_K: Tensor
    mean_K: Tensor
    scale_K: Tensor

    @classmethod
    def of(cls, public_x: Tensor, num_features: int | None = None) -> FeatureMap:
        """Fit the map to public vectors (M, F), with the ``num_features`` widest columns; None: all of them.

        ValueError for records that are all equal.
        """
        x = public_x.double()
        spread_F = x.std(dim=0, correction=0) if len(x) else x.new_zeros(x.shape[1])
        # Stable: equally wide columns keep their order on every machine.
        widest_F = spread_F.argsort(descending=True, stable=True)
        columns_K = widest_F[spread_F[widest_F] > _LEAST_SPREAD * spread_F.max()][:num_features]
        if not len(columns_K):
            raise ValueError("teachers.model: ridge needs public records that differ; all of them are equal.")
        spread_K = spread_F[columns_K]
        # Of mean square one: the ridge penalty means the same in any units.
        size = spread_K.pow(1 - _EVENNESS).square().mean().sqrt()
        mean_K, scale_K = x.mean(dim=0)[columns_K], spread_K.pow(-_EVENNESS) / size
        # Rounded: another processor adds up in another order, and its teachers would count as others.
        return cls(columns_K=columns_K, mean_K=mean_K.float().double(), scale_K=scale_K.float().double())

    def __call__(self, x: Tensor) -> Tensor:
        """Return phi(x) (N, K), float32, of vectors (N, F)."""
        columns_K, mean_K, scale_K = (each.to(x.device) for each in (self.columns_K, self.mean_K, self.scale_K))
        phi_NK = (x[:, columns_K].double() - mean_K) * scale_K
        # A number that is not finite would make a teacher's weights NaN; as 0 it is one odd record.
        phi_NK = phi_NK.nan_to_num(0.0, 0.0, 0.0)
        limit = _LONGEST * math.sqrt(len(columns_K))
        return (phi_NK * (limit / phi_NK.norm(dim=1, keepdim=True).clamp(min=limit))).float()


def solve_teachers(
    shards: Sequence[tuple[Tensor, Tensor]],
    indices: Sequence[int],
    *,
    num_classes: int,
    penalty: float,
    balanced: bool = True,
) -> dict[str, Tensor]:
    """Return the weights ``0.weight`` (T, C, K) and ``0.bias`` (T, C) of one teacher for each shard, on the CPU.

    ``shards``: features phi(x) (N, K) and classes (N,) of each teacher's records. ``indices``: the teachers' numbers in
    the whole ensemble, which decide the votes of teachers without records. The bias of a class that a shard lacks is
    minus infinity. Without ``balanced`` every record weighs the same, for the ablation in the documentation.
    """
    device, (width, count) = shards[0][0].device, (shards[0][0].shape[1] + 1, len(shards))
    moments_TKK = torch.zeros(count, width, width, dtype=torch.float64, device=device)
    sums_TKC = torch.zeros(count, width, num_classes, dtype=torch.float64, device=device)
    present_TC = torch.zeros(count, num_classes, dtype=torch.bool)
    for teacher, (phi_NK, y_N) in enumerate(shards):
        if not len(y_N):
            continue
        labels_NC = torch.nn.functional.one_hot(y_N, num_classes).double()
        sizes_C = labels_NC.sum(dim=0)
        present_TC[teacher] = (sizes_C > 0).cpu()
        weights_C = len(y_N) / ((sizes_C > 0).sum() * sizes_C.clamp(min=1)) if balanced else torch.ones_like(sizes_C)
        full_NK = torch.nn.functional.pad(phi_NK.double(), (0, 1), value=_BIAS)
        weighted_KN = (full_NK * (labels_NC @ weights_C)[:, None]).T
        # Products of one shard alone: a batched product's bits would depend on how many records the others have.
        moments_TKK[teacher], sums_TKC[teacher] = weighted_KN @ full_NK, weighted_KN @ labels_NC
    moments_TKK.diagonal(dim1=1, dim2=2).add_(penalty)
    # One factorisation of a positive definite matrix for each teacher, by the same steps for any values.
    solved_TKC = torch.cholesky_solve(sums_TKC, torch.linalg.cholesky(moments_TKK)).float().cpu()
    weight_TCK = solved_TKC[:, :-1].transpose(1, 2).contiguous()
    bias_TC = (solved_TKC[:, -1] * _BIAS).masked_fill(~present_TC, -math.inf)
    # By its number: no class is favoured, and no record has a part in it.
    for teacher in (~present_TC.any(dim=1)).nonzero().flatten().tolist():
        bias_TC[teacher, indices[teacher] % num_classes] = 0.0
    return {"0.weight": weight_TCK, "0.bias": bias_TC}
