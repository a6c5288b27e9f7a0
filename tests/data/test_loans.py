"""The embedded table of loans: what a demonstration of privacy and fairness needs of it, and that it never changes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fairpate.data import Dataset, entry_for, load_data
from fairpate.data.registry import applications

pytestmark = pytest.mark.usefixtures("few_replicates", "without_charts")


@pytest.fixture(scope="module")
def loans() -> Dataset:
    from fairpate.config import DataConfig

    return load_data(DataConfig(name="loans"))


def test_the_records_are_the_same_on_every_machine_and_as_many_as_declared() -> None:
    table, entry = applications(), entry_for("loans")
    assert (len(table), len(set(table["customer"].to_pylist()))) == (entry.rows, entry.persons)
    rows = "\n".join(",".join(row.values()) for row in table.to_pylist())
    assert (
        hashlib.sha256(rows.encode()).hexdigest() == "1440aeace5c8a5b809c3ccd691c7c89391f98342263aeda1ebf9adc55b9627e9"
    )


def test_a_customer_has_one_age_group_and_several_applications() -> None:
    table = applications().to_pydict()
    ages: dict[str, set[str]] = {}
    for customer, age in zip(table["customer"], table["age_group"], strict=True):
        ages.setdefault(customer, set()).add(age)
    assert all(len(found) == 1 for found in ages.values())
    assert len(table["customer"]) > 1.5 * len(ages)


def test_three_groups_of_a_share_that_can_be_measured_and_customers_in_one_split(loans: Dataset) -> None:
    for split in loans.splits.values():
        shares = np.bincount(split.z.numpy(), minlength=3) / len(split)
        assert len(shares) == 3
        assert shares.min() > 0.05
    persons = [set(split.person_id) for split in loans.splits.values() if split.person_id]
    assert loans.unit == "person"
    assert len(set().union(*persons)) == sum(map(len, persons))


def test_a_model_without_privacy_is_better_than_a_constant_and_has_a_gap(loans: Dataset) -> None:
    private, test = loans.private, loans.test
    model = LogisticRegression(max_iter=1000).fit(private.x.numpy(), private.y.numpy())
    predicted, true, groups = model.predict(test.x.numpy()), test.y.numpy(), test.z.numpy()
    rates = [predicted[groups == group].mean() for group in range(3)]
    assert max(rates) - min(rates) > 0.1
    assert (predicted == true).mean() > max(true.mean(), 1 - true.mean()) + 0.1
