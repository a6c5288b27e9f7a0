"""Objects of Kubernetes held against its schemas and KubeRay's, and whom its network policies let in."""

import functools
import ipaddress
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import schemas

Resource = dict[str, Any]


@functools.cache
def _definitions(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schemas.STORED.read_text(encoding="utf-8"))[version]
    return found


def require_valid(resource: Resource, version: str) -> None:
    """ValidationError for a field that a server of this version does not know, or whose value is of another kind."""
    kind = resource["kind"]
    if kind not in schemas.KUBERAY:
        (name,) = (each for each in schemas.KINDS if each.endswith(f".{kind}"))
        _validate(resource, name, version)
        return
    assert resource["apiVersion"] == "ray.io/v1"
    assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
    _validate(resource["metadata"], schemas.META, version)
    _validate(resource["spec"], kind, version)


def _validate(value: Any, name: str, version: str) -> None:
    schema = {"$ref": f"#/definitions/{name}"} | _definitions(version)
    jsonschema.Draft202012Validator(schema).validate(value)


def pods(resource: Resource) -> Iterator[Resource]:
    """The templates of all pods that come from an object."""
    spec = resource["spec"]
    if resource["kind"] == "Deployment":
        yield spec["template"]
    elif resource["kind"] == "RayJob":
        yield spec["submitterPodTemplate"]
    elif resource["kind"] in ("RayCluster", "RayService"):
        cluster = spec.get("rayClusterConfig", spec)
        yield from (group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])


def _selects(selector: Resource | None, labels: dict[str, str]) -> bool:
    selector = selector or {}
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def may_reach(
    policies: Sequence[Resource],
    *,
    labels: dict[str, str],
    port: int,
    of_pod: dict[str, str] | None = None,
    in_namespace: str = "fairpate",
    address: str = "192.0.2.1",
) -> bool:
    """Whether something may connect to a port of a pod with ``labels`` in the namespace of the policies: a pod with the
    labels ``of_pod``, or, if these are None, what is at an address outside the cluster. The rules are those of the
    documentation of NetworkPolicy."""
    return _may_pass("ingress", policies, labels, port, of_pod, in_namespace, address)


def may_send(
    policies: Sequence[Resource],
    *,
    labels: dict[str, str],
    port: int,
    to_pod: dict[str, str] | None = None,
    in_namespace: str = "fairpate",
    address: str = "192.0.2.1",
) -> bool:
    """Whether a pod with ``labels`` may connect to a port of another pod, or of an address outside the cluster, as far
    as its own policies say."""
    return _may_pass("egress", policies, labels, port, to_pod, in_namespace, address)


def _may_pass(
    way: str,
    policies: Sequence[Resource],
    labels: dict[str, str],
    port: int,
    of_pod: dict[str, str] | None,
    in_namespace: str,
    address: str,
) -> bool:
    chosen = [policy["spec"] for policy in policies if _selects(policy["spec"]["podSelector"], labels)]
    chosen = [spec for spec in chosen if way.capitalize() in spec["policyTypes"]]
    if not chosen:
        return True
    return any(
        _is_peer(rule.get("from" if way == "ingress" else "to"), of_pod, in_namespace, address)
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for spec in chosen
        for rule in spec.get(way, [])
    )


def _is_peer(peers: list[Resource] | None, of_pod: dict[str, str] | None, in_namespace: str, address: str) -> bool:
    if not peers:
        return True
    for peer in peers:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            if of_pod is None and ipaddress.ip_address(address) in ipaddress.ip_network(block["cidr"]):
                return True
        elif of_pod is not None:
            namespace = {"kubernetes.io/metadata.name": in_namespace}
            is_there = (
                _selects(peer["namespaceSelector"], namespace)
                if "namespaceSelector" in peer
                else in_namespace == "fairpate"
            )
            if is_there and _selects(peer.get("podSelector"), of_pod):
                return True
    return False
