import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fairpate.config import ModelConfig
from fairpate.nn.models import build_model
from fairpate.types import GateRule
from student.card import StudentCard, StudentFileError
from student.student import Student, build_network, load_student, save_student

pytestmark = pytest.mark.usefixtures("light_runs")

RULE = GateRule(max_disparity=0.05, min_count=4)


def make_student(idp3=None):
    config = ModelConfig(name="mlp", hidden=(8,))
    card = StudentCard(
        model=config,
        input_shape=(5,),
        label_names=("no", "yes"),
        group_names=("a", "b", "c"),
        sensitive_attribute="group",
        idp3=idp3,
    )
    return Student(card=card, network=build_model(config, input_shape=(5,), num_classes=2, generator_seed=1).eval())


@pytest.fixture
def x():
    return torch.randn(300, 5, generator=torch.Generator().manual_seed(0))


def test_equal_students_are_equal_files(tmp_path):
    for number in range(8):
        save_student(make_student(RULE), tmp_path / f"{number}.safetensors")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_full_disk_is_an_error_of_the_system_s():
    with pytest.raises(OSError, match="No space left"):
        save_student(make_student(), Path("/dev/full"))


@pytest.mark.parametrize("idp3", [None, RULE, GateRule(max_disparity=math.inf, min_count=0)])
def test_a_student_comes_back_from_its_file(tmp_path, x, idp3):
    student, groups = make_student(idp3), np.arange(300) % 3
    save_student(student, tmp_path / "student.safetensors")
    again = load_student(tmp_path / "student.safetensors")
    assert again.card == student.card
    before, after = student.predict(x, groups), again.predict(x, groups)
    np.testing.assert_array_equal(before.probabilities_NC, after.probabilities_NC)
    np.testing.assert_array_equal(before.answered, after.answered)


def test_without_idp3_everything_is_answered(x):
    prediction = make_student().predict(x)
    assert prediction.answered.all()
    np.testing.assert_array_equal(prediction.labels, prediction.probabilities_NC.argmax(axis=1))


def test_idp3_refuses_what_would_pass_its_margin_and_starts_afresh_each_time(x):
    student, groups = make_student(RULE), (x[:, 0] > 0).long().numpy()
    prediction = student.predict(x, groups)
    assert 0 < prediction.answered.mean() < 1
    np.testing.assert_array_equal(student.predict(x, groups).answered, prediction.answered)
    everything = make_student(GateRule(max_disparity=math.inf, min_count=0)).predict(x, groups)
    assert everything.answered.all()
    np.testing.assert_array_equal(everything.labels, prediction.labels)


def test_idp3_asks_for_groups_and_the_shape_is_checked(x):
    with pytest.raises(ValueError, match="sensitive_features"):
        make_student(RULE).predict(x)
    with pytest.raises(ValueError, match=r"shape \(N, \*\(5,\)\)"):
        make_student().predict(x[:, :4])


def test_a_file_that_is_no_student_is_refused(tmp_path):
    damaged, foreign = tmp_path / "damaged.safetensors", tmp_path / "foreign.safetensors"
    damaged.write_bytes(b"\x00" * 40)
    save_file({"weight": torch.zeros(2)}, foreign)
    for path, cause in (
        (damaged, "readable"),
        (foreign, "format"),
        (tmp_path / "missing", "missing: not found; give"),
    ):
        with pytest.raises(StudentFileError, match=cause):
            load_student(path)


def test_a_flipped_bit_or_a_missing_end_anywhere_is_noticed(tmp_path):
    path = tmp_path / "student.safetensors"
    save_student(make_student(RULE), path)
    content = path.read_bytes()
    assert load_student(path)
    damaged = [content[:length] for length in range(0, len(content), 7)]
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        damaged.append(bytes(flipped))
    for number, wrong in enumerate(damaged):
        path.write_bytes(wrong)
        try:
            load_student(path)
        except StudentFileError as error:
            assert "restore it from a copy" in str(error) or "expected a student of format" in str(error)
        else:
            assert same_header(wrong, content), f"damage {number} was not noticed"


def same_header(one, other):
    """Whether only white space of the safetensors header, which means nothing, differs."""
    length = int.from_bytes(other[:8], "little")
    return one[8 + length :] == other[8 + length :] and one[8 : 8 + length].split() == other[8 : 8 + length].split()


def test_a_file_without_a_checksum_is_read_as_before(tmp_path):
    path = tmp_path / "student.safetensors"
    save_student(make_student(), path)
    with safe_open(path, framework="pt") as file:
        card = json.loads(file.metadata()["card"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del card["sha256"]
    save_file(tensors, path, metadata={"card": json.dumps(card)})
    assert load_student(path).card == make_student().card


def randomised(**card):
    student = make_student()
    card = replace(student.card, **card)
    network = build_network(card)
    for seed, member in enumerate(getattr(network, "members", ())):
        member.load_state_dict(
            build_model(card.model, input_shape=(5,), num_classes=2, generator_seed=seed).state_dict()
        )
    return Student(card=card, network=student.network if card.num_members is None else network.eval())


MIXING = tuple(((1 - low, low), (1 - high, high)) for low, high in ((0.0, 1.0), (0.25, 0.5), (0.4, 0.4)))


def test_a_mixture_says_how_often_its_members_do(tmp_path, x):
    student = randomised(num_members=4)
    votes = np.stack([member(x).argmax(dim=1).numpy() for member in student.network.members])
    prediction = student.predict(x, generator=np.random.default_rng(0))
    np.testing.assert_allclose(prediction.probabilities_NC[:, 1], votes.mean(axis=0), atol=1e-6)
    sure = np.isin(votes.mean(axis=0), (0, 1))
    assert 0 < sure.mean() < 1
    np.testing.assert_array_equal(prediction.labels[sure], votes[0, sure])
    save_student(student, tmp_path / "student.safetensors")
    again = load_student(tmp_path / "student.safetensors")
    assert again.card == student.card
    np.testing.assert_array_equal(again.predict(x).probabilities_NC, prediction.probabilities_NC)


def test_a_table_mixes_what_the_network_says_by_group(tmp_path, x):
    student, groups = randomised(mixing=MIXING), np.arange(300) % 3
    said = make_student().predict(x).labels
    expected = np.array(MIXING)[groups, said]
    prediction = student.predict(x, groups, generator=np.random.default_rng(1))
    np.testing.assert_allclose(prediction.probabilities_NC, expected, atol=1e-6)
    np.testing.assert_array_equal(prediction.labels[groups == 0], said[groups == 0])
    draws = [student.predict(x, groups).labels for _ in range(300)]
    np.testing.assert_allclose(np.mean(draws, axis=0), expected[:, 1], atol=0.16)
    save_student(student, tmp_path / "student.safetensors")
    assert load_student(tmp_path / "student.safetensors").card == student.card
    with pytest.raises(ValueError, match="sensitive_features"):
        student.predict(x)


def test_a_table_mixes_a_mixture_too(x):
    student, groups = randomised(mixing=MIXING, num_members=3), np.arange(300) % 3
    shares = randomised(num_members=3).predict(x).probabilities_NC
    expected = np.einsum("nj,njk->nk", shares, np.array(MIXING)[groups])
    np.testing.assert_allclose(student.predict(x, groups).probabilities_NC, expected, atol=1e-6)
