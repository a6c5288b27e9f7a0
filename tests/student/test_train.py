import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from fairpate.config import AugmentConfig, FitConfig, ModelConfig, StudentTraining
from fairpate.nn.fit import predict_logits
from fairpate.nn.models import build_model
from student.student import PublicRecords, train_student

pytestmark = pytest.mark.usefixtures("light_runs")

MLP = ModelConfig(name="mlp", hidden=(32,))
FIT = FitConfig(epochs=60, batch_size=16, learning_rate=0.01)


def moons(num_records, seed):
    """Two interleaving half circles: (features, class)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_records) % 2
    angle = torch.rand(num_records, generator=generator) * torch.pi
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    x = torch.where(labels[:, None] == 0, x, torch.tensor([1.0, 0.5]) - x)
    return x + 0.06 * torch.randn(x.shape, generator=generator), labels


def bars(num_records, seed):
    """Noisy 8x8 images with a bright horizontal (0) or vertical (1) bar: (uint8 images, class)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_records,), generator=generator)
    images = torch.rand(num_records, 1, 8, 8, generator=generator) * 140
    for image, label, place in zip(images, labels, torch.randint(8, (num_records,), generator=generator), strict=True):
        image[0].select(int(label), int(place)).add_(90)
    return images.to(torch.uint8), labels


def split(x, labels, num_answered):
    return PublicRecords(answered_x=x[:num_answered], labels=labels[:num_answered], unlabelled_x=x[num_answered:])


def train(records, config, seed=0, num_classes=2, **options):
    generator = torch.Generator().manual_seed(seed)
    return train_student(records, config, num_classes=num_classes, generator=generator, **options)


def accuracy(model, x, labels):
    return float((predict_logits(model, x).argmax(dim=1) == labels).float().mean())


def test_a_supervised_student_learns_from_answers_and_never_sees_the_rest():
    x, labels = moons(200, seed=0)
    config = StudentTraining(model=MLP, fit=FIT)
    first = train(split(x, labels, 150), config)
    blind = PublicRecords(answered_x=x[:150], labels=labels[:150], unlabelled_x=torch.full((50, 2), torch.nan))
    second = train(blind, config)
    assert accuracy(first, *moons(500, seed=1)) > 0.95
    assert torch.equal(predict_logits(first, x), predict_logits(second, x))


@pytest.fixture(scope="module")
def digits():
    """40 answered and 600 unlabelled digits, and the rest to score on: (records, (x, labels))."""
    source = load_digits()
    order = torch.randperm(len(source.target), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(source.images) * 15.9).to(torch.uint8)[order][:, None]
    labels = torch.tensor(source.target)[order]
    return split(x[:640], labels[:640], 40), (x[640:], labels[640:])


def test_pseudo_labels_improve_on_few_answers(digits):
    records, held_out = digits
    fit = FitConfig(epochs=40, batch_size=32, learning_rate=3e-3)
    plain, semi = (
        train(records, StudentTraining(fit=fit, method=method, confidence=0.6), num_classes=10)
        for method in ("supervised", "pseudo_label")
    )
    assert accuracy(semi, *held_out) > accuracy(plain, *held_out) + 0.02


@pytest.mark.slow
def test_fixmatch_improves_on_few_answers(digits):
    records, held_out = digits
    model, weak = ModelConfig(name="lenet"), AugmentConfig(translation_fraction=0.1)
    # 125 epochs over 40 answers are as many steps as 50 over 600 unlabelled records.
    plain, semi = (
        train(
            records,
            StudentTraining(
                model=model,
                fit=FitConfig(epochs=epochs, learning_rate=1e-3),
                method=method,
                confidence=0.9,
            ),
            num_classes=10,
            augmentation=weak,
        )
        for method, epochs in (("supervised", 125), ("fixmatch", 50))
    )
    assert accuracy(semi, *held_out) > accuracy(plain, *held_out) + 0.01


@pytest.mark.parametrize("method", ["supervised", "pseudo_label", "fixmatch"])
def test_the_generator_alone_decides_the_weights(method):
    config = StudentTraining(model=ModelConfig(name="cnn", hidden=(4,)), fit=FitConfig(epochs=2), method=method)
    records = split(*bars(60, seed=0), 20)
    torch.manual_seed(1)
    first = train(records, config)
    torch.manual_seed(2)
    again, other = train(records, config), train(records, config, seed=1)
    x = records.unlabelled_x
    assert torch.equal(predict_logits(first, x), predict_logits(again, x))
    assert not torch.equal(predict_logits(first, x), predict_logits(other, x))


