"""What a service's page says of one record: its features, whatever the voters see of it."""

from pathlib import Path

import pytest
import torch

from fairpate.config import EmbeddingConfig
from fairpate.data.dataset import Dataset, Split
from fairpate.data.registry import embedded
from fairpate.methods.base import configured
from fairpate.releases.directory import RunDirectory
from fairpate.run.serve import public_words

pytestmark = pytest.mark.usefixtures("light_runs")


def test_a_record_has_its_own_features_beside_the_coordinates_that_voters_see():
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    split = Split(x=x, y=torch.arange(40) % 2, z=torch.arange(40) % 2, record_id=[str(row) for row in range(40)])
    splits = dict.fromkeys(("private", "public", "validation", "test"), split)
    names = {"label_names": ("no", "yes"), "group_names": ("a", "b"), "sensitive_attribute": "z"}
    plain = Dataset(name="mine", kind="tabular", feature_names=("a", "b", "c"), **names, **splits)
    run, config = RunDirectory(root=Path("run")), configured({}, method="fairpate")
    assert public_words(run, config, plain).record == ""
    seen = embedded(plain, EmbeddingConfig())
    coordinates = seen.public.x.shape[1]
    assert coordinates > 3
    expected = f"3 features, seen as {coordinates} coordinates of the public embedding"
    assert public_words(run, config, seen).record == expected
