"""Every method, on digits of two labels without their colour, where all of them can be trained: one shape of run."""

import copy
import dataclasses
import hashlib
import io
import stat
from pathlib import Path

import pytest
from each_method import ASKING, ATTRIBUTE, METHODS, RANDOMISED, UNPROTECTED, config_of, load_two_labels, train, weights
from method_kinds import quick_and_slow
from rich.console import Console
from small_runs import FILES, QUIET, read_json

from fairpate.config import ConfigError, DataConfig, apply_override
from fairpate.data import entry_for, load_data
from fairpate.methods.base import Method, ReleasingMethod, config_digest, configured, find_method
from fairpate.methods.raco_dp import named_constraints
from fairpate.releases.directory import RunDirectory, RunDirectoryError, sole_worker
from fairpate.releases.odometer import Odometer
from fairpate.run.folder import create_run_directory, finished_run
from fairpate.run.publication import write_card
from fairpate.run.run import run_method
from fairpate.terminal import Reporter
from fairpate.types import PrivacyStatement, RunRecord
from student.student import load_student

pytestmark = pytest.mark.usefixtures("light_runs")

CALIBRATION = "public_data.calibration={weight: 3}"
PRIVATE = {"release.json", "without_privacy.json"}
ONE_OF_EACH_KIND = ("dp_sgd", "fairpate", "weighted_votes", "f_ld")


@pytest.mark.parametrize("method", quick_and_slow(METHODS))
def test_every_method_leaves_the_same_files(trained, method):
    folder = trained(method)
    of_votes = {"labels.parquet"} if method in ASKING else set()
    of_votes |= {"released.safetensors"} if issubclass(find_method(method), ReleasingMethod) else set()
    assert {path.name for path in folder.public.iterdir()} - PRIVATE == FILES | of_votes
    record, statement = read_json(folder.record), read_json(folder.statement)
    assert set(record) == {field.name for field in dataclasses.fields(RunRecord)}
    assert (record["method"], record["data"], record["delta"]) == (method, "color_digits", 1e-4)
    assert 0 <= record["accuracy"] <= 1
    assert record["coverage"] == 1
    assert record["config"]["method"] == method
    assert set(statement) == {field.name for field in dataclasses.fields(PrivacyStatement)}
    assert (statement["method"], statement["delta"]) == (method, 1e-4)
    assert statement["unit"] == record["unit"] == ("sensitive attribute" if method in ATTRIBUTE else "record")
    assert statement["relation"] == ("replace one" if method in ATTRIBUTE else "add or remove one")
    assert (statement["queries"] is not None) == (method in ASKING)
    assert load_student(folder.student).card.model == config_of(method, None).student_training.model
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert not list(folder.root.rglob("*.tmp"))
    if method in UNPROTECTED:
        assert statement["epsilon"] is record["epsilon"] is None
        assert "not private" in statement["noise"]
        assert not (folder.root / "public").exists()
    else:
        assert record["epsilon"] == statement["epsilon"] <= 2
        assert statement["noise"] == "seeded: not private"
        assert statement["events"]
        kept = {path.name for path in folder.private.iterdir()}
        of_teachers = {"teachers", "work.json"}
        assert (kept - of_teachers == PRIVATE | {"report.html"}) == (method not in ASKING)


def test_a_second_run_in_the_same_folder_waits_outside(tmp_path):
    config = config_of("record_votes", tmp_path / "run")
    create_run_directory(config)
    with (
        sole_worker(tmp_path / "run", "fairpate run"),
        pytest.raises(RunDirectoryError, match="another `fairpate run` is running in this folder; wait until it ends"),
    ):
        run_method(config, QUIET, load=load_two_labels)
    assert not [*(tmp_path / "run").rglob("released.*"), *(tmp_path / "run").glob("data.json")]
    assert run_method(config, QUIET, load=load_two_labels).student.exists()


def test_of_two_that_begin_a_folder_at_once_the_second_leaves_no_configuration(tmp_path):
    config = config_of("record_votes", tmp_path / "run")
    (tmp_path / "run").mkdir()
    with (
        sole_worker(tmp_path / "run", "fairpate run"),
        pytest.raises(RunDirectoryError, match="is running in this folder"),
    ):
        run_method(config, QUIET, load=load_two_labels)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    (tmp_path / "run" / ".config.yaml.0123.tmp").write_text("method:")  # killed while it wrote
    assert create_run_directory(config).config.exists()  # what a crash left of the first is no other run's


