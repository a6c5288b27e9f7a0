"""The student on a real Ray Serve: replicas that predict, one gate that counts for all of them."""

import socket

import httpx
import numpy as np
import pytest
import torch
from two_groups import untrained_student

from fairpate.fairness.gate import filter_stream
from fairpate.types import GateRule
from student.predict import save_student
from student.replicas import BadRecordError, Record, read_features, serve_student, stop_student

RULE = GateRule(max_disparity=0.05, min_count=10)


@pytest.fixture(scope="module")
def student():
    return untrained_student(RULE)


@pytest.fixture(scope="module")
def url(student, ray_session, tmp_path_factory):
    path = tmp_path_factory.mktemp("student") / "student.safetensors"
    save_student(student, path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve_student(path, host="127.0.0.1", port=port, num_replicas=2, cpus_per_replica=0)
    yield f"http://127.0.0.1:{port}"
    stop_student()


@pytest.mark.slow
def test_replicas_share_one_gate(url, student):
    """Many small requests, spread over two replicas, are gated as one stream is."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((120, 4)).astype(np.float32)
    groups = generator.integers(0, 2, 120)
    x[groups == 1, 0] += 1.5
    labels = student.predict(torch.from_numpy(x), groups).labels
    expected = filter_stream(labels, groups, rule=RULE, num_groups=2, num_classes=2)
    shown = []
    for start in range(0, 120, 8):
        records = [
            {"features": x[i].tolist(), "group": student.card.group_names[groups[i]]} for i in range(start, start + 8)
        ]
        shown += httpx.post(f"{url}/v1/predictions", json={"records": records}, timeout=120).json()["labels"]
    assert shown == [int(label) if ok else None for label, ok in zip(labels, expected, strict=True)]
    assert None in shown
    assert httpx.get(f"{url}/v1/student").json()["group_names"] == ["red", "green"]
    bad = httpx.post(f"{url}/v1/predictions", json={"records": [{"features": [1, 2, 3], "group": "red"}]})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "records.0.features")


@pytest.mark.parametrize("features", [[1, 2, 3], [[1, 2, 3, 4]], [1, 2, 3, "x"], [1, 2, 3, 1e39], [1, [2], 3, 4]])
def test_a_record_of_another_shape_or_range_is_refused(features):
    with pytest.raises(BadRecordError, match="Expected"):
        read_features(Record(features=features, group="red"), 0, untrained_student().record_shape)


@pytest.mark.slow
def test_the_documentation_is_a_page_of_its_own_that_fetches_nothing(url):
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "/v1/predictions" in page.text
    assert "<script" not in page.text
    assert "//" not in page.text
