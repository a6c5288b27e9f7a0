"""deploy/kuberay.yaml: read as Ray's autoscaler and Ray Serve read it, and the service's application run for real.

Ray and Ray Serve, half a second, are imported by the tests that need them: every worker collects this file.
"""

import copy
import inspect
import re
import socket
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pydantic
import pytest
import yaml
from command_lines import CommandError, check
from two_groups import untrained_student

from student.card import StudentFileError
from student.server import application
from student.student import save_student

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("light_runs"),
]

Resource = dict[str, Any]
TEXT = (Path(__file__).parents[2] / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")


@cache
def read() -> list[Resource]:
    return list(yaml.safe_load_all(TEXT))


@pytest.fixture
def resources() -> dict[str, Resource]:
    """A fresh copy of every object, by kind; volume claims by kind and name."""
    found: dict[str, Resource] = {}
    for resource in copy.deepcopy(read()):
        kind, name = resource["kind"], resource["metadata"]["name"]
        found[f"{kind}/{name}" if kind == "PersistentVolumeClaim" else kind] = resource  # of policies the last
    return found


@pytest.fixture
def clusters(resources: dict[str, Resource]) -> dict[str, Resource]:
    """The specifications of both Ray clusters."""
    return {"cluster": resources["RayCluster"]["spec"], "service": resources["RayService"]["spec"]["rayClusterConfig"]}


def autoscaling(spec: Resource) -> dict[str, Any]:
    """What Ray's autoscaler makes of a RayCluster; it validates the result against Ray's schema."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    resource = {"metadata": {"name": "fairpate", "namespace": "fairpate"}, "spec": copy.deepcopy(spec)}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(resource)
    return config


def pods(spec: Resource) -> Iterator[tuple[Resource, Resource]]:
    """Every group of a cluster with its pod."""
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        yield group, group["template"]["spec"]


def serve_config(resources: dict[str, Resource]) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(resources["RayService"]["spec"]["serveConfigV2"])
    return values


def test_the_autoscaler_reads_a_head_without_work_and_gpu_workers_from_zero(clusters: dict[str, Resource]) -> None:
    config = autoscaling(clusters["cluster"])
    nodes = config["available_node_types"]
    assert nodes["headgroup"]["resources"] | {"memory": 0} == {"CPU": 0, "GPU": 0, "memory": 0}
    assert nodes["gpu-worker"]["resources"] | {"memory": 0} == {"CPU": 8, "GPU": 1, "memory": 0}
    assert (nodes["gpu-worker"]["min_workers"], nodes["gpu-worker"]["max_workers"]) == (0, 16)
    assert config["idle_timeout_minutes"] == 5
    service = autoscaling(clusters["service"])["available_node_types"]
    assert service["headgroup"]["resources"]["CPU"] == 0
    assert all("GPU" not in node["resources"] for node in service.values())


@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec["workerGroupSpecs"][0].pop("minReplicas"),
        lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="many"),
        lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": "none"}),
        lambda spec: spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].pop("resources"),
        lambda spec: spec.pop("headGroupSpec"),
    ],
)
def test_a_damaged_cluster_is_not_read(clusters: dict[str, Resource], damage: Callable[[Resource], object]) -> None:
    damage(clusters["cluster"])
    with pytest.raises((KeyError, ValueError, TypeError, jsonschema.ValidationError)):
        autoscaling(clusters["cluster"])


def test_both_clusters_scale_ask_for_tokens_and_run_this_ray(clusters: dict[str, Resource]) -> None:
    for spec in clusters.values():
        assert spec["authOptions"] == {"mode": "token"}
        assert spec["enableInTreeAutoscaling"] is True
        assert spec["rayVersion"] == metadata.version("ray")
        assert {pod["containers"][0]["image"] for _, pod in pods(spec)} == {"REGISTRY/fairpate@sha256:" + "0" * 64}


def test_start_parameters_are_options_of_ray_start(clusters: dict[str, Resource]) -> None:
    for spec in clusters.values():
        for group, _ in pods(spec):
            check("ray start " + " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items()))
    with pytest.raises(CommandError):
        check("ray start --num-cpu=0")


def test_every_mounted_volume_is_there_and_every_claim_is_made(resources: dict[str, Resource]) -> None:
    claims = {name.partition("/")[2] for name in resources if name.startswith("PersistentVolumeClaim/")}
    clusters = [resources["RayCluster"]["spec"], resources["RayService"]["spec"]["rayClusterConfig"]]
    for spec in clusters:
        autoscaler = spec["autoscalerOptions"]
        for group, pod in pods(spec):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            programs = [*pod["initContainers"], *pod["containers"]]
            programs += [autoscaler] if group is spec["headGroupSpec"] else []
            assert {mount["name"] for each in programs for mount in each["volumeMounts"]} == volumes.keys()
            named = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in volumes.values()}
            assert named - {None} <= claims


def test_the_service_sees_public_files_only_and_the_ledger_has_one_writer(
    resources: dict[str, Resource], clusters: dict[str, Resource]
) -> None:
    for _, pod in pods(clusters["service"]):
        [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "storage"]
        assert (mount["subPath"], mount["readOnly"]) == ("public", True)
    [student] = [application["args"]["student"] for application in serve_config(resources)["applications"]]
    assert Path(student).parent == Path(mount["mountPath"])
    assert resources["PersistentVolumeClaim/fairpate-runs"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    holders = [group for group, pod in pods(clusters["cluster"]) if any(v["name"] == "runs" for v in pod["volumes"])]
    assert holders == [clusters["cluster"]["headGroupSpec"]]


def require_serve_config(config: dict[str, Any]) -> None:
    """Valid for Ray Serve, which passes over fields that it does not know: here they are a fault."""
    from ray._common.utils import import_attr
    from ray.serve.schema import ServeDeploySchema

    read = ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True)
    assert read.keys() == config.keys()
    assert read["http_options"].keys() == config["http_options"].keys()
    for found, given in zip(read["applications"], config["applications"], strict=True):
        assert found.keys() == given.keys()
        import_attr(given["import_path"])


def test_serve_accepts_the_configuration(resources: dict[str, Resource]) -> None:
    config = serve_config(resources)
    require_serve_config(config)
    [application] = config["applications"]
    for fault in (
        {"proxy_location": "Everywhere"},
        {"http_options": {"prt": 8000}},
        {"applications": [application, application]},
        {"applications": [application | {"arguments": {}}]},
        {"applications": [application | {"import_path": "student.server:app"}]},
    ):
        with pytest.raises((pydantic.ValidationError, AssertionError, AttributeError)):
            require_serve_config(config | fault)


def build(import_path: str, arguments: dict[str, Any]) -> Any:
    """The application that Ray Serve makes of these arguments."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    return call_user_app_builder_with_args_if_necessary(import_attr(import_path), arguments)


@pytest.fixture
def built(resources: dict[str, Resource], tmp_path: Path) -> Any:
    """Imported and built as Ray Serve does it; only the student's place is changed."""
    [application] = serve_config(resources)["applications"]
    save_student(untrained_student(), tmp_path / "student.safetensors")
    arguments = application["args"] | {"student": str(tmp_path / "student.safetensors"), "cpus_per_replica": 0}
    return build(application["import_path"], arguments)


def test_the_application_of_the_configuration_has_two_replicas(built: Any) -> None:
    from ray import serve

    assert isinstance(built, serve.Application)
    assert built._bound_deployment.name == "StudentReplica"
    assert built._bound_deployment.num_replicas == 2


# That two copies of the same application answer: tests/student/test_server.py
@pytest.mark.slow
@pytest.mark.campaign
def test_the_application_of_the_configuration_serves_a_student(
    resources: dict[str, Resource], built: Any, ray_session: None
) -> None:
    from ray import serve

    [application] = serve_config(resources)["applications"]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(built, name=application["name"], route_prefix=application["route_prefix"])
    try:
        records = {"records": [{"features": [0.0, 1.0, 2.0, 3.0]}]}
        reply = httpx.post(f"http://127.0.0.1:{port}/v1/predictions", json=records, timeout=120)
        assert reply.json()["labels"][0] in (0, 1)
        assert serve.status().applications["student"].deployments["StudentReplica"].replica_states == {"RUNNING": 2}
    finally:
        serve.shutdown()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"student": "/nowhere/student.safetensors"}, StudentFileError),
        ({"students": "/x"}, pydantic.ValidationError),
        ({}, pydantic.ValidationError),
        ({"student": "/x", "num_replicas": 0}, pydantic.ValidationError),
    ],
)
def test_an_application_that_cannot_serve_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    assert len(inspect.signature(application).parameters) == 1
    with pytest.raises(error):
        build("student.server:application", arguments)


def test_what_is_to_be_replaced_is_in_capitals() -> None:
    assert set(re.findall(r"\b[A-Z]{4,}(?:_[A-Z]+)*\b", TEXT)) <= {
        "REGISTRY",
        "SHARED_STORAGE_CLASS",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_TLS_CA_CERT",
        "RAY_TLS_SERVER_CERT",
        "RAY_TLS_SERVER_KEY",
        "RAY_USE_TLS",
        "FAIRPATE_STATE",
        "XDG_CACHE_HOME",
        "HTTPS",
    }
