"""All releases on one data set are one sum: durable before they are visible, once per run, never started at zero."""

import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import ledger_terms
import numpy as np
import pytest
from scipy.stats import norm

from aggregator.ledger import Ledger
from aggregator.mechanism import ConfidentGnmax
from aggregator.store import LedgerError
from fairpate.privacy.accountant import (
    ConfidentGnmaxQueries,
    ConfidentGnmaxVotes,
    LaplaceReleases,
    PoissonGaussians,
    PureReleases,
    epsilon_pld,
    of_unit,
)
from fairpate.privacy.mechanism_events import (
    AttributeGaussians,
    AttributeQueries,
    PoissonGaussianLaplaces,
    SmoothRelease,
    event_from,
    event_json,
)
from fairpate.releases.directory import RunDirectory, RunDirectoryError
from fairpate.releases.log import ReleaseLog
from fairpate.releases.odometer import LimitReachedError, Odometer, OdometerError, spent_since, state_folder
from fairpate.releases.run_ledger import LedgerMeter
from fairpate.run.compare import count_cell

pytestmark = pytest.mark.usefixtures("light_runs")

TERMS = dataclasses.replace(
    ledger_terms.TERMS,
    mechanism=ConfidentGnmax(threshold=30, threshold_stddev_votes=100, noise_stddev_votes=60),
    noise="os_entropy",
)


@pytest.fixture
def odometer(tmp_path):
    return Odometer(tmp_path / "state")


def run_at(folder):
    run = RunDirectory(root=folder)
    run.private.mkdir(parents=True, exist_ok=True)
    return run


@pytest.fixture
def meter(tmp_path, odometer):
    """A meter of the run in the folder of that name, made anew at each call as by a new process."""
    return lambda name="run", data="adult": ReleaseLog(run_at(tmp_path / name), odometer, data=data, method="dp_sgd")


def gaussians(count=1, noise_multiplier=10.0):
    return PoissonGaussians(count=count, noise_multiplier=noise_multiplier, sampling_rate=1.0)


def total(odometer, data="adult"):
    (found,) = odometer.totals(delta=1e-5, data=data)
    return found


def test_a_command_names_the_cost_of_its_releases_under_each_relation(odometer, meter):
    """Multiplier 1 costs 4.377178 at 1e-5; a replaced record moves a sum twice as far, which costs 9.997."""
    meter("one").charge([gaussians(1, 1.0)], noise="os_entropy")
    before = odometer.charges("adult")
    meter("two").charge([gaussians(1, 1.0)], noise="os_entropy")
    meter("three").charge([dataclasses.replace(gaussians(1, 1.0), relation="replace one")], noise="os_entropy")
    said, _, _ = spent_since(before, "adult", odometer, delta=1e-5).partition(" of adult")
    assert said == "ε = 4.38 of each record and ε = 10.00 of each record"


def test_releases_of_many_runs_cost_what_one_of_all_would(odometer, meter):
    """100 Gaussian steps of multiplier 10 cost exactly 4.377178 at 1e-5, as one step of multiplier 1 does."""
    for number in range(4):
        meter(f"run-{number}").charge([gaussians(25)], noise="os_entropy")
    meter("one", "bank").charge([gaussians(1, 1.0)], noise="os_entropy")
    for data, releases in [("adult", 4), ("bank", 1)]:
        found = total(odometer, data)
        assert (found.releases, found.not_private, found.epsilon_limit) == (releases, 0, None)
        assert found.epsilon == pytest.approx(4.377178, abs=2e-3)
        assert found.epsilon >= 4.377178


def test_queries_and_gradients_are_added_as_renyi_curves(odometer, meter):
    """Per order alpha: alpha / (2 10^2) for each step, alpha (1 / (2 100^2) + 1 / 60^2) for each query."""
    queries = ConfidentGnmaxQueries(count=500, **dataclasses.asdict(TERMS.mechanism))
    meter("teachers").charge([queries], noise="os_entropy")
    meter("gradients").charge([gaussians(20)], noise="os_entropy")
    slope = 20 / (2 * 10**2) + 500 * (1 / (2 * 100**2) + 1 / 60**2)
    orders = np.linspace(1.01, 60, 20_000)
    epsilon = slope * orders + np.log1p(-1 / orders) - (math.log(1e-5) + np.log(orders)) / (orders - 1)
    assert 0.9 * epsilon.min() <= total(odometer).epsilon <= 1.01 * epsilon.min()