@pytest.mark.parametrize("method", quick_and_slow(METHODS))
def test_report_and_card_open_any_run(trained, method, fairpate, monkeypatch):
    folder = trained(method)
    monkeypatch.setitem(run_method.__kwdefaults__, "load", load_two_labels)
    before = {path: path.read_bytes() for path in folder.public.iterdir()}
    code, output, errors = fairpate("report", folder.root)
    assert (code, errors) == (0, "")
    assert f"{method} on color_digits, seed 0" in output
    assert {path: path.read_bytes() for path in before} == before
    if method in UNPROTECTED:
        assert "none: no guarantee (no noise" in output
        with pytest.raises(RunDirectoryError, match="publishes nothing"):
            write_card(folder.root)
    else:
        _, plain = write_card(folder.root)
        assert read_json(plain)["privacy"]["epsilon"] == read_json(folder.statement)["epsilon"]
    for path in set(folder.public.iterdir()) - set(before):
        path.unlink()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=() if method in ONE_OF_EACH_KIND else pytest.mark.slow)
        for method in METHODS
        if method not in RANDOMISED
    ],
)
def test_options_on_public_data_are_open_to_every_method_and_cost_nothing(trained, method, tmp_path):
    plain = trained(method)
    more = [f"storage={plain.teachers}"] if "storage" in type(config_of(method, None)).model_fields else []
    options = [
        *(CALIBRATION, "public_data.self_label=mlp", "student.confidence=0.1", "student.fit.epochs=3"),
        *("public_data.pretrain=1", "student.idp3={max_disparity: 0.0, min_count: 10}"),
    ]
    folder = train(tmp_path / "run", method, *more, *options)
    found = finished_run(folder.root)[0]
    assert read_json(found.statement) == read_json(plain.statement)
    assert weights(found) != weights(plain)
    assert read_json(found.record)["coverage"] < 1
    assert {"without_refusals", "orders"} <= set(read_json(found.metrics))


def test_self_labelling_may_publish_another_architecture(trained, tmp_path):
    """The private model is a plain one, the student a network; what is priced stays."""
    options = ("public_data.self_label=lenet", "student={confidence: 0.1, fit: {epochs: 1}, model: hog_logistic}")
    folder = train(tmp_path / "run", "dp_sgd", *options)
    student = load_student(folder.student)
    assert student.card.model.name == "lenet"
    assert read_json(folder.statement) == read_json(trained("dp_sgd").statement)
    again = train(folder.root, "dp_sgd", *options)
    assert again == folder


def test_all_methods_see_the_same_splits_and_start_from_the_same_weights(tmp_path):
    """Without a step that moves them, DP-SGD and FairDP-SGD are the model they started from."""
    still = ("dp_sgd.epochs=1.0e-9", "dp_sgd.learning_rate=1.0e-30")
    first, second = (weights(train(tmp_path / method, method, *still)) for method in ("dp_sgd", "fair_dp_sgd"))
    assert first == second


def test_a_regulariser_that_outweighs_the_private_gradient_is_told(tmp_path):
    """At the start it is below the clipping norm by default."""

    def told(name, *overrides):
        console = Console(record=True, file=io.StringIO(), width=300)
        config = config_of("fair_dp_sgd", tmp_path / name, "dp_sgd.epochs=0.1", *overrides)
        run_method(config, Reporter(console), load=load_two_labels)
        return [line for line in console.export_text().splitlines() if line.startswith("regulariser")]

    assert told("default") == []
    (line,) = told("heavy", "fair_dp_sgd.weight=100")
    assert "times dp_sgd.clip_norm" in line
    assert "lower fair_dp_sgd.weight" in line


def test_a_seeded_run_can_be_made_again_and_another_seed_changes_it(trained, tmp_path):
    first = trained("fair_dp_sgd")
    assert weights(train(tmp_path / "again", "fair_dp_sgd")) == weights(first)
    assert weights(train(tmp_path / "other", "fair_dp_sgd", "seed=1")) != weights(first)


def test_the_relation_of_the_target_is_the_statements(tmp_path):
    target = ("target.relation=replace one", "target.accounting=pld")
    one_step = ("dp_sgd.epochs=1", "dp_sgd.num_records=200", "dp_sgd.batch_size=200")
    folder = train(tmp_path / "run", "dp_sgd", *target, *one_step)
    statement = read_json(folder.statement)
    assert statement["relation"] == statement["events"][0]["relation"] == "replace one"
    assert read_json(folder.record)["relation"] == "replace one"


@pytest.mark.parametrize(
    ("method", "field", "setting", "words"),
    [
        ("sgd", "public_data.pretrain", "public_data.pretrain=1", "learns from images"),
        ("pate", "augment", "augment.rotation_degrees=5", "changes images"),
        ("pate", r"student\.method", "student.method=fixmatch", "fixmatch changes images"),
    ],
)
def test_settings_for_images_are_refused_for_a_table(method, field, setting, words, tmp_path):
    table = dataclasses.replace(load_data(DataConfig()), kind="tabular")
    with pytest.raises(ConfigError, match=f"{field}: {words}"):
        run_method(config_of(method, tmp_path / "run", setting), QUIET, load=lambda _: table)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_sure_of_nothing_labels_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"student\.confidence: .* lower student\.confidence"):
        train(tmp_path / "run", "dp_sgd", "public_data.self_label=mlp", "student.confidence=1.0")


