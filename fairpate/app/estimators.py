"""The PATE family and SF-PATE behind scikit-learn's interface; see :mod:`fairpate.app.methods`.

``fit`` trains teachers on private records, asks public ones through a ledger and trains a student on the labels. The
ledger and all else that is private is in ``folder`` afterwards, or gone with a temporary folder; asking the same
teachers again is a matter for `fairpate serve`. A record's teacher follows from its content.

Shapes: N private records, M public ones.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fairpate.app.methods.pate import check_pate, train_fairpate, train_pate, train_pate_s_in, train_pate_s_pre
from fairpate.app.methods.sf_pate import check_sf_pate, train_sf_pate
from fairpate.app.methods.training import Training
from fairpate.app.progress import Reporter
from fairpate.app.rundir import create_run_directory
from fairpate.app.trained_on import record_data, with_given_data
from fairpate.config import (
    AggregatorConfig,
    CalibrationConfig,
    ModelConfig,
    PrivacyTarget,
    RayConfig,
    StudentConfig,
    TeachersConfig,
)
from fairpate.data import Dataset, Split
from fairpate.data.identity import counted
from fairpate.methods.attribute import require_unseen
from fairpate.methods.estimators import Classifier, required_pool
from fairpate.methods.pf_ld import FldConfig
from fairpate.methods.sf_pate import SfPateConfig
from fairpate.methods.TODO import PateConfig, PateSInConfig, TrainConfig
from fairpate.methods.trained import PublicPool, Trained
from fairpate.types import GateRule

_TEACHERS, _AGGREGATOR, _STUDENT = TeachersConfig(), AggregatorConfig(), StudentConfig()
_PATE, _PATE_S_IN, _RAY = PateConfig(), PateSInConfig(), RayConfig()
_SF_PATE, _FAIR = SfPateConfig(), FldConfig()


class PateClassifier(Classifier):
    """PATE within (``epsilon``, ``delta``) for one record added or removed.

    ``teachers``, ``aggregator``, ``student`` and ``ray`` are sections of the configuration, ``pate`` says what the
    target limits; public records are the queries, in their order. ``student.model`` is the architecture. Noise comes
    from the operating system unless ``aggregator.noise`` is ``seeded``. ``calibration``, ``idp3`` and ``random_state``
    as for :class:`fairpate.methods.estimators.DpSgdClassifier`.
    """

    def __init__(
        self,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        teachers: TeachersConfig = _TEACHERS,
        aggregator: AggregatorConfig = _AGGREGATOR,
        student: StudentConfig = _STUDENT,
        pate: PateConfig = _PATE,
        ray: RayConfig = _RAY,
        folder: Path | None = None,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon, self.delta = epsilon, delta
        self.teachers, self.aggregator, self.student = teachers, aggregator, student
        self.pate, self.ray, self.folder = pate, ray, folder
        self.calibration, self.idp3, self.random_state = calibration, idp3, random_state

    def _architecture(self) -> ModelConfig:
        return self.student.model

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, public: PublicPool | None) -> Trained:
        dataset = self._dataset(x, y, public)
        with _folder(self.folder) as root:
            config = with_given_data(self._config(), dataset).model_copy(update={"out": root})
            self._check(config)
            run = create_run_directory(config)
            record_data(run, dataset, given_from_python=True)
            training = Training(dataset=dataset, config=config, run=run, model=network, reporter=Reporter(quiet=True))
            return self._method(training)

    @property
    def _method(self) -> Callable[[Training], Trained]:
        return train_pate

    def _check(self, config: TrainConfig) -> None:
        check_pate(config)

    def _dataset(self, x: Tensor, y: Tensor, public: PublicPool | None) -> Dataset:
        return _dataset(x, y, torch.zeros_like(y), required_pool(public, "PATE"), num_classes=len(self.classes_))

    def _config(self) -> TrainConfig:
        return TrainConfig(
            seed=self._training_seed,
            target=self._target(),
            teachers=self.teachers,
            aggregator=self.aggregator,
            student=self.student,
            pate=self.pate,
            ray=self.ray,
        )

    def _target(self) -> PrivacyTarget:
        return PrivacyTarget(epsilon=self.epsilon, delta=self.delta)


class FairPateClassifier(PateClassifier):
    """FairPATE: ``aggregator.gate`` stands in the aggregator. Parameters as :class:`PateClassifier`."""

    @property
    def _method(self) -> Callable[[Training], Trained]:
        return train_fairpate


class PateSPreClassifier(PateClassifier):
    """PATE-S_pre: ``aggregator.gate`` stands between the labels and the student. As :class:`PateClassifier`."""

    @property
    def _method(self) -> Callable[[Training], Trained]:
        return train_pate_s_pre


class PateSInClassifier(PateClassifier):
    """PATE-S_in: ``parity`` is the regulariser in the student's loss; other parameters as :class:`PateClassifier`."""

    def __init__(
        self,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        parity: PateSInConfig = _PATE_S_IN,
        teachers: TeachersConfig = _TEACHERS,
        aggregator: AggregatorConfig = _AGGREGATOR,
        student: StudentConfig = _STUDENT,
        pate: PateConfig = _PATE,
        ray: RayConfig = _RAY,
        folder: Path | None = None,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            teachers=teachers,
            aggregator=aggregator,
            student=student,
            pate=pate,
            ray=ray,
            folder=folder,
            calibration=calibration,
            idp3=idp3,
            random_state=random_state,
        )
        self.parity = parity

    @property
    def _method(self) -> Callable[[Training], Trained]:
        return train_pate_s_in

    def _config(self) -> TrainConfig:
        return super()._config().model_copy(update={"pate_s_in": self.parity})