def test_a_process_that_imports_the_odometer_alone_prices_every_stored_event(odometer, meter):
    """A kind of event is known once its module is imported: without it, the rows could not be read or priced."""
    pure = {"count": 3, "epsilon": 0.2, "unit": "record", "relation": "add or remove one"}
    meter("pure").charge([PureReleases(**pure)], noise="os_entropy")
    meter("laplace").charge([LaplaceReleases(**pure)], noise="os_entropy")
    meter("steps").charge([gaussians(25)], noise="os_entropy")
    meter("bank", "bank").charge([PureReleases(**pure)], noise="os_entropy")
    program = f"""import sys
from pathlib import Path
from fairpate.releases.odometer import Odometer
totals = Odometer(Path({str(odometer.path.parent)!r})).totals(delta=1e-5)
print(*[total.epsilon for total in totals], "fairpate.privacy.laplace" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    of_adult, of_bank, has_mechanisms = done.stdout.split()
    assert (float(of_adult), float(of_bank)) == (total(odometer).epsilon, total(odometer, "bank").epsilon)
    assert 0.599 < float(of_bank) <= 0.6  # at a small delta hardly less than the plain sum
    assert has_mechanisms == "False"


def test_a_run_counts_once_however_often_it_is_told_and_stays_when_it_is_deleted(odometer, meter, tmp_path):
    for _ in range(3):
        meter().charge([gaussians()], noise="os_entropy")
    once = total(odometer)
    assert once.releases == 1
    shutil.rmtree(tmp_path / "run")
    assert total(odometer) == once
    meter().charge([gaussians()], noise="os_entropy")  # in the same folder, and another run
    assert total(odometer).releases == 2


def test_a_run_that_the_odometer_lost_is_counted_again(odometer, meter, caplog):
    meter().charge([gaussians(25)], noise="os_entropy")
    before = total(odometer)
    odometer.path.unlink()
    assert odometer.totals(delta=1e-5) == []
    meter()
    assert total(odometer) == before
    assert "charged there again" in caplog.text


def test_a_copy_of_a_run_is_another_run_and_a_moved_one_is_not(odometer, meter, tmp_path):
    meter().charge([gaussians()], noise="os_entropy")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    meter("copy").charge([gaussians()], noise="os_entropy")
    assert total(odometer).releases == 2
    shutil.move(tmp_path / "run", tmp_path / "moved")
    meter("moved").charge([gaussians()], noise="os_entropy")
    assert total(odometer).releases == 2


def test_units_and_relations_are_sums_of_their_own_and_seeded_noise_is_in_none(odometer, meter):
    meter("record").charge([gaussians()], noise="os_entropy")
    meter("seeded").charge([gaussians()], noise="seeded: not private")
    meter("no noise").charge([gaussians(noise_multiplier=0.0)], noise="os_entropy")
    meter("attribute").charge([PureReleases(count=1, epsilon=0.5)], noise="os_entropy")
    found = {(row.unit, row.relation): row for row in odometer.totals(delta=1e-5)}
    assert {key: (row.releases, row.not_private) for key, row in found.items()} == {
        ("record", "add or remove one"): (1, 2),
        ("sensitive attribute", "replace one"): (2, 0),
    }
    # The record's release covers its attribute too, which is replaced: with twice the sensitivity, so a curve of four
    # times the slope, less than the 0.5 * alpha * 0.5^2 at most by which a pure release of 0.5 grows.
    assert renyi_epsilon(4 / (2 * 10**2)) < found["sensitive attribute", "replace one"].epsilon
    assert found["sensitive attribute", "replace one"].epsilon < renyi_epsilon(4 / (2 * 10**2) + 0.5**3)


def renyi_epsilon(slope, delta=1e-5):
    """What a curve of slope times alpha converts to (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    orders = np.linspace(1.01, 1000, 1_000_000)
    return np.min(slope * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def test_a_release_that_would_pass_the_limit_is_refused_and_not_counted(odometer, meter):
    """100 steps of multiplier 10 have the Renyi curve alpha / 2, and between whole orders its chord."""
    limit = renyi_epsilon(0.5) + 0.04
    assert 4.377178 < limit < 4.8
    odometer.set_limit("adult", "record", epsilon=limit, delta=1e-5)
    for number in range(4):
        meter(f"run-{number}").charge([gaussians(25)], noise="os_entropy")
    assert total(odometer).epsilon_adaptive == pytest.approx(limit - 0.02, abs=0.02)
    with pytest.raises(LimitReachedError, match=rf"adult, unit record: 4 releases cost.*limit is {limit:g}"):
        meter("more").charge([gaussians()], noise="os_entropy")
    assert total(odometer).releases == 4
    odometer.set_limit("bank", "record", epsilon=1, delta=1e-5)
    meter("bank-1", "bank").charge([gaussians()], noise="os_entropy")
    with pytest.raises(LimitReachedError, match="1 release cost epsilon"):
        meter("bank-2", "bank").charge([gaussians(25)], noise="os_entropy")
    meter("run-3").charge([gaussians(25)], noise="os_entropy")  # it is in the sum already
    meter("other", "bank").charge([gaussians()], noise="os_entropy")
    replaced = dataclasses.replace(gaussians(), relation="replace one")
    with pytest.raises(LimitReachedError, match=r"have another relation.*limit of .* could bound"):
        meter("replaced").charge([replaced], noise="os_entropy")


def gaussian_profile(mu):
    """delta at epsilon of a Gaussian moved by ``mu`` standard deviations."""
    return lambda epsilon: norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))


