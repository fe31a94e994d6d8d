"""Files for containers, systemd and Kubernetes: schemas, what refers to what, and every flag."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from sglang.srt.server_args import ServerArgs

from sglang_importance.launch.flags import add_flags
from sglang_importance.upstream.refusal import LaunchRefused, exit_refused

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "scripts/deploy"
MONITORING = ROOT / "monitoring"
KUBERNETES = "1.31"
MANIFESTS = [
    DEPLOY / "kubernetes/server/server.yaml",
    DEPLOY / "kubernetes/fleet/postgres.yaml",
    DEPLOY / "kubernetes/fleet/router.yaml",
    MONITORING / "kubernetes.yaml",
]
SGLANG_HEALTH_SECONDS = 20
SGLANG_ENDING_SECONDS = 5 + 15
"""Until its launcher looks for a SIGTERM, and what it then gives schedulers to end."""

Document = dict[str, Any]


def documents(path: Path) -> list[Document]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def all_documents() -> list[Document]:
    return [document for path in MANIFESTS for document in documents(path)]


def named(kind: str, name: str) -> Document:
    (found,) = [each for each in all_documents() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> Iterator[tuple[Document, Document]]:
    """Each workload and the specification of its pods."""
    for document in all_documents():
        if document["kind"] in ("StatefulSet", "Deployment"):
            yield document, document["spec"]["template"]["spec"]


def containers() -> Iterator[Document]:
    for _, pod in pods():
        yield from pod["containers"]


def values() -> dict[str, str]:
    lines = (DEPLOY / "kubernetes/server/values.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    if not any("--kv-policy" in action.option_strings for action in parser._actions):
        add_flags(parser)  # else the plugin is active in this process
    return parser


# ---- Kubernetes ----


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_of_kubernetes_schema(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schema_notices_a_field_that_is_not_there() -> None:
    broken = json.loads(json.dumps(named("StatefulSet", "sgl-importance")))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", [DEPLOY / "kubernetes/server", DEPLOY / "kubernetes/fleet", MONITORING])
def test_kustomize_puts_them_together(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for document in built:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    configs = {each["metadata"]["name"]: each["data"] for each in built if each["kind"] == "ConfigMap"}
    used = set(re.findall(r"sgl-importance-(?:values|prometheus|grafana)-\w{10}", done.stdout))
    assert used == set(configs)
    if folder.name == "fleet":
        (servers,) = [
            each
            for each in built
            if each["metadata"]["name"] == "sgl-importance" and "replicas" in each["spec"]
        ]
        assert servers["spec"]["replicas"] > 1
        (data,) = configs.values()
        assert data["LEDGER"].startswith("postgresql://")
        assert data["MODEL_PATH"] == values()["MODEL_PATH"]
        names = [each["name"] for each in servers["spec"]["template"]["spec"]["containers"][0]["env"]]
        assert "PGPASSWORD" in names


def test_what_they_refer_to_is_there() -> None:
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload, _ in pods()]
    ports = {port["name"]: port["containerPort"] for each in containers() for port in each.get("ports", ())}
    for document in all_documents():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= set(ports)
    for workload, pod in pods():
        assert (
            workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
        )
        claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())]
        volumes = {*claims, *(each["name"] for each in pod.get("volumes", ()))}
        for container in pod["containers"]:
            assert {each["name"] for each in container.get("volumeMounts", ())} <= volumes
            own = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if get := container.get(probe, {}).get("httpGet"):
                    assert get["port"] in own


def test_every_pod_is_nobodys_root() -> None:
    for workload, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"], workload["metadata"]["name"]
        assert all("limits" in container["resources"] for container in pod["containers"])


# ---- servers ----


def arguments_of(container: Document, given: dict[str, str]) -> list[str]:
    names = {each["name"] for each in container.get("env", ())} | set(given)
    words = []
    for word in container["args"]:
        assert set(re.findall(r"\$\((\w+)\)", word)) <= names, word
        words.append(re.sub(r"\$\((\w+)\)", lambda found: given.get(found[1], "given"), word))
    return words


def test_a_servers_flags_are_sglangs_and_ours() -> None:
    (server,) = [each for each in containers() if each["name"] == "server"]
    parsed = server_parser().parse_args(arguments_of(server, values()))
    assert parsed.port == server["ports"][0]["containerPort"]
    assert set(values()) == {name for word in server["args"] for name in re.findall(r"\$\((\w+)\)", word)} - {
        "API_KEY"
    }
    paths = [mount["mountPath"] for mount in server["volumeMounts"]]
    assert any(parsed.kv_importance_store.startswith(f"{path}/") for path in paths)


def test_the_units_flags_are_sglangs_and_ours() -> None:
    unit = (DEPLOY / "sgl-importance.service").read_text()
    config = yaml.safe_load((DEPLOY / "server.yaml").read_text())
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in config.items()]
    parsed = server_parser().parse_args(words)
    state = re.search(r"StateDirectory=(.*)", unit)
    assert state
    assert parsed.kv_importance_store.startswith(f"/var/lib/{state[1]}/")
    credential = re.search(r"LoadCredential=(.*):/etc/sgl-importance/server.yaml", unit)
    assert credential
    assert f"--config ${{CREDENTIALS_DIRECTORY}}/{credential[1]}\n" in unit, "no other user may read the file"


def test_the_units_commands_work_on_a_fresh_machine(tmp_path: Path) -> None:
    unit = (DEPLOY / "sgl-importance.service").read_text()
    commands = re.findall(r"^# (install .*) (/\S+)$", unit, flags=re.MULTILINE)
    for command, target in commands:
        subprocess.run([*command.split(), f"{tmp_path}{target}"], cwd=ROOT, check=True)
    modes = {target: (tmp_path / target[1:]).stat().st_mode & 0o777 for _, target in commands}
    assert modes == {
        "/etc/sgl-importance/server.yaml": 0o600,
        "/etc/systemd/system/sgl-importance.service": 0o644,
    }


def test_a_server_that_crashed_is_started_again_and_a_refused_one_is_not() -> None:
    unit = (DEPLOY / "sgl-importance.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"\w+=", line))
    assert settings["Restart"] == "always"
    assert "SuccessExitStatus" not in settings, "sglang's launcher ends itself by SIGKILL where it crashed"
    with pytest.raises(SystemExit) as ended:
        exit_refused(LaunchRefused(["no"]))
    assert settings["RestartPreventExitStatus"] == str(ended.value.code)


def test_they_wait_for_answers_and_the_ledger() -> None:
    unit = (DEPLOY / "sgl-importance.service").read_text()
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop
    assert int(stop[1]) > SGLANG_ENDING_SECONDS + 60
    pod = named("StatefulSet", "sgl-importance")["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    before = int(server["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] > before + SGLANG_ENDING_SECONDS + 60
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["timeoutSeconds"] > SGLANG_HEALTH_SECONDS


def test_the_seconds_are_sglangs() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers import tokenizer_manager

    assert http_server.HEALTH_CHECK_TIMEOUT == SGLANG_HEALTH_SECONDS
    assert 5 + tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS == SGLANG_ENDING_SECONDS


def test_the_routers_flags_are_its() -> None:
    router_args = pytest.importorskip("sglang_router.router_args", reason="sglang-router is not installed")
    (router,) = [each for each in containers() if each["name"] == "router"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    router_args.RouterArgs.add_cli_args(parser, exclude_host_port=False)
    parsed = parser.parse_args(arguments_of(router, {}))
    service = named("Service", "sgl-importance")
    assert parsed.service_discovery_port == service["spec"]["ports"][0]["port"]
    assert dict(each.split("=") for each in parsed.selector) == service["spec"]["selector"]


def test_the_unit_is_systemds() -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        [verify, "verify", str(DEPLOY / "sgl-importance.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "sgl-importance.service" in line]
    assert all("Command /opt/sgl-importance/.venv/bin/python is not executable" in line for line in said), (
        said
    )


# ---- containers ----


@pytest.mark.parametrize("name", ["cpu.Containerfile", "cuda.Containerfile"])
def test_containers_start_servers_as_nobody(name: str) -> None:
    sys.path.insert(0, str(DEPLOY))
    try:
        from run_lines import stage
    finally:
        sys.path.remove(str(DEPLOY))
    lines = stage((DEPLOY / name).read_text(), None)
    found = dict(lines)
    assert found["USER"] == "1000"
    assert json.loads(found["ENTRYPOINT"])[-2:] == ["-m", "sglang.launch_server"]
    assert found["COPY"] == ". ."
    last_run = max(at for at, (instruction, _) in enumerate(lines) if instruction == "RUN")
    assert ("ENV", "PYTHONSAFEPATH=1") in lines[last_run:], "`kernels` is also the name of a folder of ours"
    for instruction, line in lines:
        for script in re.findall(r"scripts/[\w/.]+", line) if instruction == "RUN" else ():
            assert (ROOT / script).is_file()
    assert (DEPLOY / f"{name}.dockerignore").read_text().splitlines()[:3] == [".git", ".cache", ".venv"]


# ---- Prometheus and Grafana ----


def test_prometheus_scrapes_what_the_service_names() -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus-kubernetes.yml").read_text())["scrape_configs"]
    (local,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metric_relabel_configs"] == local["metric_relabel_configs"]
    (found,) = job["dns_sd_configs"]
    service = named("Service", "sgl-importance")
    assert (found["names"], found["port"]) == (
        [service["metadata"]["name"]],
        service["spec"]["ports"][0]["port"],
    )
    assert service["spec"]["clusterIP"] == "None"
    assert "--enable-metrics" in next(each["args"] for each in containers() if each["name"] == "server")


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (grafana,) = [each for each in containers() if each["name"] == "grafana"]
    mounts = {each["subPath"]: each["mountPath"] for each in grafana["volumeMounts"] if "subPath" in each}
    (provider,) = yaml.safe_load((MONITORING / "grafana/dashboards.yml").read_text())["providers"]
    assert Path(mounts["grafana.json"]).parent == Path(provider["options"]["path"])
    (source,) = yaml.safe_load((MONITORING / "grafana/datasources.yml").read_text())["datasources"]
    (variable,) = [each for each in grafana["env"] if f"${{{each['name']}}}" == source["url"]]
    service = named("Service", "sgl-importance-prometheus")
    assert variable["value"] == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert mounts["datasources.yml"].startswith("/etc/grafana/provisioning/datasources/")
    assert mounts["dashboards.yml"].startswith("/etc/grafana/provisioning/dashboards/")
