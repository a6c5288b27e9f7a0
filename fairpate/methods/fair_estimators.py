"""Methods that read the groups of private records, behind scikit-learn's interface.

As :mod:`fairpate.methods.estimators`, but ``fit`` needs ``sensitive_features``: a group per private record, which
counts as private as the rest of it. The set of groups is treated as public. Prediction needs no group.

Shapes: N records, G groups, E events.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fairpate.config import CalibrationConfig, ModelConfig, PrivacyTarget
from fairpate.fairness.rate_constraints import RateConstraints
from fairpate.methods import dp_fermi, noisy_histogram, pf_ld, raco_dp
from fairpate.methods.attribute import require_unseen
from fairpate.methods.dp_fermi import Cells, DpFermiConfig
from fairpate.methods.dp_sgd import DpSgdConfig
from fairpate.methods.estimators import DpSgdClassifier
from fairpate.methods.mean_parity import MeanParity
from fairpate.methods.noisy_histogram import NoisyHistogramConfig
from fairpate.methods.pf_ld import FldConfig, PfLdConfig
from fairpate.methods.raco_dp import RacoDpConfig
from fairpate.methods.trained import PublicPool, Trained, private_randomness
from fairpate.types import GateRule, Relation

_MODEL = ModelConfig()


class GroupReadingClassifier(DpSgdClassifier):
    """What they share: ``groups_`` are the names of the groups, in the order of their codes."""

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: npt.ArrayLike | None = None,
        public_X: npt.ArrayLike | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
    ) -> GroupReadingClassifier:
        """Train on private ``X`` (N, ...), ``y`` (N,) and ``sensitive_features`` (N,).

        ``public_X`` and ``public_sensitive_features`` are for calibration. ValueError without sensitive features, for
        fewer than two groups, for settings out of range, and where a method that protects the group alone is given it,
        or an encoding of it, as a column of ``X``.
        """
        if sensitive_features is None:
            raise ValueError(f"{type(self).__name__} reads groups: give sensitive_features to fit.")
        self.groups_, codes = np.unique(np.asarray(sensitive_features), return_inverse=True)
        if len(codes) != len(np.asarray(y)):
            raise ValueError(f"Expected one group per record, got {len(codes)} for {len(np.asarray(y))}.")
        self._group_codes = torch.from_numpy(codes.astype(np.int64))
        try:
            super().fit(X, y, public_X=public_X, public_sensitive_features=public_sensitive_features)
        finally:
            del self._group_codes  # private records do not outlive training
        return self

    def _require_unseen_groups(self, x: Tensor) -> None:
        """ValueError where features show the groups; for methods that count features as public."""
        require_unseen(x, self._group_codes, method=type(self).__name__)


class DpFermiClassifier(GroupReadingClassifier):
    """DP-FERMI; parameters beyond :class:`DpSgdClassifier` are those of ``DpFermiConfig``.

    After ``fit``, ``shares_`` (E, G) are the shares that were declared or released. ``relation`` None is that of the
    unit which ``mode`` protects.
    """

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        relation: Relation | None = None,
        accounting: str = "pld",
        epochs: float = 20.0,
        batch_size: int = 256,
        clip_norm: float = 1.0,
        learning_rate: float = 0.5,
        momentum: float = 0.9,
        num_records: int | None = None,
        max_records: int = 512,
        noise: str = "os_entropy",
        constraint: str = "demographic_parity",
        positive_label: int = 1,
        mode: str = "all",
        weight: float = 1.0,
        radius: float | None = None,
        matrix_learning_rate: float = 0.3,
        matrix_noise_ratio: float = 2.0,
        shares: tuple[tuple[float, ...], ...] | None = None,
        share_noise: float = 30.0,
        min_share: float = 0.01,
        averaged_share: float = 0.5,
        noise_rule: str = "accounted",
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.epsilon, self.delta = model, epsilon, delta
        self.relation = relation  # type: ignore[assignment]
        self.accounting, self.epochs, self.batch_size, self.clip_norm = accounting, epochs, batch_size, clip_norm
        self.learning_rate, self.momentum, self.num_records = learning_rate, momentum, num_records
        self.max_records, self.noise = max_records, noise
        self.constraint, self.positive_label, self.mode, self.weight = constraint, positive_label, mode, weight
        self.radius, self.matrix_learning_rate = radius, matrix_learning_rate
        self.matrix_noise_ratio, self.shares, self.share_noise = matrix_noise_ratio, shares, share_noise
        self.min_share, self.averaged_share, self.noise_rule = min_share, averaged_share, noise_rule
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        config, base, target = self._section(DpFermiConfig), self._section(DpSgdConfig), self._target()
        if config.mode != "all":
            self._require_unseen_groups(x)
        steps = dp_fermi.calibrated_steps(config, base, target, num_records=len(x))
        randomness = private_randomness(base.noise, self._noise_seed)
        cells = Cells.of(
            y, self._group_codes, config=config, num_classes=len(self.classes_), num_groups=len(self.groups_)
        )
        shares = dp_fermi.release_shares(cells, config, relation=target.record_relation, randomness=randomness)
        self.shares_ = shares.shares_EG
        return dp_fermi.train(
            network, x, y, cells, steps, config, shares=shares, randomness=randomness, generator=self._generator()
        )


class FLdClassifier(GroupReadingClassifier):
    """F-LD, without privacy; parameters are those of ``FldConfig``, and otherwise of :class:`DpSgdClassifier`."""

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        constraint: str = "demographic_parity",
        sharpness: float = 1.0,
        warmup_epochs: int = 20,
        epochs: int = 50,
        batch_size: int = 256,
        optimizer: str = "adam",
        learning_rate: float = 1e-3,
        momentum: float = 0.9,
        schedule: str = "constant",
        multipliers: str = "two_sided",
        dual_step: float = 0.5,
        max_multiplier: float = 5.0,
        tolerance: float = 0.0,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.constraint, self.sharpness = model, constraint, sharpness
        self.warmup_epochs, self.epochs, self.batch_size = warmup_epochs, epochs, batch_size
        self.optimizer, self.learning_rate, self.momentum = optimizer, learning_rate, momentum
        self.schedule, self.multipliers, self.dual_step = schedule, multipliers, dual_step
        self.max_multiplier, self.tolerance = max_multiplier, tolerance
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        self._require_unseen_groups(x)
        config = self._section(FldConfig)
        return pf_ld.train_f_ld(
            network,
            x,
            y,
            self._group_codes,
            config,
            parity=self._parity(config),
            generator=self._generator(),
        )

    def _target(self) -> PrivacyTarget:
        return PrivacyTarget()

    def _parity(self, config: FldConfig) -> MeanParity:
        return MeanParity(
            constraint=config.constraint,
            num_groups=len(self.groups_),
            num_classes=len(self.classes_),
            sharpness=config.sharpness,
        )


class PfLdClassifier(FLdClassifier):
    """PF-LD within (``epsilon``, ``delta``) for one sensitive attribute; features and labels count as public.

    Parameters beyond :class:`FLdClassifier` are those of ``PfLdConfig`` and ``PrivacyTarget``.
    """

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        relation: Relation | None = None,
        accounting: str = "pld",
        constraint: str = "demographic_parity",
        sharpness: float = 1.0,
        warmup_epochs: int = 20,
        epochs: int = 50,
        batch_size: int = 256,
        optimizer: str = "adam",
        learning_rate: float = 1e-3,
        momentum: float = 0.9,
        schedule: str = "constant",
        multipliers: str = "two_sided",
        dual_step: float = 0.5,
        max_multiplier: float = 5.0,
        tolerance: float = 0.0,
        clip_norm: float = 1.0,
        clip_value: float = 1.0,
        dual_share: float = 0.2,
        size_share: float = 0.02,
        group_sizes: tuple[float, ...] | None = None,
        min_group_share: float = 0.02,
        batches: str = "public",
        noise: str = "os_entropy",
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            model=model,
            constraint=constraint,
            sharpness=sharpness,
            warmup_epochs=warmup_epochs,
            epochs=epochs,
            batch_size=batch_size,
            optimizer=optimizer,
            learning_rate=learning_rate,
            momentum=momentum,
            schedule=schedule,
            multipliers=multipliers,
            dual_step=dual_step,
            max_multiplier=max_multiplier,
            tolerance=tolerance,
            calibration=calibration,
            idp3=idp3,
            random_state=random_state,
        )
        self.epsilon, self.delta, self.accounting = epsilon, delta, accounting
        self.relation = relation  # type: ignore[assignment]
        self.clip_norm, self.clip_value = clip_norm, clip_value
        self.dual_share, self.size_share, self.group_sizes = dual_share, size_share, group_sizes
        self.min_group_share, self.batches, self.noise = min_group_share, batches, noise

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        self._require_unseen_groups(x)
        settings = {name: getattr(self, name) for name in PfLdConfig.model_fields if name != "form"}
        config = PfLdConfig(**settings)
        return pf_ld.train_pf_ld(
            network,
            x,
            y,
            self._group_codes,
            config,
            pf_ld.calibrated_noise(config, self._target(), num_records=len(x)),
            parity=self._parity(config),
            randomness=private_randomness(config.noise, self._noise_seed),
            generator=self._generator(),
        )

    def _target(self) -> PrivacyTarget:
        target: PrivacyTarget = self._section(PrivacyTarget)
        return target


class RacoDpClassifier(GroupReadingClassifier):
    """RaCO-DP; parameters beyond :class:`DpSgdClassifier` are those of ``RacoDpConfig``.

    ``constraints``, where given, are used in place of the named ``constraint`` with ``bound`` and ``label``: any that
    :mod:`fairpate.fairness.rate_constraints` can state, over codes of labels and groups in sorted order. After ``fit``,
    ``report_`` says how they fared.
    """

    def __init__(
        self,
        *,
        model: ModelConfig = _MODEL,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        relation: Relation = "add or remove one",
        accounting: str = "pld",
        epochs: float = 20.0,
        batch_size: int = 256,
        clip_norm: float = 1.0,
        learning_rate: float = 0.5,
        momentum: float = 0.9,
        num_records: int | None = None,
        max_records: int = 512,
        noise: str = "os_entropy",
        constraints: RateConstraints | None = None,
        constraint: str = "demographic_parity",
        bound: float = 0.05,
        label: int | None = 1,
        sharpness: float = 1.0,
        dual_learning_rate: float = 0.1,
        max_multiplier: float | None = None,
        max_total_multiplier: float | None = None,
        histogram_share: float = 0.1,
        min_share: float = 0.01,
        averaged_share: float = 0.5,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.model, self.epsilon, self.delta, self.relation = model, epsilon, delta, relation
        self.accounting, self.epochs, self.batch_size, self.clip_norm = accounting, epochs, batch_size, clip_norm
        self.learning_rate, self.momentum, self.num_records = learning_rate, momentum, num_records
        self.max_records, self.noise = max_records, noise
        self.constraints, self.constraint, self.bound, self.label = constraints, constraint, bound, label
        self.sharpness, self.dual_learning_rate = sharpness, dual_learning_rate
        self.max_multiplier, self.max_total_multiplier = max_multiplier, max_total_multiplier
        self.histogram_share, self.min_share, self.averaged_share = histogram_share, min_share, averaged_share
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:  # noqa: ARG002
        config = self._section(RacoDpConfig)
        trained = raco_dp.train(
            network,
            x,
            y,
            self._group_codes,
            constraints=self.constraints
            or raco_dp.constraints_of(config, num_classes=len(self.classes_), num_groups=len(self.groups_)),
            **_beside_histogram(self, config, len(x)),
        )
        self.report_ = trained.report
        return trained


def _beside_histogram(classifier: DpSgdClassifier, config: NoisyHistogramConfig, num_records: int) -> dict[str, Any]:
    base = classifier._section(DpSgdConfig)
    return {
        "steps": noisy_histogram.calibrated_steps(base, config, classifier._target(), num_records=num_records),
        "config": config,
        "randomness": private_randomness(base.noise, classifier._noise_seed),
        "histogram_randomness": private_randomness(base.noise, classifier._noise_seed + 1),
        "generator": classifier._generator(),
    }