def sampled_profile(mu, rate):
    """The same of one that is moved with probability ``rate``, against one that is not."""

    def profile(epsilon):
        odds = np.maximum((np.exp(epsilon) - 1 + rate) / rate, 0)
        with np.errstate(divide="ignore"):
            least = np.log(odds) / mu + mu / 2
        return (1 - rate - np.exp(epsilon)) * norm.sf(least) + rate * norm.sf(least - mu)

    return profile


def pure_profile(pure):
    """The same of randomised response."""
    return lambda epsilon: np.clip((np.exp(pure) - np.exp(epsilon)) / (1 + np.exp(pure)), 0, None) * (epsilon > -pure)


def sampled(rate):
    return (
        lambda mu: PoissonGaussians(count=1, noise_multiplier=1 / mu, sampling_rate=rate),
        lambda mu: sampled_profile(mu, rate),
    )


@pytest.mark.parametrize(
    ("limit", "mu", "first", "others"),
    [
        (2.0, 0.4, lambda mu: gaussians(1, 1 / mu), [sampled(10.0**-k) for k in (1, 2, 3, 4)]),
        (
            6.0,
            0.9,
            lambda mu: AttributeGaussians(count=1, attribute_noise_multiplier=1 / mu),
            [(lambda pure: PureReleases(count=1, epsilon=pure), pure_profile)],
        ),
    ],
    ids=["records", "attributes"],
)
def test_the_second_of_two_releases_chosen_by_the_first_costs_no_more_than_the_limit(
    odometer, meter, limit, mu, first, others
):
    """The attacker sees the loss of the first, then takes what has the largest delta at what is left of epsilon.

    Each second release is as strong as the odometer admits. Whichever were fixed beforehand, delta would be 1e-5.
    """
    own = meter("first").charge_of([first(mu)], noise="os_entropy")
    odometer.set_limit("adult", own.unit, epsilon=limit, delta=1e-5)
    odometer.charge(own)

    def strongest(make):
        low, high = 1e-3, 20.0
        for _ in range(12):
            middle = math.sqrt(low * high)
            try:
                meter("second").check([make(middle)], noise="os_entropy")
                low = middle
            except LimitReachedError:
                high = middle
        return low

    seconds = [profile(strongest(make)) for make, profile in [(first, gaussian_profile), *others]]
    loss = mu**2 / 2 + mu * np.linspace(-12, 12, 100_001)
    worst = np.max([second(limit - loss) for second in seconds], axis=0)
    assert 1e-6 < np.trapezoid(worst * norm.pdf(loss, mu**2 / 2, mu), loss) <= 1e-5


