"""Who could vote: numbers by hand arithmetic, settings that run as they are printed, and refusals that say why."""

import json
import math
import shlex

import pytest
import torch
from typer.main import get_command

from fairpate.cli import app
from fairpate.cli.base import data_config
from fairpate.config import ConfigError, DataConfig
from fairpate.config_reader import config_digest
from fairpate.data import Dataset, Split
from fairpate.methods.base import configured, fitted, method_for, resolved
from fairpate.run.plan import VOTERS, candidates, describe_candidates, worth_of
from fairpate.terminal import Output


def pool_in_two_corners(num_public: int) -> Dataset:
    """Half of the public records at (1, 0), half at (0, 1); nothing else is there."""
    x = torch.eye(2).repeat(num_public // 2, 1)
    codes = torch.arange(num_public) % 2
    public = Split(x=x, y=codes, z=codes, record_id=tuple(map(str, range(num_public))))
    nothing = public.take([])
    return Dataset(
        name="corners",
        kind="tabular",
        private=nothing,
        public=public,
        validation=nothing,
        test=nothing,
        label_names=("no", "yes"),
        group_names=("a", "b"),
        sensitive_attribute="group",
    )


def test_votes_on_a_label_are_those_of_hand_arithmetic() -> None:
    dataset = pool_in_two_corners(400)
    target = ["target.epsilon=1", "target.delta=1e-5"]
    by_curves = [*target, "target.accounting=rdp"]
    counts = configured({"record_votes": {"num_prototypes": 8, "taught_share": 0.5}}, by_curves, method="record_votes")
    voting = counts.voting(dataset, 4000)
    assert (voting.votes, voting.labels) == (500, 200)
    # A vote is (1/2, x) / |(1/2, x)|: of the x part, 1 / sqrt(1.25) remains, for the half that lies in one's corner.
    vectors = configured({"weighted_votes": {"embedding": {"steps": 0}}}, by_curves, method="weighted_votes")
    weighted = vectors.voting(dataset, 4000)
    share = (199 / 399) / math.sqrt(1.25)
    assert weighted.votes == pytest.approx(4000 * share, rel=0.01)
    assert weighted.noise_stddev_votes == pytest.approx(voting.noise_stddev_votes, rel=0.01)
    neighbours = configured(
        {"private_knn": {"sampling_rate": 0.5, "num_neighbours": 30}, "aggregator": {"num_queries": 1}},
        target,
        method="private_knn",
    )
    assert neighbours.voting(dataset, 20).votes == 10
    assert neighbours.voting(dataset, 1000).votes == 30


def test_worth_is_the_square_of_the_lead_over_chance() -> None:
    assert worth_of(100, 0.75, num_classes=2) == pytest.approx(25)
    assert worth_of(100, 1.0, num_classes=10) == 100
    assert worth_of(100, 0.05, num_classes=10) == 0


def test_every_kind_of_voters_has_a_candidate_whose_command_is_a_valid_one(
    fairpate,
) -> None:
    data = ("--data", "color_digits", "--epsilon", "1", "--delta", "1e-6")
    code, output, _ = fairpate("plan", *data, "--teachers", "50", "--queries", "100", "--json")
    assert code == 0
    found = json.loads(output)["candidates"]
    assert {each["method"] for each in found} == set(VOTERS)
    assert [each["worth"] for each in found] == sorted((each["worth"] for each in found), reverse=True)
    for each in found:
        assert each["command"] == (
            f"fairpate run --data color_digits --epsilon 1 --delta 1e-06 --method {each['method']}"
        )
        assert 0 < each["right"] <= each["winner_kept"] <= 1
        # Of 50 to 100 teachers an epsilon of 1 leaves 300 labels to noise.
        assert (each["caution"] is not None) == (each["method"] == "fairpate")
        assert each["refused"] is None


TABLE = """name: clinic
rows: 900
files: {records: [{path: clinic.csv}]}
features: {age: {bounds: [20, 90]}}
label: {column: ill, classes: ["no", "yes"]}
group: {column: sex, values: [f, m]}
"""


def test_the_command_of_a_plan_runs_what_was_planned(tmp_path, monkeypatch) -> None:
    """By a shell's rules, also where a folder has a space in its name and files lie elsewhere."""
    folder = tmp_path / "own records"
    folder.mkdir()
    (folder / "clinic.yaml").write_text(TABLE, encoding="utf-8")
    data = data_config(str(folder / "clinic.yaml"), None, folder).model_copy(update={"num_public": 300})
    planned, run = {}, []
    corners = pool_in_two_corners(300)
    monkeypatch.setattr("fairpate.run.plan.load_data", lambda _: corners)
    monkeypatch.setattr("fairpate.run.plan.public_size", lambda *_: 900)

    def resolving(overrides, method):
        planned[method] = resolved(overrides, method)
        return planned[method]

    monkeypatch.setattr("fairpate.run.plan.resolved", resolving)
    monkeypatch.setattr("fairpate.run.run.run_method", lambda config, *_, **__: run.append(config))
    monkeypatch.setattr("fairpate.cli.summaries.outcome", lambda _: Output(facts={}, words=""))
    command = get_command(app)
    for each in candidates(data, str(folder / "clinic.yaml"), epsilon=0.7000000001, delta=3e-7):
        words = [*shlex.split(each.command)[1:], "--set", "data.num_public=300"]
        assert command.main(words, standalone_mode=False) == 0
        assert config_digest(run[-1]) == config_digest(planned[each.method])
        assert run[-1].data == planned[each.method].data
    assert {config.method for config in run} == set(VOTERS)


def test_what_cannot_vote_says_why_and_the_others_stand() -> None:
    found = candidates(DataConfig(num_public=60), "color_digits", epsilon=50, delta=1e-5)
    refused = {each.method: each.refused for each in found if each.refused is not None}
    assert set(refused) == {"weighted_votes", "record_votes", "private_knn"}
    assert all("target.epsilon" in str(words) and "50" in str(words) for words in refused.values())
    assert found[0].method == "fairpate"
    lines = "\n".join(str(part) for part in describe_candidates(found, epsilon=50, chosen="fairpate").renderables)
    assert "private_knn: target.epsilon" in lines
    assert "Where no method is named: fairpate." in lines


def test_nobody_votes_where_few_public_records_meet_many_private_ones() -> None:
    assert method_for(DataConfig(name="adult")) == "weighted_votes"
    assert method_for(DataConfig(name="adult", num_public=100)) == "dp_sgd"
    assert method_for(DataConfig(name="color_digits", num_public=100)) == "weighted_votes"
    assert fitted(DataConfig(name="adult", num_public=100))["method"] == "dp_sgd"


@pytest.mark.parametrize("agreement", [0.0, 1.5])
def test_an_impossible_assumption_is_refused_before_records_are_read(
    agreement: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairpate.run.plan.load_data", lambda _: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="agreement"):
        candidates(DataConfig(num_public=60), "color_digits", epsilon=1, delta=1e-5, agreement=agreement)
