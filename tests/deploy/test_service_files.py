"""Files that run and watch a service: alerts, dashboard, systemd unit, container; each held against the real thing."""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from command_lines import check
from serving import OPERATOR, ids, running, tokens_of_both_roles

from aggregator.service.api import ServiceMetrics
from aggregator.session import BudgetStatus
from teachers import work

pytestmark = pytest.mark.usefixtures("light_runs")

ROOT = Path(__file__).parents[2]
MONITORING, UNIT = ROOT / "deploy" / "monitoring", ROOT / "deploy" / "fairpate.service"
METRIC = re.compile(r"\bfairpate_\w+")


def run(tool, *arguments, text=None):
    """Its output; the test is skipped without the tool, and fails where the tool does."""
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool} on this machine")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, input=text, timeout=60)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def exposition(tmp_path_factory):
    """What a real service tells Prometheus as the operator."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    with running(path, tokens=tokens_of_both_roles()) as url:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        httpx.post(f"{url}/v1/queries", json=ids(range(20)), headers=headers)
        return httpx.get(f"{url}/v1/operator/metrics", headers=headers).text


def expressions():
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
    yield from (rule["expr"] for group in rules["groups"] for rule in group["rules"])
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_rules_and_scrape_are_what_prometheus_reads():
    assert "13 rules found" in run("promtool", "check", "rules", MONITORING / "rules.yaml")
    run("promtool", "check", "config", "--syntax-only", MONITORING / "prometheus.yaml")


def test_alerts_fire_on_the_days_that_they_are_for():
    assert "SUCCESS" in run("promtool", "test", "rules", MONITORING / "rules_test.yaml")


def test_the_exposition_is_well_formed(exposition):
    complaints = run("promtool", "check", "metrics", text=exposition)
    assert "error" not in complaints.lower()


def test_alerts_and_dashboard_name_metrics_that_there_are(exposition):
    there = set(METRIC.findall(exposition))
    for expression in expressions():
        assert set(METRIC.findall(expression)) <= there, expression


def test_the_metrics_of_training_are_watched_and_described():
    """As Ray exports them; tests/cluster reads them from a node."""
    exported = {f"ray_fairpate_{name}_total" for name in work.COUNTED} | {f"ray_fairpate_{work.DEVICE_MEMORY}"}
    named = re.compile(r"\bray_fairpate_\w+")
    assert {name for expression in expressions() for name in named.findall(expression)} == exported
    assert set(named.findall((ROOT / "docs" / "operations.md").read_text(encoding="utf-8"))) == exported


def test_the_dashboard_s_expressions_parse(tmp_path):
    """As rules, for a dashboard's variables are filled in before Prometheus reads them."""
    found = [text.replace("$instance", ".*") for text in expressions()]
    rules = [{"record": f"panel:{place}", "expr": text} for place, text in enumerate(found)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")
    run("promtool", "check", "rules", path)


def test_panels_do_not_overlap_and_say_what_is_private():
    panels = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        text = json.dumps(panel)
        if any(word in text for word in ("outcomes", "request_seconds", "data_dependent")):
            assert "publish" in panel["description"]


def test_every_alert_leads_to_a_runbook_that_is_there():
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text(encoding="utf-8"))
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {f"docs/operations.md#{heading.lower().replace(' ', '-')}" for heading in headings}
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["annotations"]["runbook"] in anchors


def unit_line(name):
    text = UNIT.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def test_the_unit_runs_a_command_that_there_is():
    (line,) = unit_line("ExecStart")
    assert check(line) == ["fairpate serve"]


def test_systemd_reads_the_unit_without_a_complaint(tmp_path):
    text = UNIT.read_text(encoding="utf-8").replace("/opt/fairpate/.venv/bin/fairpate", sys.executable)
    unit = tmp_path / "fairpate.service"
    unit.write_text(text.replace("User=fairpate", "User=root"), encoding="utf-8")
    assert run("systemd-analyze", "verify", "--man=no", unit) == ""


def test_systemd_counts_the_unit_as_little_exposed():
    told = run("systemd-analyze", "security", "--offline=true", "--no-pager", UNIT)
    assert float(re.search(r"Overall exposure level for \S+ ([\d.]+)", told)[1].rstrip(".")) < 3.0, told


JOBS = ("backup", "verify")


@pytest.mark.parametrize("name", JOBS)
def test_a_timer_starts_a_job_of_ours_and_systemd_reads_both_without_a_complaint(tmp_path, name):
    for suffix in ("service", "timer"):
        text = (ROOT / "deploy" / f"fairpate-{name}.{suffix}").read_text(encoding="utf-8")
        text = text.replace("/opt/fairpate/.venv/bin/fairpate", sys.executable).replace("User=fairpate", "User=root")
        (tmp_path / f"fairpate-{name}.{suffix}").write_text(text, encoding="utf-8")
    for suffix in ("service", "timer"):
        assert run("systemd-analyze", "verify", "--man=no", tmp_path / f"fairpate-{name}.{suffix}") == ""
    job = (ROOT / "deploy" / f"fairpate-{name}.service").read_text(encoding="utf-8")
    line = re.search(r"^ExecStart=(.*)$", job, re.MULTILINE)[1].replace("$$", "$").replace("%%", "%")
    # As systemd would run it, with a command that prints its own line.
    line = line.replace("/opt/fairpate/.venv/bin/fairpate", "/bin/echo fairpate")
    printed = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True).stdout  # noqa: S603
    assert check(printed) == [f"fairpate ledger {name}"]