def test_a_run_planned_at_the_limit_is_admitted_as_the_only_release(odometer, meter):
    """It costs 4.377178 by itself, and 4.7 where another one may depend on it."""
    odometer.set_limit("adult", "record", epsilon=4.38, delta=1e-5)
    plan = [gaussians(100)]
    for count in (30, 100):
        meter().charge([gaussians(count)], noise="os_entropy", plan=plan)
    with pytest.raises(LimitReachedError, match="more than was planned"):
        meter().charge([gaussians(101)], noise="os_entropy", plan=[gaussians(101)])
    with pytest.raises(LimitReachedError, match=r"1 release cost.*limit is 4\.38"):
        meter("other").charge([gaussians(noise_multiplier=1e3)], noise="os_entropy")
    # Also where it stays counted at less: that may have been decided in view of what it released.
    meter().charge([gaussians(30)], noise="os_entropy", enforce=False)
    assert total(odometer).epsilon < 3 < total(odometer).epsilon_adaptive
    with pytest.raises(LimitReachedError, match="1 release cost"):
        meter("other").charge([gaussians(noise_multiplier=1e3)], noise="os_entropy")
    odometer.path.unlink()  # its receipt has the plan
    odometer.set_limit("adult", "record", epsilon=4.38, delta=1e-5)
    meter()
    with pytest.raises(LimitReachedError, match="1 release cost"):
        meter("other").charge([gaussians(noise_multiplier=1e3)], noise="os_entropy")


def test_the_plan_of_a_release_by_person_counts_in_the_sum_of_records(odometer, meter):
    """There it is priced for a record of a person, as its events are."""
    planned = of_unit(gaussians(100), "person")
    odometer.set_limit("adult", "person", epsilon=4.38, delta=1e-5)
    meter("person").charge([of_unit(gaussians(30), "person")], noise="os_entropy", plan=[planned])
    meter("record").charge([gaussians()], noise="os_entropy")
    meter("bank-person", "bank").charge([planned], noise="os_entropy")
    meter("bank-record", "bank").charge([gaussians()], noise="os_entropy")
    by_plan, by_events = (
        {row.unit: row for row in odometer.totals(delta=1e-5, data=each)} for each in ("adult", "bank")
    )
    assert by_plan["person"].epsilon_adaptive == by_events["person"].epsilon_adaptive < 4.38
    assert 4.38 < by_plan["record"].epsilon_adaptive == by_events["record"].epsilon_adaptive < math.inf
    assert meter("record").standing(delta=1e-5).epsilon_adaptive == by_plan["record"].epsilon_adaptive
    with pytest.raises(LimitReachedError, match="limit is 9"):
        odometer.set_limit("adult", "record", epsilon=9, delta=1e-5)
        meter("more").charge([gaussians()], noise="os_entropy")


def test_a_run_of_many_kinds_of_events_is_admitted_by_the_price_it_was_planned_at(odometer, meter):
    events = [PoissonGaussians(count=100, noise_multiplier=1 + n / 10, sampling_rate=0.01) for n in range(9)]
    odometer.set_limit("adult", "record", epsilon=epsilon_pld(events, target_delta=1e-5) * (1 + 1e-9), delta=1e-5)
    meter().charge(events, noise="os_entropy")
    assert total(odometer).releases == 1


def test_a_delta_below_what_distributions_prove_has_the_total_of_curves_or_none(odometer, meter):
    meter("one").charge([gaussians()], noise="os_entropy")
    assert 0 < odometer.totals(delta=1e-30)[0].epsilon < math.inf
    meter("replaced", "bank").charge([dataclasses.replace(gaussians(), relation="replace one")], noise="os_entropy")
    assert odometer.totals(delta=1e-30, data="bank")[0].epsilon == math.inf


def test_what_is_out_beyond_a_plan_is_charged_too(odometer, meter):
    odometer.set_limit("adult", "record", epsilon=4.38, delta=1e-5)
    meter().charge([gaussians(30)], noise="os_entropy", plan=[gaussians(100)])
    meter().charge([gaussians(120)], noise="os_entropy", enforce=False)
    meter().charge([gaussians(40)], noise="os_entropy", enforce=False)
    (found,) = odometer.totals(delta=1e-5)
    assert found.epsilon_adaptive == pytest.approx(epsilon_pld([gaussians(120)], target_delta=1e-5))


