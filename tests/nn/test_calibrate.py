"""Calibration: zero epochs change nothing, more close the gap on public records, and it knows when to stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairpate.nn.fit
from fairpate.config import CalibrationConfig, FitConfig, ModelConfig
from fairpate.nn.fit import calibrate, fit, predict_logits
from fairpate.nn.models import build_model


def biased() -> tuple[nn.Module, Tensor, Tensor]:
    """A model that leans on a feature which is the group itself: a disparity of about a half."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(600) % 2
    signal = torch.randn(600, generator=generator)
    x = torch.stack([signal, groups.float(), torch.randn(600, generator=generator)], dim=1)
    y = (signal + 2 * groups - 1 > 0).long()
    model = build_model(ModelConfig(name="logistic"), input_shape=(3,), num_classes=2, generator_seed=0)
    fit(model, x, y, FitConfig(epochs=20, learning_rate=0.05), generator=generator)
    return model, x, groups


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as twenty epochs of many more records would come."""
    monkeypatch.setattr(fairpate.nn.fit, "_CALIBRATION_RATE", 0.1)
    monkeypatch.setattr(fairpate.nn.fit, "_CALIBRATION_EPOCHS", 100)


def run(weight: float = 5.0) -> tuple[Any, nn.Module, Tensor, Tensor, Tensor]:
    model, x, groups = biased()
    before = predict_logits(model, x)
    config, unlabelled = CalibrationConfig(weight=weight), torch.full((len(x),), -1)
    gaps = calibrate(model, x, groups, config, y=unlabelled, generator=torch.Generator().manual_seed(1))
    return gaps, model, before, x, groups


def test_the_gap_closes_and_the_anchor_keeps_the_labels_near() -> None:
    gaps, model, before, x, _ = run()
    assert gaps[0] > 0.4
    assert gaps[-1] < 0.5 * gaps[0]
    kept = (predict_logits(model, x).argmax(dim=1) == before.argmax(dim=1)).float().mean()
    # A weight a hundred times as large leaves the anchor a hundredth of its influence.
    _, loose, *_ = run(weight=500.0)
    kept_loose = (predict_logits(loose, x).argmax(dim=1) == before.argmax(dim=1)).float().mean()
    assert kept > 0.6
    assert kept >= kept_loose


def test_public_records_of_one_group_are_refused() -> None:
    model, x, groups = biased()
    for rows in (groups == 0, torch.arange(600) < 2):
        with pytest.raises(ValueError, match="two groups"):
            calibrate(model, x[rows], groups[rows], CalibrationConfig(), y=groups[rows], generator=torch.Generator())


def test_known_labels_are_learned_and_records_without_one_keep_their_predictions() -> None:
    model, x, groups = biased()
    before = predict_logits(model, x).argmax(dim=1)
    y = 1 - before  # of every even record, the opposite of what the model says
    y[1::2] = -1
    config = CalibrationConfig(weight=0.0, labels=True)
    features = torch.cat([x, groups[:, None] * x], dim=1)  # even records are one group, so that labels differ by group
    wide = build_model(ModelConfig(name="logistic"), input_shape=(6,), num_classes=2, generator_seed=0)
    fit(wide, features, before, FitConfig(epochs=20, learning_rate=0.05), generator=torch.Generator().manual_seed(0))
    calibrate(wide, features, groups, config, y=y, generator=torch.Generator().manual_seed(1))
    changed = predict_logits(wide, features).argmax(dim=1) != before
    assert changed[0::2].float().mean() > 0.9
    assert changed[1::2].float().mean() < 0.1
    with pytest.raises(ValueError, match="no public record has a label"):
        calibrate(model, x, groups, config, y=torch.full_like(y, -1), generator=torch.Generator())
