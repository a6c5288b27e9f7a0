"""A student's ONNX graph predicts what the student predicts, and its description is enough to use it."""

import dataclasses
import hashlib
import itertools
import re
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import student.student
from fairpate.config import DataConfig, EmbeddingConfig, ModelConfig
from fairpate.data import load_data
from fairpate.data.embedding import Embedding
from fairpate.fairness.gate import filter_stream
from fairpate.nn.fit import Mixture
from fairpate.nn.models import build_model
from fairpate.types import AnswerRule, ErrorBound, GateRule
from student.card import StudentCard
from student.student import PortableError, Student, missing_packages, portable

pytestmark = [
    pytest.mark.xdist_group("torchvision"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.usefixtures("quick_graphs"),
]
TABLE, PICTURES = (6,), (3, 32, 32)
MODELS = [
    ("logistic", TABLE),
    *(pytest.param(name, PICTURES, marks=pytest.mark.slow) for name in ("cnn", "hog_logistic")),
    *(pytest.param(name, TABLE, marks=pytest.mark.campaign) for name in ("bounded_logistic", "mlp")),
    *(
        pytest.param(name, PICTURES, marks=pytest.mark.campaign)
        for name in ("logistic", "lenet", "tanh_cnn", "resnet18")
    ),
]


def make(name="logistic", shape=TABLE, *, members=None, **words):
    config = ModelConfig(name=name, hidden=(8,))

    def one(seed):
        return build_model(config, input_shape=shape, num_classes=3, generator_seed=seed).eval()

    card = StudentCard(
        model=config,
        input_shape=shape,
        label_names=("low", "middle", "high"),
        group_names=("a", "b"),
        sensitive_attribute="group",
        num_members=members,
        **words,
    )
    return Student(card=card, network=one(1) if members is None else Mixture([one(seed) for seed in range(members)]))


def records(shape, count=40):
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 1:
        return torch.randn(count, *shape, generator=generator)
    return torch.randint(0, 256, (count, *shape), generator=generator, dtype=torch.uint8)


@cache
def made_of(name, shape):
    """The plain student of a kind and its graph, which takes most of a second."""
    one = make(name, shape)
    return one, portable(one, records(shape, 8))


def predict(made, x, groups=None):
    given = {"records": x.numpy()} | ({} if groups is None else {"groups": groups})
    session = onnxruntime.InferenceSession(made.graph, providers=["CPUExecutionProvider"])
    return session.run(["probabilities"], given)[0]


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_a_graph_predicts_other_records_as_the_student_does(name, shape):
    (one, made), x = made_of(name, shape), records(shape)
    for count in (1, 7, 40):
        np.testing.assert_allclose(predict(made, x[:count]), one.probabilities(x[:count]), atol=1e-5)
    onnx.checker.check_model(onnx.load_from_string(made.graph), full_check=True)


@pytest.mark.slow  # one of them in a run: tests/run/test_portable_run.py
@pytest.mark.parametrize(
    "words",
    [pytest.param({}, marks=pytest.mark.campaign), {"mirrored": True, "graph_share": 0.0}],
    ids=["pixels-and-places", "mirrored-components"],
)
def test_a_graph_reads_pictures_through_their_public_embedding(words):
    """On held-out digits, which neither the embedding nor the check has seen: the same labels."""
    digits = load_data(DataConfig(options={"colour_as_feature": False}))
    pool, held_out = digits.public.x, digits.test.x
    embedding = Embedding.of(pool, EmbeddingConfig(num_components=40, **words))
    coordinates = embedding(pool)
    one = make("logistic", tuple(coordinates.shape[1:]))
    with torch.no_grad():  # of three digits: the means of their coordinates, so that predictions are far from even
        one.network[-1].weight.copy_(torch.stack([coordinates[digits.public.y == k].mean(dim=0) for k in range(3)]))
    one = dataclasses.replace(one, embedding=embedding)
    made, expected = portable(one, pool[:8]), one.probabilities(held_out)
    found = predict(made, held_out)
    assert expected.std() > 0.2
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
    np.testing.assert_allclose(predict(made, held_out[5:6]), expected[5:6], atol=1e-4)
    assert made.description["inputs"] == [{"name": "records", "type": "uint8", "shape": ["N", *pool.shape[1:]]}]


@pytest.mark.slow
def test_a_mixture_tells_how_often_its_members_say_a_label():
    one, x = make(members=3), records(TABLE)
    made = portable(one, x[:8])
    np.testing.assert_allclose(predict(made, x), one.probabilities(x), atol=1e-6)
    assert set(np.unique((predict(made, x) * 3).round(5))) <= {0, 1, 2, 3}
    assert made.description["label"] == "draw one from the probabilities"


@pytest.mark.parametrize("members", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_a_mixing_by_group_reads_the_group(members):
    tables = np.random.default_rng(0).dirichlet(np.ones(3), size=(2, 3))
    one = make(members=members, mixing=tuple(tuple(tuple(row) for row in table) for table in tables.tolist()))
    x, groups = records(TABLE), np.arange(40) % 2
    made = portable(one, x[:8])
    np.testing.assert_allclose(predict(made, x, groups), one.probabilities(x, groups), atol=1e-6)
    assert [each["name"] for each in made.description["inputs"]] == ["records", "groups"]
    assert made.description["groups"] == {"attribute": "group", "names": ["a", "b"], "needed": True}


def test_the_file_tells_of_no_machine_and_is_the_same_each_time():
    (_, first), again = made_of("mlp", TABLE), portable(make("mlp", TABLE), records(TABLE, 8))
    assert first == again
    assert first.description["sha256"] == hashlib.sha256(first.graph).hexdigest()
    words = [word for word in re.findall(rb"[ -~]{8,}", first.graph) if re.search(rb"[a-z_]{4}", word)]
    assert any(b"node_relu" in word for word in words)
    assert not [word for word in words if re.search(rb"[.]py|/|trace|line ", word)]


def test_the_graph_reads_what_the_description_says():
    _, made = made_of("cnn", PICTURES)
    session = onnxruntime.InferenceSession(made.graph)
    (read,) = session.get_inputs()
    assert (read.name, read.type, read.shape[1:]) == ("records", "tensor(uint8)", list(PICTURES))
    assert made.description["inputs"] == [{"name": "records", "type": "uint8", "shape": ["N", *PICTURES]}]
    assert onnx.load_from_string(made.graph).opset_import[0].version == made.description["opset"] == 18


def test_a_graph_that_predicts_otherwise_is_not_published(monkeypatch):
    one, (_, made) = make(), made_of("logistic", TABLE)
    with torch.no_grad():
        one.network[-1].weight[0].add_(1)
    monkeypatch.setattr(student.student, "_graph", lambda *_: made.graph)
    with pytest.raises(PortableError, match=r"other than the student on [0-9]+% of 1 public records"):
        portable(one, records(TABLE))


def test_missing_packages_are_named(monkeypatch):
    assert missing_packages() == ()
    monkeypatch.setattr(student.student, "PACKAGES", ("onnx", "no_such_package"))
    assert missing_packages() == ("no_such_package",)


def answered(option, groups, labels):
    """The reject option from its description alone, in floats: margins of the test are far from ties."""
    counts = np.zeros(option["state"]["shape"])
    for group, label in zip(groups, labels, strict=True):
        rule, n = option["rule"], counts[group].sum()
        cold = {"group": n, "cell": counts[group, label], "all_groups": counts.sum(axis=1).min()}[rule["cold_start"]]
        rest = np.delete(counts, group, axis=0)
        if cold < rule["min_count"] or rest.sum() == 0:
            keep = True
        else:
            rates = rest[rest.sum(axis=1) > 0]
            other = {
                "one_vs_rest": rest[:, label].sum() / rest.sum(),
                "pairwise": (rates[:, label] / rates.sum(axis=1)).min(),
                "overall": (counts[:, label].sum() + 1) / (counts.sum() + 1),
            }[rule["gap"]]
            margin = rule["max_disparity"]
            keep = margin is None or (counts[group, label] + 1) / (n + 1) - other < margin
        counts[group, label] += keep
        yield keep


@pytest.mark.parametrize(
    ("cold_start", "gap"),
    list(itertools.product(("group", "cell", "all_groups"), ("one_vs_rest", "pairwise", "overall"))),
)
def test_the_reject_option_can_be_applied_from_its_description(cold_start, gap, monkeypatch):
    _, made = made_of("logistic", TABLE)
    monkeypatch.setattr(
        student.student, "_graph", lambda *_: made.graph
    )  # it is outside of the graph, whatever the rule
    rule = GateRule(max_disparity=0.0314159, min_count=5, cold_start=cold_start, gap=gap)
    rng = np.random.default_rng(3)
    one = dataclasses.replace(make(idp3=rule), card=dataclasses.replace(make(idp3=rule).card, group_names=tuple("abc")))
    option = portable(one, records(TABLE)).description["reject_option"]
    groups = rng.integers(0, 3, 500)
    labels = np.where(rng.random(500) < 0.3 + 0.2 * groups, 2, rng.integers(0, 3, 500))
    expected = filter_stream(labels, groups, rule=rule, num_groups=3, num_classes=3)
    assert 0 < expected.mean() < 1
    assert list(answered(option, groups, labels)) == expected.tolist()


def test_least_confidences_can_be_applied_from_their_description(monkeypatch):
    _, made = made_of("logistic", TABLE)
    monkeypatch.setattr(student.student, "_graph", lambda *_: made.graph)  # they are outside of the graph
    one = make()
    classes, groups = len(one.card.label_names), len(one.card.group_names)
    thresholds = (tuple(0.4 + 0.05 * k for k in range(classes)), *((None,) * classes for _ in range(groups - 1)))
    rule = AnswerRule(bound=ErrorBound(max_error=0.1), thresholds_GC=thresholds)
    one = dataclasses.replace(one, card=dataclasses.replace(one.card, answers=rule))
    x, of = records(TABLE, 200), np.arange(200) % groups
    least = portable(one, x).description["least_confidence"]["rule"]["thresholds_GC"]
    chances = one.probabilities(x)
    expected = []
    for group, row in zip(of, chances, strict=True):
        threshold = least[group][int(row.argmax())]
        expected.append(threshold is not None and bool(row.max() >= threshold))
    assert 0 < np.mean(expected) < 1
    assert one.predict(x, of).answered.tolist() == expected
