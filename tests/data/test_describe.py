"""Lists and descriptions: plain records with counts that agree with the tensors."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fairpate.cli.summaries import describe_table
from fairpate.config import DataConfig
from fairpate.data import REGISTRY, DataError, describe, load_data
from fairpate.data.registry import CODEBOOKS

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


def test_only_embedded_data_sets_are_always_present(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        assert [name for name, entry in REGISTRY.items() if entry.is_in(folder)] == ["color_digits", "loans"]


def test_a_file_makes_its_data_set_present(tmp_path: Path) -> None:
    (tmp_path / "heart").mkdir()
    (tmp_path / "heart" / "heart_disease_health_indicators_BRFSS2015.csv.gz").write_bytes(b"")
    (tmp_path / "utkface" / "UTKFace").mkdir(parents=True)
    embedded, present = (
        {name for name, entry in REGISTRY.items() if entry.is_in(folder)} for folder in (tmp_path / "empty", tmp_path)
    )
    assert embedded >= {"color_digits", "loans"}
    assert present - embedded == {"heart", "utkface"}


def test_counts_are_those_of_the_tensors() -> None:
    dataset = load_data(DataConfig(name="color_digits"))
    description = describe(dataset)
    assert description.record_shape == (2, 8, 8)
    assert description.group_names == ("red", "green")
    for part in description.splits:
        split = dataset.splits[part.name]
        assert part.records == len(split)
        pairs = list(zip(split.z.tolist(), split.y.tolist(), strict=True))
        assert part.counts_GC == tuple(tuple(pairs.count((g, k)) for k in range(10)) for g in range(2))


def test_records_without_a_label_are_counted_as_such() -> None:
    dataset = load_data(DataConfig(name="color_digits"))
    pool = dataset.public
    described = describe(replace(dataset, public=replace(pool, y=torch.full_like(pool.y, -1))))
    public, private = (next(part for part in described.splits if part.name == name) for name in ("public", "private"))
    assert public.unlabelled_G == tuple((pool.z == group).sum().item() for group in range(2))
    assert sum(map(sum, public.counts_GC)) == 0
    assert public.records == sum(public.unlabelled_G) > 0
    assert private.unlabelled_G == (0, 0)
    console = Console(width=200, file=StringIO())
    console.print(describe_table(described))
    assert "without label" in (said := console.file.getvalue())
    assert f"{public.unlabelled_G[0]:,}" in next(line for line in said.splitlines() if line.split()[:1] == ["public"])


def test_a_description_is_json() -> None:
    described = json.loads(json.dumps(dataclasses.asdict(describe(load_data(DataConfig(name="color_digits"))))))
    assert described["splits"][0]["name"] == "private"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(DataError, match="unknown data set"):
        load_data(DataConfig(name="fashion_mnist"))


def test_every_data_set_is_documented() -> None:
    """On the page, with its address; a declared table at least in the words that open its declaration."""
    documented = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for name, entry in REGISTRY.items():
        declaration = CODEBOOKS / f"{name}.yaml"
        if declaration.is_file():
            assert declaration.read_text(encoding="utf-8").startswith("# "), name
        else:
            assert f"| `{name}` |" in documented
        assert f"| `{name}` |" not in documented or entry.address in documented