@pytest.mark.parametrize("method", ["supervised", "pseudo_label", "fixmatch"])
def test_a_student_starts_from_the_model_it_is_given_and_feels_the_penalty(method):
    x, labels = bars(40, seed=0)
    start = build_model(MLP, input_shape=(1, 8, 8), num_classes=2, generator_seed=3)
    before = [parameter.clone() for parameter in start.parameters()]
    config = StudentTraining(model=MLP, method=method, fit=FitConfig(epochs=2, batch_size=16, learning_rate=1e-12))

    def learn(**options):
        generator = torch.Generator().manual_seed(0)
        return train_student(split(x, labels, 20), config, num_classes=2, generator=generator, **options)

    learned = learn(initial_model=start).parameters()
    for ours, given, kept in zip(learned, before, start.parameters(), strict=True):
        torch.testing.assert_close(ours, given)
        assert torch.equal(kept, given)
    calls = []

    def penalty(network):
        calls.append(network)
        return 0 * next(network.parameters()).sum()

    learn(penalty=penalty)
    assert calls


@pytest.mark.parametrize(("method", "total"), [("supervised", 3), ("pseudo_label", 6), ("fixmatch", 3)])
def test_progress_counts_every_epoch(method, total):
    heard = []
    config = StudentTraining(model=MLP, fit=FitConfig(epochs=3), method=method)
    train_student(
        split(*bars(40, seed=0), 20),
        config,
        num_classes=2,
        generator=torch.Generator().manual_seed(0),
        on_progress=lambda *progress: heard.append(progress),
    )
    assert heard == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("num_answered", "steps"),
    [(4, 2), (40, 5), (59, 8)],  # 56 others are 2 chunks of 32; 40 answered are 5 batches of 8; 59 are 8
)
def test_a_fixmatch_epoch_visits_every_record(num_answered, steps):
    calls = []
    train_student(
        split(*bars(60, seed=0), num_answered),
        StudentTraining(model=MLP, fit=FitConfig(epochs=2, batch_size=8), method="fixmatch"),
        num_classes=2,
        generator=torch.Generator().manual_seed(0),
        penalty=lambda network: calls.append(0) or 0 * next(network.parameters()).sum(),
    )
    assert len(calls) == 2 * steps


@pytest.mark.parametrize("method", ["supervised", "pseudo_label", "fixmatch"])
def test_certain_chances_teach_what_their_labels_teach(method):
    hard = split(*bars(60, seed=0), 20)
    soft = dataclasses.replace(hard, labels=F.one_hot(hard.labels, 2).float())
    fit = FitConfig(epochs=3, batch_size=16, learning_rate=0.01, label_smoothing=0.1)
    config = StudentTraining(model=MLP, fit=fit, method=method, confidence=0.6)
    x = hard.unlabelled_x
    torch.testing.assert_close(predict_logits(train(hard, config), x), predict_logits(train(soft, config), x))


@pytest.mark.parametrize("method", ["supervised", "fixmatch"])
def test_chances_reach_the_loss(method):
    """One step of a linear student against the gradient of its cross entropy, (softmax(Wx + b) - target) x."""
    x, _ = bars(8, seed=0)
    chances = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    start = build_model(ModelConfig(name="logistic"), input_shape=(1, 8, 8), num_classes=3, generator_seed=0)
    fit = FitConfig(epochs=1, batch_size=8, optimizer="sgd", learning_rate=0.5, label_smoothing=0.3)
    learned = train_student(
        PublicRecords(answered_x=x, labels=chances, unlabelled_x=x[:1]),
        StudentTraining(model=ModelConfig(name="logistic"), fit=fit, method=method, confidence=1.0),
        num_classes=3,
        generator=torch.Generator().manual_seed(0),
        initial_model=start,
    )
    weight, bias = (parameter.detach().numpy().astype(np.float64) for parameter in start.parameters())
    features = x.flatten(1).numpy() / 255
    odds = np.exp(features @ weight.T + bias)
    error = odds / odds.sum(axis=1, keepdims=True) - (0.7 * chances.numpy() + 0.3 / 3)
    stepped = next(learned.parameters()).detach().numpy()
    np.testing.assert_allclose(stepped, weight - 0.5 * error.T @ features / 8, atol=1e-6)


def test_the_wrong_method_is_named():
    x, labels = moons(20, seed=0)
    with pytest.raises(ValueError, match="fixmatch changes images"):
        train(split(x, labels, 10), StudentTraining(model=MLP, method="fixmatch"))


def test_a_student_that_diverges_says_so():
    config = StudentTraining(model=MLP, method="fixmatch", fit=FitConfig(optimizer="sgd", learning_rate=1e12, epochs=5))
    with pytest.raises(ValueError, match="diverged"):
        train(split(*bars(40, seed=0), 20), config)
