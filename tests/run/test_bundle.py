"""A bundle holds what was published and nothing else, and its check refuses whatever does not fit."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from method_kinds import quick_and_slow
from small_runs import QUIET

from fairpate.data.dataset import sha256_of
from fairpate.methods.base import configured
from fairpate.privacy.second_accountant import recomputed_epsilon
from fairpate.releases.directory import RunDirectory, RunDirectoryError, read_statement
from fairpate.report.metrics import GAPS
from fairpate.report.model_card import CardData, IntendedUse, card_page
from fairpate.run.bundle import HEAD, BundleError, Unpacked, Verdict, head_of, verify_bundle, write_bundle
from fairpate.run.publication import card_of, card_values, write_card
from fairpate.run.run import run_method
from fairpate.types import heard_by

pytestmark = pytest.mark.usefixtures("light_runs")

SHOWN = "evaluation.least_cell=1"  # every table of counts
DP_SGD = {
    "student": {"model": {"name": "mlp", "hidden": [16]}},
    "dp_sgd": {"epochs": 1, "batch_size": 200},
    "target": {"epsilon": 2, "accounting": "rdp"},
    "data": {"embedding": {"num_components": 8}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, small_config: Any) -> dict[str, RunDirectory]:
    """A private training with a graph beside it, and a private run of teachers."""
    root = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAIRPATE_STATE", str(root / "state"))
        found = {
            "trained": run_method(configured(DP_SGD, [f"out={root / 'trained'}", SHOWN], method="dp_sgd"), QUIET),
            "asked": run_method(small_config(root / "asked", "noise=os_entropy", SHOWN), QUIET),
        }
    # Of a graph, which takes seconds to make, nothing is read but its checksums.
    run = found["trained"]
    run.graph.write_bytes(b"a graph")
    digests = {"sha256": sha256_of(run.graph), "student_sha256": sha256_of(run.student)}
    run.graph_description.write_text(json.dumps(digests))
    return found


@pytest.fixture(scope="module")
def bundles(runs: dict[str, RunDirectory]) -> dict[str, Path]:
    return {name: write_bundle(run.root)[0] for name, run in runs.items()}


@pytest.fixture
def unpacked(bundles: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    for name, path in bundles.items():
        zipfile.ZipFile(path).extractall(tmp_path / name)
    return {name: tmp_path / name for name in bundles}


def test_writing_tells_how_many_bytes_are_read(runs: dict[str, RunDirectory], tmp_path: Path) -> None:
    """Twice: for digests, and into the file."""
    told: list[tuple[int, int]] = []
    with heard_by(lambda *steps: told.append(steps)):
        write_bundle(runs["trained"].root, tmp_path / "bundle.zip")
    of_bytes = [steps for steps in told if steps[1] == told[-1][1]]
    assert of_bytes == sorted(of_bytes)
    assert of_bytes[-1][0] == of_bytes[-1][1]
    files = zipfile.ZipFile(tmp_path / "bundle.zip").infolist()
    assert of_bytes[-1][1] == 2 * sum(file.file_size for file in files if file.filename != HEAD)


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | changes))


def bind_again(folder: Path) -> None:
    """What somebody does who changes files and makes a consistent head for them."""
    names = [path.name for path in folder.iterdir() if path.name != HEAD]
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    head = head_of(read_statement(Unpacked(root=folder)), digests)
    (folder / HEAD).write_text(json.dumps(head))


def state(folder: Path, **changes: Any) -> None:
    """Another statement, and all that repeats it; card and head made for it."""
    edit(folder / "statement.json", **changes)
    edit(folder / "record.json", **{name: changes[name] for name in changes if name in ("epsilon", "delta", "unit")})
    if "events" in changes:
        (folder / "events.json").write_text(json.dumps(changes["events"]))
    bind_again(folder)


def event(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    return [json.loads((folder / "events.json").read_text())[0] | changes]


def refused(verdict: Verdict, *words: str) -> None:
    assert not verdict.holds
    assert verdict.words.startswith("refused")
    for word in words:
        assert any(word in line for line in verdict.differs), (word, verdict.differs)


@pytest.mark.parametrize("name", ["trained", "asked"])
def test_a_bundle_holds_as_a_file_and_as_a_folder(
    name: str, runs: dict[str, RunDirectory], bundles: dict[str, Path], unpacked: dict[str, Path]
) -> None:
    verdict = verify_bundle(bundles[name])
    statement = read_statement(runs[name])
    assert verdict.holds, verdict.differs
    assert (verdict.stated, verdict.delta, verdict.unit) == (statement.epsilon, statement.delta, "record")
    assert verdict.recomputed is not None
    assert statement.epsilon is not None
    assert 0.7 * statement.epsilon < verdict.recomputed < 1.001 * statement.epsilon
    assert verdict.words.startswith("holds: recomputed epsilon ")
    assert verify_bundle(unpacked[name]) == verdict


def test_equal_runs_give_equal_bytes_and_nothing_private_enters(
    runs: dict[str, RunDirectory], bundles: dict[str, Path], tmp_path: Path
) -> None:
    for name, run in runs.items():
        copy = Path(shutil.copytree(run.root, tmp_path / name))
        shutil.rmtree(copy / "private")
        (copy / "public" / "notes.txt").write_text("of the operator")
        path, digest = write_bundle(copy, tmp_path / f"{name}.zip")
        assert path.read_bytes() == bundles[name].read_bytes()
        with zipfile.ZipFile(path) as bundle:
            names = bundle.namelist()
            assert json.loads(bundle.read(HEAD))["digest"] == digest
            texts = [bundle.read(each) for each in names]
        assert names == sorted(names)
        assert "notes.txt" not in names
        assert ("labels.parquet" in names) == (name == "asked")
        assert {"embedding.safetensors", "model.onnx", "model.json"}.issubset(names) == (name == "trained")
        assert not any(str(run.root).encode() in text for text in texts)


def test_a_folder_for_a_hub_is_a_bundle_with_the_card_as_its_readme(
    runs: dict[str, RunDirectory], bundles: dict[str, Path], tmp_path: Path, fairpate: Any
) -> None:
    place = tmp_path / "hub" / "model"
    code, said, errors = fairpate("bundle", runs["trained"].root, "--hub", place, "--licence", "apache-2.0")
    assert code == 0, errors
    with zipfile.ZipFile(bundles["trained"]) as bundle:
        names = set(bundle.namelist())
        for name in names - {HEAD}:
            assert (place / name).read_bytes() == bundle.read(name), name
    assert {path.name for path in place.iterdir()} == names | {"README.md"}
    _, head, text = (place / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    values, metrics = yaml.safe_load(head), json.loads((place / "metrics.json").read_text())
    assert values["license"] == "apache-2.0"
    assert (values["library_name"], values["pipeline_tag"]) == ("fairpate", "tabular-classification")
    assert {"differential-privacy", "dp_sgd"} <= set(values["tags"])
    found = {each["type"]: each["value"] for each in values["model-index"][0]["results"][0]["metrics"]}
    assert found["accuracy"] == pytest.approx(metrics["accuracy"], abs=1e-6)
    assert found["dp_one_vs_rest"] == pytest.approx(metrics["gaps"]["dp_one_vs_rest"]["value"], abs=1e-6)
    card = json.loads((place / "card.json").read_text())
    assert card["meaning"] in text and all(limit.split("_")[0].split("#")[0][:40] in text for limit in card["limits"])
    # What the hub and its tools keep there is theirs; everything else is checked, the words of the readme too.
    (place / ".git").mkdir()
    (place / ".gitattributes").write_text("*.onnx filter=lfs")
    assert said.splitlines() == [str(place), verify_bundle(place).digest]
    assert verify_bundle(place).holds, verify_bundle(place).differs
    path, kept = place / "README.md", (place / "README.md").read_bytes()
    path.write_text(path.read_text(encoding="utf-8").replace("| ε | 2.00 |", "| ε | 0.10 |"), encoding="utf-8")
    assert path.read_bytes() != kept
    refused(verify_bundle(place), "README.md: not the file of head.json", "README.md is not the card")
    # Written again over a checkout, with fewer files than before; another folder of the user's is left alone.
    (place / "audit.html").write_text("of an earlier version")
    assert fairpate("bundle", runs["trained"].root, "--hub", place, "--licence", "apache-2.0")[0] == 0
    assert path.read_bytes() == kept and not (place / "audit.html").exists() and (place / ".git").is_dir()
    (place / "thesis.txt").write_text("mine")
    code, _, errors = fairpate("bundle", runs["trained"].root, "--hub", place)
    assert (code, "--hub: " in errors, "thesis.txt" in errors) == (2, True, True)
    assert fairpate("bundle", runs["trained"].root, "--hub", place, "--out", "model.zip")[0] == 2
    for wrong in (["--hub", tmp_path / "other", "--licence", "a: b"], ["--licence", "mit"]):
        code, _, errors = fairpate("bundle", runs["trained"].root, *wrong)
        assert (code, "--licence: " in errors) == (2, True), errors


def test_a_card_that_is_there_is_kept_and_one_of_another_statement_is_made_again(
    runs: dict[str, RunDirectory], tmp_path: Path
) -> None:
    run = replace(runs["trained"], root=Path(shutil.copytree(runs["trained"].root, tmp_path / "run")))
    write_card(run.root, intended_use="teaching", contact="me")
    before = run.card.read_bytes()
    assert verify_bundle(write_bundle(run.root)[0]).holds
    assert run.card.read_bytes() == before
    card = json.loads(before)
    run.card.write_text(json.dumps(card | {"privacy": card["privacy"] | {"epsilon": 0.1}}))
    assert verify_bundle(write_bundle(run.root)[0]).holds
    assert run.card.read_bytes() == before


def test_a_card_from_before_more_queries_is_made_again(runs: dict[str, RunDirectory], tmp_path: Path) -> None:
    run = replace(runs["asked"], root=Path(shutil.copytree(runs["asked"].root, tmp_path / "run")))
    write_card(run.root, contact="me")
    before = run.card.read_bytes()
    card = json.loads(before)
    fewer = card["privacy"] | {"events": ["1 query, as it was when the card was written"]}
    run.card.write_text(json.dumps(card | {"privacy": fewer}))
    assert verify_bundle(write_bundle(run.root)[0]).holds
    assert run.card.read_bytes() == before


def test_one_byte_of_any_file_is_noticed(unpacked: dict[str, Path]) -> None:
    folder = unpacked["asked"]
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        at = len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(verify_bundle(folder), path.name)
        path.unlink()
        if path.name == HEAD:
            with pytest.raises(Exception, match="not a bundle"):
                verify_bundle(folder)
        else:
            refused(verify_bundle(folder), f"{path.name}: missing")
        path.write_bytes(whole)
    (folder / "more.txt").write_text("more")
    refused(verify_bundle(folder), "more.txt: not in")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"delta": 1e-8}, "epsilon: recomputed"),
        ({"epsilon": 0.5}, "epsilon: recomputed"),
        ({"epsilon": None}, "nothing is guaranteed"),
        ({"unit": "person"}, "unit 'person'"),
        ({"relation": "replace one"}, "relation 'replace one'"),
        ({"noise": "seeded: not private"}, "is not private"),
        ({"events": []}, "no events"),
    ],
)
def test_a_statement_that_claims_too_much_is_refused_whatever_its_head(
    changes: dict[str, Any], word: str, unpacked: dict[str, Path]
) -> None:
    folder = unpacked["trained"]
    state(folder, **changes)
    refused(verify_bundle(folder), word, "card")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"count": 60}, "epsilon: recomputed"),
        ({"noise_multiplier": 0.5}, "epsilon: recomputed"),
        ({"sampling_rate": 0.9}, "epsilon: recomputed"),
        ({"noise_multiplier": "none"}, "could not convert"),
        ({"kind": "NoisySums"}, "not recomputed"),
        ({"kind": "VoteTables"}, "noise_stddev_votes"),
    ],
)
def test_events_that_cost_more_or_are_not_known_are_refused(
    changes: dict[str, Any], word: str, unpacked: dict[str, Path]
) -> None:
    folder = unpacked["trained"]
    state(folder, events=event(folder, **changes))
    refused(verify_bundle(folder), word)


def test_fewer_queries_than_were_submitted_and_more_labels_than_answers_are_noticed(unpacked: dict[str, Path]) -> None:
    folder = unpacked["asked"]
    statement = json.loads((folder / "statement.json").read_text())
    state(folder, events=event(folder, count=10))
    refused(verify_bundle(folder), f"10 queries priced, {statement['queries']['submitted']} submitted")
    state(folder, events=statement["events"], queries=statement["queries"] | {"answered": 3})
    refused(verify_bundle(folder), "3 answered")


def test_the_student_of_another_run_is_noticed(unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    shutil.copy(unpacked["asked"] / "student.safetensors", folder / "student.safetensors")
    bind_again(folder)
    refused(verify_bundle(folder), "not the student of card.json")


@pytest.mark.parametrize("described", ["sha256", "student_sha256"])
def test_a_graph_of_another_student_is_noticed(described: str, unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    assert verify_bundle(folder).holds
    edit(folder / "model.json", **{described: "0" * 64})
    bind_again(folder)
    refused(verify_bundle(folder), "model.onnx: not made of this student")


def test_a_page_or_a_record_that_says_something_else_is_noticed(unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    page = (folder / "card.html").read_text()
    (folder / "card.html").write_text(page.replace("2.00", "0.20"))
    bind_again(folder)
    refused(verify_bundle(folder), "card.html")
    (folder / "card.html").write_text(page)
    edit(folder / "record.json", epsilon=0.2)
    bind_again(folder)
    refused(verify_bundle(folder), "record.json: epsilon")


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all numbers in a JSON document, but the settings of a run."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name != "config":
                yield from numbers(item, (*path, name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from numbers(item, (*path, place))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of ``value`` with ``new`` at ``path``."""
    if not path:
        return new
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def card_again(folder: Path) -> None:
    """What somebody does who changes statement or metrics: the card and its page follow."""
    bundle = Unpacked(root=folder)
    given = json.loads((folder / "card.json").read_text())
    data = CardData(**given["data"])
    card = card_of(bundle, method=given["model"]["method"], data=data, use=IntendedUse(), made_on=None)
    (folder / "card.json").write_text(json.dumps(card_values(card)))
    (folder / "card.html").write_text(card_page(card))


