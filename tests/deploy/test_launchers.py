"""The launcher files: valid for Ray's own validator, and what this project needs of them."""

import contextlib
import copy
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from command_lines import CommandError, check
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]
AWS, ON_PREMISE = ROOT / "cluster.yaml", ROOT / "deploy" / "cluster-onprem.yaml"
LAUNCHERS = pytest.mark.parametrize("path", [AWS, ON_PREMISE], ids=lambda path: path.name)
TOKEN = str(Path("~", ".ray", "auth_token"))
AUTHORITY = str(Path("~", ".ray", "authority"))
PRIVATE = (".venv", ".git", "runs", "data")


def load(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def prepare(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of a file, before it asks the provider anything."""
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def commands(config: dict[str, Any]) -> list[str]:
    """Every shell line of a launcher file."""
    return [line for name, lines in config.items() if name.endswith("_commands") for line in lines]


def require_tokens(config: dict[str, Any]) -> None:
    starts = [line for line in commands(config) if re.search(r"\bray start\b", line)]
    assert len(starts) >= 2
    assert all("RAY_AUTH_MODE=token ray start" in re.sub(r"(RAY_worker\w+=\S+ )", "", line) for line in starts)
    assert config["file_mounts"][TOKEN] == TOKEN
    assert any(line.startswith("chmod 600 ~/.ray/auth_token") for line in commands(config))


def require_certificates(config: dict[str, Any]) -> None:
    """Every node signs itself a certificate before Ray starts, by which Ray, jobs and shells of users encrypt."""
    files = {"SERVER_CERT": "node.crt", "SERVER_KEY": "node.key", "CA_CERT": "ca.crt"}
    assert config["file_mounts"][AUTHORITY] == AUTHORITY
    assert any("chmod -R go= ~/.ray/authority" in line for line in commands(config))
    for name in ("head", "worker"):
        *before, start = config[f"{name}_start_ray_commands"]
        assert before[-1] == "fairpate cluster certificates ~/.ray/authority --node ~/.ray/certificate"
        (shell,) = (line for line in config["setup_commands"] if ".bashrc" in line)
        for line, home in ((start.partition("ray start")[0], "~"), (shell, "$HOME")):
            assert " RAY_USE_TLS=1 " in f" {line}"
            for variable, file in files.items():
                assert f"RAY_TLS_{variable}={home}/.ray/certificate/{file}" in line


def require_locked_install(config: dict[str, Any]) -> None:
    """This project comes at the versions of constraints.txt, anything else at one written down, and without more."""
    installs = [line.partition("pip install ")[2] for line in commands(config) if "pip install" in line]
    assert "--quiet --constraint constraints.txt '.[backbones,serve]'" in installs
    for options, separator, names in (
        line.partition("--no-deps ") for line in installs if "constraints.txt" not in line
    ):
        assert options.strip() == "--quiet"
        assert separator
        assert all("==" in name for name in names.split())


def carried(config: dict[str, Any]) -> set[str]:
    """What of PRIVATE would reach the nodes if the checkout had it."""
    excluded = set(config.get("rsync_exclude", []))
    mounted = [(ROOT / local).resolve() for local in config["file_mounts"].values() if not local.startswith("~")]
    private = {name: ROOT / name for name in PRIVATE if name not in excluded}
    return {name for name, path in private.items() for mount in mounted if path.is_relative_to(mount)}


@LAUNCHERS
def test_ray_accepts_the_file(path: Path) -> None:
    prepared = prepare(load(path))
    assert prepared["head_node_type"] in prepared["available_node_types"]


@LAUNCHERS
@pytest.mark.parametrize(
    "fault",
    [
        {"idle_timeout": 5},
        {"cluster_name": 5},
        {"max_workers": "many"},
        {"file_mounts": ["."]},
        {"setup_commands": "pip install ."},
        {"provider": {}},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_ray_rejects_what_is_wrong(path: Path, fault: dict[str, Any]) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError, TypeError, AttributeError)):
        prepare(load(path) | fault)


def test_ray_wants_a_head_among_the_node_types() -> None:
    with pytest.raises(ValueError, match="head_node_type"):
        prepare(load(AWS) | {"head_node_type": "somewhere"})


@LAUNCHERS
def test_every_command_exists_with_its_options(path: Path) -> None:
    found = [name for line in commands(prepare(load(path))) for name in check(line)]
    assert found.count("ray start") == found.count("ray stop") == 2


@LAUNCHERS
def test_an_option_that_ray_does_not_have_is_found(path: Path) -> None:
    for line in commands(load(path)):
        if "ray start" in line:
            with pytest.raises(CommandError, match="--object-store"):
                check(f"{line} --object-store-size=5")


@LAUNCHERS
def test_nodes_share_a_token_and_nothing_listens_without_it(path: Path) -> None:
    config = load(path)
    require_tokens(config)
    assert not any("--dashboard-host" in line for line in commands(config))
    for fault in (
        {"head_start_ray_commands": ["ray stop", "ray start --head"]},
        {"worker_start_ray_commands": ["RAY_AUTH_MODE=disabled ray start --address=$RAY_HEAD_IP:6379"]},
        {"file_mounts": {TOKEN: "token"}},
        {"setup_commands": []},
    ):
        with pytest.raises(AssertionError):
            require_tokens(config | fault)


@LAUNCHERS
def test_what_nodes_send_each_other_is_encrypted(path: Path) -> None:
    config = load(path)
    require_certificates(config)
    starts = config["worker_start_ray_commands"]
    for fault in (
        {"file_mounts": {TOKEN: TOKEN}},
        {"worker_start_ray_commands": [starts[0], starts[-1]]},
        {"worker_start_ray_commands": [*starts[:-1], starts[-1].replace("RAY_USE_TLS=1 ", "")]},
        {
            "head_start_ray_commands": [
                line.replace("node.key", "node.crt") for line in config["head_start_ray_commands"]
            ]
        },
        {"setup_commands": [line.replace("RAY_USE_TLS=1", "") for line in config["setup_commands"]]},
    ):
        with pytest.raises((AssertionError, KeyError)):
            require_certificates(config | fault)


@LAUNCHERS
def test_locked_versions_are_installed(path: Path) -> None:
    config = load(path)
    require_locked_install(prepare(config))  # as Ray completes it: what it would install by itself counts too
    for line in ("pip install .", "pip install --constraint constraints.txt . boto3", "true"):
        with pytest.raises(AssertionError):
            require_locked_install(prepare(config | {"setup_commands": [line]}))
    for line in ("pip install boto3", "pip install --no-deps boto3", "pip install boto3==1.44.5"):
        with pytest.raises(AssertionError):
            require_locked_install(prepare(config | {"head_setup_commands": [line]}))


def test_what_is_installed_has_dashboard_and_job_server() -> None:
    """They need the packages of ray[default]; this project's `serve` installs ray[serve]."""
    needs: dict[str, set[str]] = {"default": set(), "serve": set()}
    for requirement in metadata.requires("ray") or []:
        for extra, names in needs.items():
            if f'extra == "{extra}"' in requirement:
                names |= set(re.findall(r"^[\w-]+", requirement))
    assert needs["default"] <= needs["serve"]
    assert {"aiohttp", "virtualenv"} <= needs["default"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(name.startswith("ray[serve]") for name in project["optional-dependencies"]["serve"])


@LAUNCHERS
def test_what_is_installed_is_carried_and_nothing_private(path: Path) -> None:
    config = load(path)
    assert carried(config) == set()
    assert carried(config | {"file_mounts": {"~/fairpate": "."}}) == set(PRIVATE)
    assert carried(config | {"file_mounts": {"~/fairpate": "."}, "rsync_exclude": [".venv"]}) == set(PRIVATE) - {
        ".venv"
    }
    packages = {"fairpate", "teachers", "aggregator", "student"}
    needed = packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "configs"}
    assert set(config["file_mounts"].values()) - {TOKEN, AUTHORITY} == needed
    for local in needed:
        assert (ROOT / local).exists()
        assert config["file_mounts"][f"~/fairpate/{local}"] == local


def test_the_head_has_no_gpu_and_workers_come_from_zero_on_spot() -> None:
    config = prepare(load(AWS))
    head = config["available_node_types"].pop(config["head_node_type"])
    assert head["resources"] == {"CPU": 0}
    assert (head["min_workers"], head["max_workers"]) == (0, 0)
    assert "InstanceMarketOptions" not in head["node_config"]
    for worker in config["available_node_types"].values():
        assert worker["min_workers"] == 0 < worker["max_workers"]
        assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    gpus = {name: worker["resources"].get("GPU", 0) for name, worker in config["available_node_types"].items()}
    assert gpus == {"gpu_worker": 1, "cpu_worker": 0}


def test_every_node_has_the_role_and_an_encrypted_disk() -> None:
    for node in load(AWS)["available_node_types"].values():
        disk = node["node_config"]["BlockDeviceMappings"][0]["Ebs"]
        assert node["node_config"]["IamInstanceProfile"] == {"Name": "INSTANCE_PROFILE"}
        assert disk["Encrypted"]
        assert disk["DeleteOnTermination"]


@LAUNCHERS
def test_no_work_is_placed_on_the_head(path: Path) -> None:
    [start] = [line for line in load(path)["head_start_ray_commands"] if "--head" in line]
    assert "--num-cpus=0" in start


def test_the_image_has_the_locked_ray() -> None:
    locked = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert locked["ray"] == ray.__version__
    assert f"FROM rayproject/ray:{locked['ray']}-py3" in (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


def canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(text: str) -> dict[str, str]:
    return {canonical_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def test_the_image_installs_files_with_known_digests_and_nothing_else() -> None:
    """By digest the base, by digest each package, and all packages that one of them needs on the image's platform."""
    image = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^FROM \S+@\$RAY_DIGEST$", image, re.MULTILINE)
    assert not re.search(r"^ARG RAY_DIGEST=", image, re.MULTILINE)
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert "--build-arg RAY_DIGEST=sha256:DIGEST" in re.findall(r"^docker build .*$", page, re.MULTILINE)[0]
    service = (ROOT / "deploy" / "service.Dockerfile").read_text(encoding="utf-8")
    (check,) = re.findall(r"^RUN (.*)$", service, re.MULTILINE)
    for name, is_refused in (("registry/fairpate@sha256:" + "0" * 64, False), ("registry/fairpate:0.1.0", True)):
        # The line that a build of the service runs.
        done = subprocess.run(["/bin/sh", "-c", check], env={"IMAGE": name}, capture_output=True, check=False)  # noqa: S603
        assert bool(done.returncode) is is_refused
    first, second = re.findall(r"^RUN pip install (.*)$", image, re.MULTILINE)
    assert {"--require-hashes", "--requirement deploy/requirements.txt"} <= set(re.split(r" (?=--)", first))
    assert {"--no-deps", "--no-build-isolation", "--no-index"} <= set(second.split())
    text = (ROOT / "deploy" / "requirements.txt").read_text(encoding="utf-8")
    rows = [line for line in text.replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+ +--hash=sha256:[0-9a-f]{64}", row) for row in rows)
    locked = locked_versions(text)
    tested = locked_versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert {name for name in locked if name in tested and locked[name] != tested[name]} == set()
    # What is only there: CUDA's libraries, which torch asks for on that platform.
    assert all(re.match("cuda-|nvidia-|triton$", name) for name in locked.keys() - tested.keys())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], "setuptools>=77"]
    waiting += [each for extra in ("backbones", "serve") for each in project["optional-dependencies"][extra]]
    platform = {"python_version": "3.12", "python_full_version": "3.12.8", "sys_platform": "linux"}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked = Requirement(waiting.pop())
        name = canonical_name(asked.name)
        assert name in locked, name
        assert asked.specifier.contains(locked[name], prereleases=True), asked
        if (place := (name, frozenset(asked.extras))) in seen:
            continue
        seen.add(place)
        with contextlib.suppress(metadata.PackageNotFoundError):  # for CUDA: pip itself refuses what is missing
            for words in metadata.requires(name) or []:
                marker = Requirement(words).marker
                extras = ({"extra": extra} for extra in (*asked.extras, ""))
                if marker is None or any(marker.evaluate({**platform, **extra}) for extra in extras):
                    waiting.append(words)
    assert len(seen) > 80


@LAUNCHERS
def test_nodes_serve_no_metrics_which_ray_shows_without_the_token(path: Path) -> None:
    starts = [line for line in commands(load(path)) if re.search(r"\bray start\b", line)]
    assert all("RAY_enable_metrics_collection=0 " in line for line in starts)
