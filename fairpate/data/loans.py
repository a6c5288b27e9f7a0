"""The embedded table: applications for loans by invented customers, made from a fixed seed.

The columns mean what `codebooks/loans.yaml` declares. Older customers earn and save more, hold permanent work or a
pension, and own their homes; students and temporary workers are mostly young. Whether a loan is repaid on time depends
on these, on the instalment's share of the income, on earlier late payments, on a habit of the customer that no column
shows, and on chance; never on the age group itself. What a model predicts differs between age groups all the same.

Only uniform numbers are drawn, whose stream numpy keeps from version to version.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fairpate.types import IntArray

_SEED, _CUSTOMERS = 20261125, 20_000
_AGES = ("under 30", "30 to 64", "65 and over")
_AGE_SHARES = (0.22, 0.70, 0.08)
_APPLICATIONS = (0.50, 0.30, 0.13, 0.07)  # the share of customers who apply once, twice and so on

# For each value: shares by age group, or one row for all; and what the value adds to the score.
_WORK = ("permanent", "temporary", "self-employed", "retired", "student")
_WORK_SHARES = ((0.50, 0.28, 0.06, 0.00, 0.16), (0.68, 0.14, 0.15, 0.01, 0.02), (0.10, 0.04, 0.06, 0.80, 0.00))
_WORK_SCORE = np.array((0.5, -0.4, -0.1, 0.4, -0.5))
_WORK_INCOME = np.array((3000, 2200, 2800, 1900, 1100))
_SAVINGS = ("none", "some", "ample")
_SAVINGS_SHARES = ((0.45, 0.40, 0.15), (0.33, 0.42, 0.25), (0.15, 0.40, 0.45))
_SAVINGS_SCORE = np.array((-0.8, 0.2, 1.0))
_HOUSING = ("own", "rent", "family")
_HOUSING_SHARES = ((0.06, 0.54, 0.40), (0.45, 0.51, 0.04), (0.62, 0.36, 0.02))
_HOUSING_SCORE = np.array((0.4, 0.0, 0.1))
_MOST_YEARS = np.array((8, 30, 40))
_MONTHS = (12, 24, 36, 48, 60)
_PURPOSES = ("car", "household", "training", "other")

_LATE_COST, _YEAR_GAIN, _INCOME_GAIN, _BURDEN_COST, _HABIT = 0.9, 0.03, 1.1, 3.0, 0.6
_NEEDED, _CHANCE = -0.45, 0.6

Floats = npt.NDArray[np.float64]


def _chosen(uniform_N: Floats, shares: tuple[tuple[float, ...], ...], row_N: IntArray) -> IntArray:
    """Return the index of the part of [0, 1) that each uniform number falls in, as its row of shares divides it."""
    ends_NK = np.cumsum(np.array(shares), axis=1)[row_N, :-1]
    found_N: IntArray = (uniform_N[:, None] >= ends_NK).sum(axis=1)
    return found_N


def _bell(uniform_N3: Floats) -> Floats:
    """Numbers of mean 0 and variance 1, nearly normal, from three uniform ones each."""
    sums_N: Floats = uniform_N3.sum(axis=1)
    return 2 * (sums_N - 1.5)


def applications() -> pa.Table:
    """Every application as the columns of a file: text, in the order of customers."""
    # The order of draws is part of the table: another order makes other records under the same name.
    generator = np.random.default_rng(_SEED)
    of_all = np.zeros(_CUSTOMERS, dtype=np.int64)
    uniform = generator.random((_CUSTOMERS, 12))
    age = _chosen(uniform[:, 0], (_AGE_SHARES,), of_all)
    work = _chosen(uniform[:, 1], _WORK_SHARES, age)
    savings = _chosen(uniform[:, 2], _SAVINGS_SHARES, age)
    housing = _chosen(uniform[:, 3], _HOUSING_SHARES, age)
    years = np.where(work < 3, uniform[:, 4] ** 2 * _MOST_YEARS[age], 0).astype(np.int64)
    earns, habit = _bell(uniform[:, 5:8]), _bell(uniform[:, 8:11])
    times = 1 + _chosen(uniform[:, 11], (_APPLICATIONS,), of_all)

    customer = np.repeat(np.arange(_CUSTOMERS), times)
    earlier = np.arange(len(customer)) - np.repeat(np.cumsum(times) - times, times)
    drawn = generator.random((len(customer), 8))
    income = np.round(_WORK_INCOME[work] * np.exp(0.35 * earns), -1)[customer]
    months = np.array(_MONTHS)[(drawn[:, 0] * len(_MONTHS)).astype(np.int64)]
    amount = np.round(1000 * np.exp(3 * drawn[:, 1] * np.sqrt(months / _MONTHS[-1])), -2)
    purpose = (drawn[:, 2] * len(_PURPOSES)).astype(np.int64)
    late = np.clip(np.floor(1.2 * (_bell(drawn[:, 3:6]) - habit[customer])), 0, 6).astype(np.int64)
    score = (
        _WORK_SCORE[work][customer]
        + _SAVINGS_SCORE[savings][customer]
        + _HOUSING_SCORE[housing][customer]
        + _YEAR_GAIN * years[customer]
        + _INCOME_GAIN * np.log(income / 2300)
        - _BURDEN_COST * amount / months / income
        - _LATE_COST * late
        + _HABIT * habit[customer]
        + _CHANCE * np.log(drawn[:, 6] / (1 - drawn[:, 6]))
    )
    columns = {
        "application": np.char.add("a", np.char.zfill(np.arange(len(customer)).astype(str), 5)),
        "customer": np.char.add("c", np.char.zfill(customer.astype(str), 5)),
        "age_group": np.array(_AGES)[age][customer],
        "income": income.astype(np.int64).astype(str),
        "amount": amount.astype(np.int64).astype(str),
        "months": months.astype(str),
        "purpose": np.array(_PURPOSES)[purpose],
        "employment": np.array(_WORK)[work][customer],
        "years_employed": years[customer].astype(str),
        "savings": np.array(_SAVINGS)[savings][customer],
        "housing": np.array(_HOUSING)[housing][customer],
        "earlier_loans": earlier.astype(str),
        "late_payments": late.astype(str),
        "on_time": np.where(score > _NEEDED, "yes", "no"),
    }
    return pa.table(columns)