def test_a_ledger_in_a_database_has_no_disk_to_be_alerted_of():
    """Its disk is the server's: a number for it would be an alert that fires for ever."""
    seen = {"queries_left": 1, "epsilon_data_dependent": 0.0, "open_reservations": 0, "last_backup_s": None}
    seen |= {"chain": {"fault": "", "at_s": 0.0}, "groups": [], "health": {"reasons": []}, "disk_free_bytes": None}
    status = BudgetStatus(
        kind="query_count",
        epsilon_limit=None,
        delta=1e-5,
        max_queries=10,
        queries_submitted=0,
        epsilon_submitted=0.0,
        closed=False,
    )
    assert "disk_free_bytes" not in ServiceMetrics().render_for_operator(status, seen).decode()
    assert "disk_free_bytes 5.0" in ServiceMetrics().render_for_operator(status, seen | {"disk_free_bytes": 5}).decode()


def test_the_container_is_asked_whether_it_is_alive_and_runs_a_command_that_there_is():
    text = (ROOT / "deploy" / "service.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    health = json.loads(re.search(r"HEALTHCHECK .*?CMD (\[.*\])", text)[1])
    assert "/livez" in health[-1]
    compile(health[-1], "health", "exec")
    words = [
        *json.loads(re.search(r"ENTRYPOINT (\[.*\])", text)[1]),
        *json.loads(re.findall(r"^CMD (.*)$", text, re.M)[0]),
    ]
    assert check(" ".join(words)) == ["fairpate serve"]


def test_the_pod_of_the_aggregator_is_one_and_its_probes_are_routes_of_the_service(tmp_path):
    found = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text())}
    spec = found["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")
    assert check(" ".join(container["command"])) == ["fairpate serve"]
    # Mounted as files: a variable would be seen by every process of the pod.
    assert not [each["name"] for each in container["env"] if "TOKEN" in each["name"]]
    options = {word.partition("=")[0] for word in container["command"] + container.get("args", [])}
    assert {"--analyst-token-file", "--operator-token-file"} <= options
    with running(tmp_path / "ledger.sqlite", tokens=tokens_of_both_roles()) as url:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert httpx.get(url + container[probe]["httpGet"]["path"]).status_code == 200
    labels = spec["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()


def test_logrotate_reads_its_file_and_moves_the_log_of_a_service_which_makes_a_new_one(tmp_path):
    """The log goes on under its name, and no line is lost or seen by others."""
    log = tmp_path / "service.jsonl"
    text = (ROOT / "deploy" / "fairpate.logrotate").read_text(encoding="utf-8")
    assert "/var/log/fairpate/*.jsonl" in text
    assert f"--log-file /var/log/fairpate/{log.name}" in unit_line("ExecStart")[0]
    text = text.replace("/var/log/fairpate/*.jsonl", str(log)).replace("su fairpate fairpate", "").replace("daily", "")
    (tmp_path / "conf").write_text(text, encoding="utf-8")
    (tmp_path / "conf").chmod(0o644)
    with running(tmp_path / "ledger.sqlite", tokens=tokens_of_both_roles(), log_file=log) as url:
        headers = {"Authorization": f"Bearer {OPERATOR}"}
        httpx.post(f"{url}/v1/queries", json=ids(range(2)), headers=headers)
        run("logrotate", "--force", "--state", tmp_path / "state", tmp_path / "conf")
        httpx.post(f"{url}/v1/queries", json=ids(range(3)), headers=headers)
    # A server of its own process ends with it; here its log would be opened by every later test.
    for handler in [each for each in logging.getLogger().handlers if getattr(each, "baseFilename", "") == str(log)]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    before, after = (path.read_text(encoding="utf-8") for path in (log.with_name(f"{log.name}.1"), log))
    assert before.count('"/v1/queries"') == after.count('"/v1/queries"') == 1
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["fairpate", *(f"fairpate-{job}" for job in JOBS)])
def test_units_have_a_folder_for_temporary_files_of_their_own(name):
    text = (ROOT / "deploy" / f"{name}.service").read_text(encoding="utf-8")
    assert re.search(r"^PrivateTmp=yes$", text, re.MULTILINE)
    assert re.search(r"^Environment=FAIRPATE_STATE=/var/lib/fairpate/state\b", text, re.MULTILINE)
