"""Forms about a published run: every filled line follows from the fields that it names, and the file may be signed."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from small_runs import copied, read_json

from fairpate.pages import least_wrong, most_detected
from fairpate.releases.directory import RunDirectory, RunDirectoryError
from fairpate.run.dossier import FORMS, DossierError, dossier_lines, dossier_values, make_dossier, verify_dossier
from fairpate.sites.plan import key_text, new_key

pytestmark = pytest.mark.usefixtures("light_runs")

ENUMERATED = ("deployment.basic.data_product_type", "deployment.dp_variant.variant_name")
OTHER = {
    "unit": "household",
    "relation": "replace one",
    "noise": "seeded: not private",
    "accounting": "rdp",
    "metrics": "private",
    "delta": 0.3,
    "events": [{"kind": "PoissonGaussians", "noun": "Gaussian sum", "count": 3, "noise_multiplier": 2.0}],
    "part_events": {"test": [{"kind": "PureReleases", "noun": "release of counts", "count": 1, "epsilon": 0.5}]},
    "dp_one_vs_rest": {"value": 0.987, "where": "elsewhere"},
    "headline": "An attack proves ε ≥ 0.41.",
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    from small_runs import QUIET

    from fairpate.methods.base import configured
    from fairpate.run.publication import write_card
    from fairpate.run.run import run_method

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(tmp_path_factory.mktemp("state")))
        out = tmp_path_factory.mktemp("dossier") / "run"
        few = ("student.model.name=logistic", "student.fit.epochs=3")
        settings = ["data.name=loans", "target.epsilon=1", *few, f"out={out}"]
        run = run_method(configured({}, settings, method="weighted_votes"), QUIET)
        write_card(run.root, intended_use="Loans | of a test")
    return run


@pytest.fixture
def run(published: RunDirectory, tmp_path: Path) -> RunDirectory:
    found: RunDirectory = copied(published, tmp_path / "run")
    return found


def other(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 0.5 + 0.1
    return [*value, "more"] if isinstance(value, list) else f"{value} or another"


def lines_of(values: Any, form: Any) -> dict[str, Any]:
    return {line.place: line for line in dossier_lines(form, values)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("audited", [False, True])
def test_every_filled_line_follows_from_each_field_that_it_names(form: str, audited: bool, run: RunDirectory) -> None:
    if audited:
        audit = {"headline": "No attack proves more than ε ≥ 0.62.", "has_power": True, "records": "made"}
        (run.public / "audit.json").write_text(json.dumps(audit))
    _, facts = dossier_values(run.root)
    lines = lines_of(facts, form)
    filled = [line for line in lines.values() if line.kind == "filled"]
    assert filled
    assert any("audit.json:headline" in line.read_from for line in filled) == (audited and form != "registry")
    for line in filled:
        assert line.read_from
        for field in line.read_from:
            name, _, path = field.partition(":")
            changed = copy.deepcopy(facts)
            *sections, last = path.split(".")
            at = changed[name]
            for section in sections:
                at = at[section]
            assert last in at, f"{line.place}: no {field}"
            at[last] = other(last, at[last])
            now = lines_of(changed, form)[line.place]
            assert now.value != line.value or line.place in ENUMERATED, f"{line.place}: not of {field}"
    for line in lines.values():
        assert (line.value is None) == (line.kind != "filled")
        assert not line.read_from or line.kind == "filled"


def test_the_command_writes_counts_and_texts_of_all_three(run: RunDirectory, fairpate: Any) -> None:
    for form in FORMS:
        code, said, errors = fairpate("dossier", run.root, "--for", form)
        assert code == 0, errors
        made = read_json(run.root / f"dossier-{form}.json")
        kinds = [line["kind"] for line in made["lines"]]
        assert made["counts"] == {kind: kinds.count(kind) for kind in ("filled", "operator", "open")}
        assert f"{kinds.count('filled')} lines filled in" in said
    code, _, errors = fairpate("dossier", run.root, "--for", "press")
    assert (code, "give one of registry, nist, egress" in errors) == (2, True)
    entry = yaml.safe_load((run.root / "dossier-registry.yaml").read_text(encoding="utf-8"))
    statement = read_json(run.statement)
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": statement["epsilon"], "delta": statement["delta"]}
    assert loss["privacy_unit"] == "person"
    assert entry["deployment"]["basic"]["data_product_type"] == "Machine learning model"
    page = (run.root / "dossier-egress.md").read_text(encoding="utf-8")
    assert "| Loans \\| of a test |" in page


def test_a_signature_holds_for_its_key_and_its_content_alone(run: RunDirectory, tmp_path: Path, fairpate: Any) -> None:
    public = {name: new_key(tmp_path / name).public for name in ("mine", "other")}
    keys = {name: key_text(each) for name, each in public.items()}
    code, _, errors = fairpate("dossier", run.root, "--for", "egress", "--key", tmp_path / "mine")
    assert code == 0, errors
    file = run.root / "dossier-egress.json"
    assert verify_dossier(file, signed=public["mine"].signed)["files"]["statement.json"]
    code, said, _ = fairpate("verify", file, "--key", keys["mine"])
    assert (code, "signed by this key: egress" in said) == (0, True)
    for key, words in ((keys["other"], "not signed by this key"), ("12", "error --key: expected the text")):
        code, _, errors = fairpate("verify", file, "--key", key)
        assert (code > 0, words in errors) == (True, True)
    code, _, errors = fairpate("verify", file)
    assert (code, "--key" in errors) == (2, True)
    plain = read_json(file)
    plain["lines"][0]["value"] = "another model"
    file.write_text(json.dumps(plain))
    with pytest.raises(DossierError, match="changed after signing"):
        verify_dossier(file, signed=public["mine"].signed)
    make_dossier(run.root, "egress")
    with pytest.raises(DossierError, match="not signed"):
        verify_dossier(file, signed=public["mine"].signed)
    file.write_text("{}")
    with pytest.raises(DossierError, match="not a dossier"):
        verify_dossier(file, signed=public["mine"].signed)


def test_what_may_not_be_published_has_no_dossier(run: RunDirectory) -> None:
    statement = read_json(run.statement)
    run.statement.write_text(json.dumps(statement | {"noise": "seeded: not private"}))
    with pytest.raises(RunDirectoryError, match="not private"):
        make_dossier(run.root, "nist")
    assert not (run.root / "dossier-nist.json").exists()


def test_membership_is_not_bounded_where_a_unit_is_replaced(run: RunDirectory) -> None:
    _, facts = dossier_values(run.root)
    added = lines_of(facts, "egress")
    facts["statement.json"]["relation"] = "replace one"
    replaced = lines_of(facts, "egress")
    place = "membership inference: largest advantage"
    assert (added[place].kind, replaced[place].kind) == ("filled", "open")
    # Between two contents a record is removed and another one added: twice the epsilon.
    content = "attribute inference: most often right between two contents of a unit"
    assert added[content].value == "88.1 %".replace(" ", added[content].value[4])
    assert replaced[content].value.startswith("73.2")  # 1 / (1 + e^-1) = .73106, a bound: rounded up


def test_the_trade_off_is_reached_by_randomised_response_and_never_exceeded() -> None:
    """All tests of two laws on four outcomes that are (epsilon, delta)-close, by enumeration."""
    for epsilon, delta in ((0.0, 0.0), (0.5, 0.01), (2.0, 1e-5)):
        p = math.exp(epsilon) / (1 + math.exp(epsilon))
        # Leaks with probability delta, else answers truly with odds e^epsilon to one.
        member = np.array([delta, (1 - delta) * p, (1 - delta) * (1 - p), 0.0])
        absent = np.array([0.0, (1 - delta) * (1 - p), (1 - delta) * p, delta])
        reached = 0.0
        for chosen in range(16):
            tests = np.array([bool(chosen & 1 << k) for k in range(4)])
            found, alarms = member[tests].sum(), absent[tests].sum()
            assert found <= most_detected(float(alarms), epsilon, delta) + 1e-12
            reached = max(reached, found - alarms)
        assert reached == pytest.approx(1 - 2 * least_wrong(epsilon, delta))
        # At the corner, it is no bound but what this mechanism does.
        assert most_detected(float(absent[1]), epsilon, delta) == pytest.approx(member[:2].sum())
    assert most_detected(0.1, 1000.0, 0.0) == 1.0
    assert most_detected(0.0, 1.0, 0.01) == 0.01


def test_a_bound_is_printed_as_in_the_report_and_never_below_it(run: RunDirectory) -> None:
    """e / (1 + e) = .73106, which the report, the card and every dossier print as 73.2 %."""
    _, values = dossier_values(run.root)
    values = {name: dict(each) for name, each in values.items()}
    values["statement.json"] |= {"epsilon": 1.0, "delta": 1e-7, "relation": "add or remove one"}
    words = {line.place: str(line.value) for form in FORMS for line in dossier_lines(form, values)}
    assert "73.2" in words["2.2 an epsilon that says nothing"]
    found = [line for place, line in words.items() if place.startswith("membership inference")]
    # (e - 1) / (e + 1) = .46212; e / 1000 + 1e-7; e / 100 + 1e-7; e / 10 + 1e-7.
    assert [each.split("\u00a0")[0].split()[0] for each in found] == ["0.4622", "0.3", "2.8", "27.2"]
    assert words["2.3 a delta that allows one unit to be published"].startswith("δ = 10⁻⁷: below 1 / n for n up to ")
