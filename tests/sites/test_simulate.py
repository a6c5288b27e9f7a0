"""Records dealt to sites on one machine: each goes to one party, persons stay together, and the commands work."""

from __future__ import annotations

import json
import math
import random
import socket
import sys
from pathlib import Path
from typing import Any

import measured
import pyarrow.parquet as pq
import pytest
import sites as benchmark
from hospitals import DECLARATION
from scipy.stats import norm

from fairpate import cli
from fairpate.config import ConfigError, DataConfig, parse_config
from fairpate.data.registry import load_at_site
from fairpate.releases.odometer import LimitReachedError, Odometer
from fairpate.sites.simulate import deal, simulate, site_folders

pytestmark = pytest.mark.usefixtures("light_runs")


def source(folder: Path, *, person: bool = False, more: str = "", **settings: Any) -> DataConfig:
    """A declaration whose records are in one file."""
    folder.mkdir()
    declared = DECLARATION.replace(
        "{private: patients.csv, public: pool.csv, test: held_out.csv}", "{records: visits.csv}"
    )
    declared += "person: patient\n" * person + "num_public: 100\nnum_test: 50\n" + more
    (folder / "hospitals.yaml").write_text(declared, encoding="utf-8")
    lines = ["visit,patient,age,weight,ward,sex,readmitted,town"]
    for visit in range(600):
        draws = random.Random(visit)
        row = (visit, f"p{visit // 2}", draws.randint(0, 99), draws.randint(40, 120), draws.choice("ABC"))
        lines.append(",".join(map(str, (*row, draws.choice("FM"), draws.choice(["no", "yes"]), f"t{visit % 7}-x"))))
    (folder / "visits.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    values = {"name": "hospitals", "declaration": str(folder / "hospitals.yaml")} | settings
    return parse_config(values, DataConfig)


@pytest.mark.parametrize("person", [False, True])
def test_every_record_is_dealt_once_and_every_party_reads_its_files(person: bool, tmp_path: Path) -> None:
    records = deal(source(tmp_path / "all", person=person), tmp_path / "parties", sites=4)
    assert sum(records) == 450
    assert max(records) - min(records) <= (2 if person else 1)  # two visits a patient
    coordinator, sites = tmp_path / "parties" / "coordinator", site_folders(tmp_path / "parties", 4)
    names = [pq.read_table(coordinator / f"{part}.parquet")["visit"].to_pylist() for part in ("public", "test")]
    names += [pq.read_table(site / "private.parquet")["visit"].to_pylist() for site in sites]
    assert sorted((visit for each in names for visit in each), key=int) == [str(visit) for visit in range(600)]
    for party in (coordinator, *sites):
        values = {"name": "hospitals_sites", "declaration": str(party / "data.yaml")}
        found = load_at_site(parse_config(values, DataConfig), has_private=party != coordinator)
        expected = (0, 100, 50) if party == coordinator else (records[sites.index(party)], 100, 0)
        assert (len(found.private), len(found.public), len(found.test)) == expected


def test_a_rule_leaves_rows_out_with_its_option_alone(tmp_path: Path) -> None:
    ruled = "options: {wards: {default: false, description: Whether ward C is left out.}}\n"
    ruled += "keep: [{column: ward, other_than: [C], note: ward C, when: {wards: true}}]\n"
    assert sum(deal(source(tmp_path / "all", more=ruled), tmp_path / "everybody", sites=2)) == 450
    without = source(tmp_path / "again", more=ruled, options={"wards": True})
    assert 200 < sum(deal(without, tmp_path / "some", sites=2)) < 350


def test_persons_and_values_of_a_column_stay_together(tmp_path: Path) -> None:
    deal(source(tmp_path / "all", person=True), tmp_path / "persons", sites=3)
    patients = [
        set(pq.read_table(site / "private.parquet")["patient"].to_pylist())
        for site in site_folders(tmp_path / "persons", 3)
    ]
    assert not patients[0] & patients[1] | patients[0] & patients[2] | patients[1] & patients[2]
    deal(source(tmp_path / "again"), tmp_path / "towns", sites=7, by="town:2")
    for site in site_folders(tmp_path / "towns", 7):
        assert len(set(pq.read_table(site / "private.parquet", columns=["town"])["town"].to_pylist())) == 1


def test_a_person_is_not_dealt_to_two_sites(tmp_path: Path) -> None:
    data = source(tmp_path / "all", person=True)
    with pytest.raises(ConfigError, match=r"--by: town:2 divides the records of \d+ persons between sites"):
        deal(data, tmp_path / "towns", sites=7, by="town:2")
    assert sum(deal(data, tmp_path / "patients", sites=7, by="patient")) == 450


@pytest.mark.parametrize(
    ("by", "sites", "fault"),
    [("village", 2, "no column village; give one of visit"), ("sex", 3, "2 values, fewer than 3 sites")],
)
def test_what_cannot_be_dealt_is_refused(by: str, sites: int, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=fault):
        deal(source(tmp_path / "all"), tmp_path / "parties", sites=sites, by=by)
    with pytest.raises(ConfigError, match="set oriented_gradients"):
        deal(DataConfig(name="color_digits"), tmp_path / "pictures", sites=2)


def test_a_release_beyond_the_operators_own_limit_is_refused_before_a_party_begins(
    tmp_path: Path, own_state: None
) -> None:
    data = source(tmp_path / "all")
    Odometer().set_limit("hospitals", "record", epsilon=0.5, delta=1e-5)
    with pytest.raises(LimitReachedError):
        simulate(data, tmp_path / "refused", sites=3, overrides=["target.epsilon=1"])
    assert not list((tmp_path / "refused").glob("site*/join.log"))


@pytest.mark.slow  # processes, each of which imports torch
def test_the_command_runs_all_parties_as_processes_and_charges_the_operators_own_odometer_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_state: None
) -> None:
    source(tmp_path / "all")
    words = ["fairpate", "site", "simulate", "--data", "all/hospitals.yaml", "--sites", "2"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*words, "--by", "ward", "--epsilon", "2", "--out", "parties", "--json"])
    charged, create_server = [], socket.create_server

    def seen(*values: Any) -> socket.socket:
        charged.extend(Odometer().totals(delta=1e-5))
        return create_server(*values)

    monkeypatch.setattr(socket, "create_server", seen)  # for the port of the coordinator, with which a site is started
    cli.main()
    found = json.loads(capsys.readouterr().out)
    (total,) = charged
    assert (total.data, total.releases, total.epsilon) == ("hospitals", 1, found["epsilon"])
    assert sum(found["records"]) == 450
    assert 1.9 < found["epsilon"] <= 2
    assert (tmp_path / found["run"] / "public" / "report.html").is_file()
    # A site's process that exchanges messages imports no torch, unlike those that compute its tables and the model.
    assert 0 < found["site_mb"] < 100 < found["largest_process_mb"]