def test_a_run_is_admitted_by_its_plan_at_its_start_or_never(odometer, meter):
    odometer.set_limit("adult", "record", epsilon=4.38, delta=1e-5)
    with pytest.raises(LimitReachedError, match=r"0 releases.*it would be 4\.[34]\d*, and the limit is 4\.38"):
        meter().charge([gaussians(1)], noise="os_entropy", plan=[gaussians(102)])
    meter().charge([gaussians(30)], noise="os_entropy")
    with pytest.raises(LimitReachedError, match="0 releases"):
        meter().charge([gaussians(100)], noise="os_entropy", plan=[gaussians(100)])
    meter("other").charge([gaussians(30)], noise="os_entropy")


def test_a_run_whose_plan_has_room_beside_others_is_charged_what_it_released(odometer, meter):
    odometer.set_limit("adult", "record", epsilon=4.9, delta=1e-5)
    meter().charge([gaussians(30)], noise="os_entropy", plan=[gaussians(100)])
    meter("other").charge([gaussians(60)], noise="os_entropy")


def test_a_release_that_no_limit_can_count_is_refused_by_name_or_comes_alone(odometer, meter):
    replaced = dataclasses.replace(gaussians(), relation="replace one")
    for data in ("adult", "bank"):
        odometer.set_limit(data, "record", epsilon=3, delta=1e-5)
        meter(f"{data}-1", data).charge([replaced], noise="os_entropy")
        with pytest.raises(LimitReachedError, match=r"Renyi divergences .* unknown for PoissonGaussians"):
            meter(f"{data}-2", data).charge([replaced], noise="os_entropy")
        assert total(odometer, data).epsilon_adaptive < 3


def test_the_limit_of_an_older_odometer_counts_on_the_safe_side(odometer, meter):
    """As it had no plans, what is released already leaves later releases what the limit's order leaves."""
    for data, count in [("adult", 100), ("bank", 50)]:
        meter(data, data).charge([gaussians(count)], noise="os_entropy")
        odometer.set_limit(data, "record", epsilon=4.38, delta=1e-5)
    with closing(sqlite3.connect(odometer.path)) as database, database:
        database.execute("DROP TABLE plans")
    database.close()
    meter("adult").charge([gaussians(100)], noise="os_entropy")  # repeated
    for name in ("adult", "other"):
        with pytest.raises(LimitReachedError, match=r"limit is 4\.38"):
            meter(name).charge([gaussians(101)], noise="os_entropy")
    meter("more", "bank").charge([gaussians(30)], noise="os_entropy")


def test_releases_by_person_count_in_the_sum_and_limit_of_records(odometer, meter):
    by_person = of_unit(gaussians(50), "person")
    meter("record").charge([gaussians(50)], noise="os_entropy")
    meter("person").charge([by_person], noise="os_entropy")
    meter("seeded").charge([by_person], noise="seeded: not private")
    totals = {row.unit: row for row in odometer.totals(delta=1e-5)}
    assert {unit: (row.releases, row.not_private) for unit, row in totals.items()} == {
        "person": (1, 1),
        "record": (2, 0),
    }
    # A record less turns its person's part around, by twice the bound.
    turned = [gaussians(50), gaussians(50, noise_multiplier=5.0)]
    assert totals["person"].epsilon < epsilon_pld(turned, target_delta=1e-5) <= totals["record"].epsilon
    assert meter("person").standing(delta=1e-5).earlier == 0
    meter("last").charge([gaussians(1)], noise="os_entropy")
    assert meter("last").standing(delta=1e-5).earlier == 2
    odometer.set_limit("adult", "record", epsilon=9, delta=1e-5)
    with pytest.raises(LimitReachedError, match=r"adult, unit record: 3 releases cost epsilon 8\..*limit is 9"):
        meter("more").charge([by_person], noise="os_entropy")
    odometer.set_limit("bank", "record", epsilon=9, delta=1e-5)
    meter("alone", "bank").charge([by_person], noise="os_entropy")
    assert [(row.unit, row.epsilon_limit) for row in odometer.totals(delta=1e-5, data="bank")] == [
        ("person", None),
        ("record", 9),
    ]