# Of test records that are not in the bundle: nothing can confirm these, and `verify` says so.
UNCONFIRMED = {
    "statement.json": {"queries.rejected_confidence", "queries.rejected_fairness", "queries.refused_free"}
    | {"declared_units"},
    "metrics.json": {"num_records", "num_left_out", "num_persons", "num_persons_left_out", "least_cell"}
    | {"noise_stddev", "fair_at.limit"}
    | {f"gaps.{name}.{end}" for name in GAPS for end in ("low", "high", "level")},
    "record.json": set[str](),
}


@pytest.mark.parametrize("name", quick_and_slow(["asked", "trained"], [], ["asked"]))
def test_no_number_of_statement_metrics_or_record_can_be_changed_unnoticed(
    name: str, unpacked: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number but those on the list of what is not confirmed, one at a time, with card and head made again."""
    known: dict[str, float] = {}

    def priced_once(events: Any, *, delta: float) -> float:
        """Equal events cost the same: of most changed numbers they are those of the run."""
        key = json.dumps([events, delta])
        if key not in known:
            known[key] = recomputed_epsilon(events, delta=delta)
        return known[key]

    monkeypatch.setattr("fairpate.run.bundle.recomputed_epsilon", priced_once)
    folder = unpacked[name]
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for file, unconfirmed in UNCONFIRMED.items():
        plain = json.loads(whole[file])
        leaves = list(numbers(plain))
        # Of a matrix or a list, which share one name, one cell stands for all.
        for path in {tuple(each for each in leaf if isinstance(each, str)): leaf for leaf in leaves}.values():
            leaf = functools.reduce(lambda value, step: value[step], path, plain)
            said = ".".join(each for each in path if isinstance(each, str))
            if said in unconfirmed:
                continue
            new = leaf + 1 if isinstance(leaf, int) else leaf * 0.7 + 0.01
            (folder / file).write_text(json.dumps(changed(plain, path, new)))
            with contextlib.suppress(Exception):  # some changes leave no card to be made
                card_again(folder)
            bind_again(folder)
            assert not verify_bundle(folder).holds, (file, said)
            for each, content in whole.items():
                (folder / each).write_bytes(content)


def test_an_epsilon_that_nothing_recomputes_is_refused_whatever_card_and_head_say(unpacked: dict[str, Path]) -> None:
    folder = unpacked["asked"]
    plain = (folder / "statement.json").read_text()
    for changes, word in [
        ({"epsilon_as_in_paper": 0.5}, "epsilon_as_in_paper is 0.5, which no run states"),
        ({"epsilon_with_earlier": 3.0}, "epsilon_with_earlier is 3.0 without an earlier release"),
        ({"earlier_releases": 1, "epsilon_with_earlier": 0.001}, "epsilon_with_earlier is below the"),
        ({"not_protected": "features"}, "not_protected is 'features' for 'record'"),
        (
            {"queries": json.loads(plain)["queries"] | {"epsilon_submitted": 0.01}},
            "epsilon_submitted 0.0100, recomputed",
        ),
        ({"queries": json.loads(plain)["queries"] | {"epsilon_submitted": 99.0}}, "is above the stated epsilon"),
    ]:
        (folder / "statement.json").write_text(plain)
        edit(folder / "statement.json", **changes)
        card_again(folder)
        bind_again(folder)
        refused(verify_bundle(folder), word)


def test_the_numbers_of_a_reject_option_follow_from_its_orders(unpacked: dict[str, Path]) -> None:
    folder = unpacked["asked"]
    order = {
        "accuracy": 0.5,
        "coverage": 0.9,
        "coverage_G": [0.9, 0.9],
        "final_gap": 0.1,
        "max_gap": 0.2,
        "max_gap_from": 9,
    }
    rule = {"max_disparity": 0.1, "min_count": 1, "cold_start": "group", "gap": "one_vs_rest"}
    spread = {"mean": 0.5, "low": 0.5, "high": 0.5, "n_undefined": 0}
    rest = {
        name: {**spread, **dict.fromkeys(("mean", "low", "high"), order[name])}
        for name in ("coverage", "final_gap", "max_gap")
    }
    orders = {
        "rule": rule,
        "num_records": 9,
        "orders": [order],
        "accuracy": spread,
        **rest,
        "coverage_G": [rest["coverage"]] * 2,
    }
    for accuracy, holds in ((spread, True), (spread | {"low": 0.4}, False)):
        edit(folder / "metrics.json", orders=orders | {"accuracy": accuracy})
        card_again(folder)
        bind_again(folder)
        assert any("not what its orders give (accuracy)" in line for line in verify_bundle(folder).differs) != holds


def test_what_nothing_confirms_is_named(unpacked: dict[str, Path]) -> None:
    found = {name: " ".join(verify_bundle(folder).not_checked) for name, folder in unpacked.items()}
    assert "statement.json: 1 remark, which are words" in found["trained"]
    assert "model.onnx: whether its graph computes what the student does" in found["trained"]
    assert "queries: how many were refused by which step" in found["asked"]
    assert "statement.json: declared_units, the operator's word" in found["asked"]
    assert all("record.json: its settings" in words and "metrics.json: outside" in words for words in found.values())


def test_sums_with_releases_that_are_not_in_the_bundle_are_named_as_not_checked(unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    assert not any("with_earlier" in line for line in verify_bundle(folder).not_checked)
    state(folder, earlier_releases=2, epsilon_with_earlier=3.0, epsilon_adaptive_with_earlier=None)
    found = " ".join(verify_bundle(folder).not_checked)
    assert "epsilon_with_earlier, 3:" in found
    assert "epsilon_adaptive_with_earlier, infinite:" in found


def test_a_card_of_another_version_is_compared_by_its_numbers(unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    (folder / "card.html").write_text("another layout")
    edit(folder / "versions.json", fairpate="0.0.1")
    bind_again(folder)
    verdict = verify_bundle(folder)
    assert verdict.holds
    assert any(line.startswith("card.html") and "another version" in line for line in verdict.not_checked)
    card = json.loads((folder / "card.json").read_text())
    edit(folder / "card.json", privacy=card["privacy"] | {"epsilon": 0.2})
    bind_again(folder)
    refused(verify_bundle(folder), "card.json: privacy.epsilon")
    edit(folder / "card.json", privacy={name: value for name, value in card["privacy"].items() if name != "epsilon"})
    bind_again(folder)
    refused(verify_bundle(folder), "card.json: privacy.epsilon")


def test_a_file_that_no_bundle_has_is_noticed_although_the_head_lists_it(unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    (folder / "model.pkl").write_bytes(b"code")
    head = json.loads((folder / HEAD).read_text())
    edit(folder / HEAD, files=head["files"] | {"model.pkl": "0" * 64})
    refused(verify_bundle(folder), "model.pkl: no file of a bundle")


@pytest.mark.parametrize(
    "text",
    quick_and_slow(
        ["[" * 100_000, "[]", "{}", '{"files": [1], "claim": 2}', "null", "\xff"], ["[" * 100_000, "{}", "\xff"]
    ),
)
def test_files_that_make_no_sense_are_refused_without_a_traceback(text: str, unpacked: dict[str, Path]) -> None:
    folder = unpacked["trained"]
    for name in (HEAD, "statement.json", "card.json", "record.json", "events.json", "versions.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_text(text)
        assert not verify_bundle(folder).holds
        (folder / name).write_bytes(whole)


def test_a_folder_that_leads_elsewhere_or_has_no_end_is_no_bundle(unpacked: dict[str, Path]) -> None:
    labels = unpacked["trained"] / "metrics.json"
    labels.unlink()
    for make in (lambda: labels.symlink_to("/dev/zero"), lambda: os.mkfifo(labels)):
        make()
        with pytest.raises(BundleError, match=r"metrics\.json: expected plain files"):
            verify_bundle(unpacked["trained"])
        labels.unlink()


def test_a_head_that_was_made_again_is_not_the_published_one(
    bundles: dict[str, Path], unpacked: dict[str, Path]
) -> None:
    folder = unpacked["trained"]
    digest = verify_bundle(bundles["trained"]).digest
    assert verify_bundle(folder, head=digest).holds
    edit(folder / "versions.json", python="4.0")
    bind_again(folder)
    assert verify_bundle(folder).holds  # consistent in itself
    refused(verify_bundle(folder, head=digest), "the published one is")


@pytest.mark.parametrize(
    ("method", "overrides", "why"),
    [
        ("sgd", ["sgd.epochs=1"], "without privacy publishes nothing"),
        ("dp_sgd", ["noise=seeded"], "which is not private"),
    ],
)
def test_what_may_not_be_published_gives_no_bundle(method: str, overrides: list[str], why: str, tmp_path: Path) -> None:
    values = DP_SGD if method == "dp_sgd" else {}
    run = run_method(configured(values, [*overrides, f"out={tmp_path / 'run'}"], method=method), QUIET)
    with pytest.raises(RunDirectoryError, match=why):
        write_bundle(run.root)
    assert not (run.root / "bundle.zip").exists()


def test_a_hostile_archive_is_no_bundle(bundles: dict[str, Path], tmp_path: Path) -> None:
    for name in ("../outside.txt", "/etc/outside", "folder/head.json", HEAD):
        path = tmp_path / "hostile.zip"
        shutil.copy(bundles["trained"], path)
        with zipfile.ZipFile(path, "a") as bundle, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bundle.writestr(name, b"{}")
        with pytest.raises(Exception, match="not a bundle"):
            verify_bundle(path)
    (tmp_path / "text.zip").write_text("no zip")
    for path in (tmp_path / "text.zip", tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(Exception, match=r"not a bundle|no such file"):
            verify_bundle(path)


def test_the_commands(fairpate: Any, runs: dict[str, RunDirectory], tmp_path: Path) -> None:
    code, out, _ = fairpate("bundle", runs["trained"].root, "--out", tmp_path / "b.zip")
    path, digest = out.split()
    assert code == 0
    code, out, _ = fairpate("verify", path, "--head", digest)
    assert (code, out.splitlines()[-1][:25]) == (0, "holds: recomputed epsilon")
    code, out, _ = fairpate("verify", path, "--head", "0" * 64, "--json")
    told = json.loads(out)
    assert (code, told["holds"], told["stated"], len(told["differs"])) == (1, False, told["stated"], 1)
    code, _, err = fairpate("verify", tmp_path)
    assert code == 2
    assert "not a bundle" in err
    assert fairpate("bundle", runs["trained"].root, "--out", tmp_path / "b.tar")[0] == 2
    told = json.loads(fairpate("bundle", runs["trained"].root, "--out", tmp_path / "b.zip", "--json")[1])
    assert told == {"file": path, "head": digest}


def test_a_verdict_never_claims_an_order_that_rounding_decides(bundles: dict[str, Path]) -> None:
    verdict = verify_bundle(bundles["trained"])
    assert "within 0.1% of stated 2.0000" in replace(verdict, recomputed=2.0004, stated=2.0).words