class SfPateClassifier(PateClassifier):
    """SF-PATE within (``epsilon``, ``delta``) for one sensitive attribute; features and labels count as public.

    ``sf_pate`` and ``fair`` are the sections `sf_pate` and `f_ld` of the configuration; other parameters as
    :class:`PateClassifier`. ``fit`` reads ``sensitive_features``; of public records only ``sf_t`` has need.
    """

    def __init__(
        self,
        *,
        epsilon: float = 3.0,
        delta: float = 1e-5,
        sf_pate: SfPateConfig = _SF_PATE,
        fair: FldConfig = _FAIR,
        teachers: TeachersConfig = _TEACHERS,
        aggregator: AggregatorConfig = _AGGREGATOR,
        student: StudentConfig = _STUDENT,
        pate: PateConfig = _PATE,
        ray: RayConfig = _RAY,
        folder: Path | None = None,
        calibration: CalibrationConfig | None = None,
        idp3: GateRule | None = None,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            teachers=teachers,
            aggregator=aggregator,
            student=student,
            pate=pate,
            ray=ray,
            folder=folder,
            calibration=calibration,
            idp3=idp3,
            random_state=random_state,
        )
        self.sf_pate, self.fair = sf_pate, fair

    def fit(
        self,
        X: npt.ArrayLike,
        y: npt.ArrayLike,
        *,
        sensitive_features: npt.ArrayLike | None = None,
        public_X: npt.ArrayLike | None = None,
        public_sensitive_features: npt.ArrayLike | None = None,
    ) -> SfPateClassifier:
        """As the parent's, with one of ``sensitive_features`` (N,) per private record; their set of values is public.

        ValueError without them, and where a column of ``X`` is one of their encodings.
        """
        if sensitive_features is None:
            raise ValueError("SfPateClassifier reads groups: give sensitive_features to fit.")
        codes = np.unique(np.asarray(sensitive_features), return_inverse=True)[1]
        self._groups = torch.from_numpy(codes.astype(np.int64))
        try:
            super().fit(X, y, public_X=public_X, public_sensitive_features=public_sensitive_features)
        finally:
            del self._groups  # private records do not outlive training
        return self

    @property
    def _method(self) -> Callable[[Training], Trained]:
        return train_sf_pate

    def _check(self, config: TrainConfig) -> None:
        check_sf_pate(config)

    def _dataset(self, x: Tensor, y: Tensor, public: PublicPool | None) -> Dataset:
        require_unseen(x, self._groups, method="SfPateClassifier")
        if self.sf_pate.variant == "sf_t":
            public = required_pool(public, "SF-PATE with fair teachers")
        pool = public or PublicPool(x=x[:0], groups=y[:0])
        return _dataset(x, y, self._groups, pool, num_classes=len(self.classes_))

    def _config(self) -> TrainConfig:
        return super()._config().model_copy(update={"sf_pate": self.sf_pate, "f_ld": self.fair})


def _dataset(x: Tensor, y: Tensor, groups: Tensor, public: PublicPool, *, num_classes: int) -> Dataset:
    """Private and public records as the pipeline reads them; nobody reads the labels of public ones, which are -1."""
    unknown = torch.full((len(public.groups),), -1, dtype=torch.int64)
    nothing = Split(x=x[:0], y=y[:0], z=y[:0], record_id=())
    private_units, public_units = _units(x, y), _units(public.x, public.groups)
    return Dataset(
        name="records",
        kind="image" if x.ndim == 4 else "tabular",
        private=Split(x=x, y=y, z=groups, record_id=counted(private_units), unit_id=private_units),
        public=Split(x=public.x, y=unknown, z=public.groups, record_id=counted(public_units), unit_id=public_units),
        validation=nothing,
        test=nothing,
        label_names=tuple(str(label) for label in range(num_classes)),
        group_names=tuple(str(group) for group in range(int(torch.cat([public.groups, groups]).max()) + 1)),
        sensitive_attribute="group",
    )


def _units(x: Tensor, codes: Tensor) -> tuple[str, ...]:
    """A name per record from its content; records with equal content are one unit."""
    contents = (
        values.tobytes() + code.to_bytes(8, "little", signed=True)
        for values, code in zip(x.numpy(), codes.tolist(), strict=True)
    )
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="fairpate-") as root:
        yield Path(root)