def test_a_limit_of_the_attribute_counts_releases_by_record_and_by_person(odometer, meter):
    odometer.set_limit("adult", "sensitive attribute", epsilon=2.0, delta=1e-5)
    meter("record").charge([gaussians(5)], noise="os_entropy")
    (total,) = (row for row in odometer.totals(delta=1e-5) if row.unit == "sensitive attribute")
    # A changed attribute is a record replaced: at least twice the sensitivity, or four times as many releases.
    assert (total.releases, total.relation) == (1, "replace one")
    assert renyi_epsilon(5 * 4 / 200) <= total.epsilon <= 1.2 * renyi_epsilon(5 * 4 / 200)
    with pytest.raises(LimitReachedError, match="sensitive attribute: 1 release"):
        meter("person").charge([of_unit(gaussians(20), "person")], noise="os_entropy")
    with pytest.raises(LimitReachedError, match="sensitive attribute: 1 release"):
        meter("attribute").charge([PureReleases(count=1, epsilon=1.5)], noise="os_entropy")
    meter("small").charge([PureReleases(count=1, epsilon=0.1)], noise="os_entropy")


def test_a_limit_of_persons_does_not_hold_records_back(odometer, meter):
    odometer.set_limit("adult", "person", epsilon=1, delta=1e-5)
    meter("record").charge([gaussians(50)], noise="os_entropy")
    with pytest.raises(LimitReachedError, match=r"adult, unit person: 0 releases.*limit is 1"):
        meter("person").charge([of_unit(gaussians(50), "person")], noise="os_entropy")


def test_a_cell_that_another_machine_released_beyond_the_limit_fails_and_is_counted(odometer, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(odometer.path.parent))
    odometer.set_limit("adult", "record", epsilon=0.1, delta=1e-5)
    elsewhere = ReleaseLog(run_at(tmp_path / "cell"), Odometer(tmp_path / "elsewhere"), data="adult", method="dp_sgd")
    with pytest.raises(LimitReachedError, match=r"limit is 0\.1"):
        count_cell(elsewhere.charge_of([gaussians()], noise="os_entropy"))
    assert total(odometer).releases == 1


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (math.inf, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1)])
def test_a_limit_is_a_number_that_can_be_reached(odometer, epsilon, delta):
    with pytest.raises(ValueError, match="expected 0 < epsilon"):
        odometer.set_limit("adult", "record", epsilon=epsilon, delta=delta)


def test_a_release_knows_how_many_came_before_it_also_when_more_came_since(meter):
    first, second = meter("first"), meter("second")
    first.charge([gaussians(50)], noise="os_entropy")
    second.charge([gaussians(50)], noise="os_entropy")
    assert first.standing(delta=1e-5).earlier == 0
    assert second.standing(delta=1e-5).earlier == 1
    assert first.standing(delta=1e-5).epsilon < 4.377178 <= second.standing(delta=1e-5).epsilon
    meter("seeded").charge([gaussians()], noise="seeded: not private")
    assert meter("seeded").standing(delta=1e-5) is None


def test_many_processes_may_count_at_once(odometer, meter):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: meter(f"run-{n}").charge([gaussians()], noise="os_entropy"), range(40)))
    assert total(odometer).releases == 40