def test_a_folder_that_exists_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parties").mkdir()
    words = ["fairpate", "site", "simulate", "--data", "adult", "--out", str(tmp_path / "parties"), "--json"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "exists already" in capsys.readouterr().out


def test_the_page_shows_the_rows_that_are_stored_and_what_follows_from_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sites.md").read_text(encoding="utf-8")
    for method in ("weighted_votes", "residual_votes", "dp_fedavg"):
        assert benchmark.table(method) in page, "print it anew: python benchmarks/papers/sites.py --models all --table"
    sums, found = measured.read("site_sums"), " ".join(page.split())
    assert benchmark.sums_table() in page, "print it anew: python benchmarks/papers/sites.py --table"
    # A message of 16-byte secrets for each site: at 500 sites at most 5 s.
    assert sums["500 sites in one process"]["seconds"] < 5
    assert max(row["MB"] for name, row in sums.items() if name.endswith(" processes")) < 100
    outcomes = sums["500 sums with faults"]
    assert sum(outcomes.values()) == 500
    assert (
        f"{outcomes['exact, all sites']} were exact with all sites and {outcomes['exact, some sites lost']} with some "
        f"lost; {outcomes['ended: too few sites']} ended without a sum"
    ) in found
    errors = [(title, error) for row in measured.read("sites").values() for title, (_, error) in row.items()]
    alone, of_sites = (max(error for title, error in errors if title == each) for each in ("alone", "DP-FedAvg"))
    others = max(error for title, error in errors if title not in ("alone", "DP-FedAvg"))
    assert f"standard errors are up to {others} points (alone: {alone}; DP-FedAvg: {of_sites})" in found
    rows = {name: {title: mean for title, (mean, _) in row.items()} for name, row in measured.read("sites").items()}

    def most(better: str, worse: str, *words: str) -> str:
        found = (row[better] - row[worse] for name, row in rows.items() if all(word in name for word in words))
        return f"{max(found):.1f}"

    said = " ".join(page.split())
    weighted = "weighted_votes"
    lost = [
        max(most("one curator", t, weighted, f"={epsilon}") for t in ("t = 1", "t = K/2")) for epsilon in (0.1, 0.3, 1)
    ]
    assert f"costs at most {lost[0]} points at ε = 0.1, {lost[1]} at 0.3 and {lost[2]} at 1" in said
    assert f"at t = 1 at most {most('one curator', 't = 1', weighted)}" in said
    assert f"Federated DP-SGD at t = 1 is up to {most('federated, t = 1', 't = 1', weighted)} points better" in said
    assert f"a site alone up to {most('t = 1', 'alone', weighted)} points worse" in said
    better = [
        row["t = 1"] - rows[name.replace("residual", "weighted")]["t = 1"]
        for name, row in rows.items()
        if "residual" in name
    ]
    assert f"between {min(better):.1f} and {max(better):.1f} points" in said
    at_one = [name for name in rows if "residual" in name and name.endswith("=1")]
    assert f"ahead of federated DP-SGD in all {len(at_one)} rows" in said
    assert all(rows[each]["t = 1"] > rows[each.replace("residual", "weighted")]["federated, t = 1"] for each in at_one)
    per_site = {name: row["DP-FedAvg"] for name, row in rows.items() if "dp_fedavg" in name}
    fifty = [value for name, value in per_site.items() if " 50/" in name and name.endswith("=1")]
    assert f"With 50 sites and ε = 1 it reaches {min(fifty)} to {max(fifty)}" in said
    for data, majority in (("acs", 69.8), ("adult", 76.4), ("loans", 65.7)):
        assert f"{majority} %" in said
        assert max(value for name, value in per_site.items() if name.startswith(data) and " 50/" not in name) < majority


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0])
def test_the_noise_of_rounds_with_all_sites_is_that_of_one_gaussian(epsilon: float) -> None:
    # Theorem 8 of Balle and Wang (2018), for rounds whose inverse variances add up.
    mu = math.sqrt(10) / benchmark.multiplier_within(epsilon, 10, 1.0)
    delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert 0.9e-5 < delta <= 1e-5
