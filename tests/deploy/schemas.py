"""The schemas of Kubernetes' and KubeRay's objects that the chart uses, as `schemas.json` has them.

    pip install kubernetes-validate      # 110 MB: the schemas of all versions
    git clone --branch v1.6.2 https://github.com/ray-project/kuberay
    python tests/deploy/schemas.py kuberay/ray-operator/config/crd/bases

They are those of the two projects (both Apache License 2.0) without descriptions, and of Kubernetes only what the
kinds of KINDS need, for the chart's oldest version and the newest. KubeRay's copies of Kubernetes' schemas, pods above
all, are references to these. A field that no schema has is refused everywhere: an API server would leave it out
and go on.
"""

import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

STORED = Path(__file__).with_name("schemas.json")
VERSIONS = ("1.28", "1.37")
CORE, APPS, NETWORKING = (f"io.k8s.api.{group}.v1." for group in ("core", "apps", "networking"))
KINDS = [f"{CORE}PersistentVolumeClaim", f"{CORE}Service", f"{APPS}Deployment", f"{NETWORKING}NetworkPolicy"]
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
KUBERAY = {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayService": "rayservices"}
COPIED = {
    "template": "PodTemplateSpec",
    "submitterPodTemplate": "PodTemplateSpec",
    "headService": "Service",
    "serveService": "Service",
    "env": "EnvVar",
    "envFrom": "EnvFromSource",
    "volumeMounts": "VolumeMount",
    "resources": "ResourceRequirements",
    "securityContext": "SecurityContext",
    "valueFrom": "EnvVarSource",
}
OWN = {"rayClusterSpec", "rayClusterConfig"}
KEPT = ("type", "enum", "required", "minimum", "maximum", "pattern")


def reduced(schema: dict[str, Any], name: str = "", *, has_copies: bool = False) -> dict[str, Any]:
    """A schema without descriptions that refuses unknown fields. ``has_copies``: it is KubeRay's, and fields of certain
    names are copies of Kubernetes' schemas, which become references."""
    if has_copies and name in OWN:
        return {"$ref": "#/definitions/RayCluster"}
    if has_copies and name in COPIED and ("properties" in schema or "properties" in schema.get("items", {})):
        reference = {"$ref": f"#/definitions/{CORE}{COPIED[name]}"}
        return {"type": "array", "items": reference} if schema["type"] == "array" else reference
    if "$ref" in schema:
        return {"$ref": schema["$ref"].replace("$defs", "definitions")}
    kept = {key: schema[key] for key in KEPT if key in schema}
    if schema.get("x-kubernetes-int-or-string"):
        kept["type"] = ["integer", "string"]
    if "oneOf" in schema:
        kept["oneOf"] = [reduced(each) for each in schema["oneOf"]]
    if "items" in schema:
        kept["items"] = reduced(schema["items"], has_copies=has_copies)
    if "properties" in schema:
        kept["properties"] = {
            key: reduced(each, key, has_copies=has_copies) for key, each in schema["properties"].items()
        }
        kept["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = reduced(schema["additionalProperties"], has_copies=has_copies)
    return kept


def of_kubernetes(version: str) -> dict[str, Any]:
    """The definitions that KINDS and COPIED need, each by its name."""
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
    found: dict[str, Any] = {}
    waiting = [*KINDS, META, *(CORE + name for name in COPIED.values())]
    while waiting:
        if (name := waiting.pop()) not in found:
            found[name] = reduced(definitions[name])
            waiting += re.findall(r'#/definitions/([^"]+)', json.dumps(found[name]))
    return found


def main(folder: str) -> None:
    own = {}
    for kind, name in KUBERAY.items():
        definition = yaml.safe_load((Path(folder) / f"ray.io_{name}.yaml").read_text(encoding="utf-8"))
        (served,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
        own[kind] = reduced(served["schema"]["openAPIV3Schema"]["properties"]["spec"], has_copies=True)
    schemas = {version: {"definitions": of_kubernetes(version) | own} for version in VERSIONS}
    STORED.write_text(json.dumps(schemas, sort_keys=True, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