def test_the_file_is_the_operator_s_alone(odometer, meter):
    meter().charge([gaussians()], noise="os_entropy")
    assert stat.S_IMODE(odometer.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(odometer.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["overwritten", "unknown event", "no folder"])
def test_an_odometer_that_cannot_be_read_refuses_a_release(odometer, meter, damage):
    meter().charge([gaussians()], noise="os_entropy")
    if damage == "overwritten":
        odometer.path.write_bytes(b"nonsense" * 1000)
    elif damage == "no folder":
        shutil.rmtree(odometer.path.parent)
        odometer.path.parent.write_text("a file")
    else:
        with closing(sqlite3.connect(odometer.path)) as database, database:
            database.execute("UPDATE releases SET events = replace(events, 'PoissonGaussians', 'Magic')")
        database.close()
    with pytest.raises(OdometerError, match=r"odometer\.sqlite: cannot be read.*FAIRPATE_STATE.*copy"):
        meter("other").charge([gaussians()], noise="os_entropy")


EVENTS = [
    gaussians(),
    dataclasses.replace(gaussians(), relation="replace one"),
    ConfidentGnmaxQueries(count=3, threshold=-math.inf, threshold_stddev_votes=2, noise_stddev_votes=5),
    AttributeQueries(count=3, threshold=3, threshold_stddev_votes=2, noise_stddev_votes=5),
    SmoothRelease(order=3.0, beta=0.05, noise_stddev=5.0, scale_noise_stddev=5.0),
    PureReleases(count=1, epsilon=2.0),
    LaplaceReleases(count=2, epsilon=0.5),
    AttributeGaussians(count=2, attribute_noise_multiplier=3.0),
    PoissonGaussianLaplaces(count=5, gradient_noise_multiplier=1.0, laplace_scale=2.0, sampling_rate=0.1),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_back(event):
    values = json.loads(json.dumps(event_json(event), allow_nan=False))
    assert event_from(values) == event
    with pytest.raises(ValueError, match="unknown event"):
        event_from({name: value for name, value in values.items() if name != "kind"})


def test_an_event_that_holds_votes_is_not_stored():
    votes = ConfidentGnmaxVotes(
        votes_QC=np.array([[3, 1]]), threshold=3, threshold_stddev_votes=2, noise_stddev_votes=5
    )
    with pytest.raises(ValueError, match="depends on private votes"):
        event_json(votes)


def opened(meter, run, terms=TERMS):
    ledger = Ledger(run.ledger, terms)
    LedgerMeter(meter(), terms).settle(ledger)
    return ledger


def submit(ledger, count):
    first = len(ledger.keys)
    votes = np.tile([[40, 15, 5]], (count, 1))
    ledger.reserve([f"key{number}" for number in range(first, first + count)], [0] * count, votes)


def held(odometer, data="adult"):
    """The count of queries in the one row of a data set."""
    (row,) = odometer.charges(data).values()
    return row.events[0].count


def test_a_ledger_holds_room_before_it_charges_and_a_crash_counts_too_many(odometer, meter, tmp_path):
    run = run_at(tmp_path / "run")
    with opened(meter, run) as ledger:
        assert odometer.totals(delta=1e-5) == []
        order = []
        hold, append = ledger.hold, ledger._append
        ledger.hold = lambda *numbers: (order.append("odometer"), hold(*numbers))
        ledger._append = lambda *entry: (order.append("ledger"), append(*entry))
        submit(ledger, 10)
        assert order == ["odometer", "ledger"]
        assert held(odometer) == 10 + 255
        submit(ledger, 255)  # within what is held
        assert held(odometer) == 265
        submit(ledger, 700)
        assert held(odometer) == 1000  # no more than the budget admits
    with opened(meter, run) as ledger:  # as after a crash
        assert held(odometer) == len(ledger.keys) == 965


def test_where_labels_decide_how_many_are_posed_the_plan_is_counted(odometer, meter, tmp_path):
    run = run_at(tmp_path / "run")
    for submitted, counted in [(30, 200), (400, 430)]:  # the second time as a service: more than was planned
        with Ledger(run.ledger, TERMS) as ledger:
            ledger_meter = LedgerMeter(meter(), TERMS, planned=200)
            ledger_meter.settle(ledger)
            submit(ledger, submitted)
            ledger_meter.settle(ledger)
            assert held(odometer) == counted


def test_a_ledger_of_an_older_version_is_counted_as_it_is(odometer, meter, tmp_path):
    run = run_at(tmp_path / "run")
    with Ledger(run.ledger, TERMS) as ledger:
        submit(ledger, 30)
    opened(meter, run).close()
    assert held(odometer) == 30


def test_a_ledger_that_holds_less_than_was_counted_is_an_older_copy(meter, tmp_path):
    run = run_at(tmp_path / "run")
    with opened(meter, run) as ledger:
        submit(ledger, 10)
    opened(meter, run).close()
    copy = {file: file.read_bytes() for file in run.private.glob("ledger.*")}
    with opened(meter, run) as ledger:
        submit(ledger, 10)
    opened(meter, run).close()
    for file, content in copy.items():
        file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match="lacks 10 of 20 queries that were charged"):
        opened(meter, run)


def test_an_older_copy_is_known_by_what_a_service_wrote_before_it_was_killed(odometer, meter, tmp_path):
    run = run_at(tmp_path / "run")
    with opened(meter, run) as ledger:
        submit(ledger, 10)
    opened(meter, run).close()
    copy = {file: file.read_bytes() for file in run.private.glob("ledger.*")}
    with opened(meter, run) as ledger:  # never settled
        for _ in range(9):
            submit(ledger, 100)
    before = held(odometer)
    for file, content in copy.items():
        file.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"lacks \d+ of \d+ queries that were charged"):
        opened(meter, run)
    assert held(odometer) == before >= 910