@pytest.mark.parametrize("method", ["weighted_votes", "dp_sgd"])
def test_a_self_labelling_student_that_cannot_read_the_records_costs_nothing(method, tmp_path, monkeypatch):
    monkeypatch.setenv("FAIRPATE_STATE", str(tmp_path / "state"))
    settings = {"data": {"name": "loans"}, "target": {"epsilon": 1}, "public_data": {"self_label": "cnn"}}
    config = configured(settings, [f"out={tmp_path / 'run'}"], method=method)
    with pytest.raises(ConfigError, match=r"public_data\.self_label: .*: Model cnn reads images"):
        run_method(config, QUIET)
    assert not Odometer().totals(delta=1e-5)
    assert not RunDirectory(root=tmp_path / "run").released.exists()


CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))


OFFERED = [path for path in CONFIGS if "\nmethods:" not in path.read_text()]  # a sweep has methods


@pytest.mark.parametrize("path", OFFERED, ids=lambda path: path.stem)
def test_every_configuration_that_is_offered_is_valid_for_every_method(path):
    named = configured(path)
    assert entry_for(named.data.name).complete_options(named.data.options)
    for method in METHODS:
        assert configured(path, method=method).data == named.data


def test_a_digest_changes_with_what_a_method_reads_and_nothing_else():
    def digest(method, **sections):
        return config_digest(configured(sections, method=method))

    plain = digest("dp_sgd")
    unread = {"raco_dp": {"bound": 0.2}, "teachers": {"num_teachers": 7}, "f_ld": {"epochs": 3}}
    assert digest("dp_sgd", **unread) == plain
    assert digest("dp_sgd", dp_sgd={"clip_norm": 2.0}) != plain
    assert digest("raco_dp", raco_dp={"bound": 0.2}) != digest("raco_dp")
    assert not configured({"noise": "seeded"}, method="sgd").is_seeded
    assert configured({"noise": "seeded"}, method="dp_sgd").is_seeded


@pytest.mark.parametrize(
    ("method", "file", "setting", "cause"),
    [
        ("dp_postprocessing", {}, "dp_sgd={epochs: 3, momentum: 0}", "dp_postprocessing.base=sgd"),
        ("randomised_response", {}, "randomised_response.mixing_gap=0.1", "randomised_response.form=one_step"),
        ("sf_pate", {"sf_pate": {"variant": "sf_t"}}, "teachers.fit={epochs: 3}", "sf_pate.variant=sf_t"),
        ("dp_fermi", {}, "dp_fermi.positive_label=0", "dp_fermi.constraint=demographic_parity"),
        ("dp_fermi", {"dp_fermi": {"shares": [[0.5, 0.5]]}}, "dp_fermi.share_noise=3", "dp_fermi.shares=[[0.5, 0.5]]"),
        ("pf_ld", {"pf_ld": {"group_sizes": [1, 2]}}, "pf_ld.size_share=0.1", "pf_ld.group_sizes=[1.0, 2.0]"),
        (
            "dp_oracle_learner",
            {"dp_oracle_learner": {"release": "every_round"}},
            "dp_oracle_learner.feature_share=0.1",
            "dp_oracle_learner.release=every_round",
        ),
        ("dp_oracle_learner", {}, "dp_oracle_learner.failure_probability=0.2", "dp_oracle_learner.num_rounds=25"),
        ("private_knn", {}, "private_knn.threshold_stddev_votes=3", "private_knn.threshold=null"),
        ("raco_dp", {}, "raco_dp.label=0", "raco_dp.constraint=demographic_parity"),
        ("fair_dp_sgd", {}, "fair_dp_sgd.max_temperature=1", "fair_dp_sgd.maximum=hardmax"),
        (
            "pate",
            {"student": {"model": {"name": "logistic"}}},
            "student.model.hidden=[8]",
            "student.model.name=logistic",
        ),
        ("pate", {}, "student.confidence=0.5", "student.method=supervised"),
        ("dp_sgd", {}, "student.fit={epochs: 3}", "public_data.self_label=null"),
        ("dp_sgd", {}, "evaluation.score_edges=[0.5]", "evaluation.metrics=outside"),
        (
            "pf_ld",
            {"pf_ld": {"constraint": "accuracy_parity"}},
            "pf_ld.sharpness=2",
            "pf_ld.constraint=accuracy_parity",
        ),
        (
            "dp_postprocessing",
            {"dp_postprocessing": {"slack": False}},
            "dp_postprocessing.failure_probability=0.2",
            "dp_postprocessing.slack=false",
        ),
    ],
)
def test_an_option_that_other_settings_leave_unread_is_refused_and_a_file_may_hold_it(method, file, setting, cause):
    with pytest.raises(ConfigError) as caught:
        configured(file, [setting], method=method)
    for fault in str(caught.value).splitlines():
        field, _, why = fault.partition(": ")
        assert setting.startswith(field.rpartition(".")[0])
        assert why == f"not read because of {cause}; leave it out, or change {cause.partition('=')[0]}."
    values = copy.deepcopy(file)
    apply_override(values, setting)
    plain, holding = configured(file, method=method), configured(values, method=method)
    assert holding != plain
    assert config_digest(holding) == config_digest(plain)


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("backbone.norm=group", "backbone.norm: unknown field; known: weights, trainable."),
        ("augment.turn=3", "augment.turn: unknown field; known: rotation_degrees, "),
    ],
)
def test_an_option_that_does_not_exist_is_not_said_to_be_unread_too(setting, fault):
    with pytest.raises(ConfigError) as caught:
        configured({}, [setting], method="residual_votes")
    (said,) = str(caught.value).splitlines()
    assert said.startswith(fault)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_loses_what_its_sections_disable(method, monkeypatch):
    monkeypatch.setattr(Method, "unread", property(lambda _: {"a field": "another"}))
    assert configured({}, method=method).unread["a field"] == "another"


