"""Tables of a comparison: what is written is read, infinite and undefined numbers included, and secrets stay out."""

import math
import stat
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairpate.fairness.rates import NOTIONS
from fairpate.report.frontier import Row
from fairpate.run.sweep import RecordsTableError, publishable, read_rows, read_table, write_rows
from fairpate.types import RunRecord

pytestmark = pytest.mark.usefixtures("light_runs")


def measured(**changes: object) -> Row:
    record = RunRecord(
        method="pate",
        data="adult",
        seed=3,
        unit="record",
        relation="add or remove one",
        delta=1e-5,
        epsilon=2.5,
        epsilon_is_data_dependent=False,
        accuracy=0.8,
        coverage=1.0,
        disparity=None,
        config={"target": {"epsilon": 3.0}},
    )
    record = replace(record, **changes)
    return Row(
        digest="abc",
        method="pate",
        data="adult",
        seed=3,
        config=record.config,
        command="fairpate run --method pate --data adult",
        minutes=0.5,
        record=record,
    )


def failed() -> Row:
    return replace(measured(), digest="def", record=None, error="ValueError: no such thing", minutes=math.nan)


def test_what_is_written_is_read_back_field_for_field(tmp_path: Path) -> None:
    odds = {"equalized_odds": {"value": 0.2, "low": 0.1, "high": 0.4, "fair_from": 0.05}}
    named = measured(majority_accuracy=0.76, degenerate=("predicts 'no' for every record",), fairness=odds)
    named = replace(named, record=replace(named.record, underserved_groups=("men",), unmeasured_groups=("children",)))
    asked = measured(answered=7, answered_by_group=(4, 3))
    rows = [named, asked, measured(epsilon=math.inf), failed()]
    write_rows(rows, tmp_path / "rows.parquet")
    back = read_rows(tmp_path / "rows.parquet")
    assert back[:3] == rows[:3]
    assert back[3].record is None
    assert math.isnan(back[3].minutes)
    assert replace(back[3], minutes=0.0) == replace(failed(), minutes=0.0)
    assert [row.status for row in back] == ["ok", "ok", "ok", "failed"]


def test_the_columns_are_the_fields_of_a_record_and_those_of_the_cell(tmp_path: Path) -> None:
    write_rows([measured(), failed()], tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    cell = {"digest", "status", "error", "command", "minutes", "has_guarantee"}
    fairness = {f"{name}{end}" for name in NOTIONS for end in ("", "_low", "_high", "_fair_from")}
    assert set(table.column_names) == set(RunRecord.__dataclass_fields__) - {"fairness"} | cell | fairness
    assert table["disparity"].to_pylist() == [None, None]
    assert table["config"].to_pylist()[0] == '{"target": {"epsilon": 3.0}}'


def test_a_price_that_depends_on_votes_enters_a_private_table_only(tmp_path: Path) -> None:
    secret = measured(epsilon_is_data_dependent=True)
    with pytest.raises(ValueError, match="data-dependent epsilons of abc"):
        write_rows([secret], tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())
    write_rows([secret], tmp_path / "private.parquet", private=True)
    assert stat.S_IMODE((tmp_path / "private.parquet").stat().st_mode) == 0o600
    assert read_rows(tmp_path / "private.parquet") == [secret]


def test_a_published_table_tells_neither_time_nor_cause_and_leaves_out_what_has_no_privacy(tmp_path: Path) -> None:
    unprotected = measured(epsilon=math.inf)
    rows = [measured(), failed(), unprotected, replace(failed(), has_guarantee=False)]
    write_rows([*rows, measured(epsilon_is_data_dependent=True)], tmp_path / "private.parquet", private=True)
    table = read_table(tmp_path / "private.parquet")
    assert table["minutes"].to_pylist()[0] == 0.5
    for benchmark, kept in ((False, rows[:2]), (True, rows)):
        public = publishable(table, unprotected=benchmark).to_pylist()
        assert [row["epsilon"] for row in public] == [row.record and row.record.epsilon for row in kept]
        assert [row["error"] for row in public] == ["failed" if row.error else "" for row in kept]
        assert {row["minutes"] for row in public} == {None}


def test_configurations_are_strict_json(tmp_path: Path) -> None:
    config = {"gate": {"max_disparity": math.inf}, "hidden": [16, math.nan]}
    write_rows([replace(measured(config=config), config=config)], tmp_path / "rows.parquet")
    assert read_rows(tmp_path / "rows.parquet")[0].config == {"gate": {"max_disparity": None}, "hidden": [16, None]}


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordsTableError, match=r"rows\.parquet: no such file"):
        read_rows(tmp_path / "rows.parquet")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecordsTableError, match=r"damaged\.parquet: cannot be read"):
        read_rows(tmp_path / "damaged.parquet")
    (tmp_path / "report.html").write_text("<html>")
    for other in (tmp_path, tmp_path / "report.html"):
        with pytest.raises(RecordsTableError, match=f"{other}: .*give the results.parquet of `fairpate compare`"):
            read_rows(other)
    pq.write_table(pa.table({"method": ["pate"]}), tmp_path / "other.parquet")
    with pytest.raises(RecordsTableError, match="lacks columns digest, data"):
        read_rows(tmp_path / "other.parquet")
