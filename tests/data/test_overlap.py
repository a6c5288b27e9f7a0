"""Public parts that are copies of private records are refused, and what chance repeats is not."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from fairpate import FairClassifier, FairSearchCV, Reporter, configured, load_data, run_method
from fairpate.config import DataConfig
from fairpate.data import DataError
from fairpate.data.draft import check_declaration
from fairpate.data.overlap import _more_than_chance, doubts, doubts_of, equal_by_copy, require_no_copy

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")

RNG = np.random.default_rng(3)
DECLARED: dict[str, Any] = {
    "name": "bank",
    "rows": 600,
    "files": {"private": "private.csv", "public": "pool.csv", "test": "test.csv"},
    "separator": ";",
    "decimal": ",",
    "label": {"column": "decision", "classes": ["no", "yes"]},
    "group": {"column": "sex", "values": ["F", "M"]},
    "features": {
        "age": {"bounds": [18, 84]},
        "amount": {"bounds": [0, 50000]},
        "months": {"categories": ["12", "24", "36", "48"]},
    },
}


def applications(count: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "age": RNG.integers(18, 85, count),
            "amount": RNG.uniform(500, 30000, count).round(2),
            "months": RNG.choice(["12", "24", "36", "48"], count),
            "sex": RNG.choice(["F", "M"], count),
            "decision": RNG.choice(["no", "yes"], count),
        }
    )


PRIVATE, POOL, TEST = applications(600), applications(200), applications(200)


def declared_in(folder: Path, **frames: pd.DataFrame) -> Path:
    for name, frame in ({"private": PRIVATE, "pool": POOL, "test": TEST} | frames).items():
        frame.to_csv(folder / f"{name}.csv", sep=";", decimal=",", index=False)
    path = folder / "bank.yaml"
    path.write_text(json.dumps(DECLARED), encoding="utf-8")  # JSON is YAML
    return path


def written_otherwise(frame: pd.DataFrame) -> pd.DataFrame:
    """The same records as another program writes them: 035.00 for 35."""
    return frame.assign(age=[f"0{age},00" for age in frame.age], months=frame.months)


COPIES = {
    "less the label": lambda: PRIVATE.drop(columns="decision"),
    "shuffled": lambda: PRIVATE.sample(frac=1, random_state=0),
    "a part of it": lambda: PRIVATE.sample(60, random_state=0),
    "written otherwise": lambda: written_otherwise(PRIVATE[:300]),
    "with others": lambda: pd.concat([POOL, PRIVATE[:40]]),
    "twice": lambda: pd.concat([PRIVATE[:50]] * 2),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("part", ["pool", "test"])
def test_a_file_copied_from_the_private_one_is_refused(how: str, part: str, tmp_path: Path) -> None:
    copy = COPIES[how]()
    path = declared_in(tmp_path, **{part: copy.assign(decision="no") if part == "test" else copy})
    equal = {"a part of it": 60, "written otherwise": 300, "with others": 40, "twice": 100}.get(how, 600)
    split = {"pool": "public", "test": "test"}[part]
    with pytest.raises(
        DataError, match=rf"^The {split} split: {equal} of its {len(copy)} records equal private ones in features and g"
    ):
        load_data(path)


def test_other_records_pass_and_a_check_counts_copies(tmp_path: Path) -> None:
    assert len(load_data(declared_in(tmp_path)).public) == 200
    tables = {"private": PRIVATE, "public": PRIVATE.drop(columns="decision"), "test": TEST}
    tables = {name: frame.assign(age=frame.age.astype(float)) for name, frame in tables.items()}
    with pytest.raises(DataError, match="The public split: 600 of its 600"):
        load_data({name: value for name, value in DECLARED.items() if name != "files"}, **tables)


def test_a_data_set_that_was_made_by_hand_is_checked_before_anything_is_charged(tmp_path: Path) -> None:
    dataset = load_data(declared_in(tmp_path))
    copied = type(dataset)(
        **{
            name: getattr(dataset, name)
            for name in ("kind", "label_names", "group_names", "sensitive_attribute", "name", "validation", "test")
        },
        private=dataset.private,
        public=dataset.private.take(range(100)),
    )
    config = configured({"out": tmp_path / "run", "target": {"epsilon": 1.0}}, method="weighted_votes")
    with pytest.raises(DataError, match="The public split: 100 of its 100"):
        run_method(config, Reporter(quiet=True), copied)
    assert not (tmp_path / "run").exists()


X = RNG.normal(size=(400, 3))
Y = (X[:, 0] > 0).astype(int)
Z = RNG.integers(0, 2, 400)


@pytest.mark.parametrize(
    "pool",
    [X, X.copy(), X[::-1], X[:50].astype(np.float32), X.tolist(), np.vstack([RNG.normal(size=(300, 3)), X[:20]])],
)
def test_an_estimator_refuses_a_pool_of_private_records(pool: Any) -> None:
    model = FairClassifier("weighted_votes", epsilon=1.0)
    for given in ({"public_X": pool}, {"public_X": pool, "sensitive_features": Z}):
        with pytest.raises(ValueError, match=r"public_X: .*a public record is one that anyone may see"):
            model.fit(X, Y, **given)
    with pytest.raises(ValueError, match=r"public_X: .*a public record is one"):
        model.set_params(public_X=pool).fit(X, Y)


def test_a_frame_by_its_declaration_and_a_search_refuse_it_too() -> None:
    of_rows = {name: value for name, value in DECLARED.items() if name not in ("files", "separator", "decimal")}
    model = FairClassifier.from_declaration(of_rows | {"files": {"private": "x"}}, "weighted_votes", epsilon=1.0)
    for pool in (PRIVATE, PRIVATE[:100], PRIVATE.drop(columns=["decision", "sex"])):
        with pytest.raises(ValueError, match=r"public_X: .*a public record is one"):
            model.fit(PRIVATE, public_X=pool)
    search = FairSearchCV(
        FairClassifier("weighted_votes", weighted_votes={}), {"weighted_votes__taught_share": [0.5, 1.0]}
    )
    with pytest.raises(ValueError, match=r"public_X: .*a public record is one"):
        search.fit(X, Y, public_X=X)


def test_a_few_records_are_refused_only_as_the_same_object() -> None:
    few = X[:8]
    with pytest.raises(ValueError, match="got X itself"):
        FairClassifier("weighted_votes", epsilon=1.0).fit(few, Y[:8], public_X=few)
    require_no_copy((torch.from_numpy(few), None), {"pool": (torch.from_numpy(few.copy()), None)})


def test_without_a_pool_the_error_says_what_a_public_record_is() -> None:
    with pytest.raises(ValueError, match=r"give public_X to fit .*one that anyone may see, such as a published or a m"):
        FairClassifier("weighted_votes", epsilon=1.0).fit(X, Y)


def named(path: Path) -> dict[str, Any]:
    """The data of a configuration: by a name that no known data set has."""
    path.write_text(path.read_text().replace('"bank"', '"applications"'))
    return {"name": "applications", "declaration": {"path": path}}


def rounded(frame: pd.DataFrame, digits: int) -> pd.DataFrame:
    return frame.assign(amount=frame.amount.round(digits))


@pytest.mark.parametrize(
    ("pool", "least"),
    [
        (lambda: rounded(PRIVATE[:200], 0), 190),
        (lambda: PRIVATE[:200].assign(amount=PRIVATE.amount[:200].astype(int)), 100),
        (lambda: PRIVATE[:200].assign(amount=PRIVATE.amount[:200] + RNG.uniform(-9, 9, 200)), 100),
        (lambda: pd.concat([POOL[:180], rounded(PRIVATE[:20], 1)]), 15),
    ],
    ids=["whole", "cut off", "moved a little", "some of them"],
)
def test_copies_that_were_rounded_are_a_caution_with_counts_alone(pool: Any, least: int, tmp_path: Path) -> None:
    data = named(declared_in(tmp_path, pool=pool()))
    (said,) = check_declaration(DataConfig(**data)).doubts
    found = re.fullmatch(r"The public split: (\d+) of its 200 records equal private ones once numbers are .*", said)
    assert found and least <= int(found[1]) <= 200
    # No number but the counts: no private value.
    assert re.findall(r"\d[\d,.]*", said) == [found[1], "200"]
    assert check_declaration(DataConfig(**named(declared_in(tmp_path)))).doubts == ()


def test_an_estimator_and_a_run_say_it_too(tmp_path: Path) -> None:
    data = named(declared_in(tmp_path, pool=rounded(PRIVATE[:200], 0)))
    config = configured({"out": tmp_path / "run", "target": {"epsilon": 1.0}, "data": data}, method="weighted_votes")
    console = Console(file=io.StringIO(), width=300)
    run_method(config, Reporter(console=console), None)
    assert "caution" in console.file.getvalue() and "once numbers are rounded" in console.file.getvalue()
    model = FairClassifier("weighted_votes", epsilon=1.0)
    with pytest.warns(
        UserWarning, match=r"public_X: \d+ of its 100 records equal private ones once numbers are rounded"
    ):
        model.fit(X, Y, public_X=X[:100].round(2))


def test_a_tenth_of_private_records_in_a_pool_of_a_table_that_repeats_is_a_caution() -> None:
    draws, found, alarms = np.random.default_rng(13), 0, 0
    for _ in range(5):
        shares = draws.dirichlet(np.full(300_000, 0.3))
        values = draws.choice(300_000, 22_000, p=shares)
        columns = np.stack([values // 600, values % 600], axis=1).astype(np.float32)
        private, pool = (torch.from_numpy(each) for each in (columns[:20_000], columns[20_000:]))
        mixed = torch.cat([pool[:1800], private[:200]])
        alarms += len(doubts((private, None), {"pool": (pool, None)}))
        require_no_copy((private, None), {"pool": (pool, None)})
        found += "of those that occur once" in " ".join(doubts((private, None), {"pool": (mixed, None)}))
    assert alarms == 0 and found >= 4


def natural(draws: np.random.Generator) -> tuple[Any, Any]:
    """Two independent samples of values that repeat often, seldom or never, of any sizes and of two distributions."""
    size = int(draws.choice([5, 50, 1000, 30000]))
    shares = draws.dirichlet(np.full(size, float(draws.choice([0.03, 0.3, 3.0]))))
    others = shares if draws.random() < 0.5 else draws.dirichlet(np.full(size, 0.3)) * 0.5 + shares * 0.5
    numbers = draws.choice([20, 100, 1000, 8000], size=2)
    return draws.choice(size, numbers[0], p=shares), draws.choice(size, numbers[1], p=others)


@pytest.mark.parametrize("num_pairs", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_chance_is_never_taken_for_a_copy_and_a_copy_is_found_where_records_differ(num_pairs: int) -> None:
    """No refusal in pairs of independent samples; in a copied part one wherever half of the values occur once."""
    draws, found, copies = np.random.default_rng(5), 0, 0
    for _ in range(num_pairs):
        private, other = natural(draws)
        assert equal_by_copy(private, other, repeated_in_part=1.0) == 0
        assert _more_than_chance(private, other) == 0
        _, counts = np.unique(private, return_counts=True)
        if (counts == 1).sum() > max(60, len(private) / 2):
            part = draws.permutation(private)[: len(private) // 2]
            copies += 1
            found += equal_by_copy(private, part, repeated_in_part=0.0) == len(part)
    assert copies > num_pairs / 15
    assert found == copies


def test_rows_divided_at_random_are_no_copies_even_where_each_part_was_cleaned_of_repetitions() -> None:
    draws = np.random.default_rng(7)
    for columns, levels in ((1, 30), (3, 6), (6, 4), (10, 2)):
        rows = draws.integers(0, levels, (6000, columns)).astype(np.float32)
        rows = np.vstack([rows, rows[:2000]])[draws.permutation(8000)]
        for count in (30, 500, 4000):
            parts = rows[:count], rows[count:]
            for private in (parts[1], np.unique(parts[1], axis=0)):
                for other in (parts[0], np.unique(parts[0], axis=0)):
                    given = (torch.from_numpy(each) for each in (private, other))
                    require_no_copy(*((next(given), None), {"pool": (next(given), None)}))


def test_a_copy_is_found_by_its_counts_where_every_value_occurs_often() -> None:
    draws = np.random.default_rng(11)
    values = draws.integers(0, 60, 3000)
    assert equal_by_copy(values, draws.permutation(values), repeated_in_part=1.0) == 3000
    # Another sample has other counts, and 12 values may have equal ones by chance.
    assert equal_by_copy(values, draws.integers(0, 60, 3000), repeated_in_part=1.0) == 0
    assert equal_by_copy(np.arange(12) // 2, np.arange(12) // 2, repeated_in_part=1.0) == 0


def test_pictures_and_negative_zero_are_compared_by_value() -> None:
    pictures = torch.from_numpy(RNG.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8))
    with pytest.raises(DataError, match="pool: 20 of its 20 records equal private ones in features, more"):
        require_no_copy((pictures, None), {"pool": (pictures[:20], np.zeros(20))})
    zeros = torch.zeros((40, 1)) * torch.arange(40)[:, None]
    spread = torch.cat([zeros, torch.arange(40.0)[:, None]], dim=1)
    with pytest.raises(DataError, match="pool: 40 of its 40"):
        require_no_copy((spread, None), {"pool": (spread * torch.tensor([-1.0, 1.0]), None)})


@pytest.mark.parametrize("name", ["adult", "compas", "bank"])
def test_published_tables_pass_and_their_copies_do_not(name: str, data_dir: Path) -> None:
    """5, 55 and 29 % of their public records equal private ones by chance."""
    dataset = load_data(DataConfig(name=name, data_dir=data_dir))
    assert doubts_of(dataset) == ()
    private = (dataset.private.x, dataset.private.z.numpy())
    rows = np.random.default_rng(0).permutation(len(dataset.private))[: len(dataset.private) // 10]
    part = dataset.private.take(rows.tolist())
    with pytest.raises(DataError, match=f"pool: {len(rows):,} of its {len(rows):,} records"):
        require_no_copy(private, {"pool": (part.x, part.z.numpy())})