def test_a_ledger_stops_at_the_limit_of_its_data_set(odometer, meter, tmp_path):
    """What is held ahead does not count against the limit where the queries themselves fit."""
    run = run_at(tmp_path / "run")
    meter("earlier").charge(
        [ConfidentGnmaxQueries(count=100, **dataclasses.asdict(TERMS.mechanism))], noise="os_entropy"
    )
    meter("reference", "bank").charge(
        [ConfidentGnmaxQueries(count=150, **dataclasses.asdict(TERMS.mechanism))], noise="os_entropy"
    )
    # Two releases of 75 queries have the curve of one of 150.
    odometer.set_limit("adult", "record", epsilon=1.0001 * total(odometer, "bank").epsilon, delta=1e-5)
    with opened(meter, run) as ledger:
        submit(ledger, 50)
        with pytest.raises(LedgerError, match=r"adult, unit record.*limit"):
            submit(ledger, 1)
        assert len(ledger.keys) == 50
        ledger.check()  # it may still be read, and written where a limit is raised
        odometer.set_limit("adult", "record", epsilon=10, delta=1e-5)
        submit(ledger, 1)


def queries(count):
    return ConfidentGnmaxQueries(count=count, **dataclasses.asdict(TERMS.mechanism))


def _submit_and_die(meter, run):
    with Ledger(run.ledger, TERMS) as ledger:
        LedgerMeter(meter(), TERMS, plan=[queries(150)]).settle(ledger)
        submit(ledger, 50)
        ledger._append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        submit(ledger, 50)


def test_a_run_killed_between_odometer_and_ledger_goes_on_within_its_plan_and_no_other_follows(
    odometer, meter, tmp_path
):
    meter("reference", "bank").charge([queries(150)], noise="os_entropy")
    odometer.set_limit("adult", "record", epsilon=total(odometer, "bank").epsilon, delta=1e-5)
    run = run_at(tmp_path / "run")
    process = multiprocessing.get_context("fork").Process(target=_submit_and_die, args=(meter, run), daemon=True)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(LimitReachedError, match="1 release cost"):
        meter("other").charge([queries(1)], noise="os_entropy")
    with Ledger(run.ledger, TERMS) as ledger:
        LedgerMeter(meter(), TERMS).settle(ledger)  # as of a service
        assert held(odometer) == len(ledger.keys) == 50
        with pytest.raises(LimitReachedError, match="1 release cost"):
            meter("other").charge([queries(1)], noise="os_entropy")
        submit(ledger, 100)
        with pytest.raises(LedgerError, match="more than was planned"):
            submit(ledger, 1)
        assert len(ledger.keys) == 150


def test_the_folder_of_an_odometer_follows_the_environment_and_forgets_no_release(tmp_path, monkeypatch):
    monkeypatch.delenv("FAIRPATE_STATE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    usual, chosen = tmp_path / ".local/state/fairpate", tmp_path / "xdg/fairpate"
    assert state_folder() == chosen
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder() == usual
    monkeypatch.delenv("XDG_STATE_HOME")
    assert Odometer().path == usual / "odometer.sqlite"
    Odometer().set_limit("adult", "record", epsilon=1.0, delta=1e-5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder() == usual  # where limits and releases are
    chosen.mkdir(parents=True)
    (chosen / "odometer.sqlite").touch()
    with pytest.raises(OdometerError, match="Two odometers"):
        state_folder()
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "own"))
    assert state_folder() == tmp_path / "own"