def test_constraints_of_ones_own_leave_the_named_one_unread():
    own = named_constraints("demographic_parity", num_classes=2, num_groups=2, bound=0.1)
    with pytest.raises(ConfigError, match=r"^raco_dp\.bound: not read because of raco_dp\.constraints; leave it out"):
        configured({"raco_dp": {"constraints": own}}, ["raco_dp.bound=0.2"], method="raco_dp")


@pytest.mark.parametrize("method", METHODS)
def test_a_configuration_holds_what_its_method_reads_and_is_read_back(method):
    config = config_of(method, "somewhere")
    assert type(config) is find_method(method)
    written = config.model_dump(mode="json")  # with defaults that follow from other fields as they are here
    again = configured(written)
    assert again.model_dump(mode="json") == written
    assert config_digest(again) == config_digest(config)


DECLARED = """
name: own_loans
task: pays back
rows: 600
files:
  records: {path: loans.csv, sha256: SHA}
features:
  age: {bounds: [18, 100]}
  sex: {categories: [f, m]}
label: {column: paid, classes: {defaults: no, pays: yes}}
group: {column: sex, values: {female: f, male: m}}
identity: {key: [id]}
num_public: 100
num_validation: 0
"""


def test_records_of_ones_own_are_a_declaration_beside_their_file(tmp_path, fairpate, monkeypatch):
    """Known by its ending; from any folder; pinned; named in what is published, and its place is not."""
    own = tmp_path / "own"
    own.mkdir()
    rows = [f"{i},{18 + i % 60},{'fm'[i % 2]},{'yes' if i % 60 > 20 else 'no'}" for i in range(600)]
    (own / "loans.csv").write_text("id,age,sex,paid\n" + "\n".join(rows) + "\n")
    sha = hashlib.sha256((own / "loans.csv").read_bytes()).hexdigest()
    (own / "loans.yaml").write_text(DECLARED.replace("SHA", sha))
    monkeypatch.chdir(own)
    values = ["dp_sgd.epochs=2", "dp_sgd.batch_size=64", "student.model.name=logistic", "target.accounting=rdp"]
    settings = [word for value in values for word in ("--set", value)]
    command = ["run", "--method", "dp_sgd", "--data", "loans.yaml", "--out", str(tmp_path / "run"), *settings]
    assert fairpate(*command)[0] == 0
    monkeypatch.chdir(tmp_path)
    run, config = finished_run(tmp_path / "run")
    assert (config.data.name, read_json(run.record)["data"]) == ("own_loans", "own_loans")
    assert not any(str(tmp_path) in path.read_text() for path in run.public.glob("*.json"))
    assert fairpate("report", str(tmp_path / "run"))[0] == fairpate("card", str(tmp_path / "run"))[0] == 0
    assert fairpate("data", "describe", str(own / "loans.yaml"))[0] == 0
    (own / "loans.yaml").write_text(DECLARED.replace("SHA", sha).replace("[18, 100]", "[18, 90]"))
    code, *said = fairpate("report", str(tmp_path / "run"))
    assert code
    assert "has changed since" in "".join(said)
